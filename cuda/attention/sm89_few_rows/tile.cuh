// The tile of a block: the rows that it computes, and the keys that they see.
#pragma once

#include "cuda/attention/few_rows/products.cuh"
#include "cuda/attention/sm89_few_rows/traits.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_few_rows {

using Keys = KeyRange;

// Row r of a KV head is query r / heads_per_kv of its query head r % heads_per_kv, so that the
// queries of a tile are neighbours.
struct Tile {
  int batch;
  int head_kv;
  int first_row;
  int rows;   // existing rows, up to kRows
  int rank;   // of this block among those that share the tile's keys
  Keys some;  // keys that some row sees; end >= first
  Keys all;   // keys that all rows see

  template <class Traits>
  static __device__ __forceinline__ Tile of_block(const Params& params) {
    const int block = static_cast<int>(blockIdx.x);
    const int position = params.blocks_per_tile.quotient(block);
    const auto [head, tile] =
        tile_in_order(params.tiles_per_head, params.tiles_per_head.number(), position);
    Tile result = of_rows<Traits>(params, head, tile);
    result.rank = block - position * params.blocks_per_tile.number();
    if (params.score.masked) {
      const int last_row = result.first_row + result.rows - 1;
      const Sequence sequence = sequence_of(params, result.batch);
      const auto keys_of = [&](int row) {
        return sequence.keys(params.score, params.heads_per_kv.quotient(row));
      };
      const Keys first = keys_of(result.first_row);
      const Keys last = keys_of(last_row);
      result.some = {first.first, max(first.first, last.end)};
      result.all = {last.first, first.end};
    }
    return result;
  }

  // Tile `index` of a KV head, counted over all batches, with all keys and the rank of the first
  // block.
  template <class Traits>
  static __device__ __forceinline__ Tile of_rows(const Params& params, int head, int index) {
    Tile result;
    result.rank = 0;
    result.batch = params.heads_kv.quotient(head);
    result.head_kv = head - result.batch * params.heads_kv.number();
    result.first_row = index * Traits::kRows;
    const Sequence sequence = sequence_of(params, result.batch);
    // sequence.length_q times the query heads. The host computes it: here the product would take
    // registers across the main loop.
    result.rows = min(Traits::kRows, params.rows - result.first_row);
    result.all = result.some = {0, sequence.length_k};
    return result;
  }

  __device__ __forceinline__ const uint16_t* k(const Params& params) const {
    return params.tensors.k + batch * params.tensors.k_strides.batch +
           head_kv * params.tensors.k_strides.head +
           sequence_of(params, batch).begin_k * params.tensors.k_strides.seq;
  }
  __device__ __forceinline__ const uint16_t* v(const Params& params) const {
    return params.tensors.v + batch * params.tensors.v_strides.batch +
           head_kv * params.tensors.v_strides.head +
           sequence_of(params, batch).begin_k * params.tensors.v_strides.seq;
  }
};

// The position of a tile's row in tensors of queries. Rows are of all query heads of a KV head
// (pack_gqa).
struct Row {
  int query;
  int row;  // row of the tensor
  int head;

  static __device__ __forceinline__ Row of(const Params& params, const Tile& tile, int row) {
    const int packed = tile.first_row + row;
    const int group = params.heads_per_kv.number();
    Row result;
    result.query = params.heads_per_kv.quotient(packed);
    result.row = sequence_of(params, tile.batch).begin_q + result.query;
    result.head = tile.head_kv * group + packed - result.query * group;
    return result;
  }

  __device__ __forceinline__ int64_t offset(const RowStrides& strides, int batch) const {
    return batch * strides.batch + head * strides.head + row * strides.seq;
  }
};

// Shared memory of a block, in order: queries, keys of each row, barrier, parts of the warps with
// their statistics, and in a cluster the parts of its blocks with theirs.
template <class Traits>
struct Shared : few_rows::Shared<Traits> {
  using few_rows::Shared<Traits>::base;

  __device__ __forceinline__ Keys* keys() const {
    return reinterpret_cast<Keys*>(base + Traits::kQueryBytes);
  }
  __device__ __forceinline__ uint32_t barrier() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(base)) + Traits::kFixedBytes -
           Traits::kBarrierBytes;
  }
  // [blocks][units of this block's slice]
  __device__ __forceinline__ float4* block_parts() const {
    return reinterpret_cast<float4*>(base + Traits::kFixedBytes +
                                     warp_count() * Traits::kPartBytes);
  }
  // [blocks][rows]
  __device__ __forceinline__ float2* block_statistics() const {
    return reinterpret_cast<float2*>(base + Traits::kFixedBytes +
                                     warp_count() * Traits::kPartBytes + Traits::kPartialBytes);
  }
};

}  // namespace flashmoe::sm89_few_rows
