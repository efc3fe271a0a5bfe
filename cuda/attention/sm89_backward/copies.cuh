// What a block reads: K and V of an item, Q and dO of a step, and values of its rows. All threads
// copy by cp.async. Each copy arrives at the mbarrier of its buffer. No barrier signals a free
// buffer: copies are issued after a block barrier that its readers have reached.
#pragma once

#include "cuda/attention/backward/tile.cuh"
#include "cuda/attention/sm89_backward/pairs.cuh"
#include "cuda/attention/sm89_backward/params.h"
#include "cuda/attention/sm89_backward/traits.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/mma_tile.cuh"
#include "cuda/tile/thread.cuh"

namespace flashmoe::sm89_backward {

// A step of an item. The order is by query tiles, and within each by the query heads of the KV
// head. If it were head by head, a short item that ascends would wait in each head for its longer
// neighbours, which reach the same queries no later than it does.
struct Step {
  int tile_q;
  int head_of_group;

  template <class AnyItem>
  static __device__ __forceinline__ Step first_of(const AnyItem& item) {
    return {attention_backward::runs_down<false>(item) ? item.end - 1 : item.begin, 0};
  }
  template <class AnyItem>
  __device__ __forceinline__ Step next(const Params& params, const AnyItem& item) const {
    if (head_of_group + 1 < params.heads_per_kv) return {tile_q, head_of_group + 1};
    return {tile_q + (attention_backward::runs_down<false>(item) ? -1 : 1), 0};
  }
  template <class AnyItem>
  __device__ __forceinline__ int head(const Params& params, const AnyItem& item) const {
    return item.head_kv * params.heads_per_kv + head_of_group;
  }
  // The index among all tiles of query heads.
  template <class AnyItem>
  __device__ __forceinline__ int place(const Params& params, const AnyItem& item) const {
    return attention_backward::tile_of_head(params, item, head(params, item)) + tile_q;
  }
};

// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  ptx::mbarrier_wait(barrier, parity);
#else
  ptx::mbarrier_spin(barrier, parity);
#endif
}

template <class Traits>
struct Copies {
  const typename Traits::Params& params;
  const uint32_t address;  // shared memory

  // ---- barriers -----------------------------------------------------------------------------

  // A barrier is full when all threads' copies have arrived: those of K and V once per item, the
  // others once per step of a stage.
  __device__ __forceinline__ uint32_t k_full() const { return address + Traits::kBarrierOffset; }
  __device__ __forceinline__ uint32_t v_full() const { return k_full() + 8; }
  __device__ __forceinline__ uint32_t q_full(uint32_t step) const {
    return k_full() + 16 + 8 * (step % Traits::kStages);
  }
  __device__ __forceinline__ uint32_t dout_full(uint32_t step) const {
    return k_full() + 16 + 8 * Traits::kStages + 8 * (step % Traits::kDoutStages);
  }
  // One thread calls it. The block synchronises afterwards.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < Traits::kBarriers; ++i) {
      ptx::mbarrier_init(k_full() + 8 * i, Traits::kThreads);
    }
  }
  __device__ __forceinline__ void wait_for_q(uint32_t step) const {
    wait_for(q_full(step), step / Traits::kStages & 1);
  }
  __device__ __forceinline__ void wait_for_dout(uint32_t step) const {
    wait_for(dout_full(step), step / Traits::kDoutStages & 1);
  }

  // ---- places -------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t k() const { return address + Traits::kKOffset; }
  __device__ __forceinline__ uint32_t v() const { return address + Traits::kVOffset; }
  __device__ __forceinline__ uint32_t q(uint32_t step) const {
    return address + Traits::kQOffset + step % Traits::kStages * Traits::kQBytes;
  }
  __device__ __forceinline__ uint32_t lse(uint32_t step) const {
    return address + Traits::kLseOffset + step % Traits::kStages * Traits::kRowBytes;
  }
  __device__ __forceinline__ uint32_t dout(uint32_t step) const {
    return address + Traits::kDoutOffset + step % Traits::kDoutStages * Traits::kDoutBytes;
  }
  // Buffers of P and dS.
  __device__ __forceinline__ uint32_t p(uint32_t step) const {
    return address + Traits::kPOffset + step % Traits::kBuffers * Traits::kScoreBytes;
  }
  __device__ __forceinline__ uint32_t ds(uint32_t step) const {
    return address + Traits::kDsOffset + step % Traits::kBuffers * Traits::kScoreBytes;
  }
  __device__ __forceinline__ uint32_t delta(uint32_t step) const {
    return address + Traits::kDeltaOffset + step % Traits::kDoutStages * Traits::kRowBytes;
  }

  // ---- copies -------------------------------------------------------------------------------

  // Copies rows from `first_row` to before `end_row` of a sequence that begins at row `begin` of
  // the tensor.
  template <class Layout, int kRows, class Order = InOrder>
  static __device__ __forceinline__ void copy(uint32_t tile, const Rows& from, int batch, int head,
                                              int begin, int first_row, int end_row, int dim) {
    const uint16_t* const base = from.data + batch * from.strides.batch + head * from.strides.head +
                                 (begin + first_row) * from.strides.seq;
    TileLoader<Layout, kRows, Traits::kThreads, Order>(base, from.strides.seq, tile)
        .load_next(0, from.strides.seq, end_row - first_row, dim);
  }
  // Copies one number per query of a step.
  static __device__ __forceinline__ void copy_row_numbers(uint32_t to, const float* from,
                                                          int64_t place) {
    constexpr int kNumbers = kBytesPerChunk / static_cast<int>(sizeof(float));
    const int chunk = reread::thread_index();
    if (chunk < Traits::kTileQ / kNumbers) {
      ptx::cp_async_16(to + chunk * kBytesPerChunk,
                       from + place * Traits::kTileQ + chunk * kNumbers);
    }
  }
  template <class AnyItem>
  __device__ __forceinline__ void copy_k(const AnyItem& item) const {
    copy<typename Traits::KLayout, Traits::kTileK, typename Traits::KeyOrder>(
        k(), params.k_rows, batch_k_of(item), item.head_kv, begin_k_of(item),
        item.tile * Traits::kTileK, length_k_of(params, item), params.dim);
    ptx::cp_async_arrive(k_full());
  }
  template <class AnyItem>
  __device__ __forceinline__ void copy_v(const AnyItem& item) const {
    copy<typename Traits::VLayout, Traits::kTileK, typename Traits::KeyOrder>(
        v(), params.v_rows, batch_k_of(item), item.head_kv, begin_k_of(item),
        item.tile * Traits::kTileK, length_k_of(params, item), params.dim_v);
    ptx::cp_async_arrive(v_full());
  }
  // For an item without steps.
  __device__ __forceinline__ void skip_keys() const {
    ptx::mbarrier_arrive(k_full());
    ptx::mbarrier_arrive(v_full());
  }
  // Copies Q of a step of an item. The step is the `number`-th of the block.
  template <class AnyItem>
  __device__ __forceinline__ void copy_q(const AnyItem& item, const Step& step,
                                         uint32_t number) const {
    copy<typename Traits::QLayout, Traits::kTileQ>(
        q(number), params.q_rows, batch_q_of(item), step.head(params, item), begin_q_of(item),
        step.tile_q * Traits::kTileQ, length_q_of(params, item), params.dim);
    copy_row_numbers(lse(number), params.row_lse, step.place(params, item));
    if constexpr (Traits::kPairsAhead) {
      Pairs<Traits>::copy(ds(number), p(number), params, item, step);
    }
    ptx::cp_async_arrive(q_full(number));
  }
  template <class AnyItem>
  __device__ __forceinline__ void copy_dout(const AnyItem& item, const Step& step,
                                            uint32_t number) const {
    copy<typename Traits::DoutLayout, Traits::kTileQ>(
        dout(number), params.dout_rows, batch_q_of(item), step.head(params, item), begin_q_of(item),
        step.tile_q * Traits::kTileQ, length_q_of(params, item), params.dim_v);
    copy_row_numbers(delta(number), params.row_delta, step.place(params, item));
    ptx::cp_async_arrive(dout_full(number));
  }
};

}  // namespace flashmoe::sm89_backward
