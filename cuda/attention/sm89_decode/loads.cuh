// Keys and values of a step, wherever their rows are: from global memory directly to the fragments
// of the few-row kernels (few_rows/products.cuh).
//
// A lane looks up one key of the step: its page, if there are pages, and where its rows of K and V
// begin. The lanes that load the key get this by a shuffle. So pages may have any size, and a page
// number is read once per key and warp.
#pragma once

#include <type_traits>

#include "cuda/attention/sm89_decode/cache.cuh"
#include "cuda/attention/sm89_decode/stream_k.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/generic.cuh"

namespace flashmoe::sm89_decode {

// A step's keys: the rows of the key that this lane has looked up, and one bit for each existing
// key. A missing key has the rows of the first existing one, if any: loads need no condition, and
// their data is hidden or cleared.
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

// Loads the page number of this lane's key of a step, or gives the row of the batch without pages.
// Nothing may depend on it here, not even whether it is loaded: using a loaded number waits for it,
// after all loads in flight, and this one is requested a step ahead. So a lane without a key also
// loads, from an address in shared memory that all have. `keys` is a copy of the segment's.
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

// `asked` is the result of ask_page().
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
  const int head_kv = segment.tile.head_kv + head_of_warp<Traits>(params);
  const auto offset_of = [&](const ChunkStrides& strides) {
    return static_cast<uint32_t>(page) * strides.page + static_cast<uint32_t>(row) * strides.row +
           static_cast<uint32_t>(head_kv) * strides.head;
  };
  Step found = {offset_of(params.k_chunks), offset_of(params.v_chunks),
                __ballot_sync(kFullWarp, there), factors_of<Traits>(params, page, head_kv)};
  if (found.valid != kAllValid<Traits>) {
    const int first = max(__ffs(static_cast<int>(found.valid)) - 1, 0);
    const uint32_t k = __shfl_sync(kFullWarp, found.k, first);
    const uint32_t v = __shfl_sync(kFullWarp, found.v, first);
    if (!there) found.k = k, found.v = v;
  }
  return found;
}

// For fp8: loads this lane's part of the rows that lanes have looked up, `rows`: key key_of(i) from
// column Layout::column() on. A missing key or column reads another's data, which is cleared before
// use. A conditional load would make the compiler wait at once, to merge the result with the old
// value.
template <class Traits, class Layout, class Words, class KeyOf>
__device__ __forceinline__ void load_fp8(Words& words, const void* data, int dim, const Step& step,
                                         uint32_t rows, const KeyOf& key_of) {
  constexpr int kKeys = static_cast<int>(std::extent_v<Words>);
  constexpr int kColumns = 4 * Layout::kWords;  // per load
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

// Queries of a KV head of a tile in shared memory, as lanes hold them: [row blocks][chunks][lanes].
// Those of the tile's next head follow.
template <class Traits>
struct Queries {
  unsigned char* base;

  __device__ __forceinline__ uint4* chunk(int n, int c) const {
    return reinterpret_cast<uint4*>(base) + (n * Traits::kKChunks + c) * kThreadsPerWarp +
           lane_index();
  }
};

// Issues copies of a tile's queries: chunk c of row 8n + g, or zeros if the row is missing. If
// other warps suffice, the first warps do not take part: they load the first keys of a range. Nor
// does the last warp, which finds its second segment. Copies are issued before the keys, behind
// which queries would arrive last.
template <class Traits>
__device__ __forceinline__ void send_for_q(const Params& params, const TileRows& tile,
                                           const Queries<Traits>& queries) {
  const int lane = lane_index();
  constexpr int kChunks = Traits::kRowBlocks * Traits::kKChunks;  // of a KV head
  for (int i = (2 * kWarps - 2 - warp_index()) % kWarps;
       i < kChunks << tile_heads_log2<Traits>(params); i += kWarps) {
    const int head = i / kChunks;
    const int n = i % kChunks / Traits::kKChunks;
    const int c = i % Traits::kKChunks;
    const int row = 8 * n + lane / 4;
    const int column = 32 * c + 8 * (lane % 4);
    const uint16_t* const q = params.tensors.q + column +
                              RowOf(params, tile, row, head).offset(tile, params.tensors.q_strides);
    const Queries<Traits> of_head = {queries.base + head * Traits::kQueryHeadBytes};
    ptx::cp_async_16_or_zero(static_cast<uint32_t>(__cvta_generic_to_shared(of_head.chunk(n, c))),
                             q, row < tile.rows && column < params.tensors.dim);
  }
  ptx::cp_async_commit();
}

// Loads the queries that a lane keeps in registers.
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

// Masks the missing keys of a step, and those that a row does not see.
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
