#include "cuda/attention/launch.h"

#include "cuda/attention/combine.h"

namespace flashmoe {

flashmoe_launch& plan_launch(const AttentionKernel& kernel, int device_id, const char* suffix,
                             int64_t blocks, Plan* plan) {
  flashmoe_launch& launch =
      plan_launch(kernel, device_id, suffix, blocks, kernel.threads, kernel.shared_bytes, plan);
  launch.tile_m = kernel.tile_q;
  launch.tile_n = kernel.tile_k;
  launch.dim = kernel.dim;
  launch.dim_v = kernel.dim_v;
  launch.stages = kernel.stages;
  return launch;
}

void plan_combine(const Kernel& kernel, int device_id, const char* suffix,
                  const PartsToCombine& parts, Plan* plan) {
  const int rows_per_block = combine_rows_per_block(parts.workers_log2, parts.units);
  flashmoe_launch& launch =
      plan_launch(kernel, device_id, suffix, (parts.rows + rows_per_block - 1) / rows_per_block,
                  kCombineThreads, 0, plan);
  launch.grid[1] = static_cast<uint32_t>(parts.count);
  launch.tile_m = rows_per_block;
}

}  // namespace flashmoe
