// The part of XLA's foreign function interface (C API version 0.1) that a handler needs: what XLA
// passes to it, and the functions of XLA's table that it calls.
//
// XLA runs handlers of version 0.1 in every later release of major version 0, whose structs only
// grow at the end. A struct that XLA reads carries the size written here. Layouts are the ABI:
// tests/python/test_xla_ffi_abi.py compares them with the headers that jaxlib ships.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashmoe::xla {

inline constexpr int kApiMajor = 0;
inline constexpr int kApiMinor = 1;

// Every struct of the interface begins with these two. The only extension used is the metadata
// query.
struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
inline constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

enum ErrorCode : int32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
};

// Element types; the numbers are xla::PrimitiveType's.
enum DataType : int32_t {
  kPred = 1,
  kInt32 = 4,
  kInt64 = 5,
  kUInt8 = 6,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kBFloat16 = 16,
  kFloat8E4M3Fn = 20,
};

struct Error;             // opaque
struct ExecutionContext;  // opaque

// An argument or result: dense and row-major.
struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int32_t dtype;  // DataType
  void* data;
  int64_t rank;
  int64_t* dims;  // [rank]
};
inline constexpr int32_t kBufferArgument = 1;

struct Values {  // XLA_FFI_Args and XLA_FFI_Rets
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;  // [size]
  void** values;   // [size] Buffer*
};

struct Text {
  const char* data;
  size_t size;
};

struct Scalar {
  int32_t dtype;  // DataType
  void* value;
};

enum AttributeType : int32_t { kScalarAttribute = 3, kStringAttribute = 4 };

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;  // [size] AttributeType
  Text** names;    // [size] sorted
  void** values;   // [size] Scalar* or Text*
};

struct CreateErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int32_t code;  // ErrorCode
};

struct DestroyErrorArguments {
  size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct GetStreamArguments {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  void* stream;  // out: cudaStream_t
};

struct AllocateArguments {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  size_t size;
  size_t alignment;
  void* data;  // out
};

struct FreeArguments {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  size_t size;
  void* data;
};

struct GetDeviceOrdinalArguments {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  int32_t device_ordinal;  // out
};

// XLA's functions, in the table's order; those not called here are untyped.
struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal_api;

  Error* (*create_error)(CreateErrorArguments*);
  void* get_error_message;
  void (*destroy_error)(DestroyErrorArguments*);
  void* register_handler;
  Error* (*get_stream)(GetStreamArguments*);
  void* register_type;
  void* get_execution_context;
  void* set_state;
  void* get_state;
  Error* (*allocate)(AllocateArguments*);
  Error* (*free)(FreeArguments*);
  void* schedule_task;
  void* number_of_threads;
  void* create_future;
  void* set_future_available;
  void* set_future_error;
  void* get_run_id;
  Error* (*get_device_ordinal)(GetDeviceOrdinalArguments*);
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  ExecutionContext* context;
  int32_t stage;
  Values arguments;
  Values results;
  Attributes attributes;
};

// XLA queries a handler by calling it with this extension on an otherwise empty frame.
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension extension;
  Metadata* metadata;
};

// The handler launches the same device work on every call with the same attributes and shapes, so
// that XLA may capture it into a CUDA graph.
inline constexpr uint32_t kCommandBufferCompatible = 1;

}  // namespace flashmoe::xla
