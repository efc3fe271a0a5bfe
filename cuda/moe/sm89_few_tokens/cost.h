// What a call takes by the few-token kernels, and with what tiles, stages and blocks. The figures
// are of an H200 (docs/lab/moe.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/moe/cost.h"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89_few_tokens {

// More tokens it does not serve: sums of every token are in shared memory.
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

// How often an expert that is taken has its weights read, with room for so many of its tokens at a
// time, if each of them takes it with this probability.
inline double expected_reads(int64_t tokens, double probability, int room) {
  if (tokens == 0 || probability >= 1)
    return static_cast<double>(ceil_div(std::max<int64_t>(tokens, 1), room));
  double of_count =
      std::pow(1 - probability, static_cast<double>(tokens));  // that it has so many tokens
  const double taken = 1 - of_count;
  double reads = 0;
  for (int64_t count = 1; count <= tokens; ++count) {
    of_count *= static_cast<double>(tokens - count + 1) / static_cast<double>(count) * probability /
                (1 - probability);
    reads += static_cast<double>(ceil_div(count, room)) * of_count;
  }
  return reads / taken;
}

// What a layer takes, fitted to measurements on an H200 (docs/lab/moe.md). With more tokens of an
// expert than there is room for its weights are read again, and with many tokens the products are
// longer than the loads.
inline double stream_microseconds(const MoeForwardProblem& p, bool bulk, const DeviceFacts& facts) {
  constexpr double kBulkStart = 7.5;
  constexpr double kStart =
      20;  // of small layers, which take about as long with few tokens as with many
  constexpr double kRate = 0.6e6;
  constexpr double kTokensPerExpert = 8;
  constexpr double kTokens = 64;
  Work work = work_of(p);
  if (bulk) {
    constexpr double kMemoryShare = 0.865;
    work.weight_bytes *=
        expected_reads(p.tokens, static_cast<double>(p.top_k) / p.experts, kBulkEntryTokens);
    return microseconds(work, {kBulkStart, kMemoryShare, kRate}, facts);
  }
  // Elsewhere an estimate: with fewer bytes a clock more of the memory's peak is reached.
  const double memory_share = facts.compute_capability == 90 ? 0.74 : 0.85;
  const auto tokens = static_cast<double>(p.tokens);
  work.weight_bytes *=
      std::max({1.0, tokens * p.top_k / (kTokensPerExpert * p.experts), tokens / kTokens});
  return microseconds(work, {kStart, memory_share, kRate}, facts);
}

}  // namespace flashmoe::moe::sm89_few_tokens
