// Checks that the attention operations share, and the conversion of their arguments to problems.
#pragma once

#include <cstdint>

#include "core/checks.h"
#include "core/ops/attention/problem.h"
#include "core/option.h"

namespace flashmoe {

inline constexpr const char* kAttentionLayouts[] = {"bshd", "bhsd"};
inline constexpr const char* kAttentionCausals[] = {"none", "bottom_right", "top_left"};

// The score options that every attention operation has. They are checked and logged in this order,
// before those of one operation.
template <class Params>
inline constexpr Option<Params> kScoreOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kAttentionLayouts),
    Option<Params>::choice("causal", &Params::causal, kAttentionCausals),
    Option<Params>::positive("scale", &Params::scale, "1 / sqrt(dim)"),
    Option<Params>::positive("softcap", &Params::softcap, "none"),
};

// The arguments that all attention operations share.
struct AttentionArguments {
  const flashmoe_tensor* q;
  const flashmoe_tensor* k;
  const flashmoe_tensor* v;
  const flashmoe_tensor* out;
  int32_t layout;
  int32_t causal;
  uint32_t window;
  int64_t window_left;
  int64_t window_right;
  float scale;
  float softcap;
  const char* kernel;
  const flashmoe_attention_sequences* sequences = nullptr;  // whose size is checked
  bool may_be_fp8 = false;                                  // k and v
  int64_t most_dim = kMaxGradientHeadDim;
  int64_t most_dim_v = kMaxGradientHeadDim;
  bool merges = false;  // merges a prior result in: out may have another dtype than q

  template <class Params>
  static AttentionArguments of(const Params& params) {
    return {params.q,       params.k,      params.v,           params.out,          params.layout,
            params.causal,  params.window, params.window_left, params.window_right, params.scale,
            params.softcap, params.kernel};
  }

  int seq_axis() const { return layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1; }
  int head_axis() const { return layout == FLASHMOE_LAYOUT_BHSD ? 1 : 2; }
  AttentionMask mask() const { return {causal, window, window_left, window_right}; }
};

struct AttentionViews {
  View q;
  View k;
  View v;
  View out;
};

flashmoe_status check_window(const AttentionArguments& arguments);

// Checks q, k, v, out and the options, and fills all of the problem except lse.
flashmoe_status check_attention(const AttentionArguments& arguments, AttentionProblem* problem,
                                AttentionViews* views);

// Checks numbers per row of q, such as lse: [batch, heads_q, seq_q] fp32, or fp64 with an fp64 q.
flashmoe_status check_row_numbers(const char* name, const flashmoe_tensor* tensor,
                                  const AttentionArguments& arguments, const View& q,
                                  const AttentionProblem& problem, View* view, RowStrides* strides);

// Reads one logit per query head, if given.
flashmoe_status read_sinks(const flashmoe_tensor* tensor, AttentionProblem* problem);

// Reads the scales of keys or values: `batch` is the first extent of their tensor, `heads_kv` its
// heads, and `of` a tensor on the same device.
flashmoe_status read_scale(const char* name, const flashmoe_tensor& tensor, const char* of,
                           flashmoe_device device, int64_t batch, int64_t heads_kv,
                           KeyScales* scales);

// Reads the bias and the mask of pairs of a query and a key, if given. Every extent is the call's,
// or 1, which broadcasts. `ragged`: they may have more queries and keys than the call's sequences.
flashmoe_status read_bias_and_mask(const flashmoe_tensor* bias, const flashmoe_tensor* mask,
                                   bool ragged, AttentionProblem* problem);

// Checks that a tensor has the rows, heads and head dimension of `of`, whose view is given.
flashmoe_status check_shape_of(const char* name, const View& view, const char* of, const View& like,
                               const AttentionArguments& arguments);

template <class Data>
void set_rows(const View& view, Dtype dtype, const AttentionArguments& arguments,
              RowsView<Data>* rows) {
  rows->data = view.data;
  rows->strides = {view.strides[0], view.strides[arguments.seq_axis()],
                   view.strides[arguments.head_axis()]};
  rows->dtype = dtype;
}

// "batch=2 seq_q=128 ... bf16 window=0..end", for the log.
int print_attention(const AttentionProblem& problem, char* text, size_t size);
// " attn_bias=fp32 attn_mask=yes"; absent tensors are left out.
struct BiasAndMaskText {
  char text[48];
  explicit BiasAndMaskText(const AttentionProblem& problem);
};

}  // namespace flashmoe
