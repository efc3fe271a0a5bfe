// The fallback of the forward kernels: a warp computes one row of the output again from the keys
// that the row sees (cuda/attention/masked_row_fallback.cuh).
#pragma once

#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90 {

// Computes a row of the output again. A whole warp calls it.
template <class Traits>
__device__ __forceinline__ void compute_again(const Params& params, int batch, int head,
                                              int head_kv, int query) {
  const Sequence sequence = sequence_of(params, batch);
  const KeyRange keys = {sequence.first_key(params.score, query),
                         sequence.end_key(params.score, query)};
  masked_row_fallback<typename Traits::Element, Traits::kDimV>(
      params.tensors, params.score,
      {batch, head, head_kv, sequence.begin_q + query, sequence.rows_of(keys)});
}

// The places of the keys and values of a sequence. They are nullptr for a key whose page is
// missing.
struct RaggedKeys {
  const RaggedParams& params;
  const RaggedTile& tile;

  __device__ __forceinline__ const uint16_t* k(int key) const {
    return row_of(params.tensors.k, params.tensors.k_strides, key);
  }
  __device__ __forceinline__ const uint16_t* v(int key) const {
    return row_of(params.tensors.v, params.tensors.v_strides, key);
  }

  // Tells whether a page of these keys is missing. A whole warp calls it.
  __device__ __forceinline__ bool misses(const KeyRange& keys) const {
    if (params.sequences.paged == 0 || keys.first >= keys.end) return false;
    const KeyTables& tables = params.sequences.keys;
    const int32_t* const pages = tables.pages_of(tile.batch_k);
    const int last = tables.by_page_size.quotient(tile.sequence.begin_k + keys.end - 1);
    bool missing = false;
    for (int page = tables.by_page_size.quotient(tile.sequence.begin_k + keys.first) + lane_index();
         page <= last; page += kThreadsPerWarp) {
      missing = missing || tables.page_at(pages, page) < 0;
    }
    return __any_sync(kFullWarp, missing);
  }

 private:
  __device__ __forceinline__ const uint16_t* row_of(const uint16_t* data, const RowStrides& strides,
                                                    int key) const {
    const int row = tile.sequence.begin_k + key;
    KeyTables::Place place = {tile.batch_k, row};
    if (params.sequences.paged != 0) {
      const KeyTables& tables = params.sequences.keys;
      place = tables.place_of(tables.pages_of(tile.batch_k), row);
      if (place.batch < 0) return nullptr;
    }
    return data +
           (place.batch * strides.batch + tile.head_kv * strides.head + place.row * strides.seq);
  }
};

template <class Traits>
__device__ __forceinline__ void compute_again(const RaggedParams& params, const RaggedTile& tile,
                                              int query, const PlaceOfRow& place) {
  const Sequence& sequence = tile.sequence;
  const KeyRange keys = {sequence.first_key(params.score, query),
                         sequence.end_key(params.score, query)};
  masked_row_fallback<typename Traits::Element, Traits::kDimV>(
      params.tensors, params.score, {tile.batch, place.head, tile.head_kv, place.position, keys},
      [](int) { return true; }, RaggedKeys{params, tile});
}

}  // namespace flashmoe::sm90
