// Split KV: tiles of all query heads of a KV head, whose keys several blocks share. Estimate, plan,
// parameters and launch.
#include <algorithm>
#include <climits>

#include "cuda/attention/combine.h"
#include "cuda/attention/sm90/cost.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/l2_swizzle.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90/schedules.h"
#include "cuda/attention/sm90/stream_k.h"
#include "cuda/attention/walkable.h"

namespace flashmoe::sm90 {

namespace {

// Stream-K over at most `blocks` blocks. If these do not split tiles evenly, it uses all blocks
// that the device holds, provided that the workspace has room for their parts: the estimate counts
// two parts per block, but cuts that fall between tiles make none. Then it deals again to the
// number of blocks that have steps, which is all that a plan keeps. The result is the same, so that
// the launch finds it again.
StreamK stream_k_within(const AttentionProblem& problem, const PackedTiles& tiles,
                        const Entry& entry, int64_t blocks, const DeviceFacts& facts) {
  const auto deal = [&](int64_t most) {
    StreamK stream_k = deal_stream_k(problem, tiles, entry.tile_k, most);
    while (stream_k.blocks < most) {
      most = stream_k.blocks;
      stream_k = deal_stream_k(problem, tiles, entry.tile_k, most);
    }
    return stream_k;
  };
  const int64_t most = std::min<int64_t>(facts.multiprocessors, kMostStreamKBlocks);
  if (blocks % tiles.tiles != 0) {
    const StreamK stream_k = deal(most);
    if (static_cast<double>(stream_k.places) * entry.part_bytes <= kMostWorkspaceBytes)
      return stream_k;
  }
  return deal(std::min(blocks, most));
}

PartsToCombine parts_of(const StreamK& stream_k, const PackedTiles& tiles, const Entry& entry) {
  const auto rows = static_cast<int32_t>(tiles.groups_per_tile * kRowsPerGroup);
  const int units = entry.dim_v / 4;
  return {rows, stream_k.cut_tiles, units,
          combine_workers_log2(stream_k.most_parts, int64_t{stream_k.cut_tiles} * rows, units)};
}

bool encode_maps(const AttentionProblem& p, const Entry& entry, const PackedTiles& tiles,
                 Kept<SplitParams>* kept) {
  const void* const k = mapped_keys(p, p.k.data);
  const void* const v = mapped_keys(p, p.v.data);
  const int64_t heads = p.heads_q / p.heads_kv;
  const MapShape q = {
      5,
      {p.dim, heads, p.seq_q, p.heads_kv, p.batch},
      {1, p.q.strides.head, p.q.strides.seq, p.q.strides.head * heads, p.q.strides.batch},
      {entry.box_columns, static_cast<int>(tiles.packed_heads),
       static_cast<int>(tiles.queries_per_group), 1, 1}};
  SplitParams& params = kept->params;
  kept->mapped[0] = p.q.data;
  kept->mapped[1] = k;
  kept->mapped[2] = v;
  return encode_map(&params.q, p.q.dtype, p.q.data, q) &&
         encode_map(&params.k, p.k.dtype, k,
                    rows_map(p.k.strides, p.dim, p.seq_k, p.heads_kv, p.batch, entry.box_columns,
                             entry.tile_k)) &&
         encode_map(&params.v, p.v.dtype, v,
                    rows_map(p.v.strides, p.dim_v, p.seq_k, p.heads_kv, p.batch, entry.box_columns,
                             entry.tile_k));
}

void fill_params(const AttentionProblem& p, const Plan& plan, const PackedTiles& tiles,
                 SplitParams* params) {
  fill_tensors(p, params);
  params->first_row = 0;
  params->longest_tiles_first = longest_tiles_first(p) ? 1 : 0;
  params->kv_block_alignment = 0;  // each tile has its own
  params->heads = static_cast<int32_t>(tiles.heads);
  params->tiles_per_head = static_cast<int32_t>(tiles.tiles_per_head);
  params->heads_per_swizzle = 1;
  params->packed_heads = static_cast<int32_t>(tiles.packed_heads);
  params->packed_heads_reciprocal = (65536 + params->packed_heads - 1) / params->packed_heads;
  params->queries_per_group = static_cast<int32_t>(tiles.queries_per_group);
  params->groups_per_tile = static_cast<int32_t>(tiles.groups_per_tile);
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  params->chunks = static_cast<int32_t>(tiles.chunks);
  params->by_tiles_per_head = Divisor::of(static_cast<uint32_t>(tiles.tiles_per_head));
  params->by_heads_kv = Divisor::of(static_cast<uint32_t>(p.heads_kv));
  params->by_chunks = Divisor::of(static_cast<uint32_t>(tiles.chunks));
  params->stream_k_blocks = 0;
  if (plan.info.launch_count == 1) return;
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const StreamK stream_k = deal_stream_k(p, tiles, entry.tile_k, plan.info.launches[0].grid[0]);
  const PartsToCombine parts = parts_of(stream_k, tiles, entry);
  params->stream_k_blocks = stream_k.blocks;
  std::copy(stream_k.starts.begin(), stream_k.starts.end(), params->starts);
  std::copy(stream_k.cuts.begin(), stream_k.cuts.end(), params->cuts);
  params->cut_tiles = stream_k.cut_tiles;
  params->rows = parts.rows;
  params->combine_workers_log2 = parts.workers_log2;
}

}  // namespace

flashmoe_status estimate_split_kv(const AttentionProblem& problem, const Work& work,
                                  const Entry* entry, const DeviceFacts& facts, SplitKv* split_kv,
                                  const Reason& reason) {
  const int64_t heads = problem.heads_q / problem.heads_kv;
  if (problem.heads_kv > 1 && problem.q.strides.head >= kMaxStrideBytes / 2 / heads) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "query heads of one KV head that take 2^40 bytes or more, which the copy engine "
        "cannot walk");
  }
  const SplitKernel kernel = {entry->tile_k, entry->part_bytes, entry->dim + entry->dim_v};
  const auto [groups, split] =
      best_tile_split(problem, work, entry->groups, kernel, tile_speed(entry->dim), facts);
  const PackedTiles tiles = packed_tiles(problem, groups);
  // The kernel counts rounds of blocks beyond the last tile.
  if (problem.heads_q > INT_MAX / 2 || tiles.heads > INT_MAX / 2 || tiles.tiles > INT_MAX / 2) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^30 tiles of query rows");
  }
  *split_kv = {entry, tiles, groups, split.blocks, kUncounted * split.microseconds};
  return FLASHMOE_OK;
}

flashmoe_status plan_split_kv(const AttentionProblem& problem, const SplitKv& split_kv,
                              const DeviceFacts& facts, Plan* plan, const Reason& reason) {
  const Entry& entry = *split_kv.entry;
  const PackedTiles& tiles = split_kv.tiles;
  const int device_id = problem.device.device_id;
  // The kernel is persistent: at most one block per multiprocessor, which holds one.
  int64_t blocks = std::min<int64_t>(tiles.tiles, facts.multiprocessors);
  StreamK stream_k = {};
  if (split_kv.blocks > 0) {
    stream_k = stream_k_within(problem, tiles, entry, split_kv.blocks, facts);
    if (stream_k.places > 0) blocks = stream_k.blocks;
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry, device_id, facts, &arch, reason));
  plan_launch(entry, device_id, "a", blocks, plan).tile_m =
      static_cast<int32_t>(split_kv.most_groups * kRowsPerGroup);
  plan->info.microseconds = split_kv.microseconds;
  if (stream_k.places > 0) {
    FLASHMOE_TRY(load_kernel(entry.combine, device_id, facts, &arch, reason));
    plan_combine(entry.combine, device_id, "a", parts_of(stream_k, tiles, entry), plan);
    plan->info.workspace_bytes =
        static_cast<uint64_t>(stream_k.places) * static_cast<uint64_t>(entry.part_bytes);
  }
  return FLASHMOE_OK;
}

flashmoe_status launch_split_kv(const AttentionProblem& problem, const Plan& plan, void* workspace,
                                void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const int device_id = problem.device.device_id;
  Prepared<Kept<SplitParams>> kept(plan.detail);
  if (!kept.ready() || !move_inputs(problem, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes every map
    const PackedTiles tiles = packed_tiles(problem, plan.info.launches[0].tile_m / kRowsPerGroup);
    FLASHMOE_TRY(flashmoe::encode_maps(entry.name, device_id,
                                       [&] { return encode_maps(problem, entry, tiles, &*kept); }));
    fill_params(problem, plan, tiles, &kept->params);
    kept.set_ready(true);
  }
  const uint64_t part_rows = plan.info.workspace_bytes / static_cast<uint64_t>(entry.part_bytes) *
                             static_cast<uint64_t>(entry.tile_q);
  SplitParams& params = kept->params;
  params.part_outs = static_cast<float4*>(workspace);
  params.part_statistics = reinterpret_cast<float2*>(
      params.part_outs + part_rows * static_cast<uint64_t>(entry.dim_v / 4));
  return launch_all(plan, &params, stream);
}

}  // namespace flashmoe::sm90
