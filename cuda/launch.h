// What kernel families share on the host: properties of a compiled kernel, how to find, load and
// launch it, and how to read the launch back.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/status.h"
#include "cuda/runtime.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

struct Plan;  // core/plan.h; a change there recompiles no kernel

// The oldest PTX that has clusters and programmatic launches.
inline constexpr int kClusterPtx = 90;

struct Kernel;

// Callback of a family after a kernel's code has been loaded in a context of the device, which is
// current. One thread at a time calls it. `first` says that this is the first load on the device:
// the time to find out what the code can do there. Later other threads may read those facts, and
// the callback only repeats in the new context what it allowed the kernel in the first.
using AfterLoading = cudaError_t (*)(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                                     const cudaFuncAttributes& attributes, bool first);

// A kernel on one device. All zeros until it is loaded there.
struct LoadedKernel {
  std::atomic<int> arch;  // of the code, such as 90
  // Version of the PTX that the code was made from. It may differ from `arch`: on a newer chip the
  // code may be the chip's, but made from older PTX and without the features of newer PTX.
  std::atomic<int> ptx;
  std::atomic<int> static_shared_bytes;  // per block, in addition to what a launch asks for
  // A CUkernel, which the driver launches in whatever context is current. If it is nullptr, only
  // the runtime can launch the kernel.
  std::atomic<const void*> handle;
  // Ids of the contexts that loaded it last. Loaded code and its permissions disappear with their
  // context, but plans stay: after a reset by any copy of the runtime, a device has a context of
  // another id.
  static constexpr int kContexts = 4;
  std::atomic<uint64_t> contexts[kContexts];
  AfterLoading after;  // written before `arch`
};

// A compiled kernel. The constants here and in derived structs come from its Traits; plan and
// launch have no other source.
struct Kernel {
  const char* name;
  const void* function;  // for the runtime
  int shared_bytes;      // dynamic, per block: what launches may ask for
  LoadedKernel* loaded;  // [kMaxDevices]
};

// Loads a kernel's code on a device and allows its shared memory. *arch is the architecture of that
// code, such as 90. The first call per kernel and device is slow; later ones cost one load.
flashmoe_status load_kernel(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                            int* arch, const Reason& reason, AfterLoading after = nullptr);

// Whether the code of a loaded kernel has clusters and programmatic launches.
inline bool has_clusters(const Kernel& kernel, int device_id) {
  return kernel.loaded[device_id].ptx.load(std::memory_order_relaxed) >= kClusterPtx;
}

// Appends a launch of `blocks` blocks of a kernel to a plan. load_kernel has loaded the kernel on
// the device; `shared_bytes` are dynamic ones. The caller sets further dimensions of the grid,
// clusters and tiles. The first launch's code is the plan's; `suffix` is that of its architecture:
// "a" for sm_90a, or "".
flashmoe_launch& plan_launch(const Kernel& kernel, int device_id, const char* suffix,
                             int64_t blocks, int threads, int shared_bytes, Plan* plan);

// Launches launch `index` of a plan and records it. The plan's device is current. The kernel's one
// argument is copied. If the current context lacks the kernel, it is loaded first. If the code has
// programmatic launches, the kernel may begin before its predecessor has ended: every kernel here
// waits (cuda/ptx/pdl.cuh).
flashmoe_status launch_planned(const Plan& plan, int index, const void* params, void* stream);

// Launches all launches of a plan, in order, each with the same argument.
flashmoe_status launch_all(const Plan& plan, const void* params, void* stream);

}  // namespace flashmoe
