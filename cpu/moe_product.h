// The GEMMs of a mixture of experts, for any instruction set: a tile of an expert's rows times rows
// of its matrix (cpu/moe_kernel.h defines the result).
//
// Many rows: depth goes in blocks of kBlockWords words. The tile's rows are packed once per block.
// One panel of kPanel columns at a time is packed as [word][kPanel], and all rows are multiplied by
// it (cpu/products.h). Rows and sums stay in L2, a panel in L1; a word of weights is packed once
// for all rows of the tile.
//
// Few rows: see cpu/moe_few_rows.h.
//
// Sums are fp32, one per row and column, in the order of depth. The number of rows of the tile
// matters only in that few and many rows add in two different orders.
//
// Included after cpu/moe_gradient_rows.h.

template <typename Product>
class ManyRows : MoeTileSums<typename Product::Element> {
 public:
  using Element = typename Product::Element;
  using Base = MoeTileSums<Element>;
  static constexpr int kPack = Product::kPack;
  // Words of depth summed in one go: see Product::kScoreRun. Errors of a product here are not
  // exponentiated, and sums of 16-bit numbers may be longer: their own rounding is larger.
  static constexpr int64_t kRun = sizeof(Element) < sizeof(float) ? kBlockWords
                                  : Simd::kFused                  ? 64
                                                                  : 32;

  ManyRows(const MoeTile& tile, const MoeScratch& scratch)
      : Base(tile, scratch.sums), s_(scratch) {}

  void compute() {
    const int64_t words = tile_.depth / kPack;
    for (int64_t word = 0; word < words; word += block_) {
      const int64_t steps = smaller(block_, words - word);
      pack_rows(word, steps);
      for (int m = 0; m < tile_.matrices; ++m) {
        for (int64_t panel = 0; panel < this->panels_; ++panel) {
          const Panel packed = {m, panel, word, steps};
          pack_panel(packed);
          multiply(packed, words);
        }
      }
    }
    this->finish();
  }

 private:
  using Base::tile_;

  // A panel's columns over a block of depth.
  struct Panel {
    int m;
    int64_t panel;
    int64_t word;
    int64_t steps;  // 0: none

    int64_t column() const { return panel * kPanel; }
  };

  Panel next_of(const Panel& p, int64_t words) const {
    if (p.panel + 1 < this->panels_) return {p.m, p.panel + 1, p.word, p.steps};
    if (p.m + 1 < tile_.matrices) return {p.m + 1, 0, p.word, p.steps};
    const int64_t word = p.word + block_;
    return {0, 0, word, clamp(words - word, 0, block_)};
  }

  // Prefetches the next weights into the level-2 cache, a few lines at a time: many at once would
  // fill the buffers of outstanding misses, and the products would wait. With depth contiguous it
  // fetches the next panel. With columns contiguous each word of depth is on its own page, so all
  // panels of the next block are fetched together, a part of their depth with each panel of this
  // one.
  class Fetch {
   public:
    // Fetches while panel `p` is multiplied, in `times` calls of some_lines.
    Fetch(const ManyRows& tile, const Panel& p, int64_t words, int64_t times) {
      const Panel next = tile.next_of(p, words);
      const Panel block = tile.next_of({p.m, tile.panels_ - 1, p.word, p.steps}, words);
      if (next.steps > 0 && tile.depth_is_contiguous(next.m)) {
        const int64_t columns = smaller(kPanel, tile.tile_.columns - next.column());
        fetch(tile, next, 0, next.steps * kPack, columns, times);
      } else if (block.steps > 0 && !tile.depth_is_contiguous(block.m)) {
        const int64_t depth = block.steps * kPack;
        fetch(tile, block, depth * p.panel / tile.panels_, depth * (p.panel + 1) / tile.panels_,
              tile.tile_.columns, times);
      }
    }

    void some_lines() {
      for (int64_t i = 0; i < lines_ && runs_ > 0; ++i) {
        __builtin_prefetch(from_ + at_, 0, 2);
        at_ += kLine;
        if (at_ < length_) continue;
        at_ = 0;
        from_ += stride_;
        --runs_;
      }
    }

   private:
    static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));

    void fetch(const ManyRows& tile, const Panel& p, int64_t begin, int64_t end, int64_t columns,
               int64_t times) {
      const MoeWeights& w = tile.tile_.weights[p.m];
      const bool by_rows = tile.depth_is_contiguous(p.m);
      from_ = tile.weights(p.m, p.column(), p.word * kPack + begin);
      runs_ = by_rows ? columns : end - begin;
      stride_ = by_rows ? w.row_stride : w.column_stride;
      length_ = by_rows ? end - begin : columns * w.row_stride;
      lines_ = (runs_ * ((length_ + kLine - 1) / kLine) + times - 1) / times;
    }

    const Element* from_ = nullptr;
    int64_t runs_ = 0;  // still to fetch
    int64_t stride_ = 0;
    int64_t length_ = 0;  // elements per run
    int64_t at_ = 0;
    int64_t lines_ = 0;  // per call
  };

  struct SomeLines {
    static constexpr int64_t kEverySteps = 8;
    Fetch* fetch;
    void operator()() const { fetch->some_lines(); }
  };

  // Packs as groups [word][kGroupRows].
  void pack_rows(int64_t word, int64_t steps) const {
    for (int64_t first = 0; first < tile_.rows; first += kGroupRows) {
      const int64_t rows = smaller(kGroupRows, tile_.rows - first);
      const Element* from[kLanes];
      for (int64_t r = 0; r < rows; ++r) from[r] = this->row(first + r);
      float* to = s_.rows + first * steps;
      for (int64_t step = 0; step < steps; step += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, rows, (word + step) * kPack, tile_.depth, block);
        // A row of the block is longer than a group: the next one overwrites the excess.
        const int64_t count = smaller(kLanes, steps - step);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (step + i) * kGroupRows, block[i]);
      }
    }
  }

  void pack_panel(const Panel& p) const {
    if (this->depth_is_contiguous(p.m)) {
      transpose_panel(p);
    } else if (tile_.weights[p.m].row_stride == 1) {
      copy_panel(p, Product::template load_columns<kPanelVectors>);
    } else {
      copy_panel(p, load_every_second_column<Product, kPanelVectors>);
    }
  }

  void transpose_panel(const Panel& p) const {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t first = p.column() + v * kLanes;
      const int64_t columns = clamp(tile_.columns - first, 0, kLanes);
      const Element* from[kLanes];
      for (int64_t j = 0; j < columns; ++j) from[j] = this->weights(p.m, first + j, 0);
      float* to = s_.panel + v * kLanes;
      for (int64_t step = 0; step < p.steps; step += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, columns, (p.word + step) * kPack, tile_.depth, block);
        const int64_t count = smaller(kLanes, p.steps - step);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (step + i) * kPanel, block[i]);
      }
    }
  }

  template <typename Load>
  FLASHMOE_INLINE void copy_panel(const Panel& p, Load load) const {
    const int64_t n = tile_.columns - p.column();
    // A constant number of columns: the masks are constant too.
    if (n >= kPanel) return copy_columns(p, kPanel, load);
    copy_columns(p, n, load);
  }

  template <typename Load>
  FLASHMOE_INLINE void copy_columns(const Panel& p, int64_t n, Load load) const {
    const int64_t next = tile_.weights[p.m].column_stride;
    const Element* from = this->weights(p.m, p.column(), p.word * kPack);
    float* to = s_.panel;
    for (int64_t step = 0; step < p.steps; ++step) {
      Vector words[kPanelVectors];
      load(from, from + (kPack - 1) * next, n, words);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) Simd::store(to + v * kLanes, words[v]);
      from += kPack * next;
      to += kPanel;
    }
  }

  // Prefetches the next weights meanwhile, since packing them would wait for memory.
  void multiply(const Panel& p, int64_t words) const {
    constexpr int kThird = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;
    const int64_t groups = (tile_.rows + kGroupRows - 1) / kGroupRows;
    Fetch fetch(*this, p, words,
                groups * ((p.steps + SomeLines::kEverySteps - 1) / SomeLines::kEverySteps));
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * kGroupRows;
      const int64_t rows = tile_.rows - first;
      const float* from = s_.rows + first * p.steps;
      float* to = this->sums(p.m, p.panel, first);
      const bool begin = p.word == 0;
      if (rows <= kThird) {
        multiply_group<kThird>(from, s_.panel, p.steps, begin, to, &fetch);
      } else if (rows <= 2 * kThird) {
        multiply_group<2 * kThird>(from, s_.panel, p.steps, begin, to, &fetch);
      } else {
        multiply_group<kGroupRows>(from, s_.panel, p.steps, begin, to, &fetch);
      }
    }
  }

  template <int kRows>
  FLASHMOE_NOINLINE static void multiply_group(const float* rows, const float* panel, int64_t steps,
                                               bool first_block, float* sums, Fetch* fetch) {
    const auto add = [=](int r, int v, Vector sum) {
      float* to = sums + r * kPanel + v * kLanes;
      Simd::store(to, Simd::add(Simd::load(to), sum));
    };
    const auto begin = [=](int r, int v, Vector sum) {
      if (!first_block) return add(r, v, sum);
      Simd::store(sums + r * kPanel + v * kLanes, sum);
    };
    multiply_panel<Product, kRows, kPanelVectors, 1, kGroupRows>(rows, panel, steps, kRun, begin,
                                                                 add, SomeLines{fetch});
  }

  const MoeScratch s_;
  const int64_t block_ = lies_by_rows(tile_) ? kBlockWords : kBlockWordsByColumns;
};

template <typename Product>
void multiply_tile(const MoeTile& tile, void* scratch) {
  const MoeScratch s(scratch);
  if (tile.rows <= kMostFewRows) {
    FewRows<Product>(tile, s).compute();
  } else {
    ManyRows<Product>(tile, s).compute();
  }
}

template <typename Product>
constexpr MoeKernel moe_kernel(const char* isa) {
  return {isa,
          {{kTileRows, kTileColumns}, {kTileRows, kTileColumnsByColumns}},
          MoeScratch::kSums,
          kGroupRows,
          kMostFewRows,
          MoeScratch::kBytes,
          multiply_tile<Product>,
          add_rows<typename Product::Element>,
          differentiate_row<typename Product::Element>,
          OuterInVectors<Product>::kMost,
          add_outer_products<Product>,
          sum_rows<typename Product::Element>,
          dot_of};
}
