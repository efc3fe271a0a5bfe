// flashmoe_fused_moe on the CPU: the bits of the three calls that it is made of, its plan and its
// workspace, and what it refuses, in the names of its own arguments.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

constexpr flashmoe_dtype kFp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kFp16 = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_device kCpu = {FLASHMOE_DEVICE_CPU, 0};
constexpr unsigned char kUntouched = 0x5a;

// A fraction below 1, cut to the dtype.
uint32_t bits_of(float value, flashmoe_dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype.bits == 32) return bits;
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT) return bits >> 16;
  const uint32_t exponent = bits >> 23 & 0xffu;
  const uint32_t half = exponent <= 112 ? 0 : (exponent - 112) << 10 | (bits >> 13 & 0x3ffu);
  return (bits >> 16 & 0x8000u) | half;
}

// A tensor and its memory, which begins on a multiple of 256 bytes.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  flashmoe_tensor view = {};
  std::vector<unsigned char> memory;
  size_t bytes = 0;

  // With `gap` elements behind every row.
  void make(std::vector<int64_t> extents, flashmoe_dtype dtype, int64_t gap = 0) {
    shape = std::move(extents);
    strides.assign(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * shape[axis] + (axis + 1 == shape.size() ? gap : 0);
    }
    bytes = static_cast<size_t>(shape[0] * strides[0]) * dtype.bits / 8;
    memory.assign(bytes + 256, kUntouched);
    view.data = begin();
    view.device = kCpu;
    view.dtype = dtype;
    refresh();
  }
  void fill(std::mt19937* random) {
    const size_t size = view.dtype.bits / 8u;
    for (size_t at = 0; at < bytes; at += size) {
      const float value = static_cast<float>((*random)() % 2001) / 1000.0f - 1.0f;
      const uint32_t made = bits_of(value, view.dtype);
      std::memcpy(begin() + at, &made, size);
    }
  }
  // The same elements with the last two axes stored the other way round.
  void transpose() {
    const size_t last = shape.size() - 1;
    strides[last - 1] = 1;
    strides[last] = shape[last - 1];
    refresh();
  }
  void refresh() {
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    view.strides = strides.data();
  }
  unsigned char* begin() {
    return memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  }
  bool same_as(Tensor& other) {
    return bytes == other.bytes && std::memcmp(begin(), other.begin(), bytes) == 0;
  }
  bool untouched() {
    return std::all_of(begin(), begin() + bytes, [](unsigned char c) { return c == kUntouched; });
  }
};

// Exactly `bytes` of workspace.
struct Workspace {
  std::vector<unsigned char> memory;
  unsigned char* data;

  explicit Workspace(size_t bytes) : memory(bytes + 256, kUntouched) {
    data = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  }
};

struct Case {
  int64_t tokens = 33;
  int64_t experts = 8;
  int32_t top_k = 2;
  flashmoe_dtype dtype = kFp32;
  bool from_logits = false;
  flashmoe_dtype logits_dtype = kFp32;
  int router_bias = 0;  // 1: fp32, 2: of the tokens' dtype
  bool router_transposed = false;
  int64_t gap = 0;  // elements behind each row of tokens, of a router, logits and out
  int32_t scoring = FLASHMOE_MOE_SOFTMAX;
  bool selection_bias = false;
  int32_t groups = 0;
  int32_t renormalize = 0;
  float scale = 0;
  int32_t gate = FLASHMOE_MOE_GATE_UP;
  int32_t activation = FLASHMOE_ACTIVATION_SILU;
  bool biased = false;
  bool weights_transposed = false;
  bool clamped = false;
  int32_t weight_on_input = 0;
};

constexpr int64_t kHidden = 32;
constexpr int64_t kInner = 16;

struct Layer {
  Case c;
  Tensor tokens, router_weights, router_bias, logits, selection_bias, w_gate_up, w_up, w_down,
      b_gate_up, b_up, b_down, out;
  flashmoe_fused_moe_params params = flashmoe_fused_moe_params_init();

  explicit Layer(const Case& the_case = {}, unsigned seed = 0) : c(the_case) {
    std::mt19937 random(seed);
    const auto add = [&](Tensor* tensor, const flashmoe_tensor** param, std::vector<int64_t> shape,
                         flashmoe_dtype dtype, int64_t gap) {
      tensor->make(std::move(shape), dtype, gap);
      if (tensor != &out) tensor->fill(&random);
      *param = &tensor->view;
    };
    add(&tokens, &params.tokens, {c.tokens, kHidden}, c.dtype, c.gap);
    if (c.from_logits) {
      add(&logits, &params.logits, {c.tokens, c.experts}, c.logits_dtype, c.gap);
    } else {
      add(&router_weights, &params.router_weights, {c.experts, kHidden}, c.dtype, c.gap);
      if (c.router_transposed) router_weights.transpose();
      if (c.router_bias != 0) {
        add(&router_bias, &params.router_bias, {c.experts}, c.router_bias == 1 ? kFp32 : c.dtype,
            0);
      }
    }
    if (c.selection_bias) add(&selection_bias, &params.selection_bias, {c.experts}, kFp32, 0);
    const bool separate = c.gate == FLASHMOE_MOE_SEPARATE;
    const int64_t rows = separate || c.gate == FLASHMOE_MOE_NO_GATE ? kInner : 2 * kInner;
    add(&w_gate_up, &params.w_gate_up, {c.experts, rows, kHidden}, c.dtype, 0);
    if (separate) add(&w_up, &params.w_up, {c.experts, kInner, kHidden}, c.dtype, 0);
    add(&w_down, &params.w_down, {c.experts, kHidden, kInner}, c.dtype, 0);
    if (c.weights_transposed) {
      for (Tensor* weights : {&w_gate_up, &w_up, &w_down}) {
        if (!weights->shape.empty()) weights->transpose();
      }
    }
    if (c.biased) {
      add(&b_gate_up, &params.b_gate_up, {c.experts, rows}, kFp32, 0);
      if (separate) add(&b_up, &params.b_up, {c.experts, kInner}, c.dtype, 0);
      add(&b_down, &params.b_down, {c.experts, kHidden}, c.dtype, 0);
    }
    add(&out, &params.out, {c.tokens, kHidden}, c.dtype, c.gap);
    params.top_k = c.top_k;
    params.scoring = c.scoring;
    params.renormalize = c.renormalize;
    params.num_groups = c.groups;
    params.top_groups = c.groups > 1 ? c.groups / 2 : 0;
    params.scale = c.scale;
    params.gate = c.gate;
    params.activation = c.activation;
    params.alpha = c.clamped && c.activation == FLASHMOE_ACTIVATION_SILU ? 1.702f : 0;
    params.limit = c.clamped ? 0.5f : 0;
    params.up_offset = c.clamped && c.gate != FLASHMOE_MOE_NO_GATE ? 1.0f : 0;
    params.weight_on_input = c.weight_on_input;
  }
  Layer(const Layer&) = delete;

  size_t workspace_bytes() const {
    size_t bytes = 0;
    CHECK(flashmoe_fused_moe_workspace_size(&params, &bytes) == FLASHMOE_OK);
    return bytes;
  }
  flashmoe_plan plan() const {
    flashmoe_plan made = flashmoe_plan_init();
    CHECK(flashmoe_fused_moe_plan(&params, &made) == FLASHMOE_OK);
    return made;
  }
  void run() const {
    const size_t bytes = workspace_bytes();
    const Workspace workspace(bytes);
    CHECK(flashmoe_fused_moe(&params, workspace.data, bytes, nullptr) == FLASHMOE_OK);
    for (size_t i = bytes; i < workspace.memory.size() - 256; ++i) {
      CHECK(workspace.data[i] == kUntouched);
    }
  }
};

// The same by the product, routing and the layer, one call each.
struct Steps {
  std::vector<flashmoe_plan> plans;
  Tensor out;

  explicit Steps(Layer& layer) {
    const Case& c = layer.c;
    Tensor router, bias, logits, all_rows, ids, weights, offsets, pairs, slots;
    const flashmoe_tensor* given = layer.params.logits;
    if (!c.from_logits) {
      router.view = layer.router_weights.view;
      router.shape = {1, c.experts, kHidden};
      router.strides = {0, layer.router_weights.strides[0], layer.router_weights.strides[1]};
      router.refresh();
      all_rows.make({2}, kInt32);
      const int32_t ends[2] = {0, INT32_MAX};
      std::memcpy(all_rows.begin(), ends, sizeof ends);
      logits.make({c.tokens, c.experts}, c.dtype);
      auto product = flashmoe_grouped_product_params_init();
      product.x = layer.params.tokens;
      product.w = &router.view;
      if (c.router_bias != 0) {
        bias.view = layer.router_bias.view;
        bias.shape = {1, c.experts};
        bias.strides = {0, 1};
        bias.refresh();
        product.bias = &bias.view;
      }
      product.offsets = &all_rows.view;
      product.out = &logits.view;
      run(product, flashmoe_grouped_product_plan, flashmoe_grouped_product);
      given = &logits.view;
    }
    ids.make({c.tokens, c.top_k}, kInt32);
    weights.make({c.tokens, c.top_k}, kFp32);
    offsets.make({c.experts + 1}, kInt32);
    pairs.make({c.tokens * c.top_k}, kInt32);
    slots.make({c.tokens, c.top_k}, kInt32);
    out.make({c.tokens, kHidden}, c.dtype, c.gap);
    auto route = flashmoe_moe_route_params_init();
    route.logits = given;
    route.selection_bias = layer.params.selection_bias;
    route.ids = &ids.view;
    route.weights = &weights.view;
    route.offsets = &offsets.view;
    route.pairs = &pairs.view;
    route.slots = &slots.view;
    route.scoring = layer.params.scoring;
    route.renormalize = layer.params.renormalize;
    route.num_groups = layer.params.num_groups;
    route.top_groups = layer.params.top_groups;
    route.scale = layer.params.scale;
    run(route, flashmoe_moe_route_plan, flashmoe_moe_route);
    auto forward = flashmoe_moe_forward_params_init();
    forward.x = layer.params.tokens;
    forward.w_gate_up = layer.params.w_gate_up;
    forward.w_up = layer.params.w_up;
    forward.w_down = layer.params.w_down;
    forward.b_gate_up = layer.params.b_gate_up;
    forward.b_up = layer.params.b_up;
    forward.b_down = layer.params.b_down;
    forward.weights = &weights.view;
    forward.offsets = &offsets.view;
    forward.pairs = &pairs.view;
    forward.slots = &slots.view;
    forward.out = &out.view;
    forward.gate = layer.params.gate;
    forward.activation = layer.params.activation;
    forward.alpha = layer.params.alpha;
    forward.limit = layer.params.limit;
    forward.up_offset = layer.params.up_offset;
    forward.weight_on_input = layer.params.weight_on_input;
    run(forward, flashmoe_moe_forward_plan, flashmoe_moe_forward);
  }

 private:
  template <class Params, class Plan, class Run>
  void run(const Params& params, Plan plan, Run call) {
    flashmoe_plan made = flashmoe_plan_init();
    CHECK(plan(&params, &made) == FLASHMOE_OK);
    plans.push_back(made);
    const Workspace workspace(made.workspace_bytes);
    CHECK(call(&params, workspace.data, made.workspace_bytes, nullptr) == FLASHMOE_OK);
  }
};

// ---- what it computes
// -----------------------------------------------------------------------------

bool same_launch(const flashmoe_launch& a, const flashmoe_launch& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

void check_against_steps(const Case& c, unsigned seed) {
  Layer layer(c, seed);
  Steps steps(layer);
  const flashmoe_plan plan = layer.plan();
  CHECK(std::string(plan.operation) == "fused_moe");
  CHECK(std::string(plan.family) == "cpu");
  CHECK(std::string(plan.isa) == steps.plans.back().isa);
  int32_t count = 0;
  double flops = 0;
  uint64_t most = 0;
  for (const flashmoe_plan& step : steps.plans) {
    for (int32_t i = 0; i < step.launch_count; ++i) {
      CHECK(count < plan.launch_count && same_launch(plan.launches[count++], step.launches[i]));
    }
    flops += step.flops;
    most = std::max(most, step.workspace_bytes);
  }
  CHECK(count == plan.launch_count && count == (c.from_logits ? 4 : 5));
  CHECK(plan.flops == flops);
  CHECK(plan.workspace_bytes == layer.workspace_bytes());
  // What lies between the operations, each part on a multiple of 256 bytes, and the most that one
  // needs.
  uint64_t between = 0;
  const auto add = [&](int64_t elements, uint64_t bytes) {
    between += (static_cast<uint64_t>(elements) * bytes + 255) / 256 * 256;
  };
  if (!c.from_logits) add(c.tokens * c.experts, c.dtype.bits / 8u);
  for (int i = 0; i < 4; ++i) add(c.tokens * c.top_k, 4);
  add(c.experts + 1, 4);
  CHECK(plan.workspace_bytes == between + most);

  for (int i = 0; i < 2; ++i) {
    layer.run();
    CHECK(layer.out.same_as(steps.out));
    if (c.tokens == 0) continue;
    flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
    int32_t launched = 0;
    CHECK(flashmoe_last_launches(launches, &launched) == FLASHMOE_OK);
    CHECK(launched == plan.launch_count);
    for (int32_t k = 0; k < launched; ++k) CHECK(same_launch(launches[k], plan.launches[k]));
  }
}

void bits_are_those_of_three_calls() {
  unsigned seed = 0;
  for (const flashmoe_dtype dtype : {kFp32, kFp16, kBf16}) {
    for (const int64_t tokens : {0, 1, 33, 300}) {
      for (const int64_t experts : {8, 64}) {
        for (const int32_t top_k : {1, 2, 8}) {  // 8: each of 8 experts
          Case c;
          c.dtype = dtype;
          c.tokens = tokens;
          c.experts = experts;
          c.top_k = top_k;
          check_against_steps(c, ++seed);
          c.router_bias = 1 + static_cast<int>(seed % 2);
          c.gap = 8;
          c.renormalize = 1;
          check_against_steps(c, ++seed);
        }
      }
    }
  }
}

void every_option_reaches_its_operation() {
  std::mt19937 random(0);
  const auto below = [&](unsigned n) { return static_cast<int32_t>(random() % n); };
  const flashmoe_dtype dtypes[] = {kFp32, kFp16, kBf16};
  for (unsigned i = 0; i < 400; ++i) {
    Case c;
    c.tokens = std::vector<int64_t>{1, 7, 33}[static_cast<size_t>(below(3))];
    c.experts = below(2) == 0 ? 8 : 64;
    c.top_k = 1 + below(4);
    c.dtype = dtypes[below(3)];
    c.from_logits = below(3) == 0;
    if (c.from_logits && below(2) == 0) c.experts = 6;  // of which there is no product
    c.logits_dtype = dtypes[below(3)];
    c.router_bias = below(3);
    c.router_transposed = below(3) == 0;
    c.gap = c.router_transposed ? 0 : 8 * below(2);
    c.scoring = below(3);
    if (c.scoring == FLASHMOE_MOE_SIGMOID) {
      c.selection_bias = below(2) == 0;
      c.groups = c.experts == 6 ? 0 : std::vector<int32_t>{0, 1, 2}[static_cast<size_t>(below(3))];
    }
    c.renormalize = below(2);
    c.scale = below(2) == 0 ? 0 : 2.5f;
    c.gate = below(5);
    c.activation = below(5);
    c.biased = below(2) == 0;
    c.weights_transposed = below(3) == 0;
    c.clamped = below(2) == 0;
    c.weight_on_input = below(2);
    check_against_steps(c, i);
  }
}

// A call does with what was told when there were fewer threads, by as many as it has room for.
void a_workspace_stays_enough_when_threads_grow() {
  Case c;
  c.tokens = 300;
  c.experts = 64;
  Layer layer(c);
  CHECK(flashmoe_set_num_threads(1) == FLASHMOE_OK);
  const size_t one = layer.workspace_bytes();
  layer.run();
  const std::vector<unsigned char> want(layer.out.begin(), layer.out.begin() + layer.out.bytes);
  CHECK(flashmoe_set_num_threads(4) == FLASHMOE_OK);
  const size_t four = layer.workspace_bytes();
  CHECK(four > one);
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  for (const size_t bytes : {one, (one + four) / 2, four - 1, four}) {
    const Workspace workspace(bytes);
    std::memset(layer.out.begin(), kUntouched, layer.out.bytes);
    CHECK(flashmoe_fused_moe(&layer.params, workspace.data, bytes, nullptr) == FLASHMOE_OK);
    CHECK(std::memcmp(layer.out.begin(), want.data(), want.size()) == 0);
    for (size_t i = bytes; i < workspace.memory.size() - 256; ++i) {
      CHECK(workspace.data[i] == kUntouched);
    }
    CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
    CHECK((launches[2].block[0] == 1) == (bytes == one));
  }
  const Workspace workspace(one);
  CHECK(flashmoe_fused_moe(&layer.params, workspace.data, one - 1, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  // What the query tells, and not the least that would do.
  CHECK(std::string(flashmoe_last_error()) ==
        "workspace_size: got " + std::to_string(one - 1) + " bytes, this call needs " +
            std::to_string(four) + " (flashmoe_fused_moe_workspace_size tells)");
  CHECK(flashmoe_set_num_threads(1) == FLASHMOE_OK);
}

// ---- what it refuses
// ------------------------------------------------------------------------------

struct Fault {
  const char* sentence;  // how it begins; nullptr: the call is right
  std::function<void(Layer*)> change;
};

// A plan, a query and a call say the same, and the call writes nothing.
flashmoe_status refused(Layer& layer, std::string* sentence) {
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status status = flashmoe_fused_moe_plan(&layer.params, &plan);
  if (status == FLASHMOE_OK) return status;
  *sentence = flashmoe_last_error();
  size_t bytes = 7;
  CHECK(flashmoe_fused_moe_workspace_size(&layer.params, &bytes) == status);
  CHECK(bytes == 7 && *sentence == flashmoe_last_error());
  static Workspace workspace(4096);
  CHECK(flashmoe_fused_moe(&layer.params, workspace.data, 4096, nullptr) == status);
  CHECK(*sentence == flashmoe_last_error());
  CHECK(layer.out.untouched());
  CHECK(std::all_of(workspace.memory.begin(), workspace.memory.end(),
                    [](unsigned char c) { return c == kUntouched; }));
  return status;
}

void check_faults(const Case& c, const std::vector<Fault>& faults) {
  bool all_right = true;
  for (const Fault& fault : faults) {
    Layer layer(c);
    fault.change(&layer);
    std::string sentence;
    const flashmoe_status status = refused(layer, &sentence);
    const bool right = fault.sentence == nullptr ? status == FLASHMOE_OK
                                                 : status == FLASHMOE_ERROR_INVALID_ARGUMENT &&
                                                       sentence.find(fault.sentence) == 0;
    if (!right) {
      std::fprintf(stderr, "wanted \"%s\"\n   got \"%s\"\n",
                   fault.sentence != nullptr ? fault.sentence : "", sentence.c_str());
    }
    all_right = all_right && right;
  }
  CHECK(all_right);
}

void set_rank(Tensor* tensor, int32_t rank) {
  tensor->shape.resize(static_cast<size_t>(rank), 8);
  tensor->strides.resize(static_cast<size_t>(rank), 8);
  tensor->refresh();
}

void routers_are_checked() {
  Case c;
  c.router_bias = 1;
  check_faults(
      c,
      {
          {nullptr, [](Layer*) {}},
          {nullptr, [](Layer* l) { l->params.router_bias = nullptr; }},
          {"flashmoe_fused_moe_params.struct_size: got 8",
           [](Layer* l) { l->params.struct_size = 8; }},
          {"router_weights: got neither it nor logits",
           [](Layer* l) { l->params.router_weights = nullptr; }},
          {"router_weights: got both it and logits",
           [](Layer* l) { l->params.logits = l->params.tokens; }},
          {"tokens: got a null tensor", [](Layer* l) { l->params.tokens = nullptr; }},
          {"tokens: got 1 dimensions", [](Layer* l) { set_rank(&l->tokens, 1); }},
          {"tokens: got dtype int32", [](Layer* l) { l->tokens.view.dtype = kInt32; }},
          {"tokens: got device type 7", [](Layer* l) { l->tokens.view.device.device_type = 7; }},
          {"tokens: its hidden size is 36, accepted are multiples of 8",
           [](Layer* l) { l->tokens.make({33, 36}, kFp32); }},
          {"tokens: its hidden size is 0", [](Layer* l) { l->tokens.make({33, 0}, kFp32); }},
          {"tokens: its last dimension has stride 2", [](Layer* l) { l->tokens.strides[1] = 2; }},
          {"tokens: dimension 0 has stride 34", [](Layer* l) { l->tokens.strides[0] = 34; }},
          {"tokens: its data begins",
           [](Layer* l) { l->tokens.view.data = l->tokens.begin() + 8; }},
          {"tokens: got 2147418113 tokens with 1 experts each",
           [](Layer* l) {
             l->params.top_k = 1;
             l->tokens.shape[0] = (int64_t{1} << 31) - (int64_t{1} << 16) + 1;
           }},
          {"router_weights: got 3 dimensions, accepted are 2",
           [](Layer* l) { set_rank(&l->router_weights, 3); }},
          {"router_weights: its shape is a null pointer",
           [](Layer* l) { l->router_weights.view.shape = nullptr; }},
          {"router_weights: its data is a null pointer",
           [](Layer* l) { l->router_weights.view.data = nullptr; }},
          {"router_weights: it is on cuda:0 but tokens is on cpu",
           [](Layer* l) { l->router_weights.view.device = {FLASHMOE_DEVICE_CUDA, 0}; }},
          {"router_weights: got dtype fp16, accepted is fp32 as tokens's",
           [](Layer* l) { l->router_weights.view.dtype = kFp16; }},
          {"router_weights: got 0 experts",
           [](Layer* l) { l->router_weights.make({0, kHidden}, kFp32); }},
          {"router_weights: got 1032 experts",
           [](Layer* l) { l->router_weights.make({1032, kHidden}, kFp32); }},
          {"router_weights: got 6 experts, accepted are multiples of 8, or logits",
           [](Layer* l) { l->router_weights.make({6, kHidden}, kFp32); }},
          {"router_weights: its number of experts is 16, but w_gate_up has 8",
           [](Layer* l) {
             l->params.router_bias = nullptr;
             l->router_weights.make({16, kHidden}, kFp32);
           }},
          {"router_weights: its number of columns is 24, but tokens has 32",
           [](Layer* l) { l->router_weights.make({8, 24}, kFp32); }},
          {"router_weights: its last two dimensions have strides 34 and 2",
           [](Layer* l) { l->router_weights.strides = {34, 2}; }},
          {"router_weights: dimension 0 has stride 34",
           [](Layer* l) { l->router_weights.strides[0] = 34; }},
          {"router_weights: dimension 1 has stride 10",
           [](Layer* l) { l->router_weights.strides = {1, 10}; }},
          {"router_weights: its data begins",
           [](Layer* l) { l->router_weights.view.data = l->router_weights.begin() + 8; }},
          {"router_bias: got 2 dimensions, accepted are 1",
           [](Layer* l) { set_rank(&l->router_bias, 2); }},
          {"router_bias: got 30 dimensions, accepted are 1",
           [](Layer* l) { set_rank(&l->router_bias, 30); }},
          {"router_bias: got -1 dimensions, accepted are 1",
           [](Layer* l) { l->router_bias.view.ndim = -1; }},
          {"router_bias: its shape is a null pointer",
           [](Layer* l) { l->router_bias.view.shape = nullptr; }},
          {"router_bias: its number of experts is 7, but router_weights has 8",
           [](Layer* l) { l->router_bias.shape[0] = 7; }},
          {"router_bias: it is on cuda:0 but tokens is on cpu",
           [](Layer* l) { l->router_bias.view.device = {FLASHMOE_DEVICE_CUDA, 0}; }},
          {"router_bias: got dtype bf16, accepted is tokens's fp32",
           [](Layer* l) { l->router_bias.view.dtype = kBf16; }},
          {"router_bias: its last dimension has stride 2",
           [](Layer* l) { l->router_bias.strides[0] = 2; }},
          {"router_bias: its data begins",
           [](Layer* l) { l->router_bias.view.data = l->router_bias.begin() + 2; }},
          {nullptr, [](Layer* l) { l->router_bias.view.strides = nullptr; }},
          {nullptr, [](Layer* l) { l->router_weights.view.strides = nullptr; }},
      });
}

void logits_are_checked() {
  Case c;
  c.from_logits = true;
  check_faults(
      c,
      {
          {nullptr, [](Layer*) {}},
          {nullptr, [](Layer* l) { l->logits.strides[0] = 9; }},
          {"logits: got 1 dimensions, accepted are 2", [](Layer* l) { set_rank(&l->logits, 1); }},
          {"logits: it is on cuda:0 but tokens is on cpu",
           [](Layer* l) { l->logits.view.device = {FLASHMOE_DEVICE_CUDA, 0}; }},
          {"logits: got dtype int32", [](Layer* l) { l->logits.view.dtype = kInt32; }},
          {"logits: got dtype fp64, accepted are fp16, bf16 and fp32",
           [](Layer* l) { l->logits.view.dtype = {FLASHMOE_DTYPE_FLOAT, 64, 1}; }},
          {"logits: its number of tokens is 32, but tokens has 33",
           [](Layer* l) { l->logits.shape[0] = 32; }},
          {"logits: its number of experts is 7, but w_gate_up has 8",
           [](Layer* l) { l->logits.shape[1] = 7; }},
          {"logits: got 0 experts", [](Layer* l) { l->logits.shape[1] = 0; }},
          {"logits: got 1025 experts", [](Layer* l) { l->logits.shape[1] = 1025; }},
          {"logits: its last dimension has stride 2", [](Layer* l) { l->logits.strides[1] = 2; }},
          {"logits: its data begins",
           [](Layer* l) { l->logits.view.data = l->logits.begin() + 2; }},
          {"router_bias: got a tensor, accepted is none with logits",
           [](Layer* l) { l->params.router_bias = l->params.tokens; }},
          {"selection_bias: got a tensor",
           [](Layer* l) { l->params.selection_bias = l->params.tokens; }},
      });
}

void routing_is_checked() {
  Case c;
  c.scoring = FLASHMOE_MOE_SIGMOID;
  c.selection_bias = true;
  check_faults(c, {
                      {nullptr, [](Layer*) {}},
                      {nullptr, [](Layer* l) { l->params.top_k = 8; }},
                      {"top_k: got 9, accepted are 1 to 32, and no more than the 8 experts",
                       [](Layer* l) { l->params.top_k = 9; }},
                      {"top_k: got 0", [](Layer* l) { l->params.top_k = 0; }},
                      {"top_k: got -1", [](Layer* l) { l->params.top_k = -1; }},
                      {"scoring: got 3", [](Layer* l) { l->params.scoring = 3; }},
                      {"renormalize: got 2", [](Layer* l) { l->params.renormalize = 2; }},
                      {"num_groups: got 3", [](Layer* l) { l->params.num_groups = 3; }},
                      {"top_groups: got 1, accepted with num_groups 0",
                       [](Layer* l) { l->params.top_groups = 1; }},
                      {"scale: got inf", [](Layer* l) { l->params.scale = HUGE_VALF; }},
                      {"selection_bias: its number of experts is 7, but router_weights has 8",
                       [](Layer* l) { l->selection_bias.shape[0] = 7; }},
                      {"selection_bias: it is on cuda:0 but router_weights is on cpu",
                       [](Layer* l) { l->selection_bias.view.device = {FLASHMOE_DEVICE_CUDA, 0}; }},
                      {"selection_bias: got dtype bf16",
                       [](Layer* l) { l->selection_bias.view.dtype = kBf16; }},
                  });
  Case many;
  many.experts = 64;
  check_faults(many,
               {{nullptr, [](Layer* l) { l->params.top_k = 32; }},
                {"top_k: got 33, accepted are 1 to 32", [](Layer* l) { l->params.top_k = 33; }}});
}

void layers_are_checked() {
  Case c;
  c.biased = true;
  check_faults(
      c,
      {
          {nullptr, [](Layer*) {}},
          {"w_gate_up: got a null tensor", [](Layer* l) { l->params.w_gate_up = nullptr; }},
          {"w_gate_up: got 2 dimensions", [](Layer* l) { set_rank(&l->w_gate_up, 2); }},
          {"w_gate_up: its shape is a null pointer",
           [](Layer* l) { l->w_gate_up.view.shape = nullptr; }},
          {"w_gate_up: its number of columns is 24, but tokens has 32",
           [](Layer* l) { l->w_gate_up.make({8, 32, 24}, kFp32); }},
          {"w_gate_up: it is on cuda:0 but tokens is on cpu",
           [](Layer* l) { l->w_gate_up.view.device = {FLASHMOE_DEVICE_CUDA, 0}; }},
          {"w_up: got a tensor", [](Layer* l) { l->params.w_up = l->params.w_down; }},
          {"w_down: got a null tensor", [](Layer* l) { l->params.w_down = nullptr; }},
          {"w_down: its number of experts is 16",
           [](Layer* l) { l->w_down.make({16, kHidden, kInner}, kFp32); }},
          {"b_gate_up: its number of rows is 24", [](Layer* l) { l->b_gate_up.shape[1] = 24; }},
          {"b_up: got a tensor", [](Layer* l) { l->params.b_up = l->params.b_down; }},
          {"b_down: its number of rows is 24", [](Layer* l) { l->b_down.shape[1] = 24; }},
          {"out: got a null tensor", [](Layer* l) { l->params.out = nullptr; }},
          {"out: its number of tokens is 32, but tokens has 33",
           [](Layer* l) { l->out.shape[0] = 32; }},
          {"out: its hidden size is 24, but tokens has 32", [](Layer* l) { l->out.shape[1] = 24; }},
          {"out: got dtype fp16, accepted is fp32 as tokens's",
           [](Layer* l) { l->out.view.dtype = kFp16; }},
          {"out: its strides", [](Layer* l) { l->out.strides[0] = 16; }},
          {"gate: got 5", [](Layer* l) { l->params.gate = 5; }},
          {"activation: got -1", [](Layer* l) { l->params.activation = -1; }},
          {"alpha: got nan", [](Layer* l) { l->params.alpha = NAN; }},
          {"limit: got -1", [](Layer* l) { l->params.limit = -1; }},
          {"up_offset: got inf", [](Layer* l) { l->params.up_offset = HUGE_VALF; }},
          {"weight_on_input: got 2", [](Layer* l) { l->params.weight_on_input = 2; }},
          {nullptr, [](Layer* l) { l->params.kernel = "cpu"; }},
          {"kernel: got \"sm12\", built in are ", [](Layer* l) { l->params.kernel = "sm12"; }},
          {"kernel: got \"moe_up_cpu_fp32\"",
           [](Layer* l) { l->params.kernel = "moe_up_cpu_fp32"; }},
      });
}

void other_pointers_are_checked() {
  Layer layer;
  const auto says = [](flashmoe_status status, const char* sentence) {
    return status == FLASHMOE_ERROR_INVALID_ARGUMENT &&
           std::string(flashmoe_last_error()).find(sentence) == 0;
  };
  flashmoe_plan plan = flashmoe_plan_init();
  size_t bytes = 0;
  CHECK(says(flashmoe_fused_moe_plan(nullptr, &plan), "params: got a null pointer"));
  CHECK(says(flashmoe_fused_moe_plan(&layer.params, nullptr), "plan: got a null pointer"));
  CHECK(says(flashmoe_fused_moe_workspace_size(nullptr, &bytes), "params: got a null pointer"));
  CHECK(
      says(flashmoe_fused_moe_workspace_size(&layer.params, nullptr), "bytes: got a null pointer"));
  CHECK(says(flashmoe_fused_moe(nullptr, nullptr, 0, nullptr), "params: got a null pointer"));
  plan.struct_size = 8;
  CHECK(says(flashmoe_fused_moe_plan(&layer.params, &plan), "flashmoe_plan.struct_size"));
}

// Whatever is wrong, a sentence begins with an argument of the caller's, and nothing is written.
void any_fault_names_an_argument() {
  const std::set<std::string> names = {
      "tokens",         "router_weights", "router_bias", "logits",
      "selection_bias", "w_gate_up",      "w_up",        "w_down",
      "b_gate_up",      "b_up",           "b_down",      "out",
      "top_k",          "scoring",        "renormalize", "num_groups",
      "top_groups",     "scale",          "gate",        "activation",
      "alpha",          "limit",          "up_offset",   "kernel",
      "weight_on_input"};
  std::mt19937 random(1);
  const auto below = [&](unsigned n) { return static_cast<int32_t>(random() % n); };
  int failed = 0;
  for (int i = 0; i < 20000; ++i) {
    Case c;
    c.tokens = 3;
    c.dtype = below(2) == 0 ? kFp32 : kBf16;
    c.from_logits = below(3) == 0;
    c.router_bias = below(3);
    c.scoring = below(3);
    c.selection_bias = c.scoring == FLASHMOE_MOE_SIGMOID && below(2) == 0;
    c.gate = below(5);
    c.biased = below(2) == 0;
    Layer l(c);
    Tensor* const tensors[] = {&l.tokens,    &l.router_weights, &l.router_bias, &l.logits,
                               &l.w_gate_up, &l.w_up,           &l.w_down,      &l.b_gate_up,
                               &l.b_up,      &l.b_down,         &l.out,         &l.selection_bias};
    for (int faults = 1 + below(2); faults > 0; --faults) {
      Tensor& t = *tensors[below(12)];
      const size_t axis = t.shape.empty() ? 0 : random() % t.shape.size();
      int32_t* const numbers[] = {&l.params.top_k,       &l.params.scoring,
                                  &l.params.renormalize, &l.params.num_groups,
                                  &l.params.top_groups,  &l.params.gate,
                                  &l.params.activation,  &l.params.weight_on_input};
      float* const reals[] = {&l.params.scale, &l.params.alpha, &l.params.limit,
                              &l.params.up_offset};
      switch (below(t.shape.empty() ? 2 : 10)) {
        case 0: *numbers[below(8)] = below(12) - 2; break;
        case 1: *reals[below(4)] = std::vector<float>{-1, 0.5f, NAN}[random() % 3]; break;
        case 2: t.shape[axis] += 8 * (below(3) - 1) + below(2); break;
        case 3: t.strides[axis] = std::vector<int64_t>{0, 1, 2, 8, 40}[random() % 5]; break;
        case 4: t.view.data = below(2) == 0 ? nullptr : t.begin() + 2; break;
        case 5:
          t.view.dtype = std::vector<flashmoe_dtype>{kFp16, kBf16, kInt32}[random() % 3];
          break;
        case 6: t.view.device = {FLASHMOE_DEVICE_CUDA, 0}; break;
        case 7: t.view.ndim += below(2) == 0 ? 1 : -1; break;
        case 8: t.view.device.device_type = FLASHMOE_DEVICE_CUDA_HOST; break;
        default: t.shape[axis] = int64_t{1} << below(63); break;
      }
    }
    std::string sentence;
    if (refused(l, &sentence) == FLASHMOE_OK) continue;
    ++failed;
    const std::string name = sentence.substr(0, sentence.find(':'));
    if (names.count(name) == 0) std::fprintf(stderr, "%s\n", sentence.c_str());
    CHECK(names.count(name) == 1);
  }
  CHECK(failed > 5000);
}

void workspaces_are_checked() {
  CHECK(flashmoe_set_num_threads(1) == FLASHMOE_OK);
  Case c;
  c.router_bias = 1;
  c.scoring = FLASHMOE_MOE_SIGMOID;
  c.selection_bias = true;
  c.gate = FLASHMOE_MOE_SEPARATE;
  c.biased = true;
  Layer layer(c);
  const size_t bytes = layer.workspace_bytes();
  const Workspace workspace(bytes);
  const auto says = [&](void* memory, size_t size, flashmoe_status status, const char* sentence) {
    CHECK(flashmoe_fused_moe(&layer.params, memory, size, nullptr) == status);
    if (std::string(flashmoe_last_error()).find(sentence) != 0) {
      std::fprintf(stderr, "wanted \"%s\"\n", sentence);
      CHECK(false);
    }
    CHECK(layer.out.untouched());
  };
  for (const size_t less : {bytes - 1, bytes / 2, size_t{256}, size_t{0}}) {
    says(workspace.data, less, FLASHMOE_ERROR_WORKSPACE_TOO_SMALL,
         ("workspace_size: got " + std::to_string(less) + " bytes, this call needs " +
          std::to_string(bytes) + " (flashmoe_fused_moe_workspace_size tells)")
             .c_str());
  }
  const char* const aligned = "workspace: got ";
  says(nullptr, bytes, FLASHMOE_ERROR_INVALID_ARGUMENT, aligned);
  says(workspace.data + 8, bytes, FLASHMOE_ERROR_INVALID_ARGUMENT, aligned);
  CHECK(std::all_of(workspace.memory.begin(), workspace.memory.end(),
                    [](unsigned char byte) { return byte == kUntouched; }));

  // Beside it: tensors that begin or end in the workspace.
  const std::vector<std::pair<const char*, Tensor*>> tensors = {
      {"tokens", &layer.tokens},
      {"router_weights", &layer.router_weights},
      {"router_bias", &layer.router_bias},
      {"selection_bias", &layer.selection_bias},
      {"w_gate_up", &layer.w_gate_up},
      {"w_up", &layer.w_up},
      {"w_down", &layer.w_down},
      {"b_gate_up", &layer.b_gate_up},
      {"b_up", &layer.b_up},
      {"b_down", &layer.b_down},
      {"out", &layer.out}};
  Workspace wide(bytes + (1 << 18));
  unsigned char* const middle = wide.data + (1 << 17);
  for (const auto& [name, tensor] : tensors) {
    const std::string shares = std::string("workspace: it shares memory with ") + name;
    for (unsigned char* at :
         {middle, middle + (bytes - 1) / 16 * 16, middle - (tensor->bytes - 1) / 16 * 16}) {
      tensor->view.data = at;
      says(middle, bytes, FLASHMOE_ERROR_INVALID_ARGUMENT, shares.c_str());
    }
    // Memory behind what is used is the caller's, however large he says the workspace is.
    tensor->view.data = middle + (bytes + 15) / 16 * 16;
    CHECK(flashmoe_fused_moe(&layer.params, middle, bytes + (1 << 16), nullptr) == FLASHMOE_OK);
    std::memset(layer.out.begin(), kUntouched, layer.out.bytes);
    if (tensor != &layer.out) {
      tensor->view.data = layer.out.view.data = wide.data;
      const std::string out_shares = std::string("out: it shares memory with ") + name;
      says(middle, bytes, FLASHMOE_ERROR_INVALID_ARGUMENT, out_shares.c_str());
    }
    layer.out.view.data = layer.out.begin();
    tensor->view.data = tensor->begin();
  }
}

// ---- the log, and devices that are not here
// -------------------------------------------------------

void a_call_is_one_line_of_the_log() {
  std::vector<std::string> lines;
  const auto keep = [](int32_t, const char* line, void* user) {
    static_cast<std::vector<std::string>*>(user)->push_back(line);
  };
  Case c;
  c.dtype = kBf16;
  const Layer layer(c);
  c.from_logits = true;
  c.tokens = 0;
  const Layer none(c);
  const flashmoe_plan plan = layer.plan();
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, keep, &lines) == FLASHMOE_OK);
  layer.run();
  none.run();
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
  CHECK(lines.size() == 2);
  CHECK(lines[0].find("fused_moe router=yes tokens=33 experts=8 top_k=2 logits=bf16 "
                      "scoring=softmax renormalize=0 scale=0") == 0);
  CHECK(lines[0].find("; tokens=33 hidden=32 inner=16 experts=8 top_k=2 bf16 gate=gate_up") !=
        std::string::npos);
  size_t at = lines[0].find(" device=cpu stream=(nil) -> ");
  for (int32_t i = 0; i < plan.launch_count; ++i) {
    CHECK(at != std::string::npos);
    at = lines[0].find(plan.launches[i].kernel, at + 1);
  }
  CHECK(at != std::string::npos);
  CHECK(lines[1].find("fused_moe router=no tokens=0 ") == 0);
}

// Nothing is launched on a model of GPUs, of which a library without CUDA has no plan.
void models_of_gpus_have_plans_alone() {
  Case c;
  c.dtype = kBf16;
  Layer layer(c);
  for (Tensor* tensor :
       {&layer.tokens, &layer.router_weights, &layer.w_gate_up, &layer.w_down, &layer.out}) {
    tensor->view.device = {FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_H100};
  }
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status status = flashmoe_fused_moe_plan(&layer.params, &plan);
  CHECK(status == FLASHMOE_OK || status == FLASHMOE_ERROR_ARCH_NOT_BUILT);
  const Workspace workspace(size_t{16} << 20);
  CHECK(flashmoe_fused_moe(&layer.params, workspace.data, size_t{16} << 20, nullptr) ==
        (status == FLASHMOE_OK ? FLASHMOE_ERROR_NO_DEVICE : status));
  CHECK(std::string(flashmoe_last_error()).find("tokens: ") == 0);
  CHECK(layer.out.untouched());
  if (status != FLASHMOE_OK) return;
  CHECK(std::string(plan.operation) == "fused_moe" && plan.launch_count >= 3);
  CHECK(plan.workspace_bytes == layer.workspace_bytes());
}

}  // namespace

int main() {
  CHECK(flashmoe_set_num_threads(2) == FLASHMOE_OK);
  bits_are_those_of_three_calls();
  every_option_reaches_its_operation();
  a_workspace_stays_enough_when_threads_grow();
  routers_are_checked();
  logits_are_checked();
  routing_is_checked();
  layers_are_checked();
  other_pointers_are_checked();
  any_fault_names_an_argument();
  workspaces_are_checked();
  a_call_is_one_line_of_the_log();
  models_of_gpus_have_plans_alone();
  return 0;
}
