// The problem of checking the tables of sequences: the C ABI's arguments after validation, which
// every backend takes. A plain struct; see docs/architecture.md for the flow.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"

namespace flashmoe {

// A validated call. The tables are those of the attention call, with its extents.
struct CheckSequencesProblem {
  flashmoe_device device;

  SequenceTables tables;
  int64_t batch;        // sequences
  int64_t most_q;       // the call's bound of a sequence's queries; 0: none
  int64_t most_k;       // the same for keys
  void* status;         // [batch] int32
  int64_t status_step;  // elements

  KernelName kernel;  // the kernel or family that the call asks for, or ""
};

template <class Visit>
void visit_addresses(CheckSequencesProblem* p, const Visit& visit) {
  visit_tables(p->tables, [&](Numbers* table) { visit(&table->data); });
  visit(&p->status);
}

}  // namespace flashmoe
