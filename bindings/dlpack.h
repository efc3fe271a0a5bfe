// The part of the DLPack ABI (version 1.x) that these bindings use: a tensor view, its owning form,
// and the table of functions that a tensor type offers in its attribute
// `__dlpack_c_exchange_api__` (a capsule named "dlpack_exchange_api", DLPack 1.3).
//
// Names follow the standard so that it can be read beside this file; the layouts are the ABI.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe::dlpack {

inline constexpr uint32_t kMajorVersion = 1;

// A device type that flashmoe_device_type lacks: CUDA's managed memory.
inline constexpr int32_t kCudaManaged = 13;

// Flags of ManagedTensor.
inline constexpr uint64_t kReadOnly = 1;
inline constexpr uint64_t kIsCopied = 2;

// Type codes that flashmoe_dtype_code lacks.
inline constexpr uint8_t kInt = 0;
inline constexpr uint8_t kUInt = 1;

// DLTensor; flashmoe_tensor has its layout on purpose.
struct Tensor {
  void* data;
  flashmoe_device device;
  int32_t ndim;
  flashmoe_dtype dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim] in elements; nullptr = contiguous, before DLPack 1.2
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == sizeof(flashmoe_tensor));
static_assert(offsetof(Tensor, shape) == offsetof(flashmoe_tensor, shape));
static_assert(offsetof(Tensor, byte_offset) == offsetof(flashmoe_tensor, byte_offset));

struct Version {
  uint32_t major;
  uint32_t minor;
};

// DLManagedTensorVersioned: a tensor with the function that frees it.
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);  // may be nullptr
  uint64_t flags;
  Tensor tensor;
};

// Calls the deleter of a tensor, if both exist.
inline void give_back(ManagedTensor* tensor) {
  if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
}

// DLPackExchangeAPIHeader. `previous` leads to the table of an older major version, or is nullptr.
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};

// DLPackExchangeAPI. Functions return 0, or -1 with a Python exception set. None synchronises.
struct ExchangeApi {
  ExchangeHeader header;

  // New tensor of `prototype`'s shape, dtype and device. Reports failure through set_error.
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** object);  // takes ownership of tensor
  // A view that lives until control returns to the producer. May be nullptr.
  int (*view_of_object)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace flashmoe::dlpack
