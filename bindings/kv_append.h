// The Python function that appends to a cache of keys and values.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_kv_append(nanobind::module_& module);

}  // namespace flashmoe
