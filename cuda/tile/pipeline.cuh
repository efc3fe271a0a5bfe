// The position of a role in a ring of stages. Each stage has barriers that signal full and empty.
#pragma once

#include <cstdint>

namespace flashmoe {

template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;  // of the barriers' phase

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
};

}  // namespace flashmoe
