// The kernel families of attention forward, of each device the least particular last.
#pragma once

#include "core/backends.h"

namespace flashmoe {

// A family that divides a call among others (core/ops/attention/mixed.cpp), which stands between
// those that serve its parts with few queries and those that serve the others.
#if FLASHMOE_WITH_CUDA
extern const AttentionFamily kMixedAttention;
#endif

inline constexpr const AttentionFamily* kAttentionFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kSm89FewRowsAttention, &kSm89DecodeAttention, &kMixedAttention,
#endif
#if FLASHMOE_WITH_SM90
    &kSm90MlaAttention,     &kSm90Attention,
#endif
#if FLASHMOE_WITH_CUDA
    &kSm89Attention,
#endif
    &kCpuAttention,
};

}  // namespace flashmoe
