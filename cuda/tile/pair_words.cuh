// The numbers of a bias or a mask that a lane of mma.sync reads: those of its fragments' pairs,
// packed in words. They go to registers or, by cp.async, to the warp's own area of shared memory.
//
// A fragment of scores gives a lane two keys of every eight. Kernels that read pairs therefore
// permute the keys of a tile when they copy it (SideBySide). A lane's keys of a row are then
// consecutive, and one copy of up to 16 bytes has the numbers of several. The products do not
// change: columns of scores and probabilities are permuted like rows of keys and values.
#pragma once

#include <cstdint>

#include "cuda/ptx/words.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/score_pairs.h"

namespace flashmoe {

// The order of a tile's keys: a lane has kSide keys of each kGroup. Column 8n + 2c + e of a group,
// which fragment n gives to lane c of four, has key kSide c + 2n + e.
template <int kSide_>
struct SideBySide {
  static constexpr int kSide = kSide_;
  static constexpr int kGroup = 4 * kSide;
  static_assert(kSide == 4 || kSide == 8);

  static constexpr __host__ __device__ int row_of(int row) {
    return row / kGroup * kGroup + row % 8 / 2 * kSide + row % kGroup / 8 * 2 + row % 2;
  }
  static __device__ __forceinline__ int first_of_lane(int lane) { return lane % 4 * kSide; }
  // The distance of a lane's number i in a row from its first key. Number i is element i % 2 of
  // fragment i / 2.
  static constexpr __host__ __device__ int key_of(int i) { return i / kSide * kGroup + i % kSide; }
  // Bit i is set if key i of kCount is in `keys`. The first key is `first`.
  template <int kCount>
  static __device__ __forceinline__ uint32_t visible(int first, const KeyRange& keys) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += kSide) {
      const auto before = [&](int key) {
        return (1u << max(0, min(key - first - key_of(i), kSide))) - 1;
      };
      bits |= (before(keys.end) & ~before(keys.first)) << i;
    }
    return bits;
  }
};

// A lane's kCount numbers of kBytes bytes in a row. Number i is in word i / kPerWord.
template <class Element, class Keys_, int kBytes_, int kCount_>
struct PairWords {
  using Keys = Keys_;
  static constexpr int kBytes = kBytes_;
  static constexpr int kCount = kCount_;
  static constexpr int kPerWord = 4 / kBytes;
  static constexpr int kWords = kCount / kPerWord;
  using Row = uint32_t[kWords];
  // Bytes per copy. Rows must begin at multiples of it.
  static constexpr int kCopyBytes = smaller(Keys::kSide * kBytes, 16);
  static constexpr int kCopyWords = kCopyBytes / 4;
  static constexpr int kCopies = kWords / kCopyWords;  // copies per row
  static_assert(kCount % Keys::kSide == 0);
  // The number that hides its key: 0 in a mask, -inf in a bias.
  static constexpr uint32_t kHidden = kBytes == 1 ? 0
                                      : kBytes == 2
                                          ? 0x8000u | numeric::ElementTraits<Element>::kExponentMask
                                          : 0xff800000u;
  static constexpr uint32_t kOnes = kBytes == 4 ? ~0u : (1u << 8 * kBytes % 32) - 1;

  // Offset of copy c of row r in the warp's area. The copies of its lanes are contiguous.
  static __device__ __forceinline__ int offset_of(int lane, int r, int c) {
    return ((r * kCopies + c) * kThreadsPerWarp + lane) * kCopyBytes;
  }

  // Whether numbers can be copied in runs. If not, they are loaded one by one.
  static __device__ __forceinline__ bool can_copy(const PairNumbers& numbers) {
    return numbers.alignment >= kCopyBytes;
  }
  // Copies kRows rows. Key 0 of row r is at row_at(r). Copies the numbers of the lane's keys from
  // `first` on, its first key. All of these keys exist.
  template <int kRows, class RowAt>
  static __device__ __forceinline__ void copy(unsigned char* place, int lane, int first,
                                              const RowAt& row_at) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(place));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const char* const row = row_at(r) + static_cast<int64_t>(first) * kBytes;
#pragma unroll
      for (int c = 0; c < kCopies; ++c) {
        ptx::cp_async_cached<kCopyBytes>(address + static_cast<uint32_t>(offset_of(lane, r, c)),
                                         row + Keys::key_of(c * kCopyWords * kPerWord) * kBytes);
      }
    }
  }
  // The same one by one, for keys before `end`. Those of other keys are zeros.
  template <int kRows, class RowAt>
  static __device__ __forceinline__ void load(unsigned char* place, int lane,
                                              const PairNumbers& numbers, int first, int end,
                                              const RowAt& row_at) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const char* const row = row_at(r);
      Row words;
      load_each(words, numbers, row, first, end);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        *reinterpret_cast<uint32_t*>(place + offset_of(lane, r, w / kCopyWords) +
                                     w % kCopyWords * 4) = words[w];
      }
    }
  }
  static __device__ __forceinline__ void load_each(Row& words, const PairNumbers& numbers,
                                                   const char* row, int first, int end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = first + Keys::key_of(i);
      const uint32_t number = key < end ? number_at(row + key * numbers.key_stride * kBytes) : 0;
      const uint32_t shifted = number << 8 * kBytes * (i % kPerWord);
      words[i / kPerWord] = i % kPerWord == 0 ? shifted : words[i / kPerWord] | shifted;
    }
  }
  static __device__ __forceinline__ uint32_t number_at(const char* address) {
    if constexpr (kBytes == 1) return *reinterpret_cast<const uint8_t*>(address);
    if constexpr (kBytes == 2) return *reinterpret_cast<const uint16_t*>(address);
    return *reinterpret_cast<const uint32_t*>(address);
  }

  // The same for one row, to registers. `all`: all keys exist.
  static __device__ __forceinline__ void load(Row& words, const PairNumbers& numbers,
                                              const char* row, int first, int end, bool all) {
    if (all && can_copy(numbers)) {
#pragma unroll
      for (int c = 0; c < kCopies; ++c) {
        const int key = first + Keys::key_of(c * kCopyWords * kPerWord);
        uint32_t loaded[kCopyWords];
        ptx::load_words(loaded, row + static_cast<int64_t>(key) * kBytes);
#pragma unroll
        for (int w = 0; w < kCopyWords; ++w) words[c * kCopyWords + w] = loaded[w];
      }
    } else {
      load_each(words, numbers, row, first, end);
    }
  }

  // Reads a row that has been copied.
  static __device__ __forceinline__ void read(Row& words, const unsigned char* place, int lane,
                                              int r) {
    struct alignas(kCopyBytes) Copy {
      uint32_t words[kCopyWords];
    };
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const Copy copy = *reinterpret_cast<const Copy*>(place + offset_of(lane, r, c));
#pragma unroll
      for (int w = 0; w < kCopyWords; ++w) words[c * kCopyWords + w] = copy.words[w];
    }
  }

  static __device__ __forceinline__ uint32_t number(const uint32_t* words, int i) {
    return words[i / kPerWord] >> 8 * kBytes * (i % kPerWord) & kOnes;
  }
  // Bit i is set if number i does not hide its key.
  static __device__ __forceinline__ uint32_t visible(const uint32_t* words) {
    uint32_t bits = 0;
    if constexpr (kBytes == 1) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        // Each byte gives one bit. The product gathers them in the highest byte.
        const uint32_t ones = __vsetne4(words[w], 0);
        bits |= ones * 0x01020408u >> 24 << 4 * w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits |= number(words, i) != kHidden ? 1u << i : 0;
    }
    return bits;
  }
  // The bias that number i adds to its logit.
  static __device__ __forceinline__ float bias(const uint32_t* words, int i) {
    if constexpr (kBytes == 4) {
      return __uint_as_float(words[i]);
    } else {
      const float2 pair = numeric::ElementTraits<Element>::unpack(words[i / 2]);
      return i % 2 == 0 ? pair.x : pair.y;
    }
  }
};

}  // namespace flashmoe
