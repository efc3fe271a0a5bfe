// How the kernel that tells sequences with few queries from the others is planned and launched.
#include "cuda/attention/launch.h"
#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/lengths/lengths.h"

namespace flashmoe {

using lengths::kLengths;
using lengths::kLengthsThreads;

flashmoe_status cuda_plan_lengths(const AttentionProblem& problem, Plan* plan,
                                  const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kLengths, device_id, *facts, &arch, reason));
  plan_launch(kLengths, device_id, "", (problem.batch + kLengthsThreads - 1) / kLengthsThreads,
              kLengthsThreads, 0, plan);
  return FLASHMOE_OK;
}

flashmoe_status cuda_launch_lengths(const AttentionProblem& problem, const Plan& plan, int64_t few,
                                    void* many_q, void* few_q, void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  lengths::Params params;
  params.sequences = sequence_params(problem);
  params.few = static_cast<int32_t>(few);
  params.many_q = static_cast<int32_t*>(many_q);
  params.few_q = static_cast<int32_t*>(few_q);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace flashmoe
