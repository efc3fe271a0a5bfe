// Batches of sequences in whole tiles of one query head: their estimate, plan, parameters and
// launch. Lengths are read by the kernel alone: nothing here depends on them.
#include <algorithm>
#include <climits>

#include "cuda/attention/sm90/cost.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/ragged_order.h"
#include "cuda/attention/sm90/schedules.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {
namespace {

// What a launch takes until its first tile is found, beside a dense one.
constexpr double kStartOfSequences = 1.5;

// A view in a ragged map (ragged_rows.h): what it is of, and where its memory begins.
struct RaggedMap {
  MapShape shape;
  const void* begin;
};

// Of `batch` rows of so many rows, whose sequences have at most `most`.
template <class Data>
RaggedMap ragged_map(const RowsView<Data>& view, int64_t dim, int64_t batch, int64_t rows,
                     int64_t heads, int64_t most, int columns, int box_rows) {
  // Of a single row the stride may be anything, and is not walked but by sums that are 0.
  const int64_t stride = rows > 1 ? view.strides.seq : columns;
  const MapShape shape = {5,
                          {dim, most, heads, rows + most, batch},
                          {1, stride, view.strides.head, stride, view.strides.batch},
                          {columns, box_rows, 1, 1, 1}};
  const auto begin = reinterpret_cast<uintptr_t>(view.data) -
                     static_cast<uintptr_t>(most * stride * dtype_bytes(view.dtype));
  return {shape, reinterpret_cast<const void*>(begin)};
}

// Those of q, k, v and out.
struct RaggedMaps {
  RaggedMap q;
  RaggedMap k;
  RaggedMap v;
  RaggedMap out;
};

RaggedMaps ragged_maps(const AttentionProblem& p, const Entry& entry) {
  const TensorRows rows = tensor_rows(p);
  const auto queries = [&](const auto& view, int64_t dim) {
    return ragged_map(view, dim, rows.batch_q, rows.rows_q, p.heads_q, p.seq_q, entry.box_columns,
                      entry.box_rows);
  };
  const RaggedMap q = queries(p.q, p.dim);
  const auto keys = [&](const RowsView<const void>& view, int64_t dim) {
    // Without keys the tensor may be null, which a map is not; none is read then.
    if (p.seq_k == 0 || rows.batch_k == 0) return q;
    return ragged_map(view, dim, rows.batch_k, rows.rows_k, p.heads_kv, p.seq_k, entry.box_columns,
                      entry.tile_k);
  };
  return {q, keys(p.k, p.dim), keys(p.v, p.dim_v), queries(p.out, p.dim_v)};
}

bool encode_maps(const AttentionProblem& p, const Entry& entry, Kept<RaggedParams>* kept) {
  const RaggedMaps maps = ragged_maps(p, entry);
  int i = 0;
  const auto encode = [&](CUtensorMap* map, const RaggedMap& of) {
    kept->mapped[i++] = of.begin;
    return encode_map(map, p.q.dtype, of.begin, of.shape);
  };
  RaggedParams& params = kept->params;
  return encode(&params.q, maps.q) && encode(&params.k, maps.k) && encode(&params.v, maps.v) &&
         encode(&params.out, maps.out);
}

bool move_maps(const AttentionProblem& p, const Entry& entry, Kept<RaggedParams>* kept) {
  const RaggedMaps maps = ragged_maps(p, entry);
  RaggedParams& params = kept->params;
  return move_map(&params.q, &kept->mapped[0], maps.q.begin) &&
         move_map(&params.k, &kept->mapped[1], maps.k.begin) &&
         move_map(&params.v, &kept->mapped[2], maps.v.begin) &&
         move_map(&params.out, &kept->mapped[3], maps.out.begin);
}

void fill_params(const AttentionProblem& p, const DeviceFacts& facts, RaggedParams* params) {
  fill_tensors(p, params);
  params->by_heads_q = Divisor::of(static_cast<uint32_t>(p.heads_q));
  params->by_heads_per_kv = Divisor::of(static_cast<uint32_t>(p.heads_q / p.heads_kv));
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  const ScoreOptions& score = params->score;
  params->grows = score.bounded_right != 0 && score.left_offset == kNoLeftOffset ? 1 : 0;
  // Beside the traffic of queries and outputs, as of dense batches.
  params->keys_of_l2 =
      static_cast<int32_t>(std::min<int64_t>(facts.l2_bytes * 3 / 4 / key_bytes(p), INT32_MAX));
}

}  // namespace

flashmoe_status estimate_ragged(const AttentionProblem& problem, const Work& work,
                                const Entry* entry, const DeviceFacts& facts,
                                WholeTiles* whole_tiles, const Reason& reason) {
  if (problem.sequences.paged) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "keys in pages");
  }
  // What a chunk of sequences may have, in whatever order tables have them, the kernel counts.
  constexpr int64_t kMost = INT_MAX / 2;
  const int64_t tiles_per_head = (problem.seq_q + entry->tile_q - 1) / entry->tile_q;
  const int64_t sequences = std::min<int64_t>(problem.batch, kSequencesPerChunk);
  if (problem.batch > kMost || problem.heads_q > kMost ||
      tiles_per_head * sequences > kMost / problem.heads_q) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^30 tiles of query rows of 32 sequences");
  }
  int64_t tiles = 0;
  has_slots_by_rows(problem, entry->tile_q, &tiles);
  *whole_tiles = {
      entry, std::min<int64_t>(tiles * problem.heads_q, facts.multiprocessors),
      kStartOfSequences + kBesideFewRows * tile_microseconds(work, tile_speed(entry->dim), facts)};
  return FLASHMOE_OK;
}

flashmoe_status launch_ragged(const AttentionProblem& problem, const Plan& plan, void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const int device_id = problem.device.device_id;
  Prepared<Kept<RaggedParams>> kept(plan.detail);
  if (!kept.ready() || !move_maps(problem, entry, &*kept)) {
    kept.set_ready(false);  // unless the driver takes every map
    const DeviceFacts* facts = nullptr;
    FLASHMOE_TRY(read_device_facts(device_id, &facts, Reason()));
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(problem, entry, &*kept); }));
    fill_params(problem, *facts, &kept->params);
    kept.set_ready(true);
  }
  RaggedParams& params = kept->params;
  fill_addresses(problem, &params);
  params.sequences = sequence_params(problem);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace flashmoe::sm90
