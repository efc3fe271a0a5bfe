// Appending to a cache of keys and values on the CPU: plan and launch.
//
// The work is bound by memory: each new row is read once and written once, and rotated on its way
// where that is asked for. Tiles are runs of rows of one sequence, whose numbers are read when a
// tile is begun; no number leads outside of a tensor. Rows are rotated by the platform's baseline:
// in fp32, each product and each sum rounded, so that bits depend on nothing but the inputs.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/launch.h"
#include "cpu/attention_numeric.h"
#include "cpu/sequence_rows.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::Bf16;
using cpu::Fp16;
using cpu::Range;
using Problem = KvAppendProblem;

#include "cpu/simd_portable.h"

// A tile, and what a thread must find to be worth waking: some ten microseconds of copying.
constexpr double kBytesPerTile = 64 << 10;
constexpr double kBytesPerThread = 128 << 10;
constexpr int64_t kTilesPerThread = 4;  // at most, of a packed batch: each sequence has so many

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// ---- rotation -----------------------------------------------------------------------------------

// (a, b) by the angle of cos and sin.
template <class T, class C>
FLASHMOE_INLINE void rotate_halves(const T* from, const C* cos, const C* sin, int64_t pairs,
                                   T* to) {
  for (int64_t i = 0; i < pairs; i += Simd::kLanes) {
    const int64_t n = pairs - i;
    const auto a = Simd::load_first(from + i, n), b = Simd::load_first(from + pairs + i, n);
    const auto c = Simd::load_first(cos + i, n), s = Simd::load_first(sin + i, n);
    const auto ac = Simd::rounded(Simd::multiply(a, c)), bs = Simd::rounded(Simd::multiply(b, s));
    const auto bc = Simd::rounded(Simd::multiply(b, c)), as = Simd::rounded(Simd::multiply(a, s));
    Simd::store_first(to + i, Simd::subtract(ac, bs), n);
    Simd::store_first(to + pairs + i, Simd::add(bc, as), n);
  }
}

template <class T, class C>
FLASHMOE_INLINE void rotate_pairs(const T* from, const C* cos, const C* sin, int64_t pairs, T* to) {
  for (int64_t i = 0; i < pairs; i += Simd::kLanes) {
    const int64_t n = std::min<int64_t>(pairs - i, Simd::kLanes);
    const auto a = Simd::load_every_second(from + 2 * i, n);
    const auto b = Simd::load_every_second(from + 2 * i + 1, n);
    const auto c = Simd::load_first(cos + i, n), s = Simd::load_first(sin + i, n);
    const auto ac = Simd::rounded(Simd::multiply(a, c)), bs = Simd::rounded(Simd::multiply(b, s));
    const auto bc = Simd::rounded(Simd::multiply(b, c)), as = Simd::rounded(Simd::multiply(a, s));
    const auto first = Simd::subtract(ac, bs), second = Simd::add(bc, as);
    T firsts[Simd::kLanes], seconds[Simd::kLanes];
    Simd::store_first(firsts, first, n);
    Simd::store_first(seconds, second, n);
    for (int64_t lane = 0; lane < n; ++lane) {
      to[2 * (i + lane)] = firsts[lane];
      to[2 * (i + lane) + 1] = seconds[lane];
    }
  }
}

template <class T, class C>
void rotate_row(const void* from, const void* cos, const void* sin, int64_t pairs, bool interleaved,
                void* to) {
  const auto rotate = interleaved ? &rotate_pairs<T, C> : &rotate_halves<T, C>;
  rotate(static_cast<const T*>(from), static_cast<const C*>(cos), static_cast<const C*>(sin), pairs,
         static_cast<T*>(to));
}

void rotate_fp64_row(const void* from, const void* cos, const void* sin, int64_t pairs,
                     bool interleaved, void* to) {
  const auto* const x = static_cast<const double*>(from);
  const auto* const c = static_cast<const double*>(cos);
  const auto* const s = static_cast<const double*>(sin);
  auto* const y = static_cast<double*>(to);
  const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const double a = x[step * i], b = x[step * i + other];
    y[step * i] = a * c[i] - b * s[i];
    y[step * i + other] = b * c[i] + a * s[i];
  }
}

using RotateRow = void (*)(const void*, const void*, const void*, int64_t, bool, void*);

RotateRow rotation_of(Dtype rows, Dtype tables) {
  const bool wide = tables == Dtype::kFloat32;
  switch (rows) {
    case Dtype::kFloat32: return &rotate_row<float, float>;
    case Dtype::kFloat16: return wide ? &rotate_row<Fp16, float> : &rotate_row<Fp16, Fp16>;
    case Dtype::kBFloat16: return wide ? &rotate_row<Bf16, float> : &rotate_row<Bf16, Bf16>;
    case Dtype::kFloat64: return &rotate_fp64_row;
  }
  return nullptr;
}

// ---- rows ---------------------------------------------------------------------------------------

struct Launch {
  const Problem& problem;
  RotateRow rotate;
  int64_t tile;
  int64_t tiles_of_sequence;
  int64_t tiles;
  std::atomic<int64_t> next{0};
};

template <class Data>
Data* at(const RowsView<Data>& view, int64_t batch, int64_t row, int64_t head) {
  const int64_t elements =
      batch * view.strides.batch + row * view.strides.seq + head * view.strides.head;
  return reinterpret_cast<Data*>(reinterpret_cast<uintptr_t>(view.data) +
                                 static_cast<uintptr_t>(elements * dtype_bytes(view.dtype)));
}

const void* at(const RotaryTable& table, int64_t row, Dtype dtype) {
  return static_cast<const char*>(table.data) + row * table.stride * dtype_bytes(dtype);
}

// A row of the cache: its batch, or page, and its row there.
struct Place {
  int64_t batch;
  int64_t row;
};

// One sequence: where its new rows are, and where they go.
class Sequence {
 public:
  Sequence(const Launch& launch, int64_t b)
      : launch_(launch), p_(launch.problem), b_(b), keys_{0, p_.seq}, queries_{0, p_.seq_q} {
    if (p_.cu_seqlens.data != nullptr) {
      batch_ = 0;
      keys_ = cpu::packed_range(p_.cu_seqlens, b, p_.seq);
      if (p_.q.data != nullptr) queries_ = keys_;
    } else {
      batch_ = b;
    }
    cpu::cut_at_end(p_.seqused, b, &keys_);
    if (p_.cache_seqlens.data != nullptr) begin_ = p_.cache_seqlens.at(b);
    if (begin_ < 0) keys_.count = queries_.count = 0;
  }

  // Rows [begin, begin + count) of those that it has.
  void append(int64_t begin, int64_t count) const {
    for (int64_t i = begin; i < std::min(begin + count, keys_.count); ++i) append_row(i);
    for (int64_t i = begin; i < std::min(begin + count, queries_.count); ++i) rotate_query(i);
  }

 private:
  bool find(int64_t i, Place* place) const {
    if (p_.slots.data != nullptr) {
      const int64_t slot = p_.slots.at(batch_, keys_.begin + i);
      if (slot < 0 || p_.rows_cache == 0) return false;
      *place = {slot / p_.rows_cache, slot % p_.rows_cache};
      return place->batch < p_.batch_cache;
    }
    const int64_t row = begin_ + i;
    if (p_.page_table.data != nullptr) {
      if (p_.rows_cache == 0 || row / p_.rows_cache >= p_.page_count) return false;
      const Numbers& table = p_.page_table;
      const int64_t element = b_ * table.stride + row / p_.rows_cache * p_.page_step;
      *place = {static_cast<const int32_t*>(table.data)[element], row % p_.rows_cache};
    } else {
      *place = {p_.batch_index.data != nullptr ? p_.batch_index.at(b_) : b_, row};
    }
    return place->batch >= 0 && place->batch < p_.batch_cache && place->row < p_.rows_cache;
  }

  // Where row `row` of the tensor stands, the i-th of its sequence; false where no table reaches.
  bool stands_at(int64_t row, int64_t i, int64_t* position) const {
    *position = p_.positions.data != nullptr ? p_.positions.at(batch_, row) : begin_ + i;
    return *position >= 0 && *position < p_.rotary.rows;
  }

  void append_row(int64_t i) const {
    const int64_t from = keys_.begin + i;
    Place to;
    int64_t position = 0;
    if (!find(i, &to)) return;
    if (p_.rotary.dim > 0 && !stands_at(from, i, &position)) return;
    for (int64_t head = 0; head < p_.heads_kv; ++head) {
      move(at(p_.k, batch_, from, head), position, at(p_.k_cache, to.batch, to.row, head));
      std::memcpy(at(p_.v_cache, to.batch, to.row, head), at(p_.v, batch_, from, head),
                  static_cast<size_t>(p_.dim_v * dtype_bytes(p_.v.dtype)));
    }
  }

  void rotate_query(int64_t i) const {
    const int64_t row = queries_.begin + i;
    int64_t position;
    if (!stands_at(row, p_.rotary.q_stays ? 0 : i, &position)) return;
    for (int64_t head = 0; head < p_.heads_q; ++head) {
      move(at(p_.q, batch_, row, head), position, at(p_.q_out, batch_, row, head));
    }
  }

  // A row of k or q, which `to` may be.
  void move(const void* from, int64_t position, void* to) const {
    const Rotary& rotary = p_.rotary;
    const int64_t element = dtype_bytes(p_.k.dtype);
    if (rotary.dim > 0) {
      launch_.rotate(from, at(rotary.cos, position, rotary.dtype),
                     at(rotary.sin, position, rotary.dtype), rotary.dim / 2, rotary.interleaved,
                     to);
    }
    if (from == to) return;
    const auto skipped = static_cast<size_t>(rotary.dim * element);
    std::memcpy(static_cast<char*>(to) + skipped, static_cast<const char*>(from) + skipped,
                static_cast<size_t>(p_.dim * element) - skipped);
  }

  const Launch& launch_;
  const Problem& p_;
  const int64_t b_;
  int64_t batch_;      // row of the batch that its new rows are in
  int64_t begin_ = 0;  // what the cache has of it
  Range keys_;
  Range queries_;
};

void work(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch.tiles) return;
    const Sequence sequence(launch, index / launch.tiles_of_sequence);
    sequence.append(index % launch.tiles_of_sequence * launch.tile, launch.tile);
  }
}

// ---- plan and launch ----------------------------------------------------------------------------

// The most rows that a sequence may have.
int64_t most_rows(const Problem& p) { return std::max(p.seq, p.seq_q); }

// Of a row of all heads, read and written.
double bytes_of_row(const Problem& p) {
  const auto keys = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  const auto queries = static_cast<double>(p.heads_q) * static_cast<double>(p.dim);
  return 2 * (keys + queries) * static_cast<double>(dtype_bytes(p.k.dtype));
}

int64_t choose_tile(const Problem& p, int64_t threads) {
  const double wanted = kBytesPerTile / std::max(bytes_of_row(p), 1.0);
  const int64_t rows = std::max<int64_t>(static_cast<int64_t>(wanted), 1);
  // Which sequence of a packed batch has the rows is not known.
  const int64_t least =
      p.cu_seqlens.data != nullptr ? ceil_divide(p.seq, kTilesPerThread * threads) : 1;
  return std::clamp<int64_t>(std::max(rows, least), 1, INT32_MAX);
}

// Of all sequences, or what can be counted.
int64_t tiles_of(const Problem& p, int64_t tile) {
  int64_t tiles;
  const bool overflows = __builtin_mul_overflow(p.batch, ceil_divide(most_rows(p), tile), &tiles);
  return overflows ? INT64_MAX : tiles;
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& /*reason*/) {
  const auto sequences = static_cast<double>(p.cu_seqlens.data != nullptr ? 1 : p.batch);
  const double wanted =
      sequences * static_cast<double>(most_rows(p)) * bytes_of_row(p) / kBytesPerThread;
  const auto most = static_cast<double>(cpu::num_threads());
  auto threads = static_cast<int64_t>(std::clamp(wanted, 1.0, most));
  const int64_t tile = choose_tile(p, threads);
  const int64_t tiles = std::min<int64_t>(tiles_of(p, tile), UINT32_MAX);
  threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(tiles, 1));
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "kv_append_cpu_%s%s", dtype_name(p.k.dtype),
                p.rotary.dim == 0      ? ""
                : p.rotary.interleaved ? "_rotary_interleaved"
                                       : "_rotary_neox");
  flashmoe_launch& launch = plan->add_launch(name, nullptr, p.device, static_cast<uint32_t>(tiles),
                                             static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(tile);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  return FLASHMOE_OK;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  Launch launch = {p, rotation_of(p.k.dtype, p.rotary.dtype), planned.tile_m,
                   ceil_divide(most_rows(p), planned.tile_m), tiles_of(p, planned.tile_m)};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const KvAppendFamily kCpuKvAppend = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
