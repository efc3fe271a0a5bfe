/* FlashMoE: exact attention and mixture-of-experts for NVIDIA GPUs and CPUs.
 *
 * This header and flashmoe/moe.h, which it includes, are the whole C ABI of libflashmoe. It is C99,
 * compiles as C++, and needs no CUDA headers. Rules that hold for every function:
 *
 *  - A function that can fail returns a flashmoe_status. On failure nothing has been written to
 *    any output, and flashmoe_last_error() gives one sentence that names the argument, what was
 *    given and what is accepted.
 *  - Every struct begins with `size_t struct_size`, set by its `..._init()` function. Fields are
 *    only ever appended; zero means the default, and so does a field beyond struct_size.
 *  - Tensors are views. The library reads and writes nothing outside them, keeps no pointer
 *    after it returns (asynchronous GPU work excepted), and allocates no device memory.
 *  - Outputs and the workspace share no byte with one another or with any other tensor of the call,
 *    or the call is refused. Slices of one array, along any axis, share none. Some stranger
 *    layouts, which only interleave, are refused. Inputs may overlap. Plans and workspace sizes
 *    touch no memory and do not check this: any aligned address but NULL does for a tensor with
 *    elements.
 *  - GPU work is launched on the caller's stream and never synchronised: calls can be captured
 *    into a CUDA graph. The current device is the same before and after a call.
 *  - All functions may be called from any thread at any time.
 */
#ifndef FLASHMOE_FLASHMOE_H_
#define FLASHMOE_FLASHMOE_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FLASHMOE_VERSION_MAJOR 0
#define FLASHMOE_VERSION_MINOR 2
#define FLASHMOE_VERSION_PATCH 0

#if defined(FLASHMOE_BUILDING) && defined(__GNUC__)
#define FLASHMOE_API __attribute__((visibility("default")))
#else
#define FLASHMOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * Status
 * ---------------------------------------------------------------------------------------------- */

/* Result of a call. The values never change. */
typedef enum flashmoe_status {
  FLASHMOE_OK = 0,
  FLASHMOE_ERROR_INVALID_ARGUMENT = 1,    /* an argument is wrong; the sentence names it */
  FLASHMOE_ERROR_UNSUPPORTED = 2,         /* a valid request that no kernel here serves */
  FLASHMOE_ERROR_ARCH_NOT_BUILT = 3,      /* the library holds no code for this device */
  FLASHMOE_ERROR_NO_DEVICE = 4,           /* no such device, or no driver */
  FLASHMOE_ERROR_WORKSPACE_TOO_SMALL = 5, /* ask flashmoe_..._workspace_size() */
  FLASHMOE_ERROR_CUDA = 6,                /* the CUDA runtime reported an error */
  FLASHMOE_ERROR_OUT_OF_MEMORY = 7,       /* the host is out of memory */
  FLASHMOE_ERROR_INTERNAL = 8             /* a defect of this library; please report it */
} flashmoe_status;

/* Name of a status, such as "FLASHMOE_OK". Never NULL; static storage. */
FLASHMOE_API const char* flashmoe_status_name(flashmoe_status status);

/* The sentence of the last failed call on this thread, or "" if none has failed. If there was no
 * memory to keep it, the sentence says so. Never NULL. Valid until the next failing call on this
 * thread. */
FLASHMOE_API const char* flashmoe_last_error(void);

/* ------------------------------------------------------------------------------------------------
 * Version, build and devices
 * ---------------------------------------------------------------------------------------------- */

/* Version of the loaded library: major * 10000 + minor * 100 + patch. */
FLASHMOE_API uint32_t flashmoe_version(void);

/* What is in this library. The strings are static. */
typedef struct flashmoe_build_info {
  size_t struct_size;
  const char* version;            /* "0.2.0" */
  const char* cuda_architectures; /* "89-real 90a-real 89-virtual", or "" for a CPU-only build */
  const char* cuda_compiler;      /* "13.0.88", or "" */
  const char* host_compiler;      /* "GNU 12.2.0" */
  const char* kernel_families;    /* "cpu sm89 sm90": what the `kernel` of a call may name */
  int32_t cuda_runtime_version;   /* 13000 for 13.0; 0 for a CPU-only build */
} flashmoe_build_info;

/* Fills *info. Errors: FLASHMOE_ERROR_INVALID_ARGUMENT (info is NULL, struct_size unknown). */
FLASHMOE_API flashmoe_status flashmoe_get_build_info(flashmoe_build_info* info);

/* Device types. All but the last equal DLPack's. */
typedef enum flashmoe_device_type {
  FLASHMOE_DEVICE_CPU = 1,        /* kDLCPU */
  FLASHMOE_DEVICE_CUDA = 2,       /* kDLCUDA */
  FLASHMOE_DEVICE_CUDA_HOST = 3,  /* kDLCUDAHost: pinned host memory, computed on the CPU */
  FLASHMOE_DEVICE_GPU_MODEL = 256 /* a flashmoe_gpu_model, to plan for */
} flashmoe_device_type;

/* Models of GPUs. A table of what a driver reports for each model gives plans, workspace sizes and
 * flashmoe_get_device_info() without a GPU or a driver. Nothing runs on a model. A CPU-only build
 * has no plans for GPUs and refuses models with FLASHMOE_ERROR_ARCH_NOT_BUILT. */
typedef enum flashmoe_gpu_model {
  FLASHMOE_GPU_H100 = 0, /* 80 GB, SXM */
  FLASHMOE_GPU_H200 = 1,
  FLASHMOE_GPU_L4 = 2,
  FLASHMOE_GPU_RTX_4090 = 3
} flashmoe_gpu_model;

typedef struct flashmoe_device {
  int32_t device_type; /* flashmoe_device_type */
  int32_t device_id;   /* for a model: flashmoe_gpu_model */
} flashmoe_device;

typedef struct flashmoe_device_info {
  size_t struct_size;
  char name[256];             /* "NVIDIA H200", "AMD EPYC 9B14" */
  char isa[32];               /* CPU: "avx512", "avx2" or "scalar"; GPU: "sm_90" */
  char kernel_family[32];     /* the family of long calls here; "" if none can run */
  int32_t compute_capability; /* GPU: 10 * major + minor; CPU: 0 */
  int32_t multiprocessors;    /* GPU: SM count; CPU: threads the library uses */
  int32_t driver_version;     /* GPU: CUDA version of the driver, 13000 for 13.0; CPU: 0 */
  int32_t reserved;
  uint64_t shared_bytes_per_block; /* GPU: opt-in maximum; CPU: 0 */
  uint64_t l2_bytes;
  uint64_t memory_bytes;
} flashmoe_device_info;

/* Number of usable CUDA devices: 0 without a GPU, without a driver or in a CPU-only build. Never
 * fails. */
FLASHMOE_API int32_t flashmoe_cuda_device_count(void);

/* Describes a device, or a model of GPUs. Errors: INVALID_ARGUMENT, NO_DEVICE, ARCH_NOT_BUILT. */
FLASHMOE_API flashmoe_status flashmoe_get_device_info(flashmoe_device device,
                                                      flashmoe_device_info* info);

/* Sets the number of threads that the CPU backend uses, including the caller's. n = 0 restores the
 * default: the environment variable FLASHMOE_NUM_THREADS if set, else the processors this process
 * may run on, limited to the quotas of its control groups, rounded up. Errors: INVALID_ARGUMENT
 * (n < 0 or n > 4096). */
FLASHMOE_API flashmoe_status flashmoe_set_num_threads(int32_t n);
FLASHMOE_API int32_t flashmoe_get_num_threads(void);

/* ------------------------------------------------------------------------------------------------
 * Log
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_log_level {
  FLASHMOE_LOG_OFF = 0,
  FLASHMOE_LOG_ERROR = 1, /* one line per failed call except WORKSPACE_TOO_SMALL */
  FLASHMOE_LOG_INFO = 2,  /* one line per launched call: shapes, plan, stream */
  FLASHMOE_LOG_DEBUG = 3  /* also why the other kernels were not chosen, and WORKSPACE_TOO_SMALL */
} flashmoe_log_level;

/* Receives one line without its newline. May be called from any thread that calls the library, and
 * may call it; what it calls logs nothing. */
typedef void (*flashmoe_log_callback)(int32_t level, const char* line, void* user);

/* Sets level and destination. Before the first call they come from the environment:
 * FLASHMOE_LOG_LEVEL (0 to 3) and FLASHMOE_LOG_FILE (a path, or "stdout"; default stderr). "%i" in
 * a path becomes the process id, in a forked child its own. A NULL callback keeps the current
 * destination. Logging never synchronises. Errors: INVALID_ARGUMENT (level out of range). */
FLASHMOE_API flashmoe_status flashmoe_set_log(int32_t level, flashmoe_log_callback callback,
                                              void* user);

/* ------------------------------------------------------------------------------------------------
 * Tensors
 * ---------------------------------------------------------------------------------------------- */

/* Type codes, equal to DLPack's. */
typedef enum flashmoe_dtype_code {
  FLASHMOE_DTYPE_INT = 0,           /* kDLInt: 32 and 64, indices */
  FLASHMOE_DTYPE_UINT = 1,          /* kDLUInt: 8, masks */
  FLASHMOE_DTYPE_FLOAT = 2,         /* kDLFloat: 16 = fp16, 32 = fp32, 64 = fp64 (on the CPU) */
  FLASHMOE_DTYPE_BFLOAT = 4,        /* kDLBfloat: 16 = bf16 */
  FLASHMOE_DTYPE_BOOL = 6,          /* kDLBool: 8, masks */
  FLASHMOE_DTYPE_FLOAT8_E4M3FN = 10 /* kDLFloat8_e4m3fn: 8, KV caches */
} flashmoe_dtype_code;

typedef struct flashmoe_dtype {
  uint8_t code; /* flashmoe_dtype_code */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} flashmoe_dtype;

/* A strided view, layout-identical to DLPack's DLTensor (any 1.x): a DLTensor* may be cast. */
typedef struct flashmoe_tensor {
  void* data;
  flashmoe_device device;
  int32_t ndim;
  flashmoe_dtype dtype;
  const int64_t* shape;   /* [ndim] elements */
  const int64_t* strides; /* [ndim] elements, may be negative; NULL = contiguous, row-major */
  uint64_t byte_offset;   /* added to data */
} flashmoe_tensor;

/* ------------------------------------------------------------------------------------------------
 * Plans and launches of every operation
 *
 * flashmoe_..._plan() tells how a call will be computed, and launches nothing.
 * flashmoe_last_launches() reads back what this thread's last call launched. Both give the same
 * list, in launch order. Only a call whose outputs are all empty may launch nothing, whatever its
 * plan lists.
 * ---------------------------------------------------------------------------------------------- */

/* The most launches of one call. */
#define FLASHMOE_MAX_LAUNCHES 16

/* One launch. On the CPU, grid[0] counts independent tiles and block[0] the threads that share
 * them. For attention whose lengths are in tensors, grid[0] counts pairs of a sequence and a KV
 * head, and block[0] is the most threads. These pairs are cut into tiles of at most tile_m rows
 * when the lengths are read. */
typedef struct flashmoe_launch {
  char kernel[64]; /* "attention_forward_sm89_bf16_d128_dv128" */
  flashmoe_device device;
  uint32_t grid[3];
  uint32_t block[3];
  int32_t cluster;       /* blocks per cluster; 0 or 1: no clusters */
  int32_t stages;        /* pipeline depth of the main loop's loads; 0 if it has none */
  uint64_t shared_bytes; /* shared memory of one block, static and dynamic */
  /* The tile of a block, or of a cluster that shares one; 0 where this does not apply. Attention:
   * tile_m query rows ("sm89_few_rows" and split KV: of all query heads that share keys) meet
   * tile_n keys per step ("sm89_few_rows": per warp). The call's head dimensions are padded to dim
   * and dim_v. Products of experts: tile_m rows of an expert's weights meet at most tile_n
   * tokens. */
  int32_t tile_m;
  int32_t tile_n;
  int32_t dim;
  int32_t dim_v;
  /* Read back by flashmoe_last_launches() from the loaded code; 0 in plans and on the CPU. */
  int32_t registers;   /* per thread */
  int32_t local_bytes; /* local memory per thread, including spills */
  int32_t binary_arch; /* architecture of the loaded code, 90 for sm_90 */
  /* How often the call launches it when a bounded workspace makes the call go in chunks. Neighbours
   * with the same number take turns. 0: once */
  int32_t repeats;
  int32_t reserved[2];
} flashmoe_launch;

typedef struct flashmoe_plan {
  size_t struct_size;
  char operation[32];  /* "attention_forward", "attention_backward", "moe_forward" */
  char family[16];     /* "sm90", "cpu"; of several operations in one, that of the last */
  char isa[16];        /* the code that runs: "sm_90a", "avx512" */
  double microseconds; /* the family's estimate, which decides the choice; 0: it has none */
  double flops;        /* FLOPs of the products, a multiply-add counting as two. Attention: pairs
                          hidden by causal or the window do not count. Experts: every pair counts as
                          if its expert were here. 0 if lengths are in tensors, which plans do not
                          read */
  double bytes;        /* bytes of the tensors that the call reads and writes, each counted once */
  uint64_t workspace_bytes;
  int32_t launch_count;
  int32_t reserved;
  char rejected[512]; /* why the other families do not serve it: "family: reason\n"... */
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES]; /* [launch_count] */
} flashmoe_plan;

static inline flashmoe_plan flashmoe_plan_init(void) {
  flashmoe_plan plan;
  memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  return plan;
}

/* Fills launches[0] to launches[*count - 1] with the launches of this thread's last call that
 * launched something. Errors: INVALID_ARGUMENT (launches or count is NULL, or nothing was launched
 * yet on this thread), CUDA. */
FLASHMOE_API flashmoe_status flashmoe_last_launches(flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES],
                                                    int32_t* count);

/* ------------------------------------------------------------------------------------------------
 * Attention, forward
 *
 *   out[b,i,h,:] = sum_j softmax_j(logit[b,i,j,h]) v[b,j,g,:]
 *   lse[b,h,i]   = log sum_j exp(logit[b,i,j,h])                           (natural logarithm)
 *   logit        = scale * q[b,i,h,:] . k[b,j,g,:], or with a softcap
 *                  softcap * tanh(scale * q[b,i,h,:] . k[b,j,g,:] / softcap)
 *                  plus attn_bias[b,h,i,j], if there is one
 *
 * with g = h / (heads_q / heads_kv), over the keys j that query i sees. Exact, by the online
 * softmax of Milakov and Gimelshein (arXiv:1805.02867) in the tiling of FlashAttention
 * (arXiv:2205.14135, arXiv:2307.08691); sums are accumulated in fp32, or in fp64 for fp64 inputs.
 * The same inputs give the same bits on every run. A query row that sees no key gives out 0 and lse
 * -inf.
 *
 *   q    [batch, seq_q, heads_q,  dim]     fp16, bf16; on the CPU also fp32 and fp64
 *   k    [batch, seq_k, heads_kv, dim]     same dtype and device as q, or fp8 (e4m3)
 *   v    [batch, seq_k, heads_kv, dim_v]   as k
 *   out  [batch, seq_q, heads_q,  dim_v]   same; its elements must not overlap one another
 *   lse  [batch, heads_q, seq_q]           fp32, with a q of fp64 fp64; any strides; NULL if not
 *                                          wanted
 *
 * in layout BSHD; in layout BHSD the second and third extents of q, k, v and out are exchanged.
 * dim and dim_v are multiples of 8, dim at most 576 and dim_v at most 512; heads_q is a multiple of
 * heads_kv. batch, seq_q and seq_k may be 0. In q, k, v and out the last stride is 1 and every row
 * begins on a 16-byte boundary. v may be the first columns of k, in the same memory. On a GPU,
 * dimensions beyond 256 require such a v, Hopper and sequences; they have no gradients.
 *
 * Query i stands at key i + A, with A = 0 for FLASHMOE_CAUSAL_TOP_LEFT and A = seq_k - seq_q
 * otherwise: the last query at the last key. Either end of the window may be absent; causal is a
 * right end of 0. A row reads no key or value that it does not see: a NaN there does not reach it.
 *
 *   attn_mask  [batch, heads_q, seq_q, seq_k]  bool or uint8: not 0 where query i of head h may see
 *                                              key j, on top of causal and the window; NULL: all
 *   attn_bias  the same                        fp32 or q's dtype: added to the logits after scale
 *                                              and softcap. -inf hides the key as attn_mask does; a
 *                                              finite number never does. NULL: 0
 *
 * in either layout, with any strides. Any extent may also be 1, which broadcasts, as a stride of 0
 * does. With sequences their extents differ: see below. In this version no GPU kernel reads them
 * together with scales or fp8 keys.
 *
 * Keys and values of fp8 are widened to q's dtype: fp16, bf16 or fp32, each of which holds every
 * e4m3 number. The call gives the bits of a call with the same schedule whose k and v hold these
 * numbers in q's dtype. Factors of fp32 scale them:
 *
 *   logit = scale * k_scale[b,g] * q[b,i,h,:] . k[b,j,g,:],    out = sum_j softmax_j v_scale[b,g] v
 *
 * where b is the batch row of key j, or with a page table its page. k_scale and v_scale are
 *
 *   []  or [1]                        one for all keys
 *   [heads_kv]                        one per KV head
 *   [batch of k or 1, heads_kv or 1]  one per row of k's batch, or per page, and head
 *
 * with any strides; NULL is 1. They multiply in fp32: k_scale a sum of products, v_scale a weight
 * or a sum of weighted values, never the widened numbers. The bits depend on the values of the
 * scales alone, not on their shape. A scale that is a power of two gives the bits of a call in q's
 * dtype whose k and v are already multiplied by it, wherever the products are normal numbers.
 * Scales of unused keys are not read and may be NaN. On the CPU, k and v of any other dtype but
 * fp64 take scales, too.
 *
 * The partial result of other keys can be merged in: a prefix that requests share, or the previous
 * part of a ring. out and lse then cover its keys and this call's, as if flashmoe_merge_states
 * merged the two, the given one first:
 *
 *   prior_out  [batch, seq_q, heads_q, dim_v]  in the layout of out: fp16, bf16 or fp32; fp64 where
 *                                              q is; NULL: none
 *   prior_lse  [batch, heads_q, seq_q]         as lse; with prior_out
 *
 * out may then have any of these dtypes instead of q's. out may be prior_out, with the same memory,
 * shape, strides and dtype; lse may be prior_lse. The call's own part is rounded to q's dtype, in
 * the workspace, before the two are merged in fp32. Sinks belong to this part.
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_layout {
  FLASHMOE_LAYOUT_BSHD = 0, /* [batch, seq, heads, dim] */
  FLASHMOE_LAYOUT_BHSD = 1  /* [batch, heads, seq, dim] */
} flashmoe_layout;

/* Which keys j a query i sees. The two causal alignments differ when seq_q != seq_k. */
typedef enum flashmoe_causal {
  FLASHMOE_CAUSAL_NONE = 0,         /* all */
  FLASHMOE_CAUSAL_BOTTOM_RIGHT = 1, /* j <= i + seq_k - seq_q: FlashAttention's */
  FLASHMOE_CAUSAL_TOP_LEFT = 2      /* j <= i: torch scaled_dot_product_attention's */
} flashmoe_causal;

/* Ends of the sliding window, as bits. Query i stands at key i + A and sees these keys. */
typedef enum flashmoe_window {
  FLASHMOE_WINDOW_LEFT = 1, /* j >= i + A - window_left */
  FLASHMOE_WINDOW_RIGHT = 2 /* j <= i + A + window_right */
} flashmoe_window;

/* ------------------------------------------------------------------------------------------------
 * Attention, ragged, padded and paged batches
 *
 * These tables say where the queries and keys of each sequence are.
 *
 * Every tensor is int32, has any stride and is on q's device; NULL is absent. A struct of zeros is
 * a dense batch. Lengths, offsets and page numbers are read when the call computes, never by a
 * plan. Whatever they say, no byte outside the tensors is read or written: a length or an offset
 * out of range is cut to what exists, and offsets that decrease leave no query and no key.
 *
 * Sequence b of `batch` has these queries:
 *
 *   without cu_seqlens_q  rows of q[b]; batch is q's
 *   cu_seqlens_q          rows cu_seqlens_q[b] to before cu_seqlens_q[b + 1] of q[0]. q and out are
 *                         then [1, total_q, heads_q, ...], lse is [1, heads_q, total_q], and batch
 *                         is the length of cu_seqlens_q less one. Offsets are clamped to 0 and
 *                         total_q, and a sequence that ends before it begins is empty. A row that
 *                         two sequences share gets the result of either.
 *   seqused_q             the first seqused_q[b] of those, as far as they exist
 *
 * Rows of q, out and lse that belong to no sequence are neither read nor written.
 *
 * Its keys and their values are these rows, in order:
 *
 *   without the others    rows of k[b] and v[b]
 *   batch_index           rows of k[batch_index[b]]; k and v have any batch
 *   cu_seqlens_k          rows cu_seqlens_k[b] to before cu_seqlens_k[b + 1] of k[0], as above; k
 *                         and v are [1, total_k, heads_kv, ...]
 *   page_table            k and v are [all pages, page_size, heads_kv, ...] with any page size (in
 *                         layout BHSD [all pages, heads_kv, page_size, ...]; strides give the order
 *                         in memory): row j is row j % page_size of page
 *                         page_table[b][j / page_size]. Sequences may share pages. Rows of a page
 *                         that does not exist (number below 0 or beyond the last) are hidden from
 *                         every query but keep their place among the keys.
 *   seqused_k             the first seqused_k[b] of those rows, as far as they exist
 *   k_begin               skips the first k_begin[b] of those: padding on the left, or a prefix
 *
 * At most one of batch_index, cu_seqlens_k and page_table is given.
 *
 * With n queries and m keys, counted from 0, query i of a sequence stands at its key i + A. A is 0
 * for FLASHMOE_CAUSAL_TOP_LEFT and m - n otherwise. With q_offset, A is q_offset[b] whatever causal
 * is: for drafts in front of the keys of others, and for the chunks of queries and keys on each
 * rank of context parallelism. It may be negative or beyond the keys; on GPUs sequences then have
 * at most 2^27 rows. Each sequence has the bits of a dense call of its queries and keys alone, on a
 * GPU with the same schedule.
 *
 * attn_mask and attn_bias are [sequences, heads_q, queries, keys]. Query i counts from the first of
 * its sequence, and key j from the first row of its sequence before k_begin applies: both are
 * places in the tensors in padded batches, in the sequence in packed ones, and in the page table
 * with pages. Queries and keys are at least as many as max_seqlen_q and max_seqlen_k allow; each of
 * the four extents may be 1, which broadcasts. A key that k_begin moves beyond the last column is
 * cut off, like one beyond max_seqlen_k.
 *
 * max_seqlen_q and max_seqlen_k bound n and m; rows beyond them are cut off at the end. 0 means as
 * many as the tensors hold. Loose bounds cost little, and the bits do not depend on them.
 *
 * Tables are read on the tensors' device when the call computes, so a GPU's plans and captured
 * graphs serve any lengths. flashmoe_check_sequences reports entries that are out of range.
 *
 * split_size says how a GPU may divide the keys of a sequence among blocks. 0: as suits the lengths
 * of all sequences. Otherwise in chunks of split_size keys, counted from the sequence's first,
 * whose results are added in order; a sequence of more than 32 chunks takes the least multiple of
 * split_size that makes at most 32. Then the bits of a sequence depend on nothing else in the
 * batch: not on the number of sequences, nor on where pages are or how large. The CPU's bits never
 * depend on these, and it needs no chunks. Backward ignores split_size.
 *
 * Backward takes the tables of the forward call except batch_index and page_table: keys that
 * sequences may share have no gradients. On the CPU each sequence has the bits of a dense call; on
 * GPUs sequences of equal lengths have those of a dense batch. All rows of dq, dk and dv are
 * written: rows that belong to no sequence become 0, or stay as they were with accumulate. Rows
 * that two sequences share (offsets that decrease) get the gradients of either or both; on GPUs
 * also of neither, 0, where there is no room for all.
 * ---------------------------------------------------------------------------------------------- */

/* Lengths, offsets and page tables of ragged, padded and paged batches. */
typedef struct flashmoe_attention_sequences {
  size_t struct_size;
  const flashmoe_tensor* cu_seqlens_q; /* [batch + 1] */
  const flashmoe_tensor* cu_seqlens_k; /* [batch + 1] */
  const flashmoe_tensor* seqused_q;    /* [batch] */
  const flashmoe_tensor* seqused_k;    /* [batch] */
  const flashmoe_tensor* k_begin;      /* [batch] */
  const flashmoe_tensor* batch_index;  /* [batch] */
  const flashmoe_tensor* page_table;   /* [batch, pages of a sequence] */
  int64_t max_seqlen_q;                /* 0 or more */
  int64_t max_seqlen_k;                /* 0 or more */
  int64_t split_size;                  /* 0 or more */
  const flashmoe_tensor* q_offset;     /* [batch] */
} flashmoe_attention_sequences;

static inline flashmoe_attention_sequences flashmoe_attention_sequences_init(void) {
  flashmoe_attention_sequences sequences;
  memset(&sequences, 0, sizeof sequences);
  sequences.struct_size = sizeof sequences;
  return sequences;
}

typedef struct flashmoe_attention_forward_params {
  size_t struct_size;
  const flashmoe_tensor* q;
  const flashmoe_tensor* k;
  const flashmoe_tensor* v;
  const flashmoe_tensor* out;
  const flashmoe_tensor* lse; /* NULL: not wanted */
  int32_t layout;             /* flashmoe_layout */
  int32_t causal;             /* flashmoe_causal */
  float scale;                /* finite and positive, also fp32 for fp64; 0 = 1 / sqrt(dim) */
  uint32_t reserved;          /* 0 */
  const char* kernel;         /* NULL: the best here. Else a kernel family ("cpu", "sm89"), a
                                 schedule of one ("sm90_split_kv") or a kernel's full name as a plan
                                 gives it: that one runs, or the call fails with the reason; it
                                 never falls back. */
  uint32_t window;            /* bits of flashmoe_window; 0: no window */
  float softcap;              /* finite and positive; 0: none */
  int64_t window_left;        /* keys before the query's, >= 0; 0 without FLASHMOE_WINDOW_LEFT */
  int64_t window_right;       /* keys behind the query's, >= 0; 0 without FLASHMOE_WINDOW_RIGHT, and
                                 with causal */
  const flashmoe_tensor* q_scale; /* for an 8-bit q, which this version does not take: NULL */
  const flashmoe_tensor* k_scale; /* fp32, see above; NULL: 1 */
  const flashmoe_tensor* v_scale;
  const flashmoe_attention_sequences*
      sequences;                /* NULL: every row of the batch has all of its tensors */
  const flashmoe_tensor* sinks; /* [heads_q], fp32 or q's dtype, any stride; NULL: none. One logit
                                   per head, in natural units and without scale and softcap, that
                                   takes part in the softmax of every row and has no value: lse
                                   counts it, and a row that sees no key has it as its lse. -inf is
                                   no sink, +inf leaves nothing to the keys. */
  const flashmoe_tensor* attn_bias; /* NULL: none */
  const flashmoe_tensor* attn_mask; /* NULL: none */
  const flashmoe_tensor* prior_out; /* NULL: nothing is merged in */
  const flashmoe_tensor* prior_lse;
} flashmoe_attention_forward_params;

static inline flashmoe_attention_forward_params flashmoe_attention_forward_params_init(void) {
  flashmoe_attention_forward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_attention_forward would do with these arguments; launches
 * nothing, reads no tensor data. Errors: those of flashmoe_attention_forward, except about
 * memory. */
FLASHMOE_API flashmoe_status flashmoe_attention_forward_plan(
    const flashmoe_attention_forward_params* params, flashmoe_plan* plan);

/* Bytes of workspace that the call needs; often 0. On a GPU at most 16 MiB, or 0.3 MiB per
 * multiprocessor with split_size or where v is the first columns of k; and up to 64 bytes for each
 * sequence, and for each tile of its queries and each head. prior_out adds out and lse of the
 * call's own part. On the CPU the workspace of every operation depends on the number of threads. A
 * size stays enough when that number changes, since a call uses no more threads than it has room
 * for. */
FLASHMOE_API flashmoe_status flashmoe_attention_forward_workspace_size(
    const flashmoe_attention_forward_params* params, size_t* bytes);

/* Computes out and, if given, lse.
 *
 *   workspace    memory of the tensors' device, 16-byte aligned, workspace_size bytes; may be NULL
 *                when none is needed. Its content is ignored and overwritten.
 *   stream       a cudaStream_t of the tensors' device (NULL: the default stream); ignored on
 *                the CPU, where the call returns when the result is there.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL, CUDA,
 * OUT_OF_MEMORY. */
FLASHMOE_API flashmoe_status
flashmoe_attention_forward(const flashmoe_attention_forward_params* params, void* workspace,
                           size_t workspace_size, void* stream);

/* ------------------------------------------------------------------------------------------------
 * Attention, backward
 *
 * Computes the gradients of a loss with respect to q, k, v and sinks from those with respect to out
 * and, if used, lse. With the names above:
 *
 *   p[b,i,j,h]      = exp(logit[b,i,j,h] - lse[b,h,i])
 *   delta[b,h,i]    = dout[b,i,h,:] . out[b,i,h,:]
 *   dv[b,j,g,:]     = sum_h sum_i p[b,i,j,h] dout[b,i,h,:]
 *   dlogit[b,i,j,h] = p[b,i,j,h] (dout[b,i,h,:] . v[b,j,g,:] - delta[b,h,i] + dlse[b,h,i])
 *   dscore          = scale * dlogit, with a softcap times 1 - (logit / softcap)^2
 *   dk[b,j,g,:]     = sum_h sum_i dscore[b,i,j,h] q[b,i,h,:]
 *   dq[b,i,h,:]     = sum_j dscore[b,i,j,h] k[b,j,g,:]
 *   dsinks[h]       = sum_b sum_i exp(sinks[h] - lse[b,h,i]) (dlse[b,h,i] - delta[b,h,i])
 *
 * over the query heads h of KV head g, and the pairs where query i sees key j. Sums are accumulated
 * in fp32, or in fp64 for fp64 inputs. The same inputs give the same bits on every run. A query
 * that sees no key has a gradient of 0, and so has a key that no query sees, whatever the tensors
 * hold.
 *
 *   dout  as out                          the gradient of out, of q's dtype
 *   q, k, v, out                          as in the forward call, whose out it is; its rows may
 *                                         overlap
 *   lse   [batch, heads_q, seq_q]         as in the forward call, which need not be this library's
 *   dlse  [batch, heads_q, seq_q]         its gradient, of its dtype; NULL if lse is not used
 *   dq    as q                            of q's dtype or fp32; NULL if not wanted
 *   dk    as k                            same
 *   dv    as v                            same
 *   sinks [heads_q]                       as in the forward call; read for dsinks alone, since lse
 *                                         counts them
 *   dsinks [heads_q]                      dtype of sinks or fp32, any stride; NULL if not wanted. A
 *                                         sink of -inf has gradient 0.
 *   attn_bias, attn_mask                  as in the forward call. The bias has no gradient here.
 *
 * At least one of dq, dk, dv and dsinks is required. Their elements must not overlap one another.
 * In dq, dk and dv the last stride is 1 and every row begins on a 16-byte boundary.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_attention_backward_params {
  size_t struct_size;
  const flashmoe_tensor* dout;
  const flashmoe_tensor* q;
  const flashmoe_tensor* k;
  const flashmoe_tensor* v;
  const flashmoe_tensor* out;
  const flashmoe_tensor* lse;
  const flashmoe_tensor* dlse;  /* NULL: 0 */
  const flashmoe_tensor* sinks; /* NULL: none, and no dsinks */
  const flashmoe_tensor* dq;    /* NULL: not wanted */
  const flashmoe_tensor* dk;
  const flashmoe_tensor* dv;
  const flashmoe_tensor* dsinks;
  int32_t layout; /* from here as in the forward call */
  int32_t causal;
  float scale;
  float softcap;
  uint32_t window;
  int32_t accumulate; /* 0: gradients are written; 1: they are added to the output */
  int64_t window_left;
  int64_t window_right;
  const char*
      kernel; /* as in the forward call: a family, or a kernel's full name; NULL: the best */
  const flashmoe_attention_sequences* sequences; /* as in the forward call; NULL: a dense batch */
  const flashmoe_tensor* attn_bias;              /* as in the forward call; NULL: none */
  const flashmoe_tensor* attn_mask;
} flashmoe_attention_backward_params;

static inline flashmoe_attention_backward_params flashmoe_attention_backward_params_init(void) {
  flashmoe_attention_backward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_attention_backward would do with these arguments; launches
 * nothing, reads no tensor data. Errors: those of flashmoe_attention_backward, except about
 * memory. */
FLASHMOE_API flashmoe_status flashmoe_attention_backward_plan(
    const flashmoe_attention_backward_params* params, flashmoe_plan* plan);

/* Bytes of workspace that the call needs: proportional to the rows of q, not to pairs of a query
 * and a key. On the CPU they depend on the number of threads, like those of
 * flashmoe_attention_forward_workspace_size. */
FLASHMOE_API flashmoe_status flashmoe_attention_backward_workspace_size(
    const flashmoe_attention_backward_params* params, size_t* bytes);

/* Computes those of dq, dk, dv and dsinks that are given. workspace and stream: as in
 * flashmoe_attention_forward. On a GPU, family sm90 computes it on compute capability 9.0, and
 * family sm89 on 8.9 and newer.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL, CUDA,
 * OUT_OF_MEMORY. */
FLASHMOE_API flashmoe_status
flashmoe_attention_backward(const flashmoe_attention_backward_params* params, void* workspace,
                            size_t workspace_size, void* stream);

/* ------------------------------------------------------------------------------------------------
 * Merging partial results of attention
 *
 * Merges the results of attention over separate parts of the keys: prefixes that requests share,
 * pages of another level, the shards of a ring, the splits of a long sequence. With partials out_i
 * and lse_i, for each row and head
 *
 *   lse = log sum_i exp(lse_i)                                              (natural logarithm)
 *   out = sum_i exp(lse_i - lse) out_i
 *
 * in the order of the partials, prior_out first: the same inputs give the same bits on every run
 * and with any number of threads. Sums are accumulated in fp32, or in fp64 for fp64 inputs, and
 * every partial is read once.
 *
 *   outs       [partials, batch, seq, heads, dim_v]  fp16, bf16, fp32, on the CPU also fp64; or of
 *                                                    rank 4, without the first axis: one partial
 *   lses       [partials, batch, heads, seq]         fp32, with outs of fp64 fp64; any strides; of
 *                                                    rank 3 with outs of rank 4
 *   prior_out  [batch, seq, heads, dim_v]            one more partial, before the others: fp16,
 *                                                    bf16 or fp32; with outs of fp64 fp64. NULL:
 *                                                    none
 *   prior_lse  [batch, heads, seq]                   as lses; NULL without prior_out
 *   out        [batch, seq, heads, dim_v]            fp16, bf16 or fp32, whichever the partials
 *                                                    are; with outs of fp64 fp64
 *   lse        [batch, heads, seq]                   as lses; NULL if not wanted
 *
 * in layout BSHD; in layout BHSD seq and heads of outs, prior_out and out are exchanged. dim_v is a
 * multiple of 8, and every other extent may be 0: without partials, out is 0 and lse -inf. In outs,
 * prior_out and out the last stride is 1 and every row begins on a 16-byte boundary. Attention
 * calls can write their partials to slices of one array, which then is outs without a copy. For two
 * separate partials, one is prior_out and the other outs of rank 4.
 *
 * In place: out may be prior_out, with the same memory, shape, strides and dtype, and lse may be
 * prior_lse, so that a ring adds to what it has. No other output may overlap an input.
 *
 * A partial with an lse of -inf (its row saw no key) has weight 0, and its out is not read: a NaN
 * in it does not reach the result. If all partials are such, out is 0 and lse -inf. Partials with
 * an lse of +inf share the row equally and leave weight 0 to the others, as attention's sink of
 * +inf does; lse is then +inf. An lse of NaN makes the row's out and lse NaN. Otherwise IEEE
 * arithmetic holds: a NaN in a partial's out reaches that row however small its weight.
 *
 * A sink must count once: give sinks to the call of one partial only, whose lse then counts it, or
 * merge a separate partial with out 0 and the sink as its lse.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_merge_states_params {
  size_t struct_size;
  const flashmoe_tensor* outs;
  const flashmoe_tensor* lses;
  const flashmoe_tensor* prior_out; /* NULL: none */
  const flashmoe_tensor* prior_lse;
  const flashmoe_tensor* out;
  const flashmoe_tensor* lse; /* NULL: not wanted */
  const char* kernel;         /* as in flashmoe_attention_forward */
  int32_t layout;             /* flashmoe_layout */
  uint32_t reserved;          /* 0 */
} flashmoe_merge_states_params;

static inline flashmoe_merge_states_params flashmoe_merge_states_params_init(void) {
  flashmoe_merge_states_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_merge_states would do with these arguments; launches nothing,
 * reads no tensor data. Errors: those of flashmoe_merge_states, except about memory. */
FLASHMOE_API flashmoe_status flashmoe_merge_states_plan(const flashmoe_merge_states_params* params,
                                                        flashmoe_plan* plan);

/* Bytes of workspace the call needs: none in this version. */
FLASHMOE_API flashmoe_status
flashmoe_merge_states_workspace_size(const flashmoe_merge_states_params* params, size_t* bytes);

/* Computes out and, if given, lse. workspace and stream: as in flashmoe_attention_forward.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL, CUDA,
 * OUT_OF_MEMORY. */
FLASHMOE_API flashmoe_status flashmoe_merge_states(const flashmoe_merge_states_params* params,
                                                   void* workspace, size_t workspace_size,
                                                   void* stream);

/* ------------------------------------------------------------------------------------------------
 * Checking the tables of sequences
 *
 * Attention silently counts table entries that are out of range as no query and no key: the tables
 * are on the device, and no call waits for them. This call finds such entries, next to attention or
 * instead of it. It reads only the tables, and its findings stay on the device until the caller
 * reads them.
 *
 *   q, k       as in the attention call, of any dtype: only their extents are used
 *   sequences  the tables of that call, and its bounds
 *   status     [batch] int32, any stride: bits of flashmoe_sequence_fault per sequence; 0 if
 *              nothing is wrong
 *
 * A wrong length counts as one fault: later lengths are checked against what attention makes of it.
 * A page number is checked if the sequence has a key in that page.
 * ---------------------------------------------------------------------------------------------- */

/* What is wrong with the tables of a sequence, as bits. Each names the argument at fault. */
typedef enum flashmoe_sequence_fault {
  FLASHMOE_FAULT_CU_SEQLENS_Q = 1,   /* its offsets decrease, or leave q */
  FLASHMOE_FAULT_SEQUSED_Q = 2,      /* below 0, or more than there are rows */
  FLASHMOE_FAULT_CU_SEQLENS_K = 4,   /* its offsets decrease, or leave k */
  FLASHMOE_FAULT_SEQUSED_K = 8,      /* below 0, or more than there are rows */
  FLASHMOE_FAULT_K_BEGIN = 16,       /* below 0, or more than there are keys */
  FLASHMOE_FAULT_BATCH_INDEX = 32,   /* no row of k's batch */
  FLASHMOE_FAULT_PAGE_TABLE = 64,    /* a page that does not exist */
  FLASHMOE_FAULT_MAX_SEQLEN_Q = 128, /* more queries than that: attention leaves them out */
  FLASHMOE_FAULT_MAX_SEQLEN_K = 256  /* more keys than that */
} flashmoe_sequence_fault;

typedef struct flashmoe_check_sequences_params {
  size_t struct_size;
  const flashmoe_tensor* q;
  const flashmoe_tensor* k;
  const flashmoe_attention_sequences* sequences;
  const flashmoe_tensor* status;
  const char* kernel; /* as in flashmoe_attention_forward */
  int32_t layout;     /* flashmoe_layout */
  uint32_t reserved;  /* 0 */
} flashmoe_check_sequences_params;

static inline flashmoe_check_sequences_params flashmoe_check_sequences_params_init(void) {
  flashmoe_check_sequences_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_check_sequences would do with these arguments; launches nothing,
 * reads no tensor data. Errors: those of flashmoe_check_sequences, except about memory. */
FLASHMOE_API flashmoe_status
flashmoe_check_sequences_plan(const flashmoe_check_sequences_params* params, flashmoe_plan* plan);

/* Bytes of workspace the call needs: none in this version. */
FLASHMOE_API flashmoe_status flashmoe_check_sequences_workspace_size(
    const flashmoe_check_sequences_params* params, size_t* bytes);

/* Writes to status. On a GPU one launch does so and reads the tables after all earlier work on the
 * stream has ended. workspace and stream: as in flashmoe_attention_forward.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL. */
FLASHMOE_API flashmoe_status flashmoe_check_sequences(const flashmoe_check_sequences_params* params,
                                                      void* workspace, size_t workspace_size,
                                                      void* stream);

/* ------------------------------------------------------------------------------------------------
 * Appending to a cache of keys and values
 *
 * Writes new keys and values to rows of a cache that attention reads with its sequences, and
 * rotates keys and queries on the way (rotary position embeddings). Each row is read once and
 * written once.
 *
 *   k        [batch, seq, heads_kv, dim]      new keys: fp16, bf16, fp32; on the CPU fp64
 *   v        [batch, seq, heads_kv, dim_v]    new values, of k's dtype
 *   k_cache  [rows of a batch, rows, heads_kv, dim], or with page_table or slots [pages, page_size,
 *                                             heads_kv, dim]; k's dtype, or fp8 (e4m3) if that has
 *                                             at most 32 bits. Rows that get no new key stay as
 *                                             they are.
 *   v_cache  as k_cache                       with dim_v
 *
 * in layout BSHD; in layout BHSD the second and third extents are exchanged, in pages too. dim and
 * dim_v are multiples of 8 up to 1024, and every other extent may be 0. The last stride is 1 and
 * every row begins on a 16-byte boundary. Sequence b has the new rows of k[b], or with
 *
 *   cu_seqlens     [batch + 1]     those from cu_seqlens[b] to before cu_seqlens[b + 1] of k[0]; k
 *                                  is then [1, total, heads_kv, dim]
 *   seqused        [batch]         of these the first seqused[b]
 *
 * The i-th of these becomes row cache_seqlens[b] + i of its keys, which are
 *
 *   without the others    the rows of k_cache[b]
 *   batch_index [batch]   the rows of k_cache[batch_index[b]]
 *   page_table [batch, pages of a sequence]
 *                         those of the pages that page_table[b] names, in order
 *
 *   cache_seqlens  [batch]         how many keys of each sequence the cache has already; NULL: none
 *
 * Or, without any of these,
 *
 *   slots [batch, seq]    row i of k[b] becomes row slots[b][i] % page_size of page
 *                         slots[b][i] / page_size; a row with a negative slot is not written
 *
 * Rotation: with rotary_cos and rotary_sin the first rotary_dim numbers of each head are rotated.
 * At position p a pair (x, y) becomes
 *
 *   (x cos[p][i] - y sin[p][i], y cos[p][i] + x sin[p][i])
 *
 * in fp32, or in fp64 for fp64 inputs. Pair i is numbers i and i + rotary_dim / 2
 * (FLASHMOE_ROTARY_NEOX), or 2 i and 2 i + 1 (FLASHMOE_ROTARY_INTERLEAVED). The other numbers stay.
 *
 *   rotary_cos [positions, rotary_dim / 2]   of k's dtype or fp32, of fp64 fp64; the last stride 1
 *   rotary_sin as rotary_cos
 *   positions [batch, seq]                   the position of each row of k and of q; NULL:
 *                                            cache_seqlens[b] + i for row i. Required with slots.
 *   q         [batch, seq_q, heads_q, dim]   rotated in the same call, any heads_q; with cu_seqlens
 *                                            or positions seq_q is seq. NULL: none
 *   q_out     as q                           may be q itself: same memory, shape and strides
 *   q_stays   1: all of a sequence's queries stand where its first does
 *
 * A cache of fp8 gets each new number (rotated, in k's dtype) divided by its scale in fp32 and
 * rounded to nearest, ties to even. Numbers beyond the largest, 448, saturate to it; NaN stays NaN.
 * k_scale and v_scale are as in flashmoe_attention_forward; NULL is 1.
 *
 * Tables are int32, slots and positions int32 or int64, with any stride. They are read when the
 * call computes, and no number leads outside a tensor: a row is not written if the cache has no
 * such place, if rotary_cos has no such position, or if its sequence's cache_seqlens is negative.
 * If two new rows go to the same place, its content is undefined.
 * ---------------------------------------------------------------------------------------------- */

typedef enum flashmoe_rotary {
  FLASHMOE_ROTARY_NEOX = 0,
  FLASHMOE_ROTARY_INTERLEAVED = 1
} flashmoe_rotary;

typedef struct flashmoe_kv_append_params {
  size_t struct_size;
  const flashmoe_tensor* k;
  const flashmoe_tensor* v;
  const flashmoe_tensor* k_cache;
  const flashmoe_tensor* v_cache;
  const flashmoe_tensor* slots; /* this and all below may be NULL */
  const flashmoe_tensor* cache_seqlens;
  const flashmoe_tensor* cu_seqlens;
  const flashmoe_tensor* seqused;
  const flashmoe_tensor* batch_index;
  const flashmoe_tensor* page_table;
  const flashmoe_tensor* positions;
  const flashmoe_tensor* rotary_cos;
  const flashmoe_tensor* rotary_sin;
  const flashmoe_tensor* q;
  const flashmoe_tensor* q_out;
  const char* kernel;             /* as in flashmoe_attention_forward */
  int32_t layout;                 /* flashmoe_layout */
  int32_t rotary;                 /* flashmoe_rotary; read with rotary_cos */
  int32_t q_stays;                /* 0 or 1 */
  uint32_t reserved;              /* 0 */
  const flashmoe_tensor* k_scale; /* only for fp8 caches; NULL: 1 */
  const flashmoe_tensor* v_scale;
} flashmoe_kv_append_params;

static inline flashmoe_kv_append_params flashmoe_kv_append_params_init(void) {
  flashmoe_kv_append_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_kv_append would do with these arguments; launches nothing, reads
 * no tensor data. Errors: those of flashmoe_kv_append, except about memory. */
FLASHMOE_API flashmoe_status flashmoe_kv_append_plan(const flashmoe_kv_append_params* params,
                                                     flashmoe_plan* plan);

/* Bytes of workspace the call needs: none in this version. */
FLASHMOE_API flashmoe_status
flashmoe_kv_append_workspace_size(const flashmoe_kv_append_params* params, size_t* bytes);

/* Writes to k_cache, v_cache and, if given, q_out. On a GPU (fp16, bf16 and fp32) one launch does
 * so and reads the tables after all earlier work on the stream has ended. workspace and stream: as
 * in flashmoe_attention_forward.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL,
 * OUT_OF_MEMORY. */
FLASHMOE_API flashmoe_status flashmoe_kv_append(const flashmoe_kv_append_params* params,
                                                void* workspace, size_t workspace_size,
                                                void* stream);

/* ------------------------------------------------------------------------------------------------
 * Gathering keys and values of a cache
 *
 * Copies the keys and values of each sequence out of a cache into consecutive rows. They are the
 * rows that flashmoe_attention_forward reads with the same tables.
 *
 *   k_cache  [rows of a batch, rows, heads_kv, dim], or with page_table [pages, page_size,
 *                                          heads_kv, dim]; k's dtype, or fp8 (e4m3) if that has at
 *                                          most 32 bits
 *   v_cache  as k_cache                    with dim_v; NULL with a v of NULL: keys alone
 *   k        [batch, seq, heads_kv, dim]   fp16, bf16, fp32; on the CPU fp64
 *   v        [batch, seq, heads_kv, dim_v] of k's dtype
 *
 * in layout BSHD; in layout BHSD the second and third extents are exchanged, in pages too. dim and
 * dim_v are multiples of 8 up to 1024, and every other extent may be 0. The last stride is 1 and
 * every row begins on a 16-byte boundary. Sequence b has the keys
 *
 *   without the others    rows of k_cache[b]
 *   batch_index [batch]   rows of k_cache[batch_index[b]]
 *   page_table [batch, pages of a sequence]
 *                         rows of the pages that page_table[b] names, in order
 *   seqused_k [batch]     the first seqused_k[b] of those, as far as they exist
 *   k_begin [batch]       skips the first k_begin[b] of those
 *
 * The i-th of these becomes row i of k[b], or with
 *
 *   cu_seqlens_k [batch + 1]   row cu_seqlens_k[b] + i of k[0], before row cu_seqlens_k[b + 1]; k
 *                              is then [1, total, heads_kv, dim]. A row that several sequences
 *                              share (offsets that decrease) goes to the first one.
 *
 * Keys that k has no room for are left out. Rows of k and v that get no key are neither read nor
 * written, and cache rows that belong to no sequence are not read.
 *
 * Numbers of fp8 are widened to k's dtype, which holds every e4m3 number. With a scale they are
 * multiplied by it in fp32 and rounded once. k_scale and v_scale are as in
 * flashmoe_attention_forward; NULL is 1. Scales of rows that are not read may be NaN.
 *
 * Tables are int32, with any stride. They are read when the call computes, and no number leads
 * outside a tensor. Attention's rules apply: an entry out of range is no key, and a row of a page
 * that does not exist keeps its place and becomes zeros.
 * ---------------------------------------------------------------------------------------------- */

typedef struct flashmoe_kv_gather_params {
  size_t struct_size;
  const flashmoe_tensor* k_cache;
  const flashmoe_tensor* v_cache; /* may be NULL, like all below except k */
  const flashmoe_tensor* cu_seqlens_k;
  const flashmoe_tensor* seqused_k;
  const flashmoe_tensor* k_begin;
  const flashmoe_tensor* batch_index;
  const flashmoe_tensor* page_table;
  const flashmoe_tensor* k_scale; /* only for fp8 caches; NULL: 1 */
  const flashmoe_tensor* v_scale;
  const flashmoe_tensor* k;
  const flashmoe_tensor* v;
  const char* kernel; /* as in flashmoe_attention_forward */
  int32_t layout;     /* flashmoe_layout */
  uint32_t reserved;  /* 0 */
} flashmoe_kv_gather_params;

static inline flashmoe_kv_gather_params flashmoe_kv_gather_params_init(void) {
  flashmoe_kv_gather_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  return params;
}

/* Fills *plan with what flashmoe_kv_gather would do with these arguments; launches nothing, reads
 * no tensor data. Errors: those of flashmoe_kv_gather, except about memory. */
FLASHMOE_API flashmoe_status flashmoe_kv_gather_plan(const flashmoe_kv_gather_params* params,
                                                     flashmoe_plan* plan);

/* Bytes of workspace the call needs: none in this version. */
FLASHMOE_API flashmoe_status
flashmoe_kv_gather_workspace_size(const flashmoe_kv_gather_params* params, size_t* bytes);

/* Writes to k and, if given, v. On a GPU (fp16, bf16 and fp32) one launch does so and reads the
 * tables after all earlier work on the stream has ended. workspace and stream: as in
 * flashmoe_attention_forward.
 *
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, ARCH_NOT_BUILT, NO_DEVICE, WORKSPACE_TOO_SMALL,
 * OUT_OF_MEMORY. */
FLASHMOE_API flashmoe_status flashmoe_kv_gather(const flashmoe_kv_gather_params* params,
                                                void* workspace, size_t workspace_size,
                                                void* stream);

/* Initialisers of the structs that calls fill. */
static inline flashmoe_build_info flashmoe_build_info_init(void) {
  flashmoe_build_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  return info;
}

static inline flashmoe_device_info flashmoe_device_info_init(void) {
  flashmoe_device_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  return info;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#include "flashmoe/moe.h"

#endif /* FLASHMOE_FLASHMOE_H_ */
