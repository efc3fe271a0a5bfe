// Query rows and keys of a sequence, in any layout, and the output of a row.
#pragma once

#include <cstddef>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/decode/params.h"
#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/numeric/fp8.cuh"

namespace flashmoe::attention_decode {

// The query of a row of a tile, of one of its KV heads, and the row's head of q.
struct RowOf {
  int query;
  int head;

  __device__ __forceinline__ RowOf(const Params& params, const TileRows& tile, int row,
                                   int head_of_tile = 0) {
    const int packed = tile.first_row + row;
    query = params.group.quotient(packed);
    head = (tile.head_kv + head_of_tile) * params.group.number() + packed -
           query * params.group.number();
  }
  __device__ __forceinline__ int64_t offset(const TileRows& tile, const RowStrides& strides) const {
    return tile.batch * strides.batch + head * strides.head +
           int64_t{tile.begin_q + query} * strides.seq;
  }
  // The keys that the query sees.
  __device__ __forceinline__ KeyRange keys(const Params& params, const TileRows& tile) const {
    return params.score.keys(query + tile.diagonal, tile.length_k);
  }
};

// `base` is the address of chunk 0.
template <class Cached>
__device__ __forceinline__ const Cached* row_at(const Cached* base, uint32_t chunk) {
  return base + uint64_t{chunk} * (16 / sizeof(Cached));
}

// A row of K or V whose elements are read one by one. nullptr for a hidden one.
template <class Element>
struct CachedRow {
  const uint8_t* data;
  bool fp8;

  __device__ __forceinline__ CachedRow(std::nullptr_t) : data(nullptr), fp8(false) {}
  __device__ __forceinline__ CachedRow(const uint8_t* row, bool is_fp8) : data(row), fp8(is_fp8) {}
  __device__ __forceinline__ bool operator!=(std::nullptr_t) const { return data != nullptr; }
  __device__ __forceinline__ bool operator==(std::nullptr_t) const { return data == nullptr; }
  // The bits of an element in the queries' type.
  __device__ __forceinline__ uint16_t operator[](int column) const {
    if (fp8) return numeric::widen_one<Element>(data[column]);
    return reinterpret_cast<const uint16_t*>(data)[column];
  }
};

// Addresses of the rows of a sequence's keys. nullptr if their page is invalid.
template <class Element>
struct KeysOfRow {
  const Params& params;
  const int32_t* pages;
  int batch_k;
  int begin_k;
  int head_kv;

  __device__ __forceinline__ KeyTables::Place place_of(int key) const {
    if (pages == nullptr) return {batch_k, begin_k + key};
    return params.sequences.keys.place_of(pages, begin_k + key);
  }
  __device__ __forceinline__ CachedRow<Element> row_of(const uint16_t* base,
                                                       const ChunkStrides& strides, int key) const {
    const KeyTables::Place place = place_of(key);
    if (place.batch < 0) return nullptr;
    const uint32_t chunk = static_cast<uint32_t>(place.batch) * strides.page +
                           static_cast<uint32_t>(place.row) * strides.row +
                           static_cast<uint32_t>(head_kv) * strides.head;
    return {row_at(reinterpret_cast<const uint8_t*>(base), chunk), params.fp8 != 0};
  }
  __device__ __forceinline__ CachedRow<Element> k(int key) const {
    return row_of(params.tensors.k, params.k_chunks, key);
  }
  __device__ __forceinline__ CachedRow<Element> v(int key) const {
    return row_of(params.tensors.v, params.v_chunks, key);
  }

  // The key is not hidden.
  __device__ __forceinline__ float scale_of(const CacheScales& scales, int key) const {
    if (scales.data == nullptr) return 1.0f;
    return scales.data[place_of(key).batch * scales.page + head_kv * scales.head];
  }
  __device__ __forceinline__ float k_scale(int key) const { return scale_of(params.k_scale, key); }
  __device__ __forceinline__ float v_scale(int key) const { return scale_of(params.v_scale, key); }
};

// Writes four columns of one row of a KV head, and lse with the first ones. Returns whether any of
// them is suspect. For a row without any probability the fallback decides whether all of its keys
// are hidden.
template <class Element>
__device__ __forceinline__ bool write_unit(const Sum& total, const Params& params,
                                           const TileRows& tile, int row, int unit,
                                           int head_of_tile = 0) {
  const RowOf where(params, tile, row, head_of_tile);
  const KeyRange keys = where.keys(params, tile);
  const bool sees_keys = keys.end > keys.first;
  const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kExact>(
      params.score, where.head, sees_keys, {total.row_max, total.sum});
  if (unit == 0 && params.tensors.lse != nullptr) {
    params.tensors.lse[where.offset(tile, params.tensors.lse_strides)] = end.lse;
  }
  const bool nothing = params.sequences.paged != 0 && sees_keys && total.sum == 0.0f;
  if (4 * unit >= params.tensors.dim_v) return nothing;
  const uint2 packed = output_of<Element>(total, end);
  *reinterpret_cast<uint2*>(params.tensors.out + where.offset(tile, params.tensors.out_strides) +
                            4 * unit) = packed;
  return nothing || is_suspect<Element>(total, end, tile.masked != 0, packed);
}

// Recomputes a row. A warp calls it.
template <class Element, int kDimV>
__device__ __forceinline__ void compute_row_again(const Params& params, const TileRows& tile,
                                                  const KeysOfRow<Element>& keys, int row,
                                                  int head_of_tile = 0) {
  const RowOf where(params, tile, row, head_of_tile);
  masked_row_fallback<Element, kDimV>(
      params.tensors, params.score,
      {tile.batch, where.head, keys.head_kv, tile.begin_q + where.query, where.keys(params, tile)},
      [](int) { return true; }, keys);
}

}  // namespace flashmoe::attention_decode
