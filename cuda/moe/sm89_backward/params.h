// The argument of the sm_89 kernel of weights' gradients.
#pragma once

#include <cstdint>

namespace flashmoe::moe::sm89_backward {

// An operand has one row for each row of an expert. Strides are in elements.
struct Operand {
  const uint16_t* data;
  int64_t stride;
  int64_t expert_stride;  // if counts are given
  int32_t by_token;       // its rows are tokens, otherwise slots
};

// [experts, m, n]: sums of the columns of a times those of b.
struct Job {
  Operand a;  // [rows, m]
  Operand b;  // [rows, n]
  void* out;
  int64_t expert_stride;  // of out
  int64_t row_stride;     // columns are contiguous
  int32_t is_fp32;
  int32_t m;
  int32_t n;
  int32_t m_tiles;
  int32_t n_tiles;
  int32_t end;  // end of this job's tiles among those of all jobs
};

inline constexpr int kMostJobs = 3;

struct Params {
  Job jobs[kMostJobs];
  const int32_t* offsets;     // [experts + 1] or nullptr
  const int32_t* counts;      // [experts] or nullptr
  const int32_t* row_tokens;  // [rows] the token of a slot, -1 if it does not count; or nullptr
  int32_t rows;
  int32_t tiles;  // over all jobs
  int32_t adds;   // the output is accumulated
};

}  // namespace flashmoe::moe::sm89_backward
