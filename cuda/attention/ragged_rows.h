// Coordinates by which the copy engine finds a sequence's rows in a tensor or in pages, and no rows
// of others. The copy engine clips boxes at the ends of a dimension, so a map of a tensor has a
// dimension that ends where the sequence does.
//
// A ragged map is over [dim, row, heads, base, wrap]. `row` and `base` are two dimensions of rows
// with the same stride, and their coordinates add up. So each row of a tensor has many pairs of
// coordinates, and a load chooses how far behind the row the dimension `row` ends. Clipped rows
// read as zero and are not written.
//
// The sum is kMost rows too many. A map cannot begin that many rows before the tensor: the copy
// engine requires mapped memory at its beginning, even if no coordinate leads there. But addresses
// are modulo 2^64. `wrap` has the stride 2^34 minus a row's stride, and kMost = 2^30 of these
// subtract kMost rows.
//
// The rows of each batch follow those of the previous one. `base` counts them, too.
//
// This is also host code, for its tests.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe {

// Coordinates. `base` is below 2 kMost, which fits in int32.
struct RaggedRow {
  int row;
  int base;
  int wrap;

  static constexpr int kMost = 1 << 30;
  static constexpr int64_t kWrapBytes = int64_t{1} << 34;  // kMost of them are 2^64

  // Coordinates of a box that begins at `row` of a sequence of `length` rows, which begins at row
  // `begin` of the tensor. The box is clipped behind the last row of the sequence or, if it begins
  // before row 0, at row 0, but not at both.
  static FLASHMOE_IN_KERNEL RaggedRow at(int row, int begin, int length) {
    const int shift = row < 0 ? 0 : kMost - length;
    return {row + shift, begin + kMost - shift, kMost};
  }

  // Coordinates in a map whose dimension `row` is the heads of a tile and ends at the last of them:
  // from head `row` of the tensor's row `begin` on.
  static FLASHMOE_IN_KERNEL RaggedRow of_heads(int row, int begin) { return {row, begin, 0}; }
};

// Rows of a step of paged keys that are contiguous in a page, or that do not exist.
struct PagePiece {
  int page;  // index among the sequence's pages, or kNoPage
  int row;   // row in the page
  int rows;

  static constexpr int kNoPage = -1;

  // The first piece of the keys from `key` to before `end`. The sequence has `length` keys, from
  // row `begin` of its pages on.
  static FLASHMOE_IN_KERNEL PagePiece at(const Divisor& by_page_size, int key, int end, int begin,
                                         int length) {
    if (key < 0) return {kNoPage, 0, (end < 0 ? end : 0) - key};
    if (key >= length) return {kNoPage, 0, end - key};
    const int page = by_page_size.quotient(begin + key);
    const int page_size = static_cast<int>(by_page_size.value);
    const int row = begin + key - page * page_size;
    int rows = (end < length ? end : length) - key;
    if (rows > page_size - row) rows = page_size - row;
    return {page, row, rows};
  }
};

}  // namespace flashmoe

#undef FLASHMOE_IN_KERNEL
