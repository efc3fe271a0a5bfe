// The constants of the few-row kernels: those of their products, and of clusters. The plan, the
// launch and the device code have no other source.
#pragma once

#include "cuda/attention/few_rows/traits.cuh"
#include "cuda/attention/sm89_few_rows/params.h"

namespace flashmoe::sm89_few_rows {

template <class Element, int kDim, int kDimV, int kRows>
struct Traits : few_rows::Traits<Element, kDim, kDimV, kRows> {
  using Base = few_rows::Traits<Element, kDim, kDimV, kRows>;
  static_assert(Base::kUnits >= kMaxCluster, "the blocks of a cluster take equal slices");
  static_assert(Base::shared_bytes(kMaxWarps, kMaxCluster) <= 99 * 1024, "of an sm_89 block");
};

}  // namespace flashmoe::sm89_few_rows
