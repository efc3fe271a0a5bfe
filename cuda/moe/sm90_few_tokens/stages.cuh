// How weights and tokens reach a block on Hopper: the copy engine copies whole stretches of a row
// at a time.
//
// A block has one producer warp and kConsumers consumer warps. A *stage* is some columns of a unit:
// of its 16 weight rows, then of its tokens, one bulk copy each. The warps of a group share a
// stage's columns, 32 each at a time. A block is at one unit or two, and all blocks together walk
// through an expert's matrix in the order of memory.
#pragma once

#include "cuda/moe/sm89_few_tokens/pipeline.cuh"
#include "cuda/moe/sm90_few_tokens/traits.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashmoe::moe::sm89_few_tokens::bulk {

// One product's rows and tokens.
template <class Element>
using Tile = Traits<Element, 1, 1>;

// Named barriers.
inline constexpr int kSlotsBarrier = 1;     // slots' data is in shared memory
inline constexpr int kConsumerBarrier = 2;  // the consumer warps

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

struct Barriers {
  uint64_t full[kMostStages];   // the copy engine has filled a stage
  uint64_t empty[kMostStages];  // a group of warps has read it
};

// The ring of stages, and a warp's position in it.
struct Ring {
  uint32_t memory;
  uint32_t barriers;
  int stages;
  int stage_bytes;
  int row_bytes;
  int groups;
  int at = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring(const Schedule& schedule, const void* shared,
                                  const Barriers& of_block)
      : memory(shared_address(shared)),
        barriers(shared_address(&of_block)),
        stages(schedule.stages),
        stage_bytes(bulk::stage_bytes(schedule.stage_columns, schedule.entry_tokens)),
        row_bytes(bulk::row_bytes(schedule.stage_columns)),
        groups(schedule.groups) {}

  // One thread calls it before the block synchronises.
  __device__ __forceinline__ void init() {
#pragma unroll 1
    for (at = 0; at < stages; ++at) {
      ptx::mbarrier_init(full(), 1);
      ptx::mbarrier_init(empty(), kConsumers / groups * kThreadsPerWarp);
    }
    at = 0;
  }

  __device__ __forceinline__ uint32_t stage() const {
    return memory + static_cast<uint32_t>(at * stage_bytes);
  }
  __device__ __forceinline__ uint32_t full() const {
    return barriers + static_cast<uint32_t>(at) * sizeof(uint64_t);
  }
  __device__ __forceinline__ uint32_t empty() const { return full() + sizeof(Barriers::full); }
  __device__ __forceinline__ void advance() {
    if (++at == stages) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Copies stages into the ring in the order of a walk, which defines the units and the addresses of
// their tokens. One thread issues, so that addresses are in uniform registers, as the copy engine
// needs them. Per-lane values would have to be extracted one by one, at 90 cycles each.
template <class Walk>
struct Producer {
  Walk walk;
  Ring ring;
  Unit unit = {};
  bool same_unit = false;

  // A stage's part of the tokens' rows.
  struct Tokens {
    int slot;
    int count;
    int column;
    int columns;
  };

  __device__ __forceinline__ Tokens enter_stage() {
    if (!same_unit) unit = walk.unit();
    return {unit.slot, unit.count, walk.column(), walk.columns()};
  }
  __device__ __forceinline__ void leave_stage() {
    __syncwarp();
    same_unit = walk.advance();
    ring.advance();
  }

  // One thread calls it. The barrier expects the rows of tokens as well.
  __device__ __forceinline__ void copy_weights(const Tokens& tokens) const {
    const Weights& weights = walk.work.params.weights;
    const int bytes = 2 * tokens.columns;
    const int halves = unit.row + weights.half_rows < weights.rows ? 2 : 1;
    ptx::mbarrier_arrive_expect(ring.full(), (8 * halves + tokens.count) * bytes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h == halves) break;
      const uint16_t* row = weights.half[h] + unit.expert * weights.expert_stride[h] +
                            unit.row * weights.row_stride[h] + tokens.column;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Weights are read once.
        ptx::bulk_load(ring.stage() + (8 * h + i) * ring.row_bytes, row, bytes, ring.full(),
                       ptx::kEvictFirst);
        row += weights.row_stride[h];
      }
    }
  }
  __device__ __forceinline__ void copy_tokens(const Tokens& tokens) const {
#pragma unroll 1
    for (int i = 0; i < tokens.count; ++i) {
      ptx::bulk_load(ring.stage() + (kRows + i) * ring.row_bytes,
                     walk.work.token(tokens.slot + i) + tokens.column, 2 * tokens.columns,
                     ring.full(), ptx::kEvictNormal);
    }
  }

  __device__ __forceinline__ void copy() {
    const Tokens tokens = enter_stage();
    if (ptx::elect_one()) {
      copy_weights(tokens);
      copy_tokens(tokens);
    }
    leave_stage();
  }

  // Copies as many stages as the ring has room for.
  __device__ __forceinline__ void begin() {
#pragma unroll 1
    for (int i = 0; i < ring.stages && !walk.done(); ++i) copy();
  }
  // The same, but copies tokens only after the kernels in front have written them. Until then lanes
  // keep the tokens' data, one stage each.
  template <class Wait>
  __device__ __forceinline__ void begin_before(const Wait& wait) {
    Ring first = ring;
    Tokens ready = {};
    int begun = 0;
#pragma unroll 1
    for (; begun < ring.stages && !walk.done(); ++begun) {
      const Tokens tokens = enter_stage();
      if (lane_index() == begun) ready = tokens;
      if (ptx::elect_one()) copy_weights(tokens);
      leave_stage();
    }
    Ring behind = ring;
    ring = first;
    wait();
#pragma unroll 1
    for (int i = 0; i < begun; ++i) {
      const Tokens tokens = {
          __shfl_sync(kFullWarp, ready.slot, i), __shfl_sync(kFullWarp, ready.count, i),
          __shfl_sync(kFullWarp, ready.column, i), __shfl_sync(kFullWarp, ready.columns, i)};
      if (ptx::elect_one()) copy_tokens(tokens);
      __syncwarp();
      ring.advance();
    }
    ring = behind;
  }
  // Copies one of the later stages.
  __device__ __forceinline__ void copy_next() {
    ptx::mbarrier_wait(ring.empty(), ring.parity ^ 1);
    copy();
  }
};

__device__ __forceinline__ void load_shared_or_zero(uint32_t (&chunk)[4], uint32_t address,
                                                    bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(chunk[0]), "=&r"(chunk[1]), "=&r"(chunk[2]), "=&r"(chunk[3])
      : "r"(address), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// A consumer warp. Groups of warps take the ring's slots in turn: a slot always belongs to the same
// group, whose warps see each of its phases.
template <class Element>
struct Consumer {
  Ring ring;
  int group;
  int last_group;
  int own_column;     // this lane's first column in a stage
  int round_columns;  // over all warps of the group
  int row;            // bytes from a stage to this lane's first piece of weights
  int token_row;
  bool took;  // some stage of the unit belonged to this group

  __device__ __forceinline__ Consumer(const Ring& r, int warp) : ring(r), last_group(r.groups - 1) {
    const int warps = kConsumers / r.groups;
    group = warp / warps;
    own_column = opaque(kChunkColumns * (warp % warps) + 8 * (lane_index() % 4));
    round_columns = kChunkColumns * warps;
    row = opaque(lane_index() / 4 * ring.row_bytes + 2 * own_column);
  }

  // Begins a unit of `tokens` tokens. The results of lanes beyond these are not used.
  __device__ __forceinline__ void enter(int tokens) {
    took = false;
    token_row = (kRows + min(lane_index() / 4, tokens - 1)) * ring.row_bytes + 2 * own_column;
  }

  // Adds this warp's products of the next stage, of `columns` columns, to `sums`. There are two
  // sums because each product waits for the previous one in its sum.
  __device__ __forceinline__ void consume(int columns, float (&sums)[2][4]) {
    if ((ring.at & last_group) != group) {
      ring.advance();
      return;
    }
    took = true;
    const uint32_t weights = ring.stage() + static_cast<uint32_t>(row);
    const uint32_t tokens = ring.stage() + static_cast<uint32_t>(token_row);
    ptx::mbarrier_wait(ring.full(), ring.parity);
    constexpr int kBatch = 3;  // rounds whose data is loaded before their products
    int column = 0;
#pragma unroll 1
    for (; column + kBatch * round_columns <= columns; column += kBatch * round_columns) {
      uint32_t a[kBatch][2][4];
      uint32_t b[kBatch][4];
#pragma unroll
      for (int round = 0; round < kBatch; ++round) {
        const auto at = static_cast<uint32_t>(2 * (column + round * round_columns));
        load_shared(a[round][0], weights + at);
        load_shared(a[round][1], weights + at + static_cast<uint32_t>(8 * ring.row_bytes));
        load_shared(b[round], tokens + at);
      }
#pragma unroll
      for (int round = 0; round < kBatch; ++round) add(a[round], b[round], sums);
    }
#pragma unroll 1
    for (; column < columns; column += round_columns) {
      const bool inside = column + own_column < columns;
      const auto at = static_cast<uint32_t>(2 * column);
      uint32_t a[2][4];
      uint32_t b[4];
      load_shared_or_zero(a[0], weights + at, inside);
      load_shared_or_zero(a[1], weights + at + static_cast<uint32_t>(8 * ring.row_bytes), inside);
      load_shared_or_zero(b, tokens + at, inside);
      add(a, b, sums);
    }
    // Each lane arrives for its own reads: racecheck does not see that one lane's arrival could
    // cover the others.
    ptx::mbarrier_arrive(ring.empty());
    ring.advance();
  }

  static __device__ __forceinline__ void add(const uint32_t (&a)[2][4], const uint32_t (&b)[4],
                                             float (&sums)[2][4]) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const uint32_t fragment[4] = {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]};
      ptx::mma_m16n8k16<Element>(sums[k / 2], fragment, b[k], b[k + 1]);
    }
  }
};

// find_experts by one warp alone.
__device__ __forceinline__ Experts find_experts_by_warp(const Routing& routing,
                                                        const Divisor& by_entry_tokens,
                                                        Record* records) {
  constexpr int kBatch = 4;  // experts per lane whose offsets are loaded together
  const int pairs = routing.tokens * routing.top_k;
  const int lane = lane_index();
  const int entry_tokens = by_entry_tokens.number();
  int count = 0;
  int entries = 0;
#pragma unroll 1
  for (int first = lane; first - lane < routing.experts; first += kBatch * kThreadsPerWarp) {
    int begin[kBatch];
    int end[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int expert = first + i * kThreadsPerWarp;
      const bool valid = expert < routing.experts;
      begin[i] = valid ? __ldcg(routing.offsets + expert) : 0;
      end[i] = valid ? __ldcg(routing.offsets + expert + 1) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      begin[i] = min(max(begin[i], 0), pairs);
      end[i] = min(max(end[i], 0), pairs);
      const int own = by_entry_tokens.quotient(max(end[i] - begin[i], 0) + entry_tokens - 1);
      const uint32_t active = __ballot_sync(kFullWarp, own > 0);
      const int actives_before = __popc(active & ((1u << lane) - 1));
      int before = actives_before;
      int all = __popc(active);
      if (__any_sync(kFullWarp, own > 1)) {
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < kThreadsPerWarp; distance *= 2) {
          const int other = __shfl_up_sync(kFullWarp, sum, distance);
          if (lane >= distance) sum += other;
        }
        before = sum - own;
        all = __shfl_sync(kFullWarp, sum, kThreadsPerWarp - 1);
      }
      const int rank = count + actives_before;
      if (own > 0 && rank < routing.max_records) {
        records[rank] = {first + i * kThreadsPerWarp, begin[i], end[i], entries + before};
      }
      count += __popc(active);
      entries += all;
    }
  }
  __syncwarp();
  return end_records(routing, entry_tokens, by_entry_tokens.quotient(pairs), records, count,
                     entries, lane == 0);
}

// The unit of an entry with weights from `row` on. `record` advances with the entry.
__device__ __forceinline__ Unit unit_of(const Experts& experts, int entry, int& record, int row,
                                        int entry_tokens) {
#pragma unroll 1
  while (experts.records[record + 1].first_entry <= entry) ++record;
  const Record found = experts.records[record];
  Unit unit;
  unit.expert = found.expert;
  unit.slot = found.first_slot + (entry - found.first_entry) * entry_tokens;
  unit.count = min(entry_tokens, found.end_slot - unit.slot);
  unit.row = row;
  return unit;
}

}  // namespace flashmoe::moe::sm89_few_tokens::bulk
