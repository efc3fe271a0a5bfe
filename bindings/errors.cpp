#include "bindings/errors.h"

namespace flashmoe {
namespace {

[[noreturn]] void raise(const char* factory, nb::handle argument, const std::string& sentence) {
  nb::object made = nb::module_::import_("flashmoe_science.errors")
                        .attr(factory)(argument, nb::str(sentence.data(), sentence.size()));
  PyErr_SetObject(made.type().ptr(), made.ptr());
  throw nb::python_error();
}

}  // namespace

void raise_status(flashmoe_status status) { raise_status(status, flashmoe_last_error()); }

void raise_status(flashmoe_status status, const std::string& sentence) {
  raise("_from_status", nb::int_(static_cast<int>(status)), sentence);
}

void raise_type_error(const std::string& sentence) { raise("_type_error", nb::none(), sentence); }

void raise_value_error(const std::string& sentence) { raise("_value_error", nb::none(), sentence); }

std::string name_of_type(nb::handle object) {
  nb::handle type = object.type();
  const std::string module = utf8(nb::str(type.attr("__module__")));
  const std::string name = utf8(nb::str(type.attr("__qualname__")));
  return module == "builtins" ? name : module + "." + name;
}

std::string short_repr(nb::handle object) {
  constexpr Py_ssize_t kLongest = 60;  // characters
  const nb::object text = nb::steal(PyObject_Repr(object.ptr()));
  if (!text.is_valid()) {
    nb::python_error error;
    if (!error.matches(PyExc_Exception)) throw error;
    return "one without a repr";
  }
  if (PyUnicode_GetLength(text.ptr()) <= kLongest) return utf8(text);
  return utf8(nb::steal(PyUnicode_Substring(text.ptr(), 0, kLongest))) + "...";
}

std::string utf8(nb::handle text) {
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) nb::raise_python_error();
  return {PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr()))};
}

}  // namespace flashmoe
