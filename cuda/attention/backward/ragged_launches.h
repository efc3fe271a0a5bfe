// What the families of the attention backward share on the host of ragged and padded batches: the
// workspace, the launches, and the parameters that all kernels get.
#pragma once

#include "cuda/attention/backward/launches.h"
#include "cuda/attention/backward/ragged_params.h"

namespace flashmoe::attention_backward {

// The launch of the kernel itself in a plan: behind that which reads the tables, and the prologue.
inline constexpr int kRaggedKernelLaunch = 2;

// As tile_counts_of.
TileCounts ragged_tile_counts_of(const AttentionBackwardProblem& problem, const Entry& entry);

// Plans the launches: who reads the tables, the prologue, the kernel by at most `most_blocks`
// blocks, as many as run at a time, and what comes behind it: dsinks where they are wanted, a
// repair where there are bounds. `suffix` is that of plan_launch.
flashmoe_status plan_ragged_launches(const AttentionBackwardProblem& problem, const Entry& entry,
                                     const DeviceFacts& facts, const char* suffix,
                                     int64_t most_blocks, const Reason& reason, Plan* plan);

// Fills the parameters but for addresses, and those.
void fill_ragged_params(const AttentionBackwardProblem& problem, const Entry& entry,
                        RaggedParams* params);
// A row in the workspace, for maps of tensors that are absent or have no rows.
void* unwanted_row(const AttentionBackwardProblem& problem, const Entry& entry, char* workspace);

void fill_ragged_addresses(const AttentionBackwardProblem& problem, const Entry& entry,
                           char* workspace, RaggedParams* params);

}  // namespace flashmoe::attention_backward
