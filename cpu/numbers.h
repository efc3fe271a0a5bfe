// Converts numbers of any dtype to fp32 and back, where time does not matter.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace flashmoe::cpu {

// `count` elements from element `first` on.
void widen(const void* from, Dtype dtype, int64_t first, int64_t count, float* to);

// The reverse, rounded to nearest even, to elements of `to` from `first` on.
void narrow(const float* from, int64_t count, void* to, Dtype dtype, int64_t first);

}  // namespace flashmoe::cpu
