// Arguments of the few-token kernels, as the device sees them.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "cuda/tile/bias.h"

namespace flashmoe::moe::sm89_few_tokens {

// Experts' weights [experts, rows, columns] as pairs of 8 rows that form the 16 rows of one
// product: 8 of a gate and 8 of an up, or rows 0 to 7 and 8 to 15 of one matrix. Strides are in
// elements, and columns are contiguous.
struct Weights {
  const uint16_t* half[2];
  int64_t expert_stride[2];
  int64_t row_stride[2];
  int32_t rows;       // per half's matrix
  int32_t columns;    // the sum runs over these
  int32_t tile_rows;  // from one product's rows to the next: 8 for a gate and an up, else 16
  int32_t half_rows;  // from a half's first row to the other's: 0 for a gate and an up, else 8
};

struct Routing {
  const int32_t* offsets;  // [experts + 1]
  const int32_t* pairs;    // [tokens * top_k]
  const float* weights;    // [tokens, top_k]
  int32_t experts;
  int32_t tokens;
  int32_t top_k;
  int32_t max_records;  // upper bound on the experts with rows
};

// Splits of the work, as far as the host decides them.
struct Schedule {
  int32_t stages;        // steps of a warp in flight
  int32_t entry_tokens;  // slots of an expert that are taken at a time
  int32_t
      trigger_lead;  // steps from a warp's last load back to where it lets the next kernel start
  // For the bulk kernels, whose stages are per block:
  int32_t stage_columns;
  int32_t groups;  // of warps, which take stages in turn; a power of 2 that divides the stages
  // The first loads wait for these:
  Divisor by_entry_tokens;
  Divisor by_unit_stages;  // stages of all columns
  Divisor by_units;        // units per entry
};

struct UpParams {
  Routing routing;
  Schedule schedule;
  Weights weights;
  Bias bias[2];       // in the order of the halves
  const uint16_t* x;  // [tokens, columns]
  int64_t x_stride;
  uint16_t* a;  // [tokens * top_k, rows]
  int64_t a_stride;
  uint16_t* pre_activation;  // [tokens * top_k, rows of both halves], or nullptr
  int64_t pre_activation_stride;
  uint32_t* counters;  // [counter_count] of the down kernel, which this kernel clears
  int32_t counter_count;
  int32_t gated;
  int32_t activation;  // flashmoe_activation
  int32_t weight_on_input;
  float alpha;
  float limit;  // infinity: no limit
  float up_offset;
};

struct DownParams {
  Routing routing;
  Schedule schedule;
  Weights weights;
  Bias bias;
  const uint16_t* a;  // [tokens * top_k, columns]
  int64_t a_stride;
  uint16_t* out;  // [tokens, rows]
  int64_t out_stride;
  float* parts;        // [2 * blocks][tokens][stripe's rows]: sums of shared stripes
  uint32_t* counters;  // [stripes]: blocks that have left their sums
  int32_t weight_on_input;
};

}  // namespace flashmoe::moe::sm89_few_tokens
