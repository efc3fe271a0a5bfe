#include "cuda/gpu_models.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashmoe {
namespace {

// Multiprocessors come in groups, and a cluster stays within one group. Chips of a model differ in
// which groups lack some multiprocessors. These groups have room for 7 clusters of 16 blocks that
// fill a multiprocessor each, as on an H200 that was measured.
struct Groups {
  int count;
  int multiprocessors;  // per group
};

struct Model {
  const char* name;
  DeviceFacts facts;
  uint64_t memory_bytes;
  Groups groups[3];  // zeros without clusters
};

// Limits of Hopper and Ada: shared memory per block and per multiprocessor, and the overhead of a
// block beside its own.
constexpr int kHopperBlock = 227 << 10;
constexpr int kHopperMultiprocessor = 228 << 10;
constexpr int kAdaBlock = 99 << 10;
constexpr int kAdaMultiprocessor = 100 << 10;
constexpr int kReserved = 1 << 10;

// In the order of flashmoe_gpu_model: what a driver reports. A driver reserves part of the memory.
const Model kModels[kGpuModels] = {
    {"NVIDIA H100 80GB HBM3",
     {90, 132, kHopperBlock, kHopperMultiprocessor, kReserved, 50 << 20,
      bytes_per_microsecond(2619e3, 5120)},
     uint64_t{81559} << 20,
     {{3, 18}, {4, 16}, {1, 14}}},
    {"NVIDIA H200",
     {90, 132, kHopperBlock, kHopperMultiprocessor, kReserved, 60 << 20,
      bytes_per_microsecond(3201e3, 6144)},
     150109880320,
     {{3, 18}, {4, 16}, {1, 14}}},
    {"NVIDIA L4",
     {89, 58, kAdaBlock, kAdaMultiprocessor, kReserved, 48 << 20,
      bytes_per_microsecond(6251e3, 192)},
     uint64_t{23034} << 20,
     {}},
    {"NVIDIA GeForce RTX 4090",
     {89, 128, kAdaBlock, kAdaMultiprocessor, kReserved, 72 << 20,
      bytes_per_microsecond(10501e3, 384)},
     uint64_t{24564} << 20,
     {}},
};

const Model& model_of(int device_id) { return kModels[device_id - kFirstGpuModel]; }

// Properties of compiled kernels. tests/cuda/test_sass.py compares them with the machine code.
struct Compiled {
  const char* kernel;  // prefix of its name
  int static_shared_bytes;
  int registers;  // per thread, rounded up to the count at which fewer blocks fit
};
constexpr int kMostRegisters = 255;
constexpr Compiled kCompiled[] = {
    {"attention_forward_sm89_few_rows_fp16_d64_dv64_r8", 0, 168},
    {"attention_forward_sm89_few_rows_bf16_d64_dv64_r8", 0, 168},
    {"attention_combine_sm89_few_rows_fp16_d64_", 4288, kMostRegisters},
    {"attention_combine_sm89_few_rows_fp16_d128_", 4192, kMostRegisters},
    {"attention_combine_sm89_few_rows_fp16_d192_", 4192, kMostRegisters},
    {"attention_combine_sm89_few_rows_fp16_d256_", 4144, kMostRegisters},
    {"attention_combine_sm89_few_rows_bf16_d64_", 4288, kMostRegisters},
    {"attention_combine_sm89_few_rows_bf16_d128_", 4192, kMostRegisters},
    {"attention_combine_sm89_few_rows_bf16_d192_", 4192, kMostRegisters},
    {"attention_combine_sm89_few_rows_bf16_d256_", 4144, kMostRegisters},
    {"attention_combine_sm89_decode_", 6240, kMostRegisters},
    {"attention_combine_sm90_mla_", 5120, kMostRegisters},
    {"attention_combine_sm90_split_kv_fp16_d64_", 4288, kMostRegisters},
    {"attention_combine_sm90_split_kv_fp16_d128_", 4192, kMostRegisters},
    {"attention_combine_sm90_split_kv_fp16_d192_", 4192, kMostRegisters},
    {"attention_combine_sm90_split_kv_fp16_d256_", 4144, kMostRegisters},
    {"attention_combine_sm90_split_kv_bf16_d64_", 4288, kMostRegisters},
    {"attention_combine_sm90_split_kv_bf16_d128_", 4192, kMostRegisters},
    {"attention_combine_sm90_split_kv_bf16_d192_", 4192, kMostRegisters},
    {"attention_combine_sm90_split_kv_bf16_d256_", 4144, kMostRegisters},
    {"kv_append_sm89_packed_", 1028, kMostRegisters},
    {"kv_gather_sm89_", 5632, kMostRegisters},
    {"merge_states_sm89_", 23040, kMostRegisters},
    {"moe_backward_combine_", 16384, kMostRegisters},
    {"moe_backward_sums_", 8192, kMostRegisters},
    {"moe_route_once_", 144, kMostRegisters},
    {"moe_route_place", 41232, kMostRegisters},
    {"moe_up_sm90_few_tokens_fp16_bulk", 256, kMostRegisters},
    {"moe_up_sm90_few_tokens_bf16_bulk", 256, kMostRegisters},
    {"moe_up_sm89_few_tokens_", 64, kMostRegisters},
    {"moe_down_sm90_few_tokens_fp16_bulk", 256, kMostRegisters},
    {"moe_down_sm90_few_tokens_bf16_bulk", 256, kMostRegisters},
    {"moe_down_sm89_few_tokens_", 80, kMostRegisters},
    {"", 0, kMostRegisters},
};

// The code that a driver loads for a compute capability, among the architectures of this build,
// such as "89-real;90a-real;89-virtual": the latest machine code that runs there, else the latest
// PTX. False if there is none.
bool choose_code(int capability, int* arch, int* ptx) {
  int machine_code = 0;
  int newest_ptx = 0;
  for (const char* at = FLASHMOE_CUDA_ARCHITECTURES; *at != '\0';) {
    char* end = nullptr;
    const int number = static_cast<int>(std::strtol(at, &end, 10));
    const bool specific = *end == 'a';  // runs on exactly this architecture
    const size_t length = std::strcspn(end, "; ");
    const bool real = length < 8 || std::strncmp(end + length - 8, "-virtual", 8) != 0;
    const bool virtual_too = length < 5 || std::strncmp(end + length - 5, "-real", 5) != 0;
    const bool fits = specific ? number == capability : number <= capability;
    if (real && fits && number / 10 == capability / 10)
      machine_code = std::max(machine_code, number);
    if (virtual_too && fits) newest_ptx = std::max(newest_ptx, number);
    at = end + length;
    at += std::strspn(at, "; ");
  }
  *arch = machine_code != 0 ? machine_code : capability;
  *ptx = machine_code != 0 ? machine_code : newest_ptx;
  return *ptx != 0;
}

}  // namespace

const DeviceFacts& facts_of_model(int device_id) { return model_of(device_id).facts; }

void describe_model(int device_id, flashmoe_device_info* info) {
  const Model& model = model_of(device_id);
  std::snprintf(info->name, sizeof info->name, "%s", model.name);
  info->memory_bytes = model.memory_bytes;
}

bool read_code_for_model(const Kernel& kernel, int device_id, cudaFuncAttributes* attributes) {
  const Compiled* compiled = kCompiled;
  while (std::strncmp(kernel.name, compiled->kernel, std::strlen(compiled->kernel)) != 0) {
    ++compiled;
  }
  *attributes = {};
  attributes->sharedSizeBytes = static_cast<size_t>(compiled->static_shared_bytes);
  attributes->numRegs = compiled->registers;
  return choose_code(facts_of_model(device_id).compute_capability, &attributes->binaryVersion,
                     &attributes->ptxVersion);
}

int resident_on_model(int device_id, const cudaFuncAttributes& attributes, int threads,
                      int shared_bytes, int cluster) {
  constexpr int kWarp = 32;
  constexpr int kPartitions = 4;  // per multiprocessor; each has the registers of its warps
  constexpr int kRegisters = 16384;
  constexpr int kRegisterUnit = 256;
  constexpr int kSharedUnit = 128;
  const Model& model = model_of(device_id);
  const bool hopper = model.facts.compute_capability == 90;
  const int most_warps = hopper ? 64 : 48;
  const int most_blocks = hopper ? 32 : 24;
  const auto round_up = [](int n, int unit) { return (n + unit - 1) / unit * unit; };
  const int warps = (threads + kWarp - 1) / kWarp;
  // Every kernel is compiled so that at least one of its largest blocks fits.
  const int most_registers = kRegisters * kPartitions / warps / kRegisterUnit * kRegisterUnit;
  const int registers =
      std::min(round_up(attributes.numRegs * kWarp, kRegisterUnit), most_registers);
  const int shared = round_up(shared_bytes + static_cast<int>(attributes.sharedSizeBytes) +
                                  model.facts.reserved_shared_bytes_per_block,
                              kSharedUnit);
  const int blocks =
      std::min({most_blocks, most_warps / warps, kRegisters / registers * kPartitions / warps,
                model.facts.shared_bytes_per_multiprocessor / shared});
  if (cluster == 1) return blocks * model.facts.multiprocessors;
  int clusters = 0;
  for (const Groups& groups : model.groups) {
    clusters += groups.count * (groups.multiprocessors * blocks / cluster);
  }
  return clusters;
}

}  // namespace flashmoe
