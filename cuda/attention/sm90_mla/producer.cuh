// The producer warpgroup. Its first warp loads blocks of keys by the copy engine. The second
// describes segments for all others. The third loads queries in boxes; if they are no boxes, the
// third and fourth load them row by row. The first three walk the block's range independently:
// loads of the first keys are issued before their segment is announced.
//
// A block of keys is loaded in boxes of 64 columns and as many rows as are contiguous wherever in a
// page they begin. The copy engine writes zeros for missing keys: those of an invalid page, and
// those behind the end, whose pages are not looked up.
#pragma once

#include "cuda/attention/sm90_mla/stream_k.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_mla {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The uses of buffers so far, as parities of barriers: one bit per buffer.
struct Uses {
  uint32_t odd = 0;

  // Parities of the barrier that ends the fill of the next use, and of the one that ends the
  // previous use.
  __device__ __forceinline__ uint32_t full_parity(int buffer) const { return odd >> buffer & 1; }
  __device__ __forceinline__ uint32_t empty_parity(int buffer) const {
    return full_parity(buffer) ^ 1;
  }
  __device__ __forceinline__ void next(int buffer) { odd ^= 1u << buffer; }
};

inline constexpr int kWindowBarrier = 13;  // a named barrier of the warps that walk the range

// A coordinate outside every map.
inline constexpr int kNowhere = 1 << 30;

// The existing keys from `key` on in a block whose rows are contiguous.
struct WholeBox {
  int page;  // kNowhere: no key exists
  int row;
  int key;

  // Looks the page up without waiting for it.
  __device__ __forceinline__ void ask(const Params& params, const Described& known,
                                      const int32_t* pages, int first) {
    key = first;
    page = known.batch_k;
    row = known.begin_k + key;
    if (pages == nullptr || key >= known.end) return;
    const KeyTables& keys = params.sequences.keys;
    const int index = keys.by_page_size.quotient(row);
    page = TableNumbers{pages, keys.page_step}.at(index);
    row -= index * keys.page_size;
  }
  // Returns one bit per existing key.
  __device__ __forceinline__ uint64_t check(const Params& params, const Described& known) {
    const int left = known.end - key;
    const bool there = left > 0 && page >= 0 && page < params.sequences.keys.batch_k;
    if (!there) page = kNowhere;
    const uint64_t all = there ? ~uint64_t{0} : 0;
    return all >> (kBlockKeys - min(max(left, 1), kBlockKeys)) & all << max(known.first - key, 0);
  }
};

// The existing keys from `key` on in a block, by this lane's boxes.
struct LaneBoxes {
  static constexpr int kMost = kBlockKeys / kThreadsPerWarp;  // per lane

  int page[kMost];  // kNowhere: no key of the box exists

  static __device__ __forceinline__ uint64_t below(int keys) {
    return keys >= kBlockKeys ? ~uint64_t{0} : (uint64_t{1} << max(keys, 0)) - 1;
  }

  static __device__ __forceinline__ uint64_t between_ends(const Described& known, int key) {
    return below(known.end - key) & ~below(known.first - key);
  }

  // Looks the pages up without waiting: a lookup takes about as long as half a block.
  __device__ __forceinline__ void ask(const Params& params, const Described& known,
                                      const int32_t* pages, int key) {
    const uint64_t valid = between_ends(known, key);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      page[i] = kNowhere;
      if (first >= kBlockKeys || ((below(params.box_rows) << first) & valid) == 0) continue;
      page[i] = known.batch_k;
      if (pages != nullptr) {
        const KeyTables& keys = params.sequences.keys;
        const int index = keys.by_page_size.quotient(known.begin_k + key + first);
        page[i] = TableNumbers{pages, keys.page_step}.at(index);
      }
    }
  }
  // The row of box i, if the box has keys.
  static __device__ __forceinline__ int row(const Params& params, const Described& known, int key,
                                            int i) {
    const int at = known.begin_k + key + (lane_index() + i * kThreadsPerWarp) * params.box_rows;
    if (params.sequences.paged == 0) return at;
    const KeyTables& keys = params.sequences.keys;
    return at - keys.by_page_size.quotient(at) * keys.page_size;
  }
  // Returns one bit per existing key in the boxes of all lanes.
  __device__ __forceinline__ uint64_t check(const Params& params, const Described& known, int key) {
    const uint64_t valid = between_ends(known, key);
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      if (page[i] < 0 || page[i] >= params.sequences.keys.batch_k) page[i] = kNowhere;
      if (page[i] != kNowhere) mine |= (below(params.box_rows) << first) & valid;
    }
    return uint64_t{__reduce_or_sync(kFullWarp, static_cast<uint32_t>(mine >> 32))} << 32 |
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

  __device__ __forceinline__ void load_box(int buffer, int box, const LaneBoxes& boxes,
                                           const int (&rows)[LaneBoxes::kMost]) {
    const uint32_t to = shared_address(memory + Traits::kKOffset) + buffer * Traits::kBlockBytes +
                        box * Traits::kBoxBytes;
    const uint32_t full = shared_address(&state.full[buffer][box]);
    if (lane_index() == 0) ptx::mbarrier_arrive_expect(full, Traits::kBoxBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LaneBoxes::kMost; ++i) {
      const int first = (lane_index() + i * kThreadsPerWarp) * params.box_rows;
      if (first >= kBlockKeys) continue;
      ptx::tma_load(to + first * Traits::kBoxRowBytes, &params.keys, full, policy(),
                    box * Traits::kBoxColumns, rows[i], block.head_kv, boxes.page[i]);
    }
  }

  __device__ __forceinline__ uint64_t policy() const {
    return params.evict_first != 0 ? ptx::kEvictFirst : ptx::kEvictNormal;
  }

  // Waits for room for a box and the later ones of its half.
  __device__ __forceinline__ void wait_for_room(int buffer, int box) {
    if (box % Traits::kBoxesOfHalf != 0 || box == Traits::kSpareBox) return;
    const uint64_t& empty = state.empty[buffer][box / Traits::kBoxesOfHalf];
    ptx::mbarrier_wait(shared_address(&empty), uses.empty_parity(buffer));
  }

  // Loads blocks of keys in boxes of a whole block's rows. One lane issues them, from uniform
  // values: the issue rate bounds the loads.
  __device__ __forceinline__ void load_whole_blocks(const Described& known, const int32_t* pages,
                                                    const KeyRange& part) {
    int key = known.origin() + part.first * kBlockKeys;
    WholeBox next;
    next.ask(params, known, pages, key);
    const int behind = key + (part.end - part.first) * kBlockKeys;
    uint32_t used = 0;
#pragma unroll 1
    for (; key < behind; used ^= 1) {
      WholeBox box = next;
      key += kBlockKeys;
      if (key < behind) next.ask(params, known, pages, key);
      const int buffer = __shfl_sync(kFullWarp, used, 0);
      const uint32_t empty = shared_address(&state.empty[0]) + buffer * sizeof(state.empty[0]);
      ptx::mbarrier_wait(empty, uses.empty_parity(buffer));
      const uint64_t valid = box.check(params, known);
      const int row = __shfl_sync(kFullWarp, box.row, 0);
      const int page = __shfl_sync(kFullWarp, box.page, 0);
      if (ptx::elect_one()) {
        state.valid[buffer] = valid;
#pragma unroll
        for (int i = 0; i < Traits::kBoxes; ++i) {
          if (i == Traits::kBoxesOfHalf) {
            ptx::mbarrier_wait(empty + sizeof(state.empty[0][0]), uses.empty_parity(buffer));
          }
          const uint32_t full = shared_address(&state.full[0][i]) + buffer * sizeof(state.full[0]);
          ptx::mbarrier_arrive_expect(full, Traits::kBoxBytes);
          ptx::tma_load(shared_address(memory + Traits::kKOffset) + i * Traits::kBoxBytes +
                            buffer * Traits::kBlockBytes,
                        &params.keys, full, policy(), i * Traits::kBoxColumns, row, block.head_kv,
                        page);
        }
      }
      __syncwarp();
      uses.next(buffer);
    }
  }

  // Loads blocks of keys in smaller boxes. Each lane has some of them.
  __device__ __forceinline__ void load_blocks(const Described& known, const int32_t* pages,
                                              const KeyRange& part) {
    int key = known.origin() + part.first * kBlockKeys;
    LaneBoxes next;
    next.ask(params, known, pages, key);
    const int behind = key + (part.end - part.first) * kBlockKeys;
#pragma unroll 1
    for (int buffer = 0; key < behind; buffer ^= 1) {
      LaneBoxes boxes = next;
      key += kBlockKeys;
      if (key < behind) next.ask(params, known, pages, key);
      const uint64_t valid = boxes.check(params, known, key - kBlockKeys);
      int rows[LaneBoxes::kMost];
#pragma unroll
      for (int i = 0; i < LaneBoxes::kMost; ++i) {
        rows[i] = LaneBoxes::row(params, known, key - kBlockKeys, i);
      }
      wait_for_room(buffer, 0);
      if (lane_index() == 0) state.valid[buffer] = valid;
#pragma unroll 1
      for (int box = 0; box < Traits::kBoxes; ++box) {
        if (box > 0) wait_for_room(buffer, box);
        load_box(buffer, box, boxes, rows);
      }
      uses.next(buffer);
    }
  }

  // Calls visit(known, sequence, part) for each part of the block's range. Each of the warps that
  // walk the range calls it. With many sequences, one of these warps describes them in a common
  // window.
  template <bool kDescribes, class Visit>
  __device__ __forceinline__ void for_each_part(const Visit& visit) {
    const int count = params.sequences.count;
    Progress at(state.range);
    // With few sequences, the first window is ready already.
    int window = count <= kWindow ? 0 : at.sequence;
    int behind = count <= kThreads ? window + kWindow : at.sequence;
#pragma unroll 1
    while (at.left > 0) {
      if (__builtin_expect(at.sequence == behind, 0)) {
        const int warps = params.query_heads != 0 ? 3 : 2;
        ptx::named_barrier_sync_apart(kWindowBarrier, warps * kThreadsPerWarp);
        window = behind;
        behind += kThreadsPerWarp;
        if constexpr (kDescribes) {
          const int index = window + lane_index();
          if (index < count) state.window[lane_index()] = describe(params, block.row_tile, index);
        }
        ptx::named_barrier_sync_apart(kWindowBarrier, warps * kThreadsPerWarp);
      }
      const Described& known = state.window[at.sequence - window];
      const KeyRange part = at.part(known);
      if (part.first < part.end) visit(known, at.sequence, part);
      at.next(known);
    }
  }

  // The first warp calls it.
  __device__ __forceinline__ void load_keys() {
    for_each_part<false>([&](const Described& known, int sequence, const KeyRange& part) {
      const int32_t* const pages =
          params.sequences.paged != 0 ? params.sequences.keys.pages_of(sequence) : nullptr;
      if (__builtin_expect(params.box_rows == kBlockKeys, 1)) {
        load_whole_blocks(known, pages, part);
      } else {
        load_blocks(known, pages, part);
      }
    });
  }

  // Calls describe(segment) for the next segment in one lane, and announces it.
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

  // The second warp calls it.
  __device__ __forceinline__ void tell_segments() {
    int number = 0;
    const int last = state.range.last;
    for_each_part<true>([&](const Described& known, int sequence, const KeyRange& part) {
      tell(number++, [&](Segment& segment) {
        describe_segment(params, block, last, known, sequence, part, segment);
      });
    });
    tell(number, [](Segment& segment) { segment.exists = 0; });
  }

  __device__ __forceinline__ void load_rows(const attention_decode::TileRows& tile, int warp) {
    constexpr int kChunks = Traits::kBoxes * Traits::kBoxRowBytes / 16;  // per row
    const uint32_t q_tile = shared_address(memory + Traits::kQOffset);
    // Each lane finds the beginning of some rows.
    int64_t begins[kRows / kThreadsPerWarp];
#pragma unroll
    for (int i = 0; i < kRows / kThreadsPerWarp; ++i) {
      const int row = min(i * kThreadsPerWarp + lane_index(), tile.rows - 1);
      begins[i] = attention_decode::RowOf(params, tile, row).offset(tile, params.tensors.q_strides);
    }
    const int rows = tile.rows;
#pragma unroll 2
    for (int row = warp; row < kRows; row += kQueryWarps) {
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

  // The third warp calls it if a tile's rows are boxes. Rows beyond the tile are those of another
  // one, or zeros: they have no effect.
  __device__ __forceinline__ void load_query_boxes() {
    const int first_row = block.row_tile * kRows;
    const int query = params.group.quotient(first_row);
    const int head = (block.head_kv - query) * params.group.number() + first_row;
    uint32_t parity = 1;
    for_each_part<false>([&](const Described& known, int, const KeyRange&) {
      const uint32_t full = shared_address(&state.q_full);
      ptx::mbarrier_wait(shared_address(&state.q_empty), parity);
      parity ^= 1;
      const int row = __shfl_sync(kFullWarp, known.begin_q + query, 0);
      const int batch = __shfl_sync(kFullWarp, known.batch_q, 0);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(full, Traits::kBoxes * Traits::kBoxBytes);
#pragma unroll
        for (int box = 0; box < Traits::kBoxes; ++box) {
          ptx::tma_load(shared_address(memory + Traits::kQOffset) + box * Traits::kBoxBytes,
                        &params.queries, full, ptx::kEvictNormal, box * Traits::kBoxColumns, head,
                        row, batch);
        }
      }
      __syncwarp();
    });
  }

  // Otherwise the warps after the first two call it.
  __device__ __forceinline__ void load_query_rows(int warp) {
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
    } else if (warp == 1) {
      tell_segments();
    } else if (params.query_heads == 0) {
      load_query_rows(warp - 2);
    } else if (warp == 2) {
      load_query_boxes();
    }
  }
};

}  // namespace flashmoe::sm90_mla
