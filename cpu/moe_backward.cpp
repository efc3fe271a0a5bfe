// The layer, backward, on the CPU. Rows are pairs that have a slot, in the order of slots; stages
// that no wanted gradient needs are left out, and all share one workspace:
//
//   up          g, u  = as the forward has them, where it did not save them
//   down        da    = w_down^T dout              rows of dout gathered by the pairs
//   activation  dz    = weight * da * slope        the gradients of g and u, in w_gate_up's order;
//               a     = weight * act(g) * up       and the gradient of the weight, <da, a>
//   dx          dx_k  = w_gate_up^T dz
//   dw          dw_gate_up = sum of dz x^T, dw_down = sum of dout a^T, and biases' likewise
//   combine     dx[t] = sum over k of dx_k, and dweights
//
// With weight_on_input the weight multiplies x in the forward: then dz is without it, dw_gate_up is
// of a dz that has it, and what has it is the sum over k.
#include <algorithm>
#include <cstdio>

#include "core/launch.h"
#include "cpu/moe.h"
#include "cpu/moe_gradients.h"
#include "cpu/moe_tiles.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = MoeBackwardProblem;

constexpr int64_t kRowsPerPiece = 16;  // of the stages that go row by row
constexpr int64_t kTokensPerPiece = 16;

// What the wanted gradients need.
struct Needs {
  bool up_weights;
  bool dx_rows;
  bool dz;
  bool scaled_dz;
  bool da;
  bool a;
  bool dw;
  bool combine;

  explicit Needs(const Problem& p) {
    const bool on_input = p.layer.weight_on_input;
    const bool up_biases = p.db_gate_up.data != nullptr || p.db_up.data != nullptr;
    up_weights = p.dw_gate_up.data != nullptr || p.dw_up.data != nullptr;
    dx_rows = p.dx.data != nullptr || (p.dweights != nullptr && on_input);
    dz = dx_rows || up_biases || (up_weights && !on_input);
    scaled_dz = up_weights && on_input;
    da = dz || scaled_dz || p.dweights != nullptr;
    a = p.dw_down.data != nullptr;
    dw = up_weights || up_biases || a || p.db_down.data != nullptr;
    combine = p.dx.data != nullptr || p.dweights != nullptr;
  }

  bool activation() const { return da || a; }
  bool up(const Problem& p) const { return activation() && p.pre_activation.data == nullptr; }
};

int64_t pairs_of(const Problem& p) { return p.layer.tokens * p.layer.top_k; }
int64_t element_of(const Problem& p) { return dtype_bytes(p.layer.x.dtype); }
// Of g and u together.
int64_t width_of(const Problem& p) { return p.layer.gated ? 2 * p.layer.inner : p.layer.inner; }

// Gate and up are two matrices, whose parts of dx_k are added up in fp32.
bool in_two_parts(const Problem& p) { return p.order == FLASHMOE_MOE_SEPARATE; }

bool dx_rows_are_fp32(const Problem& p) {
  return in_two_parts(p) || p.layer.x.dtype == Dtype::kFloat32;
}

// Built on a null base it only measures. What no stage needs has no bytes.
struct Workspace {
  unsigned char* tiles;
  int32_t* first;  // [experts + 1] rows
  int32_t* slots;  // [pairs] of each row
  int32_t* rows;   // [pairs] of each slot, or -1
  float* weights;  // by row, from here on
  float* dots;     // <da, a>
  const void** x;  // pointers
  const void** dout;
  const void** before[2];  // g and u
  const void** dz_rows;
  const void** scaled_rows;
  const void** a_rows;
  unsigned char* computed;   // [rows, width] g, then u
  float* da;                 // [rows, inner]
  unsigned char* dz;         // [rows, width]
  unsigned char* scaled_dz;  // [rows, width]
  unsigned char* a;          // [rows, inner]
  unsigned char* dx;         // [rows, hidden]
  unsigned char* scratch;    // of the first thread
  uint64_t bytes;

  Workspace(void* base, const Problem& p, const MoeKernel& kernel, int32_t threads) {
    Carver carver(base);
    const Needs needs(p);
    const auto pairs = static_cast<uint64_t>(pairs_of(p));
    const auto element = static_cast<uint64_t>(element_of(p));
    const auto inner = static_cast<uint64_t>(p.layer.inner);
    const auto width = static_cast<uint64_t>(width_of(p));
    const auto hidden = static_cast<uint64_t>(p.layer.hidden);
    const auto numbers = [&] { return carver.take(pairs * sizeof(int32_t)); };
    const auto pointers = [&](bool needed) {
      return reinterpret_cast<const void**>(carver.take(needed ? pairs * sizeof(void*) : 0));
    };
    const auto matrix = [&](bool needed, uint64_t columns, uint64_t bytes_each) {
      return carver.take(needed ? pairs * columns * bytes_each : 0);
    };
    tiles = carver.take(ExpertTiles::bytes(p.layer.experts));
    first = reinterpret_cast<int32_t*>(
        carver.take((static_cast<uint64_t>(p.layer.experts) + 1) * sizeof(int32_t)));
    slots = reinterpret_cast<int32_t*>(numbers());
    rows = reinterpret_cast<int32_t*>(numbers());
    weights = reinterpret_cast<float*>(numbers());
    dots = reinterpret_cast<float*>(numbers());
    x = pointers(true);
    dout = pointers(true);
    before[0] = pointers(needs.activation());
    before[1] = pointers(needs.activation() && p.layer.gated);
    dz_rows = pointers(needs.dz);
    scaled_rows = pointers(needs.scaled_dz);
    a_rows = pointers(needs.a);
    computed = matrix(needs.up(p), width, element);
    da = reinterpret_cast<float*>(matrix(needs.da, inner, sizeof(float)));
    dz = matrix(needs.dz, width, element);
    scaled_dz = matrix(needs.scaled_dz, width, element);
    a = matrix(needs.a, inner, element);
    dx = matrix(needs.dx_rows, hidden, dx_rows_are_fp32(p) ? sizeof(float) : element);
    scratch = carver.take(static_cast<uint64_t>(threads) * ThreadScratch::bytes(kernel));
    bytes = carver.bytes();
  }
};

ProductShape up_shape(const Problem& p) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p),         layer.tokens == 1,          layer.experts, layer.hidden, layer.inner,
          layer.gated ? 2 : 1, layer.up.column_stride != 1};
}

ProductShape down_shape(const Problem& p) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p), layer.tokens == 1,         layer.experts, layer.hidden, layer.inner,
          1,           layer.down.row_stride != 1};
}

ProductShape dx_shape(const Problem& p) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p), layer.tokens == 1,        layer.experts, width_of(p), layer.hidden,
          1,           p.gate_up.row_stride != 1};
}

// An expert's matrix turned round, from column `first` on.
MoeWeights transposed(ExpertMatrix matrix, int32_t expert, int64_t first) {
  std::swap(matrix.row_stride, matrix.column_stride);
  return weights_of(matrix, {}, expert, first);
}

WeightGradients gradients_of(const Problem& p, const Workspace& w) {
  const MoeForwardProblem& layer = p.layer;
  const bool on_input = layer.weight_on_input;
  const int64_t rows = in_two_parts(p) ? layer.inner : width_of(p);
  WeightGradients gradients(layer.experts, element_of(p), p.accumulate);
  RowPointers dz = on_input ? w.scaled_rows : w.dz_rows;
  gradients.add_matrix(p.dw_gate_up, dz, 0, rows, w.x, layer.hidden);
  gradients.add_matrix(p.dw_up, dz, layer.inner, rows, w.x, layer.hidden);
  gradients.add_matrix(p.dw_down, w.dout, 0, layer.hidden, w.a_rows, layer.inner);
  gradients.add_bias(p.db_gate_up, w.dz_rows, 0, rows, nullptr);
  gradients.add_bias(p.db_up, w.dz_rows, layer.inner, rows, nullptr);
  gradients.add_bias(p.db_down, w.dout, 0, layer.hidden, on_input ? nullptr : w.weights);
  return gradients;
}

struct Launch {
  const Problem& p;
  const MoeKernel& kernel;
  const Workspace& workspace;
  const Needs needs;
  const WeightGradients* gradients;
  ExpertTiles experts;
  int64_t tile_columns;
  int64_t column_tiles;
  int64_t pieces;
  MoeActivation activation;
  bool large_cache;
  Counter next;
};

// The rows, and pointers to what each has. A slot counts where it and its pair agree.
void list_rows(Launch* launch) {
  const Problem& p = launch->p;
  const MoeForwardProblem& layer = p.layer;
  const Workspace& w = launch->workspace;
  const int64_t pairs = pairs_of(p);
  const int64_t element = element_of(p);
  const int64_t width = width_of(p);
  const auto at = [element](const void* data, int64_t place) -> const void* {
    return static_cast<const char*>(data) + place * element;
  };
  std::fill(w.rows, w.rows + pairs, -1);
  launch->experts.from_offsets(layer.offsets, pairs);
  int32_t row = 0;
  for (int32_t e = 0; e < layer.experts; ++e) {
    w.first[e] = row;
    for (int64_t slot = launch->experts.begin(e); slot < launch->experts.end(e); ++slot) {
      const int64_t pair = layer.pairs[slot];
      if (pair < 0 || pair >= pairs || layer.slots[pair] != slot) continue;
      const int64_t token = pair / layer.top_k;
      w.slots[row] = static_cast<int32_t>(slot);
      w.rows[slot] = row;
      w.weights[row] = layer.weights[pair];
      w.x[row] = at(layer.x.data, token * layer.x.row_stride);
      w.dout[row] = at(p.dout.data, token * p.dout.row_stride);
      if (launch->needs.activation()) {
        const void* const before =
            p.pre_activation.data != nullptr
                ? at(p.pre_activation.data, slot * p.pre_activation.row_stride)
                : at(w.computed, row * width);
        w.before[0][row] = before;
        if (layer.gated) w.before[1][row] = at(before, layer.inner);
      }
      if (launch->needs.dz) w.dz_rows[row] = at(w.dz, row * width);
      if (launch->needs.scaled_dz) w.scaled_rows[row] = at(w.scaled_dz, row * width);
      if (launch->needs.a) w.a_rows[row] = at(w.a, row * layer.inner);
      ++row;
    }
  }
  w.first[layer.experts] = row;
  launch->experts.from_offsets(w.first, row);
}

// One thread's part of a stage.
struct Worker {
  const Launch& launch;
  const Problem& p;
  const Workspace& w;
  const ThreadScratch memory;

  Worker(const Launch& the_launch, int32_t worker)
      : launch(the_launch),
        p(the_launch.p),
        w(the_launch.workspace),
        memory(w.scratch + static_cast<size_t>(worker) * ThreadScratch::bytes(launch.kernel),
               launch.kernel) {}

  MoeTile tile_of(const ExpertTiles::Tile& rows, const void* const* x, int64_t depth,
                  int64_t columns) const {
    const int64_t column = rows.column_tile * launch.tile_columns;
    MoeTile tile = {};
    tile.x = x;
    tile.rows = rows.end - rows.begin;
    tile.fetch_ahead = launch.large_cache;
    tile.depth = depth;
    tile.columns = std::min(launch.tile_columns, columns - column);
    tile.matrices = 1;
    return tile;
  }

  // As the forward does.
  void up(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = p.layer;
    const int64_t column = rows.column_tile * launch.tile_columns;
    MoeTile tile = tile_of(rows, w.x + rows.begin, layer.hidden, layer.inner);
    tile.scale = layer.weight_on_input ? w.weights + rows.begin : nullptr;
    tile.matrices = layer.gated ? 2 : 1;
    if (layer.gated) tile.weights[0] = weights_of(layer.gate, layer.gate_bias, rows.expert, column);
    tile.weights[tile.matrices - 1] = weights_of(layer.up, layer.up_bias, rows.expert, column);
    tile.out = w.computed + (rows.begin * width_of(p) + column) * element_of(p);
    tile.out_stride = tile.before_stride = width_of(p);
    if (layer.gated) {
      tile.before[1] = static_cast<unsigned char*>(tile.out) + layer.inner * element_of(p);
    }
    launch.kernel.multiply(tile, memory.scratch);
  }

  void down(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = p.layer;
    const int64_t column = rows.column_tile * launch.tile_columns;
    MoeTile tile = tile_of(rows, w.dout + rows.begin, layer.hidden, layer.inner);
    tile.weights[0] = transposed(layer.down, rows.expert, column);
    tile.out = w.da + rows.begin * layer.inner + column;
    tile.out_stride = layer.inner;
    tile.out_is_fp32 = true;
    launch.kernel.multiply(tile, memory.scratch);
  }

  void dx(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = p.layer;
    const int64_t column = rows.column_tile * launch.tile_columns;
    const bool two = in_two_parts(p);
    MoeTile tile =
        tile_of(rows, w.dz_rows + rows.begin, two ? layer.inner : width_of(p), layer.hidden);
    tile.weights[0] = transposed(p.gate_up, rows.expert, column);
    tile.out_is_fp32 = dx_rows_are_fp32(p);
    const int64_t element = tile.out_is_fp32 ? int64_t{sizeof(float)} : element_of(p);
    tile.out = w.dx + (rows.begin * layer.hidden + column) * element;
    tile.out_stride = layer.hidden;
    launch.kernel.multiply(tile, memory.scratch);
    if (!two) return;
    for (int64_t r = 0; r < tile.rows; ++r) {
      memory.x[r] =
          static_cast<const char*>(w.dz_rows[rows.begin + r]) + layer.inner * element_of(p);
    }
    tile.x = memory.x;
    tile.weights[0] = transposed(layer.up, rows.expert, column);
    tile.adds = true;
    launch.kernel.multiply(tile, memory.scratch);
  }

  void activate(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = p.layer;
    const bool on_input = layer.weight_on_input;
    MoeActivationGradient row = {};
    row.activation = &launch.activation;
    row.inner = layer.inner;
    place_gradients(&row);
    const char* bias = static_cast<const char*>(layer.down_bias.data);
    if (bias != nullptr) {
      bias += rows.expert * layer.down_bias.expert_stride * dtype_bytes(layer.down_bias.dtype);
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      row.before[0] = w.before[0][r];
      row.before[1] = layer.gated ? w.before[1][r] : nullptr;
      row.da = launch.needs.da ? w.da + r * layer.inner : nullptr;
      row.weight = on_input ? 1.0f : w.weights[r];
      row.scale = w.weights[r];
      row.a_out = launch.needs.a ? const_cast<void*>(w.a_rows[r]) : nullptr;
      row.dz = launch.needs.dz ? const_cast<void*>(w.dz_rows[r]) : nullptr;
      row.scaled_dz = launch.needs.scaled_dz ? const_cast<void*>(w.scaled_rows[r]) : nullptr;
      float dot = launch.kernel.differentiate(row);
      if (bias != nullptr && p.dweights != nullptr && !on_input) {
        dot +=
            launch.kernel.dot(w.dout[r], p.dout.dtype, bias, layer.down_bias.dtype, layer.hidden);
      }
      w.dots[r] = dot;
    }
  }

  // In the order of w_gate_up's rows; of two matrices the gate's first.
  void place_gradients(MoeActivationGradient* row) const {
    row->dz_step = 1;
    row->dz_places[1] = p.layer.gated ? p.layer.inner : 0;
    if (p.order == FLASHMOE_MOE_UP_GATE) {
      std::swap(row->dz_places[0], row->dz_places[1]);
    } else if (p.order == FLASHMOE_MOE_INTERLEAVED) {
      row->dz_places[1] = 1;
      row->dz_step = 2;
    }
  }

  void combine(int64_t first_token, int64_t end_token) const {
    const MoeForwardProblem& layer = p.layer;
    const bool on_input = layer.weight_on_input;
    const bool is_fp32 = dx_rows_are_fp32(p);
    const int64_t element = is_fp32 ? int64_t{sizeof(float)} : element_of(p);
    const int64_t pairs = pairs_of(p);
    for (int64_t t = first_token; t < end_token; ++t) {
      MoeSum sum = {};
      for (int32_t k = 0; k < layer.top_k; ++k) {
        const int64_t pair = t * layer.top_k + k;
        const int64_t slot = layer.slots[pair];
        const bool counts = slot >= 0 && slot < pairs && layer.pairs[slot] == pair;
        const int64_t row = counts ? w.rows[slot] : -1;
        if (row >= 0 && launch.needs.dx_rows) sum.y[k] = w.dx + row * layer.hidden * element;
        if (p.dweights == nullptr) continue;
        float gradient = 0.0f;
        if (row >= 0) {
          gradient = on_input
                         ? launch.kernel.dot(sum.y[k], is_fp32 ? Dtype::kFloat32 : layer.x.dtype,
                                             w.x[row], layer.x.dtype, layer.hidden)
                         : w.dots[row];
        }
        p.dweights[pair] = p.accumulate ? p.dweights[pair] + gradient : gradient;
      }
      if (p.dx.data == nullptr) continue;
      sum.weights = on_input ? layer.weights + t * layer.top_k : nullptr;
      sum.top_k = layer.top_k;
      sum.hidden = layer.hidden;
      sum.out = static_cast<char*>(p.dx.data) + t * p.dx.row_stride * dtype_bytes(p.dx.dtype);
      sum.y_is_fp32 = is_fp32;
      sum.out_is_fp32 = p.dx.dtype == Dtype::kFloat32;
      sum.adds = p.accumulate;
      launch.kernel.add(sum);
    }
  }
};

template <void (Worker::*kStage)(const ExpertTiles::Tile&) const>
void by_rows(void* context, int32_t index) {
  Launch& launch = *static_cast<Launch*>(context);
  const Worker worker(launch, index);
  for (int64_t i; (i = launch.next.take()) < launch.pieces;) {
    (worker.*kStage)(launch.experts.find(i, launch.column_tiles));
  }
}

void weight_gradients(void* context, int32_t index) {
  Launch& launch = *static_cast<Launch*>(context);
  const Worker worker(launch, index);
  for (int64_t i; (i = launch.next.take()) < launch.gradients->units();) {
    launch.gradients->compute(i, launch.kernel, launch.workspace.first, worker.memory.scratch);
  }
}

void combine(void* context, int32_t index) {
  Launch& launch = *static_cast<Launch*>(context);
  const Worker worker(launch, index);
  const int64_t tokens = launch.p.layer.tokens;
  for (int64_t i; (i = launch.next.take() * kTokensPerPiece) < tokens;) {
    worker.combine(i, std::min(i + kTokensPerPiece, tokens));
  }
}

// The stages that there are, in order.
struct Stages {
  struct Stage {
    const char* name;
    void (*run)(void* context, int32_t worker);
    int64_t columns;  // of a product; 0: row by row
  };
  Stage stages[6];
  int count = 0;

  explicit Stages(const Problem& p) {
    const Needs needs(p);
    const MoeForwardProblem& layer = p.layer;
    const auto add = [this](bool needed, const Stage& stage) {
      if (needed) stages[count++] = stage;
    };
    add(needs.up(p), {"up", by_rows<&Worker::up>, layer.inner});
    add(needs.da, {"down", by_rows<&Worker::down>, layer.inner});
    add(needs.activation(), {"activation", by_rows<&Worker::activate>, 0});
    add(needs.dx_rows, {"dx", by_rows<&Worker::dx>, layer.hidden});
    add(needs.dw, {"dw", weight_gradients, 0});
    add(needs.combine, {"combine", combine, 0});
  }
};

}  // namespace

flashmoe_status plan_backward(const MoeBackwardProblem& p, Plan* plan, const Reason& reason) {
  Isa isa;
  FLASHMOE_TRY(chosen_isa(&isa, reason));
  const MoeForwardProblem& layer = p.layer;
  const MoeKernel& kernel = moe_kernel_for(isa, layer.x.dtype);
  const int32_t available = num_threads();
  const auto pairs = static_cast<double>(pairs_of(p));
  const WeightGradients gradients = gradients_of(p, Workspace(nullptr, p, kernel, 1));
  plan->set_isa(kernel.isa);
  const auto add = [&](const char* name, int64_t pieces, int32_t threads) -> flashmoe_launch& {
    char text[sizeof flashmoe_launch::kernel];
    std::snprintf(text, sizeof text, "moe_backward_%s_cpu_%s_%s", name, kernel.isa,
                  dtype_name(layer.x.dtype));
    flashmoe_launch& launch = add_launch(text, &kernel, pieces, threads, plan);
    launch.stages = 1;
    return launch;
  };
  int32_t most_threads = 1;
  const Stages stages(p);
  for (int i = 0; i < stages.count; ++i) {
    const Stages::Stage& stage = stages.stages[i];
    if (stage.columns > 0) {
      const ProductShape shape = stage.run == by_rows<&Worker::up>     ? up_shape(p)
                                 : stage.run == by_rows<&Worker::down> ? down_shape(p)
                                                                       : dx_shape(p);
      const Tiling tiling = choose_tiling(kernel, shape, available);
      flashmoe_launch& launch = add(stage.name, tiling.most_tiles, tiling.threads);
      launch.tile_m = static_cast<int32_t>(tiling.tile_columns);
      launch.tile_n = static_cast<int32_t>(tiling.tile_rows);
    } else if (stage.run == weight_gradients) {
      WeightGradients cut = gradients;
      const int32_t threads = threads_for(
          2.0 * (pairs + layer.experts) * gradients.elements() / kFlopsToWake, INT32_MAX);
      const MoeTileSize size = gradients.tile_size(kernel, threads);
      cut.cut(size);
      flashmoe_launch& launch = add(stage.name, cut.units(), threads);
      launch.tile_m = static_cast<int32_t>(size.rows);
      launch.tile_n = static_cast<int32_t>(size.columns);
    } else {
      const bool by_tokens = stage.run == combine;
      const int64_t each = by_tokens ? kTokensPerPiece : kRowsPerPiece;
      const int64_t pieces =
          by_tokens ? ceil_divide(layer.tokens, each) : pairs_of(p) / each + layer.experts;
      const double bytes =
          pairs * static_cast<double>((by_tokens ? layer.hidden : layer.inner) * element_of(p));
      flashmoe_launch& launch = add(stage.name, pieces, threads_for(bytes / kBytesToWake, pieces));
      launch.tile_n = static_cast<int32_t>(each);
    }
    most_threads = std::max(most_threads, static_cast<int32_t>(plan->info.launches[i].block[0]));
  }
  plan->info.workspace_bytes = Workspace(nullptr, p, kernel, most_threads).bytes;
  plan->room = {Workspace(nullptr, p, kernel, 1).bytes, ThreadScratch::bytes(kernel)};
  return FLASHMOE_OK;
}

flashmoe_status launch_backward(const MoeBackwardProblem& p, const Plan& plan, void* memory,
                                void* /*stream*/) {
  const MoeForwardProblem& layer = p.layer;
  const MoeKernel& kernel = *static_cast<const MoeKernel*>(plan.entries[0]);
  int32_t threads = 1;
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    threads = std::max(threads, static_cast<int32_t>(plan.info.launches[i].block[0]));
  }
  const Workspace workspace(memory, p, kernel, threads);
  WeightGradients gradients = gradients_of(p, workspace);
  Launch launch = {p,
                   kernel,
                   workspace,
                   Needs(p),
                   &gradients,
                   ExpertTiles(workspace.tiles, layer.experts),
                   0,
                   1,
                   0,
                   {layer.activation, layer.alpha, layer.limit, layer.up_offset},
                   large_cache(),
                   {}};
  list_rows(&launch);
  const Stages stages(p);
  for (int i = 0; i < stages.count; ++i) {
    const Stages::Stage& stage = stages.stages[i];
    const flashmoe_launch& planned = plan.info.launches[i];
    launch.tile_columns = stage.columns > 0 ? planned.tile_m : 1;
    launch.column_tiles = stage.columns > 0 ? ceil_divide(stage.columns, planned.tile_m) : 1;
    if (stage.run == weight_gradients) {
      gradients.cut({planned.tile_m, planned.tile_n});
    } else {
      launch.pieces = launch.experts.cut(planned.tile_n) * launch.column_tiles;
    }
    launch.next.reset();
    parallel_run(static_cast<int32_t>(planned.block[0]), stage.run, &launch);
    record_launch(planned);
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
