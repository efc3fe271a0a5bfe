// The state of a consumer warpgroup: its registers, its stages and buffers, and where its operands
// lie in shared memory.
#pragma once

#include "cuda/attention/sm90_backward/barriers.cuh"
#include "cuda/attention/sm90_backward/counters.cuh"
#include "cuda/attention/sm90_backward/params.h"
#include "cuda/attention/sm90_backward/tile.cuh"
#include "cuda/attention/sm90_backward/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm90_backward {

template <class Traits>
struct ConsumerState : Counters<Traits::kInPanels> {
  using ItsTraits = Traits;
  using Counters<Traits::kInPanels>::index;
  using Counters<Traits::kInPanels>::items;
  using Counters<Traits::kInPanels>::holds;
  using Element = typename Traits::Element;
  using Numeric = numeric::ElementTraits<Element>;
  using ScoreMma = ptx::Wgmma<Element, Traits::kTileQ>;
  using KeyMma = ptx::Wgmma<Element, Traits::kDim>;
  using ValueMma = ptx::Wgmma<Element, Traits::kDimV>;
  using QueryMma = ptx::Wgmma<Element, Traits::kDqColumns>;
  static constexpr int kScores = Traits::kTileQ / 2;
  static constexpr int kSlices = Traits::kTileQ / 16;

  using Item = ItemFor<Traits>;
  using SharedItem = volatile Item;

  const ParamsFor<Traits>& params;
  const Barriers<Traits> barriers;
  const uint32_t shared;
  const Item* const shared_items;
  const int group;

  float dk[Traits::kDim / 2];
  float dv[Traits::kDimV / 2];
  float scores[kScores];    // S^T, then P^T
  uint32_t ds[kSlices][4];  // dS^T
  int row = 0;              // first query of the step
  bool add = false;         // products add to dk and dv

  __device__ __forceinline__ ConsumerState(const ParamsFor<Traits>& params_,
                                           const Barriers<Traits>& barriers_, uint32_t shared_,
                                           const Item* items_, int group_)
      : params(params_),
        barriers(barriers_),
        shared(shared_),
        shared_items(items_),
        group(group_) {}

  __device__ __forceinline__ uint32_t stage() const { return index % Traits::kStages; }
  __device__ __forceinline__ uint32_t parity() const { return index / Traits::kStages & 1; }
  __device__ __forceinline__ uint32_t dout_stage() const { return index % Traits::kDoStages; }
  __device__ __forceinline__ uint32_t dout_parity() const { return index / Traits::kDoStages & 1; }
  // `buffer` is the step's buffer of dS, and its slot. An item takes two slots more than it has
  // steps.
  __device__ __forceinline__ uint32_t buffer() const { return index & 1; }
  __device__ __forceinline__ uint32_t slot_parity() const { return ((index >> 1) + items) & 1; }

  // Returns which 64 of the block's keys are this consumer's.
  __device__ __forceinline__ int key_group() const { return Traits::kByProducts ? 0 : group; }

  // Returns where the tiles begin. By products the compiler is told that this is another place each
  // time. Otherwise ptxas would keep what follows from it for the next step, and registers are too
  // few.
  __device__ __forceinline__ uint32_t tiles() const {
    uint32_t begin = shared;
    if constexpr (Traits::kByProducts) asm volatile("" : "+r"(begin));
    return begin;
  }

  // K and V as the A operands of S^T and dP^T are the rows of this consumer's keys. K as the B
  // operand of dQ is this consumer's columns, or all of them.
  __device__ __forceinline__ uint64_t k_rows() const {
    return ptx::swizzled_descriptor(
        tiles() + Traits::kKOffset + key_group() * Traits::kGroupBoxBytes, 16);
  }
  __device__ __forceinline__ uint64_t v_rows() const {
    return ptx::swizzled_descriptor(
        tiles() + Traits::kVOffset + key_group() * Traits::kGroupBoxBytes, 16);
  }
  __device__ __forceinline__ uint64_t k_columns() const {
    constexpr int kBytesOn = Traits::kDqColumns >= kBoxColumns
                                 ? Traits::kDqColumns / kBoxColumns * Traits::kKeyBoxBytes
                                 : Traits::kDqColumns * 2;
    return ptx::swizzled_descriptor(
        shared + Traits::kKOffset + (Traits::kSplitsColumns ? group * kBytesOn : 0),
        Traits::kKeyBoxBytes);
  }

  static __device__ __forceinline__ int thread_of_group() {
    return thread_index() % kThreadsPerGroup;
  }

  // `matrix_row` is the row of the warpgroup whose 16 bytes this lane's stmatrix stores.
  // `swizzled_chunk` is where these lie in the row, in one half of a slice.
  static __device__ __forceinline__ int matrix_row() {
    return warp_of_group() * 16 + lane_index() % 16;
  }
  static __device__ __forceinline__ int swizzled_chunk(int slice, int first_chunk = 0) {
    return swizzled_chunk(lane_index(), slice, first_chunk);
  }
  static __device__ __forceinline__ int swizzled_chunk(int lane, int slice, int first_chunk) {
    return ((slice % 4 * 2 + first_chunk + lane / 16) ^ (lane % 8)) * 16;
  }

  // Returns a K-major operand from the slice of 16 columns with this number on.
  static __device__ __forceinline__ uint64_t slice_of(uint64_t descriptor, int slice,
                                                      int box_bytes) {
    return ptx::advance(descriptor, slice / 4 * box_bytes + slice % 4 * 32);
  }

  // Returns the item at hand, whose sequence the masks need. It is read where it is used.
  __device__ __forceinline__ const SharedItem& held_item() const {
    return shared_items[items % kItemsHeld];
  }
};

}  // namespace flashmoe::sm90_backward
