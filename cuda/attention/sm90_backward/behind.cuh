// What comes behind the kernel of attention backward: dsinks, and a repair of calls with bounds
// that add to nothing.
//
// In those the tensor cores spread what is not finite: they multiply what a row does not see by 0.
// The kernel does not look for it. It shows here, since it spreads to all 64 rows of a warpgroup's
// tile, to dQ from K and V, to dK and dV from Q, dO and the numbers of rows. So one row of each is
// looked at, and if that is not finite, at what the tile shares where not every pair is seen; then
// rows that are not finite are computed again by plain arithmetic
// (cuda/attention/backward/masked_fallback.cuh). Rows that see no key, and keys that no row sees,
// are looked at themselves.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/backward/prologue.cuh"
#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/backward/sinks.cuh"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::CommonParams;
using attention_backward::Gradient;
using attention_backward::Wanted;

inline constexpr int kRepairBlocks = 132;
inline constexpr int kRowsOfPlace = 64;  // of a warpgroup
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

// 64 rows of dQ, or keys of dK and dV, of those that exist.
struct Place {
  int batch;
  int head;
  int first_row;
  int end_row;

  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ Place at(const CommonParams& params, int64_t number) {
    constexpr bool kOfQueries = kWanted == Wanted::kDq;
    const int64_t places = places_of<Traits, kWanted>(params);
    const int heads = kOfQueries ? params.heads_q : params.heads_kv;
    const auto head_of_all = static_cast<int>(number / places);
    const int batch = head_of_all / heads;
    const int first_row = static_cast<int>(number - head_of_all * places) * kRowsOfPlace;
    return {batch, head_of_all - batch * heads, first_row,
            min(first_row + kRowsOfPlace, kOfQueries ? params.seq_q : params.seq_k)};
  }
  // Of a head.
  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ int64_t places_of(const CommonParams& params) {
    return kWanted == Wanted::kDq ? int64_t{params.tiles_q} * (Traits::kTileQ / kRowsOfPlace)
                                  : int64_t{params.tiles_k} * (Traits::kTileK / kRowsOfPlace);
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
                     place.first_row * gradient.strides.seq;
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

// Computes rows of a place again that are not finite. A whole warp.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_place(const CommonParams& params, int64_t number) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  const Place place = Place::at<Traits, kWanted>(params, number);
  if (!has_blind<kWanted>(params, place)) {
    const bool at_risk = kWanted == Wanted::kDq ? is_at_risk_dq<Traits>(params, place)
                                                : is_at_risk_keys<Traits>(params, place);
    if (!at_risk) return;
  }
  const int columns = kWanted == Wanted::kDv ? params.dim_v : params.dim;
  const int64_t first = place.batch * gradient.strides.batch + place.head * gradient.strides.head;
#pragma unroll 1
  for (int row = place.first_row; row < place.end_row; ++row) {
    if (!__any_sync(kFullWarp, any_nonfinite<typename Traits::Element>(
                                   gradient, first + row * gradient.strides.seq, columns,
                                   reread::lane_index(), kThreadsPerWarp))) {
      continue;
    }
    attention_backward::masked_fallback<Traits, kWanted>(
        params, {place.batch, place.head, row, row + 1, 0, columns});
  }
}

// Places of dQ come first, then those of dV and of dK. Neighbours go to different warps: what is to
// be computed again lies together.
template <class Traits>
__device__ __forceinline__ void repair(const CommonParams& params, int warp, int warps) {
  static_assert(Traits::kTileQ % kRowsOfPlace == 0 && Traits::kTileK % kRowsOfPlace == 0);
  const int64_t of_dq =
      int64_t{params.batch} * params.heads_q * Place::places_of<Traits, Wanted::kDq>(params);
  const int64_t of_keys =
      int64_t{params.batch} * params.heads_kv * Place::places_of<Traits, Wanted::kDk>(params);
  const int lane = reread::lane_index();
#pragma unroll 1
  for (int64_t first = warp; first < of_dq + 2 * of_keys; first += int64_t{kPlacesOfWarp} * warps) {
    const int64_t own = first + int64_t{lane / kLanesOfPlace} * warps;
    const int of_place = lane % kLanesOfPlace;
    bool suspect = false;
    if (own < of_dq) {
      suspect = is_suspect<Traits, Wanted::kDq>(params, own, of_place);
    } else if (own < of_dq + of_keys) {
      suspect = is_suspect<Traits, Wanted::kDv>(params, own - of_dq, of_place);
    } else if (own < of_dq + 2 * of_keys) {
      suspect = is_suspect<Traits, Wanted::kDk>(params, own - of_dq - of_keys, of_place);
    }
    const uint32_t found = __ballot_sync(kFullWarp, suspect);
#pragma unroll 1
    for (int i = 0; found != 0 && i < kPlacesOfWarp; ++i) {
      if ((found >> i * kLanesOfPlace & ((1 << kLanesOfPlace) - 1)) == 0) continue;
      const int64_t place = first + int64_t{i} * warps;
      if (place < of_dq) {
        repair_place<Traits, Wanted::kDq>(params, place);
      } else if (place < of_dq + of_keys) {
        repair_place<Traits, Wanted::kDv>(params, place - of_dq);
      } else {
        repair_place<Traits, Wanted::kDk>(params, place - of_dq - of_keys);
      }
    }
  }
}

// A block for dsinks of each head, where they are wanted, and those that repair.
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

// Of ragged and padded batches: dsinks alone.
template <class Traits>
const void* behind_function() {
  if constexpr (Traits::kRagged) {
    return attention_backward::sinks_function<Traits>();
  } else {
    return reinterpret_cast<const void*>(&attention_backward_behind<Traits>);
  }
}

}  // namespace flashmoe::sm90_backward
