// The sequences of a ragged, padded or paged batch, as kernels read them: the tables of
// flashmoe_attention_sequences in device memory, and what their numbers mean.
//
// Tables may hold any numbers, but none leads outside a tensor. Offsets and lengths are clamped, so
// that senseless ones count as no query and no key. A page is checked before it is used. The CPU
// does the same (cpu/attention_sequences.cpp).
//
// This is also host code, for its tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/divisor.h"

#ifdef __CUDACC__
#define FLASHMOE_IN_KERNEL __device__ __forceinline__
#else
#define FLASHMOE_IN_KERNEL inline
#endif

namespace flashmoe {

// Upper bound on sequences, rows of a tensor, and keys of a sequence's pages: sums of two rows, an
// offset and a tile fit in int32.
inline constexpr int64_t kMostTableRows = int64_t{1} << 29;

// The same bound for sequences that give the position of their queries (q_offset), if some query
// does not see every key, and the bound on the width of a window then. A query, its diagonal, an
// absent bound and 1 fit in int32.
inline constexpr int64_t kMostOffsetRows = int64_t{1} << 27;
inline constexpr int64_t kMostOffsetWindow = int64_t{1} << 29;

// int32 numbers. data is nullptr if they are absent.
struct TableNumbers {
  const int32_t* data;
  int64_t stride;  // elements

  FLASHMOE_IN_KERNEL bool given() const { return data != nullptr; }
  FLASHMOE_IN_KERNEL int at(int i) const { return data[i * stride]; }
};

// Consecutive rows of a row of the batch. The pages of a sequence count as if they were contiguous.
struct SequenceRows {
  int batch;
  int begin;
  int length;
  int skipped = 0;  // keys that k_begin skips
};

struct KeyTables {
  TableNumbers page_table;  // strided from one sequence's pages to the next
  int64_t page_step;        // stride from one page to the next
  int32_t batch_k;          // rows of k's batch; with a page table, its pages
  int32_t page_size;
  Divisor by_page_size;

  // The pages of a sequence.
  FLASHMOE_IN_KERNEL const int32_t* pages_of(int sequence) const {
    return page_table.data + sequence * page_table.stride;
  }

  // One page of a sequence, or -1 if it is invalid.
  FLASHMOE_IN_KERNEL int page_at(const int32_t* pages, int index) const {
    const int page = TableNumbers{pages, page_step}.at(index);
    return page >= 0 && page < batch_k ? page : -1;
  }

  // The position of a row of a sequence's pages. The batch is -1 if its page is invalid: the row is
  // hidden then.
  struct Place {
    int batch;
    int row;
  };
  FLASHMOE_IN_KERNEL Place place_of(const int32_t* pages, int row) const {
    const int index = by_page_size.quotient(row);
    return {page_at(pages, index), row - index * page_size};
  }
};

struct SequenceParams {
  TableNumbers cu_seqlens_q;
  TableNumbers cu_seqlens_k;
  TableNumbers seqused_q;
  TableNumbers seqused_k;
  TableNumbers k_begin;
  TableNumbers batch_index;
  TableNumbers q_offset;  // given only if it matters
  KeyTables keys;
  int32_t count;      // sequences
  int32_t rows_q;     // rows per row of q's batch
  int32_t room_k;     // rows per row of k's batch; with a page table, rows of a sequence's pages
  int32_t most_q;     // queries per sequence
  int32_t most_k;     // keys per sequence
  int32_t pair_keys;  // rows of keys, with skipped ones, in a bias or a mask
  int32_t paged;      // there is a page table
  int32_t from_ends;  // masks count from the last query and key, else from the first
  // Offsets are clamped to these. No query can tell a clamped offset from the original.
  int32_t least_offset;
  int32_t most_offset;

  FLASHMOE_IN_KERNEL SequenceRows queries_of(int sequence) const {
    SequenceRows rows = {sequence, 0, rows_q};
    if (cu_seqlens_q.given()) rows = packed(cu_seqlens_q, sequence, rows_q);
    if (seqused_q.given()) rows.length = cut(seqused_q.at(sequence), 0, rows.length);
    rows.length = smaller_of(rows.length, most_q);
    return rows;
  }

  // With a page table, `batch` has no meaning.
  FLASHMOE_IN_KERNEL SequenceRows keys_of(int sequence) const {
    SequenceRows rows = {sequence, 0, room_k};
    if (cu_seqlens_k.given()) rows = packed(cu_seqlens_k, sequence, room_k);
    if (batch_index.given()) {
      rows.batch = batch_index.at(sequence);
      if (rows.batch < 0 || rows.batch >= keys.batch_k) return {0, 0, 0};
    }
    rows.length = smaller_of(rows.length, pair_keys);
    if (seqused_k.given()) rows.length = cut(seqused_k.at(sequence), 0, rows.length);
    if (k_begin.given()) {
      rows.skipped = cut(k_begin.at(sequence), 0, rows.length);
      rows.begin += rows.skipped;
      rows.length -= rows.skipped;
    }
    rows.length = smaller_of(rows.length, most_k);
    return rows;
  }

  // The number that is added to a query's index before the score options of such a batch apply.
  FLASHMOE_IN_KERNEL int diagonal_of(int sequence, int length_q, int length_k) const {
    if (q_offset.given()) return cut(q_offset.at(sequence), least_offset, most_offset);
    return from_ends != 0 ? length_k - length_q : 0;
  }

  static FLASHMOE_IN_KERNEL int smaller_of(int a, int b) { return a < b ? a : b; }
  static FLASHMOE_IN_KERNEL int cut(int number, int least, int most) {
    return number < least ? least : smaller_of(number, most);
  }

 private:
  static FLASHMOE_IN_KERNEL SequenceRows packed(const TableNumbers& offsets, int sequence,
                                                int rows) {
    const int begin = cut(offsets.at(sequence), 0, rows);
    return {0, begin, cut(offsets.at(sequence + 1), begin, rows) - begin};
  }
};

// Tiles of queries have slots, which the host can count without the lengths. Either every sequence
// has as many slots as the longest may need. Or, for packed queries, there are as many slots as
// their rows have whole tiles, plus one per sequence. In the second case sequence s has the slots
// from begin / tile_q + s on, and a search finds the owner of a slot. Other slots have no or little
// work.
//
// If offsets decrease, sequences share rows and may share a slot. Each still has its own tiles
// within the slots.
struct TileSlots {
  int32_t count;
  int32_t tiles_per_sequence;  // 0: by rows
  Divisor by_tiles_per_sequence;
};

// Whether slots are by rows, and how many there are. p has at most 2^31 - 1 sequences.
inline bool has_slots_by_rows(const AttentionProblem& p, int64_t tile_q, int64_t* count) {
  const int64_t by_sequence = p.batch * ((p.seq_q + tile_q - 1) / tile_q);
  const int64_t by_rows = p.sequences.rows_q / tile_q + p.batch;
  const bool packed = p.sequences.cu_seqlens_q.data != nullptr;
  *count = packed ? std::min(by_rows, by_sequence) : by_sequence;
  return packed && by_rows < by_sequence;
}

// The number of slots must fit in int32.
inline TileSlots tile_slots(const AttentionProblem& p, int64_t tile_q) {
  int64_t count = 0;
  const bool by_rows = has_slots_by_rows(p, tile_q, &count);
  const int64_t tiles = std::max<int64_t>((p.seq_q + tile_q - 1) / tile_q, 1);
  return {static_cast<int32_t>(count), by_rows ? 0 : static_cast<int32_t>(tiles),
          Divisor::of(static_cast<uint32_t>(tiles))};
}

// The sequences that have a tile in a slot.
struct SlotOwners {
  int first;  // INT32_MAX: none
  int count;
};

// Owners of a slot by rows, among the sequences from `begin` on, in steps of `step`. Only some can
// have it: the rows before a tile are bounded by the rows that exist, and every sequence shifts it
// by one slot.
template <int kTileQ>
FLASHMOE_IN_KERNEL SlotOwners owners_of_slot(const SequenceParams& sequences, int slot, int begin,
                                             int step) {
  SlotOwners owners = {INT32_MAX, 0};
  const int first = slot - sequences.rows_q / kTileQ;
  if (begin < first) begin += (first - begin + step - 1) / step * step;
  const int end = slot < sequences.count ? slot + 1 : sequences.count;
#ifdef __CUDACC__
#pragma unroll 4
#endif
  for (int s = begin; s < end; s += step) {
    const SequenceRows queries = sequences.queries_of(s);
    const int tile = slot - queries.begin / kTileQ - s;
    // Two rows and a tile fit in int32, so the product does not overflow where it is evaluated.
    if (tile < 0 || tile > queries.length / kTileQ || tile * kTileQ >= queries.length) continue;
    if (owners.count == 0) owners.first = s;
    ++owners.count;
  }
  return owners;
}

inline TableNumbers table_numbers(const Numbers& numbers) {
  return {static_cast<const int32_t*>(numbers.data), numbers.stride};
}

// p is within kMostTableRows (cuda/attention/launch.h).
inline SequenceParams sequence_params(const AttentionProblem& p) {
  const SequenceTables& tables = p.sequences;
  const int64_t room_k = tables.paged ? tables.page_count * tables.rows_k : tables.rows_k;
  SequenceParams params = {};
  params.cu_seqlens_q = table_numbers(tables.cu_seqlens_q);
  params.cu_seqlens_k = table_numbers(tables.cu_seqlens_k);
  params.seqused_q = table_numbers(tables.seqused_q);
  params.seqused_k = table_numbers(tables.seqused_k);
  params.k_begin = table_numbers(tables.k_begin);
  params.batch_index = table_numbers(tables.batch_index);
  const AttentionMask& mask = tables.mask;
  const bool left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right =
      mask.causal != FLASHMOE_CAUSAL_NONE || (mask.window & FLASHMOE_WINDOW_RIGHT) != 0;
  if (left || right) params.q_offset = table_numbers(tables.q_offset);
  const auto beyond = [](bool bounded, int64_t window) {
    const int64_t wide = bounded ? std::min(window, kMostOffsetWindow) : 0;
    return static_cast<int32_t>(kMostOffsetRows + wide);
  };
  params.least_offset = -beyond(right, mask.window_right);
  params.most_offset = beyond(left, mask.window_left);
  params.keys.page_table = table_numbers(tables.page_table);
  params.keys.page_step = tables.page_step;
  params.keys.batch_k = static_cast<int32_t>(std::min<int64_t>(tables.batch_k, INT32_MAX));
  params.keys.page_size = static_cast<int32_t>(tables.rows_k);
  params.keys.by_page_size =
      Divisor::of(static_cast<uint32_t>(std::max<int64_t>(tables.rows_k, 1)));
  params.count = static_cast<int32_t>(p.batch);
  params.rows_q = static_cast<int32_t>(tables.rows_q);
  params.room_k = static_cast<int32_t>(room_k);
  params.most_q = static_cast<int32_t>(p.seq_q);
  params.most_k = static_cast<int32_t>(p.seq_k);
  params.pair_keys = static_cast<int32_t>(std::min<int64_t>(tables.pair_keys, INT32_MAX));
  params.paged = tables.paged ? 1 : 0;
  params.from_ends = tables.mask.causal != FLASHMOE_CAUSAL_TOP_LEFT ? 1 : 0;
  return params;
}

}  // namespace flashmoe

#undef FLASHMOE_IN_KERNEL
