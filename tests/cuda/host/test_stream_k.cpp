// Stream-K of launches that split KV, walked as the kernel and the one behind it do.
#include "cuda/attention/sm90/stream_k.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/attention/sm90/l2_swizzle.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::sm90 {
namespace {

constexpr int kWholeTile = -1;

struct Shape {
  int64_t batch, seq_q, seq_k, heads_q, heads_kv;
};

AttentionProblem problem_of(const Shape& shape) {
  AttentionProblem problem = {};
  problem.q.dtype = Dtype::kBFloat16;
  problem.batch = shape.batch;
  problem.seq_q = shape.seq_q;
  problem.seq_k = shape.seq_k;
  problem.heads_q = shape.heads_q;
  problem.heads_kv = shape.heads_kv;
  problem.dim = problem.dim_v = 64;
  problem.q.strides.head = 64;
  return problem;
}

// What a block takes of a tile: its steps behind the first of those that some row needs.
struct Part {
  int64_t tile, first, end;
  int place;
};

// By TilePart::at: the tile of a head at a position.
int64_t tile_of_head(const AttentionProblem& problem, const PackedTiles& tiles, int64_t position) {
  const int64_t rank = position % tiles.tiles_per_head;
  const bool last_first = problem.bounded_right && !problem.bounded_left;
  return last_first ? tiles.tiles_per_head - 1 - rank : rank;
}

int64_t first_key(const AttentionProblem& p, int64_t query) {
  return p.bounded_left ? std::max<int64_t>(0, query + p.left_offset) : 0;
}
int64_t end_key(const AttentionProblem& p, int64_t query) {
  return p.bounded_right ? std::min(p.seq_k, query + p.right_offset + 1) : p.seq_k;
}

// By Steps: those that some row of a tile needs, row by row. The first step of a group, from the
// right, is that of each of its rows.
int64_t needed_steps(const AttentionProblem& p, const PackedTiles& tiles, int64_t position,
                     int step_keys) {
  const int64_t queries = tiles.groups_per_tile * tiles.queries_per_group;
  const int64_t first_query = tile_of_head(p, tiles, position) * queries;
  const int64_t shift = kv_block_alignment(p, step_keys, first_query, queries);
  CHECK(shift >= 0 && shift < step_keys && (p.bounded_right || shift == 0));
  int64_t begin = p.seq_k;
  int64_t behind = 0;
  int64_t step_of_group = -1;
  for (int64_t query = first_query; query < std::min(first_query + queries, p.seq_q); ++query) {
    const int64_t end = end_key(p, query);
    begin = std::min(begin, first_key(p, query));
    behind = std::max(behind, end);
    if ((query - first_query) % tiles.queries_per_group == 0) step_of_group = -1;
    if (end <= 0) continue;
    const int64_t step = (end - 1 + shift) / step_keys;
    CHECK(step_of_group == -1 || step_of_group == step);
    step_of_group = step;
  }
  if (begin >= behind) return 0;
  return (behind - 1 + shift) / step_keys - (begin + shift) / step_keys + 1;
}

// By SplitTileScheduler.
std::vector<Part> walk(const StreamK& stream_k, const std::vector<int64_t>& steps, size_t block) {
  const StreamKStart& start = stream_k.starts[block];
  const StreamKStart& end = stream_k.starts[block + 1];
  std::vector<Part> parts;
  int64_t first = start.step;
  for (int64_t tile = start.tile;; ++tile, first = 0) {
    const bool cut = tile == end.tile;
    if (tile > end.tile || (cut && first >= end.step)) return parts;
    Part part = {tile, first, steps[static_cast<size_t>(tile)], kWholeTile};
    if (cut) {
      part.end = end.step;
      part.place = end.place - 1;
    }
    if (first > 0) part.place = start.place;
    parts.push_back(part);
  }
}

// Every step is one block's; parts of a tile lie one behind the other, where the second kernel
// looks for them. What the block with the most takes, with a step for each part.
int64_t check(const StreamK& stream_k, const std::vector<int64_t>& steps) {
  const auto blocks = static_cast<size_t>(stream_k.blocks);
  CHECK(blocks >= 1 && blocks <= kMostStreamKBlocks);
  std::vector<std::vector<Part>> of_tile(steps.size());
  int64_t most = 0;
  for (size_t block = 0; block < blocks; ++block) {
    int64_t taken = 0;
    for (const Part& part : walk(stream_k, steps, block)) {
      of_tile[static_cast<size_t>(part.tile)].push_back(part);
      taken += part.end - part.first + 1;
    }
    most = std::max(most, taken);
  }
  int32_t places = 0;
  int32_t cut_tiles = 0;
  int32_t most_parts = 0;
  for (size_t tile = 0; tile < steps.size(); ++tile) {
    const std::vector<Part>& parts = of_tile[tile];
    CHECK(!parts.empty());
    int64_t next = 0;
    for (const Part& part : parts) {
      CHECK(part.first == next && (part.end > part.first || steps[tile] == 0));
      next = part.end;
    }
    CHECK(next == steps[tile]);
    if (parts.size() == 1) {
      CHECK(parts[0].place == kWholeTile);
      continue;
    }
    const auto cut = static_cast<size_t>(stream_k.cuts[static_cast<size_t>(cut_tiles)]);
    const auto next_cut = static_cast<size_t>(stream_k.cuts[static_cast<size_t>(++cut_tiles)]);
    CHECK(stream_k.starts[cut].tile == static_cast<int32_t>(tile));
    CHECK(stream_k.starts[cut].place - 1 == places);
    for (const Part& part : parts) CHECK(part.place == places++);
    CHECK(stream_k.starts[next_cut].place - 1 == places);
    most_parts = std::max(most_parts, static_cast<int32_t>(parts.size()));
  }
  CHECK(places == stream_k.places && cut_tiles == stream_k.cut_tiles);
  CHECK(most_parts == stream_k.most_parts);
  return most;
}

bool same(const StreamK& a, const StreamK& b) {
  const auto same_start = [](const StreamKStart& x, const StreamKStart& y) {
    return x.tile == y.tile && x.step == y.step && x.place == y.place;
  };
  return a.blocks == b.blocks && a.places == b.places &&
         std::equal(a.starts.begin(), a.starts.begin() + a.blocks + 1, b.starts.begin(),
                    same_start) &&
         std::equal(a.cuts.begin(), a.cuts.begin() + a.cut_tiles + 1, b.cuts.begin());
}

void every_step_is_dealt_once() {
  std::mt19937 random(0);
  const auto from = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int with_parts = 0;
  for (int i = 0; i < 3000; ++i) {
    const int64_t heads_kv = from(1, 6);
    AttentionProblem problem =
        problem_of({from(1, 4), from(1, 900), from(0, 5000), heads_kv * from(1, 9), heads_kv});
    if (i % 3 != 0) {
      problem.bounded_right = true;
      problem.right_offset = from(-problem.seq_q, problem.seq_k);
    }
    if (i % 3 == 2) {
      problem.bounded_left = true;
      problem.left_offset = problem.right_offset - from(0, 2000);
    }
    const int step_keys = i % 2 == 0 ? 128 : 64;
    const PackedTiles tiles = packed_tiles(problem, from(1, 3));
    std::vector<int64_t> steps;
    int64_t all = 0;
    for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
      steps.push_back(needed_steps(problem, tiles, tile, step_keys));
      all += steps.back() + 1;
    }
    const int64_t blocks = from(1, kMostStreamKBlocks);
    const StreamK stream_k = deal_stream_k(problem, tiles, step_keys, blocks);
    CHECK(stream_k.blocks <= blocks);
    const int64_t most = check(stream_k, steps);
    with_parts += stream_k.places > 0 ? 1 : 0;
    if (blocks % tiles.tiles == 0) {
      const int64_t parts = blocks / tiles.tiles;
      const int64_t longest = *std::max_element(steps.begin(), steps.end());
      CHECK(stream_k.blocks == blocks && most == (longest + parts - 1) / parts + 1);
    } else {
      // Each cut costs a step more, and room for less than two steps is left.
      CHECK(most <= std::max<int64_t>(2, (all + blocks - 1) / blocks + 3));
    }
    CHECK(same(stream_k, deal_stream_k(problem, tiles, step_keys, blocks)));
  }
  CHECK(with_parts > 1500);
}

// Four tiles to three blocks: the middle two are cut.
void tiles_a_little_more_than_blocks() {
  const AttentionProblem problem = problem_of({1, 512, 8192, 40, 8});
  const PackedTiles tiles = packed_tiles(problem, 2);
  CHECK(tiles.tiles == 176);
  const StreamK stream_k = deal_stream_k(problem, tiles, 128, 132);
  CHECK(stream_k.blocks == 132 && stream_k.cut_tiles == 88 && stream_k.places == 176);
  const std::vector<int64_t> steps(176, 64);
  CHECK(check(stream_k, steps) == 88);
}

}  // namespace
}  // namespace flashmoe::sm90

int main() {
  using namespace flashmoe::sm90;
  every_step_is_dealt_once();
  tiles_a_little_more_than_blocks();
  return 0;
}
