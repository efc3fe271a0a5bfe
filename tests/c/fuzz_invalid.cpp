// Random calls through the C ABI, most of them invalid: fuzz_invalid [calls] [seed].
//
// A valid attention call, forward or backward, is made, at most three faults are put into it, and
// the oracle of call_oracle.h says what must come of it:
//   invalid  every entry point refuses it with a sentence that blames a guilty argument, and no
//            byte of an output, of a plan or of the tensors' memory has changed;
//   shared   outputs lie in other tensors: planned, and then refused in the same way;
//   valid    it succeeds, writes every element of its outputs and nothing between or around them,
//            and the result agrees with a plain loop in double precision.
// Meant to be built with AddressSanitizer and UBSan; the tensors' memory ends where it is said to.
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "call_oracle.h"
#include "check.h"
#include "flashmoe/flashmoe.h"
#include "fuzz_call.h"
#include "fuzz_faults.h"
#include "fuzz_gradients.h"

namespace {

// ---- running and judging --------------------------------------------------------------------

void describe(const Call& call) {
  std::fprintf(stderr, "  faults:%s\n", call.faults.c_str());
  const flashmoe_attention_forward_params& p = call.params;
  std::fprintf(stderr, "  %s params=%s struct_size=%zu layout=%d causal=%d scale=%g reserved=%u",
               call.is_backward ? "backward" : "forward", call.null_params ? "null" : "given",
               p.struct_size, p.layout, p.causal, static_cast<double>(p.scale), p.reserved);
  std::fprintf(stderr, " window=%u,%" PRId64 ",%" PRId64 " softcap=%g", p.window, p.window_left,
               p.window_right, static_cast<double>(p.softcap));
  std::fprintf(stderr, " q_scale=%p k_scale=%p v_scale=%p sequences=%p\n",
               static_cast<const void*>(p.q_scale), static_cast<const void*>(p.k_scale),
               static_cast<const void*>(p.v_scale), static_cast<const void*>(p.sequences));
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const flashmoe_tensor* t = *call.slots[i];
    std::fprintf(stderr, "  %-3s", call.arguments[i]->name);
    if (t == nullptr) {
      std::fprintf(stderr, " null\n");
      continue;
    }
    std::fprintf(stderr, " data=%p+%" PRIu64 " device=%d dtype=%d,%d,%d ndim=%d", t->data,
                 t->byte_offset, t->device.device_type, t->dtype.code, t->dtype.bits,
                 t->dtype.lanes, t->ndim);
    for (int axis = 0; t->shape != nullptr && axis < call.arguments[i]->rank; ++axis) {
      std::fprintf(stderr, "%s%" PRId64, axis == 0 ? " shape=" : ",", t->shape[axis]);
    }
    for (int axis = 0; t->strides != nullptr && axis < call.arguments[i]->rank; ++axis) {
      std::fprintf(stderr, "%s%" PRId64, axis == 0 ? " strides=" : ",", t->strides[axis]);
    }
    std::fprintf(stderr, "\n");
  }
}

// The state of a run, for the report and for the message of a failure.
struct Tally {
  uint64_t seed = 0;
  int64_t call_number = 0;
  int64_t invalid = 0, valid = 0, computed = 0, either = 0, other = 0, shared = 0;
  std::map<std::string, int64_t> blamed;
};

Tally tally;

#define EXPECT(call, condition)                                                                  \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::fprintf(                                                                              \
          stderr, "%s:%d: seed %" PRIu64 ", call %" PRId64 ": failed: %s\n  last error: %s\n",   \
          __FILE__, __LINE__, tally.seed, tally.call_number, #condition, flashmoe_last_error()); \
      describe(call);                                                                            \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (0)

// A sentence: something, on one line, of printable characters.
bool is_sentence(const std::string& text) {
  if (text.size() < 10 || text.size() > 1023) return false;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == '\0') return false;
  }
  return true;
}

void expect_refusal(const Call& call, const Judgement& judgement, flashmoe_status status) {
  EXPECT(call, status != FLASHMOE_OK);
  EXPECT(call, status != FLASHMOE_ERROR_INTERNAL && status != FLASHMOE_ERROR_OUT_OF_MEMORY);
  const std::string sentence = flashmoe_last_error();
  EXPECT(call, is_sentence(sentence));
  const bool unsupported = status == FLASHMOE_ERROR_UNSUPPORTED;  // the backend's own limits
  EXPECT(call, blames(judgement.blame, sentence) ||
                   (unsupported && judgement.verdict != Verdict::kInvalid));
}

void expect_memory_unchanged(const Call& call) {
  for (const Argument* argument : call.arguments) EXPECT(call, argument->unchanged());
}

// The extents of a valid call.
struct Extents {
  int64_t batch, seq_q, seq_k, heads_q, heads_kv, group, dim, dim_v;

  explicit Extents(const Call& call) {
    const int seq = call.params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1;
    const int head = 3 - seq;
    batch = call.q.shape[0];
    seq_q = call.q.shape[seq], seq_k = call.k.shape[seq];
    heads_q = call.q.shape[head], heads_kv = call.k.shape[head];
    group = heads_q / heads_kv;
    dim = call.q.shape[3], dim_v = call.v.shape[3];
    if (seq_q == 0 && (!call.is_backward || seq_k == 0)) batch = 0;  // of no rows there may be many
  }
};

double scale_of(const Call& call, const Extents& e) {
  return call.params.scale != 0 ? static_cast<double>(call.params.scale)
                                : 1 / std::sqrt(static_cast<double>(e.dim));
}

double number_at(const Call& call, const Argument& argument, int64_t b, int64_t s, int64_t h,
                 int64_t d) {
  return load(element_at(call, argument, b, s, h, d), argument.tensor.dtype);
}

// NaN where NaN is expected: a sink whose dtype was changed may be any number.
bool is_near(double got, double expected, double allowed) {
  if (std::isnan(expected)) return std::isnan(got);
  return got == expected || std::fabs(got - expected) <= allowed;
}

// out and lse against a plain loop; then everything but their elements against the poison.
void expect_output(Call* call) {
  const flashmoe_attention_forward_params p = as_given(call->params);
  const Extents e(*call);
  const double allowed = tolerance(call->q.tensor.dtype, scale_of(*call, e), e.dim);
  std::vector<double> weight(static_cast<size_t>(e.seq_k));
  for (int64_t b = 0; b < e.batch; ++b) {
    for (int64_t h = 0; h < e.heads_q; ++h) {
      for (int64_t i = 0; i < e.seq_q; ++i) {
        std::vector<bool> sees(static_cast<size_t>(e.seq_k));
        double largest = -HUGE_VAL;
        for (int64_t j = 0; j < e.seq_k; ++j) {
          const bool seen = ::sees(*call, b, h, i, j);
          sees[static_cast<size_t>(j)] = seen;
          if (!seen) continue;
          const double logit = logit_of(*call, b, h, i, j) + bias_of(*call, b, h, i, j);
          weight[static_cast<size_t>(j)] = logit;
          largest = std::fmax(largest, logit);
        }
        double sink = -HUGE_VAL;
        if (p.sinks != nullptr) {
          sink = load(call->sinks.element(h, 0, 0, 0), call->sinks.tensor.dtype);
          largest = std::fmax(largest, sink);
        }
        double sum = sink == -HUGE_VAL ? 0 : sink == largest ? 1 : std::exp(sink - largest);
        for (int64_t j = 0; j < e.seq_k; ++j) {
          double& w = weight[static_cast<size_t>(j)];
          w = sees[static_cast<size_t>(j)] ? std::exp(w - largest) : 0.0;
          sum += w;
        }
        for (int64_t d = 0; d < e.dim_v; ++d) {
          double expected = 0;
          for (int64_t j = 0; j < e.seq_k; ++j) {
            if (!sees[static_cast<size_t>(j)]) continue;
            expected += weight[static_cast<size_t>(j)] / sum *
                        number_at(*call, call->v, b, j, h / e.group, d);
          }
          const unsigned char* element = element_at(*call, call->out, b, i, h, d);
          EXPECT(*call, is_near(load(element, call->out.tensor.dtype), expected, allowed));
          restore(&call->out, element);
        }
        if (p.lse == nullptr) continue;
        const unsigned char* element = call->lse.element(b, h, i, 0);
        const double lse = load(element, call->lse.tensor.dtype);
        if (sum == 0) {
          EXPECT(*call, lse == -HUGE_VAL);
        } else {
          EXPECT(*call, is_near(lse, largest + std::log(sum), 1e-3));
        }
        restore(&call->lse, element);
      }
    }
  }
  expect_memory_unchanged(*call);
}

// The gradients against a plain loop; then everything but their elements against the poison.
void expect_gradients(Call* call) {
  const Extents e(*call);
  const double scale = scale_of(*call, e);
  const double cap = static_cast<double>(call->params.softcap);
  Sums dq(e.batch, e.seq_q, e.heads_q, e.dim);
  Sums dk(e.batch, e.seq_k, e.heads_kv, e.dim);
  Sums dv(e.batch, e.seq_k, e.heads_kv, e.dim_v);
  Sums dsinks(1, 1, e.heads_q, 1);
  for (int64_t b = 0; b < e.batch; ++b) {
    for (int64_t h = 0; h < e.heads_q; ++h) {
      for (int64_t i = 0; i < e.seq_q; ++i) {
        const double lse = load(call->lse.element(b, h, i, 0), call->lse.tensor.dtype);
        double delta = 0, magnitude = 0;
        for (int64_t d = 0; d < e.dim_v; ++d) {
          const double term =
              number_at(*call, call->dout, b, i, h, d) * number_at(*call, call->out, b, i, h, d);
          delta += term, magnitude += std::fabs(term);
        }
        double dlse = 0;
        if (call->backward.dlse != nullptr) {
          dlse = load(call->dlse.element(b, h, i, 0), call->dlse.tensor.dtype);
        }
        if (call->backward.sinks != nullptr) {
          const double sink = load(call->sinks.element(h, 0, 0, 0), call->sinks.tensor.dtype);
          const double weight = std::exp(sink - lse);
          bool sees_keys = false;
          for (int64_t j = 0; j < e.seq_k; ++j) {
            sees_keys = sees_keys || sees(*call, b, h, i, j);
          }
          for (const double part : {delta, magnitude, -magnitude}) {
            if (sees_keys) dsinks.add(0, 0, h, 0, -weight * part);  // else out is 0
          }
          dsinks.add(0, 0, h, 0, weight * dlse);
        }
        delta -= dlse;
        for (int64_t j = 0; j < e.seq_k; ++j) {
          if (!sees(*call, b, h, i, j)) continue;
          const int64_t g = h / e.group;
          const double logit = logit_of(*call, b, h, i, j);
          const double weight = std::exp(logit + bias_of(*call, b, h, i, j) - lse);
          double dweight = 0;
          for (int64_t d = 0; d < e.dim_v; ++d) {
            const double dout = number_at(*call, call->dout, b, i, h, d);
            dweight += dout * number_at(*call, call->v, b, j, g, d);
            dv.add(b, j, g, d, weight * dout);
          }
          const double slope = cap == 0 ? 1 : 1 - (logit / cap) * (logit / cap);
          const double factor = scale * weight;
          for (int64_t d = 0; d < e.dim; ++d) {
            const double q = number_at(*call, call->q, b, i, h, d);
            const double k = number_at(*call, call->k, b, j, g, d);
            // The last two are what delta is a difference of: its roundings count, and so do the
            // slope's.
            for (const double part : {slope * (dweight - delta), magnitude, -magnitude}) {
              dq.add(b, i, h, d, factor * part * k);
              dk.add(b, j, g, d, factor * part * q);
            }
          }
        }
      }
    }
  }
  const double unit = tolerance(call->q.tensor.dtype, scale, e.dim);
  EXPECT(*call, call->backward.dq == nullptr || dq.are(*call, &call->dq, unit));
  EXPECT(*call, call->backward.dk == nullptr || dk.are(*call, &call->dk, unit));
  EXPECT(*call, call->backward.dv == nullptr || dv.are(*call, &call->dv, unit));
  EXPECT(*call, call->backward.dsinks == nullptr || dsinks.are(*call, &call->dsinks, unit));
  expect_memory_unchanged(*call);
}

// What is wrong with a workspace, when the call needs one.
void try_workspaces(Random* random, Call* given, const Memory& workspace, size_t bytes) {
  if (bytes == 0) return;
  Call& call = *given;
  // With less room, fewer of several threads would run; a single thread cannot.
  const int32_t threads = flashmoe_get_num_threads();
  CHECK(flashmoe_set_num_threads(1) == FLASHMOE_OK);
  size_t least = 0;
  EXPECT(call, call.workspace_size(&least) == FLASHMOE_OK);
  EXPECT(call, least <= bytes);
  const size_t small =
      random->chance(0.5) ? least - 1 : static_cast<size_t>(random->bits()) % least;
  EXPECT(call, call.run(workspace.get(), small, nullptr) == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  CHECK(flashmoe_set_num_threads(threads) == FLASHMOE_OK);
  EXPECT(call, std::strstr(flashmoe_last_error(), "workspace_size:") == flashmoe_last_error());
  EXPECT(call, call.run(nullptr, bytes, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  EXPECT(call, std::strstr(flashmoe_last_error(), "workspace:") == flashmoe_last_error());
  const int64_t shift = random->range(1, 15);
  EXPECT(call,
         call.run(workspace.get() + shift, bytes, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  expect_memory_unchanged(call);
}

// Outputs overlap other tensors: only the launch refuses that.
void expect_launch_refusal(Call* given, const Judgement& judgement, size_t bytes, void* stream) {
  Call& call = *given;
  const Memory workspace = allocate_memory(bytes);
  EXPECT(call, call.run(workspace.get(), bytes, stream) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  const std::string sentence = flashmoe_last_error();
  EXPECT(call, is_sentence(sentence));
  if (sentence.find("beyond the address space") != std::string::npos) {
    EXPECT(call, blames(judgement.outsiders, sentence));
  } else {
    EXPECT(call, blames(judgement.sharers, sentence));
    EXPECT(call, sentence.find("shares memory with") != std::string::npos);
  }
  expect_memory_unchanged(call);
  ++tally.shared;
}

void run(Random* random, Call* call) {
  const Judgement judgement =
      call->is_backward ? judge(call->given_backward()) : judge(call->given());

  flashmoe_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_plan plan_before;
  std::memcpy(static_cast<void*>(&plan_before), &plan, sizeof plan);
  const flashmoe_status planned = call->plan(&plan);
  if (planned != FLASHMOE_OK) {
    expect_refusal(*call, judgement, planned);
    EXPECT(*call, std::memcmp(&plan, &plan_before, sizeof plan) == 0);
  }
  constexpr size_t kUntouched = 0x5a5a5a5a;
  size_t bytes = kUntouched;
  const flashmoe_status sized = call->workspace_size(&bytes);
  EXPECT(*call, sized == planned);
  EXPECT(*call, (sized == FLASHMOE_OK) == (bytes != kUntouched));

  void* const stream = reinterpret_cast<void*>(uintptr_t{0xdead});  // the CPU must not look
  if (judgement.verdict == Verdict::kInvalid) {
    EXPECT(*call, planned != FLASHMOE_OK);
    ++tally.invalid;
    const std::string sentence = flashmoe_last_error();
    ++tally.blamed[sentence.substr(0, sentence.find(':'))];
    const Memory workspace = allocate_memory(64);
    const flashmoe_status status = call->run(workspace.get(), 64, stream);
    EXPECT(*call, status == planned);
    expect_refusal(*call, judgement, status);
    expect_memory_unchanged(*call);
    return;
  }

  if (planned == FLASHMOE_OK && judgement.memory == Verdict::kInvalid) {
    return expect_launch_refusal(call, judgement, bytes, stream);
  }

  // Valid, but perhaps of memory that is not there: then planning is all that can be asked for.
  bool backed = true;
  for (size_t i = 0; i < call->arguments.size(); ++i) {
    const Argument& argument = *call->arguments[i];
    const flashmoe_tensor* const given = *call->slots[i];
    backed = backed && (given == nullptr || given == &argument.tensor);
    const bool is_scale =
        call->params.k_scale == &argument.tensor || call->params.v_scale == &argument.tensor;
    if (given != nullptr || is_scale) backed = backed && argument.backed();
  }
  backed = backed && judgement.memory == Verdict::kValid;
  ++(judgement.verdict == Verdict::kValid ? tally.valid : tally.either);
  if (!backed) {
    EXPECT(*call, judgement.verdict == Verdict::kEither || planned == FLASHMOE_OK ||
                      planned == FLASHMOE_ERROR_UNSUPPORTED);
    return;
  }
  if (judgement.verdict == Verdict::kValid) EXPECT(*call, planned == FLASHMOE_OK);
  if (planned != FLASHMOE_OK) return expect_memory_unchanged(*call);
  const Memory workspace = allocate_memory(bytes);
  try_workspaces(random, call, workspace, bytes);
  EXPECT(*call, call->run(workspace.get(), bytes, stream) == FLASHMOE_OK);
  ++tally.computed;
  // Results of keys with scales are compared by fuzz_sequences.
  if (!call->is_backward) {
    const flashmoe_attention_forward_params given = as_given(call->params);
    if (given.k_scale != nullptr || given.v_scale != nullptr) return;
  }
  call->is_backward ? expect_gradients(call) : expect_output(call);
}

// ---- the other entry points -----------------------------------------------------------------

void run_other(Random* random) {
  ++tally.other;
  const auto refuse = [](flashmoe_status status, const char* name) {
    CHECK(status == FLASHMOE_ERROR_INVALID_ARGUMENT || status == FLASHMOE_ERROR_NO_DEVICE);
    CHECK(is_sentence(flashmoe_last_error()));
    CHECK(std::strstr(flashmoe_last_error(), name) != nullptr);
    ++tally.blamed[name];
  };
  // A buffer as large as any of the structs, with a wrong struct_size first; must stay as it is.
  alignas(8) unsigned char words[sizeof(flashmoe_plan) + 64];
  std::memset(words, kPoison, sizeof words);
  const size_t wrong_size = random->one_of({size_t{0}, size_t{7}, sizeof words, SIZE_MAX});
  std::memcpy(words, &wrong_size, sizeof wrong_size);
  unsigned char before[sizeof words];
  std::memcpy(before, words, sizeof words);
  const bool null = random->chance(0.3);
  void* target = null ? nullptr : words;
  const int32_t strange = random->one_of({-1, 5, 99, 4097, INT32_MAX, INT32_MIN});
  Call call(random->chance(0.5));
  make_valid(random, &call);
  switch (random->below(8)) {
    case 0:
      refuse(flashmoe_set_num_threads(strange == 5 || strange == 99 ? 4097 : strange), "n:");
      break;
    case 1: refuse(flashmoe_set_log(strange, nullptr, nullptr), "level:"); break;
    case 2:
      refuse(flashmoe_get_build_info(static_cast<flashmoe_build_info*>(target)),
             null ? "info:" : "struct_size");
      break;
    case 3:
      refuse(flashmoe_get_device_info({FLASHMOE_DEVICE_CPU, 0},
                                      static_cast<flashmoe_device_info*>(target)),
             null ? "info:" : "struct_size");
      break;
    case 4: {
      flashmoe_device_info info = flashmoe_device_info_init();
      refuse(flashmoe_get_device_info({random->one_of({-1, 0, 4, 7, 99}), 0}, &info), "device:");
      refuse(flashmoe_get_device_info({FLASHMOE_DEVICE_CUDA, 1000}, &info), "device");
      break;
    }
    case 5: {
      int32_t count = 0;
      refuse(flashmoe_last_launches(nullptr, &count), "launches:");
      refuse(flashmoe_last_launches(reinterpret_cast<flashmoe_launch*>(words), nullptr), "count:");
      CHECK(count == 0);
      break;
    }
    case 6:
      refuse(call.plan(static_cast<flashmoe_plan*>(target)), null ? "plan:" : "struct_size");
      break;
    default: refuse(call.workspace_size(nullptr), "bytes:");
  }
  CHECK(std::memcmp(words, before, sizeof words) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : 20000;
  tally.seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("fuzz_invalid %" PRId64 " %" PRIu64 "\n", calls, tally.seed);
  std::fflush(stdout);

  for (tally.call_number = 0; tally.call_number < calls; ++tally.call_number) {
    // Every call has a generator of its own, so that one can be looked at alone.
    Random random(tally.seed * 1000003 + static_cast<uint64_t>(tally.call_number));
    if (random.chance(0.05)) {
      run_other(&random);
      continue;
    }
    if (random.chance(0.02)) {
      CHECK(flashmoe_set_num_threads(random.one_of({0, 1, 2, 5})) == FLASHMOE_OK);
    }
    Call call(random.chance(0.5));
    make_valid(&random, &call);
    const int64_t faults = random.chance(0.15) ? 0 : random.one_of<int64_t>({1, 1, 1, 2, 3});
    for (int64_t i = 0; i < faults; ++i) {
      call.faults += std::string(" ") + put_fault(&random, &call);
    }
    run(&random, &call);
  }

  std::printf(
      "%" PRId64 " calls: %" PRId64 " invalid, %" PRId64 " valid, %" PRId64 " undecided, %" PRId64
      " of other functions; %" PRId64 " computed and compared, %" PRId64 " of shared memory\n",
      calls, tally.invalid, tally.valid, tally.either, tally.other, tally.computed, tally.shared);
  std::printf("blamed:");
  for (const auto& [name, count] : tally.blamed)
    std::printf(" %s %" PRId64 ",", name.c_str(), count);
  std::printf("\n");
  return 0;
}
