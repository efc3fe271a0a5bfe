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

// What a coordinate of a batch or head is multiplied by: 0 where the view repeats one of them,
// which its map then holds once.
struct Repeats {
  int32_t batch;
  int32_t head;
};

struct Params {
  // Tensor maps over [dim, seq, heads, batch] in boxes of 64 elements by so many rows: those of a
  // warpgroup for q and out, the keys of a step for k and v.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;

  Repeats q_repeats;
  Repeats k_repeats;
  Repeats v_repeats;

  AttentionTensors tensors;  // what the maps are of, for rows that need the fallback

  int32_t seq_q;
  int32_t seq_k;
  int32_t heads_q;
  int32_t heads_per_kv;
  ScoreOptions score;
  // Of all tiles, where steps have as many keys as groups have rows, or twice that.
  int32_t kv_block_alignment;

  int32_t tiles_per_head;       // query tiles
  int32_t first_row;            // of the first tile: 0, or whole groups of rows before it
  int32_t longest_tiles_first;  // they are the longest
  int32_t heads;                // batch * heads_q
  int32_t heads_per_swizzle;    // heads whose tiles are taken together: the L2 swizzle
};

// Those of a kernel whose blocks walk tiles of one head: what these are found by, from their
// positions. The first loads wait for it.
struct TileParams : Params {
  Divisor by_heads_q;
  Divisor by_heads_per_kv;
  Divisor by_heads_per_swizzle;
  Divisor by_heads_of_last_swizzle;
  Divisor by_tiles_per_swizzle;
  int32_t slots_per_swizzle;  // its tiles modulo the number of blocks
};

// Where a block's range of the steps of all tiles begins, with the tiles of a head laid end to end,
// and the heads.
struct StreamKStart {
  int32_t tile;
  int32_t step;   // behind the tile's first one: above 0 the block before has the others
  int32_t place;  // in the workspace, in parts, of what begins here; only of steps above 0
};

// A GH100 has no more multiprocessors.
inline constexpr int kMostStreamKBlocks = 144;

// Those of a kernel whose tiles hold rows of all query heads of a KV head (pack_gqa), and whose
// blocks take ranges of all tiles' steps (stream-K). A warpgroup has queries_per_group queries of
// packed_heads heads each: row r is query r / packed_heads and head r % packed_heads of them; what
// is left of its 64 rows does not exist. A KV head of more query heads has several chunks of
// packed_heads.
//
// In Params q is then a map over [dim, query heads of a KV head, seq, KV heads, batch], in boxes of
// a warpgroup's rows, out is not used, and `heads` are those whose rows tiles hold, batch *
// heads_kv * chunks, each with `tiles_per_head` tiles of their queries.
struct SplitParams : Params {
  // The workspace: what each part of a tile that several blocks share has of the output, [places,
  // rows of a tile, units], and row maximum and sum of each row, [places, rows]. A tile's parts
  // follow one another. A row maximum of -inf: none of the output was written, as no key of the
  // part is seen. Of rows that do not exist neither is written.
  float4* part_outs;
  float2* part_statistics;

  // Blocks of which `starts` has the ranges; 0: blocks take whole tiles, in rounds.
  int32_t stream_k_blocks;
  int32_t packed_heads;
  int32_t packed_heads_reciprocal;  // 2^16 / packed_heads, up: exact for the rows of a group
  int32_t queries_per_group;
  int32_t groups_per_tile;  // warpgroups that have rows
  int32_t heads_kv;
  int32_t chunks;
  Divisor by_tiles_per_head;
  Divisor by_heads_kv;
  Divisor by_chunks;

  // Of the second kernel, which takes the tiles that have parts, row by row.
  int32_t cut_tiles;
  int32_t rows;  // of each
  int32_t combine_workers_log2;

  // Behind the last the end of all tiles, and one place too many.
  StreamKStart starts[kMostStreamKBlocks + 1];
  // Of each tile that has parts the first start inside it; behind the last, `stream_k_blocks`.
  int16_t cuts[kMostStreamKBlocks + 1];
};

// Tiles that the scheduling warp of a ragged kernel is ahead by, of those whose loads have begun.
inline constexpr int kTilesAhead = 4;

// Sizes of boxes that rows of pages come in.
inline constexpr int kPageBoxes = 8;

// By how many rows those of a tensor's batch are behind one another.
struct RowsPerBatch {
  int32_t q;
  int32_t k;
  int32_t v;
  int32_t out;
};

// Those of a kernel whose batch is sequences (ragged.cuh). The maps of Params are ragged ones
// (ragged_rows.h). seq_q and seq_k bound the lengths of a sequence; kv_block_alignment and what is
// behind it are not used, nor are repeats of batches, but of pages.
struct RaggedParams : Params {
  SequenceParams sequences;
  RowsPerBatch rows_per_batch;
  // Rows of a tile are the queries of one head; or, of sequences of one query at most (decoding),
  // that query of so many heads, all of a KV head, whose keys are then read once. What tiles have
  // for a head, and those two below count, are so many heads.
  int32_t heads_per_tile;
  int32_t heads_of_tiles;
  Divisor by_heads_per_kv;
  // Of paged keys, instead of k and v: maps over [dim, rows of a page, heads, pages] in boxes of 1,
  // 2, 4 and more rows, up to those of a step.
  CUtensorMap k_pages[kPageBoxes];
  CUtensorMap v_pages[kPageBoxes];
  int32_t heads_kv;
  int32_t grows;        // later tiles of a sequence see more keys, as only the right is bounded
  int32_t most_levels;  // that rows of a sequence are on (ragged_order.h)
  // Of a swizzle group: so many keys of one KV head, with their values, fit the L2, and it has
  // about so many tiles.
  int32_t keys_of_l2;
  int32_t tiles_of_swizzle;
  // Beside decoding (cuda/attention/division.h); nullptr: alone, and blocks are dealt their tiles.
  Division* division;
  int32_t* chains;            // of the tiles that a block has taken
  int32_t chains_room;        // numbers
  int32_t tiles_ahead;        // of those whose loads have begun, so many more are found
  int32_t keys_before_claim;  // a tile's keys that are left to load when its successor is sought
};

static_assert(sizeof(SplitParams) <= 4096, "a kernel has 4 KiB of parameters everywhere");
static_assert(sizeof(RaggedParams) <= 4096);

}  // namespace flashmoe::sm90
