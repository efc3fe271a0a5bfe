// The check of the tables of sequences as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_check_sequences(nanobind::module_& module);

}  // namespace flashmoe
