// The mixed family: batches of prompts beside decoding. A small kernel tells sequences with few
// queries from the others; then the kernels of a family of tiles compute the others, and those of
// sm89_decode the few, each of tables in which the rest has no queries.
//
// Both parts are families as the core sees them. This one knows what is theirs to compute, and
// nothing of how.
#include <algorithm>
#include <climits>
#include <cstring>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/few_queries.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/mixed/lengths.h"

namespace flashmoe::mixed {
namespace {

// Microseconds of the first kernel, and of one that finds nothing to do.
constexpr double kLengthsTime = 2.0;
constexpr double kNothing = 4.0;

const AttentionFamily* const kOfMany[] = {
#if FLASHMOE_WITH_SM90
    &kSm90Attention,
#endif
    &kSm89Attention,
};

// Offsets in the workspace: behind the first table of lengths the second, and what the few need.
// Kernels of tiles need none.
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

// A family's estimate of so many sequences with so many rows.
double estimate_of(const AttentionFamily& family, const AttentionProblem& part, int64_t batch,
                   int64_t rows) {
  if (batch == 0 || rows == 0) return kNothing;
  AttentionProblem some = part;
  some.batch = batch;
  some.sequences.rows_q = rows;
  Plan plan = {};
  return family.plan(some, &plan, Reason()) == FLASHMOE_OK ? plan.info.microseconds : kNothing;
}

void append(const Plan& part, Plan* plan) {
  for (int32_t i = 0; i < part.info.launch_count; ++i) {
    plan->entries[plan->info.launch_count] = part.entries[i];
    plan->info.launches[plan->info.launch_count++] = part.info.launches[i];
  }
}

// The launches of a plan from `first` on, as the family that planned them made them.
Plan part_of(const Plan& plan, int32_t first, int32_t count) {
  Plan part = {};
  for (int32_t i = 0; i < count; ++i) {
    part.entries[i] = plan.entries[first + i];
    part.info.launches[i] = plan.info.launches[first + i];
  }
  part.info.launch_count = count;
  return part;
}

// The family that computes many queries: of those that can the one with the shortest estimate; with
// split_size the first, since an estimate would have bits depend on the batch.
flashmoe_status plan_many(const AttentionProblem& problem, const AttentionProblem& many,
                          const Shares& shares, Plan* plan, double* microseconds,
                          const Reason& reason) {
  flashmoe_status result = FLASHMOE_ERROR_UNSUPPORTED;
  for (const AttentionFamily* family : kOfMany) {
    Plan made = {};
    const flashmoe_status status = family->plan(many, &made, reason);
    if (status == FLASHMOE_ERROR_CUDA) return status;
    if (result != FLASHMOE_OK) result = status;
    if (status != FLASHMOE_OK) continue;
    const double time = estimate_of(*family, many, shares.many, shares.many_rows);
    if (plan->info.launch_count > 0 && time >= *microseconds) continue;
    *plan = made;
    *microseconds = time;
    if (problem.sequences.split_size > 0) break;
  }
  return result;
}

// Whichever family it is of: their kernels have names.
const AttentionFamily& family_of(const flashmoe_launch& launch) {
#if FLASHMOE_WITH_SM90
  if (std::strncmp(launch.kernel, "attention_forward_sm90_", 23) == 0) return kSm90Attention;
#endif
  (void)launch;
  return kSm89Attention;
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
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
  const AttentionProblem many = many_of(problem, there);
  const AttentionProblem few = few_of(problem, there);
  const Shares shares = shares_of(problem);
  Plan of_many = {};
  Plan of_few = {};
  double microseconds = 0;
  FLASHMOE_TRY(plan_many(problem, many, shares, &of_many, &microseconds, reason));
  FLASHMOE_TRY(kSm89DecodeAttention.plan(few, &of_few, reason));
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kLengths, device_id, *facts, &arch, reason));
  plan_launch(kLengths, device_id, "", (problem.batch + kLengthsThreads - 1) / kLengthsThreads,
              kLengthsThreads, 0, plan);
  append(of_many, plan);
  append(of_few, plan);
  plan->info.workspace_bytes =
      static_cast<uint64_t>(places_of(problem).of_few) + of_few.info.workspace_bytes;
  const int64_t others = problem.batch - shares.many;
  plan->info.microseconds =
      kLengthsTime + microseconds + estimate_of(kSm89DecodeAttention, few, others, others);
  return FLASHMOE_OK;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  constexpr int32_t kLaunchesOfFew = 2;
  constexpr int32_t kFirstOfMany = 1;
  const int32_t first_of_few = plan.info.launch_count - kLaunchesOfFew;
  Plan many = part_of(plan, kFirstOfMany, first_of_few - kFirstOfMany);
  many.detail = plan.detail;
  const Plan few = part_of(plan, first_of_few, kLaunchesOfFew);
  auto* const base = static_cast<unsigned char*>(workspace);
  const Places places = places_of(problem);

  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  LengthsParams params;
  params.sequences = sequence_params(problem);
  params.few = static_cast<int32_t>(few_queries(problem));
  params.many_q = reinterpret_cast<int32_t*>(base);
  params.few_q = reinterpret_cast<int32_t*>(base + places.few_q);
  FLASHMOE_TRY(launch_planned(plan, 0, &params, stream));
  FLASHMOE_TRY(family_of(many.info.launches[0])
                   .launch(many_of(problem, params.many_q), many, nullptr, stream));
  return kSm89DecodeAttention.launch(few_of(problem, params.few_q), few, base + places.of_few,
                                     stream);
}

}  // namespace
}  // namespace flashmoe::mixed

namespace flashmoe {

const AttentionFamily kMixedAttention = {"mixed", FLASHMOE_DEVICE_CUDA, &mixed::plan,
                                         &mixed::launch};

}  // namespace flashmoe
