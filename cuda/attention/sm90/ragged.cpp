// Batches of sequences in whole tiles, of a query head or of several heads of a KV head: estimate,
// plan, parameters and launch. Only the kernel reads lengths: nothing here depends on them.
#include <algorithm>
#include <climits>
#include <utility>

#include "cuda/attention/ragged_maps.h"
#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90/cost.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/kv_block_alignment.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/ragged_order.h"
#include "cuda/attention/sm90/schedules.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {
namespace {

// Additional microseconds of a launch until its first tile is found, compared with a dense one.
constexpr double kStartOfSequences = 1.5;

// Bytes of keys and values that reach one multiprocessor per microsecond, mostly from the L2: each
// tile loads its own, even if others load the same. Mixed batches, and four queries per sequence,
// took as long on an H200 as at 4.3 to 4.6 TB/s (docs/kernels/attention_sm90_ragged.md).
constexpr double kLoadRate = 34e3;

// Time of a key of a tile whose rows are those of several heads: such a tile is a single one of few
// keys at a time, whose steps wait for their pages. Measured on an H200, in pages of 64 rows, where
// multiprocessors had one tile each, or 256 tiles at dim 64.
double key_of_packed_microseconds(int dim) {
  return dim <= 64 ? 9.1e-3 : dim <= 128 ? 10.9e-3 : 15.5e-3;
}

// Tiles per block in a swizzle group.
constexpr int kRoundsOfSwizzle = 8;

// The same for sequences of at most one row, in tiles whose rows are heads. No sequence ends inside
// the heads, so coordinates need no correction.
template <class Data>
RaggedMap heads_map(const RowsView<Data>& view, int64_t dim, const CountedRows& rows, int64_t tiles,
                    int64_t heads, int columns, int box_rows) {
  return {{5,
           {dim, heads, tiles, rows.count, 1},
           {1, view.strides.head, heads * view.strides.head, rows.stride, 0},
           {columns, box_rows, 1, 1, 1}},
          view.data};
}

int64_t group_of(const AttentionProblem& p) { return p.heads_q / p.heads_kv; }

// Whether a map of q or out can have the heads of a KV head as a dimension.
bool are_walkable(const AttentionProblem& p, const RowStrides& strides) {
  return strides.head > 0 && group_of(p) * strides.head * dtype_bytes(p.q.dtype) < kMaxStrideBytes;
}

// Queries of a tile of a packed kernel, all of whose heads are in it.
int64_t queries_per_group(const AttentionProblem& p) { return kRowsPerGroup / group_of(p); }
int64_t queries_per_tile(const AttentionProblem& p, const Entry& entry) {
  return entry.packed ? entry.tile_q / kRowsPerGroup * queries_per_group(p) : entry.tile_q;
}

// See RaggedParams. A tile has all query heads of a KV head, or one. It has all if its rows see the
// same keys and begin with the same state, without a sink.
int64_t heads_per_tile(const AttentionProblem& p, const Entry& entry) {
  if (entry.packed) return group_of(p);
  const AttentionMask& mask = p.sequences.mask;
  const bool left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right =
      mask.causal != FLASHMOE_CAUSAL_NONE || (mask.window & FLASHMOE_WINDOW_RIGHT) != 0;
  const int64_t group = group_of(p);
  const bool alike =
      !left && p.sinks.data == nullptr &&
      (!right || (mask.causal != FLASHMOE_CAUSAL_TOP_LEFT && p.sequences.q_offset.data == nullptr));
  const bool packs = p.seq_q == 1 && group > 1 && group <= entry.tile_q;
  return packs && alike && are_walkable(p, p.q.strides) && are_walkable(p, p.out.strides) ? group
                                                                                          : 1;
}

// The ragged map of packed rows: over [dim, heads, row, base, wrap], in boxes of a group's queries.
template <class Data>
RaggedMap packed_map(const AttentionProblem& p, const RowsView<Data>& view, int64_t dim,
                     const CountedRows& rows, const Entry& entry) {
  RaggedMap map = ragged_map(view, dim, rows, p.heads_q, entry.box_columns, 1);
  std::swap(map.shape.extents[1], map.shape.extents[2]);
  std::swap(map.shape.strides[1], map.shape.strides[2]);
  map.shape.box[1] = static_cast<int>(group_of(p));
  map.shape.box[2] = static_cast<int>(queries_per_group(p));
  return map;
}

// The maps of q, k, v and out.
struct RaggedMaps {
  RaggedMap q;
  RaggedMap k;
  RaggedMap v;
  RaggedMap out;
};

// Without keys the tensors may be null, which no map accepts; nothing is read then. Pages have maps
// of their own.
bool maps_keys(const AttentionProblem& p) {
  return !p.sequences.paged && p.seq_k > 0 && tensor_rows(p).batch_k > 0;
}

RaggedMaps ragged_maps(const AttentionProblem& p, const Entry& entry) {
  const TensorRows rows = tensor_rows(p);
  const int64_t heads = heads_per_tile(p, entry);
  const int columns = entry.box_columns;
  const auto queries = [&](const auto& view, int64_t dim) {
    const CountedRows counted = counted_rows(view, rows.batch_q, rows.rows_q, columns);
    if (entry.packed) return packed_map(p, view, dim, counted, entry);
    if (heads > 1) {
      return heads_map(view, dim, counted, p.heads_q / heads, heads, columns, entry.box_rows);
    }
    return ragged_map(view, dim, counted, p.heads_q, columns, entry.box_rows);
  };
  const RaggedMap q = queries(p.q, p.dim);
  const auto keys = [&](const RowsView<const void>& view, int64_t dim) {
    if (!maps_keys(p)) return q;
    return ragged_map(view, dim, counted_rows(view, rows.batch_k, rows.rows_k, columns), p.heads_kv,
                      columns, entry.tile_k);
  };
  return {q, keys(p.k, p.dim), keys(p.v, p.dim_v), queries(p.out, p.dim_v)};
}

// Refuses views that ragged maps cannot describe.
flashmoe_status check_counted(const AttentionProblem& p, const Entry& entry, const Reason& reason) {
  if (p.batch == 0 || p.seq_q == 0) return FLASHMOE_OK;  // strides are 0 then
  const TensorRows rows = tensor_rows(p);
  const auto check = [&](const char* name, const auto& view, int64_t batch, int64_t of_batch) {
    return check_counted_rows(name, view, batch, of_batch, entry.box_columns, reason);
  };
  FLASHMOE_TRY(check("q", p.q, rows.batch_q, rows.rows_q));
  FLASHMOE_TRY(check("out", p.out, rows.batch_q, rows.rows_q));
  if (!maps_keys(p)) return FLASHMOE_OK;
  FLASHMOE_TRY(check("k", p.k, rows.batch_k, rows.rows_k));
  return check("v", p.v, rows.batch_k, rows.rows_k);
}

RowsPerBatch rows_per_batch(const AttentionProblem& p, const Entry& entry) {
  const TensorRows rows = tensor_rows(p);
  const auto of = [&](const auto& view, int64_t batch, int64_t of_batch) {
    return static_cast<int32_t>(counted_rows(view, batch, of_batch, entry.box_columns).per_batch);
  };
  RowsPerBatch result = {};
  result.q = of(p.q, rows.batch_q, rows.rows_q);
  result.out = of(p.out, rows.batch_q, rows.rows_q);
  if (!maps_keys(p)) return result;
  result.k = of(p.k, rows.batch_k, rows.rows_k);
  result.v = of(p.v, rows.batch_k, rows.rows_k);
  return result;
}

bool reads_pages(const AttentionProblem& p) { return p.sequences.paged && p.seq_k > 0; }

// Kept with a plan: the same as for dense batches, and the addresses of the maps of pages.
struct KeptRagged : Kept<RaggedParams> {
  const void* pages[2];
};

// Calls function(map, size) for each map of pages, in boxes of 2^size rows, until one call returns
// false.
template <class Function>
bool every_map_of_pages(const Entry& entry, CUtensorMap (&maps)[kPageBoxes],
                        const Function& function) {
  for (int size = 0; size < kPageBoxes && 1 << size <= entry.tile_k; ++size) {
    if (!function(&maps[size], size)) return false;
  }
  return true;
}

// Without pages, tables name no valid page, and nothing is read. But a map needs an address all the
// same.
const void* mapped_pages(const AttentionProblem& p, const void* data) {
  return p.sequences.batch_k > 0 ? data : p.q.data;
}

MapShape pages_map(const AttentionProblem& p, const RowStrides& strides, int64_t dim, int columns,
                   int rows) {
  const SequenceTables& tables = p.sequences;
  if (tables.batch_k == 0) return rows_map(strides, dim, 1, 1, 1, columns, rows);
  return rows_map(strides, dim, tables.rows_k, p.heads_kv, tables.batch_k, columns, rows);
}

bool encode_pages(const AttentionProblem& p, const Entry& entry, KeptRagged* kept) {
  if (!reads_pages(p)) return true;
  kept->pages[0] = mapped_pages(p, p.k.data);
  kept->pages[1] = mapped_pages(p, p.v.data);
  const auto encode = [&](CUtensorMap(&maps)[kPageBoxes], const void* data,
                          const RowStrides& strides, int64_t dim) {
    return every_map_of_pages(entry, maps, [&](CUtensorMap* map, int size) {
      return encode_map(map, p.k.dtype, data,
                        pages_map(p, strides, dim, entry.box_columns, 1 << size));
    });
  };
  return encode(kept->params.k_pages, kept->pages[0], p.k.strides, p.dim) &&
         encode(kept->params.v_pages, kept->pages[1], p.v.strides, p.dim_v);
}

bool move_pages(const AttentionProblem& p, const Entry& entry, KeptRagged* kept) {
  if (!reads_pages(p)) return true;
  const auto move = [&](CUtensorMap(&maps)[kPageBoxes], const void** mapped, const void* data) {
    const void* const from = *mapped;
    return every_map_of_pages(entry, maps, [&](CUtensorMap* map, int) {
      *mapped = from;
      return move_map(map, mapped, mapped_pages(p, data));
    });
  };
  return move(kept->params.k_pages, &kept->pages[0], p.k.data) &&
         move(kept->params.v_pages, &kept->pages[1], p.v.data);
}

bool encode_maps(const AttentionProblem& p, const Entry& entry, KeptRagged* kept) {
  const RaggedMaps maps = ragged_maps(p, entry);
  int i = 0;
  const auto encode = [&](CUtensorMap* map, const RaggedMap& of) {
    kept->mapped[i++] = of.data;
    return encode_map(map, p.q.dtype, of.data, of.shape);
  };
  RaggedParams& params = kept->params;
  return encode(&params.q, maps.q) && encode(&params.k, maps.k) && encode(&params.v, maps.v) &&
         encode(&params.out, maps.out) && encode_pages(p, entry, kept);
}

bool move_maps(const AttentionProblem& p, const Entry& entry, KeptRagged* kept) {
  const RaggedMaps maps = ragged_maps(p, entry);
  RaggedParams& params = kept->params;
  return move_map(&params.q, &kept->mapped[0], maps.q.data) &&
         move_map(&params.k, &kept->mapped[1], maps.k.data) &&
         move_map(&params.v, &kept->mapped[2], maps.v.data) &&
         move_map(&params.out, &kept->mapped[3], maps.out.data) && move_pages(p, entry, kept);
}

void fill_params(const AttentionProblem& p, const Entry& entry, const DeviceFacts& facts,
                 RaggedParams* params) {
  fill_tensors(p, params);
  const int64_t heads = heads_per_tile(p, entry);
  params->rows_per_batch = rows_per_batch(p, entry);
  params->heads_per_tile = entry.packed ? 1 : static_cast<int32_t>(heads);
  if (params->heads_per_tile > 1)
    params->seq_q = params->heads_per_tile;  // rows of a tile's sequence
  if (entry.packed) {
    params->packed_heads = static_cast<int32_t>(heads);
    params->packed_heads_reciprocal = (65536 + params->packed_heads - 1) / params->packed_heads;
    params->queries_per_group = static_cast<int32_t>(queries_per_group(p));
    params->by_queries_per_tile = Divisor::of(static_cast<uint32_t>(queries_per_tile(p, entry)));
  }
  params->heads_of_tiles = static_cast<int32_t>(p.heads_q / heads);
  params->by_heads_per_kv = Divisor::of(static_cast<uint32_t>(p.heads_q / p.heads_kv / heads));
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  const int64_t rows_of_level = entry.box_rows;  // or more: this is a bound
  params->most_levels =
      static_cast<int32_t>((int64_t{params->seq_q} + rows_of_level - 1) / rows_of_level);
  const ScoreOptions& score = params->score;
  params->grows = score.bounded_right != 0 && score.left_offset == kNoLeftOffset ? 1 : 0;
  // Leaves room for the traffic of queries and outputs, as for dense batches.
  params->keys_of_l2 =
      static_cast<int32_t>(std::min<int64_t>(facts.l2_bytes * 3 / 4 / key_bytes(p), INT32_MAX));
  params->tiles_of_swizzle = kRoundsOfSwizzle * facts.multiprocessors;
}

// Time of a step with the boxes of small pages, relative to that of its products: the copy engine
// issues boxes one after another. An estimate without a measurement.
double share_of_pages(const AttentionProblem& p, const Entry& entry) {
  constexpr double kClocksOfABox = 25;
  constexpr double kFlopsOfAClock = 4096;
  constexpr double kBoxesAtEnds = 6;  // pages begin and end anywhere in a step
  if (!reads_pages(p)) return 1;
  const auto page_size = static_cast<unsigned>(std::min<int64_t>(p.sequences.rows_k, entry.tile_k));
  int boxes_of_page = 0;
  for (unsigned rest = page_size; rest != 0; rest &= rest - 1) ++boxes_of_page;
  const double keys = entry.tile_k;
  const double columns = 1.0 * (entry.dim + entry.dim_v) / entry.box_columns;
  const double boxes = (keys / page_size * boxes_of_page + kBoxesAtEnds) * columns;
  const double products = 2.0 * entry.tile_q * keys * (entry.dim + entry.dim_v) / kFlopsOfAClock;
  return std::max(1.0, boxes * kClocksOfABox / products);
}

// Upper bound on all tiles, unless offsets overlap.
int64_t most_tiles(const AttentionProblem& p, const Entry& entry) {
  int64_t tiles = 0;
  has_slots_by_rows(p, queries_per_tile(p, entry), &tiles);
  return tiles * (p.heads_q / heads_per_tile(p, entry));
}

// If the call's kernel runs beside another, its blocks take tiles as they become free. A block then
// looks for a tile's successor when the tile is nearly loaded, not kTilesAhead earlier.
void divide(const AttentionProblem& p, const Plan& plan, const Entry& entry, RaggedParams* params) {
  params->division = static_cast<Division*>(plan.beside.division);
  params->tiles_ahead = kTilesAhead;
  params->keys_before_claim = static_cast<int32_t>(kMaxSequence);
  if (params->division == nullptr) return;
  constexpr int kStepsBeforeClaim = 2;
  params->tiles_ahead = 1;
  params->keys_before_claim = kStepsBeforeClaim * entry.tile_k;
  params->chains = reinterpret_cast<int32_t*>(params->division + 1);
  params->chains_room = static_cast<int32_t>(plan.info.launches[0].grid[0] + most_tiles(p, entry));
}

int64_t division_bytes(const AttentionProblem& p, const Entry& entry, int64_t blocks) {
  if (entry.packed) return 0;  // the division counts tiles of one head
  const int64_t tiles = p.batch * ((p.seq_q + entry.tile_q - 1) / entry.tile_q) * p.heads_q;
  if (tiles > INT_MAX / 2) return 0;  // the kernel could not count them
  return static_cast<int64_t>(sizeof(Division)) + 4 * (blocks + most_tiles(p, entry));
}

// Work by the rows of tiles: those of several heads, of which a packed kernel's groups lack some.
Work work_of_tiles(const Work& work, const AttentionProblem& p, const Entry& entry) {
  Work of_tiles = with_packed_heads(work, heads_per_tile(p, entry));
  if (entry.packed) {
    of_tiles.seq_q = ceil_of(work.seq_q, static_cast<double>(queries_per_group(p))) * kRowsPerGroup;
  }
  return of_tiles;
}

}  // namespace

bool packs_queries(const AttentionProblem& p) {
  const int64_t group = p.heads_kv > 0 ? group_of(p) : 1;
  const bool left = (p.sequences.mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  return p.seq_q > 1 && p.seq_q <= kRowsPerGroup && group > 1 && group <= kRowsPerGroup && !left &&
         p.sinks.data == nullptr && are_walkable(p, p.q.strides) && are_walkable(p, p.out.strides);
}

flashmoe_status estimate_ragged(const AttentionProblem& problem, const Work& work,
                                const Entry* entry, const DeviceFacts& facts,
                                WholeTiles* whole_tiles, const Reason& reason) {
  FLASHMOE_TRY(check_counted(problem, *entry, reason));
  // The kernel counts what a chunk of sequences may have, in any order of the tables: groups of
  // rows, of which a tile has some.
  constexpr int64_t kMost = INT_MAX / 2;
  const int64_t tile_queries = queries_per_tile(problem, *entry);
  const int64_t tiles_per_head = (problem.seq_q + tile_queries - 1) / tile_queries;
  const int64_t groups_per_head = tiles_per_head * (entry->tile_q / entry->box_rows);
  const int64_t sequences = std::min<int64_t>(problem.batch, kSequencesPerChunk);
  if (problem.batch > kMost || problem.heads_q > kMost ||
      groups_per_head * sequences > kMost / std::max<int64_t>(problem.heads_q, 1)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^30 groups of query rows of 32 sequences");
  }
  int64_t tiles = 0;
  has_slots_by_rows(problem, tile_queries, &tiles);
  const int64_t heads = heads_per_tile(problem, *entry);
  const auto all_tiles = static_cast<double>(tiles * (problem.heads_q / heads));
  const double loads = all_tiles * work.keys * work.key_bytes / (kLoadRate * facts.multiprocessors);
  const double steps = heads > 1 ? ceil_of(all_tiles, facts.multiprocessors) * work.keys *
                                       key_of_packed_microseconds(entry->dim)
                                 : 0;
  const double run =
      share_of_pages(problem, *entry) *
      tile_microseconds(work_of_tiles(work, problem, *entry), tile_speed(entry->dim), facts);
  const double microseconds =
      heads > 1 ? std::max({loads, steps, run}) : kUncounted * std::max(loads, run);
  const int64_t blocks =
      std::min<int64_t>(tiles * (problem.heads_q / heads), facts.multiprocessors);
  *whole_tiles = {entry, blocks, kStartOfSequences + microseconds,
                  division_bytes(problem, *entry, blocks)};
  return FLASHMOE_OK;
}

flashmoe_status launch_ragged(const AttentionProblem& problem, const Plan& plan, void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const int device_id = problem.device.device_id;
  Prepared<KeptRagged> kept(plan.detail);
  if (!kept.ready() || !move_maps(problem, entry, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes every map
    const DeviceFacts* facts = nullptr;
    FLASHMOE_TRY(read_device_facts(device_id, &facts, Reason()));
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(problem, entry, &*kept); }));
    fill_params(problem, entry, *facts, &kept->params);
    kept.set_ready(true);
  }
  RaggedParams& params = kept->params;
  fill_addresses(problem, &params);
  params.sequences = sequence_params(problem);
  divide(problem, plan, entry, &params);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace flashmoe::sm90
