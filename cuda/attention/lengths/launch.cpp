// Plans and launches the kernel that separates sequences with few queries from the others.
#include "cuda/attention/launch.h"

#include <algorithm>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/cost.h"
#include "cuda/attention/lengths/lengths.h"

namespace flashmoe {

using lengths::kLengths;
using lengths::kLengthsThreads;

namespace {

// Times are in microseconds, rates per microsecond and multiprocessor: bytes of keys and values
// that decoding reads, and floating-point operations of prompts.
constexpr double kDecodeRate = 50e3;
constexpr double kLeadBytes = 128 << 10;  // cost of a tile of decoding besides its keys
constexpr double kPromptRate = 5.2e6;
constexpr double kTile = 4.2;            // cost of a tile of prompts besides its products
constexpr double kShareOfMemory = 0.85;  // of the peak rate, for decoding

}  // namespace

flashmoe_status cuda_plan_lengths(const AttentionProblem& problem, Plan* plan,
                                  const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kLengths, device_id, *facts, &arch, reason));
  plan_launch(kLengths, device_id, "", 1, kLengthsThreads, 0, plan);
  return FLASHMOE_OK;
}

flashmoe_status cuda_launch_lengths(const AttentionProblem& problem, const Plan& plan,
                                    const LengthTables& tables, void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  lengths::Params params = {};
  params.sequences = sequence_params(problem);
  params.few = static_cast<int32_t>(tables.few);
  params.several = static_cast<int32_t>(tables.several);
  params.many_q = static_cast<int32_t*>(tables.many_q);
  params.few_q = static_cast<int32_t*>(tables.few_q);
  params.several_q = static_cast<int32_t*>(tables.several_q);
  if (tables.division != nullptr) {
    const DeviceFacts* facts = nullptr;
    FLASHMOE_TRY(read_device_facts(problem.device.device_id, &facts, Reason()));
    params.division = static_cast<Division*>(tables.division);
    params.score = score_options(problem);
    params.multiprocessors = facts->multiprocessors;
    params.many_rows = tables.many_rows;
    params.few_queries = std::max<int32_t>(
        tables.few_rows / static_cast<int32_t>(problem.heads_q / problem.heads_kv), 1);
    const auto heads_q = static_cast<double>(problem.heads_q);
    const auto bytes = static_cast<double>(problem.heads_kv * key_bytes(problem));
    params.decode_time = static_cast<float>(bytes / kDecodeRate);
    params.decode_lead =
        static_cast<float>(static_cast<double>(problem.heads_kv) * kLeadBytes / kDecodeRate);
    params.memory_time = 0.0f;
    if (facts->memory_bytes_per_microsecond > 0) {
      params.memory_time =
          static_cast<float>(bytes / (kShareOfMemory * facts->memory_bytes_per_microsecond));
    }
    params.heads_q = static_cast<float>(heads_q);
    params.pair_time =
        static_cast<float>(2 * static_cast<double>(problem.dim + problem.dim_v) / kPromptRate);
    params.tile_time = static_cast<float>(kTile);
  }
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace flashmoe
