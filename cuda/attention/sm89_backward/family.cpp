// The sm_89 family of the attention backward: which kernel serves a problem, and with what
// parameters it and its prologue are launched.
#include <algorithm>
#include <cstdint>

#include "core/backends.h"
#include "core/gpu_model.h"
#include "core/status.h"
#include "cuda/attention/sm89_backward/cost.h"
#include "cuda/attention/sm89_backward/entry.h"
#include "cuda/attention/sm89_backward/params.h"
#include "cuda/tile/extents.h"

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

constexpr int64_t kMostTiles = int64_t{1} << 30;

// Whether so many blocks of a kernel fit a multiprocessor.
bool fit(const Entry& entry, int blocks, const DeviceFacts& facts) {
  return blocks * (entry.shared_bytes + facts.reserved_shared_bytes_per_block) <=
         facts.shared_bytes_per_multiprocessor;
}

// Without queries there is one tile of none: the prologue sets the ticket in any case.
int64_t tiles_q_of(const AttentionProblem& p, const Entry& entry) {
  return std::max<int64_t>(1, ceil_div(p.seq_q, int64_t{entry.tile_q}));
}

// The workspace, as offsets of its parts.
struct Layout {
  int64_t row_lse;
  int64_t row_delta;
  int64_t turns;
  int64_t ticket;
  int64_t dq_sums;
  int64_t bytes;
};

Layout layout_of(const AttentionBackwardProblem& p, const Entry& entry) {
  constexpr int64_t kAlignment = 128;
  const int64_t tiles = p.batch * p.heads_q * tiles_q_of(p, entry);
  Layout layout = {};
  const auto take = [&](int64_t bytes) {
    const int64_t begin = layout.bytes;
    layout.bytes += ceil_div(bytes, kAlignment) * kAlignment;
    return begin;
  };
  constexpr int64_t kFloat = sizeof(float);
  layout.row_lse = take(tiles * entry.tile_q * kFloat);
  layout.row_delta = take(tiles * entry.tile_q * kFloat);
  layout.turns = take(tiles * int64_t{sizeof(uint32_t)});
  layout.ticket = take(sizeof(uint32_t));
  layout.dq_sums = take(tiles * entry.tile_q * entry.dim * kFloat);
  return layout;
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
  if (problem.seq_q > kMaxSequence || problem.seq_k > kMaxSequence) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "sequence longer than 2^30");
  }
  const Entry* const entry = find_entry(
      kEntries, problem, [](const Entry&) { return true; },
      [&](const Entry& each) { return fit(each, each.blocks_per_sm, *facts); });
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
  }
  if (!fit(*entry, 1, *facts)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s takes %d bytes of shared memory, a multiprocessor of %s has %d",
                         entry->name, entry->shared_bytes, DeviceName::cuda(device_id).text,
                         facts->shared_bytes_per_multiprocessor);
  }
  const int64_t tiles_q = tiles_q_of(problem, *entry);
  const int64_t tiles_k = ceil_div(problem.seq_k, int64_t{entry->tile_k});
  const auto too_many = [&](int64_t heads, int64_t tiles) {
    return problem.batch > kMostTiles || heads > kMostTiles ||
           tiles * std::max<int64_t>(1, problem.batch) > kMostTiles / heads;
  };
  if (too_many(problem.heads_q, tiles_q) || too_many(problem.heads_kv, tiles_k)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^30 tiles of rows or keys");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry->prologue, device_id, *facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  plan_launch(entry->prologue, device_id, "", problem.batch * problem.heads_q * tiles_q,
              entry->prologue_threads, 0, plan)
      .tile_m = entry->tile_q;
  // Persistent: no more blocks than run at a time.
  const int64_t items = problem.batch * problem.heads_kv * tiles_k;
  const int64_t resident = int64_t{facts->multiprocessors} *
                           (fit(*entry, entry->blocks_per_sm, *facts) ? entry->blocks_per_sm : 1);
  plan_launch(*entry, device_id, "", std::clamp<int64_t>(items, 1, resident), plan);
  plan->info.workspace_bytes = static_cast<uint64_t>(layout_of(problem, *entry).bytes);
  plan->info.microseconds = microseconds_of(problem, *entry, *facts);
  return FLASHMOE_OK;
}

template <class View>
Rows rows_of(const View& view) {
  return {static_cast<const uint16_t*>(view.data), view.strides};
}

Gradient gradient_of(const RowsView<void>& view) {
  return {view.data, view.strides, view.dtype == Dtype::kFloat32 ? 1 : 0};
}

// The sums of dQ, Q and dO of the heads that alternate take this share of the L2.
constexpr int64_t kShareOfL2 = 2;

Params make_params(const AttentionBackwardProblem& p, const Entry& entry, const DeviceFacts& facts,
                   char* workspace) {
  const Layout layout = layout_of(p, entry);
  Params params = {};
  params.q = rows_of(p.q);
  params.k = rows_of(p.k);
  params.v = rows_of(p.v);
  params.out = rows_of(p.out);
  params.dout = rows_of(p.dout);
  params.lse = static_cast<const float*>(p.lse);
  params.dlse = static_cast<const float*>(p.dlse);
  params.lse_strides = p.lse_strides;
  params.dlse_strides = p.dlse_strides;
  params.dq = gradient_of(p.dq);
  params.dk = gradient_of(p.dk);
  params.dv = gradient_of(p.dv);
  params.accumulate = p.accumulate ? 1 : 0;
  params.row_lse = reinterpret_cast<float*>(workspace + layout.row_lse);
  params.row_delta = reinterpret_cast<float*>(workspace + layout.row_delta);
  params.dq_sums = reinterpret_cast<float*>(workspace + layout.dq_sums);
  params.turns = reinterpret_cast<uint32_t*>(workspace + layout.turns);
  params.ticket = reinterpret_cast<uint32_t*>(workspace + layout.ticket);
  params.batch = static_cast<int32_t>(p.batch);
  params.seq_q = static_cast<int32_t>(p.seq_q);
  params.seq_k = static_cast<int32_t>(p.seq_k);
  params.heads_q = static_cast<int32_t>(p.heads_q);
  params.heads_kv = static_cast<int32_t>(p.heads_kv);
  params.heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
  params.dim = static_cast<int32_t>(p.dim);
  params.dim_v = static_cast<int32_t>(p.dim_v);
  params.score = score_options(p);
  params.scale = p.scale;
  params.tiles_q = static_cast<int32_t>(tiles_q_of(p, entry));
  params.tiles_k = static_cast<int32_t>(ceil_div(p.seq_k, int64_t{entry.tile_k}));
  params.heads_per_group = heads_per_group(params, facts.l2_bytes / kShareOfL2);
  return params;
}

flashmoe_status launch(const AttentionBackwardProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(read_device_facts(device_id, &facts, Reason()));
  const Params params = make_params(problem, *static_cast<const Entry*>(plan.entries[1]), *facts,
                                    static_cast<char*>(workspace));
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    FLASHMOE_TRY(launch_planned(plan, i, &params, stream));
  }
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::sm89_backward

namespace flashmoe {

const AttentionBackwardFamily kSm89AttentionBackward = {
    "sm89", FLASHMOE_DEVICE_CUDA, &sm89_backward::plan, &sm89_backward::launch};

}  // namespace flashmoe
