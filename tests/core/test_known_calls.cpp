// Dispatch among kernel families, and the calls that a thread keeps planned (core/known_calls.h): on
// made-up families, so that it needs no GPU. Whatever was called before, a call comes to what it
// comes to on a thread that has called nothing yet.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

static std::atomic<bool> out_of_memory{false};

extern "C" {

void* __real_aligned_alloc(size_t alignment, size_t bytes);

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return out_of_memory ? nullptr : __real_aligned_alloc(alignment, bytes);
}

}  // extern "C"

namespace flashmoe {
namespace {

// ---- families ------------------------------------------------------------------------------------

std::atomic<int> plans{0};

struct Launched {
  int count = 0;
  const AttentionFamily* family = nullptr;
  AttentionProblem problem = {};
  AttentionPlan plan = {};
  std::string kernel;  // problem.kernel, while the caller's text was there
};
thread_local Launched launched;

template <const AttentionFamily* kFamily>
flashmoe_status launch(const AttentionProblem& problem, const AttentionPlan& plan, void*, void*) {
  launched = {launched.count + 1, kFamily, problem, plan,
              problem.kernel != nullptr ? problem.kernel : ""};
  return FLASHMOE_OK;
}

void fill(const char* family, const AttentionProblem& problem, AttentionPlan* plan) {
  ++plans;
  std::snprintf(plan->info.kernel, sizeof plan->info.kernel, "attention_forward_%s_%s", family,
                dtype_name(problem.dtype));
  plan->info.tile_q = 10 + problem.device.device_id;  // devices differ
  plan->info.grid[0] = static_cast<uint32_t>(problem.seq_q + problem.q_strides.seq);
  plan->tiles_per_head = static_cast<int32_t>(problem.seq_q);
}

flashmoe_status plan_sm90(const AttentionProblem& problem, AttentionPlan* plan,
                          const Reason& reason) {
  if (problem.device.device_id == 2) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:%d does not exist",
                         problem.device.device_id);
  }
  if (!problem.named && problem.seq_q < 5) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%lld rows are few",
                         static_cast<long long>(problem.seq_q));
  }
  if (problem.q_strides.seq <= 0) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "stride %lld",
                         static_cast<long long>(problem.q_strides.seq));
  }
  fill("sm90", problem, plan);
  return FLASHMOE_OK;
}

flashmoe_status plan_sm89(const AttentionProblem& problem, AttentionPlan* plan,
                          const Reason& reason) {
  if (problem.device.device_id == 2) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:%d does not exist",
                         problem.device.device_id);
  }
  if (problem.dim > 128) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "dim %lld",
                         static_cast<long long>(problem.dim));
  }
  fill("sm89", problem, plan);
  return FLASHMOE_OK;
}

flashmoe_status plan_short(const AttentionProblem&, AttentionPlan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}

flashmoe_status plan_cpu(const AttentionProblem& problem, AttentionPlan* plan, const Reason&) {
  fill("cpu", problem, plan);
  return FLASHMOE_OK;
}

}  // namespace

const AttentionFamily kShortAttention = {"short", FLASHMOE_DEVICE_CUDA, plan_short,
                                         launch<&kShortAttention>};
const AttentionFamily kSplitAttention = {"split", FLASHMOE_DEVICE_CUDA, plan_short,
                                         launch<&kSplitAttention>};
const AttentionFamily kSm90Attention = {"sm90", FLASHMOE_DEVICE_CUDA, plan_sm90,
                                        launch<&kSm90Attention>};
const AttentionFamily kSm89Attention = {"sm89", FLASHMOE_DEVICE_CUDA, plan_sm89,
                                        launch<&kSm89Attention>};
const AttentionFamily kCpuAttention = {"cpu", FLASHMOE_DEVICE_CPU, plan_cpu,
                                       launch<&kCpuAttention>};

namespace {

// ---- calls ---------------------------------------------------------------------------------------

constexpr uintptr_t kData = uintptr_t{1} << 40;  // never read

struct Tensor {
  int64_t shape[4] = {};
  int64_t strides[4] = {};
  flashmoe_tensor view = {};
};

// A contiguous call on a GPU, whose parts a test may change.
struct Call {
  Tensor q, k, v, out, lse;
  std::string kernel;
  bool wants_lse = false;
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();

  explicit Call(int64_t seq_q = 8, int64_t seq_k = 16, int64_t heads = 2, int64_t dim = 64) {
    set(&q, {2, seq_q, heads, dim}, 1);
    set(&k, {2, seq_k, heads, dim}, 2);
    set(&v, {2, seq_k, heads, dim}, 3);
    set(&out, {2, seq_q, heads, dim}, 4);
    set(&lse, {2, heads, seq_q}, 5);
    lse.view.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  }

  static void set(Tensor* tensor, const std::vector<int64_t>& shape, uintptr_t place) {
    int64_t step = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
      tensor->shape[axis] = shape[axis];
      tensor->strides[axis] = step;
      step *= shape[axis];
    }
    tensor->view.data = reinterpret_cast<void*>(kData + (place << 32));
    tensor->view.device = {FLASHMOE_DEVICE_CUDA, 0};
    tensor->view.ndim = static_cast<int32_t>(shape.size());
    tensor->view.dtype = {FLASHMOE_DTYPE_FLOAT, 16, 1};
  }

  std::vector<Tensor*> tensors() { return {&q, &k, &v, &out, &lse}; }

  void move(ptrdiff_t bytes) {
    for (Tensor* tensor : tensors()) {
      tensor->view.data = static_cast<char*>(tensor->view.data) + bytes;
    }
  }

  // Copies of a Call are copies: nothing points into another before this.
  const flashmoe_attention_forward_params* ready(bool contiguous = false) {
    for (Tensor* tensor : tensors()) {
      tensor->view.shape = tensor->shape;
      tensor->view.strides = contiguous ? nullptr : tensor->strides;
    }
    params.q = &q.view;
    params.k = &k.view;
    params.v = &v.view;
    params.out = &out.view;
    params.lse = wants_lse ? &lse.view : nullptr;
    params.kernel = kernel.empty() ? nullptr : kernel.c_str();
    return &params;
  }
};

flashmoe_status forward(const flashmoe_attention_forward_params* params) {
  return flashmoe_attention_forward(params, nullptr, 0, nullptr);
}

std::string failure(Call call) {
  const int before = launched.count;
  CHECK(forward(call.ready()) != FLASHMOE_OK);
  CHECK(launched.count == before);
  return flashmoe_last_error();
}

// Calls it and says whether the families were asked for a plan.
bool planned(Call call) {
  const int before = plans;
  const int launches = launched.count;
  CHECK(forward(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == launches + 1);
  return plans != before;
}

bool same(const RowStrides& a, const RowStrides& b) {
  return a.batch == b.batch && a.seq == b.seq && a.head == b.head;
}

bool same(const AttentionProblem& a, const AttentionProblem& b) {
  return a.dtype == b.dtype && a.device.device_type == b.device.device_type &&
         a.device.device_id == b.device.device_id && a.q == b.q && a.k == b.k && a.v == b.v &&
         a.out == b.out && a.lse == b.lse && same(a.q_strides, b.q_strides) &&
         same(a.k_strides, b.k_strides) && same(a.v_strides, b.v_strides) &&
         same(a.out_strides, b.out_strides) && same(a.lse_strides, b.lse_strides) &&
         a.batch == b.batch && a.seq_q == b.seq_q && a.seq_k == b.seq_k && a.heads_q == b.heads_q &&
         a.heads_kv == b.heads_kv && a.dim == b.dim && a.dim_v == b.dim_v && a.named == b.named &&
         (a.kernel == nullptr) == (b.kernel == nullptr) && a.scale == b.scale &&
         a.softcap == b.softcap && a.cap_ratio == b.cap_ratio && a.bounded_left == b.bounded_left &&
         a.bounded_right == b.bounded_right && a.left_offset == b.left_offset &&
         a.right_offset == b.right_offset;
}

bool same(const AttentionPlan& a, const AttentionPlan& b) {
  return std::strcmp(a.info.kernel, b.info.kernel) == 0 && a.info.tile_q == b.info.tile_q &&
         a.info.grid[0] == b.info.grid[0] && a.tiles_per_head == b.tiles_per_head;
}

// ---- tests ---------------------------------------------------------------------------------------

void a_call_is_planned_once() {
  Call call(100, 200);
  CHECK(planned(call));
  CHECK(launched.family == &kSm90Attention);
  CHECK(!planned(call));
  call.move(1 << 20);
  CHECK(!planned(call));
  CHECK(launched.problem.q == call.q.view.data && launched.problem.k == call.k.view.data);
  CHECK(launched.problem.v == call.v.view.data && launched.problem.out == call.out.view.data);
  CHECK(launched.problem.lse == nullptr);
  call.wants_lse = true;
  CHECK(planned(call));
  call.move(1 << 20);
  CHECK(!planned(call));
  CHECK(launched.problem.lse == call.lse.view.data);
  call.wants_lse = false;
  CHECK(!planned(call));
  CHECK(launched.problem.lse == nullptr);
}

void alternating_shapes_stay_known() {
  std::vector<Call> calls;
  for (int i = 0; i < 8; ++i) calls.emplace_back(300 + i, 200);
  for (const Call& call : calls) CHECK(planned(call));
  for (int round = 0; round < 3; ++round) {
    for (const Call& call : calls) {
      CHECK(!planned(call));
      CHECK(launched.problem.seq_q == call.q.shape[1]);
    }
  }
  CHECK(planned(Call(400, 200)));  // in the place of the first
  CHECK(planned(calls[0]));
  CHECK(launched.problem.seq_q == 300);
  CHECK(!planned(calls[7]));
}

// One after the other, each on top of a call that was planned.
void what_differs_is_planned_anew() {
  const std::vector<std::function<void(Call*)>> changes = {
      [](Call* c) { c->params.causal = FLASHMOE_CAUSAL_TOP_LEFT; },
      [](Call* c) { c->params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT; },
      [](Call* c) { c->params.scale = 0.5f; },
      [](Call* c) { c->params.softcap = 30.0f; },
      [](Call* c) { c->params.window = FLASHMOE_WINDOW_LEFT; },
      [](Call* c) { c->params.window = FLASHMOE_WINDOW_LEFT, c->params.window_left = 9; },
      [](Call* c) { c->params.window = FLASHMOE_WINDOW_RIGHT, c->params.window_right = 9; },
      [](Call* c) { c->kernel = "sm89"; },
      [](Call* c) { c->kernel = "sm90"; },
      [](Call* c) { c->kernel = "attention_forward_sm89_fp16"; },
      [](Call* c) { c->q.strides[1] += 8; },
      [](Call* c) { c->k.strides[0] = 0; },
      [](Call* c) { c->v.strides[2] += 64; },
      [](Call* c) { c->out.strides[0] *= 2; },
      [](Call* c) { c->params.layout = FLASHMOE_LAYOUT_BHSD; },
      [](Call* c) {
        for (Tensor* t : c->tensors()) t->view.device.device_id = 1;
      },
      [](Call* c) {
        for (Tensor* t : {&c->q, &c->k, &c->v, &c->out}) t->view.dtype.code = FLASHMOE_DTYPE_BFLOAT;
      },
  };
  for (const auto& change : changes) {
    const Call plain(16, 16, 16, 64);  // of which the layouts agree in shape
    planned(plain);
    CHECK(!planned(plain));
    Call changed = plain;
    change(&changed);
    CHECK(planned(changed));
    CHECK(!planned(changed));
    CHECK(!planned(plain));
  }
}

void addresses_are_checked_every_time() {
  Call call(100, 200);
  call.wants_lse = true;
  planned(call);
  CHECK(!planned(call));
  const char* const names[] = {"q", "k", "v", "out", "lse"};
  for (int i = 0; i < 5; ++i) {
    Call bad = call;
    flashmoe_tensor& view = bad.tensors()[static_cast<size_t>(i)]->view;
    view.data = static_cast<char*>(view.data) + 2;
    CHECK(failure(bad).find(std::string(names[i]) + ": its data begins at address") == 0);
    view.data = nullptr;
    CHECK(failure(bad).find(std::string(names[i]) + ": its data is a null pointer") == 0);
    bad = call;
    bad.tensors()[static_cast<size_t>(i)]->view.byte_offset = 2;
    CHECK(failure(bad).find(std::string(names[i]) + ": its data begins at address") == 0);
    bad.tensors()[static_cast<size_t>(i)]->view.byte_offset = UINT64_MAX;
    CHECK(failure(bad).find(std::string(names[i]) + ": its byte_offset") == 0);
    bad.tensors()[static_cast<size_t>(i)]->view.byte_offset = 32;  // right, but not as before
    CHECK(planned(bad));
    CHECK(planned(bad));
  }
  CHECK(!planned(call));
  Call shapeless = call;
  shapeless.ready();
  shapeless.k.view.shape = nullptr;
  CHECK(forward(&shapeless.params) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::strstr(flashmoe_last_error(), "k: its shape is a null pointer") != nullptr);
  CHECK(forward(nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  call.params.struct_size = 4096;
  CHECK(failure(call).find("struct_size") != std::string::npos);
}

// Of a call that is known and of one that never is.
void outputs_may_not_come_to_overlap() {
  const char* const names[] = {"q", "k", "v", "out", "lse"};
  for (const int32_t type : {FLASHMOE_DEVICE_CUDA, FLASHMOE_DEVICE_CPU}) {
    Call call(100, 200);
    call.wants_lse = true;
    for (Tensor* tensor : call.tensors()) tensor->view.device = {type, 0};
    planned(call);
    CHECK(planned(call) == (type == FLASHMOE_DEVICE_CPU));
    for (size_t i = 3; i < 5; ++i) {
      for (size_t j = 0; j < 5; ++j) {
        if (i == j) continue;
        const int64_t own = i == 3 ? 2 * 100 * 2 * 64 * 2 : 2 * 2 * 100 * 4;
        const int64_t others = j == 4 ? 2 * 2 * 100 * 4 : 2 * (j == 1 || j == 2 ? 200 : 100) * 256;
        const std::string sentence =
            std::string(names[std::max(i, j)]) + ": it shares memory with " +
            names[std::min(i, j)] +
            ", accepted is memory that overlaps no other tensor of the call";
        char* const there = static_cast<char*>(call.tensors()[j]->view.data);
        for (const int64_t offset : {int64_t{0}, others - 16, 16 - own}) {
          Call bad = call;
          bad.tensors()[i]->view.data = there + offset;
          CHECK(failure(bad) == sentence);
        }
        for (const int64_t offset : {others, -own}) {
          Call beside = call;
          beside.tensors()[i]->view.data = there + offset;
          CHECK(planned(beside) == (type == FLASHMOE_DEVICE_CPU));
        }
      }
    }
  }
}

// q, k, v and out as slices of one tensor, forwards and, from the last row on, backwards.
void slices_of_one_tensor_stay_known() {
  Call call(16, 16, 2, 64);
  char* const data = static_cast<char*>(call.q.view.data);
  Tensor* const slices[] = {&call.q, &call.k, &call.v, &call.out};
  for (int i = 0; i < 4; ++i) {
    slices[i]->strides[1] = 4 * 128;
    slices[i]->strides[0] = 16 * 4 * 128;
    slices[i]->view.data = data + i * 256;
  }
  CHECK(planned(call));
  CHECK(!planned(call));
  CHECK(launched.problem.out == call.out.view.data);
  Call bad = call;
  bad.out.view.data = data + 256;
  CHECK(failure(bad).find("out: it shares memory with k") == 0);
  bad.out.view.data = data + 3 * 256 - 16;
  CHECK(failure(bad).find("out: it shares memory with v") == 0);
  for (Tensor* slice : {&call.k, &call.v, &call.out}) {
    slice->view.data = static_cast<char*>(slice->view.data) + 31 * 4 * 256;
    slice->strides[1] *= -1;
    slice->strides[0] *= -1;
  }
  CHECK(planned(call));
  CHECK(!planned(call));
  CHECK(launched.problem.out_strides.seq == -4 * 128);
  call.out.view.data = call.v.view.data;
  CHECK(failure(call).find("out: it shares memory with v") == 0);
}

void inputs_may_overlap() {
  Call call(100, 100);
  call.k.view.data = call.v.view.data = call.q.view.data;
  CHECK(planned(call));
  CHECK(!planned(call));
}

void absent_strides_are_not_present_ones() {
  Call call(100, 200);
  const int before = plans;
  CHECK(forward(call.ready(true)) == FLASHMOE_OK);
  CHECK(plans == before + 1);
  CHECK(forward(call.ready(true)) == FLASHMOE_OK);
  CHECK(plans == before + 1);
  call.q.strides[1] += 8;  // not looked at
  CHECK(forward(call.ready(true)) == FLASHMOE_OK);
  CHECK(plans == before + 1);
  CHECK(launched.problem.q_strides.seq == 128);
  CHECK(forward(call.ready(false)) == FLASHMOE_OK);
  CHECK(plans == before + 2);
  CHECK(launched.problem.q_strides.seq == 136);
}

// What lies behind an older caller's struct is not its own.
void older_callers_give_no_window() {
  Call call(100, 200);
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 9;
  Call old = call;
  old.params.struct_size = offsetof(flashmoe_attention_forward_params, window);
  for (int i = 0; i < 2; ++i) {
    CHECK(planned(old));
    CHECK(!launched.problem.bounded_left);
  }
  CHECK(planned(call));
  CHECK(launched.problem.bounded_left);
  CHECK(planned(old));
  CHECK(!launched.problem.bounded_left);
  CHECK(!planned(call));
}

void failures_are_not_kept() {
  Call call(100, 200);
  call.q.view.device.device_id = 1;
  CHECK(failure(call).find("k: it is on cuda:0 but q is on cuda:1") == 0);
  CHECK(failure(call).find("k: it is on cuda:0 but q is on cuda:1") == 0);
  Call nowhere(100, 200);
  for (Tensor* tensor : nowhere.tensors()) tensor->view.device.device_id = 2;
  for (int i = 0; i < 3; ++i) CHECK(failure(nowhere) == "sm89: device cuda:2 does not exist");
}

void the_sentence_is_that_of_the_least_particular_family() {
  Call call(3, 200);
  CHECK(planned(call));
  CHECK(launched.family == &kSm89Attention);
  call.kernel = "sm90";
  CHECK(planned(call));
  CHECK(launched.family == &kSm90Attention);
  call.q.strides[1] = 0;
  CHECK(failure(call) == "kernel: cannot be served: sm90: stride 0");
  call.kernel = "cpu";
  CHECK(failure(call) ==
        "kernel: cannot be served: cpu: the tensors are on cuda:0, it computes on the CPU");
  call.kernel = "attention_forward_sm89_bf16";
  CHECK(failure(call) ==
        "kernel: cannot be served: sm89: attention_forward_sm89_fp16 serves this call, not "
        "attention_forward_sm89_bf16");
  call.kernel = "sm1";
  CHECK(failure(call) == "kernel: got \"sm1\", built in are short, split, sm90, sm89, cpu");
  CHECK(failure(Call(3, 200, 2, 136)) == "sm89: dim 136");

  flashmoe_attention_plan plan = flashmoe_attention_plan_init();
  Call few(3, 200);
  CHECK(flashmoe_attention_forward_plan(few.ready(), &plan) == FLASHMOE_OK);
  CHECK(std::strcmp(plan.family, "sm89") == 0);
  CHECK(std::strcmp(
            plan.rejected,
            "short: not here\nsplit: not here\nsm90: 3 rows are few\ncpu: sm89 comes first\n") ==
        0);
}

void fp32_is_for_the_cpu() {
  Call call(100, 200);
  for (Tensor* t : {&call.q, &call.k, &call.v, &call.out}) {
    t->view.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  }
  for (const char* kernel : {"", "sm89", "cpu", "attention_forward_sm90_fp32"}) {
    call.kernel = kernel;
    CHECK(forward(call.ready()) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(failure(call) ==
          "q: it is on cuda:0 and of dtype fp32, accepted on a GPU are fp16 and bf16, on the CPU "
          "also fp32");
  }
  call.kernel.clear();
  for (Tensor* tensor : call.tensors()) tensor->view.device = {FLASHMOE_DEVICE_CPU, 0};
  CHECK(planned(call));
}

void a_kernels_name_is_the_callers() {
  Call call(100, 200);
  call.kernel = "attention_forward_sm89_fp16";
  CHECK(planned(call));
  {
    Call other = call;  // whose text lies elsewhere, and goes
    CHECK(!planned(other));
    CHECK(launched.kernel == other.kernel);
  }
  CHECK(!planned(call));
  CHECK(launched.kernel == call.kernel);
  Call alike = call;
  alike.kernel = "attention_forward_sm90_fp16";
  CHECK(planned(alike));
  CHECK(launched.family == &kSm90Attention);
  call.kernel = std::string(100, 'x');  // longer than any kernel's
  for (int i = 0; i < 2; ++i) CHECK(failure(call).find("kernel: got \"xxxx") == 0);
  // Cut between characters, and made of characters.
  call.kernel = "x";
  std::string shown = "kernel: got \"x";
  for (int i = 0; i < 40; ++i) call.kernel += "\xc3\xa9";
  for (int i = 0; i < 31; ++i) shown += "\xc3\xa9";
  CHECK(failure(call).find(shown + "\", built in") == 0);
  for (const char* broken : {"sm\xff", "sm\x80", "sm\xc0\xed\xa0", "sm\xf8\xf0\x80\xf4\xa0\xa9"}) {
    call.kernel = broken;
    CHECK(failure(call).find("kernel: got \"sm?") == 0);
    CHECK(failure(call).find_first_of("\x80\xa0\xc0\xed\xf0\xf4\xf8\xff") == std::string::npos);
  }
  call.kernel.clear();
  planned(call);
  call.ready();
  const int before = plans;
  call.params.kernel = "";
  CHECK(forward(&call.params) == FLASHMOE_OK && plans == before);  // no name, in other words
}

// Those that bend no logit: kernels multiply a softcap by log2(e), and divide by it.
void softcaps_that_change_nothing_are_left_out() {
  struct Case {
    float softcap, scale;
    bool kept;
  };
  const Case cases[] = {{50.0f, 1.0f, true},   {9e37f, 4.0f, true},   {2e38f, 4.0f, false},
                        {3e38f, 4.0f, false},  {1e37f, 1e-3f, false}, {1e-45f, 1e38f, true},
                        {1e30f, 1e-30f, false}};
  for (const Case& one : cases) {
    Call call(100, 200);
    call.params.softcap = one.softcap;
    call.params.scale = one.scale;
    CHECK(forward(call.ready()) == FLASHMOE_OK);
    CHECK(launched.problem.softcap == (one.kept ? one.softcap : 0.0f));
    CHECK((launched.problem.cap_ratio > 0.0f) == one.kept);
    CHECK(std::isfinite(launched.problem.cap_ratio));
  }
}

void calls_on_the_cpu_are_planned_every_time() {
  Call call(100, 200);
  for (Tensor* tensor : call.tensors()) tensor->view.device = {FLASHMOE_DEVICE_CPU, 0};
  for (int i = 0; i < 3; ++i) {
    CHECK(planned(call));
    CHECK(launched.family == &kCpuAttention);
  }
}

void empty_calls_launch_nothing() {
  Call call(0, 200);
  const int before = launched.count;
  for (int i = 0; i < 3; ++i) CHECK(forward(call.ready()) == FLASHMOE_OK);
  call.q.view.data = nullptr;
  for (int i = 0; i < 3; ++i) CHECK(forward(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == before);
  Call keyless(100, 0);
  CHECK(forward(keyless.ready()) == FLASHMOE_OK);
  keyless.k.view.data = keyless.v.view.data = nullptr;
  for (int i = 0; i < 2; ++i) {
    CHECK(forward(keyless.ready()) == FLASHMOE_OK);
    CHECK(launched.problem.k == nullptr && launched.problem.v == nullptr);
  }
}

// A callback that calls the library while a call is under way must not change it.
void a_callback_may_call(int32_t level) {
  struct Inner {
    Call call{100, 200};
    int depth = 0;
    int32_t level;
  } inner;
  inner.level = level;
  inner.call.move(1 << 21);
  const auto reenter = [](int32_t, const char*, void* user) {
    Inner& self = *static_cast<Inner*>(user);
    if (self.depth++ == 0) CHECK(forward(self.call.ready()) == FLASHMOE_OK);
  };
  Call call(100, 200);
  planned(call);
  CHECK(flashmoe_set_log(level, reenter, &inner) == FLASHMOE_OK);
  CHECK(forward(call.ready()) == FLASHMOE_OK);
  CHECK(inner.depth > 1);
  CHECK(launched.problem.q == call.q.view.data && launched.problem.out == call.out.view.data);
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
}

void callbacks_may_call() {
  a_callback_may_call(FLASHMOE_LOG_INFO);
  a_callback_may_call(FLASHMOE_LOG_DEBUG);
}

// Any sequence of calls, right and wrong, against the same calls on threads that know none.
void random_calls_come_to_what_they_come_to_alone() {
  std::mt19937 random(0);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto pick = [&](std::vector<Tensor*> from) {
    return from[static_cast<size_t>(below(static_cast<int>(from.size())))];
  };
  int known = 0;
  int failed = 0;
  for (int i = 0; i < 6000; ++i) {
    Call call(below(2) == 0 ? 100 : 3, 16 + 8 * below(2), 2, 64);
    call.wants_lse = below(3) == 0;
    call.move(16 * below(4));
    if (below(4) == 0) call.params.causal = below(4);
    if (below(4) == 0)
      call.kernel =
          std::vector<std::string>{"sm89", "sm90", "cpu", "sm",
                                   "attention_forward_sm90_fp16"}[static_cast<size_t>(below(5))];
    switch (below(12)) {
      case 0: pick(call.tensors())->strides[below(3)] += 8; break;
      case 1: pick(call.tensors())->strides[below(3)] *= -1; break;
      case 2: pick(call.tensors())->shape[below(4)] += 1; break;
      case 3: pick(call.tensors())->view.data = reinterpret_cast<void*>(kData + 8); break;
      case 4: pick(call.tensors())->view.data = nullptr; break;
      case 5: pick(call.tensors())->view.device.device_id = 1; break;
      case 6: pick(call.tensors())->view.byte_offset = 16; break;
      case 7: pick(call.tensors())->view.ndim = 3; break;
      case 8: {
        const int32_t device = 1 + below(2);
        for (Tensor* tensor : call.tensors()) tensor->view.device.device_id = device;
        break;
      }
      default: break;
    }
    if (below(8) == 0) call.params.window = static_cast<uint32_t>(below(4));
    if (below(8) == 0) call.params.scale = below(2) == 0 ? 0.25f : -1.0f;
    const bool contiguous = below(6) == 0;

    flashmoe_status want = FLASHMOE_OK;
    Launched alone;
    std::string sentence;
    const int none = plans;
    std::thread([&] {
      want = forward(call.ready(contiguous));
      alone = launched;
      sentence = flashmoe_last_error();
    }).join();
    CHECK(plans != none || want != FLASHMOE_OK);
    const int before = plans;
    const int launches = launched.count;
    CHECK(forward(call.ready(contiguous)) == want);
    CHECK(launched.count - launches == alone.count);
    if (want != FLASHMOE_OK) {
      CHECK(sentence == flashmoe_last_error());
      ++failed;
      continue;
    }
    known += plans == before ? 1 : 0;
    if (alone.count == 0) continue;
    CHECK(launched.family == alone.family && launched.kernel == alone.kernel);
    CHECK(same(launched.problem, alone.problem));
    CHECK(same(launched.plan, alone.plan));
  }
  CHECK(known > 200 && failed > 500);
}

void threads_know_their_own_calls() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      Call calls[] = {Call(100 + i, 200), Call(3, 200 + i), Call(100, 200)};
      for (int round = 0; round < 2000; ++round) {
        Call& call = calls[round % 3];
        call.move(16 * (i + 1));
        CHECK(forward(call.ready()) == FLASHMOE_OK);
        CHECK(launched.problem.q == call.q.view.data && launched.problem.out == call.out.view.data);
        CHECK(launched.problem.seq_q == call.q.shape[1]);
        CHECK(launched.family == (round % 3 == 1 ? &kSm89Attention : &kSm90Attention));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void without_memory_calls_are_planned_every_time() {
  const Call call(100, 200);
  out_of_memory = true;
  for (int i = 0; i < 3; ++i) CHECK(planned(call));
  out_of_memory = false;
  CHECK(planned(call));
  CHECK(!planned(call));
}

void reasons_are_cut_and_need_no_reader() {
  char text[8];
  CHECK(Reason(text).refuse(FLASHMOE_ERROR_CUDA, "%d%d", 12345, 67890) == FLASHMOE_ERROR_CUDA);
  CHECK(std::strcmp(text, "1234567") == 0);
  CHECK(Reason().refuse(FLASHMOE_ERROR_UNSUPPORTED, "%d", 1) == FLASHMOE_ERROR_UNSUPPORTED);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  void (*const tests[])() = {
      a_call_is_planned_once,
      alternating_shapes_stay_known,
      what_differs_is_planned_anew,
      addresses_are_checked_every_time,
      outputs_may_not_come_to_overlap,
      slices_of_one_tensor_stay_known,
      inputs_may_overlap,
      absent_strides_are_not_present_ones,
      older_callers_give_no_window,
      failures_are_not_kept,
      the_sentence_is_that_of_the_least_particular_family,
      fp32_is_for_the_cpu,
      a_kernels_name_is_the_callers,
      softcaps_that_change_nothing_are_left_out,
      calls_on_the_cpu_are_planned_every_time,
      empty_calls_launch_nothing,
      callbacks_may_call,
      random_calls_come_to_what_they_come_to_alone,
      threads_know_their_own_calls,
      without_memory_calls_are_planned_every_time,
      reasons_are_cut_and_need_no_reader,
  };
  // Each on a thread of its own, which knows no call yet.
  for (const auto test : tests) std::thread(test).join();
  return 0;
}
