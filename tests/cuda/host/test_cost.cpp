// The estimates of the families beside what an H200 took, and the choice that follows from them.
#include "cuda/attention/sm90/split_kv_cost.h"

#include <cmath>
#include <cstdio>

#include "check.h"
#include "cuda/attention/sm90/cost.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace {

// Microseconds by name, in the run of benchmarks/results/attention_split_tuning_h200.json.
struct Measured {
  int64_t batch, heads_q, heads_kv, seq_q, seq_k, dim;
  bool causal;
  double split, sm90;
};

constexpr Measured kMeasured[] = {
    {1, 32, 8, 1024, 8192, 64, false, 123.31, 171.44},
    {1, 40, 8, 512, 8192, 128, false, 134.46, 171.91},
    {1, 40, 8, 512, 32768, 128, false, 480.9, 666.9},
    {1, 24, 24, 1024, 8192, 64, false, 107.74, 173.12},
    {1, 24, 8, 1024, 8192, 64, false, 102.09, 173.59},
    {1, 32, 8, 768, 8192, 128, false, 155.51, 175.06},
    {2, 32, 8, 300, 8192, 128, false, 134.53, 174.37},
    {1, 32, 8, 256, 8192, 64, false, 43.02, 86.67},
    {1, 32, 8, 384, 8192, 128, false, 86.72, 87.58},
    {1, 32, 8, 64, 8192, 128, false, 22.82, 66.22},
    {1, 32, 8, 256, 8192, 128, false, 57.09, 83.67},
    {1, 32, 8, 512, 8192, 128, false, 92.72, 90.65},
    {1, 28, 4, 700, 16384, 128, true, 233.63, 329.43},
    {1, 32, 8, 1024, 8192, 64, true, 128.24, 166.4},
    {1, 40, 8, 512, 32768, 128, true, 500.18, 696.4},
    {1, 32, 8, 2048, 8192, 64, false, 238.53, 264.99},
    {1, 32, 8, 1536, 8192, 128, false, 269.52, 263.94},
    {1, 16, 16, 1500, 4096, 128, true, 93.61, 88.38},
    {1, 16, 16, 2048, 4096, 128, false, 97.07, 93.09},
    {1, 20, 20, 2048, 2048, 128, false, 77.47, 71.04},
    {1, 20, 20, 2048, 2048, 64, false, 48.64, 46.88},
    {1, 32, 8, 1024, 2048, 64, false, 41.32, 46.71},
    {1, 40, 8, 512, 2048, 128, false, 50.25, 47.07},
    {1, 40, 8, 512, 1024, 128, false, 30.07, 26.61},
    {1, 32, 8, 1024, 32768, 64, false, 448.39, 667.93},
    {8, 32, 8, 64, 8192, 64, false, 74.94, 109.87},
    {4, 16, 16, 4096, 4096, 128, true, 407.95, 379.06},
    // Some of its last run, of few tiles.
    {1, 8, 8, 2048, 2048, 64, true, 21.58, 24.19},
    {1, 8, 8, 1024, 1024, 64, true, 10.36, 14.06},
    {1, 12, 12, 512, 512, 64, true, 7.23, 9.2},
    {1, 8, 8, 1024, 1024, 128, true, 12.5, 14.17},
    {1, 4, 4, 2048, 2048, 128, true, 20.27, 23.63},
    {1, 16, 16, 512, 512, 128, true, 8.51, 9.52},
    {1, 24, 24, 512, 512, 128, true, 10.84, 9.71},
    {1, 8, 8, 2048, 2048, 64, false, 21.77, 24.53},
    {1, 16, 16, 1024, 1024, 64, false, 13.21, 14.51},
    {1, 16, 16, 2048, 2048, 64, false, 40.53, 46.07},
    {2, 12, 12, 1024, 1024, 64, false, 23.79, 25.81},
    {1, 4, 4, 4096, 4096, 64, false, 38.8, 44.89},
    {1, 2, 2, 8192, 8192, 64, false, 65.7, 84.99},
    {1, 8, 8, 2048, 2048, 128, false, 27.37, 25.35},
    {1, 32, 8, 128, 1024, 128, false, 12.11, 13.85},
    {2, 20, 20, 1024, 1024, 64, false, 28.04, 25.9},
    {1, 24, 24, 300, 300, 64, false, 6.57, 8.35},
};

struct Estimates {
  double split, sm90;
};

Estimates estimates_of(const Measured& m) {
  DeviceFacts h200 = {};
  h200.compute_capability = 90;
  h200.multiprocessors = 132;
  h200.memory_bytes_per_microsecond = 4.917e6;
  AttentionProblem problem = {};
  problem.batch = m.batch;
  problem.heads_q = m.heads_q;
  problem.heads_kv = m.heads_kv;
  problem.seq_q = m.seq_q;
  problem.seq_k = m.seq_k;
  problem.dim = problem.dim_v = m.dim;
  problem.q.strides.head = m.dim;
  problem.k.dtype = problem.v.dtype = Dtype::kBFloat16;
  problem.bounded_right = m.causal;
  problem.right_offset = m.seq_k - m.seq_q;
  const Work work = work_of(problem);
  const int dim = static_cast<int>(m.dim);
  const TileSpeed speed = sm90::tile_speed(dim);
  const int rows = static_cast<int>(speed.rows);
  const sm90::SplitKernel kernel = {dim <= 128 ? 128 : 64, rows * (4 * dim + 8), 2 * dim};
  const sm90::TileSplit tiles =
      sm90::best_tile_split(problem, work, rows / sm90::kRowsPerGroup, kernel, speed, h200);
  return {tiles.split.microseconds, sm90::tile_microseconds(work, speed, h200)};
}

void the_faster_is_estimated_less() {
  constexpr double kTie = 0.02;
  constexpr double kMostError = 0.06;  // root mean square
  double split_errors = 0;
  double sm90_errors = 0;
  double shapes = 0;
  for (const Measured& m : kMeasured) {
    const Estimates estimates = estimates_of(m);
    std::printf("%ld %ld/%ld %ldx%ld d%ld%s: split %.1f of %.1f, sm90 %.1f of %.1f\n",
                static_cast<long>(m.batch), static_cast<long>(m.heads_q),
                static_cast<long>(m.heads_kv), static_cast<long>(m.seq_q),
                static_cast<long>(m.seq_k), static_cast<long>(m.dim), m.causal ? " causal" : "",
                estimates.split, m.split, estimates.sm90, m.sm90);
    if (std::abs(m.split / m.sm90 - 1) > kTie) {
      CHECK((estimates.split < estimates.sm90) == (m.split < m.sm90));
    }
    split_errors += std::pow(std::log(estimates.split / m.split), 2);
    sm90_errors += std::pow(std::log(estimates.sm90 / m.sm90), 2);
    ++shapes;
  }
  std::printf("root mean square errors: split %.3f, sm90 %.3f\n", std::sqrt(split_errors / shapes),
              std::sqrt(sm90_errors / shapes));
  CHECK(std::sqrt(split_errors / shapes) < kMostError);
  CHECK(std::sqrt(sm90_errors / shapes) < kMostError);
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::the_faster_is_estimated_less();
  return 0;
}
