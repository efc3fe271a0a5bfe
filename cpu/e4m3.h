// The numbers of fp8 (e4m3). Translation units compiled with different -m flags include this file,
// so it holds plain declarations only.
#pragma once

namespace flashmoe::cpu {

// Indexed by their bits: 0x7f and 0xff are NaN; there is no infinity.
extern const float kE4m3Values[256];

}  // namespace flashmoe::cpu
