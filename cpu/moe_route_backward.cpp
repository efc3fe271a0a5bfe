// Routing, backward, on the CPU: token by token.
//
// With scores s and weights w = scale s / D, where D is the sum of scores with `renormalize`, else
// 1:
//
//   ds_k = scale / D (dw_k - [renormalize] sum of dw_j s_j / D)
//   SOFTMAX        dlogit_e = p_e ([e is chosen] ds - sum of ds_k p_k)     p the softmax
//   TOPK_SOFTMAX   the same among the chosen
//   SIGMOID        dlogit_e = [e is chosen] ds s (1 - s)
//
// plus dlse p_e in every case. Intermediates are fp64, since they are few.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/moe.h"
#include "cpu/numbers.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = MoeRouteBackwardProblem;

constexpr int64_t kTokensPerPiece = 64;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Softmax of `count` numbers in place.
void softmax(double* x, int32_t count) {
  double most = -std::numeric_limits<double>::infinity();
  for (int32_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  double sum = 0.0;
  for (int32_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - most);
  for (int32_t i = 0; i < count; ++i) x[i] /= sum;
}

class Token {
 public:
  Token(const Problem& p, int64_t token) : p_(p), token_(token), ids_(p.ids + token * p.top_k) {}

  void differentiate() {
    const int32_t columns = p_.given ? p_.top_k : p_.experts;
    load(p_.scores, columns, given_);
    score();
    differentiate_scores();
    for (int32_t i = 0; i < columns; ++i) gradient_[i] = 0.0;
    if (p_.given) {
      for (int32_t k = 0; k < p_.top_k; ++k) gradient_[k] = dscores_[k];
    } else {
      differentiate_logits();
    }
    write(columns);
  }

 private:
  // The row of a token.
  template <class Data>
  void load(const TokenRows<Data>& rows, int32_t columns, double* to) {
    const int64_t first = token_ * rows.row_stride;
    if (rows.dtype == Dtype::kFloat64) {
      std::copy_n(static_cast<const double*>(rows.data) + first, columns, to);
      return;
    }
    widen(rows.data, rows.dtype, first, columns, narrow_);
    std::copy_n(narrow_, columns, to);
  }

  double lse_gradient() const {
    if (p_.wide_dlse != nullptr) return p_.wide_dlse[token_];
    return p_.dlse != nullptr ? static_cast<double>(p_.dlse[token_]) : 0.0;
  }

  // Another routing may have written ids that these logits do not have.
  bool is_expert(int32_t k) const { return ids_[k] >= 0 && (p_.given || ids_[k] < p_.experts); }

  bool needs_softmax() const {
    return p_.scoring == FLASHMOE_MOE_SOFTMAX || p_.dlse != nullptr || p_.wide_dlse != nullptr;
  }

  void score() {
    if (p_.given) {
      for (int32_t k = 0; k < p_.top_k; ++k) scores_[k] = given_[k];
      return;
    }
    if (needs_softmax()) {
      for (int32_t e = 0; e < p_.experts; ++e) softmax_[e] = given_[e];
      softmax(softmax_, p_.experts);
    }
    const auto logit = [this](int32_t k) {
      return is_expert(k) ? given_[ids_[k]] : -std::numeric_limits<double>::infinity();
    };
    for (int32_t k = 0; k < p_.top_k; ++k) {
      switch (p_.scoring) {
        case FLASHMOE_MOE_SOFTMAX: scores_[k] = is_expert(k) ? softmax_[ids_[k]] : 0.0; break;
        case FLASHMOE_MOE_TOPK_SOFTMAX: scores_[k] = logit(k); break;
        case FLASHMOE_MOE_SIGMOID: scores_[k] = sigmoid(logit(k)); break;
      }
    }
    if (p_.scoring == FLASHMOE_MOE_TOPK_SOFTMAX) softmax(scores_, p_.top_k);
  }

  void differentiate_scores() {
    const int64_t first = token_ * p_.top_k;
    double sum = 0.0;
    double product = 0.0;
    for (int32_t k = 0; k < p_.top_k; ++k) {
      dscores_[k] = 0.0;
      if (is_expert(k)) {
        dscores_[k] = p_.wide_dweights != nullptr ? p_.wide_dweights[first + k]
                                                  : static_cast<double>(p_.dweights[first + k]);
      }
      sum += scores_[k];
      product += dscores_[k] * scores_[k];
    }
    // The forward divides by an fp32 sum, unless scores are fp64.
    const bool is_zero =
        p_.scores.dtype == Dtype::kFloat64 ? sum == 0.0 : static_cast<float>(sum) == 0.0f;
    const bool divided = p_.renormalize && !is_zero;
    const double divisor = divided ? sum : 1.0;
    const double mean = divided ? product / sum : 0.0;
    const double factor = static_cast<double>(p_.scale) / divisor;
    for (int32_t k = 0; k < p_.top_k; ++k) dscores_[k] = factor * (dscores_[k] - mean);
  }

  void differentiate_logits() {
    double product = 0.0;
    for (int32_t k = 0; k < p_.top_k; ++k) product += dscores_[k] * scores_[k];
    const double through_softmax =
        (p_.scoring == FLASHMOE_MOE_SOFTMAX ? -product : 0.0) + lse_gradient();
    if (needs_softmax()) {
      for (int32_t e = 0; e < p_.experts; ++e) gradient_[e] = softmax_[e] * through_softmax;
    }
    const double common = p_.scoring == FLASHMOE_MOE_TOPK_SOFTMAX ? product : 0.0;
    for (int32_t k = 0; k < p_.top_k; ++k) {
      if (!is_expert(k)) continue;
      const double s = scores_[k];
      const double slope = p_.scoring == FLASHMOE_MOE_SIGMOID ? s * (1.0 - s) : s;
      gradient_[ids_[k]] += slope * (dscores_[k] - common);
    }
  }

  void write(int32_t columns) {
    const int64_t first = token_ * p_.dscores.row_stride;
    if (p_.dscores.dtype == Dtype::kFloat64) {
      double* const to = static_cast<double*>(p_.dscores.data) + first;
      for (int32_t i = 0; i < columns; ++i) {
        to[i] = p_.accumulate ? to[i] + gradient_[i] : gradient_[i];
      }
      return;
    }
    float* const held = narrow_;
    if (p_.accumulate) widen(p_.dscores.data, p_.dscores.dtype, first, columns, held);
    for (int32_t i = 0; i < columns; ++i) {
      const auto gradient = static_cast<float>(gradient_[i]);
      held[i] = p_.accumulate ? held[i] + gradient : gradient;
    }
    narrow(held, columns, p_.dscores.data, p_.dscores.dtype, first);
  }

  const Problem& p_;
  const int64_t token_;
  const int32_t* const ids_;
  float narrow_[kMaxExperts];
  double given_[kMaxExperts];  // logits or weights
  double softmax_[kMaxExperts];
  double gradient_[kMaxExperts];
  double scores_[kMaxTopK];
  double dscores_[kMaxTopK];
};

struct Launch {
  const Problem& problem;
  Counter next;
};

void differentiate(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  const int64_t tokens = launch.problem.tokens;
  for (int64_t first; (first = launch.next.take() * kTokensPerPiece) < tokens;) {
    const int64_t end = std::min(first + kTokensPerPiece, tokens);
    for (int64_t t = first; t < end; ++t) Token(launch.problem, t).differentiate();
  }
}

}  // namespace

flashmoe_status plan_route_backward(const MoeRouteBackwardProblem& p, Plan* plan,
                                    const Reason& /*reason*/) {
  const int64_t pieces = std::max<int64_t>(ceil_div(p.tokens, kTokensPerPiece), 1);
  plan->set_isa(isa_name(Isa::kScalar));
  flashmoe_launch& launch = add_launch("moe_route_backward_cpu", nullptr, pieces,
                                       std::min<int64_t>(pieces, num_threads()), plan);
  launch.tile_n = static_cast<int32_t>(kTokensPerPiece);
  return FLASHMOE_OK;
}

flashmoe_status launch_route_backward(const MoeRouteBackwardProblem& p, const Plan& plan,
                                      void* /*workspace*/, void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  Launch launch = {p, {}};
  parallel_run(static_cast<int32_t>(planned.block[0]), differentiate, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
