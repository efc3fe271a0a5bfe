// Constants of the bulk kernels.
#pragma once

#include "cuda/moe/sm89_few_tokens/traits.cuh"

namespace flashmoe::moe::sm89_few_tokens::bulk {

inline constexpr int kConsumers = 8;  // consumer warps
inline constexpr int kConsumerThreads = kConsumers * kThreadsPerWarp;
inline constexpr int kBlockThreads = kConsumerThreads + kThreadsPerWarp;
inline constexpr int kRows = 16;   // weight rows per unit
inline constexpr int kTokens = 8;  // tokens whose sums a warp keeps
inline constexpr int kMostStages = 8;
static_assert(kMostStages <= kThreadsPerWarp);
inline constexpr int kMostColumns = 1024;  // per stage
inline constexpr int kChunkColumns = 32;   // per warp, at a time

// Columns of a stage are a multiple of 64. Rows begin at whole lines, to which the copy engine
// writes faster than elsewhere. That costs two-way bank conflicts of lanes, which is less.
__host__ __device__ constexpr int row_bytes(int columns) { return 2 * columns; }
__host__ __device__ constexpr int stage_bytes(int columns, int entry_tokens) {
  return (kRows + entry_tokens) * row_bytes(columns);
}

inline constexpr int kPartsBytes = 2 * kConsumerThreads * 16;
constexpr int sums_bytes(int tokens) { return kConsumers * tokens * kRows * 4; }

// Shared memory in order: stages, parts of units (up) or sums (down), records, slots.
constexpr int up_shared_bytes(int ring_bytes, int records, int pairs) {
  return ring_bytes + kPartsBytes + (records + 1) * kRecordBytes + pairs * 4;
}
constexpr int down_shared_bytes(int ring_bytes, int records, int pairs, int tokens) {
  return ring_bytes + sums_bytes(tokens) + (records + 1) * kRecordBytes + pairs * 8;
}

}  // namespace flashmoe::moe::sm89_few_tokens::bulk
