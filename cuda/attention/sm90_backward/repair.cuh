// What the tensor cores made infinite or NaN in a call with bounds, once more by plain arithmetic
// (cuda/attention/backward/masked_fallback.cuh).
//
// Checks and this have no place in the main loop, nor in its registers. A gradient is checked where
// it leaves for good: dQ with its last part, which has in its sum whatever was not finite in a part
// before it, dK and dV at the end of an item. A warp that leaves something not finite marks it in
// the workspace, and comes back to it when the block has no more items. Gradients that consumers
// write themselves they leave out then: what is added to would be lost.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::CommonParams;
using attention_backward::Gradient;
using attention_backward::Part;
using attention_backward::Wanted;

inline constexpr int kWarpsPerGroup = kThreadsPerGroup / kThreadsPerWarp;
inline constexpr int kRowsPerWarp = 16;  // of 64 of a warpgroup

// Whether a row holds nothing but finite elements; a whole warp. The copy engine wrote it: a line
// of the L1 may be older.
template <class Element>
__device__ __forceinline__ bool is_finite_row(const uint16_t* row, int columns) {
  bool finite = true;
  for (int pair = reread::lane_index(); 2 * pair < columns; pair += kThreadsPerWarp) {
    const uint32_t elements = *reinterpret_cast<const volatile uint32_t*>(row + 2 * pair);
    finite = finite && !numeric::any_nonfinite<Element>(elements);
  }
  return __all_sync(kFullWarp, finite);
}

// The first part of a gradient, as marks count parts.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ int64_t first_part(const CommonParams& params) {
  if (kWanted == Wanted::kDq) return 0;
  const int64_t behind_dq = attention_backward::dq_parts<Traits>(params);
  return behind_dq + (kWanted == Wanted::kDk ? attention_backward::key_parts(params) : 0);
}

// Rows that were written keep theirs if they are finite. Consumers have left out what they write
// themselves.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_rows(const Params& params, const Direct& direct, Part part) {
  const Gradient& gradient = attention_backward::gradient_of<kWanted>(params);
  if (gradient.rows == nullptr) return;
  const auto* const rows = static_cast<const uint16_t*>(gradient.rows) +
                           part.batch * gradient.strides.batch + part.head * gradient.strides.head +
                           part.first_column;
  const int end_row = part.end_row;
  for (int row = part.first_row; row < end_row; ++row) {
    if (direct.rows == nullptr &&
        is_finite_row<typename Traits::Element>(rows + row * gradient.strides.seq,
                                                part.end_column - part.first_column)) {
      continue;
    }
    part.first_row = row;
    part.end_row = row + 1;
    attention_backward::masked_fallback<Traits, kWanted>(params, part);
  }
}

// What a warp of the consumers has marked of dQ.
template <class Traits>
__device__ __forceinline__ void repair_dq(const Params& params, int64_t marked, int warp) {
  const int64_t tile = marked / Traits::kPanels;
  const int head_of_all = static_cast<int>(tile / params.tiles_q);
  const int tile_q = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_q);
  const int batch = head_of_all / params.heads_q;
  const int group = warp / kWarpsPerGroup;
  const int first_row = tile_q * Traits::kTileQ + (Traits::kTileQ == 64 ? 0 : 64 * group) +
                        warp % kWarpsPerGroup * kRowsPerWarp;
  const int first_column = Traits::kSplitsColumns
                               ? group * Traits::kDqColumns
                               : static_cast<int>(marked % Traits::kPanels) * Traits::kPanelColumns;
  repair_rows<Traits, Wanted::kDq>(params, params.dq_direct,
                                   {batch, head_of_all - batch * params.heads_q, first_row,
                                    min(first_row + kRowsPerWarp, params.seq_q), first_column,
                                    min(first_column + Traits::kDqColumns, params.dim)});
}

// Of dK or dV, the 16 keys of this number in their tile.
template <class Traits, Wanted kWanted>
__device__ __forceinline__ void repair_keys(const Params& params, int64_t marked, int keys) {
  const int64_t tile = marked - first_part<Traits, kWanted>(params);
  const int head_of_all = static_cast<int>(tile / params.tiles_k);
  const int tile_k = static_cast<int>(tile - int64_t{head_of_all} * params.tiles_k);
  const int batch = head_of_all / params.heads_kv;
  const int first_row = tile_k * Traits::kTileK + keys * kRowsPerWarp;
  repair_rows<Traits, kWanted>(params, kWanted == Wanted::kDk ? params.dk_direct : params.dv_direct,
                               {batch, head_of_all - batch * params.heads_kv, first_row,
                                min(first_row + kRowsPerWarp, params.seq_k), 0,
                                kWanted == Wanted::kDk ? params.dim : params.dim_v});
}

// All that a warp of the consumers has marked, and that is written; a whole warp. Its place among
// the marks of a part is its number, of dV and dK that of its 16 keys. With Share::kProducts the
// first consumer has dV of them and the second dK: each leaves the other's marks alone.
template <class Traits>
__device__ __forceinline__ void repair(const Params& params, int warp, int keys) {
  static_assert(Traits::kMarkedWarps * kRowsPerWarp == Traits::kTileK,
                "a place for each 16 keys of an item, whichever block has them");
  const int64_t end =
      first_part<Traits, Wanted::kDk>(params) + attention_backward::key_parts(params);
  const volatile uint16_t* const marks = params.marks;
  for (int64_t first = 0; first < end; first += kThreadsPerWarp) {
    const int64_t own = first + reread::lane_index();
    const int place = own < first_part<Traits, Wanted::kDv>(params) ? warp : keys;
    const bool is_its = own < first_part<Traits, Wanted::kDv>(params) || !Traits::kByProducts ||
                        (own < first_part<Traits, Wanted::kDk>(params)) == (warp < kWarpsPerGroup);
    const bool is_marked =
        own < end && is_its && marks[own * Traits::kMarkedWarps + place] == 1 + blockIdx.x;
    for (uint32_t left = __ballot_sync(kFullWarp, is_marked); left != 0; left &= left - 1) {
      const int64_t marked = first + __ffs(left) - 1;
      if (marked < first_part<Traits, Wanted::kDv>(params)) {
        repair_dq<Traits>(params, marked, warp);
      } else if (marked < first_part<Traits, Wanted::kDk>(params)) {
        repair_keys<Traits, Wanted::kDv>(params, marked, keys);
      } else {
        repair_keys<Traits, Wanted::kDk>(params, marked, keys);
      }
    }
  }
}

}  // namespace flashmoe::sm90_backward
