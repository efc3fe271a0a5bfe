// The mixed family: batches of prompts beside decoding, divided among two other families. The
// device tells sequences with few queries from the others; then each family computes its own, by a
// table of lengths in which the other's have no queries.
//
// This file says what the parts are. The order of the list (core/ops/attention/families.h) says who
// computes them: the few go to the first family in front of this one that serves them, the others
// to the fastest of those behind it.
#include <algorithm>
#include <climits>
#include <cmath>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/choose.h"
#include "core/ops/attention/families.h"
#include "core/ops/attention/few_queries.h"
#include "core/status.h"

#if FLASHMOE_WITH_CUDA

namespace flashmoe {
namespace {

// kFew is the first launch of the few's, kFewBehind the rest, which follow the many's launches.
// kSeveral are sequences whose few queries are more than a tile of the few's kernel.
enum Part { kFew, kMany, kFewBehind, kSeveral };

// Microseconds of the first kernel, and of a kernel that finds nothing to do.
constexpr double kLengthsTime = 2.0;
constexpr double kNothing = 4.0;

// Offsets in the workspace: behind the first table of lengths the others, then how the parts divide
// the device, then what the few need, and after them the several. The many need none.
struct Places {
  int64_t few_q;
  int64_t several_q;
  int64_t division;
  int64_t of_few;
};

Places places_of(const AttentionProblem& p, const Plan& plan) {
  const auto round_up = [](int64_t bytes) { return ceil_div(bytes, 128) * 128; };
  const int64_t table = round_up(p.batch * 4);
  const int64_t division = (plan.parts[kSeveral].count > 0 ? 3 : 2) * table;
  return {table, 2 * table, division, division + round_up(plan.division_bytes)};
}

// A part of the problem: the sequences to which a table leaves their queries.
AttentionProblem part_of(const AttentionProblem& p, const void* lengths) {
  AttentionProblem part = p;
  part.kernel[0] = '\0';
  part.sequences.seqused_q = {lengths, 1};
  return part;
}

// The sequences with many queries: what split_size promises, the kernels of tiles give anyway.
AttentionProblem many_of(const AttentionProblem& p, const void* lengths) {
  AttentionProblem part = part_of(p, lengths);
  part.sequences.split_size = 0;
  return part;
}

AttentionProblem few_of(const AttentionProblem& p, const void* lengths, int64_t most) {
  AttentionProblem part = part_of(p, lengths);
  part.seq_q = std::min(part.seq_q, most);
  return part;
}

// Queries of a tile whose rows are those of all heads of a KV head.
int64_t queries_of_tile(const AttentionProblem& p, const flashmoe_launch& launch) {
  return std::clamp<int64_t>(launch.tile_m * p.heads_kv / p.heads_q, 1, few_queries(p));
}

// A guess at the batch: some sequences are as long as they may be, and the others have one query.
struct BatchMix {
  int64_t many;
  int64_t many_rows;
};

BatchMix mix_of(const AttentionProblem& p) {
  if (p.sequences.cu_seqlens_q.data == nullptr) return {p.batch, p.batch * p.seq_q};
  const int64_t further = std::max<int64_t>(p.sequences.rows_q - p.batch, 0);
  const int64_t many =
      std::clamp<int64_t>((further + p.seq_q - 2) / std::max<int64_t>(p.seq_q - 1, 1), 0, p.batch);
  return {many, std::max<int64_t>(p.sequences.rows_q - (p.batch - many), 0)};
}

// A family's estimate for `batch` sequences of `rows` rows, whose keys are as many as the others'.
double estimate_of(const AttentionFamily& family, const AttentionProblem& part, int64_t batch,
                   int64_t rows) {
  if (batch == 0 || rows == 0) return kNothing;
  AttentionProblem some = part;
  SequenceTables& tables = some.sequences;
  const double share = static_cast<double>(batch) / static_cast<double>(part.batch);
  int64_t& keys = tables.paged ? tables.batch_k : tables.rows_k;
  const bool divides = tables.paged || tables.cu_seqlens_k.data != nullptr;
  if (divides) keys = static_cast<int64_t>(std::ceil(static_cast<double>(keys) * share));
  some.batch = batch;
  tables.rows_q = rows;
  Plan plan = {};
  return family.plan(some, &plan, Reason()) == FLASHMOE_OK ? plan.info.microseconds : kNothing;
}

flashmoe_status ask(const AttentionFamily& family, const AttentionProblem& part, Plan* plan,
                    const Reason& reason) {
  FLASHMOE_TRY(check_family_device(family.device_type, part.device, reason));
  return family.plan(part, plan, reason);
}

// A part's family, its plan, and the estimate by which the family was chosen.
struct PlannedPart {
  const AttentionFamily* family;
  Plan plan;
  double microseconds;
};

// Plans the family with the shortest estimate. With split_size it is the first family that can,
// since an estimate would make the bits depend on the batch. A family that takes a workspace is
// none of them: it divides the keys of a tile among blocks, by all sequences of the batch.
flashmoe_status plan_many(const AttentionProblem& problem, const AttentionProblem& many,
                          const BatchMix& mix, PlannedPart* part, const Reason& reason) {
  flashmoe_status result = FLASHMOE_ERROR_UNSUPPORTED;
  bool behind = false;
  for (const AttentionFamily* family : kAttentionFamilies) {
    if (!behind || family->device_type != many.device.device_type) {
      behind = behind || family == &kMixedAttention;
      continue;
    }
    Plan made = {};
    flashmoe_status status = ask(*family, many, &made, reason);
    if (status == FLASHMOE_ERROR_CUDA) return status;
    if (status == FLASHMOE_OK && made.info.workspace_bytes > 0) {
      status = reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                             "prompts beside decoding, of a family that divides their keys");
    }
    if (result != FLASHMOE_OK) result = status;
    if (status != FLASHMOE_OK) continue;
    const double time = estimate_of(*family, many, mix.many, mix.many_rows);
    if (part->family != nullptr && time >= part->microseconds) continue;
    *part = {family, made, time};
    if (problem.sequences.split_size > 0) break;
  }
  return result;
}

// Plans the first family that can, whatever the batch is: which family decodes does not depend on
// an estimate.
flashmoe_status plan_few(const AttentionProblem& few, const BatchMix& mix, PlannedPart* part,
                         const Reason& reason) {
  flashmoe_status status = FLASHMOE_ERROR_UNSUPPORTED;
  for (const AttentionFamily* family : kAttentionFamilies) {
    if (family == &kMixedAttention) break;
    part->plan = {};
    status = ask(*family, few, &part->plan, reason);
    if (status == FLASHMOE_ERROR_CUDA) break;
    if (status != FLASHMOE_OK) continue;
    part->family = family;
    const int64_t others = few.batch - mix.many;
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
  const BatchMix mix = mix_of(problem);
  PlannedPart many = {};
  PlannedPart few = {};
  FLASHMOE_TRY(plan_many(problem, many_of(problem, there), mix, &many, reason));
  FLASHMOE_TRY(plan_few(few_of(problem, there, few_queries(problem)), mix, &few, reason));
  FLASHMOE_TRY(cuda_plan_lengths(problem, plan, reason));
  // The parts run at a time, if both can: the few go first, to some of the multiprocessors. Most of
  // the few decode one query, though the bound does not say so: they get the kernel for one query,
  // if there is one, and those with more than a tile of it the other kernel, behind all.
  const bool beside = few.plan.division_bytes > 0 && many.plan.division_bytes > 0;
  PlannedPart several = {};
  if (beside) {
    PlannedPart one = {};
    FLASHMOE_TRY(plan_few(few_of(problem, there, 1), mix, &one, reason));
    const flashmoe_launch& launch = one.plan.info.launches[0];
    if (launch.tile_m < few.plan.info.launches[0].tile_m) {
      several = few;
      const int64_t most = queries_of_tile(problem, launch);
      FLASHMOE_TRY(plan_few(few_of(problem, there, most), mix, &few, reason));
    }
    plan->division_bytes = std::max(few.plan.division_bytes, many.plan.division_bytes);
  }
  plan->add_part(kFew, few.family, few.plan, 0, beside ? 1 : 0);
  plan->add_part(kMany, many.family, many.plan, 0, many.plan.info.launch_count);
  plan->add_part(kFewBehind, few.family, few.plan, beside ? 1 : 0, few.plan.info.launch_count);
  plan->add_part(kSeveral, several.family, several.plan, 0, several.plan.info.launch_count);
  plan->info.workspace_bytes =
      static_cast<uint64_t>(places_of(problem, *plan).of_few) +
      std::max(few.plan.info.workspace_bytes, several.plan.info.workspace_bytes);
  plan->info.microseconds = kLengthsTime + many.microseconds + few.microseconds +
                            (several.family != nullptr ? kNothing : 0.0);
  return FLASHMOE_OK;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  auto* const many_q = static_cast<unsigned char*>(workspace);
  const Places places = places_of(problem, plan);
  const auto launch_part = [&](const AttentionProblem& part, const Plan& own, int index,
                               void* of_part) {
    return static_cast<const AttentionFamily*>(plan.parts[index].family)
        ->launch(part, own, of_part, stream);
  };
  Plan many = {};
  plan.copy_part(kMany, &many);
  many.detail = plan.detail;
  Plan few = {};
  plan.copy_part(kFew, &few);
  const int32_t first = few.info.launch_count;
  plan.copy_part(kFewBehind, &few);
  Plan several = {};
  plan.copy_part(kSeveral, &several);

  LengthTables tables = {};
  tables.few = tables.several = few_queries(problem);
  tables.many_q = many_q;
  tables.few_q = many_q + places.few_q;
  tables.many_rows = many.info.launches[0].tile_m;
  tables.few_rows = few.info.launches[0].tile_m;
  if (plan.division_bytes > 0) tables.division = many_q + places.division;
  if (several.info.launch_count > 0) {
    tables.few = queries_of_tile(problem, few.info.launches[0]);
    tables.several_q = many_q + places.several_q;
  }
  FLASHMOE_TRY(cuda_launch_lengths(problem, plan, tables, stream));

  void* const of_few = many_q + places.of_few;
  const AttentionProblem few_problem = few_of(problem, tables.few_q, tables.few);
  many.beside.division = tables.division;
  few.beside = {tables.division, 0, first};
  if (first > 0) FLASHMOE_TRY(launch_part(few_problem, few, kFew, of_few));
  FLASHMOE_TRY(launch_part(many_of(problem, many_q), many, kMany, nullptr));
  few.beside = {tables.division, first, few.info.launch_count};
  FLASHMOE_TRY(launch_part(few_problem, few, kFewBehind, of_few));
  if (tables.several_q == nullptr) return FLASHMOE_OK;
  return launch_part(few_of(problem, tables.several_q, tables.several), several, kSeveral, of_few);
}

}  // namespace

const AttentionFamily kMixedAttention = {"mixed", FLASHMOE_DEVICE_CUDA, &plan, &launch};

}  // namespace flashmoe

#endif
