// Attention of few query rows, as in decoding, for any instruction set. K and V are read once, in
// place, and only the rows are packed. With keys in pages, blocks of V that cross pages are
// gathered. The kernel is memory-bound.
//
// Steps are those of cpu/attention_tile.h. A step's scores are dot products (cpu/dot_rows.h). Its
// values are summed in blocks of kBlockKeys keys that are in registers together, column by column,
// even and odd words separately. A step's sum joins the output when the step ends, so no sum is
// long.
//
// Blocks count from the step's first key, and a key that a row does not see adds an exact 0, so a
// row's bits do not depend on the other rows.
//
// Included after cpu/attention_rows.h and cpu/dot_rows.h.

// One vector more than a power of two, so that rows do not share cache sets.
constexpr int kQueryStride = kMaxHeadDim + kLanes;

// For any product: a block's words are in registers.
constexpr int kMostBlockKeys = 32;

// The scratch of one thread for up to `rows` rows.
struct FewRowsScratch {
  float* q;     // [rows][kQueryStride]
  float* step;  // [rows][dim_v panels][kPanel], the step's sums of values
  RowState state;
  RowScores scores;
  StepRows step_rows;
  float* block;  // [most keys of a block][dim_v] elements, for keys in pages

  FewRowsScratch(ScratchCursor& scratch, const AttentionProblem& p, int64_t rows, int pack)
      : q(scratch.take(rows * kQueryStride)),
        step(scratch.take(rows * round_up(p.dim_v, kPanel))),
        state(scratch, p, round_up(rows, kGroupRows)),
        scores(scratch, rows),
        step_rows(scratch, p, keys_per_step(p, pack)),
        block(step_rows.v != nullptr ? scratch.take(kMostBlockKeys * p.dim_v) : nullptr) {}
};

template <typename Product>
class FewRowsComputer : AttentionRows<Product> {
 public:
  using Base = AttentionRows<Product>;
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;

  // With more rows packing pays. Elements that are widened one by one should not be widened twice.
  static constexpr int64_t kMostRows =
      kLanes >= 8 || sizeof(Element) == sizeof(float) ? 2 * kGroupRows : Simd::kDotRows;

  FewRowsComputer(const AttentionProblem& problem, const AttentionTile& tile,
                  const FewRowsScratch& scratch)
      : Base(problem, tile, scratch.state, scratch.scores, scratch.step_rows),
        columns_(round_up(problem.dim_v, kPanel)),
        s_(scratch) {}

  void compute() {
    load_queries();
    this->clear_state();
    const int64_t tile_begin = this->first_key(0);
    const int64_t tile_end = this->end_key(tile_.rows - 1);
    for (int64_t key = tile_begin / tile_k_ * tile_k_; key < tile_end; key += tile_k_) {
      constexpr int64_t kUnit = kBlockKeys > kLanes ? kBlockKeys : kLanes;
      const int64_t begin = clamp(tile_begin - key, 0, tile_k_) / kUnit * kUnit;
      const KeyRange seen = {begin, smaller(tile_k_, tile_end - key)};
      this->find_rows(key, seen);
      score(key, seen);
      for (int64_t r = 0; r < tile_.rows; ++r) {
        this->weigh_row(r, r, key, this->visible(r, key, seen), seen);
      }
      add_values(key, seen);
    }
    for (int64_t row = 0; row < tile_.rows; ++row) this->finish_row(row);
  }

 private:
  using Base::p_;
  using Base::scores_;
  using Base::tile_;
  using Base::tile_k_;
  using Base::words_;
  using typename Base::KeyRange;

  // Words of V that are in registers at a time: with AVX-512, whole cache lines.
  static constexpr int kBlockVectors = kLanes >= 16 && sizeof(Element) == 2 ? kPanelVectors : 1;
  static constexpr int kBlockWords = (kLanes >= 16 ? 16 : 8) / kBlockVectors;
  static constexpr int kBlockKeys = kBlockWords * kPack;
  static_assert(kMaxTileK / 2 % kBlockKeys == 0 && kMaxTileK / 2 % kLanes == 0);
  static_assert(kBlockKeys <= kMostBlockKeys && sizeof(Element) <= sizeof(float));

  void load_queries() {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const Element* from =
          static_cast<const Element*>(p_.q.data) + this->offset_of(r, p_.q.strides);
      float* to = s_.q + r * kQueryStride;
      for (int64_t word = 0; word < words_; word += kLanes) {
        Simd::store(to + word, Product::load_words(from + word * kPack, p_.dim - word * kPack));
      }
    }
  }

  // Computes the scores of all rows for the part `keys` of the step that begins with `key`.
  void score(int64_t key, KeyRange keys) {
    constexpr int64_t kRunWords = Product::kScoreRun * kLanes;  // a lane sums kScoreRun of them
    for (int64_t r = 0; r < tile_.rows; ++r) {
      float* scores = scores_.scores + r * kScoreStride;
      for (int64_t i = keys.begin; i < keys.end; i += kLanes) Simd::store(scores + i, Simd::zero());
    }
    for (int64_t word = 0; word < words_; word += kRunWords) {
      for (int64_t first = keys.begin; first < keys.end; first += kDotColumns) {
        const Element* columns[kDotColumns];
        for (int j = 0; j < kDotColumns; ++j) {
          columns[j] = this->key_row(key, smaller(first + j, keys.end - 1)) + word * kPack;
        }
        DotRows<Product, kQueryStride, kScoreStride>::add(s_.q + word, tile_.rows, columns,
                                                          smaller(kRunWords, words_ - word),
                                                          scores_.scores + first);
      }
    }
  }

  // Rescales the output and adds weights times V for the part `seen` of the step.
  void add_values(int64_t key, KeyRange seen) {
    for (int64_t i = 0; i < tile_.rows * columns_; i += kLanes) {
      Simd::store(s_.step + i, Simd::zero());
    }
    int64_t block = seen.begin;
    for (; block + kBlockKeys <= seen.end; block += kBlockKeys) {
      add_block(key, block, block + 2 * kBlockKeys <= seen.end ? kBlockKeys : 0);
    }
    for (int64_t r = 0; r < tile_.rows; ++r) {
      add_block_of_row(key, block, r, {block, seen.end});
      // A key that a row does not see has weight 0. That equals leaving it out unless V holds a NaN
      // or infinity there.
      if (!step_is_finite(r)) add_values_of_row(key, r, this->visible(r, key, seen));
      add_step(r);
    }
  }

  // Adds a whole block for all rows, and prefetches the block `ahead` keys later.
  FLASHMOE_NOINLINE void add_block(int64_t key, int64_t block, int64_t ahead) {
    constexpr int64_t kWide = kBlockVectors * kLanes;
    int64_t next = value_step();
    const Element* values = this->value_row(key, block);
    if (s_.step_rows.v != nullptr && !lies_in_one_piece(block, kBlockKeys)) {
      values = gather_values(block);
      next = p_.dim_v;
      ahead = 0;
    } else if (s_.step_rows.v != nullptr && ahead != 0 && !lies_in_one_piece(block, ahead + 1)) {
      ahead = 0;
    }
    int64_t column = 0;
    // A constant number of columns: the masks are constant too.
    for (; column + kWide <= p_.dim_v; column += kWide) {
      add_columns(values + column, next, block, ahead, column, kWide);
    }
    if (column < p_.dim_v) {
      add_columns(values + column, next, block, ahead, column, p_.dim_v - column);
    }
  }

  // The step between rows of V, if they are evenly spaced.
  int64_t value_step() const {
    return s_.step_rows.wide_v != nullptr ? p_.dim_v : p_.v.strides.seq;
  }

  // For keys in pages: whether the rows of V of `count` keys lie like those of one tensor.
  bool lies_in_one_piece(int64_t block, int64_t count) const {
    const Element* const first = static_cast<const Element*>(s_.step_rows.v[block]);
    for (int64_t i = 1; i < count; ++i) {
      if (s_.step_rows.v[block + i] != first + i * value_step()) return false;
    }
    return true;
  }

  const Element* gather_values(int64_t block) const {
    Element* const to = reinterpret_cast<Element*>(s_.block);
    for (int64_t i = 0; i < kBlockKeys; ++i) {
      __builtin_memcpy(to + i * p_.dim_v, s_.step_rows.v[block + i],
                       static_cast<size_t>(p_.dim_v) * sizeof(Element));
    }
    return to;
  }

  FLASHMOE_INLINE void add_columns(const Element* first, int64_t next, int64_t block, int64_t ahead,
                                   int64_t column, int64_t n) {
    Vector v[kBlockWords][kBlockVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kBlockWords; ++i) {
      const Element* const from = first + i * kPack * next;
      Product::template load_columns<kBlockVectors>(from, from + (kPack - 1) * next, n, v[i]);
      // Rows are read a vector at a time, which the processor does not prefetch as it does K's.
#pragma GCC unroll 2
      for (int j = 0; j < kPack; ++j) __builtin_prefetch(from + (ahead + j) * next);
    }
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const float* weights = scores_.scores + r * kScoreStride + block / kPack;
#pragma GCC unroll 2
      for (int j = 0; j < kBlockVectors; ++j) {
        Vector parts[2] = {Simd::zero(), Simd::zero()};
#pragma GCC unroll 16
        for (int i = 0; i < kBlockWords; ++i) {
          parts[i % 2] = Product::multiply_add(Simd::broadcast(weights[i]), v[i][j], parts[i % 2]);
        }
        float* sum = s_.step + r * columns_ + column + j * kLanes;
        Simd::store(sum, Simd::add(Simd::load(sum), Simd::add(parts[0], parts[1])));
      }
    }
  }

  // Adds the keys `keys` of a block for one row, in the order of `add_columns`.
  void add_block_of_row(int64_t key, int64_t block, int64_t r, KeyRange keys) {
    const int64_t begin = larger(keys.begin, block);
    const int64_t end = smaller(keys.end, block + kBlockKeys);
    if (begin >= end) return;
    const float* weights = scores_.scores + r * kScoreStride;
    for (int64_t column = 0; column < p_.dim_v; column += kLanes) {
      Vector parts[2] = {Simd::zero(), Simd::zero()};
      for (int64_t word = begin / kPack; word * kPack < end; ++word) {
        const Element* first = this->value_row(key, word * kPack) + column;
        const bool two = kPack == 2 && (word + 1) * kPack <= end;
        Vector v = Product::load_values(
            first, two ? this->value_row(key, word * kPack + 1) + column : nullptr,
            p_.dim_v - column);
        if (word * kPack < begin) v = Product::keep_second_of_pair(v);
        Vector& part = parts[word % 2];
        part = Product::multiply_add(Simd::broadcast(weights[word]), v, part);
      }
      float* sum = s_.step + r * columns_ + column;
      Simd::store(sum, Simd::add(Simd::load(sum), Simd::add(parts[0], parts[1])));
    }
  }

  // Adds again, but only the keys that the row sees.
  void add_values_of_row(int64_t key, int64_t r, KeyRange keys) {
    for (int64_t i = 0; i < columns_; i += kLanes) {
      Simd::store(s_.step + r * columns_ + i, Simd::zero());
    }
    for (int64_t block = keys.begin / kBlockKeys * kBlockKeys; block < keys.end;
         block += kBlockKeys) {
      if (!this->has_pairs()) {
        add_block_of_row(key, block, r, keys);
        continue;
      }
      const int64_t end = smaller(keys.end, block + kBlockKeys);
      for (int64_t i = larger(keys.begin, block); i < end; ++i) {
        if (this->template is_hidden<Element>(r, key + i)) continue;
        add_block_of_row(key, block, r, {i, i + 1});
      }
    }
  }

  bool step_is_finite(int64_t r) const {
    Fp32Product<float>::FiniteCheck check;
    for (int64_t i = 0; i < columns_; i += kLanes) {
      check.put(Simd::load(s_.step + r * columns_ + i));
    }
    return check.finite();
  }

  void add_step(int64_t r) {
    const Vector rescale = Simd::broadcast(scores_.rescale[r]);
    for (int64_t column = 0; column < columns_; column += kLanes) {
      float* output = this->output_of(r, column / kPanel) + column % kPanel;
      const Vector step = Simd::load(s_.step + r * columns_ + column);
      Simd::store(output, Simd::multiply_add(Simd::load(output), rescale, step));
    }
  }

  const int64_t columns_;  // of V, rounded up to panels
  const FewRowsScratch s_;
};
