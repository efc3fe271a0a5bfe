// Gradients of weights with mma.sync. For every expert it sums outer products over its rows:
//
//   dw[e] = sum over the rows r of e of a[r]^T b[r]      [m, n], fp32 accumulation
//
// This is a product over the rows: K is tokens. A tile is 128 x 256 of one expert's gradient, and
// takes all of the expert's rows, 32 per step, so that every sum has one order and one writer. A
// block is persistent; its copies continue with the next tile while one is stored. Fragments are
// read one slice of 16 rows ahead of their products. The block's one barrier per step has the
// products of a slice between arriving and waiting, as in cuda/moe/sm89.
//
// The copies gather rows: those of slots, or of the slots' tokens. Both operands lie in shared
// memory as [token][column], and ldmatrix transposes them. Rows behind the expert's last, and slots
// that do not count, are zeros in both: nothing of a neighbouring expert enters, not even a NaN.
#pragma once

#include "cuda/moe/sm89_backward/params.h"
#include "cuda/moe/sm89_backward/traits.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/thread.cuh"
#include "cuda/tile/transpose.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe::sm89_backward {

using reread::lane_index;
using reread::thread_index;
using reread::warp_index;

// Offset in an operand of kColumns in shared memory: any eight consecutive rows have a chunk in
// distinct banks.
template <int kColumns>
__device__ __forceinline__ uint32_t offset_of(int row, int chunk) {
  return static_cast<uint32_t>(row * kColumns * 2 + (chunk ^ (row & 7)) * kBytesPerChunk);
}

// Tile `number` of all: job after job, within a job expert by expert, and within an expert by
// groups of kSwizzle tiles of m.
template <class Traits>
struct Tile {
  int job;
  int expert;
  int first_m;
  int first_n;
  int first_row;
  int rows;

  __device__ __forceinline__ Tile(const Params& params, int number) {
    job = 0;
    while (job + 1 < kMostJobs && number >= params.jobs[job].end) ++job;
    const Job& of = params.jobs[job];
    const int rank = number - (job > 0 ? params.jobs[job - 1].end : 0);
    const int tiles = of.m_tiles * of.n_tiles;
    expert = rank / tiles;
    const int in_expert = rank - expert * tiles;
    const int group_tiles = Traits::kSwizzle * of.n_tiles;
    const int group = in_expert / group_tiles;
    const int first = group * Traits::kSwizzle;
    const int width = min(Traits::kSwizzle, of.m_tiles - first);
    const int in_group = in_expert - group * group_tiles;
    first_m = (first + in_group % width) * Traits::kTileM;
    first_n = in_group / width * Traits::kTileN;
    if (params.counts != nullptr) {
      first_row = 0;
      rows = min(max(params.counts[expert], 0), params.rows);
    } else {
      first_row = min(max(params.offsets[expert], 0), params.rows);
      rows = max(min(params.offsets[expert + 1], params.rows), first_row) - first_row;
    }
  }
};

// Copies one operand's steps of a tile.
template <class Traits, int kColumns>
class OperandLoader {
  static constexpr int kChunks = kColumns / kElementsPerChunk;
  static constexpr int kRowsPerPass = Traits::kThreads / kChunks;
  static constexpr int kPasses = Traits::kStepRows / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0, "passes are permuted alike");

 public:
  __device__ __forceinline__ OperandLoader() {
    destination_ = offset_of<kColumns>(row(), chunk());
    pin(destination_);
  }

  __device__ __forceinline__ void begin(const Params& params, const Operand& operand, int expert,
                                        int first_column, int columns, int first_row, int rows) {
    const int column = first_column + chunk() * kElementsPerChunk;
    has_column_ = column < columns;
    by_token_ = operand.by_token != 0;
    stride_ = operand.stride;
    source_ = operand.data + expert * operand.expert_stride + (has_column_ ? column : 0);
    row_ = first_row + row();
    end_ = first_row + rows;
    look_ahead(params);
  }

  __device__ __forceinline__ void load_next(const Params& params, uint32_t operand) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool counts = tokens_[i] >= 0;
      const int row = by_token_ ? tokens_[i] : row_ + i * kRowsPerPass;
      const uint16_t* const source = source_ + (counts ? row : 0) * stride_;
      ptx::cp_async_16_or_zero(operand + destination_ + i * kRowsPerPass * kColumns * 2, source,
                               counts && has_column_);
    }
    row_ += Traits::kStepRows;
    look_ahead(params);
  }

 private:
  static __device__ __forceinline__ int row() { return thread_index() / kChunks; }
  static __device__ __forceinline__ int chunk() { return thread_index() % kChunks; }

  // Reads which rows the next step has, before that step is copied.
  __device__ __forceinline__ void look_ahead(const Params& params) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row_ + i * kRowsPerPass;
      tokens_[i] = -1;
      if (row < end_) tokens_[i] = params.row_tokens != nullptr ? params.row_tokens[row] : 0;
    }
  }

  const uint16_t* source_;
  int64_t stride_;
  int row_;  // the slot that this thread copies first in the next step
  int end_;
  int tokens_[kPasses];
  uint32_t destination_;
  bool has_column_;
  bool by_token_;
};

// Copies the steps of this block's tiles in their order. Tiles without rows have no steps.
template <class Traits>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params& params, uint32_t stages)
      : params_(params), stages_(stages), number_(static_cast<int>(blockIdx.x)) {
    begin_tile();
  }

  // The number of steps that load_full_step may load.
  __device__ __forceinline__ int full_steps() const {
    return max(rows_left_ - 1, 0) / Traits::kStepRows;
  }

  // Copies the next step, which is not a tile's last. Closes its group.
  __device__ __forceinline__ void load_full_step() {
    load();
    close();
  }

  // Copies the next step, if there is one. Closes its group in any case.
  __device__ __forceinline__ void load_step() {
    if (rows_left_ > 0) {
      load();
      if (rows_left_ <= 0) {
        number_ += static_cast<int>(gridDim.x);
        begin_tile();
      }
    }
    close();
  }

 private:
  __device__ __forceinline__ void begin_tile() {
    for (rows_left_ = 0; number_ < params_.tiles; number_ += static_cast<int>(gridDim.x)) {
      const Tile<Traits> tile(params_, number_);
      if (tile.rows == 0) continue;
      const Job& job = params_.jobs[tile.job];
      a_.begin(params_, job.a, tile.expert, tile.first_m, job.m, tile.first_row, tile.rows);
      b_.begin(params_, job.b, tile.expert, tile.first_n, job.n, tile.first_row, tile.rows);
      rows_left_ = tile.rows;
      return;
    }
  }

  __device__ __forceinline__ void load() {
    const uint32_t stage = stages_ + stage_ * Traits::kStageBytes;
    a_.load_next(params_, stage);
    b_.load_next(params_, stage + Traits::kABytes);
    rows_left_ -= Traits::kStepRows;
  }

  __device__ __forceinline__ void close() {
    ptx::cp_async_commit();
    stage_ = stage_ + 1 < Traits::kStages ? stage_ + 1 : 0;
  }

  const Params& params_;
  const uint32_t stages_;
  int number_;
  int rows_left_ = 0;
  uint32_t stage_ = 0;
  OperandLoader<Traits, Traits::kTileM> a_;
  OperandLoader<Traits, Traits::kTileN> b_;
};

// The block's barrier of a step: the next step has arrived, and this step's fragments have been
// read. It has two halves, with products between them (cuda/moe/sm89/product.cuh).
template <class Traits>
class StepBarrier {
 public:
  __device__ __forceinline__ explicit StepBarrier(uint32_t address) : address_(address) {}

  __device__ __forceinline__ void init() const { ptx::mbarrier_init(address_, Traits::kThreads); }

  // It is behind a branch that ptxas cannot resolve: in straight code ptxas moves products past it.
  __device__ __forceinline__ void arrive() const {
    ptx::cp_async_wait<Traits::kStages - 2>();
    if (reread::lane_id() < kThreadsPerWarp) ptx::mbarrier_arrive(address_);
  }
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_wait(address_, parity_);
#else
    ptx::mbarrier_spin(address_, parity_);
#endif
    parity_ ^= 1;
  }

 private:
  uint32_t address_;
  uint32_t parity_ = 0;
};

template <class Traits>
using Sums = float[Traits::kFragmentsM][Traits::kFragmentsN][4];

// Addresses of a warp's fragments in a stage.
template <class Traits>
struct FragmentReader {
  uint32_t a;
  uint32_t b;

  __device__ __forceinline__ FragmentReader(int warp_m, int warp_n) {
    constexpr int kWarpChunks = Traits::kWarpTile / kElementsPerChunk;
    const int lane = lane_index();
    // a: chunks 0 and 1 at rows 0 to 7, then at rows 8 to 15. b: chunk 0 at both, then chunk 1.
    a = offset_of<Traits::kTileM>(lane % 8 + lane / 16 * 8, kWarpChunks * warp_m + lane / 8 % 2);
    b = Traits::kABytes +
        offset_of<Traits::kTileN>(lane % 8 + lane / 8 % 2 * 8, kWarpChunks * warp_n + lane / 16);
    pin(a);
    pin(b);
  }
};

// A warp's fragments of one slice.
template <class Traits>
struct Fragments {
  uint32_t a[Traits::kFragmentsM][4];
  uint32_t b[Traits::kFragmentsN / 2][4];

  __device__ __forceinline__ void read(const FragmentReader<Traits>& reader, uint32_t stage,
                                       int slice) {
#pragma unroll
    for (int m = 0; m < Traits::kFragmentsM; ++m) {
      ptx::ldmatrix_x4_trans(a[m],
                             ((stage + reader.a) ^ static_cast<uint32_t>(2 * m * kBytesPerChunk)) +
                                 16 * slice * Traits::kTileM * 2);
    }
#pragma unroll
    for (int n = 0; n < Traits::kFragmentsN / 2; ++n) {
      ptx::ldmatrix_x4_trans(b[n],
                             ((stage + reader.b) ^ static_cast<uint32_t>(2 * n * kBytesPerChunk)) +
                                 16 * slice * Traits::kTileN * 2);
    }
  }

  __device__ __forceinline__ void multiply(Sums<Traits>& d) const {
#pragma unroll
    for (int n = 0; n < Traits::kFragmentsN; ++n) {
#pragma unroll
      for (int m = 0; m < Traits::kFragmentsM; ++m) {
        ptx::mma_m16n8k16<typename Traits::Element>(d[m][n], a[m], b[n / 2][n % 2 * 2],
                                                    b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

// Sums up one tile. Its first step has arrived, and at the end the next tile's first step has.
// `stage` is that of the former and then of the latter.
template <class Traits>
__device__ __forceinline__ void sum_tile(int steps, const FragmentReader<Traits>& reader,
                                         Loader<Traits>& loader, StepBarrier<Traits>& barrier,
                                         uint32_t stages, uint32_t& stage, Sums<Traits>& d) {
  const auto address = [&] { return stages + stage * Traits::kStageBytes; };
  Fragments<Traits> fragments[2];
  // The first slice, up to where the step's stage may be loaded again. The wait is a loop, which
  // keeps ptxas from mixing the second slice's products among these.
  const auto first_slice = [&] {
    fragments[1].read(reader, address(), 1);
    barrier.arrive();
    fragments[0].multiply(d);
    stage = stage + 1 < Traits::kStages ? stage + 1 : 0;
    barrier.wait();
  };
  fragments[0].read(reader, address(), 0);
  while (true) {
    for (int i = min(steps - 1, loader.full_steps()); i > 0; --i) {
      first_slice();
      fragments[0].read(reader, address(), 0);
      loader.load_full_step();
      fragments[1].multiply(d);
      --steps;
    }
    first_slice();
    loader.load_step();
    if (--steps == 0) break;
    fragments[0].read(reader, address(), 0);
    fragments[1].multiply(d);
  }
  fragments[1].multiply(d);
}

// Stores a thread's accumulators: rows lane / 4 and lane / 4 + 8 of a fragment, columns 2 (lane %
// 4) and the next.
template <class Traits>
class Store {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;

 public:
  __device__ __forceinline__ Store(const Job& job, const Tile<Traits>& tile, int warp_m, int warp_n)
      : job_(job),
        row_(tile.first_m + warp_m * Traits::kWarpTile + lane_index() / 4),
        column_(tile.first_n + warp_n * Traits::kWarpTile),
        first_(tile.expert * job.expert_stride) {}

  __device__ __forceinline__ void store(const Sums<Traits>& d, bool adds) const {
    if (job_.is_fp32 == 0 && !adds) return store_packed(d);
#pragma unroll
    for (int m = 0; m < Traits::kFragmentsM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_ + 16 * m + 8 * half;
        const int64_t begin = first_ + row * job_.row_stride;
#pragma unroll
        for (int n = 0; n < Traits::kFragmentsN; ++n) {
          const int column = column_ + 8 * n + lane_index() % 4 * 2;
          if (row >= job_.m || column >= job_.n) continue;
          float2 sum = make_float2(d[m][n][2 * half], d[m][n][2 * half + 1]);
          if (job_.is_fp32 != 0) {
            float2* const to =
                reinterpret_cast<float2*>(static_cast<float*>(job_.out) + begin + column);
            if (adds) {
              const float2 held = *to;
              sum.x += held.x;
              sum.y += held.y;
            }
            *to = sum;
          } else {
            uint32_t* const to =
                reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(job_.out) + begin + column);
            const float2 held = Numeric::unpack(*to);
            *to = Numeric::pack(sum.x + held.x, sum.y + held.y);
          }
        }
      }
    }
  }

 private:
  // Stores 16 bytes per thread: four lanes exchange their parts of four fragments.
  __device__ __forceinline__ void store_packed(const Sums<Traits>& d) const {
#pragma unroll
    for (int m = 0; m < Traits::kFragmentsM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_ + 16 * m + 8 * half;
        uint16_t* const begin = static_cast<uint16_t*>(job_.out) + first_ + row * job_.row_stride;
#pragma unroll
        for (int group = 0; group < Traits::kFragmentsN / 4; ++group) {
          uint32_t words[4];
#pragma unroll
          for (int f = 0; f < 4; ++f) {
            const auto& pair = d[m][4 * group + f];
            words[f] = Numeric::pack(pair[2 * half], pair[2 * half + 1]);
          }
          transpose_4x4(words, lane_index());
          const int column = column_ + 32 * group + lane_index() % 4 * 8;
          if (row < job_.m && column < job_.n) {
            *reinterpret_cast<uint4*>(begin + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      }
    }
  }

  const Job& job_;
  const int row_;
  const int column_;
  const int64_t first_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    weight_gradients_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
#endif
  StepBarrier<Traits> barrier(stages + Traits::kBarrierOffset);
  if (thread_index() == 0) barrier.init();
  Loader<Traits> loader(params, stages);
  for (int step = 0; step < Traits::kStages; ++step) loader.load_step();
  ptx::cp_async_wait<Traits::kStages - 1>();
  __syncthreads();
  const int warp_m = warp_index() % Traits::kWarpsM;
  const int warp_n = warp_index() / Traits::kWarpsM;
  const FragmentReader<Traits> reader(warp_m, warp_n);
  uint32_t stage = 0;
  const bool adds = params.adds != 0;
  for (int number = static_cast<int>(blockIdx.x); number < params.tiles;
       number += static_cast<int>(gridDim.x)) {
    const Tile<Traits> tile(params, number);
    Sums<Traits> d = {};
    if (tile.rows > 0) {
      sum_tile(ceil_div<Traits::kStepRows>(tile.rows), reader, loader, barrier, stages, stage, d);
    } else if (adds) {
      continue;
    }
    Store<Traits>(params.jobs[tile.job], tile, warp_m, warp_n).store(d, adds);
  }
  ptx::cp_async_wait<0>();
}

}  // namespace flashmoe::moe::sm89_backward
