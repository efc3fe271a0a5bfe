#include "bindings/options.h"

#include <cmath>
#include <cstddef>
#include <cstring>
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

float to_float(const char* name, nb::handle number, const char* accepted) {
  if (PyBool_Check(number.ptr())) refuse(name, number, accepted, false);
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    refuse(name, number, accepted, too_large);
  }
  return static_cast<float>(value);
}

// None becomes the C ABI's 0. The number 0 itself is refused here, since the library's own sentence
// would offer it.
float parse_positive(const char* name, nb::handle number, const char* accepted) {
  if (number.is_none()) return 0.0f;
  const float rounded =
      to_float(name, number, (std::string("is a number, or None for ") + accepted).c_str());
  if (!(rounded > 0.0f) || std::isinf(rounded)) {
    refuse(name, number,
           (std::string("is a finite positive number, or None for ") + accepted).c_str(), true);
  }
  return rounded;
}

// The int that an object stands for, or null if it stands for none, like a tensor of several
// numbers.
nb::object to_index(nb::handle object) {
  nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
    PyErr_Clear();
  }
  return index;
}

// A name that stands for a value of the C ABI.
struct Choice {
  const char* name;
  int32_t value;
};

template <size_t kCount>
int32_t parse_choice(const char* name, nb::handle chosen, const Choice (&choices)[kCount]) {
  if (is_string(chosen)) {
    for (const Choice& choice : choices) {
      if (equals(chosen, choice.name)) return choice.value;
    }
  }
  std::string accepted = "are ";
  for (size_t i = 0; i < kCount; ++i) {
    accepted += std::string(i == 0 ? "" : i + 1 < kCount ? ", " : " and ");
    accepted += std::string("'") + choices[i].name + "'";
  }
  refuse(name, chosen, accepted.c_str(), is_string(chosen));
}

// Parses one end of a window: whether it exists, and its number of keys.
bool parse_window_end(nb::handle window, nb::handle end, int64_t* keys) {
  if (end.is_none()) return false;
  const bool may_be_integer = PyIndex_Check(end.ptr()) && !PyBool_Check(end.ptr());
  const nb::object index = may_be_integer ? to_index(end) : nb::object();
  const bool integer = index.is_valid();
  int overflow = 0;
  const int64_t value = integer ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : -1;
  if (!integer || overflow != 0 || value < 0) {
    refuse("window", window,
           "is None or a pair (left, right) of numbers of keys, each 0 or more, or None for no "
           "bound (FlashAttention's -1)",
           integer);
  }
  *keys = value;
  return true;
}

}  // namespace

bool parse_flag(const char* name, nb::handle flag) {
  if (!PyBool_Check(flag.ptr())) refuse(name, flag, "are False and True", false);
  return flag.ptr() == Py_True;
}

int32_t parse_layout(nb::handle layout) {
  constexpr Choice choices[] = {{"bshd", FLASHMOE_LAYOUT_BSHD}, {"bhsd", FLASHMOE_LAYOUT_BHSD}};
  return parse_choice("layout", layout, choices);
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

float parse_scale(nb::handle scale) { return parse_positive("scale", scale, "1 / sqrt(dim)"); }

float parse_softcap(nb::handle softcap) { return parse_positive("softcap", softcap, "no cap"); }

int32_t parse_scoring(nb::handle scoring) {
  constexpr Choice choices[] = {{"softmax", FLASHMOE_MOE_SOFTMAX},
                                {"topk_softmax", FLASHMOE_MOE_TOPK_SOFTMAX},
                                {"sigmoid", FLASHMOE_MOE_SIGMOID}};
  return parse_choice("scoring", scoring, choices);
}

int32_t parse_gate(nb::handle gate) {
  constexpr Choice choices[] = {{"gate_up", FLASHMOE_MOE_GATE_UP},
                                {"up_gate", FLASHMOE_MOE_UP_GATE},
                                {"interleaved", FLASHMOE_MOE_INTERLEAVED},
                                {"separate", FLASHMOE_MOE_SEPARATE},
                                {"none", FLASHMOE_MOE_NO_GATE}};
  return parse_choice("gate", gate, choices);
}

int32_t parse_activation(nb::handle activation) {
  constexpr Choice choices[] = {{"silu", FLASHMOE_ACTIVATION_SILU},
                                {"gelu", FLASHMOE_ACTIVATION_GELU},
                                {"gelu_tanh", FLASHMOE_ACTIVATION_GELU_TANH},
                                {"relu", FLASHMOE_ACTIVATION_RELU},
                                {"relu2", FLASHMOE_ACTIVATION_RELU2}};
  return parse_choice("activation", activation, choices);
}

float parse_limit(nb::handle limit) { return parse_positive("limit", limit, "no limit"); }

namespace {

// to_float, of a number that does not become infinite.
float to_float_in_range(const char* name, nb::handle number, const char* accepted) {
  const float value = to_float(name, number, accepted);
  if (std::isinf(value) && std::isfinite(PyFloat_AsDouble(number.ptr()))) {
    refuse(name, number, (std::string(accepted) + " that fp32 holds").c_str(), true);
  }
  return value;
}

}  // namespace

float parse_number(const char* name, nb::handle number) {
  return to_float_in_range(name, number, "is a finite number");
}

float parse_factor(const char* name, nb::handle factor) {
  const float value = to_float_in_range(name, factor, "is a finite number other than 0");
  if (value == 0.0f) refuse(name, factor, "is a finite number other than 0", true);
  return value == 1.0f ? 0.0f : value;  // the default, which every mode accepts
}

int64_t parse_integer(const char* name, nb::handle integer, int64_t low, int64_t high,
                      const char* accepted) {
  if (!PyIndex_Check(integer.ptr()) || PyBool_Check(integer.ptr())) {
    refuse(name, integer, accepted, false);
  }
  const nb::object index = to_index(integer);
  if (!index.is_valid()) refuse(name, integer, accepted, false);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || value < low || value > high) refuse(name, integer, accepted, true);
  return value;
}

Window parse_window(nb::handle window, bool causal) {
  Window parsed = {0, 0, 0};
  if (window.is_none()) return parsed;
  const bool sequence = PyTuple_Check(window.ptr()) || PyList_Check(window.ptr());
  if (!sequence || PySequence_Size(window.ptr()) != 2) {
    refuse("window", window, "is None or a pair (left, right), each a number of keys or None",
           sequence);
  }
  const nb::object left = nb::steal(PySequence_GetItem(window.ptr(), 0));
  const nb::object right = nb::steal(PySequence_GetItem(window.ptr(), 1));
  if (!left.is_valid() || !right.is_valid()) nb::raise_python_error();
  if (parse_window_end(window, left, &parsed.left)) parsed.ends |= FLASHMOE_WINDOW_LEFT;
  if (parse_window_end(window, right, &parsed.right)) parsed.ends |= FLASHMOE_WINDOW_RIGHT;
  if (causal && parsed.right != 0) {
    refuse("window", window, "with causal is a pair (left, right) whose right is 0 or None", true);
  }
  return parsed;
}

const char* parse_kernel(nb::handle kernel) {
  if (kernel.is_none()) return nullptr;
  constexpr char kAccepted[] = "is the name of a kernel family, or None";
  if (!is_string(kernel)) refuse("kernel", kernel, kAccepted, false);
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(kernel.ptr(), &length);
  if (text == nullptr) PyErr_Clear();  // raised for surrogates
  if (text == nullptr || std::strlen(text) != static_cast<size_t>(length)) {
    refuse("kernel", kernel, kAccepted, true);
  }
  return text;
}

bool parse_stream(nb::handle stream, void** parsed) {
  if (stream.is_none()) return false;
  nb::object handle = nb::borrow(stream);
  if (nb::hasattr(stream, "__cuda_stream__")) {
    const nb::object pair = stream.attr("__cuda_stream__")();  // (version, handle)
    const bool is_pair = PyTuple_Check(pair.ptr()) && PyTuple_Size(pair.ptr()) == 2;
    handle = is_pair ? nb::borrow(PyTuple_GetItem(pair.ptr(), 1)) : nb::none();
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
