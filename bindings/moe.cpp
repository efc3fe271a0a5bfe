// The mixture of experts: calls from Python objects to the C ABI.
//
// Each operation is a struct with its tensors viewed and its parameters; a table names the tensors.
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path: the
// functions that have the public signatures. Everything else goes to flashmoe_science._moe, which
// comes back through moe_call with tensors and options by name; plans take that way too.
#include "bindings/moe.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/caller.h"
#include "bindings/errors.h"
#include "bindings/fields.h"
#include "bindings/native_function.h"
#include "bindings/options.h"
#include "bindings/tensor.h"
#include "bindings/workspace.h"
#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"

namespace flashmoe {
namespace {

constexpr OperationWords kWords = {"the mixture of experts", "all tensors of a call", "out"};
constexpr flashmoe_dtype kInt32 = {dlpack::kInt, 32, 1};
constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxPairs = INT32_MAX;

// One tensor of an operation: what Python and messages call it, and where it goes.
template <class Call>
struct Field {
  const char* name;
  TensorView Call::* view;
  const flashmoe_tensor* Call::Params::* param;
  Access access;
};

bool is_float(flashmoe_dtype dtype) {
  const bool half = dtype.bits == 16 &&
                    (dtype.code == FLASHMOE_DTYPE_FLOAT || dtype.code == FLASHMOE_DTYPE_BFLOAT);
  return (half || (dtype.bits == 32 && dtype.code == FLASHMOE_DTYPE_FLOAT)) && dtype.lanes == 1;
}

int64_t parse_top_k(nb::handle top_k) {
  return parse_integer("top_k", top_k, 1, kMaxTopK, "are 1 to 32, and no more than experts");
}

// The sentences of top_k and num_experts, which the C ABI sees as extents of outputs only.
void check_pairs(const char* name, int64_t tokens, int64_t top_k) {
  if (tokens <= kMaxPairs / top_k) return;
  raise_value_error(std::string(name) + ": got " + std::to_string(tokens) + " tokens with " +
                    std::to_string(top_k) + " experts each, accepted are less than 2^31 pairs");
}

// ---- the operations -----------------------------------------------------------------------------

struct RouteOptions {
  nb::handle scoring;
  nb::handle renormalize;
  nb::handle num_groups;
  nb::handle top_groups;
  nb::handle scale;
};

struct RouteExtents {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;
};

struct RouteCall {
  using Params = flashmoe_moe_route_params;
  static constexpr auto kPlan = &flashmoe_moe_route_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_route_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_route;

  Params params = flashmoe_moe_route_params_init();
  TensorView logits;
  TensorView selection_bias;
  TensorView given_ids;
  TensorView given_weights;
  TensorView expert_map;
  TensorView ids;
  TensorView weights;
  TensorView offsets;
  TensorView pairs;
  TensorView slots;
  TensorView lse;

  void parse(const RouteOptions& options) {
    params.scoring = parse_scoring(options.scoring);
    params.renormalize = parse_flag("renormalize", options.renormalize);
    params.num_groups = static_cast<int32_t>(parse_integer(
        "num_groups", options.num_groups, 1, kMaxExperts, "are 1, for none, and divisors of E"));
    if (!options.top_groups.is_none()) {
      params.top_groups =
          static_cast<int32_t>(parse_integer("top_groups", options.top_groups, 1, kMaxExperts,
                                             "are 1 to num_groups, or None without groups"));
    }
    params.scale = parse_factor("scale", options.scale);
  }

  const TensorView& first() const { return logits.get() != nullptr ? logits : given_ids; }

  // See ForwardCall.
  template <class Make>
  void make_outputs(const RouteExtents& extents, bool want_lse, const Make& make) {
    const int64_t each[] = {extents.tokens, extents.top_k};
    const int64_t sorted[] = {extents.tokens * extents.top_k};
    const int64_t bounds[] = {extents.experts + 1};
    if (ids.get() == nullptr) make("ids", &ids, kInt32, 2, each);
    if (weights.get() == nullptr) make("weights", &weights, kFloat32, 2, each);
    if (offsets.get() == nullptr) make("offsets", &offsets, kInt32, 1, bounds);
    if (pairs.get() == nullptr) make("pairs", &pairs, kInt32, 1, sorted);
    if (slots.get() == nullptr) make("slots", &slots, kInt32, 2, each);
    if (want_lse && lse.get() == nullptr) make("lse", &lse, kFloat32, 1, &extents.tokens);
  }
};

constexpr Field<RouteCall> kRouteFields[] = {
    {"logits", &RouteCall::logits, &RouteCall::Params::logits, Access::kRead},
    {"selection_bias", &RouteCall::selection_bias, &RouteCall::Params::selection_bias,
     Access::kRead},
    {"given_ids", &RouteCall::given_ids, &RouteCall::Params::given_ids, Access::kRead},
    {"given_weights", &RouteCall::given_weights, &RouteCall::Params::given_weights, Access::kRead},
    {"expert_map", &RouteCall::expert_map, &RouteCall::Params::expert_map, Access::kRead},
    {"ids", &RouteCall::ids, &RouteCall::Params::ids, Access::kWrite},
    {"weights", &RouteCall::weights, &RouteCall::Params::weights, Access::kWrite},
    {"offsets", &RouteCall::offsets, &RouteCall::Params::offsets, Access::kWrite},
    {"pairs", &RouteCall::pairs, &RouteCall::Params::pairs, Access::kWrite},
    {"slots", &RouteCall::slots, &RouteCall::Params::slots, Access::kWrite},
    {"lse", &RouteCall::lse, &RouteCall::Params::lse, Access::kWrite},
};

struct ForwardOptions {
  nb::handle gate;
  nb::handle activation;
  nb::handle alpha;
  nb::handle limit;
  nb::handle up_offset;
  nb::handle weight_on_input;
  nb::handle kernel;
};

struct ForwardCall {
  using Params = flashmoe_moe_forward_params;
  static constexpr auto kPlan = &flashmoe_moe_forward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_moe_forward_workspace_size;
  static constexpr auto kRun = &flashmoe_moe_forward;

  Params params = flashmoe_moe_forward_params_init();
  TensorView x;
  TensorView w_gate_up;
  TensorView w_up;
  TensorView w_down;
  TensorView b_gate_up;
  TensorView b_up;
  TensorView b_down;
  TensorView weights;
  TensorView offsets;
  TensorView pairs;
  TensorView slots;
  TensorView out;
  TensorView pre_activation;

  void parse(const ForwardOptions& options) {
    params.gate = parse_gate(options.gate);
    params.activation = parse_activation(options.activation);
    params.alpha = parse_factor("alpha", options.alpha);
    params.limit = parse_limit(options.limit);
    params.up_offset = parse_number("up_offset", options.up_offset);
    params.weight_on_input = parse_flag("weight_on_input", options.weight_on_input);
    params.kernel = parse_kernel(options.kernel);
  }

  const TensorView& first() const { return x; }

  // Has `make` make the outputs that are not there: make(name, view, dtype, rank, shape). Where the
  // inputs do not tell their shapes, the library says what is wrong. The same below.
  template <class Make>
  void make_outputs(bool want_pre_activation, const Make& make) {
    const flashmoe_dtype dtype = x.tensor().dtype;
    if (!is_float(dtype)) return;
    if (out.get() == nullptr && x.rank() == 2) {
      const int64_t shape[] = {x.extent(0), x.extent(1)};
      make("out", &out, dtype, 2, shape);
    }
    if (!want_pre_activation || pre_activation.get() != nullptr || slots.rank() != 2 ||
        w_gate_up.rank() != 3) {
      return;
    }
    const int64_t tokens = slots.extent(0);
    const int64_t top_k = slots.extent(1);
    if (top_k < 1 || top_k > kMaxTopK || tokens > kMaxPairs / top_k) return;
    const int64_t matrices = params.gate == FLASHMOE_MOE_SEPARATE ? 2 : 1;
    const int64_t shape[] = {tokens * top_k, w_gate_up.extent(1) * matrices};
    make("pre_activation", &pre_activation, dtype, 2, shape);
  }
};

constexpr Field<ForwardCall> kForwardFields[] = {
    {"x", &ForwardCall::x, &ForwardCall::Params::x, Access::kRead},
    {"w_gate_up", &ForwardCall::w_gate_up, &ForwardCall::Params::w_gate_up, Access::kRead},
    {"w_up", &ForwardCall::w_up, &ForwardCall::Params::w_up, Access::kRead},
    {"w_down", &ForwardCall::w_down, &ForwardCall::Params::w_down, Access::kRead},
    {"b_gate_up", &ForwardCall::b_gate_up, &ForwardCall::Params::b_gate_up, Access::kRead},
    {"b_up", &ForwardCall::b_up, &ForwardCall::Params::b_up, Access::kRead},
    {"b_down", &ForwardCall::b_down, &ForwardCall::Params::b_down, Access::kRead},
    {"weights", &ForwardCall::weights, &ForwardCall::Params::weights, Access::kRead},
    {"offsets", &ForwardCall::offsets, &ForwardCall::Params::offsets, Access::kRead},
    {"pairs", &ForwardCall::pairs, &ForwardCall::Params::pairs, Access::kRead},
    {"slots", &ForwardCall::slots, &ForwardCall::Params::slots, Access::kRead},
    {"out", &ForwardCall::out, &ForwardCall::Params::out, Access::kWrite},
    {"pre_activation", &ForwardCall::pre_activation, &ForwardCall::Params::pre_activation,
     Access::kWrite},
};

struct ProductCall {
  using Params = flashmoe_grouped_product_params;
  static constexpr auto kPlan = &flashmoe_grouped_product_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_grouped_product_workspace_size;
  static constexpr auto kRun = &flashmoe_grouped_product;

  Params params = flashmoe_grouped_product_params_init();
  TensorView x;
  TensorView w;
  TensorView bias;
  TensorView offsets;
  TensorView counts;
  TensorView out;

  const TensorView& first() const { return x; }

  template <class Make>
  void make_outputs(const Make& make) {
    const int rank = x.rank();
    if (out.get() != nullptr || (rank != 2 && rank != 3) || w.rank() != 3 ||
        !is_float(x.tensor().dtype)) {
      return;
    }
    const int64_t shape[] = {x.extent(0), rank == 3 ? x.extent(1) : w.extent(1), w.extent(1)};
    make("out", &out, x.tensor().dtype, rank, shape);
  }
};

constexpr Field<ProductCall> kProductFields[] = {
    {"x", &ProductCall::x, &ProductCall::Params::x, Access::kRead},
    {"w", &ProductCall::w, &ProductCall::Params::w, Access::kRead},
    {"bias", &ProductCall::bias, &ProductCall::Params::bias, Access::kRead},
    {"offsets", &ProductCall::offsets, &ProductCall::Params::offsets, Access::kRead},
    {"counts", &ProductCall::counts, &ProductCall::Params::counts, Access::kRead},
    {"out", &ProductCall::out, &ProductCall::Params::out, Access::kWrite},
};

constexpr const auto& fields_of(const RouteCall&) { return kRouteFields; }
constexpr const auto& fields_of(const ForwardCall&) { return kForwardFields; }
constexpr const auto& fields_of(const ProductCall&) { return kProductFields; }

template <class Call>
const typename Call::Params& ready(Call* call) {
  for (const Field<Call>& field : fields_of(*call)) {
    call->params.*field.param = (call->*field.view).get();
  }
  return call->params;
}

// ---- messages -----------------------------------------------------------------------------------

// The library's words for an argument, and the caller's.
struct Renamed {
  const char* from;
  const char* to;
};
using Renames = std::vector<Renamed>;

bool is_word(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// The library's sentence with whole words replaced.
std::string renamed(const std::string& sentence, const Renames& renames) {
  std::string made;
  for (size_t begin = 0; begin < sentence.size();) {
    size_t end = begin;
    while (end < sentence.size() && is_word(sentence[end])) ++end;
    std::string word = sentence.substr(begin, std::max<size_t>(end - begin, 1));
    for (const Renamed& rename : renames) {
      if (word == rename.from) {
        word = rename.to;
        break;
      }
    }
    made += word;
    begin = std::max(end, begin + 1);
  }
  return made;
}

void check_renamed(flashmoe_status status, const Renames& renames) {
  if (status != FLASHMOE_OK) raise_status(status, renamed(flashmoe_last_error(), renames));
}

const Renames& names_of_given() {
  static const Renames renames = {{"given_ids", "ids"}, {"given_weights", "weights"}};
  return renames;
}

// ---- running one operation ----------------------------------------------------------------------

// The GIL is free while the library works: see bindings/attention.cpp.
template <class Call>
flashmoe_status run(const Call& call, void* workspace, size_t bytes, void* stream) {
  nb::gil_scoped_release release;
  const TensorView& first = call.first();
  if (first.get() != nullptr && first.device().device_type != FLASHMOE_DEVICE_CUDA) {
    return run_on_host(Call::kWorkspaceSize, Call::kRun, call.params);
  }
  return Call::kRun(&call.params, workspace, bytes, stream);
}

template <class Call>
void launch(Call* call, const Caller& caller, nb::handle stream, const Renames& renames = {}) {
  ready(call);
  const flashmoe_device device = call->first().device();
  bool named = false;
  void* handle = caller.stream(stream, device, &named);
  size_t bytes = 0;
  TensorView scratch;
  nb::object workspace;
  if (device.device_type == FLASHMOE_DEVICE_CUDA) {
    check_renamed(Call::kWorkspaceSize(&call->params, &bytes), renames);
    if (bytes > 0) workspace = caller.workspace(bytes, device, handle, named, &scratch);
  }
  check_renamed(run(*call, scratch.tensor().data, bytes, handle), renames);
}

// The function of flashmoe_science._moe of that name. Kept in *function, which is one for each name;
// see dispatch of bindings/attention.cpp for why it is not initialised in a declaration.
template <class... Arguments>
nb::object dispatch(nb::object** function, const char* name, const Arguments&... arguments) {
  if (*function == nullptr) {
    *function = new nb::object(nb::module_::import_("flashmoe_science._moe").attr(name));  // leaked
  }
  return (**function)(arguments...);
}

// ---- routing ------------------------------------------------------------------------------------

// A MoeRouting, or its parts.
struct Routing {
  static constexpr int kParts = 6;

  nb::object ids;
  nb::object weights;
  nb::object offsets;
  nb::object pairs;
  nb::object slots;
  nb::object lse;

  static Routing parse(const char* name, nb::handle routing) {
    if (!PyTuple_Check(routing.ptr()) || PyTuple_Size(routing.ptr()) != kParts) {
      raise_type_error(std::string(name) + ": got " + name_of_type(routing) +
                       ", accepted is a MoeRouting, which moe_route and moe_route_given return");
    }
    const auto part = [&](Py_ssize_t i) { return nb::borrow(PyTuple_GetItem(routing.ptr(), i)); };
    return {part(0), part(1), part(2), part(3), part(4), part(5)};
  }

  nb::object pack() const {
    static nb::object* type = nullptr;
    if (type == nullptr) {
      type = new nb::object(nb::module_::import_("flashmoe_science.moe").attr("MoeRouting"));
    }
    return (*type)(ids, weights, offsets, pairs, slots, lse);
  }
};

// New outputs of a routing.
Routing allocate(const Caller& caller, const RouteExtents& extents, bool want_lse,
                 RouteCall* call) {
  const flashmoe_device device = call->first().device();
  nb::object parts[Routing::kParts];
  size_t count = 0;
  parts[Routing::kParts - 1] = nb::none();
  call->make_outputs(extents, want_lse,
                     [&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
                         const int64_t* shape) {
                       parts[count++] =
                           caller.allocate(name, device, dtype, rank, shape, nullptr, view);
                     });
  return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]};
}

// Views outputs that the caller gave.
void borrow(const Caller& caller, const Routing& given, bool want_lse, RouteCall* call) {
  if (want_lse && given.lse.is_none()) {
    raise_value_error("out: its lse is None, accepted with return_lse is a tensor");
  }
  caller.borrow("ids", given.ids, &call->ids);
  caller.borrow("weights", given.weights, &call->weights);
  caller.borrow("offsets", given.offsets, &call->offsets);
  caller.borrow("pairs", given.pairs, &call->pairs);
  caller.borrow("slots", given.slots, &call->slots);
  caller.borrow_optional("lse", given.lse, &call->lse);
}

// What logits say of a routing; false if the library must say what is wrong with them.
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
  if (extents->top_k < 1 || extents->top_k > kMaxTopK) return false;
  check_pairs("ids", extents->tokens, extents->top_k);
  return true;
}

nb::object moe_route(nb::handle logits, nb::handle top_k, nb::handle scoring,
                     nb::handle renormalize, nb::handle selection_bias, nb::handle num_groups,
                     nb::handle top_groups, nb::handle scale, nb::handle return_lse, nb::handle out,
                     nb::handle stream) {
  static nb::object* otherwise = nullptr;
  const bool want_lse = parse_flag("return_lse", return_lse);
  const int64_t k = parse_top_k(top_k);
  const TensorType* type = tensor_type(logits);
  if (type == nullptr) {
    return dispatch(&otherwise, "moe_route", logits, k, scoring, renormalize, selection_bias,
                    num_groups, top_groups, scale, return_lse, out, stream);
  }
  RouteCall call;
  call.parse({scoring, renormalize, num_groups, top_groups, scale});
  const Caller caller(kWords, *type, "logits", logits);
  caller.borrow("logits", logits, &call.logits);
  caller.borrow_optional("selection_bias", selection_bias, &call.selection_bias);
  Routing made;
  RouteExtents extents;
  if (!out.is_none()) {
    borrow(caller, Routing::parse("out", out), want_lse, &call);
  } else if (extents_of_logits(call.logits, k, &extents)) {
    made = allocate(caller, extents, want_lse, &call);
  }
  launch(&call, caller, stream);
  return out.is_none() ? made.pack() : nb::borrow(out);
}

nb::object moe_route_given(nb::handle ids, nb::handle weights, nb::handle num_experts,
                           nb::handle expert_map, nb::handle out, nb::handle stream) {
  static nb::object* otherwise = nullptr;
  const int64_t experts =
      parse_integer("num_experts", num_experts, 1, kMaxExperts, "are 1 to 1024");
  const TensorType* type = tensor_type(ids);
  if (type == nullptr) {
    return dispatch(&otherwise, "moe_route_given", ids, weights, experts, expert_map, out, stream);
  }
  RouteCall call;
  const Caller caller(kWords, *type, "ids", ids);
  caller.borrow("ids", ids, &call.given_ids);
  caller.borrow_optional("weights", weights, &call.given_weights);
  caller.borrow_optional("expert_map", expert_map, &call.expert_map);
  Routing made;
  RouteExtents extents;
  if (!out.is_none()) {
    borrow(caller, Routing::parse("out", out), false, &call);
  } else if (extents_of_ids(call.given_ids, experts, &extents)) {
    made = allocate(caller, extents, false, &call);
  }
  launch(&call, caller, stream, names_of_given());
  return out.is_none() ? made.pack() : nb::borrow(out);
}

// ---- layer --------------------------------------------------------------------------------------

struct ForwardTensors {
  nb::handle x;
  nb::handle w_gate_up;
  nb::handle w_up;
  nb::handle w_down;
  nb::handle b_gate_up;
  nb::handle b_up;
  nb::handle b_down;
};

void borrow_weights(const Caller& caller, const ForwardTensors& tensors, ForwardCall* call) {
  caller.borrow("w_gate_up", tensors.w_gate_up, &call->w_gate_up);
  caller.borrow_optional("w_up", tensors.w_up, &call->w_up);
  caller.borrow("w_down", tensors.w_down, &call->w_down);
  caller.borrow_optional("b_gate_up", tensors.b_gate_up, &call->b_gate_up);
  caller.borrow_optional("b_up", tensors.b_up, &call->b_up);
  caller.borrow_optional("b_down", tensors.b_down, &call->b_down);
}

nb::object moe_forward(nb::handle x, nb::handle w_gate_up, nb::handle w_down, nb::handle routing,
                       nb::handle w_up, nb::handle gate, nb::handle activation,
                       nb::handle b_gate_up, nb::handle b_up, nb::handle b_down, nb::handle alpha,
                       nb::handle limit, nb::handle up_offset, nb::handle weight_on_input,
                       nb::handle out, nb::handle pre_activation, nb::handle return_pre_activation,
                       nb::handle kernel, nb::handle stream) {
  static nb::object* otherwise = nullptr;
  const bool want_pre_activation = parse_flag("return_pre_activation", return_pre_activation);
  const TensorType* type = tensor_type(x);
  if (type == nullptr) {
    return dispatch(&otherwise, "moe_forward", x, w_gate_up, w_down, routing, w_up, gate,
                    activation, b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input,
                    out, pre_activation, return_pre_activation, kernel, stream);
  }
  ForwardCall call;
  call.parse({gate, activation, alpha, limit, up_offset, weight_on_input, kernel});
  const Routing parts = Routing::parse("routing", routing);
  const Caller caller(kWords, *type, "x", x);
  caller.borrow("x", x, &call.x);
  borrow_weights(caller, {x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down}, &call);
  caller.borrow("weights", parts.weights, &call.weights);
  caller.borrow("offsets", parts.offsets, &call.offsets);
  caller.borrow("pairs", parts.pairs, &call.pairs);
  caller.borrow("slots", parts.slots, &call.slots);

  nb::object result = nb::borrow(out);
  nb::object saved = nb::borrow(pre_activation);
  caller.borrow_optional("out", out, &call.out);
  caller.borrow_optional("pre_activation", pre_activation, &call.pre_activation);
  call.make_outputs(want_pre_activation, [&](const char* name, TensorView* view,
                                             flashmoe_dtype dtype, int rank, const int64_t* shape) {
    nb::object& made = view == &call.out ? result : saved;
    made = caller.allocate(name, call.x.device(), dtype, rank, shape, nullptr, view);
  });
  launch(&call, caller, stream);
  return want_pre_activation ? nb::make_tuple(result, saved) : result;
}

nb::object grouped_product(nb::handle x, nb::handle w, nb::handle offsets, nb::handle counts,
                           nb::handle bias, nb::handle out, nb::handle kernel, nb::handle stream) {
  static nb::object* otherwise = nullptr;
  const TensorType* type = tensor_type(x);
  if (type == nullptr) {
    return dispatch(&otherwise, "grouped_product", x, w, offsets, counts, bias, out, kernel,
                    stream);
  }
  ProductCall call;
  call.params.kernel = parse_kernel(kernel);
  const Caller caller(kWords, *type, "x", x);
  caller.borrow("x", x, &call.x);
  caller.borrow("w", w, &call.w);
  caller.borrow_optional("offsets", offsets, &call.offsets);
  caller.borrow_optional("counts", counts, &call.counts);
  caller.borrow_optional("bias", bias, &call.bias);
  nb::object result = nb::borrow(out);
  caller.borrow_optional("out", out, &call.out);
  call.make_outputs([&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
                        const int64_t* shape) {
    result = caller.allocate(name, call.x.device(), dtype, rank, shape, nullptr, view);
  });
  launch(&call, caller, stream);
  return result;
}

// ---- router, routing and layer in one -----------------------------------------------------------

constexpr int64_t kRouterMultiple = 8;  // of experts, for the router's product

// The offsets of a product of one group that has every row, however many: they end at the rows.
constexpr int32_t kAllRows[2] = {0, INT32_MAX};

// kAllRows in the memory of `like`'s device. Made once for each; during the capture of a graph, in
// which it would be written only when the graph runs, for that graph alone.
nb::object all_rows(nb::handle like, flashmoe_device device) {
  static auto* const known = new std::vector<nb::object>();  // under the GIL
  const size_t index = static_cast<size_t>(device.device_id);
  if (index < known->size() && (*known)[index].is_valid()) return (*known)[index];
  const nb::object made =
      nb::module_::import_("flashmoe_science._moe").attr("torch_all_rows")(like);
  const nb::object tensor = nb::borrow(PyTuple_GetItem(made.ptr(), 0));
  if (PyTuple_GetItem(made.ptr(), 1) == Py_True) {
    if (index >= known->size()) known->resize(index + 1);
    (*known)[index] = tensor;
  }
  return tensor;
}

// Regions of one buffer, laid out before the buffer is there.
class Regions {
 public:
  static constexpr size_t kAlignment = 256;

  void add(TensorView* view, const int64_t* shape, int rank, flashmoe_dtype dtype,
           flashmoe_device device) {
    size_t bytes = dtype.bits / 8;
    for (int axis = 0; axis < rank; ++axis) bytes *= static_cast<size_t>(shape[axis]);
    Region& region = regions_[count_++];
    region = {view, {}, rank, dtype, device, size_};
    std::copy(shape, shape + rank, region.shape);
    view->describe(shape, rank, dtype, device);
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  size_t size() const { return size_; }

  void place(void* begin) const {
    for (size_t i = 0; i < count_; ++i) {
      const Region& region = regions_[i];
      region.view->describe(region.shape, region.rank, region.dtype, region.device, nullptr,
                            static_cast<char*>(begin) + region.offset);
    }
  }

 private:
  static constexpr size_t kMost = 8;

  struct Region {
    TensorView* view;
    int64_t shape[2];
    int rank;
    flashmoe_dtype dtype;
    flashmoe_device device;
    size_t offset;
  };

  Region regions_[kMost];
  size_t count_ = 0;
  size_t size_ = 0;
};

// The three operations of fused_moe. Logits and routing live in the workspace.
struct FusedCall {
  ProductCall product;
  RouteCall route;
  ForwardCall forward;
  bool with_product = false;
  Regions regions;

  // Bytes of workspace for all of it: the regions, and what the neediest operation asks for.
  size_t workspace_size() {
    size_t most = 0;
    const auto count = [&](auto* call, const Renames& renames) {
      size_t bytes = 0;
      using Call = std::remove_pointer_t<decltype(call)>;
      check_renamed(Call::kWorkspaceSize(&ready(call), &bytes), renames);
      most = std::max(most, bytes);
    };
    if (with_product) count(&product, names_of_router());
    count(&route, {});
    count(&forward, names_of_tokens());
    return regions.size() + most;
  }

  // Status of the operation that failed, in whose words *renames then is.
  flashmoe_status run(void* workspace, size_t bytes, void* stream, const Renames** renames) {
    char* rest = static_cast<char*>(workspace) + regions.size();
    const size_t rest_bytes = bytes - regions.size();
    *renames = &names_of_router();
    if (with_product) {
      const flashmoe_status status =
          flashmoe_grouped_product(&product.params, rest, rest_bytes, stream);
      if (status != FLASHMOE_OK) return status;
    }
    *renames = &names_of_tokens();
    const flashmoe_status status = flashmoe_moe_route(&route.params, rest, rest_bytes, stream);
    if (status != FLASHMOE_OK) return status;
    return flashmoe_moe_forward(&forward.params, rest, rest_bytes, stream);
  }

  static const Renames& names_of_router() {
    static const Renames renames = {
        {"x", "tokens"}, {"w", "router_weights"}, {"bias", "router_bias"}};
    return renames;
  }

  static const Renames& names_of_tokens() {
    static const Renames renames = {{"x", "tokens"}};
    return renames;
  }
};

void flatten(const char* name, TensorView* view) {
  if (view->flatten_rows()) return;
  raise_value_error(std::string(name) + ": its " + std::to_string(view->rank()) +
                    " dimensions are not rows at one distance, accepted are tensors of which "
                    "reshape(-1, " +
                    std::to_string(view->rank() > 0 ? view->extent(view->rank() - 1) : 1) +
                    ") makes no copy");
}

bool same_shape(const TensorView& a, const TensorView& b) {
  if (a.rank() != b.rank()) return false;
  for (int axis = 0; axis < a.rank() && axis < TensorView::kMaxRank; ++axis) {
    if (a.extent(axis) != b.extent(axis)) return false;
  }
  return true;
}

[[noreturn]] void raise_rank(const char* name, int got, int accepted) {
  raise_value_error(std::string(name) + ": got " + std::to_string(got) +
                    " dimensions, accepted are " + std::to_string(accepted));
}

nb::object fused_moe(nb::handle tokens, nb::handle router_weights, nb::handle w_gate_up,
                     nb::handle w_down, nb::handle top_k, nb::handle logits, nb::handle router_bias,
                     nb::handle scoring, nb::handle renormalize, nb::handle selection_bias,
                     nb::handle num_groups, nb::handle top_groups, nb::handle scale,
                     nb::handle w_up, nb::handle gate, nb::handle activation, nb::handle b_gate_up,
                     nb::handle b_up, nb::handle b_down, nb::handle alpha, nb::handle limit,
                     nb::handle up_offset, nb::handle weight_on_input, nb::handle out,
                     nb::handle kernel, nb::handle stream) {
  static nb::object* otherwise = nullptr;
  const int64_t k = parse_top_k(top_k);
  const auto step_by_step = [&] {
    return dispatch(&otherwise, "fused_moe", tokens, router_weights, w_gate_up, w_down, k, logits,
                    router_bias, scoring, renormalize, selection_bias, num_groups, top_groups,
                    scale, w_up, gate, activation, b_gate_up, b_up, b_down, alpha, limit, up_offset,
                    weight_on_input, out, kernel, stream);
  };
  const TensorType* type = tensor_type(tokens);
  if (type == nullptr || type->torch == nullptr) return step_by_step();
  if (router_weights.is_none() == logits.is_none()) {
    raise_value_error(std::string("router_weights: got ") +
                      (logits.is_none() ? "neither it nor logits" : "both it and logits") +
                      ", accepted is one of the two");
  }
  FusedCall call;
  call.route.parse({scoring, renormalize, num_groups, top_groups, scale});
  call.forward.parse({gate, activation, alpha, limit, up_offset, weight_on_input, kernel});
  const Caller caller(kWords, *type, "tokens", tokens);

  ForwardCall& forward = call.forward;
  caller.borrow("tokens", tokens, &forward.x);
  const flashmoe_device device = forward.x.device();
  const flashmoe_dtype dtype = forward.x.tensor().dtype;
  nb::object result = nb::borrow(out);
  if (!out.is_none()) {
    caller.borrow("out", out, &forward.out);
    if (!same_shape(forward.out, forward.x)) {
      raise_value_error("out: got another shape than that of tokens, accepted is the same");
    }
    flatten("out", &forward.out);
  } else if (is_float(dtype) && forward.x.rank() >= 1 && forward.x.rank() <= TensorView::kMaxRank) {
    result = caller.allocate("out", device, dtype, forward.x.rank(), forward.x.tensor().shape,
                             nullptr, &forward.out);
    flatten("out", &forward.out);
  }
  flatten("tokens", &forward.x);
  borrow_weights(caller, {tokens, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down}, &forward);
  const int64_t rows = forward.x.extent(0);

  nb::object offsets_of_router;
  if (router_weights.is_none()) {
    caller.borrow("logits", logits, &call.route.logits);
    flatten("logits", &call.route.logits);
    if (!router_bias.is_none()) {
      raise_value_error("router_bias: got one beside logits, accepted with router_weights alone");
    }
    if (call.route.logits.extent(0) != rows) {
      raise_value_error("logits: got those of " + std::to_string(call.route.logits.extent(0)) +
                        " tokens, but tokens has " + std::to_string(rows));
    }
  } else {
    ProductCall& product = call.product;
    caller.borrow("router_weights", router_weights, &product.w);
    if (product.w.rank() != 2) raise_rank("router_weights", product.w.rank(), 2);
    const int64_t experts = product.w.extent(0);
    if (experts % kRouterMultiple != 0 || experts > kMaxExperts) return step_by_step();
    product.w.add_leading_extent();
    if (!router_bias.is_none()) {
      caller.borrow("router_bias", router_bias, &product.bias);
      if (product.bias.rank() != 1) raise_rank("router_bias", product.bias.rank(), 1);
      product.bias.add_leading_extent();
    }
    product.x.borrow(caller.type(), "tokens", tokens);
    product.x.flatten_rows();
    const int64_t both[] = {2};
    if (device.device_type == FLASHMOE_DEVICE_CUDA) {
      offsets_of_router = all_rows(tokens, device);
      product.offsets.borrow(caller.type(), "offsets", offsets_of_router);
    } else {
      product.offsets.describe(both, 1, kInt32, device, nullptr, const_cast<int32_t*>(kAllRows));
    }
    const int64_t shape[] = {rows, experts};
    call.regions.add(&product.out, shape, 2, dtype, device);
    call.route.logits.describe(shape, 2, dtype, device);
    call.with_product = true;
  }
  caller.borrow_optional("selection_bias", selection_bias, &call.route.selection_bias);

  RouteExtents extents;
  if (!extents_of_logits(call.route.logits, k, &extents)) {
    raise_value_error("logits: got " + std::to_string(call.route.logits.extent(1)) +
                      " experts, accepted are 1 to 1024");
  }
  call.route.make_outputs(
      extents, false,
      [&](const char*, TensorView* view, flashmoe_dtype type_of_view, int rank,
          const int64_t* shape) { call.regions.add(view, shape, rank, type_of_view, device); });
  const auto hand_over = [&] {  // what one operation writes and the next one reads
    if (call.with_product) {
      const flashmoe_tensor& made = call.product.out.tensor();
      call.route.logits.describe(made.shape, 2, dtype, device, nullptr, made.data);
    }
    const auto copy = [&](const TensorView& from, TensorView* to) {
      const flashmoe_tensor& tensor = from.tensor();
      to->describe(tensor.shape, tensor.ndim, tensor.dtype, device, tensor.strides, tensor.data);
    };
    copy(call.route.weights, &forward.weights);
    copy(call.route.offsets, &forward.offsets);
    copy(call.route.pairs, &forward.pairs);
    copy(call.route.slots, &forward.slots);
  };
  hand_over();

  bool named = false;
  void* handle = caller.stream(stream, device, &named);
  const size_t bytes = call.workspace_size();
  const bool on_gpu = device.device_type == FLASHMOE_DEVICE_CUDA;
  TensorView scratch;
  nb::object workspace;
  if (on_gpu && bytes > 0) {
    workspace = caller.workspace(bytes, device, handle, named, &scratch);
  }
  const HostWorkspace on_host(on_gpu ? 0 : bytes);
  void* const memory = on_gpu ? scratch.tensor().data : on_host.data();
  if (memory == nullptr && bytes > 0) {
    raise_status(FLASHMOE_ERROR_OUT_OF_MEMORY, "tokens: there is no memory for the " +
                                                   std::to_string(bytes) +
                                                   " bytes of workspace that the call needs");
  }
  call.regions.place(memory);
  hand_over();
  ready(&call.product);
  ready(&call.route);
  ready(&call.forward);
  const Renames* renames = nullptr;
  flashmoe_status status;
  {
    nb::gil_scoped_release release;
    status = call.run(memory, bytes, handle, &renames);
  }
  check_renamed(status, *renames);
  return result;
}

// ---- tensors and options by name ----------------------------------------------------------------

nb::object item(const nb::dict& dict, const char* name) {
  return nb::borrow<nb::object>(dict.attr("get")(name));
}

flashmoe_device device_of(nb::handle pair) {
  return {nb::cast<int32_t>(pair[0]), nb::cast<int32_t>(pair[1])};
}

int32_t integers(nb::handle sequence, int64_t* values) {
  const size_t count = nb::len(sequence);
  for (size_t i = 0; i < count && i < TensorView::kMaxRank; ++i) {
    values[i] = nb::cast<int64_t>(sequence[i]);
  }
  return static_cast<int32_t>(count);
}

// A tensor, or a tuple (shape, dtype's code and bits, device's type and id, strides or None) of one
// that need not exist.
void view_argument(const char* name, nb::handle object, Access access, TensorView* view) {
  if (!PyTuple_Check(object.ptr())) return view->borrow(name, object, access);
  int64_t shape[TensorView::kMaxRank];
  int64_t strides[TensorView::kMaxRank];
  const int32_t rank = integers(object[0], shape);
  const nb::object dtype = object[1];
  const nb::object given = object[3];
  if (!given.is_none()) integers(given, strides);
  view->describe(shape, rank, {nb::cast<uint8_t>(dtype[0]), nb::cast<uint8_t>(dtype[1]), 1},
                 device_of(object[2]), given.is_none() ? nullptr : strides);
}

template <class Call>
void view_arguments(const nb::dict& tensors, Call* call) {
  for (const Field<Call>& field : fields_of(*call)) {
    const nb::object tensor = item(tensors, field.name);
    if (!tensor.is_none()) {
      view_argument(field.name, tensor, field.access, &(call->*field.view));
    }
  }
}

// The kernel's name stays that of the string in `options`.
void parse_options(const nb::dict& options, RouteCall* call) {
  if (item(options, "scoring").is_none()) return;  // ids are given
  const nb::object scoring = item(options, "scoring");
  const nb::object renormalize = item(options, "renormalize");
  const nb::object num_groups = item(options, "num_groups");
  const nb::object top_groups = item(options, "top_groups");
  const nb::object scale = item(options, "scale");
  call->parse({scoring, renormalize, num_groups, top_groups, scale});
}

void parse_options(const nb::dict& options, ForwardCall* call) {
  const nb::object gate = item(options, "gate");
  const nb::object activation = item(options, "activation");
  const nb::object alpha = item(options, "alpha");
  const nb::object limit = item(options, "limit");
  const nb::object up_offset = item(options, "up_offset");
  const nb::object weight_on_input = item(options, "weight_on_input");
  const nb::object kernel = item(options, "kernel");
  call->parse({gate, activation, alpha, limit, up_offset, weight_on_input, kernel});
}

void parse_options(const nb::dict& options, ProductCall* call) {
  call->params.kernel = parse_kernel(item(options, "kernel"));
}

bool wants(const nb::dict& options, const char* name) {
  const nb::object flag = item(options, name);
  return !flag.is_none() && parse_flag(name, flag);
}

// Has `make` make the outputs that are not given.
template <class Make>
void make_outputs(const nb::dict& options, RouteCall* call, const Make& make) {
  RouteExtents extents;
  const nb::object experts = item(options, "num_experts");
  const bool known =
      experts.is_none()
          ? extents_of_logits(call->logits, parse_top_k(item(options, "top_k")), &extents)
          : extents_of_ids(call->given_ids, nb::cast<int64_t>(experts), &extents);
  if (known) call->make_outputs(extents, wants(options, "return_lse"), make);
}

template <class Make>
void make_outputs(const nb::dict& options, ForwardCall* call, const Make& make) {
  call->make_outputs(wants(options, "return_pre_activation"), make);
}

template <class Make>
void make_outputs(const nb::dict&, ProductCall* call, const Make& make) {
  call->make_outputs(make);
}

nb::object describe(const flashmoe_moe_stage& stage) {
  nb::dict fields;
  fields["kernel"] = nb::str(stage.kernel);
  fields["grid"] = nb::make_tuple(stage.grid[0], stage.grid[1], stage.grid[2]);
  fields["block"] = nb::make_tuple(stage.block[0], stage.block[1], stage.block[2]);
  fields["shared_bytes"] = nb::int_(stage.shared_bytes);
  fields["cluster"] = nb::int_(stage.cluster);
  fields["tile_rows"] = nb::int_(stage.tile_rows);
  fields["tile_tokens"] = nb::int_(stage.tile_tokens);
  fields["stages"] = nb::int_(stage.stages);
  return fields;
}

Fields describe(const flashmoe_moe_plan& plan) {
  nb::list launches;
  for (int32_t i = 0; i < plan.launches && i < FLASHMOE_MOE_MAX_STAGES; ++i) {
    launches.append(describe(plan.stage[i]));
  }
  Fields fields;
  fields["family"] = nb::str(plan.family);
  fields["isa"] = nb::str(plan.isa);
  fields["launches"] = launches;
  fields["workspace_bytes"] = nb::int_(plan.workspace_bytes);
  fields["flops"] = nb::float_(plan.flops);
  fields["rejected"] = nb::str(plan.rejected);
  return fields;
}

// Does `work` with an empty call of the operation of that name.
template <class Work>
auto with_operation(const std::string& operation, const Work& work) {
  if (operation == "route") return work(RouteCall());
  if (operation == "forward") return work(ForwardCall());
  if (operation == "grouped_product") return work(ProductCall());
  raise_value_error("operation: got '" + operation +
                    "', accepted are 'route', 'forward' and 'grouped_product'");
}

using Named = nb::typed<nb::dict, nb::str, nb::any>;

const Renames& names_of(const nb::dict& options) {
  static const Renames none;
  return item(options, "num_experts").is_none() ? none : names_of_given();
}

const char* name_of_dtype(flashmoe_dtype dtype) {
  if (dtype.code == dlpack::kInt) return "int32";
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT) return "bfloat16";
  return dtype.bits == 16 ? "float16" : "float32";
}

void moe_call(const std::string& operation, Named tensors, Named options, nb::callable allocate,
              nb::handle stream) {
  const auto work = [&](auto&& call) {
    using Call = std::decay_t<decltype(call)>;
    parse_options(options, &call);
    view_arguments(tensors, &call);
    std::vector<nb::object> kept;
    const auto make = [&](const char* name, const char* dtype, int rank, const int64_t* shape,
                          TensorView* view) {
      nb::list extents;
      for (int axis = 0; axis < rank; ++axis) extents.append(nb::int_(shape[axis]));
      kept.push_back(allocate(name, nb::tuple(extents), dtype));
      view->borrow(name, kept.back(), Access::kWrite);
    };
    if (call.first().get() != nullptr) {
      make_outputs(
          options, &call,
          [&](const char* name, TensorView* view, flashmoe_dtype dtype, int rank,
              const int64_t* shape) { make(name, name_of_dtype(dtype), rank, shape, view); });
    }
    ready(&call);
    void* handle = nullptr;
    parse_stream(stream, &handle);
    const Renames& renames = names_of(options);
    TensorView scratch;
    size_t bytes = 0;
    if (call.first().get() != nullptr &&
        call.first().device().device_type == FLASHMOE_DEVICE_CUDA) {
      check_renamed(Call::kWorkspaceSize(&call.params, &bytes), renames);
      const int64_t shape[] = {static_cast<int64_t>(bytes)};
      if (bytes > 0) make("workspace", "uint8", 1, shape, &scratch);
    }
    check_renamed(run(call, scratch.tensor().data, bytes, handle), renames);
  };
  with_operation(operation, work);
}

Fields moe_plan(const std::string& operation, Named tensors, Named options) {
  const auto work = [&](auto&& call) -> Fields {
    using Call = std::decay_t<decltype(call)>;
    parse_options(options, &call);
    view_arguments(tensors, &call);
    if (call.first().get() != nullptr) {
      const flashmoe_device device = call.first().device();
      make_outputs(options, &call,
                   [&](const char*, TensorView* view, flashmoe_dtype dtype, int rank,
                       const int64_t* shape) { view->describe(shape, rank, dtype, device); });
    }
    flashmoe_moe_plan made = flashmoe_moe_plan_init();
    check_renamed(Call::kPlan(&ready(&call), &made), names_of(options));
    return describe(made);
  };
  return with_operation(operation, work);
}

}  // namespace

void define_moe(nb::module_& module) {
  module.def("bind_moe_route", &NativeFunction<&moe_route>::like, nb::arg("function"),
             "moe_route with the signature of a Python function: see bind_flash_attention.");
  module.def("moe_route", &moe_route, nb::arg("logits").none(), nb::arg("top_k").none(),
             nb::arg("scoring").none(), nb::arg("renormalize").none(),
             nb::arg("selection_bias").none(), nb::arg("num_groups").none(),
             nb::arg("top_groups").none(), nb::arg("scale").none(), nb::arg("return_lse").none(),
             nb::arg("out").none(), nb::arg("stream").none(),
             "flashmoe_science.moe_route with all of its arguments.");
  module.def("moe_route_given", &moe_route_given, nb::arg("ids").none(), nb::arg("weights").none(),
             nb::arg("num_experts").none(), nb::arg("expert_map").none(), nb::arg("out").none(),
             nb::arg("stream").none(),
             "flashmoe_science.moe_route_given with all of its arguments.");
  module.def("bind_moe_forward", &NativeFunction<&moe_forward>::like, nb::arg("function"),
             "moe_forward with the signature of a Python function: see bind_flash_attention.");
  module.def("moe_forward", &moe_forward, nb::arg("x").none(), nb::arg("w_gate_up").none(),
             nb::arg("w_down").none(), nb::arg("routing").none(), nb::arg("w_up").none(),
             nb::arg("gate").none(), nb::arg("activation").none(), nb::arg("b_gate_up").none(),
             nb::arg("b_up").none(), nb::arg("b_down").none(), nb::arg("alpha").none(),
             nb::arg("limit").none(), nb::arg("up_offset").none(),
             nb::arg("weight_on_input").none(), nb::arg("out").none(),
             nb::arg("pre_activation").none(), nb::arg("return_pre_activation").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.moe_forward with all of its arguments.");
  module.def("bind_grouped_product", &NativeFunction<&grouped_product>::like, nb::arg("function"),
             "grouped_product with the signature of a Python function: see bind_flash_attention.");
  module.def("grouped_product", &grouped_product, nb::arg("x").none(), nb::arg("w").none(),
             nb::arg("offsets").none(), nb::arg("counts").none(), nb::arg("bias").none(),
             nb::arg("out").none(), nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.grouped_product with all of its arguments.");
  module.def("bind_fused_moe", &NativeFunction<&fused_moe>::like, nb::arg("function"),
             "fused_moe with the signature of a Python function: see bind_flash_attention.");
  module.def("fused_moe", &fused_moe, nb::arg("tokens").none(), nb::arg("router_weights").none(),
             nb::arg("w_gate_up").none(), nb::arg("w_down").none(), nb::arg("top_k").none(),
             nb::arg("logits").none(), nb::arg("router_bias").none(), nb::arg("scoring").none(),
             nb::arg("renormalize").none(), nb::arg("selection_bias").none(),
             nb::arg("num_groups").none(), nb::arg("top_groups").none(), nb::arg("scale").none(),
             nb::arg("w_up").none(), nb::arg("gate").none(), nb::arg("activation").none(),
             nb::arg("b_gate_up").none(), nb::arg("b_up").none(), nb::arg("b_down").none(),
             nb::arg("alpha").none(), nb::arg("limit").none(), nb::arg("up_offset").none(),
             nb::arg("weight_on_input").none(), nb::arg("out").none(), nb::arg("kernel").none(),
             nb::arg("stream").none(), "flashmoe_science.fused_moe with all of its arguments.");
  module.def("moe_call", &moe_call, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
             nb::arg("allocate"), nb::arg("stream").none(),
             "An operation of the C ABI, 'route', 'forward' or 'grouped_product', on tensors of "
             "any kind by the C ABI's names. Outputs that are not among them, and a GPU's "
             "workspace, are what allocate(name, shape, name of dtype) returns.");
  module.def("moe_plan", &moe_plan, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
             "The fields of flashmoe_moe_plan for these tensors. Outputs may be absent, and in "
             "place of a tensor a tuple (shape, dtype's code and bits, device's type and id, "
             "strides or None) will do.");
}

}  // namespace flashmoe
