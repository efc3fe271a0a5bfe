// The options of a layer of experts, in either direction, and of routing.
#pragma once

#include "core/option.h"

namespace flashmoe {

inline constexpr const char* kMoeGates[] = {"gate_up", "up_gate", "interleaved", "separate",
                                            "none"};
inline constexpr const char* kMoeActivations[] = {"silu", "gelu", "gelu_tanh", "relu", "relu2"};
inline constexpr const char* kMoeScorings[] = {"softmax", "topk_softmax", "sigmoid"};

template <class Params>
inline constexpr Option<Params> kLayerOptions[] = {
    Option<Params>::choice("gate", &Params::gate, kMoeGates),
    Option<Params>::choice("activation", &Params::activation, kMoeActivations),
    Option<Params>::finite("alpha", &Params::alpha),
    Option<Params>::positive("limit", &Params::limit, "none"),
    Option<Params>::finite("up_offset", &Params::up_offset),
    Option<Params>::flag("weight_on_input", &Params::weight_on_input),
};

}  // namespace flashmoe
