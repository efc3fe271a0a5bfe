// Columns of a chunk of gradients (core/ops/moe/gradient_chunks.h): those that a walk over all
// counts of chunks finds, in a few questions.
#include "core/ops/moe/gradient_chunks.h"

#include <algorithm>
#include <cstdint>
#include <random>

#include "check.h"

namespace flashmoe {
namespace {

int64_t rounded_up(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

// Chunk by chunk: the first count whose chunks fit.
template <class Fits>
int64_t walk(int64_t columns, const Fits& fits) {
  for (int64_t count = 1; count * kGradientBlock < columns; ++count) {
    const int64_t blocks = rounded_up(rounded_up(columns, count), kGradientBlock);
    const int64_t chunk = std::min(columns, blocks * kGradientBlock);
    if (fits(chunk)) return chunk;
  }
  return std::min(columns, kGradientBlock);
}

void finds_what_a_walk_finds() {
  std::mt19937_64 random(7);
  for (int call = 0; call < 20000; ++call) {
    const int64_t columns = 1 + static_cast<int64_t>(random() % (1 << (1 + random() % 17)));
    const int64_t most = static_cast<int64_t>(random() % static_cast<uint64_t>(columns + 300));
    const bool all_fit = random() % 4 == 0;  // whatever a part of them does
    const auto fits = [&](int64_t chunk) {
      return chunk == columns ? all_fit || chunk <= most : chunk <= most;
    };
    CHECK(fit_chunk(columns, fits) == walk(columns, fits));
  }
}

// As the bound of a layer's workspace is: what does not fit is found out as fast as what does.
void asks_little() {
  for (const int64_t most : {int64_t{0}, int64_t{1} << 9, int64_t{1} << 39}) {
    int asked = 0;
    const int64_t chunk = fit_chunk(int64_t{1} << 40, [&](int64_t n) {
      CHECK(++asked <= 40);
      return n <= most;
    });
    CHECK(chunk == std::max(most, kGradientBlock));
  }
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::finds_what_a_walk_finds();
  flashmoe::asks_little();
  return 0;
}
