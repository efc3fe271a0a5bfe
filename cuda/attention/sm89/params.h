// Arguments of the sm_89 attention kernel, as the device sees them.
#pragma once

#include "core/ops/attention/problem.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/score_pairs.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::sm89 {

struct Params {
  AttentionTensors tensors;
  int32_t seq_q;
  int32_t seq_k;
  ScoreOptions score;

  int32_t tiles_per_head;       // query tiles
  int32_t longest_tiles_first;  // they are the longest
  int32_t heads;                // batch * heads_q
  int32_t heads_per_swizzle;    // heads whose K and V share the L2
  // By which a block finds its tile.
  Divisor by_heads_q;
  Divisor by_heads_per_kv;
  Divisor by_heads_per_swizzle;
  Divisor by_heads_of_last_swizzle;
  Divisor by_tiles_per_swizzle;
};

// Of calls with a bias or a mask.
struct BiasedParams : Params {
  ScorePairs pairs;
};

// Of ragged, padded and paged batches.
struct RaggedParams {
  AttentionTensors tensors;
  ScoreOptions score;

  SequenceParams sequences;
  TileSlots slots;
  int32_t last_slots_first;  // they are the longest
  // Rows of a tile are the queries of one head; or, of sequences of one query at most (decoding),
  // that query of so many heads, all of a KV head, whose keys are then read once.
  int32_t heads_per_tile;
  // By which a block finds its slot and heads: tiles of a KV head one beside the other, then slots,
  // then KV heads.
  Divisor by_tiles_per_kv;
  Divisor by_slots;
};

// Of these with a bias or a mask.
struct RaggedBiasedParams : RaggedParams {
  ScorePairs pairs;
};

}  // namespace flashmoe::sm89
