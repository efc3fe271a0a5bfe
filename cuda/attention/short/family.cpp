// The short family: which kernel and split serve a problem, how it is launched, and its read-back.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/short/cost.h"
#include "cuda/attention/short/entry.h"
#include "cuda/attention/short/params.h"

namespace flashmoe::short_rows {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/short/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

constexpr int64_t kMaxRows = int64_t{1}
                             << 30;  // of packed queries and of keys: row + offset + 1 fits
constexpr int32_t kNoLeftOffset = -(1 << 30);
constexpr int32_t kNoRightOffset = (1 << 30) - 1;
constexpr int kClusterArch = 90;  // oldest PTX that has clusters and dependent launches
constexpr double kLog2E = 1.4426950408889634;

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/short/entries.inc"
#undef FLASHMOE_ENTRY
};

// Clusters of `cluster` blocks of `warps` warps that can run at a time; 0 where none can.
cudaError_t count_resident(const Entry& entry, int warps, int cluster, int multiprocessors,
                           int* count) {
  const auto shared = static_cast<size_t>(entry.shared_bytes(warps, cluster));
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
    cudaGetLastError();  // too large a cluster for this device
    *count = 0;
  }
  return cudaSuccess;
}

cudaError_t load(const Entry& entry, const DeviceFacts& facts, Loaded* loaded) {
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, entry.function);
  if (error != cudaSuccess) return error;
  // Not binaryVersion: on a newer chip that is the chip's, of code made from PTX without clusters.
  loaded->clusters = attributes.ptxVersion >= kClusterArch;
  loaded->arch = attributes.binaryVersion;
  error = cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               entry.shared_bytes(kMaxWarps, loaded->clusters ? kMaxCluster : 1));
  if (error == cudaSuccess && loaded->clusters) {
    error = cudaFuncSetAttribute(entry.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  for (int w = 0; w < kWarpChoices; ++w) {
    for (int c = 0; c < (loaded->clusters ? kClusterChoices : 1); ++c) {
      error = count_resident(entry, 1 << w, 1 << c, facts.multiprocessors, &loaded->resident[w][c]);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// What a kernel's loaded code can do on a device; null with a reason on failure. The first call per
// kernel and device costs, the others are one load.
const Loaded* prepare(const Entry& entry, int device_id, const DeviceFacts& facts,
                      flashmoe_status* status, char* reason, size_t reason_size) {
  static std::mutex mutex;
  Loaded& loaded = entry.loaded[device_id];
  if (loaded.ready.load(std::memory_order_acquire)) return &loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded.ready.load(std::memory_order_acquire)) return &loaded;
  const DeviceGuard guard(device_id);
  cudaError_t error = guard.error();
  if (error == cudaSuccess) error = load(entry, facts, &loaded);
  if (error == cudaSuccess) {
    loaded.ready.store(true, std::memory_order_release);
    return &loaded;
  }
  cudaGetLastError();
  const bool missing = error == cudaErrorNoKernelImageForDevice ||
                       error == cudaErrorInvalidDeviceFunction ||
                       error == cudaErrorUnsupportedPtxVersion;
  *status = missing ? FLASHMOE_ERROR_ARCH_NOT_BUILT : FLASHMOE_ERROR_CUDA;
  if (missing) {
    std::snprintf(reason, reason_size,
                  "no code for compute capability %d.%d of cuda:%d is built in (built in: %s); "
                  "rebuild with CMAKE_CUDA_ARCHITECTURES naming it",
                  facts.compute_capability / 10, facts.compute_capability % 10, device_id,
                  FLASHMOE_CUDA_ARCHITECTURES);
  } else {
    std::snprintf(reason, reason_size, "loading %s on cuda:%d: %s", entry.name, device_id,
                  cudaGetErrorString(error));
  }
  return nullptr;
}

int64_t visible_keys(const AttentionProblem& p, int64_t query) {
  const int64_t first = p.bounded_left ? std::max<int64_t>(0, query + p.left_offset) : 0;
  const int64_t end = p.bounded_right ? std::min(p.seq_k, query + p.right_offset + 1) : p.seq_k;
  return std::max<int64_t>(0, end - first);
}

Work work_of(const AttentionProblem& p) {
  Work work;
  work.heads_kv = static_cast<double>(p.batch * p.heads_kv);
  work.heads_q = static_cast<double>(p.batch * p.heads_q);
  work.seq_q = static_cast<double>(p.seq_q);
  work.rows = static_cast<double>(p.seq_q * (p.heads_q / p.heads_kv));
  work.dims = static_cast<double>(p.dim + p.dim_v);
  work.seq_k = static_cast<double>(p.seq_k);
  work.keys = work.most_keys = work.seq_k;
  if ((p.bounded_left || p.bounded_right) && p.batch > 0 && p.seq_q > 0) {
    work.keys = attention_flops(p) / (2 * work.heads_q * work.dims * work.seq_q);
    // Visible keys rise to the middle and fall from there, so that of these three one is the most.
    work.most_keys = static_cast<double>(
        std::max({visible_keys(p, 0), visible_keys(p, p.seq_q / 2), visible_keys(p, p.seq_q - 1)}));
  }
  return work;
}

struct Choice {
  const Entry* entry;
  const Loaded* loaded;
  int warps;
  int cluster;
  double microseconds;
};

int log2_at_least(double n, int most) {
  int log2 = 0;
  while (log2 < most && (1 << log2) < n) ++log2;
  return log2;
}

// Puts the best split of a call for this kernel into `best` if it beats what is there.
void consider(const Entry& entry, const Loaded& loaded, const Work& work, const Products& speed,
              const DeviceFacts& facts, Choice* best) {
  const double steps = ceil_of(work.most_keys, entry.step_keys);
  const double tiles = work.heads_kv * ceil_of(work.rows, entry.rows);
  for (int c = 0; c < kClusterChoices; ++c) {
    const int cluster = 1 << c;
    // Not more blocks than the device holds at a time, nor than there are steps.
    if (c > 0 &&
        (!loaded.clusters || tiles * cluster > facts.multiprocessors * 2.0 || cluster > steps)) {
      break;
    }
    // Warps without keys still take part in the end.
    const int fewest_warps = std::max(0, log2_at_least(steps / cluster, kWarpChoices - 1) - 1);
    for (int w = kWarpChoices - 1; w >= fewest_warps; --w) {
      const Split split = {entry.rows, entry.step_keys, 1 << w, cluster, loaded.resident[w][c]};
      if (split.resident == 0) continue;
      const double microseconds = short_microseconds(work, split, speed, facts);
      if (best->entry == nullptr || microseconds < best->microseconds) {
        *best = {&entry, &loaded, split.warps, cluster, microseconds};
      }
    }
  }
}

bool serves(const Entry& entry, const AttentionProblem& problem) {
  return entry.dtype == problem.dtype && entry.dim >= problem.dim && entry.dim_v >= problem.dim_v;
}

// The kernel that the problem names, else among those of its dtype with the least padding the one
// of the least time, each with its best split. False with a status and a reason on failure.
bool choose(const AttentionProblem& problem, const Work& work, const Products& speed, int device_id,
            const DeviceFacts& facts, Choice* best, flashmoe_status* status, char* reason,
            size_t reason_size) {
  const Entry* named = nullptr;
  int least = INT_MAX;
  for (const Entry* entry : kEntries) {
    if (!serves(*entry, problem)) continue;
    least = std::min(least, entry->dim + entry->dim_v);
    if (problem.kernel != nullptr && std::strcmp(problem.kernel, entry->name) == 0) named = entry;
  }
  for (const Entry* entry : kEntries) {
    if (!serves(*entry, problem) ||
        (named != nullptr ? entry != named : entry->dim + entry->dim_v != least)) {
      continue;
    }
    const Loaded* loaded = prepare(*entry, device_id, facts, status, reason, reason_size);
    if (loaded == nullptr) return false;
    consider(*entry, *loaded, work, speed, facts, best);
  }
  if (best->entry != nullptr) return true;
  *status = FLASHMOE_ERROR_INTERNAL;
  std::snprintf(reason, reason_size, "no kernel for these head dimensions");
  return false;
}

// "sm_90" from 90, without the cost of formatting.
void write_isa(int arch, char* isa) {
  std::memcpy(isa, "sm_", 3);
  isa += 3;
  if (arch >= 100) *isa++ = static_cast<char>('0' + arch / 100);
  *isa++ = static_cast<char>('0' + arch / 10 % 10);
  *isa++ = static_cast<char>('0' + arch % 10);
  *isa = '\0';
}

flashmoe_status plan(const AttentionProblem& problem, AttentionPlan* plan, char* reason,
                     size_t reason_size) {
  const auto refuse = [&](flashmoe_status status, const char* sentence) {
    std::snprintf(reason, reason_size, "%s", sentence);
    return status;
  };
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = device_facts(device_id, reason, reason_size);
  if (facts == nullptr) return FLASHMOE_ERROR_NO_DEVICE;
  if (facts->compute_capability < kOldestComputeCapability) {
    std::snprintf(reason, reason_size,
                  "cuda:%d has compute capability %d.%d, accepted are 8.9 and newer", device_id,
                  facts->compute_capability / 10, facts->compute_capability % 10);
    return FLASHMOE_ERROR_UNSUPPORTED;
  }
  if (problem.dtype == Dtype::kFloat32) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "dtype fp32, accepted on a GPU are fp16 and bf16");
  }
  const int64_t group = problem.heads_q / problem.heads_kv;
  if (problem.seq_k > kMaxRows || group > kMaxRows || problem.seq_q > kMaxRows / group) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "more than 2^30 keys, or queries of one KV head, all its query heads counted");
  }
  const Work work = work_of(problem);
  const Products speed = products(*facts, static_cast<int>(problem.dim));
  Choice best = {};
  flashmoe_status status = FLASHMOE_OK;
  if (!choose(problem, work, speed, device_id, *facts, &best, &status, reason, reason_size)) {
    return status;
  }
  const Entry& entry = *best.entry;
  if (!problem.named && best.microseconds > tile_microseconds(work, speed, *facts)) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED,
                  "many rows, at which tiles of more rows are faster (named, it serves them)");
  }
  const int64_t tiles_per_head = (problem.seq_q * group + entry.rows - 1) / entry.rows;
  const int64_t heads = problem.batch * problem.heads_kv;
  if (heads > INT_MAX || tiles_per_head * heads > INT_MAX / best.cluster) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^31 - 1 blocks");
  }

  flashmoe_attention_plan& info = plan->info;
  std::strncpy(info.kernel, entry.name, sizeof info.kernel - 1);
  write_isa(best.loaded->arch, info.isa);
  info.tile_q = entry.rows;
  info.tile_k = entry.step_keys;
  info.dim = entry.dim;
  info.dim_v = entry.dim_v;
  info.stages = 1;
  info.cluster = best.cluster;
  info.grid[0] = static_cast<uint32_t>(tiles_per_head * heads * best.cluster);
  info.grid[1] = info.grid[2] = 1;
  info.block[0] = static_cast<uint32_t>(32 * best.warps);
  info.block[1] = info.block[2] = 1;
  info.shared_bytes = static_cast<uint64_t>(entry.shared_bytes(best.warps, best.cluster));
  info.workspace_bytes = 0;
  plan->entry = &entry;
  return FLASHMOE_OK;
}

Params make_params(const AttentionProblem& p, const flashmoe_attention_plan& plan) {
  Params params;
  params.q = static_cast<const uint16_t*>(p.q);
  params.k = static_cast<const uint16_t*>(p.k);
  params.v = static_cast<const uint16_t*>(p.v);
  params.out = static_cast<uint16_t*>(p.out);
  params.lse = p.lse;
  params.q_strides = p.q_strides;
  params.k_strides = p.k_strides;
  params.v_strides = p.v_strides;
  params.out_strides = p.out_strides;
  params.lse_strides = p.lse_strides;
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t rows = p.seq_q * group;
  params.rows = static_cast<int32_t>(rows);
  params.seq_k = static_cast<int32_t>(p.seq_k);
  params.dim = static_cast<int32_t>(p.dim);
  params.dim_v = static_cast<int32_t>(p.dim_v);
  params.heads_per_kv = Divisor::of(static_cast<uint32_t>(group));
  params.tiles_per_head =
      Divisor::of(static_cast<uint32_t>((rows + plan.tile_q - 1) / plan.tile_q));
  params.heads_kv = Divisor::of(static_cast<uint32_t>(p.heads_kv));
  params.cluster_log2 = log2_at_least(plan.cluster, kClusterChoices - 1);
  params.left_offset = p.bounded_left ? static_cast<int32_t>(p.left_offset) : kNoLeftOffset;
  params.right_offset = p.bounded_right ? static_cast<int32_t>(p.right_offset) : kNoRightOffset;
  params.masked = p.bounded_left || p.bounded_right ? 1 : 0;
  const bool capped = p.softcap != 0.0f;
  params.scale_log2 =
      static_cast<float>(static_cast<double>(capped ? p.softcap : p.scale) * kLog2E);
  params.cap_ratio = p.cap_ratio;
  return params;
}

flashmoe_status read_launch(const LaunchRecord& record, flashmoe_launch* launch) {
  const DeviceGuard guard(record.info.device.device_id);
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, record.function);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(FLASHMOE_ERROR_CUDA, "launch: reading %s back: %s", record.info.kernel,
                cudaGetErrorString(error));
  }
  launch->shared_bytes += attributes.sharedSizeBytes;
  launch->registers = attributes.numRegs;
  launch->local_bytes = static_cast<int32_t>(attributes.localSizeBytes);
  launch->binary_arch = attributes.binaryVersion;
  return FLASHMOE_OK;
}

flashmoe_status launch(const AttentionProblem& problem, const AttentionPlan& plan, void*,
                       void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entry);
  const flashmoe_attention_plan& info = plan.info;
  const int device_id = problem.device.device_id;
  const DeviceGuard guard(device_id);
  if (guard.error() != cudaSuccess) {
    return fail(FLASHMOE_ERROR_CUDA, "device: making cuda:%d current: %s", device_id,
                cudaGetErrorString(guard.error()));
  }
  Params params = make_params(problem, info);
  void* arguments[] = {&params};
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(info.grid[0], info.grid[1], info.grid[2]);
  config.blockDim = dim3(info.block[0], info.block[1], info.block[2]);
  config.dynamicSmemBytes = static_cast<size_t>(info.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (entry.loaded[device_id].clusters) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (info.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(info.cluster), 1, 1};
  }
  const cudaError_t error = cudaLaunchKernelExC(&config, entry.function, arguments);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(FLASHMOE_ERROR_CUDA, "launching %s: %s", entry.name, cudaGetErrorString(error));
  }
  LaunchRecord& record = last_launch_record();
  record.info = flashmoe_launch_init();
  std::memcpy(record.info.kernel, info.kernel, sizeof record.info.kernel);
  record.info.device = problem.device;
  std::memcpy(record.info.grid, info.grid, sizeof record.info.grid);
  std::memcpy(record.info.block, info.block, sizeof record.info.block);
  record.info.shared_bytes = info.shared_bytes;
  record.info.cluster = info.cluster;
  record.function = entry.function;
  record.read = &read_launch;
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::short_rows

namespace flashmoe {

const AttentionFamily kShortAttention = {"short", FLASHMOE_DEVICE_CUDA, &short_rows::plan,
                                         &short_rows::launch};

}  // namespace flashmoe
