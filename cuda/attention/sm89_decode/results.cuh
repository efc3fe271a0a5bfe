// From the parts of warps to the output of a tile, to the sum of its chunks, or to the workspace.
#pragma once

#include "cuda/attention/sm89_decode/loads.cuh"
#include "cuda/attention/sm89_few_rows/combine.cuh"

namespace flashmoe::sm89_decode {

// A row of K or V, whose elements are read one by one: nullptr of a hidden one.
template <class Element>
struct CachedRow {
  const uint8_t* data;
  bool fp8;

  __device__ __forceinline__ CachedRow(std::nullptr_t) : data(nullptr), fp8(false) {}
  __device__ __forceinline__ CachedRow(const uint8_t* row, bool is_fp8) : data(row), fp8(is_fp8) {}
  __device__ __forceinline__ bool operator!=(std::nullptr_t) const { return data != nullptr; }
  __device__ __forceinline__ bool operator==(std::nullptr_t) const { return data == nullptr; }
  // Its bits, of the queries' type.
  __device__ __forceinline__ uint16_t operator[](int column) const {
    if (fp8) return numeric::widen_one<Element>(data[column]);
    return reinterpret_cast<const uint16_t*>(data)[column];
  }
};

// Where the rows of a sequence's keys are: nullptr where their page is none.
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

  // Of keys that are not hidden.
  __device__ __forceinline__ float scale_of(const CacheScales& scales, int key) const {
    if (scales.data == nullptr) return 1.0f;
    return scales.data[place_of(key).batch * scales.page + head_kv * scales.head];
  }
  __device__ __forceinline__ float k_scale(int key) const { return scale_of(params.k_scale, key); }
  __device__ __forceinline__ float v_scale(int key) const { return scale_of(params.v_scale, key); }
};

// Writes four columns of one row, and lse with the first ones. Returns whether something among them
// is suspect: of a row without any probability the fallback says whether all of its keys are
// hidden.
template <class Element>
__device__ __forceinline__ bool write_unit(const Sum& total, const Params& params,
                                           const TileRows& tile, int row, int unit) {
  const RowOf where(params, tile, row);
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

// A row computed again, by a warp.
template <class Element, int kDimV>
__device__ __forceinline__ void compute_row_again(const Params& params, const TileRows& tile,
                                                  const KeysOfRow<Element>& keys, int row) {
  const RowOf where(params, tile, row);
  masked_row_fallback<Element, kDimV>(
      params.tensors, params.score,
      {tile.batch, where.head, tile.head_kv, tile.begin_q + where.query, where.keys(params, tile)},
      [](int) { return true; }, keys);
}

// The sum of a tile's chunks so far, [rows, units].
template <class Traits>
struct ChunkSum {
  unsigned char* base;

  __device__ __forceinline__ float4& out(int i) const { return reinterpret_cast<float4*>(base)[i]; }
  __device__ __forceinline__ float2& statistics(int i) const {
    return reinterpret_cast<float2*>(base + Traits::kUnits * 16)[i];
  }
};

// What the warps have of a unit, in the order of their first steps.
template <class Traits>
__device__ __forceinline__ Sum add_warps(const sm89_few_rows::Shared<Traits>& shared,
                                         const Segment& segment, int row, int unit) {
  const float2* const statistics = shared.warp_statistics() + row;
  const float4* const parts =
      shared.warp_parts() + row * Traits::kUnitsPerRow + sm89_few_rows::swizzle(row, unit);
  const int first = segment.keys.first_warp;
  return add_parts(
      kWarps, [&](int i) { return statistics[(first + i) % kWarps * Traits::kRows]; },
      [&](int i) { return parts[(first + i) % kWarps * Traits::kUnits]; });
}

// Adds up what the warps have of a segment, and brings it to where it belongs. All warps have
// stored their parts. Returns whether some unit that was written is suspect.
template <class Traits>
__device__ __forceinline__ bool finish_segment(const Params& params, const Segment& segment,
                                               const sm89_few_rows::Shared<Traits>& shared,
                                               const ChunkSum<Traits>& chunks) {
  const TileRows& tile = segment.tile;
  bool suspect = false;
  for (int i = thread_index(); i < tile.rows * Traits::kUnitsPerRow; i += kThreads) {
    const int row = i / Traits::kUnitsPerRow;
    const int unit = i % Traits::kUnitsPerRow;
    Sum total = add_warps(shared, segment, row, unit);
    if (segment.whole == 0) {
      const int64_t place = segment.place;
      params.parts[place * Traits::kUnits + i] = total.out;
      if (unit == 0) {
        params.statistics[place * Traits::kRows + row] = make_float2(total.row_max, total.sum);
      }
      continue;
    }
    if (segment.only == 0) {
      Sum before = Sum::none();
      if (segment.new_tile == 0) {
        const float2 statistics = chunks.statistics(i);
        before = {chunks.out(i), statistics.x, statistics.y};
      }
      total = add_sums(before, total);
      if (segment.last == 0) {
        chunks.out(i) = total.out;
        chunks.statistics(i) = make_float2(total.row_max, total.sum);
        continue;
      }
    }
    suspect |= write_unit<typename Traits::Element>(total, params, tile, row, unit);
  }
  return suspect;
}

template <class Traits>
__device__ __forceinline__ void compute_rows_again(const Params& params, const Segment& segment) {
  const KeysOfRow<typename Traits::Element> keys = {
      params, segment.keys.pages, segment.keys.batch_k, segment.keys.begin_k, segment.tile.head_kv};
  for (int row = warp_index(); row < segment.tile.rows; row += kWarps) {
    compute_row_again<typename Traits::Element, Traits::kDimV>(params, segment.tile, keys, row);
  }
}

}  // namespace flashmoe::sm89_decode
