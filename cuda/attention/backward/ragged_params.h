// Parameters of the attention backward's kernels for ragged and padded batches, and the data that
// the first of them, which reads the tables (tables.cu), leaves to the others in the workspace.
#pragma once

#include <cstdint>

#include "cuda/attention/backward/params.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::attention_backward {

// The position of a sequence's rows, in the tensors and in the workspace.
struct alignas(16) SequencePlace {
  static constexpr bool kRagged = true;

  int batch_q;
  int begin_q;
  int length_q;
  int batch_k;
  int begin_k;
  int length_k;  // 0 without queries
  int diagonal;  // added to a query's index before the score options apply
  int first_tile;
};

// Sequences with the same number of key tiles: those from `first_rank` to before the next class's.
struct alignas(16) SequenceClass {
  int first_rank;
  int tiles_k;
  HeadOrder order;  // over the heads of all of them
};

// A key tile of a KV head of a sequence, like Item of a dense batch (tile.cuh).
struct alignas(16) RaggedItem : SequencePlace {
  int head_kv;
  int tile;   // key tile; kNoItem: no more items
  int begin;  // query tiles, from `begin` to before `end`
  int end;
  int course;   // a Course (tile.cuh)
  int skipped;  // see SequenceRows; only with a bias or a mask
  int gaps[2];
};
static_assert(sizeof(RaggedItem) == 64, "it is copied by 16 bytes");

struct SequenceTotals {
  int tiles_q;
  int items;
  int classes;
  int decreasing;  // some offsets decrease, or sequences have more tiles than their rows have room
                   // for
};

// A family's parameters for such batches begin with these. Here `batch` is 1, seq_q and seq_k are
// bounds, and tiles_q bounds the tiles of all sequences.
struct RaggedParams : CommonParams {
  SequenceParams sequences;
  int32_t tile_q;
  int32_t tile_k;
  int32_t at_a_time;   // items that the largest GPU runs at a time
  int32_t wave_heads;  // of the entry
  int32_t row_bytes;   // bytes of a row of q that a step reads and adds
  // Upper bound on the tiles of dQ in sequences with several key tiles, whose parts are summed.
  // Sequences with one key tile have no sums.
  int32_t sum_tiles;
  int32_t most_tiles_k;  // over all sequences
  // Chunks of rows of q, and of k, in which the prologue zeros gradients of rows that no sequence
  // has; 0: none.
  int32_t chunks_q;
  int32_t chunks_k;
  int32_t prologue_blocks;  // before those of chunks; those of items come after the chunks
  // In calls with a bias or a mask, batch_q is the number of the sequence, even if its queries are
  // in another row of the batch. If all queries are in one row, strides along the batch are 0.
  int32_t numbers_sequences;

  // The workspace. The rank of a sequence is its place among all: those with the most key tiles
  // come first.
  SequencePlace* places;   // [count], by rank
  int32_t* first_tiles;    // [count + 1]: of the places, and the end of the last
  SequenceClass* classes;  // [count + 1]: the last one has only a first_rank
  int32_t* first_items;    // [count + 1]: of the classes, and the end of the last
  SequenceTotals* totals;
  RaggedItem* items;  // by ticket
};

// Parameters with a bias or a mask.
struct RaggedBiasedParams : RaggedParams {
  ScorePairs pairs;
};

inline constexpr int kChunkRows = 256;

}  // namespace flashmoe::attention_backward
