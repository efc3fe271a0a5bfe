// flash_attention and its plan as Python calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_attention(nanobind::module_& module);

}  // namespace flashmoe
