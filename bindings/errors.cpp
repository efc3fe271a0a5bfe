#include "bindings/errors.h"

namespace flashmoe {
namespace {

[[noreturn]] void raise(const char* factory, nb::handle argument, const std::string& sentence) {
  nb::object made =
      nb::module_::import_("flashmoe_science.errors").attr(factory)(argument, sentence.c_str());
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
  const std::string module = nb::str(type.attr("__module__")).c_str();
  const std::string name = nb::str(type.attr("__qualname__")).c_str();
  return module == "builtins" ? name : module + "." + name;
}

std::string short_repr(nb::handle object) {
  constexpr size_t kLongest = 60;
  std::string text = nb::repr(object).c_str();
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

}  // namespace flashmoe
