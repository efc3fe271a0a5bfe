// The merge of partial attention results as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_merge_states(nanobind::module_& module);

}  // namespace flashmoe
