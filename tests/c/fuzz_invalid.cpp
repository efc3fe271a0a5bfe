// Random calls through the C ABI, most of them invalid: fuzz_invalid [calls] [seed].
//
// A valid attention call is made, at most three faults are put into it, and the oracle of
// call_oracle.h says what must come of it:
//   invalid  every entry point refuses it with a sentence that blames a guilty argument, and no
//            byte of an output, of a plan or of the tensors' memory has changed;
//   valid    it succeeds, writes every element of its outputs and nothing between or around them,
//            and the result agrees with a plain loop in double precision.
// Meant to be built with AddressSanitizer and UBSan; the tensors' memory ends where it is said to.
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "call_oracle.h"
#include "check.h"
#include "flashmoe/flashmoe.h"

namespace {

constexpr unsigned char kPoison = 0xA5;
constexpr size_t kAlignment = 64;
constexpr size_t kGuard = 128;  // bytes around an output

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t range(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < p; }
  template <typename T, size_t n>
  T one_of(const T (&values)[n]) {
    return values[below(n)];
  }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

// ---- number formats -------------------------------------------------------------------------

double from_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double load(const unsigned char* at, flashmoe_dtype dtype) {
  uint32_t word = 0;
  if (dtype.bits == 32) {
    std::memcpy(&word, at, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, at, 2);
    if (dtype.code == FLASHMOE_DTYPE_FLOAT) return from_half(half);
    word = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return static_cast<double>(value);
}

// A random number in about [-2, 2], exact in its format, as bits.
void store_random(Random* random, unsigned char* at, flashmoe_dtype dtype) {
  const uint32_t bits = static_cast<uint32_t>(random->bits());
  if (dtype.bits == 32) {
    const float value = static_cast<float>(bits >> 8) * 0x1p-22f - 2.0f;
    std::memcpy(at, &value, 4);
  } else {
    // Exponents from 2^-4 to 2^0, any fraction.
    const uint32_t exponent =
        dtype.code == FLASHMOE_DTYPE_FLOAT ? 11 + (bits >> 20) % 5 : 123 + (bits >> 20) % 5;
    const int fraction_bits = dtype.code == FLASHMOE_DTYPE_FLOAT ? 10 : 7;
    const uint16_t half = static_cast<uint16_t>(((bits & 1) << 15) | (exponent << fraction_bits) |
                                                ((bits >> 4) & ((1u << fraction_bits) - 1)));
    std::memcpy(at, &half, 2);
  }
}

// Of outputs of magnitude 2; a logit is a sum of `dim` products, and its error enters the exponent.
double tolerance(flashmoe_dtype dtype, double scale, int64_t dim) {
  const double unit = dtype.bits == 32 ? 2e-5 : dtype.code == FLASHMOE_DTYPE_FLOAT ? 4e-3 : 3e-2;
  return unit * (1 + scale * static_cast<double>(dim) / 64);
}

// ---- one argument and its memory ------------------------------------------------------------

struct Freer {
  void operator()(void* block) const { std::free(block); }
};

struct Argument {
  const char* name = "";
  int rank = 4;
  int64_t shape[8] = {};  // longer than any rank that a fault may claim and the library may read
  int64_t strides[8] = {};
  flashmoe_tensor tensor = {};
  std::unique_ptr<unsigned char, Freer> block;
  size_t block_bytes = 0;
  std::vector<unsigned char> before;  // the block as it was given to the library

  bool unchanged() const {
    return block_bytes == 0 || std::memcmp(block.get(), before.data(), block_bytes) == 0;
  }

  // Lays the tensor out in memory of its own: axes in random order, random gaps, directions and
  // broadcasts, then fills it.
  void allocate(Random* random, bool output) {
    const int64_t bytes = tensor.dtype.bits / 8;
    const int64_t row = rank == 4 ? 16 / bytes : 1;  // strides are multiples of this
    int order[4] = {0, 1, 2, 3};
    for (int i = 2; i > 0; --i) {
      if (random->chance(0.4)) std::swap(order[i], order[random->below(i + 1)]);
    }
    int64_t reach = 1;
    bool empty = false;
    const bool packed = random->chance(0.5);
    for (int i = rank - 1; i >= 0; --i) {
      const int axis = rank == 3 && order[i] == 3 ? 0 : order[i];
      const int64_t gap = packed || axis == rank - 1 ? 0 : random->below(3);
      strides[axis] = axis == rank - 1 ? 1 : (reach + row - 1) / row * row + gap * row;
      reach = strides[axis] * (shape[axis] > 0 ? shape[axis] : 1);
      empty = empty || shape[axis] == 0;
    }
    int64_t low = 0;
    int64_t high = 0;
    for (int axis = 0; axis < rank; ++axis) {
      const bool free_axis = axis != 3 && !packed;
      if (free_axis && !output && random->chance(0.05)) strides[axis] = 0;
      if (free_axis && random->chance(0.1)) strides[axis] = -strides[axis];
      // The stride of an axis of one element is never used, whatever it is.
      if (axis != rank - 1 && shape[axis] == 1 && random->chance(0.2)) {
        strides[axis] = random->one_of({INT64_MAX, INT64_MIN, int64_t{1}, int64_t{0}});
      }
      if (shape[axis] > 1) {
        (strides[axis] < 0 ? low : high) += (shape[axis] - 1) * strides[axis];
      }
    }
    const size_t guard = output ? kGuard : 0;
    const size_t used = empty ? 0 : static_cast<size_t>((high - low + 1) * bytes);
    block_bytes = used + 2 * guard;
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, block_bytes > 0 ? block_bytes : 1) != 0) std::abort();
    block.reset(static_cast<unsigned char*>(memory));
    std::memset(block.get(), kPoison, block_bytes);
    if (!output) {
      for (size_t at = 0; at < used; at += static_cast<size_t>(bytes)) {
        store_random(random, block.get() + at, tensor.dtype);
      }
    }
    before.assign(block.get(), block.get() + block_bytes);

    const uintptr_t address =
        reinterpret_cast<uintptr_t>(block.get()) + guard + static_cast<uintptr_t>(-low * bytes);
    tensor.byte_offset = random->chance(0.2) ? 16 * static_cast<uint64_t>(random->below(100)) : 0;
    tensor.data = reinterpret_cast<void*>(address - tensor.byte_offset);
    if (empty) {
      tensor.byte_offset = 0;
      if (random->chance(0.5)) tensor.data = nullptr;
    }
    tensor.ndim = rank;
    tensor.shape = shape;
    tensor.strides = packed && order[0] == 0 && order[1] == 1 && order[2] == 2 &&
                             random->chance(0.5) && natural()
                         ? nullptr
                         : strides;
  }

  bool natural() const {
    int64_t expected = 1;
    for (int axis = rank - 1; axis >= 0; --axis) {
      if (strides[axis] != expected) return false;
      expected *= shape[axis];
    }
    return true;
  }

  int64_t stride(int axis) const {
    if (tensor.strides != nullptr) return tensor.strides[axis];
    uint64_t packed = 1;  // may wrap for extents that a fault made
    for (int i = rank - 1; i > axis; --i) packed *= static_cast<uint64_t>(shape[i]);
    return static_cast<int64_t>(packed);
  }

  // Whether every element that a valid call may touch lies in the block.
  bool backed() const {
    if (tensor.ndim != rank || tensor.shape != shape) return false;
    Wide low = 0;
    Wide high = tensor.dtype.bits / 8;
    for (int axis = 0; axis < rank; ++axis) {
      if (shape[axis] == 0) return true;
      if (shape[axis] == 1) continue;
      const Wide reach =
          static_cast<Wide>(shape[axis] - 1) * stride(axis) * (tensor.dtype.bits / 8);
      (reach < 0 ? low : high) += reach;
    }
    const uintptr_t address =
        reinterpret_cast<uintptr_t>(tensor.data) + static_cast<uintptr_t>(tensor.byte_offset);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(block.get());
    const Wide offset = static_cast<Wide>(address) - begin;
    return offset + low >= 0 && offset + high <= static_cast<Wide>(block_bytes);
  }

  const unsigned char* element(int64_t a, int64_t b, int64_t c, int64_t d) const {
    // Not through the stride of a one-element axis, which may be anything.
    int64_t offset = 0;
    const int64_t index[4] = {a, b, c, d};
    for (int axis = 0; axis < rank; ++axis) {
      if (index[axis] != 0) offset += index[axis] * stride(axis);
    }
    return static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset +
           offset * (tensor.dtype.bits / 8);
  }
};

// ---- a call ---------------------------------------------------------------------------------

struct Call {
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  bool null_params = false;
  Argument q, k, v, out, lse;
  std::string kernel;
  std::string faults;

  const flashmoe_attention_forward_params* given() const { return null_params ? nullptr : &params; }
  Argument* arguments[5] = {&q, &k, &v, &out, &lse};
  const flashmoe_tensor** slots[5] = {&params.q, &params.k, &params.v, &params.out, &params.lse};

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

void make_valid(Random* random, Call* call) {
  const flashmoe_dtype dtype = random->one_of<flashmoe_dtype>({{FLASHMOE_DTYPE_FLOAT, 32, 1},
                                                               {FLASHMOE_DTYPE_FLOAT, 16, 1},
                                                               {FLASHMOE_DTYPE_BFLOAT, 16, 1}});
  const int64_t batch = random->chance(0.05) ? 0 : random->range(1, 3);
  const int64_t seq_q = random->chance(0.05) ? 0 : random->range(1, 12);
  const int64_t seq_k = random->chance(0.05) ? 0 : random->range(1, 12);
  const int64_t heads_kv = random->range(1, 3);
  const int64_t heads_q = heads_kv * random->range(1, 3);
  const int64_t dim = 8 * (random->chance(0.05) ? random->range(1, 32) : random->range(1, 5));
  const int64_t dim_v = random->chance(0.5) ? dim : 8 * random->range(1, 5);
  const bool bhsd = random->chance(0.5);
  call->params.layout = bhsd ? FLASHMOE_LAYOUT_BHSD : FLASHMOE_LAYOUT_BSHD;
  call->params.causal = static_cast<int32_t>(random->below(3));
  call->params.scale = random->one_of({0.0f, 0.0f, -0.0f, 0.125f, 1.0f, 1e-30f});
  if (random->chance(0.3)) call->params.kernel = random->one_of({"cpu", ""});

  const char* const names[5] = {"q", "k", "v", "out", "lse"};
  const int64_t shapes[4][4] = {{batch, seq_q, heads_q, dim},
                                {batch, seq_k, heads_kv, dim},
                                {batch, seq_k, heads_kv, dim_v},
                                {batch, seq_q, heads_q, dim_v}};
  for (int i = 0; i < 5; ++i) {
    Argument& argument = *call->arguments[i];
    argument.name = names[i];
    argument.rank = i == 4 ? 3 : 4;
    argument.tensor.dtype = dtype;
    argument.tensor.device = {random->chance(0.1) ? FLASHMOE_DEVICE_CUDA_HOST : FLASHMOE_DEVICE_CPU,
                              0};
    if (i < 4) {
      std::memcpy(argument.shape, shapes[i], sizeof shapes[i]);
      if (bhsd) std::swap(argument.shape[1], argument.shape[2]);
    } else {
      argument.tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
      argument.shape[0] = batch, argument.shape[1] = heads_q, argument.shape[2] = seq_q;
    }
    argument.allocate(random, i >= 3);
    *call->slots[i] = &argument.tensor;
  }
  if (random->chance(0.5)) call->params.lse = nullptr;
}

// ---- faults ---------------------------------------------------------------------------------

// Near the value that is there, or far from any; the near ones may wrap around.
int64_t strange_extent(Random* random, int64_t value) {
  const uint64_t now = static_cast<uint64_t>(value);
  return static_cast<int64_t>(random->one_of<uint64_t>(
      {0, 1, now + 1, now - 1, now * 2, ~now + 1, UINT64_MAX, INT64_MAX, uint64_t{1} << 31,
       uint64_t{1} << 32, uint64_t{1} << 40, uint64_t{1} << 62, uint64_t{1} << 63}));
}

int64_t strange_stride(Random* random, int64_t value) {
  const uint64_t now = static_cast<uint64_t>(value);
  return static_cast<int64_t>(
      random->one_of<uint64_t>({0, 1, 2, 8, 16, now + 1, now - 8, ~now + 1, now / 2, UINT64_MAX,
                                INT64_MAX, uint64_t{1} << 40, uint64_t{1} << 58, uint64_t{1} << 60,
                                uint64_t{15} << 60, uint64_t{1} << 63}));
}

Argument& any_argument(Random* random, Call* call) { return *call->arguments[random->below(5)]; }

void null_tensor(Random* random, Call* call) { *call->slots[random->below(4)] = nullptr; }

void null_params(Random*, Call* call) { call->null_params = true; }

void struct_size(Random* random, Call* call) {
  const size_t real = sizeof call->params;
  call->params.struct_size = random->one_of(
      {size_t{0}, size_t{1}, real - 1, real - 8, real + 1, real + 8, real * 2, SIZE_MAX});
}

void wrong_layout(Random* random, Call* call) {
  call->params.layout = random->one_of({-1, 2, 3, 100, INT32_MAX, INT32_MIN});
}

void wrong_causal(Random* random, Call* call) {
  call->params.causal = random->one_of({-1, 3, 4, 100, INT32_MAX, INT32_MIN});
}

void wrong_scale(Random* random, Call* call) {
  using limits = std::numeric_limits<float>;
  call->params.scale = random->one_of({limits::quiet_NaN(), -limits::quiet_NaN(),
                                       limits::infinity(), -limits::infinity(), -1.0f, -1e-30f,
                                       -limits::denorm_min(), limits::lowest()});
}

void reserved_set(Random* random, Call* call) {
  call->params.reserved = random->one_of({1u, 2u, 0x80000000u, 0xffffffffu});
}

void unknown_kernel(Random* random, Call* call) {
  call->kernel = random->one_of<const char*>(
      {"sm89", "sm90", "CPU", "cpu ", " cpu", "%s%s%s%n", "nonsense", "cp", "\n", "\xff\xfe"});
  if (random->chance(0.1)) call->kernel.assign(10000, 'x');
  call->params.kernel = call->kernel.c_str();
}

void wrong_rank(Random* random, Call* call) {
  Argument& argument = any_argument(random, call);
  argument.tensor.ndim = random->one_of({-1, 0, 1, 2, 3, 4, 5, 6, INT32_MAX, INT32_MIN});
}

void null_shape(Random* random, Call* call) { any_argument(random, call).tensor.shape = nullptr; }

void null_strides(Random* random, Call* call) {
  any_argument(random, call).tensor.strides = nullptr;
}

void wrong_dtype(Random* random, Call* call) {
  flashmoe_dtype& dtype = any_argument(random, call).tensor.dtype;
  dtype.code = random->one_of<uint8_t>({0, 1, 2, 3, 4, 5, 6, 7, 17, 255});
  dtype.bits = random->one_of<uint8_t>({0, 1, 4, 8, 16, 32, 64, 128, 255});
  dtype.lanes = random->chance(0.7) ? 1 : random->one_of<uint16_t>({0, 2, 4, 65535});
}

void wrong_device(Random* random, Call* call) {
  any_argument(random, call).tensor.device.device_type =
      random->one_of({-1, 0, 2, 4, 7, 10, 13, 14, INT32_MAX, INT32_MIN});
}

void all_on_cuda(Random* random, Call* call) {
  for (Argument* argument : call->arguments) {
    argument->tensor.device = {FLASHMOE_DEVICE_CUDA, static_cast<int32_t>(random->range(-1, 1))};
  }
}

void one_extent(Random* random, Call* call) {
  Argument& argument = any_argument(random, call);
  int64_t& extent = argument.shape[random->below(argument.rank)];
  extent = strange_extent(random, extent);
}

// The same strange batch in every tensor: consistent, and perhaps too much.
void every_batch(Random* random, Call* call) {
  const int64_t batch = strange_extent(random, call->q.shape[0]);
  for (Argument* argument : call->arguments) argument->shape[0] = batch;
}

void every_dim(Random* random, Call* call) {
  const int64_t dim = random->one_of<int64_t>({0, 1, 4, 7, 9, 12, 20, 260, 264, 512, 1LL << 40});
  if (random->chance(0.5)) call->q.shape[3] = call->k.shape[3] = dim;
  if (random->chance(0.5)) call->v.shape[3] = call->out.shape[3] = dim;
}

void other_heads(Random* random, Call* call) {
  const int axis = call->params.layout == FLASHMOE_LAYOUT_BHSD ? 1 : 2;
  const int64_t heads = random->one_of<int64_t>({0, 2, 3, 4, 5, 7, -3, 1LL << 62});
  if (random->chance(0.5)) {
    call->k.shape[axis] = call->v.shape[axis] = heads;
  } else {
    call->q.shape[axis] = call->out.shape[axis] = call->lse.shape[1] = heads;
  }
}

void one_stride(Random* random, Call* call) {
  Argument& argument = any_argument(random, call);
  for (int axis = 0; axis < argument.rank; ++axis) argument.strides[axis] = argument.stride(axis);
  int64_t& stride = argument.strides[random->below(argument.rank)];
  stride = strange_stride(random, stride);
  argument.tensor.strides = argument.strides;
}

// Outputs whose elements meet: a stride of zero, two axes with one stride, rows too close.
void overlapping_output(Random* random, Call* call) {
  Argument& argument = random->chance(0.6) ? call->out : call->lse;
  if (argument.rank == 3) call->params.lse = &argument.tensor;
  for (int axis = 0; axis < argument.rank; ++axis) argument.strides[axis] = argument.stride(axis);
  const int axis = static_cast<int>(random->below(argument.rank - 1));
  argument.strides[axis] = random->one_of(
      {int64_t{0}, argument.strides[(axis + 1) % argument.rank], int64_t{8}, int64_t{-8}});
  argument.tensor.strides = argument.strides;
}

void null_data(Random* random, Call* call) { any_argument(random, call).tensor.data = nullptr; }

void misaligned(Random* random, Call* call) {
  Argument& argument = any_argument(random, call);
  const int64_t shift = random->one_of<int64_t>({1, 2, 4, 8, -1, -2, -8, 12});
  if (random->chance(0.5)) {
    argument.tensor.byte_offset += static_cast<uint64_t>(shift);
  } else {
    argument.tensor.data = reinterpret_cast<void*>(
        reinterpret_cast<uintptr_t>(argument.tensor.data) + static_cast<uintptr_t>(shift));
  }
}

void far_offset(Random* random, Call* call) {
  any_argument(random, call).tensor.byte_offset =
      random->one_of({UINT64_MAX, UINT64_MAX - 15, UINT64_MAX / 2 + 1, uint64_t{1} << 63});
}

// One tensor in the place of another.
void swapped(Random* random, Call* call) {
  const int64_t from = random->below(5);
  const int64_t to = random->below(5);
  *call->slots[to] = &call->arguments[from]->tensor;
}

struct Fault {
  const char* name;
  void (*apply)(Random*, Call*);
};

constexpr Fault kFaults[] = {
    {"null_tensor", null_tensor},   {"null_params", null_params},
    {"struct_size", struct_size},   {"wrong_layout", wrong_layout},
    {"wrong_causal", wrong_causal}, {"wrong_scale", wrong_scale},
    {"reserved_set", reserved_set}, {"unknown_kernel", unknown_kernel},
    {"wrong_rank", wrong_rank},     {"null_shape", null_shape},
    {"null_strides", null_strides}, {"wrong_dtype", wrong_dtype},
    {"wrong_device", wrong_device}, {"all_on_cuda", all_on_cuda},
    {"one_extent", one_extent},     {"every_batch", every_batch},
    {"every_dim", every_dim},       {"other_heads", other_heads},
    {"one_stride", one_stride},     {"overlapping_output", overlapping_output},
    {"null_data", null_data},       {"misaligned", misaligned},
    {"far_offset", far_offset},     {"swapped", swapped},
};

// ---- running and judging --------------------------------------------------------------------

void describe(const Call& call) {
  std::fprintf(stderr, "  faults:%s\n", call.faults.c_str());
  const flashmoe_attention_forward_params& p = call.params;
  std::fprintf(stderr, "  params=%s struct_size=%zu layout=%d causal=%d scale=%g reserved=%u\n",
               call.null_params ? "null" : "given", p.struct_size, p.layout, p.causal,
               static_cast<double>(p.scale), p.reserved);
  for (int i = 0; i < 5; ++i) {
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
  int64_t invalid = 0, valid = 0, computed = 0, either = 0, other = 0;
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
  EXPECT(call,
         blames(judgement, sentence) || (unsupported && judgement.verdict != Verdict::kInvalid));
}

void expect_memory_unchanged(const Call& call) {
  for (const Argument* argument : call.arguments) EXPECT(call, argument->unchanged());
}

// out and lse against a plain loop; then everything but their elements against the poison.
void expect_result(Call* call) {
  const flashmoe_attention_forward_params& p = call->params;
  const bool bhsd = p.layout == FLASHMOE_LAYOUT_BHSD;
  const int seq = bhsd ? 2 : 1;
  const int head = bhsd ? 1 : 2;
  const auto at = [bhsd](const Argument& a, int64_t b, int64_t s, int64_t h, int64_t d) {
    return bhsd ? a.element(b, h, s, d) : a.element(b, s, h, d);
  };
  const int64_t seq_q = call->q.shape[seq], seq_k = call->k.shape[seq];
  const int64_t heads_q = call->q.shape[head], group = heads_q / call->k.shape[head];
  const int64_t dim = call->q.shape[3], dim_v = call->v.shape[3];
  const flashmoe_dtype dtype = call->q.tensor.dtype;
  const double scale =
      p.scale != 0 ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(dim));
  const auto restore = [](Argument* argument, const unsigned char* element, size_t bytes) {
    const size_t offset = static_cast<size_t>(element - argument->block.get());
    std::memcpy(argument->block.get() + offset, argument->before.data() + offset, bytes);
  };
  std::vector<double> weight(static_cast<size_t>(seq_k));
  const int64_t batch = seq_q == 0 ? 0 : call->q.shape[0];  // of no rows there may be many
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads_q; ++h) {
      for (int64_t i = 0; i < seq_q; ++i) {
        int64_t visible = seq_k;
        if (p.causal == FLASHMOE_CAUSAL_TOP_LEFT) visible = i + 1;
        if (p.causal == FLASHMOE_CAUSAL_BOTTOM_RIGHT) visible = i + seq_k - seq_q + 1;
        visible = visible < 0 ? 0 : visible > seq_k ? seq_k : visible;
        double largest = -HUGE_VAL;
        for (int64_t j = 0; j < visible; ++j) {
          double score = 0;
          for (int64_t d = 0; d < dim; ++d) {
            score +=
                load(at(call->q, b, i, h, d), dtype) * load(at(call->k, b, j, h / group, d), dtype);
          }
          weight[static_cast<size_t>(j)] = score * scale;
          largest = std::fmax(largest, score * scale);
        }
        double sum = 0;
        for (int64_t j = 0; j < visible; ++j) {
          weight[static_cast<size_t>(j)] = std::exp(weight[static_cast<size_t>(j)] - largest);
          sum += weight[static_cast<size_t>(j)];
        }
        for (int64_t d = 0; d < dim_v; ++d) {
          double expected = 0;
          for (int64_t j = 0; j < visible; ++j) {
            expected +=
                weight[static_cast<size_t>(j)] / sum * load(at(call->v, b, j, h / group, d), dtype);
          }
          const unsigned char* element = at(call->out, b, i, h, d);
          EXPECT(*call, std::fabs(load(element, dtype) - expected) <= tolerance(dtype, scale, dim));
          restore(&call->out, element, dtype.bits / 8);
        }
        if (p.lse == nullptr) continue;
        const unsigned char* element = call->lse.element(b, h, i, 0);
        const double lse = load(element, call->lse.tensor.dtype);
        if (visible == 0) {
          EXPECT(*call, lse == -HUGE_VAL);
        } else {
          EXPECT(*call, std::fabs(lse - (largest + std::log(sum))) <= 1e-3);
        }
        restore(&call->lse, element, sizeof(float));
      }
    }
  }
  expect_memory_unchanged(*call);
}

struct Workspace {
  std::unique_ptr<unsigned char, Freer> memory;
  explicit Workspace(size_t bytes) {
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, bytes > 0 ? bytes : 1) != 0) std::abort();
    memory.reset(static_cast<unsigned char*>(block));
  }
};

// What is wrong with a workspace, when the call needs one.
void try_workspaces(Random* random, const Call& call, const Workspace& workspace, size_t bytes) {
  if (bytes == 0) return;
  const size_t small = static_cast<size_t>(random->bits()) % bytes;
  EXPECT(call, flashmoe_attention_forward(call.given(), workspace.memory.get(), small, nullptr) ==
                   FLASHMOE_ERROR_WORKSPACE_TOO_SMALL);
  EXPECT(call, std::strstr(flashmoe_last_error(), "workspace_size:") == flashmoe_last_error());
  EXPECT(call, flashmoe_attention_forward(call.given(), nullptr, bytes, nullptr) ==
                   FLASHMOE_ERROR_INVALID_ARGUMENT);
  EXPECT(call, std::strstr(flashmoe_last_error(), "workspace:") == flashmoe_last_error());
  const int64_t shift = random->range(1, 15);
  EXPECT(call, flashmoe_attention_forward(call.given(), workspace.memory.get() + shift, bytes,
                                          nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  expect_memory_unchanged(call);
}

void run(Random* random, Call* call) {
  const Judgement judgement = judge(call->given());

  flashmoe_attention_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_attention_plan plan_before;
  std::memcpy(static_cast<void*>(&plan_before), &plan, sizeof plan);
  const flashmoe_status planned = flashmoe_attention_forward_plan(call->given(), &plan);
  if (planned != FLASHMOE_OK) {
    expect_refusal(*call, judgement, planned);
    EXPECT(*call, std::memcmp(&plan, &plan_before, sizeof plan) == 0);
  }
  constexpr size_t kUntouched = 0x5a5a5a5a;
  size_t bytes = kUntouched;
  const flashmoe_status sized = flashmoe_attention_forward_workspace_size(call->given(), &bytes);
  EXPECT(*call, sized == planned);
  EXPECT(*call, (sized == FLASHMOE_OK) == (bytes != kUntouched));

  void* const stream = reinterpret_cast<void*>(uintptr_t{0xdead});  // the CPU must not look
  if (judgement.verdict == Verdict::kInvalid) {
    ++tally.invalid;
    const std::string sentence = flashmoe_last_error();
    ++tally.blamed[sentence.substr(0, sentence.find(':'))];
    const Workspace workspace(64);
    const flashmoe_status status =
        flashmoe_attention_forward(call->given(), workspace.memory.get(), 64, stream);
    EXPECT(*call, status == planned);
    expect_refusal(*call, judgement, status);
    expect_memory_unchanged(*call);
    return;
  }

  // Valid, but perhaps of memory that is not there: then planning is all that can be asked for.
  bool backed = true;
  for (int i = 0; i < 5; ++i) {
    const bool own = *call->slots[i] == &call->arguments[i]->tensor;
    backed = backed && (*call->slots[i] == nullptr || (own && call->arguments[i]->backed()));
  }
  ++(judgement.verdict == Verdict::kValid ? tally.valid : tally.either);
  if (!backed) {
    EXPECT(*call, judgement.verdict == Verdict::kEither || planned == FLASHMOE_OK ||
                      planned == FLASHMOE_ERROR_UNSUPPORTED);
    return;
  }
  if (judgement.verdict == Verdict::kValid) EXPECT(*call, planned == FLASHMOE_OK);
  if (planned != FLASHMOE_OK) return expect_memory_unchanged(*call);
  const Workspace workspace(bytes);
  try_workspaces(random, *call, workspace, bytes);
  EXPECT(*call, flashmoe_attention_forward(call->given(), workspace.memory.get(), bytes, stream) ==
                    FLASHMOE_OK);
  ++tally.computed;
  expect_result(call);
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
  alignas(8) unsigned char words[2048];
  std::memset(words, kPoison, sizeof words);
  const size_t wrong_size = random->one_of({size_t{0}, size_t{7}, size_t{2000}, SIZE_MAX});
  std::memcpy(words, &wrong_size, sizeof wrong_size);
  unsigned char before[sizeof words];
  std::memcpy(before, words, sizeof words);
  const bool null = random->chance(0.3);
  void* target = null ? nullptr : words;
  const int32_t strange = random->one_of({-1, 5, 99, 4097, INT32_MAX, INT32_MIN});
  Call call;
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
    case 5:
      refuse(flashmoe_last_launch(static_cast<flashmoe_launch*>(target)),
             null ? "launch:" : "struct_size");
      break;
    case 6:
      refuse(flashmoe_attention_forward_plan(call.given(),
                                             static_cast<flashmoe_attention_plan*>(target)),
             null ? "plan:" : "struct_size");
      break;
    default: refuse(flashmoe_attention_forward_workspace_size(call.given(), nullptr), "bytes:");
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
    Call call;
    make_valid(&random, &call);
    const int64_t faults = random.chance(0.15) ? 0 : random.one_of<int64_t>({1, 1, 1, 2, 3});
    for (int64_t i = 0; i < faults; ++i) {
      const Fault& fault = random.one_of(kFaults);
      call.faults += std::string(" ") + fault.name;
      fault.apply(&random, &call);
    }
    run(&random, &call);
  }

  std::printf("%" PRId64 " calls: %" PRId64 " invalid, %" PRId64 " valid, %" PRId64
              " undecided, %" PRId64 " of other functions; %" PRId64 " computed and compared\n",
              calls, tally.invalid, tally.valid, tally.either, tally.other, tally.computed);
  std::printf("blamed:");
  for (const auto& [name, count] : tally.blamed)
    std::printf(" %s %" PRId64 ",", name.c_str(), count);
  std::printf("\n");
  return 0;
}
