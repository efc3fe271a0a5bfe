#include "cuda/attention/sm90/split_kv_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/ceil_div.h"
#include "cuda/attention/combine.h"

namespace flashmoe::sm90 {
namespace {

// Time of a call with kernels that split keys.
class SplitTimes {
 public:
  double most_steps;  // of a tile
  double steps;       // of a tile on average
  double step;        // microseconds

  SplitTimes(const Work& work, const PackedTiles& tiles, const SplitKernel& kernel,
             const TileSpeed& speed, const DeviceFacts& facts)
      : tiles_(static_cast<double>(tiles.tiles)),
        start_(speed.start + kSplitStart),
        memory_(memory_microseconds(work, facts, kSplitMemoryShare)),
        part_bytes_(work.heads_kv * work.rows * kernel.part_bytes / speed.rows),
        facts_(facts) {
    const auto groups = static_cast<double>(tiles.groups_per_tile);
    most_steps = std::max(1.0, ceil_of(work.most_keys, kernel.step_keys));
    step = speed.rows * kernel.step_keys * work.dims * 2 / speed.rate *
           share_of_step(groups, speed.rows / kRowsPerGroup);
    const double keys = work.keys + groups * static_cast<double>(tiles.queries_per_group);
    steps = std::min(keys / kernel.step_keys + 0.5, most_steps);
  }

  // Time from the run of the block with the most, and the average number of parts per tile.
  double of(double run, double parts) const {
    const double second = parts > 0 ? kSplitSecond + 2 * parts * part_bytes_ / kSplitPartRate : 0;
    return start_ + std::max(run, memory_) + kSplitUnhidden * std::min(run, memory_) + second;
  }

  // With several waves a block has long tiles and short ones.
  double of_whole_tiles() const {
    const double waves = ceil_of(tiles_, facts_.multiprocessors);
    const double run = waves * ((waves > 1 ? steps : most_steps) + kSplitSteps) * step;
    return of(run * share_of_clock(tiles_, facts_), 0);
  }

 private:
  double tiles_;
  double start_;
  double memory_;
  double part_bytes_;  // for one part per tile
  const DeviceFacts& facts_;
};

}  // namespace

PackedTiles packed_tiles(const AttentionProblem& problem, int64_t most_groups) {
  const int64_t heads = problem.heads_q / problem.heads_kv;
  PackedTiles made;
  // The copy engine cannot pack heads that a view of q repeats.
  made.chunks = problem.q.strides.head == 0 ? heads : ceil_div(heads, kRowsPerGroup);
  made.packed_heads = ceil_div(heads, made.chunks);
  made.queries_per_group = kRowsPerGroup / made.packed_heads;
  // Makes tiles as equal as possible.
  const int64_t groups = ceil_div(problem.seq_q, made.queries_per_group);
  made.groups_per_tile = ceil_div(groups, std::max<int64_t>(1, ceil_div(groups, most_groups)));
  made.tiles_per_head = groups == 0 ? 0 : ceil_div(groups, made.groups_per_tile);
  made.heads = problem.batch * problem.heads_kv * made.chunks;
  made.tiles = made.heads * made.tiles_per_head;
  return made;
}

KeySplit best_key_split(const Work& work, const PackedTiles& tiles, const SplitKernel& kernel,
                        const TileSpeed& speed, const DeviceFacts& facts) {
  const SplitTimes times(work, tiles, kernel, speed, facts);
  const double tile_count = static_cast<double>(tiles.tiles);
  const double most_places = kMostWorkspaceBytes / kernel.part_bytes;
  KeySplit best = {0, times.of_whole_tiles()};
  const double most_even = std::min<double>(facts.multiprocessors, most_places);
  for (double parts = 2; parts <= times.most_steps && tile_count * parts <= most_even; ++parts) {
    const double steps = ceil_of(times.most_steps, parts);
    const double microseconds = times.of((steps + kSplitSteps) * times.step, parts);
    if (microseconds < best.microseconds) {
      best = {static_cast<int64_t>(tile_count * parts), microseconds};
    }
  }
  if (ceil_of(tile_count, facts.multiprocessors) > kMostStreamKWaves) return best;
  // Every block but the last cuts a tile, unless its range ends where a tile does. A tile has one
  // part more than cuts.
  const bool alike = work.keys == work.most_keys;
  const auto cuts_of = [&](int64_t blocks) {
    return static_cast<double>(blocks - (alike ? std::gcd(tiles.tiles, blocks) : 1));
  };
  const auto places_of = [&](double cuts) { return cuts + std::min(cuts, tile_count); };
  auto blocks = static_cast<int64_t>(
      std::min(static_cast<double>(facts.multiprocessors), tile_count * times.most_steps));
  if (blocks > 1 && places_of(cuts_of(blocks)) > most_places) {
    const double most = std::max(most_places - tile_count + 1, most_places / 2 + 1);
    blocks = std::min(blocks, static_cast<int64_t>(most));
  }
  if (blocks < 2) return best;
  const double cuts = cuts_of(blocks);
  const double places = places_of(cuts);
  const double share = std::ceil((tile_count * times.steps + kSplitSteps * (tile_count + cuts)) /
                                 static_cast<double>(blocks));
  const double padding = std::max(1.0, kernel.dims / work.dims);
  const double more_parts = std::max(0.0, places / static_cast<double>(blocks) - 1);
  const double microseconds =
      kStreamKDoubt * (times.of(share * times.step * padding, places / tile_count) +
                       kStreamKMoreParts * kernel.dims * more_parts);
  if (microseconds < best.microseconds) best = {blocks, microseconds};
  return best;
}

TileSplit best_tile_split(const AttentionProblem& problem, const Work& work, int64_t most_groups,
                          const SplitKernel& kernel, const TileSpeed& speed,
                          const DeviceFacts& facts) {
  const PackedTiles largest = packed_tiles(problem, most_groups);
  TileSplit best = {most_groups, best_key_split(work, largest, kernel, speed, facts)};
  for (int64_t groups = most_groups - 1; groups > 0; --groups) {
    const PackedTiles tiles = packed_tiles(problem, groups);
    // Rounds of whole tiles do not even out masked ones.
    if (tiles.tiles > facts.multiprocessors && work.keys != work.most_keys) break;
    const double microseconds = SplitTimes(work, tiles, kernel, speed, facts).of_whole_tiles();
    if (kFewerGroupsDoubt * microseconds < best.split.microseconds) {
      best = {groups, {0, microseconds}};
    }
  }
  return best;
}

}  // namespace flashmoe::sm90
