// Attention forward: its options, its checks and its families. See core/operation.h for the rest.
#include "core/ops/attention/problem.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/checks.h"
#include "core/operation.h"
#include "core/option.h"
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

using Params = flashmoe_attention_forward_params;

constexpr const char* kLayouts[] = {"bshd", "bhsd"};
constexpr const char* kCausals[] = {"none", "bottom_right", "top_left"};

// In this order they are checked, and logged.
constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kLayouts),
    Option<Params>::choice("causal", &Params::causal, kCausals),
    Option<Params>::positive("scale", &Params::scale, "1 / sqrt(dim)"),
    Option<Params>::positive("softcap", &Params::softcap, "none"),
    Option<Params>::reserved("reserved", &Params::reserved),
};

template <class Data>
void set_view(const View& view, bool bhsd, RowsView<Data>* rows) {
  rows->data = view.data;
  rows->strides = bhsd ? RowStrides{view.strides[0], view.strides[2], view.strides[1]}
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

template <class Data>
flashmoe_status check_same_kind(const char* name, const flashmoe_tensor& tensor,
                                const AttentionProblem& problem, RowsView<Data>* rows) {
  FLASHMOE_TRY(check_same_device(name, tensor, "q", problem.device));
  rows->dtype = problem.q.dtype;
  return check_same_dtype(name, tensor, "q", problem.q.dtype);
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

// What the ABI has a place for, and no kernel computes.
flashmoe_status check_unserved(const flashmoe_attention_forward_params* params) {
  const auto absent = [](const char* name, const void* given, const char* why) {
    if (given == nullptr) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted is a null pointer: %s",
                name, why);
  };
  constexpr char kNoScales[] = "tensors of fp16, bf16 and fp32 have no scales";
  FLASHMOE_TRY(absent("q_scale", params->q_scale, kNoScales));
  FLASHMOE_TRY(absent("k_scale", params->k_scale, kNoScales));
  FLASHMOE_TRY(absent("v_scale", params->v_scale, kNoScales));
  return absent("sequences", params->sequences,
                "ragged, padded and paged batches are not computed by this version");
}

flashmoe_status make_problem(const flashmoe_attention_forward_params* params,
                             AttentionProblem* problem) {
  FLASHMOE_TRY(check_options(kOptions, *params));
  FLASHMOE_TRY(check_window(params));
  FLASHMOE_TRY(check_unserved(params));

  AttentionProblem& p = *problem;
  const bool bhsd = params->layout == FLASHMOE_LAYOUT_BHSD;
  const int seq_axis = bhsd ? 2 : 1;
  const int head_axis = bhsd ? 1 : 2;

  View q, k, v, out;
  FLASHMOE_TRY(check_view("q", params->q, 4, &q));
  FLASHMOE_TRY(check_device("q", *params->q, &p.device));
  FLASHMOE_TRY(check_first_dtype("q", *params->q, p.device, &p.q.dtype));
  // Before the rows, which begin at odd addresses for want of such a dimension.
  FLASHMOE_TRY(check_head_dim("q", q.shape[3]));
  FLASHMOE_TRY(check_rows("q", q, 4, dtype_bytes(p.q.dtype)));
  FLASHMOE_TRY(check_rows_tensor("k", params->k, p.q.dtype, &k));
  FLASHMOE_TRY(check_same_kind("k", *params->k, p, &p.k));
  FLASHMOE_TRY(check_view("v", params->v, 4, &v));
  FLASHMOE_TRY(check_head_dim("v", v.shape[3]));
  FLASHMOE_TRY(check_rows("v", v, 4, dtype_bytes(p.q.dtype)));
  FLASHMOE_TRY(check_same_kind("v", *params->v, p, &p.v));
  FLASHMOE_TRY(check_rows_tensor("out", params->out, p.q.dtype, &out));
  FLASHMOE_TRY(check_same_kind("out", *params->out, p, &p.out));

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

  set_view(q, bhsd, &p.q);
  set_view(k, bhsd, &p.k);
  set_view(v, bhsd, &p.v);
  set_view(out, bhsd, &p.out);
  p.scale = params->scale != 0.0f ? params->scale
                                  : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.dim)));
  copy_kernel_name(params->kernel, &p.kernel);
  set_softcap(params->softcap, &p);
  set_bounds(params, &p);
  return FLASHMOE_OK;
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

struct AttentionForward {
  using Params = flashmoe_attention_forward_params;
  using Problem = AttentionProblem;
  static constexpr char kName[] = "attention_forward";
  static constexpr char kParams[] = "flashmoe_attention_forward_params";
  static constexpr char kSizeFunction[] = "flashmoe_attention_forward_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, window);
  static constexpr std::array<TensorMember<Params>, 5> kTensors = {{
      {"q", &Params::q},
      {"k", &Params::k},
      {"v", &Params::v},
      {"out", &Params::out},
      {"lse", &Params::lse},
  }};
  static constexpr size_t kFirstOutput = 3;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "attention_forward_";
  static constexpr const AttentionFamily* kFamilies[] = {
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

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    return flashmoe::make_problem(&params, problem);
  }
  static double flops(const Problem& p) { return attention_flops(p); }
  static bool is_empty(const Problem& p) { return p.batch == 0 || p.seq_q == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[128];
    print_options(kOptions, params, options, sizeof options);
    std::snprintf(
        text, size,
        "batch=%lld seq_q=%lld seq_k=%lld heads=%lld/%lld dim=%lld/%lld %s window=%s..%s%s "
        "lse=%s",
        static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
        static_cast<long long>(p.seq_k), static_cast<long long>(p.heads_q),
        static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
        static_cast<long long>(p.dim_v), dtype_name(p.q.dtype),
        BoundText(p.bounded_left, p.left_offset, "0").text,
        BoundText(p.bounded_right, p.right_offset, "end").text, options,
        p.lse != nullptr ? "yes" : "no");
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::AttentionForward;

flashmoe_status flashmoe_attention_forward_plan(const flashmoe_attention_forward_params* params,
                                                flashmoe_plan* plan) {
  return flashmoe::plan_operation<AttentionForward>(params, plan);
}

flashmoe_status flashmoe_attention_forward_workspace_size(
    const flashmoe_attention_forward_params* params, size_t* bytes) {
  return flashmoe::workspace_size_of<AttentionForward>(params, bytes);
}

flashmoe_status flashmoe_attention_forward(const flashmoe_attention_forward_params* params,
                                           void* workspace, size_t workspace_size, void* stream) {
  return flashmoe::run_operation<AttentionForward>(params, workspace, workspace_size, stream);
}
