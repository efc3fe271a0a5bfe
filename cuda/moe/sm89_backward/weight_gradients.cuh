// Gradients of weights with mma.sync: for every expert the sum over its rows of outer products,
//
//   dw[e] = sum over the rows r of e of a[r]^T b[r]      [m, n], fp32 accumulation
//
// which is a product over the rows: K is tokens. A block has one tile of 128 x 128 of one expert's
// gradient and goes through all of the expert's rows, 32 in a step, so that every sum has one order
// and one writer; experts differ in rows, and blocks come as multiprocessors fall free. Two of them
// share a multiprocessor: while one begins or stores, the other multiplies.
//
// Rows are gathered by the copies: of slots, or of the tokens that these have. Both operands lie in
// shared memory as [token][column] and are transposed by ldmatrix. Rows behind the expert's last,
// and slots that do not count, are zeros in both: nothing of a neighbour, be it NaN, goes in.
#pragma once

#include "cuda/moe/sm89_backward/params.h"
#include "cuda/moe/sm89_backward/traits.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/thread.cuh"

#if __CUDA_ARCH__ >= 900
#include "cuda/ptx/pdl.cuh"
#endif

namespace flashmoe::moe::sm89_backward {

// Any eight rows in a row have a chunk in distinct banks.
template <class Traits>
__device__ __forceinline__ uint32_t offset_of(int row, int chunk) {
  return static_cast<uint32_t>(row * Traits::kRowBytes + (chunk ^ (row & 7)) * kBytesPerChunk);
}

struct Tile {
  int expert;
  int first_m;
  int first_n;
};

// `rank` among the tiles of a job: expert by expert, within one by groups of kSwizzle tiles of m.
template <class Traits>
__device__ __forceinline__ Tile tile_of(const Job& job, int rank) {
  const int tiles = job.m_tiles * job.n_tiles;
  const int expert = rank / tiles;
  const int in_expert = rank - expert * tiles;
  const int group_tiles = Traits::kSwizzle * job.n_tiles;
  const int group = in_expert / group_tiles;
  const int first = group * Traits::kSwizzle;
  const int width = min(Traits::kSwizzle, job.m_tiles - first);
  const int in_group = in_expert - group * group_tiles;
  return {expert, (first + in_group % width) * Traits::kTile, in_group / width * Traits::kTile};
}

// Copies steps of both operands.
template <class Traits>
class Loader {
  static constexpr int kRowsPerPass = Traits::kThreads / Traits::kChunksPerRow;
  static constexpr int kPasses = Traits::kStepRows / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0, "passes are permuted alike");

 public:
  __device__ __forceinline__ Loader(const Params& params, const Job& job, const Tile& tile,
                                    int first, int count, uint32_t stages)
      : params_(params), job_(job), first_(first), count_(count) {
    const int chunk = thread_index() % Traits::kChunksPerRow;
    row_ = thread_index() / Traits::kChunksPerRow;
    destination_ = stages + offset_of<Traits>(row_, chunk);
    const int m = tile.first_m + chunk * kElementsPerChunk;
    const int n = tile.first_n + chunk * kElementsPerChunk;
    has_m_ = m < job.m;
    has_n_ = n < job.n;
    a_ = job.a.data + tile.expert * job.a.expert_stride + (has_m_ ? m : 0);
    b_ = job.b.data + tile.expert * job.b.expert_stride + (has_n_ ? n : 0);
    look_ahead();
  }

  // Copies the next step into a stage, if there is one; closes its group in any case.
  __device__ __forceinline__ void load_step(int stage) {
    if (row_ - thread_index() / Traits::kChunksPerRow < count_) {
      const uint32_t destination = destination_ + stage * Traits::kStageBytes;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const bool counts = tokens_[i] >= 0;
        const int slot = first_ + row_ + i * kRowsPerPass;
        const int a_row = counts ? (job_.a.by_token != 0 ? tokens_[i] : slot) : 0;
        const int b_row = counts ? (job_.b.by_token != 0 ? tokens_[i] : slot) : 0;
        const uint32_t to = destination + i * kRowsPerPass * Traits::kRowBytes;
        ptx::cp_async_16_or_zero(to, a_ + a_row * job_.a.stride, counts && has_m_);
        ptx::cp_async_16_or_zero(to + Traits::kOperandBytes, b_ + b_row * job_.b.stride,
                                 counts && has_n_);
      }
      row_ += Traits::kStepRows;
      look_ahead();
    }
    ptx::cp_async_commit();
  }

 private:
  // Which rows the next step has, to be there when it is copied.
  __device__ __forceinline__ void look_ahead() {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row_ + i * kRowsPerPass;
      tokens_[i] = -1;
      if (row < count_) {
        tokens_[i] = params_.row_tokens != nullptr ? params_.row_tokens[first_ + row] : 0;
      }
    }
  }

  const Params& params_;
  const Job& job_;
  const int first_;
  const int count_;
  int row_;  // of the expert, that this thread copies first
  uint32_t destination_;
  bool has_m_;
  bool has_n_;
  const uint16_t* a_;
  const uint16_t* b_;
  int tokens_[kPasses];
};

template <class Traits>
class Multiplier {
  using Element = typename Traits::Element;
  static constexpr int kWarpChunks = Traits::kWarpTile / kElementsPerChunk;

 public:
  __device__ __forceinline__ Multiplier(int warp_m, int warp_n) {
    const int lane = lane_index();
    // a: chunks 0 and 1 at rows 0 to 7, then at rows 8 to 15. b: chunk 0 at both, then chunk 1.
    a_ = offset_of<Traits>(lane % 8 + lane / 16 * 8, kWarpChunks * warp_m + lane / 8 % 2);
    b_ = Traits::kOperandBytes +
         offset_of<Traits>(lane % 8 + lane / 8 % 2 * 8, kWarpChunks * warp_n + lane / 16);
  }

  __device__ __forceinline__ void multiply(
      uint32_t stage, float (&d)[Traits::kFragmentsM][Traits::kFragmentsN][4]) const {
    uint32_t a[2][Traits::kFragmentsM][4];
    uint32_t b[2][Traits::kFragmentsN / 2][4];
    read(stage, 0, a[0], b[0]);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      const int now = slice % 2;
      if (slice + 1 < Traits::kSlices) read(stage, slice + 1, a[1 - now], b[1 - now]);
#pragma unroll
      for (int n = 0; n < Traits::kFragmentsN; ++n) {
#pragma unroll
        for (int m = 0; m < Traits::kFragmentsM; ++m) {
          ptx::mma_m16n8k16<Element>(d[m][n], a[now][m], b[now][n / 2][n % 2 * 2],
                                     b[now][n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void read(uint32_t stage, int slice,
                                       uint32_t (&a)[Traits::kFragmentsM][4],
                                       uint32_t (&b)[Traits::kFragmentsN / 2][4]) const {
    const uint32_t rows = stage + 16 * slice * Traits::kRowBytes;
#pragma unroll
    for (int m = 0; m < Traits::kFragmentsM; ++m) {
      ptx::ldmatrix_x4_trans(a[m], (rows + a_) ^ static_cast<uint32_t>(2 * m * kBytesPerChunk));
    }
#pragma unroll
    for (int n = 0; n < Traits::kFragmentsN / 2; ++n) {
      ptx::ldmatrix_x4_trans(b[n], (rows + b_) ^ static_cast<uint32_t>(2 * n * kBytesPerChunk));
    }
  }

  uint32_t a_;
  uint32_t b_;
};

// Lane 4 q + t gets word t of lanes 4 q to 4 q + 3, in their order.
__device__ __forceinline__ void transpose_4x4(uint32_t (&words)[4]) {
  const auto exchange = [&](uint32_t& first, uint32_t& second, int distance) {
    const bool upper = (lane_index() & distance) != 0;
    const uint32_t received = __shfl_xor_sync(kFullWarp, upper ? first : second, distance);
    (upper ? first : second) = received;
  };
  exchange(words[0], words[1], 1);
  exchange(words[2], words[3], 1);
  exchange(words[0], words[2], 2);
  exchange(words[1], words[3], 2);
}

// Where a thread's accumulators go: rows lane / 4 and that + 8 of a fragment, columns 2 (lane % 4)
// and the next.
template <class Traits>
class Store {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;

 public:
  __device__ __forceinline__ Store(const Job& job, const Tile& tile, int warp_m, int warp_n)
      : job_(job),
        row_(tile.first_m + warp_m * Traits::kWarpTile + lane_index() / 4),
        column_(tile.first_n + warp_n * Traits::kWarpTile),
        first_(tile.expert * job.expert_stride) {}

  __device__ __forceinline__ void store(
      const float (&d)[Traits::kFragmentsM][Traits::kFragmentsN][4], bool adds) const {
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
  // 16 bytes a thread: four lanes exchange what they have of four fragments.
  __device__ __forceinline__ void store_packed(
      const float (&d)[Traits::kFragmentsM][Traits::kFragmentsN][4]) const {
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
          transpose_4x4(words);
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
  const int number = static_cast<int>(blockIdx.x);
  int index = 0;
  while (index + 1 < kMostJobs && number >= params.jobs[index].end) ++index;
  const Job& job = params.jobs[index];
  const Tile tile = tile_of<Traits>(job, number - (index > 0 ? params.jobs[index - 1].end : 0));
  int first = 0;
  int count;
  if (params.counts != nullptr) {
    count = min(max(params.counts[tile.expert], 0), params.rows);
  } else {
    first = min(max(params.offsets[tile.expert], 0), params.rows);
    count = max(min(params.offsets[tile.expert + 1], params.rows) - first, 0);
  }
  const bool adds = params.adds != 0;
  if (count == 0 && adds) return;

  const int warp = warp_index();
  Loader<Traits> loader(params, job, tile, first, count, stages);
  for (int stage = 0; stage < Traits::kStages - 1; ++stage) loader.load_step(stage);
  float d[Traits::kFragmentsM][Traits::kFragmentsN][4] = {};
  const Multiplier<Traits> multiplier(warp % 2, warp / 2);
  int stage = 0;
  for (int row = 0; row < count; row += Traits::kStepRows) {
    ptx::cp_async_wait<Traits::kStages - 2>();
    __syncthreads();
    loader.load_step(stage > 0 ? stage - 1 : Traits::kStages - 1);
    multiplier.multiply(stages + stage * Traits::kStageBytes, d);
    stage = stage + 1 < Traits::kStages ? stage + 1 : 0;
  }
  ptx::cp_async_wait<0>();
  Store<Traits>(job, tile, warp % 2, warp / 2).store(d, adds);
}

}  // namespace flashmoe::moe::sm89_backward
