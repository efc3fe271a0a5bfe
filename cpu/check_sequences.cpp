// Checking the tables of sequences on the CPU: finds what attention would count as no query or no
// key.
#include <algorithm>
#include <cstdint>

#include "core/backends.h"
#include "core/launch.h"
#include "cpu/isa.h"

namespace flashmoe {
namespace {

using Problem = CheckSequencesProblem;

// Finds what is wrong with the tables of one sequence. Lengths are clamped as attention clamps
// them, so that consequences of a wrong one are not counted again.
class Checked {
 public:
  Checked(const Problem& p, int64_t b) : p_(p), t_(p.tables), b_(b) {
    check_queries();
    check_keys();
  }

  int32_t faults() const { return static_cast<int32_t>(faults_); }

 private:
  void add(bool wrong, flashmoe_sequence_fault fault) {
    faults_ |= wrong ? static_cast<uint32_t>(fault) : 0u;
  }

  // The table's number, which should be from `least` to `most`; `absent` without a table.
  int64_t cut(const Numbers& table, int64_t least, int64_t most, int64_t absent,
              flashmoe_sequence_fault fault) {
    if (table.data == nullptr) return absent;
    const int64_t number = table.at(b_);
    add(number < least || number > most, fault);
    return std::clamp(number, least, std::max(least, most));  // a batch of nothing has no last row
  }

  // Rows of a packed batch.
  int64_t room(const Numbers& offsets, int64_t rows, flashmoe_sequence_fault fault) {
    if (offsets.data == nullptr) return rows;
    const int64_t begin = offsets.at(b_), end = offsets.at(b_ + 1);
    add(begin < 0 || begin > rows || end < begin || end > rows, fault);
    const int64_t first = std::clamp<int64_t>(begin, 0, rows);
    return std::clamp<int64_t>(end, first, rows) - first;
  }

  void check_queries() {
    const int64_t rows = room(t_.cu_seqlens_q, t_.rows_q, FLASHMOE_FAULT_CU_SEQLENS_Q);
    const int64_t queries = cut(t_.seqused_q, 0, rows, rows, FLASHMOE_FAULT_SEQUSED_Q);
    add(p_.most_q > 0 && queries > p_.most_q, FLASHMOE_FAULT_MAX_SEQLEN_Q);
  }

  void check_keys() {
    int64_t keys = t_.paged ? t_.page_count * t_.rows_k
                            : room(t_.cu_seqlens_k, t_.rows_k, FLASHMOE_FAULT_CU_SEQLENS_K);
    cut(t_.batch_index, 0, t_.batch_k - 1, 0, FLASHMOE_FAULT_BATCH_INDEX);
    keys = cut(t_.seqused_k, 0, keys, keys, FLASHMOE_FAULT_SEQUSED_K);
    const int64_t begin = cut(t_.k_begin, 0, keys, 0, FLASHMOE_FAULT_K_BEGIN);
    keys -= begin;
    add(p_.most_k > 0 && keys > p_.most_k, FLASHMOE_FAULT_MAX_SEQLEN_K);
    if (p_.most_k > 0) keys = std::min(keys, p_.most_k);
    if (t_.paged && keys > 0) check_pages(begin / t_.rows_k, (begin + keys - 1) / t_.rows_k);
  }

  void check_pages(int64_t first, int64_t last) {
    const auto* const pages = static_cast<const int32_t*>(t_.page_table.data);
    for (int64_t i = first; i <= last; ++i) {
      const int64_t page = pages[b_ * t_.page_table.stride + i * t_.page_step];
      add(page < 0 || page >= t_.batch_k, FLASHMOE_FAULT_PAGE_TABLE);
    }
  }

  const Problem& p_;
  const SequenceTables& t_;
  const int64_t b_;
  uint32_t faults_ = 0;
};

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& /*reason*/) {
  plan->set_isa(cpu::isa_name(cpu::Isa::kScalar));
  plan->add_launch("check_sequences_cpu", nullptr, p.device, 1, 1);
  return FLASHMOE_OK;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* /*stream*/) {
  for (int64_t b = 0; b < p.batch; ++b) {
    static_cast<int32_t*>(p.status)[b * p.status_step] = Checked(p, b).faults();
  }
  record_launch(plan.info.launches[0]);
  return FLASHMOE_OK;
}

}  // namespace

const CheckSequencesFamily kCpuCheckSequences = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
