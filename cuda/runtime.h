// What every CUDA backend needs of the runtime: device facts read once, a device guard, errors as
// statuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int kMaxDevices = 64;

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

// Facts of a device, read at the first call. Null, with a sentence in `reason`, if there is no such
// device.
const DeviceFacts* device_facts(int device_id, char* reason, size_t reason_size);

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int previous_ = -1;  // -1: nothing to restore
  cudaError_t error_ = cudaSuccess;
};

}  // namespace flashmoe
