// Attention backward of a block of rows and a tile of keys in the tile registers of AMX, in bf16.
// Like cpu/attention_backward_step.h, except that rows and keys go 32 at a time and multiply_tiles
// (cpu/amx_tiles.h) computes all products. Its operands are rows along the depth of a product, and
// columns in words of two elements of depth:
//
//   scores, dweights   rows of Q and dOut            by K and V, transposed as they are packed
//   dV^T, dK^T         columns of dOut and Q         by weights and dscores in words of two rows
//   dQ                 dscores in words of two keys  by K in words of two keys
//
// Weights and dscores are written as these words. dV and dK are summed transposed, so that weights
// and dscores need no transposition, and transposed back when written.
//
// A masked pair of a query and a key has a weight and a dscore of 0. In the last three products a
// NaN or infinity of Q, K or dOut counts as 0; what it adds to visible pairs is added one by one.
//
// Included after cpu/attention_amx.h and cpu/attention_backward_rows.h.

constexpr int kAmxBackwardRows = 128;  // rows of a block
constexpr int kMostAmxBackwardKeys = 256;
static_assert(kMostAmxBackwardKeys <= kMaxTileK);
static_assert(kMaxGradientHeadDim * kPanel <= kGroupRows * kScoreStride);

FLASHMOE_INLINE int64_t amx_backward_keys(const AttentionProblem& p) {
  constexpr int64_t kMostDims = 384;  // dims of a key in K and V together, for a full tile
  return p.dim + p.dim_v <= kMostDims ? kMostAmxBackwardKeys : kMostAmxBackwardKeys / 2;
}

// The scratch of one thread. Unless noted, tiles of 16 x 16 words as the packing functions make
// them.
struct AmxBackwardScratch {
  struct Infinite {
    bool in_k;
    bool in_q;
    bool in_dout;
    bool k[kMostAmxBackwardKeys];
    bool q[kAmxBackwardRows];
    bool dout[kAmxBackwardRows];
  };

  Infinite* infinite;
  // The tile of keys:
  float* k_columns;  // transposed
  float* v_columns;
  float* k_rows;  // across
  float* dk;      // [keys / 32][dim up to whole panels][32]
  float* dv;
  // The block of rows:
  float* q_rows;  // in row order
  float* dout_rows;
  float* q_columns;  // across, each tile transposed
  float* dout_columns;
  float* scores;        // [32][kScoreStride], for a group of rows
  float* dweights;      // the same
  float* weights;       // across; columns are keys
  float* dscores;       // the same
  float* dscores_keys;  // in row order
  float* lse;           // [rows]
  float* delta;         // [rows]
  float* dq;            // sums of a block: [groups][dim panels][32][32]

  AmxBackwardScratch(ScratchCursor& scratch, const AttentionProblem& p)
      : infinite(reinterpret_cast<Infinite*>(scratch.take(sizeof(Infinite) / sizeof(float) + 1))) {
    const int64_t keys = amx_backward_keys(p);
    const int64_t dim = round_up(p.dim, kPanel);
    const int64_t dim_v = round_up(p.dim_v, kPanel);
    k_columns = scratch.take(keys * dim / 2);
    v_columns = scratch.take(keys * dim_v / 2);
    k_rows = scratch.take(keys * dim / 2);
    dk = scratch.take(keys * dim);
    dv = scratch.take(keys * dim_v);
    q_rows = scratch.take(kAmxBackwardRows * dim / 2);
    dout_rows = scratch.take(kAmxBackwardRows * dim_v / 2);
    q_columns = scratch.take(kAmxBackwardRows * dim / 2);
    dout_columns = scratch.take(kAmxBackwardRows * dim_v / 2);
    scores = scratch.take(kGroupRows * kScoreStride);
    dweights = scratch.take(kGroupRows * kScoreStride);
    weights = scratch.take(kAmxBackwardRows * keys / 2);
    dscores = scratch.take(kAmxBackwardRows * keys / 2);
    dscores_keys = scratch.take(kAmxBackwardRows * keys / 2);
    lse = scratch.take(kAmxBackwardRows);
    delta = scratch.take(kAmxBackwardRows);
    dq = scratch.take(kAmxBackwardRows * dim);
  }
};

class AmxBackwardStep : BackwardRows<Bf16PairProduct> {
 public:
  using Base = BackwardRows<Bf16PairProduct>;

  AmxBackwardStep(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                  const AmxBackwardScratch& scratch)
      : Base(problem, step),
        keys_size_(amx_backward_keys(problem) / 2 * kPanel),
        groups_((rows_ + kGroupRows - 1) / kGroupRows),
        s_(scratch) {}

  void begin_keys() {
    const auto key_of = [&](const RowsView<const void>& view) {
      const Bf16* const first = static_cast<const Bf16*>(view.data) + offset_of_keys(view.strides) +
                                step_.first_key * view.strides.seq;
      return [first, next = view.strides.seq](int64_t key) { return first + key * next; };
    };
    const auto k = key_of(b_.k);
    pack_depth_tiles<true>(k, 0, step_.keys, b_.dim, s_.k_columns);
    if (needs_dscores()) {
      pack_depth_tiles<true>(key_of(b_.v), 0, step_.keys, b_.dim_v, s_.v_columns);
    }
    if (wants_dq()) {
      s_.infinite->in_k = !pack_across_tiles(k, 0, step_.keys, b_.dim, keys_size_, s_.k_rows);
      if (s_.infinite->in_k) {
        drop_infinite(0, step_.keys, b_.dim, keys_size_, s_.k_rows, s_.infinite->k);
      }
    }
    const int64_t keys = round_up(step_.keys, kPanel);
    if (wants_dk()) clear(s_.dk, keys * dim_panels_ * kPanel);
    if (wants_dv()) clear(s_.dv, keys * dim_v_panels_ * kPanel);
  }

  void add_rows() {
    if (seen_.begin == seen_.end) return;
    const TileRegisters registers;
    pack_rows();
    for (int64_t group = 0; group < groups_; ++group) {
      if (tiles_of(group).begin == tiles_of(group).end) continue;
      score(group);
      for (int64_t r = 0; r < kGroupRows; r += 2) weigh(group, r);
    }
    if (wants_dv()) {
      add_to_keys(s_.dout_columns, s_.weights, b_.dim_v, s_.dv);
      if (s_.infinite->in_dout) {
        add_infinite_rows(b_.dout, s_.infinite->dout, s_.weights, b_.dim_v, s_.dv);
      }
    }
    if (wants_dk()) {
      add_to_keys(s_.q_columns, s_.dscores, b_.dim, s_.dk);
      if (s_.infinite->in_q) {
        add_infinite_rows(b_.q, s_.infinite->q, s_.dscores, b_.dim, s_.dk);
      }
    }
  }

  void add_dq(float* sums, bool first, bool last) {
    const TileRegisters registers;
    if (sums == nullptr) sums = s_.dq;
    for (int64_t group = 0; group < groups_; ++group) {
      float* const to = sums + group * kGroupRows * dim_panels_ * kPanel;
      const KeyRange tiles = tiles_of(group);
      if (tiles.begin == tiles.end) {
        if (first) clear(to, kGroupRows * dim_panels_ * kPanel);
        continue;
      }
      for (int64_t panel = 0; panel < dim_panels_; ++panel) {
        multiply_tiles(rows_of(group), b_.dim - panel * kPanel,
                       packed_tiles(dscores_of(group, tiles.begin), 2),
                       packed_tiles(across_tiles(s_.k_rows, keys_size_, panel, tiles.begin), 2),
                       (tiles.end - tiles.begin) / kTileDepth, !first,
                       {to + panel * kGroupRows * kPanel, kPanel});
      }
      if (s_.infinite->in_k) add_infinite_keys(group, to);
    }
    if (!last) return;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t r = row % kGroupRows;
      write_row(b_.dq, offset_of(row, b_.dq.strides), b_.dim, b_.scale,
                sums + (row - r) * dim_panels_ * kPanel + r * kPanel);
    }
  }

  // `sums` holds dk, then dv.
  void end_keys(float* sums, bool first, bool last) {
    const int64_t keys = round_up(step_.keys, kPanel);
    const int64_t of_dk = keys * dim_panels_ * kPanel;
    if (wants_dk()) add_to_shared(s_.dk, sums, of_dk, first, last);
    if (wants_dv()) {
      float* const shared = sums != nullptr ? sums + of_dk : nullptr;
      add_to_shared(s_.dv, shared, keys * dim_v_panels_ * kPanel, first, last);
    }
    if (!last) return;
    if (wants_dk()) write_keys(b_.dk, b_.dim, b_.scale, dim_panels_, s_.dk);
    if (wants_dv()) write_keys(b_.dv, b_.dim_v, 1.0f, dim_v_panels_, s_.dv);
  }

 private:
  static constexpr int64_t kRowsSize = kAmxBackwardRows / 2 * kPanel;  // words of a panel, across

  static void clear(float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) Simd::store(to + i, Simd::zero());
  }

  int64_t rows_of(int64_t group) const { return smaller(kGroupRows, rows_ - group * kGroupRows); }

  // The keys that some row of the group sees, in whole tiles.
  KeyRange tiles_of(int64_t group) const {
    const KeyRange seen = seen_by(group * kGroupRows, rows_of(group));
    if (seen.begin == seen.end) return seen;
    return {seen.begin / kPanel * kPanel, round_up(seen.end, kPanel)};
  }

  void pack_rows() {
    const auto row_of = [&](const RowsView<const void>& view) {
      return [this, &view](int64_t row) {
        return static_cast<const Bf16*>(view.data) + offset_of(row, view.strides);
      };
    };
    const auto q = row_of(b_.q);
    const auto dout = row_of(b_.dout);
    pack_depth_tiles<false>(q, 0, rows_, b_.dim, s_.q_rows);
    if (wants_dk()) {
      s_.infinite->in_q = pack_columns(q, b_.dim, dim_panels_, s_.q_columns, s_.infinite->q);
    }
    if (wants_dv()) {
      s_.infinite->in_dout =
          pack_columns(dout, b_.dim_v, dim_v_panels_, s_.dout_columns, s_.infinite->dout);
    }
    const float* const lse = static_cast<const float*>(b_.lse);
    for (int64_t row = 0; row < rows_; ++row) s_.lse[row] = lse[offset_of(row, b_.lse_strides)];
    if (!needs_dscores()) return;
    pack_depth_tiles<false>(dout, 0, rows_, b_.dim_v, s_.dout_rows);
    for (int64_t row = 0; row < rows_; ++row) s_.delta[row] = delta_of(row, dout(row));
  }

  // Returns whether some are infinite.
  template <typename RowAt>
  bool pack_columns(const RowAt& row_at, int64_t dim, int64_t panels, float* to, bool* infinite) {
    const bool finite = pack_across_tiles(row_at, 0, rows_, dim, kRowsSize, to);
    if (!finite) drop_infinite(0, rows_, dim, kRowsSize, to, infinite);
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t row = 0; row < rows_; row += kTileDepth) {
        float* const step = across_tiles(to, kRowsSize, panel, row);
        for (int v = 0; v < kPanelVectors; ++v) transpose_tile(step + v * kTileWords);
      }
    }
    return !finite;
  }

  static void transpose_tile(float* tile) {
    Vector block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = Simd::load(tile + i * kTileEdge);
    Simd::transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) Simd::store(tile + i * kTileEdge, block[i]);
  }

  // Computes scores and dweights of a group of rows.
  void score(int64_t group) const {
    const KeyRange tiles = tiles_of(group);
    const auto multiply = [&](const float* rows, const float* columns, int64_t dim, float* to) {
      const int64_t words = tile_words(dim);
      for (int64_t key = tiles.begin; key < tiles.end; key += kPanel) {
        multiply_tiles(rows_of(group), step_.keys - key,
                       packed_tiles(rows + group * kGroupRows * words, 2),
                       packed_tiles(columns + key * words, 2), words / kTileEdge, false,
                       {to + key, kScoreStride});
      }
    };
    multiply(s_.q_rows, s_.k_columns, b_.dim, s_.scores);
    if (needs_dscores()) multiply(s_.dout_rows, s_.v_columns, b_.dim_v, s_.dweights);
  }

  // Computes weights and dscores of rows r and r + 1 of a group, for all keys that the group is
  // multiplied by; 0 for keys that a row does not see.
  void weigh(int64_t group, int64_t r) const {
    const bool plain = b_.softcap == 0.0f && !has_pairs();
    plain ? weigh<true>(group, r) : weigh<false>(group, r);
  }

  template <bool kPlain>
  FLASHMOE_NOINLINE void weigh(int64_t group, int64_t r) const {
    const KeyRange tiles = tiles_of(group);
    const int64_t row = group * kGroupRows + r;
    KeyRange seen[2];
    float bias[2][kScoreStride];
    for (int i = 0; i < 2; ++i) {
      seen[i] =
          row + i < rows_ ? visible(row + i, step_.first_key, {0, step_.keys}) : KeyRange{0, 0};
      if (kPlain || !has_pairs()) continue;
      // Whole vectors are read; parts that the row does not see are dropped.
      clear(bias[i], kScoreStride);
      if (seen[i].begin >= seen[i].end) continue;
      load_pairs<Bf16>(row + i, step_.first_key + seen[i].begin, step_.first_key + seen[i].end,
                       bias[i] + seen[i].begin);
    }
    for (int64_t key = tiles.begin; key < tiles.end; key += kPanel) {
      Vector weights[2][kPanelVectors];
      Vector dscores[2][kPanelVectors];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) {
          const int64_t at = key + v * kLanes;
          weights[i][v] = dscores[i][v] = Simd::zero();
          if (at >= seen[i].end || at + kLanes <= seen[i].begin) continue;
          const Pair pair = pair_at<kPlain>(r + i, at, s_.lse[row + i], s_.delta[row + i], bias[i]);
          weights[i][v] = pair.weight;
          dscores[i][v] = pair.dscore;
          if (at < seen[i].begin || at + kLanes > seen[i].end) {
            weights[i][v] = only(seen[i], at, weights[i][v]);
            dscores[i][v] = only(seen[i], at, dscores[i][v]);
          }
        }
      }
      const int64_t word = r / 2 * kTileEdge;
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t to = word + v * kTileWords;
        Simd::store(across_tiles(s_.weights, kRowsSize, key / kPanel, row) + to,
                    words_of_rows(weights[0][v], weights[1][v]));
        if (!needs_dscores()) continue;
        Simd::store(across_tiles(s_.dscores, kRowsSize, key / kPanel, row) + to,
                    words_of_rows(dscores[0][v], dscores[1][v]));
      }
      if (!wants_dq()) continue;
      for (int i = 0; i < 2; ++i) {
        Simd::store(dscores_of(group, key) + (r + i) * kTileEdge,
                    words_of_keys(dscores[i][0], dscores[i][1]));
      }
    }
  }

  // Weights and dscores of kLanes keys from `key` on and row r of a group.
  template <bool kPlain>
  FLASHMOE_INLINE Pair pair_at(int64_t r, int64_t key, float lse, float delta,
                               const float* bias) const {
    const Vector score = Simd::load(s_.scores + r * kScoreStride + key);
    const float* const dweight = s_.dweights + r * kScoreStride + key;
    if (!kPlain) return pair_of(score, dweight, -0.5f * lse, delta, bias + key);
    // The logit is rounded like the lse of a row, so that a key with all of the weight has weight
    // 1.
    const Vector logit = Simd::rounded(Simd::multiply(score, Simd::broadcast(b_.scale)));
    const Vector above = Simd::subtract(logit, Simd::broadcast(lse));
    const Vector weight = exp2_of(Simd::multiply(above, Simd::broadcast(kLog2E)));
    if (!needs_dscores()) return {weight, weight};
    return {weight,
            Simd::multiply(weight, Simd::subtract(Simd::load(dweight), Simd::broadcast(delta)))};
  }

  // Packs 32 numbers in bf16, in order.
  FLASHMOE_INLINE static Vector words_of_keys(Vector low, Vector high) {
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  // Packs two rows in bf16, their numbers alternating.
  FLASHMOE_INLINE static Vector words_of_rows(Vector first, Vector second) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i in_turn = _mm512_or_si512(
        lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(kLanes)), 16));
    return _mm512_castsi512_ps(
        _mm512_permutexvar_epi16(in_turn, _mm512_castps_si512(words_of_keys(first, second))));
  }

  // The dscores of 32 keys.
  float* dscores_of(int64_t group, int64_t key) const {
    return s_.dscores_keys + group * keys_size_ + key / kTileDepth * 2 * kTileWords;
  }

  // sums += columns of the rows times the pairs' numbers, in groups of rows that see some of a
  // panel of keys.
  void add_to_keys(const float* columns, const float* pairs, int64_t dim, float* sums) const {
    const int64_t panels = (dim + kPanel - 1) / kPanel;
    for (int64_t key = seen_.begin / kPanel * kPanel; key < seen_.end; key += kPanel) {
      const auto sees = [&](int64_t group) {
        const KeyRange tiles = tiles_of(group);
        return tiles.begin <= key && key < tiles.end;
      };
      int64_t begin = 0;
      while (begin < groups_ && !sees(begin)) ++begin;
      int64_t end = begin;
      while (end < groups_ && sees(end)) ++end;
      const int64_t from = begin * 2 * kTileWords;
      for (int64_t panel = 0; panel < panels; ++panel) {
        multiply_tiles(dim - panel * kPanel, step_.keys - key,
                       packed_tiles(columns + panel * kRowsSize + from, 2),
                       packed_tiles(pairs + key / kPanel * kRowsSize + from, 2), end - begin, true,
                       {sums + (key * panels + panel * kPanel) * kPanel, kPanel});
      }
    }
  }

  // Adds the contribution of the rows that `infinite` marks, whose numbers were packed as 0.
  FLASHMOE_NOINLINE void add_infinite_rows(const RowsView<const void>& rows, const bool* infinite,
                                           const float* pairs, int64_t dim, float* sums) const {
    const int64_t panels = (dim + kPanel - 1) / kPanel;
    for (int64_t row = 0; row < rows_; ++row) {
      if (!infinite[row]) continue;
      const Bf16* const values = static_cast<const Bf16*>(rows.data) + offset_of(row, rows.strides);
      const KeyRange keys = visible(row, step_.first_key, {0, step_.keys});
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        if (is_hidden<Bf16>(row, step_.first_key + key)) continue;
        const float* const word = pairs + key / kPanel * kRowsSize +
                                  row / kTileDepth * 2 * kTileWords +
                                  key % kPanel / kTileEdge * kTileWords +
                                  row % kTileDepth / 2 * kTileEdge + key % kTileEdge;
        const float pair = number_of(reinterpret_cast<const Bf16*>(word)[row % 2]);
        for (int64_t column = 0; column < dim; ++column) {
          const float value = number_of(values[column]);
          if (is_finite(value)) continue;
          sums[(key / kPanel * kPanel * panels + column) * kPanel + key % kPanel] += pair * value;
        }
      }
    }
  }

  FLASHMOE_NOINLINE void add_infinite_keys(int64_t group, float* sums) const {
    const Bf16* const k = static_cast<const Bf16*>(b_.k.data) + offset_of_keys(b_.k.strides);
    for (int64_t r = 0; r < rows_of(group); ++r) {
      const int64_t row = group * kGroupRows + r;
      const KeyRange keys = visible(row, step_.first_key, {0, step_.keys});
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        if (!s_.infinite->k[key] || is_hidden<Bf16>(row, step_.first_key + key)) continue;
        const auto* const dscores =
            reinterpret_cast<const Bf16*>(dscores_of(group, key) + r * kTileEdge);
        const float pair = number_of(dscores[key % kTileDepth]);
        const Bf16* const values = k + (step_.first_key + key) * b_.k.strides.seq;
        for (int64_t column = 0; column < b_.dim; ++column) {
          const float value = number_of(values[column]);
          if (is_finite(value)) continue;
          sums[(column / kPanel * kGroupRows + r) * kPanel + column % kPanel] += pair * value;
        }
      }
    }
  }

  static float number_of(Bf16 x) { return Simd::sum_of(Simd::load_first(&x, 1)); }
  static bool is_finite(float x) { return x - x == 0.0f; }

  // Transposes back one panel of keys at a time, to [dim panels][32 keys][32].
  void write_keys(const RowsView<void>& to, int64_t dim, float factor, int64_t panels,
                  const float* sums) const {
    for (int64_t first = 0; first < step_.keys; first += kPanel) {
      const float* const from = sums + first * panels * kPanel;
      for (int64_t column = 0; column < panels * kPanel; column += kLanes) {
        for (int64_t key = 0; key < kPanel; key += kLanes) {
          Vector block[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            block[i] = Simd::load(from + (column + i) * kPanel + key);
          }
          Simd::transpose(block);
          float* const turned =
              s_.scores + (column / kPanel * kGroupRows + key) * kPanel + column % kPanel;
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) Simd::store(turned + i * kPanel, block[i]);
        }
      }
      for (int64_t key = first; key < smaller(first + kPanel, step_.keys); ++key) {
        write_row(to, offset_of_keys(to.strides) + (step_.first_key + key) * to.strides.seq, dim,
                  factor, s_.scores + (key - first) * kPanel);
      }
    }
  }

  const int64_t keys_size_;  // words of a panel, across
  const int64_t groups_;
  const AmxBackwardScratch s_;
};

inline int32_t amx_backward_tile_keys(const AttentionBackwardProblem& p) {
  return static_cast<int32_t>(amx_backward_keys(p));
}

constexpr int32_t amx_backward_block_rows(const AttentionBackwardProblem&) {
  return kAmxBackwardRows;
}

inline size_t amx_backward_scratch_bytes(const AttentionBackwardProblem& p) {
  ScratchCursor cursor(nullptr);
  AmxBackwardScratch(cursor, p);
  return cursor.bytes();
}

inline size_t amx_backward_dq_sums_bytes(const AttentionBackwardProblem& p) {
  return static_cast<size_t>(kAmxBackwardRows * round_up(p.dim, kPanel)) * sizeof(float);
}

inline size_t amx_backward_key_sums_bytes(const AttentionBackwardProblem& p) {
  const int64_t dims = round_up(p.dim, kPanel) + round_up(p.dim_v, kPanel);
  return static_cast<size_t>(amx_backward_keys(p) * dims) * sizeof(float);
}

inline AmxBackwardStep amx_backward_step(const AttentionBackwardProblem& p,
                                         const AttentionBackwardStep& step, void* scratch) {
  ScratchCursor cursor(scratch);
  return AmxBackwardStep(p, step, AmxBackwardScratch(cursor, p));
}

inline void amx_backward_begin_keys(const AttentionBackwardProblem& p,
                                    const AttentionBackwardStep& step, void* scratch) {
  amx_backward_step(p, step, scratch).begin_keys();
}

inline void amx_backward_add_rows(const AttentionBackwardProblem& p,
                                  const AttentionBackwardStep& step, void* scratch) {
  amx_backward_step(p, step, scratch).add_rows();
}

inline void amx_backward_add_dq(const AttentionBackwardProblem& p,
                                const AttentionBackwardStep& step, void* scratch, void* sums,
                                bool first, bool last) {
  amx_backward_step(p, step, scratch).add_dq(static_cast<float*>(sums), first, last);
}

inline void amx_backward_end_keys(const AttentionBackwardProblem& p,
                                  const AttentionBackwardStep& step, void* scratch, void* sums,
                                  bool first, bool last) {
  amx_backward_step(p, step, scratch).end_keys(static_cast<float*>(sums), first, last);
}

constexpr AttentionBackwardKernel kAmxBackwardKernel = {"amx",
                                                        amx_backward_tile_keys,
                                                        amx_backward_block_rows,
                                                        amx_backward_scratch_bytes,
                                                        amx_backward_dq_sums_bytes,
                                                        amx_backward_key_sums_bytes,
                                                        amx_backward_begin_keys,
                                                        amx_backward_add_rows,
                                                        amx_backward_add_dq,
                                                        amx_backward_end_keys,
                                                        backward_add_dsink<Bf16PairProduct>,
                                                        backward_write_dsink<Bf16PairProduct>,
                                                        kAmxFlopsPerThread};
