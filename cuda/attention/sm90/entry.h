// One instantiated sm_90 attention kernel, as the host sees it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/attention.h"
#include "cuda/runtime.h"

namespace flashmoe::sm90 {

// The constants are the kernel's Traits; the plan and the launch are filled from nowhere else.
struct Entry {
  const char* name;
  Dtype dtype;
  int dim;
  int dim_v;
  bool capped;  // for logits with a softcap, and for no others
  int tile_q;
  int tile_k;
  int box_rows;  // of a box of Q and of the output
  int stages;
  int threads;
  int shared_bytes;
  const void* function;
  std::atomic<bool>* prepared;  // per device, [kMaxDevices]
};

}  // namespace flashmoe::sm90
