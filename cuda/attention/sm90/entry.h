// One instantiated sm_90 attention kernel, as the host sees it.
#pragma once

#include "cuda/attention/launch.h"

namespace flashmoe::sm90 {

struct Entry : AttentionKernel {
  bool capped;      // for logits with a softcap, and for no others
  int box_rows;     // of a box of Q and of the output, in whole tiles
  int box_columns;  // of every box
  // Of a kernel whose keys are split over blocks, of others 0:
  int groups;      // of 64 rows, of a tile
  int part_bytes;  // of the workspace, for each part of a tile
  Kernel combine;  // the second kernel

  bool ragged;  // for ragged, padded and paged batches, and for no others
  // For windows of so many keys beside a row's own, at most, and for no others; 0: for any.
  int window_keys;

  bool splits_kv() const { return part_bytes > 0; }
};

}  // namespace flashmoe::sm90
