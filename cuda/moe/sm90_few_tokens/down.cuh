// The second stage on Hopper: out[token] = sum over its slots of weight * (w_down a[slot] + bias).
//
// A stripe is 16 rows of all experts' w_down, hence columns of out. Its work is a sequence of
// stages over the columns of one entry (an expert and a few of its slots) after another. Blocks
// take equal shares of the stages of all stripes. The warps of a block share a stage's columns and
// keep weighted sums of every token in registers. These are added up in the order of warps when a
// stripe ends, and in the order of blocks if several share it: the last block to arrive does that.
// So the order of additions is fixed, and y is never written.
//
// Loads of weights begin before the kernel in front has ended. That kernel waits itself before it
// lets this one start, so data from before it, weights and routing, is ready.
#pragma once

#include "cuda/moe/sm89_few_tokens/down.cuh"
#include "cuda/moe/sm90_few_tokens/stages.cuh"

namespace flashmoe::moe::sm89_few_tokens::bulk {

// Shared memory of a block: stages, sums, records, slots.
struct DownMemory {
  unsigned char* base;
  int ring_bytes;
  int records_count;
  int tokens;

  // [warps][tokens][kRows]
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(base + ring_bytes);
  }
  __device__ __forceinline__ Record* records() const {
    return reinterpret_cast<Record*>(sums() + kConsumers * tokens * kRows);
  }
  // Token, or -1, and weight of each slot.
  __device__ __forceinline__ int2* slots() const {
    return reinterpret_cast<int2*>(records() + records_count + 1);
  }
};

struct DownWork {
  const DownParams& params;
  Experts experts;
  int stripe_stages;
  int64_t stages;  // over all stripes
  int64_t blocks;  // blocks that have stages, at least one each
  int first_stripe;
  int last_stripe;  // before the first one if there is none
  int first_stage;  // of this block, in its first stripe
  int end_stage;    // end of its stages in its last stripe

  __device__ __forceinline__ DownWork(const DownParams& p, const Experts& e)
      : params(p), experts(e) {
    stripe_stages = e.entries * p.schedule.by_unit_stages.number();
    stages = static_cast<int64_t>(p.schedule.by_units.number()) * stripe_stages;
    blocks = min(static_cast<int64_t>(gridDim.x), stages);
    first_stripe = first_stage = end_stage = 0;
    last_stripe = -1;
    if (static_cast<int64_t>(blockIdx.x) >= blocks) return;
    const int64_t first = stages * blockIdx.x / blocks;
    const int64_t end = stages * (blockIdx.x + 1) / blocks;
    first_stripe = static_cast<int>(first / stripe_stages);
    last_stripe = static_cast<int>((end - 1) / stripe_stages);
    first_stage = static_cast<int>(first - static_cast<int64_t>(first_stripe) * stripe_stages);
    end_stage = static_cast<int>(end - static_cast<int64_t>(last_stripe) * stripe_stages);
  }

  // This block's range of a stripe.
  __device__ __forceinline__ int begin(int stripe) const {
    return stripe == first_stripe ? first_stage : 0;
  }
  __device__ __forceinline__ int end(int stripe) const {
    return stripe == last_stripe ? end_stage : stripe_stages;
  }
  __device__ __forceinline__ bool has_all(int stripe) const {
    return begin(stripe) == 0 && end(stripe) == stripe_stages;
  }
  __device__ __forceinline__ const uint16_t* token(int slot) const {
    return params.a + slot * params.a_stride;
  }
};

// The position of a warp in its block's stages.
struct DownWalk {
  const DownWork& work;
  int stripe;
  int stage;  // of the stripe
  int entry;
  int chunk;  // of the unit's columns
  int record;

  explicit __device__ __forceinline__ DownWalk(const DownWork& w) : work(w) {
    enter(work.first_stripe);
  }
  __device__ __forceinline__ void enter(int of_stripe) {
    stripe = of_stripe;
    if (done()) return;
    stage = work.begin(stripe);
    entry = by_unit_stages().quotient(stage);
    chunk = stage - entry * by_unit_stages().number();
    record = work.experts.find(entry);
  }

  __device__ __forceinline__ const Divisor& by_unit_stages() const {
    return work.params.schedule.by_unit_stages;
  }
  __device__ __forceinline__ bool done() const { return stripe > work.last_stripe; }
  __device__ __forceinline__ Unit unit() {
    return unit_of(work.experts, entry, record, stripe * kRows, work.params.schedule.entry_tokens);
  }
  __device__ __forceinline__ int column() const {
    return chunk * work.params.schedule.stage_columns;
  }
  __device__ __forceinline__ int columns() const {
    return min(work.params.schedule.stage_columns, work.params.weights.columns - column());
  }
  // Returns false if another unit begins.
  __device__ __forceinline__ bool advance() {
    if (++stage == work.end(stripe)) {
      enter(stripe + 1);
      return false;
    }
    if (++chunk < by_unit_stages().number()) return true;
    chunk = 0;
    ++entry;
    return false;
  }
};

__device__ __forceinline__ void produce_down(const DownWork& work, const Ring& ring) {
  Producer<DownWalk> producer = {DownWalk(work), ring};
  producer.begin_before([] { ptx::wait_for_dependencies(); });
  ptx::launch_dependents();
  while (!producer.walk.done()) producer.copy_next();
}

// Adds a warp's weighted results of a unit to its sums of tokens. A lane (g, t) has those of rows g
// and g + 8, and of slots, or tokens, 2t and 2t + 1.
__device__ __forceinline__ void add_slots(const Unit& unit, const int2* slots,
                                          const float (&found)[4], float (&sums)[4]) {
  const int t = lane_index() % 4;
#pragma unroll 1
  for (int i = 0; i < unit.count; ++i) {
    const int2 slot = slots[unit.slot + i];
    const int from = lane_index() - t + i / 2;
    const float low = __shfl_sync(kFullWarp, i % 2 == 0 ? found[0] : found[1], from);
    const float high = __shfl_sync(kFullWarp, i % 2 == 0 ? found[2] : found[3], from);
    const float weight = __int_as_float(slot.y);
    if (slot.x == 2 * t) {
      sums[0] = fmaf(weight, low, sums[0]);
      sums[2] = fmaf(weight, high, sums[2]);
    } else if (slot.x == 2 * t + 1) {
      sums[1] = fmaf(weight, low, sums[1]);
      sums[3] = fmaf(weight, high, sums[3]);
    }
  }
}

__device__ __forceinline__ void meet_consumers() {
  ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
}

// Ends a block's part of a stripe: adds up its warps' sums, and those of other blocks.
template <class Element>
__device__ __forceinline__ void end_stripe(const DownWork& work, int stripe, const float2* sums) {
  __shared__ uint32_t arrived;
  constexpr int kPairs = kRows / 2;
  static_assert(kTokens * kPairs <= kConsumerThreads);
  const DownParams& params = work.params;
  const int count = params.routing.tokens * kPairs;
  const int i = thread_index();
  const bool alone = work.has_all(stripe);
  const auto store = [&](float2 sum) {
    store_out<Element>(params, i / kPairs, stripe * kRows + 2 * (i % kPairs), sum);
  };
  // A block shares its first stripe, its last one, or both.
  const auto part_of = [&](int64_t block, bool second) {
    return reinterpret_cast<float2*>(params.parts) + (2 * block + second) * count + i;
  };
  if (i < count) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < kConsumers; ++warp) {
      const float2 own = sums[warp * count + i];
      sum.x += own.x;
      sum.y += own.y;
    }
    if (alone) {
      store(sum);
    } else {
      __stcg(part_of(blockIdx.x, stripe != work.first_stripe), sum);
    }
  }
  if (alone) return;
  // The block with stage s is the last whose share begins at or before it.
  const int64_t first = static_cast<int64_t>(stripe) * work.stripe_stages;
  const int64_t first_block = ((first + 1) * work.blocks - 1) / work.stages;
  const int64_t last_block = ((first + work.stripe_stages) * work.blocks - 1) / work.stages;
  __threadfence();
  meet_consumers();
  if (i == 0) arrived = atomicAdd(params.counters + stripe, 1u);
  meet_consumers();
  if (arrived != static_cast<uint32_t>(last_block - first_block)) return;
  __threadfence();
  if (i >= count) return;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int64_t block = first_block; block <= last_block; ++block) {
    const bool second = work.stages * block / work.blocks / work.stripe_stages != stripe;
    const float2 own = __ldcg(part_of(block, second));
    sum.x += own.x;
    sum.y += own.y;
  }
  store(sum);
}

template <class Element>
__device__ __forceinline__ void consume_down(const DownWork& work, const Ring& ring,
                                             const DownMemory& shared, int warp) {
  const DownParams& params = work.params;
  const int tokens = params.routing.tokens;
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  DownWalk walk(work);
  Consumer<Element> consumer(ring, warp);
  while (!walk.done()) {
    const int stripe = walk.stripe;
    float sums[4] = {};
    while (walk.stripe == stripe) {
      const Unit unit = walk.unit();
      // One warp adds the bias, with an entry's first columns.
      float bias[2] = {0.0f, 0.0f};
      const bool adds_bias = params.bias.data != nullptr && warp == 0 && walk.chunk == 0;
      if (adds_bias) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = unit.row + 8 * h;
          if (row < params.weights.rows) {
            bias[h] = load_bias<Element>(params.bias, unit.expert, row + g);
          }
        }
      }
      consumer.enter(unit.count);
      float found[2][4] = {};
      bool same_unit = true;
      while (same_unit) {
        consumer.consume(walk.columns(), found);
        same_unit = walk.advance();
      }
      if (!consumer.took && !adds_bias) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) found[0][e] += found[1][e] + bias[e / 2];
      add_slots(unit, shared.slots(), found[0], sums);
    }
    float* const own = shared.sums() + warp * tokens * kRows;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 2 * t + e % 2;
      if (token < tokens) own[token * kRows + g + e / 2 * 8] = sums[e];
    }
    meet_consumers();
    end_stripe<Element>(work, stripe, reinterpret_cast<const float2*>(shared.sums()));
    meet_consumers();
  }
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads, 1)
    moe_down_bulk_kernel(const __grid_constant__ DownParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Barriers barriers;
  __shared__ int2 found;
  const Routing& routing = params.routing;
  Ring ring(params.schedule, memory, barriers);
  const DownMemory shared = {memory, ring.stages * ring.stage_bytes, routing.max_records,
                             routing.tokens};
  if (thread_index() == 0) {
    ring.init();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp == kConsumers) {
    const Experts experts =
        find_experts_by_warp(routing, params.schedule.by_entry_tokens, shared.records());
    if (lane_index() == 0) found = make_int2(experts.count, experts.entries);
    __syncwarp();
    ptx::named_barrier_arrive(kSlotsBarrier, kBlockThreads);
    produce_down(DownWork(params, experts), ring);
    return;
  }
  find_slots(params, shared.slots(), kConsumerThreads);
  ptx::named_barrier_sync(kSlotsBarrier, kBlockThreads);
  ptx::wait_for_dependencies();
  const Experts experts = {shared.records(), found.x, found.y};
  if (experts.entries == 0) {
    write_zeros(params, kConsumerThreads);
    return;
  }
  consume_down<Element>(DownWork(params, experts), ring, shared, warp);
}

}  // namespace flashmoe::moe::sm89_few_tokens::bulk
