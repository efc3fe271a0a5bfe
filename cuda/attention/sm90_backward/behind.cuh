// What comes behind the kernel of attention backward: dsinks, dQ that is written in fp32 or added
// to what is there, and a repair of calls with bounds.
//
// There the tensor cores would spread what is not finite: they multiply what a row does not see by
// 0. The main loop has no room to look for it, so others look at what goes in: the prologue at Q,
// dO and the numbers of rows, a warp beside the consumers at K and V (watcher.cuh). Here rows are
// looked at that share a tile, in which not every row sees every key, with something that is not
// finite. Those with a gradient that is not finite are computed again by plain arithmetic
// (cuda/attention/backward/masked_fallback.cuh). What is added to dV and dK would be lost then:
// warps leave it out, and mark that.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/backward/prologue.cuh"
#include "cuda/attention/backward/sinks.cuh"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::CommonParams;
using attention_backward::Gradient;
using attention_backward::kPlaces;
using attention_backward::Wanted;

inline constexpr int kBehindBlocks = 132;
inline constexpr int kRowsOfPlace = 16;  // of a warp of the consumers
template <class Traits>
inline constexpr int kDqPlaces = Traits::kTileQ / kRowsOfPlace;  // of a tile
inline constexpr int kWarpsPerGroup = kThreadsPerGroup / kThreadsPerWarp;

template <class Traits>
__device__ __forceinline__ bool any_nonfinite_in_queries(const CommonParams& params,
                                                         int head_of_all, int tile_q) {
  constexpr int kBlocks = Traits::kTileQ / attention_backward::kPrologueRows<Traits>;
  const int batch = head_of_all / params.heads_q;
  const int head = head_of_all - batch * params.heads_q;
  const int64_t first = (int64_t{batch} * params.tiles_q + tile_q) * kBlocks;
  bool any = false;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    any = any || params.nonfinite_rows[(first + i) * params.heads_q + head] != 0;
  }
  return any;
}

template <class Traits>
__device__ __forceinline__ bool any_nonfinite_in_keys(const CommonParams& params, int head_of_all,
                                                      int tile_k) {
  const int64_t tile = int64_t{head_of_all} * params.tiles_k + tile_k;
  bool any = false;
#pragma unroll
  for (int i = 0; i < Traits::kCluster; ++i) {
    any = any || params.nonfinite_keys[tile * Traits::kCluster + i] != 0;
  }
  return any;
}

// Whether `any_in` one of the tiles from `first` to `last` that holds a pair which is not seen:
// those before `end_left` and those from `first_right` on.
template <class AnyIn>
__device__ __forceinline__ bool any_in_edges(int first, int last, int end_left, int first_right,
                                             const AnyIn& any_in) {
  for (int tile = first; tile <= last; ++tile) {
    if (tile == max(first, end_left)) tile = max(tile, first_right);
    if (tile <= last && any_in(tile)) return true;
  }
  return false;
}

// Whether what is not finite can have reached a tile of dQ, though not all of its rows see it.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_dq(const CommonParams& params, int head_of_all,
                                              int tile_q) {
  const Parts parts = Parts::of<Traits>(params, tile_q);
  if (parts.first > parts.last) return false;
  if (any_nonfinite_in_queries<Traits>(params, head_of_all, tile_q)) return true;
  const int batch = head_of_all / params.heads_q;
  const int head_kv = (head_of_all - batch * params.heads_q) / params.heads_per_kv;
  const int first_row = tile_q * Traits::kTileQ;
  const int last_row = min(first_row + Traits::kTileQ, params.seq_q) - 1;
  return any_in_edges(
      parts.first, parts.last, ceil_div(params.score.first_key(last_row), Traits::kTileK),
      params.score.end_key(first_row, params.seq_k) / Traits::kTileK, [&](int tile) {
        return any_nonfinite_in_keys<Traits>(params, batch * params.heads_kv + head_kv, tile);
      });
}

// The same of a tile of dK and dV.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_keys(const CommonParams& params, int head_of_all,
                                                int tile_k) {
  const int first_key = tile_k * Traits::kTileK;
  const int last_key = min(first_key + Traits::kTileK, params.seq_k) - 1;
  const int first = params.score.first_query(first_key);
  const int behind = params.score.end_query(last_key, params.seq_q);
  if (first >= behind) return false;
  if (any_nonfinite_in_keys<Traits>(params, head_of_all, tile_k)) return true;
  const int batch = head_of_all / params.heads_kv;
  const int first_head =
      batch * params.heads_q + (head_of_all - batch * params.heads_kv) * params.heads_per_kv;
  return any_in_edges(
      first / Traits::kTileQ, (behind - 1) / Traits::kTileQ,
      ceil_div(params.score.first_query(last_key), Traits::kTileQ),
      params.score.end_query(first_key, params.seq_q) / Traits::kTileQ, [&](int tile) {
        bool any = false;
        for (int head = 0; head < params.heads_per_kv; ++head) {
          any = any || any_nonfinite_in_queries<Traits>(params, first_head + head, tile);
        }
        return any;
      });
}

// Whether one row of a gradient has nothing but finite elements; a whole warp.
template <class Element>
__device__ __forceinline__ bool is_finite_row(const Gradient& gradient, int64_t at, int columns) {
  bool finite = true;
  for (int pair = reread::lane_index(); 2 * pair < columns; pair += kThreadsPerWarp) {
    if (gradient.fp32 != 0) {
      const float2 two = *reinterpret_cast<const float2*>(static_cast<const float*>(gradient.rows) +
                                                          at + 2 * pair);
      finite = finite && isfinite(two.x) && isfinite(two.y);
    } else {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(
          static_cast<const uint16_t*>(gradient.rows) + at + 2 * pair);
      finite = finite && !numeric::any_nonfinite<Element>(two);
    }
  }
  return __all_sync(kFullWarp, finite);
}

// Rows that were left out, or those that are not finite.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_rows(const CommonParams& params,
                                            attention_backward::Part part) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  if (gradient.rows == nullptr) return;
  const int64_t place = part.batch * gradient.strides.batch + part.head * gradient.strides.head;
  const int end_row = part.end_row;
#pragma unroll 1
  for (int row = part.first_row; row < end_row; ++row) {
    if (params.left_out == nullptr &&
        is_finite_row<typename Traits::Element>(gradient, place + row * gradient.strides.seq,
                                                part.end_column)) {
      continue;
    }
    part.first_row = row;
    part.end_row = row + 1;
    attention_backward::masked_fallback<Traits, kWanted>(params, part);
  }
}

// 16 rows of a tile of dQ.
template <class Traits>
__device__ __forceinline__ void repair_dq(const CommonParams& params, int64_t place) {
  const int64_t tile = place / kDqPlaces<Traits>;
  const auto head_of_all = static_cast<int>(tile / params.tiles_q);
  const auto tile_q = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_q);
  const int batch = head_of_all / params.heads_q;
  const int first_row =
      tile_q * Traits::kTileQ + static_cast<int>(place - tile * kDqPlaces<Traits>) * kRowsOfPlace;
  repair_rows<Traits, Wanted::kDq>(params,
                                   {batch, head_of_all - batch * params.heads_q, first_row,
                                    min(first_row + kRowsOfPlace, params.seq_q), 0, params.dim});
}

// 16 keys of a tile of dV or dK.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_keys(const CommonParams& params, int64_t place) {
  const int64_t tile = place / kPlaces;
  const auto head_of_all = static_cast<int>(tile / params.tiles_k);
  const auto tile_k = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_k);
  const int batch = head_of_all / params.heads_kv;
  const int first_row = tile_k * Traits::kTileK + static_cast<int>(place % kPlaces) * kRowsOfPlace;
  repair_rows<Traits, kWanted>(params, {batch, head_of_all - batch * params.heads_kv, first_row,
                                        min(first_row + kRowsOfPlace, params.seq_k), 0,
                                        kWanted == Wanted::kDk ? params.dim : params.dim_v});
}

// Neighbouring places go to different warps: what is to be computed again lies together.
template <class Traits>
__device__ __forceinline__ void repair(const CommonParams& params, int warp, int warps) {
  static_assert(kPlaces * kRowsOfPlace == Traits::kTileK);
  const int64_t heads = int64_t{params.batch} * params.heads_q;
  const int64_t of_dq =
      attention_backward::sums_dq(params) ? 0 : heads * params.tiles_q * kDqPlaces<Traits>;
  const int64_t of_keys = attention_backward::key_tiles(params) * kPlaces;  // of dV, and of dK
  const int64_t end = of_dq + 2 * of_keys;
  const auto is_repaired = [&](int64_t place) {
    if (place >= end) return false;
    if (place < of_dq) {
      const int64_t tile = place / kDqPlaces<Traits>;
      const auto head = static_cast<int>(tile / params.tiles_q);
      return is_at_risk_dq<Traits>(params, head,
                                   static_cast<int>(tile - int64_t{head} * params.tiles_q));
    }
    place -= of_dq;
    if (params.left_out != nullptr) return params.left_out[place] != 0;
    if (place >= of_keys) place -= of_keys;
    const int64_t tile = place / kPlaces;
    const auto head = static_cast<int>(tile / params.tiles_k);
    return is_at_risk_keys<Traits>(params, head,
                                   static_cast<int>(tile - int64_t{head} * params.tiles_k));
  };
#pragma unroll 1
  for (int64_t first = warp; first < end; first += int64_t{kThreadsPerWarp} * warps) {
    const bool is_own = is_repaired(first + int64_t{reread::lane_index()} * warps);
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kFullWarp, is_own); left != 0; left &= left - 1) {
      const int64_t place = first + int64_t{__ffs(left) - 1} * warps;
      if (place < of_dq) {
        repair_dq<Traits>(params, place);
      } else if (place < of_dq + of_keys) {
        repair_keys<Traits, Wanted::kDv>(params, place - of_dq);
      } else {
        repair_keys<Traits, Wanted::kDk>(params, place - of_dq - of_keys);
      }
    }
  }
}

// dQ that the kernel has left as sums: a warp takes what one of the consumers has left of a part,
// fragments of 16 rows.
template <class Traits>
__device__ __forceinline__ void write_sums(const CommonParams& params, int warp, int warps) {
  constexpr int kWarpsOfPart = (Traits::kInPanels ? 1 : kConsumers) * kWarpsPerGroup;
  constexpr int kChunks = Traits::kDqRegisters / 4;
  static_assert(kWarpsOfPart * kThreadsPerWarp * Traits::kDqRegisters ==
                Traits::kTileQ * Traits::kPanelColumns);
  const Gradient& dq = params.dq_rows;
  const bool bounded = params.nonfinite_rows != nullptr;
  const int64_t tiles = int64_t{params.batch} * params.heads_q * params.tiles_q;
  const int lane = reread::lane_index();
#pragma unroll 1
  for (int64_t own = warp; own < tiles * Traits::kPanels * kWarpsOfPart; own += warps) {
    const int64_t part = own / kWarpsOfPart;
    const auto warp_of_part = static_cast<int>(own - part * kWarpsOfPart);
    const int64_t tile = part / Traits::kPanels;
    const auto head_of_all = static_cast<int>(tile / params.tiles_q);
    const auto tile_q = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_q);
    const Parts parts = Parts::of<Traits>(params, tile_q);
    if (parts.first > parts.last) continue;
    const int batch = head_of_all / params.heads_q;
    const int head = head_of_all - batch * params.heads_q;
    const int group = warp_of_part / kWarpsPerGroup;
    const int first_row = tile_q * Traits::kTileQ + (Traits::kTileQ == 64 ? 0 : 64 * group) +
                          warp_of_part % kWarpsPerGroup * kRowsOfPlace;
    const int first_column =
        Traits::kSplitsColumns
            ? group * Traits::kDqColumns
            : static_cast<int>(part - tile * Traits::kPanels) * Traits::kPanelColumns;
    const float* const sums = params.dq_sums + part * (Traits::kTileQ * Traits::kPanelColumns) +
                              group * (Traits::kDqBytesPerGroup / 4) +
                              (warp_of_part % kWarpsPerGroup * kThreadsPerWarp + lane) * 4;
    float4 values[kChunks];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      values[i] = *reinterpret_cast<const float4*>(sums + i * (4 * kThreadsPerGroup));
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      finite = finite && isfinite(values[i].x) && isfinite(values[i].y) && isfinite(values[i].z) &&
               isfinite(values[i].w);
    }
    if (bounded && !__all_sync(kFullWarp, finite)) {
      attention_backward::masked_fallback<Traits, Wanted::kDq>(
          params, {batch, head, first_row, min(first_row + kRowsOfPlace, params.seq_q),
                   first_column, min(first_column + Traits::kDqColumns, params.dim)});
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + 8 * half;
      if (row >= params.seq_q) continue;
      const int64_t at = batch * dq.strides.batch + head * dq.strides.head + row * dq.strides.seq;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int column = first_column + 8 * i + 2 * (lane % 4);
        if (column >= params.dim) continue;
        attention_backward::store_pair<typename Traits::Element>(
            dq, at + column, params.accumulate != 0,
            (half == 0 ? values[i].x : values[i].z) * params.scale,
            (half == 0 ? values[i].y : values[i].w) * params.scale);
      }
    }
  }
}

// What comes behind the main kernel: a block for dsinks of each head, where they are wanted, and
// those that write dQ which was left as sums, and repair.
template <class Traits>
__global__ void __launch_bounds__(attention_backward::kSinksThreads, 1)
    attention_backward_behind(const __grid_constant__ CommonParams params) {
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  const int sinks_blocks = params.dsinks != nullptr ? params.heads_q : 0;
  const int block = static_cast<int>(blockIdx.x) - sinks_blocks;
  if (block < 0) {
    attention_backward::sum_sink_gradient<Traits>(params, static_cast<int>(blockIdx.x));
  } else {
    const int warp = block * attention_backward::kSinksWarps + reread::warp_index();
    const int warps =
        (static_cast<int>(gridDim.x) - sinks_blocks) * attention_backward::kSinksWarps;
    if (attention_backward::sums_dq(params)) write_sums<Traits>(params, warp, warps);
    if (params.nonfinite_rows != nullptr) repair<Traits>(params, warp, warps);
  }
}

}  // namespace flashmoe::sm90_backward
