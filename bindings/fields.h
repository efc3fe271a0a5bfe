// A C struct as Python sees it: its fields by name, for the package to make a dataclass of.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/typing.h>

namespace flashmoe {

using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

}  // namespace flashmoe
