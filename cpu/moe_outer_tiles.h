// Sums of outer products of rows in the tile registers of AMX. A word is a pair of rows. Panels of
// b are packed like those of a matrix with contiguous columns. A group is 32 columns of a: two
// tiles, which are the rows of the product, so their words are transposed while packing. That makes
// packing a tile of a cost about five products, and a tile of b one. So a group meets as many
// columns of b as the level-2 cache has room for.
//
// Included after cpu/moe_amx.h and cpu/moe_outer_products.h.

struct OuterInTiles {
  using Product = Bf16PairProduct;
  using Outer = OuterProducts<OuterInTiles>;
  static constexpr MoeTileSize kMost = {512, 4096};
  static constexpr int64_t kRows = 2 * kEdge;
  static constexpr int64_t kStep = kEdge;
  static constexpr int64_t kGroups = 4;
  static constexpr int64_t kPanels = 4;
  static constexpr int64_t kBlockWords = 512;
  static constexpr bool kStoresPanels = true;
  static constexpr int64_t kPanelWords = kBlockWords * 512;

  static void store_word(float* panel, int64_t words, int64_t word,
                         const Vector (&loaded)[kPanelVectors]) {
    Simd::store(panel + word * kEdge, loaded[0]);
    Simd::store(panel + (words + word) * kEdge, loaded[1]);
  }

  // Packs as [step][tile][16][16], with one tile if there are no more columns.
  static void pack_rows(const Outer& outer, int64_t m, int64_t count, int64_t word, float* group,
                        int64_t done) {
    const int tiles = tiles_of(count);
    float* const to = group + done * tiles * kEdge;
    // A constant number of columns: the masks are constant too.
    if (count == kRows) {
      pack_tiles(outer, m, kRows, word, 2, to);
    } else {
      pack_tiles(outer, m, count, word, tiles, to);
    }
  }

  static void multiply(const float* rows, const float* panel, int64_t words, int64_t count,
                       bool begins, float* sums) {
    const PanelTiles b = packed_panel(panel, words * kEdge);
    if (tiles_of(count) == 2) {
      multiply_tiles<2, false>(rows, b, words / kEdge, begins, sums);
    } else {
      multiply_tiles<1, false>(rows, b, words / kEdge, begins, sums);
    }
  }

  static Vector load_sums(const float* sums, int64_t r, int v) {
    return Simd::load(sums + (r / kEdge * kPanelVectors + v) * kTile + r % kEdge * kEdge);
  }

 private:
  static int tiles_of(int64_t count) { return count > kEdge ? 2 : 1; }

  FLASHMOE_INLINE static void pack_tiles(const Outer& outer, int64_t m, int64_t n, int64_t word,
                                         int tiles, float* to) {
    Vector block[kPanelVectors][kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      Vector loaded[kPanelVectors];
      outer.load_a(m, n, word + i, loaded);
      for (int v = 0; v < kPanelVectors; ++v) block[v][i] = loaded[v];
    }
    for (int v = 0; v < tiles; ++v) {
      Simd::transpose(block[v]);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) Simd::store(to + v * kTile + i * kEdge, block[v][i]);
    }
  }
};

inline void add_outer_products_in_tiles(const MoeOuterProducts& tile, void* scratch) {
  using Outer = OuterProducts<OuterInTiles>;
  static_assert(Outer::bytes() <= TileScratch::kBytes);
  const TileRegisters registers;
  Outer(tile, scratch).compute();
}

constexpr MoeKernel tiled_kernel(const char* isa) {
  return {isa,
          {{kTiledRows, kTiledColumns}, {kTiledRowsByColumns, kTiledColumns}},
          0,
          kGroupRows,
          0,
          TileScratch::kBytes,
          multiply_in_tiles,
          add_rows<Bf16>,
          differentiate_row<Bf16>,
          OuterInTiles::kMost,
          add_outer_products_in_tiles,
          sum_rows<Bf16>,
          dot_of};
}
