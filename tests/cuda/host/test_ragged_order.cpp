// Which block takes which tile of a batch of sequences, and where the copy engine finds their rows,
// beside brute force.
#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "check.h"
#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm90/ragged_order.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::sm90 {
namespace {

std::mt19937 random_numbers(1);

int from(int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(random_numbers);
}

// The lanes of a warp, one after another.
struct Lanes {
  std::vector<TilesOfSequence> tiles;

  int top() const {
    int most = 0;
    for (const TilesOfSequence& each : tiles) most = std::max(most, each.top);
    return most;
  }
  template <class Count>
  int sum(const Count& count) const {
    int all = 0;
    for (const TilesOfSequence& each : tiles) all += count(each);
    return all;
  }
  template <class Count, class Above>
  TileOfChunk find(int place, const Count& count, const Above& above) const {
    for (size_t lane = 0; lane < tiles.size(); ++lane) {
      const int counted = count(tiles[lane]);
      if (place < counted) return {static_cast<int>(lane), place + above(tiles[lane])};
      place -= counted;
    }
    CHECK(false);
    return {};
  }
};

// A batch in chunks, and who takes what of it.
struct Batch {
  bool grows;
  int heads_q;
  int heads_kv;
  int blocks;
  int keys_of_l2;
  int tiles_of_swizzle;
  int rows;                               // of a tile
  std::vector<std::vector<int>> lengths;  // of each chunk, of queries
  std::vector<long> keys;                 // that each block's tiles see, and what each takes beside
  std::vector<long> counts;               // tiles of each block
  int percent_of_keys = 100;              // that the longest tile sees, of a sequence's queries
  // Groups of as many rows as a level has that each head has of one, and a tile.
  int groups_of_level = 1;
  int groups_of_tile = 1;

  int levels_of(int length) const { return (length + rows - 1) / rows; }
  int tiles_of(int length) const {
    return (levels_of(length) * groups_of_level + groups_of_tile - 1) / groups_of_tile;
  }
  // With the least bound that the host may know.
  GroupsOfLevel by() const {
    int most = 0;
    for (const auto& chunk : lengths) {
      for (const int length : chunk) most = std::max(most, levels_of(length));
    }
    return {grows ? groups_of_level : 0, groups_of_tile, most};
  }

  Lanes lanes_of(const std::vector<int>& chunk) const {
    Lanes lanes;
    for (const int length : chunk) {
      lanes.tiles.push_back(TilesOfSequence::of(tiles_of(length), levels_of(length),
                                                length * percent_of_keys / 100, rows));
    }
    return lanes;
  }

  // Below the highest that a tile has groups of, by its rank, the longest first.
  int level_below(int rank) const { return rank * groups_of_tile / groups_of_level; }
  int keys_of(int length, int rank) const {
    return grows ? length - level_below(rank) * rows : length;
  }

  using Taken = std::map<std::tuple<size_t, int, int, int>, int>;  // chunk, lane, rank, head

  int heads_per_swizzle_of(const std::vector<int>& chunk) const {
    int keys_of_chunk = 0;
    for (const int length : chunk) keys_of_chunk += length;
    const int tiles = tiles_of_head(lanes_of(chunk)) * (heads_q / heads_kv);
    const int group =
        heads_per_swizzle(heads_kv, tiles, tiles_of_swizzle, keys_of_chunk, keys_of_l2) *
        (heads_q / heads_kv);
    CHECK(group > 0 && (group >= heads_q || group % (heads_q / heads_kv) == 0));
    return group;
  }

  // Swizzle groups of all chunks.
  long groups() const {
    long all = 0;
    for (const auto& chunk : lengths) {
      const int group = heads_per_swizzle_of(chunk);
      all += (heads_q + group - 1) / group;
    }
    return all;
  }

  static int tiles_of_head(const Lanes& lanes) {
    return lanes.sum([](const TilesOfSequence& each) { return each.count; });
  }

  // Where a walk through the tiles of a chunk is.
  struct Last {
    int group = 0;
    int level = INT32_MAX;
  };

  // Swizzle groups come one after another, in each the longest tiles first.
  void take(size_t chunk, const Lanes& lanes, int group, const TileOfChunk& tile, int head,
            Last* last, Taken* taken) const {
    const TilesOfSequence& of = lanes.tiles[static_cast<size_t>(tile.lane)];
    CHECK(tile.rank >= 0 && tile.rank < of.count && head >= 0 && head < heads_q);
    ++(*taken)[{chunk, tile.lane, tile.rank, head}];
    CHECK(head / group >= last->group);
    if (head / group > last->group) last->level = INT32_MAX;
    last->group = head / group;
    const int level = grows ? of.top - level_below(tile.rank) : of.top;
    CHECK(level <= last->level);
    last->level = level;
  }

  // Every tile is taken, once.
  void check_all(const Taken& taken) const {
    size_t want = 0;
    for (const auto& chunk : lengths) {
      for (const int length : chunk) {
        want += static_cast<size_t>(tiles_of(length) * heads_q);
      }
    }
    CHECK(taken.size() == want);
    CHECK(
        std::all_of(taken.begin(), taken.end(), [](const auto& each) { return each.second == 1; }));
  }

  // As blocks that take one tile each, whoever is free.
  void walk_in_turn() const {
    Taken taken;
    TilesInTurn tiles;
    int number = 0;
    CHECK(tiles.passes(number));
    for (size_t chunk = 0; chunk < lengths.size(); ++chunk) {
      const Lanes lanes = lanes_of(lengths[chunk]);
      const int group = heads_per_swizzle_of(lengths[chunk]);
      const int all = tiles_of_head(lanes) * heads_q;
      tiles.begin_chunk(tiles_of_head(lanes), heads_q, group);
      Last last;
      for (int i = 0; i < all; ++i, ++number) {
        CHECK(!tiles.passes(number));
        TileOfChunk tile = {};
        int head = 0;
        tiles.at(lanes, by(), number, &tile, &head);
        take(chunk, lanes, group, tile, head, &last, &taken);
      }
      CHECK(tiles.passes(number));
    }
    check_all(taken);
  }

  void walk() {
    Taken taken;
    keys.assign(static_cast<size_t>(blocks), 0);
    counts.assign(static_cast<size_t>(blocks), 0);
    for (int block = 0; block < blocks; ++block) {
      TilesOfChunks tiles(block);
      for (size_t chunk = 0; chunk < lengths.size(); ++chunk) {
        const Lanes lanes = lanes_of(lengths[chunk]);
        const int group = heads_per_swizzle_of(lengths[chunk]);
        tiles.begin_chunk(lanes, tiles_of_head(lanes), group);
        TileOfChunk tile = {};
        int head = 0;
        Last last;
        while (tiles.next(lanes, by(), heads_q, blocks, &tile, &head)) {
          take(chunk, lanes, group, tile, head, &last, &taken);
          const auto b = static_cast<size_t>(block);
          keys[b] += keys_of(lengths[chunk][static_cast<size_t>(tile.lane)], tile.rank) + rows;
          ++counts[b];
        }
        CHECK(!tiles.next(lanes, by(), heads_q, blocks, &tile, &head));
      }
    }
    check_all(taken);
  }
};

void every_tile_is_taken_once() {
  for (int i = 0; i < 600; ++i) {
    Batch batch = {};
    const int group = from(1, 4);
    batch.grows = from(0, 1) == 1;
    batch.heads_kv = from(1, 5);
    batch.heads_q = group * batch.heads_kv;
    batch.blocks = from(0, 3) == 0 ? 132 : from(1, 40);
    batch.keys_of_l2 = from(0, 4000);
    batch.tiles_of_swizzle = from(0, 3) == 0 ? 0 : batch.blocks * from(1, 8);
    batch.rows = 64 * from(1, 3);
    if (from(0, 1) == 0) {
      batch.rows = 64;
      batch.groups_of_level = from(1, 9);
      batch.groups_of_tile = 3;
    }
    batch.percent_of_keys = from(0, 1) == 0 ? 100 : from(0, 300);
    const int chunks = from(1, 4);
    for (int c = 0; c < chunks; ++c) {
      std::vector<int> lengths;
      const int most = from(0, 3) == 0 ? 3000 : 300;
      const int count = c + 1 < chunks ? kSequencesPerChunk : from(1, kSequencesPerChunk);
      for (int s = 0; s < count; ++s) lengths.push_back(from(0, 3) == 0 ? 0 : from(0, most));
      batch.lengths.push_back(lengths);
    }
    batch.walk();
    batch.walk_in_turn();
    // Blocks take as many tiles, but for one of each group's round that is not full.
    const auto [least, most] = std::minmax_element(batch.counts.begin(), batch.counts.end());
    CHECK(*most - *least <= batch.groups());
  }
}

// What blocks wait for the one with the most, of the time that it takes.
double idle(Batch batch) {
  batch.walk();
  long sum = 0;
  for (const long each : batch.keys) sum += each;
  return 1.0 - static_cast<double>(sum) / batch.blocks /
                   static_cast<double>(*std::max_element(batch.keys.begin(), batch.keys.end()));
}

void blocks_have_as_much_to_do() {
  Batch batch = {true, 16, 16, 132, 1 << 16, 8 * 132, 128, {}, {}, {}};
  batch.lengths = {std::vector<int>(16, 1024)};
  CHECK(idle(batch) < 0.025);
  batch.lengths = {{16384}};
  CHECK(idle(batch) < 0.01);
  batch.lengths = {{12000, 3000, 800, 300, 200, 50, 30, 4}};
  CHECK(idle(batch) < 0.035);
  batch.lengths.clear();
  for (int chunk = 0; chunk < 8; ++chunk) {
    std::vector<int> lengths;
    for (int i = 0; i < kSequencesPerChunk; ++i) lengths.push_back(from(1, 512));
    batch.lengths.push_back(lengths);
  }
  CHECK(idle(batch) < 0.05);
  batch.grows = false;
  CHECK(idle(batch) < 0.04);
  // Tiles of three groups of the eight heads that a KV head has.
  Batch packed = {true, 8, 8, 132, 1 << 16, 8 * 132, 64, {}, {}, {}};
  packed.groups_of_level = 8;
  packed.groups_of_tile = 3;
  packed.lengths = {std::vector<int>(16, 2048)};
  CHECK(idle(packed) < 0.025);
  packed.lengths = batch.lengths;
  CHECK(idle(packed) < 0.05);
  packed.lengths = {{16384, 3000, 800, 300, 200, 50, 30, 4}};
  CHECK(idle(packed) < 0.035);
  // Few tiles of a chunk: the next ones are of other blocks.
  batch.heads_q = batch.heads_kv = 1;
  batch.lengths.assign(66, std::vector<int>(kSequencesPerChunk, 100));
  CHECK(idle(batch) == 0);
}

void swizzle_groups_fit_the_l2() {
  for (int i = 0; i < 20000; ++i) {
    const int heads = from(1, 64);
    const int tiles = from(0, 3) == 0 ? 0 : from(0, 2000);
    const int wanted = from(0, 2000);
    const int keys = from(0, 1 << 20);
    const int room = from(0, 1 << 22);
    const auto is_too_much = [&](int64_t of_heads) {
      return of_heads * std::max(tiles, 1) > wanted || of_heads * std::max(keys, 1) > room;
    };
    const int group = heads_per_swizzle(heads, tiles, wanted, keys, room);
    CHECK(group >= 1 && group <= heads);
    // One head may have too much already.
    CHECK(group == 1 || !is_too_much(group));
    // Not one head less than there may be, but for groups of about one size.
    const int groups = (heads + group - 1) / group;
    CHECK(groups == 1 || is_too_much((heads + groups - 2) / (groups - 1)));
  }
}

// A box of a ragged map lands only on the rows of its sequence, each in its place. test_launch
// checks the maps themselves.
void boxes_are_cut_at_their_sequence() {
  constexpr int kMost = RaggedRow::kMost;
  for (int i = 0; i < 200000; ++i) {
    const int rows = from(1, 400);
    const int begin = from(0, rows - 1);
    const int length = from(1, rows - begin);
    const int box = 16 * from(1, 8);
    // Where a box begins before row 0 it ends before the length, or holds no row at all.
    int row = from(-2 * box, length + box);
    if (row < 0 && row + box > length) row = -box;
    const RaggedRow at = RaggedRow::at(row, begin, length);
    CHECK(at.base >= 0 && at.base - kMost < rows && at.wrap == kMost);
    for (int r = 0; r < box; ++r) {
      const bool inside = at.row + r >= 0 && at.row + r < kMost;
      CHECK(inside == (row + r >= 0 && row + r < length));
      if (inside) CHECK(at.row + r - kMost + at.base == begin + row + r);  // `wrap` takes them back
    }
  }
  // The largest numbers fit.
  const RaggedRow last = RaggedRow::at(kMost / 2 - 1, kMost / 2 - 2, kMost / 2);
  CHECK(last.row == kMost - 1 && last.base == kMost - 2);
  const RaggedRow behind = RaggedRow::at(kMost / 2 + 128, kMost - 3, 1);
  CHECK(behind.row == kMost + kMost / 2 + 127 && behind.base == kMost - 2);
  const RaggedRow before = RaggedRow::at(-128, kMost - 3, 1);
  CHECK(before.row == -128 && before.base == 2 * (kMost - 2) + 1);
}

// Pieces of pages make up a step: each key once, where it is, and zeros elsewhere.
void steps_are_made_of_pieces_of_pages() {
  for (int i = 0; i < 100000; ++i) {
    const int page_size = from(0, 3) == 0 ? from(1, 9) : from(1, 300);
    const Divisor by_page_size = Divisor::of(static_cast<uint32_t>(page_size));
    const int begin = from(0, 500);
    const int length = from(1, 700);
    const int step = 64 * from(1, 2);
    const int first = from(-step - 5, length + 20);
    int key = first;
    while (key < first + step) {
      const PagePiece piece = PagePiece::at(by_page_size, key, first + step, begin, length);
      CHECK(piece.rows > 0 && key + piece.rows <= first + step);
      for (int row = 0; row < piece.rows; ++row) {
        const bool exists = key + row >= 0 && key + row < length;
        CHECK((piece.page != PagePiece::kNoPage) == exists);
        if (!exists) continue;
        CHECK(piece.page == (begin + key + row) / page_size);
        CHECK(piece.row + row == (begin + key + row) % page_size);
      }
      // No piece could be longer.
      const int next = key + piece.rows;
      const bool exists = next >= 0 && next < length;
      CHECK(next == first + step || exists != (piece.page != PagePiece::kNoPage) ||
            (begin + next) % page_size == 0);
      key = next;
    }
  }
}

}  // namespace
}  // namespace flashmoe::sm90

int main() {
  flashmoe::sm90::every_tile_is_taken_once();
  flashmoe::sm90::blocks_have_as_much_to_do();
  flashmoe::sm90::swizzle_groups_fit_the_l2();
  flashmoe::sm90::boxes_are_cut_at_their_sequence();
  flashmoe::sm90::steps_are_made_of_pieces_of_pages();
  return 0;
}
