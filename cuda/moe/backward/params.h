// Arguments of the stages of a layer's gradients that work row by row, as the device sees them.
// Strides are in elements. A slot counts if `pairs` and `slots` agree on it and an expert has it.
#pragma once

#include <cstdint>

#include "cuda/moe/backward/queue.h"
#include "cuda/tile/bias.h"

namespace flashmoe::moe_backward {

inline constexpr int kPiece = 8;      // elements per 16 bytes
inline constexpr int kRowWarps = 4;   // per block of `rows`; each has a run of slots
inline constexpr int kSlotWarps = 8;  // per block of `slots`; each lane has a slot
inline constexpr int kSumWarps = 8;   // per block of `sums`; each takes rows in turn
inline constexpr int kSumColumns = 256;
inline constexpr int kZeroWarps = 4;      // per block of `zeros`; each has a row
inline constexpr int kTeamThreads = 256;  // upper bound, per token of `combine`
inline constexpr int kCombineThreads = 1024;
inline constexpr int kMostTeams = 32;     // per block
inline constexpr int kMostBarriers = 15;  // of its teams with several warps: one named barrier each

struct Routing {
  const float* weights;    // [tokens, top_k]
  const int32_t* offsets;  // [experts + 1]
  const int32_t* pairs;    // [rows]
  const int32_t* slots;    // [tokens, top_k]
  int32_t rows;            // tokens * top_k
  int32_t experts;
  int32_t top_k;
};

// Rows of gradients of g and u, in the order of w_gate_up's rows.
struct DzRows {
  uint16_t* data;  // or nullptr
  int64_t stride;
  int32_t places[2];  // first column of g and of u in a row; without a gate, u's is the second
  int32_t step;       // 2: they alternate, g first
};

// Gradients from da, the gradient of a row of the activation's output, and the activation's input.
// Rows of slots that an expert has but that do not count become zeros. Sums over columns are
// computed by blocks of 256, in order: a chunk of columns adds to the sums of earlier chunks.
struct RowsParams {
  Routing routing;
  int32_t* row_tokens;             // [rows]: token of a slot, or -1; output
  int32_t rows_of_warp;            // slots per warp, at most 32
  Queue queue;                     // output of a separate block, the last one; or absent
  float* dots;                     // [rows] <da, a>, and <dout, down_bias>; output, or nullptr
  uint16_t* da;                    // [rows, inner]; with `wants_a`, replaced by a times the weight
  const uint16_t* pre_activation;  // [rows, g and u]; nullptr: only row_tokens is computed
  int64_t pre_activation_stride;
  int32_t pre_activation_up;  // from the first g to the first u
  int32_t adds_dots;
  DzRows dz;             // output
  DzRows scaled_dz;      // the same, times the weight
  const uint16_t* dout;  // [tokens, hidden]
  int64_t dout_stride;
  Bias down_bias;
  float da_scale;  // factor of the stored da
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

// Results of looking up slots in the routing.
struct SlotsParams {
  Routing routing;
  int32_t* row_tokens;  // [rows]: token of a slot, or -1; output
  float* row_weights;   // [rows]: weight of its pair, or 0; output
  Queue queue;          // output of a separate block, the last one; or absent
};

// dx[t] = sum over k of y[slots[t, k]], and dweights. `hidden` counts the columns of a chunk.
struct CombineParams {
  Routing routing;
  const int32_t* row_tokens;
  const uint16_t* y[2];  // [rows, hidden], added up; the second may be nullptr
  // The weights' gradients in dot_parts parts, [dot_parts, rows]. With weight_on_input they are <y,
  // x>, and this has the sums of the chunks so far; nullptr if there is one chunk.
  float* dots;
  int32_t dot_parts;
  int32_t adds_dots;  // after the first chunk
  const uint16_t* x;  // [tokens, hidden]
  int64_t x_stride;
  void* dx;  // [tokens, hidden] or nullptr
  int64_t dx_stride;
  float* dweights;  // [tokens, top_k] or nullptr; set for the last chunk
  int32_t dx_is_fp32;
  int32_t hidden;
  int32_t weight_on_input;
  int32_t adds;
  int32_t team_threads;  // threads per token: whole warps
};

// Sums over an expert's rows.
struct Sum {
  const uint16_t* rows;
  int64_t stride;
  int64_t expert_stride;  // if counts are given
  int32_t by_token;       // its rows are tokens, otherwise slots
  int32_t weighted;
  int32_t columns;
  int32_t is_fp32;
  void* out;  // [experts, columns]
  int64_t out_stride;
};
inline constexpr int kMostSums = 3;
struct SumsParams {
  Sum sums[kMostSums];
  const int32_t* offsets;     // nullptr: counts are given
  const int32_t* counts;      // rows of each expert, at most `rows`
  const int32_t* row_tokens;  // nullptr: every row counts
  const int32_t* pairs;       // for weighted sums
  const float* weights;
  int32_t rows;
  int32_t adds;
};

// Zeros rows of an output that no expert has.
struct ZerosParams {
  void* out;  // rows of 16-byte pieces
  int64_t row_pieces;
  int64_t row_stride;  // in pieces
  int64_t expert_stride;
  const int32_t* offsets;
  const int32_t* counts;
  int32_t rows;
  int32_t experts;
};

}  // namespace flashmoe::moe_backward
