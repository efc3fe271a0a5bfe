// What the attention families share on the host: properties of a kernel, how to find and plan it,
// and how to launch its plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/attention/tensors.h"
#include "cuda/divisor.h"
#include "cuda/launch.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe {

inline constexpr int64_t kMaxSequence = int64_t{1} << 30;  // row + offset + 1 fits in int32

// For a family whose kernels do not read tables: refuses ragged, padded and paged batches.
inline flashmoe_status refuse_sequences(const AttentionProblem& problem, const Reason& reason) {
  if (!problem.sequences.given) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                       "ragged, padded and paged batches, whose tables its kernels do not read");
}

// For a family whose kernels cover only the head dimensions that also have gradients.
inline flashmoe_status refuse_wide_heads(const AttentionProblem& problem, const Reason& reason) {
  if (problem.dim <= kMaxGradientHeadDim && problem.dim_v <= kMaxGradientHeadDim) {
    return FLASHMOE_OK;
  }
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "head dimensions %lld of q and k and %lld of v, accepted are up to %lld",
                       static_cast<long long>(problem.dim), static_cast<long long>(problem.dim_v),
                       static_cast<long long>(kMaxGradientHeadDim));
}

// For a family whose kernels read only keys and values of the queries' type.
inline flashmoe_status refuse_scaled_keys(const AttentionProblem& problem, const Reason& reason) {
  if (!has_scaled_keys(problem)) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                       "keys and values of 8 bits or with scales, accepted are those of q's dtype "
                       "without");
}

// For a family whose kernels compute each sequence as a whole. With chunks, bits would depend on
// the choice of family, and that choice depends on the batch.
inline flashmoe_status refuse_split_size(const AttentionProblem& problem, const Reason& reason) {
  if (problem.sequences.split_size == 0) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                       "split_size, chunks of keys, which its kernels do not know");
}

inline bool has_bias_or_mask(const AttentionProblem& problem) {
  return problem.bias.data != nullptr || problem.mask.data != nullptr;
}

// For a family whose kernels do not read a bias or a mask.
inline flashmoe_status refuse_bias_and_mask(const AttentionProblem& problem, const Reason& reason) {
  if (!has_bias_or_mask(problem)) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s, which its kernels do not read",
                       problem.bias.data != nullptr ? "attn_bias" : "attn_mask");
}

// For a family whose kernels read tables: checks extents that the kernels could not count.
inline flashmoe_status check_sequences_fit(const AttentionProblem& problem, const Reason& reason) {
  const SequenceTables& tables = problem.sequences;
  if (!tables.given) return FLASHMOE_OK;
  const AttentionMask& mask = tables.mask;
  const auto wide = [&](uint32_t side, int64_t window) {
    return (mask.window & side) != 0 && window > kMostOffsetWindow;
  };
  if (tables.q_offset.data != nullptr &&
      (problem.seq_q > kMostOffsetRows || problem.seq_k > kMostOffsetRows ||
       wide(FLASHMOE_WINDOW_LEFT, mask.window_left) ||
       wide(FLASHMOE_WINDOW_RIGHT, mask.window_right))) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%s",
        "q_offset beside more than 2^27 rows of a sequence or a window beyond 2^29");
  }
  const int64_t pages = tables.paged ? tables.page_count : 1;
  if (problem.batch <= kMostTableRows && tables.rows_q <= kMostTableRows &&
      tables.rows_k <= kMostTableRows &&
      (tables.rows_k == 0 || pages <= kMostTableRows / tables.rows_k)) {
    return FLASHMOE_OK;
  }
  return reason.refuse(
      FLASHMOE_ERROR_UNSUPPORTED, "%s",
      "more than 2^29 rows of q or k, or of the pages of a sequence, or sequences");
}

// Fills the parameters that every family has.
template <class Params>
void fill_tensors_and_score(const AttentionProblem& p, Params* params) {
  AttentionTensors& tensors = params->tensors;
  tensors.lse = static_cast<float*>(p.lse);
  tensors.lse_strides = p.lse_strides;
  tensors.q = static_cast<const uint16_t*>(p.q.data);
  tensors.k = static_cast<const uint16_t*>(p.k.data);
  tensors.v = static_cast<const uint16_t*>(p.v.data);
  tensors.out = static_cast<uint16_t*>(p.out.data);
  tensors.q_strides = p.q.strides;
  tensors.k_strides = p.k.strides;
  tensors.v_strides = p.v.strides;
  tensors.out_strides = p.out.strides;
  tensors.dim = static_cast<int32_t>(p.dim);
  tensors.dim_v = static_cast<int32_t>(p.dim_v);
  params->score = score_options(p);
}

// The same for a dense batch.
template <class Params>
void fill_common(const AttentionProblem& p, Params* params) {
  fill_tensors_and_score(p, params);
  params->seq_k = static_cast<int32_t>(p.seq_k);
}

// Fills the parameters of kernels whose tiles are of one query head, in the order of an L2 swizzle
// (cuda/tile/scheduler.cuh).
template <class Params>
void fill_swizzle(const AttentionProblem& p, int64_t tiles_per_head, int64_t heads_per_swizzle,
                  Params* params) {
  const auto divisor = [](int64_t value) { return Divisor::of(static_cast<uint32_t>(value)); };
  const int64_t heads = p.batch * p.heads_q;
  params->heads = static_cast<int32_t>(heads);
  params->tiles_per_head = static_cast<int32_t>(tiles_per_head);
  params->heads_per_swizzle = static_cast<int32_t>(heads_per_swizzle);
  params->by_heads_q = divisor(p.heads_q);
  params->by_heads_per_kv = divisor(p.heads_q / p.heads_kv);
  params->by_heads_per_swizzle = divisor(heads_per_swizzle);
  params->by_heads_of_last_swizzle =
      divisor(heads - (heads - 1) / heads_per_swizzle * heads_per_swizzle);
  params->by_tiles_per_swizzle = divisor(heads_per_swizzle * tiles_per_head);
}

// A kernel whose blocks are all alike. Families add their own members.
struct AttentionKernel : Kernel {
  Dtype dtype;
  int dim;
  int dim_v;
  int tile_q;
  int tile_k;
  int stages;
  int threads;
};

// Finds a kernel for the problem's dtype and head dimensions that also passes `serves`. A kernel
// that the problem names wins, otherwise the one with the least padding; among equals, the first
// that `fits`. nullptr if there is none.
template <class Entry, size_t kCount, class Serves, class Fits>
const Entry* find_entry(const Entry* const (&entries)[kCount], const AttentionProblem& problem,
                        const Serves& serves, const Fits& fits) {
  const Entry* best = nullptr;
  for (const Entry* entry : entries) {
    if (entry->dtype != problem.q.dtype || entry->dim < problem.dim ||
        entry->dim_v < problem.dim_v || !serves(*entry)) {
      continue;
    }
    if (std::strcmp(problem.kernel, entry->name) == 0) return entry;
    const int padding = best == nullptr ? -1 : entry->dim + entry->dim_v - best->dim - best->dim_v;
    if (padding < 0 || (padding == 0 && !fits(*best) && fits(*entry))) best = entry;
  }
  return best;
}

// Appends the launch of `blocks` blocks of a kernel, as in cuda/launch.h, and adds the kernel's
// tiles.
flashmoe_launch& plan_launch(const AttentionKernel& kernel, int device_id, const char* suffix,
                             int64_t blocks, Plan* plan);

// The parts that a second kernel combines (cuda/attention/combine.h): rows of KV heads or of tiles.
struct PartsToCombine {
  int32_t rows;   // per KV head or tile
  int64_t count;  // of KV heads or tiles
  int units;      // per row
  int workers_log2;
};

// Appends the launch of that kernel after the one that leaves the parts. The kernel is loaded.
void plan_combine(const Kernel& kernel, int device_id, const char* suffix,
                  const PartsToCombine& parts, Plan* plan);

}  // namespace flashmoe
