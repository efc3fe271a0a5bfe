// Packs rows of q, k, v and dout for the register-blocked products of cpu/products.h. `row_at(r)`
// is the start of row r.
//
// Included after cpu/products.h.

// Packs as [row / kWidth][word][kWidth]; kWidth is kGroupRows or kPanel. The depth of the product
// is along the rows. Padding after the last row is undefined. `to` has room for one more vector.
template <typename Product, int kWidth, typename RowAt>
FLASHMOE_INLINE void pack_transposed(const RowAt& row_at, int64_t begin, int64_t end, int64_t dim,
                                     float* to) {
  constexpr int kTogether = kWidth < kLanes ? kWidth : kLanes;
  const int64_t words = dim / Product::kPack;
  for (int64_t first = begin; first < end; first += kTogether) {
    const int64_t rows = smaller(kTogether, end - first);
    const typename Product::Element* from[kLanes];
    for (int64_t r = 0; r < rows; ++r) from[r] = row_at(first + r);
    float* const block_to = to + first / kWidth * kWidth * words + first % kWidth;
    for (int64_t word = 0; word < words; word += kLanes) {
      Vector block[kLanes];
      load_block<Product>(from, rows, word * Product::kPack, dim, block);
      // A row of the block may be longer than the width: the next one overwrites the excess.
      const int64_t count = smaller(kLanes, words - word);
      for (int64_t i = 0; i < count; ++i) Simd::store(block_to + (word + i) * kWidth, block[i]);
    }
  }
}

// Packs as [panel][row / kPack][kPanel]; a panel has `panel_size` numbers. The depth is across the
// rows, and `begin` is a multiple of kPack. Returns whether all packed numbers are finite.
template <typename Product, typename RowAt>
FLASHMOE_INLINE bool pack_across(const RowAt& row_at, int64_t begin, int64_t end, int64_t dim,
                                 int64_t panel_size, float* to) {
  typename Product::FiniteCheck check;
  const int64_t vectors = (dim + kLanes - 1) / kLanes;
  for (int64_t first = begin; first < end; first += Product::kPack) {
    const typename Product::Element* const row = row_at(first);
    const typename Product::Element* const next = first + 1 < end ? row_at(first + 1) : nullptr;
    float* const row_to = to + first / Product::kPack * kPanel;
    for (int64_t vector = 0; vector < vectors; ++vector) {
      const int64_t column = vector * kLanes;
      const Vector words = Product::load_values(
          row + column, next == nullptr ? nullptr : next + column, dim - column);
      check.put(words);
      Simd::store(row_to + vector / kPanelVectors * panel_size + vector % kPanelVectors * kLanes,
                  words);
    }
  }
  return check.finite();
}
