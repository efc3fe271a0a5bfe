#include "bindings/native_function.h"

#include <exception>
#include <new>
#include <string>

#include "bindings/errors.h"

namespace flashmoe {

PythonFunction read_python_function(nb::handle function, size_t parameters) {
  const nb::object code = function.attr("__code__");
  const nb::object keyword_defaults = function.attr("__kwdefaults__");
  const size_t required = nb::cast<size_t>(code.attr("co_argcount"));
  const size_t keywords = nb::cast<size_t>(code.attr("co_kwonlyargcount"));
  constexpr int kVariadic = 0x04 | 0x08;  // inspect.CO_VARARGS, CO_VARKEYWORDS
  if (required + keywords != parameters || nb::len(keyword_defaults) != keywords ||
      !function.attr("__defaults__").is_none() ||
      nb::cast<int>(code.attr("co_posonlyargcount")) != 0 ||
      (nb::cast<int>(code.attr("co_flags")) & kVariadic) != 0) {
    raise_type_error("function: " + std::string(nb::str(function).c_str()) +
                     " has other parameters than the native function");
  }
  PythonFunction read;
  read.function = nb::borrow(function);
  read.required = required;
  const nb::object names = code.attr("co_varnames");  // parameters first, interned
  for (size_t i = 0; i < parameters; ++i) {
    read.names.push_back(names[i]);
    if (i >= required) read.defaults.push_back(keyword_defaults[names[i]]);
  }
  return read;
}

bool bind_arguments(const PythonFunction& function, PyObject* const* given, Py_ssize_t positional,
                    PyObject* keywords, PyObject** arguments) {
  const size_t count = function.names.size();
  const size_t required = function.required;
  const size_t placed = static_cast<size_t>(positional);
  if (placed > required) return false;
  for (size_t i = 0; i < placed; ++i) arguments[i] = given[i];
  for (size_t i = placed; i < required; ++i) arguments[i] = nullptr;
  for (size_t i = required; i < count; ++i) arguments[i] = function.defaults[i - required].ptr();
  const Py_ssize_t named = keywords != nullptr ? PyTuple_Size(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    const PyObject* name = PyTuple_GetItem(keywords, i);
    size_t index = placed;
    while (index < count && function.names[index].ptr() != name) ++index;
    if (index == count) return false;
    arguments[index] = given[positional + i];
  }
  for (size_t i = placed; i < required; ++i) {
    if (arguments[i] == nullptr) return false;
  }
  return true;
}

PyObject* call_python_function(const PythonFunction& function, PyObject* const* given,
                               Py_ssize_t positional, PyObject* keywords) {
  const nb::object arguments = nb::steal(PyTuple_New(positional));
  const nb::object named = nb::steal(PyDict_New());
  if (!arguments.is_valid() || !named.is_valid()) return nullptr;
  for (Py_ssize_t i = 0; i < positional; ++i) {
    PyTuple_SetItem(arguments.ptr(), i, nb::borrow(given[i]).release().ptr());
  }
  const Py_ssize_t count = keywords != nullptr ? PyTuple_Size(keywords) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GetItem(keywords, i);
    if (PyDict_SetItem(named.ptr(), name, given[positional + i]) != 0) return nullptr;
  }
  return PyObject_Call(function.function.ptr(), arguments.ptr(), named.ptr());
}

nb::object make_native_function(const PythonFunction& function, NativeEntry entry) {
  // "name(q, k, *, causal=False)\n--\n\nDocstring": how C functions tell their signature.
  std::string text = nb::str(function.function.attr("__name__")).c_str();
  const size_t name_length = text.size();
  text += "(";
  for (size_t i = 0; i < function.names.size(); ++i) {
    if (i > 0) text += ", ";
    if (i == function.required) text += "*, ";
    text += nb::str(function.names[i]).c_str();
    if (i < function.required) continue;
    text += std::string("=") + nb::repr(function.defaults[i - function.required]).c_str();
  }
  text += ")\n--\n\n";
  const nb::object docstring = function.function.attr("__doc__");
  if (!docstring.is_none()) text += nb::str(docstring).c_str();

  // As long as the function, which may be for ever: both are leaked.
  const auto* name = new std::string(text.substr(0, name_length));
  const auto* document = new std::string(std::move(text));
  auto* method =
      new PyMethodDef{name->c_str(), nullptr, METH_FASTCALL | METH_KEYWORDS, document->c_str()};
  method->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry));
  PyObject* made = PyCFunction_NewEx(method, nullptr, function.function.attr("__module__").ptr());
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

void set_python_error() {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace flashmoe
