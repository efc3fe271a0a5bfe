// Dot products of few rows with columns whose depth is contiguous, for any instruction set. Each
// column is read once, in place. A step takes kDotColumns columns and up to Simd::kDotRows rows, a
// vector along the depth.
//
// Included after cpu/products.h.

constexpr int kDotColumns = 4;

// sums[r][j] += the product of row r, packed in words, and column j, which has `words` words. The
// order of a sum does not depend on the other rows and columns.
template <typename Product, int kRowStride, int kSumStride>
class DotRows {
 public:
  using Columns = const typename Product::Element* const (&)[kDotColumns];

  // For any number of rows.
  static void add(const float* rows, int64_t count, Columns columns, int64_t words, float* sums) {
    const int64_t blocks = (count + Simd::kDotRows - 1) / Simd::kDotRows;
    const int64_t together = (count + blocks - 1) / blocks;
    for (int64_t r = 0; r < count; r += together) {
      add_block(rows + r * kRowStride, smaller(together, count - r), columns, words,
                sums + r * kSumStride);
    }
  }

 private:
  static void add_block(const float* rows, int64_t count, Columns columns, int64_t words,
                        float* sums) {
    switch (count) {
      case 1: return add_rows<1>(rows, columns, words, sums);
      case 2: return add_rows<2>(rows, columns, words, sums);
      case 3: return add_rows<at_most(3)>(rows, columns, words, sums);
      case 4: return add_rows<at_most(4)>(rows, columns, words, sums);
      case 5: return add_rows<at_most(5)>(rows, columns, words, sums);
      default: return add_rows<Simd::kDotRows>(rows, columns, words, sums);
    }
  }

  static constexpr int at_most(int rows) { return rows < Simd::kDotRows ? rows : Simd::kDotRows; }

  template <int kRows>
  FLASHMOE_NOINLINE static void add_rows(const float* rows, Columns columns, int64_t words,
                                         float* sums) {
    Vector total[kRows][kDotColumns];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kDotColumns; ++j) total[r][j] = Simd::zero();
    }
    const auto step = [&](int64_t word, int64_t n) {
      Vector w[kDotColumns];
#pragma GCC unroll 4
      for (int j = 0; j < kDotColumns; ++j) {
        w[j] = Product::load_words(columns[j] + word * Product::kPack, n * Product::kPack);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Vector row = Simd::load(rows + r * kRowStride + word);
#pragma GCC unroll 4
        for (int j = 0; j < kDotColumns; ++j) {
          total[r][j] = Product::multiply_add(row, w[j], total[r][j]);
        }
      }
    };
    int64_t word = 0;
    for (; word + kLanes <= words; word += kLanes) step(word, kLanes);
    if (word < words) step(word, words - word);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) Simd::add_sums_of_four(total[r], sums + r * kSumStride);
  }
};
