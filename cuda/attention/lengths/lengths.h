// The kernel that separates sequences with few queries from the others, as the host sees it.
#pragma once

#include "cuda/attention/division.h"
#include "cuda/launch.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::lengths {

inline constexpr int kLengthsThreads = 1024;

struct Params {
  SequenceParams sequences;
  int32_t few;         // upper bound on the queries of a sequence with few
  int32_t several;     // upper bound on the queries of a sequence with several
  int32_t* many_q;     // [sequences]: queries of sequences with more than `several`, else 0
  int32_t* few_q;      // [sequences]: queries of sequences with few, else 0
  int32_t* several_q;  // [sequences]: queries of those between, else 0; nullptr: there are none

  Division* division;  // nullptr: nothing is divided
  ScoreOptions score;
  int32_t multiprocessors;
  int32_t many_rows;    // rows per tile of prompts
  int32_t few_queries;  // queries per tile of decoding
  // Times are in microseconds on one multiprocessor.
  float decode_time;  // per key of all heads
  float decode_lead;  // per row tile of all KV heads, besides its keys
  float memory_time;  // per key of all heads, on all multiprocessors: a lower bound
  float heads_q;
  float pair_time;  // per query and key of one head
  float tile_time;  // per tile of prompts, besides its pairs
};

extern const Kernel kLengths;

}  // namespace flashmoe::lengths
