// Host-side code shared by the CPU's mixture-of-experts operations.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/ops/moe/problem.h"
#include "core/plan.h"
#include "cpu/isa.h"
#include "cpu/moe_kernel.h"

namespace flashmoe::cpu {

flashmoe_status plan_route(const MoeRouteProblem& problem, Plan* plan, const Reason& reason);
flashmoe_status launch_route(const MoeRouteProblem& problem, const Plan& plan, void* workspace,
                             void* stream);
flashmoe_status plan_forward(const MoeForwardProblem& problem, Plan* plan, const Reason& reason);
flashmoe_status launch_forward(const MoeForwardProblem& problem, const Plan& plan, void* workspace,
                               void* stream);
flashmoe_status plan_grouped_product(const GroupedProductProblem& problem, Plan* plan,
                                     const Reason& reason);
flashmoe_status launch_grouped_product(const GroupedProductProblem& problem, const Plan& plan,
                                       void* workspace, void* stream);
flashmoe_status plan_route_backward(const MoeRouteBackwardProblem& problem, Plan* plan,
                                    const Reason& reason);
flashmoe_status launch_route_backward(const MoeRouteBackwardProblem& problem, const Plan& plan,
                                      void* workspace, void* stream);
flashmoe_status plan_backward(const MoeBackwardProblem& problem, Plan* plan, const Reason& reason);
flashmoe_status launch_backward(const MoeBackwardProblem& problem, const Plan& plan,
                                void* workspace, void* stream);
flashmoe_status plan_grouped_product_backward(const GroupedProductBackwardProblem& problem,
                                              Plan* plan, const Reason& reason);
flashmoe_status launch_grouped_product_backward(const GroupedProductBackwardProblem& problem,
                                                const Plan& plan, void* workspace, void* stream);

// Gives each number from 0 on to one thread.
class Counter {
 public:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }
  void reset() { next_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> next_{0};
};

// The routing's weight of a pair.
inline double weight_of(const MoeForwardProblem& p, int64_t pair) {
  return p.wide_weights != nullptr ? p.wide_weights[pair] : static_cast<double>(p.weights[pair]);
}

const MoeKernel& moe_kernel_for(Isa isa, Dtype dtype);

// Appends a launch on the CPU to a plan. `entry`: nullptr if one kernel serves all.
flashmoe_launch& add_launch(const char* kernel, const MoeKernel* entry, int64_t tiles,
                            int64_t threads, Plan* plan);

}  // namespace flashmoe::cpu
