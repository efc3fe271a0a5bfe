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

// The CPU workspace, in which every thread has its own part. The number of threads may change
// between a query and its call. The queried size stays enough, since a call uses as many threads as
// its workspace has room for. Zeros: a call needs all that was planned.
struct ThreadRoom {
  uint64_t least;       // bytes for a call by one thread; no query returns less, for any number of
                        // threads
  uint64_t per_thread;  // for each further thread
};

// What a family prepares once for every call of a plan, such as a kernel's parameters except
// addresses. It lies next to a kept plan and belongs to the family.
struct PlanDetail {
  static constexpr size_t kBytes = 8192;

  bool ready;  // a family's launch has filled it
  alignas(128) unsigned char bytes[kBytes];
};

// Launches of a plan that another family planned, for a part of the problem.
struct PlanPart {
  const void* family;  // of the same operation
  int32_t first;       // launch
  int32_t count;
};

// What a family's `launch` is told if another family's kernel runs concurrently.
struct Beside {
  void* division;  // in the workspace: the multiprocessors of each; nullptr: it runs alone
  int32_t first;   // the plan's launches [first, end) are for this call
  int32_t end;     // 0: all
};

// How a backend computes a problem. `info` is what the caller may read.
struct Plan {
  static constexpr int kMaxParts = 4;

  flashmoe_plan info;
  PlanPart parts[kMaxParts];                   // for a family that divides calls among others
  const void* entries[FLASHMOE_MAX_LAUNCHES];  // the backend's kernel of each launch
  ThreadRoom room;                             // CPU
  PlanDetail* detail;                          // nullptr: this plan is not kept
  int64_t chunk[2];  // for a family that computes in chunks: extents of a chunk
  // For a family whose kernels can run beside another's: bytes of the division; else 0.
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

  // Appends the launches of a part to a plan, as its family planned them.
  void copy_part(int index, Plan* plan) const {
    const PlanPart& part = parts[index];
    for (int32_t i = part.first; i < part.first + part.count; ++i) {
      plan->entries[plan->info.launch_count] = entries[i];
      plan->info.launches[plan->info.launch_count++] = info.launches[i];
    }
  }

  void set_isa(const char* isa) { std::snprintf(info.isa, sizeof info.isa, "%s", isa); }

  // Fits the CPU's threads to a workspace smaller than planned, if it has room for one.
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

// A family's preparations for a plan. They lie next to a kept plan, else here.
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

// A kernel family of one operation. `plan` fills a zeroed plan, including an estimate of its time;
// core takes the family with the smallest. A family refuses only what it cannot compute, with
// reason.refuse(status, sentence), and does not touch the last error. On a GPU a plan depends only
// on the device and on the problem without its addresses, so that it can be kept for the next such
// call (core/plan_cache.h). `launch` may prepare what is kept with the plan.
//
// A family may have several schedules, among which its plan chooses. A call may name one: the plan
// sees it in the problem's `kernel`.
template <class Problem>
struct Family {
  const char* name;
  int32_t device_type;  // the flashmoe_device_type it computes on; `plan` sees no other
  flashmoe_status (*plan)(const Problem& problem, Plan* plan, const Reason& reason);
  flashmoe_status (*launch)(const Problem& problem, const Plan& plan, void* workspace,
                            void* stream);
  const char* schedules = "";  // their names, separated by spaces
};

}  // namespace flashmoe
