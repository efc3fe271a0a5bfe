// One instantiated short attention kernel, as the host sees it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/attention.h"
#include "cuda/attention/short/params.h"
#include "cuda/runtime.h"

namespace flashmoe::short_rows {

inline constexpr int kWarpChoices = 4;     // 1, 2, 4 and 8 warps
inline constexpr int kClusterChoices = 5;  // 1, 2, 4, 8 and 16 blocks

// What a kernel's loaded code can do on a device, read once.
struct Loaded {
  std::atomic<bool> ready;
  int arch;       // of the loaded code, such as 90
  bool clusters;  // compiled for an architecture that has them
  // Clusters that can run at a time, by log2 of a block's warps and of a cluster's blocks; 0: none.
  int resident[kWarpChoices][kClusterChoices];
};

// The constants are the kernel's Traits; the plan and the launch are filled from nowhere else.
struct Entry {
  const char* name;
  Dtype dtype;
  int dim;
  int dim_v;
  int rows;  // of a tile
  int step_keys;
  int (*shared_bytes)(int warps, int cluster);
  const void* function;
  Loaded* loaded;  // [kMaxDevices]
};

}  // namespace flashmoe::short_rows
