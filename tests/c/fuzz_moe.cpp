// Calls of the mixture of experts with numbers from anywhere, and with something wrong: fuzz_moe
// [calls] [seed].
//
// Extents, layouts, strides, dtypes and options of all seven operations are random. Every call must
// succeed, agree with loops in double that read flashmoe/moe.h their own way, and write nothing
// else. Then one fault is put into it: every entry point must refuse it with a sentence that blames
// the argument at fault, and change nothing. Meant to be built with AddressSanitizer and UBSan.
//
// Numbers that decide something (logits and inputs of an activation) are multiples of 1/16 that
// every dtype holds, and their sums are exact, so double makes the same choices and cuts.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "call_oracle.h"
#include "flashmoe/flashmoe.h"
#include "flashmoe/moe.h"
#include "fuzz_call.h"
#include "fuzz_run.h"

namespace {

int64_t compared = 0;
std::map<std::string, int64_t> calls_of;

constexpr flashmoe_dtype kFp64 = {FLASHMOE_DTYPE_FLOAT, 64, 1};
constexpr flashmoe_dtype kFp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kFp16 = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};

// Half a step of a dtype at 1.
double unit_of(flashmoe_dtype dtype) {
  if (dtype.bits == 64) return 0x1p-53;
  if (dtype.bits == 32) return 0x1p-24;
  return dtype.code == FLASHMOE_DTYPE_FLOAT ? 0x1p-11 : 0x1p-8;
}

// The dtype of a routing's numbers for these scores, and of sums.
flashmoe_dtype wide_of(flashmoe_dtype dtype) { return dtype.bits == 64 ? kFp64 : kFp32; }

// A number, and a bound of the numbers that it was made of: an error is units of that.
struct Number {
  double value = 0;
  double size = 0;
};
Number exact(double value) { return {value, std::fabs(value)}; }
Number operator+(Number a, Number b) { return {a.value + b.value, a.size + b.size}; }
Number operator-(Number a, Number b) { return {a.value - b.value, a.size + b.size}; }
Number operator*(Number a, Number b) { return {a.value * b.value, a.size * b.size}; }

// ---- tensors ------------------------------------------------------------------------------------

enum class Layout {
  kPacked,
  kLast,    // the last stride is 1
  kRows,    // and others are multiples of 16 bytes
  kMatrix,  // or the one before it is 1
};

// A tensor in memory of its own, that ends where it is said to, or between guards.
class Tensor {
 public:
  std::vector<int64_t> shape, strides;
  flashmoe_tensor view = {};
  bool is_output = false;

  void make(Random* random, flashmoe_dtype dtype, Layout layout, std::vector<int64_t> extents,
            bool output = false) {
    shape = std::move(extents);
    is_output = output;
    strides.assign(shape.size(), 1);
    const int64_t bytes = dtype.bits / 8;
    const int64_t step = layout == Layout::kLast ? 1 : 16 / bytes;
    std::vector<size_t> order(shape.size());  // of axes, the innermost last
    std::iota(order.begin(), order.end(), size_t{0});
    if (layout == Layout::kMatrix && random->chance(0.5)) std::swap(order[1], order[2]);
    const bool gaps = layout != Layout::kPacked && random->chance(0.5);
    int64_t reach = 1;
    for (size_t i = order.size(); i-- > 0;) {
      const size_t axis = order[i];
      if (i + 1 < order.size()) {
        if (gaps) reach = (reach + step - 1) / step * step + step * random->below(3);
        strides[axis] = reach;
      }
      reach = strides[axis] * std::max<int64_t>(shape[axis], 1);
    }
    const bool empty = is_empty();
    const bool backwards = layout == Layout::kMatrix && gaps && random->chance(0.2);
    int64_t first = 0, last = 0;
    for (size_t axis = 0; axis < shape.size() && !empty; ++axis) {
      if (axis == 0 && backwards) strides[0] = -strides[0];
      (strides[axis] < 0 ? first : last) += (shape[axis] - 1) * strides[axis];
    }
    guard_ = output ? 64 : 0;
    bytes_ = 2 * guard_ + (empty ? 0 : static_cast<size_t>((last - first + 1) * bytes));
    block_ = allocate_memory(bytes_);
    std::memset(block_.get(), kPoison, bytes_);
    view.data = block_.get() + guard_ + static_cast<size_t>(-first * bytes);
    if (empty && random->chance(0.5)) view.data = nullptr;  // as torch has them
    view.device = {FLASHMOE_DEVICE_CPU, 0};
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    view.strides = strides.data();
  }

  bool given() const { return view.shape != nullptr; }
  flashmoe_dtype dtype() const { return view.dtype; }

  unsigned char* at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    const int64_t index[] = {i, j, k};
    int64_t offset = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis) offset += index[axis] * strides[axis];
    return static_cast<unsigned char*>(view.data) + offset * (view.dtype.bits / 8);
  }
  double get(int64_t i, int64_t j = 0, int64_t k = 0) const { return load(at(i, j, k), dtype()); }
  int32_t integer(int64_t i, int64_t j = 0) const {
    int32_t number;
    std::memcpy(&number, at(i, j), sizeof number);
    return number;
  }
  // A value that the dtype has.
  void set(double value, int64_t i, int64_t j = 0, int64_t k = 0) const {
    const auto single = static_cast<float>(value);
    uint32_t word;
    std::memcpy(&word, &single, sizeof word);
    uint16_t half = static_cast<uint16_t>(word >> 16);
    if (dtype().code == FLASHMOE_DTYPE_FLOAT && dtype().bits == 16) {
      int exponent = 0;
      const double fraction = std::frexp(std::fabs(value), &exponent);  // in [0.5, 1)
      const int bits = static_cast<int>(fraction * 2048) - 1024;
      half = static_cast<uint16_t>(value == 0 ? 0 : (exponent + 14) * 1024 + bits);
      if (std::signbit(value)) half = static_cast<uint16_t>(half | 0x8000);
    }
    if (dtype().code == FLASHMOE_DTYPE_INT) {
      const auto number = static_cast<int32_t>(value);
      std::memcpy(at(i, j, k), &number, sizeof number);
    } else if (dtype().bits == 64) {
      std::memcpy(at(i, j, k), &value, sizeof value);
    } else {
      std::memcpy(at(i, j, k), dtype().bits == 32 ? static_cast<const void*>(&word) : &half,
                  dtype().bits / 8);
    }
  }

  template <class Visit>
  void each(const Visit& visit) const {
    const auto extent = [&](size_t axis) { return axis < shape.size() ? shape[axis] : 1; };
    for (int64_t i = 0; i < extent(0); ++i) {
      for (int64_t j = 0; j < extent(1); ++j) {
        for (int64_t k = 0; k < extent(2); ++k) visit(i, j, k);
      }
    }
  }
  // Multiples of `step` up to `most` of them, of either sign.
  void fill(Random* random, double step, int64_t most) const {
    each([&](int64_t i, int64_t j, int64_t k) {
      set(step * static_cast<double>(random->range(-most, most)), i, j, k);
    });
  }

  void remember() { before_.assign(block_.get(), block_.get() + bytes_); }
  bool unchanged() const {
    return bytes_ == 0 || std::memcmp(block_.get(), before_.data(), bytes_) == 0;
  }
  // As it was, of an element that was compared.
  void put_back(int64_t i, int64_t j, int64_t k) const {
    unsigned char* const to = at(i, j, k);
    std::memcpy(to, before_.data() + (to - block_.get()), view.dtype.bits / 8);
  }
  double held(int64_t i, int64_t j, int64_t k) const {
    return load(before_.data() + (at(i, j, k) - block_.get()), dtype());
  }
  bool is_empty() const { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }
  // Elements, and no gaps between them.
  bool is_dense() const {
    int64_t bytes = view.dtype.bits / 8;
    for (const int64_t extent : shape) bytes *= extent;
    return bytes > 0 && strides[0] > 0 && static_cast<size_t>(bytes) + 2 * guard_ == bytes_;
  }

 private:
  size_t guard_ = 0;
  size_t bytes_ = 0;
  Memory block_;
  std::vector<unsigned char> before_;
};

// ---- calls --------------------------------------------------------------------------------------

#define FUNCTIONS(name)                                                                      \
  flashmoe_status plan_of(const flashmoe_##name##_params* p, flashmoe_plan* plan) {          \
    return flashmoe_##name##_plan(p, plan);                                                  \
  }                                                                                          \
  flashmoe_status size_of(const flashmoe_##name##_params* p, size_t* bytes) {                \
    return flashmoe_##name##_workspace_size(p, bytes);                                       \
  }                                                                                          \
  flashmoe_status run_it(const flashmoe_##name##_params* p, void* workspace, size_t bytes) { \
    return flashmoe_##name(p, workspace, bytes, nullptr);                                    \
  }
FUNCTIONS(moe_route)
FUNCTIONS(moe_forward)
FUNCTIONS(grouped_product)
FUNCTIONS(fused_moe)
FUNCTIONS(moe_backward)
FUNCTIONS(moe_route_backward)
FUNCTIONS(grouped_product_backward)
#undef FUNCTIONS

template <class Params>
struct Slot {
  const char* name;
  const flashmoe_tensor* Params::* member;
  Tensor* tensor;
};

template <class Params>
struct MoeCall {
  Params params = {};
  std::vector<Slot<Params>> slots;
  std::deque<Tensor> own;  // whose addresses stay

  MoeCall() { params.struct_size = sizeof params; }

  Tensor& add(const char* name, const flashmoe_tensor* Params::* member, Tensor* tensor = nullptr) {
    if (tensor == nullptr) tensor = &own.emplace_back();
    slots.push_back({name, member, tensor});
    params.*member = &tensor->view;
    return *tensor;
  }
  bool unchanged() const {
    return std::all_of(slots.begin(), slots.end(),
                       [](const auto& slot) { return slot.tensor->unchanged(); });
  }
};

// Every element is near `want`, by so many units of the dtypes at hand, and nothing beside is
// changed. Adds what was there where the call does.
template <class Want>
void expect_values(const Tensor& tensor, double unit, bool adds, const Want& want) {
  tensor.each([&](int64_t i, int64_t j, int64_t k) {
    Number number = want(i, j, k);
    if (adds) number = number + exact(tensor.held(i, j, k));
    const double got = tensor.get(i, j, k);
    const double error =
        4 * unit * number.size + 2 * unit_of(tensor.dtype()) * std::fabs(number.value) + 0x1p-23;
    if (!(std::fabs(got - number.value) <= error)) {
      std::fprintf(stderr, "[%" PRId64 ", %" PRId64 ", %" PRId64 "]: %g, wanted %g +- %g\n", i, j,
                   k, got, number.value, error);
      EXPECT(!"a value is what it should be");
    }
    tensor.put_back(i, j, k);
    ++compared;
  });
  EXPECT(tensor.unchanged());
}

template <class Params>
void put_fault(Random* random, MoeCall<Params>* call, std::set<std::string>* blame) {
  auto& slots = call->slots;
  Slot<Params>& slot =
      slots[static_cast<size_t>(random->below(static_cast<int64_t>(slots.size())))];
  Tensor& tensor = *slot.tensor;
  *blame = {slot.name};
  const auto axis = static_cast<size_t>(random->below(static_cast<int64_t>(tensor.shape.size())));
  const bool empty = tensor.is_empty();
  switch (random->below(10)) {
    case 0:
      fault = "rank";
      tensor.view.ndim = random->one_of({-1, 0, 5, INT32_MAX});
      break;
    case 1:
      fault = "type";
      tensor.view.dtype.code = random->one_of<uint8_t>({1, 3, 5, 17, 255});
      break;
    case 2:
      fault = "lanes";
      tensor.view.dtype.lanes = random->one_of<uint16_t>({0, 2, 65535});
      break;
    case 3:
      fault = "device";
      tensor.view.device.device_type = random->one_of({-1, 0, 4, 7, 99});
      break;
    case 4:
      fault = "no shape";
      tensor.view.shape = nullptr;
      break;
    case 5:
      fault = "negative extent";
      tensor.shape[axis] = random->one_of<int64_t>({-1, INT64_MIN});
      // fused_moe takes the number of experts from these first.
      if (blame->count("w_gate_up") != 0) blame->insert({"router_weights", "logits"});
      break;
    case 6:
      fault = "another extent";
      tensor.shape[axis] += 8 * random->range(1, 3);
      for (const Slot<Params>& each : slots) blame->insert(each.name);
      blame->insert({"top_k", "num_groups", "top_groups"});
      break;
    case 7:
      if (empty) return put_fault(random, call, blame);
      fault = "no data";
      tensor.view.data = nullptr;
      break;
    case 8:
      if (empty) return put_fault(random, call, blame);
      fault = "misaligned data";
      tensor.view.byte_offset = 1;
      break;
    default:
      fault = "struct_size";
      call->params.struct_size = random->one_of<size_t>({0, 8, sizeof(Params) + 8, SIZE_MAX});
      *blame = {"struct_size"};
  }
}

// A fault, which all entry points refuse alike.
template <class Params>
void run_with_fault(Random* random, MoeCall<Params>* call, size_t needed) {
  std::set<std::string> blame;
  put_fault(random, call, &blame);
  flashmoe_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_plan before;
  std::memcpy(static_cast<void*>(&before), &plan, sizeof plan);
  const flashmoe_status planned = plan_of(&call->params, &plan);
  const std::string sentence = flashmoe_last_error();
  // Extents that decide another one may be any.
  if (fault == "another extent" && planned == FLASHMOE_OK) return;
  EXPECT(planned == FLASHMOE_ERROR_INVALID_ARGUMENT || planned == FLASHMOE_ERROR_UNSUPPORTED);
  EXPECT(blames(blame, sentence) ||
         (fault == "struct_size" && sentence.find("struct_size") != std::string::npos));
  EXPECT(std::memcmp(&plan, &before, sizeof plan) == 0);
  size_t bytes = 77;
  EXPECT(size_of(&call->params, &bytes) == planned && bytes == 77);
  const Memory workspace = allocate_memory(needed);
  EXPECT(run_it(&call->params, workspace.get(), needed) == planned);
  EXPECT(sentence == flashmoe_last_error());
  EXPECT(call->unchanged());
  ++blamed[sentence.substr(0, sentence.find(':'))];
}

// Runs a valid call, has `check` look at its outputs and put back what they held, and then one with
// something wrong.
template <class Params, class Check>
void run(Random* random, MoeCall<Params>* call, const Check& check) {
  fault.clear();
  ++calls_of[operation];
  for (const Slot<Params>& slot : call->slots) slot.tensor->remember();
  flashmoe_plan plan = flashmoe_plan_init();
  EXPECT(plan_of(&call->params, &plan) == FLASHMOE_OK);
  size_t bytes = 0;
  EXPECT(size_of(&call->params, &bytes) == FLASHMOE_OK && bytes == plan.workspace_bytes);
  if (bytes > 0) {
    EXPECT(run_it(&call->params, nullptr, 0) == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
    EXPECT(call->unchanged());
  }
  const Memory workspace = allocate_memory(bytes);
  std::memset(workspace.get(), kPoison, bytes);
  EXPECT(run_it(&call->params, workspace.get(), bytes) == FLASHMOE_OK);
  check();
  EXPECT(call->unchanged());
  // An output that is an input's memory; without gaps, in which it might lie.
  const Tensor& input = *call->slots.front().tensor;
  for (const Slot<Params>& slot : call->slots) {
    if (!slot.tensor->is_output || !slot.tensor->is_dense() || !input.is_dense()) continue;
    void* const data = slot.tensor->view.data;
    slot.tensor->view.data = input.view.data;
    const flashmoe_status status = run_it(&call->params, workspace.get(), bytes);
    EXPECT(status == FLASHMOE_ERROR_INVALID_ARGUMENT);
    EXPECT(std::strstr(flashmoe_last_error(), "shares memory with") != nullptr);
    slot.tensor->view.data = data;
    EXPECT(call->unchanged());
    break;
  }
  run_with_fault(random, call, bytes);
}

// ---- routings -----------------------------------------------------------------------------------

// Pairs by expert, then by number.
struct Order {
  std::vector<int32_t> ids;
  int64_t tokens = 0, top_k = 0, experts = 0;
  std::vector<int32_t> offsets, pairs, slots;

  void sort() {
    offsets.assign(1, 0);
    pairs.assign(ids.size(), -1);
    slots.assign(ids.size(), -1);
    int32_t slot = 0;
    for (int32_t e = 0; e < experts; ++e) {
      for (size_t pair = 0; pair < ids.size(); ++pair) {
        if (ids[pair] != e) continue;
        pairs[static_cast<size_t>(slot)] = static_cast<int32_t>(pair);
        slots[pair] = slot++;
      }
      offsets.push_back(slot);
    }
  }
};

void expect_integers(const Tensor& tensor, const std::vector<int32_t>& want) {
  size_t at = 0;
  tensor.each([&](int64_t i, int64_t j, int64_t k) {
    EXPECT(tensor.integer(i, j) == want[at++]);
    tensor.put_back(i, j, k);
    ++compared;
  });
  EXPECT(tensor.unchanged());
}

flashmoe_dtype any_float(Random* random) {
  return random->one_of<flashmoe_dtype>({kFp32, kFp16, kBf16, kFp64});
}

int64_t any_tokens(Random* random) { return random->chance(0.05) ? 0 : random->range(1, 20); }

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Scoring {
  int32_t scoring = 0;
  bool renormalize = false;
  double scale = 1;
};

// What the scores of a token's experts are, and the log of the sum of the exponentials.
std::vector<double> scores_of(const std::vector<double>& logits, const std::vector<int32_t>& chosen,
                              int32_t scoring, double* lse) {
  double sum = 0, sum_chosen = 0;
  for (const double x : logits) sum += std::exp(x);
  for (const int32_t e : chosen) sum_chosen += std::exp(logits[static_cast<size_t>(e)]);
  *lse = std::log(sum);
  std::vector<double> made;
  for (const int32_t e : chosen) {
    const double x = logits[static_cast<size_t>(e)];
    made.push_back(scoring == FLASHMOE_MOE_SIGMOID
                       ? sigmoid(x)
                       : std::exp(x) / (scoring == 0 ? sum : sum_chosen));
  }
  return made;
}

struct Router {
  Scoring how;
  int32_t num_groups = 0, top_groups = 0;
  int64_t experts = 0, top_k = 0;
  std::vector<double> bias;  // of sigmoids
  bool is_close = false;     // two choices are not told apart by fp32 for certain

  // The experts of a token, the greatest choice first and of equal ones the lower first.
  std::vector<int32_t> choose(const std::vector<double>& logits) {
    std::vector<double> choice = logits;
    if (how.scoring == FLASHMOE_MOE_SIGMOID && (!bias.empty() || num_groups > 1)) {
      for (size_t e = 0; e < choice.size(); ++e) {
        choice[e] = sigmoid(logits[e]) + (bias.empty() ? 0.0 : bias[e]);
      }
    }
    if (num_groups > 1) {
      const size_t each = choice.size() / static_cast<size_t>(num_groups);
      std::vector<double> sums;
      for (size_t g = 0; g < choice.size(); g += each) {
        std::vector<double> own(choice.begin() + static_cast<std::ptrdiff_t>(g),
                                choice.begin() + static_cast<std::ptrdiff_t>(g + each));
        std::sort(own.rbegin(), own.rend());
        sums.push_back(own[0] + own[1]);
      }
      const std::vector<int32_t> groups = greatest(sums, top_groups);
      for (size_t e = 0; e < choice.size(); ++e) {
        const auto group = static_cast<int32_t>(e / each);
        if (std::find(groups.begin(), groups.end(), group) == groups.end()) choice[e] = -HUGE_VAL;
      }
    }
    return greatest(choice, top_k);
  }

 private:
  std::vector<int32_t> greatest(const std::vector<double>& values, int64_t count) {
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
    });
    for (size_t i = 1; i < order.size(); ++i) {
      const double gap =
          values[static_cast<size_t>(order[i - 1])] - values[static_cast<size_t>(order[i])];
      is_close |= gap > 0 && gap < 1e-5;
    }
    order.resize(static_cast<size_t>(count));
    return order;
  }
};

template <class Params>
void choose_router(Random* random, Router* router, MoeCall<Params>* call) {
  Router& r = *router;
  r.how.scoring = static_cast<int32_t>(random->below(3));
  if (r.how.scoring == FLASHMOE_MOE_SIGMOID && r.experts % 4 == 0 && random->chance(0.4)) {
    r.num_groups = static_cast<int32_t>(random->one_of<int64_t>({2, r.experts / 2}));
    const int64_t each = r.experts / r.num_groups;
    r.top_groups = static_cast<int32_t>(random->range((r.top_k + each - 1) / each, r.num_groups));
  }
  r.how.renormalize = random->chance(0.5);
  call->params.scoring = r.how.scoring;
  call->params.renormalize = r.how.renormalize ? 1 : 0;
  call->params.num_groups = r.num_groups;
  call->params.top_groups = r.top_groups;
  if (random->chance(0.4)) {
    r.how.scale = 1.5;
    call->params.scale = 1.5f;
  }
  if (r.how.scoring == FLASHMOE_MOE_SIGMOID && random->chance(0.5)) {
    Tensor& bias = call->add("selection_bias", &Params::selection_bias);
    bias.make(random, kFp32, Layout::kPacked, {r.experts});
    bias.fill(random, 2, 1);
    for (int64_t e = 0; e < r.experts; ++e) r.bias.push_back(bias.get(e));
  }
}

// Logits at least so far from 0 that sums of two sigmoids tell which two they are of.
void fill_logits(Random* random, const Tensor& logits) {
  logits.each([&](int64_t i, int64_t j, int64_t) {
    logits.set(0x1p-4 * static_cast<double>(random->range(-32, 48)), i, j);
  });
}

std::vector<double> row_of(const Tensor& tensor, int64_t row) {
  std::vector<double> made;
  for (int64_t j = 0; j < tensor.shape[1]; ++j) made.push_back(tensor.get(row, j));
  return made;
}

void fuzz_route(Random* random) {
  using Params = flashmoe_moe_route_params;
  MoeCall<Params> call;
  Router router;
  const int64_t tokens = any_tokens(random);
  router.experts = random->range(1, 24);
  router.top_k = random->range(1, std::min<int64_t>(router.experts, 6));
  Tensor& logits = call.add("logits", &Params::logits);
  logits.make(random, any_float(random), Layout::kLast, {tokens, router.experts});
  fill_logits(random, logits);
  choose_router(random, &router, &call);
  const auto output = [&](const char* name, const flashmoe_tensor* Params::* member,
                          flashmoe_dtype dtype, std::vector<int64_t> shape) -> Tensor& {
    Tensor& made = call.add(name, member);
    made.make(random, dtype, Layout::kPacked, std::move(shape), true);
    return made;
  };
  Tensor& ids = output("ids", &Params::ids, kInt32, {tokens, router.top_k});
  Tensor& weights =
      output("weights", &Params::weights, wide_of(logits.dtype()), {tokens, router.top_k});
  Tensor& offsets = output("offsets", &Params::offsets, kInt32, {router.experts + 1});
  Tensor& pairs = output("pairs", &Params::pairs, kInt32, {tokens * router.top_k});
  Tensor& slots = output("slots", &Params::slots, kInt32, {tokens, router.top_k});
  Tensor* lse = nullptr;
  if (random->chance(0.5)) lse = &output("lse", &Params::lse, wide_of(logits.dtype()), {tokens});
  run(random, &call, [&] {
    Order order;
    order.tokens = tokens, order.top_k = router.top_k, order.experts = router.experts;
    std::vector<double> want, sums;
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> row = row_of(logits, t);
      const std::vector<int32_t> chosen = router.choose(row);
      order.ids.insert(order.ids.end(), chosen.begin(), chosen.end());
      double sum = 0;
      const std::vector<double> scores = scores_of(row, chosen, router.how.scoring, &sum);
      const double all = std::accumulate(scores.begin(), scores.end(), 0.0);
      for (const double s : scores) {
        want.push_back((router.how.renormalize ? s / all : s) * router.how.scale);
      }
      sums.push_back(sum);
    }
    if (router.is_close) {
      for (const auto& slot : call.slots) {
        slot.tensor->each([&](int64_t i, int64_t j, int64_t k) { slot.tensor->put_back(i, j, k); });
      }
      return;
    }
    order.sort();
    expect_integers(ids, order.ids);
    expect_integers(offsets, order.offsets);
    expect_integers(pairs, order.pairs);
    expect_integers(slots, order.slots);
    expect_values(weights, 0x1p-22, false, [&](int64_t t, int64_t k, int64_t) {
      return exact(want[static_cast<size_t>(t * router.top_k + k)]);
    });
    if (lse == nullptr) return;
    expect_values(*lse, 0x1p-22, false, [&](int64_t t, int64_t, int64_t) {
      return Number{sums[static_cast<size_t>(t)], std::fabs(sums[static_cast<size_t>(t)]) + 4};
    });
  });
}

void fuzz_route_backward(Random* random) {
  using Params = flashmoe_moe_route_backward_params;
  MoeCall<Params> call;
  const int64_t tokens = any_tokens(random), experts = random->range(1, 16);
  const int64_t top_k = random->range(1, std::min<int64_t>(experts, 5));
  const bool given = random->chance(0.4), adds = random->chance(0.3);
  Scoring how;
  how.scoring = given ? 0 : static_cast<int32_t>(random->below(3));
  how.renormalize = random->chance(0.5);
  if (random->chance(0.4)) how.scale = 0.75;
  call.params.scoring = how.scoring;
  call.params.renormalize = how.renormalize ? 1 : 0;
  call.params.scale = how.scale == 1 ? 0.0f : 0.75f;
  call.params.accumulate = adds ? 1 : 0;
  Tensor& dweights = call.add("dweights", &Params::dweights);
  const flashmoe_dtype dtype = any_float(random);
  dweights.make(random, wide_of(dtype), Layout::kPacked, {tokens, top_k});
  dweights.fill(random, 0.25, 8);
  Tensor& ids = call.add("ids", &Params::ids);
  ids.make(random, kInt32, Layout::kPacked, {tokens, top_k});
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i-- > 1;) {
      std::swap(order[i], order[static_cast<size_t>(random->below(static_cast<int64_t>(i) + 1))]);
    }
    for (int64_t k = 0; k < top_k; ++k) {
      ids.set(given && random->chance(0.2) ? -1 : order[static_cast<size_t>(k)], t, k);
    }
  }
  Tensor& of = given ? call.add("given_weights", &Params::given_weights)
                     : call.add("logits", &Params::logits);
  of.make(random, dtype, Layout::kLast, {tokens, given ? top_k : experts});
  if (given) {
    of.each([&](int64_t i, int64_t j, int64_t) {
      of.set(0.125 * static_cast<double>(random->range(1, 16)), i, j);
    });
  } else {
    fill_logits(random, of);
  }
  Tensor* dlse = nullptr;
  if (!given && random->chance(0.5)) {
    dlse = &call.add("dlse", &Params::dlse);
    dlse->make(random, wide_of(dtype), Layout::kPacked, {tokens});
    dlse->fill(random, 0.5, 4);
  }
  Tensor& out = given ? call.add("dgiven_weights", &Params::dgiven_weights)
                      : call.add("dlogits", &Params::dlogits);
  out.make(random, random->chance(0.5) ? dtype : kFp32, Layout::kLast, of.shape, true);
  if (adds) out.fill(random, 0.5, 8);
  run(random, &call, [&] {
    std::vector<Number> want;
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> row = row_of(of, t);
      std::vector<int32_t> chosen;
      std::vector<double> scores;
      double lse = 0;
      for (int64_t k = 0; k < top_k; ++k) chosen.push_back(ids.integer(t, k));
      scores = given ? row : scores_of(row, chosen, how.scoring, &lse);
      const double all = std::accumulate(scores.begin(), scores.end(), 0.0);
      // dscore, of dw * scale, and through the sum.
      Number through;
      std::vector<Number> dw, dscore;
      for (size_t k = 0; k < scores.size(); ++k) {
        const double mine = given && chosen[k] < 0 ? 0.0 : 1.0;
        dw.push_back(exact(dweights.get(t, static_cast<int64_t>(k)) * how.scale * mine));
        through = through + dw[k] * exact(scores[k] / all);
      }
      for (size_t k = 0; k < scores.size(); ++k) {
        dscore.push_back(how.renormalize ? (dw[k] - through) * exact(1 / all) : dw[k]);
      }
      if (given) {
        want.insert(want.end(), dscore.begin(), dscore.end());
        continue;
      }
      const Number of_lse = dlse != nullptr ? exact(dlse->get(t)) : Number{};
      Number sum;  // of a softmax's gradients and scores
      for (size_t k = 0; k < scores.size(); ++k) sum = sum + dscore[k] * exact(scores[k]);
      for (size_t e = 0; e < row.size(); ++e) {
        Number made = of_lse * exact(std::exp(row[e] - lse));
        const auto at = std::find(chosen.begin(), chosen.end(), static_cast<int32_t>(e));
        const auto k = static_cast<size_t>(at - chosen.begin());
        const bool is_chosen = at != chosen.end();
        if (how.scoring == FLASHMOE_MOE_SIGMOID) {
          if (is_chosen) made = made + dscore[k] * exact(scores[k] * (1 - scores[k]));
        } else {
          if (is_chosen) made = made + dscore[k] * exact(scores[k]);
          if (how.scoring == FLASHMOE_MOE_SOFTMAX) {
            made = made - sum * exact(std::exp(row[e] - lse));
          } else if (is_chosen) {
            made = made - sum * exact(scores[k]);
          }
        }
        want.push_back(made);
      }
    }
    expect_values(out, 0x1p-22, adds, [&](int64_t t, int64_t j, int64_t) {
      return want[static_cast<size_t>(t * of.shape[1] + j)];
    });
  });
}

// ---- products -----------------------------------------------------------------------------------

struct Groups {
  bool counted = false;
  int64_t experts = 0, rows = 0;  // of each expert with counts
  std::vector<int32_t> bounds;

  void make(Random* random) {
    counted = random->chance(0.4);
    experts = random->range(1, 5);
    rows = counted ? random->range(0, 9) : random->range(0, 24);
    int64_t at = random->below(3);
    for (int64_t i = 0; i < experts + (counted ? 0 : 1); ++i) {
      bounds.push_back(static_cast<int32_t>(counted ? random->range(-1, rows + 2) : at));
      at += random->chance(0.3) ? 0 : random->range(0, 9);
    }
    if (!counted && random->chance(0.2)) bounds.back() = INT32_MAX;
  }
  std::vector<int64_t> shape(int64_t columns) const {
    return counted ? std::vector<int64_t>{experts, rows, columns}
                   : std::vector<int64_t>{rows, columns};
  }
  // Rows [begin, end) that an expert has.
  int64_t begin(int64_t e) const {
    return counted ? 0 : std::clamp<int64_t>(bounds[static_cast<size_t>(e)], 0, rows);
  }
  int64_t end(int64_t e) const {
    const auto at = static_cast<size_t>(counted ? e : e + 1);
    return std::clamp<int64_t>(bounds[at], begin(e), rows);
  }
  int64_t owner(int64_t row) const {
    for (int64_t e = 0; e < experts; ++e) {
      if (row >= begin(e) && row < end(e)) return e;
    }
    return -1;
  }
  bool has(int64_t e, int64_t row) const { return row >= begin(e) && row < end(e); }
  double get(const Tensor& x, int64_t e, int64_t row, int64_t column) const {
    return counted ? x.get(e, row, column) : x.get(row, column);
  }
};

template <class Params>
void add_bounds(Random* random, const Groups& groups, MoeCall<Params>* call) {
  Tensor& bounds = groups.counted ? call->add("counts", &Params::counts)
                                  : call->add("offsets", &Params::offsets);
  bounds.make(random, kInt32, Layout::kPacked, {static_cast<int64_t>(groups.bounds.size())});
  for (size_t i = 0; i < groups.bounds.size(); ++i) {
    bounds.set(groups.bounds[i], static_cast<int64_t>(i));
  }
}

void fuzz_product(Random* random, bool backward) {
  Groups groups;
  groups.make(random);
  const int64_t columns = 8 * random->range(1, 5), out_columns = 8 * random->range(1, 5);
  const flashmoe_dtype dtype = any_float(random);
  const double unit = unit_of(dtype);
  const auto lead = [&](int64_t i, int64_t j) { return groups.counted ? j : i; };
  const auto expert = [&](int64_t i) { return groups.counted ? i : groups.owner(i); };
  const auto rows = [&](Tensor* tensor, int64_t n, bool output) {
    tensor->make(random, dtype, Layout::kRows, groups.shape(n), output);
    tensor->fill(random, 0.5, 4);
  };
  if (!backward) {
    using Params = flashmoe_grouped_product_params;
    MoeCall<Params> call;
    Tensor& x = call.add("x", &Params::x);
    rows(&x, columns, false);
    Tensor& w = call.add("w", &Params::w);
    w.make(random, dtype, Layout::kMatrix, {groups.experts, out_columns, columns});
    w.fill(random, 0.25, 4);
    Tensor bias;
    if (random->chance(0.5)) {
      call.add("bias", &Params::bias, &bias);
      bias.make(random, random->chance(0.5) ? dtype : kFp32, Layout::kLast,
                {groups.experts, out_columns});
      bias.fill(random, 0.25, 8);
    }
    add_bounds(random, groups, &call);
    Tensor& out = call.add("out", &Params::out);
    rows(&out, out_columns, true);
    run(random, &call, [&] {
      // Rows that no expert has are as they were.
      expect_values(out, unit, false, [&](int64_t i, int64_t j, int64_t k) {
        const int64_t e = expert(i), row = lead(i, j), n = groups.counted ? k : j;
        if (e < 0 || !groups.has(e, row)) return exact(out.held(i, j, k));
        Number sum = bias.given() ? exact(bias.get(e, n)) : Number{};
        for (int64_t c = 0; c < columns; ++c) {
          sum = sum + exact(w.get(e, n, c)) * exact(groups.get(x, e, row, c));
        }
        return sum;
      });
    });
    return;
  }
  using Params = flashmoe_grouped_product_backward_params;
  MoeCall<Params> call;
  const int64_t wanted = random->range(1, 7);
  const bool adds = random->chance(0.3);
  call.params.accumulate = adds ? 1 : 0;
  Tensor& dout = call.add("dout", &Params::dout);
  rows(&dout, out_columns, false);
  Tensor& x = call.add("x", &Params::x);
  rows(&x, columns, false);
  Tensor& w = call.add("w", &Params::w);
  w.make(random, dtype, Layout::kMatrix, {groups.experts, out_columns, columns});
  w.fill(random, 0.25, 4);
  add_bounds(random, groups, &call);
  Tensor dx, dw, dbias;
  const auto gradient = [&](bool want, Tensor* tensor, const char* name,
                            const flashmoe_tensor* Params::* member, Layout layout,
                            std::vector<int64_t> shape) {
    if (!want) return;
    call.add(name, member, tensor);
    tensor->make(random, random->chance(0.5) ? dtype : kFp32, layout, std::move(shape), true);
    if (adds) tensor->fill(random, 0.5, 8);
  };
  gradient((wanted & 1) != 0, &dx, "dx", &Params::dx, Layout::kRows, groups.shape(columns));
  gradient((wanted & 2) != 0, &dw, "dw", &Params::dw, Layout::kMatrix, w.shape);
  gradient((wanted & 4) != 0, &dbias, "dbias", &Params::dbias, Layout::kLast,
           {groups.experts, out_columns});
  run(random, &call, [&] {
    if (dx.given()) {
      expect_values(dx, unit, adds, [&](int64_t i, int64_t j, int64_t k) {
        const int64_t e = expert(i), row = lead(i, j), c = groups.counted ? k : j;
        Number sum;
        if (e < 0 || !groups.has(e, row)) return sum;
        for (int64_t n = 0; n < out_columns; ++n) {
          sum = sum + exact(w.get(e, n, c)) * exact(groups.get(dout, e, row, n));
        }
        return sum;
      });
    }
    const auto over_rows = [&](int64_t e, int64_t n, int64_t c) {
      Number sum;
      for (int64_t r = groups.begin(e); r < groups.end(e); ++r) {
        sum = sum +
              exact(groups.get(dout, e, r, n)) * (c < 0 ? exact(1) : exact(groups.get(x, e, r, c)));
      }
      return sum;
    };
    if (dw.given()) expect_values(dw, unit, adds, over_rows);
    if (dbias.given()) {
      expect_values(dbias, unit, adds,
                    [&](int64_t e, int64_t n, int64_t) { return over_rows(e, n, -1); });
    }
  });
}

// ---- layers -------------------------------------------------------------------------------------

struct Layer {
  int64_t tokens = 0, hidden = 0, inner = 0, experts = 0, top_k = 0;
  int32_t gate = 0, activation = 0;
  double alpha = 1, limit = 0, up_offset = 0;
  bool on_input = false;
  flashmoe_dtype dtype = kFp32;
  Tensor x, w_gate_up, w_up, w_down, b_gate_up, b_up, b_down;

  bool gated() const { return gate != FLASHMOE_MOE_NO_GATE; }
  bool separate() const { return gate == FLASHMOE_MOE_SEPARATE; }
  int64_t rows() const { return gated() && !separate() ? 2 * inner : inner; }
  // The row of w_gate_up that is row i of the gate (part 0) or of up (part 1).
  int64_t row(int part, int64_t i) const {
    switch (gate) {
      case FLASHMOE_MOE_GATE_UP: return part * inner + i;
      case FLASHMOE_MOE_UP_GATE: return (1 - part) * inner + i;
      case FLASHMOE_MOE_INTERLEAVED: return 2 * i + part;
      default: return i;
    }
  }
  const Tensor& matrix(int part) const { return separate() && part == 1 ? w_up : w_gate_up; }
  const Tensor& bias(int part) const { return separate() && part == 1 ? b_up : b_gate_up; }

  void make(Random* random, int64_t few_experts) {
    tokens = any_tokens(random);
    hidden = 8 * random->range(1, 4);
    inner = 8 * random->range(1, 4);
    experts = few_experts;
    top_k = random->range(1, std::min<int64_t>(experts, 3));
    gate = static_cast<int32_t>(random->below(5));
    activation = static_cast<int32_t>(random->below(5));
    dtype = any_float(random);
    on_input = random->chance(0.3);
    if (activation == FLASHMOE_ACTIVATION_SILU && random->chance(0.4)) alpha = 1.75;
    // No multiple of 1/16.
    if (random->chance(0.4)) limit = random->one_of({0.96875 + 0x1p-8, 2.0 + 0x1p-7});
    if (gated() && random->chance(0.3)) up_offset = 1;
    x.make(random, dtype, Layout::kRows, {tokens, hidden});
    x.fill(random, 0.5, 2);
    const auto weights = [&](Tensor* tensor, int64_t n, int64_t k) {
      tensor->make(random, dtype, Layout::kMatrix, {experts, n, k});
      tensor->fill(random, 0.25, 2);
    };
    const auto biases = [&](Tensor* tensor, int64_t n) {
      tensor->make(random, random->chance(0.5) ? dtype : kFp32, Layout::kLast, {experts, n});
      tensor->fill(random, 0.125, 8);
    };
    weights(&w_gate_up, rows(), hidden);
    if (separate()) weights(&w_up, inner, hidden);
    weights(&w_down, hidden, inner);
    if (random->chance(0.4)) biases(&b_gate_up, rows());
    if (separate() && random->chance(0.4)) biases(&b_up, inner);
    if (random->chance(0.4)) biases(&b_down, hidden);
  }

  template <class Params>
  void give(const char* name_of_x, const flashmoe_tensor* Params::* member, MoeCall<Params>* call) {
    call->add(name_of_x, member, &x);
    call->add("w_gate_up", &Params::w_gate_up, &w_gate_up);
    if (separate()) call->add("w_up", &Params::w_up, &w_up);
    call->add("w_down", &Params::w_down, &w_down);
    if (b_gate_up.given()) call->add("b_gate_up", &Params::b_gate_up, &b_gate_up);
    if (b_up.given()) call->add("b_up", &Params::b_up, &b_up);
    if (b_down.given()) call->add("b_down", &Params::b_down, &b_down);
    call->params.gate = gate;
    call->params.activation = activation;
    call->params.alpha = alpha == 1 ? 0.0f : static_cast<float>(alpha);
    call->params.limit = static_cast<float>(limit);
    call->params.up_offset = static_cast<float>(up_offset);
    call->params.weight_on_input = on_input ? 1 : 0;
  }

  // act and its slope.
  Number act(double z, Number* slope) const {
    const double s = sigmoid(alpha * z);
    const double phi = 0.5 * std::erfc(-z / std::sqrt(2.0));
    const double c = std::sqrt(2 / 3.141592653589793);
    const double tanh = std::tanh(c * (z + 0.044715 * z * z * z));
    double value = 0, derivative = 0;
    double cancels = 0;  // what multiplies the rounding of 1 - s, in slopes of s (1 - s)
    switch (activation) {
      case FLASHMOE_ACTIVATION_SILU:
        value = z * s, derivative = s + alpha * z * s * (1 - s);
        cancels = std::fabs(alpha * z) * s;
        break;
      case FLASHMOE_ACTIVATION_GELU:
        value = z * phi, derivative = phi + z * std::exp(-z * z / 2) * c / 2;
        break;
      case FLASHMOE_ACTIVATION_GELU_TANH:
        value = 0.5 * z * (1 + tanh);
        derivative =
            0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * c * (1 + 3 * 0.044715 * z * z);
        cancels = std::fabs(z) * (1 + tanh) * c * (1 + 3 * 0.044715 * z * z);
        break;
      case FLASHMOE_ACTIVATION_RELU: value = std::fmax(z, 0), derivative = z > 0 ? 1 : 0; break;
      default: value = z > 0 ? z * z : 0, derivative = z > 0 ? 2 * z : 0;
    }
    *slope = {derivative, std::fabs(derivative) + 1 + cancels};
    return {value, std::fabs(value) + std::fabs(z)};
  }

  // What one pair of a token and an expert computes.
  struct Pair {
    std::vector<double> before[2];  // g and u, exactly
    std::vector<Number> a;
    std::vector<Number> slopes[2];  // of a, by g and by u
  };

  Pair pair(int64_t t, int64_t e, double weight) const {
    Pair made;
    for (int64_t i = 0; i < inner; ++i) {
      double z[2] = {};
      for (int part = gated() ? 0 : 1; part < 2; ++part) {
        const int64_t r = row(part, i);
        for (int64_t h = 0; h < hidden; ++h) z[part] += matrix(part).get(e, r, h) * x.get(t, h);
        if (on_input) z[part] *= weight;
        if (bias(part).given()) z[part] += bias(part).get(e, r);
        made.before[part].push_back(z[part]);
      }
      const bool cuts = limit > 0;
      const double u = cuts ? std::clamp(z[1], -limit, limit) : z[1];
      const double g = cuts ? std::fmin(z[0], limit) : z[0];
      const Number u_inside = exact(!cuts || std::fabs(z[1]) <= limit ? 1 : 0);
      Number slope;
      if (!gated()) {
        made.a.push_back(act(u, &slope));
        made.slopes[0].push_back({});
        made.slopes[1].push_back(slope * u_inside);
        continue;
      }
      const Number value = act(g, &slope);
      const Number up = {u + up_offset, std::fabs(u) + up_offset};
      made.a.push_back(value * up);
      made.slopes[0].push_back(slope * up * exact(!cuts || z[0] <= limit ? 1 : 0));
      made.slopes[1].push_back(value * u_inside);
    }
    return made;
  }

  Number down(const Pair& made, int64_t e, int64_t h) const {
    Number sum = b_down.given() ? exact(b_down.get(e, h)) : Number{};
    for (int64_t i = 0; i < inner; ++i) {
      sum = sum + exact(w_down.get(e, h, i)) * made.a[static_cast<size_t>(i)];
    }
    return sum;
  }
};

// A routing in memory, of which some pairs have no expert.
struct Routing {
  Order order;
  Tensor weights, offsets, pairs, slots;

  void make(Random* random, const Layer& layer) {
    order.tokens = layer.tokens, order.top_k = layer.top_k, order.experts = layer.experts;
    for (int64_t t = 0; t < layer.tokens; ++t) {
      const int64_t first = random->below(layer.experts);
      for (int64_t k = 0; k < layer.top_k; ++k) {
        const int64_t id = (first + k) % layer.experts;
        order.ids.push_back(random->chance(0.15) ? -1 : static_cast<int32_t>(id));
      }
    }
    order.sort();
    const flashmoe_dtype numbers = random->chance(0.5) ? wide_of(layer.dtype) : kFp32;
    weights.make(random, numbers, Layout::kPacked, {layer.tokens, layer.top_k});
    weights.each([&](int64_t t, int64_t k, int64_t) {
      weights.set(random->one_of({-1.0, -0.5, 0.5, 1.0}), t, k);
    });
    const auto integers = [&](Tensor* tensor, std::vector<int64_t> shape,
                              const std::vector<int32_t>& values) {
      tensor->make(random, kInt32, Layout::kPacked, std::move(shape));
      size_t at = 0;
      tensor->each([&](int64_t i, int64_t j, int64_t) { tensor->set(values[at++], i, j); });
    };
    integers(&offsets, {layer.experts + 1}, order.offsets);
    integers(&pairs, {layer.tokens * layer.top_k}, order.pairs);
    integers(&slots, {layer.tokens, layer.top_k}, order.slots);
  }
  template <class Params>
  void give(MoeCall<Params>* call) {
    call->add("weights", &Params::weights, &weights);
    call->add("offsets", &Params::offsets, &offsets);
    call->add("pairs", &Params::pairs, &pairs);
    call->add("slots", &Params::slots, &slots);
  }
  int32_t id(int64_t t, int64_t k) const {
    return order.ids[static_cast<size_t>(t * order.top_k + k)];
  }
  int32_t slot(int64_t t, int64_t k) const {
    return order.slots[static_cast<size_t>(t * order.top_k + k)];
  }
};

// out[t] of a layer, of experts and weights by pair.
template <class Weight>
std::vector<Number> layer_of(const Layer& layer, const std::vector<int32_t>& ids,
                             const Weight& weight) {
  std::vector<Number> out(static_cast<size_t>(layer.tokens * layer.hidden));
  for (int64_t pair = 0; pair < layer.tokens * layer.top_k; ++pair) {
    const int32_t e = ids[static_cast<size_t>(pair)];
    if (e < 0) continue;
    const int64_t t = pair / layer.top_k;
    const Number w = weight(pair);
    const Layer::Pair made = layer.pair(t, e, w.value);
    for (int64_t h = 0; h < layer.hidden; ++h) {
      Number& sum = out[static_cast<size_t>(t * layer.hidden + h)];
      sum = sum + (layer.on_input ? layer.down(made, e, h) : w * layer.down(made, e, h));
    }
  }
  return out;
}

void fuzz_forward(Random* random) {
  using Params = flashmoe_moe_forward_params;
  Layer layer;
  layer.make(random, random->range(1, 6));
  Routing routing;
  routing.make(random, layer);
  MoeCall<Params> call;
  layer.give("x", &Params::x, &call);
  routing.give(&call);
  Tensor& out = call.add("out", &Params::out);
  out.make(random, layer.dtype, Layout::kRows, {layer.tokens, layer.hidden}, true);
  Tensor before;
  const int64_t width = layer.gated() ? 2 * layer.inner : layer.inner;
  if (random->chance(0.5)) {
    call.add("pre_activation", &Params::pre_activation, &before);
    before.make(random, layer.dtype, Layout::kRows, {layer.tokens * layer.top_k, width}, true);
    before.fill(random, 1, 4);
  }
  run(random, &call, [&] {
    const auto weight = [&](int64_t pair) {
      return exact(routing.weights.get(pair / layer.top_k, pair % layer.top_k));
    };
    const std::vector<Number> want = layer_of(layer, routing.order.ids, weight);
    expect_values(out, unit_of(layer.dtype), false, [&](int64_t t, int64_t h, int64_t) {
      return want[static_cast<size_t>(t * layer.hidden + h)];
    });
    if (!before.given()) return;
    // By slot; rows without a pair are as they were.
    expect_values(before, 0, false, [&](int64_t slot, int64_t j, int64_t k) {
      const int32_t pair = routing.order.pairs[static_cast<size_t>(slot)];
      if (pair < 0) return exact(before.held(slot, j, k));
      const int64_t t = pair / layer.top_k;
      const Layer::Pair made =
          layer.pair(t, routing.order.ids[static_cast<size_t>(pair)], weight(pair).value);
      const int part = layer.gated() && j < layer.inner ? 0 : 1;
      return exact(made.before[part][static_cast<size_t>(j % layer.inner)]);
    });
  });
}

void fuzz_fused(Random* random) {
  using Params = flashmoe_fused_moe_params;
  Layer layer;
  layer.make(random, 8 * random->range(1, 2));
  layer.on_input = false;  // whose kinks the weights would move
  MoeCall<Params> call;
  layer.give("tokens", &Params::tokens, &call);
  Router router;
  router.experts = layer.experts, router.top_k = layer.top_k;
  call.params.top_k = static_cast<int32_t>(layer.top_k);
  Tensor weights, bias, logits;
  if (random->chance(0.5)) {
    call.add("router_weights", &Params::router_weights, &weights);
    weights.make(random, layer.dtype, Layout::kRows, {layer.experts, layer.hidden});
    weights.fill(random, 0.25, 2);
    if (random->chance(0.5)) {
      call.add("router_bias", &Params::router_bias, &bias);
      bias.make(random, random->chance(0.5) ? layer.dtype : kFp32, Layout::kLast, {layer.experts});
      bias.fill(random, 0.125, 8);
    }
  } else {
    call.add("logits", &Params::logits, &logits);
    // fp64 only with fp64 tokens.
    flashmoe_dtype of_logits = any_float(random);
    if (layer.dtype.bits != 64) of_logits.bits = std::min<uint8_t>(of_logits.bits, 32);
    logits.make(random, of_logits, Layout::kLast, {layer.tokens, layer.experts});
    fill_logits(random, logits);
  }
  choose_router(random, &router, &call);
  Tensor& out = call.add("out", &Params::out);
  out.make(random, layer.dtype, Layout::kRows, {layer.tokens, layer.hidden}, true);
  run(random, &call, [&] {
    std::vector<int32_t> ids;
    std::vector<double> factors;
    for (int64_t t = 0; t < layer.tokens; ++t) {
      std::vector<double> row;
      for (int64_t e = 0; e < layer.experts; ++e) {
        double sum = bias.given() ? bias.get(e) : 0.0;
        for (int64_t h = 0; h < layer.hidden && weights.given(); ++h) {
          sum += weights.get(e, h) * layer.x.get(t, h);
        }
        row.push_back(logits.given() ? logits.get(t, e) : sum);
      }
      const std::vector<int32_t> chosen = router.choose(row);
      ids.insert(ids.end(), chosen.begin(), chosen.end());
      double lse = 0;
      const std::vector<double> scores = scores_of(row, chosen, router.how.scoring, &lse);
      const double all = std::accumulate(scores.begin(), scores.end(), 0.0);
      for (const double s : scores) {
        factors.push_back((router.how.renormalize ? s / all : s) * router.how.scale);
      }
    }
    const std::vector<Number> want = layer_of(
        layer, ids, [&](int64_t pair) { return exact(factors[static_cast<size_t>(pair)]); });
    if (router.is_close) {
      out.each([&](int64_t i, int64_t j, int64_t k) { out.put_back(i, j, k); });
      return;
    }
    // Weights are fp32 or fp64 as logits are.
    const flashmoe_dtype scored = logits.given() ? logits.dtype() : layer.dtype;
    const double unit = std::max(unit_of(layer.dtype), unit_of(wide_of(scored)));
    expect_values(out, unit, false, [&](int64_t t, int64_t h, int64_t) {
      return want[static_cast<size_t>(t * layer.hidden + h)];
    });
  });
}

struct LayerGradients {
  std::vector<Number> dx, dw[2], dw_down, db[2], db_down, dweights;  // by part: gate, up

  static Number& at(std::vector<Number>& of, int64_t i, int64_t j, int64_t columns) {
    return of[static_cast<size_t>(i * columns + j)];
  }

  LayerGradients(const Layer& l, const Routing& routing, const Tensor& dout) {
    const auto zeros = [](std::vector<Number>* of, int64_t n) {
      of->resize(static_cast<size_t>(n));
    };
    zeros(&dx, l.tokens * l.hidden);
    zeros(&dw_down, l.experts * l.hidden * l.inner);
    zeros(&db_down, l.experts * l.hidden);
    zeros(&dweights, l.tokens * l.top_k);
    for (int part = 0; part < 2; ++part) {
      zeros(&dw[part], l.experts * l.inner * l.hidden);
      zeros(&db[part], l.experts * l.inner);
    }
    for (int64_t t = 0; t < l.tokens; ++t) {
      for (int64_t k = 0; k < l.top_k; ++k) {
        if (routing.id(t, k) >= 0) add(l, routing.id(t, k), t, k, routing.weights.get(t, k), dout);
      }
    }
  }

 private:
  void add(const Layer& l, int64_t e, int64_t t, int64_t k, double weight, const Tensor& dout) {
    const Layer::Pair made = l.pair(t, e, weight);
    const Number on_y = exact(l.on_input ? 1.0 : weight), on_x = exact(l.on_input ? weight : 1.0);
    Number& of_weight = at(dweights, t, k, l.top_k);
    for (int64_t h = 0; h < l.hidden; ++h) {
      const Number d = exact(dout.get(t, h));
      if (!l.on_input) of_weight = of_weight + d * l.down(made, e, h);
      Number& of_bias = at(db_down, e, h, l.hidden);
      of_bias = of_bias + d * on_y;
      for (int64_t i = 0; i < l.inner; ++i) {
        Number& of = at(dw_down, e * l.hidden + h, i, l.inner);
        of = of + d * on_y * made.a[static_cast<size_t>(i)];
      }
    }
    for (int64_t i = 0; i < l.inner; ++i) {
      Number da;
      for (int64_t h = 0; h < l.hidden; ++h) {
        da = da + exact(l.w_down.get(e, h, i)) * exact(dout.get(t, h)) * on_y;
      }
      for (int part = l.gated() ? 0 : 1; part < 2; ++part) {
        const Number dz = da * made.slopes[part][static_cast<size_t>(i)];
        Number& of_bias = at(db[part], e, i, l.inner);
        of_bias = of_bias + dz;
        for (int64_t h = 0; h < l.hidden; ++h) {
          const Number w = exact(l.matrix(part).get(e, l.row(part, i), h));
          const Number x = exact(l.x.get(t, h));
          Number& of = at(dw[part], e * l.inner + i, h, l.hidden);
          of = of + dz * x * on_x;
          Number& of_x = at(dx, t, h, l.hidden);
          of_x = of_x + dz * w * on_x;
          if (l.on_input) of_weight = of_weight + dz * w * x;
        }
      }
    }
  }
};

void fuzz_backward(Random* random) {
  using Params = flashmoe_moe_backward_params;
  Layer layer;
  layer.make(random, random->range(1, 5));
  Routing routing;
  routing.make(random, layer);
  MoeCall<Params> call;
  const bool adds = random->chance(0.3);
  call.params.accumulate = adds ? 1 : 0;
  layer.give("x", &Params::x, &call);
  routing.give(&call);
  Tensor& dout = call.add("dout", &Params::dout);
  dout.make(random, layer.dtype, Layout::kRows, {layer.tokens, layer.hidden});
  dout.fill(random, 0.5, 2);
  Tensor before;
  const int64_t width = layer.gated() ? 2 * layer.inner : layer.inner;
  bool overwrites = false;
  if (random->chance(0.5)) {
    call.add("pre_activation", &Params::pre_activation, &before);
    overwrites = random->chance(0.5);
    call.params.overwrite_pre_activation = overwrites ? 1 : 0;
    before.make(random, layer.dtype, Layout::kRows, {layer.tokens * layer.top_k, width},
                overwrites);
    before.fill(random, 1, 4);
    for (int64_t slot = 0; slot < routing.order.offsets.back(); ++slot) {
      const int32_t pair = routing.order.pairs[static_cast<size_t>(slot)];
      const int64_t t = pair / layer.top_k, k = pair % layer.top_k;
      const Layer::Pair made = layer.pair(t, routing.id(t, k), routing.weights.get(t, k));
      for (int64_t j = 0; j < width; ++j) {
        const int part = layer.gated() && j < layer.inner ? 0 : 1;
        before.set(made.before[part][static_cast<size_t>(j % layer.inner)], slot, j);
      }
    }
  }
  if (random->chance(0.2)) call.params.max_workspace_bytes = uint64_t{1} << 30;
  int64_t wanted = random->chance(0.4) ? 255 : random->range(1, 255);
  if (!layer.separate())
    wanted = (wanted & ~int64_t{0b100100}) != 0 ? wanted & ~int64_t{0b100100} : 1;
  Tensor dx, dw_gate_up, dw_up, dw_down, db_gate_up, db_up, db_down, dweights;
  int bit = 0;
  const auto gradient = [&](Tensor* tensor, const char* name,
                            const flashmoe_tensor* Params::* member, Layout layout,
                            std::vector<int64_t> shape) {
    if ((wanted >> bit++ & 1) == 0) return;
    call.add(name, member, tensor);
    flashmoe_dtype made = random->chance(0.5) ? kFp32 : layer.dtype;
    if (layout == Layout::kPacked) made = routing.weights.dtype();
    tensor->make(random, made, layout, std::move(shape), true);
    if (adds) tensor->fill(random, 0.5, 8);
  };
  gradient(&dx, "dx", &Params::dx, Layout::kRows, {layer.tokens, layer.hidden});
  gradient(&dw_gate_up, "dw_gate_up", &Params::dw_gate_up, Layout::kMatrix, layer.w_gate_up.shape);
  gradient(&dw_up, "dw_up", &Params::dw_up, Layout::kMatrix, layer.w_up.shape);
  gradient(&dw_down, "dw_down", &Params::dw_down, Layout::kMatrix, layer.w_down.shape);
  gradient(&db_gate_up, "db_gate_up", &Params::db_gate_up, Layout::kLast,
           {layer.experts, layer.rows()});
  gradient(&db_up, "db_up", &Params::db_up, Layout::kLast, {layer.experts, layer.inner});
  gradient(&db_down, "db_down", &Params::db_down, Layout::kLast, {layer.experts, layer.hidden});
  gradient(&dweights, "dweights", &Params::dweights, Layout::kPacked, {layer.tokens, layer.top_k});
  run(random, &call, [&] {
    LayerGradients want(layer, routing, dout);
    const double unit = unit_of(layer.dtype);
    // What may be overwritten is what pairs have.
    for (int64_t slot = 0; overwrites && slot < routing.order.offsets.back(); ++slot) {
      for (int64_t j = 0; j < width; ++j) before.put_back(slot, j, 0);
    }
    const auto expect = [&](const Tensor& tensor, const auto& number) {
      if (tensor.given()) expect_values(tensor, unit, adds, number);
    };
    // The part, and the row of it, that a row of w_gate_up is.
    const auto part_of = [&](int64_t row, int64_t* i) {
      for (int part = layer.gated() ? 0 : 1; part < (layer.separate() ? 1 : 2); ++part) {
        for (*i = 0; *i < layer.inner; ++*i) {
          if (layer.row(part, *i) == row) return part;
        }
      }
      EXPECT(!"every row is one of a part");
      return 0;
    };
    expect(dx, [&](int64_t t, int64_t h, int64_t) { return want.at(want.dx, t, h, layer.hidden); });
    expect(dw_gate_up, [&](int64_t e, int64_t r, int64_t h) {
      int64_t i = 0;
      const int part = part_of(r, &i);
      return want.at(want.dw[part], e * layer.inner + i, h, layer.hidden);
    });
    expect(dw_up, [&](int64_t e, int64_t i, int64_t h) {
      return want.at(want.dw[1], e * layer.inner + i, h, layer.hidden);
    });
    expect(dw_down, [&](int64_t e, int64_t h, int64_t i) {
      return want.at(want.dw_down, e * layer.hidden + h, i, layer.inner);
    });
    expect(db_gate_up, [&](int64_t e, int64_t r, int64_t) {
      int64_t i = 0;
      const int part = part_of(r, &i);
      return want.at(want.db[part], e, i, layer.inner);
    });
    expect(db_up,
           [&](int64_t e, int64_t i, int64_t) { return want.at(want.db[1], e, i, layer.inner); });
    expect(db_down, [&](int64_t e, int64_t h, int64_t) {
      return want.at(want.db_down, e, h, layer.hidden);
    });
    expect(dweights, [&](int64_t t, int64_t k, int64_t) {
      return want.at(want.dweights, t, k, layer.top_k);
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_moe", argc, argv, 2000, [](Random* random) {
    const int64_t which = random->below(9);
    constexpr const char* kNames[] = {
        "moe_route",   "moe_route_backward", "grouped_product", "grouped_product_backward",
        "moe_forward", "fused_moe",          "moe_backward",    "moe_backward",
        "moe_backward"};
    operation = kNames[which];
    switch (which) {
      case 0: fuzz_route(random); break;
      case 1: fuzz_route_backward(random); break;
      case 2: fuzz_product(random, false); break;
      case 3: fuzz_product(random, true); break;
      case 4: fuzz_forward(random); break;
      case 5: fuzz_fused(random); break;
      default: fuzz_backward(random);
    }
  });
  std::printf("%" PRId64 " numbers compared\ncalls:", compared);
  for (const auto& [name, count] : calls_of) std::printf(" %s %" PRId64 ",", name.c_str(), count);
  std::printf("\n");
  print_blamed();
  if (calls < 2000) return 0;
  EXPECT(compared > 100 * calls);
  for (const char* name :
       {"logits",   "ids",       "weights",        "offsets", "pairs",          "slots",
        "x",        "w_gate_up", "w_up",           "w_down",  "b_gate_up",      "b_down",
        "out",      "dout",      "pre_activation", "dx",      "dw_gate_up",     "dw_down",
        "dweights", "dlogits",   "given_weights",  "tokens",  "router_weights", "w",
        "counts",   "dw"}) {
    EXPECT(blamed[name] > 0);
  }
  return 0;
}
