// Checking the tables of sequences: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._check, which comes back through `call`
// (bindings/operation.h).
#include "bindings/check_sequences.h"

#include <cstdint>
#include <optional>

#include "bindings/calls.h"
#include "bindings/operation.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr OperationWords kWords = {"the check of sequences", "all tensors of a call", "status",
                                   "gives no gradients", true};

struct CheckSequencesCall {
  using Params = flashmoe_check_sequences_params;
  static constexpr char kName[] = "check_sequences";
  static constexpr char kTarget[] = "flashmoe_check_sequences_v1";
  static constexpr auto kPlan = &flashmoe_check_sequences_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_check_sequences_workspace_size;
  static constexpr auto kRun = &flashmoe_check_sequences;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_check_sequences_params_init();
  TensorView q, k, status;
  std::optional<Sequences> sequences;

  static constexpr Field<CheckSequencesCall> kTensors[] = {
      {"q", &CheckSequencesCall::q, &Params::q, Access::kRead},
      {"k", &CheckSequencesCall::k, &Params::k, Access::kRead},
      {"status", &CheckSequencesCall::status, &Params::status, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      {"layout", [](nb::handle given, Params* p) { p->layout = parse_layout(given); }},
      kernel_option<Params>(),
  };

  const TensorView& first() const { return q; }

  template <class Make>
  void make_outputs(const nb::dict&, const Make& make) {
    if (status.get() != nullptr || q.get() == nullptr || q.rank() < 1 || !sequences) return;
    const TensorView& offsets = sequences->views[0];  // cu_seqlens_q, which tell the number of
                                                      // sequences
    const bool packed = offsets.get() != nullptr;
    if (packed && (offsets.rank() != 1 || offsets.extent(0) == 0)) return;
    const int64_t shape[] = {packed ? offsets.extent(0) - 1 : q.extent(0)};
    make("status", &status, kInt32, 1, shape);
  }
};

nb::object check_sequences(nb::handle q, nb::handle k, nb::handle sequences, nb::handle layout,
                           nb::handle status, nb::handle kernel, nb::handle stream) {
  const nb::handle options[] = {layout, kernel};
  const TensorType* type = tensor_type(q);
  if (type == nullptr) {
    return nb::module_::import_("flashmoe_science._check")
        .attr("check_sequences")(named_tensors({{"q", q}, {"k", k}}, {}),
                                 named_options(CheckSequencesCall::kOptions, options),
                                 named_tensors({}, {{"status", status}}), stream, sequences);
  }
  CheckSequencesCall call;
  parse_options(CheckSequencesCall::kOptions, options, &call.params);
  Caller caller(kWords, *type, "q", q);
  caller.borrow("q", q, &call.q);
  caller.borrow("k", k, &call.k);
  nb::handle scales[Sequences::kScales];
  borrow_sequences(sequences, &caller, &call.sequences, scales);
  caller.borrow_optional("status", status, &call.status, Access::kWrite);
  nb::object made = nb::borrow(status);
  call.make_outputs(nb::dict(), [&](const char* name, TensorView* view, flashmoe_dtype of, int rank,
                                    const int64_t* shape) {
    made = caller.allocate(name, call.q.device(), of, rank, shape, view);
  });
  launch(&call, caller, stream);
  return made;
}

}  // namespace

const Operation kCheckSequences = operation_of<CheckSequencesCall>();

void define_check_sequences(nb::module_& module) {
  module.def("check_sequences", &check_sequences, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("sequences").none(), nb::arg("layout").none(), nb::arg("status").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.check_sequences with all of its arguments. `sequences` is what "
             "flash_attention passes.");
}

}  // namespace flashmoe
