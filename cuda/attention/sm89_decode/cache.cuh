// Keys and values as a cache has them: of the queries' type, or of fp8 with scales.
//
// Numbers of fp8 are widened to the fragments of the queries' type on the way to the products: bit
// for bit the same. A lane loads 16 bytes of them, too. A key's scale is a factor of its scores.
// Those of values are factors of probabilities, less the largest so far, which accumulators are
// then without: so what is rounded to the queries' type is as large as it is without scales.
#pragma once

#include "cuda/attention/sm89_decode/traits.cuh"
#include "cuda/attention/sm89_few_rows/products.cuh"
#include "cuda/numeric/fp8.cuh"

namespace flashmoe::sm89_decode {

template <class Traits>
using CachedElement = std::conditional_t<Traits::kFp8, uint8_t, uint16_t>;

// Where a lane's numbers of a row of K are: `column()` and every kStep from there on, a load's
// each. Of fp8 the lanes of a row take 16 bytes of every 64, and keep, behind an exchange with a
// neighbour, what the fragments have: 8t and on of every 32.
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

// The same of V. Which columns a lane has makes no difference to their sums: of fp8 16g and on of
// every 128, where rows are as long.
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

// What a lane has of a step, as it is loaded.
template <class Traits>
using CachedK = uint32_t[Traits::kStepKeys / 8][KLayout<Traits>::kLoads][KLayout<Traits>::kWords];
template <class Traits>
using CachedV = uint32_t[Traits::kStepKeys / 4][VLayout<Traits>::kLoads][VLayout<Traits>::kWords];

template <int kKeys, int kLoads, int kWords>
__device__ __forceinline__ void copy(uint32_t (&to)[kKeys][kLoads][kWords],
                                     const uint32_t (&from)[kKeys][kLoads][kWords]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
#pragma unroll
    for (int c = 0; c < kLoads; ++c) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) to[i][c][word] = from[i][c][word];
    }
  }
}

// As many of a load's numbers as there are columns, a multiple of 8; zeros behind.
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

// `base` is where chunk 0 has it.
template <class Cached>
__device__ __forceinline__ const Cached* row_at(const Cached* base, uint32_t chunk) {
  return base + uint64_t{chunk} * (16 / sizeof(Cached));
}

// ---- scales -------------------------------------------------------------------------------------

// Those of a key.
struct Factors {
  float k;
  float v;
};

// Of this lane's key of a step, on that page or in that row of the batch; below 0 there is none.
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

// Of a step whose keys lanes have looked up.
template <class Traits>
__device__ __forceinline__ void scale_scores(sm89_few_rows::Scores<Traits>& scores,
                                             const Params& params, const Factors& factors) {
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

// What a warp's values of a segment are multiplied by.
template <class Traits>
struct ValueScales {
  float most;                            // the largest magnitude so far, of all lanes' keys
  float weights[Traits::kStepKeys / 8];  // of keys 8i + g, less that

  __device__ __forceinline__ void reset() {
    if constexpr (Traits::kFp8) {
      most = 0.0f;
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / 8; ++i) weights[i] = 1.0f;
    }
  }

  // Of the next step; accumulators are brought to a larger magnitude.
  __device__ __forceinline__ void next(const Params& params, const Factors& factors,
                                       sm89_few_rows::Accumulators<Traits>& out) {
    if constexpr (Traits::kFp8) {
      if (params.v_scale.data == nullptr) return;
      // Magnitudes are in the order of their bits, and a NaN is above them.
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

  // Behind the last step.
  __device__ __forceinline__ void finish(const Params& params,
                                         sm89_few_rows::Accumulators<Traits>& out) const {
    if constexpr (Traits::kFp8) {
      if (params.v_scale.data != nullptr) multiply(out, most);
    }
  }

 private:
  static __device__ __forceinline__ void multiply(sm89_few_rows::Accumulators<Traits>& out,
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

// The unit of four columns of an output row that the m16 blocks 2i and 2i + 1 have of this lane.
template <class Traits>
__device__ __forceinline__ int unit_of(int i) {
  const int g = reread::lane_index() / 4;
  if constexpr (VLayout<Traits>::kWide) return 32 * (i / 4) + 4 * g + i % 4;
  return 16 * (i / 2) + 2 * g + i % 2;
}

// ---- products -----------------------------------------------------------------------------------

// scores += K Q^T of chunk c, in the order of sm89_few_rows.
template <class Traits>
__device__ __forceinline__ void multiply_chunk(sm89_few_rows::Scores<Traits>& scores,
                                               const uint32_t (&k)[Traits::kStepKeys / 8][2],
                                               const sm89_few_rows::QFragments<Traits>& q,
                                               const sm89_few_rows::Shared<Traits>& shared, int c) {
  using Element = typename Traits::Element;
  uint32_t wide[Traits::kStepKeys / 8][4];
#pragma unroll
  for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t byte = e % 2 * 2;
      wide[i][e] = numeric::widen_pair<Element>(k[i][e / 2], 0, byte, byte + 1);
    }
  }
#pragma unroll
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    uint32_t b[4];
    sm89_few_rows::query_chunk<Traits>(b, q, shared, n, c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < Traits::kKeyBlocks; ++m) {
        const uint32_t a[4] = {wide[2 * m][2 * half], wide[2 * m + 1][2 * half],
                               wide[2 * m][2 * half + 1], wide[2 * m + 1][2 * half + 1]};
        ptx::mma_m16n8k16<Element>(scores[m][n], a, b[2 * half], b[2 * half + 1]);
      }
    }
  }
}

// scores = K Q^T
template <class Traits>
__device__ __forceinline__ void multiply_k(sm89_few_rows::Scores<Traits>& scores,
                                           const CachedK<Traits>& k,
                                           const sm89_few_rows::QFragments<Traits>& q,
                                           const sm89_few_rows::Shared<Traits>& shared) {
  if constexpr (Traits::kFp8) {
    const bool odd = reread::lane_index() % 2 != 0;
#pragma unroll
    for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int load = 0; load < KLayout<Traits>::kLoads; ++load) {
      uint32_t first[Traits::kStepKeys / 8][2];  // of each key, eights as fragments have them
      uint32_t second[Traits::kStepKeys / 8][2];
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          // Of 64 numbers the lanes 0 to 3 of a row have the eights 0 1, 4 5, 2 3 and 6 7, and want
          // one of the first four and one of the others.
          const uint32_t low = k[i][load][word];
          const uint32_t high = k[i][load][2 + word];
          const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? low : high, 1);
          first[i][word] = odd ? got : low;
          second[i][word] = odd ? high : got;
        }
      }
      multiply_chunk<Traits>(scores, first, q, shared, 2 * load);
      multiply_chunk<Traits>(scores, second, q, shared, 2 * load + 1);
    }
  } else {
    sm89_few_rows::multiply_k<Traits>(scores, k, q, shared);
  }
}

// out += V^T P^T
template <class Traits>
__device__ __forceinline__ void multiply_v(sm89_few_rows::Accumulators<Traits>& out,
                                           const CachedV<Traits>& v,
                                           const sm89_few_rows::Probabilities<Traits>& p) {
  if constexpr (Traits::kFp8) {
    using Element = typename Traits::Element;
    constexpr int kWords = VLayout<Traits>::kWords;
#pragma unroll
    for (int m = 0; m < Traits::kKeyBlocks; ++m) {
#pragma unroll
      for (int block = 0; block < Traits::kDimV / 16; ++block) {
        const int load = block / (2 * kWords);
        const int word = block / 2 % kWords;
        // Of keys 2t and 2t + 1, or 2t + 8 and 2t + 9, one of two columns side by side.
        const auto widen = [&](int key, int column) {
          const uint32_t byte = (2 * block + column) % 4;
          return numeric::widen_pair<Element>(v[4 * m + key][load][word],
                                              v[4 * m + key + 1][load][word], byte, byte + 4);
        };
        const uint32_t a[4] = {widen(0, 0), widen(0, 1), widen(2, 0), widen(2, 1)};
#pragma unroll
        for (int n = 0; n < Traits::kRowBlocks; ++n) {
          ptx::mma_m16n8k16<Element>(out[n][block], a, p[m][n][0], p[m][n][1]);
        }
      }
    }
  } else {
    sm89_few_rows::multiply_v<Traits>(out, v, p);
  }
}

}  // namespace flashmoe::sm89_decode
