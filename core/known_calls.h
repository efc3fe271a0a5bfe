// Calls that a thread planned before. Programs repeat few shapes, and validating and planning one
// costs the host more than launching it.
//
// A call is found again by everything that its validation and its plan read, compared exactly, but
// for addresses; the rules for those are checked anew. What a failed call came to is not kept. Only
// calls on a GPU are: their plans follow from the problem and the device, where the CPU's follow
// from the number of threads too.
#pragma once

#include "core/attention.h"

namespace flashmoe {

struct KnownCall {
  AttentionProblem problem;  // with the pointers of the call at hand
  AttentionPlan plan;
  const AttentionFamily* family;
};

// What this thread kept of such a call, or nullptr. Valid until the thread's next call, which a log's
// callback may make.
const KnownCall* find_known_call(const flashmoe_attention_forward_params* params);

// Keeps what a call came to that was validated and planned without an error.
void remember_call(const flashmoe_attention_forward_params& params, const AttentionProblem& problem,
                   const AttentionPlan& plan, const AttentionFamily& family);

}  // namespace flashmoe
