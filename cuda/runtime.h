// What every CUDA backend needs of the runtime: device facts read once, a device guard, functions
// of the driver, errors as statuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int kMaxDevices = 64;

// What memory gives at most: twice a clock.
constexpr double bytes_per_microsecond(double memory_khz, int memory_bits) {
  return 2e-3 * memory_khz * (memory_bits / 8);
}

// The oldest compute capability that the sm89 kernels, the oldest family here, run on.
inline constexpr int kOldestComputeCapability = 89;

struct DeviceFacts {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes_per_block;  // opt-in maximum
  int shared_bytes_per_multiprocessor;
  int reserved_shared_bytes_per_block;  // what a block costs beside its own
  int64_t l2_bytes;
  double memory_bytes_per_microsecond;  // peak, of the memory's clock and width; 0 if not told
};

// Facts of a device, read at the first call. If there is no such device, FLASHMOE_ERROR_NO_DEVICE.
flashmoe_status read_device_facts(int device_id, const DeviceFacts** facts, const Reason& reason);
// The same of a device that plans are made for: kOldestComputeCapability or newer, or what runs
// code for sm_90a.
flashmoe_status check_supported(int device_id, const DeviceFacts** facts, const Reason& reason);
flashmoe_status check_hopper(int device_id, const DeviceFacts** facts, const Reason& reason);

// A function of the driver, which is not linked, as CUDA 12.0 has it. nullptr if it has none of
// that name, or if there is no driver.
void* driver_function(const char* name);

// Of the current context, as no other one of the process has or had; 0: there is none that can be
// used, or they cannot be told apart.
uint64_t current_context_id();

// Makes a device current for a scope, and then what was current before: the caller's context, which
// need not be the one that the runtime keeps of its device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error() const { return error_; }
  flashmoe_status status() const;  // of error(), as this thread's last

 private:
  int device_id_;
  int previous_ = -1;  // device; -1: nothing to restore
  void* previous_context_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace flashmoe
