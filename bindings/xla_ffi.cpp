// The attention call as an XLA custom call:
//
//   (q, k, v) -> out  or  (q, k, v) -> (out, lse)
//   attributes: causal, layout (int32, the C ABI's enums), scale, softcap (float32, 0 = default),
//               window (int32, the C ABI's bits), window_left, window_right (int64), kernel
//
// and the table of all handlers; those of the mixture of experts are in xla_ffi_moe.cpp.
#include "bindings/xla_ffi.h"

#include <string>

#include "bindings/fields.h"
#include "bindings/xla_ffi_call.h"
#include "bindings/xla_ffi_moe.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

namespace nb = nanobind;

xla::Error* attention_forward(const xla::CallFrame& frame, flashmoe_device device) {
  const xla::Values& inputs = frame.arguments;
  const xla::Values& outputs = frame.results;
  const xla::Attributes& attributes = frame.attributes;
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  std::string kernel;
  if (inputs.size != 3 || (outputs.size != 1 && outputs.size != 2) ||
      !xla::has_buffers_alone(frame) || !xla::read(attributes, "causal", &params.causal) ||
      !xla::read(attributes, "layout", &params.layout) ||
      !xla::read(attributes, "scale", &params.scale) ||
      !xla::read(attributes, "softcap", &params.softcap) ||
      !xla::read(attributes, "window", &params.window) ||
      !xla::read(attributes, "window_left", &params.window_left) ||
      !xla::read(attributes, "window_right", &params.window_right) ||
      !xla::read(attributes, "kernel", &kernel)) {
    return xla::fail_foreign(frame);
  }
  const flashmoe_tensor q = xla::view(inputs.values[0], device);
  const flashmoe_tensor k = xla::view(inputs.values[1], device);
  const flashmoe_tensor v = xla::view(inputs.values[2], device);
  const flashmoe_tensor out = xla::view(outputs.values[0], device);
  flashmoe_tensor lse = {};
  params.q = &q;
  params.k = &k;
  params.v = &v;
  params.out = &out;
  if (outputs.size == 2) {
    lse = xla::view(outputs.values[1], device);
    params.lse = &lse;
  }
  params.kernel = kernel.empty() ? nullptr : kernel.c_str();
  return xla::run(frame, device, &flashmoe_attention_forward_workspace_size,
                  &flashmoe_attention_forward, params);
}

template <xla::Error* (*kOperation)(const xla::CallFrame&, flashmoe_device)>
nb::dict by_platform() {
  const auto capsule = [](xla::Error* (*handler)(xla::CallFrame*)) {
    return nb::capsule(reinterpret_cast<const void*>(handler));
  };
  nb::dict handlers;
  handlers["cpu"] = capsule(&xla::handle_on_cpu<kOperation>);
  handlers["CUDA"] = capsule(&xla::handle_on_cuda<kOperation>);
  return handlers;
}

// A target's name has a version: a program that was compiled ahead asks for the one it knows.
Fields xla_ffi_handlers() {
  Fields handlers;
  handlers["flashmoe_attention_forward_v1"] = by_platform<&attention_forward>();
  handlers["flashmoe_moe_route_v1"] = by_platform<&xla::moe_route>();
  handlers["flashmoe_moe_forward_v1"] = by_platform<&xla::moe_forward>();
  handlers["flashmoe_grouped_product_v1"] = by_platform<&xla::grouped_product>();
  handlers["flashmoe_fused_moe_v1"] = by_platform<&xla::fused_moe>();
  return handlers;
}

}  // namespace

void define_xla_ffi(nb::module_& module) {
  module.def("xla_ffi_handlers", &xla_ffi_handlers,
             "XLA FFI handlers by target and platform, for jax.ffi.register_ffi_target.");
}

}  // namespace flashmoe
