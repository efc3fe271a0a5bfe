#include "cuda/host/fake_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace fake {

State state;
thread_local Launch last;
thread_local std::vector<Map> maps;
thread_local std::vector<Move> moves;
thread_local cudaError_t last_error = cudaSuccess;
thread_local void (*on_launch)(const void*) = nullptr;

namespace {

constexpr intptr_t kStreams = 0x1000;
constexpr intptr_t kContexts = 0x2000;
constexpr intptr_t kOwnContexts = 0x3000;  // beside those of the runtime
constexpr intptr_t kHandles = intptr_t{1} << 40;

constexpr int kUnaskedSharedBytes = 48 << 10;

thread_local int current_device = 0;
thread_local bool has_context = false;
thread_local bool context_is_own = false;

// Ids of the runtime's contexts, 0: there is none; of the callers' own ones they are kOwnContexts
// and on.
std::atomic<unsigned long long> context_ids[2] = {};
std::atomic<unsigned long long> newest_context{0};
std::atomic<intptr_t> resets{0};
std::mutex mutex;
std::map<std::pair<unsigned long long, const void*>, int> allowed;  // by context and function

unsigned long long current_id() {
  if (!has_context) return 0;
  if (context_is_own) return static_cast<unsigned long long>(kOwnContexts + current_device);
  return context_ids[current_device];
}

// The runtime makes a context where there is none.
void use_context() {
  has_context = true;
  const std::lock_guard<std::mutex> lock(mutex);
  if (current_id() == 0) context_ids[current_device] = ++newest_context;
}

int allowed_bytes(const void* function) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allowed.find({current_id(), function});
  return found != allowed.end() ? found->second : kUnaskedSharedBytes;
}

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(kContexts + device); }

cudaError_t fails(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int device_of(CUstream stream) {
  const intptr_t handle = reinterpret_cast<intptr_t>(stream);
  return handle >= kStreams ? static_cast<int>(handle - kStreams) : current_device;
}

bool is_handle(const void* function) { return reinterpret_cast<intptr_t>(function) >= kHandles; }

const void* function_of(const void* handle) {
  return reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(handle) % kHandles);
}

void launched(const Launch& launch) {
  last = launch;
  if (on_launch != nullptr) on_launch(launch.params);
}

CUresult launch_by_driver(const CUlaunchConfig* config, CUfunction function, void** params,
                          void**) {
  ++state.tries_by_driver;
  if (current_id() == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (state.driver_launch != CUDA_SUCCESS) return state.driver_launch;
  if (function != handle_of(function_of(function))) {
    ++state.stale_launches;
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (static_cast<int>(config->sharedMemBytes) > allowed_bytes(function_of(function))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Launch launch;
  launch.by = By::kDriver;
  launch.device = device_of(config->hStream);  // a kernel's handle is of no device
  launch.kernel = function;
  launch.grid = dim3(config->gridDimX, config->gridDimY, config->gridDimZ);
  launch.block = dim3(config->blockDimX, config->blockDimY, config->blockDimZ);
  launch.shared_bytes = config->sharedMemBytes;
  launch.stream = config->hStream;
  launch.params = params[0];
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      if (attribute.value.clusterDim.y != 1 || attribute.value.clusterDim.z != 1) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      launch.cluster = attribute.value.clusterDim.x;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      launch.programmatic = attribute.value.programmaticStreamSerializationAllowed;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  launched(launch);
  return CUDA_SUCCESS;
}

CUresult context_of_stream(CUstream stream, CUcontext* context) {
  *context = context_of(device_of(stream));
  return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
  *context = !has_context     ? nullptr
             : context_is_own ? own_context_of(current_device)
                              : context_of(current_device);
  return CUDA_SUCCESS;
}

CUresult set_current_context(CUcontext context) {
  const intptr_t handle = reinterpret_cast<intptr_t>(context);
  context_is_own = handle >= kOwnContexts;
  current_device = static_cast<int>(handle - (context_is_own ? kOwnContexts : kContexts));
  has_context = true;
  return CUDA_SUCCESS;
}

CUresult device_of_context(CUdevice* device) {
  if (current_id() == 0) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current_device;
  return CUDA_SUCCESS;
}

CUresult id_of_context(CUcontext context, unsigned long long* id) {
  if (context != nullptr) return CUDA_ERROR_INVALID_VALUE;  // not asked for
  *id = current_id();
  return *id != 0 ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

constexpr uintptr_t kMapAlignment = 64;
constexpr uintptr_t kMappedAlignment = 16;

bool is_aligned(const void* data, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment == 0;
}

// What can be told of a map goes into its bytes, the address first: maps of one view are the same,
// as the driver's are, and one that was moved is the same as one that was encoded there.
void write_map(const Map& made, CUtensorMapDataType type, CUtensorMap* map) {
  cuuint64_t* word = map->opaque;
  *word++ = reinterpret_cast<uintptr_t>(made.data);
  *word++ = made.rank | static_cast<cuuint64_t>(type) << 32;
  word = std::copy(made.box.begin(), made.box.end(), word);
  word = std::copy(made.extents.begin(), made.extents.end(), word);
  std::copy(made.steps.begin(), made.steps.end(), word);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* extents, const cuuint64_t* steps, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (current_id() == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (maps.size() >= state.most_maps || rank < 1 || rank > 5 || !is_aligned(map, kMapAlignment) ||
      !is_aligned(data, kMappedAlignment)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Map made = {};
  made.rank = rank;
  std::copy_n(box, rank, made.box.begin());
  std::copy_n(extents, rank, made.extents.begin());
  std::copy_n(steps, rank - 1, made.steps.begin());
  made.data = data;
  maps.push_back(made);
  write_map(made, type, map);
  return CUDA_SUCCESS;
}

CUresult replace_address(CUtensorMap* map, void* data) {
  if (current_id() == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (state.refuse_moves || data == nullptr || !is_aligned(map, kMapAlignment) ||
      !is_aligned(data, kMappedAlignment)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  moves.push_back({map, mapped_by(*map), data});
  map->opaque[0] = reinterpret_cast<uintptr_t>(data);
  return CUDA_SUCCESS;
}

}  // namespace

CUstream stream_of(int device) { return reinterpret_cast<CUstream>(kStreams + device); }

CUcontext own_context_of(int device) { return reinterpret_cast<CUcontext>(kOwnContexts + device); }

void use_own_context(int device) { set_current_context(own_context_of(device)); }

void reset(int device) {
  context_ids[device] = 0;
  ++resets;
}

CUcontext context_in_use() {
  CUcontext context = nullptr;
  current_context(&context);
  return context;
}

const void* mapped_by(const CUtensorMap& map) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(map.opaque[0]));
}

void forget_context() {
  has_context = false;
  context_is_own = false;
  current_device = 0;
}

const void* handle_of(const void* function) {
  return reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(function) +
                                       (resets + 1) * kHandles);
}

}  // namespace fake

using namespace fake;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ++state.set_devices;
  if (state.set_device != cudaSuccess) return fails(state.set_device);
  if (device < 0 || device > 1) return fails(cudaErrorInvalidDevice);
  current_device = device;
  context_is_own = false;
  use_context();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = device == 0 ? 132 : 10; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 228 << 10;
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidResourceHandle ? "invalid resource handle" : "made-up error";
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return fails(cudaErrorNotSupported); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  use_context();
  const bool by_handle = is_handle(function);
  if (!by_handle) ++state.loads;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for others to come
  if (state.load != cudaSuccess) return fails(state.load);
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  attributes->numRegs = 168;
  attributes->sharedSizeBytes = kStaticSharedBytes;
  attributes->maxDynamicSharedSizeBytes = allowed_bytes(function_of(function));
  if (by_handle && !state.handles_share_attributes)
    attributes->maxDynamicSharedSizeBytes = kUnaskedSharedBytes;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  use_context();
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    state.allowed_shared_bytes[current_device] = value;
    const std::lock_guard<std::mutex> lock(mutex);
    allowed[{current_id(), function}] = value;
  } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    state.large_clusters_allowed[current_device] = value != 0;
  } else if (attribute != cudaFuncAttributePreferredSharedMemoryCarveout) {
    return fails(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 4;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*,
                                           const cudaLaunchConfig_t* config) {
  *count = 4 * 132 / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  use_context();
  ++state.symbol_lookups;
  if (state.symbol_lookup != cudaSuccess) return fails(state.symbol_lookup);
  *address = reinterpret_cast<void*>(static_cast<uintptr_t>(current_id() << 20));
  return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  if (!state.has_kernel_handles) return fails(cudaErrorInvalidDeviceFunction);
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(handle_of(function)));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** params) {
  use_context();
  if (state.runtime_launch != cudaSuccess) return fails(state.runtime_launch);
  if (device_of(config->stream) != current_device) return fails(cudaErrorInvalidResourceHandle);
  if (static_cast<int>(config->dynamicSmemBytes) > allowed_bytes(function)) {
    return fails(cudaErrorInvalidValue);
  }
  Launch launch;
  launch.by = By::kRuntime;
  launch.device = current_device;
  launch.kernel = function;
  launch.grid = config->gridDim;
  launch.block = config->blockDim;
  launch.shared_bytes = config->dynamicSmemBytes;
  launch.stream = config->stream;
  launch.params = params[0];
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = attribute.val.clusterDim.x;
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.programmatic = attribute.val.programmaticStreamSerializationAllowed;
    } else {
      return fails(cudaErrorInvalidValue);
    }
  }
  launched(launch);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  const struct {
    const char* name;
    void* function;
    bool found;
  } functions[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode), true},
      {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(&replace_address), state.has_map_moves},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(&launch_by_driver), state.has_driver},
      {"cuStreamGetCtx", reinterpret_cast<void*>(&context_of_stream), state.has_driver},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&current_context), state.has_driver},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&set_current_context), state.has_driver},
      {"cuCtxGetDevice", reinterpret_cast<void*>(&device_of_context), state.has_driver},
      {"cuCtxGetId", reinterpret_cast<void*>(&id_of_context), state.has_driver},
  };
  for (const auto& one : functions) {
    if (std::strcmp(name, one.name) != 0 || version != 12000) continue;
    if (!one.found) continue;
    *function = one.function;
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

}  // extern "C"
