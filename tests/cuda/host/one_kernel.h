// Families whose calls are one kernel without workspace, on the CUDA runtime of fake_cuda.h.
#pragma once

#include <cstring>

#include "check.h"
#include "core/plan.h"
#include "cuda/host/fake_cuda.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

template <class Problem>
Plan plan_one(const Family<Problem>& family, const Problem& problem) {
  Plan plan = {};
  char reason[256] = "";
  CHECK(family.plan(problem, &plan, Reason(reason)) == FLASHMOE_OK);
  CHECK(plan.info.launch_count == 1 && plan.info.workspace_bytes == 0);
  CHECK(plan.info.microseconds > 0);
  return plan;
}

// The kernel's parameters.
template <class Params, class Problem>
Params launch_planned_one(const Family<Problem>& family, const Problem& problem, const Plan& plan) {
  static Params seen;
  fake::on_launch = [](const void* params) { std::memcpy(&seen, params, sizeof seen); };
  fake::last = {};
  CHECK(family.launch(problem, plan, nullptr, nullptr) == FLASHMOE_OK);
  const flashmoe_launch& planned = plan.info.launches[0];
  CHECK(fake::last.grid.x == planned.grid[0] && fake::last.grid.y == planned.grid[1]);
  CHECK(fake::last.block.x == planned.block[0] && fake::last.programmatic == 1);
  return seen;
}

}  // namespace flashmoe
