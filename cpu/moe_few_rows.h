// Few rows of an expert times its matrix. Each weight is read once, in place, and only the rows are
// packed. The kernel is memory-bound.
//
// If depth is contiguous: dot products (cpu/dot_rows.h). If columns are contiguous: every row's
// sums += word * vector of columns, with AVX-512 a cache line from each of up to 16 of the matrix's
// columns at a time.
//
// Included after cpu/dot_rows.h and cpu/moe_sums.h.

constexpr int64_t kMostFewRows = 6 * Simd::kDotRows;  // with more, packing pays
constexpr int64_t kFewWords = 2048;                   // of depth at a time, for few rows
// One vector more than a power of two, so that rows do not share cache sets.
constexpr int64_t kFewStride = kFewWords + kLanes;

// For many rows. With contiguous columns each word of depth is on its own page, so take few words
// at a time and many columns of each.
constexpr int64_t kTileRows = 288;
constexpr int64_t kTileColumns = 512;  // over all matrices
constexpr int64_t kTileColumnsByColumns = 1024;
constexpr int64_t kBlockWords = 256;  // of depth at a time
constexpr int64_t kBlockWordsByColumns = 64;
static_assert(kTileRows % kGroupRows == 0);

// The scratch of one thread, for few rows and for many in vector registers.
struct MoeScratch {
  static constexpr int64_t kManyRows = kTileRows * kBlockWords + kLanes;  // and one vector
  static constexpr int64_t kFewRows = kMostFewRows * kFewStride;
  static constexpr int64_t kRows = kManyRows > kFewRows ? kManyRows : kFewRows;
  static constexpr int64_t kPanelWords = kBlockWords * kPanel;
  static constexpr int64_t kSums = kTileRows * kTileColumnsByColumns;
  static constexpr size_t kBytes = (kRows + kPanelWords + kSums) * sizeof(float);

  float* rows;   // many: [groups][words of the block][kGroupRows]; few: [rows][kFewStride]
  float* panel;  // [words of the block][kPanel]
  float* sums;

  explicit MoeScratch(void* base)
      : rows(static_cast<float*>(base)), panel(rows + kRows), sums(panel + kPanelWords) {}
};

constexpr int kDepthUnit = 8;                          // depth is a multiple of this
constexpr int kAxpyRegisters = kLanes >= 16 ? 16 : 8;  // for weights

template <typename Product>
class FewRows : MoeTileSums<typename Product::Element> {
 public:
  using Element = typename Product::Element;
  using Base = MoeTileSums<Element>;
  static constexpr int kPack = Product::kPack;
  // Weights in registers at a time: with AVX-512 whole cache lines.
  static constexpr int kAxpyVectors = kLanes >= 16 && sizeof(Element) == 2 ? kPanelVectors : 1;
  static constexpr int kAxpyWords = kAxpyRegisters / kAxpyVectors;
  static constexpr int kAxpyLeast = kDepthUnit / kPack;
  // Prefetch distance in elements, for rows with contiguous columns. 16-bit ones are read faster
  // without.
  static constexpr int kFetchAhead = sizeof(Element) == sizeof(float) ? 64 : 0;

  FewRows(const MoeTile& tile, const MoeScratch& scratch)
      : Base(tile, scratch.sums, tile.rows), s_(scratch) {}

  void compute() {
    for (int m = 0; m < tile_.matrices; ++m) {
      for (int64_t i = 0; i < this->panels_ * this->row_places_ * kPanel; i += kLanes) {
        Simd::store(this->sums(m, 0, 0) + i, Simd::zero());
      }
    }
    for (int m = 0; m < tile_.matrices; ++m) {
      if (this->depth_is_contiguous(m)) dot(m);
    }
    if (!this->depth_is_contiguous(0) || !this->depth_is_contiguous(tile_.matrices - 1)) axpy();
    this->finish();
  }

 private:
  using Base::tile_;

  // Loads words [word, word + count) of each row, padded with 0.
  void load_rows(int64_t word, int64_t count) const {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const Element* from = this->row(r) + word * kPack;
      float* to = s_.rows + r * kFewStride;
      for (int64_t i = 0; i < count; i += kLanes) {
        Simd::store(to + i, Product::load_words(from + i * kPack, (count - i) * kPack));
      }
    }
  }

  void dot(int m) const {
    const int64_t words = tile_.depth / kPack;
    const int64_t stride = tile_.weights[m].row_stride;
    for (int64_t word = 0; word < words; word += kFewWords) {
      const int64_t count = smaller(kFewWords, words - word);
      load_rows(word, count);
      for (int64_t column = 0; column < tile_.columns; column += kDotColumns) {
        const Element* w = this->weights(m, column, word * kPack);
        DotRows<Product, kFewStride, kPanel>::add(
            s_.rows, tile_.rows, {w, w + stride, w + 2 * stride, w + 3 * stride}, count,
            this->sums(m, column / kPanel, 0) + column % kPanel);
      }
    }
  }

  // Handles gate and up together: they may lie in the same cache lines.
  void axpy() const {
    const int64_t words = tile_.depth / kPack;
    for (int64_t word = 0; word < words; word += kFewWords) {
      const int64_t count = smaller(kFewWords, words - word);
      load_rows(word, count);
      int64_t i = 0;
      for (; i + kAxpyWords <= count; i += kAxpyWords) axpy_step<kAxpyWords>(word, i);
      for (; i < count; i += kAxpyLeast) axpy_step<kAxpyLeast>(word, i);
    }
  }

  template <int kWords>
  void axpy_step(int64_t word, int64_t i) const {
    for (int m = 0; m < tile_.matrices; ++m) {
      if (this->depth_is_contiguous(m)) continue;
      if (tile_.weights[m].row_stride == 1) {
        axpy_columns<kWords>(m, word, i, Product::template load_columns<kAxpyVectors>);
      } else {
        axpy_columns<kWords>(m, word, i, load_every_second_column<Product, kAxpyVectors>);
      }
    }
  }

  // Adds kWords words of depth, from `word` + `i` on, times the rows' words.
  template <int kWords, typename Load>
  FLASHMOE_INLINE void axpy_columns(int m, int64_t word, int64_t i, Load load) const {
    constexpr int64_t kWide = kAxpyVectors * kLanes;
    int64_t column = 0;
    // A constant number of columns: the masks are constant too.
    for (; column + kWide <= tile_.columns; column += kWide) {
      axpy_block<kWords>(m, word, i, column, kWide, load);
    }
    if (column < tile_.columns) {
      axpy_block<kWords>(m, word, i, column, tile_.columns - column, load);
    }
  }

  template <int kWords, typename Load>
  FLASHMOE_INLINE void axpy_block(int m, int64_t word, int64_t i, int64_t column, int64_t n,
                                  Load load) const {
    const int64_t next = tile_.weights[m].column_stride;
    const Element* from = this->weights(m, column, (word + i) * kPack);
    Vector w[kWords][kAxpyVectors];
#pragma GCC unroll 16
    for (int k = 0; k < kWords; ++k) {
      load(from, from + (kPack - 1) * next, n, w[k]);
      if (kFetchAhead > 0 && tile_.fetch_ahead) __builtin_prefetch(from + kFetchAhead, 0, 2);
      from += kPack * next;
    }
    float* to = this->sums(m, column / kPanel, 0) + column % kPanel;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const float* row = s_.rows + r * kFewStride + i;
      // Summed separately, so that a long sum has fewer roundings.
      Vector part[kAxpyVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kAxpyVectors; ++v) part[v] = Simd::zero();
#pragma GCC unroll 16
      for (int k = 0; k < kWords; ++k) {
#pragma GCC unroll 2
        for (int v = 0; v < kAxpyVectors; ++v) {
          part[v] = Product::multiply_add(Simd::broadcast(row[k]), w[k][v], part[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kAxpyVectors; ++v) {
        float* sum = to + r * kPanel + v * kLanes;
        Simd::store(sum, Simd::add(Simd::load(sum), part[v]));
      }
    }
  }

  const MoeScratch s_;
};
