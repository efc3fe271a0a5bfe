// A lane's numbers of a bias and a mask for its part of a step's scores, for its rows 2a + half.
//
// If a block has two buffers of P and dS (Traits::kPairsAhead), cp.async copies the numbers one
// step ahead, together with Q. They go to the area of the step's dS and, what does not fit there,
// to that of its P: the warp's own part of either, which its lanes read before any of them writes.
// Otherwise the numbers are loaded to registers before Q K^T.
#pragma once

#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/sm89_backward/params.h"
#include "cuda/attention/sm89_backward/traits.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/words.cuh"
#include "cuda/tile/pair_words.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_backward {

using attention_backward::batch_k_of;
using attention_backward::batch_q_of;
using attention_backward::begin_k_of;
using attention_backward::begin_q_of;
using attention_backward::length_k_of;
using attention_backward::length_q_of;
using reread::lane_index;
using reread::thread_index;

// Does not shuffle: the compiler need not know that values are uniform.
__device__ __forceinline__ int warp_index() { return thread_index() / kThreadsPerWarp; }

// A warp's part of the scores of a step.
template <class Traits>
__device__ __forceinline__ int score_row() {
  return warp_index() / Traits::kScores.columns * Traits::kScoreRows;
}
template <class Traits>
__device__ __forceinline__ int score_column() {
  return warp_index() % Traits::kScores.columns * Traits::kScoreColumns;
}

template <class Traits>
struct Pairs {
  static constexpr int kRows = Traits::kScoreRows / 8;
  static constexpr int kCount = Traits::kScoreColumns / 4;  // per row
  using Element = typename Traits::Element;
  using Keys = typename Traits::KeyOrder;
  using Mask = PairWords<Element, Keys, 1, kCount>;
  using Bias16 = PairWords<Element, Keys, 2, kCount>;
  using Bias32 = PairWords<Element, Keys, 4, kCount>;
  using Params = typename Traits::Params;

  static __device__ __forceinline__ int first_row() {
    return score_row<Traits>() + lane_index() / 4;
  }
  template <class AnyItem>
  static __device__ __forceinline__ int first_key(const AnyItem& item) {
    return item.tile * Traits::kTileK + score_column<Traits>() + Keys::first_of_lane(lane_index());
  }

  // ---- in the tensors -----------------------------------------------------------------------

  // Keys of a sequence that k_begin skips. They have numbers, too.
  template <class AnyItem>
  static __device__ __forceinline__ int skipped_of(const AnyItem& item) {
    if constexpr (Traits::kRagged) {
      return item.skipped;
    } else {
      return 0;
    }
  }
  // Whether numbers of the item can be copied in runs.
  template <class Words, class AnyItem>
  static __device__ __forceinline__ bool can_copy(const Params& params, const PairNumbers& numbers,
                                                  const AnyItem& item) {
    const int skipped = skipped_of(item);
    const int end = skipped + (item.tile + 1) * Traits::kTileK;
    if constexpr (Traits::kRagged) {
      return Words::can_copy(numbers) && skipped * Words::kBytes % Words::kCopyBytes == 0 &&
             end <= params.sequences.pair_keys;
    } else {
      return Words::can_copy(numbers) && end <= params.seq_k;
    }
  }
  // take(r, key 0 of row r) for some of this lane's rows. Missing rows have the numbers of the last
  // one, and are infinitely far below their lse.
  template <class Words, class AnyItem, class Step, class Take>
  static __device__ __forceinline__ void for_rows(int first, int end, const Params& params,
                                                  const PairNumbers& numbers, const AnyItem& item,
                                                  const Step& step, const Take& take) {
    const char* const head = static_cast<const char*>(numbers.data) +
                             (numbers.offset_of(batch_q_of(item), step.head(params, item), 0) +
                              skipped_of(item) * numbers.key_stride) *
                                 Words::kBytes;
    const int first_query = step.tile_q * Traits::kTileQ + first_row();
    const int last_query = length_q_of(params, item) - 1;
    // Values derived from it must not be kept across steps.
    int64_t query_stride = numbers.query_stride;
    asm volatile("" : "+l"(query_stride));
#pragma unroll
    for (int r = first; r < end; ++r) {
      const int query = min(first_query + 8 * r, last_query);
      take(r, head + query * query_stride * Words::kBytes);
    }
  }

  // ---- in registers -------------------------------------------------------------------------

  struct InRegisters {
    typename Bias32::Row bias[kRows];  // or 16-bit words, as many of bias and mask
    typename Mask::Row mask[kRows];
  };
  template <class Words, class Rows, class AnyItem, class Step>
  static __device__ __forceinline__ void load(Rows& rows, const Params& params,
                                              const PairNumbers& numbers, const AnyItem& item,
                                              const Step& step) {
    const bool all = can_copy<Words>(params, numbers, item);
    for_rows<Words>(0, kRows, params, numbers, item, step, [&](int r, const char* row) {
      typename Words::Row words;
      Words::load(words, numbers, row, first_key(item), length_k_of(params, item), all);
#pragma unroll
      for (int w = 0; w < Words::kWords; ++w) rows[r][w] = words[w];
    });
  }
  template <class AnyItem, class Step>
  static __device__ __forceinline__ void load(InRegisters& to, const Params& params,
                                              const AnyItem& item, const Step& step) {
    const ScorePairs& pairs = params.pairs;
    if (pairs.bias.data != nullptr) {
      if (pairs.bias_is_fp32 != 0) {
        load<Bias32>(to.bias, params, pairs.bias, item, step);
      } else {
        load<Bias16>(to.bias, params, pairs.bias, item, step);
      }
    }
    if (pairs.mask.data != nullptr) load<Mask>(to.mask, params, pairs.mask, item, step);
  }

  // ---- in shared memory ---------------------------------------------------------------------

  // Address of this lane's copy c of a row, the r-th that a tile of scores holds. The copies of a
  // warp's lanes are contiguous, in chunks of the warp's own part.
  template <class Words>
  static __device__ __forceinline__ uint32_t place_of(uint32_t tile, int r, int c) {
    using Layout = typename Traits::ScoreLayout;
    constexpr int kChunks = Traits::kScoreColumns / kElementsPerChunk;  // per row of the part
    constexpr int kRowsOfCopy = kThreadsPerWarp * Words::kCopyBytes / kBytesPerChunk / kChunks;
    static_assert(kRowsOfCopy >= 1 && kRowsOfCopy <= 8 && Layout::kSwizzleChunks == 8);
    const int lane = lane_index();
    const int chunk = lane * Words::kCopyBytes / kBytesPerChunk;
    int row = chunk / kChunks;
    // If rows were half a swizzle group long, neighbouring rows would share banks.
    if (kRowsOfCopy == 8) row = row / 2 + row % 2 * 4;
    const uint32_t first =
        tile +
        Layout::chunk_offset(score_row<Traits>() + row,
                             score_column<Traits>() / kElementsPerChunk + chunk % kChunks) +
        static_cast<uint32_t>(lane * Words::kCopyBytes % kBytesPerChunk);
    const int rows_before = (r * Words::kCopies + c) * kRowsOfCopy;
    return (first ^ static_cast<uint32_t>(rows_before % 8 * kBytesPerChunk)) +
           static_cast<uint32_t>(rows_before * Layout::kRowBytes);
  }
  static_assert(!Traits::kPairsAhead || kRows % 2 == 0);

  // Copies rows from `first` to before `end` of a tensor to a tile of scores.
  template <class Words, class AnyItem, class Step>
  static __device__ __forceinline__ void copy_rows(int first, int end, uint32_t tile,
                                                   const Params& params, const PairNumbers& numbers,
                                                   const AnyItem& item, const Step& step) {
    const int key = first_key(item);
    if (can_copy<Words>(params, numbers, item)) {
      for_rows<Words>(first, end, params, numbers, item, step, [&](int r, const char* row) {
        const char* const from = row + static_cast<int64_t>(key) * Words::kBytes;
#pragma unroll
        for (int c = 0; c < Words::kCopies; ++c) {
          ptx::cp_async_cached<Words::kCopyBytes>(
              place_of<Words>(tile, r - first, c),
              from + Keys::key_of(c * Words::kCopyWords * Words::kPerWord) * Words::kBytes);
        }
      });
    } else {
#pragma unroll 1
      for (int r = first; r < end; ++r) {
        for_rows<Words>(r, r + 1, params, numbers, item, step, [&](int, const char* row) {
          typename Words::Row words;
          Words::load_each(words, numbers, row, key, length_k_of(params, item));
#pragma unroll
          for (int w = 0; w < Words::kWords; ++w) {
            ptx::store_shared(
                place_of<Words>(tile, r - first, w / Words::kCopyWords) + w % Words::kCopyWords * 4,
                words[w]);
          }
        });
      }
    }
  }
  // There is no room for a mask beside an fp32 bias: the family has other kernels for these.
  template <class AnyItem, class Step>
  static __device__ __forceinline__ void copy(uint32_t ds_tile, uint32_t p_tile,
                                              const Params& params, const AnyItem& item,
                                              const Step& step) {
    const ScorePairs& pairs = params.pairs;
    if (pairs.bias.data == nullptr) {
      copy_rows<Mask>(0, kRows, ds_tile, params, pairs.mask, item, step);
    } else if (pairs.bias_is_fp32 == 0) {
      copy_rows<Bias16>(0, kRows, ds_tile, params, pairs.bias, item, step);
      if (pairs.mask.data != nullptr) {
        copy_rows<Mask>(0, kRows, p_tile, params, pairs.mask, item, step);
      }
    } else {
      copy_rows<Bias32>(0, kRows / 2, ds_tile, params, pairs.bias, item, step);
      copy_rows<Bias32>(kRows / 2, kRows, p_tile, params, pairs.bias, item, step);
    }
  }

  struct Tiles {
    uint32_t ds;
    uint32_t p;
  };
  template <class Words>
  static __device__ __forceinline__ void read_row(typename Words::Row& words, uint32_t tile,
                                                  int r) {
#pragma unroll
    for (int c = 0; c < Words::kCopies; ++c) {
      uint32_t* const to = &words[c * Words::kCopyWords];
      const uint32_t place = place_of<Words>(tile, r, c);
      if constexpr (Words::kCopyWords == 4) {
        const float4 copy = ptx::load_shared_float4(place);
        to[0] = __float_as_uint(copy.x);
        to[1] = __float_as_uint(copy.y);
        to[2] = __float_as_uint(copy.z);
        to[3] = __float_as_uint(copy.w);
      } else {
        static_assert(Words::kCopyWords == 2);
        const float2 copy = ptx::load_shared_float2(place);
        to[0] = __float_as_uint(copy.x);
        to[1] = __float_as_uint(copy.y);
      }
    }
  }

  // ---- either -------------------------------------------------------------------------------

  // read(words, r) of each tensor.
  static __device__ __forceinline__ void bias16(typename Bias16::Row& words,
                                                const InRegisters& from, int r) {
#pragma unroll
    for (int w = 0; w < Bias16::kWords; ++w) words[w] = from.bias[r][w];
  }
  static __device__ __forceinline__ void bias16(typename Bias16::Row& words, const Tiles& from,
                                                int r) {
    read_row<Bias16>(words, from.ds, r);
  }
  static __device__ __forceinline__ void bias32(typename Bias32::Row& words,
                                                const InRegisters& from, int r) {
#pragma unroll
    for (int w = 0; w < Bias32::kWords; ++w) words[w] = from.bias[r][w];
  }
  static __device__ __forceinline__ void bias32(typename Bias32::Row& words, const Tiles& from,
                                                int r) {
    read_row<Bias32>(words, r < kRows / 2 ? from.ds : from.p, r % (kRows / 2));
  }
  static __device__ __forceinline__ uint32_t visible(const InRegisters& from, int r,
                                                     const Params& /*params*/) {
    return Mask::visible(from.mask[r]);
  }
  static __device__ __forceinline__ uint32_t visible(const Tiles& from, int r,
                                                     const Params& params) {
    typename Mask::Row words;
    read_row<Mask>(words, params.pairs.bias.data == nullptr ? from.ds : from.p, r);
    return Mask::visible(words);
  }
};

}  // namespace flashmoe::sm89_backward
