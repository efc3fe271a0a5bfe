// Arguments of the families that decode sequences, as the device sees them, and what the two
// kernels of a call leave for each other.
#pragma once

#include <vector_types.h>

#include "core/ops/attention/problem.h"
#include "cuda/attention/division.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::attention_decode {

// Rows of a block of the second kernel, at most: a warp for each.
inline constexpr int kMostCombineRowsLog2 = 3;

// So many chunks a sequence has at most where it is cut by a number of keys: beyond, chunks are a
// multiple of that number. It bounds the workspace, and depends on nothing but the sequence.
inline constexpr int kMostChunks = 32;

// Of keys or values, in chunks of 16 bytes, which a row is made of: offsets fit in 32 bits.
struct ChunkStrides {
  uint32_t page;  // or row of the batch
  uint32_t row;
  uint32_t head;
};

// Rows of a sequence's KV head: row r is query r / group of query head r % group.
struct TileRows {
  int32_t sequence;
  int32_t batch;  // of q's rows
  int32_t begin_q;
  int32_t length_q;
  int32_t length_k;
  int32_t diagonal;
  int32_t head_kv;
  int32_t first_row;
  int32_t rows;    // that there are, of this tile
  int32_t masked;  // some row does not see every key that another one does
};

// A tile whose keys several blocks have, as the first of them says it.
struct CutTile {
  TileRows tile;
  int32_t parts;   // 0: there is none
  int32_t first;   // place of part 0
  int32_t second;  // place of part i, less i, of the others
};

// Factors of keys or values: [first extent of k, heads_kv]; data is nullptr: all are 1.
struct CacheScales {
  const float* data;
  int64_t page;  // elements, or those of rows of the batch
  int64_t head;
};

struct Params {
  AttentionTensors tensors;  // k and v: whatever they are of
  ScoreOptions score;
  SequenceParams sequences;
  ChunkStrides k_chunks;
  ChunkStrides v_chunks;
  CacheScales k_scale;
  CacheScales v_scale;
  int32_t fp8;    // what k and v are of, else of q's type
  Divisor group;  // query heads of a KV head
  int32_t heads_kv;
  int32_t split_keys;  // a chunk's; 0: blocks take equal shares

  // The workspace: what blocks have of tiles that they share, [places][rows][kernel's dim_v], with
  // row maximum and sum of each row, [places][rows], and these tiles, [blocks].
  float4* parts;
  float2* statistics;
  CutTile* cut_tiles;
  int32_t blocks;             // of the first kernel
  const Division* division;   // beside prompts (cuda/attention/division.h), else nullptr
  int32_t combine_rows_log2;  // rows of a block of the second kernel
  int32_t part_rows;          // rows of a part
  int32_t part_units_log2;    // units of four columns of a row of a part
};

// Places of parts that so many blocks leave. A tile that begins in a block and goes on has its
// first part at the block's number; a block's part of a tile that began before is behind these. Of
// chunks, all are at the number of the block in which the tile begins.
constexpr int64_t places_of(int64_t blocks, bool chunks) {
  return blocks * (chunks ? kMostChunks : 2);
}

}  // namespace flashmoe::attention_decode
