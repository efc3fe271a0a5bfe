// Attention forward on the CPU: plan and launch.
//
// A tile is up to tile_q rows of one (batch, KV head); one thread computes it from the first key it
// sees to the last, so the bits of a row depend neither on the number of threads nor on tile_q
// (rows meet keys in steps of tile_k counted from key 0). Threads take tiles from a shared counter;
// under a causal mask the longest come first. All scratch is the caller's workspace.
#include <algorithm>
#include <atomic>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/attention_kernel.h"
#include "cpu/attention_schedule.h"
#include "cpu/attention_sequences.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::AttentionKernel;
using cpu::AttentionTile;
using cpu::kCacheLine;
using cpu::rows_of;
using cpu::tile_scratch_bytes;

const AttentionKernel& kernel_for(cpu::Isa isa, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return cpu::kFp64Attention;
  const int index = static_cast<int>(dtype);
  switch (isa) {
#if FLASHMOE_CPU_X86
    case cpu::Isa::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return cpu::kAvx512Bf16Attention;
      return cpu::kAvx512Attention[index];
    case cpu::Isa::kAmx:
#if FLASHMOE_CPU_AMX
      if (dtype == Dtype::kBFloat16) return cpu::kAmxAttention;
#endif
      return cpu::kAvx512Attention[index];
    case cpu::Isa::kAvx512: return cpu::kAvx512Attention[index];
    case cpu::Isa::kAvx2: return cpu::kAvx2Attention[index];
#endif
    default: return cpu::kScalarAttention[index];
  }
}

int64_t tiles_of(const AttentionProblem& p, int64_t tile_q) {
  return p.batch * p.heads_kv * ceil_div(rows_of(p), tile_q);
}

int64_t choose_tile_q(const AttentionProblem& p, const AttentionKernel& kernel, int32_t threads) {
  return cpu::choose_tile_rows(p, kernel, [&](int64_t rows, int64_t per_thread) {
    return tiles_of(p, rows) < per_thread * threads;
  });
}

flashmoe_status plan(const AttentionProblem& p, Plan* plan, const Reason& reason) {
  cpu::Isa isa;
  FLASHMOE_TRY(cpu::chosen_isa(&isa, reason));
  const AttentionKernel& kernel = kernel_for(isa, p.q.dtype);
  const int32_t most_threads =
      cpu::choose_threads(attention_flops(p), cpu::flops_per_thread(p, kernel), cpu::num_threads());
  if (p.sequences.given) return cpu::plan_sequences(p, kernel, most_threads, plan, reason);
  const int64_t tile_q = choose_tile_q(p, kernel, most_threads);
  const int64_t tiles = tiles_of(p, tile_q);
  if (tiles > UINT32_MAX) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "batch x KV heads x tiles of %lld rows is %lld, at most %u",
                         static_cast<long long>(tile_q), static_cast<long long>(tiles), UINT32_MAX);
  }
  const int32_t threads =
      tiles < most_threads ? static_cast<int32_t>(tiles < 1 ? 1 : tiles) : most_threads;
  cpu::add_attention_launch(p, kernel, tiles, threads, tile_q, plan);
  // The core promises 16-byte alignment; the kernels want whole cache lines. A single thread has
  // the largest tiles, and may get a workspace planned for several.
  const uint64_t per_thread = tile_scratch_bytes(p, kernel, tile_q);
  const uint64_t of_one = tile_scratch_bytes(p, kernel, choose_tile_q(p, kernel, 1));
  plan->info.workspace_bytes =
      std::max(static_cast<uint64_t>(threads) * per_thread, of_one) + kCacheLine;
  plan->room = {per_thread + kCacheLine, per_thread};
  return FLASHMOE_OK;
}

struct Launch {
  const AttentionProblem& problem;
  const AttentionKernel& kernel;
  int64_t tile_q;
  int64_t tiles;
  int64_t row_tiles;  // per (batch, KV head)
  unsigned char* scratch;
  size_t scratch_bytes;  // per thread
  std::atomic<int64_t> next{0};
};

void work(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  const AttentionProblem& p = launch.problem;
  void* scratch = launch.scratch + static_cast<size_t>(worker) * launch.scratch_bytes;
  const int64_t heads = p.batch * p.heads_kv;
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch.tiles) return;
    // Last rows first: under a causal mask they see the most keys.
    const int64_t row_tile = launch.row_tiles - 1 - index / heads;
    const int64_t head = index % heads;
    AttentionTile tile;
    tile.batch = head / p.heads_kv;
    tile.kv_head = head % p.heads_kv;
    tile.first_row = row_tile * launch.tile_q;
    const int64_t left = rows_of(p) - tile.first_row;
    tile.rows = left < launch.tile_q ? left : launch.tile_q;
    launch.kernel.compute(p, tile, static_cast<int32_t>(launch.tile_q), scratch);
  }
}

flashmoe_status launch(const AttentionProblem& p, const Plan& plan, void* workspace,
                       void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  const AttentionKernel& kernel = *static_cast<const AttentionKernel*>(plan.entries[0]);
  if (p.sequences.given) {
    cpu::launch_sequences(p, kernel, planned, workspace);
    record_launch(planned);
    return FLASHMOE_OK;
  }
  Launch launch = {p,
                   kernel,
                   planned.tile_m,
                   planned.grid[0],
                   ceil_div(rows_of(p), planned.tile_m),
                   cpu::first_cache_line(workspace),
                   tile_scratch_bytes(p, kernel, planned.tile_m)};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const AttentionFamily kCpuAttention = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
