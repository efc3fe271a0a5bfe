// Code shared by all ways to compute attention backward, for any instruction set: a block of rows
// and the keys of a tile that it sees, weights and dscores of pairs, writing gradients, and
// gradients of sinks.
//
// Included after cpu/attention_rows.h.

#include "cpu/attention_sink_gradient.h"

template <typename Element>
float dot_of_row(const Element* a, const Element* b, int64_t dim) {
  Vector sum = Simd::zero();
  for (int64_t column = 0; column < dim; column += kLanes) {
    const int64_t n = dim - column;
    sum = Simd::multiply_add(Simd::load_first(a + column, n), Simd::load_first(b + column, n), sum);
  }
  return Simd::sum_of(sum);
}

// Adds a thread's sums to `shared`. The first thread stores them; the last one gets the total in
// `own`. `shared` may be nullptr for a thread that is both.
inline void add_to_shared(float* own, float* shared, int64_t count, bool first, bool last) {
  if (first && last) return;
  for (int64_t i = 0; i < count; i += kLanes) {
    Vector sum = Simd::load(own + i);
    if (!first) sum = Simd::add(Simd::load(shared + i), sum);
    Simd::store((last ? own : shared) + i, sum);
  }
}

template <typename Product>
class BackwardRows : protected TileRows {
 public:
  using Element = typename Product::Element;

 protected:
  BackwardRows(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step)
      : TileRows(problem, step.rows),
        b_(problem),
        step_(step),
        dim_panels_((problem.dim + kPanel - 1) / kPanel),
        dim_v_panels_((problem.dim_v + kPanel - 1) / kPanel),
        rows_(step.rows.rows),
        seen_(rows_ > 0 ? seen_by(0, rows_) : KeyRange{0, 0}) {}

  bool wants_dq() const { return b_.dq.data != nullptr; }
  bool wants_dk() const { return b_.dk.data != nullptr; }
  bool wants_dv() const { return b_.dv.data != nullptr; }
  bool needs_dscores() const { return wants_dq() || wants_dk(); }

  // The keys of the tile that some of the rows see.
  KeyRange seen_by(int64_t row, int64_t rows) const {
    const int64_t begin = clamp(this->first_key(row) - step_.first_key, 0, step_.keys);
    return {begin, clamp(this->end_key(row + rows - 1) - step_.first_key, begin, step_.keys)};
  }

  float delta_of(int64_t row, const Element* dout) const {
    const Element* const out =
        static_cast<const Element*>(b_.out.data) + this->offset_of(row, b_.out.strides);
    const float* const dlse = static_cast<const float*>(b_.dlse);
    return dot_of_row(dout, out, b_.dim_v) -
           (dlse != nullptr ? dlse[this->offset_of(row, b_.dlse_strides)] : 0.0f);
  }

  struct Pair {
    Vector weight;
    Vector dscore;
  };

  // Weights and dscores of kLanes keys and a row with this delta and this lse, halved and negated.
  // The bias is read if there is a bias or a mask, a dweight if dscores are needed.
  FLASHMOE_INLINE Pair pair_of(Vector score, const float* dweight, float half_lse, float delta,
                               const float* bias) const {
    Vector slope = Simd::broadcast(1.0f);  // of the softcap
    float logit_scale = b_.scale;
    if (b_.softcap != 0.0f) {
      score = capped(score);
      slope = Simd::subtract(slope, Simd::multiply(score, score));
      logit_scale = b_.softcap;
    }
    // Uses halves, because the difference of two finite logits may be infinite. The product is
    // rounded like the lse of a row, so that a key with all of the weight has weight 1, however
    // large the logit.
    const bool biased = this->has_pairs();
    const Vector added = biased ? Simd::load(bias) : Simd::zero();
    const Vector half =
        biased ? Simd::multiply(biased_logit(score, logit_scale, added), Simd::broadcast(0.5f))
               : Simd::multiply(score, Simd::broadcast(0.5f * logit_scale));
    const Vector above = Simd::add(Simd::rounded(half), Simd::broadcast(half_lse));
    Vector weight = exp_of_twice(above);
    // A row that sees no key has an lse of -inf, and a hidden key may have a V of NaN.
    const Vector lowest = Simd::broadcast(-kInfinity);
    if (biased) weight = Simd::zero_where_at_most(added, lowest, weight);
    if (!needs_dscores()) return {weight, weight};
    Vector dscore =
        Simd::multiply(weight, Simd::subtract(Simd::load(dweight), Simd::broadcast(delta)));
    if (b_.softcap != 0.0f) dscore = Simd::multiply(dscore, slope);
    if (biased) dscore = Simd::zero_where_at_most(added, lowest, dscore);
    return {weight, dscore};
  }

  // Like AttentionRows::cap.
  Vector capped(Vector score) const {
    const Vector inverse =
        Simd::broadcast(1.0f / (b_.softcap > kLeastSoftcap ? b_.softcap : kLeastSoftcap));
    return tanh_of(Simd::multiply(Simd::multiply(score, Simd::broadcast(b_.scale)), inverse));
  }

  // x for the keys from `key` on that are in `keys`, else 0.
  static Vector only(KeyRange keys, int64_t key, Vector x) {
    if (key + kLanes > keys.end) x = Simd::first_or(x, keys.end - key, Simd::zero());
    if (key < keys.begin) x = Simd::first_or(Simd::zero(), keys.begin - key, x);
    return x;
  }

  // `sums` is the first panel of a row in a group.
  void write_row(const RowsView<void>& to, int64_t offset, int64_t dim, float factor,
                 const float* sums) const {
    if (to.dtype == Dtype::kFloat32) {
      write_row(static_cast<float*>(to.data) + offset, dim, factor, sums);
    } else {
      write_row(static_cast<Element*>(to.data) + offset, dim, factor, sums);
    }
  }

  template <typename T>
  void write_row(T* to, int64_t dim, float factor, const float* sums) const {
    for (int64_t column = 0; column < dim; column += kLanes) {
      const float* const from = sums + column / kPanel * kGroupRows * kPanel + column % kPanel;
      const int64_t n = dim - column;
      Vector x = Simd::multiply(Simd::load(from), Simd::broadcast(factor));
      if (b_.accumulate) x = Simd::add(x, Simd::load_first(to + column, n));
      Simd::store_first(to + column, x, n);
    }
  }

  const AttentionBackwardProblem& b_;
  const AttentionBackwardStep& step_;
  const int64_t dim_panels_;
  const int64_t dim_v_panels_;
  const int64_t rows_;
  const KeyRange seen_;  // the keys that some row of the block sees
};

// Stores x to `to`, or adds it.
template <typename T>
void write_number(T* to, float x, bool accumulate) {
  Vector number = Simd::broadcast(x);
  if (accumulate) number = Simd::add(number, Simd::load_first(to, 1));
  Simd::store_first(to, number, 1);
}

// For the keys [first, end), with a bias or a mask.
template <typename Element>
bool sees_some_key(const AttentionProblem& p, int64_t batch, int64_t head, int64_t query,
                   int64_t first, int64_t end) {
  struct Row : TileRows {
    Row(const AttentionProblem& problem, const AttentionTile& tile) : TileRows(problem, tile) {}
    bool sees(int64_t key) const { return !this->template is_hidden<Element>(0, key); }
  };
  const int64_t group = p.heads_q / p.heads_kv;
  AttentionTile tile;
  tile.batch = batch;
  tile.kv_head = head / group;
  tile.first_row = query * group + head % group;
  tile.rows = 1;
  const Row row(p, tile);
  while (first < end && !row.sees(first)) ++first;
  return first < end;
}

template <typename Product>
double backward_add_dsink(const AttentionBackwardProblem& p, int64_t head, double sum) {
  using Element = typename Product::Element;
  const auto number = [](const auto* at) {
    return static_cast<double>(Simd::sum_of(Simd::load_first(at, 1)));
  };
  const int64_t at = head * p.sinks.stride;
  const double sink = p.sinks.dtype == Dtype::kFloat32
                          ? number(static_cast<const float*>(p.sinks.data) + at)
                          : number(static_cast<const Element*>(p.sinks.data) + at);
  const auto row_of = [head](const auto& view, int64_t batch, int64_t query) {
    return static_cast<const Element*>(view.data) + batch * view.strides.batch +
           query * view.strides.seq + head * view.strides.head;
  };
  return sink_gradient<float>(
      p, head, sink, sum,
      [&](int64_t batch, int64_t query) {
        const int64_t first = visible_keys::first_key(p, query);
        const int64_t end = visible_keys::end_key(p, query);
        if (p.bias.data == nullptr && p.mask.data == nullptr) return first < end;
        return sees_some_key<Element>(p, batch, head, query, first, end);
      },
      [&](int64_t batch, int64_t query) {
        return static_cast<double>(
            dot_of_row(row_of(p.dout, batch, query), row_of(p.out, batch, query), p.dim_v));
      });
}

template <typename Product>
void backward_write_dsink(const AttentionBackwardProblem& p, int64_t head, double sum) {
  using Element = typename Product::Element;
  const auto dsink = static_cast<float>(sum);
  const int64_t to = head * p.dsinks.stride;
  if (p.dsinks.dtype == Dtype::kFloat32) {
    write_number(static_cast<float*>(p.dsinks.data) + to, dsink, p.accumulate);
  } else {
    write_number(static_cast<Element*>(p.dsinks.data) + to, dsink, p.accumulate);
  }
}
