// Appends to a cache: every new row of k and v goes to its place in the cache, and every row of q
// to q_out. Rows of k and q are rotated on the way if requested.
//
// The kernel is bound by memory. A thread has 32 bytes of a head at a time, and threads share only
// the owners of a packed batch. The data of a row does not depend on tables, so its loads are
// issued before the first table is read. Meanwhile each thread finds the row's place by itself: the
// tables are small, all threads of a row read the same entries, and these reads hit the L1. Blocks
// have consecutive rows or, if rows are few, parts of one.
//
// Tables may hold any numbers, but none leads outside a tensor: a row without a valid place or
// position is not written. The CPU does the same (cpu/kv_append.cpp), and rotation has its bits:
// fp32, with each product and each sum rounded.
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

// Waits for writes of earlier kernels of the stream; no thread reads memory before. Then lets the
// next kernel begin.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
}

// ---- numbers ------------------------------------------------------------------------------------

using Piece = uint32_t[4];

inline constexpr int kHalfWords = 2;

template <class Element>
struct Numbers16 {
  using Storage = uint16_t;
  using Numeric = numeric::ElementTraits<Element>;
  static constexpr int kPiece = 8;

  // Unpacks kWords words.
  template <int kWords>
  static __device__ __forceinline__ void unpack(const uint32_t* words, float (&x)[2 * kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 pair = Numeric::unpack(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  template <int kWords>
  static __device__ __forceinline__ void pack(const float (&x)[2 * kWords], uint32_t* words) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Numeric::pack(x[2 * i], x[2 * i + 1]);
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

  template <int kWords>
  static __device__ __forceinline__ void unpack(const uint32_t* words, float (&x)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[i] = __uint_as_float(words[i]);
  }
  template <int kWords>
  static __device__ __forceinline__ void pack(const float (&x)[kWords], uint32_t* words) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __float_as_uint(x[i]);
  }
  static __device__ __forceinline__ float widen(Storage x) { return x; }
  static __device__ __forceinline__ Storage round(float x) { return x; }
};

// Rotates (a, b) by the angle of cos and sin.
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

struct AngleRows {
  const char* cos;
  const char* sin;
};

// The angles of half a piece: a thread holds those of half of its unit at a time, so that enough
// threads fit.
template <class Element>
struct Angles {
  using Numbers = NumbersOf<Element>;
  static constexpr int kPairs = Numbers::kPiece / 2;
  float cos[kPairs];
  float sin[kPairs];

  // Loads the angles of pairs from `first` on, a multiple of kPairs; 0 beyond the last pair.
  __device__ __forceinline__ void load(const Rotary& rotary, const AngleRows& rows, int first) {
    if (rotary.vectors == 0) return load_singly(rotary, rows, first);
    if (rotary.wide != 0) {
      const int offset = first * static_cast<int>(sizeof(float));
      load_floats(rows.cos + offset, cos);
      load_floats(rows.sin + offset, sin);
      return;
    }
    if constexpr (sizeof(typename Numbers::Storage) == 2) {
      const uint2 of_cos = *reinterpret_cast<const uint2*>(rows.cos + first * 2);
      const uint2 of_sin = *reinterpret_cast<const uint2*>(rows.sin + first * 2);
      unpack(of_cos, cos);
      unpack(of_sin, sin);
    }
  }

 private:
  __device__ __forceinline__ void load_singly(const Rotary& rotary, const AngleRows& rows,
                                              int first) {
    const int count = rotary.pairs - first;
    if (rotary.wide != 0) {
      load_each<float>(rows.cos, first, count, cos);
      load_each<float>(rows.sin, first, count, sin);
    } else {
      load_each<typename Numbers::Storage>(rows.cos, first, count, cos);
      load_each<typename Numbers::Storage>(rows.sin, first, count, sin);
    }
  }
  template <class Storage>
  static __device__ __forceinline__ void load_each(const char* row, int first, int count,
                                                   float (&x)[kPairs]) {
    const Storage* const at = reinterpret_cast<const Storage*>(row) + first;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      x[i] = 0.0f;
      if (i >= count) continue;
      if constexpr (sizeof(Storage) == 4) {
        x[i] = at[i];
      } else {
        x[i] = Numbers::widen(at[i]);
      }
    }
  }
  static __device__ __forceinline__ void load_floats(const char* at, float (&x)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  }
  static __device__ __forceinline__ void load_floats(const char* at, float (&x)[2]) {
    const float2 two = *reinterpret_cast<const float2*>(at);
    x[0] = two.x, x[1] = two.y;
  }
  static __device__ __forceinline__ void unpack(const uint2& words, float (&x)[4]) {
    const uint32_t both[kHalfWords] = {words.x, words.y};
    Numbers::template unpack<kHalfWords>(both, x);
  }
};

// Rotates the numbers in the words of two pieces from kWord on, one piece per half.
template <int kWord, class Element>
__device__ __forceinline__ void turn_halves(const Angles<Element>& angles, Piece& low,
                                            Piece& high) {
  using Numbers = NumbersOf<Element>;
  constexpr int kPairs = Angles<Element>::kPairs;
  float a[kPairs], b[kPairs];
  Numbers::template unpack<kHalfWords>(low + kWord, a);
  Numbers::template unpack<kHalfWords>(high + kWord, b);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) turn(&a[i], &b[i], angles.cos[i], angles.sin[i]);
  Numbers::template pack<kHalfWords>(a, low + kWord);
  Numbers::template pack<kHalfWords>(b, high + kWord);
}

// Rotates the first `count` neighbouring pairs of a piece.
template <class Element>
__device__ __forceinline__ void turn_neighbours(const Angles<Element>& angles, int count,
                                                Piece& piece) {
  using Numbers = NumbersOf<Element>;
  float x[Numbers::kPiece];
  Numbers::template unpack<4>(piece, x);
#pragma unroll
  for (int i = 0; i < Angles<Element>::kPairs; ++i) {
    if (i < count) turn(&x[2 * i], &x[2 * i + 1], angles.cos[i], angles.sin[i]);
  }
  Numbers::template pack<4>(x, piece);
}

// ---- where rows are and where they go -----------------------------------------------------------

// The owner of a row of k, v and q.
struct Owner {
  int sequence;
  int index;   // of the row in its sequence
  int length;  // rows of k in its sequence
};

// A row of the cache. Its batch is one of the two numbers. The table's entry is not used before it
// is needed, because that waits for its load.
struct Place {
  int64_t row;
  int64_t of_slot;
  int32_t of_table;
};

__device__ __forceinline__ int64_t number_at(const Tokens& tokens, int batch, int row) {
  const int64_t element = batch * tokens.batch_stride + row * tokens.seq_stride;
  return tokens.wide != 0 ? static_cast<const int64_t*>(tokens.data)[element]
                          : static_cast<const int32_t*>(tokens.data)[element];
}

// For number >= 0 and divisor > 0. Where a product with a reciprocal is not exact, it divides bit
// by bit: a call of the compiler's division would take registers from everything else.
__device__ __forceinline__ int64_t quotient(const RowDivisor& divisor, int64_t number) {
  if (divisor.fits != 0 && number <= INT_MAX) return divisor.by.quotient(static_cast<int>(number));
  uint64_t found = 0, rest = 0;
#pragma unroll 1
  for (int bit = 62; bit >= 0; --bit) {
    rest = rest << 1 | (static_cast<uint64_t>(number) >> bit & 1);
    if (rest >= static_cast<uint64_t>(divisor.value)) {
      rest -= static_cast<uint64_t>(divisor.value);
      found |= uint64_t{1} << bit;
    }
  }
  return static_cast<int64_t>(found);
}

// The place of row `row` of the tensors according to the tables; it may be nowhere. `begin`: rows
// that the cache already has of its sequence.
__device__ __forceinline__ Place place_of(const Params& params, const Owner& owner, int batch,
                                          int row, int begin) {
  const RowDivisor& rows = params.rows_cache;
  Place place = {0, -1, -1};
  if (params.slots.data != nullptr) {
    const int64_t slot = number_at(params.slots, batch, row);
    if (slot < 0 || rows.value == 0) return place;
    place.of_slot = quotient(rows, slot);
    place.row = slot - place.of_slot * rows.value;
    return place;
  }
  place.row = int64_t{begin} + owner.index;
  if (params.page_table.given()) {
    if (rows.value == 0) return place;
    const int64_t page = quotient(rows, place.row);
    if (page >= params.page_count) return place;
    const TableNumbers& table = params.page_table;
    place.row -= page * rows.value;
    place.of_table = table.data[owner.sequence * table.stride + page * params.page_step];
  } else {
    place.of_table = owner.sequence;
    if (params.batch_index.given()) place.of_table = params.batch_index.at(owner.sequence);
  }
  return place;
}

__device__ __forceinline__ int64_t batch_of(const Params& params, const Place& place) {
  return params.slots.data != nullptr ? place.of_slot : place.of_table;
}

__device__ __forceinline__ bool is_there(const Params& params, int64_t batch, int64_t row) {
  return batch >= 0 && batch < params.batch_cache && row < params.rows_cache.value;
}

// Finds the angles of a row's position. Returns false if the tables of angles have no such
// position.
__device__ __forceinline__ bool stands_at(const Params& params, const Owner& owner, int batch,
                                          int row, int begin, bool is_query, AngleRows* angles) {
  const Rotary& rotary = params.rotary;
  const bool stays = is_query && rotary.q_stays != 0;
  const int64_t position = params.positions.data != nullptr
                               ? number_at(params.positions, batch, row)
                               : int64_t{begin} + (stays ? 0 : owner.index);
  if (position < 0 || position >= rotary.rows) return false;
  angles->cos = rotary.cos + position * rotary.cos_stride;
  angles->sin = rotary.sin + position * rotary.sin_stride;
  return true;
}

__device__ __forceinline__ char* row_at(const Rows& rows, int64_t batch, int64_t row, int head) {
  return rows.data + batch * rows.batch + row * rows.seq + head * rows.head;
}

// ---- caches of fp8 ------------------------------------------------------------------------------

// The nearest fp8 numbers, as bytes of a word. Beyond 448 they saturate at 448.
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// The scale that divides a head's numbers.
__device__ __forceinline__ float scale_of(const Scales& scales, int64_t batch, int head) {
  return scales.data == nullptr ? 1.0f : scales.data[batch * scales.batch + head * scales.head];
}

// Stores a piece of kPiece numbers at element `index` of a head.
template <class Element>
__device__ __forceinline__ void store_narrow(const Piece& piece, float scale, char* to, int index) {
  using Numbers = NumbersOf<Element>;
  float x[Numbers::kPiece];
  uint32_t words[Numbers::kPiece / 4];
  Numbers::template unpack<4>(piece, x);
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

// What a thread moves at a time. It has two pieces of each of several neighbouring heads of one
// row, or a pair of numbers of one head. If halves are rotated, their pieces come first, one per
// half; the remaining pieces are also paired by halves. A thread reads all of its data of a row
// before it writes: q_out may be q.
template <class Element, Turn kTurn>
struct Unit {
  static constexpr int kPiece = NumbersOf<Element>::kPiece;
  static constexpr int kHeads = kTurn == Turn::kNumbers ? 1 : kMostUnitHeads;
  int batch;
  int row;
  int stream;
  int head;    // the first one
  int number;  // within each head
  int low;     // pieces of a head
  int high;    // negative: no second piece
  Piece pieces[kHeads][2];

  __device__ __forceinline__ bool is_query() const { return stream == kQueries; }
  __device__ __forceinline__ bool is_turned() const {
    return kTurn != Turn::kNone && stream != kValues;
  }
  __device__ __forceinline__ bool is_by_number() const {
    return kTurn == Turn::kNumbers && is_turned();
  }
  // Pieces per half.
  static __device__ __forceinline__ int halves_of(const Params& params) {
    return kTurn == Turn::kHalves ? params.rotary.pairs / kPiece : 0;
  }
  __device__ __forceinline__ int heads(const Params& params) const {
    return min(params.unit_heads, params.heads[stream] - head);
  }

  // Finds the unit with index `of_row` in its row.
  __device__ __forceinline__ void find(const Params& params, int of_row) {
    stream = (of_row >= params.ends[kKeys]) + (of_row >= params.ends[kValues]);
    if (stream > 0) of_row -= params.ends[stream - 1];
    const int group = params.units[stream].quotient(of_row);
    number = of_row - group * params.units[stream].number();
    head = group * params.unit_heads;
    const int halves = is_turned() ? halves_of(params) : 0;
    low = number < halves ? number : halves + number;
    high = low + (number < halves ? halves : (params.pieces[stream] - 2 * halves + 1) / 2);
    if (high >= params.pieces[stream]) high = -1;
  }

  __device__ __forceinline__ void load(const Params& params) {
    if (is_by_number()) return;
    const char* from = row_at(params.from[stream], batch, row, head);
    const int first = low * kPieceBytes, second = high * kPieceBytes;
    const int count = heads(params);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      ptx::load_or_zero(pieces[j][0], from + first, j < count);
      ptx::load_or_zero(pieces[j][1], from + second, j < count && high >= 0);
      from += params.from[stream].head;
    }
  }

  __device__ __forceinline__ void move(const Params& params, const Owner& owner) {
    if (owner.index >= (is_query() ? params.seq_q : owner.length)) return;
    const int begin = params.cache_seqlens.given() ? params.cache_seqlens.at(owner.sequence) : 0;
    if (begin < 0) return;
    AngleRows rows = {};
    if (kTurn != Turn::kNone && !stands_at(params, owner, batch, row, begin, is_query(), &rows)) {
      return;
    }
    // The first angles are loaded before the place is used, which needs a further load.
    Place place = {row, batch, 0};
    if (!is_query()) place = place_of(params, owner, batch, row, begin);
    Angles<Element> angles;
    const int first = first_pair(params, 0);
    if (first < params.rotary.pairs) angles.load(params.rotary, rows, first);
    const int64_t place_batch = is_query() ? batch : batch_of(params, place);
    if (!is_query() && !is_there(params, place_batch, place.row)) return;
    char* const to = row_at(params.to[stream], place_batch, place.row, head);
    if (is_by_number()) return move_numbers(params, rows, place_batch, to);
    if (first < params.rotary.pairs) turn<0>(params, angles, first);
    const int second = first_pair(params, 1);
    if (second < params.rotary.pairs) {
      angles.load(params.rotary, rows, second);
      turn<1>(params, angles, second);
    }
    if (params.fp8 != 0 && !is_query()) return store_fp8(params, place_batch, to);
    store(params, to);
  }

 private:
  // The first pair of either half of a rotated unit; INT_MAX if there is none.
  __device__ __forceinline__ int first_pair(const Params& params, int half) const {
    if (!is_turned() || kTurn == Turn::kNumbers) return INT_MAX;
    if (kTurn == Turn::kNeighbours) {
      int piece = half == 0 ? low : high;
      asm volatile("" : "+r"(piece));  // computed here and not earlier: it would be spilled
      return piece < 0 ? INT_MAX : piece * Angles<Element>::kPairs;
    }
    return low < halves_of(params) ? low * kPiece + half * Angles<Element>::kPairs : INT_MAX;
  }

  template <int kHalf>
  __device__ __forceinline__ void turn(const Params& params, const Angles<Element>& angles,
                                       int first) {
    const int count = heads(params);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (j >= count) break;
      if constexpr (kTurn == Turn::kHalves) {
        turn_halves<kHalf * kHalfWords>(angles, pieces[j][0], pieces[j][1]);
      } else if constexpr (kTurn == Turn::kNeighbours) {
        turn_neighbours(angles, params.rotary.pairs - first, pieces[j][kHalf]);
      }
    }
  }

  __device__ __forceinline__ void store(const Params& params, char* to) const {
    const int first = low * kPieceBytes, second = high * kPieceBytes;
    const int count = heads(params);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (j < count) {
        const Piece& a = pieces[j][0];
        const Piece& b = pieces[j][1];
        *reinterpret_cast<uint4*>(to + first) = make_uint4(a[0], a[1], a[2], a[3]);
        if (high >= 0) {
          *reinterpret_cast<uint4*>(to + second) = make_uint4(b[0], b[1], b[2], b[3]);
        }
      }
      to += params.to[stream].head;
    }
  }

  __device__ __forceinline__ void store_fp8(const Params& params, int64_t place_batch,
                                            char* to) const {
    // Hides the values from the compiler: products kept since pairs were found would be spilled.
    int first = low, second = high;
    asm volatile("" : "+r"(first), "+r"(second));
    const int count = heads(params);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (j < count) {
        const float scale = scale_of(params.scales[stream], place_batch, head + j);
        store_narrow<Element>(pieces[j][0], scale, to, first * kPiece);
        if (high >= 0) store_narrow<Element>(pieces[j][1], scale, to, second * kPiece);
      }
      to += params.to[stream].head;
    }
  }

  // Moves a pair of numbers from halves that are no whole pieces, or numbers behind the halves.
  __device__ __forceinline__ void move_numbers(const Params& params, const AngleRows& rows,
                                               int64_t place_batch, char* to) const {
    using Numbers = NumbersOf<Element>;
    using Storage = typename Numbers::Storage;
    const bool narrow = params.fp8 != 0 && !is_query();
    const float scale = narrow ? scale_of(params.scales[stream], place_batch, head) : 1.0f;
    const auto put = [&](int index, Storage x) {
      if (narrow) {
        to[index] = static_cast<char>(narrow_pair(__fdiv_rn(Numbers::widen(x), scale), 0.0f));
      } else {
        reinterpret_cast<Storage*>(to)[index] = x;
      }
    };
    const Rotary& rotary = params.rotary;
    const auto* const x =
        reinterpret_cast<const Storage*>(row_at(params.from[stream], batch, row, head));
    if (number >= rotary.pairs) return put(rotary.pairs + number, x[rotary.pairs + number]);
    float a = Numbers::widen(x[number]), b = Numbers::widen(x[number + rotary.pairs]);
    kv_append::turn(&a, &b, angle_at<Element>(rotary, rows.cos, number),
                    angle_at<Element>(rotary, rows.sin, number));
    put(number, Numbers::round(a));
    put(number + rotary.pairs, Numbers::round(b));
  }
};

// ---- blocks -------------------------------------------------------------------------------------

// The block's rows, and its units of them.
struct Share {
  int first;
  int count;
  int begin;
  int end;
};

__device__ __forceinline__ Share share_of(const Params& params) {
  Share share;
  share.first = static_cast<int>(blockIdx.x) * params.block_rows;
  share.count = min(params.block_rows, params.rows - share.first);
  share.begin = static_cast<int>(blockIdx.y) * params.block_units;
  share.end = min(share.begin + params.block_units, share.count * params.row_units.number());
  return share;
}

// ---- packed batches -----------------------------------------------------------------------------

// The owners of a block's rows. If offsets decrease, a row may belong to several sequences: each
// round handles the next one of every row.
struct Owners {
  int of_row[kMostBlockRows];  // INT_MAX: no owner
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

// Finds the next owner of each row after the previous round's. All threads of the block take part.
class OwnerSearch {
 public:
  __device__ __forceinline__ OwnerSearch(const Params& params, const Share& share, bool again,
                                         Owners* owners)
      : params_(params), share_(share), again_(again), owners_(owners) {}

  __device__ __forceinline__ void run() const {
    const int thread = static_cast<int>(threadIdx.x);
    int last = -1;
    if (again_ && thread < share_.count) last = owners_->of_row[thread];
    __syncthreads();
    if (thread < share_.count) {
      // The previous owner of a row is kept in its count, which no later round reads.
      owners_->counts[thread] = again_ ? last : 0;
      owners_->of_row[thread] = INT_MAX;
    }
    if (thread == 0 && !again_) owners_->rounds = 0;
    __syncthreads();
    if (params_.cu_seqlens.stride == 1) {
      look_through<true>();
    } else {
      look_through<false>();
    }
    __syncthreads();
  }

 private:
  // Every block searches all offsets, so this loop is short: only offsets that have some of the
  // block's rows are clamped.
  template <bool kContiguous>
  __device__ __forceinline__ void look_through() const {
    constexpr int kUnroll = 4;
    const int64_t stride = kContiguous ? 1 : params_.cu_seqlens.stride;
    const int threads = static_cast<int>(blockDim.x);
    const int end_of_rows = share_.first + share_.count;
    for (int s = static_cast<int>(threadIdx.x); s < params_.sequences; s += kUnroll * threads) {
      const int32_t* const at = params_.cu_seqlens.data + s * stride;
      int begins[kUnroll], ends[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        begins[j] = ends[j] = 0;
        if (s + j * threads < params_.sequences) {
          begins[j] = at[j * threads * stride];
          ends[j] = at[(j * threads + 1) * stride];
        }
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const bool has_rows =
            begins[j] < end_of_rows && ends[j] > share_.first && ends[j] > begins[j];
        if (has_rows) take(s + j * threads, begins[j], ends[j]);
      }
    }
  }

  __device__ __forceinline__ void take(int s, int begin, int end) const {
    const int last = min(end - share_.first, share_.count);
#pragma unroll 1
    for (int row = max(begin, share_.first) - share_.first; row < last; ++row) {
      if (!again_) {
        atomicMax(&owners_->rounds, atomicAdd(&owners_->counts[row], 1) + 1);
      } else if (s <= owners_->counts[row]) {
        continue;
      }
      atomicMin(&owners_->of_row[row], s);
    }
  }

  const Params& params_;
  const Share& share_;
  bool again_;
  Owners* owners_;
};

template <class Element, Turn kTurn>
__device__ __forceinline__ void move_packed_rows(const Params& params) {
  __shared__ Owners owners;
  const Share share = share_of(params);
  const int first = share.begin + static_cast<int>(threadIdx.x);
  Unit<Element, kTurn> unit;
  const auto find = [&](int i) {
    const int row = params.row_units.quotient(i);
    unit.batch = 0;
    unit.row = share.first + row;
    unit.find(params, i - row * params.row_units.number());
  };
  if (first < share.end) find(first);
  wait_for_others();
  if (first < share.end) unit.load(params);
  for (int round = 0; round == 0 || round < owners.rounds; ++round) {
    OwnerSearch(params, share, round > 0, &owners).run();
    for (int i = first; i < share.end; i += static_cast<int>(blockDim.x)) {
      if (i != first || round > 0) {
        find(i);
        unit.load(params);
      }
      const int sequence = owners.of_row[unit.row - share.first];
      if (sequence == INT_MAX) continue;
      const PackedRows rows = packed_rows(params, sequence);
      Owner owner = {sequence, unit.row - rows.begin, rows.length};
      if (params.seqused.given()) {
        owner.length = SequenceParams::cut(params.seqused.at(sequence), 0, rows.length);
      }
      unit.move(params, owner);
    }
  }
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Element, Turn kTurn>
__device__ __forceinline__ void move_rows(const Params& params) {
  const Share share = share_of(params);
  Unit<Element, kTurn> unit;
  const auto find = [&](int i) {
    const int row = params.row_units.quotient(i);
    unit.batch = params.rows_of_batch.quotient(share.first + row);
    unit.row = share.first + row - unit.batch * params.rows_of_batch.number();
    unit.find(params, i - row * params.row_units.number());
  };
  // Nearly always one iteration: a part of a row has as many units as the block has threads.
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int begin = share.begin; begin == share.begin || begin < share.end; begin += threads) {
    const bool any = begin + static_cast<int>(threadIdx.x) < share.end;
    if (any) find(begin + static_cast<int>(threadIdx.x));
    wait_for_others();  // all threads, even those without work (cuda/ptx/pdl.cuh)
    if (!any) continue;
    int length = params.seq;
    if (params.seqused.given()) {
      length = SequenceParams::cut(params.seqused.at(unit.batch), 0, params.seq);
    }
    if (unit.row >= (unit.is_query() ? params.seq_q : length)) continue;
    unit.load(params);
    unit.move(params, {unit.batch, unit.row, length});
  }
}

inline constexpr int kBlocks = 3;  // per multiprocessor, at least

template <class Element, Turn kTurn>
__global__ void __launch_bounds__(kThreads, kBlocks)
    kv_append_kernel(const __grid_constant__ Params params) {
  move_rows<Element, kTurn>(params);
}

template <class Element, Turn kTurn>
__global__ void __launch_bounds__(kThreads, kBlocks)
    kv_append_packed_kernel(const __grid_constant__ Params params) {
  move_packed_rows<Element, kTurn>(params);
}

}  // namespace flashmoe::kv_append
