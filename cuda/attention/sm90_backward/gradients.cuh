// How gradients leave a consumer warpgroup: the part of dQ of each step, and dV and dK of an item,
// by slots that writers empty or directly to the tensors.
#pragma once

#include "cuda/attention/backward/masked_fallback.cuh"
#include "cuda/attention/sm90_backward/products.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90_backward {

using attention_backward::batch_k_of;
using attention_backward::begin_k_of;

template <class Traits>
struct Gradients : Products<Traits> {
  using Base = Products<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dk;
  using Base::dv;
  using Base::group;
  using Base::held_item;
  using Base::index;
  using Base::items;
  using Base::matrix_row;
  using Base::params;
  using Base::shared;
  using Base::shared_items;
  using Base::slot_parity;
  using Base::swizzled_chunk;
  using Base::thread_of_group;
  using typename Base::Element;
  using typename Base::Item;
  using typename Base::Numeric;
  using typename Base::SharedItem;

  __device__ __forceinline__ uint32_t slot_of_group(uint32_t slot, int bytes_per_group) const {
    return shared + Traits::kSlotOffset + slot * Traits::kSlotBytes + group * bytes_per_group;
  }
  __device__ __forceinline__ void fill_slot(uint32_t slot) const {
    ptx::fence_proxy_async_shared();
    release(barriers.slot_full(slot));
  }

  // What other blocks left of a split item. Every block but the last leaves its dV and dK, as
  // [register][thread] of both consumers. The last block adds them to its own, in their order. Its
  // ticket is the last, so the others were taken before.
  struct Splits {
    const float* sums = nullptr;
    int count = 0;
    static constexpr int kStride = kConsumers * kThreadsPerGroup;

    // Adds them to four registers, from `first` on.
    __device__ __forceinline__ void add_to(float (&values)[4], int first) const {
#pragma unroll
      for (int split = 0; split + 1 < attention_backward::kMostSplits; ++split) {
        if (split >= count) continue;
        float left[4];
        ptx::load_from_l2<kStride>(left, sums + split * Traits::kSplitFloats + first * kStride);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] += left[i];
      }
    }
  };
  struct NoSplits {
    __device__ __forceinline__ void add_to(float (&)[4], int) const {}
  };

  // Stores 64 rows of a fragment as 16-bit elements, in boxes of 64 columns. They begin
  // `first_chunk` chunks of 8 columns into the first box.
  template <int kRegisters, class AnySplits = NoSplits>
  __device__ __forceinline__ void store_rows(uint32_t address, const float (&values)[kRegisters],
                                             float scale, int first_chunk = 0,
                                             const AnySplits& splits = {}) const {
    // With panels, ptxas would keep the places of dS's chunks for these: there are too few
    // registers.
    const int lane = Traits::kInPanels ? lane_id() : 0;
    const int row_of_group =
        Traits::kInPanels ? (thread_of_group() - lane) / 2 + lane % 16 : matrix_row();
    const uint32_t row = address + row_of_group * kBoxRowBytes;
#pragma unroll
    for (int slice = 0; slice < kRegisters / 8; ++slice) {
      uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = values[8 * slice + 4 * half + i];
        splits.add_to(four, 8 * slice + 4 * half);
        packed[2 * half] = Numeric::pack(four[0] * scale, four[1] * scale);
        packed[2 * half + 1] = Numeric::pack(four[2] * scale, four[3] * scale);
      }
      ptx::stmatrix_x4(
          row + slice / 4 * 64 * kBoxRowBytes +
              swizzled_chunk(Traits::kInPanels ? lane : lane_index(), slice, first_chunk),
          packed[0], packed[1], packed[2], packed[3]);
    }
  }

  // Returns the marks of this consumer's keys of the item, or nullptr if there are no marks.
  __device__ __forceinline__ uint2* marks_of_keys(uint2* marks, const SharedItem& item,
                                                  int group_of_tile, int first_column) const {
    if (marks == nullptr) return nullptr;
    return sm90_backward::marks_of_keys<Traits>(marks, number_of(params, item), group_of_tile,
                                                first_column);
  }

  // Returns the lanes of this warp whose values of a row are not finite. The rows are lane / 4, or
  // those 8 further on.
  template <int kRegisters>
  static __device__ __forceinline__ uint32_t nonfinite_lanes(const float (&values)[kRegisters],
                                                             float scale, int half) {
    float sum = 0.0f;  // a sum of zeros, unless a value is not finite
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      sum = fmaf(values[4 * i + 2 * half] * scale, 0.0f, sum);
      sum = fmaf(values[4 * i + 2 * half + 1] * scale, 0.0f, sum);
    }
    return __ballot_sync(kFullWarp, sum != 0.0f);
  }

  // Writes the fragment of 64 rows from `first_row` on, as far as rows exist before `end_row`, to
  // the columns from `first_column` on. With `marks`, which are those of the fragment's warps, rows
  // that are not finite are marked and left as they are.
  template <int kRegisters, class AnySplits = NoSplits>
  __device__ __forceinline__ void write_directly(const Direct& to,
                                                 const float (&values)[kRegisters], float scale,
                                                 int batch, int head, int first_row, int end_row,
                                                 int first_column, int end_column, uint2* marks,
                                                 const AnySplits& splits = {}) const {
    const int lane = lane_index();
    uint32_t withheld = 0;  // a bit for each of this lane's rows
    if (marks != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t lanes = nonfinite_lanes(values, scale, half);
        if (lane == 0) reinterpret_cast<uint32_t*>(marks + warp_of_group())[half] = lanes;
        if ((lanes >> (lane & ~3) & 0xf) != 0) withheld |= 1u << half;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_of_group() * 16 + lane / 4 + 8 * half;
      if (row >= end_row || (withheld & 1u << half) != 0) continue;
      const int64_t place =
          batch * to.strides.batch + head * to.strides.head + row * to.strides.seq;
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) {
        const int column = first_column + 8 * i + 2 * (lane % 4);
        if (column >= end_column) continue;
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = values[4 * i + e];
        splits.add_to(four, 4 * i);
        attention_backward::store_pair<Element>(to, place + column, params.accumulate != 0,
                                                four[2 * half] * scale, four[2 * half + 1] * scale);
      }
    }
  }

  __device__ __forceinline__ void write_dq_directly(const float (&dq)[Traits::kDqRegisters],
                                                    uint32_t tile) const {
    const uint32_t tile_of_all = tile / Traits::kPanels;
    const int head_of_all = tile_of_all / params.tiles_q;
    int tile_q = tile_of_all - head_of_all * params.tiles_q;
    int batch = head_of_all / params.heads_q;
    int begin = 0;
    int seq_q = params.seq_q;
    const int head = head_of_all - batch * params.heads_q;
    if constexpr (Traits::kRagged) {
      const SharedItem& item = held_item();
      tile_q -= item.first_tile;
      batch = item.batch_q;
      begin = item.begin_q;
      seq_q = begin + item.length_q;
    }
    const int first_column = Traits::kSplitsColumns
                                 ? group * Traits::kDqColumns
                                 : tile % Traits::kPanels * Traits::kPanelColumns;
    const int group_of_tile = Traits::kTileQ == 64 ? 0 : group;
    write_directly(params.dq_direct, dq, params.scale, batch, head,
                   begin + tile_q * Traits::kTileQ + 64 * group_of_tile, seq_q, first_column,
                   params.dim,
                   marks_of_dq<Traits>(params.withheld, tile_of_all, group_of_tile, first_column));
  }

  // Stores the part of dQ of the step before in a slot. `fill_slot` then hands the slot to the
  // writer.
  __device__ __forceinline__ void store_dq(float (&dq)[Traits::kDqRegisters]) {
    const uint32_t step = index - 1;
    const uint32_t place = step & 1;
    ptx::mbarrier_wait(barriers.slot_ready(place), ((step >> 1) + items) & 1);
    fill_with_dq(dq, place, slot_of_group(place, Traits::kDqBytesPerGroup));
  }

  // Leaves a part of dQ at the address `slot` in the slot with the number `place`, as the use of
  // that slot says.
  __device__ __forceinline__ void fill_with_dq(float (&dq)[Traits::kDqRegisters], uint32_t place,
                                               uint32_t slot) const {
    const uint32_t fragment = slot + thread_of_group() * 16;
    constexpr int kChunkBytes = kThreadsPerGroup * 16;
    const uint32_t use = ptx::load_shared_uint(barriers.slot_use(place));
    if (use == kPart) {
#pragma unroll
      for (int i = 0; i < Traits::kDqRegisters / 4; ++i) {
        ptx::store_shared(fragment + i * kChunkBytes,
                          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
      }
    } else {
      if (use == kLastPart) {
#pragma unroll
        for (int i = 0; i < Traits::kDqRegisters / 4; ++i) {
          const float4 sum = ptx::load_shared_float4(fragment + i * kChunkBytes);
          dq[4 * i] += sum.x;
          dq[4 * i + 1] += sum.y;
          dq[4 * i + 2] += sum.z;
          dq[4 * i + 3] += sum.w;
        }
      }
      if (params.dq_direct.rows != nullptr) {
        write_dq_directly(dq, ptx::load_shared_uint(barriers.slot_tile(place)));
        return;
      }
      if (use == kLastPart) {
        // Rows overwrite what others read. A consumer may be in a step that the other one skips.
        if (Traits::kSharesDqBox) {
          ptx::named_barrier_sync_apart(kDsBarrier, kConsumers * kThreadsPerGroup);
        } else {
          ptx::named_barrier_sync(kGroupBarrier + group, kThreadsPerGroup);
        }
      }
      if (Traits::kSharesDqBox) {
        store_rows(slot_of_group(place, 0), dq, params.scale, group * (Traits::kDqColumns / 8));
      } else {
        store_rows(slot, dq, params.scale);
      }
    }
  }
  __device__ __forceinline__ void hand_over_dq() const { fill_slot((index - 1) & 1); }

  __device__ __forceinline__ void clear_keys() {
#pragma unroll
    for (int i = 0; i < Traits::kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kDimV / 2; ++i) dv[i] = 0.0f;
  }

  template <int kRegisters>
  static __device__ __forceinline__ void leave(float* to, const float (&values)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
      ptx::store_global<Splits::kStride>(to + i * Splits::kStride, four);
    }
  }

  __device__ __forceinline__ float* split_sums(int split_item, int split) const {
    const int64_t place = static_cast<int64_t>(split_item) * (params.split.splits - 1) + split;
    return params.split_sums + place * Traits::kSplitFloats + group * kThreadsPerGroup +
           thread_of_group();
  }

  __device__ __forceinline__ void leave_sums(int split_item, int split) const {
    float* const to = split_sums(split_item, split);
    leave(to, dv);
    leave(to + Traits::kDimV / 2 * Splits::kStride, dk);
    __syncwarp();
    if (lane_index() == 0) ptx::add_release(params.split_turns + split_item, 1);
  }

  __device__ __forceinline__ Splits wait_for_splits(int split_item, int count) const {
    constexpr int kWarps = 4 * kConsumers;
    ptx::wait_for_word(params.split_turns + split_item, static_cast<uint32_t>(kWarps * count));
    return {split_sums(split_item, 0), count};
  }

  __device__ __forceinline__ void write_keys() const {
    Splits splits;
    bool leaves = false;
    if constexpr (!Traits::kRagged) {
      const Item* const item = shared_items + items % kItemsHeld;
      const int split_item = __shfl_sync(kFullWarp, item->split_item, 0);
      const int split = __shfl_sync(kFullWarp, item->split, 0);
      leaves = split_item != kWhole && split + 1 < params.split.splits;
      if (leaves) {
        leave_sums(split_item, split);
      } else if (split_item != kWhole) {
        splits = wait_for_splits(split_item, split);
      }
    }
    const uint32_t first = buffer();
    ptx::mbarrier_wait(barriers.slot_ready(first), slot_parity());
    if (!leaves) {
      write_keys<Traits::kBoxesV>(params.dv_direct, params.withheld.dv, dv, 1.0f, splits, first,
                                  params.dim_v);
    }
    fill_slot(first);
    const uint32_t second = first ^ 1;
    ptx::mbarrier_wait(barriers.slot_ready(second), (((index + 1) >> 1) + items) & 1);
    if (!leaves) {
      if (splits.count > 0) splits.sums += Traits::kDimV / 2 * Splits::kStride;
      write_keys<Traits::kBoxes>(params.dk_direct, params.withheld.dk, dk, params.scale, splits,
                                 second, params.dim);
    }
    fill_slot(second);
  }

  template <int kColumnBoxes, int kRegisters>
  __device__ __forceinline__ void write_keys(const Direct& direct, uint2* marks,
                                             const float (&values)[kRegisters], float scale,
                                             const Splits& splits, uint32_t slot,
                                             int columns) const {
    if (direct.rows == nullptr) {
      const uint32_t to = slot_of_group(slot, kColumnBoxes * Traits::kGroupBoxBytes);
      if (Traits::kRagged || splits.count == 0) {
        store_rows(to, values, scale);
      } else {
        store_rows(to, values, scale, 0, splits);
      }
    } else {
      const SharedItem& item = shared_items[items % kItemsHeld];
      const int begin = begin_k_of(item);
      write_directly(direct, values, scale, batch_k_of(item), item.head_kv,
                     begin + item.tile * Traits::kTileK + group * kKeysPerGroup,
                     begin + length_k_of(params, item), 0, columns,
                     marks_of_keys(marks, item, group, 0), splits);
    }
  }
};

}  // namespace flashmoe::sm90_backward
