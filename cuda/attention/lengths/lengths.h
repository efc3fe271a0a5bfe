// The kernel that tells sequences with few queries from the others, as the host sees it.
#pragma once

#include "cuda/attention/division.h"
#include "cuda/launch.h"
#include "cuda/tile/score_options.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::lengths {

inline constexpr int kLengthsThreads = 1024;

struct Params {
  SequenceParams sequences;
  int32_t few;         // queries, at most
  int32_t several;     // likewise, of those with more
  int32_t* many_q;     // [sequences]: queries of those with more than that, 0 of the others
  int32_t* few_q;      // [sequences]: of those with few
  int32_t* several_q;  // [sequences]: of those between them; nullptr: there are none

  Division* division;  // nullptr: nothing is divided
  ScoreOptions score;
  int32_t multiprocessors;
  int32_t many_rows;    // of a tile of prompts
  int32_t few_queries;  // of a tile of decoding
  // Times in microseconds on one multiprocessor.
  float decode_time;  // of a key of all heads
  float decode_lead;  // of a sequence's tiles, beside their keys
  float memory_time;  // of a key of all heads, on all multiprocessors: not less
  float heads_q;
  float pair_time;  // of a query and a key of one head
  float tile_time;  // of a tile of prompts, beside its pairs
};

extern const Kernel kLengths;

}  // namespace flashmoe::lengths
