// The products of the sm89 family as stages of a plan: its own, and those of its gradients.
#pragma once

#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "cuda/moe/sm89/params.h"
#include "cuda/runtime.h"

namespace flashmoe::moe::sm89 {

// A product's weights, and the argument names of each extent, for messages.
struct Names {
  const char* weights;
  const char* rows;
};

// Rows of all experts, and the extents of a product, as the kernels count them.
struct Extents {
  int64_t rows;     // per expert, at most
  int64_t experts;  // experts that may each have that many; 1 if they share them
  int64_t columns;
  int64_t out_columns;
  int64_t x_rows;  // rows that `rows` are gathered from
  int64_t x_stride;
  Dtype x_dtype;
};

inline bool is_transposed(const ExpertMatrix& matrix) { return matrix.column_stride != 1; }

inline Weights weights_of(const ExpertMatrix& matrix) {
  return {static_cast<const uint16_t*>(matrix.data), matrix.expert_stride,
          is_transposed(matrix) ? matrix.column_stride : matrix.row_stride};
}

// Appends a product to the plan.
flashmoe_status add_product(const DeviceFacts& facts, flashmoe_device device, Dtype dtype,
                            bool gated, bool transposed, const Names& names, const Extents& extents,
                            int experts, Plan* plan, const Reason& reason);

// Fills the parameters that follow from the extents and from the kernel of launch `index`.
void fill_extents(const Extents& extents, int experts, flashmoe_device device, const Plan& plan,
                  int index, Params* params);

// The first product of a layer, and the weight layouts that it accepts.
flashmoe_status check_layouts(const MoeForwardProblem& problem, const Reason& reason);
Extents extents_of_up(const MoeForwardProblem& p);
// activated: [slots, inner].
Params up_params(const MoeForwardProblem& p, const Plan& plan, int index, void* activated);

}  // namespace flashmoe::moe::sm89
