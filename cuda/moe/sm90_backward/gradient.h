// Gradients of experts' matrices as stages of this family's plans.
#pragma once

#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/runtime.h"

namespace flashmoe::moe::sm90_backward {

// One operand: its columns from the beginning of a row on become rows, or columns, of the gradient.
struct Operand {
  const char* name;  // of the argument
  TokenRows<const void> rows;
  bool by_token;  // rows are tokens', to be gathered
};

// out[e] = sum over the rows r of expert e of left[r] right[r]^T. At most one operand is gathered.
struct Gradient {
  flashmoe_device device;
  MatrixGradient out;  // [experts, m, n]
  int64_t experts;
  int64_t m;
  int64_t n;
  Operand left;   // [rows, m]
  Operand right;  // [rows, n]
  int64_t rows;   // of all experts, or of one with counts
  const int32_t* offsets;
  const int32_t* counts;
  const int32_t* row_tokens;  // [rows], where an operand is gathered
  int64_t tokens;
  bool accumulate;
};

flashmoe_status add_gradient(const Gradient& gradient, const DeviceFacts& facts, Plan* plan,
                             const Reason& reason);
flashmoe_status launch_gradient(const Gradient& gradient, const Plan& plan, int index,
                                void* stream);

}  // namespace flashmoe::moe::sm90_backward
