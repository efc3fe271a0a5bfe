// Attention forward of ragged, padded and paged batches on the CPU: flashmoe_attention_sequences.
//
// Once the lengths are read, each sequence is a dense problem with batch 1, whose tensors begin
// where its rows do. The kernels know nothing else except pages of keys. So a sequence has the bits
// of the dense call.
#pragma once

#include "core/plan.h"
#include "core/status.h"
#include "cpu/attention_kernel.h"

namespace flashmoe::cpu {

flashmoe_status plan_sequences(const AttentionProblem& problem, const AttentionKernel& kernel,
                               int32_t threads, Plan* plan, const Reason& reason);

void launch_sequences(const AttentionProblem& problem, const AttentionKernel& kernel,
                      const flashmoe_launch& planned, void* workspace);

}  // namespace flashmoe::cpu
