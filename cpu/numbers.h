// Numbers of any dtype to fp32 and back, where time does not count.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace flashmoe::cpu {

// `count` elements from element `first` on.
void widen(const void* from, Dtype dtype, int64_t first, int64_t count, float* to);

// The other way, rounded to nearest even, to element `first` of `to` and those behind it.
void narrow(const float* from, int64_t count, void* to, Dtype dtype, int64_t first);

}  // namespace flashmoe::cpu
