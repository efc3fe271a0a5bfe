// The sm89_few_rows family: which kernel and split serve a problem, and the parameters of the
// launch.
#include <algorithm>
#include <climits>
#include <cstring>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/combine.h"
#include "cuda/attention/sm89_few_rows/cost.h"
#include "cuda/attention/sm89_few_rows/entry.h"
#include "cuda/attention/sm89_few_rows/params.h"
#include "cuda/gpu_models.h"

namespace flashmoe::sm89_few_rows {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm89_few_rows/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

// Upper bound on packed queries, and on keys: row + offset + 1 fits in int32.
constexpr int64_t kMaxRows = kMaxSequence;

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm89_few_rows/entries.inc"
#undef FLASHMOE_ENTRY
};

// Clusters of `cluster` blocks of `warps` warps that can run at a time; 0 if none can.
cudaError_t count_resident(const Entry& entry, int device_id, const cudaFuncAttributes& attributes,
                           int warps, int cluster, int multiprocessors, int* count) {
  const auto shared = static_cast<size_t>(entry.shared_bytes_of(warps, cluster));
  if (is_gpu_model(device_id)) {
    *count =
        resident_on_model(device_id, attributes, 32 * warps, static_cast<int>(shared), cluster);
    return cudaSuccess;
  }
  if (cluster == 1) {
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, entry.function, 32 * warps, shared);
    *count *= multiprocessors;
    return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(32 * warps));
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(count, entry.function, &config) != cudaSuccess) {
    cudaGetLastError();  // the cluster is too large for this device
    *count = 0;
  }
  return cudaSuccess;
}

// Allows everything that a kernel's loaded code can do, and records what that is.
cudaError_t explore(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                    const cudaFuncAttributes& attributes, bool first) {
  const Entry& entry = static_cast<const Entry&>(kernel);
  Abilities& abilities = entry.abilities[device_id];
  const bool clusters = attributes.ptxVersion >= kClusterPtx;
  cudaError_t error = cudaSuccess;
  if (clusters && !is_gpu_model(device_id)) {
    error = cudaFuncSetAttribute(entry.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  if (!first) return cudaSuccess;
  abilities.clusters = clusters;
  for (int w = 0; w < kWarpChoices; ++w) {
    for (int c = 0; c < (clusters ? kClusterChoices : 1); ++c) {
      error = count_resident(entry, device_id, attributes, 1 << w, 1 << c, facts.multiprocessors,
                             &abilities.resident[w][c]);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

struct Choice {
  const Entry* entry;
  int warps;
  int cluster;
  int parts;
  double microseconds;
};

int log2_at_least(double n, int most) {
  int log2 = 0;
  while (log2 < most && (1 << log2) < n) ++log2;
  return log2;
}

// Puts the best split of a call for this kernel into `best` if it is faster. A tile's keys are
// split over the blocks of a cluster, or over as many blocks as the device holds, which leave
// parts.
void consider(const Entry& entry, const Abilities& abilities, const Work& work,
              const DeviceFacts& facts, Choice* best) {
  const double steps = ceil_of(work.most_keys, entry.step_keys);
  const double tiles = work.heads_kv * ceil_of(work.rows, entry.rows);
  const auto take = [&](int warps, int cluster, int resident, double parts) {
    const Split split = {
        entry.rows,       entry.step_keys,        warps, cluster, resident, static_cast<int>(parts),
        entry.part_bytes, entry.dim + entry.dim_v};
    if (resident == 0) return;
    const double microseconds = few_rows_microseconds(work, split, facts);
    if (best->entry == nullptr || microseconds < best->microseconds) {
      *best = {&entry, warps, cluster, split.parts, microseconds};
    }
  };
  for (int c = 0; c < kClusterChoices; ++c) {
    const int cluster = 1 << c;
    // No more blocks than the device holds at a time, and no more than there are steps.
    if (c > 0 &&
        (!abilities.clusters || tiles * cluster > facts.multiprocessors * 2.0 || cluster > steps)) {
      break;
    }
    // Warps without keys still take part in the epilogue.
    const int fewest_warps = std::max(0, log2_at_least(steps / cluster, kWarpChoices - 1) - 1);
    for (int w = kWarpChoices - 1; w >= fewest_warps; --w) {
      take(1 << w, cluster, abilities.resident[w][c], 1);
    }
  }
  if (tiles == 0) return;
  for (int w = kWarpChoices - 1; w >= 0; --w) {
    const int resident = abilities.resident[w][0];
    const double blocks = std::min({static_cast<double>(resident), facts.multiprocessors * 2.0,
                                    kMostWorkspaceBytes / entry.part_bytes});
    const double most = std::min(blocks / tiles, ceil_of(steps, 1 << w));
    if (most >= 2) take(1 << w, 1, resident, most);
  }
}

bool serves(const Entry& entry, const AttentionProblem& problem) {
  return entry.dtype == problem.q.dtype && entry.dim >= problem.dim && entry.dim_v >= problem.dim_v;
}

// The kernel that the problem names. Otherwise the fastest among those of its dtype with the least
// padding, each with its best split.
flashmoe_status choose(const AttentionProblem& problem, const Work& work, int device_id,
                       const DeviceFacts& facts, Choice* best, const Reason& reason) {
  const Entry* named = nullptr;
  int least = INT_MAX;
  for (const Entry* entry : kEntries) {
    if (!serves(*entry, problem)) continue;
    least = std::min(least, entry->dim + entry->dim_v);
    if (std::strcmp(problem.kernel, entry->name) == 0) named = entry;
  }
  for (const Entry* entry : kEntries) {
    if (!serves(*entry, problem) ||
        (named != nullptr ? entry != named : entry->dim + entry->dim_v != least)) {
      continue;
    }
    int arch = 0;
    FLASHMOE_TRY(load_kernel(*entry, device_id, facts, &arch, reason, explore));
    consider(*entry, entry->abilities[device_id], work, facts, best);
  }
  if (best->entry != nullptr) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these head dimensions");
}

PartsToCombine parts_of(const AttentionProblem& p, const Entry& entry, int parts) {
  const int64_t heads = p.batch * p.heads_kv;
  const int64_t rows = p.seq_q * (p.heads_q / p.heads_kv);
  const int units = entry.dim_v / 4;
  return {static_cast<int32_t>(rows), heads, units,
          combine_workers_log2(parts, heads * rows, units)};
}

flashmoe_status plan(const AttentionProblem& problem, Plan* plan, const Reason& reason) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    return reason.refuse(status, "%s", sentence);
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  FLASHMOE_TRY(refuse_wide_heads(problem, reason));
  FLASHMOE_TRY(refuse_sequences(problem, reason));
  FLASHMOE_TRY(refuse_bias_and_mask(problem, reason));
  const int64_t group = problem.heads_q / problem.heads_kv;
  if (problem.seq_k > kMaxRows || group > kMaxRows || problem.seq_q > kMaxRows / group) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "more than 2^30 keys, or queries of one KV head, all its query heads counted");
  }
  const Work work = work_of(problem);
  Choice best = {};
  FLASHMOE_TRY(choose(problem, work, device_id, *facts, &best, reason));
  const Entry& entry = *best.entry;
  const int64_t tiles_per_head = (problem.seq_q * group + entry.rows - 1) / entry.rows;
  const int64_t heads = problem.batch * problem.heads_kv;
  const int64_t blocks_per_tile = best.cluster * best.parts;
  if (problem.heads_q > INT_MAX || heads > INT_MAX ||
      tiles_per_head * heads > INT_MAX / blocks_per_tile) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^31 - 1 heads or blocks");
  }

  const int64_t blocks = tiles_per_head * heads * blocks_per_tile;
  flashmoe_launch& launch = plan_launch(entry, device_id, "", blocks, 32 * best.warps,
                                        entry.shared_bytes_of(best.warps, best.cluster), plan);
  launch.tile_m = entry.rows;
  launch.tile_n = entry.step_keys;
  launch.dim = entry.dim;
  launch.dim_v = entry.dim_v;
  launch.stages = 1;
  launch.cluster = best.cluster;
  plan->info.microseconds = best.microseconds;
  if (best.parts > 1) {
    int arch = 0;
    FLASHMOE_TRY(load_kernel(entry.combine, device_id, *facts, &arch, reason));
    plan_combine(entry.combine, device_id, "", parts_of(problem, entry, best.parts), plan);
    plan->info.workspace_bytes = static_cast<uint64_t>(blocks * entry.part_bytes);
  }
  return FLASHMOE_OK;
}

Params make_params(const AttentionProblem& p, const Plan& plan, void* workspace) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[0]);
  const flashmoe_launch& planned = plan.info.launches[0];
  Params params;
  fill_common(p, &params);
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t rows = p.seq_q * group;
  const int64_t tiles_per_head = (rows + entry.rows - 1) / entry.rows;
  params.seq_q = static_cast<int32_t>(p.seq_q);
  params.rows = static_cast<int32_t>(rows);
  params.heads_per_kv = Divisor::of(static_cast<uint32_t>(group));
  params.tiles_per_head = Divisor::of(static_cast<uint32_t>(tiles_per_head));
  params.heads_kv = Divisor::of(static_cast<uint32_t>(p.heads_kv));
  params.cluster_log2 = log2_at_least(planned.cluster, kClusterChoices - 1);
  const int64_t blocks_per_tile = planned.grid[0] / (tiles_per_head * p.batch * p.heads_kv);
  params.blocks_per_tile = Divisor::of(static_cast<uint32_t>(blocks_per_tile));
  params.parts = nullptr;
  params.statistics = nullptr;
  params.combine_workers_log2 = 0;
  if (plan.info.launch_count > 1) {
    const int64_t part = entry.rows * entry.dim_v / 4;  // in units of four floats
    params.parts = static_cast<float4*>(workspace);
    params.statistics = reinterpret_cast<float2*>(params.parts + planned.grid[0] * part);
    params.combine_workers_log2 =
        parts_of(p, entry, static_cast<int>(blocks_per_tile)).workers_log2;
  }
  return params;
}

flashmoe_status launch(const AttentionProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const Params params = make_params(problem, plan, workspace);
  return launch_all(plan, &params, stream);
}

}  // namespace
}  // namespace flashmoe::sm89_few_rows

namespace flashmoe {

const AttentionFamily kSm89FewRowsAttention = {"sm89_few_rows", FLASHMOE_DEVICE_CUDA,
                                               &sm89_few_rows::plan, &sm89_few_rows::launch};

}  // namespace flashmoe
