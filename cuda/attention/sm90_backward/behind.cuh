// What comes behind the kernel of attention backward: dsinks, dQ that is written in fp32 or added
// to what is there, and a repair of calls with bounds.
//
// In those the tensor cores spread what is not finite: they multiply what a row does not see by 0.
// The kernel does not look for it. It shows here, since it spreads to all 64 rows of a warpgroup's
// tile, to dQ from K and V, to dK and dV from Q, dO and the numbers of rows. So one row of each is
// looked at, and if that is not finite, at what the tile shares where not every pair is seen; then
// rows that are not finite are computed again by plain arithmetic
// (cuda/attention/backward/masked_fallback.cuh). Rows that see no key, and keys that no row sees,
// are looked at themselves. What is added to dV and dK would be lost: warps of the kernel leave it
// out, and mark that.
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
inline constexpr int kRowsOfTile = 64;   // of a warpgroup
template <class Traits>
inline constexpr int kDqPlaces = Traits::kTileQ / kRowsOfPlace;  // of a tile
inline constexpr int kWarpsPerGroup = kThreadsPerGroup / kThreadsPerWarp;
inline constexpr int kLanesOfPlace = 4;
inline constexpr int kPlacesOfWarp = kThreadsPerWarp / kLanesOfPlace;  // at once

// Whether `columns` elements of a row are not all finite, as far as this one of `lanes` sees.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(const uint16_t* row, int columns, int lane,
                                              int lanes) {
  uint32_t gathered = 0;
  for (int column = 8 * lane; column < columns; column += 8 * lanes) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + column);
    gathered = numeric::gather_nonfinite<Element>(gathered, chunk.x);
    gathered = numeric::gather_nonfinite<Element>(gathered, chunk.y);
    gathered = numeric::gather_nonfinite<Element>(gathered, chunk.z);
    gathered = numeric::gather_nonfinite<Element>(gathered, chunk.w);
  }
  return numeric::any_nonfinite<Element>(gathered);
}
__device__ __forceinline__ bool any_nonfinite(const float* row, int columns, int lane, int lanes) {
  bool any = false;
  for (int column = 4 * lane; column < columns; column += 4 * lanes) {
    const float4 chunk = *reinterpret_cast<const float4*>(row + column);
    any =
        any || !isfinite(chunk.x) || !isfinite(chunk.y) || !isfinite(chunk.z) || !isfinite(chunk.w);
  }
  return any;
}

// The same of a row of a gradient.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(const Gradient& gradient, int64_t at, int columns,
                                              int lane, int lanes) {
  return gradient.fp32 != 0
             ? any_nonfinite(static_cast<const float*>(gradient.rows) + at, columns, lane, lanes)
             : any_nonfinite<Element>(static_cast<const uint16_t*>(gradient.rows) + at, columns,
                                      lane, lanes);
}

// 16 rows of dQ, or keys of dK and dV, of those that exist.
struct Place {
  int batch;
  int head;
  int first_row;
  int end_row;
  int sample;  // a row of the same 64

  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ Place at(const CommonParams& params, int64_t number) {
    constexpr bool kOfQueries = kWanted == Wanted::kDq;
    constexpr int kTile = kOfQueries ? Traits::kTileQ : Traits::kTileK;
    constexpr int kPlacesOfTile = kTile / kRowsOfPlace;
    const int tiles = kOfQueries ? params.tiles_q : params.tiles_k;
    const int heads = kOfQueries ? params.heads_q : params.heads_kv;
    const int seq = kOfQueries ? params.seq_q : params.seq_k;
    const int64_t tile = number / kPlacesOfTile;
    const auto head_of_all = static_cast<int>(tile / tiles);
    const int batch = head_of_all / heads;
    const int first_row = static_cast<int>(tile - int64_t{head_of_all} * tiles) * kTile +
                          static_cast<int>(number - tile * kPlacesOfTile) * kRowsOfPlace;
    return {batch, head_of_all - batch * heads, first_row, min(first_row + kRowsOfPlace, seq),
            first_row / kRowsOfTile * kRowsOfTile};
  }
};

// Whether some of its rows see no key, or no row sees some of its keys: those that are seen lie
// together.
template <Wanted kWanted>
__device__ __forceinline__ bool has_blind(const CommonParams& params, const Place& place) {
  const auto is_blind = [&](int row) {
    return kWanted == Wanted::kDq
               ? !params.score.sees_keys(row, params.seq_k)
               : params.score.first_query(row) >= params.score.end_query(row, params.seq_q);
  };
  return is_blind(place.first_row) || is_blind(place.end_row - 1);
}

// Whether a place may hold what is not finite, as far as this one of kLanesOfPlace lanes sees.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ bool is_suspect(const CommonParams& params, int64_t number, int lane) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  if (gradient.rows == nullptr) return false;
  const Place place = Place::at<Traits, kWanted>(params, number);
  if (place.first_row >= place.end_row) return false;
  const int64_t at = place.batch * gradient.strides.batch + place.head * gradient.strides.head +
                     place.sample * gradient.strides.seq;
  return has_blind<kWanted>(params, place) ||
         any_nonfinite<typename Traits::Element>(
             gradient, at, kWanted == Wanted::kDv ? params.dim_v : params.dim, lane, kLanesOfPlace);
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

// Whether what is not finite can have reached rows of dQ that do not see it; a whole warp.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_dq(const CommonParams& params, const Place& place) {
  using Element = typename Traits::Element;
  const int tile_q = place.first_row / Traits::kTileQ;
  const Parts parts = Parts::of<Traits>(params, tile_q);
  const int head_kv = place.head / params.heads_per_kv;
  const int first_row = tile_q * Traits::kTileQ;
  const int last_row = min(first_row + Traits::kTileQ, params.seq_q) - 1;
  const int lane = reread::lane_index();
  return any_in_edges(
      parts.first, parts.last, ceil_div(params.score.first_key(last_row), Traits::kTileK),
      params.score.end_key(first_row, params.seq_k) / Traits::kTileK, [&](int tile) {
        bool any = false;
        const int end = min((tile + 1) * Traits::kTileK, params.seq_k);
        for (int key = tile * Traits::kTileK; key < end; ++key) {
          any = any ||
                any_nonfinite<Element>(
                    attention_backward::row_of(params.k_rows, place.batch, head_kv, key),
                    params.dim, lane, kThreadsPerWarp) ||
                any_nonfinite<Element>(
                    attention_backward::row_of(params.v_rows, place.batch, head_kv, key),
                    params.dim_v, lane, kThreadsPerWarp);
        }
        return __any_sync(kFullWarp, any) != 0;
      });
}

// The same of keys of dK and dV.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_keys(const CommonParams& params, const Place& place) {
  using Element = typename Traits::Element;
  const int first_key = place.first_row / Traits::kTileK * Traits::kTileK;
  const int last_key = min(first_key + Traits::kTileK, params.seq_k) - 1;
  const int first = params.score.first_query(first_key);
  const int behind = params.score.end_query(last_key, params.seq_q);
  if (first >= behind) return false;
  const int lane = reread::lane_index();
  return any_in_edges(
      first / Traits::kTileQ, (behind - 1) / Traits::kTileQ,
      ceil_div(params.score.first_query(last_key), Traits::kTileQ),
      params.score.end_query(first_key, params.seq_q) / Traits::kTileQ, [&](int tile) {
        bool any = false;
        const int begin = tile * Traits::kTileQ;
        const int end = min(begin + Traits::kTileQ, params.seq_q);
        for (int of_group = 0; of_group < params.heads_per_kv; ++of_group) {
          const int head = place.head * params.heads_per_kv + of_group;
          const int64_t numbers =
              int64_t{place.batch * params.heads_q + head} * params.tiles_q * Traits::kTileQ;
          for (int row = begin + lane; row < end; row += kThreadsPerWarp) {
            // Infinity is the lse of rows that see no key.
            any = any || !isfinite(params.row_delta[numbers + row]) ||
                  !(params.row_lse[numbers + row] > -INFINITY);
          }
          for (int row = begin; row < end; ++row) {
            any = any ||
                  any_nonfinite<Element>(
                      attention_backward::row_of(params.q_rows, place.batch, head, row), params.dim,
                      lane, kThreadsPerWarp) ||
                  any_nonfinite<Element>(
                      attention_backward::row_of(params.dout_rows, place.batch, head, row),
                      params.dim_v, lane, kThreadsPerWarp);
          }
        }
        return __any_sync(kFullWarp, any) != 0;
      });
}

// Computes rows of a place again: those that are not finite, or with kLeftOut all. A whole warp.
template <class Traits, Wanted kWanted, bool kLeftOut = false>
__device__ __forceinline__ void repair_place(const CommonParams& params, int64_t number) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  const Place place = Place::at<Traits, kWanted>(params, number);
  if (!kLeftOut && !has_blind<kWanted>(params, place)) {
    const bool at_risk = kWanted == Wanted::kDq ? is_at_risk_dq<Traits>(params, place)
                                                : is_at_risk_keys<Traits>(params, place);
    if (!at_risk) return;
  }
  const int columns = kWanted == Wanted::kDv ? params.dim_v : params.dim;
  const int64_t first = place.batch * gradient.strides.batch + place.head * gradient.strides.head;
#pragma unroll 1
  for (int row = place.first_row; row < place.end_row; ++row) {
    if (!kLeftOut && !__any_sync(kFullWarp, any_nonfinite<typename Traits::Element>(
                                                gradient, first + row * gradient.strides.seq,
                                                columns, reread::lane_index(), kThreadsPerWarp))) {
      continue;
    }
    attention_backward::masked_fallback<Traits, kWanted>(
        params, {place.batch, place.head, row, row + 1, 0, columns});
  }
}

// Of one gradient. Neighbouring places go to different warps: what is to be computed again lies
// together.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair(const CommonParams& params, int64_t places, int warp,
                                       int warps) {
  const int lane = reread::lane_index();
#pragma unroll 1
  for (int64_t first = warp; first < places; first += int64_t{kPlacesOfWarp} * warps) {
    const int64_t own = first + int64_t{lane / kLanesOfPlace} * warps;
    const bool suspect =
        own < places && is_suspect<Traits, kWanted>(params, own, lane % kLanesOfPlace);
    const uint32_t found = __ballot_sync(kFullWarp, suspect);
#pragma unroll 1
    for (int i = 0; found != 0 && i < kPlacesOfWarp; ++i) {
      if ((found >> i * kLanesOfPlace & ((1 << kLanesOfPlace) - 1)) != 0) {
        repair_place<Traits, kWanted>(params, first + int64_t{i} * warps);
      }
    }
  }
}

// Adds what warps of the kernel have left out.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void add_left_out(const CommonParams& params, int64_t places, int warp,
                                             int warps) {
  const uint8_t* const marks = params.left_out + (kWanted == Wanted::kDk ? places : 0);
#pragma unroll 1
  for (int64_t place = warp; place < places; place += warps) {
    if (attention_backward::gradient_of<kWanted>(params).rows != nullptr && marks[place] != 0) {
      repair_place<Traits, kWanted, true>(params, place);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void repair_all(const CommonParams& params, int warp, int warps) {
  static_assert(kPlaces * kRowsOfPlace == Traits::kTileK && Traits::kTileQ % kRowsOfTile == 0);
  const int64_t of_keys = attention_backward::key_tiles(params) * kPlaces;
  if (params.left_out != nullptr) {
    add_left_out<Traits, Wanted::kDv>(params, of_keys, warp, warps);
    add_left_out<Traits, Wanted::kDk>(params, of_keys, warp, warps);
    return;
  }
  if (!attention_backward::sums_dq(params)) {
    const int64_t heads = int64_t{params.batch} * params.heads_q;
    repair<Traits, Wanted::kDq>(params, heads * params.tiles_q * kDqPlaces<Traits>, warp, warps);
  }
  repair<Traits, Wanted::kDv>(params, of_keys, warp, warps);
  repair<Traits, Wanted::kDk>(params, of_keys, warp, warps);
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
    if (params.score.masked != 0 && !__all_sync(kFullWarp, finite)) {
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
    if (params.score.masked != 0) repair_all<Traits>(params, warp, warps);
  }
}

}  // namespace flashmoe::sm90_backward
