// Keys and values as a cache stores them: in the queries' type, or in fp8 with scales.
//
// fp8 numbers are widened to fragments of the queries' type on the way to the products, with the
// same values. A lane loads 16 bytes of them, too. A key's scale is a factor of its scores. A
// value's scale divided by the largest one so far is a factor of probabilities; the accumulators
// lack that largest scale. So values are rounded to the queries' type at the same magnitude as
// without scales.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/few_rows/products.cuh"
#include "cuda/attention/sm89_decode/traits.cuh"
#include "cuda/numeric/fp8.cuh"
#include "cuda/ptx/global.cuh"

namespace flashmoe::sm89_decode {

using attention_decode::compute_row_again;
using attention_decode::KeysOfRow;
using attention_decode::row_at;
using attention_decode::RowOf;
using attention_decode::write_unit;

// One bit per key of a step.
template <class Traits>
inline constexpr uint32_t kAllValid = Traits::kStepKeys == 32 ? 0xffffffffu : 0xffffu;

template <class Traits>
using CachedElement = std::conditional_t<Traits::kFp8, uint8_t, uint16_t>;

// The columns of a lane's numbers in a row of K: from `column()`, every kStep, one load each. With
// fp8 the lanes of a row load 16 bytes of every 64. After an exchange with a neighbour they hold
// what the fragments need: 8t and on of every 32.
template <class Traits>
struct KLayout {
  static constexpr int kLoads = Traits::kFp8 ? Traits::kDim / 64 : Traits::kKChunks;
  static constexpr int kStep = Traits::kFp8 ? 64 : 32;
  static constexpr int kWords = 4;

  static __device__ __forceinline__ int column() {
    const int t = reread::lane_index() % 4;
    return Traits::kFp8 ? 16 * (t / 2 + t % 2 * 2) : 8 * t;
  }
};

// The same for V. The sums do not depend on which columns a lane has. With fp8 it has 16g and on of
// every 128 columns, if rows are that long.
template <class Traits>
struct VLayout {
  static constexpr bool kWide = Traits::kFp8 && Traits::kDimV % 128 == 0;
  static constexpr int kLoads = kWide ? Traits::kDimV / 128 : Traits::kVChunks;
  static constexpr int kStep = kWide ? 128 : 64;
  static constexpr int kWords = !Traits::kFp8 || kWide ? 4 : 2;

  static __device__ __forceinline__ int column() {
    return (kWide ? 16 : 8) * (reread::lane_index() / 4);
  }
};

// A lane's part of a step, as loaded.
template <class Traits>
using CachedK = uint32_t[Traits::kStepKeys / 8][KLayout<Traits>::kLoads][KLayout<Traits>::kWords];
template <class Traits>
using CachedV = uint32_t[Traits::kStepKeys / 4][VLayout<Traits>::kLoads][VLayout<Traits>::kWords];

// Loads the numbers of existing columns, a multiple of 8, and zeros behind them.
__device__ __forceinline__ void load_columns(uint32_t (&words)[4], const uint16_t* at,
                                             int columns) {
  ptx::load_streaming_or_zero(words, at, columns > 0);
}
__device__ __forceinline__ void load_columns(uint32_t (&words)[2], const uint8_t* at, int columns) {
  ptx::load_streaming_or_zero(words, at, columns > 0);
}
__device__ __forceinline__ void load_columns(uint32_t (&words)[4], const uint8_t* at, int columns) {
  uint32_t halves[2][2];
  ptx::load_streaming_or_zero(halves[0], at, columns > 0);
  ptx::load_streaming_or_zero(halves[1], at + 8, columns > 8);
  words[0] = halves[0][0], words[1] = halves[0][1];
  words[2] = halves[1][0], words[3] = halves[1][1];
}

// A loaded word of K with missing columns set to zero. Missing keys need no zeros: their scores are
// hidden.
template <class Traits>
__device__ __forceinline__ uint32_t there_of_k(const CachedK<Traits>& k, int i, int load, int word,
                                               int dim) {
  constexpr int kNumbers = 4 / static_cast<int>(sizeof(CachedElement<Traits>));  // of a word
  const int column = KLayout<Traits>::column() + KLayout<Traits>::kStep * load + kNumbers * word;
  return column < dim ? k[i][load][word] : 0;
}

// A loaded word of V with missing keys set to zero; `valid` has one bit per key. Missing columns
// need no zeros: their sums are not used.
template <class Traits>
__device__ __forceinline__ uint32_t there_of_v(const CachedV<Traits>& v, int i, int load, int word,
                                               uint32_t valid) {
  const int key = few_rows::v_key(i) + 2 * (reread::lane_index() % 4);
  return (valid >> key & 1) != 0 ? v[i][load][word] : 0;
}

// Zeros the values of missing keys: 0 times a NaN would be NaN.
template <class Traits>
__device__ __forceinline__ void clear_v(CachedV<Traits>& v, uint32_t valid) {
#pragma unroll
  for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
#pragma unroll
    for (int c = 0; c < VLayout<Traits>::kLoads; ++c) {
#pragma unroll
      for (int word = 0; word < VLayout<Traits>::kWords; ++word) {
        v[i][c][word] = there_of_v<Traits>(v, i, c, word, valid);
      }
    }
  }
}

// ---- scales -------------------------------------------------------------------------------------

// The scales of a key.
struct Factors {
  float k;
  float v;
};

// Scales of this lane's key of a step, on that page or in that row of the batch. Below 0 there is
// no key.
template <class Traits>
__device__ __forceinline__ Factors factors_of(const Params& params, int page, int head_kv) {
  Factors factors = {1.0f, 0.0f};
  if constexpr (Traits::kFp8) {
    if (page < 0) return factors;
    const auto scale_of = [&](const CacheScales& scales) {
      return scales.data == nullptr ? 1.0f
                                    : scales.data[page * scales.page + head_kv * scales.head];
    };
    factors = {scale_of(params.k_scale), scale_of(params.v_scale)};
  }
  return factors;
}

// Scales the scores of a step whose keys the lanes have looked up.
template <class Traits>
__device__ __forceinline__ void scale_scores(few_rows::Scores<Traits>& scores, const Params& params,
                                             const Factors& factors) {
  if constexpr (Traits::kFp8) {
    if (params.k_scale.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
      const float factor = __shfl_sync(kFullWarp, factors.k, 8 * i + reread::lane_index() / 4);
#pragma unroll
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
        scores[i / 2][n][i % 2 * 2] *= factor;
        scores[i / 2][n][i % 2 * 2 + 1] *= factor;
      }
    }
  }
}

// Factors of a warp's values in a segment.
template <class Traits>
struct ValueScales {
  float most;                            // the largest magnitude so far, over all lanes' keys
  float weights[Traits::kStepKeys / 8];  // of keys 8i + g, divided by `most`

  __device__ __forceinline__ void reset() {
    if constexpr (Traits::kFp8) {
      most = 0.0f;
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / 8; ++i) weights[i] = 1.0f;
    }
  }

  // Takes the factors of the next step; `valid` has its existing keys. Rescales the accumulators if
  // the largest magnitude grows.
  __device__ __forceinline__ void next(const Params& params, const Factors& factors, uint32_t valid,
                                       few_rows::Accumulators<Traits>& out) {
    if constexpr (Traits::kFp8) {
      if (params.v_scale.data == nullptr) return;
      // Usually all factors are equal, and there is nothing to divide. A NaN does not equal itself.
      const bool has_key = (valid >> reread::lane_index() & 1) != 0;
      if (__all_sync(kFullWarp, !has_key || factors.v == most)) {
#pragma unroll
        for (float& weight : weights) weight = 1.0f;
        return;
      }
      // Magnitudes are ordered like their bits, with NaN above them.
      const uint32_t here = __reduce_max_sync(kFullWarp, __float_as_uint(factors.v) & 0x7fffffffu);
      if (here > __float_as_uint(most)) {
        const float larger = __uint_as_float(here);
        multiply(out, most / larger);
        most = larger;
      }
      const float weight = most != 0.0f ? factors.v / most : 0.0f;
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
        weights[i] = __shfl_sync(kFullWarp, weight, 8 * i + reread::lane_index() / 4);
      }
    }
  }

  __device__ __forceinline__ float weighted(int i, float p) const {
    if constexpr (Traits::kFp8) p *= weights[i];
    return p;
  }

  // Follows the last step.
  __device__ __forceinline__ void finish(const Params& params,
                                         few_rows::Accumulators<Traits>& out) const {
    if constexpr (Traits::kFp8) {
      if (params.v_scale.data != nullptr) multiply(out, most);
    }
  }

 private:
  static __device__ __forceinline__ void multiply(few_rows::Accumulators<Traits>& out,
                                                  float factor) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < Traits::kDimV / 16; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][j][e] *= factor;
      }
    }
  }
};

// The unit of four columns of an output row that this lane has in the m16 blocks 2i and 2i + 1.
template <class Traits>
__device__ __forceinline__ int unit_of(int i) {
  const int g = reread::lane_index() / 4;
  if constexpr (VLayout<Traits>::kWide) return 32 * (i / 4) + 4 * g + i % 4;
  return 16 * (i / 2) + 2 * g + i % 2;
}

// ---- fragments of fp8 ---------------------------------------------------------------------------

// A step's bytes are brought from the order of the loads to that of the fragments before the next
// step's loads are issued. Afterwards only widening is left, and the next loads reuse the
// registers. With copies in between, the compiler would wait for loads right after issuing them.

// Lanes 0 to 3 of a row have the groups of eight 0 1, 4 5, 2 3 and 6 7 of 64 numbers. Each lane
// needs one of the first four and one of the others. `loaded(i, load, word)` is the loaded word.
template <class Traits, class Loaded>
__device__ __forceinline__ void exchange_eights(CachedK<Traits>& to, const Loaded& loaded) {
  const bool odd = reread::lane_index() % 2 != 0;
#pragma unroll
  for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
    for (int load = 0; load < KLayout<Traits>::kLoads; ++load) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const uint32_t low = loaded(i, load, word);
        const uint32_t high = loaded(i, load, 2 + word);
        const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? low : high, 1);
        to[i][load][word] = odd ? got : low;
        to[i][load][2 + word] = odd ? high : got;
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void order_k(CachedK<Traits>& to, const CachedK<Traits>& from, int dim) {
  if (dim == Traits::kDim) {
    exchange_eights<Traits>(to, [&](int i, int load, int word) { return from[i][load][word]; });
  } else {
    exchange_eights<Traits>(to, [&](int i, int load, int word) {
      return there_of_k<Traits>(from, i, load, word, dim);
    });
  }
}

// Packs keys 2t and 2t + 1, or 2t + 8 and 2t + 9, of two columns into a word. `loaded(i, load,
// word)` is the loaded word.
template <class Traits, class Loaded>
__device__ __forceinline__ void pair_keys(CachedV<Traits>& to, const Loaded& loaded) {
#pragma unroll
  for (int i = 0; i < Traits::kStepKeys / 4; i += 2) {
#pragma unroll
    for (int load = 0; load < VLayout<Traits>::kLoads; ++load) {
#pragma unroll
      for (int word = 0; word < VLayout<Traits>::kWords; ++word) {
        const uint32_t even = loaded(i, load, word);
        const uint32_t odd = loaded(i + 1, load, word);
        constexpr uint32_t kFirstTwo = 0x5140;
        constexpr uint32_t kLastTwo = 0x7362;
        to[i][load][word] = __byte_perm(even, odd, kFirstTwo);
        to[i + 1][load][word] = __byte_perm(even, odd, kLastTwo);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void order_v(CachedV<Traits>& to, const CachedV<Traits>& from,
                                        uint32_t valid) {
  if (valid == kAllValid<Traits>) {
    pair_keys<Traits>(to, [&](int i, int load, int word) { return from[i][load][word]; });
  } else {
    pair_keys<Traits>(to, [&](int i, int load, int word) {
      return there_of_v<Traits>(from, i, load, word, valid);
    });
  }
}

// ---- products -----------------------------------------------------------------------------------

// scores = K Q^T for fp8 keys that order_k has ordered, in the order of few_rows.
template <class Traits>
__device__ __forceinline__ void multiply_fp8_k(few_rows::Scores<Traits>& scores,
                                               const CachedK<Traits>& k,
                                               const few_rows::QFragments<Traits>& q,
                                               const few_rows::Shared<Traits>& shared) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int c = 0; c < Traits::kKChunks; ++c) {
    uint32_t b[Traits::kRowBlocks][4];
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      few_rows::query_chunk<Traits>(b[n], q, shared, n, c);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < Traits::kKeyBlocks; ++m) {
        uint32_t wide[2][2];  // of keys 16m + g and 16m + g + 8
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          numeric::widen<Element>(wide[h], k[2 * m + h][c / 2][c % 2 * 2 + half]);
        }
        const uint32_t a[4] = {wide[0][0], wide[1][0], wide[0][1], wide[1][1]};
#pragma unroll
        for (int n = 0; n < Traits::kRowBlocks; ++n) {
          ptx::mma_m16n8k16<Element>(scores[m][n], a, b[n][2 * half], b[n][2 * half + 1]);
        }
      }
    }
  }
}

// out += V^T P^T for fp8 values that order_v has ordered.
template <class Traits>
__device__ __forceinline__ void multiply_fp8_v(few_rows::Accumulators<Traits>& out,
                                               const CachedV<Traits>& v,
                                               const few_rows::Probabilities<Traits>& p) {
  using Element = typename Traits::Element;
  constexpr int kWords = VLayout<Traits>::kWords;
#pragma unroll
  for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
    for (int block = 0; block < Traits::kDimV / 16; ++block) {
      const int load = block / (2 * kWords);
      const int word = block / 2 % kWords;
      uint32_t wide[2][2];  // of keys 2t and 2t + 1, and of 2t + 8 and 2t + 9
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        numeric::widen<Element>(wide[h], v[4 * m + 2 * h + block % 2][load][word]);
      }
      const uint32_t a[4] = {wide[0][0], wide[0][1], wide[1][0], wide[1][1]};
#pragma unroll
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
        ptx::mma_m16n8k16<Element>(out[n][block], a, p[m][n][0], p[m][n][1]);
      }
    }
  }
}

}  // namespace flashmoe::sm89_decode
