// Arguments of the sm_90 gradients of experts' weights, as the device sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/moe/backward/queue.h"

namespace flashmoe::moe::sm90_backward {

using moe_backward::QueuedExpert;

inline constexpr int kCluster = 2;      // blocks that share an operand
inline constexpr int kConsumers = 2;    // consumer warpgroups per block
inline constexpr int kBoxColumns = 64;  // per box: 128 bytes, the widest swizzle

inline constexpr int kMostJobs = 3;  // gradients per launch

// A gradient.
struct Job {
  // Maps of both operands of the products, [columns, rows, batches, 1], in boxes of 64 columns. The
  // columns of `a` are the rows of the gradient (M), those of `b` its columns (N). A box of `a` has
  // the rows of a step, one of `b` half of them.
  CUtensorMap a;
  CUtensorMap b;
  // Map of a 16-bit gradient that is written, [m or n, the other, experts, 1], the one of stride 1
  // first, in boxes of 64 by 64.
  CUtensorMap boxes;

  // Rows of x to be gathered. `b` is then a map of rank 2, [n, tokens], in boxes of 64 columns of a
  // row. Row r is that of token row_tokens[r], or zeros.
  const uint16_t* x;
  uint32_t x_row_chunks;  // row stride in chunks of 16 bytes

  int32_t m;
  int32_t n;
  // Along n: tiles of blocks. The first ones are three boxes of 64 columns wide, the others two.
  int32_t n_tiles;
  int32_t wide_n_tiles;
  // Along m: in the first of these tiles, the blocks of a cluster have neighbouring tiles of the
  // same columns of the gradient, and share `b`. In the others they have the same rows of the
  // gradient and neighbouring columns, and share `a`.
  int32_t shared_m_tiles;
  int32_t tiles;  // per expert: tiles of clusters

  void* out;
  int64_t expert_stride;  // elements
  int64_t m_stride;       // m_stride or n_stride is 1
  int64_t n_stride;
  int32_t in_boxes;  // `boxes` is given
  int32_t is_fp32;
  int32_t accumulate;
};

struct Params {
  Job jobs[kMostJobs];
  int32_t gathers;  // `b` of all jobs is gathered; otherwise its rows are contiguous
  const int32_t* row_tokens;
  int32_t tokens;  // rows of x

  // Expert e has the rows offsets[e] to offsets[e + 1] - 1, or the first counts[e] of batch e.
  const int32_t* offsets;
  const int32_t* counts;
  int32_t rows;  // existing rows (per batch)

  // With a queue, clusters take items dynamically, with experts in its order.
  uint32_t* taken;  // items taken, after the first of each cluster; or nullptr
  const QueuedExpert* experts;
  int32_t tiles;  // per expert, over all jobs
  int32_t items;  // over all experts
};

}  // namespace flashmoe::moe::sm90_backward
