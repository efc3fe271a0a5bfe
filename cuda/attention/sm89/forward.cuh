// Attention forward for sm_89 (Ada) and newer, with mma.sync.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// One block computes kTileQ query rows of one head: every warp owns 16 * kRowAtoms rows with their
// output accumulators, and all warps walk the keys together, kStepKeys at a time, from the first
// key to the last one visible to the tile. K and V arrive by cp.async in a ring of kStages steps,
// one block barrier per step. Scores, probabilities and accumulators never leave registers.
//
// Softmax is online, with a lazy maximum: a row's offset is raised, and its accumulators rescaled,
// only when a score exceeds it by more than 2^kLazyBits; until then probabilities are at most
// 2^kLazyBits instead of 1, which neither fp16 nor bf16 nor the fp32 sums mind. In the common case a
// step therefore costs no shuffle and no rescale, only one vote.
//
// Assumes: dimensions padded to the compiled ones are zero-filled on load and never stored.
#pragma once

#include "cuda/attention/sm89/params.h"
#include "cuda/attention/sm89/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashmoe::sm89 {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr float kLazyBits = 8.0f;
// Below every offset, yet finite: masked scores less it are -inf, not NaN.
inline constexpr float kNoOffset = -1.0e38f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// The query tile of this block. Causal tiles come longest first, inside sections of heads whose
// keys and values fit the L2 together.
struct Tile {
  int batch;
  int head;
  int head_kv;
  int first_row;

  template <class Traits>
  static __device__ __forceinline__ Tile of_block(const Params& params) {
    const int section_tiles = params.heads_per_section * params.tiles_per_head;
    const int section = static_cast<int>(blockIdx.x) / section_tiles;
    const int rank = static_cast<int>(blockIdx.x) % section_tiles;
    const int first_head = section * params.heads_per_section;
    const int heads = min(params.heads_per_section, params.heads - first_head);
    const int tile = rank / heads;
    const int head = first_head + rank % heads;
    Tile result;
    result.batch = head / params.heads_q;
    result.head = head % params.heads_q;
    result.head_kv = result.head / params.heads_per_kv;
    result.first_row = (params.causal ? params.tiles_per_head - 1 - tile : tile) * Traits::kTileQ;
    return result;
  }
};

// Number of keys that query row `row` sees; negative rows of the ramp see none.
__device__ __forceinline__ int visible_keys(const Params& params, int row) {
  if (!params.causal) return params.seq_k;
  return max(0, min(params.seq_k, row + params.causal_offset + 1));
}

// Copies kRows consecutive rows of a [rows, dim] matrix into a tile, all threads of the block taking
// part, and moves on to the next kRows. Rows past the end and columns from `dim` on become zero.
template <class Layout, int kRows, int kThreads>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const uint16_t* base, int64_t row_stride, int first_row,
                                        int rows, int dim)
      : base_(base),
        pass_stride_(kRowsPerPass * row_stride),
        rows_left_(chunk() * kElementsPerChunk < dim ? rows - first_row - row() : 0),
        source_(base + (first_row + row()) * row_stride + chunk() * kElementsPerChunk),
        offset_(Layout::chunk_offset(row(), chunk())) {}

  __device__ __forceinline__ void load_next(uint32_t tile) {
    const uint16_t* source = source_;
    if (rows_left_ >= kRows) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (copies(i)) ptx::cp_async_16(tile + offset(i), source);
        source += pass_stride_;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const bool valid = i * kRowsPerPass < rows_left_;
        if (copies(i)) {
          ptx::cp_async_16_or_zero(tile + offset(i), valid ? source : base_, valid);
        }
        source += pass_stride_;
      }
    }
    source_ = source;
    rows_left_ -= kRows;
  }

  // Whether what this thread copied to a tile holds an infinity or a NaN.
  template <class Element>
  __device__ __forceinline__ bool copied_nonfinite(const unsigned char* tile) const {
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if (!copies(i)) break;
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + offset(i));
      found = found || numeric::any_nonfinite<Element>(chunk.x) ||
              numeric::any_nonfinite<Element>(chunk.y) ||
              numeric::any_nonfinite<Element>(chunk.z) || numeric::any_nonfinite<Element>(chunk.w);
    }
    return found;
  }

 private:
  static constexpr int next_power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
  }
  // Rows whose length is no power of two leave some lanes idle: cheaper than divisions.
  static constexpr int kLanesPerRow = next_power_of_two(Layout::kChunksPerRow);
  static constexpr int kRowsPerPass = kThreads / kLanesPerRow;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr uint32_t kPassBytes = static_cast<uint32_t>(kRowsPerPass * Layout::kRowBytes);
  // What a pass changes in the swizzle of a thread's chunk: nothing, or one bit with every odd pass.
  static constexpr uint32_t kOddPassBit =
      kRowsPerPass % 8 == 0 ? 0 : Layout::kSwizzleChunks / 2 * kBytesPerChunk;
  static_assert(kRowsPerPass % 8 == 0 || kRowsPerPass == 4);

  // Bytes from the start of a tile to this thread's chunk of a pass.
  __device__ __forceinline__ uint32_t offset(int pass) const {
    return (offset_ ^ (pass % 2 == 1 ? kOddPassBit : 0)) + static_cast<uint32_t>(pass) * kPassBytes;
  }
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) / kLanesPerRow;
  }
  static __device__ __forceinline__ int chunk() {
    return static_cast<int>(threadIdx.x) % kLanesPerRow;
  }
  static __device__ __forceinline__ bool copies(int pass) {
    return (Layout::kChunksPerRow == kLanesPerRow || chunk() < Layout::kChunksPerRow) &&
           (kRows % kRowsPerPass == 0 || row() + pass * kRowsPerPass < kRows);
  }

  const uint16_t* base_;
  int64_t pass_stride_;
  int rows_left_;  // of the matrix, from this thread's next row on; 0 or less: zeros
  const uint16_t* source_;
  uint32_t offset_;
};

// The registers of one warp. Element [a][n][e] of scores and out belongs to row
// 16a + lane / 4 + 8 (e / 2) and column 8n + 2 (lane % 4) + e % 2.
template <class Traits>
struct Fragments {
  static constexpr int kAtoms = Traits::kRowAtoms;
  static constexpr int kScoreTiles = Traits::kStepKeys / 8;
  static constexpr int kOutTiles = Traits::kDimV / 8;
  static constexpr int kDimPairs = Traits::kDim / 16;

  uint32_t q[Traits::kQInRegisters ? kDimPairs : 1][kAtoms][4];
  float out[kAtoms][kOutTiles][4];
  float sum[kAtoms][2];     // of this lane's columns
  float offset[kAtoms][2];  // log2 of what the row's probabilities are divided by
};

template <class Traits>
using Scores = float[Traits::kRowAtoms][Traits::kStepKeys / 8][4];

// The positions in shared memory that one lane reads, less the stage.
template <class Traits>
struct LaneAddresses {
  uint32_t q;
  uint32_t k;
  uint32_t v;

  __device__ __forceinline__ LaneAddresses(uint32_t shared, int warp, int lane) {
    using QLayout = typename Traits::QLayout;
    using KLayout = typename Traits::KLayout;
    using VLayout = typename Traits::VLayout;
    q = QLayout::fragment_base(shared + Traits::kQOffset,
                               warp * Traits::kRowsPerWarp + (lane & 15), lane >> 4);
    k = KLayout::fragment_base(shared, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    v = VLayout::fragment_base(shared + Traits::kKBytes, lane & 15, lane >> 4);
  }
};

// Byte offset of the stage after the one at `offset`.
template <class Traits>
__device__ __forceinline__ uint32_t next_stage(uint32_t offset) {
  const uint32_t next = offset + Traits::kStageBytes;
  return next == Traits::kRingBytes ? 0 : next;
}

template <class Traits>
__device__ __forceinline__ void load_q(uint32_t (&q)[Traits::kRowAtoms][4], uint32_t address,
                                       int pair) {
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
    ptx::ldmatrix_x4(q[a], Traits::QLayout::fragment(address, 16 * a, pair));
  }
}

// scores = Q K^T of one step. Fragments are read kAheadFragments before their products, so that the
// latency of shared memory hides behind the tensor cores.
template <class Traits>
__device__ __forceinline__ void multiply_scores(Scores<Traits>& scores,
                                                const Fragments<Traits>& f,
                                                const LaneAddresses<Traits>& lane,
                                                uint32_t stage_bytes) {
  constexpr int kPairs = Traits::kDim / 16;
  constexpr int kColumns = Traits::kStepKeys / 16;
  constexpr int kFragments = kPairs * kColumns;
  constexpr int kBuffers = Traits::kAheadFragments + 1;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < Traits::kStepKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[a][n][e] = 0.0f;
    }
  }
  const uint32_t k_base = lane.k + stage_bytes;
  uint32_t k[kBuffers][4];
  uint32_t q[Traits::kQInRegisters ? 1 : 2][Traits::kRowAtoms][4];
  const auto load = [&](int i) {
    const int pair = i / kColumns;
    if (!Traits::kQInRegisters && i % kColumns == 0) {
      load_q<Traits>(q[Traits::kQInRegisters ? 0 : pair % 2], lane.q, pair);
    }
    ptx::ldmatrix_x4(k[i % kBuffers],
                     Traits::KLayout::fragment(k_base, 16 * (i % kColumns), pair));
  };
#pragma unroll
  for (int i = 0; i < kBuffers - 1 && i < kFragments; ++i) load(i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int pair = i / kColumns;
    const int n = i % kColumns;
    if (i + kBuffers - 1 < kFragments) load(i + kBuffers - 1);
    const uint32_t(&k_now)[4] = k[i % kBuffers];
#pragma unroll
    for (int a = 0; a < Traits::kRowAtoms; ++a) {
      uint32_t q_now[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        q_now[e] = Traits::kQInRegisters ? f.q[Traits::kQInRegisters ? pair : 0][a][e]
                                         : q[Traits::kQInRegisters ? 0 : pair % 2][a][e];
      }
      ptx::mma_m16n8k16<typename Traits::Element>(scores[a][2 * n], q_now, k_now[0], k_now[1]);
      ptx::mma_m16n8k16<typename Traits::Element>(scores[a][2 * n + 1], q_now, k_now[2], k_now[3]);
    }
  }
}

// Hides the keys that a row does not see.
template <class Traits>
__device__ __forceinline__ void mask_scores(Scores<Traits>& scores, const Params& params,
                                            int first_row, int first_key, int lane) {
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * a + lane / 4 + 8 * half;
      const int limit = visible_keys(params, row) - first_key - 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < Traits::kStepKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e >= limit) scores[a][n][2 * half + e] = -INFINITY;
        }
      }
    }
  }
}

// Raises the offsets of the rows whose scores have outgrown them. Warp-uniform.
template <class Traits>
__device__ __forceinline__ void raise_offsets(Fragments<Traits>& f, const Scores<Traits>& scores,
                                              float scale_log2) {
  float highest[Traits::kRowAtoms][2];
  bool outgrown = false;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = fmaxf(scores[a][0][2 * half], scores[a][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < Traits::kStepKeys / 8; ++n) {
        top = fmaxf(top, fmaxf(scores[a][n][2 * half], scores[a][n][2 * half + 1]));
      }
      highest[a][half] = top;
      outgrown = outgrown || fmaf(top, scale_log2, -kLazyBits) > f.offset[a][half];
    }
  }
  if (!__any_sync(kFullWarp, outgrown)) return;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = highest[a][half];
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      if (fmaf(top, scale_log2, -kLazyBits) > f.offset[a][half]) {
        const float offset = top * scale_log2;
        const float factor = numeric::exp2_approx(f.offset[a][half] - offset);
        f.offset[a][half] = offset;
        f.sum[a][half] *= factor;
#pragma unroll
        for (int n = 0; n < Traits::kDimV / 8; ++n) {
          f.out[a][n][2 * half] *= factor;
          f.out[a][n][2 * half + 1] *= factor;
        }
      }
    }
  }
}

// Probabilities of 16 keys, as the A fragments of P V.
template <class Traits>
using Probabilities = uint32_t[Traits::kRowAtoms][4];

// Register i of the fragments holds row half i % 2 of score tile 2k + i / 2.
template <class Traits>
__device__ __forceinline__ void exponentiate(Probabilities<Traits>& p, Fragments<Traits>& f,
                                             const Scores<Traits>& scores, float scale_log2, int k,
                                             int i) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  const int a = i / 4;
  const int half = i % 2;
  const float(&pair)[4] = scores[a][2 * k + i % 4 / 2];
  const float low = numeric::exp2_approx(fmaf(pair[2 * half], scale_log2, -f.offset[a][half]));
  const float high =
      numeric::exp2_approx(fmaf(pair[2 * half + 1], scale_log2, -f.offset[a][half]));
  f.sum[a][half] += low + high;
  p[a][i % 4] = Numeric::pack(low, high);
}

// out += P V of one step, with P = 2^(scores * scale_log2 - offset). The exponentials of the next 16
// keys are computed between the products of these.
template <class Traits>
__device__ __forceinline__ void multiply_values(Fragments<Traits>& f, const Scores<Traits>& scores,
                                                const LaneAddresses<Traits>& lane,
                                                uint32_t stage_bytes, float scale_log2) {
  constexpr int kSlices = Traits::kStepKeys / 16;
  constexpr int kColumns = Traits::kDimV / 16;
  constexpr int kFragments = kSlices * kColumns;
  constexpr int kBuffers = Traits::kAheadFragments + 1;
  constexpr int kRegisters = 4 * Traits::kRowAtoms;
  constexpr int kPerColumn = (kRegisters + kColumns - 1) / kColumns;
  const uint32_t v_base = lane.v + stage_bytes;
  uint32_t v[kBuffers][4];
  Probabilities<Traits> p[2];
  const auto load = [&](int i) {
    ptx::ldmatrix_x4_trans(
        v[i % kBuffers], Traits::VLayout::fragment(v_base, 16 * (i / kColumns), i % kColumns));
  };
#pragma unroll
  for (int i = 0; i < kBuffers - 1 && i < kFragments; ++i) load(i);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) exponentiate<Traits>(p[0], f, scores, scale_log2, 0, i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int k = i / kColumns;
    const int n = i % kColumns;
    if (i + kBuffers - 1 < kFragments) load(i + kBuffers - 1);
    const uint32_t(&v_now)[4] = v[i % kBuffers];
#pragma unroll
    for (int a = 0; a < Traits::kRowAtoms; ++a) {
      ptx::mma_m16n8k16<typename Traits::Element>(f.out[a][2 * n], p[k % 2][a], v_now[0],
                                                  v_now[1]);
      ptx::mma_m16n8k16<typename Traits::Element>(f.out[a][2 * n + 1], p[k % 2][a], v_now[2],
                                                  v_now[3]);
    }
    if (k + 1 < kSlices) {
#pragma unroll
      for (int r = n * kPerColumn; r < (n + 1) * kPerColumn && r < kRegisters; ++r) {
        exponentiate<Traits>(p[(k + 1) % 2], f, scores, scale_log2, k + 1, r);
      }
    }
  }
}

// Divides by the sums, writes out through shared memory in 16-byte rows, and lse.
template <class Traits>
__device__ __forceinline__ void store_results(Fragments<Traits>& f, const Params& params,
                                              const Tile& tile, unsigned char* shared, int warp,
                                              int lane) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  using Layout = typename Traits::OLayout;
  const int first_row = tile.first_row + warp * Traits::kRowsPerWarp;
  unsigned char* warp_tile = shared + warp * Traits::kRowsPerWarp * Layout::kRowBytes;
#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = 16 * a + lane / 4 + 8 * half;
      const int row = first_row + tile_row;
      float sum = f.sum[a][half];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const bool sees_keys = visible_keys(params, row) > 0;
      // A row of nothing but -inf scores is 0/0 = NaN; a row that sees no key is 0 by definition.
      const float factor = sees_keys ? 1.0f / sum : 0.0f;
#pragma unroll
      for (int n = 0; n < Traits::kDimV / 8; ++n) {
        const uint32_t pair = Numeric::pack(f.out[a][n][2 * half] * factor,
                                            f.out[a][n][2 * half + 1] * factor);
        *reinterpret_cast<uint32_t*>(warp_tile + Layout::chunk_offset(tile_row, n) +
                                     4 * (lane % 4)) = pair;
      }
      if (params.lse != nullptr && lane % 4 == 0 && row < params.seq_q) {
        params.lse[tile.batch * params.lse_strides.batch + tile.head * params.lse_strides.head +
                   row * params.lse_strides.seq] =
            sees_keys ? (f.offset[a][half] + log2f(sum)) * kLn2 : -INFINITY;
      }
    }
  }
  __syncwarp();
  uint16_t* out = static_cast<uint16_t*>(params.out) + tile.batch * params.out_strides.batch +
                  tile.head * params.out_strides.head;
  constexpr int kChunks = Traits::kRowsPerWarp * Layout::kChunksPerRow;
#pragma unroll 4
  for (int index = lane; index < kChunks; index += kThreadsPerWarp) {
    const int row = index / Layout::kChunksPerRow;
    const int chunk = index % Layout::kChunksPerRow;
    if (first_row + row < params.seq_q && chunk * kElementsPerChunk < params.dim_v) {
      *reinterpret_cast<uint4*>(out + (first_row + row) * params.out_strides.seq +
                                chunk * kElementsPerChunk) =
          *reinterpret_cast<const uint4*>(warp_tile + Layout::chunk_offset(row, chunk));
    }
  }
}

// The same rows, one at a time and with plain arithmetic: for the rare tile whose diagonal holds an
// infinity or a NaN in V. There the tensor cores would spread it to rows that do not see it, as they
// multiply it by a masked probability and 0 * NaN is NaN. Here a row reads its visible keys only.
template <class Traits>
__device__ __forceinline__ void attention_forward_tile_by_rows(const Params& params, const Tile& tile) {
  using Numeric = numeric::ElementTraits<typename Traits::Element>;
  constexpr int kColumnsPerLane = (Traits::kDimV + kThreadsPerWarp - 1) / kThreadsPerWarp;
  const int warp = static_cast<int>(threadIdx.x) / kThreadsPerWarp;
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
  const auto* k = static_cast<const uint16_t*>(params.k) + tile.batch * params.k_strides.batch +
                  tile.head_kv * params.k_strides.head;
  const auto* v = static_cast<const uint16_t*>(params.v) + tile.batch * params.v_strides.batch +
                  tile.head_kv * params.v_strides.head;
  const int end_row = min(tile.first_row + Traits::kTileQ, params.seq_q);
  for (int row = tile.first_row + warp; row < end_row; row += Traits::kWarps) {
    const auto* q = static_cast<const uint16_t*>(params.q) + tile.batch * params.q_strides.batch +
                    tile.head * params.q_strides.head + row * params.q_strides.seq;
    auto* out = static_cast<uint16_t*>(params.out) + tile.batch * params.out_strides.batch +
                tile.head * params.out_strides.head + row * params.out_strides.seq;
    const int keys = visible_keys(params, row);
    float acc[kColumnsPerLane] = {};
    float sum = 0.0f;
    float offset = kNoOffset;
    for (int first_key = 0; first_key < keys; first_key += kThreadsPerWarp) {
      const int key = first_key + lane;
      float score = 0.0f;
      if (key < keys) {
        for (int d = 0; d < params.dim; ++d) {
          score += Numeric::to_float(q[d]) * Numeric::to_float(k[key * params.k_strides.seq + d]);
        }
        score *= params.scale_log2;
      } else {
        score = -INFINITY;
      }
      float top = score;
#pragma unroll
      for (int mask = kThreadsPerWarp / 2; mask > 0; mask /= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, mask));
      }
      const float raised = fmaxf(top, offset);
      const float factor = numeric::exp2_approx(offset - raised);
      offset = raised;
      const float p = numeric::exp2_approx(score - offset);
      sum = sum * factor + p;
#pragma unroll
      for (int c = 0; c < kColumnsPerLane; ++c) acc[c] *= factor;
      for (int i = 0; i < kThreadsPerWarp && first_key + i < keys; ++i) {
        const float p_i = __shfl_sync(kFullWarp, p, i);
#pragma unroll
        for (int c = 0; c < kColumnsPerLane; ++c) {
          const int column = c * kThreadsPerWarp + lane;
          if (column < params.dim_v) {
            acc[c] += p_i * Numeric::to_float(v[(first_key + i) * params.v_strides.seq + column]);
          }
        }
      }
    }
#pragma unroll
    for (int mask = kThreadsPerWarp / 2; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, mask);
    }
#pragma unroll
    for (int c = 0; c < kColumnsPerLane; ++c) {
      const int column = c * kThreadsPerWarp + lane;
      if (column < params.dim_v) {
        out[column] = static_cast<uint16_t>(Numeric::pack(keys > 0 ? acc[c] / sum : 0.0f, 0.0f));
      }
    }
    if (params.lse != nullptr && lane == 0) {
      params.lse[tile.batch * params.lse_strides.batch + tile.head * params.lse_strides.head +
                 row * params.lse_strides.seq] = keys > 0 ? (offset + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
}

// False if the tile must be computed by rows instead; nothing has been written then.
template <class Traits>
__device__ __forceinline__ bool attention_forward_tile(const Params& params, const Tile& tile,
                                                       unsigned char* shared) {
  using Element = typename Traits::Element;
  constexpr int kStages = Traits::kStages;
  constexpr int kStep = Traits::kStepKeys;
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kThreadsPerWarp, 0);
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerWarp;
  const uint32_t shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  const uint16_t* q = static_cast<const uint16_t*>(params.q) +
                      tile.batch * params.q_strides.batch + tile.head * params.q_strides.head;
  const uint16_t* k = static_cast<const uint16_t*>(params.k) +
                      tile.batch * params.k_strides.batch + tile.head_kv * params.k_strides.head;
  const uint16_t* v = static_cast<const uint16_t*>(params.v) +
                      tile.batch * params.v_strides.batch + tile.head_kv * params.v_strides.head;

  // Steps that the block loads, that this warp computes, and that need no mask.
  const int first_row = tile.first_row + warp * Traits::kRowsPerWarp;
  const int last_row = min(first_row + Traits::kRowsPerWarp, params.seq_q) - 1;
  const int block_last_row = min(tile.first_row + Traits::kTileQ, params.seq_q) - 1;
  const int block_steps = (visible_keys(params, block_last_row) + kStep - 1) / kStep;
  // Steps before the diagonal: their keys are seen by all rows of the block or by none.
  const int block_plain_steps =
      params.causal ? visible_keys(params, tile.first_row) / kStep : block_steps;
  const int steps =
      first_row <= last_row ? (visible_keys(params, last_row) + kStep - 1) / kStep : 0;
  const int full_steps = visible_keys(params, first_row) / kStep;

  TileLoader<typename Traits::KLayout, kStep, Traits::kThreads> k_loader(
      k, params.k_strides.seq, 0, params.seq_k, params.dim);
  TileLoader<typename Traits::VLayout, kStep, Traits::kThreads> v_loader(
      v, params.v_strides.seq, 0, params.seq_k, params.dim_v);
  // One group per step, empty ones included, so that waiting by count stays right.
  int steps_loaded = 0;
  uint32_t load_stage = 0;  // byte offset of the stage that is filled next
  const auto load_step = [&] {
    if (steps_loaded < block_steps) {
      k_loader.load_next(shared_address + load_stage);
      v_loader.load_next(shared_address + load_stage + Traits::kKBytes);
    }
    ++steps_loaded;
    load_stage = next_stage<Traits>(load_stage);
    ptx::cp_async_commit();
  };

  Fragments<Traits> f;
  const LaneAddresses<Traits> addresses(shared_address, warp, lane);
  TileLoader<typename Traits::QLayout, Traits::kTileQ, Traits::kThreads>(
      q, params.q_strides.seq, tile.first_row, params.seq_q, params.dim)
      .load_next(shared_address + Traits::kQOffset);
  ptx::cp_async_commit();
#pragma unroll
  for (int step = 0; step < Traits::kEarlySteps; ++step) load_step();
  if constexpr (Traits::kQInRegisters) {
    ptx::cp_async_wait<Traits::kEarlySteps>();
    __syncthreads();
  }
  if constexpr (Traits::kQInRegisters) {
#pragma unroll
    for (int pair = 0; pair < Traits::kDim / 16; ++pair) load_q<Traits>(f.q[pair], addresses.q, pair);
    if constexpr (Traits::kEarlySteps < kStages - 1) __syncthreads();  // Q gives way to K, V
  }
#pragma unroll
  for (int step = Traits::kEarlySteps; step < kStages - 1; ++step) load_step();

#pragma unroll
  for (int a = 0; a < Traits::kRowAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      f.sum[a][half] = 0.0f;
      f.offset[a][half] = kNoOffset;
    }
#pragma unroll
    for (int n = 0; n < Traits::kDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f.out[a][n][e] = 0.0f;
    }
  }

  uint32_t stage = 0;  // byte offset of the stage that is computed
  for (int step = 0; step < block_steps; ++step) {
    ptx::cp_async_wait<kStages - 2>();
    if (step >= block_plain_steps) {
      const unsigned char* v_tile = shared + stage + Traits::kKBytes;
      if (__syncthreads_or(v_loader.template copied_nonfinite<Element>(v_tile))) {
        ptx::cp_async_wait<0>();
        return false;
      }
    } else {
      __syncthreads();
    }
    load_step();
    if (step < steps) {
      Scores<Traits> scores;
      multiply_scores<Traits>(scores, f, addresses, stage);
      if (step >= full_steps) {
        mask_scores<Traits>(scores, params, first_row, step * kStep, lane);
      }
      raise_offsets<Traits>(f, scores, params.scale_log2);
      multiply_values<Traits>(f, scores, addresses, stage, params.scale_log2);
    }
    stage = next_stage<Traits>(stage);
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // the output lies over the stages
  store_results<Traits>(f, params, tile, shared, warp, lane);
  return true;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    attention_forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tile tile = Tile::of_block<Traits>(params);
  if (!attention_forward_tile<Traits>(params, tile, shared)) {
    attention_forward_tile_by_rows<Traits>(params, tile);
  }
}

}  // namespace flashmoe::sm89
