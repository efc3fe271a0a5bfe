// What a call takes by the sm90 kernels. Fitted to measurements on an H200
// (docs/kernels/attention_sm90.md).
#pragma once

#include <cstdint>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/kv_block_alignment.h"

namespace flashmoe::sm90 {

// What times of tiles are too low by, beside those of the few-row kernels: calls that both serve
// were timed on an H100 (docs/lab/attention_sm89_few_rows.md, "Beside the families of tiles").
inline constexpr double kBesideFewRows = 1.05;

// Of kernels for keys of so many dimensions.
inline TileSpeed tile_speed(int dim) {
  if (dim <= 64) return {4.85e6, 3.6, 192.0};
  return {6.3e6, 4.2, 128.0};
}

// What a step of a tile takes where only some of its groups of rows exist, of what it takes with
// all: softmax and products of one run one after the other.
inline double share_of_step(double groups, double all) {
  constexpr double kOfAny = 0.5;
  return kOfAny + (1 - kOfAny) * groups / all;
}

// What a step takes where not all multiprocessors have a tile, of what it takes where all do: it
// takes less, presumably since they share the power, and with it the clock.
inline double share_of_clock(double tiles, const DeviceFacts& facts) {
  constexpr double kOfPower = 0.09;
  return 1 - kOfPower * (1 - std::min(1.0, tiles / facts.multiprocessors));
}

// Whether tiles of a kernel for short windows take less time than others of as many rows: but for
// few waves of tiles of two steps at most, whose products begin sooner
// (docs/lab/attention_sm90.md).
inline bool saves_steps(const AttentionProblem& p, int64_t rows, const DeviceFacts& facts) {
  constexpr int64_t kTwoSteps = 256;  // of the other kernels, in keys
  constexpr int64_t kFewWaves = 2;
  const int64_t tiles = (p.seq_q + rows - 1) / rows * p.batch * p.heads_q;
  return p.seq_k > kTwoSteps || tiles > kFewWaves * facts.multiprocessors;
}

inline double tile_microseconds(const Work& work, const TileSpeed& speed,
                                const DeviceFacts& facts) {
  double share = share_of_clock(work.heads_q * ceil_of(work.seq_q, speed.rows), facts);
  if (work.seq_q < speed.rows) {
    share *= share_of_step(ceil_of(work.seq_q, kRowsPerGroup), speed.rows / kRowsPerGroup);
  }
  return flashmoe::tile_microseconds(work, speed, share, facts);
}

}  // namespace flashmoe::sm90
