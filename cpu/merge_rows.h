// A row of the merge of partial attention results, for any instruction set.
//
// Included inside the ISA's own namespace after its `Simd`.

using Vector = Simd::Vector;

FLASHMOE_INLINE Vector load_of(const void* p, Dtype dtype, int64_t first, int64_t n) {
  switch (dtype) {
    case Dtype::kFloat32: return Simd::load_first(static_cast<const float*>(p) + first, n);
    case Dtype::kFloat16: return Simd::load_first(static_cast<const Fp16*>(p) + first, n);
    case Dtype::kBFloat16: return Simd::load_first(static_cast<const Bf16*>(p) + first, n);
    case Dtype::kFloat64: break;  // has a kernel of its own
  }
  return Simd::zero();
}

FLASHMOE_INLINE void store_of(void* p, Dtype dtype, int64_t first, Vector x, int64_t n) {
  switch (dtype) {
    case Dtype::kFloat32: return Simd::store_first(static_cast<float*>(p) + first, x, n);
    case Dtype::kFloat16: return Simd::store_first(static_cast<Fp16*>(p) + first, x, n);
    case Dtype::kBFloat16: return Simd::store_first(static_cast<Bf16*>(p) + first, x, n);
    case Dtype::kFloat64: return;
  }
}

// The first term is a product, and no sum with 0: a partial alone comes out with all of its bits,
// and -0 among them.
template <typename Element>
void merge_row(const MergeRow<float>& row) {
  for (int64_t i = 0; i < row.columns; i += Simd::kLanes) {
    const int64_t n = row.columns - i;
    const auto term = [&](int32_t k) {
      return Simd::load_first(static_cast<const Element*>(row.x[k]) + i, n);
    };
    Vector sum = Simd::zero();
    int32_t k = 0;
    if (row.prior != nullptr) {
      sum = Simd::multiply(load_of(row.prior, row.prior_dtype, i, n),
                           Simd::broadcast(row.prior_weight));
    } else if (row.count > 0) {
      sum = Simd::multiply(term(0), Simd::broadcast(row.weights[0]));
      k = 1;
    }
    for (; k < row.count; ++k) {
      sum = Simd::multiply_add(term(k), Simd::broadcast(row.weights[k]), sum);
    }
    store_of(row.out, row.out_dtype, i, sum, n);
  }
}
