// What the families whose kernels load by the copy engine share on the host: which views it can walk, and
// how it is told of them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/attention.h"
#include "core/per_thread.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

// Whether the copy engine can walk the views of a problem, and the driver can tell it of them.
flashmoe_status check_walkable(const AttentionProblem& problem, const Reason& reason);

// Extents, strides in elements and box of a tensor map, innermost dimension first, whose stride is 1. Of a
// dimension with stride 0, which a view repeats, the map holds one.
struct MapShape {
  int rank;
  int64_t extents[5];
  int64_t strides[5];
  int box[5];
};

// Of a [batch, seq, heads, dim] view in boxes of so many columns and rows of one head.
MapShape rows_map(const RowStrides& strides, int64_t dim, int64_t seq, int64_t heads, int64_t batch,
                  int columns, int rows);

// False if the driver refuses it.
bool encode_map(CUtensorMap* map, Dtype dtype, const void* data, const MapShape& shape);

// Whether two problems have the same parameters.
bool same_parameters(const AttentionProblem& a, const AttentionProblem& b);

// Makes a context for a thread that has not used CUDA yet: the runtime does so on demand, but the driver,
// which encodes maps, does not.
bool make_context(int device_id);

// Parameters of calls that a thread made before: programs make the same ones again and again, and encoding
// their maps would be part of each.
template <class Params>
class KnownParams {
 public:
  // `make(params)` encodes and fills them; false if the driver refuses a map.
  template <class Make>
  static flashmoe_status find(const AttentionProblem& problem, const AttentionPlan& plan,
                              Params** found, const Make& make) {
    KnownParams* const known = PerThread<KnownParams>::get();
    if (known == nullptr) {
      return fail(FLASHMOE_ERROR_OUT_OF_MEMORY,
                  "launching %s: there is no memory for the %zu bytes of its parameters",
                  plan.info.kernel, sizeof *known);
    }
    const auto place = [](const void* data) { return reinterpret_cast<uintptr_t>(data) / 512; };
    Call& call = known->calls_[(place(problem.q) + 3 * place(problem.out)) % kCalls];
    *found = &call.params;
    if (call.entry == plan.entry && call.parts == plan.parts &&
        same_parameters(call.problem, problem)) {
      return FLASHMOE_OK;
    }
    call.entry = nullptr;
    if (!make(&call.params) && !(make_context(problem.device.device_id) && make(&call.params))) {
      return fail(FLASHMOE_ERROR_CUDA, "launching %s: the driver refused a tensor map",
                  plan.info.kernel);
    }
    call.problem = problem;
    call.parts = plan.parts;
    call.entry = plan.entry;
    return FLASHMOE_OK;
  }

 private:
  static constexpr size_t kCalls = 16;

  struct Call {
    const void* entry = nullptr;
    int32_t parts;
    AttentionProblem problem;
    Params params;
  };
  Call calls_[kCalls];
};

}  // namespace flashmoe
