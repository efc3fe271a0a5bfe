// The repair after a consumer's last tile: rows that came out with an infinity or a NaN are
// computed again.
#pragma once

#include "cuda/attention/sm90/epilogue.cuh"
#include "cuda/attention/sm90/fallback.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90 {

template <class Traits>
struct Repair : Epilogue<Traits> {
  using Base = Epilogue<Traits>;
  using Base::Base;
  using Base::group;
  using Base::out_of;
  using Base::packed_row;
  using Base::params;
  using Base::shared;
  using Base::suspect;
  using typename Base::Element;
  using typename Base::Tile;

  // Repairs what needs it, after the last tile and once all output has left.
  __device__ __forceinline__ void repair_whole_tiles() {
    if (warp_of_group() == 0 && lane_index() == 0) ptx::tma_store_wait();
    ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
    if (suspect) {
      ptx::fence_proxy_async();
      if constexpr (Traits::kRagged) {
        // The group is found again, so that it costs the main loop no register.
        group = thread_index() / kThreadsPerGroup - 1;
        if (params.division == nullptr) {
          repair_all<Tiles::kDealt>();
        } else {
          repair_all<Tiles::kTakenBefore>();
        }
      } else {
        TileScheduler<Traits> scheduler(params);
        for (Tile written; scheduler.next(&written);) repair(written);
      }
    }
  }

  // Runs `repair` on all tiles of the block.
  template <Tiles kTiles>
  __device__ __forceinline__ void repair_all() const {
    // The output has left this group's memory, so the chunks may take it.
    RaggedScheduler<Traits, kTiles> scheduler(
        params, chunks_of_group() + warp_of_group() * kSequencesPerChunk);
    while (scheduler.next()) {
      Tile written;
      scheduler.describe(&written, group);
      repair(written);
    }
  }

  // Returns the chunks of this group's warps, one for each, which lie where the group's output was.
  __device__ __forceinline__ ChunkSequence* chunks_of_group() const {
    extern __shared__ unsigned char raw[];
    const auto begin = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    return reinterpret_cast<ChunkSequence*>(raw + (shared - begin) + Traits::kOOffset +
                                            group * Traits::kOBytesPerGroup);
  }

  // Computes the rows of this warp again that came out with an infinity or a NaN, one at a time.
  // Where keys are split, it also computes those that see no key. It runs after the last tile, when
  // the accumulators' registers are free: inside the loop it would make the loop spill.
  __device__ __forceinline__ void repair(const Tile& of) const {
    if constexpr (Traits::kPacked) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const PackedRow row = packed_row(of, warp_of_group() * 16 + i);
        if (row.exists) repair_row(of, row.head, row.query);
      }
    } else {
      const int first_row = of.first_row + group * kRowsPerGroup + warp_of_group() * 16;
      const auto end_row = [&] {
        return min(first_row + 16, sequence_of_tile<Traits>(params, of).length_q);
      };
      for (int row = max(first_row, 0); row < end_row(); ++row) {
        repair_row(of, of.head, row);
      }
    }
  }
  // `row` is the query of a packed row.
  __device__ __forceinline__ PlaceOfRow place_of_row(const Tile& of, int head, int row) const {
    if constexpr (Traits::kPacked) {
      return {head, of.sequence.begin_q + row};
    } else {
      return PlaceOfRow::of(params, of, row);
    }
  }
  __device__ __forceinline__ void repair_row(const Tile& of, int head, int query) const {
    const RowStrides& strides = params.tensors.out_strides;
    const Sequence sequence = sequence_of_tile<Traits>(params, of);
    const uint16_t* out_row = nullptr;
    if constexpr (Traits::kRagged) {
      out_row = params.tensors.out + place_of_row(of, head, query).offset(strides, of.batch);
    } else {
      out_row = params.tensors.out + of.batch * strides.batch + head * strides.head +
                (sequence.begin_q + query) * strides.seq;
    }
    bool wrong = Traits::kSplit && !sequence.sees_keys(params.score, query);
    if constexpr (Traits::kRagged) {
      wrong = RaggedKeys{params, of}.misses(sequence.keys(params.score, query));
    }
    for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
      wrong = wrong || numeric::any_nonfinite<Element>(out_row[column]);
    }
    if (!__any_sync(kFullWarp, wrong)) return;
    if constexpr (Traits::kRagged) {
      compute_again<Traits>(params, of, query, place_of_row(of, head, query));
    } else {
      compute_again<Traits>(params, of.batch, head, of.head_kv, query);
    }
  }
};

}  // namespace flashmoe::sm90
