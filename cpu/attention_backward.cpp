// Attention backward on the CPU: plan and launch.
//
// Threads take pieces of work from a shared counter (attention_backward_tiles.h). dsinks are sums
// over a head's rows: each is one more piece, after those of the tiles.
#include <atomic>
#include <cstdio>

#include "core/backends.h"
#include "core/launch.h"
#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_backward_sequences.h"
#include "cpu/attention_backward_tiles.h"
#include "cpu/attention_schedule.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::AttentionBackwardKernel;
using cpu::BackwardCut;
using cpu::BackwardSums;
using cpu::BackwardTiles;
using cpu::kCacheLine;
using cpu::whole_lines;

const AttentionBackwardKernel& kernel_for(cpu::Isa isa, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return cpu::kFp64AttentionBackward;
  const int index = static_cast<int>(dtype);
  switch (isa) {
#if FLASHMOE_CPU_X86
    case cpu::Isa::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return cpu::kAvx512Bf16AttentionBackward;
      return cpu::kAvx512AttentionBackward[index];
    case cpu::Isa::kAmx:
#if FLASHMOE_CPU_AMX
      if (dtype == Dtype::kBFloat16) return cpu::kAmxAttentionBackward;
#endif
      return cpu::kAvx512AttentionBackward[index];
    case cpu::Isa::kAvx512: return cpu::kAvx512AttentionBackward[index];
    case cpu::Isa::kAvx2: return cpu::kAvx2AttentionBackward[index];
#endif
    default: return cpu::kScalarAttentionBackward[index];
  }
}

// Number of query heads whose dsinks are wanted.
int64_t sinks_of(const AttentionBackwardProblem& p) {
  return p.dsinks.data != nullptr ? p.heads_q : 0;
}

int64_t pieces_of(const AttentionBackwardProblem& p, const BackwardCut& cut) {
  return cut.pieces_in_all + sinks_of(p);
}

// The part of the workspace that threads share. The rest is divided into their scratch.
BackwardSums sums_of(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                     const BackwardCut& cut) {
  return {p, kernel, cut.blocks_in_all, cut.key_tiles_in_all};
}

flashmoe_status check_count(const char* what, int64_t heads, int64_t each, const Reason& reason) {
  int64_t count;
  if (!__builtin_mul_overflow(heads, each, &count) && count <= UINT32_MAX) return FLASHMOE_OK;
  return reason.refuse(
      FLASHMOE_ERROR_UNSUPPORTED, "batch x KV heads is %lld, each with %lld %s: at most %u in all",
      static_cast<long long>(heads), static_cast<long long>(each), what, UINT32_MAX);
}

int32_t choose_threads(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                       double pieces) {
  const int32_t available = cpu::num_threads();
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.seq_q);
  const double of_sinks =
      static_cast<double>(sinks_of(p)) * rows * 2.0 * static_cast<double>(p.dim_v);
  const double worth = (attention_backward_flops(p) + of_sinks) / kernel.flops_per_thread;
  const double most = worth < pieces ? worth : pieces;
  if (most >= available) return available;
  return most < 1 ? 1 : static_cast<int32_t>(most);
}

// Fills the launch of `pieces` pieces of work, except its workspace; returns its threads.
int32_t add_launch(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                   int64_t pieces, double most_threads, Plan* plan) {
  const int32_t threads = choose_threads(p, kernel, most_threads);
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "attention_backward_cpu_%s_%s_d%d_dv%d", kernel.isa,
                dtype_name(p.q.dtype), static_cast<int>(p.dim), static_cast<int>(p.dim_v));
  plan->set_isa(kernel.isa);
  flashmoe_launch& launch = plan->add_launch(name, &kernel, p.device, static_cast<uint32_t>(pieces),
                                             static_cast<uint32_t>(threads));
  launch.tile_m = kernel.block_rows(p);
  launch.tile_n = kernel.tile_keys(p);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  launch.stages = 1;
  return threads;
}

// The core promises 16-byte alignment; the kernels want whole cache lines.
void set_workspace(uint64_t shared, uint64_t per_thread, int32_t threads, Plan* plan) {
  plan->info.workspace_bytes = shared + kCacheLine + static_cast<uint64_t>(threads) * per_thread;
  plan->room = {shared + kCacheLine + per_thread, per_thread};
}

flashmoe_status plan_sequences(const AttentionBackwardProblem& p,
                               const AttentionBackwardKernel& kernel, Plan* plan,
                               const Reason& reason) {
  int64_t pairs = 0;  // of a sequence and a KV head
  if (__builtin_mul_overflow(p.batch, p.heads_kv, &pairs) || pairs > UINT32_MAX) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%lld sequences of %lld KV heads are more than %u pairs",
        static_cast<long long>(p.batch), static_cast<long long>(p.heads_kv), UINT32_MAX);
  }
  uint64_t shared = 0;
  FLASHMOE_TRY(cpu::backward_sequences_bytes(p, kernel, &shared, reason));
  const int32_t threads = add_launch(p, kernel, pairs, static_cast<double>(UINT32_MAX), plan);
  set_workspace(shared, whole_lines(kernel.scratch_bytes(p)), threads, plan);
  return FLASHMOE_OK;
}

flashmoe_status plan(const AttentionBackwardProblem& p, Plan* plan, const Reason& reason) {
  cpu::Isa isa;
  FLASHMOE_TRY(cpu::chosen_isa(&isa, reason));
  const AttentionBackwardKernel& kernel = kernel_for(isa, p.q.dtype);
  if (p.sequences.given) return plan_sequences(p, kernel, plan, reason);
  const BackwardCut cut(p, kernel);
  FLASHMOE_TRY(check_count("tiles of keys", cut.heads, cut.tiles, reason));
  FLASHMOE_TRY(check_count("blocks of rows", cut.heads, cut.blocks, reason));
  const int64_t pieces = pieces_of(p, cut);
  if (pieces > UINT32_MAX) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%lld pieces of work and %lld sinks: at most %u in all",
        static_cast<long long>(cut.pieces_in_all), static_cast<long long>(sinks_of(p)), UINT32_MAX);
  }
  const int32_t threads = add_launch(p, kernel, pieces, static_cast<double>(pieces), plan);
  set_workspace(sums_of(p, kernel, cut).bytes(), whole_lines(kernel.scratch_bytes(p)), threads,
                plan);
  return FLASHMOE_OK;
}

struct Launch {
  BackwardTiles tiles;
  int64_t pieces;
  unsigned char* scratch;
  uint64_t scratch_bytes;  // per thread
  std::atomic<int64_t> next{0};
};

void work(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  const BackwardTiles& tiles = launch.tiles;
  void* scratch = launch.scratch + static_cast<uint64_t>(worker) * launch.scratch_bytes;
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch.pieces) return;
    if (index < tiles.cut.pieces_in_all) {
      cpu::work_on_piece(tiles, index, scratch);
      continue;
    }
    const int64_t head = index - tiles.cut.pieces_in_all;
    tiles.kernel.write_dsink(tiles.problem, head, tiles.kernel.add_dsink(tiles.problem, head, 0.0));
  }
}

flashmoe_status launch(const AttentionBackwardProblem& p, const Plan& plan, void* workspace,
                       void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  const AttentionBackwardKernel& kernel =
      *static_cast<const AttentionBackwardKernel*>(plan.entries[0]);
  const auto threads = static_cast<int32_t>(planned.block[0]);
  auto* const base =
      reinterpret_cast<unsigned char*>(whole_lines(reinterpret_cast<uintptr_t>(workspace)));
  if (p.sequences.given) {
    cpu::launch_backward_sequences(p, kernel, threads, base);
    record_launch(planned);
    return FLASHMOE_OK;
  }
  const BackwardCut cut(p, kernel);
  const BackwardSums sums = sums_of(p, kernel, cut);
  sums.begin(base);
  Launch launch = {{p, kernel, cut, sums.dq(base), sums.keys(base)},
                   pieces_of(p, cut),
                   base + sums.bytes(),
                   whole_lines(kernel.scratch_bytes(p))};
  cpu::parallel_run(threads, work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const AttentionBackwardFamily kCpuAttentionBackward = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
