#include "fuzz_call.h"

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

}  // namespace

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
  for (int axis = 0; axis < rank; ++axis) {
    if (index[axis] != 0) offset += index[axis] * stride(axis);
  }
  return static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset +
         offset * (tensor.dtype.bits / 8);
}

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
  if (call->params.window == 0 && call->params.softcap == 0 && random->chance(0.3)) {
    // A caller of version 0.1: what lies behind its struct is not the library's to read.
    call->params.struct_size = offsetof(flashmoe_attention_forward_params, window);
    call->params.window = 0xa5a5a5a5;
    call->params.window_left = call->params.window_right = -1;
    call->params.softcap = std::nanf("");
  }
  if (random->chance(0.3)) call->params.kernel = random->one_of({"cpu", ""});

  const char* const names[Call::kArguments] = {"q", "k", "v", "out", "lse", "sinks"};
  const int64_t shapes[4][4] = {{batch, seq_q, heads_q, dim},
                                {batch, seq_k, heads_kv, dim},
                                {batch, seq_k, heads_kv, dim_v},
                                {batch, seq_q, heads_q, dim_v}};
  for (int i = 0; i < Call::kArguments; ++i) {
    Argument& argument = *call->arguments[i];
    argument.name = names[i];
    argument.rank = i == 5 ? 1 : i == 4 ? 3 : 4;
    argument.tensor.dtype = dtype;
    argument.tensor.device = {random->chance(0.1) ? FLASHMOE_DEVICE_CUDA_HOST : FLASHMOE_DEVICE_CPU,
                              0};
    if (i < 4) {
      std::memcpy(argument.shape, shapes[i], sizeof shapes[i]);
      if (bhsd) std::swap(argument.shape[1], argument.shape[2]);
    } else if (i == 4) {
      argument.tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
      argument.shape[0] = batch, argument.shape[1] = heads_q, argument.shape[2] = seq_q;
    } else {
      if (random->chance(0.5)) argument.tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
      argument.shape[0] = heads_q;
    }
    argument.allocate(random, i == 3 || i == 4);
    *call->slots[i] = &argument.tensor;
  }
  if (random->chance(0.5)) call->params.lse = nullptr;
  if (random->chance(0.6)) call->params.sinks = nullptr;
}
