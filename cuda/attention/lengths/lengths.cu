// Tells sequences with few queries from the others: two tables of lengths, in each of which the
// sequences of the other have no query.
#include "cuda/attention/lengths/lengths.h"
#include "cuda/ptx/pdl.cuh"

namespace flashmoe::lengths {
namespace {

__global__ void __launch_bounds__(kLengthsThreads)
    attention_lengths_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int sequence = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (sequence >= params.sequences.count) return;
  const int queries = params.sequences.queries_of(sequence).length;
  params.many_q[sequence] = queries > params.few ? queries : 0;
  params.few_q[sequence] = queries > params.few ? 0 : queries;
}

LoadedKernel loaded[kMaxDevices];

}  // namespace

const Kernel kLengths = {"attention_forward_mixed_lengths",
                         reinterpret_cast<const void*>(&attention_lengths_kernel), 0, loaded};

}  // namespace flashmoe::lengths
