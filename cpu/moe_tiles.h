// How a grouped product is cut into tiles, and the threads that share them.
//
// A tile is up to tile_rows rows of one expert times up to tile_columns rows of its matrix; one
// thread computes it over the whole depth. The bits of an output depend neither on the tiling nor
// on the threads: every sum belongs to one row and one column and runs in one order. The rows of
// each expert are known only when the product runs; a plan assumes that all have the same number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/moe.h"

namespace flashmoe::cpu {

inline constexpr size_t kCacheLine = 64;

inline size_t whole_lines(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// What a plan and a launch agree on for one product.
struct Tiling {
  int64_t tile_rows;
  int64_t tile_columns;  // of each matrix
  int64_t column_tiles;
  int64_t most_tiles;  // however the rows are spread
  int32_t threads;
};

struct ProductShape {
  int64_t most_rows;  // over all experts
  bool even;          // no expert has more than one row
  int64_t experts;
  int64_t depth;
  int64_t columns;  // of each matrix
  int matrices;
  bool by_columns;  // columns are contiguous, not depth
};

// Chooses a tiling for up to `available` threads.
Tiling choose_tiling(const MoeKernel& kernel, const ProductShape& shape, int32_t available);

// Whether the level-2 cache is as large as those on which large tiles and prefetching were
// measured.
bool large_cache();

// The experts' rows, cut into tiles, in a part of the workspace.
class ExpertTiles {
 public:
  static size_t bytes(int32_t experts) {
    return whole_lines(3 * (static_cast<size_t>(experts) + 1) * sizeof(int64_t));
  }

  ExpertTiles(void* memory, int32_t experts)
      : experts_(experts),
        first_(static_cast<int64_t*>(memory)),
        begin_(first_ + experts + 1),
        end_(begin_ + experts + 1) {}

  // Sets the rows of each expert from `offsets`, whatever it holds: those in [0, rows) that belong
  // to no earlier expert.
  void from_offsets(const int32_t* offsets, int64_t rows);
  // Sets rows 0 to counts[e] - 1 of each expert, as far as they exist.
  void from_counts(const int32_t* counts, int64_t rows);

  int64_t begin(int32_t expert) const { return begin_[expert]; }
  int64_t end(int32_t expert) const { return end_[expert]; }

  // The rows that some expert has, if they are contiguous.
  int64_t first_row() const { return begin_[0]; }
  int64_t end_row() const { return end_[experts_ - 1]; }

  // Cuts into tiles of up to tile_rows rows; returns their number.
  int64_t cut(int64_t tile_rows);

  struct Tile {
    int32_t expert;
    int64_t begin;  // row
    int64_t end;
    int64_t column_tile;
  };
  // Tile `index` of all tiles, each taken column_tiles times. An expert's tiles are consecutive,
  // and among them those with the same columns, since these share reads of its matrix.
  Tile find(int64_t index, int64_t column_tiles) const;

 private:
  int32_t experts_;
  int64_t* first_;  // [experts + 1] first tile of each
  int64_t* begin_;  // [experts]
  int64_t* end_;
};

// One thread's memory for one product.
struct ThreadScratch {
  static size_t bytes(const MoeKernel& kernel) {
    const size_t rows = most_rows(kernel);
    return whole_lines(kernel.scratch_bytes) + whole_lines(rows * sizeof(void*)) +
           whole_lines(rows * sizeof(double));
  }

  ThreadScratch(unsigned char* memory, const MoeKernel& kernel) : scratch(memory) {
    const size_t rows = most_rows(kernel);
    memory += whole_lines(kernel.scratch_bytes);
    x = reinterpret_cast<const void**>(memory);
    scale = reinterpret_cast<double*>(memory + whole_lines(rows * sizeof(void*)));
  }

  void* scratch;   // the kernel's
  const void** x;  // [most_rows]
  double* scale;   // [most_rows]

 private:
  static size_t most_rows(const MoeKernel& kernel) {
    return static_cast<size_t>(std::max(kernel.many[0].rows, kernel.many[1].rows));
  }
};

// Cuts memory into pieces of whole cache lines. On a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base)
      : begin_(reinterpret_cast<uintptr_t>(base)),
        next_((begin_ + kCacheLine - 1) / kCacheLine * kCacheLine) {}

  unsigned char* take(uint64_t bytes) {
    unsigned char* const at = reinterpret_cast<unsigned char*>(next_);
    next_ += whole_lines(bytes);
    return at;
  }

  // Enough for any base: the core promises less than cache-line alignment.
  uint64_t bytes() const { return next_ - begin_ + kCacheLine; }

 private:
  uintptr_t begin_;
  uintptr_t next_;
};

// An expert's rows of a matrix from `row` on.
MoeWeights weights_of(const ExpertMatrix& matrix, const ExpertBias& bias, int32_t expert,
                      int64_t row);

// Appends the launch of a product to a plan.
void add_product(const char* name, const MoeKernel& kernel, Dtype dtype, const Tiling& tiling,
                 Plan* plan);

}  // namespace flashmoe::cpu
