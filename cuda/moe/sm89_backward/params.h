// The argument of the sm_89 kernel of weights' gradients.
#pragma once

#include <cstdint>

namespace flashmoe::moe::sm89_backward {

// Rows of which a product has one for each row of an expert. Strides in elements.
struct Operand {
  const uint16_t* data;
  int64_t stride;
  int64_t expert_stride;  // with counts
  int32_t by_token;       // its rows are tokens, else slots
};

// [experts, m, n]: the sums of a's columns times b's.
struct Job {
  Operand a;  // [rows, m]
  Operand b;  // [rows, n]
  void* out;
  int64_t expert_stride;  // of out
  int64_t row_stride;     // columns lie next to each other
  int32_t is_fp32;
  int32_t m;
  int32_t n;
  int32_t m_tiles;
  int32_t n_tiles;
  int32_t end;  // tiles of this job and of those before it
};

inline constexpr int kMostJobs = 3;

struct Params {
  Job jobs[kMostJobs];
  const int32_t* offsets;     // [experts + 1] or nullptr
  const int32_t* counts;      // [experts] or nullptr
  const int32_t* row_tokens;  // [rows] the token of a slot, -1 where it does not count; or nullptr
  int32_t rows;
  int32_t tiles;  // of all jobs
  int32_t adds;   // to what out holds
};

}  // namespace flashmoe::moe::sm89_backward
