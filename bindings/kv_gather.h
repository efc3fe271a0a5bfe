// Gathering keys and values of a cache as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_kv_gather(nanobind::module_& module);

}  // namespace flashmoe
