// Gradients of random calls in double precision, for the fuzzes of attention backward.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "flashmoe/flashmoe.h"
#include "fuzz_call.h"

// For outputs of magnitude 2. A logit is a sum of `dim` products, and its error enters the
// exponent.
inline double tolerance(flashmoe_dtype dtype, double scale, int64_t dim) {
  const double unit = dtype.bits >= 32 ? 2e-5 : dtype.code == FLASHMOE_DTYPE_FLOAT ? 4e-3 : 3e-2;
  return unit * (1 + scale * static_cast<double>(dim) / 64);
}

// An element's bytes become what they were before the call.
inline void restore(Argument* argument, const unsigned char* element) {
  const size_t offset = static_cast<size_t>(element - argument->block.get());
  std::memcpy(argument->block.get() + offset, argument->before.data() + offset,
              argument->tensor.dtype.bits / 8);
}

// A gradient in double precision, and the sum of the magnitudes of its terms.
class Sums {
 public:
  Sums(int64_t batch, int64_t seq, int64_t heads, int64_t dim)
      : seq_(seq),
        heads_(heads),
        dim_(dim),
        sums_(static_cast<size_t>(batch * seq * heads * dim)) {}

  void add(int64_t b, int64_t s, int64_t h, int64_t d, double term) {
    Sum& sum = sums_[index(b, s, h, d)];
    sum.value += term;
    sum.magnitude += std::fabs(term);
  }

  // Whether each element of the gradient is its sum, but for rows [b, s] of which `is_open`. What a
  // call may write is restored.
  template <class IsOpen>
  bool are(const Call& call, Argument* gradient, double unit, const IsOpen& is_open) const {
    bool right = true;
    for (size_t i = 0; i < sums_.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const int64_t d = at % dim_, h = at / dim_ % heads_, s = at / dim_ / heads_ % seq_;
      const int64_t b = at / dim_ / heads_ / seq_;
      const unsigned char* element = gradient->rank == 1 ? gradient->element(h, 0, 0, 0)
                                                         : element_at(call, *gradient, b, s, h, d);
      const double got = load(element, gradient->tensor.dtype);
      restore(gradient, element);
      const double before = load(element, gradient->tensor.dtype);
      const double expected = sums_[i].value + (call.backward.accumulate != 0 ? before : 0.0);
      const double allowed = unit * (sums_[i].magnitude + std::fabs(expected));
      // Beyond fp16 there is infinity, and below it nothing.
      const bool overflows = !(std::fabs(expected) + allowed < 65504);
      const bool close =
          sums_[i].magnitude == 0 ? got == expected : std::fabs(got - expected) <= allowed + 1e-7;
      const bool open = is_open(b, s);
      right = right && (close || overflows || open);
    }
    return right;
  }
  bool are(const Call& call, Argument* gradient, double unit) const {
    return are(call, gradient, unit, [](int64_t, int64_t) { return false; });
  }

 private:
  struct Sum {
    double value = 0;
    double magnitude = 0;
  };
  size_t index(int64_t b, int64_t s, int64_t h, int64_t d) const {
    return static_cast<size_t>(((b * seq_ + s) * heads_ + h) * dim_ + d);
  }

  int64_t seq_, heads_, dim_;
  std::vector<Sum> sums_;
};
