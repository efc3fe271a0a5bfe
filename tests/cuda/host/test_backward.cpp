// The host side of the attention backward on a made-up CUDA: what is planned, refused and launched,
// with what parameters and maps, and how long it is said to take; first by the family sm90, then by
// sm89, and which of them serves what. test_backward [no-driver | no-map-moves]: without those
// parts of CUDA.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "cuda/attention/backward/ragged_params.h"
#include "cuda/attention/backward/tables.h"
#include "cuda/attention/sm89_backward/entry.h"
#include "cuda/attention/sm90_backward/entry.h"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/host/fake_cuda.h"
#include "cuda/numeric/dtype.cuh"
#include "flashmoe/flashmoe.h"

// ---- made-up kernels
// -----------------------------------------------------------------------------

namespace flashmoe::sm90_backward {

static const void* const kMain = reinterpret_cast<const void*>(0x90);
static const void* const kPrologue = reinterpret_cast<const void*>(0x91);
static const void* const kBehind = reinterpret_cast<const void*>(0x92);

// Numbers unlike the real ones, so that a literal would show.
static LoadedKernel loaded[kMaxDevices];
static LoadedKernel loaded_prologue[kMaxDevices];
static LoadedKernel loaded_behind[kMaxDevices];
extern const Entry entry_fp16_d64_dv64;
const Entry entry_fp16_d64_dv64 = {
    {{{"attention_backward_sm90_fp16_d64_dv64", kMain, 200000, loaded},
      Dtype::kFloat16,
      64,
      64,
      80,
      112,
      3,
      416},
     3,
     {"attention_backward_prologue_sm90_fp16_d64_dv64", kPrologue, 0, loaded_prologue},
     40,
     160,
     {"attention_backward_behind_sm90_fp16_d64_dv64", kBehind, 640, loaded_behind},
     192,
     0,
     5},
    false,
    32,
    48,
    1,
    1,
};

static LoadedKernel loaded_ragged[3][kMaxDevices];
extern const Entry entry_fp16_d64_dv64_ragged;
const Entry entry_fp16_d64_dv64_ragged = {
    {{{"attention_backward_sm90_fp16_d64_dv64_ragged", kMain, 200000, loaded_ragged[0]},
      Dtype::kFloat16,
      64,
      64,
      80,
      112,
      3,
      416},
     1,
     {"attention_backward_prologue_sm90_fp16_d64_dv64_ragged", kPrologue, 0, loaded_ragged[1]},
     40,
     160,
     {"attention_backward_behind_sm90_fp16_d64_dv64_ragged", kBehind, 640, loaded_ragged[2]},
     192,
     0,
     5,
     1,
     true},
    false,
    32,
    48,
    1,
    1,
};

// The real ones, for estimates.
template <class Traits>
static LoadedKernel loaded_of[3][kMaxDevices];
template <class Traits>
static Entry entry_of(const char* name, const char* prologue, const char* behind) {
  const intptr_t function = 0x90 + Traits::kDim * 0x1000 + Traits::kDimV;
  return {
      {{{name, reinterpret_cast<const void*>(function), Traits::kSharedBytes, loaded_of<Traits>[0]},
        Dtype::kBFloat16,
        Traits::kDim,
        Traits::kDimV,
        Traits::kTileQ,
        Traits::kTileK,
        Traits::kStages,
        Traits::kThreads},
       Traits::kPanels,
       {prologue, kPrologue, 0, loaded_of<Traits>[1]},
       64,
       256,
       {behind, kBehind, 256, loaded_of<Traits>[2]},
       512,
       Traits::kSplitFloats,
       132,
       Traits::kCluster,
       false,
       false,
       false,
       Traits::kWaveHeads},
      Traits::kCapped,
      kBoxColumns,
      kKeysPerGroup,
      Traits::kDqParts,
      Traits::kKeyParts};
}
extern const Entry entry_bf16_d64_dv64;
const Entry entry_bf16_d64_dv64 = entry_of<Traits<__nv_bfloat16, 64, 64>>(
    "attention_backward_sm90_bf16_d64_dv64", "attention_backward_prologue_sm90_bf16_d64_dv64",
    "attention_backward_behind_sm90_bf16_d64_dv64");
extern const Entry entry_bf16_d128_dv128;
const Entry entry_bf16_d128_dv128 = entry_of<Traits<__nv_bfloat16, 128, 128>>(
    "attention_backward_sm90_bf16_d128_dv128", "attention_backward_prologue_sm90_bf16_d128_dv128",
    "attention_backward_behind_sm90_bf16_d128_dv128");
extern const Entry entry_bf16_d192_dv128;
const Entry entry_bf16_d192_dv128 = entry_of<Traits<__nv_bfloat16, 192, 128>>(
    "attention_backward_sm90_bf16_d192_dv128", "attention_backward_prologue_sm90_bf16_d192_dv128",
    "attention_backward_behind_sm90_bf16_d192_dv128");
extern const Entry entry_bf16_d192_dv192;
const Entry entry_bf16_d192_dv192 = entry_of<Traits<__nv_bfloat16, 192, 192>>(
    "attention_backward_sm90_bf16_d192_dv192", "attention_backward_prologue_sm90_bf16_d192_dv192",
    "attention_backward_behind_sm90_bf16_d192_dv192");
extern const Entry entry_bf16_d256_dv256;
const Entry entry_bf16_d256_dv256 = entry_of<Traits<__nv_bfloat16, 256, 256>>(
    "attention_backward_sm90_bf16_d256_dv256", "attention_backward_prologue_sm90_bf16_d256_dv256",
    "attention_backward_behind_sm90_bf16_d256_dv256");

}  // namespace flashmoe::sm90_backward

namespace flashmoe::sm89_backward {

static const void* const kMain = reinterpret_cast<const void*>(0x89);  // the first of them
static const void* const kPrologue = reinterpret_cast<const void*>(0x8a);
static const void* const kSinks = reinterpret_cast<const void*>(0x8b);

template <int kKernel>
static LoadedKernel loaded[3][kMaxDevices];
template <int kKernel>
static Entry entry_of(const char* name, const char* prologue, const char* sinks, Dtype dtype,
                      int dim, int tile_q, int tile_k, int shared_bytes, bool ragged = false,
                      bool biased = false) {
  const auto function = reinterpret_cast<const void*>(0x89 + kKernel * 0x1000);
  return {
      {{name, function, shared_bytes, loaded<kKernel>[0]}, dtype, dim, dim, tile_q, tile_k, 3, 224},
      1,
      {prologue, kPrologue, 0, loaded<kKernel>[1]},
      24,
      160,
      {sinks, kSinks, 640, loaded<kKernel>[2]},
      192,
      0,
      0,
      1,
      ragged,
      biased};
}
#define ENTRY(index, name, dtype, dim, tile_q, tile_k, ...)                        \
  extern const Entry entry_##name;                                                 \
  const Entry entry_##name = entry_of<index>(                                      \
      "attention_backward_sm89_" #name, "attention_backward_prologue_sm89_" #name, \
      "attention_backward_sinks_sm89_" #name, Dtype::dtype, dim, tile_q, tile_k, __VA_ARGS__);
ENTRY(0, fp16_d64_dv64, kFloat16, 64, 48, 96, 190000)
ENTRY(1, fp16_d64_dv64_ada, kFloat16, 64, 48, 96, 98000)
// With the real tiles, for estimates.
ENTRY(2, bf16_d64_dv64, kBFloat16, 64, 128, 128, 230000)
ENTRY(3, bf16_d128_dv128, kBFloat16, 128, 64, 128, 220000)
ENTRY(4, bf16_d256_dv256, kBFloat16, 256, 64, 64, 210000)
ENTRY(5, bf16_d256_dv256_ada, kBFloat16, 256, 32, 32, 90000)
ENTRY(6, fp16_d64_dv64_ragged, kFloat16, 64, 48, 96, 98000, true)
ENTRY(7, fp16_d64_dv64_ragged_biased, kFloat16, 64, 48, 96, 98000, true, true)
#undef ENTRY

}  // namespace flashmoe::sm89_backward

namespace flashmoe {

static flashmoe_status no_cpu(const AttentionBackwardProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
static const void* const kTables = reinterpret_cast<const void*>(0x8c);
static LoadedKernel loaded_tables[kMaxDevices];
namespace attention_backward {
const Kernel kTablesKernel = {"attention_backward_tables", kTables, 4096, loaded_tables};
}  // namespace attention_backward

const AttentionBackwardFamily kCpuAttentionBackward = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};

namespace {

using attention_backward::CommonParams;
using sm90_backward::Params;

// ---- calls
// ---------------------------------------------------------------------------------------

enum Name { kQ, kK, kV, kDout, kDq, kDk, kDv, kOut, kLse, kDlse, kTensors };
constexpr int kMaps = 7;  // of the first

alignas(16) char workspace[16];  // of any size: the fake's launches touch none
alignas(16) char other_workspace[16];

struct Size {
  int64_t batch = 2, seq_q = 700, seq_k = 1000, heads_q = 6, heads_kv = 2, dim = 64, dim_v = 64;
};

struct Call {
  Size size;
  int64_t shapes[kTensors][4], strides[kTensors][4];
  flashmoe_tensor tensors[kTensors];
  flashmoe_attention_backward_params params = flashmoe_attention_backward_params_init();

  explicit Call(const Size& size_ = {}, uint8_t dtype = FLASHMOE_DTYPE_FLOAT,
                flashmoe_device device = {FLASHMOE_DEVICE_CUDA, 0})
      : size(size_) {
    for (int i = 0; i < kTensors; ++i) {
      const bool of_keys = i == kK || i == kV || i == kDk || i == kDv;
      const bool of_v = i == kV || i == kDv || i == kDout || i == kOut;
      const bool numbers = i == kLse || i == kDlse;
      const int rank = numbers ? 3 : 4;
      const int64_t rows[] = {size.batch, of_keys ? size.seq_k : size.seq_q,
                              of_keys ? size.heads_kv : size.heads_q, of_v ? size.dim_v : size.dim};
      const int64_t row_numbers[] = {size.batch, size.heads_q, size.seq_q, 0};
      int64_t step = 1;
      for (int axis = rank - 1; axis >= 0; --axis) {
        shapes[i][axis] = numbers ? row_numbers[axis] : rows[axis];
        strides[i][axis] = step;
        step *= shapes[i][axis];
      }
      tensors[i] = {reinterpret_cast<void*>(int64_t{i + 1} << 40),
                    device,
                    rank,
                    {numbers ? uint8_t{FLASHMOE_DTYPE_FLOAT} : dtype,
                     static_cast<uint8_t>(numbers ? 32 : 16), 1},
                    shapes[i],
                    strides[i],
                    0};
    }
    params.kernel = "sm90";
    params.q = &tensors[kQ];
    params.k = &tensors[kK];
    params.v = &tensors[kV];
    params.dout = &tensors[kDout];
    params.out = &tensors[kOut];
    params.lse = &tensors[kLse];
    params.dlse = &tensors[kDlse];
    params.dq = &tensors[kDq];
    params.dk = &tensors[kDk];
    params.dv = &tensors[kDv];
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // To other memory, of the same alignment.
  void move(int tensor) {
    tensors[tensor].data = static_cast<char*>(tensors[tensor].data) + (1 << 20);
  }

  flashmoe_plan plan() const {
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(flashmoe_attention_backward_plan(&params, &plan) == FLASHMOE_OK);
    return plan;
  }
  flashmoe_status run(char* memory = workspace, void* stream = nullptr) const {
    return flashmoe_attention_backward(&params, memory, size_t{1} << 40, stream);
  }
  std::string refusal() const {
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(flashmoe_attention_backward_plan(&params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(run() == FLASHMOE_ERROR_UNSUPPORTED);
    return flashmoe_last_error();
  }
};

// What the launches of this thread got, in order.
struct Seen {
  fake::Launch launch;
  Params params;
};
thread_local std::vector<Seen> seen;

// The family's parameters are so many bytes.
template <size_t kBytes = sizeof(Params)>
void watch() {
  seen.clear();
  fake::maps.clear();
  fake::moves.clear();
  fake::on_launch = [](const void* params) {
    Seen one;
    one.launch = fake::last;
    std::memcpy(static_cast<void*>(&one.params), params, kBytes);
    seen.push_back(one);
  };
}

bool same(const Params& a, const Params& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

std::array<const CUtensorMap*, kMaps> maps_of(const Params& p) {
  return {&p.q, &p.k, &p.v, &p.dout, &p.dq, &p.dk, &p.dv};
}

template <class T>
int64_t offset(const T* part, const char* memory = workspace) {
  return reinterpret_cast<const char*>(part) - memory;
}

// ---- tests
// ---------------------------------------------------------------------------------------

void check_read_back(const flashmoe_plan& plan) {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK && count == plan.launch_count);
  for (int32_t i = 0; i < count; ++i) {
    launches[i].registers = launches[i].local_bytes = launches[i].binary_arch = 0;
    CHECK(std::memcmp(&launches[i], &plan.launches[i], sizeof launches[i]) == 0);
  }
}

void both_launches_are_planned() {
  const Call call;
  const flashmoe_plan plan = call.plan();
  CHECK(std::strcmp(plan.operation, "attention_backward") == 0);
  CHECK(std::strcmp(plan.family, "sm90") == 0 && std::strcmp(plan.isa, "sm_90a") == 0);
  CHECK(plan.launch_count == 2 && plan.microseconds > 0);
  const flashmoe_launch& prologue = plan.launches[0];
  CHECK(std::strcmp(prologue.kernel, "attention_backward_prologue_sm90_fp16_d64_dv64") == 0);
  CHECK(prologue.grid[0] == 2 * 6 * 9 * 2 && prologue.block[0] == 160 && prologue.tile_m == 40);
  CHECK(prologue.shared_bytes == fake::kStaticSharedBytes);
  const flashmoe_launch& main = plan.launches[1];
  CHECK(std::strcmp(main.kernel, "attention_backward_sm90_fp16_d64_dv64") == 0);
  CHECK(main.grid[0] == 2 * 2 * 9 && main.block[0] == 416);
  CHECK(main.shared_bytes == 200000 + fake::kStaticSharedBytes);
  CHECK(main.tile_m == 80 && main.tile_n == 112 && main.stages == 3);
  CHECK(main.dim == 64 && main.dim_v == 64);
  for (const flashmoe_launch& launch : {prologue, main}) {
    CHECK(launch.grid[1] == 1 && launch.grid[2] == 1 && launch.block[1] == 1);
  }
  // Persistent: no more blocks than multiprocessors.
  CHECK(Call({4, 700, 4000, 16, 16, 64, 64}).plan().launches[1].grid[0] == 132);

  watch();
  CHECK(call.run(workspace, fake::stream_of(0)) == FLASHMOE_OK);
  CHECK(seen.size() == 2);
  const void* const functions[] = {sm90_backward::kPrologue, sm90_backward::kMain};
  for (size_t i = 0; i < 2; ++i) {
    const fake::Launch& launch = seen[i].launch;
    const bool by_driver = fake::state.has_driver;
    CHECK(launch.by == (by_driver ? fake::By::kDriver : fake::By::kRuntime));
    CHECK(launch.kernel == (by_driver ? fake::handle_of(functions[i]) : functions[i]));
    CHECK(launch.grid.x == plan.launches[i].grid[0] && launch.block.x == plan.launches[i].block[0]);
    CHECK(launch.shared_bytes == plan.launches[i].shared_bytes - fake::kStaticSharedBytes);
    CHECK(launch.stream == fake::stream_of(0));
    CHECK(launch.programmatic == 1 && launch.cluster == 0);
  }
  CHECK(same(seen[0].params, seen[1].params));
  check_read_back(plan);
}

void a_kernel_may_be_named() {
  Call call;
  for (const char* name : {"sm90", "attention_backward_sm90_fp16_d64_dv64"}) {
    call.params.kernel = name;
    CHECK(std::strcmp(call.plan().family, "sm90") == 0);
  }
  call.params.kernel = "attention_backward_sm90_bf16_d64_dv64";
  CHECK(call.refusal().find("attention_backward_sm90_fp16_d64_dv64 serves this call, not "
                            "attention_backward_sm90_bf16_d64_dv64") != std::string::npos);
}

// The kernel of least padding, whose tiles and panels of dQ the launches and the workspace follow.
void head_dimensions_have_their_kernels() {
  const struct {
    int64_t dim, dim_v;
    int kernel_dim, kernel_dim_v, panels, cluster;
  } cases[] = {{128, 128, 128, 128, 1, 1}, {192, 128, 192, 128, 3, 1}, {136, 8, 192, 128, 3, 1},
               {192, 136, 192, 192, 6, 2}, {8, 136, 192, 192, 6, 2},   {200, 64, 256, 256, 2, 2},
               {256, 256, 256, 256, 2, 2}};
  for (const auto& each : cases) {
    const Call call({1, 300, 1000, 2, 2, each.dim, each.dim_v}, FLASHMOE_DTYPE_BFLOAT);
    watch();
    CHECK(call.run() == FLASHMOE_OK);
    const flashmoe_launch& main = call.plan().launches[1];
    CHECK(main.dim == each.kernel_dim && main.dim_v == each.kernel_dim_v);
    CHECK(main.tile_m == 64 && main.tile_n == 128);
    const Params& p = seen[1].params;
    CHECK(p.tiles_q == 5 && p.tiles_k == 8);
    CHECK(p.split.first == 2 * p.tiles_k && p.split.splits == 1);
    CHECK(main.grid[0] == static_cast<uint32_t>(2 * p.tiles_k * each.cluster));
    CHECK(main.cluster == (each.cluster > 1 ? each.cluster : 0));
    CHECK(offset(p.ticket) - offset(p.turns) >= 2 * 5 * each.panels * 4);
    CHECK(fake::maps[kK].box[1] == static_cast<cuuint32_t>(128 / each.cluster));
  }
}

// Splits of items take blocks and workspace. A kernel without room for their sums splits none.
void splits_have_blocks_and_sums() {
  for (const bool splits : {true, false}) {
    const int64_t dim = splits ? 128 : 64;
    const int64_t keys = splits ? 128 : 112;
    const Call call({1, 700, 17 * keys, 8, 8, dim, dim},
                    splits ? FLASHMOE_DTYPE_BFLOAT : FLASHMOE_DTYPE_FLOAT);
    watch();
    CHECK(call.run() == FLASHMOE_OK);
    const Params& p = seen[1].params;
    CHECK(p.split.first == (splits ? 132 : 136) && p.split.splits == (splits ? 4 : 1));
    CHECK(call.plan().launches[1].grid[0] == 132);
    const auto sums = static_cast<uint64_t>(splits ? 4 * 3 * 128 * 256 * 4 : 0);
    CHECK(call.plan().workspace_bytes >= static_cast<uint64_t>(offset(p.split_sums)) + sums);
  }
}

// Under a causal mask the last heads have up to two items for each block, and all ascend where
// fewer would descend, or where query heads share a KV head.
void the_last_heads_ascend() {
  const auto descending = [](int64_t heads, int64_t heads_per_kv, int64_t tiles_k, bool bounded) {
    const attention_backward::Bounded sides = {false, bounded};
    return attention_backward::order_of(heads, heads_per_kv, tiles_k, 1, sides).descending;
  };
  CHECK(descending(64, 1, 64, true) == 60);
  CHECK(descending(64, 1, 64, false) == 0);
  CHECK(descending(64, 2, 64, true) == 0);
  CHECK(descending(16, 1, 128, true) == 14);
  CHECK(descending(16, 1, 1024, true) == 15);
  CHECK(descending(512, 1, 4, true) == 446);
  CHECK(descending(8, 1, 64, true) == 4);
  CHECK(descending(7, 1, 64, true) == 0);
  CHECK(descending(1, 1, 1, true) == 0);
  CHECK(descending(2, 1, 0, true) == 0);
}

// Blocks that share an item count for one.
void the_last_heads_of_clusters_ascend() {
  Call call({40, 512, 512, 2, 2, 256, 256}, FLASHMOE_DTYPE_BFLOAT);
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  watch();
  CHECK(call.run() == FLASHMOE_OK);
  const Params& p = seen[1].params;
  CHECK(p.tiles_k == 4 && p.order.descending == 80 - 33 && p.order.ascending_group == 33);
  CHECK(call.plan().launches[1].grid[0] == 132);
}

// Groups are of one size, but for rounding.
void heads_of_a_group_alternate() {
  using attention_backward::order_of;
  constexpr int64_t kMiB = 1 << 20;
  constexpr attention_backward::Bounded kFull = {false, false};
  constexpr attention_backward::Bounded kCausal = {false, true};
  CHECK(order_of(0, 1, 8, kMiB, kFull).ascending_group == 1);
  CHECK(order_of(8, 1, 64, kMiB, kFull).ascending_group == 8);
  CHECK(order_of(9, 1, 64, kMiB, kFull).ascending_group == 5);
  CHECK(order_of(1024, 1, 4, kMiB, kFull).ascending_group == 64);
  CHECK(order_of(16, 4, 64, kMiB, kCausal).ascending_group == 4);
  CHECK(order_of(64, 1, 64, kMiB, kCausal).ascending_group == 4);
  CHECK(order_of(64, 1, 64, kMiB, kCausal).descending_group == 15);
  CHECK(order_of(64, 1, 64, 5 * kMiB, kCausal).descending_group == 3);
  CHECK(order_of(64, 1, 64, 64 * kMiB, kCausal).descending_group == 1);
}

// Where many query heads share a KV head, waves have an item for each block.
void items_run_in_waves() {
  using attention_backward::order_of;
  const auto is = [](const attention_backward::HeadOrder& order, int32_t group, int32_t tiles) {
    return order.descending == 0 && order.ascending_group == group && order.wave_tiles == tiles;
  };
  const attention_backward::Bounded causal = {false, true};
  CHECK(is(order_of(32, 8, 32, 1, causal, 8), 16, 8));
  CHECK(is(order_of(23, 16, 32, 1, causal, 8), 12, 11));
  CHECK(is(order_of(40, 8, 32, 1, causal, 8), 14, 9));
  CHECK(is(order_of(8, 8, 32, 1, causal, 8), 8, 16));
  CHECK(is(order_of(1, 8, 512, 1, causal, 8), 1, 132));
  CHECK(is(order_of(128, 8, 8, 1, causal, 8), 32, 4));
  CHECK(is(order_of(264, 8, 2, 1, causal, 8), 132, 1));
  CHECK(is(order_of(32, 8, 32, 1, causal, 8, 66), 8, 8));
  // One wave is none, nor is one that leaves blocks idle.
  CHECK(is(order_of(8, 8, 31, 1, causal, 8), 8, 0));
  CHECK(is(order_of(1, 16, 64, 1, causal, 8), 1, 0));
  CHECK(is(order_of(48, 8, 8, 1, causal, 8), 24, 0));
  CHECK(is(order_of(40, 8, 16, 1, causal, 8), 14, 0));
  CHECK(is(order_of(264, 8, 1, 1, causal, 8), 264, 0));
  CHECK(is(order_of(0, 8, 32, 1, causal, 8), 1, 0));
  // All others run the same way.
  CHECK(is(order_of(32, 7, 32, 1, causal, 8), 8, 0));
  CHECK(is(order_of(32, 8, 32, 1, causal, 0), 8, 0));
  CHECK(is(order_of(32, 8, 32, 1, {true, true}, 8), 8, 0));
  CHECK(is(order_of(32, 8, 32, 1, {false, false}, 8), 8, 0));
  CHECK(order_of(64, 1, 64, 1, causal, 8).wave_tiles == 0);
}

// Items behind the last full round of blocks are split, as far as that saves time.
void the_last_items_are_split() {
  using attention_backward::split_of;
  const auto is = [](attention_backward::SplitItems split, int64_t first, int64_t splits) {
    return split.first == first && split.splits == splits;
  };
  CHECK(is(split_of(4096, 128, 1, true), 4096, 1));
  CHECK(is(split_of(264, 128, 1, false), 264, 1));
  CHECK(is(split_of(4096, 128, 1, false), 4092, 4));
  CHECK(is(split_of(4096, 4, 1, false), 4092, 4));
  CHECK(is(split_of(2048, 256, 1, false), 1980, 3));
  CHECK(is(split_of(64, 32, 4, false), 64, 1));
  CHECK(is(split_of(196, 32, 4, false), 132, 2));
  CHECK(is(split_of(263, 128, 1, false), 263, 1));
  CHECK(is(split_of(196, 1, 1, false), 196, 1));
  CHECK(is(split_of(0, 1, 1, false), 0, 1));
}

void params_are_of_the_call() {
  Call call({2, 700, 1000, 6, 2, 48, 64});
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 100;
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  call.params.scale = 0.25f;
  call.strides[kV][0] = call.strides[kV][2] = 0;  // one v for all batches and heads
  watch();
  CHECK(call.run() == FLASHMOE_OK);
  const Params& p = seen[1].params;
  CHECK(p.batch == 2 && p.seq_q == 700 && p.seq_k == 1000 && p.heads_q == 6 && p.heads_kv == 2);
  CHECK(p.heads_per_kv == 3 && p.dim == 48 && p.dim_v == 64 && p.scale == 0.25f);
  CHECK(p.score.left_offset == 200 && p.score.right_offset == 300 && p.score.masked == 1);
  CHECK(p.tiles_q == 9 && p.tiles_k == 9 && p.order.descending == 0 &&
        p.order.ascending_group == 4);
  CHECK(p.v_repeats.batch == 0 && p.v_repeats.head == 0);
  for (const auto& repeats : {p.q_repeats, p.k_repeats, p.dout_repeats}) {
    CHECK(repeats.batch == 1 && repeats.head == 1);
  }
  CHECK(p.out_rows.data == call.tensors[kOut].data && p.dout_rows.data == call.tensors[kDout].data);
  CHECK(p.dq_rows.rows == call.tensors[kDq].data);
  CHECK(p.lse == call.tensors[kLse].data && p.dlse == call.tensors[kDlse].data);
  const RowStrides& of_dq = p.dq_rows.strides;
  CHECK(of_dq.batch == 700 * 6 * 48 && of_dq.seq == 6 * 48 && of_dq.head == 48);
  CHECK(p.out_rows.strides.seq == 6 * 64 && p.dout_rows.strides.head == 64);
  CHECK(p.lse_strides.batch == 6 * 700 && p.lse_strides.head == 700 && p.lse_strides.seq == 1);
  CHECK(p.dlse_strides.head == 700);

  CHECK(fake::maps.size() == kMaps);
  const int rows[] = {80, 112, 112, 80, 48, 48, 48};
  for (int i = 0; i < kMaps; ++i) {
    const fake::Map& map = fake::maps[static_cast<size_t>(i)];
    const cuuint32_t box_rows = static_cast<cuuint32_t>(rows[i]);
    CHECK(map.data == call.tensors[i].data && map.rank == 4);
    CHECK((map.box == std::array<cuuint32_t, 5>{32, box_rows, 1, 1, 0}));
    for (int axis = 0; axis < 4; ++axis) {
      constexpr int kAxes[] = {3, 1, 2, 0};  // of the tensor
      const bool one = i == kV && axis >= 2;
      CHECK(map.extents[static_cast<size_t>(axis)] ==
            static_cast<cuuint64_t>(one ? 1 : call.shapes[i][kAxes[axis]]));
    }
  }
}

// Whatever the size, they lie one behind the other, and grow with the rows.
void the_workspace_holds_its_parts() {
  for (const Size& size : {Size{}, Size{1, 1, 1, 1, 1, 8, 64}, Size{3, 0, 70, 4, 2, 64, 8},
                           Size{3, 129, 0, 4, 2, 64, 64}}) {
    const Call call(size);
    watch();
    CHECK(call.run() == FLASHMOE_OK);
    const Params& p = seen[0].params;
    const int64_t heads = size.batch * size.heads_q;
    const int64_t rows = heads * std::max<int64_t>(1, (size.seq_q + 79) / 80) * 80;
    const struct {
      int64_t begin, bytes;
    } parts[] = {{offset(p.row_lse), rows * 4},        {offset(p.row_delta), rows * 4},
                 {offset(p.turns), rows / 80 * 3 * 4}, {offset(p.ticket), 4},
                 {offset(p.split_turns), 132 * 4},     {offset(p.dq_sums), rows * 64 * 4}};
    int64_t end = 0;
    for (const auto& part : parts) {
      CHECK(part.begin >= end && part.begin % 16 == 0);
      end = part.begin + part.bytes;
    }
    CHECK(static_cast<int64_t>(call.plan().workspace_bytes) >= end);
  }
  const auto bytes = [](int64_t seq) {
    return Call({1, seq, seq, 8, 8, 64, 64}).plan().workspace_bytes;
  };
  CHECK(bytes(16000) <= 2 * bytes(8000) && bytes(16000) > bytes(8000));
  const Call call;
  const size_t needed = call.plan().workspace_bytes;
  CHECK(flashmoe_attention_backward(&call.params, workspace, needed - 1, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(flashmoe_attention_backward(&call.params, workspace, needed, nullptr) == FLASHMOE_OK);
}

// A gradient that is not wanted goes to one row in the workspace, beyond which stores leave out
// all.
void gradients_may_be_absent() {
  for (const int absent : {int{kDq}, int{kDk}, int{kDv}}) {
    Call call;
    const flashmoe_tensor** const members[] = {&call.params.dq, &call.params.dk, &call.params.dv};
    *members[absent - kDq] = nullptr;
    watch();
    for (char* memory : {workspace, other_workspace}) {
      CHECK(call.run(memory) == FLASHMOE_OK);
      const Params& p = seen.back().params;
      for (int i = 0; i < kMaps; ++i) {
        const void* const mapped = fake::mapped_by(*maps_of(p)[static_cast<size_t>(i)]);
        if (i != absent) {
          CHECK(mapped == call.tensors[i].data);
          continue;
        }
        const char* const row = static_cast<const char*>(mapped);
        CHECK(row >= reinterpret_cast<const char*>(p.ticket + 1) && offset(row, memory) % 16 == 0);
        CHECK(row + 64 * 2 <= reinterpret_cast<const char*>(p.dq_sums));
      }
      CHECK((p.dq_rows.rows == nullptr) == (absent == kDq));
    }
    CHECK((fake::maps[static_cast<size_t>(absent)].extents ==
           std::array<cuuint64_t, 5>{64, 1, 1, 1, 0}));
  }
  Call call;
  call.params.dlse = nullptr;
  watch();
  CHECK(call.run() == FLASHMOE_OK && seen[0].params.dlse == nullptr);
}

// What the copy engine cannot write has no map, and may have any strides.
void gradients_may_be_of_fp32_or_added_to() {
  for (const bool accumulate : {false, true}) {
    Call call;
    call.params.accumulate = accumulate ? 1 : 0;
    call.tensors[kDk].dtype.bits = 32;
    call.strides[kDk][0] = -call.strides[kDk][0];
    watch();
    CHECK(call.run() == FLASHMOE_OK);
    call.move(kDk);
    call.move(kDv);
    CHECK(call.run() == FLASHMOE_OK);
    const Params& p = seen.back().params;
    CHECK(p.accumulate == (accumulate ? 1 : 0));
    const sm90_backward::Direct* const directs[] = {&p.dq_direct, &p.dk_direct, &p.dv_direct};
    for (int i = 0; i < 3; ++i) {
      const sm90_backward::Direct& direct = *directs[i];
      const bool fp32 = i == kDk - kDq;
      const void* const data = call.tensors[kDq + i].data;
      const void* const mapped = fake::mapped_by(*maps_of(p)[static_cast<size_t>(kDq + i)]);
      if (accumulate || fp32) {
        CHECK(direct.rows == data && direct.fp32 == (fp32 ? 1 : 0) && mapped != data);
        CHECK(direct.strides.batch == call.strides[kDq + i][0]);
        CHECK(direct.strides.seq == call.strides[kDq + i][1] && direct.strides.head == 64);
      } else {
        CHECK(direct.rows == nullptr && mapped == data);
      }
    }
    CHECK(p.dq_rows.rows == call.tensors[kDq].data && p.dq_rows.fp32 == 0);
    CHECK(p.dk_rows.fp32 == 1);
  }
}

// A launch of its own, where they are wanted.
void dsinks_are_of_a_third_launch(const char* family) {
  Call call;
  call.params.kernel = family;
  uint16_t sinks[7] = {};
  float dsinks[12] = {};
  const auto tensor = [&](void* data, int bits, int64_t* shape, int64_t* stride) {
    flashmoe_tensor t = call.tensors[kQ];
    t.data = data;
    t.ndim = 1;
    t.shape = shape;
    t.strides = stride;
    t.dtype.bits = static_cast<uint8_t>(bits);
    return t;
  };
  int64_t six = 6, one = 1, two = 2;
  flashmoe_tensor given = tensor(sinks, 16, &six, &one);
  flashmoe_tensor wanted = tensor(dsinks, 32, &six, &two);
  call.params.sinks = &given;
  CHECK(call.plan().launch_count == 2);
  call.params.dsinks = &wanted;
  const flashmoe_plan plan = call.plan();
  CHECK(plan.launch_count == 3);
  const flashmoe_launch& launch = plan.launches[2];
  const std::string name = family == std::string("sm90") ? "behind_sm90" : "sinks_sm89";
  CHECK(launch.kernel == "attention_backward_" + name + "_fp16_d64_dv64");
  CHECK(launch.grid[0] == 6 && launch.block[0] == 192);
  CHECK(launch.shared_bytes == 640 + fake::kStaticSharedBytes);
  for (uint16_t* const moved : {sinks, sinks + 1}) {
    given.data = moved;
    watch<sizeof(CommonParams)>();
    CHECK(call.run() == FLASHMOE_OK && seen.size() == 3);
    CHECK(seen[2].launch.grid.x == 6 && seen[2].launch.block.x == 192);
    const CommonParams& p = seen[2].params;
    CHECK(p.score.sinks == moved && p.score.sink_stride == 1 && p.score.sinks_are_fp32 == 0);
    CHECK(p.dsinks == dsinks && p.dsink_stride == 2 && p.dsinks_are_fp32 == 1);
  }
}

// Behind the kernel of Hopper, in a call with bounds; blocks for dsinks come first. One that adds
// has marks of the rows that it leaves out in its workspace.
void calls_with_bounds_are_repaired() {
  Call call;
  CHECK(call.plan().launch_count == 2);
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  call.params.accumulate = 1;
  const flashmoe_plan adds = call.plan();
  CHECK(adds.launch_count == 3);
  call.params.accumulate = 0;
  const flashmoe_plan plan = call.plan();
  CHECK(adds.workspace_bytes > plan.workspace_bytes);
  CHECK(plan.launch_count == 3 && plan.launches[2].grid[0] == 5);
  CHECK(plan.launches[2].block[0] == 192);
  CHECK(std::strcmp(plan.launches[2].kernel, "attention_backward_behind_sm90_fp16_d64_dv64") == 0);
  watch();
  CHECK(call.run() == FLASHMOE_OK && seen.size() == 3 && seen[2].launch.grid.x == 5);
  uint16_t sinks[6] = {};
  flashmoe_tensor of_sinks = call.tensors[kQ];
  int64_t six = 6, one = 1;
  of_sinks.data = sinks;
  of_sinks.ndim = 1;
  of_sinks.shape = &six;
  of_sinks.strides = &one;
  call.params.sinks = &of_sinks;
  call.params.dsinks = &of_sinks;
  CHECK(call.plan().launch_count == 3 && call.plan().launches[2].grid[0] == 6 + 5);
  call.params.kernel = "sm89";
  CHECK(call.plan().launch_count == 3 && call.plan().launches[2].grid[0] == 6);
}

// Encodes nothing again, moves the maps whose addresses changed and no others, and its launches get
// the same parameters, byte for byte, as those of a call that is the first of its thread.
void a_call_at_other_addresses_moves_maps() {
  Call call;
  Params moved;
  std::thread([&] {
    watch();
    CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == kMaps && fake::moves.empty());
    CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == kMaps && fake::moves.empty());
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      call.move(tensor);
      watch();
      CHECK(call.run() == FLASHMOE_OK);
      const bool mapped = tensor < kMaps;
      const bool moves = fake::state.has_map_moves;
      CHECK(fake::moves.size() == (mapped && moves ? 1 : 0));
      CHECK(fake::maps.size() == static_cast<size_t>(mapped && !moves ? kMaps : 0));
      if (mapped && moves) CHECK(fake::moves[0].to == call.tensors[tensor].data);
    }
    for (int i = 0; i < kMaps; ++i) {
      CHECK(fake::mapped_by(*maps_of(seen[1].params)[static_cast<size_t>(i)]) ==
            call.tensors[i].data);
    }
    // Another workspace is not another call.
    watch();
    CHECK(call.run(other_workspace) == FLASHMOE_OK);
    CHECK(fake::maps.empty() && fake::moves.empty());
    CHECK(offset(seen[0].params.row_lse, other_workspace) == 0);
    moved = seen[1].params;
  }).join();
  std::thread([&] {
    watch();
    CHECK(call.run(other_workspace) == FLASHMOE_OK && same(seen[1].params, moved));
  }).join();
}

void no_map_is_of_another_call() {
  std::thread([] {
    Call call;
    watch();
    CHECK(call.run() == FLASHMOE_OK);
    fake::state.refuse_moves = true;
    fake::state.most_maps = 0;
    call.move(kDk);
    watch();
    for (int i = 0; i < 2; ++i) {
      CHECK(call.run() == FLASHMOE_ERROR_CUDA && seen.empty());
      CHECK(std::strstr(flashmoe_last_error(),
                        "launching attention_backward_sm90_fp16_d64_dv64: the driver refused a "
                        "tensor map") == flashmoe_last_error());
    }
    fake::state.most_maps = SIZE_MAX;
    fake::state.refuse_moves = false;
    CHECK(call.run() == FLASHMOE_OK);
    CHECK(fake::mapped_by(seen[1].params.dk) == call.tensors[kDk].data);
  }).join();
}

// Without keys dq is zeros, without queries dk and dv are: both launches are there for it.
void tensors_may_have_no_rows() {
  {
    Call call({2, 0, 1000, 6, 2, 64, 64});
    for (const int none : {kQ, kDout, kOut, kDq, kLse, kDlse}) call.tensors[none].data = nullptr;
    watch();
    CHECK(call.run() == FLASHMOE_OK && seen.size() == 2);
    CHECK(seen[0].launch.grid.x == 2 * 6 * 2 && seen[1].launch.grid.x == 2 * 2 * 9);
    CHECK(seen[0].params.tiles_q == 1 && seen[0].params.seq_q == 0);
    CHECK(fake::mapped_by(seen[1].params.q) == fake::mapped_by(seen[1].params.dq));
    CHECK(fake::mapped_by(seen[1].params.dk) == call.tensors[kDk].data);
  }
  {
    Call call({2, 700, 0, 6, 2, 64, 64});
    for (const int none : {kK, kV, kDk, kDv}) call.tensors[none].data = nullptr;
    watch();
    CHECK(call.run() == FLASHMOE_OK && seen.size() == 2);
    CHECK(seen[1].launch.grid.x == 1 && seen[1].params.tiles_k == 0);
    CHECK(fake::mapped_by(seen[1].params.q) == call.tensors[kQ].data);
  }
  for (const Size& size : {Size{0, 700, 1000, 6, 2, 64, 64}, Size{2, 0, 0, 6, 2, 64, 64}}) {
    const Call call(size);
    watch();
    CHECK(call.plan().launch_count == 2 && call.run() == FLASHMOE_OK && seen.empty());
  }
}

// Sinks of a batch of none have gradients, which are zeros: no launch is of no blocks, and none
// reads a row.
void sinks_of_no_batch_have_gradients(const char* family) {
  Call call({0, 700, 1000, 6, 2, 64, 64});
  for (flashmoe_tensor& tensor : call.tensors) tensor.data = nullptr;
  int64_t shape[] = {6};
  const flashmoe_tensor sinks = {reinterpret_cast<void*>(int64_t{1} << 20),
                                 {FLASHMOE_DEVICE_CUDA, 0},
                                 1,
                                 {FLASHMOE_DTYPE_FLOAT, 32, 1},
                                 shape,
                                 nullptr,
                                 0};
  flashmoe_tensor dsinks = sinks;
  dsinks.data = reinterpret_cast<void*>(int64_t{1} << 21);
  call.params.sinks = &sinks;
  call.params.dsinks = &dsinks;
  call.params.kernel = family;
  watch<sizeof(CommonParams)>();
  CHECK(call.run() == FLASHMOE_OK && seen.size() == 3);
  for (const Seen& each : seen) {
    CHECK(each.launch.grid.x > 0 && each.params.batch == 0 && each.params.seq_q == 0);
    CHECK(each.params.tiles_q == 1 && each.params.dsinks == dsinks.data);
  }
  CHECK(seen[1].launch.grid.x == 1 && seen[2].launch.grid.x == 6);
  // The prologue's blocks have a tile of the workspace.
  const int64_t lse = offset(seen[0].params.row_delta) - offset(seen[0].params.row_lse);
  CHECK(lse >= 4 * (std::strcmp(family, "sm90") == 0 ? 80 : 48));
}

void what_no_kernel_computes_is_refused() {
  const auto refuses = [](const Call& call, const char* sentence) {
    const std::string got = call.refusal();
    if (got.find(std::string("sm90: ") + sentence) == std::string::npos) {
      std::fprintf(stderr, "got: %s\n", got.c_str());
      CHECK(false);
    }
  };
  for (const int tensor : {kQ, kK, kV, kDout, kDq, kDk, kDv}) {
    for (const int64_t stride : {int64_t{-1048576}, int64_t{1} << 39}) {
      Call call;
      call.strides[tensor][0] = stride;
      refuses(call, "a stride that is negative, 2^40 bytes or more, or 0 along the sequence");
    }
  }
  Call backwards;  // which is read by rows
  backwards.strides[kOut][1] = -backwards.strides[kOut][1];
  CHECK(backwards.run() == FLASHMOE_OK);
  refuses(Call({1, (int64_t{1} << 30) + 1, 64, 1, 1, 64, 64}), "sequence longer than 2^30");
  refuses(Call({1 << 12, 1 << 20, 64, 64, 1, 64, 64}), "more than 2^30 tiles of rows or keys");
  Call capped;
  capped.params.softcap = 20.0f;
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_backward_plan(&capped.params, &plan) == FLASHMOE_ERROR_INTERNAL);
}

void models_are_planned_for_and_run_nothing() {
  fake::on_launch = [](const void*) { CHECK(false); };
  for (const int32_t model : {FLASHMOE_GPU_H100, FLASHMOE_GPU_H200, FLASHMOE_GPU_L4}) {
    const Call call({}, FLASHMOE_DTYPE_FLOAT, {FLASHMOE_DEVICE_GPU_MODEL, model});
    flashmoe_plan plan = flashmoe_plan_init();
    const bool hopper = model != FLASHMOE_GPU_L4;
    const flashmoe_status status = flashmoe_attention_backward_plan(&call.params, &plan);
    CHECK(status == (hopper ? FLASHMOE_OK : FLASHMOE_ERROR_UNSUPPORTED));
    if (!hopper) {
      CHECK(std::strstr(flashmoe_last_error(),
                        "sm90: l4 has compute capability 8.9, accepted is 9.0") != nullptr);
      continue;
    }
    CHECK(std::strcmp(plan.family, "sm90") == 0 && plan.launch_count == 2);
    CHECK(plan.workspace_bytes == Call().plan().workspace_bytes);
    CHECK(call.run() == FLASHMOE_ERROR_NO_DEVICE);
  }
}

// Microseconds on an H200 (docs/lab/attention_backward.md).
struct Measured {
  Size size;
  bool causal;
  int64_t window_left;  // 0: none
  double microseconds;
};

constexpr Measured kMeasuredSm90[] = {
    {{32, 512, 512, 16, 16, 128, 128}, false, 0, 434},
    {{32, 512, 512, 16, 16, 128, 128}, true, 0, 322},
    {{16, 1024, 1024, 16, 16, 128, 128}, false, 0, 750},
    {{16, 1024, 1024, 16, 16, 128, 128}, true, 0, 480},
    {{8, 2048, 2048, 16, 16, 128, 128}, false, 0, 1354},
    {{8, 2048, 2048, 16, 16, 128, 128}, true, 0, 777},
    {{4, 4096, 4096, 16, 16, 128, 128}, false, 0, 2612},
    {{4, 4096, 4096, 16, 16, 128, 128}, true, 0, 1412},
    {{2, 8192, 8192, 16, 16, 128, 128}, false, 0, 4942},
    {{2, 8192, 8192, 16, 16, 128, 128}, true, 0, 2622},
    {{1, 16384, 16384, 16, 16, 128, 128}, false, 0, 9983},
    {{1, 16384, 16384, 16, 16, 128, 128}, true, 0, 5129},
    {{32, 512, 512, 32, 32, 64, 64}, false, 0, 480},
    {{32, 512, 512, 32, 32, 64, 64}, true, 0, 363},
    {{16, 1024, 1024, 32, 32, 64, 64}, false, 0, 866},
    {{16, 1024, 1024, 32, 32, 64, 64}, true, 0, 576},
    {{8, 2048, 2048, 32, 32, 64, 64}, false, 0, 1597},
    {{8, 2048, 2048, 32, 32, 64, 64}, true, 0, 954},
    {{4, 4096, 4096, 32, 32, 64, 64}, false, 0, 3056},
    {{4, 4096, 4096, 32, 32, 64, 64}, true, 0, 1745},
    {{2, 8192, 8192, 32, 32, 64, 64}, false, 0, 6106},
    {{2, 8192, 8192, 32, 32, 64, 64}, true, 0, 3278},
    {{1, 16384, 16384, 32, 32, 64, 64}, false, 0, 12000},
    {{1, 16384, 16384, 32, 32, 64, 64}, true, 0, 6297},
    {{2, 8192, 8192, 16, 16, 128, 128}, true, 1023, 745},
    {{2, 4096, 4096, 16, 16, 192, 128}, true, 0, 920},
    {{2, 4096, 4096, 16, 16, 192, 192}, false, 0, 3035},
    {{2, 4096, 4096, 16, 16, 192, 192}, true, 0, 1502},
    {{32, 512, 512, 8, 8, 256, 256}, false, 0, 493},
    {{32, 512, 512, 8, 8, 256, 256}, true, 0, 354},
    {{8, 2048, 2048, 8, 8, 256, 256}, false, 0, 1373},
    {{8, 2048, 2048, 8, 8, 256, 256}, true, 0, 771},
    {{2, 8192, 8192, 8, 8, 256, 256}, false, 0, 5200},
    {{2, 8192, 8192, 8, 8, 256, 256}, true, 0, 2470},
    {{1, 16384, 16384, 8, 8, 256, 256}, true, 0, 4793},
    {{2, 4096, 4096, 32, 8, 256, 256}, true, 0, 2754},
};

// docs/lab/attention_backward_sm89.md
constexpr Measured kMeasuredSm89[] = {
    {{32, 512, 512, 32, 32, 64, 64}, false, 0, 854},
    {{32, 512, 512, 32, 32, 64, 64}, true, 0, 623},
    {{8, 2048, 2048, 32, 32, 64, 64}, false, 0, 2752},
    {{8, 2048, 2048, 32, 32, 64, 64}, true, 0, 1539},
    {{2, 8192, 8192, 32, 32, 64, 64}, false, 0, 10349},
    {{2, 8192, 8192, 32, 32, 64, 64}, true, 0, 5225},
    {{32, 512, 512, 16, 16, 128, 128}, false, 0, 789},
    {{32, 512, 512, 16, 16, 128, 128}, true, 0, 560},
    {{8, 2048, 2048, 16, 16, 128, 128}, false, 0, 2549},
    {{8, 2048, 2048, 16, 16, 128, 128}, true, 0, 1393},
    {{2, 8192, 8192, 16, 16, 128, 128}, false, 0, 9558},
    {{2, 8192, 8192, 16, 16, 128, 128}, true, 0, 4767},
    {{32, 512, 512, 8, 8, 256, 256}, false, 0, 916},
    {{32, 512, 512, 8, 8, 256, 256}, true, 0, 577},
    {{8, 2048, 2048, 8, 8, 256, 256}, false, 0, 2997},
    {{8, 2048, 2048, 8, 8, 256, 256}, true, 0, 1571},
    {{2, 8192, 8192, 8, 8, 256, 256}, false, 0, 11471},
    {{2, 8192, 8192, 8, 8, 256, 256}, true, 0, 5593},
};

// Each within `each` times, and all of them in the mean within `mean`.
template <size_t kCells>
void estimates_are_near(const Measured (&measured)[kCells], const char* family, double each,
                        double mean) {
  double logarithms = 0;
  for (const Measured& m : measured) {
    Call call(m.size, FLASHMOE_DTYPE_BFLOAT,
              {FLASHMOE_DEVICE_GPU_MODEL, int32_t{FLASHMOE_GPU_H200}});
    call.params.kernel = family;
    if (m.causal) call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
    if (m.window_left != 0) {
      call.params.window = FLASHMOE_WINDOW_LEFT;
      call.params.window_left = m.window_left;
    }
    const double ratio = call.plan().microseconds / m.microseconds;
    if (ratio < 1 / each || ratio > each) {
      std::fprintf(stderr, "%s b%d s%d d%d causal %d: %.3f\n", family,
                   static_cast<int>(m.size.batch), static_cast<int>(m.size.seq_q),
                   static_cast<int>(m.size.dim), m.causal, ratio);
      CHECK(false);
    }
    logarithms += std::log(ratio);
  }
  CHECK(std::abs(logarithms / static_cast<double>(kCells)) < std::log(mean));
}

// ---- sm_89 --------------------------------------------------------------------------------------

// By the family sm89; on the GPU, a Hopper, or a model.
struct Sm89Call : Call {
  explicit Sm89Call(const Size& size_ = {}, uint8_t dtype = FLASHMOE_DTYPE_FLOAT,
                    flashmoe_device device = {FLASHMOE_DEVICE_CUDA, 0})
      : Call(size_, dtype, device) {
    params.kernel = "sm89";
  }
};
constexpr flashmoe_device kH200 = {FLASHMOE_DEVICE_GPU_MODEL, int32_t{FLASHMOE_GPU_H200}};
constexpr flashmoe_device kL4 = {FLASHMOE_DEVICE_GPU_MODEL, int32_t{FLASHMOE_GPU_L4}};
constexpr size_t kSm89Bytes = sizeof(CommonParams);

void sm89_plans_a_block_for_each_multiprocessor() {
  const Sm89Call call;
  const flashmoe_plan plan = call.plan();
  CHECK(std::strcmp(plan.family, "sm89") == 0 && std::strncmp(plan.isa, "sm_", 3) == 0);
  CHECK(plan.launch_count == 2 && plan.microseconds > 0);
  const flashmoe_launch& prologue = plan.launches[0];
  CHECK(std::strcmp(prologue.kernel, "attention_backward_prologue_sm89_fp16_d64_dv64") == 0);
  CHECK(prologue.grid[0] == 2 * 6 * 15 * 2 && prologue.block[0] == 160 && prologue.tile_m == 24);
  const flashmoe_launch& main = plan.launches[1];
  CHECK(std::strcmp(main.kernel, "attention_backward_sm89_fp16_d64_dv64") == 0);
  CHECK(main.grid[0] == 2 * 2 * 11 && main.block[0] == 224);
  CHECK(main.shared_bytes == 190000 + fake::kStaticSharedBytes);
  CHECK(main.tile_m == 48 && main.tile_n == 96 && main.stages == 3);
  CHECK(Sm89Call({4, 700, 4000, 16, 16, 64, 64}).plan().launches[1].grid[0] == 132);

  watch<kSm89Bytes>();
  CHECK(call.run(workspace, fake::stream_of(0)) == FLASHMOE_OK);
  CHECK(seen.size() == 2 && fake::maps.empty());
  const void* const functions[] = {sm89_backward::kPrologue, sm89_backward::kMain};
  for (size_t i = 0; i < 2; ++i) {
    const fake::Launch& launch = seen[i].launch;
    CHECK(launch.kernel == (fake::state.has_driver ? fake::handle_of(functions[i]) : functions[i]));
    CHECK(launch.grid.x == plan.launches[i].grid[0] && launch.block.x == plan.launches[i].block[0]);
    CHECK(launch.stream == fake::stream_of(0));
  }
  CHECK(std::memcmp(&seen[0].params, &seen[1].params, kSm89Bytes) == 0);
  check_read_back(plan);
}

// One of 100 KiB has those that are made for it.
void sm89_takes_the_kernel_that_fits_the_multiprocessor() {
  const auto main_of = [](const Call& call) {
    return std::string(call.plan().launches[1].kernel + std::strlen("attention_backward_sm89_"));
  };
  CHECK(main_of(Sm89Call({}, FLASHMOE_DTYPE_FLOAT, kL4)) == "fp16_d64_dv64_ada");
  CHECK(Sm89Call({4, 700, 4000, 16, 16, 64, 64}, FLASHMOE_DTYPE_FLOAT, kL4)
            .plan()
            .launches[1]
            .grid[0] == 58);
  const Size wide = {1, 300, 300, 2, 2, 256, 136};
  CHECK(main_of(Sm89Call(wide, FLASHMOE_DTYPE_BFLOAT)) == "bf16_d256_dv256");
  CHECK(main_of(Sm89Call(wide, FLASHMOE_DTYPE_BFLOAT, kL4)) == "bf16_d256_dv256_ada");
  Sm89Call named({}, FLASHMOE_DTYPE_FLOAT, kH200);
  named.params.kernel = "attention_backward_sm89_fp16_d64_dv64_ada";
  CHECK(main_of(named) == "fp16_d64_dv64_ada");
  // One that a model's multiprocessor has no room for.
  Sm89Call big({1, 64, 64, 1, 1, 128, 128}, FLASHMOE_DTYPE_BFLOAT, kL4);
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_backward_plan(&big.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(),
                    "sm89: attention_backward_sm89_bf16_d128_dv128 takes 220000 bytes of shared "
                    "memory, a multiprocessor of l4 has 102400") != nullptr);
}

void sm89_gets_rows_and_strides() {
  Sm89Call call({2, 700, 1000, 6, 2, 48, 64});
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 100;
  call.params.scale = 0.25f;
  call.params.accumulate = 1;
  call.tensors[kDk].dtype.bits = 32;
  call.strides[kDk][0] = -call.strides[kDk][0];
  call.strides[kV][0] = call.strides[kV][2] = 0;  // one v for all batches and heads
  watch<kSm89Bytes>();
  CHECK(call.run() == FLASHMOE_OK);
  for (int tensor = 0; tensor < kTensors; ++tensor) call.move(tensor);
  CHECK(call.run(other_workspace) == FLASHMOE_OK && seen.size() == 4);
  const CommonParams& p = seen[3].params;
  CHECK(p.batch == 2 && p.seq_q == 700 && p.seq_k == 1000 && p.heads_q == 6 && p.heads_kv == 2);
  CHECK(p.heads_per_kv == 3 && p.dim == 48 && p.dim_v == 64 && p.scale == 0.25f);
  CHECK(p.tiles_q == 15 && p.tiles_k == 11 && p.score.masked == 1 && p.accumulate == 1);
  const attention_backward::Rows* const rows[] = {&p.q_rows, &p.k_rows, &p.v_rows, &p.dout_rows,
                                                  &p.out_rows};
  const int of_rows[] = {kQ, kK, kV, kDout, kOut};
  for (int i = 0; i < 5; ++i) {
    CHECK(rows[i]->data == call.tensors[of_rows[i]].data);
    CHECK(rows[i]->strides.batch == call.strides[of_rows[i]][0]);
    CHECK(rows[i]->strides.seq == call.strides[of_rows[i]][1]);
    CHECK(rows[i]->strides.head == call.strides[of_rows[i]][2]);
  }
  const attention_backward::Gradient* const gradients[] = {&p.dq_rows, &p.dk_rows, &p.dv_rows};
  for (int i = 0; i < 3; ++i) {
    CHECK(gradients[i]->rows == call.tensors[kDq + i].data);
    CHECK(gradients[i]->strides.batch == call.strides[kDq + i][0]);
    CHECK(gradients[i]->fp32 == (kDq + i == kDk ? 1 : 0));
  }
  CHECK(p.lse == call.tensors[kLse].data && p.dlse == call.tensors[kDlse].data);
  CHECK(offset(p.row_lse, other_workspace) == 0);
  call.params.dq = nullptr;
  call.params.dlse = nullptr;
  CHECK(call.run() == FLASHMOE_OK);
  CHECK(seen.back().params.dq_rows.rows == nullptr && seen.back().params.dlse == nullptr);
}

void sm89_workspace_holds_its_parts() {
  for (const Size& size : {Size{}, Size{1, 1, 1, 1, 1, 8, 64}, Size{3, 0, 70, 4, 2, 64, 8}}) {
    const Sm89Call call(size);
    watch<kSm89Bytes>();
    CHECK(call.run() == FLASHMOE_OK);
    const CommonParams& p = seen[0].params;
    const int64_t rows =
        size.batch * size.heads_q * std::max<int64_t>(1, (size.seq_q + 47) / 48) * 48;
    const int64_t sums = offset(p.dq_sums);
    CHECK(offset(p.row_delta) >= rows * 4 && offset(p.turns) >= offset(p.row_delta) + rows * 4);
    CHECK(offset(p.ticket) >= offset(p.turns) + rows / 48 * 4 && sums >= offset(p.ticket) + 4);
    CHECK(sums % 16 == 0);
    CHECK(static_cast<int64_t>(call.plan().workspace_bytes) >= sums + rows * 64 * 4);
  }
}

// The family sm90 where it serves a call, since it is faster; else sm89.
void the_faster_family_serves() {
  const auto family_of = [](const Size& size, flashmoe_device device, bool flipped) {
    Call call(size, FLASHMOE_DTYPE_BFLOAT, device);
    if (flipped) call.strides[kQ][1] = -call.strides[kQ][1];
    call.params.kernel = nullptr;
    return std::string(call.plan().family);
  };
  for (const Size& size :
       {Size{1, 2, 1, 1, 1, 64, 64}, Size{2, 300, 4000, 8, 2, 64, 64},
        Size{1, 128, 128, 1, 1, 128, 128}, Size{2, 8192, 8192, 16, 16, 128, 128}}) {
    CHECK(family_of(size, kH200, false) == "sm90");
    CHECK(family_of(size, kH200, true) == "sm89");  // the copy engine walks no such rows
    CHECK(family_of(Size{1, 300, 300, 2, 2, 200, 200}, kL4, false) == "sm89");
  }
  CHECK(family_of(Size{1, 300, 300, 2, 2, 64, 64}, {FLASHMOE_DEVICE_CUDA, 0}, true) == "sm89");
}

void sm89_refuses_what_it_cannot_compute() {
  const std::string all = Sm89Call({1, (int64_t{1} << 30) + 1, 64, 1, 1, 64, 64}).refusal();
  CHECK(all.find("sm89: sequence longer than 2^30") != std::string::npos);
  CHECK(Sm89Call({1 << 12, 1 << 20, 64, 64, 1, 64, 64})
            .refusal()
            .find("sm89: more than 2^30 tiles of rows or keys") != std::string::npos);
}

// ---- sequences ----------------------------------------------------------------------------------

// Three of them, packed one behind the other, or in padded rows; or others.
struct RaggedCall : Call {
  int64_t offsets_shape[1] = {4}, lengths_shape[1] = {3}, step[1] = {1};
  flashmoe_tensor offsets, lengths;
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();

  explicit RaggedCall(const char* family, bool packed = true)
      : RaggedCall(family, packed, {packed ? 1 : 3, 700, 1000, 6, 2, 64, 64}) {}
  RaggedCall(const char* family, bool packed, const Size& rows) : Call(rows) {
    if (!packed) lengths_shape[0] = rows.batch;
    offsets = {reinterpret_cast<void*>(int64_t{1} << 20),
               {FLASHMOE_DEVICE_CUDA, 0},
               1,
               {FLASHMOE_DTYPE_INT, 32, 1},
               offsets_shape,
               step,
               0};
    lengths = offsets;
    lengths.shape = lengths_shape;
    params.kernel = family;
    params.sequences = &sequences;
    if (packed) {
      sequences.cu_seqlens_q = sequences.cu_seqlens_k = &offsets;
    } else {
      sequences.seqused_q = sequences.seqused_k = &lengths;
    }
  }
};

template <class AnyParams>
thread_local std::vector<AnyParams> seen_ragged;

template <class AnyParams>
void watch_ragged() {
  watch();
  seen_ragged<AnyParams>.clear();
  fake::on_launch = [](const void* params) {
    AnyParams one;
    std::memcpy(static_cast<void*>(&one), params, sizeof one);
    seen_ragged<AnyParams>.push_back(one);
  };
}

void sequences_are_planned_by_what_the_host_knows() {
  const flashmoe_plan plan = RaggedCall("sm89").plan();
  CHECK(plan.launch_count == 3 && plan.flops == 0 && plan.microseconds > 0);
  CHECK(std::strcmp(plan.launches[0].kernel, "attention_backward_tables") == 0);
  CHECK(plan.launches[0].grid[0] == 1 && plan.launches[0].block[0] == 1024);
  CHECK(plan.launches[0].shared_bytes == 4096 + fake::kStaticSharedBytes);
  // 700 / 48 + 3 tiles, two blocks each, of 6 heads; chunks of 256 rows of q and of k; 26 items.
  CHECK(plan.launches[1].grid[0] == 17 * 6 * 2 + 3 + 4 + 1);
  CHECK(std::strcmp(plan.launches[2].kernel, "attention_backward_sm89_fp16_d64_dv64_ragged") == 0);
  CHECK(plan.launches[2].grid[0] == (1000 / 96 + 3) * 2);
  // In padded rows each sequence may have all that there is room for, or what the bounds say.
  RaggedCall padded("sm89", false);
  CHECK(padded.plan().launches[1].grid[0] == 3 * 15 * 6 * 2 + 3 * 3 + 3 * 4 + 1);
  CHECK(padded.plan().launches[2].grid[0] == 3 * 11 * 2);
  padded.sequences.max_seqlen_q = 100;
  padded.sequences.max_seqlen_k = 90;
  CHECK(padded.plan().launches[1].grid[0] == 3 * 3 * 6 * 2 + 3 * 3 + 3 * 4 + 1);
  CHECK(padded.plan().launches[2].grid[0] == 3 * 2);
  // What is added to is not set to 0.
  padded.params.accumulate = 1;
  CHECK(padded.plan().launches[1].grid[0] == 3 * 3 * 6 * 2 + 1);
  // Dense calls keep their kernels, and the other way round.
  CHECK(std::strcmp(Sm89Call().plan().launches[1].kernel,
                    "attention_backward_sm89_fp16_d64_dv64") == 0);
  RaggedCall named("attention_backward_sm89_fp16_d64_dv64");
  CHECK(named.refusal().find("_ragged serves this call") != std::string::npos);
  // No kernel reads a mask beside sequences.
  int64_t one[] = {1, 1, 1, 1};
  const flashmoe_tensor mask = {reinterpret_cast<void*>(int64_t{60} << 40),
                                {FLASHMOE_DEVICE_CUDA, 0},
                                4,
                                {FLASHMOE_DTYPE_UINT, 8, 1},
                                one,
                                nullptr,
                                0};
  RaggedCall masked("sm89");
  masked.params.attn_mask = &mask;
  using attention_backward::RaggedBiasedParams;
  watch_ragged<RaggedBiasedParams>();
  CHECK(masked.run() == FLASHMOE_OK && seen_ragged<RaggedBiasedParams>.size() == 3);
  CHECK(std::strcmp(masked.plan().launches[2].kernel,
                    "attention_backward_sm89_fp16_d64_dv64_ragged_biased") == 0);
  const RaggedBiasedParams& p = seen_ragged<RaggedBiasedParams>[2];
  CHECK(p.pairs.mask.data == mask.data && p.score.masked == 1 && p.numbers_sequences == 1);
  CHECK(p.q_rows.strides.batch == 0 && p.dq_rows.strides.batch == 0 && p.lse_strides.batch == 0);
  masked.params.kernel = "sm90";
  CHECK(masked.refusal().find("attn_mask, which its kernels do not read") != std::string::npos);
  // Calls with bounds have a repair by the family that has one.
  RaggedCall bounded("sm90");
  CHECK(bounded.plan().launch_count == 3);
  bounded.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  CHECK(bounded.plan().launch_count == 4 && bounded.plan().launches[3].grid[0] == 5);
  bounded.params.kernel = "sm89";
  CHECK(bounded.plan().launch_count == 3);
}

// The prologue's blocks of tiles, chunks and items are those of one grid.
void blocks_of_the_prologue_fit_a_grid() {
  const int64_t sequences = 1 << 20;
  RaggedCall call("sm89", false, {sequences, 512 * 48, 927 * 256, 1, 1, 64, 64});
  call.sequences.max_seqlen_k = 96;
  CHECK(call.plan().launches[1].grid[0] ==
        sequences * 512 * 2 + sequences * (96 + 927) + (sequences + 159) / 160);
  RaggedCall more("sm89", false, {sequences, 512 * 48, 928 * 256, 1, 1, 64, 64});
  more.sequences.max_seqlen_k = 96;
  CHECK(more.refusal().find("sm89: more than 2^31 - 1 tiles of rows and chunks of gradients") !=
        std::string::npos);
}

void sums_are_of_sequences_of_several_tiles() {
  RaggedCall call("sm89");
  using attention_backward::RaggedParams;
  watch_ragged<RaggedParams>();
  CHECK(call.run() == FLASHMOE_OK && seen_ragged<RaggedParams>.size() == 3);
  const RaggedParams& p = seen_ragged<RaggedParams>[0];
  CHECK(p.batch == 1 && p.tiles_q == 17 && p.most_tiles_k == 13 && p.sum_tiles == 17);
  CHECK(p.sequences.count == 3 && p.sequences.rows_q == 700 && p.sequences.room_k == 1000);
  CHECK(p.sequences.cu_seqlens_q.data == call.offsets.data);
  CHECK(p.chunks_q == 3 && p.chunks_k == 4 && p.prologue_blocks == 17 * 6 * 2);
  CHECK(p.tile_q == 48 && p.tile_k == 96 && p.at_a_time == 132);
  // Parts of the workspace follow one another.
  const int64_t sums = offset(p.dq_sums);
  CHECK(offset(p.row_delta) >= 17 * 6 * 48 * 4 && offset(p.items) >= offset(p.totals) + 16);
  CHECK(sums >= offset(p.items) + 26 * 64 && sums % 128 == 0);
  CHECK(call.plan().workspace_bytes ==
        static_cast<uint64_t>(sums) + uint64_t{17} * 6 * 48 * 64 * 4);
  // Keys of one tile alone need none.
  call.sequences.max_seqlen_k = 96;
  watch_ragged<RaggedParams>();
  CHECK(call.run() == FLASHMOE_OK && seen_ragged<RaggedParams>[0].sum_tiles == 0);
  // Tables at other addresses.
  call.offsets.data = static_cast<char*>(call.offsets.data) + 4096;
  watch_ragged<RaggedParams>();
  CHECK(call.run() == FLASHMOE_OK);
  CHECK(seen_ragged<RaggedParams>[2].sequences.cu_seqlens_k.data == call.offsets.data);
}

void ragged_maps_count_rows_of_the_batch() {
  RaggedCall call("sm90", false);
  using sm90_backward::RaggedParams;
  watch_ragged<RaggedParams>();
  CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == kMaps);
  const RaggedParams& p = seen_ragged<RaggedParams>[2];
  CHECK(p.q_rows_per_batch == 700 && p.dout_rows_per_batch == 700 && p.dq_rows_per_batch == 700);
  CHECK(p.k_rows_per_batch == 1000 && p.v_rows_per_batch == 1000);
  CHECK(p.dk_rows_per_batch == 1000 && p.dv_rows_per_batch == 1000);
  // Rows of a batch that are no multiple of a row apart.
  RaggedCall odd("sm90", false);
  odd.strides[kK][0] += 8;
  CHECK(odd.refusal().find("sm90: k has sequences with a stride of") != std::string::npos);
  odd.params.kernel = "sm89";
  CHECK(std::strcmp(odd.plan().family, "sm89") == 0);
  // Views of one row, as a mean over a sequence has for its gradient.
  for (const int tensor : {kQ, kK, kV, kDout}) {
    RaggedCall repeated("sm90", false);
    repeated.strides[tensor][1] = 0;
    CHECK(repeated.refusal().find("0 along the sequence") != std::string::npos);
    repeated.params.kernel = nullptr;
    CHECK(std::strcmp(repeated.plan().family, "sm89") == 0 && repeated.run() == FLASHMOE_OK);
  }
  // Written by consumers, gradients may lie so.
  RaggedCall added("sm90", false);
  added.strides[kDk][0] += 8;
  CHECK(added.refusal().find("sm90: dk has sequences") != std::string::npos);
  added.params.accumulate = 1;
  CHECK(std::strcmp(added.plan().family, "sm90") == 0);
}

void sequences_have_head_dimensions_of_their_own() {
  RaggedCall call("sm90");
  for (int tensor : {kQ, kK, kDq, kDk}) call.shapes[tensor][3] = 48;
  CHECK(call.plan().launch_count == 3);
  for (int tensor : {kQ, kK, kDq, kDk}) {
    call.shapes[tensor][3] = 72;
    call.strides[tensor][2] = 72;
    call.strides[tensor][1] = 72 * call.shapes[tensor][2];
  }
  CHECK(
      call.refusal().find("sm90: head dimensions 72 and 64, accepted are up to 64 of sequences") !=
      std::string::npos);
}

// ---- the number of multiprocessors --------------------------------------------------------------

// What a call's launches get on the device of that number: 0 has 132 multiprocessors, 1 has 10.
struct OnDevice {
  flashmoe_plan plan;
  std::vector<attention_backward::RaggedParams> params;  // of dense calls CommonParams alone
};
OnDevice on_device(Call& call, int device, size_t bytes, flashmoe_tensor* offsets = nullptr) {
  for (flashmoe_tensor& tensor : call.tensors) tensor.device.device_id = device;
  if (offsets != nullptr) offsets->device.device_id = device;
  static thread_local size_t params_bytes;
  params_bytes = bytes;
  watch_ragged<attention_backward::RaggedParams>();
  fake::on_launch = [](const void* params) {
    attention_backward::RaggedParams one;
    std::memset(static_cast<void*>(&one), 0, sizeof one);
    std::memcpy(static_cast<void*>(&one), params, params_bytes);
    seen_ragged<attention_backward::RaggedParams>.push_back(one);
  };
  CHECK(call.run(workspace, fake::stream_of(device)) == FLASHMOE_OK);
  return {call.plan(), seen_ragged<attention_backward::RaggedParams>};
}

// Fewer blocks take the same items by the same tickets, so that sums have one order: nothing but
// grids differs. Returns whether even they are equal.
bool check_devices(Call& call, size_t bytes, flashmoe_tensor* offsets = nullptr) {
  const OnDevice large = on_device(call, 0, bytes, offsets);
  const OnDevice small = on_device(call, 1, bytes, offsets);
  CHECK(large.params.size() == small.params.size() && large.params.size() >= 2);
  for (size_t i = 0; i < large.params.size(); ++i) {
    CHECK(std::memcmp(&large.params[i], &small.params[i], bytes) == 0);
  }
  CHECK(large.plan.workspace_bytes == small.plan.workspace_bytes);
  bool same_grids = true;
  for (int i = 0; i < large.plan.launch_count; ++i) {
    const flashmoe_launch& a = large.plan.launches[i];
    const flashmoe_launch& b = small.plan.launches[i];
    CHECK(std::strcmp(a.kernel, b.kernel) == 0 && a.tile_m == b.tile_m && a.tile_n == b.tile_n);
    CHECK(a.cluster == b.cluster && a.grid[0] >= b.grid[0]);
    same_grids = same_grids && a.grid[0] == b.grid[0];
  }
  return same_grids;
}

void bits_do_not_depend_on_multiprocessors() {
  const Size sizes[] = {
      {1, 128, 128, 1, 1, 64, 64},     {4, 700, 4000, 16, 16, 64, 64},
      {2, 4096, 4096, 32, 8, 64, 64},  {1, 16384, 16384, 16, 16, 128, 128},
      {3, 2048, 2048, 16, 16, 64, 64}, {40, 512, 512, 2, 2, 256, 256},
  };
  int different = 0;
  bool descends = false, splits = false;
  for (const char* family : {"sm90", "sm89"}) {
    for (const Size& size : sizes) {
      for (const auto causal : {FLASHMOE_CAUSAL_NONE, FLASHMOE_CAUSAL_BOTTOM_RIGHT}) {
        Call call(size, FLASHMOE_DTYPE_BFLOAT);
        call.params.kernel = family;
        call.params.causal = causal;
        different += check_devices(call, sizeof(CommonParams)) ? 0 : 1;
        const CommonParams& p = seen_ragged<attention_backward::RaggedParams>[1];
        descends = descends || p.order.descending > 0;
        splits = splits || p.split.splits > 1;
      }
    }
    RaggedCall packed(family);
    different +=
        check_devices(packed, sizeof(attention_backward::RaggedParams), &packed.offsets) ? 0 : 1;
  }
  CHECK(different == 2 * (2 * 5 + 1) && descends && splits);  // all but those of one item
}

}  // namespace
}  // namespace flashmoe

int main(int argc, char** argv) {
  using namespace flashmoe;
  const std::string without = argc > 1 ? argv[1] : "";
  fake::state.has_driver = without != "no-driver";
  fake::state.has_map_moves = without != "no-map-moves";
  both_launches_are_planned();
  a_kernel_may_be_named();
  splits_have_blocks_and_sums();
  head_dimensions_have_their_kernels();
  the_last_heads_ascend();
  the_last_heads_of_clusters_ascend();
  heads_of_a_group_alternate();
  items_run_in_waves();
  the_last_items_are_split();
  params_are_of_the_call();
  the_workspace_holds_its_parts();
  gradients_may_be_absent();
  gradients_may_be_of_fp32_or_added_to();
  for (const char* family : {"sm90", "sm89"}) dsinks_are_of_a_third_launch(family);
  calls_with_bounds_are_repaired();
  a_call_at_other_addresses_moves_maps();
  no_map_is_of_another_call();
  tensors_may_have_no_rows();
  for (const char* family : {"sm90", "sm89"}) sinks_of_no_batch_have_gradients(family);
  what_no_kernel_computes_is_refused();
  models_are_planned_for_and_run_nothing();
  estimates_are_near(kMeasuredSm90, "sm90", 1.7, 1.1);
  estimates_are_near(kMeasuredSm89, "sm89", 1.15, 1.05);
  sm89_plans_a_block_for_each_multiprocessor();
  sm89_takes_the_kernel_that_fits_the_multiprocessor();
  sm89_gets_rows_and_strides();
  sm89_workspace_holds_its_parts();
  the_faster_family_serves();
  sm89_refuses_what_it_cannot_compute();
  sequences_are_planned_by_what_the_host_knows();
  blocks_of_the_prologue_fit_a_grid();
  sums_are_of_sequences_of_several_tiles();
  ragged_maps_count_rows_of_the_batch();
  sequences_have_head_dimensions_of_their_own();
  bits_do_not_depend_on_multiprocessors();
  return 0;
}
