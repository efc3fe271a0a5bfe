// The numbers of fp8 (e4m3). Included by translation units compiled with different -m flags, so it
// holds plain declarations only.
#pragma once

namespace flashmoe::cpu {

// By their bits: NaN of 0x7f and 0xff, no infinity.
extern const float kE4m3Values[256];

}  // namespace flashmoe::cpu
