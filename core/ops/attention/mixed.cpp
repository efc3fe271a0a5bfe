// The mixed family: batches of prompts beside decoding, divided among two other families. The
// device tells sequences with few queries from the others; then each family computes its own, by a
// table of lengths in which the other's have no queries.
//
// What the parts are is said here, and who computes them is the order of the list
// (core/ops/attention/families.h): the few go to the first of the more particular families, in
// front of this one, that serves them, the others to the fastest of those behind it.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/choose.h"
#include "core/ops/attention/families.h"
#include "core/ops/attention/few_queries.h"
#include "core/status.h"

#if FLASHMOE_WITH_CUDA

namespace flashmoe {
namespace {

enum Part { kMany, kFew };

// Microseconds of the first kernel, and of one that finds nothing to do.
constexpr double kLengthsTime = 2.0;
constexpr double kNothing = 4.0;

// Offsets in the workspace: behind the first table of lengths the second, and what the few need.
// The others need none.
struct Places {
  int64_t few_q;
  int64_t of_few;
};

Places places_of(const AttentionProblem& p) {
  const int64_t table = (p.batch * 4 + 127) / 128 * 128;
  return {table, 2 * table};
}

// A part of the problem: of the sequences to which a table leaves their queries.
AttentionProblem part_of(const AttentionProblem& p, const void* lengths) {
  AttentionProblem part = p;
  part.kernel[0] = '\0';
  part.sequences.seqused_q = {lengths, 1};
  return part;
}

// Those with many queries: what split_size promises, the kernels of tiles give anyway.
AttentionProblem many_of(const AttentionProblem& p, const void* lengths) {
  AttentionProblem part = part_of(p, lengths);
  part.sequences.split_size = 0;
  return part;
}

AttentionProblem few_of(const AttentionProblem& p, const void* lengths) {
  AttentionProblem part = part_of(p, lengths);
  part.seq_q = std::min(part.seq_q, few_queries(p));
  return part;
}

// How many sequences have how many rows of q, if some are as long as they may be, and the others
// have one query.
struct Shares {
  int64_t many;
  int64_t many_rows;
};

Shares shares_of(const AttentionProblem& p) {
  if (p.sequences.cu_seqlens_q.data == nullptr) return {p.batch, p.batch * p.seq_q};
  const int64_t further = std::max<int64_t>(p.sequences.rows_q - p.batch, 0);
  const int64_t many =
      std::clamp<int64_t>((further + p.seq_q - 2) / std::max<int64_t>(p.seq_q - 1, 1), 0, p.batch);
  return {many, std::max<int64_t>(p.sequences.rows_q - (p.batch - many), 0)};
}

// A family's estimate for `batch` sequences of `rows` rows.
double estimate_of(const AttentionFamily& family, const AttentionProblem& part, int64_t batch,
                   int64_t rows) {
  if (batch == 0 || rows == 0) return kNothing;
  AttentionProblem some = part;
  some.batch = batch;
  some.sequences.rows_q = rows;
  Plan plan = {};
  return family.plan(some, &plan, Reason()) == FLASHMOE_OK ? plan.info.microseconds : kNothing;
}

flashmoe_status ask(const AttentionFamily& family, const AttentionProblem& part, Plan* plan,
                    const Reason& reason) {
  FLASHMOE_TRY(check_family_device(family.device_type, part.device, reason));
  return family.plan(part, plan, reason);
}

// A part's family, its plan, and the estimate by which it was chosen.
struct PlannedPart {
  const AttentionFamily* family;
  Plan plan;
  double microseconds;
};

// Plans the family with the shortest estimate. With split_size it is the first family that can,
// since an estimate would make the bits depend on the batch.
flashmoe_status plan_many(const AttentionProblem& problem, const AttentionProblem& many,
                          const Shares& shares, PlannedPart* part, const Reason& reason) {
  flashmoe_status result = FLASHMOE_ERROR_UNSUPPORTED;
  bool behind = false;
  for (const AttentionFamily* family : kAttentionFamilies) {
    if (!behind || family->device_type != many.device.device_type) {
      behind = behind || family == &kMixedAttention;
      continue;
    }
    Plan made = {};
    const flashmoe_status status = ask(*family, many, &made, reason);
    if (status == FLASHMOE_ERROR_CUDA) return status;
    if (result != FLASHMOE_OK) result = status;
    if (status != FLASHMOE_OK) continue;
    const double time = estimate_of(*family, many, shares.many, shares.many_rows);
    if (part->family != nullptr && time >= part->microseconds) continue;
    *part = {family, made, time};
    if (problem.sequences.split_size > 0) break;
  }
  return result;
}

// Plans the first family that can, whatever the batch is: the bits of decoding do not depend on an
// estimate.
flashmoe_status plan_few(const AttentionProblem& few, const Shares& shares, PlannedPart* part,
                         const Reason& reason) {
  flashmoe_status status = FLASHMOE_ERROR_UNSUPPORTED;
  for (const AttentionFamily* family : kAttentionFamilies) {
    if (family == &kMixedAttention) break;
    part->plan = {};
    status = ask(*family, few, &part->plan, reason);
    if (status == FLASHMOE_ERROR_CUDA) break;
    if (status != FLASHMOE_OK) continue;
    part->family = family;
    const int64_t others = few.batch - shares.many;
    part->microseconds = estimate_of(*family, few, others, others);
    break;
  }
  return status;
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  if (!problem.sequences.given || problem.seq_q <= few_queries(problem)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "accepted are batches whose sequences may have more than %lld queries",
                         static_cast<long long>(few_queries(problem)));
  }
  if (problem.batch > INT_MAX) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^31 - 1 sequences");
  }
  // Plans do not depend on addresses, but on whether they are there.
  const void* const there = &problem;
  const Shares shares = shares_of(problem);
  PlannedPart many = {};
  PlannedPart few = {};
  FLASHMOE_TRY(plan_many(problem, many_of(problem, there), shares, &many, reason));
  FLASHMOE_TRY(plan_few(few_of(problem, there), shares, &few, reason));
  FLASHMOE_TRY(cuda_plan_lengths(problem, plan, reason));
  plan->add_part(kMany, many.family, many.plan);
  plan->add_part(kFew, few.family, few.plan);
  plan->info.workspace_bytes =
      static_cast<uint64_t>(places_of(problem).of_few) + few.plan.info.workspace_bytes;
  plan->info.microseconds = kLengthsTime + many.microseconds + few.microseconds;
  return FLASHMOE_OK;
}

flashmoe_status launch_part(const AttentionProblem& part, const Plan& plan, int index,
                            PlanDetail* detail, void* workspace, void* stream) {
  Plan own = {};
  plan.copy_part(index, &own);
  own.detail = detail;
  return static_cast<const AttentionFamily*>(plan.parts[index].family)
      ->launch(part, own, workspace, stream);
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  auto* const many_q = static_cast<unsigned char*>(workspace);
  const Places places = places_of(problem);
  unsigned char* const few_q = many_q + places.few_q;
  FLASHMOE_TRY(cuda_launch_lengths(problem, plan, few_queries(problem), many_q, few_q, stream));
  FLASHMOE_TRY(launch_part(many_of(problem, many_q), plan, kMany, plan.detail, nullptr, stream));
  return launch_part(few_of(problem, few_q), plan, kFew, nullptr, many_q + places.of_few, stream);
}

}  // namespace

const AttentionFamily kMixedAttention = {"mixed", FLASHMOE_DEVICE_CUDA, &plan, &launch};

}  // namespace flashmoe

#endif
