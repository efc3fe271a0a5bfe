// A layer of experts in CUDA C++: bf16, from a router's logits to the output, on a stream of our
// own, recorded in a CUDA graph. Launched again with other tokens, the same graph routes anew: what
// routing finds stays on the device.
//
// The result is held against a plain loop in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <vector>

#include "device.h"

namespace {

constexpr int64_t kTokens = 96;
constexpr int64_t kExperts = 16;
constexpr int64_t kTopK = 4;
constexpr int64_t kHidden = 256;
constexpr int64_t kInner = 128;
// The inner numbers, the experts' outputs and their sum, which are about 1, are rounded to bf16.
constexpr double kTolerance = 0.05;

using Numbers = std::vector<__nv_bfloat16>;

double dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += number(a[i]) * number(b[i]);
  return sum;
}

// One token by the definition: the best experts, weighed by a softmax over them, SwiGLU.
std::vector<double> reference(const __nv_bfloat16* logits, const __nv_bfloat16* x,
                              const Numbers& w_gate_up, const Numbers& w_down) {
  std::vector<int64_t> order(kExperts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return number(logits[a]) > number(logits[b]); });
  order.resize(kTopK);
  double sum = 0;
  for (const int64_t e : order) sum += std::exp(number(logits[e]));
  std::vector<double> out(kHidden);
  for (const int64_t e : order) {
    const double weight = std::exp(number(logits[e])) / sum;
    const __nv_bfloat16* gate = w_gate_up.data() + e * 2 * kInner * kHidden;
    const __nv_bfloat16* up = gate + kInner * kHidden;
    const __nv_bfloat16* down = w_down.data() + e * kHidden * kInner;
    for (int64_t i = 0; i < kInner; ++i) {
      const double z = dot(gate + i * kHidden, x, kHidden);
      const double a = z / (1 + std::exp(-z)) * dot(up + i * kHidden, x, kHidden);
      for (int64_t h = 0; h < kHidden; ++h) {
        out[static_cast<size_t>(h)] += weight * a * number(down[h * kInner + i]);
      }
    }
  }
  return out;
}

double difference(const Numbers& logits, const Numbers& x, const Numbers& w_gate_up,
                  const Numbers& w_down, const Numbers& out) {
  double largest = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::vector<double> expected =
        reference(logits.data() + t * kExperts, x.data() + t * kHidden, w_gate_up, w_down);
    for (size_t h = 0; h < kHidden; ++h) {
      const double got = number(out[static_cast<size_t>(t * kHidden) + h]);
      largest = std::max(largest, std::fabs(got - expected[h]));
    }
  }
  return largest;
}

int run() {
  const Numbers w_gate_up = random_bf16(kExperts * 2 * kInner * kHidden, 0.06f, 1);
  const Numbers w_down = random_bf16(kExperts * kHidden * kInner, 0.09f, 2);
  const DeviceArray<__nv_bfloat16> device_w_gate_up(w_gate_up), device_w_down(w_down);
  const DeviceArray<__nv_bfloat16> x(kTokens * kHidden), logits(kTokens * kExperts);
  const DeviceArray<__nv_bfloat16> out(kTokens * kHidden);

  const flashmoe::Device gpu = flashmoe::Device::cuda(0);
  const DeviceRouting routing = DeviceRouting::create(kTokens, kTopK, kExperts, gpu);
  flashmoe::MoeRoute route;
  route.logits = {logits.data(), {kTokens, kExperts}, gpu};
  route.renormalize = true;
  routing.attach(route);
  flashmoe::MoeForward layer;
  layer.x = {x.data(), {kTokens, kHidden}, gpu};
  layer.w_gate_up = {device_w_gate_up.data(), {kExperts, 2 * kInner, kHidden}, gpu};
  layer.w_down = {device_w_down.data(), {kExperts, kHidden, kInner}, gpu};
  layer.out = {out.data(), {kTokens, kHidden}, gpu};
  routing.attach(layer);

  DeviceWorkspace workspace;  // for both calls, since they run one after the other
  workspace.reserve(std::max(flashmoe::workspace_size(route), flashmoe::workspace_size(layer)));
  const Stream stream;
  const Graph graph(stream, [&] {
    flashmoe::run(route, workspace, stream);
    flashmoe::run(layer, workspace, stream);
  });

  double largest = 0;
  for (unsigned step = 0; step < 2; ++step) {
    const Numbers tokens = random_bf16(kTokens * kHidden, 1.0f, 10 + step);
    const Numbers choices = random_bf16(kTokens * kExperts, 1.0f, 20 + step);
    check(cudaMemcpyAsync(x.data(), tokens.data(), tokens.size() * sizeof tokens[0],
                          cudaMemcpyHostToDevice, stream));
    check(cudaMemcpyAsync(logits.data(), choices.data(), choices.size() * sizeof choices[0],
                          cudaMemcpyHostToDevice, stream));
    graph.launch(stream);
    stream.synchronize();
    largest = std::max(largest, difference(choices, tokens, w_gate_up, w_down, out.to_host()));
  }
  std::printf("flashmoe %u: experts by the %s kernels, largest difference %.1e\n",
              flashmoe::version(), flashmoe::plan(layer).family, largest);
  if (!(largest <= kTolerance)) {
    std::fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n", kTolerance);
    return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    if (flashmoe::cuda_device_count() == 0) {
      std::printf("there is no CUDA device, or this libflashmoe was built without CUDA\n");
      return kSkipped;
    }
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
