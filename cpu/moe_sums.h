// The sums of a tile of a product, and what comes of them, for any instruction set.
//
// Included after cpu/products.h and cpu/moe_activation.h.

constexpr int64_t kMostRows = 264 / kGroupRows * kGroupRows;
// Of all matrices together. Tiles of AMX are through with them so fast that packing rows counts.
constexpr int64_t kMostColumns = kGroupRows == 16 ? 512 : 256;
constexpr int64_t kBlockWords = 256;
constexpr int64_t kMostPanels = 4;  // packed at a time

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
  }
  return Simd::zero();
}

// The scratch of one thread.
struct MoeScratch {
  static constexpr int64_t kRows = kMostRows * kBlockWords + kLanes;  // and one vector behind
  static constexpr int64_t kPanelWords = kBlockWords * kPanel;
  static constexpr int64_t kSums = kMostRows * kMostColumns;
  static constexpr size_t kBytes = (kRows + kMostPanels * kPanelWords + kSums) * sizeof(float);

  float* rows;   // many: [groups][words of the block][kGroupRows]; few: [rows][kFewStride]
  float* panel;  // [kMostPanels][words of the block][kPanel]
  float* sums;   // [panels of all matrices][rows][kPanel]

  explicit MoeScratch(void* base)
      : rows(static_cast<float*>(base)),
        panel(rows + kRows),
        sums(panel + kMostPanels * kPanelWords) {}
};

// A tile and the memory to compute it in.
template <typename Element>
class MoeTileSums {
 public:
  MoeTileSums(const MoeTile& tile, void* scratch)
      : tile_(tile),
        s_(scratch),
        panels_((tile.columns + kPanel - 1) / kPanel),
        row_places_(round_up(tile.rows, kGroupRows)) {}

 protected:
  const Element* row(int64_t r) const { return static_cast<const Element*>(tile_.x[r]); }

  const Element* weights(int m, int64_t column, int64_t depth) const {
    const MoeWeights& w = tile_.weights[m];
    return static_cast<const Element*>(w.data) + column * w.row_stride + depth * w.column_stride;
  }

  bool depth_is_contiguous(int m) const { return tile_.weights[m].column_stride == 1; }

  // The sums of a row and the columns of a panel.
  float* sums(int m, int64_t panel, int64_t r) const {
    return s_.sums + ((m * panels_ + panel) * row_places_ + r) * kPanel;
  }

  // Scale, bias, activation, store.
  void finish() const {
    for (int64_t panel = 0; panel < panels_; ++panel) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t column = panel * kPanel + v * kLanes;
        if (column < tile_.columns) finish_columns(panel, v, column);
      }
    }
  }

  const MoeTile& tile_;
  const MoeScratch s_;
  const int64_t panels_;  // of each matrix
  const int64_t row_places_;

 private:
  void finish_columns(int64_t panel, int v, int64_t column) const {
    const int64_t n = tile_.columns - column;
    Vector bias[2] = {Simd::zero(), Simd::zero()};
    for (int m = 0; m < tile_.matrices; ++m) {
      const MoeWeights& w = tile_.weights[m];
      if (w.bias != nullptr) {
        bias[m] = load_first_of(w.bias, w.bias_dtype, w.bias_stride, column, n);
      }
    }
    for (int64_t r = 0; r < tile_.rows; ++r) {
      Vector z[2] = {Simd::zero(), Simd::zero()};
      for (int m = 0; m < tile_.matrices; ++m) {
        z[m] = Simd::load(sums(m, panel, r) + v * kLanes);
        if (tile_.scale != nullptr) {
          z[m] = Simd::multiply(z[m], Simd::broadcast(tile_.scale[r]));
        }
        z[m] = Simd::add(z[m], bias[m]);
        if (tile_.before[m] != nullptr) {
          Element* before = static_cast<Element*>(tile_.before[m]);
          Simd::store_first(before + r * tile_.before_stride + column, z[m], n);
        }
      }
      Element* out = static_cast<Element*>(tile_.out) + r * tile_.out_stride + column;
      Simd::store_first(out, apply(z), n);
    }
  }

  Vector apply(const Vector (&z)[2]) const {
    if (tile_.activation == nullptr) return z[0];
    const MoeActivation& a = *tile_.activation;
    if (tile_.matrices == 1) return activate(a, cut(a, z[0]));
    const Vector up = Simd::add(cut(a, z[1]), Simd::broadcast(a.up_offset));
    return Simd::multiply(activate(a, cut_above(a, z[0])), up);
  }
};
