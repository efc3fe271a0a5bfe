// The second stage: out[token] = sum over its slots of weight * (w_down a[slot] + bias).
//
// A stripe is kStripeRows rows of all experts' w_down, hence columns of out. Its work is a sequence
// of steps over the columns of one entry (an expert and up to kTokens of its slots) after another.
// Stream-K: blocks take equal shares of the steps of all stripes, and the warps of a block equal
// shares of its steps in a stripe. A warp adds its weighted results to its own sums for every
// token. These are added up in the order of warps when a stripe ends, and in the order of blocks if
// several share it: the last block to arrive does that. So the order of additions is fixed, and y
// is never written.
//
// Loads of weights begin before the kernel in front has ended. That kernel waits itself before it
// lets this one start, so data from before it, weights and routing, is ready.
#pragma once

#include "cuda/moe/sm89_few_tokens/up.cuh"

namespace flashmoe::moe::sm89_few_tokens {

struct DownJob {
  struct Position {
    int stripe;
    int entry;
    int step;
    int left;  // steps of this warp in this stripe
    int record;
    __device__ __forceinline__ bool done() const { return left <= 0; }
  };

  const DownParams& params;
  const Experts& experts;
  int steps;         // per entry
  int stripe_steps;  // per stripe
  int first_stripe;  // of the block
  int last_stripe;
  int first_step;  // of the block in its first stripe
  int end_step;    // end of its steps in its last stripe
  int entry_tokens;
  int stripe_rows;
  int warp;

  // A warp's share of a stripe.
  __device__ __forceinline__ Position share(int stripe) const {
    const int begin = stripe == first_stripe ? first_step : 0;
    const int end = stripe == last_stripe ? end_step : stripe_steps;
    const int64_t count = end - begin;
    const int own = begin + static_cast<int>(count * warp / kWarps);
    Position position;
    position.stripe = stripe;
    position.left = begin + static_cast<int>(count * (warp + 1) / kWarps) - own;
    position.entry = own / steps;
    position.step = own % steps;
    position.record = position.left > 0 ? experts.find(position.entry) : 0;
    return position;
  }

  // The first non-empty share, from a stripe on.
  __device__ __forceinline__ Position next_share(int stripe) const {
    Position position = share(stripe);
    while (position.done() && ++stripe <= last_stripe) position = share(stripe);
    return position;
  }
  __device__ __forceinline__ Position first() const { return next_share(first_stripe); }

  __device__ __forceinline__ Unit unit(Position& position) const {
    while (experts.records[position.record + 1].first_entry <= position.entry) ++position.record;
    const Record record = experts.records[position.record];
    Unit unit;
    unit.expert = record.expert;
    unit.slot = record.first_slot + (position.entry - record.first_entry) * entry_tokens;
    unit.count = min(entry_tokens, record.end_slot - unit.slot);
    unit.row = position.stripe * stripe_rows;
    return unit;
  }

  __device__ __forceinline__ const uint16_t* token(int slot) const {
    return params.a + slot * params.a_stride;
  }

  // Returns false if another entry begins, or the share ends.
  __device__ __forceinline__ bool advance_within(Position& position) const {
    --position.left;
    if (++position.step < steps) return position.left > 0;
    position.step = 0;
    ++position.entry;
    return false;
  }
  // The same, but continues with the share of the next stripe.
  __device__ __forceinline__ bool advance(Position& position) const {
    const bool same = advance_within(position);
    if (position.left == 0 && position.stripe < last_stripe) {
      position = next_share(position.stripe + 1);
    }
    return same;
  }
};

// Shared memory of a block.
template <class Traits>
struct DownShared {
  unsigned char* base;
  int pipeline_bytes;
  int records_count;
  int tokens;

  __device__ __forceinline__ uint32_t pipelines() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(base));
  }
  // [warps][tokens][kStripeRows]
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(base + pipeline_bytes);
  }
  __device__ __forceinline__ Record* records() const {
    return reinterpret_cast<Record*>(sums() + kWarps * tokens * Traits::kStripeRows);
  }
  // Token, or -1, and weight of each slot.
  __device__ __forceinline__ int2* slots() const {
    return reinterpret_cast<int2*>(records() + records_count + 1);
  }
};

// Adds a warp's results of a unit to its sums of the tokens.
template <class Traits>
__device__ __forceinline__ void add_unit(const DownParams& params, const Unit& unit, bool with_bias,
                                         const int2* slots, float* token_sums,
                                         const Sums<Traits>& sums) {
  using Element = typename Traits::Element;
  const int lane = lane_index();
  const int g = lane / 4;
  float bias[Traits::kTiles][2] = {};
  if (with_bias && params.bias.data != nullptr) {
#pragma unroll
    for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = unit.row + 16 * m + 8 * h;
        if (row < params.weights.rows) {
          bias[m][h] = load_bias<Element>(params.bias, unit.expert, row + g);
        }
      }
    }
  }
  // A token may have an expert twice, in consecutive slots: then lanes take turns.
  bool twice = false;
  for (int i = lane; i + 1 < unit.count; i += kThreadsPerWarp) {
    twice = twice || slots[unit.slot + i].x == slots[unit.slot + i + 1].x;
  }
  const int turns = __any_sync(kFullWarp, twice) ? 4 : 1;
  for (int turn = 0; turn < turns; ++turn) {
    __syncwarp();
    if (turns > 1 && lane % 4 != turn) continue;
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + 2 * (lane % 4) + e;
        if (column >= unit.count) break;
        const int2 slot = slots[unit.slot + column];
        if (slot.x < 0) continue;
        const float weight = __int_as_float(slot.y);
        float* const cell = token_sums + slot.x * Traits::kStripeRows + g;
#pragma unroll
        for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            cell[16 * m + 8 * h] += weight * (sums[m][n][2 * h + e] + bias[m][h]);
          }
        }
      }
    }
  }
  __syncwarp();
}

// Blocks that have steps: each has at least one.
__device__ __forceinline__ int64_t sharing_blocks(int64_t all_steps) {
  return min(static_cast<int64_t>(gridDim.x), all_steps);
}

template <class Element>
__device__ __forceinline__ void store_out(const DownParams& params, int token, int row,
                                          float2 sum) {
  if (row >= params.weights.rows) return;
  *reinterpret_cast<uint32_t*>(params.out + token * params.out_stride + row) =
      numeric::ElementTraits<Element>::pack(sum.x, sum.y);
}

// Ends a block's part of a stripe: adds up its warps' sums, and those of other blocks.
template <class Traits>
__device__ __forceinline__ void finish_stripe(const DownParams& params, const DownJob& job,
                                              int stripe, float2* sums) {
  using Element = typename Traits::Element;
  __shared__ uint32_t arrived;
  constexpr int kPairs = Traits::kStripeRows / 2;
  const int count = params.routing.tokens * kPairs;
  const int64_t all_steps =
      static_cast<int64_t>(ceil_div<Traits::kStripeRows>(params.weights.rows)) * job.stripe_steps;
  const int64_t first = static_cast<int64_t>(stripe) * job.stripe_steps;
  const int64_t blocks = sharing_blocks(all_steps);
  const bool alone = (stripe != job.first_stripe || job.first_step == 0) &&
                     (stripe != job.last_stripe || job.end_step == job.stripe_steps);
  const int block = static_cast<int>(blockIdx.x);
  float2* const parts = reinterpret_cast<float2*>(params.parts);
  float2* const part =
      parts + static_cast<int64_t>(2 * block + (stripe != job.first_stripe)) * count;
  for (int i = thread_index(); i < count; i += kThreads) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float2 own = sums[warp * count + i];
      sum.x += own.x;
      sum.y += own.y;
      sums[warp * count + i] = make_float2(0.0f, 0.0f);
    }
    if (alone) {
      store_out<Element>(params, i / kPairs, stripe * Traits::kStripeRows + 2 * (i % kPairs), sum);
    } else {
      __stcg(part + i, sum);
    }
  }
  if (alone) return;
  // The block with step s is the last whose share begins at or before it.
  const int first_block = static_cast<int>(((first + 1) * blocks - 1) / all_steps);
  const int last_block = static_cast<int>(((first + job.stripe_steps) * blocks - 1) / all_steps);
  __threadfence();
  __syncthreads();
  if (thread_index() == 0) arrived = atomicAdd(params.counters + stripe, 1u);
  __syncthreads();
  if (arrived != static_cast<uint32_t>(last_block - first_block)) return;
  __threadfence();
  for (int i = thread_index(); i < count; i += kThreads) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int b = first_block; b <= last_block; ++b) {
      const int64_t their_first = all_steps * b / blocks;
      const bool second = their_first / job.stripe_steps != stripe;
      const float2 own = __ldcg(parts + static_cast<int64_t>(2 * b + second) * count + i);
      sum.x += own.x;
      sum.y += own.y;
    }
    store_out<Element>(params, i / kPairs, stripe * Traits::kStripeRows + 2 * (i % kPairs), sum);
  }
}

template <class Traits>
__device__ __forceinline__ void compute_down(const DownParams& params,
                                             const DownShared<Traits>& shared, const DownJob& job) {
  Pipeline<Traits, DownJob> pipeline(params.weights, params.schedule, job, shared.pipelines());
  Walk<Traits, DownJob> again = pipeline.walk;
  pipeline.begin_weights();
  wait_for_previous();
  pipeline.begin_tokens(again);
  let_next_start();

  float* const token_sums =
      shared.sums() + warp_index() * params.routing.tokens * Traits::kStripeRows;
  Sums<Traits> sums;
  for (int stripe = job.first_stripe; stripe <= job.last_stripe; ++stripe) {
    DownJob::Position position = job.share(stripe);
    while (!position.done()) {
      const Unit unit = job.unit(position);
      const bool with_bias = position.step == 0;
      clear<Traits>(sums);
      do {
        pipeline.step(sums, (unit.count + 7) / 8);
      } while (job.advance_within(position));
      add_unit<Traits>(params, unit, with_bias, shared.slots(), token_sums, sums);
    }
    __syncthreads();
    finish_stripe<Traits>(params, job, stripe, reinterpret_cast<float2*>(shared.sums()));
    __syncthreads();
  }
}

// Zeros the rows of tokens without experts, by so many threads of each block.
__device__ __forceinline__ void write_zeros(const DownParams& params, int block_threads) {
  const int64_t units = static_cast<int64_t>(params.routing.tokens) * (params.weights.rows / 8);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * block_threads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * block_threads + thread_index(); i < units;
       i += threads) {
    const int64_t token = i / (params.weights.rows / 8);
    const int64_t unit = i % (params.weights.rows / 8);
    *reinterpret_cast<uint4*>(params.out + token * params.out_stride + 8 * unit) =
        make_uint4(0, 0, 0, 0);
  }
}

// Fills `slots`, by so many threads.
__device__ __forceinline__ void find_slots(const DownParams& params, int2* slots, int threads) {
  const Routing& routing = params.routing;
  const int pairs = routing.tokens * routing.top_k;
  for (int slot = thread_index(); slot < pairs; slot += threads) {
    const int pair = __ldcg(routing.pairs + slot);
    const bool valid = pair >= 0 && pair < pairs;
    const float weight = valid && !params.weight_on_input ? __ldcg(routing.weights + pair) : 1.0f;
    slots[slot] = make_int2(valid ? pair / routing.top_k : -1, __float_as_int(weight));
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 2)
    moe_down_kernel(const __grid_constant__ DownParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Routing& routing = params.routing;
  const DownShared<Traits> shared = {memory, pipeline_bytes<Traits>(params.schedule),
                                     routing.max_records, routing.tokens};
  find_slots(params, shared.slots(), kThreads);
  for (int i = thread_index(); i < kWarps * routing.tokens * Traits::kStripeRows; i += kThreads) {
    shared.sums()[i] = 0.0f;
  }
  const Experts experts = find_experts(routing, params.schedule.entry_tokens, shared.records());
  if (experts.entries == 0) {
    wait_for_previous();
    let_next_start();
    write_zeros(params, kThreads);
    return;
  }
  const int steps = ceil_div<Traits::kStepColumns>(params.weights.columns);
  const int stripe_steps = experts.entries * steps;
  const int64_t all_steps =
      static_cast<int64_t>(ceil_div<Traits::kStripeRows>(params.weights.rows)) * stripe_steps;
  const int64_t blocks = sharing_blocks(all_steps);
  const int64_t block = min(static_cast<int64_t>(blockIdx.x), blocks);
  const int64_t first = all_steps * block / blocks;
  const int64_t end = block < blocks ? all_steps * (block + 1) / blocks : first;
  const int first_stripe = static_cast<int>(first / stripe_steps);
  const int last_stripe = static_cast<int>((end - 1) / stripe_steps);
  const DownJob job = {params,
                       experts,
                       steps,
                       stripe_steps,
                       first_stripe,
                       last_stripe,
                       static_cast<int>(first - static_cast<int64_t>(first_stripe) * stripe_steps),
                       static_cast<int>(end - static_cast<int64_t>(last_stripe) * stripe_steps),
                       params.schedule.entry_tokens,
                       Traits::kStripeRows,
                       warp_index()};
  if (first < end) {
    compute_down<Traits>(params, shared, job);
  } else {
    wait_for_previous();
    let_next_start();
  }
}

}  // namespace flashmoe::moe::sm89_few_tokens
