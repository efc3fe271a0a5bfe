#include "cpu/moe_tiles.h"

#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "cpu/isa.h"

namespace flashmoe::cpu {
namespace {

// The least work for which waking a thread pays: about ten microseconds.
constexpr double kFlopsPerThread = 2e5;

// Tiles per thread that even out the load; for few rows, where some experts that a plan counts on
// have none.
constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kFewRowsTilesPerThread = 8;
constexpr int64_t kFewestColumns = 32;

// Columns of a tile of few rows: a matrix with contiguous columns is read in runs of this many
// elements.
constexpr int64_t kWideColumns = 8192;

// With a smaller level-2 cache tiles have half as many columns.
constexpr int64_t kLargeCache = int64_t{2} << 20;

// A multiple of every panel, for each of gate and up.
constexpr int64_t kColumnUnit = 2 * kFewestColumns;

int64_t whole_groups(const MoeKernel& kernel, int64_t rows) {
  return ceil_div(std::max<int64_t>(rows, 1), kernel.group_rows) * kernel.group_rows;
}

}  // namespace

bool large_cache() { return level2_bytes() >= kLargeCache; }

Tiling choose_tiling(const MoeKernel& kernel, const ProductShape& shape, int32_t available) {
  const double flops = 2.0 * static_cast<double>(shape.most_rows) *
                       static_cast<double>(shape.depth) * static_cast<double>(shape.columns) *
                       shape.matrices;
  const double wanted = flops / kFlopsPerThread;
  Tiling tiling = {};
  tiling.threads = wanted >= available ? available : wanted < 1 ? 1 : static_cast<int32_t>(wanted);
  const int64_t busy = std::clamp<int64_t>(shape.most_rows, 1, shape.experts);  // experts with rows
  const int64_t rows = ceil_div(std::max<int64_t>(shape.most_rows, 1), busy);
  const bool few = rows <= kernel.few_rows;
  MoeTileSize tile = kernel.many[shape.by_columns];
  int64_t few_sums = kernel.few_sums;
  if (!large_cache()) {
    tile.columns = kernel.many[0].columns / 2;
    few_sums /= 4;
  }
  if (few) {
    // Leaves room for many columns, and for experts with twice as many rows.
    const int64_t room = few_sums / whole_groups(kernel, 2 * rows);
    tile.columns = std::min(kWideColumns, room / kColumnUnit * kColumnUnit);
    tile.rows =
        std::min(tile.rows, few_sums / tile.columns / kernel.group_rows * kernel.group_rows);
  }
  tiling.tile_columns = tile.columns / shape.matrices;
  tiling.tile_rows = tile.rows;
  const int64_t row_tiles = busy * ceil_div(rows, tiling.tile_rows);
  const int64_t per_thread = few ? kFewRowsTilesPerThread : kTilesPerThread;
  const auto enough = [&] {
    const int64_t tiles = row_tiles * ceil_div(shape.columns, tiling.tile_columns);
    return tiling.threads == 1 || tiles >= per_thread * tiling.threads ||
           (shape.even && tiles % tiling.threads == 0);
  };
  while (tiling.tile_columns >= 2 * kFewestColumns && !enough()) {
    tiling.tile_columns = ceil_div(tiling.tile_columns / 2, kFewestColumns) * kFewestColumns;
  }
  tiling.column_tiles = ceil_div(shape.columns, tiling.tile_columns);
  tiling.most_tiles = (shape.most_rows / tiling.tile_rows + busy) * tiling.column_tiles;
  return tiling;
}

void ExpertTiles::from_offsets(const int32_t* offsets, int64_t rows) {
  int64_t end = std::clamp<int64_t>(offsets[0], 0, rows);
  for (int32_t e = 0; e < experts_; ++e) {
    begin_[e] = end;
    end = std::clamp<int64_t>(offsets[e + 1], end, rows);
    end_[e] = end;
  }
}

void ExpertTiles::from_counts(const int32_t* counts, int64_t rows) {
  for (int32_t e = 0; e < experts_; ++e) {
    begin_[e] = 0;
    end_[e] = std::clamp<int64_t>(counts[e], 0, rows);
  }
}

int64_t ExpertTiles::cut(int64_t tile_rows) {
  first_[0] = 0;
  for (int32_t e = 0; e < experts_; ++e) {
    first_[e + 1] = first_[e] + ceil_div(end_[e] - begin_[e], tile_rows);
  }
  return first_[experts_];
}

ExpertTiles::Tile ExpertTiles::find(int64_t index, int64_t column_tiles) const {
  const int64_t* after = std::upper_bound(first_, first_ + experts_ + 1, index / column_tiles);
  const int32_t expert = static_cast<int32_t>(after - first_) - 1;
  const int64_t row_tiles = first_[expert + 1] - first_[expert];
  const int64_t place = index - first_[expert] * column_tiles;
  // Divides an expert's rows into tiles as evenly as possible.
  const int64_t rows = end_[expert] - begin_[expert];
  const int64_t row_tile = place % row_tiles;
  return {expert, begin_[expert] + rows * row_tile / row_tiles,
          begin_[expert] + rows * (row_tile + 1) / row_tiles, place / row_tiles};
}

MoeWeights weights_of(const ExpertMatrix& matrix, const ExpertBias& bias, int32_t expert,
                      int64_t row) {
  const int64_t first = expert * matrix.expert_stride + row * matrix.row_stride;
  MoeWeights weights = {};
  weights.data = static_cast<const char*>(matrix.data) + first * dtype_bytes(matrix.dtype);
  weights.row_stride = matrix.row_stride;
  weights.column_stride = matrix.column_stride;
  if (bias.data != nullptr) {
    const int64_t begin = expert * bias.expert_stride + row * bias.row_stride;
    weights.bias = static_cast<const char*>(bias.data) + begin * dtype_bytes(bias.dtype);
    weights.bias_dtype = bias.dtype;
    weights.bias_stride = bias.row_stride;
  }
  return weights;
}

void add_product(const char* name, const MoeKernel& kernel, Dtype dtype, const Tiling& tiling,
                 Plan* plan) {
  char text[sizeof flashmoe_launch::kernel];
  std::snprintf(text, sizeof text, "%s_cpu_%s_%s", name, kernel.isa, dtype_name(dtype));
  flashmoe_launch& launch = add_launch(text, &kernel, tiling.most_tiles, tiling.threads, plan);
  launch.tile_m = static_cast<int32_t>(tiling.tile_columns);
  launch.tile_n = static_cast<int32_t>(tiling.tile_rows);
  launch.stages = 1;
}

}  // namespace flashmoe::cpu
