// What every CUDA backend needs from the runtime: device facts read once, a device guard, driver
// functions, and errors as statuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int kMaxDevices = 64;

// Peak rate of the memory: two transfers per clock.
constexpr double bytes_per_microsecond(double memory_khz, int memory_bits) {
  return 2e-3 * memory_khz * (memory_bits / 8);
}

// The oldest compute capability that the sm89 kernels, the oldest family here, support.
inline constexpr int kOldestComputeCapability = 89;

struct DeviceFacts {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes_per_block;  // opt-in maximum
  int shared_bytes_per_multiprocessor;
  int reserved_shared_bytes_per_block;  // overhead of a block beside its own
  int64_t l2_bytes;
  double memory_bytes_per_microsecond;  // peak, from the memory's clock and width; 0 if unknown
};

// Facts of a device, read at the first call. FLASHMOE_ERROR_NO_DEVICE if there is no such device.
flashmoe_status read_device_facts(int device_id, const DeviceFacts** facts, const Reason& reason);
// The same for a device that plans are made for. check_supported requires kOldestComputeCapability
// or newer, check_hopper a device that runs code for sm_90a.
flashmoe_status check_supported(int device_id, const DeviceFacts** facts, const Reason& reason);
flashmoe_status check_hopper(int device_id, const DeviceFacts** facts, const Reason& reason);

// A driver function of CUDA 12.0. The driver is not linked. nullptr if it has no such function, or
// if there is no driver.
void* driver_function(const char* name);

// An id of the current context that no other context of the process has or had. 0 if there is no
// usable context, or if contexts cannot be told apart.
uint64_t current_context_id();

// Makes a device current for a scope, and then restores the caller's context, which need not be the
// one that the runtime keeps for its device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error() const { return error_; }
  flashmoe_status status() const;  // of error(), as this thread's last error

 private:
  int device_id_;
  int previous_ = -1;  // device; -1: nothing to restore
  void* previous_context_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace flashmoe
