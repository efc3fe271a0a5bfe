#include "core/overlap.h"

#include <algorithm>
#include <numeric>

#include "core/checks.h"

namespace flashmoe {
namespace {

// A region as runs of bytes: the `level` axes with the smallest steps lie within a run, including
// gaps; the other axes step from run to run.
struct Runs {
  uint64_t bytes = 0;
  int count = 0;  // number of axes with a step
  uint64_t steps[kMaxRank] = {};
  uint64_t reaches[kMaxRank] = {};  // per axis: from its first to its last

  explicit Runs(const Memory& memory) {
    const flashmoe_tensor* tensor = memory.tensor;
    if (tensor == nullptr) {
      bytes = memory.region.end - memory.region.begin;
      return;
    }
    bytes = tensor->dtype.bits / 8u;
    uint64_t packed = bytes;
    for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
      const auto extent = static_cast<uint64_t>(tensor->shape[axis]);
      uint64_t step = packed;
      if (tensor->strides != nullptr) {
        const int64_t stride = tensor->strides[axis];
        step = (stride < 0 ? 0 - static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride)) *
               bytes;
      }
      packed *= extent;
      if (extent == 1 || step == 0) continue;
      int at = count++;
      for (; at > 0 && steps[at - 1] > step; --at) {
        steps[at] = steps[at - 1];
        reaches[at] = reaches[at - 1];
      }
      steps[at] = step;
      reaches[at] = step * (extent - 1);
    }
  }

  uint64_t run_bytes(int level) const { return std::accumulate(reaches, reaches + level, bytes); }
  // The common divisor of all steps between runs; 0: there is one run.
  uint64_t period(int level) const {
    uint64_t period = 0;
    for (int axis = level; axis < count; ++axis) period = std::gcd(period, steps[axis]);
    return period;
  }
};

// Whether no run of one meets a run of the other, judged by their places within a common period.
bool lie_between(const Memory& a, const Memory& b) {
  const Runs of_a(a);
  const Runs of_b(b);
  for (int i = 0; i <= of_a.count; ++i) {
    for (int j = 0; j <= of_b.count; ++j) {
      const uint64_t period = std::gcd(of_a.period(i), of_b.period(j));
      if (period == 0) continue;
      const uint64_t a_to_b = (b.region.begin % period + period - a.region.begin % period) % period;
      const uint64_t b_to_a = (period - a_to_b) % period;
      if (a_to_b >= of_a.run_bytes(i) && b_to_a >= of_b.run_bytes(j)) return true;
    }
  }
  return false;
}

}  // namespace

Reach Reach::of(const flashmoe_tensor* tensor) {
  if (tensor == nullptr) return {0, 0};
  const uint64_t element_bytes = tensor->dtype.bits / 8u;
  int64_t low = 0;
  int64_t high = 0;
  int64_t packed = 1;
  // An empty tensor may have any strides.
  if (std::find(tensor->shape, tensor->shape + tensor->ndim, 0) != tensor->shape + tensor->ndim) {
    return {0, 0};
  }
  for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
    const int64_t extent = tensor->shape[axis];
    if (extent > 1) {
      const int64_t stride = tensor->strides != nullptr ? tensor->strides[axis] : packed;
      (stride < 0 ? low : high) += (extent - 1) * stride;
    }
    packed *= extent;
  }
  // With 8 bytes per element these can be 2^63 bytes.
  return {(0 - static_cast<uint64_t>(low)) * element_bytes,
          (static_cast<uint64_t>(high) + 1) * element_bytes};
}

flashmoe_status check_written_memory(const Memory* memory, size_t count, size_t first_written) {
  for (size_t i = 0; i < count; ++i) {
    if (!memory[i].region.is_outside()) continue;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: its %s beyond the address space, accepted %s",
                memory[i].name, memory[i].tensor != nullptr ? "strides reach" : "bytes reach",
                memory[i].tensor != nullptr ? "are those of memory that is there"
                                            : "is memory that is there");
  }
  for (size_t i = first_written; i < count; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!memory[i].region.meets(memory[j].region) || lie_between(memory[i], memory[j])) continue;
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: it shares memory with %s, accepted is memory that overlaps no other tensor "
                  "of the call",
                  memory[i].name, memory[j].name);
    }
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe
