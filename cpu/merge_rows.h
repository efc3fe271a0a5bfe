// One row of merging partial attention results, for any instruction set.
//
// Included inside the ISA's own namespace after its `Simd`.

using Vector = Simd::Vector;

FLASHMOE_INLINE Vector load_of(const void* p, Dtype dtype, int64_t first, int64_t n) {
  switch (dtype) {
    case Dtype::kFloat32: return Simd::load_first(static_cast<const float*>(p) + first, n);
    case Dtype::kFloat16: return Simd::load_first(static_cast<const Fp16*>(p) + first, n);
    case Dtype::kBFloat16: return Simd::load_first(static_cast<const Bf16*>(p) + first, n);
    case Dtype::kFloat8E4M3:
    case Dtype::kFloat64: break;  // has a kernel of its own
  }
  return Simd::zero();
}

// The first term is a product, not a sum with 0, so that a single partial keeps all of its bits,
// even -0.
template <typename Element, typename Out>
FLASHMOE_INLINE void merge_columns(const MergeRow<float>& row, int64_t first, int64_t n) {
  const auto term = [&](int32_t k) {
    return Simd::load_first(static_cast<const Element*>(row.x[k]) + first, n);
  };
  Vector sum = Simd::zero();
  int32_t k = 0;
  if (row.prior != nullptr) {
    const Vector prior = load_of(row.prior, row.prior_dtype, first, n);
    sum = Simd::multiply(prior, Simd::broadcast(row.prior_weight));
  } else if (row.count > 0) {
    sum = Simd::multiply(term(0), Simd::broadcast(row.weights[0]));
    k = 1;
  }
  for (; k < row.count; ++k) {
    sum = Simd::multiply_add(term(k), Simd::broadcast(row.weights[k]), sum);
  }
  Simd::store_first(static_cast<Out*>(row.out) + first, sum, n);
}

template <typename Element, typename Out>
void merge_row_to(const MergeRow<float>& row) {
  int64_t i = 0;
  // A constant number of columns: the masks are constant too.
  for (; i + Simd::kLanes <= row.columns; i += Simd::kLanes) {
    merge_columns<Element, Out>(row, i, Simd::kLanes);
  }
  if (i < row.columns) merge_columns<Element, Out>(row, i, row.columns - i);
}

template <typename Element>
void merge_row(const MergeRow<float>& row) {
  switch (row.out_dtype) {
    case Dtype::kFloat32: return merge_row_to<Element, float>(row);
    case Dtype::kFloat16: return merge_row_to<Element, Fp16>(row);
    case Dtype::kBFloat16: return merge_row_to<Element, Bf16>(row);
    case Dtype::kFloat8E4M3:
    case Dtype::kFloat64: return;  // has a kernel of its own
  }
}
