// The mixture of experts' gradients: what validation refuses, argument by argument and with what
// words; what plans compute; and that calls with faults at random touch no output.
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

// An address that faults when read: planning must not look.
void* const kUnreadable = reinterpret_cast<void*>(uintptr_t{1} << 20);

constexpr flashmoe_dtype kFp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kFp64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};
constexpr flashmoe_dtype kFp16 = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<unsigned char> memory;
  flashmoe_tensor view = {};

  void set(std::vector<int64_t> extents, flashmoe_dtype dtype) {
    shape = std::move(extents);
    strides.assign(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * shape[axis];
    }
    view.data = kUnreadable;
    view.device = {FLASHMOE_DEVICE_CPU, 0};
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    view.strides = strides.data();
  }
  // Turned round: the last two axes.
  void transpose() {
    std::swap(strides[1], strides[2]);
    strides[2] = shape[1];
    strides[1] = 1;
    strides[0] = shape[1] * shape[2];
  }
  // Memory of its own, full of one byte, behind an aligned beginning: enough for any of these
  // tensors, of any dtype.
  void allocate(unsigned char fill) {
    memory.assign(size_t{1} << 15, fill);
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    view.data = reinterpret_cast<void*>((at + 63) / 64 * 64);
  }
};

constexpr int64_t kTokens = 6, kHidden = 32, kInner = 16, kExperts = 4, kTopK = 2;

struct Backward {
  Tensor dout, x, w_gate_up, w_up, w_down, b_down, weights, offsets, pairs, slots, pre;
  Tensor dx, dw_gate_up, dw_up, dw_down, db_gate_up, db_up, db_down, dweights;
  flashmoe_moe_backward_params params = flashmoe_moe_backward_params_init();

  Backward() {
    dout.set({kTokens, kHidden}, kBf16);
    x.set({kTokens, kHidden}, kBf16);
    w_gate_up.set({kExperts, 2 * kInner, kHidden}, kBf16);
    w_up.set({kExperts, kInner, kHidden}, kBf16);
    w_down.set({kExperts, kHidden, kInner}, kBf16);
    b_down.set({kExperts, kHidden}, kFp32);
    weights.set({kTokens, kTopK}, kFp32);
    offsets.set({kExperts + 1}, kInt32);
    pairs.set({kTokens * kTopK}, kInt32);
    slots.set({kTokens, kTopK}, kInt32);
    pre.set({kTokens * kTopK, 2 * kInner}, kBf16);
    dx.set({kTokens, kHidden}, kBf16);
    dw_gate_up.set({kExperts, 2 * kInner, kHidden}, kFp32);
    dw_up.set({kExperts, kInner, kHidden}, kBf16);
    dw_down.set({kExperts, kHidden, kInner}, kBf16);
    db_gate_up.set({kExperts, 2 * kInner}, kBf16);
    db_up.set({kExperts, kInner}, kBf16);
    db_down.set({kExperts, kHidden}, kFp32);
    dweights.set({kTokens, kTopK}, kFp32);
    params.dout = &dout.view;
    params.x = &x.view;
    params.w_gate_up = &w_gate_up.view;
    params.w_down = &w_down.view;
    params.weights = &weights.view;
    params.offsets = &offsets.view;
    params.pairs = &pairs.view;
    params.slots = &slots.view;
    params.dx = &dx.view;
    params.dw_gate_up = &dw_gate_up.view;
    params.dw_down = &dw_down.view;
    params.db_gate_up = &db_gate_up.view;
    params.db_down = &db_down.view;
    params.dweights = &dweights.view;
  }
  Backward(const Backward&) = delete;

  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_moe_backward_plan(&params, plan);
  }
  std::vector<Tensor*> tensors() {
    return {&dout,    &x,          &w_gate_up, &w_up,    &w_down,  &b_down,     &weights,
            &offsets, &pairs,      &slots,     &pre,     &dx,      &dw_gate_up, &dw_up,
            &dw_down, &db_gate_up, &db_up,     &db_down, &dweights};
  }
  std::vector<Tensor*> outputs() {
    return {&dx, &dw_gate_up, &dw_up, &dw_down, &db_gate_up, &db_up, &db_down, &dweights};
  }
};

struct Product {
  Tensor dout, x, w, offsets, counts, dx, dw, dbias;
  flashmoe_grouped_product_backward_params params = flashmoe_grouped_product_backward_params_init();

  Product() {
    dout.set({30, 24}, kFp16);
    x.set({30, 16}, kFp16);
    w.set({4, 24, 16}, kFp16);
    offsets.set({5}, kInt32);
    counts.set({4}, kInt32);
    dx.set({30, 16}, kFp32);
    dw.set({4, 24, 16}, kFp16);
    dbias.set({4, 24}, kFp32);
    params.dout = &dout.view;
    params.x = &x.view;
    params.w = &w.view;
    params.offsets = &offsets.view;
    params.dx = &dx.view;
    params.dw = &dw.view;
    params.dbias = &dbias.view;
  }
  Product(const Product&) = delete;

  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_grouped_product_backward_plan(&params, plan);
  }
};

struct Route {
  Tensor dweights, ids, logits, given, dlse, dlogits, dgiven;
  flashmoe_moe_route_backward_params params = flashmoe_moe_route_backward_params_init();

  Route() {
    dweights.set({6, 2}, kFp32);
    ids.set({6, 2}, kInt32);
    logits.set({6, 8}, kBf16);
    given.set({6, 2}, kFp16);
    dlse.set({6}, kFp32);
    dlogits.set({6, 8}, kFp32);
    dgiven.set({6, 2}, kFp32);
    params.dweights = &dweights.view;
    params.ids = &ids.view;
    params.logits = &logits.view;
    params.dlse = &dlse.view;
    params.dlogits = &dlogits.view;
  }
  Route(const Route&) = delete;

  void give() {
    params.logits = params.dlogits = params.dlse = nullptr;
    params.given_weights = &given.view;
    params.dgiven_weights = &dgiven.view;
  }
  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_moe_route_backward_plan(&params, plan);
  }
};

template <class Call>
void refused(flashmoe_status status, const char* sentence,
             const std::function<void(Call&)>& change) {
  Call call;
  change(call);
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status got = call.plan(&plan);
  if (got != status || std::strstr(flashmoe_last_error(), sentence) != flashmoe_last_error()) {
    std::fprintf(stderr, "got %d: %s\nwanted %d: %s\n", got, flashmoe_last_error(), status,
                 sentence);
  }
  CHECK(got == status);
  CHECK(std::strstr(flashmoe_last_error(), sentence) == flashmoe_last_error());
}

template <class Call>
void invalid(const char* sentence, const std::function<void(Call&)>& change) {
  refused<Call>(FLASHMOE_ERROR_INVALID_ARGUMENT, sentence, change);
}

void layers_are_refused() {
  using B = Backward;
  invalid<B>("flashmoe_moe_backward_params.struct_size", [](B& b) { b.params.struct_size = 8; });
  invalid<B>("accumulate: got 2", [](B& b) { b.params.accumulate = 2; });
  invalid<B>("overwrite_pre_activation: got 2, accepted are 0 and 1",
             [](B& b) { b.params.overwrite_pre_activation = 2; });
  invalid<B>("overwrite_pre_activation: got 1, accepted without pre_activation is 0",
             [](B& b) { b.params.overwrite_pre_activation = 1; });
  invalid<B>("pre_activation: its strides", [](B& b) {
    b.params.pre_activation = &b.pre.view;
    b.params.overwrite_pre_activation = 1;
    b.pre.strides[0] = 0;
  });
  refused<B>(FLASHMOE_ERROR_UNSUPPORTED, "cpu: max_workspace_bytes: got 1, accepted are 0, for no ",
             [](B& b) { b.params.max_workspace_bytes = 1; });
  invalid<B>("gate: got 9", [](B& b) { b.params.gate = 9; });
  invalid<B>("limit: got -1", [](B& b) { b.params.limit = -1; });
  invalid<B>("alpha: got 2", [](B& b) {
    b.params.activation = FLASHMOE_ACTIVATION_RELU;
    b.params.alpha = 2;
  });
  invalid<B>("x: got a null tensor", [](B& b) { b.params.x = nullptr; });
  invalid<B>("w_gate_up: got dtype bf16, accepted is fp64 as x's",
             [](B& b) { b.x.view.dtype = kFp64; });
  invalid<B>("dout: got a null tensor", [](B& b) { b.params.dout = nullptr; });
  invalid<B>("dout: got dtype fp32, accepted is bf16 as x's",
             [](B& b) { b.dout.view.dtype = kFp32; });
  invalid<B>("dout: its hidden size is 24, but x has 32", [](B& b) { b.dout.shape[1] = 24; });
  invalid<B>("dout: its number of tokens is 5, but x has 6", [](B& b) { b.dout.shape[0] = 5; });
  invalid<B>("w_down: its number of experts is 3", [](B& b) { b.w_down.shape[0] = 3; });
  invalid<B>("slots: its number of tokens is 7", [](B& b) { b.slots.shape[0] = 7; });
  invalid<B>("pre_activation: its number of columns is 16, but gate and up together has 32",
             [](B& b) {
               b.params.pre_activation = &b.pre.view;
               b.pre.shape[1] = 16;
             });
  invalid<B>("dx: got dtype fp16, accepted are fp32 and x's bf16",
             [](B& b) { b.dx.view.dtype = kFp16; });
  invalid<B>("dx: its number of rows is 5, but x has 6", [](B& b) { b.dx.shape[0] = 5; });
  invalid<B>("dx: its strides", [](B& b) { b.dx.strides[0] = 0; });
  invalid<B>("dw_gate_up: its number of rows is 24, but w_gate_up has 32",
             [](B& b) { b.dw_gate_up.shape[1] = 24; });
  invalid<B>("dw_gate_up: its last two dimensions have strides 32 and 2",
             [](B& b) { b.dw_gate_up.strides[2] = 2; });
  invalid<B>("dw_down: its strides", [](B& b) { b.dw_down.strides[0] = 0; });
  invalid<B>("dw_up: got a tensor, accepted is none unless gate is 3",
             [](B& b) { b.params.dw_up = &b.dw_up.view; });
  invalid<B>("db_up: got a tensor, accepted is none unless gate is 3",
             [](B& b) { b.params.db_up = &b.db_up.view; });
  invalid<B>("db_down: its number of rows is 31, but w_down has 32",
             [](B& b) { b.db_down.shape[1] = 31; });
  invalid<B>("db_down: its last dimension has stride 2", [](B& b) { b.db_down.strides[1] = 2; });
  invalid<B>("dweights: got dtype bf16, accepted is fp32",
             [](B& b) { b.dweights.view.dtype = kBf16; });
  invalid<B>("dweights: its number of experts of a token is 1, but weights has 2",
             [](B& b) { b.dweights.set({kTokens, 1}, kFp32); });
  invalid<B>("dx: got a null tensor, as all other gradients did", [](B& b) {
    b.params.dx = b.params.dw_gate_up = b.params.dw_down = b.params.db_gate_up = b.params.db_down =
        b.params.dweights = nullptr;
  });
  invalid<B>("kernel: got \"sm90\", built in are cpu", [](B& b) { b.params.kernel = "sm90"; });
  refused<B>(FLASHMOE_ERROR_UNSUPPORTED, "cpu: the tensors are on cuda:0, it computes on the CPU",
             [](B& b) {
               for (Tensor* each : b.tensors()) each->view.device = {FLASHMOE_DEVICE_CUDA, 0};
             });
}

void products_are_refused() {
  using P = Product;
  invalid<P>("dout: got 4 dimensions, accepted are 2 (with offsets) and 3 (with counts)",
             [](P& p) { p.dout.view.ndim = 4; });
  invalid<P>("counts: got a tensor, accepted is none with a rank 2 dout",
             [](P& p) { p.params.counts = &p.counts.view; });
  invalid<P>("dx: got a null tensor, as dw and dbias did",
             [](P& p) { p.params.dx = p.params.dw = p.params.dbias = nullptr; });
  invalid<P>("w: got a null tensor, with dx it is required", [](P& p) { p.params.w = nullptr; });
  invalid<P>("x: got a null tensor, with dw it is required", [](P& p) { p.params.x = nullptr; });
  invalid<P>("x: its number of rows is 29, but dout has 30", [](P& p) { p.x.shape[0] = 29; });
  invalid<P>("w: its number of columns is 8, but x has 16",
             [](P& p) { p.w.set({4, 24, 8}, kFp16); });
  invalid<P>("w: its number of experts is 3", [](P& p) { p.w.set({3, 24, 16}, kFp16); });
  invalid<P>("offsets: got 0 experts", [](P& p) { p.offsets.set({1}, kInt32); });
  invalid<P>("dx: its number of columns is 24, but x has 16",
             [](P& p) { p.dx.set({30, 24}, kFp32); });
  invalid<P>("dw: got dtype bf16", [](P& p) { p.dw.view.dtype = kBf16; });
  invalid<P>("dbias: its number of rows is 16, but dout has 24",
             [](P& p) { p.dbias.set({4, 16}, kFp32); });
}

void routings_are_refused() {
  using R = Route;
  invalid<R>("scoring: got 3", [](R& r) { r.params.scoring = 3; });
  invalid<R>("logits: got both logits and given_weights",
             [](R& r) { r.params.given_weights = &r.given.view; });
  invalid<R>("logits: got neither logits nor given_weights",
             [](R& r) { r.params.logits = nullptr; });
  invalid<R>("dlogits: got a null tensor", [](R& r) { r.params.dlogits = nullptr; });
  invalid<R>("dlogits: got dtype fp16, accepted are fp32 and logits's bf16",
             [](R& r) { r.dlogits.view.dtype = kFp16; });
  invalid<R>("dlogits: its number of columns is 7, but logits has 8",
             [](R& r) { r.dlogits.shape[1] = 7; });
  invalid<R>("ids: its number of tokens is 5, but dweights has 6",
             [](R& r) { r.ids.shape[0] = 5; });
  invalid<R>("dlse: its number of tokens is 5", [](R& r) { r.dlse.shape[0] = 5; });
  invalid<R>("scoring: got 2, accepted with given_weights is 0", [](R& r) {
    r.give();
    r.params.scoring = 2;
  });
  invalid<R>("given_weights: its number of experts of a token is 3", [](R& r) {
    r.give();
    r.given.set({6, 3}, kFp16);
  });
}

// A plan has what its outputs need, and no more.
void plans() {
  const auto stages = [](const std::function<void(Backward&)>& change) {
    Backward call;
    change(call);
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(call.plan(&plan) == FLASHMOE_OK);
    size_t bytes = 0;
    CHECK(flashmoe_moe_backward_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
    CHECK(bytes == plan.workspace_bytes);
    std::string names;
    for (int32_t i = 0; i < plan.launch_count; ++i) {
      const std::string kernel = plan.launches[i].kernel;
      const size_t first = std::strlen("moe_backward_");
      names += kernel.substr(first, kernel.find("_cpu_") - first) + " ";
    }
    return names;
  };
  const auto none = [](Backward& b) {
    b.params.dx = b.params.dw_gate_up = b.params.dw_down = b.params.db_gate_up = b.params.db_down =
        b.params.dweights = nullptr;
  };
  CHECK(stages([](Backward&) {}) == "up down activation dw dx combine ");
  CHECK(stages([](Backward& b) { b.params.pre_activation = &b.pre.view; }) ==
        "down activation dw dx combine ");
  CHECK(stages([&](Backward& b) {
          none(b);
          b.params.dweights = &b.dweights.view;
        }) == "up down activation combine ");
  CHECK(stages([&](Backward& b) {
          none(b);
          b.params.dweights = &b.dweights.view;
          b.params.weight_on_input = 1;
        }) == "up down activation dx combine ");
  CHECK(stages([&](Backward& b) {
          none(b);
          b.params.dw_down = &b.dw_down.view;
        }) == "up activation dw ");
  CHECK(stages([&](Backward& b) {
          none(b);
          b.params.db_down = &b.db_down.view;
        }) == "dw ");
  const auto bytes_of = [](flashmoe_moe_gate gate, int overwrite) {
    Backward call;
    call.params.gate = gate;
    call.params.pre_activation = &call.pre.view;
    call.params.overwrite_pre_activation = overwrite;
    size_t bytes = 0;
    CHECK(flashmoe_moe_backward_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
    return bytes;
  };
  for (flashmoe_moe_gate gate : {FLASHMOE_MOE_GATE_UP, FLASHMOE_MOE_UP_GATE}) {
    CHECK(bytes_of(gate, 0) - bytes_of(gate, 1) == kTokens * kTopK * 2 * kInner * 2);
  }
  CHECK(bytes_of(FLASHMOE_MOE_INTERLEAVED, 0) == bytes_of(FLASHMOE_MOE_INTERLEAVED, 1));
  CHECK(stages([](Backward& b) { b.dw_down.transpose(); }) == "up down activation dw dx combine ");
  flashmoe_plan plan = flashmoe_plan_init();
  {  // of a caller who knows no bound
    Backward old;
    old.params.max_workspace_bytes = 1;
    old.params.struct_size = offsetof(flashmoe_moe_backward_params, max_workspace_bytes);
    CHECK(old.plan(&plan) == FLASHMOE_OK);
  }
  CHECK(Product().plan(&plan) == FLASHMOE_OK && plan.launch_count == 2);
  CHECK(Route().plan(&plan) == FLASHMOE_OK && plan.launch_count == 1);
}

// Faults at random: such a call succeeds, or is refused with a sentence and leaves its outputs.
void faults_at_random() {
  std::mt19937 random(7);
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  int refusals = 0;
  for (int round = 0; round < 3000; ++round) {
    Backward call;
    if (below(2) == 0) {
      call.params.gate = FLASHMOE_MOE_SEPARATE;
      call.w_gate_up.set({kExperts, kInner, kHidden}, kBf16);
      call.dw_gate_up.set({kExperts, kInner, kHidden}, kBf16);
      call.db_gate_up.set({kExperts, kInner}, kBf16);
      call.params.w_up = &call.w_up.view;
      call.params.dw_up = &call.dw_up.view;
      call.params.db_up = &call.db_up.view;
    }
    if (below(2) == 0) call.params.b_down = &call.b_down.view;
    if (below(2) == 0) {
      call.params.pre_activation = &call.pre.view;
      call.params.overwrite_pre_activation = static_cast<int32_t>(below(2));
    }
    call.params.weight_on_input = static_cast<int32_t>(below(2));
    if (below(4) == 0) call.params.max_workspace_bytes = uint64_t{1} << below(40);
    for (Tensor* each : call.tensors()) each->allocate(0);
    for (Tensor* each : call.outputs()) each->allocate(0x5a);
    for (size_t faults = below(3); faults > 0; --faults) {
      Tensor& at = *call.tensors()[below(call.tensors().size())];
      const size_t axis = below(at.shape.size());
      switch (below(7)) {
        case 0: at.shape[axis] -= 1; break;
        case 1: at.strides[axis] = static_cast<int64_t>(below(5)) - 2; break;
        case 2: at.view.dtype = below(2) == 0 ? kFp32 : kInt32; break;
        case 3: at.view.ndim = static_cast<int32_t>(below(5)); break;
        case 4: at.view.data = nullptr; break;
        case 5: at.view.data = call.x.view.data; break;
        case 6: at.view.device.device_type = static_cast<int32_t>(below(4)); break;
      }
      if (at.view.ndim > static_cast<int32_t>(at.shape.size())) {
        at.view.ndim = static_cast<int32_t>(at.shape.size());
      }
    }
    size_t bytes = 0;
    flashmoe_status status = flashmoe_moe_backward_workspace_size(&call.params, &bytes);
    const uint64_t bound = call.params.max_workspace_bytes;
    CHECK(bound == 0 || bytes <= bound);
    std::vector<unsigned char> workspace(bytes + 64);
    if (status == FLASHMOE_OK) {
      const auto begin = reinterpret_cast<uintptr_t>(workspace.data());
      status = flashmoe_moe_backward(&call.params, reinterpret_cast<void*>((begin + 63) / 64 * 64),
                                     bytes, nullptr);
    }
    if (status == FLASHMOE_OK) continue;
    ++refusals;
    CHECK(std::strstr(flashmoe_last_error(), ":") != nullptr);
    for (const Tensor* each : call.outputs()) {
      for (const unsigned char byte : each->memory) CHECK(byte == 0x5a);
    }
  }
  CHECK(refusals > 500 && refusals < 2500);
}

}  // namespace

int main() {
  layers_are_refused();
  products_are_refused();
  routings_are_refused();
  plans();
  faults_at_random();
  return 0;
}
