// Gradients of the weights of experts on the CPU: sums over an expert's rows of their outer
// products, and of the rows themselves. Their tiles are units of work, each of one thread; bits
// depend neither on the tiles nor on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/moe.h"
#include "cpu/moe_tiles.h"

namespace flashmoe::cpu {

// Rows by number, those of each expert behind one another: a pointer to each.
using RowPointers = const void* const*;

class WeightGradients {
 public:
  // `element`: bytes of one of the rows'.
  WeightGradients(int32_t experts, int64_t element, bool adds)
      : experts_(experts), element_(element), adds_(adds) {}

  // [experts, m, n]: a's elements from a_first on times those of b. Nothing where it is not wanted.
  void add_matrix(const MatrixGradient& gradient, RowPointers a, int64_t a_first, int64_t m,
                  RowPointers b, int64_t n);
  // [experts, n]: sums of a's elements, times `scale` of each row.
  void add_bias(const BiasGradient& gradient, RowPointers a, int64_t a_first, int64_t n,
                const double* scale);

  // Cuts into tiles of at most this size.
  void cut(MoeTileSize size);
  // A size of which there are enough tiles for the threads.
  MoeTileSize tile_size(const MoeKernel& kernel, int64_t threads) const;

  int64_t units() const { return units_; }
  double elements() const;  // of one expert's gradients of matrices

  // Unit `index` of units(). Expert e has the rows first[e] to first[e + 1] - 1.
  void compute(int64_t index, const MoeKernel& kernel, const int32_t* first, void* scratch) const;

 private:
  struct Job {
    RowPointers a;
    RowPointers b;  // nullptr: sums of rows of a
    const double* scale;
    int64_t a_first;
    int64_t b_first;
    int64_t m;  // 1 of sums
    int64_t n;
    char* out;
    int64_t expert_stride;  // elements
    int64_t row_stride;
    bool is_fp32;
    int64_t m_tile, n_tile;
    int64_t m_tiles, n_tiles;
    int64_t units;
  };
  static constexpr int kMostJobs = 6;  // of a layer: three matrices and their biases

  void add(const Job& job) { jobs_[count_++] = job; }

  const int32_t experts_;
  const int64_t element_;
  const bool adds_;
  Job jobs_[kMostJobs];
  int count_ = 0;
  int64_t units_ = 0;
};

// What a thread must find to be worth waking, about ten microseconds of it.
inline constexpr double kFlopsToWake = 2e5;
inline constexpr double kBytesToWake = 1 << 16;

// Threads for so much work of which each should find 1, in so many pieces.
int32_t threads_for(double work, int64_t pieces);

}  // namespace flashmoe::cpu
