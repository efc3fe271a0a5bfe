// flashmoe_science._core: Python on the C ABI. No logic of an operation lives here.
#include <nanobind/nanobind.h>

#include "bindings/attention.h"
#include "bindings/check_sequences.h"
#include "bindings/kv_append.h"
#include "bindings/kv_gather.h"
#include "bindings/library.h"
#include "bindings/merge_states.h"
#include "bindings/moe.h"
#include "bindings/operation.h"

NB_MODULE(_core, module) {
  module.attr("__doc__") = "The native half of flashmoe_science: see that package.";
  flashmoe::define_library(module);
  flashmoe::define_attention(module);
  flashmoe::define_check_sequences(module);
  flashmoe::define_kv_append(module);
  flashmoe::define_kv_gather(module);
  flashmoe::define_merge_states(module);
  flashmoe::define_moe(module);
  flashmoe::define_operations(module);
}
