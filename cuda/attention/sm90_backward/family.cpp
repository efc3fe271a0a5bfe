// The sm_90 family of the attention backward: which kernel serves a problem, and the parameters of
// its launch and that of its prologue.
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/backward/launches.h"
#include "cuda/attention/backward/ragged_launches.h"
#include "cuda/attention/ragged_maps.h"
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

// Whether consumers write a gradient themselves, because the copy engine cannot.
bool is_direct(const AttentionBackwardProblem& p, const RowsView<void>& gradient) {
  return gradient.data != nullptr && (p.accumulate || gradient.dtype != p.q.dtype);
}

// Views in ragged maps have further requirements of the copy engine.
flashmoe_status check_counted(const AttentionBackwardProblem& p, const Reason& reason) {
  const TensorRows rows = tensor_rows(p);
  if (p.batch == 0) return FLASHMOE_OK;
  const auto check = [&](const char* name, const auto& view, int64_t batch, int64_t of_batch) {
    if (view.data == nullptr || of_batch == 0) return FLASHMOE_OK;
    return check_counted_rows(name, view, batch, of_batch, kEntries[0]->box_columns, reason);
  };
  const auto stored = [&](const RowsView<void>& view) {
    return is_direct(p, view) ? RowsView<void>{} : view;
  };
  FLASHMOE_TRY(check("q", p.q, rows.batch_q, rows.rows_q));
  FLASHMOE_TRY(check("dout", p.dout, rows.batch_q, rows.rows_q));
  FLASHMOE_TRY(check("dq", stored(p.dq), rows.batch_q, rows.rows_q));
  FLASHMOE_TRY(check("k", p.k, rows.batch_k, rows.rows_k));
  FLASHMOE_TRY(check("v", p.v, rows.batch_k, rows.rows_k));
  FLASHMOE_TRY(check("dk", stored(p.dk), rows.batch_k, rows.rows_k));
  return check("dv", stored(p.dv), rows.batch_k, rows.rows_k);
}

flashmoe_status check_computable(const AttentionBackwardProblem& p, const Reason& reason) {
  FLASHMOE_TRY(refuse_bias_and_mask(p, reason));
  const bool ragged = p.sequences.given;
  int most_dim = 0;
  for (const Entry* entry : kEntries) {
    if (entry->ragged == ragged) most_dim = std::max(most_dim, entry->dim);
  }
  if (std::max(p.dim, p.dim_v) > most_dim) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "head dimensions %lld and %lld, accepted are up to %d%s",
                         static_cast<long long>(p.dim), static_cast<long long>(p.dim_v), most_dim,
                         ragged ? " of sequences" : "");
  }
  FLASHMOE_TRY(check_sequences_fit(p, reason));
  FLASHMOE_TRY(attention_backward::check_lengths(p, reason));
  FLASHMOE_TRY(check_walkable(p, reason));
  return ragged ? check_counted(p, reason) : FLASHMOE_OK;  // it divides by strides
}

// Marks of withheld rows, as offsets from the beginning of their area at the end of the workspace
// (params.h).
struct Marks {
  int64_t dk;
  int64_t dv;
  int64_t bytes;  // 0: nothing is withheld
};

Marks marks_of(const AttentionBackwardProblem& p, const Entry& entry) {
  if (!p.accumulate || !attention_backward::is_bounded(p)) return {};
  const attention_backward::TileCounts tiles =
      p.sequences.given ? attention_backward::ragged_tile_counts_of(p, entry)
                        : attention_backward::tile_counts_of(p, entry);
  constexpr int64_t kWarps = 4;  // per place of 64 rows, the rows of a box
  const auto bytes_of = [&](int64_t count, int64_t rows, int64_t parts) {
    return count * (rows / entry.box_rows) * parts * kWarps * int64_t{sizeof(uint2)};
  };
  const int64_t of_dq = bytes_of(tiles.queries, entry.tile_q, entry.dq_parts);
  const int64_t of_keys = bytes_of(tiles.keys, entry.tile_k, entry.key_parts);
  return {of_dq, of_dq + of_keys, of_dq + 2 * of_keys};
}

template <class AnyParams>
void fill_withheld(const AttentionBackwardProblem& p, const Plan& plan, const Entry& entry,
                   char* workspace, AnyParams* params) {
  const Marks marks = marks_of(p, entry);
  params->withheld = {};
  if (marks.bytes == 0) return;
  char* const memory = workspace + plan.info.workspace_bytes - marks.bytes;
  params->withheld.dq = reinterpret_cast<uint2*>(memory);
  params->withheld.dk = reinterpret_cast<uint2*>(memory + marks.dk);
  params->withheld.dv = reinterpret_cast<uint2*>(memory + marks.dv);
}

flashmoe_status plan(const AttentionBackwardProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(device_id, &facts, reason));
  FLASHMOE_TRY(check_computable(problem, reason));
  const bool capped = problem.softcap != 0.0f;
  const bool ragged = problem.sequences.given;
  const Entry* const entry = find_entry(
      kEntries, problem,
      [&](const Entry& each) { return each.capped == capped && each.ragged == ragged; },
      [](const Entry&) { return true; });
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
  }
  // The kernel is persistent, and a multiprocessor holds one block.
  const auto plan_launches =
      ragged ? attention_backward::plan_ragged_launches : attention_backward::plan_launches;
  FLASHMOE_TRY(plan_launches(problem, *entry, *facts, "a", facts->multiprocessors, reason, plan));
  plan->info.workspace_bytes += static_cast<uint64_t>(marks_of(problem, *entry).bytes);
  plan->info.microseconds =
      attention_backward::microseconds_of(problem, *entry, speed_of(*entry), *facts);
  return FLASHMOE_OK;
}

// Kept with a plan: the parameters of its launches, and the addresses of their maps.
constexpr int kMaps = 7;
template <class AnyParams>
struct KeptOf {
  AnyParams params;
  const void* mapped[kMaps];
};
using Kept = KeptOf<Params>;
using KeptRagged = KeptOf<RaggedParams>;

template <class Common>
struct MapIn {
  CUtensorMap ParamsOf<Common>::* map;
  const void* data;
  MapShape shape;
};
using MapOf = MapIn<attention_backward::CommonParams>;
using RaggedMapOf = MapIn<attention_backward::RaggedParams>;

// A tensor that is absent or has no rows gets a map of one row in the workspace; the copy engine
// drops what a store has beyond it. So does a gradient that needs no map.
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

// The same for ragged and padded batches, as ragged maps, which count the rows of the whole batch.
struct RaggedMaps {
  std::array<RaggedMapOf, kMaps> maps;
  int32_t RaggedParams::* rows_per_batch[kMaps];
  int32_t per_batch[kMaps];
};

RaggedMaps ragged_maps_of(const AttentionBackwardProblem& p, const Entry& entry, void* unwanted) {
  using P = ParamsOf<attention_backward::RaggedParams>;
  const TensorRows rows = tensor_rows(p);
  RaggedMaps made = {};
  int i = 0;
  const auto map = [&](CUtensorMap P::* member, int32_t RaggedParams::* per_batch, const auto& view,
                       int64_t dim, bool of_queries, int box_rows) {
    const int64_t batch = of_queries ? rows.batch_q : rows.batch_k;
    const int64_t of_batch = of_queries ? rows.rows_q : rows.rows_k;
    RaggedMapOf& to = made.maps[static_cast<size_t>(i)];
    made.rows_per_batch[i] = per_batch;
    if (view.data != nullptr && batch > 0 && of_batch > 0 && p.batch > 0) {
      const CountedRows counted = counted_rows(view, batch, of_batch, entry.box_columns);
      const RaggedMap ragged = ragged_map(view, dim, counted, of_queries ? p.heads_q : p.heads_kv,
                                          entry.box_columns, box_rows);
      to = {member, ragged.data, ragged.shape};
      made.per_batch[i] = static_cast<int32_t>(counted.per_batch);
    } else {
      to = {member,
            unwanted,
            {5, {dim, 1, 1, 1, 1}, {1, 0, 0, 0, 0}, {entry.box_columns, box_rows, 1, 1, 1}}};
    }
    ++i;
  };
  const auto stored = [&](const RowsView<void>& view) {
    return is_direct(p, view) ? RowsView<void>{} : view;
  };
  using R = RaggedParams;
  map(&P::q, &R::q_rows_per_batch, p.q, p.dim, true, entry.tile_q);
  map(&P::k, &R::k_rows_per_batch, p.k, p.dim, false, entry.tile_k);
  map(&P::v, &R::v_rows_per_batch, p.v, p.dim_v, false, entry.tile_k);
  map(&P::dout, &R::dout_rows_per_batch, p.dout, p.dim_v, true, entry.tile_q);
  map(&P::dq, &R::dq_rows_per_batch, stored(p.dq), p.dim, true, entry.box_rows);
  map(&P::dk, &R::dk_rows_per_batch, stored(p.dk), p.dim, false, entry.box_rows);
  map(&P::dv, &R::dv_rows_per_batch, stored(p.dv), p.dim_v, false, entry.box_rows);
  return made;
}

template <class AnyMaps, class AnyKept>
bool encode_maps(const AnyMaps& maps, Dtype dtype, AnyKept* kept) {
  for (size_t i = 0; i < kMaps; ++i) {
    if (!encode_map(&(kept->params.*maps[i].map), dtype, maps[i].data, maps[i].shape)) return false;
    kept->mapped[i] = maps[i].data;
  }
  return true;
}

template <class AnyMaps, class AnyKept>
bool move_maps(const AnyMaps& maps, AnyKept* kept) {
  for (size_t i = 0; i < kMaps; ++i) {
    if (!move_map(&(kept->params.*maps[i].map), &kept->mapped[i], maps[i].data)) return false;
  }
  return true;
}

template <class AnyParams>
void fill_repeats(const AttentionBackwardProblem& p, AnyParams* params) {
  const auto repeats = [](const RowStrides& strides) {
    return Repeats{strides.batch == 0 ? 0 : 1, strides.head == 0 ? 0 : 1};
  };
  params->q_repeats = repeats(p.q.strides);
  params->k_repeats = repeats(p.k.strides);
  params->v_repeats = repeats(p.v.strides);
  params->dout_repeats = repeats(p.dout.strides);
}

// Must follow the addresses.
template <class AnyParams>
void fill_directs(const AttentionBackwardProblem& p, AnyParams* params) {
  params->dq_direct = is_direct(p, p.dq) ? params->dq_rows : Direct{};
  params->dk_direct = is_direct(p, p.dk) ? params->dk_rows : Direct{};
  params->dv_direct = is_direct(p, p.dv) ? params->dv_rows : Direct{};
}

flashmoe_status launch_ragged(const AttentionBackwardProblem& problem, const Plan& plan,
                              const Entry& entry, char* memory, void* stream) {
  Prepared<KeptRagged> kept(plan.detail);
  RaggedParams& params = kept->params;
  const RaggedMaps made =
      ragged_maps_of(problem, entry, attention_backward::unwanted_row(problem, entry, memory));
  if (!kept.ready() || !move_maps(made.maps, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes every map
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, problem.device.device_id, [&] {
      return encode_maps(made.maps, problem.q.dtype, &*kept);
    }));
    attention_backward::fill_ragged_params(problem, entry, &params);
    fill_repeats(problem, &params);
    for (int i = 0; i < kMaps; ++i) params.*made.rows_per_batch[i] = made.per_batch[i];
    kept.set_ready(true);
  }
  attention_backward::fill_ragged_addresses(problem, entry, memory, &params);
  fill_directs(problem, &params);
  fill_withheld(problem, plan, entry, memory, &params);
  return launch_all(plan, &params, stream);
}

flashmoe_status launch(const AttentionBackwardProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const bool ragged = problem.sequences.given;
  const Entry& entry = *static_cast<const Entry*>(
      plan.entries[ragged ? attention_backward::kRaggedKernelLaunch : 1]);
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  char* const memory = static_cast<char*>(workspace);
  if (ragged) return launch_ragged(problem, plan, entry, memory, stream);
  Prepared<Kept> kept(plan.detail);
  const attention_backward::Layout layout = attention_backward::layout_of(problem, entry);
  const auto maps = maps_of(problem, entry, memory + layout.unwanted);
  if (!kept.ready() || !move_maps(maps, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes every map
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(maps, problem.q.dtype, &*kept); }));
    attention_backward::fill_params(problem, entry, &kept->params);
    fill_repeats(problem, &kept->params);
    kept.set_ready(true);
  }
  attention_backward::fill_addresses(problem, layout, memory, &kept->params);
  fill_directs(problem, &kept->params);
  fill_withheld(problem, plan, entry, memory, &kept->params);
  return launch_all(plan, &kept->params, stream);
}

}  // namespace
}  // namespace flashmoe::sm90_backward

namespace flashmoe {

const AttentionBackwardFamily kSm90AttentionBackward = {
    "sm90", FLASHMOE_DEVICE_CUDA, &sm90_backward::plan, &sm90_backward::launch};

}  // namespace flashmoe
