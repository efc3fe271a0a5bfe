// Attention forward: validate -> problem -> plan -> launch.
#include "core/attention.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "core/backends.h"
#include "core/checks.h"
#include "core/choose.h"
#include "core/gpu_model.h"
#include "core/known_calls.h"
#include "core/log.h"
#include "core/overlap.h"
#include "core/status.h"

namespace flashmoe {

namespace {

__extension__ typedef __int128 Wide;  // exact: a difference of pairs may be far below both

// Pairs of a row i and a key j < i + offset: a row has clamp(i + offset, 0, keys) of them, first
// none, then a ramp, then all.
Wide pairs_before(int64_t offset, int64_t rows, int64_t keys) {
  const Wide ramp_begin = std::clamp<int64_t>(-offset, 0, rows);
  const Wide ramp_end = std::clamp<int64_t>(keys - offset, 0, rows);
  const Wide ramp = (ramp_end - ramp_begin) * (2 * offset + ramp_begin + ramp_end - 1) / 2;
  return ramp + (rows - ramp_end) * keys;
}

}  // namespace

double attention_flops(const AttentionProblem& p) {
  Wide pairs = Wide{p.seq_q} * p.seq_k;
  if (p.bounded_right) pairs = pairs_before(p.right_offset + 1, p.seq_q, p.seq_k);
  if (p.bounded_left) pairs -= pairs_before(p.left_offset, p.seq_q, p.seq_k);
  return 2.0 * static_cast<double>(p.batch) * static_cast<double>(p.heads_q) *
         static_cast<double>(pairs) * static_cast<double>(p.dim + p.dim_v);
}

namespace {

constexpr char kKernelPrefix[] = "attention_forward_";
constexpr size_t kWorkspaceAlignment = 16;

struct AttentionOperation {
  using Params = flashmoe_attention_forward_params;
  using Problem = AttentionProblem;
  using Plan = AttentionPlan;
  using Family = AttentionFamily;

  // See core/known_calls.h.
  static constexpr std::array<KnownTensor<Params>, 5> kTensors = {{
      {"q", &Params::q, true},
      {"k", &Params::k, true},
      {"v", &Params::v, true},
      {"out", &Params::out, true},
      {"lse", &Params::lse, false},
  }};
  static constexpr size_t kFirstOutput = 3;
  static constexpr size_t kOptions = offsetof(Params, layout);
  static constexpr size_t kKernel = offsetof(Params, kernel);

  template <class Visit>
  static void address(const Params&, Problem* p, const Visit& visit) {
    visit(&p->q, 0);
    visit(&p->k, 1);
    visit(&p->v, 2);
    visit(&p->out, 3);
    visit(&p->lse, 4);
  }
  static const char** kernel_text(Problem* p) { return &p->kernel; }

  static flashmoe_status make_call(const Params* given, bool explain,
                                   PlannedCall<AttentionOperation>* call);
};

using AttentionCall = PlannedCall<AttentionOperation>;

// Every family, best first for its devices.
const AttentionFamily* const kFamilies[] = {
#if FLASHMOE_WITH_CUDA
    &kShortAttention,
#endif
#if FLASHMOE_WITH_SM90
    &kSplitAttention, &kSm90Attention,
#endif
#if FLASHMOE_WITH_CUDA
    &kSm89Attention,
#endif
    &kCpuAttention,
};

RowStrides row_strides(const View& view, bool bhsd) {
  return bhsd ? RowStrides{view.strides[0], view.strides[2], view.strides[1]}
              : RowStrides{view.strides[0], view.strides[1], view.strides[2]};
}

flashmoe_status check_head_dim(const char* name, int64_t dim) {
  if (dim >= kHeadDimMultiple && dim <= kMaxHeadDim && dim % kHeadDimMultiple == 0) {
    return FLASHMOE_OK;
  }
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: its head dimension is %lld, accepted are multiples of %lld from %lld to %lld",
              name, static_cast<long long>(dim), static_cast<long long>(kHeadDimMultiple),
              static_cast<long long>(kHeadDimMultiple), static_cast<long long>(kMaxHeadDim));
}

flashmoe_status check_same_kind(const char* name, const flashmoe_tensor& tensor,
                                const AttentionProblem& problem) {
  FLASHMOE_TRY(check_same_device(name, tensor, "q", problem.device));
  return check_same_dtype(name, tensor, "q", problem.dtype);
}

// Rank, rows and extents of one of q, k, v, out.
flashmoe_status check_rows_tensor(const char* name, const flashmoe_tensor* tensor, Dtype dtype,
                                  View* view) {
  FLASHMOE_TRY(check_view(name, tensor, 4, view));
  return check_rows(name, *view, 4, dtype_bytes(dtype));
}

// The extent of one end of the window, whose bit of `window` is set or not.
flashmoe_status check_window_end(const char* name, bool set, int64_t extent) {
  if (set ? extent >= 0 : extent == 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %lld, accepted is %s", name,
              static_cast<long long>(extent),
              set ? "0 or more" : "0, as its bit of window is not set");
}

flashmoe_status check_window(const flashmoe_attention_forward_params* params) {
  const bool left = (params->window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right = (params->window & FLASHMOE_WINDOW_RIGHT) != 0;
  if ((params->window & ~uint32_t{FLASHMOE_WINDOW_LEFT | FLASHMOE_WINDOW_RIGHT}) != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "window: got %u, accepted are 0 (none), 1 (left), 2 (right) and 3 (both)",
                params->window);
  }
  FLASHMOE_TRY(check_window_end("window_left", left, params->window_left));
  FLASHMOE_TRY(check_window_end("window_right", right, params->window_right));
  if (params->causal != FLASHMOE_CAUSAL_NONE && params->window_right != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "window_right: got %lld, accepted with causal is 0",
                static_cast<long long>(params->window_right));
  }
  return FLASHMOE_OK;
}

void set_softcap(float softcap, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  constexpr float kHighest = 1e38f;  // times log2(e) it is finite
  const float ratio = softcap > 0.0f ? p.scale / softcap : 0.0f;
  // A softcap beyond these bends no logit below 1e34 or scale * 1e34.
  const bool capped = ratio >= FLT_MIN && softcap <= kHighest;
  p.softcap = capped ? softcap : 0.0f;
  // An infinity times 0 would not be 0.
  p.cap_ratio = capped ? std::min(ratio, FLT_MAX) : 0.0f;
}

// The visible keys of params, in which extents may be anything from 0 up, as bounds of the problem.
void set_bounds(const flashmoe_attention_forward_params* params, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  const bool causal = params->causal != FLASHMOE_CAUSAL_NONE;
  const int64_t diagonal = params->causal == FLASHMOE_CAUSAL_TOP_LEFT ? 0 : p.seq_k - p.seq_q;
  const int64_t longest = p.seq_q + p.seq_k;  // hides nothing, and cannot overflow
  p.left_offset = diagonal - std::min(params->window_left, longest);
  p.right_offset = diagonal + std::min(params->window_right, longest);
  p.bounded_left = (params->window & FLASHMOE_WINDOW_LEFT) != 0 && p.left_offset > 1 - p.seq_q;
  p.bounded_right =
      (causal || (params->window & FLASHMOE_WINDOW_RIGHT) != 0) && p.right_offset < p.seq_k - 1;
  p.left_offset = p.bounded_left ? std::min(p.left_offset, p.seq_k) : 0;
  p.right_offset = p.bounded_right ? std::max(p.right_offset, -p.seq_q) : 0;
}

flashmoe_status make_problem(const flashmoe_attention_forward_params* params,
                             AttentionProblem* problem) {
  if (params->layout != FLASHMOE_LAYOUT_BSHD && params->layout != FLASHMOE_LAYOUT_BHSD) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "layout: got %d, accepted are 0 (bshd) and 1 (bhsd)", params->layout);
  }
  if (params->causal < FLASHMOE_CAUSAL_NONE || params->causal > FLASHMOE_CAUSAL_TOP_LEFT) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "causal: got %d, accepted are 0 (none), 1 (bottom_right) and 2 (top_left)",
                params->causal);
  }
  if (!(params->scale >= 0.0f) || !std::isfinite(params->scale)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "scale: got %g, accepted is a finite positive number, or 0 for 1 / sqrt(dim)",
                static_cast<double>(params->scale));
  }
  if (!(params->softcap >= 0.0f) || !std::isfinite(params->softcap)) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "softcap: got %g, accepted is a finite positive number, or 0 for none",
                static_cast<double>(params->softcap));
  }
  FLASHMOE_TRY(check_window(params));
  if (params->reserved != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "reserved: got %u, accepted is 0",
                params->reserved);
  }

  AttentionProblem& p = *problem;
  const bool bhsd = params->layout == FLASHMOE_LAYOUT_BHSD;
  const int seq_axis = bhsd ? 2 : 1;
  const int head_axis = bhsd ? 1 : 2;

  View q, k, v, out;
  FLASHMOE_TRY(check_view("q", params->q, 4, &q));
  FLASHMOE_TRY(check_device("q", *params->q, &p.device));
  FLASHMOE_TRY(check_first_dtype("q", *params->q, p.device, &p.dtype));
  // Before the rows, which begin at odd addresses for want of such a dimension.
  FLASHMOE_TRY(check_head_dim("q", q.shape[3]));
  FLASHMOE_TRY(check_rows("q", q, 4, dtype_bytes(p.dtype)));
  FLASHMOE_TRY(check_rows_tensor("k", params->k, p.dtype, &k));
  FLASHMOE_TRY(check_same_kind("k", *params->k, p));
  FLASHMOE_TRY(check_view("v", params->v, 4, &v));
  FLASHMOE_TRY(check_head_dim("v", v.shape[3]));
  FLASHMOE_TRY(check_rows("v", v, 4, dtype_bytes(p.dtype)));
  FLASHMOE_TRY(check_same_kind("v", *params->v, p));
  FLASHMOE_TRY(check_rows_tensor("out", params->out, p.dtype, &out));
  FLASHMOE_TRY(check_same_kind("out", *params->out, p));

  p.batch = q.shape[0];
  p.seq_q = q.shape[seq_axis];
  p.heads_q = q.shape[head_axis];
  p.dim = q.shape[3];
  p.seq_k = k.shape[seq_axis];
  p.heads_kv = k.shape[head_axis];
  p.dim_v = v.shape[3];
  FLASHMOE_TRY(check_extent("k", "head dimension", k.shape[3], "q", p.dim));
  FLASHMOE_TRY(check_extent("k", "batch", k.shape[0], "q", p.batch));
  FLASHMOE_TRY(check_extent("v", "batch", v.shape[0], "q", p.batch));
  FLASHMOE_TRY(check_extent("out", "batch", out.shape[0], "q", p.batch));
  FLASHMOE_TRY(check_extent("v", "sequence length", v.shape[seq_axis], "k", p.seq_k));
  FLASHMOE_TRY(check_extent("out", "sequence length", out.shape[seq_axis], "q", p.seq_q));
  FLASHMOE_TRY(check_extent("v", "number of heads", v.shape[head_axis], "k", p.heads_kv));
  FLASHMOE_TRY(check_extent("out", "number of heads", out.shape[head_axis], "q", p.heads_q));
  FLASHMOE_TRY(check_extent("out", "head dimension", out.shape[3], "v", p.dim_v));
  if (p.heads_q == 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "q: got 0 heads, accepted is 1 or more");
  }
  if (p.heads_kv == 0 || p.heads_q % p.heads_kv != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "k: got %lld heads, accepted are divisors of q's %lld",
                static_cast<long long>(p.heads_kv), static_cast<long long>(p.heads_q));
  }
  FLASHMOE_TRY(check_no_overlap("out", out, 4));

  p.lse = nullptr;
  p.lse_strides = {0, 0, 0};
  if (params->lse != nullptr) {
    View lse;
    FLASHMOE_TRY(check_view("lse", params->lse, 3, &lse));
    FLASHMOE_TRY(check_same_device("lse", *params->lse, "q", p.device));
    FLASHMOE_TRY(check_fp32("lse", *params->lse));
    FLASHMOE_TRY(check_extent("lse", "batch", lse.shape[0], "q", p.batch));
    FLASHMOE_TRY(check_extent("lse", "number of heads", lse.shape[1], "q", p.heads_q));
    FLASHMOE_TRY(check_extent("lse", "sequence length", lse.shape[2], "q", p.seq_q));
    FLASHMOE_TRY(check_alignment("lse", lse, alignof(float)));
    FLASHMOE_TRY(check_no_overlap("lse", lse, 3));
    p.lse = static_cast<float*>(lse.data);
    p.lse_strides = {lse.strides[0], lse.strides[2], lse.strides[1]};
  }

  p.q = q.data;
  p.k = k.data;
  p.v = v.data;
  p.out = out.data;
  p.q_strides = row_strides(q, bhsd);
  p.k_strides = row_strides(k, bhsd);
  p.v_strides = row_strides(v, bhsd);
  p.out_strides = row_strides(out, bhsd);
  p.scale = params->scale != 0.0f ? params->scale
                                  : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.dim)));
  set_softcap(params->softcap, &p);
  set_bounds(params, &p);
  return FLASHMOE_OK;
}

// The first family that serves the problem, or the one that the caller asks for. With `explain` also
// says in plan->info.rejected why the others do not.
flashmoe_status choose(const Wanted& wanted, bool explain, const AttentionProblem& problem,
                       AttentionPlan* plan, const AttentionFamily** chosen) {
  const auto ask = [&problem, plan](const AttentionFamily& family, const Reason& reason) {
    *plan = {};
    FLASHMOE_TRY(family.plan(problem, plan, reason));
    if (problem.kernel != nullptr && std::strcmp(problem.kernel, plan->info.kernel) != 0) {
      return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s serves this call, not %.64s",
                           plan->info.kernel, problem.kernel);
    }
    return FLASHMOE_OK;
  };
  const auto yields = [](const AttentionFamily&) -> const char* { return nullptr; };
  Choice choice(kFamilies, std::size(kFamilies), wanted, kKernelPrefix, problem.device, ask,
                yields);
  if (!explain) return choice.choose(chosen);
  char rejected[kRejectedBytes];
  FLASHMOE_TRY(choice.choose_and_explain(chosen, rejected));
  std::memcpy(plan->info.rejected, rejected, sizeof rejected);
  return FLASHMOE_OK;
}

flashmoe_status AttentionOperation::make_call(const Params* given, bool explain,
                                              AttentionCall* call) {
  AttentionProblem* const problem = &call->problem;
  flashmoe_attention_forward_params params;
  FLASHMOE_TRY(read_params("flashmoe_attention_forward_params", given,
                           offsetof(flashmoe_attention_forward_params, window), &params));
  FLASHMOE_TRY(make_problem(&params, problem));
  set_reaches(params, call);
  const Wanted wanted = wanted_of(kFamilies, std::size(kFamilies), params.kernel, problem->device);
  problem->named = wanted.name != nullptr;
  problem->kernel = nullptr;
  if (wanted.name != nullptr &&
      std::strncmp(wanted.name, kKernelPrefix, sizeof kKernelPrefix - 1) == 0) {
    problem->kernel = wanted.name;
  }
  return choose(wanted, explain, *problem, &call->plan, &call->family);
}

// One end of the keys that row i sees: "i-255", or `unbounded`.
struct BoundText {
  char text[32];

  BoundText(bool bounded, int64_t offset, const char* unbounded) {
    if (bounded) {
      std::snprintf(text, sizeof text, "i%+lld", static_cast<long long>(offset));
    } else {
      std::snprintf(text, sizeof text, "%s", unbounded);
    }
  }
};

void log_call(const AttentionProblem& p, const AttentionPlan& plan, const void* stream) {
  if (!log_enabled(FLASHMOE_LOG_INFO)) return;
  const flashmoe_attention_plan& info = plan.info;
  log_line(FLASHMOE_LOG_INFO,
           "attention_forward batch=%lld seq_q=%lld seq_k=%lld heads=%lld/%lld dim=%lld/%lld %s "
           "window=%s..%s softcap=%g lse=%s device=%s stream=%p -> %s grid=%ux%ux%u block=%u "
           "shared=%llu",
           static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
           static_cast<long long>(p.seq_k), static_cast<long long>(p.heads_q),
           static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
           static_cast<long long>(p.dim_v), dtype_name(p.dtype),
           BoundText(p.bounded_left, p.left_offset, "0").text,
           BoundText(p.bounded_right, p.right_offset, "end").text, static_cast<double>(p.softcap),
           p.lse != nullptr ? "yes" : "no", DeviceName(p.device).text, stream, info.kernel,
           info.grid[0], info.grid[1], info.grid[2], info.block[0],
           static_cast<unsigned long long>(info.shared_bytes));
  if (log_enabled(FLASHMOE_LOG_DEBUG) && info.rejected[0] != '\0') {
    log_line(FLASHMOE_LOG_DEBUG, "rejected: %s", info.rejected);
  }
}

flashmoe_status run(const AttentionCall& call, bool logged, void* workspace, void* stream) {
  const AttentionProblem& problem = call.problem;
  const AttentionPlan& plan = call.plan;
  if (logged) log_call(problem, plan, stream);
  if (problem.batch == 0 || problem.seq_q == 0) return FLASHMOE_OK;
  return call.family->launch(problem, plan, workspace, stream);
}

}  // namespace
}  // namespace flashmoe

using flashmoe::AttentionCall;
using flashmoe::AttentionOperation;
using flashmoe::fail;

flashmoe_status flashmoe_attention_forward_plan(const flashmoe_attention_forward_params* params,
                                                flashmoe_attention_plan* plan) {
  if (plan == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "plan: got a null pointer");
  }
  FLASHMOE_TRY(flashmoe::check_struct_size("flashmoe_attention_plan", plan->struct_size,
                                           sizeof *plan, sizeof *plan));
  flashmoe::AttentionCall call;
  FLASHMOE_TRY(AttentionOperation::make_call(params, true, &call));
  flashmoe_attention_plan& made = call.plan.info;
  made.struct_size = sizeof made;
  std::snprintf(made.family, sizeof made.family, "%s", call.family->name);
  made.flops = flashmoe::attention_flops(call.problem);
  flashmoe::copy_out(made, plan);
  return FLASHMOE_OK;
}

flashmoe_status flashmoe_attention_forward_workspace_size(
    const flashmoe_attention_forward_params* params, size_t* bytes) {
  if (bytes == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "bytes: got a null pointer");
  }
  return flashmoe::with_call<AttentionOperation>(params, [bytes](const AttentionCall& call, bool) {
    *bytes = static_cast<size_t>(call.plan.info.workspace_bytes);
    return FLASHMOE_OK;
  });
}

flashmoe_status flashmoe_attention_forward(const flashmoe_attention_forward_params* params,
                                           void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::with_call<AttentionOperation>(
      params, [&](const AttentionCall& call, bool logged) {
        FLASHMOE_TRY(flashmoe::check_memory(*params, call, workspace, workspace_size,
                                            flashmoe::kWorkspaceAlignment,
                                            "flashmoe_attention_forward_workspace_size"));
        return flashmoe::run(call, logged, workspace, stream);
      });
}
