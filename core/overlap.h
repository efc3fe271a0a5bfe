// Checks that what a call writes, its outputs and its workspace, overlaps nothing else of the call.
// The rule is the same for every operation and holds for every launch. Plans need no memory and
// accept any addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// How many bytes a tensor reaches below its first element, and from there up; 0 and 0 if it is
// empty or absent.
struct Reach {
  uint64_t below;
  uint64_t above;

  // `tensor` has passed validation, or is nullptr.
  static Reach of(const flashmoe_tensor* tensor);
};

// Addresses [begin, end), including gaps within a tensor. {0, 0} is empty and meets no other.
struct Region {
  uintptr_t begin;
  uintptr_t end;

  static Region of(const flashmoe_tensor* tensor, const Reach& reach) {
    if (reach.above == 0) return {0, 0};
    const uintptr_t first =
        reinterpret_cast<uintptr_t>(tensor->data) + static_cast<uintptr_t>(tensor->byte_offset);
    return {first - reach.below, first + reach.above};
  }
  static Region of(const void* memory, uint64_t bytes) {
    if (memory == nullptr || bytes == 0) return {0, 0};
    return {reinterpret_cast<uintptr_t>(memory), reinterpret_cast<uintptr_t>(memory) + bytes};
  }

  // Whether the strides leave the address space; such a region meets no other.
  bool is_outside() const { return begin > end; }

  // Without a branch, since few of many pairs meet.
  bool meets(const Region& other) const {
    return static_cast<int>(begin < other.end) & static_cast<int>(other.begin < end);
  }
};

// One tensor of a call, or its workspace (nullptr).
struct Memory {
  const char* name;
  const flashmoe_tensor* tensor;
  Region region;
};

// Fails if one is outside the address space, or memory[first_written] or one behind it shares a
// byte with one before it. Tensors whose regions meet may still lie in one another's gaps. Slices
// of one array, along any axis, are told apart; some stranger layouts, which only interleave, are
// refused.
flashmoe_status check_written_memory(const Memory* memory, size_t count, size_t first_written);

// The index in Operation::kTensors of the first tensor that a call writes: kFirstOutput, unless the
// operation names an earlier one.
template <class Operation>
auto first_written(const typename Operation::Params& params, int)
    -> decltype(Operation::first_written(params)) {
  return Operation::first_written(params);
}
template <class Operation>
size_t first_written(const typename Operation::Params&, long) {
  return Operation::kFirstOutput;
}

// Checks that the outputs of `params` and the workspace share no byte with one another or with any
// other tensor. The tensors are Operation::kTensors, the outputs those from kFirstOutput on.
template <class Operation>
flashmoe_status check_apart(const typename Operation::Params& params, const void* workspace,
                            uint64_t workspace_bytes) {
  constexpr size_t kTensors = Operation::kTensors.size();
  const size_t first = first_written<Operation>(params, 0);
  Region regions[kTensors + 1];
  bool doubtful = false;
  for (size_t i = 0; i < kTensors; ++i) {
    const flashmoe_tensor* const tensor = Operation::kTensors[i].of(params);
    regions[i] = tensor != nullptr ? Region::of(tensor, Reach::of(tensor)) : Region{0, 0};
    doubtful |= regions[i].is_outside();
    const size_t before = i >= first ? i : 0;
    for (size_t j = 0; j < before; ++j) doubtful |= regions[i].meets(regions[j]);
  }
  regions[kTensors] = Region::of(workspace, workspace_bytes);
  doubtful |= regions[kTensors].is_outside();
  if (workspace_bytes > 0) {
    for (size_t j = 0; j < kTensors; ++j) doubtful |= regions[kTensors].meets(regions[j]);
  }
  if (!doubtful) return FLASHMOE_OK;
  Memory memory[kTensors + 1];
  for (size_t i = 0; i < kTensors; ++i) {
    const auto& each = Operation::kTensors[i];
    memory[i] = {each.name, each.of(params), regions[i]};
  }
  memory[kTensors] = {"workspace", nullptr, regions[kTensors]};
  return check_written_memory(memory, kTensors + 1, first);
}

}  // namespace flashmoe
