// The L2 swizzle of sm_90's launches, beside a walk over every tile as the kernel makes it.
#include "cuda/attention/sm90/l2_swizzle.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

struct Shape {
  int64_t batch, seq_q, seq_k, heads_q, heads_kv, dim;
  int64_t right_offset;  // bottom right: seq_k - seq_q
};

struct Launch {
  AttentionProblem problem = {};
  Entry entry = {};
  DeviceFacts facts = {};
  int64_t tiles_per_head;

  explicit Launch(const Shape& shape, int multiprocessors = kMultiprocessors) {
    problem.k.dtype = problem.v.dtype = Dtype::kBFloat16;
    problem.batch = shape.batch;
    problem.seq_q = shape.seq_q;
    problem.seq_k = shape.seq_k;
    problem.heads_q = shape.heads_q;
    problem.heads_kv = shape.heads_kv;
    problem.dim = problem.dim_v = shape.dim;
    problem.bounded_right = true;
    problem.right_offset = shape.right_offset;
    entry.tile_q = shape.dim <= 64 ? 192 : 128;
    entry.tile_k = shape.dim <= 128 ? 128 : shape.dim == 192 ? 96 : 64;
    entry.box_rows = 64;
    facts.multiprocessors = multiprocessors;
    facts.l2_bytes = int64_t{60} << 20;
    tiles_per_head = (shape.seq_q + entry.tile_q - 1) / entry.tile_q;
  }

  int64_t heads() const { return problem.batch * problem.heads_q; }
  int64_t blocks() const {
    return std::min<int64_t>(tiles_per_head * heads(), facts.multiprocessors);
  }
  int64_t most(int64_t swizzle) const {
    return most_steps(problem, entry, tiles_per_head, blocks(), swizzle);
  }
  int64_t choice() const { return heads_per_swizzle(problem, entry, tiles_per_head, facts); }
};

// By the kernel's Steps: those of a tile, row by row. The first step of a group, from the right, is
// that of each of its rows.
int64_t steps_of_tile(const Launch& launch, int64_t first_row) {
  constexpr int64_t kGroup = 64;
  const AttentionProblem& p = launch.problem;
  const int64_t keys = launch.entry.tile_k;
  const int64_t shift =
      kv_block_alignment_of_tiles(p, launch.entry.tile_k, first_row, launch.entry.tile_q);
  CHECK(shift >= 0 && shift < keys);
  int64_t steps = 0;
  int64_t step_of_group = -1;
  for (int64_t i = 0; i < launch.entry.tile_q; ++i) {
    const int64_t row = first_row + i;
    if (i % kGroup == 0) step_of_group = -1;
    if (row < 0 || row >= p.seq_q) continue;
    const int64_t end = std::min(p.seq_k, row + p.right_offset + 1);
    if (end <= 0) continue;
    const int64_t step = (end - 1 + shift) / keys;
    CHECK(step_of_group == -1 || step_of_group == step);
    step_of_group = step;
    steps = std::max(steps, step + 1);
  }
  return steps;
}

// Steps of each block and a start for each of its tiles, by the kernel's TileScheduler, Tile::at
// and Steps.
std::vector<int64_t> walk(const Launch& launch, int64_t heads_per_swizzle) {
  const int64_t blocks = launch.blocks();
  const int64_t tiles = launch.tiles_per_head * launch.heads();
  const int64_t swizzle = launch.tiles_per_head * heads_per_swizzle;
  const int64_t first_row = -spare_rows(launch.problem, launch.entry, launch.tiles_per_head);
  std::vector<int64_t> steps(static_cast<size_t>(blocks), 0);
  std::vector<int> walked(static_cast<size_t>(tiles), 0);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t first = 0; first < tiles; first += swizzle) {
      const int64_t end = std::min(first + swizzle, tiles);
      const int64_t turn = (block + blocks - first % blocks) % blocks;
      bool forwards = true;
      for (int64_t round = first; round < end; round += blocks, forwards = !forwards) {
        const int64_t position = round + (forwards ? turn : blocks - 1 - turn);
        if (position >= end) continue;
        ++walked[static_cast<size_t>(position)];
        const int64_t held = (end - first) / launch.tiles_per_head;
        const int64_t tile = launch.tiles_per_head - 1 - (position - first) / held;
        const int64_t row = first_row + tile * launch.entry.tile_q;
        steps[static_cast<size_t>(block)] += 1 + steps_of_tile(launch, row);
      }
    }
  }
  CHECK(std::all_of(walked.begin(), walked.end(), [](int times) { return times == 1; }));
  return steps;
}

int64_t longest_of(const std::vector<int64_t>& steps) {
  return *std::max_element(steps.begin(), steps.end());
}

// What blocks wait for the one with the most, of the time that it takes.
double idle(const Launch& launch, int64_t heads_per_swizzle) {
  const std::vector<int64_t> steps = walk(launch, heads_per_swizzle);
  int64_t sum = 0;
  for (const int64_t each : steps) sum += each;
  return 1.0 - static_cast<double>(sum) / static_cast<double>(steps.size()) /
                   static_cast<double>(longest_of(steps));
}

void the_deal_is_the_kernels_walk() {
  std::mt19937 random(0);
  const auto from = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t group = from(1, 4);
    const int64_t heads_kv = from(1, 9);
    const int64_t dims[] = {64, 128, 192, 256};
    Shape shape = {
        from(1, 5), from(1, 2500), from(0, 2500), group * heads_kv, heads_kv, dims[from(0, 3)], 0};
    shape.right_offset = from(-shape.seq_q, shape.seq_k);
    const Launch launch(shape, static_cast<int>(from(1, kMostBlocks)));
    const int64_t swizzle = group * from(1, shape.batch * heads_kv);
    CHECK(launch.most(swizzle) == longest_of(walk(launch, swizzle)));
    const int64_t chosen = launch.choice();
    CHECK(chosen >= group && chosen % group == 0 && chosen <= launch.heads());
    CHECK(launch.choice() == chosen);
  }
}

// Shapes of which the largest swizzle groups that even out lengths left blocks idle: heads of those
// groups, and the part of the time that was idle.
void blocks_are_left_with_about_the_same() {
  struct Better {
    Shape shape;
    int64_t heads_before;
    double idle_before;
    double idle_now;
  };
  const Better cases[] = {
      {{16, 1024, 1024, 32, 8, 128, 0}, 36, 0.0303, 0.0078},
      {{4, 4096, 4096, 16, 16, 128, 0}, 22, 0.0127, 0.0018},
      {{2, 8192, 8192, 16, 16, 128, 0}, 11, 0.0100, 0.0005},
      {{32, 512, 512, 32, 32, 64, 0}, 86, 0.0519, 0.0192},
      {{4, 4096, 4096, 8, 8, 256, 0}, 11, 0.0374, 0.0009},
  };
  for (const Better& each : cases) {
    const Launch launch(each.shape);
    CHECK(std::abs(idle(launch, each.heads_before) - each.idle_before) < 1e-4);
    CHECK(std::abs(idle(launch, launch.choice()) - each.idle_now) < 1e-4);
    CHECK(2 * launch.choice() >= each.heads_before);
  }
}

void where_there_is_nothing_to_choose() {
  Launch full({2, 1024, 1024, 4, 2, 128, 0});
  full.problem.bounded_right = false;
  CHECK(full.choice() == 1);  // tiles of one length
  Launch window({2, 1024, 1024, 4, 2, 128, 0});
  window.problem.bounded_left = true;
  CHECK(window.choice() == 1);
  CHECK(Launch({0, 1024, 1024, 4, 2, 128, 0}).choice() == 1);
  CHECK(Launch({2, 0, 1024, 4, 2, 128, 0}).choice() == 1);
  CHECK(Launch({1, 1024, 1024, 4, 1, 128, 0}).choice() == 4);  // a KV head is not divided
  // More blocks than are dealt to, and more rounds: the longest that fit, without a deal.
  CHECK(Launch({16, 1024, 1024, 32, 8, 128, 0}, kMostBlocks + 1).choice() == 64);
  CHECK(Launch({64, 512, 512, 32, 8, 128, 0}).choice() == 68);
  // Keys and values of one head alone are more than the L2 holds.
  CHECK(Launch({1, 1 << 20, 1 << 20, 8, 8, 128, 0}).choice() == 1);
}

}  // namespace
}  // namespace flashmoe::sm90

int main() {
  using namespace flashmoe::sm90;
  the_deal_is_the_kernels_walk();
  blocks_are_left_with_about_the_same();
  where_there_is_nothing_to_choose();
  return 0;
}
