// flashmoe.hpp, as it is with exceptions or without: compiled once for each, both in one program.
#include "flashmoe/flashmoe.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "hpp.h"

namespace fm = flashmoe;

namespace {

static_assert(std::is_trivially_copyable_v<fm::TensorView>, "a view is passed as plain data");
static_assert(std::is_trivially_copyable_v<fm::AttentionForward>, "so is a call");
static_assert(std::is_trivially_copyable_v<fm::AttentionBackward>);
static_assert(std::is_trivially_copyable_v<fm::MoeForward>, "so is a call");
static_assert(std::is_convertible_v<fm::TensorView, fm::ConstTensorView>, "as span<T> is");
static_assert(!std::is_convertible_v<fm::ConstTensorView, fm::TensorView>, "const stays const");
static_assert(!std::is_constructible_v<fm::TensorView, const float*, const int64_t (&)[2]>,
              "const stays const");
static_assert(!std::is_copy_constructible_v<fm::Workspace>, "one owner");
static_assert(std::is_nothrow_move_constructible_v<fm::Workspace>, "can be kept in a vector");
static_assert(!std::is_copy_constructible_v<fm::Routing>, "one owner");

#ifdef FLASHMOE_NO_EXCEPTIONS

static_assert(!std::is_same_v<fm::Result<int>, int>, "a status comes with it");

template <class T>
T get(fm::Result<T> result) {
  CHECK(result.has_value() && result.status() == FLASHMOE_OK);
  CHECK(std::strcmp(result.message(), "") == 0);
  return *std::move(result);
}
void done(fm::Result<void> result) { CHECK(result); }

template <class Function>
void fails(flashmoe_status status, const char* begin, Function function) {
  const auto result = function();
  CHECK(!result && !result.has_value());
  CHECK(result.status() == status);
  CHECK(std::strncmp(result.message(), begin, std::strlen(begin)) == 0);
}

#else

static_assert(std::is_same_v<fm::Result<int>, int>, "nothing comes with it");
static_assert(std::is_base_of_v<std::runtime_error, fm::Error>, "a standard exception");

template <class T>
T get(T value) {
  return value;
}
#define done(call) (call)

template <class Function>
void fails(flashmoe_status status, const char* begin, Function function) {
  bool thrown = false;
  try {
    static_cast<void>(function());
  } catch (const fm::Error& error) {
    thrown = true;
    CHECK(error.status() == status);
    CHECK(std::strcmp(error.status_name(), flashmoe_status_name(status)) == 0);
    CHECK(std::strncmp(error.what(), begin, std::strlen(begin)) == 0);
  }
  CHECK(thrown);
}

#endif

std::vector<float> random(size_t count, unsigned seed) {
  std::vector<float> values(count);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(generator);
  return values;
}

// Counts what it gives and takes back; gives nothing beyond `limit`.
struct CountedMemory {
  int* live;
  size_t limit;

  void* allocate(size_t bytes) noexcept {
    if (bytes > limit) return nullptr;
    ++*live;
    return fm::HostMemory().allocate(bytes);
  }
  void deallocate(void* memory, size_t bytes) noexcept {
    --*live;
    fm::HostMemory().deallocate(memory, bytes);
  }
};

void views() {
  float data[24];
  const fm::TensorView view(data, {2, 3, 4});
  CHECK(view && view.rank() == 3 && view.data() == data);
  CHECK(view.shape().size() == 3 && view.shape()[1] == 3);
  CHECK(view.strides()[0] == 12 && view.strides()[1] == 4 && view.strides()[2] == 1);
  CHECK(view.dtype().code == FLASHMOE_DTYPE_FLOAT && view.dtype().bits == 32);
  CHECK(!fm::TensorView() && fm::TensorView().shape().size() == 0);
  CHECK(!fm::ConstTensorView(fm::TensorView()));

  const fm::TensorView part = view.slice(1, 1, 2).transpose(0, 2);
  CHECK(part.data() == data + 4);
  CHECK(part.shape()[0] == 4 && part.shape()[1] == 2 && part.shape()[2] == 2);
  CHECK(part.strides()[0] == 1 && part.strides()[1] == 4 && part.strides()[2] == 12);

  const fm::TensorView strided(data, {2, 2}, {-8, 1}, fm::Device::cuda(3));
  CHECK(strided.strides()[0] == -8 && strided.device().c().device_id == 3);
  CHECK(strided.c().device.device_type == FLASHMOE_DEVICE_CUDA);

  // A copy is a view of its own: what it hands to C points into the copy.
  const fm::ConstTensorView copy = view;
  CHECK(copy.c().shape == copy.shape().data() && copy.c().shape != view.c().shape);

  // No rank below 0 makes a tensor absent.
  flashmoe_tensor wrong = view.c();
  wrong.ndim = -1;
  CHECK(fm::ConstTensorView(wrong) && fm::ConstTensorView(wrong).rank() > fm::kMaxRank);

  const int32_t indices[2] = {};
  CHECK(fm::ConstTensorView(indices, {2}).dtype().code == FLASHMOE_DTYPE_INT);
  CHECK(fm::DtypeOf<__half>::value.bits == 16);
  CHECK(fm::DtypeOf<__nv_bfloat16>::value.code == FLASHMOE_DTYPE_BFLOAT);

  flashmoe_tensor dl = view.c();
  dl.byte_offset = 16;
  dl.strides = nullptr;
  const fm::ConstTensorView from_dl(dl);
  CHECK(from_dl.data() == data + 4 && from_dl.strides()[0] == 12);
}

struct AttentionCase {
  std::vector<float> q = random(2 * 5 * 4 * 16, 1);
  std::vector<float> k = random(2 * 7 * 2 * 16, 2);
  std::vector<float> v = random(2 * 7 * 2 * 16, 3);
  std::vector<float> out = std::vector<float>(q.size(), NAN);
  std::vector<float> lse = std::vector<float>(2 * 4 * 5, NAN);

  fm::AttentionForward call() {
    fm::AttentionForward call;
    call.q = fm::ConstTensorView(q.data(), {2, 5, 4, 16});
    call.k = fm::ConstTensorView(k.data(), {2, 7, 2, 16});
    call.v = fm::ConstTensorView(v.data(), {2, 7, 2, 16});
    call.out = fm::TensorView(out.data(), {2, 5, 4, 16});
    call.lse = fm::TensorView(lse.data(), {2, 4, 5});
    call.causal = fm::Causal::top_left;
    call.window_left = 2;
    call.softcap = 5;
    call.scale = 0.5f;
    return call;
  }

  // The same by the C ABI.
  std::vector<float> by_c(const fm::AttentionForward& call) {
    std::vector<float> expected(out.size(), NAN);
    const flashmoe_tensor views[4] = {call.q.c(), call.k.c(), call.v.c(),
                                      fm::TensorView(expected.data(), {2, 5, 4, 16}).c()};
    // The last view is gone by now, and with it its shape.
    flashmoe_tensor result = views[3];
    result.shape = call.out.c().shape;
    result.strides = nullptr;
    flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
    params.q = &views[0];
    params.k = &views[1];
    params.v = &views[2];
    params.out = &result;
    params.causal = FLASHMOE_CAUSAL_TOP_LEFT;
    params.window = FLASHMOE_WINDOW_LEFT;
    params.window_left = 2;
    params.softcap = 5;
    params.scale = 0.5f;
    size_t bytes = 0;
    CHECK(flashmoe_attention_forward_workspace_size(&params, &bytes) == FLASHMOE_OK);
    std::vector<std::max_align_t> workspace(bytes / sizeof(std::max_align_t) + 1);
    CHECK(flashmoe_attention_forward(&params, workspace.data(), bytes, nullptr) == FLASHMOE_OK);
    return expected;
  }
};

void attention() {
  AttentionCase test;
  const fm::AttentionForward call = test.call();
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  CHECK(test.out == test.by_c(call));
  for (const float value : test.lse) CHECK(std::isfinite(value));

  const size_t bytes = get(fm::workspace_size(call));
  CHECK(workspace.size() >= bytes);
  const flashmoe_plan plan = get(fm::plan(call));
  CHECK(plan.workspace_bytes == bytes);
  const fm::Launches launches = get(fm::last_launches());
  CHECK(launches.size() == 1 && plan.launch_count == 1);
  CHECK(std::strcmp(plan.launches[0].kernel, launches[0].kernel) == 0);
  CHECK(launches.end() - launches.begin() == 1);

  const std::vector<float> out = test.out;
  test.out.assign(out.size(), NAN);
  fm::AttentionForward again = test.call();
  again.lse = {};
  done(fm::run(again, workspace.data(), workspace.size()));
  CHECK(test.out == out);
}

// The same keys in pages, of which the first of two sequences has all and the second has three.
void sequences() {
  AttentionCase test;
  fm::AttentionForward dense = test.call();
  fm::Workspace workspace;
  done(fm::run(dense, workspace));
  const std::vector<float> whole = test.out;
  dense.k = dense.k.slice(1, 0, 3);
  dense.v = dense.v.slice(1, 0, 3);
  done(fm::run(dense, workspace));
  std::vector<float> expected = test.out;
  std::copy(whole.begin(), whole.begin() + 5 * 4 * 16, expected.begin());

  const std::vector<int32_t> pages = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -1, -1, -1};
  const std::vector<int32_t> lengths = {7, 3};
  test.out.assign(test.out.size(), NAN);
  fm::AttentionForward call = test.call();
  call.k = fm::ConstTensorView(test.k.data(), {14, 1, 2, 16});
  call.v = fm::ConstTensorView(test.v.data(), {14, 1, 2, 16});
  fm::AttentionSequences given;
  given.page_table = fm::ConstTensorView(pages.data(), {2, 7});
  given.seqused_k = fm::ConstTensorView(lengths.data(), {2});
  given.max_seqlen_k = 100;
  given.split_size = 2;
  call.sequences = given;
  done(fm::run(call, workspace));
  CHECK(test.out == expected);
  CHECK(get(fm::plan(call)).flops == 0);
  // The second sequence has 3 keys, of which a mask hides the last or a query stands before it.
  const bool seen[] = {true, true, false, false, false, false, false};
  const std::vector<int32_t> offsets = {0, 1};
  std::vector<float> by_mask(test.out.size()), by_offset(test.out.size());
  fm::AttentionForward masked = call;
  masked.causal = fm::Causal::none, masked.window_left = std::nullopt;
  masked.sequences->max_seqlen_q = 1, masked.sequences->max_seqlen_k = 7;
  masked.out = fm::TensorView(by_mask.data(), {2, 5, 4, 16});
  masked.attn_mask = fm::ConstTensorView(seen, {1, 1, 1, 7});
  done(fm::run(masked, workspace));
  masked.out = fm::TensorView(by_offset.data(), {2, 5, 4, 16});
  masked.attn_mask = fm::ConstTensorView();
  masked.causal = fm::Causal::top_left;
  masked.sequences->q_offset = fm::ConstTensorView(offsets.data(), {2});
  done(fm::run(masked, workspace));
  const size_t second = 5 * 4 * 16;
  for (size_t i = second; i < second + 4 * 16; ++i) {
    CHECK(std::fabs(by_mask[i] - by_offset[i]) <= 1e-6f && by_mask[i] != 0);
  }
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "cu_seqlens_k: got one", [&] {
    call.sequences->cu_seqlens_k = given.seqused_k;
    return fm::plan(call);
  });
}

// A mask of the first three keys, and a bias that hides the others, beside those keys alone.
void biases_and_masks() {
  AttentionCase test;
  fm::AttentionForward call = test.call();
  fm::Workspace workspace;
  call.k = call.k.slice(1, 0, 3);
  call.v = call.v.slice(1, 0, 3);
  done(fm::run(call, workspace));
  const std::vector<float> expected = test.out;
  const bool seen[] = {true, true, true, false, false, false, false};
  const std::vector<float> hidden = {0, 0, 0, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for (const bool by_mask : {true, false}) {
    test.out.assign(test.out.size(), NAN);
    fm::AttentionForward masked = test.call();
    if (by_mask) {
      masked.attn_mask = fm::ConstTensorView(seen, {1, 1, 1, 7});
    } else {
      masked.attn_bias = fm::ConstTensorView(hidden.data(), {1, 1, 1, 7});
    }
    done(fm::run(masked, workspace));
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(std::fabs(test.out[i] - expected[i]) <= 1e-6f);
    }
  }
}

// The gradients of a call are differences of the sum of its output.
void attention_backward() {
  AttentionCase test;
  std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  fm::AttentionForward forward = test.call();
  forward.sinks = fm::ConstTensorView(sinks.data(), {4});
  fm::Workspace workspace;
  done(fm::run(forward, workspace));
  const std::vector<float> ones(test.out.size(), 1.0f);
  std::vector<float> dq(test.q.size(), NAN), dk(test.k.size(), NAN), dv(test.v.size(), NAN);
  std::vector<float> dsinks(sinks.size(), NAN);
  fm::AttentionBackward call;
  call.dout = fm::ConstTensorView(ones.data(), {2, 5, 4, 16});
  call.q = forward.q, call.k = forward.k, call.v = forward.v;
  call.out = forward.out, call.lse = forward.lse;
  call.dq = fm::TensorView(dq.data(), {2, 5, 4, 16});
  call.dk = fm::TensorView(dk.data(), {2, 7, 2, 16});
  call.dv = fm::TensorView(dv.data(), {2, 7, 2, 16});
  call.sinks = forward.sinks;
  call.dsinks = fm::TensorView(dsinks.data(), {4});
  call.causal = forward.causal, call.window_left = forward.window_left;
  call.softcap = forward.softcap, call.scale = forward.scale;
  done(fm::run(call, workspace));
  CHECK(std::strcmp(get(fm::plan(call)).operation, "attention_backward") == 0);

  const auto loss = [&] {
    done(fm::run(forward, workspace));
    double sum = 0;
    for (const float x : test.out) sum += static_cast<double>(x);
    return sum;
  };
  const struct {
    std::vector<float>* of;
    const std::vector<float>* gradient;
  } each[] = {{&test.q, &dq}, {&test.k, &dk}, {&test.v, &dv}, {&sinks, &dsinks}};
  constexpr float kStep = 1.0f / 64;
  for (const auto& [of, gradient] : each) {
    for (size_t i = 0; i < of->size(); i += 37) {
      const float kept = (*of)[i];
      (*of)[i] = kept + kStep;
      const double above = loss();
      (*of)[i] = kept - kStep;
      const double slope = (above - loss()) / static_cast<double>(2 * kStep);
      (*of)[i] = kept;
      CHECK(std::fabs(slope - static_cast<double>((*gradient)[i])) < 2e-3);
    }
  }

  // Two sequences; the second has two queries and three keys.
  const std::vector<float> whole = dk;
  const std::vector<int32_t> queries = {5, 2}, keys = {7, 3};
  fm::AttentionSequences given;
  given.seqused_q = fm::ConstTensorView(queries.data(), {2});
  given.seqused_k = fm::ConstTensorView(keys.data(), {2});
  forward.sequences = call.sequences = given;
  done(fm::run(forward, workspace));
  dq.assign(dq.size(), NAN), dk.assign(dk.size(), NAN), dv.assign(dv.size(), NAN);
  done(fm::run(call, workspace));
  CHECK(std::equal(dk.begin(), dk.begin() + 7 * 2 * 16, whole.begin()));
  for (size_t i = (7 + 3) * 2 * 16; i < dk.size(); ++i) CHECK(dk[i] == 0 && dv[i] == 0);
  for (size_t i = (5 + 2) * 4 * 16; i < dq.size(); ++i) CHECK(dq[i] == 0);
  CHECK(dk[7 * 2 * 16] != 0 && dq[5 * 4 * 16] != 0);
  fails(FLASHMOE_ERROR_UNSUPPORTED, "batch_index: got one", [&] {
    call.sequences->batch_index = given.seqused_k;
    return fm::plan(call);
  });
  forward.sequences = call.sequences = {};
  done(fm::run(forward, workspace));
  done(fm::run(call, workspace));
  CHECK(dk == whole);

  const std::vector<float> once = dv;
  call.accumulate = true;
  call.dq = call.dk = {};
  done(fm::run(forward, workspace));
  done(fm::run(call, workspace));
  for (size_t i = 0; i < dv.size(); ++i) CHECK(dv[i] == 2 * once[i]);
  call.dv = call.dsinks = {};
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "dq: got a null tensor",
        [&] { return fm::run(call, workspace); });
}

void adds_no_allocation() {
  AttentionCase test;
  const fm::AttentionForward call = test.call();
  fm::Workspace workspace;
  done(fm::run(call, workspace));  // the library's threads start here
  std::vector<float> out(test.out.size());
  const fm::TensorView out_view(out.data(), {2, 5, 4, 16});
  const flashmoe_tensor q = call.q.c(), k = call.k.c(), v = call.v.c(), o = out_view.c();
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.q = &q;
  params.k = &k;
  params.v = &v;
  params.out = &o;
  const long before = hpp_allocations();
  CHECK(flashmoe_attention_forward(&params, workspace.data(), workspace.size(), nullptr) ==
        FLASHMOE_OK);
  const long by_c = hpp_allocations() - before;
  done(fm::run(call, workspace));
  CHECK(hpp_allocations() - before == 2 * by_c);
}

void errors() {
  AttentionCase test;
  fm::Workspace workspace;
  fm::AttentionForward call = test.call();
  call.out = {};
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "out: got a null tensor",
        [&] { return fm::run(call, workspace); });
  CHECK(std::strncmp(flashmoe_last_error(), "out: got a null tensor", 22) == 0);

  call = test.call();
  call.scale = -1;
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "scale: got -1", [&] { return fm::plan(call); });
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "scale: got -1", [&] { return fm::workspace_size(call); });

  call = test.call();
  call.kernel = "sm1";
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "kernel: got \"sm1\"",
        [&] { return fm::run(call, nullptr, 0); });

  const int64_t shape[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  flashmoe_tensor deep = test.call().q.c();
  deep.ndim = 9;
  deep.shape = shape;
  deep.strides = nullptr;
  call = test.call();
  call.q = fm::ConstTensorView(deep);
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "q: got 9 dimensions, accepted are 4",
        [&] { return fm::run(call, workspace); });

  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "n: got -1", [] { return fm::set_num_threads(-1); });
  fails(FLASHMOE_ERROR_NO_DEVICE, "device", [] { return fm::device_info(fm::Device::cuda(4096)); });
}

void memory() {
  int live = 0;
  {
    using Buffer = fm::Buffer<CountedMemory>;
    Buffer buffer(CountedMemory{&live, 1000});
    CHECK(buffer.size() == 0 && live == 0);
    done(buffer.reserve(10));
    void* const data = buffer.data();
    CHECK(data != nullptr && reinterpret_cast<uintptr_t>(data) % 256 == 0);
    done(buffer.reserve(5));
    CHECK(buffer.data() == data && live == 1);
    Buffer moved(std::move(buffer));
    CHECK(moved.data() == data && live == 1);
    Buffer other(CountedMemory{&live, 1000});
    done(other.reserve(7));
    other = std::move(moved);
    CHECK(other.data() == data && other.size() == 10 && live == 1);
    done(other.reserve(1000));
    CHECK(live == 1);
    fails(FLASHMOE_ERROR_OUT_OF_MEMORY, "memory: got none of the 1001 bytes",
          [&] { return other.reserve(1001); });
    CHECK(other.data() == nullptr && other.size() == 0);
  }
  CHECK(live == 0);

  using Routing = fm::BasicRouting<CountedMemory>;
  fails(FLASHMOE_ERROR_OUT_OF_MEMORY, "memory: got none", [&] {
    return Routing::create(1000, 8, 16, fm::Device::cpu(), CountedMemory{&live, 1000});
  });
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "routing: got -1 tokens with 2 of 4 experts",
        [] { return fm::Routing::create(-1, 2, 4); });
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "routing: got 1073741824 tokens with 2 of 4 experts",
        [] { return fm::Routing::create(int64_t{1} << 30, 2, 4); });
  CHECK(live == 0);
}

constexpr int64_t kTokens = 6, kExperts = 4, kTopK = 2, kHidden = 16, kInner = 8;

struct Layer {
  std::vector<float> logits = random(kTokens * kExperts, 4);
  std::vector<float> x = random(kTokens * kHidden, 5);
  std::vector<float> w_gate_up = random(kExperts * 2 * kInner * kHidden, 6);
  std::vector<float> w_down = random(kExperts * kInner * kHidden, 7);  // stored [E, I, H]
  std::vector<float> out = std::vector<float>(x.size(), NAN);

  // Token t by the definition, in double: softmax, the best two renormalized, SwiGLU.
  std::vector<double> expected(size_t t) const {
    std::vector<size_t> chosen;
    for (size_t e = 0; e < kExperts; ++e) chosen.push_back(e);
    const float* row = &logits[t * kExperts];
    std::sort(chosen.begin(), chosen.end(), [&](size_t a, size_t b) { return row[a] > row[b]; });
    chosen.resize(kTopK);
    double sum = 0;
    for (const size_t e : chosen) sum += std::exp(double{row[e]});
    std::vector<double> result(kHidden);
    for (const size_t e : chosen) {
      for (size_t i = 0; i < kInner; ++i) {
        double gate = 0, up = 0;
        for (size_t h = 0; h < kHidden; ++h) {
          const double number = double{x[t * kHidden + h]};
          gate += number * double{w_gate_up[(e * 2 * kInner + i) * kHidden + h]};
          up += number * double{w_gate_up[(e * 2 * kInner + kInner + i) * kHidden + h]};
        }
        const double a = gate / (1 + std::exp(-gate)) * up * std::exp(double{row[e]}) / sum;
        for (size_t h = 0; h < kHidden; ++h) {
          result[h] += a * double{w_down[(e * kInner + i) * kHidden + h]};
        }
      }
    }
    return result;
  }
};

void experts() {
  Layer layer;
  fm::Workspace workspace;
  const fm::Routing routing = get(fm::Routing::create(kTokens, kTopK, kExperts));

  fm::MoeRoute route;
  route.logits = fm::ConstTensorView(layer.logits.data(), {kTokens, kExperts});
  route.renormalize = true;
  routing.attach(route);
  CHECK(get(fm::plan(route)).launch_count >= 1);
  done(fm::run(route, workspace));
  const auto* offsets = static_cast<const int32_t*>(routing.offsets().data());
  CHECK(offsets[0] == 0 && offsets[kExperts] == kTokens * kTopK);

  fm::MoeForward call;
  call.x = fm::ConstTensorView(layer.x.data(), {kTokens, kHidden});
  call.w_gate_up = fm::ConstTensorView(layer.w_gate_up.data(), {kExperts, 2 * kInner, kHidden});
  call.w_down =
      fm::ConstTensorView(layer.w_down.data(), {kExperts, kInner, kHidden}).transpose(1, 2);
  call.out = fm::TensorView(layer.out.data(), {kTokens, kHidden});
  routing.attach(call);
  CHECK(get(fm::plan(call)).workspace_bytes == get(fm::workspace_size(call)));
  done(fm::run(call, workspace));
  for (size_t t = 0; t < kTokens; ++t) {
    const std::vector<double> expected = layer.expected(t);
    for (size_t h = 0; h < kHidden; ++h) {
      const double got = double{layer.out[t * kHidden + h]};
      CHECK(std::fabs(got - expected[h]) <= 1e-5 * (1 + std::fabs(expected[h])));
    }
  }

  // In one call.
  const std::vector<float> by_steps = layer.out;
  fm::FusedMoe fused;
  fused.tokens = call.x;
  fused.logits = route.logits;
  fused.w_gate_up = call.w_gate_up;
  fused.w_down = call.w_down;
  fused.out = call.out;
  fused.top_k = kTopK;
  fused.renormalize = true;
  layer.out.assign(layer.out.size(), NAN);
  CHECK(get(fm::plan(fused)).workspace_bytes == get(fm::workspace_size(fused)));
  done(fm::run(fused, workspace));
  CHECK(layer.out == by_steps);
  std::vector<float> router(8 * kHidden, 0.0f);
  fused.logits = {};
  fused.router_weights = fm::ConstTensorView(router.data(), {8, kHidden});
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "router_weights: its number of experts is 8",
        [&] { return fm::run(fused, workspace); });

  call.activation = fm::Activation::relu;
  call.alpha = 2;
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "alpha: got 2", [&] { return fm::run(call, workspace); });
  route.scoring = fm::Scoring::topk_softmax;
  route.num_groups = 3;
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "num_groups: got 3",
        [&] { return fm::run(route, workspace); });
}

// <dout, out> of a layer, whose gradients are those below.
double loss_of(const fm::MoeForward& call, const std::vector<float>& dout, fm::Workspace& workspace,
               const std::vector<float>& out) {
  done(fm::run(call, workspace));
  double loss = 0;
  for (size_t i = 0; i < out.size(); ++i) loss += double{dout[i]} * double{out[i]};
  return loss;
}

void gradients() {
  Layer layer;
  fm::Workspace workspace;
  const fm::Routing routing = get(fm::Routing::create(kTokens, kTopK, kExperts));
  fm::MoeRoute route;
  route.logits = fm::ConstTensorView(layer.logits.data(), {kTokens, kExperts});
  routing.attach(route);
  done(fm::run(route, workspace));
  fm::MoeForward call;
  call.x = fm::ConstTensorView(layer.x.data(), {kTokens, kHidden});
  call.w_gate_up = fm::ConstTensorView(layer.w_gate_up.data(), {kExperts, 2 * kInner, kHidden});
  call.w_down =
      fm::ConstTensorView(layer.w_down.data(), {kExperts, kInner, kHidden}).transpose(1, 2);
  call.out = fm::TensorView(layer.out.data(), {kTokens, kHidden});
  routing.attach(call);

  const std::vector<float> dout = random(layer.out.size(), 21);
  std::vector<float> dx(layer.x.size(), NAN), dw(layer.w_down.size(), NAN);
  std::vector<float> dweights(size_t{kTokens} * kTopK, NAN);
  fm::MoeBackward backward;
  backward.dout = fm::ConstTensorView(dout.data(), {kTokens, kHidden});
  backward.x = call.x;
  backward.w_gate_up = call.w_gate_up;
  backward.w_down = call.w_down;
  routing.attach(backward);
  backward.dx = fm::TensorView(dx.data(), {kTokens, kHidden});
  backward.dw_down = fm::TensorView(dw.data(), {kExperts, kInner, kHidden}).transpose(1, 2);
  backward.dweights = fm::TensorView(dweights.data(), {kTokens, kTopK});
  CHECK(get(fm::plan(backward)).workspace_bytes == get(fm::workspace_size(backward)));
  backward.max_workspace_bytes = get(fm::workspace_size(backward));
  CHECK(get(fm::workspace_size(backward)) <= backward.max_workspace_bytes);
  done(fm::run(backward, workspace));
  backward.overwrite_pre_activation = true;
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "overwrite_pre_activation: got 1, accepted without",
        [&] { return fm::plan(backward); });
  backward.overwrite_pre_activation = false;
  // Along one direction each, by differences.
  const auto check = [&](std::vector<float>& at, const std::vector<float>& gradient) {
    const std::vector<float> direction = random(at.size(), 22), held = at;
    constexpr float kStep = 1e-2f;
    double ends[2], expected = 0;
    for (int end = 0; end < 2; ++end) {
      for (size_t i = 0; i < at.size(); ++i) {
        at[i] = held[i] + (end == 0 ? -kStep : kStep) * direction[i];
      }
      ends[end] = loss_of(call, dout, workspace, layer.out);
    }
    at = held;
    for (size_t i = 0; i < at.size(); ++i) expected += double{gradient[i]} * double{direction[i]};
    const double got = (ends[1] - ends[0]) / (2 * double{kStep});
    CHECK(std::fabs(got - expected) <= 1e-3 * (1 + std::fabs(expected)));
  };
  check(layer.x, dx);
  check(layer.w_down, dw);

  std::vector<float> dlogits(layer.logits.size(), NAN);
  fm::MoeRouteBackward router;
  router.dweights = fm::ConstTensorView(dweights.data(), {kTokens, kTopK});
  router.ids = routing.ids();
  router.logits = route.logits;
  router.dlogits = fm::TensorView(dlogits.data(), {kTokens, kExperts});
  done(fm::run(router, workspace));
  for (size_t t = 0; t < kTokens; ++t) {  // of a softmax they sum to 0
    double sum = 0;
    for (size_t e = 0; e < kExperts; ++e) sum += double{dlogits[t * kExperts + e]};
    CHECK(std::fabs(sum) <= 1e-5);
  }

  const int32_t rows[2] = {0, kTokens};
  std::vector<float> drouter(size_t{8} * kHidden, NAN);
  const std::vector<float> of_logits = random(size_t{kTokens} * 8, 23);
  fm::GroupedProductBackward product;
  product.dout = fm::ConstTensorView(of_logits.data(), {kTokens, 8});
  product.x = call.x;
  product.offsets = fm::ConstTensorView(rows, {2});
  product.dw = fm::TensorView(drouter.data(), {1, 8, kHidden});
  done(fm::run(product, workspace));
  double expected = 0;
  for (size_t t = 0; t < kTokens; ++t)
    expected += double{of_logits[t * 8]} * double{layer.x[t * kHidden]};
  CHECK(std::fabs(double{drouter[0]} - expected) <= 1e-4);

  backward.dx = backward.dw_down = backward.dweights = {};
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "dx: got a null tensor",
        [&] { return fm::run(backward, workspace); });
}

void given_experts_and_grouped_product() {
  const int32_t ids[2][1] = {{1}, {0}};
  const fm::Routing routing = get(fm::Routing::create(2, 1, 2));
  fm::MoeRoute route;
  route.given_ids = fm::ConstTensorView(&ids[0][0], {2, 1});
  routing.attach(route);
  fm::Workspace workspace;
  done(fm::run(route, workspace));
  const auto* pairs = static_cast<const int32_t*>(routing.pairs().data());
  CHECK(pairs[0] == 1 && pairs[1] == 0);

  const std::vector<float> x = random(4 * 8, 8), w = random(2 * 8 * 8, 9), bias(16, 0.25f);
  const int32_t offsets[3] = {0, 1, 4};
  std::vector<float> out(4 * 8, NAN);
  fm::GroupedProduct product;
  product.x = fm::ConstTensorView(x.data(), {4, 8});
  product.w = fm::ConstTensorView(w.data(), {2, 8, 8});
  product.bias = fm::ConstTensorView(bias.data(), {2, 8});
  product.offsets = fm::ConstTensorView(offsets, {3});
  product.out = fm::TensorView(out.data(), {4, 8});
  done(fm::run(product, workspace));
  CHECK(get(fm::plan(product)).launch_count == 1);
  for (size_t r = 0; r < 4; ++r) {
    for (size_t n = 0; n < 8; ++n) {
      double expected = 0.25;
      for (size_t i = 0; i < 8; ++i) {
        expected += double{x[r * 8 + i]} * double{w[((r < 1 ? 0 : 1) * 8 + n) * 8 + i]};
      }
      CHECK(std::fabs(double{out[r * 8 + n]} - expected) <= 1e-5);
    }
  }
}

void merge_states() {
  const std::vector<float> outs = random(2 * 3 * 8, 10), lses = {0.5f, -1, 2, 1, 0, -INFINITY};
  std::vector<float> out(3 * 8, NAN), lse(3, NAN);
  fm::MergeStates call;
  call.outs = fm::ConstTensorView(outs.data(), {2, 1, 3, 1, 8});
  call.lses = fm::ConstTensorView(lses.data(), {2, 1, 1, 3});
  call.out = fm::TensorView(out.data(), {1, 3, 1, 8});
  call.lse = fm::TensorView(lse.data(), {1, 1, 3});
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  CHECK(std::strstr(get(fm::plan(call)).launches[0].kernel, "merge_states_cpu") != nullptr);
  CHECK(get(fm::workspace_size(call)) == 0);
  for (size_t i = 0; i < 3; ++i) {
    const double first = std::exp(double{lses[i]}), second = std::exp(double{lses[3 + i]});
    CHECK(std::fabs(double{lse[i]} - std::log(first + second)) <= 1e-6);
    for (size_t d = 0; d < 8; ++d) {
      const double sum = first * double{outs[i * 8 + d]} + second * double{outs[24 + i * 8 + d]};
      CHECK(std::fabs(double{out[i * 8 + d]} - sum / (first + second)) <= 1e-6);
    }
  }

  // The second into the first, in place and in the other layout: with one head they are the same.
  std::vector<float> prior(outs.begin(), outs.begin() + 24),
      prior_lse(lses.begin(), lses.begin() + 3);
  call.prior_out = fm::ConstTensorView(prior.data(), {1, 1, 3, 8});
  call.prior_lse = fm::ConstTensorView(prior_lse.data(), {1, 1, 3});
  call.outs = fm::ConstTensorView(outs.data() + 24, {1, 1, 3, 8});
  call.lses = fm::ConstTensorView(lses.data() + 3, {1, 1, 3});
  call.out = fm::TensorView(prior.data(), {1, 1, 3, 8});
  call.lse = fm::TensorView(prior_lse.data(), {1, 1, 3});
  call.layout = fm::Layout::bhsd;
  done(fm::run(call, workspace));
  CHECK(prior == out && prior_lse == lse);
  call.kernel = "sm90";
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "kernel: got \"sm90\"",
        [&] { return fm::run(call, workspace); });
}

// Attention over six keys, and over the last three of them into that over the first, in place.
void merge_in() {
  const std::vector<float> q = random(3 * 8, 20), k = random(6 * 8, 21), v = random(6 * 8, 22);
  std::vector<float> whole(3 * 8, NAN), whole_lse(3, NAN), out(3 * 8, NAN), lse(3, NAN);
  fm::AttentionForward call;
  call.q = fm::ConstTensorView(q.data(), {1, 3, 1, 8});
  call.k = fm::ConstTensorView(k.data(), {1, 6, 1, 8});
  call.v = fm::ConstTensorView(v.data(), {1, 6, 1, 8});
  call.out = fm::TensorView(whole.data(), {1, 3, 1, 8});
  call.lse = fm::TensorView(whole_lse.data(), {1, 1, 3});
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  call.k = fm::ConstTensorView(k.data(), {1, 3, 1, 8});
  call.v = fm::ConstTensorView(v.data(), {1, 3, 1, 8});
  call.out = fm::TensorView(out.data(), {1, 3, 1, 8});
  call.lse = fm::TensorView(lse.data(), {1, 1, 3});
  done(fm::run(call, workspace));
  call.k = fm::ConstTensorView(k.data() + 24, {1, 3, 1, 8});
  call.v = fm::ConstTensorView(v.data() + 24, {1, 3, 1, 8});
  call.prior_out = fm::ConstTensorView(out.data(), {1, 3, 1, 8});
  call.prior_lse = fm::ConstTensorView(lse.data(), {1, 1, 3});
  done(fm::run(call, workspace));
  const flashmoe_plan plan = get(fm::plan(call));
  CHECK(plan.launch_count == 2);
  CHECK(std::strstr(plan.launches[1].kernel, "merge_states_cpu") != nullptr);
  for (size_t i = 0; i < 24; ++i) CHECK(std::fabs(out[i] - whole[i]) <= 1e-5f);
  for (size_t i = 0; i < 3; ++i) CHECK(std::fabs(lse[i] - whole_lse[i]) <= 1e-5f);
  call.prior_lse = fm::ConstTensorView();
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "prior_lse: got a null tensor",
        [&] { return fm::run(call, workspace); });
}

void check_sequences() {
  const std::vector<float> q(2 * 16), k(4 * 4 * 16);
  const int32_t used[] = {9, 5}, table[] = {2, 1, 3, 4};
  int32_t status[] = {-1, -1};
  fm::CheckSequences call;
  call.q = fm::ConstTensorView(q.data(), {2, 1, 1, 16});
  call.k = fm::ConstTensorView(k.data(), {4, 4, 1, 16});
  call.sequences.page_table = fm::ConstTensorView(table, {2, 2});
  call.sequences.seqused_k = fm::ConstTensorView(used, {2});
  call.status = fm::TensorView(status, {2});
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  CHECK(std::strcmp(get(fm::plan(call)).launches[0].kernel, "check_sequences_cpu") == 0);
  CHECK(status[0] == FLASHMOE_FAULT_SEQUSED_K && status[1] == FLASHMOE_FAULT_PAGE_TABLE);
}

void kv_gather() {
  const std::vector<float> k_cache = random(4 * 4 * 16, 30), v_cache = random(4 * 4 * 8, 31);
  const int32_t used[] = {6, 1}, begin[] = {1, 0}, table[] = {2, 1, 3, 9}, starts[] = {0, 5, 6};
  std::vector<float> k(7 * 16, -1), v(7 * 8, -1);
  fm::KvGather call;
  call.k_cache = fm::ConstTensorView(k_cache.data(), {4, 4, 1, 16});
  call.v_cache = fm::ConstTensorView(v_cache.data(), {4, 4, 1, 8});
  call.cu_seqlens_k = fm::ConstTensorView(starts, {3});
  call.seqused_k = fm::ConstTensorView(used, {2});
  call.k_begin = fm::ConstTensorView(begin, {2});
  call.page_table = fm::ConstTensorView(table, {2, 2});
  call.k = fm::TensorView(k.data(), {1, 7, 1, 16});
  call.v = fm::TensorView(v.data(), {1, 7, 1, 8});
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  CHECK(std::strstr(get(fm::plan(call)).launches[0].kernel, "kv_gather_cpu") != nullptr);
  CHECK(get(fm::workspace_size(call)) == 0);
  // Keys 1 to 5 of the first sequence and key 0 of the second; the last row is nobody's.
  const size_t rows[] = {2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 1 * 4, 1 * 4 + 1, 3 * 4};
  for (size_t row = 0; row < 7; ++row) {
    for (size_t i = 0; i < 16; ++i) {
      CHECK(k[row * 16 + i] == (row < 6 ? k_cache[rows[row] * 16 + i] : -1));
    }
    for (size_t i = 0; i < 8; ++i) {
      CHECK(v[row * 8 + i] == (row < 6 ? v_cache[rows[row] * 8 + i] : -1));
    }
  }
}

void kv_append() {
  const std::vector<float> k = random(2 * 16, 20), v = random(2 * 8, 21), q = random(2 * 16, 22);
  const std::vector<float> cos = random(9 * 2, 23), sin = random(9 * 2, 24);
  const int32_t lengths[] = {5, 0}, table[] = {2, 1, 3, 0};
  const auto rotated = [&](const float* x, int32_t position, size_t i) {
    const size_t at = static_cast<size_t>(position) * 2 + i % 4 / 2,
                 other = i % 2 == 0 ? i + 1 : i - 1;
    if (i >= 4) return x[i];
    return x[i] * cos[at] + (i % 2 == 0 ? -1 : 1) * x[other] * sin[at];
  };
  std::vector<float> k_cache(4 * 4 * 16, -1), v_cache(4 * 4 * 8, -1), q_out(2 * 16, NAN);
  fm::KvAppend call;
  call.k = fm::ConstTensorView(k.data(), {2, 1, 1, 16});
  call.v = fm::ConstTensorView(v.data(), {2, 1, 1, 8});
  call.k_cache = fm::TensorView(k_cache.data(), {4, 4, 1, 16});
  call.v_cache = fm::TensorView(v_cache.data(), {4, 4, 1, 8});
  call.cache_seqlens = fm::ConstTensorView(lengths, {2});
  call.page_table = fm::ConstTensorView(table, {2, 2});
  call.rotary_cos = fm::ConstTensorView(cos.data(), {9, 2});
  call.rotary_sin = fm::ConstTensorView(sin.data(), {9, 2});
  call.rotary = fm::Rotary::interleaved;
  call.q = fm::ConstTensorView(q.data(), {2, 1, 1, 16});
  call.q_out = fm::TensorView(q_out.data(), {2, 1, 1, 16});
  fm::Workspace workspace;
  done(fm::run(call, workspace));
  CHECK(std::strstr(get(fm::plan(call)).launches[0].kernel, "kv_append_cpu") != nullptr);
  CHECK(get(fm::workspace_size(call)) == 0);
  // Key 5 is in the second page of the first sequence, key 0 in the first one of the second.
  const size_t rows[] = {1 * 4 + 1, 3 * 4 + 0};
  for (size_t b = 0; b < 2; ++b) {
    for (size_t i = 0; i < 16; ++i) {
      const float want = rotated(&k[b * 16], lengths[b], i);
      CHECK(std::fabs(k_cache[rows[b] * 16 + i] - want) <= 1e-5f);
      CHECK(std::fabs(q_out[b * 16 + i] - rotated(&q[b * 16], lengths[b], i)) <= 1e-5f);
      k_cache[rows[b] * 16 + i] = -1;
    }
    for (size_t i = 0; i < 8; ++i) CHECK(v_cache[rows[b] * 8 + i] == v[b * 8 + i]);
  }
  CHECK(k_cache == std::vector<float>(4 * 4 * 16, -1));

  // The same rows by their slots, in the other layout: with one head they are the same.
  std::vector<float> again(v_cache.size(), -1);
  const int64_t slots[] = {5, 12}, positions[] = {5, 0};
  call.cache_seqlens = call.page_table = fm::ConstTensorView();
  call.slots = fm::ConstTensorView(slots, {2, 1});
  call.positions = fm::ConstTensorView(positions, {2, 1});
  call.k_cache = fm::TensorView(k_cache.data(), {4, 1, 4, 16});
  call.v_cache = fm::TensorView(again.data(), {4, 1, 4, 8});
  call.layout = fm::Layout::bhsd;
  done(fm::run(call, workspace));
  CHECK(again == v_cache);
  call.q_stays = true;
  fails(FLASHMOE_ERROR_INVALID_ARGUMENT, "q_stays: got 1",
        [&] { return fm::run(call, workspace); });
}

void library() {
  CHECK(fm::version() == flashmoe_version());
  CHECK(std::strstr(get(fm::build_info()).kernel_families, "cpu") != nullptr);
  CHECK(fm::cuda_device_count() == flashmoe_cuda_device_count());
  CHECK(std::strcmp(get(fm::device_info(fm::Device::cpu())).kernel_family, "cpu") == 0);
  done(fm::set_num_threads(2));
  CHECK(fm::num_threads() == 2);
  done(fm::set_num_threads(0));

  std::string lines;
  const auto append = [](int32_t, const char* line, void* user) {
    *static_cast<std::string*>(user) += line;
  };
  done(fm::set_log(FLASHMOE_LOG_INFO, append, &lines));
  attention();
  sequences();
  biases_and_masks();
  attention_backward();
  done(fm::set_log(FLASHMOE_LOG_OFF));
  CHECK(lines.find("attention_forward_cpu") != std::string::npos);
}

}  // namespace

void FLASHMOE_HPP_CHECKS() {
  views();
  attention();
  sequences();
  biases_and_masks();
  adds_no_allocation();
  errors();
  memory();
  experts();
  gradients();
  given_experts_and_grouped_product();
  merge_states();
  merge_in();
  kv_append();
  check_sequences();
  kv_gather();
  library();
}
