// What calls of the C ABI cost the host, each beside launches of empty kernels with its grid,
// blocks, shared memory and parameters: those are what no library can save. Prints "name ours
// launches count": microseconds, and how many launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "flashmoe/flashmoe.h"

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

// Memory of the device, zeros, and the tensor that it is.
class DeviceTensor {
 public:
  DeviceTensor(flashmoe_dtype dtype, std::initializer_list<int64_t> shape) {
    size_t bytes = dtype.bits / 8;
    for (const int64_t extent : shape) {
      shape_[tensor_.ndim++] = extent;
      bytes *= static_cast<size_t>(extent);
    }
    REQUIRE(cudaMalloc(&tensor_.data, bytes) == cudaSuccess);
    REQUIRE(cudaMemset(tensor_.data, 0, bytes) == cudaSuccess);
    tensor_.device = {FLASHMOE_DEVICE_CUDA, 0};
    tensor_.dtype = dtype;
    tensor_.shape = shape_;
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { cudaFree(tensor_.data); }

  operator const flashmoe_tensor*() const { return &tensor_; }
  void* data() const { return tensor_.data; }

 private:
  flashmoe_tensor tensor_ = {};
  int64_t shape_[4] = {};
};

constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};

template <class Params>
void compare(const char* name, const Params& params,
             flashmoe_status (*make_plan)(const Params*, flashmoe_plan*),
             flashmoe_status (*run)(const Params*, void*, size_t, void*)) {
  flashmoe_plan plan = flashmoe_plan_init();
  REQUIRE(make_plan(&params, &plan) == FLASHMOE_OK);
  const size_t bytes = static_cast<size_t>(plan.workspace_bytes);
  const DeviceTensor workspace({FLASHMOE_DTYPE_INT, 8, 1}, {static_cast<int64_t>(bytes) + 1});
  const double ours =
      microseconds([&] { REQUIRE(run(&params, workspace.data(), bytes, nullptr) == FLASHMOE_OK); });
  const double launches = microseconds([&] {
    for (int32_t i = 0; i < plan.launch_count; ++i) launch_empty(plan.launches[i]);
  });
  std::printf("%s %.3f %.3f %d\n", name, ours, launches, plan.launch_count);
}

void compare_attention(const char* name, int64_t seq, int64_t heads, int64_t dim,
                       const char* kernel) {
  const DeviceTensor q(kBf16, {1, seq, heads, dim}), k(kBf16, {1, seq, heads, dim}),
      v(kBf16, {1, seq, heads, dim}), out(kBf16, {1, seq, heads, dim});
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.q = q;
  params.k = k;
  params.v = v;
  params.out = out;
  params.kernel = kernel;
  compare(name, params, &flashmoe_attention_forward_plan, &flashmoe_attention_forward);
}

// One token, 2 of 8 experts, as in benchmarks/host_cost.py.
void compare_experts() {
  constexpr int64_t kHidden = 256, kInner = 64, kExperts = 8, kTopK = 2;
  const DeviceTensor x(kBf16, {1, kHidden}), router(kBf16, {kExperts, kHidden}),
      logits(kBf16, {1, kExperts}), w_gate_up(kBf16, {kExperts, 2 * kInner, kHidden}),
      w_down(kBf16, {kExperts, kHidden, kInner}), ids(kInt32, {1, kTopK}),
      weights(kFloat32, {1, kTopK}), offsets(kInt32, {kExperts + 1}), pairs(kInt32, {kTopK}),
      slots(kInt32, {1, kTopK}), out(kBf16, {1, kHidden});
  flashmoe_moe_route_params route = flashmoe_moe_route_params_init();
  route.logits = logits;
  route.ids = ids;
  route.weights = weights;
  route.offsets = offsets;
  route.pairs = pairs;
  route.slots = slots;
  compare("moe_route", route, &flashmoe_moe_route_plan, &flashmoe_moe_route);
  flashmoe_moe_forward_params forward = flashmoe_moe_forward_params_init();
  forward.x = x;
  forward.w_gate_up = w_gate_up;
  forward.w_down = w_down;
  forward.weights = weights;
  forward.offsets = offsets;
  forward.pairs = pairs;
  forward.slots = slots;
  forward.out = out;
  compare("moe_forward", forward, &flashmoe_moe_forward_plan, &flashmoe_moe_forward);
  flashmoe_fused_moe_params fused = flashmoe_fused_moe_params_init();
  fused.tokens = x;
  fused.router_weights = router;
  fused.w_gate_up = w_gate_up;
  fused.w_down = w_down;
  fused.out = out;
  fused.top_k = kTopK;
  compare("fused_moe", fused, &flashmoe_fused_moe_plan, &flashmoe_fused_moe);
}

}  // namespace

int main() {
  REQUIRE(cudaFuncSetAttribute(reinterpret_cast<const void*>(&empty),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               227 * 1024) == cudaSuccess);
  compare_attention("default", 64, 2, 64, nullptr);
  compare_attention("sm89", 64, 2, 64, "sm89");
  int capability = 0;
  REQUIRE(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  if (capability == 9) compare_attention("sm90", 64, 2, 64, "sm90");
  compare_experts();
  return 0;
}
