// The Python functions of the mixture of experts.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_moe(nanobind::module_& module);  // with those below
void define_fused_moe(nanobind::module_& module);
void define_moe_gradients(nanobind::module_& module);

}  // namespace flashmoe
