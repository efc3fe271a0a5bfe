// Reads the tables of a ragged or padded batch. Leaves in the workspace the list of items and the
// position of each sequence's tiles. One block, before the prologue.
//
// Sequences are ranked by their number of key tiles, the most first, and then by their order in the
// batch. So the longest items begin first, and the order is the same on every run. It is a counting
// sort: each number of tiles up to kExact has a bucket, and larger ones share a bucket per quarter
// of a power of two.
//
// A second pass over the ranks computes sums over earlier ones: tiles of queries, items, and
// classes. A class is a run of ranks with the same number of key tiles.
#include <cstdint>

#include "cuda/attention/backward/ragged_params.h"
#include "cuda/attention/backward/tables.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {
namespace {

constexpr int kWarps = kTablesThreads / kThreadsPerWarp;
constexpr int kExactLog2 = 6;
constexpr int kExact = 1 << kExactLog2;
constexpr int kBuckets = 160;
// Above the total of any sequences that share no rows. Twice this number still fits.
constexpr uint32_t kTooMany = 1u << 30;

// The first bucket has the most tiles, the last one none.
__device__ __forceinline__ int bucket_of(int tiles) {
  int place = tiles;
  if (tiles > kExact) {
    const int log2 = 31 - __clz(tiles);
    place = kExact + 1 + 4 * (log2 - kExactLog2) + (tiles >> (log2 - 2) & 3);
  }
  return kBuckets - 1 - min(place, kBuckets - 1);
}

__device__ __forceinline__ SequencePlace place_of(const RaggedParams& params, int sequence) {
  const SequenceParams& sequences = params.sequences;
  const SequenceRows queries = sequences.queries_of(sequence);
  SequenceRows keys = {0, 0, 0};
  if (queries.length > 0) {
    keys = sequences.keys_of(sequence);
    if (!sequences.cu_seqlens_k.given()) keys.batch = sequence;
  }
  return {params.numbers_sequences != 0 ? sequence : queries.batch,
          queries.begin,
          queries.length,
          keys.batch,
          keys.begin,
          keys.length,
          sequences.diagonal_of(sequence, queries.length, keys.length),
          0};
}

__device__ __forceinline__ int tiles_k_of(const RaggedParams& params, int length_k) {
  return ceil_div(length_k, params.tile_k);
}

struct Sums {
  uint32_t tiles_q;
  uint32_t tiles_k;
  uint32_t classes;

  // Sums saturate at kTooMany.
  __device__ __forceinline__ Sums operator+(const Sums& other) const {
    return {min(tiles_q + other.tiles_q, kTooMany), min(tiles_k + other.tiles_k, kTooMany),
            classes + other.classes};
  }
};

struct SharedStorage {
  uint32_t buckets[kBuckets];  // sequences per bucket, then the rank of the bucket's next sequence
  uint32_t of_warps[kWarps][kBuckets];
  Sums sums[kWarps];
  int decreasing;
};

__device__ __forceinline__ Sums before_in_warp(const Sums& own, int distance) {
  return {__shfl_up_sync(kFullWarp, own.tiles_q, distance),
          __shfl_up_sync(kFullWarp, own.tiles_k, distance),
          __shfl_up_sync(kFullWarp, own.classes, distance)};
}

// The inclusive prefix sum over threads. `total` is the sum of all. Ends with a barrier.
__device__ __forceinline__ Sums sum_up_to(const Sums& own, SharedStorage& shared, Sums* total) {
  const int lane = lane_index();
  const int warp = thread_index() / kThreadsPerWarp;
  Sums sum = own;
#pragma unroll
  for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
    const Sums before = before_in_warp(sum, distance);
    if (lane >= distance) sum = before + sum;
  }
  if (lane == kThreadsPerWarp - 1) shared.sums[warp] = sum;
  __syncthreads();
  static_assert(kWarps == kThreadsPerWarp);
  Sums of_warps = shared.sums[lane];
#pragma unroll
  for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
    const Sums before = before_in_warp(of_warps, distance);
    if (lane >= distance) of_warps = before + of_warps;
  }
  const auto from = [&](int source) -> Sums {
    return {__shfl_sync(kFullWarp, of_warps.tiles_q, source),
            __shfl_sync(kFullWarp, of_warps.tiles_k, source),
            __shfl_sync(kFullWarp, of_warps.classes, source)};
  };
  *total = from(kThreadsPerWarp - 1);
  const Sums before = from(max(warp - 1, 0));
  if (warp > 0) sum = before + sum;
  __syncthreads();
  return sum;
}

// Counts the sequences of each bucket, and finds out whether some offsets decrease.
__device__ __forceinline__ void count_sequences(const RaggedParams& params, SharedStorage& shared) {
  const SequenceParams& sequences = params.sequences;
  const auto decreases = [](const TableNumbers& offsets, int sequence) {
    return offsets.given() && offsets.at(sequence + 1) < offsets.at(sequence);
  };
  for (int sequence = thread_index(); sequence < sequences.count; sequence += kTablesThreads) {
    const SequencePlace place = place_of(params, sequence);
    atomicAdd(&shared.buckets[bucket_of(tiles_k_of(params, place.length_k))], 1u);
    if (decreases(sequences.cu_seqlens_q, sequence) ||
        decreases(sequences.cu_seqlens_k, sequence)) {
      shared.decreasing = 1;
    }
  }
}

// Computes the rank of the first sequence of each bucket. One warp calls it.
__device__ __forceinline__ void begin_buckets(SharedStorage& shared) {
  constexpr int kEach = kBuckets / kThreadsPerWarp;
  static_assert(kEach * kThreadsPerWarp == kBuckets);
  const int lane = lane_index();
  uint32_t own[kEach];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = shared.buckets[lane * kEach + i];
    sum += own[i];
  }
  uint32_t up_to = sum;
#pragma unroll
  for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, up_to, distance);
    if (lane >= distance) up_to += before;
  }
  uint32_t rank = up_to - sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    shared.buckets[lane * kEach + i] = rank;
    rank += own[i];
  }
}

// Writes the places of as many sequences as there are threads, from `first` on.
__device__ __forceinline__ void rank_sequences(const RaggedParams& params, int first,
                                               SharedStorage& shared) {
  const int thread = thread_index();
  const int warp = thread / kThreadsPerWarp;
  for (int i = thread; i < kWarps * kBuckets; i += kTablesThreads) {
    shared.of_warps[i / kBuckets][i % kBuckets] = 0;
  }
  __syncthreads();
  const int sequence = first + thread;
  const bool there = sequence < params.sequences.count;
  SequencePlace place = {};
  if (there) place = place_of(params, sequence);
  const int bucket = there ? bucket_of(tiles_k_of(params, place.length_k)) : kBuckets;
  const uint32_t alike = __match_any_sync(kFullWarp, bucket);
  const int before = __popc(alike & ((1u << lane_index()) - 1));
  if (there && before == 0) shared.of_warps[warp][bucket] = __popc(alike);
  __syncthreads();
  if (thread < kBuckets) {
    uint32_t rank = shared.buckets[thread];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const uint32_t count = shared.of_warps[i][thread];
      shared.of_warps[i][thread] = rank;
      rank += count;
    }
    shared.buckets[thread] = rank;
  }
  __syncthreads();
  if (there) params.places[shared.of_warps[warp][bucket] + before] = place;
  __syncthreads();
}

// Writes first tiles, classes and their first items, by rank. Returns their totals.
__device__ __forceinline__ Sums walk_ranks(const RaggedParams& params, SharedStorage& shared) {
  const int count = params.sequences.count;
  Sums all = {0, 0, 0};
  for (int first = 0; first < count; first += kTablesThreads) {
    const int rank = first + thread_index();
    Sums own = {0, 0, 0};
    if (rank < count) {
      const SequencePlace& place = params.places[rank];
      const int tiles_k = tiles_k_of(params, place.length_k);
      own.tiles_q = static_cast<uint32_t>(ceil_div(place.length_q, params.tile_q));
      own.tiles_k = static_cast<uint32_t>(tiles_k);
      own.classes =
          rank == 0 || tiles_k_of(params, params.places[rank - 1].length_k) != tiles_k ? 1 : 0;
    }
    Sums total;
    const Sums sum = all + sum_up_to(own, shared, &total);
    all = all + total;
    if (rank >= count) continue;
    // If sequences share rows there may not be room for all tiles: the others have no gradients.
    const int room = own.tiles_k > 1 ? params.sum_tiles : params.tiles_q;
    const bool fits = sum.tiles_q <= static_cast<uint32_t>(room) &&
                      sum.tiles_k <= static_cast<uint32_t>(params.most_tiles_k);
    const int first_tile = static_cast<int>(sum.tiles_q - own.tiles_q);
    const int first_tile_k = static_cast<int>(sum.tiles_k - own.tiles_k);
    params.first_tiles[rank] = min(first_tile, params.tiles_q);
    params.places[rank].first_tile = fits ? first_tile : 0;
    if (!fits) {
      params.places[rank].length_q = 0;
      params.places[rank].length_k = 0;
      shared.decreasing = 1;
    }
    if (own.classes != 0) {
      const int number = static_cast<int>(sum.classes) - 1;
      params.classes[number].first_rank = rank;
      params.classes[number].tiles_k = static_cast<int>(own.tiles_k);
      params.first_items[number] = min(first_tile_k, params.most_tiles_k) * params.heads_kv;
    }
  }
  return all;
}

// Requires the first ranks and items of all classes.
__device__ __forceinline__ void order_class(const RaggedParams& params, int number, int items) {
  SequenceClass& of_class = params.classes[number];
  const int first_item = params.first_items[number];
  const int sequences = params.classes[number + 1].first_rank - of_class.first_rank;
  const SequencePlace& place = params.places[of_class.first_rank];
  // As for a dense batch (core/ops/attention/problem.cpp). The offset of an absent bound lies
  // beyond all keys.
  const Bounded bounded = {params.score.left_offset + place.diagonal > 1 - place.length_q,
                           params.score.bounded_right != 0 &&
                               params.score.right_offset + place.diagonal < place.length_k - 1};
  const int64_t head_bytes = int64_t{place.length_q} * params.heads_per_kv * params.row_bytes;
  of_class.order = order_of(int64_t{sequences} * params.heads_kv, params.heads_per_kv,
                            of_class.tiles_k, head_bytes, bounded, params.wave_heads,
                            params.at_a_time, {first_item, items - params.first_items[number + 1]});
}

__global__ void __launch_bounds__(kTablesThreads)
    attention_backward_tables(const __grid_constant__ RaggedParams params) {
  extern __shared__ unsigned char raw[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int thread = thread_index();
  const int count = params.sequences.count;
  if (thread < kBuckets) shared.buckets[thread] = 0;
  if (thread == 0) shared.decreasing = 0;
  __syncthreads();
  count_sequences(params, shared);
  __syncthreads();
  if (thread < kThreadsPerWarp) begin_buckets(shared);
  __syncthreads();
  for (int first = 0; first < count; first += kTablesThreads) {
    rank_sequences(params, first, shared);
  }
  const Sums all = walk_ranks(params, shared);
  const int classes = static_cast<int>(all.classes);
  const int items = min(static_cast<int>(all.tiles_k), params.most_tiles_k) * params.heads_kv;
  const int tiles_q = min(static_cast<int>(all.tiles_q), params.tiles_q);
  if (thread == 0) {
    params.first_tiles[count] = tiles_q;
    params.first_items[classes] = items;
    params.classes[classes].first_rank = count;
  }
  __syncthreads();
  if (thread == 0) *params.totals = {tiles_q, items, classes, shared.decreasing};
  for (int number = thread; number < classes; number += kTablesThreads) {
    order_class(params, number, items);
  }
}

LoadedKernel loaded[kMaxDevices];

}  // namespace

const Kernel kTablesKernel = {"attention_backward_tables",
                              reinterpret_cast<const void*>(&attention_backward_tables),
                              static_cast<int>(sizeof(SharedStorage)), loaded};

}  // namespace flashmoe::attention_backward
