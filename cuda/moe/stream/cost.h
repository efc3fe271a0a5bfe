// Which calls are for few-token kernels, and with what tiles, stages and blocks. The figures are of
// an H200 (docs/kernels/moe.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/tile/extents.h"

namespace flashmoe::moe::stream {

// The family comes before the others up to so many tokens, fewer where sm90 would serve the call,
// and up to so many for an expert on average: with more, an expert's weights would be read twice.
inline constexpr int64_t kMostTokens = 64;
inline constexpr int64_t kMostTokensBesideSm90 = 8;
inline constexpr int64_t kFewTokensBesideSm90 = 4;  // whatever else
inline constexpr int64_t kMostTokensPerExpert = 8;
// Named, and behind the others, it serves up to so many: sums of every token are in shared memory.
inline constexpr int64_t kMostTokensServed = 128;

// Steps that a warp has under way, with one and with two products' rows a step: 64 KiB of weights a
// block. The second stage brings some before its time, and may have more.
inline constexpr int kUpStages[] = {4, 2};
inline constexpr int kDownStages[] = {6, 4};
// Steps before a warp's last load at which it lets the second stage start.
inline constexpr int kTriggerLead = 4;

// The same of the bulk kernels, whose stages are a block's, in bytes of weights: what `up` would
// have, what it has at least, and what `down` keeps of it.
inline constexpr int64_t kBulkUpBytes = 88 * 1024;
inline constexpr int64_t kLeastBulkUpBytes = 64 * 1024;
inline constexpr int64_t kLeastBulkDownBytes = 80 * 1024;
inline constexpr int64_t kBulkRowsOfStage = 16;
// Tokens that they serve.
inline constexpr int64_t kMostBulkTokens = 8;
// And rows that are no shorter: a copy of less takes as long.
inline constexpr int64_t kLongRow = 512;
inline bool has_long_rows(int64_t hidden, int64_t inner) {
  return std::min(hidden, inner) >= kLongRow;
}
// Slots of an expert at a time. With more of them its weights are read again, from the L2; room for
// more would cost the stages that keep weights on their way.
inline constexpr int kBulkEntryTokens = 4;
// Bytes of weights before a block's last that `up` loads at which it lets `down` start.
inline constexpr int64_t kBulkTriggerLead = 128 * 1024;
// Columns of a stage: of rows that are longer as many stages as make copies of no less than this.
inline constexpr int kFewColumns = 640;
inline constexpr int kManyColumns = 768;

// Of a multiprocessor's time that whole stripes may leave it idle before blocks share stripes.
inline constexpr double kFullEnough = 0.93;

// Blocks that take whole stripes, as many each, and nearly fill the device; 0 where none do.
inline int64_t blocks_of_whole_stripes(int64_t stripes, int64_t multiprocessors) {
  const int64_t each = ceil_div(stripes, multiprocessors);
  const bool full =
      static_cast<double>(stripes) >= kFullEnough * static_cast<double>(each * multiprocessors);
  return full ? ceil_div(stripes, each) : 0;
}

// Columns of a stage of rows with so many, a multiple of 64: the copy engine takes 28 ns for a copy
// however short, and stages are better small.
inline int64_t choose_stage_columns(int64_t columns, int64_t most) {
  const auto divided = [&](int64_t parts) { return ceil_div(ceil_div(columns, parts), 64) * 64; };
  const int64_t chosen = divided(ceil_div(columns, kManyColumns));
  return chosen < kFewColumns ? divided(ceil_div(columns, most)) : chosen;
}

struct Tile {
  int tiles;   // of 16 rows
  int tokens;  // of an expert, at a time
  bool bulk;
};

// Two tiles read a token's columns half as often, one divides the rows more evenly; for an expert
// with more than 8 tokens it is better to take 16 at a time than to read its weights twice.
inline Tile choose_tile(int64_t tokens, int64_t hidden, int64_t inner, int64_t multiprocessors,
                        bool hopper) {
  if (hopper && tokens <= kMostBulkTokens && has_long_rows(hidden, inner)) return {1, 8, true};
  if (tokens > 8) return {2, 16, false};
  return {blocks_of_whole_stripes(ceil_div(hidden, 32), multiprocessors) > 0 ? 2 : 1, 8, false};
}

// Where sm90 is not faster, which reads an expert's weights once however many tokens it has.
inline bool serves_better_than_sm90(int64_t tokens, int64_t pairs, int64_t experts, int64_t hidden,
                                    int64_t inner) {
  if (tokens <= kFewTokensBesideSm90) return true;
  return tokens <= kMostTokensBesideSm90 && has_long_rows(hidden, inner) &&
         2 * pairs <= 3 * experts;
}

inline bool serves_well(int64_t tokens, int64_t pairs, int64_t experts) {
  return tokens <= kMostTokens && pairs <= kMostTokensPerExpert * experts;
}

}  // namespace flashmoe::moe::stream
