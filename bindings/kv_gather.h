// The Python function that gathers keys and values of a cache.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_kv_gather(nanobind::module_& module);

}  // namespace flashmoe
