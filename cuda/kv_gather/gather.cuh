// Gathers keys and values of a cache: every key of a sequence goes from its page, or row of the
// cache, to its row of the results.
//
// The kernel is bound by memory. A block has consecutive rows of the results or, if rows are few
// and large, a part of one. First, its threads find the source of each row, one thread per row: the
// owner of the row, the number of keys of that sequence, and the page. That waits for the tables,
// so it is done once, and shared memory keeps the places. Then all threads move 16 bytes of a head
// of the results at a time, with kUnroll loads in flight before the first store.
//
// Tables may hold any numbers, but none leads outside a tensor. The CPU does the same
// (cpu/kv_gather.cpp), with the same bits.
#pragma once

#include <climits>

#include "cuda/kv_gather/entry.h"
#include "cuda/kv_gather/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/numeric/fp8.cuh"
#include "cuda/ptx/global.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::kv_gather {

inline constexpr int kUnroll = 2;

// ---- where rows come from -----------------------------------------------------------------------

enum State : int { kNoKey, kCopied, kZeros };

// A row of the results, and its row of the cache.
struct Place {
  const char* from[kStreams];
  char* to[kStreams];
  int page;  // or row of the cache's batch
  State state;
};

struct SharedStorage {
  Place places[kMostBlockRows];
  int owners[kMostBlockRows];  // of a packed batch; INT_MAX: no owner
};

struct Range {
  int begin;
  int length;
};

// Rows of k of a sequence in a packed batch.
__device__ __forceinline__ Range packed_rows(const Params& params, int sequence) {
  const int begin = SequenceParams::cut(params.cu_seqlens_k.at(sequence), 0, params.rows);
  return {begin,
          SequenceParams::cut(params.cu_seqlens_k.at(sequence + 1), begin, params.rows) - begin};
}

// Keys of a sequence. Pages count as if they were contiguous.
__device__ __forceinline__ Range keys_of(const Params& params, int sequence) {
  Range keys = {0, params.room};
  if (params.seqused_k.given()) {
    keys.length = SequenceParams::cut(params.seqused_k.at(sequence), 0, keys.length);
  }
  if (params.k_begin.given()) {
    keys.begin = SequenceParams::cut(params.k_begin.at(sequence), 0, keys.length);
    keys.length -= keys.begin;
  }
  return keys;
}

// Finds the first sequence that has each row of the block. All threads take part.
__device__ __forceinline__ void find_owners(const Params& params, int first, int count,
                                            int* owners) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count) owners[thread] = INT_MAX;
  __syncthreads();
#pragma unroll 4
  for (int s = thread; s < params.sequences; s += kThreads) {
    const Range rows = packed_rows(params, s);
    const int end = min(rows.begin + rows.length - first, count);
    for (int row = max(rows.begin - first, 0); row < end; ++row) atomicMin(&owners[row], s);
  }
  __syncthreads();
}

__device__ __forceinline__ int64_t offset_of(const Rows& rows, int64_t batch, int64_t row) {
  return batch * rows.batch + row * rows.seq;
}

// The place of row `index` of a sequence, which is row `row` of row `batch` of the results.
__device__ __forceinline__ Place place_of(const Params& params, int sequence, int index, int batch,
                                          int row) {
  Place place = {};
  const Range keys = keys_of(params, sequence);
  if (index >= keys.length) return place;
  int key = keys.begin + index;
  place.page = sequence;
  if (params.page_table.given()) {
    const int page = params.page_size.quotient(key);
    const int64_t element = sequence * params.page_table.stride + page * params.page_step;
    place.page = params.page_table.data[element];
    key -= page * params.page_size.number();
  } else if (params.batch_index.given()) {
    place.page = params.batch_index.at(sequence);
  }
  const bool there = place.page >= 0 && place.page < params.batch_cache;
  if (!there && !params.page_table.given()) return place;
  place.state = there ? kCopied : kZeros;
  if (!there) place.page = 0;
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    const Rows& from = params.from[stream];
    const Rows& to = params.to[stream];
    place.from[stream] = from.data + offset_of(from, place.page, key);
    place.to[stream] = to.data + offset_of(to, batch, row);
  }
  return place;
}

__device__ __forceinline__ void find_places(const Params& params, int first, int count,
                                            SharedStorage& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool packed = params.cu_seqlens_k.given();
  if (packed) find_owners(params, first, count, shared.owners);
  if (thread < count) {
    const int row = first + thread;
    Place place = {};
    if (!packed) {
      const int batch = params.rows_of_batch.quotient(row);
      const int index = row - batch * params.rows_of_batch.number();
      place = place_of(params, batch, index, batch, index);
    } else if (shared.owners[thread] != INT_MAX) {
      const int sequence = shared.owners[thread];
      place = place_of(params, sequence, row - packed_rows(params, sequence).begin, 0, row);
    }
    shared.places[thread] = place;
  }
  __syncthreads();
}

// ---- units --------------------------------------------------------------------------------------

// 16 bytes of a head of the results, from a cache of the same dtype.
template <class Element, bool kFp8>
struct Piece {
  static constexpr int kSourceBytes = kPieceBytes;
  uint32_t words[4];

  __device__ __forceinline__ void load(const char* from, bool valid) {
    ptx::load_or_zero(words, from, valid);
  }
  __device__ __forceinline__ uint4 result(float) const {
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Widens the four numbers of a word.
__device__ __forceinline__ void widen(float2 (&numbers)[2], uint32_t word) {
  uint32_t pairs[2];
  numeric::widen<__half>(pairs, word);
#pragma unroll
  for (int i = 0; i < 2; ++i) numbers[i] = numeric::ElementTraits<__half>::unpack(pairs[i]);
}

// Eight 16-bit numbers from an fp8 cache, widened and multiplied in fp32.
template <class Element>
struct Piece<Element, true> {
  static constexpr int kSourceBytes = 8;
  uint32_t words[2];

  __device__ __forceinline__ void load(const char* from, bool valid) {
    const uint2 two = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    words[0] = two.x, words[1] = two.y;
  }
  __device__ __forceinline__ uint4 result(float scale) const {
    float2 numbers[2][2];
    widen(numbers[0], words[0]);
    widen(numbers[1], words[1]);
    uint32_t made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = numbers[i / 2][i % 2];
      made[i] =
          numeric::ElementTraits<Element>::pack(__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale));
    }
    return make_uint4(made[0], made[1], made[2], made[3]);
  }
};

// Four fp32 numbers from an fp8 cache.
template <>
struct Piece<float, true> {
  static constexpr int kSourceBytes = 4;
  uint32_t word;

  __device__ __forceinline__ void load(const char* from, bool valid) {
    word = valid ? *reinterpret_cast<const uint32_t*>(from) : 0;
  }
  __device__ __forceinline__ uint4 result(float scale) const {
    float2 numbers[2];
    widen(numbers, word);
    return make_uint4(__float_as_uint(__fmul_rn(numbers[0].x, scale)),
                      __float_as_uint(__fmul_rn(numbers[0].y, scale)),
                      __float_as_uint(__fmul_rn(numbers[1].x, scale)),
                      __float_as_uint(__fmul_rn(numbers[1].y, scale)));
  }
};

__device__ __forceinline__ float scale_of(const Scales& scales, int64_t page, int head) {
  return scales.data == nullptr ? 1.0f : scales.data[page * scales.batch + head * scales.head];
}

// Moves the block's units of its rows.
template <class Element, bool kFp8>
__device__ __forceinline__ void move_rows(const Params& params, int count,
                                          const SharedStorage& shared) {
  const int begin = static_cast<int>(blockIdx.y) * params.block_units;
  const int end = min(begin + params.block_units, count * params.row_units.number());
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads * kUnroll) {
    Piece<Element, kFp8> pieces[kUnroll];
    char* to[kUnroll];
    float scales[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      to[j] = nullptr;
      const int at = i + j * kThreads;
      const int row = params.row_units.quotient(min(at, end - 1));
      const Place& place = shared.places[row];
      int unit = min(at, end - 1) - row * params.row_units.number();
      const int stream = unit >= params.end_of_keys ? kValues : kKeys;
      unit -= stream == kValues ? params.end_of_keys : 0;
      const int head = params.units[stream].quotient(unit);
      unit -= head * params.units[stream].number();
      const char* const from = place.from[stream] + head * params.from[stream].head +
                               unit * Piece<Element, kFp8>::kSourceBytes;
      const bool copied = at < end && place.state == kCopied;
      pieces[j].load(from, copied);
      if (at < end && place.state != kNoKey) {
        to[j] = place.to[stream] + head * params.to[stream].head + unit * kPieceBytes;
      }
      if constexpr (kFp8) {
        scales[j] = copied ? scale_of(params.scales[stream], place.page, head) : 1.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (to[j] != nullptr)
        *reinterpret_cast<uint4*>(to[j]) = pieces[j].result(kFp8 ? scales[j] : 1.0f);
    }
  }
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Element, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    kv_gather_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  __shared__ SharedStorage shared;
  const int first = static_cast<int>(blockIdx.x) * params.block_rows;
  const int count = min(params.block_rows, params.rows - first);
  find_places(params, first, count, shared);
  move_rows<Element, kFp8>(params, count, shared);
}

}  // namespace flashmoe::kv_gather
