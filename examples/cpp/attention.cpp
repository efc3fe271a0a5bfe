// Attention in C++ over [batch, heads, seq, dim] tensors with log-sum-exp, on the CPU.
//
// Splits the keys in two, attends to each half, and merges the halves by their log-sum-exp: the
// result must be that of attending to all keys at once. It is how attention is spread over devices
// that hold a part of the keys each. Both results are also held against a plain loop.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <random>
#include <utility>
#include <vector>

#include "flashmoe/flashmoe.hpp"

namespace {

constexpr int64_t kBatch = 1;
constexpr int64_t kHeads = 3;
constexpr int64_t kSeqQ = 40;
constexpr int64_t kSeqK = 128;
constexpr int64_t kDim = 48;
constexpr float kTolerance = 1e-5f;

// A contiguous fp32 tensor that owns its numbers.
class Tensor {
 public:
  explicit Tensor(std::vector<int64_t> shape) : shape_(std::move(shape)) {
    int64_t count = 1;
    for (const int64_t extent : shape_) count *= extent;
    values_.resize(static_cast<size_t>(count));
  }

  static Tensor random(std::vector<int64_t> shape, unsigned seed) {
    Tensor tensor(std::move(shape));
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (float& value : tensor.values_) value = normal(generator);
    return tensor;
  }

  float* row(int64_t head, int64_t position) {
    const int64_t length = shape_.size() > 3 ? shape_[3] : 1;
    return values_.data() + (head * shape_[2] + position) * length;
  }
  const float* row(int64_t head, int64_t position) const {
    return const_cast<Tensor*>(this)->row(head, position);
  }

  // A view of [batch, heads, seq, dim], or [batch, heads, seq].
  flashmoe::TensorView view() {
    if (shape_.size() == 3) return {values_.data(), {shape_[0], shape_[1], shape_[2]}};
    return {values_.data(), {shape_[0], shape_[1], shape_[2], shape_[3]}};
  }

 private:
  std::vector<int64_t> shape_;
  std::vector<float> values_;
};

struct Attention {
  Tensor out{{kBatch, kHeads, kSeqQ, kDim}};
  Tensor lse{{kBatch, kHeads, kSeqQ}};
};

// Attends to the keys of a view. A failure throws flashmoe::Error.
Attention attend(flashmoe::ConstTensorView q, flashmoe::ConstTensorView k,
                 flashmoe::ConstTensorView v, flashmoe::Workspace& workspace) {
  Attention result;
  flashmoe::AttentionForward call;
  call.q = q;
  call.k = k;
  call.v = v;
  call.out = result.out.view();
  call.lse = result.lse.view();
  call.layout = flashmoe::Layout::bhsd;
  flashmoe::run(call, workspace);
  return result;
}

// out = sum_part exp(lse_part - lse) out_part, with lse = log sum_part exp(lse_part).
Attention merge(const Attention& a, const Attention& b) {
  Attention result;
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < kSeqQ; ++i) {
      const float lse_a = *a.lse.row(head, i);
      const float lse_b = *b.lse.row(head, i);
      const float largest = std::max(lse_a, lse_b);
      const float lse = largest + std::log(std::exp(lse_a - largest) + std::exp(lse_b - largest));
      *result.lse.row(head, i) = lse;
      for (int64_t d = 0; d < kDim; ++d) {
        result.out.row(head, i)[d] = std::exp(lse_a - lse) * a.out.row(head, i)[d] +
                                     std::exp(lse_b - lse) * b.out.row(head, i)[d];
      }
    }
  }
  return result;
}

double dot(const float* a, const float* b) {
  double sum = 0;
  for (int64_t d = 0; d < kDim; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  return sum;
}

// The definition, in double precision.
Attention reference(const Tensor& q, const Tensor& k, const Tensor& v) {
  Attention result;
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < kSeqQ; ++i) {
      double sum = 0;
      std::vector<double> out(kDim);
      for (int64_t j = 0; j < kSeqK; ++j) {
        const double weight = std::exp(scale * dot(q.row(head, i), k.row(head, j)));
        sum += weight;
        for (int64_t d = 0; d < kDim; ++d) {
          out[static_cast<size_t>(d)] += weight * static_cast<double>(v.row(head, j)[d]);
        }
      }
      *result.lse.row(head, i) = static_cast<float>(std::log(sum));
      for (int64_t d = 0; d < kDim; ++d) {
        result.out.row(head, i)[d] = static_cast<float>(out[static_cast<size_t>(d)] / sum);
      }
    }
  }
  return result;
}

float difference(const Attention& a, const Attention& b) {
  float largest = 0;
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < kSeqQ; ++i) {
      largest = std::max(largest, std::fabs(*a.lse.row(head, i) - *b.lse.row(head, i)));
      for (int64_t d = 0; d < kDim; ++d) {
        largest = std::max(largest, std::fabs(a.out.row(head, i)[d] - b.out.row(head, i)[d]));
      }
    }
  }
  return largest;
}

int run() {
  Tensor q = Tensor::random({kBatch, kHeads, kSeqQ, kDim}, 1);
  Tensor k = Tensor::random({kBatch, kHeads, kSeqK, kDim}, 2);
  Tensor v = Tensor::random({kBatch, kHeads, kSeqK, kDim}, 3);
  const int64_t half = kSeqK / 2 - 5;

  // Positions [first, first + count) of axis 2: no copy, only another view.
  flashmoe::Workspace workspace;
  const auto attend_part = [&](int64_t first, int64_t count) {
    return attend(q.view(), k.view().slice(2, first, count), v.view().slice(2, first, count),
                  workspace);
  };
  const Attention whole = attend_part(0, kSeqK);
  const Attention merged = merge(attend_part(0, half), attend_part(half, kSeqK - half));
  const Attention expected = reference(q, k, v);

  const float whole_error = difference(whole, expected);
  const float merged_error = difference(merged, expected);
  std::printf("flashmoe %u: %s, largest difference %.1e at once, %.1e in two parts\n",
              flashmoe::version(), flashmoe::last_launches()[0].kernel,
              static_cast<double>(whole_error), static_cast<double>(merged_error));
  if (!(whole_error <= kTolerance && merged_error <= kTolerance)) {
    std::fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n",
                 static_cast<double>(kTolerance));
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
