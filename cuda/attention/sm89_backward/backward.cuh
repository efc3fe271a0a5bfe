// Attention backward for Ada and newer, with mma.sync, from the products P = exp(S - lse),
// S = scale Q K^T:
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K
//   dK = scale dS^T Q                                          delta = rowsum(dO * O) - dlse
//
// An item is a tile of keys of one KV head (tile.cuh); a block keeps its K and V in shared memory
// and runs over the query tiles of all query heads of the KV head. dK and dV stay in registers for
// the whole item, and leave as rows at its end. In each product warps share rows and columns in
// their own way (traits.cuh), so P and dS pass through shared memory.
//
// A step's part of dQ is added in fp32 to a sum in global memory, when the parts of the items
// before it are there: a word for each tile of dQ counts them. The first part is stored, so nothing
// is zeroed; to the last one the sum is added in registers, and rows of dQ are written. So the
// order of additions is fixed. A block says that a part is there when it is at the barrier of its
// next step: by then the additions are done, and nobody waits for them.
//
// One step: S, P -> shared | dP, dS -> shared | barrier | dV, dK, dQ -> sum. Q and dO of the next
// step arrive meanwhile. With two buffers of P and dS, and three of Q and dO, a warp that is ahead
// goes on to the next step's S beside others that are at this one's dQ.
//
// Where a row does not see a key its P and dS are 0, but 0 * NaN is NaN. So gradients of a masked
// call that are not finite are computed again by plain arithmetic (masked_fallback.cuh). Rows and
// columns that do not exist are zeros in shared memory.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/attention/sm89_backward/params.h"
#include "cuda/attention/sm89_backward/traits.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_backward {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

using attention_backward::Item;
using attention_backward::kNoItem;
using attention_backward::Part;
using attention_backward::Parts;
using attention_backward::store_pair;
using attention_backward::Wanted;

// A step of an item: its query tiles, of each the query heads of the KV head one after another.
// Head by head, a short item that ascends would wait in each head for its longer neighbours, which
// reach the same queries no later than it does.
struct Step {
  int head;
  int tile_q;

  static __device__ __forceinline__ Step of(const Params& params, const Item& item, int index) {
    const int tiles = index / params.heads_per_kv;
    return {item.head_kv * params.heads_per_kv + index - tiles * params.heads_per_kv,
            item.ascends ? item.end - 1 - tiles : item.begin + tiles};
  }
  // Of all tiles of dQ.
  __device__ __forceinline__ int64_t place(const Params& params, const Item& item) const {
    return static_cast<int64_t>(item.batch * params.heads_q + head) * params.tiles_q + tile_q;
  }
};

// Sums of a warp's part of a product. Element [a][n][e] belongs to its row 16a + lane / 4 + 8 (e /
// 2) and its column 8n + 2 (lane % 4) + e % 2.
template <int kRows, int kColumns>
using Fragment = float[kRows / 16][kColumns / 8][4];

template <int kAtoms, int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kAtoms][kTiles][4]) {
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[a][n][e] = 0.0f;
    }
  }
}

// sums += A B over kSlices of 16. load_a(fragment, atom, slice) reads 16 rows of A,
// load_b(fragment, pair, slice) 16 columns of B, each before the products ahead of its own.
template <class Element, int kSlices, int kAtoms, int kTiles, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(float (&sums)[kAtoms][kTiles][4], const LoadA& load_a,
                                         const LoadB& load_b) {
  constexpr int kPairs = kTiles / 2;
  constexpr int kFragments = kSlices * kPairs;
  uint32_t a[kAtoms][4];
  uint32_t b[2][4];
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) load_a(a[atom], atom, 0);
  load_b(b[0], 0, 0);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int slice = i / kPairs;
    const int pair = i % kPairs;
    if (i + 1 < kFragments) load_b(b[(i + 1) % 2], (i + 1) % kPairs, (i + 1) / kPairs);
    const uint32_t (&now)[4] = b[i % 2];
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      ptx::mma_m16n8k16<Element>(sums[atom][2 * pair], a[atom], now[0], now[1]);
      ptx::mma_m16n8k16<Element>(sums[atom][2 * pair + 1], a[atom], now[2], now[3]);
      if (pair == kPairs - 1 && slice + 1 < kSlices) load_a(a[atom], atom, slice + 1);
    }
  }
}

// Addresses of a lane's part of the fragments of a warp's part of a tile, for Layout::fragment.
template <class Layout>  // A stored as rows x k: fragment(base, 16 atom, slice)
__device__ __forceinline__ uint32_t a_rows(uint32_t tile, int first_row) {
  return a_fragments<Layout>(tile, first_row);
}
template <class Layout>  // A stored as k x rows, by trans: fragment(base, 16 slice, atom)
__device__ __forceinline__ uint32_t a_columns(uint32_t tile, int first_row) {
  const int lane = lane_index();
  return Layout::fragment_base(tile, (lane & 7) + ((lane >> 4) << 3),
                               first_row / kElementsPerChunk + ((lane >> 3) & 1));
}
template <class Layout>  // B stored as columns x k: fragment(base, 16 pair, slice)
__device__ __forceinline__ uint32_t b_rows(uint32_t tile, int first_column) {
  const int lane = lane_index();
  return Layout::fragment_base(tile, first_column + (lane & 7) + ((lane >> 4) << 3),
                               (lane >> 3) & 1);
}
template <class Layout>  // B stored as k x columns, by trans: fragment(base, 16 slice, pair)
__device__ __forceinline__ uint32_t b_columns(uint32_t tile, int first_column) {
  const int lane = lane_index();
  return Layout::fragment_base(tile, lane & 15, first_column / kElementsPerChunk + (lane >> 4));
}

template <class Traits>
struct Block {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using QLayout = typename Traits::QLayout;
  using KLayout = typename Traits::KLayout;
  using DoutLayout = typename Traits::DoutLayout;
  using VLayout = typename Traits::VLayout;
  using ScoreLayout = typename Traits::ScoreLayout;
  using Scores = Fragment<Traits::kScoreRows, Traits::kScoreColumns>;
  using KeySums = Fragment<Traits::kKeyRows, Traits::kKColumns>;
  using ValueSums = Fragment<Traits::kKeyRows, Traits::kVColumns>;
  using QuerySums = Fragment<Traits::kQueryRows, Traits::kQColumns>;

  const Params& params;
  unsigned char* const shared;
  const uint32_t address;  // of shared

  // Read anew where it is needed: kept across the main loop it would cost registers.
  __device__ __forceinline__ const volatile Item& shared_item() const {
    return *reinterpret_cast<const volatile Item*>(shared + Traits::kItemOffset);
  }
  __device__ __forceinline__ Item item() const {
    const volatile Item& from = shared_item();
    Item copy = {};
    copy.batch = from.batch;
    copy.head_kv = from.head_kv;
    copy.tile = from.tile;
    copy.begin = from.begin;
    copy.end = from.end;
    copy.ascends = from.ascends;
    return copy;
  }

  // ---- loads --------------------------------------------------------------------------------

  template <class Layout, int kRows>
  static __device__ __forceinline__ void load(uint32_t tile, const Rows& from, int batch, int head,
                                              int first_row, int end_row, int dim) {
    const uint16_t* const base = from.data + batch * from.strides.batch + head * from.strides.head +
                                 first_row * from.strides.seq;
    TileLoader<Layout, kRows, Traits::kThreads>(base, from.strides.seq, tile)
        .load_next(0, from.strides.seq, end_row - first_row, dim);
  }
  // A number for each query of a step.
  __device__ __forceinline__ void load_row_numbers(uint32_t to, const float* from,
                                                   int64_t place) const {
    constexpr int kNumbers = kBytesPerChunk / static_cast<int>(sizeof(float));
    const int chunk = thread_index();
    if (chunk < Traits::kTileQ / kNumbers) {
      ptx::cp_async_16(to + chunk * kBytesPerChunk,
                       from + place * Traits::kTileQ + chunk * kNumbers);
    }
  }
  __device__ __forceinline__ void load_keys() const {
    const Item item = this->item();
    const int first = item.tile * Traits::kTileK;
    load<KLayout, Traits::kTileK>(address + Traits::kKOffset, params.k_rows, item.batch,
                                  item.head_kv, first, params.seq_k, params.dim);
    load<VLayout, Traits::kTileK>(address + Traits::kVOffset, params.v_rows, item.batch,
                                  item.head_kv, first, params.seq_k, params.dim_v);
  }
  static __device__ __forceinline__ uint32_t stage_of(int step) {
    return static_cast<uint32_t>(step) % Traits::kStages;
  }
  static __device__ __forceinline__ uint32_t dout_stage_of(int step) {
    return static_cast<uint32_t>(step) % Traits::kDoutStages;
  }
  static __device__ __forceinline__ uint32_t buffer_of(int step) {
    return static_cast<uint32_t>(step) % Traits::kBuffers;
  }
  __device__ __forceinline__ void load_q(int index) const {
    const Item item = this->item();
    const Step step = Step::of(params, item, index);
    load<QLayout, Traits::kTileQ>(address + Traits::kQOffset + stage_of(index) * Traits::kQBytes,
                                  params.q_rows, item.batch, step.head,
                                  step.tile_q * Traits::kTileQ, params.seq_q, params.dim);
    load_row_numbers(address + Traits::kLseOffset + stage_of(index) * Traits::kRowBytes,
                     params.row_lse, step.place(params, item));
  }
  __device__ __forceinline__ void load_dout(int index) const {
    const Item item = this->item();
    const Step step = Step::of(params, item, index);
    load<DoutLayout, Traits::kTileQ>(
        address + Traits::kDoutOffset + dout_stage_of(index) * Traits::kDoutBytes, params.dout_rows,
        item.batch, step.head, step.tile_q * Traits::kTileQ, params.seq_q, params.dim_v);
    load_row_numbers(address + Traits::kDeltaOffset + dout_stage_of(index) * Traits::kRowBytes,
                     params.row_delta, step.place(params, item));
  }

  // ---- P and dS -----------------------------------------------------------------------------

  // This warp's part of the products of a step.
  static __device__ __forceinline__ int score_row() {
    return warp_index() / Traits::kScores.columns * Traits::kScoreRows;
  }
  static __device__ __forceinline__ int score_column() {
    return warp_index() % Traits::kScores.columns * Traits::kScoreColumns;
  }

  // scores = A B^T, of rows of queries and rows of keys.
  template <class Layout>
  static __device__ __forceinline__ void multiply_rows(Scores& scores, uint32_t queries,
                                                       uint32_t keys) {
    const uint32_t a_lane = a_rows<Layout>(queries, score_row());
    const uint32_t b_lane = b_rows<Layout>(keys, score_column());
    clear(scores);
    multiply<Element, Layout::kDim / 16>(
        scores,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4(a, Layout::fragment(a_lane, 16 * atom, slice));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4(b, Layout::fragment(b_lane, 16 * pair, slice));
        });
  }

  // Hides the keys that a query does not see.
  __device__ __forceinline__ void mask(Scores& scores, int tile_q) const {
    const int first_key = shared_item().tile * Traits::kTileK + score_column();
    const int lane = lane_index();
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = tile_q * Traits::kTileQ + score_row() + 16 * a + lane / 4 + 8 * half;
        const KeyRange keys = params.score.keys(query, params.seq_k);
        const int first = keys.first - first_key - 2 * (lane % 4);
        const int end = keys.end - first_key - 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < Traits::kScoreColumns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < first || 8 * n + e >= end) scores[a][n][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }

  // Whether some query of a tile does not see all keys of the item.
  __device__ __forceinline__ bool is_masked(int tile_q) const {
    const int first_key = shared_item().tile * Traits::kTileK;
    const int first_row = tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, params.seq_q) - 1;
    return params.score.first_key(last_row) > first_key ||
           params.score.end_key(first_row, params.seq_k) < first_key + Traits::kTileK;
  }

  // Calls take(row, a, half, n, low, high) for pairs of this lane's scores: where they are in a
  // tile of them, as an offset in bytes, and the row of the tile.
  template <class Take>
  static __device__ __forceinline__ void for_pairs(const Take& take) {
    const int lane = lane_index();
    const int first_row = score_row() + lane / 4;
    const int first_chunk = score_column() / kElementsPerChunk;
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 16 * a + 8 * half;
        const auto put = take(row, a, half);
#pragma unroll
        for (int n = 0; n < Traits::kScoreColumns / 8; ++n) {
          put(n, ScoreLayout::chunk_offset(row, first_chunk + n) + 4 * (lane % 4));
        }
      }
    }
  }

  // P = exp2(S scale_log2 - lse), to shared memory. What dP - delta is multiplied by takes the
  // place of the scores: P, and with a softcap, of which scores are tanh, P (1 - scores^2).
  template <bool kCapped>
  __device__ __forceinline__ void exponentiate(Scores& scores, int index) const {
    const float scale_log2 = params.score.scale_log2;
    const uint32_t lse = address + Traits::kLseOffset + stage_of(index) * Traits::kRowBytes;
    const uint32_t to = address + Traits::kPOffset + buffer_of(index) * Traits::kScoreBytes;
    for_pairs([&](int row, int a, int half) {
      const float row_lse = ptx::load_shared_float(lse + 4 * row);
      return [&scores, scale_log2, to, row_lse, a, half](int n, uint32_t offset) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[a][n][2 * half + e];
          p[e] = numeric::exp2_approx(fmaf(score, scale_log2, -row_lse));
          // A hidden score is no tanh.
          score = !kCapped ? p[e] : p[e] == 0.0f ? 0.0f : p[e] * fmaf(-score, score, 1.0f);
        }
        ptx::store_shared(to + offset, Numeric::pack(p[0], p[1]));
      };
    });
  }

  // dS = factors (dP - delta), to shared memory.
  __device__ __forceinline__ void store_ds(const Scores& factors, const Scores& dp,
                                           int index) const {
    const uint32_t delta =
        address + Traits::kDeltaOffset + dout_stage_of(index) * Traits::kRowBytes;
    const uint32_t to = address + Traits::kDsOffset + buffer_of(index) * Traits::kScoreBytes;
    for_pairs([&](int row, int a, int half) {
      const float row_delta = ptx::load_shared_float(delta + 4 * row);
      return [&factors, &dp, to, row_delta, a, half](int n, uint32_t offset) {
        float ds[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          ds[e] = factors[a][n][2 * half + e] * (dp[a][n][2 * half + e] - row_delta);
        }
        ptx::store_shared(to + offset, Numeric::pack(ds[0], ds[1]));
      };
    });
  }

  // P and dS of a step.
  __device__ __forceinline__ void make_scores(int index) const {
    Scores scores;
    multiply_rows<QLayout>(scores, address + Traits::kQOffset + stage_of(index) * Traits::kQBytes,
                           address + Traits::kKOffset);
    const int tile_q = Step::of(params, item(), index).tile_q;
    const bool capped = params.score.capped();
    if (capped) params.score.cap(scores);
    if (is_masked(tile_q)) mask(scores, tile_q);
    if (capped) {
      exponentiate<true>(scores, index);
    } else {
      exponentiate<false>(scores, index);
    }
    if (params.dq_rows.rows == nullptr && params.dk_rows.rows == nullptr) return;
    Scores dp;
    multiply_rows<DoutLayout>(
        dp, address + Traits::kDoutOffset + dout_stage_of(index) * Traits::kDoutBytes,
        address + Traits::kVOffset);
    store_ds(scores, dp, index);
  }

  // ---- dV, dK and dQ ------------------------------------------------------------------------

  // sums += A^T B: A of [kTileQ, kTileK] scores, B of kTileQ rows.
  template <class Layout, int kColumns, int kAtoms, int kTiles>
  static __device__ __forceinline__ void multiply_keys(float (&sums)[kAtoms][kTiles][4],
                                                       uint32_t scores, uint32_t rows) {
    const int warp = warp_index();
    const uint32_t a_lane =
        a_columns<ScoreLayout>(scores, warp / Traits::kKeys.columns * Traits::kKeyRows);
    const uint32_t b_lane = b_columns<Layout>(rows, warp % Traits::kKeys.columns * kColumns);
    multiply<Element, Traits::kTileQ / 16>(
        sums,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4_trans(a, ScoreLayout::fragment(a_lane, 16 * slice, atom));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4_trans(b, Layout::fragment(b_lane, 16 * slice, pair));
        });
  }
  __device__ __forceinline__ void add_dv(ValueSums& dv, int index) const {
    if (params.dv_rows.rows == nullptr) return;
    multiply_keys<DoutLayout, Traits::kVColumns>(
        dv, address + Traits::kPOffset + buffer_of(index) * Traits::kScoreBytes,
        address + Traits::kDoutOffset + dout_stage_of(index) * Traits::kDoutBytes);
  }
  __device__ __forceinline__ void add_dk(KeySums& dk, int index) const {
    if (params.dk_rows.rows == nullptr) return;
    multiply_keys<QLayout, Traits::kKColumns>(
        dk, address + Traits::kDsOffset + buffer_of(index) * Traits::kScoreBytes,
        address + Traits::kQOffset + stage_of(index) * Traits::kQBytes);
  }

  static __device__ __forceinline__ int query_row() {
    return warp_index() / Traits::kQueries.columns * Traits::kQueryRows;
  }
  static __device__ __forceinline__ int query_column() {
    return warp_index() % Traits::kQueries.columns * Traits::kQColumns;
  }

  __device__ __forceinline__ void add_dq(int index) const {
    if (params.dq_rows.rows == nullptr) return;
    QuerySums dq;
    clear(dq);
    const uint32_t a_lane = a_rows<ScoreLayout>(
        address + Traits::kDsOffset + buffer_of(index) * Traits::kScoreBytes, query_row());
    const uint32_t b_lane = b_columns<KLayout>(address + Traits::kKOffset, query_column());
    multiply<Element, Traits::kTileK / 16>(
        dq,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4(a, ScoreLayout::fragment(a_lane, 16 * atom, slice));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4_trans(b, KLayout::fragment(b_lane, 16 * slice, pair));
        });
    hand_over(dq, index);
  }

  // This thread's place in the sums of a tile of dQ, for the i-th of its fragments, whose elements
  // are kSumStride apart: a warp's lie side by side, as its additions are.
  static constexpr int kSumStride = ptx::kAddsVectors ? 1 : Traits::kThreads;
  __device__ __forceinline__ float* sum_of(int64_t place, int i) const {
    return params.dq_sums + place * (Traits::kTileQ * Traits::kDim) + i * Traits::kThreads * 4 +
           thread_index() * (ptx::kAddsVectors ? 4 : 1);
  }

  // Adds a step's part of dQ to the sum, or writes rows of dQ if it is the last one.
  __device__ __forceinline__ void hand_over(QuerySums& dq, int index) const {
    constexpr int kTiles = Traits::kQColumns / 8;
    const Item item = this->item();
    const Step step = Step::of(params, item, index);
    const Parts parts = Parts::of<Traits>(params, step.tile_q);
    const int64_t place = step.place(params, item);
    const int before = parts.before(item);
    const bool first = before == 0;
    if (!first) wait_for_turn(place, static_cast<uint32_t>(before));
    const bool last = before == parts.last - parts.first;
#pragma unroll
    for (int i = 0; i < Traits::kQueryRows / 16 * kTiles; ++i) {
      float (&part)[4] = dq[i / kTiles][i % kTiles];
      float* const sum = sum_of(place, i);
      if (last && !first) {
        float added[4];
        ptx::load_from_l2<kSumStride>(added, sum);
#pragma unroll
        for (int e = 0; e < 4; ++e) part[e] += added[e];
      } else if (!last && first) {
        ptx::store_global<kSumStride>(sum, part);
      } else if (!last) {
        ptx::add_global<kSumStride>(sum, part);
      }
    }
    if (last) write_dq(dq, item, step);
  }
  __device__ __forceinline__ void wait_for_turn(int64_t place, uint32_t before) const {
    if (lane_index() == 0) {
      while (ptx::load_acquire(params.turns + place) != before) {
      }
    }
    __syncwarp();
  }
  // Says that a step's part of dQ is in the sum. All threads of the block have added theirs ahead
  // of a barrier that is behind this thread.
  __device__ __forceinline__ void release_turn(int index) const {
    if (thread_index() != 0 || params.dq_rows.rows == nullptr) return;
    const Item item = this->item();
    const Step step = Step::of(params, item, index);
    const Parts parts = Parts::of<Traits>(params, step.tile_q);
    const int before = parts.before(item);
    if (before == parts.last - parts.first) return;
    ptx::store_release(params.turns + step.place(params, item), static_cast<uint32_t>(before) + 1);
  }

  // ---- results ------------------------------------------------------------------------------

  // Whether a warp's part of a gradient may be written. 0 * NaN is in none of an unmasked call.
  template <int kAtoms, int kTiles>
  __device__ __forceinline__ bool is_clean(const float (&values)[kAtoms][kTiles][4]) const {
    if (params.score.masked == 0) return true;
    bool finite = true;
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) finite = finite && fabsf(values[a][n][e]) < INFINITY;
      }
    }
    return __all_sync(kFullWarp, finite);
  }

  // Writes a warp's part of a gradient times `scale`.
  template <int kAtoms, int kTiles>
  __device__ __forceinline__ void write(const Gradient& to, const Part& part, float scale,
                                        const float (&values)[kAtoms][kTiles][4]) const {
    const int lane = lane_index();
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = part.first_row + 16 * a + lane / 4 + 8 * half;
        if (row >= part.end_row) continue;
        const int64_t row_at =
            part.batch * to.strides.batch + part.head * to.strides.head + row * to.strides.seq;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int column = part.first_column + 8 * n + 2 * (lane % 4);
          if (column >= part.end_column) continue;
          store_pair<Element>(to, row_at + column, params.accumulate != 0,
                              values[a][n][2 * half] * scale, values[a][n][2 * half + 1] * scale);
        }
      }
    }
  }

  __device__ __forceinline__ void write_dq(const QuerySums& dq, const Item& item,
                                           const Step& step) const {
    const int first_row = step.tile_q * Traits::kTileQ + query_row();
    const Part part = {item.batch,     step.head,
                       first_row,      min(first_row + Traits::kQueryRows, params.seq_q),
                       query_column(), min(query_column() + Traits::kQColumns, params.dim)};
    if (is_clean(dq)) {
      write(params.dq_rows, part, params.scale, dq);
    } else {
      attention_backward::masked_fallback<Traits, Wanted::kDq>(params, part);
    }
  }

  template <Wanted kWanted, int kAtoms, int kTiles>
  __device__ __forceinline__ void write_keys(const Gradient& to, float scale, int columns,
                                             const float (&values)[kAtoms][kTiles][4]) const {
    if (to.rows == nullptr) return;
    const int warp = warp_index();
    const Item item = this->item();
    const int first_row =
        item.tile * Traits::kTileK + warp / Traits::kKeys.columns * Traits::kKeyRows;
    const int first_column = warp % Traits::kKeys.columns * (8 * kTiles);
    const Part part = {item.batch,   item.head_kv,
                       first_row,    min(first_row + Traits::kKeyRows, params.seq_k),
                       first_column, min(first_column + 8 * kTiles, columns)};
    if (is_clean(values)) {
      write(to, part, scale, values);
    } else {
      attention_backward::masked_fallback<Traits, kWanted>(params, part);
    }
  }

  // ---- an item ------------------------------------------------------------------------------

  // Two barriers a step: what a step reads is there, and its P and dS are.
  __device__ __forceinline__ void run_in_phases(int count, KeySums& dk, ValueSums& dv) const {
    load_keys();
    load_q(0);
    load_dout(0);
    ptx::cp_async_commit();
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const bool more = index + 1 < count;
      if (more) load_q(index + 1);
      if (more && Traits::kDoutStages > 1) load_dout(index + 1);
      ptx::cp_async_commit();
      make_scores(index);
      __syncthreads();
      if (index > 0) release_turn(index - 1);
      add_dv(dv, index);
      if (Traits::kDoutStages == 1) {
        __syncthreads();  // dO has been read
        if (more) load_dout(index + 1);
        ptx::cp_async_commit();
      }
      add_dk(dk, index);
      add_dq(index);
    }
  }

  // One: P and dS of a step are there, and what the next one reads.
  __device__ __forceinline__ void run_ahead(int count, KeySums& dk, ValueSums& dv) const {
    load_keys();
    load_q(0);
    load_dout(0);
    ptx::cp_async_commit();
    if (count > 1) {
      load_q(1);
      load_dout(1);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    make_scores(0);
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (index + 2 < count) {
        load_q(index + 2);
        load_dout(index + 2);
      }
      ptx::cp_async_commit();
      if (index > 0) release_turn(index - 1);
      add_dv(dv, index);
      add_dk(dk, index);
      add_dq(index);
      if (index + 1 < count) make_scores(index + 1);
    }
  }

  __device__ __forceinline__ void run() const {
    const int steps_of_head = shared_item().end - shared_item().begin;
    const int count = steps_of_head * params.heads_per_kv;
    KeySums dk;
    ValueSums dv;
    clear(dk);
    clear(dv);
    if (count > 0) {
      if constexpr (Traits::kBuffers == 1) {
        run_in_phases(count, dk, dv);
      } else {
        run_ahead(count, dk, dv);
      }
      __syncthreads();  // all have added their part of dQ
      release_turn(count - 1);
    }
    write_keys<Wanted::kDv>(params.dv_rows, 1.0f, params.dim_v, dv);
    write_keys<Wanted::kDk>(params.dk_rows, params.scale, params.dim, dk);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    attention_backward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared[];
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const Block<Traits> block{params, shared,
                            static_cast<uint32_t>(__cvta_generic_to_shared(shared))};
#pragma unroll 1
  for (;;) {
    __syncthreads();  // the item before has been read
    if (thread_index() == 0) {
      *reinterpret_cast<Item*>(shared + Traits::kItemOffset) =
          Item::at<Traits>(params, static_cast<int>(atomicAdd(params.ticket, 1u)));
    }
    __syncthreads();
    if (block.shared_item().tile == kNoItem) return;
    block.run();
  }
}

}  // namespace flashmoe::sm89_backward
