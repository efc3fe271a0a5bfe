// From a call of the C ABI to its launch, the same for every operation:
// validate -> problem -> plan -> check memory -> launch.
//
// An operation is a struct of static members:
//   Params, Problem                 the C ABI's argument and what validation makes of it
//   kName, kParams, kSizeFunction   names for plans, messages and the log
//   kOldestParams                   bytes of the oldest Params
//   kTensors, kFirstOutput          every tensor of Params, outputs last
//   kFamilies                       every kernel family; the most general of each device last
//   kGpuAlignment                   alignment of a GPU workspace, bytes
//   kKernelPrefix                   prefix of full kernel names that a call may name, or nullptr
//   make_problem(params, &problem)  every check, once, into zeros
//   flops(problem), is_empty(problem)
//   print(params, problem, text, size)  the call, for the log
//   first_written(params)           only if an input may be written; replaces kFirstOutput
//   params_apart(params)            only if an output may be an input: the call without that input
// A problem has `device` and `kernel`: what the caller asks for, "" for none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/checks.h"
#include "core/choose.h"
#include "core/gpu_model.h"
#include "core/launch.h"
#include "core/log.h"
#include "core/overlap.h"
#include "core/plan.h"
#include "core/plan_cache.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// One tensor of an operation: a member of Params, or of a struct that Params point to.
template <class Params>
struct TensorMember {
  const char* name;
  const flashmoe_tensor* Params::* member;
  const flashmoe_tensor* (*nested)(const Params& params) = nullptr;

  const flashmoe_tensor* of(const Params& params) const {
    return nested != nullptr ? nested(params) : params.*member;
  }
};

inline constexpr size_t kCpuAlignment = 16;  // of a workspace on the CPU

inline bool is_on_cuda(flashmoe_device device) {
  return device.device_type == FLASHMOE_DEVICE_CUDA;
}

template <class Operation>
flashmoe_status make_plan(const typename Operation::Problem& problem, bool explain,
                          const Family<typename Operation::Problem>** family, Plan* plan) {
  const Wanted wanted = wanted_of(Operation::kFamilies, problem.kernel, problem.device);
  Choice choice(Operation::kFamilies, Operation::kKernelPrefix, wanted, problem);
  FLASHMOE_TRY(explain ? choice.choose_and_explain(family, plan) : choice.choose(family, plan));
  std::snprintf(plan->info.operation, sizeof plan->info.operation, "%s", Operation::kName);
  std::snprintf(plan->info.family, sizeof plan->info.family, "%s", (*family)->name);
  for (int32_t i = 0; i < plan->info.launch_count; ++i) {
    plan->info.launches[i].device = given_device(plan->info.launches[i].device);
  }
  return FLASHMOE_OK;
}

// Calls work(family, plan) with the plan of a problem, kept from an earlier call if possible. While
// a log is on, no plan is kept: its callback may call the library and so replace a kept plan.
template <class Operation, class Work>
flashmoe_status with_plan(const typename Operation::Problem& problem, const Work& work) {
  using Problem = typename Operation::Problem;
  using Cache = PlanCache<Problem>;
  const bool keep = is_on_cuda(problem.device) && !log_enabled(FLASHMOE_LOG_INFO);
  if (keep) {
    const auto* slot = Cache::find(problem);
    if (slot != nullptr) return work(*slot->family, slot->plan);
  }
  Plan plan;
  const Family<Problem>* family;
  FLASHMOE_TRY(make_plan<Operation>(problem, log_enabled(FLASHMOE_LOG_DEBUG), &family, &plan));
  if (keep) {
    const auto* slot = Cache::add(problem, family, plan);
    if (slot != nullptr) return work(*family, slot->plan);
  }
  return work(*family, plan);
}

template <class Operation>
flashmoe_status read_problem(const typename Operation::Params* given,
                             typename Operation::Params* params,
                             typename Operation::Problem* problem) {
  FLASHMOE_TRY(read_params(Operation::kParams, given, Operation::kOldestParams, params));
  clear(problem);
  return Operation::make_problem(*params, problem);
}

// Bytes of the tensors that a call reads and writes, each counted once.
template <class Operation>
double bytes_of(const typename Operation::Params& params) {
  double bytes = 0;
  for (const auto& each : Operation::kTensors) {
    const flashmoe_tensor* const tensor = each.of(params);
    if (tensor == nullptr) continue;
    double own = tensor->dtype.bits / 8.0;
    for (int32_t axis = 0; axis < tensor->ndim; ++axis) {
      const bool broadcast = tensor->strides != nullptr && tensor->strides[axis] == 0;
      if (!broadcast || tensor->shape[axis] == 0) own *= static_cast<double>(tensor->shape[axis]);
    }
    bytes += own;
  }
  return bytes;
}

template <class Operation>
flashmoe_status plan_operation(const typename Operation::Params* given, flashmoe_plan* filled) {
  if (filled == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "plan: got a null pointer");
  }
  FLASHMOE_TRY(
      check_struct_size("flashmoe_plan", filled->struct_size, sizeof *filled, sizeof *filled));
  typename Operation::Params params;
  typename Operation::Problem problem;
  FLASHMOE_TRY(read_problem<Operation>(given, &params, &problem));
  Plan plan;
  const Family<typename Operation::Problem>* family;
  FLASHMOE_TRY(make_plan<Operation>(problem, true, &family, &plan));
  plan.info.flops = Operation::flops(problem);
  plan.info.bytes = bytes_of<Operation>(params);
  copy_out(plan.info, filled);
  return FLASHMOE_OK;
}

template <class Operation>
flashmoe_status workspace_size_of(const typename Operation::Params* given, size_t* bytes) {
  if (bytes == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "bytes: got a null pointer");
  }
  typename Operation::Params params;
  typename Operation::Problem problem;
  FLASHMOE_TRY(read_problem<Operation>(given, &params, &problem));
  return with_plan<Operation>(problem, [bytes](const auto&, const Plan& plan) {
    *bytes = static_cast<size_t>(plan.info.workspace_bytes);
    return FLASHMOE_OK;
  });
}

// Refuses to launch on a model of GPUs, which only has plans.
template <class Operation>
flashmoe_status check_runs_here(const typename Operation::Params& params, flashmoe_device device) {
  if (!is_on_cuda(device) || !is_gpu_model(device.device_id)) return FLASHMOE_OK;
  const char* name = nullptr;
  for (const auto& each : Operation::kTensors) {
    if (name == nullptr && each.of(params) != nullptr) name = each.name;
  }
  return fail(FLASHMOE_ERROR_NO_DEVICE,
              "%s: it is on %s, which is a model of GPUs and no device: accepted in plans alone",
              name, DeviceName(device).text);
}

// The call whose outputs may overlap nothing: all of it, unless the operation works in place.
template <class Operation>
auto params_apart(const typename Operation::Params& params, int)
    -> decltype(Operation::params_apart(params)) {
  return Operation::params_apart(params);
}
template <class Operation>
const typename Operation::Params& params_apart(const typename Operation::Params& params, long) {
  return params;
}

// Checks the memory of a call before its launches: the workspace exists, and no output overlaps
// other memory of the call.
template <class Operation>
flashmoe_status check_memory(const typename Operation::Params& params, flashmoe_device device,
                             uint64_t needed, const void* workspace, size_t workspace_size) {
  const size_t alignment = is_on_cuda(device) ? Operation::kGpuAlignment : kCpuAlignment;
  FLASHMOE_TRY(
      check_workspace(needed, workspace, workspace_size, alignment, Operation::kSizeFunction));
  return check_apart<Operation>(params_apart<Operation>(params, 0), workspace, needed);
}

// "attention_forward batch=... device=cpu:0 stream=... -> attention_forward_... grid=..., ..."
void log_call(const char* operation, const char* call, flashmoe_device device,
              const flashmoe_plan& plan, const void* stream);

template <class Operation>
flashmoe_status run_operation(const typename Operation::Params* given, void* workspace,
                              size_t workspace_size, void* stream) {
  typename Operation::Params params;
  typename Operation::Problem problem;
  FLASHMOE_TRY(read_problem<Operation>(given, &params, &problem));
  FLASHMOE_TRY(check_runs_here<Operation>(params, problem.device));
  const auto launch = [&](const auto& family, const Plan& plan) {
    FLASHMOE_TRY(check_memory<Operation>(params, problem.device, plan.info.workspace_bytes,
                                         workspace, workspace_size));
    if (log_enabled(FLASHMOE_LOG_INFO)) {
      char text[512];
      Operation::print(params, problem, text, sizeof text);
      log_call(Operation::kName, text, problem.device, plan.info, stream);
    }
    if (Operation::is_empty(problem)) return FLASHMOE_OK;
    begin_launches();
    return family.launch(problem, plan, workspace, stream);
  };
  return with_plan<Operation>(problem, [&](const auto& family, const Plan& plan) {
    if (plan.room.least == 0) return launch(family, plan);
    Plan fitted = plan;
    fitted.fit_threads(workspace_size);
    return launch(family, fitted);
  });
}

}  // namespace flashmoe
