// The interface of the backends. core/ sees nothing else of a backend; each declaration is defined
// once, in cpu/ or cuda/.
#pragma once

#include "core/ops/attention/append_problem.h"
#include "core/ops/attention/check_problem.h"
#include "core/ops/attention/gather_problem.h"
#include "core/ops/attention/problem.h"
#include "core/ops/merge_states/problem.h"
#include "core/ops/moe/problem.h"
#include "core/plan.h"

namespace flashmoe {

using AttentionFamily = Family<AttentionProblem>;
using AttentionBackwardFamily = Family<AttentionBackwardProblem>;
using CheckSequencesFamily = Family<CheckSequencesProblem>;
using KvAppendFamily = Family<KvAppendProblem>;
using KvGatherFamily = Family<KvGatherProblem>;
using MergeStatesFamily = Family<MergeStatesProblem>;
using MoeRouteFamily = Family<MoeRouteProblem>;
using MoeForwardFamily = Family<MoeForwardProblem>;
using GroupedProductFamily = Family<GroupedProductProblem>;
using MoeRouteBackwardFamily = Family<MoeRouteBackwardProblem>;
using MoeBackwardFamily = Family<MoeBackwardProblem>;
using GroupedProductBackwardFamily = Family<GroupedProductBackwardProblem>;

// The family names that the `kernel` of a call may have, in any operation.
inline constexpr char kFamilyNames[] =
#if !FLASHMOE_WITH_CUDA
    "cpu";
#elif FLASHMOE_WITH_SM90
    "cpu mixed sm89 sm89_decode sm89_few_rows sm89_few_tokens sm90 sm90_mla";
#else
    "cpu mixed sm89 sm89_decode sm89_few_rows sm89_few_tokens";
#endif

// cpu/
extern const AttentionFamily kCpuAttention;
extern const AttentionBackwardFamily kCpuAttentionBackward;
extern const CheckSequencesFamily kCpuCheckSequences;
extern const KvAppendFamily kCpuKvAppend;
extern const KvGatherFamily kCpuKvGather;
extern const MergeStatesFamily kCpuMergeStates;
extern const MoeRouteFamily kCpuMoeRoute;
extern const MoeForwardFamily kCpuMoeForward;
extern const GroupedProductFamily kCpuGroupedProduct;
extern const MoeRouteBackwardFamily kCpuMoeRouteBackward;
extern const MoeBackwardFamily kCpuMoeBackward;
extern const GroupedProductBackwardFamily kCpuGroupedProductBackward;
flashmoe_status cpu_device_info(flashmoe_device_info* info);
int32_t cpu_set_num_threads(int32_t n);  // n = 0: default; returns the number in use
int32_t cpu_get_num_threads();

// cuda/ (only in a build with FLASHMOE_CUDA)
#if FLASHMOE_WITH_CUDA
extern const AttentionFamily kSm89FewRowsAttention;
extern const AttentionFamily kSm89DecodeAttention;
extern const AttentionFamily kSm89Attention;
extern const AttentionBackwardFamily kSm89AttentionBackward;
extern const CheckSequencesFamily kCudaCheckSequences;  // for every GPU
extern const KvAppendFamily kCudaKvAppend;              // for every GPU
extern const KvGatherFamily kCudaKvGather;              // for every GPU
extern const MergeStatesFamily kCudaMergeStates;        // for every GPU
extern const MoeRouteFamily kCudaMoeRoute;              // for every GPU
extern const MoeForwardFamily kSm89FewTokensMoeForward;
extern const MoeForwardFamily kSm89MoeForward;
extern const GroupedProductFamily kSm89GroupedProduct;
extern const MoeRouteBackwardFamily kCudaMoeRouteBackward;  // for every GPU
extern const MoeBackwardFamily kSm89MoeBackward;
extern const GroupedProductBackwardFamily kSm89GroupedProductBackward;
#if FLASHMOE_WITH_SM90  // built for sm_90a
extern const AttentionFamily kSm90Attention;
extern const AttentionFamily kSm90MlaAttention;
extern const AttentionBackwardFamily kSm90AttentionBackward;
extern const MoeForwardFamily kSm90MoeForward;
extern const GroupedProductFamily kSm90GroupedProduct;
extern const MoeBackwardFamily kSm90MoeBackward;
extern const GroupedProductBackwardFamily kSm90GroupedProductBackward;
#endif
// The two offsets {0, 2^31 - 1} in device memory. They give a product of one expert all rows.
flashmoe_status cuda_all_rows(int32_t device_id, const int32_t** offsets);
// Tells sequences with few queries from the others. It writes tables of lengths on the device,
// [batch] int32 each; each table gives the other kinds of sequences no queries. If both kinds run
// concurrently, it also divides the multiprocessors among them. The first function appends the
// launch to a plan.
struct LengthTables {
  int64_t few;      // the most queries of a sequence with few
  int64_t several;  // the most queries of the kind between few and many; not less
  void* many_q;
  void* few_q;
  void* several_q;    // nullptr: none
  void* division;     // nullptr: no division
  int32_t many_rows;  // rows per tile for sequences with many queries
  int32_t few_rows;   // rows per tile for the others: of all heads of a KV head
};
flashmoe_status cuda_plan_lengths(const AttentionProblem& problem, Plan* plan,
                                  const Reason& reason);
flashmoe_status cuda_launch_lengths(const AttentionProblem& problem, const Plan& plan,
                                    const LengthTables& tables, void* stream);
int32_t cuda_device_count();
int32_t cuda_runtime_version();
flashmoe_status cuda_device_info(int32_t device_id, flashmoe_device_info* info);
#endif

}  // namespace flashmoe
