// What the library says about itself: build, devices, threads, log, last launch.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

void define_library(nanobind::module_& module);

}  // namespace flashmoe
