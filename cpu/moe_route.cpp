// Routing on the CPU.
//
// Tokens are scored in chunks. One thread scores a chunk and counts its pairs per expert. Prefix
// sums of the counts, over experts and then chunks, give the first slot of each chunk and expert; a
// second pass assigns slots in the order of pairs. Chunks do not depend on the threads, and the
// result does not depend on the chunks. Scores are computed in `Number`: fp32, or fp64 for fp64
// inputs.
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

using Problem = MoeRouteProblem;

constexpr int64_t kChunkTokens = 128;
constexpr int64_t kMostChunks = 256;

template <class Number>
constexpr Number kLowest = -std::numeric_limits<Number>::infinity();

int64_t chunks_of(const Problem& p) {
  const int64_t chunks = ceil_div(p.tokens, kChunkTokens);
  return chunks < 1 ? 1 : chunks > kMostChunks ? kMostChunks : chunks;
}

template <class Number>
Number sigmoid(Number x) {
  return Number{1} / (Number{1} + std::exp(-x));
}

template <class Number>
Number log_sum_exp(const Number* x, int32_t count) {
  Number most = kLowest<Number>;
  for (int32_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  // exp(inf - inf) would be NaN, but the sum is infinite.
  const Number base = std::isfinite(most) ? most : Number{0};
  Number sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += std::exp(x[i] - base);
  return base + std::log(sum);
}

// The greatest numbers of a sequence, in order; ties go to the earlier one. NaN counts as -inf.
template <class Number>
struct Greatest {
  Number values[kMaxTopK];
  int32_t indices[kMaxTopK];
  int32_t wanted;
  int32_t count = 0;

  explicit Greatest(int32_t how_many) : wanted(how_many) {}

  void put(Number value, int32_t index) {
    if (value != value) value = kLowest<Number>;
    if (count == wanted && !(value > values[count - 1])) return;
    int32_t place = count < wanted ? count++ : count - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      indices[place] = indices[place - 1];
    }
    values[place] = value;
    indices[place] = index;
  }
};

// Marks the groups that a token may choose from.
template <class Number>
void choose_groups(const Problem& p, const Number* choice, bool* open) {
  const int32_t size = p.experts / p.num_groups;
  Number sums[kMaxExperts / 2];
  for (int32_t g = 0; g < p.num_groups; ++g) {
    Greatest<Number> two(2);
    for (int32_t i = 0; i < size; ++i) two.put(choice[g * size + i], i);
    sums[g] = two.values[0] + two.values[1];
    open[g] = false;
  }
  // More groups may be asked for than `Greatest` holds, so find them one by one.
  for (int32_t i = 0; i < p.top_groups; ++i) {
    int32_t best = -1;
    Number most = 0;
    for (int32_t g = 0; g < p.num_groups; ++g) {
      if (open[g]) continue;
      const Number sum = sums[g] == sums[g] ? sums[g] : kLowest<Number>;
      if (best < 0 || sum > most) best = g, most = sum;
    }
    open[best] = true;
  }
}

// The result for one token.
template <class Number>
struct TokenRoute {
  int32_t ids[kMaxTopK];
  Number weights[kMaxTopK];
  Number lse;
};

template <class Number>
void score_chosen(const Problem& p, const Number* logits, const Greatest<Number>& chosen,
                  TokenRoute<Number>* route) {
  if (p.scoring == FLASHMOE_MOE_SIGMOID) {
    for (int32_t k = 0; k < p.top_k; ++k) route->weights[k] = sigmoid(logits[chosen.indices[k]]);
    return;
  }
  const bool all = p.scoring == FLASHMOE_MOE_SOFTMAX;
  const int32_t count = all ? p.experts : p.top_k;
  const auto logit = [&](int32_t i) { return logits[all ? i : chosen.indices[i]]; };
  Number most = kLowest<Number>;
  for (int32_t i = 0; i < count; ++i) most = logit(i) > most ? logit(i) : most;
  Number sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += std::exp(logit(i) - most);
  for (int32_t k = 0; k < p.top_k; ++k) {
    route->weights[k] = std::exp(logits[chosen.indices[k]] - most) / sum;
  }
}

// Loads numbers from element `first` on, converted to the computation's type.
void load(const void* from, Dtype dtype, int64_t first, int64_t count, float* to) {
  widen(from, dtype, first, count, to);
}

// The same for fp64, whose inputs are fp64 only.
void load(const void* from, Dtype /*dtype*/, int64_t first, int64_t count, double* to) {
  std::copy_n(static_cast<const double*>(from) + first, count, to);
}

// An expert's selection bias; 0 without one.
template <class Number>
Number selection_bias(const Problem& p, int32_t expert) {
  if (p.wide_selection_bias != nullptr) return static_cast<Number>(p.wide_selection_bias[expert]);
  return p.selection_bias != nullptr ? static_cast<Number>(p.selection_bias[expert]) : Number{0};
}

template <class Number>
void choose_experts(const Problem& p, int64_t token, TokenRoute<Number>* route) {
  Number logits[kMaxExperts];
  Number biased[kMaxExperts];
  bool open[kMaxExperts / 2];
  load(p.logits, p.logits_dtype, token * p.logits_stride, p.experts, logits);
  const bool grouped = p.num_groups > 1;
  const bool with_bias = p.selection_bias != nullptr || p.wide_selection_bias != nullptr;
  if (with_bias || grouped) {
    for (int32_t e = 0; e < p.experts; ++e) {
      biased[e] = sigmoid(logits[e]) + selection_bias<Number>(p, e);
    }
  }
  const Number* const choice = with_bias ? biased : logits;
  if (grouped) choose_groups(p, biased, open);
  const int32_t group_size = p.experts / p.num_groups;
  Greatest<Number> chosen(p.top_k);
  for (int32_t e = 0; e < p.experts; ++e) {
    if (!grouped || open[e / group_size]) chosen.put(choice[e], e);
  }
  for (int32_t k = 0; k < p.top_k; ++k) route->ids[k] = chosen.indices[k];
  score_chosen(p, logits, chosen, route);
  if (p.lse != nullptr || p.wide_lse != nullptr) route->lse = log_sum_exp(logits, p.experts);
}

// The expert of this call for a given id, or -1.
int32_t expert_of(const Problem& p, int64_t id) {
  if (p.expert_map != nullptr) {
    if (id < 0 || id >= p.expert_map_size) return -1;
    id = p.expert_map[id];
  }
  return id >= 0 && id < p.experts ? static_cast<int32_t>(id) : -1;
}

template <class Number>
void take_given(const Problem& p, int64_t token, TokenRoute<Number>* route) {
  const int64_t first = token * p.given_ids_stride;
  for (int32_t k = 0; k < p.top_k; ++k) {
    const int64_t id = p.given_ids_are_64 ? static_cast<const int64_t*>(p.given_ids)[first + k]
                                          : static_cast<const int32_t*>(p.given_ids)[first + k];
    route->ids[k] = expert_of(p, id);
    route->weights[k] = 1;
  }
  if (p.given_weights != nullptr) {
    load(p.given_weights, p.given_weights_dtype, token * p.given_weights_stride, p.top_k,
         route->weights);
  }
}

// `weights` and `lse` are the problem's.
template <class Number>
void route_token(const Problem& p, int64_t token, Number* weights, Number* lse, int32_t* counts) {
  TokenRoute<Number> route;
  if (p.logits != nullptr) {
    choose_experts(p, token, &route);
  } else {
    take_given(p, token, &route);
  }
  Number divisor = 1;
  if (p.renormalize) {
    Number sum = 0;
    for (int32_t k = 0; k < p.top_k; ++k) sum += route.weights[k];
    if (sum != Number{0}) divisor = sum;
  }
  const int64_t first = token * p.top_k;
  for (int32_t k = 0; k < p.top_k; ++k) {
    const int32_t id = route.ids[k];
    p.ids[first + k] = id;
    const Number weight = route.weights[k] / divisor * static_cast<Number>(p.scale);
    weights[first + k] = id < 0 ? Number{0} : weight;
    if (id >= 0) ++counts[id];
  }
  if (lse != nullptr) lse[token] = route.lse;
}

struct Launch {
  const Problem& problem;
  int64_t chunks;
  int32_t* counts;  // [chunks][experts]: pairs, then the next slot
  Counter next;

  int64_t begin(int64_t chunk) const {
    return problem.tokens / chunks * chunk +
           (chunk < problem.tokens % chunks ? chunk : problem.tokens % chunks);
  }
};

void score(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  const Problem& p = launch.problem;
  for (int64_t chunk; (chunk = launch.next.take()) < launch.chunks;) {
    int32_t* counts = launch.counts + chunk * p.experts;
    for (int32_t e = 0; e < p.experts; ++e) counts[e] = 0;
    for (int64_t t = launch.begin(chunk); t < launch.begin(chunk + 1); ++t) {
      if (p.wide_weights != nullptr) {
        route_token(p, t, p.wide_weights, p.wide_lse, counts);
      } else {
        route_token(p, t, p.weights, p.lse, counts);
      }
    }
  }
}

// Turns counts into the first slots of each chunk and expert.
void sum_counts(Launch* launch) {
  const Problem& p = launch->problem;
  int32_t slot = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    p.offsets[e] = slot;
    for (int64_t chunk = 0; chunk < launch->chunks; ++chunk) {
      int32_t& count = launch->counts[chunk * p.experts + e];
      const int32_t pairs = count;
      count = slot;
      slot += pairs;
    }
  }
  p.offsets[p.experts] = slot;
  for (int64_t behind = slot; behind < p.tokens * p.top_k; ++behind) p.pairs[behind] = -1;
}

void place(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  const Problem& p = launch.problem;
  for (int64_t chunk; (chunk = launch.next.take()) < launch.chunks;) {
    int32_t* slots = launch.counts + chunk * p.experts;
    const int64_t end = launch.begin(chunk + 1) * p.top_k;
    for (int64_t pair = launch.begin(chunk) * p.top_k; pair < end; ++pair) {
      const int32_t id = p.ids[pair];
      const int32_t slot = id < 0 ? -1 : slots[id]++;
      p.slots[pair] = slot;
      if (slot >= 0) p.pairs[slot] = static_cast<int32_t>(pair);
    }
  }
}

}  // namespace

flashmoe_status plan_route(const MoeRouteProblem& p, Plan* plan, const Reason& /*reason*/) {
  const int64_t chunks = chunks_of(p);
  plan->set_isa(isa_name(Isa::kScalar));
  flashmoe_launch& launch =
      add_launch("moe_route_cpu", nullptr, chunks, std::min<int64_t>(chunks, num_threads()), plan);
  launch.tile_n = static_cast<int32_t>(ceil_div(p.tokens, chunks));
  plan->info.workspace_bytes = static_cast<uint64_t>(chunks * p.experts) * sizeof(int32_t);
  return FLASHMOE_OK;
}

flashmoe_status launch_route(const MoeRouteProblem& p, const Plan& plan, void* workspace,
                             void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  const int32_t threads = static_cast<int32_t>(planned.block[0]);
  Launch launch = {p, planned.grid[0], static_cast<int32_t*>(workspace), {}};
  parallel_run(threads, score, &launch);
  sum_counts(&launch);
  launch.next.reset();
  parallel_run(threads, place, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
