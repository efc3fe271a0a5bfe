// The Python function that merges partial attention results.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_merge_states(nanobind::module_& module);

}  // namespace flashmoe
