// One instantiated sm_90 attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm90 {

struct Entry : AttentionKernel {
  bool capped;      // only for logits with a softcap
  int box_rows;     // per box of Q and of the output, in whole tiles
  int box_columns;  // per box
  // Only kernels whose keys are split over blocks have these; others have 0:
  int groups;      // groups of 64 rows per tile
  int part_bytes;  // in the workspace, per part of a tile
  Kernel combine;  // the second kernel

  bool ragged;  // only for ragged, padded and paged batches
  bool packed;  // of these: rows are those of all query heads of a KV head (packs_queries)
  // Only for windows of at most so many keys beside a row's own. 0: for any window.
  int window_keys;

  bool splits_kv() const { return part_bytes > 0; }
};

}  // namespace flashmoe::sm90
