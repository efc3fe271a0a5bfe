// The host side of the GPU families on a made-up CUDA: what is loaded, planned and launched, by
// whom, and what is left when that fails. test_launch [no-driver | no-handles |
// no-shared-attributes | no-map-moves]: without those parts of CUDA.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "cuda/attention/combine.h"
#include "cuda/attention/lengths/lengths.h"
#include "cuda/attention/ragged_rows.h"
#include "cuda/attention/sm89/entry.h"
#include "cuda/attention/sm89/params.h"
#include "cuda/attention/sm89_decode/entry.h"
#include "cuda/attention/sm89_few_rows/entry.h"
#include "cuda/attention/sm89_few_rows/params.h"
#include "cuda/attention/sm90/entry.h"
#include "cuda/attention/sm90/params.h"
#include "cuda/attention/sm90_mla/entry.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/merge_states/params.h"
#include "flashmoe/flashmoe.h"

static std::atomic<bool> out_of_memory{false};

extern "C" {

void* __real_aligned_alloc(size_t alignment, size_t bytes);

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return out_of_memory ? nullptr : __real_aligned_alloc(alignment, bytes);
}

}  // extern "C"

// ---- made-up kernels
// -----------------------------------------------------------------------------

namespace flashmoe::sm89_few_rows {
static LoadedKernel loaded[kMaxDevices];
static LoadedKernel loaded_combine[kMaxDevices];
static Abilities abilities[kMaxDevices];
static int shared_bytes_of(int warps, int cluster) { return 1024 * warps + cluster; }
extern const Entry entry_fp16_d64_dv64_r8;
const Entry entry_fp16_d64_dv64_r8 = {
    {"attention_forward_sm89_few_rows_fp16_d64_dv64_r8", reinterpret_cast<const void*>(0x55), 8208,
     loaded},
    Dtype::kFloat16,
    64,
    64,
    8,
    64,
    &shared_bytes_of,
    abilities,
    8 * (64 * 4 + 8),
    {"attention_combine_sm89_few_rows_fp16_d64_dv64_r8", reinterpret_cast<const void*>(0x56), 0,
     loaded_combine},
};
}  // namespace flashmoe::sm89_few_rows

namespace flashmoe::sm89_decode {
static LoadedKernel loaded[3][kMaxDevices];
extern const Entry entry_fp16_d64_dv64_r8;
extern const Entry entry_fp16_d64_dv64_r16;
const Entry entry_fp16_d64_dv64_r8 = {
    {{"attention_forward_sm89_decode_fp16_d64_dv64_r8", reinterpret_cast<const void*>(0x57), 5000,
      loaded[0]},
     Dtype::kFloat16,
     64,
     64,
     8,
     32,
     1,
     kThreads},
    4,
    4,
};
const Entry entry_fp16_d64_dv64_r16 = {
    {{"attention_forward_sm89_decode_fp16_d64_dv64_r16", reinterpret_cast<const void*>(0x58), 6000,
      loaded[1]},
     Dtype::kFloat16,
     64,
     64,
     16,
     32,
     1,
     kThreads},
    4,
    1,
};
const Kernel kCombineFp16 = {"attention_combine_sm89_decode_fp16",
                             reinterpret_cast<const void*>(0x59), 0, loaded[2]};
const Kernel kCombineBf16 = kCombineFp16;
}  // namespace flashmoe::sm89_decode

namespace flashmoe::sm90_mla {
static LoadedKernel loaded[3][kMaxDevices];
const Kernel kCombine = {"attention_combine_sm90_mla_fp16_d576_dv512",
                         reinterpret_cast<const void*>(0x5d), 0, loaded[2]};
extern const Entry entry_fp16_d576_dv512;
const Entry entry_fp16_d576_dv512 = {
    {{"attention_forward_sm90_mla_fp16_d576_dv512", reinterpret_cast<const void*>(0x5b), 224000,
      loaded[0]},
     Dtype::kFloat16,
     576,
     512,
     64,
     64,
     2,
     384},
    kCombine,
    64,
    7,
};
}  // namespace flashmoe::sm90_mla

namespace flashmoe::lengths {
static LoadedKernel loaded[kMaxDevices];
const Kernel kLengths = {"attention_forward_mixed_lengths", reinterpret_cast<const void*>(0x5a), 0,
                         loaded};
}  // namespace flashmoe::lengths

namespace flashmoe::sm89 {
static LoadedKernel loaded[kMaxDevices];
extern const Entry entry_fp16_d64_dv64;
const Entry entry_fp16_d64_dv64 = {
    {{"attention_forward_sm89_fp16_d64_dv64", reinterpret_cast<const void*>(0x89), 32784, loaded},
     Dtype::kFloat16,
     64,
     64,
     128,
     64,
     2,
     128},
    2,
    false,
};
static LoadedKernel loaded_ragged[kMaxDevices];
extern const Entry entry_fp16_d64_dv64_ragged;
const Entry entry_fp16_d64_dv64_ragged = {
    {{"attention_forward_sm89_fp16_d64_dv64_ragged", reinterpret_cast<const void*>(0x8a), 32864,
      loaded_ragged},
     Dtype::kFloat16,
     64,
     64,
     128,
     64,
     2,
     128},
    2,
    true,
};
static LoadedKernel loaded_ragged_biased[kMaxDevices];
extern const Entry entry_fp16_d64_dv64_ragged_biased;
const Entry entry_fp16_d64_dv64_ragged_biased = {
    {{"attention_forward_sm89_fp16_d64_dv64_ragged_biased", reinterpret_cast<const void*>(0x8e),
      49248, loaded_ragged_biased},
     Dtype::kFloat16,
     64,
     64,
     128,
     64,
     2,
     128},
    2,
    true,
    true,
};
}  // namespace flashmoe::sm89

namespace flashmoe::sm90 {
static LoadedKernel loaded[kMaxDevices];
extern const Entry entry_fp16_d64_dv64;
const Entry entry_fp16_d64_dv64 = {
    {{"attention_forward_sm90_fp16_d64_dv64", reinterpret_cast<const void*>(0x90), 230000, loaded},
     Dtype::kFloat16,
     64,
     64,
     192,
     128,
     2,
     512},
    false,
    48,  // box_rows and box_columns: unlike the real ones, so that a literal would show
    32,
    0,
    0,
    {},
    false,
    false,
    0,
};
static LoadedKernel loaded_ragged[kMaxDevices];
extern const Entry entry_fp16_d64_dv64_ragged;
const Entry entry_fp16_d64_dv64_ragged = {
    {{"attention_forward_sm90_fp16_d64_dv64_ragged", reinterpret_cast<const void*>(0x93), 230080,
      loaded_ragged},
     Dtype::kFloat16,
     64,
     64,
     192,
     128,
     2,
     512},
    false,
    48,
    32,
    0,
    0,
    {},
    true,
    false,
    0,
};
static LoadedKernel loaded_ragged_packed[kMaxDevices];
extern const Entry entry_fp16_d64_dv64_ragged_packed;
const Entry entry_fp16_d64_dv64_ragged_packed = [] {
  Entry entry = entry_fp16_d64_dv64_ragged;
  entry.name = "attention_forward_sm90_fp16_d64_dv64_ragged_packed";
  entry.function = reinterpret_cast<const void*>(0x96);
  entry.loaded = loaded_ragged_packed;
  entry.packed = true;
  return entry;
}();
static LoadedKernel loaded_split[kMaxDevices];
static LoadedKernel loaded_combine[kMaxDevices];
extern const Entry entry_split_kv_fp16_d64_dv64;
const Entry entry_split_kv_fp16_d64_dv64 = {
    {{"attention_forward_sm90_split_kv_fp16_d64_dv64", reinterpret_cast<const void*>(0x91), 170000,
      loaded_split},
     Dtype::kFloat16,
     64,
     64,
     192,
     128,
     3,
     512},
    false,
    48,
    32,
    3,
    192 * (64 * 4 + 8),
    {"attention_combine_sm90_split_kv_fp16_d64_dv64", reinterpret_cast<const void*>(0x92), 0,
     loaded_combine},
    false,
    false,
    0,
};
// A kernel for short windows.
static Entry entry_of_windows(const char* name, uintptr_t handle, int shared_bytes,
                              LoadedKernel* of_devices, bool ragged) {
  return {
      {{name, reinterpret_cast<const void*>(handle), shared_bytes, of_devices},
       Dtype::kFloat16,
       64,
       64,
       192,
       64,
       9,
       512},
      false,
      48,
      32,
      0,
      0,
      {},
      ragged,
      false,
      128,
  };
}
static LoadedKernel loaded_window[kMaxDevices];
static LoadedKernel loaded_ragged_window[kMaxDevices];
extern const Entry entry_fp16_d64_dv64_window;
extern const Entry entry_fp16_d64_dv64_ragged_window;
const Entry entry_fp16_d64_dv64_window = entry_of_windows(
    "attention_forward_sm90_fp16_d64_dv64_window", 0x94, 221000, loaded_window, false);
const Entry entry_fp16_d64_dv64_ragged_window = entry_of_windows(
    "attention_forward_sm90_fp16_d64_dv64_ragged_window", 0x95, 222000, loaded_ragged_window, true);
}  // namespace flashmoe::sm90

namespace flashmoe {

static flashmoe_status no_cpu(const AttentionProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
const AttentionFamily kCpuAttention = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};

namespace {

bool driver_launches = true;
alignas(16) char workspace[16];  // of any size: the fake's launches touch none

// ---- calls
// ---------------------------------------------------------------------------------------

struct Call {
  int64_t batch, seq_q, seq_k, heads_q, heads_kv;
  int64_t shapes[5][4], strides[5][4];
  flashmoe_tensor tensors[5];  // q, k, v, out, lse
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();

  Call(const char* family, int64_t batch_, int64_t seq_q_, int64_t seq_k_, int64_t heads_q_,
       int64_t heads_kv_, int device = 0)
      : batch(batch_), seq_q(seq_q_), seq_k(seq_k_), heads_q(heads_q_), heads_kv(heads_kv_) {
    for (int i = 0; i < 4; ++i) {
      const bool of_q = i == 0 || i == 3;
      const int64_t shape[] = {batch, of_q ? seq_q : seq_k, of_q ? heads_q : heads_kv, 64};
      int64_t step = 1;
      for (int axis = 3; axis >= 0; --axis) {
        shapes[i][axis] = shape[axis];
        strides[i][axis] = step;
        step *= shape[axis];
      }
      tensors[i] = {reinterpret_cast<void*>((int64_t{1} << 40) + (int64_t{i} << 32)),
                    {FLASHMOE_DEVICE_CUDA, device},
                    4,
                    {FLASHMOE_DTYPE_FLOAT, 16, 1},
                    shapes[i],
                    strides[i],
                    0};
    }
    const int64_t lse_shape[] = {batch, heads_q, seq_q};
    std::copy(std::begin(lse_shape), std::end(lse_shape), shapes[4]);
    tensors[4] = {reinterpret_cast<void*>((int64_t{1} << 40) + (int64_t{4} << 32)),
                  {FLASHMOE_DEVICE_CUDA, device},
                  3,
                  {FLASHMOE_DTYPE_FLOAT, 32, 1},
                  shapes[4],
                  nullptr,
                  0};
    params.q = &tensors[0];
    params.k = &tensors[1];
    params.v = &tensors[2];
    params.out = &tensors[3];
    params.kernel = family;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // To other memory, of the same alignment.
  void move(int tensor) {
    tensors[tensor].data = static_cast<char*>(tensors[tensor].data) + (1 << 20);
  }

  flashmoe_status run(void* stream = nullptr) const {
    return flashmoe_attention_forward(&params, nullptr, 0, stream);
  }
  flashmoe_status run_in_workspace() const {
    return flashmoe_attention_forward(&params, workspace, 16 << 20, nullptr);
  }
};

fake::By whoever() { return driver_launches ? fake::By::kDriver : fake::By::kRuntime; }

flashmoe_plan plan_of(const Call& call) {
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
  return plan;
}

std::vector<flashmoe_launch> read_back() {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
  return {launches, launches + count};
}

// What was launched last is what a plan says, in its order.
void check_read_back(const flashmoe_plan& plan) {
  const std::vector<flashmoe_launch> launches = read_back();
  CHECK(launches.size() == static_cast<size_t>(plan.launch_count));
  for (size_t i = 0; i < launches.size(); ++i) {
    const flashmoe_launch& planned = plan.launches[i];
    CHECK(launches[i].registers == 168 && launches[i].binary_arch == 90);
    flashmoe_launch as_planned = launches[i];
    as_planned.registers = as_planned.local_bytes = as_planned.binary_arch = 0;
    CHECK(std::memcmp(&as_planned, &planned, sizeof planned) == 0);
  }
}

// ---- tests
// ---------------------------------------------------------------------------------------

int launched_here = 0;
merge_states::Params merging;  // of the second launch

// Attention by any family, and behind it the merge of what it left in the workspace.
void a_partial_is_merged_in_behind_any_family() {
  for (const char* family : {"sm89", "sm90_whole_tiles", "sm89_few_rows"}) {
    Call call(family, 2, 300, 700, 4, 2);
    const flashmoe_plan alone = plan_of(call);
    flashmoe_tensor prior = call.tensors[3], sums = call.tensors[4];
    prior.data = reinterpret_cast<void*>((int64_t{1} << 40) + (int64_t{5} << 32));
    prior.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
    sums.data = reinterpret_cast<void*>((int64_t{1} << 40) + (int64_t{6} << 32));
    call.params.prior_out = &prior;
    call.params.prior_lse = &sums;
    call.tensors[3].dtype = prior.dtype;
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, alone.family) == 0);
    CHECK(plan.launch_count == alone.launch_count + 1);
    for (int32_t i = 0; i < alone.launch_count; ++i) {
      CHECK(std::memcmp(&plan.launches[i], &alone.launches[i], sizeof plan.launches[i]) == 0);
    }
    const flashmoe_launch& last = plan.launches[alone.launch_count];
    CHECK(std::strcmp(last.kernel, "merge_states_sm89_fp16_beside_fp32") == 0);
    CHECK(plan.microseconds > alone.microseconds);
    constexpr uint64_t kOut = 2 * 300 * 4 * 64 * 2, kLse = (2 * 300 * 4 * 4 + 127) / 128 * 128;
    CHECK(plan.workspace_bytes == alone.workspace_bytes + kOut + kLse);
    CHECK(call.run() == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);

    for (const bool in_place : {false, true}) {
      if (in_place) call.params.out = &prior;
      if (alone.launch_count > 1) continue;  // whose parts the workspace here has no room for
      launched_here = 0;
      fake::on_launch = [](const void* params) {
        if (launched_here++ == 1) std::memcpy(&merging, params, sizeof merging);
      };
      CHECK(call.run_in_workspace() == FLASHMOE_OK);
      fake::on_launch = nullptr;
      CHECK(launched_here == 2);
      check_read_back(plan);
      CHECK(merging.outs.data == workspace && merging.partials == 1);
      CHECK(reinterpret_cast<const char*>(merging.lses.data) == workspace + kOut);
      CHECK(merging.prior_out.data == prior.data && merging.prior_lse.data == sums.data);
      CHECK(merging.out.data == call.params.out->data && merging.lse.data == nullptr);
      CHECK(merging.most_q == 0 && merging.rows == 2 * 300 * 4);
    }
    sums.dtype.bits = 16;
    CHECK(call.run_in_workspace() == FLASHMOE_ERROR_INVALID_ARGUMENT);
  }
}

// Nothing is asked of the runtime, which has no such device.
void models_are_planned_for_and_run_nothing() {
  const auto put_on = [](Call* call, flashmoe_device device) {
    for (flashmoe_tensor& tensor : call->tensors) tensor.device = device;
  };
  fake::on_launch = [](const void*) { CHECK(false); };
  const int loads = fake::state.loads;
  const int set_devices = fake::state.set_devices;
  flashmoe_plan plan = flashmoe_plan_init();
  for (const char* kernel : {"sm90", "sm89"}) {
    for (const int32_t model : {FLASHMOE_GPU_H200, FLASHMOE_GPU_L4}) {
      Call call(kernel, 2, 60, 1000, 6, 2);
      put_on(&call, {FLASHMOE_DEVICE_GPU_MODEL, model});
      const bool hopper = model == FLASHMOE_GPU_H200;
      const bool serves = hopper || std::strcmp(kernel, "sm89") == 0;
      const flashmoe_status status = flashmoe_attention_forward_plan(&call.params, &plan);
      CHECK(status == (serves ? FLASHMOE_OK : FLASHMOE_ERROR_UNSUPPORTED));
      if (!serves) {
        CHECK(std::strstr(flashmoe_last_error(), "l4 has compute capability 8.9") != nullptr);
        continue;
      }
      CHECK(std::strncmp(plan.isa, hopper ? "sm_90" : "sm_89", 5) == 0);
      CHECK(call.run() == FLASHMOE_ERROR_NO_DEVICE);
      CHECK(std::strstr(flashmoe_last_error(), hopper ? "q: it is on h200" : "q: it is on l4") ==
            flashmoe_last_error());
    }
  }
  CHECK(fake::state.loads == loads && fake::state.set_devices == set_devices);
  Call call("sm89", 2, 60, 1000, 6, 2);
  for (const int32_t model : {-1, 4}) {
    put_on(&call, {FLASHMOE_DEVICE_GPU_MODEL, model});
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::strstr(flashmoe_last_error(), "q: got the GPU model") == flashmoe_last_error());
  }
  put_on(&call, {FLASHMOE_DEVICE_CUDA, 61});  // what the model h200 is within the library
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_NO_DEVICE);
}

sm89::Params seen89;
sm90::TileParams seen90;

void the_plan_is_what_the_launch_gets() {
  fake::on_launch = [](const void* params) { std::memcpy(&seen89, params, sizeof seen89); };
  const Call call("sm89", 2, 60, 1000, 6, 2);
  const flashmoe_plan plan = plan_of(call);
  const flashmoe_launch& first = plan.launches[0];
  CHECK(std::strcmp(plan.family, "sm89") == 0 && std::strcmp(plan.isa, "sm_90") == 0);
  CHECK(fake::state.allowed_shared_bytes[0] == 32784);
  for (int i = 0; i < 3; ++i) {
    fake::last = {};
    CHECK(call.run() == FLASHMOE_OK);
    CHECK(fake::last.by == whoever() && fake::last.device == 0);
    const void* function = reinterpret_cast<const void*>(0x89);
    CHECK(fake::last.kernel == (driver_launches ? fake::handle_of(function) : function));
    CHECK(fake::last.grid.x == first.grid[0] && first.grid[0] == 12);
    CHECK(fake::last.grid.y == 1 && fake::last.grid.z == 1);
    CHECK(fake::last.block.x == first.block[0] && first.block[0] == 128);
    CHECK(fake::last.block.y == 1 && fake::last.block.z == 1);
    CHECK(fake::last.shared_bytes == 32784);
    CHECK(first.shared_bytes == 32784 + fake::kStaticSharedBytes);
    CHECK(fake::last.cluster == 0 && fake::last.programmatic == 1);
    CHECK(seen89.tensors.q == call.tensors[0].data && seen89.tensors.out == call.tensors[3].data);
    CHECK(seen89.tiles_per_head == 1 && seen89.heads == 12 && seen89.by_heads_per_kv.value == 3);
    CHECK(std::strcmp(first.kernel, "attention_forward_sm89_fp16_d64_dv64") == 0);
    CHECK(first.device.device_type == FLASHMOE_DEVICE_CUDA && first.device.device_id == 0);
    check_read_back(plan);
  }
}

// A tensor of int32 beside a call.
struct Table {
  int64_t shape[2];
  int64_t strides[2];
  flashmoe_tensor tensor;

  Table(int64_t rows, int64_t columns, uintptr_t at) : shape{rows, columns}, strides{columns, 1} {
    const int32_t rank = columns == 1 ? 1 : 2;
    tensor = {reinterpret_cast<void*>((int64_t{5} << 40) + static_cast<int64_t>(at << 20)),
              {FLASHMOE_DEVICE_CUDA, 0},
              rank,
              {FLASHMOE_DTYPE_INT, 32, 1},
              shape,
              strides,
              0};
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
};

sm89::RaggedParams seen_ragged;

// Packed queries, and keys in pages. The host sees no number of the tables.
void ragged_batches_have_kernels_of_their_own() {
  fake::on_launch = [](const void* params) {
    std::memcpy(&seen_ragged, params, sizeof seen_ragged);
  };
  Call call("sm89", 1, 1000, 1000, 6, 2);
  for (const int i : {1, 2}) {  // 30 pages of 16 keys
    call.shapes[i][0] = 30;
    call.shapes[i][1] = 16;
    call.strides[i][0] = 16 * 2 * 64;
  }
  Table cu_seqlens_q(5, 1, 1), seqused_k(4, 1, 2), page_table(4, 9, 3), k_begin(4, 1, 4);
  page_table.strides[0] = 20;
  page_table.strides[1] = 2;
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  sequences.cu_seqlens_q = &cu_seqlens_q.tensor;
  sequences.seqused_k = &seqused_k.tensor;
  sequences.page_table = &page_table.tensor;
  call.params.sequences = &sequences;
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 20;
  const auto run = [&] {
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, "sm89") == 0 && plan.launch_count == 1 && plan.flops == 0);
    CHECK(plan.workspace_bytes == 0 && plan.microseconds > 0);
    CHECK(std::strcmp(plan.launches[0].kernel, "attention_forward_sm89_fp16_d64_dv64_ragged") == 0);
    fake::last = {};
    CHECK(call.run() == FLASHMOE_OK);
    CHECK(fake::last.grid.x == plan.launches[0].grid[0] && fake::last.shared_bytes == 32864);
    check_read_back(plan);
  };

  // For any lengths: as many slots as whole tiles of 128 rows, and one more per sequence.
  run();
  const SequenceParams& seen = seen_ragged.sequences;
  CHECK(fake::last.grid.x == 6 * (1000 / 128 + 4) && seen_ragged.slots.count == 11);
  CHECK(seen_ragged.slots.tiles_per_sequence == 0 && seen_ragged.by_slots.value == 11);
  CHECK(seen_ragged.by_tiles_per_kv.value == 3 && seen_ragged.last_slots_first == 0);
  CHECK(seen_ragged.heads_per_tile == 1);
  CHECK(seen.cu_seqlens_q.data == cu_seqlens_q.tensor.data && seen.cu_seqlens_q.stride == 1);
  CHECK(seen.seqused_k.data == seqused_k.tensor.data);
  CHECK(!seen.k_begin.given() && !seen.seqused_q.given() && !seen.cu_seqlens_k.given());
  CHECK(!seen.batch_index.given() && seen.count == 4 && seen.rows_q == 1000);
  CHECK(seen.keys.page_table.data == page_table.tensor.data && seen.keys.page_table.stride == 20);
  CHECK(seen.keys.page_step == 2 && seen.keys.batch_k == 30 && seen.keys.page_size == 16);
  CHECK(seen.paged == 1 && seen.from_ends == 1 && seen.room_k == 9 * 16);
  CHECK(seen.most_q == 1000 && seen.most_k == 9 * 16);
  CHECK(seen_ragged.score.left_offset == -20 && seen_ragged.score.right_offset == 0);
  CHECK(seen_ragged.tensors.k_strides.batch == 16 * 2 * 64);

  // A bound of few tiles makes do with fewer.
  sequences.max_seqlen_q = 200;
  sequences.max_seqlen_k = 100;
  call.params.causal = FLASHMOE_CAUSAL_TOP_LEFT;
  call.params.window = 0;
  call.params.window_left = 0;
  run();
  CHECK(fake::last.grid.x == 6 * 2 * 4 && seen_ragged.slots.tiles_per_sequence == 2);
  CHECK(seen.most_q == 200 && seen.most_k == 100 && seen.from_ends == 0);
  CHECK(seen_ragged.last_slots_first == 1 && seen_ragged.score.left_offset == kNoLeftOffset);

  // With one query each, tiles span all heads of a KV head.
  sequences.max_seqlen_q = 1;
  run();
  CHECK(fake::last.grid.x == 2 * 4 && seen_ragged.slots.tiles_per_sequence == 1);
  CHECK(seen_ragged.heads_per_tile == 3 && seen_ragged.by_tiles_per_kv.value == 1);
  sequences.max_seqlen_q = 200;

  // A plan that is kept takes tables from anywhere, and no other tables.
  seqused_k.tensor.data = static_cast<char*>(seqused_k.tensor.data) + 64;
  CHECK(call.run() == FLASHMOE_OK && seen.seqused_k.data == seqused_k.tensor.data);
  sequences.k_begin = &k_begin.tensor;
  CHECK(call.run() == FLASHMOE_OK && seen.k_begin.data == k_begin.tensor.data);

  // What its kernels do not compute, a family refuses.
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
  for (const char* family : {"sm89_few_rows", "attention_forward_sm89_fp16_d64_dv64"}) {
    call.params.kernel = family;
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  }
  call.params.kernel = "attention_forward_sm89_fp16_d64_dv64_ragged";
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
  page_table.shape[1] = (1 << 25) + 1;  // times 16 keys
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(), "more than 2^29 rows") != nullptr);
  call.params.sequences = nullptr;
  for (const int i : {1, 2}) call.shapes[i][0] = 1;
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
}

// Pages of 16 keys for a call of so many sequences.
struct PagedCall : Call {
  Table cu_seqlens_q, seqused_k, page_table;
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();

  PagedCall(const char* kernel, int64_t count, int64_t rows, int64_t of_q, int64_t of_kv)
      : Call(kernel, 1, rows, 1000, of_q, of_kv),
        cu_seqlens_q(count + 1, 1, 1),
        seqused_k(count, 1, 2),
        page_table(count, 9, 3) {
    for (const int i : {1, 2}) {
      shapes[i][0] = 30;
      shapes[i][1] = 16;
      strides[i][0] = 16 * of_kv * 64;
    }
    sequences.cu_seqlens_q = &cu_seqlens_q.tensor;
    sequences.seqused_k = &seqused_k.tensor;
    sequences.page_table = &page_table.tensor;
    params.sequences = &sequences;
  }
};

std::vector<sm89_decode::Params> seen_decode;

// Blocks for each multiprocessor, or for each unit if these are fewer, and a part of two tiles
// each.
void few_queries_share_their_keys() {
  fake::on_launch = [](const void* params) {
    seen_decode.push_back(*static_cast<const sm89_decode::Params*>(params));
  };
  PagedCall call("sm89_decode", 4, 5, 6, 2);
  const auto run = [&](int64_t blocks, int64_t rows, int64_t places, int64_t blocks_of_rows,
                       int64_t rows_of_block) {
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, "sm89_decode") == 0 && plan.launch_count == 2);
    CHECK(plan.microseconds > 0 && plan.launches[0].tile_m == rows);
    CHECK(plan.launches[0].grid[0] == blocks && plan.launches[1].grid[0] == blocks);
    CHECK(plan.launches[1].grid[1] == blocks_of_rows && plan.launches[1].tile_m == rows_of_block);
    CHECK(plan.workspace_bytes ==
          places * (rows * 64 * 4 + rows * 8) + blocks * sizeof(sm89_decode::CutTile));
    seen_decode.clear();
    CHECK(flashmoe_attention_forward(&call.params, workspace, plan.workspace_bytes, nullptr) ==
          FLASHMOE_OK);
    check_read_back(plan);
    CHECK(seen_decode.size() == 2);
    const sm89_decode::Params& seen = seen_decode[0];
    CHECK(std::memcmp(&seen, &seen_decode[1], sizeof seen) == 0);
    CHECK(seen.blocks == blocks && seen.part_rows == rows && seen.part_units_log2 == 4);
    CHECK(1 << seen.combine_rows_log2 == rows_of_block);
    CHECK(static_cast<void*>(seen.parts) == workspace);
    CHECK(reinterpret_cast<char*>(seen.statistics) ==
          reinterpret_cast<char*>(seen.parts) + places * rows * 64 * 4);
    CHECK(reinterpret_cast<char*>(seen.cut_tiles) ==
          reinterpret_cast<char*>(seen.statistics) + places * rows * 8);
    return seen;
  };
  // 3 heads of 5 queries at most are 15 rows; 4 sequences, 2 heads, 144 keys in steps of 32.
  // At most two blocks of the second kernel run on a multiprocessor at a time: 6 for each of 40.
  sm89_decode::Params seen = run(40, 16, 80, 4, 4);
  CHECK(seen.group.value == 3 && seen.heads_kv == 2 && seen.split_keys == 0);
  CHECK(seen.k_chunks.page == 16 * 2 * 8 && seen.k_chunks.row == 16 && seen.k_chunks.head == 8);
  CHECK(seen.sequences.most_q == 5 && seen.sequences.most_k == 144);
  CHECK(seen.plain_tables == 1 && seen.most_tiles == 4 * 2);
  call.sequences.k_begin = call.sequences.seqused_k;
  CHECK(run(40, 16, 80, 4, 4).plain_tables == 0);
  call.sequences.k_begin = nullptr;
  // One query each is 3.
  call.sequences.max_seqlen_q = 1;
  seen = run(40, 8, 80, 3, 1);
  CHECK(seen.sequences.most_q == 1);
  // By chunks the kernel is that of one query, and the parts are of all chunks.
  call.sequences.max_seqlen_q = 5;
  call.sequences.split_size = 100;
  seen = run(80, 8, 80 * 32, 2, 4);
  CHECK(seen.split_keys == 100 && seen.most_tiles == 4 * 2 * 2);
  call.sequences.split_size = INT64_MAX;
  CHECK(run(80, 8, 80 * 32, 2, 4).split_keys == 1 << 29);
  // Keys beyond what an offset of 32 bits reaches.
  flashmoe_plan plan = flashmoe_plan_init();
  call.strides[2][0] = int64_t{1} << 33;
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(), "v of 64 GiB or more") != nullptr);
  // A dense call has no sequences.
  const Call dense("sm89_decode", 1, 1, 100, 2, 2);
  CHECK(flashmoe_attention_forward_plan(&dense.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(), "dense batches, accepted are ragged") != nullptr);
}

// Tiles of as many KV heads as leave about a tile for each of 132 blocks. A place has a part of
// each head. At most two blocks of the second kernel run on a multiprocessor at a time: two for a
// tile.
void tiles_have_several_heads() {
  fake::on_launch = [](const void* params) {
    seen_decode.push_back(*static_cast<const sm89_decode::Params*>(params));
  };
  const auto run = [&](int64_t count, int64_t of_kv, int64_t split_size, int heads) {
    PagedCall call("sm89_decode", count, count, 4 * of_kv, of_kv);
    call.sequences.max_seqlen_q = 1;
    call.sequences.split_size = split_size;
    const flashmoe_plan plan = plan_of(call);
    CHECK(plan.launches[0].grid[0] == 132 && plan.launches[1].grid[0] == 132);
    CHECK(plan.launches[1].grid[1] == 2 && plan.launches[1].tile_m == (heads > 1 ? 4 : 2));
    const int64_t places = 2 * plan.launches[0].grid[0] * heads * (split_size > 0 ? 16 : 1);
    CHECK(plan.workspace_bytes ==
          places * (8 * 64 * 4 + 8 * 8) + plan.launches[0].grid[0] * sizeof(sm89_decode::CutTile));
    seen_decode.clear();
    CHECK(flashmoe_attention_forward(&call.params, workspace, plan.workspace_bytes, nullptr) ==
          FLASHMOE_OK);
    const sm89_decode::Params& seen = seen_decode[0];
    CHECK(1 << seen.tile_heads_log2 == heads && seen.tiles_of_row == of_kv / heads);
    CHECK(seen.warps_of_head == 8 / heads && seen.most_tiles == count * of_kv / heads);
    // 128 KiB are 16 steps of 32 keys of a head.
    CHECK(seen.lead == (split_size > 0 ? 0 : 16 / heads));
    CHECK(reinterpret_cast<char*>(seen.statistics) ==
          reinterpret_cast<char*>(seen.parts) + places * 8 * 64 * 4);
  };
  run(115, 2, 0, 1);  // fewer than seven tiles for eight blocks
  run(116, 2, 0, 2);
  run(29, 8, 0, 2);
  run(58, 8, 0, 4);
  run(132, 8, 0, 4);  // at most
  run(132, 6, 0, 2);  // four do not divide six
  run(132, 3, 0, 1);
  run(132, 8, 100, 1);  // bits of chunks depend on the sequence alone
  // Bits do not depend on bounds: without one, a sequence may have all queries.
  PagedCall loose("sm89_decode", 115, 115, 8, 2);
  const flashmoe_plan plan = plan_of(loose);
  seen_decode.clear();
  CHECK(flashmoe_attention_forward(&loose.params, workspace, plan.workspace_bytes, nullptr) ==
        FLASHMOE_OK);
  CHECK(seen_decode[0].tile_heads_log2 == 0);
}

sm90_mla::Params seen_mla;

// Row tiles of 64 rows, of each of which as many blocks share the keys as of the others. Values
// elsewhere than in keys are another's.
void values_in_keys_are_read_with_them() {
  fake::on_launch = [](const void* params) {
    seen_mla = *static_cast<const sm90_mla::Params*>(params);
  };
  PagedCall call("sm90_mla", 4, 5, 128, 1);
  for (const int i : {0, 1, 2, 3}) {
    const bool of_v = i >= 2;
    call.shapes[i][3] = of_v ? 512 : 576;
    const int64_t columns = i == 3 ? 512 : 576;
    const int64_t heads = call.shapes[i][2];
    call.strides[i][2] = columns;
    call.strides[i][1] = heads * columns;
    call.strides[i][0] = call.shapes[i][1] * heads * columns;
  }
  call.tensors[2].data = call.tensors[1].data;
  const char* const kernel = "attention_forward_sm90_mla_fp16_d576_dv512";
  const auto run = [&](int64_t blocks, int64_t stream_k_blocks, int64_t cuts, int64_t sums) {
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, "sm90_mla") == 0 && plan.launch_count == 2);
    CHECK(std::strcmp(plan.launches[0].kernel, kernel) == 0);
    CHECK(plan.launches[0].grid[0] == blocks && plan.launches[1].grid[0] == sums);
    const int64_t places = stream_k_blocks == 1 ? 0 : 2 * blocks;
    CHECK(plan.workspace_bytes ==
          places * 64 * (512 * 4 + 8) + blocks * sizeof(sm89_decode::CutTile));
    std::vector<char> room(plan.workspace_bytes);
    fake::maps.clear();
    CHECK(flashmoe_attention_forward(&call.params, room.data(), room.size(), nullptr) ==
          FLASHMOE_OK);
    CHECK(seen_mla.blocks == blocks && seen_mla.part_units_log2 == 7);
    CHECK(static_cast<void*>(seen_mla.parts) == room.data());
    CHECK(seen_mla.stream_k_blocks == stream_k_blocks);
    CHECK(blocks % stream_k_blocks == 0);
    CHECK(seen_mla.cuts == cuts);
  };
  // 5 queries of 128 heads are 10 row tiles, and 4 sequences have 3 blocks of keys each. The second
  // kernel has as many blocks as run at a time, if there are so many quarters of rows.
  run(120, 12, 40, 396);
  CHECK(fake::maps.size() == 2);
  const fake::Map of_keys = fake::maps[1];
  CHECK(of_keys.data == call.tensors[1].data && of_keys.box[0] == 64 && of_keys.box[1] == 16);
  CHECK(of_keys.extents[0] == 576 && of_keys.extents[1] == 16 && of_keys.extents[3] == 30);
  // A box of queries has a tile's rows: 64 heads of one, or all heads of several.
  const auto check_queries = [&](int64_t heads) {
    const fake::Map& map = fake::maps[0];
    CHECK(map.data == call.tensors[0].data && seen_mla.query_heads == heads);
    CHECK(map.box[0] == 64 && map.box[1] == heads && map.box[2] == 64 / heads && map.box[3] == 1);
    CHECK(map.extents[0] == 576 && map.extents[2] == 5 && map.extents[3] == 1);
  };
  check_queries(64);
  call.sequences.max_seqlen_q = 1;
  run(24, 12, 8, 396);
  call.shapes[0][2] = call.shapes[3][2] = call.shapes[4][1] = 16;
  run(12, 12, 4, 4 * 16 * 4);
  check_queries(16);
  call.shapes[0][2] = call.shapes[3][2] = call.shapes[4][1] = 24;
  run(12, 12, 4, 4 * 24 * 4);
  CHECK(fake::maps.size() == 1 && seen_mla.query_heads == 0);
  call.shapes[0][2] = call.shapes[3][2] = call.shapes[4][1] = 128;
  // As many as there are multiprocessors, 132, for each row tile of which others are.
  call.page_table.shape[1] = 100;
  call.sequences.max_seqlen_q = 5;
  run(130, 13, 40, 396);
  // A row tile for more than half of the multiprocessors: no block shares its keys, no part needs a
  // place.
  call.sequences.max_seqlen_q = 34;
  call.shapes[0][1] = call.shapes[3][1] = 34;
  run(68, 1, 0, 1);
  CHECK(reinterpret_cast<const char*>(seen_mla.cut_tiles) ==
        reinterpret_cast<const char*>(seen_mla.parts));
  call.sequences.max_seqlen_q = 5;
  call.shapes[0][1] = call.shapes[3][1] = 5;
  // Elsewhere.
  flashmoe_plan plan = flashmoe_plan_init();
  const auto refuses = [&](const char* sentence) {
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(flashmoe_last_error(), sentence) != nullptr);
  };
  call.strides[2][1] += 8;
  refuses("a v of its own");
  call.strides[2][1] -= 8;
  call.tensors[2].data = static_cast<char*>(call.tensors[1].data) + 128;
  refuses("a v of its own");
  call.tensors[2].data = call.tensors[1].data;
  call.sequences.split_size = 64;
  refuses("split_size");
  call.sequences.split_size = 0;
  for (const int i : {1, 2}) call.strides[i][0] = 0;
  refuses("a stride of k that is 0 or below");
  for (const int i : {1, 2}) call.strides[i][0] = 16 * 576;
  for (const char* other : {"sm89", "sm90", "sm89_decode", "sm89_few_rows"}) {
    call.params.kernel = other;
    refuses("head dimensions 576 of q and k and 512 of v, accepted are up to 256");
  }
}

// Queries may stand elsewhere for all families, within what int32 counts; of a mask one knows.
void masks_and_offsets_of_sequences() {
  int64_t one[] = {1, 1, 1, 1};
  const flashmoe_tensor mask = {reinterpret_cast<void*>(int64_t{6} << 40),
                                {FLASHMOE_DEVICE_CUDA, 0},
                                4,
                                {FLASHMOE_DTYPE_UINT, 8, 1},
                                one,
                                nullptr,
                                0};
  const struct {
    const char* family;
    const char* sentence;
  } families[] = {{"sm89", nullptr},
                  {"sm90", "attn_mask, which its kernels do not read"},
                  {"sm89_decode", "attn_mask, which its kernels do not read"},
                  {"mixed", "attn_mask"}};
  const Table offsets(4, 1, 4);
  flashmoe_plan plan = flashmoe_plan_init();
  for (const auto& [family, sentence] : families) {
    PagedCall call(family, 4, 500, 6, 2);
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
    call.sequences.q_offset = &offsets.tensor;
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
    call.params.window = FLASHMOE_WINDOW_LEFT;
    call.params.window_left = kMostOffsetWindow;
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
    call.params.window_left = kMostOffsetWindow + 1;
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(flashmoe_last_error(), "q_offset beside more than 2^27 rows") != nullptr);
    call.sequences.q_offset = nullptr;
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
    call.params.attn_mask = &mask;
    if (sentence == nullptr) {
      CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
      CHECK(std::strstr(plan.launches[0].kernel, "_ragged_biased") != nullptr);
      continue;
    }
    CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(flashmoe_last_error(), sentence) != nullptr);
  }
  PagedCall call(nullptr, 4, 500, 6, 2);
  call.params.attn_mask = &mask;
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_OK);
  CHECK(std::strcmp(plan.family, "sm89") == 0);
}

struct SeenMixed {
  lengths::Params lengths;
  sm90::RaggedParams many;
  sm89_decode::Params few;
  sm89_decode::Params several;
};
SeenMixed seen_mixed;
int seen_mixed_launches = 0;

// Prompts by a family of tiles, the others by sm89_decode, each with a table of its own. Decoding
// begins, prompts run beside it, and what adds up decoding's parts comes behind both. Behind all
// come those whose queries are more than a tile of decoding's kernel, by another, unless bits are
// to depend on a sequence alone.
void prompts_beside_decoding_are_parts() {
  fake::on_launch = [](const void* params) {
    const int i = seen_mixed_launches++;
    if (i == 0) seen_mixed.lengths = *static_cast<const lengths::Params*>(params);
    if (i == 1) seen_mixed.few = *static_cast<const sm89_decode::Params*>(params);
    if (i == 2) seen_mixed.many = *static_cast<const sm90::RaggedParams*>(params);
    if (i == 4) seen_mixed.several = *static_cast<const sm89_decode::Params*>(params);
  };
  PagedCall call("mixed", 4, 500, 6, 2);
  for (const int64_t split_size : {0, 64}) {
    call.sequences.split_size = split_size;
    const flashmoe_plan plan = plan_of(call);
    const bool several = split_size == 0;
    const int64_t table = 128;
    const int64_t tables = (several ? 3 : 2) * table;
    CHECK(std::strcmp(plan.family, "mixed") == 0 && plan.launch_count == (several ? 6 : 4));
    CHECK(std::strcmp(plan.launches[0].kernel, "attention_forward_mixed_lengths") == 0);
    CHECK(plan.launches[0].grid[0] == 1);
    // By the kernel of one query, whatever the bound.
    CHECK(std::strcmp(plan.launches[1].kernel, "attention_forward_sm89_decode_fp16_d64_dv64_r8") ==
          0);
    CHECK(std::strcmp(plan.launches[2].kernel, "attention_forward_sm90_fp16_d64_dv64_ragged") == 0);
    CHECK(std::strcmp(plan.launches[3].kernel, "attention_combine_sm89_decode_fp16") == 0);
    if (several) {
      CHECK(std::strncmp(plan.launches[4].kernel, "attention_forward_sm89_decode_", 30) == 0);
      CHECK(plan.launches[4].tile_m > plan.launches[1].tile_m);
      CHECK(std::strcmp(plan.launches[5].kernel, "attention_combine_sm89_decode_fp16") == 0);
    }
    for (int i = 0; i < 2; ++i) {
      seen_mixed_launches = 0;
      CHECK(flashmoe_attention_forward(&call.params, workspace, plan.workspace_bytes, nullptr) ==
            FLASHMOE_OK);
      CHECK(seen_mixed_launches == plan.launch_count);
      check_read_back(plan);
      CHECK(reinterpret_cast<const char*>(seen_mixed.lengths.many_q) == workspace);
      CHECK(reinterpret_cast<const char*>(seen_mixed.lengths.few_q) == workspace + table);
      // Two queries of three heads are in a tile of eight rows.
      const int32_t few = several ? 2 : 10;
      CHECK(seen_mixed.lengths.few == few && seen_mixed.lengths.several == 10);
      CHECK(!seen_mixed.lengths.sequences.seqused_q.given());
      CHECK(seen_mixed.many.sequences.seqused_q.data == seen_mixed.lengths.many_q);
      CHECK(seen_mixed.few.sequences.seqused_q.data == seen_mixed.lengths.few_q);
      CHECK(seen_mixed.few.sequences.most_q == few && seen_mixed.few.split_keys == split_size);
      const Division* const division = seen_mixed.lengths.division;
      CHECK(reinterpret_cast<const char*>(division) == workspace + tables);
      CHECK(seen_mixed.few.division == division && seen_mixed.many.division == division);
      CHECK(seen_mixed.lengths.multiprocessors == 132);
      // A number for each block, and for each tile that the rows of all sequences may have.
      CHECK(seen_mixed.many.chains == reinterpret_cast<const int32_t*>(division + 1));
      CHECK(seen_mixed.many.chains_room ==
            static_cast<int32_t>(plan.launches[2].grid[0]) + (500 / 192 + 4) * 6);
      CHECK(seen_mixed.many.tiles_ahead == 1 && seen_mixed.many.keys_before_claim == 256);
      const char* const behind =
          reinterpret_cast<const char*>(seen_mixed.many.chains + seen_mixed.many.chains_room);
      const auto* const parts = reinterpret_cast<const char*>(seen_mixed.few.parts);
      CHECK(parts >= behind && parts < behind + 128 && (parts - workspace) % 128 == 0);
      if (!several) {
        CHECK(seen_mixed.lengths.several_q == nullptr);
        continue;
      }
      CHECK(reinterpret_cast<const char*>(seen_mixed.lengths.several_q) == workspace + 2 * table);
      CHECK(seen_mixed.several.sequences.seqused_q.data == seen_mixed.lengths.several_q);
      CHECK(seen_mixed.several.sequences.most_q == 10 && seen_mixed.several.division == nullptr);
      // Nobody needs what the few left any more.
      CHECK(seen_mixed.several.parts == seen_mixed.few.parts);
    }
  }
  // What divides the keys of a tile among blocks takes a workspace, and is no part.
  void* const values = call.tensors[2].data;
  call.tensors[2].data = call.tensors[1].data;
  for (const int64_t split_size : {0, 64}) {
    call.sequences.split_size = split_size;
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, "mixed") == 0);
    CHECK(std::strcmp(plan.launches[2].kernel, "attention_forward_sm90_fp16_d64_dv64_ragged") == 0);
  }
  call.tensors[2].data = values;
  // Chunks promise more than an estimate may choose.
  call.params.kernel = nullptr;
  CHECK(std::strcmp(plan_of(call).family, "mixed") == 0);
  call.sequences.max_seqlen_q = 10;
  CHECK(std::strcmp(plan_of(call).family, "sm89_decode") == 0);
  call.params.kernel = "mixed";
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(), "may have more than 10 queries") != nullptr);
}

sm90::RaggedParams seen_ragged90;

// Where the copy engine goes for an element, whose addresses are modulo 2^64; 0: it is cut.
uint64_t address_in(const fake::Map& map, const std::array<int64_t, 5>& at) {
  uint64_t address = reinterpret_cast<uintptr_t>(map.data);
  for (size_t i = 0; i < 5; ++i) {
    if (at[i] < 0 || at[i] >= static_cast<int64_t>(map.extents[i])) return 0;
    address += static_cast<uint64_t>(at[i]) * (i == 0 ? 2 : map.steps[i - 1]);
  }
  return address;
}

// The ragged map of a call's tensor holds the rows of any sequence, each where it is, and no
// others: beside brute force. Kernels get there by so many rows for each of a batch.
void check_rows(const fake::Map& map, const Call& call, size_t tensor, int32_t rows_per_batch) {
  static std::mt19937 random_numbers(1);
  const auto from = [](int64_t least, int64_t most) {
    return static_cast<int>(std::uniform_int_distribution<int64_t>(least, most)(random_numbers));
  };
  const int64_t* const shape = call.shapes[tensor];
  const int64_t* const strides = call.strides[tensor];
  const auto data = reinterpret_cast<uintptr_t>(call.tensors[tensor].data);
  // The copy engine wants memory where the map begins, and limits strides, the driver extents.
  CHECK(map.rank == 5 && map.data == call.tensors[tensor].data);
  for (const cuuint64_t step : map.steps) CHECK(step % 16 == 0 && step < cuuint64_t{1} << 40);
  for (const cuuint64_t extent : map.extents) CHECK(extent >= 1 && extent < cuuint64_t{1} << 31);
  for (int i = 0; i < 500; ++i) {
    const int batch = from(0, shape[0] - 1);
    const int head = from(0, shape[2] - 1);
    const int begin = from(0, shape[1] - 1);
    const int length = from(1, shape[1] - begin);
    const int box = static_cast<int>(map.box[1]);
    int row = from(-2 * box, length + box);
    if (row < 0 && row + box > length) row = -box;  // never both ends
    const auto at = RaggedRow::at(row, begin + batch * rows_per_batch, length);
    for (int r = 0; r < box; ++r) {
      const bool exists = row + r >= 0 && row + r < length;
      const int64_t element =
          batch * strides[0] + (begin + row + r) * strides[1] + head * strides[2];
      const uint64_t wanted = exists ? data + static_cast<uint64_t>(2 * element) : 0;
      const int64_t repeated = strides[2] == 0 ? 0 : head;
      CHECK(address_in(map, {0, at.row + r, repeated, at.base, at.wrap}) == wanted);
    }
  }
}

// The last four maps, of q, k, v and out.
void check_rows_of(const Call& call) {
  const sm90::RowsPerBatch& per_batch = seen_ragged90.rows_per_batch;
  const int32_t of[] = {per_batch.q, per_batch.k, per_batch.v, per_batch.out};
  CHECK(fake::maps.size() >= 4);
  for (size_t i = 0; i < 4; ++i) {
    check_rows(fake::maps[fake::maps.size() - 4 + i], call, i, of[i]);
  }
}

// By sm90, whose maps end where a sequence does.
void sm90_cuts_boxes_at_sequences() {
  fake::on_launch = [](const void* params) {
    std::memcpy(static_cast<void*>(&seen_ragged90), params, sizeof seen_ragged90);
  };
  const sm90::RaggedParams& seen = seen_ragged90;
  Call call("sm90", 1, 5000, 3000, 6, 2);
  call.params.lse = &call.tensors[4];
  call.strides[2][2] = 0;  // one v for all heads
  Table cu_seqlens_q(5, 1, 1), cu_seqlens_k(5, 1, 2), seqused_k(4, 1, 3);
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  sequences.cu_seqlens_q = &cu_seqlens_q.tensor;
  sequences.cu_seqlens_k = &cu_seqlens_k.tensor;
  sequences.seqused_k = &seqused_k.tensor;
  sequences.max_seqlen_q = 700;
  call.params.sequences = &sequences;
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  // For q and out, and for k and v: rows and boxes.
  constexpr int64_t kMost = int64_t{1} << 30;
  const auto check_maps = [&](size_t first, const int64_t (&queries)[2], const int64_t (&keys)[2]) {
    CHECK(fake::maps.size() == first + 4);
    for (size_t i = 0; i < 4; ++i) {
      const fake::Map& map = fake::maps[first + i];
      const bool of_q = i == 0 || i == 3;
      const auto& [rows, box_rows] = of_q ? queries : keys;
      const auto stride = static_cast<cuuint64_t>(2 * call.strides[i][1]);
      CHECK(map.rank == 5 && map.box[0] == 32 && map.box[1] == static_cast<cuuint32_t>(box_rows));
      CHECK(map.box[2] == 1 && map.box[3] == 1 && map.box[4] == 1);
      CHECK(map.extents[0] == 64 && map.extents[1] == static_cast<cuuint64_t>(kMost));
      CHECK(map.extents[2] == (i == 2 ? 1 : static_cast<cuuint64_t>(call.shapes[i][2])));
      CHECK(map.extents[3] == static_cast<cuuint64_t>(rows + kMost));
      CHECK(map.extents[4] == static_cast<cuuint64_t>(kMost + 1));
      CHECK(map.steps[0] == stride && map.steps[2] == stride);
      CHECK(map.steps[3] == (cuuint64_t{1} << 34) - stride);
    }
    check_rows_of(call);
  };
  fake::maps.clear();
  fake::moves.clear();
  for (int i = 0; i < 3; ++i) {
    const flashmoe_plan plan = plan_of(call);
    CHECK(std::strcmp(plan.family, "sm90") == 0 && plan.launch_count == 1 && plan.flops == 0);
    CHECK(plan.workspace_bytes == 0 && plan.microseconds > 0);
    CHECK(std::strcmp(plan.launches[0].kernel, "attention_forward_sm90_fp16_d64_dv64_ragged") == 0);
    CHECK(call.run() == FLASHMOE_OK);
    check_read_back(plan);
    // No more than there may be: 4 tiles of 192 rows of each sequence, of 6 heads.
    CHECK(fake::last.grid.x == 96 && fake::last.block.x == 512);
    check_maps(0, {5000, 48}, {3000, 128});
  }
  CHECK(seen.sequences.count == 4 && seen.sequences.rows_q == 5000 && seen.seq_q == 700);
  CHECK(seen.seq_k == 3000 && seen.sequences.seqused_k.data == seqused_k.tensor.data);
  CHECK(seen.v_repeats.head == 0 && seen.k_repeats.head == 1 && seen.grows == 1);
  CHECK(seen.heads_per_tile == 1 && seen.heads_kv == 2 && seen.heads_of_tiles == 6 &&
        seen.by_heads_per_kv.value == 3);
  CHECK(seen.keys_of_l2 > 1000 && seen.tensors.lse == call.tensors[4].data);

  // Tables and tensors may be anywhere.
  seqused_k.tensor.data = static_cast<char*>(seqused_k.tensor.data) + 64;
  for (const int tensor : {0, 1, 2, 3, 4}) call.move(tensor);
  CHECK(call.run() == FLASHMOE_OK);
  CHECK(seen.sequences.seqused_k.data == seqused_k.tensor.data);
  CHECK(seen.tensors.k == call.tensors[1].data && seen.tensors.lse == call.tensors[4].data);
  if (fake::state.has_map_moves) {
    CHECK(fake::maps.size() == 4 && fake::moves.size() == 4);
    CHECK(fake::mapped_by(seen.q) == call.tensors[0].data);
    CHECK(fake::mapped_by(seen.k) == call.tensors[1].data);
    CHECK(fake::mapped_by(seen.v) == call.tensors[2].data);
    CHECK(fake::mapped_by(seen.out) == call.tensors[3].data);
  } else {
    check_maps(4, {5000, 48}, {3000, 128});
  }

  // A window on both sides: later tiles are not longer.
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 30;
  CHECK(call.run() == FLASHMOE_OK && seen.grows == 0 && seen.score.left_offset == -30);

  // In padded batches each sequence has its own row, and at most as many keys as there are rows.
  Call padded("sm90", 3, 200, 300, 6, 2);
  Table lengths(3, 1, 4);
  flashmoe_attention_sequences used = flashmoe_attention_sequences_init();
  used.seqused_q = used.seqused_k = &lengths.tensor;
  padded.params.sequences = &used;
  CHECK(padded.run() == FLASHMOE_OK && fake::last.grid.x == 3 * 2 * 6);
  CHECK(seen.rows_per_batch.q == 200 && seen.rows_per_batch.k == 300);
  CHECK(seen.rows_per_batch.v == 300 && seen.rows_per_batch.out == 200);
  check_rows_of(padded);
  // Heads may be apart by more than rows are, one k may be all sequences', and rows far apart.
  const auto with_strides = [&](int tensor, int64_t of_batch, int64_t of_rows, int64_t of_heads) {
    int64_t* const strides = padded.strides[tensor];
    strides[0] = of_batch;
    strides[1] = of_rows;
    strides[2] = of_heads;
  };
  with_strides(0, 6 * 200 * 64, 64, 200 * 64);
  with_strides(1, 0, 2 * 64, 64);
  with_strides(2, 3 * ((int64_t{1} << 33) - 8), (int64_t{1} << 33) - 8, 0);
  CHECK(padded.run() == FLASHMOE_OK);
  CHECK(seen.rows_per_batch.q == 1200 && seen.rows_per_batch.k == 0);
  check_rows_of(padded);
  // With single rows the batch stride may be anything.
  Call single("sm90", 3, 1, 1, 2, 2);
  single.params.sequences = &used;
  for (int64_t (&strides)[4] : single.strides) {
    strides[0] = 1000;
    strides[1] = 8;
  }
  CHECK(single.run() == FLASHMOE_OK && seen.rows_per_batch.v == 1);
  check_rows_of(single);

  // What the two dimensions of rows cannot count is not for this family.
  const auto refuses = [&](const char* reason) {
    flashmoe_plan unused = flashmoe_plan_init();
    CHECK(flashmoe_attention_forward_plan(&padded.params, &unused) == FLASHMOE_ERROR_UNSUPPORTED);
    if (std::strstr(flashmoe_last_error(), reason) == nullptr) std::puts(flashmoe_last_error());
    CHECK(std::strstr(flashmoe_last_error(), reason) != nullptr);
  };
  with_strides(1, 300 * 2 * 64 + 8, 2 * 64, 64);
  refuses(
      "k has sequences with a stride of 38408 along the batch, accepted are multiples of that "
      "from row to row, 128");
  with_strides(1, 300 * 2 * 64, 2 * 64, 64);
  with_strides(2, 0, int64_t{1} << 33, 0);
  refuses("rows of sequences in v are 17179869184 bytes apart, accepted are less than 2^34");
  with_strides(2, ((int64_t{1} << 29) - 150) * 128, 128, 64);  // twice that and 300 rows
  refuses("v has sequences in memory of 2^30 rows or more");
  with_strides(2, ((int64_t{1} << 29) - 151) * 128, 128, 64);
  CHECK(padded.run() == FLASHMOE_OK);
  check_rows_of(padded);

  // Rows of pages come in boxes of 1, 2, 4 and up to as many rows as a step has.
  Call paged("sm90", 1, 1000, 16, 6, 2);
  for (const int i : {1, 2}) {  // 30 pages of 16 keys
    paged.shapes[i][0] = 30;
    paged.strides[i][0] = 16 * 2 * 64;
  }
  Table page_table(4, 9, 5);
  sequences.cu_seqlens_k = nullptr;
  sequences.page_table = &page_table.tensor;
  paged.params.sequences = &sequences;
  fake::maps.clear();
  fake::moves.clear();
  for (int i = 0; i < 2; ++i) CHECK(paged.run() == FLASHMOE_OK && fake::maps.size() == 20);
  CHECK(seen.sequences.paged == 1 && seen.sequences.keys.page_table.data == page_table.tensor.data);
  CHECK(seen.sequences.keys.page_size == 16 && seen.seq_k == 9 * 16);
  for (size_t size = 0; size < 8; ++size) {
    for (size_t i : {1, 2}) {
      const fake::Map& of_pages = fake::maps[4 + 8 * (i - 1) + size];
      CHECK(of_pages.data == paged.tensors[i].data && of_pages.rank == 4);
      CHECK(of_pages.box[0] == 32 && of_pages.box[1] == 1U << size);
      CHECK(of_pages.extents[1] == 16 && of_pages.extents[2] == 2 && of_pages.extents[3] == 30);
      CHECK(of_pages.steps[2] == 2 * 16 * 2 * 64);
    }
    CHECK(fake::mapped_by(seen.k_pages[size]) == paged.tensors[1].data);
    CHECK(fake::mapped_by(seen.v_pages[size]) == paged.tensors[2].data);
  }
  for (const int tensor : {1, 2}) paged.move(tensor);
  CHECK(paged.run() == FLASHMOE_OK);
  CHECK(fake::moves.size() == (fake::state.has_map_moves ? 16 : 0));
  CHECK(fake::maps.size() == (fake::state.has_map_moves ? 20 : 40));
  for (size_t size = 0; size < 8; ++size) {
    CHECK(fake::mapped_by(seen.k_pages[size]) == paged.tensors[1].data);
    CHECK(fake::mapped_by(seen.v_pages[size]) == paged.tensors[2].data);
  }
  // The smaller pages are, the longer it takes.
  const double microseconds = plan_of(paged).microseconds;
  for (const int i : {1, 2}) {
    paged.shapes[i][0] = 480;
    paged.shapes[i][1] = 1;
  }
  page_table.shape[1] = page_table.strides[0] = 9 * 16;
  CHECK(plan_of(paged).microseconds > 2 * microseconds);
  // There may be no page, and a table that names some: what it asks for is of no map.
  for (const int i : {1, 2}) {
    paged.shapes[i][0] = 0;
    paged.tensors[i].data = nullptr;
  }
  fake::maps.clear();
  CHECK(paged.run() == FLASHMOE_OK && fake::maps.size() == 20);
  for (const fake::Map& each : fake::maps) CHECK(each.data != nullptr);
  CHECK(fake::maps[4].data == paged.tensors[0].data && fake::maps[4].extents[3] == 1);
  fake::moves.clear();

  // The query heads of a KV head share a tile where no sequence has more than one query, and its
  // rows are alike. They are the rows of its boxes.
  Call decoding("sm90", 5, 1, 400, 12, 3);
  Table used_keys(5, 1, 6);
  flashmoe_attention_sequences of_decoding = flashmoe_attention_sequences_init();
  of_decoding.seqused_k = &used_keys.tensor;
  decoding.params.sequences = &of_decoding;
  const auto packs = [&] {
    fake::maps.clear();
    CHECK(decoding.run() == FLASHMOE_OK && fake::maps.size() == 4);
    CHECK(seen.heads_per_tile == 4 || seen.heads_per_tile == 1);
    const bool packed = seen.heads_per_tile == 4;
    CHECK(fake::last.grid.x == (packed ? 5 * 3 : 5 * 12));
    CHECK(seen.heads_of_tiles == (packed ? 3 : 12) &&
          seen.by_heads_per_kv.value == (packed ? 1 : 4));
    CHECK(seen.seq_q == (packed ? 4 : 1) && seen.sequences.most_q == 1);
    return packed;
  };
  CHECK(packs());
  const double packed_microseconds = plan_of(decoding).microseconds;
  for (const size_t i : {size_t{0}, size_t{3}}) {
    const fake::Map& of_heads = fake::maps[i];
    CHECK(of_heads.box[1] == 48 && of_heads.data == decoding.tensors[i].data);
    const int32_t per_batch = i == 0 ? seen.rows_per_batch.q : seen.rows_per_batch.out;
    for (int batch = 0; batch < 5; ++batch) {
      for (int tile = 0; tile < 3; ++tile) {
        const auto at = RaggedRow::of_heads(0, batch * per_batch);
        for (int r = 0; r < 48; ++r) {
          const auto wanted = reinterpret_cast<uintptr_t>(decoding.tensors[i].data) +
                              static_cast<uint64_t>(2 * 64 * (12 * batch + 4 * tile + r));
          CHECK(address_in(of_heads, {0, at.row + r, tile, at.base, at.wrap}) ==
                (r < 4 ? wanted : 0));
        }
      }
    }
  }
  for (const size_t i : {size_t{1}, size_t{2}}) {
    check_rows(fake::maps[i], decoding, i, seen.rows_per_batch.k);
  }
  decoding.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  CHECK(packs());
  decoding.params.causal = FLASHMOE_CAUSAL_TOP_LEFT;
  CHECK(!packs());
  decoding.params.causal = FLASHMOE_CAUSAL_NONE;
  decoding.params.window = FLASHMOE_WINDOW_LEFT;
  CHECK(!packs());
  decoding.params.window = 0;
  Table sinks(12, 1, 7);
  sinks.tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  decoding.params.sinks = &sinks.tensor;
  CHECK(!packs());
  CHECK(plan_of(decoding).microseconds > packed_microseconds);
  decoding.params.sinks = nullptr;
  decoding.strides[0][2] = 0;  // one head of q for all
  CHECK(!packs());

  // Several queries of all query heads of a KV head share a tile, where they are few. A box has the
  // heads of 16 queries, and ends with the sequence.
  Call several("sm90", 5, 20, 400, 12, 3);
  several.params.sequences = &of_decoding;
  const auto packs_queries = [&](bool wanted, int64_t blocks) {
    fake::maps.clear();
    CHECK(several.run() == FLASHMOE_OK && fake::maps.size() == 4);
    const flashmoe_plan of_several = plan_of(several);
    const char* const name = of_several.launches[0].kernel;
    CHECK((std::strstr(name, "_ragged_packed") != nullptr) == wanted);
    CHECK(fake::last.grid.x == blocks && seen.heads_per_tile == 1);
  };
  packs_queries(true, 5 * 3);
  CHECK(seen.packed_heads == 4 && seen.queries_per_group == 16);
  CHECK(seen.by_queries_per_tile.value == 3 * 16 && seen.seq_q == 20);
  CHECK(seen.heads_of_tiles == 3 && seen.by_heads_per_kv.value == 1);
  for (int row = 0; row < 64; ++row) {
    CHECK(row * seen.packed_heads_reciprocal >> 16 == row / 4);
  }
  for (const size_t i : {size_t{0}, size_t{3}}) {
    const fake::Map& of_heads = fake::maps[i];
    CHECK(of_heads.box[1] == 4 && of_heads.box[2] == 16);
    const int32_t per_batch = i == 0 ? seen.rows_per_batch.q : seen.rows_per_batch.out;
    for (const int length : {1, 7, 20}) {
      const RaggedRow at = RaggedRow::at(0, 3 * per_batch, length);
      for (int row = 0; row < 20; ++row) {
        for (int head = 0; head < 12; ++head) {
          const uint64_t wanted = reinterpret_cast<uintptr_t>(several.tensors[i].data) +
                                  static_cast<uint64_t>(2 * 64 * ((3 * 20 + row) * 12 + head));
          CHECK(address_in(of_heads, {0, head, at.row + row, at.base, at.wrap}) ==
                (row < length ? wanted : 0));
        }
      }
    }
  }
  several.params.causal = FLASHMOE_CAUSAL_TOP_LEFT;
  packs_queries(true, 5 * 3);
  several.params.window = FLASHMOE_WINDOW_LEFT;
  packs_queries(false, 5 * 12);
  several.params.window = 0;
  several.params.sinks = &sinks.tensor;
  packs_queries(false, 5 * 12);
  several.params.sinks = nullptr;
  several.strides[0][2] = 0;  // one head of q for all
  packs_queries(false, 5 * 12);

  // Whole tiles are its only schedule of these, and neither kernel computes what is the other's.
  flashmoe_plan plan = flashmoe_plan_init();
  for (const char* kernel : {"sm90_split_kv", "attention_forward_sm90_split_kv_fp16_d64_dv64",
                             "attention_forward_sm90_fp16_d64_dv64"}) {
    padded.params.kernel = kernel;
    CHECK(flashmoe_attention_forward_plan(&padded.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  }
  padded.params.kernel = "sm90_whole_tiles";
  CHECK(flashmoe_attention_forward_plan(&padded.params, &plan) == FLASHMOE_OK);
  padded.params.sequences = nullptr;
  padded.params.kernel = "attention_forward_sm90_fp16_d64_dv64_ragged";
  CHECK(flashmoe_attention_forward_plan(&padded.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  fake::moves.clear();
}

// The estimates are of sequences that are alike, and share the rows that there are.
void loose_bounds_cost_little() {
  Call call("sm89", 1, 8192, 8192, 8, 8);
  Table starts(17, 1, 1);
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  sequences.cu_seqlens_q = sequences.cu_seqlens_k = &starts.tensor;
  call.params.sequences = &sequences;
  const double loose = plan_of(call).microseconds;
  sequences.max_seqlen_q = sequences.max_seqlen_k = 512;
  CHECK(plan_of(call).microseconds == loose);
  const Call dense("sm89", 16, 512, 512, 8, 8);
  CHECK(plan_of(dense).microseconds == loose);
}

void sm90_encodes_its_maps_once() {
  fake::on_launch = [](const void* params) { std::memcpy(&seen90, params, sizeof seen90); };
  Call call("sm90_whole_tiles", 2, 700, 1000, 6, 2);
  call.strides[2][0] = call.strides[2][2] = 0;  // one v for all batches and heads
  fake::maps.clear();
  for (int i = 0; i < 3; ++i) {
    CHECK(call.run(fake::stream_of(0)) == FLASHMOE_OK);
    CHECK(fake::last.by == whoever() && fake::last.stream == fake::stream_of(0));
    CHECK(fake::last.grid.x == 48 && fake::last.block.x == 512);
    CHECK(seen90.tiles_per_head == 4 && seen90.heads == 12 && seen90.heads_per_swizzle == 1);
    CHECK(fake::maps.size() == 4);
  }
  const int64_t rows[] = {48, 128, 128, 48};
  for (size_t i = 0; i < 4; ++i) {
    const fake::Map& map = fake::maps[i];
    CHECK(map.data == call.tensors[i].data);
    CHECK(map.box[0] == 32 && map.box[1] == static_cast<cuuint32_t>(rows[i]));
    CHECK(map.box[2] == 1 && map.box[3] == 1);
    const cuuint64_t repeated = i == 2 ? 1 : 0;
    CHECK(map.extents[0] == 64);
    CHECK(map.extents[1] == static_cast<cuuint64_t>(call.shapes[i][1]));
    CHECK(map.extents[2] == (repeated ? 1 : static_cast<cuuint64_t>(call.shapes[i][2])));
    CHECK(map.extents[3] == (repeated ? 1 : 2));
  }
  CHECK(seen90.v_repeats.batch == 0 && seen90.v_repeats.head == 0);
  CHECK(seen90.k_repeats.batch == 1 && seen90.k_repeats.head == 1);

  // Another scale or another mask is another call.
  call.params.scale = 0.5f;
  CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == 8);
  call.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == 12);
  CHECK(seen90.heads_per_swizzle == 12);
  CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == 12);
  CHECK(fake::moves.empty());
}

// ---- calls at other addresses

// The parameters of all launches of this thread's calls.
using Bytes = std::vector<unsigned char>;
thread_local std::vector<Bytes> seen_params;
thread_local size_t params_bytes = 0;

void keep_params(size_t bytes) {
  params_bytes = bytes;
  seen_params.clear();
  fake::on_launch = [](const void* params) {
    const auto* const first = static_cast<const unsigned char*>(params);
    seen_params.emplace_back(first, first + params_bytes);
  };
}

template <class Params>
Params last_params() {
  Params params;
  std::memcpy(static_cast<void*>(&params), seen_params.back().data(), sizeof params);
  return params;
}

void check_maps_are_of(const Call& call) {
  const auto params = last_params<sm90::Params>();
  const bool keys = call.seq_k > 0;
  CHECK(fake::mapped_by(params.q) == call.tensors[0].data);
  CHECK(fake::mapped_by(params.k) == call.tensors[keys ? 1 : 0].data);
  CHECK(fake::mapped_by(params.v) == call.tensors[keys ? 2 : 0].data);
  if (std::strcmp(call.params.kernel, "sm90_whole_tiles") == 0) {
    CHECK(fake::mapped_by(params.out) == call.tensors[3].data);
  }
}

struct Moving {
  const char* family;
  int64_t batch, seq_q, seq_k, heads_q, heads_kv;
  int32_t causal;
  bool lse;
  int launches;
};

constexpr Moving kMoving[] = {
    {"sm90_whole_tiles", 2, 700, 1000, 6, 2, 0, false, 1},
    {"sm90_whole_tiles", 2, 700, 1000, 6, 2, FLASHMOE_CAUSAL_BOTTOM_RIGHT, true, 1},
    {"sm90_whole_tiles", 2, 700, 0, 6, 2, 0, true, 1},
    {"sm90_split_kv", 1, 64, 8192, 8, 2, 0, true, 2},       // each tile's keys to as many blocks
    {"sm90_split_kv", 1, 1024, 8192, 32, 8, 0, false, 2},   // stream-K
    {"sm90_split_kv", 4, 4096, 4096, 16, 16, 0, false, 1},  // whole tiles
    {"sm90_split_kv", 1, 64, 0, 8, 2, 0, true, 1},
};

// Encodes nothing again, moves the maps whose addresses changed and no others, and its launches get
// the same parameters, byte for byte, as those of a call that is the first of its thread.
void a_call_at_other_addresses_moves_maps() {
  for (const Moving& m : kMoving) {
    const bool split = std::strcmp(m.family, "sm90_split_kv") == 0;
    const int map_count = split ? 3 : 4;
    Call call(m.family, m.batch, m.seq_q, m.seq_k, m.heads_q, m.heads_kv);
    call.params.causal = m.causal;
    if (m.lse) call.params.lse = &call.tensors[4];
    const auto keep = [&] {
      keep_params(split ? sizeof(sm90::SplitParams) : sizeof(sm90::TileParams));
    };
    std::vector<Bytes> moved;
    std::thread([&] {
      const auto run = [&] {
        keep();
        fake::maps.clear();
        fake::moves.clear();
        CHECK(call.run_in_workspace() == FLASHMOE_OK);
        CHECK(seen_params.size() == static_cast<size_t>(m.launches));
        check_maps_are_of(call);
      };
      // So many of the maps have another address than that of the call before.
      const auto check_moves = [&](int changed) {
        const auto again =
            static_cast<size_t>(fake::state.has_map_moves || changed == 0 ? 0 : map_count);
        CHECK(fake::maps.size() == again);
        CHECK(fake::moves.size() == static_cast<size_t>(fake::state.has_map_moves ? changed : 0));
        for (const fake::Move& move : fake::moves) CHECK(move.from != move.to);
      };
      run();
      CHECK(fake::maps.size() == static_cast<size_t>(map_count) && fake::moves.empty());
      run();
      check_moves(0);
      for (int tensor = 0; tensor < (m.lse ? 5 : 4); ++tensor) {
        // Without keys the maps of k and v are of q.
        const int of_q = m.seq_k > 0 ? 1 : 3;
        const int of_keys = m.seq_k > 0 ? 1 : 0;
        const int changed[] = {of_q, of_keys, of_keys, split ? 0 : 1, 0};
        call.move(tensor);
        run();
        check_moves(changed[tensor]);
        CHECK(fake::moves.empty() || fake::moves.back().to == call.tensors[tensor].data);
      }
      for (int tensor = 0; tensor < 5; ++tensor) call.move(tensor);
      run();
      check_moves(map_count);
      moved = seen_params;
      check_read_back(plan_of(call));
    }).join();
    std::thread([&] {
      keep();
      CHECK(call.run_in_workspace() == FLASHMOE_OK);
      CHECK(seen_params == moved);
    }).join();
  }
}

// Whatever the driver refuses, a call is made with maps of its own addresses or not at all.
void no_map_is_of_another_call() {
  for (const char* family : {"sm90_whole_tiles", "sm90_split_kv"}) {
    std::thread([&] {
      Call call(family, 1, 1024, 8192, 32, 8);
      const auto run = [&](flashmoe_status status) {
        keep_params(sizeof(sm90::Params));
        CHECK(call.run_in_workspace() == status);
        CHECK(seen_params.empty() == (status != FLASHMOE_OK));
        if (status == FLASHMOE_OK) return check_maps_are_of(call);
        CHECK(std::strstr(flashmoe_last_error(), "the driver refused a tensor map") != nullptr);
      };
      run(FLASHMOE_OK);
      fake::state.refuse_moves = true;
      call.move(1);
      run(FLASHMOE_OK);  // encoded again
      fake::state.most_maps = 0;
      for (const int tensor : {0, 2}) {
        call.move(tensor);
        for (int i = 0; i < 2; ++i) run(FLASHMOE_ERROR_CUDA);
      }
      fake::state.most_maps = SIZE_MAX;
      fake::state.refuse_moves = false;
      run(FLASHMOE_OK);
      // Its context is taken from the thread, or goes: the driver makes no map until there is
      // another.
      call.move(0);
      fake::forget_context();
      run(FLASHMOE_OK);
      if (!fake::state.has_driver) return;  // kernels are not loaded again
      call.move(2);
      fake::reset(0);
      run(FLASHMOE_OK);
    }).join();
  }
}

// On a thread that has none of its own yet. Nothing is kept, and nothing can be read back.
void without_memory_every_call_is_planned() {
  for (const char* family : {"sm90_whole_tiles", "sm90_split_kv"}) {
    Call call(family, 1, 1024, 1024, 32, 8);
    std::thread([&] {
      out_of_memory = true;
      for (int i = 0; i < 2; ++i) {
        keep_params(sizeof(sm90::Params));
        fake::maps.clear();
        CHECK(call.run_in_workspace() == FLASHMOE_OK);
        CHECK(fake::maps.size() == (std::strcmp(family, "sm90_whole_tiles") == 0 ? 4 : 3));
        check_maps_are_of(call);
        call.move(i);
      }
      flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
      int32_t count = 0;
      CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_ERROR_INVALID_ARGUMENT);
      out_of_memory = false;
      for (int i = 0; i < 2; ++i) {
        CHECK(call.run_in_workspace() == FLASHMOE_OK);
        check_maps_are_of(call);
      }
      CHECK(fake::maps.size() == (std::strcmp(family, "sm90_whole_tiles") == 0 ? 8 : 6));
      check_read_back(plan_of(call));
    }).join();
  }
}

void each_device_has_its_own_plan_and_stays_current() {
  fake::on_launch = nullptr;
  const Call here("sm90_whole_tiles", 2, 700, 1000, 6, 2, 0);
  const Call there("sm90_whole_tiles", 2, 700, 1000, 6, 2, 1);
  const Call few_there("sm89", 2, 60, 1000, 6, 2, 1);
  CHECK(here.run() == FLASHMOE_OK && there.run() == FLASHMOE_OK);
  CHECK(fake::state.allowed_shared_bytes[1] == 230000);
  for (int current = 0; current < 2; ++current) {
    CHECK(cudaSetDevice(current) == cudaSuccess);
    for (int i = 0; i < 3; ++i) {
      CHECK(there.run(fake::stream_of(1)) == FLASHMOE_OK);
      CHECK(fake::last.device == 1 && fake::last.grid.x == 10 && fake::last.by == whoever());
      CHECK(read_back()[0].device.device_id == 1);
      CHECK(few_there.run() == FLASHMOE_OK);
      CHECK(fake::last.device == 1 && fake::last.block.x == 128 && fake::last.by == whoever());
      CHECK(here.run(fake::stream_of(0)) == FLASHMOE_OK);
      CHECK(fake::last.device == 0 && fake::last.grid.x == 48 && fake::last.by == whoever());
      int now = -1;
      CHECK(cudaGetDevice(&now) == cudaSuccess && now == current);
    }
  }
  CHECK(cudaSetDevice(0) == cudaSuccess);
  const int before = fake::state.set_devices;
  CHECK(here.run() == FLASHMOE_OK && fake::state.set_devices == before);
  fake::state.set_device = cudaErrorDevicesUnavailable;
  CHECK(there.run() == FLASHMOE_ERROR_CUDA);
  CHECK(std::strstr(flashmoe_last_error(), "device: making cuda:1 current: made-up") != nullptr);
  CHECK(fake::last_error == cudaSuccess);  // nothing is left behind for the next
  fake::state.set_device = cudaSuccess;
}

// Also where it is not the one that cudaSetDevice would make current.
void the_callers_context_stays_current() {
  const Call there("sm89", 2, 60, 1000, 6, 2, 1);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  if (fake::state.has_driver) {
    fake::use_own_context(0);
    const int before = fake::state.set_devices;
    CHECK(there.run() == FLASHMOE_OK && fake::last.device == 1);
    CHECK(fake::context_in_use() == fake::own_context_of(0));
    CHECK(fake::state.set_devices == before + 1);  // no context is made of the caller's device
  }
  CHECK(cudaSetDevice(0) == cudaSuccess);
}

// A stream of another device is an error, as the runtime has it: by the driver it would be a launch
// there.
void a_stream_of_another_device_is_refused() {
  const Call call("sm90_whole_tiles", 2, 700, 1000, 6, 2);
  CHECK(call.run(fake::stream_of(0)) == FLASHMOE_OK);
  fake::last = {};
  CHECK(call.run(fake::stream_of(1)) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strstr(flashmoe_last_error(),
                    "launching attention_forward_sm90_fp16_d64_dv64: "
                    "invalid resource handle") != nullptr);
  CHECK(fake::last.by == fake::By::kNobody && fake::last_error == cudaSuccess);
  for (void* stream : {static_cast<void*>(nullptr), static_cast<void*>(CU_STREAM_LEGACY),
                       static_cast<void*>(CU_STREAM_PER_THREAD)}) {
    CHECK(call.run(stream) == FLASHMOE_OK);
    CHECK(fake::last.by == whoever() && fake::last.stream == stream);
  }
}

// The driver makes no context: the runtime is asked for the device's.
void a_new_thread_gets_a_context() {
  const Call call("sm89", 2, 60, 1000, 6, 2);
  CHECK(call.run() == FLASHMOE_OK);
  const int loads = fake::state.loads;
  for (void* stream : {static_cast<void*>(nullptr), static_cast<void*>(fake::stream_of(0))}) {
    std::thread([&] {
      fake::forget_context();
      for (int i = 0; i < 2; ++i) {
        CHECK(call.run(stream) == FLASHMOE_OK);
        CHECK(fake::last.by == whoever() && fake::last.stream == stream);
      }
    }).join();
  }
  CHECK(fake::state.loads == loads);  // it is the context of the other threads
  if (!fake::state.has_driver) return;
  std::thread([&] {
    fake::forget_context();
    fake::state.set_device = cudaErrorDevicesUnavailable;
    fake::last = {};
    CHECK(call.run() == FLASHMOE_ERROR_CUDA);
    CHECK(std::strstr(flashmoe_last_error(), "launching attention_forward_sm89_fp16") != nullptr);
    CHECK(fake::last.by == fake::By::kNobody && fake::last_error == cudaSuccess);
    fake::state.set_device = cudaSuccess;
  }).join();
}

// With it goes what kernels were allowed in its context, and their handles, but no plan that is
// kept. Without the driver, contexts cannot be told apart.
void a_device_may_be_reset() {
  if (!fake::state.has_driver) return;
  const Call calls[] = {{"sm89", 2, 60, 1000, 6, 2},
                        {"sm90_whole_tiles", 2, 700, 1000, 6, 2},
                        {"sm89_few_rows", 1, 1, 4000, 8, 1},
                        {"sm90_split_kv", 1, 64, 8192, 8, 2}};
  const void* const functions[] = {
      reinterpret_cast<const void*>(0x89), reinterpret_cast<const void*>(0x90),
      reinterpret_cast<const void*>(0x55), reinterpret_cast<const void*>(0x92)};
  const auto run_all = [&] {
    for (int i = 0; i < 4; ++i) {
      fake::last = {};
      CHECK(calls[i].run_in_workspace() == FLASHMOE_OK);
      CHECK(fake::last.by == whoever() && fake::last.device == 0);
      CHECK(fake::last.kernel == (driver_launches ? fake::handle_of(functions[i]) : functions[i]));
    }
  };
  CHECK(cudaSetDevice(0) == cudaSuccess);
  run_all();
  // On the thread whose context goes, on one that has none, and on one whose context another makes
  // anew.
  for (int round = 0; round < 3; ++round) {
    const int loads = fake::state.loads;
    fake::state.large_clusters_allowed[0] = false;
    fake::reset(0);
    if (round == 1) {
      std::thread([&] {
        fake::forget_context();
        run_all();
      }).join();
    } else {
      if (round == 2) std::thread([] { CHECK(cudaSetDevice(0) == cudaSuccess); }).join();
      run_all();
    }
    CHECK(fake::state.large_clusters_allowed[0]);
    const int reloads = fake::state.loads - loads;
    CHECK(reloads > 0);
    run_all();
    CHECK(fake::state.loads == loads + reloads);  // once
    CHECK(read_back()[0].registers == 168);
  }
  CHECK(fake::state.stale_launches == 0);
}

// As one that the device is reset to, but that the others stay.
void contexts_of_one_device_take_turns() {
  if (!fake::state.has_driver) return;
  const Call call("sm90_whole_tiles", 2, 700, 1000, 6, 2);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(call.run() == FLASHMOE_OK);
  int loads = fake::state.loads;
  for (int round = 0; round < 3; ++round) {
    fake::use_own_context(0);
    CHECK(call.run() == FLASHMOE_OK && fake::last.by == whoever());
    CHECK(fake::context_in_use() == fake::own_context_of(0));
    CHECK((fake::state.loads > loads) == (round == 0));
    loads = fake::state.loads;
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(call.run() == FLASHMOE_OK && fake::last.by == whoever());
    CHECK(fake::state.loads == loads);
  }
}

void what_the_driver_refuses_the_runtime_decides() {
  const Call call("sm90_whole_tiles", 2, 700, 1000, 6, 2);
  CHECK(call.run() == FLASHMOE_OK);
  const int tries = fake::state.tries_by_driver;
  for (const CUresult result : {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_FAILED}) {
    fake::state.driver_launch = result;
    CHECK(call.run() == FLASHMOE_OK);
    CHECK(fake::last.by == fake::By::kRuntime && fake::last.grid.x == 48);
    CHECK(fake::last.kernel == reinterpret_cast<const void*>(0x90));
  }
  CHECK(fake::state.tries_by_driver == tries + (driver_launches ? 2 : 0));
  const flashmoe_launch before = read_back()[0];
  fake::state.runtime_launch = cudaErrorLaunchFailure;
  fake::last = {};
  const Call other("sm89", 2, 60, 1000, 6, 2);
  CHECK(other.run() == FLASHMOE_ERROR_CUDA);
  CHECK(std::strstr(flashmoe_last_error(), "launching attention_forward_sm89_fp16") != nullptr);
  CHECK(fake::last.by == fake::By::kNobody && fake::last_error == cudaSuccess);
  CHECK(std::strcmp(read_back()[0].kernel, before.kernel) == 0);
  fake::state.runtime_launch = cudaSuccess;
  fake::state.driver_launch = CUDA_SUCCESS;
  CHECK(other.run() == FLASHMOE_OK && fake::last.by == whoever());
}

// Clusters, which only the few-row family's plans have, and a start before the launch ahead has
// ended, which all have where the code was made for it.
void clusters_and_programmatic_launches_are_planned() {
  static sm89_few_rows::Params seen;
  fake::on_launch = [](const void* params) { std::memcpy(&seen, params, sizeof seen); };
  Call call("sm89_few_rows", 1, 1, 4000, 8, 1);
  const flashmoe_plan plan = plan_of(call);
  const flashmoe_launch& first = plan.launches[0];
  CHECK(first.cluster == 8 || first.cluster == 16);
  CHECK(first.grid[0] == static_cast<uint32_t>(first.cluster) && first.tile_m == 8);
  CHECK(plan.launch_count == 1 && plan.workspace_bytes == 0);
  CHECK(fake::state.allowed_shared_bytes[0] == 8208);
  CHECK(fake::state.large_clusters_allowed[0] && !fake::state.large_clusters_allowed[1]);
  for (const CUresult result : {CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE}) {
    fake::state.driver_launch = result;
    CHECK(call.run() == FLASHMOE_OK);
    CHECK(fake::last.by == (result == CUDA_SUCCESS ? whoever() : fake::By::kRuntime));
    CHECK(fake::last.cluster == static_cast<unsigned>(first.cluster));
    CHECK(fake::last.programmatic == 1);
    CHECK(fake::last.grid.x == first.grid[0] && fake::last.block.x == first.block[0]);
    CHECK(fake::last.shared_bytes + fake::kStaticSharedBytes == first.shared_bytes);
    CHECK((1 << seen.cluster_log2) == first.cluster && seen.tiles_per_head.value == 1);
    check_read_back(plan);
  }
  fake::state.driver_launch = CUDA_SUCCESS;
  fake::on_launch = nullptr;
  for (const char* family : {"sm89", "sm90"}) {
    const Call tiles(family, 2, 700, 1000, 6, 2);
    for (const CUresult result : {CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE}) {
      fake::state.driver_launch = result;
      CHECK(tiles.run() == FLASHMOE_OK);
      CHECK(fake::last.by == (result == CUDA_SUCCESS ? whoever() : fake::By::kRuntime));
      CHECK(fake::last.cluster == 0 && fake::last.programmatic == 1);
      CHECK(read_back()[0].cluster == 0);
    }
  }
  fake::state.driver_launch = CUDA_SUCCESS;
}

// Keys beyond a cluster's are shared by blocks that leave their parts in the workspace, which a
// second kernel adds up.
void parts_go_through_the_workspace() {
  static std::vector<sm89_few_rows::Params> seen;
  fake::on_launch = [](const void* params) {
    seen.push_back(*static_cast<const sm89_few_rows::Params*>(params));
  };
  Call call("sm89_few_rows", 1, 3, 1 << 20, 8, 2);
  const flashmoe_plan plan = plan_of(call);
  const flashmoe_launch& first = plan.launches[0];
  constexpr uint64_t kPart = 8 * (64 * 4 + 8);
  constexpr uint32_t kTiles = 2 * 2;  // 12 packed rows of each of 2 heads
  CHECK(first.cluster == 1 && first.grid[0] % kTiles == 0);
  const uint32_t parts = first.grid[0] / kTiles;
  CHECK(parts > 1 && plan.launch_count == 2 && plan.workspace_bytes == first.grid[0] * kPart);
  CHECK(plan.workspace_bytes <= 16 << 20);
  size_t bytes = 0;
  CHECK(flashmoe_attention_forward_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
  CHECK(bytes == plan.workspace_bytes);
  CHECK(call.run() == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL && seen.empty());
  CHECK(flashmoe_attention_forward_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
  CHECK(bytes == plan.workspace_bytes);  // of the plan that is kept
  CHECK(flashmoe_attention_forward(&call.params, workspace, bytes - 1, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(flashmoe_attention_forward(&call.params, workspace, bytes, nullptr) == FLASHMOE_OK);
  CHECK(seen.size() == 2);
  for (const sm89_few_rows::Params& params : seen) {
    CHECK(static_cast<void*>(params.parts) == workspace);
    CHECK(reinterpret_cast<char*>(params.statistics) == workspace + first.grid[0] * 8 * 64 * 4);
    CHECK(reinterpret_cast<char*>(params.statistics + first.grid[0] * 8) == workspace + bytes);
    CHECK(params.blocks_per_tile.value == parts && params.cluster_log2 == 0);
  }
  // The second one, of a block for each row, since parts are many.
  const void* function = reinterpret_cast<const void*>(0x56);
  CHECK(fake::last.kernel == (driver_launches ? fake::handle_of(function) : function));
  CHECK(fake::last.grid.x == 12 && fake::last.grid.y == 2 && fake::last.grid.z == 1);
  CHECK(fake::last.block.x == kCombineThreads && fake::last.shared_bytes == 0);
  CHECK(fake::last.cluster == 0 && fake::last.programmatic == 1);
  CHECK(std::strcmp(plan.launches[1].kernel, "attention_combine_sm89_few_rows_fp16_d64_dv64_r8") ==
        0);
  check_read_back(plan);
  // Where the first fails, the second is not launched.
  seen.clear();
  fake::state.driver_launch = CUDA_ERROR_INVALID_VALUE;
  fake::state.runtime_launch = cudaErrorInvalidValue;
  CHECK(flashmoe_attention_forward(&call.params, workspace, bytes, nullptr) == FLASHMOE_ERROR_CUDA);
  CHECK(seen.empty());
  fake::state.driver_launch = CUDA_SUCCESS;
  fake::state.runtime_launch = cudaSuccess;
  // Where the second fails, the first is what was launched.
  fake::on_launch = [](const void*) {
    fake::state.driver_launch = CUDA_ERROR_INVALID_VALUE;
    fake::state.runtime_launch = cudaErrorInvalidValue;
  };
  CHECK(flashmoe_attention_forward(&call.params, workspace, bytes, nullptr) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strstr(flashmoe_last_error(), "launching attention_combine_sm89_few_rows_fp16") !=
        nullptr);
  CHECK(fake::last_error == cudaSuccess && read_back().size() == 1);
  CHECK(std::strcmp(read_back()[0].kernel, first.kernel) == 0);
  fake::state.driver_launch = CUDA_SUCCESS;
  fake::state.runtime_launch = cudaSuccess;
  fake::on_launch = nullptr;
  CHECK(flashmoe_attention_forward(&call.params, workspace, bytes, nullptr) == FLASHMOE_OK);
  check_read_back(plan);
}

sm90::SplitParams seen_split;

// Tiles of the rows of all query heads of a KV head, whose keys several blocks take.
void split_packs_query_heads() {
  fake::on_launch = [](const void* params) { std::memcpy(&seen_split, params, sizeof seen_split); };
  Call call("sm90_split_kv", 1, 64, 8192, 8, 2);
  const flashmoe_plan plan = plan_of(call);
  constexpr uint64_t kPart = 192 * (64 * 4 + 8);
  constexpr uint64_t kTiles = 2 * 2;  // 4 groups of 16 queries of 4 heads: 2 tiles of each KV head
  CHECK(plan.workspace_bytes % (kTiles * kPart) == 0 && plan.workspace_bytes <= 16 << 20);
  const uint64_t parts = plan.workspace_bytes / (kTiles * kPart);  // of each tile as many
  const flashmoe_launch& first = plan.launches[0];
  CHECK(parts > 1 && first.grid[0] == kTiles * parts && first.grid[0] <= 132);
  CHECK(first.tile_m == 192 && first.cluster == 0 && plan.launch_count == 2);
  fake::maps.clear();
  for (int i = 0; i < 3; ++i) {
    CHECK(flashmoe_attention_forward(&call.params, workspace, plan.workspace_bytes, nullptr) ==
          FLASHMOE_OK);
    CHECK(fake::maps.size() == 3);
  }
  const fake::Map& q = fake::maps[0];
  CHECK(q.rank == 5 && q.data == call.tensors[0].data);
  CHECK((q.box == std::array<cuuint32_t, 5>{32, 4, 16, 1, 1}));
  CHECK((q.extents == std::array<cuuint64_t, 5>{64, 4, 64, 2, 1}));
  CHECK(q.steps[0] == 128 && q.steps[1] == 8 * 128 && q.steps[2] == 4 * 128);
  for (size_t i = 1; i < 3; ++i) {
    const fake::Map& map = fake::maps[i];
    CHECK(map.rank == 4 && map.data == call.tensors[i].data);
    CHECK((map.box == std::array<cuuint32_t, 5>{32, 128, 1, 1, 0}));
  }
  CHECK(seen_split.stream_k_blocks == static_cast<int32_t>(first.grid[0]) && seen_split.heads == 2);
  for (int32_t block = 0; block <= seen_split.stream_k_blocks; ++block) {
    const auto count = static_cast<int32_t>(parts);
    CHECK(seen_split.starts[block].tile == block / count);
    CHECK(seen_split.starts[block].step == 8192 / 128 * (block % count) / count);
  }
  CHECK(seen_split.tiles_per_head == 2 && seen_split.groups_per_tile == 2);
  CHECK(seen_split.packed_heads == 4 && seen_split.queries_per_group == 16);
  CHECK(seen_split.chunks == 1 && seen_split.cut_tiles == kTiles && seen_split.rows == 2 * 64);
  CHECK(static_cast<void*>(seen_split.part_outs) == workspace);
  CHECK(reinterpret_cast<char*>(seen_split.part_statistics) ==
        workspace + kTiles * parts * 192 * 64 * 4);
  CHECK(reinterpret_cast<char*>(seen_split.part_statistics + kTiles * parts * 192) ==
        workspace + plan.workspace_bytes);
  const void* function = reinterpret_cast<const void*>(0x92);
  CHECK(fake::last.kernel == (driver_launches ? fake::handle_of(function) : function));
  const int rows = combine_rows_per_block(seen_split.combine_workers_log2, 16);
  CHECK(fake::last.grid.x == static_cast<unsigned>((2 * 64 + rows - 1) / rows));
  CHECK(fake::last.grid.y == kTiles && fake::last.block.x == kCombineThreads);
  CHECK(std::strcmp(plan.launches[1].kernel, "attention_combine_sm90_split_kv_fp16_d64_dv64") == 0);
  CHECK(std::strcmp(plan.isa, "sm_90a") == 0);
  check_read_back(plan);

  // Another workspace is not another call.
  alignas(16) static char other[16];
  CHECK(flashmoe_attention_forward(&call.params, other, plan.workspace_bytes, nullptr) ==
        FLASHMOE_OK);
  CHECK(fake::maps.size() == 3 && static_cast<void*>(seen_split.part_outs) == other);

  // Heads that a view repeats cannot be packed.
  call.strides[0][2] = 0;
  CHECK(flashmoe_attention_forward(&call.params, workspace, sizeof workspace, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(call.run_in_workspace() == FLASHMOE_OK);
  CHECK(seen_split.packed_heads == 1 && seen_split.chunks == 4 && seen_split.heads == 8);
  CHECK(seen_split.queries_per_group == 64 && seen_split.q_repeats.head == 0);
  CHECK(fake::maps[3].extents[1] == 1 && fake::maps[3].extents[3] == 1);
  fake::on_launch = nullptr;
}

// Query heads of a KV head that do not divide a group's rows, or that are more.
void split_packs_any_number_of_heads() {
  fake::on_launch = [](const void* params) { std::memcpy(&seen_split, params, sizeof seen_split); };
  struct Packed {
    int64_t heads;
    int32_t packed, queries, chunks;
  };
  for (const Packed& want : {Packed{1, 1, 64, 1}, Packed{3, 3, 21, 1}, Packed{7, 7, 9, 1},
                             Packed{48, 48, 1, 1}, Packed{64, 64, 1, 1}, Packed{71, 36, 1, 2}}) {
    const Call call("sm90_split_kv", 1, 30, 4096, want.heads, 1);
    CHECK(call.run_in_workspace() == FLASHMOE_OK);
    CHECK(seen_split.packed_heads == want.packed && seen_split.chunks == want.chunks);
    CHECK(seen_split.queries_per_group == want.queries);
    for (int row = 0; row < want.packed * want.queries; ++row) {
      CHECK(row * seen_split.packed_heads_reciprocal >> 16 == row / want.packed);
    }
  }
  fake::on_launch = nullptr;
}

// Which of sm90's schedules a plan is by.
bool splits_kv(const flashmoe_plan& plan) {
  CHECK(std::strcmp(plan.family, "sm90") == 0);
  return std::strstr(plan.launches[0].kernel, "attention_forward_sm90_split_kv_") != nullptr;
}

// By estimate: few rows to `sm89_few_rows`, many to sm90's whole tiles, and those between that see
// many keys to split KV, with no more blocks that leave parts than the workspace may hold.
void calls_go_where_they_are_fastest() {
  const auto family = [](const Call& call) { return std::string(plan_of(call).family); };
  CHECK(family(Call(nullptr, 1, 1, 8192, 32, 8)) == "sm89_few_rows");
  CHECK(family(Call(nullptr, 1, 128, 128, 2, 2)) == "sm89_few_rows");
  for (const int64_t keys : {8192, 32768, 131072}) {
    for (const int64_t queries : {64, 128, 256}) {
      const Call call(nullptr, 1, queries, keys, 32, 8);
      const flashmoe_plan plan = plan_of(call);
      CHECK(splits_kv(plan));
      CHECK(plan.workspace_bytes > 0 && plan.workspace_bytes <= 16 << 20);
      CHECK(2 * plan.launches[0].grid[0] > 132);
    }
  }
  // A wave and a third of tiles: equal ranges of their steps, each block the end of a tile, and a
  // beginning.
  for (const int64_t keys : {8192, 32768}) {
    const flashmoe_plan plan = plan_of(Call(nullptr, 1, 1024, keys, 32, 8));
    CHECK(splits_kv(plan) && plan.launches[0].grid[0] == 132);
    CHECK(plan.workspace_bytes > uint64_t{132} * 192 * (64 * 4 + 8));
    CHECK(plan.workspace_bytes <= 16 << 20);
  }
  CHECK(!splits_kv(plan_of(Call(nullptr, 4, 4096, 4096, 16, 16))));
  CHECK(!splits_kv(plan_of(Call(nullptr, 1, 8192, 8192, 32, 8))));
  // One that is named takes any, without a workspace where there are tiles enough.
  CHECK(plan_of(Call("sm90_split_kv", 4, 4096, 4096, 16, 16)).workspace_bytes == 0);
  CHECK(plan_of(Call("sm90_split_kv", 1, 64, 0, 8, 2)).workspace_bytes == 0);
}

// The family whose plan takes the least time serves a call, in sm90 with its better schedule; a
// named one always does.
void the_least_time_wins() {
  constexpr const char* kNames[] = {"sm89_few_rows", "sm90_split_kv", "sm90_whole_tiles", "sm89"};
  constexpr const char* kFamilies[] = {"sm89_few_rows", "sm90", "sm90", "sm89"};
  std::array<int, 4> won = {};
  for (const int64_t heads : {1, 8, 32}) {
    for (const int64_t queries : {1, 16, 100, 700, 2048}) {
      for (const int64_t keys : {0, 64, 1000, 8192, 100000}) {
        for (const int32_t causal : {0, int32_t{FLASHMOE_CAUSAL_BOTTOM_RIGHT}}) {
          Call call(nullptr, 1, queries, keys, heads, heads % 8 == 0 ? heads / 8 : 1);
          call.params.causal = causal;
          size_t least = 0;
          std::array<double, 4> microseconds;
          for (size_t i = 0; i < 4; ++i) {
            call.params.kernel = kNames[i];
            const flashmoe_plan plan = plan_of(call);
            CHECK(std::strcmp(plan.family, kFamilies[i]) == 0 && plan.microseconds > 0);
            if (i == 1 || i == 2) CHECK(splits_kv(plan) == (i == 1));
            microseconds[i] = plan.microseconds;
            if (microseconds[i] < microseconds[least]) least = i;
          }
          const size_t best_of_sm90 = microseconds[1] <= microseconds[2] ? 1 : 2;
          call.params.kernel = "sm90";
          const flashmoe_plan of_sm90 = plan_of(call);
          CHECK(splits_kv(of_sm90) == (best_of_sm90 == 1));
          CHECK(of_sm90.microseconds == microseconds[best_of_sm90]);
          call.params.kernel = nullptr;
          const flashmoe_plan plan = plan_of(call);
          CHECK(std::strcmp(plan.family, kFamilies[least]) == 0);
          CHECK(plan.microseconds == microseconds[least]);
          ++won[least];
          // Both times are told of each of the others.
          for (const size_t i : {size_t{0}, best_of_sm90, size_t{3}}) {
            char sentence[128];
            std::snprintf(sentence, sizeof sentence,
                          "%s: takes %.1f us by its estimate, %s %.1f us\n", kFamilies[i],
                          microseconds[i], kFamilies[least], microseconds[least]);
            CHECK((std::strstr(plan.rejected, sentence) != nullptr) == (i != least));
          }
        }
      }
    }
  }
  CHECK(won[0] > 0 && won[1] > 0 && won[2] > 0);
  CHECK(won[3] == 0);  // which Hopper's own kernels always beat
}

// A kernel's full name asks for its schedule, too.
void kernels_and_schedules_are_served_by_name() {
  Call call("attention_forward_sm90_fp16_d64_dv64", 1, 64, 8192, 8, 2);
  CHECK(!splits_kv(plan_of(call)));
  call.params.kernel = "attention_forward_sm90_split_kv_fp16_d64_dv64";
  CHECK(splits_kv(plan_of(call)));
  flashmoe_plan plan = flashmoe_plan_init();
  call.params.kernel = "attention_forward_sm90_split_kv_bf16_d64_dv64";
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(),
                    "attention_forward_sm90_split_kv_fp16_d64_dv64 serves this call, not "
                    "attention_forward_sm90_split_kv_bf16_d64_dv64") != nullptr);
  call.params.kernel = "sm90_split";
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(flashmoe_last_error(),
                    "got \"sm90_split\", built in are sm89_few_rows, sm89_decode, mixed, sm90_mla, "
                    "sm90, sm90_whole_tiles, sm90_split_kv, sm89, cpu") != nullptr);
}

// With both ends, no further apart than the kernel's.
void short_windows_have_kernels_of_their_own() {
  Call call("sm90_whole_tiles", 2, 700, 1000, 6, 2);
  const auto kernel = [&] { return std::string(plan_of(call).launches[0].kernel); };
  const std::string usual = "attention_forward_sm90_fp16_d64_dv64";
  const auto set = [&](int32_t causal, uint32_t window, int64_t left, int64_t right) {
    call.params.causal = causal;
    call.params.window = window;
    call.params.window_left = left;
    call.params.window_right = right;
  };
  constexpr uint32_t kBoth = FLASHMOE_WINDOW_LEFT | FLASHMOE_WINDOW_RIGHT;
  for (const int32_t causal :
       {int32_t{FLASHMOE_CAUSAL_BOTTOM_RIGHT}, int32_t{FLASHMOE_CAUSAL_TOP_LEFT}}) {
    set(causal, FLASHMOE_WINDOW_LEFT, 128, 0);
    CHECK(kernel() == usual + "_window");
    set(causal, FLASHMOE_WINDOW_LEFT, 129, 0);
    CHECK(kernel() == usual);
    set(causal, 0, 0, 0);
    CHECK(kernel() == usual);
  }
  set(FLASHMOE_CAUSAL_NONE, kBoth, 60, 68);
  CHECK(kernel() == usual + "_window");
  set(FLASHMOE_CAUSAL_NONE, kBoth, 60, 69);
  CHECK(kernel() == usual);
  set(FLASHMOE_CAUSAL_NONE, FLASHMOE_WINDOW_LEFT, 20, 0);
  CHECK(kernel() == usual);
  set(FLASHMOE_CAUSAL_NONE, FLASHMOE_WINDOW_RIGHT, 0, 20);
  CHECK(kernel() == usual);

  // Boxes of K and V have the keys of its steps, and the usual kernel is served by its name.
  set(FLASHMOE_CAUSAL_BOTTOM_RIGHT, FLASHMOE_WINDOW_LEFT, 127, 0);
  fake::on_launch = [](const void* params) { std::memcpy(&seen90, params, sizeof seen90); };
  fake::maps.clear();
  CHECK(call.run() == FLASHMOE_OK && fake::maps.size() == 4);
  fake::on_launch = nullptr;
  CHECK(fake::maps[1].box[1] == 64 && fake::maps[2].box[1] == 64);
  CHECK(fake::maps[0].box[1] == 48 && fake::last.grid.x == 48);
  CHECK(seen90.score.left_offset == 173 && seen90.score.right_offset == 300);
  CHECK(seen90.kv_block_alignment == (64 - (192 + 300) % 64) % 64);
  call.params.kernel = usual.c_str();
  CHECK(kernel() == usual);
  const std::string window = usual + "_window";
  call.params.kernel = window.c_str();
  CHECK(kernel() == window);

  // No others by this name, but those of as few keys.
  flashmoe_plan plan = flashmoe_plan_init();
  set(FLASHMOE_CAUSAL_BOTTOM_RIGHT, 0, 0, 0);
  CHECK(flashmoe_attention_forward_plan(&call.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::strstr(flashmoe_last_error(), "serves this call, not") != nullptr);
  for (const int64_t keys : {129, 130}) {
    const Call few(window.c_str(), 1, 700, keys, 2, 2);
    CHECK((flashmoe_attention_forward_plan(&few.params, &plan) == FLASHMOE_OK) == (keys == 129));
  }
}

std::atomic<int> after_loading{0};

void a_kernel_is_loaded_once_whoever_comes_first() {
  static LoadedKernel loaded[kMaxDevices];
  static const Kernel kernel = {"made_up", reinterpret_cast<const void*>(0x77), 4096, loaded};
  const DeviceFacts facts = {90, 132, 232448, 233472, 1024, 50 << 20, 0.0};
  char sentence[256];
  int arch = 0;

  fake::state.load = cudaErrorNoKernelImageForDevice;
  CHECK(load_kernel(kernel, 1, facts, &arch, Reason(sentence)) == FLASHMOE_ERROR_ARCH_NOT_BUILT);
  CHECK(std::strstr(sentence, "no code for compute capability 9.0 of cuda:1") == sentence);
  fake::state.load = cudaErrorMemoryAllocation;
  CHECK(load_kernel(kernel, 1, facts, &arch, Reason(sentence)) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strcmp(sentence, "loading made_up on cuda:1: made-up error") == 0);
  CHECK(load_kernel(kernel, 1, facts, &arch, Reason()) == FLASHMOE_ERROR_CUDA);
  fake::state.load = cudaSuccess;
  const auto refuse = [](const Kernel&, int, const DeviceFacts&, const cudaFuncAttributes&, bool) {
    return cudaErrorNotPermitted;
  };
  CHECK(load_kernel(kernel, 1, facts, &arch, Reason(sentence), refuse) == FLASHMOE_ERROR_CUDA);
  CHECK(fake::last_error == cudaSuccess && loaded[1].arch == 0);

  const int before = fake::state.loads;
  const int loads_each = fake::state.has_driver && fake::state.has_kernel_handles ? 2 : 1;
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      int found = 0;
      const auto count = [](const Kernel& which, int device, const DeviceFacts& of_device,
                            const cudaFuncAttributes& attributes, bool first) {
        int current = -1;
        cudaGetDevice(&current);
        CHECK(first && &which == &kernel && device == 1 && current == 1 &&
              attributes.numRegs == 168);
        CHECK(of_device.multiprocessors == 132);
        ++after_loading;
        return cudaSuccess;
      };
      CHECK(load_kernel(kernel, 1, facts, &found, Reason(), count) == FLASHMOE_OK);
      CHECK(found == 90);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(fake::state.loads == before + loads_each && after_loading == 1);
  const void* handle = loaded[1].handle;
  CHECK(handle == (driver_launches ? fake::handle_of(kernel.function) : nullptr));
  CHECK(loaded[0].arch == 0);
}

void empty_problems_have_plans() {
  for (const Call* call : {new Call("sm90_whole_tiles", 0, 700, 1000, 6, 2),
                           new Call("sm90_whole_tiles", 2, 0, 1000, 6, 2)}) {
    for (const char* kernel : {"sm89_few_rows", "sm89", "sm90_whole_tiles", "sm90_split_kv"}) {
      flashmoe_attention_forward_params params = call->params;
      params.kernel = kernel;
      params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
      fake::last = {};
      CHECK(flashmoe_attention_forward(&params, nullptr, 0, nullptr) == FLASHMOE_OK);
      CHECK(fake::last.by == fake::By::kNobody);
    }
    delete call;
  }
}

}  // namespace
}  // namespace flashmoe

int main(int argc, char** argv) {
  using namespace flashmoe;
  const std::string without = argc > 1 ? argv[1] : "";
  fake::state.has_driver = without != "no-driver";
  fake::state.has_kernel_handles = without != "no-handles";
  fake::state.handles_share_attributes = without != "no-shared-attributes";
  fake::state.has_map_moves = without != "no-map-moves";
  driver_launches = without.empty() || without == "no-map-moves";
  the_plan_is_what_the_launch_gets();
  ragged_batches_have_kernels_of_their_own();
  few_queries_share_their_keys();
  tiles_have_several_heads();
  values_in_keys_are_read_with_them();
  masks_and_offsets_of_sequences();
  prompts_beside_decoding_are_parts();
  sm90_cuts_boxes_at_sequences();
  loose_bounds_cost_little();
  sm90_encodes_its_maps_once();
  a_call_at_other_addresses_moves_maps();
  no_map_is_of_another_call();
  without_memory_every_call_is_planned();
  each_device_has_its_own_plan_and_stays_current();
  the_callers_context_stays_current();
  a_stream_of_another_device_is_refused();
  a_new_thread_gets_a_context();
  what_the_driver_refuses_the_runtime_decides();
  clusters_and_programmatic_launches_are_planned();
  parts_go_through_the_workspace();
  a_partial_is_merged_in_behind_any_family();
  split_packs_query_heads();
  split_packs_any_number_of_heads();
  calls_go_where_they_are_fastest();
  the_least_time_wins();
  kernels_and_schedules_are_served_by_name();
  short_windows_have_kernels_of_their_own();
  a_device_may_be_reset();
  contexts_of_one_device_take_turns();
  models_are_planned_for_and_run_nothing();
  a_kernel_is_loaded_once_whoever_comes_first();
  empty_problems_have_plans();
  return 0;
}
