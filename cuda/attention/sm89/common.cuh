// Shared parts of the sm_89 attention kernels: indices, tiles and their loads, Q K^T, softcap, the
// mask, the online softmax, and the fallback for tiles that the tensor cores cannot compute.
#pragma once

#include <type_traits>

#include "cuda/attention/masked_row_fallback.cuh"
#include "cuda/attention/sm89/params.h"
#include "cuda/attention/sm89/ragged.cuh"
#include "cuda/attention/sm89/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/row_statistics.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/softmax.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89 {

// The query tile of this block in a dense batch. It is computed once and then kept in shared
// memory. Tiles of unequal length come longest first, within groups of heads whose keys and values
// fit the L2 together (L2 swizzle).
struct Tile {
  int batch;
  int head;
  int head_kv;
  int first_row;

  template <class Traits>
  static __device__ __forceinline__ Tile of_block(const Params& params) {
    const auto [head, rank] = tile_in_swizzle(params, static_cast<int>(blockIdx.x));
    Tile result;
    result.batch = params.by_heads_q.quotient(head);
    result.head = head - result.batch * params.by_heads_q.number();
    result.head_kv = params.by_heads_per_kv.quotient(result.head);
    result.first_row = tile_of_rank(params, rank) * Traits::kTileQ;
    return result;
  }

  // Stores the tile for `in`, which may be called after the next block barrier.
  template <class Traits>
  __device__ __forceinline__ void keep(unsigned char* shared) const {
    if (thread_index() == 0) *reinterpret_cast<Tile*>(shared + Traits::kTileInfoOffset) = *this;
  }
  template <class Traits>
  static __device__ __forceinline__ Tile in(const unsigned char* shared) {
    return *reinterpret_cast<const Tile*>(shared + Traits::kTileInfoOffset);
  }
};
static_assert(sizeof(Tile) == kTileInfoBytes);

__device__ __forceinline__ Sequence sequence_of(const Params& params, const Tile& tile) {
  return flashmoe::sequence_of(params, tile.batch);
}
__device__ __forceinline__ bool is_masked(const Params& params, const Tile& /*tile*/) {
  return params.score.masked != 0;
}
__device__ __forceinline__ int rows_of(const Tile& /*tile*/, const Sequence& sequence) {
  return sequence.length_q;
}
__device__ __forceinline__ int query_of(const Params& /*params*/, int row) { return row; }
__device__ __forceinline__ int head_of(const Params& /*params*/, const Tile& tile, int /*row*/) {
  return tile.head;
}
__device__ __forceinline__ int64_t row_stride_of(const Params& /*params*/,
                                                 const RowStrides& strides) {
  return strides.seq;
}
__device__ __forceinline__ int64_t offset_of_row(const Params& /*params*/, const Sequence& sequence,
                                                 const RowStrides& strides, int row) {
  return (sequence.begin_q + row) * strides.seq;
}

// Types of kernels for ragged batches, in place of those of dense batches.
template <class Traits>
using ParamsOf =
    std::conditional_t<Traits::kRagged,
                       std::conditional_t<Traits::kBiased, RaggedBiasedParams, RaggedParams>,
                       std::conditional_t<Traits::kBiased, BiasedParams, Params>>;
template <class Traits>
using TileOf = std::conditional_t<Traits::kRagged, RaggedTile, Tile>;
template <class Traits>
using TileIn = std::conditional_t<Traits::kRagged, const RaggedTile&, Tile>;
template <class Traits>
using SequenceIn = std::conditional_t<Traits::kRagged, const Sequence&, Sequence>;

template <class Traits>
__device__ __forceinline__ TileIn<Traits> tile_in(const unsigned char* shared) {
  return TileOf<Traits>::template in<Traits>(shared);
}

// The tile to compute. find_tile has found it if batches are ragged.
template <class Traits>
__device__ __forceinline__ TileIn<Traits> begin_tile(const ParamsOf<Traits>& params,
                                                     unsigned char* shared) {
  if constexpr (Traits::kRagged) {
    return tile_in<Traits>(shared);
  } else {
    const Tile tile = Tile::of_block<Traits>(params);
    tile.keep<Traits>(shared);
    return tile;
  }
}

// The steps of keys that a tile needs, counted from the first. Steps before `left_steps` and from
// `right_steps` on hold keys that some row of the tile does not see.
template <class Traits>
struct TileSteps {
  int first;  // key of step 0
  int count;
  int left_steps;
  int right_steps;

  __device__ __forceinline__ TileSteps(const ScoreOptions& score, const Sequence& sequence,
                                       int first_row) {
    constexpr int kStep = Traits::kStepKeys;
    const int last_row = min(first_row + Traits::kTileQ, sequence.length_q) - 1;
    first = sequence.first_key(score, first_row) / kStep * kStep;
    count = (sequence.end_key(score, last_row) - first + kStep - 1) / kStep;
    left_steps = (sequence.first_key(score, last_row) - first + kStep - 1) / kStep;
    right_steps = (sequence.end_key(score, first_row) - first) / kStep;
  }
};

// Loaders of K and V.
template <class Traits>
using KLoader = TileLoader<typename Traits::KLayout, Traits::kStepKeys, Traits::kThreads,
                           typename Traits::KeyOrder>;
template <class Traits>
using VLoader = TileLoader<typename Traits::VLayout, Traits::kStepKeys, Traits::kThreads,
                           typename Traits::KeyOrder>;

template <class Traits>
__device__ __forceinline__ VLoader<Traits> make_v_loader(const uint16_t* v,
                                                         const ParamsOf<Traits>& params,
                                                         const KLoader<Traits>& k_loader,
                                                         uint32_t k_tile, uint32_t v_tile) {
  if constexpr (Traits::kDim == Traits::kDimV) {
    return VLoader<Traits>(v, params.tensors.v_strides.seq, k_loader, v_tile - k_tile);
  } else {
    return VLoader<Traits>(v, params.tensors.v_strides.seq, v_tile);
  }
}

// Copies the next step of keys; `keys` of them are left. In ragged batches each row is looked up,
// and the start of the loader is not used.
template <class Traits>
__device__ __forceinline__ void load_k(KLoader<Traits>& loader, const ParamsOf<Traits>& params,
                                       unsigned char* shared, uint32_t offset, int keys) {
  if constexpr (Traits::kRagged) {
    RaggedTile& tile = RaggedTile::in<Traits>(shared);
    load_ragged(loader, offset, params, tile, tile.k, params.tensors.k_strides, params.tensors.dim,
                keys);
  } else {
    loader.load_next(offset, params.tensors.k_strides.seq, keys, params.tensors.dim);
  }
}

template <class Traits>
__device__ __forceinline__ void load_v(VLoader<Traits>& loader, const ParamsOf<Traits>& params,
                                       unsigned char* shared, uint32_t offset, int keys) {
  if constexpr (Traits::kRagged) {
    RaggedTile& tile = RaggedTile::in<Traits>(shared);
    load_ragged(loader, offset, params, tile, tile.v, params.tensors.v_strides,
                params.tensors.dim_v, keys);
  } else {
    loader.load_next(offset, params.tensors.v_strides.seq, keys, params.tensors.dim_v);
  }
}

// Scores of the 16 * kRowAtoms rows of a warp. Element [a][n][e] belongs to row
// 16a + lane / 4 + 8 (e / 2) and column 8n + 2 (lane % 4) + e % 2; so does an output fragment's.
template <class Traits>
using Scores = float[Traits::kRowAtoms][Traits::kStepKeys / 8][4];

// A fragments of the part of Q in registers.
template <class Traits>
using Queries = uint32_t[larger(Traits::kQRegisterDims / 16, 1)][Traits::kRowAtoms][4];

template <class Layout, int kAtoms>
__device__ __forceinline__ void load_q(uint32_t (&q)[kAtoms][4], uint32_t q_lane, int pair) {
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) ptx::ldmatrix_x4(q[a], Layout::fragment(q_lane, 16 * a, pair));
}

// Copies both parts of a tile's Q to shared memory.
template <class Traits>
__device__ __forceinline__ void copy_q(const ParamsOf<Traits>& params, const TileOf<Traits>& tile,
                                       uint32_t shared) {
  const Sequence sequence = sequence_of(params, tile);
  const uint16_t* q = params.tensors.q + tile.batch * params.tensors.q_strides.batch +
                      tile.head * params.tensors.q_strides.head +
                      offset_of_row(params, sequence, params.tensors.q_strides, tile.first_row);
  const int64_t row_stride = row_stride_of(params, params.tensors.q_strides);
  const int rows = rows_of(tile, sequence) - tile.first_row;
  if constexpr (Traits::kQRegisterDims > 0) {
    TileLoader<typename Traits::QRegisterLayout, Traits::kTileQ, Traits::kThreads>(
        q, row_stride, shared + Traits::kQRegisterOffset)
        .load_next(0, row_stride, rows, min(params.tensors.dim, Traits::kQRegisterDims));
  }
  if constexpr (Traits::kQSharedDims > 0) {
    TileLoader<typename Traits::QSharedLayout, Traits::kTileQ, Traits::kThreads>(
        q + Traits::kQRegisterDims, row_stride, shared + Traits::kQSharedOffset)
        .load_next(0, row_stride, rows, params.tensors.dim - Traits::kQRegisterDims);
  }
}

// scores = K Q^T, one step of Q K^T. Fragments are read kAheadFragments before their products, so
// that the tensor cores hide the latency of shared memory.
template <class Traits>
__device__ __forceinline__ void multiply_scores(Scores<Traits>& scores,
                                                const Queries<Traits>& q_registers, uint32_t q_lane,
                                                uint32_t k_lane) {
  constexpr int kPairs = Traits::kDim / 16;
  constexpr int kColumns = Traits::kStepKeys / 16;
  constexpr int kFragments = kPairs * kColumns;
  constexpr int kBuffers = Traits::kAheadFragments + 1;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < Traits::kStepKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[a][n][e] = 0.0f;
    }
  }
  constexpr int kQPairs = Traits::kQRegisterDims / 16;  // pairs in registers
  uint32_t k[kBuffers][4];
  uint32_t q[Traits::kRowAtoms][4];  // one pair of the part in shared memory
  const auto load_k = [&](int i) {
    ptx::ldmatrix_x4(k[i % kBuffers],
                     Traits::KLayout::fragment(k_lane, 16 * (i % kColumns), i / kColumns));
  };
  const auto load_q_atom = [&](int pair, int a) {
    ptx::ldmatrix_x4(q[a], Traits::QSharedLayout::fragment(q_lane, 16 * a, pair - kQPairs));
  };
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
    if (kQPairs == 0) load_q_atom(0, a);
  }
#pragma unroll
  for (int i = 0; i < kBuffers - 1 && i < kFragments; ++i) load_k(i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int pair = i / kColumns;
    const int n = i % kColumns;
    if (i + kBuffers - 1 < kFragments) load_k(i + kBuffers - 1);
    const uint32_t (&k_now)[4] = k[i % kBuffers];
#pragma unroll
    for (int a = 0; a < Traits::kRowAtoms; ++a) {
      uint32_t q_now[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        q_now[e] = pair < kQPairs ? q_registers[pair < kQPairs ? pair : 0][a][e] : q[a][e];
      }
      ptx::mma_m16n8k16<typename Traits::Element>(scores[a][2 * n], q_now, k_now[0], k_now[1]);
      ptx::mma_m16n8k16<typename Traits::Element>(scores[a][2 * n + 1], q_now, k_now[2], k_now[3]);
      // Q of the next pair replaces that of this one after its last product.
      if (n == kColumns - 1 && pair + 1 >= kQPairs && pair + 1 < kPairs) load_q_atom(pair + 1, a);
    }
  }
}

template <class Traits>
using Fragments = ScoreFragments<Traits::kRowAtoms, Traits::kStepKeys>;

enum class Side { kLeft, kRight };

// Masks the keys that a row does not see on one side. `key` is the step's first.
template <class Traits, Side kSide>
__device__ __forceinline__ void mask_side(Scores<Traits>& scores, const ParamsOf<Traits>& params,
                                          const unsigned char* shared, int key) {
  const int lane = lane_index();
  const TileIn<Traits> tile = tile_in<Traits>(shared);
  const Sequence sequence = sequence_of(params, tile);
  const int first_row = tile.first_row + warp_index() * Traits::kRowsPerWarp;
  mask_scores<Fragments<Traits>>(scores, [&](int r) {
    const int query = query_of(params, first_row + lane / 4 + Fragments<Traits>::row_of(r));
    const int bound = kSide == Side::kLeft ? sequence.first_key(params.score, query)
                                           : sequence.end_key(params.score, query);
    const int limit = bound - key - 2 * (lane % 4);
    return [limit](int i) {
      const int column = Fragments<Traits>::key_of(i);
      return kSide == Side::kLeft ? column >= limit : column < limit;
    };
  });
}

// Masks a step's keys on invalid pages, for all rows.
template <class Traits>
__device__ __forceinline__ void mask_missing(Scores<Traits>& scores, const ParamsOf<Traits>& params,
                                             const RaggedTile& tile, int key) {
  const RaggedKeys keys = {params, tile};
  const int first = key + 2 * (lane_index() % 4);
#pragma unroll
  for (int n = 0; n < Traits::kStepKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = first + 8 * n + e;
      if (column >= tile.sequence.length_k || !keys.is_hidden(column)) continue;
#pragma unroll
      for (int a = 0; a < Traits::kRowAtoms; ++a) {
        scores[a][n][e] = -INFINITY;
        scores[a][n][2 + e] = -INFINITY;
      }
    }
  }
}

// Masks a step's keys that lie outside a row's bounds.
template <class Traits>
__device__ __forceinline__ void mask_step(Scores<Traits>& scores, const ParamsOf<Traits>& params,
                                          const TileSteps<Traits>& steps,
                                          const unsigned char* shared, int step) {
  const int key = steps.first + step * Traits::kStepKeys;
  if (step < steps.left_steps) mask_side<Traits, Side::kLeft>(scores, params, shared, key);
  if (step >= steps.right_steps) mask_side<Traits, Side::kRight>(scores, params, shared, key);
  if constexpr (Traits::kRagged) {
    const RaggedTile& tile = RaggedTile::in<Traits>(shared);
    if (tile.misses_pages != 0) mask_missing<Traits>(scores, params, tile, key);
  }
}

inline constexpr float kNeedsFallback = INFINITY;  // no other row's sum gives it

// Which rows of a warp have seen a key (pairs.cuh).
struct SeenRows {
  uint32_t seen;
};
struct NoSeenRows {};

// Online softmax of a warp's rows. A lane's row 2 a + half belongs to atom a.
template <class Traits>
struct Statistics : RowStatistics<Fragments<Traits>::kRows>,
                    std::conditional_t<Traits::kBiased, SeenRows, NoSeenRows> {
  __device__ __forceinline__ void reset() {
    if constexpr (Traits::kBiased) this->seen = 0;
    RowStatistics<Fragments<Traits>::kRows>::reset();
  }

  // The same as in RowStatistics, with apply(a, half, factor).
  template <class Apply>
  __device__ __forceinline__ bool rescale(const Scores<Traits>& scores, float scale_log2,
                                          const Apply& apply) {
    return RowStatistics<Fragments<Traits>::kRows>::template rescale<Fragments<Traits>>(
        scores, scale_log2, [&](int r, float factor) { apply(r / 2, r % 2, factor); });
  }

  // Rounds and packs the probabilities of a pair of scores.
  __device__ __forceinline__ uint32_t exponentiate(const float (&scores)[4], float scale_log2,
                                                   int a, int half) {
    const float low = probability(scores[2 * half], scale_log2, this->row_max[2 * a + half]);
    const float high = probability(scores[2 * half + 1], scale_log2, this->row_max[2 * a + half]);
    this->sum[2 * a + half] += low + high;
    return numeric::ElementTraits<typename Traits::Element>::pack(low, high);
  }

  // Adds up the sums of a row's lanes and writes lse if wanted. Returns the factor of the row's
  // accumulators, or kNeedsFallback if the row needs the fallback.
  __device__ __forceinline__ float finish(const ParamsOf<Traits>& params,
                                          const TileOf<Traits>& tile, int row, int a, int half) {
    const float total = sum_of_quad(this->sum[2 * a + half]);
    const Sequence sequence = sequence_of(params, tile);
    const int query = query_of(params, row);
    // Rows past the last have empty sums. They must not look like a NaN, although they are not
    // written.
    bool sees_keys = row < rows_of(tile, sequence) && sequence.sees_keys(params.score, query);
    if constexpr (Traits::kBiased) {
      sees_keys = any_of_quad(this->seen >> (2 * a + half) & 1u) && row < rows_of(tile, sequence);
    }
    const RowEnd end = add_sink_and_end_row<typename Traits::Element, RowEndBy::kExact>(
        params.score, head_of(params, tile, row), sees_keys, {this->row_max[2 * a + half], total});
    if (params.tensors.lse != nullptr && lane_index() % 4 == 0 && row < rows_of(tile, sequence)) {
      params.tensors.lse[tile.batch * params.tensors.lse_strides.batch +
                         tile.head * params.tensors.lse_strides.head +
                         offset_of_row(params, sequence, params.tensors.lse_strides, row)] =
          end.lse;
    }
    return end.factor;
  }
};

// Writes the rows of an output tile from shared memory, 16 bytes per lane.
template <class Layout, int kRows, int kThreads, class Params, class Tile>
__device__ __forceinline__ void store_rows(const unsigned char* tile_bytes, const Params& params,
                                           const Tile& tile, int first_row, int thread) {
  const Sequence sequence = sequence_of(params, tile);
  uint16_t* out = params.tensors.out + tile.batch * params.tensors.out_strides.batch +
                  tile.head * params.tensors.out_strides.head +
                  sequence.begin_q * params.tensors.out_strides.seq;
#pragma unroll 4
  for (int index = thread; index < kRows * Layout::kChunksPerRow; index += kThreads) {
    const int row = index / Layout::kChunksPerRow;
    const int chunk = index % Layout::kChunksPerRow;
    if (first_row + row < rows_of(tile, sequence) &&
        chunk * kElementsPerChunk < params.tensors.dim_v) {
      *reinterpret_cast<uint4*>(
          out + (first_row + row) * row_stride_of(params, params.tensors.out_strides) +
          chunk * kElementsPerChunk) =
          *reinterpret_cast<const uint4*>(tile_bytes + Layout::chunk_offset(row, chunk));
    }
  }
}

// Keys of a sequence with a bias or a mask, for the fallback.
template <class Element>
struct RaggedBiasedKeys {
  RaggedKeys keys;
  PairRow<Element> row;

  __device__ __forceinline__ float bias_of(int key) const {
    return row.bias_of(keys.tile.skipped + key);
  }
  __device__ __forceinline__ const uint16_t* k(int key) const {
    return bias_of(key) == ScorePairs::kHidden ? nullptr : keys.k(key);
  }
  __device__ __forceinline__ const uint16_t* v(int key) const {
    return bias_of(key) == ScorePairs::kHidden ? nullptr : keys.v(key);
  }
  __device__ __forceinline__ float logit(float score, int key) const {
    return biased_logit(score, row.pairs.factor, bias_of(key));
  }
};

// Computes rows of a tile by the fallback, one at a time. Whole warps call it. This warp takes
// `first_row`, `first_row + stride`, ... before `end_row`.
template <class Traits>
__device__ __noinline__ void masked_rows_fallback(const ParamsOf<Traits>& params,
                                                  TileIn<Traits> tile, int first_row, int stride,
                                                  int end_row) {
  const Sequence sequence = sequence_of(params, tile);
  const int rows = rows_of(tile, sequence);
  for (int row = first_row; row < min(end_row, rows); row += stride) {
    const int query = query_of(params, row);
    const KeyRange keys = {sequence.first_key(params.score, query),
                           sequence.end_key(params.score, query)};
    if constexpr (Traits::kRagged) {
      const int head = head_of(params, tile, row);
      const MaskedRow masked = {tile.batch, head, tile.head_kv, sequence.begin_q + query, keys};
      if constexpr (Traits::kBiased) {
        masked_row_fallback<typename Traits::Element, Traits::kDimV>(
            params.tensors, params.score, masked, [](int) { return true; },
            RaggedBiasedKeys<typename Traits::Element>{{params, tile},
                                                       {params.pairs, tile.number, head, query}});
      } else {
        masked_row_fallback<typename Traits::Element, Traits::kDimV>(
            params.tensors, params.score, masked, [](int) { return true; },
            RaggedKeys{params, tile});
      }
    } else if constexpr (Traits::kBiased) {
      const MaskedRow masked = {tile.batch, tile.head, tile.head_kv, query, keys};
      masked_row_fallback<typename Traits::Element, Traits::kDimV>(
          params.tensors, params.score, masked, [](int) { return true; },
          BiasedKeys<typename Traits::Element>(params.tensors, params.pairs, masked));
    } else {
      masked_row_fallback<typename Traits::Element, Traits::kDimV>(
          params.tensors, params.score,
          {tile.batch, tile.head, tile.head_kv, sequence.begin_q + row, sequence.rows_of(keys)});
    }
  }
}

}  // namespace flashmoe::sm89
