// The first grouped GEMM: a[slot] = act(w_gate x) * (w_up x), for the slots of every expert.
//
// A unit is the rows of kTiles products of one expert and up to kTokens of its slots, over all
// columns. Blocks take equal shares of all units, and the warps of a block equal shares of the
// steps of its units, even if a share ends within a unit: so all load equally much. If a warp's
// share ends within a unit, it adds the later warps' results of that unit to its sums, after the
// single synchronisation of the block.
#pragma once

#include "cuda/moe/sm89_few_tokens/pipeline.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/tile/activation.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe::sm89_few_tokens {

struct UpJob {
  struct Position {
    int unit;
    int step;
    int left;  // steps of this warp
    int record;
    __device__ __forceinline__ bool done() const { return left <= 0; }
  };

  const UpParams& params;
  const Experts& experts;
  const int* slot_tokens;  // -1: no token
  int tiles;               // units per entry
  int steps;               // per unit
  int first_unit;          // of the block
  int block_steps;
  int entry_tokens;
  int unit_rows;
  int warp;

  __device__ __forceinline__ int first_step(int of_warp) const {
    return static_cast<int>(static_cast<int64_t>(block_steps) * of_warp / kWarps);
  }

  __device__ __forceinline__ Position first() const {
    const int begin = first_step(warp);
    Position position;
    position.unit = first_unit + begin / steps;
    position.step = begin % steps;
    position.left = first_step(warp + 1) - begin;
    position.record = position.left > 0 ? experts.find(position.unit / tiles) : 0;
    return position;
  }

  __device__ __forceinline__ Unit unit(Position& position) const {
    const int entry = position.unit / tiles;
    while (experts.records[position.record + 1].first_entry <= entry) ++position.record;
    const Record record = experts.records[position.record];
    Unit unit;
    unit.expert = record.expert;
    unit.slot = record.first_slot + (entry - record.first_entry) * entry_tokens;
    unit.count = min(entry_tokens, record.end_slot - unit.slot);
    unit.row = (position.unit - entry * tiles) * unit_rows;
    return unit;
  }

  __device__ __forceinline__ const uint16_t* token(int slot) const {
    const int token = slot_tokens[slot];
    return token < 0 ? nullptr : params.x + token * params.x_stride;
  }

  // Returns false if another unit begins.
  __device__ __forceinline__ bool advance(Position& position) const {
    --position.left;
    if (++position.step < steps) return true;
    position.step = 0;
    ++position.unit;
    return false;
  }
};

// Writes pairs of columns from `column` on for the slots of one block of tokens. This lane has
// those of row lane / 4 and tokens 2 (lane % 4) and the next.
template <class Element>
__device__ __forceinline__ void store_rows(uint16_t* rows, int64_t stride, int count, int column,
                                           float even, float odd) {
  const uint32_t pair = ptx::transpose_8x8(numeric::ElementTraits<Element>::pack(even, odd));
  const int token = lane_index() / 4;
  if (token < count) {
    *reinterpret_cast<uint32_t*>(rows + token * stride + column + 2 * (lane_index() % 4)) = pair;
  }
}

// Ends a unit: bias, values for the backward pass, activation, a.
template <class Traits>
__device__ __forceinline__ void finish_unit(const UpParams& params, const Unit& unit,
                                            const Sums<Traits>& sums) {
  using Element = typename Traits::Element;
  const Weights& weights = params.weights;
  const int g = lane_index() / 4;
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
    const int row = unit.row + m * weights.tile_rows;
    if (row >= weights.rows) break;
    const bool second = row + weights.half_rows < weights.rows;
    float bias[2] = {0.0f, 0.0f};
    if (params.bias[0].data != nullptr) {
      bias[0] = load_bias<Element>(params.bias[0], unit.expert, row + g);
    }
    if (params.bias[1].data != nullptr && second) {
      bias[1] = load_bias<Element>(params.bias[1], unit.expert, row + weights.half_rows + g);
    }
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
      if (8 * n >= unit.count) break;
      const int slot = unit.slot + 8 * n;
      const int count = unit.count - 8 * n;
      float z[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float factor = 1.0f;
        if (params.weight_on_input) {
          const int token = 2 * (lane_index() % 4) + e;
          const int pair = token < count ? params.routing.pairs[slot + token] : -1;
          if (pair >= 0 && pair < params.routing.tokens * params.routing.top_k) {
            factor = params.routing.weights[pair];
          }
        }
        z[e] = fmaf(sums[m][n][e], factor, bias[0]);
        z[2 + e] = fmaf(sums[m][n][2 + e], factor, bias[1]);
      }
      if (params.pre_activation != nullptr) {
        uint16_t* const rows = params.pre_activation + slot * params.pre_activation_stride;
        store_rows<Element>(rows, params.pre_activation_stride, count, row, z[0], z[1]);
        const int column = params.gated ? weights.rows + row : row + weights.half_rows;
        if (second) {
          store_rows<Element>(rows, params.pre_activation_stride, count, column, z[2], z[3]);
        }
      }
      uint16_t* const rows = params.a + slot * params.a_stride;
      if (params.gated) {
        float gate[2] = {cut_above(z[0], params.limit), cut_above(z[1], params.limit)};
        activate(gate, params.activation, params.alpha);
        store_rows<Element>(rows, params.a_stride, count, row,
                            gate[0] * (cut(z[2], params.limit) + params.up_offset),
                            gate[1] * (cut(z[3], params.limit) + params.up_offset));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) z[e] = cut(z[e], params.limit);
        activate(z, params.activation, params.alpha);
        store_rows<Element>(rows, params.a_stride, count, row, z[0], z[1]);
        if (second) {
          store_rows<Element>(rows, params.a_stride, count, row + weights.half_rows, z[2], z[3]);
        }
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ int pipeline_bytes(const Schedule& schedule) {
  return kWarps * schedule.stages * Traits::stage_bytes(schedule.entry_tokens);
}

// Shared memory of a block.
template <class Traits>
struct UpShared {
  unsigned char* base;
  int pipeline_bytes;
  int records_count;

  __device__ __forceinline__ uint32_t pipelines() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(base));
  }
  // [warps][sums][lanes]: a warp's results of a unit that an earlier warp has begun
  __device__ __forceinline__ float* heads() const {
    return reinterpret_cast<float*>(base + pipeline_bytes);
  }
  __device__ __forceinline__ Record* records() const {
    return reinterpret_cast<Record*>(base + pipeline_bytes + kWarps * Traits::kHeadBytes);
  }
  __device__ __forceinline__ int* slot_tokens() const {
    return reinterpret_cast<int*>(records() + records_count + 1);
  }
};

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  ptx::launch_dependents();
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
#endif
}

template <class Traits>
__device__ __forceinline__ void exchange_head(Sums<Traits>& sums, float* heads, int warp,
                                              bool leave) {
  float* const head = heads + warp * Traits::kSums * kThreadsPerWarp + lane_index();
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kTokenBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& cell = head[((m * Traits::kTokenBlocks + n) * 4 + e) * kThreadsPerWarp];
        if (leave) {
          cell = sums[m][n][e];
        } else {
          sums[m][n][e] += cell;
        }
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void compute_up(const UpParams& params, const UpShared<Traits>& shared,
                                           const UpJob& job) {
  Pipeline<Traits, UpJob> pipeline(params.weights, params.schedule, job, shared.pipelines());
  pipeline.begin();
  const int lead = params.schedule.trigger_lead;
  if (pipeline.walk.position.left <= lead) let_next_start();

  Sums<Traits> sums;
  clear<Traits>(sums);
  UpJob::Position position = job.first();
  const bool any = !position.done();
  bool whole = position.step == 0;
  Unit unit = {};
  if (any) unit = job.unit(position);
  bool pending = false;
  while (true) {
    bool ended = pending;
    if (!position.done()) {
      pipeline.step(sums, (unit.count + 7) / 8);
      if (pipeline.walk.position.left == lead) let_next_start();
      ended = !job.advance(position);
      if (!ended && !position.done()) continue;
    }
    if (ended && !whole) {
      exchange_head<Traits>(sums, shared.heads(), job.warp, true);
    } else if (ended) {
      finish_unit<Traits>(params, unit, sums);
    }
    if (pending) break;
    if (!position.done()) {
      clear<Traits>(sums);
      whole = true;
      unit = job.unit(position);
      continue;
    }
    // If this warp's last unit has not ended, the later warps continue it.
    pending = any && !ended && whole;
    if (any && !ended && !whole) {
      exchange_head<Traits>(sums, shared.heads(), job.warp, true);
    }
    __syncthreads();
    if (!pending) break;
    int missing = job.steps - position.step;
    for (int warp = job.warp + 1; missing > 0; ++warp) {
      const int found = job.first_step(warp + 1) - job.first_step(warp);
      if (found > 0) exchange_head<Traits>(sums, shared.heads(), warp, false);
      missing -= found;
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 2)
    moe_up_kernel(const __grid_constant__ UpParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  const UpShared<Traits> shared = {memory, pipeline_bytes<Traits>(params.schedule),
                                   params.routing.max_records};
  wait_for_previous();
  const Routing& routing = params.routing;
  const int pairs = routing.tokens * routing.top_k;
  for (int slot = thread_index(); slot < pairs; slot += kThreads) {
    const int pair = __ldcg(routing.pairs + slot);
    shared.slot_tokens()[slot] = pair >= 0 && pair < pairs ? pair / routing.top_k : -1;
  }
  const Experts experts = find_experts(routing, params.schedule.entry_tokens, shared.records());
  const int blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x);
  for (int i = block * kThreads + thread_index(); i < params.counter_count;
       i += blocks * kThreads) {
    params.counters[i] = 0;
  }
  const int unit_rows = params.weights.tile_rows * Traits::kTiles;
  const int tiles = ceil_div(params.weights.rows, unit_rows);
  const int64_t units = static_cast<int64_t>(experts.entries) * tiles;
  const int first = static_cast<int>(units * block / blocks);
  const int end = static_cast<int>(units * (block + 1) / blocks);
  const int steps = ceil_div<Traits::kStepColumns>(params.weights.columns);
  const UpJob job = {params,    experts,     shared.slot_tokens(),  tiles,
                     steps,     first,       (end - first) * steps, params.schedule.entry_tokens,
                     unit_rows, warp_index()};
  compute_up<Traits>(params, shared, job);
}

}  // namespace flashmoe::moe::sm89_few_tokens
