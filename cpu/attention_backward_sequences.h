// Attention backward of ragged and padded batches on the CPU: flashmoe_attention_sequences.
//
// Once the lengths are read, each sequence is a dense problem with batch 1 (sequence_rows.h) and
// has the bits of the dense call. Rows and keys of no sequence get gradients of 0.
#pragma once

#include <cstdint>

#include "core/plan.h"
#include "core/status.h"
#include "cpu/attention_backward_kernel.h"

namespace flashmoe::cpu {

// Bytes of the workspace that threads share, in whole cache lines. Each thread's scratch follows.
flashmoe_status backward_sequences_bytes(const AttentionBackwardProblem& problem,
                                         const AttentionBackwardKernel& kernel, uint64_t* bytes,
                                         const Reason& reason);

// `workspace` begins with a cache line.
void launch_backward_sequences(const AttentionBackwardProblem& problem,
                               const AttentionBackwardKernel& kernel, int32_t threads,
                               unsigned char* workspace);

}  // namespace flashmoe::cpu
