// The plan of a call: its operation count against a count of the visible pairs, its agreement with
// the launch, and that planning reads no data.
#include <cstring>
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
  int64_t pairs = 0;
  for (int64_t i = 0; i < c.seq_q; ++i) {
    for (int64_t j = 0; j < c.seq_k; ++j) {
      const bool seen = c.causal == FLASHMOE_CAUSAL_NONE ||
                        (c.causal == FLASHMOE_CAUSAL_TOP_LEFT && j <= i) ||
                        (c.causal == FLASHMOE_CAUSAL_BOTTOM_RIGHT && j <= i + c.seq_k - c.seq_q);
      pairs += seen ? 1 : 0;
    }
  }
  return 2.0 * static_cast<double>(c.batch * c.heads_q * pairs * (c.dim + c.dim_v));
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
        flashmoe_attention_plan plan = flashmoe_attention_plan_init();
        CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
        CHECK(plan.flops == count_flops(c));
      }
    }
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

  flashmoe_attention_plan plan = flashmoe_attention_plan_init();
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
  CHECK(std::strcmp(plan.family, "cpu") == 0);
  CHECK(plan.struct_size == sizeof plan && plan.tile_q > 0 && plan.tile_k > 0);
  CHECK(plan.dim >= 64 && plan.dim_v >= 64);
  size_t bytes = SIZE_MAX;
  CHECK(flashmoe_attention_forward_workspace_size(&c.params, &bytes) == FLASHMOE_OK);
  CHECK(bytes == plan.workspace_bytes);

  std::vector<Line> workspace(bytes / sizeof(Line) + 1);
  CHECK(flashmoe_attention_forward(&c.params, workspace.data(), bytes, nullptr) == FLASHMOE_OK);
  flashmoe_launch launch = flashmoe_launch_init();
  CHECK(flashmoe_last_launch(&launch) == FLASHMOE_OK);
  CHECK(std::strcmp(launch.kernel, plan.kernel) == 0);
  CHECK(std::memcmp(launch.grid, plan.grid, sizeof plan.grid) == 0);
  CHECK(std::memcmp(launch.block, plan.block, sizeof plan.block) == 0);
  CHECK(launch.device.device_type == FLASHMOE_DEVICE_CPU);
}

void a_named_kernel_runs_or_fails() {
  Call c = {};
  c.batch = c.seq_q = c.seq_k = c.heads_q = c.heads_kv = 1, c.dim = c.dim_v = 8;
  alignas(16) float data[8] = {};
  finish(&c, data);
  flashmoe_attention_plan plan = flashmoe_attention_plan_init();
  c.params.kernel = "cpu";
  CHECK(flashmoe_attention_forward_plan(&c.params, &plan) == FLASHMOE_OK);
  for (const char* name : {"sm89", "sm9", "CPU", "cpu ", "%s%s%n", "/"}) {
    c.params.kernel = name;
    CHECK(flashmoe_attention_forward_plan(&c.params, &plan) != FLASHMOE_OK);
    CHECK(std::string(flashmoe_last_error()).find("kernel") == 0);
  }
}

}  // namespace

int main() {
  flops_are_the_visible_pairs();
  the_plan_is_the_launch();
  a_named_kernel_runs_or_fails();
  return 0;
}
