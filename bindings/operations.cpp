#include "bindings/operation.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

namespace flashmoe {
namespace {

const Operation* const kOperations[] = {
    &kAttention,       &kAttentionBackward, &kCheckSequences, &kKvAppend,
    &kKvGather,        &kMergeStates,       &kMoeRoute,       &kMoeForward,
    &kGroupedProduct,  &kFusedMoe,          &kMoeBackward,    &kGroupedProductBackward,
    &kMoeRouteBackward};

const Operation& operation(const std::string& name) {
  std::string accepted;
  for (const Operation* each : kOperations) {
    if (name == each->name) return *each;
    accepted += std::string(accepted.empty() ? "" : ", ") + "'" + each->name + "'";
  }
  raise_value_error("operation: got '" + name + "', accepted are " + accepted);
}

using Named = nb::typed<nb::dict, nb::str, nb::any>;

void call(const std::string& name, Named tensors, Named options, nb::object allocate,
          nb::handle stream) {
  operation(name).call(tensors, options, allocate, stream);
}

Fields plan(const std::string& name, Named tensors, Named options) {
  return operation(name).plan(tensors, options);
}

std::string pack_options(const std::string& name, Named options) {
  return operation(name).pack_options(options);
}

Fields xla_ffi_handlers() {
  const auto capsule = [](xla::Error* (*handler)(xla::CallFrame*)) {
    return nb::capsule(reinterpret_cast<const void*>(handler));
  };
  Fields handlers;
  for (const Operation* each : kOperations) {
    nb::dict by_platform;
    by_platform["cpu"] = capsule(each->on_cpu);
    by_platform["CUDA"] = capsule(each->on_cuda);
    handlers[each->name] = nb::make_tuple(each->target, by_platform);
  }
  return handlers;
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

}  // namespace

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

std::string to_hex(const void* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  const auto* const values = static_cast<const unsigned char*>(bytes);
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += kDigits[values[i] >> 4];
    text += kDigits[values[i] & 15];
  }
  return text;
}

size_t from_hex(const std::string& text, void* bytes, size_t most) {
  if (text.size() % 2 != 0 || text.size() / 2 > most ||
      text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return 0;
  }
  auto* const values = static_cast<unsigned char*>(bytes);
  for (size_t i = 0; i < text.size() / 2; ++i) {
    values[i] =
        static_cast<unsigned char>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  return text.size() / 2;
}

bool xla::Placed::turn() {
  const int32_t rank = tensor.ndim;
  if (rank < 2 || rank > TensorView::kMaxRank) return false;
  int64_t stride = 1;
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    shape[axis] = tensor.shape[axis];
    strides[axis] = stride;
    stride *= shape[axis];
  }
  std::swap(shape[rank - 1], shape[rank - 2]);
  std::swap(strides[rank - 1], strides[rank - 2]);
  tensor.shape = shape;
  tensor.strides = strides;
  return true;
}

void define_operations(nb::module_& module) {
  module.def("call", &call, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
             nb::arg("allocate"), nb::arg("stream").none(),
             "An operation of the C ABI on tensors of any kind by the C ABI's names. Outputs that "
             "are not among them, and a GPU's workspace, are what allocate(name, shape, name of "
             "dtype) returns. Absent options have their defaults.");
  module.def("plan", &plan, nb::arg("operation"), nb::arg("tensors"), nb::arg("options"),
             "The fields of flashmoe_plan for these tensors. Outputs may be absent, and in "
             "place of a tensor a tuple (shape, dtype's code and bits, device's type and id, "
             "strides or None) will do.");
  module.def("pack_options", &pack_options, nb::arg("operation"), nb::arg("options"),
             "The options as one string, which the operation's XLA FFI handler reads. Raises what "
             "is wrong with one.");
  module.def("xla_ffi_handlers", &xla_ffi_handlers,
             "Of each operation the XLA FFI target and its handlers by platform, for "
             "jax.ffi.register_ffi_target.");
}

}  // namespace flashmoe
