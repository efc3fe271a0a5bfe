// The operations of the mixture of experts as XLA's handlers run them.
#pragma once

#include "bindings/xla_ffi_abi.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::xla {

Error* moe_route(const CallFrame& frame, flashmoe_device device);
Error* moe_forward(const CallFrame& frame, flashmoe_device device);
Error* grouped_product(const CallFrame& frame, flashmoe_device device);
Error* fused_moe(const CallFrame& frame, flashmoe_device device);

}  // namespace flashmoe::xla
