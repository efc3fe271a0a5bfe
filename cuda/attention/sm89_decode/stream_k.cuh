// A block's range of all keys (decode/stream_k.cuh), and the segments of tiles that it is made of.
//
// A unit is a step of kStepKeys keys, or a chunk of a sequence. The tiles of a sequence lie one
// behind the other, those of a KV head first, and so do sequences. Where tiles are about as many as
// blocks, or a few of them a block, ranges are of whole tiles instead (whole_tiles.h).
#pragma once

#include <climits>
#include <type_traits>

#include "cuda/attention/decode/stream_k.cuh"
#include "cuda/attention/sm89_decode/traits.cuh"
#include "cuda/attention/sm89_decode/whole_tiles.h"

namespace flashmoe::sm89_decode {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

template <class Traits>
__device__ __forceinline__ Described describe_by(const SequenceParams& sequences,
                                                 const Params& params, int index) {
  const SequenceRows queries = sequences.queries_of(index);
  const SequenceRows keys = sequences.keys_of(index);
  const int group = params.group.number();
  const int diagonal = sequences.diagonal_of(index, queries.length, keys.length);
  Described known;
  known.row_tiles = static_cast<int>(
      static_cast<uint32_t>(queries.length * group + Traits::kRows - 1) / Traits::kRows);
  attention_decode::describe_rows(params.score, queries, keys, diagonal, known);
  if (params.split_keys > 0) {
    const int chunks = (keys.length - 1) / params.split_keys / kMostChunks + 1;
    known.unit_keys = chunks * params.split_keys;
    known.origin = known.first / known.unit_keys * known.unit_keys;
    known.units = (known.end - known.origin + known.unit_keys - 1) / known.unit_keys;
  } else {
    // Unsigned numbers: of signed ones the compiler makes one division by a variable, for both
    // branches.
    constexpr uint32_t kUnitKeys = Traits::kStepKeys;
    known.unit_keys = Traits::kStepKeys;
    known.origin = static_cast<int>(static_cast<uint32_t>(known.first) / kUnitKeys * kUnitKeys);
    known.units = static_cast<int>(
        (static_cast<uint32_t>(known.end - known.origin) + kUnitKeys - 1) / kUnitKeys);
  }
  known.units = max(1, known.units);
  return known;
}

// Plain tables are read at once, by code that asks for no others: most of a block's start runs
// once, at 6 to 11 clocks an instruction.
template <class Traits, bool kPlain>
__device__ __forceinline__ Described describe(const Params& params, int index) {
  if constexpr (!kPlain) return describe_by<Traits>(params.sequences, params, index);
  SequenceParams own = params.sequences;  // tables of this sequence alone
  const bool packed = own.cu_seqlens_q.given();
  const int32_t offsets[2] = {packed ? own.cu_seqlens_q.at(index) : 0,
                              packed ? own.cu_seqlens_q.at(index + 1) : own.rows_q};
  const int32_t used = own.seqused_k.given() ? own.seqused_k.at(index) : INT_MAX;
  own.cu_seqlens_q = {offsets, 1};
  own.seqused_k = {&used, 1};
  own.cu_seqlens_k = own.seqused_q = own.k_begin = own.batch_index = own.q_offset = {};
  Described known = describe_by<Traits>(own, params, 0);
  known.batch_q = packed ? 0 : index;
  known.batch_k = index;
  return known;
}

// Calls use(plain), which says as a type whether tables are plain.
template <class Use>
__device__ __forceinline__ void with_tables(const Params& params, const Use& use) {
  if (params.plain_tables != 0) {
    use(std::true_type());
  } else {
    use(std::false_type());
  }
}

// Log2 of the KV heads of a tile, and the warps of each. Constants in kernels that have one head.
template <class Traits>
__device__ __forceinline__ int tile_heads_log2(const Params& params) {
  return Traits::kTileHeads == 1 ? 0 : params.tile_heads_log2;
}
template <class Traits>
__device__ __forceinline__ int warps_of_head(const Params& params) {
  return Traits::kTileHeads == 1 ? kWarps : params.warps_of_head;
}
// The KV head of this warp in its tile.
template <class Traits>
__device__ __forceinline__ int head_of_warp(const Params& params) {
  return Traits::kTileHeads == 1
             ? 0
             : thread_index() >> (kThreadsLog2 - tile_heads_log2<Traits>(params));
}
// Keys of one step for each warp of a KV head.
template <class Traits>
__device__ __forceinline__ int round_keys(const Params& params) {
  return Traits::kStepKeys * warps_of_head<Traits>(params);
}

template <class Traits>
__device__ __forceinline__ int64_t units_of(const Params& params, const Described& known) {
  return int64_t{params.lead + known.units} * known.row_tiles * params.tiles_of_row;
}

// The last sequence with no more than so many units in front of it.
__device__ __forceinline__ int sequence_of(const BlockState& state, int count, int64_t unit) {
  return attention_decode::last_sequence(count,
                                         [&](int index) { return state.before[index] > unit; });
}

// Units of all tiles, from the first of a block's range to the one behind its last.
struct Range {
  int64_t begin;
  int64_t end;
};

// Finds a block's range of whole tiles, where none of these is too long: then no tile has parts.
// Each thread has described a sequence, if there is one for it. False, for all threads, if ranges
// are to be equal.
template <class Traits>
__device__ __forceinline__ bool find_whole_range(const Params& params, const Described& known,
                                                 int64_t before, int64_t total, int blocks,
                                                 BlockState& state, Range& range) {
  const int count = params.sequences.count;
  // Few tiles are worth several blocks each, and a range of one unit is not cut further.
  if (blocks > kThreads || 2 * params.most_tiles < blocks || total <= blocks) return false;
  const int thread = thread_index();
  const int lead = params.lead;
  const int64_t most = most_whole_units(total, blocks, lead);
  state.before[thread] = before;
  bool too_long = false;
  if (thread < count) {
    state.tile_units[thread] = lead + known.units;
    too_long = known.row_tiles > 0 && lead + known.units > most;
  }
  if (__syncthreads_or(too_long)) return false;
  int64_t begin = total;
  if (thread < blocks) {
    const int s = sequence_of(state, count, attention_decode::equal_begin(total, thread, blocks));
    begin = whole_begin(total, blocks, thread, state.before[s], state.tile_units[s]);
    state.range_begin[thread] = begin;
  }
  __syncthreads();
  if (thread < blocks) {
    const int64_t end = thread + 1 < blocks ? state.range_begin[thread + 1] : total;
    too_long = end - begin > most;
  }
  if (__syncthreads_or(too_long)) return false;
  const int block = static_cast<int>(blockIdx.x);
  range.begin = state.range_begin[block];
  range.end = block + 1 < blocks ? state.range_begin[block + 1] : total;
  return true;
}

// Blocks among which keys are divided.
__device__ __forceinline__ int stream_k_blocks(const Params& params) {
  return params.division != nullptr ? min(params.division->decode_blocks, params.blocks)
                                    : params.blocks;
}

// The block whose equal range has a unit.
__device__ __forceinline__ int owner_of(const BlockState& state, int64_t unit) {
  return attention_decode::block_of_unit_before(unit + 1, state.total, state.blocks);
}

// Describes the sequences from the cursor's on, by a warp.
template <class Traits>
__device__ __forceinline__ void describe_window(const Params& params, BlockState& state) {
  const int first = state.cursor.sequence;
  const int index = first + lane_index();
  if (index < params.sequences.count) {
    with_tables(params, [&](auto plain) {
      state.window[lane_index()] = describe<Traits, plain>(params, index);
    });
  }
  __syncwarp();
  if (lane_index() == 0) state.cursor.window = first;
  __syncwarp();
}

// Takes a segment from the front of what is left of the range: the range's first one, or the next.
// The cursor is at a tile of the sequence that is `known`. The first segment is found in registers;
// later ones are taken beside a step's keys, which leave no registers.
template <class Traits, bool kFirst>
__device__ __forceinline__ void take_segment(const Params& params, const BlockState& state,
                                             const Described& known, Cursor& cursor,
                                             Segment& segment) {
  const int lead = params.lead;
  const int block = static_cast<int>(blockIdx.x);
  if (cursor.unit < 0) {
    const int passed = static_cast<int>(min(int64_t{-cursor.unit}, cursor.left));
    cursor.unit += passed;
    cursor.left -= passed;
  }
  segment.exists = cursor.left > 0 ? 1 : 0;
  segment.keys.end = kNoKeys;
  if (segment.exists == 0) return;
  const bool starts = cursor.unit == 0;
  const bool chunks = params.split_keys > 0;
  if (starts) {
    cursor.owner = block;
  } else if (kFirst) {
    // An earlier block. Which one matters for the places of chunks alone.
    cursor.owner = chunks ? owner_of(state, cursor.end - cursor.left - cursor.unit) : INT_MAX;
  }
  const int of_tile = known.units - cursor.unit;  // units that are left of it
  const int of_block = static_cast<int>(min(int64_t{of_tile}, cursor.left));
  const int taken = chunks ? 1 : of_block;
  const bool goes_on = of_block < of_tile;

  const int heads = known.row_tiles > 1 ? cursor.tile / known.row_tiles : cursor.tile;
  const KeyRange seen = attention_decode::describe_tile(
      params, known, cursor.sequence, heads << tile_heads_log2<Traits>(params),
      (cursor.tile - heads * known.row_tiles) * Traits::kRows, Traits::kRows, segment);
  segment.keys.first = seen.first;
  segment.tile.masked = seen.first < segment.all_first || segment.all_end < seen.end ? 1 : 0;

  segment.keys.key = known.origin + cursor.unit * known.unit_keys;
  segment.keys.end = min(seen.end, segment.keys.key + taken * known.unit_keys);
  // Skips rounds whose keys no row sees. Warps keep their places.
  const int ahead = segment.keys.first - segment.keys.key;
  if (ahead > 0) segment.keys.key += ahead & -round_keys<Traits>(params);

  segment.keys.pages =
      params.sequences.paged != 0 ? params.sequences.keys.pages_of(cursor.sequence) : nullptr;
  segment.keys.batch_k = known.batch_k;
  segment.keys.begin_k = known.begin_k;
  segment.new_tile = kFirst || starts ? 1 : 0;
  segment.last = cursor.unit + taken == known.units ? 1 : 0;
  segment.only = known.units == taken ? 1 : 0;
  // Chunks before this one were this block's, and those that follow will be.
  segment.whole = cursor.owner == block && !goes_on ? 1 : 0;
  if (chunks) {
    segment.place = cursor.owner * kMostChunks + cursor.unit;
  } else {
    segment.place = starts ? block : static_cast<int>(gridDim.x) + block;
  }
  if (starts && goes_on) {  // the last tile of the range
    cursor.cut_units = known.units;
    cursor.cut_last = cursor.end - cursor.left + known.units - 1;
  }
  cursor.left -= taken;
  cursor.unit += taken;
  if (cursor.unit == known.units) {
    cursor.unit = -lead;
    ++cursor.tile;
  }
  segment.keys.first_warp = cursor.steps & (warps_of_head<Traits>(params) - 1);
  cursor.steps +=
      max(0, segment.keys.end - segment.keys.key + Traits::kStepKeys - 1) / Traits::kStepKeys;
  cursor.tiles += segment.new_tile;
  segment.query_buffer = cursor.tiles % 2;
}

// Tells the second kernel of the tile that is cut behind the range.
__device__ __forceinline__ void tell_cut_tile(const Params& params, const BlockState& state,
                                              const Cursor& cursor, const TileRows& tile) {
  const int block = static_cast<int>(blockIdx.x);
  const bool chunks = params.split_keys > 0;
  CutTile& cut = params.cut_tiles[block];
  cut.tile = tile;
  cut.parts = chunks ? cursor.cut_units : owner_of(state, cursor.cut_last) - block + 1;
  cut.first = chunks ? block * kMostChunks : block;
  cut.second = chunks ? block * kMostChunks : static_cast<int>(gridDim.x) + block;
}

// Finds the range of the block, one of at most `most_blocks`, and leaves its first segment in slot
// 0: the thread does that has described the segment's sequence. False, for all threads, if there is
// none. Ends with a barrier.
template <class Traits>
__device__ __forceinline__ bool find_range(const Params& params, int most_blocks,
                                           BlockState& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int lane = static_cast<int>(static_cast<uint32_t>(thread) % kThreadsPerWarp);
  const int count = params.sequences.count;
  const int each = static_cast<int>(static_cast<uint32_t>(count + kThreads - 1) / kThreads);
  const int first = thread * each;
  const int end = min(first + each, count);
  int64_t mine = 0;
  Described known;  // the last one
  with_tables(params, [&](auto plain) {
#pragma unroll 1
    for (int s = first; s < end; ++s) {
      known = describe<Traits, plain>(params, s);
      mine += units_of<Traits>(params, known);
    }
  });
  const int64_t upto = attention_decode::sum_up_to_lane(mine, lane);
  if (lane == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  if (count <= kWindow && thread < count) state.window[thread] = known;
  if (thread == 0) {
    state.segments[0].exists = 0;
    for (uint32_t& rows : state.suspect_rows) rows = 0;
    // The first segment is behind this one.
    Segment& none = state.segments[kSegments - 1];
    none.exists = 0, none.keys.end = kNoKeys;
  }
  __syncthreads();
  const int warps = min(kWarps, (count - 1) / kThreadsPerWarp + 1);  // that describe sequences
  const attention_decode::UnitSums sums(state.warp_units, warps, warp, upto - mine);
  const int64_t total = sums.total;
  const int64_t before = sums.before;
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(min(total, int64_t{most_blocks}));
  if (block >= blocks) return false;
  Range range;
  if (!find_whole_range<Traits>(params, known, before, total, blocks, state, range)) {
    // Two lanes divide for all.
    const int64_t begin = attention_decode::equal_begin(total, block + (lane & 1), blocks);
    range.begin = __shfl_sync(kFullWarp, begin, 0);
    range.end = __shfl_sync(kFullWarp, begin, 1);
  }
  const bool has_begin = before <= range.begin && range.begin < before + mine;
  int64_t behind = range.begin - before;  // of the sequence's first unit
  int s = first;
  for (; each > 1 && has_begin; ++s) {
    known = describe<Traits, false>(params, s);
    const int64_t units = units_of<Traits>(params, known);
    if (behind < units) break;
    behind -= units;
  }
  if (has_begin) {
    state.total = total;
    state.blocks = blocks;
    const int lead = params.lead;
    const int units = lead + known.units;
    Cursor cursor = {};
    cursor.left = range.end - range.begin;
    cursor.end = range.end;
    cursor.sequence = s;
    cursor.tile = static_cast<int>(behind / units);
    cursor.unit = static_cast<int>(behind - int64_t{cursor.tile} * units) - lead;
    cursor.window = count <= kWindow ? 0 : -1;
    Segment segment;
    take_segment<Traits, true>(params, state, known, cursor, segment);
    state.segments[0] = segment;
    state.cursor = cursor;
  }
  __syncthreads();
  return state.segments[0].exists != 0;
}

// Leaves the next segment of the range in a slot, behind the last one's; one warp.
template <class Traits>
__device__ __forceinline__ void next_segment(const Params& params, BlockState& state, int slot) {
  Segment& segment = state.segments[slot];
  Cursor& cursor = state.cursor;
  if (cursor.left == 0) {
    if (lane_index() == 0) {
      segment.exists = 0, segment.keys.end = kNoKeys;
      if (cursor.cut_units > 0) {
        const Segment& last = state.segments[(slot + kSegments - 1) % kSegments];
        tell_cut_tile(params, state, cursor, last.tile);
      }
    }
    __syncwarp();
    return;
  }
  while (true) {
    if (cursor.window < 0 || cursor.sequence >= cursor.window + kWindow) {
      describe_window<Traits>(params, state);
    }
    const Described& known = state.window[cursor.sequence - cursor.window];
    const bool found = cursor.tile < known.row_tiles * params.tiles_of_row;
    __syncwarp();
    if (found) break;
    if (lane_index() == 0) {
      ++cursor.sequence;
      cursor.tile = 0;
      cursor.unit = -params.lead;
    }
    __syncwarp();
  }
  if (lane_index() == 0) {
    const Described& known = state.window[cursor.sequence - cursor.window];
    take_segment<Traits, false>(params, state, known, cursor, segment);
  }
  __syncwarp();
}

}  // namespace flashmoe::sm89_decode
