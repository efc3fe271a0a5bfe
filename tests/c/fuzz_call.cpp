#include "fuzz_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "call_oracle.h"

namespace {

constexpr size_t kGuard = 128;  // bytes around an output

double from_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// A random number in about [-2, 2], exact in its format, as bits.
void store_random(Random* random, unsigned char* at, flashmoe_dtype dtype) {
  const uint32_t bits = static_cast<uint32_t>(random->bits());
  if (dtype.bits == 8 && dtype.code != FLASHMOE_DTYPE_FLOAT8_E4M3FN) {  // of a mask
    *at = bits % 3 == 0 ? 0 : static_cast<unsigned char>(1 + (bits >> 8) % 255);
  } else if (dtype.bits == 64) {
    const double value = static_cast<double>(bits) * 0x1p-30 - 2.0;
    std::memcpy(at, &value, 8);
  } else if (dtype.bits == 32) {
    const float value = static_cast<float>(bits >> 8) * 0x1p-22f - 2.0f;
    std::memcpy(at, &value, 4);
  } else if (dtype.bits == 8) {
    // e4m3: the same, by its bias of 7.
    *at = static_cast<unsigned char>(((bits & 1) << 7) | ((3 + (bits >> 20) % 5) << 3) |
                                     ((bits >> 4) & 7));
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

}  // namespace

double load(const unsigned char* at, flashmoe_dtype dtype) {
  if (dtype.bits == 64) {
    double value;
    std::memcpy(&value, at, 8);
    return value;
  }
  if (dtype.bits == 8) {
    const int exponent = *at >> 3 & 15;
    const double magnitude =
        exponent == 0 ? std::ldexp(*at & 7, -9) : std::ldexp(8 + (*at & 7), exponent - 10);
    return (*at & 0x80) != 0 ? -magnitude : magnitude;
  }
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

Memory allocate_memory(size_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, kAlignment, bytes > 0 ? bytes : 1) != 0) std::abort();
  return Memory(static_cast<unsigned char*>(block));
}

void Argument::allocate(Random* random, bool output) {
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
    const int axis = rank == 1 || (rank == 3 && order[i] == 3) ? 0 : order[i];
    const bool contiguous = rank == 1 ? packed : axis == rank - 1;
    const int64_t gap = packed || contiguous ? 0 : random->below(3);
    strides[axis] = contiguous ? 1 : (reach + row - 1) / row * row + gap * row;
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
  block = allocate_memory(block_bytes);
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
  tensor.strides =
      packed && order[0] == 0 && order[1] == 1 && order[2] == 2 && random->chance(0.5) && natural()
          ? nullptr
          : strides;
}

bool Argument::unchanged() const {
  return block_bytes == 0 || std::memcmp(block.get(), before.data(), block_bytes) == 0;
}

bool Argument::natural() const {
  int64_t expected = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

int64_t Argument::stride(int axis) const {
  if (tensor.strides != nullptr) return tensor.strides[axis];
  uint64_t packed = 1;  // may wrap for extents that a fault made
  for (int i = rank - 1; i > axis; --i) packed *= static_cast<uint64_t>(shape[i]);
  return static_cast<int64_t>(packed);
}

bool Argument::backed() const {
  if (tensor.ndim != rank || tensor.shape != shape) return false;
  Wide low = 0;
  Wide high = tensor.dtype.bits / 8;
  for (int axis = 0; axis < rank; ++axis) {
    if (shape[axis] == 0) return true;
    if (shape[axis] == 1) continue;
    const Wide elements = (static_cast<Wide>(shape[axis]) - 1) * stride(axis);
    const Wide most = static_cast<Wide>(block_bytes);  // beyond it, bytes and sums may not fit Wide
    if (elements < -most || elements > most) return false;
    const Wide reach = elements * (tensor.dtype.bits / 8);
    (reach < 0 ? low : high) += reach;
  }
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(tensor.data) + static_cast<uintptr_t>(tensor.byte_offset);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(block.get());
  const Wide offset = static_cast<Wide>(address) - begin;
  return offset + low >= 0 && offset + high <= static_cast<Wide>(block_bytes);
}

const unsigned char* Argument::element(int64_t a, int64_t b, int64_t c, int64_t d) const {
  // Not through the stride of a one-element axis, which may be anything.
  int64_t offset = 0;
  const int64_t index[4] = {a, b, c, d};
  if (tensor.strides != nullptr) {
    for (int axis = 0; axis < rank; ++axis) {
      if (index[axis] != 0) offset += index[axis] * tensor.strides[axis];
    }
  } else {
    for (int axis = 0; axis < rank; ++axis) offset = offset * shape[axis] + index[axis];
  }
  return static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset +
         offset * (tensor.dtype.bits / 8);
}

const flashmoe_attention_backward_params* Call::given_backward() {
  if (null_params) return nullptr;
  flashmoe_attention_backward_params& b = backward;
  // A fault is as far from the right size.
  b.struct_size = sizeof b + (params.struct_size - sizeof params);
  b.q = params.q, b.k = params.k, b.v = params.v, b.out = params.out, b.lse = params.lse;
  b.layout = params.layout, b.causal = params.causal;
  b.scale = params.scale, b.softcap = params.softcap, b.kernel = params.kernel;
  b.window = params.window;
  b.window_left = params.window_left, b.window_right = params.window_right;
  b.sequences = params.sequences;
  return &b;
}

bool is_seen(const flashmoe_attention_forward_params& p, int64_t i, int64_t j, int64_t seq_q,
             int64_t seq_k) {
  const Wide place = p.causal == FLASHMOE_CAUSAL_TOP_LEFT ? Wide{i} : Wide{i} + seq_k - seq_q;
  if (p.causal != FLASHMOE_CAUSAL_NONE && j > place) return false;
  if ((p.window & FLASHMOE_WINDOW_LEFT) != 0 && j < place - p.window_left) return false;
  return (p.window & FLASHMOE_WINDOW_RIGHT) == 0 || j <= place + p.window_right;
}

const unsigned char* element_at(const Call& call, const Argument& argument, int64_t b, int64_t s,
                                int64_t h, int64_t d) {
  return call.params.layout == FLASHMOE_LAYOUT_BHSD ? argument.element(b, h, s, d)
                                                    : argument.element(b, s, h, d);
}

namespace {

// Whether the struct that the library reads has the field, and a tensor in it.
bool is_given(const Call& call, const flashmoe_tensor* flashmoe_attention_forward_params::* forward,
              const flashmoe_tensor* flashmoe_attention_backward_params::* backward) {
  if (!call.is_backward) return as_given(call.params).*forward != nullptr;
  flashmoe_attention_backward_params known = {};
  std::memcpy(&known, &call.backward, std::min(call.backward.struct_size, sizeof known));
  return known.*backward != nullptr;
}

}  // namespace

const unsigned char* pair_at(const Argument& argument, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t* const shape = argument.shape;
  return argument.element(shape[0] == 1 ? 0 : b, shape[1] == 1 ? 0 : h, shape[2] == 1 ? 0 : i,
                          shape[3] == 1 ? 0 : j);
}

bool sees(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j) {
  const flashmoe_attention_forward_params p = as_given(call.params);
  const int seq = p.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1;
  if (!is_seen(p, i, j, call.q.shape[seq], call.k.shape[seq])) return false;
  const bool masked = is_given(call, &flashmoe_attention_forward_params::attn_mask,
                               &flashmoe_attention_backward_params::attn_mask);
  return !masked || *pair_at(call.attn_mask, b, h, i, j) != 0;
}

double bias_of(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j) {
  const bool biased = is_given(call, &flashmoe_attention_forward_params::attn_bias,
                               &flashmoe_attention_backward_params::attn_bias);
  return biased ? load(pair_at(call.attn_bias, b, h, i, j), call.attn_bias.tensor.dtype) : 0.0;
}

double logit_of(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j) {
  const flashmoe_attention_forward_params p = as_given(call.params);
  const int head = p.layout == FLASHMOE_LAYOUT_BHSD ? 1 : 2;
  const int64_t group = call.q.shape[head] / call.k.shape[head];
  const int64_t dim = call.q.shape[3];
  const flashmoe_dtype of_q = call.q.tensor.dtype, of_k = call.k.tensor.dtype;
  const unsigned char* q = element_at(call, call.q, b, i, h, 0);  // numbers of a row are neighbors
  const unsigned char* k = element_at(call, call.k, b, j, h / group, 0);
  double score = 0;
  for (int64_t d = 0; d < dim; ++d, q += of_q.bits / 8, k += of_k.bits / 8) {
    score += load(q, of_q) * load(k, of_k);
  }
  const double scale =
      p.scale != 0 ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(dim));
  const double cap = static_cast<double>(p.softcap);
  return cap == 0 ? score * scale : cap * std::tanh(score * scale / cap);
}

namespace {

// Stores the lse of q, k and sinks where a backward call reads it; for a row without logits 0,
// which nobody uses. Rows that share a place get the last one's.
void store_lse(Call* call) {
  const int seq = call->params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1;
  const int64_t seq_q = call->q.shape[seq], seq_k = call->k.shape[seq];
  for (int64_t b = 0; b < call->q.shape[0]; ++b) {
    for (int64_t h = 0; h < call->lse.shape[1]; ++h) {
      for (int64_t i = 0; i < seq_q; ++i) {
        double largest = -HUGE_VAL, sum = 0;
        std::vector<double> logits;
        for (int64_t j = 0; j < seq_k; ++j) {
          if (!sees(*call, b, h, i, j)) continue;
          logits.push_back(logit_of(*call, b, h, i, j) + bias_of(*call, b, h, i, j));
          largest = std::fmax(largest, logits.back());
        }
        if (call->backward.sinks != nullptr) {
          logits.push_back(load(call->sinks.element(h, 0, 0, 0), call->sinks.tensor.dtype));
          largest = std::fmax(largest, logits.back());
        }
        for (const double logit : logits) sum += std::exp(logit - largest);
        const double lse = logits.empty() ? 0.0 : largest + std::log(sum);
        auto* const at = const_cast<unsigned char*>(call->lse.element(b, h, i, 0));
        const auto narrow = static_cast<float>(lse);
        const bool wide = call->lse.tensor.dtype.bits == 64;
        std::memcpy(at, wide ? static_cast<const void*>(&lse) : &narrow, wide ? 8 : 4);
      }
    }
  }
  Argument& argument = call->lse;
  argument.before.assign(argument.block.get(), argument.block.get() + argument.block_bytes);
}

}  // namespace

void make_valid(Random* random, Call* call) {
  const flashmoe_dtype single = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  const flashmoe_dtype dtype = random->one_of<flashmoe_dtype>({single,
                                                               {FLASHMOE_DTYPE_FLOAT, 64, 1},
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
  if (random->chance(0.5)) {
    const auto extent = [random] {
      return random->chance(0.05) ? INT64_MAX : random->range(0, 14);
    };
    call->params.window = static_cast<uint32_t>(random->range(1, 3));
    if ((call->params.window & FLASHMOE_WINDOW_LEFT) != 0) call->params.window_left = extent();
    if ((call->params.window & FLASHMOE_WINDOW_RIGHT) != 0 && call->params.causal == 0) {
      call->params.window_right = extent();
    }
  }
  if (random->chance(0.3)) {
    call->params.softcap = random->one_of({-0.0f, 0.5f, 30.0f, 1e-30f, 1e30f});
  }
  if (!call->is_backward && call->params.window == 0 && call->params.softcap == 0 &&
      random->chance(0.3)) {
    // A caller of version 0.1: what lies behind its struct is not the library's to read.
    call->params.struct_size = offsetof(flashmoe_attention_forward_params, window);
    call->params.window = 0xa5a5a5a5;
    call->params.window_left = call->params.window_right = -1;
    call->params.softcap = std::nanf("");
  }
  if (random->chance(0.3)) call->params.kernel = random->one_of({"cpu", ""});

  const int64_t rows_q[4] = {batch, seq_q, heads_q, dim};
  const int64_t rows_k[4] = {batch, seq_k, heads_kv, dim};
  const int64_t rows_v[4] = {batch, seq_k, heads_kv, dim_v};
  const int64_t rows_out[4] = {batch, seq_q, heads_q, dim_v};
  const int64_t numbers[4] = {batch, heads_q, seq_q, 0};
  const int64_t heads[4] = {heads_q, 0, 0, 0};
  int64_t pairs[2][4];  // of the bias and of the mask, each extent perhaps 1
  for (auto& shape : pairs) {
    const int64_t full[4] = {batch, heads_q, seq_q, seq_k};
    for (int axis = 0; axis < 4; ++axis) shape[axis] = random->chance(0.3) ? 1 : full[axis];
  }
  const struct {
    const char* name;
    Argument* argument;
    int rank;
    const int64_t* shape;
  } all[] = {{"q", &call->q, 4, rows_q},
             {"k", &call->k, 4, rows_k},
             {"v", &call->v, 4, rows_v},
             {"out", &call->out, 4, rows_out},
             {"lse", &call->lse, 3, numbers},
             {"sinks", &call->sinks, 1, heads},
             {"dout", &call->dout, 4, rows_out},
             {"dlse", &call->dlse, 3, numbers},
             {"dq", &call->dq, 4, rows_q},
             {"dk", &call->dk, 4, rows_k},
             {"dv", &call->dv, 4, rows_v},
             {"dsinks", &call->dsinks, 1, heads},
             {"attn_bias", &call->attn_bias, 4, pairs[0]},
             {"attn_mask", &call->attn_mask, 4, pairs[1]}};
  for (const auto& each : all) {
    each.argument->name = each.name;
    each.argument->rank = each.rank;
    std::memcpy(each.argument->shape, each.shape, sizeof rows_q);
    if (each.rank == 4 && bhsd && each.shape != pairs[0] && each.shape != pairs[1])
      std::swap(each.argument->shape[1], each.argument->shape[2]);
  }
  for (int i = 0; i < call->count(); ++i) {
    Argument& argument = *call->arguments[static_cast<size_t>(i)];
    argument.tensor.dtype = dtype;
    argument.tensor.device = {random->chance(0.1) ? FLASHMOE_DEVICE_CUDA_HOST : FLASHMOE_DEVICE_CPU,
                              0};
    if (argument.rank == 3 && dtype.bits != 64) argument.tensor.dtype = single;
    if (&argument == &call->dsinks) argument.tensor.dtype = call->sinks.tensor.dtype;
    if (&argument == &call->attn_mask) {
      argument.tensor.dtype = random->one_of<flashmoe_dtype>(
          {{FLASHMOE_DTYPE_UINT, 8, 1}, {FLASHMOE_DTYPE_BOOL, 8, 1}});
    }
    const bool may_be_single = argument.rank == 1 || &argument == &call->attn_bias ||
                               (call->is_backward && call->is_output(i));
    if (may_be_single && random->chance(0.4)) argument.tensor.dtype = single;
    argument.allocate(random, call->is_output(i) || &argument == &call->lse);  // a row has its own
    *call->slots[static_cast<size_t>(i)] = &argument.tensor;
  }
  if (!call->is_backward) {
    if (random->chance(0.5)) call->params.lse = nullptr;
    if (random->chance(0.6)) call->params.sinks = nullptr;
    if (random->chance(0.7)) call->params.attn_bias = nullptr;
    if (random->chance(0.7)) call->params.attn_mask = nullptr;
    return;
  }
  if (random->chance(0.7)) call->backward.attn_bias = nullptr;
  if (random->chance(0.7)) call->backward.attn_mask = nullptr;
  if (random->chance(0.5)) call->backward.sinks = call->backward.dsinks = nullptr;
  store_lse(call);
  call->backward.accumulate = random->chance(0.3) ? 1 : 0;
  if (random->chance(0.5)) call->backward.dlse = nullptr;
  const int64_t wanted = random->range(1, call->backward.sinks != nullptr ? 15 : 7);
  if ((wanted & 1) == 0) call->backward.dq = nullptr;
  if ((wanted & 2) == 0) call->backward.dk = nullptr;
  if ((wanted & 4) == 0) call->backward.dv = nullptr;
  if ((wanted & 8) == 0) call->backward.dsinks = nullptr;
}
