// What a driver would tell of a model of GPUs (core/gpu_model.h) and of kernels loaded on one, for
// plans where there is neither. In device ids, models stand behind all devices.
#pragma once

#include "core/gpu_model.h"
#include "cuda/launch.h"

namespace flashmoe {

static_assert(kFirstGpuModel + kGpuModels <= kMaxDevices);

const DeviceFacts& facts_of_model(int device_id);

// Name and memory, which plans do not depend on.
void describe_model(int device_id, flashmoe_device_info* info);

// Whether a kernel has code for a model, and what the driver would read from it as far as plans
// depend on that: architecture, PTX, shared memory, and registers closely enough to count blocks.
bool read_code_for_model(const Kernel& kernel, int device_id, cudaFuncAttributes* attributes);

// Clusters of `cluster` blocks, each of so many threads and so much dynamic shared memory, that a
// model runs at a time; 0: none.
int resident_on_model(int device_id, const cudaFuncAttributes& attributes, int threads,
                      int shared_bytes, int cluster);

}  // namespace flashmoe
