// Kernel parameters of the sm_90 attention backward, filled on the host.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "cuda/attention/backward/params.h"
#include "cuda/attention/backward/ragged_params.h"

namespace flashmoe::sm90_backward {

// Factors of coordinates of batch and head: 0 if the view repeats that dimension, which then has
// extent 1 in its map.
struct Repeats {
  int32_t batch;
  int32_t head;
};

// A gradient that consumers write from their registers, in fp32 or accumulated. If `rows` is null,
// the copy engine writes it by its map.
using Direct = attention_backward::Gradient;

// In calls with bounds that accumulate, non-finite rows of a part of a gradient are not added, but
// marked for the repair (behind.cuh): [places of 64 rows][parts of the columns] [warps]. For each
// warp's 16 rows there is a bit per lane: one word for rows lane / 4, one for those 8 rows on.
// Without marks everything is added.
struct Withheld {
  uint2* dq;
  uint2* dk;
  uint2* dv;
};

template <class Common>
struct ParamsOf : Common {
  // Tensor maps over [dim, seq, heads, batch] in boxes of 64 columns. The rows per box are kTileQ
  // for q and dout, kTileK for k and v, and 64 for the gradients.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap dq;
  CUtensorMap dk;
  CUtensorMap dv;

  Repeats q_repeats;
  Repeats k_repeats;
  Repeats v_repeats;
  Repeats dout_repeats;

  Direct dq_direct;
  Direct dk_direct;
  Direct dv_direct;
  Withheld withheld;
};
using Params = ParamsOf<attention_backward::CommonParams>;

// The maps of ragged and padded batches are ragged ones (cuda/attention/ragged_rows.h), which count
// the rows of a tensor's whole batch.
struct RaggedParams : ParamsOf<attention_backward::RaggedParams> {
  // Rows from one row of the batch to the next.
  int32_t q_rows_per_batch;
  int32_t k_rows_per_batch;
  int32_t v_rows_per_batch;
  int32_t dout_rows_per_batch;
  int32_t dq_rows_per_batch;
  int32_t dk_rows_per_batch;
  int32_t dv_rows_per_batch;
};

// The parameters for a kernel's Traits.
template <class Traits>
using ParamsFor = std::conditional_t<Traits::kRagged, RaggedParams, Params>;

static_assert(sizeof(Params) <= 4096 && sizeof(RaggedParams) <= 4096,
              "a kernel has 4 KiB of parameters everywhere");

}  // namespace flashmoe::sm90_backward
