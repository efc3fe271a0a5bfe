// Finds which experts have rows, and which rows. Every block does so from the results of routing.
#pragma once

#include "cuda/moe/sm89_few_tokens/traits.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::moe::sm89_few_tokens {

// An expert with rows. Its slots are taken in *entries* of up to entry_tokens each.
struct __align__(16) Record {
  int expert;
  int first_slot;
  int end_slot;
  int first_entry;
};

struct Experts {
  const Record* records;  // [count + 1]; the last one has first_entry = entries
  int count;
  int entries;

  // The record of an entry.
  __device__ __forceinline__ int find(int entry) const {
    int low = 0;
    int high = count;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (records[middle].first_entry <= entry) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Writes the end of the records when all are known. `full_entries`: the number of entries that all
// pairs would fill.
__device__ __forceinline__ Experts end_records(const Routing& routing, int entry_tokens,
                                               int full_entries, Record* records, int count,
                                               int entries, bool by_this_thread) {
  // Only offsets that routing did not make have more.
  if (count > routing.max_records) {
    count = routing.max_records;
    const Record last = records[count - 1];
    entries = last.first_entry + ceil_div(last.end_slot - last.first_slot, entry_tokens);
  }
  // Each expert may have one entry that is not full. Offsets that are not monotonic have the same
  // pairs many times, and are clamped: products of steps and entries fit in 32 bits for offsets
  // from routing, but not for such ones.
  entries = min(entries, full_entries + count);
  if (by_this_thread) records[count] = {0, 0, 0, entries};
  return {records, count, entries};
}

// Fills `records`. All threads of the block call it, and it synchronises them after the last write.
// Offsets may hold anything: an expert's slots are always within the pairs.
__device__ __forceinline__ Experts find_experts(const Routing& routing, int entry_tokens,
                                                Record* records) {
  __shared__ int2 warp_totals[kWarps];
  const int pairs = routing.tokens * routing.top_k;
  const int lane = lane_index();
  const int warp = warp_index();
  int count = 0;
  int entries = 0;
  for (int first = 0; first < routing.experts; first += kThreads) {
    const int expert = first + thread_index();
    int begin = 0;
    int end = 0;
    if (expert < routing.experts) {
      begin = min(max(__ldcg(routing.offsets + expert), 0), pairs);
      end = min(max(__ldcg(routing.offsets + expert + 1), 0), pairs);
    }
    const int own = ceil_div(max(end - begin, 0), entry_tokens);
    const uint32_t active = __ballot_sync(kFullWarp, own > 0);
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
      const int before = __shfl_up_sync(kFullWarp, sum, distance);
      if (lane >= distance) sum += before;
    }
    if (lane == kThreadsPerWarp - 1) warp_totals[warp] = make_int2(__popc(active), sum);
    __syncthreads();
    int rank = count + __popc(active & ((1u << lane) - 1));
    int entry = entries + sum - own;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int2 total = warp_totals[w];
      if (w < warp) {
        rank += total.x;
        entry += total.y;
      }
      count += total.x;
      entries += total.y;
    }
    if (own > 0 && rank < routing.max_records) records[rank] = {expert, begin, end, entry};
    __syncthreads();
  }
  const Experts experts = end_records(routing, entry_tokens, pairs / entry_tokens, records, count,
                                      entries, thread_index() == 0);
  __syncthreads();
  return experts;
}

}  // namespace flashmoe::moe::sm89_few_tokens
