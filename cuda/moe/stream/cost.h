// Which calls are for few-token kernels, and with what tiles, stages and blocks. The figures are of an
// H200 (docs/kernels/moe.md).
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashmoe::moe::stream {

// An unnamed call is served up to so many tokens, fewer where sm90 would serve it, and up to so many
// for an expert on average: with more, an expert's weights would be read twice.
inline constexpr int64_t kMostTokens = 64;
inline constexpr int64_t kMostTokensBesideSm90 = 4;
inline constexpr int64_t kMostTokensPerExpert = 8;
// A named one up to so many: sums of every token are in shared memory.
inline constexpr int64_t kMostTokensNamed = 128;

// Steps that a warp has under way, with one and with two products' rows a step: 64 KiB of weights a
// block. The second stage brings some before its time, and may have more.
inline constexpr int kUpStages[] = {4, 2};
inline constexpr int kDownStages[] = {6, 4};
// Steps before a warp's last load at which it lets the second stage start.
inline constexpr int kTriggerLead = 4;

// Of a multiprocessor's time that whole stripes may leave it idle before blocks share stripes.
inline constexpr double kFullEnough = 0.93;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks that take whole stripes, as many each, and nearly fill the device; 0 where none do.
inline int64_t blocks_of_whole_stripes(int64_t stripes, int64_t multiprocessors) {
  const int64_t each = ceil_div(stripes, multiprocessors);
  const bool full =
      static_cast<double>(stripes) >= kFullEnough * static_cast<double>(each * multiprocessors);
  return full ? ceil_div(stripes, each) : 0;
}

struct Tile {
  int tiles;   // of 16 rows
  int tokens;  // of an expert, at a time
};

// Two tiles read a token's columns half as often, one divides the rows more evenly; for an expert
// with more than 8 tokens it is better to take 16 at a time than to read its weights twice.
inline Tile choose_tile(int64_t tokens, int64_t hidden, int64_t multiprocessors) {
  if (tokens > 8) return {2, 16};
  return {blocks_of_whole_stripes(ceil_div(hidden, 32), multiprocessors) > 0 ? 2 : 1, 8};
}

inline bool serves_well(int64_t tokens, int64_t pairs, int64_t experts) {
  return tokens <= kMostTokens && pairs <= kMostTokensPerExpert * experts;
}

}  // namespace flashmoe::moe::stream
