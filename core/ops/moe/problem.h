// The mixture-of-experts problems: the C ABI's arguments after validation, which every backend
// takes. Words as in flashmoe/moe.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxTopK = 32;

// Numbers of a routing are fp32, or on the CPU fp64. fp64 numbers are at the pointer named
// wide_..., and the other pointer is nullptr.

// A validated call of flashmoe_moe_route. T * K <= 2^31 - 2^16; every pointer is aligned to its
// elements. Weights and lse are wide if logits or given weights are fp64.
struct MoeRouteProblem {
  flashmoe_device device;
  int64_t tokens;
  int32_t experts;
  int32_t top_k;

  const void* logits;  // [tokens, experts], rows logits_stride elements apart; or nullptr, and then
  Dtype logits_dtype;
  int64_t logits_stride;
  const float* selection_bias;  // [experts] or nullptr
  const double* wide_selection_bias;
  const void* given_ids;  // [tokens, top_k], rows given_ids_stride elements apart
  bool given_ids_are_64;
  int64_t given_ids_stride;
  const void* given_weights;  // [tokens, top_k], rows given_weights_stride apart; nullptr: all 1
  Dtype given_weights_dtype;
  int64_t given_weights_stride;
  const int32_t* expert_map;  // [expert_map_size] or nullptr
  int64_t expert_map_size;

  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
  double* wide_weights;
  int32_t* offsets;  // [experts + 1]
  int32_t* pairs;    // [tokens * top_k]
  int32_t* slots;    // [tokens, top_k]
  float* lse;        // [tokens] or nullptr
  double* wide_lse;

  flashmoe_moe_scoring scoring;
  bool renormalize;
  int32_t num_groups;  // 1: no groups
  int32_t top_groups;
  float scale;        // finite
  KernelName kernel;  // "": routing has one family for each device
};

// A [rows, columns] view, or one per expert, with contiguous columns. Strides in elements.
template <class Data>
struct TokenRows {
  Data* data;  // nullptr: absent
  int64_t row_stride;
  int64_t expert_stride;  // 0 for rows of all experts
  Dtype dtype;
  int32_t gap;  // 0: the bytes of problems are compared (core/plan_cache.h)
};

// An [experts, rows, columns] view of weights, strides in elements. One of row_stride and
// column_stride is 1. For a gate and an up interleaved in a transposed tensor, row_stride is 2, and
// up's data begins one element after the gate's.
struct ExpertMatrix {
  const void* data;
  int64_t expert_stride;
  int64_t row_stride;
  int64_t column_stride;
  Dtype dtype;
  int32_t gap;
};

// [experts, rows]; data is nullptr: absent.
struct ExpertBias {
  const void* data;
  int64_t expert_stride;
  int64_t row_stride;  // 1, or 2 for an interleaved gate and up
  Dtype dtype;
  int32_t gap;
};

// A validated call of flashmoe_moe_forward. T * K <= 2^31 - 2^16; hidden and inner are multiples
// of 8. Rows and matrices have one dtype: no kernel takes others yet.
struct MoeForwardProblem {
  flashmoe_device device;
  int64_t tokens;
  int64_t hidden;
  int64_t inner;
  int32_t experts;
  int32_t top_k;

  TokenRows<const void> x;         // [tokens, hidden]
  TokenRows<void> out;             // [tokens, hidden]
  TokenRows<void> pre_activation;  // [tokens * top_k, gated ? 2 * inner : inner], or absent

  bool gated;
  ExpertMatrix gate;  // [experts, inner, hidden]; gated only
  ExpertMatrix up;    // same
  ExpertMatrix down;  // [experts, hidden, inner]
  ExpertBias gate_bias;
  ExpertBias up_bias;
  ExpertBias down_bias;

  const float* weights;        // [tokens, top_k]
  const double* wide_weights;  // only with an fp64 x, which may have either
  const int32_t* offsets;      // [experts + 1]
  const int32_t* pairs;        // [tokens * top_k]
  const int32_t* slots;        // [tokens, top_k]

  flashmoe_activation activation;
  float alpha;
  float limit;  // infinity: none
  float up_offset;
  bool weight_on_input;
  KernelName kernel;  // the family asked for, or ""
};

// A validated call of flashmoe_grouped_product. x, w and out have one dtype: no kernel takes others
// yet.
struct GroupedProductProblem {
  flashmoe_device device;
  int32_t experts;
  int64_t rows;         // of all experts with offsets; of one (M) with counts
  int64_t columns;      // K
  int64_t out_columns;  // N

  TokenRows<const void> x;  // with counts, rows per expert
  TokenRows<void> out;
  ExpertMatrix w;  // [experts, out_columns, columns]
  ExpertBias bias;
  const int32_t* offsets;  // [experts + 1] or nullptr
  const int32_t* counts;   // [experts] or nullptr
  KernelName kernel;
};

// The gradient of an ExpertMatrix, with the same layouts; data is nullptr: not wanted.
struct MatrixGradient {
  void* data;
  int64_t expert_stride;
  int64_t row_stride;
  int64_t column_stride;
  Dtype dtype;
  int32_t gap;
};

// [experts, rows] with contiguous rows; data is nullptr: not wanted.
struct BiasGradient {
  void* data;
  int64_t expert_stride;
  Dtype dtype;
  int32_t gap;
};

// A validated call of flashmoe_moe_backward. `layer` has no outputs: its pre_activation is absent,
// and `pre_activation` here is what the forward saved.
struct MoeBackwardProblem {
  flashmoe_device device;
  MoeForwardProblem layer;
  flashmoe_moe_gate order;  // of gate and up in w_gate_up
  ExpertMatrix gate_up;     // all of w_gate_up, as it lies; with SEPARATE the gate
  TokenRows<const void> dout;
  TokenRows<const void> pre_activation;  // absent: computed again
  bool overwrites;                       // pre_activation, if that helps

  TokenRows<void> dx;
  MatrixGradient dw_gate_up;  // rows in the order of w_gate_up
  MatrixGradient dw_up;       // SEPARATE only
  MatrixGradient dw_down;
  BiasGradient db_gate_up;
  BiasGradient db_up;
  BiasGradient db_down;
  float* dweights;               // [tokens, top_k] or nullptr
  double* wide_dweights;         // for wide weights
  uint64_t max_workspace_bytes;  // 0: no bound
  bool accumulate;
  KernelName kernel;
};

// A validated call of flashmoe_grouped_product_backward.
struct GroupedProductBackwardProblem {
  flashmoe_device device;
  int32_t experts;
  int64_t rows;         // as in GroupedProductProblem
  int64_t columns;      // K
  int64_t out_columns;  // N

  TokenRows<const void> dout;
  TokenRows<const void> x;  // or absent
  ExpertMatrix w;           // or absent
  const int32_t* offsets;
  const int32_t* counts;
  TokenRows<void> dx;
  MatrixGradient dw;
  BiasGradient dbias;
  bool accumulate;
  KernelName kernel;
};

// A validated call of flashmoe_moe_route_backward.
struct MoeRouteBackwardProblem {
  flashmoe_device device;
  int64_t tokens;
  int32_t experts;  // 0 for given weights
  int32_t top_k;

  const float* dweights;         // [tokens, top_k]
  const double* wide_dweights;   // if the scores are fp64
  const int32_t* ids;            // [tokens, top_k]
  const float* dlse;             // [tokens] or nullptr
  const double* wide_dlse;       // likewise
  TokenRows<const void> scores;  // logits, or given weights
  TokenRows<void> dscores;
  bool given;
  flashmoe_moe_scoring scoring;
  bool renormalize;
  float scale;
  bool accumulate;
  KernelName kernel;  // ""
};

template <class Visit>
void visit_addresses(MoeRouteProblem* p, const Visit& visit) {
  visit(&p->logits);
  visit(&p->selection_bias);
  visit(&p->wide_selection_bias);
  visit(&p->given_ids);
  visit(&p->given_weights);
  visit(&p->expert_map);
  visit(&p->ids);
  visit(&p->weights);
  visit(&p->wide_weights);
  visit(&p->offsets);
  visit(&p->pairs);
  visit(&p->slots);
  visit(&p->lse);
  visit(&p->wide_lse);
}

template <class Visit>
void visit_addresses(MoeForwardProblem* p, const Visit& visit) {
  visit(&p->x.data);
  visit(&p->out.data);
  visit(&p->pre_activation.data);
  visit(&p->gate.data);
  visit(&p->up.data);
  visit(&p->down.data);
  visit(&p->gate_bias.data);
  visit(&p->up_bias.data);
  visit(&p->down_bias.data);
  visit(&p->weights);
  visit(&p->wide_weights);
  visit(&p->offsets);
  visit(&p->pairs);
  visit(&p->slots);
}

template <class Visit>
void visit_addresses(GroupedProductProblem* p, const Visit& visit) {
  visit(&p->x.data);
  visit(&p->out.data);
  visit(&p->w.data);
  visit(&p->bias.data);
  visit(&p->offsets);
  visit(&p->counts);
}

template <class Visit>
void visit_addresses(MoeBackwardProblem* p, const Visit& visit) {
  visit_addresses(&p->layer, visit);
  visit(&p->gate_up.data);
  visit(&p->dout.data);
  visit(&p->pre_activation.data);
  visit(&p->dx.data);
  visit(&p->dw_gate_up.data);
  visit(&p->dw_up.data);
  visit(&p->dw_down.data);
  visit(&p->db_gate_up.data);
  visit(&p->db_up.data);
  visit(&p->db_down.data);
  visit(&p->dweights);
  visit(&p->wide_dweights);
}

template <class Visit>
void visit_addresses(GroupedProductBackwardProblem* p, const Visit& visit) {
  visit(&p->dout.data);
  visit(&p->x.data);
  visit(&p->w.data);
  visit(&p->offsets);
  visit(&p->counts);
  visit(&p->dx.data);
  visit(&p->dw.data);
  visit(&p->dbias.data);
}

template <class Visit>
void visit_addresses(MoeRouteBackwardProblem* p, const Visit& visit) {
  visit(&p->dweights);
  visit(&p->wide_dweights);
  visit(&p->ids);
  visit(&p->dlse);
  visit(&p->wide_dlse);
  visit(&p->scores.data);
  visit(&p->dscores.data);
}

}  // namespace flashmoe
