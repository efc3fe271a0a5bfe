// The warpgroup that brings keys and queries to shared memory. Its first warp finds the segments
// and loads blocks of keys by the copy engine, the others load queries.
//
// A block of keys is loaded in boxes of 64 columns and as many rows as lie in one piece whatever
// page they begin in. The copy engine writes zeros for keys that there are not: those of a page
// that is none, and those behind the end, whose pages are not looked up.
#pragma once

#include "cuda/attention/sm90_mla/share.cuh"
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
  uint64_t valid;  // of all lanes, once checked: until then keys that are not behind the ends

  static __device__ __forceinline__ uint64_t below(int keys) {
    return keys >= kBlockKeys ? ~uint64_t{0} : (uint64_t{1} << max(keys, 0)) - 1;
  }

  // Looks the pages up, but waits for none: a lookup takes about as long as half a block.
  __device__ __forceinline__ void ask(const Params& params, const Described& known,
                                      const int32_t* pages, int key) {
    valid = below(known.end - key) & ~below(known.first - key);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      page[i] = kNowhere;
      row[i] = 0;
      if (first >= kBlockKeys || ((below(params.box_rows) << first) & valid) == 0) continue;
      const int at = known.begin_k + key + first;
      page[i] = known.batch_k;
      row[i] = at;
      if (pages != nullptr) {
        const KeyTables& keys = params.sequences.keys;
        const int index = keys.by_page_size.quotient(at);
        page[i] = TableNumbers{pages, keys.page_step}.at(index);
        row[i] = at - index * keys.page_size;
      }
    }
  }
  __device__ __forceinline__ void check(const Params& params) {
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      if (page[i] < 0 || page[i] >= params.sequences.keys.batch_k) page[i] = kNowhere;
      if (page[i] != kNowhere) mine |= (below(params.box_rows) << first) & valid;
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
  BlockPlace block;
  Uses uses;

  __device__ __forceinline__ void load_whole_box(int buffer, int box, int head_kv, int row,
                                                 int page, uint64_t policy) {
    const uint32_t to = shared_address(memory + Traits::kKOffset) + buffer * Traits::kBlockBytes +
                        box * Traits::kBoxBytes;
    const uint32_t full = shared_address(&state.full[buffer][box]);
    const int column = box * Traits::kBoxColumns;
    ptx::mbarrier_arrive_expect(full, Traits::kBoxBytes);
    ptx::tma_load(to, &params.keys, full, policy, column, row, head_kv, page);
  }

  __device__ __forceinline__ void load_box(int buffer, int box, int head_kv, const LaneBoxes& boxes,
                                           uint64_t policy) {
    const uint32_t to = shared_address(memory + Traits::kKOffset) + buffer * Traits::kBlockBytes +
                        box * Traits::kBoxBytes;
    const uint32_t full = shared_address(&state.full[buffer][box]);
    if (lane_index() == 0) ptx::mbarrier_arrive_expect(full, Traits::kBoxBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LaneBoxes::kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      if (first >= kBlockKeys) continue;
      const uint32_t rows = to + first * Traits::kBoxRowBytes;
      const int column = box * Traits::kBoxColumns;
      ptx::tma_load(rows, &params.keys, full, policy, column, boxes.row[i], head_kv, boxes.page[i]);
    }
  }

  // For a box, and those behind it in its half.
  __device__ __forceinline__ void wait_for_room(int buffer, int box) {
    if (box % Traits::kBoxesOfHalf != 0 || box == Traits::kSpareBox) return;
    const uint64_t& empty = state.empty[buffer][box / Traits::kBoxesOfHalf];
    ptx::mbarrier_wait(shared_address(&empty), uses.empty_parity(buffer));
  }

  __device__ __forceinline__ void load_block(int buffer, int head_kv, const LaneBoxes& boxes,
                                             uint64_t policy) {
    wait_for_room(buffer, 0);
    if (lane_index() == 0) state.valid[buffer] = boxes.valid;
    if (params.box_rows == kBlockKeys) {
      // By one lane, with what all lanes agree on: the loads are bound by how fast it sends them.
      const int row = __shfl_sync(kFullWarp, boxes.row[0], 0);
      const int page = __shfl_sync(kFullWarp, boxes.page[0], 0);
      if (lane_index() == 0) {
#pragma unroll
        for (int box = 0; box < Traits::kBoxes; ++box) {
          if (box > 0) wait_for_room(buffer, box);
          load_whole_box(buffer, box, head_kv, row, page, policy);
        }
      }
      __syncwarp();
    } else {
#pragma unroll 1
      for (int box = 0; box < Traits::kBoxes; ++box) {
        if (box > 0) wait_for_room(buffer, box);
        load_box(buffer, box, head_kv, boxes, policy);
      }
    }
    uses.next(buffer);
  }

  // Calls tell() for it, too.
  template <class Tell>
  __device__ __forceinline__ void load_segment(const Described& known, int sequence,
                                               const KeyRange& part, const Tell& tell) {
    const uint64_t policy = params.read_once != 0 ? ptx::kEvictFirst : ptx::kEvictNormal;
    const int32_t* const pages =
        params.sequences.paged != 0 ? params.sequences.keys.pages_of(sequence) : nullptr;
    int key = known.origin() + part.first * kBlockKeys;
    LaneBoxes next;
    next.ask(params, known, pages, key);
    tell();
#pragma unroll 1
    for (int b = 0; b < part.end - part.first; ++b) {
      LaneBoxes boxes = next;
      key += kBlockKeys;
      if (b + 1 < part.end - part.first) next.ask(params, known, pages, key);
      boxes.check(params);
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
    // The first window is there already, if sequences are few.
    const bool few = params.sequences.count <= kThreads;
    int window = state.share.sequence - (few ? 0 : kThreadsPerWarp);
    for (int sequence = state.share.sequence; at < state.share.end; ++sequence) {
      if (window + kThreadsPerWarp <= sequence) {
        window = sequence;
        const int index = sequence + lane_index();
        __syncwarp();
        if (index < params.sequences.count) {
          state.window[lane_index()] = describe(params, block.row_tile, index);
        }
        __syncwarp();
      }
      const Described& known = state.window[sequence - window];
      const KeyRange part = part_of(state.share, known, at);
      if (part.first < part.end) {
        load_segment(known, sequence, part, [&] {
          tell(number++, [&](Segment& segment) {
            describe_segment(params, block, state.share, known, sequence, at, segment);
          });
        });
      }
      at += known.weight();
    }
    tell(number, [](Segment& segment) { segment.exists = 0; });
  }

  __device__ __forceinline__ void load_rows(const attention_decode::TileRows& tile, int warp) {
    constexpr int kWarpsOfQueries = kQueryThreads / kThreadsPerWarp;
    constexpr int kChunks = Traits::kBoxes * Traits::kBoxRowBytes / 16;  // of a row
    const uint32_t q_tile = shared_address(memory + Traits::kQOffset);
    // Where rows begin each lane finds of some.
    int64_t begins[kRows / kThreadsPerWarp];
#pragma unroll
    for (int i = 0; i < kRows / kThreadsPerWarp; ++i) {
      const int row = min(i * kThreadsPerWarp + lane_index(), tile.rows - 1);
      begins[i] = attention_decode::RowOf(params, tile, row).offset(tile, params.tensors.q_strides);
    }
    const int rows = tile.rows;
#pragma unroll 2
    for (int row = warp; row < kRows; row += kWarpsOfQueries) {
      const int64_t begin =
          __shfl_sync(kFullWarp, row < kThreadsPerWarp ? begins[0] : begins[1], row);
#pragma unroll
      for (int i = 0; i < ceil_div(kChunks, kThreadsPerWarp); ++i) {
        const int chunk = i * kThreadsPerWarp + lane_index();
        if (chunk >= kChunks) break;
        const uint32_t to = q_tile + chunk / 8 * Traits::kBoxBytes + row * Traits::kBoxRowBytes +
                            ((chunk ^ row) % 8) * 16;
        const bool given = row < rows && 8 * chunk < params.tensors.dim;
        ptx::cp_async_16_or_zero(to, params.tensors.q + (given ? begin + 8 * chunk : 0), given);
      }
    }
  }

  // By one thread. Rows that the tile has not are another's, or zeros: nothing comes of them.
  __device__ __forceinline__ void load_query_boxes(const attention_decode::TileRows& tile) {
    const uint32_t full = shared_address(&state.q_full);
    ptx::mbarrier_arrive_expect(full, Traits::kBoxes * Traits::kBoxBytes);
    const attention_decode::RowOf first(params, tile, 0);
    const uint32_t to = shared_address(memory + Traits::kQOffset);
#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::tma_load(to + box * Traits::kBoxBytes, &params.queries, full, ptx::kEvictNormal,
                    box * Traits::kBoxColumns, first.head, tile.begin_q + first.query, tile.batch);
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
      if (params.query_heads != 0) {
        if (warp == 0 && lane_index() == 0) load_query_boxes(state.segments[slot].tile);
      } else {
        load_rows(state.segments[slot].tile, warp);
        ptx::cp_async_arrive(shared_address(&state.q_full));
      }
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
