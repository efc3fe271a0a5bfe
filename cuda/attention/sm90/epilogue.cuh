// The epilogue of a consumer warpgroup: it divides a tile's output by its sums and writes output
// and log-sum-exp, or leaves a part of the tile in the workspace where keys are split.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/products.cuh"
#include "cuda/attention/sm90/ragged_loads.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/softmax.cuh"

namespace flashmoe::sm90 {

template <class Traits>
struct Epilogue : Products<Traits> {
  using Base = Products<Traits>;
  using Base::add;
  using Base::Base;
  using Base::group;
  using Base::open;
  using Base::out;
  using Base::params;
  using Base::sequence;
  using Base::shared;
  using Base::suspect;
  using Base::tile;
  using Base::tiles;
  using typename Base::Element;
  using typename Base::Numeric;
  using typename Base::Tile;

  // Writes the result of a tile. The next tile begins anew.
  __device__ __forceinline__ void end_tile(uint32_t closing, const Statistics& statistics_of_tile) {
    if constexpr (Traits::kSplit) {
      if (tiles[closing % Traits::kTileSlots].place != kWholeTile) {
        leave_part(tiles[closing % Traits::kTileSlots], statistics_of_tile);
      } else {
        write_rows(tiles[closing % Traits::kTileSlots], statistics_of_tile);
      }
    } else {
      finish(closing, statistics_of_tile);
    }
    open = false;
    add = false;
  }

  // Divides by the sums and writes out and lse.
  __device__ __forceinline__ void finish(uint32_t closing, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
    const int warp = warp_of_group();
    const std::conditional_t<Traits::kRagged, const Tile&, Tile> tile =
        tiles[closing % Traits::kTileSlots];
    const SequenceOf<Traits> sequence = sequence_of_tile<Traits>(params, tile);
    const int group_row = tile.first_row + group * queries_per_group<Traits>(params);
    float factor[2];
    // The row is expected to be finite, if V is.
    bool expected[2];
    bool fallback = false;
    if constexpr (Traits::kRagged) fallback = tile.misses_pages != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query_of<Traits>(params, group_row, warp * 16 + lane / 4 + 8 * half);
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      const bool sees_keys = sequence.sees_keys(params.score, row);
      bool exists = row < sequence.length_q;
      if constexpr (Traits::kPacked) exists = exists && row - group_row < params.queries_per_group;
      const RowEnd end = end_row<RowEndBy::kApprox>(tile.sink, sees_keys && exists,
                                                    {statistics_of_tile.row_max[half], total});
      if (params.tensors.lse != nullptr && lane % 4 == 0 && exists) {
        if constexpr (Traits::kPacked) {
          *lse_of(tile, packed_row(tile, warp * 16 + lane / 4 + 8 * half)) = end.lse;
        } else {
          *lse_of(tile, row) = end.lse;
        }
      }
      factor[half] = end.factor;
      fallback = fallback || end.rounded_away;
      // A NaN in the sum comes from a key that the row sees. With short windows, a masked step may
      // stand for another one.
      const bool masked = Traits::kWindowSteps > 0 || is_masked<Traits>(params, tile);
      expected[half] = masked && exists && total == total;
    }
    const uint32_t tile_out = shared + Traits::kOOffset + group * Traits::kOBytesPerGroup;
    const bool leader = warp == 0 && lane == 0;
    const int matrix_row = warp * 16 + lane % 16;
    uint32_t gathered[2] = {0, 0};
#pragma unroll
    for (int part = 0; part < Traits::kOutputParts; ++part) {
      constexpr int kPairsPerBox = kBoxColumns / 16;
      constexpr int kPairs = Traits::kDimV / 16;
      const int first_box = part * Traits::kOutputBoxes;
      if (leader) ptx::tma_store_wait_read();  // the part before has left
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
#pragma unroll
      for (int i = 0; i < Traits::kOutputBoxes * kPairsPerBox; ++i) {
        const int pair = first_box * kPairsPerBox + i;
        if (pair >= kPairs) break;
        uint32_t packed[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          packed[r] = Numeric::pack(out[8 * pair + 2 * r] * factor[r % 2],
                                    out[8 * pair + 2 * r + 1] * factor[r % 2]);
          gathered[r % 2] = numeric::gather_nonfinite<Element>(gathered[r % 2], packed[r]);
        }
        const int chunk = 2 * (i % kPairsPerBox) + lane / 16;
        ptx::stmatrix_x4(tile_out + i / kPairsPerBox * Traits::kRowBoxBytes +
                             matrix_row * kBoxRowBytes + ((chunk ^ (matrix_row % 8)) * 16),
                         packed[0], packed[1], packed[2], packed[3]);
      }
      ptx::fence_proxy_async_shared();
      ptx::named_barrier_sync(kStoreBarrier + group, kThreadsPerGroup);
      if (leader && group_row < sequence.length_q) {
#pragma unroll
        for (int box = first_box; box < Traits::kBoxesV && box < first_box + Traits::kOutputBoxes;
             ++box) {
          const uint32_t from = tile_out + (box - first_box) * Traits::kRowBoxBytes;
          if constexpr (Traits::kRagged) {
            const RaggedRow row = query_box(params, tile, params.rows_per_batch.out, group_row);
            if constexpr (Traits::kPacked) {
              ptx::tma_store(&params.out, from, box * kBoxColumns, tile.head, row.row, row.base,
                             row.wrap);
            } else {
              ptx::tma_store(&params.out, from, box * kBoxColumns, row.row, tile.head, row.base,
                             row.wrap);
            }
          } else {
            ptx::tma_store(&params.out, from, box * kBoxColumns, sequence.begin_q + group_row,
                           tile.head, tile.batch);
          }
        }
        ptx::tma_store_commit();
      }
    }
    fallback = fallback || (expected[0] && numeric::any_nonfinite<Element>(gathered[0])) ||
               (expected[1] && numeric::any_nonfinite<Element>(gathered[1]));
    suspect = suspect || __any_sync(kFullWarp, fallback);
  }

  // Returns where the lse of a row lies. The row is one of a head, or one of a tile of sequences.
  __device__ __forceinline__ float* lse_of(const Tile& of, int row) const {
    if constexpr (Traits::kRagged) {
      return params.tensors.lse +
             PlaceOfRow::of(params, of, row).offset(params.tensors.lse_strides, of.batch);
    } else {
      return params.tensors.lse + of.batch * params.tensors.lse_strides.batch +
             of.head * params.tensors.lse_strides.head +
             (sequence_of_tile<Traits>(params, of).begin_q + row) * params.tensors.lse_strides.seq;
    }
  }
  __device__ __forceinline__ uint16_t* out_of(const Tile& of, int row) const {
    const RowStrides& strides = params.tensors.out_strides;
    if constexpr (Traits::kRagged) {
      return params.tensors.out + PlaceOfRow::of(params, of, row).offset(strides, of.batch);
    } else {
      return params.tensors.out + of.batch * strides.batch + of.head * strides.head +
             (sequence_of_tile<Traits>(params, of).begin_q + row) * strides.seq;
    }
  }

  // The same for a packed row of a tile of sequences.
  __device__ __forceinline__ int64_t offset_of(const Tile& of, const PackedRow& row,
                                               const RowStrides& strides) const {
    return PlaceOfRow{row.head, of.sequence.begin_q + row.query}.offset(strides, of.batch);
  }
  __device__ __forceinline__ float* lse_of(const Tile& of, const PackedRow& row) const {
    return params.tensors.lse + offset_of(of, row, params.tensors.lse_strides);
  }
  __device__ __forceinline__ uint16_t* out_of(const Tile& of, const PackedRow& row) const {
    return params.tensors.out + offset_of(of, row, params.tensors.out_strides);
  }

  // Writes 0 as the output and the sink as the log-sum-exp of the rows of this warp, which see no
  // key.
  __device__ __forceinline__ void write_nothing_seen() const {
    const Tile here = tiles[tile % Traits::kTileSlots];
    if constexpr (Traits::kPacked) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const PackedRow row = packed_row(here, warp_of_group() * 16 + i);
        if (!row.exists) continue;
        uint16_t* const out_row = out_of(here, row);
#pragma unroll 1
        for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
          out_row[column] = 0;
        }
        if (params.tensors.lse != nullptr && lane_index() == 0) *lse_of(here, row) = here.sink;
      }
      return;
    }
    const int first_row = here.first_row + group * kRowsPerGroup + warp_of_group() * 16;
#pragma unroll 1
    for (int row = max(first_row, 0); row < min(first_row + 16, sequence().length_q); ++row) {
      uint16_t* const out_row = out_of(here, row);
#pragma unroll 1
      for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
        out_row[column] = 0;
      }
      if (params.tensors.lse != nullptr && lane_index() == 0) {
        *lse_of(here, row) = here.sink;
      }
    }
  }

  // Does the same for one row, except for what its lse has beside keys. `repair` adds that: here it
  // would cost registers that the products need.
  __device__ __forceinline__ void write_nothing_to(int batch, int head, int query) const {
    const int row = sequence_of(params, batch).begin_q + query;
    uint16_t* out_row = params.tensors.out + batch * params.tensors.out_strides.batch +
                        head * params.tensors.out_strides.head +
                        row * params.tensors.out_strides.seq;
#pragma unroll 1
    for (int column = lane_index(); column < params.tensors.dim_v; column += kThreadsPerWarp) {
      out_row[column] = 0;
    }
    if (params.tensors.lse != nullptr && lane_index() == 0) {
      params.tensors
          .lse[batch * params.tensors.lse_strides.batch + head * params.tensors.lse_strides.head +
               row * params.tensors.lse_strides.seq] = -INFINITY;
    }
  }
  __device__ __forceinline__ PackedRow packed_row(const Tile& of, int row) const {
    return PackedRow::of(params, of, group, row);
  }

  // Returns the place of a row in the workspace.
  __device__ __forceinline__ int64_t place_of(const Tile& of, int row) const {
    return static_cast<int64_t>(of.place) * Traits::kTileQ + group * kRowsPerGroup + row;
  }

  // Leaves this warp's part of the tile in the workspace, two columns at a time. Stores of four
  // columns, whichever they are, would need the accumulators in other registers than wgmma does.
  __device__ __forceinline__ void leave_part(const Tile& of, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_of_group() * 16 + lane / 4 + 8 * half;
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      if (!packed_row(of, row).exists) continue;
      const int64_t place = place_of(of, row);
      if (lane % 4 == 0) {
        params.part_statistics[place] = make_float2(statistics_of_tile.row_max[half], total);
      }
      auto* part =
          reinterpret_cast<float2*>(params.part_outs + place * Traits::kUnitsPerRow) + lane % 4;
#pragma unroll
      for (int j = 0; j < Traits::kDimV / 8; ++j) {
        part[4 * j] = make_float2(out[4 * j + 2 * half], out[4 * j + 2 * half + 1]);
      }
    }
    __syncwarp();
  }

  // Writes a tile that has no other part: divides by the sums and writes out and lse.
  __device__ __forceinline__ void write_rows(const Tile& of, const Statistics& statistics_of_tile) {
    const int lane = lane_index();
    bool fallback = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_quad(statistics_of_tile.sum[half]);
      const PackedRow row = packed_row(of, warp_of_group() * 16 + lane / 4 + 8 * half);
      if (!row.exists) continue;
      const Sequence sequence = sequence_of(params, of.batch);
      const bool sees_keys = sequence.sees_keys(params.score, row.query);
      const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kApprox>(
          params.score, row.head, sees_keys, {statistics_of_tile.row_max[half], total});
      if (params.tensors.lse != nullptr && lane % 4 == 0) {
        params.tensors.lse[of.batch * params.tensors.lse_strides.batch +
                           row.head * params.tensors.lse_strides.head +
                           (sequence.begin_q + row.query) * params.tensors.lse_strides.seq] =
            end.lse;
      }
      uint16_t* out_row = params.tensors.out + of.batch * params.tensors.out_strides.batch +
                          row.head * params.tensors.out_strides.head +
                          (sequence.begin_q + row.query) * params.tensors.out_strides.seq +
                          2 * (lane % 4);
      uint32_t gathered = 0;
#pragma unroll
      for (int j = 0; j < Traits::kDimV / 8; ++j) {
        if (8 * j >= params.tensors.dim_v) break;
        const uint32_t packed = Numeric::pack(out[4 * j + 2 * half] * end.factor,
                                              out[4 * j + 2 * half + 1] * end.factor);
        gathered = numeric::gather_nonfinite<Element>(gathered, packed);
        *reinterpret_cast<uint32_t*>(out_row + 8 * j) = packed;
      }
      // A NaN in the sum comes from a key that the row sees.
      fallback =
          fallback || end.rounded_away ||
          (params.score.masked && total == total && numeric::any_nonfinite<Element>(gathered));
    }
    __syncwarp();
    suspect = suspect || __any_sync(kFullWarp, fallback);
  }

  // Leaves word that the rows of this warp see no key of the part.
  __device__ __forceinline__ void leave_nothing(const Tile& of) const {
    const int lane = lane_index();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = warp_of_group() * 16 + i;
      const PackedRow which = packed_row(of, row);
      if (!which.exists) continue;
      if (of.place != kWholeTile) {
        if (lane == 0) params.part_statistics[place_of(of, row)] = make_float2(-INFINITY, 0.0f);
      } else {
        write_nothing_to(of.batch, which.head, which.query);
      }
    }
    __syncwarp();
  }
};

}  // namespace flashmoe::sm90
