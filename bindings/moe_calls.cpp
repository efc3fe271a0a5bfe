#include "bindings/moe_calls.h"

#include "bindings/errors.h"
#include "bindings/operation.h"

namespace flashmoe {
namespace {

// Checks top_k and the tokens with a sentence of their own, since the C ABI sees them only as
// extents of outputs.
void check_pairs(const char* name, int64_t tokens, int64_t top_k) {
  if (tokens <= kMaxPairs / top_k) return;
  raise_value_error(std::string(name) + ": got " + std::to_string(tokens) + " tokens with " +
                    std::to_string(top_k) +
                    " experts each, accepted are at most 2^31 - 2^16 pairs");
}

Kept new_tuple("builtins", "tuple.__new__");

}  // namespace

int64_t parse_top_k(nb::handle top_k) {
  return parse_integer("top_k", top_k, 1, kMaxTopK, "are 1 to 32, and no more than experts");
}

uint64_t parse_max_workspace_bytes(nb::handle bytes) {
  if (bytes.is_none()) return 0;
  return static_cast<uint64_t>(parse_integer("max_workspace_bytes", bytes, 1, INT64_MAX,
                                             "are 1 to 2**63 - 1, or None, for no bound"));
}

bool extents_of_logits(const TensorView& logits, int64_t top_k, RouteExtents* extents) {
  if (logits.rank() != 2) return false;
  *extents = {logits.extent(0), logits.extent(1), top_k};
  if (extents->experts < 1 || extents->experts > kMaxExperts) return false;
  if (top_k > extents->experts) {
    raise_value_error("top_k: got " + std::to_string(top_k) +
                      ", accepted are 1 to 32, and no more "
                      "than the " +
                      std::to_string(extents->experts) + " experts");
  }
  check_pairs("logits", extents->tokens, top_k);
  return true;
}

bool extents_of_ids(const TensorView& ids, int64_t experts, RouteExtents* extents) {
  if (ids.rank() != 2) return false;
  *extents = {ids.extent(0), experts, ids.extent(1)};
  if (extents->top_k < 1 || extents->top_k > kMaxTopK) {
    raise_value_error("given_ids: got " + std::to_string(extents->top_k) +
                      " experts of a token, accepted are 1 to 32");
  }
  check_pairs("given_ids", extents->tokens, extents->top_k);
  return true;
}

void RouteCall::check_given_outputs(const RouteExtents& extents) const {
  const auto check_extent = [](const char* name, const char* argument, const TensorView& view,
                               int rank, int64_t wanted, int64_t got) {
    if (view.get() == nullptr || view.rank() != rank || view.extent(rank - 1) == wanted) return;
    raise_value_error(std::string(argument) + ": got " + std::to_string(got) + ", but " + name +
                      " has room for " + std::to_string(view.extent(rank - 1) + got - wanted));
  };
  check_extent("ids", logits.get() != nullptr ? "top_k" : "given_ids", ids, 2, extents.top_k,
               extents.top_k);
  if (logits.get() == nullptr) {
    check_extent("offsets", "num_experts", offsets, 1, extents.experts + 1, extents.experts);
  }
}

Routing Routing::parse(const char* name, nb::handle routing) {
  if (!PyTuple_Check(routing.ptr()) || PyTuple_Size(routing.ptr()) != kParts) {
    raise_type_error(std::string(name) + ": got " + name_of_type(routing) +
                     ", accepted is a MoeRouting, which moe_route and moe_route_given return");
  }
  const auto part = [&](Py_ssize_t i) { return nb::borrow(PyTuple_GetItem(routing.ptr(), i)); };
  return {part(0), part(1), part(2), part(3), part(4), part(5)};
}

nb::object named_tuple(Kept& type, const nb::tuple& values) {
  return new_tuple.get()(type.get(), values);
}

const Operation kMoeRoute = operation_of<RouteCall>();
const Operation kMoeForward = operation_of<ForwardCall>();
const Operation kGroupedProduct = operation_of<ProductCall>();
const Operation kMoeBackward = operation_of<BackwardCall>();
const Operation kGroupedProductBackward = operation_of<ProductBackwardCall>();
const Operation kMoeRouteBackward = operation_of<RouteBackwardCall>();
const Operation kFusedMoe = operation_of<FusedCall>();

}  // namespace flashmoe
