// The sm90_mla family: ragged, padded and paged batches whose values are the first columns of their
// keys. Only the kernels read lengths: nothing here depends on them.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/decode/offsets.h"
#include "cuda/attention/sm90_mla/cost.h"
#include "cuda/attention/sm90_mla/entry.h"
#include "cuda/tensor_map.h"

namespace flashmoe::sm90_mla {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm90_mla/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm90_mla/entries.inc"
#undef FLASHMOE_ENTRY
};

int64_t group_of(const AttentionProblem& p) { return p.heads_q / p.heads_kv; }

// Upper bound on the row tiles of a KV head.
int64_t row_tiles(const AttentionProblem& p) {
  return std::max<int64_t>((p.seq_q * group_of(p) + kRows - 1) / kRows, 1);
}

// Upper bound on the tiles of all sequences and KV heads.
int64_t tiles_of(const AttentionProblem& p) {
  const int64_t tiles = p.heads_kv * row_tiles(p);
  return tiles > INT_MAX / std::max<int64_t>(p.batch, 1) ? INT_MAX : tiles * p.batch;
}

// Whether there are so few tiles that each has its own place among the cut tiles. Otherwise each
// block has a place for the tile that it may cut. Without sequences there is no tile.
bool has_cuts_by_tile(const AttentionProblem& p, int64_t blocks) {
  const int64_t tiles = tiles_of(p);
  return tiles > 0 && tiles <= blocks;
}

// Places for cut tiles: none if a block has all keys of a row tile.
int64_t cuts_of(const AttentionProblem& p, int64_t blocks, int64_t stream_k_blocks) {
  if (stream_k_blocks == 1) return 0;
  return has_cuts_by_tile(p, blocks) ? tiles_of(p) : blocks;
}

// Places for parts of cut tiles.
int64_t places_of(int64_t blocks, int64_t stream_k_blocks) {
  return stream_k_blocks == 1 ? 0 : attention_decode::places_of(blocks, false);
}

// Blocks that divide the keys of a row tile: as many as run at a time, but at most one per block of
// keys.
int64_t stream_k_blocks_of(const AttentionProblem& p, const DeviceFacts& facts) {
  const int64_t blocks = p.heads_kv * row_tiles(p);
  const int64_t most = std::max<int64_t>(facts.multiprocessors / blocks, 1);
  const int64_t blocks_of_keys = std::max<int64_t>((p.seq_k + kBlockKeys - 1) / kBlockKeys, 1);
  if (p.batch >= most || blocks_of_keys >= most) return most;
  return std::clamp<int64_t>(p.batch * blocks_of_keys, 1, most);
}

// Whether a map can have this stride, in elements.
bool is_walkable(int64_t stride, int64_t extent) {
  return extent <= 1 || (stride > 0 && stride < kMaxStrideBytes / 2);
}

// Contiguous rows wherever a block of keys begins, a power of two.
int box_rows(const AttentionProblem& p) {
  const SequenceTables& tables = p.sequences;
  if (!tables.paged) return kBlockKeys;
  if (tables.k_begin.data != nullptr) return 1;
  int rows = 1;
  while (rows < kBlockKeys && tables.rows_k % (2 * rows) == 0) rows *= 2;
  return rows;
}

// Rows of q's batch: 1 if sequences are packed.
int64_t batch_of_queries(const AttentionProblem& p) {
  return p.sequences.cu_seqlens_q.data != nullptr ? 1 : p.batch;
}

// Query heads in a box of a tile's rows, if these are whole heads of one query, or whole queries,
// and the copy engine can walk them. Otherwise 0.
int query_heads(const AttentionProblem& p) {
  const int64_t group = group_of(p);
  const int64_t heads = std::min<int64_t>(group, kRows);
  if (heads == 0 || group % heads != 0 || kRows % heads != 0) return 0;
  const SequenceTables& tables = p.sequences;
  const bool walkable = is_walkable(p.q.strides.batch, batch_of_queries(p)) &&
                        is_walkable(p.q.strides.seq, tables.rows_q) &&
                        is_walkable(p.q.strides.head, p.heads_q);
  const bool any = tables.rows_q > 0 && batch_of_queries(p) > 0;
  return walkable && any ? static_cast<int>(heads) : 0;
}

bool has_keys(const AttentionProblem& p) {
  return p.seq_k > 0 && p.sequences.batch_k > 0 && p.sequences.rows_k > 0;
}

flashmoe_status check_walkable(const AttentionProblem& p, const Reason& reason) {
  const SequenceTables& tables = p.sequences;
  if (has_keys(p) && (!is_walkable(p.k.strides.batch, tables.batch_k) ||
                      !is_walkable(p.k.strides.seq, tables.rows_k) ||
                      !is_walkable(p.k.strides.head, p.heads_kv))) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "a stride of k that is 0 or below, or 2^40 bytes or more, which the copy "
                         "engine cannot walk");
  }
  return check_tensor_maps(p.device.device_id, reason);
}

flashmoe_status check(const AttentionProblem& problem, const DeviceFacts** facts,
                      const Reason& reason) {
  FLASHMOE_TRY(check_hopper(problem.device.device_id, facts, reason));
  if (!problem.sequences.given) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "dense batches, accepted are ragged, padded and paged ones");
  }
  if (!problem.values_in_keys) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "a v of its own, accepted is one that is the first columns of k, in the "
                         "same memory");
  }
  FLASHMOE_TRY(refuse_bias_and_mask(problem, reason));
  FLASHMOE_TRY(check_sequences_fit(problem, reason));
  FLASHMOE_TRY(refuse_scaled_keys(problem, reason));
  FLASHMOE_TRY(refuse_split_size(problem, reason));
  const int64_t group = group_of(problem);
  if (group > kMaxSequence || problem.seq_q > kMaxSequence / group ||
      problem.heads_kv > INT_MAX / 2 / row_tiles(problem)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^30 queries of a KV head, all its query heads counted, or "
                         "2^30 tiles of these");
  }
  FLASHMOE_TRY(attention_decode::check_offsets("k", problem.k.strides, problem, reason));
  return check_walkable(problem, reason);
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check(problem, &facts, reason));
  const auto any = [](const Entry&) { return true; };
  const Entry* const entry = find_entry(kEntries, problem, any, any);
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "%s", "no kernel for these head dimensions");
  }
  const int device_id = problem.device.device_id;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(entry->combine, device_id, *facts, &arch, reason));
  const int64_t stream_k_blocks = stream_k_blocks_of(problem, *facts);
  const int64_t blocks = stream_k_blocks * problem.heads_kv * row_tiles(problem);
  plan_launch(*entry, device_id, "a", blocks, plan);
  const int64_t rows = std::clamp<int64_t>(problem.seq_q * group_of(problem), 1, kRows);
  const int64_t sums =
      std::clamp<int64_t>(cuts_of(problem, blocks, stream_k_blocks) * rows * kQuarters, 1,
                          kSumBlocks * int64_t{facts->multiprocessors});
  plan_launch(entry->combine, device_id, "a", sums, kSumThreads, 0, plan);
  const int64_t places = places_of(blocks, stream_k_blocks);
  plan->info.workspace_bytes =
      static_cast<uint64_t>(places * kRows * ((16 << entry->units_log2) + 8) +
                            blocks * static_cast<int64_t>(sizeof(attention_decode::CutTile)));
  plan->info.microseconds = mla_microseconds(work_of(problem), entry->dim + entry->dim_v, *facts);
  return FLASHMOE_OK;
}

// Kept with a plan: the parameters, and the addresses of their maps.
struct Kept {
  Params params;
  const void* mapped;
  const void* mapped_queries;
};

// Without keys nothing is read, but a map needs an address all the same.
const void* mapped_keys(const AttentionProblem& p) { return has_keys(p) ? p.k.data : p.q.data; }

bool encode(const AttentionProblem& p, const Entry& entry, Kept* kept) {
  const SequenceTables& tables = p.sequences;
  const bool keys = has_keys(p);
  const auto extent = [&](int64_t of_keys) { return keys ? of_keys : 1; };
  kept->mapped = mapped_keys(p);
  kept->mapped_queries = p.q.data;
  const int heads = query_heads(p);
  const bool queries =
      heads == 0 || encode_map(&kept->params.queries, p.q.dtype, p.q.data,
                               {4,
                                {p.dim, p.heads_q, tables.rows_q, batch_of_queries(p)},
                                {1, p.q.strides.head, p.q.strides.seq, p.q.strides.batch},
                                {entry.box_columns, heads, kRows / heads, 1}});
  return queries &&
         encode_map(&kept->params.keys, p.q.dtype, kept->mapped,
                    {4,
                     {p.dim, extent(tables.rows_k), extent(p.heads_kv), extent(tables.batch_k)},
                     {1, p.k.strides.seq, p.k.strides.head, p.k.strides.batch},
                     {entry.box_columns, box_rows(p), 1, 1}});
}

bool move_maps(const AttentionProblem& p, Kept* kept) {
  return move_map(&kept->params.keys, &kept->mapped, mapped_keys(p)) &&
         (kept->params.query_heads == 0 ||
          move_map(&kept->params.queries, &kept->mapped_queries, p.q.data));
}

// Fills everything that does not depend on addresses.
void fill_params(const AttentionProblem& p, const Plan& plan, Params* params) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  params->k_chunks = params->v_chunks = attention_decode::chunk_strides(p, p.k.strides);
  params->group = Divisor::of(static_cast<uint32_t>(group_of(p)));
  params->heads_kv = static_cast<int32_t>(p.heads_kv);
  const int64_t blocks = plan.info.launches[0].grid[0];
  const int64_t stream_k_blocks = blocks / (p.heads_kv * row_tiles(p));
  params->blocks = static_cast<int32_t>(blocks);
  params->part_units_log2 = entry.units_log2;
  params->box_rows = box_rows(p);
  params->query_heads = query_heads(p);
  params->stream_k_blocks = static_cast<int32_t>(stream_k_blocks);
  params->cuts_by_tile = has_cuts_by_tile(p, blocks) ? 1 : 0;
  params->by_stream_k_blocks = Divisor::of(static_cast<uint32_t>(stream_k_blocks));
  params->by_row_tiles = Divisor::of(static_cast<uint32_t>(row_tiles(p)));
  // With two row tiles the second reads keys while they are still in flight for the first.
  params->evict_first = row_tiles(p) <= 2 ? 1 : 0;
  params->cuts = static_cast<int32_t>(cuts_of(p, blocks, stream_k_blocks));
}

void fill_addresses(const AttentionProblem& p, void* workspace, Params* params) {
  fill_tensors_and_score(p, params);
  params->sequences = sequence_params(p);
  const SequenceParams& s = params->sequences;
  const bool others = s.cu_seqlens_q.given() || s.cu_seqlens_k.given() || s.seqused_q.given() ||
                      s.k_begin.given() || s.batch_index.given() || s.q_offset.given();
  params->plain = !others && s.seqused_k.given() && s.seqused_k.stride == 1 ? 1 : 0;
  params->plain_q = std::min(s.rows_q, s.most_q);
  params->plain_k = std::min({s.room_k, s.pair_keys, s.most_k});
  const int64_t rows = places_of(params->blocks, params->stream_k_blocks) * kRows;
  params->parts = static_cast<float4*>(workspace);
  params->statistics = reinterpret_cast<float2*>(params->parts + (rows << params->part_units_log2));
  params->cut_tiles = reinterpret_cast<attention_decode::CutTile*>(params->statistics + rows);
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  Prepared<Kept> kept(plan.detail);
  if (!kept.ready() || !move_maps(problem, &*kept)) {
    kept.set_ready(false);  // stays so unless the driver takes the map
    kept->params = {};
    FLASHMOE_TRY(encode_maps(entry.name, problem.device.device_id,
                             [&] { return encode(problem, entry, &*kept); }));
    fill_params(problem, plan, &kept->params);
    kept.set_ready(true);
  }
  fill_addresses(problem, workspace, &kept->params);
  return launch_all(plan, &kept->params, stream);
}

}  // namespace
}  // namespace flashmoe::sm90_mla

namespace flashmoe {

const AttentionFamily kSm90MlaAttention = {"sm90_mla", FLASHMOE_DEVICE_CUDA, &sm90_mla::plan,
                                           &sm90_mla::launch};

}  // namespace flashmoe
