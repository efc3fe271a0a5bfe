// Python functions whose arguments native code binds. A Python function that hands its arguments on
// costs a frame, a look-up of every keyword's default, and a second call: several tenths of a
// microsecond, as much as all else these bindings do in one call.
//
// The Python function stays the one that is written down, documented and typed; the native one takes
// its name, module, signature, defaults and docstring. What native code does not bind (a required
// argument by its name at the wrong place, an unknown name, a name that is no interned string) goes
// to the Python function, which does the same or raises what Python raises.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace flashmoe {

namespace nb = nanobind;

// What native code knows of a Python function, whose parameters are some required ones, by position
// or name, followed by keyword-only ones with defaults.
struct PythonFunction {
  nb::object function;
  size_t required;
  std::vector<nb::object> names;     // of all parameters, interned
  std::vector<nb::object> defaults;  // of those after the required ones
};

// Raises a TypeError if the function's parameters are not as above, or not so many.
PythonFunction read_python_function(nb::handle function, size_t parameters);

// Fills arguments[names.size()], borrowed. False if that is for the Python function to do.
bool bind_arguments(const PythonFunction& function, PyObject* const* given, Py_ssize_t positional,
                    PyObject* keywords, PyObject** arguments);

// The Python function's result for the same arguments; nullptr with an exception set.
PyObject* call_python_function(const PythonFunction& function, PyObject* const* given,
                               Py_ssize_t positional, PyObject* keywords);

using NativeEntry = PyObject* (*)(PyObject* self, PyObject* const* given, Py_ssize_t positional,
                                  PyObject* keywords);

// A function object that looks like the Python function and calls `entry`.
nb::object make_native_function(const PythonFunction& function, NativeEntry entry);

// Sets the Python exception for the C++ one that is being handled.
void set_python_error();

inline bool serves_all(nb::handle) { return true; }
inline bool leaves_nothing(nb::handle) { return false; }

template <auto kImplementation, bool (*kServes)(nb::handle first) = &serves_all,
          bool (*kLeaves)(nb::handle first) = &leaves_nothing>
class NativeFunction;

// `kImplementation` takes every parameter of the Python function, in order. There is one native
// function for each: what is not bound goes to the Python function that was given last, as does a
// call of which `kServes` the first argument is false, and one that failed of which `kLeaves` it is
// true.
template <class... Handles, nb::object (*kImplementation)(Handles...),
          bool (*kServes)(nb::handle first), bool (*kLeaves)(nb::handle first)>
class NativeFunction<kImplementation, kServes, kLeaves> {
 public:
  static nb::object like(nb::handle function) {
    // Leaked on purpose: at exit the interpreter is gone before static destructors run.
    auto* made = new PythonFunction(read_python_function(function, kParameters));
    nb::object native = make_native_function(*made, &enter);
    function_ = made;
    return native;
  }

 private:
  static constexpr size_t kParameters = sizeof...(Handles);

  static PyObject* enter(PyObject*, PyObject* const* given, Py_ssize_t positional,
                         PyObject* keywords) {
    PyObject* arguments[kParameters];
    try {
      if (bind_arguments(*function_, given, positional, keywords, arguments) &&
          kServes(arguments[0])) {
        try {
          return call(arguments, std::index_sequence_for<Handles...>()).release().ptr();
        } catch (...) {
          if (!kLeaves(arguments[0])) throw;
        }
      }
      return call_python_function(*function_, given, positional, keywords);
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  }

  template <size_t... kIndex>
  static nb::object call(PyObject* const* arguments, std::index_sequence<kIndex...>) {
    return kImplementation(Handles(arguments[kIndex])...);
  }

  static inline const PythonFunction* function_ = nullptr;
};

}  // namespace flashmoe
