// Offsets of a product with a single expert that has all rows. The upper offset is huge: consumers
// clamp it to the existing rows.
#include <cstdint>

#include "core/backends.h"
#include "core/per_thread.h"
#include "cuda/runtime.h"

namespace flashmoe {

namespace {

__device__ const int32_t all_rows[2] = {0, INT32_MAX};

// The address that a thread found last, and its context.
struct Found {
  uint64_t context;
  const int32_t* offsets;
};

}  // namespace

flashmoe_status cuda_all_rows(int32_t device_id, const int32_t** offsets) {
  const DeviceGuard guard(device_id);
  FLASHMOE_TRY(guard.status());
  // The runtime searches its tables at every look-up, under locks.
  Found* const found = PerThread<Found>::get();
  const uint64_t context = current_context_id();
  if (found != nullptr && context != 0 && found->context == context) {
    *offsets = found->offsets;
    return FLASHMOE_OK;
  }
  void* address = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&address, all_rows);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(FLASHMOE_ERROR_CUDA, "finding the offsets of all rows on cuda:%d: %s", device_id,
                cudaGetErrorString(error));
  }
  *offsets = static_cast<const int32_t*>(address);
  if (found != nullptr) *found = {current_context_id(), *offsets};
  return FLASHMOE_OK;
}

}  // namespace flashmoe
