// An object of a Python module, looked up once: the lookup costs more than most calls of it.
#pragma once

#include <nanobind/nanobind.h>

namespace flashmoe {

namespace nb = nanobind;

// Has static lifetime. It holds a raw pointer, since an nb::object would outlive the interpreter at
// exit.
class Kept {
 public:
  // `name` may have dots. The module is imported at the first use.
  constexpr Kept(const char* module, const char* name) : module_(module), name_(name) {}

  nb::handle get() {
    if (object_ == nullptr) {
      const nb::object find = nb::module_::import_("operator").attr("attrgetter")(name_);
      object_ = find(nb::module_::import_(module_)).release().ptr();
    }
    return object_;
  }

 private:
  const char* module_;
  const char* name_;
  PyObject* object_ = nullptr;
};

}  // namespace flashmoe
