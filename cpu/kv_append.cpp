// Appending to a cache of keys and values on the CPU: plan and launch.
//
// The work is memory-bound: each new row is read once and written once, and rotated on the way if
// asked for. Tiles are runs of rows of one sequence, whose table entries are read when a tile
// begins; no number leads outside a tensor. Every instruction set rotates to the same bits: in
// fp32, with each product and each sum rounded.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/isa.h"
#include "cpu/kv_append_kernel.h"
#include "cpu/numbers.h"
#include "cpu/sequence_rows.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::Range;
using cpu::RotatedHeads;
using cpu::RotationKernel;
using Problem = KvAppendProblem;

// Bytes of a tile, and the fewest for which waking a thread pays: some ten microseconds of copying.
constexpr double kBytesPerTile = 64 << 10;
constexpr double kBytesPerThread = 128 << 10;
constexpr int64_t kTilesPerThread = 4;  // at most, in a packed batch: each sequence has that many

// ---- rotation -----------------------------------------------------------------------------------

void rotate_fp64_heads(const RotatedHeads& row) {
  const auto* const c = static_cast<const double*>(row.cos);
  const auto* const s = static_cast<const double*>(row.sin);
  const int64_t step = row.interleaved ? 2 : 1, other = row.interleaved ? 1 : row.pairs;
  for (int64_t head = 0; head < row.heads; ++head) {
    const auto* const x =
        reinterpret_cast<const double*>(static_cast<const char*>(row.from) + head * row.from_step);
    auto* const y = reinterpret_cast<double*>(static_cast<char*>(row.to) + head * row.to_step);
    for (int64_t i = 0; i < row.pairs; ++i) {
      const double a = x[step * i], b = x[step * i + other];
      y[step * i] = a * c[i] - b * s[i];
      y[step * i + other] = b * c[i] + a * s[i];
    }
  }
}

constexpr RotationKernel kFp64Rotation = {"scalar", rotate_fp64_heads};

const RotationKernel& rotation_for(cpu::Isa isa, Dtype rows, Dtype tables) {
  if (rows == Dtype::kFloat64) return kFp64Rotation;
  const int index = static_cast<int>(rows);
  const int wide = tables == Dtype::kFloat32 ? 1 : 0;
  switch (isa) {
#if FLASHMOE_CPU_X86
    case cpu::Isa::kAmx:
    case cpu::Isa::kAvx512Bf16:
    case cpu::Isa::kAvx512: return cpu::kAvx512Rotation[index][wide];
    case cpu::Isa::kAvx2: return cpu::kAvx2Rotation[index][wide];
#endif
    default: return cpu::kScalarRotation[index][wide];
  }
}

// ---- rows ---------------------------------------------------------------------------------------

struct Launch {
  const Problem& problem;
  const RotationKernel& rotation;
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

// A row of the cache: its batch row or page, and its row there.
struct Place {
  int64_t batch;
  int64_t row;
};

// One sequence: the places of its new rows, and where they go.
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

  // Appends its rows [begin, begin + count).
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

  // Sets the position of row `row` of the tensor, the i-th of its sequence; false if the tables do
  // not reach it.
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
    if (p_.k_cache.dtype == Dtype::kFloat8E4M3) {
      narrow_row(p_.k, from, position, p_.k_cache, to, p_.dim, p_.rotary.dim, p_.k_scale);
      narrow_row(p_.v, from, position, p_.v_cache, to, p_.dim_v, 0, p_.v_scale);
      return;
    }
    move(p_.k, batch_, from, position, p_.k_cache, to, p_.heads_kv);
    copy(p_.v, batch_, from, p_.v_cache, to, p_.heads_kv, 0, p_.dim_v);
  }

  // Writes a row of k or v to a cache of fp8.
  void narrow_row(const RowsView<const void>& from, int64_t row, int64_t position,
                  const RowsView<void>& to, const Place& place, int64_t dim, int64_t rotary_dim,
                  const KeyScales& scales) const {
    alignas(64) unsigned char turned[kMostAppendedDim * sizeof(float)];
    float numbers[kMostAppendedDim];
    const Rotary& rotary = p_.rotary;
    for (int64_t head = 0; head < p_.heads_kv; ++head) {
      const void* const source = at(from, batch_, row, head);
      cpu::widen(source, from.dtype, 0, dim, numbers);
      if (rotary_dim > 0) {
        launch_.rotation.rotate({source, 0, turned, 0, 1, at(rotary.cos, position, rotary.dtype),
                                 at(rotary.sin, position, rotary.dtype), rotary_dim / 2,
                                 rotary.interleaved});
        cpu::widen(turned, from.dtype, 0, rotary_dim, numbers);
      }
      if (scales.data != nullptr) {
        const float scale = *scales.at(place.batch, head);
        for (int64_t i = 0; i < dim; ++i) numbers[i] /= scale;
      }
      cpu::narrow(numbers, dim, at(to, place.batch, place.row, head), to.dtype, 0);
    }
  }

  void rotate_query(int64_t i) const {
    const int64_t row = queries_.begin + i;
    int64_t position;
    if (!stands_at(row, p_.rotary.q_stays ? 0 : i, &position)) return;
    move(p_.q, batch_, row, position, p_.q_out, {batch_, row}, p_.heads_q);
  }

  // Moves a row of k or q, perhaps in place.
  void move(const RowsView<const void>& from, int64_t batch, int64_t row, int64_t position,
            const RowsView<void>& to, const Place& place, int64_t heads) const {
    const Rotary& rotary = p_.rotary;
    const int64_t element = dtype_bytes(p_.k.dtype);
    const void* const source = at(from, batch, row, 0);
    void* const target = at(to, place.batch, place.row, 0);
    if (rotary.dim > 0) {
      // The stride of a single head may be any number.
      const int64_t step = heads > 1 ? element : 0;
      launch_.rotation.rotate({source, from.strides.head * step, target, to.strides.head * step,
                               heads, at(rotary.cos, position, rotary.dtype),
                               at(rotary.sin, position, rotary.dtype), rotary.dim / 2,
                               rotary.interleaved});
    }
    if (source != target) copy(from, batch, row, to, place, heads, rotary.dim, p_.dim);
  }

  // Copies numbers [first, end) of each head; all heads at once if they are contiguous.
  void copy(const RowsView<const void>& from, int64_t batch, int64_t row, const RowsView<void>& to,
            const Place& place, int64_t heads, int64_t first, int64_t end) const {
    if (first == end) return;
    int64_t numbers = end - first;
    if (first == 0 && from.strides.head == end && to.strides.head == end) {
      numbers *= heads;
      heads = 1;
    }
    const int64_t element = dtype_bytes(from.dtype);
    const auto* source = static_cast<const char*>(at(from, batch, row, 0)) + first * element;
    auto* target = static_cast<char*>(at(to, place.batch, place.row, 0)) + first * element;
    for (int64_t head = 0; head < heads; ++head) {
      std::memcpy(target + head * to.strides.head * element,
                  source + head * from.strides.head * element,
                  static_cast<size_t>(numbers * element));
    }
  }

  const Launch& launch_;
  const Problem& p_;
  const int64_t b_;
  int64_t batch_;      // batch row of its new rows
  int64_t begin_ = 0;  // the keys it has in the cache
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

// The most rows of a sequence.
int64_t most_rows(const Problem& p) { return std::max(p.seq, p.seq_q); }

// Bytes of a row of all heads, read and written.
double bytes_of_row(const Problem& p) {
  const auto keys = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  const auto queries = static_cast<double>(p.heads_q) * static_cast<double>(p.dim);
  return 2 * (keys + queries) * static_cast<double>(dtype_bytes(p.k.dtype));
}

int64_t choose_tile(const Problem& p, int64_t threads) {
  const double wanted = kBytesPerTile / std::max(bytes_of_row(p), 1.0);
  const int64_t rows = std::max<int64_t>(static_cast<int64_t>(wanted), 1);
  // It is unknown which sequence of a packed batch has the rows.
  const int64_t least =
      p.cu_seqlens.data != nullptr ? ceil_div(p.seq, kTilesPerThread * threads) : 1;
  return std::clamp<int64_t>(std::max(rows, least), 1, INT32_MAX);
}

// Tiles of all sequences, saturating.
int64_t tiles_of(const Problem& p, int64_t tile) {
  int64_t tiles;
  const bool overflows = __builtin_mul_overflow(p.batch, ceil_div(most_rows(p), tile), &tiles);
  return overflows ? INT64_MAX : tiles;
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  cpu::Isa isa;
  FLASHMOE_TRY(cpu::chosen_isa(&isa, reason));
  const RotationKernel& rotation = rotation_for(isa, p.k.dtype, p.rotary.dtype);
  const auto sequences = static_cast<double>(p.cu_seqlens.data != nullptr ? 1 : p.batch);
  const double wanted =
      sequences * static_cast<double>(most_rows(p)) * bytes_of_row(p) / kBytesPerThread;
  const auto most = static_cast<double>(cpu::num_threads());
  auto threads = static_cast<int64_t>(std::clamp(wanted, 1.0, most));
  const int64_t tile = choose_tile(p, threads);
  const int64_t tiles = std::min<int64_t>(tiles_of(p, tile), UINT32_MAX);
  threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(tiles, 1));
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "kv_append_cpu_%s_%s%s%s", rotation.isa, dtype_name(p.k.dtype),
                p.k_cache.dtype != p.k.dtype ? "_fp8" : "",
                p.rotary.dim == 0      ? ""
                : p.rotary.interleaved ? "_rotary_interleaved"
                                       : "_rotary_neox");
  plan->set_isa(rotation.isa);
  flashmoe_launch& launch = plan->add_launch(
      name, &rotation, p.device, static_cast<uint32_t>(tiles), static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(tile);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  return FLASHMOE_OK;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  Launch launch = {p, *static_cast<const RotationKernel*>(plan.entries[0]), planned.tile_m,
                   ceil_div(most_rows(p), planned.tile_m), tiles_of(p, planned.tile_m)};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const KvAppendFamily kCpuKvAppend = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
