#include "fuzz_faults.h"

#include <limits>

namespace {

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

Argument& any_argument(Random* random, Call* call) {
  return *call->arguments[static_cast<size_t>(random->below(call->count()))];
}

// And the slot that it belongs in.
Argument& any_output(Random* random, Call* call, size_t* slot) {
  if (call->is_backward) {
    *slot = static_cast<size_t>(random->range(Call::kFirstGradient, call->count() - 1));
  } else {
    *slot = random->chance(0.6) ? 3 : 4;
  }
  return *call->arguments[*slot];
}

void null_tensor(Random* random, Call* call) {
  *call->slots[static_cast<size_t>(random->below(call->count()))] = nullptr;
}

void no_gradient(Random*, Call* call) {
  call->backward.dq = call->backward.dk = call->backward.dv = call->backward.dsinks = nullptr;
}

void wrong_accumulate(Random* random, Call* call) {
  call->backward.accumulate = random->one_of({-1, 2, 100, INT32_MAX, INT32_MIN});
}

void null_params(Random*, Call* call) { call->null_params = true; }

void struct_size(Random* random, Call* call) {
  const size_t real = sizeof call->params;
  call->params.struct_size =
      random->one_of({size_t{0}, size_t{1}, real - 1, real - 8, real - 16, real - 32, real - 56,
                      real - 57, real - 64, real + 1, real + 8, real * 2, SIZE_MAX});
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

void wrong_softcap(Random* random, Call* call) {
  using limits = std::numeric_limits<float>;
  call->params.softcap =
      random->one_of({limits::quiet_NaN(), limits::infinity(), -limits::infinity(), -1.0f,
                      -limits::denorm_min(), limits::lowest()});
}

void wrong_window(Random* random, Call* call) {
  call->params.window = random->one_of({0u, 1u, 2u, 3u, 4u, 7u, 0x80000000u, UINT32_MAX});
  if (random->chance(0.5)) return;
  int64_t& extent = random->chance(0.5) ? call->params.window_left : call->params.window_right;
  extent = random->one_of<int64_t>({-1, 0, 1, 1LL << 40, INT64_MAX, INT64_MIN});
}

void reserved_set(Random* random, Call* call) {
  call->params.reserved = random->one_of({1u, 2u, 0x80000000u, 0xffffffffu});
}

// Scales, of which most are of no shape or dtype that they may have, and sequences of no size.
void unserved(Random* random, Call* call) {
  const flashmoe_tensor* const given = &any_argument(random, call).tensor;
  switch (random->below(4)) {
    case 0: call->params.q_scale = given; break;
    case 1: call->params.k_scale = given; break;
    case 2: call->params.v_scale = given; break;
    default: call->params.sequences = &call->sequences;
  }
}

void unknown_kernel(Random* random, Call* call) {
  call->kernel =
      random->one_of<const char*>({"sm89", "sm90", "sm89_few_rows", "CPU", "cpu ", " cpu",
                                   "%s%s%s%n", "nonsense", "cp", "\n", "\xff\xfe"});
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
  dtype.code = random->one_of<uint8_t>({0, 1, 2, 3, 4, 5, 6, 7, 10, 17, 255});
  dtype.bits = random->one_of<uint8_t>({0, 1, 4, 8, 16, 32, 64, 128, 255});
  dtype.lanes = random->chance(0.7) ? 1 : random->one_of<uint16_t>({0, 2, 4, 65535});
}

void wrong_device(Random* random, Call* call) {
  flashmoe_device& device = any_argument(random, call).tensor.device;
  device.device_type = random->one_of(
      {-1, 0, 2, 4, 7, 10, 13, 14, int{FLASHMOE_DEVICE_GPU_MODEL}, INT32_MAX, INT32_MIN});
  if (device.device_type == FLASHMOE_DEVICE_GPU_MODEL) {
    device.device_id = random->one_of({-1, FLASHMOE_GPU_RTX_4090 + 1, INT32_MAX});
  }
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
  for (Argument* argument : call->arguments) {
    if (argument->rank > 1) argument->shape[0] = batch;
  }
}

void every_dim(Random* random, Call* call) {
  const int64_t dim =
      random->one_of<int64_t>({0, 1, 4, 7, 9, 12, 20, 260, 264, 512, 520, 576, 584, 1LL << 40});
  if (random->chance(0.5)) {
    for (Argument* x : {&call->q, &call->k, &call->dq, &call->dk}) x->shape[3] = dim;
  }
  if (random->chance(0.5)) {
    for (Argument* x : {&call->v, &call->out, &call->dout, &call->dv}) x->shape[3] = dim;
  }
}

void other_heads(Random* random, Call* call) {
  const int axis = call->params.layout == FLASHMOE_LAYOUT_BHSD ? 1 : 2;
  const int64_t heads = random->one_of<int64_t>({0, 2, 3, 4, 5, 7, -3, 1LL << 62});
  if (random->chance(0.5)) {
    for (Argument* x : {&call->k, &call->v, &call->dk, &call->dv}) x->shape[axis] = heads;
  } else {
    for (Argument* x : {&call->q, &call->out, &call->dq, &call->dout}) x->shape[axis] = heads;
    call->lse.shape[1] = call->dlse.shape[1] = call->sinks.shape[0] = heads;
    call->dsinks.shape[0] = heads;
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
  size_t slot = 0;
  Argument& argument = any_output(random, call, &slot);
  *call->slots[slot] = &argument.tensor;
  for (int axis = 0; axis < argument.rank; ++axis) argument.strides[axis] = argument.stride(axis);
  const int axis = argument.rank == 1 ? 0 : static_cast<int>(random->below(argument.rank - 1));
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
  const auto from = static_cast<size_t>(random->below(call->count()));
  const auto to = static_cast<size_t>(random->below(call->count()));
  *call->slots[to] = &call->arguments[from]->tensor;
}

// An output in the memory of another argument: at its beginning, within it, or just beside it.
void output_elsewhere(Random* random, Call* call) {
  size_t slot = 0;
  Argument& output = any_output(random, call, &slot);
  *call->slots[slot] = &output.tensor;
  const Argument& other = any_argument(random, call);
  if (&other == &output) return;
  output.tensor.byte_offset = 0;
  output.tensor.data = other.tensor.data;
  if (random->chance(0.3)) return;
  const auto bytes = static_cast<int64_t>(other.block_bytes + output.block_bytes);
  // Not by pointers: of an empty tensor it is null, and beside a block of memory there is none.
  const auto begin = reinterpret_cast<uintptr_t>(other.tensor.data);
  output.tensor.data = reinterpret_cast<void*>(
      begin + static_cast<uintptr_t>(16 * random->range(-bytes / 16 - 1, bytes / 16 + 1)));
}

struct Fault {
  const char* name;
  void (*apply)(Random*, Call*);
};

constexpr Fault kFaults[] = {
    {"null_tensor", null_tensor},
    {"no_gradient", no_gradient},
    {"wrong_accumulate", wrong_accumulate},
    {"null_params", null_params},
    {"struct_size", struct_size},
    {"wrong_layout", wrong_layout},
    {"wrong_causal", wrong_causal},
    {"wrong_scale", wrong_scale},
    {"wrong_softcap", wrong_softcap},
    {"wrong_window", wrong_window},
    {"reserved_set", reserved_set},
    {"unserved", unserved},
    {"unknown_kernel", unknown_kernel},
    {"wrong_rank", wrong_rank},
    {"null_shape", null_shape},
    {"null_strides", null_strides},
    {"wrong_dtype", wrong_dtype},
    {"wrong_device", wrong_device},
    {"all_on_cuda", all_on_cuda},
    {"one_extent", one_extent},
    {"every_batch", every_batch},
    {"every_dim", every_dim},
    {"other_heads", other_heads},
    {"one_stride", one_stride},
    {"overlapping_output", overlapping_output},
    {"null_data", null_data},
    {"misaligned", misaligned},
    {"far_offset", far_offset},
    {"swapped", swapped},
    {"output_elsewhere", output_elsewhere},
};

}  // namespace

const char* put_fault(Random* random, Call* call) {
  const Fault& fault = random->one_of(kFaults);
  fault.apply(random, call);
  return fault.name;
}
