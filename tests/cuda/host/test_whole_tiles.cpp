// Ranges of whole tiles, beside brute force.
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/attention/sm89_decode/whole_tiles.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::sm89_decode {
namespace {

std::mt19937 random_numbers(1);

int from(int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(random_numbers);
}

struct Tiles {
  int count;
  int units;
};

// Each tile is in the range that would have its middle if all were equal, and none is cut.
void check_ranges(const std::vector<Tiles>& sequences, int blocks) {
  std::vector<int64_t> before;
  std::vector<int64_t> tiles;  // where each begins, and the end of all
  int64_t total = 0;
  int most = 0;
  for (const Tiles& each : sequences) {
    before.push_back(total);
    for (int i = 0; i < each.count; ++i, total += each.units) tiles.push_back(total);
    if (each.count > 0 && each.units > most) most = each.units;
  }
  if (total < blocks) return;
  tiles.push_back(total);
  size_t tile = 0;
  for (int block = 0; block < blocks; ++block) {
    while (tile + 1 < tiles.size() &&
           (tiles[tile] + tiles[tile + 1]) * blocks < 2 * total * block) {
      ++tile;
    }
    size_t s = 0;
    while (s + 1 < before.size() && before[s + 1] <= total * block / blocks) ++s;
    const int64_t begin = whole_begin(total, blocks, block, before[s], sequences[s].units);
    CHECK(begin == tiles[tile]);
    CHECK((begin - total * block / blocks) * 2 <= most + 2);
    CHECK((total * block / blocks - begin) * 2 <= most + 2);
  }
}

void test_every_tile_is_in_the_range_that_has_its_middle() {
  for (int i = 0; i < 3000; ++i) {
    std::vector<Tiles> sequences;
    const int equal = from(1, 300);
    for (int n = from(1, 40); n > 0; --n) {
      sequences.push_back({from(0, 4) == 0 ? 0 : from(1, 16), i % 2 == 0 ? equal : from(1, 300)});
    }
    check_ranges(sequences, from(1, 140));
  }
  check_ranges({{128, 40}}, 132);                              // a tile a range, and four without
  check_ranges({{1, int32_t{1} << 26}, {16384, 60000}}, 132);  // 2^31 units and more
}

void test_equal_tiles_make_even_ranges() {
  // 256 tiles among 132 ranges are two a range at most, as many as among 128.
  const int64_t total = 256 * 72;
  int64_t longest = 0;
  for (int block = 0; block < 132; ++block) {
    const int64_t begin = whole_begin(total, 132, block, 0, 72);
    const int64_t end = block + 1 < 132 ? whole_begin(total, 132, block + 1, 0, 72) : total;
    CHECK(begin <= end);
    if (end - begin > longest) longest = end - begin;
  }
  CHECK(longest == 2 * 72);
  CHECK(longest <= most_whole_units(total, 132, 8));
}

void test_what_is_too_long() {
  CHECK(most_whole_units(132 * 160, 132, 8) == 160 + 5 + 8);
  CHECK(most_whole_units(132 * 160 + 1, 132, 0) == 161 + 6);
  CHECK(most_whole_units(5, 5, 0) == 2);
}

}  // namespace
}  // namespace flashmoe::sm89_decode

int main() {
  using namespace flashmoe::sm89_decode;
  test_every_tile_is_in_the_range_that_has_its_middle();
  test_equal_tiles_make_even_ranges();
  test_what_is_too_long();
  return 0;
}
