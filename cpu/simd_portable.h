// Four 32-bit lanes in the compiler's vector extension, for the platform's baseline. Included
// inside the namespace of one translation unit.

struct Simd {
  using Vector = float __attribute__((vector_size(16)));
  using Bits = int32_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kGroupRows = 4;  // 4 x 2 accumulators: no spills with 16 registers
  static constexpr int kPanelVectors = 2;
  static constexpr int kDotRows = 2;     // 2 x 4 accumulators, 4 operands, 4 registers to spare
  static constexpr bool kFused = false;  // multiply_add rounds once

  static Vector zero() { return Vector{}; }
  static Vector broadcast(float x) { return Vector{x, x, x, x}; }
  static Vector load_broadcast(const float* p) { return broadcast(*p); }
  static Vector load(const float* p) {
    Vector x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, Vector x) { __builtin_memcpy(p, &x, sizeof x); }
  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector subtract(Vector a, Vector b) { return a - b; }
  static Vector multiply(Vector a, Vector b) { return a * b; }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
  static Vector divide(Vector a, Vector b) { return a / b; }
  // Returns x, and keeps the compiler from fusing its producer with its consumer.
  static Vector rounded(Vector x) {
#ifdef __aarch64__
    asm("" : "+w"(x));
#endif
    return x;
  }
  // Returns the second if one is NaN.
  static Vector max(Vector a, Vector b) { return select(a > b, a, b); }
  static Vector min(Vector a, Vector b) { return select(a < b, a, b); }
  // x, but 0 where a > b, or where a <= b. Comparisons with NaN are false.
  static Vector zero_where_greater(Vector a, Vector b, Vector x) {
    return select(a > b, Vector{}, x);
  }
  static Vector zero_where_at_most(Vector a, Vector b, Vector x) {
    return select(a <= b, Vector{}, x);
  }
  static float sum_of(Vector x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float max_of(Vector x) {
    const float a = x[0] > x[2] ? x[0] : x[2];
    const float b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
  }

  // to[i] += the sum of x[i], for i < 4.
  static void add_sums_of_four(const Vector* x, float* to) {
    for (int i = 0; i < 4; ++i) to[i] += sum_of(x[i]);
  }

  // x in the first n lanes, `other` in the rest.
  static Vector first_or(Vector x, int64_t n, Vector other) {
    const int32_t count = static_cast<int32_t>(n > kLanes ? kLanes : n);
    return select(Bits{0, 1, 2, 3} < Bits{count, count, count, count}, x, other);
  }

  // The first n values at p as fp32, 0 in the rest; reads nothing beyond them.
  template <typename T>
  static Vector load_first(const T* p, int64_t n) {
    Vector x = {};
    for (int lane = 0; lane < kLanes && lane < n; ++lane) x[lane] = to_float(p[lane]);
    return x;
  }

  // The first n of every second value from p on; reads nothing beyond the last of them.
  template <typename T>
  static Vector load_every_second(const T* p, int64_t n) {
    Vector x = {};
    for (int lane = 0; lane < kLanes && lane < n; ++lane) x[lane] = to_float(p[2 * lane]);
    return x;
  }

  // Lanes 1, 0, 3, 2.
  static Vector swap_neighbours(Vector x) { return Vector{x[1], x[0], x[3], x[2]}; }
  // Each lane of the first half twice, and of the second.
  static Vector twice_low(Vector x) { return Vector{x[0], x[0], x[1], x[1]}; }
  static Vector twice_high(Vector x) { return Vector{x[2], x[2], x[3], x[3]}; }
  // a - b in lanes 0 and 2, a + b in the others.
  static Vector subtract_add(Vector a, Vector b) {
    return Vector{a[0] - b[0], a[1] + b[1], a[2] - b[2], a[3] + b[3]};
  }

  // Stores the first n lanes, rounded to nearest even.
  template <typename T>
  static void store_first(T* p, Vector x, int64_t n) {
    for (int lane = 0; lane < kLanes && lane < n; ++lane) from_float(x[lane], &p[lane]);
  }

  // 2^n for an integer n, or 0 for n = kExp2Floor. `shifted` is n + kRoundToInteger.
  static Vector power_of_two(Vector shifted) {
    using Words = uint32_t __attribute__((vector_size(16)));  // so that bits may be shifted out
    return reinterpret_cast<Vector>(reinterpret_cast<Words>(shifted) << 23);
  }

  static void transpose(Vector (&r)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const float swapped = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = swapped;
      }
    }
  }

 private:
  static Vector select(Bits mask, Vector a, Vector b) {
    return reinterpret_cast<Vector>((mask & reinterpret_cast<Bits>(a)) |
                                    (~mask & reinterpret_cast<Bits>(b)));
  }

  static float to_float(float x) { return x; }
  static float to_float(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
  static float to_float(Fp16 x) {
    constexpr int32_t kRebias = 127 - 15;
    const uint32_t sign = (x.bits & 0x8000u) << 16;
    const uint32_t exponent = (x.bits >> 10) & 0x1fu;
    const uint32_t mantissa = x.bits & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return sign != 0 ? -magnitude : magnitude;
    }
    const uint32_t rebiased = exponent == 0x1fu ? 0xffu : exponent + kRebias;
    return float_of(sign | (rebiased << 23) | (mantissa << 13));
  }

  static void from_float(float x, float* to) { *to = x; }
  static void from_float(float x, Bf16* to) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    to->bits = static_cast<uint16_t>((x != x ? bits | 0x400000u : rounded) >> 16);
  }
  static void from_float(float x, Fp16* to) {
    constexpr float kOverflow = 65520.0f;  // halfway between the largest number and 2^16
    constexpr float kSmallestNormal = 0x1p-14f;
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    const float magnitude = x < 0 ? -x : x;
    uint32_t half;
    if (x != x) {
      half = 0x7e00u;
    } else if (magnitude >= kOverflow) {
      half = 0x7c00u;
    } else if (magnitude < kSmallestNormal) {
      // Adding 2^-1 leaves the multiples of 2^-24 in the low bits, rounded to nearest even.
      half = bits_of(magnitude + 0.5f) - bits_of(0.5f);
    } else {
      const uint32_t rebiased = bits_of(magnitude) - ((127u - 15u) << 23);
      half = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
    }
    to->bits = static_cast<uint16_t>(sign | half);
  }

  static float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  static uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  }
};
