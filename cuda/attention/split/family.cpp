// The split family: which kernel and split of the keys serve a problem, and with what parameters it
// is launched.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/combine.h"
#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/choose.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/l2_swizzle.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/split/entry.h"
#include "cuda/attention/split/stream_k.h"
#include "cuda/attention/tensor_map.h"

namespace flashmoe::split {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/split/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

using Params = sm90::SplitParams;

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/split/entries.inc"
#undef FLASHMOE_ENTRY
};

// Stream-K over so many blocks. Where these do not split tiles evenly, of all that the device holds
// if the workspace takes their parts: the estimate counts two for every block, and cuts that fall
// between tiles make none. Dealt to as many blocks as have some, which is all that a plan keeps,
// they come out the same, and the launch finds them.
StreamK stream_k_within(const AttentionProblem& problem, const PackedTiles& tiles,
                        const Entry& entry, int64_t blocks, const DeviceFacts& facts) {
  const auto deal = [&](int64_t most) {
    StreamK stream_k = known_stream_k(problem, tiles, entry.tile_k, most);
    while (stream_k.blocks < most) {
      most = stream_k.blocks;
      stream_k = known_stream_k(problem, tiles, entry.tile_k, most);
    }
    return stream_k;
  };
  const int64_t most = std::min<int64_t>(facts.multiprocessors, sm90::kMostStreamKBlocks);
  if (blocks % tiles.tiles != 0) {
    const StreamK stream_k = deal(most);
    if (static_cast<double>(stream_k.places) * entry.part_bytes <= kMostWorkspaceBytes)
      return stream_k;
  }
  return deal(std::min(blocks, most));
}

flashmoe_status plan(const AttentionProblem& problem, AttentionPlan* plan, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  const Entry* entry = nullptr;
  FLASHMOE_TRY(sm90::choose_entry(kEntries, problem, &facts, &entry, reason));
  const int64_t heads = problem.heads_q / problem.heads_kv;
  if (problem.heads_kv > 1 && problem.q_strides.head >= kMaxStrideBytes / 2 / heads) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "query heads of one KV head that take 2^40 bytes or more, which the copy engine "
                  "cannot walk");
  }
  const Work work = work_of(problem);
  const Products speed = products(*facts, static_cast<int>(problem.dim));
  const SplitKernel kernel = {entry->tile_k, entry->part_bytes, entry->dim + entry->dim_v};
  const auto [groups, split] = best_tile_split(problem, work, entry->groups, kernel, speed, *facts);
  const PackedTiles tiles = packed_tiles(problem, groups);
  // The kernel counts rounds of blocks past the last tile.
  if (problem.heads_q > INT_MAX / 2 || tiles.heads > INT_MAX / 2 || tiles.tiles > INT_MAX / 2) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^30 tiles of query rows");
  }
  if (!problem.named && split.microseconds > tile_microseconds(work, speed, *facts)) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "many rows, at which tiles of one head are faster (named, it serves them)");
  }
  int arch = 0;
  // Persistent: no more blocks than multiprocessors, each of which holds one.
  int64_t blocks = std::min<int64_t>(tiles.tiles, facts->multiprocessors);
  if (split.blocks > 0) {
    const StreamK stream_k = stream_k_within(problem, tiles, *entry, split.blocks, *facts);
    if (stream_k.places > 0) {
      FLASHMOE_TRY(load_kernel(entry->combine, device_id, *facts, &arch, reason));
      blocks = stream_k.blocks;
      plan->parts = stream_k.places;
      plan->info.workspace_bytes =
          static_cast<uint64_t>(stream_k.places) * static_cast<uint64_t>(entry->part_bytes);
    }
  }
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  plan_launch(*entry, arch, "a", blocks, plan);
  plan->info.tile_q = static_cast<int32_t>(groups * kRowsPerGroup);
  plan->entry = entry;
  plan->tiles_per_head = static_cast<int32_t>(tiles.tiles_per_head);
  plan->programmatic = true;  // sm_90a has it whatever made the code
  return FLASHMOE_OK;
}

bool encode_maps(const AttentionProblem& p, const Entry& entry, const PackedTiles& tiles,
                 Params* params) {
  // Without keys their tensors may be null, which a map is not; none is read then.
  const void* k = p.seq_k > 0 ? p.k : p.q;
  const void* v = p.seq_k > 0 ? p.v : p.q;
  const int64_t heads = p.heads_q / p.heads_kv;
  const MapShape q = {
      5,
      {p.dim, heads, p.seq_q, p.heads_kv, p.batch},
      {1, p.q_strides.head, p.q_strides.seq, p.q_strides.head * heads, p.q_strides.batch},
      {entry.box_columns, static_cast<int>(tiles.packed_heads),
       static_cast<int>(tiles.queries_per_group), 1, 1}};
  return encode_map(&params->q, p.dtype, p.q, q) &&
         encode_map(&params->k, p.dtype, k,
                    rows_map(p.k_strides, p.dim, p.seq_k, p.heads_kv, p.batch, entry.box_columns,
                             entry.tile_k)) &&
         encode_map(&params->v, p.dtype, v,
                    rows_map(p.v_strides, p.dim_v, p.seq_k, p.heads_kv, p.batch, entry.box_columns,
                             entry.tile_k));
}

void fill_params(const AttentionProblem& p, const AttentionPlan& plan, const PackedTiles& tiles,
                 Params* params) {
  sm90::fill_tensors(p, params);
  params->first_row = 0;
  params->longest_tiles_first = sm90::longest_tiles_first(p) ? 1 : 0;
  params->kv_block_alignment = 0;  // each tile has its own
  params->heads = static_cast<int32_t>(tiles.heads);
  params->tiles_per_head = plan.tiles_per_head;
  params->heads_per_swizzle = 1;
  params->packed_heads = static_cast<int32_t>(tiles.packed_heads);
  params->packed_heads_reciprocal = (65536 + params->packed_heads - 1) / params->packed_heads;
  params->queries_per_group = static_cast<int32_t>(tiles.queries_per_group);
  params->groups_per_tile = static_cast<int32_t>(tiles.groups_per_tile);
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  params->chunks = static_cast<int32_t>(tiles.chunks);
  params->by_tiles_per_head = Divisor::of(static_cast<uint32_t>(plan.tiles_per_head));
  params->by_heads_kv = Divisor::of(static_cast<uint32_t>(p.heads_kv));
  params->by_chunks = Divisor::of(static_cast<uint32_t>(tiles.chunks));
  params->stream_k_blocks = 0;
  if (plan.parts == 0) return;
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  const StreamK stream_k = known_stream_k(p, tiles, entry.tile_k, plan.info.grid[0]);
  params->stream_k_blocks = stream_k.blocks;
  std::copy(stream_k.starts.begin(), stream_k.starts.end(), params->starts);
  std::copy(stream_k.cuts.begin(), stream_k.cuts.end(), params->cuts);
  params->cut_tiles = stream_k.cut_tiles;
  params->rows = params->groups_per_tile * kRowsPerGroup;
  params->combine_workers_log2 = combine_workers_log2(
      stream_k.most_parts, int64_t{stream_k.cut_tiles} * params->rows, entry.dim_v / 4);
}

flashmoe_status find_params(const AttentionProblem& problem, const AttentionPlan& plan,
                            Params** found) {
  return KnownParams<Params>::find(problem, plan, found, [&](Params* params) {
    const Entry& entry = *static_cast<const Entry*>(plan.entry);
    const PackedTiles tiles = packed_tiles(problem, plan.info.tile_q / kRowsPerGroup);
    if (!encode_maps(problem, entry, tiles, params)) return false;
    fill_params(problem, plan, tiles, params);
    return true;
  });
}

flashmoe_status launch(const AttentionProblem& problem, const AttentionPlan& plan, void* workspace,
                       void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  Params* params = nullptr;
  FLASHMOE_TRY(find_params(problem, plan, &params));
  const uint64_t part_rows = plan.info.workspace_bytes / static_cast<uint64_t>(entry.part_bytes) *
                             static_cast<uint64_t>(entry.tile_q);
  const int units = entry.dim_v / 4;
  params->part_outs = static_cast<float4*>(workspace);
  params->part_statistics =
      reinterpret_cast<float2*>(params->part_outs + part_rows * static_cast<uint64_t>(units));
  FLASHMOE_TRY(launch_kernel(entry, problem, plan, params, stream));
  if (plan.parts == 0) return FLASHMOE_OK;
  const PartsToCombine parts = {params->rows, params->cut_tiles, units,
                                params->combine_workers_log2};
  return launch_combine(entry.combine, problem, plan, parts, params, stream);
}

}  // namespace
}  // namespace flashmoe::split

namespace flashmoe {

const AttentionFamily kSplitAttention = {"split", FLASHMOE_DEVICE_CUDA, &split::plan,
                                         &split::launch};

}  // namespace flashmoe
