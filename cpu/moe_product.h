// Products of a mixture of experts for any instruction set: a tile of the rows that an expert has
// times rows of its matrix (cpu/moe_kernel.h says what comes out).
//
// Many rows: blocks of kBlockWords words of depth. The tile's rows are packed once a block, as
// groups [word][kGroupRows], a panel of kPanel columns at a time is packed as [word][kPanel], and
// every group is multiplied by it (cpu/products.h). Rows and sums stay in L2, a panel in L1; a word
// of weights is packed once for all rows of the tile.
//
// Few rows: see cpu/moe_few_rows.h.
//
// Sums are fp32, one for each row and column, added up in the order of depth; what is added first in
// registers depends on the number of rows of the tile only in that few and many are two orders.
//
// Included after cpu/moe_few_rows.h.

template <typename Product>
class ManyRows : MoeTileSums<typename Product::Element> {
 public:
  using Element = typename Product::Element;
  using Base = MoeTileSums<Element>;
  static constexpr int kPack = Product::kPack;

  using Base::Base;

  void compute() {
    const int64_t words = tile_.depth / kPack;
    for (int64_t word = 0; word < words; word += kBlockWords) {
      const int64_t steps = smaller(kBlockWords, words - word);
      pack_rows(word, steps);
      for (int m = 0; m < tile_.matrices; ++m) {
        for (int64_t panel = 0; panel < this->panels_; ++panel) {
          pack_panel(m, panel * kPanel, word, steps);
          multiply(m, panel, steps, word == 0);
        }
      }
    }
    this->finish();
  }

 private:
  using Base::s_;
  using Base::tile_;

  void pack_rows(int64_t word, int64_t steps) const {
    for (int64_t first = 0; first < tile_.rows; first += kGroupRows) {
      const int64_t rows = smaller(kGroupRows, tile_.rows - first);
      const Element* from[kLanes];
      for (int64_t r = 0; r < rows; ++r) from[r] = this->row(first + r);
      float* to = s_.rows + first * steps;
      for (int64_t step = 0; step < steps; step += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, rows, (word + step) * kPack, tile_.depth, block);
        // A row of the block is longer than a group: the next one overwrites what is too much.
        const int64_t count = smaller(kLanes, steps - step);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (step + i) * kGroupRows, block[i]);
      }
    }
  }

  void pack_panel(int m, int64_t column, int64_t word, int64_t steps) const {
    if (this->depth_is_contiguous(m)) {
      transpose_panel(m, column, word, steps);
    } else if (tile_.weights[m].row_stride == 1) {
      copy_panel(m, column, word, steps, Product::load_values);
    } else {
      copy_panel(m, column, word, steps, Product::load_every_second_value);
    }
  }

  void transpose_panel(int m, int64_t column, int64_t word, int64_t steps) const {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t first = column + v * kLanes;
      const int64_t columns = clamp(tile_.columns - first, 0, kLanes);
      const Element* from[kLanes];
      for (int64_t j = 0; j < columns; ++j) from[j] = this->weights(m, first + j, 0);
      float* to = s_.panel + v * kLanes;
      for (int64_t step = 0; step < steps; step += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, columns, (word + step) * kPack, tile_.depth, block);
        const int64_t count = smaller(kLanes, steps - step);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (step + i) * kPanel, block[i]);
      }
    }
  }

  template <typename Load>
  FLASHMOE_INLINE void copy_panel(int m, int64_t column, int64_t word, int64_t steps,
                                  Load load) const {
    const int64_t next = kPack > 1 ? tile_.weights[m].column_stride : 0;
    for (int64_t step = 0; step < steps; ++step) {
      const Element* from = this->weights(m, column, (word + step) * kPack);
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t n = tile_.columns - column - v * kLanes;
        const Element* p = from + v * kLanes * tile_.weights[m].row_stride;
        Simd::store(s_.panel + step * kPanel + v * kLanes,
                    n > 0 ? load(p, p + next, n) : Simd::zero());
      }
    }
  }

  void multiply(int m, int64_t panel, int64_t steps, bool first_block) const {
    constexpr int kThird = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;
    for (int64_t first = 0; first < tile_.rows; first += kGroupRows) {
      const int64_t rows = tile_.rows - first;
      const float* from = s_.rows + first * steps;
      float* to = this->sums(m, panel, first);
      if (rows <= kThird) {
        multiply_group<kThird>(from, s_.panel, steps, first_block, to);
      } else if (rows <= 2 * kThird) {
        multiply_group<2 * kThird>(from, s_.panel, steps, first_block, to);
      } else {
        multiply_group<kGroupRows>(from, s_.panel, steps, first_block, to);
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
    multiply_panel<Product, kRows, kPanelVectors, 1, kGroupRows>(rows, panel, steps,
                                                                 Product::kScoreRun, begin, add);
  }
};

template <typename Product>
void multiply_tile(const MoeTile& tile, void* scratch) {
  if (tile.rows <= FewRows<Product>::most_rows(tile)) {
    FewRows<Product>(tile, scratch).compute();
  } else {
    ManyRows<Product>(tile, scratch).compute();
  }
}

template <typename Element>
void add_rows(const MoeSum& sum) {
  for (int64_t i = 0; i < sum.hidden; i += kLanes) {
    Vector total = Simd::zero();
    for (int32_t k = 0; k < sum.top_k; ++k) {
      if (sum.y[k] == nullptr) continue;
      const Vector y = Simd::load_first(static_cast<const Element*>(sum.y[k]) + i, sum.hidden - i);
      total = sum.weights == nullptr
                  ? Simd::add(total, y)
                  : Simd::multiply_add(Simd::broadcast(sum.weights[k]), y, total);
    }
    Simd::store_first(static_cast<Element*>(sum.out) + i, total, sum.hidden - i);
  }
}

template <typename Product>
constexpr MoeKernel moe_kernel(const char* isa) {
  return {isa,
          kMostRows,
          kMostColumns,
          MoeScratch::kBytes,
          multiply_tile<Product>,
          add_rows<typename Product::Element>};
}
