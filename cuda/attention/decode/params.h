// Arguments of the families that decode sequences, as the device sees them, and what the two
// kernels of a call pass to each other.
#pragma once

#include <vector_types.h>

#include "core/ops/attention/problem.h"
#include "cuda/attention/division.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::attention_decode {

// Upper bound on the rows of a block of the second kernel: one warp per row.
inline constexpr int kMostCombineRowsLog2 = 3;

// Upper bound on the chunks of a sequence that is cut by a number of keys. A longer sequence has
// chunks of a multiple of that number. This bounds the workspace, and depends only on the sequence.
inline constexpr int kMostChunks = 32;

// Strides of keys or values, in chunks of 16 bytes, which make up a row. Offsets fit in 32 bits.
struct ChunkStrides {
  uint32_t page;  // or stride of a row of the batch
  uint32_t row;
  uint32_t head;
};

// Rows of a sequence's KV head. Row r is query r / group of query head r % group.
struct TileRows {
  int32_t sequence;
  int32_t batch;  // row of q's batch
  int32_t begin_q;
  int32_t length_q;
  int32_t length_k;
  int32_t diagonal;
  int32_t head_kv;
  int32_t first_row;
  int32_t rows;    // existing rows of this tile
  int32_t masked;  // some row does not see every key that another one sees
};

// A tile whose keys are split over blocks, as the first of these blocks describes it: of several KV
// heads, by its first one.
struct CutTile {
  TileRows tile;
  int32_t parts;   // 0: no cut tile
  int32_t first;   // place of part 0
  int32_t second;  // place of part i minus i, for i > 0
};

// Factors of keys or values: [first extent of k, heads_kv]. data is nullptr if all are 1.
struct CacheScales {
  const float* data;
  int64_t page;  // elements, between pages or rows of the batch
  int64_t head;
};

struct Params {
  AttentionTensors tensors;  // k and v: of any accepted type
  ScoreOptions score;
  SequenceParams sequences;
  ChunkStrides k_chunks;
  ChunkStrides v_chunks;
  CacheScales k_scale;
  CacheScales v_scale;
  int32_t fp8;    // whether k and v are fp8, else q's type
  Divisor group;  // query heads per KV head
  int32_t heads_kv;
  int32_t split_keys;  // keys of a chunk; 0: blocks take equal ranges

  // The workspace: parts of shared tiles, [places][rows][kernel's dim_v], with the row max and sum
  // of each row, [places][rows], and the cut tiles, [blocks].
  float4* parts;
  float2* statistics;
  CutTile* cut_tiles;
  int32_t blocks;             // of the first kernel
  const Division* division;   // beside prompts (cuda/attention/division.h), else nullptr
  int32_t combine_rows_log2;  // log2 of the rows of a block of the second kernel
  int32_t tile_heads_log2;    // log2 of the KV heads of a tile; a place has a part of each
  int32_t part_rows;          // rows per part
  int32_t part_units_log2;    // log2 of the units of four columns of a row of a part
};

// Places of the parts of so many blocks. A tile that begins in a block and continues in others has
// its first part at the block's number. A block's part of a tile that began in an earlier block
// comes after these. With chunks, all parts are at the number of the block in which the tile
// begins.
constexpr int64_t places_of(int64_t blocks, bool chunks) {
  return blocks * (chunks ? kMostChunks : 2);
}

}  // namespace flashmoe::attention_decode
