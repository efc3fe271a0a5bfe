// The grouped product, backward, on the CPU, in two stages:
//
//   dx   dx = w^T dout, and zeros in rows that no expert has
//   dw   dw = sum of dout x^T and dbias = sum of dout over an expert's rows
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/moe.h"
#include "cpu/moe_gradients.h"
#include "cpu/moe_tiles.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = GroupedProductBackwardProblem;

// The most rows, over all experts.
int64_t most_rows(const Problem& p) { return p.counts != nullptr ? p.rows * p.experts : p.rows; }
bool wants_dw(const Problem& p) { return p.dw.data != nullptr || p.dbias.data != nullptr; }

struct Workspace {
  unsigned char* tiles;
  int32_t* first;  // [experts + 1] first rows in the lists below
  const void** x;  // pointers to the rows of each expert, expert after expert
  const void** dout;
  unsigned char* scratch;  // the first thread's
  uint64_t bytes;

  Workspace(void* base, const Problem& p, const MoeKernel& kernel, int32_t threads) {
    Carver carver(base);
    const uint64_t pointers = wants_dw(p) ? static_cast<uint64_t>(most_rows(p)) * sizeof(void*) : 0;
    tiles = carver.take(ExpertTiles::bytes(p.experts));
    first = reinterpret_cast<int32_t*>(
        carver.take((static_cast<uint64_t>(p.experts) + 1) * sizeof(int32_t)));
    x = reinterpret_cast<const void**>(carver.take(p.dw.data != nullptr ? pointers : 0));
    dout = reinterpret_cast<const void**>(carver.take(pointers));
    scratch = carver.take(static_cast<uint64_t>(threads) * ThreadScratch::bytes(kernel));
    bytes = carver.bytes();
  }
};

WeightGradients gradients_of(const Problem& p, const Workspace& w) {
  WeightGradients gradients(p.experts, dtype_bytes(p.dout.dtype), p.accumulate);
  gradients.add_matrix(p.dw, w.dout, 0, p.out_columns, w.x, p.columns);
  gradients.add_bias(p.dbias, w.dout, 0, p.out_columns, nullptr);
  return gradients;
}

struct Launch {
  const Problem& p;
  const MoeKernel& kernel;
  const Workspace& workspace;
  const WeightGradients* gradients;
  ExpertTiles experts;
  int64_t tile_columns;
  int64_t column_tiles;
  int64_t tiles;
  bool large_cache;
  Counter next;

  ThreadScratch memory(int32_t worker) const {
    return ThreadScratch(
        workspace.scratch + static_cast<size_t>(worker) * ThreadScratch::bytes(kernel), kernel);
  }
};

void multiply(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  const Problem& p = launch.p;
  const int64_t element = dtype_bytes(p.dout.dtype);
  const ThreadScratch memory = launch.memory(worker);
  ExpertMatrix turned = p.w;
  std::swap(turned.row_stride, turned.column_stride);
  for (int64_t i; (i = launch.next.take()) < launch.tiles;) {
    const ExpertTiles::Tile at = launch.experts.find(i, launch.column_tiles);
    const int64_t column = at.column_tile * launch.tile_columns;
    const char* dout = static_cast<const char*>(p.dout.data) +
                       (at.expert * p.dout.expert_stride + at.begin * p.dout.row_stride) * element;
    MoeTile tile = {};
    tile.x = memory.x;
    tile.fetch_ahead = launch.large_cache;
    tile.rows = at.end - at.begin;
    for (int64_t r = 0; r < tile.rows; ++r) memory.x[r] = dout + r * p.dout.row_stride * element;
    tile.depth = p.out_columns;
    tile.columns = std::min(launch.tile_columns, p.columns - column);
    tile.matrices = 1;
    tile.weights[0] = weights_of(turned, {}, at.expert, column);
    tile.out = static_cast<char*>(p.dx.data) +
               (at.expert * p.dx.expert_stride + at.begin * p.dx.row_stride + column) *
                   dtype_bytes(p.dx.dtype);
    tile.out_stride = p.dx.row_stride;
    tile.out_is_fp32 = p.dx.dtype == Dtype::kFloat32;
    tile.adds = p.accumulate;
    launch.kernel.multiply(tile, memory.scratch);
  }
}

void weight_gradients(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  const ThreadScratch memory = launch.memory(worker);
  for (int64_t i; (i = launch.next.take()) < launch.gradients->units();) {
    launch.gradients->compute(i, launch.kernel, launch.workspace.first, memory.scratch);
  }
}

void zero_rows(const Problem& p, int64_t expert, int64_t begin, int64_t end) {
  const int64_t element = dtype_bytes(p.dx.dtype);
  for (int64_t r = begin; r < end; ++r) {
    std::memset(static_cast<char*>(p.dx.data) +
                    (expert * p.dx.expert_stride + r * p.dx.row_stride) * element,
                0, static_cast<size_t>(p.columns * element));
  }
}

// Zeroes rows that belong to no expert.
void zero_rest(const Problem& p, const ExpertTiles& experts) {
  if (p.counts == nullptr) {
    zero_rows(p, 0, 0, experts.first_row());
    zero_rows(p, 0, experts.end_row(), p.rows);
    return;
  }
  for (int32_t e = 0; e < p.experts; ++e) zero_rows(p, e, experts.end(e), p.rows);
}

void list_rows(const Launch& launch) {
  const Problem& p = launch.p;
  const Workspace& w = launch.workspace;
  const int64_t element = dtype_bytes(p.dout.dtype);
  const auto at = [element](const TokenRows<const void>& rows, int64_t e, int64_t r) {
    return static_cast<const char*>(rows.data) +
           (e * rows.expert_stride + r * rows.row_stride) * element;
  };
  int32_t row = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    w.first[e] = row;
    for (int64_t r = launch.experts.begin(e); r < launch.experts.end(e); ++r, ++row) {
      w.dout[row] = at(p.dout, e, r);
      if (p.dw.data != nullptr) w.x[row] = at(p.x, e, r);
    }
  }
  w.first[p.experts] = row;
}

}  // namespace

flashmoe_status plan_grouped_product_backward(const GroupedProductBackwardProblem& p, Plan* plan,
                                              const Reason& reason) {
  Isa isa;
  FLASHMOE_TRY(chosen_isa(&isa, reason));
  const MoeKernel& kernel = moe_kernel_for(isa, p.dout.dtype);
  const int64_t rows = most_rows(p);
  if (rows > INT32_MAX) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%d experts have room for %lld rows each: at most 2^31 - 1 in all",
                         p.experts, static_cast<long long>(p.rows));
  }
  int32_t threads = 1;
  plan->set_isa(kernel.isa);
  if (p.dx.data != nullptr) {
    const Tiling tiling = choose_tiling(
        kernel, {rows, rows <= 1, p.experts, p.out_columns, p.columns, 1, p.w.row_stride != 1},
        num_threads());
    add_product("grouped_product_backward_dx", kernel, p.dout.dtype, tiling, plan);
    threads = tiling.threads;
  }
  if (wants_dw(p)) {
    WeightGradients gradients = gradients_of(p, Workspace(nullptr, p, kernel, 1));
    const int32_t wanted = threads_for(
        2.0 * static_cast<double>(rows + p.experts) * gradients.elements() / kFlopsToWake,
        INT32_MAX);
    const MoeTileSize size = gradients.tile_size(kernel, wanted);
    gradients.cut(size);
    char text[sizeof flashmoe_launch::kernel];
    std::snprintf(text, sizeof text, "grouped_product_backward_dw_cpu_%s_%s", kernel.isa,
                  dtype_name(p.dout.dtype));
    flashmoe_launch& launch = add_launch(text, &kernel, gradients.units(), wanted, plan);
    launch.tile_m = static_cast<int32_t>(size.rows);
    launch.tile_n = static_cast<int32_t>(size.columns);
    launch.stages = 1;
    threads = std::max(threads, wanted);
  }
  plan->info.workspace_bytes = Workspace(nullptr, p, kernel, threads).bytes;
  plan->room = {Workspace(nullptr, p, kernel, 1).bytes, ThreadScratch::bytes(kernel)};
  return FLASHMOE_OK;
}

flashmoe_status launch_grouped_product_backward(const GroupedProductBackwardProblem& p,
                                                const Plan& plan, void* memory, void* /*stream*/) {
  // If the wanted gradients have no rows, and so maybe no memory, nothing is planned.
  if (plan.info.launch_count == 0) return FLASHMOE_OK;
  const MoeKernel& kernel = *static_cast<const MoeKernel*>(plan.entries[0]);
  int32_t threads = 1;
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    threads = std::max(threads, static_cast<int32_t>(plan.info.launches[i].block[0]));
  }
  const Workspace workspace(memory, p, kernel, threads);
  WeightGradients gradients = gradients_of(p, workspace);
  Launch launch = {p, kernel, workspace, &gradients,    ExpertTiles(workspace.tiles, p.experts),
                   0, 0,      0,         large_cache(), {}};
  if (p.counts != nullptr) {
    launch.experts.from_counts(p.counts, p.rows);
  } else {
    launch.experts.from_offsets(p.offsets, p.rows);
  }
  const flashmoe_launch* planned = plan.info.launches;
  if (p.dx.data != nullptr) {
    if (!p.accumulate) zero_rest(p, launch.experts);
    launch.tile_columns = planned->tile_m;
    launch.column_tiles = ceil_div(p.columns, planned->tile_m);
    launch.tiles = launch.experts.cut(planned->tile_n) * launch.column_tiles;
    parallel_run(static_cast<int32_t>(planned->block[0]), multiply, &launch);
    record_launch(*planned++);
  }
  if (wants_dw(p)) {
    list_rows(launch);
    gradients.cut({planned->tile_m, planned->tile_n});
    launch.next.reset();
    parallel_run(static_cast<int32_t>(planned->block[0]), weight_gradients, &launch);
    record_launch(*planned);
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
