// Plans and launches for Python.
#pragma once

#include "bindings/fields.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

Fields describe(const flashmoe_launch& launch);
Fields describe(const flashmoe_plan& plan);

}  // namespace flashmoe
