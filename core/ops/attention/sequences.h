// The checks of flashmoe_attention_sequences: all that there are, in one place.
#pragma once

#include <cstddef>

#include "core/checks.h"
#include "core/ops/attention/checks.h"
#include "core/ops/attention/problem.h"

namespace flashmoe {

// The fields that the caller's struct has, by its size, which is checked. The others are zero.
flashmoe_attention_sequences known_sequences(const flashmoe_attention_sequences& given);

// A table of params that may have some.
template <const flashmoe_tensor* flashmoe_attention_sequences::* kMember, class Params>
const flashmoe_tensor* table_of(const Params& params) {
  return params.sequences != nullptr ? known_sequences(*params.sequences).*kMember : nullptr;
}

// What can be said of them alone: their size, their bounds, and what is given together.
flashmoe_status check_sequences(const flashmoe_attention_sequences& given);

// Reads the tables beside q and k, and fills the problem's batch, its lengths as bounds and its
// tables.
flashmoe_status read_sequences(const AttentionArguments& arguments, const View& q, const View& k,
                               AttentionProblem* problem);

// print_attention() of a problem that has them.
int print_sequences(const AttentionProblem& problem, char* text, size_t size);

}  // namespace flashmoe
