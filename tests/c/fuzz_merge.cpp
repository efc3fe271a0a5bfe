// Calls of merge_states with numbers from anywhere, and with something wrong: fuzz_merge [calls]
// [seed].
//
// Extents, layouts, strides and dtypes are random; log-sum-exps are numbers, -inf, +inf and NaN,
// and partials that weigh nothing are NaN. Every call must succeed, in place, too, agree with a
// plain loop that reads flashmoe.h its own way, and write nothing else. Then one fault is put into
// it, in any field of the parameters or of a tensor: every entry point must refuse it with a
// sentence that blames the argument at fault, and change nothing. Meant to be built with
// AddressSanitizer and UBSan.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "call_oracle.h"
#include "flashmoe/flashmoe.h"
#include "fuzz_cache.h"
#include "fuzz_call.h"
#include "fuzz_gradients.h"
#include "fuzz_run.h"

namespace {

int64_t rows = 0, empty_rows = 0, infinite_rows = 0, in_place = 0, shared = 0;

using Params = flashmoe_merge_states_params;

constexpr flashmoe_dtype kSingle = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kDouble = {FLASHMOE_DTYPE_FLOAT, 64, 1};

// Tensors with an axis of partials in front, which is part of `memory`'s first axis; or without.
struct Stacked {
  Argument memory;  // [partials * batch, ...]
  int64_t partials = 1;
  bool outer = true;  // whether partials are further apart than rows of the batch
  int64_t shape[8] = {};
  int64_t strides[8] = {};
  flashmoe_tensor tensor = {};

  int64_t at(int64_t partial, int64_t b) const {
    return outer ? partial * (memory.shape[0] / partials) + b : b * partials + partial;
  }
  void stack(bool has_axis) {
    const int lead = has_axis ? 1 : 0;
    const int64_t batch = partials == 0 ? 0 : memory.shape[0] / partials;
    const int64_t step = memory.shape[0] > 1 ? memory.stride(0) : 0;
    tensor = memory.tensor;
    tensor.ndim = memory.rank + lead;
    tensor.shape = shape;
    tensor.strides = strides;
    shape[lead] = batch, strides[lead] = outer ? step : step * partials;
    for (int axis = 1; axis < memory.rank; ++axis) {
      shape[lead + axis] = memory.shape[axis];
      strides[lead + axis] = memory.stride(axis);
    }
    if (has_axis) shape[0] = partials, strides[0] = outer ? step * batch : step;
  }
};

struct Merge {
  Params params = flashmoe_merge_states_params_init();
  Stacked outs, lses;
  Argument prior_out, prior_lse, out, lse;
  std::string kernel;
  bool null_params = false;

  // As in fuzz_cache.h.
  struct Tensor {
    const char* name;
    const flashmoe_tensor* Params::* member;
    flashmoe_tensor* tensor;
    int64_t* extents;
    int64_t* steps;
    int full_rank;
    const Argument* memory;

    flashmoe_tensor* of() const { return tensor; }
    int64_t* shape() const { return extents; }
    int64_t* strides() const { return steps; }
    int rank() const { return full_rank; }
    bool unchanged() const { return memory->unchanged(); }
    bool has_elements() const {
      return std::find(extents, extents + full_rank, 0) == extents + full_rank;
    }
  };
  std::vector<Tensor> tensors() {
    const auto stacked = [](const char* name, const flashmoe_tensor* Params::* member, Stacked* x) {
      return Tensor{name, member, &x->tensor, x->shape, x->strides, x->tensor.ndim, &x->memory};
    };
    const auto plain = [](const char* name, const flashmoe_tensor* Params::* member, Argument* x) {
      return Tensor{name, member, &x->tensor, x->shape, x->strides, x->rank, x};
    };
    return {stacked("outs", &Params::outs, &outs),
            stacked("lses", &Params::lses, &lses),
            plain("prior_out", &Params::prior_out, &prior_out),
            plain("prior_lse", &Params::prior_lse, &prior_lse),
            plain("out", &Params::out, &out),
            plain("lse", &Params::lse, &lse)};
  }

  bool bhsd() const { return params.layout == FLASHMOE_LAYOUT_BHSD; }
  const unsigned char* at(const Argument& x, int64_t b, int64_t s, int64_t h, int64_t d) const {
    return bhsd() ? x.element(b, h, s, d) : x.element(b, s, h, d);
  }
  const Params* pointer() const { return null_params ? nullptr : &params; }
};

void store(const unsigned char* at, flashmoe_dtype dtype, double number) {
  auto* const to = const_cast<unsigned char*>(at);
  if (dtype.bits == 64) {
    std::memcpy(to, &number, 8);
  } else if (dtype.bits == 32) {
    const auto single = static_cast<float>(number);
    std::memcpy(to, &single, 4);
  } else {
    const uint16_t half = 0x7fff;  // NaN alone is stored so, of either
    std::memcpy(to, &half, 2);
  }
}

void make_valid(Random* random, Merge* call) {
  Merge& c = *call;
  c.params.layout = random->one_of<int32_t>({FLASHMOE_LAYOUT_BSHD, FLASHMOE_LAYOUT_BHSD});
  const bool wide = random->chance(0.25);
  const auto dtype = [&] {
    return wide ? kDouble
                : random->one_of<flashmoe_dtype>(
                      {kSingle, {FLASHMOE_DTYPE_FLOAT, 16, 1}, {FLASHMOE_DTYPE_BFLOAT, 16, 1}});
  };
  const bool has_axis = random->chance(0.6);
  const int64_t partials = has_axis ? random->range(0, 5) : 1;
  const int64_t batch = random->range(0, 3), seq = random->range(0, 6), heads = random->range(0, 3);
  const int64_t dim = 8 * random->range(1, 5);
  const auto allocate = [&](Argument* x, int rank, int64_t first, flashmoe_dtype of, bool output) {
    x->rank = rank;
    x->shape[0] = first;
    x->shape[1] = rank == 4 && !c.bhsd() ? seq : heads;
    x->shape[2] = rank == 4 && !c.bhsd() ? heads : seq;
    x->shape[3] = dim;
    x->tensor.dtype = of;
    x->tensor.device = {FLASHMOE_DEVICE_CPU, 0};
    x->allocate(random, output);
  };
  const flashmoe_dtype of_lse = wide ? kDouble : kSingle;
  for (Stacked* x : {&c.outs, &c.lses}) {
    x->partials = partials;
    x->outer = random->chance(0.5);
  }
  allocate(&c.outs.memory, 4, partials * batch, dtype(), false);
  allocate(&c.lses.memory, 3, partials * batch, of_lse, false);
  c.outs.stack(has_axis);
  c.lses.stack(has_axis);
  if (partials == 0) {  // of which memory cannot tell the batch
    (has_axis ? c.outs.shape[1] : c.outs.shape[0]) = batch;
    (has_axis ? c.lses.shape[1] : c.lses.shape[0]) = batch;
  }
  c.params.outs = &c.outs.tensor;
  c.params.lses = &c.lses.tensor;
  if (random->chance(0.6)) {
    allocate(&c.prior_out, 4, batch, dtype(), false);
    allocate(&c.prior_lse, 3, batch, of_lse, false);
    c.params.prior_out = &c.prior_out.tensor;
    c.params.prior_lse = &c.prior_lse.tensor;
  }
  allocate(&c.out, 4, batch, dtype(), true);
  c.params.out = &c.out.tensor;
  if (random->chance(0.7)) {
    allocate(&c.lse, 3, batch, of_lse, true);
    c.params.lse = &c.lse.tensor;
  }
  if (random->chance(0.2)) {
    c.kernel = "cpu";
    c.params.kernel = c.kernel.c_str();
  }
}

// Calls visit(out, its batch, lse, its batch) of each partial of row b, the prior's first.
template <class Visit>
void each_partial(Merge* call, int64_t b, const Visit& visit) {
  Merge& c = *call;
  if (c.params.prior_out != nullptr) visit(&c.prior_out, b, &c.prior_lse, b);
  for (int64_t i = 0; i < c.outs.partials; ++i) {
    visit(&c.outs.memory, c.outs.at(i, b), &c.lses.memory, c.lses.at(i, b));
  }
}

// Calls visit(b, s, h) of each row of the result.
template <class Visit>
void each_row(const Merge& c, const Visit& visit) {
  const int64_t seq = c.out.shape[c.bhsd() ? 2 : 1], heads = c.out.shape[c.bhsd() ? 1 : 2];
  for (int64_t b = 0; b < c.out.shape[0]; ++b) {
    for (int64_t s = 0; s < seq; ++s) {
      for (int64_t h = 0; h < heads; ++h) visit(b, s, h);
    }
  }
}

// Some log-sum-exps become infinite or NaN, and outputs that weigh nothing NaN. Where strides of 0
// or of fuzz_call.h's make rows share memory the last one's hold for all: read back by the oracle.
void make_strange(Random* random, Merge* call) {
  Merge& c = *call;
  const double often = random->one_of({0.0, 0.1, 0.5, 0.9});
  each_row(c, [&](int64_t b, int64_t s, int64_t h) {
    each_partial(call, b, [&](Argument*, int64_t, Argument* lse, int64_t at) {
      if (!random->chance(often)) return;
      const double strange =
          random->one_of({-HUGE_VAL, -HUGE_VAL, -HUGE_VAL, HUGE_VAL, std::nan(""), 80.0});
      store(lse->element(at, h, s, 0), lse->tensor.dtype, strange);
    });
  });
  const auto is_broadcast = [](const Argument& x) {
    for (int axis = 0; axis + 1 < x.rank; ++axis) {
      if (x.shape[axis] > 1 && x.stride(axis) == 0) return true;
    }
    return false;
  };
  each_row(c, [&](int64_t b, int64_t s, int64_t h) {
    each_partial(call, b, [&](Argument* out, int64_t at, Argument* lse, int64_t at_lse) {
      if (load(lse->element(at_lse, h, s, 0), lse->tensor.dtype) != -HUGE_VAL) return;
      if (is_broadcast(*out) || is_broadcast(*lse)) return;
      for (int64_t d = 0; d < out->shape[3]; ++d) {
        store(c.at(*out, at, s, h, d), out->tensor.dtype, std::nan(""));
      }
    });
  });
  for (Argument* x : {&c.outs.memory, &c.lses.memory, &c.prior_out, &c.prior_lse}) {
    x->before.assign(x->block.get(), x->block.get() + x->block_bytes);
  }
}

// ---- flashmoe.h, read another way ---------------------------------------------------------------

struct Merged {
  std::vector<double> out;
  double magnitude = 0;  // of the largest sum of terms
  double lse = -HUGE_VAL;
};

Merged merged_of(Merge* call, int64_t b, int64_t s, int64_t h) {
  Merge& c = *call;
  struct Partial {
    double lse;
    std::vector<double> out;
  };
  std::vector<Partial> partials;
  each_partial(call, b, [&](Argument* out, int64_t at, Argument* lse, int64_t at_lse) {
    Partial partial = {load(lse->element(at_lse, h, s, 0), lse->tensor.dtype), {}};
    for (int64_t d = 0; d < out->shape[3]; ++d) {
      partial.out.push_back(load(c.at(*out, at, s, h, d), out->tensor.dtype));
    }
    partials.push_back(partial);
  });
  Merged merged;
  merged.out.assign(static_cast<size_t>(c.out.shape[3]), 0.0);
  double largest = -HUGE_VAL, sum = 0;
  for (const Partial& partial : partials) {
    if (std::isnan(partial.lse)) {
      merged.lse = std::nan("");
      std::fill(merged.out.begin(), merged.out.end(), std::nan(""));
      return merged;
    }
    largest = std::fmax(largest, partial.lse);
  }
  const auto weight_of = [&](double lse) {
    if (lse == -HUGE_VAL) return 0.0;
    return largest == HUGE_VAL ? (lse == HUGE_VAL ? 1.0 : 0.0) : std::exp(lse - largest);
  };
  for (const Partial& partial : partials) sum += weight_of(partial.lse);
  if (sum == 0) return merged;
  merged.lse = largest == HUGE_VAL ? HUGE_VAL : largest + std::log(sum);
  for (size_t d = 0; d < merged.out.size(); ++d) {
    double magnitude = 0;
    for (const Partial& partial : partials) {
      const double weight = weight_of(partial.lse) / sum;
      if (weight == 0) continue;  // what is finite stays 0 times its weight
      merged.out[d] += weight * partial.out[d];
      magnitude += std::fabs(weight * partial.out[d]);
    }
    merged.magnitude = std::fmax(merged.magnitude, magnitude);
  }
  return merged;
}

bool is_near(double got, double want, double allowed) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= allowed;
}

// The result against the oracle's, which was made before the call.
void expect_rows(Merge* call, const std::vector<Merged>& expected, Argument* out, Argument* lse) {
  Merge& c = *call;
  const flashmoe_dtype dtype = out->tensor.dtype;
  const double unit = dtype.bits == 64                     ? 1e-12
                      : dtype.bits == 32                   ? 2e-6
                      : dtype.code == FLASHMOE_DTYPE_FLOAT ? 0x1p-10
                                                           : 0x1p-7;
  size_t row = 0;
  each_row(c, [&](int64_t b, int64_t s, int64_t h) {
    const Merged& want = expected[row++];
    ++rows;
    empty_rows += want.lse == -HUGE_VAL ? 1 : 0;
    infinite_rows += want.lse == HUGE_VAL ? 1 : 0;
    for (size_t d = 0; d < want.out.size(); ++d) {
      const unsigned char* const element = c.at(*out, b, s, h, static_cast<int64_t>(d));
      EXPECT(is_near(load(element, dtype), want.out[d], unit * want.magnitude));
      restore(out, element);
    }
    if (c.params.lse == nullptr) return;
    const unsigned char* const element = lse->element(b, h, s, 0);
    const double close = (lse->tensor.dtype.bits == 64 ? 1e-12 : 2e-6) * (1 + std::fabs(want.lse));
    EXPECT(is_near(load(element, lse->tensor.dtype), want.lse, close));
    restore(lse, element);
  });
}

void expect_unchanged(Merge* call) {
  for (const Merge::Tensor& t : call->tensors()) EXPECT(t.unchanged());
}

// ---- faults -------------------------------------------------------------------------------------

using MergeFault = Fault<Merge>;

std::vector<MergeFault> faults() {
  std::vector<MergeFault> all = {
      {"struct_size",
       [](Random* random, Merge* call) -> Blame {
         const size_t size = sizeof call->params;
         call->params.struct_size = random->one_of({size_t{0}, size - 8, size + 8, SIZE_MAX});
         return {"params", "struct_size", "flashmoe_merge_states_params"};
       }},
      {"null params",
       [](Random*, Merge* call) -> Blame {
         call->null_params = true;
         return {"params"};
       }},
      in_field<Merge, Params, int32_t>("layout", &Params::layout, {-1, 2, 77, INT32_MAX}),
      in_field<Merge, Params, uint32_t>("reserved", &Params::reserved, {1, 0x80000000}),
      in_field<Merge, Params, const char*>(
          "kernel", &Params::kernel, {"sm89", "x", "merge_states_", "merge_states_sm89_fp16"}),
      {"missing tensor",
       [](Random* random, Merge* call) -> Blame {
         const struct {
           const char* name;
           const flashmoe_tensor* Params::* member;
         } needed[] = {{"outs", &Params::outs}, {"lses", &Params::lses}, {"out", &Params::out}};
         const auto& one = needed[random->below(3)];
         call->params.*one.member = nullptr;
         return {one.name};
       }},
      {"a prior without its lse",
       [](Random*, Merge* call) -> Blame {
         if (call->params.prior_out == nullptr) return {};
         call->params.prior_lse = nullptr;
         return {"prior_lse"};
       }},
      {"an lse without its prior",
       [](Random*, Merge* call) -> Blame {
         if (call->params.prior_out == nullptr) return {};
         call->params.prior_out = nullptr;
         return {"prior_lse"};
       }},
      {"head dimension",
       [](Random* random, Merge* call) -> Blame {
         Stacked& x = call->outs;
         x.shape[x.tensor.ndim - 1] = random->one_of<int64_t>({0, 4, 12});
         return {"outs"};
       }},
      in_tensor<Merge>("number of dimensions",
                       [](Random* random, const Merge::Tensor& t) {
                         t.tensor->ndim = random->one_of({-1, 0, 2, 6, INT32_MAX});
                         return true;
                       }),
      in_tensor<Merge>("last stride",
                       [](Random* random, const Merge::Tensor& t) {
                         if (t.memory->rank != 4 || !t.has_elements()) return false;
                         if (t.tensor->strides == nullptr) return false;
                         t.steps[t.full_rank - 1] = random->one_of<int64_t>({-1, 2, 16});
                         return true;
                       }),
      {"dimensions of one of the two",
       [](Random*, Merge* call) -> Blame {
         Stacked& x = call->lses;
         x.tensor.ndim = x.tensor.ndim == 4 ? 3 : 4;
         return {"lses"};
       }},
  };
  for (const MergeFault& each : tensor_faults<Merge>({})) {
    // outs has two ranks that it may have, and log-sum-exps any strides.
    if (std::string(each.name) != "rank" && std::string(each.name) != "last stride") {
      all.push_back(each);
    }
  }
  return all;
}

bool is_blamed(const Blame& blame, const std::string& sentence) {
  return blames(blame, sentence) ||
         (blame.count("struct_size") != 0 && sentence.find("struct_size") != std::string::npos);
}

void run_with_fault(Random* random, Merge* call) {
  static const std::vector<MergeFault> all = faults();
  Merge& c = *call;
  Blame blame;
  while (blame.empty()) {
    const MergeFault& chosen = any_of(random, all);
    fault = chosen.name;
    blame = chosen.put(random, call);
  }
  flashmoe_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_plan before;
  std::memcpy(static_cast<void*>(&before), &plan, sizeof plan);
  const flashmoe_status planned = flashmoe_merge_states_plan(c.pointer(), &plan);
  EXPECT(planned == FLASHMOE_ERROR_INVALID_ARGUMENT || planned == FLASHMOE_ERROR_UNSUPPORTED ||
         planned == FLASHMOE_ERROR_ARCH_NOT_BUILT || planned == FLASHMOE_ERROR_NO_DEVICE);
  const std::string sentence = flashmoe_last_error();
  EXPECT(is_blamed(blame, sentence));
  EXPECT(std::memcmp(&plan, &before, sizeof plan) == 0);
  ++blamed[sentence.substr(0, sentence.find(':'))];
  constexpr size_t kUntouched = 0x5a5a5a5a;
  size_t bytes = kUntouched;
  EXPECT(flashmoe_merge_states_workspace_size(c.pointer(), &bytes) == planned);
  EXPECT(bytes == kUntouched);
  EXPECT(flashmoe_merge_states(c.pointer(), nullptr, 0, nullptr) == planned);
  EXPECT(sentence == flashmoe_last_error());
  expect_unchanged(call);
}

// A result in the partials' memory: planned, and refused when it is launched.
void run_with_shared_memory(Merge* call) {
  Merge& c = *call;
  fault = "shared memory";
  if (c.outs.tensor.ndim != 4 || c.outs.memory.block_bytes == 0) return;
  const flashmoe_tensor own = c.outs.tensor;
  c.params.out = &own;
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = flashmoe_merge_states_plan(&c.params, &plan);
  if (planned == FLASHMOE_OK) {
    EXPECT(flashmoe_merge_states(&c.params, nullptr, 0, nullptr) ==
           FLASHMOE_ERROR_INVALID_ARGUMENT);
    EXPECT(blames({"out"}, flashmoe_last_error()));
    EXPECT(std::strstr(flashmoe_last_error(), "shares memory with outs") != nullptr);
    ++shared;
  } else {  // broadcast
    EXPECT(std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr);
  }
  expect_unchanged(call);
  c.params.out = &c.out.tensor;
}

bool is_valid(const Merge& c) {
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = flashmoe_merge_states_plan(&c.params, &plan);
  // fuzz_call.h makes outputs with such strides.
  if (planned == FLASHMOE_ERROR_INVALID_ARGUMENT &&
      std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr) {
    return false;
  }
  EXPECT(planned == FLASHMOE_OK);
  EXPECT(plan.workspace_bytes == 0 && plan.launch_count == 1);
  return true;
}

void run(Random* random, Merge* call) {
  Merge& c = *call;
  fault.clear();
  if (!is_valid(c)) return;
  size_t bytes = 1;
  EXPECT(flashmoe_merge_states_workspace_size(&c.params, &bytes) == FLASHMOE_OK && bytes == 0);
  std::vector<Merged> expected;
  each_row(c,
           [&](int64_t b, int64_t s, int64_t h) { expected.push_back(merged_of(call, b, s, h)); });
  void* const stream = reinterpret_cast<void*>(uintptr_t{0xdead});  // the CPU must not look
  EXPECT(flashmoe_merge_states(&c.params, nullptr, 0, stream) == FLASHMOE_OK);
  expect_rows(call, expected, &c.out, &c.lse);
  expect_unchanged(call);
  if (c.params.prior_out != nullptr) {
    Params& p = c.params;
    p.out = p.prior_out;
    if (p.lse != nullptr) p.lse = p.prior_lse;
    if (is_valid(c)) {
      fault = "in place";
      EXPECT(flashmoe_merge_states(&p, nullptr, 0, nullptr) == FLASHMOE_OK);
      expect_rows(call, expected, &c.prior_out, &c.prior_lse);
      expect_unchanged(call);
      ++in_place;
    }
    p.out = &c.out.tensor;
    if (p.lse != nullptr) p.lse = &c.lse.tensor;
  }
  run_with_shared_memory(call);
  run_with_fault(random, call);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_merge", argc, argv, 5000, [](Random* random) {
    Merge call;
    make_valid(random, &call);
    make_strange(random, &call);
    run(random, &call);
  });
  std::printf("%" PRId64 " rows compared, %" PRId64 " of them empty, %" PRId64 " infinite; %" PRId64
              " calls in place, %" PRId64 " of shared memory\n",
              rows, empty_rows, infinite_rows, in_place, shared);
  print_blamed();
  if (calls < 5000) return 0;
  EXPECT(rows > calls && empty_rows > calls / 20 && infinite_rows > calls / 20);
  EXPECT(in_place > calls / 20 && shared > calls / 20);
  for (const char* name : {"outs", "lses", "prior_out", "prior_lse", "out", "lse", "kernel",
                           "layout", "reserved", "params"}) {
    EXPECT(blamed[name] > 0);
  }
  return 0;
}
