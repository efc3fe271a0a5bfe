// Computes a part of a gradient of a masked call by plain arithmetic, after the tensor cores made
// it infinite or NaN. They multiply what a row does not see by a probability of 0, and 0 * NaN is
// NaN. This code only touches pairs whose query sees the key. It is slow: one lane per pair.
#pragma once

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/tile.cuh"
#include "cuda/numeric/dtype.cuh"
#include "cuda/tile/extents.h"
#include "cuda/tile/thread.cuh"

namespace flashmoe::attention_backward {

// Existing rows and columns of one head.
struct Part {
  static constexpr bool kRagged = false;

  int batch;
  int head;
  int first_row;
  int end_row;
  int first_column;
  int end_column;
};

enum class Wanted { kDq, kDk, kDv };

template <Wanted kWanted>
__device__ __forceinline__ const Gradient& gradient_of(const CommonParams& params) {
  return kWanted == Wanted::kDq   ? params.dq_rows
         : kWanted == Wanted::kDk ? params.dk_rows
                                  : params.dv_rows;
}

template <class Element>
__device__ __forceinline__ float to_float(const uint16_t* at) {
  return numeric::ElementTraits<Element>::to_float(*at);
}

// Writes two neighbours, or adds to the old values.
template <class Element>
__device__ __forceinline__ void store_pair(const Gradient& to, int64_t at, bool accumulate,
                                           float low, float high) {
  if (to.fp32 != 0) {
    auto* const place = reinterpret_cast<float2*>(static_cast<float*>(to.rows) + at);
    const float2 before = accumulate ? *place : make_float2(0.0f, 0.0f);
    *place = accumulate ? make_float2(before.x + low, before.y + high) : make_float2(low, high);
  } else {
    auto* const place = static_cast<uint16_t*>(to.rows) + at;
    if (accumulate) {
      low += to_float<Element>(place);
      high += to_float<Element>(place + 1);
    }
    *reinterpret_cast<uint32_t*>(place) = numeric::ElementTraits<Element>::pack(low, high);
  }
}

__device__ __forceinline__ const uint16_t* row_of(const Rows& rows, int batch, int head, int row) {
  return rows.data + batch * rows.strides.batch + head * rows.strides.head + row * rows.strides.seq;
}

// Reads 8 columns at a time: rows are aligned to 16 bytes.
template <class Element>
__device__ __forceinline__ float dot_of_rows(const uint16_t* a, const uint16_t* b, int dim) {
  using Numeric = numeric::ElementTraits<Element>;
  float sum = 0.0f;
  for (int d = 0; d < dim; d += 8) {
    const uint4 of_a = *reinterpret_cast<const uint4*>(a + d);
    const uint4 of_b = *reinterpret_cast<const uint4*>(b + d);
    const uint32_t pairs_a[4] = {of_a.x, of_a.y, of_a.z, of_a.w};
    const uint32_t pairs_b[4] = {of_b.x, of_b.y, of_b.z, of_b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair_a = Numeric::unpack(pairs_a[i]);
      const float2 pair_b = Numeric::unpack(pairs_b[i]);
      sum = fmaf(pair_a.y, pair_b.y, fmaf(pair_a.x, pair_b.x, sum));
    }
  }
  return sum;
}

// The bias of a pair's logit; ScorePairs::kHidden if the query does not see the key.
template <class Traits, class AnyPart>
__device__ __forceinline__ float bias_of(const CommonParams& params, const AnyPart& part, int head,
                                         int query, int key) {
  if constexpr (kIsBiased<Traits>) {
    const auto& biased = static_cast<const typename Traits::Params&>(params);
    const PairRow<typename Traits::Element> row(biased.pairs, batch_q_of(part), head, query);
    if constexpr (AnyPart::kRagged) {
      return row.bias_of(biased.sequences.keys_of(part.batch_q).skipped + key);
    } else {
      return row.bias_of(key);
    }
  } else {
    return 0.0f;
  }
}

// P or dS of a pair.
template <class Traits, bool kDs, class AnyPart>
__device__ __forceinline__ float weight_of(const CommonParams& params, const AnyPart& part,
                                           int head, int query, int key) {
  using Element = typename Traits::Element;
  const int head_kv = head / params.heads_per_kv;
  const int64_t row =
      static_cast<int64_t>(tile_of_head(params, part, head)) * Traits::kTileQ + query;
  const int query_row = begin_q_of(part) + query;
  const int key_row = begin_k_of(part) + key;
  float score =
      dot_of_rows<Element>(row_of(params.q_rows, batch_q_of(part), head, query_row),
                           row_of(params.k_rows, batch_k_of(part), head_kv, key_row), params.dim);
  float slope = 1.0f;
  if (params.score.capped()) {
    params.score.cap(score);
    slope = fmaf(-score, score, 1.0f);
  }
  if constexpr (kIsBiased<Traits>) {
    score = biased_logit(score, static_cast<const typename Traits::Params&>(params).pairs.factor,
                         bias_of<Traits>(params, part, head, query, key));
  }
  const float power = kIsBiased<Traits>
                          ? (score - params.row_lse[row]) * params.score.scale_log2
                          : fmaf(score, params.score.scale_log2, -params.row_lse[row]);
  const float p = numeric::exp2_approx(power);
  if (!kDs) return p;
  const float dp =
      dot_of_rows<Element>(row_of(params.dout_rows, batch_q_of(part), head, query_row),
                           row_of(params.v_rows, batch_k_of(part), head_kv, key_row), params.dim_v);
  return p * slope * (dp - params.row_delta[row]);
}

// A whole warp calls it.
template <class Traits, Wanted kWanted, class AnyPart = Part>
__device__ __noinline__ void masked_fallback(const CommonParams& params, const AnyPart part) {
  using Element = typename Traits::Element;
  constexpr bool kOfQueries = kWanted == Wanted::kDq;
  constexpr int kColumns = kWanted == Wanted::kDv ? Traits::kDimV : Traits::kDim;
  constexpr int kPairs = ceil_div(kColumns / 2, kThreadsPerWarp);
  const int lane = reread::lane_index();
  const Gradient& to = gradient_of<kWanted>(params);
  const Rows& rows = kOfQueries               ? params.k_rows
                     : kWanted == Wanted::kDk ? params.q_rows
                                              : params.dout_rows;
  const int batch = kOfQueries ? batch_q_of(part) : batch_k_of(part);
  const int begin_row = kOfQueries ? begin_q_of(part) : begin_k_of(part);
  const int batch_of_others = kOfQueries ? batch_k_of(part) : batch_q_of(part);
  const int begin_of_others = kOfQueries ? begin_k_of(part) : begin_q_of(part);
  const int group = params.heads_per_kv;
  // Heads that the sum runs over.
  const int first_head = kOfQueries ? part.head / group : part.head * group;
  const int end_head = first_head + (kOfQueries ? 1 : group);
  for (int row = part.first_row; row < part.end_row; ++row) {
    const int first =
        kOfQueries ? first_key_of(params, part, row) : first_query_of(params, part, row);
    const int end = kOfQueries ? end_key_of(params, part, row) : end_query_of(params, part, row);
    float sums[kPairs][2] = {};
    bool open = true;  // some sum is not NaN yet
    for (int head = first_head; head < end_head && open; ++head) {
      for (int begin = first; begin < end && open; begin += kThreadsPerWarp) {
        const int own = begin + lane;
        float weight = 0.0f;
        bool seen = own < end;
        if constexpr (kIsBiased<Traits>) {
          seen = seen && bias_of<Traits>(params, part, kOfQueries ? part.head : head,
                                         kOfQueries ? row : own,
                                         kOfQueries ? own : row) != ScorePairs::kHidden;
        }
        if (seen) {
          weight = weight_of<Traits, kWanted != Wanted::kDv>(
              params, part, kOfQueries ? part.head : head, kOfQueries ? row : own,
              kOfQueries ? own : row);
        }
        for (int i = 0; i < kThreadsPerWarp && begin + i < end; ++i) {
          const float of_pair = __shfl_sync(kFullWarp, weight, i);
          if constexpr (kIsBiased<Traits>) {
            if (__shfl_sync(kFullWarp, static_cast<int>(seen), i) == 0) continue;
          }
          const uint16_t* const from =
              row_of(rows, batch_of_others, head, begin_of_others + begin + i);
#pragma unroll
          for (int c = 0; c < kPairs; ++c) {
            const int column = part.first_column + 2 * (c * kThreadsPerWarp + lane);
            if (column >= part.end_column) continue;
            sums[c][0] = fmaf(of_pair, to_float<Element>(from + column), sums[c][0]);
            sums[c][1] = fmaf(of_pair, to_float<Element>(from + column + 1), sums[c][1]);
          }
        }
        open = false;
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
          const int column = part.first_column + 2 * (c * kThreadsPerWarp + lane);
          open = open || (column < part.end_column && !(isnan(sums[c][0]) && isnan(sums[c][1])));
        }
        open = __any_sync(kFullWarp, open);
      }
    }
    const float scale = kWanted == Wanted::kDv ? 1.0f : params.scale;
    const int64_t row_at =
        batch * to.strides.batch + part.head * to.strides.head + (begin_row + row) * to.strides.seq;
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      const int column = part.first_column + 2 * (c * kThreadsPerWarp + lane);
      if (column >= part.end_column) continue;
      store_pair<Element>(to, row_at + column, params.accumulate != 0, sums[c][0] * scale,
                          sums[c][1] * scale);
    }
  }
}

}  // namespace flashmoe::attention_backward
