// What the families of the attention backward share on the host: the workspace, the launches, and
// the parameters of all kernels.
#pragma once

#include <cstdint>

#include "core/ops/attention/problem.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/attention/backward/entry.h"
#include "cuda/attention/backward/params.h"
#include "cuda/runtime.h"

namespace flashmoe::attention_backward {

// The offsets of the parts of the workspace.
struct Layout {
  int64_t row_lse;
  int64_t row_delta;
  int64_t turns;
  int64_t ticket;
  int64_t split_turns;
  int64_t unwanted;  // a row, for maps of tensors that are absent or have no rows
  int64_t dq_sums;
  int64_t split_sums;
  int64_t bytes;
};

Layout layout_of(const AttentionProblem& problem, const Entry& entry);

// Upper bounds on the tiles of dQ over all query heads, and of keys over all KV heads.
struct TileCounts {
  int64_t queries;
  int64_t keys;
};

TileCounts tile_counts_of(const AttentionProblem& problem, const Entry& entry);

// Whether a row may see only some of the keys, so that non-finite values must stay out of others.
bool is_bounded(const AttentionProblem& problem);

// Bytes of a row of q that the steps of an item read and add to a sum.
int64_t row_bytes_of(const AttentionProblem& problem);

flashmoe_status check_lengths(const AttentionProblem& problem, const Reason& reason);

// Plans the launches: the prologue; the kernel with at most `most_blocks` blocks, as many as run at
// a time; and the kernel after it, which does dsinks if wanted and a repair if there are bounds.
// `suffix` is that of plan_launch.
flashmoe_status plan_launches(const AttentionBackwardProblem& problem, const Entry& entry,
                              const DeviceFacts& facts, const char* suffix, int64_t most_blocks,
                              const Reason& reason, Plan* plan);

// Plans only the kernel, for `items` items, and the kernel after it. The kernel is loaded.
flashmoe_status plan_items(const AttentionBackwardProblem& problem, const Entry& entry,
                           const DeviceFacts& facts, const char* suffix, int64_t items,
                           int64_t most_blocks, const Reason& reason, Plan* plan);

// Fills the parameters except addresses.
void fill_params(const AttentionBackwardProblem& problem, const Entry& entry, CommonParams* params);

void fill_addresses(const AttentionBackwardProblem& problem, const Layout& layout, char* workspace,
                    CommonParams* params);

}  // namespace flashmoe::attention_backward
