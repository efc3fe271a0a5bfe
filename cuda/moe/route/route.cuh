// Routing: the experts of each token, and the order of all pairs by expert.
//
//   logits [T, E], or given ids
//     ->  ids, weights [T, K], offsets [E + 1], pairs [T * K], slots [T, K]
//
// The order is a counting sort, stable without atomics. Tokens are split among blocks, and those of
// a block among its warps, in order. A warp takes its tokens one by one and counts the pairs of
// each expert in shared memory. So it knows each pair's rank among its own. The slot of a pair is
// then
//
//   offset of the expert + its pairs in earlier blocks + in earlier warps + rank in the warp
//
// With few tokens there is one launch of one block, or of a cluster whose blocks exchange their
// counts (route_once_kernel). With more, the first launch leaves ranks within the block and the
// block's counts in global memory (route_choose_kernel). In the second launch each block adds up
// all counts, a matrix with as many rows as the GPU has multiprocessors, and finishes the slots of
// its own pairs (route_place_kernel).
#pragma once

#include "cuda/moe/route/choose.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe_route {

// Tokens from `first` to before `end`.
struct Tokens {
  int first;
  int end;

  static __device__ __forceinline__ Tokens of_block(const Params& params) {
    // 64 bits, because there may be blocks past the last token.
    const int64_t first = int64_t{params.block_tokens} * blockIdx.x;
    const int64_t end = first + params.block_tokens;
    const int64_t all = params.tokens;
    return {static_cast<int>(first < all ? first : all), static_cast<int>(end < all ? end : all)};
  }
  __device__ __forceinline__ Tokens of_warp(const Params& params, int warp) const {
    const int begin = min(end, first + warp * params.warp_tokens);
    return {begin, min(end, begin + params.warp_tokens)};
  }
};

// Dynamic shared memory of route_once_kernel and route_choose_kernel, in words.
struct Shared {
  uint32_t*
      list;  // [block_tokens, top_k], if it is kept: rank in the warp and expert, or kNoExpert
  int32_t* counts;    // [warps, experts]: pairs of a warp; then of the warps before it
  int32_t* exchange;  // once: [cluster, experts]: pairs of the cluster's blocks
  int32_t* base;      // once: [experts]: first slot of this block's pairs
  uint32_t* scratch;  // [warps, scratch_words]

  // Words of the list: a multiple of 4, because 4 are read at a time.
  static __host__ __device__ int list_words(int block_tokens, int top_k) {
    return (block_tokens * top_k + 3) / 4 * 4;
  }

  template <class Chooser, bool kOnce>
  static int bytes(const SharedShape& s) {
    const int of_warp = s.experts + Chooser::scratch_words(s.experts, s.num_groups);
    const int list = s.keeps_list ? list_words(s.block_tokens, s.top_k) : 0;
    return 4 * (list + s.warps * of_warp + (kOnce ? (s.cluster + 1) * s.experts : 0));
  }

  template <bool kOnce>
  static __device__ __forceinline__ Shared in(int32_t* memory, const Params& params) {
    Shared shared = {};
    shared.list = reinterpret_cast<uint32_t*>(memory);
    if (params.keeps_list) memory += list_words(params.block_tokens, params.top_k);
    shared.counts = memory;
    memory += warp_count() * params.experts;
    if constexpr (kOnce) {
      shared.exchange = memory;
      memory += params.cluster * params.experts;
      shared.base = memory;
      memory += params.experts;
    }
    shared.scratch = reinterpret_cast<uint32_t*>(memory);
    return shared;
  }
};

inline constexpr uint32_t kExpertBits = 10;
inline constexpr uint32_t kNoExpert = 0xffffffffu;

// The list's entry of a pair.
__device__ __forceinline__ uint32_t list_entry(int expert, int rank) {
  if (expert < 0) return kNoExpert;
  return static_cast<uint32_t>(rank) << kExpertBits | static_cast<uint32_t>(expert);
}

// The rank of a lane's pair among the warp's pairs of its expert. Pairs of a step are ordered by
// lane. `distinct`: no two lanes have the same expert.
__device__ __forceinline__ int count_pair(int32_t* counts, int expert, bool distinct) {
  int rank = 0;
  if (distinct) {
    if (expert >= 0) {
      rank = counts[expert];
      counts[expert] = rank + 1;
    }
  } else {
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    const uint32_t before = same & ((1u << lane_index()) - 1);
    if (expert >= 0) rank = counts[expert] + __popc(before);
    __syncwarp();
    if (expert >= 0 && same >> lane_index() == 1) counts[expert] = rank + 1;
  }
  __syncwarp();
  return rank;
}

// Chooses for all tokens of this warp: ids, weights, lse. All lanes together call put(pair, expert,
// distinct), with a negative pair in lanes without one.
template <bool kMany, class Chooser, class Put>
__device__ __forceinline__ void choose_tokens(const Params& params, const Tokens& tokens,
                                              uint32_t* scratch, Put put) {
  Chooser chooser(params, scratch);
  chooser.template choose<kMany>(tokens.first, tokens.end,
                                 [&](const Choice& choice, bool distinct) {
                                   int pair = -1;
                                   if (choice.token >= 0) {
                                     pair = choice.token * params.top_k + choice.k;
                                     params.ids[pair] = choice.expert;
                                     params.weights[pair] = choice.weight;
                                   }
                                   put(pair, pair < 0 ? -1 : choice.expert, distinct);
                                 });
}

// Replaces counts[warp][expert] by the counts of earlier warps. Returns the sum over all warps.
__device__ __forceinline__ int sum_over_warps(int32_t* counts, int experts, int warps, int expert) {
  int sum = 0;
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    const int count = counts[warp * experts + expert];
    counts[warp * experts + expert] = sum;
    sum += count;
  }
  return sum;
}

// Inclusive sums over the threads of a warp, of several values at once.
template <int kValues>
__device__ __forceinline__ void inclusive_warp_sums(int (&values)[kValues]) {
#pragma unroll
  for (int step = 1; step < kThreadsPerWarp; step *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int below = __shfl_up_sync(kFullWarp, values[i], step);
      if (lane_index() >= step) values[i] += below;
    }
  }
}

// Sums of the values of earlier threads. All threads of the block call it, once.
template <int kValues>
__device__ __forceinline__ void exclusive_block_sums(int (&values)[kValues]) {
  __shared__ int of_warps[kThreadsPerWarp][kValues];
  const int warp = warp_index();
  int inclusive[kValues];
  int others[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) inclusive[i] = values[i];
  inclusive_warp_sums(inclusive);
  if (lane_index() == kThreadsPerWarp - 1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) of_warps[warp][i] = inclusive[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    others[i] = lane_index() < warp_count() ? of_warps[lane_index()][i] : 0;
  }
  inclusive_warp_sums(others);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int before = __shfl_sync(kFullWarp, others[i], max(0, warp - 1));
    values[i] = (warp == 0 ? 0 : before) + inclusive[i] - values[i];
  }
}

// Scans total(expert), the pairs of an expert in all blocks, and calls begin(expert, offset) in the
// thread that called that total. A thread has `thread_experts` experts. Returns the number of pairs
// with an expert. All threads of the block call it.
template <class Total, class Begin>
__device__ __forceinline__ int scan_experts(int experts, int thread_experts, Total total,
                                            Begin begin) {
  __shared__ int all;
  const int first = min(experts, thread_index() * thread_experts);
  const int end = min(experts, first + thread_experts);
  int sums[1] = {0};
  for (int expert = first; expert < end; ++expert) sums[0] += total(expert);
  exclusive_block_sums(sums);
  int offset = sums[0];
  for (int expert = first; expert < end; ++expert) offset += begin(expert, offset);
  if (first < end && end == experts) all = offset;
  __syncthreads();
  return all;
}

// Clears the pairs after the last one with an expert.
__device__ __forceinline__ void clear_rest(const Params& params, int used, int block, int blocks) {
  const int64_t pairs = int64_t{params.tokens} * params.top_k;
  const int64_t step = int64_t{blocks} * thread_count();
  for (int64_t i = used + int64_t{block} * thread_count() + thread_index(); i < pairs; i += step) {
    params.pairs[i] = -1;
  }
}

__device__ __forceinline__ void clear_counts(const Params& params, int32_t* counts) {
  for (int i = lane_index(); i < params.experts; i += kThreadsPerWarp) counts[i] = 0;
  __syncwarp();
}

__device__ __forceinline__ void begin_after_dependencies() {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
}

// The list's entry of a pair if pairs are few. No two are equal, and they are in the order of
// slots. Pairs without an expert come after all others.
__device__ __forceinline__ uint32_t few_entry(int expert, int pair) {
  static_assert(kMaxFewPairs <= 1 << kExpertBits);
  const uint32_t first =
      expert < 0 ? 1u << (2 * kExpertBits) : static_cast<uint32_t>(expert) << kExpertBits;
  return first + static_cast<uint32_t>(pair);
}

// Orders few pairs. Each is compared with all; so is the first possible pair of each expert, for
// its offset.
__device__ __forceinline__ void place_few(const Params& params, const Shared& shared) {
  const int pairs = params.tokens * params.top_k;
  const int quads = Shared::list_words(params.tokens, params.top_k) / 4;
  const auto* list = reinterpret_cast<const uint4*>(shared.list);
  for (int i = thread_index(); i <= pairs + params.experts; i += thread_count()) {
    const int expert =
        i - pairs;  // up to the number of experts, whose offset is the end; or a pair
    const uint32_t mine = expert < 0                ? shared.list[i]
                          : expert < params.experts ? few_entry(expert, 0)
                                                    : few_entry(-1, 0);
    int before = 0;
#pragma unroll 4
    for (int q = 0; q < quads; ++q) {
      const uint4 others = list[q];
      before += (others.x < mine ? 1 : 0) + (others.y < mine ? 1 : 0) + (others.z < mine ? 1 : 0) +
                (others.w < mine ? 1 : 0);
    }
    if (expert >= 0) {
      params.offsets[expert] = before;
    } else {
      const bool present = mine < few_entry(-1, 0);
      params.slots[i] = present ? before : -1;
      params.pairs[before] = present ? i : -1;
    }
  }
}

// Sends this block's counts to every block of the cluster.
__device__ __forceinline__ void exchange_counts(const Params& params, const Shared& shared,
                                                int rank) {
  for (int expert = thread_index(); expert < params.experts; expert += thread_count()) {
    const int sum = sum_over_warps(shared.counts, params.experts, params.used_warps, expert);
    int32_t* mine = shared.exchange + rank * params.experts + expert;
    if (params.cluster == 1) {
      *mine = sum;
      continue;
    }
#if __CUDA_ARCH__ >= 900
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    for (int other = 0; other < params.cluster; ++other) {
      ptx::store_to_rank(ptx::map_to_rank(address, static_cast<uint32_t>(other)), sum);
    }
#endif
  }
}

// Turns the counts of each expert, from all blocks of the cluster, into the offsets and into the
// first slots of this block's pairs. Returns the number of pairs with an expert.
__device__ __forceinline__ int scan_exchanged(const Params& params, const Shared& shared,
                                              int rank) {
  const auto total = [&](int expert) {
    int sum = 0;
#pragma unroll 4
    for (int r = 0; r < params.cluster; ++r) sum += shared.exchange[r * params.experts + expert];
    return sum;
  };
  return scan_experts(params.experts, params.thread_experts, total, [&](int expert, int offset) {
    int before = offset;
    int all = 0;
#pragma unroll 4
    for (int r = 0; r < params.cluster; ++r) {
      const int count = shared.exchange[r * params.experts + expert];
      if (r < rank) before += count;
      all += count;
    }
    shared.base[expert] = before;
    if (rank == 0) params.offsets[expert] = offset;
    return all;
  });
}

template <class Chooser>
__global__ void __launch_bounds__(Chooser::kThreads, 1)
    route_once_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) int32_t memory[];
  const Shared shared = Shared::in<true>(memory, params);
  const int rank = static_cast<int>(blockIdx.x);
  const int warp = warp_index();
  const Tokens block = Tokens::of_block(params);
  const Tokens tokens = block.of_warp(params, warp);
  const int first_pair = block.first * params.top_k;
  uint32_t* scratch = shared.scratch + warp * params.scratch_words;
  int32_t* counts = shared.counts + warp * params.experts;
  if (params.few) {
    const int behind = params.tokens * params.top_k + thread_index();
    if (behind < Shared::list_words(params.tokens, params.top_k)) shared.list[behind] = kNoExpert;
    begin_after_dependencies();
    choose_tokens<false, Chooser>(params, tokens, scratch, [&](int pair, int expert, bool) {
      if (pair >= 0) shared.list[pair] = few_entry(expert, pair);
    });
    __syncthreads();
    place_few(params, shared);
    return;
  }
  clear_counts(params, counts);
#if __CUDA_ARCH__ >= 900
  if (params.cluster > 1) ptx::cluster_arrive_relaxed();
#endif
  begin_after_dependencies();
  choose_tokens<false, Chooser>(params, tokens, scratch, [&](int pair, int expert, bool distinct) {
    const int pair_rank = count_pair(counts, expert, distinct);
    if (pair >= 0) shared.list[pair - first_pair] = list_entry(expert, pair_rank);
  });
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (params.cluster > 1) ptx::cluster_wait();  // the other blocks have begun
#endif
  exchange_counts(params, shared, rank);
#if __CUDA_ARCH__ >= 900
  if (params.cluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
  if (params.cluster == 1) __syncthreads();
  const int used = scan_exchanged(params, shared, rank);
  if (rank == 0 && thread_index() == 0) params.offsets[params.experts] = used;
  for (int pair = tokens.first * params.top_k + lane_index(); pair < tokens.end * params.top_k;
       pair += kThreadsPerWarp) {
    const uint32_t entry = shared.list[pair - first_pair];
    int slot = -1;
    if (entry != kNoExpert) {
      const uint32_t expert = entry & ((1u << kExpertBits) - 1);
      slot = shared.base[expert] + counts[expert] + static_cast<int>(entry >> kExpertBits);
      params.pairs[slot] = pair;
    }
    params.slots[pair] = slot;
  }
  clear_rest(params, used, rank, params.cluster);
}

// The first of two launches: slots hold ranks within the block.
template <class Chooser>
__global__ void __launch_bounds__(Chooser::kThreads, 1)
    route_choose_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) int32_t memory[];
  const Shared shared = Shared::in<false>(memory, params);
  const int warp = warp_index();
  const Tokens block = Tokens::of_block(params);
  const Tokens tokens = block.of_warp(params, warp);
  const int first_pair = block.first * params.top_k;
  int32_t* counts = shared.counts + warp * params.experts;
  clear_counts(params, counts);
  begin_after_dependencies();
  choose_tokens<true, Chooser>(params, tokens, shared.scratch + warp * params.scratch_words,
                               [&](int pair, int expert, bool distinct) {
                                 const int rank = count_pair(counts, expert, distinct);
                                 if (pair < 0) return;
                                 if (params.keeps_list) {
                                   shared.list[pair - first_pair] = list_entry(expert, rank);
                                 } else {
                                   params.slots[pair] = expert < 0 ? -1 : rank;
                                 }
                               });
  __syncthreads();
  int32_t* histogram = params.histograms + int64_t{params.histogram_stride} * blockIdx.x;
  for (int expert = thread_index(); expert < params.histogram_stride; expert += thread_count()) {
    histogram[expert] = expert < params.experts ? sum_over_warps(shared.counts, params.experts,
                                                                 params.used_warps, expert)
                                                : 0;
  }
  __syncthreads();
  for (int pair = tokens.first * params.top_k + lane_index(); pair < tokens.end * params.top_k;
       pair += kThreadsPerWarp) {
    if (params.keeps_list) {
      const uint32_t entry = shared.list[pair - first_pair];
      const uint32_t expert = entry & ((1u << kExpertBits) - 1);
      params.slots[pair] =
          entry == kNoExpert ? -1 : counts[expert] + static_cast<int>(entry >> kExpertBits);
    } else {
      const int expert = params.ids[pair];
      if (expert >= 0) params.slots[pair] += counts[expert];
    }
  }
}

}  // namespace flashmoe::moe_route
