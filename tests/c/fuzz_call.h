// A valid attention call, forward or backward, in memory of its own, for the fuzz to spoil: random
// extents, layouts, strides and dtypes, with outputs poisoned and guarded.
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

// A forward or a backward call. `params` has the options and tensors that both share, even for a
// backward call; `backward` has the rest.
struct Call {
  explicit Call(bool is_backward) : is_backward(is_backward) {
    if (is_backward) {
      arguments.insert(arguments.end(),
                       {&dout, &dlse, &sinks, &attn_bias, &attn_mask, &dq, &dk, &dv, &dsinks});
      slots.insert(slots.end(), {&backward.dout, &backward.dlse, &backward.sinks,
                                 &backward.attn_bias, &backward.attn_mask, &backward.dq,
                                 &backward.dk, &backward.dv, &backward.dsinks});
    } else {
      arguments.insert(arguments.end(), {&sinks, &attn_bias, &attn_mask});
      slots.insert(slots.end(), {&params.sinks, &params.attn_bias, &params.attn_mask});
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  static constexpr int kFirstGradient = 10;  // of the arguments of a backward call
  const bool is_backward;
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  flashmoe_attention_backward_params backward = flashmoe_attention_backward_params_init();
  bool null_params = false;
  Argument q, k, v, out, lse, sinks, attn_bias, attn_mask, dout, dlse, dq, dk, dv, dsinks;
  flashmoe_attention_sequences sequences =
      {};  // of no size: see fuzz_sequences for those that have
  std::string kernel;
  std::string faults;

  std::vector<Argument*> arguments = {&q, &k, &v, &out, &lse};
  std::vector<const flashmoe_tensor**> slots = {&params.q, &params.k, &params.v, &params.out,
                                                &params.lse};
  int count() const { return static_cast<int>(arguments.size()); }
  bool is_output(int i) const { return is_backward ? i >= kFirstGradient : i == 3 || i == 4; }

  const flashmoe_attention_forward_params* given() const { return null_params ? nullptr : &params; }
  // `backward` with what `params` has of it.
  const flashmoe_attention_backward_params* given_backward();

  flashmoe_status plan(flashmoe_plan* plan) {
    return is_backward ? flashmoe_attention_backward_plan(given_backward(), plan)
                       : flashmoe_attention_forward_plan(given(), plan);
  }
  flashmoe_status workspace_size(size_t* bytes) {
    return is_backward ? flashmoe_attention_backward_workspace_size(given_backward(), bytes)
                       : flashmoe_attention_forward_workspace_size(given(), bytes);
  }
  flashmoe_status run(void* workspace, size_t bytes, void* stream) {
    return is_backward ? flashmoe_attention_backward(given_backward(), workspace, bytes, stream)
                       : flashmoe_attention_forward(given(), workspace, bytes, stream);
  }
};

// Whether query i sees key j, in the header's words: query i stands at key i + A.
bool is_seen(const flashmoe_attention_forward_params& params, int64_t i, int64_t j, int64_t seq_q,
             int64_t seq_k);

// Where element [b, s, h, d] of a tensor of rows is.
const unsigned char* element_at(const Call& call, const Argument& argument, int64_t b, int64_t s,
                                int64_t h, int64_t d);

// Where what a bias or a mask says of a pair is; of an extent of 1 the one element.
const unsigned char* pair_at(const Argument& argument, int64_t b, int64_t h, int64_t i, int64_t j);

// Whether query i of head h sees key j of a valid call, by what is_seen says and by the mask.
bool sees(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j);

// What the bias adds to a logit of a valid call.
double bias_of(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j);

// The logit of a query and a key, of a valid call, but for the bias.
double logit_of(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j);

void make_valid(Random* random, Call* call);
