// Rotation of a row's heads, for any instruction set. It uses fp32 and rounds each product and each
// sum, so that all sets give the same bits.
//
// Included inside the ISA's own namespace after its `Simd`.

using Vector = Simd::Vector;

// Rotates n pairs (a, b) by the angles of cos and sin.
template <typename T, typename C>
FLASHMOE_INLINE void rotate_halves(const T* a, const T* b, const C* cos, const C* sin, int64_t n,
                                   T* to_a, T* to_b) {
  const Vector x = Simd::load_first(a, n), y = Simd::load_first(b, n);
  const Vector c = Simd::load_first(cos, n), s = Simd::load_first(sin, n);
  const Vector xc = Simd::rounded(Simd::multiply(x, c)), ys = Simd::rounded(Simd::multiply(y, s));
  const Vector yc = Simd::rounded(Simd::multiply(y, c)), xs = Simd::rounded(Simd::multiply(x, s));
  Simd::store_first(to_a, Simd::subtract(xc, ys), n);
  Simd::store_first(to_b, Simd::add(yc, xs), n);
}

// Rotates n numbers in pairs of neighbours; each angle occurs twice in a row.
template <typename T>
FLASHMOE_INLINE void rotate_neighbours(const T* from, Vector cos, Vector sin, int64_t n, T* to) {
  const Vector x = Simd::load_first(from, n);
  const Vector xc = Simd::rounded(Simd::multiply(x, cos));
  const Vector ys = Simd::rounded(Simd::multiply(Simd::swap_neighbours(x), sin));
  Simd::store_first(to, Simd::subtract_add(xc, ys), n);
}

template <typename T, typename C>
FLASHMOE_INLINE void rotate_pairs(const T* from, const C* cos, const C* sin, int64_t n, T* to) {
  const Vector c = Simd::load_first(cos, n), s = Simd::load_first(sin, n);
  const int64_t numbers = 2 * n;
  rotate_neighbours(from, Simd::twice_low(c), Simd::twice_low(s), numbers, to);
  if (numbers <= Simd::kLanes) return;
  rotate_neighbours(from + Simd::kLanes, Simd::twice_high(c), Simd::twice_high(s),
                    numbers - Simd::kLanes, to + Simd::kLanes);
}

template <typename T, typename C>
void rotate_heads(const RotatedHeads& row) {
  const auto* const cos = static_cast<const C*>(row.cos);
  const auto* const sin = static_cast<const C*>(row.sin);
  const int64_t pairs = row.pairs;
  for (int64_t head = 0; head < row.heads; ++head) {
    const auto* const from =
        reinterpret_cast<const T*>(static_cast<const char*>(row.from) + head * row.from_step);
    auto* const to = reinterpret_cast<T*>(static_cast<char*>(row.to) + head * row.to_step);
    const auto some = [&](int64_t i, int64_t n) {
      if (row.interleaved) {
        rotate_pairs(from + 2 * i, cos + i, sin + i, n, to + 2 * i);
      } else {
        rotate_halves(from + i, from + pairs + i, cos + i, sin + i, n, to + i, to + pairs + i);
      }
    };
    int64_t i = 0;
    // A constant number of pairs: the masks are constant too.
    for (; i + Simd::kLanes <= pairs; i += Simd::kLanes) some(i, Simd::kLanes);
    if (i < pairs) some(i, pairs - i);
  }
}
