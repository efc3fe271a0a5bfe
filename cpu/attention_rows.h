// Code shared by all ways to compute the rows of a tile, for any instruction set: which keys a row
// sees, the online softmax of its scores, and its final division.
//
// Included after cpu/products.h.

namespace visible_keys {
#include "cpu/attention_visible.h"
}

constexpr int kMaxTileK = 256;
// One vector more than a power of two, so that rows do not share cache sets.
constexpr int kScoreStride = kMaxTileK + kLanes;

constexpr float kInfinity = __builtin_inff();
constexpr float kLeastSoftcap = 0x1p-126f;  // its inverse is finite

// Keys per step: K and V panels take 128 KiB, or 256 KiB at dim = dim_v = 256 in fp32.
FLASHMOE_INLINE int64_t keys_per_step(const AttentionProblem& p, int pack) {
  constexpr int64_t kMostWords = 128;  // words of a key in K and V together, for a full step
  return (p.dim + p.dim_v) / pack <= kMostWords ? kMaxTileK : kMaxTileK / 2;
}

// Lays out a thread's scratch. From a null base it only measures.
class ScratchCursor {
 public:
  explicit ScratchCursor(void* base) : base_(static_cast<char*>(base)), next_(base_) {}

  float* take(int64_t count) {
    float* begin = reinterpret_cast<float*>(next_);
    next_ += round_up(count * static_cast<int64_t>(sizeof(float)), kScratchAlignment);
    return begin;
  }
  size_t bytes() const { return static_cast<size_t>(next_ - base_); }

 private:
  char* const base_;
  char* next_;
};

// State of the rows of a tile between two steps, in groups of kGroupRows.
struct RowState {
  float* output;   // [groups][dim_v panels][kGroupRows][kPanel]
  float* sums;     // [groups * kGroupRows][kLanes], partial
  float* row_max;  // [groups * kGroupRows]
  float* sees;     // [groups * kGroupRows], not 0: the row saw a key; only with a bias or a mask

  RowState(ScratchCursor& scratch, const AttentionProblem& p, int64_t tile_q)
      : output(scratch.take(tile_q * round_up(p.dim_v, kPanel))),
        sums(scratch.take(tile_q * kLanes)),
        row_max(scratch.take(tile_q)),
        sees(p.bias.data != nullptr || p.mask.data != nullptr ? scratch.take(tile_q) : nullptr) {}
};

// Scores of the rows that are weighed together, in a step.
struct RowScores {
  float* scores;   // [rows][kScoreStride], weights overwrite them
  float* rescale;  // [rows], factor of the output so far

  RowScores(ScratchCursor& scratch, int64_t rows)
      : scores(scratch.take(rows * kScoreStride)), rescale(scratch.take(rows)) {}
};

// Where the rows of K and V of a step lie, for keys in pages or of 8 bits, and their scales, if
// any. 8-bit rows are widened, and the pointers lead to the widened rows.
struct StepRows {
  const void** k = nullptr;  // [kMaxTileK], kHiddenRow if hidden
  const void** v = nullptr;
  float* wide_k = nullptr;   // [tile_k][dim] in q's dtype
  float* wide_v = nullptr;   // [tile_k][dim_v]
  float* k_scale = nullptr;  // [kMaxTileK] and one vector; nullptr: all are 1
  float* v_scale = nullptr;

  StepRows(ScratchCursor& scratch, const AttentionProblem& p, int64_t tile_k) {
    const bool narrow = p.k.dtype == Dtype::kFloat8E4M3;
    if (p.sequences.paged || narrow) {
      constexpr int64_t kFloats = kMaxTileK * static_cast<int64_t>(sizeof(void*) / sizeof(float));
      k = reinterpret_cast<const void**>(scratch.take(kFloats));
      v = reinterpret_cast<const void**>(scratch.take(kFloats));
    }
    if (narrow) {
      wide_k = scratch.take(tile_k * p.dim);  // room for fp32
      wide_v = scratch.take(tile_k * p.dim_v);
    }
    if (p.k_scale.data != nullptr) k_scale = scratch.take(kMaxTileK + kLanes);
    if (p.v_scale.data != nullptr) v_scale = scratch.take(kMaxTileK + kLanes);
  }
};

// The places of a tile's rows, and the keys they see.
class TileRows {
 protected:
  TileRows(const AttentionProblem& problem, const AttentionTile& tile)
      : p_(problem), tile_(tile), group_heads_(problem.heads_q / problem.heads_kv) {}

  int64_t query_of(int64_t row) const { return (tile_.first_row + row) / group_heads_; }

  int64_t head_of(int64_t row) const {
    return tile_.kv_head * group_heads_ + (tile_.first_row + row) % group_heads_;
  }

  // Element offset of a row of q, out or lse.
  int64_t offset_of(int64_t row, const RowStrides& strides) const {
    return tile_.batch * strides.batch + query_of(row) * strides.seq + head_of(row) * strides.head;
  }
  // Element offset of key 0 of k or v.
  int64_t offset_of_keys(const RowStrides& strides) const {
    return tile_.batch * strides.batch + tile_.kv_head * strides.head;
  }

  int64_t first_key(int64_t row) const { return visible_keys::first_key(p_, query_of(row)); }
  int64_t end_key(int64_t row) const { return visible_keys::end_key(p_, query_of(row)); }

  // A part of a step's keys, as indices into the step.
  struct KeyRange {
    int64_t begin;
    int64_t end;
  };
  // The keys that row `row` sees in the part `of` of the step that begins with `key`; begin == end
  // if none.
  KeyRange visible(int64_t row, int64_t key, KeyRange of) const {
    const int64_t begin = clamp(first_key(row) - key, of.begin, of.end);
    return {begin, clamp(end_key(row) - key, begin, of.end)};
  }

  // Whether there is a bias or a mask, with a number per pair of a row and a key.
  bool has_pairs() const { return p_.bias.data != nullptr || p_.mask.data != nullptr; }

  // Element offset of key 0 of a row.
  int64_t offset_of_pairs(int64_t row, const PairsView& pairs) const {
    return tile_.batch * pairs.batch_stride + head_of(row) * pairs.head_stride +
           query_of(row) * pairs.query_stride;
  }

  // Writes the numbers added to a row's logits, for the keys [begin, end) of all; -inf hides a key.
  // Pads with lanes of 0. False if all are hidden.
  template <typename Element>
  FLASHMOE_NOINLINE bool load_pairs(int64_t row, int64_t begin, int64_t end, float* to) const {
    const int64_t count = end - begin;
    for (int64_t i = 0; i < count; i += kLanes) Simd::store(to + i, Simd::zero());
    if (p_.bias.data != nullptr) {
      const int64_t offset = offset_of_pairs(row, p_.bias) + begin * p_.bias.key_stride;
      if (p_.bias.dtype == Dtype::kFloat32) {
        load_bias(static_cast<const float*>(p_.bias.data) + offset, count, to);
      } else {
        load_bias(static_cast<const Element*>(p_.bias.data) + offset, count, to);
      }
    }
    if (p_.mask.data != nullptr) {
      const unsigned char* const mask = static_cast<const unsigned char*>(p_.mask.data) +
                                        offset_of_pairs(row, p_.mask) + begin * p_.mask.key_stride;
      if (p_.mask.key_stride == 1) {
        for (int64_t i = 0; i < count; ++i) to[i] = mask[i] != 0 ? to[i] : -kInfinity;
      } else {
        const int64_t next = p_.mask.key_stride;
        for (int64_t i = 0; i < count; ++i) to[i] = mask[i * next] != 0 ? to[i] : -kInfinity;
      }
    }
    int32_t seen = 0;
    for (int64_t i = 0; i < count; ++i) seen |= static_cast<int32_t>(to[i] != -kInfinity);
    return seen != 0;
  }

  template <typename T>
  FLASHMOE_INLINE void load_bias(const T* bias, int64_t count, float* to) const {
    const int64_t next = p_.bias.key_stride;
    if (next == 1) {
      for (int64_t i = 0; i < count; i += kLanes) {
        Simd::store(to + i, Simd::load_first(bias + i, count - i));
      }
    } else if (next == 0) {
      const Vector one = Simd::broadcast(Simd::sum_of(Simd::load_first(bias, 1)));
      for (int64_t i = 0; i < count; i += kLanes) {
        Simd::store(to + i, Simd::first_or(one, count - i, Simd::zero()));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = Simd::sum_of(Simd::load_first(bias + i * next, 1));
      }
    }
  }

  // The same for one key. Returns whether it is hidden.
  template <typename Element>
  bool is_hidden(int64_t row, int64_t key) const {
    float one[kLanes];
    return has_pairs() && !load_pairs<Element>(row, key, key + 1, one);
  }

  const AttentionProblem& p_;
  const AttentionTile& tile_;
  const int64_t group_heads_;  // heads that share a KV head
};

// The logit of a score with a bias: -inf for a hidden key, whatever its score. Backward computes
// the forward's bits.
FLASHMOE_INLINE Vector biased_logit(Vector score, float scale, Vector bias) {
  const Vector seen = Simd::zero_where_at_most(bias, Simd::broadcast(-kInfinity), score);
  return Simd::multiply_add(seen, Simd::broadcast(scale), bias);
}

template <typename Product>
class AttentionRows : protected TileRows {
 public:
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;

 protected:
  AttentionRows(const AttentionProblem& problem, const AttentionTile& tile, const RowState& state,
                const RowScores& scores, const StepRows& step_rows)
      : TileRows(problem, tile),
        tile_k_(keys_per_step(problem, kPack)),
        words_(problem.dim / kPack),
        groups_((tile.rows + kGroupRows - 1) / kGroupRows),
        dim_v_panels_((problem.dim_v + kPanel - 1) / kPanel),
        factor_(problem.softcap != 0.0f ? problem.softcap : problem.scale),
        logit_scale_(this->has_pairs() ? 1.0f : factor_),
        narrow_(p_.k.dtype == Dtype::kFloat8E4M3),
        k_(p_.k, offset_of_keys(p_.k.strides), narrow_),
        v_(p_.v, offset_of_keys(p_.v.strides), narrow_),
        state_(state),
        scores_(scores),
        step_rows_(step_rows) {}

  // Rows of K or V, in q's dtype or of 8 bits.
  struct KeyRows {
    const Element* same;
    const uint8_t* narrow;

    KeyRows(const RowsView<const void>& view, int64_t offset, bool is_narrow)
        : same(is_narrow ? nullptr : static_cast<const Element*>(view.data) + offset),
          narrow(is_narrow ? static_cast<const uint8_t*>(view.data) + offset : nullptr) {}
    const void* at(int64_t element) const {
      return narrow != nullptr ? static_cast<const void*>(narrow + element) : same + element;
    }
  };

  // Finds the rows and scales of the part `keys` of the step that begins with `key`, unless the
  // rows are evenly spaced and in q's dtype.
  void find_rows(int64_t key, KeyRange keys) {
    if (tile_.pages != nullptr) {
      find_rows_in_pages(key, keys);
    } else {
      if (narrow_) find_even_rows(key, keys);
      put_scales(tile_.batch, keys.begin, keys.end);
    }
    if (narrow_) widen_rows(keys);
  }

  FLASHMOE_NOINLINE void find_even_rows(int64_t key, KeyRange keys) {
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      step_rows_.k[i] = k_.at((key + i) * p_.k.strides.seq);
      step_rows_.v[i] = v_.at((key + i) * p_.v.strides.seq);
    }
  }

  // Stores the scales of a row of the batch, or of a page.
  void put_scales(int64_t batch, int64_t begin, int64_t end) {
    if (step_rows_.k_scale != nullptr) {
      const float scale = *p_.k_scale.at(batch, tile_.kv_head);
      for (int64_t i = begin; i < end; ++i) step_rows_.k_scale[i] = scale;
    }
    if (step_rows_.v_scale != nullptr) {
      const float scale = *p_.v_scale.at(batch, tile_.kv_head);
      for (int64_t i = begin; i < end; ++i) step_rows_.v_scale[i] = scale;
    }
  }
  void put_no_scales(int64_t begin, int64_t end) {
    for (float* each : {step_rows_.k_scale, step_rows_.v_scale}) {
      if (each == nullptr) continue;
      for (int64_t i = begin; i < end; ++i) each[i] = 1.0f;
    }
  }

  FLASHMOE_NOINLINE void widen_rows(KeyRange keys) {
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      if (step_rows_.k[i] == kHiddenRow) continue;
      step_rows_.k[i] = widen_row(step_rows_.k[i], step_rows_.wide_k, i, p_.dim);
      step_rows_.v[i] = widen_row(step_rows_.v[i], step_rows_.wide_v, i, p_.dim_v);
    }
  }
  static const void* widen_row(const void* row, float* wide, int64_t i, int64_t dim) {
    const uint8_t* const from = static_cast<const uint8_t*>(row);
    Element* const to = reinterpret_cast<Element*>(wide) + i * dim;
    for (int64_t column = 0; column < dim; column += kLanes) {
      const int64_t count = smaller(kLanes, dim - column);
      float values[kLanes] = {};
      for (int64_t j = 0; j < count; ++j) values[j] = kE4m3Values[from[column + j]];
      Simd::store_first(to + column, Simd::load(values), count);
    }
    return to;
  }

  FLASHMOE_NOINLINE void find_rows_in_pages(int64_t key, KeyRange keys) {
    const KeyPages& pages = *tile_.pages;
    const int64_t first = pages.first + key + keys.begin;
    int64_t page = first / pages.page_size;
    int64_t slot = first % pages.page_size;
    step_has_hidden_ = false;
    for (int64_t i = keys.begin; i < keys.end; ++page, slot = 0) {
      const int64_t end = smaller(keys.end, i + pages.page_size - slot);
      const int64_t number = pages.table[page * pages.step];
      if (number < 0 || number >= pages.count) {
        put_no_scales(i, end);
        for (; i < end; ++i) step_rows_.k[i] = step_rows_.v[i] = kHiddenRow;
        step_has_hidden_ = has_hidden_ = true;
        continue;
      }
      put_scales(number, i, end);
      for (int64_t row = slot; i < end; ++i, ++row) {
        step_rows_.k[i] = k_.at(number * p_.k.strides.batch + row * p_.k.strides.seq);
        step_rows_.v[i] = v_.at(number * p_.v.strides.batch + row * p_.v.strides.seq);
      }
    }
  }

  // The row of key i of the step that begins with `key`.
  FLASHMOE_INLINE const Element* key_row(int64_t key, int64_t i) const {
    if (step_rows_.k != nullptr) return static_cast<const Element*>(step_rows_.k[i]);
    return k_.same + (key + i) * p_.k.strides.seq;
  }
  FLASHMOE_INLINE const Element* value_row(int64_t key, int64_t i) const {
    if (step_rows_.v != nullptr) return static_cast<const Element*>(step_rows_.v[i]);
    return v_.same + (key + i) * p_.v.strides.seq;
  }

  void clear_state() {
    const int64_t rows = groups_ * kGroupRows;
    for (int64_t i = 0; i < rows * dim_v_panels_ * kPanel; i += kLanes) {
      Simd::store(state_.output + i, Simd::zero());
    }
    for (int64_t row = 0; row < rows; ++row) {
      Simd::store(state_.sums + row * kLanes, Simd::zero());
      state_.row_max[row] = -kInfinity;
      if (this->has_pairs()) state_.sees[row] = 0.0f;
    }
  }

  // scores = tanh(scale / softcap * scores), in whole vectors. The ratio itself may exceed fp32.
  FLASHMOE_NOINLINE void cap(float* scores, KeyRange keys) const {
    const Vector scale = Simd::broadcast(p_.scale);
    // Keeps the inverse finite: below such a softcap all logits are 0.
    const Vector inverse =
        Simd::broadcast(1.0f / (p_.softcap > kLeastSoftcap ? p_.softcap : kLeastSoftcap));
    for (int64_t key = keys.begin; key < keys.end; key += kLanes) {
      const Vector logits = Simd::multiply(Simd::load(scores + key), scale);
      Simd::store(scores + key, tanh_of(Simd::multiply(logits, inverse)));
    }
  }

  // Scales whole vectors. Nothing reads the lanes after the last key.
  FLASHMOE_NOINLINE void scale_scores(float* scores, KeyRange keys) const {
    for (int64_t key = keys.begin; key < keys.end; key += kLanes) {
      const Vector scale = Simd::load(step_rows_.k_scale + key);
      Simd::store(scores + key, Simd::multiply(Simd::load(scores + key), scale));
    }
  }

  // Whether some key is not -inf in `bias` and its page exists.
  bool sees_beside_hidden(KeyRange keys, const float* bias) const {
    if (!step_has_hidden_) return true;
    int64_t key = keys.begin;
    while (key < keys.end &&
           (step_rows_.k[key] == kHiddenRow || bias[key - keys.begin] == -kInfinity)) {
      ++key;
    }
    return key < keys.end;
  }

  // Turns scores into logits, for the part `keys` of the step that begins with `key`.
  FLASHMOE_NOINLINE void add_bias(int64_t row, int64_t key, float* scores, KeyRange keys) {
    float bias[kMaxTileK + kLanes];
    if (this->template load_pairs<Element>(row, key + keys.begin, key + keys.end, bias)) {
      if (sees_beside_hidden(keys, bias)) state_.sees[row] = 1.0f;
    }
    for (int64_t i = keys.begin; i < keys.end; i += kLanes) {
      const Vector added = Simd::load(bias + (i - keys.begin));
      Simd::store_first(scores + i, biased_logit(Simd::load(scores + i), factor_, added),
                        keys.end - i);
    }
  }

  // Prepares the scores of a row, from the vector at `begin` on, for its keys `row_keys` of the
  // step that begins with `first`. Returns the end of the keys that the row weighs.
  int64_t prepare_scores(int64_t row, int64_t r, int64_t first, KeyRange row_keys, int64_t begin) {
    if (row_keys.begin >= row_keys.end) return begin;
    float* const scores = scores_.scores + r * kScoreStride;
    if (step_rows_.k_scale != nullptr) scale_scores(scores, {begin, row_keys.end});
    if (p_.softcap != 0.0f) cap(scores, {begin, row_keys.end});
    if (this->has_pairs()) add_bias(row, first, scores, row_keys);
    // Keys before the window weigh exp(-inf).
    for (int64_t hidden = begin; hidden < row_keys.begin; hidden += kLanes) {
      const Vector now = Simd::load(scores + hidden);
      Simd::store(scores + hidden,
                  Simd::first_or(Simd::broadcast(-kInfinity), row_keys.begin - hidden, now));
    }
    if (step_has_hidden_) {
      for (int64_t key = row_keys.begin; key < row_keys.end; ++key) {
        if (step_rows_.k[key] == kHiddenRow) scores[key] = -kInfinity;
      }
    }
    return row_keys.end;
  }

  // Maxima of some scores, lane by lane.
  FLASHMOE_INLINE static Vector maxima_of(const float* scores, int64_t begin, int64_t end) {
    const Vector lowest = Simd::broadcast(-kInfinity);
    Vector highest = lowest;
    Vector highest2 = lowest;
    int64_t key = begin;
    for (; key + 2 * kLanes <= end; key += 2 * kLanes) {
      highest = Simd::max(highest, Simd::load(scores + key));
      highest2 = Simd::max(highest2, Simd::load(scores + key + kLanes));
    }
    for (; key < end; key += kLanes) {
      highest = Simd::max(highest, Simd::first_or(Simd::load(scores + key), end - key, lowest));
    }
    return Simd::max(highest, highest2);
  }

  // Turns the scores of a row into weights, for the keys `row_keys` that it sees in the step that
  // begins with `first`. The other keys of `keys`, which its group sees, get 0.
  void weigh_row(int64_t row, int64_t r, int64_t first, KeyRange row_keys, KeyRange keys) {
    const int64_t begin = keys.begin / kLanes * kLanes;
    const int64_t seen = prepare_scores(row, r, first, row_keys, begin);
    const Vector here = maxima_of(scores_.scores + r * kScoreStride, begin, seen);
    weigh_scores(row, r, Simd::max_of(here), row_keys, {begin, seen}, keys.end);
  }

  // Does the rest for prepared scores with maximum `here`: weighs `prepared` and writes 0 from
  // there to `end`.
  void weigh_scores(int64_t row, int64_t r, float here, KeyRange row_keys, KeyRange prepared,
                    int64_t end) {
    float* const scores = scores_.scores + r * kScoreStride;
    const float before = state_.row_max[row];
    const float maximum = here > before ? here : before;
    state_.row_max[row] = maximum;
    // For rows whose scores are all -inf so far: exp(-inf - 0) is 0, but exp(-inf - -inf) is NaN.
    // Uses halves, because the difference of two finite scores may be infinite.
    const Vector half = Simd::broadcast(0.5f);
    const Vector base = Simd::broadcast(maximum == -kInfinity ? 0.0f : -0.5f * maximum);
    const Vector scale = Simd::broadcast(logit_scale_);
    const auto weight = [&](Vector score) {
      const Vector below = Simd::multiply_add(score, half, base);
      return exp_of_twice_nonpositive(Simd::multiply(below, scale));
    };
    const Vector rescale = weight(Simd::broadcast(before));
    Simd::store_first(scores_.rescale + r, rescale, 1);
    Vector sum = Simd::multiply(Simd::load(state_.sums + row * kLanes), rescale);
    int64_t key = prepared.begin;
    for (; key + kLanes <= prepared.end; key += kLanes) {
      const Vector weights = weight(Simd::load(scores + key));
      sum = Simd::add(sum, weights);
      Product::store_weights(scores, key, scale_by_values(weights, key, row_keys));
    }
    if (key < prepared.end) {
      const Vector weights =
          Simd::first_or(weight(Simd::load(scores + key)), prepared.end - key, Simd::zero());
      sum = Simd::add(sum, weights);
      Product::store_weights(scores, key, scale_by_values(weights, key, row_keys));
      key += kLanes;
    }
    for (; key < end; key += kLanes) Product::store_weights(scores, key, Simd::zero());
    Simd::store(state_.sums + row * kLanes, sum);
  }

  // Multiplies weights of the keys from `key` on by their scales of V. A key that the row does not
  // see may have any scale.
  FLASHMOE_INLINE Vector scale_by_values(Vector weights, int64_t key, KeyRange row_keys) const {
    if (step_rows_.v_scale == nullptr) return weights;
    const Vector one = Simd::broadcast(1.0f);
    Vector scales = Simd::load(step_rows_.v_scale + key);
    if (key < row_keys.begin) scales = Simd::first_or(one, row_keys.begin - key, scales);
    if (key + kLanes > row_keys.end) scales = Simd::first_or(scales, row_keys.end - key, one);
    if (this->has_pairs()) scales = Simd::zero_where_at_most(weights, Simd::zero(), scales);
    return Simd::multiply(weights, scales);
  }

  float* output_of(int64_t row, int64_t panel) const {
    const int64_t r = row % kGroupRows;
    return state_.output + ((row - r) * dim_v_panels_ + panel * kGroupRows + r) * kPanel;
  }

  // The sink of a row's head, a logit; -inf without sinks.
  float sink_of(int64_t row) const {
    if (p_.sinks.data == nullptr) return -kInfinity;
    const int64_t at = head_of(row) * p_.sinks.stride;
    if (p_.sinks.dtype == Dtype::kFloat32) return static_cast<const float*>(p_.sinks.data)[at];
    return Simd::sum_of(Simd::load_first(static_cast<const Element*>(p_.sinks.data) + at, 1));
  }

  bool sees_keys_of(int64_t row) const {
    const int64_t end = end_key(row);
    int64_t key = first_key(row);
    if (this->has_pairs()) return state_.sees[row] != 0.0f;
    if (!has_hidden_) return key < end;
    const KeyPages& pages = *tile_.pages;
    while (key < end) {
      const int64_t number = pages.table[(pages.first + key) / pages.page_size * pages.step];
      if (number >= 0 && number < pages.count) return true;
      key += pages.page_size - (pages.first + key) % pages.page_size;
    }
    return false;
  }

  void finish_row(int64_t row) {
    const bool sees_keys = sees_keys_of(row);
    const float sink = sink_of(row);
    float sum = Simd::sum_of(Simd::load(state_.sums + row * kLanes));
    float log_max = state_.row_max[row] * logit_scale_;
    float rescale = 1.0f;  // of the output, if the sink is the row's maximum
    if (sink != -kInfinity) {
      const double excess = static_cast<double>(sink) - static_cast<double>(state_.row_max[row]) *
                                                            static_cast<double>(logit_scale_);
      const float weight = static_cast<float>(__builtin_exp(excess > 0 ? -excess : excess));
      sum = excess > 0 ? sum * weight + 1.0f : sum + weight;
      log_max = excess > 0 ? sink : log_max;
      rescale = excess > 0 ? weight : 1.0f;
    }
    // Scores that are all -inf leave a sum of 0, and 0 * (1 / 0) is the NaN that softmax gives.
    const Vector inverse = Simd::broadcast(sees_keys ? rescale / sum : 0.0f);
    Element* out = static_cast<Element*>(p_.out.data) + offset_of(row, p_.out.strides);
    for (int64_t column = 0; column < p_.dim_v; column += kLanes) {
      const float* from = output_of(row, column / kPanel) + column % kPanel;
      Simd::store_first(out + column, Simd::multiply(Simd::load(from), inverse), p_.dim_v - column);
    }
    if (p_.lse != nullptr) {
      static_cast<float*>(p_.lse)[offset_of(row, p_.lse_strides)] =
          sees_keys ? log_max + __builtin_logf(sum) : sink;
    }
  }

  const int64_t tile_k_;
  const int64_t words_;  // of a row of Q or K
  const int64_t groups_;
  const int64_t dim_v_panels_;
  const float factor_;       // logit = this * score + bias
  const float logit_scale_;  // the same for weighing; 1 with a bias, since scores are then logits
  const bool narrow_;        // keys are of 8 bits
  const KeyRows k_;          // key 0, or with pages row 0 of page 0
  const KeyRows v_;
  const RowState state_;
  const RowScores scores_;
  const StepRows step_rows_;
  bool step_has_hidden_ = false;
  bool has_hidden_ = false;  // some step had hidden keys
};
