// A block's share of all keys, and the segments of tiles that it is made of.
//
// Row tile y of every sequence that has so many rows is shared by `shares` blocks, in units of
// blocks of keys: block x of G has those from x W / G on, of W, or from near there on, where
// sequences begin (find_aligned). Tiles of a sequence differ by nothing but their rows, so that
// blocks of the same x read the same keys at about the same time, and the L2 has them once.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/sm90_mla/traits.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/tile/sequence.cuh"

namespace flashmoe::sm90_mla {

using reread::thread_index;

// Of an unsigned index: fewer instructions, of which a block executes many but once.
__device__ __forceinline__ int lane_index() {
  return static_cast<int>(static_cast<uint32_t>(thread_index()) % kThreadsPerWarp);
}
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullWarp, static_cast<uint32_t>(thread_index()) / kThreadsPerWarp, 0);
}

// Which row tile, of which KV head, a block is of, and which of the shares is its.
struct BlockPlace {
  int share;
  int row_tile;
  int head_kv;
  int tile;    // row tiles of all KV heads, one behind the other
  int number;  // of the block

  __device__ __forceinline__ explicit BlockPlace(const Params& params) {
    number = static_cast<int>(blockIdx.x);
    tile = params.by_shares.quotient(number);
    share = number - tile * params.shares;
    head_kv = params.by_row_tiles.quotient(tile);
    row_tile = tile - head_kv * params.by_row_tiles.number();
  }
  // Where cut_tiles has the block's tile of a sequence.
  __device__ __forceinline__ int cut_of(const Params& params, int sequence) const {
    return params.cuts_by_tile != 0 ? tile * params.sequences.count + sequence : number;
  }
};

__device__ __forceinline__ Described describe(const Params& params, int row_tile,
                                              const SequenceRows& queries, const SequenceRows& keys,
                                              int diagonal) {
  const Sequence sequence = {0, 0, queries.length, keys.length, diagonal};
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

__device__ __forceinline__ Described describe(const Params& params, int row_tile, int index) {
  const SequenceParams& sequences = params.sequences;
  const SequenceRows queries = sequences.queries_of(index);
  const SequenceRows keys = sequences.keys_of(index);
  return describe(params, row_tile, queries, keys,
                  sequences.diagonal_of(index, queries.length, keys.length));
}

// The same, in fewer instructions where sequences are plain.
__device__ __forceinline__ Described describe_soon(const Params& params, int row_tile, int index) {
  const SequenceParams& sequences = params.sequences;
  SequenceRows queries = {index, 0, params.plain_q};
  SequenceRows keys = {index, 0, 0};
  int diagonal = 0;
  if (__builtin_expect(params.plain != 0, 1)) {
    const int used = sequences.seqused_k.data[index];
    // The first page is asked for when the share is found.
    if (sequences.paged != 0 && params.plain_k > 0) {
      ptx::prefetch_l2(sequences.keys.pages_of(index));
    }
    keys.length = SequenceParams::cut(used, 0, params.plain_k);
    if (sequences.from_ends != 0) diagonal = keys.length - queries.length;
  } else {
    queries = sequences.queries_of(index);
    keys = sequences.keys_of(index);
    diagonal = sequences.diagonal_of(index, queries.length, keys.length);
  }
  return describe(params, row_tile, queries, keys, diagonal);
}

// A block has so many units, at least: with fewer, parts take longer than what they save.
inline constexpr int kLeastUnits = 2;

// Where a share begins.
struct Place {
  uint32_t unit;
  int sequence;  // the last that begins there or in front
  int last;      // share that has its end
};

// The sequence that share `number` is of, if each begins with the share that would begin nearest: a
// long one has several to itself, and of short ones several are in one.
struct Owner {
  int sequence;  // the last whose nearest share is no later
  uint32_t begin;
  uint32_t units;
  int first;  // of its shares
  uint32_t shares;

  template <class State>
  __device__ __forceinline__ Owner(const State& state, int count, uint32_t total, int blocks,
                                   int number) {
    int low = 0;
#pragma unroll 1
    for (int high = count; high - low > 1;) {
      const int middle = (low + high) / 2;
      const bool later = state.finding.nearest[middle] > number;
      low = later ? low : middle;
      high = later ? middle : high;
    }
    const bool last = low + 1 == count;
    sequence = low;
    begin = state.finding.before[low];
    units = (last ? total : state.finding.before[low + 1]) - begin;
    first = state.finding.nearest[low];
    shares = static_cast<uint32_t>((last ? blocks : state.finding.nearest[low + 1]) - first);
  }
  // Where the share begins. None of several is shorter than it need be: a sequence is cut into no
  // more pieces than of `longest` units, and shares that are left over have none of it.
  __device__ __forceinline__ Place place(int number, uint32_t longest) const {
    const uint32_t pieces = min(shares, (units + longest - 1) / longest);
    const uint32_t piece = min(static_cast<uint32_t>(number - first), pieces);
    return {begin + piece * units / pieces, sequence, first + static_cast<int>(pieces) - 1};
  }
};

// Shares that sequences begin with, where none is much longer than an equal one. A block then has
// fewer parts of tiles, and fewer tiles: to end a tile and begin the next takes about as long as so
// many blocks of keys, and so does the second kernel with what it reads. Ends with a barrier.
//
// A sequence has 2^23 units at most, so that these times shares are less than 2^32.
template <class State>
__device__ __forceinline__ bool find_aligned(const Params& params, int number, uint32_t before,
                                             uint32_t total, int blocks, State& state) {
  const int count = params.sequences.count;
  const int thread = thread_index();
  // Rounded alike in all blocks, and never down from one sequence to the next.
  const float shares_of_unit = static_cast<float>(blocks) / static_cast<float>(total);
  state.finding.before[thread] = before;
  state.finding.nearest[thread] =
      min(static_cast<int>(fmaf(static_cast<float>(before), shares_of_unit, 0.5f)), blocks);
  __syncthreads();
  const Owner owner(state, count, total, blocks, thread);
  uint32_t longest = 1;
  // Twice: first with as many pieces as there can be. Not unrolled: a block begins with this, and
  // instructions that are executed once are waited for.
#pragma unroll 1
  for (bool found = false;; found = true) {
    Place place = {total, count, 0};
    if (thread < blocks) place = owner.place(thread, longest);
    // Sequences in front of the first that has a share are in it, too.
    if (thread == 0) place.unit = 0;
    if (found) {
      if (number < blocks && thread == number + 1) state.share.end = place.unit;
      if (number < blocks && thread == number) {
        int sequence = place.sequence;
        if (thread == 0) {
          sequence = 0;
          while (sequence + 1 < count && state.finding.before[sequence + 1] == 0) ++sequence;
        }
        state.share.begin = place.unit;
        state.share.first_unit = state.finding.before[sequence];
        state.share.sequence = sequence;
        state.share.last = place.last;
      }
      __syncthreads();
      return true;
    }
    state.finding.begins[thread] = place.unit;
    __syncthreads();
    const uint32_t length =
        thread < blocks ? state.finding.begins[thread + 1] - state.finding.begins[thread] : 0;
    const uint32_t of_warp = __reduce_max_sync(kFullWarp, length);
    if (lane_index() == 0) atomicMax(&state.longest, of_warp);
    __syncthreads();
    longest = state.longest;
    // By how much it is longer than an equal share, rounded down.
    const int rows = min(kRows, params.sequences.most_q * params.group.number());
    const uint32_t excess = 2 + static_cast<uint32_t>(rows) / 8;
    if (longest > excess && uint64_t{longest - excess} * static_cast<uint32_t>(blocks) > total) {
      return false;
    }
  }
}

// What a sequence, whose units are those from `first` to `behind`, says of an equal share: the
// share begins in it, or it goes on behind the share.
template <class State>
__device__ __forceinline__ void begin_share(State& state, int64_t begin, int64_t end, int64_t total,
                                            int blocks, int64_t first, int64_t behind,
                                            int sequence) {
  Share& share = state.share;
  if (first <= begin && begin < behind) {
    share.begin = begin;
    share.end = end;
    share.first_unit = first;
    share.sequence = sequence;
  }
  if (first < end && end < behind) share.last = static_cast<int>((behind * blocks - 1) / total);
}

// Of so few sequences that each thread describes one: all units are less than 2^32.
template <class State>
__device__ __forceinline__ void find_share_of_few(const Params& params, const BlockPlace& block,
                                                  State& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int lane = lane_index();
  Described known = {};
  if (thread < params.sequences.count) {
    known = describe_soon(params, block.row_tile, thread);
    // Of a sequence without rows no block says so.
    if (known.units == 0 && block.share == 0 && params.cuts_by_tile != 0) {
      params.cut_tiles[block.cut_of(params, thread)].parts = 0;
    }
  }
  const bool at_once = params.sequences.count <= kWindow;
  if (at_once && thread < kWindow) state.window[thread] = known;
  const uint32_t mine = static_cast<uint32_t>(known.weight());
  uint32_t upto = mine;  // this thread, in its warp
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  __syncthreads();
  const uint32_t of_warp = lane < kWarps ? static_cast<uint32_t>(state.warp_units[lane]) : 0;
  const uint32_t total = __reduce_add_sync(kFullWarp, of_warp);
  const uint32_t before = upto - mine + __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
  const int blocks = static_cast<int>(
      min((total + kLeastUnits - 1) / kLeastUnits, static_cast<uint32_t>(params.shares)));
  const bool aligned = blocks < kThreads && total != 0 &&
                       find_aligned(params, block.share, before, total, blocks, state);
  if (!aligned) {
    if (block.share < blocks) {
      const uint32_t number = static_cast<uint32_t>(block.share);
      const uint32_t divisor = static_cast<uint32_t>(blocks);
      const uint32_t each = total / divisor;
      const uint32_t left = total - each * divisor;
      const uint32_t begin = each * number + left * number / divisor;
      const uint32_t end = each * (number + 1) + left * (number + 1) / divisor;
      begin_share(state, begin, end, total, blocks, before, before + mine, thread);
    }
    __syncthreads();
  }
  if (at_once) return;
  // Those that the block begins with.
  const int at = thread - state.share.sequence;
  if (at >= 0 && at < kWindow) state.window[at] = known;
  __syncthreads();
}

// Of any number: shares are equal.
template <class State>
__device__ __forceinline__ void find_share_of_many(const Params& params, const BlockPlace& block,
                                                   State& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int each = (params.sequences.count + kThreads - 1) / kThreads;
  const int first = thread * each;
  const int end = min(first + each, params.sequences.count);
  int64_t mine = 0;
  for (int s = first; s < end; ++s) {
    const int64_t units = describe(params, block.row_tile, s).weight();
    mine += units;
    if (units == 0 && block.share == 0 && params.cuts_by_tile != 0) {
      params.cut_tiles[block.cut_of(params, s)].parts = 0;
    }
  }
  int64_t upto = mine;
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane_index() >= step) upto += before;
  }
  if (lane_index() == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  __syncthreads();
  int64_t total = 0;
  int64_t before = upto - mine;
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w) {
    const int64_t units = state.warp_units[w];
    if (w < warp) before += units;
    total += units;
  }
  const int blocks =
      static_cast<int>(min((total + kLeastUnits - 1) / kLeastUnits, int64_t{params.shares}));
  if (block.share < blocks) {
    const int64_t begin = total * block.share / blocks;
    const int64_t behind = total * (block.share + 1) / blocks;
    const bool has_begin = before <= begin && begin < before + mine;
    const bool has_end = before < behind && behind < before + mine;
    for (int s = first; (has_begin || has_end) && s < end; ++s) {
      const int64_t units = describe(params, block.row_tile, s).weight();
      begin_share(state, begin, behind, total, blocks, before, before + units, s);
      before += units;
    }
  }
  __syncthreads();
}

// Finds the block's share, which is none yet; all threads. Ends with a barrier.
template <class State>
__device__ __forceinline__ void find_share(const Params& params, const BlockPlace& block,
                                           State& shared) {
  // The address stays in a register: left to itself, ptxas makes it anew at each use.
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&shared));
  pin(address);
  State& state = *static_cast<State*>(__cvta_shared_to_generic(address));
  if (thread_index() == 0 && params.cuts_by_tile == 0) params.cut_tiles[block.number].parts = 0;
  if (__builtin_expect(params.sequences.count <= kThreads, 1)) {
    find_share_of_few(params, block, state);
  } else {
    find_share_of_many(params, block, state);
  }
}

// Where a block is in its share, from its first sequence on.
struct Progress {
  int sequence;
  int gone;      // units of the sequence that are not its own, in front
  int64_t left;  // units of the share, those that are gone, too

  __device__ __forceinline__ explicit Progress(const Share& share)
      : sequence(share.sequence),
        gone(static_cast<int>(share.begin - share.first_unit)),
        left(share.end - share.first_unit) {}
  // Blocks of keys that the share has of the sequence: none, if the end is not behind the first. A
  // cut in the lead is one in front of the keys.
  __device__ __forceinline__ KeyRange part(const Described& known) const {
    return {max(gone - kLead, 0),
            static_cast<int>(min(left - kLead, static_cast<int64_t>(known.units)))};
  }
  __device__ __forceinline__ void next(const Described& known) {
    const int weight = known.units == 0 ? 0 : kLead + known.units;
    ++sequence;
    gone = max(gone - weight, 0);
    left -= weight;
  }
};

// Describes such a part; one thread. Of a tile that others have parts of, too, the first block says
// which.
__device__ __forceinline__ void describe_segment(const Params& params, const BlockPlace& block,
                                                 int last_share, const Described& known,
                                                 int sequence, const KeyRange& part,
                                                 Segment& described) {
  const auto [first, end] = part;
  Segment segment;
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
  described = segment;
  if (first != 0) return;
  if (segment.whole != 0) {
    if (params.cuts_by_tile != 0) params.cut_tiles[block.cut_of(params, sequence)].parts = 0;
    return;
  }
  attention_decode::CutTile& cut = params.cut_tiles[block.cut_of(params, sequence)];
  cut.tile = tile;
  cut.parts = last_share - block.share + 1;
  cut.first = number;
  cut.second = places + number;
}

}  // namespace flashmoe::sm90_mla
