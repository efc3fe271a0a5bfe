// The interface between the launcher and the per-ISA kernels: a tile of work and its kernel.
// Translation units compiled with different -m flags include this file, so it holds plain
// declarations only: no inline function, and no standard header that has any.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/ops/attention/problem.h"
#include "cpu/e4m3.h"

namespace flashmoe::cpu {

// Consecutive rows of one (batch, KV head). Query heads that share a KV head are folded into the
// rows so that they share K and V: row r is query r / group of head r % group.
struct AttentionTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first_row;
  int64_t rows;
  const struct KeyPages* pages = nullptr;  // if k and v are pages; batch is then 0
};

// The pages of one sequence: key j is row (first + j) % page_size of the page in entry (first + j)
// / page_size of the table. Pages with numbers outside 0 to count - 1 are hidden.
struct KeyPages {
  const int32_t* table;
  int64_t step;  // between entries, elements
  int64_t count;
  int64_t page_size;
  int64_t first;
};

// Zeros to read in place of a hidden row, as many as the widest row has bytes.
extern const unsigned char kHiddenRow[kMaxHeadDim * sizeof(float)];

// The least work for which waking a thread pays: ten microseconds or more of FMAs.
constexpr double kFlopsPerThread = 5e5;

// The kernels of one instruction set for one dtype.
struct AttentionKernel {
  const char* isa;
  int32_t group_rows;  // rows in registers together; tiles of many rows hold whole groups
  int32_t max_groups;  // per tile
  // Whether the rows of a KV head are so few that nothing is packed: tiles then hold any number of
  // rows.
  bool (*has_few_rows)(const AttentionProblem& problem);
  int32_t (*tile_k)(const AttentionProblem& problem);
  size_t (*scratch_bytes)(const AttentionProblem& problem, int32_t tile_q);  // per thread
  // `scratch` is 64-byte aligned. Writes out and lse of the tile's rows and nothing else.
  void (*compute)(const AttentionProblem& problem, const AttentionTile& tile, int32_t tile_q,
                  void* scratch);
  double flops_per_thread = kFlopsPerThread;  // not for few rows, which always use FMAs
};

// One per instruction set, indexed by Dtype.
extern const AttentionKernel kScalarAttention[3];
extern const AttentionKernel kFp64Attention;  // for any processor
#if FLASHMOE_CPU_X86
extern const AttentionKernel kAvx2Attention[3];
extern const AttentionKernel kAvx512Attention[3];
extern const AttentionKernel kAvx512Bf16Attention;  // bf16 only
#if FLASHMOE_CPU_AMX
extern const AttentionKernel kAmxAttention;  // bf16 only
#endif
#endif

}  // namespace flashmoe::cpu
