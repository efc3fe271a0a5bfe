// Causal grouped-query attention in CUDA C++: bf16, on a stream of our own, between two kernels of
// our own, and all of it recorded in a CUDA graph that is launched twice.
//
//   q is scaled by a kernel  ->  flashmoe::run  ->  a residual is added by a kernel
//
// No call synchronises anything. The result is held against a plain loop in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "device.h"

namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kSeq = 200;
constexpr int64_t kHeadsQ = 4;
constexpr int64_t kHeadsKv = 2;
constexpr int64_t kDim = 64;
constexpr float kGain = 2.0f;
// Outputs are rounded to bf16, which keeps 8 bits of numbers up to about 8.
constexpr double kTolerance = 0.05;

constexpr size_t elements(int64_t heads) {
  return static_cast<size_t>(kBatch * kSeq * heads * kDim);
}

__global__ void scale(const __nv_bfloat16* in, __nv_bfloat16* out, float gain, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = __float2bfloat16(gain * __bfloat162float(in[i]));
}

__global__ void add(__nv_bfloat16* out, const __nv_bfloat16* residual, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count)
    out[i] = __float2bfloat16(__bfloat162float(out[i]) + __bfloat162float(residual[i]));
}

size_t row(int64_t batch, int64_t position, int64_t head, int64_t heads) {
  return static_cast<size_t>(((batch * kSeq + position) * heads + head) * kDim);
}

using Numbers = std::vector<__nv_bfloat16>;

// One row of attention, by the definition; q is scaled as the kernel does, which is exact.
std::vector<double> reference_row(const Numbers& q, const Numbers& k, const Numbers& v, int64_t b,
                                  int64_t i, int64_t h) {
  const int64_t g = h / (kHeadsQ / kHeadsKv);
  std::vector<double> out(kDim);
  double sum = 0;
  for (int64_t j = 0; j <= i; ++j) {
    double logit = 0;
    for (size_t d = 0; d < kDim; ++d) {
      logit += kGain * number(q[row(b, i, h, kHeadsQ) + d]) * number(k[row(b, j, g, kHeadsKv) + d]);
    }
    const double weight = std::exp(logit / std::sqrt(static_cast<double>(kDim)));
    sum += weight;
    for (size_t d = 0; d < kDim; ++d) out[d] += weight * number(v[row(b, j, g, kHeadsKv) + d]);
  }
  for (double& value : out) value /= sum;
  return out;
}

int run() {
  const Numbers q = random_bf16(elements(kHeadsQ), 0.5f, 1);
  const Numbers k = random_bf16(elements(kHeadsKv), 1.0f, 2);
  const Numbers v = random_bf16(elements(kHeadsKv), 1.0f, 3);
  const DeviceArray<__nv_bfloat16> device_q(q), device_k(k), device_v(v);
  const DeviceArray<__nv_bfloat16> scaled(q.size()), out(q.size());

  const flashmoe::Device gpu = flashmoe::Device::cuda(0);
  flashmoe::AttentionForward call;
  call.q = {scaled.data(), {kBatch, kSeq, kHeadsQ, kDim}, gpu};
  call.k = {device_k.data(), {kBatch, kSeq, kHeadsKv, kDim}, gpu};
  call.v = {device_v.data(), {kBatch, kSeq, kHeadsKv, kDim}, gpu};
  call.out = {out.data(), {kBatch, kSeq, kHeadsQ, kDim}, gpu};
  call.causal = flashmoe::Causal::bottom_right;

  DeviceWorkspace workspace;
  workspace.reserve(flashmoe::workspace_size(call));  // before the capture, which allocates nothing
  const Stream stream;
  const int64_t count = static_cast<int64_t>(q.size());
  const unsigned blocks = static_cast<unsigned>((count + 255) / 256);
  const Graph graph(stream, [&] {
    scale<<<blocks, 256, 0, stream>>>(device_q.data(), scaled.data(), kGain, count);
    flashmoe::run(call, workspace, stream);
    add<<<blocks, 256, 0, stream>>>(out.data(), device_q.data(), count);
  });
  graph.launch(stream);
  stream.synchronize();
  const Numbers first = out.to_host();
  graph.launch(stream);
  stream.synchronize();
  const Numbers second = out.to_host();

  double largest = 0;
  bool same = true;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t i = 0; i < kSeq; ++i) {
      for (int64_t h = 0; h < kHeadsQ; ++h) {
        const std::vector<double> expected = reference_row(q, k, v, b, i, h);
        for (size_t d = 0; d < kDim; ++d) {
          const size_t at = row(b, i, h, kHeadsQ) + d;
          largest = std::max(largest, std::fabs(number(first[at]) - expected[d] - number(q[at])));
          same = same && number(first[at]) == number(second[at]);
        }
      }
    }
  }
  std::printf("flashmoe %u: %s, largest difference %.1e, the second launch %s\n",
              flashmoe::version(), flashmoe::last_launches()[0].kernel, largest,
              same ? "has the same bits" : "has OTHER bits");
  if (!(largest <= kTolerance) || !same) {
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
