// The options of the mixture of experts that the C ABI has as numbers, by the names that XLA's custom
// calls give them: Python writes them into a call, and its handler reads them back.
#pragma once

#include <cstdint>

#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"

namespace flashmoe {

template <class Params>
struct IntegerOption {
  const char* name;
  int32_t Params::* member;
};

template <class Params>
struct RealOption {
  const char* name;
  float Params::* member;
};

// Calls work(option) for each.
template <class Work>
void for_each_number(const flashmoe_moe_route_params&, const Work& work) {
  using Params = flashmoe_moe_route_params;
  work(IntegerOption<Params>{"scoring", &Params::scoring});
  work(IntegerOption<Params>{"renormalize", &Params::renormalize});
  work(IntegerOption<Params>{"num_groups", &Params::num_groups});
  work(IntegerOption<Params>{"top_groups", &Params::top_groups});
  work(RealOption<Params>{"scale", &Params::scale});
}

template <class Work>
void for_each_number(const flashmoe_moe_forward_params&, const Work& work) {
  using Params = flashmoe_moe_forward_params;
  work(IntegerOption<Params>{"gate", &Params::gate});
  work(IntegerOption<Params>{"activation", &Params::activation});
  work(IntegerOption<Params>{"weight_on_input", &Params::weight_on_input});
  work(RealOption<Params>{"alpha", &Params::alpha});
  work(RealOption<Params>{"limit", &Params::limit});
  work(RealOption<Params>{"up_offset", &Params::up_offset});
}

template <class Work>
void for_each_number(const flashmoe_grouped_product_params&, const Work&) {}

template <class Work>
void for_each_number(const flashmoe_fused_moe_params&, const Work& work) {
  using Params = flashmoe_fused_moe_params;
  work(IntegerOption<Params>{"top_k", &Params::top_k});
  work(IntegerOption<Params>{"scoring", &Params::scoring});
  work(IntegerOption<Params>{"renormalize", &Params::renormalize});
  work(IntegerOption<Params>{"num_groups", &Params::num_groups});
  work(IntegerOption<Params>{"top_groups", &Params::top_groups});
  work(RealOption<Params>{"scale", &Params::scale});
  work(IntegerOption<Params>{"gate", &Params::gate});
  work(IntegerOption<Params>{"activation", &Params::activation});
  work(IntegerOption<Params>{"weight_on_input", &Params::weight_on_input});
  work(RealOption<Params>{"alpha", &Params::alpha});
  work(RealOption<Params>{"limit", &Params::limit});
  work(RealOption<Params>{"up_offset", &Params::up_offset});
}

// Where the kernel's name goes; nullptr for an operation that takes none.
inline const char** kernel_of(flashmoe_moe_route_params*) { return nullptr; }
inline const char** kernel_of(flashmoe_moe_forward_params* params) { return &params->kernel; }
inline const char** kernel_of(flashmoe_grouped_product_params* params) { return &params->kernel; }
inline const char** kernel_of(flashmoe_fused_moe_params* params) { return &params->kernel; }

}  // namespace flashmoe
