// The counters of a role: of steps, items and slots, of the ring that dO goes round in, and of
// panels.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

// The counters from which a role's stages, slots and parities follow. Only their lowest bits
// matter, so one register holds all of them where registers are few.
template <bool kPacked>
struct Counters {
  uint32_t index = 0;  // number of the step
  uint32_t items = 0;
  uint32_t slot_uses = 0;
  uint32_t holds = 0;
};
template <>
struct Counters<true> {
  uint32_t index : 8;
  uint32_t items : 8;
  uint32_t slot_uses : 8;
  uint32_t holds : 1;  // something is put off to the next step
  __device__ __forceinline__ Counters() : index(0), items(0), slot_uses(0), holds(0) {}
};

// By products: the stage in which the first unit of dO of a step comes. Units go round in a ring.
// Its length need not be a multiple of the units of a step.
template <class Traits>
struct DoutRing {
  uint32_t stage : 8;
  uint32_t parity : 8;
  __device__ __forceinline__ DoutRing() : stage(0), parity(0) {}
  __device__ __forceinline__ uint32_t stage_of(uint32_t unit) const {
    const uint32_t behind = stage + unit;
    return behind < Traits::kDoStages ? behind : behind - Traits::kDoStages;
  }
  __device__ __forceinline__ uint32_t parity_of(uint32_t unit) const {
    return parity ^ (stage + unit >= Traits::kDoStages);
  }
  __device__ __forceinline__ void advance() {
    parity = parity_of(Traits::kDoUnits);
    stage = stage_of(Traits::kDoUnits);
  }
};

// Returns the first panel of dQ of a step that a consumer makes. Each consumer makes every second
// panel.
__device__ __forceinline__ int first_panel(uint32_t step, int group) {
  return static_cast<int>((step + group) & 1);
}

}  // namespace flashmoe::sm90_backward
