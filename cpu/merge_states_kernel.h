// The interface between the launcher and the per-ISA kernels of merging partial attention results:
// one row of work and its kernel. Translation units compiled with different -m flags include this
// file, so it holds plain declarations only: no inline function, and no standard header that has
// any.
#pragma once

#include <stdint.h>

#include "core/dtype.h"

namespace flashmoe::cpu {

// Partials that go through the registers together.
constexpr int32_t kMergedAtOnce = 32;

// out = prior_weight * prior + sum of weights[i] * x[i], in order; 0 without terms.
template <class Real>
struct MergeRow {
  const void* prior;  // nullptr: none
  Dtype prior_dtype;
  Real prior_weight;
  int32_t count;
  const void* x[kMergedAtOnce];
  Real weights[kMergedAtOnce];
  void* out;
  Dtype out_dtype;
  int64_t columns;
};

// The kernel of one instruction set for one dtype of partials.
struct MergeKernel {
  const char* isa;
  void (*merge)(const MergeRow<float>& row);
};

// One per instruction set, indexed by Dtype.
extern const MergeKernel kScalarMerge[3];
#if FLASHMOE_CPU_X86
extern const MergeKernel kAvx2Merge[3];
extern const MergeKernel kAvx512Merge[3];
#endif

}  // namespace flashmoe::cpu
