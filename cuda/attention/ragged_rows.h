// Where the copy engine finds a sequence's rows in a tensor or in pages, and no other's. In a
// tensor: it cuts boxes at the ends of a dimension, so a map has a dimension that ends where the
// sequence does.
//
// A ragged map is over [dim, row, heads, base, wrap]. `row` and `base` are two dimensions of rows,
// of the same stride, whose coordinates add up. So each row of a tensor has many pairs of them, and
// who asks for one chooses how far behind it the dimension `row` ends. What is cut is zero when
// read and is left alone when written.
//
// The sum is kMost rows too many. A map cannot begin that many before the tensor, since the copy
// engine wants the memory at its beginning to be mapped, even where no coordinate leads there. But
// addresses are modulo 2^64: `wrap` has the stride 2^34 - a row's, and kMost = 2^30 of these are
// kMost rows less.
//
// Rows of a batch are rows behind those of the one before: `base` counts these, too.
//
// This is host code, too, for its tests.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe {

// Coordinates. Those of `base` are below 2 kMost, which int32 holds.
struct RaggedRow {
  int row;
  int base;
  int wrap;

  static constexpr int kMost = 1 << 30;
  static constexpr int64_t kWrapBytes = int64_t{1} << 34;  // kMost of them are 2^64

  // Of a box that begins at `row` of a sequence of `length` rows from `begin` on in the tensor: it
  // is cut behind the last row of the sequence, or, where it begins before row 0, at that row, but
  // not at both.
  static FLASHMOE_IN_KERNEL RaggedRow at(int row, int begin, int length) {
    const int shift = row < 0 ? 0 : kMost - length;
    return {row + shift, begin + kMost - shift, kMost};
  }

  // Of a map whose dimension `row` is the heads of a tile, at whose last it ends: from head `row`
  // of the tensor's row `begin` on.
  static FLASHMOE_IN_KERNEL RaggedRow of_heads(int row, int begin) { return {row, begin, 0}; }
};

// Rows of a step of paged keys that are one behind the other in a page, or that there are not.
struct PagePiece {
  int page;  // among the sequence's, or kNoPage
  int row;   // of the page
  int rows;

  static constexpr int kNoPage = -1;

  // The first of the keys from `key` to before `end`, of a sequence that has so many from row
  // `begin` of its pages on.
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
