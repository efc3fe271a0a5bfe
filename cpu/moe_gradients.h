// Gradients of experts' weights on the CPU: sums of outer products over an expert's rows, and sums
// of the rows themselves. Their tiles are units of work for one thread each; bits depend neither on
// the tiles nor on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/moe.h"
#include "cpu/moe_tiles.h"

namespace flashmoe::cpu {

// Pointers to rows, expert after expert.
using RowPointers = const void* const*;

class WeightGradients {
 public:
  // `element`: bytes of an element of the rows.
  WeightGradients(int32_t experts, int64_t element, bool adds)
      : experts_(experts), element_(element), adds_(adds) {}

  // [experts, m, n]: a's elements from a_first on times those of b. Does nothing if not wanted.
  void add_matrix(const MatrixGradient& gradient, RowPointers a, int64_t a_first, int64_t m,
                  RowPointers b, int64_t n);
  // [experts, n]: sums of a's elements, each row times its `scale`.
  void add_bias(const BiasGradient& gradient, RowPointers a, int64_t a_first, int64_t n,
                const double* scale);

  // Cuts into tiles of at most this size.
  void cut(MoeTileSize size);
  // The largest size that gives the threads enough tiles.
  MoeTileSize tile_size(const MoeKernel& kernel, int64_t threads) const;

  int64_t units() const { return units_; }
  double elements() const;  // elements of one expert's matrix gradients

  // Computes unit `index` of units(). Expert e has rows first[e] to first[e + 1] - 1.
  void compute(int64_t index, const MoeKernel& kernel, const int32_t* first, void* scratch) const;

 private:
  struct Job {
    RowPointers a;
    RowPointers b;  // nullptr: sums of rows of a
    const double* scale;
    int64_t a_first;
    int64_t b_first;
    int64_t m;  // 1 for sums
    int64_t n;
    char* out;
    int64_t expert_stride;  // elements
    int64_t row_stride;
    bool is_fp32;
    int64_t m_tile, n_tile;
    int64_t m_tiles, n_tiles;
    int64_t units;
  };
  static constexpr int kMostJobs = 6;  // for a layer: three matrices and their biases

  void add(const Job& job) { jobs_[count_++] = job; }

  const int32_t experts_;
  const int64_t element_;
  const bool adds_;
  Job jobs_[kMostJobs];
  int count_ = 0;
  int64_t units_ = 0;
};

// The least work for which waking a thread pays: about ten microseconds.
inline constexpr double kFlopsToWake = 2e5;
inline constexpr double kBytesToWake = 1 << 16;

// Threads for `work` in `pieces`: each thread should get at least 1 unit of work.
int32_t threads_for(double work, int64_t pieces);

}  // namespace flashmoe::cpu
