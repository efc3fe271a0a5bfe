// Tiles of ragged, padded and paged batches: the tile of a block, the position of its sequence's
// rows, and keys on invalid pages.
#pragma once

#include <cstdint>

#include "cuda/attention/sm89/params.h"
#include "cuda/attention/sm89/traits.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89 {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

// Kept in shared memory and read at each use, because accumulators need the registers.
struct RaggedTile {
  int batch;  // row of q's batch
  int head;   // of row 0
  int head_kv;
  int first_row;
  int rows;           // end of the existing rows, from row 0 of the sequence on
  Sequence sequence;  // its keys begin at `k` and `v`, or are rows of `pages` from begin_k on
  int masked;         // some query does not see every key
  int misses_pages;   // an invalid page was looked up
  int more_owners;    // further sequences with a tile in this slot
  int first_owner;    // INT32_MAX: no sequence has a tile here
  int owners;
  int number;   // of the sequence
  int skipped;  // keys before the sequence's first one that a bias or a mask has numbers of
  const int32_t* pages;
  const uint16_t* k;
  const uint16_t* v;

  template <class Traits>
  static __device__ __forceinline__ RaggedTile& in(unsigned char* shared) {
    return *reinterpret_cast<RaggedTile*>(shared + Traits::kTileInfoOffset);
  }
  template <class Traits>
  static __device__ __forceinline__ const RaggedTile& in(const unsigned char* shared) {
    return *reinterpret_cast<const RaggedTile*>(shared + Traits::kTileInfoOffset);
  }
};
static_assert(sizeof(RaggedTile) <= kRaggedTileInfoBytes && alignof(RaggedTile) <= 16);

__device__ __forceinline__ const Sequence& sequence_of(const RaggedParams& /*params*/,
                                                       const RaggedTile& tile) {
  return tile.sequence;
}
__device__ __forceinline__ bool is_masked(const RaggedParams& /*params*/, const RaggedTile& tile) {
  return tile.masked != 0;
}
__device__ __forceinline__ int rows_of(const RaggedTile& tile, const Sequence& /*sequence*/) {
  return tile.rows;
}
// Query and head of a row. Missing rows have a head, too.
__device__ __forceinline__ int query_of(const RaggedParams& params, int row) {
  return params.heads_per_tile > 1 ? 0 : row;
}
__device__ __forceinline__ int head_of(const RaggedParams& params, const RaggedTile& tile,
                                       int row) {
  return params.heads_per_tile > 1 ? tile.head + min(row, tile.rows - 1) : tile.head;
}
__device__ __forceinline__ int64_t row_stride_of(const RaggedParams& params,
                                                 const RowStrides& strides) {
  return params.heads_per_tile > 1 ? strides.head : strides.seq;
}
__device__ __forceinline__ int64_t offset_of_row(const RaggedParams& params,
                                                 const Sequence& sequence,
                                                 const RowStrides& strides, int row) {
  return sequence.begin_q * strides.seq + row * row_stride_of(params, strides);
}

// Addresses of a key's rows of k and v. nullptr if their page is invalid.
struct RaggedKeys {
  const RaggedParams& params;
  const RaggedTile& tile;

  __device__ __forceinline__ const uint16_t* row_of(const uint16_t* base, const RowStrides& strides,
                                                    int key) const {
    if (params.sequences.paged == 0) return base + key * strides.seq;
    const KeyTables::Place place =
        params.sequences.keys.place_of(tile.pages, tile.sequence.begin_k + key);
    if (place.batch < 0) return nullptr;
    return base + (place.batch * strides.batch + place.row * strides.seq);
  }
  __device__ __forceinline__ const uint16_t* k(int key) const {
    return row_of(tile.k, params.tensors.k_strides, key);
  }
  __device__ __forceinline__ const uint16_t* v(int key) const {
    return row_of(tile.v, params.tensors.v_strides, key);
  }
  __device__ __forceinline__ bool is_hidden(int key) const {
    return params.sequences.paged != 0 &&
           params.sequences.keys.place_of(tile.pages, tile.sequence.begin_k + key).batch < 0;
  }
};

// Copies rows of k, or of v, to a tile in shared memory. The first row is that of the first of the
// last `keys` keys.
template <class Loader>
__device__ __forceinline__ void load_ragged(const Loader& loader, uint32_t offset,
                                            const RaggedParams& params, RaggedTile& tile,
                                            const uint16_t* base, const RowStrides& strides,
                                            int dim, int keys) {
  const int key = tile.sequence.length_k - keys;
  if (params.sequences.paged != 0) {
    const int32_t* const pages = tile.pages;
    const int first = tile.sequence.begin_k + key;
    bool missing = false;
    loader.load_rows(offset, dim, [&](int row) -> const uint16_t* {
      if (row >= keys) return nullptr;
      const KeyTables::Place place = params.sequences.keys.place_of(pages, first + row);
      missing = missing || place.batch < 0;
      if (place.batch < 0) return nullptr;
      return base + (place.batch * strides.batch + place.row * strides.seq);
    });
    if (missing) atomicOr(&tile.misses_pages, 1);
  } else {
    const uint16_t* const first = base + key * strides.seq;
    loader.load_rows(offset, dim, [&](int row) -> const uint16_t* {
      return row < keys ? first + row * strides.seq : nullptr;
    });
  }
}

// Fills the tile of a sequence. One thread calls it.
template <class Traits>
__device__ __forceinline__ void decode_tile(const RaggedParams& params, int sequence, int rank,
                                            RaggedTile* tile) {
  const SequenceParams& sequences = params.sequences;
  const SequenceRows queries = sequences.queries_of(sequence);
  tile->first_row = rank * Traits::kTileQ;
  tile->number = sequence;
  tile->batch = queries.batch;
  tile->sequence.begin_q = queries.begin;
  tile->sequence.length_q = queries.length;
  tile->rows = params.heads_per_tile > 1 ? params.heads_per_tile : queries.length;
  if (tile->first_row >= queries.length) return;
  const SequenceRows keys = sequences.keys_of(sequence);
  const int diagonal = sequences.diagonal_of(sequence, queries.length, keys.length);
  const bool paged = sequences.paged != 0;
  const auto first_row_of = [&](const uint16_t* data, const RowStrides& strides) {
    const uint16_t* const head = data + tile->head_kv * strides.head;
    return paged || keys.length == 0
               ? head
               : head + (keys.batch * strides.batch + keys.begin * strides.seq);
  };
  tile->k = first_row_of(params.tensors.k, params.tensors.k_strides);
  tile->v = first_row_of(params.tensors.v, params.tensors.v_strides);
  tile->pages = paged ? sequences.keys.pages_of(sequence) : nullptr;
  tile->skipped = keys.skipped;
  tile->sequence.begin_k = paged ? keys.begin : 0;
  tile->sequence.length_k = keys.length;
  tile->sequence.diagonal = diagonal;
  // Like set_bounds in the core, for a dense batch of these lengths.
  tile->masked = Traits::kBiased || params.score.right_offset + diagonal < keys.length - 1 ||
                 params.score.left_offset + diagonal > 1 - queries.length;
  tile->misses_pages = 0;
}

// Stores this block's tile in shared memory: that of the first sequence behind `after` with a tile
// in its slot. Returns false, in all threads, if there is none. Begins after a barrier, and ends
// with one.
template <class Traits>
__device__ __forceinline__ bool find_tile(const RaggedParams& params, int after,
                                          unsigned char* shared) {
  RaggedTile& tile = RaggedTile::in<Traits>(shared);
  const int thread = thread_index();
  const int position = static_cast<int>(blockIdx.x);
  const int by_slot = params.by_tiles_per_kv.quotient(position);
  const int head_kv = params.by_slots.quotient(by_slot);
  const int place = by_slot - head_kv * params.by_slots.number();
  const int slot = params.last_slots_first != 0 ? params.slots.count - 1 - place : place;
  if (params.slots.tiles_per_sequence == 0) {
    if (thread == 0) {
      tile.first_owner = INT32_MAX;
      tile.owners = 0;
    }
    __syncthreads();
    const SlotOwners owners = owners_of_slot<Traits::kTileQ>(params.sequences, slot,
                                                             after + 1 + thread, Traits::kThreads);
    if (owners.count > 0) {
      atomicMin(&tile.first_owner, owners.first);
      atomicAdd(&tile.owners, owners.count);
    }
    __syncthreads();
    if (tile.owners == 0) return false;
  }
  if (thread == 0) {
    const int of_kv = position - by_slot * params.by_tiles_per_kv.number();
    tile.head_kv = head_kv;
    tile.head = (head_kv * params.by_tiles_per_kv.number() + of_kv) * params.heads_per_tile;
    int sequence = 0;
    int rank = 0;
    if (params.slots.tiles_per_sequence == 0) {
      sequence = tile.first_owner;
      rank = slot - params.sequences.queries_of(sequence).begin / Traits::kTileQ - sequence;
      tile.more_owners = tile.owners - 1;
    } else {
      sequence = params.slots.by_tiles_per_sequence.quotient(slot);
      rank = slot - sequence * params.slots.tiles_per_sequence;
      tile.more_owners = 0;
    }
    decode_tile<Traits>(params, sequence, rank, &tile);
  }
  __syncthreads();
  return tile.first_row < tile.sequence.length_q;
}

}  // namespace flashmoe::sm89
