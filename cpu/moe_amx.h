// Products of many rows in the tile registers of AMX. A tile is 16 rows of 64 bytes: tdpbf16ps multiplies
// 16 rows of 16 words, as they lie in memory, by 16 columns of as many words, [word][column], into 16 x 16
// sums.
//
// Which of the two the weights are depends on how they lie, so that whole lines of them are copied and
// nothing is transposed but rows of x, of which there are fewer: where depth is contiguous weights are the
// rows of the product and its sums are transposed in the end, else the columns. What is packed, and the
// sums until then, lie tile by tile.
//
// Included after cpu/moe_product.h and cpu/bf16_pair_product.h, with kGroupRows the rows of a tile.

struct InTiles {
  using Product = Bf16PairProduct;
  static constexpr bool kInTiles = true;
  static constexpr bool kFetchesRows = false;  // copied in order: the processor does it
  static constexpr int64_t kPanels = kMostPanels;
  static constexpr int64_t kMostFew = 6;
  static constexpr int64_t kEdge = 16;  // rows, columns and words of a tile
  static constexpr int64_t kPauseSteps = kEdge;
  static constexpr int64_t kTile = kEdge * kEdge;                // words
  static constexpr int64_t kTilesOfBlock = kEdge * kBlockWords;  // words of a block's tiles
  static_assert(kGroupRows == kEdge && kLanes == kEdge && kPanelVectors == 2);
  static_assert(kBlockWords % kEdge == 0);

  // All eight tiles are whole ones. What the thread had in tiles is lost.
  struct Use {
    Use() {
      struct alignas(64) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      static_assert(sizeof config == 64);
      _tile_loadconfig(&config);
    }
    ~Use() { _tile_release(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

  // Words `word` to `word` + `steps` of each row, sixteen rows after another, with zeros behind them up to whole
  // tiles: transposed where weights lie `by_rows`.
  template <typename Row>
  static void pack_rows(Row row, int64_t count, int64_t word, int64_t steps, int64_t depth,
                        bool by_rows, float* packed) {
    for (int64_t first = 0; first < count; first += kEdge) {
      const int64_t rows = smaller(kEdge, count - first);
      const Bf16* from[kLanes];
      for (int64_t r = 0; r < rows; ++r) from[r] = row(first + r);
      float* to = packed + first * kBlockWords;
      for (int64_t step = 0; step < steps; step += kEdge, to += kTile) {
        Vector block[kLanes];
        load_tile(from, rows, 2 * (word + step), depth, block);
        if (by_rows) Simd::transpose(block);
        store_tile(block, to);
      }
    }
  }

  // `columns` of the matrix from an element with `depth` left on, as far as a panel has room, or where columns
  // are contiguous, kPanels of them, so that what is read of a word's page is read at one time.
  static void pack_panels(const Bf16* from, int64_t row_stride, int64_t column_stride,
                          int64_t columns, int64_t depth, int64_t steps, float* panel) {
    if (column_stride == 1) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t rows = clamp(columns - v * kEdge, 0, kEdge);
        const Bf16* rows_from[kLanes];
        for (int64_t j = 0; j < rows; ++j) rows_from[j] = from + (v * kEdge + j) * row_stride;
        float* to = panel + v * kTilesOfBlock;
        for (int64_t step = 0; step < steps; step += kEdge, to += kTile) {
          Vector block[kLanes];
          load_tile(rows_from, rows, 2 * step, depth, block);
          store_tile(block, to);
        }
      }
    } else if (row_stride == 1) {
      pack_columns(from, column_stride, columns, steps, 1, panel,
                   Product::load_columns<kPanelVectors>);
    } else {
      pack_columns(from, column_stride, columns, steps, 2, panel,
                   load_every_second_column<Product, kPanelVectors>);
    }
  }

  static int64_t pauses(int64_t rows, int64_t steps) {
    return (rows + 2 * kEdge - 1) / (2 * kEdge) * ((steps + kEdge - 1) / kEdge);
  }

  template <typename Meanwhile>
  static void multiply(const float* packed, int64_t count, const float* panel, int64_t steps,
                       bool first_block, bool by_rows, float* sums, Meanwhile meanwhile) {
    for (int64_t first = 0; first < count; first += 2 * kEdge) {
      const float* from = packed + first * kBlockWords;
      float* to = sums + first * kPanel;
      const bool two = count - first > kEdge;
      if (by_rows) {
        if (two) {
          multiply_tiles<2, true>(from, panel, steps, first_block, to, meanwhile);
        } else {
          multiply_tiles<1, true>(from, panel, steps, first_block, to, meanwhile);
        }
      } else if (two) {
        multiply_tiles<2, false>(from, panel, steps, first_block, to, meanwhile);
      } else {
        multiply_tiles<1, false>(from, panel, steps, first_block, to, meanwhile);
      }
    }
  }

  // Brings a panel's sums from tiles to [row][kPanel].
  static void arrange(float* sums, int64_t count, bool by_rows) {
    for (int64_t first = 0; first < count; first += kEdge, sums += kEdge * kPanel) {
      Vector tiles[kPanelVectors][kLanes];
      for (int v = 0; v < kPanelVectors; ++v) {
        for (int i = 0; i < kLanes; ++i) tiles[v][i] = Simd::load(sums + v * kTile + i * kEdge);
        if (by_rows) Simd::transpose(tiles[v]);
      }
      for (int i = 0; i < kLanes; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) {
          Simd::store(sums + i * kPanel + v * kLanes, tiles[v][i]);
        }
      }
    }
  }

 private:
  // 16 words of up to 16 rows from element `begin` of `depth` on; 0 behind them.
  FLASHMOE_INLINE static void load_tile(const Bf16* const (&from)[kLanes], int64_t rows,
                                        int64_t begin, int64_t depth, Vector (&block)[kLanes]) {
    if (rows == kEdge && depth - begin >= 2 * kEdge) {
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        block[j] = Simd::load(reinterpret_cast<const float*>(from[j] + begin));
      }
      return;
    }
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) {
      block[j] = j < rows ? Product::load_words(from[j] + begin, depth - begin) : Simd::zero();
    }
  }
  FLASHMOE_INLINE static void store_tile(const Vector (&block)[kLanes], float* to) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) Simd::store(to + i * kEdge, block[i]);
  }

  template <typename Load>
  FLASHMOE_INLINE static void pack_columns(const Bf16* from, int64_t next, int64_t columns,
                                           int64_t steps, int64_t step_between, float* panel,
                                           Load load) {
    // A constant number of columns: the masks are constant too.
    if (columns >= kPanels * kPanel) {
      return pack_some<kPanels>(from, next, kPanels * kPanel, steps, step_between, panel, load);
    }
    for (int64_t i = 0; i < kPanels && i * kPanel < columns; ++i) {
      pack_some<1>(from + i * kPanel * step_between, next, columns - i * kPanel, steps,
                   step_between, panel + i * MoeScratch::kPanelWords, load);
    }
  }

  template <int kCount, typename Load>
  FLASHMOE_INLINE static void pack_some(const Bf16* from, int64_t next, int64_t columns,
                                        int64_t steps, int64_t step_between, float* panel,
                                        Load load) {
    int64_t step = 0;
    for (; step < steps; ++step, from += 2 * next) {
      for (int i = 0; i < kCount; ++i) {
        const Bf16* const at = from + i * kPanel * step_between;
        float* const to = panel + i * MoeScratch::kPanelWords + step * kEdge;
        Vector words[kPanelVectors];
        load(at, at + next, columns - i * kPanel, words);
        Simd::store(to, words[0]);
        Simd::store(to + kTilesOfBlock, words[1]);
      }
    }
    for (; step < round_up(steps, kEdge); ++step) {
      for (int i = 0; i < kCount; ++i) {
        float* const to = panel + i * MoeScratch::kPanelWords + step * kEdge;
        Simd::store(to, Simd::zero());
        Simd::store(to + kTilesOfBlock, Simd::zero());
      }
    }
  }

  // Tiles 0 to 3 are sums of the first and the second 16 rows with either half of the panel; 4 and 5 are
  // rows, 6 and 7 the panel's.
  template <int kTiles, bool kByRows, typename Meanwhile>
  FLASHMOE_NOINLINE static void multiply_tiles(const float* rows, const float* panel, int64_t steps,
                                               bool first_block, float* sums, Meanwhile meanwhile) {
    constexpr int kBytes = 64;  // of a tile's row
    float* const next_sums = sums + kEdge * kPanel;
    if (first_block) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, kBytes);
      _tile_loadd(1, sums + kTile, kBytes);
      if (kTiles == 2) {
        _tile_loadd(2, next_sums, kBytes);
        _tile_loadd(3, next_sums + kTile, kBytes);
      }
    }
    for (int64_t step = 0; step < steps; step += kEdge) {
      _tile_loadd(4, rows, kBytes);
      _tile_loadd(6, panel, kBytes);
      _tile_loadd(7, panel + kTilesOfBlock, kBytes);
      if (kByRows) {
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 7, 4);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (kTiles == 2) {
        _tile_loadd(5, rows + kTilesOfBlock, kBytes);
        if (kByRows) {
          _tile_dpbf16ps(2, 6, 5);
          _tile_dpbf16ps(3, 7, 5);
        } else {
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      rows += kTile;
      panel += kTile;
      meanwhile();
    }
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + kTile, kBytes);
    if (kTiles == 2) {
      _tile_stored(2, next_sums, kBytes);
      _tile_stored(3, next_sums + kTile, kBytes);
    }
  }
};
