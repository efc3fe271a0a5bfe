// tanh(x) = x P(x^2) / Q(x^2) for |x| <= kClamp; beyond that it rounds to +-1. The fit minimises
// the maximum relative error (2.1e-8) among quotients of these degrees; in fp32, with rounding, the
// error stays below 4e-7. The error is relative because a large softcap multiplies small values.
// All coefficients are positive, so nothing cancels. The backends share these; each is its own
// constant, because device code cannot index a host array.
#pragma once

namespace flashmoe::tanh_fit {

inline constexpr float kClamp = 9.02f;
inline constexpr float kP0 = 1.0f;
inline constexpr float kP1 = 0x1.12044p-3f;
inline constexpr float kP2 = 0x1.c9f84ap-9f;
inline constexpr float kP3 = 0x1.595544p-16f;
inline constexpr float kP4 = 0x1.c9a38p-27f;
inline constexpr float kQ0 = 1.0f;
inline constexpr float kQ1 = 0x1.de5768p-2f;
inline constexpr float kQ2 = 0x1.a7df1ep-6f;
inline constexpr float kQ3 = 0x1.5841c8p-12f;
inline constexpr float kQ4 = 0x1.a0b83p-21f;

}  // namespace flashmoe::tanh_fit
