// Register-blocked products for any instruction set, shared by attention and the mixture of
// experts.
//
// Rows go through the registers kGroupRows at a time against panels of kPanel columns, both packed
// in 32-bit words. Each step of depth broadcasts a column of scalars against a row of vectors. A
// `Product` defines what a word holds and what a step does with it.
//
// Included inside the ISA's own namespace after its `Simd`.

using Vector = Simd::Vector;

constexpr int kLanes = Simd::kLanes;
constexpr int kGroupRows = Simd::kGroupRows;
constexpr int kPanelVectors = Simd::kPanelVectors;
constexpr int kPanel = kPanelVectors * kLanes;

FLASHMOE_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
FLASHMOE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FLASHMOE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FLASHMOE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// 2^x for -1/2 <= x <= 1/2.
FLASHMOE_INLINE Vector exp2_polynomial(Vector x) {
  Vector y = Simd::broadcast(kExp2Coefficients[5]);
  y = Simd::multiply_add(y, x, Simd::broadcast(kExp2Coefficients[4]));
  y = Simd::multiply_add(y, x, Simd::broadcast(kExp2Coefficients[3]));
  y = Simd::multiply_add(y, x, Simd::broadcast(kExp2Coefficients[2]));
  y = Simd::multiply_add(y, x, Simd::broadcast(kExp2Coefficients[1]));
  return Simd::multiply_add(y, x, Simd::broadcast(1.0f));
}

// e^(2x): a power of two times a polynomial (relative error below 1.6e-7) in the rest of the
// exponent, for an x whose power of two exists. e^0 is 1. NaN stays NaN: the last product is one of
// floats, since adding to the exponent bits of a NaN can make it a number.
constexpr float kExpOfTwiceFactor = 2.0f * kLog2E;

FLASHMOE_INLINE Vector exp_of_twice_in_range(Vector x) {
  const Vector factor = Simd::broadcast(kExpOfTwiceFactor);
  const Vector shifted = Simd::multiply_add(x, factor, Simd::broadcast(kRoundToInteger));
  const Vector minus_whole = Simd::subtract(Simd::broadcast(kRoundToInteger), shifted);
  const Vector rest = Simd::multiply_add(x, factor, minus_whole);
  return Simd::multiply(exp2_polynomial(rest), Simd::power_of_two(shifted));
}

// The same for any x <= 0: 0 below 2^-126.5. max and min return their second operand if one is NaN.
FLASHMOE_INLINE Vector exp_of_twice_nonpositive(Vector x) {
  return exp_of_twice_in_range(Simd::max(Simd::broadcast(kExp2Floor / kExpOfTwiceFactor), x));
}

// The same for any x: infinite above 2^127.5.
FLASHMOE_INLINE Vector exp_of_twice(Vector x) {
  x = Simd::max(Simd::broadcast(kExp2Floor / kExpOfTwiceFactor), x);
  return exp_of_twice_in_range(Simd::min(Simd::broadcast(kExp2Ceiling / kExpOfTwiceFactor), x));
}

// tanh(x) in fp32 with a relative error of 4e-7 (core/tanh.h). NaN stays NaN.
FLASHMOE_INLINE Vector tanh_of(Vector x) {
  using namespace tanh_fit;
  x = Simd::min(Simd::broadcast(kClamp), Simd::max(Simd::broadcast(-kClamp), x));
  const Vector u = Simd::multiply(x, x);
  Vector p = Simd::multiply_add(Simd::broadcast(kP4), u, Simd::broadcast(kP3));
  p = Simd::multiply_add(p, u, Simd::broadcast(kP2));
  p = Simd::multiply_add(p, u, Simd::broadcast(kP1));
  p = Simd::multiply_add(p, u, Simd::broadcast(kP0));
  Vector q = Simd::multiply_add(Simd::broadcast(kQ4), u, Simd::broadcast(kQ3));
  q = Simd::multiply_add(q, u, Simd::broadcast(kQ2));
  q = Simd::multiply_add(q, u, Simd::broadcast(kQ1));
  q = Simd::multiply_add(q, u, Simd::broadcast(kQ0));
  return Simd::divide(Simd::multiply(x, p), q);
}

// Fills vectors with what `load` gives from lane i on, for `rest` existing lanes; 0 after them.
template <int kVectors, typename Load>
FLASHMOE_INLINE void load_vectors(int64_t n, Vector (&to)[kVectors], Load load) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t rest = n - v * kLanes;
    to[v] = rest > 0 ? load(v * kLanes, rest) : Simd::zero();
  }
}

// Products in fp32, one per 32-bit word; T is widened while loading.
template <typename T>
struct Fp32Product {
  using Element = T;
  static constexpr int kPack = 1;  // elements per word
  // Words of depth summed in one go. Longer sums consist of shorter ones, so that their rounding
  // errors grow with the root of this instead of the total length. Errors of scores matter more,
  // since they are exponentiated.
  static constexpr int64_t kScoreRun = sizeof(T) == sizeof(float) ? 32 : 64;
  static constexpr int64_t kValueRun = 64;

  static Vector multiply_add(Vector a, Vector b, Vector sum) {
    return Simd::multiply_add(a, b, sum);
  }
  // Loads the first n elements at p, packed into words, padded with 0.
  static Vector load_words(const T* p, int64_t n) { return Simd::load_first(p, n); }
  // Loads words with row `first` of V (and, with pairs, row `second`, which may be null).
  static Vector load_values(const T* first, const T* /*second*/, int64_t n) {
    return Simd::load_first(first, n);
  }
  // The same for values that are two elements apart.
  static Vector load_every_second_value(const T* p, const T* /*second*/, int64_t n) {
    return Simd::load_every_second(p, n);
  }
  // load_values for consecutive vectors with n columns in total, padded with 0.
  template <int kVectors>
  FLASHMOE_INLINE static void load_columns(const T* first, const T* second, int64_t n,
                                           Vector (&words)[kVectors]) {
    load_vectors<kVectors>(n, words, [=](int64_t i, int64_t rest) {
      return load_values(first + i, second + i, rest);
    });
  }
  static Vector keep_first_of_pair(Vector words) { return words; }
  static Vector keep_second_of_pair(Vector words) { return words; }
  static void store_weights(float* row, int64_t key, Vector weights) {
    Simd::store(row + key, weights);
  }
  // Stores words of kPack rows, one column each.
  static void store_rows(float* to, const Vector (&rows)[kPack]) { Simd::store(to, rows[0]); }

  // Detects NaN and infinity among the words put into it: then 0 * word is not 0.
  struct FiniteCheck {
    Vector sum = Simd::zero();
    void put(Vector words) { sum = Simd::multiply_add(words, Simd::zero(), sum); }
    bool finite() const { return Simd::sum_of(sum) == 0.0f; }
  };
};

// sums[r][v] += a[r] * b[v] over `steps` words of depth, for kRows rows and kVectors vectors.
template <typename Product, int kRows, int kVectors, int kRowStride, int kStepStride>
FLASHMOE_INLINE void multiply_accumulate(const float* a, const float* b, int64_t steps,
                                         Vector (&sums)[kRows][kVectors]) {
  for (int64_t step = 0; step < steps; ++step) {
    Vector columns[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) columns[v] = Simd::load(b + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vector row = Simd::load_broadcast(a + r * kRowStride);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Product::multiply_add(row, columns[v], sums[r][v]);
      }
    }
    a += kStepStride;
    b += kPanel;
  }
}

// Does nothing between the steps of a product.
struct Nothing {
  static constexpr int64_t kEverySteps = 0;  // never called
  void operator()() const {}
};

// Computes the whole product of one panel. `first` gets row, vector and sum of the first run and
// stores the sum, also without steps; `later` adds the sum of another run. `meanwhile` is called
// every Meanwhile::kEverySteps steps.
template <typename Product, int kRows, int kVectors, int kRowStride, int kStepStride,
          typename First, typename Later, typename Meanwhile = Nothing>
FLASHMOE_INLINE void multiply_panel(const float* a, const float* b, int64_t steps, int64_t run,
                                    First first, Later later, Meanwhile meanwhile = {}) {
  int64_t step = 0;
  do {
    Vector sums[kRows][kVectors];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Simd::zero();
    }
    constexpr int64_t kEvery = Meanwhile::kEverySteps;
    if constexpr (kEvery == 0) {
      multiply_accumulate<Product, kRows, kVectors, kRowStride, kStepStride>(
          a + step * kStepStride, b + step * kPanel, smaller(run, steps - step), sums);
    } else {
      const int64_t end = smaller(step + run, steps);
      for (int64_t i = step; i < end; i += kEvery) {
        multiply_accumulate<Product, kRows, kVectors, kRowStride, kStepStride>(
            a + i * kStepStride, b + i * kPanel, smaller(kEvery, end - i), sums);
        meanwhile();
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (step == 0) {
          first(r, v, sums[r][v]);
        } else {
          later(r, v, sums[r][v]);
        }
      }
    }
    step += run;
  } while (step < steps);
}

// Transposes kLanes words of up to kLanes rows, from element `begin` of `dim` on: lane j of
// block[i] is word i of row j.
template <typename Product>
FLASHMOE_INLINE void load_block(const typename Product::Element* const (&from)[kLanes],
                                int64_t rows, int64_t begin, int64_t dim, Vector (&block)[kLanes]) {
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    block[j] = j < rows ? Product::load_words(from[j] + begin, dim - begin) : Simd::zero();
  }
  Simd::transpose(block);
}

// Product::load_columns for columns that are two apart.
template <typename Product, int kVectors>
FLASHMOE_INLINE void load_every_second_column(const typename Product::Element* first,
                                              const typename Product::Element* second, int64_t n,
                                              Vector (&words)[kVectors]) {
  load_vectors<kVectors>(n, words, [=](int64_t i, int64_t rest) {
    return Product::load_every_second_value(first + 2 * i, second + 2 * i, rest);
  });
}
