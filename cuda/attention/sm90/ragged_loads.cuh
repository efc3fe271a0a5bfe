// Copies of a sequence's rows between tensors and shared memory: the boxes of Q, K and V that the
// producer of sequences loads, of dense rows or of pages.
#pragma once

#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90/ragged.cuh"
#include "cuda/attention/sm90/storage.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::sm90 {

// Loads the keys or values of the step that begins at a key, once there is room for them. Keys that
// the sequence does not have arrive as zeros. Shared memory is read before the wait: after it, the
// room would stay empty meanwhile.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_ragged_step(const CUtensorMap& map, const Repeats& repeats,
                                                 int rows_per_batch, const RaggedTile& tile,
                                                 int key, uint32_t to, uint32_t full,
                                                 uint32_t empty, uint32_t parity) {
  const RaggedRow row = RaggedRow::at(key, tile.sequence.begin_k + tile.batch_k * rows_per_batch,
                                      tile.sequence.length_k);
  const int head = tile.head_kv * repeats.head;
  ptx::mbarrier_wait(empty, parity);
  ptx::mbarrier_arrive_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::tma_load(to + box * Traits::kKVBoxBytes, &map, full, ptx::kEvictLast, box * kBoxColumns,
                  row.row, head, row.base, row.wrap);
  }
}

// Rows of a step of paged keys that follow one another in a page, and that page. Where there is no
// page, `page` lies outside the map, from where zeros come.
template <class Traits>
struct PagedRows {
  PagePiece piece;
  int page;

  static __device__ __forceinline__ PagedRows at(const RaggedParams& params, const Repeats& repeats,
                                                 RaggedTile& tile, int key, int end) {
    constexpr int kNowhere = -1;
    const KeyTables& tables = params.sequences.keys;
    PagedRows rows = {
        PagePiece::at(tables.by_page_size, key, end, tile.sequence.begin_k, tile.sequence.length_k),
        kNowhere};
    if (rows.piece.page >= 0) {
      rows.page = tables.page_at(tables.pages_of(tile.batch_k), rows.piece.page);
      if (rows.page < 0) {
#pragma unroll
        for (int ring = 0; ring < Traits::kTileRings; ++ring) {
          tile_of_group<Traits>(tile, ring).misses_pages = 1;
        }
      }
      if (rows.page > 0) rows.page *= repeats.batch;
    }
    return rows;
  }
};

// Begins to load the rows of pages that make up a step, one piece after another. Rows that do not
// exist come as zeros from outside the map: those before key 0, those after the last key, and those
// of a missing page. Pieces are cut into boxes of powers of two rows, which need not begin with a
// whole swizzle. A piece's page is read before the piece in front of it is requested, and the first
// piece's page is read before there is room for the step. So a load that waits for room does not
// wait for a table afterwards.
template <class Traits, int kBoxes>
__device__ __forceinline__ void load_paged_step(const RaggedParams& params,
                                                const CUtensorMap (&maps)[kPageBoxes],
                                                const Repeats& repeats, RaggedTile& tile, int key,
                                                uint32_t to, uint32_t full, uint32_t empty,
                                                uint32_t parity) {
  static_assert(Traits::kStepKeys < 1 << kPageBoxes);
  const int end = key + Traits::kStepKeys;
  PagedRows<Traits> next = PagedRows<Traits>::at(params, repeats, tile, key, end);
  ptx::mbarrier_wait(empty, parity);
  ptx::mbarrier_expect(full, kBoxes * Traits::kKVBoxBytes);
#pragma unroll 1
  while (true) {
    PagePiece piece = next.piece;
    const int page = next.page;
    key += piece.rows;
    const bool more = key < end;
    if (more) next = PagedRows<Traits>::at(params, repeats, tile, key, end);
#pragma unroll 1
    while (piece.rows > 0) {
      const int size = 31 - __clz(piece.rows);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        ptx::tma_load(to + box * Traits::kKVBoxBytes, &maps[size], full, ptx::kEvictLast,
                      box * kBoxColumns, piece.row, tile.head_kv * repeats.head, page);
      }
      to += kBoxRowBytes << size;
      piece.row += 1 << size;
      piece.rows -= 1 << size;
    }
    if (!more) break;
  }

  // The arrival comes after the tile was marked for missing pages.
  ptx::mbarrier_arrive(full);
}

// Returns the coordinates of a box that begins at a row of the tile's sequence, in the map of q or
// of out.
__device__ __forceinline__ RaggedRow query_box(const RaggedParams& params, const RaggedTile& tile,
                                               int rows_per_batch, int row) {
  const int begin = tile.sequence.begin_q + tile.batch * rows_per_batch;
  if (params.heads_per_tile > 1) return RaggedRow::of_heads(row, begin);
  return RaggedRow::at(row, begin, tile.sequence.length_q);
}

// Bytes of Q that are loaded for a group: a group lacks rows if packed heads do not divide them.
template <class Traits>
__device__ __forceinline__ int bytes_of_group(const RaggedParams& params) {
  if constexpr (Traits::kPacked) {
    return Traits::kBoxes * kBoxRowBytes * params.queries_per_group * params.packed_heads;
  } else {
    return Traits::kQBytesPerGroup;
  }
}

// Loads the rows of a portion's groups, once there is room for them. The coordinates of the first
// rows are known before the wait. Kernels with a single Q, which wait longest for it, have a
// portion for each group.
template <class Traits, class Wait>
__device__ __forceinline__ void load_ragged_q(const RaggedParams& params, const RaggedTile& tile,
                                              int portion, uint32_t to, uint32_t full,
                                              const Wait& wait_for_room) {
  const int begin = portion * Traits::kGroupsPerPortion;
  const int end = begin + Traits::kGroupsPerPortion;
  const auto row_of = [&](int group) {
    const RaggedTile& own = tile_of_group<Traits>(tile, group);
    return query_box(params, own, params.rows_per_batch.q,
                     own.first_row + group * queries_per_group<Traits>(params));
  };
  RaggedRow row = row_of(begin);
  wait_for_room();
  ptx::mbarrier_arrive_expect(full, Traits::kGroupsPerPortion * bytes_of_group<Traits>(params));
#pragma unroll 1
  for (int group = begin;; row = row_of(group)) {
#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      const uint32_t to_box = to + group * Traits::kQBytesPerGroup + box * Traits::kRowBoxBytes;
      if constexpr (Traits::kPacked) {
        ptx::tma_load(to_box, &params.q, full, ptx::kEvictFirst, box * kBoxColumns, tile.head,
                      row.row, row.base, row.wrap);
      } else {
        ptx::tma_load(to_box, &params.q, full, ptx::kEvictFirst, box * kBoxColumns, row.row,
                      tile_of_group<Traits>(tile, group).head * params.q_repeats.head, row.base,
                      row.wrap);
      }
    }
    if (++group == end) break;
  }
}

}  // namespace flashmoe::sm90
