// Version, build and devices.
#include "core/backends.h"
#include "core/checks.h"
#include "core/status.h"

using flashmoe::fail;

#define FLASHMOE_STRINGIFY_(x) #x
#define FLASHMOE_STRINGIFY(x) FLASHMOE_STRINGIFY_(x)

namespace {

constexpr char kVersion[] = FLASHMOE_STRINGIFY(FLASHMOE_VERSION_MAJOR) "." FLASHMOE_STRINGIFY(
    FLASHMOE_VERSION_MINOR) "." FLASHMOE_STRINGIFY(FLASHMOE_VERSION_PATCH);

}  // namespace

uint32_t flashmoe_version(void) {
  return FLASHMOE_VERSION_MAJOR * 10000 + FLASHMOE_VERSION_MINOR * 100 + FLASHMOE_VERSION_PATCH;
}

flashmoe_status flashmoe_get_build_info(flashmoe_build_info* info) {
  if (info == nullptr) return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "info: got a null pointer");
  const flashmoe_status status = flashmoe::check_struct_size(
      "flashmoe_build_info", info->struct_size, sizeof *info, sizeof *info);
  if (status != FLASHMOE_OK) return status;
  flashmoe_build_info filled = flashmoe_build_info_init();
  filled.version = kVersion;
  filled.cuda_architectures = FLASHMOE_CUDA_ARCHITECTURES;
  filled.cuda_compiler = FLASHMOE_CUDA_COMPILER;
  filled.host_compiler = FLASHMOE_HOST_COMPILER;
  filled.kernel_families = flashmoe::kFamilyNames;
#if FLASHMOE_WITH_CUDA
  filled.cuda_runtime_version = flashmoe::cuda_runtime_version();
#endif
  flashmoe::copy_out(filled, info);
  return FLASHMOE_OK;
}

int32_t flashmoe_cuda_device_count(void) {
#if FLASHMOE_WITH_CUDA
  return flashmoe::cuda_device_count();
#else
  return 0;
#endif
}

flashmoe_status flashmoe_get_device_info(flashmoe_device device, flashmoe_device_info* info) {
  if (info == nullptr) return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "info: got a null pointer");
  FLASHMOE_TRY(flashmoe::check_struct_size("flashmoe_device_info", info->struct_size, sizeof *info,
                                           sizeof *info));
  FLASHMOE_TRY(flashmoe::check_device("device", device, &device));
  flashmoe_device_info filled = flashmoe_device_info_init();
  flashmoe_status status;
  if (device.device_type == FLASHMOE_DEVICE_CPU) {
    status = flashmoe::cpu_device_info(&filled);
  } else {
#if FLASHMOE_WITH_CUDA
    status = flashmoe::cuda_device_info(device.device_id, &filled);
#else
    status = fail(FLASHMOE_ERROR_NO_DEVICE,
                  "device: got cuda:%d, but this library was built without CUDA", device.device_id);
#endif
  }
  if (status == FLASHMOE_OK) flashmoe::copy_out(filled, info);
  return status;
}

flashmoe_status flashmoe_set_num_threads(int32_t n) {
  constexpr int32_t kMaxThreads = 4096;
  if (n < 0 || n > kMaxThreads) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "n: got %d threads, accepted are 0 to %d", n,
                kMaxThreads);
  }
  flashmoe::cpu_set_num_threads(n);
  return FLASHMOE_OK;
}

int32_t flashmoe_get_num_threads(void) { return flashmoe::cpu_get_num_threads(); }
