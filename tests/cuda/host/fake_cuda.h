// A CUDA runtime and driver without a device, for the host side of the kernel families: two devices
// of compute capability 9.0, what was asked of them, and failures on demand. Threads have a current
// device and, after their first use of the runtime, a current context, as CUDA's have.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <vector>

namespace fake {

inline constexpr int kStaticSharedBytes = 16;  // of a block of every kernel

enum class By { kNobody, kDriver, kRuntime };

struct Launch {
  By by = By::kNobody;
  int device = -1;
  const void* kernel = nullptr;  // the function or its handle
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  void* stream = nullptr;
  const void* params = nullptr;  // as it was given, valid during the launch only
  unsigned cluster = 0;          // of the attribute; 0: none
  int programmatic = -1;         // of the attribute; -1: none
};

struct Map {
  cuuint32_t rank;  // beyond it there are zeros
  std::array<cuuint32_t, 5> box;
  std::array<cuuint64_t, 5> extents;
  std::array<cuuint64_t, 4> steps;
  const void* data;
};

// A move of a map to other memory.
struct Move {
  const CUtensorMap* map;
  const void* from;
  const void* to;
};

struct State {
  // What is asked of it.
  bool has_driver = true;                // its entry points are found
  bool has_map_moves = true;             // cuTensorMapReplaceAddress among them
  bool has_kernel_handles = true;        // cudaGetKernel works
  bool handles_share_attributes = true;  // what a function is allowed, its handle is too
  std::atomic<CUresult> driver_launch{CUDA_SUCCESS};  // what a launch by the driver returns
  std::atomic<cudaError_t> runtime_launch{cudaSuccess};
  std::atomic<cudaError_t> load{cudaSuccess};  // what cudaFuncGetAttributes returns
  std::atomic<cudaError_t> set_device{cudaSuccess};
  std::atomic<cudaError_t> symbol_lookup{cudaSuccess};
  std::atomic<size_t> most_maps{SIZE_MAX};  // in `maps`, beyond which none is encoded
  std::atomic<bool> refuse_moves{false};    // of maps to another address

  // What was asked for.
  std::atomic<int> loads{0};
  std::atomic<int> stale_launches{0};             // by handles of before a reset
  std::atomic<int> allowed_shared_bytes[2] = {};  // last, by device
  std::atomic<bool> large_clusters_allowed[2] = {};
  std::atomic<int> set_devices{0};
  std::atomic<int> symbol_lookups{0};
  std::atomic<int> tries_by_driver{0};
};

extern State state;
extern thread_local Launch last;              // that succeeded, of this thread
extern thread_local std::vector<Map> maps;    // encoded by this thread
extern thread_local std::vector<Move> moves;  // made by this thread
extern thread_local cudaError_t last_error;
extern thread_local void (*on_launch)(const void* params);

// A handle of a stream that belongs to a device.
CUstream stream_of(int device);

// Makes the thread as one that has not used CUDA yet.
void forget_context();

// A context that the caller has made, beside the one that the runtime keeps of the device.
CUcontext own_context_of(int device);
void use_own_context(int device);

// The runtime's context of a device goes, and with it what kernels were allowed in it, and their
// handles. Until the runtime is used again there is none.
void reset(int device);

// The thread's current one.
CUcontext context_in_use();

// What a map is of.
const void* mapped_by(const CUtensorMap& map);

// The handle of a runtime's function, since the last reset.
const void* handle_of(const void* function);

}  // namespace fake
