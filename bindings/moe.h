// The mixture of experts and its plans as Python calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_moe(nanobind::module_& module);  // with the two below
void define_fused_moe(nanobind::module_& module);
void define_moe_by_name(nanobind::module_& module);

}  // namespace flashmoe
