// The mixture of experts' calls: what validation refuses, argument by argument and with what words;
// their plans; that planning reads no data; and empty calls.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

// An address that faults when read: planning must not look.
void* const kUnreadable = reinterpret_cast<void*>(uintptr_t{1} << 20);

constexpr flashmoe_dtype kFp64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};
constexpr flashmoe_dtype kFp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kFp16 = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_dtype kInt64 = {FLASHMOE_DTYPE_INT, 64, 1};

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  flashmoe_tensor view = {};

  void set(std::vector<int64_t> extents, flashmoe_dtype dtype, void* data = kUnreadable) {
    shape = std::move(extents);
    strides.assign(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * shape[axis];
    }
    view.data = data;
    view.device = {FLASHMOE_DEVICE_CPU, 0};
    view.dtype = dtype;
    refresh();
  }
  void refresh() {
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    view.strides = strides.data();
  }
  void move(uintptr_t bytes) { view.data = static_cast<char*>(view.data) + bytes; }
};

struct Route {
  Tensor logits, bias, given_ids, given_weights, map, ids, weights, offsets, pairs, slots, lse;
  flashmoe_moe_route_params params = flashmoe_moe_route_params_init();

  Route(int64_t tokens, int64_t experts, int64_t top_k) {
    logits.set({tokens, experts}, kFp32);
    bias.set({experts}, kFp32);
    given_ids.set({tokens, top_k}, kInt32);
    given_weights.set({tokens, top_k}, kFp32);
    map.set({10}, kInt32);
    ids.set({tokens, top_k}, kInt32);
    weights.set({tokens, top_k}, kFp32);
    offsets.set({experts + 1}, kInt32);
    pairs.set({tokens * top_k}, kInt32);
    slots.set({tokens, top_k}, kInt32);
    lse.set({tokens}, kFp32);
    params.logits = &logits.view;
    params.ids = &ids.view;
    params.weights = &weights.view;
    params.offsets = &offsets.view;
    params.pairs = &pairs.view;
    params.slots = &slots.view;
  }
  Route() : Route(6, 8, 2) {}
  Route(const Route&) = delete;

  void give() {
    params.logits = nullptr;
    params.given_ids = &given_ids.view;
  }
  flashmoe_status plan(flashmoe_plan* plan) const { return flashmoe_moe_route_plan(&params, plan); }
};

struct Forward {
  Tensor x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down, weights, offsets, pairs, slots, out,
      pre;
  flashmoe_moe_forward_params params = flashmoe_moe_forward_params_init();

  Forward(int64_t tokens, int64_t hidden, int64_t inner, int64_t experts, int64_t top_k) {
    x.set({tokens, hidden}, kBf16);
    w_gate_up.set({experts, 2 * inner, hidden}, kBf16);
    w_up.set({experts, inner, hidden}, kBf16);
    w_down.set({experts, hidden, inner}, kBf16);
    b_gate_up.set({experts, 2 * inner}, kFp32);
    b_up.set({experts, inner}, kBf16);
    b_down.set({experts, hidden}, kBf16);
    weights.set({tokens, top_k}, kFp32);
    offsets.set({experts + 1}, kInt32);
    pairs.set({tokens * top_k}, kInt32);
    slots.set({tokens, top_k}, kInt32);
    out.set({tokens, hidden}, kBf16);
    pre.set({tokens * top_k, 2 * inner}, kBf16);
    params.x = &x.view;
    params.w_gate_up = &w_gate_up.view;
    params.w_down = &w_down.view;
    params.weights = &weights.view;
    params.offsets = &offsets.view;
    params.pairs = &pairs.view;
    params.slots = &slots.view;
    params.out = &out.view;
  }
  Forward() : Forward(6, 32, 16, 4, 2) {}
  Forward(const Forward&) = delete;

  // Gate and up as two tensors.
  void separate() {
    params.gate = FLASHMOE_MOE_SEPARATE;
    w_gate_up.set({4, 16, 32}, kBf16);
    params.w_up = &w_up.view;
  }
  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_moe_forward_plan(&params, plan);
  }
};

struct Product {
  Tensor x, w, bias, offsets, counts, out;
  flashmoe_grouped_product_params params = flashmoe_grouped_product_params_init();

  Product() {
    x.set({30, 16}, kFp16);
    w.set({4, 24, 16}, kFp16);
    bias.set({4, 24}, kFp16);
    offsets.set({5}, kInt32);
    counts.set({4}, kInt32);
    out.set({30, 24}, kFp16);
    params.x = &x.view;
    params.w = &w.view;
    params.offsets = &offsets.view;
    params.out = &out.view;
  }
  Product(const Product&) = delete;

  void count() {
    x.set({4, 30, 16}, kFp16);
    out.set({4, 30, 24}, kFp16);
    params.offsets = nullptr;
    params.counts = &counts.view;
  }
  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_grouped_product_plan(&params, plan);
  }
};

struct Fused {
  Tensor tokens, router_weights, router_bias, logits, w_gate_up, w_down, out;
  flashmoe_fused_moe_params params = flashmoe_fused_moe_params_init();

  Fused() {
    tokens.set({6, 32}, kBf16);
    router_weights.set({8, 32}, kBf16);
    router_bias.set({8}, kFp32);
    logits.set({6, 8}, kFp32);
    w_gate_up.set({8, 32, 32}, kBf16);
    w_down.set({8, 32, 16}, kBf16);
    out.set({6, 32}, kBf16);
    params.tokens = &tokens.view;
    params.router_weights = &router_weights.view;
    params.w_gate_up = &w_gate_up.view;
    params.w_down = &w_down.view;
    params.out = &out.view;
    params.top_k = 2;
  }
  Fused(const Fused&) = delete;

  void give_logits() {
    params.router_weights = nullptr;
    params.logits = &logits.view;
  }
  flashmoe_status plan(flashmoe_plan* plan) const { return flashmoe_fused_moe_plan(&params, plan); }
};

template <class Call>
struct Case {
  const char* sentence;  // how it begins; nullptr: accepted
  std::function<void(Call*)> change;
};

template <class Call>
void check(const std::vector<Case<Call>>& cases) {
  bool all_right = true;
  for (const Case<Call>& one : cases) {
    Call call;
    one.change(&call);
    flashmoe_plan plan = flashmoe_plan_init();
    const flashmoe_status status = call.plan(&plan);
    const std::string sentence = status == FLASHMOE_OK ? "" : flashmoe_last_error();
    const bool right = one.sentence == nullptr ? status == FLASHMOE_OK
                                               : status == FLASHMOE_ERROR_INVALID_ARGUMENT &&
                                                     sentence.find(one.sentence) == 0;
    if (!right) {
      std::fprintf(stderr, "wanted \"%s\"\n   got \"%s\"\n",
                   one.sentence != nullptr ? one.sentence : "", sentence.c_str());
    }
    all_right = all_right && right;
  }
  CHECK(all_right);
}

void routes_are_checked() {
  check<Route>({
      {nullptr, [](Route*) {}},
      {nullptr, [](Route* c) { c->params.lse = &c->lse.view; }},
      {"flashmoe_moe_route_params.struct_size: got 7", [](Route* c) { c->params.struct_size = 7; }},
      {"logits: got neither", [](Route* c) { c->params.logits = nullptr; }},
      {"logits: got both", [](Route* c) { c->params.given_ids = &c->given_ids.view; }},
      {"logits: got 1 dimensions",
       [](Route* c) {
         c->logits.shape = {8};
         c->logits.refresh();
       }},
      {"logits: got dtype int32", [](Route* c) { c->logits.view.dtype = kInt32; }},
      {"weights: got dtype fp32, accepted is fp64 as logits's",
       [](Route* c) { c->logits.view.dtype = kFp64; }},
      {"weights: got dtype fp64, accepted is fp32",
       [](Route* c) { c->weights.view.dtype = kFp64; }},
      {"lse: got dtype fp32, accepted is fp64 as logits's",
       [](Route* c) {
         c->logits.view.dtype = c->weights.view.dtype = kFp64;
         c->params.lse = &c->lse.view;
       }},
      {nullptr,
       [](Route* c) {
         c->logits.view.dtype = c->weights.view.dtype = c->lse.view.dtype = kFp64;
         c->params.lse = &c->lse.view;
       }},
      {"logits: its last dimension has stride 2", [](Route* c) { c->logits.strides = {16, 2}; }},
      {nullptr, [](Route* c) { c->logits.strides = {-9, 1}; }},
      {"logits: its data begins", [](Route* c) { c->logits.move(2); }},
      {"logits: got 0 experts", [](Route* c) { c->logits.set({6, 0}, kFp32); }},
      {"logits: got 1025 experts", [](Route* c) { c->logits.set({6, 1025}, kFp32); }},
      {"logits: got device type 7", [](Route* c) { c->logits.view.device.device_type = 7; }},
      {"ids: got a null tensor", [](Route* c) { c->params.ids = nullptr; }},
      {"ids: got dtype int64", [](Route* c) { c->ids.view.dtype = kInt64; }},
      {"ids: got 0 experts of a token", [](Route* c) { c->ids.set({6, 0}, kInt32); }},
      {"ids: got 33 experts of a token", [](Route* c) { c->ids.set({6, 33}, kInt32); }},
      {"ids: its number of tokens is 5", [](Route* c) { c->ids.set({5, 2}, kInt32); }},
      {"ids: got strides [3, 1]", [](Route* c) { c->ids.strides = {3, 1}; }},
      {"ids: its data begins", [](Route* c) { c->ids.move(2); }},
      {"ids: it is on cuda:1", [](Route* c) { c->ids.view.device = {FLASHMOE_DEVICE_CUDA, 1}; }},
      {"weights: got dtype fp16, accepted is fp32",
       [](Route* c) { c->weights.view.dtype = kFp16; }},
      {"weights: its number of experts of a token is 3, but ids has 2",
       [](Route* c) { c->weights.set({6, 3}, kFp32); }},
      {"offsets: its number of experts and one more is 8, but logits has 9",
       [](Route* c) { c->offsets.set({8}, kInt32); }},
      {"pairs: its number of pairs is 11", [](Route* c) { c->pairs.set({11}, kInt32); }},
      {"slots: its number of tokens is 7", [](Route* c) { c->slots.set({7, 2}, kInt32); }},
      {"lse: its number of tokens is 7",
       [](Route* c) {
         c->lse.set({7}, kFp32);
         c->params.lse = &c->lse.view;
       }},
      {"scoring: got 3", [](Route* c) { c->params.scoring = 3; }},
      {"scoring: got -1", [](Route* c) { c->params.scoring = -1; }},
      {"renormalize: got 2", [](Route* c) { c->params.renormalize = 2; }},
      {"scale: got ", [](Route* c) { c->params.scale = NAN; }},
      {"scale: got -inf", [](Route* c) { c->params.scale = -HUGE_VALF; }},
      {nullptr, [](Route* c) { c->params.scale = -2.0f; }},
      {"reserved: got 1", [](Route* c) { c->params.reserved = 1; }},
      {"selection_bias: got a tensor", [](Route* c) { c->params.selection_bias = &c->bias.view; }},
      {"given_weights: got a tensor",
       [](Route* c) { c->params.given_weights = &c->given_weights.view; }},
      {"expert_map: got a tensor", [](Route* c) { c->params.expert_map = &c->map.view; }},
  });
  // More pairs than int32 counts; no memory holds them, and none is needed to say so.
  Route large(int64_t{1} << 30, 8, 2);
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(large.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("ids: got 1073741824 tokens with 2") == 0);
  Route wide(3, 4, 5);
  CHECK(wide.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("ids: got 5 experts of a token") == 0);
}

void groups_are_checked() {
  const auto grouped = [](int32_t scoring, int32_t groups, int32_t top) {
    return [=](Route* c) {
      c->params.scoring = scoring;
      c->params.num_groups = groups;
      c->params.top_groups = top;
    };
  };
  check<Route>({
      {nullptr, grouped(2, 4, 1)},
      {nullptr, grouped(2, 1, 1)},
      {nullptr, grouped(0, 1, 0)},
      {"num_groups: got 4 with scoring 0", grouped(0, 4, 2)},
      {"num_groups: got -1", grouped(2, -1, 0)},
      {"num_groups: got 3", grouped(2, 3, 1)},
      {"num_groups: got 8", grouped(2, 8, 1)},
      {"top_groups: got 0", grouped(2, 4, 0)},
      {"top_groups: got 5", grouped(2, 4, 5)},
      {"top_groups: got 1", grouped(2, 0, 1)},
      {"top_groups: got 2", grouped(2, 1, 2)},
  });
  Route call(6, 8, 5);
  grouped(2, 4, 2)(&call);
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(call.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("top_groups: got 2 groups of 2 experts, too few") ==
        0);
}

void given_ids_are_checked() {
  const auto given = [](std::function<void(Route*)> change) {
    return [=](Route* c) {
      c->give();
      change(c);
    };
  };
  check<Route>({
      {nullptr, given([](Route*) {})},
      {nullptr, given([](Route* c) { c->given_ids.view.dtype = kInt64; })},
      {nullptr, given([](Route* c) {
         c->params.given_weights = &c->given_weights.view;
         c->params.expert_map = &c->map.view;
         c->given_weights.view.dtype = kBf16;
         c->given_weights.strides = {7, 1};
       })},
      {"scoring: got 2", given([](Route* c) { c->params.scoring = 2; })},
      {"given_ids: got dtype fp32", given([](Route* c) { c->given_ids.view.dtype = kFp32; })},
      {"given_ids: its last dimension", given([](Route* c) { c->given_ids.strides = {1, 6}; })},
      {"given_ids: its data begins", given([](Route* c) {
         c->given_ids.view.dtype = kInt64;
         c->given_ids.move(4);
       })},
      {"given_weights: its number of tokens is 2", given([](Route* c) {
         c->given_weights.set({2, 2}, kFp32);
         c->params.given_weights = &c->given_weights.view;
       })},
      {"expert_map: got dtype int64", given([](Route* c) {
         c->map.view.dtype = kInt64;
         c->params.expert_map = &c->map.view;
       })},
      {"selection_bias: got a tensor",
       given([](Route* c) { c->params.selection_bias = &c->bias.view; })},
      {"lse: got a tensor", given([](Route* c) { c->params.lse = &c->lse.view; })},
      {"offsets: got 0 experts", given([](Route* c) { c->offsets.set({1}, kInt32); })},
      {"offsets: got 1025 experts", given([](Route* c) { c->offsets.set({1026}, kInt32); })},
      {"num_groups: got 2", given([](Route* c) { c->params.num_groups = 2; })},
  });
  // A token may name more experts than this call has.
  Route many(3, 4, 20);
  many.give();
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(many.plan(&plan) == FLASHMOE_OK);
}

void logits_of_fp64_are_for_the_cpu() {
  Route call;
  call.logits.view.dtype = kFp64;
  call.logits.view.device = {FLASHMOE_DEVICE_CUDA, 0};
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(call.plan(&plan) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(std::string(flashmoe_last_error()) ==
        "logits: it is on cuda:0 and of dtype fp64, accepted on a GPU are fp16, bf16 and fp32, on "
        "the CPU also fp64");
}

void layers_are_checked() {
  check<Forward>({
      {nullptr, [](Forward*) {}},
      {"x: got 3 dimensions", [](Forward* c) { c->x.set({2, 3, 32}, kBf16); }},
      {"x: its hidden size is 20", [](Forward* c) { c->x.set({6, 20}, kFp32); }},
      {"x: dimension 0 has stride 36", [](Forward* c) { c->x.strides = {36, 1}; }},
      {"x: its data begins", [](Forward* c) { c->x.move(8); }},
      {"w_gate_up: got a null tensor", [](Forward* c) { c->params.w_gate_up = nullptr; }},
      {"w_gate_up: got dtype fp64",
       [](Forward* c) { c->w_gate_up.view.dtype = {FLASHMOE_DTYPE_FLOAT, 64, 1}; }},
      {"w_gate_up: got dtype fp16, accepted is bf16",
       [](Forward* c) { c->w_gate_up.view.dtype = kFp16; }},
      {"w_gate_up: got 0 experts", [](Forward* c) { c->w_gate_up.set({0, 32, 32}, kBf16); }},
      {"w_gate_up: got 1025 experts", [](Forward* c) { c->w_gate_up.set({1025, 32, 32}, kBf16); }},
      {"w_gate_up: its number of rows is 24, accepted for gate",
       [](Forward* c) { c->w_gate_up.set({4, 24, 32}, kBf16); }},
      {"w_gate_up: its number of rows is 12",
       [](Forward* c) { c->w_gate_up.set({4, 12, 32}, kBf16); }},
      {"w_gate_up: its number of columns is 40, but x has 32",
       [](Forward* c) { c->w_gate_up.set({4, 32, 40}, kBf16); }},
      {nullptr, [](Forward* c) { c->w_gate_up.strides = {1024, 1, 32}; }},
      {nullptr, [](Forward* c) { c->w_gate_up.strides = {0, 40, 1}; }},
      {nullptr, [](Forward* c) { c->w_gate_up.strides = {-2000, 40, 1}; }},
      {"w_gate_up: its last two dimensions have strides 64 and 2",
       [](Forward* c) { c->w_gate_up.strides = {4096, 64, 2}; }},
      {"w_gate_up: dimension 1 has stride 33",
       [](Forward* c) { c->w_gate_up.strides = {4096, 33, 1}; }},
      {"w_gate_up: dimension 2 has stride 36",
       [](Forward* c) { c->w_gate_up.strides = {4096, 1, 36}; }},
      {"w_gate_up: dimension 0 has stride 1030",
       [](Forward* c) { c->w_gate_up.strides = {1030, 32, 1}; }},
      {"w_gate_up: its data begins", [](Forward* c) { c->w_gate_up.move(2); }},
      {"w_up: got a tensor", [](Forward* c) { c->params.w_up = &c->w_up.view; }},
      {"w_down: its number of experts is 5", [](Forward* c) { c->w_down.set({5, 32, 16}, kBf16); }},
      {"w_down: its number of rows is 40", [](Forward* c) { c->w_down.set({4, 40, 16}, kBf16); }},
      {"w_down: its number of columns is 32, but half of w_gate_up's rows has 16",
       [](Forward* c) { c->w_down.set({4, 32, 32}, kBf16); }},
      {"w_down: it is on cuda:0",
       [](Forward* c) { c->w_down.view.device.device_type = FLASHMOE_DEVICE_CUDA; }},
      {nullptr, [](Forward* c) { c->params.b_gate_up = &c->b_gate_up.view; }},
      {"b_gate_up: its number of rows is 16, but w_gate_up has 32",
       [](Forward* c) { c->params.b_gate_up = &c->b_up.view; }},
      {"b_gate_up: its last dimension has stride 4",
       [](Forward* c) {
         c->params.b_gate_up = &c->b_gate_up.view;
         c->b_gate_up.strides = {1, 4};
       }},
      {"b_up: got a tensor", [](Forward* c) { c->params.b_up = &c->b_up.view; }},
      {"b_down: got dtype fp16, accepted are fp32 and x's bf16",
       [](Forward* c) {
         c->b_down.view.dtype = kFp16;
         c->params.b_down = &c->b_down.view;
       }},
      {"b_down: its number of experts is 3",
       [](Forward* c) {
         c->b_down.set({3, 32}, kFp32);
         c->params.b_down = &c->b_down.view;
       }},
      {"weights: got a null tensor", [](Forward* c) { c->params.weights = nullptr; }},
      {"weights: got dtype bf16", [](Forward* c) { c->weights.view.dtype = kBf16; }},
      {"weights: got dtype fp64, accepted is fp32",
       [](Forward* c) { c->weights.view.dtype = kFp64; }},
      {"weights: its number of tokens is 4", [](Forward* c) { c->weights.set({4, 2}, kFp32); }},
      {"weights: got 33 experts of a token", [](Forward* c) { c->weights.set({6, 33}, kFp32); }},
      {"weights: got strides [4, 1]", [](Forward* c) { c->weights.strides = {4, 1}; }},
      {"offsets: its number of experts and one more is 4",
       [](Forward* c) { c->offsets.set({4}, kInt32); }},
      {"pairs: its number of pairs is 13", [](Forward* c) { c->pairs.set({13}, kInt32); }},
      {"pairs: got dtype int64", [](Forward* c) { c->pairs.view.dtype = kInt64; }},
      {"slots: its number of experts of a token is 3",
       [](Forward* c) { c->slots.set({6, 3}, kInt32); }},
      {"out: its number of tokens is 7", [](Forward* c) { c->out.set({7, 32}, kBf16); }},
      {"out: its hidden size is 40", [](Forward* c) { c->out.set({6, 40}, kBf16); }},
      {"out: got dtype fp32", [](Forward* c) { c->out.view.dtype = kFp32; }},
      {"out: its strides [0, 1]", [](Forward* c) { c->out.strides = {0, 1}; }},
      // A plan needs no memory: that outputs overlap other tensors matters to launches alone.
      {nullptr,
       [](Forward* c) {
         c->params.pre_activation = &c->pre.view;
         c->pre.view.data = c->out.view.data = c->x.view.data;
       }},
      {nullptr, [](Forward* c) { c->params.pre_activation = &c->pre.view; }},
      {"pre_activation: its number of columns is 16",
       [](Forward* c) {
         c->pre.set({12, 16}, kBf16);
         c->params.pre_activation = &c->pre.view;
       }},
      {"pre_activation: its number of pairs is 6",
       [](Forward* c) {
         c->pre.set({6, 32}, kBf16);
         c->params.pre_activation = &c->pre.view;
       }},
      {"gate: got 5", [](Forward* c) { c->params.gate = 5; }},
      {"gate: got -1", [](Forward* c) { c->params.gate = -1; }},
      {"activation: got 5", [](Forward* c) { c->params.activation = 5; }},
      {"alpha: got inf", [](Forward* c) { c->params.alpha = HUGE_VALF; }},
      {"alpha: got 2",
       [](Forward* c) {
         c->params.alpha = 2;
         c->params.activation = FLASHMOE_ACTIVATION_GELU;
       }},
      {nullptr, [](Forward* c) { c->params.alpha = 1.702f; }},
      {"limit: got -1", [](Forward* c) { c->params.limit = -1; }},
      {"limit: got inf", [](Forward* c) { c->params.limit = HUGE_VALF; }},
      {"up_offset: got ", [](Forward* c) { c->params.up_offset = NAN; }},
      {"weight_on_input: got 2", [](Forward* c) { c->params.weight_on_input = 2; }},
      {nullptr, [](Forward* c) { c->params.kernel = "cpu"; }},
      {nullptr, [](Forward* c) { c->params.kernel = ""; }},
      {"kernel: got \"sm9\", built in are ", [](Forward* c) { c->params.kernel = "sm9"; }},
  });
}

void other_gates_are_checked() {
  check<Forward>({
      {nullptr, [](Forward* c) { c->separate(); }},
      {nullptr,
       [](Forward* c) {
         c->separate();
         c->params.b_up = &c->b_up.view;
       }},
      {"w_up: got a null tensor",
       [](Forward* c) {
         c->separate();
         c->params.w_up = nullptr;
       }},
      {"w_up: its number of rows is 24",
       [](Forward* c) {
         c->separate();
         c->w_up.set({4, 24, 32}, kBf16);
       }},
      {"w_down: its number of columns is 16, but w_gate_up's rows has 32",
       [](Forward* c) { c->params.gate = FLASHMOE_MOE_NO_GATE; }},
      {nullptr,
       [](Forward* c) {
         c->params.gate = FLASHMOE_MOE_NO_GATE;
         c->w_gate_up.set({4, 16, 32}, kBf16);
       }},
      {"up_offset: got 1",
       [](Forward* c) {
         c->params.gate = FLASHMOE_MOE_NO_GATE;
         c->params.up_offset = 1;
       }},
  });
}

void products_are_checked() {
  check<Product>({
      {nullptr, [](Product*) {}},
      {nullptr, [](Product* c) { c->count(); }},
      {nullptr, [](Product* c) { c->params.bias = &c->bias.view; }},
      {"x: got 1 dimensions", [](Product* c) { c->x.set({16}, kFp16); }},
      {"x: got a null tensor", [](Product* c) { c->params.x = nullptr; }},
      {"x: its number of columns is 12", [](Product* c) { c->x.set({30, 12}, kFp32); }},
      {"w: its number of columns is 24", [](Product* c) { c->w.set({4, 24, 24}, kFp16); }},
      {"w: its number of rows is 20", [](Product* c) { c->w.set({4, 20, 16}, kFp16); }},
      {"bias: its number of rows is 16",
       [](Product* c) {
         c->bias.set({4, 16}, kFp16);
         c->params.bias = &c->bias.view;
       }},
      {"counts: got a tensor", [](Product* c) { c->params.counts = &c->counts.view; }},
      {"offsets: got a null tensor", [](Product* c) { c->params.offsets = nullptr; }},
      {"offsets: its number of experts and one more is 4",
       [](Product* c) { c->offsets.set({4}, kInt32); }},
      {"counts: got a null tensor",
       [](Product* c) {
         c->count();
         c->params.counts = nullptr;
       }},
      {"offsets: got a tensor",
       [](Product* c) {
         c->count();
         c->params.offsets = &c->offsets.view;
       }},
      {"counts: its number of experts is 5",
       [](Product* c) {
         c->count();
         c->counts.set({5}, kInt32);
       }},
      {"x: its number of experts is 3",
       [](Product* c) {
         c->count();
         c->x.set({3, 30, 16}, kFp16);
       }},
      {"out: its number of rows is 29", [](Product* c) { c->out.set({29, 24}, kFp16); }},
      {"out: its number of columns is 16", [](Product* c) { c->out.set({30, 16}, kFp16); }},
      {"out: got 3 dimensions", [](Product* c) { c->out.set({1, 30, 24}, kFp16); }},
      {nullptr, [](Product* c) { c->out.view.data = c->x.view.data; }},
      {"kernel: got \"sm90_\"", [](Product* c) { c->params.kernel = "sm90_"; }},
  });
}

// Places for what later versions compute.
void scales_are_refused() {
  const auto ends_so = [](const char* name) {
    return std::string(flashmoe_last_error()) ==
           std::string(name) +
               ": got a tensor, accepted is none with tensors of fp16, bf16, fp32 and "
               "fp64, which have no scales";
  };
  flashmoe_plan plan = flashmoe_plan_init();
  struct Member {
    const char* name;
    const flashmoe_tensor* flashmoe_moe_forward_params::* field;
  };
  const Member members[] = {{"x_scale", &flashmoe_moe_forward_params::x_scale},
                            {"w_gate_up_scale", &flashmoe_moe_forward_params::w_gate_up_scale},
                            {"w_up_scale", &flashmoe_moe_forward_params::w_up_scale},
                            {"w_down_scale", &flashmoe_moe_forward_params::w_down_scale}};
  for (const Member& member : members) {
    Forward layer;
    layer.params.*member.field = &layer.weights.view;
    CHECK(layer.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT && ends_so(member.name));
  }
  Product of_x, of_w;
  of_x.params.x_scale = &of_x.x.view;
  CHECK(of_x.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT && ends_so("x_scale"));
  of_w.params.w_scale = &of_w.w.view;
  CHECK(of_w.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT && ends_so("w_scale"));
}

void plans_say_what_will_run() {
  flashmoe_plan plan = flashmoe_plan_init();
  Forward layer;
  CHECK(layer.plan(&plan) == FLASHMOE_OK);
  CHECK(plan.struct_size == sizeof plan && std::strcmp(plan.family, "cpu") == 0);
  CHECK(std::strcmp(plan.operation, "moe_forward") == 0);
  CHECK(plan.bytes ==
        2.0 * (6 * 32 + 4 * 32 * 32 + 4 * 32 * 16 + 6 * 32) + 4.0 * (12 + 5 + 12 + 12));
  CHECK(plan.launch_count == 3 && plan.flops == 2.0 * 3 * 12 * 32 * 16);
  const char* const names[] = {"moe_up_cpu_", "moe_down_cpu_", "moe_combine_cpu_"};
  for (int i = 0; i < 3; ++i) {
    CHECK(std::strstr(plan.launches[i].kernel, names[i]) == plan.launches[i].kernel);
    CHECK(plan.launches[i].grid[0] > 0 && plan.launches[i].block[0] > 0);
  }
  size_t bytes = 0;
  CHECK(flashmoe_moe_forward_workspace_size(&layer.params, &bytes) == FLASHMOE_OK);
  CHECK(bytes == plan.workspace_bytes && bytes > 0);
  layer.params.gate = FLASHMOE_MOE_NO_GATE;
  layer.w_gate_up.set({4, 16, 32}, kBf16);
  CHECK(layer.plan(&plan) == FLASHMOE_OK && plan.flops == 2.0 * 2 * 12 * 32 * 16);

  Product product;
  CHECK(product.plan(&plan) == FLASHMOE_OK && plan.flops == 2.0 * 30 * 16 * 24);
  CHECK(plan.launch_count == 1);
  product.count();
  CHECK(product.plan(&plan) == FLASHMOE_OK && plan.flops == 2.0 * 4 * 30 * 16 * 24);

  Route route;
  CHECK(route.plan(&plan) == FLASHMOE_OK && plan.launch_count == 1 && plan.flops == 0);
}

// Zeros for a tensor to lie in.
struct Memory {
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<std::vector<Line>> blocks;

  void place(Tensor* tensor) {
    size_t bytes = tensor->view.dtype.bits / 8;
    for (const int64_t extent : tensor->shape) bytes *= static_cast<size_t>(extent);
    tensor->view.data = block(bytes);
  }
  void* block(size_t bytes) {
    blocks.emplace_back(bytes / sizeof(Line) + 1);
    return blocks.back().data();
  }
};

struct Ready : Forward {
  Memory memory;
  size_t bytes = 0;
  void* workspace = nullptr;

  Ready() {
    for (Tensor* tensor : {&x, &w_gate_up, &w_down, &weights, &offsets, &pairs, &slots, &out}) {
      memory.place(tensor);
    }
    CHECK(flashmoe_moe_forward_workspace_size(&params, &bytes) == FLASHMOE_OK);
    workspace = memory.block(bytes);
  }
  void run() const {
    CHECK(flashmoe_moe_forward(&params, workspace, bytes, nullptr) == FLASHMOE_OK);
  }
};

// Every launch of a call, and only of the last one that launched something.
void every_launch_is_read_back() {
  const Ready layer;
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(layer.plan(&plan) == FLASHMOE_OK);
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  const auto launched_as_planned = [&] {
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
    return count == plan.launch_count &&
           std::memcmp(launches, plan.launches, static_cast<size_t>(count) * sizeof launches[0]) ==
               0;
  };
  for (int i = 0; i < 2; ++i) {
    layer.run();
    CHECK(launched_as_planned() && count == 3);
  }
  // Neither a call that fails nor an empty one launches anything.
  CHECK(flashmoe_moe_forward(&layer.params, nullptr, 0, nullptr) != FLASHMOE_OK);
  CHECK(launched_as_planned());
  Forward empty(0, 32, 16, 4, 2);
  CHECK(flashmoe_moe_forward(&empty.params, layer.workspace, layer.bytes, nullptr) == FLASHMOE_OK);
  CHECK(launched_as_planned());

  // What a log's callback calls comes before the call that it tells of.
  struct Inner {
    Product product;
    Memory memory;
    int lines = 0;
  } inner;
  for (Tensor* tensor :
       {&inner.product.x, &inner.product.w, &inner.product.offsets, &inner.product.out}) {
    inner.memory.place(tensor);
  }
  size_t bytes = 0;
  CHECK(flashmoe_grouped_product_workspace_size(&inner.product.params, &bytes) == FLASHMOE_OK);
  inner.memory.block(bytes);
  const auto reenter = [](int32_t, const char*, void* user) {
    Inner& self = *static_cast<Inner*>(user);
    ++self.lines;
    CHECK(flashmoe_grouped_product(&self.product.params, self.memory.blocks.back().data(),
                                   self.memory.blocks.back().size() * sizeof(Memory::Line),
                                   nullptr) == FLASHMOE_OK);
    flashmoe_launch own[FLASHMOE_MAX_LAUNCHES];
    int32_t own_count = 0;
    CHECK(flashmoe_last_launches(own, &own_count) == FLASHMOE_OK && own_count == 1);
    CHECK(std::strstr(own[0].kernel, "grouped_product_cpu_") == own[0].kernel);
  };
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, reenter, &inner) == FLASHMOE_OK);
  layer.run();
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
  CHECK(inner.lines == 1 && launched_as_planned());  // what a callback calls logs nothing
}

// The first and the last byte of another tensor that a workspace may not have.
void a_workspace_lies_apart() {
  Forward layer;
  uintptr_t place = uintptr_t{1} << 40;  // far from one another, and never read
  for (Tensor* tensor : {&layer.x, &layer.w_gate_up, &layer.w_down, &layer.weights, &layer.offsets,
                         &layer.pairs, &layer.slots, &layer.out}) {
    tensor->view.data = reinterpret_cast<void*>(place += uintptr_t{1} << 32);
  }
  size_t bytes = 0;
  CHECK(flashmoe_moe_forward_workspace_size(&layer.params, &bytes) == FLASHMOE_OK);
  for (const auto& [tensor, name] : {std::pair{&layer.x, "x"}, std::pair{&layer.out, "out"}}) {
    char* const data = static_cast<char*>(tensor->view.data);
    for (void* const where : {data, data + 6 * 32 * 2 - 16, data + 16 - bytes / 16 * 16}) {
      CHECK(flashmoe_moe_forward(&layer.params, where, bytes, nullptr) ==
            FLASHMOE_ERROR_INVALID_ARGUMENT);
      CHECK(std::string(flashmoe_last_error())
                .find(std::string("workspace: it shares memory with ") + name) == 0);
    }
  }
}

// The router's product, routing and layer, of which the first is absent where logits are given.
void a_fused_call_has_the_launches_of_all() {
  const char* const kernels[] = {"grouped_product_cpu_", "moe_route_cpu", "moe_up_cpu_",
                                 "moe_down_cpu_", "moe_combine_cpu_"};
  for (const bool with_logits : {false, true}) {
    Fused call;
    if (with_logits) call.give_logits();
    Memory memory;
    for (Tensor* tensor : {&call.tokens, &call.router_weights, &call.logits, &call.w_gate_up,
                           &call.w_down, &call.out}) {
      memory.place(tensor);
    }
    flashmoe_plan plan = flashmoe_plan_init();
    CHECK(call.plan(&plan) == FLASHMOE_OK);
    const int32_t absent = with_logits ? 1 : 0;
    CHECK(std::strcmp(plan.operation, "fused_moe") == 0 && plan.launch_count == 5 - absent);
    for (int32_t i = 0; i < plan.launch_count; ++i) {
      CHECK(std::strstr(plan.launches[i].kernel, kernels[i + absent]) == plan.launches[i].kernel);
    }
    CHECK(plan.flops == 2.0 * 3 * 12 * 32 * 16 + (with_logits ? 0.0 : 2.0 * 6 * 32 * 8));
    size_t bytes = 0;
    CHECK(flashmoe_fused_moe_workspace_size(&call.params, &bytes) == FLASHMOE_OK);
    CHECK(bytes == plan.workspace_bytes);
    void* const workspace = memory.block(bytes);
    CHECK(flashmoe_fused_moe(&call.params, workspace, bytes, nullptr) == FLASHMOE_OK);
    flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
    int32_t count = 0;
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK && count == plan.launch_count);
    CHECK(std::memcmp(launches, plan.launches, static_cast<size_t>(count) * sizeof launches[0]) ==
          0);
  }
}

void fused_calls_are_checked_by_their_own_names() {
  check<Fused>({
      {nullptr, [](Fused*) {}},
      {nullptr, [](Fused* c) { c->give_logits(); }},
      {nullptr, [](Fused* c) { c->params.router_bias = &c->router_bias.view; }},
      {"tokens: got a null", [](Fused* c) { c->params.tokens = nullptr; }},
      {"tokens: its hidden size is 28", [](Fused* c) { c->tokens.set({6, 28}, kBf16); }},
      {"router_weights: ", [](Fused* c) { c->params.router_weights = nullptr; }},
      {"router_weights: ", [](Fused* c) { c->router_weights.set({8, 24}, kBf16); }},
      {"router_weights: ", [](Fused* c) { c->router_weights.view.dtype = kFp16; }},
      {"router_bias: ",
       [](Fused* c) {
         c->params.router_bias = &c->router_bias.view;
         c->router_bias.set({7}, kFp32);
       }},
      {"router_bias: ",
       [](Fused* c) {
         c->give_logits();
         c->params.router_bias = &c->router_bias.view;
       }},
      {"router_weights: got both it and logits",
       [](Fused* c) { c->params.logits = &c->logits.view; }},
      {"logits: ",
       [](Fused* c) {
         c->give_logits();
         c->logits.set({5, 8}, kFp32);
       }},
      {"top_k: got 0", [](Fused* c) { c->params.top_k = 0; }},
      {"top_k: got 9", [](Fused* c) { c->params.top_k = 9; }},
      {"router_weights: its number of experts is 8, but w_gate_up has 7",
       [](Fused* c) { c->w_gate_up.set({7, 32, 32}, kBf16); }},
      {"out: its number of tokens is 5", [](Fused* c) { c->out.set({5, 32}, kBf16); }},
      {"kernel: got \"sm90_\"", [](Fused* c) { c->params.kernel = "sm90_"; }},
  });
}

// As many pairs, or rows, as kernels can round up to tiles in 32 bits, and not one more.
void pairs_have_a_limit() {
  constexpr int64_t kMost = (int64_t{1} << 31) - (int64_t{1} << 16);
  const auto ends_so = [](const char* sentence) {
    return std::string(flashmoe_last_error()).find(sentence) == 0;
  };
  flashmoe_plan plan = flashmoe_plan_init();
  for (const int64_t top_k : {1, 8, 32}) {
    CHECK(Route(kMost / top_k, 32, top_k).plan(&plan) == FLASHMOE_OK);
    CHECK(Route(kMost / top_k + 1, 32, top_k).plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(ends_so("ids: got ") &&
          std::strstr(flashmoe_last_error(), "accepted are at most 2^31 - 2^16 pairs") != nullptr);
    CHECK(Forward(kMost / top_k, 8, 8, 32, top_k).plan(&plan) == FLASHMOE_OK);
    CHECK(Forward(kMost / top_k + 1, 8, 8, 32, top_k).plan(&plan) ==
          FLASHMOE_ERROR_INVALID_ARGUMENT);
    CHECK(ends_so("weights: got ") &&
          std::strstr(flashmoe_last_error(), "accepted are at most 2^31 - 2^16 pairs") != nullptr);
  }
  for (const bool counted : {false, true}) {
    for (const int64_t more : {0, 1}) {
      Product product;
      if (counted) product.count();
      const int64_t rows = kMost + more;
      product.x.set(counted ? std::vector<int64_t>{4, rows, 16} : std::vector<int64_t>{rows, 16},
                    kFp16);
      product.out.set(counted ? std::vector<int64_t>{4, rows, 24} : std::vector<int64_t>{rows, 24},
                      kFp16);
      CHECK((product.plan(&plan) == FLASHMOE_OK) == (more == 0));
      CHECK(more == 0 || ends_so("x: got 2147418113 rows, accepted are at most 2^31 - 2^16"));
    }
  }
}

// Extents whose products leave 64 bits; no memory holds them, and none is needed to say so.
void extents_that_no_memory_holds_are_refused() {
  flashmoe_plan plan = flashmoe_plan_init();
  Forward layer(int64_t{1} << 3, int64_t{1} << 54, 8, 1, 32);
  CHECK(layer.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error()).find("x: got 18014398509481984 columns for 256 pairs") ==
        0);
  Forward wide(int64_t{1} << 3, 8, int64_t{1} << 54, 1, 32);
  CHECK(wide.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(flashmoe_last_error())
            .find("w_gate_up: got 18014398509481984 columns for 256 pairs") == 0);
}

void other_arguments_are_checked() {
  Forward layer;
  flashmoe_plan plan = flashmoe_plan_init();
  const auto refused = [](flashmoe_status status, const char* sentence) {
    return status == FLASHMOE_ERROR_INVALID_ARGUMENT &&
           std::string(flashmoe_last_error()).find(sentence) == 0;
  };
  CHECK(refused(flashmoe_moe_forward_plan(nullptr, &plan), "params: got a null pointer"));
  CHECK(refused(flashmoe_moe_forward_plan(&layer.params, nullptr), "plan: got a null pointer"));
  CHECK(refused(flashmoe_moe_forward_workspace_size(&layer.params, nullptr),
                "bytes: got a null pointer"));
  plan.struct_size = 8;
  CHECK(refused(flashmoe_moe_forward_plan(&layer.params, &plan), "flashmoe_plan.struct_size"));
  CHECK(refused(flashmoe_moe_route(nullptr, nullptr, 0, nullptr), "params: got a null pointer"));
  CHECK(refused(flashmoe_grouped_product(nullptr, nullptr, 0, nullptr),
                "params: got a null pointer"));

  alignas(64) static unsigned char memory[64] = {};
  size_t bytes = 0;
  CHECK(flashmoe_moe_forward_workspace_size(&layer.params, &bytes) == FLASHMOE_OK);
  CHECK(flashmoe_moe_forward(&layer.params, memory, bytes - 1, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(std::string(flashmoe_last_error()).find("flashmoe_moe_forward_workspace_size tells") !=
        std::string::npos);
  CHECK(refused(flashmoe_moe_forward(&layer.params, nullptr, bytes, nullptr), "workspace: got "));
  CHECK(
      refused(flashmoe_moe_forward(&layer.params, memory + 8, bytes, nullptr), "workspace: got "));
}

void without_tokens_there_are_offsets() {
  int32_t offsets[9];
  std::memset(offsets, 0xA5, sizeof offsets);
  Route route(0, 8, 2);
  for (Tensor* empty : {&route.logits, &route.ids, &route.weights, &route.pairs, &route.slots}) {
    empty->view.data = nullptr;
  }
  route.offsets.view.data = offsets;
  alignas(64) unsigned char memory[4096];
  CHECK(flashmoe_moe_route(&route.params, memory, sizeof memory, nullptr) == FLASHMOE_OK);
  for (const int32_t offset : offsets) CHECK(offset == 0);

  Forward layer(0, 32, 16, 4, 2);
  for (Tensor* empty : {&layer.x, &layer.weights, &layer.pairs, &layer.slots, &layer.out}) {
    empty->view.data = nullptr;
  }
  size_t bytes = 0;
  CHECK(flashmoe_moe_forward_workspace_size(&layer.params, &bytes) == FLASHMOE_OK);
  std::vector<unsigned char> workspace(bytes + 64);
  void* const aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  CHECK(flashmoe_moe_forward(&layer.params, aligned, bytes, nullptr) == FLASHMOE_OK);
}

}  // namespace

int main() {
  routes_are_checked();
  groups_are_checked();
  given_ids_are_checked();
  logits_of_fp64_are_for_the_cpu();
  layers_are_checked();
  other_gates_are_checked();
  products_are_checked();
  scales_are_refused();
  plans_say_what_will_run();
  every_launch_is_read_back();
  a_workspace_lies_apart();
  a_fused_call_has_the_launches_of_all();
  fused_calls_are_checked_by_their_own_names();
  pairs_have_a_limit();
  extents_that_no_memory_holds_are_refused();
  other_arguments_are_checked();
  without_tokens_there_are_offsets();
  return 0;
}
