// Stream-K: how the steps of a launch's tiles are dealt to its blocks. It is a pure function of
// shapes.
#pragma once

#include <array>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/split_kv_cost.h"

namespace flashmoe::sm90 {

struct StreamK {
  int32_t blocks;      // at most the number asked for
  int32_t places;      // in the workspace: parts of all tiles that several blocks share
  int32_t cut_tiles;   // those tiles
  int32_t most_parts;  // of one of them
  std::array<StreamKStart, kMostStreamKBlocks + 1> starts;  // as in SplitParams
  std::array<int16_t, kMostStreamKBlocks + 1> cuts;
};

// Steps of `step_keys` keys that some row of a tile needs.
int64_t steps_of_tile(const AttentionProblem& problem, const PackedTiles& tiles, int64_t tile,
                      int step_keys);

// Deals all steps to at most `blocks` blocks, from 1 to kMostStreamKBlocks. If `blocks` is a
// multiple of the number of tiles, each tile's steps go to equally many blocks, evenly. Otherwise
// tiles are laid end to end, and the largest share is as small as possible, counting the fixed cost
// of a tile or of a part of one.
StreamK deal_stream_k(const AttentionProblem& problem, const PackedTiles& tiles, int step_keys,
                      int64_t blocks);

}  // namespace flashmoe::sm90
