// What calls of the C ABI cost the host, each beside launches of empty kernels with its grid,
// blocks, shared memory and parameters: those are what no library can save. Prints "name ours
// launches", microseconds.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flashmoe/flashmoe.hpp"

#define REQUIRE(condition)                                                    \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s: %s; %s\n", #condition, flashmoe_last_error(), \
                   cudaGetErrorString(cudaGetLastError()));                   \
      std::exit(1);                                                           \
    }                                                                         \
  } while (0)

namespace {

struct Parameters {
  char bytes[1024];  // about those of an attention kernel
};

__global__ void empty(const __grid_constant__ Parameters) {}

constexpr int kCalls = 100;  // fewer than a launch queue holds
constexpr int kRounds = 60;

template <class Call>
double microseconds(const Call& call) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    const auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
    rounds.push_back(took.count() / kCalls);
  }
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

void launch_empty(const flashmoe_launch& like) {
  static Parameters parameters = {};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(like.grid[0], like.grid[1], like.grid[2]);
  config.blockDim = dim3(like.block[0], like.block[1], like.block[2]);
  config.dynamicSmemBytes = like.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* arguments[] = {&parameters};
  REQUIRE(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(&empty), arguments) ==
          cudaSuccess);
}

void compare(const char* name, int64_t seq, int64_t heads, int64_t dim, const char* kernel) {
  const int64_t elements = seq * heads * dim;
  void* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, static_cast<size_t>(4 * 2 * elements)) == cudaSuccess);
  REQUIRE(cudaMemset(memory, 0, static_cast<size_t>(4 * 2 * elements)) == cudaSuccess);
  int64_t shape[4] = {1, seq, heads, dim};
  flashmoe_tensor tensors[4] = {};
  for (int i = 0; i < 4; ++i) {
    tensors[i].data = static_cast<char*>(memory) + i * 2 * elements;
    tensors[i].device = {FLASHMOE_DEVICE_CUDA, 0};
    tensors[i].ndim = 4;
    tensors[i].dtype = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
    tensors[i].shape = shape;
  }
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.q = &tensors[0];
  params.k = &tensors[1];
  params.v = &tensors[2];
  params.out = &tensors[3];
  params.kernel = kernel;
  flashmoe_plan plan = flashmoe_plan_init();
  REQUIRE(flashmoe_attention_forward_plan(&params, &plan) == FLASHMOE_OK);
  REQUIRE(plan.workspace_bytes == 0);
  const double ours = microseconds(
      [&] { REQUIRE(flashmoe_attention_forward(&params, nullptr, 0, nullptr) == FLASHMOE_OK); });
  const double launches = microseconds([&] {
    for (int32_t i = 0; i < plan.launch_count; ++i) launch_empty(plan.launches[i]);
  });
  std::printf("%s %.3f %.3f\n", name, ours, launches);
  REQUIRE(cudaFree(memory) == cudaSuccess);
}

}  // namespace

int main() {
  REQUIRE(cudaFuncSetAttribute(reinterpret_cast<const void*>(&empty),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               227 * 1024) == cudaSuccess);
  compare("default", 64, 2, 64, nullptr);
  compare("sm89", 64, 2, 64, "sm89");
  int capability = 0;
  REQUIRE(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  if (capability == 9) compare("sm90", 64, 2, 64, "sm90");
  return 0;
}
