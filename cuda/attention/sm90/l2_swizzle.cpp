#include "cuda/attention/sm90/l2_swizzle.h"

#include <algorithm>

#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/kv_block_alignment.h"

namespace flashmoe::sm90 {
namespace {

constexpr int64_t kStepsOfAStart = 1;  // about the cost of a tile in addition to its steps

// Steps of a tile of a head: those up to the last key that its last row sees.
int64_t steps_of_tile(const AttentionProblem& problem, const Entry& entry, int64_t spare,
                      int64_t tile) {
  const int64_t first_row = tile * entry.tile_q - spare;
  const int64_t end_row = std::min(problem.seq_q, first_row + entry.tile_q);
  const int64_t keys = std::clamp<int64_t>(end_row + problem.right_offset, 0, problem.seq_k);
  if (keys == 0) return kStepsOfAStart;
  const int64_t shift = kv_block_alignment_of_tiles(problem, entry.tile_k, first_row, entry.tile_q);
  return kStepsOfAStart + (keys + shift + entry.tile_k - 1) / entry.tile_k;
}

// Steps of each turn of a swizzle group of `heads` heads. Tiles of one length are consecutive, so a
// round is a few runs of them. The function records changes from one turn to the next, and then
// sums them up.
void deal(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head,
          int64_t blocks, int64_t heads, int64_t* steps_of_turn) {
  int64_t change[kMostBlocks + 1] = {};
  const int64_t spare = spare_rows(problem, entry, tiles_per_head);
  int64_t turn = 0;  // of the round
  bool forwards = true;
  for (int64_t tile = tiles_per_head - 1; tile >= 0; --tile) {
    const int64_t steps = steps_of_tile(problem, entry, spare, tile);
    for (int64_t left = heads; left > 0;) {
      const int64_t end = std::min(blocks, turn + left);
      change[forwards ? turn : blocks - end] += steps;
      change[forwards ? end : blocks - turn] -= steps;
      left -= end - turn;
      turn = end;
      if (turn == blocks) {
        turn = 0;
        forwards = !forwards;
      }
    }
  }
  int64_t steps = 0;
  for (int64_t i = 0; i < blocks; ++i) steps_of_turn[i] = steps += change[i];
}

}  // namespace

int64_t kv_block_alignment(const AttentionProblem& problem, int step_keys, int64_t first_row,
                           int64_t rows) {
  return kv_block_alignment(step_keys, static_cast<int32_t>(first_row), static_cast<int32_t>(rows),
                            problem.bounded_right, static_cast<int32_t>(problem.right_offset));
}

int64_t kv_block_alignment_of_tiles(const AttentionProblem& problem, int step_keys,
                                    int64_t first_row, int64_t rows) {
  const bool by_host = step_keys % kRowsPerGroup == 0;  // else by the kernel (tile.cuh)
  if (by_host && problem.seq_k <= step_keys) return 0;
  return kv_block_alignment(problem, step_keys, first_row, rows);
}

bool longest_tiles_first(const AttentionProblem& problem) {
  return problem.bounded_right && !problem.bounded_left;
}

int64_t spare_rows(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head) {
  return (tiles_per_head * entry.tile_q - problem.seq_q) / entry.box_rows * entry.box_rows;
}

int64_t most_steps(const AttentionProblem& problem, const Entry& entry, int64_t tiles_per_head,
                   int64_t blocks, int64_t heads_per_swizzle) {
  int64_t steps[kMostBlocks] = {};
  int64_t of_swizzle[kMostBlocks];
  const int64_t heads = problem.batch * problem.heads_q;
  for (int64_t first = 0; first < heads; first += heads_per_swizzle) {
    const int64_t held = std::min(heads_per_swizzle, heads - first);
    // All groups but the last are like the first.
    if (first == 0 || held < heads_per_swizzle) {
      deal(problem, entry, tiles_per_head, blocks, held, of_swizzle);
    }
    // A swizzle group begins with the block after the one that had the end of the previous group.
    const int64_t begin = first * tiles_per_head % blocks;
    for (int64_t i = begin; i < blocks; ++i) steps[i] += of_swizzle[i - begin];
    for (int64_t i = 0; i < begin; ++i) steps[i] += of_swizzle[i + blocks - begin];
  }
  return *std::max_element(steps, steps + blocks);
}

// Swizzle groups are as small as possible without idle blocks, because the first tiles of a group
// read all of its keys and values. A group has enough rounds of tiles to even out their lengths,
// while its keys and values fit the L2 beside the traffic of queries and outputs. Among this size
// and the next smaller ones, down to half as many heads, the best one minimises the steps of the
// block with the most.
int32_t heads_per_swizzle(const AttentionProblem& problem, const Entry& entry,
                          int64_t tiles_per_head, const DeviceFacts& facts) {
  constexpr int64_t kLeastRounds = 2;
  constexpr int64_t kStepsPerRound = 4;
  // With more rounds the last tile of a block hardly matters. These bounds keep planning to a few
  // microseconds.
  constexpr int64_t kMostRoundsDealt = 32;
  constexpr int kMostChoices = 5;
  const int64_t group = problem.heads_q / problem.heads_kv;
  const int64_t heads_kv = problem.batch * problem.heads_kv;
  if (!longest_tiles_first(problem) || heads_kv == 0 || tiles_per_head == 0) return 1;
  const int64_t steps = (problem.seq_k + entry.tile_k - 1) / entry.tile_k;
  const int64_t rounds = std::max(kLeastRounds, steps / kStepsPerRound);
  const int64_t group_tiles = group * tiles_per_head;
  const int64_t wanted = (rounds * facts.multiprocessors + group_tiles - 1) / group_tiles;
  const int64_t bytes = problem.seq_k * key_bytes(problem);
  const int64_t fitting = bytes > 0 ? std::max<int64_t>(1, facts.l2_bytes * 3 / 4 / bytes) : wanted;
  // KV heads per swizzle group, at most `most`, if all groups have about the same size.
  const auto even = [&](int64_t most) {
    const int64_t groups = (heads_kv + most - 1) / most;
    return (heads_kv + groups - 1) / groups;
  };
  const int64_t longest = even(std::min({wanted, fitting, heads_kv}));

  const int64_t tiles = group_tiles * heads_kv;
  const int64_t blocks = std::min<int64_t>(tiles, facts.multiprocessors);
  int64_t best = longest;
  if (blocks <= kMostBlocks && tiles <= kMostRoundsDealt * blocks) {
    const auto most = [&](int64_t heads) {
      return most_steps(problem, entry, tiles_per_head, blocks, heads * group);
    };
    int64_t least = most(longest);
    int64_t heads = longest;
    for (int choice = 1; choice < kMostChoices && heads > 1; ++choice) {
      heads = even(heads - 1);
      if (2 * heads < longest) break;
      const int64_t steps_of_these = most(heads);
      if (steps_of_these < least) {
        least = steps_of_these;
        best = heads;
      }
    }
  }
  return static_cast<int32_t>(best * group);
}

}  // namespace flashmoe::sm90
