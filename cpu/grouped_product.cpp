// The grouped product on the CPU.
#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/moe.h"
#include "cpu/moe_tiles.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = GroupedProductProblem;

struct Workspace {
  unsigned char* tiles;
  unsigned char* scratch;  // the first thread's
  uint64_t bytes;

  Workspace(void* base, const Problem& p, const MoeKernel& kernel, int32_t threads) {
    Carver carver(base);
    tiles = carver.take(ExpertTiles::bytes(p.experts));
    scratch = carver.take(static_cast<uint64_t>(threads) * ThreadScratch::bytes(kernel));
    bytes = carver.bytes();
  }
};

// The most rows, over all experts.
int64_t most_rows(const Problem& p) { return p.counts != nullptr ? p.rows * p.experts : p.rows; }

struct Launch {
  const Problem& p;
  const MoeKernel& kernel;
  const Workspace& workspace;
  ExpertTiles experts;
  int64_t tile_columns;
  int64_t column_tiles;
  int64_t tiles;
  bool large_cache;
  Counter next;
};

void multiply(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  const Problem& p = launch.p;
  const int64_t element = dtype_bytes(p.x.dtype);
  const int64_t out_element = dtype_bytes(p.out.dtype);
  const ThreadScratch memory(
      launch.workspace.scratch + static_cast<size_t>(worker) * ThreadScratch::bytes(launch.kernel),
      launch.kernel);
  for (int64_t i; (i = launch.next.take()) < launch.tiles;) {
    const ExpertTiles::Tile at = launch.experts.find(i, launch.column_tiles);
    const int64_t column = at.column_tile * launch.tile_columns;
    const char* x = static_cast<const char*>(p.x.data) +
                    (at.expert * p.x.expert_stride + at.begin * p.x.row_stride) * element;
    MoeTile tile = {};
    tile.x = memory.x;
    tile.fetch_ahead = launch.large_cache;
    tile.rows = at.end - at.begin;
    for (int64_t r = 0; r < tile.rows; ++r) memory.x[r] = x + r * p.x.row_stride * element;
    tile.depth = p.columns;
    tile.columns = std::min(launch.tile_columns, p.out_columns - column);
    tile.matrices = 1;
    tile.weights[0] = weights_of(p.w, p.bias, at.expert, column);
    tile.out =
        static_cast<char*>(p.out.data) +
        (at.expert * p.out.expert_stride + at.begin * p.out.row_stride + column) * out_element;
    tile.out_stride = p.out.row_stride;
    launch.kernel.multiply(tile, memory.scratch);
  }
}

}  // namespace

flashmoe_status plan_grouped_product(const GroupedProductProblem& p, Plan* plan,
                                     const Reason& reason) {
  Isa isa;
  FLASHMOE_TRY(chosen_isa(&isa, reason));
  const MoeKernel& kernel = moe_kernel_for(isa, p.x.dtype);
  const int64_t rows = most_rows(p);
  const Tiling tiling = choose_tiling(
      kernel, {rows, rows <= 1, p.experts, p.columns, p.out_columns, 1, p.w.column_stride != 1},
      num_threads());
  plan->set_isa(kernel.isa);
  add_product("grouped_product", kernel, p.x.dtype, tiling, plan);
  plan->info.workspace_bytes = Workspace(nullptr, p, kernel, tiling.threads).bytes;
  plan->room = {Workspace(nullptr, p, kernel, 1).bytes, ThreadScratch::bytes(kernel)};
  return FLASHMOE_OK;
}

flashmoe_status launch_grouped_product(const GroupedProductProblem& p, const Plan& plan,
                                       void* memory, void* /*stream*/) {
  const MoeKernel& kernel = *static_cast<const MoeKernel*>(plan.entries[0]);
  const flashmoe_launch& planned = plan.info.launches[0];
  const int32_t threads = static_cast<int32_t>(planned.block[0]);
  const Workspace workspace(memory, p, kernel, threads);
  Launch launch = {p,
                   kernel,
                   workspace,
                   ExpertTiles(workspace.tiles, p.experts),
                   planned.tile_m,
                   ceil_div(p.out_columns, planned.tile_m),
                   0,
                   large_cache(),
                   {}};
  if (p.counts != nullptr) {
    launch.experts.from_counts(p.counts, p.rows);
  } else {
    launch.experts.from_offsets(p.offsets, p.rows);
  }
  launch.tiles = launch.experts.cut(planned.tile_n) * launch.column_tiles;
  parallel_run(threads, multiply, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
