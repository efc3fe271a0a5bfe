// Appending to a cache: every new row of k and v goes to its place in the cache, every row of q to
// q_out, and those of k and q are rotated on the way where that is asked for.
//
// The kernel is bound by memory: a thread has 32 bytes of each head of a unit and those of its next
// unit on their way, and nothing is shared but a packed batch's owners. Where a row goes each
// thread finds out for itself, when its numbers have been asked for: the tables are small, all
// threads of a row read the same of them, and these reads hit the L1. Blocks have parts of
// consecutive rows.
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

__device__ __forceinline__ void store(char* to, const Piece& piece) {
  *reinterpret_cast<uint4*>(to) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
}

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

// Two pieces of the halves of each head, whose first pair is `first`.
template <class Element>
__device__ __forceinline__ void turn_halves(const Rotary& rotary, const Angles& angles, int first,
                                            Piece (&pieces)[kUnitHeads][2]) {
  using Numbers = NumbersOf<Element>;
  constexpr int kPiece = Numbers::kPiece;
  float cos[kPiece], sin[kPiece];
  load_angles<Element>(rotary, angles.cos, first, cos);
  load_angles<Element>(rotary, angles.sin, first, sin);
#pragma unroll
  for (int head = 0; head < kUnitHeads; ++head) {
    float a[kPiece], b[kPiece];
    Numbers::unpack(pieces[head][0], a);
    Numbers::unpack(pieces[head][1], b);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) turn(&a[i], &b[i], cos[i], sin[i]);
    Numbers::pack(a, pieces[head][0]);
    Numbers::pack(b, pieces[head][1]);
  }
}

// A piece of neighbouring pairs of each head, of which the first is `first`; those behind the last
// stay.
template <class Element>
__device__ __forceinline__ void turn_neighbours(const Rotary& rotary, const Angles& angles,
                                                int first, int which,
                                                Piece (&pieces)[kUnitHeads][2]) {
  using Numbers = NumbersOf<Element>;
  constexpr int kPairs = Numbers::kPiece / 2;
  if (first >= rotary.pairs) return;
  float cos[kPairs], sin[kPairs];
  load_angles<Element>(rotary, angles.cos, first, cos);
  load_angles<Element>(rotary, angles.sin, first, sin);
#pragma unroll
  for (int head = 0; head < kUnitHeads; ++head) {
    float x[Numbers::kPiece];
    Numbers::unpack(pieces[head][which], x);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (first + i < rotary.pairs) turn(&x[2 * i], &x[2 * i + 1], cos[i], sin[i]);
    }
    Numbers::pack(x, pieces[head][which]);
  }
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

// ---- units --------------------------------------------------------------------------------------

// A pair of numbers of halves that are no whole pieces, or one of those behind.
template <class Element>
__device__ __forceinline__ void move_numbers(const Rotary& rotary, const Angles& angles, int unit,
                                             const char* from, char* to) {
  using Numbers = NumbersOf<Element>;
  using Storage = typename Numbers::Storage;
  const auto* const x = reinterpret_cast<const Storage*>(from);
  auto* const y = reinterpret_cast<Storage*>(to);
  if (unit >= rotary.pairs) {
    y[rotary.pairs + unit] = x[rotary.pairs + unit];
    return;
  }
  float a = Numbers::widen(x[unit]), b = Numbers::widen(x[unit + rotary.pairs]);
  turn(&a, &b, angle_at<Element>(rotary, angles.cos, unit),
       angle_at<Element>(rotary, angles.sin, unit));
  y[unit] = Numbers::round(a);
  y[unit + rotary.pairs] = Numbers::round(b);
}

// Where a unit of a row is: its heads, and two pieces of each.
struct Unit {
  int stream;
  int first_head;
  int last;    // of its heads
  int number;  // in its heads: of those that are moved number by number
  int low;     // piece
  int high;
  bool has_high;
  bool turned;
  bool of_halves;
  bool by_number;
};

// Unit `unit` of a row. The pieces are the halves' first, where these are turned, and then those
// behind, in two halves.
template <class Element>
__device__ __forceinline__ Unit unit_at(const Params& params, int unit) {
  constexpr int kPiece = NumbersOf<Element>::kPiece;
  const Rotary& rotary = params.rotary;
  Unit made;
  made.stream = (unit >= params.ends[kKeys]) + (unit >= params.ends[kValues]);
  if (made.stream > 0) unit -= params.ends[made.stream - 1];
  const int group = params.units[made.stream].quotient(unit);
  unit -= group * params.units[made.stream].number();
  made.number = unit;
  made.first_head = group * kUnitHeads;
  made.last = min(params.heads[made.stream] - made.first_head, kUnitHeads) - 1;
  made.turned = rotary.pairs > 0 && made.stream != kValues;
  made.by_number = made.turned && rotary.whole == 0;
  const int halves = made.turned && rotary.interleaved == 0 ? rotary.pairs / kPiece : 0;
  made.of_halves = unit < halves;
  const int behind = (params.pieces[made.stream] - 2 * halves + 1) / 2;
  made.low = made.of_halves ? unit : halves + unit;
  made.high = made.low + (made.of_halves ? halves : behind);
  made.has_high = made.high < params.pieces[made.stream];
  return made;
}

// Its pieces. Where it has fewer heads or pieces than there is room for, one of them twice.
__device__ __forceinline__ void load(const Params& params, const Unit& unit, int batch, int row,
                                     Piece (&pieces)[kUnitHeads][2]) {
  if (unit.by_number || (unit.stream == kQueries ? row >= params.seq_q : row >= params.seq)) return;
  const Rows& rows = params.from[unit.stream];
  const char* const from = row_at(rows, batch, row, unit.first_head);
#pragma unroll
  for (int i = 0; i < kUnitHeads; ++i) {
    const char* const head = from + min(i, unit.last) * rows.head;
    ptx::load_streaming(pieces[i][0], head + unit.low * kPieceBytes);
    ptx::load_streaming(pieces[i][1], head + (unit.has_high ? unit.high : unit.low) * kPieceBytes);
  }
}

// Moves a unit of a row that has been loaded. Everything that it reads of the row it has read
// before it writes: q_out may be q.
template <class Element>
__device__ __forceinline__ void move(const Params& params, const Token& token, const Unit& unit,
                                     Piece (&pieces)[kUnitHeads][2]) {
  constexpr int kPiece = NumbersOf<Element>::kPiece;
  const Rotary& rotary = params.rotary;
  const bool is_query = unit.stream == kQueries;
  if (token.index >= (is_query ? params.seq_q : token.length)) return;
  const int64_t begin = params.cache_seqlens.given() ? params.cache_seqlens.at(token.sequence) : 0;
  if (begin < 0) return;
  Angles angles = {};
  if (rotary.pairs > 0 && !stands_at(params, token, begin, is_query, &angles)) return;
  Place place = {token.batch, token.row};
  if (!is_query && !find(params, token, begin, &place)) return;
  const Rows& rows = params.to[unit.stream];
  char* const to = row_at(rows, place.batch, place.row, unit.first_head);
  if (unit.by_number) {
    const Rows& source = params.from[unit.stream];
    const char* const from = row_at(source, token.batch, token.row, unit.first_head);
    for (int i = 0; i <= unit.last; ++i) {
      move_numbers<Element>(rotary, angles, unit.number, from + i * source.head,
                            to + i * rows.head);
    }
    return;
  }
  if (unit.turned && rotary.interleaved != 0) {
    turn_neighbours<Element>(rotary, angles, unit.low * (kPiece / 2), 0, pieces);
    turn_neighbours<Element>(rotary, angles, unit.high * (kPiece / 2), 1, pieces);
  } else if (unit.of_halves) {
    turn_halves<Element>(rotary, angles, unit.number * kPiece, pieces);
  }
#pragma unroll
  for (int i = 0; i < kUnitHeads; ++i) {
    if (i > unit.last) break;
    store(to + i * rows.head + unit.low * kPieceBytes, pieces[i][0]);
    if (unit.has_high) store(to + i * rows.head + unit.high * kPieceBytes, pieces[i][1]);
  }
}

// A row of the tensors.
struct TensorRow {
  int batch;
  int row;
};

// What a thread has of its block: every so many units of consecutive rows. A unit is on its way
// while the one before it is moved.
template <class Element>
class Mover {
 public:
  __device__ __forceinline__ Mover(const Params& params, int first, int count)
      : params_(params), first_(first) {
    begin_ = static_cast<int>(blockIdx.y) * params.block_units + static_cast<int>(threadIdx.x);
    end_ = min((static_cast<int>(blockIdx.y) + 1) * params.block_units,
               count * params.row_units.number());
    if (begin_ < end_) load_at(begin_, next_);
  }

  // token_of(row of the block, row of the tensors, &token) says false of rows that no sequence has.
  template <class TokenOf>
  __device__ __forceinline__ void run(bool again, const TokenOf& token_of) {
    if (again && begin_ < end_) load_at(begin_, next_);
    const int step = static_cast<int>(blockDim.x);
    for (int i = begin_; i < end_; i += step) {
      Piece now[kUnitHeads][2];
#pragma unroll
      for (int head = 0; head < kUnitHeads; ++head) {
#pragma unroll
        for (int word = 0; word < 8; ++word) {
          now[head][word / 4][word % 4] = next_[head][word / 4][word % 4];
        }
      }
      if (i + step < end_) load_at(i + step, next_);
      const int row = params_.row_units.quotient(i);
      const Unit unit = unit_at<Element>(params_, i - row * params_.row_units.number());
      Token token;
      if (token_of(row, tensor_row(row), &token)) move<Element>(params_, token, unit, now);
    }
  }

 private:
  __device__ __forceinline__ TensorRow tensor_row(int row) const {
    if (params_.cu_seqlens.given()) return {0, first_ + row};
    const int batch = params_.rows_of_batch.quotient(first_ + row);
    return {batch, first_ + row - batch * params_.rows_of_batch.number()};
  }
  __device__ __forceinline__ void load_at(int i, Piece (&pieces)[kUnitHeads][2]) const {
    const int row = params_.row_units.quotient(i);
    const TensorRow at = tensor_row(row);
    load(params_, unit_at<Element>(params_, i - row * params_.row_units.number()), at.batch, at.row,
         pieces);
  }

  const Params& params_;
  const int first_;
  int begin_;
  int end_;
  Piece next_[kUnitHeads][2];
};

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

// The next sequence of each of the block's rows, by all of its threads.
__device__ __forceinline__ void find_owners(const Params& params, int first, int count, bool again,
                                            Owners* owners) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  __syncthreads();  // the last round's have been read
  for (int row = thread; row < count; row += threads) {
    // Of later rounds the count is the last owner: only those behind it are looked for.
    owners->counts[row] = again ? owners->of_row[row] : 0;
    owners->of_row[row] = INT_MAX;
  }
  if (thread == 0 && !again) owners->rounds = 0;
  __syncthreads();
  const auto claim = [&](int s, int begin, int end) {
    // Most sequences end before the block's rows or begin behind them.
    if (end <= first || begin >= first + count) return;
    for (int row = max(begin, first) - first; row < min(end, first + count) - first; ++row) {
      if (!again) {
        atomicMax(&owners->rounds, atomicAdd(&owners->counts[row], 1) + 1);
      } else if (s <= owners->counts[row]) {
        continue;
      }
      atomicMin(&owners->of_row[row], s);
    }
  };
  const TableNumbers& offsets = params.cu_seqlens;
  int s = 0;
  if (offsets.stride == 1 && reinterpret_cast<uintptr_t>(offsets.data) % sizeof(int4) == 0) {
    const int whole = params.sequences / 4 * 4;
#pragma unroll 2
    for (s = 4 * thread; s < whole; s += 4 * threads) {
      const int4 at = *reinterpret_cast<const int4*>(offsets.data + s);
      claim(s, at.x, at.y);
      claim(s + 1, at.y, at.z);
      claim(s + 2, at.z, at.w);
      claim(s + 3, at.w, offsets.data[s + 4]);
    }
    s = whole;
  }
  for (s += thread; s < params.sequences; s += threads) claim(s, offsets.at(s), offsets.at(s + 1));
  __syncthreads();
}

// ---- kernel -------------------------------------------------------------------------------------

// So many that registers hold what is on its way, and no more.
inline constexpr int kBlocksPerMultiprocessor = kUnitHeads == 1 ? 4 : 2;

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    kv_append_kernel(const __grid_constant__ Params params) {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  const int first = static_cast<int>(blockIdx.x) * params.block_rows;
  const int count = min(params.block_rows, params.rows - first);
  Mover<Element> mover(params, first, count);
  if (!params.cu_seqlens.given()) {
    mover.run(false, [&](int, const TensorRow& at, Token* token) {
      *token = {at.batch, at.row, at.batch, at.row, params.seq};
      if (params.seqused.given()) {
        token->length = SequenceParams::cut(params.seqused.at(at.batch), 0, params.seq);
      }
      return true;
    });
    return;
  }
  __shared__ Owners owners;
  for (int round = 0; round == 0 || round < owners.rounds; ++round) {
    find_owners(params, first, count, round > 0, &owners);
    mover.run(round > 0, [&](int row, const TensorRow& at, Token* token) {
      const int sequence = owners.of_row[row];
      if (sequence == INT_MAX) return false;
      const PackedRows rows = packed_rows(params, sequence);
      *token = {0, at.row, sequence, at.row - rows.begin, rows.length};
      if (params.seqused.given()) {
        token->length = SequenceParams::cut(params.seqused.at(sequence), 0, rows.length);
      }
      return true;
    });
  }
}

}  // namespace flashmoe::kv_append
