// The second launch of routing: turns ranks within the blocks of the first launch into slots.
#pragma once

#include "cuda/moe/route/route.cuh"

namespace flashmoe::moe_route {

inline constexpr int kMostParts = 32;  // of the histograms' rows, added up in parallel

// Shared memory: first the parts' sums over all rows of the histograms, and over those before this
// block's; then this block's pairs in the order of their slots, if they fit.
struct PartialSums {
  int4 all[kPlaceThreads];     // [parts, quads of experts]
  int4 before[kPlaceThreads];  // same
};

inline constexpr int kSortedPairs = 4 * kPlaceThreads;

struct SortedPairs {
  int32_t slots[kSortedPairs];
  int32_t pairs[kSortedPairs];
};

union PlaceShared {
  PartialSums sums;
  SortedPairs sorted;
};

// Adds up the histograms: a thread takes four experts in every parts-th block.
__device__ __forceinline__ void add_histograms(const Params& params, PartialSums& sums, int quads,
                                               int parts) {
  const int part = thread_index() / quads;
  if (part >= parts) return;
  const int quad = thread_index() - part * quads;
  const int blocks = static_cast<int>(gridDim.x);
  const auto* histograms = reinterpret_cast<const int4*>(params.histograms) + quad;
  int4 all = make_int4(0, 0, 0, 0);
  int4 before = all;
#pragma unroll 8
  for (int row = part; row < blocks; row += parts) {
    const int4 counts = histograms[int64_t{quads} * row];
    const int earlier = row < static_cast<int>(blockIdx.x) ? -1 : 0;
    all.x += counts.x;
    all.y += counts.y;
    all.z += counts.z;
    all.w += counts.w;
    before.x += counts.x & earlier;
    before.y += counts.y & earlier;
    before.z += counts.z & earlier;
    before.w += counts.w & earlier;
  }
  sums.all[thread_index()] = all;
  sums.before[thread_index()] = before;
}

// The sums of this thread's expert: there are no more experts than threads.
struct ExpertSums {
  int all;     // pairs of all blocks
  int before;  // pairs of earlier blocks
};

__device__ __forceinline__ ExpertSums sums_of_expert(const Params& params, const PartialSums& sums,
                                                     int parts) {
  ExpertSums result = {0, 0};
  const int expert = thread_index();
  if (expert >= params.experts) return result;
  const auto* all = reinterpret_cast<const int32_t*>(sums.all) + expert;
  const auto* before = reinterpret_cast<const int32_t*>(sums.before) + expert;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) {
    result.all += all[part * params.histogram_stride];
    result.before += before[part * params.histogram_stride];
  }
  return result;
}

__global__ void __launch_bounds__(kPlaceThreads, 1)
    route_place_kernel(const __grid_constant__ Params params) {
  __shared__ PlaceShared shared;
  __shared__ int2 begins[kLastExpert + 1];  // of an expert's pairs here: first slot, place in order
  __shared__ int used;                      // pairs with an expert, of all blocks
  __shared__ int own;                       // the same, of this block
  begin_after_dependencies();
  const Tokens tokens = Tokens::of_block(params);
  const int quads = params.histogram_stride / kHistogramColumns;
  const int parts = min(kMostParts, thread_count() / quads);

  // The loads of this block's first pairs are in flight while histograms are added up.
  constexpr int kEarly = 2;
  const int first = tokens.first * params.top_k;
  const int end = tokens.end * params.top_k;
  const int mine = first + thread_index();
  int experts[kEarly];
  int ranks[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int pair = mine + i * thread_count();
    experts[i] = pair < end ? params.ids[pair] : -1;
    ranks[i] = pair < end ? params.slots[pair] : -1;
  }
  const int expert = thread_index();
  const int pairs_here =
      expert < params.experts
          ? params.histograms[int64_t{params.histogram_stride} * blockIdx.x + expert]
          : 0;
  add_histograms(params, shared.sums, quads, parts);
  __syncthreads();
  const ExpertSums sums = sums_of_expert(params, shared.sums, parts);
  int begin[2] = {sums.all, pairs_here};
  exclusive_block_sums(begin);
  if (expert < params.experts) {
    begins[expert] = make_int2(begin[0] + sums.before, begin[1]);
    if (blockIdx.x == 0) params.offsets[expert] = begin[0];
    if (expert == params.experts - 1) {
      used = begin[0] + sums.all;
      own = begin[1] + pairs_here;
    }
  }
  __syncthreads();
  if (blockIdx.x == 0 && thread_index() == 0) params.offsets[params.experts] = used;

  const bool sorts = end - first <= kSortedPairs;
  const auto put = [&](int pair, int of_expert, int rank) {
    if (of_expert < 0) return;
    const int2 begin = begins[of_expert];
    const int slot = begin.x + rank;
    params.slots[pair] = slot;
    if (sorts) {
      shared.sorted.slots[begin.y + rank] = slot;
      shared.sorted.pairs[begin.y + rank] = pair;
    } else {
      params.pairs[slot] = pair;
    }
  };
#pragma unroll
  for (int i = 0; i < kEarly; ++i) put(mine + i * thread_count(), experts[i], ranks[i]);
#pragma unroll 4
  for (int pair = mine + kEarly * thread_count(); pair < end; pair += thread_count()) {
    put(pair, params.ids[pair], params.slots[pair]);
  }
  if (sorts) {
    // Neighbours in this order mostly have neighbouring slots, and are stored together.
    __syncthreads();
    for (int i = thread_index(); i < own; i += thread_count()) {
      params.pairs[shared.sorted.slots[i]] = shared.sorted.pairs[i];
    }
  }
  clear_rest(params, used, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

static_assert(kPlaceThreads > static_cast<int>(kLastExpert));

}  // namespace flashmoe::moe_route
