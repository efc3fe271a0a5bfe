// Attention with a partial result of other keys merged in: an attention call whose results go to
// the workspace, then the merge of the two. Every attention family serves it. forward.cpp has the
// checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "core/backends.h"
#include "core/ops/attention/families.h"
#include "core/ops/attention/problem.h"
#include "core/ops/merge_states/problem.h"
#include "core/plan.h"

namespace flashmoe {

// Attention writes its results where the merge reads them. Only a launch knows these addresses; a
// plan knows that they are not null.
struct AttentionMergeInProblem {
  flashmoe_device device;
  AttentionProblem attention;
  MergeStatesProblem merge;
  KernelName kernel;
};

template <class Visit>
void visit_addresses(AttentionMergeInProblem* p, const Visit& visit) {
  visit_addresses(&p->attention, visit);
  visit_addresses(&p->merge, visit);
}

// Puts the workspace between the two calls: `attention` writes its results there, and `merge` reads
// them there as its partial. On entry `attention` has the results of `merge`, and `merge` has a
// prior. `rows` are the rows of one entry of q's batch.
void divide_merge_in(int64_t batch, int64_t rows, AttentionMergeInProblem* problem);

flashmoe_status plan_merge_in(const Family<AttentionProblem>& family,
                              const AttentionMergeInProblem& problem, Plan* plan,
                              const Reason& reason);
flashmoe_status launch_merge_in(const Family<AttentionProblem>& family,
                                const AttentionMergeInProblem& problem, const Plan& plan,
                                void* workspace, void* stream);

using AttentionMergeInFamily = Family<AttentionMergeInProblem>;

// An attention family followed by the merge, under the family's name.
template <const AttentionFamily& kFamily>
struct MergeIn {
  static flashmoe_status plan(const AttentionMergeInProblem& problem, Plan* plan,
                              const Reason& reason) {
    return plan_merge_in(kFamily, problem, plan, reason);
  }
  static flashmoe_status launch(const AttentionMergeInProblem& problem, const Plan& plan,
                                void* workspace, void* stream) {
    return launch_merge_in(kFamily, problem, plan, workspace, stream);
  }
  static const AttentionMergeInFamily family;
};
template <const AttentionFamily& kFamily>
const AttentionMergeInFamily MergeIn<kFamily>::family = {kFamily.name, kFamily.device_type, &plan,
                                                         &launch, kFamily.schedules};

struct AttentionMergeInFamilies {
  static constexpr size_t kCount = std::size(kAttentionFamilies);
  const AttentionMergeInFamily* list[kCount];

  template <size_t... kIndices>
  static constexpr AttentionMergeInFamilies make(std::index_sequence<kIndices...>) {
    return {{&MergeIn<*kAttentionFamilies[kIndices]>::family...}};
  }
};

// In the order of attention's families.
inline constexpr AttentionMergeInFamilies kAttentionMergeInFamilies =
    AttentionMergeInFamilies::make(std::make_index_sequence<AttentionMergeInFamilies::kCount>());

}  // namespace flashmoe
