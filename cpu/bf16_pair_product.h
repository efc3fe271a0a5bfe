// Products of bf16 pairs by vdpbf16ps: two per lane and instruction, summed in fp32. Denormal
// inputs and sums count as 0. Included after cpu/products.h.

struct Bf16PairProduct {
  using Element = Bf16;
  static constexpr int kPack = 2;  // elements per word; the first is in the low half
  static constexpr int64_t kScoreRun = 64;
  static constexpr int64_t kValueRun = 64;

  static Vector multiply_add(Vector a, Vector b, Vector sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static Vector load_words(const Bf16* p, int64_t n) {
    return Simd::load_first(reinterpret_cast<const float*>(p), n / kPack);
  }
  static Vector load_values(const Bf16* first, const Bf16* second, int64_t n) {
    const __mmask16 mask = Simd::first(n);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first));
    if (second == nullptr) return _mm512_castsi512_ps(low);
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static Vector load_every_second_value(const Bf16* first, const Bf16* second, int64_t n) {
    const __mmask32 mask = n >= Simd::kLanes ? 0x7fffffffu : (1u << (2 * n - 1)) - 1u;
    const __m512i low =
        _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, first), _mm512_set1_epi32(0xffff));
    if (second == nullptr) return _mm512_castsi512_ps(low);
    const __m512i high = _mm512_slli_epi32(_mm512_maskz_loadu_epi16(mask, second), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(low, high));
  }
  template <int kVectors>
  FLASHMOE_INLINE static void load_columns(const Bf16* first, const Bf16* second, int64_t n,
                                           Vector (&words)[kVectors]) {
    if (kVectors == 2 && n >= 2 * Simd::kLanes) {
      // For whole lines: one load per row and one shuffle of both per vector.
      const __m512i low = _mm512_loadu_si512(first);
      const __m512i high = _mm512_loadu_si512(second);
      words[0] = interleave(low, high, 0);
      words[kVectors - 1] = interleave(low, high, Simd::kLanes);
      return;
    }
    load_vectors<kVectors>(n, words, [=](int64_t i, int64_t rest) {
      return load_values(first + i, second + i, rest);
    });
  }
  static Vector keep_first_of_pair(Vector words) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(words), _mm512_set1_epi32(0xffff)));
  }
  static Vector keep_second_of_pair(Vector words) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words),
                                                _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void store_weights(float* row, int64_t key, Vector weights) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + key / kPack),
                        (__m256i)_mm512_cvtneps_pbh(weights));
  }

  static void store_rows(float* to, const Vector (&rows)[kPack]) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rows[0]));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rows[1]));
    Simd::store(to, _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16))));
  }

  // Stores two vectors of a row as a line. Sums of pairs are never denormal, which would become 0.
  static void store_panel(Bf16* to, Vector first, Vector second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }

  struct FiniteCheck {
    __mmask32 special = 0;
    void put(Vector words) {
      const __m512i exponents = _mm512_set1_epi16(0x7f80);
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(words), exponents);
      special = static_cast<__mmask32>(special | _mm512_cmpeq_epi16_mask(bits, exponents));
    }
    bool finite() const { return special == 0; }
  };

 private:
  // Pairs with one element of each, from element `begin` on.
  static Vector interleave(__m512i low, __m512i high, int begin) {
    constexpr int kSecond = 1 << 21;  // element 0 of the other operand, in the upper half
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_add_epi32(lane, _mm512_set1_epi32(begin));
    const __m512i both = _mm512_or_si512(
        from, _mm512_or_si512(_mm512_slli_epi32(from, 16), _mm512_set1_epi32(kSecond)));
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, both, high));
  }
};
