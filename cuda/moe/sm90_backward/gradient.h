// Gradients of experts' matrices as stages of this family's plans.
#pragma once

#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/moe/backward/queue.h"
#include "cuda/moe/sm90_backward/params.h"
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

// A launch of one or more, kMostJobs at most, of the same experts' rows and with an operand
// gathered or not alike.
struct GradientsOfLaunch {
  const Gradient* each;
  int count;
};

flashmoe_status add_gradients(const GradientsOfLaunch& gradients, const DeviceFacts& facts,
                              Plan* plan, const Reason& reason);
// `queue.taken` is the launch's own; without a queue clusters have tiles in turn.
flashmoe_status launch_gradients(const GradientsOfLaunch& gradients,
                                 const moe_backward::Queue& queue, const Plan& plan, int index,
                                 void* stream);

}  // namespace flashmoe::moe::sm90_backward
