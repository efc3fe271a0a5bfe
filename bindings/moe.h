// The mixture of experts as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_moe(nanobind::module_& module);  // with the one below
void define_fused_moe(nanobind::module_& module);

}  // namespace flashmoe
