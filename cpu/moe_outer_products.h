// Sums of outer products of rows, the gradient of a matrix, for any instruction set:
//
//   out[m][n] = sum over r of a[r][m] * b[r][n]
//
// Depth is rows here. As many columns of b as have room are packed at a time, in panels. Then
// columns of a are packed, a group of kRows at a time, and multiplied by panel after panel. Their
// sums are written from the level-1 cache to a group of rows of the output, from beginning to end.
// Only with more rows than a block of depth do sums wait in memory for the next block. Every sum is
// fp32 and runs over the rows in order, in runs that depend on nothing else.
//
// An `Engine` multiplies. It decides the packed layout of both operands, and has
//
//   kMost         the largest m and n of a tile
//   kRows         columns of a that are multiplied at a time: a group
//   kStep         words of depth that what is packed is a multiple of
//   kGroups       groups that are packed together, so that runs of a's rows are long
//   kPanels       panels that are multiplied before their sums are written, row by row
//   kBlockWords   words of depth at a time where there are more
//   kPanelWords   words of panels that there is room for
//   kStoresPanels whether its Product stores a panel's columns of a row at once
//
// Included after cpu/moe_few_rows.h.

template <typename Engine>
class OuterProducts {
 public:
  using Product = typename Engine::Product;
  using Element = typename Product::Element;

  OuterProducts(const MoeOuterProducts& tile, void* scratch)
      : tile_(tile),
        packed_rows_(static_cast<float*>(scratch)),
        panels_(packed_rows_ + kRows * kGroups * kBlock),
        sums_(panels_ + Engine::kPanelWords) {}

  // Requires at least one row.
  void compute() const {
    const int64_t room = Engine::kPanelWords / smaller(padded(words_), kBlock) / kPanel * kPanel;
    const int64_t chunks = (tile_.n + room - 1) / room;
    const int64_t columns = round_up((tile_.n + chunks - 1) / chunks, kPanel);
    for (int64_t first = 0; first < tile_.n; first += columns) {
      compute_columns(first, smaller(columns, tile_.n - first));
    }
  }

  static constexpr size_t bytes() {
    constexpr int64_t kSums = Engine::kMost.rows * (Engine::kPanelWords / kBlock);
    return (kRows * kGroups * kBlock + Engine::kPanelWords + kSums) * sizeof(float);
  }

 private:
  static constexpr int64_t kRows = Engine::kRows;
  static constexpr int64_t kBlock = Engine::kBlockWords;
  static constexpr int64_t kGroups = Engine::kGroups;
  static constexpr int64_t kPanels = Engine::kPanels;
  static constexpr int64_t kTogether = 8;  // words of a panel, packed before those of the next
  static_assert(Engine::kMost.rows % kRows == 0 && kBlock % Engine::kStep == 0 &&
                Engine::kPanelWords / kBlock % kPanel == 0);

  static int64_t padded(int64_t words) { return round_up(words, Engine::kStep); }

  void compute_columns(int64_t first, int64_t columns) const {
    const int64_t panels = (columns + kPanel - 1) / kPanel;
    for (int64_t word = 0; word < words_; word += kBlock) {
      const int64_t words = padded(smaller(kBlock, words_ - word));
      pack_panels(first, columns, word, words);
      for (int64_t m = 0; m < tile_.m; m += kRows * kGroups) {
        pack_groups(m, smaller(kRows * kGroups, tile_.m - m), word, words);
        for (int64_t group = m; group < smaller(m + kRows * kGroups, tile_.m); group += kRows) {
          multiply_group(group, packed_rows_ + (group - m) * words, first, panels, word, words);
        }
      }
    }
  }

  // Multiplies a group of columns of a by all panels, some at a time.
  void multiply_group(int64_t m, const float* rows, int64_t first, int64_t panels, int64_t word,
                      int64_t words) const {
    const int64_t count = smaller(kRows, tile_.m - m);
    const bool ends = word + kBlock >= words_;
    for (int64_t panel = 0; panel < panels; panel += kPanels) {
      const int64_t end = smaller(panel + kPanels, panels);
      float* const sums = words_ > kBlock ? sums_ + (m * panels + panel * kRows) * kPanel : sums_;
      for (int64_t p = panel; p < end; ++p) {
        Engine::multiply(rows, panels_ + p * kPanel * words, words, count, word == 0,
                         sums + (p - panel) * kRows * kPanel);
      }
      if (ends) finish(m, count, first + panel * kPanel, end - panel, sums);
    }
  }

  // Reads long runs of a row together, here and below.
  void pack_groups(int64_t m, int64_t count, int64_t word, int64_t words) const {
    for (int64_t done = 0; done < words; done += Engine::kStep) {
      for (int64_t group = 0; group < count; group += kRows) {
        Engine::pack_rows(*this, m + group, smaller(kRows, count - group), word + done,
                          packed_rows_ + group * words, done);
      }
    }
  }

  void pack_panels(int64_t first, int64_t columns, int64_t word, int64_t words) const {
    for (int64_t done = 0; done < words; done += kTogether) {
      const int64_t count = smaller(kTogether, words - done);
      for (int64_t column = 0; column < columns; column += kPanel) {
        float* const panel = panels_ + column * words;
        const int64_t n = columns - column;
        fetch(tile_.b, tile_.b_first + first + column, smaller(n, kPanel), word + done + count);
        for (int64_t i = done; i < done + count; ++i) {
          Vector loaded[kPanelVectors];
          // A constant number of columns: the masks are constant too.
          if (n >= kPanel) {
            load(tile_.b, tile_.b_first + first + column, kPanel, word + i, loaded);
          } else {
            load(tile_.b, tile_.b_first + first + column, n, word + i, loaded);
          }
          Engine::store_word(panel, words, i, loaded);
        }
      }
    }
  }

  // Prefetches as many words as are packed together, from a word on.
  FLASHMOE_INLINE void fetch(const void* const* rows, int64_t element, int64_t n,
                             int64_t word) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
    const int64_t end = smaller((word + kTogether) * Product::kPack, tile_.rows);
    for (int64_t row = word * Product::kPack; row < end; ++row) {
      const Element* const from = static_cast<const Element*>(rows[row]) + element;
      for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i, 0, 3);
    }
  }

  friend Engine;

  // Loads a word of n columns from an element of the rows on, with zeros after the last row.
  FLASHMOE_INLINE void load(const void* const* rows, int64_t element, int64_t n, int64_t word,
                            Vector (&to)[kPanelVectors]) const {
    const int64_t row = word * Product::kPack;
    if (row >= tile_.rows) {
      for (int v = 0; v < kPanelVectors; ++v) to[v] = Simd::zero();
      return;
    }
    const Element* const first = static_cast<const Element*>(rows[row]) + element;
    if (Product::kPack == 1)
      return Product::template load_columns<kPanelVectors>(first, first, n, to);
    if (row + 1 < tile_.rows) {
      const Element* const second = static_cast<const Element*>(rows[row + 1]) + element;
      return Product::template load_columns<kPanelVectors>(first, second, n, to);
    }
    load_vectors<kPanelVectors>(n, to, [=](int64_t i, int64_t rest) {
      return Product::load_values(first + i, nullptr, rest);
    });
  }

  FLASHMOE_INLINE void load_a(int64_t m, int64_t n, int64_t word,
                              Vector (&to)[kPanelVectors]) const {
    load(tile_.a, tile_.a_first + m, n, word, to);
  }

  // Finishes sums of some panels of a group, row by row: rows of outputs lie on their own pages and
  // often map to the same cache sets.
  void finish(int64_t m, int64_t count, int64_t column, int64_t panels, const float* sums) const {
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t p = 0; p < panels; ++p) {
        const float* const from = sums + p * kRows * kPanel;
        const int64_t n = tile_.n - column - p * kPanel;
        const int64_t place = (m + r) * tile_.out_stride + column + p * kPanel;
        // As above.
        if (n >= kPanel) {
          store(place, kPanel, r, from);
        } else {
          store(place, n, r, from);
        }
      }
    }
  }

  FLASHMOE_INLINE void store(int64_t place, int64_t n, int64_t r, const float* sums) const {
    if constexpr (Engine::kStoresPanels) {
      if (n == kPanel && !tile_.out_is_fp32 && !tile_.adds) {
        Product::store_panel(static_cast<Element*>(tile_.out) + place,
                             Engine::load_sums(sums, r, 0), Engine::load_sums(sums, r, 1));
        return;
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      if (v * kLanes >= n) continue;
      store_or_add<Element>(tile_.out, place + v * kLanes, tile_.out_is_fp32, tile_.adds,
                            Engine::load_sums(sums, r, v), n - v * kLanes);
    }
  }

  const MoeOuterProducts& tile_;
  float* const packed_rows_;
  float* const panels_;
  float* const sums_;  // [group][panel][kRows * kPanel]
  const int64_t words_ = (tile_.rows + Product::kPack - 1) / Product::kPack;
};

// Uses vector registers: rows are packed as [word][kGroupRows], panels as [word][kPanel].
template <typename TheProduct>
struct OuterInVectors {
  using Product = TheProduct;
  using Outer = OuterProducts<OuterInVectors>;
  static constexpr MoeTileSize kMost = {kTileRows, 2048};
  static constexpr int64_t kRows = kGroupRows;
  static constexpr int64_t kStep = 1;
  static constexpr int64_t kGroups = 8;
  static constexpr int64_t kPanels = 1;
  static constexpr int64_t kBlockWords = 128;
  static constexpr int64_t kPanelWords = kBlockWords * 512;
  static constexpr bool kStoresPanels = false;
  static constexpr int64_t kRun = 64;  // words summed in one go, as in other long sums
  static_assert(kBlockWords % kRun == 0 && kGroupRows <= kPanel);

  static void store_word(float* panel, int64_t /*words*/, int64_t word,
                         const Vector (&loaded)[kPanelVectors]) {
    for (int v = 0; v < kPanelVectors; ++v) {
      Simd::store(panel + word * kPanel + v * kLanes, loaded[v]);
    }
  }

  static void pack_rows(const Outer& outer, int64_t m, int64_t count, int64_t word, float* group,
                        int64_t done) {
    Vector loaded[kPanelVectors];
    outer.load_a(m, count, word, loaded);
    float* const to = group + done * kGroupRows;
    Simd::store_first(to, loaded[0], kGroupRows);
    if (kGroupRows > kLanes) Simd::store_first(to + kLanes, loaded[1], kGroupRows - kLanes);
  }

  static void multiply(const float* rows, const float* panel, int64_t words, int64_t count,
                       bool begins, float* sums) {
    constexpr int kThird = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;
    if (count <= kThird) {
      multiply_group<kThird>(rows, panel, words, begins, sums);
    } else {
      multiply_group<kGroupRows>(rows, panel, words, begins, sums);
    }
  }

  template <int kCount>
  FLASHMOE_NOINLINE static void multiply_group(const float* rows, const float* panel, int64_t words,
                                               bool begins, float* sums) {
    const auto add = [=](int r, int v, Vector sum) {
      float* to = sums + r * kPanel + v * kLanes;
      Simd::store(to, Simd::add(Simd::load(to), sum));
    };
    const auto begin = [=](int r, int v, Vector sum) {
      if (!begins) return add(r, v, sum);
      Simd::store(sums + r * kPanel + v * kLanes, sum);
    };
    multiply_panel<Product, kCount, kPanelVectors, 1, kGroupRows>(rows, panel, words, kRun, begin,
                                                                  add);
  }

  static Vector load_sums(const float* sums, int64_t r, int v) {
    return Simd::load(sums + r * kPanel + v * kLanes);
  }
};

template <typename Product>
void add_outer_products(const MoeOuterProducts& tile, void* scratch) {
  using Outer = OuterProducts<OuterInVectors<Product>>;
  static_assert(Outer::bytes() <= MoeScratch::kBytes);
  Outer(tile, scratch).compute();
}
