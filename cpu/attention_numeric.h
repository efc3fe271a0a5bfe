// Storage types and constants for the kernels of every instruction set. Holds no code that could be
// emitted as a function, since it is compiled with different -m flags.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/tanh.h"

#define FLASHMOE_INLINE inline __attribute__((always_inline))
// For inner loops that want all registers to themselves.
#define FLASHMOE_NOINLINE __attribute__((noinline))

namespace flashmoe::cpu {

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

constexpr int64_t kScratchAlignment = 64;
constexpr float kLog2E = 1.44269504f;

// x + kRoundToInteger has the rounded x in its low bits, for |x| < 2^22, plus the bias of an
// exponent.
constexpr float kRoundToInteger = 0x1.8p23f + 127.0f;
constexpr float kExp2Floor = -127.0f;   // its biased exponent is 0's
constexpr float kExp2Ceiling = 128.0f;  // and this one's is infinity's
// 2^x on [-1/2, 1/2]: the polynomial of degree 5 that is 1 at 0 with the least maximum relative
// error.
constexpr float kExp2Coefficients[6] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                                        0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
constexpr int kTileRows = 192;  // the most rows of a tile; they share one packing of K and V

}  // namespace flashmoe::cpu
