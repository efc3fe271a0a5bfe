// Attention backward of a block of rows and a tile of keys, for any instruction set.
//
//   scores = Q K^T,  dweights = dOut V^T                              [rows, keys]
//   weights = exp(logits - lse),  dscores = weights (dweights - delta)
//   dV += weights^T dOut,  dK += dscores^T Q,  dQ += dscores K
//
// with delta = (sum of dOut Out over a row) - dlse. Under a softcap, dscores has the factor 1 -
// tanh^2. dK and dQ get the factor `scale` when they are written.
//
// All five are the register-blocked product of cpu/products.h. K and V are packed once per tile of
// keys: transposed for the first two products, K also across for dQ. Q and dOut are packed once per
// block: transposed for the first two, across for dV and dK. Weights and dscores replace scores and
// dweights and are read in place, down a column for dV and dK and along a row for dQ. Scores have
// the bits of the forward: sums run in the same order.
//
// If a row does not see a key, its weight and dscore are 0. That equals leaving the pair out unless
// Q, K or dOut hold a NaN or infinity: then their products are added pair by pair.
//
// Included after cpu/attention_tile.h and cpu/attention_backward_rows.h.

constexpr int kBackwardRows = 96;                        // rows of a block
constexpr int kMostBackwardKeys = 192;                   // keys of a tile
constexpr int kPairStride = kMostBackwardKeys + kLanes;  // rows do not share cache sets
static_assert(kBackwardRows % kGroupRows == 0);
static_assert(kMostBackwardKeys / 2 % kPanel == 0 && kMostBackwardKeys / 2 % kGroupRows == 0);

// The packed keys of a tile and their sums fit in a level-2 cache next to a block of rows.
FLASHMOE_INLINE int64_t backward_keys(const AttentionProblem& p, int pack) {
  constexpr int64_t kMostWords = 256;  // words of a key in K and V together, for a full tile
  return (p.dim + p.dim_v) / pack <= kMostWords ? kMostBackwardKeys : kMostBackwardKeys / 2;
}

// The scratch of one thread.
struct BackwardScratch {
  struct Finite {
    int32_t k;
    int32_t q;
    int32_t dout;
  };

  Finite* finite;
  // The tile of keys:
  float* k_columns;  // [keys / kPanel][words][kPanel] and one vector
  float* v_columns;  // the same
  float* k_rows;     // [dim panels][keys / pack][kPanel]
  float* dk;         // [keys / kGroupRows][dim panels][kGroupRows][kPanel]
  float* dv;         // [keys / kGroupRows][dim_v panels][kGroupRows][kPanel]
  // The block of rows:
  float* q_columns;     // [rows / kGroupRows][words][kGroupRows] and one vector
  float* dout_columns;  // the same
  float* q_rows;        // [dim panels][rows / pack][kPanel]
  float* dout_rows;     // [dim_v panels][rows / pack][kPanel]
  float* weights;       // [rows][kPairStride]: scores, then weights in words of kPack rows
  float* dscores;       // [rows][kPairStride]: dweights, then dscores in words of kPack rows
  float* dscores_keys;  // [rows][kPairStride]: dscores in words of kPack keys
  float* half_lse;      // [rows], negative
  float* delta;         // [rows]
  float* dq;            // sums of a block

  BackwardScratch(ScratchCursor& scratch, const AttentionProblem& p, int pack)
      : finite(reinterpret_cast<Finite*>(scratch.take(kLanes))) {
    const int64_t keys = backward_keys(p, pack);
    const int64_t dim = round_up(p.dim, kPanel);
    const int64_t dim_v = round_up(p.dim_v, kPanel);
    k_columns = scratch.take(keys * (p.dim / pack) + kLanes);
    v_columns = scratch.take(keys * (p.dim_v / pack) + kLanes);
    k_rows = scratch.take(keys / pack * dim);
    dk = scratch.take(keys * dim);
    dv = scratch.take(keys * dim_v);
    q_columns = scratch.take(kBackwardRows * (p.dim / pack) + kLanes);
    dout_columns = scratch.take(kBackwardRows * (p.dim_v / pack) + kLanes);
    q_rows = scratch.take(kBackwardRows / pack * dim);
    dout_rows = scratch.take(kBackwardRows / pack * dim_v);
    weights = scratch.take(kBackwardRows * kPairStride);
    dscores = scratch.take(kBackwardRows * kPairStride);
    dscores_keys = pack == 1 ? dscores : scratch.take(kBackwardRows * kPairStride);
    half_lse = scratch.take(kBackwardRows);
    delta = scratch.take(kBackwardRows);
    dq = scratch.take(kBackwardRows * dim);
  }
};

// Stores the product of one panel to `to`, whose rows have kToStride numbers, or adds it.
template <typename Product, int kRows, int kVectors, int kRowStride, int kStepStride, int kToStride>
FLASHMOE_NOINLINE void multiply_panel_into(const float* a, const float* b, int64_t steps,
                                           int64_t run, bool add, float* to) {
  const auto later = [=](int r, int v, Vector sum) {
    float* const at = to + r * kToStride + v * kLanes;
    Simd::store(at, Simd::add(Simd::load(at), sum));
  };
  multiply_panel<Product, kRows, kVectors, kRowStride, kStepStride>(
      a, b, steps, run,
      [=](int r, int v, Vector sum) {
        if (add) return later(r, v, sum);
        Simd::store(to + r * kToStride + v * kLanes, sum);
      },
      later);
}

// For `rows` rows and `columns` columns.
template <typename Product, int kRowStride, int kStepStride, int kToStride>
FLASHMOE_INLINE void multiply_group_into(const float* a, const float* b, int64_t rows,
                                         int64_t columns, int64_t steps, int64_t run, bool add,
                                         float* to) {
  constexpr int kSmall = kSmallGroupRows;
  const bool small = rows <= kSmall;
  if (columns > kLanes) {
    constexpr int kVectors = kPanelVectors;
    (small ? multiply_panel_into<Product, kSmall, kVectors, kRowStride, kStepStride, kToStride>
           : multiply_panel_into<Product, kGroupRows, kVectors, kRowStride, kStepStride,
                                 kToStride>)(a, b, steps, run, add, to);
  } else {
    (small ? multiply_panel_into<Product, kSmall, 1, kRowStride, kStepStride, kToStride>
           : multiply_panel_into<Product, kGroupRows, 1, kRowStride, kStepStride, kToStride>)(a, b,
                                                                                              steps,
                                                                                              run,
                                                                                              add,
                                                                                              to);
  }
}

template <typename Product>
class BackwardStep : BackwardRows<Product> {
 public:
  using Base = BackwardRows<Product>;
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;

  BackwardStep(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
               const BackwardScratch& scratch)
      : Base(problem, step), tile_k_(backward_keys(problem, kPack)), s_(scratch) {}

  void begin_keys() {
    const auto key_of = [&](const RowsView<const void>& view) {
      const Element* const first = static_cast<const Element*>(view.data) +
                                   this->offset_of_keys(view.strides) +
                                   step_.first_key * view.strides.seq;
      return [first, next = view.strides.seq](int64_t key) { return first + key * next; };
    };
    const auto k = key_of(b_.k);
    pack_transposed<Product, kPanel>(k, 0, step_.keys, b_.dim, s_.k_columns);
    if (this->needs_dscores()) {
      pack_transposed<Product, kPanel>(key_of(b_.v), 0, step_.keys, b_.dim_v, s_.v_columns);
    }
    if (this->wants_dq()) {
      s_.finite->k =
          pack_across<Product>(k, 0, step_.keys, b_.dim, tile_k_ / kPack * kPanel, s_.k_rows);
    }
    if (this->wants_dk()) clear(s_.dk, tile_k_ * dim_panels_ * kPanel);
    if (this->wants_dv()) clear(s_.dv, tile_k_ * dim_v_panels_ * kPanel);
  }

  void add_rows() {
    if (seen_.begin == seen_.end) return;
    pack_rows();
    for (int64_t first = 0; first < rows_; first += kGroupRows) score(first);
    for (int64_t row = 0; row < rows_; row += kPack) weigh(row);
    if (this->wants_dv()) {
      add_to_keys(s_.weights, s_.dout_rows, s_.finite->dout != 0, dim_v_panels_, b_.dim_v, s_.dv);
    }
    if (this->wants_dk()) {
      add_to_keys(s_.dscores, s_.q_rows, s_.finite->q != 0, dim_panels_, b_.dim, s_.dk);
    }
  }

  void add_dq(float* sums, bool first, bool last) {
    if (sums == nullptr) sums = s_.dq;
    for (int64_t row = 0; row < rows_; row += kGroupRows) {
      float* const group = sums + row * dim_panels_ * kPanel;
      const int64_t rows = smaller(kGroupRows, rows_ - row);
      const KeyRange seen = this->seen_by(row, rows);
      if (first && (seen.begin == seen.end || !multiplies_all(s_.finite->k != 0))) {
        clear(group, kGroupRows * dim_panels_ * kPanel);
      }
      if (seen.begin == seen.end) continue;
      if (multiplies_all(s_.finite->k != 0)) {
        add_dq_of_group(row, rows, seen, !first, group);
      } else {
        for (int64_t r = row; r < row + rows; ++r) add_dq_of_row(r, group);
      }
    }
    if (!last) return;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t r = row % kGroupRows;
      this->write_row(b_.dq, this->offset_of(row, b_.dq.strides), b_.dim, b_.scale,
                      sums + (row - r) * dim_panels_ * kPanel + r * kPanel);
    }
  }

  // `sums` holds dk, then dv.
  void end_keys(float* sums, bool first, bool last) {
    const int64_t keys = round_up(step_.keys, kGroupRows);
    const int64_t of_dk = keys * dim_panels_ * kPanel;
    if (this->wants_dk()) add_to_shared(s_.dk, sums, of_dk, first, last);
    if (this->wants_dv()) {
      float* const shared = sums != nullptr ? sums + of_dk : nullptr;
      add_to_shared(s_.dv, shared, keys * dim_v_panels_ * kPanel, first, last);
    }
    if (!last) return;
    for (int64_t key = 0; key < step_.keys; ++key) {
      if (this->wants_dk()) write_key(b_.dk, key, b_.dim, b_.scale, dim_panels_, s_.dk);
      if (this->wants_dv()) write_key(b_.dv, key, b_.dim_v, 1.0f, dim_v_panels_, s_.dv);
    }
  }

 private:
  using Base::b_;
  using Base::dim_panels_;
  using Base::dim_v_panels_;
  using Base::rows_;
  using Base::seen_;
  using Base::step_;
  using typename Base::KeyRange;
  using typename Base::Pair;

  static void clear(float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) Simd::store(to + i, Simd::zero());
  }

  // Whether every row sees every key of the tile.
  bool sees_all() const {
    return !this->has_pairs() && this->first_key(rows_ - 1) <= step_.first_key &&
           this->end_key(0) >= step_.first_key + step_.keys;
  }
  // Whether masked pairs may be multiplied too, by their 0.
  bool multiplies_all(bool finite) const { return finite || sees_all(); }

  void pack_rows() {
    const auto row_of = [&](const RowsView<const void>& view) {
      return [this, &view](int64_t row) {
        return static_cast<const Element*>(view.data) + this->offset_of(row, view.strides);
      };
    };
    const auto q = row_of(b_.q);
    const auto dout = row_of(b_.dout);
    constexpr int64_t kWords = kBackwardRows / kPack;
    pack_transposed<Product, kGroupRows>(q, 0, rows_, b_.dim, s_.q_columns);
    if (this->wants_dk()) {
      s_.finite->q = pack_across<Product>(q, 0, rows_, b_.dim, kWords * kPanel, s_.q_rows);
    }
    if (this->wants_dv()) {
      s_.finite->dout =
          pack_across<Product>(dout, 0, rows_, b_.dim_v, kWords * kPanel, s_.dout_rows);
    }
    const float* const lse = static_cast<const float*>(b_.lse);
    for (int64_t row = 0; row < rows_; ++row) {
      s_.half_lse[row] = -0.5f * lse[this->offset_of(row, b_.lse_strides)];
    }
    if (!this->needs_dscores()) return;
    pack_transposed<Product, kGroupRows>(dout, 0, rows_, b_.dim_v, s_.dout_columns);
    for (int64_t row = 0; row < rows_; ++row) s_.delta[row] = this->delta_of(row, dout(row));
  }

  // Computes scores and dweights of a group of rows.
  void score(int64_t first) {
    const int64_t rows = smaller(kGroupRows, rows_ - first);
    const KeyRange seen = this->seen_by(first, rows);
    const int64_t words = b_.dim / kPack;
    const int64_t words_v = b_.dim_v / kPack;
    float* const scores = s_.weights + first * kPairStride;
    float* const dweights = s_.dscores + first * kPairStride;
    for (int64_t key = seen.begin / kPanel * kPanel; key < seen.end; key += kPanel) {
      multiply_group_into<Product, 1, kGroupRows, kPairStride>(
          s_.q_columns + first * words, s_.k_columns + key * words, rows, seen.end - key, words,
          Product::kScoreRun, false, scores + key);
      if (!this->needs_dscores()) continue;
      multiply_group_into<Product, 1, kGroupRows, kPairStride>(
          s_.dout_columns + first * words_v, s_.v_columns + key * words_v, rows, seen.end - key,
          words_v, Product::kScoreRun, false, dweights + key);
    }
  }

  // Computes weights and dscores of kPack rows, for all keys that the block may be multiplied by; 0
  // for keys that a row does not see.
  FLASHMOE_NOINLINE void weigh(int64_t row) {
    constexpr int64_t kWhole = kGroupRows;  // keys come in groups for dV and dK
    const int64_t begin = seen_.begin / kWhole * kWhole / kLanes * kLanes;
    const int64_t end = round_up(seen_.end, kWhole);
    KeyRange visible[kPack];
    for (int i = 0; i < kPack; ++i) {
      visible[i] = row + i < rows_ ? this->visible(row + i, step_.first_key, {0, step_.keys})
                                   : KeyRange{0, 0};
    }
    float bias[kPack][kPairStride];
    for (int i = 0; i < kPack && this->has_pairs(); ++i) {
      // Whole vectors are read; parts that the row does not see are dropped.
      clear(bias[i], kPairStride);
      if (visible[i].begin >= visible[i].end) continue;
      this->template load_pairs<Element>(row + i, step_.first_key + visible[i].begin,
                                         step_.first_key + visible[i].end,
                                         bias[i] + visible[i].begin);
    }
    float* const weights_to = s_.weights + row * kPairStride;
    float* const dscores_to = s_.dscores + row * kPairStride;
    for (int64_t key = begin; key < end; key += kLanes) {
      Vector weights[kPack];
      Vector dscores[kPack];
#pragma GCC unroll 2
      for (int i = 0; i < kPack; ++i) {
        weights[i] = dscores[i] = Simd::zero();
        if (key >= visible[i].end || key + kLanes <= visible[i].begin) continue;
        const Pair pair = this->pair_of(Simd::load(weights_to + i * kPairStride + key),
                                        dscores_to + i * kPairStride + key, s_.half_lse[row + i],
                                        s_.delta[row + i], bias[i] + key);
        weights[i] = pair.weight;
        dscores[i] = pair.dscore;
        if (key < visible[i].begin || key + kLanes > visible[i].end) {
          weights[i] = this->only(visible[i], key, weights[i]);
          dscores[i] = this->only(visible[i], key, dscores[i]);
        }
      }
      Product::store_rows(weights_to + key, weights);
      if (!this->needs_dscores()) continue;
      Product::store_rows(dscores_to + key, dscores);
      if constexpr (kPack > 1) {
        for (int i = 0; i < kPack; ++i) {
          Product::store_weights(s_.dscores_keys + (row + i) * kPairStride, key, dscores[i]);
        }
      }
    }
  }

  // sums[key] += the sum over rows of pairs[row][key] values[row]. `values` are packed across.
  void add_to_keys(const float* pairs, const float* values, bool finite, int64_t panels,
                   int64_t dim, float* sums) {
    if (!multiplies_all(finite)) {
      for (int64_t row = 0; row < rows_; ++row) add_row_to_keys(row, pairs, values, panels, sums);
      return;
    }
    constexpr int64_t kPanelSize = kBackwardRows / kPack * kPanel;
    constexpr int kMostGroups = kMostBackwardKeys / kGroupRows;
    const int64_t begin = seen_.begin / kGroupRows * kGroupRows;
    KeyRange words[kMostGroups];  // of the rows that see some of a group of keys
    words_of_rows(begin, words);
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t key = begin; key < seen_.end; key += kGroupRows) {
        const KeyRange part = words[key / kGroupRows];
        if (part.begin >= part.end) continue;
        multiply_group_into<Product, 1, kPack * kPairStride, kPanel>(
            pairs + part.begin * kPack * kPairStride + key,
            values + panel * kPanelSize + part.begin * kPanel, seen_.end - key,
            dim - panel * kPanel, part.end - part.begin, kBackwardRows, true,
            sums + (key * panels + panel * kGroupRows) * kPanel);
      }
    }
  }

  void words_of_rows(int64_t begin, KeyRange* words) const {
    int64_t first = 0;  // the first row that sees a key of the group, or only later keys
    int64_t end = 0;    // the first row that sees only keys after the group
    for (int64_t key = begin; key < seen_.end; key += kGroupRows) {
      const int64_t absolute = step_.first_key + key;
      while (first < rows_ && this->end_key(first) <= absolute) ++first;
      while (end < rows_ && this->first_key(end) < absolute + kGroupRows) ++end;
      words[key / kGroupRows] = {first / kPack, (end + kPack - 1) / kPack};
    }
  }

  // The same for one row and the keys that it sees.
  void add_row_to_keys(int64_t row, const float* pairs, const float* values, int64_t panels,
                       float* sums) {
    constexpr int64_t kPanelSize = kBackwardRows / kPack * kPanel;
    const KeyRange keys = this->visible(row, step_.first_key, {0, step_.keys});
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      if (this->template is_hidden<Element>(row, step_.first_key + key)) continue;
      const Vector pair =
          of_pair(row, Simd::broadcast(pairs[row / kPack * kPack * kPairStride + key]));
      const int64_t k = key % kGroupRows;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const float* const from = values + panel * kPanelSize + row / kPack * kPanel;
        float* const to = sums + ((key - k) * panels + panel * kGroupRows + k) * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          const Vector value = of_pair(row, Simd::load(from + i));
          Simd::store(to + i, Product::multiply_add(pair, value, Simd::load(to + i)));
        }
      }
    }
  }

  // Extracts one row's or key's part from words of kPack.
  static Vector of_pair(int64_t which, Vector words) {
    return which % kPack == 0 ? Product::keep_first_of_pair(words)
                              : Product::keep_second_of_pair(words);
  }

  // `seen` are the keys that some row of the group sees.
  void add_dq_of_group(int64_t row, int64_t rows, KeyRange seen, bool add, float* sums) {
    const int64_t panel_size = tile_k_ / kPack * kPanel;
    const int64_t word = seen.begin / kPack;
    const int64_t words = (seen.end + kPack - 1) / kPack - word;
    for (int64_t panel = 0; panel < dim_panels_; ++panel) {
      multiply_group_into<Product, kPairStride, 1, kPanel>(
          s_.dscores_keys + row * kPairStride + word,
          s_.k_rows + panel * panel_size + word * kPanel, rows, b_.dim - panel * kPanel, words,
          Product::kValueRun, add, sums + panel * kGroupRows * kPanel);
    }
  }

  // For the keys that the row sees. `sums` belongs to its group.
  void add_dq_of_row(int64_t row, float* sums) {
    const int64_t panel_size = tile_k_ / kPack * kPanel;
    const KeyRange keys = this->visible(row, step_.first_key, {0, step_.keys});
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      if (this->template is_hidden<Element>(row, step_.first_key + key)) continue;
      const Vector pair =
          of_pair(key, Simd::broadcast(s_.dscores_keys[row * kPairStride + key / kPack]));
      for (int64_t panel = 0; panel < dim_panels_; ++panel) {
        const float* const from = s_.k_rows + panel * panel_size + key / kPack * kPanel;
        float* const to = sums + (panel * kGroupRows + row % kGroupRows) * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          const Vector value = of_pair(key, Simd::load(from + i));
          Simd::store(to + i, Product::multiply_add(pair, value, Simd::load(to + i)));
        }
      }
    }
  }

  void write_key(const RowsView<void>& to, int64_t key, int64_t dim, float factor, int64_t panels,
                 const float* sums) const {
    const int64_t k = key % kGroupRows;
    this->write_row(to, this->offset_of_keys(to.strides) + (step_.first_key + key) * to.strides.seq,
                    dim, factor, sums + (key - k) * panels * kPanel + k * kPanel);
  }

  const int64_t tile_k_;
  const BackwardScratch s_;
};

template <typename Product>
int32_t backward_tile_keys(const AttentionBackwardProblem& p) {
  return static_cast<int32_t>(backward_keys(p, Product::kPack));
}

constexpr int32_t backward_block_rows(const AttentionBackwardProblem&) { return kBackwardRows; }

template <typename Product>
size_t backward_scratch_bytes(const AttentionBackwardProblem& p) {
  ScratchCursor cursor(nullptr);
  BackwardScratch(cursor, p, Product::kPack);
  return cursor.bytes();
}

inline size_t backward_dq_sums_bytes(const AttentionBackwardProblem& p) {
  return static_cast<size_t>(kBackwardRows * round_up(p.dim, kPanel)) * sizeof(float);
}

template <typename Product>
size_t backward_key_sums_bytes(const AttentionBackwardProblem& p) {
  const int64_t keys = backward_keys(p, Product::kPack);
  return static_cast<size_t>(keys * (round_up(p.dim, kPanel) + round_up(p.dim_v, kPanel))) *
         sizeof(float);
}

template <typename Product>
BackwardStep<Product> backward_step(const AttentionBackwardProblem& p,
                                    const AttentionBackwardStep& step, void* scratch) {
  ScratchCursor cursor(scratch);
  return BackwardStep<Product>(p, step, BackwardScratch(cursor, p, Product::kPack));
}

template <typename Product>
void backward_begin_keys(const AttentionBackwardProblem& p, const AttentionBackwardStep& step,
                         void* scratch) {
  backward_step<Product>(p, step, scratch).begin_keys();
}

template <typename Product>
void backward_add_rows(const AttentionBackwardProblem& p, const AttentionBackwardStep& step,
                       void* scratch) {
  backward_step<Product>(p, step, scratch).add_rows();
}

template <typename Product>
void backward_add_dq(const AttentionBackwardProblem& p, const AttentionBackwardStep& step,
                     void* scratch, void* sums, bool first, bool last) {
  backward_step<Product>(p, step, scratch).add_dq(static_cast<float*>(sums), first, last);
}

template <typename Product>
void backward_end_keys(const AttentionBackwardProblem& p, const AttentionBackwardStep& step,
                       void* scratch, void* sums, bool first, bool last) {
  backward_step<Product>(p, step, scratch).end_keys(static_cast<float*>(sums), first, last);
}

template <typename Product>
constexpr AttentionBackwardKernel attention_backward_kernel(const char* isa) {
  return {isa,
          backward_tile_keys<Product>,
          backward_block_rows,
          backward_scratch_bytes<Product>,
          backward_dq_sums_bytes,
          backward_key_sums_bytes<Product>,
          backward_begin_keys<Product>,
          backward_add_rows<Product>,
          backward_add_dq<Product>,
          backward_end_keys<Product>,
          backward_add_dsink<Product>,
          backward_write_dsink<Product>};
}
