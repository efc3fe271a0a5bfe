// Arguments of the few-row attention kernel, as the device sees them.
#pragma once

#include <vector_types.h>

#include "core/ops/attention/problem.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/tile/score_options.h"

namespace flashmoe::sm89_few_rows {

inline constexpr int kMaxWarps = 8;     // per block
inline constexpr int kMaxCluster = 16;  // blocks per cluster: powers of two up to this

struct Params {
  AttentionTensors tensors;

  int32_t seq_q;
  int32_t seq_k;
  int32_t rows;  // packed rows of a KV head: seq_q times its query heads
  ScoreOptions score;

  Divisor heads_per_kv;
  Divisor tiles_per_head;  // per KV head
  Divisor heads_kv;
  Divisor blocks_per_tile;  // blocks that share its keys: a cluster, or those that leave parts
  int32_t cluster_log2;     // log2 of the blocks per cluster; 0: no clusters

  // The workspace if a tile's blocks are no cluster: each block's part of the output, [blocks, rows
  // of a tile, kernel's dim_v], with the row max and sum of each row, [blocks, rows of a tile].
  // nullptr otherwise.
  float4* parts;
  float2* statistics;

  int32_t combine_workers_log2;  // of the second kernel
};

}  // namespace flashmoe::sm89_few_rows
