// Attention of one tile of query rows in the tile registers of AMX, in bf16. Like
// cpu/attention_tile.h, except that rows go through 32 at a time and multiply_tiles
// (cpu/amx_tiles.h) computes both products:
//
//   scores    rows of Q, packed once [group][step of depth][2][16][16 words], by K, packed per step
//             [panel of 32 keys][step of depth][2][16 words][16 keys]
//   output    weights, which lie where the scores were, by V, packed per step
//             [panel of 32 columns][32 keys][2][16 words][16 columns]
//
// Packed operands are padded with zeros to whole tiles.
//
// A key that a row does not see has weight 0, and a NaN or infinity of V is packed as 0, so it does
// not reach that row. Rows that see such a key get its NaN or infinity added one by one.
//
// Softmax takes more time than products, so the maxima of 16 rows are found together. The
// difference between a score and the maximum is scaled to an exponent of 2. If that difference may
// exceed fp32, the row is weighed as in the other kernels.
//
// Included after cpu/amx_tiles.h, cpu/attention_rows.h and cpu/attention_pack.h.

constexpr int kAmxTileRows = 512;  // the most rows of a tile; they share one packing of K and V
static_assert(kGroupRows == 2 * kTileEdge && kPanel == 2 * kTileEdge && kLanes == kTileEdge);
static_assert(kMaxTileK / 2 % kPanel == 0);

// Words of a row of `dim` elements, rounded up to whole tiles.
FLASHMOE_INLINE int64_t tile_words(int64_t dim) { return round_up(dim, kTileDepth) / 2; }

// Packs rows `begin` (a multiple of kPanel) to `end` as [32 rows][step of depth][2][16][16]: in
// their order, or transposed as [word][row].
template <bool kTransposed, typename RowAt>
FLASHMOE_INLINE void pack_depth_tiles(const RowAt& row_at, int64_t begin, int64_t end, int64_t dim,
                                      float* to) {
  const int64_t words = tile_words(dim);
  for (int64_t first = begin; first < end; first += kTileEdge) {
    const int64_t rows = smaller(kTileEdge, end - first);
    const Bf16* from[kLanes];
    for (int64_t r = 0; r < rows; ++r) from[r] = row_at(first + r);
    float* tile = to + first / kPanel * kPanel * words + first % kPanel / kTileEdge * kTileWords;
    for (int64_t word = 0; word < words; word += kTileEdge, tile += 2 * kTileWords) {
      Vector block[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        block[j] = j < rows ? Bf16PairProduct::load_words(from[j] + 2 * word, dim - 2 * word)
                            : Simd::zero();
      }
      if (kTransposed) Simd::transpose(block);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) Simd::store(tile + j * kTileEdge, block[j]);
    }
  }
}

// The address of a step of 32 rows, packed across. Panels of 32 columns are `panel_size` words
// apart.
FLASHMOE_INLINE float* across_tiles(float* packed, int64_t panel_size, int64_t panel, int64_t row) {
  return packed + panel * panel_size + row / kTileDepth * 2 * kTileWords;
}

// Packs rows `begin` (a multiple of 32) to `end` as [panel of 32 columns][32 rows][2][16 words][16
// columns]; a word holds two rows. Returns whether all packed numbers are finite.
template <typename RowAt>
FLASHMOE_INLINE bool pack_across_tiles(const RowAt& row_at, int64_t begin, int64_t end, int64_t dim,
                                       int64_t panel_size, float* to) {
  Bf16PairProduct::FiniteCheck check;
  const auto* const zeros = reinterpret_cast<const Bf16*>(kHiddenRow);
  for (int64_t i = begin; i < round_up(end, kTileDepth); i += 2) {
    const Bf16* const row = i < end ? row_at(i) : zeros;
    const Bf16* const next = i + 1 < end ? row_at(i + 1) : zeros;
    float* tile = across_tiles(to, panel_size, 0, i) + i % kTileDepth / 2 * kTileEdge;
    for (int64_t column = 0; column < dim; column += kPanel, tile += panel_size) {
      Vector words[kPanelVectors];
      Bf16PairProduct::load_columns<kPanelVectors>(row + column, next + column, dim - column,
                                                   words);
      for (int v = 0; v < kPanelVectors; ++v) {
        check.put(words[v]);
        Simd::store(tile + v * kTileWords, words[v]);
      }
    }
  }
  return check.finite();
}

// Sets every NaN and infinity that pack_across_tiles packed to 0, and reports per row whether it
// held one.
FLASHMOE_NOINLINE void drop_infinite(int64_t begin, int64_t end, int64_t dim, int64_t panel_size,
                                     float* packed, bool* infinite) {
  for (int64_t i = begin; i < round_up(end, 2); ++i) infinite[i] = false;
  const __m512i exponents = _mm512_set1_epi16(0x7f80);
  for (int64_t panel = 0; panel * kPanel < dim; ++panel) {
    for (int64_t i = begin; i < end; i += 2) {
      float* const row =
          across_tiles(packed, panel_size, panel, i) + i % kTileDepth / 2 * kTileEdge;
      for (int v = 0; v < kPanelVectors; ++v) {
        float* const at = row + v * kTileWords;
        const __m512i words = _mm512_castps_si512(Simd::load(at));
        const __mmask32 found =
            _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponents), exponents);
        if ((found & 0x55555555u) != 0) infinite[i] = true;
        if ((found & 0xaaaaaaaau) != 0) infinite[i + 1] = true;
        Simd::store(at, _mm512_castsi512_ps(_mm512_maskz_mov_epi16(~found, words)));
      }
    }
  }
}

// 2^x: a polynomial in x - floor(x), times a power of two. The polynomial has the least maximum
// relative error, 8.3e-8, among those of degree 5 that are 1 at 0.
FLASHMOE_INLINE Vector exp2_of(Vector x) {
  constexpr float kCoefficients[] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce8p-5f, 0x1.27784ep-7f,
                                     0x1.e97516p-10f};
  constexpr int kAboveFloor = _MM_FROUND_TO_NEG_INF;
  const Vector above = _mm512_reduce_ps(x, kAboveFloor);
  Vector y = Simd::broadcast(kCoefficients[4]);
  for (int i = 3; i >= 0; --i) {
    y = Simd::multiply_add(y, above, Simd::broadcast(kCoefficients[i]));
  }
  return _mm512_scalef_ps(Simd::multiply_add(y, above, Simd::broadcast(1.0f)), x);
}

// The scratch of one thread for tiles of up to tile_q rows.
struct AmxScratch {
  float* q;
  float* k;
  float* v;
  RowState state;
  RowScores scores;
  StepRows step_rows;
  float* highest;  // [kGroupRows][kLanes], maxima of a step's scores
  float* row_max;  // [kGroupRows], the base of the scores; infinite: weigh_scores weighs the row
  bool* infinite;  // [kMaxTileK], whether V holds a NaN or an infinity

  AmxScratch(ScratchCursor& scratch, const AttentionProblem& p, int64_t tile_q)
      : q(scratch.take(tile_q * tile_words(p.dim))),
        k(scratch.take(keys_per_step(p, 2) * tile_words(p.dim))),
        v(scratch.take(keys_per_step(p, 2) / 2 * round_up(p.dim_v, kPanel))),
        state(scratch, p, tile_q),
        scores(scratch, kGroupRows),
        step_rows(scratch, p, keys_per_step(p, 2)),
        highest(scratch.take(kGroupRows * kLanes)),
        row_max(scratch.take(kGroupRows)),
        infinite(reinterpret_cast<bool*>(scratch.take(kMaxTileK / sizeof(float)))) {}
};

class AmxTileComputer : AttentionRows<Bf16PairProduct> {
 public:
  using Base = AttentionRows<Bf16PairProduct>;

  AmxTileComputer(const AttentionProblem& problem, const AttentionTile& tile,
                  const AmxScratch& scratch)
      : Base(problem, tile, scratch.state, scratch.scores, scratch.step_rows),
        exponent_scale_(logit_scale_ * kLog2E),
        s_(scratch) {}

  void compute() {
    const TileRegisters registers;
    const Bf16* const q = static_cast<const Bf16*>(p_.q.data);
    pack_depth_tiles<false>([&](int64_t row) { return q + offset_of(row, p_.q.strides); }, 0,
                            tile_.rows, p_.dim, s_.q);
    clear_state();
    const int64_t tile_begin = first_key(0);
    const int64_t tile_end = end_key(tile_.rows - 1);
    for (int64_t key = tile_begin / tile_k_ * tile_k_; key < tile_end; key += tile_k_) {
      const int64_t begin = clamp(tile_begin - key, 0, tile_k_) / kPanel * kPanel;
      const int64_t keys = smaller(tile_k_, tile_end - key);
      find_rows(key, {begin, keys});
      pack_depth_tiles<true>([&](int64_t i) { return key_row(key, i); }, begin, keys, p_.dim, s_.k);
      pack_values(key, begin, keys);
      for (int64_t group = 0; group < groups_; ++group) step_group(group, key, keys);
    }
    for (int64_t row = 0; row < tile_.rows; ++row) finish_row(row);
  }

 private:
  static constexpr int kNanOrInfinity = 0x99;  // classes of vfpclassps

  int64_t values_size() const { return tile_k_ / 2 * kPanel; }  // words of a panel

  void pack_values(int64_t key, int64_t begin, int64_t keys) {
    has_infinite_ = !pack_across_tiles([&](int64_t i) { return value_row(key, i); }, begin, keys,
                                       p_.dim_v, values_size(), s_.v);
    if (has_infinite_) drop_infinite(begin, keys, p_.dim_v, values_size(), s_.v, s_.infinite);
  }

  void step_group(int64_t group, int64_t key, int64_t keys) {
    const int64_t first = group * kGroupRows;
    const int64_t rows = smaller(kGroupRows, tile_.rows - first);
    const int64_t begin = clamp(first_key(first) - key, 0, keys);
    const KeyRange seen = {begin, clamp(end_key(first + rows - 1) - key, begin, keys)};
    if (seen.begin == seen.end) return;
    const KeyRange whole = {begin / kTileDepth * kTileDepth, round_up(seen.end, kTileDepth)};
    const int64_t words = tile_words(p_.dim);
    for (int64_t column = whole.begin; column < seen.end; column += kPanel) {
      multiply_tiles(rows, seen.end - column, packed_tiles(s_.q + first * words, 2),
                     packed_tiles(s_.k + column * words, 2), words / kTileEdge, false,
                     {scores_.scores + column, kScoreStride});
    }
    weigh_rows(first, rows, key, seen, whole);
    for (int64_t r = 0; r < rows; ++r) rescale_row(first + r, scores_.rescale[r]);
    const TileOperand weights = {scores_.scores + whole.begin / 2, kScoreStride,
                                 kTileEdge * kScoreStride, kTileEdge};
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      multiply_tiles(rows, p_.dim_v - panel * kPanel, weights,
                     packed_tiles(across_tiles(s_.v, values_size(), panel, whole.begin), 2),
                     (whole.end - whole.begin) / kTileDepth, true,
                     {output_of(first, panel), kPanel});
    }
    if (has_infinite_) add_infinite_values(first, rows, key, seen);
  }

  // Turns scores into weights, like weigh_row.
  void weigh_rows(int64_t first, int64_t rows, int64_t key, KeyRange seen, KeyRange whole) {
    int64_t ends[kGroupRows];
    for (int64_t r = 0; r < round_up(rows, kLanes); ++r) {
      ends[r] = whole.begin;
      if (r < rows) {
        ends[r] = prepare_scores(first + r, r, key, visible(first + r, key, seen), whole.begin);
      }
      Simd::store(s_.highest + r * kLanes,
                  maxima_of(scores_.scores + r * kScoreStride, whole.begin, ends[r]));
    }
    for (int64_t r = 0; r < rows; r += kLanes) update_row_max(first, r);
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange row_keys = visible(first + r, key, seen);
      const KeyRange prepared = {whole.begin, ends[r]};
      if (s_.row_max[r] == kInfinity) {
        const float here = Simd::max_of(Simd::load(s_.highest + r * kLanes));
        weigh_scores(first + r, r, here, row_keys, prepared, whole.end);
      } else {
        weigh_by_exponents(first + r, r, row_keys, prepared, whole.end);
      }
    }
  }

  // Updates the maxima of rows r to r + 15 of the group.
  void update_row_max(int64_t first, int64_t r) {
    Vector here[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) here[i] = Simd::load(s_.highest + (r + i) * kLanes);
    Simd::transpose(here);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) here[i] = Simd::max(here[i], here[i + half]);
    }
    float* const row_max = state_.row_max + first + r;
    const Vector before = Simd::load(row_max);
    const Vector maximum = Simd::max(here[0], before);
    // For rows whose scores are all -inf so far: exp(-inf - 0) is 0, but exp(-inf - -inf) is NaN.
    const Vector lowest = Simd::broadcast(-kInfinity);
    const Vector most = Simd::zero_where_at_most(maximum, lowest, maximum);
    // No finite score is infinitely far from such a maximum.
    constexpr float kGreatest = 0x1p100f;
    const bool scales = exponent_scale_ < kInfinity;
    const __mmask16 far =
        _mm512_cmp_ps_mask(most, Simd::broadcast(scales ? kGreatest : -kInfinity), _CMP_GE_OQ);
    Simd::store(s_.row_max + r, _mm512_mask_mov_ps(most, far, Simd::broadcast(kInfinity)));
    Simd::store(scores_.rescale + r, exp2_of(Simd::multiply(Simd::subtract(before, most),
                                                            Simd::broadcast(exponent_scale_))));
    // weigh_scores still has to update this maximum.
    Simd::store(row_max, _mm512_mask_mov_ps(maximum, far, before));
  }

  void weigh_by_exponents(int64_t row, int64_t r, KeyRange row_keys, KeyRange prepared,
                          int64_t end) {
    float* const scores = scores_.scores + r * kScoreStride;
    const Vector maximum = Simd::broadcast(s_.row_max[r]);
    const Vector scale = Simd::broadcast(exponent_scale_);
    Vector sum =
        Simd::multiply(Simd::load(state_.sums + row * kLanes), Simd::broadcast(scores_.rescale[r]));
    int64_t key = prepared.begin;
    for (; key < prepared.end; key += 2 * kLanes) {
      Vector weights[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vector score = Simd::load(scores + key + i * kLanes);
        weights[i] = exp2_of(Simd::multiply(Simd::subtract(score, maximum), scale));
        const int64_t rest = prepared.end - key - i * kLanes;
        if (rest < kLanes) weights[i] = Simd::first_or(weights[i], larger(rest, 0), Simd::zero());
        sum = Simd::add(sum, weights[i]);
        if (rest > 0) weights[i] = scale_by_values(weights[i], key + i * kLanes, row_keys);
      }
      Simd::store(scores + key / 2,
                  _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0])));
    }
    for (; key < end; key += 2 * kLanes) Simd::store(scores + key / 2, Simd::zero());
    Simd::store(state_.sums + row * kLanes, sum);
  }

  void rescale_row(int64_t row, float rescale) const {
    if (rescale == 1.0f) return;
    for (int64_t panel = 0; panel < dim_v_panels_; ++panel) {
      float* const to = output_of(row, panel);
      for (int i = 0; i < kPanel; i += kLanes) {
        Simd::store(to + i, Simd::multiply(Simd::load(to + i), Simd::broadcast(rescale)));
      }
    }
  }

  FLASHMOE_NOINLINE void add_infinite_values(int64_t first, int64_t rows, int64_t key,
                                             KeyRange seen) const {
    for (int64_t i = seen.begin; i < seen.end; ++i) {
      if (!s_.infinite[i]) continue;
      const Bf16* const value = value_row(key, i);
      for (int64_t r = 0; r < rows; ++r) {
        const KeyRange row = visible(first + r, key, seen);
        if (i < row.begin || i >= row.end || is_hidden<Bf16>(first + r, key + i)) continue;
        const auto* const weights =
            reinterpret_cast<const Bf16*>(scores_.scores + r * kScoreStride) + i;
        const Vector weight = Simd::broadcast(Simd::sum_of(Simd::load_first(weights, 1)));
        for (int64_t column = 0; column < p_.dim_v; column += kLanes) {
          const Vector x = Simd::load_first(value + column, p_.dim_v - column);
          float* const to = output_of(first + r, column / kPanel) + column % kPanel;
          Simd::store(to, _mm512_mask3_fmadd_ps(x, weight, Simd::load(to),
                                                _mm512_fpclass_ps_mask(x, kNanOrInfinity)));
        }
      }
    }
  }

  const float exponent_scale_;  // exponent of 2 = this * score
  const AmxScratch s_;
  bool has_infinite_ = false;
};

// Tiles are so fast that a call of less than twice this ends before a helper wakes.
constexpr double kAmxFlopsPerThread = 1e7;

// With fewer rows, K and V are read in place.
constexpr int64_t kFewestAmxRows = 16;

inline bool amx_has_few_rows(const AttentionProblem& p) {
  return p.seq_q * (p.heads_q / p.heads_kv) < kFewestAmxRows;
}

using FewAmxRows = FewRowsComputer<Fp32Product<Bf16>>;

inline int32_t amx_tile_keys(const AttentionProblem& p) {
  return static_cast<int32_t>(keys_per_step(p, amx_has_few_rows(p) ? FewAmxRows::kPack : 2));
}

inline size_t amx_scratch_bytes(const AttentionProblem& p, int32_t tile_q) {
  ScratchCursor cursor(nullptr);
  if (amx_has_few_rows(p)) {
    FewRowsScratch(cursor, p, tile_q, FewAmxRows::kPack);
  } else {
    AmxScratch(cursor, p, tile_q);
  }
  return cursor.bytes();
}

inline void compute_amx_tile(const AttentionProblem& p, const AttentionTile& tile, int32_t tile_q,
                             void* scratch) {
  ScratchCursor cursor(scratch);
  if (amx_has_few_rows(p)) {
    FewAmxRows(p, tile, FewRowsScratch(cursor, p, tile_q, FewAmxRows::kPack)).compute();
  } else {
    AmxTileComputer(p, tile, AmxScratch(cursor, p, tile_q)).compute();
  }
}

constexpr AttentionKernel kAmxKernel = {
    "amx",         kGroupRows,        kAmxTileRows / kGroupRows, amx_has_few_rows,
    amx_tile_keys, amx_scratch_bytes, compute_amx_tile,          kAmxFlopsPerThread};
