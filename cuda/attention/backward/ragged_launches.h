// What the families of the attention backward share on the host for ragged and padded batches: the
// workspace, the launches, and the parameters of all kernels.
#pragma once

#include "cuda/attention/backward/launches.h"
#include "cuda/attention/backward/ragged_params.h"

namespace flashmoe::attention_backward {

// The index of the main kernel's launch in a plan: after the kernel that reads the tables and the
// prologue.
inline constexpr int kRaggedKernelLaunch = 2;

// Like tile_counts_of.
TileCounts ragged_tile_counts_of(const AttentionBackwardProblem& problem, const Entry& entry);

// Plans the launches: the kernel that reads the tables; the prologue; the kernel with at most
// `most_blocks` blocks, as many as run at a time; and the kernel after it, which does dsinks if
// wanted and a repair if there are bounds. `suffix` is that of plan_launch.
flashmoe_status plan_ragged_launches(const AttentionBackwardProblem& problem, const Entry& entry,
                                     const DeviceFacts& facts, const char* suffix,
                                     int64_t most_blocks, const Reason& reason, Plan* plan);

// Two functions fill the parameters: this one all except addresses, fill_ragged_addresses those.
void fill_ragged_params(const AttentionBackwardProblem& problem, const Entry& entry,
                        RaggedParams* params);
// A row in the workspace, for maps of tensors that are absent or have no rows.
void* unwanted_row(const AttentionBackwardProblem& problem, const Entry& entry, char* workspace);

void fill_ragged_addresses(const AttentionBackwardProblem& problem, const Entry& entry,
                           char* workspace, RaggedParams* params);

}  // namespace flashmoe::attention_backward
