// fused_moe: router, routing and layer in one call, with all that lies between in one workspace.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/moe.h"
#include "bindings/moe_calls.h"
#include "bindings/native_function.h"

namespace flashmoe {
namespace {

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
        {"x", "tokens", true}, {"w", "router_weights", true}, {"bias", "router_bias", false}};
    return renames;
  }

  static const Renames& names_of_tokens() {
    static const Renames renames = {{"x", "tokens", true}};
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
  const Caller caller(kMoeWords, *type, "tokens", tokens);

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
    if (experts % kRouterMultiple != 0) return step_by_step();
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

  const char* const source = call.with_product ? "router_weights" : "logits";
  RouteExtents extents;
  if (!extents_of_logits(call.route.logits, k, &extents)) {
    raise_value_error(std::string(source) + ": got " + std::to_string(call.route.logits.extent(1)) +
                      " experts, accepted are 1 to 1024");
  }
  if (forward.w_gate_up.rank() == 3 && forward.w_gate_up.extent(0) != extents.experts) {
    raise_value_error(std::string(source) + ": its number of experts is " +
                      std::to_string(extents.experts) + ", but w_gate_up has " +
                      std::to_string(forward.w_gate_up.extent(0)));
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

}  // namespace

void define_fused_moe(nb::module_& module) {
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
}

}  // namespace flashmoe
