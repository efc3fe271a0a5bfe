// What the attention backward's kernels get of ragged and padded batches, and what the first of
// them, which reads the tables (tables.cuh), leaves to the others in the workspace.
#pragma once

#include <cstdint>

#include "cuda/attention/backward/params.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::attention_backward {

// Where a sequence's rows are, in the tensors and in the workspace.
struct alignas(16) SequencePlace {
  static constexpr bool kRagged = true;

  int batch_q;
  int begin_q;
  int length_q;
  int batch_k;
  int begin_k;
  int length_k;  // 0 without queries
  int diagonal;  // how much further the keys of a query lie than the score options say
  int first_tile;
};

// Sequences with as many tiles of keys: those from `first_rank` on, to before that of the next one.
struct alignas(16) SequenceClass {
  int first_rank;
  int tiles_k;
  HeadOrder order;  // of the heads of all of them
};

// A tile of keys of a KV head of a sequence, as Item is of a dense batch (tile.cuh).
struct alignas(16) RaggedItem : SequencePlace {
  int head_kv;
  int tile;   // of keys; kNoItem: there are no more
  int begin;  // query tiles: from `begin` to the one before `end`
  int end;
  int course;   // of Course in tile.cuh
  int skipped;  // of a call with a bias or a mask: SequenceRows
  int gaps[2];
};
static_assert(sizeof(RaggedItem) == 64, "it is copied by 16 bytes");

struct SequenceTotals {
  int tiles_q;
  int items;
  int classes;
  int decreasing;  // some offsets decrease, or sequences have more tiles than there are rows for
};

// A family's parameters of such batches begin with it. `batch` is 1 of these, seq_q and seq_k are
// bounds, and tiles_q is how many tiles all sequences have at most.
struct RaggedParams : CommonParams {
  SequenceParams sequences;
  int32_t tile_q;
  int32_t tile_k;
  int32_t at_a_time;   // items that the largest GPU runs
  int32_t wave_heads;  // of the entry
  int32_t row_bytes;   // what a step reads and adds of a row of q
  // Tiles of dQ of sequences with several tiles of keys, whose parts are summed, at most. Those of
  // one tile have no sums.
  int32_t sum_tiles;
  int32_t most_tiles_k;  // of all sequences
  // Chunks of rows of q, and of k, of which the prologue sets gradients of rows that no sequence
  // has to 0; 0: none.
  int32_t chunks_q;
  int32_t chunks_k;
  int32_t prologue_blocks;  // before those of chunks, behind which those of items come
  // Of calls with a bias or a mask batch_q is the sequence's number, whichever row of the batch its
  // queries are in: where that is one row for all, strides along the batch are 0.
  int32_t numbers_sequences;

  // The workspace. A sequence's rank is its place among all: those with the most tiles of keys come
  // first.
  SequencePlace* places;   // [count], by rank
  int32_t* first_tiles;    // [count + 1]: of the places, and behind the last
  SequenceClass* classes;  // [count + 1]: the last one has only a first_rank
  int32_t* first_items;    // [count + 1]: of the classes, and behind the last
  SequenceTotals* totals;
  RaggedItem* items;  // by ticket
};

// With a bias or a mask.
struct RaggedBiasedParams : RaggedParams {
  ScorePairs pairs;
};

inline constexpr int kChunkRows = 256;

}  // namespace flashmoe::attention_backward
