// One instantiated sm_89 attention kernel, as the host sees it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/attention.h"
#include "cuda/runtime.h"

namespace flashmoe::sm89 {

// The constants are the kernel's Traits; the plan and the launch are filled from nowhere else.
struct Entry {
  const char* name;
  Dtype dtype;
  int dim;
  int dim_v;
  int tile_q;
  int tile_k;
  int stages;
  int threads;
  int shared_bytes;
  int blocks_per_sm;  // that it is designed to run with
  const void* function;
  // Per device: 0 = not prepared, else the architecture of the loaded code, such as 90.
  std::atomic<int>* loaded_arch;  // [kMaxDevices]
};

}  // namespace flashmoe::sm89
