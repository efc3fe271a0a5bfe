// The host side of mixture-of-experts routing and combining on a made-up CUDA: what is planned, and
// that the launch gets it.
#include <climits>
#include <cstdio>
#include <cstring>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/moe/combine/entry.h"
#include "cuda/moe/combine/params.h"
#include "cuda/moe/combine/stage.h"
#include "cuda/moe/route/entry.h"
#include "cuda/moe/route/params.h"
#include "flashmoe/flashmoe.h"

// ---- made-up kernels
// -----------------------------------------------------------------------------

namespace flashmoe::moe_route {

static int scratch_words(int experts, int num_groups) { return num_groups > 1 ? experts : 0; }
static int once_bytes(const SharedShape& s) {
  return 4 * (s.warps * (s.experts + scratch_words(s.experts, s.num_groups)) +
              (s.cluster + 1) * s.experts + s.block_tokens * s.top_k);
}
static int choose_bytes(const SharedShape& s) {
  return 4 * s.warps * (s.experts + scratch_words(s.experts, s.num_groups));
}
static LoadedKernel loaded[7][kMaxDevices];
static int most_blocks[3][kMaxDevices];

extern const Entry entry_key32_e128;
extern const Entry entry_key64_e1024;
extern const Entry entry_given;
extern const Kernel kernel_place;
const Entry entry_key32_e128 = {
    {"once_key32_e128", reinterpret_cast<const void*>(0x11), kMaxSharedBytes, loaded[0]},
    {"choose_key32_e128", reinterpret_cast<const void*>(0x12), kMaxSharedBytes, loaded[1]},
    128,
    false,
    1024,
    &scratch_words,
    &once_bytes,
    &choose_bytes,
    most_blocks[0]};
const Entry entry_key64_e1024 = {
    {"once_key64_e1024", reinterpret_cast<const void*>(0x21), kMaxSharedBytes, loaded[2]},
    {"choose_key64_e1024", reinterpret_cast<const void*>(0x22), kMaxSharedBytes, loaded[3]},
    1024,
    true,
    256,
    &scratch_words,
    &once_bytes,
    &choose_bytes,
    most_blocks[1]};
const Entry entry_given = {
    {"once_given", reinterpret_cast<const void*>(0x31), kMaxSharedBytes, loaded[4]},
    {"choose_given", reinterpret_cast<const void*>(0x32), kMaxSharedBytes, loaded[5]},
    1024,
    true,
    1024,
    &scratch_words,
    &once_bytes,
    &choose_bytes,
    most_blocks[2]};
const Kernel kernel_place = {"place", reinterpret_cast<const void*>(0x41), 0, loaded[6]};

}  // namespace flashmoe::moe_route

namespace flashmoe::moe_combine {
static LoadedKernel loaded[kEntries][kMaxDevices];
const Entry entries[kEntries] = {
    {{"combine_fp16_k2", reinterpret_cast<const void*>(0x51), 0, loaded[0]}, Dtype::kFloat16, 2},
    {{"combine_fp16_k4", reinterpret_cast<const void*>(0x52), 0, loaded[1]}, Dtype::kFloat16, 4},
    {{"combine_fp16_k8", reinterpret_cast<const void*>(0x53), 0, loaded[2]}, Dtype::kFloat16, 8},
    {{"combine_bf16_k2", reinterpret_cast<const void*>(0x54), 0, loaded[3]}, Dtype::kBFloat16, 2},
    {{"combine_bf16_k4", reinterpret_cast<const void*>(0x55), 0, loaded[4]}, Dtype::kBFloat16, 4},
    {{"combine_bf16_k8", reinterpret_cast<const void*>(0x56), 0, loaded[5]}, Dtype::kBFloat16, 8},
};
}  // namespace flashmoe::moe_combine

namespace flashmoe {
namespace {

template <class Data>
Data* address(int number) {
  return reinterpret_cast<Data*>((int64_t{1} << 40) + (int64_t{number} << 32));
}

MoeRouteProblem problem_of(int64_t tokens, int32_t experts, int32_t top_k, Dtype dtype) {
  MoeRouteProblem p = {};
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.tokens = tokens;
  p.experts = experts;
  p.top_k = top_k;
  p.logits = address<const void>(0);
  p.logits_dtype = dtype;
  p.logits_stride = experts;
  p.ids = address<int32_t>(1);
  p.weights = address<float>(2);
  p.offsets = address<int32_t>(3);
  p.pairs = address<int32_t>(4);
  p.slots = address<int32_t>(5);
  p.num_groups = p.top_groups = 1;
  p.scale = 1.0f;
  return p;
}

Plan plan_of(const MoeRouteProblem& problem) {
  Plan plan = {};
  char reason[256];
  CHECK(kCudaMoeRoute.plan(problem, &plan, Reason(reason)) == FLASHMOE_OK);
  return plan;
}

moe_route::Params seen;

moe_route::Params launch(const MoeRouteProblem& problem, const Plan& plan) {
  fake::on_launch = [](const void* params) { std::memcpy(&seen, params, sizeof seen); };
  fake::last = {};
  CHECK(kCudaMoeRoute.launch(problem, plan, address<void>(6), nullptr) == FLASHMOE_OK);
  const flashmoe_launch& last = plan.info.launches[plan.info.launch_count - 1];
  CHECK(fake::last.grid.x == last.grid[0] && fake::last.grid.y == 1);
  CHECK(fake::last.block.x == last.block[0]);
  CHECK(fake::last.shared_bytes + fake::kStaticSharedBytes == last.shared_bytes);
  CHECK(fake::last.programmatic == 1);
  return seen;
}

// Every token is some block's and some warp's, and shared memory has room for what they say.
void tokens_are_all_somebodys(const MoeRouteProblem& p) {
  const Plan plan = plan_of(p);
  const moe_route::Params params = launch(p, plan);
  const flashmoe_launch& stage = plan.info.launches[0];
  CHECK(stage.shared_bytes <= moe_route::kMaxSharedBytes);
  CHECK(int64_t{params.block_tokens} * stage.grid[0] >= p.tokens);
  CHECK(int64_t{params.warp_tokens} * (stage.block[0] / 32) >= params.block_tokens);
  CHECK(int64_t{params.warp_tokens} * params.used_warps >= params.block_tokens);
  CHECK(params.used_warps <= static_cast<int32_t>(stage.block[0] / 32));
  CHECK(int64_t{params.thread_experts} * stage.block[0] >= p.experts);
  if (plan.info.launch_count == 1) {
    CHECK(plan.info.workspace_bytes == 0 && params.keeps_list == 1);
    CHECK(params.cluster == static_cast<int32_t>(stage.grid[0]));
    CHECK(fake::last.cluster == (params.cluster > 1 ? stage.grid[0] : 0));
  } else {
    CHECK(plan.info.launch_count == 2 && params.few == 0 && fake::last.cluster == 0);
    CHECK(plan.info.launches[1].grid[0] == stage.grid[0]);
    CHECK(plan.info.workspace_bytes ==
          uint64_t{stage.grid[0]} * 4 * static_cast<uint64_t>(params.histogram_stride));
    CHECK(params.histogram_stride >= p.experts && params.histogram_stride % 4 == 0);
  }
}

void routing_plans() {
  for (const int32_t experts : {1, 7, 128, 1000, 1024}) {
    for (const int64_t tokens : {0, 1, 3, 16, 17, 100, 512, 513, 5000, 1 << 20, 60 << 20}) {
      for (const int32_t top_k : {1, 5, 32}) {
        if (top_k > experts || tokens * top_k > INT_MAX) continue;
        tokens_are_all_somebodys(problem_of(tokens, experts, top_k, Dtype::kFloat32));
        MoeRouteProblem grouped = problem_of(tokens, experts, top_k, Dtype::kBFloat16);
        if (experts % 4 == 0) grouped.num_groups = experts / 4, grouped.top_groups = 1;
        tokens_are_all_somebodys(grouped);
        MoeRouteProblem given = problem_of(tokens, experts, top_k, Dtype::kFloat32);
        given.logits = nullptr;
        given.given_ids = address<const void>(7);
        given.given_ids_stride = top_k;
        tokens_are_all_somebodys(given);
      }
    }
  }
  const Plan one = plan_of(problem_of(1, 128, 8, Dtype::kBFloat16));
  CHECK(one.info.launch_count == 1 && one.info.launches[0].grid[0] == 1);
  CHECK(std::strcmp(one.info.launches[0].kernel, "once_key32_e128") == 0);
  const Plan many = plan_of(problem_of(8192, 128, 8, Dtype::kBFloat16));
  CHECK(many.info.launch_count == 2 && std::strcmp(many.info.launches[1].kernel, "place") == 0);
}

// A warp's share of the tokens is added to the number of the last of them, in 32 bits.
void routing_has_a_limit() {
  constexpr int64_t kMost = (int64_t{1} << 31) - (int64_t{1} << 16);
  tokens_are_all_somebodys(problem_of(kMost / 2, 1024, 2, Dtype::kBFloat16));
  const DeviceFacts* facts = nullptr;
  char reason[256] = "";
  CHECK(read_device_facts(0, &facts, Reason(reason)) == FLASHMOE_OK);
  Plan plan = {};
  CHECK(kCudaMoeRoute.plan(problem_of(kMost, 1, 1, Dtype::kBFloat16), &plan, Reason(reason)) ==
        FLASHMOE_ERROR_UNSUPPORTED);
  long long most = 0;
  CHECK(std::sscanf(reason, "logits: got 2147418112 tokens, accepted on cuda:0 are at most %lld",
                    &most) == 1);
  const MoeRouteProblem fits = problem_of(most, 1, 1, Dtype::kBFloat16);
  tokens_are_all_somebodys(fits);
  CHECK(most + int64_t{launch(fits, plan_of(fits)).warp_tokens} <= INT_MAX);
  MoeRouteProblem given = problem_of(kMost, 1, 1, Dtype::kFloat32);
  given.logits = nullptr;
  given.given_ids = address<const void>(7);
  plan = {};
  CHECK(kCudaMoeRoute.plan(given, &plan, Reason(reason)) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(reason, "given_ids: got 2147418112 tokens") == reason);
}

void the_kernel_fits_the_choice() {
  const auto name = [](const MoeRouteProblem& p) {
    static Plan plan;
    plan = plan_of(p);
    return plan.info.launches[0].kernel;
  };
  MoeRouteProblem p = problem_of(1, 128, 8, Dtype::kFloat16);
  CHECK(std::strcmp(name(p), "once_key32_e128") == 0);
  p.selection_bias = address<const float>(8);
  CHECK(std::strcmp(name(p), "once_key64_e1024") == 0);
  CHECK(std::strcmp(name(problem_of(1, 128, 8, Dtype::kFloat32)), "once_key64_e1024") == 0);
}

void vectors_are_loaded_where_rows_are_aligned() {
  const auto vectors = [](int64_t stride, int64_t offset, int64_t tokens) {
    MoeRouteProblem p = problem_of(tokens, 128, 8, Dtype::kBFloat16);
    p.logits = address<const char>(0) + offset;
    p.logits_stride = stride;
    return launch(p, plan_of(p)).vectors;
  };
  CHECK(vectors(128, 0, 3) == 1 && vectors(136, 16, 3) == 1 && vectors(129, 0, 1) == 1);
  CHECK(vectors(129, 0, 3) == 0 && vectors(132, 0, 3) == 0 && vectors(128, 8, 3) == 0);
}

moe_combine::Params combined;

void combining(int64_t tokens, int64_t hidden, int32_t top_k, bool weight_on_input) {
  MoeForwardProblem p = {};
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.out.dtype = Dtype::kBFloat16;
  p.tokens = tokens;
  p.hidden = hidden;
  p.top_k = top_k;
  p.weight_on_input = weight_on_input;
  p.out.data = address<void>(1);
  p.out.row_stride = hidden + 8;
  p.slots = address<const int32_t>(2);
  p.weights = address<const float>(3);
  Plan plan = {};
  plan.add_launch("up", nullptr, p.device, 1, 32);  // behind what makes the rows
  char reason[256];
  const DeviceFacts* facts = nullptr;
  CHECK(read_device_facts(0, &facts, Reason(reason)) == FLASHMOE_OK);
  CHECK(add_combine(p, *facts, &plan, Reason(reason)) == FLASHMOE_OK);
  CHECK(plan.info.launch_count == 2);
  const flashmoe_launch& stage = plan.info.launches[1];
  CHECK(std::strcmp(stage.kernel, top_k > 4   ? "combine_bf16_k8"
                                  : top_k > 2 ? "combine_bf16_k4"
                                              : "combine_bf16_k2") == 0);
  CHECK(int64_t{stage.grid[0]} * stage.block[1] >= tokens);
  CHECK(int64_t{stage.grid[1]} * stage.block[0] * 8 >= hidden);
  CHECK(stage.block[0] * stage.block[1] <= 256);
  fake::on_launch = [](const void* params) { std::memcpy(&combined, params, sizeof combined); };
  CHECK(launch_combine(p, plan, 1, address<const void>(4), hidden, nullptr) == FLASHMOE_OK);
  CHECK(fake::last.grid.x == stage.grid[0] && fake::last.grid.y == stage.grid[1]);
  CHECK(fake::last.block.x == stage.block[0] && fake::last.block.y == stage.block[1]);
  CHECK(combined.pieces * 8 == hidden && combined.rows == tokens * top_k);
  CHECK((combined.weights == nullptr) == weight_on_input);
  CHECK(combined.out_stride == hidden + 8 && combined.y_stride == hidden);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  routing_plans();
  routing_has_a_limit();
  the_kernel_fits_the_choice();
  vectors_are_loaded_where_rows_are_aligned();
  combining(1, 2048, 8, false);
  combining(1000, 8, 2, false);
  combining(1000, 7168, 9, true);
  combining(300, 2056, 4, false);
  return 0;
}
