#include "bindings/library.h"

#include <cstdint>

#include "bindings/errors.h"
#include "bindings/fields.h"
#include "bindings/options.h"
#include "bindings/plan.h"
#include "bindings/tensor.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

Fields build_info() {
  flashmoe_build_info info = flashmoe_build_info_init();
  check(flashmoe_get_build_info(&info));
  Fields fields;
  fields["version"] = nb::str(info.version);
  fields["cuda_architectures"] = nb::str(info.cuda_architectures);
  fields["cuda_compiler"] = nb::str(info.cuda_compiler);
  fields["host_compiler"] = nb::str(info.host_compiler);
  fields["kernel_families"] = nb::str(info.kernel_families);
  fields["cuda_runtime_version"] = nb::int_(info.cuda_runtime_version);
  return fields;
}

Fields device_info(int32_t device_type, int32_t device_id) {
  flashmoe_device_info info = flashmoe_device_info_init();
  check(flashmoe_get_device_info({device_type, device_id}, &info));
  Fields fields;
  fields["name"] = nb::str(info.name);
  fields["isa"] = nb::str(info.isa);
  fields["kernel_family"] = nb::str(info.kernel_family);
  fields["compute_capability"] = nb::int_(info.compute_capability);
  fields["multiprocessors"] = nb::int_(info.multiprocessors);
  fields["driver_version"] = nb::int_(info.driver_version);
  fields["shared_bytes_per_block"] = nb::int_(info.shared_bytes_per_block);
  fields["l2_bytes"] = nb::int_(info.l2_bytes);
  fields["memory_bytes"] = nb::int_(info.memory_bytes);
  return fields;
}

nb::typed<nb::list, Fields> last_launches() {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  check(flashmoe_last_launches(launches, &count));
  nb::list described;
  for (int32_t i = 0; i < count; ++i) described.append(describe(launches[i]));
  return nb::borrow<nb::typed<nb::list, Fields>>(described);
}

// Calls the Python function behind `user`. May run on any thread, with or without the GIL, and even
// during interpreter shutdown, when it does nothing.
void forward_log_line(int32_t level, const char* line, void* user) {
  if (Py_IsInitialized() == 0) return;
  nb::gil_scoped_acquire acquire;
  nb::error_scope keep_current_exception;
  try {
    nb::handle(static_cast<PyObject*>(user))(level, line);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("flashmoe log callback");
  }
}

// Returns an int32; the C ABI checks its value.
int32_t parse_int32(const char* name, nb::handle integer, const char* accepted) {
  return static_cast<int32_t>(parse_integer(name, integer, INT32_MIN, INT32_MAX, accepted));
}

void set_num_threads(nb::handle n) {
  check(flashmoe_set_num_threads(parse_int32("n", n, "are 0 to 4096")));
}

void set_log(nb::handle given, nb::object callback) {
  const int32_t level = parse_int32("level", given, "are 0 (off) to 3 (debug)");
  if (callback.is_none()) {
    check(flashmoe_set_log(level, nullptr, nullptr));
    return;
  }
  if (PyCallable_Check(callback.ptr()) == 0) {
    raise_type_error("callback: got " + name_of_type(callback) +
                     ", accepted is a function of (level, line), or None");
  }
  // Another thread may be about to call the replaced callback, so callbacks are never released.
  PyObject* kept = callback.release().ptr();
  const flashmoe_status status = flashmoe_set_log(level, &forward_log_line, kept);
  if (status != FLASHMOE_OK) {
    Py_DECREF(kept);
    raise_status(status);
  }
}

void check_readable(const char* name, nb::handle tensor) {
  TensorView().borrow(name, tensor, Access::kRead);
}

void check_writable(const char* name, nb::handle tensor) {
  TensorView().borrow(name, tensor, Access::kWrite);
}

}  // namespace

void define_library(nb::module_& module) {
  module.def("version", &flashmoe_version, "major * 10000 + minor * 100 + patch");
  module.def("build_info", &build_info, "The fields of flashmoe_build_info.");
  module.def("device_info", &device_info, nb::arg("device_type"), nb::arg("device_id"),
             "The fields of flashmoe_device_info.");
  module.def("cuda_device_count", &flashmoe_cuda_device_count,
             "Number of CUDA devices that can be used: 0 without a GPU, without a driver or in a "
             "CPU-only build. Never fails.");
  module.def("last_launches", &last_launches, "The fields of flashmoe_launch, of each.");
  module.def("set_num_threads", &set_num_threads, nb::arg("n").none(),
             nb::sig("def set_num_threads(n: int) -> None"),
             "Sets the threads the CPU backend uses, the caller's included.\n\n"
             "0 restores the default: FLASHMOE_NUM_THREADS if set, else the processors this "
             "process may run on, as far as its control groups pay for them.\n\nRaises:\n    "
             "ValueError: n < 0 or n > 4096.\n"
             "    TypeError: Not an int.");
  module.def("get_num_threads", &flashmoe_get_num_threads,
             "Threads the CPU backend uses, the caller's included.");
  module.def("check_readable", &check_readable, nb::arg("name"), nb::arg("tensor"),
             "Raises a TypeError for what is no tensor that can be viewed.");
  module.def("check_writable", &check_writable, nb::arg("name"), nb::arg("tensor"),
             "Raises a ValueError for a tensor that is known to be read-only, and a TypeError for "
             "what is none.");
  module.def("set_log", &set_log, nb::arg("level").none(), nb::arg("callback").none(),
             nb::sig("def set_log(level: int, callback: object | None) -> None"),
             "flashmoe_set_log; callback is called with (level, line).");
}

}  // namespace flashmoe
