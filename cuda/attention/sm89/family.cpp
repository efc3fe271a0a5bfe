// The sm_89 family: which kernel serves a problem, how it is launched, and its read-back.
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/attention/sm89/entry.h"
#include "cuda/attention/sm89/params.h"

namespace flashmoe::sm89 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/attention/sm89/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

constexpr int64_t kMaxSequence = int64_t{1} << 30;  // row + offset + 1 fits in int32
constexpr int32_t kNoLeftOffset = -(1 << 30);
constexpr int32_t kNoRightOffset = (1 << 30) - 1;
constexpr double kLog2E = 1.4426950408889634;

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/attention/sm89/entries.inc"
#undef FLASHMOE_ENTRY
};

// Whether as many blocks of a kernel fit a multiprocessor as it is designed for.
bool fits(const Entry& entry, const DeviceFacts& facts) {
  return entry.blocks_per_sm * (entry.shared_bytes + facts.reserved_shared_bytes_per_block) <=
         facts.shared_bytes_per_multiprocessor;
}

// The kernel that the problem names, else the one of its dtype with the least padding; among alike
// the first that fits.
const Entry* find_entry(const AttentionProblem& problem, const DeviceFacts& facts) {
  const Entry* best = nullptr;
  for (const Entry* entry : kEntries) {
    if (entry->dtype != problem.dtype || entry->dim < problem.dim || entry->dim_v < problem.dim_v) {
      continue;
    }
    if (problem.kernel != nullptr && std::strcmp(problem.kernel, entry->name) == 0) return entry;
    const int padding = best == nullptr ? -1 : entry->dim + entry->dim_v - best->dim - best->dim_v;
    if (padding < 0 || (padding == 0 && !fits(*best, facts) && fits(*entry, facts))) best = entry;
  }
  return best;
}

// Loads a kernel's code on a device and allows its shared memory; 0 with a reason on failure. The
// first call per kernel and device costs, the others are one load.
int prepare(const Entry& entry, int device_id, int compute_capability, flashmoe_status* status,
            char* reason, size_t reason_size) {
  const int known = entry.loaded_arch[device_id].load(std::memory_order_acquire);
  if (known != 0) return known;
  const DeviceGuard guard(device_id);
  cudaError_t error = guard.error();
  cudaFuncAttributes attributes = {};
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, entry.function);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 entry.shared_bytes);
  }
  if (error == cudaSuccess) {
    entry.loaded_arch[device_id].store(attributes.binaryVersion, std::memory_order_release);
    return attributes.binaryVersion;
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
                  compute_capability / 10, compute_capability % 10, device_id,
                  FLASHMOE_CUDA_ARCHITECTURES);
  } else {
    std::snprintf(reason, reason_size, "loading %s on cuda:%d: %s", entry.name, device_id,
                  cudaGetErrorString(error));
  }
  return 0;
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
  const Entry* entry = find_entry(problem, *facts);
  if (entry == nullptr) {
    return refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these head dimensions");
  }
  if (problem.seq_q > kMaxSequence || problem.seq_k > kMaxSequence) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "sequence longer than 2^30");
  }
  const int64_t tiles_per_head = (problem.seq_q + entry->tile_q - 1) / entry->tile_q;
  const int64_t heads = problem.batch * problem.heads_q;
  if (heads > INT_MAX || tiles_per_head * heads > INT_MAX) {
    return refuse(FLASHMOE_ERROR_UNSUPPORTED, "more than 2^31 - 1 tiles of query rows");
  }
  flashmoe_status status = FLASHMOE_OK;
  const int arch =
      prepare(*entry, device_id, facts->compute_capability, &status, reason, reason_size);
  if (arch == 0) return status;

  flashmoe_attention_plan& info = plan->info;
  std::strncpy(info.kernel, entry->name, sizeof info.kernel - 1);
  write_isa(arch, info.isa);
  info.tile_q = entry->tile_q;
  info.tile_k = entry->tile_k;
  info.dim = entry->dim;
  info.dim_v = entry->dim_v;
  info.stages = entry->stages;
  info.grid[0] = static_cast<uint32_t>(tiles_per_head * heads);
  info.grid[1] = info.grid[2] = 1;
  info.block[0] = static_cast<uint32_t>(entry->threads);
  info.block[1] = info.block[2] = 1;
  info.shared_bytes = static_cast<uint64_t>(entry->shared_bytes);
  info.workspace_bytes = 0;
  plan->entry = entry;
  return FLASHMOE_OK;
}

// Tiles of a section run longest first, so its keys and values should fit the L2 beside the traffic
// of queries and outputs. Without a mask, or with one at either side, all tiles are alike and heads
// go one by one.
int heads_per_section(const AttentionProblem& problem, int64_t l2_bytes) {
  if (problem.bounded_left == problem.bounded_right) return 1;
  const int64_t heads = problem.batch * problem.heads_q;
  const int64_t group = problem.heads_q / problem.heads_kv;
  const int64_t bytes = problem.seq_k * (problem.dim + problem.dim_v) * dtype_bytes(problem.dtype);
  const int64_t groups = bytes > 0 ? l2_bytes / 3 / bytes : heads;
  return static_cast<int>(groups < 1 ? group : (groups > heads / group ? heads : groups * group));
}

Params make_params(const AttentionProblem& p, const flashmoe_attention_plan& plan,
                   int64_t l2_bytes) {
  Params params;
  params.q = p.q;
  params.k = p.k;
  params.v = p.v;
  params.out = p.out;
  params.lse = p.lse;
  params.q_strides = p.q_strides;
  params.k_strides = p.k_strides;
  params.v_strides = p.v_strides;
  params.out_strides = p.out_strides;
  params.lse_strides = p.lse_strides;
  params.seq_q = static_cast<int32_t>(p.seq_q);
  params.seq_k = static_cast<int32_t>(p.seq_k);
  params.heads_q = static_cast<int32_t>(p.heads_q);
  params.heads_per_kv = static_cast<int32_t>(p.heads_q / p.heads_kv);
  params.dim = static_cast<int32_t>(p.dim);
  params.dim_v = static_cast<int32_t>(p.dim_v);
  params.left_offset = p.bounded_left ? static_cast<int32_t>(p.left_offset) : kNoLeftOffset;
  params.right_offset = p.bounded_right ? static_cast<int32_t>(p.right_offset) : kNoRightOffset;
  params.masked = p.bounded_left || p.bounded_right ? 1 : 0;
  params.last_tiles_first = p.bounded_right && !p.bounded_left ? 1 : 0;
  const bool capped = p.softcap != 0.0f;
  params.scale_log2 =
      static_cast<float>(static_cast<double>(capped ? p.softcap : p.scale) * kLog2E);
  params.cap_ratio = p.cap_ratio;
  params.heads = static_cast<int32_t>(p.batch * p.heads_q);
  params.tiles_per_head = static_cast<int32_t>(plan.grid[0]) / params.heads;  // of the planned grid
  params.heads_per_section = heads_per_section(p, l2_bytes);
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
  char reason[128];
  const DeviceFacts* facts = device_facts(device_id, reason, sizeof reason);
  if (facts == nullptr) return fail(FLASHMOE_ERROR_NO_DEVICE, "%s", reason);
  const DeviceGuard guard(device_id);
  if (guard.error() != cudaSuccess) {
    return fail(FLASHMOE_ERROR_CUDA, "device: making cuda:%d current: %s", device_id,
                cudaGetErrorString(guard.error()));
  }
  Params params = make_params(problem, info, facts->l2_bytes);
  void* arguments[] = {&params};
  const cudaError_t error =
      cudaLaunchKernel(entry.function, dim3(info.grid[0], info.grid[1], info.grid[2]),
                       dim3(info.block[0], info.block[1], info.block[2]), arguments,
                       static_cast<size_t>(info.shared_bytes), static_cast<cudaStream_t>(stream));
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
  record.function = entry.function;
  record.read = &read_launch;
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::sm89

namespace flashmoe {

const AttentionFamily kSm89Attention = {"sm89", FLASHMOE_DEVICE_CUDA, &sm89::plan, &sm89::launch};

}  // namespace flashmoe
