// A block's share of all keys, and the segments of tiles that it is made of.
//
// Row tile y of every sequence that has so many rows is shared by `shares` blocks, in units of
// blocks of keys: block x of G has those from x W / G on, of W, or from near there on, where
// sequences begin (find_aligned). Tiles of a sequence differ by nothing but their rows, so that
// blocks of the same x read the same keys at about the same time, and the L2 has them once. Two of
// them may be a cluster.
#pragma once

#include "cuda/attention/sm89_decode/loads.cuh"
#include "cuda/attention/sm90_mla/traits.cuh"

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
  int tile;    // row tiles of all KV heads, one behind the other
  int number;  // of the blocks of a row tile one behind the other

  __device__ __forceinline__ explicit BlockPlace(const Params& params) {
    const int block = static_cast<int>(blockIdx.x);
    rank = block % kClusterBlocks;
    const int tiles = params.by_shares.quotient(block / kClusterBlocks);
    share = block / kClusterBlocks - tiles * params.shares;
    tile = tiles * kClusterBlocks + rank;
    number = tile * params.shares + share;
    head_kv = params.by_clusters.quotient(tiles);
    row_tile = (tiles - head_kv * params.by_clusters.number()) * kClusterBlocks + rank;
  }
  // Sequences that have this row tile are shared by the cluster, whether they have the others or
  // not: its blocks do the same at the same time.
  __device__ __forceinline__ int first_row_tile() const { return row_tile - rank; }
  // Where cut_tiles has the block's tile of a sequence.
  __device__ __forceinline__ int cut_of(const Params& params, int sequence) const {
    return params.cuts_by_tile != 0 ? tile * params.sequences.count + sequence : number;
  }
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

// A block has so many units, at least: with fewer, parts take longer than what they save.
inline constexpr int kLeastUnits = 2;

// Where a share begins.
struct Place {
  int64_t unit;
  int32_t sequence;    // that has it
  int64_t first_unit;  // of the sequence
};

// Where share `number` begins, if each sequence begins with the share that would begin nearest: a
// long one has several to itself, and of short ones several are in one. Each thread has described a
// sequence at most.
template <class State>
__device__ __forceinline__ Place aligned_place(const State& state, int count, int64_t total,
                                               int blocks, int number) {
  if (number >= blocks) return {total, count, total};
  // The last sequence whose nearest share is no later.
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (2 * state.before[middle] * blocks < total * (2 * number + 1)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = state.before[low];
  const int64_t end = low + 1 < count ? state.before[low + 1] : total;
  const int first = Share::nearest(begin, total, blocks);
  const int pieces = Share::nearest(end, total, blocks) - first;
  return {begin + (number - first) * (end - begin) / pieces, low, begin};
}

// Shares that sequences begin with, where none is much longer than an equal one. A block then has
// fewer parts of tiles, and fewer tiles: to end a tile and begin the next takes about as long as so
// many blocks of keys, and so does the second kernel with what it reads. Ends with a barrier.
template <class State>
__device__ __forceinline__ bool find_aligned(const Params& params, int number, int64_t before,
                                             int64_t total, int blocks, State& state) {
  const int count = params.sequences.count;
  if (count > kThreads || blocks >= kThreads || total == 0) return false;
  const int thread = thread_index();
  state.before[thread] = before;
  __syncthreads();
  const int rows = min(kRows, params.sequences.most_q * params.group.number());
  const int64_t limit = total / blocks + 2 + rows / 8;
  bool too_long = false;
  if (thread < blocks) {
    Place begin = aligned_place(state, count, total, blocks, thread);
    const Place end = aligned_place(state, count, total, blocks, thread + 1);
    if (thread == 0) {
      // Sequences in front of the first that has a share are in it, too.
      begin = {0, 0, 0};
      while (begin.sequence + 1 < count && state.before[begin.sequence + 1] == 0) ++begin.sequence;
    }
    too_long = end.unit - begin.unit > limit;
    if (thread == number) {
      state.share = {begin.unit, end.unit, total, begin.first_unit, begin.sequence, blocks, 1};
    }
  }
  return !__syncthreads_or(too_long);
}

// Finds the block's share; all threads. Ends with a barrier.
template <class Block, class State>
__device__ __forceinline__ void find_share(const Params& params, const Block& block, State& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int each = (params.sequences.count + kThreads - 1) / kThreads;
  const int first = thread * each;
  const int end = min(first + each, params.sequences.count);
  int64_t mine = 0;
  for (int s = first; s < end; ++s) {
    const int64_t units = describe(params, block.first_row_tile(), s).weight();
    mine += units;
    // Of a sequence without rows no block says so.
    if (units == 0 && block.share == 0 && params.cuts_by_tile != 0) {
      params.cut_tiles[block.cut_of(params, s)].parts = 0;
    }
  }
  int64_t upto = mine;  // this thread, in its warp
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane_index() >= step) upto += before;
  }
  if (lane_index() == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  if (thread == 0) {
    state.share.begin = state.share.end = 0;
    if (params.cuts_by_tile == 0) params.cut_tiles[block.number].parts = 0;
  }
  __syncthreads();
  int64_t total = 0;
  int64_t before = upto - mine;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int64_t units = state.warp_units[w];
    if (w < warp) before += units;
    total += units;
  }
  const int blocks =
      static_cast<int>(min((total + kLeastUnits - 1) / kLeastUnits, int64_t{params.shares}));
  if (find_aligned(params, block.share, before, total, blocks, state)) return;
  if (block.share < blocks) {
    const int64_t begin = total * block.share / blocks;
    if (before <= begin && begin < before + mine) {
      int s = first;
      for (; s + 1 < end; ++s) {
        const int64_t units = describe(params, block.first_row_tile(), s).weight();
        if (begin < before + units) break;
        before += units;
      }
      state.share = {begin, total * (block.share + 1) / blocks, total, before, s, blocks, 0};
    }
  }
  __syncthreads();
}

// The block, of those of a row tile, that has the last unit of a sequence.
__device__ __forceinline__ int last_owner(const Share& share, int64_t end) {
  if (share.aligned != 0) return Share::nearest(end, share.total, share.blocks) - 1;
  return static_cast<int>((end * share.blocks - 1) / share.total);
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
template <class Block>
__device__ __forceinline__ void describe_segment(const Params& params, const Block& block,
                                                 const Share& share, const Described& known,
                                                 int sequence, int64_t at, Segment& segment) {
  const auto [first, end] = part_of(share, known, at);
  segment.exists = 1;
  sm89_decode::TileRows& tile = segment.tile;
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
  if (first != 0) return;
  if (segment.whole != 0) {
    if (params.cuts_by_tile != 0) params.cut_tiles[block.cut_of(params, sequence)].parts = 0;
    return;
  }
  sm89_decode::CutTile& cut = params.cut_tiles[block.cut_of(params, sequence)];
  cut.tile = tile;
  cut.parts = last_owner(share, at + known.weight()) - block.share + 1;
  cut.first = number;
  cut.second = places + number;
}

}  // namespace flashmoe::sm90_mla
