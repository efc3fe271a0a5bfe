// A block's share of all keys, and the segments of tiles that it is made of.
//
// What blocks share is counted in units: steps of kStepKeys keys, or chunks of a sequence. The
// tiles of a sequence are one behind the other, heads first, and so are sequences. Block b of G has
// the units from b W / G on, of W: each works that out from the lengths, by a sum over all
// sequences. Where tiles are about as many as blocks, or a few of them a block, shares are of whole
// tiles instead (whole_tiles.h).
#pragma once

#include <climits>
#include <type_traits>

#include "cuda/attention/sm89_decode/traits.cuh"
#include "cuda/attention/sm89_decode/whole_tiles.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

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
  const Sequence sequence = {0, 0, queries.length, keys.length,
                             sequences.diagonal_of(index, queries.length, keys.length)};
  Described known;
  known.batch_q = queries.batch;
  known.begin_q = queries.begin;
  known.length_q = queries.length;
  known.batch_k = keys.batch;
  known.begin_k = keys.begin;
  known.length_k = keys.length;
  known.diagonal = sequence.diagonal;
  known.row_tiles = static_cast<int>(
      static_cast<uint32_t>(queries.length * group + Traits::kRows - 1) / Traits::kRows);
  known.first = sequence.first_key(params.score, 0);
  known.end = sequence.end_key(params.score, queries.length - 1);
  if (known.first >= known.end) known.first = known.end = 0;
  if (params.split_keys > 0) {
    const int chunks = (keys.length - 1) / params.split_keys / kMostChunks + 1;
    known.unit_keys = chunks * params.split_keys;
    known.origin = known.first / known.unit_keys * known.unit_keys;
    known.units = (known.end - known.origin + known.unit_keys - 1) / known.unit_keys;
  } else {
    // Without signs: with them the compiler makes one division by a variable of both.
    constexpr uint32_t kUnitKeys = Traits::kStepKeys;
    known.unit_keys = Traits::kStepKeys;
    known.origin = static_cast<int>(static_cast<uint32_t>(known.first) / kUnitKeys * kUnitKeys);
    known.units = static_cast<int>(
        (static_cast<uint32_t>(known.end - known.origin) + kUnitKeys - 1) / kUnitKeys);
  }
  known.units = max(1, known.units);
  return known;
}

// Where tables are plain, what they say is read at once, and code that asks for the others is not
// there: most of a block's start runs once, at 6 to 11 clocks an instruction.
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

// Calls use(plain) with whether tables are, as a type.
template <class Use>
__device__ __forceinline__ void with_tables(const Params& params, const Use& use) {
  if (params.plain_tables != 0) {
    use(std::true_type());
  } else {
    use(std::false_type());
  }
}

// Units by which a tile counts for more than its keys. A cut among them is one in front of its
// keys.
template <class Traits>
__device__ __forceinline__ int lead_of(const Params& params) {
  return params.split_keys > 0 ? 0 : Traits::kLeadSteps;
}

template <class Traits>
__device__ __forceinline__ int64_t units_of(const Params& params, const Described& known) {
  return int64_t{lead_of<Traits>(params) + known.units} * known.row_tiles * params.heads_kv;
}

// The last sequence with no more than so many units in front of it.
__device__ __forceinline__ int sequence_of(const BlockState& state, int count, int64_t unit) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (state.before[middle] <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Units of all tiles, from the first of a block's share to the one behind its last.
struct Share {
  int64_t begin;
  int64_t end;
};

// A block's share of whole tiles, where none of these is too long: then no tile has parts. Each
// thread has described a sequence, if there is one for it. False, for all threads, if shares are to
// be equal.
template <class Traits>
__device__ __forceinline__ bool find_whole_share(const Params& params, const Described& known,
                                                 int64_t before, int64_t total, int blocks,
                                                 BlockState& state, Share& share) {
  const int count = params.sequences.count;
  // Of few tiles each is worth several blocks, and a share of one unit is not cut further.
  if (blocks > kThreads || 2 * params.most_tiles < blocks || total <= blocks) return false;
  const int thread = thread_index();
  const int lead = lead_of<Traits>(params);
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
    const int s = sequence_of(state, count, total * thread / blocks);
    begin = whole_begin(total, blocks, thread, state.before[s], state.tile_units[s]);
    state.share_begin[thread] = begin;
  }
  __syncthreads();
  if (thread < blocks) {
    const int64_t end = thread + 1 < blocks ? state.share_begin[thread + 1] : total;
    too_long = end - begin > most;
  }
  if (__syncthreads_or(too_long)) return false;
  const int block = static_cast<int>(blockIdx.x);
  share.begin = state.share_begin[block];
  share.end = block + 1 < blocks ? state.share_begin[block + 1] : total;
  return true;
}

// Blocks among which keys are divided.
__device__ __forceinline__ int sharing_blocks(const Params& params) {
  return params.division != nullptr ? min(params.division->decode_blocks, params.blocks)
                                    : params.blocks;
}

// The block that has a unit: the last that begins no later.
__device__ __forceinline__ int owner_of(const BlockState& state, int64_t unit) {
  return static_cast<int>(((unit + 1) * state.blocks - 1) / state.total);
}

// Describes the sequences from the cursor's on; a warp.
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

// Takes a segment from the front of what is left of the share: the share's first one, or the next.
// The cursor is at a tile of the sequence that is `known`. Of the first all is in registers; later
// ones are taken beside a step's keys, which leave none.
template <class Traits, bool kFirst>
__device__ __forceinline__ void take_segment(const Params& params, const BlockState& state,
                                             const Described& known, Cursor& cursor,
                                             Segment& segment) {
  const int lead = lead_of<Traits>(params);
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
    // An earlier one; which, matters for the places of chunks alone.
    cursor.owner = chunks ? owner_of(state, cursor.end - cursor.left - cursor.unit) : INT_MAX;
  }
  const int of_tile = known.units - cursor.unit;  // units that are left of it
  const int of_block = static_cast<int>(min(int64_t{of_tile}, cursor.left));
  const int taken = chunks ? 1 : of_block;
  const bool goes_on = of_block < of_tile;

  const int head_kv = known.row_tiles > 1 ? cursor.tile / known.row_tiles : cursor.tile;
  const int group = params.group.number();
  TileRows& tile = segment.tile;
  tile.sequence = cursor.sequence;
  tile.batch = known.batch_q;
  tile.begin_q = known.begin_q;
  tile.length_q = known.length_q;
  tile.length_k = known.length_k;
  tile.diagonal = known.diagonal;
  tile.head_kv = head_kv;
  tile.first_row = (cursor.tile - head_kv * known.row_tiles) * Traits::kRows;
  tile.rows = min(Traits::kRows, known.length_q * group - tile.first_row);
  const Sequence sequence = {0, 0, known.length_q, known.length_k, known.diagonal};
  const int first_query = params.group.quotient(tile.first_row);
  const int last_query = params.group.quotient(tile.first_row + tile.rows - 1);
  segment.keys.first = sequence.first_key(params.score, first_query);
  segment.all_first = sequence.first_key(params.score, last_query);
  segment.all_end = sequence.end_key(params.score, first_query);
  const int end = sequence.end_key(params.score, last_query);
  tile.masked = segment.keys.first < segment.all_first || segment.all_end < end ? 1 : 0;

  segment.keys.key = known.origin + cursor.unit * known.unit_keys;
  segment.keys.end = min(end, segment.keys.key + taken * known.unit_keys);
  // Rounds of which no row sees a key; warps keep their places.
  const int ahead = segment.keys.first - segment.keys.key;
  if (ahead > 0) segment.keys.key += ahead / Traits::kRoundKeys * Traits::kRoundKeys;

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
  if (starts && goes_on) {  // the last tile of the share
    cursor.cut_units = known.units;
    cursor.cut_last = cursor.end - cursor.left + known.units - 1;
  }
  cursor.left -= taken;
  cursor.unit += taken;
  if (cursor.unit == known.units) {
    cursor.unit = -lead;
    ++cursor.tile;
  }
  segment.keys.first_warp = cursor.steps % kWarps;
  cursor.steps +=
      max(0, segment.keys.end - segment.keys.key + Traits::kStepKeys - 1) / Traits::kStepKeys;
  cursor.tiles += segment.new_tile;
  segment.query_buffer = cursor.tiles % 2;
}

// Tells the second kernel of the tile that is cut behind the share.
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

// Finds the block's share of so many, and leaves its first segment in slot 0: the thread does that
// has described its sequence. False, for all threads, if there is none. Ends with a barrier.
template <class Traits>
__device__ __forceinline__ bool find_share(const Params& params, int most_blocks,
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
  int64_t upto = mine;  // this thread, in its warp
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  if (count <= kWindow && thread < count) state.window[thread] = known;
  if (thread == 0) {
    state.segments[0].exists = 0;
    // Behind which the first one is.
    Segment& none = state.segments[kSegments - 1];
    none.exists = 0, none.keys.end = kNoKeys;
  }
  __syncthreads();
  int64_t total = 0;
  int64_t before = upto - mine;
  const int warps = min(kWarps, (count - 1) / kThreadsPerWarp + 1);  // that describe sequences
#pragma unroll 1
  for (int w = 0; w < warps; ++w) {
    const int64_t units = state.warp_units[w];
    if (w < warp) before += units;
    total += units;
  }
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(min(total, int64_t{most_blocks}));
  if (block >= blocks) return false;
  Share share;
  if (!find_whole_share<Traits>(params, known, before, total, blocks, state, share)) {
    // Two lanes divide for all.
    const int64_t begin = total * (block + (lane & 1)) / blocks;
    share.begin = __shfl_sync(kFullWarp, begin, 0);
    share.end = __shfl_sync(kFullWarp, begin, 1);
  }
  const bool has_begin = before <= share.begin && share.begin < before + mine;
  int64_t behind = share.begin - before;  // of the sequence's first unit
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
    const int lead = lead_of<Traits>(params);
    const int units = lead + known.units;
    Cursor cursor = {};
    cursor.left = share.end - share.begin;
    cursor.end = share.end;
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

// Leaves the next segment of the share in a slot, behind the one of the last; one warp.
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
    const bool found = cursor.tile < known.row_tiles * params.heads_kv;
    __syncwarp();
    if (found) break;
    if (lane_index() == 0) {
      ++cursor.sequence;
      cursor.tile = 0;
      cursor.unit = -lead_of<Traits>(params);
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
