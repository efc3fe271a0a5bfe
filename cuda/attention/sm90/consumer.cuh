// A consumer warpgroup: its loop over tiles, and the steps of a tile. Each step combines the
// products (products.cuh), the statistics of the softmax (statistics.cuh) and, at a tile's end, the
// epilogue (epilogue.cuh).
#pragma once

#include "cuda/attention/sm90/repair.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashmoe::sm90 {

template <class Traits>
struct Consumer : Repair<Traits> {
  using Base = Repair<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::begin;
  using Base::cap_and_mask;
  using Base::compute_scores_again;
  using Base::end_tile;
  using Base::group;
  using Base::issue_values;
  using Base::kOutputs;
  using Base::kScores;
  using Base::leave_nothing;
  using Base::open;
  using Base::out;
  using Base::p;
  using Base::pack;
  using Base::params;
  using Base::pass_turn;
  using Base::portion;
  using Base::q_parity;
  using Base::q_pipe;
  using Base::q_stage;
  using Base::release_k;
  using Base::release_q;
  using Base::release_v;
  using Base::repair;
  using Base::repair_whole_tiles;
  using Base::scores;
  using Base::sequence;
  using Base::statistics;
  using Base::suspect;
  using Base::take_turn;
  using Base::tile;
  using Base::tiles;
  using Base::wait_for_k;
  using Base::wait_for_v;
  using Base::wait_for_values;
  using Base::write_nothing_seen;
  using typename Base::Fragments;
  using typename Base::Tile;

  // Computes the tiles that the producer sends.
  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(barriers.q_full(q_stage(), portion()), q_parity());
      int first_row = tiles[tile % Traits::kTileSlots].first_row;
      Steps<Traits> steps = steps_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots]);
      if constexpr (Traits::kSplit) {
        // The shuffles tell the compiler that these values are uniform. Kernels whose keys are
        // split have too few registers to hold them for each thread.
        first_row = __shfl_sync(kFullWarp, first_row, 0);
        steps.first = __shfl_sync(kFullWarp, steps.first, 0);
        steps.end = __shfl_sync(kFullWarp, steps.end, 0);
      }
      const int group_row = first_row + group * queries_per_group<Traits>(params);
      const Steps<Traits> own = own_steps(first_row, group_row, steps);
      // The last P V is done at once, unless this group's first step does it.
      const bool at_once = first_row == kNoTile || own.end == 0 || own.end < steps.end;
      if (open && at_once) close(tile - 1);
      if (first_row == kNoTile) break;
      compute(group_row, steps, own);
      // With split keys a block has few tiles. Running the next one's products meanwhile is not
      // worth its registers.
      if (Traits::kSplit && open) close(tile);
      q_pipe.advance();
      ++tile;
    }
    if constexpr (!Traits::kSplit) {
      repair_whole_tiles();
    } else {
      // Without a barrier here, and one after the stores of only some lanes, ptxas serialises the
      // products.
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (suspect || params.score.blind_rows != 0) {
        SplitTileScheduler<Traits> scheduler(params);
        for (Tile written; scheduler.next(&written);) {
          if (written.place == kWholeTile) repair(written);
        }
      }
    }
  }
  __device__ __forceinline__ Steps<Traits> own_steps(int first_row, int group_row,
                                                     const Steps<Traits>& steps) const {
    const int shift =
        kv_block_alignment_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots], first_row);
    if constexpr (Traits::kSplit) {
      Steps<Traits> own(params.score, sequence(), group_row, params.queries_per_group, shift);
      own.end = group < params.groups_per_tile ? min(own.end, steps.end) : 0;
      return own.end > steps.first ? own : Steps<Traits>(0, 0);
    } else {
      return {params.score, sequence(), group_row, queries_per_group<Traits>(params), shift};
    }
  }

  // Computes a tile. The group skips the steps whose keys come after its own, which other groups
  // need, and masks those whose keys come before its own.
  __device__ __forceinline__ void compute(int group_row, const Steps<Traits>& steps,
                                          const Steps<Traits>& own) {
    const bool sees_keys = own.end > 0;
    const int end = sees_keys ? own.end : steps.first;
    // Q is released first of all: the last V of the tile comes after the next Q.
    if (!sees_keys) release_q();
    int key = steps.end - Traits::kStepKeys;
    // The key is made uniform, as the values at the beginning of a tile are.
    if (Traits::kSplit) key = __shfl_sync(kFullWarp, key, 0);
    for (; key >= end; key -= Traits::kStepKeys) {
      wait_for_k();
      release_k();
      take_turn();
      pass_turn();
      wait_for_v();
      release_v();
    }
    if (!sees_keys) {
      if constexpr (Traits::kSplit) {
        leave_nothing(tiles[tile % Traits::kTileSlots]);
      } else {
        write_nothing_seen();
      }
      return;
    }
    // A step between these two keys holds no key that some row of this group does not see.
    const int last_row =
        min(group_row + queries_per_group<Traits>(params), sequence().length_q) - 1;
    const int right_key = sequence().end_key(params.score, group_row) - Traits::kStepKeys;
    const int left_key = sequence().first_key(params.score, last_row);
    const auto masked = [&] { return key > right_key || key < left_key; };
    // In a narrow step, no row of the group sees a key after the first kNarrowKeys.
    const bool narrow =
        Traits::kNarrows && sequence().end_key(params.score, last_row) - key <= Traits::kNarrowKeys;
    if (!Traits::kSplit && open) {
      first_step<true>(group_row, key, masked(), key == steps.first, narrow);
    } else {
      first_step<false>(group_row, key, masked(), key == steps.first, narrow);
    }
    for (key -= Traits::kStepKeys; key >= steps.first; key -= Traits::kStepKeys) {
      next_step(group_row, key, masked(), key == steps.first);
    }
  }

  // Computes Q K^T of the first kKeys keys of a tile's first step, and with kClose the last P V of
  // the tile before it. No row of the group sees more keys of that step. The caller chooses kKeys
  // by a branch around all of the step's products: a branch between them makes ptxas serialise
  // them.
  template <bool kClose, int kKeys>
  __device__ __forceinline__ void first_products() {
    float of_keys[kKeys / 2];
    this->template issue_scores<kKeys>(of_keys);
    if (kClose) {
      wait_for_v();
      issue_values();
    }
    pass_turn();
    ptx::wgmma_wait<kClose ? 1 : 0>();
    ptx::pin(of_keys);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = i < kKeys / 2 ? of_keys[i] : -INFINITY;
  }

  // Computes the first step of a tile. With kClose, the last P V of the tile before it runs under
  // the softmax, and that tile is written out.
  template <bool kClose>
  __device__ __forceinline__ void first_step(int group_row, int key, bool masked, bool last,
                                             bool narrow) {
    wait_for_k();
    take_turn();
    if (kClose) ptx::pin(out);
    if (narrow) {
      first_products<kClose, Traits::kNarrowKeys>();
    } else {
      first_products<kClose, Traits::kStepKeys>();
    }
    release_k();
    if (last) release_q();
    const Statistics closing = statistics;
    float factor[2];
    float sums[2];
    cap_and_mask(group_row, key, masked);
    statistics.reset(begin());
    statistics.template rescale_nan<Fragments>(scores, params.score.scale_log2, factor);
    statistics.exponentiate(scores, params.score.scale_log2, sums);
    statistics.add(sums);
    if (kClose) {
      wait_for_values(sums);
      end_tile(tile - 1, closing);
    }
    pack(scores, p);
    open = true;
  }

  // Computes a step: Q K^T of this step, P V of the one before, and the softmax of this one while P
  // V runs. Row maxima are assumed to hold. The sums show where they do not, and the scores are
  // then computed again.
  __device__ __forceinline__ void next_step(int group_row, int key, bool masked, bool last) {
    wait_for_k();
    take_turn();
    ptx::pin(scores);
    ptx::pin(out);
    this->template issue_scores<Traits::kStepKeys>(scores);
    wait_for_v();
    issue_values();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    float sums[2];
    cap_and_mask(group_row, key, masked);
    statistics.exponentiate(scores, params.score.scale_log2, sums);
    wait_for_values(sums);
    if (__builtin_expect(__any_sync(kFullWarp, statistics.outgrown(sums)), false)) {
      float factor[2];
      compute_scores_again();
      cap_and_mask(group_row, key, masked);
      statistics.template rescale_nan<Fragments>(scores, params.score.scale_log2, factor);
      statistics.exponentiate(scores, params.score.scale_log2, sums);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= factor[(i / 2) % 2];
    }
    statistics.add(sums);
    release_k();
    if (last) release_q();
    pack(scores, p);
  }

  // Does the last P V of a tile on its own.
  __device__ __forceinline__ void close(uint32_t closing) {
    wait_for_v();
    ptx::pin(out);
    issue_values();
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release_v();
    end_tile(closing, statistics);
  }
};

}  // namespace flashmoe::sm90
