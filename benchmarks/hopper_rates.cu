// Rates that the attention backward for Hopper is designed by (docs/lab/attention_backward.md):
//
//   products   m64nNk16 of bf16 by 1 to 3 warpgroups of a block on each multiprocessor, A in shared
//              memory and in registers: FLOP a clock and multiprocessor
//   sums       tiles of 32 KiB that are added to in global memory, each by several blocks: in any
//              order by the copy engine and by red from registers, and in one order by turns: bytes
//              a second
//   hand-over  the time from a turn to the next, of a tile that blocks add to one after another,
//              by the fence that is between a turn and what it allows
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I . -o rates
//   benchmarks/hopper_rates.cu
//   ./rates > benchmarks/results/hopper_rates_<gpu>.json
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/proxy.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

using namespace flashmoe;

namespace {

constexpr int kThreadsPerGroup = 128;
constexpr int kTileFloats = 8192;  // of a step of 64 queries of 128 columns
constexpr int kTileBytes = kTileFloats * 4;
constexpr int kSamples = 7;
constexpr int kBlocks = 128;              // that add to sums: all run at a time
constexpr int kSharedBytes = 200 * 1024;  // so that a multiprocessor runs one block

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// ---- products
// ------------------------------------------------------------------------------------------

constexpr int kRounds = 2000;
constexpr int kSlices = 4;   // of 16 columns: a tile row of 128 bytes
constexpr int kRepeats = 2;  // of them, in a group; one group is under way while the next is sent

template <int kColumns, bool kRegisters>
__global__ void __launch_bounds__(3 * kThreadsPerGroup, 1) products(uint32_t* clocks, float* out) {
  using Mma = ptx::Wgmma<__nv_bfloat16, kColumns>;
  extern __shared__ __align__(1024) unsigned char raw[];
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  for (uint32_t i = threadIdx.x; i < kSharedBytes / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(raw)[i] = 0;
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const uint32_t group = threadIdx.x / kThreadsPerGroup;
  const uint64_t a = ptx::swizzled_descriptor(shared + group * 64 * 128, 16);
  const uint64_t b = ptx::swizzled_descriptor(shared + 3 * 64 * 128 + group * kColumns * 128, 16);
  uint32_t values[4] = {};
  float d[kColumns / 2] = {};
  const uint32_t begin = static_cast<uint32_t>(clock64());
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRepeats * kSlices; ++i) {
      const int slice = i % kSlices * 32;
      if constexpr (kRegisters) {
        Mma::multiply_by_rows(d, values, ptx::advance(b, slice), true);
      } else {
        Mma::multiply(d, ptx::advance(a, slice), ptx::advance(b, slice), true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  ptx::pin(d);
  const uint32_t taken = static_cast<uint32_t>(clock64()) - begin;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum += d[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) clocks[blockIdx.x] = taken;
}

template <int kColumns, bool kRegisters>
void measure_products(int blocks, uint32_t* clocks, float* out, bool& first) {
  const auto kernel = &products<kColumns, kRegisters>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "shared memory");
  for (int groups = 1; groups <= 3; ++groups) {
    for (int i = 0; i < 2; ++i) {
      kernel<<<blocks, groups * kThreadsPerGroup, kSharedBytes>>>(clocks, out);
    }
    check(cudaDeviceSynchronize(), "products");
    std::vector<uint32_t> taken(static_cast<size_t>(blocks));
    check(cudaMemcpy(taken.data(), clocks, taken.size() * 4, cudaMemcpyDeviceToHost), "copy");
    std::sort(taken.begin(), taken.end());
    const double flops = 2.0 * 64 * kColumns * 16 * kSlices * kRepeats * kRounds * groups;
    std::printf(
        "%s\n  {\"columns\": %d, \"a\": \"%s\", \"warpgroups\": %d, \"flops_a_clock\": %.0f}",
        first ? "" : ",", kColumns, kRegisters ? "registers" : "shared", groups,
        flops / taken[taken.size() / 2]);
    first = false;
  }
}

// ---- sums
// ----------------------------------------------------------------------------------------------

enum class Way { kBulk, kRed, kTurns };
enum class Fence { kAll, kGlobal };

template <Fence kFence>
__device__ __forceinline__ void wait_for_turn(const uint32_t* turn, uint32_t before) {
  while (ptx::load_acquire(turn) != before) {
  }
  if constexpr (kFence == Fence::kAll) {
    ptx::fence_proxy_async();
  } else {
    ptx::fence_proxy_async_global();
  }
}

// Blocks of a group of `sharers` go through the same `tiles`, and each adds to all of them. With
// turns those of a group begin one hand-over apart, as items of a head do.
template <Way kWay, Fence kFence>
__global__ void __launch_bounds__(kThreadsPerGroup, 1)
    sums(float* all, uint32_t* turns, int sharers, int tiles) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
  const int group = static_cast<int>(blockIdx.x) / sharers;
  const uint32_t before = blockIdx.x % sharers;
  const int first = group * tiles;
  for (int i = static_cast<int>(threadIdx.x); i < kTileFloats; i += kThreadsPerGroup) {
    reinterpret_cast<float*>(raw)[i] = 1.0F;
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if constexpr (kWay == Way::kRed) {
    const float ones[4] = {1, 1, 1, 1};
    for (int tile = 0; tile < tiles; ++tile) {
      // In any order: each block begins elsewhere.
      const int other = (tile + static_cast<int>(before) * tiles / sharers) % tiles;
      float* const to = all + static_cast<int64_t>(first + other) * kTileFloats + threadIdx.x * 4;
#pragma unroll
      for (int i = 0; i < kTileFloats / (4 * kThreadsPerGroup); ++i) {
        ptx::add_global<1>(to + i * 4 * kThreadsPerGroup, ones);
      }
    }
    return;
  }
  if (threadIdx.x != 0) return;
  for (int tile = 0; tile < tiles; ++tile) {
    const int other =
        kWay == Way::kTurns ? tile : (tile + static_cast<int>(before) * tiles / sharers) % tiles;
    float* const to = all + static_cast<int64_t>(first + other) * kTileFloats;
    if constexpr (kWay == Way::kTurns) wait_for_turn<kFence>(turns + first + other, before);
    ptx::bulk_add(to, shared, kTileBytes, ptx::kEvictLast);
    ptx::tma_store_commit();
    if constexpr (kWay == Way::kTurns) {
      ptx::tma_store_wait();
      ptx::store_release(turns + first + other, before + 1);
    } else {
      ptx::tma_store_wait_but<1>();
    }
  }
  ptx::tma_store_wait();
}

struct Memory {
  float* sums;
  uint32_t* turns;
};

// Whether each of so many sums has had a part of each block.
void check_sums(const Memory& memory, int tiles, int sharers, int runs, const char* name) {
  std::vector<float> some(16);
  const int64_t last = static_cast<int64_t>(tiles) * kTileFloats - 16;
  check(cudaMemcpy(some.data(), memory.sums + last, some.size() * 4, cudaMemcpyDeviceToHost),
        "copy");
  for (const float sum : some) {
    if (sum == static_cast<float>(sharers * runs)) continue;
    std::fprintf(stderr, "%s: %g in place of %d\n", name, static_cast<double>(sum), sharers * runs);
    std::exit(1);
  }
}

template <Way kWay, Fence kFence>
double time_of_sums(const Memory& memory, int blocks, int sharers, int tiles, const char* name) {
  const auto kernel = &sums<kWay, kFence>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "shared memory");
  const int all_tiles = blocks / sharers * tiles;
  check(cudaMemset(memory.sums, 0, static_cast<size_t>(all_tiles) * kTileBytes), "zeros");
  std::vector<double> times;
  const auto turns_bytes = static_cast<size_t>(all_tiles) * 4;
  for (int run = 0; run < kSamples + 1; ++run) {
    check(cudaMemset(memory.turns, 0, turns_bytes), "turns");
    cudaEvent_t begin;
    cudaEvent_t end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    check(cudaEventRecord(begin), "record");
    kernel<<<blocks, kThreadsPerGroup, kSharedBytes>>>(memory.sums, memory.turns, sharers, tiles);
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), name);
    float time = 0;
    check(cudaEventElapsedTime(&time, begin, end), "time");
    if (run > 0) times.push_back(time * 1e3);
    check(cudaEventDestroy(begin), "event");
    check(cudaEventDestroy(end), "event");
  }
  check_sums(memory, all_tiles, sharers, kSamples + 1, name);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <Way kWay, Fence kFence>
void measure_sums(const Memory& memory, const char* name, bool& first) {
  for (const int sharers : {4, 16, 64}) {
    for (const int mebibytes : {16, 32, 64, 128}) {
      const int tiles = mebibytes * (1 << 20) / kTileBytes / (kBlocks / sharers);
      const double us = time_of_sums<kWay, kFence>(memory, kBlocks, sharers, tiles, name);
      const double bytes = static_cast<double>(kBlocks) * tiles * kTileBytes;
      std::printf(
          "%s\n  {\"way\": \"%s\", \"blocks_a_sum\": %d, \"mib\": %d, \"us\": %.1f, "
          "\"gb_a_second\": %.0f}",
          first ? "" : ",", name, sharers, mebibytes, us, bytes / us * 1e-3);
      first = false;
    }
  }
}

// One tile that all blocks add to, over and over: nothing hides a hand-over.
template <Fence kFence>
void measure_hops(const Memory& memory, const char* name, bool& first) {
  const double us = time_of_sums<Way::kTurns, kFence>(memory, kBlocks, kBlocks, 1, name);
  const double launch = time_of_sums<Way::kBulk, kFence>(memory, kBlocks, kBlocks, 1, name);
  std::printf(
      "%s\n  {\"fence\": \"%s\", \"hops\": %d, \"us\": %.1f, \"us_without_turns\": %.1f, "
      "\"us_a_hop\": %.3f}",
      first ? "" : ",", name, kBlocks, us, launch, (us - launch) / kBlocks);
  first = false;
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "device");
  const int blocks = properties.multiProcessorCount;
  if (properties.major != 9 || blocks < kBlocks) {
    std::fprintf(stderr, "needs a GPU of compute capability 9.0 with %d multiprocessors\n",
                 kBlocks);
    return 1;
  }
  uint32_t* clocks = nullptr;
  float* out = nullptr;
  Memory memory = {};
  check(cudaMalloc(&clocks, static_cast<size_t>(blocks) * 4), "memory");
  check(cudaMalloc(&out, static_cast<size_t>(blocks) * 3 * kThreadsPerGroup * 4), "memory");
  check(cudaMalloc(&memory.sums, size_t{128} << 20), "memory");
  check(cudaMalloc(&memory.turns, size_t{1} << 20), "memory");
  std::printf(
      "{\"what\": \"rates of products and of sums in global memory, by "
      "benchmarks/hopper_rates.cu\",\n\"device\": \"%s\", \"multiprocessors\": %d,\n",
      properties.name, blocks);
  bool first = true;
  std::printf("\"products\": [");
  measure_products<64, false>(blocks, clocks, out, first);
  measure_products<64, true>(blocks, clocks, out, first);
  measure_products<128, false>(blocks, clocks, out, first);
  measure_products<128, true>(blocks, clocks, out, first);
  std::printf("],\n\"sums\": [");
  first = true;
  measure_sums<Way::kBulk, Fence::kGlobal>(memory, "any order, copy engine", first);
  measure_sums<Way::kRed, Fence::kGlobal>(memory, "any order, red.v4", first);
  measure_sums<Way::kTurns, Fence::kGlobal>(memory, "turns", first);
  measure_sums<Way::kTurns, Fence::kAll>(memory, "turns, fence.proxy.async", first);
  std::printf("],\n\"hand_over\": [");
  first = true;
  measure_hops<Fence::kGlobal>(memory, "fence.proxy.async.global", first);
  measure_hops<Fence::kAll>(memory, "fence.proxy.async", first);
  std::printf("]}\n");
  return 0;
}
