// fused_moe: router, routing and the layer in one call of the C ABI.
#include <cstdint>
#include <string>

#include "bindings/errors.h"
#include "bindings/moe.h"
#include "bindings/moe_calls.h"

namespace flashmoe {
namespace {

// The library's product with a router's weights takes multiples of this many experts.
constexpr int64_t kRouterMultiple = 8;

void flatten(const char* name, TensorView* view) {
  if (view->flatten_rows()) return;
  const int rank = view->rank();
  const int64_t last = rank > 0 ? view->extent(rank - 1) : 1;
  raise_value_error(std::string(name) + ": its " + std::to_string(rank) +
                    " dimensions are not rows at one distance, accepted are tensors of which "
                    "reshape(-1, " +
                    std::to_string(last) + ") makes no copy");
}

bool same_shape(const TensorView& a, const TensorView& b) {
  if (a.rank() != b.rank()) return false;
  for (int axis = 0; axis < a.rank() && axis < TensorView::kMaxRank; ++axis) {
    if (a.extent(axis) != b.extent(axis)) return false;
  }
  return true;
}

nb::object fused_moe(nb::handle tokens, nb::handle router_weights, nb::handle w_gate_up,
                     nb::handle w_down, nb::handle top_k, nb::handle logits, nb::handle router_bias,
                     nb::handle scoring, nb::handle renormalize, nb::handle selection_bias,
                     nb::handle num_groups, nb::handle top_groups, nb::handle scale,
                     nb::handle w_up, nb::handle gate, nb::handle activation, nb::handle b_gate_up,
                     nb::handle b_up, nb::handle b_down, nb::handle alpha, nb::handle limit,
                     nb::handle up_offset, nb::handle weight_on_input, nb::handle out,
                     nb::handle max_workspace_bytes, nb::handle recompute, nb::handle kernel,
                     nb::handle stream) {
  parse_top_k(top_k);                              // before the other half's checks of tensors
  parse_max_workspace_bytes(max_workspace_bytes);  // for the gradients, which other code computes
  parse_flag("recompute", recompute);              // likewise
  const nb::handle options[] = {
      top_k,      scoring, renormalize, num_groups, top_groups,      scale, gate,
      activation, alpha,   limit,       up_offset,  weight_on_input, kernel};
  const TensorType* type = tensor_type(tokens);
  if (type == nullptr) {
    nb::dict named = named_options(FusedCall::kOptions, options);
    named["max_workspace_bytes"] = max_workspace_bytes;
    named["recompute"] = recompute;
    return dispatch(
        "fused_moe",
        named_tensors({{"tokens", tokens}, {"w_gate_up", w_gate_up}, {"w_down", w_down}},
                      {{"router_weights", router_weights},
                       {"logits", logits},
                       {"router_bias", router_bias},
                       {"selection_bias", selection_bias},
                       {"w_up", w_up},
                       {"b_gate_up", b_gate_up},
                       {"b_up", b_up},
                       {"b_down", b_down}}),
        named, out, stream);
  }
  Caller caller(kMoeWords, *type, "tokens", tokens);
  FusedCall call;
  parse_options(FusedCall::kOptions, options, &call.params);
  caller.borrow("tokens", tokens, &call.tokens);
  TensorView& router = call.router_weights;
  caller.borrow_optional("router_weights", router_weights, &router);
  caller.borrow_optional("router_bias", router_bias, &call.router_bias);
  caller.borrow_optional("logits", logits, &call.logits);
  borrow_weights(caller, {w_gate_up, w_up, w_down, b_gate_up, b_up, b_down}, &call);
  // The tensors' own library computes products that this one lacks; autocast would cast its
  // tensors.
  const bool elsewhere =
      logits.is_none() && router.rank() == 2 && router.extent(0) % kRouterMultiple != 0;
  if (caller.is_recorded() ||
      is_cast(*type, {&call.tokens, &router, &call.w_gate_up, &call.w_down, &call.w_up}) ||
      (elsewhere && type->is_torch && torch_casts(call.tokens.device()))) {
    return record("fused_moe", tokens, router_weights, w_gate_up, w_down, top_k, logits,
                  router_bias, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
                  w_up, gate, activation, b_gate_up, b_up, b_down, alpha, limit, up_offset,
                  weight_on_input, out, max_workspace_bytes, recompute, kernel, stream);
  }
  nb::object made_logits;
  if (elsewhere) {
    made_logits =
        dispatch("router_product", tokens, router_weights, router_bias, w_gate_up, stream);
    router.clear();
    call.router_bias.clear();
    caller.borrow("logits", made_logits, &call.logits);
  }
  if (call.logits.get() != nullptr) flatten("logits", &call.logits);
  caller.borrow_optional("selection_bias", selection_bias, &call.selection_bias);
  // After the inputs: forward-mode differentiation, which refuses one of them, gives no memory.
  const flashmoe_dtype dtype = call.tokens.tensor().dtype;
  const int rank = call.tokens.rank();
  nb::object result = nb::borrow(out);
  if (!out.is_none()) {
    caller.borrow("out", out, &call.out, Access::kWrite);
    if (!same_shape(call.out, call.tokens)) {
      raise_value_error("out: got another shape than that of tokens, accepted is the same");
    }
  } else if (is_float(dtype) && rank >= 1 && rank <= TensorView::kMaxRank) {
    result = caller.allocate("out", call.tokens.device(), dtype, rank, call.tokens.tensor().shape,
                             &call.out);
  }
  if (call.out.get() != nullptr) flatten("out", &call.out);
  flatten("tokens", &call.tokens);
  launch(&call, caller, stream);
  return result;
}

}  // namespace

void define_fused_moe(nb::module_& module) {
  module.def("fused_moe", &fused_moe, nb::arg("tokens").none(), nb::arg("router_weights").none(),
             nb::arg("w_gate_up").none(), nb::arg("w_down").none(), nb::arg("top_k").none(),
             nb::arg("logits").none(), nb::arg("router_bias").none(), nb::arg("scoring").none(),
             nb::arg("renormalize").none(), nb::arg("selection_bias").none(),
             nb::arg("num_groups").none(), nb::arg("top_groups").none(), nb::arg("scale").none(),
             nb::arg("w_up").none(), nb::arg("gate").none(), nb::arg("activation").none(),
             nb::arg("b_gate_up").none(), nb::arg("b_up").none(), nb::arg("b_down").none(),
             nb::arg("alpha").none(), nb::arg("limit").none(), nb::arg("up_offset").none(),
             nb::arg("weight_on_input").none(), nb::arg("out").none(),
             nb::arg("max_workspace_bytes").none(), nb::arg("recompute").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.fused_moe with all of its arguments.");
}

}  // namespace flashmoe
