#include "cuda/attention/launch.h"

#include <cstdio>

#include "cuda/attention/combine.h"

namespace flashmoe {

void plan_launch(const Kernel& kernel, int arch, const char* suffix, int64_t blocks, int threads,
                 int shared_bytes, AttentionPlan* plan) {
  flashmoe_attention_plan& info = plan->info;
  std::strncpy(info.kernel, kernel.name, sizeof info.kernel - 1);
  std::snprintf(info.isa, sizeof info.isa, "sm_%d%s", arch, suffix);
  info.grid[0] = static_cast<uint32_t>(blocks);
  info.grid[1] = info.grid[2] = 1;
  info.block[0] = static_cast<uint32_t>(threads);
  info.block[1] = info.block[2] = 1;
  info.shared_bytes = static_cast<uint64_t>(shared_bytes);
}

void plan_launch(const AttentionKernel& kernel, int arch, const char* suffix, int64_t blocks,
                 AttentionPlan* plan) {
  plan_launch(kernel, arch, suffix, blocks, kernel.threads, kernel.shared_bytes, plan);
  flashmoe_attention_plan& info = plan->info;
  info.tile_q = kernel.tile_q;
  info.tile_k = kernel.tile_k;
  info.dim = kernel.dim;
  info.dim_v = kernel.dim_v;
  info.stages = kernel.stages;
}

flashmoe_status launch_kernel(const Kernel& kernel, const AttentionProblem& problem,
                              const AttentionPlan& plan, const void* params, void* stream) {
  const flashmoe_attention_plan& info = plan.info;
  LaunchShape shape;
  std::memcpy(shape.grid, info.grid, sizeof shape.grid);
  std::memcpy(shape.block, info.block, sizeof shape.block);
  shape.shared_bytes = info.shared_bytes;
  shape.cluster = info.cluster;
  shape.programmatic = plan.programmatic;
  return launch_kernel(kernel, problem.device, shape, params, stream);
}

flashmoe_status launch_combine(const Kernel& kernel, const AttentionProblem& problem,
                               const AttentionPlan& plan, const PartsToCombine& parts,
                               const void* params, void* stream) {
  const int rows_per_block = combine_rows_per_block(parts.workers_log2, parts.units);
  LaunchShape shape = {};
  shape.grid[0] = static_cast<uint32_t>((parts.rows + rows_per_block - 1) / rows_per_block);
  shape.grid[1] = static_cast<uint32_t>(parts.count);
  shape.grid[2] = 1;
  shape.block[0] = kCombineThreads;
  shape.block[1] = shape.block[2] = 1;
  shape.programmatic = plan.programmatic;
  const LaunchRecord first = last_launch_record();
  FLASHMOE_TRY(launch_kernel(kernel, problem.device, shape, params, stream));
  last_launch_record() = first;
  return FLASHMOE_OK;
}

}  // namespace flashmoe
