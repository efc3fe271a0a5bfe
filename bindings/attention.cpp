// flash_attention and its backward: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._dispatch, which knows the other frameworks and comes
// back through `call` (bindings/operation.h).
#include "bindings/attention.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "bindings/calls.h"
#include "bindings/kept.h"
#include "bindings/operation.h"
#include "bindings/torch.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int kRank = 4;
constexpr OperationWords kWords = {"attention", "all tensors of a call",
                                   "out, and lse with return_lse",
                                   "records gradients of torch's inputs alone", true};

constexpr OperationWords kBackwardWords = {"attention backward", "all tensors of a call",
                                           "dq, dk, dv and dsinks", "has no backward pass yet",
                                           false};

// The Python function for calls that torch's autograd records or autocast casts.
Kept torchs_flash_attention("flashmoe_science._autograd", "flash_attention");

// The options of the scores, in both directions.
template <class Params>
constexpr Option<Params> layout_option() {
  return {"layout", [](nb::handle given, Params* p) { p->layout = parse_layout(given); }};
}
template <class Params>
constexpr Option<Params> causal_option() {
  return {"causal", [](nb::handle given, Params* p) { p->causal = parse_causal(given); }};
}
template <class Params>
constexpr Option<Params> window_option() {
  return {"window", [](nb::handle given, Params* p) {
            const bool causal = p->causal != FLASHMOE_CAUSAL_NONE;  // parsed before
            const Window window = parse_window(given, causal);
            p->window = window.ends;
            p->window_left = window.left;
            p->window_right = window.right;
          }};
}
template <class Params>
constexpr Option<Params> scale_option() {
  return {"scale", [](nb::handle given, Params* p) { p->scale = parse_scale(given); }};
}
template <class Params>
constexpr Option<Params> softcap_option() {
  return {"softcap", [](nb::handle given, Params* p) { p->softcap = parse_softcap(given); }};
}

struct AttentionCall {
  using Params = flashmoe_attention_forward_params;
  static constexpr char kName[] = "attention_forward";
  static constexpr char kTarget[] = "flashmoe_attention_forward_v1";
  static constexpr auto kPlan = &flashmoe_attention_forward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_attention_forward_workspace_size;
  static constexpr auto kRun = &flashmoe_attention_forward;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_attention_forward_params_init();
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView k_scale;
  TensorView v_scale;
  TensorView sinks;
  TensorView attn_bias;
  TensorView attn_mask;
  TensorView prior_out;
  TensorView prior_lse;
  TensorView out;
  TensorView lse;
  std::optional<Sequences> sequences;

  static constexpr Field<AttentionCall> kTensors[] = {
      {"q", &AttentionCall::q, &Params::q, Access::kRead},
      {"k", &AttentionCall::k, &Params::k, Access::kRead},
      {"v", &AttentionCall::v, &Params::v, Access::kRead},
      {"k_scale", &AttentionCall::k_scale, &Params::k_scale, Access::kRead},
      {"v_scale", &AttentionCall::v_scale, &Params::v_scale, Access::kRead},
      {"sinks", &AttentionCall::sinks, &Params::sinks, Access::kRead},
      {"attn_bias", &AttentionCall::attn_bias, &Params::attn_bias, Access::kRead},
      {"attn_mask", &AttentionCall::attn_mask, &Params::attn_mask, Access::kRead},
      {"prior_out", &AttentionCall::prior_out, &Params::prior_out, Access::kRead},
      {"prior_lse", &AttentionCall::prior_lse, &Params::prior_lse, Access::kRead},
      {"out", &AttentionCall::out, &Params::out, Access::kWrite},
      {"lse", &AttentionCall::lse, &Params::lse, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      layout_option<Params>(), causal_option<Params>(),  window_option<Params>(),
      scale_option<Params>(),  softcap_option<Params>(), kernel_option<Params>(),
  };

  const TensorView& first() const { return q; }

  template <class Make>
  void make_outputs(bool want_lse, const Make& make) {
    const flashmoe_dtype dtype = q.tensor().dtype;
    if (q.rank() != kRank || v.rank() != kRank || !is_float(dtype)) return;
    flashmoe_dtype of_out = dtype;
    if (prior_out.get() != nullptr && is_float(prior_out.tensor().dtype)) {
      of_out = prior_out.tensor().dtype;
    }
    if (out.get() == nullptr) {
      const int64_t shape[] = {q.extent(0), q.extent(1), q.extent(2), v.extent(3)};
      make("out", &out, of_out, kRank, shape);
    }
    if (want_lse && lse.get() == nullptr) {
      const bool bhsd = params.layout == FLASHMOE_LAYOUT_BHSD;
      const int64_t shape[] = {q.extent(0), q.extent(bhsd ? 1 : 2), q.extent(bhsd ? 2 : 1)};
      make("lse", &lse, is_fp64(dtype) ? kFloat64 : kFloat32, kRank - 1, shape);
    }
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(wants(options, "return_lse"), make);
  }
};

// Whether torch.autocast casts tensors of this call: it casts fp32.
bool is_cast(const AttentionCall& call) {
  for (const TensorView* view : {&call.q, &call.k, &call.v}) {
    const flashmoe_dtype dtype = view->tensor().dtype;
    if (dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 32) {
      return torch_casts(call.q.device());
    }
  }
  return false;
}

nb::object flash_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle causal,
                           nb::handle window, nb::handle scale, nb::handle softcap,
                           nb::handle sinks, nb::handle layout, nb::handle return_lse,
                           nb::handle out, nb::handle lse, nb::handle kernel, nb::handle stream,
                           nb::handle sequences, nb::handle attn_bias, nb::handle attn_mask,
                           nb::handle prior_out, nb::handle prior_lse) {
  const bool want_lse = parse_flag("return_lse", return_lse);
  const nb::handle options[] = {layout, causal, window, scale, softcap, kernel};
  const TensorType* type = tensor_type(q);
  if (type == nullptr) {
    nb::dict named = named_options(AttentionCall::kOptions, options);
    named["return_lse"] = return_lse;
    return nb::module_::import_("flashmoe_science._dispatch")
        .attr("flash_attention")(
            named_tensors({{"q", q}, {"k", k}, {"v", v}}, {{"sinks", sinks},
                                                           {"attn_bias", attn_bias},
                                                           {"attn_mask", attn_mask},
                                                           {"prior_out", prior_out},
                                                           {"prior_lse", prior_lse}}),
            named, named_tensors({}, {{"out", out}, {"lse", lse}}), stream, sequences);
  }
  AttentionCall call;
  parse_options(AttentionCall::kOptions, options, &call.params);
  Caller caller(kWords, *type, "q", q);
  caller.borrow("q", q, &call.q);
  caller.borrow("k", k, &call.k);
  caller.borrow("v", v, &call.v);
  caller.borrow_optional("sinks", sinks, &call.sinks);
  caller.borrow_optional("attn_bias", attn_bias, &call.attn_bias);
  caller.borrow_optional("attn_mask", attn_mask, &call.attn_mask);
  caller.borrow_optional("prior_out", prior_out, &call.prior_out);
  caller.borrow_optional("prior_lse", prior_lse, &call.prior_lse);
  nb::handle scales[Sequences::kScales];
  borrow_sequences(sequences, &caller, &call.sequences, scales);
  caller.borrow_optional("k_scale", scales[0], &call.k_scale);
  caller.borrow_optional("v_scale", scales[1], &call.v_scale);
  caller.borrow_optional("out", out, &call.out, Access::kWrite);
  caller.borrow_optional("lse", lse, &call.lse, Access::kWrite);
  if (caller.is_recorded() || (type->is_torch && is_cast(call))) {
    return torchs_flash_attention.get()(q, k, v, causal, window, scale, softcap, sinks, layout,
                                        return_lse, out, lse, kernel, stream, sequences, attn_bias,
                                        attn_mask, prior_out, prior_lse);
  }
  nb::object result = nb::borrow(out);
  nb::object sums = nb::borrow(lse);
  call.make_outputs(want_lse, [&](const char* name, TensorView* view, flashmoe_dtype dtype,
                                  int rank, const int64_t* shape) {
    nb::object& made = view == &call.out ? result : sums;
    const bool like_q =
        view == &call.out && shape[kRank - 1] == call.q.extent(kRank - 1) && prior_out.is_none();
    made = like_q ? caller.allocate_like(name, q, call.q, view)
                  : caller.allocate(name, call.q.device(), dtype, rank, shape, view);
  });
  launch(&call, caller, stream);
  return want_lse ? nb::make_tuple(result, sums) : result;
}

struct AttentionBackwardCall {
  using Params = flashmoe_attention_backward_params;
  static constexpr char kName[] = "attention_backward";
  static constexpr char kTarget[] = "flashmoe_attention_backward_v1";
  static constexpr auto kPlan = &flashmoe_attention_backward_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_attention_backward_workspace_size;
  static constexpr auto kRun = &flashmoe_attention_backward;
  static constexpr bool kNeedsWorkspace = true;

  Params params = flashmoe_attention_backward_params_init();
  TensorView dout, q, k, v, out, lse, dlse, sinks, attn_bias, attn_mask, dq, dk, dv, dsinks;
  std::optional<Sequences> sequences;

  static constexpr Field<AttentionBackwardCall> kTensors[] = {
      {"dout", &AttentionBackwardCall::dout, &Params::dout, Access::kRead},
      {"q", &AttentionBackwardCall::q, &Params::q, Access::kRead},
      {"k", &AttentionBackwardCall::k, &Params::k, Access::kRead},
      {"v", &AttentionBackwardCall::v, &Params::v, Access::kRead},
      {"out", &AttentionBackwardCall::out, &Params::out, Access::kRead},
      {"lse", &AttentionBackwardCall::lse, &Params::lse, Access::kRead},
      {"dlse", &AttentionBackwardCall::dlse, &Params::dlse, Access::kRead},
      {"sinks", &AttentionBackwardCall::sinks, &Params::sinks, Access::kRead},
      {"attn_bias", &AttentionBackwardCall::attn_bias, &Params::attn_bias, Access::kRead},
      {"attn_mask", &AttentionBackwardCall::attn_mask, &Params::attn_mask, Access::kRead},
      {"dq", &AttentionBackwardCall::dq, &Params::dq, Access::kWrite},
      {"dk", &AttentionBackwardCall::dk, &Params::dk, Access::kWrite},
      {"dv", &AttentionBackwardCall::dv, &Params::dv, Access::kWrite},
      {"dsinks", &AttentionBackwardCall::dsinks, &Params::dsinks, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      layout_option<Params>(),
      causal_option<Params>(),
      window_option<Params>(),
      scale_option<Params>(),
      softcap_option<Params>(),
      {"accumulate", [](nb::handle given,
                        Params* p) { p->accumulate = parse_flag("accumulate", given) ? 1 : 0; }},
      kernel_option<Params>(),
  };

  const TensorView& first() const { return q; }

  // Makes a missing gradient if it is wanted, except with accumulate.
  template <class Make>
  void make_outputs(const nb::object& wanted, const Make& make) {
    if (!is_float(q.tensor().dtype) || params.accumulate != 0) return;
    const struct {
      const char* name;
      TensorView* gradient;
      const TensorView& of;
      int rank;
    } each[] = {{"dq", &dq, q, kRank},
                {"dk", &dk, k, kRank},
                {"dv", &dv, v, kRank},
                {"dsinks", &dsinks, sinks, 1}};
    for (size_t i = 0; i < std::size(each); ++i) {
      const auto& [name, gradient, of, rank] = each[i];
      const bool make_it = wanted.is_none() || nb::cast<bool>(wanted[i]);
      if (!make_it || gradient->get() != nullptr || of.get() == nullptr || of.rank() != rank) {
        continue;
      }
      int64_t shape[kRank];
      for (int axis = 0; axis < rank; ++axis) shape[axis] = of.extent(axis);
      make(name, gradient, of.tensor().dtype, rank, shape);
    }
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(option_of(options, "wanted"), make);
  }
};

nb::object flash_attention_backward(nb::handle dout, nb::handle q, nb::handle k, nb::handle v,
                                    nb::handle out, nb::handle lse, nb::handle dlse,
                                    nb::handle sinks, nb::handle causal, nb::handle window,
                                    nb::handle scale, nb::handle softcap, nb::handle layout,
                                    nb::handle wanted, nb::handle accumulate, nb::handle dq,
                                    nb::handle dk, nb::handle dv, nb::handle dsinks,
                                    nb::handle kernel, nb::handle stream, nb::handle sequences,
                                    nb::handle attn_bias, nb::handle attn_mask) {
  const nb::handle options[] = {layout, causal, window, scale, softcap, accumulate, kernel};
  const TensorType* type = tensor_type(dout);
  if (type == nullptr) {
    nb::dict named = named_options(AttentionBackwardCall::kOptions, options);
    named["wanted"] = wanted;
    return nb::module_::import_("flashmoe_science._dispatch")
        .attr("flash_attention_backward")(
            named_tensors(
                {{"dout", dout}, {"q", q}, {"k", k}, {"v", v}, {"out", out}, {"lse", lse}},
                {{"dlse", dlse},
                 {"sinks", sinks},
                 {"attn_bias", attn_bias},
                 {"attn_mask", attn_mask}}),
            named, named_tensors({}, {{"dq", dq}, {"dk", dk}, {"dv", dv}, {"dsinks", dsinks}}),
            stream, sequences);
  }
  AttentionBackwardCall call;
  parse_options(AttentionBackwardCall::kOptions, options, &call.params);
  Caller caller(kBackwardWords, *type, "dout", dout);
  caller.borrow("dout", dout, &call.dout);
  caller.borrow("q", q, &call.q);
  caller.borrow("k", k, &call.k);
  caller.borrow("v", v, &call.v);
  caller.borrow("out", out, &call.out);
  caller.borrow("lse", lse, &call.lse);
  caller.borrow_optional("dlse", dlse, &call.dlse);
  caller.borrow_optional("sinks", sinks, &call.sinks);
  caller.borrow_optional("attn_bias", attn_bias, &call.attn_bias);
  caller.borrow_optional("attn_mask", attn_mask, &call.attn_mask);
  nb::handle scales[Sequences::kScales];
  borrow_sequences(sequences, &caller, &call.sequences, scales);
  refuse_scales(scales[0], scales[1]);
  struct Gradient {
    const char* name;
    nb::object made;
    TensorView* view;
    nb::handle of;
    const TensorView& of_view;
  } gradients[] = {{"dq", nb::borrow(dq), &call.dq, q, call.q},
                   {"dk", nb::borrow(dk), &call.dk, k, call.k},
                   {"dv", nb::borrow(dv), &call.dv, v, call.v},
                   {"dsinks", nb::borrow(dsinks), &call.dsinks, sinks, call.sinks}};
  for (const Gradient& each : gradients) {
    caller.borrow_optional(each.name, each.made, each.view, Access::kWrite);
  }
  call.make_outputs(nb::borrow(wanted),
                    [&](const char* name, TensorView* view, flashmoe_dtype, int, const int64_t*) {
                      for (Gradient& each : gradients) {
                        if (each.view == view)
                          each.made = caller.allocate_like(name, each.of, each.of_view, view);
                      }
                    });
  launch(&call, caller, stream);
  return nb::make_tuple(gradients[0].made, gradients[1].made, gradients[2].made, gradients[3].made);
}

std::optional<uintptr_t> stream_handle(nb::handle stream) {
  void* handle = nullptr;
  if (!parse_stream(stream, &handle)) return std::nullopt;
  return reinterpret_cast<uintptr_t>(handle);
}

}  // namespace

const Operation kAttention = operation_of<AttentionCall>();
const Operation kAttentionBackward = operation_of<AttentionBackwardCall>();

void define_attention(nb::module_& module) {
  module.def("flash_attention", &flash_attention, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("causal").none(), nb::arg("window").none(),
             nb::arg("scale").none(), nb::arg("softcap").none(), nb::arg("sinks").none(),
             nb::arg("layout").none(), nb::arg("return_lse").none(), nb::arg("out").none(),
             nb::arg("lse").none(), nb::arg("kernel").none(), nb::arg("stream").none(),
             nb::arg("sequences").none() = nb::none(), nb::arg("attn_bias").none() = nb::none(),
             nb::arg("attn_mask").none() = nb::none(), nb::arg("prior_out").none() = nb::none(),
             nb::arg("prior_lse").none() = nb::none(),
             "flashmoe_science.flash_attention with all of its arguments; those of sequences, from "
             "cu_seqlens_q to split_size, are one tuple.");
  module.def("flash_attention_backward", &flash_attention_backward, nb::arg("dout").none(),
             nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("out").none(),
             nb::arg("lse").none(), nb::arg("dlse").none(), nb::arg("sinks").none(),
             nb::arg("causal").none(), nb::arg("window").none(), nb::arg("scale").none(),
             nb::arg("softcap").none(), nb::arg("layout").none(), nb::arg("wanted").none(),
             nb::arg("accumulate").none(), nb::arg("dq").none(), nb::arg("dk").none(),
             nb::arg("dv").none(), nb::arg("dsinks").none(), nb::arg("kernel").none(),
             nb::arg("stream").none(), nb::arg("sequences").none() = nb::none(),
             nb::arg("attn_bias").none() = nb::none(), nb::arg("attn_mask").none() = nb::none(),
             "flashmoe_science.flash_attention_backward with all of its arguments; those of "
             "sequences are one tuple, as of flash_attention.");
  module.def("stream_handle", &stream_handle, nb::arg("stream").none(),
             "The cudaStream_t of a stream object, or None.");
}

}  // namespace flashmoe
