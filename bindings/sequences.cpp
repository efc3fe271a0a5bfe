#include "bindings/sequences.h"

#include <cstdlib>
#include <string>

#include "bindings/errors.h"
#include "bindings/options.h"

namespace flashmoe {

bool Sequences::find(const nb::dict& tables, const nb::dict& bounds, nb::handle (&each)[kCount]) {
  bool any = false;
  for (size_t i = 0; i < kCount; ++i) {
    const bool is_table = i < kTableCount;
    const char* const name = is_table ? kTables[i].name : kBounds[i - kTableCount].name;
    // The dicts own the found objects.
    PyObject* const found = PyDict_GetItemString((is_table ? tables : bounds).ptr(), name);
    each[i] = found != nullptr ? found : Py_None;
    any = any || !each[i].is_none();
  }
  return any;
}

bool Sequences::find(nb::handle sequences, nb::handle (&each)[kCount],
                     nb::handle (&scales)[kScales]) {
  constexpr size_t kGiven = kCount + kScales;
  for (nb::handle& scale : scales) scale = Py_None;
  if (sequences.is_none()) return false;
  if (!PyTuple_Check(sequences.ptr()) ||
      PyTuple_Size(sequences.ptr()) != static_cast<Py_ssize_t>(kGiven)) {
    raise_type_error("sequences: got " + short_repr(sequences) +
                     ", accepted is None or a tuple of the " + std::to_string(kGiven) +
                     " arguments that flash_attention has of them");
  }
  bool any = false;
  for (size_t i = 0; i < kGiven; ++i) {
    const nb::handle given = PyTuple_GetItem(sequences.ptr(), static_cast<Py_ssize_t>(i));
    if (i >= kTableCount && i < kTableCount + kScales) {
      scales[i - kTableCount] = given;
      continue;
    }
    each[i < kTableCount ? i : i - kScales] = given;
    any = any || !given.is_none();
  }
  return any;
}

bool Sequences::unpack_bounds(const std::string& packed, flashmoe_attention_sequences* params) {
  const char* at = packed.c_str();
  for (const Bound& bound : kBounds) {
    char* end = nullptr;
    params->*bound.param = std::strtoll(at, &end, 10);
    if (end == at || *end != ' ') return false;
    at = end + 1;
  }
  return *at == '\0';
}

void refuse_scales(nb::handle k_scale, nb::handle v_scale) {
  if (k_scale.is_none() && v_scale.is_none()) return;
  raise_status(FLASHMOE_ERROR_UNSUPPORTED,
               std::string(k_scale.is_none() ? "v_scale" : "k_scale") +
                   ": got one, accepted in backward is None: keys and values with scales have no "
                   "gradients in this version");
}

void Sequences::set_bound(const Bound& bound, nb::handle given) {
  params.*bound.param = parse_integer(bound.name, given, 0, INT64_MAX, bound.accepted);
}

}  // namespace flashmoe
