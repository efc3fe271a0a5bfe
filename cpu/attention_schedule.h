// Code shared by dense and ragged batches of attention on the CPU: cutting tiles for threads, and
// their part of a plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "core/ceil_div.h"
#include "core/plan.h"
#include "cpu/attention_kernel.h"

namespace flashmoe::cpu {

inline constexpr size_t kCacheLine = 64;

// Tiles per thread that even out their unequal lengths.
inline constexpr int64_t kTilesPerThread = 3;

inline int32_t choose_threads(double flops, double flops_per_thread, int32_t available) {
  const double wanted = flops / flops_per_thread;
  if (wanted >= available) return available;
  return wanted < 1 ? 1 : static_cast<int32_t>(wanted);
}

inline double flops_per_thread(const AttentionProblem& p, const AttentionKernel& kernel) {
  return kernel.has_few_rows(p) ? kFlopsPerThread : kernel.flops_per_thread;
}

// Rows of one (batch, KV head).
inline int64_t rows_of(const AttentionProblem& p) { return p.seq_q * (p.heads_q / p.heads_kv); }

// Rows per tile: as many as a tile may hold, but fewer while `leaves_idle` says that threads would
// lack work. It is asked with the rows of a tile and the number of such tiles that each thread
// should find. K and V are packed once per tile, so tiles hold whole groups. Few rows are cut only
// for threads that have none, since every tile reads K and V.
template <class LeavesIdle>
int64_t choose_tile_rows(const AttentionProblem& p, const AttentionKernel& kernel,
                         const LeavesIdle& leaves_idle) {
  if (kernel.has_few_rows(p)) {
    int64_t rows = rows_of(p);
    while (rows > 1 && leaves_idle(rows, 1)) rows = ceil_div(rows, 2);
    return rows < 1 ? 1 : rows;
  }
  const int64_t groups = ceil_div(rows_of(p), kernel.group_rows);
  int64_t tile_groups = kernel.max_groups < groups ? kernel.max_groups : groups;
  while (tile_groups > 1 && leaves_idle(tile_groups * kernel.group_rows, kTilesPerThread)) {
    tile_groups = ceil_div(tile_groups, 2);
  }
  return (tile_groups < 1 ? 1 : tile_groups) * kernel.group_rows;
}

inline size_t tile_scratch_bytes(const AttentionProblem& p, const AttentionKernel& kernel,
                                 int64_t tile_rows) {
  const size_t bytes = kernel.scratch_bytes(p, static_cast<int32_t>(tile_rows));
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

inline unsigned char* first_cache_line(void* workspace) {
  const uintptr_t base = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<unsigned char*>((base + kCacheLine - 1) / kCacheLine * kCacheLine);
}

inline void add_attention_launch(const AttentionProblem& p, const AttentionKernel& kernel,
                                 int64_t tiles, int32_t threads, int64_t tile_rows, Plan* plan) {
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "attention_forward_cpu_%s_%s_d%d_dv%d", kernel.isa,
                dtype_name(p.q.dtype), static_cast<int>(p.dim), static_cast<int>(p.dim_v));
  plan->set_isa(kernel.isa);
  flashmoe_launch& launch = plan->add_launch(name, &kernel, p.device, static_cast<uint32_t>(tiles),
                                             static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(tile_rows);
  launch.tile_n = kernel.tile_k(p);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  launch.stages = 1;
}

}  // namespace flashmoe::cpu
