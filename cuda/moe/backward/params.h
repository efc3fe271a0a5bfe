// Arguments of the stages of a layer's gradients that go row by row, as the device sees them.
// Strides in elements. Slots count where `pairs` and `slots` agree and an expert has them.
#pragma once

#include <cstdint>

#include "cuda/moe/backward/queue.h"
#include "cuda/tile/bias.h"

namespace flashmoe::moe_backward {

inline constexpr int kPiece = 8;      // elements of 16 bytes
inline constexpr int kRowWarps = 4;   // of a block of `rows`, a run of slots each
inline constexpr int kSlotWarps = 8;  // of a block of `slots`, a slot a lane
inline constexpr int kSumWarps = 8;   // of a block of `sums`, by turns a row each
inline constexpr int kSumColumns = 256;
inline constexpr int kZeroWarps = 4;      // of a block of `zeros`, a row each
inline constexpr int kTeamThreads = 256;  // at most, of a token of `combine`
inline constexpr int kCombineThreads = 1024;
inline constexpr int kMostTeams = 32;     // of a block
inline constexpr int kMostBarriers = 15;  // of its teams of more than a warp: a named one each

struct Routing {
  const float* weights;    // [tokens, top_k]
  const int32_t* offsets;  // [experts + 1]
  const int32_t* pairs;    // [rows]
  const int32_t* slots;    // [tokens, top_k]
  int32_t rows;            // tokens * top_k
  int32_t experts;
  int32_t top_k;
};

// Rows of gradients of g and of u, in the order of w_gate_up's rows.
struct DzRows {
  uint16_t* data;  // or nullptr
  int64_t stride;
  int32_t places[2];  // of g's first and u's first in a row; without a gate u's the second
  int32_t step;       // 2: they alternate, g's first
};

// From da, the gradient of a row of what act made, and what act was applied to. Rows of slots that
// an expert has, and that do not count, become zeros. Sums over columns go by blocks of 256, in
// order: a chunk of columns adds to what those before it left.
struct RowsParams {
  Routing routing;
  int32_t* row_tokens;   // [rows]: of a slot, or -1; out
  int32_t rows_of_warp;  // at most 32
  Queue queue;           // out, by a block of its own, the last; or nothing
  float* dots;           // [rows] <da, a>, and <dout, down_bias>; out, or nullptr
  uint16_t* da;          // [rows, inner]; where `wants_a` in its place a, times the weight
  const uint16_t* pre_activation;  // [rows, g and u] or nullptr: there is nothing but row_tokens
  int64_t pre_activation_stride;
  int32_t pre_activation_up;  // from g's first to u's
  int32_t adds_dots;
  DzRows dz;             // out
  DzRows scaled_dz;      // the same times the weight
  const uint16_t* dout;  // [tokens, hidden]
  int64_t dout_stride;
  Bias down_bias;
  float da_scale;  // da is this times what lies there
  int32_t has_da;
  int32_t wants_a;
  int32_t inner;
  int32_t hidden;
  int32_t gated;
  int32_t weight_on_input;
  int32_t activation;
  float alpha;
  float limit;
  float up_offset;
};

// What routing says of slots.
struct SlotsParams {
  Routing routing;
  int32_t* row_tokens;  // [rows]: of a slot, or -1; out
  float* row_weights;   // [rows]: of its pair, or 0; out
  Queue queue;          // out, by a block of its own, the last; or nothing
};

// dx[t] = sum over k of y[slots[t, k]], and dweights. Of a chunk of columns `hidden` are its own.
struct CombineParams {
  Routing routing;
  const int32_t* row_tokens;
  const uint16_t* y[2];  // [rows, hidden], to be added up; the second may be absent
  // The weights' gradients in dot_parts parts, [dot_parts, rows], or with weight_on_input, where
  // they are <y, x>, the sums of the chunks so far. nullptr: of one chunk.
  float* dots;
  int32_t dot_parts;
  int32_t adds_dots;  // behind the first chunk
  const uint16_t* x;  // [tokens, hidden]
  int64_t x_stride;
  void* dx;  // [tokens, hidden] or nullptr
  int64_t dx_stride;
  float* dweights;  // [tokens, top_k] or nullptr; of the last chunk
  int32_t dx_is_fp32;
  int32_t hidden;
  int32_t weight_on_input;
  int32_t adds;
  int32_t team_threads;  // that have a token: whole warps
};

// Sums over an expert's rows.
struct Sum {
  const uint16_t* rows;
  int64_t stride;
  int64_t expert_stride;  // with counts
  int32_t by_token;       // its rows are tokens, else slots
  int32_t weighted;
  int32_t columns;
  int32_t is_fp32;
  void* out;  // [experts, columns]
  int64_t out_stride;
};
inline constexpr int kMostSums = 3;
struct SumsParams {
  Sum sums[kMostSums];
  const int32_t* offsets;     // or nullptr: counts
  const int32_t* counts;      // of rows of each expert, `rows` of them at most
  const int32_t* row_tokens;  // or nullptr: every row counts
  const int32_t* pairs;       // where sums are weighted
  const float* weights;
  int32_t rows;
  int32_t adds;
};

// Rows of an output that no expert has.
struct ZerosParams {
  void* out;  // of rows of 16-byte pieces
  int64_t row_pieces;
  int64_t row_stride;  // in pieces
  int64_t expert_stride;
  const int32_t* offsets;
  const int32_t* counts;
  int32_t rows;
  int32_t experts;
};

}  // namespace flashmoe::moe_backward
