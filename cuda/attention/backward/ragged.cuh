// The attention backward of ragged and padded batches: the item of a ticket, the kernels before and
// after the main one, and gradients of rows that no sequence has. tile.cuh finds the rows of a
// sequence, and tables.cu reads the tables.
//
// Each sequence is a dense batch of one. Sequences with the same number of key tiles form a class.
// Its items come in the order of a dense batch of that size, so sequences of equal length have the
// bits of a dense batch.
#pragma once

#include "cuda/attention/backward/prologue.cuh"
#include "cuda/attention/backward/ragged_params.h"
#include "cuda/attention/backward/sinks.cuh"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

// The index of the last of `count` numbers that is at most `value`. The first one is at most
// `value`, and numbers do not decrease.
__device__ __forceinline__ int last_at_most(const int32_t* numbers, int count, int value) {
  int begin = 0;
  int end = count;
  while (end - begin > 1) {
    const int middle = begin + (end - begin) / 2;
    if (numbers[middle] <= value) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The same by a whole warp. Each step divides the range by 32.
__device__ __forceinline__ int last_at_most_by_warp(const int32_t* numbers, int count, int value) {
  int begin = 0;
  int left = count;
  while (left > 1) {
    const int step = ceil_div<kThreadsPerWarp>(left);
    const int own = lane_index() * step;
    const bool at_most = own < left && numbers[begin + own] <= value;
    const int last = max(__popc(__ballot_sync(kFullWarp, at_most)) - 1, 0) * step;
    begin += last;
    left = min(step, left - last);
  }
  return begin;
}

// The item of a ticket. The totals say how many items there are.
template <class Traits>
__device__ __forceinline__ RaggedItem item_of(const RaggedParams& params, int ticket) {
  RaggedItem item = {};
  const int number = last_at_most(params.first_items, params.totals->classes, ticket);
  const SequenceClass of_class = params.classes[number];
  const int sequences = params.classes[number + 1].first_rank - of_class.first_rank;
  const int head = take_turn<Traits>(of_class.order, sequences * params.heads_kv, of_class.tiles_k,
                                     ticket - params.first_items[number], item);
  const int rank = head / params.heads_kv;
  static_cast<SequencePlace&>(item) = params.places[of_class.first_rank + rank];
  item.head_kv = head - rank * params.heads_kv;
  if constexpr (kIsBiased<Traits>) item.skipped = params.sequences.keys_of(item.batch_q).skipped;
  find_queries<Traits>(params, item);
  return item;
}

// Copies the item of a ticket, or kNoItem if there is none. One thread calls it.
__device__ __forceinline__ void copy_item(const RaggedParams& params, int ticket,
                                          volatile RaggedItem& to) {
  if (ticket >= params.totals->items) {
    to.tile = kNoItem;
    return;
  }
  constexpr int kChunks = sizeof(RaggedItem) / sizeof(uint4);
  const auto* const from = reinterpret_cast<const uint4*>(params.items + ticket);
  auto* const place = const_cast<uint4*>(reinterpret_cast<volatile uint4*>(&to));
  uint4 chunks[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) chunks[i] = from[i];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) place[i] = chunks[i];
}

// Rows of one head and columns of a gradient, like Part.
struct RaggedPart : SequencePlace {
  int head;
  int first_row;
  int end_row;
  int first_column;
  int end_column;
};

// Copies member by member because other blocks may write elsewhere in the array at the same time.
__device__ __forceinline__ SequencePlace copy_of(const volatile SequencePlace& place) {
  return {place.batch_q, place.begin_q,  place.length_q, place.batch_k,
          place.begin_k, place.length_k, place.diagonal, place.first_tile};
}

// ---- rows that no sequence has
// -------------------------------------------------------------------

// Whether a row of q, or of k, belongs to a sequence that has gradients for it.
template <bool kOfQueries>
__device__ __forceinline__ bool is_owned(const SequenceParams& sequences, int batch, int row) {
  const TableNumbers& offsets = kOfQueries ? sequences.cu_seqlens_q : sequences.cu_seqlens_k;
  int sequence = batch;
  if (offsets.given()) {
    // The last sequence that begins at or before the row. Offsets do not decrease here.
    int begin = -1;
    int end = sequences.count;
    while (end - begin > 1) {
      const int middle = begin + (end - begin) / 2;
      if (offsets.at(middle) <= row) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    if (begin < 0) return false;
    sequence = begin;
  }
  const SequenceRows queries = sequences.queries_of(sequence);
  if (!kOfQueries && queries.length == 0) return false;
  const SequenceRows rows = kOfQueries ? queries : sequences.keys_of(sequence);
  return row >= rows.begin && row - rows.begin < rows.length;
}

// Zeros gradients of rows that no sequence has, among 32 rows from `first_row` on. A whole warp
// calls it. `owned` has one bit per row. A row's columns are whole chunks of 16 bytes.
__device__ __forceinline__ void zero_rows(const Gradient& to, int batch, int first_row, int rows,
                                          int heads, int dim, uint32_t owned) {
  if (to.rows == nullptr) return;
  const int bytes = to.fp32 != 0 ? 4 : 2;
  const int chunks = dim * bytes / 16;
  auto* const base = static_cast<unsigned char*>(to.rows);
  for (int row = 0; row < rows; ++row) {
    if ((owned >> row & 1) != 0) continue;
    const int64_t row_at = batch * to.strides.batch + (first_row + row) * to.strides.seq;
    for (int i = lane_index(); i < heads * chunks; i += kThreadsPerWarp) {
      const int head = i / chunks;
      const int64_t at = (row_at + head * to.strides.head) * bytes + (i - head * chunks) * 16;
      *reinterpret_cast<uint4*>(base + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

// A block has a chunk of rows, a warp 32 of them. If offsets decrease it zeros all rows: rows of
// sequences are written later.
template <bool kOfQueries>
__device__ __forceinline__ void zero_chunk(const RaggedParams& params, int chunk) {
  static_assert(kChunkRows == kPrologueThreads, "a thread asks for a row");
  const SequenceParams& sequences = params.sequences;
  const int rows_of_all = kOfQueries ? sequences.rows_q : sequences.room_k;
  const int chunks_of_batch = ceil_div<kChunkRows>(rows_of_all);
  const int batch = chunk / chunks_of_batch;
  const int first_row = (chunk - batch * chunks_of_batch) * kChunkRows +
                        thread_index() / kThreadsPerWarp * kThreadsPerWarp;
  const int rows = min(kThreadsPerWarp, rows_of_all - first_row);
  const int lane = lane_index();
  const bool owned = lane >= rows || (params.totals->decreasing == 0 &&
                                      is_owned<kOfQueries>(sequences, batch, first_row + lane));
  const uint32_t owned_rows = __ballot_sync(kFullWarp, owned);
  if (owned_rows == kFullWarp) return;
  if (kOfQueries) {
    zero_rows(params.dq_rows, batch, first_row, rows, params.heads_q, params.dim, owned_rows);
  } else {
    zero_rows(params.dk_rows, batch, first_row, rows, params.heads_kv, params.dim, owned_rows);
    zero_rows(params.dv_rows, batch, first_row, rows, params.heads_kv, params.dim_v, owned_rows);
  }
}

// ---- before and behind the kernel
// ----------------------------------------------------------------

// Blocks: tiles of query heads in the order of the workspace, then chunks of rows, then items.
template <class Traits>
__global__ void __launch_bounds__(kPrologueThreads)
    attention_backward_ragged_prologue(const __grid_constant__ RaggedParams params) {
  constexpr int kBlocksPerTile = kPrologueBlocksPerTile<Traits>;
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0 && thread_index() == 0) *params.ticket = 0;
  if (block >= params.prologue_blocks) {
    const int chunk = block - params.prologue_blocks;
    if (chunk < params.chunks_q) {
      zero_chunk<true>(params, chunk);
    } else if (chunk < params.chunks_q + params.chunks_k) {
      zero_chunk<false>(params, chunk - params.chunks_q);
    } else {
      const int block_of_items = chunk - params.chunks_q - params.chunks_k;
      const int ticket = block_of_items * kPrologueThreads + thread_index();
      if (ticket < params.totals->items) params.items[ticket] = item_of<Traits>(params, ticket);
    }
    return;
  }
  const int rows_of_all = block / params.heads_q;
  const int head = block - rows_of_all * params.heads_q;
  const int tile = rows_of_all / kBlocksPerTile;
  if (tile >= params.totals->tiles_q) return;
  const int rank = last_at_most_by_warp(params.first_tiles, params.sequences.count, tile);
  const SequencePlace place = params.places[rank];
  const int block_of_head = rows_of_all - place.first_tile * kBlocksPerTile;
  if (block_of_head % kBlocksPerTile == 0 && thread_index() == 0) {
    clear_turns<Traits>(params, tile_of_head(params, place, head) + block_of_head / kBlocksPerTile);
  }
  prepare_rows<Traits>(params, place, head, block_of_head);
}

// The gradient of a query head's sink, by a block (sinks.cuh).
template <class Traits>
__device__ __forceinline__ void sum_sink_gradient(const RaggedParams& params, int head) {
  sum_sink_gradient<Traits>(params, head, [&](const auto& add) {
#pragma unroll 1
    for (int rank = 0; rank < params.sequences.count; ++rank) {
      const SequencePlace place = params.places[rank];
      add(place);
    }
  });
}

template <class Traits>
__global__ void __launch_bounds__(kSinksThreads)
    attention_backward_ragged_sinks(const __grid_constant__ RaggedParams params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  sum_sink_gradient<Traits>(params, static_cast<int>(blockIdx.x));
}

// ---- of either kind
// ------------------------------------------------------------------------------

template <class Traits>
const void* prologue_function() {
  if constexpr (Traits::kRagged) {
    return reinterpret_cast<const void*>(&attention_backward_ragged_prologue<Traits>);
  } else {
    return reinterpret_cast<const void*>(&attention_backward_prologue<Traits>);
  }
}
template <class Traits>
const void* sinks_function() {
  if constexpr (Traits::kRagged) {
    return reinterpret_cast<const void*>(&attention_backward_ragged_sinks<Traits>);
  } else {
    return reinterpret_cast<const void*>(&attention_backward_sinks<Traits>);
  }
}

}  // namespace flashmoe::attention_backward
