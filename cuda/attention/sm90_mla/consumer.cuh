// The two consumer warpgroups. Both hold 64 rows of half of the output's columns. For two blocks of
// keys, the first computes the probabilities of one block, the second those of the other, from one
// running row max. Each multiplies both by its half of their values.
//
//   first    S0 | softmax | P0 V0 . . . . . . . . | P1 V1 | S2 ...
//   second   .  | S1 . . . . . | P0 V0 + softmax  | P1 V1 | . S3 ...
//
// A warp has the same rows as one warp of the other consumer, and a lane the same fragments as one
// of its lanes. Probabilities and row maxima are exchanged only between these.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/sm90_mla/producer.cuh"
#include "cuda/ptx/global_store.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::sm90_mla {

// Named barriers.
inline constexpr int kToldBarrier = 1;      // per buffer and warp of a consumer: 8
inline constexpr int kConsumerBarrier = 9;  // per consumer
inline constexpr int kAllBarrier = 11;      // of both consumers
inline constexpr int kScoresBarrier = 12;   // the first consumer has issued its scores

template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using State = typename Traits::State;
  using Numeric = numeric::ElementTraits<Element>;
  using ScoreMma = ptx::Wgmma<Element, kBlockKeys>;
  using ValueMma = ptx::Wgmma<Element, Traits::kHalf>;
  static constexpr int kSteps = kBlockKeys / 16;  // of 16 keys

  const Params& params;
  unsigned char* memory;
  State& state;
  int consumer;  // 0 or 1
  Uses uses;

  float out[Traits::kHalf / 2];
  float row_max[2];
  float row_sum[2];  // of this consumer's blocks, and this lane's columns

  // ---- which rows and keys ----------------------------------------------------------------------

  static __device__ __forceinline__ int group_thread() {
    return static_cast<int>(static_cast<uint32_t>(thread_index()) % kThreadsPerGroup);
  }
  static __device__ __forceinline__ int warp_of_group() {
    return warp_index() % (kThreadsPerGroup / kThreadsPerWarp);
  }
  // The row of fragment elements 2e and 2e + 1.
  static __device__ __forceinline__ int row_of(int e) {
    return group_thread() / kThreadsPerWarp * 16 + lane_index() / 4 + 8 * e;
  }
  __device__ __forceinline__ unsigned char* block_of(int buffer) const {
    return memory + Traits::kKOffset + buffer * Traits::kBlockBytes;
  }
  __device__ __forceinline__ uint4* probabilities_of(int buffer) const {
    return reinterpret_cast<uint4*>(block_of(buffer) + Traits::kSpareBox * Traits::kBoxBytes) +
           group_thread();
  }

  // ---- products ---------------------------------------------------------------------------------

  __device__ __forceinline__ void wait_for_box(int buffer, int box) {
    ptx::mbarrier_wait(shared_address(&state.full[buffer][box]), uses.full_parity(buffer));
  }

  __device__ __forceinline__ void send_scores(float (&scores)[kBlockKeys / 2], int buffer) {
    const uint64_t q =
        ptx::swizzled_descriptor(shared_address(memory + Traits::kQOffset), Traits::kBoxBytes);
    const uint64_t k =
        ptx::swizzled_descriptor(shared_address(block_of(buffer)), Traits::kBoxBytes);
    ptx::pin(scores);
#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      wait_for_box(buffer, box);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kBoxColumns / 16; ++i) {
        const int bytes = box * Traits::kBoxBytes + i * 32;
        ScoreMma::multiply(scores, ptx::advance(q, bytes), ptx::advance(k, bytes), box + i > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // Fences come first: the accumulators have just been multiplied.
  template <int kConsumer>
  __device__ __forceinline__ void send_values(const uint32_t (&p)[kSteps][4], int buffer) {
    const uint64_t v = ptx::swizzled_descriptor(
        shared_address(block_of(buffer) + kConsumer * Traits::kBoxesOfHalf * Traits::kBoxBytes),
        Traits::kBoxBytes);
    ptx::pin(out);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ValueMma::multiply_values(out, p[i], ptx::advance(v, i * 16 * Traits::kBoxRowBytes), true);
    }
    ptx::wgmma_commit();
  }

  // The products with a block's values are done. This consumer frees its half of the buffer, except
  // that of the last block, which the end of the segment frees.
  template <int kConsumer>
  __device__ __forceinline__ void end_values(int buffer, bool last) {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    const uint32_t empty = shared_address(&state.empty[buffer][kConsumer]);
    if (ptx::elect_one() && !last) ptx::mbarrier_arrive(empty);
    uses.next(buffer);
  }
  __device__ __forceinline__ void free_last(const Segment& segment) {
    const int buffer = (segment.blocks - 1) % kBuffers;
    if (ptx::elect_one()) ptx::mbarrier_arrive(shared_address(&state.empty[buffer][consumer]));
  }

  static __device__ __forceinline__ bool grow_rows(const float (&factors)[2]) {
    return __any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f);
  }
  __device__ __forceinline__ void multiply_rows(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < Traits::kHalf / 2; ++i) out[i] *= factors[i / 2 % 2];
  }

  // ---- softmax ----------------------------------------------------------------------------------

  __device__ __forceinline__ void mask(float (&scores)[kBlockKeys / 2], const Segment& segment,
                                       int key, uint64_t valid) const {
    const bool some_rows = key < segment.all_first || key + kBlockKeys > segment.all_end;
    if (valid == ~uint64_t{0} && !(some_rows && segment.tile.masked != 0)) return;
    const int column = 2 * (lane_index() % 4);
    KeyRange keys[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      keys[e] = attention_decode::RowOf(params, segment.tile, row_of(e)).keys(params, segment.tile);
      keys[e].first -= key + column;
      keys[e].end -= key + column;
    }
    const uint64_t mine = valid >> column;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) {
      const int at = i / 4 * 8 + i % 2;
      const KeyRange& seen = keys[i / 2 % 2];
      const bool there = (mine >> at & 1) != 0 && at >= seen.first && at < seen.end;
      if (!there) scores[i] = -INFINITY;
    }
  }

  // Converts scores to probabilities. Returns the factors by which the rows must be multiplied
  // before these count.
  __device__ __forceinline__ void exponentiate(float (&scores)[kBlockKeys / 2],
                                               uint32_t (&p)[kSteps][4], float (&factors)[2]) {
    const float scale_log2 = params.score.scale_log2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; ++i) {
        if (i / 2 % 2 == e) top = fmaxf(top, scores[i]);
      }
      factors[e] = rescale_row(max_of_quad(top), scale_log2, row_max[e], row_sum[e]);
    }
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) {
      const int e = i / 2 % 2;
      scores[i] = probability(scores[i], scale_log2, row_max[e]);
      row_sum[e] += scores[i];
    }
#pragma unroll
    for (int i = 0; i < kBlockKeys / 4; ++i) {
      p[i / 4][i % 4] = Numeric::pack(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Zeros the values of missing keys of a block: a NaN there would reach the rows as 0 * NaN.
  template <int kConsumer>
  __device__ __forceinline__ void clear_hidden(int buffer, uint64_t valid) const {
    if (valid == ~uint64_t{0}) return;
    constexpr int kChunks = Traits::kDimV * 2 / 16;
    for (int i = group_thread(); i < kBlockKeys * kChunks; i += kThreadsPerGroup) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      if ((valid >> row & 1) != 0) continue;
      *reinterpret_cast<uint4*>(block_of(buffer) + chunk / 8 * Traits::kBoxBytes +
                                row * Traits::kBoxRowBytes + chunk % 8 * 16) = uint4{0, 0, 0, 0};
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(kConsumerBarrier + kConsumer, kThreadsPerGroup);
  }

  // Converts a block's scores to its probabilities, and passes them to the other consumer.
  template <int kConsumer>
  __device__ __forceinline__ void make_probabilities(float (&scores)[kBlockKeys / 2],
                                                     const Segment& segment, int key,
                                                     uint32_t (&p)[kSteps][4],
                                                     float (&factors)[2]) {
    const uint64_t valid = state.valid[kConsumer];
    if (params.score.capped()) params.score.template cap<Softcap::kBrief>(scores);
    mask(scores, segment, key, valid);
    exponentiate(scores, p, factors);
    // All warps have their scores: the key box that these were made of may be overwritten.
    ptx::named_barrier_sync(kConsumerBarrier + kConsumer, kThreadsPerGroup);
    clear_hidden<kConsumer>(kConsumer, valid);
    uint4* const to = probabilities_of(kConsumer);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      to[i * kThreadsPerGroup] = uint4{p[i][0], p[i][1], p[i][2], p[i][3]};
    }
    state.told.row_maxima[kConsumer][group_thread()] = make_float2(row_max[0], row_max[1]);
    ptx::named_barrier_arrive(kToldBarrier + 4 * kConsumer + warp_of_group(), 2 * kThreadsPerWarp);
  }

  // Takes the probabilities of the other consumer.
  template <int kConsumer>
  __device__ __forceinline__ void take_probabilities(uint32_t (&p)[kSteps][4],
                                                     float (&factors)[2]) {
    constexpr int kOther = 1 - kConsumer;
    ptx::named_barrier_sync(kToldBarrier + 4 * kOther + warp_of_group(), 2 * kThreadsPerWarp);
    const uint4* const from = probabilities_of(kOther);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 step = from[i * kThreadsPerGroup];
      p[i][0] = step.x, p[i][1] = step.y, p[i][2] = step.z, p[i][3] = step.w;
    }
    const float2 maxima = state.told.row_maxima[kOther][group_thread()];
    const float new_max[2] = {maxima.x, maxima.y};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factors[e] = numeric::exp2_approx(row_max[e] - new_max[e]);
      row_sum[e] *= factors[e];
      row_max[e] = new_max[e];
    }
#pragma unroll
    for (int box = 0; box < Traits::kBoxesOfHalf; ++box) {
      wait_for_box(kOther, kConsumer * Traits::kBoxesOfHalf + box);
    }
  }

  // ---- a segment --------------------------------------------------------------------------------

  __device__ __forceinline__ void end_scores(float (&scores)[kBlockKeys / 2]) {
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
  }

  __device__ __forceinline__ void give_queries_back() {
    if (ptx::elect_one()) ptx::mbarrier_arrive(shared_address(&state.q_empty));
  }

  __device__ __forceinline__ void first_of_two(const Segment& segment, int b) {
    float scores[kBlockKeys / 2];
    uint32_t p[kSteps][4];
    float factors[2];
    send_scores(scores, 0);
    if (b + 1 < segment.blocks) ptx::named_barrier_arrive(kScoresBarrier, kConsumerThreads);
    end_scores(scores);
    if (b + kBuffers >= segment.blocks) give_queries_back();
    make_probabilities<0>(scores, segment, segment.key + b * kBlockKeys, p, factors);
    if (grow_rows(factors)) multiply_rows(factors);
    send_values<0>(p, 0);
    ptx::fence_proxy_async_shared();  // the copy engine writes next to the exchanged P
    end_values<0>(0, b + 1 == segment.blocks);
    if (b + 1 == segment.blocks) return;
    uint32_t of_other[kSteps][4];
    take_probabilities<0>(of_other, factors);
    if (grow_rows(factors)) multiply_rows(factors);
    send_values<0>(of_other, 1);
    end_values<0>(1, b + kBuffers == segment.blocks);
  }

  __device__ __forceinline__ void second_of_two(const Segment& segment, int b) {
    float scores[kBlockKeys / 2];
    uint32_t p[kSteps][4];
    uint32_t of_other[kSteps][4];
    float factors[2];
    // Waits for the other consumer to issue its scores first. Its softmax then hides these
    // products; issued together, both would be late.
    ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    send_scores(scores, 1);
    // Issued after the scores, so that the softmax begins when these are ready. It needs the row
    // max of the other block anyway.
    take_probabilities<1>(of_other, factors);
    if (grow_rows(factors)) {
      ptx::wgmma_wait<0>();
      ptx::pin(out);
      multiply_rows(factors);
    }
    send_values<1>(of_other, 0);
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    if (b + 1 + kBuffers >= segment.blocks) give_queries_back();
    make_probabilities<1>(scores, segment, segment.key + (b + 1) * kBlockKeys, p, factors);
    end_values<1>(0, false);
    if (grow_rows(factors)) multiply_rows(factors);
    send_values<1>(p, 1);
    ptx::fence_proxy_async_shared();  // as in first_of_two
    end_values<1>(1, b + kBuffers == segment.blocks);
  }

  // The second consumer's part of a last block without a second one.
  __device__ __forceinline__ void last_alone() {
    uint32_t of_other[kSteps][4];
    float factors[2];
    take_probabilities<1>(of_other, factors);
    if (grow_rows(factors)) multiply_rows(factors);
    send_values<1>(of_other, 0);
    end_values<1>(0, true);
  }

  template <int kConsumer>
  __device__ __forceinline__ void compute(const Segment& segment) {
    if constexpr (kConsumer == 0) {
      for (int b = 0; b < segment.blocks; b += kBuffers) first_of_two(segment, b);
    } else {
      if (segment.blocks == 1) give_queries_back();
      int b = 0;
      for (; b + 1 < segment.blocks; b += kBuffers) second_of_two(segment, b);
      if (b < segment.blocks) last_alone();
    }
  }

  // ---- the end of a segment ---------------------------------------------------------------------

  // Adds up the sums of both consumers.
  __device__ __forceinline__ void add_sums_of_both() {
    const float2 own = make_float2(sum_of_quad(row_sum[0]), sum_of_quad(row_sum[1]));
    state.told.row_sums[consumer][group_thread()] = own;
    ptx::named_barrier_sync_apart(kAllBarrier, kConsumerThreads);
    const float2 other = state.told.row_sums[1 - consumer][group_thread()];
    row_sum[0] = own.x + other.x;
    row_sum[1] = own.y + other.y;
  }

  // A lane has two columns of each group of eight: its units combine those of two groups
  // (combine.cuh).
  __device__ __forceinline__ void leave_part(const Segment& segment) const {
    const int unit = consumer * (Traits::kHalf / 4) + lane_index() % 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = row_of(e);
      if (row >= segment.tile.rows) continue;
      const int64_t at = int64_t{segment.place} * kRows + row;
      float4* const part = params.parts + at * Traits::kUnitsPerRow + unit;
#pragma unroll
      for (int j = 0; j < Traits::kHalf / 16; ++j) {
        const float* const columns = out + 8 * j + 2 * e;
        part[4 * j] = make_float4(columns[0], columns[1], columns[4], columns[5]);
      }
      if (consumer == 0 && lane_index() % 4 == 0) {
        params.statistics[at] = make_float2(row_max[e], row_sum[e]);
      }
    }
  }

  // Whether an output of a row of this lane is infinite or NaN. It is separate from the stores and
  // called only if rows are masked: a block waits for the fetch of instructions that it executes
  // once.
  __device__ __forceinline__ bool is_wild(int e, float factor) const {
    uint32_t nonfinite = 0;
#pragma unroll
    for (int j = 0; j < Traits::kHalf / 8; ++j) {
      const float* const two = out + 4 * j + 2 * e;
      nonfinite = numeric::gather_nonfinite<Element>(
          nonfinite, Numeric::pack(two[0] * factor, two[1] * factor));
    }
    return numeric::any_nonfinite<Element>(nonfinite);
  }

  __device__ __forceinline__ bool compute_later(int row, bool suspect) {
    if (suspect) atomicOr(&state.again[row / 32], 1u << row % 32);
    return suspect;
  }

  // Stores the rows of this warp in place of the consumer's half of the values: from the lanes'
  // fragments to columns in groups of eight. Must follow a barrier.
  __device__ __forceinline__ void put_rows(uint32_t half, const float (&factors)[2]) {
    const int row = warp_of_group() * 16 + lane_index() % 16;
    const uint32_t to = half + row * Traits::kBoxRowBytes + (lane_index() / 16 ^ row % 8) * 16;
#pragma unroll
    for (int j = 0; j < Traits::kHalf / 16; ++j) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = out + 8 * j + 2 * i;
        pairs[i] = Numeric::pack(two[0] * factors[i % 2], two[1] * factors[i % 2]);
      }
      ptx::stmatrix_x4((to ^ j % 4 * 32) + j / 4 * Traits::kBoxBytes, pairs[0], pairs[1], pairs[2],
                       pairs[3]);
    }
  }

  // Writes the rows from there, one at a time. `to` is the address of a lane's row: lane 4i + e has
  // that of fragment elements 2e.
  __device__ __forceinline__ void write_from(uint32_t half, const uint16_t* to, int rows) {
    const int chunk = lane_index();  // of 16 bytes
    const int first = warp_of_group() * 16;
    const uint32_t from =
        half + first * Traits::kBoxRowBytes + chunk / 8 * Traits::kBoxBytes + chunk % 8 * 16;
    const bool given = consumer * Traits::kHalf + 8 * chunk < params.tensors.dim_v;
    const int end = given ? rows - first : 0;
    const uint64_t own = reinterpret_cast<uint64_t>(to);
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const int lane = i % 8 * 4 + i / 8;
      const uint32_t low = __shfl_sync(kFullWarp, static_cast<uint32_t>(own), lane);
      const uint32_t high = __shfl_sync(kFullWarp, static_cast<uint32_t>(own >> 32), lane);
      const float4 words = ptx::load_shared_float4((from ^ i % 8 * 16) + i * Traits::kBoxRowBytes);
      void* const row = reinterpret_cast<void*>((uint64_t{high} << 32 | low) + 16 * chunk);
      if (i < end) {
        ptx::store_global(row, __float_as_uint(words.x), __float_as_uint(words.y),
                          __float_as_uint(words.z), __float_as_uint(words.w));
      }
    }
  }

  // Returns whether a row of this thread must be recomputed. The last block of keys has been used,
  // but its buffer is not free: the output passes through it.
  __device__ __forceinline__ bool write_rows(const Segment& segment) {
    const attention_decode::TileRows& tile = segment.tile;
    // Two of four lanes end one of their rows each.
    const bool second = lane_index() % 2 != 0;
    const int row = row_of(second ? 1 : 0);
    const float sum = second ? row_sum[1] : row_sum[0];
    const bool there = row < tile.rows;
    const attention_decode::RowOf where(params, tile, min(row, tile.rows - 1));
    const KeyRange keys = where.keys(params, tile);
    const bool sees_keys = keys.end > keys.first;
    const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kExact>(
        params.score, where.head, sees_keys, {second ? row_max[1] : row_max[0], sum});
    if (there && consumer == 0 && lane_index() % 4 < 2 && params.tensors.lse != nullptr) {
      params.tensors.lse[where.offset(tile, params.tensors.lse_strides)] = end.lse;
    }
    const int first_of_quad = lane_index() / 4 * 4;
    const float factors[2] = {__shfl_sync(kFullWarp, end.factor, first_of_quad),
                              __shfl_sync(kFullWarp, end.factor, first_of_quad + 1)};
    const uint32_t half = shared_address(block_of((segment.blocks - 1) % kBuffers)) +
                          consumer * Traits::kBoxesOfHalf * Traits::kBoxBytes;
    put_rows(half, factors);
    ptx::named_barrier_sync_apart(kConsumerBarrier + consumer, kThreadsPerGroup);
    write_from(half,
               params.tensors.out + where.offset(tile, params.tensors.out_strides) +
                   consumer * Traits::kHalf,
               tile.rows);
    const bool nothing = params.sequences.paged != 0 && sees_keys && sum == 0.0f;
    bool again = compute_later(row, there && (nothing || end.rounded_away));
    if (tile.masked != 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool wild = row_sum[e] == row_sum[e] && is_wild(e, factors[e]);
        again = compute_later(row_of(e), wild && row_of(e) < tile.rows) || again;
      }
    }
    return again;
  }

  __device__ __forceinline__ void compute_again(const Segment& segment) {
    const SequenceParams& sequences = params.sequences;
    const SequenceRows rows = sequences.keys_of(segment.tile.sequence);
    const attention_decode::KeysOfRow<Element> keys = {
        params, sequences.paged != 0 ? sequences.keys.pages_of(segment.tile.sequence) : nullptr,
        rows.batch, rows.begin, segment.tile.head_kv};
    const int warp = consumer * (kThreadsPerGroup / kThreadsPerWarp) + warp_of_group();
    for (int row = warp; row < kRows; row += kConsumerThreads / kThreadsPerWarp) {
      if ((state.again[row / 32] >> row % 32 & 1) == 0) continue;
      attention_decode::compute_row_again<Element, Traits::kDimV>(params, segment.tile, keys, row);
    }
    ptx::named_barrier_sync_apart(kAllBarrier, kConsumerThreads);
    if (consumer == 0 && group_thread() < kRows / 32) state.again[group_thread()] = 0;
  }

  __device__ __forceinline__ void finish(const Segment& segment) {
    add_sums_of_both();
    bool again = false;
    if (segment.whole != 0) {
      again = write_rows(segment);
      ptx::fence_proxy_async_shared();  // before the copy engine writes there
    } else {
      free_last(segment);
      leave_part(segment);
    }
    // Also precedes the stores of the next segment's sums.
    const bool all_done = ptx::named_barrier_all(kAllBarrier, kConsumerThreads, !again);
    if (segment.whole != 0) free_last(segment);
    if (!all_done) compute_again(segment);
  }

  __device__ __forceinline__ void run() {
    for (int number = 0;; ++number) {
      // Done here because there is nothing else to do.
#pragma unroll
      for (int i = 0; i < Traits::kHalf / 2; ++i) out[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < 2; ++e) row_max[e] = kNoRowMax, row_sum[e] = 0.0f;
      ptx::pin(out);
      const int slot = number % kSegments;
      ptx::mbarrier_wait(shared_address(&state.segment_full[slot]), number / kSegments % 2);
      const Segment& segment = state.segments[slot];
      if (segment.exists == 0) return;
      ptx::mbarrier_wait(shared_address(&state.q_full), number % 2);
      if (params.query_heads == 0) ptx::fence_proxy_async_shared();  // cp.async wrote the queries
      if (consumer == 0) {
        compute<0>(segment);
      } else {
        compute<1>(segment);
      }
      finish(segment);
      __syncwarp();
      if (ptx::elect_one()) ptx::mbarrier_arrive(shared_address(&state.segment_empty[slot]));
    }
  }
};

}  // namespace flashmoe::sm90_mla
