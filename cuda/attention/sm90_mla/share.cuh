// A block's share of all keys, and the segments of tiles that it is made of.
//
// Row tile y of every sequence that has so many rows is shared by `shares` blocks, in units of
// blocks of keys: block x of G has those from x W / G on, of W. Tiles of a sequence differ by
// nothing but their rows, so that blocks of the same x read the same keys at about the same time,
// and the L2 has them once. Two of them may be a cluster.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/sm90_mla/traits.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/shares.cuh"

namespace flashmoe::sm90_mla {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

// Which row tile, of which KV head, a block is of, and which of the shares is its.
template <int kClusterBlocks>
struct BlockPlace {
  int share;
  int row_tile;
  int head_kv;
  int rank;    // in its cluster
  int number;  // of the blocks of a row tile one behind the other

  __device__ __forceinline__ explicit BlockPlace(const Params& params) {
    const int block = static_cast<int>(blockIdx.x);
    rank = block % kClusterBlocks;
    const int tiles = params.by_shares.quotient(block / kClusterBlocks);
    share = block / kClusterBlocks - tiles * params.shares;
    number = (tiles * kClusterBlocks + rank) * params.shares + share;
    head_kv = params.by_clusters.quotient(tiles);
    row_tile = (tiles - head_kv * params.by_clusters.number()) * kClusterBlocks + rank;
  }
  // Sequences that have this row tile are shared by the cluster, whether they have the others or
  // not: its blocks do the same at the same time.
  __device__ __forceinline__ int first_row_tile() const { return row_tile - rank; }
};

__device__ __forceinline__ Described describe(const Params& params, int row_tile, int index) {
  const SequenceParams& sequences = params.sequences;
  const SequenceRows queries = sequences.queries_of(index);
  const SequenceRows keys = sequences.keys_of(index);
  const Sequence sequence = {0, 0, queries.length, keys.length,
                             sequences.diagonal_of(queries.length, keys.length)};
  Described known;
  known.batch_q = queries.batch;
  known.begin_q = queries.begin;
  known.length_q = queries.length;
  known.batch_k = keys.batch;
  known.begin_k = keys.begin;
  known.length_k = keys.length;
  known.diagonal = sequence.diagonal;
  known.first = sequence.first_key(params.score, 0);
  known.end = sequence.end_key(params.score, queries.length - 1);
  if (known.first >= known.end) known.first = known.end = 0;
  const bool there = queries.length * params.group.number() > row_tile * kRows;
  // At least one, since its rows are to be written.
  known.units = there ? max(1, (known.end - known.origin() + kBlockKeys - 1) / kBlockKeys) : 0;
  return known;
}

// Finds the block's share; all threads. Ends with a barrier.
template <class Place, class State>
__device__ __forceinline__ void find_share(const Params& params, const Place& block, State& state) {
  Described known;
  flashmoe::find_share<kThreads>(
      params.sequences.count, block.share, params.shares, state.warp_units, known,
      [&](int s) { return describe(params, block.first_row_tile(), s); },
      [](const Described& sequence) { return sequence.weight(); },
      [&] {
        state.share.begin = state.share.end = 0;
        params.cut_tiles[block.number].parts = 0;
      },
      [&](int sequence, int64_t before, int64_t total, int shares) {
        state.share = {total * block.share / shares,
                       total * (block.share + 1) / shares,
                       total,
                       before,
                       sequence,
                       shares};
      });
}

// Blocks of keys that a share has of the sequence whose units begin with `at`: none, if the end is
// not behind the first. A cut in the lead is one in front of the keys.
__device__ __forceinline__ KeyRange part_of(const Share& share, const Described& known,
                                            int64_t at) {
  const int64_t keys = at + kLead;
  return {static_cast<int>(max(share.begin - keys, int64_t{0})),
          static_cast<int>(min(share.end - keys, int64_t{known.units}))};
}

// Describes that part; one thread. Of a tile that others have parts of, too, the first block says
// which.
template <class Place>
__device__ __forceinline__ void describe_segment(const Params& params, const Place& block,
                                                 const Share& share, const Described& known,
                                                 int sequence, int64_t at, Segment& segment) {
  const auto [first, end] = part_of(share, known, at);
  segment.exists = 1;
  attention_decode::TileRows& tile = segment.tile;
  tile.sequence = sequence;
  tile.batch = known.batch_q;
  tile.begin_q = known.begin_q;
  tile.length_q = known.length_q;
  tile.length_k = known.length_k;
  tile.diagonal = known.diagonal;
  tile.head_kv = block.head_kv;
  tile.first_row = block.row_tile * kRows;
  tile.rows = min(kRows, known.length_q * params.group.number() - tile.first_row);
  const Sequence where = {0, 0, known.length_q, known.length_k, known.diagonal};
  const int first_query = params.group.quotient(tile.first_row);
  const int last_query = params.group.quotient(tile.first_row + tile.rows - 1);
  segment.all_first = where.first_key(params.score, last_query);
  segment.all_end = where.end_key(params.score, first_query);
  tile.masked = known.first < segment.all_first || segment.all_end < known.end ? 1 : 0;
  segment.key = known.origin() + first * kBlockKeys;
  segment.blocks = end - first;
  segment.whole = first == 0 && end == known.units ? 1 : 0;
  const int number = block.number;
  const int places = static_cast<int>(gridDim.x);
  segment.place = first == 0 ? number : places + number;
  if (first == 0 && end < known.units) {
    attention_decode::CutTile& cut = params.cut_tiles[number];
    cut.tile = tile;
    const int64_t last = at + kLead + known.units - 1;
    cut.parts = owner_of(share.blocks, share.total, last) - block.share + 1;
    cut.first = number;
    cut.second = places + number;
  }
}

}  // namespace flashmoe::sm90_mla
