// The order in which experts' gradients are computed, and how far that is.
#pragma once

#include <cstdint>

namespace flashmoe::moe_backward {

struct alignas(16) QueuedExpert {
  int32_t expert;
  int32_t first_row;
  int32_t rows;
  int32_t unused;
};

inline constexpr int kMostLaunches = 2;  // that have a count each

// Made by the stage that looks slots up; in memory a count for each launch, then the experts.
struct Queue {
  uint32_t* taken;        // [kMostLaunches] items that clusters have taken; nullptr: no queue
  QueuedExpert* experts;  // those with the most rows first
};

}  // namespace flashmoe::moe_backward
