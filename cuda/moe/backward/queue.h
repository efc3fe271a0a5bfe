// The order in which experts' gradients are computed, and the progress in it.
#pragma once

#include <cstdint>

namespace flashmoe::moe_backward {

struct alignas(16) QueuedExpert {
  int32_t expert;
  int32_t first_row;
  int32_t rows;
  int32_t unused;
};

inline constexpr int kMostLaunches = 2;  // each has a count

// The stage that looks up slots makes it. In memory there is a count per launch, and then the
// experts.
struct Queue {
  uint32_t* taken;        // [kMostLaunches] items that clusters have taken; nullptr: no queue
  QueuedExpert* experts;  // those with the most rows come first
};

}  // namespace flashmoe::moe_backward
