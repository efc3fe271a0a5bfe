// What gradients of a mixture of experts need beside products of rows with matrices, for any
// instruction set: the gradient of the activation, sums of outer products of rows - the gradient of
// a matrix - and sums of rows.
//
// Outer products: a tile of the gradient of one expert's matrix, over all of the expert's rows in
// blocks of kBlockWords words of depth, where depth is now rows. The two operands lie so that what
// is contiguous is what a register holds, so that packing turns nothing round. Sums are fp32, those
// of a tile in the second level of the cache; every sum runs over the rows in their order, and in
// runs that depend on nothing else.
//
// Included after cpu/moe_few_rows.h.

constexpr int64_t kOuterRows = kTileRows;
constexpr int64_t kOuterColumns = kTileColumns;
static_assert(kOuterRows * kOuterColumns <= MoeScratch::kSums);
static_assert(kGroupRows <= kLanes);

template <typename Product>
class OuterProducts {
 public:
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;
  static constexpr int64_t kRun = 64;  // words that are summed in one go: as of other long sums

  OuterProducts(const MoeOuterProducts& tile, void* scratch) : tile_(tile), s_(scratch) {}

  void compute() {
    const int64_t words = (tile_.rows + kPack - 1) / kPack;
    for (int64_t word = 0; word < words; word += kBlockWords) {
      const int64_t steps = smaller(kBlockWords, words - word);
      pack_rows(word, steps);
      for (int64_t panel = 0; panel < panels_; ++panel) {
        pack_panel(panel, word, steps);
        multiply(panel, steps, word == 0);
      }
    }
    for (int64_t panel = 0; panel < panels_; ++panel) finish(panel, words > 0);
  }

 private:
  // Both rows of a word, of which the second may not be there, from an element on.
  struct WordRows {
    const Element* first;
    const Element* second;

    WordRows(const void* const* rows, int64_t row, int64_t count, int64_t element)
        : first(static_cast<const Element*>(rows[row]) + element),
          second(kPack == 2 && row + 1 < count
                     ? static_cast<const Element*>(rows[row + 1]) + element
                     : nullptr) {}
  };

  // As groups [word][kGroupRows], row by row: each is read at once.
  void pack_rows(int64_t word, int64_t steps) const {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t row = (word + step) * kPack;
      for (int64_t first = 0; first < tile_.m; first += kGroupRows) {
        const WordRows at(tile_.a, row, tile_.rows, tile_.a_first + first);
        const Vector words =
            Product::load_values(at.first, at.second, smaller(kGroupRows, tile_.m - first));
        Simd::store_first(s_.rows + first * steps + step * kGroupRows, words, kGroupRows);
      }
    }
  }

  void pack_panel(int64_t panel, int64_t word, int64_t steps) const {
    const int64_t column = panel * kPanel;
    const int64_t n = tile_.n - column;
    // A constant number of columns: the masks are constant too.
    if (n >= kPanel) return pack_columns(column, kPanel, word, steps);
    pack_columns(column, n, word, steps);
  }

  FLASHMOE_INLINE void pack_columns(int64_t column, int64_t n, int64_t word, int64_t steps) const {
    float* to = s_.panel;
    for (int64_t step = 0; step < steps; ++step, to += kPanel) {
      const WordRows at(tile_.b, (word + step) * kPack, tile_.rows, tile_.b_first + column);
      Vector words[kPanelVectors];
      if (kPack == 1 || at.second != nullptr) {
        Product::template load_columns<kPanelVectors>(at.first, at.second, n, words);
      } else {
        load_vectors<kPanelVectors>(n, words, [=](int64_t i, int64_t rest) {
          return Product::load_values(at.first + i, nullptr, rest);
        });
      }
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) Simd::store(to + v * kLanes, words[v]);
    }
  }

  float* sums(int64_t panel, int64_t row) const {
    return s_.sums + (panel * row_places_ + row) * kPanel;
  }

  void multiply(int64_t panel, int64_t steps, bool begin) const {
    constexpr int kThird = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;
    for (int64_t first = 0; first < tile_.m; first += kGroupRows) {
      const float* rows = s_.rows + first * steps;
      float* to = sums(panel, first);
      if (tile_.m - first <= kThird) {
        multiply_group<kThird>(rows, s_.panel, steps, begin, to);
      } else {
        multiply_group<kGroupRows>(rows, s_.panel, steps, begin, to);
      }
    }
  }

  template <int kRows>
  FLASHMOE_NOINLINE static void multiply_group(const float* rows, const float* panel, int64_t steps,
                                               bool first_block, float* sums) {
    const auto add = [=](int r, int v, Vector sum) {
      float* to = sums + r * kPanel + v * kLanes;
      Simd::store(to, Simd::add(Simd::load(to), sum));
    };
    const auto begin = [=](int r, int v, Vector sum) {
      if (!first_block) return add(r, v, sum);
      Simd::store(sums + r * kPanel + v * kLanes, sum);
    };
    multiply_panel<Product, kRows, kPanelVectors, 1, kGroupRows>(rows, panel, steps, kRun, begin,
                                                                 add);
  }

  void finish(int64_t panel, bool summed) const {
    const int64_t column = panel * kPanel;
    for (int64_t r = 0; r < tile_.m; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t place = column + v * kLanes;
        if (place >= tile_.n) continue;
        const Vector sum = summed ? Simd::load(sums(panel, r) + v * kLanes) : Simd::zero();
        store_or_add<Element>(tile_.out, r * tile_.out_stride + place, tile_.out_is_fp32,
                              tile_.adds, sum, tile_.n - place);
      }
    }
  }

  const MoeOuterProducts& tile_;
  const MoeScratch s_;
  const int64_t panels_ = (tile_.n + kPanel - 1) / kPanel;
  const int64_t row_places_ = round_up(tile_.m, kGroupRows);
};

template <typename Product>
void add_outer_products(const MoeOuterProducts& tile, void* scratch) {
  OuterProducts<Product>(tile, scratch).compute();
}

// dz of g or of u, from element `first` on: in every second place by way of `pairs`.
template <typename Element>
class GradientStore {
 public:
  GradientStore(void* to, const int64_t (&places)[2], int64_t step)
      : to_(static_cast<Element*>(to)), places_(places), step_(step) {}

  FLASHMOE_INLINE void store(int64_t first, const Vector (&dz)[2], bool gated, int64_t n) const {
    if (to_ == nullptr) return;
    if (step_ == 1) {
      if (gated) Simd::store_first(to_ + places_[0] + first, dz[0], n);
      Simd::store_first(to_ + places_[1] + first, dz[1], n);
      return;
    }
    float each[2][kLanes];
    float pairs[2 * kLanes];
    Simd::store(each[0], dz[0]);
    Simd::store(each[1], dz[1]);
    for (int i = 0; i < kLanes; ++i) {
      pairs[2 * i] = each[0][i];
      pairs[2 * i + 1] = each[1][i];
    }
    const int64_t places = 2 * smaller(n, kLanes);
    Element* to = to_ + places_[0] + 2 * first;
    Simd::store_first(to, Simd::load(pairs), places);
    if (places > kLanes) {
      Simd::store_first(to + kLanes, Simd::load(pairs + kLanes), places - kLanes);
    }
  }

 private:
  Element* const to_;
  const int64_t (&places_)[2];
  const int64_t step_;
};

template <typename Element>
float differentiate_row(const MoeActivationGradient& row) {
  const MoeActivation& activation = *row.activation;
  const bool gated = row.before[1] != nullptr;
  const Vector weight = Simd::broadcast(row.weight);
  const Vector scale = Simd::broadcast(row.scale);
  const GradientStore<Element> dz_store(row.dz, row.dz_places, row.dz_step);
  const GradientStore<Element> scaled_store(row.scaled_dz, row.scaled_places, row.dz_step);
  Vector total = Simd::zero();
  for (int64_t i = 0; i < row.inner; i += kLanes) {
    const int64_t n = row.inner - i;
    const Vector first = Simd::load_first(static_cast<const Element*>(row.before[0]) + i, n);
    const Vector second =
        gated ? Simd::load_first(static_cast<const Element*>(row.before[1]) + i, n) : Simd::zero();
    const Activated act = activate_with_slope(
        activation, gated ? cut_above(activation, first) : cut(activation, first));
    const Vector up =
        gated ? Simd::add(cut(activation, second), Simd::broadcast(activation.up_offset))
              : Simd::broadcast(1.0f);
    const Vector a = gated ? Simd::multiply(act.value, up) : act.value;
    if (row.a_out != nullptr) {
      Simd::store_first(static_cast<Element*>(row.a_out) + i, Simd::multiply(a, weight), n);
    }
    if (row.da == nullptr) continue;
    const Vector da = Simd::load_first(row.da + i, n);
    total = Simd::multiply_add(da, a, total);
    const Vector weighted = Simd::multiply(da, weight);
    Vector dz[2];
    if (gated) {
      dz[0] = through_cut_above(activation, first,
                                Simd::multiply(Simd::multiply(weighted, up), act.slope));
      dz[1] = through_cut(activation, second, Simd::multiply(weighted, act.value));
    } else {
      dz[0] = Simd::zero();
      dz[1] = through_cut(activation, first, Simd::multiply(weighted, act.slope));
    }
    dz_store.store(i, dz, gated, n);
    const Vector scaled[2] = {Simd::multiply(dz[0], scale), Simd::multiply(dz[1], scale)};
    scaled_store.store(i, scaled, gated, n);
  }
  return Simd::sum_of(total);
}

// A few vectors of columns at a time, and rows in runs whose sums are then added up: errors grow
// with the root of a run and of their number.
template <typename Element>
void sum_rows(const MoeRowSums& sums) {
  constexpr int kVectors = 4;
  constexpr int64_t kRun = 16;
  for (int64_t i = 0; i < sums.columns; i += kVectors * kLanes) {
    Vector total[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[v] = Simd::zero();
    for (int64_t begin = 0; begin < sums.rows; begin += kRun) {
      const int64_t end = smaller(begin + kRun, sums.rows);
      Vector run[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) run[v] = Simd::zero();
      for (int64_t r = begin; r < end; ++r) {
        const Element* row = static_cast<const Element*>(sums.a[r]) + sums.first + i;
        const Vector scale = Simd::broadcast(sums.scale != nullptr ? sums.scale[r] : 1.0f);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t n = sums.columns - i - v * kLanes;
          if (n <= 0) continue;
          run[v] = Simd::multiply_add(scale, Simd::load_first(row + v * kLanes, n), run[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[v] = Simd::add(total[v], run[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t n = sums.columns - i - v * kLanes;
      if (n <= 0) continue;
      store_or_add<Element>(sums.out, i + v * kLanes, sums.out_is_fp32, sums.adds, total[v], n);
    }
  }
}

inline float dot_of(const void* a, Dtype a_dtype, const void* b, Dtype b_dtype, int64_t n) {
  Vector total = Simd::zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    total = Simd::multiply_add(load_first_of(a, a_dtype, 1, i, n - i),
                               load_first_of(b, b_dtype, 1, i, n - i), total);
  }
  return Simd::sum_of(total);
}
