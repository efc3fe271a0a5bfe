// flash_attention as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_attention(nanobind::module_& module);

}  // namespace flashmoe
