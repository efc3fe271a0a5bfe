// What runs after the kernel of attention backward: dsinks, and a repair of calls with bounds.
//
// In calls with bounds the tensor cores spread what is not finite, because they multiply what a row
// does not see by 0. The kernel does not look for that. It shows here, since it spreads to all 64
// rows of a warpgroup's tile: to dQ from K and V, and to dK and dV from Q, dO and the numbers of
// rows (lse and delta). So the repair looks at one row of each tile. If that is not finite, it
// looks at what the tile shares where not every pair is seen. Then rows that are not finite are
// computed again by plain arithmetic (cuda/attention/backward/masked_fallback.cuh). Rows that see
// no key, and keys that no row sees, are looked at themselves.
//
// Where gradients are added to, the former numbers would be lost. There the kernel itself looks at
// rows as they leave, leaves out those that are not finite, and marks them (Withheld in params.h).
// The repair computes and adds them.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/backward/prologue.cuh"
#include "cuda/attention/backward/ragged.cuh"
#include "cuda/attention/backward/sinks.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::batch_k_of;
using attention_backward::batch_q_of;
using attention_backward::begin_k_of;
using attention_backward::begin_q_of;
using attention_backward::CommonParams;
using attention_backward::end_key_of;
using attention_backward::end_query_of;
using attention_backward::first_key_of;
using attention_backward::first_query_of;
using attention_backward::Gradient;
using attention_backward::length_k_of;
using attention_backward::length_q_of;
using attention_backward::Part;
using attention_backward::Wanted;

inline constexpr int kRepairBlocks = 132;
inline constexpr int kRowsOfPlace = 64;  // rows of a warpgroup
inline constexpr int kLanesOfPlace = 4;
inline constexpr int kBytesOfChunk = 16;
inline constexpr int kPlacesOfWarp = kThreadsPerWarp / kLanesOfPlace;  // looked at together

// Tells whether `columns` elements of a row are not all finite, as far as this one of `lanes` lanes
// sees.
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

// Does the same for a row of a gradient.
template <class Element>
__device__ __forceinline__ bool any_nonfinite(const Gradient& gradient, int64_t at, int columns,
                                              int lane, int lanes) {
  return gradient.fp32 != 0
             ? any_nonfinite(static_cast<const float*>(gradient.rows) + at, columns, lane, lanes)
             : any_nonfinite<Element>(static_cast<const uint16_t*>(gradient.rows) + at, columns,
                                      lane, lanes);
}

// A place: 64 rows of dQ, or 64 keys of dK and dV, as far as they exist.
struct Place {
  static constexpr bool kRagged = false;

  int batch;
  int head;
  int first_row;
  int end_row;

  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ Place at(const CommonParams& params, int64_t number) {
    constexpr bool kOfQueries = kWanted == Wanted::kDq;
    // There are at most 2^30 tiles, with two places each. Unsigned divisions are shorter.
    const auto of_all = static_cast<uint32_t>(number);
    const auto places = static_cast<uint32_t>(places_of<Traits, kWanted>(params));
    const auto heads = static_cast<uint32_t>(kOfQueries ? params.heads_q : params.heads_kv);
    const uint32_t head_of_all = of_all / places;
    const uint32_t batch = head_of_all / heads;
    const int first_row = static_cast<int>(of_all - head_of_all * places) * kRowsOfPlace;
    return {static_cast<int>(batch), static_cast<int>(head_of_all - batch * heads), first_row,
            min(first_row + kRowsOfPlace, kOfQueries ? params.seq_q : params.seq_k)};
  }

  // Returns how many places there are.
  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ int64_t count(const CommonParams& params) {
    const int heads = kWanted == Wanted::kDq ? params.heads_q : params.heads_kv;
    return int64_t{params.batch} * heads * places_of<Traits, kWanted>(params);
  }

  __device__ __forceinline__ Part part_of(int row, int first_column, int end_column) const {
    return {batch, head, row, row + 1, first_column, end_column};
  }

 private:
  // Returns how many places a head has.
  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ int64_t places_of(const CommonParams& params) {
    return kWanted == Wanted::kDq ? int64_t{params.tiles_q} * (Traits::kTileQ / kRowsOfPlace)
                                  : int64_t{params.tiles_k} * (Traits::kTileK / kRowsOfPlace);
  }
};

// A place of a sequence.
struct RaggedPlace : attention_backward::SequencePlace {
  int head;
  int first_row;
  int end_row;

  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ RaggedPlace at(const attention_backward::RaggedParams& params,
                                                   int64_t number) {
    constexpr bool kOfQueries = kWanted == Wanted::kDq;
    constexpr int kPlacesOfTile = (kOfQueries ? Traits::kTileQ : Traits::kTileK) / kRowsOfPlace;
    const auto tile = static_cast<int>(number / kPlacesOfTile);
    const int rows_before = static_cast<int>(number % kPlacesOfTile) * kRowsOfPlace;
    RaggedPlace place = {};
    SequencePlace& sequence = place;
    if constexpr (kOfQueries) {
      const int tiles_q = params.totals->tiles_q;
      place.head = tile / tiles_q;
      const int tile_of_all = tile - place.head * tiles_q;
      sequence = params.places[attention_backward::last_at_most(
          params.first_tiles, params.sequences.count, tile_of_all)];
      place.first_row = (tile_of_all - place.first_tile) * Traits::kTileQ + rows_before;
      place.end_row = min(place.first_row + kRowsOfPlace, place.length_q);
    } else {
      const attention_backward::RaggedItem& item = params.items[tile];
      sequence = item;
      place.head = item.head_kv;
      place.first_row = item.tile * Traits::kTileK + rows_before;
      place.end_row = min(place.first_row + kRowsOfPlace, place.length_k);
    }
    return place;
  }
  template <class Traits, Wanted kWanted>
  static __device__ __forceinline__ int64_t count(const attention_backward::RaggedParams& params) {
    return kWanted == Wanted::kDq
               ? int64_t{params.totals->tiles_q} * params.heads_q * (Traits::kTileQ / kRowsOfPlace)
               : int64_t{params.totals->items} * (Traits::kTileK / kRowsOfPlace);
  }

  __device__ __forceinline__ attention_backward::RaggedPart part_of(int row, int first_column,
                                                                    int end_column) const {
    return {static_cast<const SequencePlace&>(*this), head, row, row + 1, first_column, end_column};
  }
};

template <class Traits>
using PlaceFor = std::conditional_t<Traits::kRagged, RaggedPlace, Place>;
template <class Traits>
using BehindParams = ParamsFor<Traits>;

// Returns the number of columns of a gradient. kPartColumns is that of a part.
template <Wanted kWanted>
__device__ __forceinline__ int columns_of(const CommonParams& params) {
  return kWanted == Wanted::kDv ? params.dim_v : params.dim;
}
template <class Traits, Wanted kWanted>
inline constexpr int kPartColumns =
    kWanted == Wanted::kDq ? Traits::kDqPartColumns : Traits::kKeyPartColumns;

// Returns the marks of a place: those of its parts, by their warps. `number` is the place's number
// among all of its kind. nullptr means that the kernel had none of the place, or adds everything.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ const uint2* marks_of(const BehindParams<Traits>& params,
                                                 const PlaceFor<Traits>& place, int64_t number) {
  if constexpr (kWanted == Wanted::kDq) {
    const int tile_q = place.first_row / Traits::kTileQ;
    const Parts parts = Parts::of<Traits>(params, place, tile_q);
    if (parts.first > parts.last) return nullptr;
    const int tile = attention_backward::tile_of_head(params, place, place.head) + tile_q;
    return marks_of_dq<Traits>(params.withheld, static_cast<uint32_t>(tile),
                               place.first_row % Traits::kTileQ / kRowsOfPlace, 0);
  } else {
    uint2* const marks = kWanted == Wanted::kDk ? params.withheld.dk : params.withheld.dv;
    constexpr int kPlacesOfTile = Traits::kTileK / kRowsOfPlace;
    return marks == nullptr ? nullptr
                            : marks_of_keys<Traits>(marks, static_cast<int>(number / kPlacesOfTile),
                                                    static_cast<int>(number % kPlacesOfTile), 0);
  }
}

// Returns the offset of the first element of a row of a gradient.
template <Wanted kWanted, class AnyPlace>
__device__ __forceinline__ int64_t offset_of(const Gradient& gradient, const AnyPlace& place,
                                             int row) {
  constexpr bool kOfQueries = kWanted == Wanted::kDq;
  const int batch =
      kOfQueries ? attention_backward::batch_q_of(place) : attention_backward::batch_k_of(place);
  const int begin =
      kOfQueries ? attention_backward::begin_q_of(place) : attention_backward::begin_k_of(place);
  return batch * gradient.strides.batch + place.head * gradient.strides.head +
         (begin + row) * gradient.strides.seq;
}

// Tells whether some of the place's rows see no key, or no row sees some of its keys. The first and
// the last one tell, because those that are seen lie together.
template <Wanted kWanted, class AnyPlace>
__device__ __forceinline__ bool has_blind(const CommonParams& params, const AnyPlace& place) {
  const auto is_blind = [&](int row) {
    return kWanted == Wanted::kDq
               ? first_key_of(params, place, row) >= end_key_of(params, place, row)
               : first_query_of(params, place, row) >= end_query_of(params, place, row);
  };
  return is_blind(place.first_row) || is_blind(place.end_row - 1);
}

// What a lane of a place looks at to know whether the place may hold what is not finite: chunks of
// its first row, kLanesOfPlace apart.
struct View {
  const unsigned char* chunks;
  // The bytes of the row from this lane's first chunk on. With none, there is nothing to be seen.
  int bytes;
  bool fp32;
  bool suspect;  // whatever the chunks hold
  bool marks;    // the chunks are marks of the place's rows, not a row
};

template <class Traits, Wanted kWanted>
__device__ __forceinline__ View view_of(const BehindParams<Traits>& params, int64_t number,
                                        int lane) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  View view = {};
  if (gradient.rows == nullptr) return view;
  const auto place = PlaceFor<Traits>::template at<Traits, kWanted>(params, number);
  if (place.first_row >= place.end_row) return view;
  if (params.accumulate != 0) {
    const uint2* const marks = marks_of<Traits, kWanted>(params, place, number);
    if (marks == nullptr) return view;
    const int parts = ceil_div(columns_of<kWanted>(params), kPartColumns<Traits, kWanted>);
    view.chunks = reinterpret_cast<const unsigned char*>(marks) + lane * kBytesOfChunk;
    view.bytes = parts * kWarpsOfPlace * static_cast<int>(sizeof(uint2)) - lane * kBytesOfChunk;
    view.marks = true;
    return view;
  }
  const int element_bytes = gradient.fp32 != 0 ? 4 : 2;
  const int columns = columns_of<kWanted>(params);
  view.chunks = static_cast<const unsigned char*>(gradient.rows) +
                offset_of<kWanted>(gradient, place, place.first_row) * element_bytes +
                lane * kBytesOfChunk;
  view.bytes = columns * element_bytes - lane * kBytesOfChunk;
  view.fp32 = gradient.fp32 != 0;
  view.suspect = has_blind<kWanted>(params, place);
  return view;
}

// Returns the view of a place of any kind. Places of dQ come first, then those of dV, then those of
// dK.
template <class Traits>
__device__ __forceinline__ View view_of(const BehindParams<Traits>& params, int64_t number,
                                        int64_t of_dq, int64_t of_keys, int lane) {
  if (number < of_dq) return view_of<Traits, Wanted::kDq>(params, number, lane);
  number -= of_dq;
  if (number < of_keys) return view_of<Traits, Wanted::kDv>(params, number, lane);
  number -= of_keys;
  if (number < of_keys) return view_of<Traits, Wanted::kDk>(params, number, lane);
  return {};
}

// Tells whether the place may hold what is not finite. All chunks are asked for before one is
// looked at.
template <class Traits>
__device__ __forceinline__ bool is_suspect(const View& view) {
  using Element = typename Traits::Element;
  constexpr int kStep = kLanesOfPlace * kBytesOfChunk;
  constexpr int kMostColumns = Traits::kDim > Traits::kDimV ? Traits::kDim : Traits::kDimV;
  constexpr int kChunks = kMostColumns * static_cast<int>(sizeof(float)) / kStep;
  uint4 chunks[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks[i] = make_uint4(0, 0, 0, 0);
    if (i * kStep < view.bytes) {
      chunks[i] = *reinterpret_cast<const uint4*>(view.chunks + i * kStep);
    }
  }
  bool any = view.suspect;
  uint32_t gathered = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (view.marks) {
        any = any || words[e] != 0;
      } else if (view.fp32) {
        any = any || !isfinite(__uint_as_float(words[e]));
      } else {
        gathered = numeric::gather_nonfinite<Element>(gathered, words[e]);
      }
    }
  }
  return any || numeric::any_nonfinite<Element>(gathered);
}

// Tells whether `any_in` holds for one of the tiles from `first` to `last` that have a pair which
// is not seen: those before `end_left` and those from `first_right` on.
template <class AnyIn>
__device__ __forceinline__ bool any_in_edges(int first, int last, int end_left, int first_right,
                                             const AnyIn& any_in) {
  for (int tile = first; tile <= last; ++tile) {
    if (tile == max(first, end_left)) tile = max(tile, first_right);
    if (tile <= last && any_in(tile)) return true;
  }
  return false;
}

// Tells whether what is not finite can have reached rows of dQ that do not see it. A whole warp
// calls it.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_dq(const CommonParams& params,
                                              const PlaceFor<Traits>& place) {
  using Element = typename Traits::Element;
  const int tile_q = place.first_row / Traits::kTileQ;
  const Parts parts = Parts::of<Traits>(params, place, tile_q);
  const int head_kv = place.head / params.heads_per_kv;
  const int first_row = tile_q * Traits::kTileQ;
  const int last_row = min(first_row + Traits::kTileQ, length_q_of(params, place)) - 1;
  const int batch = batch_k_of(place);
  const int lane = reread::lane_index();
  return any_in_edges(
      parts.first, parts.last, ceil_div(first_key_of(params, place, last_row), Traits::kTileK),
      end_key_of(params, place, first_row) / Traits::kTileK, [&](int tile) {
        bool any = false;
        const int end = min((tile + 1) * Traits::kTileK, length_k_of(params, place));
        for (int key = tile * Traits::kTileK; key < end; ++key) {
          const int row = begin_k_of(place) + key;
          any =
              any ||
              any_nonfinite<Element>(attention_backward::row_of(params.k_rows, batch, head_kv, row),
                                     params.dim, lane, kThreadsPerWarp) ||
              any_nonfinite<Element>(attention_backward::row_of(params.v_rows, batch, head_kv, row),
                                     params.dim_v, lane, kThreadsPerWarp);
        }
        return __any_sync(kFullWarp, any) != 0;
      });
}

// Does the same for keys of dK and dV.
template <class Traits>
__device__ __forceinline__ bool is_at_risk_keys(const CommonParams& params,
                                                const PlaceFor<Traits>& place) {
  using Element = typename Traits::Element;
  const int first_key = place.first_row / Traits::kTileK * Traits::kTileK;
  const int seq_q = length_q_of(params, place);
  const int last_key = min(first_key + Traits::kTileK, length_k_of(params, place)) - 1;
  const int first = first_query_of(params, place, first_key);
  const int behind = end_query_of(params, place, last_key);
  if (first >= behind) return false;
  const int batch = batch_q_of(place);
  const int begin_q = begin_q_of(place);
  const int lane = reread::lane_index();
  return any_in_edges(
      first / Traits::kTileQ, (behind - 1) / Traits::kTileQ,
      ceil_div(first_query_of(params, place, last_key), Traits::kTileQ),
      end_query_of(params, place, first_key) / Traits::kTileQ, [&](int tile) {
        bool any = false;
        const int begin = tile * Traits::kTileQ;
        const int end = min(begin + Traits::kTileQ, seq_q);
        for (int of_group = 0; of_group < params.heads_per_kv; ++of_group) {
          const int head = place.head * params.heads_per_kv + of_group;
          const int64_t numbers =
              int64_t{attention_backward::tile_of_head(params, place, head)} * Traits::kTileQ;
          for (int row = begin + lane; row < end; row += kThreadsPerWarp) {
            // Rows that see no key have an lse of infinity.
            any = any || !isfinite(params.row_delta[numbers + row]) ||
                  !(params.row_lse[numbers + row] > -INFINITY);
          }
          for (int row = begin; row < end; ++row) {
            any = any ||
                  any_nonfinite<Element>(
                      attention_backward::row_of(params.q_rows, batch, head, begin_q + row),
                      params.dim, lane, kThreadsPerWarp) ||
                  any_nonfinite<Element>(
                      attention_backward::row_of(params.dout_rows, batch, head, begin_q + row),
                      params.dim_v, lane, kThreadsPerWarp);
          }
        }
        return __any_sync(kFullWarp, any) != 0;
      });
}

// Adds the rows of a place that the kernel left out. A whole warp calls it.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void add_withheld(const BehindParams<Traits>& params,
                                             const PlaceFor<Traits>& place, int64_t number) {
  const uint2* const marks = marks_of<Traits, kWanted>(params, place, number);
  const int columns = columns_of<kWanted>(params);
  constexpr int kRowsOfHalf = 8;
  constexpr int kLanesOfRow = kThreadsPerWarp / kRowsOfHalf;
#pragma unroll 1
  for (int first = 0; first < columns; first += kPartColumns<Traits, kWanted>) {
    const uint2* const of_part = marks + first / kPartColumns<Traits, kWanted> * kWarpsOfPlace;
    const int end = min(first + kPartColumns<Traits, kWanted>, columns);
#pragma unroll 1
    for (int row = place.first_row; row < place.end_row; ++row) {
      const int half = (row - place.first_row) / kRowsOfHalf;
      const uint2 of_warp = of_part[half / 2];
      const uint32_t lanes = half % 2 == 0 ? of_warp.x : of_warp.y;
      const int first_lane = (row - place.first_row) % kRowsOfHalf * kLanesOfRow;
      if ((lanes >> first_lane & ((1 << kLanesOfRow) - 1)) == 0) continue;
      attention_backward::masked_fallback<Traits, kWanted>(params, place.part_of(row, first, end));
    }
  }
}

// Computes the rows of a place again that are not finite. A whole warp calls it.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_place(const BehindParams<Traits>& params, int64_t number) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  const auto place = PlaceFor<Traits>::template at<Traits, kWanted>(params, number);
  if (params.accumulate != 0) return add_withheld<Traits, kWanted>(params, place, number);
  if (!has_blind<kWanted>(params, place)) {
    const bool at_risk = kWanted == Wanted::kDq ? is_at_risk_dq<Traits>(params, place)
                                                : is_at_risk_keys<Traits>(params, place);
    if (!at_risk) return;
  }
  const int columns = columns_of<kWanted>(params);
#pragma unroll 1
  for (int row = place.first_row; row < place.end_row; ++row) {
    if (!__any_sync(kFullWarp, any_nonfinite<typename Traits::Element>(
                                   gradient, offset_of<kWanted>(gradient, place, row), columns,
                                   reread::lane_index(), kThreadsPerWarp))) {
      continue;
    }
    attention_backward::masked_fallback<Traits, kWanted>(params, place.part_of(row, 0, columns));
  }
}

// Repairs the places of one of `warps` warps. Neighbours go to different warps, because what has to
// be computed again lies together. The wait for what the previous kernel wrote comes after
// everything that can be known without it.
template <class Traits>
__device__ __forceinline__ void repair(const BehindParams<Traits>& params, int warp, int warps) {
  static_assert(Traits::kTileQ % kRowsOfPlace == 0 && Traits::kTileK % kRowsOfPlace == 0);
  // Tables were read before the previous kernel began.
  const int64_t of_dq = PlaceFor<Traits>::template count<Traits, Wanted::kDq>(params);
  const int64_t of_keys = PlaceFor<Traits>::template count<Traits, Wanted::kDk>(params);
  const int64_t places = of_dq + 2 * of_keys;
  const int lane = reread::lane_index();
  const int of_place = lane % kLanesOfPlace;
  const auto number_of = [&](int64_t first) {
    return first + int64_t{lane / kLanesOfPlace} * warps;
  };
  int64_t first = warp;
  View view = view_of<Traits>(params, number_of(first), of_dq, of_keys, of_place);
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#pragma unroll 1
  for (;;) {
    const uint32_t found = __ballot_sync(kFullWarp, is_suspect<Traits>(view));
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
    first += int64_t{kPlacesOfWarp} * warps;
    if (first >= places) return;
    view = view_of<Traits>(params, number_of(first), of_dq, of_keys, of_place);
  }
}

// The kernel: a block for dsinks of each head, where they are wanted, and blocks that repair.
template <class Traits>
__global__ void __launch_bounds__(attention_backward::kSinksThreads, 1)
    attention_backward_behind(const __grid_constant__ BehindParams<Traits> params) {
  const int sinks_blocks = params.dsinks != nullptr ? params.heads_q : 0;
  const int block = static_cast<int>(blockIdx.x) - sinks_blocks;
  if (block < 0) {
    ptx::wait_for_dependencies();
    ptx::launch_dependents();
    attention_backward::sum_sink_gradient<Traits>(params, static_cast<int>(blockIdx.x));
  } else {
    repair<Traits>(params, block * attention_backward::kSinksWarps + reread::warp_index(),
                   (static_cast<int>(gridDim.x) - sinks_blocks) * attention_backward::kSinksWarps);
  }
}

}  // namespace flashmoe::sm90_backward
