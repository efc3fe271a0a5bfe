// Calls of layers and grouped products on a made-up CUDA with made-up kernels (made_up_moe.cpp,
// made_up_few_tokens.cpp): which family serves them, what its launches get, and what of a plan is
// kept for the next call. test_moe_calls [no-map-moves]: without cuTensorMapReplaceAddress.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/moe/combine/params.h"
#include "cuda/moe/sm90/params.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

template <class Problem>
static flashmoe_status no_cpu(const Problem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
const MoeForwardFamily kCpuMoeForward = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};
const GroupedProductFamily kCpuGroupedProduct = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};

namespace {

// ---- calls
// ---------------------------------------------------------------------------------------

constexpr flashmoe_dtype kBFloat16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kFloat32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_device kDevice = {FLASHMOE_DEVICE_CUDA, 0};
constexpr flashmoe_device kH200 = {FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_H200};

// Tensors at addresses of their own, by name, and how many maps are of each.
class Tensors {
 public:
  explicit Tensors(flashmoe_device device) : device_(device) {}

  const flashmoe_tensor* add(const char* name, flashmoe_dtype dtype, std::vector<int64_t> shape,
                             int maps = 0, std::vector<int64_t> strides = {}) {
    made_.push_back(std::make_unique<Made>());
    Made& made = *made_.back();
    made.name = name;
    made.maps = maps;
    made.shape = std::move(shape);
    made.strides = std::move(strides);
    made.tensor = {
        reinterpret_cast<void*>((int64_t{1} << 40) + (static_cast<int64_t>(made_.size()) << 34)),
        device_,
        static_cast<int32_t>(made.shape.size()),
        dtype,
        made.shape.data(),
        made.strides.empty() ? nullptr : made.strides.data(),
        0};
    return &made.tensor;
  }

  int count() const { return static_cast<int>(made_.size()); }
  const char* name(int i) const { return at(i).name; }
  int maps(int i) const { return at(i).maps; }
  const void* data(int i) const { return at(i).tensor.data; }
  void move(int i) {
    flashmoe_tensor& tensor = made_[static_cast<size_t>(i)]->tensor;
    tensor.data = static_cast<char*>(tensor.data) + (1 << 20);
  }
  int all_maps() const {
    int sum = 0;
    for (const auto& made : made_) sum += made->maps;
    return sum;
  }

 private:
  struct Made {
    const char* name;
    int maps;
    std::vector<int64_t> shape, strides;
    flashmoe_tensor tensor;
  };
  const Made& at(int i) const { return *made_[static_cast<size_t>(i)]; }

  flashmoe_device device_;
  std::vector<std::unique_ptr<Made>> made_;
};

struct Extents {
  int64_t tokens, hidden, inner, experts, top_k;
};

struct Layer {
  flashmoe_moe_forward_params params = flashmoe_moe_forward_params_init();
  Tensors tensors;

  Layer(const char* family, const Extents& e, int32_t gate = FLASHMOE_MOE_GATE_UP,
        bool transposed = false, bool pre_activation = false, flashmoe_device device = kDevice)
      : tensors(device) {
    constexpr int kOut = moe::sm90::kOutHeights;
    const int64_t pairs = e.tokens * e.top_k;
    const bool two = gate == FLASHMOE_MOE_SEPARATE;
    const bool gated = gate != FLASHMOE_MOE_NO_GATE;
    const int64_t rows = gated && !two ? 2 * e.inner : e.inner;
    const std::vector<int64_t> turned = {rows * e.hidden, 1, rows};
    params.x = tensors.add("x", kBFloat16, {e.tokens, e.hidden});
    params.w_gate_up = tensors.add("w_gate_up", kBFloat16, {e.experts, rows, e.hidden}, two ? 1 : 2,
                                   transposed ? turned : std::vector<int64_t>());
    if (two) params.w_up = tensors.add("w_up", kBFloat16, {e.experts, rows, e.hidden}, 1);
    params.w_down = tensors.add("w_down", kBFloat16, {e.experts, e.hidden, e.inner}, 2);
    params.b_gate_up = tensors.add("b_gate_up", kFloat32, {e.experts, rows});
    params.b_down = tensors.add("b_down", kBFloat16, {e.experts, e.hidden});
    params.weights = tensors.add("weights", kFloat32, {e.tokens, e.top_k});
    params.offsets = tensors.add("offsets", kInt32, {e.experts + 1});
    params.pairs = tensors.add("pairs", kInt32, {pairs});
    params.slots = tensors.add("slots", kInt32, {e.tokens, e.top_k});
    params.out = tensors.add("out", kBFloat16, {e.tokens, e.hidden});
    if (pre_activation) {
      params.pre_activation =
          tensors.add("pre_activation", kBFloat16, {pairs, gated ? 2 * e.inner : e.inner},
                      (gated ? 2 : 1) * kOut);
    }
    params.gate = gate;
    params.kernel = family;
  }

  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_moe_forward_plan(&params, plan);
  }
  flashmoe_status run(void* workspace) const {
    return flashmoe_moe_forward(&params, workspace, size_t{1} << 40, nullptr);
  }
  // The number of maps of memory written between its launches.
  static int workspace_maps() { return 2 * moe::sm90::kOutHeights + moe::sm90::kTokenBoxes; }
};

struct Product {
  flashmoe_grouped_product_params params = flashmoe_grouped_product_params_init();
  Tensors tensors;

  Product(const char* family, bool counted, int64_t rows, int64_t columns, int64_t out_columns,
          int64_t experts = 8, flashmoe_device device = kDevice)
      : tensors(device) {
    const auto rows_of = [&](int64_t width) {
      return counted ? std::vector<int64_t>{experts, rows, width}
                     : std::vector<int64_t>{rows, width};
    };
    params.x = tensors.add("x", kBFloat16, rows_of(columns), moe::sm90::kTokenBoxes);
    params.w = tensors.add("w", kBFloat16, {experts, out_columns, columns}, 2);
    params.bias = tensors.add("bias", kFloat32, {experts, out_columns});
    if (counted) {
      params.counts = tensors.add("counts", kInt32, {experts});
    } else {
      params.offsets = tensors.add("offsets", kInt32, {experts + 1});
    }
    params.out = tensors.add("out", kBFloat16, rows_of(out_columns), moe::sm90::kOutHeights);
    params.kernel = family;
  }

  flashmoe_status plan(flashmoe_plan* plan) const {
    return flashmoe_grouped_product_plan(&params, plan);
  }
  flashmoe_status run(void* workspace) const {
    return flashmoe_grouped_product(&params, workspace, size_t{1} << 40, nullptr);
  }
  static int workspace_maps() { return 0; }
};

template <class Call>
flashmoe_plan plan_of(const Call& call) {
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(call.plan(&plan) == FLASHMOE_OK);
  return plan;
}

std::vector<flashmoe_launch> read_back() {
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t count = 0;
  CHECK(flashmoe_last_launches(launches, &count) == FLASHMOE_OK);
  return {launches, launches + count};
}

void* workspace_at(int64_t number) {
  return reinterpret_cast<void*>((int64_t{1} << 41) + (number << 36));
}

// The parameters of the launches of this thread's last call.
using Bytes = std::vector<unsigned char>;
thread_local std::vector<Bytes> seen;

void keep_params() {
  seen.clear();
  fake::maps.clear();
  fake::moves.clear();
  fake::on_launch = [](const void* params) {
    const bool product = seen.size() < 2;
    const size_t bytes = product ? sizeof(moe::sm90::Params) : sizeof(moe_combine::Params);
    const auto* const first = static_cast<const unsigned char*>(params);
    seen.emplace_back(first, first + bytes);
    if (!product) return;
    for (size_t half = 0; half < moe::sm90::kHalves; ++half) {  // a gap between fields is anything
      constexpr size_t kEnd = offsetof(Bias, is_fp32) + sizeof(int32_t);
      const size_t bias = offsetof(moe::sm90::Params, bias) + half * sizeof(Bias);
      std::memset(seen.back().data() + bias + kEnd, 0, sizeof(Bias) - kEnd);
    }
  };
}

template <class Params>
Params params_of(size_t launch) {
  Params params;
  CHECK(seen[launch].size() == sizeof params);
  std::memcpy(static_cast<void*>(&params), seen[launch].data(), sizeof params);
  return params;
}

// ---- calls at other addresses
// --------------------------------------------------------------------

// The same call as the first of a thread.
template <class Call>
std::vector<Bytes> params_of_a_new_thread(const Call& call, void* workspace) {
  std::vector<Bytes> params;
  std::thread([&] {
    keep_params();
    CHECK(call.run(workspace) == FLASHMOE_OK);
    params = seen;
  }).join();
  return params;
}

// Encodes nothing again, moves the maps whose addresses changed and no others, and its launches get
// the same parameters, byte for byte, as those of a call that is the first of its thread.
template <class Call>
void moves_maps(Call call, size_t launches) {
  const int all = call.tensors.all_maps() + Call::workspace_maps();
  std::thread([&] {
    const auto run = [&](void* workspace) {
      keep_params();
      CHECK(call.run(workspace) == FLASHMOE_OK);
      CHECK(seen.size() == launches && read_back().size() == launches);
      CHECK(seen == params_of_a_new_thread(call, workspace));
    };
    const auto check_moves = [](int changed) {
      const auto moved = static_cast<size_t>(changed);
      const bool moves = fake::state.has_map_moves;
      CHECK(fake::maps.size() == (moves ? 0 : moved) && fake::moves.size() == (moves ? moved : 0));
      for (const fake::Move& move : fake::moves) CHECK(move.from != move.to);
    };
    run(workspace_at(0));
    CHECK(fake::maps.size() == static_cast<size_t>(all) && fake::moves.empty());
    run(workspace_at(0));
    check_moves(0);
    for (int i = 0; i < call.tensors.count(); ++i) {
      call.tensors.move(i);
      run(workspace_at(0));
      check_moves(call.tensors.maps(i));
    }
    run(workspace_at(1));
    check_moves(Call::workspace_maps());
    for (int i = 0; i < call.tensors.count(); ++i) call.tensors.move(i);
    run(workspace_at(2));
    check_moves(all);
  }).join();
}

constexpr Extents kSmall = {100, 256, 128, 8, 2};

void calls_at_other_addresses_move_maps() {
  for (const int32_t gate : {FLASHMOE_MOE_GATE_UP, FLASHMOE_MOE_UP_GATE, FLASHMOE_MOE_INTERLEAVED,
                             FLASHMOE_MOE_SEPARATE, FLASHMOE_MOE_NO_GATE}) {
    for (const bool pre_activation : {false, true}) {
      moves_maps(Layer("sm90", kSmall, gate, false, pre_activation), 3);
    }
  }
  moves_maps(Layer("sm90", kSmall, FLASHMOE_MOE_INTERLEAVED, true, true), 3);
  moves_maps(Layer("sm90", kSmall, FLASHMOE_MOE_NO_GATE, true), 3);
  moves_maps(Layer("sm90", {4096, 256, 256, 8, 2}), 3);  // whose weights are kept in registers
  for (const bool counted : {false, true}) {
    moves_maps(Product("sm90", counted, 1000, 256, 512), 1);
    moves_maps(Product("sm90", counted, 10000, 256, 512), 1);
  }
}

// Gate before up and up before gate differ in addresses alone, and so have one plan.
void gate_and_up_change_places() {
  Layer call("sm90", kSmall);
  std::thread([&] {
    for (const int32_t gate : {FLASHMOE_MOE_GATE_UP, FLASHMOE_MOE_UP_GATE, FLASHMOE_MOE_GATE_UP}) {
      const bool first = seen.empty();
      call.params.gate = gate;
      keep_params();
      CHECK(call.run(workspace_at(0)) == FLASHMOE_OK);
      if (!first) CHECK(fake::maps.size() + fake::moves.size() == 2);  // of the weights' halves
      const std::vector<Bytes> here = seen;
      CHECK(here == params_of_a_new_thread(call, workspace_at(0)));
    }
  }).join();
}

// After every number of maps that the driver took: the call fails, and the next has all of its own.
template <class Call>
void keeps_no_stale_map(Call call) {
  std::thread([&] {
    const int all = call.tensors.all_maps() + Call::workspace_maps();
    const auto run = [&](flashmoe_status status, void* workspace) {
      keep_params();
      CHECK(call.run(workspace) == status);
      if (status == FLASHMOE_OK) {
        CHECK(seen == params_of_a_new_thread(call, workspace));
        return;
      }
      CHECK(seen.empty());
      CHECK(std::strstr(flashmoe_last_error(), "the driver refused a tensor map") != nullptr);
    };
    const auto move_all = [&] {
      for (int i = 0; i < call.tensors.count(); ++i) call.tensors.move(i);
    };
    run(FLASHMOE_OK, workspace_at(0));
    for (int most = 0; most < all; ++most) {
      move_all();
      fake::state.refuse_moves = true;
      fake::state.most_maps = static_cast<size_t>(most);
      run(FLASHMOE_ERROR_CUDA, workspace_at(most % 2));
      fake::state.most_maps = SIZE_MAX;
      fake::state.refuse_moves = false;
      run(FLASHMOE_OK, workspace_at(most % 2));
    }
    // Its context is taken from the thread, or goes: the driver makes no map until there is
    // another.
    move_all();
    fake::forget_context();
    run(FLASHMOE_OK, workspace_at(0));
    move_all();
    fake::reset(0);
    run(FLASHMOE_OK, workspace_at(1));
  }).join();
}

void no_map_is_of_another_call() {
  keeps_no_stale_map(Layer("sm90", kSmall, FLASHMOE_MOE_GATE_UP, false, true));
  keeps_no_stale_map(Product("sm90", false, 1000, 256, 512));
}

// ---- what launches get
// ---------------------------------------------------------------------------

void launches_share_the_workspace() {
  for (const Extents& extents :
       {kSmall, Extents{1, 256, 128, 8, 2}, Extents{333, 2048, 768, 128, 8}}) {
    const Layer layer("sm90", extents);
    const flashmoe_plan plan = plan_of(layer);
    CHECK(plan.launch_count == 3 && std::strcmp(plan.isa, "sm_90a") == 0);
    size_t bytes = 0;
    CHECK(flashmoe_moe_forward_workspace_size(&layer.params, &bytes) == FLASHMOE_OK);
    CHECK(bytes == plan.workspace_bytes);
    keep_params();
    auto* const workspace = static_cast<char*>(workspace_at(0));
    CHECK(flashmoe_moe_forward(&layer.params, workspace, bytes - 1, nullptr) ==
          FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
    CHECK(seen.empty());
    CHECK(flashmoe_moe_forward(&layer.params, workspace, bytes, nullptr) == FLASHMOE_OK);
    const auto up = params_of<moe::sm90::Params>(0);
    const auto down = params_of<moe::sm90::Params>(1);
    const auto combine = params_of<moe_combine::Params>(2);
    const int64_t pairs = extents.tokens * extents.top_k;
    for (const CUtensorMap& map : up.out) CHECK(fake::mapped_by(map) == workspace);
    for (const CUtensorMap& map : down.tokens) CHECK(fake::mapped_by(map) == workspace);
    const auto* const y = static_cast<const char*>(fake::mapped_by(down.out[0]));
    CHECK(y >= workspace + pairs * extents.inner * 2 &&
          y < workspace + pairs * extents.inner * 2 + 256);
    CHECK(reinterpret_cast<const char*>(combine.y) == y);
    const auto* const progress = reinterpret_cast<const char*>(up.progress);
    CHECK(down.progress == up.progress && progress >= y + pairs * extents.hidden * 2);
    const uint32_t words = plan.launches[0].grid[0] * moe::sm90::kConsumers + 1;
    CHECK(progress + words * sizeof(uint32_t) == workspace + bytes);
    CHECK(down.up_clusters * moe::sm90::kCluster == static_cast<int32_t>(plan.launches[0].grid[0]));
  }
}

// Those that were launched before it are read back, those behind it are not launched, and the next
// call is whole.
void a_launch_fails_in_the_middle() {
  for (const char* family : {"sm89", "sm90", "sm89_few_tokens"}) {
    std::thread([&] {
      const Layer layer(family, {16, 256, 128, 8, 2});
      const flashmoe_plan plan = plan_of(layer);
      for (int failing = plan.launch_count - 1; failing >= 0; --failing) {
        static thread_local int left;
        left = failing;
        const auto stop = [] {
          fake::state.driver_launch = CUDA_ERROR_INVALID_VALUE;
          fake::state.runtime_launch = cudaErrorInvalidValue;
        };
        const auto go_on = [] {
          fake::state.driver_launch = CUDA_SUCCESS;
          fake::state.runtime_launch = cudaSuccess;
        };
        static void (*const stop_then)() = stop;
        fake::on_launch = [](const void*) {
          if (--left == 0) stop_then();
        };
        if (failing == 0) stop();
        const std::vector<flashmoe_launch> before =
            failing == 0 ? read_back() : std::vector<flashmoe_launch>();
        CHECK(layer.run(workspace_at(0)) == FLASHMOE_ERROR_CUDA);
        const std::string sentence =
            std::string("launching ") + plan.launches[failing].kernel + ": ";
        CHECK(std::string(flashmoe_last_error()).find(sentence) == 0);
        CHECK(fake::last_error == cudaSuccess);
        const std::vector<flashmoe_launch> launches = read_back();
        // Where none was launched, those of the call before still are the last.
        CHECK(launches.size() == (failing == 0 ? before.size() : static_cast<size_t>(failing)));
        for (size_t i = 0; i < launches.size(); ++i) {
          CHECK(std::strcmp(launches[i].kernel, plan.launches[i].kernel) == 0);
        }
        go_on();
        fake::on_launch = nullptr;
        CHECK(layer.run(workspace_at(0)) == FLASHMOE_OK);
        CHECK(read_back().size() == static_cast<size_t>(plan.launch_count));
      }
    }).join();
  }
}

// With it go the kernels' handles and what they were allowed, but no plan and no map.
void a_device_may_be_reset() {
  fake::on_launch = nullptr;
  const Layer layers[] = {{"sm89", kSmall}, {"sm90", kSmall}, {"sm89_few_tokens", kSmall}};
  const Product products[] = {{"sm89", false, 1000, 256, 512}, {"sm90", true, 1000, 256, 512}};
  const auto run_all = [&] {
    for (const Layer& layer : layers) CHECK(layer.run(workspace_at(0)) == FLASHMOE_OK);
    for (const Product& product : products) CHECK(product.run(nullptr) == FLASHMOE_OK);
  };
  run_all();
  fake::maps.clear();
  const int loads = fake::state.loads;
  fake::reset(0);
  run_all();
  const int reloads = fake::state.loads - loads;
  CHECK(reloads > 0);
  run_all();
  CHECK(fake::state.loads == loads + reloads && fake::state.stale_launches == 0);
  CHECK(fake::maps.empty());
}

// ---- the choice
// ----------------------------------------------------------------------------------

// The family whose plan takes the least time serves a call; a named one always does.
template <class Call>
void the_least_time_wins(const std::vector<const char*>& families,
                         const std::function<Call(const char*)>& call_of) {
  std::string least;
  double microseconds = 0;
  for (const char* family : families) {
    flashmoe_plan plan = flashmoe_plan_init();
    const flashmoe_status status = call_of(family).plan(&plan);
    if (status == FLASHMOE_ERROR_UNSUPPORTED) continue;
    CHECK(status == FLASHMOE_OK && std::strcmp(plan.family, family) == 0);
    CHECK(plan.microseconds > 0);
    if (least.empty() || plan.microseconds < microseconds) {
      least = family;
      microseconds = plan.microseconds;
    }
  }
  const flashmoe_plan plan = plan_of(call_of(nullptr));
  CHECK(plan.family == least);
  // Why it is none of the others, with both times of those that could.
  for (const char* family : families) {
    const std::string name = std::string(family) + ": ";
    CHECK((std::string(plan.rejected).find(name) == std::string::npos) == (family == least));
  }
}

void calls_go_where_they_take_least() {
  const std::vector<const char*> layer_families = {"sm89_few_tokens", "sm90", "sm89"};
  const std::vector<const char*> product_families = {"sm90", "sm89"};
  for (const flashmoe_device device :
       {kDevice, kH200, flashmoe_device{FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_L4}}) {
    for (const int64_t tokens : {1, 2, 8, 9, 16, 64, 128, 129, 4096}) {
      for (const Extents& of : {Extents{0, 2048, 768, 128, 8}, Extents{0, 4096, 14336, 8, 2},
                                Extents{0, 256, 128, 2, 2}}) {
        for (const bool transposed : {false, true}) {
          const Extents extents = {tokens, of.hidden, of.inner, of.experts, of.top_k};
          the_least_time_wins<Layer>(layer_families, [&](const char* family) {
            return Layer(family, extents, FLASHMOE_MOE_GATE_UP, transposed, false, device);
          });
        }
      }
      the_least_time_wins<Product>(product_families, [&](const char* family) {
        return Product(family, false, tokens, 2048, 768, 128, device);
      });
    }
  }
}

// Microseconds by name, on an H200, bf16, from the logits on (docs/kernels/moe.md).
struct Measured {
  Extents extents;
  double few_tokens, sm90;
};

constexpr Extents kQwen3 = {0, 2048, 768, 128, 8};
constexpr Extents kMixtral = {0, 4096, 14336, 8, 2};
constexpr Extents kOlmoe = {0, 2048, 1024, 64, 8};
constexpr Extents kGptOss = {0, 2880, 2880, 32, 4};  // its proportions

constexpr Extents of_tokens(int64_t tokens, const Extents& of) {
  return {tokens, of.hidden, of.inner, of.experts, of.top_k};
}

constexpr Measured kMeasured[] = {
    {of_tokens(5, kQwen3), 87.29, 93.95},     {of_tokens(6, kQwen3), 101.17, 105.42},
    {of_tokens(8, kQwen3), 124.66, 133.49},   {of_tokens(5, kMixtral), 481.79, 506.59},
    {of_tokens(6, kMixtral), 545.40, 551.35}, {of_tokens(8, kMixtral), 614.84, 592.38},
    {of_tokens(5, kOlmoe), 100.65, 105.80},   {of_tokens(6, kOlmoe), 111.61, 120.45},
    {of_tokens(8, kOlmoe), 134.23, 137.23},   {of_tokens(5, kGptOss), 188.14, 195.38},
    {of_tokens(6, kGptOss), 210.68, 220.45},  {of_tokens(8, kGptOss), 255.91, 258.06},
    {of_tokens(16, kQwen3), 222.1, 201.4},    {of_tokens(32, kQwen3), 291.4, 260.2},
    {of_tokens(64, kQwen3), 346.9, 289.3},    {of_tokens(16, kMixtral), 900.2, 668.9},
    {of_tokens(32, kMixtral), 781.4, 669.8},  {of_tokens(64, kMixtral), 974.9, 675.2},
};

void the_faster_layer_is_estimated_less() {
  constexpr double kMostError = 0.05;  // root mean square, of the faster
  double errors = 0;
  double shapes = 0;
  for (const Measured& m : kMeasured) {
    const auto estimate = [&](const char* family) {
      return plan_of(Layer(family, m.extents, FLASHMOE_MOE_GATE_UP, false, false, kH200))
          .microseconds;
    };
    const double few_tokens = estimate("sm89_few_tokens");
    const double sm90 = estimate("sm90");
    std::printf(
        "%ld tokens, %ld of %ld experts, %ld, %ld: few tokens %.1f of %.1f, sm90 %.1f of %.1f\n",
        static_cast<long>(m.extents.tokens), static_cast<long>(m.extents.top_k),
        static_cast<long>(m.extents.experts), static_cast<long>(m.extents.hidden),
        static_cast<long>(m.extents.inner), few_tokens, m.few_tokens, sm90, m.sm90);
    CHECK((few_tokens < sm90) == (m.few_tokens < m.sm90));
    CHECK(estimate("sm89") > 1.3 * std::min(few_tokens, sm90));
    errors += std::pow(std::log(std::min(few_tokens, sm90) / std::min(m.few_tokens, m.sm90)), 2);
    ++shapes;
  }
  std::printf("root mean square error: %.3f\n", std::sqrt(errors / shapes));
  CHECK(std::sqrt(errors / shapes) < kMostError);
  // The most tokens that the few-token kernels have of a model.
  const struct {
    Extents model;
    int64_t most;
  } kModels[] = {{kQwen3, 8}, {kMixtral, 6}, {kOlmoe, 8}, {kGptOss, 8}};
  for (const auto& [model, most] : kModels) {
    for (int64_t tokens = 1; tokens <= 20; ++tokens) {
      const Layer layer(nullptr, of_tokens(tokens, model), FLASHMOE_MOE_GATE_UP, false, false,
                        kH200);
      std::printf("%ld tokens of hidden %ld: %s\n", static_cast<long>(tokens),
                  static_cast<long>(model.hidden), plan_of(layer).family);
      CHECK((std::strcmp(plan_of(layer).family, "sm89_few_tokens") == 0) == (tokens <= most));
    }
  }
}

}  // namespace
}  // namespace flashmoe

int main(int argc, char** argv) {
  using namespace flashmoe;
  fake::state.has_map_moves = argc < 2 || std::strcmp(argv[1], "no-map-moves") != 0;
  calls_at_other_addresses_move_maps();
  gate_and_up_change_places();
  no_map_is_of_another_call();
  launches_share_the_workspace();
  a_launch_fails_in_the_middle();
  a_device_may_be_reset();
  calls_go_where_they_take_least();
  the_faster_layer_is_estimated_less();
  return 0;
}
