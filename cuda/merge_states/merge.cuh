// Merging partial results of attention. For each row and head:
//
//   lse = log sum_i exp(lse_i)          out = sum_i exp(lse_i - lse) out_i
//
// The kernel is bound by memory: it reads every partial once. A block has consecutive rows.
// First, its threads make the rows' weights: exp(lse_i - largest) over their sum. The number of
// threads per row grows with the number of partials; the lse may lie anywhere in memory. The block
// keeps weights and addresses in shared memory. Then all threads merge one unit of a row at a time,
// in the order of the partials. Each thread loads kBatch partials before it uses the first; with at
// most two partials, it loads those of kFewBatch units. A partial whose lse is -inf is not read.
//
// One block owns a row, and one thread a unit. The thread reads the unit before it writes it, so
// out may be prior_out, and lse prior_lse.
//
// Sums begin with -0, so a single partial keeps all of its bits: 0 + x would lose -0. The CPU does
// the same (cpu/merge_states.cpp), except for the bits of exp and of the division.
//
// Shared memory: kMostBlockRows rows of 48 bytes, kMostWeights weights, and flags of existing
// tokens.
#pragma once

#include <type_traits>

#include "cuda/merge_states/entry.h"
#include "cuda/merge_states/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::merge_states {

// Partials of a unit in flight at a time, in 32 registers or less. kFewBatch: units in flight if
// there are at most two partials.
template <class Element, bool kHalves>
inline constexpr int kBatch = std::is_same_v<Element, float> ? 4
                              : kHalves                      ? 6
                                                             : 8;
template <bool kHalves>
inline constexpr int kFewBatch = kHalves ? 2 : 4;

inline constexpr float kNotRead = -1.0f;  // replaces a weight
inline constexpr int kBlocks = 4;         // per multiprocessor, at least

// ---- weights ------------------------------------------------------------------------------------

struct Row {
  const char* outs;
  const char* prior;  // nullptr: not read
  char* out;          // nullptr: not written
  const float* lses;
  float largest;  // largest lse of the row
  float inverse;  // 1 / sum of powers
  float prior_weight;
  float start;  // start of the sum: -0, or 0 if no partial has a key
};

struct SharedStorage {
  Row rows[kMostBlockRows];
  float weights[kMostWeights];  // [block_rows][kept]
  int there[kMostBlockRows];    // flags of tokens of a packed batch
};

// The position of a row.
struct Index {
  int batch;
  int seq;
  int head;
};

__device__ __forceinline__ Index index_of(const Params& params, int row) {
  const int major = params.inner.quotient(row);
  const int minor = row - major * params.inner.number();
  const int batch = params.outer.quotient(major);
  const int middle = major - batch * params.outer.number();
  return params.heads_inside != 0 ? Index{batch, middle, minor} : Index{batch, minor, middle};
}

__device__ __forceinline__ char* at(const Rows& rows, const Index& index) {
  return rows.data + index.batch * rows.batch + index.seq * rows.seq + index.head * rows.head;
}
__device__ __forceinline__ float* at(const RowFloats& rows, const Index& index) {
  return rows.data + index.batch * rows.batch + index.seq * rows.seq + index.head * rows.head;
}

// exp(lse - largest) of a partial that has a key; NaN for NaN. If `largest` is +inf, every lse of
// +inf counts 1, and others 0.
__device__ __forceinline__ float power_of(float lse, float largest) {
  if (largest < INFINITY) return expf(lse - largest);
  return lse == INFINITY ? 1.0f : lse != lse ? lse : 0.0f;
}
// NaN is not empty.
__device__ __forceinline__ bool is_empty(float lse) { return lse == -INFINITY; }

// Finds which tokens of a packed batch belong to a sequence, from `first` on. All threads take
// part.
__device__ __forceinline__ void find_tokens(const Params& params, int first, int count,
                                            int* there) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count) there[thread] = 0;
  __syncthreads();
#pragma unroll 4
  for (int s = thread; s < params.sequences; s += kThreads) {
    const int begin = SequenceParams::cut(params.cu_seqlens_q.at(s), 0, params.seq);
    int length = SequenceParams::cut(params.cu_seqlens_q.at(s + 1), begin, params.seq) - begin;
    if (params.seqused_q.given()) {
      length = SequenceParams::cut(params.seqused_q.at(s), 0, length);
    }
    const int end = min(begin + min(length, params.most_q) - first, count);
    for (int token = max(begin - first, 0); token < end; ++token) atomicOr(&there[token], 1);
  }
  __syncthreads();
}

__device__ __forceinline__ bool is_there(const Params& params, const Index& index, int first,
                                         const int* there) {
  if (params.most_q == 0) return true;
  if (params.cu_seqlens_q.given()) return there[index.seq - first] != 0;
  const int length = params.seqused_q.given() ? params.seqused_q.at(index.batch) : params.seq;
  return index.seq < min(length, params.most_q);
}

// Makes a row's weights by 2^threads_log2 neighbouring threads of a warp. This thread is the
// `lane`-th.
__device__ __forceinline__ void weigh(const Params& params, const Index& index, int lane, Row& row,
                                      float* weights, bool valid) {
  const int lanes = 1 << params.threads_log2;
  const int partials = valid ? params.partials : 0;
  const float* const lses = at(params.lses, index);
  const bool first = lane == 0 && valid;
  const bool has_prior = first && params.prior_out.data != nullptr;
  const float prior_lse = has_prior ? *at(params.prior_lse, index) : -INFINITY;
  float own[kLsesOfThread];  // all loads in flight together
#pragma unroll
  for (int j = 0; j < kLsesOfThread; ++j) {
    const int i = lane + j * lanes;
    own[j] = i < partials ? lses[i * params.lses_step] : -INFINITY;
  }
  const int further = lane + kLsesOfThread * lanes;
  float largest = -INFINITY;  // ignores NaN
  int any = 0;                // some partial has a key
  const auto see = [&](float lse) {
    any |= is_empty(lse) ? 0 : 1;
    largest = fmaxf(largest, lse);
  };
  see(prior_lse);
#pragma unroll
  for (const float lse : own) see(lse);
  for (int i = further; i < partials; i += lanes) see(lses[i * params.lses_step]);
  for (int step = 1; step < lanes; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    any |= __shfl_xor_sync(~0u, any, step);
  }
  const float prior_power = is_empty(prior_lse) ? 0.0f : power_of(prior_lse, largest);
  float sum = prior_power;
#pragma unroll
  for (float& power : own) {
    power = is_empty(power) ? kNotRead : power_of(power, largest);
    sum += power == kNotRead ? 0.0f : power;
  }
  for (int i = further; i < partials; i += lanes) {
    const float lse = lses[i * params.lses_step];
    const float power = is_empty(lse) ? kNotRead : power_of(lse, largest);
    sum += power == kNotRead ? 0.0f : power;
    if (i < params.kept) weights[i] = power;
  }
  for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float inverse = __frcp_rn(sum);
  const auto weight_of = [&](float power) {
    return power == kNotRead ? kNotRead : power * inverse;
  };
  const int kept = min(partials, params.kept);
#pragma unroll
  for (int j = 0; j < kLsesOfThread; ++j) {
    const int i = lane + j * lanes;
    if (i < kept) weights[i] = weight_of(own[j]);
  }
  for (int i = further; i < kept; i += lanes) weights[i] = weight_of(weights[i]);
  if (!first) return;
  row.outs = at(params.outs, index);
  row.prior = is_empty(prior_lse) ? nullptr : at(params.prior_out, index);
  row.out = at(params.out, index);
  row.lses = lses;
  row.largest = largest;
  row.inverse = inverse;
  row.prior_weight = prior_power * inverse;
  row.start = any != 0 ? -0.0f : 0.0f;
  if (params.lse.data != nullptr) {
    *at(params.lse, index) = any != 0 ? largest + logf(sum) : -INFINITY;
  }
}

// Makes the weights of all rows of the block.
__device__ __forceinline__ void weigh_rows(const Params& params, int first, int count,
                                           SharedStorage& shared) {
  const int first_token = params.inner.quotient(first);
  if (params.cu_seqlens_q.given()) {
    const int last_token = params.inner.quotient(first + count - 1);
    find_tokens(params, first_token, last_token - first_token + 1, shared.there);
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & ((1 << params.threads_log2) - 1);
  const int rows_at_once = kThreads >> params.threads_log2;
  for (int begin = 0; begin < count; begin += rows_at_once) {
    const int i = begin + (thread >> params.threads_log2);
    const Index index = index_of(params, first + min(i, count - 1));
    const bool valid = i < count && is_there(params, index, first_token, shared.there);
    const int kept_row = min(i, count - 1);
    Row& row = shared.rows[kept_row];
    weigh(params, index, lane, row, &shared.weights[kept_row * params.kept], valid);
    if (i < count && !valid && lane == 0) row.out = nullptr;
  }
  __syncthreads();
}

// ---- units --------------------------------------------------------------------------------------

// kUnitNumbers numbers of a row as they lie in memory, fp32 at most.
struct Stored {
  uint32_t words[kUnitNumbers];
};

// The columns of a unit in its row.
template <bool kHalves>
struct Columns {
  int first;
  int second;  // four numbers further, or half a row

  __device__ __forceinline__ Columns(const Params& params, int unit)
      : first(unit * (kHalves ? kUnitNumbers / 2 : kUnitNumbers)),
        second(first + (kHalves ? params.half_row : kUnitNumbers / 2)) {}
};

template <bool kHalves>
__device__ __forceinline__ void load(Stored& stored, const char* row, const Columns<kHalves>& at,
                                     bool wide, bool valid) {
  uint32_t (&low)[4] = *reinterpret_cast<uint32_t (*)[4]>(&stored.words[0]);
  if constexpr (!kHalves) {
    ptx::load_streaming_or_zero(low, row + at.first * 2, valid);
  } else if (wide) {
    uint32_t (&high)[4] = *reinterpret_cast<uint32_t (*)[4]>(&stored.words[4]);
    ptx::load_streaming_or_zero(low, row + at.first * 4, valid);
    ptx::load_streaming_or_zero(high, row + at.second * 4, valid);
  } else {
    uint32_t (&first)[2] = *reinterpret_cast<uint32_t (*)[2]>(&stored.words[0]);
    uint32_t (&second)[2] = *reinterpret_cast<uint32_t (*)[2]>(&stored.words[2]);
    ptx::load_streaming_or_zero(first, row + at.first * 2, valid);
    ptx::load_streaming_or_zero(second, row + at.second * 2, valid);
  }
}

template <class Element>
__device__ __forceinline__ void add(float (&sums)[kUnitNumbers], const Stored& stored,
                                    float weight) {
#pragma unroll
  for (int i = 0; i < kUnitNumbers / 2; ++i) {
    float2 pair;
    if constexpr (std::is_same_v<Element, float>) {
      pair = make_float2(__uint_as_float(stored.words[2 * i]),
                         __uint_as_float(stored.words[2 * i + 1]));
    } else {
      pair = numeric::ElementTraits<Element>::unpack(stored.words[i]);
    }
    sums[2 * i] = fmaf(pair.x, weight, sums[2 * i]);
    sums[2 * i + 1] = fmaf(pair.y, weight, sums[2 * i + 1]);
  }
}

template <bool kHalves>
__device__ __forceinline__ void add(float (&sums)[kUnitNumbers], const Stored& stored, float weight,
                                    Format format) {
  if (kHalves && format == kFp32) {
    add<float>(sums, stored, weight);
  } else if (format == kBf16) {
    add<__nv_bfloat16>(sums, stored, weight);
  } else {
    add<__half>(sums, stored, weight);
  }
}

template <class Element, bool kHalves>
__device__ __forceinline__ void store_pairs(char* row, const Columns<kHalves>& at,
                                            const float (&sums)[kUnitNumbers]) {
  uint32_t pairs[kUnitNumbers / 2];
#pragma unroll
  for (int i = 0; i < kUnitNumbers / 2; ++i) {
    pairs[i] = numeric::ElementTraits<Element>::pack(sums[2 * i], sums[2 * i + 1]);
  }
  if constexpr (kHalves) {
    *reinterpret_cast<uint2*>(row + at.first * 2) = make_uint2(pairs[0], pairs[1]);
    *reinterpret_cast<uint2*>(row + at.second * 2) = make_uint2(pairs[2], pairs[3]);
  } else {
    *reinterpret_cast<uint4*>(row + at.first * 2) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

template <bool kHalves>
__device__ __forceinline__ void store(char* row, const Columns<kHalves>& at,
                                      const float (&sums)[kUnitNumbers], Format format) {
  if (kHalves && format == kFp32) {
    *reinterpret_cast<float4*>(row + at.first * 4) =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
    *reinterpret_cast<float4*>(row + at.second * 4) =
        make_float4(sums[4], sums[5], sums[6], sums[7]);
  } else if (format == kBf16) {
    store_pairs<__nv_bfloat16>(row, at, sums);
  } else {
    store_pairs<__half>(row, at, sums);
  }
}

// Merges a unit of a row, partial by partial.
template <class Element, bool kHalves>
class Unit {
 public:
  __device__ __forceinline__ Unit(const Params& params, const Row& row, const float* weights,
                                  int unit)
      : params_(params), row_(row), weights_(weights), columns_(params, unit), from_(row.outs) {}

  __device__ __forceinline__ void merge() {
#pragma unroll
    for (float& sum : sums_) sum = row_.start;
    if (row_.prior != nullptr) {
      Stored prior;
      load(prior, row_.prior, columns_, params_.prior_format == kFp32, true);
      add<kHalves>(sums_, prior, row_.prior_weight, params_.prior_format);
    }
    for (int i = 0; i < params_.kept; i += kAtOnce) add_batch<true>(i, params_.kept);
    for (int i = params_.kept; i < params_.partials; i += kAtOnce) {
      add_batch<false>(i, params_.partials);
    }
    store(row_.out, columns_, sums_, params_.out_format);
  }

 private:
  static constexpr int kAtOnce = kBatch<Element, kHalves>;

  template <bool kFromShared>
  __device__ __forceinline__ float weight_of(int partial) const {
    if constexpr (kFromShared) return weights_[partial];
    const float lse = row_.lses[partial * params_.lses_step];
    return is_empty(lse) ? kNotRead : power_of(lse, row_.largest) * row_.inverse;
  }

  // Adds the partials from `first` to before `end`, at most kAtOnce. kFromShared: the block keeps
  // their weights.
  template <bool kFromShared>
  __device__ __forceinline__ void add_batch(int first, int end) {
    Stored batch[kAtOnce];
    float weights[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      weights[j] = first + j < end ? weight_of<kFromShared>(first + j) : kNotRead;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      load(batch[j], from_, columns_, std::is_same_v<Element, float>, weights[j] != kNotRead);
      if (first + j < end) from_ += params_.outs_step;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (weights[j] != kNotRead) add<Element>(sums_, batch[j], weights[j]);
    }
  }

  const Params& params_;
  const Row& row_;
  const float* const weights_;
  const Columns<kHalves> columns_;
  const char* from_;
  float sums_[kUnitNumbers];
};

// Merges all units of the block.
template <class Element, bool kHalves>
__device__ __forceinline__ void merge_units(const Params& params, const SharedStorage& shared,
                                            int end) {
  for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const int row = params.row_units.quotient(i);
    if (shared.rows[row].out == nullptr) continue;
    Unit<Element, kHalves>(params, shared.rows[row], &shared.weights[row * params.kept],
                           i - row * params.row_units.number())
        .merge();
  }
}

// The same for at most two partials, including the prior one. The block keeps all their weights.
template <class Element, bool kHalves>
__device__ __forceinline__ void merge_units_of_few(const Params& params,
                                                   const SharedStorage& shared, int end) {
  constexpr int kUnits = kFewBatch<kHalves>;
  constexpr bool kWide = std::is_same_v<Element, float>;
  constexpr Format kFormat = kWide ? kFp32 : std::is_same_v<Element, __half> ? kFp16 : kBf16;
  const bool has_prior = params.prior_out.data != nullptr;
  const Format first_format = has_prior ? params.prior_format : kFormat;
  const int second = has_prior ? 0 : 1;  // partial of outs
  // Nothing is read for a row that is not written.
  const auto first_weight = [&](const Row& row, const float* weights) {
    if (has_prior) return row.prior != nullptr ? row.prior_weight : kNotRead;
    return params.partials > 0 ? weights[0] : kNotRead;
  };
  const auto second_weight = [&](const float* weights) {
    return second < params.partials ? weights[second] : kNotRead;
  };
  for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreads * kUnits) {
    Stored firsts[kUnits], seconds[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int at = min(i + j * kThreads, end - 1);
      const int index = params.row_units.quotient(at);
      const Row& row = shared.rows[index];
      const float* const weights = &shared.weights[index * params.kept];
      const Columns<kHalves> columns(params, at - index * params.row_units.number());
      const bool there = i + j * kThreads < end && row.out != nullptr;
      load(firsts[j], has_prior ? row.prior : row.outs, columns, first_format == kFp32,
           there && first_weight(row, weights) != kNotRead);
      load(seconds[j], row.outs + second * params.outs_step, columns, kWide,
           there && second_weight(weights) != kNotRead);
    }
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int at = i + j * kThreads;
      if (at >= end) continue;
      const int index = params.row_units.quotient(at);
      const Row& row = shared.rows[index];
      if (row.out == nullptr) continue;
      const float* const weights = &shared.weights[index * params.kept];
      const Columns<kHalves> columns(params, at - index * params.row_units.number());
      float sums[kUnitNumbers];
#pragma unroll
      for (float& sum : sums) sum = row.start;
      const float first = first_weight(row, weights);
      const float other = second_weight(weights);
      if (first != kNotRead) add<kHalves>(sums, firsts[j], first, first_format);
      if (other != kNotRead) add<Element>(sums, seconds[j], other);
      store(row.out, columns, sums, params.out_format);
    }
  }
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Element, bool kHalves>
__global__ void __launch_bounds__(kThreads, kBlocks)
    merge_states_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  __shared__ SharedStorage shared;
  const int first = static_cast<int>(blockIdx.x) * params.block_rows;
  const int count = min(params.block_rows, params.rows - first);
  weigh_rows(params, first, count, shared);
  const int end = count * params.row_units.number();
  if (params.partials + (params.prior_out.data != nullptr ? 1 : 0) <= 2) {
    merge_units_of_few<Element, kHalves>(params, shared, end);
  } else {
    merge_units<Element, kHalves>(params, shared, end);
  }
}

}  // namespace flashmoe::merge_states
