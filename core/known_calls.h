// Calls that a thread planned before. Programs repeat few shapes, and validating and planning one
// costs the host more than launching it.
//
// A call is found again by everything that its validation and its plan read, compared exactly, but
// for addresses; the rules for those are checked anew. What a failed call came to is not kept. Only
// calls on a GPU are: their plans follow from the problem and the device, where the CPU's follow
// from the number of threads too.
//
// An operation is a struct of static members, of which these are read here:
//   Params, Problem, Plan, Family      the C ABI's argument, what validation makes of it, ...
//   kTensors                           a KnownTensor of each tensor of Params, in its order
//   kFirstOutput                       the first of these that is written, as all behind it are
//   kOptions, kKernel                  offsets in Params: behind its tensors, and of its kernel's
//                                      name, or of its end where it has none
//   address(params, &problem, visit)   visit(pointer, index) of each pointer of the problem into
//                                      tensor `index`; pointers may be nullptr
//   kernel_text(&problem)              its pointer to the name that the caller gave, or nullptr
//   make_call(params, explain, &call)  all that is done for a call that is not known
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/checks.h"
#include "core/gpu_model.h"
#include "core/log.h"
#include "core/overlap.h"
#include "core/per_thread.h"
#include "core/thread_room.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

template <class Operation>
struct PlannedCall {
  typename Operation::Problem problem;
  mutable typename Operation::Plan plan;  // check_memory fits it to the workspace of a launch
  const typename Operation::Family* family;
  Reach reaches[Operation::kTensors.size()];
};

template <class Operation>
void set_reaches(const typename Operation::Params& params, PlannedCall<Operation>* call) {
  for (size_t i = 0; i < Operation::kTensors.size(); ++i) {
    call->reaches[i] = Reach::of(params.*Operation::kTensors[i].member);
  }
}

// One tensor of an operation, and the rules for its address.
template <class Params>
struct KnownTensor {
  const char* name;
  const flashmoe_tensor* Params::* member;
  bool
      has_rows;  // it begins on a multiple of kRowAlignment bytes, others on one of their elements'
};

// A tensor but for its address.
struct KnownShape {
  // Device, ndim and dtype are one run of bytes, and compared as such.
  static constexpr size_t kKind = offsetof(flashmoe_tensor, device);
  static constexpr size_t kKindBytes = offsetof(flashmoe_tensor, shape) - kKind;
  static_assert(kKindBytes == sizeof(flashmoe_device) + sizeof(int32_t) + sizeof(flashmoe_dtype));

  unsigned char kind[kKindBytes];
  bool given;
  bool strided;
  int32_t rank;
  uintptr_t low_bits;  // of its address, all 0
  int64_t extents[kMaxRank];
  int64_t strides[kMaxRank];  // if strided

  static KnownShape of(const flashmoe_tensor* tensor, bool has_rows);

  // Whether a tensor has this shape and an address that validation would not refuse.
  bool fits(const flashmoe_tensor* tensor) const {
    if (tensor == nullptr || !given) return tensor == nullptr && !given;
    if (std::memcmp(reinterpret_cast<const unsigned char*>(tensor) + kKind, kind, kKindBytes) !=
            0 ||
        tensor->shape == nullptr || (tensor->strides != nullptr) != strided ||
        tensor->data == nullptr || tensor->byte_offset != 0 ||
        (reinterpret_cast<uintptr_t>(tensor->data) & low_bits) != 0) {
      return false;
    }
    int64_t difference = 0;
    for (int axis = 0; axis < rank; ++axis) difference |= tensor->shape[axis] ^ extents[axis];
    if (!strided) return difference == 0;
    for (int axis = 0; axis < rank; ++axis) difference |= tensor->strides[axis] ^ strides[axis];
    return difference == 0;
  }
};

// The calls of one operation that a thread knows.
template <class Operation>
class KnownCalls {
 public:
  using Params = typename Operation::Params;
  using Call = PlannedCall<Operation>;

  // What this thread kept of such a call, with the pointers of the call at hand, or nullptr. Valid
  // until the thread's next call, which a log's callback may make.
  static const Call* find(const Params* params) {
    if (params == nullptr || params->struct_size != sizeof *params) return nullptr;
    KnownCalls* const known = PerThread<KnownCalls>::existing();
    if (known == nullptr) return nullptr;
    const unsigned count = known->count_;
    unsigned index = known->newest_;
    for (unsigned i = 0; i < count; ++i, index = index + 1 < count ? index + 1 : 0) {
      if (!fits(*params, known->keys_[index])) continue;
      known->newest_ = index;
      move(*params, &known->keys_[index], &known->calls_[index]);
      return &known->calls_[index];
    }
    return nullptr;
  }

  // Keeps what a call came to that was validated and planned without an error, if there is memory for it.
  static void remember(const Params& params, const Call& call) {
    const char* kernel = kernel_of(params);
    if (call.problem.device.device_type != FLASHMOE_DEVICE_CUDA || !is_plain(params) ||
        std::strlen(kernel) >= sizeof Key::kernel) {
      return;
    }
    KnownCalls* const known = PerThread<KnownCalls>::get();
    if (known == nullptr) return;
    const bool full = known->count_ == kCalls;
    const unsigned index =
        full && known->next_ == known->newest_ ? (known->next_ + 1) % kCalls : known->next_;
    known->count_ += full ? 0 : 1;
    known->next_ = (index + 1) % kCalls;
    known->newest_ = index;
    Key& key = known->keys_[index];
    for (size_t i = 0; i < kTensors; ++i) {
      const flashmoe_tensor* tensor = params.*Operation::kTensors[i].member;
      key.shapes[i] = KnownShape::of(tensor, Operation::kTensors[i].has_rows);
      key.data[i] = tensor != nullptr ? tensor->data : nullptr;
    }
    std::memcpy(key.options, bytes_of(params) + Operation::kOptions, kOptionsBytes);
    std::memcpy(key.more_options, bytes_of(params) + kMoreOptions, kMoreOptionsBytes);
    std::memcpy(key.kernel, kernel, std::strlen(kernel) + 1);
    known->calls_[index] = call;
    const char** text = Operation::kernel_text(&known->calls_[index].problem);
    if (text != nullptr && *text != nullptr && **text == '\0')
      *text = nullptr;  // it means the same
  }

 private:
  static constexpr unsigned kCalls = 8;  // a few kinds of layers, each in a few ways
  static constexpr size_t kTensors = Operation::kTensors.size();
  static constexpr bool kHasKernel = Operation::kKernel < sizeof(Params);
  static constexpr size_t kOptionsBytes = Operation::kKernel - Operation::kOptions;
  static constexpr size_t kMoreOptions = Operation::kKernel + (kHasKernel ? sizeof(char*) : 0);
  static constexpr size_t kMoreOptionsBytes = sizeof(Params) - kMoreOptions;
  static_assert(sizeof(size_t) + kTensors * sizeof(void*) == Operation::kOptions,
                "a tensor is missing");

  struct Key {
    KnownShape shapes[kTensors];
    const void* data[kTensors];                // of the call that was found last
    unsigned char options[kOptionsBytes + 1];  // in which a field appended to Params is, too
    unsigned char more_options[kMoreOptionsBytes + 1];
    char kernel[64];  // "" for nullptr, which means the same
  };

  static const unsigned char* bytes_of(const Params& params) {
    return reinterpret_cast<const unsigned char*>(&params);
  }

  static const char* kernel_of(const Params& params) {
    const char* kernel = nullptr;
    if (kHasKernel) std::memcpy(&kernel, bytes_of(params) + Operation::kKernel, sizeof kernel);
    return kernel != nullptr ? kernel : "";
  }

  // Whether every tensor begins where it says: only such calls are kept, and found again.
  static bool is_plain(const Params& params) {
    for (const auto& each : Operation::kTensors) {
      const flashmoe_tensor* tensor = params.*each.member;
      if (tensor == nullptr) continue;
      if (tensor->data == nullptr || tensor->byte_offset != 0) return false;
    }
    return params.struct_size == sizeof params;
  }

  static bool fits(const Params& params, const Key& key) {
    for (size_t i = 0; i < kTensors; ++i) {
      if (!key.shapes[i].fits(params.*Operation::kTensors[i].member)) return false;
    }
    return std::memcmp(bytes_of(params) + Operation::kOptions, key.options, kOptionsBytes) == 0 &&
           std::memcmp(bytes_of(params) + kMoreOptions, key.more_options, kMoreOptionsBytes) == 0 &&
           std::strcmp(kernel_of(params), key.kernel) == 0;
  }

  // Brings a known call to the addresses of the call at hand.
  static void move(const Params& params, Key* key, Call* call) {
    ptrdiff_t bytes[kTensors];
    for (size_t i = 0; i < kTensors; ++i) {
      if (!key->shapes[i].given) continue;
      const void* const data = (params.*Operation::kTensors[i].member)->data;
      bytes[i] = reinterpret_cast<intptr_t>(data) - reinterpret_cast<intptr_t>(key->data[i]);
      key->data[i] = data;
    }
    Operation::address(params, &call->problem, [&bytes](auto** pointer, size_t index) {
      if (*pointer == nullptr) return;
      using Pointer = std::remove_reference_t<decltype(*pointer)>;
      *pointer = reinterpret_cast<Pointer>(reinterpret_cast<intptr_t>(*pointer) + bytes[index]);
    });
    const char** text = Operation::kernel_text(&call->problem);
    if (text != nullptr && *text != nullptr && key->kernel[0] != '\0') {
      *text = kernel_of(params);  // the text is the caller's
    }
  }

  unsigned count_;   // places in use, the first ones
  unsigned next_;    // the place to use next
  unsigned newest_;  // the place of the call that was found or remembered last
  Key keys_[kCalls];
  Call calls_[kCalls];
};

// Does work(call, logged) with a call that is known or is made now, and then kept. A log's callback may
// itself call the library, and so put another call in a known one's place: with a log none is looked up.
template <class Operation, class Work>
flashmoe_status with_call(const typename Operation::Params* params, const Work& work) {
  const bool logged = log_enabled(FLASHMOE_LOG_INFO);
  if (!logged) {
    const PlannedCall<Operation>* known = KnownCalls<Operation>::find(params);
    if (known != nullptr) return work(*known, logged);
  }
  PlannedCall<Operation> call;
  FLASHMOE_TRY(Operation::make_call(params, log_enabled(FLASHMOE_LOG_DEBUG), &call));
  if (!logged) KnownCalls<Operation>::remember(*params, call);
  return work(call, logged);
}

// Plans are made for models of GPUs, and nothing is launched on one.
template <class Operation>
flashmoe_status check_runs_here(const typename Operation::Params& params, flashmoe_device device) {
  if (device.device_type != FLASHMOE_DEVICE_CUDA || !is_gpu_model(device.device_id)) {
    return FLASHMOE_OK;
  }
  const char* name = nullptr;
  for (const auto& each : Operation::kTensors) {
    if (name == nullptr && params.*each.member != nullptr) name = each.name;
  }
  return fail(FLASHMOE_ERROR_NO_DEVICE,
              "%s: it is on %s, which is a model of GPUs and no device: accepted in plans alone",
              name, DeviceName(device).text);
}

// What launches check of the memory that a call writes: its workspace is there, `query` tells how much,
// and nothing is written to that the call has another use for. On the CPU a smaller workspace may do, by
// fewer threads.
template <class Operation>
flashmoe_status check_memory(const typename Operation::Params& params,
                             const PlannedCall<Operation>& call, const void* workspace,
                             size_t workspace_size, size_t alignment, const char* query) {
  FLASHMOE_TRY(check_runs_here<Operation>(params, call.problem.device));
  fit_threads(call.plan.room, workspace_size, &call.plan.info);
  const uint64_t needed = call.plan.info.workspace_bytes;
  FLASHMOE_TRY(check_workspace(needed, workspace, workspace_size, alignment, query));
  return check_apart<Operation>(params, call.reaches, workspace, needed);
}

}  // namespace flashmoe
