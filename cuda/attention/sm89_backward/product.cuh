// Products of a warp by mma.sync. Fragments are read from shared memory some products ahead.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_backward {

// Sums of a warp's part of a product. Element [a][n][e] belongs to row 16a + lane / 4 + 8 (e / 2)
// and column 8n + 2 (lane % 4) + e % 2 of that part.
template <int kRows, int kColumns>
using Fragment = float[kRows / 16][kColumns / 8][4];

template <int kAtoms, int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kAtoms][kTiles][4]) {
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[a][n][e] = 0.0f;
    }
  }
}

// The numbers of fragments of A and B in registers, beside kHeld registers of sums.
template <int kHeld, int kAtoms, int kPairs>
struct Rings {
  static constexpr bool kRoomy = kHeld <= 176;
  static constexpr bool kTight = kHeld > 208;
  static constexpr int kA = kRoomy || kAtoms == 1 || kPairs == 1 ? 2 * kAtoms : kAtoms;
  static constexpr int kB = kPairs == 1 || kTight ? 2 : kRoomy ? 4 : 3;
  static constexpr int kMost = kA > kB ? kA : kB;
};

// sums += A B over kSlices of 16. load_a(fragment, atom, slice) reads 16 rows of A,
// load_b(fragment, pair, slice) 16 columns of B. A fragment is read right after the last product of
// the fragment that it replaces. With two atoms and two pairs interleaved, that is at least four
// products ahead of its own. `kHeld`: live registers of sums, including these.
template <class Element, int kSlices, int kHeld, int kAtoms, int kTiles, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(float (&sums)[kAtoms][kTiles][4], const LoadA& load_a,
                                         const LoadB& load_b) {
  constexpr int kPairs = kTiles / 2;
  constexpr int kBlock = kPairs % 2 == 0 ? 2 : 1;  // pairs interleaved with atoms
  using Ring = Rings<kHeld, kAtoms, kPairs>;
  constexpr int kAs = kSlices * kAtoms;
  constexpr int kBs = kSlices * kPairs;
  static_assert(Ring::kA >= kAtoms && Ring::kB >= kBlock);
  uint32_t a[Ring::kA][4];
  uint32_t b[Ring::kB][4];
  const auto read_a = [&](int i) { load_a(a[i % Ring::kA], i % kAtoms, i / kAtoms); };
  const auto read_b = [&](int i) { load_b(b[i % Ring::kB], i % kPairs, i / kPairs); };
#pragma unroll
  for (int i = 0; i < Ring::kMost; ++i) {
    if (i < Ring::kA && i < kAs) read_a(i);
    if (i < Ring::kB && i < kBs) read_b(i);
  }
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (int first = 0; first < kPairs; first += kBlock) {
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        const int of_a = slice * kAtoms + atom;
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          const int pair = first + i;
          const int of_b = slice * kPairs + pair;
          const uint32_t (&rows)[4] = a[of_a % Ring::kA];
          const uint32_t (&columns)[4] = b[of_b % Ring::kB];
          ptx::mma_m16n8k16<Element>(sums[atom][2 * pair], rows, columns[0], columns[1]);
          ptx::mma_m16n8k16<Element>(sums[atom][2 * pair + 1], rows, columns[2], columns[3]);
          if (pair == kPairs - 1 && of_a + Ring::kA < kAs) read_a(of_a + Ring::kA);
          if (atom == kAtoms - 1 && of_b + Ring::kB < kBs) read_b(of_b + Ring::kB);
        }
      }
    }
  }
}

// Addresses of a lane's part of the fragments of a warp's part of a tile, for Layout::fragment.
template <class Layout>  // A stored as rows x k: fragment(base, 16 atom, slice)
__device__ __forceinline__ uint32_t a_rows(uint32_t tile, int first_row) {
  return a_fragments<Layout>(tile, first_row);
}
template <class Layout>  // A stored as k x rows, by trans: fragment(base, 16 slice, atom)
__device__ __forceinline__ uint32_t a_columns(uint32_t tile, int first_row) {
  const int lane = reread::lane_index();
  return Layout::fragment_base(tile, (lane & 7) + ((lane >> 4) << 3),
                               first_row / kElementsPerChunk + ((lane >> 3) & 1));
}
template <class Layout>  // B stored as columns x k: fragment(base, 16 pair, slice)
__device__ __forceinline__ uint32_t b_rows(uint32_t tile, int first_column) {
  const int lane = reread::lane_index();
  return Layout::fragment_base(tile, first_column + (lane & 7) + ((lane >> 4) << 3),
                               (lane >> 3) & 1);
}
template <class Layout>  // B stored as k x columns, by trans: fragment(base, 16 slice, pair)
__device__ __forceinline__ uint32_t b_columns(uint32_t tile, int first_column) {
  const int lane = reread::lane_index();
  return Layout::fragment_base(tile, lane & 15, first_column / kElementsPerChunk + (lane >> 4));
}

}  // namespace flashmoe::sm89_backward
