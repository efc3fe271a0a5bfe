// The gradients of the mixture of experts: calls from Python objects to the C ABI, on the same two
// paths as in moe.cpp.
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "bindings/kept.h"
#include "bindings/moe.h"
#include "bindings/moe_calls.h"

namespace flashmoe {
namespace {

constexpr OperationWords kWords = {"the backward of the mixture of experts",
                                   "all tensors of a call", "all gradients",
                                   "has no backward pass yet", false};

Kept layer_gradients("flashmoe_science.moe_gradients", "MoeGradients");
Kept product_gradients("flashmoe_science.moe_gradients", "ProductGradients");

template <class Call>
Access access_of(const Call&, const Field<Call>& field) {
  return field.access;
}
Access access_of(const BackwardCall& call, const Field<BackwardCall>& field) {
  const bool written =
      field.view == &BackwardCall::pre_activation && call.params.overwrite_pre_activation != 0;
  return written ? Access::kWrite : field.access;
}

// Calls the function of flashmoe_science._moe, for tensors without the exchange API.
template <class Call, size_t kTensors, size_t kOptions>
nb::tuple dispatch_gradients(const nb::handle (&tensors)[kTensors],
                             const nb::handle (&options)[kOptions], nb::handle wanted,
                             nb::handle stream) {
  nb::dict given;
  nb::dict outputs;
  for (size_t i = 0; i < kTensors; ++i) {
    const Field<Call>& field = Call::kTensors[i];
    if (field.access == Access::kWrite) {
      outputs[field.name] = tensors[i];
    } else if (!tensors[i].is_none()) {
      given[field.name] = tensors[i];
    }
  }
  nb::dict named = named_options(Call::kOptions, options);
  named["wanted"] = wanted;
  return nb::tuple(dispatch("differentiate", Call::kName, given, named, outputs, stream));
}

// The outputs of a call in the order of its list: given ones, new ones if wanted and made by the
// library, else None. `tensors` are those of the list, in its order.
template <class Call, size_t kTensors, size_t kOptions>
nb::tuple differentiate(const nb::handle (&tensors)[kTensors],
                        const nb::handle (&options)[kOptions], nb::handle wanted,
                        nb::handle stream) {
  static_assert(kTensors == std::size(Call::kTensors));
  const TensorType* type = tensor_type(tensors[0]);
  if (type == nullptr) return dispatch_gradients<Call>(tensors, options, wanted, stream);
  Call call;
  parse_options(Call::kOptions, options, &call.params);
  Caller caller(kWords, *type, Call::kTensors[0].name, tensors[0]);
  nb::object outputs[kTensors];
  for (size_t i = 0; i < kTensors; ++i) {
    const Field<Call>& field = Call::kTensors[i];
    caller.borrow_optional(field.name, tensors[i], &(call.*field.view), access_of(call, field));
    if (field.access == Access::kWrite) outputs[i] = nb::borrow(tensors[i]);
  }
  call.make_outputs(wanted, [&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
                                const int64_t* shape) {
    for (size_t i = 0; i < kTensors; ++i) {
      if (&(call.*Call::kTensors[i].view) != view) continue;
      outputs[i] = caller.allocate(name, call.first().device(), dtype, rank, shape, view);
    }
  });
  launch(&call, caller, stream);
  nb::list made;
  for (const nb::object& output : outputs) {
    if (output.is_valid()) made.append(output);
  }
  return nb::tuple(made);
}

nb::object moe_backward(nb::handle dout, nb::handle x, nb::handle w_gate_up, nb::handle w_down,
                        nb::handle routing, nb::handle w_up, nb::handle gate, nb::handle activation,
                        nb::handle b_gate_up, nb::handle b_up, nb::handle b_down, nb::handle alpha,
                        nb::handle limit, nb::handle up_offset, nb::handle weight_on_input,
                        nb::handle pre_activation, nb::handle overwrite_pre_activation,
                        nb::handle wanted, nb::handle accumulate, nb::handle dx,
                        nb::handle dw_gate_up, nb::handle dw_up, nb::handle dw_down,
                        nb::handle db_gate_up, nb::handle db_up, nb::handle db_down,
                        nb::handle dweights, nb::handle max_workspace_bytes, nb::handle kernel,
                        nb::handle stream) {
  const Routing parts = Routing::parse("routing", routing);
  const nb::handle tensors[] = {
      dout,           x,       w_gate_up,     w_up,          w_down,      b_gate_up,
      b_up,           b_down,  parts.weights, parts.offsets, parts.pairs, parts.slots,
      pre_activation, dx,      dw_gate_up,    dw_up,         dw_down,     db_gate_up,
      db_up,          db_down, dweights};
  const nb::handle options[] = {gate,
                                activation,
                                alpha,
                                limit,
                                up_offset,
                                weight_on_input,
                                accumulate,
                                kernel,
                                max_workspace_bytes,
                                overwrite_pre_activation};
  return named_tuple(layer_gradients,
                     differentiate<BackwardCall>(tensors, options, wanted, stream));
}

nb::object grouped_product_backward(nb::handle dout, nb::handle x, nb::handle w, nb::handle offsets,
                                    nb::handle counts, nb::handle wanted, nb::handle accumulate,
                                    nb::handle dx, nb::handle dw, nb::handle dbias,
                                    nb::handle kernel, nb::handle stream) {
  const nb::handle tensors[] = {dout, x, w, offsets, counts, dx, dw, dbias};
  const nb::handle options[] = {accumulate, kernel};
  return named_tuple(product_gradients,
                     differentiate<ProductBackwardCall>(tensors, options, wanted, stream));
}

nb::object moe_route_backward(nb::handle dweights, nb::handle routing, nb::handle logits,
                              nb::handle given_weights, nb::handle dlse, nb::handle scoring,
                              nb::handle renormalize, nb::handle scale, nb::handle accumulate,
                              nb::handle dlogits, nb::handle dgiven_weights, nb::handle stream) {
  const Routing parts = Routing::parse("routing", routing);
  const nb::handle tensors[] = {dweights, parts.ids, logits,        given_weights,
                                dlse,     dlogits,   dgiven_weights};
  const nb::handle options[] = {scoring, renormalize, scale, accumulate};
  const nb::tuple made = differentiate<RouteBackwardCall>(tensors, options, nb::none(), stream);
  const nb::object first = made[0];
  return first.is_none() ? nb::object(made[1]) : first;
}

}  // namespace

void define_moe_gradients(nb::module_& module) {
  module.def(
      "moe_backward", &moe_backward, nb::arg("dout").none(), nb::arg("x").none(),
      nb::arg("w_gate_up").none(), nb::arg("w_down").none(), nb::arg("routing").none(),
      nb::arg("w_up").none(), nb::arg("gate").none(), nb::arg("activation").none(),
      nb::arg("b_gate_up").none(), nb::arg("b_up").none(), nb::arg("b_down").none(),
      nb::arg("alpha").none(), nb::arg("limit").none(), nb::arg("up_offset").none(),
      nb::arg("weight_on_input").none(), nb::arg("pre_activation").none(),
      nb::arg("overwrite_pre_activation").none(), nb::arg("wanted").none(),
      nb::arg("accumulate").none(), nb::arg("dx").none(), nb::arg("dw_gate_up").none(),
      nb::arg("dw_up").none(), nb::arg("dw_down").none(), nb::arg("db_gate_up").none(),
      nb::arg("db_up").none(), nb::arg("db_down").none(), nb::arg("dweights").none(),
      nb::arg("max_workspace_bytes").none(), nb::arg("kernel").none(), nb::arg("stream").none(),
      "flashmoe_science.moe_backward with all of its arguments. `wanted` is a list of bools or "
      "None.");
  module.def("grouped_product_backward", &grouped_product_backward, nb::arg("dout").none(),
             nb::arg("x").none(), nb::arg("w").none(), nb::arg("offsets").none(),
             nb::arg("counts").none(), nb::arg("wanted").none(), nb::arg("accumulate").none(),
             nb::arg("dx").none(), nb::arg("dw").none(), nb::arg("dbias").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "The same of grouped_product_backward.");
  module.def("moe_route_backward", &moe_route_backward, nb::arg("dweights").none(),
             nb::arg("routing").none(), nb::arg("logits").none(), nb::arg("given_weights").none(),
             nb::arg("dlse").none(), nb::arg("scoring").none(), nb::arg("renormalize").none(),
             nb::arg("scale").none(), nb::arg("accumulate").none(), nb::arg("dlogits").none(),
             nb::arg("dgiven_weights").none(), nb::arg("stream").none(),
             "The same of moe_route_backward.");
}

}  // namespace flashmoe
