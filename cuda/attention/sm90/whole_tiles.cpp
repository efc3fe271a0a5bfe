// Whole tiles of one query head: estimate, plan, parameters and launch.
#include <algorithm>
#include <climits>
#include <iterator>

#include "cuda/attention/sm90/cost.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/l2_swizzle.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/schedules.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {
namespace {

bool encode_maps(const AttentionProblem& p, const Entry& entry, Kept<TileParams>* kept) {
  const void* const k = mapped_keys(p, p.k.data);
  const void* const v = mapped_keys(p, p.v.data);
  const auto encode = [&](CUtensorMap* map, const void* data, const auto& view, int64_t dim,
                          int64_t seq, int64_t heads, int rows) {
    return encode_map(map, view.dtype, data,
                      rows_map(view.strides, dim, seq, heads, p.batch, entry.box_columns, rows));
  };
  TileParams& params = kept->params;
  const void* const mapped[] = {p.q.data, k, v, p.out.data};
  std::copy(std::begin(mapped), std::end(mapped), kept->mapped);
  return encode(&params.q, p.q.data, p.q, p.dim, p.seq_q, p.heads_q, entry.box_rows) &&
         encode(&params.k, k, p.k, p.dim, p.seq_k, p.heads_kv, entry.tile_k) &&
         encode(&params.v, v, p.v, p.dim_v, p.seq_k, p.heads_kv, entry.tile_k) &&
         encode(&params.out, p.out.data, p.out, p.dim_v, p.seq_q, p.heads_q, entry.box_rows);
}

bool move_maps(const AttentionProblem& p, Kept<TileParams>* kept) {
  return move_inputs(p, kept) && move_map(&kept->params.out, &kept->mapped[3], p.out.data);
}

void fill_params(const AttentionProblem& p, const Entry& entry, int64_t blocks,
                 const DeviceFacts& facts, TileParams* params) {
  fill_tensors(p, params);
  const bool ramp = longest_tiles_first(p);
  const int64_t tiles_per_head = (p.seq_q + entry.tile_q - 1) / entry.tile_q;
  params->first_row = ramp ? -static_cast<int32_t>(spare_rows(p, entry, tiles_per_head)) : 0;
  params->longest_tiles_first = ramp ? 1 : 0;
  params->kv_block_alignment = static_cast<int32_t>(
      kv_block_alignment_of_tiles(p, entry.tile_k, params->first_row, entry.tile_q));
  const int64_t swizzle_heads = heads_per_swizzle(p, entry, tiles_per_head, facts);
  fill_swizzle(p, tiles_per_head, swizzle_heads, params);
  params->slots_per_swizzle = static_cast<int32_t>(swizzle_heads * tiles_per_head % blocks);
}

}  // namespace

flashmoe_status estimate_whole_tiles(const AttentionProblem& problem, const Work& work,
                                     const Entry* entry, const DeviceFacts& facts,
                                     WholeTiles* whole_tiles, const Reason& reason) {
  const int64_t tiles_per_head = (problem.seq_q + entry->tile_q - 1) / entry->tile_q;
  const int64_t heads = problem.batch * problem.heads_q;
  // The kernel counts rounds of blocks beyond the last tile.
  if (heads > INT_MAX / 2 || tiles_per_head * heads > INT_MAX / 2) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^30 tiles of query rows");
  }
  // The kernel is persistent: at most one block per multiprocessor, which holds one.
  *whole_tiles = {entry, std::min<int64_t>(tiles_per_head * heads, facts.multiprocessors),
                  kUncounted * tile_microseconds(work, tile_speed(entry->dim), facts)};
  return FLASHMOE_OK;
}

flashmoe_status plan_whole_tiles(const AttentionProblem& problem, const WholeTiles& whole_tiles,
                                 const DeviceFacts& facts, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*whole_tiles.entry, device_id, facts, &arch, reason));
  plan_launch(*whole_tiles.entry, device_id, "a", whole_tiles.blocks, plan);
  plan->info.microseconds = whole_tiles.microseconds;
  plan->division_bytes = whole_tiles.division_bytes;
  return FLASHMOE_OK;
}

flashmoe_status launch_whole_tiles(const AttentionProblem& problem, const Plan& plan,
                                   void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const int device_id = problem.device.device_id;
  Prepared<Kept<TileParams>> kept(plan.detail);
  if (!kept.ready() || !move_maps(problem, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes every map
    const DeviceFacts* facts = nullptr;
    FLASHMOE_TRY(read_device_facts(device_id, &facts, Reason()));
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(problem, entry, &*kept); }));
    fill_params(problem, entry, plan.info.launches[0].grid[0], *facts, &kept->params);
    kept.set_ready(true);
  }
  return launch_planned(plan, 0, &kept->params, stream);
}

}  // namespace flashmoe::sm90
