// A block's range of all keys (decode/stream_k.cuh), and the segments of tiles that it is made of.
//
// A unit is a block of keys. Row tile y of every sequence that has so many rows is the work of
// `stream_k_blocks` blocks, each of which has an equal range, or one that begins near there with a
// sequence (find_aligned). The row tiles of a sequence have the same keys, so blocks with the same
// range of different row tiles read the same keys at about the same time, and the L2 reads them
// once.
#pragma once

#include "cuda/attention/decode/rows.cuh"
#include "cuda/attention/decode/stream_k.cuh"
#include "cuda/attention/sm90_mla/traits.cuh"
#include "cuda/ptx/prefetch.cuh"

namespace flashmoe::sm90_mla {

using reread::thread_index;

// Unsigned arithmetic takes fewer instructions: a block executes many of them only once, and waits
// for each.
__device__ __forceinline__ int lane_index() {
  return static_cast<int>(static_cast<uint32_t>(thread_index()) % kThreadsPerWarp);
}
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullWarp, static_cast<uint32_t>(thread_index()) / kThreadsPerWarp, 0);
}

// The row tile and the KV head that a block works on, and which of the ranges of their keys it has.
struct BlockPlace {
  int range;
  int row_tile;
  int head_kv;
  int tile;    // among the row tiles of all KV heads, one behind the other
  int number;  // of the block

  __device__ __forceinline__ explicit BlockPlace(const Params& params) {
    number = static_cast<int>(blockIdx.x);
    tile = params.by_stream_k_blocks.quotient(number);
    range = number - tile * params.stream_k_blocks;
    head_kv = params.by_row_tiles.quotient(tile);
    row_tile = tile - head_kv * params.by_row_tiles.number();
  }
  // The place in cut_tiles of the block's tile of a sequence.
  __device__ __forceinline__ int cut_of(const Params& params, int sequence) const {
    return params.cuts_by_tile != 0 ? tile * params.sequences.count + sequence : number;
  }
};

__device__ __forceinline__ Described describe(const Params& params, int row_tile,
                                              const SequenceRows& queries, const SequenceRows& keys,
                                              int diagonal) {
  Described known;
  attention_decode::describe_rows(params.score, queries, keys, diagonal, known);
  const bool there = queries.length * params.group.number() > row_tile * kRows;
  // At least one unit, since the rows are to be written.
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
    // The first page is asked for when the range is found.
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

// The fewest units that a block has: with fewer, parts take longer than what they save.
inline constexpr int kLeastUnits = 2;

// The place at which a range begins.
struct Place {
  uint32_t unit;
  int sequence;  // the last that begins there or in front
  int last;      // range that has the sequence's end
};

// The sequence that range `number` belongs to, if each sequence begins with the range that would
// begin nearest: a long sequence has several ranges to itself, and one range has several short
// sequences.
struct Owner {
  int sequence;  // the last whose nearest range is no later
  uint32_t begin;
  uint32_t units;
  int first;  // of its ranges
  uint32_t ranges;

  template <class State>
  __device__ __forceinline__ Owner(const State& state, int count, uint32_t total, int blocks,
                                   int number) {
    sequence = attention_decode::last_sequence(
        count, [&](int index) { return state.finding.nearest[index] > number; });
    const bool last = sequence + 1 == count;
    begin = state.finding.before[sequence];
    units = (last ? total : state.finding.before[sequence + 1]) - begin;
    first = state.finding.nearest[sequence];
    ranges = static_cast<uint32_t>((last ? blocks : state.finding.nearest[sequence + 1]) - first);
  }
  // Says where the range begins. A sequence is cut into no more pieces than it has of `longest`
  // units, so that no piece is shorter than need be. Ranges that are left over have none of it.
  __device__ __forceinline__ Place place(int number, uint32_t longest) const {
    const uint32_t pieces = min(ranges, (units + longest - 1) / longest);
    const uint32_t piece = min(static_cast<uint32_t>(number - first), pieces);
    return {begin + piece * units / pieces, sequence, first + static_cast<int>(pieces) - 1};
  }
};

// Finds a range that begins with a sequence, where no such range is much longer than an equal one.
// A block then has fewer parts of tiles, and fewer tiles: to end a tile and begin the next takes
// about as long as `excess` blocks of keys, and so does the second kernel with what it reads. Ends
// with a barrier.
//
// A sequence has 2^23 units at most, so that its units times ranges are less than 2^32.
template <class State>
__device__ __forceinline__ bool find_aligned(const Params& params, int number, uint32_t before,
                                             uint32_t total, int blocks, State& state) {
  const int count = params.sequences.count;
  const int thread = thread_index();
  // Rounded alike in all blocks, and never down from one sequence to the next.
  const float ranges_of_unit = static_cast<float>(blocks) / static_cast<float>(total);
  state.finding.before[thread] = before;
  state.finding.nearest[thread] =
      min(static_cast<int>(fmaf(static_cast<float>(before), ranges_of_unit, 0.5f)), blocks);
  __syncthreads();
  const Owner owner(state, count, total, blocks, thread);
  uint32_t longest = 1;
  // Runs twice: first with as many pieces as there can be. It is not unrolled, since a block begins
  // with this, and waits for instructions that it executes once.
#pragma unroll 1
  for (bool found = false;; found = true) {
    Place place = {total, count, 0};
    if (thread < blocks) place = owner.place(thread, longest);
    // The first range also has the sequences in front of the first that has a range.
    if (thread == 0) place.unit = 0;
    if (found) {
      if (number < blocks && thread == number + 1) state.range.end = place.unit;
      if (number < blocks && thread == number) {
        int sequence = place.sequence;
        if (thread == 0) {
          sequence = 0;
          while (sequence + 1 < count && state.finding.before[sequence + 1] == 0) ++sequence;
        }
        state.range.begin = place.unit;
        state.range.first_unit = state.finding.before[sequence];
        state.range.sequence = sequence;
        state.range.last = place.last;
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
    // The comparison takes as excess how much it is longer than an equal range, rounded down.
    const int rows = min(kRows, params.sequences.most_q * params.group.number());
    const uint32_t excess = 2 + static_cast<uint32_t>(rows) / 8;
    if (longest > excess && uint64_t{longest - excess} * static_cast<uint32_t>(blocks) > total) {
      return false;
    }
  }
}

// Notes what a sequence, whose units are those from `first` to `behind`, says of an equal range:
// the range begins in it, or it goes on behind the range.
template <class State>
__device__ __forceinline__ void begin_range(State& state, int64_t begin, int64_t end, int64_t total,
                                            int blocks, int64_t first, int64_t behind,
                                            int sequence) {
  Range& range = state.range;
  if (first <= begin && begin < behind) {
    range.begin = begin;
    range.end = end;
    range.first_unit = first;
    range.sequence = sequence;
  }
  if (first < end && end < behind) {
    range.last = attention_decode::block_of_unit_before(behind, total, blocks);
  }
}

// Finds the range where sequences are so few that each thread describes one, and all units are less
// than 2^32.
template <class State>
__device__ __forceinline__ void find_range_of_few(const Params& params, const BlockPlace& block,
                                                  State& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int lane = lane_index();
  Described known = {};
  if (thread < params.sequences.count) {
    known = describe_soon(params, block.row_tile, thread);
    // No block reports a sequence without rows.
    if (known.units == 0 && block.range == 0 && params.cuts_by_tile != 0) {
      params.cut_tiles[block.cut_of(params, thread)].parts = 0;
    }
  }
  const bool at_once = params.sequences.count <= kWindow;
  if (at_once && thread < kWindow) state.window[thread] = known;
  const uint32_t mine = static_cast<uint32_t>(known.weight());
  const uint32_t upto = attention_decode::sum_up_to_lane(mine, lane);
  if (lane == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  __syncthreads();
  const uint32_t of_warp = lane < kWarps ? static_cast<uint32_t>(state.warp_units[lane]) : 0;
  const uint32_t total = __reduce_add_sync(kFullWarp, of_warp);
  const uint32_t before = upto - mine + __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
  const int blocks = static_cast<int>(
      min((total + kLeastUnits - 1) / kLeastUnits, static_cast<uint32_t>(params.stream_k_blocks)));
  const bool aligned = blocks < kThreads && total != 0 &&
                       find_aligned(params, block.range, before, total, blocks, state);
  if (!aligned) {
    if (block.range < blocks) {
      const uint32_t number = static_cast<uint32_t>(block.range);
      const uint32_t divisor = static_cast<uint32_t>(blocks);
      const uint32_t each = total / divisor;
      const uint32_t left = total - each * divisor;
      const uint32_t begin = each * number + left * number / divisor;
      const uint32_t end = each * (number + 1) + left * (number + 1) / divisor;
      begin_range(state, begin, end, total, blocks, before, before + mine, thread);
    }
    __syncthreads();
  }
  if (at_once) return;
  // The window holds the sequences that the block begins with.
  const int at = thread - state.range.sequence;
  if (at >= 0 && at < kWindow) state.window[at] = known;
  __syncthreads();
}

// Finds the range among any number of sequences: ranges are equal.
template <class State>
__device__ __forceinline__ void find_range_of_many(const Params& params, const BlockPlace& block,
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
    if (units == 0 && block.range == 0 && params.cuts_by_tile != 0) {
      params.cut_tiles[block.cut_of(params, s)].parts = 0;
    }
  }
  const int64_t upto = attention_decode::sum_up_to_lane(mine, lane_index());
  if (lane_index() == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  __syncthreads();
  const attention_decode::UnitSums sums(state.warp_units, kWarps, warp, upto - mine);
  const int64_t total = sums.total;
  int64_t before = sums.before;
  const int blocks = static_cast<int>(
      min((total + kLeastUnits - 1) / kLeastUnits, int64_t{params.stream_k_blocks}));
  if (block.range < blocks) {
    const int64_t begin = attention_decode::equal_begin(total, block.range, blocks);
    const int64_t behind = attention_decode::equal_begin(total, block.range + 1, blocks);
    const bool has_begin = before <= begin && begin < before + mine;
    const bool has_end = before < behind && behind < before + mine;
    for (int s = first; (has_begin || has_end) && s < end; ++s) {
      const int64_t units = describe(params, block.row_tile, s).weight();
      begin_range(state, begin, behind, total, blocks, before, before + units, s);
      before += units;
    }
  }
  __syncthreads();
}

// Finds the block's range, which is empty yet; all threads. Ends with a barrier.
template <class State>
__device__ __forceinline__ void find_range(const Params& params, const BlockPlace& block,
                                           State& shared) {
  // The address stays in a register: left to itself, ptxas makes it anew at each use.
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&shared));
  pin(address);
  State& state = *static_cast<State*>(__cvta_shared_to_generic(address));
  if (thread_index() == 0 && params.cuts_by_tile == 0) params.cut_tiles[block.number].parts = 0;
  if (__builtin_expect(params.sequences.count <= kThreads, 1)) {
    find_range_of_few(params, block, state);
  } else {
    find_range_of_many(params, block, state);
  }
}

// A block's progress in its range, from its first sequence on.
struct Progress {
  int sequence;
  int gone;      // units of the sequence that are not its own, in front
  int64_t left;  // units of the range, with those that are gone

  __device__ __forceinline__ explicit Progress(const Range& range)
      : sequence(range.sequence),
        gone(static_cast<int>(range.begin - range.first_unit)),
        left(range.end - range.first_unit) {}
  // Blocks of keys that the range has of the sequence: none, if the end is not behind the first. A
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

// Describes such a part; one thread. The first of several blocks that have parts of a tile tells
// the second kernel of the tile.
__device__ __forceinline__ void describe_segment(const Params& params, const BlockPlace& block,
                                                 int last_range, const Described& known,
                                                 int sequence, const KeyRange& part,
                                                 Segment& described) {
  const auto [first, end] = part;
  Segment segment;
  segment.exists = 1;
  attention_decode::describe_tile(params, known, sequence, block.head_kv, block.row_tile * kRows,
                                  kRows, segment);
  segment.tile.masked = known.first < segment.all_first || segment.all_end < known.end ? 1 : 0;
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
  cut.tile = segment.tile;
  cut.parts = last_range - block.range + 1;
  cut.first = number;
  cut.second = places + number;
}

}  // namespace flashmoe::sm90_mla
