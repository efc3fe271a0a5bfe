// Gathering keys and values of a cache on a GPU. One implementation serves all GPUs. This file
// plans its kernel and makes the parameters of its launch.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <iterator>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/kv_gather/entry.h"
#include "cuda/kv_gather/params.h"
#include "cuda/launch.h"
#include "cuda/rows/partition.h"

namespace flashmoe::kv_gather {
namespace {

using rows::divisor_of;
using rows::fit_parts;
using rows::kMostRowUnits;
using rows::launch_one;
using rows::Partition;
using rows::rows_of;
using rows::scales_of;
using Problem = KvGatherProblem;

constexpr int64_t kManyUnits = 4;  // per thread, if there are many
static_assert(kManyUnits <= rows::kMostUnits);

// No choice depends on these.
constexpr double kMicroseconds = 3.0;
constexpr double kMemoryShare = 0.9;

int64_t numbers_of_piece(const Problem& p) { return kPieceBytes / dtype_bytes(p.k.dtype); }

bool is_packed(const Problem& p) { return p.cu_seqlens_k.data != nullptr; }

// Rows of the results, over all sequences.
int64_t rows_of_call(const Problem& p) { return is_packed(p) ? p.seq : p.batch * p.seq; }

// Cuts rows of row_units units each into blocks. A thread has one unit if all blocks then run at a
// time. Otherwise it has kManyUnits, so that a block runs longer than it takes to start. Returns
// false if something does not fit in 31 bits.
bool cut_rows(int64_t rows, int64_t row_units, int multiprocessors, Partition* partition) {
  constexpr int64_t kFewBlocks = 8;  // per multiprocessor
  if (rows > INT_MAX || row_units > kMostRowUnits) return false;
  const bool few = static_cast<double>(rows) * static_cast<double>(row_units) <=
                   static_cast<double>(kFewBlocks * multiprocessors * kThreads);
  Partition& s = *partition;
  s.rows = rows;
  s.row_units = row_units;
  s.threads = kThreads;
  s.block_units = kThreads * (few ? 1 : kManyUnits);
  s.block_rows =
      std::clamp<int64_t>(s.block_units / std::max<int64_t>(row_units, 1), 1, kMostBlockRows);
  s.parts = std::max<int64_t>(ceil_div(s.block_rows * row_units, s.block_units), 1);
  return fit_parts(partition);
}

// Returns false if something does not fit in 31 bits.
bool partition_of(const Problem& p, int multiprocessors, Partition* partition) {
  // The kernel steps over the table of sequences by strides that must not pass 2^31.
  if (p.batch > kMostTableRows || p.seq > INT_MAX || p.heads_kv > INT_MAX) return false;
  const int64_t row_units = p.heads_kv * ((p.dim + p.dim_v) / numbers_of_piece(p));
  return cut_rows(rows_of_call(p), row_units, multiprocessors, partition);
}

const Entry& find_entry(const Problem& p) {
  const bool fp8 = p.k_cache.dtype != p.k.dtype;
  return *std::find_if(std::begin(entries), std::end(entries), [&](const Entry& entry) {
    return entry.dtype == p.k.dtype && entry.fp8 == fp8;
  });
}

// Time of a call whose sequences use all of their rows.
double microseconds_of(const Problem& p, const Partition& partition, const DeviceFacts& facts) {
  const auto numbers = static_cast<double>(p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  const double bytes = static_cast<double>(partition.rows) * numbers *
                       static_cast<double>(dtype_bytes(p.k.dtype) + dtype_bytes(p.k_cache.dtype));
  if (facts.memory_bytes_per_microsecond <= 0) return kMicroseconds;
  return kMicroseconds + bytes / (facts.memory_bytes_per_microsecond * kMemoryShare);
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  Partition partition;
  if (!partition_of(p, facts->multiprocessors, &partition)) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%s",
        "more than 2^31 - 1 rows or pieces of 16 bytes of a row, or 2^29 sequences");
  }
  const Kernel& kernel = find_entry(p).kernel;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device_id, *facts, &arch, reason));
  plan->info.microseconds = microseconds_of(p, partition, *facts);
  rows::plan_rows(kernel, device_id, partition, p.dim, p.dim_v, plan);
  return FLASHMOE_OK;
}

// Upper bound on the keys of a sequence. Lengths have at most 31 bits.
int32_t room_of(const Problem& p) {
  int64_t room = p.rows_cache;
  if (p.page_table.data != nullptr && __builtin_mul_overflow(p.page_count, p.rows_cache, &room)) {
    room = INT_MAX;
  }
  return static_cast<int32_t>(std::min<int64_t>(room, INT_MAX));
}

Params make_params(const Problem& p, const flashmoe_launch& planned) {
  Params params = {};
  params.from[kKeys] = rows_of(p.k_cache);
  params.from[kValues] = rows_of(p.v_cache);
  params.to[kKeys] = rows_of(p.k);
  params.to[kValues] = rows_of(p.v);
  params.scales[kKeys] = scales_of(p.k_scale);
  params.scales[kValues] = scales_of(p.v_scale);
  params.cu_seqlens_k = table_numbers(p.cu_seqlens_k);
  params.seqused_k = table_numbers(p.seqused_k);
  params.k_begin = table_numbers(p.k_begin);
  params.batch_index = table_numbers(p.batch_index);
  params.page_table = table_numbers(p.page_table);
  params.page_step = p.page_step;
  params.batch_cache = p.batch_cache;
  params.room = room_of(p);
  params.page_size = divisor_of(p.rows_cache);
  params.sequences = static_cast<int32_t>(p.batch);
  params.rows = static_cast<int32_t>(rows_of_call(p));
  params.rows_of_batch = divisor_of(p.seq);
  const int64_t of_piece = numbers_of_piece(p);
  params.units[kKeys] = divisor_of(p.dim / of_piece);
  params.units[kValues] = divisor_of(p.dim_v / of_piece);
  params.end_of_keys = static_cast<int32_t>(p.heads_kv * (p.dim / of_piece));
  params.row_units = divisor_of(p.heads_kv * ((p.dim + p.dim_v) / of_piece));
  params.block_rows = planned.tile_m;
  params.block_units = planned.tile_n;
  return params;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* stream) {
  return launch_one(p, plan, stream, make_params);
}

}  // namespace
}  // namespace flashmoe::kv_gather

namespace flashmoe {

// Gathering has the name of the oldest GPU family because it is the same on all GPUs.
const KvGatherFamily kCudaKvGather = {"sm89", FLASHMOE_DEVICE_CUDA, &kv_gather::plan,
                                      &kv_gather::launch};

}  // namespace flashmoe
