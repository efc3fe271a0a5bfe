// The kernel that checks the tables of sequences, as the host sees it.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/tile/sequence_tables.h"

namespace flashmoe::check_sequences {

inline constexpr int kThreads = 128;  // one warp per sequence

struct Params {
  TableNumbers cu_seqlens_q;
  TableNumbers cu_seqlens_k;
  TableNumbers seqused_q;
  TableNumbers seqused_k;
  TableNumbers k_begin;
  TableNumbers batch_index;
  TableNumbers page_table;
  int64_t page_step;
  int64_t rows_q;
  int64_t room_k;  // rows per row of k's batch; with pages, rows of all pages of a sequence
  int64_t batch_k;
  int64_t page_size;
  int64_t most_q;  // 0: not given
  int64_t most_k;
  int32_t* status;
  int64_t status_step;
  int32_t sequences;
  int32_t paged;
};

extern const Kernel kCheckSequences;

}  // namespace flashmoe::check_sequences
