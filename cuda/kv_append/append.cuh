// Appending to a cache: every new row of k and v goes to its place in the cache, every row of q to
// q_out, and those of k and q are rotated on the way where that is asked for.
//
// The kernel is bound by memory: a thread has 32 bytes of a head at a time, and nothing is shared
// but a packed batch's owners. Where a row goes each thread finds out for itself, while the row's
// numbers are on their way: the tables are small, all threads of a row read the same of them, and
// these reads hit the L1. Blocks have consecutive rows and, of few rows, parts of one.
//
// Tables hold any numbers, and none of them leads outside of a tensor: a row whose place, or whose
// position, there is none of is not written. The CPU does the same (cpu/kv_append.cpp), and
// rotation has its bits: fp32, each product and each sum rounded.
#pragma once

#include <climits>

#include "cuda/kv_append/entry.h"
#include "cuda/kv_append/params.h"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/global.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::kv_append {

// ---- numbers ------------------------------------------------------------------------------------

using Piece = uint32_t[4];

template <class Element>
struct Numbers16 {
  using Storage = uint16_t;
  using Numeric = numeric::ElementTraits<Element>;
  static constexpr int kPiece = 8;

  static __device__ __forceinline__ void unpack(const Piece& piece, float (&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Numeric::unpack(piece[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ void pack(const float (&x)[kPiece], Piece& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) piece[i] = Numeric::pack(x[2 * i], x[2 * i + 1]);
  }
  static __device__ __forceinline__ float widen(Storage x) { return Numeric::to_float(x); }
  static __device__ __forceinline__ Storage round(float x) {
    return static_cast<Storage>(Numeric::pack(x, x));
  }
};

template <class Element>
struct NumbersOf : Numbers16<Element> {};

template <>
struct NumbersOf<float> {
  using Storage = float;
  static constexpr int kPiece = 4;

  static __device__ __forceinline__ void unpack(const Piece& piece, float (&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(piece[i]);
  }
  static __device__ __forceinline__ void pack(const float (&x)[kPiece], Piece& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) piece[i] = __float_as_uint(x[i]);
  }
  static __device__ __forceinline__ float widen(Storage x) { return x; }
  static __device__ __forceinline__ Storage round(float x) { return x; }
};

// (a, b) by the angle of cos and sin.
__device__ __forceinline__ void turn(float* a, float* b, float cos, float sin) {
  const float first = __fsub_rn(__fmul_rn(*a, cos), __fmul_rn(*b, sin));
  *b = __fadd_rn(__fmul_rn(*b, cos), __fmul_rn(*a, sin));
  *a = first;
}

// ---- tables of cosines and sines ----------------------------------------------------------------

template <class Element>
__device__ __forceinline__ float angle_at(const Rotary& rotary, const char* row, int pair) {
  using Numbers = NumbersOf<Element>;
  if (rotary.wide != 0) return reinterpret_cast<const float*>(row)[pair];
  return Numbers::widen(reinterpret_cast<const typename Numbers::Storage*>(row)[pair]);
}

// Those of kCount pairs from `first` on, a multiple of kCount; beyond the last pair 0.
template <class Element, int kCount>
__device__ __forceinline__ void load_angles(const Rotary& rotary, const char* row, int first,
                                            float (&x)[kCount]) {
  if (rotary.vectors == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = first + i < rotary.pairs ? angle_at<Element>(rotary, row, first + i) : 0.0f;
    }
    return;
  }
  if (rotary.wide != 0) {
    const float* const at = reinterpret_cast<const float*>(row) + first;
    if constexpr (kCount == 2) {
      const float2 two = *reinterpret_cast<const float2*>(at);
      x[0] = two.x, x[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(at + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
    }
    return;
  }
  if constexpr (sizeof(typename NumbersOf<Element>::Storage) == 2) {
    using Numeric = numeric::ElementTraits<Element>;
    const auto* const at = reinterpret_cast<const uint32_t*>(row) + first / 2;
    uint32_t words[kCount / 2];
    if constexpr (kCount == 8) {
      const uint4 four = *reinterpret_cast<const uint4*>(at);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(at);
      words[0] = two.x, words[1] = two.y;
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = Numeric::unpack(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

struct Angles {
  const char* cos;
  const char* sin;
};

// Two pieces of the halves, whose first pair is `first`.
template <class Element>
__device__ __forceinline__ void turn_halves(const Rotary& rotary, const Angles& angles, int first,
                                            Piece& low, Piece& high) {
  using Numbers = NumbersOf<Element>;
  constexpr int kPiece = Numbers::kPiece;
  float cos[kPiece], sin[kPiece], a[kPiece], b[kPiece];
  load_angles<Element>(rotary, angles.cos, first, cos);
  load_angles<Element>(rotary, angles.sin, first, sin);
  Numbers::unpack(low, a);
  Numbers::unpack(high, b);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) turn(&a[i], &b[i], cos[i], sin[i]);
  Numbers::pack(a, low);
  Numbers::pack(b, high);
}

// A piece of neighbouring pairs, of which the first is `first`; those behind the last stay.
template <class Element>
__device__ __forceinline__ void turn_neighbours(const Rotary& rotary, const Angles& angles,
                                                int first, Piece& piece) {
  using Numbers = NumbersOf<Element>;
  constexpr int kPairs = Numbers::kPiece / 2;
  if (first >= rotary.pairs) return;
  float cos[kPairs], sin[kPairs], x[Numbers::kPiece];
  load_angles<Element>(rotary, angles.cos, first, cos);
  load_angles<Element>(rotary, angles.sin, first, sin);
  Numbers::unpack(piece, x);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (first + i < rotary.pairs) turn(&x[2 * i], &x[2 * i + 1], cos[i], sin[i]);
  }
  Numbers::pack(x, piece);
}

// ---- where rows are and where they go -----------------------------------------------------------

// A row of k, v and q, and whose it is.
struct Token {
  int batch;
  int row;
  int sequence;
  int index;   // in its sequence
  int length;  // of its sequence's rows of k
};

// A row of the cache: its batch, or page, and its row there.
struct Place {
  int64_t batch;
  int64_t row;
};

__device__ __forceinline__ int64_t number_at(const Tokens& tokens, int batch, int row) {
  const int64_t element = batch * tokens.batch_stride + row * tokens.seq_stride;
  return tokens.wide != 0 ? static_cast<const int64_t*>(tokens.data)[element]
                          : static_cast<const int32_t*>(tokens.data)[element];
}

// Of number >= 0 and a divisor > 0.
__device__ __forceinline__ int64_t quotient(const RowDivisor& divisor, int64_t number) {
  if (divisor.fits != 0 && number <= INT_MAX) return divisor.by.quotient(static_cast<int>(number));
  return number / divisor.value;
}

// Where a new row goes; false: nowhere. `begin`: what the cache has of its sequence.
__device__ __forceinline__ bool find(const Params& params, const Token& token, int64_t begin,
                                     Place* place) {
  const RowDivisor& rows = params.rows_cache;
  if (params.slots.data != nullptr) {
    const int64_t slot = number_at(params.slots, token.batch, token.row);
    if (slot < 0 || rows.value == 0) return false;
    place->batch = quotient(rows, slot);
    place->row = slot - place->batch * rows.value;
    return place->batch < params.batch_cache;
  }
  const int64_t row = begin + token.index;
  if (params.page_table.given()) {
    if (rows.value == 0) return false;
    const int64_t page = quotient(rows, row);
    if (page >= params.page_count) return false;
    const TableNumbers& table = params.page_table;
    place->batch = table.data[token.sequence * table.stride + page * params.page_step];
    place->row = row - page * rows.value;
  } else {
    place->batch =
        params.batch_index.given() ? params.batch_index.at(token.sequence) : token.sequence;
    place->row = row;
  }
  return place->batch >= 0 && place->batch < params.batch_cache && place->row < rows.value;
}

// Where a row stands; false where no table reaches.
__device__ __forceinline__ bool stands_at(const Params& params, const Token& token, int64_t begin,
                                          bool is_query, Angles* angles) {
  const Rotary& rotary = params.rotary;
  const bool stays = is_query && rotary.q_stays != 0;
  const int64_t position = params.positions.data != nullptr
                               ? number_at(params.positions, token.batch, token.row)
                               : begin + (stays ? 0 : token.index);
  if (position < 0 || position >= rotary.rows) return false;
  angles->cos = rotary.cos + position * rotary.cos_stride;
  angles->sin = rotary.sin + position * rotary.sin_stride;
  return true;
}

__device__ __forceinline__ char* row_at(const Rows& rows, int64_t batch, int64_t row, int head) {
  return rows.data + batch * rows.batch + row * rows.seq + head * rows.head;
}

// ---- caches of fp8 ------------------------------------------------------------------------------

// The nearest numbers of fp8, as bytes of a word: of 448 and beyond 448.
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// What numbers of a head are divided by.
__device__ __forceinline__ float scale_of(const Scales& scales, int64_t batch, int head) {
  return scales.data == nullptr ? 1.0f : scales.data[batch * scales.batch + head * scales.head];
}

// The numbers of a piece, kPiece of them, to element `index` of a head.
template <class Element>
__device__ __forceinline__ void store_narrow(const Piece& piece, float scale, char* to, int index) {
  using Numbers = NumbersOf<Element>;
  float x[Numbers::kPiece];
  uint32_t words[Numbers::kPiece / 4];
  Numbers::unpack(piece, x);
#pragma unroll
  for (int i = 0; i < Numbers::kPiece; ++i) x[i] = __fdiv_rn(x[i], scale);
#pragma unroll
  for (int i = 0; i < Numbers::kPiece / 4; ++i) {
    words[i] = narrow_pair(x[4 * i], x[4 * i + 1]) | narrow_pair(x[4 * i + 2], x[4 * i + 3]) << 16;
  }
  auto* const at = reinterpret_cast<uint32_t*>(to + index);
  if constexpr (Numbers::kPiece == 8) {
    *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
  } else {
    *at = words[0];
  }
}

// ---- units --------------------------------------------------------------------------------------

// A pair of numbers of halves that are no whole pieces, or one of those behind.
template <class Element, class Put>
__device__ __forceinline__ void move_numbers(const Rotary& rotary, const Angles& angles, int unit,
                                             const char* from, const Put& put) {
  using Numbers = NumbersOf<Element>;
  using Storage = typename Numbers::Storage;
  const auto* const x = reinterpret_cast<const Storage*>(from);
  if (unit >= rotary.pairs) return put(rotary.pairs + unit, x[rotary.pairs + unit]);
  float a = Numbers::widen(x[unit]), b = Numbers::widen(x[unit + rotary.pairs]);
  turn(&a, &b, angle_at<Element>(rotary, angles.cos, unit),
       angle_at<Element>(rotary, angles.sin, unit));
  put(unit, Numbers::round(a));
  put(unit + rotary.pairs, Numbers::round(b));
}

// Unit `unit` of a row. Everything that it reads of the row it has read before it writes: q_out may
// be q.
template <class Element>
__device__ __forceinline__ void move_unit(const Params& params, const Token& token, int unit) {
  constexpr int kPiece = NumbersOf<Element>::kPiece;
  const Rotary& rotary = params.rotary;
  const int stream = (unit >= params.ends[kKeys]) + (unit >= params.ends[kValues]);
  const bool is_query = stream == kQueries;
  if (token.index >= (is_query ? params.seq_q : token.length)) return;
  if (stream > 0) unit -= params.ends[stream - 1];
  const int head = params.units[stream].quotient(unit);
  unit -= head * params.units[stream].number();
  const bool turned = rotary.pairs > 0 && stream != kValues;
  const bool by_number = turned && rotary.whole == 0;

  // The pieces: the halves' first, where these are turned, and then those behind, in two halves.
  const int halves = turned && rotary.interleaved == 0 ? rotary.pairs / kPiece : 0;
  const bool of_halves = unit < halves;
  const int behind = (params.pieces[stream] - 2 * halves + 1) / 2;
  const int low = of_halves ? unit : halves + unit;
  const int high = low + (of_halves ? halves : behind);
  const bool has_high = high < params.pieces[stream];
  const char* const from = row_at(params.from[stream], token.batch, token.row, head);
  Piece pieces[2];
  if (!by_number) {
    ptx::load_streaming(pieces[0], from + low * kPieceBytes);
    ptx::load_streaming_or_zero(pieces[1], from + high * kPieceBytes, has_high);
  }

  const int64_t begin = params.cache_seqlens.given() ? params.cache_seqlens.at(token.sequence) : 0;
  if (begin < 0) return;
  Angles angles = {};
  if (rotary.pairs > 0 && !stands_at(params, token, begin, is_query, &angles)) return;
  Place place = {token.batch, token.row};
  if (!is_query && !find(params, token, begin, &place)) return;
  char* const to = row_at(params.to[stream], place.batch, place.row, head);

  const bool narrow = params.fp8 != 0 && !is_query;
  const float scale = narrow ? scale_of(params.scales[stream], place.batch, head) : 1.0f;
  if (by_number) {
    using Numbers = NumbersOf<Element>;
    using Storage = typename Numbers::Storage;
    return move_numbers<Element>(rotary, angles, unit, from, [&](int index, Storage x) {
      if (narrow) {
        to[index] = static_cast<char>(narrow_pair(__fdiv_rn(Numbers::widen(x), scale), 0.0f));
      } else {
        reinterpret_cast<Storage*>(to)[index] = x;
      }
    });
  }
  if (turned && rotary.interleaved != 0) {
    turn_neighbours<Element>(rotary, angles, low * (kPiece / 2), pieces[0]);
    turn_neighbours<Element>(rotary, angles, high * (kPiece / 2), pieces[1]);
  } else if (of_halves) {
    turn_halves<Element>(rotary, angles, unit * kPiece, pieces[0], pieces[1]);
  }
  if (narrow) {
    store_narrow<Element>(pieces[0], scale, to, low * kPiece);
    if (has_high) store_narrow<Element>(pieces[1], scale, to, high * kPiece);
    return;
  }
  *reinterpret_cast<uint4*>(to + low * kPieceBytes) =
      make_uint4(pieces[0][0], pieces[0][1], pieces[0][2], pieces[0][3]);
  if (has_high) {
    *reinterpret_cast<uint4*>(to + high * kPieceBytes) =
        make_uint4(pieces[1][0], pieces[1][1], pieces[1][2], pieces[1][3]);
  }
}

// The block's units of its rows, token_of(row of the block, &token) of which says false of those
// that no sequence has.
template <class Element, class TokenOf>
__device__ __forceinline__ void move_rows(const Params& params, int count,
                                          const TokenOf& token_of) {
  const int begin = static_cast<int>(blockIdx.y) * params.block_units;
  const int end = min(begin + params.block_units, count * params.row_units.number());
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    const int row = params.row_units.quotient(i);
    Token token;
    if (!token_of(row, &token)) continue;
    move_unit<Element>(params, token, i - row * params.row_units.number());
  }
}

// ---- packed batches -----------------------------------------------------------------------------

// Whose the rows of a block are. Where offsets decrease, rows are of several sequences: each round
// has the next one of every row.
struct Owners {
  int of_row[kMostBlockRows];  // INT_MAX: none
  int counts[kMostBlockRows];
  int rounds;
};

// Rows [begin, begin + length) of k that a sequence has.
struct PackedRows {
  int begin;
  int length;
};

__device__ __forceinline__ PackedRows packed_rows(const Params& params, int sequence) {
  const int begin = SequenceParams::cut(params.cu_seqlens.at(sequence), 0, params.rows);
  return {begin,
          SequenceParams::cut(params.cu_seqlens.at(sequence + 1), begin, params.rows) - begin};
}

// The first sequence of each row behind the round's `last`, by all threads of the block.
__device__ __forceinline__ void find_owners(const Params& params, int first, int count, bool again,
                                            Owners* owners) {
  const int thread = static_cast<int>(threadIdx.x);
  int last = -1;
  if (again && thread < count) last = owners->of_row[thread];
  __syncthreads();
  if (thread < count) {
    // What a row's last owner was is kept in its count, which no later round reads.
    owners->counts[thread] = again ? last : 0;
    owners->of_row[thread] = INT_MAX;
  }
  if (thread == 0 && !again) owners->rounds = 0;
  __syncthreads();
#pragma unroll 4
  for (int s = thread; s < params.sequences; s += kThreads) {
    const PackedRows rows = packed_rows(params, s);
    const int end = min(rows.begin + rows.length - first, count);
    for (int row = max(rows.begin - first, 0); row < end; ++row) {
      if (!again) {
        atomicMax(&owners->rounds, atomicAdd(&owners->counts[row], 1) + 1);
      } else if (s <= owners->counts[row]) {
        continue;
      }
      atomicMin(&owners->of_row[row], s);
    }
  }
  __syncthreads();
}

template <class Element>
__device__ __forceinline__ void move_packed_rows(const Params& params, int first, int count) {
  __shared__ Owners owners;
  for (int round = 0; round == 0 || round < owners.rounds; ++round) {
    find_owners(params, first, count, round > 0, &owners);
    move_rows<Element>(params, count, [&](int row, Token* token) {
      const int sequence = owners.of_row[row];
      if (sequence == INT_MAX) return false;
      const PackedRows rows = packed_rows(params, sequence);
      *token = {0, first + row, sequence, first + row - rows.begin, rows.length};
      if (params.seqused.given()) {
        token->length = SequenceParams::cut(params.seqused.at(sequence), 0, rows.length);
      }
      return true;
    });
  }
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Element>
__global__ void __launch_bounds__(kThreads)
    kv_append_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int first = static_cast<int>(blockIdx.x) * params.block_rows;
  const int count = min(params.block_rows, params.rows - first);
  if (params.cu_seqlens.given()) return move_packed_rows<Element>(params, first, count);
  move_rows<Element>(params, count, [&](int row, Token* token) {
    const int batch = params.rows_of_batch.quotient(first + row);
    const int index = first + row - batch * params.rows_of_batch.number();
    *token = {batch, index, batch, index, params.seq};
    if (params.seqused.given()) {
      token->length = SequenceParams::cut(params.seqused.at(batch), 0, params.seq);
    }
    return true;
  });
}

}  // namespace flashmoe::kv_append
