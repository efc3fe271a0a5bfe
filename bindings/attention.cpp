// flash_attention: one call from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._dispatch, which knows the other frameworks and comes
// back through attention_forward.
#include "bindings/attention.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/caller.h"
#include "bindings/errors.h"
#include "bindings/fields.h"
#include "bindings/options.h"
#include "bindings/plan.h"
#include "bindings/tensor.h"
#include "bindings/workspace.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int kRank = 4;
constexpr OperationWords kWords = {"attention", "q, k, v, out and lse",
                                   "out, and lse with return_lse"};

flashmoe_attention_forward_params parse_options(nb::handle causal, nb::handle window,
                                                nb::handle scale, nb::handle softcap,
                                                nb::handle layout, nb::handle kernel) {
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.layout = parse_layout(layout);
  params.causal = parse_causal(causal);
  parse_window(window, &params);
  params.scale = parse_scale(scale);
  params.softcap = parse_softcap(softcap);
  params.kernel = parse_kernel(kernel);
  return params;
}

// The five tensors of a call, viewed, and its options.
struct Call {
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView out;
  TensorView lse;
  flashmoe_attention_forward_params params;

  Call(nb::handle causal, nb::handle window, nb::handle scale, nb::handle softcap,
       nb::handle layout, nb::handle kernel)
      : params(parse_options(causal, window, scale, softcap, layout, kernel)) {}

  const flashmoe_attention_forward_params& ready() {
    params.q = q.get();
    params.k = k.get();
    params.v = v.get();
    params.out = out.get();
    params.lse = lse.get();
    return params;
  }

  // Whether out and lse can be made after q and v; if not, the library says what is wrong.
  bool describes_outputs() const {
    const flashmoe_dtype dtype = q.tensor().dtype;
    const bool half = dtype.bits == 16 &&
                      (dtype.code == FLASHMOE_DTYPE_FLOAT || dtype.code == FLASHMOE_DTYPE_BFLOAT);
    const bool single = dtype.bits == 32 && dtype.code == FLASHMOE_DTYPE_FLOAT;
    return q.rank() == kRank && v.rank() == kRank && (half || single) && dtype.lanes == 1;
  }

  void shape_of_out(int64_t shape[kRank]) const {
    for (int axis = 0; axis < kRank - 1; ++axis) shape[axis] = q.extent(axis);
    shape[kRank - 1] = v.extent(kRank - 1);
  }

  void shape_of_lse(int64_t shape[kRank - 1]) const {
    const bool bhsd = params.layout == FLASHMOE_LAYOUT_BHSD;
    shape[0] = q.extent(0);
    shape[1] = q.extent(bhsd ? 1 : 2);
    shape[2] = q.extent(bhsd ? 2 : 1);
  }
};

// The GIL is free while the library works: a launch can wait for the GPU's queue, and what empties
// that queue may be a host callback in Python.
flashmoe_status run(const flashmoe_attention_forward_params& params, void* workspace, size_t bytes,
                    void* stream) {
  nb::gil_scoped_release release;
  if (params.q != nullptr && params.q->device.device_type != FLASHMOE_DEVICE_CUDA) {
    return forward_on_host(params);
  }
  return flashmoe_attention_forward(&params, workspace, bytes, stream);
}

nb::object allocate_out(Caller& caller, Call* call) {
  int64_t shape[kRank];
  call->shape_of_out(shape);
  if (shape[kRank - 1] == call->q.extent(kRank - 1)) {
    return caller.allocate_like_first("out", call->q, &call->out);
  }
  return caller.allocate("out", call->q.device(), call->q.tensor().dtype, kRank, shape, &call->out);
}

nb::object allocate_lse(Caller& caller, Call* call) {
  constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  int64_t shape[kRank - 1];
  call->shape_of_lse(shape);
  return caller.allocate("lse", call->q.device(), kFloat32, kRank - 1, shape, &call->lse);
}

// ---- entry points -------------------------------------------------------------------------------

nb::object flash_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle causal,
                           nb::handle window, nb::handle scale, nb::handle softcap,
                           nb::handle layout, nb::handle return_lse, nb::handle out, nb::handle lse,
                           nb::handle kernel, nb::handle stream) {
  const bool want_lse = parse_flag("return_lse", return_lse);
  const TensorType* type = tensor_type(q);
  if (type == nullptr) {
    return nb::module_::import_("flashmoe_science._dispatch")
        .attr("flash_attention")(q, k, v, causal, window, scale, softcap, layout, return_lse, out,
                                 lse, kernel, stream);
  }
  Call call(causal, window, scale, softcap, layout, kernel);
  Caller caller(kWords, *type, "q", q);
  caller.borrow("q", q, &call.q);
  caller.borrow("k", k, &call.k);
  caller.borrow("v", v, &call.v);

  nb::object result = nb::borrow(out);
  nb::object sums = nb::borrow(lse);
  if (!out.is_none()) {
    caller.borrow("out", out, &call.out, Access::kWrite);
  } else if (call.describes_outputs()) {
    result = allocate_out(caller, &call);
  }
  if (!lse.is_none()) {
    caller.borrow("lse", lse, &call.lse, Access::kWrite);
  } else if (want_lse && call.describes_outputs()) {
    sums = allocate_lse(caller, &call);
  }

  const flashmoe_device device = call.q.device();
  bool named = false;
  void* handle = caller.stream(stream, device, &named);
  flashmoe_status status = run(call.ready(), nullptr, 0, handle);
  // Few calls need workspace: asking each would cost those that do not.
  if (status == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL && device.device_type == FLASHMOE_DEVICE_CUDA) {
    size_t bytes = 0;
    check(flashmoe_attention_forward_workspace_size(&call.params, &bytes));
    DeviceWorkspace workspace;
    workspace.allocate(caller, bytes, device, handle, named);
    status = run(call.params, workspace.data(), bytes, handle);
  }
  check(status);
  caller.finish();
  return want_lse ? nb::make_tuple(result, sums) : result;
}

// Returns the bytes of workspace that were missing on a GPU, where nothing was launched then.
size_t attention_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                         nb::handle causal, nb::handle window, nb::handle scale, nb::handle softcap,
                         nb::handle layout, nb::handle kernel, nb::handle workspace,
                         nb::handle stream) {
  Call call(causal, window, scale, softcap, layout, kernel);
  TensorView scratch;
  call.q.borrow("q", q, Access::kRead);
  call.k.borrow("k", k, Access::kRead);
  call.v.borrow("v", v, Access::kRead);
  if (!out.is_none()) call.out.borrow("out", out, Access::kWrite);
  if (!lse.is_none()) call.lse.borrow("lse", lse, Access::kWrite);
  if (!workspace.is_none()) scratch.borrow("workspace", workspace, Access::kWrite);
  void* handle = nullptr;
  parse_stream(stream, &handle);
  size_t bytes = scratch.get() != nullptr ? static_cast<size_t>(scratch.extent(0)) : 0;
  const flashmoe_status status = run(call.ready(), scratch.tensor().data, bytes, handle);
  if (status == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL && workspace.is_none() &&
      call.q.device().device_type == FLASHMOE_DEVICE_CUDA) {
    check(flashmoe_attention_forward_workspace_size(&call.params, &bytes));
    return bytes;
  }
  check(status);
  return 0;
}

Fields plan(Call* call, bool return_lse) {
  int64_t shape[kRank];
  if (call->out.get() == nullptr && call->describes_outputs()) {
    call->shape_of_out(shape);
    call->out.describe(shape, kRank, call->q.tensor().dtype, call->q.device());
  }
  if (return_lse && call->lse.get() == nullptr && call->describes_outputs()) {
    call->shape_of_lse(shape);
    call->lse.describe(shape, kRank - 1, {FLASHMOE_DTYPE_FLOAT, 32, 1}, call->q.device());
  }
  flashmoe_plan made = flashmoe_plan_init();
  check(flashmoe_attention_forward_plan(&call->ready(), &made));
  return describe(made);
}

Fields attention_plan(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                      nb::handle causal, nb::handle window, nb::handle scale, nb::handle softcap,
                      nb::handle layout, nb::handle kernel, bool return_lse) {
  Call call(causal, window, scale, softcap, layout, kernel);
  call.q.borrow("q", q, Access::kRead);
  call.k.borrow("k", k, Access::kRead);
  call.v.borrow("v", v, Access::kRead);
  if (!out.is_none()) call.out.borrow("out", out, Access::kWrite);
  if (!lse.is_none()) call.lse.borrow("lse", lse, Access::kWrite);
  return plan(&call, return_lse);
}

using Integers = nb::typed<nb::sequence, int64_t>;

Fields attention_plan_for(Integers q, Integers k, Integers v,
                          nb::typed<nb::sequence, Integers> dtypes, Integers device,
                          nb::handle causal, nb::handle window, nb::handle scale,
                          nb::handle softcap, nb::handle layout, nb::handle kernel,
                          bool return_lse) {
  Call call(causal, window, scale, softcap, layout, kernel);
  const flashmoe_device where = {nb::cast<int32_t>(device[0]), nb::cast<int32_t>(device[1])};
  TensorView* const views[] = {&call.q, &call.k, &call.v};
  const Integers shapes[] = {q, k, v};
  for (size_t i = 0; i < 3; ++i) {
    int64_t extents[TensorView::kMaxRank];
    const size_t rank = nb::len(shapes[i]);
    for (size_t axis = 0; axis < rank && axis < TensorView::kMaxRank; ++axis) {
      extents[axis] = nb::cast<int64_t>(shapes[i][axis]);
    }
    const nb::object dtype = dtypes[i];  // (code, bits)
    views[i]->describe(extents, static_cast<int32_t>(rank),
                       {nb::cast<uint8_t>(dtype[0]), nb::cast<uint8_t>(dtype[1]), 1}, where);
  }
  return plan(&call, return_lse);
}

Fields option_numbers(nb::handle causal, nb::handle window, nb::handle scale, nb::handle softcap,
                      nb::handle layout, nb::handle kernel) {
  const auto params = parse_options(causal, window, scale, softcap, layout, kernel);
  Fields fields;
  fields["causal"] = nb::int_(params.causal);
  fields["window"] = nb::int_(params.window);
  fields["window_left"] = nb::int_(params.window_left);
  fields["window_right"] = nb::int_(params.window_right);
  fields["scale"] = nb::float_(static_cast<double>(params.scale));
  fields["softcap"] = nb::float_(static_cast<double>(params.softcap));
  fields["layout"] = nb::int_(params.layout);
  fields["kernel"] = nb::str(params.kernel != nullptr ? params.kernel : "");
  return fields;
}

std::optional<uintptr_t> stream_handle(nb::handle stream) {
  void* handle = nullptr;
  if (!parse_stream(stream, &handle)) return std::nullopt;
  return reinterpret_cast<uintptr_t>(handle);
}

}  // namespace

void define_attention(nb::module_& module) {
  module.def("flash_attention", &flash_attention, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("causal").none(), nb::arg("window").none(),
             nb::arg("scale").none(), nb::arg("softcap").none(), nb::arg("layout").none(),
             nb::arg("return_lse").none(), nb::arg("out").none(), nb::arg("lse").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.flash_attention with all of its arguments.");
  module.def(
      "attention_forward", &attention_forward, nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("out").none(), nb::arg("lse").none(), nb::kw_only(), nb::arg("causal").none(),
      nb::arg("window").none(), nb::arg("scale").none(), nb::arg("softcap").none(),
      nb::arg("layout").none(), nb::arg("kernel").none(), nb::arg("workspace").none(),
      nb::arg("stream").none(),
      "The C ABI's flashmoe_attention_forward on tensors of any kind. On the CPU the "
      "workspace is supplied here; on a GPU it is the caller's, a 1-d tensor of bytes: without "
      "one that is needed nothing is launched and its size is returned.");
  module.def("attention_plan", &attention_plan, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("out").none(), nb::arg("lse").none(), nb::kw_only(),
             nb::arg("causal").none(), nb::arg("window").none(), nb::arg("scale").none(),
             nb::arg("softcap").none(), nb::arg("layout").none(), nb::arg("kernel").none(),
             nb::arg("return_lse"), "The fields of flashmoe_plan for these tensors.");
  module.def("attention_plan_for", &attention_plan_for, nb::arg("q"), nb::arg("k"), nb::arg("v"),
             nb::kw_only(), nb::arg("dtypes"), nb::arg("device"), nb::arg("causal").none(),
             nb::arg("window").none(), nb::arg("scale").none(), nb::arg("softcap").none(),
             nb::arg("layout").none(), nb::arg("kernel").none(), nb::arg("return_lse"),
             "The fields of flashmoe_plan for contiguous tensors of these shapes, with "
             "DLPack's numbers for the three dtypes (code, bits) and the device (type, id).");
  module.def(
      "option_numbers", &option_numbers, nb::arg("causal").none(), nb::arg("window").none(),
      nb::arg("scale").none(), nb::arg("softcap").none(), nb::arg("layout").none(),
      nb::arg("kernel").none(),
      "The options as the C ABI has them; scale 0, softcap 0 and kernel \"\" are the defaults.");
  module.def("stream_handle", &stream_handle, nb::arg("stream").none(),
             "The cudaStream_t of a stream object, or None.");
}

}  // namespace flashmoe
