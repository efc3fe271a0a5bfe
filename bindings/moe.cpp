// The mixture of experts: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._moe, which comes back through `call`
// (bindings/operation.h).
#include "bindings/moe.h"

#include <string>

#include "bindings/errors.h"
#include "bindings/kept.h"
#include "bindings/moe_calls.h"

namespace flashmoe {
namespace {

Kept routing_type("flashmoe_science.moe", "MoeRouting");

// New outputs of a routing.
Routing allocate(Caller& caller, const RouteExtents& extents, bool want_lse, RouteCall* call) {
  const flashmoe_device device = call->first().device();
  nb::object parts[Routing::kParts];
  size_t count = 0;
  parts[Routing::kParts - 1] = nb::none();
  call->make_outputs(extents, want_lse,
                     [&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
                         const int64_t* shape) {
                       parts[count++] = caller.allocate(name, device, dtype, rank, shape, view);
                     });
  return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]};
}

nb::object pack(const Routing& made) {
  return named_tuple(routing_type, nb::make_tuple(made.ids, made.weights, made.offsets, made.pairs,
                                                  made.slots, made.lse));
}

// Views the caller's outputs.
void borrow(Caller& caller, const Routing& given, bool want_lse, RouteCall* call) {
  if (want_lse && given.lse.is_none()) {
    raise_value_error("out: its lse is None, accepted with return_lse is a tensor");
  }
  caller.borrow("ids", given.ids, &call->ids, Access::kWrite);
  caller.borrow("weights", given.weights, &call->weights, Access::kWrite);
  caller.borrow("offsets", given.offsets, &call->offsets, Access::kWrite);
  caller.borrow("pairs", given.pairs, &call->pairs, Access::kWrite);
  caller.borrow("slots", given.slots, &call->slots, Access::kWrite);
  caller.borrow_optional("lse", given.lse, &call->lse, Access::kWrite);
}

nb::object moe_route(nb::handle logits, nb::handle top_k, nb::handle scoring,
                     nb::handle renormalize, nb::handle selection_bias, nb::handle num_groups,
                     nb::handle top_groups, nb::handle scale, nb::handle return_lse, nb::handle out,
                     nb::handle stream) {
  const bool want_lse = parse_flag("return_lse", return_lse);
  const int64_t k = parse_top_k(top_k);
  const nb::handle options[] = {scoring, renormalize, num_groups, top_groups, scale};
  const TensorType* type = tensor_type(logits);
  if (type == nullptr) {
    nb::dict named = named_options(RouteCall::kOptions, options);
    named["top_k"] = k;
    named["return_lse"] = return_lse;
    return dispatch("moe_route",
                    named_tensors({{"logits", logits}}, {{"selection_bias", selection_bias}}),
                    named, out, stream);
  }
  RouteCall call;
  parse_options(RouteCall::kOptions, options, &call.params);
  Caller caller(kMoeWords, *type, "logits", logits);
  caller.borrow("logits", logits, &call.logits);
  caller.borrow_optional("selection_bias", selection_bias, &call.selection_bias);
  if (caller.is_recorded()) {
    return record("moe_route", logits, top_k, scoring, renormalize, selection_bias, num_groups,
                  top_groups, scale, return_lse, out, stream);
  }
  Routing made;
  RouteExtents extents;
  if (!out.is_none()) borrow(caller, Routing::parse("out", out), want_lse, &call);
  if (extents_of_logits(call.logits, k, &extents)) {
    call.check_given_outputs(extents);
    if (out.is_none()) made = allocate(caller, extents, want_lse, &call);
  }
  launch(&call, caller, stream);
  return out.is_none() ? pack(made) : nb::borrow(out);
}

nb::object moe_route_given(nb::handle given_ids, nb::handle given_weights, nb::handle num_experts,
                           nb::handle renormalize, nb::handle scale, nb::handle expert_map,
                           nb::handle out, nb::handle stream) {
  const int64_t experts =
      parse_integer("num_experts", num_experts, 1, kMaxExperts, "are 1 to 1024");
  const TensorType* type = tensor_type(given_ids);
  if (type == nullptr) {
    nb::dict named;
    named["num_experts"] = experts;
    named["renormalize"] = renormalize;
    named["scale"] = scale;
    return dispatch("moe_route_given",
                    named_tensors({{"given_ids", given_ids}},
                                  {{"given_weights", given_weights}, {"expert_map", expert_map}}),
                    named, out, stream);
  }
  RouteCall call;
  renormalize_option<RouteCall::Params>().parse(renormalize, &call.params);
  scale_option<RouteCall::Params>().parse(scale, &call.params);
  Caller caller(kMoeWords, *type, "given_ids", given_ids);
  caller.borrow("given_ids", given_ids, &call.given_ids);
  caller.borrow_optional("given_weights", given_weights, &call.given_weights);
  caller.borrow_optional("expert_map", expert_map, &call.expert_map);
  if (caller.is_recorded()) {
    return record("moe_route_given", given_ids, given_weights, num_experts, renormalize, scale,
                  expert_map, out, stream);
  }
  Routing made;
  RouteExtents extents;
  if (!out.is_none()) borrow(caller, Routing::parse("out", out), false, &call);
  if (extents_of_ids(call.given_ids, experts, &extents)) {
    call.check_given_outputs(extents);
    if (out.is_none()) made = allocate(caller, extents, false, &call);
  }
  launch(&call, caller, stream);
  return out.is_none() ? pack(made) : nb::borrow(out);
}

nb::object moe_forward(nb::handle x, nb::handle w_gate_up, nb::handle w_down, nb::handle routing,
                       nb::handle w_up, nb::handle gate, nb::handle activation,
                       nb::handle b_gate_up, nb::handle b_up, nb::handle b_down, nb::handle alpha,
                       nb::handle limit, nb::handle up_offset, nb::handle weight_on_input,
                       nb::handle out, nb::handle pre_activation, nb::handle return_pre_activation,
                       nb::handle max_workspace_bytes, nb::handle recompute, nb::handle kernel,
                       nb::handle stream) {
  const bool want_pre_activation = parse_flag("return_pre_activation", return_pre_activation);
  parse_max_workspace_bytes(max_workspace_bytes);  // for the gradients, which other code computes
  parse_flag("recompute", recompute);              // likewise
  const nb::handle options[] = {gate, activation, alpha, limit, up_offset, weight_on_input, kernel};
  const TensorType* type = tensor_type(x);
  if (type == nullptr) {
    nb::dict named = named_options(ForwardCall::kOptions, options);
    named["return_pre_activation"] = return_pre_activation;
    named["max_workspace_bytes"] = max_workspace_bytes;
    named["recompute"] = recompute;
    return dispatch(
        "moe_forward",
        named_tensors(
            {{"x", x}, {"w_gate_up", w_gate_up}, {"w_down", w_down}},
            {{"w_up", w_up}, {"b_gate_up", b_gate_up}, {"b_up", b_up}, {"b_down", b_down}}),
        routing, named, named_tensors({}, {{"out", out}, {"pre_activation", pre_activation}}),
        stream);
  }
  ForwardCall call;
  parse_options(ForwardCall::kOptions, options, &call.params);
  const Routing parts = Routing::parse("routing", routing);
  Caller caller(kMoeWords, *type, "x", x);
  caller.borrow("x", x, &call.x);
  borrow_weights(caller, {w_gate_up, w_up, w_down, b_gate_up, b_up, b_down}, &call);
  caller.borrow("weights", parts.weights, &call.weights);
  caller.borrow("offsets", parts.offsets, &call.offsets);
  caller.borrow("pairs", parts.pairs, &call.pairs);
  caller.borrow("slots", parts.slots, &call.slots);

  if (caller.is_recorded() || is_cast(*type, {&call.x, &call.w_gate_up, &call.w_down})) {
    return record("moe_forward", x, w_gate_up, w_down, routing, w_up, gate, activation, b_gate_up,
                  b_up, b_down, alpha, limit, up_offset, weight_on_input, out, pre_activation,
                  return_pre_activation, max_workspace_bytes, recompute, kernel, stream);
  }
  nb::object result = nb::borrow(out);
  nb::object saved = nb::borrow(pre_activation);
  caller.borrow_optional("out", out, &call.out, Access::kWrite);
  caller.borrow_optional("pre_activation", pre_activation, &call.pre_activation, Access::kWrite);
  call.make_outputs(want_pre_activation, [&](const char* name, TensorView* view,
                                             flashmoe_dtype dtype, int rank, const int64_t* shape) {
    nb::object& made = view == &call.out ? result : saved;
    made = caller.allocate(name, call.x.device(), dtype, rank, shape, view);
  });
  launch(&call, caller, stream);
  return want_pre_activation ? nb::make_tuple(result, saved) : result;
}

nb::object grouped_product(nb::handle x, nb::handle w, nb::handle offsets, nb::handle counts,
                           nb::handle bias, nb::handle out, nb::handle kernel, nb::handle stream) {
  const TensorType* type = tensor_type(x);
  if (type == nullptr) {
    return dispatch("grouped_product",
                    named_tensors({{"x", x}, {"w", w}},
                                  {{"offsets", offsets}, {"counts", counts}, {"bias", bias}}),
                    named_options(ProductCall::kOptions, {kernel}), out, stream);
  }
  ProductCall call;
  parse_options(ProductCall::kOptions, {kernel}, &call.params);
  Caller caller(kMoeWords, *type, "x", x);
  caller.borrow("x", x, &call.x);
  caller.borrow("w", w, &call.w);
  caller.borrow_optional("offsets", offsets, &call.offsets);
  caller.borrow_optional("counts", counts, &call.counts);
  caller.borrow_optional("bias", bias, &call.bias);
  if (caller.is_recorded() || is_cast(*type, {&call.x, &call.w})) {
    return record("grouped_product", x, w, offsets, counts, bias, out, kernel, stream);
  }
  nb::object result = nb::borrow(out);
  caller.borrow_optional("out", out, &call.out, Access::kWrite);
  call.make_outputs(nb::dict(), [&](const char* name, TensorView* view, flashmoe_dtype dtype,
                                    int rank, const int64_t* shape) {
    result = caller.allocate(name, call.x.device(), dtype, rank, shape, view);
  });
  launch(&call, caller, stream);
  return result;
}

}  // namespace

void define_moe(nb::module_& module) {
  module.def("moe_route", &moe_route, nb::arg("logits").none(), nb::arg("top_k").none(),
             nb::arg("scoring").none(), nb::arg("renormalize").none(),
             nb::arg("selection_bias").none(), nb::arg("num_groups").none(),
             nb::arg("top_groups").none(), nb::arg("scale").none(), nb::arg("return_lse").none(),
             nb::arg("out").none(), nb::arg("stream").none(),
             "flashmoe_science.moe_route with all of its arguments. Returns a MoeRouting: `out` "
             "if there is one.");
  module.def("moe_route_given", &moe_route_given, nb::arg("given_ids").none(),
             nb::arg("given_weights").none(), nb::arg("num_experts").none(),
             nb::arg("renormalize").none(), nb::arg("scale").none(), nb::arg("expert_map").none(),
             nb::arg("out").none(), nb::arg("stream").none(), "The same of moe_route_given.");
  module.def("moe_forward", &moe_forward, nb::arg("x").none(), nb::arg("w_gate_up").none(),
             nb::arg("w_down").none(), nb::arg("routing").none(), nb::arg("w_up").none(),
             nb::arg("gate").none(), nb::arg("activation").none(), nb::arg("b_gate_up").none(),
             nb::arg("b_up").none(), nb::arg("b_down").none(), nb::arg("alpha").none(),
             nb::arg("limit").none(), nb::arg("up_offset").none(),
             nb::arg("weight_on_input").none(), nb::arg("out").none(),
             nb::arg("pre_activation").none(), nb::arg("return_pre_activation").none(),
             nb::arg("max_workspace_bytes").none(), nb::arg("recompute").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.moe_forward with all of its arguments.");
  module.def("grouped_product", &grouped_product, nb::arg("x").none(), nb::arg("w").none(),
             nb::arg("offsets").none(), nb::arg("counts").none(), nb::arg("bias").none(),
             nb::arg("out").none(), nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.grouped_product with all of its arguments.");
  define_fused_moe(module);
  define_moe_gradients(module);
}

}  // namespace flashmoe
