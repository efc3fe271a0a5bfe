// Time of a call with the few-token kernels, and their tiles, stages and blocks. The figures are
// for an H200 (docs/lab/moe.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/moe/cost.h"
#include "cuda/tile/extents.h"

namespace flashmoe::moe::sm89_few_tokens {

// The family does not serve more tokens: shared memory holds sums of every token.
inline constexpr int64_t kMostTokensServed = 128;

// Steps that a warp has in flight, with one and with two products' rows per step: 64 KiB of weights
// per block. The second stage loads some before its time, and may have more.
inline constexpr int kUpStages[] = {4, 2};
inline constexpr int kDownStages[] = {6, 4};
// When the first stage lets the second one start: steps before a warp's last load.
inline constexpr int kTriggerLead = 4;

// The same for the bulk kernels, whose stages are per block, in bytes of weights: what `up` wants,
// its minimum, and the minimum of `down` that takes precedence.
inline constexpr int64_t kBulkUpBytes = 88 * 1024;
inline constexpr int64_t kLeastBulkUpBytes = 64 * 1024;
inline constexpr int64_t kLeastBulkDownBytes = 80 * 1024;
inline constexpr int64_t kBulkRowsOfStage = 16;
// Upper bound on the tokens that they serve.
inline constexpr int64_t kMostBulkTokens = 8;
// Lower bound on the length of their rows: a copy of less takes as long.
inline constexpr int64_t kLongRow = 512;
inline bool has_long_rows(int64_t hidden, int64_t inner) {
  return std::min(hidden, inner) >= kLongRow;
}
// Slots of an expert at a time. With more slots, its weights are read again from the L2; room for
// more slots would cost stages that keep weights in flight.
inline constexpr int kBulkEntryTokens = 4;
// When `up` lets `down` start: bytes of weights before a block's last load.
inline constexpr int64_t kBulkTriggerLead = 128 * 1024;
// Columns per stage. Longer rows have as many stages as keep copies at no less than this.
inline constexpr int kFewColumns = 640;
inline constexpr int kManyColumns = 768;

// Minimum utilisation of multiprocessors with whole stripes; below it, blocks share stripes.
inline constexpr double kFullEnough = 0.93;

// Blocks that take equally many whole stripes and nearly fill the device. 0 if that is impossible.
inline int64_t blocks_of_whole_stripes(int64_t stripes, int64_t multiprocessors) {
  const int64_t each = ceil_div(stripes, multiprocessors);
  const bool full =
      static_cast<double>(stripes) >= kFullEnough * static_cast<double>(each * multiprocessors);
  return full ? ceil_div(stripes, each) : 0;
}

// Columns per stage for rows of `columns` columns, a multiple of 64. The copy engine takes 28 ns
// per copy, however short, but small stages are better.
inline int64_t choose_stage_columns(int64_t columns, int64_t most) {
  const auto divided = [&](int64_t parts) { return ceil_div(ceil_div(columns, parts), 64) * 64; };
  const int64_t chosen = divided(ceil_div(columns, kManyColumns));
  return chosen < kFewColumns ? divided(ceil_div(columns, most)) : chosen;
}

struct Tile {
  int tiles;   // tiles of 16 rows
  int tokens;  // tokens of an expert at a time
  bool bulk;
};

// Two tiles read a token's columns half as often; one divides the rows more evenly. For an expert
// with more than 8 tokens, 16 at a time is better than reading its weights twice.
inline Tile choose_tile(int64_t tokens, int64_t hidden, int64_t inner, int64_t multiprocessors,
                        bool hopper) {
  if (hopper && tokens <= kMostBulkTokens && has_long_rows(hidden, inner)) return {1, 8, true};
  if (tokens > 8) return {2, 16, false};
  return {blocks_of_whole_stripes(ceil_div(hidden, 32), multiprocessors) > 0 ? 2 : 1, 8, false};
}

// Expected number of reads of the weights of an expert that is chosen, with room for `room` of its
// tokens at a time, if each token chooses it with this probability.
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

// Time of a layer, fitted to measurements on an H200 and an H100 (docs/lab/moe.md). If an expert
// has more tokens than there is room for, its weights are read again. With many tokens the products
// take longer than the loads.
inline double stream_microseconds(const MoeForwardProblem& p, bool bulk, const DeviceFacts& facts) {
  constexpr double kBulkStart = 7.5;
  constexpr double kStart = 19;
  constexpr double kToken = 0.5;  // for a layer so small that no load hides the cost of a token
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
  // Elsewhere it is an estimate: GPUs with fewer bytes per clock reach more of the memory's peak.
  const double memory_share = facts.compute_capability == 90 ? 0.74 : 0.85;
  const auto tokens = static_cast<double>(p.tokens);
  work.weight_bytes *=
      std::max({1.0, tokens * p.top_k / (kTokensPerExpert * p.experts), tokens / kTokens});
  return microseconds(work, {kStart + kToken * tokens, memory_share, kRate}, facts);
}

}  // namespace flashmoe::moe::sm89_few_tokens
