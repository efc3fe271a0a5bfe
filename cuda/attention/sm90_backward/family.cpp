// The sm_90 family of the attention backward: which kernel serves a problem, and with what
// parameters it and its prologue are launched.
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/sm90_backward/cost.h"
#include "cuda/attention/sm90_backward/entry.h"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/walkable.h"
#include "cuda/tile/extents.h"

namespace flashmoe::sm90_backward {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm90_backward/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm90_backward/entries.inc"
#undef FLASHMOE_ENTRY
};

constexpr int64_t kMostTiles = int64_t{1} << 30;

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
  int64_t unwanted;  // a row, for tensors that are absent or have no rows
  int64_t dq_sums;
  int64_t bytes;
};

Layout layout_of(const AttentionProblem& p, const Entry& entry) {
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
  layout.turns = take(tiles * entry.dq_panels * int64_t{sizeof(uint32_t)});
  layout.ticket = take(sizeof(uint32_t));
  layout.unwanted = take(std::max(p.dim, p.dim_v) * dtype_bytes(p.q.dtype));
  layout.dq_sums = take(tiles * entry.tile_q * entry.dim * kFloat);
  return layout;
}

flashmoe_status check_computable(const AttentionBackwardProblem& p, const Reason& reason) {
  int most_dim = 0;
  for (const Entry* entry : kEntries) most_dim = std::max(most_dim, entry->dim);
  if (std::max(p.dim, p.dim_v) > most_dim) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "head dimensions %lld and %lld, accepted are up to %d",
                         static_cast<long long>(p.dim), static_cast<long long>(p.dim_v), most_dim);
  }
  if (p.seq_q > kMaxSequence || p.seq_k > kMaxSequence) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "sequence longer than 2^30");
  }
  return check_walkable(p, reason);
}

flashmoe_status plan(const AttentionBackwardProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(device_id, &facts, reason));
  FLASHMOE_TRY(check_computable(problem, reason));
  const bool capped = problem.softcap != 0.0f;
  const Entry* const entry = find_entry(
      kEntries, problem, [&](const Entry& each) { return each.capped == capped; },
      [](const Entry&) { return true; });
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
  }
  const int64_t tiles_q = tiles_q_of(problem, *entry);
  const int64_t tiles_k = ceil_div(problem.seq_k, int64_t{entry->tile_k});
  const int64_t blocks_per_tile = entry->tile_q / entry->prologue_rows;
  const auto too_many = [&](int64_t heads, int64_t tiles) {
    return problem.batch > kMostTiles || heads > kMostTiles ||
           tiles * std::max<int64_t>(1, problem.batch) > kMostTiles / heads;
  };
  if (too_many(problem.heads_q, tiles_q * blocks_per_tile) || too_many(problem.heads_kv, tiles_k)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^30 tiles of rows or keys");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry->prologue, device_id, *facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  const int64_t rows_of_blocks = problem.batch * problem.heads_q * tiles_q * blocks_per_tile;
  plan_launch(entry->prologue, device_id, "a", rows_of_blocks, entry->prologue_threads, 0, plan)
      .tile_m = entry->prologue_rows;
  // Persistent: no more blocks than multiprocessors, each of which holds one.
  const int64_t items = problem.batch * problem.heads_kv * tiles_k;
  plan_launch(*entry, device_id, "a", std::clamp<int64_t>(items, 1, facts->multiprocessors), plan);
  if (problem.dsinks.data != nullptr) {
    FLASHMOE_TRY(load_kernel(entry->sinks, device_id, *facts, &arch, reason));
    plan_launch(entry->sinks, device_id, "a", problem.heads_q, entry->sinks_threads,
                entry->sinks.shared_bytes, plan);
  }
  plan->info.workspace_bytes = static_cast<uint64_t>(layout_of(problem, *entry).bytes);
  plan->info.microseconds = microseconds_of(problem, *entry, *facts);
  return FLASHMOE_OK;
}

// What is kept with a plan: the parameters of its launches, and what their maps are of.
constexpr int kMaps = 7;
struct Kept {
  Params params;
  const void* mapped[kMaps];
};

struct MapOf {
  CUtensorMap Params::* map;
  const void* data;
  MapShape shape;
};

// Whether consumers write a gradient themselves, since the copy engine cannot.
bool is_direct(const AttentionBackwardProblem& p, const RowsView<void>& gradient) {
  return gradient.data != nullptr && (p.accumulate || gradient.dtype != p.q.dtype);
}

// A tensor that is absent or has no rows gets a map of one row in the workspace: what a store has
// beyond it the copy engine leaves out. So does a gradient that needs no map.
std::array<MapOf, kMaps> maps_of(const AttentionBackwardProblem& p, const Entry& entry,
                                 void* unwanted) {
  const auto map = [&](CUtensorMap Params::* member, const auto& view, int64_t dim, int64_t seq,
                       int64_t heads, int rows) {
    const bool any = view.data != nullptr && seq > 0;
    return MapOf{member, any ? view.data : unwanted,
                 rows_map(any ? view.strides : RowStrides{}, dim, seq, heads, p.batch,
                          entry.box_columns, rows)};
  };
  const auto gradient = [&](CUtensorMap Params::* member, const RowsView<void>& view, int64_t dim,
                            int64_t seq, int64_t heads) {
    return map(member, is_direct(p, view) ? RowsView<void>{} : view, dim, seq, heads,
               entry.box_rows);
  };
  return {
      map(&Params::q, p.q, p.dim, p.seq_q, p.heads_q, entry.tile_q),
      map(&Params::k, p.k, p.dim, p.seq_k, p.heads_kv, entry.tile_k),
      map(&Params::v, p.v, p.dim_v, p.seq_k, p.heads_kv, entry.tile_k),
      map(&Params::dout, p.dout, p.dim_v, p.seq_q, p.heads_q, entry.tile_q),
      gradient(&Params::dq, p.dq, p.dim, p.seq_q, p.heads_q),
      gradient(&Params::dk, p.dk, p.dim, p.seq_k, p.heads_kv),
      gradient(&Params::dv, p.dv, p.dim_v, p.seq_k, p.heads_kv),
  };
}

bool encode_maps(const std::array<MapOf, kMaps>& maps, Dtype dtype, Kept* kept) {
  for (int i = 0; i < kMaps; ++i) {
    if (!encode_map(&(kept->params.*maps[i].map), dtype, maps[i].data, maps[i].shape)) return false;
    kept->mapped[i] = maps[i].data;
  }
  return true;
}

bool move_maps(const std::array<MapOf, kMaps>& maps, Kept* kept) {
  for (int i = 0; i < kMaps; ++i) {
    if (!move_map(&(kept->params.*maps[i].map), &kept->mapped[i], maps[i].data)) return false;
  }
  return true;
}

Repeats repeats(const RowStrides& strides) {
  return {strides.batch == 0 ? 0 : 1, strides.head == 0 ? 0 : 1};
}

Direct direct(const AttentionBackwardProblem& p, const RowsView<void>& gradient) {
  if (!is_direct(p, gradient)) return {nullptr, {}, 0};
  return {gradient.data, gradient.strides, gradient.dtype == Dtype::kFloat32 ? 1 : 0};
}

// But for addresses.
void fill_params(const AttentionBackwardProblem& p, const Entry& entry, Params* params) {
  params->q_repeats = repeats(p.q.strides);
  params->k_repeats = repeats(p.k.strides);
  params->v_repeats = repeats(p.v.strides);
  params->dout_repeats = repeats(p.dout.strides);
  params->out_strides = p.out.strides;
  params->dout_strides = p.dout.strides;
  params->dq_strides = p.dq.strides;
  params->accumulate = p.accumulate ? 1 : 0;
  params->dsink_stride = p.dsinks.stride;
  params->dsinks_are_fp32 = p.dsinks.dtype == Dtype::kFloat32 ? 1 : 0;
  params->lse_strides = p.lse_strides;
  params->dlse_strides = p.dlse_strides;
  params->batch = static_cast<int32_t>(p.batch);
  params->seq_q = static_cast<int32_t>(p.seq_q);
  params->seq_k = static_cast<int32_t>(p.seq_k);
  params->heads_q = static_cast<int32_t>(p.heads_q);
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  params->heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
  params->dim = static_cast<int32_t>(p.dim);
  params->dim_v = static_cast<int32_t>(p.dim_v);
  params->score = score_options(p);
  params->scale = p.scale;
  params->tiles_q = static_cast<int32_t>(tiles_q_of(p, entry));
  params->tiles_k = static_cast<int32_t>(ceil_div(p.seq_k, int64_t{entry.tile_k}));
  const int64_t heads_per_kv = p.heads_q / p.heads_kv;
  const int64_t row_bytes = (p.dim + p.dim_v) * dtype_bytes(p.q.dtype) + p.dim * 4;  // Q, dO, a sum
  params->order = order_of(p.batch * p.heads_kv, heads_per_kv, params->tiles_k,
                           p.seq_q * heads_per_kv * row_bytes, p.bounded_right);
}

void fill_addresses(const AttentionBackwardProblem& p, const Layout& layout, char* workspace,
                    Params* params) {
  params->out_rows = static_cast<const uint16_t*>(p.out.data);
  params->dout_rows = static_cast<const uint16_t*>(p.dout.data);
  params->dq_direct = direct(p, p.dq);
  params->dk_direct = direct(p, p.dk);
  params->dv_direct = direct(p, p.dv);
  params->dq_rows = params->dq_direct.rows == nullptr ? static_cast<uint16_t*>(p.dq.data) : nullptr;
  params->lse = static_cast<const float*>(p.lse);
  params->dlse = static_cast<const float*>(p.dlse);
  params->score.sinks = p.sinks.data;
  params->dsinks = p.dsinks.data;
  params->row_lse = reinterpret_cast<float*>(workspace + layout.row_lse);
  params->row_delta = reinterpret_cast<float*>(workspace + layout.row_delta);
  params->dq_sums = reinterpret_cast<float*>(workspace + layout.dq_sums);
  params->turns = reinterpret_cast<uint32_t*>(workspace + layout.turns);
  params->ticket = reinterpret_cast<uint32_t*>(workspace + layout.ticket);
}

flashmoe_status launch(const AttentionBackwardProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[1]);
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  Prepared<Kept> kept(plan.detail);
  const Layout layout = layout_of(problem, entry);
  char* const memory = static_cast<char*>(workspace);
  const auto maps = maps_of(problem, entry, memory + layout.unwanted);
  if (!kept.ready() || !move_maps(maps, &*kept)) {
    kept.set_ready(false);  // unless the driver takes every map
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(maps, problem.q.dtype, &*kept); }));
    fill_params(problem, entry, &kept->params);
    kept.set_ready(true);
  }
  fill_addresses(problem, layout, memory, &kept->params);
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    FLASHMOE_TRY(launch_planned(plan, i, &kept->params, stream));
  }
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::sm90_backward

namespace flashmoe {

const AttentionBackwardFamily kSm90AttentionBackward = {
    "sm90", FLASHMOE_DEVICE_CUDA, &sm90_backward::plan, &sm90_backward::launch};

}  // namespace flashmoe
