#include "cpu/moe_gradients.h"

#include <cstring>

#include "core/ceil_div.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

constexpr int64_t kUnitsPerThread = 8;  // experts have different numbers of rows
constexpr int64_t kFewestColumns = 128;

}  // namespace

void WeightGradients::add_matrix(const MatrixGradient& gradient, RowPointers a, int64_t a_first,
                                 int64_t m, RowPointers b, int64_t n) {
  if (gradient.data == nullptr) return;
  Job job = {};
  job.a = a;
  job.b = b;
  job.a_first = a_first;
  job.m = m;
  job.n = n;
  job.row_stride = gradient.row_stride;
  if (gradient.column_stride != 1) {  // vectors go along the contiguous axis
    std::swap(job.a, job.b);
    std::swap(job.a_first, job.b_first);
    std::swap(job.m, job.n);
    job.row_stride = gradient.column_stride;
  }
  job.out = static_cast<char*>(gradient.data);
  job.expert_stride = gradient.expert_stride;
  job.is_fp32 = gradient.dtype == Dtype::kFloat32;
  add(job);
}

void WeightGradients::add_bias(const BiasGradient& gradient, RowPointers a, int64_t a_first,
                               int64_t n, const double* scale) {
  if (gradient.data == nullptr) return;
  Job job = {};
  job.a = a;
  job.scale = scale;
  job.a_first = a_first;
  job.m = 1;
  job.n = n;
  job.out = static_cast<char*>(gradient.data);
  job.expert_stride = gradient.expert_stride;
  job.is_fp32 = gradient.dtype == Dtype::kFloat32;
  add(job);
}

void WeightGradients::cut(MoeTileSize size) {
  units_ = 0;
  for (int i = 0; i < count_; ++i) {
    Job& job = jobs_[i];
    job.m_tile = size.rows;
    job.n_tile = size.columns;
    job.m_tiles = ceil_div(job.m, size.rows);
    job.n_tiles = ceil_div(job.n, size.columns);
    job.units = experts_ * job.m_tiles * job.n_tiles;
    units_ += job.units;
  }
}

MoeTileSize WeightGradients::tile_size(const MoeKernel& kernel, int64_t threads) const {
  MoeTileSize size = kernel.outer;
  const auto enough = [&] {
    int64_t tiles = 0;
    for (int i = 0; i < count_; ++i) {
      tiles += ceil_div(jobs_[i].m, size.rows) * ceil_div(jobs_[i].n, size.columns);
    }
    return threads == 1 || tiles * experts_ >= kUnitsPerThread * threads;
  };
  while (size.columns > kFewestColumns && !enough()) size.columns /= 2;
  return size;
}

double WeightGradients::elements() const {
  double sum = 0.0;
  for (int i = 0; i < count_; ++i) {
    sum += static_cast<double>(jobs_[i].m) * static_cast<double>(jobs_[i].n);
  }
  return sum;
}

void WeightGradients::compute(int64_t index, const MoeKernel& kernel, const int32_t* first,
                              void* scratch) const {
  const Job* job = jobs_;
  for (; index >= job->units; ++job) index -= job->units;
  const int64_t tiles = job->m_tiles * job->n_tiles;
  const int64_t expert = index / tiles;
  const int64_t m = index % tiles % job->m_tiles * job->m_tile;
  const int64_t n = index % tiles / job->m_tiles * job->n_tile;
  const int64_t begin = first[expert];
  const int64_t place = expert * job->expert_stride + m * job->row_stride + n;
  const int64_t out_element = job->is_fp32 ? int64_t{sizeof(float)} : element_;
  char* const out = job->out + place * out_element;
  if (first[expert + 1] == begin) {
    if (adds_) return;
    const int64_t columns = std::min(job->n_tile, job->n - n);
    for (int64_t r = 0; r < std::min(job->m_tile, job->m - m); ++r) {
      std::memset(out + r * job->row_stride * out_element, 0,
                  static_cast<size_t>(columns * out_element));
    }
    return;
  }
  if (job->b == nullptr) {
    const double* const scale = job->scale != nullptr ? job->scale + begin : nullptr;
    kernel.add_rows({job->a + begin, scale, first[expert + 1] - begin, job->a_first + n,
                     std::min(job->n_tile, job->n - n), out, job->is_fp32, adds_});
    return;
  }
  kernel.add_outer({job->a + begin, job->b + begin, first[expert + 1] - begin, job->a_first + m,
                    job->b_first + n, std::min(job->m_tile, job->m - m),
                    std::min(job->n_tile, job->n - n), out, job->row_stride, job->is_fp32, adds_},
                   scratch);
}

int32_t threads_for(double work, int64_t pieces) {
  const double wanted = std::min(work, static_cast<double>(pieces));
  return static_cast<int32_t>(std::clamp(wanted, 1.0, static_cast<double>(num_threads())));
}

}  // namespace flashmoe::cpu
