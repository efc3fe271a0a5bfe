// The kernel families of attention forward. The most general of each device comes last.
#pragma once

#include "core/backends.h"

namespace flashmoe {

// A family that divides a call among others (core/ops/attention/mixed.cpp). In the list it stands
// between the families for its parts with few queries and those for the rest.
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
