// Stages after the products: rows of dx and gradients of the routing's weights from the rows by
// slot, gradients of biases, and rows of zeros. All run at the speed of memory, with every sum in a
// fixed order.
#pragma once

#include "core/ops/moe/problem.h"
#include "cuda/moe/backward/rows.cuh"
#include "cuda/ptx/named_barrier.cuh"

namespace flashmoe::moe_backward {

// ---- dx and dweights: teams of threads take tokens in turn --------------------------------------

template <class Element>
__device__ __forceinline__ void add_piece(float (&sum)[kPiece], const uint16_t* y, bool valid) {
  uint32_t words[kPiece / 2];
  ptx::load_streaming_or_zero(words, y, valid);
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const float2 pair = numeric::ElementTraits<Element>::unpack(words[i]);
    sum[2 * i] += pair.x;
    sum[2 * i + 1] += pair.y;
  }
}

// Adds up the pieces of a token's rows, with eight loads in flight.
template <class Element>
__device__ __forceinline__ void combine_piece(const uint16_t* y, int64_t stride, int top_k,
                                              const int* rows, const float* weights,
                                              float (&sum)[kPiece]) {
  constexpr int kBatch = 8;
  for (int k = 0; k < top_k; k += kBatch) {
    uint32_t words[kBatch][kPiece / 2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = k + i < top_k ? rows[k + i] : -1;
      ptx::load_streaming_or_zero(words[i], y + max(row, 0) * stride, row >= 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = weights[min(k + i, top_k - 1)];
#pragma unroll
      for (int j = 0; j < kPiece / 2; ++j) {
        const float2 pair = numeric::ElementTraits<Element>::unpack(words[i][j]);
        sum[2 * j] = fmaf(weight, pair.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(weight, pair.y, sum[2 * j + 1]);
      }
    }
  }
}

template <class Element>
__device__ __forceinline__ void write_piece(void* rows, int64_t at, bool is_fp32, bool adds,
                                            float (&sum)[kPiece]) {
  if (is_fp32) {
    float* const to = static_cast<float*>(rows) + at;
    float4 halves[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* const place = reinterpret_cast<float4*>(to) + half;
      halves[half] =
          make_float4(sum[4 * half], sum[4 * half + 1], sum[4 * half + 2], sum[4 * half + 3]);
      if (adds) {
        const float4 held = *place;
        halves[half].x += held.x;
        halves[half].y += held.y;
        halves[half].z += held.z;
        halves[half].w += held.w;
      }
      *place = halves[half];
    }
    return;
  }
  uint16_t* const to = static_cast<uint16_t*>(rows) + at;
  if (adds) {
    float held[kPiece];
    load_own_piece<Element>(held, to);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) sum[j] += held[j];
  }
  store_piece<Element>(to, sum);
}

// <y, x> of a row of y, by a warp; continues the sums of earlier chunks.
template <class Element>
__device__ __forceinline__ float dot_with_x(const CombineParams& p, int row, int64_t token) {
  float total = p.adds_dots != 0 ? p.dots[row] : 0.0f;
  for (int block = 0; block < p.hidden; block += kThreadsPerWarp * kPiece) {
    const int i = block + lane_index() * kPiece;
    const bool valid = i < p.hidden;
    float y[kPiece] = {};
    uint32_t words[kPiece / 2];
    float x[kPiece];
    const int64_t at = int64_t{row} * p.hidden + i;
    add_piece<Element>(y, p.y[0] + (valid ? at : 0), valid);
    if (p.y[1] != nullptr) add_piece<Element>(y, p.y[1] + (valid ? at : 0), valid);
    ptx::load_streaming_or_zero(words, p.x + (valid ? token * p.x_stride + i : 0), valid);
    unpack_piece<Element>(x, words);
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) dot = fmaf(y[j], x[j], dot);
    total += sum_of_lanes(dot);
  }
  return total;
}

// The gradients of the routing's weights from their parts, slot by slot: parts of neighbouring
// slots are neighbours in memory, those of a token's slots are not. Slots that do not count have no
// pair.
__device__ __forceinline__ void add_parts(const CombineParams& p) {
  constexpr int kBatch = 8;  // loads in flight
  const int64_t stride = int64_t{gridDim.x} * thread_count();
  for (int64_t slot = int64_t{blockIdx.x} * thread_count() + thread_index(); slot < p.routing.rows;
       slot += stride) {
    if (p.row_tokens[slot] < 0) continue;
    float* const to = p.dweights + p.routing.pairs[slot];
    float sum = 0.0f;
#pragma unroll kBatch
    for (int part = 0; part < p.dot_parts; ++part) {
      sum += p.dots[int64_t{part} * p.routing.rows + slot];
    }
    *to = p.adds != 0 ? *to + sum : sum;
  }
}

// A thread's look-ups for a pair of a token, in two steps. A team begins each step ahead, for later
// tokens, so that no token waits for both.
class PairsRow {
 public:
  __device__ __forceinline__ PairsRow(const CombineParams& params, int tokens, int pair)
      : p_(params), tokens_(tokens), mine_(pair) {}

  // Loads the slot of this thread's pair of a token.
  __device__ __forceinline__ void begin(int64_t token) {
    slot_ = -1;
    if (token < tokens_) slot_ = p_.routing.slots[token * p_.routing.top_k + mine_];
  }
  // Loads the token and pair of the slot of the token that was begun.
  __device__ __forceinline__ void go_on(int64_t token) {
    row_ = slot_ >= 0 && slot_ < p_.routing.rows ? slot_ : -1;
    if (row_ < 0 || token >= tokens_) return;
    token_ = p_.row_tokens[row_];
    pair_ = p_.routing.pairs[row_];
    if (p_.weight_on_input != 0) {
      weight_ = p_.routing.weights[token * p_.routing.top_k + mine_];
    }
  }
  // Returns the row, or -1, and its factor.
  __device__ __forceinline__ void end(int64_t token, int* row, float* weight) const {
    const bool counts = row_ >= 0 && token_ == token && pair_ == token * p_.routing.top_k + mine_;
    *row = counts ? row_ : -1;
    *weight = !counts ? 0.0f : p_.weight_on_input != 0 ? weight_ : 1.0f;
  }

 private:
  const CombineParams& p_;
  const int tokens_;
  const int mine_;
  int slot_ = -1;
  int row_ = -1;
  int token_ = -1;
  int pair_ = -1;
  float weight_ = 0.0f;
};

// dx of a token whose rows are known, by thread `thread` of its team.
template <class Element>
__device__ __forceinline__ void add_rows(const CombineParams& params, int64_t token, int thread,
                                         const int* rows, const float* weights) {
  if (params.dx == nullptr) return;
  for (int column = thread * kPiece; column < params.hidden;
       column += params.team_threads * kPiece) {
    float sum[kPiece] = {};
    for (const uint16_t* y : params.y) {
      if (y == nullptr) continue;
      combine_piece<Element>(y + column, params.hidden, params.routing.top_k, rows, weights, sum);
    }
    write_piece<Element>(params.dx, token * params.dx_stride + column, params.dx_is_fp32 != 0,
                         params.adds != 0, sum);
  }
}

// Handles a token whose rows are known, by thread `thread` of its team.
template <class Element>
__device__ __forceinline__ void combine_token(const CombineParams& params, int64_t token,
                                              int thread, const int* rows, const float* weights) {
  const int top_k = params.routing.top_k;
  add_rows<Element>(params, token, thread, rows, weights);
  if (params.dweights == nullptr && (params.weight_on_input == 0 || params.dots == nullptr)) return;
  if (params.weight_on_input == 0) {
    // add_parts has no slot for these pairs.
    const bool is_empty = thread < top_k && rows[thread] < 0;
    if (is_empty && params.adds == 0) params.dweights[token * top_k + thread] = 0.0f;
    return;
  }
  const int warps = params.team_threads / kThreadsPerWarp;
  for (int k = thread / kThreadsPerWarp; k < top_k; k += warps) {
    const int row = rows[k];
    const float gradient = row >= 0 ? dot_with_x<Element>(params, row, token) : 0.0f;
    const bool is_part = params.dweights == nullptr;
    if (lane_index() != 0 || (is_part && row < 0)) continue;
    float* const to = is_part ? params.dots + row : params.dweights + token * top_k + k;
    *to = !is_part && params.adds != 0 ? *to + gradient : gradient;
  }
}

template <class Element>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams params) {
  __shared__ int rows[kMostTeams][2][kMaxTopK];
  __shared__ float weights[kMostTeams][2][kMaxTopK];
  begin_kernel();
  const int tokens = params.routing.rows / params.routing.top_k;
  const int teams = thread_count() / params.team_threads;
  const int team = __shfl_sync(kFullWarp, thread_index() / params.team_threads, 0);
  const int thread = thread_index() - team * params.team_threads;
  const int64_t stride = int64_t{gridDim.x} * teams;
  const bool looks = thread < params.routing.top_k;
  int64_t token = int64_t{blockIdx.x} * teams + team;
  PairsRow next(params, tokens, thread);
  if (looks) {
    next.begin(token);
    next.go_on(token);
    next.begin(token + stride);
  }
  if (params.weight_on_input == 0 && params.dweights != nullptr) add_parts(params);
  for (int place = 0; token < tokens; token += stride, place ^= 1) {
    if (looks) {
      next.end(token, &rows[team][place][thread], &weights[team][place][thread]);
      next.go_on(token + stride);
      next.begin(token + 2 * stride);
    }
    // All threads have read the previous token's data in the other place.
    if (params.team_threads == kThreadsPerWarp) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(1 + team, params.team_threads);
    }
    combine_token<Element>(params, token, thread, rows[team][place], weights[team][place]);
  }
}

// ---- biases: a block for 256 columns of an expert -----------------------------------------------

template <class Element>
__global__ void __launch_bounds__(kSumWarps* kThreadsPerWarp)
    sums_kernel(const __grid_constant__ SumsParams params) {
  static_assert(kSumColumns == kThreadsPerWarp * kPiece &&
                kSumColumns == kSumWarps * kThreadsPerWarp);
  __shared__ float sums[kSumWarps][kSumColumns];
  begin_kernel();
  const Sum& job = params.sums[blockIdx.z];
  const auto expert = static_cast<int>(blockIdx.y);
  const int first_column = static_cast<int>(blockIdx.x) * kSumColumns;
  if (first_column >= job.columns) return;
  int first = 0;
  int count;
  if (params.counts != nullptr) {
    count = min(max(params.counts[expert], 0), params.rows);
  } else {
    first = min(max(params.offsets[expert], 0), params.rows);
    count = max(min(params.offsets[expert + 1], params.rows), first) - first;
  }
  const int column = first_column + lane_index() * kPiece;
  const uint16_t* const rows = job.rows + expert * job.expert_stride + column;
  float sum[kPiece] = {};
  constexpr int kBatch = 4;
  for (int r = warp_index(); r < count; r += kSumWarps * kBatch) {
    uint32_t words[kBatch][kPiece / 2];
    float weights[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = first + r + i * kSumWarps;
      bool valid = r + i * kSumWarps < count;
      int64_t row = slot;
      weights[i] = 1.0f;
      if (valid && params.row_tokens != nullptr) {
        const int token = params.row_tokens[slot];
        valid = token >= 0;
        if (job.by_token != 0) row = token;
        if (valid && job.weighted != 0) weights[i] = params.weights[params.pairs[slot]];
      }
      valid = valid && column < job.columns;
      ptx::load_streaming_or_zero(words[i], rows + (valid ? row : 0) * job.stride, valid);
      if (!valid) weights[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPiece / 2; ++j) {
        const float2 pair = numeric::ElementTraits<Element>::unpack(words[i][j]);
        sum[2 * j] = fmaf(weights[i], pair.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(weights[i], pair.y, sum[2 * j + 1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j) sums[warp_index()][lane_index() * kPiece + j] = sum[j];
  __syncthreads();
  const int mine = first_column + thread_index();
  if (mine >= job.columns) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) total += sums[w][thread_index()];
  const int64_t at = expert * job.out_stride + mine;
  if (job.is_fp32 != 0) {
    float* const to = static_cast<float*>(job.out) + at;
    *to = params.adds != 0 ? *to + total : total;
  } else {
    uint16_t* const to = static_cast<uint16_t*>(job.out) + at;
    if (params.adds != 0) total += numeric::ElementTraits<Element>::to_float(*to);
    *to = static_cast<uint16_t>(numeric::ElementTraits<Element>::pack(total, 0.0f));
  }
}

// ---- rows that no expert has --------------------------------------------------------------------

__global__ void __launch_bounds__(kZeroWarps* kThreadsPerWarp)
    zeros_kernel(const __grid_constant__ ZerosParams params) {
  begin_kernel();
  const int64_t rows = int64_t{params.rows} * (params.counts != nullptr ? params.experts : 1);
  for (int64_t i = int64_t{blockIdx.x} * kZeroWarps + warp_index(); i < rows;
       i += int64_t{gridDim.x} * kZeroWarps) {
    const int64_t expert = params.counts != nullptr ? i / params.rows : 0;
    const int64_t row = i - expert * params.rows;
    const bool is_taken = params.counts != nullptr
                              ? row < params.counts[expert]
                              : row >= params.offsets[0] && row < params.offsets[params.experts];
    if (is_taken) continue;
    uint4* const to =
        static_cast<uint4*>(params.out) + expert * params.expert_stride + row * params.row_stride;
    for (int64_t j = lane_index(); j < params.row_pieces; j += kThreadsPerWarp) {
      to[j] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace flashmoe::moe_backward
