// The Python function that checks the tables of sequences.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_check_sequences(nanobind::module_& module);

}  // namespace flashmoe
