// The mixture of experts' calls that a thread keeps planned (core/known_calls.h): on made-up
// families, so that it needs no GPU. Whatever was called before, a call comes to what it comes to on
// a thread that has called nothing yet.
#include <algorithm>
#include <atomic>
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
#include "core/moe.h"
#include "core/moe_dispatch.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"

namespace flashmoe {
namespace {

// ---- families ------------------------------------------------------------------------------------

std::atomic<int> plans{0};
thread_local flashmoe_status many_says = FLASHMOE_OK;  // for a test

struct Launched {
  int count = 0;
  const char* family = "";
  MoeRouteProblem route = {};
  MoeForwardProblem forward = {};
  GroupedProductProblem product = {};
  MoePlan plan = {};
  std::string kernel;  // the problem's, while the caller's text was there
};
thread_local Launched launched;

int64_t size_of(const MoeRouteProblem& p) { return p.tokens; }
int64_t size_of(const MoeForwardProblem& p) { return p.tokens + (p.gated ? 1000 : 0); }
int64_t size_of(const GroupedProductProblem& p) { return p.rows; }
const char* kernel_of(const MoeRouteProblem&) { return ""; }
const char* kernel_of(const MoeForwardProblem& p) { return p.kernel != nullptr ? p.kernel : ""; }
const char* kernel_of(const GroupedProductProblem& p) {
  return p.kernel != nullptr ? p.kernel : "";
}
void keep(const MoeRouteProblem& p) { launched.route = p; }
void keep(const MoeForwardProblem& p) { launched.forward = p; }
void keep(const GroupedProductProblem& p) { launched.product = p; }

template <class Problem>
flashmoe_status fill(const Problem& problem, MoePlan* plan) {
  ++plans;
  plan->info.launches = 1;
  plan->info.stage[0].grid[0] = static_cast<uint32_t>(size_of(problem));
  plan->info.stage[0].tile_rows = 10 + problem.device.device_id;  // devices differ
  plan->info.workspace_bytes = 256 * static_cast<uint64_t>(size_of(problem));
  return FLASHMOE_OK;
}

// Serves up to 150 rows, and leaves those above 5 to others where they do.
template <class Problem>
flashmoe_status plan_few(const Problem& problem, MoePlan* plan, const Reason& reason) {
  if (problem.device.device_id == 2) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:2 does not exist");
  }
  if (size_of(problem) % 1000 > 150) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "x: got %d rows, accepted are at most 150",
                         static_cast<int>(size_of(problem) % 1000));
  }
  return fill(problem, plan);
}

template <class Problem>
const char* yields(const Problem& problem) {
  return size_of(problem) % 1000 > 5 ? "many rows" : nullptr;
}

template <class Problem>
flashmoe_status plan_many(const Problem& problem, MoePlan* plan, const Reason& reason) {
  if (problem.device.device_id == 2) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:2 does not exist");
  }
  if (many_says != FLASHMOE_OK) return reason.refuse(many_says, "x: not these");
  return fill(problem, plan);
}

template <const char* kName, class Problem>
flashmoe_status launch(const Problem& problem, const MoePlan& plan, void*, void*) {
  ++launched.count;
  launched.family = kName;
  launched.plan = plan;
  launched.kernel = kernel_of(problem);
  keep(problem);
  return FLASHMOE_OK;
}

constexpr char kFew[] = "stream";
constexpr char kMany[] = "sm89";
constexpr char kHost[] = "cpu";

template <const char* kName>
constexpr MoeFamily family(int32_t device_type, bool few) {
  return {kName,
          device_type,
          {few ? plan_few<MoeRouteProblem> : plan_many<MoeRouteProblem>,
           launch<kName, MoeRouteProblem>, few ? yields<MoeRouteProblem> : nullptr},
          {few ? plan_few<MoeForwardProblem> : plan_many<MoeForwardProblem>,
           launch<kName, MoeForwardProblem>, few ? yields<MoeForwardProblem> : nullptr},
          {few ? plan_few<GroupedProductProblem> : plan_many<GroupedProductProblem>,
           launch<kName, GroupedProductProblem>, few ? yields<GroupedProductProblem> : nullptr}};
}

const MoeFamily few = family<kFew>(FLASHMOE_DEVICE_CUDA, true);
const MoeFamily many = family<kMany>(FLASHMOE_DEVICE_CUDA, false);
const MoeFamily host = family<kHost>(FLASHMOE_DEVICE_CPU, false);

}  // namespace

const MoeFamily* const kMoeFamilies[] = {&few, &many, &host};
const size_t kMoeFamilyCount = 3;

namespace {

// ---- calls ---------------------------------------------------------------------------------------

constexpr uintptr_t kData = uintptr_t{1} << 40;  // never read
constexpr flashmoe_dtype kHalf = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kFloat = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kInteger = {FLASHMOE_DTYPE_INT, 32, 1};

struct Tensor {
  bool given = false;
  int64_t shape[4] = {};
  int64_t strides[4] = {};
  flashmoe_tensor view = {};

  void set(const std::vector<int64_t>& extents, flashmoe_dtype dtype) {
    given = true;
    int64_t step = 1;
    for (size_t axis = extents.size(); axis-- > 0;) {
      shape[axis] = extents[axis];
      strides[axis] = step;
      step *= extents[axis];
    }
    view.device = {FLASHMOE_DEVICE_CUDA, 0};
    view.ndim = static_cast<int32_t>(extents.size());
    view.dtype = dtype;
  }
};

// Calls of an operation, whose tensors and options a test may change.
template <class Operation>
struct Call;

template <class P>
struct AnyCall {
  using Params = P;

  std::vector<Tensor> tensors;
  std::string kernel;
  Params params;

  explicit AnyCall(size_t count, const Params& empty) : tensors(count), params(empty) {
    for (size_t i = 0; i < count; ++i) at(i, kData + (uintptr_t{i} << 32));
  }

  void at(size_t i, uintptr_t address) { tensors[i].view.data = reinterpret_cast<void*>(address); }
  void move(ptrdiff_t bytes) {
    for (Tensor& tensor : tensors) tensor.view.data = static_cast<char*>(tensor.view.data) + bytes;
  }
  void put_on(flashmoe_device device) {
    for (Tensor& tensor : tensors) tensor.view.device = device;
  }

  // Copies of a Call are copies: nothing points into another before this. The parameters' tensors
  // follow its size, in order.
  const Params* ready(bool contiguous = false) {
    auto* pointers = reinterpret_cast<const flashmoe_tensor**>(
        reinterpret_cast<unsigned char*>(&params) + sizeof(size_t));
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& tensor = tensors[i];
      tensor.view.shape = tensor.shape;
      tensor.view.strides = contiguous ? nullptr : tensor.strides;
      pointers[i] = tensor.given ? &tensor.view : nullptr;
    }
    set_kernel(&params, kernel.empty() ? nullptr : kernel.c_str());
    return &params;
  }

  static void set_kernel(flashmoe_moe_route_params*, const char*) {}
  template <class Named>
  static void set_kernel(Named* named, const char* text) {
    named->kernel = text;
  }
};

struct Route : AnyCall<flashmoe_moe_route_params> {
  enum {
    kLogits,
    kBias,
    kGivenIds,
    kGivenWeights,
    kMap,
    kIds,
    kWeights,
    kOffsets,
    kPairs,
    kSlots,
    kLse,
    kCount
  };
  static constexpr size_t kFirstOutput = kIds;
  static constexpr const char* kNames[] = {
      "logits",  "selection_bias", "given_ids", "given_weights", "expert_map", "ids",
      "weights", "offsets",        "pairs",     "slots",         "lse",        "workspace"};

  explicit Route(int64_t tokens = 100) : AnyCall(kCount, flashmoe_moe_route_params_init()) {
    tensors[kLogits].set({tokens, 8}, kHalf);
    tensors[kIds].set({tokens, 2}, kInteger);
    tensors[kWeights].set({tokens, 2}, kFloat);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kPairs].set({tokens * 2}, kInteger);
    tensors[kSlots].set({tokens, 2}, kInteger);
  }
  static constexpr auto kRun = &flashmoe_moe_route;
  static constexpr auto kSize = &flashmoe_moe_route_workspace_size;
  static const MoeRouteProblem& problem(const Launched& l) { return l.route; }
};

struct Forward : AnyCall<flashmoe_moe_forward_params> {
  enum {
    kX,
    kGateUp,
    kUp,
    kDown,
    kGateUpBias,
    kUpBias,
    kDownBias,
    kWeights,
    kOffsets,
    kPairs,
    kSlots,
    kOut,
    kPre,
    kCount
  };
  static constexpr size_t kFirstOutput = kOut;
  static constexpr const char* kNames[] = {
      "x",       "w_gate_up", "w_up",  "w_down", "b_gate_up", "b_up",           "b_down",
      "weights", "offsets",   "pairs", "slots",  "out",       "pre_activation", "workspace"};

  explicit Forward(int64_t tokens = 100) : AnyCall(kCount, flashmoe_moe_forward_params_init()) {
    tensors[kX].set({tokens, 64}, kHalf);
    tensors[kGateUp].set({8, 32, 64}, kHalf);
    tensors[kDown].set({8, 64, 16}, kHalf);
    tensors[kWeights].set({tokens, 2}, kFloat);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kPairs].set({tokens * 2}, kInteger);
    tensors[kSlots].set({tokens, 2}, kInteger);
    tensors[kOut].set({tokens, 64}, kHalf);
  }
  static constexpr auto kRun = &flashmoe_moe_forward;
  static constexpr auto kSize = &flashmoe_moe_forward_workspace_size;
  static const MoeForwardProblem& problem(const Launched& l) { return l.forward; }
};

struct Product : AnyCall<flashmoe_grouped_product_params> {
  enum { kX, kW, kBias, kOffsets, kCounts, kOut, kCount };
  static constexpr size_t kFirstOutput = kOut;
  static constexpr const char* kNames[] = {"x",      "w",   "bias",     "offsets",
                                           "counts", "out", "workspace"};

  explicit Product(int64_t rows = 100) : AnyCall(kCount, flashmoe_grouped_product_params_init()) {
    tensors[kX].set({rows, 64}, kHalf);
    tensors[kW].set({8, 16, 64}, kHalf);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kOut].set({rows, 16}, kHalf);
  }
  static constexpr auto kRun = &flashmoe_grouped_product;
  static constexpr auto kSize = &flashmoe_grouped_product_workspace_size;
  static const GroupedProductProblem& problem(const Launched& l) { return l.product; }
};

void* const kWorkspace = reinterpret_cast<void*>(kData - (uintptr_t{1} << 32));

template <class Call>
flashmoe_status run(const typename Call::Params* params) {
  return Call::kRun(params, kWorkspace, size_t{1} << 30, nullptr);
}

template <class Call>
std::string failure(Call call) {
  const int before = launched.count;
  CHECK(run<Call>(call.ready()) != FLASHMOE_OK);
  CHECK(launched.count == before);
  const std::string sentence = flashmoe_last_error();
  size_t bytes = 7;
  CHECK(Call::kSize(call.ready(), &bytes) != FLASHMOE_OK && bytes == 7);
  CHECK(sentence == flashmoe_last_error());
  return sentence;
}

// Calls it and says whether the families were asked for a plan.
template <class Call>
bool planned(Call call) {
  const int before = plans;
  const int launches = launched.count;
  CHECK(run<Call>(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == launches + 1);
  return plans != before;
}

bool same(const ExpertMatrix& a, const ExpertMatrix& b) {
  return a.data == b.data && a.expert_stride == b.expert_stride && a.row_stride == b.row_stride &&
         a.column_stride == b.column_stride;
}

bool same(const ExpertBias& a, const ExpertBias& b) {
  return a.data == b.data && a.dtype == b.dtype && a.expert_stride == b.expert_stride &&
         a.row_stride == b.row_stride;
}

bool same(flashmoe_device a, flashmoe_device b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

bool same(const MoeRouteProblem& a, const MoeRouteProblem& b) {
  return same(a.device, b.device) && a.tokens == b.tokens && a.experts == b.experts &&
         a.top_k == b.top_k && a.logits == b.logits && a.logits_dtype == b.logits_dtype &&
         a.logits_stride == b.logits_stride && a.selection_bias == b.selection_bias &&
         a.given_ids == b.given_ids && a.given_ids_are_64 == b.given_ids_are_64 &&
         a.given_ids_stride == b.given_ids_stride && a.given_weights == b.given_weights &&
         a.given_weights_dtype == b.given_weights_dtype &&
         a.given_weights_stride == b.given_weights_stride && a.expert_map == b.expert_map &&
         a.expert_map_size == b.expert_map_size && a.ids == b.ids && a.weights == b.weights &&
         a.offsets == b.offsets && a.pairs == b.pairs && a.slots == b.slots && a.lse == b.lse &&
         a.scoring == b.scoring && a.renormalize == b.renormalize && a.num_groups == b.num_groups &&
         a.top_groups == b.top_groups && a.scale == b.scale;
}

bool same(const MoeForwardProblem& a, const MoeForwardProblem& b) {
  return a.dtype == b.dtype && same(a.device, b.device) && a.tokens == b.tokens &&
         a.hidden == b.hidden && a.inner == b.inner && a.experts == b.experts &&
         a.top_k == b.top_k && a.x == b.x && a.x_stride == b.x_stride && a.out == b.out &&
         a.out_stride == b.out_stride && a.pre_activation == b.pre_activation &&
         a.pre_activation_stride == b.pre_activation_stride && a.gated == b.gated &&
         same(a.gate, b.gate) && same(a.up, b.up) && same(a.down, b.down) &&
         same(a.gate_bias, b.gate_bias) && same(a.up_bias, b.up_bias) &&
         same(a.down_bias, b.down_bias) && a.weights == b.weights && a.offsets == b.offsets &&
         a.pairs == b.pairs && a.slots == b.slots && a.activation == b.activation &&
         a.alpha == b.alpha && a.limit == b.limit && a.up_offset == b.up_offset &&
         a.weight_on_input == b.weight_on_input;
}

bool same(const GroupedProductProblem& a, const GroupedProductProblem& b) {
  return a.dtype == b.dtype && same(a.device, b.device) && a.experts == b.experts &&
         a.rows == b.rows && a.columns == b.columns && a.out_columns == b.out_columns &&
         a.x == b.x && a.x_stride == b.x_stride && a.x_expert_stride == b.x_expert_stride &&
         a.out == b.out && a.out_stride == b.out_stride &&
         a.out_expert_stride == b.out_expert_stride && same(a.w, b.w) && same(a.bias, b.bias) &&
         a.offsets == b.offsets && a.counts == b.counts;
}

bool same(const MoePlan& a, const MoePlan& b) {
  return a.info.stage[0].grid[0] == b.info.stage[0].grid[0] &&
         a.info.stage[0].tile_rows == b.info.stage[0].tile_rows &&
         a.info.workspace_bytes == b.info.workspace_bytes;
}

// ---- tests ---------------------------------------------------------------------------------------

template <class Call>
void a_call_is_planned_once() {
  Call call;
  CHECK(planned(call));
  CHECK(launched.family == kMany);
  CHECK(!planned(call));
  const typename std::decay<decltype(Call::problem(launched))>::type before =
      Call::problem(launched);
  CHECK(same(Call::problem(launched), before));
  call.move(1 << 20);
  CHECK(!planned(call));
  CHECK(!same(Call::problem(launched), before));
  call.move(-(1 << 20));
  CHECK(!planned(call));
  CHECK(same(Call::problem(launched), before));
}

// Each of a call's tensors by itself, while the others stay where they were.
template <class Call>
void tensors_move_one_by_one(const Call& call) {
  planned(call);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (!call.tensors[i].given) continue;
    Call moved = call;
    moved.at(i, reinterpret_cast<uintptr_t>(call.tensors[i].view.data) + 4096);
    Launched alone;
    std::thread([&] {
      planned(moved);
      alone = launched;
    }).join();
    CHECK(!planned(moved));
    CHECK(same(Call::problem(launched), Call::problem(alone)));
  }
}

void tensors_of_every_kind_move_one_by_one() {
  Route route;
  route.params.scoring = FLASHMOE_MOE_SIGMOID;
  route.tensors[Route::kBias].set({8}, kFloat);
  route.tensors[Route::kLse].set({100}, kFloat);
  tensors_move_one_by_one(route);
  Route given;
  given.tensors[Route::kLogits].given = false;
  given.tensors[Route::kGivenIds].set({100, 2}, kInteger);
  given.tensors[Route::kGivenWeights].set({100, 2}, kHalf);
  given.tensors[Route::kMap].set({12}, kInteger);
  tensors_move_one_by_one(given);

  Forward layer;
  layer.tensors[Forward::kPre].set({200, 32}, kHalf);
  layer.tensors[Forward::kGateUpBias].set({8, 32}, kFloat);
  layer.tensors[Forward::kDownBias].set({8, 64}, kHalf);
  tensors_move_one_by_one(layer);
  layer.params.gate = FLASHMOE_MOE_SEPARATE;
  layer.tensors[Forward::kGateUp].set({8, 16, 64}, kHalf);
  layer.tensors[Forward::kUp].set({8, 16, 64}, kHalf);
  layer.tensors[Forward::kGateUpBias].set({8, 16}, kFloat);
  layer.tensors[Forward::kUpBias].set({8, 16}, kFloat);
  tensors_move_one_by_one(layer);

  Product product;
  product.tensors[Product::kBias].set({8, 16}, kFloat);
  tensors_move_one_by_one(product);
}

template <class Call>
void its_workspace_is_known_too() {
  Call call(70);
  size_t bytes = 0;
  CHECK(Call::kSize(call.ready(), &bytes) == FLASHMOE_OK);
  CHECK(bytes == launched.plan.info.workspace_bytes || launched.count == 0);
  const size_t needed = bytes;
  CHECK(!planned(call));
  CHECK(launched.plan.info.workspace_bytes == needed);
  const int before = plans;
  bytes = 0;
  CHECK(Call::kSize(call.ready(), &bytes) == FLASHMOE_OK && bytes == needed && plans == before);
  const int launches = launched.count;
  CHECK(Call::kRun(call.ready(), kWorkspace, needed - 1, nullptr) ==
        FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(Call::kRun(call.ready(), nullptr, needed, nullptr) != FLASHMOE_OK);
  CHECK(launched.count == launches);
  CHECK(Call::kSize(call.ready(), nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
}

// One after the other, each on top of a call that was planned.
template <class Call>
void change_and_plan(const std::vector<std::function<void(Call*)>>& changes) {
  for (const auto& change : changes) {
    const Call plain;
    planned(plain);
    CHECK(!planned(plain));
    Call changed = plain;
    change(&changed);
    CHECK(planned(changed));
    CHECK(!planned(changed));
    CHECK(!planned(plain));
  }
}

void what_differs_is_planned_anew() {
  change_and_plan<Route>({
      [](Route* c) { c->params.scoring = FLASHMOE_MOE_TOPK_SOFTMAX; },
      [](Route* c) { c->params.scoring = FLASHMOE_MOE_SIGMOID; },
      [](Route* c) { c->params.renormalize = 1; },
      [](Route* c) { c->params.scale = 2.0f; },
      [](Route* c) {
        c->params.scoring = FLASHMOE_MOE_SIGMOID;
        c->params.num_groups = c->params.top_groups = 2;
      },
      [](Route* c) {
        c->params.scoring = FLASHMOE_MOE_SIGMOID;
        c->tensors[Route::kBias].set({8}, kFloat);
      },
      [](Route* c) { c->tensors[Route::kLse].set({100}, kFloat); },
      [](Route* c) { c->tensors[Route::kLogits].strides[0] = 16; },
      [](Route* c) { c->tensors[Route::kLogits].view.dtype = kFloat; },
      [](Route* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
      [](Route* c) {
        c->tensors[Route::kLogits].given = false;
        c->tensors[Route::kGivenIds].set({100, 2}, kInteger);
      },
      [](Route* c) {
        c->tensors[Route::kLogits].given = false;
        c->tensors[Route::kGivenIds].set({100, 2}, {FLASHMOE_DTYPE_INT, 64, 1});
        c->tensors[Route::kGivenWeights].set({100, 2}, kHalf);
        c->tensors[Route::kMap].set({12}, kInteger);
      },
  });
  change_and_plan<Forward>({
      [](Forward* c) { c->params.gate = FLASHMOE_MOE_UP_GATE; },
      [](Forward* c) { c->params.gate = FLASHMOE_MOE_INTERLEAVED; },
      [](Forward* c) {
        c->params.gate = FLASHMOE_MOE_NO_GATE;
        c->tensors[Forward::kGateUp].set({8, 16, 64}, kHalf);
      },
      [](Forward* c) {
        c->params.gate = FLASHMOE_MOE_SEPARATE;
        c->tensors[Forward::kGateUp].set({8, 16, 64}, kHalf);
        c->tensors[Forward::kUp].set({8, 16, 64}, kHalf);
        c->tensors[Forward::kUpBias].set({8, 16}, kHalf);
      },
      [](Forward* c) { c->params.activation = FLASHMOE_ACTIVATION_GELU; },
      [](Forward* c) { c->params.alpha = 1.5f; },
      [](Forward* c) { c->params.limit = 7.0f; },
      [](Forward* c) { c->params.up_offset = 1.0f; },
      [](Forward* c) { c->params.weight_on_input = 1; },
      [](Forward* c) { c->kernel = kFew; },
      [](Forward* c) { c->kernel = kMany; },
      [](Forward* c) { c->tensors[Forward::kGateUpBias].set({8, 32}, kHalf); },
      [](Forward* c) { c->tensors[Forward::kDownBias].set({8, 64}, kFloat); },
      [](Forward* c) { c->tensors[Forward::kPre].set({200, 32}, kHalf); },
      [](Forward* c) { c->tensors[Forward::kOut].strides[0] = 128; },
      [](Forward* c) { c->tensors[Forward::kX].strides[0] = 72; },
      [](Forward* c) { c->tensors[Forward::kDown].strides[0] = 0; },
      [](Forward* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
  });
  change_and_plan<Product>({
      [](Product* c) { c->kernel = kFew; },
      [](Product* c) { c->tensors[Product::kBias].set({8, 16}, kFloat); },
      [](Product* c) { c->tensors[Product::kW].strides[0] *= 2; },
      [](Product* c) {
        c->tensors[Product::kX].set({8, 10, 64}, kHalf);
        c->tensors[Product::kOut].set({8, 10, 16}, kHalf);
        c->tensors[Product::kOffsets].given = false;
        c->tensors[Product::kCounts].set({8}, kInteger);
      },
      [](Product* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
  });
}

template <class Call>
void addresses_are_checked_every_time() {
  Call call;
  planned(call);
  CHECK(!planned(call));
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    if (!call.tensors[i].given) continue;
    Call bad = call;
    flashmoe_tensor& view = bad.tensors[i].view;
    view.data = static_cast<char*>(view.data) + 1;
    CHECK(failure(bad).find(": its data begins at address") != std::string::npos);
    view.data = nullptr;
    CHECK(failure(bad).find(": its data is a null pointer") != std::string::npos);
    bad = call;
    bad.tensors[i].view.byte_offset = 1;
    CHECK(failure(bad).find(": its data begins at address") != std::string::npos);
    bad.tensors[i].view.byte_offset = 32;  // right, but not as before
    CHECK(planned(bad));
    CHECK(planned(bad));
  }
  CHECK(!planned(call));
  call.params.struct_size = 4096;
  CHECK(failure(call).find("struct_size") != std::string::npos);
  CHECK(run<Call>(nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
}

// Bytes of a contiguous tensor.
int64_t bytes_of(const Tensor& tensor) {
  int64_t count = 1;
  for (int32_t axis = 0; axis < tensor.view.ndim; ++axis) count *= tensor.shape[axis];
  return count * tensor.view.dtype.bits / 8;
}

template <class Call>
std::string launch_failure(Call call, void* workspace) {
  const int before = launched.count;
  CHECK(Call::kRun(call.ready(), workspace, size_t{1} << 30, nullptr) ==
        FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(launched.count == before);
  return flashmoe_last_error();
}

// Each output in each other tensor, of a call that is known and of one that never is.
template <class Call>
void outputs_overlap_nothing(const Call& call) {
  const auto sentence = [](size_t output, size_t other) {
    return std::string(Call::kNames[output]) + ": it shares memory with " + Call::kNames[other] +
           ", accepted is memory that overlaps no other tensor of the call";
  };
  for (const int32_t type : {FLASHMOE_DEVICE_CUDA, FLASHMOE_DEVICE_CPU}) {
    Call plain = call;
    plain.put_on({type, 0});
    planned(plain);
    CHECK(planned(plain) == (type == FLASHMOE_DEVICE_CPU));
    for (size_t i = Call::kFirstOutput; i <= Call::kCount; ++i) {
      const bool is_workspace = i == Call::kCount;
      if (!is_workspace && !plain.tensors[i].given) continue;
      for (size_t j = 0; j < Call::kCount; ++j) {
        if (j == i || !plain.tensors[j].given) continue;
        const auto there = reinterpret_cast<uintptr_t>(plain.tensors[j].view.data);
        const auto own = static_cast<uintptr_t>(
            is_workspace ? 256 * size_of(Call::problem(launched)) : bytes_of(plain.tensors[i]));
        const auto others = static_cast<uintptr_t>(bytes_of(plain.tensors[j]));
        const auto run_at = [&](uintptr_t address, const auto& check) {
          Call moved = plain;
          void* workspace = kWorkspace;
          if (is_workspace) {
            workspace = reinterpret_cast<void*>(address);
          } else {
            moved.at(i, address);
          }
          check(moved, workspace);
        };
        const auto refused = [&](const Call& moved, void* workspace) {
          CHECK(launch_failure(moved, workspace) == sentence(std::max(i, j), std::min(i, j)));
        };
        const auto served = [&](Call moved, void* workspace) {
          CHECK(Call::kRun(moved.ready(), workspace, size_t{1} << 30, nullptr) == FLASHMOE_OK);
        };
        const uintptr_t alignment = is_workspace ? 256 : 16;
        const uintptr_t last = (others - 1) / alignment * alignment;
        const uintptr_t behind = (others + alignment - 1) / alignment * alignment;
        const uintptr_t before = (own + alignment - 1) / alignment * alignment;
        run_at(there, refused);
        run_at(there + last, refused);
        run_at(there - (own - 1) / alignment * alignment, refused);
        run_at(there + behind, served);
        run_at(there - before, served);
      }
    }
  }
}

void outputs_may_not_come_to_overlap() {
  Route route;
  route.tensors[Route::kLse].set({100}, kFloat);
  outputs_overlap_nothing(route);
  route.params.scoring = FLASHMOE_MOE_SIGMOID;
  route.tensors[Route::kBias].set({8}, kFloat);
  outputs_overlap_nothing(route);
  Route given;
  given.tensors[Route::kLogits].given = false;
  given.tensors[Route::kGivenIds].set({100, 2}, kInteger);
  given.tensors[Route::kGivenWeights].set({100, 2}, kHalf);
  given.tensors[Route::kMap].set({12}, kInteger);
  outputs_overlap_nothing(given);

  Forward layer;
  layer.tensors[Forward::kPre].set({200, 32}, kHalf);
  layer.tensors[Forward::kGateUpBias].set({8, 32}, kFloat);
  layer.tensors[Forward::kDownBias].set({8, 64}, kHalf);
  outputs_overlap_nothing(layer);
  layer.params.gate = FLASHMOE_MOE_SEPARATE;
  layer.tensors[Forward::kGateUp].set({8, 16, 64}, kHalf);
  layer.tensors[Forward::kUp].set({8, 16, 64}, kHalf);
  layer.tensors[Forward::kGateUpBias].set({8, 16}, kFloat);
  layer.tensors[Forward::kUpBias].set({8, 16}, kFloat);
  outputs_overlap_nothing(layer);

  Product product;
  product.tensors[Product::kBias].set({8, 16}, kFloat);
  outputs_overlap_nothing(product);
  Product counted;
  counted.tensors[Product::kX].set({8, 10, 64}, kHalf);
  counted.tensors[Product::kOut].set({8, 10, 16}, kHalf);
  counted.tensors[Product::kOffsets].given = false;
  counted.tensors[Product::kCounts].set({8}, kInteger);
  outputs_overlap_nothing(counted);
}

void outputs_may_lie_between_rows() {
  Forward between;
  between.tensors[Forward::kX].strides[0] = 128;
  between.tensors[Forward::kOut].strides[0] = 128;
  const auto x = reinterpret_cast<uintptr_t>(between.tensors[Forward::kX].view.data);
  between.at(Forward::kOut, x + 64 * 2);
  planned(between);
  CHECK(!planned(between));
  CHECK(launched.forward.out == between.tensors[Forward::kOut].view.data);
  between.at(Forward::kOut, x + 64 * 2 - 16);
  CHECK(launch_failure(between, kWorkspace).find("out: it shares memory with x") == 0);
  CHECK(launch_failure(between, kWorkspace).find("out: it shares memory with x") == 0);
  // Backwards, from the last row on.
  between.at(Forward::kOut, x + 99 * 128 * 2 + 64 * 2);
  between.tensors[Forward::kOut].strides[0] = -128;
  planned(between);
  CHECK(!planned(between));
  between.at(Forward::kOut, x + 99 * 128 * 2);
  CHECK(launch_failure(between, kWorkspace).find("out: it shares memory with x") == 0);
}

// Inputs may be views of one tensor, and what is empty lies nowhere.
void inputs_may_overlap() {
  Forward layer;
  const auto x = reinterpret_cast<uintptr_t>(layer.tensors[Forward::kX].view.data);
  for (const size_t input : {Forward::kGateUp, Forward::kDown, Forward::kPairs, Forward::kSlots}) {
    layer.at(input, x);
  }
  planned(layer);
  CHECK(!planned(layer));
  Route route(0);
  for (size_t i = 0; i < Route::kCount; ++i) {
    if (i != Route::kOffsets) route.at(i, kData + (uintptr_t{Route::kOffsets} << 32) + 16);
  }
  CHECK(planned(route));
  CHECK(!planned(route));
}

std::string rejected_of(Forward call) {
  flashmoe_moe_plan plan = flashmoe_moe_plan_init();
  CHECK(flashmoe_moe_forward_plan(call.ready(), &plan) == FLASHMOE_OK);
  return std::string(plan.family) + "\n" + plan.rejected;
}

// A family that yields comes behind the others, and serves what they do not.
void who_yields_is_asked_last() {
  const std::string elsewhere = "cpu: the tensors are on cuda:0, it computes on the CPU\n";
  CHECK(rejected_of(Forward(3)) == "stream\nsm89: stream comes first\ncpu: stream comes first\n");
  CHECK(rejected_of(Forward(100)) == "sm89\nstream: many rows\ncpu: sm89 comes first\n");
  Forward named(100);
  named.kernel = kFew;
  CHECK(rejected_of(named) == "stream\nsm89: stream comes first\ncpu: stream comes first\n");
  Forward call(101);
  CHECK(planned(call));
  CHECK(launched.family == kMany);
  many_says = FLASHMOE_ERROR_UNSUPPORTED;
  CHECK(rejected_of(Forward(100)) == "stream\nsm89: x: not these\n" + elsewhere);
  CHECK(planned(Forward(102)));
  CHECK(launched.family == kFew);
  CHECK(!planned(Forward(102)));
  // What neither serves is refused in the words of the least particular.
  CHECK(failure(Forward(200)) == "sm89: x: not these");
  named = Forward(200);
  named.kernel = kFew;
  CHECK(failure(named) ==
        "kernel: cannot be served: stream: x: got 200 rows, accepted are at most 150");
  many_says = FLASHMOE_ERROR_CUDA;  // which is for the caller to know
  CHECK(failure(Forward(103)) == "sm89: x: not these");
  many_says = FLASHMOE_OK;
}

void fp32_is_for_the_cpu() {
  const char* const sentence =
      "x: it is on cuda:0 and of dtype fp32, accepted on a GPU are fp16 and bf16, on the CPU "
      "also fp32";
  Forward layer;
  for (Tensor& tensor : layer.tensors) {
    if (tensor.view.dtype.bits == 16) tensor.view.dtype = kFloat;
  }
  for (const char* kernel : {"", "sm89", "stream", "cpu"}) {
    layer.kernel = kernel;
    CHECK(run<Forward>(layer.ready()) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(failure(layer) == sentence);
  }
  layer.kernel.clear();
  layer.put_on({FLASHMOE_DEVICE_CPU, 0});
  CHECK(planned(layer));
  Product product;
  for (Tensor& tensor : product.tensors) {
    if (tensor.view.dtype.bits == 16) tensor.view.dtype = kFloat;
  }
  CHECK(run<Product>(product.ready()) == FLASHMOE_ERROR_UNSUPPORTED);
  CHECK(failure(product) == sentence);
  Route route;  // whose logits may well be
  route.tensors[Route::kLogits].view.dtype = kFloat;
  CHECK(planned(route));
}

void a_kernels_name_is_the_callers() {
  Forward call;
  call.kernel = kMany;
  CHECK(planned(call));
  {
    Forward other = call;  // whose text lies elsewhere, and goes
    CHECK(!planned(other));
    CHECK(launched.kernel == other.kernel);
  }
  CHECK(!planned(call));
  CHECK(launched.kernel == call.kernel);
  call.kernel = std::string(100, 'x');
  for (int i = 0; i < 2; ++i) CHECK(failure(call).find("kernel: got \"xxxx") == 0);
  Forward plain(90);
  plain.ready();
  {
    const std::string empty;  // no name, in other words; and goes
    plain.params.kernel = empty.c_str();
    CHECK(run<Forward>(&plain.params) == FLASHMOE_OK);
  }
  CHECK(!planned(plain));
  CHECK(launched.kernel.empty() && launched.forward.kernel == nullptr);
}

template <class Call>
void calls_on_the_cpu_are_planned_every_time() {
  Call call;
  call.put_on({FLASHMOE_DEVICE_CPU, 0});
  for (int i = 0; i < 3; ++i) {
    CHECK(planned(call));
    CHECK(launched.family == kHost);
  }
}

template <class Call>
void failures_are_not_kept() {
  Call call;
  call.put_on({FLASHMOE_DEVICE_CUDA, 2});
  for (int i = 0; i < 3; ++i) CHECK(failure(call) == "sm89: device cuda:2 does not exist");
}

void empty_calls_launch_nothing() {
  Forward call(0);
  const int before = launched.count;
  for (int i = 0; i < 3; ++i) CHECK(run<Forward>(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == before);
  Route mapped;  // a map of no ids is a map still, wherever it is
  mapped.tensors[Route::kLogits].given = false;
  mapped.tensors[Route::kGivenIds].set({100, 2}, kInteger);
  mapped.tensors[Route::kMap].set({0}, kInteger);
  CHECK(planned(mapped));
  const int32_t* const nothing = launched.route.expert_map;
  CHECK(nothing != nullptr && launched.route.expert_map_size == 0);
  mapped.move(1 << 20);
  CHECK(!planned(mapped));
  CHECK(launched.route.expert_map == nothing);
}

// A callback that calls the library while a call is under way must not change it.
template <class Call>
void a_callback_may_call() {
  struct Inner {
    Call call;
    int depth = 0;
  } inner;
  inner.call.move(1 << 21);
  const auto reenter = [](int32_t, const char*, void* user) {
    Inner& self = *static_cast<Inner*>(user);
    if (self.depth++ == 0) CHECK(run<Call>(self.call.ready()) == FLASHMOE_OK);
  };
  Call call;
  planned(call);
  const auto before = Call::problem(launched);
  CHECK(flashmoe_set_log(FLASHMOE_LOG_INFO, reenter, &inner) == FLASHMOE_OK);
  CHECK(run<Call>(call.ready()) == FLASHMOE_OK);
  CHECK(inner.depth > 1);
  CHECK(same(Call::problem(launched), before));
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
}

using Below = std::function<int(int)>;

void vary(Route* call, const Below& below) {
  if (below(4) == 0) {
    call->tensors[Route::kLogits].given = below(4) == 0;
    call->tensors[Route::kGivenIds].set({call->tensors[Route::kIds].shape[0], 2}, kInteger);
    if (below(2) == 0) call->tensors[Route::kMap].set({below(3)}, kInteger);
  }
  if (below(3) == 0) call->tensors[Route::kLse].set({call->tensors[Route::kIds].shape[0]}, kFloat);
  if (below(3) == 0) call->params.scoring = below(4);
  if (below(4) == 0) call->params.renormalize = below(3);
  if (below(4) == 0) call->params.scale = 0.5f;
}

void vary(Forward* call, const Below& below) {
  const int64_t tokens = call->tensors[Forward::kX].shape[0];
  if (below(3) == 0) {
    call->params.gate = below(6);
    const bool alone = call->params.gate >= FLASHMOE_MOE_SEPARATE && below(8) != 0;
    call->tensors[Forward::kGateUp].set({8, alone ? 16 : 32, 64}, kHalf);
    if (alone && call->params.gate == FLASHMOE_MOE_SEPARATE) {
      call->tensors[Forward::kUp].set({8, 16, 64}, kHalf);
      if (below(2) == 0) call->tensors[Forward::kUpBias].set({8, 16}, kFloat);
    }
  }
  if (below(3) == 0) {
    call->tensors[Forward::kGateUpBias].set({8, call->tensors[Forward::kGateUp].shape[1]}, kFloat);
  }
  if (below(4) == 0) call->tensors[Forward::kDownBias].set({8, 64}, kHalf);
  if (below(4) == 0) call->tensors[Forward::kPre].set({2 * tokens, 32}, kHalf);
  if (below(4) == 0) call->params.activation = below(6);
  if (below(6) == 0) call->params.limit = 1.0f;
}

void vary(Product* call, const Below& below) {
  if (below(3) == 0) call->tensors[Product::kBias].set({8, 16}, below(2) == 0 ? kHalf : kFloat);
  if (below(6) == 0) call->tensors[Product::kCounts].set({8}, kInteger);
}

// Any sequence of calls, right and wrong, against the same calls on threads that know none.
template <class Call>
void random_calls_come_to_what_they_come_to_alone() {
  std::mt19937 random(0);
  const Below below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int known = 0;
  int failed = 0;
  for (int i = 0; i < 6000; ++i) {
    Call call(below(2) == 0 ? 100 : 3);
    vary(&call, below);
    call.move(16 * below(4));
    if (below(4) == 0) {
      call.kernel = std::vector<std::string>{"sm89", "stream", "cpu", "sm"}[size_t(below(4))];
    }
    Tensor& tensor = call.tensors[static_cast<size_t>(below(int(call.tensors.size())))];
    const int axis = below(3);
    switch (below(14)) {
      case 0: tensor.strides[axis] += 8; break;
      case 1: tensor.strides[axis] *= -1; break;
      case 2: tensor.shape[axis] += 1; break;
      case 3: tensor.view.data = reinterpret_cast<void*>(kData + 8); break;
      case 4: tensor.view.data = nullptr; break;
      case 5: tensor.view.device.device_id = 1; break;
      case 6: tensor.view.byte_offset = 16; break;
      case 7: tensor.view.ndim += 1; break;
      case 8: tensor.view.data = call.tensors[0].view.data; break;
      case 9: tensor.given = !tensor.given; break;
      case 10: call.put_on({FLASHMOE_DEVICE_CUDA, 1 + below(2)}); break;
      default: break;
    }
    const bool contiguous = below(6) == 0;

    flashmoe_status want = FLASHMOE_OK;
    Launched alone;
    std::string sentence;
    size_t want_bytes = 0;
    const int none = plans;
    std::thread([&] {
      want = run<Call>(call.ready(contiguous));
      alone = launched;
      sentence = flashmoe_last_error();
    }).join();
    std::thread([&] { Call::kSize(call.ready(contiguous), &want_bytes); }).join();
    CHECK(plans != none || want != FLASHMOE_OK);
    const int before = plans;
    const int launches = launched.count;
    CHECK(run<Call>(call.ready(contiguous)) == want);
    CHECK(launched.count - launches == alone.count);
    if (want != FLASHMOE_OK) {
      CHECK(sentence == flashmoe_last_error());
      ++failed;
      continue;
    }
    known += plans == before ? 1 : 0;
    size_t bytes = 0;
    CHECK(Call::kSize(call.ready(contiguous), &bytes) == FLASHMOE_OK && bytes == want_bytes);
    if (alone.count == 0) continue;
    CHECK(launched.family == alone.family && launched.kernel == alone.kernel);
    CHECK(same(Call::problem(launched), Call::problem(alone)));
    CHECK(same(launched.plan, alone.plan));
  }
  CHECK(known > 200 && failed > 500);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  void (*const tests[])() = {
      a_call_is_planned_once<Route>,
      a_call_is_planned_once<Forward>,
      a_call_is_planned_once<Product>,
      tensors_of_every_kind_move_one_by_one,
      its_workspace_is_known_too<Route>,
      its_workspace_is_known_too<Forward>,
      its_workspace_is_known_too<Product>,
      what_differs_is_planned_anew,
      addresses_are_checked_every_time<Route>,
      addresses_are_checked_every_time<Forward>,
      addresses_are_checked_every_time<Product>,
      outputs_may_not_come_to_overlap,
      outputs_may_lie_between_rows,
      inputs_may_overlap,
      who_yields_is_asked_last,
      fp32_is_for_the_cpu,
      a_kernels_name_is_the_callers,
      calls_on_the_cpu_are_planned_every_time<Route>,
      calls_on_the_cpu_are_planned_every_time<Forward>,
      calls_on_the_cpu_are_planned_every_time<Product>,
      failures_are_not_kept<Route>,
      failures_are_not_kept<Forward>,
      failures_are_not_kept<Product>,
      empty_calls_launch_nothing,
      a_callback_may_call<Route>,
      a_callback_may_call<Forward>,
      a_callback_may_call<Product>,
      random_calls_come_to_what_they_come_to_alone<Route>,
      random_calls_come_to_what_they_come_to_alone<Forward>,
      random_calls_come_to_what_they_come_to_alone<Product>,
  };
  // Each on a thread of its own, which knows no call yet.
  for (const auto test : tests) std::thread(test).join();
  return 0;
}
