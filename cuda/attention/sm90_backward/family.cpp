// The sm_90 family of the attention backward: which kernel serves a problem, and with what
// parameters it and its prologue are launched.
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/backward/launches.h"
#include "cuda/attention/sm90_backward/cost.h"
#include "cuda/attention/sm90_backward/entry.h"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/walkable.h"

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

flashmoe_status check_computable(const AttentionBackwardProblem& p, const Reason& reason) {
  FLASHMOE_TRY(refuse_sequences(p, reason));
  int most_dim = 0;
  for (const Entry* entry : kEntries) most_dim = std::max(most_dim, entry->dim);
  if (std::max(p.dim, p.dim_v) > most_dim) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "head dimensions %lld and %lld, accepted are up to %d",
                         static_cast<long long>(p.dim), static_cast<long long>(p.dim_v), most_dim);
  }
  FLASHMOE_TRY(attention_backward::check_lengths(p, reason));
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
  // Persistent: a multiprocessor holds one block.
  FLASHMOE_TRY(attention_backward::plan_launches(problem, *entry, *facts, "a",
                                                 facts->multiprocessors, reason, plan));
  plan->info.microseconds =
      attention_backward::microseconds_of(problem, *entry, speed_of(*entry), *facts);
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
      map(&Params::k, p.k, p.dim, p.seq_k, p.heads_kv, entry.tile_k / entry.cluster),
      map(&Params::v, p.v, p.dim_v, p.seq_k, p.heads_kv, entry.tile_k / entry.cluster),
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

void fill_repeats(const AttentionBackwardProblem& p, Params* params) {
  const auto repeats = [](const RowStrides& strides) {
    return Repeats{strides.batch == 0 ? 0 : 1, strides.head == 0 ? 0 : 1};
  };
  params->q_repeats = repeats(p.q.strides);
  params->k_repeats = repeats(p.k.strides);
  params->v_repeats = repeats(p.v.strides);
  params->dout_repeats = repeats(p.dout.strides);
}

// Behind the addresses.
void fill_directs(const AttentionBackwardProblem& p, Params* params) {
  params->dq_direct = is_direct(p, p.dq) ? params->dq_rows : Direct{};
  params->dk_direct = is_direct(p, p.dk) ? params->dk_rows : Direct{};
  params->dv_direct = is_direct(p, p.dv) ? params->dv_rows : Direct{};
}

flashmoe_status launch(const AttentionBackwardProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[1]);
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  Prepared<Kept> kept(plan.detail);
  const attention_backward::Layout layout = attention_backward::layout_of(problem, entry);
  char* const memory = static_cast<char*>(workspace);
  const auto maps = maps_of(problem, entry, memory + layout.unwanted);
  if (!kept.ready() || !move_maps(maps, &*kept)) {
    kept.set_ready(false);  // unless the driver takes every map
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(maps, problem.q.dtype, &*kept); }));
    attention_backward::fill_params(problem, entry, &kept->params);
    fill_repeats(problem, &kept->params);
    kept.set_ready(true);
  }
  attention_backward::fill_addresses(problem, layout, memory, &kept->params);
  fill_directs(problem, &kept->params);
  return attention_backward::launch_all(plan, &kept->params, stream);
}

}  // namespace
}  // namespace flashmoe::sm90_backward

namespace flashmoe {

const AttentionBackwardFamily kSm90AttentionBackward = {
    "sm90", FLASHMOE_DEVICE_CUDA, &sm90_backward::plan, &sm90_backward::launch};

}  // namespace flashmoe
