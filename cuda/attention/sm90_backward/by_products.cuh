// Consumers of head dimensions whose dK and dV of 64 keys each fill the registers of one warpgroup.
// Two blocks, a cluster, share an item of 128 keys and run in step. Each block has 64 of the keys,
// and half of the columns of dQ of all 128, so that no more is added to the sums than with a block
// of 128 keys. The blocks load the queries for each other, half of the boxes each, and send each
// other dS. Each block also has those columns of the other's K that its half of dQ takes.
//
// Three consumers have the same 64 keys. One makes S, P and dV, one makes dP, dS and dK, and one
// makes dQ of the keys of both blocks. P goes from the first to the second by the buffer in which
// dS takes its place. No consumer makes another one wait for its turn. The third consumer adds its
// registers to the sums in global memory when the turn keeper (turn_keeper.cuh) has seen that it
// may, and goes on. The turn keeper gives the turn on. dV and dK leave from registers, too.
//
// One step; [..] runs on the tensor cores meanwhile:
//
//   P, dV:  issue S | wait S | P = exp2 | wait for the buffer | leave P | issue dV | wait dV
//   dS, dK: issue dP | wait dP | wait for P | by 16 queries: make dS, issue dK | send dS [dK] |
//           wait dK
//   dQ:     wait for dS of both blocks | issue both halves | wait for one, and for the turn | add
//           it [the other] | wait for it | add it
#pragma once

#include "cuda/attention/sm90_backward/panels.cuh"
#include "cuda/ptx/registers.cuh"

namespace flashmoe::sm90_backward {

// Arrives at a barrier of this block and at the same barrier of the other block.
__device__ __forceinline__ void release_to_both(uint32_t barrier) {
  __syncwarp();
  const int lane = lane_index();
  if (lane < 2) ptx::mbarrier_arrive_cluster(ptx::map_to_rank(barrier, lane));
}

// Arrives at a mapped barrier of the other block, and lets the phase wait for this many bytes of
// copies. It is not a release to the cluster, which would wait for all that this thread has written
// anywhere: what the copies write is seen with their bytes.
__device__ __forceinline__ void arrive_expect_at_other(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Transposes four words of each of four neighbouring lanes: a lane gets the word with its own
// number from each of them.
__device__ __forceinline__ void transpose_by_fours(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& low = words[bit == 1 ? 2 * i : i];
      uint32_t& high = words[bit == 1 ? 2 * i + 1 : i + 2];
      const uint32_t got = __shfl_xor_sync(kFullWarp, upper ? low : high, bit);
      if (upper) {
        low = got;
      } else {
        high = got;
      }
    }
  }
}

template <class Traits>
struct ByProductsConsumer : PanelConsumer<Traits> {
  using Base = PanelConsumer<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::index;
  using Base::items;
  using Base::params;
  using Base::parity;
  using Base::shared_items;
  using Base::stage;
  static_assert(Traits::kCluster == 2);
  DoutRing<Traits> dout_ring;

  __device__ __forceinline__ uint32_t buffer_parity() const { return index >> 1 & 1; }
  __device__ __forceinline__ void wait_for_q() const {
    ptx::mbarrier_wait(barriers.q_full(stage()), parity());
  }

  // dO comes in units of some boxes, which go round in a ring of their own.
  __device__ __forceinline__ void wait_for_dout(uint32_t unit) const {
    ptx::mbarrier_wait(barriers.do_full(dout_ring.stage_of(unit)), dout_ring.parity_of(unit));
  }
  __device__ __forceinline__ void give_dout_back(uint32_t unit) const {
    release_to_both(barriers.do_empty(dout_ring.stage_of(unit)));
  }
  __device__ __forceinline__ uint32_t dout_address(uint32_t unit) const {
    return Base::shared + Traits::kDoOffset + dout_ring.stage_of(unit) * Traits::kDoUnitBytes;
  }

  // Issues a product of 16 queries with some columns of dO or Q. It has no more registers than
  // ptxas takes for one instruction, which is what a thread was launched with.
  template <int kColumns, int kRegisters>
  static __device__ __forceinline__ void add_product(float (&sums)[kRegisters], int first_column,
                                                     const uint32_t (&rows)[4], uint64_t columns,
                                                     bool add) {
    static_assert(kColumns / 2 < Traits::kLaunchRegisters);
    using Mma = ptx::Wgmma<typename Traits::Element, kColumns>;
    Mma::multiply_values(reinterpret_cast<float (&)[kColumns / 2]>(sums[first_column / 2]), rows,
                         columns, add);
  }

  // Writes 64 rows of a fragment as 16-bit elements, as far as rows exist before `end_row`, to the
  // columns from `first_column` on, by chunks of 8 columns. The rows are as the copy engine takes
  // them.
  template <int kRegisters>
  __device__ __forceinline__ void write_chunks(const Direct& to, const float (&values)[kRegisters],
                                               float scale, int batch, int head, int first_row,
                                               int end_row, int first_column,
                                               int end_column) const {
    using Numeric = typename Base::Numeric;
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_of_group() * 16 + lane / 4 + 8 * half;
      uint16_t* const rows = static_cast<uint16_t*>(to.rows) + batch * to.strides.batch +
                             head * to.strides.head + row * to.strides.seq;
#pragma unroll
      for (int first = 0; first < kRegisters; first += 16) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int place = first + 4 * i + 2 * half;
          words[i] = Numeric::pack(values[place] * scale, values[place + 1] * scale);
        }
        transpose_by_fours(words, lane);
        const int column = first_column + 2 * first + lane % 4 * 8;
        if (row < end_row && column < end_column) {
          *reinterpret_cast<uint4*>(rows + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Writes dV or dK of the item.
  template <int kRegisters>
  __device__ __forceinline__ void write_gradient(const Direct& direct, const Direct& rows,
                                                 uint2* marks, const float (&values)[kRegisters],
                                                 float scale, int columns) const {
    const typename Base::SharedItem& item = shared_items[items % kItemsHeld];
    const int first_key = Base::first_key_of(item.tile);
    if (direct.rows != nullptr) {
      const int block = static_cast<int>(block_rank<Traits>());
      Base::write_directly(direct, values, scale, item.batch, item.head_kv, first_key, params.seq_k,
                           0, columns, Base::marks_of_keys(marks, item, block, 0));
    } else if (rows.rows != nullptr) {
      write_chunks(rows, values, scale, item.batch, item.head_kv, first_key, params.seq_k, 0,
                   columns);
    }
  }
};

template <class Traits>
struct ValueConsumer : ByProductsConsumer<Traits> {
  using Base = ByProductsConsumer<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dout_ring;
  using Base::dv;
  using Base::index;
  using Base::kScores;
  using Base::kSlices;
  using Base::params;
  using Base::scores;
  using Base::shared;
  using Base::stage;

  __device__ __forceinline__ void take_step(int first_key, bool last) {
    uint32_t p[kSlices][4];
    Base::wait_for_q();
    Base::read_row();
    Base::issue_scores();
    float2 lse[kLseAhead];
    load_lse(lse, 0);
    ptx::wgmma_wait<0>();  // S
    ptx::pin(scores);
    if (last) release(barriers.k_empty());
    make_p(p, lse, first_key);
    ptx::mbarrier_wait(barriers.ds_taken(buffer()), Base::buffer_parity() ^ 1);
    if constexpr (Traits::kCapped) {
      Base::leave_factors();
    } else {
      Base::leave_factors(p);
    }
    release(barriers.p_full(buffer()));
    release_to_both(barriers.q_empty(stage()));
    add_dv(p);
    ++index;
    add = true;
  }

  // While S is made, lse is loaded for this many of the tile's queries, in pairs: there is no room
  // for more.
  static constexpr int kLseAhead = kScores / (Traits::kCapped ? 4 : 8);
  __device__ __forceinline__ void load_lse(float2 (&lse)[kLseAhead], int first) const {
    const uint32_t rows = shared + Traits::kLseOffset + stage() * Traits::kRowBytes +
                          lane_index() % 4 * 8 + first * 32;
#pragma unroll
    for (int i = 0; i < kLseAhead; ++i) lse[i] = ptx::load_shared_float2(rows + 32 * i);
  }
  __device__ __forceinline__ void make_p(uint32_t (&p)[kSlices][4], float2 (&lse)[kLseAhead],
                                         int first_key) {
    if constexpr (Traits::kCapped) {
      Base::exponentiate_capped(p, lse, first_key);
    } else {
      const float scale_log2 = params.score.scale_log2;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i == 4 * kLseAhead) load_lse(lse, kLseAhead);
        const float2& of_rows = lse[i / 4 % kLseAhead];
        scores[i] = fmaf(scores[i], scale_log2, -(i % 2 == 0 ? of_rows.x : of_rows.y));
      }
      Base::make_p_of_powers(p, first_key);
    }
  }

  // Computes dV += P^T dO, the columns of one unit after the other.
  __device__ __forceinline__ void add_dv(uint32_t (&p)[kSlices][4]) {
    constexpr int kColumns = Traits::kDimV / Traits::kDoUnits;
    ptx::pin(dv);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) ptx::pin(p[slice]);
#pragma unroll
    for (int unit = 0; unit < Traits::kDoUnits; ++unit) {
      Base::wait_for_dout(unit);
      ptx::wgmma_fence();
      const uint64_t dout =
          ptx::swizzled_descriptor(Base::dout_address(unit), Traits::kQueryBoxBytes);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        Base::template add_product<kColumns>(dv, unit * kColumns, p[slice],
                                             ptx::advance(dout, slice * 2048),
                                             slice > 0 || Base::adds());
      }
      ptx::wgmma_commit();
    }
    if constexpr (Traits::kDoUnits > 1) {
      ptx::wgmma_wait<1>();
      Base::give_dout_back(0);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    Base::give_dout_back(Traits::kDoUnits - 1);
    dout_ring.advance();
  }

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void give_back_unused() const { release(barriers.k_empty()); }
  __device__ __forceinline__ void clear_keys() { clear(dv); }
  __device__ __forceinline__ void write_keys() const {
    Base::write_gradient(params.dv_direct, params.dv_rows, params.withheld.dv, dv, 1.0f,
                         params.dim_v);
  }
};

template <class Traits>
struct KeyConsumer : ByProductsConsumer<Traits> {
  using Base = ByProductsConsumer<Traits>;
  using Base::add;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::dk;
  using Base::dout_ring;
  using Base::ds;
  using Base::index;
  using Base::items;
  using Base::kScores;
  using Base::kSlices;
  using Base::params;
  using Base::shared;
  using Base::stage;
  using typename Base::KeyMma;

  __device__ __forceinline__ void take_step(int first_key, bool last) {
    float dp[kScores];
    make_dp(dp);
    // The step's first row and delta come with Q.
    Base::wait_for_q();
    Base::read_row();
    const bool masked = Traits::kCapped || Base::is_masked(first_key);
    if constexpr (Traits::kDoUnits > 1) {
      ptx::wgmma_wait<1>();
      Base::give_dout_back(0);
    }
    ptx::wgmma_wait<0>();  // dP
    ptx::pin(dp);
    Base::give_dout_back(Traits::kDoUnits - 1);
    dout_ring.advance();
    if (last) release(barriers.v_empty());
    ptx::mbarrier_wait(barriers.p_full(buffer()), Base::buffer_parity());
    Base::take_factors();
    issue_dk_of(dp, masked);
    ptx::fence_proxy_async_shared();
    give_ds();
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release_to_both(barriers.q_empty(stage()));
    ++index;
    add = true;
  }

  // Issues dP^T = V dO^T, the columns of one unit after the other.
  __device__ __forceinline__ void make_dp(float (&dp)[kScores]) const {
    constexpr int kSlicesOfUnit = Traits::kDimV / Traits::kDoUnits / 16;
    using ScoreMma = typename Base::ScoreMma;
    const uint64_t v = Base::v_rows();
#pragma unroll
    for (int unit = 0; unit < Traits::kDoUnits; ++unit) {
      Base::wait_for_dout(unit);
      const uint64_t dout = ptx::swizzled_descriptor(Base::dout_address(unit), 16);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSlicesOfUnit; ++i) {
        const int slice = unit * kSlicesOfUnit + i;
        ScoreMma::multiply(dp, Base::slice_of(v, slice, Traits::kKeyBoxBytes),
                           Base::slice_of(dout, i, Traits::kQueryBoxBytes), slice > 0);
      }
      ptx::wgmma_commit();
    }
  }

  // Gives this warp's rows of dS to both blocks. Their place in the other block is free: the first
  // consumer waited for that before it left P.
  __device__ __forceinline__ void give_ds() const {
    constexpr int kBytes = Traits::kGroupBoxBytes / 4;
    __syncwarp();
    if (lane_index() != 0) return;
    const uint32_t from =
        shared + Traits::kDsOffset + buffer() * Traits::kDsBytes + warp_of_group() * kBytes;
    const uint32_t other = block_rank<Traits>() ^ 1;
    const uint32_t full = ptx::map_to_rank(barriers.ds_full(buffer()), other);
    arrive_expect_at_other(full, kBytes);
    ptx::bulk_copy_to_rank(ptx::map_to_rank(from + Traits::kGroupBoxBytes, other), from, kBytes,
                           full);
    ptx::mbarrier_arrive(barriers.ds_full(buffer()));
  }

  // Makes dS of P, and issues dK += dS^T Q. dS of a slice is made between the products of the
  // slices before it.
  __device__ __forceinline__ void issue_dk_of(const float (&dp)[kScores], bool masked) {
    const uint64_t q = ptx::swizzled_descriptor(
        shared + Traits::kQOffset + stage() * Traits::kQBytes, Traits::kQueryBoxBytes);
    const uint32_t rows = Base::delta_rows();
    float2 delta[2];
    Base::load_delta(delta, rows);
    ptx::pin(dk);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const float2 of_rows[2] = {delta[0], delta[1]};
      if (slice + 1 < kSlices) Base::load_delta(delta, rows + 64 * (slice + 1));
      const uint32_t p[4] = {ds[slice][0], ds[slice][1], ds[slice][2], ds[slice][3]};
      Base::make_ds(slice, dp, p, of_rows, masked);
      ptx::pin(ds[slice]);
      ptx::wgmma_fence();
      constexpr int kProducts = Traits::kDim / 2 < Traits::kLaunchRegisters ? 1 : 2;
      constexpr int kColumns = Traits::kDim / kProducts;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        Base::template add_product<kColumns>(
            dk, i * kColumns, ds[slice],
            ptx::advance(q, slice * 2048 + i * kColumns / kBoxColumns * Traits::kQueryBoxBytes),
            slice > 0 || Base::adds());
      }
    }
    ptx::wgmma_commit();
  }

  // The item lies in one of several places. So K, which the others read, may be given back at once.
  __device__ __forceinline__ void begin() const {
    release(barriers.k_empty());
    ptx::mbarrier_wait(barriers.v_full(), items & 1);
  }
  __device__ __forceinline__ void give_back_unused() const {
    release(barriers.k_empty());
    release(barriers.v_empty());
  }
  __device__ __forceinline__ void clear_keys() { clear(dk); }
  __device__ __forceinline__ void write_keys() const {
    Base::write_gradient(params.dk_direct, params.dk_rows, params.withheld.dk, dk, params.scale,
                         params.dim);
  }
};

// Makes this block's columns of dQ of a step, of the keys of both blocks. Half of a wide panel is
// added while the other half is made.
template <class Traits>
struct QueryConsumer : ByProductsConsumer<Traits> {
  using Base = ByProductsConsumer<Traits>;
  using Base::barriers;
  using Base::Base;
  using Base::buffer;
  using Base::index;
  using Base::kAlwaysAdds;
  using Base::params;
  using Base::slot_uses;

  static constexpr int kPieces = Traits::kDqPieces;
  static constexpr int kPieceColumns = Traits::kDqPartColumns;
  using Piece = float[kPieceColumns / 2];

  __device__ __forceinline__ void take_step(int, bool last) {
    ptx::mbarrier_wait(barriers.ds_full(buffer()), Base::buffer_parity());
#pragma unroll 1
    for (int panel = 0; panel < Traits::kBlockPanels; ++panel) {
      const auto give_back = [&] {
        if (panel + 1 < Traits::kBlockPanels) return;
        release_to_both(barriers.ds_taken(buffer()));
        if (last) release(barriers.k_empty());
      };
      Piece dq[kPieces];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) issue_piece(dq[piece], panel, piece);
      ptx::wgmma_wait<kPieces - 1>();
      ptx::pin(dq[0]);
      if (kPieces == 1) give_back();
      const uint32_t place = slot_uses % kSlots;
      ptx::mbarrier_wait(barriers.slot_ready(place), slot_uses / kSlots & 1);
      ++slot_uses;
      const uint32_t use = ptx::load_shared_uint(barriers.slot_use(place));
      const uint32_t of_all = ptx::load_shared_uint(barriers.slot_tile(place));
      float* const sums = params.dq_sums +
                          static_cast<int64_t>(of_all) * (Traits::kTileQ * Traits::kPanelColumns) +
                          Base::thread_of_group() * 4;
      add_piece(dq[0], sums, use);
      if constexpr (kPieces > 1) {
        ptx::wgmma_wait<0>();
        ptx::pin(dq[1]);
        give_back();
        add_piece(dq[1], sums + kPieceFloats, use);
      }
      if (use == kLastPart || use == kOnlyPart) write_rows(dq, sums, use, of_all);
      release(barriers.slot_full(place));
    }
    ++index;
  }

  // Issues the products of this block's keys, then those of the other's.
  __device__ __forceinline__ void issue_piece(Piece& dq, int panel, int piece) const {
    using QueryMma = ptx::Wgmma<typename Traits::Element, kPieceColumns>;
    const uint32_t tiles = Base::tiles();
    const uint32_t rank = block_rank<Traits>();
    const uint32_t column =
        (rank * Traits::kBlockPanels + panel) * Traits::kPanelColumns + piece * kPieceColumns;
    const uint32_t box = column / kBoxColumns;
    const uint32_t within = column % kBoxColumns * 2;
    const uint32_t of_other = box - rank * Traits::kBoxes / 2;
    const uint64_t k = ptx::swizzled_descriptor(
        tiles + Traits::kKOffset + box * Traits::kKeyBoxBytes + within, Traits::kKeyBoxBytes);
    const uint64_t other_k = ptx::swizzled_descriptor(
        tiles + Traits::kOtherKOffset + of_other * Traits::kKeyBoxBytes + within,
        Traits::kKeyBoxBytes);
    const uint64_t ds = ptx::swizzled_descriptor(
        tiles + Traits::kDsOffset + buffer() * Traits::kDsBytes, Traits::kKeyBoxBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kKeysPerGroup / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, slice * 2048), ptx::advance(k, slice * 2048),
                                slice > 0);
    }
#pragma unroll
    for (int slice = 0; slice < kKeysPerGroup / 16; ++slice) {
      QueryMma::multiply_majors(dq, ptx::advance(ds, Traits::kGroupBoxBytes + slice * 2048),
                                ptx::advance(other_k, slice * 2048), true);
    }
    ptx::wgmma_commit();
  }

  // Each warp's rows go to its own part of the sum, in chunks of 16 bytes of each thread.
  static constexpr int kChunkFloats = kThreadsPerGroup * 4;
  static constexpr int kChunks = kPieceColumns / 8;
  static constexpr int kPieceFloats = kChunks * kChunkFloats;

  static __device__ __forceinline__ void add_piece(const Piece& dq, float* sums, uint32_t use) {
    if (use == kOnlyPart) return;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const float four[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      if (use == kFirstPart) {
        ptx::store_global<1>(sums + i * kChunkFloats, four);
      } else {
        ptx::add_global<1>(sums + i * kChunkFloats, four);
      }
    }
  }

  // Writes rows of dQ. The last part was added as the others were, so the sum is read into its
  // registers. To add it in registers would need twice as many.
  __device__ __forceinline__ void write_rows(Piece (&dq)[kPieces], const float* sums, uint32_t use,
                                             uint32_t of_all) const {
    if (use == kLastPart) {
#pragma unroll
      for (int i = 0; i < kPieces * kChunks; ++i) {
        float four[4];
        ptx::load_from_l2<1>(four, sums + i * kChunkFloats);
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[i / kChunks][i % kChunks * 4 + e] = four[e];
      }
    }
    const int tile = static_cast<int>(of_all / Traits::kPanels);
    const int head_of_all = tile / params.tiles_q;
    const int batch = head_of_all / params.heads_q;
    const int head = head_of_all - batch * params.heads_q;
    const int row = (tile - head_of_all * params.tiles_q) * Traits::kTileQ;
    const int column = static_cast<int>(of_all % Traits::kPanels) * Traits::kPanelColumns;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first = column + piece * kPieceColumns;
      if (params.dq_direct.rows != nullptr) {
        Base::write_directly(
            params.dq_direct, dq[piece], params.scale, batch, head, row, params.seq_q, first,
            params.dim,
            marks_of_dq<Traits>(params.withheld, static_cast<uint32_t>(tile), 0, first));
      } else if (params.dq_rows.rows != nullptr) {
        Base::write_chunks(params.dq_rows, dq[piece], params.scale, batch, head, row, params.seq_q,
                           first, params.dim);
      }
    }
  }

  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void give_back_unused() const { release(barriers.k_empty()); }
  __device__ __forceinline__ void clear_keys() const {}
  __device__ __forceinline__ void write_keys() const {}
};

// Runs one of the consumers over its items.
template <class AnyConsumer>
__device__ __forceinline__ void take_items_by_products(AnyConsumer& consumer) {
  const Params& params = consumer.params;
  for (;; ++consumer.items) {
    ptx::mbarrier_wait(consumer.barriers.k_full(), consumer.items & 1);
    const Item* const shared_item = consumer.shared_items + consumer.items % kItemsHeld;
    Item item;
    item.tile = __shfl_sync(kFullWarp, shared_item->tile, 0);
    item.begin = __shfl_sync(kFullWarp, shared_item->begin, 0);
    item.end = __shfl_sync(kFullWarp, shared_item->end, 0);
    if (item.tile == kNoItem) break;
    int steps = Steps(item, params.heads_per_kv).left;
    consumer.add = false;
    if (AnyConsumer::kAlwaysAdds || steps == 0) consumer.clear_keys();
    if (steps == 0) {
      consumer.give_back_unused();
    } else {
      const int first_key = consumer.first_key_of(item.tile);
      consumer.begin();
#pragma unroll 1
      for (; steps > 0; --steps) consumer.take_step(first_key, steps == 1);
    }
    consumer.write_keys();
  }
}

// Runs the consumer that has this number among the warpgroups.
template <class Traits>
__device__ __forceinline__ void consume_by_products(const Params& params,
                                                    const Barriers<Traits>& barriers,
                                                    uint32_t shared, const Item* items, int group) {
  if (group == 1) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    ValueConsumer<Traits> consumer(params, barriers, shared, items, 0);
    take_items_by_products(consumer);
  } else if (group == 2) {
    ptx::take_registers<Traits::kKeyRegisters>();
    KeyConsumer<Traits> consumer(params, barriers, shared, items, 1);
    take_items_by_products(consumer);
  } else {
    ptx::give_registers_back<Traits::kQueryRegisters>();
    QueryConsumer<Traits> consumer(params, barriers, shared, items, 2);
    take_items_by_products(consumer);
  }
}

}  // namespace flashmoe::sm90_backward
