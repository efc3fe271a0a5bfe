// Gradients of routing on a GPU: one kernel serves all GPUs.
#include <algorithm>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/route_backward/entry.h"

namespace flashmoe::moe_route_backward {
namespace {

constexpr int kThreads = kWarps * 32;
constexpr int64_t kBlocksPerMultiprocessor = 12;
constexpr double kMicroseconds = 4;  // no choice depends on it

int columns_of(const MoeRouteBackwardProblem& p) { return p.given ? p.top_k : p.experts; }

flashmoe_status plan(const MoeRouteBackwardProblem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device_id, *facts, &arch, reason));
  plan->info.microseconds = kMicroseconds;
  const int64_t blocks =
      std::min((p.tokens + kWarps - 1) / kWarps, kBlocksPerMultiprocessor * facts->multiprocessors);
  const int shared = p.given ? 0 : kWarps * p.experts * static_cast<int>(sizeof(float));
  flashmoe_launch& launch =
      plan_launch(kernel, device_id, "", std::max<int64_t>(blocks, 1), kThreads, shared, plan);
  launch.tile_n = kWarps;
  launch.stages = 1;
  return FLASHMOE_OK;
}

flashmoe_status launch(const MoeRouteBackwardProblem& p, const Plan& plan, void*, void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  Params params = {};
  params.dweights = p.dweights;
  params.ids = p.ids;
  params.dlse = p.dlse;
  params.scores = {const_cast<void*>(p.scores.data), p.scores.row_stride,
                   static_cast<int32_t>(p.scores.dtype)};
  params.dscores = {p.dscores.data, p.dscores.row_stride, static_cast<int32_t>(p.dscores.dtype)};
  params.tokens = p.tokens;
  params.columns = columns_of(p);
  params.top_k = p.top_k;
  params.given = p.given ? 1 : 0;
  params.scoring = p.scoring;
  params.renormalize = p.renormalize ? 1 : 0;
  params.scale = p.scale;
  params.accumulate = p.accumulate ? 1 : 0;
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace
}  // namespace flashmoe::moe_route_backward

namespace flashmoe {

// It has the name of the oldest GPU family because it is the same on all GPUs.
const MoeRouteBackwardFamily kCudaMoeRouteBackward = {
    "sm89", FLASHMOE_DEVICE_CUDA, &moe_route_backward::plan, &moe_route_backward::launch};

}  // namespace flashmoe
