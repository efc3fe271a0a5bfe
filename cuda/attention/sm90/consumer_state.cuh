// The state of a consumer warpgroup: its registers and pipelines, its waits for stages and its
// releases of them, and the turns that consumers take in issuing products.
#pragma once

#include "cuda/attention/sm90/statistics.cuh"
#include "cuda/attention/sm90/storage.cuh"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pipeline.cuh"

namespace flashmoe::sm90 {

template <class Traits>
struct ConsumerState {
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using ValueMma = ptx::Wgmma<Element, Traits::kDimV>;
  using Params = ParamsOf<Traits>;
  using Tile = TileOf<Traits>;
  using Fragments = GroupScoreFragments<Traits::kStepKeys>;
  static constexpr int kScores = Traits::kStepKeys / 2;
  static constexpr int kOutputs = Traits::kDimV / 2;
  static constexpr int kSlices = Traits::kStepKeys / 16;

  const Params& params;
  Barriers<Traits> barriers;
  uint32_t shared;
  const Tile* tiles;  // [Traits::kTileSlots]
  int group;
  uint64_t q_descriptor;
  uint64_t k_descriptor;
  uint64_t v_descriptor;
  PipelineState<Traits::kStages> k_pipe;
  PipelineState<Traits::kStages> v_pipe;
  PipelineState<Traits::kQStages> q_pipe;

  uint32_t tile = 0;  // running number of the tile that steps belong to
  bool open = false;  // the last P V of the previous tile, or of this one, is still to be done
  Statistics statistics;
  float scores[kScores];
  uint32_t p[kSlices][4];
  float out[kOutputs];
  bool add = false;  // out holds sums to add to
  // This warp has written rows that need the fallback. They hold an infinity or a NaN.
  bool suspect = false;

  __device__ __forceinline__ ConsumerState(const Params& params_, const Barriers<Traits>& barriers_,
                                           uint32_t shared_, const Tile* tiles_, int group_)
      : params(params_), barriers(barriers_), shared(shared_), tiles(tiles_), group(group_) {
    q_descriptor =
        ptx::swizzled_descriptor(shared + Traits::kQOffset + group * Traits::kQBytesPerGroup, 16);
    k_descriptor = ptx::swizzled_descriptor(shared + Traits::kKOffset, 16);
    v_descriptor = ptx::swizzled_descriptor(shared + Traits::kVOffset, Traits::kKVBoxBytes);
  }

  // Returns the sequence of the tile that steps belong to.
  __device__ __forceinline__ SequenceOf<Traits> sequence() const {
    return sequence_of_tile<Traits>(params, tiles[tile % Traits::kTileSlots]);
  }

  // Returns what the rows of that tile begin with. Where keys are split, sinks are added at a row's
  // end.
  __device__ __forceinline__ RowState begin() const {
    if constexpr (Traits::kSplit) {
      return {kNoRowMax, 0.0f};
    } else {
      return tiles[tile % Traits::kTileSlots].begin;
    }
  }

  // The stage and parity of Q. Kernels of sequences and of short windows derive them from the
  // number of the tile, because they have one register less than others.
  static constexpr bool kCountsTiles = Traits::kRagged || Traits::kWindowSteps > 0;
  __device__ __forceinline__ int q_stage() const {
    return kCountsTiles ? static_cast<int>(tile % Traits::kQStages) : q_pipe.stage;
  }
  __device__ __forceinline__ uint32_t q_parity() const {
    return kCountsTiles ? tile / Traits::kQStages % 2 : q_pipe.parity;
  }

  // Returns the portion of Q that holds this group's rows.
  __device__ __forceinline__ int portion() const { return group / Traits::kGroupsPerPortion; }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (ptx::elect_one()) ptx::mbarrier_arrive(barrier);
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
    ptx::mbarrier_wait(barriers.k_full(k_pipe.stage), k_pipe.parity);
  }
  __device__ __forceinline__ void wait_for_v() const {
    ptx::mbarrier_wait(barriers.v_full(v_pipe.stage), v_pipe.parity);
  }
  __device__ __forceinline__ void release_k() {
    release(barriers.k_empty(k_pipe.stage));
    k_pipe.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(barriers.v_empty(v_pipe.stage));
    v_pipe.advance();
  }
  __device__ __forceinline__ void release_q() { release(barriers.q_empty(q_stage(), portion())); }
};

}  // namespace flashmoe::sm90
