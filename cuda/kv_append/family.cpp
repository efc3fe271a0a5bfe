// Appending to a cache on a GPU, one implementation for all of them: how its kernel is planned, and
// with what parameters it is launched.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <iterator>

#include "core/backends.h"
#include "core/status.h"
#include "cuda/kv_append/entry.h"
#include "cuda/kv_append/params.h"
#include "cuda/kv_append/shares.h"
#include "cuda/launch.h"

namespace flashmoe::kv_append {
namespace {

using Problem = KvAppendProblem;

// Units of a thread, one after another, where there are many. A block of a packed batch looks
// through all offsets before it begins.
constexpr int64_t kManyUnits = 4;
constexpr int64_t kManyPackedUnits = 8;

// Nobody chooses by it.
constexpr double kMicroseconds = 2.5;
constexpr double kMemoryShare = 0.88;

int64_t numbers_of_piece(const Problem& p) { return kPieceBytes / dtype_bytes(p.k.dtype); }

bool is_packed(const Problem& p) { return p.cu_seqlens.data != nullptr; }

int64_t rows_of_batch(const Problem& p) { return std::max(p.seq, p.seq_q); }

// Of all sequences, each counted with all the rows that there are for it.
int64_t rows_of_call(const Problem& p) { return is_packed(p) ? p.seq : p.batch * rows_of_batch(p); }

// Halves of rotated numbers are whole pieces, or none are paired.
bool has_whole_halves(const Problem& p) {
  return p.rotary.interleaved || p.rotary.dim / 2 % numbers_of_piece(p) == 0;
}

// Of a head of so many numbers.
int64_t units_of_head(const Problem& p, int64_t dim, bool turned) {
  const int64_t pairs = turned ? p.rotary.dim / 2 : 0;
  if (turned && !has_whole_halves(p)) return dim - pairs;
  const int64_t halves = turned && !p.rotary.interleaved ? pairs / numbers_of_piece(p) : 0;
  return halves + ceil_div(dim / numbers_of_piece(p) - 2 * halves, 2);
}

// False where something does not fit in 31 bits.
bool shares_of(const Problem& p, int multiprocessors, Shares* shares) {
  const bool fits = p.batch <= INT_MAX && p.seq <= INT_MAX && p.seq_q <= INT_MAX &&
                    p.heads_kv <= INT_MAX && p.heads_q <= INT_MAX;
  if (!fits) return false;
  const int64_t of_key = units_of_head(p, p.dim, true);
  const int64_t row_units =
      p.heads_kv * (of_key + units_of_head(p, p.dim_v, false)) + p.heads_q * of_key;
  return cut_rows(rows_of_call(p), row_units, is_packed(p) ? kManyPackedUnits : kManyUnits,
                  multiprocessors, shares);
}

const Entry& find_entry(const Problem& p) {
  return *std::find_if(std::begin(entries), std::end(entries),
                       [&](const Entry& entry) { return entry.dtype == p.k.dtype; });
}

// Of a call whose sequences have all the rows that there are.
double microseconds_of(const Problem& p, const Shares& shares, const DeviceFacts& facts) {
  const auto numbers = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v) +
                       static_cast<double>(p.heads_q) * static_cast<double>(p.dim);
  const double bytes =
      2 * static_cast<double>(shares.rows) * numbers * static_cast<double>(dtype_bytes(p.k.dtype));
  if (facts.memory_bytes_per_microsecond <= 0) return kMicroseconds;
  return kMicroseconds + bytes / (facts.memory_bytes_per_microsecond * kMemoryShare);
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  Shares shares;
  if (!shares_of(p, facts->multiprocessors, &shares)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^31 - 1 rows, sequences, or pairs of 16 bytes of a row");
  }
  const Kernel& kernel = find_entry(p).kernel;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device_id, *facts, &arch, reason));
  plan->info.microseconds = microseconds_of(p, shares, *facts);
  plan_rows(kernel, device_id, shares, p.dim, p.dim_v, plan);
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
  rotary.interleaved = given.interleaved ? 1 : 0;
  rotary.whole = has_whole_halves(p) ? 1 : 0;
  rotary.q_stays = given.q_stays ? 1 : 0;
  // A piece's angles are loaded at once where none of them is beyond the row.
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

Scales scales_of(const KeyScales& given) {
  return {static_cast<const float*>(given.data), given.batch_stride, given.head_stride};
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
  params.rows_of_batch = Divisor::of(static_cast<uint32_t>(std::max<int64_t>(rows_of_batch(p), 1)));
  const int64_t dims[kStreams] = {p.dim, p.dim_v, p.dim};
  const int64_t heads[kStreams] = {p.heads_kv, p.heads_kv, p.heads_q};
  int64_t end = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    const int64_t units = units_of_head(p, dims[stream], stream != kValues);
    end += heads[stream] * units;
    params.pieces[stream] = static_cast<int32_t>(dims[stream] / numbers_of_piece(p));
    params.units[stream] = Divisor::of(static_cast<uint32_t>(units));
    params.ends[stream] = static_cast<int32_t>(end);
  }
  params.row_units = Divisor::of(static_cast<uint32_t>(std::max<int64_t>(end, 1)));
  params.block_rows = planned.tile_m;
  params.block_units = planned.tile_n;
  return params;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  const Params params = make_params(p, plan.info.launches[0]);
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace
}  // namespace flashmoe::kv_append

namespace flashmoe {

// Named as the oldest GPU family: appending is the same on all.
const KvAppendFamily kCudaKvAppend = {"sm89", FLASHMOE_DEVICE_CUDA, &kv_append::plan,
                                      &kv_append::launch};

}  // namespace flashmoe
