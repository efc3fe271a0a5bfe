// The public header as C++17, twice, with every warning an error.
#include "flashmoe/moe.h"  // includes flashmoe.h, which includes it

#include <type_traits>

#include "check.h"

static_assert(std::is_trivially_copyable<flashmoe_attention_forward_params>::value, "POD");
static_assert(std::is_standard_layout<flashmoe_plan>::value, "POD");
static_assert(offsetof(flashmoe_attention_forward_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_plan, struct_size) == 0, "struct_size first");
static_assert(std::is_standard_layout<flashmoe_launch>::value, "POD");
static_assert(offsetof(flashmoe_device_info, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_build_info, struct_size) == 0, "struct_size first");
static_assert(std::is_trivially_copyable<flashmoe_moe_forward_params>::value, "POD");
static_assert(offsetof(flashmoe_moe_route_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_moe_forward_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_grouped_product_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_merge_states_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_kv_append_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_check_sequences_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_kv_gather_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_attention_sequences, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_attention_backward_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_fused_moe_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_moe_backward_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_moe_route_backward_params, struct_size) == 0, "struct_size first");
static_assert(offsetof(flashmoe_grouped_product_backward_params, struct_size) == 0,
              "struct_size first");

int main() {
  flashmoe_build_info build = flashmoe_build_info_init();
  CHECK(flashmoe_get_build_info(&build) == FLASHMOE_OK);
  return 0;
}
