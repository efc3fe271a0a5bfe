// The interface between the launcher and the per-ISA kernels of appending to a cache: the heads of
// one row and the kernels that rotate them. Translation units compiled with different -m flags
// include this file, so it holds plain declarations only: no inline function, and no standard
// header that has any.
#pragma once

#include <stdint.h>

#include "core/dtype.h"

namespace flashmoe::cpu {

// The first 2 * pairs numbers of each head, in one dtype. They go to `to`, which may be `from`.
// Steps are bytes between heads.
struct RotatedHeads {
  const void* from;
  int64_t from_step;
  void* to;
  int64_t to_step;
  int64_t heads;
  const void* cos;  // [pairs], fp32 or the heads' dtype
  const void* sin;
  int64_t pairs;
  bool interleaved;  // pairs are neighbours; else one number from each half
};

// The kernel of one instruction set for one dtype of heads and one dtype of cosines.
struct RotationKernel {
  const char* isa;
  void (*rotate)(const RotatedHeads& heads);
};

// One per instruction set, indexed by the heads' Dtype and whether cosines are fp32.
extern const RotationKernel kScalarRotation[3][2];
#if FLASHMOE_CPU_X86
extern const RotationKernel kAvx2Rotation[3][2];
extern const RotationKernel kAvx512Rotation[3][2];
#endif

}  // namespace flashmoe::cpu
