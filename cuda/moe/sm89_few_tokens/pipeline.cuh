// How weights and tokens stream through a warp.
//
// A warp computes products of 16 weight rows by 8 tokens, m16n8k16, with weights as the A operand.
// A sum may take its index in any order if both operands agree. So a lane (g = lane / 4, t = lane %
// 4) takes elements [8t, 8t + 8) of every 32 of row g, row g + 8 and token g: 16 bytes, whose first
// half are its fragments of one k16 step and whose second half those of the next.
//
// cp.async copies them to the warp's own shared memory, in the order of fragments. Warps need not
// synchronise, and lanes read without bank conflicts.
#pragma once

#include "cuda/moe/sm89_few_tokens/experts.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::moe::sm89_few_tokens {

// kTiles times 16 weight rows of an expert, with some of its tokens.
struct Unit {
  int expert;
  int slot;   // first one
  int count;  // number of slots
  int row;    // first one, in each half
};

template <class Traits>
using Sums = float[Traits::kTiles][Traits::kTokenBlocks][4];

// Hides the origin of a number from the compiler.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// How many of this lane's newest groups of copies may be pending when a stage is read: one less
// than there are stages, 5, 3, 2, 1 or 0. The two branches of a step are hidden from the compiler,
// which would turn them into a single jump through a table.
struct Depth {
  int deep;  // 4 stages or more
  int more;  // 6, or 3
  int two;

  static __device__ __forceinline__ Depth of(int stages) {
    return {opaque(stages >= 4), opaque(stages >= 6 || stages == 3), opaque(stages == 2)};
  }

  __device__ __forceinline__ void wait() const {
    if (deep) {
      if (more) {
        ptx::cp_async_wait<5>();
      } else {
        ptx::cp_async_wait<3>();
      }
    } else if (more) {
      ptx::cp_async_wait<2>();
    } else if (two) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
  }
};

__device__ __forceinline__ void load_shared(uint32_t (&chunk)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk[0]), "=r"(chunk[1]), "=r"(chunk[2]), "=r"(chunk[3])
               : "r"(address)
               : "memory");
}

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

// A stage of a warp: [weight pieces][lanes], then [chunks][tokens] of 64 bytes each, 16 per lane.
template <class Traits>
struct Stage {
  int entry_tokens;

  __device__ __forceinline__ int bytes() const { return Traits::stage_bytes(entry_tokens); }
  // Relative to this lane's first piece.
  static __device__ __forceinline__ int weight(int m, int h, int c) {
    return ((2 * m + h) * Traits::kChunks + c) * kPieceBytes;
  }
  __device__ __forceinline__ int token(int n, int c) const {
    return Traits::kWeightPieces * kPieceBytes + c * entry_tokens * 64 + n * kPieceBytes;
  }

  // The destination of this lane's part of a load, relative to that of lane 0, for weights and for
  // tokens.
  static __device__ __forceinline__ int weight_slot() {
    const int lane = lane_index() % (4 * Traits::kChunks);
    return (lane / 4) * kPieceBytes + lane_index() / (4 * Traits::kChunks) * 64 + lane % 4 * 16;
  }
  __device__ __forceinline__ int token_slot() const {
    const int lane = lane_index() % (4 * Traits::kChunks);
    return Traits::kWeightPieces * kPieceBytes + (lane / 4) * entry_tokens * 64 +
           lane_index() / (4 * Traits::kChunks) * 64 + lane % 4 * 16;
  }
};

// The position of a warp's loads. Job defines the units and the addresses of their tokens. For a
// load the lanes cover consecutive parts of a row, so that a load reads whole lines: lane l has
// columns from 8 (l % 8) on of row l / 8, four rows per load.
template <class Traits, class Job>
struct Walk {
  static constexpr int kRowLanes = Traits::kStepColumns / 8;
  static constexpr int kLoadRows = kThreadsPerWarp / kRowLanes;
  static constexpr int kRowLoads = 8 / kLoadRows;  // loads of 8 rows

  const Weights& weights;
  const Job& job;
  typename Job::Position position;
  const uint16_t* weight[2];                                // this lane's first row of a half
  const uint16_t* token[Traits::kTokenBlocks * kRowLoads];  // this lane's rows
  int64_t load_rows[2];  // elements from the rows of one load of a half to those of the next
  int64_t tile_rows[2];  // from those of one tile to the next
  uint32_t rows;         // bit 2 * tile + half: these rows exist
  uint32_t tokens;       // one bit per entry of `token`
  int columns;           // left in the step, from this lane's first column on

  __device__ __forceinline__ Walk(const Weights& w, const Job& j) : weights(w), job(j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_rows[h] = kLoadRows * w.row_stride[h];
      tile_rows[h] = w.tile_rows * w.row_stride[h];
    }
    position = job.first();
    if (!position.done()) enter();
  }

  static __device__ __forceinline__ int row() { return lane_index() / kRowLanes; }

  __device__ __forceinline__ void enter() {
    const Unit unit = job.unit(position);
    const int column = position.step * Traits::kStepColumns + 8 * (lane_index() % kRowLanes);
    columns = weights.columns - column;
    rows = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[h] = weights.half[h] + unit.expert * weights.expert_stride[h] +
                  (unit.row + row()) * weights.row_stride[h] + column;
#pragma unroll
      for (int m = 0; m < Traits::kTiles; ++m) {
        if (unit.row + m * weights.tile_rows + h * weights.half_rows < weights.rows) {
          rows |= 1u << (2 * m + h);
        }
      }
    }
    tokens = 0;
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks * kRowLoads; ++n) {
      token[n] = nullptr;
      if (kLoadRows * n + row() < unit.count) {
        token[n] = job.token(unit.slot + kLoadRows * n + row());
        if (token[n] != nullptr) {
          tokens |= 1u << n;
          token[n] += column;
        }
      }
    }
  }

  __device__ __forceinline__ void load_weights(uint32_t stage) const {
    const bool inside = 0 < columns;
#pragma unroll
    for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool valid = inside && (rows >> (2 * m + h) & 1) != 0;
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          ptx::cp_async_16_or_zero(stage + Stage<Traits>::weight(m, h, 0) + i * kLoadRows * 64,
                                   weight[h] + m * tile_rows[h] + i * load_rows[h], valid);
        }
      }
    }
  }

  // Missing tokens are not written: nobody reads those columns of the products. Zeros are needed
  // only after the last column, where a NaN would survive the weights' zeros.
  __device__ __forceinline__ void load_tokens(uint32_t stage) const {
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks * kRowLoads; ++n) {
      if ((tokens >> n & 1) == 0) continue;
      ptx::cp_async_cached_16_or_zero(stage + n * kLoadRows * 64, token[n], 0 < columns);
    }
  }

  __device__ __forceinline__ void advance() {
    if (job.advance(position)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) weight[h] += Traits::kStepColumns;
#pragma unroll
      for (int n = 0; n < Traits::kTokenBlocks * kRowLoads; ++n) token[n] += Traits::kStepColumns;
      columns -= Traits::kStepColumns;
    } else if (!position.done()) {
      enter();
    }
  }
};

// A warp's pipeline, with several steps of its walk in flight.
template <class Traits, class Job>
struct Pipeline {
  Walk<Traits, Job> walk;
  Stage<Traits> stage;
  uint32_t base;  // of the warp's stages
  uint32_t end;
  uint32_t at;
  Depth depth;
  uint32_t places;  // bit n: a stage has room for this lane's token of block n

  __device__ __forceinline__ Pipeline(const Weights& weights, const Schedule& schedule,
                                      const Job& job, uint32_t shared)
      : walk(weights, job), stage{schedule.entry_tokens}, depth(Depth::of(schedule.stages)) {
    const uint32_t bytes = static_cast<uint32_t>(schedule.stages * stage.bytes());
    at = base = shared + static_cast<uint32_t>(warp_index()) * bytes;
    end = base + bytes;
    places = 0;
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
      if (8 * n + lane_index() / 4 < stage.entry_tokens) places |= 1u << n;
    }
  }

  // Loads the first steps.
  __device__ __forceinline__ void begin() {
    for (uint32_t to = base; to != end; to += stage.bytes()) load(to);
  }
  // The same in two parts, weights first.
  __device__ __forceinline__ void begin_weights() {
    for (uint32_t to = base; to != end; to += stage.bytes()) {
      if (walk.position.done()) break;
      walk.load_weights(to + stage.weight_slot());
      walk.advance();
    }
  }
  // `again` is the walk as it was before begin_weights.
  __device__ __forceinline__ void begin_tokens(Walk<Traits, Job>& again) {
    for (uint32_t to = base; to != end; to += stage.bytes()) {
      if (!again.position.done()) {
        again.load_tokens(to + stage.token_slot());
        again.advance();
      }
      ptx::cp_async_commit();
    }
  }

  __device__ __forceinline__ void load(uint32_t to) {
    if (!walk.position.done()) {
      walk.load_weights(to + stage.weight_slot());
      walk.load_tokens(to + stage.token_slot());
      walk.advance();
    }
    ptx::cp_async_commit();
  }

  // Adds one step's products to `sums`, and loads the step that comes `stages` later.
  __device__ __forceinline__ void step(Sums<Traits>& sums, int token_blocks) {
    depth.wait();
    __syncwarp();
    const uint32_t from = at + lane_index() * 16;
    // Uses two sums at a time: each product waits for the previous one in its sum.
    Sums<Traits> more;
    clear<Traits>(more);
#pragma unroll
    for (int c = 0; c < Traits::kChunks; ++c) {
      uint32_t a[Traits::kTiles][2][4];
#pragma unroll
      for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) load_shared(a[m][h], from + Stage<Traits>::weight(m, h, c));
      }
#pragma unroll
      for (int n = 0; n < Traits::kTokenBlocks; ++n) {
        if (n > 0 && n >= token_blocks) break;
        uint32_t b[4] = {0, 0, 0, 0};
        if (places >> n & 1) load_shared(b, from + stage.token(n, c));
#pragma unroll
        for (int m = 0; m < Traits::kTiles; ++m) {
          float (&sum)[4] =
              Traits::kTiles * Traits::kTokenBlocks == 1 && c % 2 == 1 ? more[m][n] : sums[m][n];
#pragma unroll
          for (int k = 0; k < 4; k += 2) {
            const uint32_t fragment[4] = {a[m][0][k], a[m][1][k], a[m][0][k + 1], a[m][1][k + 1]};
            ptx::mma_m16n8k16<typename Traits::Element>(sum, fragment, b[k], b[k + 1]);
          }
        }
      }
    }
    if (Traits::kTiles * Traits::kTokenBlocks == 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[0][0][e] += more[0][0][e];
    }
    __syncwarp();
    load(at);
    at += stage.bytes();
    if (at == end) at = base;
  }
};

}  // namespace flashmoe::moe::sm89_few_tokens
