// Runs attention, then merges its result with a partial result of other keys. Attention's result
// lies in front of its own workspace, in q's dtype, which every family writes.
#include "core/ops/attention/merge_in.h"

#include "core/operation.h"
#include "core/status.h"

namespace flashmoe {
namespace {

constexpr uint64_t kAlignment = 128;  // bytes, of each part of the workspace

uint64_t round_up(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Offsets in the workspace, after the rows of attention's own out.
struct Places {
  uint64_t lse;
  uint64_t of_attention;
};

Places places_of(const MergeStatesProblem& p) {
  const auto rows = static_cast<uint64_t>(p.batch) * static_cast<uint64_t>(p.seq) *
                    static_cast<uint64_t>(p.heads);
  const uint64_t of_number = p.outs.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  const uint64_t lse = round_up(rows * static_cast<uint64_t>(p.dim_v) *
                                static_cast<uint64_t>(dtype_bytes(p.outs.dtype)));
  return {lse, lse + round_up(rows * of_number)};
}

const MergeStatesFamily& merge_family(flashmoe_device device) {
#if FLASHMOE_WITH_CUDA
  if (is_on_cuda(device)) return kCudaMergeStates;
#else
  static_cast<void>(device);
#endif
  return kCpuMergeStates;
}

}  // namespace

void divide_merge_in(int64_t batch, int64_t rows, AttentionMergeInProblem* problem) {
  AttentionProblem& attention = problem->attention;
  MergeStatesProblem& merge = problem->merge;
  const void* const there = problem;  // plans see only whether an address is null
  merge.device = attention.device;
  merge.partials = 1;
  merge.batch = batch;
  merge.seq = rows;
  merge.heads = attention.heads_q;
  merge.dim_v = attention.dim_v;
  merge.out = attention.out;
  merge.lse = {attention.lse, attention.lse_strides};
  if (attention.sequences.given) {
    merge.cu_seqlens_q = attention.sequences.cu_seqlens_q;
    merge.seqused_q = attention.sequences.seqused_q;
    merge.sequences = attention.batch;
    merge.most_q = attention.seq_q;
  }

  const int64_t token = merge.heads * merge.dim_v;
  merge.outs = {there, {rows * token, token, merge.dim_v}, attention.q.dtype, 0};
  merge.lses = {there, {merge.heads * rows, 1, rows}};
  attention.out = {const_cast<void*>(there), merge.outs.strides, attention.q.dtype, 0};
  attention.lse = const_cast<void*>(there);
  attention.lse_strides = merge.lses.strides;
}

flashmoe_status plan_merge_in(const Family<AttentionProblem>& family,
                              const AttentionMergeInProblem& problem, Plan* plan,
                              const Reason& reason) {
  FLASHMOE_TRY(family.plan(problem.attention, plan, reason));
  Plan merge = {};
  FLASHMOE_TRY(merge_family(problem.device).plan(problem.merge, &merge, reason));
  flashmoe_plan& info = plan->info;
  if (info.launch_count == FLASHMOE_MAX_LAUNCHES) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than %d launches",
                         FLASHMOE_MAX_LAUNCHES);
  }
  plan->entries[info.launch_count] = merge.entries[0];
  info.launches[info.launch_count++] = merge.info.launches[0];
  const uint64_t bytes = places_of(problem.merge).of_attention;
  info.workspace_bytes += bytes;
  if (plan->room.least > 0) plan->room.least += bytes;
  info.microseconds += merge.info.microseconds;
  return FLASHMOE_OK;
}

flashmoe_status launch_merge_in(const Family<AttentionProblem>& family,
                                const AttentionMergeInProblem& problem, const Plan& plan,
                                void* workspace, void* stream) {
  auto* const out = static_cast<unsigned char*>(workspace);
  const Places places = places_of(problem.merge);
  unsigned char* const lse = out + places.lse;
  AttentionProblem attention = problem.attention;
  attention.out.data = out;
  attention.lse = lse;
  Plan own = plan;
  const int32_t last = --own.info.launch_count;
  own.info.workspace_bytes -= places.of_attention;
  unsigned char* const of_attention =
      own.info.workspace_bytes > 0 ? out + places.of_attention : nullptr;
  FLASHMOE_TRY(family.launch(attention, own, of_attention, stream));

  MergeStatesProblem merge = problem.merge;
  merge.outs.data = out;
  merge.lses.data = lse;
  own.entries[0] = plan.entries[last];
  own.info.launches[0] = plan.info.launches[last];
  own.info.launch_count = 1;
  own.detail = nullptr;
  return merge_family(problem.device).launch(merge, own, nullptr, stream);
}

}  // namespace flashmoe
