// Processes slots, one warp per slot: finds a slot's token, and computes from da, g and u
//
//   a    = weight * act(g) * (u + offset)            replaces da
//   dz   = weight * da * slopes                      for g and u
//   dot  = <da, act(g) * (u + offset)> + <dout, b>   gradient of the weight
//
// A lane has 16-byte pieces of a row, so that all loads and stores are whole sectors, and the
// kernel runs at the speed of memory. With weight_on_input, dz lacks the weight; scaled_dz, from
// which the weights' gradients are computed, includes it.
#pragma once

#include "core/ops/moe/problem.h"
#include "cuda/moe/backward/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/global_store.cuh"
#include "cuda/tile/activation_gradient.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe_backward {

__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
}

__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = kThreadsPerWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

template <class Element>
__device__ __forceinline__ void unpack_piece(float (&values)[kPiece],
                                             const uint32_t (&words)[kPiece / 2]) {
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const float2 pair = numeric::ElementTraits<Element>::unpack(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}
// Loads data that this kernel overwrites: the compiler must see the access.
template <class Element>
__device__ __forceinline__ void load_own_piece(float (&values)[kPiece], const uint16_t* from) {
  const uint4 piece = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
  unpack_piece<Element>(values, words);
}
template <class Element>
__device__ __forceinline__ void store_piece(uint16_t* to, const float (&values)[kPiece]) {
  using Numeric = numeric::ElementTraits<Element>;
  ptx::store_global(to, Numeric::pack(values[0], values[1]), Numeric::pack(values[2], values[3]),
                    Numeric::pack(values[4], values[5]), Numeric::pack(values[6], values[7]));
}

// The expert of a slot, searched by the warp's lanes: the last one whose rows begin at or before
// the slot.
__device__ __forceinline__ int expert_of(const Routing& routing, int slot) {
  int before = 0;
  for (int first = 0; first < routing.experts; first += kThreadsPerWarp) {
    const int expert = first + lane_index();
    const bool ends = expert < routing.experts && routing.offsets[expert + 1] <= slot;
    const int count = __popc(__ballot_sync(kFullWarp, ends));
    before += count;
    if (count < kThreadsPerWarp) break;
  }
  return min(before, routing.experts - 1);
}

// The routing's data about a slot.
struct Found {
  int token = -1;           // -1: the slot does not count
  float weight = 0.0f;      // of its pair
  bool has_expert = false;  // otherwise nothing is computed for its row
};
__device__ __forceinline__ Found look_up(const Routing& routing, int slot) {
  Found found;
  found.has_expert = slot >= routing.offsets[0] && slot < routing.offsets[routing.experts];
  const int pair = routing.pairs[slot];
  if (!found.has_expert || pair < 0 || pair >= routing.rows) return found;
  // Both loads are issued together, before the first one is checked.
  const int back = routing.slots[pair];
  const float weight = routing.weights[pair];
  if (back != slot) return found;
  found.token = pair / routing.top_k;
  found.weight = weight;
  return found;
}

// Whether this block makes the queue: the last block makes it if it is wanted, and does nothing
// else.
__device__ __forceinline__ bool makes_queue(const Queue& queue) {
  return queue.taken != nullptr && blockIdx.x + 1 == gridDim.x;
}

// Sorts experts by their number of rows; equal ones by index.
__device__ __forceinline__ void make_queue(const Routing& routing, const Queue& queue) {
  __shared__ int counts[kMaxExperts];
  const int experts = routing.experts;
  const auto begin_of = [&](int expert) {
    return min(max(routing.offsets[expert], 0), routing.rows);
  };
  if (thread_index() < kMostLaunches) queue.taken[thread_index()] = 0;
  for (int e = thread_index(); e < experts; e += thread_count()) {
    counts[e] = max(begin_of(e + 1) - begin_of(e), 0);
  }
  __syncthreads();
  for (int e = thread_index(); e < experts; e += thread_count()) {
    const int count = counts[e];
    int before = 0;
#pragma unroll 8
    for (int other = 0; other < experts; ++other) {
      const int others = counts[other];
      before += others > count || (others == count && other < e) ? 1 : 0;
    }
    queue.experts[before] = {e, begin_of(e), count, 0};
  }
}

__global__ void __launch_bounds__(kSlotWarps* kThreadsPerWarp)
    slots_kernel(const __grid_constant__ SlotsParams params) {
  begin_kernel();
  if (makes_queue(params.queue)) {
    make_queue(params.routing, params.queue);
    return;
  }
  const int64_t slot = int64_t{blockIdx.x} * (kSlotWarps * kThreadsPerWarp) + thread_index();
  if (slot >= params.routing.rows) return;
  const Found found = look_up(params.routing, static_cast<int>(slot));
  params.row_tokens[slot] = found.token;
  params.row_weights[slot] = found.weight;
}

// A run of slots of one warp.
template <class Element>
class RowsOfWarp {
 public:
  __device__ __forceinline__ RowsOfWarp(const RowsParams& params, int64_t first, int count)
      : p_(params), first_(first), count_(count) {}

  // A lane's data of a row for one piece.
  struct Pieces {
    uint32_t first[kPiece / 2];  // g, or u without a gate
    uint32_t second[kPiece / 2];
    uint4 da;
  };

  // Begins to load the pieces of a row of the run at element i. Loads nothing beyond the row or the
  // run.
  __device__ __forceinline__ void load(Pieces& pieces, int row, int i) const {
    if (row >= count_ || i >= p_.inner) return;
    const int64_t slot = first_ + row;
    const uint16_t* const before = p_.pre_activation + slot * p_.pre_activation_stride + i;
    ptx::load_streaming(pieces.first, before);
    if (p_.gated != 0) ptx::load_streaming(pieces.second, before + p_.pre_activation_up);
    // The compiler must see this access: the row is overwritten.
    if (p_.has_da != 0) {
      pieces.da = *reinterpret_cast<const uint4*>(p_.da + slot * p_.inner + i);
    }
  }
  // Loads the pieces after those at element i: of this row, or the first ones of the next row.
  __device__ __forceinline__ void load_next(Pieces& pieces, int row, int i) const {
    constexpr int kBlock = kThreadsPerWarp * kPiece;
    const int block = i - lane_index() * kPiece + kBlock;
    const bool ends = block >= p_.inner;
    load(pieces, ends ? row + 1 : row, (ends ? 0 : block) + lane_index() * kPiece);
  }

  // Adds <da, a> to `total`. The first pieces are loaded already. At the end it loads those of the
  // next row.
  __device__ __forceinline__ float differentiate(Pieces& pieces, int row, float weight,
                                                 float total) const {
    // A limit takes many instructions, and mostly there is none.
    if (p_.limit < INFINITY) return differentiate<true>(pieces, row, weight, total);
    return differentiate<false>(pieces, row, weight, total);
  }

  // Zeros the row of a slot that does not count: products for the weights' gradients read it.
  __device__ __forceinline__ void clear(int row) const {
    const float zeros[kPiece] = {};
    const int64_t slot = first_ + row;
    for (int i = lane_index() * kPiece; i < p_.inner; i += kThreadsPerWarp * kPiece) {
      if (p_.wants_a != 0) store_piece<Element>(p_.da + slot * p_.inner + i, zeros);
      store_dz(p_.dz, slot, i, zeros, zeros);
      store_dz(p_.scaled_dz, slot, i, zeros, zeros);
    }
  }

 private:
  template <bool kCuts>
  __device__ __forceinline__ float differentiate(Pieces& pieces, int row, float weight,
                                                 float total) const {
    constexpr int kBlock = kThreadsPerWarp * kPiece;
    for (int block = 0; block < p_.inner; block += kBlock) {
      const int i = block + lane_index() * kPiece;
      const float dot = differentiate_piece<kCuts>(pieces, row, weight, i);
      if (p_.dots != nullptr) total += sum_of_lanes(dot);
    }
    return total;
  }

  // <da, a> of this lane's pieces at element i. The next pieces are loaded meanwhile.
  template <bool kCuts>
  __device__ __forceinline__ float differentiate_piece(Pieces& pieces, int row, float weight,
                                                       int i) const {
    const int64_t slot = first_ + row;
    const bool is_there = i < p_.inner;
    const float factor = p_.weight_on_input != 0 ? 1.0f : weight;
    float dot = 0.0f;
    float first[kPiece];
    float second[kPiece];
    float da[kPiece];
    unpack_piece<Element>(first, pieces.first);
    if (p_.gated != 0) unpack_piece<Element>(second, pieces.second);
    if (p_.has_da != 0) {
      const uint32_t words[] = {pieces.da.x, pieces.da.y, pieces.da.z, pieces.da.w};
      unpack_piece<Element>(da, words);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) da[j] *= p_.da_scale;
    }
    load_next(pieces, row, i);
    if (!is_there) return 0.0f;
    float act[kPiece];
    float slope[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      act[j] = first[j];
      if (kCuts) act[j] = p_.gated != 0 ? cut_above(act[j], p_.limit) : cut(act[j], p_.limit);
    }
    activate_with_slope(act, slope, p_.activation, p_.alpha);
    float up[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float u = kCuts ? cut(second[j], p_.limit) : second[j];
      up[j] = p_.gated != 0 ? u + p_.up_offset : 1.0f;
    }
    if (p_.has_da != 0) {
      float dfirst[kPiece];
      float dsecond[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        dot = fmaf(da[j], act[j] * up[j], dot);
        const float weighted = da[j] * factor;
        dfirst[j] = weighted * up[j] * slope[j];
        dsecond[j] = p_.gated != 0 ? weighted * act[j] : 0.0f;
        if (kCuts) {
          dfirst[j] = p_.gated != 0 ? through_cut_above(first[j], p_.limit, dfirst[j])
                                    : through_cut(first[j], p_.limit, dfirst[j]);
          dsecond[j] = through_cut(second[j], p_.limit, dsecond[j]);
        }
      }
      store_dz(p_.dz, slot, i, dfirst, dsecond);
      if (p_.scaled_dz.data != nullptr) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          dfirst[j] *= weight;
          dsecond[j] *= weight;
        }
        store_dz(p_.scaled_dz, slot, i, dfirst, dsecond);
      }
    }
    if (p_.wants_a != 0) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) act[j] = act[j] * up[j] * factor;
      store_piece<Element>(p_.da + slot * p_.inner + i, act);
    }
    return dot;
  }

  __device__ __forceinline__ void store_dz(const DzRows& rows, int64_t slot, int i,
                                           const float (&first)[kPiece],
                                           const float (&second)[kPiece]) const {
    if (rows.data == nullptr) return;
    uint16_t* const row = rows.data + slot * rows.stride;
    if (p_.gated == 0) {
      store_piece<Element>(row + rows.places[1] + i, first);
    } else if (rows.step == 1) {
      store_piece<Element>(row + rows.places[0] + i, first);
      store_piece<Element>(row + rows.places[1] + i, second);
    } else {
      float turns[2][kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        turns[j / 4][j % 4 * 2] = first[j];
        turns[j / 4][j % 4 * 2 + 1] = second[j];
      }
      store_piece<Element>(row + rows.places[0] + 2 * i, turns[0]);
      store_piece<Element>(row + rows.places[0] + 2 * i + kPiece, turns[1]);
    }
  }

  const RowsParams& p_;
  const int64_t first_;
  const int count_;
};

// <dout, bias> over this lane's columns.
template <class Element>
__device__ __forceinline__ float dot_with_bias(const RowsParams& p, int token, int expert) {
  float dot = 0.0f;
  const uint16_t* const dout = p.dout + token * p.dout_stride;
  for (int i = lane_index(); i < p.hidden; i += kThreadsPerWarp) {
    dot = fmaf(numeric::ElementTraits<Element>::to_float(dout[i]),
               load_bias<Element>(p.down_bias, expert, i), dot);
  }
  return dot;
}

template <class Element>
__global__ void __launch_bounds__(kRowWarps* kThreadsPerWarp, 5)
    rows_kernel(const __grid_constant__ RowsParams params) {
  begin_kernel();
  if (makes_queue(params.queue)) {
    make_queue(params.routing, params.queue);
    return;
  }
  const Routing& routing = params.routing;
  const int lane = lane_index();
  const int64_t first = (int64_t{blockIdx.x} * kRowWarps + warp_index()) * params.rows_of_warp;
  if (first >= routing.rows) return;
  const int count = static_cast<int>(min(int64_t{params.rows_of_warp}, routing.rows - first));
  // Loads begin before it is known which slots count.
  const RowsOfWarp<Element> rows(params, first, count);
  typename RowsOfWarp<Element>::Pieces pieces;
  if (params.pre_activation != nullptr) rows.load(pieces, 0, lane * kPiece);
  // Each lane looks up one slot, so that the warp waits only once for all look-ups.
  Found mine;
  float dot = 0.0f;  // of this lane's slot
  if (lane < count) {
    mine = look_up(routing, static_cast<int>(first) + lane);
    params.row_tokens[first + lane] = mine.token;
    if (params.adds_dots != 0) dot = params.dots[first + lane];
  }
  if (params.pre_activation == nullptr) return;
  const bool adds_bias =
      params.dots != nullptr && params.adds_dots == 0 && params.down_bias.data != nullptr;
  for (int row = 0; row < count; ++row) {
    const int token = __shfl_sync(kFullWarp, mine.token, row);
    if (token < 0) {
      if (__shfl_sync(kFullWarp, mine.has_expert ? 1 : 0, row) != 0) rows.clear(row);
      rows.load(pieces, row + 1, lane * kPiece);
      continue;
    }
    const float weight = __shfl_sync(kFullWarp, mine.weight, row);
    float total = __shfl_sync(kFullWarp, dot, row);
    if (adds_bias) {
      const int expert = expert_of(routing, static_cast<int>(first) + row);
      total = sum_of_lanes(dot_with_bias<Element>(params, token, expert));
    }
    total = rows.differentiate(pieces, row, weight, total);
    if (lane == row) dot = total;
  }
  if (params.dots != nullptr && lane < count && mine.token >= 0) params.dots[first + lane] = dot;
}

}  // namespace flashmoe::moe_backward
