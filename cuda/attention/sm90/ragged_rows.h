// Where the copy engine finds a sequence's rows in a tensor, and no other's: it cuts boxes at the
// ends of a dimension, so a map has a dimension that ends where the sequence does.
//
// A ragged map has two dimensions of rows, of the same stride, whose coordinates add up: `row`, of
// as many as the longest sequence may have, and `base`. The map's memory begins that many rows
// before the tensor. So each row of a tensor has many pairs of coordinates, and who asks for one
// chooses how far behind it the dimension of rows ends. What is cut is zero when read and is left
// alone when written.
//
// This is host code, too, for its tests.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe::sm90 {

struct RaggedRow {
  int row;
  int base;

  // Of a box that begins at `row` of a sequence of `length` rows, at most `most`, from `begin` on
  // in the tensor: it is cut behind the last row of the sequence, or, where it begins before row 0,
  // at that row, but not at both.
  static FLASHMOE_IN_KERNEL RaggedRow at(int row, int begin, int length, int most) {
    const int shift = row < 0 ? 0 : most - length;
    return {row + shift, begin + most - shift};
  }
};

}  // namespace flashmoe::sm90

#undef FLASHMOE_IN_KERNEL
