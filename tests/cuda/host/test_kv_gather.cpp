// The host side of gathering from a cache on a made-up CUDA: what is planned, that blocks have all
// units of all rows, and what the kernel is told.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/host/one_kernel.h"
#include "cuda/kv_gather/entry.h"
#include "cuda/kv_gather/params.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::kv_gather {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define ENTRY(index, name, dtype, fp8) \
  {{name, reinterpret_cast<const void*>(0x11 + index), 0, loaded[index]}, dtype, fp8}
const Entry entries[kEntries] = {
    ENTRY(0, "gather_fp16", Dtype::kFloat16, false),
    ENTRY(1, "gather_bf16", Dtype::kBFloat16, false),
    ENTRY(2, "gather_fp32", Dtype::kFloat32, false),
    ENTRY(3, "gather_fp16_fp8", Dtype::kFloat16, true),
    ENTRY(4, "gather_bf16_fp8", Dtype::kBFloat16, true),
    ENTRY(5, "gather_fp32_fp8", Dtype::kFloat32, true),
};

}  // namespace flashmoe::kv_gather

namespace flashmoe {
namespace {

using kv_gather::kKeys;
using kv_gather::kValues;
using Params = kv_gather::Params;

char* address(int number) {
  return reinterpret_cast<char*>((int64_t{1} << 40) + (int64_t{number} << 32));
}

template <class Data>
RowsView<Data> rows_of(int number, int64_t seq, int64_t heads, int64_t dim, Dtype dtype) {
  return {address(number), {seq * heads * dim, heads * dim, dim}, dtype, 0};
}

struct Shape {
  int64_t batch = 2;
  int64_t seq = 5;
  int64_t heads = 2;
  int64_t dim = 64;
  int64_t dim_v = 64;
  bool packed = false;
  bool fp8 = false;
  Dtype dtype = Dtype::kBFloat16;
};

KvGatherProblem problem_of(const Shape& s) {
  KvGatherProblem p;
  std::memset(static_cast<void*>(&p), 0, sizeof p);
  const Dtype of_cache = s.fp8 ? Dtype::kFloat8E4M3 : s.dtype;
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.k_cache = rows_of<const void>(0, 16, s.heads, s.dim, of_cache);
  p.v_cache = rows_of<const void>(1, 16, s.heads, s.dim_v, of_cache);
  p.k = rows_of<void>(2, s.seq, s.heads, s.dim, s.dtype);
  p.v = rows_of<void>(3, s.seq, s.heads, s.dim_v, s.dtype);
  p.batch = s.batch;
  p.seq = s.seq;
  p.heads_kv = s.heads;
  p.dim = s.dim;
  p.dim_v = s.dim_v;
  p.batch_cache = 99;
  p.rows_cache = 16;
  if (s.packed) p.cu_seqlens_k = {address(4), 1};
  return p;
}

Plan plan_of(const KvGatherProblem& problem) { return plan_one(kCudaKvGather, problem); }

Params launch(const KvGatherProblem& problem, const Plan& plan) {
  const Params params = launch_planned_one<Params>(kCudaKvGather, problem, plan);
  CHECK(fake::last.block.x == kv_gather::kThreads);
  return params;
}

Params params_of(const Shape& shape) {
  const KvGatherProblem p = problem_of(shape);
  return launch(p, plan_of(p));
}

// Every unit of every row is one block's.
void units_are_all_somebodys(const Shape& shape) {
  const KvGatherProblem p = problem_of(shape);
  const Plan plan = plan_of(p);
  const Params params = launch(p, plan);
  const flashmoe_launch& planned = plan.info.launches[0];
  const int64_t blocks = planned.grid[0], parts = planned.grid[1];
  CHECK(params.rows == (shape.packed ? p.seq : p.batch * p.seq));
  CHECK(params.sequences == p.batch);
  CHECK(params.block_rows >= 1 && params.block_rows <= kv_gather::kMostBlockRows);
  CHECK(params.block_rows <= kv_gather::kThreads);  // which find a place each
  CHECK(blocks * params.block_rows >= params.rows);
  CHECK((blocks - 1) * params.block_rows <= std::max(params.rows - 1, 0));
  const int64_t of_block = int64_t{params.block_rows} * params.row_units.value;
  CHECK(parts * params.block_units >= of_block && parts <= 65535);
  CHECK((parts - 1) * params.block_units < of_block);
  CHECK(parts * params.block_units <= INT_MAX);  // what threads count to
  CHECK(params.end_of_keys == p.heads_kv * params.units[kKeys].value);
  CHECK(static_cast<int64_t>(params.row_units.value) - params.end_of_keys ==
        (p.dim_v > 0 ? p.heads_kv * params.units[kValues].value : 0));
}

void blocks_have_all_units() {
  for (const int64_t batch : {1, 3, 500}) {
    for (const int64_t seq : {1, 7, 9000}) {
      for (const int64_t heads : {1, 8, 500, 100000}) {
        for (const int64_t dim : {8, 72, 1024}) {
          for (const bool packed : {false, true}) {
            for (const int64_t dim_v : {int64_t{0}, int64_t{64}}) {
              Shape shape;
              shape.batch = batch;
              shape.seq = seq;
              shape.heads = heads;
              shape.dim = dim;
              shape.dim_v = dim_v;
              shape.packed = packed;
              shape.dtype = dim == 72 ? Dtype::kFloat32 : Dtype::kFloat16;
              units_are_all_somebodys(shape);
            }
          }
        }
      }
    }
  }
}

void strides_are_bytes_of_each_tensors_own() {
  Shape shape;
  Params params = params_of(shape);
  CHECK(params.from[kKeys].data == address(0) && params.to[kValues].data == address(3));
  CHECK(params.from[kKeys].head == 64 * 2 && params.from[kValues].batch == 16 * 2 * 64 * 2);
  CHECK(params.to[kKeys].seq == 2 * 64 * 2 && params.units[kKeys].value == 8);
  shape.fp8 = true;
  params = params_of(shape);
  CHECK(params.from[kKeys].head == 64 && params.to[kKeys].head == 64 * 2);
  shape.dtype = Dtype::kFloat32;
  params = params_of(shape);
  CHECK(params.to[kKeys].head == 64 * 4 && params.units[kKeys].value == 16);
}

void the_kernel_is_that_of_both_dtypes() {
  for (const bool fp8 : {false, true}) {
    for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32}) {
      Shape shape;
      shape.fp8 = fp8;
      shape.dtype = dtype;
      const Plan plan = plan_of(problem_of(shape));
      const char* const kernel = plan.info.launches[0].kernel;
      CHECK((std::strstr(kernel, "_fp8") != nullptr) == fp8);
      CHECK(std::strstr(kernel, dtype_name(dtype)) != nullptr);
    }
  }
}

void keys_fit_in_31_bits_or_are_cut() {
  KvGatherProblem p = problem_of(Shape());
  CHECK(launch(p, plan_of(p)).room == 16);
  p.page_table = {address(5), 9};
  p.page_count = 9;
  CHECK(launch(p, plan_of(p)).room == 16 * 9);
  p.rows_cache = int64_t{1} << 33;
  const Params params = launch(p, plan_of(p));
  CHECK(params.room == INT_MAX && params.page_size.quotient(INT_MAX - 1) == 0);
  p.page_count = INT64_MAX;
  CHECK(launch(p, plan_of(p)).room == INT_MAX);
}

void what_does_not_fit_is_refused() {
  const auto refused = [](const Shape& shape) {
    Plan plan = {};
    char reason[256] = "";
    CHECK(kCudaKvGather.plan(problem_of(shape), &plan, Reason(reason)) ==
          FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(reason, "more than 2^31 - 1 rows") == reason);
  };
  Shape rows;
  rows.seq = int64_t{1} << 30;
  refused(rows);
  rows.seq = (int64_t{1} << 30) - 1;
  units_are_all_somebodys(rows);
  Shape sequences;
  sequences.packed = true;
  sequences.batch = (int64_t{1} << 29) + 1;
  refused(sequences);
  Shape heads;
  heads.heads = int64_t{1} << 28;
  refused(heads);
  heads.heads = int64_t{1} << 26;
  units_are_all_somebodys(heads);
  // The last part of a row that just fits would end beyond.
  heads.heads = ((int64_t{1} << 31) - 1 - 2048) / 16;
  refused(heads);
  heads.heads -= 0x1000;
  units_are_all_somebodys(heads);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  blocks_have_all_units();
  strides_are_bytes_of_each_tensors_own();
  the_kernel_is_that_of_both_dtypes();
  keys_fit_in_31_bits_or_are_cut();
  what_does_not_fit_is_refused();
  return 0;
}
