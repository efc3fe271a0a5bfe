// The attention kernels of one instruction set: the code for a tile, and its table entry.
//
// Included last.

// Asks the problem, not a tile: a row's bits do not depend on how rows are distributed.
template <typename Product>
bool has_few_rows(const AttentionProblem& p) {
  return p.seq_q * (p.heads_q / p.heads_kv) <= FewRowsComputer<Product>::kMostRows;
}

template <typename Product>
void compute_tile(const AttentionProblem& problem, const AttentionTile& tile, int32_t tile_q,
                  void* scratch) {
  ScratchCursor cursor(scratch);
  if (has_few_rows<Product>(problem)) {
    FewRowsComputer<Product>(problem, tile, FewRowsScratch(cursor, problem, tile_q, Product::kPack))
        .compute();
  } else {
    TileComputer<Product>(problem, tile, TileScratch(cursor, problem, tile_q, Product::kPack))
        .compute();
  }
}

template <typename Product>
size_t tile_scratch_bytes(const AttentionProblem& problem, int32_t tile_q) {
  ScratchCursor cursor(nullptr);
  if (has_few_rows<Product>(problem)) {
    FewRowsScratch(cursor, problem, tile_q, Product::kPack);
  } else {
    TileScratch(cursor, problem, tile_q, Product::kPack);
  }
  return cursor.bytes();
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
          has_few_rows<Product>,
          tile_keys<Product>,
          tile_scratch_bytes<Product>,
          compute_tile<Product>};
}
