// Which kernel of a Hopper family serves a problem: those of sm90 and split are chosen alike.
#pragma once

#include "core/gpu_model.h"
#include "core/status.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {

inline constexpr int kComputeCapability = 90;

inline flashmoe_status check_capability(int device_id, const DeviceFacts** facts,
                                        const Reason& reason) {
  FLASHMOE_TRY(read_device_facts(device_id, facts, reason));
  const int capability = (*facts)->compute_capability;
  if (capability != kComputeCapability) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s has compute capability %d.%d, accepted is 9.0",
                         DeviceName::cuda(device_id).text, capability / 10, capability % 10);
  }
  return FLASHMOE_OK;
}

// Refuses what no kernel of a family with such entries takes, whatever its tiles.
template <class Entry, size_t kCount, class Problem>
flashmoe_status choose_entry(const Entry* const (&entries)[kCount], const Problem& problem,
                             const Entry** entry, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const bool capped = problem.softcap != 0.0f;
  *entry = find_entry(
      entries, problem, [&](const Entry& each) { return each.capped == capped; },
      [](const Entry&) { return true; });
  if (*entry == nullptr) {
    return refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these head dimensions");
  }
  if (problem.seq_q > kMaxSequence || problem.seq_k > kMaxSequence) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "sequence longer than 2^30");
  }
  return check_walkable(problem, reason);
}

}  // namespace flashmoe::sm90
