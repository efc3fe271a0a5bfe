#include "cuda/attention/backward/ragged_launches.h"

#include <algorithm>
#include <climits>

#include "cuda/attention/backward/tables.h"
#include "cuda/attention/launch.h"
#include "cuda/tile/extents.h"

namespace flashmoe::attention_backward {
namespace {

constexpr int64_t kMostTiles = int64_t{1} << 30;

// Upper bounds that the host knows, over all sequences if none share rows.
struct Bounds {
  int64_t tiles_q;
  int64_t tiles_k;
  int64_t sum_tiles;  // tiles of dQ in sequences with several key tiles
  int64_t chunks_q;
  int64_t chunks_k;
};

// Upper bound on the tiles of so many sequences of at most `most` rows each. If `packed`, they
// share `rows` contiguous rows.
int64_t most_tiles(int64_t sequences, int64_t most, int64_t tile, bool packed, int64_t rows) {
  const int64_t by_sequence = sequences * ceil_div(most, tile);
  return packed ? std::min(rows / tile + sequences, by_sequence) : by_sequence;
}

Bounds bounds_of(const AttentionBackwardProblem& p, const Entry& entry) {
  const SequenceTables& tables = p.sequences;
  const bool packed_q = tables.cu_seqlens_q.data != nullptr;
  const bool packed_k = tables.cu_seqlens_k.data != nullptr;
  Bounds bounds = {};
  bounds.tiles_q = most_tiles(p.batch, p.seq_q, entry.tile_q, packed_q, tables.rows_q);
  bounds.tiles_k = most_tiles(p.batch, p.seq_k, entry.tile_k, packed_k, tables.rows_k);
  int64_t with_sums = p.seq_k > entry.tile_k ? p.batch : 0;
  if (packed_k) with_sums = std::min(with_sums, tables.rows_k / (entry.tile_k + 1));
  bounds.sum_tiles = std::min(
      bounds.tiles_q, most_tiles(with_sums, p.seq_q, entry.tile_q, packed_q, tables.rows_q));
  const auto chunks = [](int64_t batch, int64_t rows) {
    return batch * ceil_div(rows, int64_t{kChunkRows});
  };
  if (!p.accumulate && p.dq.data != nullptr) {
    bounds.chunks_q = chunks(packed_q ? 1 : p.batch, tables.rows_q);
  }
  if (!p.accumulate && (p.dk.data != nullptr || p.dv.data != nullptr)) {
    bounds.chunks_k = chunks(tables.batch_k, tables.rows_k);
  }
  return bounds;
}

// Blocks of the prologue before those of chunks. The number of tiles must be within bounds.
int64_t prologue_blocks(const Bounds& bounds, const AttentionProblem& p, const Entry& entry) {
  return bounds.tiles_q * p.heads_q * (entry.tile_q / entry.prologue_rows);
}

// The offsets of the parts of the workspace.
struct RaggedLayout {
  Layout common;
  int64_t places;
  int64_t first_tiles;
  int64_t classes;
  int64_t first_items;
  int64_t totals;
  int64_t items;
  int64_t bytes;
};

RaggedLayout ragged_layout_of(const AttentionBackwardProblem& p, const Entry& entry) {
  constexpr int64_t kAlignment = 128;
  constexpr int64_t kWord = sizeof(float);
  static_assert(sizeof(int32_t) == kWord && sizeof(uint32_t) == kWord);
  const Bounds bounds = bounds_of(p, entry);
  RaggedLayout layout = {};
  const auto take = [&](int64_t bytes) {
    const int64_t begin = layout.bytes;
    layout.bytes += ceil_div(bytes, kAlignment) * kAlignment;
    return begin;
  };
  const int64_t tiles = bounds.tiles_q * p.heads_q;
  layout.common.row_lse = take(tiles * entry.tile_q * kWord);
  layout.common.row_delta = take(tiles * entry.tile_q * kWord);
  layout.common.turns = take(tiles * entry.dq_panels * kWord);
  layout.common.ticket = take(kWord);
  layout.common.split_turns = take(kWord);  // nothing is split
  layout.common.unwanted = take(std::max(p.dim, p.dim_v) * dtype_bytes(p.q.dtype));
  layout.places = take(p.batch * int64_t{sizeof(SequencePlace)});
  layout.first_tiles = take((p.batch + 1) * kWord);
  layout.classes = take((p.batch + 1) * int64_t{sizeof(SequenceClass)});
  layout.first_items = take((p.batch + 1) * kWord);
  layout.totals = take(sizeof(SequenceTotals));
  layout.items = take(bounds.tiles_k * p.heads_kv * int64_t{sizeof(RaggedItem)});
  layout.common.dq_sums = take(bounds.sum_tiles * p.heads_q * entry.tile_q * entry.dim * kWord);
  layout.common.split_sums = layout.common.dq_sums;
  layout.common.bytes = layout.bytes;
  return layout;
}

}  // namespace

TileCounts ragged_tile_counts_of(const AttentionBackwardProblem& p, const Entry& entry) {
  const Bounds bounds = bounds_of(p, entry);
  return {bounds.tiles_q * p.heads_q, bounds.tiles_k * p.heads_kv};
}

flashmoe_status plan_ragged_launches(const AttentionBackwardProblem& problem, const Entry& entry,
                                     const DeviceFacts& facts, const char* suffix,
                                     int64_t most_blocks, const Reason& reason, Plan* plan) {
  FLASHMOE_TRY(check_sequences_fit(problem, reason));
  const int device_id = problem.device.device_id;
  const Bounds bounds = bounds_of(problem, entry);
  const auto too_many = [](int64_t tiles, int64_t heads) {
    return heads > kMostTiles || tiles > kMostTiles / heads;
  };
  const int64_t chunks = bounds.chunks_q + bounds.chunks_k;
  if (too_many(bounds.tiles_q * (entry.tile_q / entry.prologue_rows), problem.heads_q) ||
      too_many(bounds.tiles_k, problem.heads_kv) || chunks > kMostTiles) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^30 tiles of rows or keys");
  }
  const int64_t items = bounds.tiles_k * problem.heads_kv;
  const int64_t blocks = prologue_blocks(bounds, problem, entry) + chunks +
                         ceil_div(items, int64_t{entry.prologue_threads});
  if (blocks > INT_MAX) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^31 - 1 tiles of rows and chunks of gradients");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry.prologue, device_id, facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(entry, device_id, facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(kTablesKernel, device_id, facts, &arch, reason));
  plan_launch(kTablesKernel, device_id, suffix, 1, kTablesThreads, kTablesKernel.shared_bytes,
              plan);
  plan_launch(entry.prologue, device_id, suffix, std::max<int64_t>(blocks, 1),
              entry.prologue_threads, 0, plan)
      .tile_m = entry.prologue_rows;
  FLASHMOE_TRY(plan_items(problem, entry, facts, suffix, items, most_blocks, reason, plan));
  plan->info.workspace_bytes = static_cast<uint64_t>(ragged_layout_of(problem, entry).bytes);
  return FLASHMOE_OK;
}

void fill_ragged_params(const AttentionBackwardProblem& p, const Entry& entry,
                        RaggedParams* params) {
  fill_params(p, entry, params);
  const Bounds bounds = bounds_of(p, entry);
  params->batch = 1;
  params->tiles_q = static_cast<int32_t>(bounds.tiles_q);
  params->tiles_k = 0;
  params->split = {};
  params->tile_q = entry.tile_q;
  params->tile_k = entry.tile_k;
  params->at_a_time = static_cast<int32_t>(kBlocksOfLargest / entry.cluster);
  params->wave_heads = entry.wave_heads;
  params->row_bytes = static_cast<int32_t>(row_bytes_of(p));
  params->sum_tiles = static_cast<int32_t>(bounds.sum_tiles);
  params->most_tiles_k = static_cast<int32_t>(bounds.tiles_k);
  params->chunks_q = static_cast<int32_t>(bounds.chunks_q);
  params->chunks_k = static_cast<int32_t>(bounds.chunks_k);
  params->prologue_blocks = static_cast<int32_t>(prologue_blocks(bounds, p, entry));
  params->numbers_sequences = has_bias_or_mask(p) ? 1 : 0;
  if (params->numbers_sequences != 0 && p.sequences.cu_seqlens_q.data != nullptr) {
    for (RowStrides* strides :
         {&params->q_rows.strides, &params->out_rows.strides, &params->dout_rows.strides,
          &params->lse_strides, &params->dlse_strides, &params->dq_rows.strides}) {
      strides->batch = 0;
    }
  }
}

void* unwanted_row(const AttentionBackwardProblem& p, const Entry& entry, char* workspace) {
  return workspace + ragged_layout_of(p, entry).common.unwanted;
}

void fill_ragged_addresses(const AttentionBackwardProblem& p, const Entry& entry, char* workspace,
                           RaggedParams* params) {
  const RaggedLayout layout = ragged_layout_of(p, entry);
  fill_addresses(p, layout.common, workspace, params);
  params->sequences = sequence_params(p);
  params->places = reinterpret_cast<SequencePlace*>(workspace + layout.places);
  params->first_tiles = reinterpret_cast<int32_t*>(workspace + layout.first_tiles);
  params->classes = reinterpret_cast<SequenceClass*>(workspace + layout.classes);
  params->first_items = reinterpret_cast<int32_t*>(workspace + layout.first_items);
  params->totals = reinterpret_cast<SequenceTotals*>(workspace + layout.totals);
  params->items = reinterpret_cast<RaggedItem*>(workspace + layout.items);
}

}  // namespace flashmoe::attention_backward
