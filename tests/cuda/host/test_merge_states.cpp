// The host side of merging on a made-up CUDA: what is planned, that blocks have all rows, and what
// the kernel is told.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

#include "check.h"
#include "core/backends.h"
#include "cuda/host/fake_cuda.h"
#include "cuda/host/one_kernel.h"
#include "cuda/merge_states/entry.h"
#include "cuda/merge_states/params.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

using merge_states::kFp16;
using merge_states::kFp32;
using Params = merge_states::Params;

char* address(int number) {
  return reinterpret_cast<char*>((int64_t{1} << 40) + (int64_t{number} << 32));
}

struct Shape {
  int64_t partials = 2;
  int64_t batch = 2;
  int64_t seq = 5;
  int64_t heads = 3;
  int64_t dim = 64;
  Dtype outs = Dtype::kBFloat16;
  Dtype out = Dtype::kBFloat16;
  bool prior = false;
  Dtype prior_dtype = Dtype::kFloat32;
  bool heads_first = false;  // in memory
};

RowStrides strides_of(const Shape& s, int64_t dim) {
  if (s.heads_first) return {s.seq * s.heads * dim, dim, s.seq * dim};
  return {s.seq * s.heads * dim, s.heads * dim, dim};
}

MergeStatesProblem problem_of(const Shape& s) {
  MergeStatesProblem p;
  std::memset(static_cast<void*>(&p), 0, sizeof p);
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.partials = s.partials;
  p.batch = s.batch;
  p.seq = s.seq;
  p.heads = s.heads;
  p.dim_v = s.dim;
  const RowStrides numbers = {s.heads * s.seq, 1, s.seq};
  p.outs = {address(0), strides_of(s, s.dim), s.outs, 0};
  p.lses = {address(1), numbers};
  p.outs_stride = s.batch * s.seq * s.heads * s.dim;
  p.lses_stride = s.batch * s.seq * s.heads;
  if (s.prior) {
    p.prior_out = {address(2), strides_of(s, s.dim), s.prior_dtype, 0};
    p.prior_lse = {address(3), numbers};
  }
  p.out = {address(4), strides_of(s, s.dim), s.out, 0};
  p.lse = {address(5), numbers};
  return p;
}

Plan plan_of(const MergeStatesProblem& problem) { return plan_one(kCudaMergeStates, problem); }

Params launch(const MergeStatesProblem& problem) {
  const Params params = launch_planned_one<Params>(kCudaMergeStates, problem, plan_of(problem));
  CHECK(fake::last.grid.y == 1 && fake::last.block.x == merge_states::kThreads);
  return params;
}

void blocks_have_all_rows() {
  for (const int64_t batch : {1, 3, 500}) {
    for (const int64_t seq : {1, 7, 9000}) {
      for (const int64_t heads : {1, 8, 300}) {
        for (const int64_t dim : {8, 128, 4104}) {
          Shape shape;
          shape.batch = batch;
          shape.seq = seq;
          shape.heads = heads;
          shape.dim = dim;
          const MergeStatesProblem p = problem_of(shape);
          const int64_t blocks = plan_of(p).info.launches[0].grid[0];
          const Params params = launch(p);
          CHECK(params.rows == batch * seq * heads);
          CHECK(params.block_rows >= 1 && params.block_rows <= merge_states::kMostBlockRows);
          CHECK(blocks * params.block_rows >= params.rows);
          CHECK((blocks - 1) * params.block_rows < params.rows);
          CHECK(params.row_units.value == dim / 8 && params.half_row == dim / 2);
          CHECK(int64_t{params.block_rows} * params.row_units.value <= INT_MAX);
        }
      }
    }
  }
}

void rows_go_as_they_lie_in_memory() {
  Shape shape;
  Params params = launch(problem_of(shape));
  CHECK(params.heads_inside == 1 && params.inner.value == 3 && params.outer.value == 5);
  shape.heads_first = true;
  MergeStatesProblem p = problem_of(shape);
  params = launch(p);
  CHECK(params.heads_inside == 0 && params.inner.value == 5 && params.outer.value == 3);
  p.batch = 1;
  p.cu_seqlens_q = {address(6), 3};
  p.seqused_q = {address(7), -1};
  p.sequences = 9;
  p.most_q = 4;
  params = launch(p);
  CHECK(params.heads_inside == 1 && params.inner.value == 3);
  CHECK(params.sequences == 9 && params.most_q == 4 && params.seq == 5);
  CHECK(params.cu_seqlens_q.stride == 3 && params.seqused_q.stride == -1);
  p.most_q = INT64_MAX;
  CHECK(launch(p).most_q == INT_MAX);
}

void strides_are_bytes_of_each_tensors_own() {
  Shape shape;
  shape.prior = true;
  shape.out = Dtype::kFloat16;
  const Params params = launch(problem_of(shape));
  CHECK(params.outs.head == 64 * 2 && params.outs.seq == 3 * 64 * 2);
  CHECK(params.prior_out.head == 64 * 4 && params.prior_out.batch == 5 * 3 * 64 * 4);
  CHECK(params.out.data == address(4) && params.out.head == 64 * 2);
  CHECK(params.outs_step == 2 * 5 * 3 * 64 * 2 && params.lses_step == 2 * 5 * 3);
  CHECK(params.lses.head == 5 && params.lses.seq == 1 && params.lse.batch == 15);
  CHECK(params.prior_format == kFp32 && params.out_format == kFp16);
}

void the_kernel_is_that_of_the_dtypes() {
  for (const Dtype outs : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32}) {
    for (const Dtype other : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32}) {
      for (const int of : {0, 1}) {
        Shape shape;
        shape.outs = outs;
        shape.out = of == 0 ? other : Dtype::kFloat16;
        shape.prior = of == 1;
        shape.prior_dtype = other;
        const Plan plan = plan_of(problem_of(shape));
        const char* const kernel = plan.info.launches[0].kernel;
        const bool beside = outs != Dtype::kFloat32 && other == Dtype::kFloat32;
        CHECK((std::strstr(kernel, "_beside_fp32") != nullptr) == beside);
        CHECK(std::strstr(kernel, dtype_name(outs)) == kernel + std::strlen("merge_states_sm89_"));
      }
    }
  }
}

void a_row_has_threads_by_its_partials() {
  const struct {
    int64_t partials;
    int log2;
  } cases[] = {{0, 0}, {4, 0}, {5, 1}, {8, 1}, {9, 2}, {64, 4}, {65, 5}, {128, 5}, {100000, 5}};
  for (const auto& each : cases) {
    Shape shape;
    shape.partials = each.partials;
    CHECK(launch(problem_of(shape)).threads_log2 == each.log2);
  }
}

void a_block_keeps_the_weights_of_its_rows() {
  for (const int64_t partials : {0, 1, 2, 31, 32, 33, 64, 4096, 4097, 100000}) {
    Shape shape;
    shape.partials = partials;
    shape.seq = 3000;
    const Params params = launch(problem_of(shape));
    CHECK(params.kept == std::min<int64_t>(partials, 4096));
    CHECK(int64_t{params.block_rows} * params.kept <= merge_states::kMostWeights);
  }
}

void estimates_grow_with_bytes() {
  Shape shape;
  shape.seq = 4096;
  const double two = plan_of(problem_of(shape)).info.microseconds;
  shape.partials = 4;
  const double four = plan_of(problem_of(shape)).info.microseconds;
  CHECK(four > two);
  shape.outs = Dtype::kFloat32;
  CHECK(plan_of(problem_of(shape)).info.microseconds > four);
}

void what_does_not_fit_is_refused() {
  const auto refused = [](const Shape& shape) {
    Plan plan = {};
    char reason[256] = "";
    CHECK(kCudaMergeStates.plan(problem_of(shape), &plan, Reason(reason)) ==
          FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(std::strstr(reason, "more than 2^31 - 1 rows and heads, partials") == reason);
  };
  Shape rows;
  rows.batch = 1;
  rows.heads = 1;
  rows.seq = int64_t{1} << 31;
  refused(rows);
  rows.seq = (int64_t{1} << 31) - 1;
  CHECK(launch(problem_of(rows)).rows == INT_MAX);
  rows.heads = 2;
  refused(rows);
  Shape partials;
  partials.partials = int64_t{1} << 31;
  refused(partials);
  Shape dim;
  dim.dim = (int64_t{INT_MAX} / merge_states::kMostBlockRows + 1) * 8;
  refused(dim);
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  blocks_have_all_rows();
  rows_go_as_they_lie_in_memory();
  strides_are_bytes_of_each_tensors_own();
  the_kernel_is_that_of_the_dtypes();
  a_row_has_threads_by_its_partials();
  a_block_keeps_the_weights_of_its_rows();
  estimates_grow_with_bytes();
  what_does_not_fit_is_refused();
  return 0;
}
