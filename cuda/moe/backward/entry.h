// The kernels of the stages that go row by row, as the host sees them: of each the one for fp16,
// then that for bf16.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/ops/moe/gradient_chunks.h"
#include "core/ops/moe/problem.h"
#include "cuda/launch.h"
#include "cuda/moe/backward/params.h"

namespace flashmoe::moe_backward {

extern const Kernel rows_kernels[2];
extern const Kernel combine_kernels[2];
extern const Kernel sums_kernels[2];
extern const Kernel zeros_kernel_entry;

inline const Kernel& kernel_for(const Kernel (&kernels)[2], Dtype dtype) {
  return kernels[dtype == Dtype::kFloat16 ? 0 : 1];
}

// Rows of dz, those of a chunk or whole ones that a chunk has columns of; `data` is nullptr where
// there are none.
inline DzRows dz_rows(const MoeBackwardProblem& p, const InnerChunk& chunk, void* data) {
  const DzPlaces at = dz_places(p, chunk);
  DzRows rows = {};
  rows.data = static_cast<uint16_t*>(data);
  rows.stride = chunk.dz_inner() * (p.layer.gated ? 2 : 1);
  rows.places[0] = static_cast<int32_t>(at.places[0]);
  rows.places[1] = static_cast<int32_t>(at.places[1]);
  rows.step = static_cast<int32_t>(at.step);
  return rows;
}

// The rows of dx that no expert has.
inline ZerosParams zeros_of(const GroupedProductBackwardProblem& p) {
  constexpr int64_t kPieceBytes = 16;
  const int64_t bytes = dtype_bytes(p.dx.dtype);
  ZerosParams params = {};
  params.out = p.dx.data;
  params.row_pieces = p.columns * bytes / kPieceBytes;
  params.row_stride = p.dx.row_stride * bytes / kPieceBytes;
  params.expert_stride = p.dx.expert_stride * bytes / kPieceBytes;
  params.offsets = p.offsets;
  params.counts = p.counts;
  params.rows = static_cast<int32_t>(p.rows);
  params.experts = p.experts;
  return params;
}

}  // namespace flashmoe::moe_backward
