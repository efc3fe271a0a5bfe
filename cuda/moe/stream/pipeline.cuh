// How weights and tokens stream through a warp.
//
// A warp computes products of 16 weight rows by 8 tokens, m16n8k16, with weights as its A operand. A
// sum may take its index in any order if both operands agree, so a lane (g = lane / 4, t = lane % 4)
// takes elements [8t, 8t + 8) of every 32 of row g, row g + 8 and token g: 16 bytes, of which the
// first half are its fragments of one k16 step and the second half those of the next.
//
// They come by cp.async into shared memory that is the lane's own, as if into more registers: each
// lane waits for its own copies alone and reads back what it asked for, so that warps meet nowhere
// and no access conflicts with another's.
#pragma once

#include "cuda/moe/stream/experts.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::moe::stream {

// 16 weight rows of an expert times kTiles, with some of its tokens.
struct Unit {
  int expert;
  int slot;   // first
  int count;  // of slots
  int row;    // first, of each half
  int step;   // of its columns
};

template <class Traits>
using Sums = float[Traits::kTiles][Traits::kTokenBlocks][4];

// Waits until at most pending of this lane's newest groups of copies are under way.
__device__ __forceinline__ void wait_for_stage(int pending) {
  switch (pending) {
    case 1: ptx::cp_async_wait<1>(); break;
    case 2: ptx::cp_async_wait<2>(); break;
    case 3: ptx::cp_async_wait<3>(); break;
    case 4: ptx::cp_async_wait<4>(); break;
    case 5: ptx::cp_async_wait<5>(); break;
    case 6: ptx::cp_async_wait<6>(); break;
    case 7: ptx::cp_async_wait<7>(); break;
    case 8: ptx::cp_async_wait<8>(); break;
    case 9: ptx::cp_async_wait<9>(); break;
    case 10: ptx::cp_async_wait<10>(); break;
    case 11: ptx::cp_async_wait<11>(); break;
    default: ptx::cp_async_wait<0>(); break;
  }
}

__device__ __forceinline__ void load_shared(uint32_t (&chunk)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk[0]), "=r"(chunk[1]), "=r"(chunk[2]), "=r"(chunk[3])
               : "r"(address)
               : "memory");
}

// A stage of a warp: [weight pieces][lanes], then [chunks][tokens] of 64 bytes each, 16 a lane.
template <class Traits>
struct Stage {
  int entry_tokens;

  __device__ __forceinline__ int bytes() const { return Traits::stage_bytes(entry_tokens); }
  // From this lane's first piece on.
  static __device__ __forceinline__ int weight(int m, int h, int c) {
    return ((2 * m + h) * Traits::kChunks + c) * kPieceBytes;
  }
  __device__ __forceinline__ int token(int n, int c) const {
    return Traits::kWeightPieces * kPieceBytes + c * entry_tokens * 64 + n * kPieceBytes;
  }
};

// Where a warp's loads are. Job says which units there are and where their tokens lie.
template <class Traits, class Job>
struct Walk {
  const Weights& weights;
  const Job& job;
  typename Job::Position position;
  const uint16_t* weight[2];                    // this lane's row and columns of the step
  const uint16_t* token[Traits::kTokenBlocks];  // same
  uint32_t rows;                                // bit 2 * tile + half: there are such rows
  uint32_t tokens;                              // bit block: this lane's token is there
  int columns;  // left, from this lane's of the step on

  __device__ __forceinline__ Walk(const Weights& w, const Job& j) : weights(w), job(j) {
    position = job.first();
    if (!position.done()) enter();
  }

  __device__ __forceinline__ void enter() {
    const Unit unit = job.unit(position);
    const int g = lane_index() / 4;
    const int column = position.step * Traits::kStepColumns + 8 * (lane_index() % 4);
    columns = weights.columns - column;
    rows = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[h] = weights.half[h] + unit.expert * weights.expert_stride[h] +
                  (unit.row + g) * weights.row_stride[h] + column;
#pragma unroll
      for (int m = 0; m < Traits::kTiles; ++m) {
        if (unit.row + m * weights.tile_rows + h * weights.half_rows < weights.rows) {
          rows |= 1u << (2 * m + h);
        }
      }
    }
    tokens = 0;
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
      token[n] = nullptr;
      if (8 * n + g < unit.count) {
        token[n] = job.token(unit.slot + 8 * n + g);
        if (token[n] != nullptr) {
          tokens |= 1u << n;
          token[n] += column;
        }
      }
    }
  }

  __device__ __forceinline__ void load_weights(uint32_t stage) const {
#pragma unroll
    for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16_t* row = weight[h] + m * weights.tile_rows * weights.row_stride[h];
#pragma unroll
        for (int c = 0; c < Traits::kChunks; ++c) {
          ptx::cp_async_16_or_zero(stage + Stage<Traits>::weight(m, h, c), row + 32 * c,
                                   (rows >> (2 * m + h) & 1) != 0 && 32 * c < columns);
        }
      }
    }
  }

  // What is not there is left as it is: columns of products that nobody reads. Zeros are wanted only
  // behind the last column, where the weights' zeros do not make up for any NaN.
  __device__ __forceinline__ void load_tokens(uint32_t at, const Stage<Traits>& stage) const {
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
      if ((tokens >> n & 1) == 0) continue;
#pragma unroll
      for (int c = 0; c < Traits::kChunks; ++c) {
        ptx::cp_async_cached_16_or_zero(at + stage.token(n, c), token[n] + 32 * c,
                                        32 * c < columns);
      }
    }
  }

  __device__ __forceinline__ void advance() {
    const bool same = job.advance(position);
    if (same) {
#pragma unroll
      for (int h = 0; h < 2; ++h) weight[h] += Traits::kStepColumns;
#pragma unroll
      for (int n = 0; n < Traits::kTokenBlocks; ++n) token[n] += Traits::kStepColumns;
      columns -= Traits::kStepColumns;
    } else if (!position.done()) {
      enter();
    }
  }
};

// A warp's pipeline: some steps of its walk are under way.
template <class Traits, class Job>
struct Pipeline {
  Walk<Traits, Job> walk;
  Stage<Traits> stage;
  uint32_t base;
  uint32_t end;
  uint32_t at;
  int stages;

  // The weights of the first steps.
  __device__ __forceinline__ Pipeline(const Weights& weights, const Schedule& schedule,
                                      const Job& job, uint32_t shared)
      : walk(weights, job), stage{schedule.entry_tokens}, stages(schedule.stages) {
    const uint32_t depth = static_cast<uint32_t>(stages * stage.bytes());
    at = base = shared + static_cast<uint32_t>(warp_index()) * depth +
                static_cast<uint32_t>(lane_index()) * 16;
    end = base + depth;
    for (uint32_t to = base; to != end; to += stage.bytes()) {
      if (walk.position.done()) break;
      walk.load_weights(to);
      walk.advance();
    }
  }

  // Their tokens.
  __device__ __forceinline__ void begin() {
    Walk<Traits, Job> again(walk.weights, walk.job);
    for (uint32_t to = base; to != end; to += stage.bytes()) {
      if (!again.position.done()) {
        again.load_tokens(to, stage);
        again.advance();
      }
      ptx::cp_async_commit();
    }
  }

  // Adds one step's products to `sums`, and loads the step that comes `stages` later.
  __device__ __forceinline__ void step(Sums<Traits>& sums, int token_blocks) {
    wait_for_stage(stages - 1);
#pragma unroll
    for (int c = 0; c < Traits::kChunks; ++c) {
      uint32_t a[Traits::kTiles][2][4];
#pragma unroll
      for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) load_shared(a[m][h], at + Stage<Traits>::weight(m, h, c));
      }
#pragma unroll
      for (int n = 0; n < Traits::kTokenBlocks; ++n) {
        if (n >= token_blocks) break;
        uint32_t b[4] = {0, 0, 0, 0};
        if (8 * n + lane_index() / 4 < stage.entry_tokens) load_shared(b, at + stage.token(n, c));
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
#pragma unroll
          for (int m = 0; m < Traits::kTiles; ++m) {
            const uint32_t fragment[4] = {a[m][0][k], a[m][1][k], a[m][0][k + 1], a[m][1][k + 1]};
            ptx::mma_m16n8k16<typename Traits::Element>(sums[m][n], fragment, b[k], b[k + 1]);
          }
        }
      }
    }
    if (!walk.position.done()) {
      walk.load_weights(at);
      walk.load_tokens(at, stage);
      walk.advance();
    }
    ptx::cp_async_commit();
    at += stage.bytes();
    if (at == end) at = base;
  }
};

template <class Traits>
__device__ __forceinline__ void clear(Sums<Traits>& sums) {
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.0f;
    }
  }
}

template <class Element>
__device__ __forceinline__ float load_bias(const Bias& bias, int expert, int row) {
  const int64_t at = expert * bias.expert_stride + static_cast<int64_t>(row) * bias.row_stride;
  if (bias.is_fp32) return static_cast<const float*>(bias.data)[at];
  return numeric::ElementTraits<Element>::to_float(static_cast<const uint16_t*>(bias.data)[at]);
}

}  // namespace flashmoe::moe::stream
