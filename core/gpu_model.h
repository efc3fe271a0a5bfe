// Models of GPUs, for plans without a device. Behind the checks, a model is a CUDA device with an
// id that no device has.
#pragma once

#include <cstdint>
#include <cstdio>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// In the order of flashmoe_gpu_model.
inline constexpr const char* kGpuModelNames[] = {"h100", "h200", "l4", "rtx4090"};
inline constexpr int32_t kGpuModels = sizeof kGpuModelNames / sizeof kGpuModelNames[0];
static_assert(kGpuModels == FLASHMOE_GPU_RTX_4090 + 1);

// The id of model 0. Devices have ids below.
inline constexpr int32_t kFirstGpuModel = 60;

inline bool is_gpu_model(int32_t cuda_id) {
  return cuda_id >= kFirstGpuModel && cuda_id < kFirstGpuModel + kGpuModels;
}

// The device as the caller named it.
inline flashmoe_device given_device(flashmoe_device device) {
  if (device.device_type != FLASHMOE_DEVICE_CUDA || !is_gpu_model(device.device_id)) return device;
  return {FLASHMOE_DEVICE_GPU_MODEL, device.device_id - kFirstGpuModel};
}

// A device in messages: "cpu", "cuda:1", "h200".
struct DeviceName {
  char text[24];

  explicit DeviceName(flashmoe_device device) {
    if (device.device_type != FLASHMOE_DEVICE_CUDA) {
      std::snprintf(text, sizeof text, "cpu");
    } else if (is_gpu_model(device.device_id)) {
      std::snprintf(text, sizeof text, "%s", kGpuModelNames[device.device_id - kFirstGpuModel]);
    } else {
      std::snprintf(text, sizeof text, "cuda:%d", device.device_id);
    }
  }
  static DeviceName cuda(int32_t id) { return DeviceName({FLASHMOE_DEVICE_CUDA, id}); }
};

}  // namespace flashmoe
