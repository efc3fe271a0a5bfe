// A valid attention call in memory of its own, for the fuzz to spoil: random extents, layouts,
// strides and dtypes, with outputs poisoned and guarded.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "flashmoe/flashmoe.h"

inline constexpr unsigned char kPoison = 0xA5;
inline constexpr size_t kAlignment = 64;

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

// The number at an element of one of the dtypes that the library takes.
double load(const unsigned char* at, flashmoe_dtype dtype);

struct Freer {
  void operator()(void* block) const { std::free(block); }
};

using Memory = std::unique_ptr<unsigned char, Freer>;

// Memory whose end is where it is said to be, as far as AddressSanitizer is concerned.
Memory allocate_memory(size_t bytes);

struct Argument {
  const char* name = "";
  int rank = 4;
  int64_t shape[8] = {};  // longer than any rank that a fault may claim and the library may read
  int64_t strides[8] = {};
  flashmoe_tensor tensor = {};
  Memory block;
  size_t block_bytes = 0;
  std::vector<unsigned char> before;  // the block as it was given to the library

  // Lays the tensor out in memory of its own: axes in random order, random gaps, directions and
  // broadcasts, then fills it.
  void allocate(Random* random, bool output);

  bool unchanged() const;

  // Whether every element that a valid call may touch lies in the block.
  bool backed() const;

  int64_t stride(int axis) const;
  const unsigned char* element(int64_t a, int64_t b, int64_t c, int64_t d) const;

 private:
  bool natural() const;  // contiguous, row-major
};

struct Call {
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  bool null_params = false;
  Argument q, k, v, out, lse, sinks;
  flashmoe_attention_sequences sequences = {};
  std::string kernel;
  std::string faults;

  const flashmoe_attention_forward_params* given() const { return null_params ? nullptr : &params; }
  static constexpr int kArguments = 6;
  Argument* arguments[kArguments] = {&q, &k, &v, &out, &lse, &sinks};
  const flashmoe_tensor** slots[kArguments] = {&params.q,   &params.k,   &params.v,
                                               &params.out, &params.lse, &params.sinks};

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

void make_valid(Random* random, Call* call);
