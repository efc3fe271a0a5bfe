// From a mixture-of-experts call to its launch, the same for the three operations:
// validate -> problem -> choose a family -> plan -> launch.
//
// An operation is a struct of static members:
//   Params, Problem                  the C ABI's argument and what validation makes of it
//   kParams, kSizeFunction           names for messages
//   kOldestParams                    bytes of the first Params that there was
//   kMember                          where a MoeFamily has it
//   make_problem(params, &problem)   every check, once
//   kernel(params)                   the family that the caller names, or nullptr
//   flops(problem), is_empty(problem), log(problem, text, size)
//   and what core/known_calls.h asks for
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/checks.h"
#include "core/choose.h"
#include "core/gpu_model.h"
#include "core/known_calls.h"
#include "core/log.h"
#include "core/moe.h"
#include "core/status.h"

namespace flashmoe {

// Every family, best first for its devices.
extern const MoeFamily* const kMoeFamilies[];
extern const size_t kMoeFamilyCount;

template <class Operation>
flashmoe_status choose_moe_family(const char* kernel, bool explain, PlannedCall<Operation>* call) {
  const MoeFamily* families[kMostFamilies];
  size_t count = 0;
  for (size_t i = 0; i < kMoeFamilyCount && count < kMostFamilies; ++i) {
    if ((kMoeFamilies[i]->*Operation::kMember).plan != nullptr) families[count++] = kMoeFamilies[i];
  }
  const auto ask = [call](const MoeFamily& family, const Reason& reason) {
    call->plan = {};
    return (family.*Operation::kMember).plan(call->problem, &call->plan, reason);
  };
  const auto yields = [call](const MoeFamily& family) {
    const auto of_family = (family.*Operation::kMember).yields;
    return of_family != nullptr ? of_family(call->problem) : nullptr;
  };
  const flashmoe_device device = call->problem.device;
  const Wanted wanted = wanted_of(families, count, kernel, device);
  Choice choice(families, count, wanted, nullptr, device, ask, yields);
  if (!explain) return choice.choose(&call->family);
  char rejected[kRejectedBytes];
  FLASHMOE_TRY(choice.choose_and_explain(&call->family, rejected));
  std::memcpy(call->plan.info.rejected, rejected, sizeof rejected);
  return FLASHMOE_OK;
}

template <class Operation>
flashmoe_status make_moe_call(const typename Operation::Params* given, bool explain,
                              PlannedCall<Operation>* call) {
  typename Operation::Params params;
  FLASHMOE_TRY(read_params(Operation::kParams, given, Operation::kOldestParams, &params));
  FLASHMOE_TRY(Operation::make_problem(params, &call->problem));
  set_reaches(params, call);
  return choose_moe_family(Operation::kernel(params), explain, call);
}

template <class Operation>
flashmoe_status plan_moe(const typename Operation::Params* params, flashmoe_moe_plan* plan) {
  if (plan == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "plan: got a null pointer");
  }
  FLASHMOE_TRY(
      check_struct_size("flashmoe_moe_plan", plan->struct_size, sizeof *plan, sizeof *plan));
  PlannedCall<Operation> call;
  FLASHMOE_TRY(make_moe_call(params, true, &call));
  flashmoe_moe_plan& info = call.plan.info;
  info.struct_size = sizeof info;
  std::snprintf(info.family, sizeof info.family, "%s", call.family->name);
  info.flops = Operation::flops(call.problem);
  copy_out(info, plan);
  return FLASHMOE_OK;
}

template <class Operation>
flashmoe_status moe_workspace_size(const typename Operation::Params* params, size_t* bytes) {
  if (bytes == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "bytes: got a null pointer");
  }
  return with_call<Operation>(params, [bytes](const PlannedCall<Operation>& call, bool) {
    *bytes = static_cast<size_t>(call.plan.info.workspace_bytes);
    return FLASHMOE_OK;
  });
}

// "moe_forward tokens=... device=cpu:0 stream=... -> moe_up_... grid=..., moe_down_... grid=..."
template <class Operation>
void log_moe(const PlannedCall<Operation>& call, const void* stream) {
  char text[256];
  Operation::log(call.problem, text, sizeof text);
  const flashmoe_moe_plan& info = call.plan.info;
  char stages[640] = "";
  size_t used = 0;
  for (int32_t i = 0; i < info.launches && used < sizeof stages; ++i) {
    const flashmoe_moe_stage& stage = info.stage[i];
    const int wrote = std::snprintf(
        stages + used, sizeof stages - used, "%s%s grid=%ux%ux%u block=%u shared=%llu",
        i == 0 ? "" : ", ", stage.kernel, stage.grid[0], stage.grid[1], stage.grid[2],
        stage.block[0], static_cast<unsigned long long>(stage.shared_bytes));
    used += static_cast<size_t>(wrote);
  }
  log_line(FLASHMOE_LOG_INFO, "%s device=%s stream=%p -> %s", text,
           DeviceName(call.problem.device).text, stream, stages);
  if (info.rejected[0] != '\0') log_line(FLASHMOE_LOG_DEBUG, "rejected: %s", info.rejected);
}

template <class Operation>
flashmoe_status launch_moe(const typename Operation::Params* params, void* workspace,
                           size_t workspace_size, void* stream) {
  constexpr size_t kCpuAlignment = 16;
  constexpr size_t kCudaAlignment = 256;
  return with_call<Operation>(params, [&](const PlannedCall<Operation>& call, bool logged) {
    const bool cuda = call.problem.device.device_type == FLASHMOE_DEVICE_CUDA;
    FLASHMOE_TRY(check_memory(*params, call, workspace, workspace_size,
                              cuda ? kCudaAlignment : kCpuAlignment, Operation::kSizeFunction));
    if (logged) log_moe(call, stream);
    if (Operation::is_empty(call.problem)) return FLASHMOE_OK;
    return (call.family->*Operation::kMember).launch(call.problem, call.plan, workspace, stream);
  });
}

}  // namespace flashmoe
