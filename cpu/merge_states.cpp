// Merging partial attention results on the CPU: plan and launch.
//
// The work is memory-bound: a row of every partial is read once, and a row of out is written. The
// weights of a row's partials are computed here, once for all instruction sets; its numbers go
// through a kernel. One thread computes a row, so that its bits depend neither on the number of
// threads nor on the tiles, which are runs of rows in memory order.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <limits>
#include <type_traits>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/isa.h"
#include "cpu/merge_states_kernel.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::kMergedAtOnce;
using cpu::MergeKernel;
using cpu::MergeRow;
using Problem = MergeStatesProblem;

// Bytes of a tile, and the fewest for which waking a thread pays: some ten microseconds of reading.
constexpr double kBytesPerTile = 64 << 10;
constexpr double kBytesPerThread = 128 << 10;

constexpr int64_t kColumnsAtOnce = 1024;  // for sums on the stack

void merge_fp64_row(const MergeRow<double>& row) {
  double* const out = static_cast<double*>(row.out);
  for (int64_t i = 0; i < row.columns; ++i) {
    double sum = 0.0;
    int32_t k = 0;
    if (row.prior != nullptr) {
      sum = static_cast<const double*>(row.prior)[i] * row.prior_weight;
    } else if (row.count > 0) {
      sum = static_cast<const double*>(row.x[0])[i] * row.weights[0];
      k = 1;
    }
    for (; k < row.count; ++k) sum += static_cast<const double*>(row.x[k])[i] * row.weights[k];
    out[i] = sum;
  }
}

constexpr MergeKernel kFp64Merge = {"scalar", nullptr};

const MergeKernel& kernel_for(cpu::Isa isa, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return kFp64Merge;
  const int index = static_cast<int>(dtype);
  switch (isa) {
#if FLASHMOE_CPU_X86
    case cpu::Isa::kAmx:
    case cpu::Isa::kAvx512Bf16:
    case cpu::Isa::kAvx512: return cpu::kAvx512Merge[index];
    case cpu::Isa::kAvx2: return cpu::kAvx2Merge[index];
#endif
    default: return cpu::kScalarMerge[index];
  }
}

// The weights of one row's partials: exp(lse - m) over the sum of these, where m is the largest
// lse.
template <class Real>
class Weights {
 public:
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  void see(Real lse) {
    any_ = any_ || !is_empty(lse);
    if (lse > largest_) largest_ = lse;
  }
  // Whether a partial is empty and must not be read. NaN is not empty.
  static bool is_empty(Real lse) { return lse == -kInfinity; }

  // Valid once all have been seen, for a partial that is not empty.
  Real power(Real lse) const {
    if (largest_ < kInfinity) return std::exp(lse - largest_);
    return lse == kInfinity ? Real{1} : lse != lse ? lse : Real{0};
  }
  void add(Real power) { sum_ += power; }

  Real of(Real power) const { return power / sum_; }
  Real lse() const { return any_ ? largest_ + std::log(sum_) : -kInfinity; }

 private:
  bool any_ = false;
  Real largest_ = -kInfinity;  // NaN aside
  Real sum_ = 0;
};

// Counts rows in the memory order of outs: heads within tokens, or tokens within heads.
class Rows {
 public:
  explicit Rows(const Problem& p)
      : heads_inside_(distance(p.outs.strides.head) <= distance(p.outs.strides.seq)),
        inner_(heads_inside_ ? p.heads : p.seq),
        outer_(heads_inside_ ? p.seq : p.heads) {}

  void go_to(int64_t row) {
    batch_ = row / (inner_ * outer_);
    row %= inner_ * outer_;
    o_ = row / inner_;
    i_ = row % inner_;
  }
  void next() {
    if (++i_ < inner_) return;
    i_ = 0;
    if (++o_ < outer_) return;
    o_ = 0;
    ++batch_;
  }
  int64_t batch() const { return batch_; }
  int64_t seq() const { return heads_inside_ ? o_ : i_; }
  int64_t offset(const RowStrides& strides) const {
    const int64_t inner = heads_inside_ ? strides.head : strides.seq;
    const int64_t outer = heads_inside_ ? strides.seq : strides.head;
    return batch_ * strides.batch + o_ * outer + i_ * inner;
  }

 private:
  // Accepts any stride: an axis of extent 1 may have the least 64-bit number.
  static uint64_t distance(int64_t stride) {
    const auto bits = static_cast<uint64_t>(stride);
    return stride < 0 ? 0 - bits : bits;
  }

  bool heads_inside_;
  int64_t inner_;
  int64_t outer_;
  int64_t batch_ = 0;
  int64_t o_ = 0;
  int64_t i_ = 0;
};

// The rows of sequences, for a problem that has them.
class Tokens {
 public:
  explicit Tokens(const Problem& p) : p_(p) {}

  bool have(int64_t batch, int64_t seq) {
    if (p_.most_q == 0) return true;
    if (p_.cu_seqlens_q.data == nullptr) {
      const int64_t length = p_.seqused_q.data != nullptr ? p_.seqused_q.at(batch) : p_.seq;
      return seq < std::min(length, p_.most_q);
    }
    // The next row is of the same sequence, or of the next one.
    for (const int64_t s : {last_, last_ + 1}) {
      if (s < p_.sequences && is_of(s, seq)) return (last_ = s, true);
    }
    for (int64_t s = 0; s < p_.sequences; ++s) {
      if (is_of(s, seq)) return (last_ = s, true);
    }
    return false;
  }

 private:
  bool is_of(int64_t sequence, int64_t seq) const {
    const int64_t begin = std::clamp<int64_t>(p_.cu_seqlens_q.at(sequence), 0, p_.seq);
    int64_t length = std::clamp(p_.cu_seqlens_q.at(sequence + 1), begin, p_.seq) - begin;
    if (p_.seqused_q.data != nullptr) {
      length = std::clamp<int64_t>(p_.seqused_q.at(sequence), 0, length);
    }
    return seq >= begin && seq - begin < std::min(length, p_.most_q);
  }

  const Problem& p_;
  int64_t last_ = 0;  // the sequence of the last row
};

template <class Data>
Data* at(Data* data, int64_t offset, Dtype dtype) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  return static_cast<Byte*>(data) + offset * dtype_bytes(dtype);
}

// One row of the problem.
template <class Real>
class RowMerge {
 public:
  RowMerge(const Problem& p, void (*merge)(const MergeRow<Real>&), const Rows& rows)
      : p_(p), merge_(merge) {
    outs_ = at(p.outs.data, rows.offset(p.outs.strides), p.outs.dtype);
    lses_ = static_cast<const Real*>(p.lses.data) + rows.offset(p.lses.strides);
    out_ = at(p.out.data, rows.offset(p.out.strides), p.out.dtype);
    if (p.lse.data != nullptr) lse_ = static_cast<Real*>(p.lse.data) + rows.offset(p.lse.strides);
    if (p.prior_out.data == nullptr) return;
    prior_lse_ = *(static_cast<const Real*>(p.prior_lse.data) + rows.offset(p.prior_lse.strides));
    if (Weights<Real>::is_empty(prior_lse_)) return;
    prior_ = at(p.prior_out.data, rows.offset(p.prior_out.strides), p.prior_out.dtype);
  }

  void run() {
    weigh();
    if (p_.partials <= kMergedAtOnce) {
      MergeRow<Real> row = first_row();
      int64_t i = 0;
      gather(&i, &row);
      row.out = out_;
      row.out_dtype = p_.out.dtype;
      row.columns = p_.dim_v;
      merge_(row);
    } else {
      merge_many();
    }
    if (lse_ != nullptr) *lse_ = weights_.lse();
  }

 private:
  static constexpr Dtype kSums = std::is_same_v<Real, double> ? Dtype::kFloat64 : Dtype::kFloat32;

  static constexpr Real kEmpty = -1;  // in place of a power

  Real lse(int64_t i) const { return lses_[i * p_.lses_stride]; }

  // The powers of the first few are kept, the others computed again. kEmpty: not to be read.
  Real power(int64_t i) const { return i < kMergedAtOnce ? powers_[i] : power_of(lse(i)); }
  Real power_of(Real lse) const {
    return Weights<Real>::is_empty(lse) ? kEmpty : weights_.power(lse);
  }

  // Each lse is read once if possible: neighbours in memory belong to other rows.
  void weigh() {
    if (p_.prior_out.data != nullptr) weights_.see(prior_lse_);
    const auto kept = std::min<int64_t>(p_.partials, kMergedAtOnce);
    for (int64_t i = 0; i < kept; ++i) weights_.see(powers_[i] = lse(i));
    for (int64_t i = kept; i < p_.partials; ++i) weights_.see(lse(i));
    if (prior_ != nullptr) {
      prior_power_ = weights_.power(prior_lse_);
      weights_.add(prior_power_);
    }
    for (int64_t i = 0; i < kept; ++i) powers_[i] = power_of(powers_[i]);
    for (int64_t i = 0; i < p_.partials; ++i) {
      const Real its = power(i);
      if (its != kEmpty) weights_.add(its);
    }
  }

  MergeRow<Real> first_row() const {
    MergeRow<Real> row;
    row.prior = prior_;
    row.prior_dtype = p_.prior_out.dtype;
    row.prior_weight = prior_ != nullptr ? weights_.of(prior_power_) : Real{0};
    return row;
  }

  // Collects the next partials with a weight, from *i on.
  void gather(int64_t* i, MergeRow<Real>* row) const {
    row->count = 0;
    for (; *i < p_.partials && row->count < kMergedAtOnce; ++*i) {
      const Real its = power(*i);
      if (its == kEmpty) continue;
      row->x[row->count] = at(outs_, *i * p_.outs_stride, p_.outs.dtype);
      row->weights[row->count++] = weights_.of(its);
    }
  }

  // Merges more partials than go at once: the sum so far becomes the prior of the next ones, with
  // weight 1.
  void merge_many() const {
    Real sums[kColumnsAtOnce];
    for (int64_t column = 0; column < p_.dim_v; column += kColumnsAtOnce) {
      MergeRow<Real> row = first_row();
      if (row.prior != nullptr) row.prior = at(row.prior, column, row.prior_dtype);
      row.columns = std::min(kColumnsAtOnce, p_.dim_v - column);
      for (int64_t i = 0; i < p_.partials;) {
        gather(&i, &row);
        for (int32_t k = 0; k < row.count; ++k) row.x[k] = at(row.x[k], column, p_.outs.dtype);
        const bool last = i == p_.partials;
        row.out = last ? at(out_, column, p_.out.dtype) : static_cast<void*>(sums);
        row.out_dtype = last ? p_.out.dtype : kSums;
        merge_(row);
        if (row.prior == nullptr && row.count == 0) continue;
        row.prior = sums;
        row.prior_dtype = kSums;
        row.prior_weight = 1;
      }
    }
  }

  const Problem& p_;
  void (*const merge_)(const MergeRow<Real>&);
  const void* outs_;
  const Real* lses_;
  void* out_;
  Real* lse_ = nullptr;
  const void* prior_ = nullptr;  // nullptr: not to be read
  Real prior_lse_ = 0;
  Real prior_power_ = 0;
  Weights<Real> weights_;
  Real powers_[kMergedAtOnce];
};

int64_t rows_of(const Problem& p) { return p.batch * p.seq * p.heads; }

double bytes_of_row(const Problem& p) {
  return static_cast<double>(p.partials + 2) * static_cast<double>(p.dim_v) *
         static_cast<double>(dtype_bytes(p.outs.dtype));
}

int64_t choose_tile(const Problem& p) {
  const int64_t least = rows_of(p) / UINT32_MAX + 1;  // so that the number of tiles fits
  const double rows = kBytesPerTile / bytes_of_row(p);
  return std::max(least, static_cast<int64_t>(rows));
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  cpu::Isa isa;
  FLASHMOE_TRY(cpu::chosen_isa(&isa, reason));
  const MergeKernel& kernel = kernel_for(isa, p.outs.dtype);
  const int64_t tile = std::min<int64_t>(choose_tile(p), INT32_MAX);
  const int64_t tiles = ceil_div(rows_of(p), tile);
  const double wanted = static_cast<double>(rows_of(p)) * bytes_of_row(p) / kBytesPerThread;
  const int64_t most = std::min<int64_t>(cpu::num_threads(), std::max<int64_t>(tiles, 1));
  const auto threads = wanted < static_cast<double>(most)
                           ? std::max<int64_t>(static_cast<int64_t>(wanted), 1)
                           : most;
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "merge_states_cpu_%s_%s_dv%lld", kernel.isa,
                dtype_name(p.outs.dtype), static_cast<long long>(p.dim_v));
  plan->set_isa(kernel.isa);
  flashmoe_launch& launch = plan->add_launch(name, &kernel, p.device, static_cast<uint32_t>(tiles),
                                             static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(tile);
  launch.dim_v = static_cast<int32_t>(std::min<int64_t>(p.dim_v, INT32_MAX));
  return FLASHMOE_OK;
}

struct Launch {
  const Problem& problem;
  const MergeKernel& kernel;
  int64_t tile;
  int64_t tiles;
  std::atomic<int64_t> next{0};
};

template <class Real>
void merge_tiles(Launch* launch, void (*merge)(const MergeRow<Real>&)) {
  const Problem& p = launch->problem;
  for (;;) {
    const int64_t index = launch->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch->tiles) return;
    const int64_t begin = index * launch->tile;
    const int64_t end = std::min(begin + launch->tile, rows_of(p));
    Rows rows(p);
    rows.go_to(begin);
    Tokens tokens(p);
    for (int64_t row = begin; row < end; ++row, rows.next()) {
      if (tokens.have(rows.batch(), rows.seq())) RowMerge<Real>(p, merge, rows).run();
    }
  }
}

void work(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  if (launch.problem.outs.dtype == Dtype::kFloat64) {
    merge_tiles<double>(&launch, merge_fp64_row);
  } else {
    merge_tiles<float>(&launch, launch.kernel.merge);
  }
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  Launch launch = {p, *static_cast<const MergeKernel*>(plan.entries[0]), planned.tile_m,
                   planned.grid[0]};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const MergeStatesFamily kCpuMergeStates = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
