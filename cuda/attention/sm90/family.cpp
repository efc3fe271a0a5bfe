// The sm_90 family: which kernel and which of its schedules serve a problem.
#include <algorithm>
#include <cstring>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/sm90/cost.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/attention/sm90/schedules.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm90/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

constexpr char kWholeTiles[] = "sm90_whole_tiles";
constexpr char kSplitKv[] = "sm90_split_kv";
// Prefixes of kernel names.
constexpr char kKernels[] = "attention_forward_";
constexpr char kSplitKvKernels[] = "attention_forward_sm90_split_kv_";

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm90/entries.inc"
#undef FLASHMOE_ENTRY
};

// The schedules that the requested kernel name allows.
struct Asked {
  bool whole_tiles;
  bool split_kv;
};

Asked asked_of(const char* kernel) {
  const auto begins_with = [&](const char* start) {
    return std::strncmp(kernel, start, std::strlen(start)) == 0;
  };
  const bool is_kernel = begins_with(kKernels);
  const bool splits_kv = begins_with(kSplitKvKernels);
  return {std::strcmp(kernel, kSplitKv) != 0 && !splits_kv,
          std::strcmp(kernel, kWholeTiles) != 0 && (!is_kernel || splits_kv)};
}

// Whether a window bounds both sides, so that a query sees at most so many keys beside one.
bool has_window_of(const AttentionProblem& p, int64_t keys) {
  if (!p.sequences.given) {
    return p.bounded_left && p.bounded_right && p.right_offset - p.left_offset <= keys;
  }
  const AttentionMask& mask = p.sequences.mask;
  const bool left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right =
      mask.causal != FLASHMOE_CAUSAL_NONE || (mask.window & FLASHMOE_WINDOW_RIGHT) != 0;
  return left && right && mask.window_left <= keys && mask.window_right <= keys &&
         mask.window_left + mask.window_right <= keys && mask.window_left < p.seq_k - 1;
}

// Whether all queries together see at most the keys of one query of such a window.
bool has_keys_of_window(const AttentionProblem& p, int64_t keys) {
  const int64_t first = p.bounded_left ? std::max<int64_t>(0, p.left_offset) : 0;
  const int64_t end = p.bounded_right ? std::min(p.seq_k, p.seq_q + p.right_offset) : p.seq_k;
  return end - first <= keys + 1;
}

// The kernel of a schedule. Each schedule has kernels for all head dimensions. If named, those for
// short windows also compute few keys, such as those of sequences shorter than the window.
const Entry* entry_of(const AttentionProblem& problem, bool splits_kv, const DeviceFacts& facts) {
  const bool capped = problem.softcap != 0.0f;
  const bool ragged = problem.sequences.given;
  const bool packed = ragged && packs_queries(problem);
  const auto suits = [&](const Entry& each) {
    if (each.packed && !packed) return false;
    const bool named = std::strcmp(problem.kernel, each.name) == 0;
    return each.window_keys == 0 || has_window_of(problem, each.window_keys) ||
           (named && has_keys_of_window(problem, each.window_keys));
  };
  return find_entry(
      kEntries, problem,
      [&](const Entry& each) {
        return each.capped == capped && each.splits_kv() == splits_kv && each.ragged == ragged &&
               suits(each);
      },
      [&](const Entry& each) {
        if (packed) return each.packed;
        return (each.window_keys > 0) == saves_steps(problem, each.tile_q, facts);
      });
}

// Refuses problems that no kernel of the family takes, with any tiles.
flashmoe_status check(const AttentionProblem& problem, const DeviceFacts** facts,
                      const Reason& reason) {
  FLASHMOE_TRY(check_hopper(problem.device.device_id, facts, reason));
  FLASHMOE_TRY(refuse_wide_heads(problem, reason));
  FLASHMOE_TRY(check_sequences_fit(problem, reason));
  FLASHMOE_TRY(refuse_scaled_keys(problem, reason));
  FLASHMOE_TRY(refuse_split_size(problem, reason));
  FLASHMOE_TRY(refuse_bias_and_mask(problem, reason));
  if (problem.seq_q > kMaxSequence || problem.seq_k > kMaxSequence) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "sequence longer than 2^30");
  }
  return check_walkable(problem, reason);
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check(problem, &facts, reason));
  const bool ragged = problem.sequences.given;
  Asked asked = asked_of(problem.kernel);
  if (ragged && !asked.whole_tiles) return refuse_sequences(problem, reason);
  if (ragged) asked.split_kv = false;
  const Work work = work_of(problem);
  const auto estimate = [&](bool is_asked, bool splits_kv, auto function, auto* estimated) {
    if (!is_asked) return FLASHMOE_ERROR_UNSUPPORTED;
    const Entry* const entry = entry_of(problem, splits_kv, *facts);
    if (entry == nullptr) {
      return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
    }
    return function(problem, work, entry, *facts, estimated, reason);
  };
  SplitKv split_kv = {};
  WholeTiles whole_tiles = {};
  const flashmoe_status of_split = estimate(asked.split_kv, true, estimate_split_kv, &split_kv);
  const flashmoe_status of_whole = estimate(
      asked.whole_tiles, false, ragged ? estimate_ragged : estimate_whole_tiles, &whole_tiles);
  if (of_split == FLASHMOE_OK &&
      (of_whole != FLASHMOE_OK || split_kv.microseconds <= whole_tiles.microseconds)) {
    return plan_split_kv(problem, split_kv, *facts, plan, reason);
  }
  if (of_whole == FLASHMOE_OK) return plan_whole_tiles(problem, whole_tiles, *facts, plan, reason);
  return asked.whole_tiles ? of_whole : of_split;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  if (entry.splits_kv()) return launch_split_kv(problem, plan, workspace, stream);
  return entry.ragged ? launch_ragged(problem, plan, stream)
                      : launch_whole_tiles(problem, plan, stream);
}

}  // namespace
}  // namespace flashmoe::sm90

namespace flashmoe {

const AttentionFamily kSm90Attention = {"sm90", FLASHMOE_DEVICE_CUDA, &sm90::plan, &sm90::launch,
                                        "sm90_whole_tiles sm90_split_kv"};

}  // namespace flashmoe
