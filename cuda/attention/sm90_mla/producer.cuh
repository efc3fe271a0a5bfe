// The warpgroup that brings keys and queries to shared memory. Its first warp finds the segments
// and loads blocks of keys by the copy engine, the others load queries.
//
// A block of keys is loaded in boxes of 64 columns and as many rows as lie in one piece whatever
// page they begin in. The copy engine writes zeros for keys that there are not: those of a page
// that is none, and those behind the end, whose pages are not looked up.
#pragma once

#include "cuda/attention/sm90_mla/share.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_mla {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The uses of buffers so far, as parities of barriers: a bit of each buffer.
struct Uses {
  uint32_t odd = 0;

  // Of the barrier that ends the filling for the next use, and of the one that ends the use before.
  __device__ __forceinline__ uint32_t full_parity(int buffer) const { return odd >> buffer & 1; }
  __device__ __forceinline__ uint32_t empty_parity(int buffer) const {
    return full_parity(buffer) ^ 1;
  }
  __device__ __forceinline__ void next(int buffer) { odd ^= 1u << buffer; }
};

// A coordinate that no map has.
inline constexpr int kNowhere = 1 << 30;

// The keys from `key` on that there are of a block, as this lane's boxes have them.
struct LaneBoxes {
  static constexpr int kMost = kBlockKeys / kThreadsPerWarp;  // of a lane

  int page[kMost];  // kNowhere: no key of the box is there
  int row[kMost];
  uint64_t valid;  // of all lanes

  __device__ __forceinline__ void find(const Params& params, const Described& known,
                                       const int32_t* pages, int key) {
    const int size = params.box_rows;
    const auto below = [](int keys) {
      return keys >= kBlockKeys ? ~uint64_t{0} : (uint64_t{1} << max(keys, 0)) - 1;
    };
    const uint64_t there = below(known.end - key) & ~below(known.first - key);
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * size;
      page[i] = kNowhere;
      row[i] = 0;
      if (first >= kBlockKeys) continue;
      const uint64_t keys = (below(size) << first) & there;
      if (keys == 0) continue;
      const int at = known.begin_k + key + first;
      if (pages == nullptr) {
        page[i] = known.batch_k;
        row[i] = at;
      } else {
        const KeyTables::Place place = params.sequences.keys.place_of(pages, at);
        if (place.batch < 0) continue;
        page[i] = place.batch;
        row[i] = place.row;
      }
      mine |= keys;
    }
    valid = uint64_t{__reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine >> 32))} << 32 |
            __reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine));
  }
};

template <class Traits>
struct Producer {
  using State = typename Traits::State;

  const Params& params;
  unsigned char* memory;
  State& state;
  BlockPlace<Traits::kClusterBlocks> block;
  Uses uses;

  __device__ __forceinline__ void load_box(int buffer, int box, int head_kv, const LaneBoxes& boxes,
                                           uint64_t policy) {
    const uint32_t to = shared_address(memory + Traits::kKOffset) + buffer * Traits::kBlockBytes +
                        box * Traits::kBoxBytes;
    const uint32_t full = shared_address(&state.full[buffer][box]);
    if (lane_index() == 0) ptx::mbarrier_arrive_expect(full, Traits::kBoxBytes);
    __syncwarp();
    constexpr int kBlocks = Traits::kClusterBlocks;
    if (kBlocks > 1 && ((box + buffer) % kBlocks) != static_cast<int>(ptx::cluster_rank())) return;
#pragma unroll
    for (int i = 0; i < LaneBoxes::kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      if (first >= kBlockKeys) continue;
      const uint32_t rows = to + first * Traits::kBoxRowBytes;
      const int column = box * Traits::kBoxColumns;
      if constexpr (kBlocks > 1) {
        ptx::tma_load_multicast(rows, &params.keys, full, policy, (1 << kBlocks) - 1, column,
                                boxes.row[i], head_kv, boxes.page[i]);
      } else {
        ptx::tma_load(rows, &params.keys, full, policy, column, boxes.row[i], head_kv,
                      boxes.page[i]);
      }
    }
  }

  __device__ __forceinline__ void load_block(int buffer, int head_kv, const LaneBoxes& boxes,
                                             uint64_t policy) {
#pragma unroll
    for (int half = 0; half < kConsumers; ++half) {
      ptx::mbarrier_wait(shared_address(&state.empty[buffer][half]), uses.empty_parity(buffer));
      if (half == 0 && lane_index() == 0) state.valid[buffer] = boxes.valid;
#pragma unroll
      for (int box = 0; box < Traits::kBoxesOfHalf; ++box) {
        load_box(buffer, half * Traits::kBoxesOfHalf + box, head_kv, boxes, policy);
      }
    }
    load_box(buffer, Traits::kSpareBox, head_kv, boxes, policy);
    uses.next(buffer);
  }

  __device__ __forceinline__ void load_segment(const Described& known, int sequence,
                                               const KeyRange& part) {
    const uint64_t policy = params.read_once != 0 ? ptx::kEvictFirst : ptx::kEvictNormal;
    const int32_t* const pages =
        params.sequences.paged != 0 ? params.sequences.keys.pages_of(sequence) : nullptr;
    int key = known.origin() + part.first * kBlockKeys;
    LaneBoxes next;
    next.find(params, known, pages, key);
    for (int b = 0; b < part.end - part.first; ++b) {
      const LaneBoxes boxes = next;
      key += kBlockKeys;
      // Pages of the next block are looked up while this one waits for room.
      if (b + 1 < part.end - part.first) next.find(params, known, pages, key);
      load_block(b % kBuffers, block.head_kv, boxes, policy);
    }
  }

  // Calls describe(segment) for the next segment, in one lane, and tells the others.
  template <class Describe>
  __device__ __forceinline__ void tell(int number, const Describe& describe) {
    const int slot = number % kSegments;
    ptx::mbarrier_wait(shared_address(&state.segment_empty[slot]), number / kSegments % 2 ^ 1);
    if (lane_index() == 0) {
      describe(state.segments[slot]);
      ptx::mbarrier_arrive(shared_address(&state.segment_full[slot]));
    }
    __syncwarp();
  }

  // The first warp.
  __device__ __forceinline__ void load_keys() {
    int number = 0;
    int64_t at = state.share.first_unit;
    int window = -kThreadsPerWarp;
    for (int sequence = state.share.sequence; at < state.share.end; ++sequence) {
      if (window + kThreadsPerWarp <= sequence) {
        window = sequence;
        const int index = sequence + lane_index();
        __syncwarp();
        if (index < params.sequences.count) {
          state.window[lane_index()] = describe(params, block.first_row_tile(), index);
        }
        __syncwarp();
      }
      const Described& known = state.window[sequence - window];
      const KeyRange part = part_of(state.share, known, at);
      if (part.first < part.end) {
        tell(number++, [&](Segment& segment) {
          describe_segment(params, block, state.share, known, sequence, at, segment);
        });
        load_segment(known, sequence, part);
      }
      at += known.weight();
    }
    tell(number, [](Segment& segment) { segment.exists = 0; });
  }

  __device__ __forceinline__ void load_rows(const attention_decode::TileRows& tile, int warp) {
    constexpr int kWarpsOfQueries = kQueryThreads / kThreadsPerWarp;
    constexpr int kChunks = Traits::kBoxes * Traits::kBoxRowBytes / 16;  // of a row
    const uint32_t q_tile = shared_address(memory + Traits::kQOffset);
    for (int row = warp; row < kRows; row += kWarpsOfQueries) {
      const bool there = row < tile.rows;
      const uint16_t* const q = there
                                    ? params.tensors.q + attention_decode::RowOf(params, tile, row)
                                                             .offset(tile, params.tensors.q_strides)
                                    : params.tensors.q;
#pragma unroll
      for (int i = 0; i < ceil_div(kChunks, kThreadsPerWarp); ++i) {
        const int chunk = i * kThreadsPerWarp + lane_index();
        if (chunk >= kChunks) break;
        const uint32_t to = q_tile + chunk / 8 * Traits::kBoxBytes + row * Traits::kBoxRowBytes +
                            ((chunk ^ row) % 8) * 16;
        const bool given = there && 8 * chunk < params.tensors.dim;
        ptx::cp_async_16_or_zero(to, given ? q + 8 * chunk : params.tensors.q, given);
      }
    }
  }

  // The other warps.
  __device__ __forceinline__ void load_queries(int warp) {
    for (int number = 0;; ++number) {
      const int slot = number % kSegments;
      ptx::mbarrier_wait(shared_address(&state.segment_full[slot]), number / kSegments % 2);
      const bool exists = state.segments[slot].exists != 0;
      if (!exists) return;
      ptx::mbarrier_wait(shared_address(&state.q_empty), number % 2 ^ 1);
      load_rows(state.segments[slot].tile, warp);
      ptx::cp_async_arrive(shared_address(&state.q_full));
      __syncwarp();
      if (lane_index() == 0) ptx::mbarrier_arrive(shared_address(&state.segment_empty[slot]));
    }
  }

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      load_keys();
    } else {
      load_queries(warp - 1);
    }
  }
};

}  // namespace flashmoe::sm90_mla
