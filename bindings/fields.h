// A C struct for Python: its fields by name, from which the package makes a dataclass.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/typing.h>

namespace flashmoe {

using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

}  // namespace flashmoe
