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

// One operand. The columns at the beginning of its rows become rows, or columns, of the gradient.
struct Operand {
  const char* name;  // of the argument
  TokenRows<const void> rows;
  bool by_token;  // rows are tokens', and are gathered
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
  int64_t rows;   // over all experts, or per expert if counts are given
  const int32_t* offsets;
  const int32_t* counts;
  const int32_t* row_tokens;  // [rows], if an operand is gathered
  int64_t tokens;
  bool accumulate;
};

// The gradients of one launch, at most kMostJobs. They are over the same experts' rows, and either
// all or none have a gathered operand.
struct GradientsOfLaunch {
  const Gradient* each;
  int count;
};

flashmoe_status add_gradients(const GradientsOfLaunch& gradients, const DeviceFacts& facts,
                              Plan* plan, const Reason& reason);
// `queue.taken` belongs to this launch. Without a queue, clusters take tiles in turn.
flashmoe_status launch_gradients(const GradientsOfLaunch& gradients,
                                 const moe_backward::Queue& queue, const Plan& plan, int index,
                                 void* stream);

}  // namespace flashmoe::moe::sm90_backward
