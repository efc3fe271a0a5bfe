// Attention forward on sm_90, warp-specialised and persistent.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// A block is one producer warpgroup, of which one thread issues the loads, and two or three consumer
// warpgroups of 64 query rows each. Blocks walk tiles of one head, kTileQ rows at a time, keys from
// the last to the first: masks are all in the first steps. In a step a consumer issues Q K^T of this
// step and P V of the one before, and does the softmax of this step while P V runs; consumers take
// turns in issuing, so that one's softmax also runs under the other's products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/row_alone.cuh"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::sm90 {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
// A row's offset is raised when a score exceeds it by more than this power of two. Until then
// probabilities reach at most 2^8 instead of 1, which neither fp16 nor bf16 nor the fp32 sums mind,
// and the accumulators are left alone.
inline constexpr float kLazyBits = 8.0f;
// Below every offset, yet finite: masked scores less it are -inf, not NaN.
inline constexpr float kNoOffset = -1.0e38f;
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr int kOrderBarrier = 1;  // named barriers: one for each consumer
inline constexpr int kStoreBarrier = 5;  // and another

inline constexpr int kNoTile = -1;

// A query tile. The producer works it out and leaves it in shared memory with its Q. Causal tiles come
// longest first, inside sections of heads whose keys and values fit the L2 together.
struct alignas(16) Tile {
  int batch;
  int head;
  int head_kv;
  int first_row;  // kNoTile: there are no more

  template <class Traits>
  static __device__ __forceinline__ Tile at(const Params& params, int position) {
    const int section_tiles = params.heads_per_section * params.tiles_per_head;
    const int section = position / section_tiles;
    const int rank = position % section_tiles;
    const int first_head = section * params.heads_per_section;
    const int heads = min(params.heads_per_section, params.heads - first_head);
    const int tile = rank / heads;
    const int head = first_head + rank % heads;
    Tile result;
    result.batch = head / params.heads_q;
    result.head = head % params.heads_q;
    result.head_kv = result.head / params.heads_per_kv;
    result.first_row = (params.causal ? params.tiles_per_head - 1 - tile : tile) * Traits::kTileQ;
    return result;
  }
};

static_assert(sizeof(Tile) == kTileInfoBytes);

// Read anew where they are used: kept across the main loop they would cost registers.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int lane_index() { return thread_index() % kThreadsPerWarp; }
__device__ __forceinline__ int warp_of_group() { return thread_index() / kThreadsPerWarp % 4; }

// Number of keys that query row `row` sees; negative rows of the ramp see none.
__device__ __forceinline__ int visible_keys(const Params& params, int row) {
  if (!params.causal) return params.seq_k;
  return max(0, min(params.seq_k, row + 1 + params.causal_offset));
}

// Steps that `rows` rows from first_row on need; none where there are no such rows.
template <class Traits>
__device__ __forceinline__ int steps_of(const Params& params, int first_row, int rows) {
  const int last_row = min(first_row + rows, params.seq_q) - 1;
  if (last_row < first_row) return 0;
  return (visible_keys(params, last_row) + Traits::kStepKeys - 1) / Traits::kStepKeys;
}

// Calls visit(tile) for the tiles of this block. Blocks take tiles in rounds, and every other round runs
// backwards: whoever had the longest tile of one has the shortest of the next. With a mask that begins
// anew with each section, whose tiles get shorter and shorter.
template <class Traits, class Visit>
__device__ __forceinline__ void for_each_tile(const Params& params, Visit visit) {
  const int blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x);
  const int tiles = params.tiles_per_head * params.heads;
  const int section = params.causal ? params.tiles_per_head * params.heads_per_section : tiles;
  for (int first = 0; first < tiles; first += section) {
    const int end = min(first + section, tiles);
    // Behind the block that had the last one's end: sections may hold fewer tiles than there are blocks.
    const int turn = (block + blocks - first % blocks) % blocks;
    bool forwards = true;
    for (int round = first; round < end; round += blocks, forwards = !forwards) {
      const int position = round + (forwards ? turn : blocks - 1 - turn);
      if (position < end) visit(Tile::at<Traits>(params, position));
    }
  }
}

// Addresses of the barriers, and which stage and parity a running count of uses means.
template <class Traits>
struct Barriers {
  uint32_t base;

  __device__ __forceinline__ uint32_t k_full(int stage) const { return of(0, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return of(1, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return of(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return of(3, stage); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return of(4, 0) + 8 * stage; }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return of(4, 0) + 8 * (Traits::kQStages + stage);
  }

 private:
  __device__ __forceinline__ uint32_t of(int kind, int stage) const {
    return base + 8 * (kind * Traits::kStages + stage);
  }
};

// A place in a ring of stages.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void step() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Begins to load the keys or values of a step.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_step(const CUtensorMap& map, const Repeats& repeats,
                                          const Tile& tile, int step, uint32_t to, uint32_t full) {
  ptx::mbarrier_arrive_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::tma_load(to + box * Traits::kKVBoxBytes, &map, full, ptx::kEvictLast, box * kBoxColumns,
                  step * Traits::kStepKeys, tile.head_kv * repeats.head,
                  tile.batch * repeats.batch);
  }
}

template <class Traits>
__device__ __forceinline__ void produce(const Params& params, uint32_t shared, Tile* tiles,
                                        const Barriers<Traits>& barriers) {
  Cursor<Traits::kStages> k_cursor;
  Cursor<Traits::kStages> v_cursor;
  Cursor<Traits::kQStages> q_cursor;
  const auto load_k = [&](const Tile& tile, int step) {
    const uint32_t full = barriers.k_full(k_cursor.stage);
    const uint32_t to = shared + Traits::kKOffset + k_cursor.stage * Traits::kKBytes;
    ptx::mbarrier_wait(barriers.k_empty(k_cursor.stage), k_cursor.parity ^ 1);
    load_step<Traits, Traits::kBoxes>(params.k, params.k_repeats, tile, step, to, full);
    k_cursor.step();
  };
  const auto load_v = [&](const Tile& tile, int step) {
    const uint32_t full = barriers.v_full(v_cursor.stage);
    const uint32_t to = shared + Traits::kVOffset + v_cursor.stage * Traits::kVBytes;
    ptx::mbarrier_wait(barriers.v_empty(v_cursor.stage), v_cursor.parity ^ 1);
    load_step<Traits, Traits::kBoxesV>(params.v, params.v_repeats, tile, step, to, full);
    v_cursor.step();
  };
  // In the order of use: V of a step after K of the next, be that another tile's. Only where Q must wait
  // for the output does a tile end with its last V.
  Tile last_tile;
  bool pending = false;  // V of step 0 of last_tile
  uint32_t sent = 0;
  const auto load_pending = [&] {
    if (pending) load_v(last_tile, 0);
    pending = false;
  };
  for_each_tile<Traits>(params, [&](const Tile& tile) {
    const int steps = steps_of<Traits>(params, tile.first_row, Traits::kTileQ);
    const uint32_t full = barriers.q_full(q_cursor.stage);
    if (Traits::kOutputOverQ && steps > 0) load_k(tile, steps - 1);
    ptx::mbarrier_wait(barriers.q_empty(q_cursor.stage), q_cursor.parity ^ 1);
    tiles[sent++ % kTileSlots] = tile;
    ptx::mbarrier_arrive_expect(full, Traits::kQBytes);
    const uint32_t to = shared + Traits::kQOffset + q_cursor.stage * Traits::kQBytes;
#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::tma_load(to + box * Traits::kQBoxBytes, &params.q, full, ptx::kEvictFirst,
                    box * kBoxColumns, tile.first_row, tile.head * params.q_repeats.head,
                    tile.batch * params.q_repeats.batch);
    }
    q_cursor.step();
    if (!Traits::kOutputOverQ && steps > 0) load_k(tile, steps - 1);
    load_pending();
    for (int step = steps - 1; step > 0; --step) {
      load_k(tile, step - 1);
      load_v(tile, step);
    }
    pending = steps > 0;
    last_tile = tile;
    if (Traits::kOutputOverQ) load_pending();
  });
  load_pending();
  ptx::mbarrier_wait(barriers.q_empty(q_cursor.stage), q_cursor.parity ^ 1);
  tiles[sent % kTileSlots].first_row = kNoTile;
  ptx::mbarrier_arrive(barriers.q_full(q_cursor.stage));
}

// One row of the scores' statistics for each half of a thread's fragment: rows lane / 4 and eight on.
struct RowStatistics {
  float sum[2];     // of this lane's columns
  float offset[2];  // log2

  __device__ __forceinline__ void reset() {
    sum[0] = sum[1] = 0.0f;
    offset[0] = offset[1] = kNoOffset;
  }

  // Raises the offsets that the scores have outgrown. `factor` is what the accumulators of a row are to
  // be multiplied by. A NaN among the scores raises the offset to NaN, and with it the whole row.
  template <int kScores>
  __device__ __forceinline__ void raise(const float (&scores)[kScores], float scale_log2,
                                        float (&factor)[2]) {
    constexpr int kChains = 4;  // of dependent maxima
    float tops[2][kChains];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const float score = scores[i / 2 * 4 + 2 * half + i % 2];
        float& top = tops[half][i % kChains];
        top = i < kChains ? score : numeric::max_nan(top, score);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = numeric::max_nan(numeric::max_nan(tops[half][0], tops[half][1]),
                                   numeric::max_nan(tops[half][2], tops[half][3]));
      top = numeric::max_nan(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = numeric::max_nan(top, __shfl_xor_sync(kFullWarp, top, 2));
      const bool stays = fmaf(top, scale_log2, -kLazyBits) <= offset[half];
      const float raised = stays ? offset[half] : top * scale_log2;
      factor[half] = numeric::exp2_approx(offset[half] - raised);
      offset[half] = raised;
      sum[half] *= factor[half];
    }
  }

  // Turns scores into probabilities.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float scale_log2) {
    float sums[2][2] = {{sum[0], 0.0f}, {sum[1], 0.0f}};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = (i / 2) % 2;
      scores[i] = numeric::exp2_approx(fmaf(scores[i], scale_log2, -offset[half]));
      sums[half][i % 2] += scores[i];
    }
    sum[0] = sums[0][0] + sums[0][1];
    sum[1] = sums[1][0] + sums[1][1];
  }
};

// The state of a consumer warpgroup.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using ScoreMma = ptx::Wgmma<Element, Traits::kStepKeys>;
  using ValueMma = ptx::Wgmma<Element, Traits::kDimV>;
  static constexpr int kScores = Traits::kStepKeys / 2;
  static constexpr int kOutputs = Traits::kDimV / 2;
  static constexpr int kSlices = Traits::kStepKeys / 16;

  const Params& params;
  Barriers<Traits> barriers;
  uint32_t shared;
  const Tile* tiles;  // [kTileSlots]
  int group;
  uint64_t q_descriptor;
  uint64_t k_descriptor;
  uint64_t v_descriptor;
  Cursor<Traits::kStages> k_cursor;
  Cursor<Traits::kStages> v_cursor;
  Cursor<Traits::kQStages> q_cursor;

  uint32_t tile = 0;  // running count: the tile that steps belong to
  bool open = false;  // the last P V of the tile before it, or of it, is still to be done
  RowStatistics statistics;
  float scores[kScores];
  uint32_t p[kSlices][4];
  float out[kOutputs];
  bool add = false;        // out holds something
  bool nonfinite = false;  // this warp has written an infinity or a NaN

  __device__ __forceinline__ Consumer(const Params& params_, const Barriers<Traits>& barriers_,
                                      uint32_t shared_, const Tile* tiles_, int group_)
      : params(params_), barriers(barriers_), shared(shared_), tiles(tiles_), group(group_) {
    q_descriptor = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + group * kRowsPerGroup * kBoxRowBytes, 16);
    k_descriptor = ptx::swizzled_descriptor(shared + Traits::kKOffset, 16);
    v_descriptor = ptx::swizzled_descriptor(shared + Traits::kVOffset, Traits::kKVBoxBytes);
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (ptx::elect_one()) ptx::mbarrier_arrive(barrier);
  }

  // Issues scores = Q K^T.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t q = ptx::advance(q_descriptor, q_cursor.stage * Traits::kQBytes);
    const uint64_t k = ptx::advance(k_descriptor, k_cursor.stage * Traits::kKBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
      const int box = slice / 4;
      const int within = slice % 4 * 32;
      ScoreMma::multiply(scores, ptx::advance(q, box * Traits::kQBoxBytes + within),
                         ptx::advance(k, box * Traits::kKVBoxBytes + within), slice > 0);
    }
    ptx::wgmma_commit();
  }

  // Issues out += P V, or out = P V.
  __device__ __forceinline__ void issue_values() {
    const uint64_t v = ptx::advance(v_descriptor, v_cursor.stage * Traits::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ValueMma::multiply_values(out, p[slice], ptx::advance(v, slice * 2048), slice > 0 || add);
    }
    ptx::wgmma_commit();
    add = true;
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        p[slice][r] = Numeric::pack(scores[8 * slice + 2 * r], scores[8 * slice + 2 * r + 1]);
      }
    }
  }

  // Hides the keys of a step that a row does not see.
  __device__ __forceinline__ void mask(int group_row, int step) {
    const int lane = lane_index();
    const int first_row = group_row + warp_of_group() * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit =
          visible_keys(params, first_row + 8 * half) - step * Traits::kStepKeys - 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (2 * i + e >= limit) scores[i + 2 * half + e] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void take_turn() const {
    if (Traits::kOrdered) {
      ptx::named_barrier_sync(kOrderBarrier + group, 2 * kThreadsPerGroup);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Traits::kOrdered) {
      const int next = group + 1 == Traits::kConsumers ? 0 : group + 1;
      ptx::named_barrier_arrive(kOrderBarrier + next, 2 * kThreadsPerGroup);
    }
  }

  __device__ __forceinline__ void wait_for_k() const {
    ptx::mbarrier_wait(barriers.k_full(k_cursor.stage), k_cursor.parity);
  }
  __device__ __forceinline__ void wait_for_v() const {
    ptx::mbarrier_wait(barriers.v_full(v_cursor.stage), v_cursor.parity);
  }
  __device__ __forceinline__ void release_k() {
    release(barriers.k_empty(k_cursor.stage));
    k_cursor.step();
  }
  __device__ __forceinline__ void release_v() {
    release(barriers.v_empty(v_cursor.stage));
    v_cursor.step();
  }
  __device__ __forceinline__ void release_q() {
    if (!Traits::kOutputOverQ) release(barriers.q_empty(q_cursor.stage));
  }

  // Turns scores into probabilities; masked where the step holds keys that some row does not see.
  __device__ __forceinline__ void softmax(int group_row, int step, bool masked,
                                          float (&factor)[2]) {
    if (masked) mask(group_row, step);
    statistics.raise(scores, params.scale_log2, factor);
    statistics.exponentiate(scores, params.scale_log2);
  }

  // Waits for P V. ptxas would have this wait before the exponentials, which should run under P V: it
  // does not move across a branch that depends on all of them and is never taken.
  __device__ __forceinline__ void wait_for_values() {
    if (Traits::kOverlapped &&
        __any_sync(kFullWarp, statistics.sum[0] + statistics.sum[1] < 0.0f)) {
      __trap();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
  }

  // The first step of a tile. With kClose, the last P V of the tile before it runs under the softmax, and
  // that tile is written out.
  template <bool kClose>
  __device__ __forceinline__ void first_step(int group_row, int step, bool masked) {
    wait_for_k();
    take_turn();
    ptx::pin(scores);
    if (kClose) ptx::pin(out);
    issue_scores();
    if (kClose) {
      wait_for_v();
      issue_values();
    }
    pass_turn();
    ptx::wgmma_wait<kClose ? 1 : 0>();
    ptx::pin(scores);
    release_k();
    if (step == 0) release_q();
    const RowStatistics closing = statistics;
    float factor[2];
    statistics.reset();
    softmax(group_row, step, masked, factor);
    if (kClose) {
      wait_for_values();
      finish(tile - 1, closing);
    }
    pack();
    open = true;
  }

  // Q K^T of a step, P V of the one before, and the softmax of this one under it.
  __device__ __forceinline__ void next_step(int group_row, int step, bool masked) {
    float factor[2];
    wait_for_k();
    take_turn();
    ptx::pin(scores);
    ptx::pin(out);
    issue_scores();
    wait_for_v();
    issue_values();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    release_k();
    if (step == 0) release_q();
    softmax(group_row, step, masked, factor);
    wait_for_values();
    if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= factor[(i / 2) % 2];
    }
    pack();
  }

  // The last P V of a tile, on its own.
  __device__ __forceinline__ void close(uint32_t closing) {
    wait_for_v();
    ptx::pin(out);
    issue_values();
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
    finish(closing, statistics);
  }

  // Computes the tiles that the producer sends.
  __device__ __forceinline__ void run() {
    for (;;) {
      // Where the output leaves through Q, the next Q waits for it: the tile was closed.
      ptx::mbarrier_wait(barriers.q_full(q_cursor.stage), q_cursor.parity);
      const int first_row = tiles[tile % kTileSlots].first_row;
      if (first_row == kNoTile) break;
      compute(first_row + group * kRowsPerGroup, first_row);
      q_cursor.step();
      ++tile;
    }
    if (open) close(tile - 1);
    if (warp_of_group() == 0 && lane_index() == 0) ptx::tma_store_wait();
    if (params.causal) {
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (nonfinite) {
        ptx::fence_proxy_async();
        for_each_tile<Traits>(params, [&](const Tile& written) { repair(written); });
      }
    }
  }

  // `first_row` is the tile's, `group_row` this group's.
  __device__ __forceinline__ void compute(int group_row, int first_row) {
    const int steps = steps_of<Traits>(params, first_row, Traits::kTileQ);
    const int own_steps = steps_of<Traits>(params, group_row, kRowsPerGroup);
    // Steps from this one on hold keys that some row of this group does not see.
    const int plain_steps = visible_keys(params, group_row) / Traits::kStepKeys;

    if (open && own_steps < steps) close(tile - 1);
    // First of all: the last V of the tile comes after the next Q.
    if (own_steps == 0) release_q();
    int step = steps - 1;
    for (; step >= own_steps; --step) {  // for other groups only
      wait_for_k();
      release_k();
      take_turn();
      pass_turn();
      wait_for_v();
      release_v();
    }
    if (own_steps == 0) {
      if (open) close(tile - 1);
      statistics.reset();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
      finish(tile, statistics);
    } else {
      if (open) {
        first_step<true>(group_row, step, step >= plain_steps);
      } else {
        first_step<false>(group_row, step, step >= plain_steps);
      }
      for (--step; step >= plain_steps; --step) next_step(group_row, step, true);
      for (; step >= 0; --step) next_step(group_row, step, false);
      if (Traits::kOutputOverQ) close(tile);
    }
  }

  // Computes the rows of this warp that came out with an infinity or a NaN again, one at a time. After the
  // last tile, when the accumulators' registers are free: inside the loop this would make it spill.
  __device__ __forceinline__ void repair(const Tile& tile) const {
    const int lane = lane_index();
    const int first_row = tile.first_row + group * kRowsPerGroup + warp_of_group() * 16;
    LoneRow lone;
    lone.k =
        params.k_data + tile.batch * params.k_strides.batch + tile.head_kv * params.k_strides.head;
    lone.v =
        params.v_data + tile.batch * params.v_strides.batch + tile.head_kv * params.v_strides.head;
    lone.k_stride = params.k_strides.seq;
    lone.v_stride = params.v_strides.seq;
    lone.dim = params.dim;
    lone.dim_v = params.dim_v;
    for (int row = first_row; row < min(first_row + 16, params.seq_q); ++row) {
      uint16_t* out_row = params.out_data + tile.batch * params.out_strides.batch +
                          tile.head * params.out_strides.head + row * params.out_strides.seq;
      bool wrong = false;
      for (int column = lane; column < params.dim_v; column += kThreadsPerWarp) {
        wrong = wrong || numeric::any_nonfinite<Element>(out_row[column]);
      }
      if (!__any_sync(kFullWarp, wrong)) continue;
      lone.q = params.q_data + tile.batch * params.q_strides.batch +
               tile.head * params.q_strides.head + row * params.q_strides.seq;
      lone.keys = visible_keys(params, row);
      const float lse = compute_row_alone<Element, Traits::kDimV>(
          lone, params.scale_log2,
          [&](int column, uint16_t element) { out_row[column] = element; });
      if (params.lse != nullptr && lane == 0) {
        params.lse[tile.batch * params.lse_strides.batch + tile.head * params.lse_strides.head +
                   row * params.lse_strides.seq] = lse * kLn2;
      }
    }
  }

  // Divides by the sums and writes out and lse.
  __device__ __forceinline__ void finish(uint32_t closing,
                                         const RowStatistics& statistics_of_tile) {
    const int lane = lane_index();
    const int warp = warp_of_group();
    const Tile tile = tiles[closing % kTileSlots];
    const int group_row = tile.first_row + group * kRowsPerGroup;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group_row + warp * 16 + lane / 4 + 8 * half;
      float total = statistics_of_tile.sum[half];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      // Rows past the last have summed nothing: what is not written must not look like a NaN.
      const bool sees_keys = row < params.seq_q && visible_keys(params, row) > 0;
      if (params.lse != nullptr && lane % 4 == 0 && row < params.seq_q) {
        params.lse[tile.batch * params.lse_strides.batch + tile.head * params.lse_strides.head +
                   row * params.lse_strides.seq] =
            sees_keys ? (statistics_of_tile.offset[half] + log2f(total)) * kLn2 : -INFINITY;
      }
      // A row of nothing but -inf scores is 0 / 0 = NaN; a row that sees no key is 0 by definition.
      factor[half] = sees_keys ? 1.0f / total : 0.0f;
    }
    const uint32_t tile_out = shared + Traits::kOOffset + group * Traits::kOGroupStride;
    const bool leader = warp == 0 && lane == 0;
    if (leader) ptx::tma_store_wait_read();  // the tile before this one has left
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
    const int matrix_row = warp * 16 + lane % 16;
    uint32_t largest = 0;
#pragma unroll
    for (int pair = 0; pair < Traits::kDimV / 16; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        packed[r] = Numeric::pack(out[8 * pair + 2 * r] * factor[r % 2],
                                  out[8 * pair + 2 * r + 1] * factor[r % 2]);
        largest = numeric::max_magnitude<Element>(largest, packed[r]);
      }
      const int chunk = 2 * (pair % 4) + lane / 16;
      ptx::stmatrix_x4(tile_out + (pair / 4) * Traits::kOBoxStride + matrix_row * kBoxRowBytes +
                           ((chunk ^ (matrix_row % 8)) * 16),
                       packed[0], packed[1], packed[2], packed[3]);
    }
    nonfinite = nonfinite || __any_sync(kFullWarp, numeric::any_nonfinite<Element>(largest));
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
    if (leader) {
      if (group_row < params.seq_q) {
#pragma unroll
        for (int box = 0; box < Traits::kBoxesV; ++box) {
          ptx::tma_store(&params.out, tile_out + box * Traits::kOBoxStride, box * kBoxColumns,
                         group_row, tile.head, tile.batch);
        }
        ptx::tma_store_commit();
      }
      if (Traits::kOutputOverQ) {
        ptx::tma_store_wait_read();
        ptx::mbarrier_arrive(barriers.q_empty(q_cursor.stage));
      }
    }
    open = false;
    add = false;
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ unsigned char raw[];
  const auto shared_of_block = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const uint32_t shared =
      (shared_of_block + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  const Barriers<Traits> barriers{shared + Traits::kBarriersOffset};
  Tile* tiles = reinterpret_cast<Tile*>(raw + (shared - shared_of_block) + Traits::kTilesOffset);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      ptx::mbarrier_init(barriers.q_full(stage), 1);
      ptx::mbarrier_init(barriers.q_empty(stage),
                         Traits::kOutputOverQ ? Traits::kConsumers : kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(barriers.k_full(stage), 1);
      ptx::mbarrier_init(barriers.k_empty(stage), kConsumerWarps);
      ptx::mbarrier_init(barriers.v_full(stage), 1);
      ptx::mbarrier_init(barriers.v_empty(stage), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int group = __shfl_sync(kFullWarp, thread / kThreadsPerGroup, 0);
  if (group == 0) {
    ptx::give_registers_back<Traits::kProducerRegisters>();
    if (thread == 0) produce<Traits>(params, shared, tiles, barriers);
  } else {
    ptx::take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits> consumer(params, barriers, shared, tiles, group - 1);
    // Consumer 0 has the first turn.
    if (group == Traits::kConsumers) consumer.pass_turn();
    consumer.run();
  }
}

}  // namespace flashmoe::sm90
