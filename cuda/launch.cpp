#include "cuda/launch.h"

#include <cuda.h>

#include <cstdio>
#include <mutex>

#include "core/launch.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/gpu_models.h"

namespace flashmoe {
namespace {

// How a kernel is launched.
struct LaunchShape {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t shared_bytes;  // dynamic, per block
  int32_t cluster;        // blocks per cluster, along x; 0 or 1: no clusters
  bool programmatic;      // the kernel may begin before its predecessor in the stream has ended
};

// The driver's launch function, which skips the runtime's look-ups, and the queries that it needs
// first.
struct Driver {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuStreamGetCtx) context_of_stream;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuCtxGetId) context_id;
};

template <class Function>
Function find(const char* name) {
  return reinterpret_cast<Function>(driver_function(name));
}

// nullptr if a function is missing.
const Driver* driver() {
  static const Driver found = {
      find<decltype(Driver::launch)>("cuLaunchKernelEx"),
      find<decltype(Driver::context_of_stream)>("cuStreamGetCtx"),
      find<decltype(Driver::current_context)>("cuCtxGetCurrent"),
      find<decltype(Driver::context_id)>("cuCtxGetId"),
  };
  static const bool complete = found.launch != nullptr && found.context_of_stream != nullptr &&
                               found.current_context != nullptr && found.context_id != nullptr;
  return complete ? &found : nullptr;
}

// The handle by which the driver may launch a kernel on the current device. It is nullptr unless
// the handle has every permission that the runtime's function has.
const void* driver_handle(const Kernel& kernel) {
  cudaKernel_t handle = nullptr;
  cudaFuncAttributes of_function = {};
  cudaFuncAttributes of_handle = {};
  if (driver() != nullptr && cudaGetKernel(&handle, kernel.function) == cudaSuccess &&
      cudaFuncGetAttributes(&of_function, kernel.function) == cudaSuccess &&
      cudaFuncGetAttributes(&of_handle, handle) == cudaSuccess &&
      of_handle.maxDynamicSharedSizeBytes == of_function.maxDynamicSharedSizeBytes &&
      of_handle.nonPortableClusterSizeAllowed == of_function.nonPortableClusterSizeAllowed) {
    return handle;
  }
  cudaGetLastError();
  return nullptr;
}

// Without this check the driver would launch a kernel on another device if the stream is of that
// device.
bool is_of_current_context(const Driver& driver, CUstream stream) {
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
    return true;
  CUcontext of_stream = nullptr;
  CUcontext current = nullptr;
  return driver.context_of_stream(stream, &of_stream) == CUDA_SUCCESS &&
         driver.current_context(&current) == CUDA_SUCCESS && of_stream == current;
}

// False if the driver must not launch the kernel, or fails to. Nothing has been launched then.
bool launch_by_driver(const void* handle, const LaunchShape& shape, void** arguments,
                      void* stream) {
  const Driver* const driver = flashmoe::driver();
  if (handle == nullptr || driver == nullptr ||
      !is_of_current_context(*driver, static_cast<CUstream>(stream))) {
    return false;
  }
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {};
  if (shape.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  }
  if (shape.programmatic) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDimX = shape.grid[0];
  config.gridDimY = shape.grid[1];
  config.gridDimZ = shape.grid[2];
  config.blockDimX = shape.block[0];
  config.blockDimY = shape.block[1];
  config.blockDimZ = shape.block[2];
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  return driver->launch(&config, static_cast<CUfunction>(const_cast<void*>(handle)), arguments,
                        nullptr) == CUDA_SUCCESS;
}

cudaError_t launch_by_runtime(const void* function, const LaunchShape& shape, void** arguments,
                              void* stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (shape.programmatic) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = dim3(shape.grid[0], shape.grid[1], shape.grid[2]);
  config.blockDim = dim3(shape.block[0], shape.block[1], shape.block[2]);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  return cudaLaunchKernelExC(&config, function, arguments);
}

flashmoe_status read_launch(const LaunchRecord& record, flashmoe_launch* launch) {
  const DeviceGuard guard(record.info.device.device_id);
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, record.function);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(FLASHMOE_ERROR_CUDA, "launch: reading %s back: %s", record.info.kernel,
                cudaGetErrorString(error));
  }
  launch->shared_bytes += attributes.sharedSizeBytes;  // plus the dynamic ones
  launch->registers = attributes.numRegs;
  launch->local_bytes = static_cast<int32_t>(attributes.localSizeBytes);
  launch->binary_arch = attributes.binaryVersion;
  return FLASHMOE_OK;
}

// One thread at a time loads kernels.
std::mutex loading;

bool is_loaded_in(const LoadedKernel& loaded, uint64_t context) {
  for (const auto& known : loaded.contexts) {
    if (known.load(std::memory_order_acquire) == context) return true;
  }
  return false;
}

// Marks the kernel as loaded.
void publish(const cudaFuncAttributes& attributes, LoadedKernel* loaded) {
  loaded->ptx.store(attributes.ptxVersion, std::memory_order_relaxed);
  loaded->static_shared_bytes.store(static_cast<int>(attributes.sharedSizeBytes),
                                    std::memory_order_relaxed);
  loaded->arch.store(attributes.binaryVersion, std::memory_order_release);
}

// Loads a kernel in the current context, or in the one that the runtime creates if there is none.
cudaError_t load_here(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                      AfterLoading after) {
  LoadedKernel& loaded = kernel.loaded[device_id];
  const bool first = loaded.arch.load(std::memory_order_relaxed) == 0;
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kernel.shared_bytes);
  if (error != cudaSuccess) return error;
  if (after != nullptr) error = after(kernel, device_id, facts, attributes, first);
  if (error != cudaSuccess) return error;
  loaded.handle.store(driver_handle(kernel), std::memory_order_relaxed);
  const uint64_t context = current_context_id();
  if (context != 0 && !is_loaded_in(loaded, context)) {
    // The newest comes first. The oldest is dropped.
    for (int i = LoadedKernel::kContexts - 1; i > 0; --i) {
      loaded.contexts[i].store(loaded.contexts[i - 1].load(std::memory_order_relaxed),
                               std::memory_order_release);
    }
    loaded.contexts[0].store(context, std::memory_order_release);
  }
  if (first) {
    loaded.after = after;
    publish(attributes, &loaded);
  }
  return cudaSuccess;
}

// Reads the properties of a kernel's code. Nothing is loaded.
cudaError_t load_for_model(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                           AfterLoading after) {
  cudaFuncAttributes attributes = {};
  if (!read_code_for_model(kernel, device_id, &attributes)) return cudaErrorNoKernelImageForDevice;
  const cudaError_t error =
      after != nullptr ? after(kernel, device_id, facts, attributes, true) : cudaSuccess;
  if (error == cudaSuccess) publish(attributes, &kernel.loaded[device_id]);
  return error;
}

// Loads a planned kernel in the current context if it is missing there.
cudaError_t load_where_missing(const Kernel& kernel, int device_id) {
  if (driver() == nullptr) return cudaSuccess;  // contexts cannot be told apart
  const LoadedKernel& loaded = kernel.loaded[device_id];
  uint64_t context = current_context_id();
  if (context != 0 && is_loaded_in(loaded, context)) return cudaSuccess;
  if (context == 0) {
    // A new thread has no context yet. A thread whose device was reset has one that no longer
    // exists.
    const cudaError_t error = cudaSetDevice(device_id);
    if (error != cudaSuccess) return error;
    context = current_context_id();
    if (context != 0 && is_loaded_in(loaded, context)) return cudaSuccess;
  }
  const DeviceFacts* facts = nullptr;
  if (read_device_facts(device_id, &facts, Reason()) != FLASHMOE_OK) return cudaErrorInvalidDevice;
  const std::lock_guard<std::mutex> lock(loading);
  if (context != 0 && is_loaded_in(loaded, context)) return cudaSuccess;  // by another thread
  return load_here(kernel, device_id, *facts, loaded.after);
}

flashmoe_status fail_to_launch(const Kernel& kernel, cudaError_t error) {
  cudaGetLastError();
  return fail(FLASHMOE_ERROR_CUDA, "launching %s: %s", kernel.name, cudaGetErrorString(error));
}

}  // namespace

uint64_t current_context_id() {
  const Driver* const driver = flashmoe::driver();
  unsigned long long id = 0;
  return driver != nullptr && driver->context_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

flashmoe_status load_kernel(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                            int* arch, const Reason& reason, AfterLoading after) {
  const LoadedKernel& loaded = kernel.loaded[device_id];
  *arch = loaded.arch.load(std::memory_order_acquire);
  if (*arch != 0) return FLASHMOE_OK;
  const std::lock_guard<std::mutex> lock(loading);
  *arch = loaded.arch.load(std::memory_order_relaxed);
  if (*arch != 0) return FLASHMOE_OK;
  cudaError_t error = cudaSuccess;
  if (is_gpu_model(device_id)) {
    error = load_for_model(kernel, device_id, facts, after);
  } else {
    const DeviceGuard guard(device_id);
    error = guard.error();
    if (error == cudaSuccess) error = load_here(kernel, device_id, facts, after);
  }
  if (error == cudaSuccess) {
    *arch = loaded.arch.load(std::memory_order_relaxed);
    return FLASHMOE_OK;
  }
  cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    return reason.refuse(
        FLASHMOE_ERROR_ARCH_NOT_BUILT,
        "no code for compute capability %d.%d of %s is built in (built in: %s); rebuild with "
        "CMAKE_CUDA_ARCHITECTURES naming it",
        facts.compute_capability / 10, facts.compute_capability % 10,
        DeviceName::cuda(device_id).text, FLASHMOE_CUDA_ARCHITECTURES);
  }
  return reason.refuse(FLASHMOE_ERROR_CUDA, "loading %s on cuda:%d: %s", kernel.name, device_id,
                       cudaGetErrorString(error));
}

flashmoe_launch& plan_launch(const Kernel& kernel, int device_id, const char* suffix,
                             int64_t blocks, int threads, int shared_bytes, Plan* plan) {
  const LoadedKernel& loaded = kernel.loaded[device_id];
  if (plan->info.launch_count == 0) {
    std::snprintf(plan->info.isa, sizeof plan->info.isa, "sm_%d%s",
                  loaded.arch.load(std::memory_order_relaxed), suffix);
  }
  flashmoe_launch& launch =
      plan->add_launch(kernel.name, &kernel, {FLASHMOE_DEVICE_CUDA, device_id},
                       static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads));
  launch.shared_bytes = static_cast<uint64_t>(
      shared_bytes + loaded.static_shared_bytes.load(std::memory_order_relaxed));
  return launch;
}

flashmoe_status launch_planned(const Plan& plan, int index, const void* params, void* stream) {
  const Kernel& kernel = *static_cast<const Kernel*>(plan.entries[index]);
  const flashmoe_launch& planned = plan.info.launches[index];
  const int device_id = planned.device.device_id;
  cudaError_t error = load_where_missing(kernel, device_id);
  if (error != cudaSuccess) return fail_to_launch(kernel, error);
  const LoadedKernel& loaded = kernel.loaded[device_id];
  const LaunchShape shape = {
      {planned.grid[0], planned.grid[1], planned.grid[2]},
      {planned.block[0], planned.block[1], planned.block[2]},
      planned.shared_bytes -
          static_cast<uint64_t>(loaded.static_shared_bytes.load(std::memory_order_relaxed)),
      planned.cluster,
      has_clusters(kernel, device_id)};
  void* arguments[] = {const_cast<void*>(params)};
  const void* handle = loaded.handle.load(std::memory_order_relaxed);
  // If the driver refuses, the runtime launches, or refuses in its own words.
  if (!launch_by_driver(handle, shape, arguments, stream)) {
    error = launch_by_runtime(kernel.function, shape, arguments, stream);
    if (error != cudaSuccess) return fail_to_launch(kernel, error);
  }
  LaunchRecord record = {planned, kernel.function, &read_launch, index};
  record.info.shared_bytes = shape.shared_bytes;
  record_launch(record);
  return FLASHMOE_OK;
}

flashmoe_status launch_all(const Plan& plan, const void* params, void* stream) {
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    FLASHMOE_TRY(launch_planned(plan, i, params, stream));
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe
