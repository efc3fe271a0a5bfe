// Keys and values of a step, wherever their rows are: from global memory straight to the fragments
// of the few-row kernels (few_rows/products.cuh).
//
// A lane looks up one key of the step: its page, if there are pages, and where its rows of K and V
// begin. The lanes that load these get it by a shuffle. So pages may be of any size, and a page's
// number is read once a key and warp.
#pragma once

#include <type_traits>

#include "cuda/attention/sm89_decode/cache.cuh"
#include "cuda/attention/sm89_decode/share.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/generic.cuh"

namespace flashmoe::sm89_decode {

// A step's keys as this lane looked one up, and which of them there are: a bit for each. One that
// there is not has the rows of the first one that there is, if any: loads need no condition, and
// what they bring of it is hidden or cleared.
struct Step {
  uint32_t k;  // in chunks of 16 bytes
  uint32_t v;
  uint32_t valid;
  Factors factors;  // of that key
};

// Whether this lane looks up a key of a step.
template <class Traits>
__device__ __forceinline__ bool has_key(const SegmentKeys& keys, int step) {
  const int key = step + lane_index();
  return key >= keys.first && key < keys.end && lane_index() < Traits::kStepKeys;
}

// What the page table has for this lane's key of a step; the row of the batch, where there are no
// pages. Nothing depends on it here, not even whether it is loaded: a number that is looked at is
// waited for, behind all loads that are on their way, and this one is asked for a step ahead. So a
// lane without a key asks, too, for what all have in shared memory. `keys` is a copy of what
// `segment` has.
template <class Traits>
__device__ __forceinline__ int ask_page(const Params& params, const Segment& segment,
                                        const SegmentKeys& keys, int step) {
  const KeyTables& tables = params.sequences.keys;
  const int32_t* at = &segment.keys.batch_k;
  if (keys.pages != nullptr && has_key<Traits>(keys, step)) {
    at = keys.pages +
         tables.by_page_size.quotient(keys.begin_k + step + lane_index()) * tables.page_step;
  }
  return ptx::load_anywhere(at);
}

// `asked` is what ask_page() brought.
template <class Traits>
__device__ __forceinline__ Step find_rows(const Params& params, const Segment& segment, int step,
                                          int asked) {
  const KeyTables& tables = params.sequences.keys;
  const SegmentKeys keys = segment.keys;
  int row = keys.begin_k + step + lane_index();
  bool there = has_key<Traits>(keys, step);
  if (keys.pages != nullptr) {
    row -= tables.by_page_size.quotient(row) * tables.page_size;
    there = there && asked >= 0 && asked < tables.batch_k;
  }
  const int page = there ? asked : -1;
  const auto offset_of = [&](const ChunkStrides& strides) {
    return static_cast<uint32_t>(page) * strides.page + static_cast<uint32_t>(row) * strides.row +
           static_cast<uint32_t>(segment.tile.head_kv) * strides.head;
  };
  Step found = {offset_of(params.k_chunks), offset_of(params.v_chunks),
                __ballot_sync(kFullWarp, there),
                factors_of<Traits>(params, page, segment.tile.head_kv)};
  if (found.valid != kAllValid<Traits>) {
    const int first = max(__ffs(static_cast<int>(found.valid)) - 1, 0);
    const uint32_t k = __shfl_sync(kFullWarp, found.k, first);
    const uint32_t v = __shfl_sync(kFullWarp, found.v, first);
    if (!there) found.k = k, found.v = v;
  }
  return found;
}

// Of fp8: what this lane has of the rows that lanes have looked up, `rows`: of key key_of(i) from
// Layout::column() on. Where there is no such key or column it is what another one has, which is
// cleared before it is used: for a load under a condition the compiler waits at once, to merge what
// it brings with what was there.
template <class Traits, class Layout, class Words, class KeyOf>
__device__ __forceinline__ void load_fp8(Words& words, const void* data, int dim, const Step& step,
                                         uint32_t rows, const KeyOf& key_of) {
  constexpr int kKeys = static_cast<int>(std::extent_v<Words>);
  constexpr int kColumns = 4 * Layout::kWords;  // of a load
  const uint8_t* const base = static_cast<const uint8_t*>(data) + Layout::column();
  if (dim % kColumns == 0) {
    if (step.valid == 0) return;
    uint32_t row[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) row[i] = __shfl_sync(kFullWarp, rows, key_of(i));
#pragma unroll
    for (int c = 0; c < Layout::kLoads; ++c) {
      const bool there = Layout::column() + Layout::kStep * c < dim;
      const uint8_t* const at =
          there ? base + Layout::kStep * c : static_cast<const uint8_t*>(data);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) ptx::load_streaming(words[i][c], row_at(at, row[i]));
    }
  } else {
    // Some lane has half a load.
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const bool there = (step.valid >> key_of(i) & 1) != 0;
      const uint8_t* const row = row_at(base, __shfl_sync(kFullWarp, rows, key_of(i)));
#pragma unroll
      for (int c = 0; c < Layout::kLoads; ++c) {
        const int columns = dim - Layout::kStep * c - Layout::column();
        load_columns(words[i][c], row + Layout::kStep * c, there ? columns : 0);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void load_k(CachedK<Traits>& fragments, const Params& params,
                                       const Step& step) {
  using Cached = CachedElement<Traits>;
  using Layout = KLayout<Traits>;
  if constexpr (Traits::kFp8) {
    load_fp8<Traits, Layout>(fragments, params.tensors.k, params.tensors.dim, step, step.k,
                             [](int i) { return 8 * i + lane_index() / 4; });
    return;
  }
  const int lane = lane_index();
  const Cached* const base = reinterpret_cast<const Cached*>(params.tensors.k) + Layout::column();
  if (step.valid == 0) return;
  if (params.tensors.dim == Traits::kDim) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
      const Cached* const k = row_at(base, __shfl_sync(kFullWarp, step.k, 8 * i + lane / 4));
#pragma unroll
      for (int c = 0; c < Layout::kLoads; ++c) {
        ptx::load_streaming(fragments[i][c], k + Layout::kStep * c);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 8; ++i) {
      const Cached* const k = row_at(base, __shfl_sync(kFullWarp, step.k, 8 * i + lane / 4));
#pragma unroll
      for (int c = 0; c < Layout::kLoads; ++c) {
        const int columns = params.tensors.dim - Layout::kStep * c - Layout::column();
        load_columns(fragments[i][c], k + Layout::kStep * c, columns);
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void load_v(CachedV<Traits>& fragments, const Params& params,
                                       const Step& step) {
  using Cached = CachedElement<Traits>;
  using Layout = VLayout<Traits>;
  if constexpr (Traits::kFp8) {
    load_fp8<Traits, Layout>(fragments, params.tensors.v, params.tensors.dim_v, step, step.v,
                             [](int i) { return few_rows::v_key(i) + 2 * (lane_index() % 4); });
    return;
  }
  const int lane = lane_index();
  const Cached* const base = reinterpret_cast<const Cached*>(params.tensors.v) + Layout::column();
  if (step.valid == 0) return;
  if (params.tensors.dim_v == Traits::kDimV) {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
      const int key = few_rows::v_key(i) + 2 * (lane % 4);
      const Cached* const v = row_at(base, __shfl_sync(kFullWarp, step.v, key));
#pragma unroll
      for (int c = 0; c < Layout::kLoads; ++c) {
        ptx::load_streaming(fragments[i][c], v + Layout::kStep * c);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Traits::kStepKeys / 4; ++i) {
      const int key = few_rows::v_key(i) + 2 * (lane % 4);
      const Cached* const v = row_at(base, __shfl_sync(kFullWarp, step.v, key));
#pragma unroll
      for (int c = 0; c < Layout::kLoads; ++c) {
        const int columns = params.tensors.dim_v - Layout::kStep * c - Layout::column();
        load_columns(fragments[i][c], v + Layout::kStep * c, columns);
      }
    }
  }
}

// Queries of a tile in shared memory, as lanes hold them: [row blocks][chunks][lanes].
template <class Traits>
struct Queries {
  unsigned char* base;

  __device__ __forceinline__ uint4* chunk(int n, int c) const {
    return reinterpret_cast<uint4*>(base) + (n * Traits::kKChunks + c) * kThreadsPerWarp +
           lane_index();
  }
};

// Sends for a tile's queries, zeros where there are no such rows: of row 8n + g chunk c. Not by the
// first warps, if the others are enough, which send for the first keys of a share, nor by the last,
// which finds its second segment: and in front of keys, behind which queries would come last.
template <class Traits>
__device__ __forceinline__ void send_for_q(const Params& params, const TileRows& tile,
                                           const Queries<Traits>& queries) {
  const int lane = lane_index();
  for (int i = (2 * kWarps - 2 - warp_index()) % kWarps; i < Traits::kRowBlocks * Traits::kKChunks;
       i += kWarps) {
    const int n = i / Traits::kKChunks;
    const int c = i % Traits::kKChunks;
    const int row = 8 * n + lane / 4;
    const int column = 32 * c + 8 * (lane % 4);
    const uint16_t* const q =
        params.tensors.q + column + RowOf(params, tile, row).offset(tile, params.tensors.q_strides);
    ptx::cp_async_16_or_zero(static_cast<uint32_t>(__cvta_generic_to_shared(queries.chunk(n, c))),
                             q, row < tile.rows && column < params.tensors.dim);
  }
  ptx::cp_async_commit();
}

// Those that a lane keeps in registers.
template <class Traits>
__device__ __forceinline__ void load_q(few_rows::QFragments<Traits>& q,
                                       const Queries<Traits>& queries) {
  if constexpr (Traits::kQueriesInRegisters) {
#pragma unroll
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < Traits::kKChunks; ++c) {
        const uint4 chunk = *queries.chunk(n, c);
        q[n][c][0] = chunk.x, q[n][c][1] = chunk.y, q[n][c][2] = chunk.z, q[n][c][3] = chunk.w;
      }
    }
  }
}

// Hides the keys of a step that there are not, and those that a row does not see.
template <class Traits>
__device__ __forceinline__ void mask_step(few_rows::Scores<Traits>& scores, const Params& params,
                                          const TileRows& tile, int first_key, uint32_t valid) {
  using Fragments = few_rows::Fragments<Traits>;
  const int lane = lane_index();
  const int key = first_key + lane / 4;
  mask_scores<Fragments>(scores, [&](int r) {
    const KeyRange keys =
        RowOf(params, tile, 2 * (lane % 4) + Fragments::row_of(r)).keys(params, tile);
    return [keys, key, lane, valid](int i) {
      const bool there = (valid >> (lane / 4 + Fragments::key_of(i)) & 1) != 0;
      const int at = key + Fragments::key_of(i);
      return there && at >= keys.first && at < keys.end;
    };
  });
}

}  // namespace flashmoe::sm89_decode
