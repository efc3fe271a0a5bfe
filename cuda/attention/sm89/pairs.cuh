// Biases and masks of a step of the sm_89 attention kernels. They are copied ahead, so that
// products hide their latency, and applied after Q K^T.
#pragma once

#include "cuda/attention/sm89/common.cuh"
#include "cuda/tile/pair_words.cuh"

namespace flashmoe::sm89 {

// A lane's numbers of a step, in the warp's area, for one of its rows 2a + half after another: all
// numbers of a mask or of a 16-bit bias, or those of the first half of the rows of an fp32 bias.
template <class Traits>
class StepPairs {
 public:
  __device__ __forceinline__ StepPairs(const ParamsOf<Traits>& params,
                                       const TileSteps<Traits>& steps, unsigned char* shared,
                                       int step)
      : params_(params), steps_(steps), shared_(shared), step_(step) {}

  // Copies them by cp.async if possible; otherwise `load` loads them one by one. Other numbers, of
  // other lanes, may lie there, but they have been read.
  __device__ __forceinline__ void copy() const {
    __syncwarp();
    with_first([&](auto rows) { rows.copy(*this); });
  }
  __device__ __forceinline__ void load() const {
    with_first([&](auto rows) { rows.load(*this); });
  }

  // Turns the scores into logits, and masks the keys that a row does not see by its bounds, its
  // mask or its bias. Sets bit 2a + half of `seen` if this lane's part of the row has a visible
  // key. Returns false, warp-uniformly, if all keys are known to be hidden; scores are then
  // unchanged. If a bias hides a key whose score is NaN or infinite, the row becomes NaN and goes
  // to the fallback.
  __device__ __forceinline__ bool apply(Scores<Traits>& scores, uint32_t& seen) const {
    const bool misses = misses_pages();
    const bool bounded = misses || step_ < steps_.left_steps || step_ >= steps_.right_steps;
    const bool masked = params_.pairs.mask.data != nullptr;
    const bool looks = seen != kAllRows;  // some rows have seen no key yet
    uint32_t visible[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      visible[r] = bounded
                       ? Keys::template visible<kCount>(
                             first_key_of_lane(), sequence().keys(params_.score, query_of_row(r)))
                       : kAllKeys;
    }
    if (misses) {
      const uint32_t there = keys_of_pages();
#pragma unroll
      for (int r = 0; r < kRows; ++r) visible[r] &= there;
    }
    if (params_.pairs.bias.data != nullptr) {
      if (params_.pairs.bias_is_fp32 == 0) {
        add<Bias16, 0, kRows>(scores, looks, visible);
      } else {
        add<Bias32, 0, kRows / 2>(scores, looks, visible);
        fetch(Rows<Bias32, kRows / 2, kRows / 2>{params_.pairs.bias});
        add<Bias32, kRows / 2, kRows / 2>(scores, looks, visible);
      }
      if (masked) fetch(Rows<Mask, 0, kRows>{params_.pairs.mask});
    }
    if (masked) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        typename Mask::Row words;
        Mask::read(words, place(), lane_index(), r);
        visible[r] &= Mask::visible(words);
      }
    }
    if (looks) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) seen |= visible[r] != 0 ? 1u << r : 0;
    }
    return bounded || masked ? hide(scores, visible) : true;
  }

 private:
  static constexpr int kRows = 2 * Traits::kRowAtoms;
  static constexpr uint32_t kAllRows = (1u << kRows) - 1;
  static constexpr int kCount = Traits::kStepKeys / 4;  // per row
  static constexpr uint32_t kAllKeys = (1u << kCount) - 1;
  using Keys = typename Traits::KeyOrder;
  using Element = typename Traits::Element;
  using Mask = PairWords<Element, Keys, 1, kCount>;
  using Bias16 = PairWords<Element, Keys, 2, kCount>;
  using Bias32 = PairWords<Element, Keys, 4, kCount>;
  static_assert(kRows * kCount * 2 * kThreadsPerWarp == Traits::kPairBytesOfWarp);

  __device__ __forceinline__ SequenceIn<Traits> sequence() const {
    return sequence_of(params_, tile_in<Traits>(shared_));
  }
  __device__ __forceinline__ int first_key() const {
    return steps_.first + step_ * Traits::kStepKeys;
  }
  __device__ __forceinline__ int first_key_of_lane() const {
    return first_key() + Keys::first_of_lane(lane_index());
  }
  // Missing rows read the numbers of the last row. Nobody reads their results.
  __device__ __forceinline__ int row_of(int r) const {
    const TileIn<Traits> tile = tile_in<Traits>(shared_);
    return min(tile.first_row + warp_index() * Traits::kRowsPerWarp + lane_index() / 4 + 8 * r,
               rows_of(tile, sequence()) - 1);
  }
  __device__ __forceinline__ int query_of_row(int r) const { return query_of(params_, row_of(r)); }
  // Whether some page of the tile's keys is invalid, and which of this lane's keys are on valid
  // ones.
  __device__ __forceinline__ bool misses_pages() const {
    if constexpr (Traits::kRagged) {
      return tile_in<Traits>(shared_).misses_pages != 0;
    } else {
      return false;
    }
  }
  __device__ __forceinline__ uint32_t keys_of_pages() const {
    uint32_t there = kAllKeys;
    if constexpr (Traits::kRagged) {
      const RaggedKeys keys = {params_, tile_in<Traits>(shared_)};
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int key = first_key_of_lane() + Keys::key_of(i);
        if (key < sequence().length_k && keys.is_hidden(key)) there &= ~(1u << i);
      }
    }
    return there;
  }
  static __device__ __forceinline__ float& score_of(Scores<Traits>& scores, int r, int i) {
    return scores[r / 2][i / 2][r % 2 * 2 + i % 2];
  }
  __device__ __forceinline__ unsigned char* place() const {
    return shared_ + Traits::kPairsOffset + warp_index() * Traits::kPairBytesOfWarp;
  }

  // kCount_ rows of a tensor.
  template <class Words, int kFirst, int kCount_>
  struct Rows {
    const PairNumbers& numbers;

    __device__ __forceinline__ bool can_copy(const StepPairs& step) const {
      const int end = step.first_key() + Traits::kStepKeys;
      if constexpr (Traits::kRagged) {
        // There are numbers of keys behind the sequence's, too.
        const int skipped = tile_in<Traits>(step.shared_).skipped;
        return Words::can_copy(numbers) && skipped * Words::kBytes % Words::kCopyBytes == 0 &&
               skipped + end <= step.params_.sequences.pair_keys;
      } else {
        return Words::can_copy(numbers) && end <= step.params_.seq_k;
      }
    }
    // The address of key 0 of row r.
    __device__ __forceinline__ auto row_at(const StepPairs& step) const {
      const TileIn<Traits> tile = tile_in<Traits>(step.shared_);
      if constexpr (Traits::kRagged) {
        const char* const first =
            static_cast<const char*>(numbers.data) +
            (tile.number * numbers.batch_stride + tile.skipped * numbers.key_stride) *
                Words::kBytes;
        return [&step, first, this](int r) {
          const int row = step.row_of(kFirst + r);
          return first +
                 (head_of(step.params_, tile_in<Traits>(step.shared_), row) * numbers.head_stride +
                  query_of(step.params_, row) * numbers.query_stride) *
                     Words::kBytes;
        };
      } else {
        const char* const head =
            static_cast<const char*>(numbers.data) +
            (tile.batch * numbers.batch_stride + tile.head * numbers.head_stride) * Words::kBytes;
        return [&step, head, stride = numbers.query_stride](int r) {
          return head + step.query_of_row(kFirst + r) * stride * Words::kBytes;
        };
      }
    }
    __device__ __forceinline__ void copy(const StepPairs& step) const {
      if (!can_copy(step)) return;
      Words::template copy<kCount_>(step.place(), lane_index(), step.first_key_of_lane(),
                                    row_at(step));
    }
    __device__ __forceinline__ void load(const StepPairs& step) const {
      if (can_copy(step)) return;
      Words::template load<kCount_>(step.place(), lane_index(), numbers, step.first_key_of_lane(),
                                    step.sequence().length_k, row_at(step));
    }
  };
  // The numbers that are copied ahead.
  template <class Do>
  __device__ __forceinline__ void with_first(const Do& with) const {
    const ScorePairs& pairs = params_.pairs;
    if (pairs.bias.data == nullptr) {
      with(Rows<Mask, 0, kRows>{pairs.mask});
    } else if (pairs.bias_is_fp32 == 0) {
      with(Rows<Bias16, 0, kRows>{pairs.bias});
    } else {
      with(Rows<Bias32, 0, kRows / 2>{pairs.bias});
    }
  }
  template <class AnyRows>
  __device__ __forceinline__ void fetch(const AnyRows& rows) const {
    __syncwarp();  // as in copy
    rows.copy(*this);
    rows.load(*this);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  template <class Words, int kFirst, int kRowsToAdd>
  __device__ __forceinline__ void add(Scores<Traits>& scores, bool looks,
                                      uint32_t (&visible)[kRows]) const {
    const float factor = params_.pairs.factor;
#pragma unroll
    for (int r = 0; r < kRowsToAdd; ++r) {
      typename Words::Row words;
      Words::read(words, place(), lane_index(), r);
      if (looks) visible[kFirst + r] &= Words::visible(words);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float& score = score_of(scores, kFirst + r, i);
        score = fmaf(score, factor, Words::bias(words, i));
      }
    }
  }

  // Returns false if no key is visible.
  static __device__ __forceinline__ bool hide(Scores<Traits>& scores,
                                              const uint32_t (&visible)[kRows]) {
    uint32_t all = kAllKeys;
    uint32_t any = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      all &= visible[r];
      any |= visible[r];
    }
    if (!__any_sync(kFullWarp, any != 0)) return false;
    if (__all_sync(kFullWarp, all == kAllKeys)) return true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if ((visible[r] >> i & 1) == 0) score_of(scores, r, i) = -INFINITY;
      }
    }
    return true;
  }

  const ParamsOf<Traits>& params_;
  const TileSteps<Traits>& steps_;
  unsigned char* const shared_;
  const int step_;
};

}  // namespace flashmoe::sm89
