#include "bindings/sequences.h"

#include "bindings/errors.h"
#include "bindings/options.h"

namespace flashmoe {

void Sequences::unpack(nb::handle sequences, nb::object (&each)[kCount]) {
  const bool all = PyTuple_Check(sequences.ptr()) &&
                   PyTuple_Size(sequences.ptr()) == static_cast<Py_ssize_t>(kCount);
  if (!all && !sequences.is_none()) {
    raise_type_error("sequences: got " + short_repr(sequences) +
                     ", accepted is None or a tuple of the " + std::to_string(kCount) +
                     " arguments that flash_attention has of them");
  }
  for (size_t i = 0; i < kCount; ++i) {
    each[i] =
        all ? nb::borrow(PyTuple_GetItem(sequences.ptr(), static_cast<Py_ssize_t>(i))) : nb::none();
  }
}

void Sequences::set_bound(const Bound& bound, nb::handle given_bound) {
  params.*bound.param =
      parse_integer(bound.name, given_bound, 0, INT64_MAX,
                    "is a number of 0 or more, or None for what the tensors have room for");
}

}  // namespace flashmoe
