// A layer of experts in C++, spread over two devices that hold half of the experts each; here both
// are the CPU.
//
// Every device routes the same choice through a map that says which experts are its own, computes
// its part, and the parts add up to the layer. That sum, and the layer computed at once, are held
// against a plain loop in double precision.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "flashmoe/flashmoe.hpp"

namespace {

constexpr int64_t kTokens = 40;
constexpr int64_t kExperts = 6;
constexpr int64_t kTopK = 3;
constexpr int64_t kHidden = 48;
constexpr int64_t kInner = 24;
constexpr double kTolerance = 1e-5;

std::vector<float> random(int64_t count, float scale, unsigned seed) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  for (float& value : values) value = normal(generator);
  return values;
}

struct Model {
  std::vector<float> logits = random(kTokens * kExperts, 1.0f, 1);
  std::vector<float> x = random(kTokens * kHidden, 1.0f, 2);
  std::vector<float> w_gate_up = random(kExperts * 2 * kInner * kHidden, 0.15f, 3);
  std::vector<float> w_down = random(kExperts * kHidden * kInner, 0.2f, 4);

  flashmoe::ConstTensorView logits_view() const { return {logits.data(), {kTokens, kExperts}}; }
  flashmoe::ConstTensorView x_view() const { return {x.data(), {kTokens, kHidden}}; }
  flashmoe::ConstTensorView w_gate_up_view() const {
    return {w_gate_up.data(), {kExperts, 2 * kInner, kHidden}};
  }
  flashmoe::ConstTensorView w_down_view() const {
    return {w_down.data(), {kExperts, kHidden, kInner}};
  }
};

// The layer of experts [first, first + count), for pairs that were routed to them.
std::vector<float> layer(const Model& model, const flashmoe::Routing& routing, int64_t first,
                         int64_t count, flashmoe::Workspace& workspace) {
  std::vector<float> out(model.x.size());
  flashmoe::MoeForward call;
  call.x = model.x_view();
  call.w_gate_up = model.w_gate_up_view().slice(0, first, count);
  call.w_down = model.w_down_view().slice(0, first, count);
  call.out = flashmoe::TensorView(out.data(), {kTokens, kHidden});
  routing.attach(call);
  flashmoe::run(call, workspace);
  return out;
}

// Which experts each token takes, from its logits.
flashmoe::Routing route(const Model& model, flashmoe::Workspace& workspace) {
  flashmoe::Routing routing = flashmoe::Routing::create(kTokens, kTopK, kExperts);
  flashmoe::MoeRoute call;
  call.logits = model.logits_view();
  call.renormalize = true;
  routing.attach(call);
  flashmoe::run(call, workspace);
  return routing;
}

// The part of a device that has experts [first, first + count) as its own 0, 1, ...
std::vector<float> part(const Model& model, const flashmoe::Routing& chosen, int64_t first,
                        int64_t count, flashmoe::Workspace& workspace) {
  std::array<int32_t, kExperts> map;
  map.fill(-1);  // elsewhere
  std::iota(map.begin() + first, map.begin() + first + count, 0);
  const flashmoe::Routing routing = flashmoe::Routing::create(kTokens, kTopK, count);
  flashmoe::MoeRoute call;
  call.given_ids = chosen.ids();
  call.given_weights = chosen.weights();
  call.expert_map = flashmoe::ConstTensorView(map.data(), {kExperts});
  routing.attach(call);
  flashmoe::run(call, workspace);
  return layer(model, routing, first, count, workspace);
}

double dot(const float* a, const float* b, int64_t count) {
  return std::inner_product(a, a + count, b, 0.0);
}

// Token t by the definition: the best experts, weighed by a softmax over them.
std::vector<double> reference(const Model& model, int64_t t) {
  const float* logits = model.logits.data() + t * kExperts;
  std::array<int64_t, kExperts> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  double sum = 0;
  for (int64_t k = 0; k < kTopK; ++k) sum += std::exp(static_cast<double>(logits[order[k]]));

  std::vector<double> out(kHidden);
  for (int64_t k = 0; k < kTopK; ++k) {
    const int64_t e = order[k];
    const double weight = std::exp(static_cast<double>(logits[e])) / sum;
    const float* gate = model.w_gate_up.data() + e * 2 * kInner * kHidden;
    const float* up = gate + kInner * kHidden;
    const float* down = model.w_down.data() + e * kHidden * kInner;
    for (int64_t i = 0; i < kInner; ++i) {
      const float* x = model.x.data() + t * kHidden;
      const double z = dot(gate + i * kHidden, x, kHidden);
      const double a = z / (1 + std::exp(-z)) * dot(up + i * kHidden, x, kHidden);
      for (int64_t h = 0; h < kHidden; ++h) {
        out[static_cast<size_t>(h)] += weight * a * static_cast<double>(down[h * kInner + i]);
      }
    }
  }
  return out;
}

double difference(const Model& model, const std::vector<float>& out) {
  double largest = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<double> expected = reference(model, t);
    for (int64_t h = 0; h < kHidden; ++h) {
      const double got = static_cast<double>(out[static_cast<size_t>(t * kHidden + h)]);
      largest = std::max(largest, std::fabs(got - expected[static_cast<size_t>(h)]));
    }
  }
  return largest;
}

int run() {
  const Model model;
  flashmoe::Workspace workspace;
  const flashmoe::Routing routing = route(model, workspace);
  const std::vector<float> whole = layer(model, routing, 0, kExperts, workspace);

  const int64_t half = kExperts / 2;
  std::vector<float> sum = part(model, routing, 0, half, workspace);
  const std::vector<float> second = part(model, routing, half, kExperts - half, workspace);
  std::transform(sum.begin(), sum.end(), second.begin(), sum.begin(), std::plus<float>());

  const double whole_error = difference(model, whole);
  const double sum_error = difference(model, sum);
  std::printf("flashmoe %u: ", flashmoe::version());
  for (const flashmoe_launch& launch : flashmoe::last_launches()) {
    std::printf("%s, ", launch.kernel);
  }
  std::printf("largest difference %.1e at once, %.1e in two parts\n", whole_error, sum_error);
  if (!(whole_error <= kTolerance && sum_error <= kTolerance)) {
    std::fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n", kTolerance);
    return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
