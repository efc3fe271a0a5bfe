// Operations of the C ABI as calls: tensors viewed, options parsed, parameters filled. Holds the
// code that all paths to them share.
//
// A call is a struct with `params` and a view of each tensor. Its kTensors and kOptions list its
// tensors and options once. Calls and plans by name, XLA's operands and attributes, and calls to
// other frameworks all come from these lists. It also has:
//   kName, kTarget                  for Python, and for XLA: a program compiled ahead asks for the
//                                   version it knows
//   kPlan, kWorkspaceSize, kRun     the C ABI's functions
//   kNeedsWorkspace                 whether nearly every call on a GPU needs workspace
//   first()                         the tensor whose device computes the call
//   sequences                       attention only: optional, what its params point to besides
//                                   tensors (bindings/sequences.h)
//   make_outputs(options, make)     calls make(name, view, dtype, rank, shape) for absent outputs.
//                                   If the inputs do not tell their shapes, the library reports
//                                   what is wrong.
// operation.h's points_nowhere names the fields of params that point to what no call has.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "bindings/caller.h"
#include "bindings/errors.h"
#include "bindings/options.h"
#include "bindings/tensor.h"
#include "bindings/workspace.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr flashmoe_dtype kInt32 = {dlpack::kInt, 32, 1};
inline constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
inline constexpr flashmoe_dtype kFloat64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};

// Whether kernels take tensors of this dtype.
bool is_float(flashmoe_dtype dtype);
inline bool is_fp64(flashmoe_dtype dtype) {
  return dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 64 && dtype.lanes == 1;
}

// The name of an output's dtype, such as "float32".
const char* name_of_dtype(flashmoe_dtype dtype);

// Parses the dtype that Python gives for a new output. Returns false for None.
bool parse_float_dtype(nb::handle given, flashmoe_dtype* dtype);

// One tensor of a call: its name in Python, in C and in messages, and its place.
template <class Call>
struct Field {
  const char* name;
  TensorView Call::* view;
  const flashmoe_tensor* Call::Params::* param;
  Access access;
};

// Calls work(call, its sequences) if the call can have sequences.
template <class Call, class Work>
auto with_sequences(Call* call, const Work& work, int) -> decltype(call->sequences, void()) {
  work(call, &call->sequences);
}
template <class Call, class Work>
void with_sequences(Call*, const Work&, long) {}

template <class Call>
const typename Call::Params& ready(Call* call) {
  for (const Field<Call>& field : Call::kTensors) {
    call->params.*field.param = (call->*field.view).get();
  }
  const auto place = [](auto* own, auto* sequences) {
    own->params.sequences = *sequences ? (*sequences)->ready() : nullptr;
  };
  with_sequences(call, place, 0);
  return call->params;
}

// ---- options ------------------------------------------------------------------------------------

// A Python option, which may fill several fields of Params. A kernel's name points into the given
// string.
template <class Params>
struct Option {
  const char* name;
  void (*parse)(nb::handle given, Params* params);
};

template <class Params>
constexpr Option<Params> kernel_option() {
  return {"kernel", [](nb::handle given, Params* p) { p->kernel = parse_kernel(given); }};
}

// Options in the order of their list.
template <class Params, size_t kCount>
void parse_options(const Option<Params> (&options)[kCount], const nb::handle (&given)[kCount],
                   Params* params) {
  for (size_t i = 0; i < kCount; ++i) options[i].parse(given[i], params);
}

// Options by name. Absent ones have their defaults.
template <class Params, size_t kCount>
void parse_options(const Option<Params> (&options)[kCount], const nb::dict& given, Params* params) {
  for (const Option<Params>& option : options) {
    if (!given.contains(option.name)) continue;
    const nb::object value = given[option.name];
    option.parse(value, params);
  }
}

inline nb::object option_of(const nb::dict& options, const char* name) {
  return options.contains(name) ? nb::object(options[name]) : nb::none();
}

inline bool wants(const nb::dict& options, const char* name) {
  const nb::object flag = option_of(options, name);
  return !flag.is_none() && parse_flag(name, flag);
}

// ---- other frameworks ---------------------------------------------------------------------------

struct NamedHandle {
  const char* name;
  nb::handle object;
};

// Tensors by name. Optional tensors that are None are left out.
inline nb::dict named_tensors(std::initializer_list<NamedHandle> required,
                              std::initializer_list<NamedHandle> optional) {
  nb::dict named;
  for (const NamedHandle& each : required) named[each.name] = each.object;
  for (const NamedHandle& each : optional) {
    if (!each.object.is_none()) named[each.name] = each.object;
  }
  return named;
}

template <class Params, size_t kCount>
nb::dict named_options(const Option<Params> (&options)[kCount], const nb::handle (&given)[kCount]) {
  nb::dict named;
  for (size_t i = 0; i < kCount; ++i) named[options[i].name] = given[i];
  return named;
}

// ---- running one operation ----------------------------------------------------------------------

// Releases the GIL while the library works: a launch can wait for the GPU's queue, and a host
// callback in Python may be what empties it.
template <class Call>
flashmoe_status run(const Call& call, void* workspace, size_t bytes, void* stream) {
  nb::gil_scoped_release release;
  const TensorView& first = call.first();
  if (first.get() != nullptr && first.device().device_type != FLASHMOE_DEVICE_CUDA) {
    return run_on_host(Call::kWorkspaceSize, Call::kRun, call.params);
  }
  return Call::kRun(&call.params, workspace, bytes, stream);
}

// Bytes of workspace that suffice for nearly every call whose first tensor is small. The host
// limits the speed of such a call, and asking for the exact size takes as long as all its checks.
// Torch's allocator gives this many bytes as fast as a few.
inline constexpr size_t kSmallWorkspace = size_t{1} << 20;
inline constexpr double kSmallTensor = 1 << 15;

inline bool is_small(const TensorView& view) {
  double bytes = view.tensor().dtype.bits / 8.0;
  for (int axis = 0; axis < std::min(view.rank(), TensorView::kMaxRank); ++axis) {
    bytes *= static_cast<double>(view.extent(axis));
  }
  return bytes <= kSmallTensor;
}

template <class Call>
void launch(Call* call, const Caller& caller, nb::handle stream) {
  ready(call);
  const flashmoe_device device = call->first().device();
  const bool on_gpu = device.device_type == FLASHMOE_DEVICE_CUDA;
  bool named = false;
  void* handle = caller.stream(stream, device, &named);
  size_t bytes = 0;
  if (on_gpu && Call::kNeedsWorkspace) {
    bytes = kSmallWorkspace;
    if (named || !is_small(call->first())) {
      check(Call::kWorkspaceSize(&call->params, &bytes));
    }
  }
  DeviceWorkspace workspace;
  workspace.allocate(caller, bytes, device, handle, named);
  flashmoe_status status = run(*call, workspace.data(), bytes, handle);
  if (status == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL && on_gpu) {
    check(Call::kWorkspaceSize(&call->params, &bytes));
    DeviceWorkspace larger;
    larger.allocate(caller, bytes, device, handle, named);
    status = run(*call, larger.data(), bytes, handle);
  }
  check(status);
  caller.finish();
}

}  // namespace flashmoe
