// All checks of flashmoe_attention_sequences.
#pragma once

#include <cstddef>

#include "core/checks.h"
#include "core/ops/attention/checks.h"
#include "core/ops/attention/problem.h"

namespace flashmoe {

// The fields that the caller's struct has by its size, which has been checked. The others are zero.
flashmoe_attention_sequences known_sequences(const flashmoe_attention_sequences& given);

// A table of the sequences of `params`, or nullptr.
template <const flashmoe_tensor* flashmoe_attention_sequences::* kMember, class Params>
const flashmoe_tensor* table_of(const Params& params) {
  return params.sequences != nullptr ? known_sequences(*params.sequences).*kMember : nullptr;
}

// Checks what needs no other tensor: their size, their bounds, and what is given together.
flashmoe_status check_sequences(const flashmoe_attention_sequences& given);

// Reads the tables together with q and k. Fills the problem's batch, its lengths as bounds, and its
// tables.
flashmoe_status read_sequences(const AttentionArguments& arguments, const View& q, const View& k,
                               AttentionProblem* problem);

// print_attention() of a problem with sequences.
int print_sequences(const AttentionProblem& problem, char* text, size_t size);

}  // namespace flashmoe
