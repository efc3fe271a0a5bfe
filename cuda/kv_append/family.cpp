// Appending to a cache on a GPU. One implementation serves all GPUs. This file plans its kernel and
// makes the parameters of its launch.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <iterator>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/kv_append/entry.h"
#include "cuda/kv_append/params.h"
#include "cuda/launch.h"
#include "cuda/rows/partition.h"

namespace flashmoe::kv_append {
namespace {

using rows::bytes_of;
using rows::divisor_of;
using rows::fit_parts;
using rows::kMostRowUnits;
using rows::launch_one;
using rows::Partition;
using rows::rows_of;
using rows::scales_of;
using Problem = KvAppendProblem;

// Threads per multiprocessor that run at a time.
constexpr int64_t kThreadsAtATime = 768;

// A block of a packed batch searches all offsets before it begins. This many offsets cost a thread
// at most a tenth of the time to move a unit of four heads.
constexpr int64_t kOffsetsOfUnit = 8;
constexpr int64_t kMostThreadUnits = 32;

// Units of a thread that moves numbers, if there are very many: starting a thread for a single one
// is not worthwhile.
constexpr int64_t kNumberUnits = 4;
constexpr double kManyNumberUnits = 1 << 20;

// No choice depends on these.
constexpr double kMicroseconds = 2.5;
constexpr double kMemoryShare = 0.88;

int64_t numbers_of_piece(const Problem& p) { return kPieceBytes / dtype_bytes(p.k.dtype); }

bool is_packed(const Problem& p) { return p.cu_seqlens.data != nullptr; }

int64_t rows_of_batch(const Problem& p) { return std::max(p.seq, p.seq_q); }

// Rows of all sequences, each counted with all the rows that it has room for.
int64_t rows_of_call(const Problem& p) { return is_packed(p) ? p.seq : p.batch * rows_of_batch(p); }

// Whether the halves of rotated numbers are whole pieces, or no halves are paired.
bool has_whole_halves(const Problem& p) {
  return p.rotary.interleaved || p.rotary.dim / 2 % numbers_of_piece(p) == 0;
}

Turn turn_of(const Problem& p) {
  if (p.rotary.dim == 0) return Turn::kNone;
  if (p.rotary.interleaved) return Turn::kNeighbours;
  return has_whole_halves(p) ? Turn::kHalves : Turn::kNumbers;
}

// Units of a head, or of several heads side by side, of `dim` numbers.
int64_t units_of_head(const Problem& p, int64_t dim, bool turned) {
  const int64_t pairs = turned ? p.rotary.dim / 2 : 0;
  if (turned && turn_of(p) == Turn::kNumbers) return dim - pairs;
  const int64_t halves = turned && turn_of(p) == Turn::kHalves ? pairs / numbers_of_piece(p) : 0;
  return halves + ceil_div(dim / numbers_of_piece(p) - 2 * halves, 2);
}

// Units of a row, if a unit has `unit_heads` heads.
int64_t units_of_row(const Problem& p, int64_t unit_heads) {
  const int64_t of_key = units_of_head(p, p.dim, true);
  return ceil_div(p.heads_kv, unit_heads) * (of_key + units_of_head(p, p.dim_v, false)) +
         ceil_div(p.heads_q, unit_heads) * of_key;
}

// The kernel steps over the table of sequences by strides that must not pass 2^31.
bool fits_in_31_bits(const Problem& p) {
  return p.batch <= kMostTableRows && p.seq <= INT_MAX && p.seq_q <= INT_MAX &&
         p.heads_kv <= INT_MAX && p.heads_q <= INT_MAX;
}

// As few heads as keep all threads busy: the number of loads in flight decides how fast a small
// call is. With more heads, a thread's look-ups for a row serve more of them.
int unit_heads_of(const Problem& p, int multiprocessors) {
  if (turn_of(p) == Turn::kNumbers) return 1;
  const auto units = static_cast<double>(rows_of_call(p)) * static_cast<double>(units_of_row(p, 1));
  const auto at_a_time = static_cast<double>(multiprocessors * kThreadsAtATime);
  int heads = 1;
  while (heads < kMostUnitHeads && units > heads * at_a_time) heads *= 2;
  return heads;
}

// Cuts rows of row_units units each into blocks. It chooses the number of threads that leaves the
// fewest idle; each thread has `thread_units` units. Returns false if something does not fit in 31
// bits.
bool cut_rows(int64_t rows, int64_t row_units, int64_t thread_units, Partition* partition) {
  constexpr int64_t kStep = 32;
  Partition& s = *partition;
  if (rows > INT_MAX || row_units > kMostRowUnits) return false;
  s.rows = rows;
  s.row_units = row_units;
  double best = 0;
  for (int64_t threads = kThreads; threads >= kMostBlockRows; threads -= kStep) {
    const int64_t block_units = threads * thread_units;
    const int64_t block_rows =
        std::clamp<int64_t>(block_units / std::max<int64_t>(row_units, 1), 1, kMostBlockRows);
    const int64_t parts = std::max<int64_t>(ceil_div(block_rows * row_units, block_units), 1);
    const double busy =
        static_cast<double>(block_rows * row_units) / static_cast<double>(parts * block_units);
    if (busy <= best && s.threads != 0) continue;
    best = busy;
    s.threads = static_cast<int>(threads);
    s.block_units = block_units;
    s.block_rows = block_rows;
    s.parts = parts;
  }
  return fit_parts(partition);
}

// Returns false if something does not fit in 31 bits.
bool partition_of(const Problem& p, int unit_heads, Partition* partition) {
  int64_t thread_units = 1;
  const double units =
      static_cast<double>(rows_of_call(p)) * static_cast<double>(units_of_row(p, unit_heads));
  if (turn_of(p) == Turn::kNumbers && units > kManyNumberUnits) thread_units = kNumberUnits;
  if (is_packed(p)) {
    thread_units =
        std::clamp(ceil_div(p.batch, kOffsetsOfUnit * kThreads), thread_units, kMostThreadUnits);
  }
  return cut_rows(rows_of_call(p), units_of_row(p, unit_heads), thread_units, partition);
}

const Entry& find_entry(const Problem& p) {
  return *std::find_if(std::begin(entries), std::end(entries), [&](const Entry& entry) {
    return entry.dtype == p.k.dtype && entry.turn == turn_of(p) && entry.packed == is_packed(p);
  });
}

// Time of a call whose sequences use all of their rows.
double microseconds_of(const Problem& p, const Partition& partition, const DeviceFacts& facts) {
  const auto numbers = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v) +
                       static_cast<double>(p.heads_q) * static_cast<double>(p.dim);
  const double bytes = 2 * static_cast<double>(partition.rows) * numbers *
                       static_cast<double>(dtype_bytes(p.k.dtype));
  if (facts.memory_bytes_per_microsecond <= 0) return kMicroseconds;
  return kMicroseconds + bytes / (facts.memory_bytes_per_microsecond * kMemoryShare);
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  const bool fits = fits_in_31_bits(p);
  const int unit_heads = fits ? unit_heads_of(p, facts->multiprocessors) : 1;
  Partition partition = {};
  if (!fits || !partition_of(p, unit_heads, &partition)) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%s",
        "more than 2^31 - 1 rows or pairs of 16 bytes of a row, or 2^29 sequences");
  }
  const Kernel& kernel = find_entry(p).kernel;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device_id, *facts, &arch, reason));
  plan->info.microseconds = microseconds_of(p, partition, *facts);
  rows::plan_rows(kernel, device_id, partition, p.dim, p.dim_v, plan);
  plan->info.launches[0].stages = unit_heads;
  return FLASHMOE_OK;
}

Tokens tokens_of(const TokenNumbers& given) {
  return {given.data, given.batch_stride, given.seq_stride, given.wide ? 1 : 0, 0};
}

RowDivisor row_divisor(int64_t rows) {
  const bool fits = rows <= INT_MAX;
  return {rows, Divisor::of(static_cast<uint32_t>(fits ? std::max<int64_t>(rows, 1) : 1)), fits};
}

Rotary rotary_of(const Problem& p) {
  const flashmoe::Rotary& given = p.rotary;
  Rotary rotary = {};
  if (given.dim == 0) return rotary;
  rotary.cos = static_cast<const char*>(given.cos.data);
  rotary.sin = static_cast<const char*>(given.sin.data);
  rotary.cos_stride = bytes_of(given.cos.stride, given.dtype);
  rotary.sin_stride = bytes_of(given.sin.stride, given.dtype);
  rotary.rows = given.rows;
  rotary.pairs = static_cast<int32_t>(given.dim / 2);
  rotary.wide = given.dtype == Dtype::kFloat32 ? 1 : 0;
  rotary.q_stays = given.q_stays ? 1 : 0;
  // A piece's angles are loaded at once if none of them is beyond the row.
  const int64_t of_piece = numbers_of_piece(p) / (given.interleaved ? 2 : 1);
  const auto is_aligned = [](const RotaryTable& table, int64_t stride) {
    return reinterpret_cast<uintptr_t>(table.data) % kPieceBytes == 0 && stride % kPieceBytes == 0;
  };
  rotary.vectors = is_aligned(given.cos, rotary.cos_stride) &&
                           is_aligned(given.sin, rotary.sin_stride) && rotary.pairs % of_piece == 0
                       ? 1
                       : 0;
  return rotary;
}

Params make_params(const Problem& p, const flashmoe_launch& planned) {
  Params params = {};
  params.from[kKeys] = rows_of(p.k);
  params.from[kValues] = rows_of(p.v);
  params.from[kQueries] = rows_of(p.q);
  params.to[kKeys] = rows_of(p.k_cache);
  params.to[kValues] = rows_of(p.v_cache);
  params.to[kQueries] = rows_of(p.q_out);
  params.slots = tokens_of(p.slots);
  params.positions = tokens_of(p.positions);
  params.cache_seqlens = table_numbers(p.cache_seqlens);
  params.cu_seqlens = table_numbers(p.cu_seqlens);
  params.seqused = table_numbers(p.seqused);
  params.batch_index = table_numbers(p.batch_index);
  params.page_table = table_numbers(p.page_table);
  params.page_step = p.page_step;
  params.page_count = p.page_count;
  params.batch_cache = p.batch_cache;
  params.rows_cache = row_divisor(p.rows_cache);
  params.rotary = rotary_of(p);
  params.scales[kKeys] = scales_of(p.k_scale);
  params.scales[kValues] = scales_of(p.v_scale);
  params.fp8 = p.k_cache.dtype == Dtype::kFloat8E4M3 ? 1 : 0;
  params.sequences = static_cast<int32_t>(p.batch);
  params.rows = static_cast<int32_t>(rows_of_call(p));
  params.seq = static_cast<int32_t>(p.seq);
  params.seq_q = static_cast<int32_t>(p.seq_q);
  params.rows_of_batch = divisor_of(rows_of_batch(p));
  params.unit_heads = planned.stages;
  const int64_t dims[kStreams] = {p.dim, p.dim_v, p.dim};
  const int64_t heads[kStreams] = {p.heads_kv, p.heads_kv, p.heads_q};
  int64_t end = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    const int64_t units = units_of_head(p, dims[stream], stream != kValues);
    end += ceil_div(heads[stream], params.unit_heads) * units;
    params.heads[stream] = static_cast<int32_t>(heads[stream]);
    params.pieces[stream] = static_cast<int32_t>(dims[stream] / numbers_of_piece(p));
    params.units[stream] = Divisor::of(static_cast<uint32_t>(units));
    params.ends[stream] = static_cast<int32_t>(end);
  }
  params.row_units = divisor_of(end);
  params.block_rows = planned.tile_m;
  params.block_units = planned.tile_n;
  return params;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* stream) {
  return launch_one(p, plan, stream, make_params);
}

}  // namespace
}  // namespace flashmoe::kv_append

namespace flashmoe {

// Appending has the name of the oldest GPU family because it is the same on all GPUs.
const KvAppendFamily kCudaKvAppend = {"sm89", FLASHMOE_DEVICE_CUDA, &kv_append::plan,
                                      &kv_append::launch};

}  // namespace flashmoe
