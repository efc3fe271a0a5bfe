// The layer, backward, on the CPU. Rows are the pairs with a slot, in the order of slots. Stages
// that no wanted gradient needs are skipped, and all share one workspace:
//
//   up          g, u  = as the forward has them, where it did not save them
//   down        da    = w_down^T dout              rows of dout gathered by the pairs
//   activation  dz    = weight * da * slope        the gradients of g and u, in w_gate_up's order;
//               a     = weight * act(g) * up       and the gradient of the weight, <da, a>
//   dx          dx_k  = w_gate_up^T dz
//   dw          dw_gate_up = sum of dz x^T, dw_down = sum of dout a^T, and biases' likewise
//   combine     dx[t] = sum over k of dx_k, and dweights
//
// With weight_on_input the weight multiplies x in the forward. Then dz lacks it, dw_gate_up uses a
// dz scaled by it, and the sum over k applies it.
//
// If pre_activation may be overwritten, rows of dz replace those of g and u: the activation reads
// each element before it overwrites it. This excludes interleaved rows, where writes would run
// ahead of reads.
//
// With a bounded workspace the stages up to dw go in chunks of columns of I, and the others in
// chunks of columns of H: see core/ops/moe/gradient_chunks.h.
#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "core/ops/moe/gradient_chunks.h"
#include "cpu/moe.h"
#include "cpu/moe_gradients.h"
#include "cpu/moe_tiles.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

using Problem = MoeBackwardProblem;

constexpr int64_t kRowsPerPiece = 16;  // in stages that go row by row
constexpr int64_t kTokensPerPiece = 16;

// What the wanted gradients need.
struct Needs {
  bool up_weights;
  bool dweights;
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
    dweights = p.dweights != nullptr || p.wide_dweights != nullptr;
    dx_rows = p.dx.data != nullptr || (dweights && on_input);
    dz = dx_rows || up_biases || (up_weights && !on_input);
    scaled_dz = up_weights && on_input;
    da = dz || scaled_dz || dweights;
    a = p.dw_down.data != nullptr;
    dw = up_weights || up_biases || a || p.db_down.data != nullptr;
    combine = p.dx.data != nullptr || dweights;
  }

  bool activation() const { return da || a; }
  bool up(const Problem& p) const { return activation() && p.pre_activation.data == nullptr; }
};

// Otherwise rows of dz hold one chunk.
bool has_whole_dz(const Problem& p) { return Needs(p).dx_rows || dz_is_in_place(p); }

int64_t pairs_of(const Problem& p) { return p.layer.tokens * p.layer.top_k; }
int64_t element_of(const Problem& p) { return dtype_bytes(p.layer.x.dtype); }
// Columns of g and u together.
int64_t width_of(const Problem& p) { return p.layer.gated ? 2 * p.layer.inner : p.layer.inner; }

// Whether gate and up are two matrices, whose parts of dx_k are added in fp32.
bool in_two_parts(const Problem& p) { return p.order == FLASHMOE_MOE_SEPARATE; }

// The dtype of sums: fp32, unless the terms are fp64.
Dtype sum_dtype(const Problem& p) {
  return p.layer.x.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}
int64_t sum_bytes(const Problem& p) { return dtype_bytes(sum_dtype(p)); }

Dtype dx_rows_dtype(const Problem& p) { return in_two_parts(p) ? sum_dtype(p) : p.layer.x.dtype; }

// Built on a null base it only measures. Buffers that no stage needs take no bytes. The buffers of
// the stages of I and of H share their place.
struct Workspace {
  unsigned char* tiles;
  int32_t* first;   // [experts + 1] rows
  int32_t* slots;   // [pairs] per row
  int32_t* rows;    // [pairs] per slot, or -1
  double* weights;  // by row, from here on
  double* dots;     // <da, a>
  const void** x;   // pointers
  const void** dout;
  const void** before[2];  // g and u
  const void** dz_rows;
  const void** scaled_rows;
  const void** a_rows;
  unsigned char* dz;         // [rows, width], for dx all columns
  unsigned char* computed;   // [rows, width] g, then u; from here on of a chunk
  unsigned char* da;         // [rows, inner] sums
  unsigned char* scaled_dz;  // [rows, width]
  unsigned char* a;          // [rows, inner]
  unsigned char* dx;         // [rows, hidden]
  unsigned char* scratch;    // the first thread's
  uint64_t bytes;

  Workspace(void* base, const Problem& p, const GradientChunks& chunks, const MoeKernel& kernel,
            int32_t threads) {
    Carver carver(base);
    const Needs needs(p);
    const auto pairs = static_cast<uint64_t>(pairs_of(p));
    const auto element = static_cast<uint64_t>(element_of(p));
    const auto inner = static_cast<uint64_t>(chunks.inner);
    const uint64_t width = p.layer.gated ? 2 * inner : inner;
    const auto hidden = static_cast<uint64_t>(chunks.hidden);
    const auto numbers = [&](size_t each) { return carver.take(pairs * each); };
    const auto of_sum = static_cast<uint64_t>(sum_bytes(p));
    const auto pointers = [&](bool needed) {
      return reinterpret_cast<const void**>(carver.take(needed ? pairs * sizeof(void*) : 0));
    };
    const auto matrix = [&](Carver& from, bool needed, uint64_t columns, uint64_t bytes_each) {
      return from.take(needed ? pairs * columns * bytes_each : 0);
    };
    tiles = carver.take(ExpertTiles::bytes(p.layer.experts));
    first = reinterpret_cast<int32_t*>(
        carver.take((static_cast<uint64_t>(p.layer.experts) + 1) * sizeof(int32_t)));
    slots = reinterpret_cast<int32_t*>(numbers(sizeof(int32_t)));
    rows = reinterpret_cast<int32_t*>(numbers(sizeof(int32_t)));
    weights = reinterpret_cast<double*>(numbers(sizeof(double)));
    dots = reinterpret_cast<double*>(numbers(sizeof(double)));
    x = pointers(true);
    dout = pointers(true);
    before[0] = pointers(needs.activation());
    before[1] = pointers(needs.activation() && p.layer.gated);
    dz_rows = pointers(needs.dz);
    scaled_rows = pointers(needs.scaled_dz);
    a_rows = pointers(needs.a);
    dz = matrix(carver, needs.dz && !dz_is_in_place(p),
                needs.dx_rows ? static_cast<uint64_t>(width_of(p)) : width, element);
    scratch = carver.take(static_cast<uint64_t>(threads) * ThreadScratch::bytes(kernel));
    Carver of_hidden = carver;
    computed = matrix(carver, needs.up(p), width, element);
    da = matrix(carver, needs.da, inner, of_sum);
    scaled_dz = matrix(carver, needs.scaled_dz, width, element);
    a = matrix(carver, needs.a, inner, element);
    dx = matrix(of_hidden, needs.dx_rows, hidden,
                static_cast<uint64_t>(dtype_bytes(dx_rows_dtype(p))));
    bytes = std::max(carver.bytes(), of_hidden.bytes());
  }
};

// Chunks with which a call by one thread stays within the bound and, if chunks can be small enough,
// leaves an eighth of it to other threads. The number of threads does not count, since it may
// change between a query and a call.
GradientChunks chunks_of(const Problem& p, const MoeKernel& kernel) {
  constexpr uint64_t kShareOfThreads = 8;
  return fit_chunks(
      p, p.max_workspace_bytes - p.max_workspace_bytes / kShareOfThreads,
      [&](const GradientChunks& chunks) { return Workspace(nullptr, p, chunks, kernel, 1).bytes; });
}

ProductShape up_shape(const Problem& p, int64_t columns) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p),         layer.tokens == 1,          layer.experts, layer.hidden, columns,
          layer.gated ? 2 : 1, layer.up.column_stride != 1};
}

ProductShape down_shape(const Problem& p, int64_t columns) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p), layer.tokens == 1,         layer.experts, layer.hidden, columns,
          1,           layer.down.row_stride != 1};
}

ProductShape dx_shape(const Problem& p, int64_t columns) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p), layer.tokens == 1,        layer.experts, width_of(p), columns,
          1,           p.gate_up.row_stride != 1};
}

// An expert's matrix transposed, from column `first` on.
MoeWeights transposed(ExpertMatrix matrix, int32_t expert, int64_t first) {
  std::swap(matrix.row_stride, matrix.column_stride);
  return weights_of(matrix, {}, expert, first);
}

// The gradients of a chunk. Only the last chunk has db_down.
WeightGradients gradients_of(const Problem& p, const Workspace& w, const InnerChunk& chunk) {
  const MoeForwardProblem& layer = p.layer;
  const bool on_input = layer.weight_on_input;
  WeightGradients gradients(layer.experts, element_of(p), p.accumulate);
  GradientRows rows[2];
  InnerChunk of_matrices = chunk;
  if (on_input) of_matrices.dz_is_whole = false;
  RowPointers dz = on_input ? w.scaled_rows : w.dz_rows;
  for (int i = 0, count = gradient_rows(p, of_matrices, rows); i < count; ++i) {
    gradients.add_matrix(rows_from(rows[i].of_w_up ? p.dw_up : p.dw_gate_up, rows[i].first), dz,
                         rows[i].dz_column, rows[i].count, w.x, layer.hidden);
  }
  gradients.add_matrix(columns_from(p.dw_down, chunk.first), w.dout, 0, layer.hidden, w.a_rows,
                       chunk.count);
  for (int i = 0, count = gradient_rows(p, chunk, rows); i < count; ++i) {
    gradients.add_bias(rows_from(rows[i].of_w_up ? p.db_up : p.db_gate_up, rows[i].first),
                       w.dz_rows, rows[i].dz_column, rows[i].count, nullptr);
  }
  if (chunk.first + chunk.count < chunk.inner) return gradients;
  gradients.add_bias(p.db_down, w.dout, 0, layer.hidden, on_input ? nullptr : w.weights);
  return gradients;
}

struct Launch {
  const Problem& p;
  const MoeKernel& kernel;
  const Workspace& workspace;
  const Needs needs;
  InnerChunk chunk;         // the chunk in work
  MoeForwardProblem layer;  // with the chunk's columns of I
  int64_t hidden_first;     // and then columns of H
  int64_t hidden;
  const WeightGradients* gradients;
  ExpertTiles experts;
  int64_t tile_columns;
  int64_t column_tiles;
  int64_t pieces;
  MoeActivation activation;
  bool large_cache;
  Counter next;
};

// Lists the rows, and pointers to the data of each. A slot counts if it and its pair agree.
void list_rows(Launch* launch) {
  const Problem& p = launch->p;
  const MoeForwardProblem& layer = p.layer;
  const Workspace& w = launch->workspace;
  const int64_t pairs = pairs_of(p);
  const int64_t element = element_of(p);
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
      w.weights[row] = weight_of(layer, pair);
      w.x[row] = at(layer.x.data, token * layer.x.row_stride);
      w.dout[row] = at(p.dout.data, token * p.dout.row_stride);
      ++row;
    }
  }
  w.first[layer.experts] = row;
  launch->experts.from_offsets(w.first, row);
}

// Points the rows to a chunk of I.
void point_to_chunk(Launch* launch) {
  const Problem& p = launch->p;
  const Workspace& w = launch->workspace;
  const Needs& needs = launch->needs;
  const InnerChunk& chunk = launch->chunk;
  const bool gated = p.layer.gated;
  const bool is_given = p.pre_activation.data != nullptr;
  const int64_t own_width = gated ? 2 * chunk.count : chunk.count;
  const int64_t dz_width = chunk.dz_is_whole ? width_of(p) : own_width;
  const int64_t element = element_of(p);
  const auto at = [element](const void* data, int64_t place) -> const void* {
    return static_cast<const char*>(data) + place * element;
  };
  const int32_t rows = w.first[p.layer.experts];
  for (int64_t row = 0; row < rows; ++row) {
    if (needs.activation()) {
      const void* const before =
          is_given
              ? at(p.pre_activation.data, w.slots[row] * p.pre_activation.row_stride + chunk.first)
              : at(w.computed, row * own_width);
      w.before[0][row] = before;
      if (gated) w.before[1][row] = at(before, is_given ? chunk.inner : chunk.count);
    }
    if (needs.dz) {
      w.dz_rows[row] = dz_is_in_place(p)
                           ? at(p.pre_activation.data, w.slots[row] * p.pre_activation.row_stride)
                           : at(w.dz, row * dz_width);
    }
    if (needs.scaled_dz) w.scaled_rows[row] = at(w.scaled_dz, row * own_width);
    if (needs.a) w.a_rows[row] = at(w.a, row * chunk.count);
  }
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

  // As in the forward.
  void up(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = launch.layer;
    const int64_t width = layer.gated ? 2 * layer.inner : layer.inner;
    const int64_t column = rows.column_tile * launch.tile_columns;
    MoeTile tile = tile_of(rows, w.x + rows.begin, layer.hidden, layer.inner);
    tile.scale = layer.weight_on_input ? w.weights + rows.begin : nullptr;
    tile.matrices = layer.gated ? 2 : 1;
    if (layer.gated) tile.weights[0] = weights_of(layer.gate, layer.gate_bias, rows.expert, column);
    tile.weights[tile.matrices - 1] = weights_of(layer.up, layer.up_bias, rows.expert, column);
    tile.out = w.computed + (rows.begin * width + column) * element_of(p);
    tile.out_stride = tile.before_stride = width;
    if (layer.gated) {
      tile.before[1] = static_cast<unsigned char*>(tile.out) + layer.inner * element_of(p);
    }
    launch.kernel.multiply(tile, memory.scratch);
  }

  void down(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = launch.layer;
    const int64_t column = rows.column_tile * launch.tile_columns;
    MoeTile tile = tile_of(rows, w.dout + rows.begin, layer.hidden, layer.inner);
    tile.weights[0] = transposed(layer.down, rows.expert, column);
    tile.out = w.da + (rows.begin * layer.inner + column) * sum_bytes(p);
    tile.out_stride = layer.inner;
    tile.out_is_fp32 = sum_dtype(p) == Dtype::kFloat32;
    launch.kernel.multiply(tile, memory.scratch);
  }

  void dx(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = p.layer;
    const int64_t column = rows.column_tile * launch.tile_columns;
    const bool two = in_two_parts(p);
    MoeTile tile =
        tile_of(rows, w.dz_rows + rows.begin, two ? layer.inner : width_of(p), launch.hidden);
    tile.weights[0] = transposed(p.gate_up, rows.expert, launch.hidden_first + column);
    tile.out_is_fp32 = dx_rows_dtype(p) == Dtype::kFloat32;
    tile.out = w.dx + (rows.begin * launch.hidden + column) * dtype_bytes(dx_rows_dtype(p));
    tile.out_stride = launch.hidden;
    launch.kernel.multiply(tile, memory.scratch);
    if (!two) return;
    for (int64_t r = 0; r < tile.rows; ++r) {
      memory.x[r] =
          static_cast<const char*>(w.dz_rows[rows.begin + r]) + layer.inner * element_of(p);
    }
    tile.x = memory.x;
    tile.weights[0] = transposed(layer.up, rows.expert, launch.hidden_first + column);
    tile.adds = true;
    launch.kernel.multiply(tile, memory.scratch);
  }

  void activate(const ExpertTiles::Tile& rows) const {
    const MoeForwardProblem& layer = launch.layer;
    const bool on_input = layer.weight_on_input;
    MoeActivationGradient row = {};
    row.activation = &launch.activation;
    const char* bias = static_cast<const char*>(layer.down_bias.data);
    if (bias != nullptr) {
      bias += rows.expert * layer.down_bias.expert_stride * dtype_bytes(layer.down_bias.dtype);
    }
    InnerChunk of_scaled = launch.chunk;
    of_scaled.dz_is_whole = false;
    const DzPlaces dz = dz_places(p, launch.chunk);
    const DzPlaces scaled = dz_places(p, of_scaled);
    const int64_t element = element_of(p);
    const auto from = [element](bool there, const void* data, int64_t place) -> void* {
      return there ? const_cast<char*>(static_cast<const char*>(data)) + place * element : nullptr;
    };
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      row.weight = on_input ? 1.0 : w.weights[r];
      row.scale = w.weights[r];
      double dot = launch.chunk.first > 0 ? w.dots[r] : 0.0;
      if (launch.chunk.first == 0 && bias != nullptr && launch.needs.dweights && !on_input) {
        dot = launch.kernel.dot(w.dout[r], p.dout.dtype, bias, layer.down_bias.dtype, layer.hidden);
      }
      // The sum goes by blocks, whatever the chunks.
      for (int64_t i = 0; i < layer.inner; i += kGradientBlock) {
        row.inner = std::min(kGradientBlock, layer.inner - i);
        row.before[0] = from(true, w.before[0][r], i);
        row.before[1] = from(layer.gated, layer.gated ? w.before[1][r] : nullptr, i);
        row.da = launch.needs.da ? w.da + (r * layer.inner + i) * sum_bytes(p) : nullptr;
        row.a_out = from(launch.needs.a, launch.needs.a ? w.a_rows[r] : nullptr, i);
        // Both kinds of dz have the same step, but their own places.
        row.dz_step = dz.step;
        row.dz = launch.needs.dz ? const_cast<void*>(w.dz_rows[r]) : nullptr;
        row.scaled_dz = launch.needs.scaled_dz ? const_cast<void*>(w.scaled_rows[r]) : nullptr;
        for (int m = 0; m < 2; ++m) {
          row.dz_places[m] = dz.places[m] + i * dz.step;
          row.scaled_places[m] = scaled.places[m] + i * scaled.step;
        }
        dot += launch.kernel.differentiate(row);
      }
      w.dots[r] = dot;
    }
  }

  void combine(int64_t first_token, int64_t end_token) const {
    const MoeForwardProblem& layer = p.layer;
    const bool on_input = layer.weight_on_input;
    const int64_t element = dtype_bytes(dx_rows_dtype(p));
    const int64_t pairs = pairs_of(p);
    for (int64_t t = first_token; t < end_token; ++t) {
      MoeSum sum = {};
      double weights[kMaxTopK];
      for (int32_t k = 0; k < layer.top_k; ++k) {
        const int64_t pair = t * layer.top_k + k;
        weights[k] = weight_of(layer, pair);
        const int64_t slot = layer.slots[pair];
        const bool counts = slot >= 0 && slot < pairs && layer.pairs[slot] == pair;
        const int64_t row = counts ? w.rows[slot] : -1;
        if (row >= 0 && launch.needs.dx_rows) sum.y[k] = w.dx + row * launch.hidden * element;
        if (!launch.needs.dweights) continue;
        if (row >= 0 && on_input) w.dots[row] = dot_with_x(row, sum.y[k]);
        if (launch.hidden_first + launch.hidden < layer.hidden) continue;
        const double gradient = row >= 0 ? w.dots[row] : 0.0;
        if (p.wide_dweights != nullptr) {
          write(gradient, p.wide_dweights + pair);
        } else {
          write(gradient, p.dweights + pair);
        }
      }
      if (p.dx.data == nullptr) continue;
      sum.weights = on_input ? weights : nullptr;
      sum.top_k = layer.top_k;
      sum.hidden = launch.hidden;
      sum.out = static_cast<char*>(p.dx.data) +
                (t * p.dx.row_stride + launch.hidden_first) * dtype_bytes(p.dx.dtype);
      sum.y_is_fp32 = dx_rows_dtype(p) == Dtype::kFloat32;
      sum.out_is_fp32 = p.dx.dtype == Dtype::kFloat32;
      sum.adds = p.accumulate;
      launch.kernel.add(sum);
    }
  }

  template <class Number>
  void write(double gradient, Number* to) const {
    const double before = p.accumulate ? static_cast<double>(*to) : 0.0;
    *to = static_cast<Number>(before + gradient);
  }

  // <y, x> of a row up to the end of this chunk of H, in blocks, whatever the chunks.
  double dot_with_x(int64_t row, const void* y) const {
    const Dtype dtype = p.layer.x.dtype;
    const Dtype y_dtype = dx_rows_dtype(p);
    double dot = launch.hidden_first > 0 ? w.dots[row] : 0.0;
    for (int64_t i = 0; i < launch.hidden; i += kGradientBlock) {
      dot += launch.kernel.dot(
          static_cast<const char*>(y) + i * dtype_bytes(y_dtype), y_dtype,
          static_cast<const char*>(w.x[row]) + (launch.hidden_first + i) * dtype_bytes(dtype),
          dtype, std::min(kGradientBlock, launch.hidden - i));
    }
    return dot;
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

// The stages of a call, in order: those of I, then those of H.
struct Stages {
  struct Stage {
    const char* name;
    void (*run)(void* context, int32_t worker);
    int64_t columns;  // of a product; 0: the stage goes row by row
  };
  Stage stages[6];
  int count = 0;
  int of_inner = 0;  // number of stages of I, the first ones

  Stages(const Problem& p, const GradientChunks& chunks) {
    const Needs needs(p);
    const auto add = [this](bool needed, const Stage& stage) {
      if (needed) stages[count++] = stage;
    };
    add(needs.up(p), {"up", by_rows<&Worker::up>, chunks.inner});
    add(needs.da, {"down", by_rows<&Worker::down>, chunks.inner});
    add(needs.activation(), {"activation", by_rows<&Worker::activate>, 0});
    add(needs.dw, {"dw", weight_gradients, 0});
    of_inner = count;
    add(needs.dx_rows, {"dx", by_rows<&Worker::dx>, chunks.hidden});
    add(needs.combine, {"combine", combine, 0});
  }
};

// Plans the stages of the largest chunk; `repeats` is the number of chunks.
void plan_stages(const Problem& p, const MoeKernel& kernel, const GradientChunks& chunks,
                 Plan* plan) {
  const MoeForwardProblem& layer = p.layer;
  const int32_t available = num_threads();
  const auto pairs = static_cast<double>(pairs_of(p));
  const int64_t inner_chunks = chunk_count(layer.inner, chunks.inner);
  const int64_t hidden_chunks = chunk_count(layer.hidden, chunks.hidden);
  // The last chunk may have all kinds of gradients.
  const InnerChunk last =
      inner_chunk(p, chunks, (inner_chunks - 1) * chunks.inner, has_whole_dz(p));
  const WeightGradients gradients = gradients_of(p, Workspace(nullptr, p, chunks, kernel, 1), last);
  const Stages stages(p, chunks);
  for (int i = 0; i < stages.count; ++i) {
    const Stages::Stage& stage = stages.stages[i];
    const auto add = [&](int64_t pieces, int32_t threads) -> flashmoe_launch& {
      char text[sizeof flashmoe_launch::kernel];
      std::snprintf(text, sizeof text, "moe_backward_%s_cpu_%s_%s", stage.name, kernel.isa,
                    dtype_name(layer.x.dtype));
      flashmoe_launch& launch = add_launch(text, &kernel, pieces, threads, plan);
      launch.stages = 1;
      const int64_t repeats = i < stages.of_inner ? inner_chunks : hidden_chunks;
      launch.repeats = repeats > 1 ? static_cast<int32_t>(repeats) : 0;
      return launch;
    };
    if (stage.columns > 0) {
      const ProductShape shape = stage.run == by_rows<&Worker::up> ? up_shape(p, stage.columns)
                                 : stage.run == by_rows<&Worker::down>
                                     ? down_shape(p, stage.columns)
                                     : dx_shape(p, stage.columns);
      const Tiling tiling = choose_tiling(kernel, shape, available);
      flashmoe_launch& launch = add(tiling.most_tiles, tiling.threads);
      launch.tile_m = static_cast<int32_t>(tiling.tile_columns);
      launch.tile_n = static_cast<int32_t>(tiling.tile_rows);
    } else if (stage.run == weight_gradients) {
      WeightGradients cut = gradients;
      const int32_t threads = threads_for(
          2.0 * (pairs + layer.experts) * gradients.elements() / kFlopsToWake, INT32_MAX);
      const MoeTileSize size = gradients.tile_size(kernel, threads);
      cut.cut(size);
      flashmoe_launch& launch = add(cut.units(), threads);
      launch.tile_m = static_cast<int32_t>(size.rows);
      launch.tile_n = static_cast<int32_t>(size.columns);
    } else {
      const bool by_tokens = stage.run == combine;
      const int64_t each = by_tokens ? kTokensPerPiece : kRowsPerPiece;
      const int64_t pieces =
          by_tokens ? ceil_div(layer.tokens, each) : pairs_of(p) / each + layer.experts;
      const double bytes =
          pairs * static_cast<double>((by_tokens ? chunks.hidden : chunks.inner) * element_of(p));
      flashmoe_launch& launch = add(pieces, threads_for(bytes / kBytesToWake, pieces));
      launch.tile_n = static_cast<int32_t>(each);
    }
  }
}

// Runs stages [begin, end) of a chunk.
void run_stages(const Stages& stages, int begin, int end, const Plan& plan, bool is_first,
                WeightGradients* gradients, Launch* launch) {
  for (int i = begin; i < end; ++i) {
    const Stages::Stage& stage = stages.stages[i];
    const flashmoe_launch& planned = plan.info.launches[i];
    const int64_t columns = stage.columns == 0    ? 0
                            : i < stages.of_inner ? launch->chunk.count
                                                  : launch->hidden;
    launch->tile_columns = columns > 0 ? planned.tile_m : 1;
    launch->column_tiles = columns > 0 ? ceil_div(columns, planned.tile_m) : 1;
    if (stage.run == weight_gradients) {
      gradients->cut({planned.tile_m, planned.tile_n});
    } else {
      launch->pieces = launch->experts.cut(planned.tile_n) * launch->column_tiles;
    }
    launch->next.reset();
    parallel_run(static_cast<int32_t>(planned.block[0]), stage.run, launch);
    if (is_first) record_launch(planned);
  }
}

}  // namespace

flashmoe_status plan_backward(const MoeBackwardProblem& p, Plan* plan, const Reason& reason) {
  Isa isa;
  FLASHMOE_TRY(chosen_isa(&isa, reason));
  const MoeKernel& kernel = moe_kernel_for(isa, p.layer.x.dtype);
  const GradientChunks chunks = chunks_of(p, kernel);
  const auto bytes_of = [&](int32_t threads) {
    return Workspace(nullptr, p, chunks, kernel, threads).bytes;
  };
  const uint64_t least = bytes_of(1);
  if (p.max_workspace_bytes > 0 && least > p.max_workspace_bytes) {
    return refuse_bound(p, least, reason);
  }
  plan->set_isa(kernel.isa);
  plan->chunk[0] = chunks.inner;
  plan->chunk[1] = chunks.hidden;
  plan_stages(p, kernel, chunks, plan);
  int32_t most_threads = 1;
  for (int32_t i = 0; i < plan->info.launch_count; ++i) {
    most_threads = std::max(most_threads, static_cast<int32_t>(plan->info.launches[i].block[0]));
  }
  plan->info.workspace_bytes = bytes_of(most_threads);
  plan->room = {least, ThreadScratch::bytes(kernel)};
  if (p.max_workspace_bytes > 0) plan->fit_threads(p.max_workspace_bytes);
  return FLASHMOE_OK;
}

flashmoe_status launch_backward(const MoeBackwardProblem& p, const Plan& plan, void* memory,
                                void* /*stream*/) {
  const MoeForwardProblem& layer = p.layer;
  // If the wanted gradients have no rows, and so maybe no memory, nothing is planned.
  if (plan.info.launch_count == 0) return FLASHMOE_OK;
  const MoeKernel& kernel = *static_cast<const MoeKernel*>(plan.entries[0]);
  const GradientChunks chunks = {plan.chunk[0], plan.chunk[1]};
  int32_t threads = 1;
  for (int32_t i = 0; i < plan.info.launch_count; ++i) {
    threads = std::max(threads, static_cast<int32_t>(plan.info.launches[i].block[0]));
  }
  const Workspace workspace(memory, p, chunks, kernel, threads);
  Launch launch = {p,
                   kernel,
                   workspace,
                   Needs(p),
                   {},
                   layer,
                   0,
                   0,
                   nullptr,
                   ExpertTiles(workspace.tiles, layer.experts),
                   0,
                   1,
                   0,
                   {layer.activation, layer.alpha, layer.limit, layer.up_offset},
                   large_cache(),
                   {}};
  list_rows(&launch);
  const Stages stages(p, chunks);
  for (int64_t first = 0; first < layer.inner && stages.of_inner > 0; first += chunks.inner) {
    launch.chunk = inner_chunk(p, chunks, first, has_whole_dz(p));
    launch.layer = layer_of(p, launch.chunk);
    point_to_chunk(&launch);
    WeightGradients gradients = gradients_of(p, workspace, launch.chunk);
    launch.gradients = &gradients;
    run_stages(stages, 0, stages.of_inner, plan, first == 0, &gradients, &launch);
  }
  for (int64_t first = 0; first < layer.hidden; first += chunks.hidden) {
    launch.hidden_first = first;
    launch.hidden = std::min(chunks.hidden, layer.hidden - first);
    run_stages(stages, stages.of_inner, stages.count, plan, first == 0, nullptr, &launch);
  }
  return FLASHMOE_OK;
}

}  // namespace flashmoe::cpu
