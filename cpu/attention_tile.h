// Attention of one tile of query rows, for any instruction set.
//
//   scores  = Q K^T           [rows, keys]   one step of tile_k keys at a time
//   weights = exp(scale (scores - running maximum of the row))
//             or with a softcap of scores' = tanh(scale / softcap scores) and softcap for scale
//   output  = sum over steps of weights V, rescaled when a row's maximum grows; in the end / sum
//
// Rows go through the registers kGroupRows at a time against panels of kPanel columns: both
// products are the same register-blocked loop, a column of scalars broadcast against a row of
// vectors. To feed it, K is packed per step as panels [dim][kPanel keys] (transposed), V as panels
// [key][kPanel columns], Q once per tile as groups [dim][kGroupRows]; all of it fits in half an
// L2 cache, and a group's scores in L1. 16-bit inputs are widened to fp32 while packing, or packed
// as pairs if the processor multiplies bf16 pairs (`Product`); sums are always fp32.
//
// A row's result depends only on its own keys, in one order. Every accumulator belongs to one row.
// Keys that a row does not see do not enter its maximum, nor its output when V holds a NaN or
// infinity there. The keys that a row sees are a range that begins and ends no earlier than that of
// the row before: steps, panels and groups outside are skipped.
//
// Included after cpu/attention_rows.h and cpu/attention_pack.h.

constexpr int kSmallGroupRows = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;

// The scratch of one thread for tiles of up to tile_q rows.
struct TileScratch {
  float* q;  // [groups][dim words][kGroupRows] and one vector
  float* k;  // [tile_k / kPanel][dim words][kPanel]
  float* v;  // [dim_v panels][tile_k / pack][kPanel]
  RowState state;
  RowScores scores;
  StepRows step_rows;

  TileScratch(ScratchCursor& scratch, const AttentionProblem& p, int64_t tile_q, int pack)
      : q(scratch.take(tile_q * (p.dim / pack) + kLanes)),
        k(scratch.take(keys_per_step(p, pack) * (p.dim / pack))),
        v(scratch.take(keys_per_step(p, pack) / pack * round_up(p.dim_v, kPanel))),
        state(scratch, p, tile_q),
        scores(scratch, kGroupRows),
        step_rows(scratch, p, keys_per_step(p, pack)) {}
};

template <typename Product>
class TileComputer : AttentionRows<Product> {
 public:
  using Base = AttentionRows<Product>;
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;

  TileComputer(const AttentionProblem& problem, const AttentionTile& tile,
               const TileScratch& scratch)
      : Base(problem, tile, scratch.state, scratch.scores, scratch.step_rows), s_(scratch) {}

  void compute() {
    pack_queries();
    this->clear_state();
    const int64_t tile_begin = this->first_key(0);
    const int64_t tile_end = this->end_key(tile_.rows - 1);
    for (int64_t key = tile_begin / tile_k_ * tile_k_; key < tile_end; key += tile_k_) {
      const int64_t begin = clamp(tile_begin - key, 0, tile_k_) / kPanel * kPanel;
      const int64_t keys = smaller(tile_k_, tile_end - key);
      this->find_rows(key, {begin, keys});
      pack_keys(key, begin, keys);
      pack_values(key, begin, keys);
      for (int64_t group = 0; group < groups_; ++group) step_group(group, key, keys);
    }
    for (int64_t row = 0; row < tile_.rows; ++row) this->finish_row(row);
  }

 private:
  using Base::dim_v_panels_;
  using Base::groups_;
  using Base::p_;
  using Base::scores_;
  using Base::tile_;
  using Base::tile_k_;
  using Base::words_;
  using typename Base::KeyRange;

  void pack_queries() {
    const Element* q = static_cast<const Element*>(p_.q.data);
    pack_transposed<Product, kGroupRows>(
        [&](int64_t row) { return q + this->offset_of(row, p_.q.strides); }, 0, tile_.rows, p_.dim,
        s_.q);
  }

  // Packs keys `begin` (a multiple of kPanel) to `keys` of the step that begins with `key`.
  void pack_keys(int64_t key, int64_t begin, int64_t keys) {
    pack_transposed<Product, kPanel>([&](int64_t i) { return this->key_row(key, i); }, begin, keys,
                                     p_.dim, s_.k);
  }

  void pack_values(int64_t key, int64_t begin, int64_t keys) {
    values_finite_ = pack_across<Product>([&](int64_t i) { return this->value_row(key, i); }, begin,
                                          keys, p_.dim_v, tile_k_ / kPack * kPanel, s_.v);
  }

  void step_group(int64_t group, int64_t key, int64_t keys) {
    const int64_t first = group * kGroupRows;
    const int64_t rows = smaller(kGroupRows, tile_.rows - first);
    const int64_t begin = clamp(this->first_key(first) - key, 0, keys);
    const KeyRange seen = {begin, clamp(this->end_key(first + rows - 1) - key, begin, keys)};
    if (seen.begin == seen.end) return;
    if (rows <= kSmallGroupRows) {
      step_rows<kSmallGroupRows>(first, rows, key, seen);
    } else {
      step_rows<kGroupRows>(first, rows, key, seen);
    }
  }

  // The keys that some row of the group that begins with row `first` sees.
  template <int kRows>
  void step_rows(int64_t first, int64_t rows, int64_t key, KeyRange seen) {
    score<kRows>(first, seen);
    for (int64_t r = 0; r < kRows; ++r) scores_.rescale[r] = 1.0f;
    for (int64_t r = 0; r < rows; ++r) {
      this->weigh_row(first + r, r, key, this->visible(first + r, key, seen), seen);
    }
    // A key that a row does not see has weight 0. That equals leaving it out unless V holds a NaN
    // or infinity there.
    if (values_finite_) {
      add_values<kRows>(first, seen.begin / kPack, (seen.end + kPack - 1) / kPack);
      return;
    }
    if (this->has_pairs()) {
      add_values<kRows>(first, seen.begin / kPack, seen.begin / kPack);
      for (int64_t r = 0; r < rows; ++r) add_values_seen(first, r, key, seen);
      return;
    }
    // First the whole words that all rows see, together; then the rest row by row.
    int64_t step = (this->visible(first + rows - 1, key, seen).begin + kPack - 1) / kPack;
    int64_t end_step = this->visible(first, key, seen).end / kPack;
    if (end_step <= step) end_step = step = seen.begin / kPack;
    add_values<kRows>(first, step, end_step);
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange row = this->visible(first + r, key, seen);
      add_values_of_row(first, r, {row.begin, smaller(row.end, step * kPack)});
      add_values_of_row(first, r, {larger(row.begin, end_step * kPack), row.end});
    }
  }

  template <int kRows>
  void score(int64_t first, KeyRange keys) {
    const float* q = s_.q + first * words_;
    for (int64_t column = keys.begin / kPanel * kPanel; column < keys.end; column += kPanel) {
      const float* k = s_.k + column * words_;
      if (keys.end - column > kLanes) {
        score_panel<kRows, kPanelVectors>(q, k, scores_.scores + column);
      } else {
        score_panel<kRows, 1>(q, k, scores_.scores + column);
      }
    }
  }

  template <int kRows, int kVectors>
  FLASHMOE_NOINLINE void score_panel(const float* q, const float* k, float* scores) {
    multiply_panel<Product, kRows, kVectors, 1, kGroupRows>(
        q, k, words_, Product::kScoreRun,
        [=](int r, int v, Vector sum) { Simd::store(scores + r * kScoreStride + v * kLanes, sum); },
        [=](int r, int v, Vector sum) {
          float* to = scores + r * kScoreStride + v * kLanes;
          Simd::store(to, Simd::add(Simd::load(to), sum));
        });
  }

  // Rescales the output and adds the words [step, end_step), which may be empty.
  template <int kRows>
  void add_values(int64_t first, int64_t step, int64_t end_step) {
    const float* weights = scores_.scores + step;
    const int64_t steps = end_step - step;
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      const float* v = s_.v + (panel * (tile_k_ / kPack) + step) * kPanel;
      float* output = this->output_of(first, panel);
      if (p_.dim_v - panel * kPanel > kLanes) {
        add_panel<kRows, kPanelVectors>(weights, v, steps, output);
      } else {
        add_panel<kRows, 1>(weights, v, steps, output);
      }
    }
  }

  template <int kRows, int kVectors>
  FLASHMOE_NOINLINE void add_panel(const float* weights, const float* v, int64_t steps,
                                   float* output) {
    const float* rescale = scores_.rescale;
    multiply_panel<Product, kRows, kVectors, kScoreStride, 1>(
        weights, v, steps, Product::kValueRun,
        [=](int r, int i, Vector sum) {
          float* to = output + r * kPanel + i * kLanes;
          Simd::store(to, Simd::multiply_add(Simd::load(to), Simd::broadcast(rescale[r]), sum));
        },
        [=](int r, int i, Vector sum) {
          float* to = output + r * kPanel + i * kLanes;
          Simd::store(to, Simd::add(Simd::load(to), sum));
        });
  }

  // Adds what `add_values` left out for row r, if anything.
  void add_values_of_row(int64_t first, int64_t r, KeyRange keys) {
    if (keys.begin >= keys.end) return;
    const float* weights = scores_.scores + r * kScoreStride;
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      for (int i = 0; i < kPanelVectors; ++i) {
        const float* v = s_.v + panel * (tile_k_ / kPack) * kPanel + i * kLanes;
        float* output = this->output_of(first, panel) + r * kPanel + i * kLanes;
        Vector sum = Simd::load(output);
        for (int64_t s = keys.begin / kPack; s * kPack < keys.end; ++s) {
          Vector words = Simd::load(v + s * kPanel);
          if (s * kPack < keys.begin) words = Product::keep_second_of_pair(words);
          if ((s + 1) * kPack > keys.end) words = Product::keep_first_of_pair(words);
          sum = Product::multiply_add(Simd::broadcast(weights[s]), words, sum);
        }
        Simd::store(output, sum);
      }
    }
  }

  // Adds the keys that row r sees, one by one.
  void add_values_seen(int64_t first, int64_t r, int64_t key, KeyRange seen) {
    const KeyRange row = this->visible(first + r, key, seen);
    for (int64_t i = row.begin; i < row.end; ++i) {
      if (this->template is_hidden<Element>(first + r, key + i)) continue;
      add_values_of_row(first, r, {i, i + 1});
    }
  }

  const TileScratch s_;
  bool values_finite_ = true;
};
