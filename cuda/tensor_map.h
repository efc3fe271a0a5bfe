// Tensor maps, which tell the copy engine how to walk a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;  // per stride of a map

// Checks that the driver can make maps, or that the plan is for a GPU model.
flashmoe_status check_tensor_maps(int device_id, const Reason& reason);

// Extents, strides in elements and box of a tensor map, innermost dimension first. The innermost
// stride is 1. A dimension with stride 0, which a view repeats, has extent 1 in the map.
struct MapShape {
  int rank;
  int64_t extents[5];
  int64_t strides[5];
  int box[5];
};

// False if the driver refuses it.
bool encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape& shape);

// Moves a map from the memory at *mapped to that at `data`. False if the driver refuses.
bool move_map(CUtensorMap* map, const void** mapped, const void* data);

// Creates a context for a thread that has not used CUDA yet. The runtime does so on demand, but the
// driver, which encodes maps, does not.
bool make_context(int device_id);

// Encodes the maps of one launch by encode(), which returns false if the driver refuses one.
template <class Encode>
flashmoe_status encode_maps(const char* kernel, int device_id, const Encode& encode) {
  if (encode() || (make_context(device_id) && encode())) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_CUDA, "launching %s: the driver refused a tensor map", kernel);
}

}  // namespace flashmoe
