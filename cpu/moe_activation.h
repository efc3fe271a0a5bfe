// Activations of a mixture of experts, a vector at a time, for any instruction set. NaN stays NaN.
// Included after cpu/products.h.

// e^x, a normal number: x is clamped to +-kExpLimit. The fraction of x log2(e) has one rounding, so
// the relative error does not grow with x and stays below 2.5e-7.
FLASHMOE_INLINE Vector exp_of(Vector x) {
  constexpr float kExpLimit = 87.0f;
  constexpr float kLog2ERest = 1.925963033e-8f;  // log2(e) - kLog2E
  x = Simd::min(Simd::broadcast(kExpLimit), Simd::max(Simd::broadcast(-kExpLimit), x));
  const Vector log2e = Simd::broadcast(kLog2E);
  const Vector shifted = Simd::multiply_add(x, log2e, Simd::broadcast(kRoundToInteger));
  const Vector whole = Simd::subtract(shifted, Simd::broadcast(kRoundToInteger));
  Vector rest = Simd::multiply_add(x, log2e, Simd::subtract(Simd::zero(), whole));
  rest = Simd::multiply_add(x, Simd::broadcast(kLog2ERest), rest);
  return Simd::multiply(exp2_polynomial(rest), Simd::power_of_two(shifted));
}

FLASHMOE_INLINE Vector sigmoid_of(Vector x) {
  const Vector power = exp_of(Simd::subtract(Simd::zero(), x));
  return Simd::divide(Simd::broadcast(1.0f), Simd::add(power, Simd::broadcast(1.0f)));
}

// erf(x) = x P(x^2) / Q(x^2) for |x| <= kClamp; beyond that it rounds to +-1. The fit has the least
// maximum relative error (2.1e-8) among quotients of these degrees.
namespace erf_fit {
constexpr float kClamp = 3.95f;
constexpr float kP[6] = {0x1.20dd74p+0f, 0x1.884bccp-3f,  0x1.b12802p-5f,
                         0x1.f3257cp-9f, 0x1.2a8478p-12f, 0x1.0fe99cp-19f};
constexpr float kQ[6] = {1.0f,           0x1.01950ap-1f,  0x1.d53cb4p-4f,
                         0x1.ed53a8p-7f, 0x1.32e67ap-10f, 0x1.3d5b36p-15f};
}  // namespace erf_fit

// Exactly +-1 beyond kClamp: an ulp less would leave an ulp of a large negative z in z (1 + erf) /
// 2.
FLASHMOE_INLINE Vector erf_of(Vector x) {
  using namespace erf_fit;
  const Vector one = Simd::broadcast(1.0f);
  const Vector cut = Simd::min(Simd::broadcast(kClamp), Simd::max(Simd::broadcast(-kClamp), x));
  const Vector u = Simd::multiply(cut, cut);
  Vector p = Simd::broadcast(kP[5]);
  Vector q = Simd::broadcast(kQ[5]);
#pragma GCC unroll 5
  for (int i = 4; i >= 0; --i) {
    p = Simd::multiply_add(p, u, Simd::broadcast(kP[i]));
    q = Simd::multiply_add(q, u, Simd::broadcast(kQ[i]));
  }
  constexpr float kFar = 1e7f;  // the least number beyond kClamp is 2.4e-7 from it
  const Vector beyond = Simd::multiply(Simd::subtract(x, cut), Simd::broadcast(kFar));
  const Vector sum = Simd::add(Simd::divide(Simd::multiply(cut, p), q), beyond);
  return Simd::min(one, Simd::max(Simd::subtract(Simd::zero(), one), sum));
}

FLASHMOE_INLINE Vector activate(const MoeActivation& activation, Vector z) {
  switch (activation.function) {
    case FLASHMOE_ACTIVATION_SILU:
      return Simd::multiply(z, sigmoid_of(Simd::multiply(z, Simd::broadcast(activation.alpha))));
    case FLASHMOE_ACTIVATION_GELU: {
      constexpr float kSqrtHalf = 0.707106781f;
      const Vector half = Simd::multiply(z, Simd::broadcast(0.5f));
      return Simd::multiply_add(half, erf_of(Simd::multiply(z, Simd::broadcast(kSqrtHalf))), half);
    }
    // z (1 + tanh(x)) / 2 = z sigmoid(2 x): a small 1 + tanh(x) would lose its digits.
    case FLASHMOE_ACTIVATION_GELU_TANH: {
      constexpr float kTwoSqrtTwoOverPi = 1.595769122f;
      constexpr float kCubic = 0.044715f;
      constexpr float kLeast = -20.0f;  // GELU_TANH is 0 below this, the sigmoid is not quite
      const Vector u = Simd::multiply(z, z);
      const Vector inner = Simd::multiply_add(Simd::multiply(u, z), Simd::broadcast(kCubic), z);
      return Simd::multiply(Simd::max(Simd::broadcast(kLeast), z),
                            sigmoid_of(Simd::multiply(inner, Simd::broadcast(kTwoSqrtTwoOverPi))));
    }
    case FLASHMOE_ACTIVATION_RELU: return Simd::max(Simd::zero(), z);
    case FLASHMOE_ACTIVATION_RELU2: {
      const Vector positive = Simd::max(Simd::zero(), z);
      return Simd::multiply(positive, positive);
    }
  }
  return z;
}

// act(z) and its slope at z.
struct Activated {
  Vector value;
  Vector slope;
};

// Beyond +-kFlat slopes are those of a straight line, and factors of vanished terms must not
// overflow.
FLASHMOE_INLINE Activated activate_with_slope(const MoeActivation& activation, Vector z) {
  constexpr float kFlat = 100.0f;
  const Vector one = Simd::broadcast(1.0f);
  const auto cut_to = [](float most, Vector x) {
    return Simd::min(Simd::broadcast(most), Simd::max(Simd::broadcast(-most), x));
  };
  switch (activation.function) {
    case FLASHMOE_ACTIVATION_SILU: {  // s + alpha z s (1 - s)
      const Vector x = Simd::multiply(z, Simd::broadcast(activation.alpha));
      const Vector s = sigmoid_of(x);
      const Vector rest = Simd::multiply(cut_to(kFlat, x), Simd::subtract(one, s));
      return {Simd::multiply(z, s), Simd::multiply_add(s, rest, s)};
    }
    case FLASHMOE_ACTIVATION_GELU: {  // Phi(z) + z phi(z)
      constexpr float kSqrtHalf = 0.707106781f;
      constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
      constexpr float kFar = 20.0f;             // phi is 0 beyond
      const Vector half = Simd::broadcast(0.5f);
      const Vector half_z = Simd::multiply(z, half);
      const Vector erf = erf_of(Simd::multiply(z, Simd::broadcast(kSqrtHalf)));
      const Vector near = cut_to(kFar, z);
      const Vector power =
          exp_of(Simd::multiply(Simd::multiply(near, near), Simd::broadcast(-0.5f)));
      const Vector density = Simd::multiply(Simd::multiply(near, power), Simd::broadcast(kDensity));
      return {Simd::multiply_add(half_z, erf, half_z),
              Simd::add(Simd::multiply_add(half, erf, half), density)};
    }
    case FLASHMOE_ACTIVATION_GELU_TANH: {  // S + z S (1 - S) (2 x)'
      constexpr float kTwoSqrtTwoOverPi = 1.595769122f;
      constexpr float kCubic = 0.044715f;
      constexpr float kFar = 20.0f;
      const Vector near = cut_to(kFar, z);
      const Vector u = Simd::multiply(near, near);
      const Vector inner =
          Simd::multiply_add(Simd::multiply(u, near), Simd::broadcast(kCubic), near);
      const Vector s = sigmoid_of(Simd::multiply(inner, Simd::broadcast(kTwoSqrtTwoOverPi)));
      const Vector steep =
          Simd::multiply(Simd::multiply_add(u, Simd::broadcast(3.0f * kCubic), one),
                         Simd::multiply(near, Simd::broadcast(kTwoSqrtTwoOverPi)));
      const Vector rest = Simd::multiply(steep, Simd::subtract(one, s));
      return {Simd::multiply(Simd::max(Simd::broadcast(-kFar), z), s),
              Simd::multiply_add(s, rest, s)};
    }
    case FLASHMOE_ACTIVATION_RELU: {
      const Vector slope = Simd::min(one, Simd::max(one, z));  // 1, or a NaN
      return {Simd::max(Simd::zero(), z), Simd::zero_where_at_most(z, Simd::zero(), slope)};
    }
    case FLASHMOE_ACTIVATION_RELU2: {
      const Vector positive = Simd::max(Simd::zero(), z);
      return {Simd::multiply(positive, positive), Simd::add(positive, positive)};
    }
  }
  return {z, one};
}

// Clamps to the limit from above; NaN stays NaN.
FLASHMOE_INLINE Vector cut_above(const MoeActivation& activation, Vector x) {
  return Simd::min(Simd::broadcast(activation.limit), x);
}
FLASHMOE_INLINE Vector cut(const MoeActivation& activation, Vector x) {
  return Simd::max(Simd::broadcast(-activation.limit), cut_above(activation, x));
}

// The gradient through the clamp: 0 beyond the limit.
FLASHMOE_INLINE Vector through_cut_above(const MoeActivation& activation, Vector x, Vector dx) {
  return Simd::zero_where_greater(x, Simd::broadcast(activation.limit), dx);
}
FLASHMOE_INLINE Vector through_cut(const MoeActivation& activation, Vector x, Vector dx) {
  return Simd::zero_where_greater(Simd::broadcast(-activation.limit), x,
                                  through_cut_above(activation, x, dx));
}
