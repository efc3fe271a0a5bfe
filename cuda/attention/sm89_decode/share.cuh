// A block's share of all keys, and the segments of tiles that it is made of.
//
// What blocks share is counted in units: steps of kStepKeys keys, or chunks of a sequence. The
// tiles of a sequence are one behind the other, heads first, and so are sequences. Block b of G has
// the units from b W / G on, of W: each works that out from the lengths, by a sum over all
// sequences. Where tiles are about as many as blocks, or a few of them a block, shares are of whole
// tiles instead (whole_tiles.h).
#pragma once

#include <climits>

#include "cuda/attention/sm89_decode/traits.cuh"
#include "cuda/attention/sm89_decode/whole_tiles.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_decode {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

// Brings what the tables say of a sequence to the L1, all of it at a time: read as it is needed,
// one number would wait for another.
__device__ __forceinline__ void touch_tables(const SequenceParams& sequences, int index) {
  const auto touch = [&](const TableNumbers& table, int i) {
    return table.given() ? table.at(i) : 0;
  };
  const int together = touch(sequences.cu_seqlens_q, index) ^
                       touch(sequences.cu_seqlens_q, index + 1) ^
                       touch(sequences.seqused_q, index) ^ touch(sequences.cu_seqlens_k, index) ^
                       touch(sequences.cu_seqlens_k, index + 1) ^
                       touch(sequences.seqused_k, index) ^ touch(sequences.k_begin, index) ^
                       touch(sequences.batch_index, index) ^ touch(sequences.q_offset, index);
  asm volatile("" ::"r"(together));
}

template <class Traits>
__device__ __forceinline__ Described describe(const Params& params, int index) {
  const SequenceParams& sequences = params.sequences;
  touch_tables(sequences, index);
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
  known.row_tiles = (queries.length * group + Traits::kRows - 1) / Traits::kRows;
  known.first = sequence.first_key(params.score, 0);
  known.end = sequence.end_key(params.score, queries.length - 1);
  if (known.first >= known.end) known.first = known.end = 0;
  const auto count_from_first = [&](int unit_keys) {
    known.unit_keys = unit_keys;
    known.origin = known.first / unit_keys * unit_keys;
    known.units = max(1, (known.end - known.origin + unit_keys - 1) / unit_keys);
  };
  if (params.split_keys > 0) {
    const int chunks = (keys.length - 1) / params.split_keys / kMostChunks + 1;
    count_from_first(chunks * params.split_keys);
  } else {
    count_from_first(Traits::kStepKeys);
  }
  return known;
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

// Sets the cursor to the block's share of whole tiles, where none of these is too long: then no
// tile has parts. Each thread has described a sequence, if there is one for it. False, for all
// threads, if shares are to be equal. Ends with a barrier.
template <class Traits>
__device__ __forceinline__ bool find_whole_share(const Params& params, const Described& known,
                                                 int64_t before, int64_t total, int blocks,
                                                 BlockState& state) {
  const int count = params.sequences.count;
  const int64_t rows = int64_t{params.sequences.most_q} * params.group.number();
  const int64_t most_tiles =
      int64_t{count} * params.heads_kv * ((rows + Traits::kRows - 1) / Traits::kRows);
  // Of few tiles each is worth several blocks, and a share of one unit is not cut further.
  if (count > kThreads || blocks > kThreads || 2 * most_tiles < blocks || total <= blocks) {
    return false;
  }
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
  int s = 0;
  if (thread < blocks) {
    s = sequence_of(state, count, total * thread / blocks);
    begin = whole_begin(total, blocks, thread, state.before[s], state.tile_units[s]);
    state.share_begin[thread] = begin;
  }
  __syncthreads();
  if (thread < blocks) {
    const int64_t end = thread + 1 < blocks ? state.share_begin[thread + 1] : total;
    too_long = end - begin > most;
    if (thread == static_cast<int>(blockIdx.x)) {
      while (s + 1 < count && state.before[s + 1] <= begin) ++s;
      state.cursor.begin_at(s, begin - state.before[s], end, end - begin);
    }
  }
  return !__syncthreads_or(too_long);
}

// Blocks among which keys are divided.
__device__ __forceinline__ int sharing_blocks(const Params& params) {
  return params.division != nullptr ? min(params.division->decode_blocks, params.blocks)
                                    : params.blocks;
}

// Sets the cursor to the block's share of so many. False, for all threads, if it has none. Ends
// with a barrier.
template <class Traits>
__device__ __forceinline__ bool find_share(const Params& params, int most_blocks,
                                           BlockState& state) {
  const int thread = thread_index();
  const int warp = warp_index();
  const int each = (params.sequences.count + kThreads - 1) / kThreads;
  const int first = thread * each;
  const int end = min(first + each, params.sequences.count);
  int64_t mine = 0;
  Described known;  // the last one
  for (int s = first; s < end; ++s) {
    known = describe<Traits>(params, s);
    mine += units_of<Traits>(params, known);
  }
  int64_t upto = mine;  // this thread, in its warp
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, upto, step);
    if (lane_index() >= step) upto += before;
  }
  if (lane_index() == kThreadsPerWarp - 1) state.warp_units[warp] = upto;
  if (thread == 0) {
    state.cursor.left = 0;
    state.cursor.window = -1;
    state.cursor.steps = 0;
    state.cursor.tiles = 0;
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
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(min(total, int64_t{most_blocks}));
  if (thread == 0) {
    state.cursor.total = total;
    state.cursor.blocks = blocks;
  }
  if (block < blocks && !find_whole_share<Traits>(params, known, before, total, blocks, state)) {
    const int64_t begin = total * block / blocks;
    if (before <= begin && begin < before + mine) {
      int64_t behind = begin - before;  // of the sequence's first unit
      int s = first;
      for (; s + 1 < end; ++s) {
        const int64_t units = units_of<Traits>(params, describe<Traits>(params, s));
        if (behind < units) break;
        behind -= units;
      }
      const int64_t end = total * (block + 1) / blocks;
      state.cursor.begin_at(s, behind, end, end - begin);
    }
  }
  __syncthreads();
  if (each == 1 && block < blocks) {
    const int at = thread - state.cursor.sequence;
    if (at >= 0 && at < kWindow && first < end) state.window[at] = known;
    if (thread == 0) state.cursor.window = state.cursor.sequence;
    __syncthreads();
  }
  return block < blocks;
}

// The block that has a unit: the last that begins no later.
__device__ __forceinline__ int owner_of(const Cursor& cursor, int64_t unit) {
  return static_cast<int>(((unit + 1) * cursor.blocks - 1) / cursor.total);
}

// Describes the sequences from the cursor's on; a warp.
template <class Traits>
__device__ __forceinline__ void describe_window(const Params& params, BlockState& state) {
  const int first = state.cursor.sequence;
  const int index = first + lane_index();
  if (index < params.sequences.count) {
    state.window[lane_index()] = describe<Traits>(params, index);
  }
  __syncwarp();
  if (lane_index() == 0) state.cursor.window = first;
  __syncwarp();
}

// Takes a segment from the front of what is left of the share, whose sequence is described.
template <class Traits>
__device__ __forceinline__ void take_segment(const Params& params, BlockState& state,
                                             Segment& segment) {
  Cursor& cursor = state.cursor;
  const int lead = lead_of<Traits>(params);
  const Described& known = state.window[cursor.sequence - cursor.window];
  const int block = static_cast<int>(blockIdx.x);
  const bool first_of_share = cursor.owner < 0;
  if (first_of_share) {
    const int64_t behind = (int64_t{cursor.tile} << 31) + cursor.unit;
    const int units = lead + known.units;
    cursor.tile = static_cast<int>(behind / units);
    cursor.unit = static_cast<int>(behind - int64_t{cursor.tile} * units) - lead;
  }
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
  } else if (first_of_share) {
    // An earlier one; which, matters for the places of chunks alone.
    cursor.owner = chunks ? owner_of(cursor, cursor.end - cursor.left - cursor.unit) : INT_MAX;
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
  segment.new_tile = first_of_share || starts ? 1 : 0;
  segment.last = cursor.unit + taken == known.units ? 1 : 0;
  segment.only = known.units == taken ? 1 : 0;
  // Chunks before this one were this block's, and those that follow will be.
  segment.whole = cursor.owner == block && !goes_on ? 1 : 0;
  const int places = static_cast<int>(gridDim.x);
  if (chunks) {
    segment.place = cursor.owner * kMostChunks + cursor.unit;
  } else {
    segment.place = starts ? block : places + block;
  }
  if (starts && goes_on) {  // the last tile of the share
    const int64_t begin = cursor.end - cursor.left;
    CutTile& cut = params.cut_tiles[block];
    cut.tile = tile;
    cut.parts = chunks ? known.units : owner_of(cursor, begin + known.units - 1) - block + 1;
    cut.first = chunks ? block * kMostChunks : block;
    cut.second = chunks ? block * kMostChunks : places + block;
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

// Leaves the next segment of the share in a slot; one warp.
template <class Traits>
__device__ __forceinline__ void next_segment(const Params& params, BlockState& state, int slot) {
  Segment& segment = state.segments[slot];
  Cursor& cursor = state.cursor;
  if (cursor.left == 0) {
    if (lane_index() == 0) segment.exists = 0, segment.keys.end = kNoKeys;
    __syncwarp();
    return;
  }
  const int lead = lead_of<Traits>(params);
  while (true) {
    if (cursor.window < 0 || cursor.sequence >= cursor.window + kWindow) {
      describe_window<Traits>(params, state);
    }
    const Described& known = state.window[cursor.sequence - cursor.window];
    const int tiles = known.row_tiles * params.heads_kv;
    const bool found = cursor.owner < 0 || cursor.tile < tiles;
    __syncwarp();
    if (found) break;
    if (lane_index() == 0) {
      ++cursor.sequence;
      cursor.tile = 0;
      cursor.unit = -lead;
    }
    __syncwarp();
  }
  if (lane_index() == 0) take_segment<Traits>(params, state, segment);
  __syncwarp();
}

}  // namespace flashmoe::sm89_decode
