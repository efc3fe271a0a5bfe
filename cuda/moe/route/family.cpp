// Routing on a GPU. One implementation serves all GPUs: which kernels serve a problem, and the
// parameters of their launches.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/gpu_models.h"
#include "cuda/launch.h"
#include "cuda/moe/route/entry.h"
#include "cuda/moe/route/params.h"

namespace flashmoe::moe_route {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/moe/route/entries.inc"
#undef FLASHMOE_ENTRY
extern const Entry entry_given;
extern const Kernel kernel_place;

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/moe/route/entries.inc"
#undef FLASHMOE_ENTRY
};

constexpr int kWarpThreads = 32;
// Upper bound on the tokens of a single launch: as many as its block, or its cluster's blocks, can
// do in about the time of another launch.
constexpr int64_t kOnceTokens = 32;
constexpr int64_t kOnceTokensOfCluster = 32;  // per block
constexpr int64_t kOnceTokensOfBlock = 16;    // above this there are more blocks
constexpr int64_t kListPairs = 8192;
constexpr double kMicroseconds = 5;  // no choice depends on it

const Entry& find_entry(const MoeRouteProblem& p) {
  if (p.given_ids != nullptr) return entry_given;
  const bool any_choice =
      p.logits_dtype == Dtype::kFloat32 || p.selection_bias != nullptr || p.num_groups > 1;
  const Entry* best = kEntries[0];
  for (const Entry* entry : kEntries) {
    best = entry;
    if (entry->any_choice == any_choice && entry->max_experts >= p.experts) break;
  }
  return *best;
}

// Tokens that a warp takes at a time.
int warp_step(const MoeRouteProblem& p) {
  return p.given_ids != nullptr ? kWarpThreads / p.top_k : 1;
}

// Whether a block's choices stay in its shared memory until their slots are known.
bool keeps_list(const MoeRouteProblem& p, int64_t block_tokens) {
  return block_tokens * p.top_k <= kListPairs;
}

SharedShape shared_shape(const MoeRouteProblem& p, int warps, int cluster, int64_t block_tokens) {
  return {p.experts,
          p.top_k,
          p.num_groups,
          warps,
          cluster,
          static_cast<int>(std::max<int64_t>(1, block_tokens)),
          keeps_list(p, block_tokens)};
}

// Warps per block: enough for its tokens, as far as shared memory has room. 0: no room for any.
int warps_of_block(const MoeRouteProblem& p, const Entry& entry, bool once, int cluster,
                   int64_t block_tokens) {
  // Threads that count experts are needed, too.
  constexpr int64_t kWarpsForExperts = 8;
  const int64_t counted = p.experts + 1 + std::min<int64_t>(kMaxFewPairs, p.tokens * p.top_k);
  const int64_t for_experts = std::min(kWarpsForExperts, ceil_div(counted, kWarpThreads));
  const int64_t wanted = std::max(for_experts, ceil_div(block_tokens, warp_step(p)));
  int warps = static_cast<int>(std::min<int64_t>(entry.threads / kWarpThreads, wanted));
  const auto bytes_of = once ? entry.once_bytes : entry.choose_bytes;
  while (warps > 0 && bytes_of(shared_shape(p, warps, cluster, block_tokens)) > kMaxSharedBytes) {
    --warps;
  }
  return warps;
}

// Allows clusters of the largest blocks, and records which can run. Also sets the split of shared
// memory that the next kernels want.
cudaError_t allow_clusters(const Kernel& kernel, int device_id, const DeviceFacts&,
                           const cudaFuncAttributes& attributes, bool first) {
  const Entry& entry = static_cast<const Entry&>(kernel);
  int& most = entry.most_blocks[device_id];
  if (first) most = 1;
  if (attributes.ptxVersion < kClusterPtx) return cudaSuccess;
  if (is_gpu_model(device_id)) {
    most = kMaxCluster;
    while (most > 1 &&
           resident_on_model(device_id, attributes, entry.threads, kMaxSharedBytes, most) == 0) {
      most /= 2;
    }
    return cudaSuccess;
  }
  // A layer's next kernel arrives while this one is running, and wants all the shared memory of a
  // multiprocessor. With another split, a multiprocessor that runs this kernel could not take the
  // next one's block.
  cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess || !first) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(static_cast<unsigned>(entry.threads));
  config.dynamicSmemBytes = kMaxSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (int cluster = kMaxCluster; cluster > 1 && most == 1; cluster /= 2) {
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    int resident = 0;
    if (cudaOccupancyMaxActiveClusters(&resident, kernel.function, &config) != cudaSuccess) {
      cudaGetLastError();  // the cluster is too large for this device
      continue;
    }
    if (resident > 0) most = cluster;
  }
  return cudaSuccess;
}

// Blocks that together route so few tokens in one launch; 0: two launches are better.
int blocks_of_once(const MoeRouteProblem& p, const Entry& entry, int most_blocks) {
  const int64_t most_tokens = most_blocks == 1 ? kOnceTokens : kOnceTokensOfCluster * most_blocks;
  if (p.tokens > most_tokens * warp_step(p)) return 0;
  int blocks = 1;
  while (blocks < most_blocks && p.tokens > kOnceTokensOfBlock * warp_step(p) * blocks) blocks *= 2;
  return warps_of_block(p, entry, true, blocks, ceil_div(p.tokens, blocks)) > 0 ? blocks : 0;
}

// Tokens per warp if `warps` warps share those of a block.
int64_t warp_tokens(const MoeRouteProblem& p, int64_t block_tokens, int64_t warps) {
  const int64_t step = warp_step(p);
  return ceil_div(ceil_div(block_tokens, step), warps) * step;
}

flashmoe_status plan(const MoeRouteProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  const Entry& entry = find_entry(problem);
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry, device_id, *facts, &arch, reason, allow_clusters));
  plan->info.microseconds = kMicroseconds;
  const int cluster = blocks_of_once(problem, entry, entry.most_blocks[device_id]);
  const auto add = [&](const Kernel& kernel, int64_t blocks, int warps,
                       int shared_bytes) -> flashmoe_launch& {
    return plan_launch(kernel, device_id, "", blocks, kWarpThreads * warps, shared_bytes, plan);
  };
  if (cluster > 0) {
    const int64_t block_tokens = ceil_div(problem.tokens, cluster);
    const int warps = warps_of_block(problem, entry, true, cluster, block_tokens);
    flashmoe_launch& launch =
        add(entry, cluster, warps,
            entry.once_bytes(shared_shape(problem, warps, cluster, block_tokens)));
    launch.cluster = cluster;
    launch.tile_n = static_cast<int32_t>(block_tokens);
    launch.stages = 1;
    return FLASHMOE_OK;
  }
  FLASHMOE_TRY(load_kernel(entry.choose, device_id, *facts, &arch, reason));
  FLASHMOE_TRY(load_kernel(kernel_place, device_id, *facts, &arch, reason));
  const int64_t block_tokens = ceil_div(problem.tokens, facts->multiprocessors);
  const int64_t blocks = ceil_div(problem.tokens, block_tokens);
  const int warps = warps_of_block(problem, entry, false, 1, block_tokens);
  // A warp adds its share to the index of its first token, possibly the last one, in 32 bits.
  const int64_t most_tokens = INT_MAX - warp_tokens(problem, block_tokens, warps);
  if (problem.tokens > most_tokens) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%s: got %lld tokens, accepted on %s are at most %lld",
        problem.logits != nullptr ? "logits" : "given_ids", static_cast<long long>(problem.tokens),
        DeviceName::cuda(device_id).text, static_cast<long long>(most_tokens));
  }
  add(entry.choose, blocks, warps,
      entry.choose_bytes(shared_shape(problem, warps, 1, block_tokens)));
  add(kernel_place, blocks, kPlaceThreads / kWarpThreads, 0);
  for (int i = 0; i < 2; ++i) {
    plan->info.launches[i].tile_n = static_cast<int32_t>(block_tokens);
    plan->info.launches[i].stages = 1;
  }
  plan->info.workspace_bytes =
      static_cast<uint64_t>(blocks) * sizeof(int32_t) *
      static_cast<uint64_t>(ceil_div(problem.experts, kHistogramColumns) * kHistogramColumns);
  return FLASHMOE_OK;
}

// Whether rows can be loaded in vectors of 16 bytes, and thus also in shorter ones.
bool loads_vectors(const MoeRouteProblem& p) {
  constexpr uintptr_t kVectorBytes = 16;
  const auto row_bytes = static_cast<uintptr_t>(p.logits_stride * dtype_bytes(p.logits_dtype));
  return p.logits != nullptr && reinterpret_cast<uintptr_t>(p.logits) % kVectorBytes == 0 &&
         (p.tokens <= 1 || row_bytes % kVectorBytes == 0);
}

Params make_params(const MoeRouteProblem& p, const Plan& plan, void* workspace) {
  Params params = {};
  params.logits = p.logits;
  params.logits_stride = p.logits_stride;
  params.bias = p.selection_bias;
  params.given_ids = p.given_ids;
  params.given_ids_stride = p.given_ids_stride;
  params.given_weights = p.given_weights;
  params.given_weights_stride = p.given_weights_stride;
  params.expert_map = p.expert_map;
  params.given_limit = p.expert_map != nullptr ? p.expert_map_size : p.experts;
  params.ids = p.ids;
  params.weights = p.weights;
  params.offsets = p.offsets;
  params.pairs = p.pairs;
  params.slots = p.slots;
  params.lse = p.lse;
  params.histograms = static_cast<int32_t*>(workspace);
  params.tokens = static_cast<int32_t>(p.tokens);
  params.experts = p.experts;
  params.top_k = p.top_k;
  params.dtype =
      static_cast<int32_t>(p.given_ids != nullptr ? p.given_weights_dtype : p.logits_dtype);
  params.wide_ids = p.given_ids_are_64 ? 1 : 0;
  params.vectors = loads_vectors(p) ? 1 : 0;
  params.scoring = p.scoring;
  params.renormalize = p.renormalize ? 1 : 0;
  params.scale = p.scale;
  params.num_groups = p.num_groups;
  params.top_groups = p.top_groups;
  params.group_experts = p.experts / p.num_groups;
  int lanes = 1;
  while (2 * lanes * p.num_groups <= kWarpThreads && params.group_experts % (2 * lanes) == 0) {
    lanes *= 2;
    ++params.group_lanes_log2;
  }
  params.group_steps = params.group_experts / lanes;
  params.into_groups = SmallDivisor::of(params.group_experts);
  const flashmoe_launch& planned = plan.info.launches[0];
  const auto warps = static_cast<int32_t>(planned.block[0] / kWarpThreads);
  const int step = warp_step(p);
  params.warp_step = step;
  params.block_tokens = std::max(1, planned.tile_n);
  params.warp_tokens = static_cast<int32_t>(warp_tokens(p, params.block_tokens, warps));
  params.used_warps = static_cast<int32_t>(ceil_div(params.block_tokens, params.warp_tokens));
  params.cluster = std::max(1, planned.cluster);
  params.few =
      plan.info.launch_count == 1 && params.cluster == 1 && p.tokens * p.top_k <= kMaxFewPairs;
  params.thread_experts = static_cast<int32_t>(ceil_div(p.experts, warps * kWarpThreads));
  params.keeps_list = keeps_list(p, params.block_tokens) ? 1 : 0;
  params.histogram_stride =
      static_cast<int32_t>(ceil_div(p.experts, kHistogramColumns) * kHistogramColumns);
  params.scratch_words = find_entry(p).scratch_words(p.experts, p.num_groups);
  return params;
}

flashmoe_status launch(const MoeRouteProblem& problem, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  const Params params = make_params(problem, plan, workspace);
  return launch_all(plan, &params, stream);
}

}  // namespace
}  // namespace flashmoe::moe_route

namespace flashmoe {

// Routing has the name of the oldest GPU family because it is the same on all GPUs.
const MoeRouteFamily kCudaMoeRoute = {"sm89", FLASHMOE_DEVICE_CUDA, &moe_route::plan,
                                      &moe_route::launch};

}  // namespace flashmoe
