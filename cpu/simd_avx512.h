// Sixteen 32-bit lanes by AVX-512. Included inside the namespace of one translation unit.
// `Vector` also carries two 16-bit values per lane where a kernel multiplies bf16 pairs.

struct Simd {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kGroupRows = 12;  // 12 x 2 accumulators, 2 operands, 6 registers to spare
  static constexpr int kPanelVectors = 2;
  static constexpr int kDotRows = 6;    // 6 x 4 accumulators, 4 operands, 4 registers to spare
  static constexpr bool kFused = true;  // multiply_add rounds once

  static __mmask16 first(int64_t n) {
    return n >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << n) - 1u);
  }

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  // Loads once into a register. Otherwise the compiler broadcasts from memory in each instruction
  // that uses it, which makes loads the bottleneck.
  static Vector load_broadcast(const float* p) {
    Vector x = _mm512_set1_ps(*p);
    asm("" : "+v"(x));
    return x;
  }
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  // Returns x, and keeps the compiler from fusing its producer with its consumer.
  static Vector rounded(Vector x) {
    asm("" : "+v"(x));
    return x;
  }
  // Returns the second if one is NaN.
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
  // x, but 0 where a > b, or where a <= b. Comparisons with NaN are false.
  static Vector zero_where_greater(Vector a, Vector b, Vector x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NGT_UQ), x);
  }
  static Vector zero_where_at_most(Vector a, Vector b, Vector x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ), x);
  }
  static float sum_of(Vector x) { return _mm512_reduce_add_ps(x); }
  static float max_of(Vector x) { return _mm512_reduce_max_ps(x); }

  // to[i] += the sum of x[i], for i < 4.
  static void add_sums_of_four(const Vector* x, float* to) {
    const Vector a = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Vector b = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const Vector sums = add(unpack_low_pairs(a, b), unpack_high_pairs(a, b));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), four));
  }

  // x in the first n lanes, `other` in the rest.
  static Vector first_or(Vector x, int64_t n, Vector other) {
    return _mm512_mask_mov_ps(other, first(n), x);
  }

  // The first n values at p as fp32, 0 in the rest; reads nothing beyond them.
  static Vector load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static Vector load_first(const Fp16* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static Vector load_first(const Bf16* p, int64_t n) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  // The first n of every second value from p on; reads nothing beyond the last of them.
  static Vector load_every_second(const float* p, int64_t n) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const int64_t span = 2 * smaller_of(n, kLanes) - 1;
    const Vector low = load_first(p, span);
    const Vector high = span > kLanes ? load_first(p + kLanes, span - kLanes) : zero();
    return _mm512_permutex2var_ps(low, even, high);
  }
  static Vector load_every_second(const Fp16* p, int64_t n) {
    return _mm512_cvtph_ps(every_second_16bit(p, n));
  }
  static Vector load_every_second(const Bf16* p, int64_t n) {
    const __m512i wide = _mm512_cvtepu16_epi32(every_second_16bit(p, n));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  // Lanes 1, 0, 3, 2 and so on.
  static Vector swap_neighbours(Vector x) { return _mm512_permute_ps(x, 0xb1); }
  // Each lane of the first half twice, and of the second.
  static Vector twice_low(Vector x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                 x);
  }
  static Vector twice_high(Vector x) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), x);
  }
  // a - b in lanes 0, 2 and so on, a + b in the others: a product with 1 is exact.
  static Vector subtract_add(Vector a, Vector b) {
    return _mm512_fmaddsub_ps(a, _mm512_set1_ps(1.0f), b);
  }

  // Stores the first n lanes, rounded to nearest even.
  static void store_first(float* p, Vector x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static void store_first(Fp16* p, Vector x, int64_t n) {
    const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(p, first(n), half);
  }
  static void store_first(Bf16* p, Vector x, int64_t n) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  // 2^n for an integer n, or 0 for n = kExp2Floor. `shifted` is n + kRoundToInteger.
  static Vector power_of_two(Vector shifted) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
  }

  static void transpose(Vector (&r)[kLanes]) {
    Vector t[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 4) {
      r[i] = unpack_low_pairs(t[i], t[i + 2]);
      r[i + 1] = unpack_high_pairs(t[i], t[i + 2]);
      r[i + 2] = unpack_low_pairs(t[i + 1], t[i + 3]);
      r[i + 3] = unpack_high_pairs(t[i + 1], t[i + 3]);
    }
    // Now r[4a + b] holds, in 128-bit block c, column 4c + b of rows 4a to 4a + 3.
#pragma GCC unroll 16
    for (int b = 0; b < 4; ++b) {
      const Vector low01 = _mm512_shuffle_f32x4(r[b], r[4 + b], 0x44);
      const Vector high01 = _mm512_shuffle_f32x4(r[b], r[4 + b], 0xee);
      const Vector low23 = _mm512_shuffle_f32x4(r[8 + b], r[12 + b], 0x44);
      const Vector high23 = _mm512_shuffle_f32x4(r[8 + b], r[12 + b], 0xee);
      t[b] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      t[4 + b] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
      t[8 + b] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      t[12 + b] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) r[i] = t[i];
  }

 private:
  static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
  static __m256i every_second_16bit(const void* p, int64_t n) {
    const __mmask32 mask = n >= kLanes ? 0x7fffffffu : (1u << (2 * n - 1)) - 1u;
    return _mm512_cvtepi32_epi16(_mm512_maskz_loadu_epi16(mask, p));
  }
  static Vector unpack_low_pairs(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Vector unpack_high_pairs(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
};
