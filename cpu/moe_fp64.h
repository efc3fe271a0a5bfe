// The mixture of experts in fp64, for gradient checks. Sums are fp64, one per row and column, in
// the order of depth whatever the tiles are. Included inside the namespace of one translation unit,
// after kVectorBytes and kGroupRows.

using Doubles = double __attribute__((vector_size(kVectorBytes)));

constexpr int64_t kPanel = 8;                        // columns
constexpr int kVectors = kPanel * 8 / kVectorBytes;  // of a panel's row
constexpr int64_t kPanelSteps = 256;                 // of depth per packed panel: 16 KiB
constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 512;  // a plan halves that for small caches

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Stores a number, or adds it to the output.
template <typename T>
void put(double x, bool adds, T* to) {
  *to = static_cast<T>(adds ? static_cast<double>(*to) + x : x);
}

void put(double x, bool adds, bool is_fp32, void* out, int64_t place) {
  if (is_fp32) {
    put(x, adds, static_cast<float*>(out) + place);
  } else {
    put(x, adds, static_cast<double*>(out) + place);
  }
}

double number(const void* from, Dtype dtype, int64_t place) {
  return dtype == Dtype::kFloat32 ? static_cast<double>(static_cast<const float*>(from)[place])
                                  : static_cast<const double*>(from)[place];
}

// ---- activations: NaN stays NaN -----------------------------------------------------------------

double cut_above(const MoeActivation& activation, double x) {
  const auto limit = static_cast<double>(activation.limit);
  return x > limit ? limit : x;
}

double cut(const MoeActivation& activation, double x) {
  const auto limit = static_cast<double>(activation.limit);
  return x < -limit ? -limit : cut_above(activation, x);
}

// The gradient through the clamp: 0 beyond the limit.
double through_cut_above(const MoeActivation& activation, double x, double dx) {
  return x > static_cast<double>(activation.limit) ? 0.0 : dx;
}

double through_cut(const MoeActivation& activation, double x, double dx) {
  return x < -static_cast<double>(activation.limit) ? 0.0 : through_cut_above(activation, x, dx);
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kDensity = 0.39894228040143267794;           // 1 / sqrt(2 pi)
constexpr double kTwoSqrtTwoOverPi = 1.59576912160573071176;  // 2 sqrt(2 / pi)
constexpr double kCubic = 0.044715;

// act(z) and its slope at z. Beyond +-kFlat slopes are those of a straight line, and factors of
// vanished terms must not overflow.
struct Activated {
  double value;
  double slope;

  Activated(const MoeActivation& activation, double z) : value(z), slope(1.0) {
    constexpr double kFlat = 800.0;
    const double near = z > kFlat ? kFlat : z < -kFlat ? -kFlat : z;
    switch (activation.function) {
      case FLASHMOE_ACTIVATION_SILU: {  // s + alpha z s (1 - s)
        const double x = static_cast<double>(activation.alpha) * z;
        const double flat_x = x > kFlat ? kFlat : x < -kFlat ? -kFlat : x;
        const double s = sigmoid(x);
        value = z * s;
        slope = s + flat_x * s * sigmoid(-x);
        break;
      }
      case FLASHMOE_ACTIVATION_GELU: {  // Phi(z) + z phi(z)
        const double phi = 0.5 * std::erfc(-z * kSqrtHalf);
        value = z * phi;
        slope = phi + near * kDensity * std::exp(-0.5 * near * near);
        break;
      }
      // z (1 + tanh(x)) / 2 = z S(2 x), and S + z S (1 - S) (2 x)'
      case FLASHMOE_ACTIVATION_GELU_TANH: {
        const double u = near * near;
        const double x = kTwoSqrtTwoOverPi * (near + kCubic * u * near);
        const double s = sigmoid(x);
        value = z * s;
        slope = s + near * s * sigmoid(-x) * kTwoSqrtTwoOverPi * (1.0 + 3.0 * kCubic * u);
        break;
      }
      case FLASHMOE_ACTIVATION_RELU:
        value = z < 0.0 ? 0.0 : z;
        slope = z <= 0.0 ? 0.0 : z == z ? 1.0 : z;
        break;
      case FLASHMOE_ACTIVATION_RELU2:
        value = z < 0.0 ? 0.0 : z * z;
        slope = z < 0.0 ? 0.0 : z + z;
        break;
    }
  }
};

// ---- products -----------------------------------------------------------------------------------

struct Scratch {
  double* panel;  // [kPanelSteps][kPanel]
  double* sums;   // [2][kTileRows][kPanel]

  static constexpr size_t kBytes =
      static_cast<size_t>(kPanelSteps + 2 * kTileRows) * kPanel * sizeof(double);

  explicit Scratch(void* base)
      : panel(static_cast<double*>(base)), sums(panel + kPanelSteps * kPanel) {}
};

Doubles load(const double* from) {
  Doubles x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

void store(Doubles x, double* to) { __builtin_memcpy(to, &x, sizeof x); }

// Factors from a group of rows.
struct RowFactors {
  const double* row[kGroupRows];

  RowFactors(const MoeTile& tile, int64_t first, int64_t depth) {
    for (int64_t r = 0; r < kGroupRows && first + r < tile.rows; ++r) {
      row[r] = static_cast<const double*>(tile.x[first + r]) + depth;
    }
  }
  double at(int r, int64_t step) const { return row[r][step]; }
};

// Factors from columns of `rows`, from `column` on.
struct ColumnFactors {
  const void* const* rows;
  int64_t column;

  double at(int r, int64_t step) const {
    return static_cast<const double*>(rows[step])[column + r];
  }
};

// sums[r][n] += the sum over `steps` of x.at(r, step) * panel[step][n].
template <int kRows, typename Factors>
void add_group(const Factors& x, const double* panel, int64_t steps, double* sums) {
  constexpr int64_t kLanes = kVectorBytes / 8;
  Doubles total[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = load(sums + r * kPanel + v * kLanes);
  }
  for (int64_t step = 0; step < steps; ++step) {
    Doubles b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load(panel + step * kPanel + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const double factor = x.at(r, step);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[r][v] += factor * b[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(total[r][v], sums + r * kPanel + v * kLanes);
  }
}
// The same, also for a group with fewer than kGroupRows rows.
template <typename Factors>
void add_rows_of_group(const Factors& x, int64_t rows, const double* panel, int64_t steps,
                       double* sums) {
  static_assert(kGroupRows == 2 || kGroupRows == 4);
  if constexpr (kGroupRows == 4) {
    if (rows >= 4) return add_group<4>(x, panel, steps, sums);
    if (rows == 3) return add_group<3>(x, panel, steps, sums);
  }
  if (rows >= 2) return add_group<2>(x, panel, steps, sums);
  add_group<1>(x, panel, steps, sums);
}

void clear(double* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = 0.0;
}

// Packs columns from `column` on of one of the tile's matrices, `steps` of depth from `depth` on.
void pack_panel(const MoeTile& tile, int m, int64_t column, int64_t depth, int64_t steps,
                double* panel) {
  const MoeWeights& w = tile.weights[m];
  const double* const from =
      static_cast<const double*>(w.data) + column * w.row_stride + depth * w.column_stride;
  const int64_t columns = smaller(kPanel, tile.columns - column);
  if (columns < kPanel) clear(panel, steps * kPanel);
  if (w.column_stride == 1) {
    for (int64_t n = 0; n < columns; ++n) {
      for (int64_t i = 0; i < steps; ++i) panel[i * kPanel + n] = from[n * w.row_stride + i];
    }
    return;
  }
  for (int64_t i = 0; i < steps; ++i) {
    for (int64_t n = 0; n < columns; ++n) {
      panel[i * kPanel + n] = from[i * w.column_stride + n * w.row_stride];
    }
  }
}

// Applies scale, bias and activation to a panel's columns, and stores them.
void finish_panel(const MoeTile& tile, int64_t column, const Scratch& s) {
  const int64_t columns = smaller(kPanel, tile.columns - column);
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t n = 0; n < columns; ++n) {
      double z[2] = {};
      for (int m = 0; m < tile.matrices; ++m) {
        const MoeWeights& w = tile.weights[m];
        z[m] = s.sums[(m * kTileRows + r) * kPanel + n];
        if (tile.scale != nullptr) z[m] *= tile.scale[r];
        if (w.bias != nullptr) z[m] += number(w.bias, w.bias_dtype, (column + n) * w.bias_stride);
        if (tile.before[m] != nullptr) {
          static_cast<double*>(tile.before[m])[r * tile.before_stride + column + n] = z[m];
        }
      }
      double out = z[0];
      if (tile.activation != nullptr) {
        const MoeActivation& a = *tile.activation;
        out = tile.matrices == 1 ? Activated(a, cut(a, z[0])).value
                                 : Activated(a, cut_above(a, z[0])).value *
                                       (cut(a, z[1]) + static_cast<double>(a.up_offset));
      }
      put(out, tile.adds, tile.out_is_fp32, tile.out, r * tile.out_stride + column + n);
    }
  }
}

void multiply(const MoeTile& tile, void* scratch) {
  const Scratch s(scratch);
  for (int64_t column = 0; column < tile.columns; column += kPanel) {
    clear(s.sums, 2 * kTileRows * kPanel);
    for (int m = 0; m < tile.matrices; ++m) {
      for (int64_t depth = 0; depth < tile.depth; depth += kPanelSteps) {
        const int64_t steps = smaller(kPanelSteps, tile.depth - depth);
        pack_panel(tile, m, column, depth, steps, s.panel);
        double* const sums = s.sums + m * kTileRows * kPanel;
        for (int64_t r = 0; r < tile.rows; r += kGroupRows) {
          add_rows_of_group(RowFactors(tile, r, depth), tile.rows - r, s.panel, steps,
                            sums + r * kPanel);
        }
      }
    }
    finish_panel(tile, column, s);
  }
}

void add_outer(const MoeOuterProducts& tile, void* scratch) {
  const Scratch s(scratch);
  for (int64_t n = 0; n < tile.n; n += kPanel) {
    const int64_t columns = smaller(kPanel, tile.n - n);
    clear(s.sums, kTileRows * kPanel);
    for (int64_t first = 0; first < tile.rows; first += kPanelSteps) {
      const int64_t steps = smaller(kPanelSteps, tile.rows - first);
      if (columns < kPanel) clear(s.panel, steps * kPanel);
      for (int64_t i = 0; i < steps; ++i) {
        const double* const b = static_cast<const double*>(tile.b[first + i]) + tile.b_first + n;
        for (int64_t j = 0; j < columns; ++j) s.panel[i * kPanel + j] = b[j];
      }
      for (int64_t m = 0; m < tile.m; m += kGroupRows) {
        add_rows_of_group(ColumnFactors{tile.a + first, tile.a_first + m}, tile.m - m, s.panel,
                          steps, s.sums + m * kPanel);
      }
    }
    for (int64_t m = 0; m < tile.m; ++m) {
      for (int64_t j = 0; j < columns; ++j) {
        put(s.sums[m * kPanel + j], tile.adds, tile.out_is_fp32, tile.out,
            m * tile.out_stride + n + j);
      }
    }
  }
}

// ---- rows ---------------------------------------------------------------------------------------

void add_rows(const MoeSum& sum) {
  for (int64_t i = 0; i < sum.hidden; ++i) {
    double total = 0.0;
    for (int32_t k = 0; k < sum.top_k; ++k) {
      if (sum.y[k] == nullptr) continue;
      const double y = static_cast<const double*>(sum.y[k])[i];
      total += sum.weights == nullptr ? y : sum.weights[k] * y;
    }
    put(total, sum.adds, sum.out_is_fp32, sum.out, i);
  }
}

double differentiate_row(const MoeActivationGradient& row) {
  const MoeActivation& activation = *row.activation;
  const bool gated = row.before[1] != nullptr;
  const auto* const da = static_cast<const double*>(row.da);
  double total = 0.0;
  for (int64_t i = 0; i < row.inner; ++i) {
    const double z = static_cast<const double*>(row.before[0])[i];
    const double u = gated ? static_cast<const double*>(row.before[1])[i] : 0.0;
    const Activated act(activation, gated ? cut_above(activation, z) : cut(activation, z));
    const double up = gated ? cut(activation, u) + static_cast<double>(activation.up_offset) : 1.0;
    const double a = act.value * up;
    if (row.a_out != nullptr) static_cast<double*>(row.a_out)[i] = a * row.weight;
    if (da == nullptr) continue;
    total += da[i] * a;
    const double weighted = da[i] * row.weight;
    double dz[2] = {};
    if (gated) {
      dz[0] = through_cut_above(activation, z, weighted * up * act.slope);
      dz[1] = through_cut(activation, u, weighted * act.value);
    } else {
      dz[1] = through_cut(activation, z, weighted * act.slope);
    }
    for (int m = gated ? 0 : 1; m < 2; ++m) {
      const int64_t step = i * row.dz_step;
      if (row.dz != nullptr) static_cast<double*>(row.dz)[row.dz_places[m] + step] = dz[m];
      if (row.scaled_dz == nullptr) continue;
      static_cast<double*>(row.scaled_dz)[row.scaled_places[m] + step] = dz[m] * row.scale;
    }
  }
  return total;
}

void sum_rows(const MoeRowSums& sums) {
  constexpr int64_t kColumns = 64;
  for (int64_t i = 0; i < sums.columns; i += kColumns) {
    const int64_t columns = smaller(kColumns, sums.columns - i);
    double total[kColumns] = {};
    for (int64_t r = 0; r < sums.rows; ++r) {
      const double* const row = static_cast<const double*>(sums.a[r]) + sums.first + i;
      const double scale = sums.scale != nullptr ? sums.scale[r] : 1.0;
      for (int64_t j = 0; j < columns; ++j) total[j] += scale * row[j];
    }
    for (int64_t j = 0; j < columns; ++j) {
      put(total[j], sums.adds, sums.out_is_fp32, sums.out, i + j);
    }
  }
}

double dot(const void* a, Dtype a_dtype, const void* b, Dtype b_dtype, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += number(a, a_dtype, i) * number(b, b_dtype, i);
  return total;
}

constexpr MoeKernel fp64_moe_kernel(const char* isa) {
  return {isa,
          {{kTileRows, kTileColumns}, {kTileRows, kTileColumns}},
          0,
          kGroupRows,
          0,
          Scratch::kBytes,
          multiply,
          add_rows,
          differentiate_row,
          {kTileRows, kTileColumns},
          add_outer,
          sum_rows,
          dot};
}
