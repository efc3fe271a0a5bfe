// The sm89_decode family: ragged, padded and paged batches whose sequences have few queries. Blocks
// divide the keys by stream-K. Only the kernels read lengths: nothing here depends on them.
#include <algorithm>
#include <climits>
#include <cstring>

#include "core/backends.h"
#include "core/ops/attention/few_queries.h"
#include "core/status.h"
#include "cuda/attention/combine.h"
#include "cuda/attention/decode/offsets.h"
#include "cuda/attention/sm89_decode/cost.h"
#include "cuda/attention/sm89_decode/entry.h"

namespace flashmoe::sm89_decode {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm89_decode/entries.inc"
#undef FLASHMOE_ENTRY

using attention_decode::check_offsets;
using attention_decode::chunk_strides;

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm89_decode/entries.inc"
#undef FLASHMOE_ENTRY
};

bool is_fp8(const AttentionProblem& p) { return p.k.dtype == Dtype::kFloat8E4M3; }

int64_t group_of(const AttentionProblem& p) { return p.heads_q / p.heads_kv; }

// Keys per chunk; 0: blocks take equal ranges.
int64_t split_keys(const AttentionProblem& p) { return p.sequences.split_size; }

// Rows of a KV head, by which a kernel is chosen. If bits must depend on the sequence alone, it is
// the rows of one query.
int64_t rows_wanted(const AttentionProblem& p) {
  return group_of(p) * (split_keys(p) > 0 ? 1 : std::max<int64_t>(p.seq_q, 1));
}

// The kernel that the problem names. Otherwise, among those with the least padding, the one with
// the fewest sufficient rows, or else with the most rows.
const Entry* find_kernel(const AttentionProblem& p) {
  const Entry* best = nullptr;
  const auto padding = [](const Entry& entry) { return entry.dim + entry.dim_v; };
  for (const Entry* entry : kEntries) {
    if (entry->dtype != p.q.dtype || entry->fp8 != is_fp8(p)) continue;
    if (entry->dim < p.dim || entry->dim_v < p.dim_v) continue;
    if (std::strcmp(p.kernel, entry->name) == 0) return entry;
    const bool better = best == nullptr || padding(*entry) < padding(*best) ||
                        (padding(*entry) == padding(*best) &&
                         (best->tile_q < rows_wanted(p)
                              ? entry->tile_q > best->tile_q
                              : entry->tile_q >= rows_wanted(p) && entry->tile_q < best->tile_q));
    if (better) best = entry;
  }
  return best;
}

const Kernel& combine_of(const AttentionProblem& p) {
  return p.q.dtype == Dtype::kFloat16 ? kCombineFp16 : kCombineBf16;
}

CacheScales cache_scales(const KeyScales& scales) {
  return {static_cast<const float*>(scales.data), scales.batch_stride, scales.head_stride};
}

// Upper bound on the row tiles of a KV head of a sequence.
int64_t row_tiles(const AttentionProblem& p, const Entry& entry) {
  return (p.seq_q * group_of(p) + entry.tile_q - 1) / entry.tile_q;
}

// a b, but at most `most`.
int64_t product_up_to(int64_t most, int64_t a, int64_t b) {
  if (a == 0 || b == 0) return 0;
  return a >= most || b >= most ? most : std::min(a * b, most);
}

// Tiles of several KV heads are to be at least this share of the blocks.
constexpr int64_t kLeastTiles = 7;
constexpr int64_t kOfBlocks = 8;

// Log2 of the KV heads of a tile. Rows of neighbouring heads lie side by side in most caches, and
// memory is faster where they are read at the same time. But a block's keys then have a part of
// each head, so tiles are to be about as many as blocks. A sequence counts for one row of tiles:
// bits do not depend on bounds. Those of chunks do not depend on the number of sequences either.
int tile_heads_log2(const AttentionProblem& p, const Entry& entry, const DeviceFacts& facts) {
  if (split_keys(p) > 0) return 0;
  const int64_t blocks = facts.multiprocessors;
  int log2 = 0;
  while (2 << log2 <= entry.tile_heads && p.heads_kv % (2 << log2) == 0 &&
         kLeastTiles * blocks <=
             kOfBlocks * product_up_to(2 * blocks, p.batch, p.heads_kv >> (log2 + 1))) {
    ++log2;
  }
  return log2;
}

// Upper bound on the units of all tiles.
int64_t most_blocks(const AttentionProblem& p, const Entry& entry, int64_t tiles_of_row,
                    const DeviceFacts& facts) {
  const int64_t most = facts.multiprocessors;
  const int64_t units = std::max<int64_t>((p.seq_k + entry.tile_k - 1) / entry.tile_k, 1);
  const int64_t rows = product_up_to(most, p.batch, row_tiles(p, entry));
  return std::max<int64_t>(product_up_to(most, product_up_to(most, rows, tiles_of_row), units), 1);
}

// Rows of a tile that have parts to add up.
int64_t rows_of_tile(const AttentionProblem& p, const Entry& entry) {
  return std::clamp<int64_t>(p.seq_q * group_of(p), 1, entry.tile_q);
}

// How the second kernel's blocks share the rows of a tile that is cut.
struct CombineGrid {
  int rows_log2;   // log2 of the rows that a block combines at a time, of one KV head
  int64_t blocks;  // of a tile
};

// Blocks are few enough that all run at a time: those of a tile go through its KV heads. But if
// tiles are so few that each has many parts, those need many threads, and a block has one row at a
// time.
CombineGrid combine_grid(const AttentionProblem& p, const Entry& entry, int64_t tiles,
                         int64_t tile_heads, const DeviceFacts& facts) {
  constexpr int64_t kManyParts = 32;
  const int64_t rows = rows_of_tile(p, entry);
  if (p.batch * p.heads_kv * kManyParts <= tiles) return {0, rows};
  const int64_t most = std::max<int64_t>(kCombineBlocks * facts.multiprocessors / tiles, 1);
  int log2 = 0;
  const auto blocks = [&] { return tile_heads * (((rows - 1) >> log2) + 1); };
  while (blocks() > most && 1 << log2 < rows && log2 < kMostCombineRowsLog2 &&
         2 << (log2 + entry.units_log2) <= kCombineThreads) {
    ++log2;
  }
  return {log2, tile_heads > 1 ? std::min(blocks(), most) : blocks()};
}

// Whether the tables are absent whose absence the kernels exploit.
bool has_plain_tables(const SequenceParams& sequences) {
  return !sequences.cu_seqlens_k.given() && !sequences.seqused_q.given() &&
         !sequences.k_begin.given() && !sequences.batch_index.given() &&
         !sequences.q_offset.given();
}

int32_t most_tiles(const AttentionProblem& p, const Entry& entry, int64_t tiles_of_row) {
  if (p.batch > kThreads) return 0;
  return static_cast<int32_t>(
      std::min<int64_t>(p.batch * tiles_of_row * row_tiles(p, entry), INT_MAX / 2));
}

// Steps of a tile's lead.
int32_t lead_of(const Entry& entry, int32_t heads_log2) {
  const int step_bytes = entry.tile_k * (entry.dim + entry.dim_v) * 2;
  return std::max((kLeadBytes + step_bytes - 1) / step_bytes >> heads_log2, 1);
}

int64_t part_units(const Entry& entry) { return int64_t{entry.tile_q} << entry.units_log2; }

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  if (!problem.sequences.given) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "dense batches, accepted are ragged, padded and paged ones");
  }
  FLASHMOE_TRY(refuse_wide_heads(problem, reason));
  FLASHMOE_TRY(refuse_bias_and_mask(problem, reason));
  FLASHMOE_TRY(check_sequences_fit(problem, reason));
  if (!is_fp8(problem)) FLASHMOE_TRY(refuse_scaled_keys(problem, reason));
  // For fp8 there are no other kernels.
  if (split_keys(problem) > 0 && problem.seq_q > few_queries(problem) && *problem.kernel == '\0' &&
      !is_fp8(problem)) {
    return refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "split_size and sequences of many queries, whose kernels may not depend on how many "
        "there are");
  }
  const Entry* entry = find_kernel(problem);
  if (entry == nullptr) {
    return refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these head dimensions");
  }
  const int64_t group = group_of(problem);
  if (group > kMaxSequence || problem.seq_q > kMaxSequence / group ||
      problem.heads_kv > INT_MAX / (problem.seq_q * group / entry->tile_q + 1)) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "more than 2^30 queries of a KV head, all its query heads counted, or 2^31 tiles "
                  "of these");
  }
  FLASHMOE_TRY(check_offsets("k", problem.k.strides, problem, reason));
  FLASHMOE_TRY(check_offsets("v", problem.v.strides, problem, reason));

  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  const Kernel& combine = combine_of(problem);
  FLASHMOE_TRY(load_kernel(combine, device_id, *facts, &arch, reason));
  const int heads_log2 = tile_heads_log2(problem, *entry, *facts);
  const int64_t blocks = most_blocks(problem, *entry, problem.heads_kv >> heads_log2, *facts);
  plan_launch(*entry, device_id, "", blocks, plan);
  flashmoe_launch& second = plan_launch(combine, device_id, "", blocks, kCombineThreads, 0, plan);
  const CombineGrid grid = combine_grid(problem, *entry, blocks, 1 << heads_log2, *facts);
  second.grid[1] = static_cast<uint32_t>(grid.blocks);
  second.tile_m = 1 << grid.rows_log2;
  const int64_t places = places_of(blocks, split_keys(problem) > 0) << heads_log2;
  plan->info.workspace_bytes =
      static_cast<uint64_t>(places * (part_units(*entry) * 16 + entry->tile_q * 8) +
                            blocks * static_cast<int64_t>(sizeof(CutTile)));
  plan->info.microseconds = decode_microseconds(work_of(problem), entry->tile_q, *facts);
  plan->division_bytes = sizeof(Division);
  return FLASHMOE_OK;
}

Params make_params(const AttentionProblem& p, const Plan& plan, const DeviceFacts& facts,
                   void* workspace) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  Params params = {};
  fill_tensors_and_score(p, &params);
  params.sequences = sequence_params(p);
  params.k_chunks = chunk_strides(p, p.k.strides);
  params.v_chunks = chunk_strides(p, p.v.strides);
  params.k_scale = cache_scales(p.k_scale);
  params.v_scale = cache_scales(p.v_scale);
  params.fp8 = is_fp8(p) ? 1 : 0;
  params.group = Divisor::of(static_cast<uint32_t>(group_of(p)));
  params.heads_kv = static_cast<int32_t>(p.heads_kv);
  params.split_keys = static_cast<int32_t>(std::min<int64_t>(split_keys(p), kMostTableRows));
  params.blocks = static_cast<int32_t>(plan.info.launches[0].grid[0]);
  params.plain_tables = has_plain_tables(params.sequences) ? 1 : 0;
  params.tile_heads_log2 = tile_heads_log2(p, entry, facts);
  params.tiles_of_row = params.heads_kv >> params.tile_heads_log2;
  params.warps_of_head = kWarps >> params.tile_heads_log2;
  params.lead = params.split_keys > 0 ? 0 : lead_of(entry, params.tile_heads_log2);
  params.most_tiles = most_tiles(p, entry, params.tiles_of_row);
  while (1 << params.combine_rows_log2 < plan.info.launches[1].tile_m) ++params.combine_rows_log2;
  params.part_rows = entry.tile_q;
  params.part_units_log2 = entry.units_log2;
  params.division = static_cast<const Division*>(plan.beside.division);
  const int64_t places = places_of(params.blocks, params.split_keys > 0) << params.tile_heads_log2;
  params.parts = static_cast<float4*>(workspace);
  params.statistics = reinterpret_cast<float2*>(params.parts + places * part_units(entry));
  params.cut_tiles = reinterpret_cast<CutTile*>(params.statistics + places * entry.tile_q);
  return params;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(read_device_facts(problem.device.device_id, &facts, Reason()));
  const Params params = make_params(problem, plan, *facts, workspace);
  const Beside& beside = plan.beside;
  for (int32_t i = beside.first; i < (beside.end > 0 ? beside.end : plan.info.launch_count); ++i) {
    FLASHMOE_TRY(launch_planned(plan, i, &params, stream));
  }
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::sm89_decode

namespace flashmoe {

const AttentionFamily kSm89DecodeAttention = {"sm89_decode", FLASHMOE_DEVICE_CUDA,
                                              &sm89_decode::plan, &sm89_decode::launch};

}  // namespace flashmoe
