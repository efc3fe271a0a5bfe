// Merging partial attention results: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._merge, which comes back through `call`
// (bindings/operation.h).
#include "bindings/merge_states.h"

#include <cstdint>

#include "bindings/calls.h"
#include "bindings/operation.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int kRank = 4;  // of one partial
constexpr OperationWords kWords = {"the merge of attention states", "all tensors of a call",
                                   "out, and lse with return_lse", "has no backward pass yet",
                                   false};

struct MergeStatesCall {
  using Params = flashmoe_merge_states_params;
  static constexpr char kName[] = "merge_states";
  static constexpr char kTarget[] = "flashmoe_merge_states_v1";
  static constexpr auto kPlan = &flashmoe_merge_states_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_merge_states_workspace_size;
  static constexpr auto kRun = &flashmoe_merge_states;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_merge_states_params_init();
  TensorView outs, lses, prior_out, prior_lse, out, lse;

  static constexpr Field<MergeStatesCall> kTensors[] = {
      {"outs", &MergeStatesCall::outs, &Params::outs, Access::kRead},
      {"lses", &MergeStatesCall::lses, &Params::lses, Access::kRead},
      {"prior_out", &MergeStatesCall::prior_out, &Params::prior_out, Access::kRead},
      {"prior_lse", &MergeStatesCall::prior_lse, &Params::prior_lse, Access::kRead},
      {"out", &MergeStatesCall::out, &Params::out, Access::kWrite},
      {"lse", &MergeStatesCall::lse, &Params::lse, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      {"layout", [](nb::handle given, Params* p) { p->layout = parse_layout(given); }},
      kernel_option<Params>(),
  };

  const TensorView& first() const { return outs; }

  template <class Make>
  void make_outputs(bool want_lse, nb::handle dtype, const Make& make) {
    const int lead = outs.rank() - kRank;
    if (lead < 0 || lead > 1) return;
    flashmoe_dtype of_out = (prior_out.get() != nullptr ? prior_out : outs).tensor().dtype;
    parse_float_dtype(dtype, &of_out);
    const bool wide = is_fp64(outs.tensor().dtype);
    if (!is_float(of_out)) return;
    int64_t shape[kRank];
    for (int axis = 0; axis < kRank; ++axis) shape[axis] = outs.extent(lead + axis);
    if (out.get() == nullptr) make("out", &out, of_out, kRank, shape);
    if (!want_lse || lse.get() != nullptr) return;
    const bool bhsd = params.layout == FLASHMOE_LAYOUT_BHSD;
    const int64_t numbers[] = {shape[0], shape[bhsd ? 1 : 2], shape[bhsd ? 2 : 1]};
    make("lse", &lse, wide ? kFloat64 : kFloat32, kRank - 1, numbers);
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(wants(options, "return_lse"), option_of(options, "dtype"), make);
  }
};

nb::object merge_states(nb::handle outs, nb::handle lses, nb::handle prior_out,
                        nb::handle prior_lse, nb::handle layout, nb::handle dtype,
                        nb::handle return_lse, nb::handle out, nb::handle lse, nb::handle kernel,
                        nb::handle stream) {
  const bool want_lse = parse_flag("return_lse", return_lse);
  const nb::handle options[] = {layout, kernel};
  const TensorType* type = tensor_type(outs);
  if (type == nullptr) {
    nb::dict named = named_options(MergeStatesCall::kOptions, options);
    named["dtype"] = dtype;
    named["return_lse"] = return_lse;
    return nb::module_::import_("flashmoe_science._merge")
        .attr("merge_states")(named_tensors({{"outs", outs}, {"lses", lses}},
                                            {{"prior_out", prior_out}, {"prior_lse", prior_lse}}),
                              named, named_tensors({}, {{"out", out}, {"lse", lse}}), stream);
  }
  MergeStatesCall call;
  parse_options(MergeStatesCall::kOptions, options, &call.params);
  Caller caller(kWords, *type, "outs", outs);
  caller.borrow("outs", outs, &call.outs);
  caller.borrow("lses", lses, &call.lses);
  caller.borrow_optional("prior_out", prior_out, &call.prior_out);
  caller.borrow_optional("prior_lse", prior_lse, &call.prior_lse);
  caller.borrow_optional("out", out, &call.out, Access::kWrite);
  caller.borrow_optional("lse", lse, &call.lse, Access::kWrite);
  nb::object result = nb::borrow(out);
  nb::object sums = nb::borrow(lse);
  call.make_outputs(
      want_lse, dtype,
      [&](const char* name, TensorView* view, flashmoe_dtype of, int rank, const int64_t* shape) {
        nb::object& made = view == &call.out ? result : sums;
        made = caller.allocate(name, call.outs.device(), of, rank, shape, view);
      });
  launch(&call, caller, stream);
  return want_lse ? nb::make_tuple(result, sums) : result;
}

}  // namespace

const Operation kMergeStates = operation_of<MergeStatesCall>();

void define_merge_states(nb::module_& module) {
  module.def("merge_states", &merge_states, nb::arg("outs").none(), nb::arg("lses").none(),
             nb::arg("prior_out").none(), nb::arg("prior_lse").none(), nb::arg("layout").none(),
             nb::arg("dtype").none(), nb::arg("return_lse").none(), nb::arg("out").none(),
             nb::arg("lse").none(), nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.merge_states with all of its arguments: of two partials the first "
             "is the prior one. `dtype` of a new out is \"float16\", \"bfloat16\", \"float32\" or "
             "None.");
}

}  // namespace flashmoe
