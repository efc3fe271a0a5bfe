#include "cuda/attention/backward/launches.h"

#include <algorithm>

#include "cuda/tile/extents.h"

namespace flashmoe::attention_backward {
namespace {

constexpr int64_t kMostTiles = int64_t{1} << 30;

// An empty batch has no queries: gradients of sinks are zeros then.
int64_t queries_of(const AttentionProblem& p) { return p.batch > 0 ? p.seq_q : 0; }

// Without queries there is one empty tile: the prologue must set the ticket in any case.
int64_t tiles_q_of(const AttentionProblem& p, const Entry& entry) {
  return std::max<int64_t>(1, ceil_div(queries_of(p), int64_t{entry.tile_q}));
}

// Tiles of rows over all query heads. An empty batch has those of the prologue's one block.
int64_t tiles_of(const AttentionProblem& p, const Entry& entry) {
  return std::max<int64_t>(1, p.batch * p.heads_q * tiles_q_of(p, entry));
}

int64_t tiles_k_of(const AttentionProblem& p, const Entry& entry) {
  return ceil_div(p.seq_k, int64_t{entry.tile_k});
}

int64_t items_of(const AttentionProblem& p, const Entry& entry) {
  return p.batch * p.heads_kv * tiles_k_of(p, entry);
}

SplitItems split_items_of(const AttentionProblem& p, const Entry& entry) {
  const bool whole = is_bounded(p) || entry.split_floats == 0;
  return split_of(items_of(p, entry), tiles_q_of(p, entry), p.heads_q / p.heads_kv, whole);
}

}  // namespace

TileCounts tile_counts_of(const AttentionProblem& p, const Entry& entry) {
  return {tiles_of(p, entry), items_of(p, entry)};
}

bool is_bounded(const AttentionProblem& p) {
  if (!p.sequences.given) return p.bounded_left || p.bounded_right;
  const AttentionMask& mask = p.sequences.mask;
  return mask.causal != FLASHMOE_CAUSAL_NONE || mask.window != 0;
}

Layout layout_of(const AttentionProblem& p, const Entry& entry) {
  constexpr int64_t kAlignment = 128;
  const int64_t tiles = tiles_of(p, entry);
  Layout layout = {};
  const auto take = [&](int64_t bytes) {
    const int64_t begin = layout.bytes;
    layout.bytes += ceil_div(bytes, kAlignment) * kAlignment;
    return begin;
  };
  constexpr int64_t kFloat = sizeof(float);
  layout.row_lse = take(tiles * entry.tile_q * kFloat);
  layout.row_delta = take(tiles * entry.tile_q * kFloat);
  layout.turns = take(tiles * entry.dq_panels * int64_t{sizeof(uint32_t)});
  layout.ticket = take(sizeof(uint32_t));
  layout.split_turns = take(kBlocksOfLargest * int64_t{sizeof(uint32_t)});
  layout.unwanted = take(std::max(p.dim, p.dim_v) * dtype_bytes(p.q.dtype));
  layout.dq_sums = take(tiles * entry.tile_q * entry.dim * kFloat);
  const SplitItems split = split_items_of(p, entry);
  layout.split_sums =
      take((items_of(p, entry) - split.first) * (split.splits - 1) * entry.split_floats * kFloat);
  return layout;
}

int64_t row_bytes_of(const AttentionProblem& p) {
  return (p.dim + p.dim_v) * dtype_bytes(p.q.dtype) + p.dim * int64_t{sizeof(float)};
}

flashmoe_status check_lengths(const AttentionProblem& p, const Reason& reason) {
  if (p.seq_q <= kMaxSequence && p.seq_k <= kMaxSequence) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "sequence longer than 2^30");
}

flashmoe_status plan_items(const AttentionBackwardProblem& problem, const Entry& entry,
                           const DeviceFacts& facts, const char* suffix, int64_t items,
                           int64_t most_blocks, const Reason& reason, Plan* plan) {
  const int device_id = problem.device.device_id;
  const int64_t clusters = std::clamp<int64_t>(items, 1, most_blocks / entry.cluster);
  flashmoe_launch& launch = plan_launch(entry, device_id, suffix, clusters * entry.cluster, plan);
  if (entry.cluster > 1) launch.cluster = entry.cluster;
  const int64_t behind = (problem.dsinks.data != nullptr ? problem.heads_q : 0) +
                         (is_bounded(problem) ? entry.repair_blocks : 0);
  if (behind > 0) {
    int arch = 0;
    FLASHMOE_TRY(load_kernel(entry.behind, device_id, facts, &arch, reason));
    plan_launch(entry.behind, device_id, suffix, behind, entry.behind_threads,
                entry.behind.shared_bytes, plan);
  }
  return FLASHMOE_OK;
}

flashmoe_status plan_launches(const AttentionBackwardProblem& problem, const Entry& entry,
                              const DeviceFacts& facts, const char* suffix, int64_t most_blocks,
                              const Reason& reason, Plan* plan) {
  const int device_id = problem.device.device_id;
  const int64_t tiles_q = tiles_q_of(problem, entry);
  const int64_t tiles_k = tiles_k_of(problem, entry);
  const int64_t blocks_per_tile = entry.tile_q / entry.prologue_rows;
  const auto too_many = [&](int64_t heads, int64_t tiles) {
    return problem.batch > kMostTiles || heads > kMostTiles ||
           tiles * std::max<int64_t>(1, problem.batch) > kMostTiles / heads;
  };
  if (too_many(problem.heads_q, tiles_q * blocks_per_tile) || too_many(problem.heads_kv, tiles_k)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^30 tiles of rows or keys");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry.prologue, device_id, facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(entry, device_id, facts, &arch, reason));
  const int64_t rows_of_blocks = tiles_of(problem, entry) * blocks_per_tile;
  plan_launch(entry.prologue, device_id, suffix, rows_of_blocks, entry.prologue_threads, 0, plan)
      .tile_m = entry.prologue_rows;
  const SplitItems split = split_items_of(problem, entry);
  const int64_t items = split.first + (items_of(problem, entry) - split.first) * split.splits;
  FLASHMOE_TRY(plan_items(problem, entry, facts, suffix, items, most_blocks, reason, plan));
  plan->info.workspace_bytes = static_cast<uint64_t>(layout_of(problem, entry).bytes);
  return FLASHMOE_OK;
}

void fill_params(const AttentionBackwardProblem& p, const Entry& entry, CommonParams* params) {
  const auto fill = [](const RowsView<void>& view, Gradient* gradient) {
    gradient->strides = view.strides;
    gradient->fp32 = view.dtype == Dtype::kFloat32 ? 1 : 0;
  };
  params->q_rows.strides = p.q.strides;
  params->k_rows.strides = p.k.strides;
  params->v_rows.strides = p.v.strides;
  params->out_rows.strides = p.out.strides;
  params->dout_rows.strides = p.dout.strides;
  params->lse_strides = p.lse_strides;
  params->dlse_strides = p.dlse_strides;
  fill(p.dq, &params->dq_rows);
  fill(p.dk, &params->dk_rows);
  fill(p.dv, &params->dv_rows);
  params->accumulate = p.accumulate ? 1 : 0;
  params->dsink_stride = p.dsinks.stride;
  params->dsinks_are_fp32 = p.dsinks.dtype == Dtype::kFloat32 ? 1 : 0;
  params->batch = static_cast<int32_t>(p.batch);
  params->seq_q = static_cast<int32_t>(queries_of(p));
  params->seq_k = static_cast<int32_t>(p.seq_k);
  params->heads_q = static_cast<int32_t>(p.heads_q);
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  params->heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
  params->dim = static_cast<int32_t>(p.dim);
  params->dim_v = static_cast<int32_t>(p.dim_v);
  params->score = score_options(p);
  params->scale = p.scale;
  params->tiles_q = static_cast<int32_t>(tiles_q_of(p, entry));
  params->tiles_k = static_cast<int32_t>(tiles_k_of(p, entry));
  const int64_t heads_per_kv = p.heads_q / p.heads_kv;
  params->order = order_of(
      p.batch * p.heads_kv, heads_per_kv, params->tiles_k, p.seq_q * heads_per_kv * row_bytes_of(p),
      {p.bounded_left, p.bounded_right}, entry.wave_heads, kBlocksOfLargest / entry.cluster);
  params->split = split_items_of(p, entry);
}

void fill_addresses(const AttentionBackwardProblem& p, const Layout& layout, char* workspace,
                    CommonParams* params) {
  params->q_rows.data = static_cast<const uint16_t*>(p.q.data);
  params->k_rows.data = static_cast<const uint16_t*>(p.k.data);
  params->v_rows.data = static_cast<const uint16_t*>(p.v.data);
  params->out_rows.data = static_cast<const uint16_t*>(p.out.data);
  params->dout_rows.data = static_cast<const uint16_t*>(p.dout.data);
  params->lse = static_cast<const float*>(p.lse);
  params->dlse = static_cast<const float*>(p.dlse);
  params->dq_rows.rows = p.dq.data;
  params->dk_rows.rows = p.dk.data;
  params->dv_rows.rows = p.dv.data;
  params->score.sinks = p.sinks.data;
  params->dsinks = p.dsinks.data;
  params->row_lse = reinterpret_cast<float*>(workspace + layout.row_lse);
  params->row_delta = reinterpret_cast<float*>(workspace + layout.row_delta);
  params->dq_sums = reinterpret_cast<float*>(workspace + layout.dq_sums);
  params->turns = reinterpret_cast<uint32_t*>(workspace + layout.turns);
  params->ticket = reinterpret_cast<uint32_t*>(workspace + layout.ticket);
  params->split_turns = reinterpret_cast<uint32_t*>(workspace + layout.split_turns);
  params->split_sums = reinterpret_cast<float*>(workspace + layout.split_sums);
}

}  // namespace flashmoe::attention_backward
