// Arguments of the sm_90 attention kernel, as the device sees them.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "core/ops/attention/problem.h"
#include "cuda/attention/division.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::sm90 {

// Factors of coordinates of batch and head: 0 if the view repeats that dimension, which then has
// extent 1 in its map.
struct Repeats {
  int32_t batch;
  int32_t head;
};

struct Params {
  // Tensor maps over [dim, seq, heads, batch] in boxes of 64 columns. Boxes of q and out have the
  // rows of a warpgroup, boxes of k and v the keys of a step.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;

  Repeats q_repeats;
  Repeats k_repeats;
  Repeats v_repeats;

  AttentionTensors tensors;  // the maps' tensors, for rows that need the fallback

  int32_t seq_q;
  int32_t seq_k;
  int32_t heads_q;
  int32_t heads_per_kv;
  ScoreOptions score;
  // For all tiles, if steps have as many keys as groups have rows, or twice as many.
  int32_t kv_block_alignment;

  int32_t tiles_per_head;       // query tiles
  int32_t first_row;            // of the first tile: 0, or a whole number of groups before it
  int32_t longest_tiles_first;  // the last tiles are the longest
  int32_t heads;                // batch * heads_q
  int32_t heads_per_swizzle;    // heads whose tiles are taken together (L2 swizzle)
};

// Parameters of a kernel whose blocks walk tiles of one head: a block finds a tile from its
// position by these. The first loads wait for it.
struct TileParams : Params {
  Divisor by_heads_q;
  Divisor by_heads_per_kv;
  Divisor by_heads_per_swizzle;
  Divisor by_heads_of_last_swizzle;
  Divisor by_tiles_per_swizzle;
  int32_t slots_per_swizzle;  // the group's tiles modulo the number of blocks
};

// Where a block's range begins. Ranges cover the steps of all tiles, with the tiles of a head and
// then the heads laid end to end.
struct StreamKStart {
  int32_t tile;
  int32_t step;   // step of the tile; above 0, the block before has the earlier steps
  int32_t place;  // in the workspace, in parts, of the part that begins here; only if step > 0
};

// A GH100 has at most this many multiprocessors.
inline constexpr int kMostStreamKBlocks = 144;

// Parameters of a kernel whose tiles hold rows of all query heads of a KV head (pack_gqa), and
// whose blocks take ranges of all tiles' steps (stream-K). A warpgroup has queries_per_group
// queries of packed_heads heads each. Row r is query r / packed_heads and head r % packed_heads of
// them; the rest of its 64 rows does not exist. A KV head with more query heads has several chunks
// of packed_heads.
//
// In Params, q is then a map over [dim, query heads of a KV head, seq, KV heads, batch], in boxes
// of a warpgroup's rows, and out is not used. `heads` counts the chunks whose rows tiles hold,
// batch * heads_kv * chunks, each with `tiles_per_head` tiles of queries.
struct SplitParams : Params {
  // The workspace. Each part of a tile that several blocks share has its output, [places, rows of a
  // tile, units], and the row max and sum of each row, [places, rows]. The parts of a tile are
  // consecutive. A row max of -inf says that the output was not written, because the row sees no
  // key of the part. Nothing is written for rows that do not exist.
  float4* part_outs;
  float2* part_statistics;

  // Blocks whose ranges are in `starts`; 0: blocks take whole tiles, in rounds.
  int32_t stream_k_blocks;
  int32_t packed_heads;
  int32_t packed_heads_reciprocal;  // 2^16 / packed_heads, up: exact for rows of a group
  int32_t queries_per_group;
  int32_t groups_per_tile;  // warpgroups that have rows
  int32_t heads_kv;
  int32_t chunks;
  Divisor by_tiles_per_head;
  Divisor by_heads_kv;
  Divisor by_chunks;

  // For the second kernel, which takes the tiles that have parts, row by row.
  int32_t cut_tiles;
  int32_t rows;  // per cut tile
  int32_t combine_workers_log2;

  // The entry after the last has the end of all tiles, and one place too many.
  StreamKStart starts[kMostStreamKBlocks + 1];
  // For each cut tile, the first start inside it. The entry after the last is `stream_k_blocks`.
  int16_t cuts[kMostStreamKBlocks + 1];
};

// Tiles that the scheduling warp of a ragged kernel finds ahead of the loads.
inline constexpr int kTilesAhead = 4;

// Sizes of boxes for rows of pages.
inline constexpr int kPageBoxes = 8;

// Rows between consecutive rows of a tensor's batch.
struct RowsPerBatch {
  int32_t q;
  int32_t k;
  int32_t v;
  int32_t out;
};

// Parameters of a kernel whose batch is sequences (ragged.cuh). The maps of Params are ragged ones
// (ragged_rows.h). seq_q and seq_k bound the lengths of a sequence. kv_block_alignment and the
// members after it are not used, nor are repeats of batches, but those of pages are.
struct RaggedParams : Params {
  SequenceParams sequences;
  RowsPerBatch rows_per_batch;
  // The rows of a tile are the queries of one head. If sequences have at most one query (decoding),
  // they are that query in so many heads, all of a KV head, whose keys are then read once. A tile's
  // head, and the two members below, count such groups of heads.
  int32_t heads_per_tile;
  int32_t heads_of_tiles;
  Divisor by_heads_per_kv;
  // Maps of paged keys, which replace k and v: over [dim, rows of a page, heads, pages] in boxes of
  // 1, 2, 4 and more rows, up to those of a step.
  CUtensorMap k_pages[kPageBoxes];
  CUtensorMap v_pages[kPageBoxes];
  int32_t heads_kv;
  int32_t grows;  // later tiles of a sequence see more keys, because only the right side is bounded
  int32_t most_levels;  // upper bound on the levels of a sequence's rows (ragged_order.h)
  // Swizzle groups: so many keys of one KV head, with their values, fit the L2, and a group has
  // about so many tiles.
  int32_t keys_of_l2;
  int32_t tiles_of_swizzle;
  // Beside decoding (cuda/attention/division.h). nullptr: the kernel runs alone, and blocks are
  // dealt their tiles.
  Division* division;
  int32_t* chains;            // of the tiles that a block has taken
  int32_t chains_room;        // room for so many numbers
  int32_t tiles_ahead;        // tiles that are found ahead of those whose loads have begun
  int32_t keys_before_claim;  // keys of a tile still to load when its successor is claimed
  // Only of kernels for sequences of few queries, as in SplitParams: a warpgroup has
  // queries_per_group queries of packed_heads heads each, all of a KV head. The maps of q and out
  // are then over [dim, heads, row, base, wrap], in boxes of a warpgroup's rows.
  int32_t packed_heads;
  int32_t packed_heads_reciprocal;
  int32_t queries_per_group;
  Divisor by_queries_per_tile;
};

static_assert(sizeof(SplitParams) <= 4096, "a kernel has 4 KiB of parameters everywhere");
static_assert(sizeof(RaggedParams) <= 4096);

}  // namespace flashmoe::sm90
