#include "cuda/attention/sm90/stream_k.h"

#include <algorithm>

#include "cuda/attention/sm90/l2_swizzle.h"

namespace flashmoe::sm90 {
namespace {

constexpr int64_t kStepsOfAPart = 1;  // about what a tile, or a part, costs besides its steps
constexpr int64_t kLeastSteps = 2;    // minimum of a part, unless the block has no other work

// The tiles of a call, end to end. Those of a head are in the order of TilePart::at.
class Row {
 public:
  Row(const AttentionProblem& problem, const PackedTiles& tiles, int step_keys)
      : problem_(problem),
        tiles_(tiles),
        step_keys_(step_keys),
        masked_(problem.bounded_left || problem.bounded_right),
        steps_of_first_(steps_of_tile(problem, tiles, 0, step_keys)) {}

  int64_t tiles() const { return tiles_.tiles; }

  int64_t steps(int64_t position) const {
    if (!masked_) return steps_of_first_;
    const int64_t rank = position % tiles_.tiles_per_head;
    const bool last_first = longest_tiles_first(problem_);
    const int64_t tile = last_first ? tiles_.tiles_per_head - 1 - rank : rank;
    return steps_of_tile(problem_, tiles_, tile, step_keys_);
  }

  int64_t all_steps() const {
    if (!masked_) return tiles_.tiles * steps_of_first_;
    int64_t of_head = 0;
    for (int64_t tile = 0; tile < tiles_.tiles_per_head; ++tile) of_head += steps(tile);
    return tiles_.heads * of_head;
  }

 private:
  const AttentionProblem& problem_;
  const PackedTiles& tiles_;
  int step_keys_;
  bool masked_;
  int64_t steps_of_first_;
};

void begin(int64_t block, int64_t tile, int64_t step, StreamK* stream_k) {
  stream_k->starts[static_cast<size_t>(block)] = {static_cast<int32_t>(tile),
                                                  static_cast<int32_t>(step), 0};
}

// Deals each tile's steps to the same number of blocks.
void deal_evenly(const Row& row, int64_t blocks, StreamK* stream_k) {
  const int64_t parts = blocks / row.tiles();
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t tile = block / parts;
    begin(block, tile, row.steps(tile) * (block % parts) / parts, stream_k);
  }
  stream_k->blocks = static_cast<int32_t>(blocks);
}

// Deals steps to one block after another, at most `most` each. Returns false if steps are left.
bool deal_up_to(const Row& row, int64_t most, int64_t blocks, StreamK* stream_k) {
  const int64_t least = std::min(kLeastSteps, most - kStepsOfAPart);
  int64_t block = 0;
  int64_t room = most;
  begin(0, 0, 0, stream_k);
  for (int64_t tile = 0; tile < row.tiles(); ++tile) {
    const int64_t steps = row.steps(tile);
    int64_t left = steps;
    while (left + kStepsOfAPart > room) {
      if (room - kStepsOfAPart >= least) left -= room - kStepsOfAPart;
      if (++block == blocks) return false;
      begin(block, tile, steps - left, stream_k);
      room = most;
    }
    room -= left + kStepsOfAPart;
  }
  stream_k->blocks = static_cast<int32_t>(block + 1);
  return true;
}

// Assigns places to the parts of tiles that several blocks share.
void place_parts(int64_t tiles, StreamK* stream_k) {
  const auto blocks = static_cast<size_t>(stream_k->blocks);
  begin(stream_k->blocks, tiles, 0, stream_k);
  int32_t first = 0;  // place of the tile's first part
  stream_k->places = stream_k->cut_tiles = stream_k->most_parts = 0;
  for (size_t block = 1; block < blocks; ++block) {
    StreamKStart& start = stream_k->starts[block];
    const StreamKStart& before = stream_k->starts[block - 1];
    if (start.step == 0) continue;
    if (before.tile != start.tile || before.step == 0) {
      stream_k->cuts[static_cast<size_t>(stream_k->cut_tiles++)] = static_cast<int16_t>(block);
      first = stream_k->places;
      start.place = first + 1;
    } else {
      start.place = before.place + (start.step > before.step ? 1 : 0);
    }
    stream_k->places = start.place + 1;
    stream_k->most_parts = std::max(stream_k->most_parts, stream_k->places - first);
  }
  stream_k->starts[blocks].place = stream_k->places + 1;
  stream_k->cuts[static_cast<size_t>(stream_k->cut_tiles)] = static_cast<int16_t>(blocks);
}

}  // namespace

int64_t steps_of_tile(const AttentionProblem& problem, const PackedTiles& tiles, int64_t tile,
                      int step_keys) {
  const int64_t queries = tiles.groups_per_tile * tiles.queries_per_group;
  const int64_t first_query = tile * queries;
  const int64_t last_query = std::min(first_query + queries, problem.seq_q) - 1;
  const int64_t first =
      problem.bounded_left ? std::max<int64_t>(0, first_query + problem.left_offset) : 0;
  const int64_t end = problem.bounded_right
                          ? std::min(problem.seq_k, last_query + problem.right_offset + 1)
                          : problem.seq_k;
  const int64_t shift = kv_block_alignment(problem, step_keys, first_query, queries);
  return first < end ? (end + shift + step_keys - 1) / step_keys - (first + shift) / step_keys : 0;
}

StreamK deal_stream_k(const AttentionProblem& problem, const PackedTiles& tiles, int step_keys,
                      int64_t blocks) {
  StreamK stream_k = {};
  const Row row(problem, tiles, step_keys);
  if (blocks % tiles.tiles == 0) {
    deal_evenly(row, blocks, &stream_k);
  } else {
    const int64_t steps = row.all_steps() + tiles.tiles * kStepsOfAPart;
    int64_t most = std::max((steps + blocks - 1) / blocks, kStepsOfAPart + 1);
    while (!deal_up_to(row, most, blocks, &stream_k)) ++most;
  }
  place_parts(tiles.tiles, &stream_k);
  return stream_k;
}

}  // namespace flashmoe::sm90
