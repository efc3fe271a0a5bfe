// The first stage on Hopper: a[slot] = act(w_gate x) * (w_up x), for the slots of every expert.
//
// A unit is 8 rows of a gate and of an up (or 16 of one matrix) of an expert, with a few of its
// slots, over all columns. Blocks take units round-robin, so that all are in the same expert or
// two. The warps of a block share a unit's columns. One of them, in turn, adds up their results and
// ends the unit while the others continue.
#pragma once

#include "cuda/moe/sm89_few_tokens/up.cuh"
#include "cuda/moe/sm90_few_tokens/stages.cuh"

namespace flashmoe::moe::sm89_few_tokens::bulk {

// Shared memory of a block: stages, parts, records, tokens.
struct UpMemory {
  unsigned char* base;
  int ring_bytes;
  int records_count;

  // [2][warps][lanes]: the warps' results of a unit, and of the one before
  __device__ __forceinline__ float4* parts() const {
    return reinterpret_cast<float4*>(base + ring_bytes);
  }
  __device__ __forceinline__ Record* records() const {
    return reinterpret_cast<Record*>(parts() + 2 * kConsumerThreads);
  }
  __device__ __forceinline__ int* slot_tokens() const {
    return reinterpret_cast<int*>(records() + records_count + 1);
  }
};

struct PartBarriers {
  uint64_t there[2];  // all warps have left their parts of a unit
  uint64_t read[2];   // one warp has read them
};

struct UpWork {
  const UpParams& params;
  const int* slot_tokens;
  Experts experts;
  int units;

  __device__ __forceinline__ UpWork(const UpParams& p, const int* tokens, const Experts& e)
      : params(p),
        slot_tokens(tokens),
        experts(e),
        units(e.entries * p.schedule.by_units.number()) {}

  __device__ __forceinline__ const uint16_t* token(int slot) const {
    return params.x + slot_tokens[slot] * params.x_stride;
  }
};

// The position of a warp in its block's stages.
struct UpWalk {
  const UpWork& work;
  int index = static_cast<int>(blockIdx.x);  // of the unit
  int at = 0;                                // column
  int record = 0;

  explicit __device__ __forceinline__ UpWalk(const UpWork& w) : work(w) {}

  __device__ __forceinline__ bool done() const { return index >= work.units; }
  __device__ __forceinline__ Unit unit() {
    const Divisor& by_units = work.params.schedule.by_units;
    const int entry = by_units.quotient(index);
    return unit_of(work.experts, entry, record,
                   (index - entry * by_units.number()) * work.params.weights.tile_rows,
                   work.params.schedule.entry_tokens);
  }
  __device__ __forceinline__ int column() const { return at; }
  __device__ __forceinline__ int columns() const {
    return min(work.params.schedule.stage_columns, work.params.weights.columns - at);
  }
  // Returns false if another unit begins.
  __device__ __forceinline__ bool advance() {
    at += work.params.schedule.stage_columns;
    if (at < work.params.weights.columns) return true;
    at = 0;
    index += static_cast<int>(gridDim.x);
    return false;
  }
};

__device__ __forceinline__ void produce_up(const UpWork& work, const Ring& ring) {
  const Schedule& schedule = work.params.schedule;
  Producer<UpWalk> producer = {UpWalk(work), ring};
  producer.begin();
  const int blocks = static_cast<int>(gridDim.x);
  const int units = (work.units - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
  int left = units * schedule.by_unit_stages.number() - schedule.stages;
  if (left <= schedule.trigger_lead) ptx::launch_dependents();
  while (!producer.walk.done()) {
    producer.copy_next();
    if (--left == schedule.trigger_lead) ptx::launch_dependents();
  }
}

template <class Element>
__device__ __forceinline__ void consume_up(const UpWork& work, const Ring& ring, float4* all_parts,
                                           const PartBarriers& barriers, int warp) {
  UpWalk walk(work);
  Consumer<Element> consumer(ring, warp);
  for (int turn = 0; !walk.done(); ++turn) {
    const Unit unit = walk.unit();
    consumer.enter(unit.count);
    float sums[2][4] = {};
    bool same_unit = true;
    while (same_unit) {
      consumer.consume(walk.columns(), sums);
      same_unit = walk.advance();
    }
    const int side = turn % 2;
    const auto parity = static_cast<uint32_t>(turn / 2 % 2);
    float4* const parts = all_parts + side * kConsumerThreads + lane_index();
    if (turn >= 2) ptx::mbarrier_wait(shared_address(barriers.read + side), parity ^ 1);
    parts[warp * kThreadsPerWarp] = make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1],
                                                sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
    ptx::mbarrier_arrive(shared_address(barriers.there + side));
    if (turn % kConsumers != warp) continue;
    ptx::mbarrier_wait(shared_address(barriers.there + side), parity);
    Sums<Tile<Element>> total;
    clear<Tile<Element>>(total);
#pragma unroll
    for (int w = 0; w < kConsumers; ++w) {
      const float4 part = parts[w * kThreadsPerWarp];
      total[0][0][0] += part.x;
      total[0][0][1] += part.y;
      total[0][0][2] += part.z;
      total[0][0][3] += part.w;
    }
    ptx::mbarrier_arrive(shared_address(barriers.read + side));
    finish_unit<Tile<Element>>(work.params, unit, total);
  }
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads, 1)
    moe_up_bulk_kernel(const __grid_constant__ UpParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Barriers barriers;
  __shared__ PartBarriers part_barriers;
  __shared__ int2 found;
  Ring ring(params.schedule, memory, barriers);
  const UpMemory shared = {memory, ring.stages * ring.stage_bytes, params.routing.max_records};
  if (thread_index() == 0) {
    ring.init();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared_address(part_barriers.there + i), kConsumerThreads);
      ptx::mbarrier_init(shared_address(part_barriers.read + i), kThreadsPerWarp);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_dependencies();
  const Routing& routing = params.routing;
  const int warp = warp_index();
  if (warp == kConsumers) {
    const Experts experts =
        find_experts_by_warp(routing, params.schedule.by_entry_tokens, shared.records());
    if (lane_index() == 0) found = make_int2(experts.count, experts.entries);
  } else {
    const int pairs = routing.tokens * routing.top_k;
#pragma unroll 1
    for (int slot = thread_index(); slot < pairs; slot += kConsumerThreads) {
      const int pair = __ldcg(routing.pairs + slot);
      // The results of a slot without a token are not used.
      shared.slot_tokens()[slot] = pair >= 0 && pair < pairs ? pair / routing.top_k : 0;
    }
  }
  __syncthreads();
  const Experts experts = {shared.records(), found.x, found.y};
  const UpWork work(params, shared.slot_tokens(), experts);
  if (warp == kConsumers) {
    produce_up(work, ring);
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kConsumerThreads + thread_index();
       i < params.counter_count; i += static_cast<int>(gridDim.x) * kConsumerThreads) {
    params.counters[i] = 0;
  }
  consume_up<Element>(work, ring, shared.parts(), part_barriers, warp);
}

}  // namespace flashmoe::moe::sm89_few_tokens::bulk
