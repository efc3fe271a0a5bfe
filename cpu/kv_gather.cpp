// Gathering keys and values of a cache on the CPU: plan and launch.
//
// The work is memory-bound: each row is read once and written once. Tiles are runs of rows of the
// results. A tile finds out at its beginning which sequence has each row; no number leads outside a
// tensor.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/launch.h"
#include "cpu/isa.h"
#include "cpu/numbers.h"
#include "cpu/sequence_rows.h"
#include "cpu/thread_pool.h"

namespace flashmoe {
namespace {

using cpu::Range;
using Problem = KvGatherProblem;

// Bytes of a tile, and the fewest for which waking a thread pays: some ten microseconds of copying.
constexpr double kBytesPerTile = 64 << 10;
constexpr double kBytesPerThread = 128 << 10;

bool is_packed(const Problem& p) { return p.cu_seqlens_k.data != nullptr; }

// Rows of the results, over all sequences.
int64_t rows_of_call(const Problem& p) {
  if (is_packed(p)) return p.seq;
  int64_t rows;
  return __builtin_mul_overflow(p.batch, p.seq, &rows) ? INT64_MAX : rows;
}

struct Launch {
  const Problem& problem;
  int64_t rows;
  int64_t tile;
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

// The keys of sequence b, as if its pages were contiguous.
Range keys_of(const Problem& p, int64_t b) {
  Range keys = {0, p.rows_cache};
  if (p.page_table.data != nullptr &&
      __builtin_mul_overflow(p.page_count, p.rows_cache, &keys.count)) {
    keys.count = INT64_MAX;
  }
  if (p.batch_index.data != nullptr) {
    const int64_t batch = p.batch_index.at(b);
    if (batch < 0 || batch >= p.batch_cache) return {0, 0};
  }
  cpu::cut_at_end(p.seqused_k, b, &keys);
  if (p.k_begin.data == nullptr) return keys;
  const int64_t skipped = std::clamp<int64_t>(p.k_begin.at(b), 0, keys.count);
  return {skipped, keys.count - skipped};
}

// Rows of the results.
struct Rows {
  int64_t batch;
  Range range;
};

// The numbers of all heads of one row.
class Row {
 public:
  Row(const RowsView<const void>& cache, const RowsView<void>& result, const KeyScales& scales,
      int64_t heads, int64_t dim)
      : from_(cache), to_(result), scales_(scales), heads_(heads), dim_(dim) {}

  void copy(int64_t page, int64_t row, int64_t to_batch, int64_t to_row) const {
    if (from_.dtype != to_.dtype) return widen(page, row, to_batch, to_row);
    const int64_t bytes = dim_ * dtype_bytes(to_.dtype);
    const bool whole = from_.strides.head == dim_ && to_.strides.head == dim_;
    const int64_t steps = whole ? 1 : heads_;
    for (int64_t head = 0; head < steps; ++head) {
      std::memcpy(at(to_, to_batch, to_row, head), at(from_, page, row, head),
                  static_cast<size_t>(whole ? bytes * heads_ : bytes));
    }
  }

  void clear(int64_t to_batch, int64_t to_row) const {
    for (int64_t head = 0; head < heads_; ++head) {
      std::memset(at(to_, to_batch, to_row, head), 0,
                  static_cast<size_t>(dim_ * dtype_bytes(to_.dtype)));
    }
  }

 private:
  void widen(int64_t page, int64_t row, int64_t to_batch, int64_t to_row) const {
    float numbers[kMostAppendedDim];
    for (int64_t head = 0; head < heads_; ++head) {
      cpu::widen(at(from_, page, row, head), from_.dtype, 0, dim_, numbers);
      if (scales_.data != nullptr) {
        const float scale = *scales_.at(page, head);
        for (int64_t i = 0; i < dim_; ++i) numbers[i] *= scale;
      }
      cpu::narrow(numbers, dim_, at(to_, to_batch, to_row, head), to_.dtype, 0);
    }
  }

  const RowsView<const void>& from_;
  const RowsView<void>& to_;
  const KeyScales& scales_;
  int64_t heads_;
  int64_t dim_;
};

// Gathers the rows of sequence b that are in `rows`, without the first `begin` of its own.
void gather(const Problem& p, int64_t b, const Range& own, const Rows& rows) {
  const Range keys = keys_of(p, b);
  const Row of_k(p.k_cache, p.k, p.k_scale, p.heads_kv, p.dim);
  const Row of_v(p.v_cache, p.v, p.v_scale, p.heads_kv, p.dim_v);
  const int64_t end = std::min(rows.range.end(), own.begin + std::min(own.count, keys.count));
  for (int64_t row = rows.range.begin; row < end; ++row) {
    int64_t page = p.batch_index.data != nullptr ? p.batch_index.at(b) : b;
    int64_t key = keys.begin + row - own.begin;
    if (p.page_table.data != nullptr) {
      const int64_t element = b * p.page_table.stride + key / p.rows_cache * p.page_step;
      page = static_cast<const int32_t*>(p.page_table.data)[element];
      key %= p.rows_cache;
    }
    const bool there = page >= 0 && page < p.batch_cache;
    for (const Row* each : {&of_k, &of_v}) {
      if (each == &of_v && p.v.data == nullptr) continue;
      if (there) {
        each->copy(page, key, rows.batch, row);
      } else {
        each->clear(rows.batch, row);
      }
    }
  }
}

// Gathers rows [first, first + count) of all.
void gather_rows(const Problem& p, int64_t first, int64_t count) {
  if (!is_packed(p)) {
    for (int64_t row = first; row < first + count;) {
      const int64_t b = row / p.seq, begin = row % p.seq;
      const int64_t here = std::min(first + count - row, p.seq - begin);
      gather(p, b, {0, p.seq}, {b, {begin, here}});
      row += here;
    }
    return;
  }
  // A row belongs to the first sequence that has it. Every sequence in turn searches the rest of
  // the tile, in runs of rows that no earlier one has.
  constexpr int64_t kMostRun = 256;
  for (int64_t begin = first; begin < first + count; begin += kMostRun) {
    const int64_t run = std::min(kMostRun, first + count - begin);
    bool taken[kMostRun] = {};
    int64_t left = run;
    for (int64_t b = 0; b < p.batch && left > 0; ++b) {
      const Range own = cpu::packed_range(p.cu_seqlens_k, b, p.seq);
      int64_t row = std::max(own.begin, begin);
      const int64_t end = std::min(own.end(), begin + run);
      while (row < end) {
        int64_t stop = row;
        while (stop < end && !taken[stop - begin]) taken[stop++ - begin] = true;
        if (stop > row) gather(p, b, own, {0, {row, stop - row}});
        left -= stop - row;
        row = stop + 1;
      }
    }
  }
}

void work(void* context, int32_t /*worker*/) {
  Launch& launch = *static_cast<Launch*>(context);
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch.tiles) return;
    const int64_t first = index * launch.tile;
    gather_rows(launch.problem, first, std::min(launch.tile, launch.rows - first));
  }
}

// ---- plan and launch ----------------------------------------------------------------------------

// Bytes of a row of all heads, read and written.
double bytes_of_row(const Problem& p) {
  const auto numbers = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  return numbers * static_cast<double>(dtype_bytes(p.k.dtype) + dtype_bytes(p.k_cache.dtype));
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& /*reason*/) {
  const int64_t rows = rows_of_call(p);
  const double of_row = std::max(bytes_of_row(p), 1.0);
  const auto wanted_rows = static_cast<int64_t>(kBytesPerTile / of_row);
  const int64_t tile =
      std::clamp<int64_t>(std::max<int64_t>(wanted_rows, ceil_div(rows, UINT32_MAX)), 1, INT32_MAX);
  const int64_t tiles = std::min<int64_t>(ceil_div(rows, tile), UINT32_MAX);
  const auto most = static_cast<double>(cpu::num_threads());
  auto threads = static_cast<int64_t>(
      std::clamp(static_cast<double>(rows) * of_row / kBytesPerThread, 1.0, most));
  threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(tiles, 1));
  char name[sizeof flashmoe_launch::kernel];
  std::snprintf(name, sizeof name, "kv_gather_cpu_%s%s", dtype_name(p.k.dtype),
                p.k_cache.dtype != p.k.dtype ? "_fp8" : "");
  plan->set_isa(cpu::isa_name(cpu::Isa::kScalar));
  flashmoe_launch& launch = plan->add_launch(name, nullptr, p.device, static_cast<uint32_t>(tiles),
                                             static_cast<uint32_t>(threads));
  launch.tile_m = static_cast<int32_t>(tile);
  launch.dim = static_cast<int32_t>(p.dim);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  return FLASHMOE_OK;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* /*stream*/) {
  const flashmoe_launch& planned = plan.info.launches[0];
  const int64_t rows = rows_of_call(p);
  Launch launch = {p, rows, planned.tile_m, ceil_div(rows, planned.tile_m)};
  cpu::parallel_run(static_cast<int32_t>(planned.block[0]), work, &launch);
  record_launch(planned);
  return FLASHMOE_OK;
}

}  // namespace

const KvGatherFamily kCpuKvGather = {"cpu", FLASHMOE_DEVICE_CPU, plan, launch};

}  // namespace flashmoe
