// How decoding and prompts divide the multiprocessors, beside a simulation of both.
#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/attention/lengths/divide.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::lengths {
namespace {

std::mt19937 random_numbers(1);

double from(double least, double most) {
  return std::uniform_real_distribution<double>(least, most)(random_numbers);
}

// Whoever is free takes the next tile; those that decode are free when that has ended.
double simulated(const Loads& loads, int multiprocessors, int decoding) {
  const double decoded = std::max(double{loads.decoding} / decoding, double{loads.memory});
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (int i = 0; i < multiprocessors; ++i) free.push(i < decoding ? decoded : 0.0);
  double end = decoded;
  for (float tile = 0; tile < loads.tiles; ++tile) {
    const double done = free.top() + loads.of_tile;
    free.pop();
    free.push(done);
    end = std::max(end, done);
  }
  return end;
}

void ends_as_simulated() {
  for (int i = 0; i < 20000; ++i) {
    const Loads loads = {static_cast<float>(std::exp(from(-1, 14))),
                         static_cast<float>(from(0, 300)),
                         std::floor(static_cast<float>(std::exp(from(0, 7)))),
                         static_cast<float>(std::exp(from(-1, 6)))};
    const int multiprocessors = static_cast<int>(from(1, 150));
    const int decoding = static_cast<int>(from(1, multiprocessors + 1));
    const double want = simulated(loads, multiprocessors, decoding);
    CHECK(std::abs(end_of(loads, multiprocessors, decoding) - want) <= 1e-4 * want);
  }
}

// What either kind alone takes, and numbers that are large.
void extremes() {
  CHECK(end_of({1000.0f, 0.0f, 0.0f, 0.0f}, 100, 10) == 100.0f);
  CHECK(end_of({1000.0f, 300.0f, 0.0f, 0.0f}, 100, 10) == 300.0f);
  CHECK(end_of({0.0f, 0.0f, 250.0f, 2.0f}, 100, 1) == 6.0f);
  for (const int decoding : {1, 131, 132}) {
    CHECK(std::isfinite(end_of({1e12f, 1e9f, 1e8f, 4.0f}, 132, decoding)));
    CHECK(std::isfinite(end_of({1e12f, 0.0f, 1e3f, 4.2f}, 132, decoding)));
    CHECK(std::isfinite(end_of({1e10f, 0.0f, 1e6f, 4.2f}, 132, decoding)));
  }
  CHECK(std::isfinite(end_of({1e-6f, 1e-9f, 1e8f, 1e6f}, 132, 132)));
}

}  // namespace
}  // namespace flashmoe::lengths

int main() {
  flashmoe::lengths::ends_as_simulated();
  flashmoe::lengths::extremes();
}
