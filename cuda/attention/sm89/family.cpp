// The sm_89 family: which kernel serves a problem, and the parameters of its launch.
#include <algorithm>
#include <climits>
#include <limits>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/sm89/cost.h"
#include "cuda/attention/sm89/entry.h"
#include "cuda/attention/sm89/params.h"

namespace flashmoe::sm89 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm89/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm89/entries.inc"
#undef FLASHMOE_ENTRY
};

// Whether a multiprocessor has room for as many blocks of a kernel as it is designed for.
bool fits(const Entry& entry, const DeviceFacts& facts) {
  return entry.blocks_per_sm * (entry.shared_bytes + facts.reserved_shared_bytes_per_block) <=
         facts.shared_bytes_per_multiprocessor;
}

// Tiles of a swizzle group run longest first, so its keys and values should fit the L2 beside the
// traffic of queries and outputs. Without bounds, or with bounds on both sides, all tiles are alike
// and heads come one by one.
int32_t heads_per_swizzle(const AttentionProblem& problem, int64_t l2_bytes) {
  if (problem.bounded_left == problem.bounded_right) return 1;
  const int64_t heads = problem.batch * problem.heads_q;
  const int64_t group = problem.heads_q / problem.heads_kv;
  const int64_t bytes = problem.seq_k * key_bytes(problem);
  const int64_t groups = bytes > 0 ? l2_bytes / 3 / bytes : heads;
  return static_cast<int32_t>(groups < 1 ? group
                                         : (groups > heads / group ? heads : groups * group));
}

// See RaggedParams. A tile has all query heads of a KV head, or one.
int64_t heads_per_tile(const AttentionProblem& p, const Entry& entry) {
  const int64_t group = p.heads_q / p.heads_kv;
  return p.sequences.given && p.seq_q == 1 && group <= entry.tile_q ? group : 1;
}

// One block per tile. False if there are too many.
bool count_blocks(const AttentionProblem& p, const Entry& entry, int64_t* blocks) {
  const int64_t heads = p.batch * p.heads_q;
  if (p.batch > INT_MAX || p.heads_q > INT_MAX || heads > INT_MAX) return false;
  int64_t tiles = (p.seq_q + entry.tile_q - 1) / entry.tile_q * p.batch;
  if (p.sequences.given) has_slots_by_rows(p, entry.tile_q, &tiles);
  *blocks = tiles * (p.heads_q / heads_per_tile(p, entry));
  return *blocks <= INT_MAX;
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  FLASHMOE_TRY(refuse_wide_heads(problem, reason));
  FLASHMOE_TRY(check_sequences_fit(problem, reason));
  FLASHMOE_TRY(refuse_scaled_keys(problem, reason));
  FLASHMOE_TRY(refuse_split_size(problem, reason));
  const bool ragged = problem.sequences.given;
  const bool biased = has_bias_or_mask(problem);
  const Entry* entry = find_entry(
      kEntries, problem,
      [&](const Entry& each) { return each.ragged == ragged && each.biased == biased; },
      [&](const Entry& each) { return fits(each, *facts); });
  if (entry == nullptr) {
    return refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these head dimensions");
  }
  if (problem.seq_q > kMaxSequence || problem.seq_k > kMaxSequence) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "sequence longer than 2^30");
  }
  int64_t blocks = 0;
  if (!count_blocks(problem, *entry, &blocks)) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^31 - 1 tiles of query rows");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  plan_launch(*entry, device_id, "", blocks, plan);
  plan->info.microseconds = tile_microseconds(
      with_packed_heads(work_of(problem), heads_per_tile(problem, *entry)), *facts);
  return FLASHMOE_OK;
}

template <class Params>
void fill_pairs(const AttentionProblem& p, Params* params) {
  params->pairs = score_pairs(p);
  if (p.mask.data == nullptr || p.bias.data != nullptr) return;
  // A mask alone applies to the scores themselves.
  params->score.scale_log2 =
      static_cast<float>(std::min(double{params->pairs.factor} * double{params->score.scale_log2},
                                  double{std::numeric_limits<float>::max()}));
  params->pairs.factor = 1.0f;
}

BiasedParams make_params(const AttentionProblem& p, const Entry& entry, const DeviceFacts& facts) {
  BiasedParams params;
  fill_common(p, &params);
  fill_pairs(p, &params);
  params.seq_q = static_cast<int32_t>(p.seq_q);
  params.longest_tiles_first = p.bounded_right && !p.bounded_left ? 1 : 0;
  fill_swizzle(p, (p.seq_q + entry.tile_q - 1) / entry.tile_q, heads_per_swizzle(p, facts.l2_bytes),
               &params);
  return params;
}

RaggedBiasedParams make_ragged_params(const AttentionProblem& p, const Entry& entry) {
  RaggedBiasedParams params;
  fill_tensors_and_score(p, &params);
  fill_pairs(p, &params);
  params.sequences = sequence_params(p);
  params.slots = tile_slots(p, entry.tile_q);
  params.last_slots_first =
      params.score.bounded_right != 0 && params.score.left_offset == kNoLeftOffset ? 1 : 0;
  const int64_t heads = heads_per_tile(p, entry);
  params.heads_per_tile = static_cast<int32_t>(heads);
  params.by_tiles_per_kv = Divisor::of(static_cast<uint32_t>(p.heads_q / p.heads_kv / heads));
  params.by_slots = Divisor::of(static_cast<uint32_t>(params.slots.count));
  return params;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void*, void* stream) {
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  // A kernel without pairs only reads the parameters before them.
  if (entry.ragged) {
    const RaggedBiasedParams params = make_ragged_params(problem, entry);
    return launch_planned(plan, 0, &params, stream);
  }
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(read_device_facts(device_id, &facts, Reason()));
  const BiasedParams params = make_params(problem, entry, *facts);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace
}  // namespace flashmoe::sm89

namespace flashmoe {

const AttentionFamily kSm89Attention = {"sm89", FLASHMOE_DEVICE_CUDA, &sm89::plan, &sm89::launch};

}  // namespace flashmoe
