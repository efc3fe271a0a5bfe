// Stream-K: how the steps of a launch's tiles are dealt to its blocks, a pure function of
// shapes.
#pragma once

#include <array>
#include <cstdint>

#include "core/ops/attention/problem.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/split_kv_cost.h"

namespace flashmoe::sm90 {

struct StreamK {
  int32_t blocks;      // no more than asked for
  int32_t places;      // of the workspace: parts of all tiles that several blocks share
  int32_t cut_tiles;   // those tiles
  int32_t most_parts;  // of one of them
  std::array<StreamKStart, kMostStreamKBlocks + 1> starts;  // as in SplitParams
  std::array<int16_t, kMostStreamKBlocks + 1> cuts;
};

// Steps of so many keys that some row of a tile needs.
int64_t steps_of_tile(const AttentionProblem& problem, const PackedTiles& tiles, int64_t tile,
                      int step_keys);

// Deals all steps to at most so many blocks, of which there are from 1 to kMostStreamKBlocks. Where
// they are a multiple of the tiles, each tile's steps go to as many blocks, evenly. Else tiles are
// laid end to end, and no block has more than it must, counting what a tile or a part of one takes
// beside its steps.
StreamK deal_stream_k(const AttentionProblem& problem, const PackedTiles& tiles, int step_keys,
                      int64_t blocks);

}  // namespace flashmoe::sm90
