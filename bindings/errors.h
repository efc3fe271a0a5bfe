// Python exceptions from the library's statuses and from bad Python arguments. The classes are
// flashmoe_science.errors'; that module is imported when the first one is raised.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

// Raises the library's sentence of the call that just failed on this thread.
[[noreturn]] void raise_status(flashmoe_status status);

// The same with the caller's own words.
[[noreturn]] void raise_status(flashmoe_status status, const std::string& sentence);

inline void check(flashmoe_status status) {
  if (status != FLASHMOE_OK) raise_status(status);
}

[[noreturn]] void raise_type_error(const std::string& sentence);
[[noreturn]] void raise_value_error(const std::string& sentence);

// "torch.Tensor": how messages name an object's type.
std::string name_of_type(nb::handle object);

// repr(object), truncated if long. If repr raises, that is no error of the current call.
std::string short_repr(nb::handle object);

// A str as UTF-8. Surrogates, which UTF-8 cannot encode, are escaped.
std::string utf8(nb::handle text);

}  // namespace flashmoe
