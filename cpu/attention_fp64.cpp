// Attention in fp64, forward and backward, for gradient checks, in plain loops over rows and keys.
// The online softmax and the order of sums are those of the other kernels.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_numeric.h"

namespace flashmoe::cpu {
namespace {

#include "cpu/attention_visible.h"

#include "cpu/attention_sink_gradient.h"

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kStepKeys = 256;  // per step of the forward
constexpr int kTileGroup = 8;       // rows: tiles of the forward are cut between groups
constexpr int64_t kBackwardKeys = 64;
constexpr int64_t kBackwardRows = 64;
static_assert(kHeadDimMultiple == 8);

// Uses eight sums, which vectors hold.
double dot(const double* a, const double* b, int64_t n) {
  double sums[8] = {};
  for (int64_t i = 0; i < n; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// sum += x v.
void add_multiple(double x, const double* v, int64_t n, double* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x * v[i];
}

void clear(double* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = 0.0;
}

// A scale equal to 1 / sqrt(dim) rounded to fp32 stands for the exact number.
double scale_of(const AttentionProblem& p) {
  const double usual = 1.0 / std::sqrt(static_cast<double>(p.dim));
  return p.scale == static_cast<float>(usual) ? usual : static_cast<double>(p.scale);
}

// Logits from scores q.k.
class Logits {
 public:
  explicit Logits(const AttentionProblem& p)
      : scale_(scale_of(p)), softcap_(static_cast<double>(p.softcap)) {}

  double of(double score) const {
    const double logit = scale_ * score;
    return softcap_ == 0.0 ? logit : softcap_ * std::tanh(logit / softcap_);
  }
  // d logit / d score, without the factor `scale`.
  double slope(double logit) const {
    if (softcap_ == 0.0) return 1.0;
    const double part = logit / softcap_;
    return 1.0 - part * part;
  }
  double scale() const { return scale_; }

 private:
  const double scale_;
  const double softcap_;
};

// -inf without a sink.
double sink_of(const HeadLogits& sinks, int64_t head) {
  const int64_t at = head * sinks.stride;
  if (sinks.data == nullptr) return -kInfinity;
  if (sinks.dtype == Dtype::kFloat64) return static_cast<const double*>(sinks.data)[at];
  return static_cast<double>(static_cast<const float*>(sinks.data)[at]);
}

// The number added to a logit: -inf hides the key.
double bias_of(const AttentionProblem& p, int64_t batch, int64_t head, int64_t query, int64_t key) {
  const auto offset = [=](const PairsView& pairs) {
    return batch * pairs.batch_stride + head * pairs.head_stride + query * pairs.query_stride +
           key * pairs.key_stride;
  };
  if (p.mask.data != nullptr &&
      static_cast<const unsigned char*>(p.mask.data)[offset(p.mask)] == 0) {
    return -kInfinity;
  }
  if (p.bias.data == nullptr) return 0.0;
  if (p.bias.dtype == Dtype::kFloat64) {
    return static_cast<const double*>(p.bias.data)[offset(p.bias)];
  }
  return static_cast<double>(static_cast<const float*>(p.bias.data)[offset(p.bias)]);
}

// The rows of a tile or block: for each query, the heads that share a KV head.
class Rows {
 public:
  Rows(const AttentionProblem& p, const AttentionTile& tile)
      : p_(p), tile_(tile), group_(p.heads_q / p.heads_kv) {}

  int64_t query(int64_t row) const { return (tile_.first_row + row) / group_; }
  int64_t head(int64_t row) const {
    return tile_.kv_head * group_ + (tile_.first_row + row) % group_;
  }
  int64_t offset(int64_t row, const RowStrides& strides) const {
    return tile_.batch * strides.batch + query(row) * strides.seq + head(row) * strides.head;
  }
  const double* at(int64_t row, const RowsView<const void>& view) const {
    return static_cast<const double*>(view.data) + offset(row, view.strides);
  }
  int64_t key_offset(int64_t key, const RowStrides& strides) const {
    return tile_.batch * strides.batch + tile_.kv_head * strides.head + key * strides.seq;
  }
  const double* key_at(int64_t key, const RowsView<const void>& view) const {
    return static_cast<const double*>(view.data) + key_offset(key, view.strides);
  }
  // The same for keys that may be in pages; nullptr for a hidden key.
  const double* key_anywhere(int64_t key, const RowsView<const void>& view) const {
    if (tile_.pages == nullptr) return key_at(key, view);
    const KeyPages& pages = *tile_.pages;
    const int64_t row = pages.first + key;
    const int64_t number = pages.table[row / pages.page_size * pages.step];
    if (number < 0 || number >= pages.count) return nullptr;
    return key_at(row % pages.page_size, view) + number * view.strides.batch;
  }
  int64_t first(int64_t row) const { return first_key(p_, query(row)); }
  int64_t end(int64_t row) const { return end_key(p_, query(row)); }

  // The number added to the logit of a row and a key: -inf hides it.
  double bias(int64_t row, int64_t key) const {
    return bias_of(p_, tile_.batch, head(row), query(row), key);
  }

 private:
  const AttentionProblem& p_;
  const AttentionTile& tile_;
  const int64_t group_;
};

// ---- forward ------------------------------------------------------------------------------------

void compute_row(const AttentionProblem& p, const Rows& rows, int64_t row, double* scratch) {
  double* const logits = scratch;
  double* const sums = scratch + kStepKeys;
  const Logits logit(p);
  const double* const q = rows.at(row, p.q);
  const int64_t end = rows.end(row);
  double maximum = -kInfinity;
  double sum = 0.0;
  bool sees_keys = false;
  clear(sums, p.dim_v);
  for (int64_t key = rows.first(row); key < end; key += kStepKeys) {
    const int64_t keys = end - key < kStepKeys ? end - key : kStepKeys;
    const double before = maximum;
    for (int64_t i = 0; i < keys; ++i) {
      const double bias = rows.bias(row, key + i);
      const double* const k = bias != -kInfinity ? rows.key_anywhere(key + i, p.k) : nullptr;
      sees_keys = sees_keys || k != nullptr;
      logits[i] = k != nullptr ? logit.of(dot(q, k, p.dim)) + bias : -kInfinity;
      if (logits[i] > maximum) maximum = logits[i];
    }
    const double base = maximum == -kInfinity ? 0.0 : maximum;
    const double rescale = std::exp(before - base);
    sum *= rescale;
    for (int64_t i = 0; i < p.dim_v; ++i) sums[i] *= rescale;
    for (int64_t i = 0; i < keys; ++i) {
      const double weight = std::exp(logits[i] - base);
      sum += weight;
      const double* const v = rows.key_anywhere(key + i, p.v);
      if (v != nullptr && rows.bias(row, key + i) != -kInfinity)
        add_multiple(weight, v, p.dim_v, sums);
    }
  }
  const double sink = sink_of(p.sinks, rows.head(row));
  double rescale = 1.0;  // of the output, if the sink is the row's maximum
  if (sink > maximum) {
    rescale = std::exp(maximum - sink);
    sum = sum * rescale + 1.0;
    maximum = sink;
  } else if (sink != -kInfinity) {
    sum += std::exp(sink - maximum);
  }
  // Logits that are all -inf leave a sum of 0, and 0 / 0 is the NaN that softmax gives.
  double* const out = static_cast<double*>(p.out.data) + rows.offset(row, p.out.strides);
  for (int64_t i = 0; i < p.dim_v; ++i) out[i] = sees_keys ? sums[i] * rescale / sum : 0.0;
  if (p.lse == nullptr) return;
  static_cast<double*>(p.lse)[rows.offset(row, p.lse_strides)] =
      sees_keys ? maximum + std::log(sum) : sink;
}

void compute(const AttentionProblem& p, const AttentionTile& tile, int32_t, void* scratch) {
  const Rows rows(p, tile);
  for (int64_t row = 0; row < tile.rows; ++row) {
    compute_row(p, rows, row, static_cast<double*>(scratch));
  }
}

// ---- backward -----------------------------------------------------------------------------------

struct Scratch {
  double* dk;       // [keys][dim]
  double* dv;       // [keys][dim_v]
  double* dscores;  // [rows][keys]
  double* dq;       // [rows][dim], sums of a block

  Scratch(const AttentionProblem& p, void* base)
      : dk(static_cast<double*>(base)),
        dv(dk + kBackwardKeys * p.dim),
        dscores(dv + kBackwardKeys * p.dim_v),
        dq(dscores + kBackwardRows * kBackwardKeys) {}
};

// Stores factor * x[i] to `to[i]`, or adds it.
template <typename T>
void write(T* to, const double* x, double factor, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) {
    const double before = accumulate ? static_cast<double>(to[i]) : 0.0;
    to[i] = static_cast<T>(before + factor * x[i]);
  }
}

void write(const AttentionBackwardProblem& p, const RowsView<void>& to, int64_t offset,
           const double* x, double factor, int64_t n) {
  if (to.dtype == Dtype::kFloat32) {
    write(static_cast<float*>(to.data) + offset, x, factor, n, p.accumulate);
  } else {
    write(static_cast<double*>(to.data) + offset, x, factor, n, p.accumulate);
  }
}

// The keys of the tile that a row sees, as indices into it.
struct Seen {
  int64_t begin;
  int64_t end;

  Seen(const Rows& rows, int64_t row, const AttentionBackwardStep& step)
      : begin(rows.first(row) - step.first_key), end(rows.end(row) - step.first_key) {
    begin = begin < 0 ? 0 : begin;
    end = end > step.keys ? step.keys : end;
  }
};

void begin_keys(const AttentionBackwardProblem& p, const AttentionBackwardStep&, void* scratch) {
  const Scratch s(p, scratch);
  clear(s.dk, kBackwardKeys * p.dim);
  clear(s.dv, kBackwardKeys * p.dim_v);
}

void add_row(const AttentionBackwardProblem& p, const Rows& rows, const AttentionBackwardStep& step,
             int64_t row, const Scratch& s) {
  const Logits logits(p);
  const double* const q = rows.at(row, p.q);
  const double* const dout = rows.at(row, p.dout);
  const double lse = static_cast<const double*>(p.lse)[rows.offset(row, p.lse_strides)];
  double delta =
      dot(dout, static_cast<const double*>(p.out.data) + rows.offset(row, p.out.strides), p.dim_v);
  if (p.dlse != nullptr) {
    delta -= static_cast<const double*>(p.dlse)[rows.offset(row, p.dlse_strides)];
  }
  const Seen seen(rows, row, step);
  for (int64_t i = seen.begin; i < seen.end; ++i) {
    const int64_t key = step.first_key + i;
    const double bias = rows.bias(row, key);
    if (bias == -kInfinity) continue;
    const double logit = logits.of(dot(q, rows.key_at(key, p.k), p.dim));
    const double weight = std::exp(logit + bias - lse);
    const double dweight = dot(dout, rows.key_at(key, p.v), p.dim_v);
    const double dscore = weight * (dweight - delta) * logits.slope(logit);
    add_multiple(weight, dout, p.dim_v, s.dv + i * p.dim_v);
    add_multiple(dscore, q, p.dim, s.dk + i * p.dim);
    s.dscores[row * kBackwardKeys + i] = dscore;
  }
}

void add_rows(const AttentionBackwardProblem& p, const AttentionBackwardStep& step, void* scratch) {
  const Rows rows(p, step.rows);
  const Scratch s(p, scratch);
  for (int64_t row = 0; row < step.rows.rows; ++row) add_row(p, rows, step, row, s);
}

void add_dq(const AttentionBackwardProblem& p, const AttentionBackwardStep& step, void* scratch,
            void* shared, bool first, bool last) {
  const Rows rows(p, step.rows);
  const Scratch s(p, scratch);
  double* const sums = shared != nullptr ? static_cast<double*>(shared) : s.dq;
  if (first) clear(sums, step.rows.rows * p.dim);
  for (int64_t row = 0; row < step.rows.rows; ++row) {
    const Seen seen(rows, row, step);
    for (int64_t i = seen.begin; i < seen.end; ++i) {
      if (rows.bias(row, step.first_key + i) == -kInfinity) continue;
      add_multiple(s.dscores[row * kBackwardKeys + i], rows.key_at(step.first_key + i, p.k), p.dim,
                   sums + row * p.dim);
    }
    if (!last) continue;
    write(p, p.dq, rows.offset(row, p.dq.strides), sums + row * p.dim, scale_of(p), p.dim);
  }
}

void end_keys(const AttentionBackwardProblem& p, const AttentionBackwardStep& step, void* scratch,
              void* shared, bool first, bool last) {
  const Rows rows(p, step.rows);
  const Scratch s(p, scratch);
  auto* const sums = static_cast<double*>(shared);
  const int64_t count = kBackwardKeys * (p.dim + p.dim_v);  // of dk, followed by dv
  if (!first) {
    for (int64_t i = 0; i < count; ++i) s.dk[i] += sums[i];
  }
  if (!last) {
    std::copy_n(s.dk, count, sums);
    return;
  }
  for (int64_t i = 0; i < step.keys; ++i) {
    const int64_t key = step.first_key + i;
    if (p.dk.data != nullptr) {
      write(p, p.dk, rows.key_offset(key, p.dk.strides), s.dk + i * p.dim, scale_of(p), p.dim);
    }
    if (p.dv.data != nullptr) {
      write(p, p.dv, rows.key_offset(key, p.dv.strides), s.dv + i * p.dim_v, 1.0, p.dim_v);
    }
  }
}

double add_dsink(const AttentionBackwardProblem& p, int64_t head, double sum) {
  const auto row_of = [head](const auto& view, int64_t batch, int64_t query) {
    return static_cast<const double*>(view.data) + batch * view.strides.batch +
           query * view.strides.seq + head * view.strides.head;
  };
  return sink_gradient<double>(
      p, head, sink_of(p.sinks, head), sum,
      [&](int64_t batch, int64_t query) {
        int64_t key = first_key(p, query);
        const int64_t end = end_key(p, query);
        while (key < end && bias_of(p, batch, head, query, key) == -kInfinity) ++key;
        return key < end;
      },
      [&](int64_t batch, int64_t query) {
        return dot(row_of(p.dout, batch, query), row_of(p.out, batch, query), p.dim_v);
      });
}

void write_dsink(const AttentionBackwardProblem& p, int64_t head, double dsink) {
  const int64_t to = head * p.dsinks.stride;
  if (p.dsinks.dtype == Dtype::kFloat32) {
    write(static_cast<float*>(p.dsinks.data) + to, &dsink, 1.0, 1, p.accumulate);
  } else {
    write(static_cast<double*>(p.dsinks.data) + to, &dsink, 1.0, 1, p.accumulate);
  }
}

}  // namespace

const AttentionKernel kFp64Attention = {
    "scalar",
    kTileGroup,
    kTileRows / kTileGroup,
    [](const AttentionProblem&) { return false; },
    [](const AttentionProblem&) { return static_cast<int32_t>(kStepKeys); },
    [](const AttentionProblem& p, int32_t) {
      return static_cast<size_t>(kStepKeys + p.dim_v) * sizeof(double);
    },
    compute,
};

const AttentionBackwardKernel kFp64AttentionBackward = {
    "scalar",
    [](const AttentionBackwardProblem&) { return static_cast<int32_t>(kBackwardKeys); },
    [](const AttentionBackwardProblem&) { return static_cast<int32_t>(kBackwardRows); },
    [](const AttentionBackwardProblem& p) {
      return static_cast<size_t>(kBackwardKeys * (p.dim + p.dim_v) +
                                 kBackwardRows * (kBackwardKeys + p.dim)) *
             sizeof(double);
    },
    [](const AttentionBackwardProblem& p) {
      return static_cast<size_t>(kBackwardRows * p.dim) * sizeof(double);
    },
    [](const AttentionBackwardProblem& p) {
      return static_cast<size_t>(kBackwardKeys * (p.dim + p.dim_v)) * sizeof(double);
    },
    begin_keys,
    add_rows,
    add_dq,
    end_keys,
    add_dsink,
    write_dsink,
};

}  // namespace flashmoe::cpu
