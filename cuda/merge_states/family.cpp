// Merging partial results of attention on a GPU. One implementation serves all GPUs. This file
// plans its kernel and makes the parameters of its launch.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <iterator>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/merge_states/entry.h"
#include "cuda/merge_states/params.h"
#include "cuda/rows/partition.h"

namespace flashmoe::merge_states {
namespace {

using rows::bytes_of;
using rows::divisor_of;
using rows::launch_one;
using rows::rows_of;
using Problem = MergeStatesProblem;

constexpr int64_t kUnitsOfThread = 8;      // at most
constexpr int64_t kPartialsOfThread = 64;  // over all units: more partials, fewer units
constexpr int64_t kFewBlocks = 8;  // per multiprocessor: as many as run at a time, or nearly

// Fixed cost of a launch, and the achieved share of the memory's speed. No choice depends on it.
constexpr double kMicroseconds = 3.0;
constexpr double kMemoryShare = 0.9;

// Rows per block, and the number of blocks. See Params.
struct Partition {
  int64_t rows;
  int64_t row_units;
  int64_t block_rows;
  int64_t blocks;
};

// False if something does not fit in 31 bits. A thread has one unit if all blocks then run at a
// time. Otherwise it has several, so that a block runs longer than it takes to start.
bool cut_rows(const Problem& p, int multiprocessors, Partition* partition) {
  Partition& s = *partition;
  s.row_units = p.dim_v / kUnitNumbers;
  if (p.partials > INT_MAX || p.sequences > INT_MAX || s.row_units > INT_MAX / kMostBlockRows ||
      __builtin_mul_overflow(p.batch, p.seq, &s.rows) ||
      __builtin_mul_overflow(s.rows, p.heads, &s.rows) || s.rows > INT_MAX ||
      std::max({p.batch, p.seq, p.heads}) > INT_MAX) {
    return false;
  }
  const bool few = s.rows * s.row_units <= kFewBlocks * multiprocessors * kThreads;
  const int64_t partials = std::max<int64_t>(p.partials, 1);
  const int64_t of_thread = std::clamp<int64_t>(kPartialsOfThread / partials, 1, kUnitsOfThread);
  const int64_t units = kThreads * (few ? 1 : of_thread);
  const int64_t most_rows = kMostWeights / partials;
  s.block_rows = std::clamp<int64_t>(std::min(units / s.row_units, most_rows), 1, kMostBlockRows);
  s.blocks = std::max<int64_t>(ceil_div(s.rows, s.block_rows), 1);
  return true;
}

bool has_fp32(const Problem& p) {
  return p.outs.dtype == Dtype::kFloat32 || p.out.dtype == Dtype::kFloat32 ||
         (p.prior_out.data != nullptr && p.prior_out.dtype == Dtype::kFloat32);
}

const Entry& find_entry(const Problem& p) {
  const bool halves = has_fp32(p);
  return *std::find_if(std::begin(entries), std::end(entries), [&](const Entry& entry) {
    return entry.dtype == p.outs.dtype && entry.halves == halves;
  });
}

double microseconds_of(const Problem& p, const Partition& partition, const DeviceFacts& facts) {
  const auto dim = static_cast<double>(p.dim_v);
  const auto bytes_of_row = [&](Dtype dtype) {
    return dim * static_cast<double>(dtype_bytes(dtype)) + static_cast<double>(sizeof(float));
  };
  double bytes = static_cast<double>(p.partials) * bytes_of_row(p.outs.dtype);
  if (p.prior_out.data != nullptr) bytes += bytes_of_row(p.prior_out.dtype);
  bytes += bytes_of_row(p.out.dtype);
  bytes *= static_cast<double>(partition.rows);
  if (facts.memory_bytes_per_microsecond <= 0) return kMicroseconds;
  return kMicroseconds + bytes / (facts.memory_bytes_per_microsecond * kMemoryShare);
}

flashmoe_status plan(const Problem& p, Plan* plan, const Reason& reason) {
  const int device_id = p.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  Partition partition;
  if (!cut_rows(p, facts->multiprocessors, &partition)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s",
                         "more than 2^31 - 1 rows and heads, partials, or sequences, or rows of "
                         "more than 2^27 - 1 numbers");
  }
  const Kernel& kernel = find_entry(p).kernel;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device_id, *facts, &arch, reason));
  plan->info.microseconds = microseconds_of(p, partition, *facts);
  flashmoe_launch& launch = plan_launch(kernel, device_id, "", partition.blocks, kThreads, 0, plan);
  launch.tile_m = static_cast<int32_t>(partition.block_rows);
  launch.dim_v = static_cast<int32_t>(p.dim_v);
  launch.stages = 1;
  return FLASHMOE_OK;
}

template <class Data>
RowFloats floats_of(const RowNumbers<Data>& numbers) {
  return {static_cast<float*>(const_cast<void*>(numbers.data)), numbers.strides.batch,
          numbers.strides.seq, numbers.strides.head};
}

Format format_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? kFp32 : dtype == Dtype::kBFloat16 ? kBf16 : kFp16;
}

// Log2 of the threads that make a row's weights: enough to load all lse of the row at once, within
// a warp.
int32_t threads_log2(int64_t partials) {
  int32_t log2 = 0;
  while (log2 < 5 && (int64_t{kLsesOfThread} << log2) < partials) ++log2;
  return log2;
}

// The magnitude of a stride, which may be any int64.
uint64_t distance(int64_t stride) {
  const auto wrapped = static_cast<uint64_t>(stride);
  return stride < 0 ? uint64_t{0} - wrapped : wrapped;
}

Params make_params(const Problem& p, const flashmoe_launch& planned) {
  Params params = {};
  params.outs = rows_of(p.outs);
  params.prior_out = rows_of(p.prior_out);
  params.out = rows_of(p.out);
  params.lses = floats_of(p.lses);
  params.prior_lse = floats_of(p.prior_lse);
  params.lse = floats_of(p.lse);
  params.outs_step = bytes_of(p.outs_stride, p.outs.dtype);
  params.lses_step = p.lses_stride;
  params.partials = static_cast<int32_t>(p.partials);
  params.prior_format = format_of(p.prior_out.dtype);
  params.out_format = format_of(p.out.dtype);
  params.rows = static_cast<int32_t>(p.batch * p.seq * p.heads);
  const bool packed = p.cu_seqlens_q.data != nullptr;
  const bool heads_inside = packed || distance(p.outs.strides.head) <= distance(p.outs.strides.seq);
  params.heads_inside = heads_inside ? 1 : 0;
  params.inner = divisor_of(heads_inside ? p.heads : p.seq);
  params.outer = divisor_of(heads_inside ? p.seq : p.heads);
  params.row_units = divisor_of(p.dim_v / kUnitNumbers);
  params.half_row = static_cast<int32_t>(p.dim_v / 2);
  params.block_rows = planned.tile_m;
  params.kept =
      static_cast<int32_t>(std::min<int64_t>(p.partials, kMostWeights / params.block_rows));
  params.threads_log2 = threads_log2(p.partials);
  params.cu_seqlens_q = table_numbers(p.cu_seqlens_q);
  params.seqused_q = table_numbers(p.seqused_q);
  params.sequences = static_cast<int32_t>(p.sequences);
  params.most_q = static_cast<int32_t>(std::min<int64_t>(p.most_q, INT_MAX));
  params.seq = static_cast<int32_t>(p.seq);
  return params;
}

flashmoe_status launch(const Problem& p, const Plan& plan, void* /*workspace*/, void* stream) {
  return launch_one(p, plan, stream, make_params);
}

}  // namespace
}  // namespace flashmoe::merge_states

namespace flashmoe {

// Merging has the name of the oldest GPU family because it is the same on all GPUs.
const MergeStatesFamily kCudaMergeStates = {"sm89", FLASHMOE_DEVICE_CUDA, &merge_states::plan,
                                            &merge_states::launch};

}  // namespace flashmoe
