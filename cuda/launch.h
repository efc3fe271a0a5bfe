// What the kernel families share on the host: what is known of a compiled kernel, how it is found,
// loaded and launched, and how the launch is read back.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/status.h"
#include "cuda/runtime.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

struct Plan;  // core/plan.h, which no kernel is compiled anew for

// The oldest PTX that has clusters and programmatic launches.
inline constexpr int kClusterPtx = 90;

struct Kernel;

// What a family does with a kernel when its code has been loaded in a context of the device, which
// is current; one thread at a time. `first`: on the device, which is when to find out what the code
// can do there. Else others may read that, and what is to do is to allow the kernel in another
// context what it was allowed in the first.
using AfterLoading = cudaError_t (*)(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                                     const cudaFuncAttributes& attributes, bool first);

// A kernel on one device. Zeros until it is loaded there.
struct LoadedKernel {
  std::atomic<int> arch;  // of the code, such as 90
  // Of the PTX that the code was made from. Not the same: on a newer chip the code may be the
  // chip's, made from older PTX and without what newer PTX has.
  std::atomic<int> ptx;
  std::atomic<int> static_shared_bytes;  // of a block, beside what a launch asks for
  // A CUkernel, which the driver launches in whatever context is current; or nullptr, and then only
  // the runtime can launch it.
  std::atomic<const void*> handle;
  // Ids of the contexts in which it was loaded last. What was loaded in a context, and allowed
  // there, is gone with it, while plans stay: a device that is reset, by any copy of the runtime,
  // has a context of another id.
  static constexpr int kContexts = 4;
  std::atomic<uint64_t> contexts[kContexts];
  AfterLoading after;  // written before `arch`
};

// A compiled kernel. The constants here and in what derives from it are those of its Traits; plan
// and launch are filled from nowhere else.
struct Kernel {
  const char* name;
  const void* function;  // for the runtime
  int shared_bytes;      // dynamic, of a block: what launches may ask for
  LoadedKernel* loaded;  // [kMaxDevices]
};

// Loads a kernel's code on a device and allows its shared memory; *arch is the architecture of that
// code, such as 90. The first call per kernel and device costs, the others are one load.
flashmoe_status load_kernel(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                            int* arch, const Reason& reason, AfterLoading after = nullptr);

// Whether the code of a kernel that is loaded on a device has clusters and programmatic launches.
inline bool has_clusters(const Kernel& kernel, int device_id) {
  return kernel.loaded[device_id].ptx.load(std::memory_order_relaxed) >= kClusterPtx;
}

// Appends a launch of `blocks` blocks of a kernel, which load_kernel has loaded on the device, to a
// plan; `shared_bytes` are dynamic ones. More dimensions of the grid, a cluster and tiles are the
// caller's to say. The first launch's code is the plan's; `suffix` is that of its architecture: "a"
// for sm_90a, or "".
flashmoe_launch& plan_launch(const Kernel& kernel, int device_id, const char* suffix,
                             int64_t blocks, int threads, int shared_bytes, Plan* plan);

// Launches launch `index` of a plan with its kernel's one argument, which is copied, on the plan's
// device, which is current, and records it. In a context that the kernel was not loaded in it is
// before. Where the code has programmatic launches it may begin before what is ahead of it has
// ended: every kernel here waits (cuda/ptx/pdl.cuh).
flashmoe_status launch_planned(const Plan& plan, int index, const void* params, void* stream);

// Launches all launches of a plan, in order, each with the same argument.
flashmoe_status launch_all(const Plan& plan, const void* params, void* stream);

}  // namespace flashmoe
