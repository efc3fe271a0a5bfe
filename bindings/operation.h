// Operations by name: on tensors of any kind in a dict, for plans, and as XLA's custom calls. They
// are built from the lists of a call: see bindings/calls.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "bindings/calls.h"
#include "bindings/errors.h"
#include "bindings/fields.h"
#include "bindings/plan.h"
#include "bindings/sequences.h"
#include "bindings/xla_ffi_call.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

struct Operation {
  const char* name;
  const char* target;
  // See the docstrings of flashmoe_science._core's functions of these names.
  void (*call)(const nb::dict& tensors, const nb::dict& options, nb::handle allocate,
               nb::handle stream);
  Fields (*plan)(const nb::dict& tensors, const nb::dict& options);
  std::string (*pack_options)(const nb::dict& options);
  xla::Error* (*on_cpu)(xla::CallFrame* frame);
  xla::Error* (*on_cuda)(xla::CallFrame* frame);
};

extern const Operation kAttention;
extern const Operation kAttentionBackward;
extern const Operation kCheckSequences;
extern const Operation kKvAppend;
extern const Operation kKvGather;
extern const Operation kMergeStates;
extern const Operation kMoeRoute;
extern const Operation kMoeForward;
extern const Operation kGroupedProduct;
extern const Operation kFusedMoe;
extern const Operation kMoeBackward;
extern const Operation kGroupedProductBackward;
extern const Operation kMoeRouteBackward;

void define_operations(nb::module_& module);

// ---- tensors ------------------------------------------------------------------------------------

// Views a tensor, or a tuple (shape, dtype's code and bits, device's type and id, strides or None)
// that describes one that need not exist.
void view_argument(const char* name, nb::handle object, Access access, TensorView* view);

// Whether keys and values of the call may have scales.
template <class Call>
constexpr auto has_scales(Call* call, int) -> decltype(call->k_scale, bool()) {
  return true;
}
template <class Call>
constexpr bool has_scales(Call*, long) {
  return false;
}

template <class Call>
void view_arguments(const nb::dict& tensors, const nb::dict& options, Call* call) {
  for (const Field<Call>& field : Call::kTensors) {
    const nb::object tensor = option_of(tensors, field.name);
    if (tensor.is_none()) continue;
    view_argument(field.name, tensor, field.access, &(call->*field.view));
  }
  const auto view = [](const char* name, nb::handle tensor, TensorView* to) {
    view_argument(name, tensor, Access::kRead, to);
  };
  const auto read = [&](auto*, auto* sequences) {
    if (!has_scales(call, 0)) {
      refuse_scales(option_of(tensors, "k_scale"), option_of(tensors, "v_scale"));
    }
    nb::handle each[Sequences::kCount];
    if (Sequences::find(tensors, options, each)) sequences->emplace().read(each, view);
  };
  with_sequences(call, read, 0);
}

template <class Call>
void call_by_name(const nb::dict& tensors, const nb::dict& options, nb::handle allocate,
                  nb::handle stream) {
  Call call;
  parse_options(Call::kOptions, options, &call.params);
  view_arguments(tensors, options, &call);
  std::vector<nb::object> kept;
  const auto make = [&](const char* name, const char* dtype, int rank, const int64_t* shape,
                        TensorView* view) {
    nb::list extents;
    for (int axis = 0; axis < rank; ++axis) extents.append(nb::int_(shape[axis]));
    kept.push_back(allocate(name, nb::tuple(extents), dtype));
    view->borrow(name, kept.back(), Access::kWrite);
  };
  if (call.first().get() != nullptr) {
    call.make_outputs(options, [&](const char* name, TensorView* view, flashmoe_dtype dtype,
                                   int rank, const int64_t* shape) {
      make(name, name_of_dtype(dtype), rank, shape, view);
    });
  }
  ready(&call);
  void* handle = nullptr;
  parse_stream(stream, &handle);
  TensorView scratch;
  size_t bytes = 0;
  if (call.first().get() != nullptr && call.first().device().device_type == FLASHMOE_DEVICE_CUDA) {
    check(Call::kWorkspaceSize(&call.params, &bytes));
    const int64_t shape[] = {static_cast<int64_t>(bytes)};
    if (bytes > 0) make("workspace", "uint8", 1, shape, &scratch);
  }
  check(run(call, scratch.tensor().data, bytes, handle));
}

template <class Call>
Fields plan_by_name(const nb::dict& tensors, const nb::dict& options) {
  Call call;
  parse_options(Call::kOptions, options, &call.params);
  view_arguments(tensors, options, &call);
  if (call.first().get() != nullptr) {
    const flashmoe_device device = call.first().device();
    call.make_outputs(options,
                      [&](const char*, TensorView* view, flashmoe_dtype dtype, int rank,
                          const int64_t* shape) { view->describe(shape, rank, dtype, device); });
  }
  flashmoe_plan made = flashmoe_plan_init();
  check(Call::kPlan(&ready(&call), &made));
  return describe(made);
}

// ---- options as one attribute of XLA's ----------------------------------------------------------
//
// The bytes of Params in hexadecimal, without tensors, followed by the kernel's name. Params only
// grow at their end, where zeros mean what their absence meant, so a program exported by an older
// version runs.

std::string to_hex(const void* bytes, size_t count);
// The number of bytes at the beginning of `text`; 0 if more than `most`.
size_t from_hex(const std::string& text, void* bytes, size_t most);

template <class Params>
auto kernel_of(Params* params, int) -> decltype(&params->kernel) {
  return &params->kernel;
}
template <class Params>
const char** kernel_of(Params*, long) {
  return nullptr;
}

template <class Call>
std::string pack_options_by_name(const nb::dict& options) {
  typename Call::Params params = Call().params;
  parse_options(Call::kOptions, options, &params);
  std::string kernel;
  if (const char** const name = kernel_of(&params, 0); name != nullptr && *name != nullptr) {
    kernel = *name;
    *name = nullptr;
  }
  return to_hex(&params, sizeof params) + " " + kernel;
}

// Whether the fields that no call of this version sets are null. An attribute with others is
// foreign.
inline bool points_nowhere(const flashmoe_attention_forward_params& p) {
  return p.q_scale == nullptr && p.sequences == nullptr;
}
inline bool points_nowhere(const flashmoe_attention_backward_params& p) {
  return p.sequences == nullptr;
}
inline bool points_nowhere(const flashmoe_check_sequences_params& p) {
  return p.sequences == nullptr;
}
inline bool points_nowhere(const flashmoe_kv_append_params&) { return true; }
inline bool points_nowhere(const flashmoe_kv_gather_params&) { return true; }
inline bool points_nowhere(const flashmoe_merge_states_params&) { return true; }
inline bool points_nowhere(const flashmoe_moe_route_params&) { return true; }
inline bool points_nowhere(const flashmoe_moe_forward_params& p) {
  return p.x_scale == nullptr && p.w_gate_up_scale == nullptr && p.w_up_scale == nullptr &&
         p.w_down_scale == nullptr;
}
inline bool points_nowhere(const flashmoe_grouped_product_params& p) {
  return p.x_scale == nullptr && p.w_scale == nullptr;
}
inline bool points_nowhere(const flashmoe_fused_moe_params&) { return true; }
inline bool points_nowhere(const flashmoe_moe_backward_params&) { return true; }
inline bool points_nowhere(const flashmoe_grouped_product_backward_params&) { return true; }
inline bool points_nowhere(const flashmoe_moe_route_backward_params&) { return true; }

// `kernel` owns the name that params point to afterwards; tensors are not set.
template <class Call>
bool unpack_options(const std::string& packed, typename Call::Params* params, std::string* kernel) {
  const size_t space = packed.find(' ');
  if (space == std::string::npos) return false;
  if (from_hex(packed.substr(0, space), params, sizeof *params) < sizeof params->struct_size) {
    return false;
  }
  params->struct_size = sizeof *params;
  for (const Field<Call>& field : Call::kTensors) params->*field.param = nullptr;
  *kernel = packed.substr(space + 1);
  const char** const name = kernel_of(params, 0);
  if (name != nullptr) *name = kernel->empty() ? nullptr : kernel->c_str();
  return points_nowhere(*params) && (name != nullptr || kernel->empty());
}

// ---- XLA's custom call --------------------------------------------------------------------------
//
// The tensors of a call vary, so attributes name them:
//   inputs, outputs     the C ABI's names in order, each followed by a space; attention's inputs
//                       may include tables of sequences. "w.T " is an input whose last two axes are
//                       swapped in memory: row by row [..., columns, rows]
//   options             see above
//   bounds              of sequences (bindings/sequences.h), if any
// After the C ABI's outputs there may be one more, "workspace". An output that is also an input is
// an array that the call writes in place: XLA has put both into one buffer.

namespace xla {

// The sequences of a ragged, padded or paged batch, as far as a frame describes them.
struct PlacedSequences {
  flashmoe_attention_sequences params = flashmoe_attention_sequences_init();
  flashmoe_tensor tables[Sequences::kTableCount];
  bool any = false;

  // Sets the table of this name; false if there is none.
  bool place(const std::string& name, const flashmoe_tensor& tensor) {
    for (size_t i = 0; i < Sequences::kTableCount; ++i) {
      if (name != Sequences::kTables[i].name) continue;
      tables[i] = tensor;
      params.*Sequences::kTables[i].param = &tables[i];
      any = true;
      return true;
    }
    return false;
  }
};

// Points params to the sequences; false if they cannot.
template <class Params>
auto point_to(const flashmoe_attention_sequences* sequences, Params* params, int)
    -> decltype(params->sequences, bool()) {
  params->sequences = sequences;
  return true;
}
template <class Params>
bool point_to(const flashmoe_attention_sequences*, Params*, long) {
  return false;
}

// A tensor and, if its last two axes are swapped, its shape and strides.
struct Placed {
  flashmoe_tensor tensor;
  int64_t shape[TensorView::kMaxRank];
  int64_t strides[TensorView::kMaxRank];

  // Swaps the axes of a tensor that is row by row in memory; false if it has fewer than two.
  bool turn();
};

// Sets the tensors that `names` lists; there must be as many as values. An output that is also an
// input stays in place.
template <class Call, size_t kCount>
bool place(const Field<Call> (&fields)[kCount], Access access, const std::string& names,
           const Values& values, flashmoe_device device, Placed (&tensors)[kCount],
           typename Call::Params* params, PlacedSequences* sequences) {
  constexpr char kTurned[] = ".T";
  constexpr size_t kTurnedLength = sizeof kTurned - 1;
  int64_t count = 0;
  size_t begin = 0;
  for (size_t space; (space = names.find(' ', begin)) != std::string::npos; begin = space + 1) {
    const bool turned = access == Access::kRead && space - begin > kTurnedLength &&
                        names.compare(space - kTurnedLength, kTurnedLength, kTurned) == 0;
    const size_t end = turned ? space - kTurnedLength : space;
    size_t at = 0;
    while (at < kCount && ((access == Access::kWrite && fields[at].access != access) ||
                           names.compare(begin, end - begin, fields[at].name) != 0)) {
      ++at;
    }
    if (count == values.size) return false;
    const flashmoe_tensor tensor = view(values.values[count++], device);
    if (at < kCount) {
      const flashmoe_tensor* const before = params->*fields[at].param;
      if (before != nullptr && before->data != tensor.data) return false;
      tensors[at].tensor = tensor;
      if (turned && !tensors[at].turn()) return false;
      params->*fields[at].param = &tensors[at].tensor;
    } else if (access != Access::kRead || turned ||
               !sequences->place(names.substr(begin, end - begin), tensor)) {
      return false;
    }
  }
  return begin == names.size() && count == values.size;
}

// Whether every tensor that a call writes is among its results.
template <class Call>
bool are_results(const std::string& outputs, const typename Call::Params& params) {
  const std::string names = " " + outputs;
  for (const Field<Call>& field : Call::kTensors) {
    if (field.access != Access::kWrite || params.*field.param == nullptr) continue;
    if (names.find(std::string(" ") + field.name + " ") == std::string::npos) return false;
  }
  return true;
}

template <class Call>
Error* call(const CallFrame& frame, flashmoe_device device) {
  constexpr size_t kTensors = sizeof Call::kTensors / sizeof Call::kTensors[0];
  typename Call::Params params = Call().params;
  Placed tensors[kTensors];
  std::string inputs;
  std::string outputs;
  std::string options;
  std::string kernel;
  if (!has_buffers_alone(frame) || !read(frame.attributes, "inputs", &inputs) ||
      !read(frame.attributes, "outputs", &outputs) ||
      !read(frame.attributes, "options", &options) ||
      !unpack_options<Call>(options, &params, &kernel)) {
    return fail_foreign(frame);
  }
  Values results = frame.results;
  const Workspace workspace = take_workspace(&outputs, &results);
  PlacedSequences sequences;
  if (!place(Call::kTensors, Access::kRead, inputs, frame.arguments, device, tensors, &params,
             &sequences) ||
      !place(Call::kTensors, Access::kWrite, outputs, results, device, tensors, &params,
             &sequences) ||
      !are_results<Call>(outputs, params)) {
    return fail_foreign(frame);
  }
  std::string bounds;
  if (read(frame.attributes, "bounds", &bounds)) {
    if (!Sequences::unpack_bounds(bounds, &sequences.params)) return fail_foreign(frame);
    sequences.any = true;
  }
  if (sequences.any && !point_to(&sequences.params, &params, 0)) return fail_foreign(frame);
  return run(frame, device, workspace, Call::kWorkspaceSize, Call::kRun, params);
}

}  // namespace xla

template <class Call>
constexpr Operation operation_of() {
  return {Call::kName,
          Call::kTarget,
          &call_by_name<Call>,
          &plan_by_name<Call>,
          &pack_options_by_name<Call>,
          &xla::handle_on_cpu<&xla::call<Call>>,
          &xla::handle_on_cuda<&xla::call<Call>>};
}

}  // namespace flashmoe
