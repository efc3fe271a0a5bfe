// The sm_90 family: which kernel serves a problem, and with what parameters it is launched.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/sm90/choose.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/attention/sm90/fill.h"
#include "cuda/attention/sm90/l2_swizzle.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/tensor_map.h"

namespace flashmoe::sm90 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm90/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm90/entries.inc"
#undef FLASHMOE_ENTRY
};

flashmoe_status plan(const AttentionProblem& problem, AttentionPlan* plan, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  const Entry* entry = nullptr;
  FLASHMOE_TRY(choose_entry(kEntries, problem, &facts, &entry, reason));
  const int64_t tiles_per_head = (problem.seq_q + entry->tile_q - 1) / entry->tile_q;
  const int64_t heads = problem.batch * problem.heads_q;
  // The kernel counts rounds of blocks past the last tile.
  if (heads > INT_MAX / 2 || tiles_per_head * heads > INT_MAX / 2) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^30 tiles of query rows");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, device_id, *facts, &arch, reason));
  // Persistent: no more blocks than multiprocessors, each of which holds one.
  const int64_t blocks = std::min<int64_t>(tiles_per_head * heads, facts->multiprocessors);
  plan_launch(*entry, arch, "a", blocks, plan);
  plan->entry = entry;
  plan->tiles_per_head = static_cast<int32_t>(tiles_per_head);
  plan->heads_per_section = heads_per_swizzle(problem, *entry, tiles_per_head, *facts);
  plan->programmatic = true;  // sm_90a has it whatever made the code
  return FLASHMOE_OK;
}

bool encode_maps(const AttentionProblem& p, const Entry& entry, TileParams* params) {
  // Without keys their tensors may be null, which a map is not; none is read then.
  const void* k = p.seq_k > 0 ? p.k : p.q;
  const void* v = p.seq_k > 0 ? p.v : p.q;
  const auto encode = [&](CUtensorMap* map, const void* data, const RowStrides& strides,
                          int64_t dim, int64_t seq, int64_t heads, int rows) {
    return encode_map(map, p.dtype, data,
                      rows_map(strides, dim, seq, heads, p.batch, entry.box_columns, rows));
  };
  return encode(&params->q, p.q, p.q_strides, p.dim, p.seq_q, p.heads_q, entry.box_rows) &&
         encode(&params->k, k, p.k_strides, p.dim, p.seq_k, p.heads_kv, entry.tile_k) &&
         encode(&params->v, v, p.v_strides, p.dim_v, p.seq_k, p.heads_kv, entry.tile_k) &&
         encode(&params->out, p.out, p.out_strides, p.dim_v, p.seq_q, p.heads_q, entry.box_rows);
}

void fill_params(const AttentionProblem& p, const AttentionPlan& plan, TileParams* params) {
  fill_tensors(p, params);
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  const bool ramp = longest_tiles_first(p);
  params->first_row = ramp ? -static_cast<int32_t>(spare_rows(p, entry, plan.tiles_per_head)) : 0;
  params->longest_tiles_first = ramp ? 1 : 0;
  params->kv_block_alignment =
      static_cast<int32_t>(kv_block_alignment(p, entry.tile_k, params->first_row, entry.tile_q));
  const auto divisor = [](int64_t value) { return Divisor::of(static_cast<uint32_t>(value)); };
  const int64_t heads = p.batch * p.heads_q;
  const int64_t swizzle_heads = plan.heads_per_section;
  const int64_t swizzle_tiles = swizzle_heads * plan.tiles_per_head;
  params->heads = static_cast<int32_t>(heads);
  params->tiles_per_head = plan.tiles_per_head;
  params->heads_per_swizzle = plan.heads_per_section;
  params->by_heads_q = divisor(p.heads_q);
  params->by_heads_per_kv = divisor(p.heads_q / p.heads_kv);
  params->by_heads_per_swizzle = divisor(swizzle_heads);
  params->by_heads_of_last_swizzle = divisor(heads - (heads - 1) / swizzle_heads * swizzle_heads);
  params->by_tiles_per_swizzle = divisor(swizzle_tiles);
  params->slots_per_swizzle = static_cast<int32_t>(swizzle_tiles % plan.info.grid[0]);
}

flashmoe_status find_params(const AttentionProblem& problem, const AttentionPlan& plan,
                            TileParams** found) {
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  return KnownParams<TileParams>::find(problem, plan, found, [&](TileParams* params) {
    if (!encode_maps(problem, entry, params)) return false;
    fill_params(problem, plan, params);
    return true;
  });
}

flashmoe_status launch(const AttentionProblem& problem, const AttentionPlan& plan, void*,
                       void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  TileParams* params = nullptr;
  FLASHMOE_TRY(find_params(problem, plan, &params));
  return launch_kernel(entry, problem, plan, params, stream);
}

}  // namespace
}  // namespace flashmoe::sm90

namespace flashmoe {

const AttentionFamily kSm90Attention = {"sm90", FLASHMOE_DEVICE_CUDA, &sm90::plan, &sm90::launch};

}  // namespace flashmoe
