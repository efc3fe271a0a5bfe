// Checks the tables of sequences: one warp per sequence; its lanes take the pages in turn. The CPU
// counts the same entries as wrong (cpu/check_sequences.cpp).
#include "cuda/check_sequences/check.h"
#include "cuda/ptx/pdl.cuh"
#include "flashmoe/flashmoe.h"

namespace flashmoe::check_sequences {
namespace {

__device__ __forceinline__ int64_t clamp_to(int64_t number, int64_t least, int64_t most) {
  return number < least ? least : number > most ? most : number;
}

struct Checked {
  const Params& params;
  const int sequence;
  uint32_t faults = 0;

  __device__ __forceinline__ void add(bool wrong, uint32_t fault) { faults |= wrong ? fault : 0; }

  __device__ __forceinline__ int64_t cut(const TableNumbers& table, int64_t most, int64_t absent,
                                         uint32_t fault) {
    if (!table.given()) return absent;
    const int64_t number = table.at(sequence);
    add(number < 0 || number > most, fault);
    return clamp_to(number, 0, most);
  }

  __device__ __forceinline__ int64_t room(const TableNumbers& offsets, int64_t rows,
                                          uint32_t fault) {
    if (!offsets.given()) return rows;
    const int64_t begin = offsets.at(sequence), end = offsets.at(sequence + 1);
    add(begin < 0 || begin > rows || end < begin || end > rows, fault);
    const int64_t first = clamp_to(begin, 0, rows);
    return clamp_to(end, first, rows) - first;
  }

  __device__ __forceinline__ void check_queries() {
    const int64_t rows = room(params.cu_seqlens_q, params.rows_q, FLASHMOE_FAULT_CU_SEQLENS_Q);
    const int64_t queries = cut(params.seqused_q, rows, rows, FLASHMOE_FAULT_SEQUSED_Q);
    add(params.most_q > 0 && queries > params.most_q, FLASHMOE_FAULT_MAX_SEQLEN_Q);
  }

  __device__ __forceinline__ void check_keys(int lane) {
    int64_t keys = params.paged != 0
                       ? params.room_k
                       : room(params.cu_seqlens_k, params.room_k, FLASHMOE_FAULT_CU_SEQLENS_K);
    cut(params.batch_index, params.batch_k - 1, 0, FLASHMOE_FAULT_BATCH_INDEX);
    keys = cut(params.seqused_k, keys, keys, FLASHMOE_FAULT_SEQUSED_K);
    const int64_t begin = cut(params.k_begin, keys, 0, FLASHMOE_FAULT_K_BEGIN);
    keys -= begin;
    add(params.most_k > 0 && keys > params.most_k, FLASHMOE_FAULT_MAX_SEQLEN_K);
    if (params.most_k > 0) keys = clamp_to(keys, 0, params.most_k);
    if (params.paged == 0 || keys <= 0) return;
    const int64_t last = (begin + keys - 1) / params.page_size;
    for (int64_t i = begin / params.page_size + lane; i <= last; i += 32) {
      const int64_t element = sequence * params.page_table.stride + i * params.page_step;
      const int page = params.page_table.data[element];
      add(page < 0 || page >= params.batch_k, FLASHMOE_FAULT_PAGE_TABLE);
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    check_sequences_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int sequence = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (sequence >= params.sequences) return;
  Checked checked = {params, sequence};
  checked.check_queries();
  checked.check_keys(static_cast<int>(threadIdx.x % 32));
  const uint32_t faults = __reduce_or_sync(0xffffffff, checked.faults);
  if (threadIdx.x % 32 == 0) {
    params.status[sequence * params.status_step] = static_cast<int32_t>(faults);
  }
}

LoadedKernel loaded[kMaxDevices];

}  // namespace

const Kernel kCheckSequences = {"check_sequences_sm89",
                                reinterpret_cast<const void*>(&check_sequences_kernel), 0, loaded};

}  // namespace flashmoe::check_sequences
