// Products of this family as stages of other families' plans, and their requirements on tensors.
#pragma once

#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/runtime.h"

namespace flashmoe::moe::sm90 {

inline constexpr int64_t kMaxRows = int64_t{1} << 30;  // row + tile fits in int32

// Checks what the copy engine, and 32 bits, can address. `name` is the argument's.
flashmoe_status check_weights(const char* name, const ExpertMatrix& matrix, int64_t experts,
                              int64_t rows, int64_t columns, const Reason& reason);
flashmoe_status check_rows(const char* name, const TokenRows<const void>& view, int64_t rows,
                           int64_t batches, const Reason& reason);
flashmoe_status check_rows(const char* name, const TokenRows<void>& view, int64_t rows,
                           int64_t batches, const Reason& reason);
// For gathered rows.
flashmoe_status check_gathered(const char* name, const TokenRows<const void>& view, int64_t tokens,
                               const Reason& reason);

// A layer's first product, of gathered rows: activations, [pairs, inner], and the activation's
// input if the problem wants it. Its tensors have been checked. progress: most_progress_words()
// words of scratch.
flashmoe_status add_up(const MoeForwardProblem& problem, const DeviceFacts& facts, Plan* plan,
                       const Reason& reason);
int64_t most_progress_words(int multiprocessors);
flashmoe_status launch_up(const MoeForwardProblem& problem, const Plan& plan, int index,
                          void* activated, uint32_t* progress, void* stream);

// The epilogue from a product of gathered rows, da, to the gradients of g and u, the inputs of the
// layer's SiLU(g) u. Rows are by slot, and strides in elements.
struct UpGradient {
  const void* before[2];  // g and u
  int64_t before_stride;
  void* dz[2];  // their gradients; or nullptr
  int64_t dz_stride;
  void* activated;  // [rows, inner] SiLU(g) u times the weight; or nullptr
  float* dots;      // [up_gradient_parts(inner), rows] parts of <da, a>; or nullptr
  // Per slot, in memory with room for kSlotsBehind more. -1 and 0 for a slot that does not count.
  const int32_t* row_tokens;
  const float* row_weights;
};
inline constexpr int64_t kSlotsBehind = 256;
int64_t up_gradient_parts(int64_t inner);

// `da`: the layer whose first product, without a gate, is da.
flashmoe_status add_up_gradient(const MoeForwardProblem& da, const DeviceFacts& facts, Plan* plan,
                                const Reason& reason);
flashmoe_status launch_up_gradient(const MoeForwardProblem& da, const UpGradient& gradient,
                                   const Plan& plan, int index, void* stream);

// A product of contiguous rows. `name`: the argument that gives their number. The output may be
// fp32; `adds`: it is accumulated. Neither has a bias.
flashmoe_status add_rows_product(const char* name, const GroupedProductProblem& problem, bool adds,
                                 const DeviceFacts& facts, Plan* plan, const Reason& reason);
flashmoe_status launch_rows_product(const GroupedProductProblem& problem, bool adds,
                                    const Plan& plan, int index, void* stream);

}  // namespace flashmoe::moe::sm90
