// Attention backward of ragged and padded batches on the CPU: flashmoe_attention_sequences.
//
// Once the lengths are read each sequence is a dense problem of one batch (sequence_rows.h), and
// has the bits of the dense call. Rows and keys that no sequence has get gradients of 0.
#pragma once

#include <cstdint>

#include "core/plan.h"
#include "core/status.h"
#include "cpu/attention_backward_kernel.h"

namespace flashmoe::cpu {

// Bytes of the workspace that threads share, in whole cache lines. Behind it each has its scratch.
flashmoe_status backward_sequences_bytes(const AttentionBackwardProblem& problem,
                                         const AttentionBackwardKernel& kernel, uint64_t* bytes,
                                         const Reason& reason);

// `workspace` begins with a cache line.
void launch_backward_sequences(const AttentionBackwardProblem& problem,
                               const AttentionBackwardKernel& kernel, int32_t threads,
                               unsigned char* workspace);

}  // namespace flashmoe::cpu
