// Parts of a mixture of experts' gradients that are neither products nor sums of outer products,
// for any instruction set: the gradient of the activation, and sums of rows.
//
// Included after cpu/moe_sums.h.

// Stores dz of g or u, from element `first` on; with a step of 2 through `pairs`.
template <typename Element>
class GradientStore {
 public:
  GradientStore(void* to, const int64_t (&places)[2], int64_t step)
      : to_(static_cast<Element*>(to)), places_(places), step_(step) {}

  FLASHMOE_INLINE void store(int64_t first, const Vector (&dz)[2], bool gated, int64_t n) const {
    if (to_ == nullptr) return;
    if (step_ == 1) {
      if (gated) Simd::store_first(to_ + places_[0] + first, dz[0], n);
      Simd::store_first(to_ + places_[1] + first, dz[1], n);
      return;
    }
    float each[2][kLanes];
    float pairs[2 * kLanes];
    Simd::store(each[0], dz[0]);
    Simd::store(each[1], dz[1]);
    for (int i = 0; i < kLanes; ++i) {
      pairs[2 * i] = each[0][i];
      pairs[2 * i + 1] = each[1][i];
    }
    const int64_t places = 2 * smaller(n, kLanes);
    Element* to = to_ + places_[0] + 2 * first;
    Simd::store_first(to, Simd::load(pairs), places);
    if (places > kLanes) {
      Simd::store_first(to + kLanes, Simd::load(pairs + kLanes), places - kLanes);
    }
  }

 private:
  Element* const to_;
  const int64_t (&places_)[2];
  const int64_t step_;
};

template <typename Element>
double differentiate_row(const MoeActivationGradient& row) {
  const MoeActivation& activation = *row.activation;
  const bool gated = row.before[1] != nullptr;
  const Vector weight = Simd::broadcast(static_cast<float>(row.weight));
  const Vector scale = Simd::broadcast(static_cast<float>(row.scale));
  const GradientStore<Element> dz_store(row.dz, row.dz_places, row.dz_step);
  const GradientStore<Element> scaled_store(row.scaled_dz, row.scaled_places, row.dz_step);
  Vector total = Simd::zero();
  for (int64_t i = 0; i < row.inner; i += kLanes) {
    const int64_t n = row.inner - i;
    const Vector first = Simd::load_first(static_cast<const Element*>(row.before[0]) + i, n);
    const Vector second =
        gated ? Simd::load_first(static_cast<const Element*>(row.before[1]) + i, n) : Simd::zero();
    const Activated act = activate_with_slope(
        activation, gated ? cut_above(activation, first) : cut(activation, first));
    const Vector up =
        gated ? Simd::add(cut(activation, second), Simd::broadcast(activation.up_offset))
              : Simd::broadcast(1.0f);
    const Vector a = gated ? Simd::multiply(act.value, up) : act.value;
    if (row.a_out != nullptr) {
      Simd::store_first(static_cast<Element*>(row.a_out) + i, Simd::multiply(a, weight), n);
    }
    if (row.da == nullptr) continue;
    const Vector da = Simd::load_first(static_cast<const float*>(row.da) + i, n);
    total = Simd::multiply_add(da, a, total);
    const Vector weighted = Simd::multiply(da, weight);
    Vector dz[2];
    if (gated) {
      dz[0] = through_cut_above(activation, first,
                                Simd::multiply(Simd::multiply(weighted, up), act.slope));
      dz[1] = through_cut(activation, second, Simd::multiply(weighted, act.value));
    } else {
      dz[0] = Simd::zero();
      dz[1] = through_cut(activation, first, Simd::multiply(weighted, act.slope));
    }
    dz_store.store(i, dz, gated, n);
    const Vector scaled[2] = {Simd::multiply(dz[0], scale), Simd::multiply(dz[1], scale)};
    scaled_store.store(i, scaled, gated, n);
  }
  return static_cast<double>(Simd::sum_of(total));
}

// Takes a few vectors of columns at a time, and rows in runs whose sums are then added: errors grow
// with the root of a run's length and of the number of runs.
template <typename Element>
void sum_rows(const MoeRowSums& sums) {
  constexpr int kVectors = 4;
  constexpr int64_t kRun = 16;
  for (int64_t i = 0; i < sums.columns; i += kVectors * kLanes) {
    Vector total[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[v] = Simd::zero();
    for (int64_t begin = 0; begin < sums.rows; begin += kRun) {
      const int64_t end = smaller(begin + kRun, sums.rows);
      Vector run[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) run[v] = Simd::zero();
      for (int64_t r = begin; r < end; ++r) {
        const Element* row = static_cast<const Element*>(sums.a[r]) + sums.first + i;
        const Vector scale =
            Simd::broadcast(sums.scale != nullptr ? static_cast<float>(sums.scale[r]) : 1.0f);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t n = sums.columns - i - v * kLanes;
          if (n <= 0) continue;
          run[v] = Simd::multiply_add(scale, Simd::load_first(row + v * kLanes, n), run[v]);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[v] = Simd::add(total[v], run[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t n = sums.columns - i - v * kLanes;
      if (n <= 0) continue;
      store_or_add<Element>(sums.out, i + v * kLanes, sums.out_is_fp32, sums.adds, total[v], n);
    }
  }
}

inline double dot_of(const void* a, Dtype a_dtype, const void* b, Dtype b_dtype, int64_t n) {
  Vector total = Simd::zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    total = Simd::multiply_add(load_first_of(a, a_dtype, 1, i, n - i),
                               load_first_of(b, b_dtype, 1, i, n - i), total);
  }
  return static_cast<double>(Simd::sum_of(total));
}
