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
// L2 cache, and a group's scores in L1. 16-bit inputs are widened to fp32 while packing, or, where
// the processor multiplies bf16 pairs, packed as pairs (`Product`); sums are fp32 always.
//
// A row's result depends on its own keys alone, in one order: every accumulator belongs to one
// row, and keys a row does not see are neither read into its maximum nor multiplied into its
// output when V holds a NaN or infinity there. The keys that a row sees are a range, which begins
// and ends no earlier than that of the row before: steps, panels and groups outside are left out.
//
// Included inside the ISA's own namespace after its `Simd`, so that no code compiled with its
// flags can be merged with another's.

constexpr int kSmallGroupRows = kGroupRows / 3 > 1 ? kGroupRows / 3 : 1;

constexpr int kMaxTileK = 256;
// One vector more than a power of two, so that the rows of a group do not share cache sets.
constexpr int kScoreStride = kMaxTileK + kLanes;

constexpr float kInfinity = __builtin_inff();
constexpr float kLeastSoftcap = 0x1p-126f;  // whose inverse is finite

// The per-thread scratch of one tile. Built on a null base it only measures.
struct Scratch {
  float* q;        // [groups][dim words][kGroupRows], and one vector behind
  float* k;        // [tile_k / kPanel][dim words][kPanel]
  float* v;        // [dim_v panels][tile_k / pack][kPanel]
  float* output;   // [groups][dim_v panels][kGroupRows][kPanel]
  float* scores;   // [kGroupRows][kScoreStride], weights overwrite them
  float* sums;     // [groups * kGroupRows][kLanes], partial
  float* maxima;   // [groups * kGroupRows]
  float* rescale;  // [kGroupRows]
  size_t bytes;

  Scratch(void* base, const AttentionProblem& p, int64_t tile_q, int64_t tile_k, int pack) {
    char* next = static_cast<char*>(base);
    const auto take = [&next](int64_t count) {
      float* begin = reinterpret_cast<float*>(next);
      next += round_up(count * static_cast<int64_t>(sizeof(float)), kScratchAlignment);
      return begin;
    };
    const int64_t words = p.dim / pack;
    const int64_t columns = round_up(p.dim_v, kPanel);
    q = take(tile_q * words + kLanes);
    k = take(tile_k * words);
    v = take(tile_k / pack * columns);
    output = take(tile_q * columns);
    scores = take(kGroupRows * kScoreStride);
    sums = take(tile_q * kLanes);
    maxima = take(tile_q);
    rescale = take(kGroupRows);
    bytes = static_cast<size_t>(next - static_cast<char*>(base));
  }
};

// Keys a step takes: K and V panels of 128 KiB, at dim = dim_v = 256 in fp32 of 256 KiB.
FLASHMOE_INLINE int64_t keys_per_step(const AttentionProblem& p, int pack) {
  constexpr int64_t kMostWords = 128;  // of a key in K and V together, for a full step
  return (p.dim + p.dim_v) / pack <= kMostWords ? kMaxTileK : kMaxTileK / 2;
}

template <typename Product>
class TileComputer {
 public:
  using Element = typename Product::Element;
  static constexpr int kPack = Product::kPack;

  TileComputer(const AttentionProblem& problem, const AttentionTile& tile, int64_t tile_q,
               void* scratch)
      : p_(problem),
        tile_(tile),
        tile_k_(keys_per_step(problem, kPack)),
        words_(problem.dim / kPack),
        groups_((tile.rows + kGroupRows - 1) / kGroupRows),
        dim_v_panels_((problem.dim_v + kPanel - 1) / kPanel),
        group_heads_(problem.heads_q / problem.heads_kv),
        logit_scale_(problem.softcap != 0.0f ? problem.softcap : problem.scale),
        s_(scratch, problem, tile_q, tile_k_, kPack) {
    k_ = static_cast<const Element*>(p_.k) + tile.batch * p_.k_strides.batch +
         tile.kv_head * p_.k_strides.head;
    v_ = static_cast<const Element*>(p_.v) + tile.batch * p_.v_strides.batch +
         tile.kv_head * p_.v_strides.head;
  }

  void compute() {
    pack_queries();
    clear_state();
    const int64_t tile_begin = first_key(0);
    const int64_t tile_end = end_key(tile_.rows - 1);
    for (int64_t key = tile_begin / tile_k_ * tile_k_; key < tile_end; key += tile_k_) {
      const int64_t begin = clamp(tile_begin - key, 0, tile_k_) / kPanel * kPanel;
      const int64_t keys = smaller(tile_k_, tile_end - key);
      pack_keys(key, begin, keys);
      pack_values(key, begin, keys);
      for (int64_t group = 0; group < groups_; ++group) step_group(group, key, keys);
    }
    for (int64_t row = 0; row < tile_.rows; ++row) finish_row(row);
  }

 private:
  int64_t query_of(int64_t row) const { return (tile_.first_row + row) / group_heads_; }

  // Element offset of a row of q, out or lse.
  int64_t offset_of(int64_t row, const RowStrides& strides) const {
    const int64_t head = tile_.kv_head * group_heads_ + (tile_.first_row + row) % group_heads_;
    return tile_.batch * strides.batch + query_of(row) * strides.seq + head * strides.head;
  }

  // Row `row` of the tile sees the keys from `first_key` to before `end_key`: none if that is not
  // behind. Neither decreases with the row.
  int64_t first_key(int64_t row) const {
    return p_.bounded_left ? clamp(query_of(row) + p_.left_offset, 0, p_.seq_k) : 0;
  }
  int64_t end_key(int64_t row) const {
    return p_.bounded_right ? clamp(query_of(row) + p_.right_offset + 1, 0, p_.seq_k) : p_.seq_k;
  }

  // A part of a step's keys, as indices into the step.
  struct KeyRange {
    int64_t begin;
    int64_t end;
  };
  // What row `row` sees of the part `of` of the step that begins with `key`: begin == end if
  // nothing.
  KeyRange visible(int64_t row, int64_t key, KeyRange of) const {
    const int64_t begin = clamp(first_key(row) - key, of.begin, of.end);
    return {begin, clamp(end_key(row) - key, begin, of.end)};
  }

  void pack_queries() {
    const Element* q = static_cast<const Element*>(p_.q);
    for (int64_t first = 0; first < tile_.rows; first += kGroupRows) {
      const int64_t rows = smaller(kGroupRows, tile_.rows - first);
      const Element* from[kLanes];
      for (int64_t r = 0; r < rows; ++r) from[r] = q + offset_of(first + r, p_.q_strides);
      float* to = s_.q + first * words_;
      for (int64_t word = 0; word < words_; word += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, rows, word * kPack, p_.dim, block);
        // A row of the block is longer than a group: the next one overwrites what is too much.
        const int64_t count = smaller(kLanes, words_ - word);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (word + i) * kGroupRows, block[i]);
      }
    }
  }

  // Packs keys `begin` (a multiple of kPanel) to `keys` of the step that begins with `key`.
  void pack_keys(int64_t key, int64_t begin, int64_t keys) {
    for (int64_t first = begin; first < keys; first += kLanes) {
      const int64_t rows = smaller(kLanes, keys - first);
      const Element* from[kLanes];
      for (int64_t j = 0; j < rows; ++j) from[j] = k_ + (key + first + j) * p_.k_strides.seq;
      float* to = s_.k + first / kPanel * kPanel * words_ + first % kPanel;
      for (int64_t word = 0; word < words_; word += kLanes) {
        Vector block[kLanes];
        load_block<Product>(from, rows, word * kPack, p_.dim, block);
        const int64_t count = smaller(kLanes, words_ - word);
        for (int64_t i = 0; i < count; ++i) Simd::store(to + (word + i) * kPanel, block[i]);
      }
    }
  }

  void pack_values(int64_t key, int64_t begin, int64_t keys) {
    typename Product::FiniteCheck check;
    const int64_t panel_size = tile_k_ / kPack * kPanel;
    const int64_t vectors = (p_.dim_v + kLanes - 1) / kLanes;
    for (int64_t first = begin; first < keys; first += kPack) {
      const Element* row = v_ + (key + first) * p_.v_strides.seq;
      const Element* next = first + 1 < keys ? row + p_.v_strides.seq : nullptr;
      float* to = s_.v + first / kPack * kPanel;
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const int64_t column = vector * kLanes;
        const Vector words = Product::load_values(
            row + column, next == nullptr ? nullptr : next + column, p_.dim_v - column);
        check.put(words);
        Simd::store(to + vector / kPanelVectors * panel_size + vector % kPanelVectors * kLanes,
                    words);
      }
    }
    values_finite_ = check.finite();
  }

  void clear_state() {
    const int64_t rows = groups_ * kGroupRows;
    for (int64_t i = 0; i < rows * dim_v_panels_ * kPanel; i += kLanes) {
      Simd::store(s_.output + i, Simd::zero());
    }
    for (int64_t row = 0; row < rows; ++row) {
      Simd::store(s_.sums + row * kLanes, Simd::zero());
      s_.maxima[row] = -kInfinity;
    }
  }

  void step_group(int64_t group, int64_t key, int64_t keys) {
    const int64_t first = group * kGroupRows;
    const int64_t rows = smaller(kGroupRows, tile_.rows - first);
    const int64_t begin = clamp(first_key(first) - key, 0, keys);
    const KeyRange seen = {begin, clamp(end_key(first + rows - 1) - key, begin, keys)};
    if (seen.begin == seen.end) return;
    if (rows <= kSmallGroupRows) {
      step_rows<kSmallGroupRows>(first, rows, key, seen);
    } else {
      step_rows<kGroupRows>(first, rows, key, seen);
    }
  }

  // The keys that some row sees of the group that begins with row `first`.
  template <int kRows>
  void step_rows(int64_t first, int64_t rows, int64_t key, KeyRange seen) {
    score<kRows>(first, seen);
    for (int64_t r = 0; r < kRows; ++r) s_.rescale[r] = 1.0f;
    for (int64_t r = 0; r < rows; ++r) {
      weigh_row(first + r, r, visible(first + r, key, seen), seen);
    }
    // Where a row does not see a key its weight is 0, which is as good as leaving the key out,
    // unless V holds a NaN or an infinity there.
    if (values_finite_) {
      add_values<kRows>(first, seen.begin / kPack, (seen.end + kPack - 1) / kPack);
      return;
    }
    // Together what all rows see of whole words, then the rest row by row.
    int64_t step = (visible(first + rows - 1, key, seen).begin + kPack - 1) / kPack;
    int64_t end_step = visible(first, key, seen).end / kPack;
    if (end_step <= step) end_step = step = seen.begin / kPack;
    add_values<kRows>(first, step, end_step);
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange row = visible(first + r, key, seen);
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
        score_panel<kRows, kPanelVectors>(q, k, s_.scores + column);
      } else {
        score_panel<kRows, 1>(q, k, s_.scores + column);
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

  // scores = tanh(scale / softcap scores) of whole vectors. The ratio itself may be beyond fp32.
  FLASHMOE_NOINLINE void cap(float* scores, KeyRange keys) const {
    const Vector scale = Simd::broadcast(p_.scale);
    // Finite: below such a softcap all logits are 0.
    const Vector inverse =
        Simd::broadcast(1.0f / (p_.softcap > kLeastSoftcap ? p_.softcap : kLeastSoftcap));
    for (int64_t key = keys.begin; key < keys.end; key += kLanes) {
      const Vector logits = Simd::multiply(Simd::load(scores + key), scale);
      Simd::store(scores + key, tanh_of(Simd::multiply(logits, inverse)));
    }
  }

  // Turns the scores of a row into weights, of the keys `row_keys` that it sees; 0 for the others
  // of `keys`, which its group sees.
  void weigh_row(int64_t row, int64_t r, KeyRange row_keys, KeyRange keys) {
    float* scores = s_.scores + r * kScoreStride;
    const Vector lowest = Simd::broadcast(-kInfinity);
    const int64_t begin = keys.begin / kLanes * kLanes;
    const int64_t most = keys.end;
    int64_t seen = begin;  // the end of what is weighed
    if (row_keys.begin < row_keys.end) {
      seen = row_keys.end;
      if (p_.softcap != 0.0f) cap(scores, {begin, seen});
      // Keys before the window weigh exp(-inf).
      for (int64_t hidden = begin; hidden < row_keys.begin; hidden += kLanes) {
        const Vector now = Simd::load(scores + hidden);
        Simd::store(scores + hidden, Simd::first_or(lowest, row_keys.begin - hidden, now));
      }
    }
    Vector highest = lowest;
    Vector highest2 = lowest;
    int64_t key = begin;
    for (; key + 2 * kLanes <= seen; key += 2 * kLanes) {
      highest = Simd::max(highest, Simd::load(scores + key));
      highest2 = Simd::max(highest2, Simd::load(scores + key + kLanes));
    }
    for (; key < seen; key += kLanes) {
      highest = Simd::max(highest, Simd::first_or(Simd::load(scores + key), seen - key, lowest));
    }
    const float before = s_.maxima[row];
    const float here = Simd::max_of(Simd::max(highest, highest2));
    const float maximum = here > before ? here : before;
    s_.maxima[row] = maximum;
    // Rows whose every score so far is -inf: exp(-inf - 0) is the 0 that exp(-inf - -inf) is not.
    // Halves, because the difference of two finite scores may be infinite.
    const Vector half = Simd::broadcast(0.5f);
    const Vector base = Simd::broadcast(maximum == -kInfinity ? 0.0f : -0.5f * maximum);
    const Vector scale = Simd::broadcast(logit_scale_);
    const auto weight = [&](Vector score) {
      const Vector below = Simd::multiply_add(score, half, base);
      return exp_of_twice_nonpositive(Simd::multiply(below, scale));
    };
    const Vector rescale = weight(Simd::broadcast(before));
    Simd::store_first(s_.rescale + r, rescale, 1);
    Vector sum = Simd::multiply(Simd::load(s_.sums + row * kLanes), rescale);
    for (key = begin; key + kLanes <= seen; key += kLanes) {
      const Vector weights = weight(Simd::load(scores + key));
      sum = Simd::add(sum, weights);
      Product::store_weights(scores, key, weights);
    }
    if (key < seen) {
      const Vector weights =
          Simd::first_or(weight(Simd::load(scores + key)), seen - key, Simd::zero());
      sum = Simd::add(sum, weights);
      Product::store_weights(scores, key, weights);
      key += kLanes;
    }
    for (; key < most; key += kLanes) Product::store_weights(scores, key, Simd::zero());
    Simd::store(s_.sums + row * kLanes, sum);
  }

  // Rescales the output and adds the words from `step` to before `end_step`, which may be none.
  template <int kRows>
  void add_values(int64_t first, int64_t step, int64_t end_step) {
    const float* weights = s_.scores + step;
    const int64_t steps = end_step - step;
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      const float* v = s_.v + (panel * (tile_k_ / kPack) + step) * kPanel;
      float* output = output_of(first, panel);
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
    const float* rescale = s_.rescale;
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

  // What `add_values` left out for row r, if anything.
  void add_values_of_row(int64_t first, int64_t r, KeyRange keys) {
    if (keys.begin >= keys.end) return;
    const float* weights = s_.scores + r * kScoreStride;
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      for (int i = 0; i < kPanelVectors; ++i) {
        const float* v = s_.v + panel * (tile_k_ / kPack) * kPanel + i * kLanes;
        float* output = output_of(first, panel) + r * kPanel + i * kLanes;
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

  float* output_of(int64_t first, int64_t panel) const {
    return s_.output + (first * dim_v_panels_ + panel * kGroupRows) * kPanel;
  }

  void finish_row(int64_t row) {
    const bool sees_keys = first_key(row) < end_key(row);
    const float sum = Simd::sum_of(Simd::load(s_.sums + row * kLanes));
    // Scores that are all -inf leave sum 0, and 0 * (1 / 0) is the NaN that softmax gives.
    const Vector inverse = Simd::broadcast(sees_keys ? 1.0f / sum : 0.0f);
    Element* out = static_cast<Element*>(p_.out) + offset_of(row, p_.out_strides);
    const float* output = output_of(row / kGroupRows * kGroupRows, 0) + row % kGroupRows * kPanel;
    for (int64_t column = 0; column < p_.dim_v; column += kLanes) {
      const float* from = output + column / kPanel * kGroupRows * kPanel + column % kPanel;
      Simd::store_first(out + column, Simd::multiply(Simd::load(from), inverse), p_.dim_v - column);
    }
    if (p_.lse != nullptr) {
      p_.lse[offset_of(row, p_.lse_strides)] =
          sees_keys ? s_.maxima[row] * logit_scale_ + __builtin_logf(sum) : -kInfinity;
    }
  }

  const AttentionProblem& p_;
  const AttentionTile& tile_;
  const int64_t tile_k_;
  const int64_t words_;  // of a row of Q or K
  const int64_t groups_;
  const int64_t dim_v_panels_;
  const int64_t group_heads_;  // that share a KV head
  const float logit_scale_;    // logits are this times scores
  const Scratch s_;
  const Element* k_;  // key 0
  const Element* v_;
  bool values_finite_ = true;
};

template <typename Product>
void compute_tile(const AttentionProblem& problem, const AttentionTile& tile, int32_t tile_q,
                  void* scratch) {
  TileComputer<Product>(problem, tile, tile_q, scratch).compute();
}

template <typename Product>
size_t tile_scratch_bytes(const AttentionProblem& problem, int32_t tile_q) {
  return Scratch(nullptr, problem, tile_q, keys_per_step(problem, Product::kPack), Product::kPack)
      .bytes;
}

template <typename Product>
int32_t tile_keys(const AttentionProblem& problem) {
  return static_cast<int32_t>(keys_per_step(problem, Product::kPack));
}

template <typename Product>
constexpr AttentionKernel attention_kernel(const char* isa) {
  return {isa,
          kGroupRows,
          kTileRows / kGroupRows,
          tile_keys<Product>,
          tile_scratch_bytes<Product>,
          compute_tile<Product>};
}
