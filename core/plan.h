// The plan of a call, the same for every operation, and the kernel families that make plans.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <type_traits>

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// Workspaces of the CPU, of which every thread has a part of its own. The number of threads may
// change between a query and the call that it was for, so what a query told stays enough: a call
// uses as many threads as its workspace has room for. Zeros: a call cannot make do with less than
// was planned.
struct ThreadRoom {
  uint64_t least;  // bytes for a call by one thread; no query tells less, by any number of threads
  uint64_t per_thread;  // for each further thread
};

// What a family prepares once for every call of a plan, such as a kernel's parameters but for
// addresses. It lies beside a plan that is kept, and is the family's own.
struct PlanDetail {
  static constexpr size_t kBytes = 8192;

  bool ready;  // a family's launch has filled it
  alignas(128) unsigned char bytes[kBytes];
};

// Launches of a plan that are another family's, planned by it for a part of the problem.
struct PlanPart {
  const void* family;  // of the same operation
  int32_t first;       // launch
  int32_t count;
};

// What a call of a family's `launch` is told where another family's kernel runs beside its own.
struct Beside {
  void* division;  // in the workspace: who has which multiprocessors; nullptr: it runs alone
  int32_t first;   // launches of the plan that the call is for
  int32_t end;     // 0: all
};

// How a backend computes a problem. `info` is what the caller may read.
struct Plan {
  static constexpr int kMaxParts = 4;

  flashmoe_plan info;
  PlanPart parts[kMaxParts];                   // of a family that divides calls among others
  const void* entries[FLASHMOE_MAX_LAUNCHES];  // the backend's kernel of each launch
  ThreadRoom room;                             // CPU
  PlanDetail* detail;                          // nullptr: this plan is not kept
  int64_t chunk[2];  // of a family that computes in chunks: its extents of one
  // Of a family whose kernels can run beside another's: bytes of the division. Else 0.
  int64_t division_bytes;
  Beside beside;  // of a call

  // Appends a launch of grid[0] blocks of block[0] threads. Families fill the rest.
  flashmoe_launch& add_launch(const char* kernel, const void* entry, flashmoe_device device,
                              uint32_t blocks, uint32_t threads) {
    entries[info.launch_count] = entry;
    flashmoe_launch& launch = info.launches[info.launch_count++];
    std::snprintf(launch.kernel, sizeof launch.kernel, "%s", kernel);
    launch.device = device;
    launch.grid[0] = blocks;
    launch.block[0] = threads;
    launch.grid[1] = launch.grid[2] = launch.block[1] = launch.block[2] = 1;
    return launch;
  }

  // Appends launches of a plan that `family` made of a part, from `first` to `end`, as part
  // `index`.
  void add_part(int index, const void* family, const Plan& plan, int32_t first, int32_t end) {
    parts[index] = {family, info.launch_count, end - first};
    for (int32_t i = first; i < end; ++i) {
      entries[info.launch_count] = plan.entries[i];
      info.launches[info.launch_count++] = plan.info.launches[i];
    }
  }

  // Appends the launches of a part to a plan, as its family made them.
  void copy_part(int index, Plan* plan) const {
    const PlanPart& part = parts[index];
    for (int32_t i = part.first; i < part.first + part.count; ++i) {
      plan->entries[plan->info.launch_count] = entries[i];
      plan->info.launches[plan->info.launch_count++] = info.launches[i];
    }
  }

  void set_isa(const char* isa) { std::snprintf(info.isa, sizeof info.isa, "%s", isa); }

  // Has the CPU make do with a workspace that is smaller than planned, if one thread can.
  void fit_threads(uint64_t workspace_bytes) {
    if (room.least == 0 || workspace_bytes < room.least ||
        workspace_bytes >= info.workspace_bytes) {
      return;
    }
    const uint64_t further =
        std::min<uint64_t>((workspace_bytes - room.least) / room.per_thread, UINT32_MAX - 1);
    for (int32_t i = 0; i < info.launch_count; ++i) {
      uint32_t& threads = info.launches[i].block[0];
      threads = std::min(threads, static_cast<uint32_t>(1 + further));
    }
    info.workspace_bytes = workspace_bytes;
  }
};

// A family's preparations for a plan. They lie beside the plan if that is kept, else here.
template <class T>
class Prepared {
 public:
  explicit Prepared(PlanDetail* detail) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= PlanDetail::kBytes &&
                  alignof(T) <= 128);
    kept_ = detail;
    value_ = detail != nullptr ? reinterpret_cast<T*>(detail->bytes) : &local_;
  }

  bool ready() const { return kept_ != nullptr && kept_->ready; }
  void set_ready(bool ready) {
    if (kept_ != nullptr) kept_->ready = ready;
  }
  T& operator*() { return *value_; }
  T* operator->() { return value_; }

 private:
  PlanDetail* kept_;
  T* value_;
  T local_;
};

// A kernel family of one operation. `plan` fills a zeroed plan, with an estimate of its time: core
// takes the family with the smallest. A family refuses only what it cannot compute, by
// reason.refuse(status, sentence), and without touching the last error. On a GPU a plan depends on
// nothing but the device and what is in the problem beside addresses, so that it can be kept for
// the next such call (core/plan_cache.h). `launch` may prepare what is kept with the plan.
//
// A family may have schedules of its kernels, among which its plan chooses. A call may ask for one
// by name: the plan sees it in the problem's `kernel`.
template <class Problem>
struct Family {
  const char* name;
  int32_t device_type;  // flashmoe_device_type it computes on; `plan` sees no other
  flashmoe_status (*plan)(const Problem& problem, Plan* plan, const Reason& reason);
  flashmoe_status (*launch)(const Problem& problem, const Plan& plan, void* workspace,
                            void* stream);
  const char* schedules = "";  // their names, apart by spaces
};

}  // namespace flashmoe
