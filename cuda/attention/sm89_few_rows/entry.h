// One instantiated few-row attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"
#include "cuda/attention/sm89_few_rows/params.h"

namespace flashmoe::sm89_few_rows {

inline constexpr int kWarpChoices = 4;     // 1, 2, 4 and 8 warps
inline constexpr int kClusterChoices = 5;  // 1, 2, 4, 8 and 16 blocks

// What a kernel's loaded code can do on a device.
struct Abilities {
  bool clusters;  // compiled for an architecture that has clusters
  // Clusters that can run at a time, by log2 of the warps per block and of the blocks per cluster;
  // 0: none.
  int resident[kWarpChoices][kClusterChoices];
};

struct Entry : Kernel {
  Dtype dtype;
  int dim;
  int dim_v;
  int rows;  // rows per tile
  int step_keys;
  int (*shared_bytes_of)(int warps, int cluster);  // dynamic, per block
  Abilities* abilities;                            // [kMaxDevices]
  int part_bytes;                                  // in the workspace, per block that leaves a part
  Kernel combine;                                  // the second kernel
};

}  // namespace flashmoe::sm89_few_rows
