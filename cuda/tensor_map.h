// Tensor maps, by which kernels' loads tell the copy engine what to walk.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;  // of a map

// Whether the driver can make maps.
bool has_tensor_maps();

// Extents, strides in elements and box of a tensor map, innermost dimension first, whose stride
// is 1. Of a dimension with stride 0, which a view repeats, the map holds one.
struct MapShape {
  int rank;
  int64_t extents[5];
  int64_t strides[5];
  int box[5];
};

// False if the driver refuses it.
bool encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape& shape);

// Gives a map, which is of the memory at *mapped, that at `data`. False if the driver refuses.
bool move_map(CUtensorMap* map, const void** mapped, const void* data);

// Makes a context for a thread that has not used CUDA yet: the runtime does so on demand, but the
// driver, which encodes maps, does not.
bool make_context(int device_id);

// Encodes the maps of one launch by encode(), which is false if the driver refuses one.
template <class Encode>
flashmoe_status encode_maps(const char* kernel, int device_id, const Encode& encode) {
  if (encode() || (make_context(device_id) && encode())) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_CUDA, "launching %s: the driver refused a tensor map", kernel);
}

}  // namespace flashmoe
