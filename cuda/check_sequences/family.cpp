// The check of the tables of sequences on a GPU. One implementation serves all GPUs. This file
// plans and launches its kernel.
#include <climits>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/check_sequences/check.h"

namespace flashmoe::check_sequences {
namespace {

using Problem = CheckSequencesProblem;

constexpr int kSequencesOfBlock = kThreads / 32;
constexpr double kMicroseconds = 2.5;  // no choice depends on it

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  if (p.batch > INT_MAX / 32) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s", "more than 2^26 - 1 sequences");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kCheckSequences, device_id, *facts, &arch, reason));
  plan->info.microseconds = kMicroseconds;
  plan_launch(kCheckSequences, device_id, "", p.batch / kSequencesOfBlock + 1, kThreads, 0, plan);
  return FLASHMOE_OK;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  const SequenceTables& tables = p.tables;
  Params params = {};
  params.cu_seqlens_q = table_numbers(tables.cu_seqlens_q);
  params.cu_seqlens_k = table_numbers(tables.cu_seqlens_k);
  params.seqused_q = table_numbers(tables.seqused_q);
  params.seqused_k = table_numbers(tables.seqused_k);
  params.k_begin = table_numbers(tables.k_begin);
  params.batch_index = table_numbers(tables.batch_index);
  params.page_table = table_numbers(tables.page_table);
  params.page_step = tables.page_step;
  params.rows_q = tables.rows_q;
  params.room_k = tables.paged ? tables.page_count * tables.rows_k : tables.rows_k;
  params.batch_k = tables.batch_k;
  params.page_size = tables.rows_k;
  params.most_q = p.most_q;
  params.most_k = p.most_k;
  params.status = static_cast<int32_t*>(p.status);
  params.status_step = p.status_step;
  params.sequences = static_cast<int32_t>(p.batch);
  params.paged = tables.paged ? 1 : 0;
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace
}  // namespace flashmoe::check_sequences

namespace flashmoe {

// The check has the name of the oldest GPU family because it is the same on all GPUs.
const CheckSequencesFamily kCudaCheckSequences = {"sm89", FLASHMOE_DEVICE_CUDA,
                                                  &check_sequences::plan, &check_sequences::launch};

}  // namespace flashmoe
