#include "cuda/moe/launch.h"

#include <cstdio>
#include <cstring>

namespace flashmoe {

namespace {

int static_shared_bytes(const Kernel& kernel, int device_id) {
  return kernel.loaded[device_id].static_shared_bytes.load(std::memory_order_relaxed);
}

}  // namespace

flashmoe_moe_stage* add_stage(const Kernel& kernel, int device_id, const char* suffix,
                              int64_t blocks, int threads, int shared_bytes, MoePlan* plan) {
  flashmoe_moe_plan& info = plan->info;
  std::snprintf(info.isa, sizeof info.isa, "sm_%d%s",
                kernel.loaded[device_id].arch.load(std::memory_order_relaxed), suffix);
  plan->entry[info.launches] = &kernel;
  flashmoe_moe_stage& stage = info.stage[info.launches++];
  std::strncpy(stage.kernel, kernel.name, sizeof stage.kernel - 1);
  stage.grid[0] = static_cast<uint32_t>(blocks);
  stage.grid[1] = stage.grid[2] = 1;
  stage.block[0] = static_cast<uint32_t>(threads);
  stage.block[1] = stage.block[2] = 1;
  stage.shared_bytes = static_cast<uint64_t>(shared_bytes + static_shared_bytes(kernel, device_id));
  return &stage;
}

flashmoe_status launch_stage(const MoePlan& plan, int index, flashmoe_device device,
                             const void* params, void* stream, bool early) {
  const Kernel& kernel = *static_cast<const Kernel*>(plan.entry[index]);
  const flashmoe_moe_stage& stage = plan.info.stage[index];
  LaunchShape shape;
  std::memcpy(shape.grid, stage.grid, sizeof shape.grid);
  std::memcpy(shape.block, stage.block, sizeof shape.block);
  shape.shared_bytes =
      stage.shared_bytes - static_cast<uint64_t>(static_shared_bytes(kernel, device.device_id));
  shape.cluster = stage.cluster;
  shape.programmatic = early && has_clusters(kernel, device.device_id);
  return launch_kernel(kernel, device, shape, params, stream);
}

}  // namespace flashmoe
