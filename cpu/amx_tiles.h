// Products of bf16 pairs in the tile registers of AMX. Operands are packed in words of two
// elements. A tile is 16 rows of 64 bytes. tdpbf16ps multiplies 16 rows of 16 words by 16 columns
// of as many words, [word][column], into 16 x 16 sums in fp32. Denormal inputs and sums count as 0.
//
// Two tiles of rows by two of columns are multiplied at a time. Every sum runs in the order of
// depth, whatever other rows and columns there are.
//
// Included after cpu/products.h and cpu/amx_registers.h.

constexpr int kTileEdge = 16;                          // rows, columns and words of a tile
constexpr int64_t kTileWords = kTileEdge * kTileEdge;  // as many sums
constexpr int64_t kTileDepth = 2 * kTileEdge;          // elements of depth per step

// Tiles of words. Distances in words: between rows of a tile, to the tile of the next rows or
// columns, and to the next step of depth.
struct TileOperand {
  const float* first;
  int64_t row;
  int64_t beside;
  int64_t step;
};

// Packed tile by tile: each step's tiles that are multiplied together lie side by side.
FLASHMOE_INLINE TileOperand packed_tiles(const float* first, int64_t together) {
  return {first, kTileEdge, kTileWords, together * kTileWords};
}

struct TileSums {
  float* first;
  int64_t row;  // between rows; tiles of columns lie side by side
};

// sums = (or +=, to add) the product of kRows by kColumns tiles over `steps` steps of depth.
template <int kRows, int kColumns>
FLASHMOE_NOINLINE void multiply_tiles(TileOperand a, TileOperand b, int64_t steps, bool add,
                                      TileSums sums) {
  constexpr int64_t kWord = sizeof(float);
  const int64_t next = sums.row * kWord;
  float* const second = sums.first + kTileEdge * sums.row;
  if (add) {
    _tile_loadd(0, sums.first, next);
    if (kColumns == 2) _tile_loadd(1, sums.first + kTileEdge, next);
    if (kRows == 2) _tile_loadd(2, second, next);
    if (kRows == 2 && kColumns == 2) _tile_loadd(3, second + kTileEdge, next);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, a.first, a.row * kWord);
    _tile_loadd(6, b.first, b.row * kWord);
    _tile_dpbf16ps(0, 4, 6);
    if (kColumns == 2) {
      _tile_loadd(7, b.first + b.beside, b.row * kWord);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kRows == 2) {
      _tile_loadd(5, a.first + a.beside, a.row * kWord);
      _tile_dpbf16ps(2, 5, 6);
      if (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    a.first += a.step;
    b.first += b.step;
  }
  _tile_stored(0, sums.first, next);
  if (kColumns == 2) _tile_stored(1, sums.first + kTileEdge, next);
  if (kRows == 2) _tile_stored(2, second, next);
  if (kRows == 2 && kColumns == 2) _tile_stored(3, second + kTileEdge, next);
}

FLASHMOE_INLINE void multiply_tiles(int64_t rows, int64_t columns, const TileOperand& a,
                                    const TileOperand& b, int64_t steps, bool add,
                                    const TileSums& sums) {
  if (rows > kTileEdge) {
    (columns > kTileEdge ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)(a, b, steps, add, sums);
  } else {
    (columns > kTileEdge ? multiply_tiles<1, 2> : multiply_tiles<1, 1>)(a, b, steps, add, sums);
  }
}
