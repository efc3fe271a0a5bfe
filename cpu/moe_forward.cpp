// The layer, forward, on the CPU, in three stages that share one workspace:
//
//   up       a[slot] = act(gate) * up         rows of x gathered by the pairs
//   down     y[slot] = w_down a[slot] + bias
//   combine  out[t]  = sum over k of weights[t, k] * y[slots[t, k]]
#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/moe.h"
#include "cpu/moe_tiles.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = MoeForwardProblem;

constexpr int64_t kTokensPerSum = 16;  // tokens per thread at a time
constexpr double kBytesPerThread = 1 << 17;

// Built on a null base it only measures.
struct Workspace {
  unsigned char* tiles;
  unsigned char* a;        // [pairs, inner]
  unsigned char* y;        // [pairs, hidden]
  unsigned char* scratch;  // the first thread's
  uint64_t bytes;

  Workspace(void* base, const Problem& p, const MoeKernel& kernel, int32_t threads) {
    Carver carver(base);
    const uint64_t pairs = static_cast<uint64_t>(p.tokens * p.top_k);
    const uint64_t element = static_cast<uint64_t>(dtype_bytes(p.x.dtype));
    tiles = carver.take(ExpertTiles::bytes(p.experts));
    a = carver.take(pairs * static_cast<uint64_t>(p.inner) * element);
    y = carver.take(pairs * static_cast<uint64_t>(p.hidden) * element);
    scratch = carver.take(static_cast<uint64_t>(threads) * ThreadScratch::bytes(kernel));
    bytes = carver.bytes();
  }
};

Tiling up_tiling(const Problem& p, const MoeKernel& kernel, int32_t available) {
  return choose_tiling(kernel,
                       {p.tokens * p.top_k, p.tokens == 1, p.experts, p.hidden, p.inner,
                        p.gated ? 2 : 1, p.up.column_stride != 1},
                       available);
}

Tiling down_tiling(const Problem& p, const MoeKernel& kernel, int32_t available) {
  return choose_tiling(kernel,
                       {p.tokens * p.top_k, p.tokens == 1, p.experts, p.inner, p.hidden, 1,
                        p.down.column_stride != 1},
                       available);
}

int32_t combine_threads(const Problem& p, int32_t available) {
  const double bytes = static_cast<double>(p.tokens * p.top_k) * static_cast<double>(p.hidden) *
                       static_cast<double>(dtype_bytes(p.x.dtype));
  return static_cast<int32_t>(
      std::clamp(bytes / kBytesPerThread, 1.0, static_cast<double>(available)));
}

struct Launch {
  const Problem& p;
  const MoeKernel& kernel;
  const Workspace& workspace;
  ExpertTiles experts;
  Tiling tiling;
  int64_t tiles;
  MoeActivation activation;
  bool large_cache;
  Counter next;

  // Bytes of an element of x, and of the rows in the workspace.
  int64_t element() const { return dtype_bytes(p.x.dtype); }
  int64_t pairs() const { return p.tokens * p.top_k; }
};

// One thread's part of a stage of products.
struct Worker {
  const Launch& launch;
  const ThreadScratch memory;

  Worker(const Launch& the_launch, int32_t worker)
      : launch(the_launch),
        memory(launch.workspace.scratch +
                   static_cast<size_t>(worker) * ThreadScratch::bytes(launch.kernel),
               launch.kernel) {}

  MoeTile tile_of(int64_t depth, int64_t columns, int64_t column) const {
    MoeTile tile = {};
    tile.x = memory.x;
    tile.fetch_ahead = launch.large_cache;
    tile.depth = depth;
    tile.columns = std::min(launch.tiling.tile_columns, columns - column);
    return tile;
  }

  void up(const ExpertTiles::Tile& rows) const {
    const Problem& p = launch.p;
    const int64_t element = launch.element();
    const int64_t column = rows.column_tile * launch.tiling.tile_columns;
    MoeTile tile = tile_of(p.hidden, p.inner, column);
    tile.matrices = p.gated ? 2 : 1;
    if (p.gated) tile.weights[0] = weights_of(p.gate, p.gate_bias, rows.expert, column);
    tile.weights[p.gated ? 1 : 0] = weights_of(p.up, p.up_bias, rows.expert, column);
    tile.activation = &launch.activation;
    tile.out_stride = p.inner;
    tile.before_stride = p.pre_activation.row_stride;
    for (int64_t slot = rows.begin; slot < rows.end;) {
      const int64_t end = gather(slot, rows.end, &tile);
      if (tile.rows == 0) {
        ++slot;
        continue;
      }
      tile.out = launch.workspace.a + (slot * p.inner + column) * element;
      if (p.pre_activation.data != nullptr) {
        const int64_t before_element = dtype_bytes(p.pre_activation.dtype);
        char* before = static_cast<char*>(p.pre_activation.data) +
                       (slot * p.pre_activation.row_stride + column) * before_element;
        tile.before[0] = before;
        tile.before[1] = before + p.inner * before_element;
      }
      launch.kernel.multiply(tile, memory.scratch);
      slot = end;
    }
  }

  // Gathers the rows of x from `slot` on with valid pairs, and returns their end.
  int64_t gather(int64_t slot, int64_t end, MoeTile* tile) const {
    const Problem& p = launch.p;
    const char* data = static_cast<const char*>(p.x.data);
    const int64_t first = slot;
    for (; slot < end; ++slot) {
      const int64_t pair = p.pairs[slot];
      if (pair < 0 || pair >= launch.pairs()) break;
      memory.x[slot - first] = data + pair / p.top_k * p.x.row_stride * launch.element();
      memory.scale[slot - first] = weight_of(p, pair);
    }
    tile->rows = slot - first;
    tile->scale = p.weight_on_input ? memory.scale : nullptr;
    return slot;
  }

  void down(const ExpertTiles::Tile& rows) const {
    const Problem& p = launch.p;
    const int64_t element = launch.element();
    const int64_t column = rows.column_tile * launch.tiling.tile_columns;
    MoeTile tile = tile_of(p.inner, p.hidden, column);
    tile.rows = rows.end - rows.begin;
    for (int64_t r = 0; r < tile.rows; ++r) {
      memory.x[r] = launch.workspace.a + (rows.begin + r) * p.inner * element;
    }
    tile.matrices = 1;
    tile.weights[0] = weights_of(p.down, p.down_bias, rows.expert, column);
    tile.out = launch.workspace.y + (rows.begin * p.hidden + column) * element;
    tile.out_stride = p.hidden;
    launch.kernel.multiply(tile, memory.scratch);
  }
};

template <void (Worker::*kStage)(const ExpertTiles::Tile&) const>
void multiply(void* context, int32_t index) {
  Launch& launch = *static_cast<Launch*>(context);
  const Worker worker(launch, index);
  for (int64_t i; (i = launch.next.take()) < launch.tiles;) {
    (worker.*kStage)(launch.experts.find(i, launch.tiling.column_tiles));
  }
}

void combine(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  const Problem& p = launch.p;
  const int64_t first_slot = launch.experts.first_row();
  const int64_t end_slot = launch.experts.end_row();
  for (int64_t i; (i = launch.next.take()) * kTokensPerSum < p.tokens;) {
    const int64_t end = std::min((i + 1) * kTokensPerSum, p.tokens);
    for (int64_t t = i * kTokensPerSum; t < end; ++t) {
      MoeSum sum = {};
      double weights[kMaxTopK];
      for (int32_t k = 0; k < p.top_k; ++k) {
        const int64_t pair = t * p.top_k + k;
        weights[k] = weight_of(p, pair);
        const int64_t slot = p.slots[pair];
        // Also false if the routing contradicts itself: then nothing was computed there.
        if (slot < first_slot || slot >= end_slot || p.pairs[slot] != pair) continue;
        sum.y[k] = launch.workspace.y + slot * p.hidden * launch.element();
      }
      sum.weights = p.weight_on_input ? nullptr : weights;
      sum.top_k = p.top_k;
      sum.hidden = p.hidden;
      sum.out = static_cast<char*>(p.out.data) + t * p.out.row_stride * dtype_bytes(p.out.dtype);
      launch.kernel.add(sum);
    }
  }
}

}  // namespace

flashmoe_status plan_forward(const MoeForwardProblem& p, Plan* plan, const Reason& reason) {
  Isa isa;
  FLASHMOE_TRY(chosen_isa(&isa, reason));
  const MoeKernel& kernel = moe_kernel_for(isa, p.x.dtype);
  const int32_t available = num_threads();
  const Tiling up = up_tiling(p, kernel, available);
  const Tiling down = down_tiling(p, kernel, available);
  plan->set_isa(kernel.isa);
  add_product("moe_up", kernel, p.x.dtype, up, plan);
  add_product("moe_down", kernel, p.x.dtype, down, plan);
  char text[sizeof flashmoe_launch::kernel];
  std::snprintf(text, sizeof text, "moe_combine_cpu_%s_%s", kernel.isa, dtype_name(p.x.dtype));
  flashmoe_launch& launch = add_launch(text, &kernel, ceil_div(p.tokens, kTokensPerSum),
                                       combine_threads(p, available), plan);
  launch.tile_n = static_cast<int32_t>(kTokensPerSum);
  plan->info.workspace_bytes =
      Workspace(nullptr, p, kernel, std::max(up.threads, down.threads)).bytes;
  plan->room = {Workspace(nullptr, p, kernel, 1).bytes, ThreadScratch::bytes(kernel)};
  return FLASHMOE_OK;
}

flashmoe_status launch_forward(const MoeForwardProblem& p, const Plan& plan, void* memory,
                               void* /*stream*/) {
  const MoeKernel& kernel = *static_cast<const MoeKernel*>(plan.entries[0]);
  const flashmoe_launch* const planned = plan.info.launches;
  const int32_t threads[] = {static_cast<int32_t>(planned[0].block[0]),
                             static_cast<int32_t>(planned[1].block[0]),
                             static_cast<int32_t>(planned[2].block[0])};
  const Workspace workspace(memory, p, kernel, std::max(threads[0], threads[1]));
  Launch launch = {p,
                   kernel,
                   workspace,
                   ExpertTiles(workspace.tiles, p.experts),
                   {},
                   0,
                   {p.activation, p.alpha, p.limit, p.up_offset},
                   large_cache(),
                   {}};
  launch.experts.from_offsets(p.offsets, p.tokens * p.top_k);
  const auto tile = [&launch](int64_t columns, const flashmoe_launch& product) {
    launch.tiling.tile_columns = product.tile_m;
    launch.tiling.column_tiles = ceil_div(columns, product.tile_m);
    launch.tiles = launch.experts.cut(product.tile_n) * launch.tiling.column_tiles;
    launch.next.reset();
  };
  tile(p.inner, planned[0]);
  parallel_run(threads[0], multiply<&Worker::up>, &launch);
  tile(p.hidden, planned[1]);
  parallel_run(threads[1], multiply<&Worker::down>, &launch);
  launch.next.reset();
  parallel_run(threads[2], combine, &launch);
  for (int i = 0; i < plan.info.launch_count; ++i) record_launch(planned[i]);
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
