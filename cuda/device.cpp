#include <cuda.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/gpu_models.h"
#include "cuda/runtime.h"

namespace flashmoe {
namespace {

cudaError_t read_facts(int device_id, DeviceFacts* facts) {
  int major = 0;
  int minor = 0;
  int l2 = 0;
  int memory_khz = 0;
  int memory_bits = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } reads[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMultiProcessorCount, &facts->multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &facts->shared_bytes_per_block},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &facts->shared_bytes_per_multiprocessor},
      {cudaDevAttrReservedSharedMemoryPerBlock, &facts->reserved_shared_bytes_per_block},
      {cudaDevAttrL2CacheSize, &l2},
      {cudaDevAttrMemoryClockRate, &memory_khz},
      {cudaDevAttrGlobalMemoryBusWidth, &memory_bits},
  };
  for (const auto& read : reads) {
    const cudaError_t error = cudaDeviceGetAttribute(read.value, read.attribute, device_id);
    if (error != cudaSuccess) return error;
  }
  facts->compute_capability = 10 * major + minor;
  facts->l2_bytes = l2;
  facts->memory_bytes_per_microsecond = bytes_per_microsecond(memory_khz, memory_bits);
  return cudaSuccess;
}

flashmoe_status refuse_capability(int device_id, const DeviceFacts& facts, const char* accepted,
                                  const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s has compute capability %d.%d, accepted %s",
                       DeviceName::cuda(device_id).text, facts.compute_capability / 10,
                       facts.compute_capability % 10, accepted);
}

}  // namespace

flashmoe_status read_device_facts(int device_id, const DeviceFacts** found, const Reason& reason) {
  static DeviceFacts facts[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  static std::mutex mutex;
  if (is_gpu_model(device_id)) {
    *found = &facts_of_model(device_id);
    return FLASHMOE_OK;
  }
  const int count =
      device_id >= 0 && device_id < kMaxDevices && known[device_id].load(std::memory_order_acquire)
          ? kMaxDevices
          : cuda_device_count();
  if (device_id < 0 || device_id >= count || device_id >= kMaxDevices) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE,
                         "device cuda:%d does not exist, %d CUDA device%s can be used", device_id,
                         count, count == 1 ? "" : "s");
  }
  if (!known[device_id].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const bool done = known[device_id].load(std::memory_order_relaxed);  // by another thread
    const cudaError_t error = done ? cudaSuccess : read_facts(device_id, &facts[device_id]);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:%d cannot be read: %s", device_id,
                           cudaGetErrorString(error));
    }
    known[device_id].store(true, std::memory_order_release);
  }
  *found = &facts[device_id];
  return FLASHMOE_OK;
}

flashmoe_status check_supported(int device_id, const DeviceFacts** facts, const Reason& reason) {
  FLASHMOE_TRY(read_device_facts(device_id, facts, reason));
  if ((*facts)->compute_capability >= kOldestComputeCapability) return FLASHMOE_OK;
  return refuse_capability(device_id, **facts, "are 8.9 and newer", reason);
}

flashmoe_status check_hopper(int device_id, const DeviceFacts** facts, const Reason& reason) {
  constexpr int kHopper = 90;
  FLASHMOE_TRY(read_device_facts(device_id, facts, reason));
  if ((*facts)->compute_capability == kHopper) return FLASHMOE_OK;
  return refuse_capability(device_id, **facts, "is 9.0", reason);
}

void* driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return found;
  cudaGetLastError();
  return nullptr;
}

namespace {

// Whether the current context is that of the device. Takes half as long as asking the runtime.
bool is_current(int device_id) {
  using Function = decltype(&cuCtxGetDevice);
  static const auto device_of_context =
      reinterpret_cast<Function>(driver_function("cuCtxGetDevice"));
  CUdevice device = -1;
  return device_of_context != nullptr && device_of_context(&device) == CUDA_SUCCESS &&
         device == device_id;
}

// nullptr if no context is current.
CUcontext current_context() {
  using Function = decltype(&cuCtxGetCurrent);
  static const auto get = reinterpret_cast<Function>(driver_function("cuCtxGetCurrent"));
  CUcontext context = nullptr;
  return get != nullptr && get(&context) == CUDA_SUCCESS ? context : nullptr;
}

bool make_current(CUcontext context) {
  using Function = decltype(&cuCtxSetCurrent);
  static const auto set = reinterpret_cast<Function>(driver_function("cuCtxSetCurrent"));
  return context != nullptr && set != nullptr && set(context) == CUDA_SUCCESS;
}

}  // namespace

DeviceGuard::DeviceGuard(int device_id) : device_id_(device_id) {
  if (is_current(device_id)) return;
  int current = -1;
  error_ = cudaGetDevice(&current);
  if (error_ != cudaSuccess || current == device_id) return;
  previous_context_ = current_context();
  error_ = cudaSetDevice(device_id);
  if (error_ == cudaSuccess) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ < 0) return;
  // cudaSetDevice alone would replace a context that the caller has made, and might create another
  // one.
  if (!make_current(static_cast<CUcontext>(previous_context_))) cudaSetDevice(previous_);
}

flashmoe_status DeviceGuard::status() const {
  if (error_ == cudaSuccess) return FLASHMOE_OK;
  cudaGetLastError();
  return fail(FLASHMOE_ERROR_CUDA, "device: making cuda:%d current: %s", device_id_,
              cudaGetErrorString(error_));
}

int32_t cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device is an answer, not an error to leave behind
    return 0;
  }
  return count;
}

int32_t cuda_runtime_version() { return CUDART_VERSION; }

flashmoe_status cuda_device_info(int32_t device_id, flashmoe_device_info* info) {
  char reason[128];
  const DeviceFacts* facts = nullptr;
  const flashmoe_status status = read_device_facts(device_id, &facts, Reason(reason));
  if (status != FLASHMOE_OK) return fail(status, "device: %s", reason);
  if (is_gpu_model(device_id)) {
    describe_model(device_id, info);
  } else {
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device_id);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return fail(FLASHMOE_ERROR_CUDA, "device: cuda:%d: %s", device_id, cudaGetErrorString(error));
    }
    std::snprintf(info->name, sizeof info->name, "%s", properties.name);
    info->memory_bytes = properties.totalGlobalMem;
    cudaDriverGetVersion(&info->driver_version);
  }
  std::snprintf(info->isa, sizeof info->isa, "sm_%d", facts->compute_capability);
  std::snprintf(info->kernel_family, sizeof info->kernel_family, "%s",
                FLASHMOE_WITH_SM90 && facts->compute_capability == 90   ? "sm90"
                : facts->compute_capability >= kOldestComputeCapability ? "sm89"
                                                                        : "");
  info->compute_capability = facts->compute_capability;
  info->multiprocessors = facts->multiprocessors;
  info->shared_bytes_per_block = static_cast<uint64_t>(facts->shared_bytes_per_block);
  info->l2_bytes = static_cast<uint64_t>(facts->l2_bytes);
  return FLASHMOE_OK;
}

}  // namespace flashmoe
