// Division by a number that the host knows.
#pragma once

#include <cstdint>

namespace flashmoe {

// Division of numbers below 2^31: a product with the reciprocal, which is rounded up to 2^-(31 +
// ceil log2). It is exact for these numbers.
struct Divisor {
  uint32_t value;
  uint32_t multiplier;
  uint32_t shift;

  static Divisor of(uint32_t value) {
    Divisor made = {value, 0, 0};
    while ((uint64_t{1} << made.shift) < value) ++made.shift;
    if (made.shift == 0) return made;  // divisor 1, or an extent of 0 in a call that does nothing
    const uint64_t power = uint64_t{1} << (31 + made.shift);
    made.multiplier = static_cast<uint32_t>((power + value - 1) / value);
    --made.shift;
    return made;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ int number() const { return static_cast<int>(value); }
  __device__ __forceinline__ int quotient(int number) const {
    const uint32_t n = static_cast<uint32_t>(number);
    return static_cast<int>(multiplier == 0 ? n : __umulhi(n, multiplier) >> shift);
  }
#else  // for tests of code in kernels that divides
  int quotient(int number) const {
    const uint32_t n = static_cast<uint32_t>(number);
    if (multiplier == 0) return number;
    return static_cast<int>(static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) >> shift);
  }
#endif
};

}  // namespace flashmoe
