// Short windows: all keys of a group of 64 rows at once.
//
// If a row sees few keys, those of a tile's first and last rows overlap little, and steps that all
// consumers take would be masked for some. So a step has as many keys as a group has rows. All keys
// of a group fit into kWindowSteps steps, and it skips the others. Their scores are in registers
// together, so the row max is known before the first probability, and nothing is rescaled or
// recomputed. Consumers take no turns.
#pragma once

#include "cuda/attention/sm90/consumer.cuh"

namespace flashmoe::sm90 {

// Scores of several wgmma products over consecutive keys.
template <int kSteps, int kKeys>
struct StepsScoreFragments {
  using Scores = float[kSteps][kKeys / 2];
  static constexpr int kRows = 2;
  static constexpr int kScores = kSteps * kKeys / 4;

  template <class Array>
  static __device__ __forceinline__ auto& at(Array& scores, int r, int i) {
    constexpr int kOfStep = kKeys / 4;
    return GroupScoreFragments<kKeys>::at(scores[i / kOfStep], r, i % kOfStep);
  }
};

template <class Traits>
struct WindowConsumer : Consumer<Traits> {
  using Base = Consumer<Traits>;
  using Base::barriers;
  using Base::params;
  using Base::statistics;
  using Base::tile;
  using Base::tiles;
  using typename Base::Element;
  using Pipe = PipelineState<Traits::kStages>;
  static constexpr int kKeys = Traits::kStepKeys;
  static constexpr int kSteps = Traits::kWindowSteps;
  using StepsFragments = StepsScoreFragments<kSteps, kKeys>;
  using StepsScores = typename StepsFragments::Scores;

  enum class Of { kK, kV };

  Pipe pipe;  // of the tile's first step, for K and V

  using Base::Base;

  // Numbers of a tile's steps, in the order of their loads: steps before the group's own, whose
  // keys are behind the group's; its own; and all.
  struct Counts {
    int before;
    int own;
    int all;
    __device__ __forceinline__ int behind() const { return all - before - own; }
  };

  static __device__ __forceinline__ Pipe behind(Pipe pipe, int steps) {
    pipe.advance(steps);
    return pipe;
  }

  template <Of kOf>
  __device__ __forceinline__ void wait_for(const Pipe& at) const {
    ptx::mbarrier_wait(kOf == Of::kK ? barriers.k_full(at.stage) : barriers.v_full(at.stage),
                       at.parity);
  }
  template <Of kOf>
  __device__ __forceinline__ void release_steps(Pipe at, int steps) const {
#pragma unroll 1
    for (int i = 0; i < steps; ++i, at.advance()) {
      this->release(kOf == Of::kK ? barriers.k_empty(at.stage) : barriers.v_empty(at.stage));
    }
  }
  // Skips steps. It waits for them first: other consumers may still use a stage that is not full
  // for an earlier step.
  template <Of kOf>
  __device__ __forceinline__ void skip_steps(Pipe at, int steps) const {
#pragma unroll 1
    for (int i = 0; i < steps; ++i, at.advance()) {
      wait_for<kOf>(at);
      release_steps<kOf>(at, 1);
    }
  }
  // Waits for steps and returns their stages. If there are fewer than kSteps, the last one stands
  // in for the others, whose keys are masked.
  template <Of kOf>
  __device__ __forceinline__ void find_steps(Pipe at, int steps, int (&stages)[kSteps]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < steps) {
        if (step > 0) at.advance();
        wait_for<kOf>(at);
      }
      stages[step] = at.stage;
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(barriers.q_full(this->q_stage(), 0), this->q_parity());
      const auto& here = tiles[tile % Traits::kTileSlots];
      const int first_row = __shfl_sync(kFullWarp, here.first_row, 0);
      const Steps<Traits> steps = steps_of_tile<Traits>(params, here);
      const int group_row = first_row + this->group * kRowsPerGroup;
      const Steps<Traits> own = this->own_steps(first_row, group_row, steps);
      if (first_row == kNoTile) break;
      // Makes the value known to be uniform: the descriptors of products then take no per-thread
      // registers.
      const auto uniform = [](int keys) { return __shfl_sync(kFullWarp, keys / kKeys, 0); };
      const int all = uniform(steps.end - steps.first);
      if (own.end > 0) {
        const Counts counts = {uniform(steps.end - own.end), uniform(own.end - own.first), all};
        compute(group_row, own.end, counts);
      } else {
        this->release_q();
        skip_steps<Of::kK>(pipe, all);
        skip_steps<Of::kV>(pipe, all);
        this->write_nothing_seen();
      }
      pipe.advance(all);
      ++tile;
    }
    this->repair_whole_tiles();
  }

  // Computes a tile in which this group sees keys, and writes it out.
  __device__ __forceinline__ void compute(int group_row, int end_key, const Counts& counts) {
    const Pipe own = behind(pipe, counts.before);
    int stages[kSteps];
    skip_steps<Of::kK>(pipe, counts.before);
    find_steps<Of::kK>(own, counts.own, stages);
    StepsScores scores;
    issue_scores(stages, scores);
    skip_steps<Of::kV>(pipe, counts.before);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::pin(scores[step]);
    release_steps<Of::kK>(own, counts.own);
    this->release_q();
    skip_steps<Of::kK>(behind(own, counts.own), counts.behind());

    mask(group_row, end_key, scores);
    float factor[2];
    statistics.reset(this->begin());
    statistics.template rescale_nan<StepsFragments>(scores, params.score.scale_log2, factor);
    find_steps<Of::kV>(own, counts.own, stages);
    uint32_t p[kSteps][Base::kSlices][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float sums[2];
      statistics.exponentiate(scores[step], params.score.scale_log2, sums);
      statistics.add(sums);
      Base::pack(scores[step], p[step]);
      // Never taken. Without this branch, ptxas would begin the exponentials of all steps together,
      // for which there are too few registers.
      if (step + 1 < kSteps && __any_sync(kFullWarp, sums[0] + sums[1] < 0.0f)) __trap();
      this->issue_values(p[step], stages[step], step > 0);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(this->out);
    release_steps<Of::kV>(own, counts.own);
    skip_steps<Of::kV>(behind(own, counts.own), counts.behind());
    this->end_tile(tile, statistics);
  }

  __device__ __forceinline__ void issue_scores(const int (&stages)[kSteps], StepsScores& scores) {
    const uint64_t q = ptx::advance(this->q_descriptor, this->q_stage() * Traits::kQBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t k = ptx::advance(this->k_descriptor, stages[step] * Traits::kKBytes);
#pragma unroll
      for (int slice = 0; slice < Traits::kDim / 16; ++slice) {
        ptx::Wgmma<Element, kKeys>::multiply(scores[step], ptx::advance(q, slice * 32),
                                             ptx::advance(k, slice * 32), slice > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // Masks the keys that a row does not see, in steps that have some. The steps end with end_key and
  // are stored last step first.
  __device__ __forceinline__ void mask(int group_row, int end_key, StepsScores& scores) const {
    const auto& sequence = this->sequence();
    const int last_row = min(group_row + kRowsPerGroup, sequence.length_q) - 1;
    const int right_key = sequence.end_key(params.score, group_row) - kKeys;
    const int left_key = sequence.first_key(params.score, last_row);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int key = end_key - (step + 1) * kKeys;
      if (key > right_key || key < left_key) Base::mask(group_row, key, scores[step]);
    }
  }
};

}  // namespace flashmoe::sm90
