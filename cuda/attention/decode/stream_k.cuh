// Stream-K over the keys of all sequences: which tiles a block takes, and which keys of them.
//
// Work is counted in units of keys. The tiles of all sequences lie end to end, W units, and block b
// of G takes the range from unit b W / G on. The lengths are on the device, so each block works its
// range out for itself: every thread describes some sequences, a prefix sum over the block says
// which units these have, and the thread that has the range's first unit finds the range's first
// tile.
//
// The stream_k.cuh of a family says what a unit is, what a tile counts for beside its keys, and
// where ranges begin elsewhere, to cut fewer tiles.
#pragma once

#include "cuda/attention/decode/params.h"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_decode {

// A sequence as blocks know it.
struct DescribedSequence {
  int32_t batch_q;
  int32_t begin_q;
  int32_t length_q;
  int32_t batch_k;
  int32_t begin_k;
  int32_t length_k;
  int32_t diagonal;
  int32_t first;  // keys that some query sees
  int32_t end;

  __device__ __forceinline__ Sequence sequence() const {
    return {0, 0, length_q, length_k, diagonal};
  }
};

__device__ __forceinline__ void describe_rows(const ScoreOptions& score,
                                              const SequenceRows& queries, const SequenceRows& keys,
                                              int diagonal, DescribedSequence& known) {
  known.batch_q = queries.batch;
  known.begin_q = queries.begin;
  known.length_q = queries.length;
  known.batch_k = keys.batch;
  known.begin_k = keys.begin;
  known.length_k = keys.length;
  known.diagonal = diagonal;
  const Sequence sequence = known.sequence();
  known.first = sequence.first_key(score, 0);
  known.end = sequence.end_key(score, queries.length - 1);
  if (known.first >= known.end) known.first = known.end = 0;
}

// Prefix sum over a warp: `mine` of this lane and of those in front of it.
template <class Units>
__device__ __forceinline__ Units sum_up_to_lane(Units mine, int lane) {
  Units sum = mine;
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
    const Units before = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += before;
  }
  return sum;
}

// The units in front of a thread, and those of all threads, from the sums of warps, which shared
// memory holds, and the units in front of the thread in its own warp.
struct UnitSums {
  int64_t before;
  int64_t total;

  __device__ __forceinline__ UnitSums(const int64_t* warp_units, int warps, int warp,
                                      int64_t before_in_warp)
      : before(before_in_warp), total(0) {
#pragma unroll 1
    for (int w = 0; w < warps; ++w) {
      const int64_t units = warp_units[w];
      if (w < warp) before += units;
      total += units;
    }
  }
};

// The unit that an equal range begins with.
__device__ __forceinline__ int64_t equal_begin(int64_t total, int block, int blocks) {
  return total * block / blocks;
}

// The block whose equal range has the unit in front of `behind`: the last block that begins no
// later than there.
__device__ __forceinline__ int block_of_unit_before(int64_t behind, int64_t total, int blocks) {
  return static_cast<int>((behind * blocks - 1) / total);
}

// Binary search: the last of `count` sequences that does not begin later than some place, as
// is_later(sequence) tells. The first sequence never does.
template <class IsLater>
__device__ __forceinline__ int last_sequence(int count, const IsLater& is_later) {
  int low = 0;
#pragma unroll 1
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    const bool later = is_later(middle);
    low = later ? low : middle;
    high = later ? middle : high;
  }
  return low;
}

// Describes the tile of a segment, with `most_rows` rows from `first_row` on, and the keys that all
// of its rows see. Returns the keys that some row sees.
template <class Segment>
__device__ __forceinline__ KeyRange describe_tile(const Params& params,
                                                  const DescribedSequence& known, int sequence,
                                                  int head_kv, int first_row, int most_rows,
                                                  Segment& segment) {
  TileRows& tile = segment.tile;
  tile.sequence = sequence;
  tile.batch = known.batch_q;
  tile.begin_q = known.begin_q;
  tile.length_q = known.length_q;
  tile.length_k = known.length_k;
  tile.diagonal = known.diagonal;
  tile.head_kv = head_kv;
  tile.first_row = first_row;
  tile.rows = min(most_rows, known.length_q * params.group.number() - tile.first_row);
  const Sequence where = known.sequence();
  const int first_query = params.group.quotient(tile.first_row);
  const int last_query = params.group.quotient(tile.first_row + tile.rows - 1);
  const int first = where.first_key(params.score, first_query);
  segment.all_first = where.first_key(params.score, last_query);
  segment.all_end = where.end_key(params.score, first_query);
  return {first, where.end_key(params.score, last_query)};
}

}  // namespace flashmoe::attention_decode
