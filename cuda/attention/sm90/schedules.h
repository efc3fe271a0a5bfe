// The two schedules of the sm_90 kernel, each with its kernels, its estimate and its launch.
// family.cpp chooses between them.
//
// - Whole tiles of the rows of one query head, which blocks take in the order of an L2 swizzle.
//   Ragged, padded and paged batches have kernels of their own, which find their tiles on the
//   device.
// - Split KV: tiles of the rows of all query heads of a KV head, whose keys several blocks share
//   (stream-K). A second kernel combines their parts.
#pragma once

#include "core/ops/attention/problem.h"
#include "core/plan.h"
#include "core/status.h"
#include "cuda/attention/cost.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/attention/sm90/split_kv_cost.h"
#include "cuda/runtime.h"

namespace flashmoe::sm90 {

// What a schedule would do with a problem. Each refuses what its kernels cannot compute.
struct WholeTiles {
  const Entry* entry;
  int64_t blocks;
  double microseconds;
  int64_t division_bytes = 0;  // Plan::division_bytes
};

struct SplitKv {
  const Entry* entry;
  PackedTiles tiles;
  int64_t most_groups;  // per tile
  int64_t blocks;  // blocks over which the keys of all tiles are split; 0: each tile has one block
  double microseconds;
};

flashmoe_status estimate_whole_tiles(const AttentionProblem& problem, const Work& work,
                                     const Entry* entry, const DeviceFacts& facts,
                                     WholeTiles* whole_tiles, const Reason& reason);
flashmoe_status estimate_ragged(const AttentionProblem& problem, const Work& work,
                                const Entry* entry, const DeviceFacts& facts,
                                WholeTiles* whole_tiles, const Reason& reason);
flashmoe_status estimate_split_kv(const AttentionProblem& problem, const Work& work,
                                  const Entry* entry, const DeviceFacts& facts, SplitKv* split_kv,
                                  const Reason& reason);

// Whether kernels serve a batch of sequences whose tiles have several queries of all query heads of
// a KV head. Longer sequences fill tiles of one head; one query's heads are rows of any kernel.
bool packs_queries(const AttentionProblem& problem);

// For dense batches and sequences.
flashmoe_status plan_whole_tiles(const AttentionProblem& problem, const WholeTiles& whole_tiles,
                                 const DeviceFacts& facts, Plan* plan, const Reason& reason);
flashmoe_status plan_split_kv(const AttentionProblem& problem, const SplitKv& split_kv,
                              const DeviceFacts& facts, Plan* plan, const Reason& reason);

// Launches what was planned. The device is current.
flashmoe_status launch_whole_tiles(const AttentionProblem& problem, const Plan& plan, void* stream);
flashmoe_status launch_ragged(const AttentionProblem& problem, const Plan& plan, void* stream);
flashmoe_status launch_split_kv(const AttentionProblem& problem, const Plan& plan, void* workspace,
                                void* stream);

}  // namespace flashmoe::sm90
