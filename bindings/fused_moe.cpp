// fused_moe: router, routing and layer in one call, with all that lies between in one workspace.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/errors.h"
#include "bindings/moe.h"
#include "bindings/moe_calls.h"

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
    regions_[count_++] = {view, size_};
    view->describe(shape, rank, dtype, device);
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  size_t size() const { return size_; }

  void place(void* begin) const {
    for (size_t i = 0; i < count_; ++i) {
      regions_[i].view->place(static_cast<char*>(begin) + regions_[i].offset);
    }
  }

 private:
  static constexpr size_t kMost = 8;

  struct Region {
    TensorView* view;
    size_t offset;
  };

  Region regions_[kMost];
  size_t count_ = 0;
  size_t size_ = 0;
};

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

void check_rank(const char* name, const TensorView& view, int accepted) {
  if (view.rank() == accepted) return;
  raise_value_error(std::string(name) + ": got " + std::to_string(view.rank()) +
                    " dimensions, accepted are " + std::to_string(accepted));
}

const Renames& names_of_router() {
  static const Renames renames = {
      {"x", "tokens", true}, {"w", "router_weights", true}, {"bias", "router_bias", false}};
  return renames;
}

const Renames& names_of_tokens() {
  static const Renames renames = {{"x", "tokens", true}};
  return renames;
}

// The three operations of fused_moe on tensors with the exchange API. Logits and routing live in the
// workspace. The functions are called in this order, tokens first.
class FusedCall {
 public:
  FusedCall(Caller& caller, const RouteOptions& route, const ForwardOptions& forward)
      : caller_(caller) {
    route_.parse(route);
    forward_.parse(forward);
  }

  // Returns out, made where None is given.
  nb::object view_tokens(nb::handle tokens, nb::handle out) {
    caller_.borrow("tokens", tokens, &forward_.x);
    device_ = forward_.x.device();
    dtype_ = forward_.x.tensor().dtype;
    const int rank = forward_.x.rank();
    nb::object result = nb::borrow(out);
    if (!out.is_none()) {
      caller_.borrow("out", out, &forward_.out, Access::kWrite);
      if (!same_shape(forward_.out, forward_.x)) {
        raise_value_error("out: got another shape than that of tokens, accepted is the same");
      }
    } else if (is_float(dtype_) && rank >= 1 && rank <= TensorView::kMaxRank) {
      result =
          caller_.allocate("out", device_, dtype_, rank, forward_.x.tensor().shape, &forward_.out);
    }
    if (forward_.out.get() != nullptr) flatten("out", &forward_.out);
    flatten("tokens", &forward_.x);
    return result;
  }

  void view_logits(nb::handle logits) {
    source_ = "logits";
    take_logits(logits);
  }

  // The router's product by the library, or by the tensors' own where that cannot be.
  void view_router(nb::handle tokens, nb::handle router_weights, nb::handle router_bias,
                   nb::handle stream) {
    source_ = "router_weights";
    caller_.borrow(source_, router_weights, &product_.w);
    check_rank(source_, product_.w, 2);
    if (!router_bias.is_none()) {
      caller_.borrow("router_bias", router_bias, &product_.bias);
      check_rank("router_bias", product_.bias, 1);
    }
    const bool has_offsets = !on_gpu() || caller_.type().is_torch;
    if (has_offsets && product_.w.extent(0) % kRouterMultiple == 0) {
      multiply_by_router(tokens);
    } else {
      made_logits_ = dispatch("router_product", tokens, router_weights, router_bias, stream);
      take_logits(made_logits_);
    }
  }

  void view_experts(const ForwardTensors& tensors, nb::handle selection_bias, int64_t top_k) {
    borrow_weights(caller_, tensors, &forward_);
    caller_.borrow_optional("selection_bias", selection_bias, &route_.selection_bias);
    RouteExtents extents;
    if (!extents_of_logits(route_.logits, top_k, &extents)) {
      raise_value_error(std::string(source_) + ": got " + std::to_string(route_.logits.extent(1)) +
                        " experts, accepted are 1 to 1024");
    }
    if (forward_.w_gate_up.rank() == 3 && forward_.w_gate_up.extent(0) != extents.experts) {
      raise_value_error(std::string(source_) + ": its number of experts is " +
                        std::to_string(extents.experts) + ", but w_gate_up has " +
                        std::to_string(forward_.w_gate_up.extent(0)));
    }
    route_.make_outputs(
        extents, false,
        [this](const char*, TensorView* view, flashmoe_dtype dtype, int rank,
               const int64_t* shape) { regions_.add(view, shape, rank, dtype, device_); });
    forward_.weights.describe(route_.weights);
    forward_.offsets.describe(route_.offsets);
    forward_.pairs.describe(route_.pairs);
    forward_.slots.describe(route_.slots);
    ready(&product_);
    ready(&route_);
    ready(&forward_);
  }

  void launch(nb::handle stream) {
    bool named = false;
    void* const handle = caller_.stream(stream, device_, &named);
    const size_t bytes = workspace_size();
    DeviceWorkspace on_device;
    if (on_gpu()) on_device.allocate(caller_, bytes, device_, handle, named);
    const HostWorkspace on_host(on_gpu() ? 0 : bytes);
    void* const memory = on_gpu() ? on_device.data() : on_host.data();
    if (memory == nullptr) {
      raise_status(FLASHMOE_ERROR_OUT_OF_MEMORY, "tokens: there is no memory for the " +
                                                     std::to_string(bytes) +
                                                     " bytes of workspace that the call needs");
    }
    regions_.place(memory);
    if (with_product_) route_.logits.place(product_.out.tensor().data);
    forward_.weights.place(route_.weights.tensor().data);
    forward_.offsets.place(route_.offsets.tensor().data);
    forward_.pairs.place(route_.pairs.tensor().data);
    forward_.slots.place(route_.slots.tensor().data);
    const Renames* renames = nullptr;
    flashmoe_status status;
    {
      nb::gil_scoped_release release;
      status = run(memory, bytes, handle, &renames);
    }
    check_renamed(status, *renames);
    caller_.finish();
  }

 private:
  bool on_gpu() const { return device_.device_type == FLASHMOE_DEVICE_CUDA; }

  void take_logits(nb::handle logits) {
    caller_.borrow("logits", logits, &route_.logits);
    flatten("logits", &route_.logits);
    if (route_.logits.extent(0) != forward_.x.extent(0)) {
      raise_value_error("logits: got those of " + std::to_string(route_.logits.extent(0)) +
                        " tokens, but tokens has " + std::to_string(forward_.x.extent(0)));
    }
  }

  void multiply_by_router(nb::handle tokens) {
    const int64_t experts = product_.w.extent(0);
    product_.w.add_leading_extent();
    if (product_.bias.get() != nullptr) product_.bias.add_leading_extent();
    product_.x.describe(forward_.x);
    const int64_t both[] = {2};
    if (on_gpu()) {
      all_rows_ = all_rows(tokens, device_);
      product_.offsets.borrow(caller_.type(), "offsets", all_rows_);
    } else {
      product_.offsets.describe(both, 1, kInt32, device_, nullptr, const_cast<int32_t*>(kAllRows));
    }
    const int64_t shape[] = {forward_.x.extent(0), experts};
    regions_.add(&product_.out, shape, 2, dtype_, device_);
    with_product_ = true;
    route_.logits.describe(product_.out);
  }

  // Bytes for all of it: the regions, and what the neediest operation asks for.
  size_t workspace_size() {
    size_t most = 0;
    const auto count = [&](auto* call, const Renames& renames) {
      size_t bytes = 0;
      using Call = std::remove_pointer_t<decltype(call)>;
      check_renamed(Call::kWorkspaceSize(&call->params, &bytes), renames);
      most = std::max(most, bytes);
    };
    if (with_product_) count(&product_, names_of_router());
    count(&route_, {});
    count(&forward_, names_of_tokens());
    return regions_.size() + most;
  }

  // Status of the operation that failed, in whose words *renames then is.
  flashmoe_status run(void* workspace, size_t bytes, void* stream, const Renames** renames) const {
    char* const rest = static_cast<char*>(workspace) + regions_.size();
    const size_t rest_bytes = bytes - regions_.size();
    *renames = &names_of_router();
    if (with_product_) {
      const flashmoe_status status =
          flashmoe_grouped_product(&product_.params, rest, rest_bytes, stream);
      if (status != FLASHMOE_OK) return status;
    }
    *renames = &names_of_tokens();
    const flashmoe_status status = flashmoe_moe_route(&route_.params, rest, rest_bytes, stream);
    if (status != FLASHMOE_OK) return status;
    return flashmoe_moe_forward(&forward_.params, rest, rest_bytes, stream);
  }

  Caller& caller_;
  ProductCall product_;
  RouteCall route_;
  ForwardCall forward_;
  Regions regions_;
  flashmoe_device device_ = {};
  flashmoe_dtype dtype_ = {};
  const char* source_ = nullptr;  // the argument that tells the number of experts
  bool with_product_ = false;
  nb::object all_rows_;
  nb::object made_logits_;
};

nb::object fused_moe(nb::handle tokens, nb::handle router_weights, nb::handle w_gate_up,
                     nb::handle w_down, nb::handle top_k, nb::handle logits, nb::handle router_bias,
                     nb::handle scoring, nb::handle renormalize, nb::handle selection_bias,
                     nb::handle num_groups, nb::handle top_groups, nb::handle scale,
                     nb::handle w_up, nb::handle gate, nb::handle activation, nb::handle b_gate_up,
                     nb::handle b_up, nb::handle b_down, nb::handle alpha, nb::handle limit,
                     nb::handle up_offset, nb::handle weight_on_input, nb::handle out,
                     nb::handle kernel, nb::handle stream) {
  const int64_t k = parse_top_k(top_k);
  const TensorType* type = tensor_type(tokens);
  if (type == nullptr) {
    return dispatch("fused_moe", tokens, router_weights, w_gate_up, w_down, k, logits, router_bias,
                    scoring, renormalize, selection_bias, num_groups, top_groups, scale, w_up, gate,
                    activation, b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input,
                    out, kernel, stream);
  }
  if (router_weights.is_none() == logits.is_none()) {
    raise_value_error(std::string("router_weights: got ") +
                      (logits.is_none() ? "neither it nor logits" : "both it and logits") +
                      ", accepted is one of the two");
  }
  if (!logits.is_none() && !router_bias.is_none()) {
    raise_value_error("router_bias: got one beside logits, accepted with router_weights alone");
  }
  Caller caller(kMoeWords, *type, "tokens", tokens);
  FusedCall call(caller, {scoring, renormalize, num_groups, top_groups, scale},
                 {gate, activation, alpha, limit, up_offset, weight_on_input, kernel});
  nb::object result = call.view_tokens(tokens, out);
  if (!logits.is_none()) {
    call.view_logits(logits);
  } else {
    call.view_router(tokens, router_weights, router_bias, stream);
  }
  call.view_experts({tokens, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down}, selection_bias, k);
  call.launch(stream);
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
             nb::arg("weight_on_input").none(), nb::arg("out").none(), nb::arg("kernel").none(),
             nb::arg("stream").none(), "flashmoe_science.fused_moe with all of its arguments.");
}

}  // namespace flashmoe
