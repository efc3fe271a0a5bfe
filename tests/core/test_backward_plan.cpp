// Attention backward: the plan of a call, its operation count, and what its checks say.
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

constexpr flashmoe_dtype kSingle = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kHalf = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kDouble = {FLASHMOE_DTYPE_FLOAT, 64, 1};

struct Tensor {
  int64_t shape[4];
  int64_t strides[4];
  flashmoe_tensor view;

  void set(std::vector<int64_t> extents, flashmoe_dtype dtype) {
    int64_t packed = 1;
    for (size_t i = extents.size(); i-- > 0;) {
      shape[i] = extents[i];
      strides[i] = packed;
      packed *= extents[i];
    }
    view = {};
    view.data = reinterpret_cast<void*>(uintptr_t{1} << 40);  // never read
    view.device = {FLASHMOE_DEVICE_CPU, 0};
    view.ndim = static_cast<int32_t>(extents.size());
    view.dtype = dtype;
    view.shape = shape;
    view.strides = strides;
  }
};

// In layout bshd: batch 2, 30 queries of 4 heads, 50 keys of 2 heads, dimensions 24 and 16.
struct Call {
  Tensor dout, q, k, v, out, lse, dlse, sinks, dq, dk, dv, dsinks;
  flashmoe_attention_backward_params params = flashmoe_attention_backward_params_init();

  explicit Call(flashmoe_dtype dtype = kHalf) {
    const flashmoe_dtype wide = dtype.bits == 64 ? kDouble : kSingle;
    q.set({2, 30, 4, 24}, dtype), dq.set({2, 30, 4, 24}, dtype);
    k.set({2, 50, 2, 24}, dtype), dk.set({2, 50, 2, 24}, dtype);
    v.set({2, 50, 2, 16}, dtype), dv.set({2, 50, 2, 16}, dtype);
    out.set({2, 30, 4, 16}, dtype), dout.set({2, 30, 4, 16}, dtype);
    lse.set({2, 4, 30}, wide), dlse.set({2, 4, 30}, wide);
    sinks.set({4}, dtype), dsinks.set({4}, dtype);
    params.dout = &dout.view, params.q = &q.view, params.k = &k.view, params.v = &v.view;
    params.out = &out.view, params.lse = &lse.view;
    params.dq = &dq.view, params.dk = &dk.view, params.dv = &dv.view;
  }
  void give_sinks() { params.sinks = &sinks.view, params.dsinks = &dsinks.view; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  flashmoe_plan plan() const {
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(flashmoe_attention_backward_plan(&params, &plan) == FLASHMOE_OK);
    return plan;
  }
  std::string failure(flashmoe_status status = FLASHMOE_ERROR_INVALID_ARGUMENT) const {
    flashmoe_plan plan = flashmoe_plan_init();
    size_t bytes = 0;
    CHECK(flashmoe_attention_backward_plan(&params, &plan) == status);
    const std::string sentence = flashmoe_last_error();
    CHECK(flashmoe_attention_backward_workspace_size(&params, &bytes) == status);
    CHECK(flashmoe_attention_backward(&params, nullptr, 0, nullptr) == status);
    CHECK(flashmoe_last_error() == sentence);
    return sentence;
  }
};

void flops_are_those_of_the_products_that_are_needed() {
  Call call;
  const double pairs = 2.0 * 2 * 4 * 30 * 50;
  CHECK(call.plan().flops == pairs * (3 * 24 + 2 * 16));
  call.params.dv = nullptr;
  CHECK(call.plan().flops == pairs * (3 * 24 + 16));
  call.params.dk = nullptr;
  CHECK(call.plan().flops == pairs * (2 * 24 + 16));
  call.params.dq = nullptr, call.params.dv = &call.dv.view;
  CHECK(call.plan().flops == pairs * (24 + 16));
  Call sinks;
  sinks.give_sinks();
  CHECK(sinks.plan().flops == pairs * (3 * 24 + 2 * 16));
  sinks.params.dq = sinks.params.dk = sinks.params.dv = nullptr;
  CHECK(sinks.plan().flops == 0);
  Call causal;  // query i sees 21 + i keys
  causal.params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  CHECK(causal.plan().flops == 2.0 * 2 * 4 * (30 * 21 + 29 * 15) * (3 * 24 + 2 * 16));
}

void a_plan_counts_every_tensor_once() {
  Call call;
  const double rows_q = 2 * 30 * 4, rows_k = 2 * 50 * 2;
  const double own = 2 * (2 * rows_q * (24 + 16) + 2 * rows_k * (24 + 16));
  CHECK(call.plan().bytes == own + 4 * rows_q);
  call.params.dlse = &call.dlse.view;
  CHECK(call.plan().bytes == own + 8 * rows_q);
  call.give_sinks();
  CHECK(call.plan().bytes == own + 8 * rows_q + 2 * 4 * 2);
  const flashmoe_plan plan = call.plan();
  CHECK(std::strcmp(plan.operation, "attention_backward") == 0);
  CHECK(std::strcmp(plan.family, "cpu") == 0 && plan.launch_count == 1);
  const std::string kernel = plan.launches[0].kernel;
  CHECK(kernel.find("attention_backward_cpu_") == 0);
  CHECK(kernel.find("_fp16_d24_dv16") != std::string::npos);
  call.params.kernel = kernel.c_str();
  call.plan();
  call.params.kernel = "attention_forward_cpu";
  CHECK(call.failure().find("kernel: got \"attention_forward_cpu\"") == 0);
}

// One block of rows that several tiles of keys meet takes a sum for each of its rows, and no more.
void the_workspace_grows_with_the_rows() {
  CHECK(flashmoe_set_num_threads(1) == FLASHMOE_OK);
  const auto bytes = [](int64_t seq_q, int64_t seq_k) {
    Call call;
    for (Tensor* x : {&call.q, &call.dq}) x->set({1, seq_q, 1, 64}, kHalf);
    for (Tensor* x : {&call.out, &call.dout}) x->set({1, seq_q, 1, 64}, kHalf);
    for (Tensor* x : {&call.k, &call.v, &call.dk, &call.dv}) x->set({1, seq_k, 1, 64}, kHalf);
    call.lse.set({1, 1, seq_q}, kSingle);
    return static_cast<double>(call.plan().workspace_bytes);
  };
  CHECK(bytes(9600, 9600) == bytes(9600, 19200));
  const double a_row = (bytes(19200, 9600) - bytes(9600, 9600)) / 9600;
  CHECK(a_row >= 64 * 4 && a_row < 64 * 4 + 8);
  CHECK(bytes(9600, 10) == bytes(19200, 10));
  CHECK(flashmoe_set_num_threads(0) == FLASHMOE_OK);
}

void each_argument_is_checked() {
  const auto failure = [](void (*spoil)(Call*), flashmoe_dtype dtype = kHalf) {
    Call call(dtype);
    spoil(&call);
    return call.failure();
  };
  CHECK(failure([](Call* c) { c->params.dout = nullptr; }) ==
        "dout: got a null tensor, it is required");
  CHECK(failure([](Call* c) { c->params.lse = nullptr; }) ==
        "lse: got a null tensor, it is required");
  CHECK(failure([](Call* c) { c->params.out = nullptr; }) ==
        "out: got a null tensor, it is required");
  CHECK(failure([](Call* c) { c->params.dq = c->params.dk = c->params.dv = nullptr; }) ==
        "dq: got a null tensor, as dk, dv and dsinks did; one of them at least is required");
  CHECK(failure([](Call* c) { c->params.dsinks = &c->dsinks.view; }) ==
        "dsinks: got one, accepted without sinks is none");
  CHECK(failure([](Call* c) { c->give_sinks(), c->sinks.shape[0] = 2; }) ==
        "sinks: its number of heads is 2, but q has 4");
  CHECK(failure([](Call* c) { c->give_sinks(), c->dsinks.shape[0] = 2; }) ==
        "dsinks: its number of heads is 2, but q has 4");
  CHECK(failure([](Call* c) { c->give_sinks(), c->dsinks.view.ndim = 2; }).find("dsinks: ") == 0);
  CHECK(failure([](Call* c) { c->give_sinks(), c->dsinks.view.dtype = kDouble; }) ==
        "dsinks: got dtype fp64, accepted are fp32 and sinks's fp16");
  CHECK(failure([](Call* c) { c->give_sinks(), c->sinks.view.dtype = kSingle; }) ==
        "dsinks: got dtype fp16, accepted is sinks's fp32");
  CHECK(failure([](Call* c) { c->give_sinks(), c->dsinks.strides[0] = 0; }).find("dsinks: ") == 0);
  CHECK(failure([](Call* c) {
          c->give_sinks(), c->dsinks.view.byte_offset = 1;
        }).find("dsinks: ") == 0);
  CHECK(failure([](Call* c) {
          c->give_sinks(), c->dsinks.view.device = {FLASHMOE_DEVICE_CUDA, 0};
        }).find("dsinks: ") == 0);
  CHECK(failure([](Call* c) { c->params.accumulate = 2; }) ==
        "accumulate: got 2, accepted are 0 and 1");
  CHECK(failure([](Call* c) { c->params.causal = 3; }).find("causal: got 3") == 0);
  CHECK(failure([](Call* c) { c->params.window_left = 3; }).find("window_left: got 3") == 0);
  CHECK(failure([](Call* c) { c->dout.shape[1] = 29; }) ==
        "dout: its sequence length is 29, but out has 30");
  CHECK(failure([](Call* c) { c->dout.view.dtype = {FLASHMOE_DTYPE_BFLOAT, 16, 1}; }) ==
        "dout: got dtype bf16, accepted is fp16 as q's");
  CHECK(failure([](Call* c) {
          c->dlse.set({2, 30, 4}, kSingle), c->params.dlse = &c->dlse.view;
        }) == "dlse: its number of heads is 30, but q has 4");
  CHECK(failure([](Call* c) { c->lse.view.dtype = kHalf; }) ==
        "lse: got dtype fp16, accepted is fp32");
  CHECK(failure([](Call* c) { c->lse.view.dtype = kSingle; }, kDouble) ==
        "lse: got dtype fp32, accepted is fp64 as q's");
  CHECK(failure([](Call* c) { c->dq.shape[3] = 16; }) ==
        "dq: its head dimension is 16, but q has 24");
  CHECK(failure([](Call* c) { c->dk.shape[2] = 4, c->dk.strides[1] = 96; }) ==
        "dk: its number of heads is 4, but k has 2");
  CHECK(failure([](Call* c) { c->dv.shape[0] = 1; }) == "dv: its batch is 1, but v has 2");
  CHECK(failure([](Call* c) { c->dk.view.dtype = kDouble; }) ==
        "dk: got dtype fp64, accepted are fp32 and q's fp16");
  CHECK(failure([](Call* c) { c->dk.view.dtype = kHalf; }, kSingle) ==
        "dk: got dtype fp16, accepted is q's fp32");
  CHECK(failure([](Call* c) { c->dv.strides[1] = 0; }).find("dv: ") == 0);
  CHECK(failure([](Call* c) { c->dq.strides[3] = 2; }).find("dq: ") == 0);
  CHECK(failure([](Call* c) { c->dout.strides[1] = 65; }).find("dout: ") == 0);
  CHECK(failure([](Call* c) {
          c->params.struct_size -= 32;  // from before there were sequences it is 24 less
        }).find("flashmoe_attention_backward_params.struct_size") == 0);

  // Inputs may repeat rows, gradients may be fp32, and one is enough.
  Call call;
  call.dout.strides[0] = call.dout.strides[1] = call.out.strides[1] = 0;
  call.dk.view.dtype = kSingle;
  call.params.dq = call.params.dv = nullptr;
  call.plan();
  // Sinks may have any stride, and their gradient alone is enough.
  call.give_sinks();
  call.sinks.strides[0] = 0, call.dsinks.strides[0] = -3;
  call.dsinks.view.dtype = kSingle;
  call.params.dk = nullptr;
  call.plan();
}

void a_gpu_computes_none() {
  Call call;
  for (Tensor* x : {&call.dout, &call.q, &call.k, &call.v, &call.out, &call.lse, &call.dq, &call.dk,
                    &call.dv}) {
    x->view.device = {FLASHMOE_DEVICE_CUDA, 0};
  }
  CHECK(call.failure(FLASHMOE_ERROR_UNSUPPORTED)
            .find("cpu: the tensors are on cuda:0, it computes on the CPU") == 0);
}

// Gradients may lie in no memory that the call reads, and in none of one another.
void gradients_lie_apart() {
  struct alignas(64) Row {
    float values[16];
  };
  std::vector<Row> memory(4096);
  Call call(kSingle);
  size_t at = 0;
  for (Tensor* x : {&call.dout, &call.q, &call.k, &call.v, &call.out, &call.lse, &call.dq, &call.dk,
                    &call.dv}) {
    x->view.data = &memory[at];
    at += 360;
  }
  size_t bytes = 0;
  CHECK(flashmoe_attention_backward_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
  std::vector<Row> workspace(bytes / sizeof(Row) + 1);
  const auto run = [&] {
    return flashmoe_attention_backward(&call.params, workspace.data(), bytes, nullptr);
  };
  CHECK(run() == FLASHMOE_OK);
  call.dk.view.data = call.k.view.data;
  CHECK(run() == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("dk: it shares memory with k") == 0);
  call.dk.view.data = call.dv.view.data;
  CHECK(run() == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("dv: it shares memory with dk") == 0);
  call.dk.view.data = &memory[at];
  call.give_sinks();
  call.sinks.view.data = call.dsinks.view.data = &memory[at + 360];
  CHECK(run() == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("dsinks: it shares memory with sinks") == 0);
}

}  // namespace

int main() {
  flops_are_those_of_the_products_that_are_needed();
  a_plan_counts_every_tensor_once();
  the_workspace_grows_with_the_rows();
  each_argument_is_checked();
  a_gpu_computes_none();
  gradients_lie_apart();
  return 0;
}
