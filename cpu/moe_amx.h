// Products in the tile registers of AMX. A tile is 16 rows of 64 bytes: tdpbf16ps multiplies 16
// rows of 16 words (pairs of bf16), as they lie in memory, by 16 columns of as many words,
// [word][column], into 16 x 16 sums.
//
// The layout of the weights decides which of the two they are, so that only rows of x are
// transposed: depth contiguous weights are the rows of the product, loaded in place; the sums are
// transposed at the end; columns contiguous weights are the columns: some words of many panels at a
// time are built from pairs of the matrix's rows, [word][16], and multiplied from there.
//
// Rows of x are packed once for all columns of a tile, over its whole depth if there is room. Two
// of their tiles are multiplied by the two of a panel at a time; the sums stay in registers over
// the packed depth of both. Columns go in chunks; each chunk's sums are finished before the next
// begins.
//
// Every sum runs in the order of depth, whatever the number of rows and columns.
//
// Included after cpu/moe_few_rows.h and cpu/amx_registers.h, with kGroupRows the rows of a
// tile.

// Rows of a work tile: with depth contiguous at most as many as are packed over a depth of 2048,
// with columns contiguous as many as share one packing of the weights.
constexpr int64_t kTiledRows = 288;
constexpr int64_t kTiledRowsByColumns = 384;
constexpr int64_t kTiledColumns = 4096;  // enough tiles for some threads

constexpr int64_t kEdge = 16;             // rows, columns and words of a tile
constexpr int64_t kTile = kEdge * kEdge;  // words
constexpr int kTileRowBytes = 64;
static_assert(kGroupRows == kEdge && kLanes == kEdge && kPanelVectors == 2);

// Both tiles of a panel's columns, step by step, in place or packed.
struct PanelTiles {
  const void* first;
  int64_t row_bytes;     // between rows of a tile
  int64_t step_bytes;    // between steps
  int64_t second_bytes;  // from the first tile to the second
};

// A packed panel: [half][words][16], `half` words each.
inline PanelTiles packed_panel(const float* panel, int64_t half) {
  return {panel, kTileRowBytes, 4 * kTile, 4 * half};
}

// sums = (+= after the beginning) one or two tiles of rows, [step][tile][16][16], times a panel.
//
// Registers 0 and 2 hold sums of the two tiles of rows with the first half of the panel, 1 and 3
// with the second; 4 and 5 hold rows, 6 and 7 the panel. With kByRows the panel gives the rows of
// the product.
template <int kTiles, bool kByRows>
FLASHMOE_NOINLINE void multiply_tiles(const float* rows, const PanelTiles& w, int64_t steps,
                                      bool begins, float* sums) {
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kTileRowBytes);
    _tile_loadd(1, sums + kTile, kTileRowBytes);
    if (kTiles == 2) {
      _tile_loadd(2, sums + 2 * kTile, kTileRowBytes);
      _tile_loadd(3, sums + 3 * kTile, kTileRowBytes);
    }
  }
  const char* panel = static_cast<const char*>(w.first);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, panel, w.row_bytes);
    _tile_loadd(7, panel + w.second_bytes, w.row_bytes);
    _tile_loadd(4, rows, kTileRowBytes);
    if (kTiles == 2) _tile_loadd(5, rows + kTile, kTileRowBytes);
    if (kByRows) {
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 7, 4);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTiles == 2 && kByRows) {
      _tile_dpbf16ps(2, 6, 5);
      _tile_dpbf16ps(3, 7, 5);
    } else if (kTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    rows += kTiles * kTile;
    panel += w.step_bytes;
  }
  _tile_stored(0, sums, kTileRowBytes);
  _tile_stored(1, sums + kTile, kTileRowBytes);
  if (kTiles == 2) {
    _tile_stored(2, sums + 2 * kTile, kTileRowBytes);
    _tile_stored(3, sums + 3 * kTile, kTileRowBytes);
  }
}

// The scratch of one thread, in words.
struct TileScratch {
  static constexpr int64_t kRows = kTiledRows * 1024;
  static constexpr int64_t kPanelWords = 1 << 12;  // in all panels
  static constexpr int64_t kPanels = kPanelWords * kPanel;
  static constexpr int64_t kSums = kTiledRowsByColumns * 512;
  static constexpr size_t kBytes = (kRows + kPanels + kSums) * sizeof(float);

  float* rows;    // [pairs of tiles][steps of 16 words][tile][16][16]
  float* panels;  // [panel][half][words][16]
  float* sums;    // [matrix][panel][row tile][half][16][16]

  explicit TileScratch(void* base)
      : rows(static_cast<float*>(base)), panels(rows + kRows), sums(panels + kPanels) {}
};

class TiledRows {
 public:
  TiledRows(const MoeTile& tile, void* scratch)
      : tile_(tile),
        s_(scratch),
        row_tiles_((tile.rows + kEdge - 1) / kEdge),
        words_(tile.depth / 2),
        block_(smaller(round_up(words_, kEdge),
                       TileScratch::kRows / (row_tiles_ * kEdge) / kEdge * kEdge)) {}

  void compute() {
    const TileRegisters registers;
    // If each panel is multiplied over the whole depth at once, its sums are finished while they
    // are in the level-1 cache.
    const bool at_once = words_ <= block_ && lies_by_rows(tile_);
    const int64_t most = TileScratch::kSums / (row_tiles_ * kEdge * tile_.matrices);
    const int64_t columns = at_once ? kPanel : smaller(most / kPanel * kPanel, kWideColumns);
    for (int64_t column = 0; column < tile_.columns; column += columns) {
      MoeTile chunk = tile_;
      chunk.columns = smaller(columns, tile_.columns - column);
      chunk.out = static_cast<char*>(tile_.out) + column * (tile_.out_is_fp32 ? 4 : 2);
      for (int m = 0; m < tile_.matrices; ++m) {
        MoeWeights& w = chunk.weights[m];
        w.data = static_cast<const Bf16*>(w.data) + column * w.row_stride;
        if (w.bias != nullptr) {
          w.bias = static_cast<const char*>(w.bias) +
                   column * w.bias_stride * (w.bias_dtype == Dtype::kFloat32 ? 4 : 2);
        }
        if (chunk.before[m] != nullptr) {
          chunk.before[m] = static_cast<Bf16*>(chunk.before[m]) + column;
        }
      }
      Chunk(chunk, s_.sums).compute(*this);
    }
  }

 private:
  using Product = Bf16PairProduct;
  static constexpr int64_t kPair = 2;            // tiles of rows multiplied at a time
  static constexpr int64_t kWideColumns = 2048;  // of a chunk, per matrix
  static constexpr int64_t kTogether = 8;  // words of a panel, packed before those of the next
  static_assert(TileScratch::kRows >= kTiledRowsByColumns * kEdge);

  // Some columns of the tile.
  class Chunk : MoeTileSums<Bf16> {
   public:
    using MoeTileSums<Bf16>::MoeTileSums;

    void compute(TiledRows& all) {
      for (int64_t word = 0; word < all.words_; word += all.block_) {
        const int64_t words = smaller(all.block_, all.words_ - word);
        for (int m = 0; m < tile_.matrices; ++m) {
          all.pack_rows(word, words, this->depth_is_contiguous(m));
          if (this->depth_is_contiguous(m)) {
            multiply_lying(all, m, word, words);
          } else {
            multiply_columns(all, m, word, words);
          }
        }
      }
      for (int m = 0; m < tile_.matrices; ++m) {
        for (int64_t panel = 0; panel < panels_; ++panel) {
          arrange(this->sums(m, panel, 0), tile_.rows, this->depth_is_contiguous(m));
        }
      }
      this->finish();
    }

   private:
    // Multiplies if depth is contiguous: whole tiles in place; a rest of depth, or of a panel that
    // is not full, is packed and padded with zeros.
    void multiply_lying(TiledRows& all, int m, int64_t word, int64_t words) const {
      constexpr int64_t kPackedWords = TileScratch::kPanelWords;
      const int64_t stride = tile_.weights[m].row_stride;
      for (int64_t panel = 0; panel < panels_; ++panel) {
        const int64_t column = panel * kPanel;
        const int64_t columns = smaller(kPanel, tile_.columns - column);
        const int64_t whole = columns == kPanel ? words / kEdge * kEdge : 0;
        if (whole > 0) {
          all.multiply({this->weights(m, column, 2 * word), 2 * stride, 64, 2 * kEdge * stride}, 0,
                       whole, word == 0, true, this->sums(m, panel, 0));
        }
        for (int64_t done = whole; done < words; done += kPackedWords) {
          const int64_t steps = smaller(kPackedWords, words - done);
          const int64_t half = round_up(steps, kEdge) * kEdge;
          for (int v = 0; v < kPanelVectors; ++v) {
            const Bf16* from[kLanes];
            const int64_t rows = clamp(columns - v * kEdge, 0, kEdge);
            for (int64_t j = 0; j < rows; ++j) {
              from[j] = this->weights(m, column + v * kEdge + j, 2 * (word + done));
            }
            pack(from, rows, tile_.depth - 2 * (word + done), steps, false,
                 all.s_.panels + v * half, kTile);
          }
          all.multiply(packed_panel(all.s_.panels, half), done, steps, word + done == 0, true,
                       this->sums(m, panel, 0));
        }
      }
    }

    // Multiplies if columns are contiguous: all panels of the chunk are packed together, so that
    // long runs of a row are read at once; each row has a page of its own.
    void multiply_columns(TiledRows& all, int m, int64_t word, int64_t words) const {
      const int64_t room = TileScratch::kPanelWords / panels_ / kEdge * kEdge;
      const bool interleaved = tile_.weights[m].row_stride != 1;
      for (int64_t done = 0; done < words; done += room) {
        const int64_t steps = smaller(room, words - done);
        const int64_t half = round_up(steps, kEdge) * kEdge;
        if (interleaved) {
          pack_columns(m, word + done, steps, half, 2, all.s_.panels,
                       load_every_second_column<Product, kPanelVectors>);
        } else {
          pack_columns(m, word + done, steps, half, 1, all.s_.panels,
                       Product::load_columns<kPanelVectors>);
        }
        for (int64_t panel = 0; panel < panels_; ++panel) {
          all.multiply(packed_panel(all.s_.panels + panel * 2 * half, half), done, steps,
                       word + done == 0, false, this->sums(m, panel, 0));
        }
      }
    }

    template <typename Load>
    FLASHMOE_INLINE void pack_columns(int m, int64_t word, int64_t steps, int64_t half,
                                      int64_t step_between, float* to, Load load) const {
      const int64_t full = tile_.columns / kPanel;
      const int64_t rest = tile_.columns % kPanel;
      for (int64_t step = 0; step < steps; step += kTogether, to += kTogether * kEdge) {
        const int64_t count = smaller(kTogether, steps - step);
        // A constant number of columns: the masks are constant too.
        for (int64_t panel = 0; panel < full; ++panel) {
          pack_words(m, panel, word + step, count, kPanel, half, step_between, to, load);
        }
        if (rest > 0) pack_words(m, full, word + step, count, rest, half, step_between, to, load);
      }
      to -= (round_up(steps, kTogether) - steps) * kEdge;
      for (int64_t step = steps; step < round_up(steps, kEdge); ++step, to += kEdge) {
        for (int64_t panel = 0; panel < panels_; ++panel) {
          Simd::store(to + panel * 2 * half, Simd::zero());
          Simd::store(to + panel * 2 * half + half, Simd::zero());
        }
      }
    }

    // Packs `count` words of a panel with `columns` columns, and prefetches as many words after
    // them.
    template <typename Load>
    FLASHMOE_INLINE void pack_words(int m, int64_t panel, int64_t word, int64_t count,
                                    int64_t columns, int64_t half, int64_t step_between, float* to,
                                    Load load) const {
      constexpr int64_t kLine = 32;  // elements
      const int64_t next = tile_.weights[m].column_stride;
      const bool fetches = word + 2 * kTogether <= tile_.depth / 2;
      const Bf16* from = this->weights(m, panel * kPanel, 2 * word);
      to += panel * 2 * half;
      for (int64_t i = 0; i < count; ++i, from += 2 * next, to += kEdge) {
        if (fetches) {
          const Bf16* const ahead = from + 2 * kTogether * next;
          for (int64_t line = 0; line < columns * step_between; line += kLine) {
            __builtin_prefetch(ahead + line, 0, 3);
            __builtin_prefetch(ahead + next + line, 0, 3);
          }
        }
        Vector words[kPanelVectors];
        load(from, from + next, columns, words);
        Simd::store(to, words[0]);
        Simd::store(to + half, words[1]);
      }
    }
  };

  // Packs words [word, word + words) of all rows, padded with zeros to whole tiles; transposed if
  // weights lie by rows.
  void pack_rows(int64_t word, int64_t words, bool transposed) {
    const Packed packed = transposed ? Packed::kTransposed : Packed::kAsTheyLie;
    if (packed_ == packed && packed_word_ == word) return;
    packed_ = packed;
    packed_word_ = word;
    packed_steps_ = (words + kEdge - 1) / kEdge;
    for (int64_t tile = 0; tile < row_tiles_; ++tile) {
      const int64_t first = tile * kEdge;
      const int64_t rows = smaller(kEdge, tile_.rows - first);
      const Bf16* from[kLanes];
      for (int64_t r = 0; r < rows; ++r) {
        from[r] = static_cast<const Bf16*>(tile_.x[first + r]) + 2 * word;
      }
      const int64_t pair = tile / kPair * kPair;
      pack(from, rows, tile_.depth - 2 * word, words, transposed,
           packed_rows(pair, 0) + (tile - pair) * kTile, tiles_of(pair) * kTile);
    }
  }

  // Number of tiles of a pair.
  int64_t tiles_of(int64_t pair) const { return smaller(kPair, row_tiles_ - pair); }

  // The packed rows of that pair, from a step on.
  float* packed_rows(int64_t pair, int64_t step) const {
    return s_.rows + (pair * packed_steps_ + tiles_of(pair) * step) * kTile;
  }

  // sums = (+= after the beginning) rows times a panel over `words` of depth, from packed word
  // `done` on.
  void multiply(const PanelTiles& w, int64_t done, int64_t words, bool begins, bool by_rows,
                float* sums) const {
    const int64_t steps = (words + kEdge - 1) / kEdge;
    for (int64_t pair = 0; pair < row_tiles_; pair += kPair) {
      const float* rows = packed_rows(pair, done / kEdge);
      float* const to = sums + pair * kEdge * kPanel;
      const bool two = tiles_of(pair) == kPair;
      if (by_rows) {
        two ? multiply_tiles<2, true>(rows, w, steps, begins, to)
            : multiply_tiles<1, true>(rows, w, steps, begins, to);
      } else {
        two ? multiply_tiles<2, false>(rows, w, steps, begins, to)
            : multiply_tiles<1, false>(rows, w, steps, begins, to);
      }
    }
  }

  // Packs `words` of up to 16 rows that have `depth` elements, 16 words at a time; tiles are
  // `stride` words apart.
  static void pack(const Bf16* const (&from)[kLanes], int64_t rows, int64_t depth, int64_t words,
                   bool transposed, float* to, int64_t stride) {
    for (int64_t word = 0; word < words; word += kEdge, to += stride) {
      Vector block[kLanes];
      load_tile(from, rows, 2 * word, depth, block);
      if (transposed) Simd::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) Simd::store(to + i * kEdge, block[i]);
    }
  }

  // Loads 16 words of up to 16 rows from element `begin` of `depth` on, padded with 0.
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

  // Rearranges a panel's sums from tiles to [row][kPanel].
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

  const MoeTile& tile_;
  const TileScratch s_;
  const int64_t row_tiles_;
  const int64_t words_;  // of depth
  const int64_t block_;  // words of depth packed at a time
  enum class Packed { kNothing, kTransposed, kAsTheyLie } packed_ = Packed::kNothing;
  int64_t packed_word_ = 0;
  int64_t packed_steps_ = 0;  // of 16 words
};

// With fewer rows of x, weights with contiguous columns are multiplied as they stream in.
constexpr int64_t kFewestTiledRows = 4;

inline void multiply_in_tiles(const MoeTile& tile, void* scratch) {
  static_assert(MoeScratch::kBytes <= TileScratch::kBytes);
  static_assert(kGroupRows * kTiledColumns <= MoeScratch::kSums && kFewestTiledRows <= kGroupRows);
  if (tile.rows < kFewestTiledRows && !lies_by_rows(tile)) {
    FewRows<Bf16PairProduct>(tile, MoeScratch(scratch)).compute();
  } else {
    TiledRows(tile, scratch).compute();
  }
}
