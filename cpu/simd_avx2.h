// Eight 32-bit lanes by AVX2, FMA and F16C. Included inside the namespace of one translation unit.

struct Simd {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kGroupRows = 6;  // 6 x 2 accumulators, 2 operands, 2 registers to spare
  static constexpr int kPanelVectors = 2;
  static constexpr int kDotRows = 2;    // 2 x 4 accumulators, 4 operands, 4 registers to spare
  static constexpr bool kFused = true;  // multiply_add rounds once

  // All ones in the first n lanes.
  static __m256i first(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > kLanes ? kLanes : n)), lane);
  }

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static Vector load_broadcast(const float* p) { return _mm256_set1_ps(*p); }
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  // Returns x, and keeps the compiler from fusing its producer with its consumer.
  static Vector rounded(Vector x) {
    asm("" : "+x"(x));
    return x;
  }
  // Returns the second if one is NaN.
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }

  // x, but 0 where a > b, or where a <= b. Comparisons with NaN are false.
  static Vector zero_where_greater(Vector a, Vector b, Vector x) {
    return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NGT_UQ), x);
  }
  static Vector zero_where_at_most(Vector a, Vector b, Vector x) {
    return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ), x);
  }
  static float sum_of(Vector x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float max_of(Vector x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

  // to[i] += the sum of x[i], for i < 4.
  static void add_sums_of_four(const Vector* x, float* to) {
    const Vector sums = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), four));
  }

  // x in the first n lanes, `other` in the rest.
  static Vector first_or(Vector x, int64_t n, Vector other) {
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(first(n)));
  }

  // The first n values at p as fp32, 0 in the rest; reads nothing beyond them.
  static Vector load_first(const float* p, int64_t n) {
    return n >= kLanes ? load(p) : _mm256_maskload_ps(p, first(n));
  }
  static Vector load_first(const Fp16* p, int64_t n) { return _mm256_cvtph_ps(load_16bit(p, n)); }
  static Vector load_first(const Bf16* p, int64_t n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16bit(p, n)), 16));
  }

  // The first n of every second value from p on; reads nothing beyond the last of them.
  template <typename T>
  static Vector load_every_second(const T* p, int64_t n) {
    T copy[kLanes] = {};
    for (int i = 0; i < kLanes && i < n; ++i) copy[i] = p[2 * i];
    return load_first(copy, kLanes);
  }

  // Lanes 1, 0, 3, 2 and so on.
  static Vector swap_neighbours(Vector x) { return _mm256_permute_ps(x, 0xb1); }
  // Each lane of the first half twice, and of the second.
  static Vector twice_low(Vector x) {
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
  }
  static Vector twice_high(Vector x) {
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
  }
  // a - b in lanes 0, 2 and so on, a + b in the others.
  static Vector subtract_add(Vector a, Vector b) { return _mm256_addsub_ps(a, b); }

  // Stores the first n lanes, rounded to nearest even.
  static void store_first(float* p, Vector x, int64_t n) {
    if (n >= kLanes) {
      store(p, x);
    } else {
      _mm256_maskstore_ps(p, first(n), x);
    }
  }
  static void store_first(Fp16* p, Vector x, int64_t n) {
    store_16bit(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
  }
  static void store_first(Bf16* p, Vector x, int64_t n) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
    store_16bit(p, _mm256_castsi256_si128(packed), n);
  }

  // 2^n for an integer n, or 0 for n = kExp2Floor. `shifted` is n + kRoundToInteger.
  static Vector power_of_two(Vector shifted) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  }

  static void transpose(Vector (&r)[kLanes]) {
    Vector t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // Now r[4a + b] holds, in 128-bit half c, column 4c + b of rows 4a to 4a + 3.
#pragma GCC unroll 8
    for (int b = 0; b < 4; ++b) {
      const Vector low = _mm256_permute2f128_ps(r[b], r[4 + b], 0x20);
      const Vector high = _mm256_permute2f128_ps(r[b], r[4 + b], 0x31);
      r[b] = low;
      r[4 + b] = high;
    }
  }

 private:
  static __m128i load_16bit(const void* p, int64_t n) {
    if (n >= kLanes) return _mm_loadu_si128(static_cast<const __m128i*>(p));
    alignas(16) uint16_t copy[kLanes] = {};
    __builtin_memcpy(copy, p, static_cast<size_t>(n < 0 ? 0 : n) * sizeof(uint16_t));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(copy));
  }
  static void store_16bit(void* p, __m128i x, int64_t n) {
    if (n >= kLanes) {
      _mm_storeu_si128(static_cast<__m128i*>(p), x);
      return;
    }
    alignas(16) uint16_t copy[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(copy), x);
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * sizeof(uint16_t));
  }
};
