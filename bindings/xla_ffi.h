// XLA FFI handlers, for JAX.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_xla_ffi(nanobind::module_& module);

}  // namespace flashmoe
