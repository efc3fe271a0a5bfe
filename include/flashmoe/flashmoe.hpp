// FlashMoE for C++17: header-only, over the C ABI of flashmoe.h and nothing else.
//
//   std::vector<float> q(2 * 128 * 8 * 64), k(q), v(q), out(q);
//   flashmoe::AttentionForward call;
//   call.q = {q.data(), {2, 128, 8, 64}};  // [batch, seq, heads, dim]
//   call.k = {k.data(), {2, 128, 8, 64}};
//   call.v = {v.data(), {2, 128, 8, 64}};
//   call.out = {out.data(), {2, 128, 8, 64}};
//   call.causal = flashmoe::Causal::bottom_right;
//   flashmoe::Workspace workspace;         // keep it for the next call
//   flashmoe::run(call, workspace);
//
// A call is a plain struct of views and options: AttentionForward, AttentionBackward, KvAppend,
// KvGather, MergeStates, CheckSequences, MoeRoute, MoeForward, FusedMoe, GroupedProduct, or
// MoeBackward, MoeRouteBackward and GroupedProductBackward. flashmoe.h and moe.h say what the
// fields mean; an unset field is "none" or the default. Every call has the same four functions:
// plan, workspace_size, run with the caller's memory, and run with a workspace that grows by
// itself.
//
// Errors: the functions return Result<T>. With exceptions that is T, and a failure throws Error,
// whose what() is the library's sentence. With FLASHMOE_NO_EXCEPTIONS (defined by default if the
// compiler has no exceptions) it is T or a status with the sentence; check it before use. Both
// kinds may be linked into one program.
//
// A call costs as much as in C plus filling C's structs. Views and calls are trivially copyable.
// Only Buffer, Workspace and Routing allocate, and only what they are asked for.
#ifndef FLASHMOE_FLASHMOE_HPP_
#define FLASHMOE_FLASHMOE_HPP_

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>

#include "flashmoe/flashmoe.h"

#if !defined(FLASHMOE_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define FLASHMOE_NO_EXCEPTIONS
#endif

#ifndef FLASHMOE_NO_EXCEPTIONS
#include <stdexcept>
#endif

// CUDA's 16-bit types, declared here so that CUDA's headers are not needed.
struct __half;
struct __nv_bfloat16;

namespace flashmoe {

// The linker must not mix up the two kinds of these functions, nor confuse them with what
// libflashmoe.a holds.
#ifdef FLASHMOE_NO_EXCEPTIONS
inline namespace without_exceptions {
#else
inline namespace with_exceptions {
#endif

// ---- errors -------------------------------------------------------------------------------------

namespace detail {

// A status and the library's sentence, which is valid until the next failure on this thread.
struct Outcome {
  flashmoe_status status = FLASHMOE_OK;
  const char* message = "";

  Outcome() = default;
  Outcome(flashmoe_status from_library)  // NOLINT: every call's result becomes one
      : status(from_library), message(from_library == FLASHMOE_OK ? "" : flashmoe_last_error()) {}
  Outcome(flashmoe_status failure, const char* sentence) : status(failure), message(sentence) {}
};

// The sentence of a failure that this header found, valid as long as the library's.
inline char* own_sentence() noexcept {
  thread_local char sentence[160];
  return sentence;
}
constexpr std::size_t kOwnSentence = 160;

}  // namespace detail

#ifdef FLASHMOE_NO_EXCEPTIONS

// A T, or why there is none. Check it before using the value, like a std::expected.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(detail::Outcome outcome, T value) : outcome_(outcome), value_(std::move(value)) {}

  bool has_value() const noexcept { return outcome_.status == FLASHMOE_OK; }
  explicit operator bool() const noexcept { return has_value(); }

  T& operator*() & noexcept { return assert(has_value()), value_; }
  const T& operator*() const& noexcept { return assert(has_value()), value_; }
  T&& operator*() && noexcept { return assert(has_value()), std::move(value_); }
  T* operator->() noexcept { return assert(has_value()), &value_; }
  const T* operator->() const noexcept { return assert(has_value()), &value_; }

  flashmoe_status status() const noexcept { return outcome_.status; }
  // The sentence that names the argument, what it got and what is accepted; "" without a failure.
  // Valid until the next failing call on this thread.
  const char* message() const noexcept { return outcome_.message; }

 private:
  detail::Outcome outcome_;
  T value_;
};

// Done, or why not.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result(detail::Outcome outcome) : outcome_(outcome) {}  // NOLINT: as a return value

  bool has_value() const noexcept { return outcome_.status == FLASHMOE_OK; }
  explicit operator bool() const noexcept { return has_value(); }
  flashmoe_status status() const noexcept { return outcome_.status; }
  const char* message() const noexcept { return outcome_.message; }

 private:
  detail::Outcome outcome_;
};

namespace detail {

template <class T>
Result<std::decay_t<T>> result(Outcome outcome, T&& value) {
  return {outcome, std::forward<T>(value)};
}
inline Result<void> result(Outcome outcome) { return outcome; }

}  // namespace detail

#else

// A failed call. what() is the sentence that names the argument, what it got and what is accepted.
class Error : public std::runtime_error {
 public:
  Error(flashmoe_status status, const char* sentence)
      : std::runtime_error(sentence), status_(status) {}

  flashmoe_status status() const noexcept { return status_; }
  // Such as "FLASHMOE_ERROR_INVALID_ARGUMENT".
  const char* status_name() const noexcept { return flashmoe_status_name(status_); }

 private:
  flashmoe_status status_;
};

// The result type of a function that throws Error when it fails.
template <class T>
using Result = T;

namespace detail {

inline void result(Outcome outcome) {
  if (outcome.status != FLASHMOE_OK) throw Error(outcome.status, outcome.message);
}
template <class T>
std::decay_t<T> result(Outcome outcome, T&& value) {
  result(outcome);
  return std::forward<T>(value);
}

}  // namespace detail

#endif

// ---- devices and dtypes -------------------------------------------------------------------------

// The place of a tensor's elements.
class Device {
 public:
  static constexpr Device cpu() noexcept { return Device(FLASHMOE_DEVICE_CPU, 0); }
  static constexpr Device cuda(int32_t id = 0) noexcept { return Device(FLASHMOE_DEVICE_CUDA, id); }
  // Pinned host memory, computed on the CPU.
  static constexpr Device cuda_host() noexcept { return Device(FLASHMOE_DEVICE_CUDA_HOST, 0); }
  // No device: a model of GPUs, to plan for.
  static constexpr Device model(flashmoe_gpu_model model) noexcept {
    return Device(FLASHMOE_DEVICE_GPU_MODEL, model);
  }

  constexpr explicit Device(flashmoe_device device) noexcept : device_(device) {}
  constexpr flashmoe_device c() const noexcept { return device_; }

 private:
  constexpr Device(flashmoe_device_type type, int32_t id) noexcept : device_{type, id} {}

  flashmoe_device device_;
};

// Types of elements.
inline constexpr flashmoe_dtype kFp16 = {FLASHMOE_DTYPE_FLOAT, 16, 1};
inline constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
inline constexpr flashmoe_dtype kFp8E4M3 = {FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1};
inline constexpr flashmoe_dtype kFp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
inline constexpr flashmoe_dtype kFp64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};
inline constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
inline constexpr flashmoe_dtype kInt64 = {FLASHMOE_DTYPE_INT, 64, 1};
inline constexpr flashmoe_dtype kUint8 = {FLASHMOE_DTYPE_UINT, 8, 1};
inline constexpr flashmoe_dtype kBool = {FLASHMOE_DTYPE_BOOL, 8, 1};

// The dtype of a C++ type. Specialise it for a 16-bit type of your own:
//   template <> struct flashmoe::DtypeOf<my::bfloat16> {
//     static constexpr flashmoe_dtype value = flashmoe::kBf16;
//   };
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr flashmoe_dtype value = kFp32;
};
template <>
struct DtypeOf<double> {
  static constexpr flashmoe_dtype value = kFp64;
};
template <>
struct DtypeOf<int32_t> {
  static constexpr flashmoe_dtype value = kInt32;
};
template <>
struct DtypeOf<int64_t> {
  static constexpr flashmoe_dtype value = kInt64;
};
template <>
struct DtypeOf<uint8_t> {
  static constexpr flashmoe_dtype value = kUint8;
};
template <>
struct DtypeOf<bool> {
  static constexpr flashmoe_dtype value = kBool;
};
template <>
struct DtypeOf<::__half> {
  static constexpr flashmoe_dtype value = kFp16;
};
template <>
struct DtypeOf<::__nv_bfloat16> {
  static constexpr flashmoe_dtype value = kBf16;
};

// ---- views --------------------------------------------------------------------------------------

// The most dimensions of a view; no tensor of any call has more.
inline constexpr int kMaxRank = 8;

// Extents or strides of a view, in elements. Valid as long as the view.
class Extents {
 public:
  constexpr Extents(const int64_t* first, std::size_t count) noexcept
      : first_(first), count_(count) {}
  constexpr const int64_t* data() const noexcept { return first_; }
  constexpr std::size_t size() const noexcept { return count_; }
  constexpr const int64_t* begin() const noexcept { return first_; }
  constexpr const int64_t* end() const noexcept { return first_ + count_; }
  constexpr int64_t operator[](std::size_t axis) const noexcept { return first_[axis]; }

 private:
  const int64_t* first_;
  std::size_t count_;
};

// A strided view of elements that somebody else owns: a pointer, a device, a dtype, and up to
// kMaxRank extents and strides. It holds these itself, so it can be copied and returned. `Void` is
// void, or const void where the library only reads. A default-constructed view is absent: "not
// wanted", or "none".
template <class Void>
class BasicTensorView {
  template <class T>
  using IfElement = std::enable_if_t<std::is_convertible_v<T*, Void*>>;

 public:
  constexpr BasicTensorView() noexcept = default;

  // Contiguous, row-major: TensorView(data, {batch, seq, heads, dim}).
  template <class T, std::size_t kRank, class = IfElement<T>>
  BasicTensorView(T* data, const int64_t (&shape)[kRank], Device device = Device::cpu()) noexcept
      : BasicTensorView(data, DtypeOf<std::remove_const_t<T>>::value, shape, device) {}

  // With strides, in elements.
  template <class T, std::size_t kRank, class = IfElement<T>>
  BasicTensorView(T* data, const int64_t (&shape)[kRank], const int64_t (&strides)[kRank],
                  Device device = Device::cpu()) noexcept
      : BasicTensorView(data, DtypeOf<std::remove_const_t<T>>::value, shape, strides, device) {}

  // For a dtype known only at run time.
  template <std::size_t kRank>
  BasicTensorView(Void* data, flashmoe_dtype dtype, const int64_t (&shape)[kRank],
                  Device device = Device::cpu()) noexcept {
    static_assert(kRank <= kMaxRank, "a view has at most kMaxRank dimensions");
    assign(data, dtype, static_cast<int>(kRank), shape, nullptr, device);
  }
  template <std::size_t kRank>
  BasicTensorView(Void* data, flashmoe_dtype dtype, const int64_t (&shape)[kRank],
                  const int64_t (&strides)[kRank], Device device = Device::cpu()) noexcept {
    static_assert(kRank <= kMaxRank, "a view has at most kMaxRank dimensions");
    assign(data, dtype, static_cast<int>(kRank), shape, strides, device);
  }

  // From a DLPack DLTensor, cast to flashmoe_tensor. A call refuses one with more than kMaxRank
  // dimensions, or fewer than 0.
  explicit BasicTensorView(const flashmoe_tensor& tensor) noexcept {
    assign(moved(tensor.data, tensor.byte_offset), tensor.dtype, tensor.ndim, tensor.shape,
           tensor.strides, Device(tensor.device));
  }

  // A view for writing converts to one for reading.
  template <class Other, class = std::enable_if_t<std::is_same_v<Void, const Other>>>
  BasicTensorView(const BasicTensorView<Other>& other) noexcept {  // NOLINT: as std::span does
    if (other) {
      assign(other.data(), other.dtype(), other.rank(), other.shape().data(),
             other.strides().data(), other.device());
    }
  }

  // Whether the view has a tensor.
  constexpr explicit operator bool() const noexcept { return rank_ >= 0; }

  constexpr Void* data() const noexcept { return data_; }
  constexpr flashmoe_dtype dtype() const noexcept { return dtype_; }
  constexpr Device device() const noexcept { return Device(device_); }
  constexpr int rank() const noexcept { return rank_; }
  constexpr Extents shape() const noexcept { return {shape_, kept()}; }
  constexpr Extents strides() const noexcept { return {strides_, kept()}; }

  // Positions [first, first + count) of an axis: another view of the same elements, no copy.
  BasicTensorView slice(int axis, int64_t first, int64_t count) const noexcept {
    assert(axis >= 0 && axis < rank_ && axis < kMaxRank);
    assert(first >= 0 && count >= 0 && first <= shape_[axis] - count);
    BasicTensorView result = *this;
    result.shape_[axis] = count;
    result.data_ = moved(data_, static_cast<uint64_t>(first * strides_[axis] * (dtype_.bits / 8)));
    return result;
  }

  // With two axes exchanged, such as a weight [E, H, I] that is stored as [E, I, H].
  BasicTensorView transpose(int a, int b) const noexcept {
    assert(a >= 0 && a < rank_ && a < kMaxRank && b >= 0 && b < rank_ && b < kMaxRank);
    BasicTensorView result = *this;
    std::swap(result.shape_[a], result.shape_[b]);
    std::swap(result.strides_[a], result.strides_[b]);
    return result;
  }

  // The struct of the C ABI and DLPack. It points into this view, which must outlive it.
  flashmoe_tensor c() const noexcept {
    flashmoe_tensor tensor = {};
    tensor.data = const_cast<void*>(data_);  // const data is an input, never written
    tensor.device = device_;
    tensor.ndim = rank_;
    tensor.dtype = dtype_;
    tensor.shape = shape_;
    tensor.strides = strides_;
    return tensor;
  }

 private:
  constexpr std::size_t kept() const noexcept {
    return static_cast<std::size_t>(rank_ < 0 ? 0 : rank_ < kMaxRank ? rank_ : kMaxRank);
  }

  // Computed as a number, since an empty tensor's pointer may be null.
  static Void* moved(Void* data, uint64_t bytes) noexcept {
    return reinterpret_cast<Void*>(reinterpret_cast<std::uintptr_t>(data) + bytes);
  }

  void assign(Void* data, flashmoe_dtype dtype, int rank, const int64_t* shape,
              const int64_t* strides, Device device) noexcept {
    data_ = data;
    device_ = device.c();
    rank_ = rank < 0 ? kMaxRank + 1 : rank;  // refused by the library; below 0 a view is absent
    dtype_ = dtype;
    if (rank < 0) return;
    uint64_t packed = 1;  // may wrap: the library refuses such a shape
    for (std::size_t axis = kept(); axis-- > 0;) {
      shape_[axis] = shape[axis];
      strides_[axis] = strides != nullptr ? strides[axis] : static_cast<int64_t>(packed);
      packed *= static_cast<uint64_t>(shape[axis]);
    }
  }

  Void* data_ = nullptr;
  flashmoe_device device_ = {FLASHMOE_DEVICE_CPU, 0};
  int32_t rank_ = -1;
  flashmoe_dtype dtype_ = {};
  int64_t shape_[kMaxRank] = {};
  int64_t strides_[kMaxRank] = {};
};

// Views of outputs, and of inputs.
using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// ---- calls --------------------------------------------------------------------------------------

// Order of the axes of q, k, v and out: [batch, seq, heads, dim] or [batch, heads, seq, dim].
enum class Layout : int32_t { bshd = FLASHMOE_LAYOUT_BSHD, bhsd = FLASHMOE_LAYOUT_BHSD };

// Which numbers of a head form pairs: the two halves, or neighbours.
enum class Rotary : int32_t {
  neox = FLASHMOE_ROTARY_NEOX,
  interleaved = FLASHMOE_ROTARY_INTERLEAVED
};

// Which keys j a query i sees: all, j <= i + seq_k - seq_q, or j <= i.
enum class Causal : int32_t {
  none = FLASHMOE_CAUSAL_NONE,
  bottom_right = FLASHMOE_CAUSAL_BOTTOM_RIGHT,
  top_left = FLASHMOE_CAUSAL_TOP_LEFT
};

// How logits choose and weigh experts.
enum class Scoring : int32_t {
  softmax = FLASHMOE_MOE_SOFTMAX,
  topk_softmax = FLASHMOE_MOE_TOPK_SOFTMAX,
  sigmoid = FLASHMOE_MOE_SIGMOID
};

// The order of the rows of the gate and of up.
enum class Gate : int32_t {
  gate_up = FLASHMOE_MOE_GATE_UP,
  up_gate = FLASHMOE_MOE_UP_GATE,
  interleaved = FLASHMOE_MOE_INTERLEAVED,
  separate = FLASHMOE_MOE_SEPARATE,
  none = FLASHMOE_MOE_NO_GATE
};

enum class Activation : int32_t {
  silu = FLASHMOE_ACTIVATION_SILU,
  gelu = FLASHMOE_ACTIVATION_GELU,
  gelu_tanh = FLASHMOE_ACTIVATION_GELU_TANH,
  relu = FLASHMOE_ACTIVATION_RELU,
  relu2 = FLASHMOE_ACTIVATION_RELU2
};

// Ragged, padded and paged batches: flashmoe_attention_sequences. All int32.
struct AttentionSequences {
  ConstTensorView cu_seqlens_q;  // [batch + 1]
  ConstTensorView cu_seqlens_k;  // [batch + 1]
  ConstTensorView seqused_q;     // [batch]
  ConstTensorView seqused_k;     // [batch]
  ConstTensorView k_begin;       // [batch]
  ConstTensorView batch_index;   // [batch]
  ConstTensorView page_table;    // [batch, pages of a sequence]
  int64_t max_seqlen_q = 0;      // bounds; 0: as many as the tensors hold
  int64_t max_seqlen_k = 0;
  int64_t split_size = 0;    // keys of a chunk; 0: as suits all lengths
  ConstTensorView q_offset;  // [batch]: the key at which query 0 stands
};

// Attention, forward: flashmoe_attention_forward.
struct AttentionForward {
  ConstTensorView q;  // [batch, seq_q, heads_q, dim], in layout bshd
  ConstTensorView k;  // [batch, seq_k, heads_kv, dim] of q's dtype, or fp8
  ConstTensorView v;  // [batch, seq_k, heads_kv, dim_v] of k's dtype
  TensorView out;     // [batch, seq_q, heads_q, dim_v]
  TensorView lse;     // [batch, heads_q, seq_q] fp32, for fp64 fp64; absent: not wanted
  Layout layout = Layout::bshd;
  Causal causal = Causal::none;
  float scale = 0;                              // 0: 1 / sqrt(dim)
  float softcap = 0;                            // 0: none
  std::optional<int64_t> window_left;           // keys before the query's; absent: no bound
  std::optional<int64_t> window_right;          // keys behind the query's; absent: no bound
  const char* kernel = nullptr;                 // nullptr: the best here
  ConstTensorView sinks;                        // [heads_q] fp32 or q's dtype; absent: none
  std::optional<AttentionSequences> sequences;  // absent: a dense batch
  ConstTensorView k_scale;                      // fp32 of rank 0, 1 or 2, see flashmoe.h; absent: 1
  ConstTensorView v_scale;
  // [batch, heads_q, seq_q, seq_k]; any extent may be 1, which broadcasts; absent: none.
  ConstTensorView attn_bias;  // fp32 or q's dtype, added to the logits
  ConstTensorView attn_mask;  // bool or uint8: not 0 where a query may see a key
  // A partial result of other keys to merge in, as in MergeStates; absent: none.
  ConstTensorView prior_out;  // [batch, seq_q, heads_q, dim_v]; out may be it
  ConstTensorView prior_lse;  // [batch, heads_q, seq_q]; lse may be it
};

// Attention, backward: flashmoe_attention_backward. Requires at least one of dq, dk, dv and dsinks.
struct AttentionBackward {
  ConstTensorView dout;   // [batch, seq_q, heads_q, dim_v], in layout bshd
  ConstTensorView q;      // [batch, seq_q, heads_q, dim]
  ConstTensorView k;      // [batch, seq_k, heads_kv, dim]
  ConstTensorView v;      // [batch, seq_k, heads_kv, dim_v]
  ConstTensorView out;    // [batch, seq_q, heads_q, dim_v]
  ConstTensorView lse;    // [batch, heads_q, seq_q] fp32, for fp64 fp64
  ConstTensorView dlse;   // as lse; absent: 0
  ConstTensorView sinks;  // [heads_q] fp32 or q's dtype; absent: none, and no dsinks
  TensorView dq;          // as q, or fp32; absent: not wanted
  TensorView dk;          // as k, or fp32; absent: not wanted
  TensorView dv;          // as v, or fp32; absent: not wanted
  TensorView dsinks;      // as sinks, or fp32; absent: not wanted
  Layout layout = Layout::bshd;
  Causal causal = Causal::none;
  float scale = 0;                              // 0: 1 / sqrt(dim)
  float softcap = 0;                            // 0: none
  std::optional<int64_t> window_left;           // keys before the query's; absent: no bound
  std::optional<int64_t> window_right;          // keys behind the query's; absent: no bound
  bool accumulate = false;                      // add to the gradients
  const char* kernel = nullptr;                 // nullptr: the best here
  std::optional<AttentionSequences> sequences;  // absent: a dense batch
  // As in the forward call; absent: none.
  ConstTensorView attn_bias;
  ConstTensorView attn_mask;
};

// The merge of partial results of attention: flashmoe_merge_states.
struct MergeStates {
  ConstTensorView outs;  // [partials, batch, seq, heads, dim_v], in layout bshd, or one of rank 4
  ConstTensorView lses;  // [partials, batch, heads, seq] fp32, for fp64 fp64, or of rank 3
  ConstTensorView prior_out;  // [batch, seq, heads, dim_v]: one more, before them; absent: none
  ConstTensorView prior_lse;  // [batch, heads, seq]
  TensorView out;             // [batch, seq, heads, dim_v]; may be prior_out
  TensorView lse;             // [batch, heads, seq]; may be prior_lse; absent: not wanted
  Layout layout = Layout::bshd;
  const char* kernel = nullptr;  // nullptr: the best here
};

// Appends new keys and values to a cache, rotated on the way: flashmoe_kv_append.
struct KvAppend {
  ConstTensorView k;              // [batch, seq, heads_kv, dim], in layout bshd
  ConstTensorView v;              // [batch, seq, heads_kv, dim_v]
  TensorView k_cache;             // [batch or pages, rows, heads_kv, dim]
  TensorView v_cache;             // [batch or pages, rows, heads_kv, dim_v]
  ConstTensorView slots;          // [batch, seq] int32, int64; may be absent, like all below
  ConstTensorView cache_seqlens;  // [batch] int32
  ConstTensorView cu_seqlens;     // [batch + 1] int32
  ConstTensorView seqused;        // [batch] int32
  ConstTensorView batch_index;    // [batch] int32
  ConstTensorView page_table;     // [batch, pages of a sequence] int32
  ConstTensorView positions;      // [batch, seq] int32, int64
  ConstTensorView rotary_cos;     // [positions, rotary_dim / 2]
  ConstTensorView rotary_sin;
  ConstTensorView q;  // [batch, seq_q, heads_q, dim]
  TensorView q_out;   // as q, which it may be
  Rotary rotary = Rotary::neox;
  bool q_stays = false;  // all queries of a sequence stand where its first does
  Layout layout = Layout::bshd;
  const char* kernel = nullptr;  // nullptr: the best here
  ConstTensorView k_scale;       // fp32, for fp8 caches, see flashmoe.h; absent: 1
  ConstTensorView v_scale;
};

// Checks the tables of an attention call: flashmoe_check_sequences.
struct CheckSequences {
  ConstTensorView q;  // as in the attention call: only the extents are used
  ConstTensorView k;
  AttentionSequences sequences;
  TensorView status;  // [batch] int32: bits of flashmoe_sequence_fault
  Layout layout = Layout::bshd;
  const char* kernel = nullptr;  // nullptr: the best here
};

// Copies keys and values out of a cache into consecutive rows: flashmoe_kv_gather.
struct KvGather {
  ConstTensorView k_cache;       // [batch or pages, rows, heads_kv, dim], in layout bshd
  ConstTensorView v_cache;       // [batch or pages, rows, heads_kv, dim_v]; absent without v
  ConstTensorView cu_seqlens_k;  // [batch + 1] int32; may be absent, like all below except k
  ConstTensorView seqused_k;     // [batch] int32
  ConstTensorView k_begin;       // [batch] int32
  ConstTensorView batch_index;   // [batch] int32
  ConstTensorView page_table;    // [batch, pages of a sequence] int32
  TensorView k;                  // [batch, seq, heads_kv, dim]
  TensorView v;                  // [batch, seq, heads_kv, dim_v]
  ConstTensorView k_scale;       // fp32, for fp8 caches, see flashmoe.h; absent: 1
  ConstTensorView v_scale;
  Layout layout = Layout::bshd;
  const char* kernel = nullptr;  // nullptr: the best here
};

// Routing of T tokens to K of E experts each: flashmoe_moe_route.
struct MoeRoute {
  ConstTensorView logits;          // [T, E]; absent with given_ids
  ConstTensorView selection_bias;  // [E] fp32, for fp64 logits also fp64; absent: none
  ConstTensorView given_ids;       // [T, K] int32, int64; absent with logits
  ConstTensorView given_weights;   // [T, K]; absent: all 1
  ConstTensorView expert_map;      // [any] int32; absent: as is
  TensorView ids;                  // [T, K] int32
  TensorView weights;              // [T, K] fp32, for fp64 scores fp64
  TensorView offsets;              // [E + 1] int32
  TensorView pairs;                // [T * K] int32
  TensorView slots;                // [T, K] int32
  TensorView lse;                  // [T], dtype of weights; absent: not wanted
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;
  int32_t num_groups = 0;  // 0: no groups
  int32_t top_groups = 0;
  float scale = 0;  // 0: 1
};

// A layer of E experts: flashmoe_moe_forward.
struct MoeForward {
  ConstTensorView x;          // [T, H]
  ConstTensorView w_gate_up;  // [E, 2I, H]; [E, I, H] with gate separate or none
  ConstTensorView w_up;       // [E, I, H], with gate separate only
  ConstTensorView w_down;     // [E, H, I]
  ConstTensorView b_gate_up;  // [E, rows of that matrix]; absent: none
  ConstTensorView b_up;
  ConstTensorView b_down;
  ConstTensorView weights;  // as MoeRoute wrote them, like the next three
  ConstTensorView offsets;
  ConstTensorView pairs;
  ConstTensorView slots;
  TensorView out;             // [T, H]
  TensorView pre_activation;  // [T * K, 2I]; absent: not wanted
  Gate gate = Gate::gate_up;
  Activation activation = Activation::silu;
  float alpha = 0;  // 0: 1
  float limit = 0;  // 0: none
  float up_offset = 0;
  bool weight_on_input = false;
  const char* kernel = nullptr;  // nullptr: the best here
};

// The router, routing and the layer in one call: flashmoe_fused_moe.
struct FusedMoe {
  ConstTensorView tokens;          // [T, H]
  ConstTensorView router_weights;  // [E, H]; absent with logits
  ConstTensorView router_bias;     // [E]; absent: none
  ConstTensorView logits;          // [T, E]; absent with router_weights
  ConstTensorView selection_bias;  // [E] fp32, for fp64 logits also fp64; absent: none
  ConstTensorView w_gate_up;       // as in MoeForward, like the next five
  ConstTensorView w_up;
  ConstTensorView w_down;
  ConstTensorView b_gate_up;
  ConstTensorView b_up;
  ConstTensorView b_down;
  TensorView out;     // [T, H]
  int32_t top_k = 0;  // 1 or more
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;
  int32_t num_groups = 0;  // 0: no groups
  int32_t top_groups = 0;
  float scale = 0;  // 0: 1
  Gate gate = Gate::gate_up;
  Activation activation = Activation::silu;
  float alpha = 0;  // 0: 1
  float limit = 0;  // 0: none
  float up_offset = 0;
  bool weight_on_input = false;
  const char* kernel = nullptr;  // nullptr: the best here
};

// One product per expert: flashmoe_grouped_product.
struct GroupedProduct {
  ConstTensorView x;        // [rows, K] with offsets, or [E, M, K] with counts
  ConstTensorView w;        // [E, N, K]
  ConstTensorView bias;     // [E, N]; absent: none
  ConstTensorView offsets;  // [E + 1] int32
  ConstTensorView counts;   // [E] int32
  TensorView out;           // [rows, N] or [E, M, N]
  const char* kernel = nullptr;
};

// The gradients of a layer: flashmoe_moe_backward.
struct MoeBackward {
  ConstTensorView dout;  // [T, H]
  ConstTensorView x;     // as in MoeForward, from here on
  ConstTensorView w_gate_up;
  ConstTensorView w_up;
  ConstTensorView w_down;
  ConstTensorView b_gate_up;
  ConstTensorView b_up;
  ConstTensorView b_down;
  ConstTensorView weights;
  ConstTensorView offsets;
  ConstTensorView pairs;
  ConstTensorView slots;
  ConstTensorView pre_activation;  // that of MoeForward; absent: computed again
  TensorView dx;                   // gradients, shaped as their tensors; absent: not wanted
  TensorView dw_gate_up;
  TensorView dw_up;
  TensorView dw_down;
  TensorView db_gate_up;
  TensorView db_up;
  TensorView db_down;
  TensorView dweights;
  Gate gate = Gate::gate_up;
  Activation activation = Activation::silu;
  float alpha = 0;  // 0: 1
  float limit = 0;  // 0: none
  float up_offset = 0;
  bool weight_on_input = false;
  bool accumulate = false;                // add to what the outputs hold
  const char* kernel = nullptr;           // nullptr: the best here
  uint64_t max_workspace_bytes = 0;       // 0: no bound
  bool overwrite_pre_activation = false;  // the call may use it as workspace
};

// The gradients of a routing: flashmoe_moe_route_backward.
struct MoeRouteBackward {
  ConstTensorView dweights;       // [T, K] fp32, for fp64 scores fp64
  ConstTensorView ids;            // as MoeRoute wrote them
  ConstTensorView logits;         // [T, E]; absent with given_weights
  ConstTensorView given_weights;  // [T, K]
  ConstTensorView dlse;           // [T], dtype of dweights; absent: none
  TensorView dlogits;             // as logits
  TensorView dgiven_weights;      // as given_weights
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;
  float scale = 0;  // 0: 1
  bool accumulate = false;
};

// The gradients of products: flashmoe_grouped_product_backward.
struct GroupedProductBackward {
  ConstTensorView dout;     // as out of GroupedProduct
  ConstTensorView x;        // absent without dw
  ConstTensorView w;        // absent without dx
  ConstTensorView offsets;  // [E + 1] int32
  ConstTensorView counts;   // [E] int32
  TensorView dx;            // as x; absent: not wanted, like the next two
  TensorView dw;            // as w
  TensorView dbias;         // [E, N]
  bool accumulate = false;
  const char* kernel = nullptr;
};

namespace detail {

// A view as the C ABI takes it: a pointer that is null where the view is absent.
class Argument {
 public:
  template <class Void>
  explicit Argument(const BasicTensorView<Void>& view) noexcept
      : tensor_(view.c()), present_(static_cast<bool>(view)) {}
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  operator const flashmoe_tensor*() const noexcept {  // NOLINT: implicit on purpose
    return present_ ? &tensor_ : nullptr;
  }

 private:
  flashmoe_tensor tensor_;
  bool present_;
};

// The parameters of a call in C, and the C functions that take them.
template <class Call>
struct Bound;

// Sets the options of the scores, in both directions of attention.
template <class Call, class Params>
void set_scores(const Call& call, Params* params) noexcept {
  params->layout = static_cast<int32_t>(call.layout);
  params->causal = static_cast<int32_t>(call.causal);
  params->scale = call.scale;
  params->softcap = call.softcap;
  params->window = (call.window_left ? uint32_t{FLASHMOE_WINDOW_LEFT} : 0u) |
                   (call.window_right ? uint32_t{FLASHMOE_WINDOW_RIGHT} : 0u);
  params->window_left = call.window_left.value_or(0);
  params->window_right = call.window_right.value_or(0);
  params->kernel = call.kernel;
}

struct BoundSequences {
  Argument cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table;
  Argument q_offset;
  flashmoe_attention_sequences params = flashmoe_attention_sequences_init();

  explicit BoundSequences(const AttentionSequences& given) noexcept
      : cu_seqlens_q(given.cu_seqlens_q),
        cu_seqlens_k(given.cu_seqlens_k),
        seqused_q(given.seqused_q),
        seqused_k(given.seqused_k),
        k_begin(given.k_begin),
        batch_index(given.batch_index),
        page_table(given.page_table),
        q_offset(given.q_offset) {
    params.cu_seqlens_q = cu_seqlens_q;
    params.cu_seqlens_k = cu_seqlens_k;
    params.seqused_q = seqused_q;
    params.seqused_k = seqused_k;
    params.k_begin = k_begin;
    params.batch_index = batch_index;
    params.page_table = page_table;
    params.max_seqlen_q = given.max_seqlen_q;
    params.max_seqlen_k = given.max_seqlen_k;
    params.split_size = given.split_size;
    params.q_offset = q_offset;
  }
};

template <>
struct Bound<AttentionForward> {
  static constexpr auto plan = flashmoe_attention_forward_plan;
  static constexpr auto workspace_size = flashmoe_attention_forward_workspace_size;
  static constexpr auto run = flashmoe_attention_forward;

  Argument q, k, v, sinks, attn_bias, attn_mask, prior_out, prior_lse, out, lse, k_scale, v_scale;
  BoundSequences sequences;
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();

  explicit Bound(const AttentionForward& call) noexcept
      : q(call.q),
        k(call.k),
        v(call.v),
        sinks(call.sinks),
        attn_bias(call.attn_bias),
        attn_mask(call.attn_mask),
        prior_out(call.prior_out),
        prior_lse(call.prior_lse),
        out(call.out),
        lse(call.lse),
        k_scale(call.k_scale),
        v_scale(call.v_scale),
        sequences(call.sequences ? BoundSequences(*call.sequences)
                                 : BoundSequences(AttentionSequences())) {
    if (call.sequences) params.sequences = &sequences.params;
    params.q = q;
    params.k = k;
    params.v = v;
    params.sinks = sinks;
    params.attn_bias = attn_bias;
    params.attn_mask = attn_mask;
    params.prior_out = prior_out;
    params.prior_lse = prior_lse;
    params.out = out;
    params.lse = lse;
    params.k_scale = k_scale;
    params.v_scale = v_scale;
    set_scores(call, &params);
  }
};

template <>
struct Bound<AttentionBackward> {
  static constexpr auto plan = flashmoe_attention_backward_plan;
  static constexpr auto workspace_size = flashmoe_attention_backward_workspace_size;
  static constexpr auto run = flashmoe_attention_backward;

  Argument dout, q, k, v, out, lse, dlse, sinks, attn_bias, attn_mask, dq, dk, dv, dsinks;
  BoundSequences sequences;
  flashmoe_attention_backward_params params = flashmoe_attention_backward_params_init();

  explicit Bound(const AttentionBackward& call) noexcept
      : dout(call.dout),
        q(call.q),
        k(call.k),
        v(call.v),
        out(call.out),
        lse(call.lse),
        dlse(call.dlse),
        sinks(call.sinks),
        attn_bias(call.attn_bias),
        attn_mask(call.attn_mask),
        dq(call.dq),
        dk(call.dk),
        dv(call.dv),
        dsinks(call.dsinks),
        sequences(call.sequences ? BoundSequences(*call.sequences)
                                 : BoundSequences(AttentionSequences())) {
    if (call.sequences) params.sequences = &sequences.params;
    params.dout = dout;
    params.q = q;
    params.k = k;
    params.v = v;
    params.out = out;
    params.lse = lse;
    params.dlse = dlse;
    params.sinks = sinks;
    params.attn_bias = attn_bias;
    params.attn_mask = attn_mask;
    params.dq = dq;
    params.dk = dk;
    params.dv = dv;
    params.dsinks = dsinks;
    params.accumulate = call.accumulate ? 1 : 0;
    set_scores(call, &params);
  }
};

template <>
struct Bound<MergeStates> {
  static constexpr auto plan = flashmoe_merge_states_plan;
  static constexpr auto workspace_size = flashmoe_merge_states_workspace_size;
  static constexpr auto run = flashmoe_merge_states;

  Argument outs, lses, prior_out, prior_lse, out, lse;
  flashmoe_merge_states_params params = flashmoe_merge_states_params_init();

  explicit Bound(const MergeStates& call) noexcept
      : outs(call.outs),
        lses(call.lses),
        prior_out(call.prior_out),
        prior_lse(call.prior_lse),
        out(call.out),
        lse(call.lse) {
    params.outs = outs;
    params.lses = lses;
    params.prior_out = prior_out;
    params.prior_lse = prior_lse;
    params.out = out;
    params.lse = lse;
    params.layout = static_cast<int32_t>(call.layout);
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<KvAppend> {
  static constexpr auto plan = flashmoe_kv_append_plan;
  static constexpr auto workspace_size = flashmoe_kv_append_workspace_size;
  static constexpr auto run = flashmoe_kv_append;

  Argument k, v, k_cache, v_cache, slots, cache_seqlens, cu_seqlens, seqused, batch_index;
  Argument page_table, positions, rotary_cos, rotary_sin, q, q_out, k_scale, v_scale;
  flashmoe_kv_append_params params = flashmoe_kv_append_params_init();

  explicit Bound(const KvAppend& call) noexcept
      : k(call.k),
        v(call.v),
        k_cache(call.k_cache),
        v_cache(call.v_cache),
        slots(call.slots),
        cache_seqlens(call.cache_seqlens),
        cu_seqlens(call.cu_seqlens),
        seqused(call.seqused),
        batch_index(call.batch_index),
        page_table(call.page_table),
        positions(call.positions),
        rotary_cos(call.rotary_cos),
        rotary_sin(call.rotary_sin),
        q(call.q),
        q_out(call.q_out),
        k_scale(call.k_scale),
        v_scale(call.v_scale) {
    params.k_scale = k_scale;
    params.v_scale = v_scale;
    params.k = k;
    params.v = v;
    params.k_cache = k_cache;
    params.v_cache = v_cache;
    params.slots = slots;
    params.cache_seqlens = cache_seqlens;
    params.cu_seqlens = cu_seqlens;
    params.seqused = seqused;
    params.batch_index = batch_index;
    params.page_table = page_table;
    params.positions = positions;
    params.rotary_cos = rotary_cos;
    params.rotary_sin = rotary_sin;
    params.q = q;
    params.q_out = q_out;
    params.rotary = static_cast<int32_t>(call.rotary);
    params.q_stays = call.q_stays ? 1 : 0;
    params.layout = static_cast<int32_t>(call.layout);
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<CheckSequences> {
  static constexpr auto plan = flashmoe_check_sequences_plan;
  static constexpr auto workspace_size = flashmoe_check_sequences_workspace_size;
  static constexpr auto run = flashmoe_check_sequences;

  Argument q, k, status;
  BoundSequences sequences;
  flashmoe_check_sequences_params params = flashmoe_check_sequences_params_init();

  explicit Bound(const CheckSequences& call) noexcept
      : q(call.q), k(call.k), status(call.status), sequences(call.sequences) {
    params.q = q;
    params.k = k;
    params.sequences = &sequences.params;
    params.status = status;
    params.layout = static_cast<int32_t>(call.layout);
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<KvGather> {
  static constexpr auto plan = flashmoe_kv_gather_plan;
  static constexpr auto workspace_size = flashmoe_kv_gather_workspace_size;
  static constexpr auto run = flashmoe_kv_gather;

  Argument k_cache, v_cache, cu_seqlens_k, seqused_k, k_begin, batch_index, page_table, k, v;
  Argument k_scale, v_scale;
  flashmoe_kv_gather_params params = flashmoe_kv_gather_params_init();

  explicit Bound(const KvGather& call) noexcept
      : k_cache(call.k_cache),
        v_cache(call.v_cache),
        cu_seqlens_k(call.cu_seqlens_k),
        seqused_k(call.seqused_k),
        k_begin(call.k_begin),
        batch_index(call.batch_index),
        page_table(call.page_table),
        k(call.k),
        v(call.v),
        k_scale(call.k_scale),
        v_scale(call.v_scale) {
    params.k_cache = k_cache;
    params.v_cache = v_cache;
    params.cu_seqlens_k = cu_seqlens_k;
    params.seqused_k = seqused_k;
    params.k_begin = k_begin;
    params.batch_index = batch_index;
    params.page_table = page_table;
    params.k = k;
    params.v = v;
    params.k_scale = k_scale;
    params.v_scale = v_scale;
    params.layout = static_cast<int32_t>(call.layout);
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<MoeRoute> {
  static constexpr auto plan = flashmoe_moe_route_plan;
  static constexpr auto workspace_size = flashmoe_moe_route_workspace_size;
  static constexpr auto run = flashmoe_moe_route;

  Argument logits, selection_bias, given_ids, given_weights, expert_map;
  Argument ids, weights, offsets, pairs, slots, lse;
  flashmoe_moe_route_params params = flashmoe_moe_route_params_init();

  explicit Bound(const MoeRoute& call) noexcept
      : logits(call.logits),
        selection_bias(call.selection_bias),
        given_ids(call.given_ids),
        given_weights(call.given_weights),
        expert_map(call.expert_map),
        ids(call.ids),
        weights(call.weights),
        offsets(call.offsets),
        pairs(call.pairs),
        slots(call.slots),
        lse(call.lse) {
    params.logits = logits;
    params.selection_bias = selection_bias;
    params.given_ids = given_ids;
    params.given_weights = given_weights;
    params.expert_map = expert_map;
    params.ids = ids;
    params.weights = weights;
    params.offsets = offsets;
    params.pairs = pairs;
    params.slots = slots;
    params.lse = lse;
    params.scoring = static_cast<int32_t>(call.scoring);
    params.renormalize = call.renormalize ? 1 : 0;
    params.num_groups = call.num_groups;
    params.top_groups = call.top_groups;
    params.scale = call.scale;
  }
};

template <>
struct Bound<MoeForward> {
  static constexpr auto plan = flashmoe_moe_forward_plan;
  static constexpr auto workspace_size = flashmoe_moe_forward_workspace_size;
  static constexpr auto run = flashmoe_moe_forward;

  Argument x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down;
  Argument weights, offsets, pairs, slots, out, pre_activation;
  flashmoe_moe_forward_params params = flashmoe_moe_forward_params_init();

  explicit Bound(const MoeForward& call) noexcept
      : x(call.x),
        w_gate_up(call.w_gate_up),
        w_up(call.w_up),
        w_down(call.w_down),
        b_gate_up(call.b_gate_up),
        b_up(call.b_up),
        b_down(call.b_down),
        weights(call.weights),
        offsets(call.offsets),
        pairs(call.pairs),
        slots(call.slots),
        out(call.out),
        pre_activation(call.pre_activation) {
    params.x = x;
    params.w_gate_up = w_gate_up;
    params.w_up = w_up;
    params.w_down = w_down;
    params.b_gate_up = b_gate_up;
    params.b_up = b_up;
    params.b_down = b_down;
    params.weights = weights;
    params.offsets = offsets;
    params.pairs = pairs;
    params.slots = slots;
    params.out = out;
    params.pre_activation = pre_activation;
    params.gate = static_cast<int32_t>(call.gate);
    params.activation = static_cast<int32_t>(call.activation);
    params.alpha = call.alpha;
    params.limit = call.limit;
    params.up_offset = call.up_offset;
    params.weight_on_input = call.weight_on_input ? 1 : 0;
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<FusedMoe> {
  static constexpr auto plan = flashmoe_fused_moe_plan;
  static constexpr auto workspace_size = flashmoe_fused_moe_workspace_size;
  static constexpr auto run = flashmoe_fused_moe;

  Argument tokens, router_weights, router_bias, logits, selection_bias;
  Argument w_gate_up, w_up, w_down, b_gate_up, b_up, b_down, out;
  flashmoe_fused_moe_params params = flashmoe_fused_moe_params_init();

  explicit Bound(const FusedMoe& call) noexcept
      : tokens(call.tokens),
        router_weights(call.router_weights),
        router_bias(call.router_bias),
        logits(call.logits),
        selection_bias(call.selection_bias),
        w_gate_up(call.w_gate_up),
        w_up(call.w_up),
        w_down(call.w_down),
        b_gate_up(call.b_gate_up),
        b_up(call.b_up),
        b_down(call.b_down),
        out(call.out) {
    params.tokens = tokens;
    params.router_weights = router_weights;
    params.router_bias = router_bias;
    params.logits = logits;
    params.selection_bias = selection_bias;
    params.w_gate_up = w_gate_up;
    params.w_up = w_up;
    params.w_down = w_down;
    params.b_gate_up = b_gate_up;
    params.b_up = b_up;
    params.b_down = b_down;
    params.out = out;
    params.top_k = call.top_k;
    params.scoring = static_cast<int32_t>(call.scoring);
    params.renormalize = call.renormalize ? 1 : 0;
    params.num_groups = call.num_groups;
    params.top_groups = call.top_groups;
    params.scale = call.scale;
    params.gate = static_cast<int32_t>(call.gate);
    params.activation = static_cast<int32_t>(call.activation);
    params.alpha = call.alpha;
    params.limit = call.limit;
    params.up_offset = call.up_offset;
    params.weight_on_input = call.weight_on_input ? 1 : 0;
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<GroupedProduct> {
  static constexpr auto plan = flashmoe_grouped_product_plan;
  static constexpr auto workspace_size = flashmoe_grouped_product_workspace_size;
  static constexpr auto run = flashmoe_grouped_product;

  Argument x, w, bias, offsets, counts, out;
  flashmoe_grouped_product_params params = flashmoe_grouped_product_params_init();

  explicit Bound(const GroupedProduct& call) noexcept
      : x(call.x),
        w(call.w),
        bias(call.bias),
        offsets(call.offsets),
        counts(call.counts),
        out(call.out) {
    params.x = x;
    params.w = w;
    params.bias = bias;
    params.offsets = offsets;
    params.counts = counts;
    params.out = out;
    params.kernel = call.kernel;
  }
};

template <>
struct Bound<MoeBackward> {
  static constexpr auto plan = flashmoe_moe_backward_plan;
  static constexpr auto workspace_size = flashmoe_moe_backward_workspace_size;
  static constexpr auto run = flashmoe_moe_backward;

  Argument dout, x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down, weights, offsets, pairs,
      slots, pre_activation, dx, dw_gate_up, dw_up, dw_down, db_gate_up, db_up, db_down, dweights;
  flashmoe_moe_backward_params params = flashmoe_moe_backward_params_init();

  explicit Bound(const MoeBackward& call) noexcept
      : dout(call.dout),
        x(call.x),
        w_gate_up(call.w_gate_up),
        w_up(call.w_up),
        w_down(call.w_down),
        b_gate_up(call.b_gate_up),
        b_up(call.b_up),
        b_down(call.b_down),
        weights(call.weights),
        offsets(call.offsets),
        pairs(call.pairs),
        slots(call.slots),
        pre_activation(call.pre_activation),
        dx(call.dx),
        dw_gate_up(call.dw_gate_up),
        dw_up(call.dw_up),
        dw_down(call.dw_down),
        db_gate_up(call.db_gate_up),
        db_up(call.db_up),
        db_down(call.db_down),
        dweights(call.dweights) {
    params.dout = dout;
    params.x = x;
    params.w_gate_up = w_gate_up;
    params.w_up = w_up;
    params.w_down = w_down;
    params.b_gate_up = b_gate_up;
    params.b_up = b_up;
    params.b_down = b_down;
    params.weights = weights;
    params.offsets = offsets;
    params.pairs = pairs;
    params.slots = slots;
    params.pre_activation = pre_activation;
    params.dx = dx;
    params.dw_gate_up = dw_gate_up;
    params.dw_up = dw_up;
    params.dw_down = dw_down;
    params.db_gate_up = db_gate_up;
    params.db_up = db_up;
    params.db_down = db_down;
    params.dweights = dweights;
    params.gate = static_cast<int32_t>(call.gate);
    params.activation = static_cast<int32_t>(call.activation);
    params.alpha = call.alpha;
    params.limit = call.limit;
    params.up_offset = call.up_offset;
    params.weight_on_input = call.weight_on_input ? 1 : 0;
    params.accumulate = call.accumulate ? 1 : 0;
    params.kernel = call.kernel;
    params.max_workspace_bytes = call.max_workspace_bytes;
    params.overwrite_pre_activation = call.overwrite_pre_activation ? 1 : 0;
  }
};

template <>
struct Bound<MoeRouteBackward> {
  static constexpr auto plan = flashmoe_moe_route_backward_plan;
  static constexpr auto workspace_size = flashmoe_moe_route_backward_workspace_size;
  static constexpr auto run = flashmoe_moe_route_backward;

  Argument dweights, ids, logits, given_weights, dlse, dlogits, dgiven_weights;
  flashmoe_moe_route_backward_params params = flashmoe_moe_route_backward_params_init();

  explicit Bound(const MoeRouteBackward& call) noexcept
      : dweights(call.dweights),
        ids(call.ids),
        logits(call.logits),
        given_weights(call.given_weights),
        dlse(call.dlse),
        dlogits(call.dlogits),
        dgiven_weights(call.dgiven_weights) {
    params.dweights = dweights;
    params.ids = ids;
    params.logits = logits;
    params.given_weights = given_weights;
    params.dlse = dlse;
    params.dlogits = dlogits;
    params.dgiven_weights = dgiven_weights;
    params.scoring = static_cast<int32_t>(call.scoring);
    params.renormalize = call.renormalize ? 1 : 0;
    params.scale = call.scale;
    params.accumulate = call.accumulate ? 1 : 0;
  }
};

template <>
struct Bound<GroupedProductBackward> {
  static constexpr auto plan = flashmoe_grouped_product_backward_plan;
  static constexpr auto workspace_size = flashmoe_grouped_product_backward_workspace_size;
  static constexpr auto run = flashmoe_grouped_product_backward;

  Argument dout, x, w, offsets, counts, dx, dw, dbias;
  flashmoe_grouped_product_backward_params params = flashmoe_grouped_product_backward_params_init();

  explicit Bound(const GroupedProductBackward& call) noexcept
      : dout(call.dout),
        x(call.x),
        w(call.w),
        offsets(call.offsets),
        counts(call.counts),
        dx(call.dx),
        dw(call.dw),
        dbias(call.dbias) {
    params.dout = dout;
    params.x = x;
    params.w = w;
    params.offsets = offsets;
    params.counts = counts;
    params.dx = dx;
    params.dw = dw;
    params.dbias = dbias;
    params.accumulate = call.accumulate ? 1 : 0;
    params.kernel = call.kernel;
  }
};

}  // namespace detail

// Tells how a call would be computed. Launches nothing and reads no tensor data.
template <class Call>
Result<flashmoe_plan> plan(const Call& call) {
  const detail::Bound<Call> bound(call);
  flashmoe_plan plan = flashmoe_plan_init();
  const detail::Outcome outcome = detail::Bound<Call>::plan(&bound.params, &plan);
  return detail::result(outcome, plan);
}

// Bytes of workspace that a call needs.
template <class Call>
Result<std::size_t> workspace_size(const Call& call) {
  const detail::Bound<Call> bound(call);
  std::size_t bytes = 0;
  const detail::Outcome outcome = detail::Bound<Call>::workspace_size(&bound.params, &bytes);
  return detail::result(outcome, bytes);
}

// Runs a call in `workspace`, memory of the tensors' device of `bytes` bytes; on a GPU on `stream`,
// a cudaStream_t.
template <class Call>
Result<void> run(const Call& call, void* workspace, std::size_t bytes, void* stream = nullptr) {
  const detail::Bound<Call> bound(call);
  return detail::result(detail::Bound<Call>::run(&bound.params, workspace, bytes, stream));
}

// ---- memory -------------------------------------------------------------------------------------

// Host memory, aligned as every call needs. Other kinds of memory are classes like this one:
// `allocate` returns nullptr when no memory is left; `deallocate` takes back what it gave.
struct HostMemory {
  static constexpr std::align_val_t kAlignment{256};

  void* allocate(std::size_t bytes) noexcept {
    return ::operator new(bytes, kAlignment, std::nothrow);
  }
  void deallocate(void* memory, std::size_t) noexcept { ::operator delete(memory, kAlignment); }
};

// An owner of memory: moved, not copied; freed by the destructor.
template <class Memory = HostMemory>
class Buffer {
 public:
  explicit Buffer(Memory memory = {}) noexcept : memory_(std::move(memory)) {}
  Buffer(Buffer&& other) noexcept
      : memory_(other.memory_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      release();
      memory_ = other.memory_;
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  // Holds at least `bytes` bytes. A buffer that is too small is freed first, so no GPU work may be
  // using it, unless `Memory` waits for that (cudaFree does; so does cudaFreeAsync on the stream of
  // the calls).
  Result<void> reserve(std::size_t bytes) { return detail::result(try_reserve(bytes)); }

  detail::Outcome try_reserve(std::size_t bytes) {
    if (bytes <= size_) return {};
    release();
    data_ = memory_.allocate(bytes);
    if (data_ == nullptr) {
      std::snprintf(detail::own_sentence(), detail::kOwnSentence,
                    "memory: got none of the %zu bytes that are needed", bytes);
      return {FLASHMOE_ERROR_OUT_OF_MEMORY, detail::own_sentence()};
    }
    size_ = bytes;
    return {};
  }

 private:
  void release() noexcept {
    if (data_ != nullptr) memory_.deallocate(data_, size_);
    data_ = nullptr;
    size_ = 0;
  }

  Memory memory_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// A host workspace for the calls of one thread or one stream. Keep it, and it stops growing.
using Workspace = Buffer<HostMemory>;

// Runs a call in a workspace that grows when too small.
template <class Call, class Memory>
Result<void> run(const Call& call, Buffer<Memory>& workspace, void* stream = nullptr) {
  const detail::Bound<Call> bound(call);
  std::size_t bytes = 0;
  detail::Outcome outcome = detail::Bound<Call>::workspace_size(&bound.params, &bytes);
  if (outcome.status == FLASHMOE_OK) outcome = workspace.try_reserve(bytes);
  if (outcome.status == FLASHMOE_OK) {
    outcome = detail::Bound<Call>::run(&bound.params, workspace.data(), bytes, stream);
  }
  return detail::result(outcome);
}

// What the routing writes and the layer reads, in one buffer.
template <class Memory>
class BasicRouting {
 public:
  // For `tokens` tokens with `top_k` of `num_experts` experts each, on `device`.
  static Result<BasicRouting> create(int64_t tokens, int64_t top_k, int64_t num_experts,
                                     Device device = Device::cpu(), Memory memory = {}) {
    BasicRouting routing{Buffer<Memory>(std::move(memory))};
    const detail::Outcome outcome = routing.allocate(tokens, top_k, num_experts, device);
    return detail::result(outcome, std::move(routing));
  }

  const TensorView& ids() const noexcept { return ids_; }          // [T, K] int32
  const TensorView& weights() const noexcept { return weights_; }  // [T, K] fp32
  const TensorView& offsets() const noexcept { return offsets_; }  // [E + 1] int32
  const TensorView& pairs() const noexcept { return pairs_; }      // [T * K] int32
  const TensorView& slots() const noexcept { return slots_; }      // [T, K] int32

  // Lets a routing write here.
  void attach(MoeRoute& call) const noexcept {
    call.ids = ids_;
    call.weights = weights_;
    call.offsets = offsets_;
    call.pairs = pairs_;
    call.slots = slots_;
  }
  // Lets a layer read what was written.
  void attach(MoeForward& call) const noexcept {
    call.weights = weights_;
    call.offsets = offsets_;
    call.pairs = pairs_;
    call.slots = slots_;
  }
  // Lets the layer's gradients read it.
  void attach(MoeBackward& call) const noexcept {
    call.weights = weights_;
    call.offsets = offsets_;
    call.pairs = pairs_;
    call.slots = slots_;
  }

 private:
  explicit BasicRouting(Buffer<Memory> buffer) noexcept : buffer_(std::move(buffer)) {}

  detail::Outcome allocate(int64_t tokens, int64_t top_k, int64_t num_experts, Device device) {
    // More pairs than any call takes are refused here; the call itself refuses too many experts.
    if (tokens < 0 || top_k < 0 || num_experts < 0 || tokens > INT32_MAX || top_k > INT32_MAX ||
        num_experts >= INT32_MAX || tokens * top_k > INT32_MAX) {
      std::snprintf(detail::own_sentence(), detail::kOwnSentence,
                    "routing: got %lld tokens with %lld of %lld experts each, accepted are up to "
                    "%lld pairs",
                    static_cast<long long>(tokens), static_cast<long long>(top_k),
                    static_cast<long long>(num_experts), static_cast<long long>(INT32_MAX));
      return {FLASHMOE_ERROR_INVALID_ARGUMENT, detail::own_sentence()};
    }
    const int64_t pairs = tokens * top_k;
    const std::size_t piece = align(static_cast<std::size_t>(pairs) * 4);
    const std::size_t offsets = align(static_cast<std::size_t>(num_experts + 1) * 4);
    const detail::Outcome outcome = buffer_.try_reserve(4 * piece + offsets);
    if (outcome.status != FLASHMOE_OK) return outcome;
    auto* const at = static_cast<unsigned char*>(buffer_.data());
    ids_ = TensorView(at, kInt32, {tokens, top_k}, device);
    weights_ = TensorView(at + piece, kFp32, {tokens, top_k}, device);
    pairs_ = TensorView(at + 2 * piece, kInt32, {pairs}, device);
    slots_ = TensorView(at + 3 * piece, kInt32, {tokens, top_k}, device);
    offsets_ = TensorView(at + 4 * piece, kInt32, {num_experts + 1}, device);
    return {};
  }

  static std::size_t align(std::size_t bytes) noexcept { return (bytes + 255) / 256 * 256; }

  Buffer<Memory> buffer_;
  TensorView ids_, weights_, offsets_, pairs_, slots_;
};

using Routing = BasicRouting<HostMemory>;

// ---- the library --------------------------------------------------------------------------------

// Version of the loaded library: major * 10000 + minor * 100 + patch.
inline uint32_t version() noexcept { return flashmoe_version(); }

// What is in the library.
inline Result<flashmoe_build_info> build_info() {
  flashmoe_build_info info = flashmoe_build_info_init();
  const detail::Outcome outcome = flashmoe_get_build_info(&info);
  return detail::result(outcome, info);
}

// Number of usable CUDA devices.
inline int32_t cuda_device_count() noexcept { return flashmoe_cuda_device_count(); }

inline Result<flashmoe_device_info> device_info(Device device) {
  flashmoe_device_info info = flashmoe_device_info_init();
  const detail::Outcome outcome = flashmoe_get_device_info(device.c(), &info);
  return detail::result(outcome, info);
}

// The launches of this thread's last call that launched something, in their order.
struct Launches {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count;

  const flashmoe_launch* begin() const noexcept { return launches; }
  const flashmoe_launch* end() const noexcept { return launches + count; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(count); }
  const flashmoe_launch& operator[](std::size_t i) const noexcept { return launches[i]; }
};

inline Result<Launches> last_launches() {
  Launches launches = {};
  const detail::Outcome outcome = flashmoe_last_launches(launches.launches, &launches.count);
  return detail::result(outcome, launches);
}

// Sets the threads of the CPU backend; 0 restores the default.
inline Result<void> set_num_threads(int32_t n) {
  return detail::result(flashmoe_set_num_threads(n));
}
inline int32_t num_threads() noexcept { return flashmoe_get_num_threads(); }

// Sets level and destination of the log. Without a callback the destination stays. A replaced
// callback may still be running on another thread, so keep what `user` points to.
inline Result<void> set_log(flashmoe_log_level level, flashmoe_log_callback callback = nullptr,
                            void* user = nullptr) {
  return detail::result(flashmoe_set_log(level, callback, user));
}

}  // inline namespace

}  // namespace flashmoe

#endif  // FLASHMOE_FLASHMOE_HPP_
