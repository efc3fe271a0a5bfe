#include "cpu/e4m3.h"

namespace flashmoe::cpu {
namespace {

// One bit of sign, four of exponent with a bias of 7, and three of fraction.
constexpr float value_of(int bits) {
  const int exponent = bits >> 3 & 15;
  const int fraction = bits & 7;
  float magnitude = 0.0f;
  if ((bits & 0x7f) == 0x7f) {
    magnitude = __builtin_nanf("");
  } else if (exponent == 0) {
    magnitude = static_cast<float>(fraction) / 512.0f;
  } else {
    magnitude = static_cast<float>(8 + fraction) * static_cast<float>(1 << exponent) / 1024.0f;
  }
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

#define FLASHMOE_4(i) value_of(i), value_of(i + 1), value_of(i + 2), value_of(i + 3)
#define FLASHMOE_16(i) FLASHMOE_4(i), FLASHMOE_4(i + 4), FLASHMOE_4(i + 8), FLASHMOE_4(i + 12)
#define FLASHMOE_64(i) FLASHMOE_16(i), FLASHMOE_16(i + 16), FLASHMOE_16(i + 32), FLASHMOE_16(i + 48)

alignas(64) const
    float kE4m3Values[256] = {FLASHMOE_64(0), FLASHMOE_64(64), FLASHMOE_64(128), FLASHMOE_64(192)};

#undef FLASHMOE_64
#undef FLASHMOE_16
#undef FLASHMOE_4

}  // namespace flashmoe::cpu
