// The host side of appending to a cache on a made-up CUDA: what is planned, that blocks have all
// units of all rows, and what the kernel is told.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/host/one_kernel.h"
#include "cuda/kv_append/entry.h"
#include "cuda/kv_append/params.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::kv_append {

static LoadedKernel loaded[kEntries][kMaxDevices];

#define APPEND(index, dtype, turn, packed) \
  {{"append", reinterpret_cast<const void*>(0x11 + index), 0, loaded[index]}, dtype, turn, packed}
#define APPEND_TURNS(index, dtype, packed)                                                    \
  APPEND(index, dtype, Turn::kNone, packed), APPEND(index + 1, dtype, Turn::kHalves, packed), \
      APPEND(index + 2, dtype, Turn::kNeighbours, packed),                                    \
      APPEND(index + 3, dtype, Turn::kNumbers, packed)
const Entry entries[kEntries] = {
    APPEND_TURNS(0, Dtype::kFloat16, false),  APPEND_TURNS(4, Dtype::kFloat16, true),
    APPEND_TURNS(8, Dtype::kBFloat16, false), APPEND_TURNS(12, Dtype::kBFloat16, true),
    APPEND_TURNS(16, Dtype::kFloat32, false), APPEND_TURNS(20, Dtype::kFloat32, true),
};

}  // namespace flashmoe::kv_append

namespace flashmoe {
namespace {

using kv_append::kKeys;
using kv_append::kQueries;
using kv_append::kValues;
using Params = kv_append::Params;

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
  int64_t seq_q = 5;
  int64_t heads_kv = 2;
  int64_t heads_q = 4;
  int64_t dim = 64;
  int64_t dim_v = 64;
  int64_t rotary = 64;  // numbers of a head
  bool interleaved = false;
  bool packed = false;
  Dtype dtype = Dtype::kBFloat16;
};

KvAppendProblem problem_of(const Shape& s) {
  KvAppendProblem p;
  std::memset(static_cast<void*>(&p), 0, sizeof p);
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.k = rows_of<const void>(0, s.seq, s.heads_kv, s.dim, s.dtype);
  p.v = rows_of<const void>(1, s.seq, s.heads_kv, s.dim_v, s.dtype);
  p.k_cache = rows_of<void>(2, 16, s.heads_kv, s.dim, s.dtype);
  p.v_cache = rows_of<void>(3, 16, s.heads_kv, s.dim_v, s.dtype);
  p.batch = s.batch;
  p.seq = s.seq;
  p.heads_kv = s.heads_kv;
  p.dim = s.dim;
  p.dim_v = s.dim_v;
  p.batch_cache = 99;
  p.rows_cache = 16;
  if (s.packed) p.cu_seqlens = {address(4), 1};
  if (s.rotary > 0) {
    p.rotary.cos = {address(5), s.rotary / 2};
    p.rotary.sin = {address(6), s.rotary / 2};
    p.rotary.rows = 100;
    p.rotary.dim = s.rotary;
    p.rotary.dtype = s.dtype;
    p.rotary.interleaved = s.interleaved;
  }
  if (s.rotary > 0 && s.heads_q > 0) {
    p.q = rows_of<const void>(7, s.seq_q, s.heads_q, s.dim, s.dtype);
    p.q_out = rows_of<void>(8, s.seq_q, s.heads_q, s.dim, s.dtype);
    p.seq_q = s.seq_q;
    p.heads_q = s.heads_q;
  }
  return p;
}

Plan plan_of(const KvAppendProblem& problem) { return plan_one(kCudaKvAppend, problem); }

Params launch(const KvAppendProblem& problem, const Plan& plan) {
  return launch_planned_one<Params>(kCudaKvAppend, problem, plan);
}

Params params_of(const Shape& shape) {
  const KvAppendProblem p = problem_of(shape);
  return launch(p, plan_of(p));
}

// Every unit of every row is one block's.
void units_are_all_somebodys(const Shape& shape) {
  const KvAppendProblem p = problem_of(shape);
  const Plan plan = plan_of(p);
  const Params params = launch(p, plan);
  const flashmoe_launch& planned = plan.info.launches[0];
  const int64_t blocks = planned.grid[0], parts = planned.grid[1];
  CHECK(params.rows == (shape.packed ? p.seq : p.batch * std::max(p.seq, p.seq_q)));
  CHECK(params.sequences == p.batch);
  CHECK(params.block_rows >= 1 && params.block_rows <= kv_append::kMostBlockRows);
  CHECK(blocks * params.block_rows >= params.rows);
  CHECK((blocks - 1) * params.block_rows <= std::max(params.rows - 1, 0));
  const int64_t of_block = int64_t{params.block_rows} * params.row_units.value;
  CHECK(parts * params.block_units >= of_block && parts <= 65535);
  CHECK((parts - 1) * params.block_units < of_block);
  CHECK(parts * params.block_units <= INT_MAX);  // what threads count to
  // A block keeps the owners of its rows, one thread each.
  CHECK(planned.block[0] >= kv_append::kMostBlockRows && planned.block[0] % 32 == 0);
  CHECK(planned.block[0] <= kv_append::kThreads);
  CHECK(params.unit_heads >= 1 && params.unit_heads <= kv_append::kMostUnitHeads);
  const auto units = [&](int stream, int64_t heads) {
    CHECK(params.heads[stream] == heads);
    return (heads + params.unit_heads - 1) / params.unit_heads * params.units[stream].value;
  };
  CHECK(params.ends[kQueries] == static_cast<int32_t>(params.row_units.value));
  CHECK(params.ends[kKeys] == units(kKeys, p.heads_kv));
  CHECK(params.ends[kValues] - params.ends[kKeys] == units(kValues, p.heads_kv));
  CHECK(params.ends[kQueries] - params.ends[kValues] == units(kQueries, p.heads_q));
  CHECK(params.rotary.pairs * 2 == shape.rotary);
}

void blocks_have_all_units() {
  for (const int64_t batch : {1, 3, 500}) {
    for (const int64_t seq : {1, 7, 9000}) {
      for (const int64_t heads : {1, 8, 500, 100000}) {
        for (const int64_t dim : {8, 72, 1024}) {
          for (const bool packed : {false, true}) {
            Shape shape;
            shape.batch = batch;
            shape.seq = seq;
            shape.seq_q = packed ? seq : seq + 2;
            shape.heads_kv = heads;
            shape.heads_q = 2 * heads;
            shape.dim = dim;
            shape.packed = packed;
            for (const int64_t rotary : {int64_t{0}, int64_t{2}, dim / 2, dim}) {
              shape.rotary = rotary;
              shape.interleaved = !shape.interleaved;
              shape.dtype = rotary == 2 ? Dtype::kFloat32 : Dtype::kFloat16;
              units_are_all_somebodys(shape);
            }
          }
        }
      }
    }
  }
}

// For a head of 64 16-bit numbers: 8 pieces of 16 bytes.
void units_are_two_pieces_where_they_can_be() {
  Shape shape;
  const auto units = [&](int64_t rotary, bool interleaved) {
    shape.rotary = rotary;
    shape.interleaved = interleaved;
    const Params params = params_of(shape);
    CHECK(params.pieces[kKeys] == 8 && params.units[kValues].value == 4);
    CHECK(params.units[kKeys].value == params.units[kQueries].value);
    return params.units[kKeys].value;
  };
  CHECK(units(64, false) == 4 && units(64, true) == 4);
  CHECK(units(32, false) == 4 && units(48, false) == 4);
  CHECK(units(20, true) == 4);
  CHECK(units(20, false) == 64 - 10);  // a pair, or a number behind them
  CHECK(units(0, false) == 4);
  shape.dtype = Dtype::kFloat32;
  shape.rotary = 24;
  CHECK(params_of(shape).units[kKeys].value == 3 + (16 - 6) / 2);
}

// Few heads of a unit where few threads have one at all, and all threads of large blocks.
void heads_share_a_unit_in_large_calls() {
  Shape shape;
  shape.dim = shape.dim_v = shape.rotary = 128;
  shape.heads_kv = 8;
  shape.heads_q = 32;
  const auto planned = [&](int64_t rows) {
    shape.batch = 1;
    shape.seq = shape.seq_q = rows;
    units_are_all_somebodys(shape);
    return plan_of(problem_of(shape)).info.launches[0];
  };
  CHECK(planned(1).stages == 1 && planned(200).stages == 1);
  CHECK(planned(400).stages == 2);
  CHECK(planned(8192).stages == 4);
  // 96 units of a row, of two rows 192 threads.
  CHECK(planned(8192).block[0] == 192 && planned(8192).tile_m == 2);
  CHECK(planned(8192).grid[0] == 4096 && planned(8192).grid[1] == 1);
  // Offsets are looked through by blocks that have more rows the more of them there are.
  shape.packed = true;
  CHECK(planned(8192).tile_m == 2);
  shape.rotary = 100;  // by numbers
  CHECK(planned(8192).stages == 1);
  shape.rotary = 128;
  shape.batch = 1 << 16;
  shape.seq = shape.seq_q = 1 << 16;
  units_are_all_somebodys(shape);
  CHECK(plan_of(problem_of(shape)).info.launches[0].tile_m > 20);
}

// One kernel of each dtype, way of turning, and packed or not.
void kernels_are_of_what_is_turned() {
  std::vector<const void*> seen_kernels;
  for (const bool packed : {false, true}) {
    for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32}) {
      for (const int turned : {0, 1, 2, 3}) {
        Shape shape;
        shape.packed = packed;
        shape.dtype = dtype;
        shape.rotary = turned == 0 ? 0 : turned == 3 ? 20 : 64;
        shape.interleaved = turned == 2;
        params_of(shape);
        seen_kernels.push_back(fake::last.kernel);
      }
    }
  }
  std::sort(seen_kernels.begin(), seen_kernels.end());
  CHECK(std::unique(seen_kernels.begin(), seen_kernels.end()) == seen_kernels.end());
}

void angles_are_loaded_in_pieces_where_they_lie_so() {
  Shape shape;
  KvAppendProblem p = problem_of(shape);
  const Plan plan = plan_of(p);
  CHECK(launch(p, plan).rotary.vectors == 1);
  p.rotary.cos.data = address(5) + 2;
  CHECK(launch(p, plan).rotary.vectors == 0);
  p.rotary.cos.data = address(5);
  p.rotary.sin.stride = 33;
  CHECK(launch(p, plan).rotary.vectors == 0);
  shape.rotary = 20;
  CHECK(params_of(shape).rotary.vectors == 0);
  shape.interleaved = true;  // ten pairs are no whole pieces of four
  CHECK(params_of(shape).rotary.vectors == 0);
  shape.rotary = 16;
  CHECK(params_of(shape).rotary.vectors == 1);
}

void strides_are_bytes() {
  const Params params = params_of(Shape());
  CHECK(params.from[kKeys].data == address(0) && params.to[kKeys].data == address(2));
  CHECK(params.from[kQueries].data == address(7) && params.to[kQueries].data == address(8));
  CHECK(params.from[kKeys].head == 64 * 2 && params.from[kKeys].seq == 2 * 64 * 2);
  CHECK(params.to[kValues].batch == 16 * 2 * 64 * 2);
  CHECK(params.rotary.cos_stride == 32 * 2);
}

void rows_of_a_cache_may_be_any() {
  KvAppendProblem p = problem_of(Shape());
  const Plan plan = plan_of(p);
  CHECK(launch(p, plan).rows_cache.fits == 1);
  p.rows_cache = int64_t{1} << 33;
  const Params params = launch(p, plan);
  CHECK(params.rows_cache.fits == 0 && params.rows_cache.value == p.rows_cache);
}

void what_does_not_fit_is_refused() {
  const auto refused = [](const Shape& shape) {
    Plan plan = {};
    char reason[256] = "";
    CHECK(kCudaKvAppend.plan(problem_of(shape), &plan, Reason(reason)) ==
          FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(reason, "more than 2^31 - 1 rows") == reason);
  };
  Shape rows;
  rows.seq = rows.seq_q = int64_t{1} << 30;
  refused(rows);
  rows.seq = rows.seq_q = (int64_t{1} << 30) - 1;
  units_are_all_somebodys(rows);
  Shape sequences;
  sequences.packed = true;
  sequences.batch = (int64_t{1} << 29) + 1;
  refused(sequences);
  Shape heads;
  heads.heads_kv = heads.heads_q = int64_t{1} << 30;
  refused(heads);
  heads.heads_kv = heads.heads_q = int64_t{1} << 29;
  units_are_all_somebodys(heads);
  // The last part of a row that just fits would end beyond.
  Shape row;
  row.heads_q = 0;
  row.rotary = 0;
  row.heads_kv = 0x3ffffb00;
  refused(row);
  row.heads_kv -= 0x4000;
  units_are_all_somebodys(row);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  blocks_have_all_units();
  units_are_two_pieces_where_they_can_be();
  heads_share_a_unit_in_large_calls();
  kernels_are_of_what_is_turned();
  angles_are_loaded_in_pieces_where_they_lie_so();
  strides_are_bytes();
  rows_of_a_cache_may_be_any();
  what_does_not_fit_is_refused();
  return 0;
}
