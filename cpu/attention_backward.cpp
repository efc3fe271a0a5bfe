// Attention backward on the CPU: plan and launch.
//
// A thread takes a tile of keys of one (batch, KV head) and meets with it every block of rows that
// sees some of it: dk and dv of the tile are summed in its scratch, over all query heads that share
// the KV head, and written once. dq is summed in the workspace, each tile of keys adding its part
// to a block of rows when the tiles before it have: the block's turn says how many did. The first
// to come stores, the last one writes dq. So sums have one order, whatever the number of threads,
// and each product is computed once.
//
// dsinks are sums over a head's rows: each is one more piece of work, behind the tiles.
//
// Tiles are taken in order, first the first of every head: what a tile waits for was taken before
// it, and has mostly been done. Under a causal mask the first tiles are the longest.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

#include "core/backends.h"
#include "core/launch.h"
#include "cpu/attention_backward_kernel.h"
#include "cpu/attention_numeric.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::AttentionBackwardKernel;
using cpu::AttentionBackwardStep;
using Turn = std::atomic<int32_t>;
static_assert(sizeof(Turn) == sizeof(int32_t) && Turn::is_always_lock_free);

#include "cpu/attention_visible.h"

constexpr uint64_t kCacheLine = 64;

// A thread must find this much work to be worth waking: about ten microseconds of it.
constexpr double kFlopsPerThread = 5e5;

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }
uint64_t whole_lines(uint64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

const AttentionBackwardKernel& kernel_for(cpu::Isa isa, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return cpu::kFp64AttentionBackward;
  const int index = static_cast<int>(dtype);
  switch (isa) {
#if FLASHMOE_CPU_X86
    case cpu::Isa::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return cpu::kAvx512Bf16AttentionBackward;
      return cpu::kAvx512AttentionBackward[index];
    case cpu::Isa::kAmx:  // of Intel alone
    case cpu::Isa::kAvx512: return cpu::kAvx512AttentionBackward[index];
    case cpu::Isa::kAvx2: return cpu::kAvx2AttentionBackward[index];
#endif
    default: return cpu::kScalarAttentionBackward[index];
  }
}

// How a problem is cut. Nothing here depends on the number of threads.
struct Cut {
  int64_t heads;   // (batch, KV head)
  int64_t rows;    // of one of them
  int64_t tiles;   // of keys; one where there are none, for rows that see none
  int64_t blocks;  // of rows
  int64_t tile_keys;
  int64_t block_rows;
  int64_t tiles_in_all;  // 0 where dsinks alone are wanted
  int64_t sinks;         // query heads whose dsinks are wanted

  Cut(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel)
      : heads(p.batch * p.heads_kv),
        rows(p.seq_q * (p.heads_q / p.heads_kv)),
        tile_keys(kernel.tile_keys(p)),
        block_rows(kernel.block_rows(p)) {
    tiles = p.seq_k == 0 ? 1 : ceil_divide(p.seq_k, tile_keys);
    blocks = ceil_divide(rows, block_rows);
    const bool tiled = p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr;
    tiles_in_all = tiled ? heads * tiles : 0;
    sinks = p.dsinks.data != nullptr ? p.heads_q : 0;
  }
  int64_t pieces() const { return tiles_in_all + sinks; }
};

// The parts of the workspace that threads share; what is behind is cut into their scratch.
struct Shared {
  uint64_t dq_sums;  // bytes, 0 where no block of rows is seen by two tiles
  uint64_t turns;

  Shared(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel, const Cut& cut) {
    const bool summed = p.dq.data != nullptr && cut.tiles > 1;
    const uint64_t blocks = summed ? static_cast<uint64_t>(cut.heads * cut.blocks) : 0;
    dq_sums = blocks * whole_lines(kernel.dq_sums_bytes(p));
    turns = whole_lines(blocks * sizeof(Turn));
  }
  uint64_t bytes() const { return dq_sums + turns; }
};

flashmoe_status check_count(const char* what, int64_t heads, int64_t each, const Reason& reason) {
  int64_t count;
  if (!__builtin_mul_overflow(heads, each, &count) && count <= UINT32_MAX) return FLASHMOE_OK;
  return reason.refuse(
      FLASHMOE_ERROR_UNSUPPORTED, "batch x KV heads is %lld, each with %lld %s: at most %u in all",
      static_cast<long long>(heads), static_cast<long long>(each), what, UINT32_MAX);
}

int32_t choose_threads(const AttentionBackwardProblem& p, const Cut& cut) {
  const int32_t available = cpu::num_threads();
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.seq_q);
  const double of_sinks =
      static_cast<double>(cut.sinks) * rows * 2.0 * static_cast<double>(p.dim_v);
  const double worth = (attention_backward_flops(p) + of_sinks) / kFlopsPerThread;
  const double pieces = static_cast<double>(cut.pieces());
  const double most = worth < pieces ? worth : pieces;
  if (most >= available) return available;
  return most < 1 ? 1 : static_cast<int32_t>(most);
}

flashmoe_status plan(const AttentionBackwardProblem& p, Plan* plan, const Reason& reason) {
  cpu::Isa isa;
  FLASHMOE_TRY(cpu::chosen_isa(&isa, reason));
  const AttentionBackwardKernel& kernel = kernel_for(isa, p.q.dtype);
  const Cut cut(p, kernel);
  FLASHMOE_TRY(check_count("tiles of keys", cut.heads, cut.tiles, reason));
  FLASHMOE_TRY(check_count("blocks of rows", cut.heads, cut.blocks, reason));
  if (cut.pieces() > UINT32_MAX) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%lld tiles of keys and %lld sinks: at most %u in all",
        static_cast<long long>(cut.tiles_in_all), static_cast<long long>(cut.sinks), UINT32_MAX);
  }
  const int32_t threads = choose_threads(p, cut);
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "attention_backward_cpu_%s_%s_d%d_dv%d", kernel.isa,
                dtype_name(p.q.dtype), static_cast<int>(p.dim), static_cast<int>(p.dim_v));
  plan->set_isa(kernel.isa);
  flashmoe_launch& launch = plan->add_launch(
      name, &kernel, p.device, static_cast<uint32_t>(cut.pieces()), static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(cut.block_rows);
  launch.tile_n = static_cast<int32_t>(cut.tile_keys);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  launch.stages = 1;
  // The core promises 16-byte alignment; the kernels want whole cache lines.
  const uint64_t per_thread = whole_lines(kernel.scratch_bytes(p));
  const uint64_t shared = Shared(p, kernel, cut).bytes() + kCacheLine;
  plan->info.workspace_bytes = shared + static_cast<uint64_t>(threads) * per_thread;
  plan->room = {shared + per_thread, per_thread};
  return FLASHMOE_OK;
}

struct Launch {
  const AttentionBackwardProblem& problem;
  const AttentionBackwardKernel& kernel;
  Cut cut;
  unsigned char* dq_sums;  // nullptr: there are none
  uint64_t dq_sums_bytes;  // of a block
  Turn* turns;             // [heads][blocks]: tiles that have added their part
  unsigned char* scratch;
  uint64_t scratch_bytes;  // per thread
  std::atomic<int64_t> next{0};
};

// The tiles that contribute to a block of rows, from the first to the last. Neither decreases with
// the block. Of a block that sees no key it is one tile, which writes its zeros.
struct TilesOfBlock {
  int64_t first;
  int64_t last;

  TilesOfBlock(const Launch& launch, int64_t block) {
    const AttentionBackwardProblem& p = launch.problem;
    const Cut& cut = launch.cut;
    const int64_t group = p.heads_q / p.heads_kv;
    const int64_t row = block * cut.block_rows;
    const int64_t end_row = row + cut.block_rows < cut.rows ? row + cut.block_rows : cut.rows;
    first = first_key(p, row / group) / cut.tile_keys;
    if (first > cut.tiles - 1) first = cut.tiles - 1;
    last = (end_key(p, (end_row - 1) / group) - 1) / cut.tile_keys;
    if (last < first) last = first;
  }
};

// Until the tiles before this one have added their part.
void wait_for_turn(const Turn& turn, int32_t before) {
  constexpr int kSpins = 1 << 10;
  for (int i = 0; turn.load(std::memory_order_acquire) != before; ++i) {
    if (i >= kSpins) std::this_thread::yield();
  }
}

void add_dq(Launch* launch, const AttentionBackwardStep& step, int64_t head, int64_t block,
            int64_t tile, const TilesOfBlock& tiles, void* scratch) {
  const bool first = tile == tiles.first;
  const bool last = tile == tiles.last;
  if (first && last) {
    launch->kernel.add_dq(launch->problem, step, scratch, nullptr, first, last);
    return;
  }
  const int64_t index = head * launch->cut.blocks + block;
  Turn& turn = launch->turns[index];
  wait_for_turn(turn, static_cast<int32_t>(tile - tiles.first));
  launch->kernel.add_dq(launch->problem, step, scratch,
                        launch->dq_sums + static_cast<uint64_t>(index) * launch->dq_sums_bytes,
                        first, last);
  turn.store(static_cast<int32_t>(tile - tiles.first + 1), std::memory_order_release);
}

void work_on_tile(Launch* launch, int64_t index, void* scratch) {
  const AttentionBackwardProblem& p = launch->problem;
  const AttentionBackwardKernel& kernel = launch->kernel;
  const Cut& cut = launch->cut;
  const int64_t head = index % cut.heads;
  const int64_t tile = index / cut.heads;
  AttentionBackwardStep step = {};
  step.rows.batch = head / p.heads_kv;
  step.rows.kv_head = head % p.heads_kv;
  step.first_key = tile * cut.tile_keys;
  const int64_t keys = p.seq_k - step.first_key;
  step.keys = keys < cut.tile_keys ? keys : cut.tile_keys;
  kernel.begin_keys(p, step, scratch);
  for (int64_t block = 0; block < cut.blocks; ++block) {
    const TilesOfBlock tiles(*launch, block);
    if (tile > tiles.last) continue;
    if (tile < tiles.first) break;
    step.rows.first_row = block * cut.block_rows;
    const int64_t rows = cut.rows - step.rows.first_row;
    step.rows.rows = rows < cut.block_rows ? rows : cut.block_rows;
    kernel.add_rows(p, step, scratch);
    if (p.dq.data != nullptr) add_dq(launch, step, head, block, tile, tiles, scratch);
  }
  kernel.end_keys(p, step, scratch);
}

void work(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  void* scratch = launch.scratch + static_cast<uint64_t>(worker) * launch.scratch_bytes;
  const Cut& cut = launch.cut;
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= cut.pieces()) return;
    if (index < cut.tiles_in_all) {
      work_on_tile(&launch, index, scratch);
    } else {
      launch.kernel.write_dsink(launch.problem, index - cut.tiles_in_all);
    }
  }
}

flashmoe_status launch(const AttentionBackwardProblem& p, const Plan& plan, void* workspace,
                       void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  const AttentionBackwardKernel& kernel =
      *static_cast<const AttentionBackwardKernel*>(plan.entries[0]);
  const Cut cut(p, kernel);
  const Shared shared(p, kernel, cut);
  auto* const base =
      reinterpret_cast<unsigned char*>(whole_lines(reinterpret_cast<uintptr_t>(workspace)));
  auto* const turns = reinterpret_cast<Turn*>(base + shared.dq_sums);
  if (shared.turns > 0) {
    for (int64_t i = 0; i < cut.heads * cut.blocks; ++i) new (&turns[i]) Turn(0);
  }
  Launch launch = {p,
                   kernel,
                   cut,
                   base,
                   whole_lines(kernel.dq_sums_bytes(p)),
                   turns,
                   base + shared.bytes(),
                   whole_lines(kernel.scratch_bytes(p))};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const AttentionBackwardFamily kCpuAttentionBackward = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
