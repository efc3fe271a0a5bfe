// The plan of a call: its operation count against a count of the visible pairs, its agreement with
// the launch, and that planning reads no data.
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

struct Call {
  int64_t batch, seq_q, seq_k, heads_q, heads_kv, dim, dim_v;
  int32_t causal;
  int64_t q_shape[4], k_shape[4], v_shape[4], out_shape[4];
  flashmoe_tensor q, k, v, out;
  flashmoe_attention_forward_params params;
};

flashmoe_tensor cpu_tensor(void* data, const int64_t* shape) {
  flashmoe_tensor tensor = {};
  tensor.data = data;
  tensor.device = {FLASHMOE_DEVICE_CPU, 0};
  tensor.ndim = 4;
  tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  tensor.shape = shape;
  return tensor;
}

// Fills in what the extents imply. `data` is shared by all tensors: planning must not read it.
void finish(Call* c, void* data) {
  const auto set = [](int64_t* shape, int64_t batch, int64_t seq, int64_t heads, int64_t dim) {
    shape[0] = batch, shape[1] = seq, shape[2] = heads, shape[3] = dim;
  };
  set(c->q_shape, c->batch, c->seq_q, c->heads_q, c->dim);
  set(c->k_shape, c->batch, c->seq_k, c->heads_kv, c->dim);
  set(c->v_shape, c->batch, c->seq_k, c->heads_kv, c->dim_v);
  set(c->out_shape, c->batch, c->seq_q, c->heads_q, c->dim_v);
  c->q = cpu_tensor(data, c->q_shape);
  c->k = cpu_tensor(data, c->k_shape);
  c->v = cpu_tensor(data, c->v_shape);
  c->out = cpu_tensor(data, c->out_shape);
  c->params = flashmoe_attention_forward_params_init();
  c->params.q = &c->q;
  c->params.k = &c->k;
  c->params.v = &c->v;
  c->params.out = &c->out;
  c->params.causal = c->causal;
}

double count_flops(const Call& c) {
  const bool left = (c.params.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right = (c.params.window & FLASHMOE_WINDOW_RIGHT) != 0;
  int64_t pairs = 0;
  for (int64_t i = 0; i < c.seq_q; ++i) {
    const int64_t place = c.causal == FLASHMOE_CAUSAL_TOP_LEFT ? i : i + c.seq_k - c.seq_q;
    for (int64_t j = 0; j < c.seq_k; ++j) {
      const bool seen = (c.causal == FLASHMOE_CAUSAL_NONE || j <= place) &&
                        (!left || place - j <= c.params.window_left) &&
                        (!right || j - place <= c.params.window_right);
      pairs += seen ? 1 : 0;
    }
  }
  return 2.0 * static_cast<double>(c.batch * c.heads_q * pairs * (c.dim + c.dim_v));
}

// Plans the call with every window of these extents; -1 leaves an end out.
template <typename Visit>
void for_each_window(Call* c, Visit visit) {
  for (const int64_t left : std::initializer_list<int64_t>{-1, 0, 1, 5, 40, INT64_MAX}) {
    for (const int64_t right : std::initializer_list<int64_t>{-1, 0, 1, 5, 40, INT64_MAX}) {
      if (c->causal != FLASHMOE_CAUSAL_NONE && right > 0) continue;
      c->params.window = (left >= 0 ? uint32_t{FLASHMOE_WINDOW_LEFT} : 0) |
                         (right >= 0 ? uint32_t{FLASHMOE_WINDOW_RIGHT} : 0);
      c->params.window_left = left >= 0 ? left : 0;
      c->params.window_right = right >= 0 ? right : 0;
      visit();
    }
  }
}

void flops_are_the_visible_pairs() {
  // An address that faults when read: a plan must not look.
  void* const unreadable = reinterpret_cast<void*>(uintptr_t{4096});
  for (const int32_t causal :
       {FLASHMOE_CAUSAL_NONE, FLASHMOE_CAUSAL_BOTTOM_RIGHT, FLASHMOE_CAUSAL_TOP_LEFT}) {
    for (const int64_t seq_q : {0, 1, 2, 7, 16, 33}) {
      for (const int64_t seq_k : {0, 1, 2, 7, 16, 33}) {
        Call c = {};
        c.batch = 2, c.seq_q = seq_q, c.seq_k = seq_k, c.heads_q = 4, c.heads_kv = 2;
        c.dim = 24, c.dim_v = 16, c.causal = causal;
        finish(&c, unreadable);
        for_each_window(&c, [&c] {
          flashmoe_plan plan = flashmoe_plan_init();
          CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
          CHECK(plan.flops == count_flops(c));
          // A struct of zeros is a dense batch. Of lengths in a table a plan knows nothing.
          flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
          c.params.sequences = &sequences;
          CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
          CHECK(plan.flops == count_flops(c));
          flashmoe_tensor lengths = c.q;
          lengths.ndim = 1;
          lengths.dtype = {FLASHMOE_DTYPE_INT, 32, 1};
          lengths.shape = &c.batch;
          sequences.seqused_k = &lengths;
          CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
          CHECK(plan.flops == 0);
          c.params.sequences = nullptr;
        });
      }
    }
  }
}

// No memory holds what these would read: the count must be exact where neither term is.
void flops_of_a_window_are_exact_where_squares_are_not() {
  constexpr int64_t kLong = int64_t{1} << 36;
  Call c = {};
  c.batch = 1, c.seq_q = kLong, c.seq_k = kLong, c.heads_q = c.heads_kv = 1;
  c.dim = c.dim_v = 8, c.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  finish(&c, reinterpret_cast<void*>(uintptr_t{4096}));
  c.params.window = FLASHMOE_WINDOW_LEFT;
  c.params.window_left = 2;
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
  CHECK(plan.flops == 32.0 * static_cast<double>(3 * kLong - 3));
}

// What a family is given, as the log shows it: "window=..." and every option.
std::string logged(const Call& c) {
  std::string line;
  const auto collect = [](int32_t, const char* text, void* user) {
    *static_cast<std::string*>(user) = text;
  };
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, collect, &line) == FLASHMOE_OK);
  std::vector<unsigned char> workspace(1 << 22);
  void* const aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  CHECK(flashmoe_attention_forward(&c.params, aligned, workspace.size() - 64, nullptr) ==
        FLASHMOE_OK);
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
  const size_t begin = line.find("window=");
  CHECK(begin != std::string::npos);
  return line.substr(begin, line.find(" sinks=") - begin);
}

void bounds_that_hide_nothing_are_not_set() {
  struct Case {
    int64_t seq_q, seq_k;
    int32_t causal;
    int64_t left, right;  // -1: absent
    const char* window;
  };
  constexpr int32_t kNone = FLASHMOE_CAUSAL_NONE;
  constexpr int32_t kBottomRight = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  constexpr int32_t kTopLeft = FLASHMOE_CAUSAL_TOP_LEFT;
  const Case cases[] = {
      {4, 4, kNone, -1, -1, "0..end"},
      {4, 4, kBottomRight, -1, -1, "0..i+0"},
      {4, 4, kNone, -1, 0, "0..i+0"},  // causal by another name
      {4, 4, kNone, 2, 1, "i-2..i+1"},
      {4, 4, kNone, 3, 3, "0..end"},
      {4, 4, kNone, INT64_MAX, INT64_MAX, "0..end"},
      {1, 9, kBottomRight, -1, -1, "0..end"},  // the last query sees every key
      {1, 9, kBottomRight, 3, 0, "i+5..end"},
      {1, 9, kNone, 8, -1, "0..end"},
      {4, 9, kNone, 7, -1, "i-2..end"},
      {4, 9, kNone, 8, -1, "0..end"},
      {4, 9, kTopLeft, 2, -1, "i-2..i+0"},
      {4, 9, kTopLeft, 3, -1, "0..i+0"},
      {9, 4, kTopLeft, 3, -1, "i-3..i+0"},
      {9, 4, kBottomRight, -1, -1, "0..i-5"},
      {9, 4, kNone, -1, 8, "0..end"},
      {9, 4, kNone, 0, 0, "i-5..i-5"},
      {4, 0, kNone, 0, 0, "0..i-4"},
      {4, 0, kBottomRight, INT64_MAX, -1, "0..i-4"},
  };
  for (const Case& wanted : cases) {
    Call c = {};
    c.batch = 1, c.seq_q = wanted.seq_q, c.seq_k = wanted.seq_k, c.heads_q = c.heads_kv = 1;
    c.dim = c.dim_v = 8, c.causal = wanted.causal;
    struct alignas(64) Rows {
      float values[16 * 8];
    } rows = {}, out = {};
    finish(&c, &rows);
    c.out.data = &out;
    c.params.window = (wanted.left >= 0 ? uint32_t{FLASHMOE_WINDOW_LEFT} : 0) |
                      (wanted.right >= 0 ? uint32_t{FLASHMOE_WINDOW_RIGHT} : 0);
    c.params.window_left = wanted.left >= 0 ? wanted.left : 0;
    c.params.window_right = wanted.right >= 0 ? wanted.right : 0;
    const char* const causals[] = {"none", "bottom_right", "top_left"};
    const std::string before =
        std::string("window=") + wanted.window + " layout=bshd causal=" + causals[wanted.causal];
    CHECK(logged(c) == before + " scale=0 softcap=0");
    c.params.softcap = 30.0f;
    c.params.scale = 0.5f;
    CHECK(logged(c) == before + " scale=0.5 softcap=30");
  }
}

// A caller built with the header of version 0.1.0, whose struct ended with `kernel`.
void older_structs_are_read_as_far_as_they_go() {
  constexpr size_t kOld = offsetof(flashmoe_attention_forward_params, window);
  static_assert(kOld == 7 * sizeof(void*) + 4 * sizeof(int32_t), "the struct as it was");
  Call c = {};
  c.batch = c.heads_q = c.heads_kv = 1, c.seq_q = c.seq_k = 20, c.dim = c.dim_v = 8;
  c.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  finish(&c, reinterpret_cast<void*>(uintptr_t{4096}));
  flashmoe_plan causal = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&c.params, &causal) == FLASHMOE_OK);

  // On the heap, so that AddressSanitizer sees a read behind its end.
  void* const old = std::malloc(kOld);
  CHECK(old != nullptr);
  c.params.struct_size = kOld;
  std::memcpy(old, &c.params, kOld);
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(static_cast<flashmoe_attention_forward_params*>(old),
                                        &plan) == FLASHMOE_OK);
  std::free(old);
  CHECK(plan.flops == causal.flops && plan.flops == count_flops(c));

  for (const size_t wrong : {kOld - 1, sizeof c.params + 1}) {
    c.params.struct_size = wrong;
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(flashmoe_last_error()).find("accepts 72 to 168") != std::string::npos);
  }
}

void windows_and_softcaps_are_checked() {
  struct Case {
    int32_t causal;
    uint32_t window;
    int64_t left, right;
    float softcap;
    const char* sentence;
  };
  const Case cases[] = {
      {0, 4, 0, 0, 0, "window: got 4, accepted are 0 (none), 1 (left), 2 (right) and 3 (both)"},
      {0, 1, -1, 0, 0, "window_left: got -1, accepted is 0 or more"},
      {0, 2, 0, -7, 0, "window_right: got -7, accepted is 0 or more"},
      {0, 2, 3, 0, 0, "window_left: got 3, accepted is 0, as its bit of window is not set"},
      {0, 0, 0, 3, 0, "window_right: got 3, accepted is 0, as its bit of window is not set"},
      {1, 3, 3, 2, 0, "window_right: got 2, accepted with causal is 0"},
      {2, 2, 0, 2, 0, "window_right: got 2, accepted with causal is 0"},
      {0, 0, 0, 0, -1, "softcap: got -1, accepted is a finite positive number, or 0 for none"},
      {0, 0, 0, 0, HUGE_VALF, "softcap: got inf, accepted is a finite positive number"},
      {0, 0, 0, 0, NAN, "softcap: got "},
  };
  for (const Case& wrong : cases) {
    Call c = {};
    c.batch = c.seq_q = c.seq_k = c.heads_q = c.heads_kv = 1, c.dim = c.dim_v = 8;
    c.causal = wrong.causal;
    finish(&c, reinterpret_cast<void*>(uintptr_t{4096}));
    c.params.window = wrong.window;
    c.params.window_left = wrong.left;
    c.params.window_right = wrong.right;
    c.params.softcap = wrong.softcap;
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(flashmoe_last_error()).find(wrong.sentence) == 0);
  }
}

void the_plan_is_the_launch() {
  Call c = {};
  c.batch = 1, c.seq_q = 40, c.seq_k = 70, c.heads_q = 2, c.heads_kv = 1, c.dim = c.dim_v = 64;
  struct alignas(64) Line {
    float values[16];
  };
  std::vector<Line> q(40 * 2 * 4), k(70 * 4), v(70 * 4), out(40 * 2 * 4);
  finish(&c, nullptr);
  c.q.data = q.data(), c.k.data = k.data(), c.v.data = v.data(), c.out.data = out.data();

  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
  CHECK(std::strcmp(plan.family, "cpu") == 0);
  CHECK(std::strcmp(plan.operation, "attention_forward") == 0 && std::strlen(plan.isa) > 0);
  CHECK(plan.struct_size == sizeof plan && plan.launch_count == 1);
  const flashmoe_launch& planned = plan.launches[0];
  CHECK(planned.tile_m > 0 && planned.tile_n > 0 && planned.dim == 64 && planned.dim_v == 64);
  CHECK(planned.device.device_type == FLASHMOE_DEVICE_CPU);
  CHECK(plan.bytes == sizeof(float) * 64.0 * (40 * 2 + 70 + 70 + 40 * 2));
  size_t bytes = SIZE_MAX;
  CHECK(flashmoe_attention_forward_workspace_size(&c.params, &bytes) == FLASHMOE_OK);
  CHECK(bytes == plan.workspace_bytes);

  std::vector<Line> workspace(bytes / sizeof(Line) + 1);
  CHECK(flashmoe_attention_forward(&c.params, workspace.data(), bytes, nullptr) == FLASHMOE_OK);
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK && count == 1);
  CHECK(std::memcmp(launches, plan.launches, sizeof launches[0]) == 0);
}

// Places for what later versions compute.
void what_no_kernel_computes_is_refused() {
  Call c = {};
  c.batch = c.seq_q = c.seq_k = c.heads_q = c.heads_kv = 1, c.dim = c.dim_v = 8;
  alignas(16) float data[8] = {};
  finish(&c, data);
  const auto refused = [&c](const std::string& sentence) {
    flashmoe_plan plan = flashmoe_plan_init();
    size_t bytes = 0;
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(flashmoe_last_error() == sentence);
    CHECK(flashmoe_attention_forward_workspace_size(&c.params, &bytes) ==
          FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(flashmoe_attention_forward(&c.params, nullptr, 0, nullptr) ==
          FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(flashmoe_last_error() == sentence);
  };
  c.params.q_scale = &c.q;
  refused("q_scale: got one, accepted is none: queries of 16 bits and more have no scales");
  c.params.q_scale = nullptr;
  c.params.k_scale = &c.q;
  refused("k_scale: got 4 dimensions, accepted are 2");
  c.params.k_scale = nullptr;
  flashmoe_plan plan = flashmoe_plan_init();
  // Behind the struct of an older caller there is none.
  c.params.q_scale = &c.q;
  c.params.struct_size = offsetof(flashmoe_attention_forward_params, q_scale);
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
}

void a_named_kernel_runs_or_fails() {
  Call c = {};
  c.batch = c.seq_q = c.seq_k = c.heads_q = c.heads_kv = 1, c.dim = c.dim_v = 8;
  alignas(16) float data[8] = {};
  finish(&c, data);
  flashmoe_plan plan = flashmoe_plan_init();
  c.params.kernel = "cpu";
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
  for (const char* name : {"sm89", "sm89_few_rows", "sm9", "CPU", "cpu ", "%s%s%n", "/"}) {
    c.params.kernel = name;
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) != FLASHMOE_OK);
    CHECK(std::string(flashmoe_last_error()).find("kernel") == 0);
  }
  // Full names: of another kernel of a family that is there, and of a family that is not.
  c.params.kernel = "attention_forward_cpu_other";
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_ERROR_UNSUPPORTED);
  for (const char* name : {"attention_forward_cpu", "attention_forward_cpux_other"}) {
    c.params.kernel = name;
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(flashmoe_last_error()).find("kernel: got \"attention_forward_cpu") == 0);
  }
}

void models_of_gpus_are_planned_for_where_there_are_kernels_for_them() {
  flashmoe_build_info build = flashmoe_build_info_init();
  CHECK(flashmoe_get_build_info(&build) == FLASHMOE_OK);
  const bool cuda = *build.cuda_architectures != '\0';
  Call c = {};
  c.batch = c.seq_q = c.seq_k = c.heads_q = c.heads_kv = 1, c.dim = c.dim_v = 8;
  alignas(16) float data[8] = {};
  finish(&c, data);
  flashmoe_plan plan = flashmoe_plan_init();
  size_t bytes = 0;
  for (flashmoe_tensor* tensor : {&c.q, &c.k, &c.v, &c.out}) {
    tensor->dtype = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
    tensor->device = {FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_L4};
  }
  const flashmoe_status expected = cuda ? FLASHMOE_OK : FLASHMOE_ERROR_ARCH_NOT_BUILT;
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == expected);
  CHECK(flashmoe_attention_forward_workspace_size(&c.params, &bytes) == expected);
  CHECK(flashmoe_attention_forward(&c.params, nullptr, 0, nullptr) ==
        (cuda ? FLASHMOE_ERROR_NO_DEVICE : FLASHMOE_ERROR_ARCH_NOT_BUILT));
  CHECK(std::string(flashmoe_last_error()).find("q: ") == 0);
  CHECK(std::string(flashmoe_last_error()).find("l4") != std::string::npos);
  flashmoe_device_info info = flashmoe_device_info_init();
  CHECK(flashmoe_get_device_info(c.q.device, &info) == expected);
  CHECK(flashmoe_get_device_info({FLASHMOE_DEVICE_GPU_MODEL, 4}, &info) ==
        FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(flashmoe_get_device_info({FLASHMOE_DEVICE_CUDA, 60}, &info) == FLASHMOE_ERROR_NO_DEVICE);
}

}  // namespace

int main() {
  flops_are_the_visible_pairs();
  flops_of_a_window_are_exact_where_squares_are_not();
  bounds_that_hide_nothing_are_not_set();
  older_structs_are_read_as_far_as_they_go();
  windows_and_softcaps_are_checked();
  the_plan_is_the_launch();
  what_no_kernel_computes_is_refused();
  a_named_kernel_runs_or_fails();
  models_of_gpus_are_planned_for_where_there_are_kernels_for_them();
  return 0;
}
