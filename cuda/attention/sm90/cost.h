// Time of a call with the sm90 kernels. Fitted to measurements on an H200
// (docs/kernels/attention_sm90.md).
#pragma once

#include <cstdint>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/kv_block_alignment.h"

namespace flashmoe::sm90 {

// What a call takes, of what the terms below say. Dense calls on an H200 took 1.11 to 1.32 times
// the terms, on average of each record, and calls of few rows on an H100 1.37 times
// (benchmarks/results/family_choice_h100.json). Large calls that the memory bounds mostly took 0.96
// to 1.03 times, some up to 1.5 times.
inline constexpr double kUncounted = 1.05;

// Speed of kernels for keys of `dim` dimensions.
inline TileSpeed tile_speed(int dim) {
  if (dim <= 64) return {4.85e6, 3.6, 192.0};
  return {6.3e6, 4.2, 128.0};
}

// Time of a step of a tile with only `groups` of `all` groups of rows, relative to that of a full
// tile. A single group alternates between softmax and products.
inline double share_of_step(double groups, double all) {
  constexpr double kOfAny = 0.5;
  return kOfAny + (1 - kOfAny) * groups / all;
}

// Time of a step if not all multiprocessors have a tile, relative to that if all do. It is shorter,
// presumably because multiprocessors share the power, and thus the clock.
inline double share_of_clock(double tiles, const DeviceFacts& facts) {
  constexpr double kOfPower = 0.09;
  return 1 - kOfPower * (1 - std::min(1.0, tiles / facts.multiprocessors));
}

// Whether tiles of a kernel for short windows are faster than others of as many rows. They are,
// except in few waves of tiles with at most two steps: the other kernel then begins its products
// sooner (docs/lab/attention_sm90.md).
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
