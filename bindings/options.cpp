#include "bindings/options.h"

#include <string>

#include "bindings/errors.h"

namespace flashmoe {
namespace {

bool equals(nb::handle text, const char* literal) {
  return PyUnicode_CompareWithASCIIString(text.ptr(), literal) == 0;
}

bool is_string(nb::handle object) { return PyUnicode_Check(object.ptr()); }

[[noreturn]] void refuse(const char* name, nb::handle got, const char* accepted,
                         bool type_is_right) {
  const std::string sentence = std::string(name) + ": got " + short_repr(got) +
                               (type_is_right ? "" : " of type " + name_of_type(got)) +
                               ", accepted " + accepted;
  if (type_is_right) raise_value_error(sentence);
  raise_type_error(sentence);
}

}  // namespace

bool parse_flag(const char* name, nb::handle flag) {
  if (!PyBool_Check(flag.ptr())) refuse(name, flag, "are False and True", false);
  return flag.ptr() == Py_True;
}

int32_t parse_layout(nb::handle layout) {
  if (is_string(layout)) {
    if (equals(layout, "bshd")) return FLASHMOE_LAYOUT_BSHD;
    if (equals(layout, "bhsd")) return FLASHMOE_LAYOUT_BHSD;
  }
  refuse("layout", layout, "are 'bshd' and 'bhsd'", is_string(layout));
}

int32_t parse_causal(nb::handle causal) {
  if (causal.ptr() == Py_False) return FLASHMOE_CAUSAL_NONE;
  if (causal.ptr() == Py_True) return FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  if (is_string(causal)) {
    if (equals(causal, "bottom_right")) return FLASHMOE_CAUSAL_BOTTOM_RIGHT;
    if (equals(causal, "top_left")) return FLASHMOE_CAUSAL_TOP_LEFT;
  }
  refuse("causal", causal, "are False, True (bottom_right), 'bottom_right' and 'top_left'",
         is_string(causal));
}

float parse_scale(nb::handle scale) {
  if (scale.is_none()) return 0.0f;
  const double value = PyFloat_AsDouble(scale.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse("scale", scale, "is a number, or None for 1 / sqrt(dim)", false);
  }
  const float rounded = static_cast<float>(value);
  // The C ABI's 0 means the default; here None does. Whatever else is wrong the library refuses.
  if (rounded == 0.0f) {
    refuse("scale", scale, "is a finite positive number, or None for 1 / sqrt(dim)", true);
  }
  return rounded;
}

const char* parse_kernel(nb::handle kernel) {
  if (kernel.is_none()) return nullptr;
  if (!is_string(kernel))
    refuse("kernel", kernel, "is the name of a kernel family, or None", false);
  const char* text = PyUnicode_AsUTF8AndSize(kernel.ptr(), nullptr);
  if (text == nullptr) nb::raise_python_error();
  return text;
}

bool parse_stream(nb::handle stream, void** parsed) {
  if (stream.is_none()) return false;
  nb::object handle = nb::borrow(stream);
  if (nb::hasattr(stream, "__cuda_stream__")) {
    handle = stream.attr("__cuda_stream__")()[1];  // (version, handle)
  } else if (nb::hasattr(stream, "cuda_stream")) {
    handle = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "ptr")) {
    handle = stream.attr("ptr");
  }
  if (!PyLong_Check(handle.ptr()) || PyBool_Check(handle.ptr())) {
    refuse("stream", stream,
           "is a cudaStream_t as an int, or an object with __cuda_stream__(), cuda_stream or ptr",
           false);
  }
  *parsed = PyLong_AsVoidPtr(handle.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse("stream", stream, "is a cudaStream_t as an int that fits a pointer", true);
  }
  return true;
}

}  // namespace flashmoe
