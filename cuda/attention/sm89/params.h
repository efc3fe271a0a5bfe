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
  int32_t longest_tiles_first;  // the last tiles are the longest
  int32_t heads;                // batch * heads_q
  int32_t heads_per_swizzle;    // heads whose K and V share the L2
  // A block finds its tile by these.
  Divisor by_heads_q;
  Divisor by_heads_per_kv;
  Divisor by_heads_per_swizzle;
  Divisor by_heads_of_last_swizzle;
  Divisor by_tiles_per_swizzle;
};

// Parameters of calls with a bias or a mask.
struct BiasedParams : Params {
  ScorePairs pairs;
};

// Parameters of ragged, padded and paged batches.
struct RaggedParams {
  AttentionTensors tensors;
  ScoreOptions score;

  SequenceParams sequences;
  TileSlots slots;
  int32_t last_slots_first;  // the last slots are the longest
  // The rows of a tile are the queries of one head. If sequences have at most one query (decoding),
  // they are that query in all heads of a KV head, whose keys are then read once.
  int32_t heads_per_tile;
  // A block finds its slot and heads by these: the order is tiles of a KV head, then slots, then KV
  // heads.
  Divisor by_tiles_per_kv;
  Divisor by_slots;
};

// The same with a bias or a mask.
struct RaggedBiasedParams : RaggedParams {
  ScorePairs pairs;
};

}  // namespace flashmoe::sm89
