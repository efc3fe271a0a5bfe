/* The public header comes first and alone: it must compile as C99 with every warning an error. */
#include "flashmoe/flashmoe.h"

#include "check.h"

/* The layout that DLPack fixes for DLTensor on a 64-bit machine. */
typedef char tensor_is_48_bytes[sizeof(flashmoe_tensor) == 48 ? 1 : -1];
typedef char device_follows_data[offsetof(flashmoe_tensor, device) == 8 ? 1 : -1];
typedef char ndim_at_16[offsetof(flashmoe_tensor, ndim) == 16 ? 1 : -1];
typedef char dtype_at_20[offsetof(flashmoe_tensor, dtype) == 20 ? 1 : -1];
typedef char shape_at_24[offsetof(flashmoe_tensor, shape) == 24 ? 1 : -1];
typedef char strides_at_32[offsetof(flashmoe_tensor, strides) == 32 ? 1 : -1];
typedef char byte_offset_at_40[offsetof(flashmoe_tensor, byte_offset) == 40 ? 1 : -1];

int main(void) {
  const flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  const flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_device_info device = flashmoe_device_info_init();
  const flashmoe_moe_route_params route = flashmoe_moe_route_params_init();
  const flashmoe_moe_forward_params layer = flashmoe_moe_forward_params_init();
  const flashmoe_grouped_product_params product = flashmoe_grouped_product_params_init();
  const flashmoe_merge_states_params merge = flashmoe_merge_states_params_init();
  const flashmoe_kv_append_params append = flashmoe_kv_append_params_init();
  const flashmoe_kv_gather_params gather = flashmoe_kv_gather_params_init();
  const flashmoe_check_sequences_params check = flashmoe_check_sequences_params_init();
  const flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  const flashmoe_attention_backward_params backward = flashmoe_attention_backward_params_init();
  const flashmoe_fused_moe_params fused = flashmoe_fused_moe_params_init();
  const flashmoe_moe_backward_params layer_backward = flashmoe_moe_backward_params_init();
  const flashmoe_moe_route_backward_params route_backward =
      flashmoe_moe_route_backward_params_init();
  const flashmoe_grouped_product_backward_params product_backward =
      flashmoe_grouped_product_backward_params_init();
  flashmoe_build_info build = flashmoe_build_info_init();
  CHECK(route.struct_size == sizeof route && layer.struct_size == sizeof layer);
  CHECK(product.struct_size == sizeof product && merge.struct_size == sizeof merge);
  CHECK(append.struct_size == sizeof append && gather.struct_size == sizeof gather);
  CHECK(check.struct_size == sizeof check && sequences.struct_size == sizeof sequences);
  CHECK(backward.struct_size == sizeof backward && fused.struct_size == sizeof fused);
  CHECK(layer_backward.struct_size == sizeof layer_backward);
  CHECK(route_backward.struct_size == sizeof route_backward);
  CHECK(product_backward.struct_size == sizeof product_backward);
  CHECK(params.struct_size == sizeof params && plan.struct_size == sizeof plan);
  CHECK(plan.launch_count == 0 && device.struct_size == sizeof device);

  CHECK(flashmoe_version() ==
        FLASHMOE_VERSION_MAJOR * 10000 + FLASHMOE_VERSION_MINOR * 100 + FLASHMOE_VERSION_PATCH);
  CHECK(flashmoe_get_build_info(&build) == FLASHMOE_OK);
  CHECK(build.version != NULL && build.host_compiler != NULL && build.kernel_families != NULL);

  /* A C caller may hold any int in an enum. */
  CHECK(strcmp(flashmoe_status_name(FLASHMOE_OK), "FLASHMOE_OK") == 0);
  CHECK(strcmp(flashmoe_status_name(FLASHMOE_ERROR_INTERNAL), "FLASHMOE_ERROR_INTERNAL") == 0);
  CHECK(strlen(flashmoe_status_name((flashmoe_status)12)) > 0);
  return 0;
}
