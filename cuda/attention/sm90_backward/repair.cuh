// What the tensor cores made infinite or NaN in a call with bounds, once more by plain arithmetic
// (cuda/attention/backward/masked_fallback.cuh). The main loop has no room to look for it, so
// others look at what goes in: the prologue at Q, dO and the numbers of rows, a warp beside the
// consumers at K and V (watcher.cuh). Behind the main kernel, rows are looked at that share a tile,
// in which not every row sees every key, with something that is not finite: those with a gradient
// that is not finite are computed again. What is added to what is there would be lost then: warps
// leave it out, and mark that.
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

inline constexpr int kRepairBlocks = 132;
inline constexpr int kRowsOfPlace = 16;  // of a warp of the consumers
inline constexpr int kWarpsPerGroup = kThreadsPerGroup / kThreadsPerWarp;

// The first part of a gradient: of all those of dQ, dV and dK.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ int64_t first_part(const CommonParams& params) {
  if (kWanted == Wanted::kDq) return 0;
  const int64_t behind_dq = attention_backward::dq_parts<Traits>(params);
  return behind_dq + (kWanted == Wanted::kDk ? attention_backward::key_parts(params) : 0);
}

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

// One of the places of a part of dQ, as the consumers' warps share them: of what was left out, its
// columns.
template <class Traits>
__device__ __forceinline__ void repair_dq(const CommonParams& params, int64_t part, int place) {
  const int64_t tile = part / Traits::kPanels;
  const auto head_of_all = static_cast<int>(tile / params.tiles_q);
  const auto tile_q = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_q);
  const int batch = head_of_all / params.heads_q;
  const int group = place / kWarpsPerGroup;
  const int first_row = tile_q * Traits::kTileQ + (Traits::kTileQ == 64 ? 0 : 64 * group) +
                        place % kWarpsPerGroup * kRowsOfPlace;
  int first_column = 0;
  int end_column = params.dim;
  if (params.left_out != nullptr) {
    first_column = Traits::kSplitsColumns
                       ? group * Traits::kDqColumns
                       : static_cast<int>(part % Traits::kPanels) * Traits::kPanelColumns;
    end_column = min(first_column + Traits::kDqColumns, params.dim);
  }
  repair_rows<Traits, Wanted::kDq>(
      params, {batch, head_of_all - batch * params.heads_q, first_row,
               min(first_row + kRowsOfPlace, params.seq_q), first_column, end_column});
}

// 16 keys of a tile of dK or dV.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_keys(const CommonParams& params, int64_t part, int place) {
  const int64_t tile = part - first_part<Traits, kWanted>(params);
  const auto head_of_all = static_cast<int>(tile / params.tiles_k);
  const auto tile_k = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_k);
  const int batch = head_of_all / params.heads_kv;
  const int first_row = tile_k * Traits::kTileK + place * kRowsOfPlace;
  repair_rows<Traits, kWanted>(params, {batch, head_of_all - batch * params.heads_kv, first_row,
                                        min(first_row + kRowsOfPlace, params.seq_k), 0,
                                        kWanted == Wanted::kDk ? params.dim : params.dim_v});
}

// Whether a place of a part is to be looked at. Of dQ the first panel stands for all columns, and
// the first consumer for both where they share the columns.
template <class Traits>
__device__ __forceinline__ bool is_at_risk(const CommonParams& params, int64_t part, int place) {
  const int64_t first_key_part = first_part<Traits, Wanted::kDv>(params);
  if (part >= first_key_part) {
    int64_t tile = part - first_key_part;
    const int64_t tiles = attention_backward::key_parts(params);
    if (tile >= tiles) tile -= tiles;
    const auto head_of_all = static_cast<int>(tile / params.tiles_k);
    return is_at_risk_keys<Traits>(params, head_of_all,
                                   static_cast<int>(tile - int64_t{head_of_all} * params.tiles_k));
  }
  if (Traits::kTileQ == 64 && place >= kWarpsPerGroup) return false;
  const int64_t tile = part / Traits::kPanels;
  if (tile * Traits::kPanels != part) return false;
  const auto head_of_all = static_cast<int>(tile / params.tiles_q);
  return is_at_risk_dq<Traits>(params, head_of_all,
                               static_cast<int>(tile - int64_t{head_of_all} * params.tiles_q));
}

// Neighbouring places go to different warps: what is to be computed again lies together.
template <class Traits>
__device__ __forceinline__ void repair(const CommonParams& params, int warp, int warps) {
  static_assert(kPlaces * kRowsOfPlace == Traits::kTileK);
  const int64_t end =
      kPlaces * (first_part<Traits, Wanted::kDk>(params) + attention_backward::key_parts(params));
#pragma unroll 1
  for (int64_t first = warp; first < end; first += int64_t{kThreadsPerWarp} * warps) {
    const int64_t own = first + int64_t{reread::lane_index()} * warps;
    const bool is_own = own < end && (params.left_out != nullptr
                                          ? params.left_out[own] != 0
                                          : is_at_risk<Traits>(params, own / kPlaces,
                                                               static_cast<int>(own % kPlaces)));
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kFullWarp, is_own); left != 0; left &= left - 1) {
      const int64_t found = first + int64_t{__ffs(left) - 1} * warps;
      const int64_t part = found / kPlaces;
      const auto place = static_cast<int>(found % kPlaces);
      if (part < first_part<Traits, Wanted::kDv>(params)) {
        repair_dq<Traits>(params, part, place);
      } else if (part < first_part<Traits, Wanted::kDk>(params)) {
        repair_keys<Traits, Wanted::kDv>(params, part, place);
      } else {
        repair_keys<Traits, Wanted::kDk>(params, part, place);
      }
    }
  }
}

// What comes behind the main kernel: a block for dsinks of each head, where they are wanted, and
// those that repair.
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
    repair<Traits>(params, block * attention_backward::kSinksWarps + reread::warp_index(),
                   (static_cast<int>(gridDim.x) - sinks_blocks) * attention_backward::kSinksWarps);
  }
}

}  // namespace flashmoe::sm90_backward
