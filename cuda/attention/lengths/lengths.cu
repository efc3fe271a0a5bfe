// Separates sequences with few queries from the others: writes two tables of lengths, and in each
// the sequences of the other have no query. From the work of both it finds how many multiprocessors
// decoding starts with (cuda/attention/division.h).
#include "cuda/attention/lengths/divide.h"
#include "cuda/attention/lengths/lengths.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/sequence.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::lengths {
namespace {

// Work of both kinds, in microseconds, and the sum of squares over the tiles of prompts.
struct Sums {
  float decoding;
  float memory;
  float prompts;
  float squares;
};

// How many keys the middle query sees: about the average over all queries.
__device__ __forceinline__ int keys_of_middle(const Params& params, int sequence, int queries) {
  const int keys = params.sequences.keys_of(sequence).length;
  const Sequence of = {0, 0, queries, keys, params.sequences.diagonal_of(sequence, queries, keys)};
  const KeyRange seen = of.keys(params.score, queries / 2);
  return max(0, seen.end - seen.first);
}

// Adds a sequence that decodes, with its tiles of a KV head.
__device__ __forceinline__ void add_few(const Params& params, int queries, float keys, Sums& sums) {
  const auto tiles = static_cast<float>((queries - 1) / params.few_queries + 1);
  sums.decoding += tiles * (keys * params.decode_time + params.decode_lead);
  sums.memory += keys * params.memory_time;
}

__device__ __forceinline__ void add_many(const Params& params, int queries, float keys,
                                         Sums& sums) {
  const auto tiles = static_cast<float>((queries - 1) / params.many_rows + 1);
  const float of_tile =
      static_cast<float>(queries) * keys * params.pair_time / tiles + params.tile_time;
  sums.prompts += params.heads_q * tiles * of_tile;
  sums.squares += params.heads_q * tiles * of_tile * of_tile;
}

// Sums over the block. The result is in its first warp.
__device__ __forceinline__ Sums sum_of_block(Sums own) {
  __shared__ Sums of_warps[kLengthsThreads / kThreadsPerWarp];
  const auto sum_of_warp = [](Sums sums) {
#pragma unroll
    for (int step = kThreadsPerWarp / 2; step > 0; step /= 2) {
      sums.decoding += __shfl_xor_sync(kFullWarp, sums.decoding, step);
      sums.memory += __shfl_xor_sync(kFullWarp, sums.memory, step);
      sums.prompts += __shfl_xor_sync(kFullWarp, sums.prompts, step);
      sums.squares += __shfl_xor_sync(kFullWarp, sums.squares, step);
    }
    return sums;
  };
  static_assert(kLengthsThreads == kThreadsPerWarp * kThreadsPerWarp, "one warp adds up the rest");
  const int warp = warp_index();  // all lanes call it
  own = sum_of_warp(own);
  if (lane_index() == 0) of_warps[warp] = own;
  __syncthreads();
  return warp == 0 ? sum_of_warp(of_warps[lane_index()]) : own;
}

// The fewest blocks of decoding with which all work ends soonest. A warp calls it. Prompts have the
// remaining multiprocessors: all but one without decoding.
__device__ __forceinline__ int blocks_of_decoding(const Params& params, const Sums& sums) {
  const int all = params.multiprocessors;
  if (sums.prompts <= 0.0f) return all;
  // The mean time of a tile is weighted by time: long tiles decide when all work ends.
  const float of_tile = sums.squares / sums.prompts;
  const Loads loads = {sums.decoding, sums.memory, sums.prompts / of_tile, of_tile};
  uint32_t soonest = ~0u;
  int blocks = 1;
  for (int n = lane_index() + 1; n <= all; n += kThreadsPerWarp) {
    const uint32_t end = __float_as_uint(end_of(loads, all, n));  // ordered like the floats
    if (end < soonest) soonest = end, blocks = n;
  }
  const uint32_t of_all = __reduce_min_sync(kFullWarp, soonest);
  return static_cast<int>(
      __reduce_min_sync(kFullWarp, soonest == of_all ? static_cast<uint32_t>(blocks) : ~0u));
}

__global__ void __launch_bounds__(kLengthsThreads)
    attention_lengths_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  Sums sums = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int s = thread_index(); s < params.sequences.count; s += kLengthsThreads) {
    const int queries = params.sequences.queries_of(s).length;
    const bool many = queries > params.several;
    const bool few = queries <= params.few;
    params.many_q[s] = many ? queries : 0;
    params.few_q[s] = few ? queries : 0;
    if (params.several_q != nullptr) params.several_q[s] = many || few ? 0 : queries;
    if (params.division == nullptr || queries == 0) continue;
    const auto keys = static_cast<float>(keys_of_middle(params, s, queries));
    if (many) {
      add_many(params, queries, keys, sums);
    } else if (few) {
      add_few(params, queries, keys, sums);
    }
  }
  if (params.division == nullptr) return;
  sums = sum_of_block(sums);
  if (thread_index() >= kThreadsPerWarp) return;
  const int blocks = blocks_of_decoding(params, sums);
  if (thread_index() == 0) *params.division = {blocks, 0};
}

LoadedKernel loaded[kMaxDevices];

}  // namespace

const Kernel kLengths = {"attention_forward_mixed_lengths",
                         reinterpret_cast<const void*>(&attention_lengths_kernel), 0, loaded};

}  // namespace flashmoe::lengths
