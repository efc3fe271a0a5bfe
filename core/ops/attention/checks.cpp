#include "core/ops/attention/checks.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>

#include "core/choose.h"
#include "core/ops/attention/sequences.h"
#include "core/status.h"

namespace flashmoe {
namespace {

flashmoe_status check_head_dim(const char* name, int64_t dim, int64_t most) {
  if (dim >= kHeadDimMultiple && dim <= most && dim % kHeadDimMultiple == 0) {
    return FLASHMOE_OK;
  }
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: its head dimension is %lld, accepted are multiples of %lld from %lld to %lld",
              name, static_cast<long long>(dim), static_cast<long long>(kHeadDimMultiple),
              static_cast<long long>(kHeadDimMultiple), static_cast<long long>(most));
}

// Checks the dtype of k or v: q's dtype, or fp8 where allowed.
flashmoe_status check_key_dtype(const char* name, const flashmoe_tensor& tensor,
                                const AttentionArguments& arguments,
                                const AttentionProblem& problem, Dtype* dtype) {
  FLASHMOE_TRY(check_same_device(name, tensor, "q", problem.device));
  *dtype = problem.q.dtype;
  if (!arguments.may_be_fp8) return check_same_dtype(name, tensor, "q", *dtype);
  return check_cache_dtype(name, tensor, "q", problem.q.dtype, dtype);
}

// Whether v is the first columns of k. Strides of extents of at most 1 do not matter.
bool are_values_in_keys(const AttentionProblem& p, const View& k) {
  if (p.v.data != p.k.data || p.dim_v > p.dim) return false;
  const auto same = [](int64_t extent, int64_t a, int64_t b) { return extent <= 1 || a == b; };
  return same(k.shape[0], p.k.strides.batch, p.v.strides.batch) &&
         same(p.seq_k, p.k.strides.seq, p.v.strides.seq) &&
         same(p.heads_kv, p.k.strides.head, p.v.strides.head);
}

// Bytes of an element of k or v, before its dtype is checked.
int64_t key_bytes(const AttentionArguments& arguments, const flashmoe_tensor& tensor,
                  const AttentionProblem& problem) {
  return dtype_bytes(arguments.may_be_fp8 && is_fp8(tensor.dtype) ? Dtype::kFloat8E4M3
                                                                  : problem.q.dtype);
}

// Checks rank, rows and extents of one of q, k, v and out.
flashmoe_status check_rows_tensor(const char* name, const flashmoe_tensor* tensor, Dtype dtype,
                                  View* view) {
  FLASHMOE_TRY(check_view(name, tensor, 4, view));
  return check_rows(name, *view, 4, dtype_bytes(dtype));
}

// Checks the extent of one end of the window. `set`: `window` has its bit.
flashmoe_status check_window_end(const char* name, bool set, int64_t extent) {
  if (set ? extent >= 0 : extent == 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %lld, accepted is %s", name,
              static_cast<long long>(extent),
              set ? "0 or more" : "0, as its bit of window is not set");
}

void set_softcap(float softcap, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  constexpr float kHighest = 1e38f;  // still finite times log2(e)
  const float ratio = softcap > 0.0f ? p.scale / softcap : 0.0f;
  // A softcap beyond these bounds bends no logit below 1e34 or scale * 1e34.
  const bool capped = ratio >= FLT_MIN && softcap <= kHighest;
  p.softcap = capped ? softcap : 0.0f;
  // An infinity times 0 would not be 0.
  p.cap_ratio = capped ? std::min(ratio, FLT_MAX) : 0.0f;
}

// Reads a tensor with one number per pair of a query and a key.
flashmoe_status read_pairs(const char* name, const flashmoe_tensor& tensor, size_t element_bytes,
                           bool ragged, AttentionProblem* problem, PairsView* pairs) {
  AttentionProblem& p = *problem;
  View view;
  FLASHMOE_TRY(check_view(name, &tensor, 4, &view));
  FLASHMOE_TRY(check_same_device(name, tensor, "q", p.device));
  FLASHMOE_TRY(check_alignment(name, view, element_bytes));
  const struct {
    const char* extent;
    const char* of;
    int64_t want;
    int64_t* stride;
  } axes[] = {
      {"batch", ragged ? "the sequences'" : "q's", p.batch, &pairs->batch_stride},
      {"number of heads", "q's", p.heads_q, &pairs->head_stride},
      {"number of queries", ragged ? "q's or max_seqlen_q's" : "q's", p.seq_q,
       &pairs->query_stride},
      {"number of keys", ragged ? "k's or max_seqlen_k's" : "k's", p.seq_k, &pairs->key_stride}};
  for (int axis = 0; axis < 4; ++axis) {
    const auto& [extent, of, want, stride] = axes[axis];
    const int64_t got = view.shape[axis];
    const bool may_be_more = ragged && axis >= 2;
    if (got != 1 && got != want && !(may_be_more && got > want)) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: its %s is %lld, accepted are %s %lld%s, and 1 for all", name, extent,
                  static_cast<long long>(got), of, static_cast<long long>(want),
                  may_be_more ? " and more" : "");
    }
    *stride = got == 1 ? 0 : view.strides[axis];
  }
  if (view.shape[3] != 1) p.sequences.pair_keys = std::min(p.sequences.pair_keys, view.shape[3]);
  pairs->data = view.data;
  return FLASHMOE_OK;
}

// Text of one end of the keys that row i sees: "i-255", or `unbounded`.
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

}  // namespace

flashmoe_status check_window(const AttentionArguments& arguments) {
  const bool left = (arguments.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right = (arguments.window & FLASHMOE_WINDOW_RIGHT) != 0;
  if ((arguments.window & ~uint32_t{FLASHMOE_WINDOW_LEFT | FLASHMOE_WINDOW_RIGHT}) != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "window: got %u, accepted are 0 (none), 1 (left), 2 (right) and 3 (both)",
                arguments.window);
  }
  FLASHMOE_TRY(check_window_end("window_left", left, arguments.window_left));
  FLASHMOE_TRY(check_window_end("window_right", right, arguments.window_right));
  if (arguments.causal != FLASHMOE_CAUSAL_NONE && arguments.window_right != 0) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "window_right: got %lld, accepted with causal is 0",
                static_cast<long long>(arguments.window_right));
  }
  return FLASHMOE_OK;
}

flashmoe_status check_attention(const AttentionArguments& arguments, AttentionProblem* problem,
                                AttentionViews* views) {
  AttentionProblem& p = *problem;
  auto& [q, k, v, out] = *views;
  FLASHMOE_TRY(check_view("q", arguments.q, 4, &q));
  FLASHMOE_TRY(check_device("q", *arguments.q, &p.device));
  FLASHMOE_TRY(check_first_dtype("q", *arguments.q, p.device, &p.q.dtype));
  const Dtype dtype = p.q.dtype;
  // Head dimensions are checked before rows: a wrong one would be reported as misaligned rows.
  FLASHMOE_TRY(check_head_dim("q", q.shape[3], arguments.most_dim));
  FLASHMOE_TRY(check_rows("q", q, 4, dtype_bytes(dtype)));
  FLASHMOE_TRY(check_view("k", arguments.k, 4, &k));
  FLASHMOE_TRY(check_rows("k", k, 4, key_bytes(arguments, *arguments.k, p)));
  FLASHMOE_TRY(check_key_dtype("k", *arguments.k, arguments, p, &p.k.dtype));
  FLASHMOE_TRY(check_view("v", arguments.v, 4, &v));
  FLASHMOE_TRY(check_head_dim("v", v.shape[3], arguments.most_dim_v));
  FLASHMOE_TRY(check_rows("v", v, 4, key_bytes(arguments, *arguments.v, p)));
  FLASHMOE_TRY(check_key_dtype("v", *arguments.v, arguments, p, &p.v.dtype));
  if (p.v.dtype != p.k.dtype) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "v: got dtype %s, accepted is %s as k's",
                dtype_name(p.v.dtype), dtype_name(p.k.dtype));
  }
  Dtype of_out = dtype;
  if (arguments.merges && dtype != Dtype::kFloat64) {
    FLASHMOE_TRY(check_view("out", arguments.out, 4, &out));
    FLASHMOE_TRY(check_dtype("out", *arguments.out, &of_out));
  }
  FLASHMOE_TRY(check_rows_tensor("out", arguments.out, of_out, &out));
  FLASHMOE_TRY(check_same_device("out", *arguments.out, "q", p.device));
  FLASHMOE_TRY(check_same_dtype("out", *arguments.out, "q", of_out));

  const int seq_axis = arguments.seq_axis();
  const int head_axis = arguments.head_axis();
  const bool ragged = arguments.sequences != nullptr;
  p.batch = q.shape[0];
  p.seq_q = q.shape[seq_axis];
  p.heads_q = q.shape[head_axis];
  p.dim = q.shape[3];
  p.seq_k = k.shape[seq_axis];
  p.heads_kv = k.shape[head_axis];
  p.dim_v = v.shape[3];
  FLASHMOE_TRY(check_extent("k", "head dimension", k.shape[3], "q", p.dim));
  if (!ragged) FLASHMOE_TRY(check_extent("k", "batch", k.shape[0], "q", p.batch));
  FLASHMOE_TRY(check_extent("v", "batch", v.shape[0], ragged ? "k" : "q", k.shape[0]));
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

  set_rows(q, dtype, arguments, &p.q);
  set_rows(k, p.k.dtype, arguments, &p.k);
  set_rows(v, p.v.dtype, arguments, &p.v);
  set_rows(out, of_out, arguments, &p.out);
  p.values_in_keys = are_values_in_keys(p, k);
  p.scale = arguments.scale != 0.0f
                ? arguments.scale
                : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.dim)));
  copy_kernel_name(arguments.kernel, &p.kernel);
  set_softcap(arguments.softcap, &p);
  if (ragged) return read_sequences(arguments, q, k, &p);
  set_bounds(arguments.mask(), &p);
  return FLASHMOE_OK;
}

flashmoe_status check_row_numbers(const char* name, const flashmoe_tensor* tensor,
                                  const AttentionArguments& arguments, const View& q,
                                  const AttentionProblem& problem, View* view,
                                  RowStrides* strides) {
  const bool wide = problem.q.dtype == Dtype::kFloat64;
  FLASHMOE_TRY(check_view(name, tensor, 3, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, "q", problem.device));
  FLASHMOE_TRY(wide ? check_same_dtype(name, *tensor, "q", Dtype::kFloat64)
                    : check_fp32(name, *tensor));
  FLASHMOE_TRY(check_extent(name, "batch", view->shape[0], "q", q.shape[0]));
  FLASHMOE_TRY(check_extent(name, "number of heads", view->shape[1], "q", problem.heads_q));
  FLASHMOE_TRY(
      check_extent(name, "sequence length", view->shape[2], "q", q.shape[arguments.seq_axis()]));
  FLASHMOE_TRY(check_alignment(name, *view, wide ? alignof(double) : alignof(float)));
  *strides = {view->strides[0], view->strides[2], view->strides[1]};
  return FLASHMOE_OK;
}

flashmoe_status read_sinks(const flashmoe_tensor* tensor, AttentionProblem* problem) {
  if (tensor == nullptr) return FLASHMOE_OK;
  HeadLogits& sinks = problem->sinks;
  View view;
  FLASHMOE_TRY(check_view("sinks", tensor, 1, &view));
  FLASHMOE_TRY(check_same_device("sinks", *tensor, "q", problem->device));
  FLASHMOE_TRY(check_same_dtype_or_fp32("sinks", *tensor, "q", problem->q.dtype, &sinks.dtype));
  FLASHMOE_TRY(check_extent("sinks", "number of heads", view.shape[0], "q", problem->heads_q));
  FLASHMOE_TRY(check_alignment("sinks", view, static_cast<size_t>(dtype_bytes(sinks.dtype))));
  sinks.data = view.data;
  sinks.stride = view.strides[0];
  return FLASHMOE_OK;
}

flashmoe_status read_scale(const char* name, const flashmoe_tensor& tensor, const char* of,
                           flashmoe_device device, int64_t batch, int64_t heads_kv,
                           KeyScales* scales) {
  View view;
  const int rank = std::clamp<int>(tensor.ndim, 0, 2);
  FLASHMOE_TRY(check_view(name, &tensor, rank, &view));
  FLASHMOE_TRY(check_same_device(name, tensor, of, device));
  FLASHMOE_TRY(check_fp32(name, tensor));
  FLASHMOE_TRY(check_alignment(name, view, sizeof(float)));
  // An extent of 1 stands for all rows of the batch, or all heads.
  const int64_t rows = rank == 2 ? view.shape[0] : 1;
  const int64_t heads = rank >= 1 ? view.shape[rank - 1] : 1;
  if ((rows != 1 && rows != batch) || (heads != 1 && heads != heads_kv)) {
    char first[32] = "";
    if (rank == 2) std::snprintf(first, sizeof first, "%lld, ", static_cast<long long>(rows));
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got shape [%s%lld], accepted are [], [1 or %lld] and [1 or %lld, 1 or %lld]: "
                "of all, of the KV heads, and of rows of the batch, or pages, and heads",
                name, first, static_cast<long long>(heads), static_cast<long long>(heads_kv),
                static_cast<long long>(batch), static_cast<long long>(heads_kv));
  }
  scales->data = view.data;
  scales->batch_stride = rows > 1 ? view.strides[0] : 0;
  scales->head_stride = heads > 1 ? view.strides[rank - 1] : 0;
  return FLASHMOE_OK;
}

flashmoe_status read_bias_and_mask(const flashmoe_tensor* bias, const flashmoe_tensor* mask,
                                   bool ragged, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  if (bias != nullptr) {
    FLASHMOE_TRY(check_same_dtype_or_fp32("attn_bias", *bias, "q", p.q.dtype, &p.bias.dtype));
    const auto bytes = static_cast<size_t>(dtype_bytes(p.bias.dtype));
    FLASHMOE_TRY(read_pairs("attn_bias", *bias, bytes, ragged, problem, &p.bias));
  }
  if (mask == nullptr) return FLASHMOE_OK;
  FLASHMOE_TRY(check_mask_dtype("attn_mask", *mask));
  return read_pairs("attn_mask", *mask, 1, ragged, problem, &p.mask);
}

flashmoe_status check_shape_of(const char* name, const View& view, const char* of, const View& like,
                               const AttentionArguments& arguments) {
  const int seq_axis = arguments.seq_axis();
  const int head_axis = arguments.head_axis();
  FLASHMOE_TRY(check_extent(name, "batch", view.shape[0], of, like.shape[0]));
  FLASHMOE_TRY(
      check_extent(name, "sequence length", view.shape[seq_axis], of, like.shape[seq_axis]));
  FLASHMOE_TRY(
      check_extent(name, "number of heads", view.shape[head_axis], of, like.shape[head_axis]));
  return check_extent(name, "head dimension", view.shape[3], of, like.shape[3]);
}

BiasAndMaskText::BiasAndMaskText(const AttentionProblem& p) {
  text[0] = '\0';
  const int used = p.bias.data == nullptr ? 0
                                          : std::snprintf(text, sizeof text, " attn_bias=%s",
                                                          dtype_name(p.bias.dtype));
  if (p.mask.data != nullptr) {
    std::snprintf(text + used, sizeof text - static_cast<size_t>(used), " attn_mask=yes");
  }
}

int print_attention(const AttentionProblem& p, char* text, size_t size) {
  if (p.sequences.given) return print_sequences(p, text, size);
  return std::snprintf(text, size,
                       "batch=%lld seq_q=%lld seq_k=%lld heads=%lld/%lld dim=%lld/%lld %s "
                       "window=%s..%s",
                       static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
                       static_cast<long long>(p.seq_k), static_cast<long long>(p.heads_q),
                       static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
                       static_cast<long long>(p.dim_v), dtype_name(p.q.dtype),
                       BoundText(p.bounded_left, p.left_offset, "0").text,
                       BoundText(p.bounded_right, p.right_offset, "end").text);
}

}  // namespace flashmoe
