// The sums of a product's tile and their final steps, for any instruction set.
//
// Included after cpu/products.h and cpu/moe_activation.h.

FLASHMOE_INLINE Vector load_first_of(const void* p, Dtype dtype, int64_t step, int64_t first,
                                     int64_t n) {
  const auto load = [=](const auto* from) {
    from += first * step;
    return step == 1 ? Simd::load_first(from, n) : Simd::load_every_second(from, n);
  };
  switch (dtype) {
    case Dtype::kFloat32: return load(static_cast<const float*>(p));
    case Dtype::kFloat16: return load(static_cast<const Fp16*>(p));
    case Dtype::kBFloat16: return load(static_cast<const Bf16*>(p));
    case Dtype::kFloat8E4M3:      // attention only
    case Dtype::kFloat64: break;  // has other kernels
  }
  return Simd::zero();
}

// Stores n lanes from an element of an output on, or adds them.
template <typename Element>
FLASHMOE_INLINE void store_or_add(void* out, int64_t place, bool out_is_fp32, bool adds, Vector x,
                                  int64_t n) {
  const auto store = [=](auto* to) {
    Simd::store_first(to, adds ? Simd::add(Simd::load_first(to, n), x) : x, n);
  };
  if (out_is_fp32) {
    store(static_cast<float*>(out) + place);
  } else {
    store(static_cast<Element*>(out) + place);
  }
}

// Whether a matrix has contiguous depth; or all of the tile's matrices do.
FLASHMOE_INLINE bool lies_by_rows(const MoeTile& tile, int m) {
  return tile.weights[m].column_stride == 1;
}

FLASHMOE_INLINE bool lies_by_rows(const MoeTile& tile) {
  return lies_by_rows(tile, 0) && lies_by_rows(tile, tile.matrices - 1);
}

// A tile and its sums, [panels of all matrices][rows][kPanel].
template <typename Element>
class MoeTileSums {
 public:
  // With room for `row_places` rows.
  MoeTileSums(const MoeTile& tile, float* sums, int64_t row_places)
      : tile_(tile),
        sums_(sums),
        panels_((tile.columns + kPanel - 1) / kPanel),
        row_places_(row_places) {}

  MoeTileSums(const MoeTile& tile, float* sums)
      : MoeTileSums(tile, sums, round_up(tile.rows, kGroupRows)) {}

 protected:
  const Element* row(int64_t r) const { return static_cast<const Element*>(tile_.x[r]); }

  const Element* weights(int m, int64_t column, int64_t depth) const {
    const MoeWeights& w = tile_.weights[m];
    return static_cast<const Element*>(w.data) + column * w.row_stride + depth * w.column_stride;
  }

  bool depth_is_contiguous(int m) const { return lies_by_rows(tile_, m); }

  // The sums of a row and the columns of a panel.
  float* sums(int m, int64_t panel, int64_t r) const {
    return sums_ + ((m * panels_ + panel) * row_places_ + r) * kPanel;
  }

  // Applies scale, bias and activation, and stores.
  void finish() const {
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t column = panel * kPanel;
      const int64_t n = tile_.columns - column;
      // A constant number of columns: the masks are constant too.
      if (n >= kPanel) {
        finish_columns(panel, column, kPanel);
      } else {
        finish_columns(panel, column, n);
      }
    }
  }

  const MoeTile& tile_;
  float* const sums_;
  const int64_t panels_;  // of each matrix
  const int64_t row_places_;

 private:
  // Goes row by row, since rows of outputs lie on their own pages.
  FLASHMOE_INLINE void finish_columns(int64_t panel, int64_t column, int64_t n) const {
    Vector bias[kPanelVectors][2];
    for (int v = 0; v < kPanelVectors; ++v) {
      for (int m = 0; m < 2; ++m) {
        const MoeWeights& w = tile_.weights[m];
        const int64_t rest = n - v * kLanes;
        bias[v][m] =
            m < tile_.matrices && w.bias != nullptr && rest > 0
                ? load_first_of(w.bias, w.bias_dtype, w.bias_stride, column + v * kLanes, rest)
                : Simd::zero();
      }
    }
    for (int64_t r = 0; r < tile_.rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) {
        if (v * kLanes < n)
          finish_vector(panel, r, v, column + v * kLanes, n - v * kLanes, bias[v]);
      }
    }
  }

  FLASHMOE_INLINE void finish_vector(int64_t panel, int64_t r, int v, int64_t column, int64_t n,
                                     const Vector (&bias)[2]) const {
    Vector z[2] = {Simd::zero(), Simd::zero()};
    for (int m = 0; m < tile_.matrices; ++m) {
      z[m] = Simd::load(sums(m, panel, r) + v * kLanes);
      if (tile_.scale != nullptr) {
        z[m] = Simd::multiply(z[m], Simd::broadcast(static_cast<float>(tile_.scale[r])));
      }
      z[m] = Simd::add(z[m], bias[m]);
      if (tile_.before[m] != nullptr) {
        Element* before = static_cast<Element*>(tile_.before[m]);
        Simd::store_first(before + r * tile_.before_stride + column, z[m], n);
      }
    }
    const int64_t place = r * tile_.out_stride + column;
    store_or_add<Element>(tile_.out, place, tile_.out_is_fp32, tile_.adds, apply(z), n);
  }

  Vector apply(const Vector (&z)[2]) const {
    if (tile_.activation == nullptr) return z[0];
    const MoeActivation& a = *tile_.activation;
    if (tile_.matrices == 1) return activate(a, cut(a, z[0]));
    const Vector up = Simd::add(cut(a, z[1]), Simd::broadcast(a.up_offset));
    return Simd::multiply(activate(a, cut_above(a, z[0])), up);
  }
};

template <typename Element>
void add_rows(const MoeSum& sum) {
  float weights[kMaxTopK];
  for (int32_t k = 0; k < sum.top_k && sum.weights != nullptr; ++k) {
    weights[k] = static_cast<float>(sum.weights[k]);
  }
  const auto add = [&](const auto* const* rows) {
    for (int64_t i = 0; i < sum.hidden; i += kLanes) {
      Vector total = Simd::zero();
      for (int32_t k = 0; k < sum.top_k; ++k) {
        if (rows[k] == nullptr) continue;
        const Vector y = Simd::load_first(rows[k] + i, sum.hidden - i);
        total = sum.weights == nullptr ? Simd::add(total, y)
                                       : Simd::multiply_add(Simd::broadcast(weights[k]), y, total);
      }
      store_or_add<Element>(sum.out, i, sum.out_is_fp32, sum.adds, total, sum.hidden - i);
    }
  };
  const auto add_of = [&](auto zero) {
    const decltype(zero)* rows[kMaxTopK];
    for (int32_t k = 0; k < sum.top_k; ++k) {
      rows[k] = static_cast<const decltype(zero)*>(sum.y[k]);
    }
    add(rows);
  };
  if (sum.y_is_fp32) return add_of(float{});
  add_of(Element{});
}
