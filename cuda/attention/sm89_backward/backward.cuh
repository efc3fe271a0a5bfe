// Attention backward for Ada and newer, with mma.sync. With P = exp(S - lse) and S = scale Q K^T,
// its products are:
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K
//   dK = scale dS^T Q                                          delta = rowsum(dO * O) - dlse
//
// An item is a tile of keys of one KV head (tile.cuh). A block keeps its K and V in shared memory
// and runs over the query tiles of all query heads of the KV head. dK and dV stay in registers for
// the whole item, and are written as rows at its end. In each product warps divide rows and columns
// in their own way (traits.cuh), so P and dS pass through shared memory.
//
// A step adds its part of dQ in fp32 to a sum in global memory, after the parts of earlier items: a
// word per tile of dQ counts them. The first part is stored, so nothing has to be zeroed. The last
// part adds the sum in registers and writes rows of dQ. So the order of additions is fixed.
//
// Little latency of global memory is exposed. Copies of a step are issued one step ahead. Those of
// the next item are issued in the last step of this one, after a ticket taken at the beginning of
// that step. A block announces an added part in the middle of the next step.
//
// One step: S, P -> shared | dP, dS -> shared | barrier | dV, dK, dQ -> sum. With two buffers of P
// and dS a fast warp continues with the next step's S while others are at this step's dQ.
//
// If a row does not see a key, its P and dS are 0, but 0 * NaN is NaN. So non-finite gradients of a
// masked call are recomputed by plain arithmetic (masked_fallback.cuh). Missing rows and columns
// are zeros in shared memory.
//
// In ragged and padded batches (Traits::kRagged) an item knows the position of its sequence's rows
// (backward/ragged.cuh).
#pragma once

#include <type_traits>

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/sm89_backward/copies.cuh"
#include "cuda/attention/sm89_backward/pairs.cuh"
#include "cuda/attention/sm89_backward/params.h"
#include "cuda/attention/sm89_backward/product.cuh"
#include "cuda/attention/sm89_backward/traits.cuh"
#include "cuda/numeric/constants.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_backward {

using attention_backward::diagonal_of;
using attention_backward::end_key_of;
using attention_backward::first_key_of;
using attention_backward::kNoItem;
using attention_backward::Part;
using attention_backward::Parts;
using attention_backward::store_pair;
using attention_backward::Wanted;

template <class Traits>
struct Block {
  using Element = typename Traits::Element;
  using Item = typename Traits::Item;
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

  // Registers of sums that are live in all products, and of a step's scores.
  static constexpr int kHeldByItem =
      Traits::kKeyRows * (Traits::kKColumns + Traits::kVColumns) / 32;
  static constexpr int kHeldByScores = Traits::kScoreRows * Traits::kScoreColumns / 32;
  static constexpr int kHeldByDq = Traits::kQueryRows * Traits::kQColumns / 32;
  static constexpr int kHeldByPairs = Traits::kPairsAhead ? 24 : 0;  // and values made of them

  const typename Traits::Params& params;
  unsigned char* const shared;
  const Copies<Traits> copies;

  uint32_t items = 0;   // of the block, before the current one
  uint32_t number = 0;  // of the current step, among all of the block
  Step step = {0, 0};

  // Read at each use: kept across the main loop it would take registers.
  __device__ __forceinline__ volatile Item& item_at(uint32_t index) const {
    if constexpr (Traits::kPairsAhead) pin(index);  // nor may its address be kept
    return reinterpret_cast<volatile Item*>(shared + Traits::kItemOffset)[index % Traits::kItems];
  }
  __device__ __forceinline__ const volatile Item& item() const { return item_at(items); }
  __device__ __forceinline__ const volatile Item& next_item() const { return item_at(items + 1); }

  __device__ __forceinline__ int steps_of(const volatile Item& item) const {
    return item.tile == kNoItem ? 0 : (item.end - item.begin) * params.heads_per_kv;
  }
  __device__ __forceinline__ uint32_t p() const { return copies.p(number); }
  __device__ __forceinline__ uint32_t ds() const { return copies.ds(number); }

  // ---- P and dS -----------------------------------------------------------------------------

  // scores += A B^T, with rows of queries and rows of keys.
  template <class Layout, int kHeld>
  static __device__ __forceinline__ void multiply_rows(Scores& scores, uint32_t queries,
                                                       uint32_t keys) {
    const uint32_t a_lane = a_rows<Layout>(queries, score_row<Traits>());
    const uint32_t b_lane = b_rows<Layout>(keys, score_column<Traits>());
    multiply<Element, Layout::kDim / 16, kHeld>(
        scores,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4(a, Layout::fragment(a_lane, 16 * atom, slice));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4(b, Layout::fragment(b_lane, 16 * pair, slice));
        });
  }

  // Masks the keys that a query does not see.
  __device__ __forceinline__ void mask(Scores& scores) const {
    const int first_key = item().tile * Traits::kTileK + score_column<Traits>();
    const int first_query = step.tile_q * Traits::kTileQ + score_row<Traits>();
    const int length_k = length_k_of(params, item());
    const int lane = lane_index();
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first_query + 16 * a + lane / 4 + 8 * half;
        const KeyRange keys = params.score.keys(query + diagonal_of(item()), length_k);
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

  // Whether some query of the step does not see all keys of the item.
  __device__ __forceinline__ bool is_masked() const {
    const int first_key = item().tile * Traits::kTileK;
    const int first_row = step.tile_q * Traits::kTileQ;
    const int last_row = min(first_row + Traits::kTileQ, length_q_of(params, item())) - 1;
    return first_key_of(params, item(), last_row) > first_key ||
           end_key_of(params, item(), first_row) < first_key + Traits::kTileK;
  }

  // Addresses of this lane's pairs in a tile of scores: pair_at(first_pair, a, half, n). The pairs
  // of a row lie in consecutive chunks in swizzled order. The order repeats every eight rows, so an
  // address is one exclusive or with a constant.
  static __device__ __forceinline__ uint32_t first_pair(uint32_t tile) {
    const int lane = lane_index();
    return tile +
           ScoreLayout::chunk_offset(score_row<Traits>() + lane / 4,
                                     score_column<Traits>() / kElementsPerChunk) +
           4 * (lane % 4);
  }
  static __device__ __forceinline__ uint32_t pair_at(uint32_t first, int a, int half, int n) {
    constexpr int kSwizzled = ScoreLayout::kSwizzleChunks;
    return (first ^ static_cast<uint32_t>(n % kSwizzled * kBytesPerChunk)) +
           static_cast<uint32_t>(n / kSwizzled * kSwizzled * kBytesPerChunk +
                                 (16 * a + 8 * half) * ScoreLayout::kRowBytes);
  }

  // Writes P = exp2(S scale_log2 - lse) to shared memory. Replaces the scores by the factor of dP -
  // delta: P, and with a softcap, whose scores are tanh, P (1 - scores^2).
  template <bool kCapped>
  __device__ __forceinline__ void exponentiate(Scores& scores) const {
    const float scale_log2 = params.score.scale_log2;
    const uint32_t lse = copies.lse(number) + 4 * (score_row<Traits>() + lane_index() / 4);
    const uint32_t first = first_pair(p());
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_lse = ptx::load_shared_float(lse + 4 * (16 * a + 8 * half));
#pragma unroll
        for (int n = 0; n < Traits::kScoreColumns / 8; ++n) {
          float p[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[a][n][2 * half + e];
            p[e] = numeric::exp2_approx(fmaf(score, scale_log2, -row_lse));
            // A hidden score is no tanh.
            score = !kCapped ? p[e] : p[e] == 0.0f ? 0.0f : p[e] * fmaf(-score, score, 1.0f);
          }
          ptx::store_shared(pair_at(first, a, half, n), Numeric::pack(p[0], p[1]));
        }
      }
    }
  }

  // The same with a bias or a mask; `given` has the numbers. If a bias hides a key whose score is
  // NaN or infinite, 0 times it is NaN: the fallback repairs that.
  template <bool kCapped, class Given>
  __device__ __forceinline__ void bias_and_exponentiate(Scores& scores, const Given& given,
                                                        bool bounded) const {
    using Bias16 = typename Pairs<Traits>::Bias16;
    using Bias32 = typename Pairs<Traits>::Bias32;
    constexpr int kRows = Pairs<Traits>::kRows;
    constexpr int kCount = Pairs<Traits>::kCount;
    constexpr uint32_t kAllKeys = static_cast<uint32_t>((uint64_t{1} << kCount) - 1);
    // Rows whose P is stored at a time. Numbers in the area of P are read before that: masks, and
    // for an fp32 bias those of the last half of the rows, which come first.
    constexpr int kTogether = Traits::kPairsAhead ? kRows / 2 : 1;
    const ScorePairs& pairs = params.pairs;
    const float factor = pairs.factor;
    const float scale_log2 = params.score.scale_log2;
    const uint32_t lse = copies.lse(number) + 4 * Pairs<Traits>::first_row();
    const uint32_t first = first_pair(p());
    uint32_t visible[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      visible[r] = kAllKeys;
      if (bounded) {
        const int query = step.tile_q * Traits::kTileQ + Pairs<Traits>::first_row() + 8 * r;
        visible[r] = Pairs<Traits>::Keys::template visible<kCount>(
            Pairs<Traits>::first_key(item()),
            params.score.keys(query + diagonal_of(item()), length_k_of(params, item())));
      }
      if (pairs.mask.data != nullptr) {
        visible[r] &= Pairs<Traits>::visible(given, r, params);
      }
    }
#pragma unroll
    for (int group = 0; group < kRows / kTogether; ++group) {
      const int begin = kRows - (group + 1) * kTogether;
      uint32_t packed[kTogether][kCount / 2];
#pragma unroll
      for (int r = begin; r < begin + kTogether; ++r) {
        float logits[kCount];
        const auto score_at = [&](int i) -> float& {
          return scores[r / 2][i / 2][r % 2 * 2 + i % 2];
        };
        if (pairs.bias.data == nullptr) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) logits[i] = score_at(i) * factor;
        } else if (pairs.bias_is_fp32 != 0) {
          typename Bias32::Row words;
          Pairs<Traits>::bias32(words, given, r);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            logits[i] = fmaf(score_at(i), factor, Bias32::bias(words, i));
          }
        } else {
          typename Bias16::Row words;
          Pairs<Traits>::bias16(words, given, r);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            logits[i] = fmaf(score_at(i), factor, Bias16::bias(words, i));
          }
        }
        const float row_lse = ptx::load_shared_float(lse + 4 * (8 * r));
        float p[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          p[i] = numeric::exp2_approx((logits[i] - row_lse) * scale_log2);
        }
        if (visible[r] != kAllKeys) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) p[i] = (visible[r] >> i & 1) != 0 ? p[i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          float& score = score_at(i);
          score = !kCapped ? p[i] : p[i] == 0.0f ? 0.0f : p[i] * fmaf(-score, score, 1.0f);
        }
#pragma unroll
        for (int n = 0; n < kCount / 2; ++n) {
          packed[r - begin][n] = Numeric::pack(p[2 * n], p[2 * n + 1]);
        }
      }
      if (Traits::kPairsAhead) __syncwarp();
#pragma unroll
      for (int r = begin; r < begin + kTogether; ++r) {
#pragma unroll
        for (int n = 0; n < kCount / 2; ++n) {
          ptx::store_shared(pair_at(first, r / 2, r % 2, n), packed[r - begin][n]);
        }
      }
    }
  }

  // Initialises dP with -delta of its rows.
  __device__ __forceinline__ void begin_dp(Scores& dp) const {
    const uint32_t first = copies.delta(number) + 4 * (score_row<Traits>() + lane_index() / 4);
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_delta = -ptx::load_shared_float(first + 4 * (16 * a + 8 * half));
#pragma unroll
        for (int n = 0; n < Traits::kScoreColumns / 8; ++n) {
          dp[a][n][2 * half] = dp[a][n][2 * half + 1] = row_delta;
        }
      }
    }
  }

  // Writes dS = factors (dP - delta) to shared memory.
  __device__ __forceinline__ void store_ds(const Scores& factors, const Scores& dp) const {
    const uint32_t first = first_pair(ds());
#pragma unroll
    for (int a = 0; a < Traits::kScoreRows / 16; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < Traits::kScoreColumns / 8; ++n) {
          ptx::store_shared(pair_at(first, a, half, n),
                            Numeric::pack(factors[a][n][2 * half] * dp[a][n][2 * half],
                                          factors[a][n][2 * half + 1] * dp[a][n][2 * half + 1]));
        }
      }
    }
  }

  struct NoPairs {};
  template <class Of, bool kGiven = Of::kBiased>
  struct GivenPairsOf {
    using Type = NoPairs;
  };
  template <class Of>
  struct GivenPairsOf<Of, true> {
    using Type = std::conditional_t<Of::kPairsAhead, typename Pairs<Of>::Tiles,
                                    typename Pairs<Of>::InRegisters>;
  };
  using GivenPairs = typename GivenPairsOf<Traits>::Type;

  // Computes P and dS of a step.
  template <class Begins>
  __device__ __forceinline__ void make_scores(const Begins& begins) const {
    Scores scores;
    clear(scores);
    const bool masked = is_masked();
    GivenPairs pairs;
    if constexpr (Traits::kPairsAhead) {
      pairs = {ds(), p()};
    } else if constexpr (Traits::kBiased) {
      Pairs<Traits>::load(pairs, params, item(), step);
    }
    copies.wait_for_q(number);
    if (begins()) wait_for(copies.k_full(), items % 2);
    multiply_rows<QLayout, kHeldByItem + kHeldByScores>(scores, copies.q(number), copies.k());
    const bool capped = params.score.capped();
    if (capped) params.score.cap(scores);
    if (!Traits::kBiased && masked) mask(scores);
    if (Traits::kBuffers == 1) __syncthreads();  // those of the previous step have been read
    if constexpr (Traits::kBiased) {
      capped ? bias_and_exponentiate<true>(scores, pairs, masked)
             : bias_and_exponentiate<false>(scores, pairs, masked);
    } else if (capped) {
      exponentiate<true>(scores);
    } else {
      exponentiate<false>(scores);
    }
    copies.wait_for_dout(number);
    if (begins()) wait_for(copies.v_full(), items % 2);
    if (params.dq_rows.rows == nullptr && params.dk_rows.rows == nullptr) return;
    Scores dp;
    begin_dp(dp);
    multiply_rows<DoutLayout, kHeldByItem + 2 * kHeldByScores + kHeldByPairs>(
        dp, copies.dout(number), copies.v());
    store_ds(scores, dp);
  }

  // ---- dV, dK and dQ ------------------------------------------------------------------------

  // sums += A^T B. A holds [kTileQ, kTileK] scores, B has kTileQ rows.
  template <class Layout, int kColumns, int kAtoms, int kTiles>
  static __device__ __forceinline__ void multiply_keys(float (&sums)[kAtoms][kTiles][4],
                                                       uint32_t scores, uint32_t rows) {
    const int warp = warp_index();
    const uint32_t a_lane =
        a_columns<ScoreLayout>(scores, warp / Traits::kKeys.columns * Traits::kKeyRows);
    const uint32_t b_lane = b_columns<Layout>(rows, warp % Traits::kKeys.columns * kColumns);
    multiply<Element, Traits::kTileQ / 16, kHeldByItem>(
        sums,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4_trans(a, ScoreLayout::fragment(a_lane, 16 * slice, atom));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4_trans(b, Layout::fragment(b_lane, 16 * slice, pair));
        });
  }

  static __device__ __forceinline__ int query_row() {
    return warp_index() / Traits::kQueries.columns * Traits::kQueryRows;
  }
  static __device__ __forceinline__ int query_column() {
    return warp_index() % Traits::kQueries.columns * Traits::kQColumns;
  }

  __device__ __forceinline__ void make_dq(QuerySums& dq) const {
    clear(dq);
    const uint32_t a_lane = a_rows<ScoreLayout>(ds(), query_row());
    const uint32_t b_lane = b_columns<KLayout>(copies.k(), query_column());
    multiply<Element, Traits::kTileK / 16, kHeldByItem + kHeldByDq>(
        dq,
        [&](uint32_t (&a)[4], int atom, int slice) {
          ptx::ldmatrix_x4(a, ScoreLayout::fragment(a_lane, 16 * atom, slice));
        },
        [&](uint32_t (&b)[4], int pair, int slice) {
          ptx::ldmatrix_x4_trans(b, KLayout::fragment(b_lane, 16 * slice, pair));
        });
  }

  // This thread's place in the sums of a tile of dQ, for its i-th fragment. Elements of a fragment
  // are kSumStride apart, so that a warp's additions are contiguous.
  static constexpr int kSumStride = ptx::kAddsVectors ? 1 : Traits::kThreads;
  __device__ __forceinline__ float* sum_of(int64_t place, int i) const {
    return params.dq_sums + place * (Traits::kTileQ * Traits::kDim) + i * Traits::kThreads * 4 +
           thread_index() * (ptx::kAddsVectors ? 4 : 1);
  }

  // A step's part of dQ: its tile, and how many parts come before it.
  struct Turn {
    int place;
    uint32_t before;
    bool last;
  };
  __device__ __forceinline__ Turn turn_of_step() const {
    const volatile Item& item = this->item();
    const Parts parts = Parts::of<Traits>(params, item, step.tile_q);
    const int before = parts.before<Traits>(item);
    return {step.place(params, item), static_cast<uint32_t>(before),
            before == parts.last - parts.first};
  }
  // This is an acquiring load. A fence after a plain load would also wait for this block's pending
  // additions and copies.
  __device__ __forceinline__ void wait_for_turn(const Turn& turn) const {
    ptx::wait_for_word(params.turns + turn.place, turn.before);
    __syncwarp();
  }
  // Announces that the part of dQ of a step of this item is in the sum. All threads of the block
  // have added theirs before a barrier that this thread has passed.
  __device__ __forceinline__ void release_turn(const Step& step) const {
    if (thread_index() != 0 || params.dq_rows.rows == nullptr) return;
    const volatile Item& item = this->item();
    const Parts parts = Parts::of<Traits>(params, item, step.tile_q);
    const int before = parts.before<Traits>(item);
    if (before == parts.last - parts.first) return;
    ptx::store_release(params.turns + step.place(params, item), static_cast<uint32_t>(before) + 1);
  }

  // Adds a step's part of dQ to the sum, or writes rows of dQ if it is the last part.
  __device__ __forceinline__ void hand_over(QuerySums& dq) const {
    constexpr int kTiles = Traits::kQColumns / 8;
    const Turn turn = turn_of_step();
    const bool first = turn.before == 0;
    if (!first) wait_for_turn(turn);
    // Ragged batches have sums only for tiles that need one.
    int place = turn.place;
    if constexpr (Traits::kRagged) {
      place -= step.head(params, item()) * (params.tiles_q - params.sum_tiles);
    }
    const auto each = [&](const auto& take) {
#pragma unroll
      for (int i = 0; i < Traits::kQueryRows / 16 * kTiles; ++i) {
        take(sum_of(place, i), dq[i / kTiles][i % kTiles]);
      }
    };
    if (!turn.last) {
      if (first) {
        each([](float* sum, float (&part)[4]) { ptx::store_global<kSumStride>(sum, part); });
      } else {
        each([](float* sum, float (&part)[4]) { ptx::add_global<kSumStride>(sum, part); });
      }
      return;
    }
    if (!first) {
      each([](float* sum, float (&part)[4]) {
        float added[4];
        ptx::load_from_l2<kSumStride>(added, sum);
#pragma unroll
        for (int e = 0; e < 4; ++e) part[e] += added[e];
      });
    }
    write_dq(dq);
  }

  // ---- results ------------------------------------------------------------------------------

  // Whether a warp's part of a gradient may be written. Unmasked calls have no 0 * NaN.
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

  // Rows of a head and columns of a gradient of this item.
  __device__ __forceinline__ auto part_of(int head, int first_row, int end_row, int first_column,
                                          int end_column) const {
    if constexpr (Traits::kRagged) {
      return attention_backward::RaggedPart{
          attention_backward::copy_of(item()), head, first_row, end_row, first_column, end_column};
    } else {
      return Part{item().batch, head, first_row, end_row, first_column, end_column};
    }
  }

  // Writes a warp's part of a gradient times `scale`. Its row 0 is row `begin` of the tensor.
  template <class Order, int kAtoms, int kTiles, class AnyPart>
  __device__ __forceinline__ void write(const Gradient& to, const AnyPart& part, int batch,
                                        int begin, float scale,
                                        const float (&values)[kAtoms][kTiles][4]) const {
    const int lane = lane_index();
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = part.first_row + Order::row_of(16 * a + lane / 4 + 8 * half);
        if (row >= part.end_row) continue;
        const int64_t row_at =
            batch * to.strides.batch + part.head * to.strides.head + (begin + row) * to.strides.seq;
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

  __device__ __forceinline__ void write_dq(const QuerySums& dq) const {
    const int first_row = step.tile_q * Traits::kTileQ + query_row();
    const auto part = part_of(step.head(params, item()), first_row,
                              min(first_row + Traits::kQueryRows, length_q_of(params, item())),
                              query_column(), min(query_column() + Traits::kQColumns, params.dim));
    if (is_clean(dq)) {
      write<InOrder>(params.dq_rows, part, batch_q_of(part), begin_q_of(part), params.scale, dq);
    } else {
      attention_backward::masked_fallback<Traits, Wanted::kDq>(params, part);
    }
  }

  template <Wanted kWanted, int kAtoms, int kTiles>
  __device__ __forceinline__ void write_keys(const Gradient& to, float scale, int columns,
                                             const float (&values)[kAtoms][kTiles][4]) const {
    if (to.rows == nullptr) return;
    const int warp = warp_index();
    const volatile Item& item = this->item();
    const int first_row =
        item.tile * Traits::kTileK + warp / Traits::kKeys.columns * Traits::kKeyRows;
    const int first_column = warp % Traits::kKeys.columns * (8 * kTiles);
    const auto part = part_of(item.head_kv, first_row,
                              min(first_row + Traits::kKeyRows, length_k_of(params, item)),
                              first_column, min(first_column + 8 * kTiles, columns));
    if (is_clean(values)) {
      write<typename Traits::KeyOrder>(to, part, batch_k_of(part), begin_k_of(part), scale, values);
    } else {
      attention_backward::masked_fallback<Traits, kWanted>(params, part);
    }
  }

  // ---- steps and items ----------------------------------------------------------------------

  __device__ __forceinline__ void keep(int ticket) const {
    volatile Item& to = item_at(items + 1);
    if constexpr (Traits::kRagged) {
      attention_backward::copy_item(params, ticket, to);
    } else {
      const Item taken = Item::template at<Traits>(params, ticket);
      to.batch = taken.batch;
      to.head_kv = taken.head_kv;
      to.tile = taken.tile;
      to.begin = taken.begin;
      to.end = taken.end;
      to.course = taken.course;
    }
  }
  __device__ __forceinline__ int take_ticket() const {
    return static_cast<int>(atomicAdd(params.ticket, 1u));
  }

  // Runs one step; `left` more steps of the item follow.
  __device__ __forceinline__ void run_step(int left, bool is_first, KeySums& dk,
                                           ValueSums& dv) const {
    const auto begins = [&] {
      // Computed anew in kernels that are short of registers.
      if constexpr (Traits::kPairsAhead) {
        return left + 1 == steps_of(item());
      } else {
        return is_first;
      }
    };
    // With an earlier ticket, the next item would keep other blocks waiting for its parts of dQ.
    int ticket = 0;
    if (left == 0 && thread_index() == 0) ticket = take_ticket();
    make_scores(begins);
    if (left == 0 && thread_index() == 0) keep(ticket);
    __syncthreads();  // P and dS are ready; those of the step before have been read and added
    if (!begins()) release_turn(previous());
    const volatile Item& item_of_next = left > 0 ? item() : next_item();
    const bool copies_more = left > 0 || steps_of(item_of_next) > 0;
    if (copies_more) {
      const Step next = left > 0 ? step.next(params, item_of_next) : Step::first_of(item_of_next);
      copies.copy_q(item_of_next, next, number + 1);
      if (Traits::kDoutStages == 2) copies.copy_dout(item_of_next, next, number + 1);
      if (left == 0) copies.copy_v(item_of_next);
    }
    if (params.dv_rows.rows != nullptr) {
      multiply_keys<DoutLayout, Traits::kVColumns>(dv, p(), copies.dout(number));
    }
    if (Traits::kDoutStages == 1) {
      __syncthreads();  // dO has been read
      if (copies_more) {
        const Step next = left > 0 ? step.next(params, item_of_next) : Step::first_of(item_of_next);
        copies.copy_dout(item_of_next, next, number + 1);
      }
    }
    if (params.dk_rows.rows != nullptr) {
      multiply_keys<QLayout, Traits::kKColumns>(dk, ds(), copies.q(number));
    }
    if (params.dq_rows.rows == nullptr) return;
    QuerySums dq;
    make_dq(dq);
    hand_over(dq);
  }
  // The previous step of the item.
  __device__ __forceinline__ Step previous() const {
    if (step.head_of_group > 0) return {step.tile_q, step.head_of_group - 1};
    return {step.tile_q + (attention_backward::runs_down<false>(item()) ? 1 : -1),
            params.heads_per_kv - 1};
  }

  // Takes the first ticket, and one after an item without steps, which copies nothing ahead.
  __device__ __forceinline__ void take_item() const {
    if (thread_index() == 0) keep(take_ticket());
    __syncthreads();
    if (steps_of(next_item()) == 0) return;
    const Step first = Step::first_of(next_item());
    copies.copy_q(next_item(), first, number);
    copies.copy_k(next_item());
    copies.copy_dout(next_item(), first, number);
    copies.copy_v(next_item());
  }

  __device__ __forceinline__ void run() {
    KeySums dk;
    ValueSums dv;
    --items;
    take_item();
#pragma unroll 1
    for (;;) {
      ++items;
      if (item().tile == kNoItem) return;
      clear(dk);
      clear(dv);
      int left = steps_of(item());
      if (left == 0) {
        copies.skip_keys();
        take_item();
      } else {
        step = Step::first_of(item());
        bool begins = true;
#pragma unroll 1
        for (;;) {
          --left;
          run_step(left, begins, dk, dv);
          ++number;
          begins = false;
          if (left == 0) break;
          step = step.next(params, item());
        }
        __syncthreads();  // K has been read, and all parts of dQ have been added
        release_turn(step);
        if (steps_of(next_item()) > 0) copies.copy_k(next_item());
      }
      write_keys<Wanted::kDv>(params.dv_rows, 1.0f, params.dim_v, dv);
      write_keys<Wanted::kDk>(params.dk_rows, params.scale, params.dim, dk);
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_backward_kernel(const __grid_constant__ typename Traits::Params params) {
  extern __shared__ __align__(1024) unsigned char shared[];
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const Copies<Traits> copies = {params, static_cast<uint32_t>(__cvta_generic_to_shared(shared))};
  if (thread_index() == 0) copies.init_barriers();
  Block<Traits>{params, shared, copies}.run();
}

}  // namespace flashmoe::sm89_backward
