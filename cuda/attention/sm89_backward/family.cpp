// The sm_89 family of the attention backward: which kernel serves a problem, and the parameters of
// its launch and that of its prologue.
#include <cstdint>

#include "core/backends.h"
#include "core/gpu_model.h"
#include "core/status.h"
#include "cuda/attention/backward/launches.h"
#include "cuda/attention/backward/ragged_launches.h"
#include "cuda/attention/sm89_backward/cost.h"
#include "cuda/attention/sm89_backward/entry.h"
#include "cuda/attention/sm89_backward/params.h"

namespace flashmoe::sm89_backward {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm89_backward/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm89_backward/entries.inc"
#undef FLASHMOE_ENTRY
};

// Whether a block of a kernel fits a multiprocessor, which runs one at a time.
bool fits(const Entry& entry, const DeviceFacts& facts) {
  return entry.shared_bytes + facts.reserved_shared_bytes_per_block <=
         facts.shared_bytes_per_multiprocessor;
}

flashmoe_status plan(const AttentionBackwardProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(read_device_facts(device_id, &facts, reason));
  if (facts->compute_capability < kOldestComputeCapability) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s has compute capability %d.%d, accepted are 8.9 and newer",
                         DeviceName::cuda(device_id).text, facts->compute_capability / 10,
                         facts->compute_capability % 10);
  }
  FLASHMOE_TRY(attention_backward::check_lengths(problem, reason));
  const bool ragged = problem.sequences.given;
  const bool biased = has_bias_or_mask(problem);
  const bool both = problem.mask.data != nullptr && problem.bias.data != nullptr &&
                    problem.bias.dtype == Dtype::kFloat32;
  const Entry* const entry = find_entry(
      kEntries, problem,
      [&](const Entry& each) {
        return each.ragged == ragged && each.biased == biased && !(both && each.one_of_both);
      },
      [&](const Entry& each) { return fits(each, *facts); });
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
  }
  if (!fits(*entry, *facts)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s takes %d bytes of shared memory, a multiprocessor of %s has %d",
                         entry->name, entry->shared_bytes, DeviceName::cuda(device_id).text,
                         facts->shared_bytes_per_multiprocessor);
  }
  // The kernel is persistent: no more blocks than run at a time.
  const auto plan_launches =
      ragged ? attention_backward::plan_ragged_launches : attention_backward::plan_launches;
  FLASHMOE_TRY(plan_launches(problem, *entry, *facts, "", facts->multiprocessors, reason, plan));
  plan->info.microseconds =
      attention_backward::microseconds_of(problem, *entry, speed_of(*entry, *facts), *facts);
  return FLASHMOE_OK;
}

flashmoe_status launch_ragged(const AttentionBackwardProblem& problem, const Plan& plan,
                              const Entry& entry, char* workspace, void* stream) {
  Prepared<RaggedBiasedParams> kept(plan.detail);
  if (!kept.ready()) {
    attention_backward::fill_ragged_params(problem, entry, &*kept);
    kept.set_ready(true);
  }
  attention_backward::fill_ragged_addresses(problem, entry, workspace, &*kept);
  kept->pairs = score_pairs(problem);
  return launch_all(plan, &*kept, stream);
}

flashmoe_status launch(const AttentionBackwardProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const bool ragged = problem.sequences.given;
  const Entry& entry = *static_cast<const Entry*>(
      plan.entries[ragged ? attention_backward::kRaggedKernelLaunch : 1]);
  auto* const memory = static_cast<char*>(workspace);
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  if (ragged) return launch_ragged(problem, plan, entry, memory, stream);
  // A kernel without pairs only reads the parameters before them.
  Prepared<BiasedParams> kept(plan.detail);
  if (!kept.ready()) {
    attention_backward::fill_params(problem, entry, &*kept);
    kept.set_ready(true);
  }
  attention_backward::fill_addresses(problem, attention_backward::layout_of(problem, entry), memory,
                                     &*kept);
  kept->pairs = score_pairs(problem);
  return launch_all(plan, &*kept, stream);
}

}  // namespace
}  // namespace flashmoe::sm89_backward

namespace flashmoe {

const AttentionBackwardFamily kSm89AttentionBackward = {
    "sm89", FLASHMOE_DEVICE_CUDA, &sm89_backward::plan, &sm89_backward::launch};

}  // namespace flashmoe
