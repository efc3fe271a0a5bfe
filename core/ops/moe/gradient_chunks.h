// A layer's gradients in chunks, so that the workspace stays within a bound. First come columns of
// I, chunk by chunk:
//
//   (g, u) -> da -> dz, a -> rows of dw_gate_up, columns of dw_down, biases, part of <da, a>
//
// Then come columns of H, from all of dz: rows of dx, their sums, and with weight_on_input part of
// the weights' gradients. Each chunk holds whole sums, except those of the weights' gradients,
// which go by blocks of kGradientBlock columns, in order. So the bits are those of one chunk.
// Chunks are of columns because these are known before the routing; chunks of experts would need
// room for all rows.
//
// For the launchers of the backends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/ops/moe/problem.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kGradientBlock = 256;

// Columns per chunk: a multiple of kGradientBlock, or all.
struct GradientChunks {
  int64_t inner;
  int64_t hidden;
};

inline int64_t chunk_count(int64_t columns, int64_t chunk) {
  return std::max<int64_t>(columns / chunk + (columns % chunk != 0 ? 1 : 0), 1);
}

// Columns per chunk: the fewest chunks, about equal, for which fits(columns of one) is true; the
// smallest chunks if it never is. Everything smaller than a chunk that fits must fit as well. All
// columns in one chunk are an exception, since they have another workspace than a part of them.
template <class Fits>
int64_t fit_chunk(int64_t columns, const Fits& fits) {
  if (fits(columns)) return columns;
  const auto chunk_of = [columns](int64_t count) {
    const int64_t blocks = chunk_count(chunk_count(columns, count), kGradientBlock);
    return std::min(columns, blocks * kGradientBlock);
  };
  int64_t most = chunk_count(columns, kGradientBlock);
  int64_t least = 2;
  while (least < most) {
    const int64_t count = least + (most - least) / 2;
    if (fits(chunk_of(count))) {
      most = count;
    } else {
      least = count + 1;
    }
  }
  return chunk_of(most);
}

// bytes_of(chunks) is the workspace of such chunks.
template <class BytesOf>
GradientChunks fit_chunks(const MoeBackwardProblem& p, uint64_t bound, const BytesOf& bytes_of) {
  const GradientChunks whole = {p.layer.inner, p.layer.hidden};
  // Chunks of only one of the two need a little for partial sums, and may not fit where all columns
  // do.
  if (bound == 0 || bytes_of(whole) <= bound) return whole;
  const GradientChunks least = {std::min(whole.inner, kGradientBlock),
                                std::min(whole.hidden, kGradientBlock)};
  const auto fits = [&](const GradientChunks& chunks) { return bytes_of(chunks) <= bound; };
  return {fit_chunk(whole.inner, [&](int64_t n) { return fits({n, least.hidden}); }),
          fit_chunk(whole.hidden, [&](int64_t n) { return fits({least.inner, n}); })};
}

inline flashmoe_status refuse_bound(const MoeBackwardProblem& p, uint64_t least,
                                    const Reason& reason) {
  return reason.refuse(
      FLASHMOE_ERROR_UNSUPPORTED,
      "max_workspace_bytes: got %llu, accepted are 0, for no bound, and from %llu on, which chunks "
      "of %lld columns take",
      static_cast<unsigned long long>(p.max_workspace_bytes),
      static_cast<unsigned long long>(least), static_cast<long long>(kGradientBlock));
}

// ---- the part of the tensors that a chunk has

// Whether dz takes the place of pre_activation, for all columns: each element replaces the number
// it is the gradient of, or that number's factor, so that code that reads both may write both.
// Interleaved rows of dz have another order.
inline bool dz_is_in_place(const MoeBackwardProblem& p) {
  return p.overwrites && p.order != FLASHMOE_MOE_INTERLEAVED;
}

// Columns of I. Rows of dz hold all columns of I, or only these.
struct InnerChunk {
  int64_t first;
  int64_t count;
  int64_t inner;  // of the layer
  bool dz_is_whole;

  bool is_whole() const { return count == inner; }
  int64_t dz_first() const { return dz_is_whole ? first : 0; }      // of the first part of a row
  int64_t dz_inner() const { return dz_is_whole ? inner : count; }  // to the second part
};

// Columns of H.
struct HiddenChunk {
  int64_t first;
  int64_t count;
  bool is_last;
};

// The chunk that begins with a column.
inline InnerChunk inner_chunk(const MoeBackwardProblem& p, const GradientChunks& chunks,
                              int64_t first, bool dz_is_whole) {
  return {first, std::min(chunks.inner, p.layer.inner - first), p.layer.inner, dz_is_whole};
}
inline HiddenChunk hidden_chunk(const MoeBackwardProblem& p, const GradientChunks& chunks,
                                int64_t first) {
  const int64_t rest = p.layer.hidden - first;
  return {first, std::min(chunks.hidden, rest), chunks.hidden >= rest};
}

// Where g's and u's gradients begin in a row of dz, which has the order of w_gate_up's rows, and
// the step between elements. Without a gate, u's begin at places[1].
struct DzPlaces {
  int64_t places[2];
  int64_t step;
};

inline DzPlaces dz_places(const MoeBackwardProblem& p, const InnerChunk& chunk) {
  const int64_t first = chunk.dz_first();
  if (p.order == FLASHMOE_MOE_INTERLEAVED) return {{2 * first, 2 * first + 1}, 2};
  DzPlaces made = {{first, first + (p.layer.gated ? chunk.dz_inner() : 0)}, 1};
  if (p.order == FLASHMOE_MOE_UP_GATE) std::swap(made.places[0], made.places[1]);
  return made;
}

// A chunk's rows of the gradient of w_gate_up or w_up, and the column of dz for the first.
struct GradientRows {
  bool of_w_up;
  int64_t first;
  int64_t count;
  int64_t dz_column;
};

// Fills `rows` and returns their number.
inline int gradient_rows(const MoeBackwardProblem& p, const InnerChunk& chunk,
                         GradientRows (&rows)[2]) {
  const int64_t width = p.layer.gated ? 2 : 1;
  if (p.order == FLASHMOE_MOE_INTERLEAVED || !p.layer.gated) {
    rows[0] = {false, width * chunk.first, width * chunk.count, width * chunk.dz_first()};
    return 1;
  }
  const int64_t second = chunk.dz_first() + chunk.dz_inner();
  if (p.order == FLASHMOE_MOE_SEPARATE) {
    rows[0] = {false, chunk.first, chunk.count, chunk.dz_first()};
    rows[1] = {true, chunk.first, chunk.count, second};
    return 2;
  }
  if (chunk.is_whole()) {
    rows[0] = {false, 0, width * chunk.count, 0};
    return 1;
  }
  rows[0] = {false, chunk.first, chunk.count, chunk.dz_first()};
  rows[1] = {false, chunk.inner + chunk.first, chunk.count, second};
  return 2;
}

template <class View>
void advance(View* view, int64_t elements) {
  if (view->data == nullptr) return;
  using Data = decltype(view->data);
  view->data = static_cast<Data>(const_cast<char*>(static_cast<const char*>(view->data) +
                                                   elements * dtype_bytes(view->dtype)));
}

inline MatrixGradient rows_from(MatrixGradient gradient, int64_t row) {
  advance(&gradient, row * gradient.row_stride);
  return gradient;
}
inline MatrixGradient columns_from(MatrixGradient gradient, int64_t column) {
  advance(&gradient, column * gradient.column_stride);
  return gradient;
}
inline BiasGradient rows_from(BiasGradient gradient, int64_t row) {
  advance(&gradient, row);
  return gradient;
}

// The layer with only these columns of I.
inline MoeForwardProblem layer_of(const MoeBackwardProblem& p, const InnerChunk& chunk) {
  MoeForwardProblem layer = p.layer;
  layer.inner = chunk.count;
  advance(&layer.gate, chunk.first * layer.gate.row_stride);
  advance(&layer.up, chunk.first * layer.up.row_stride);
  advance(&layer.down, chunk.first * layer.down.column_stride);
  advance(&layer.gate_bias, chunk.first * layer.gate_bias.row_stride);
  advance(&layer.up_bias, chunk.first * layer.up_bias.row_stride);
  return layer;
}

}  // namespace flashmoe
