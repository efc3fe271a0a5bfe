// What the fuzzes of kv_append and kv_gather have in common: tables of numbers, tensors by name,
// and the faults that any tensor may have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "flashmoe/flashmoe.h"
#include "fuzz_call.h"

inline constexpr flashmoe_dtype kInt32 = {FLASHMOE_DTYPE_INT, 32, 1};
inline constexpr flashmoe_dtype kInt64 = {FLASHMOE_DTYPE_INT, 64, 1};

// Numbers of one or two dimensions in memory of their own, that ends where it is said to.
struct Table {
  int64_t shape[2] = {};
  int64_t strides[2] = {};
  flashmoe_tensor tensor = {};
  Memory block;
  std::vector<unsigned char> before;

  bool given() const { return tensor.ndim != 0; }
  unsigned char* element(int64_t i, int64_t j) const {
    return block.get() + (i * strides[0] + j * strides[1]) * (tensor.dtype.bits / 8);
  }
  int64_t at(int64_t i, int64_t j = 0) const {
    if (tensor.dtype.bits == 64) {
      int64_t wide;
      std::memcpy(&wide, element(i, j), sizeof wide);
      return wide;
    }
    int32_t number;
    std::memcpy(&number, element(i, j), sizeof number);
    return number;
  }

  // `store` writes one number.
  template <class Store>
  void fill(Random* random, flashmoe_dtype dtype, int rank, int64_t rows, int64_t columns,
            const Store& store) {
    shape[0] = rows, shape[1] = columns;
    const bool angles = dtype.code != FLASHMOE_DTYPE_INT;  // whose last stride is 1
    const int64_t step = angles || random->chance(0.6) ? 1 : 2;
    strides[1] = step;
    strides[0] = columns * step + (rank == 2 ? random->below(3) : 0);
    const int64_t bytes = dtype.bits / 8;
    const auto count = static_cast<size_t>(rows * strides[0]);
    block = allocate_memory(count * static_cast<size_t>(bytes));
    for (size_t i = 0; i < count; ++i) store(block.get() + i * static_cast<size_t>(bytes));
    before.assign(block.get(), block.get() + count * static_cast<size_t>(bytes));
    tensor.data = block.get();
    tensor.device = {FLASHMOE_DEVICE_CPU, 0};
    tensor.ndim = rank;
    tensor.dtype = dtype;
    tensor.shape = shape;
    tensor.strides = strides;
  }
  template <class Number>
  void fill_integers(Random* random, bool wide, int rank, int64_t rows, int64_t columns,
                     const Number& number) {
    fill(random, wide ? kInt64 : kInt32, rank, rows, columns, [&](unsigned char* to) {
      const int64_t value = number();
      const auto narrow = static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
      std::memcpy(to, wide ? static_cast<const void*>(&value) : &narrow, wide ? 8 : 4);
    });
  }
  // Magnitudes are from 1/8 to 2.
  void fill_angles(Random* random, flashmoe_dtype dtype, int64_t rows, int64_t columns) {
    fill(random, dtype, 2, rows, columns, [&](unsigned char* to) {
      const uint64_t bits = random->bits();
      const uint64_t sign = bits >> 63;
      if (dtype.bits == 64) {
        const uint64_t number = sign << 63 | (0x3fc0000000000000 | (bits & 0x003fffffffffffff));
        std::memcpy(to, &number, 8);
      } else if (dtype.bits == 32) {
        const auto number = static_cast<uint32_t>(sign << 31 | 0x3e000000 | (bits & 0x01ffffff));
        std::memcpy(to, &number, 4);
      } else {
        const bool half = dtype.code == FLASHMOE_DTYPE_FLOAT;
        const auto number = static_cast<uint16_t>(sign << 15 | (half ? 0x3000 : 0x3e00) |
                                                  (bits & (half ? 0x0fff : 0x01ff)));
        std::memcpy(to, &number, 2);
      }
    });
  }
  bool unchanged() const {
    return before.empty() || std::memcmp(block.get(), before.data(), before.size()) == 0;
  }
};

// A tensor of a call's Params.
template <class Params>
struct NamedTensor {
  const char* name;
  const flashmoe_tensor* Params::* member;
  Argument* rows;  // or nullptr
  Table* table;

  flashmoe_tensor* of() const { return rows != nullptr ? &rows->tensor : &table->tensor; }
  int64_t* shape() const { return rows != nullptr ? rows->shape : table->shape; }
  int64_t* strides() const { return rows != nullptr ? rows->strides : table->strides; }
  int rank() const { return rows != nullptr ? 4 : table->tensor.ndim; }
  bool unchanged() const { return rows != nullptr ? rows->unchanged() : table->unchanged(); }
  bool has_elements() const {
    for (int axis = 0; axis < rank(); ++axis) {
      if (shape()[axis] == 0) return false;
    }
    return true;
  }
};

inline int64_t strange_number(Random* random, int64_t most) {
  if (random->chance(0.75)) return random->range(0, std::max<int64_t>(most, 0));
  return random->one_of<int64_t>(
      {INT64_MIN, INT32_MIN, -1, 0, most + 1, 2 * most, INT32_MAX, INT64_MAX});
}

// ---- faults -------------------------------------------------------------------------------------

using Blame = std::set<std::string>;

// Cached: a call, which has params and all its tensors().
template <class Cached>
struct Fault {
  const char* name;
  std::function<Blame(Random*, Cached*)> put;  // what it blames; {}: it has no place
};

template <class Tensor>
Tensor any_of(Random* random, const std::vector<Tensor>& tensors) {
  return tensors[static_cast<size_t>(random->below(static_cast<int64_t>(tensors.size())))];
}

// The present ones of tensors().
template <class Cached>
auto given_tensors(Cached* call) {
  auto all = call->tensors();
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const auto& t) { return call->params.*t.member == nullptr; }),
            all.end());
  return all;
}

template <class Cached>
Blame names_of(Cached* call) {
  Blame names;
  for (const auto& t : given_tensors(call)) names.insert(t.name);
  return names;
}

// A fault in any tensor that is given.
template <class Cached, class Put>
Fault<Cached> in_tensor(const char* name, const Put& put) {
  return {name, [put](Random* random, Cached* call) -> Blame {
            const auto tensor = any_of(random, given_tensors(call));
            if (!put(random, tensor)) return {};
            return {tensor.name};
          }};
}

template <class Cached, class Params, class T>
Fault<Cached> in_field(const char* name, T Params::* member, std::initializer_list<T> values) {
  const std::vector<T> all = values;
  return {name, [=](Random* random, Cached* call) -> Blame {
            const auto at = random->below(static_cast<int64_t>(all.size()));
            call->params.*member = all[static_cast<size_t>(at)];
            return {name};
          }};
}

// Those of tensors. any_extent: whose extents may be any.
template <class Cached>
std::vector<Fault<Cached>> tensor_faults(const Blame& any_extent) {
  return {
      in_tensor<Cached>("rank",
                        [](Random* random, const auto& t) {
                          t.of()->ndim = random->one_of({-1, 0, 3, 5, INT32_MAX});
                          return true;
                        }),
      in_tensor<Cached>("no shape",
                        [](Random*, const auto& t) {
                          t.of()->shape = nullptr;
                          return true;
                        }),
      in_tensor<Cached>("negative extent",
                        [](Random* random, const auto& t) {
                          t.shape()[random->below(t.rank())] =
                              random->one_of({int64_t{-1}, INT64_MIN});
                          return true;
                        }),
      {"another extent",
       [any_extent](Random* random, Cached* call) -> Blame {
         const auto t = any_of(random, given_tensors(call));
         if (any_extent.count(t.name) != 0) return {};
         const int64_t axis = random->below(t.rank());
         t.of()->strides = t.strides();
         for (int i = 0; i < t.rank(); ++i) t.strides()[i] = i + 1 == t.rank() ? 1 : 0;
         if (t.rank() == 4) t.strides()[0] = t.strides()[1] = t.strides()[2] = 0;
         t.shape()[axis] += 8 * random->range(1, 3);
         return names_of(call);
       }},
      in_tensor<Cached>("type",
                        [](Random* random, const auto& t) {
                          t.of()->dtype.code = random->one_of<uint8_t>({1, 3, 5, 17, 255});
                          return true;
                        }),
      in_tensor<Cached>("bits",
                        [](Random* random, const auto& t) {
                          t.of()->dtype.bits = random->one_of<uint8_t>({0, 1, 12, 24, 128});
                          return true;
                        }),
      in_tensor<Cached>("lanes",
                        [](Random* random, const auto& t) {
                          t.of()->dtype.lanes = random->one_of<uint16_t>({0, 2, 65535});
                          return true;
                        }),
      in_tensor<Cached>("device",
                        [](Random* random, const auto& t) {
                          t.of()->device.device_type = random->one_of({-1, 0, 4, 7, 99});
                          return true;
                        }),
      in_tensor<Cached>("no data",
                        [](Random*, const auto& t) {
                          if (!t.has_elements()) return false;
                          t.of()->data = nullptr;
                          t.of()->byte_offset = 0;
                          return true;
                        }),
      in_tensor<Cached>("misaligned data",
                        [](Random*, const auto& t) {
                          if (!t.has_elements()) return false;
                          t.of()->byte_offset += 1;
                          return true;
                        }),
      in_tensor<Cached>("last stride",
                        [](Random* random, const auto& t) {
                          const bool integers = t.of()->dtype.code == FLASHMOE_DTYPE_INT;
                          if (integers || !t.has_elements() || t.shape()[t.rank() - 1] == 1)
                            return false;
                          int64_t packed = 1;
                          for (int axis = t.rank() - 1; axis >= 0; --axis) {
                            if (t.of()->strides == nullptr) t.strides()[axis] = packed;
                            packed *= t.shape()[axis];
                          }
                          t.of()->strides = t.strides();
                          t.strides()[t.rank() - 1] = random->one_of<int64_t>({-1, 2, 16});
                          return true;
                        }),
      in_tensor<Cached>("huge extent",
                        [](Random* random, const auto& t) {
                          if (t.rank() != 4) return false;
                          t.of()->strides = nullptr;
                          for (int axis = 0; axis < 3; ++axis) {
                            t.shape()[axis] = random->one_of({INT64_MAX, INT64_MAX / 2});
                          }
                          return true;
                        }),
  };
}
