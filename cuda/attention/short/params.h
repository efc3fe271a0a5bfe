// Arguments of the short attention kernel, as the device sees them.
#pragma once

#include <vector_types.h>

#include "core/attention.h"
#include "cuda/divisor.h"

namespace flashmoe::short_rows {

inline constexpr int kMaxWarps = 8;     // of a block
inline constexpr int kMaxCluster = 16;  // blocks of a cluster: powers of two up to this

struct Params {
  const uint16_t* q;  // [batch, seq_q, heads_q, dim]
  const uint16_t* k;  // [batch, seq_k, heads_kv, dim]
  const uint16_t* v;  // [batch, seq_k, heads_kv, dim_v]
  uint16_t* out;      // [batch, seq_q, heads_q, dim_v]
  float* lse;         // [batch, heads_q, seq_q] or nullptr

  RowStrides q_strides;  // elements
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides out_strides;
  RowStrides lse_strides;

  int32_t rows;  // packed rows of a KV head: seq_q times its query heads
  int32_t seq_k;
  int32_t dim;
  int32_t dim_v;

  Divisor heads_per_kv;
  Divisor tiles_per_head;  // of a KV head
  Divisor heads_kv;
  Divisor blocks_per_tile;  // that share its keys: a cluster, or as many as leave parts
  int32_t cluster_log2;     // log2 of the blocks of a cluster; 0: there are none

  // The workspace, where a tile's blocks are no cluster: what each has of the output, [blocks, rows
  // of a tile, kernel's dim_v], with row maximum and sum of each row, [blocks, rows of a tile].
  // Else nullptr.
  float4* parts;
  float2* statistics;

  // Query i sees the keys from i + left_offset to i + right_offset, as far as there are such keys.
  // An absent bound lies beyond all of them; query + offset + 1 fits.
  int32_t left_offset;
  int32_t right_offset;
  int32_t masked;  // some row does not see every key

  float scale_log2;  // scale * log2(e); with a softcap softcap * log2(e)
  float cap_ratio;   // scale / softcap; 0 without

  int32_t combine_workers_log2;  // of the second kernel
};

}  // namespace flashmoe::short_rows
