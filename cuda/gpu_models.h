// What a driver would report about a GPU model (core/gpu_model.h) and about kernels loaded on it,
// for plans without a GPU and driver. Models have device ids above those of all devices.
#pragma once

#include "core/gpu_model.h"
#include "cuda/launch.h"

namespace flashmoe {

static_assert(kFirstGpuModel + kGpuModels <= kMaxDevices);

const DeviceFacts& facts_of_model(int device_id);

// Name and memory. Plans do not depend on these.
void describe_model(int device_id, flashmoe_device_info* info);

// Whether a kernel has code for a model, and what the driver would report about that code as far as
// plans depend on it: architecture, PTX, shared memory, and registers (close enough to count
// blocks).
bool read_code_for_model(const Kernel& kernel, int device_id, cudaFuncAttributes* attributes);

// Number of clusters that a model runs at a time; 0: none. A cluster has `cluster` blocks, each of
// so many threads and so much dynamic shared memory.
int resident_on_model(int device_id, const cudaFuncAttributes& attributes, int threads,
                      int shared_bytes, int cluster);

}  // namespace flashmoe
