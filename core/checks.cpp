#include "core/checks.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "core/gpu_model.h"

namespace flashmoe {
namespace {

// "[2, 128, 8, 64]" for messages; shapes longer than a caller may pass are cut.
struct ShapeText {
  char text[160];

  ShapeText(const int64_t* shape, int rank) {
    size_t used = 0;
    append(&used, "[");
    for (int axis = 0; axis < rank && axis < 8; ++axis) {
      char number[24];
      std::snprintf(number, sizeof number, axis == 0 ? "%lld" : ", %lld",
                    static_cast<long long>(shape[axis]));
      append(&used, number);
    }
    append(&used, rank > 8 ? ", ...]" : "]");
  }

 private:
  void append(size_t* used, const char* piece) {
    const int wrote = std::snprintf(text + *used, sizeof text - *used, "%s", piece);
    *used += static_cast<size_t>(wrote);
    if (*used >= sizeof text) *used = sizeof text - 1;
  }
};

bool multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

bool add(int64_t a, int64_t b, int64_t* sum) { return !__builtin_add_overflow(a, b, sum); }

// The offsets, in elements, of the lowest and highest element of a non-empty view.
bool element_range(const View& view, int rank, int64_t* low, int64_t* high) {
  *low = 0;
  *high = 0;
  for (int axis = 0; axis < rank; ++axis) {
    int64_t reach = 0;
    if (!multiply(view.shape[axis] - 1, view.strides[axis], &reach)) return false;
    if (!add(reach < 0 ? *low : *high, reach, reach < 0 ? low : high)) return false;
  }
  return true;
}

bool is_empty(const View& view, int rank) {
  for (int axis = 0; axis < rank; ++axis) {
    if (view.shape[axis] == 0) return true;
  }
  return false;
}

}  // namespace

flashmoe_status check_struct_size(const char* name, size_t got, size_t oldest, size_t newest) {
  if (got >= oldest && got <= newest) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s.struct_size: got %zu, this library (version %d.%d.%d) accepts %zu to %zu; "
              "initialise the struct with %s_init()%s",
              name, got, FLASHMOE_VERSION_MAJOR, FLASHMOE_VERSION_MINOR, FLASHMOE_VERSION_PATCH,
              oldest, newest, name,
              got > newest ? ", or use a library at least as new as the header" : "");
}

flashmoe_status check_view(const char* name, const flashmoe_tensor* tensor, int rank, View* view) {
  if (tensor == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got a null tensor, it is required", name);
  }
  if (tensor->ndim != rank) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %d dimensions, accepted are %d", name,
                tensor->ndim, rank);
  }
  if (tensor->shape == nullptr && rank > 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: its shape is a null pointer", name);
  }
  int64_t count = 1;
  bool empty = false;
  for (int axis = 0; axis < rank; ++axis) {
    const int64_t extent = tensor->shape[axis];
    if (extent < 0) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got shape %s, extents cannot be negative",
                  name, ShapeText(tensor->shape, rank).text);
    }
    empty = empty || extent == 0;
    view->shape[axis] = extent;
  }
  for (int axis = 0; axis < rank; ++axis) {
    // An extent of zero does not excuse the others: kernels multiply them too.
    if (!multiply(count, view->shape[axis] == 0 ? 1 : view->shape[axis], &count) ||
        count > INT64_MAX / 8) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: got shape %s, its number of bytes does not fit in 63 bits", name,
                  ShapeText(tensor->shape, rank).text);
    }
  }
  int64_t packed = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    // An empty tensor has strides of 0: backends may then add any index to a null pointer.
    view->strides[axis] = empty ? 0 : tensor->strides != nullptr ? tensor->strides[axis] : packed;
    packed *= view->shape[axis];
  }
  int64_t low = 0;
  int64_t high = 0;
  int64_t bytes = 0;
  if (!empty && (!element_range(*view, rank, &low, &high) || !multiply(high, 8, &bytes) ||
                 !multiply(low, 8, &bytes))) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got shape %s with strides %s, its byte offsets do not fit in 63 bits", name,
                ShapeText(tensor->shape, rank).text, ShapeText(view->strides, rank).text);
  }
  if (tensor->data == nullptr && !empty) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: its data is a null pointer but its shape %s is not empty", name,
                ShapeText(tensor->shape, rank).text);
  }
  const uintptr_t base = reinterpret_cast<uintptr_t>(tensor->data);
  if (tensor->byte_offset > UINTPTR_MAX - base) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: its byte_offset %llu leads past the end of memory", name,
                static_cast<unsigned long long>(tensor->byte_offset));
  }
  view->data = reinterpret_cast<void*>(base + tensor->byte_offset);
  return FLASHMOE_OK;
}

flashmoe_status check_last_stride(const char* name, const View& view, int rank) {
  if (is_empty(view, rank) || view.shape[rank - 1] <= 1 || view.strides[rank - 1] == 1) {
    return FLASHMOE_OK;
  }
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: its last dimension has stride %lld, accepted is 1 (contiguous rows)", name,
              static_cast<long long>(view.strides[rank - 1]));
}

flashmoe_status check_aligned_stride(const char* name, const View& view, int axis,
                                     int64_t element_bytes) {
  if (view.shape[axis] <= 1 || view.strides[axis] % (kRowAlignment / element_bytes) == 0) {
    return FLASHMOE_OK;
  }
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: dimension %d has stride %lld elements, accepted are multiples of %lld "
              "(rows begin on %lld-byte boundaries)",
              name, axis, static_cast<long long>(view.strides[axis]),
              static_cast<long long>(kRowAlignment / element_bytes),
              static_cast<long long>(kRowAlignment));
}

flashmoe_status check_rows(const char* name, const View& view, int rank, int64_t element_bytes) {
  if (is_empty(view, rank)) return FLASHMOE_OK;
  FLASHMOE_TRY(check_last_stride(name, view, rank));
  FLASHMOE_TRY(check_alignment(name, view, kRowAlignment));
  for (int axis = 0; axis < rank - 1; ++axis) {
    FLASHMOE_TRY(check_aligned_stride(name, view, axis, element_bytes));
  }
  return FLASHMOE_OK;
}

flashmoe_status check_no_overlap(const char* name, const View& view, int rank) {
  int order[kMaxRank];
  int used = 0;
  for (int axis = 0; axis < rank; ++axis) {
    if (view.shape[axis] == 0) return FLASHMOE_OK;
    if (view.shape[axis] > 1) order[used++] = axis;
  }
  for (int i = 1; i < used; ++i) {
    for (int j = i;
         j > 0 && std::llabs(view.strides[order[j]]) < std::llabs(view.strides[order[j - 1]]);
         --j) {
      std::swap(order[j], order[j - 1]);
    }
  }
  // Sufficient for every view that slicing, transposing and reshaping can make.
  int64_t reach = 0;  // of the axes with smaller strides; check_view made sure that it fits
  for (int i = 0; i < used; ++i) {
    const int64_t stride = std::llabs(view.strides[order[i]]);
    if (stride <= reach) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: its strides %s make elements of shape %s overlap; an output needs distinct "
                  "elements",
                  name, ShapeText(view.strides, rank).text, ShapeText(view.shape, rank).text);
    }
    reach += (view.shape[order[i]] - 1) * stride;
  }
  return FLASHMOE_OK;
}

flashmoe_status check_alignment(const char* name, const View& view, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(view.data) % bytes == 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: its data begins at address %p, which is not a multiple of %zu bytes", name,
              view.data, bytes);
}

flashmoe_status check_contiguous(const char* name, const View& view, int rank) {
  int64_t packed = 1;
  if (is_empty(view, rank)) return FLASHMOE_OK;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (view.shape[axis] > 1 && view.strides[axis] != packed) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: got strides %s for shape %s, accepted is a contiguous, row-major tensor",
                  name, ShapeText(view.strides, rank).text, ShapeText(view.shape, rank).text);
    }
    packed *= view.shape[axis];
  }
  return FLASHMOE_OK;
}

flashmoe_status check_extent(const char* name, const char* extent, int64_t got, const char* of,
                             int64_t want) {
  if (got == want) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: its %s is %lld, but %s has %lld", name, extent,
              static_cast<long long>(got), of, static_cast<long long>(want));
}

namespace {

constexpr char kAllDtypes[] = "are fp16, bf16, fp32 and fp64";

bool known_dtype(flashmoe_dtype got, Dtype* dtype) {
  if (got.lanes != 1) return false;
  if (got.code == FLASHMOE_DTYPE_FLOAT && got.bits == 64) return *dtype = Dtype::kFloat64, true;
  if (got.code == FLASHMOE_DTYPE_FLOAT && got.bits == 32) return *dtype = Dtype::kFloat32, true;
  if (got.code == FLASHMOE_DTYPE_FLOAT && got.bits == 16) return *dtype = Dtype::kFloat16, true;
  if (got.code == FLASHMOE_DTYPE_BFLOAT && got.bits == 16) return *dtype = Dtype::kBFloat16, true;
  return false;
}

flashmoe_status refuse_dtype(const char* name, flashmoe_dtype got, const char* accepted) {
  Dtype known;
  if (known_dtype(got, &known)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got dtype %s, accepted %s", name,
                dtype_name(known), accepted);
  }
  if (is_fp8(got)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got dtype %s, accepted %s", name,
                dtype_name(Dtype::kFloat8E4M3), accepted);
  }
  static const char* const kCodes[] = {"int",    "uint",    "float", "opaque",
                                       "bfloat", "complex", "bool"};
  // DLPack's other float types, whose codes imply their bits.
  static const char* const kNarrow[] = {"float8_e3m4",     "float8_e4m3",     "float8_e4m3b11fnuz",
                                        "float8_e4m3fn",   "float8_e4m3fnuz", "float8_e5m2",
                                        "float8_e5m2fnuz", "float8_e8m0fnu",  "float6_e2m3fn",
                                        "float6_e3m2fn",   "float4_e2m1fn"};
  constexpr int kFirstNarrow = 7;
  const int narrow = got.code - kFirstNarrow;
  if (narrow >= 0 && narrow < static_cast<int>(std::size(kNarrow))) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got dtype %s (code %d, %d bits, %d lanes), accepted %s", name, kNarrow[narrow],
                got.code, got.bits, got.lanes, accepted);
  }
  const char* code = got.code < kFirstNarrow ? kCodes[got.code] : "dtype code ";
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: got dtype %s%d (code %d, %d lanes), accepted %s", name, code, got.bits, got.code,
              got.lanes, accepted);
}

flashmoe_status refuse_on_gpu(const char* name, Dtype dtype, flashmoe_device device,
                              const char* accepted) {
  return fail(FLASHMOE_ERROR_UNSUPPORTED, "%s: it is on %s and of dtype %s, %s", name,
              DeviceName(device).text, dtype_name(dtype), accepted);
}

flashmoe_status check_gpu_model(const char* name, int32_t model, flashmoe_device* device) {
  if (model < 0 || model >= kGpuModels) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got the GPU model %d, accepted are 0 to %d",
                name, model, kGpuModels - 1);
  }
#if FLASHMOE_WITH_CUDA
  *device = {FLASHMOE_DEVICE_CUDA, kFirstGpuModel + model};
  return FLASHMOE_OK;
#else
  (void)device;
  return fail(
      FLASHMOE_ERROR_ARCH_NOT_BUILT,
      "%s: got the GPU model %s, but this library was built without CUDA and has no plans of "
      "GPUs; a build with CUDA has, on machines without a GPU too",
      name, kGpuModelNames[model]);
#endif
}

}  // namespace

flashmoe_status check_dtype(const char* name, const flashmoe_tensor& tensor, Dtype* dtype) {
  if (known_dtype(tensor.dtype, dtype) && *dtype != Dtype::kFloat64) return FLASHMOE_OK;
  return refuse_dtype(name, tensor.dtype, "are fp16, bf16 and fp32");
}

flashmoe_status check_first_dtype(const char* name, const flashmoe_tensor& tensor,
                                  flashmoe_device device, Dtype* dtype) {
  if (!known_dtype(tensor.dtype, dtype)) return refuse_dtype(name, tensor.dtype, kAllDtypes);
  const bool narrow = *dtype == Dtype::kFloat16 || *dtype == Dtype::kBFloat16;
  if (narrow || device.device_type != FLASHMOE_DEVICE_CUDA) return FLASHMOE_OK;
  return refuse_on_gpu(name, *dtype, device,
                       "accepted on a GPU are fp16 and bf16, on the CPU also fp32 and fp64");
}

flashmoe_status check_float_dtype(const char* name, const flashmoe_tensor& tensor,
                                  flashmoe_device device, Dtype* dtype) {
  if (!known_dtype(tensor.dtype, dtype)) return refuse_dtype(name, tensor.dtype, kAllDtypes);
  if (*dtype != Dtype::kFloat64 || device.device_type != FLASHMOE_DEVICE_CUDA) return FLASHMOE_OK;
  return refuse_on_gpu(name, *dtype, device,
                       "accepted on a GPU are fp16, bf16 and fp32, on the CPU also fp64");
}

flashmoe_status check_same_dtype(const char* name, const flashmoe_tensor& tensor, const char* of,
                                 Dtype want) {
  Dtype dtype = want;
  if (known_dtype(tensor.dtype, &dtype) && dtype == want) return FLASHMOE_OK;
  char accepted[64];
  std::snprintf(accepted, sizeof accepted, "is %s as %s's", dtype_name(want), of);
  return refuse_dtype(name, tensor.dtype, accepted);
}

bool is_fp8(flashmoe_dtype dtype) {
  return dtype.code == FLASHMOE_DTYPE_FLOAT8_E4M3FN && dtype.bits == 8 && dtype.lanes == 1;
}

flashmoe_status check_cache_dtype(const char* name, const flashmoe_tensor& tensor, const char* of,
                                  Dtype want, Dtype* dtype) {
  const bool may_be_narrow = want != Dtype::kFloat64;
  const bool narrow = is_fp8(tensor.dtype) && may_be_narrow;
  *dtype = narrow ? Dtype::kFloat8E4M3 : want;
  if (narrow) return FLASHMOE_OK;
  Dtype got = want;
  if (!may_be_narrow || known_dtype(tensor.dtype, &got)) {
    return check_same_dtype(name, tensor, of, want);
  }
  char accepted[64];
  std::snprintf(accepted, sizeof accepted, "are %s as %s's and %s", dtype_name(want), of,
                dtype_name(Dtype::kFloat8E4M3));
  return refuse_dtype(name, tensor.dtype, accepted);
}

flashmoe_status check_same_dtype_or_fp32(const char* name, const flashmoe_tensor& tensor,
                                         const char* of, Dtype want, Dtype* dtype) {
  const bool known = known_dtype(tensor.dtype, dtype);
  if (known && (*dtype == want || *dtype == Dtype::kFloat32)) return FLASHMOE_OK;
  char accepted[64];
  std::snprintf(accepted, sizeof accepted, "%s %s's %s",
                want == Dtype::kFloat32 ? "is" : "are fp32 and", of, dtype_name(want));
  return refuse_dtype(name, tensor.dtype, accepted);
}

flashmoe_status check_fp32(const char* name, const flashmoe_tensor& tensor) {
  const flashmoe_dtype got = tensor.dtype;
  if (got.code == FLASHMOE_DTYPE_FLOAT && got.bits == 32 && got.lanes == 1) return FLASHMOE_OK;
  return refuse_dtype(name, got, "is fp32");
}

bool is_in_place(const flashmoe_tensor* input, const flashmoe_tensor* output) {
  if (input == nullptr || output == nullptr || input->ndim != output->ndim) return false;
  const flashmoe_dtype of = output->dtype;
  if (input->dtype.code != of.code || input->dtype.bits != of.bits) return false;
  View of_input, of_output;
  if (check_view("", input, input->ndim, &of_input) != FLASHMOE_OK) return false;
  if (check_view("", output, output->ndim, &of_output) != FLASHMOE_OK) return false;
  if (of_input.data != of_output.data) return false;
  for (int axis = 0; axis < input->ndim; ++axis) {
    if (of_input.shape[axis] != of_output.shape[axis]) return false;
    if (of_input.shape[axis] > 1 && of_input.strides[axis] != of_output.strides[axis]) return false;
  }
  return true;
}

flashmoe_status check_mask_dtype(const char* name, const flashmoe_tensor& tensor) {
  const flashmoe_dtype got = tensor.dtype;
  const bool bytes = got.code == FLASHMOE_DTYPE_BOOL || got.code == FLASHMOE_DTYPE_UINT;
  if (bytes && got.bits == 8 && got.lanes == 1) return FLASHMOE_OK;
  return refuse_dtype(name, got, "are bool and uint8");
}

flashmoe_status check_index_dtype(const char* name, const flashmoe_tensor& tensor, bool* is_64) {
  const flashmoe_dtype got = tensor.dtype;
  const bool integer = got.code == FLASHMOE_DTYPE_INT && got.lanes == 1;
  if (is_64 != nullptr) *is_64 = integer && got.bits == 64;
  if (integer && (got.bits == 32 || (got.bits == 64 && is_64 != nullptr))) return FLASHMOE_OK;
  return refuse_dtype(name, got, is_64 != nullptr ? "are int32 and int64" : "is int32");
}

flashmoe_status check_device(const char* name, const flashmoe_tensor& tensor,
                             flashmoe_device* device) {
  return check_device(name, tensor.device, device);
}

flashmoe_status check_device(const char* name, flashmoe_device given, flashmoe_device* device) {
  switch (given.device_type) {
    case FLASHMOE_DEVICE_CPU:
    case FLASHMOE_DEVICE_CUDA_HOST: *device = {FLASHMOE_DEVICE_CPU, 0}; return FLASHMOE_OK;
    case FLASHMOE_DEVICE_CUDA:
      if (is_gpu_model(given.device_id)) {
        return fail(FLASHMOE_ERROR_NO_DEVICE, "%s: got cuda:%d, accepted are ids below %d", name,
                    given.device_id, kFirstGpuModel);
      }
      *device = given;
      return FLASHMOE_OK;
    case FLASHMOE_DEVICE_GPU_MODEL: return check_gpu_model(name, given.device_id, device);
    default:
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: got device type %d, accepted are 1 (CPU), 2 (CUDA), 3 (CUDA host) and 256 "
                  "(GPU model)",
                  name, given.device_type);
  }
}

flashmoe_status check_same_device(const char* name, const flashmoe_tensor& tensor, const char* of,
                                  flashmoe_device want) {
  flashmoe_device device = want;
  FLASHMOE_TRY(check_device(name, tensor, &device));
  if (device.device_type == want.device_type && device.device_id == want.device_id) {
    return FLASHMOE_OK;
  }
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: it is on %s but %s is on %s; all tensors must be on one device", name,
              DeviceName(device).text, of, DeviceName(want).text);
}

flashmoe_status check_workspace(uint64_t needed, const void* workspace, size_t workspace_size,
                                size_t alignment, const char* query) {
  if (needed == 0) return FLASHMOE_OK;
  if (workspace_size < needed) {
    return fail(FLASHMOE_ERROR_WORKSPACE_TOO_SMALL,
                "workspace_size: got %zu bytes, this call needs %llu (%s tells)", workspace_size,
                static_cast<unsigned long long>(needed), query);
  }
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % alignment != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "workspace: got %p, accepted is a %zu-byte aligned pointer to %llu bytes",
                workspace, alignment, static_cast<unsigned long long>(needed));
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe
