// How many multiprocessors decoding has to begin with beside prompts: a pure function of what there
// is to do of both, which the host works out in tests.
//
// Decoding can be cut anywhere, prompts at the ends of their tiles, which may take long: so all
// ends in rounds of tiles. A number of blocks is good if what they leave is rounds that are full,
// and decoding ends in time.
#pragma once

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe::lengths {

// Times in microseconds.
struct Loads {
  float decoding;  // by one multiprocessor
  float memory;    // of decoding: not less, by however many
  float tiles;     // of prompts
  float of_tile;
};

// When all has ended if decoding has so many of the multiprocessors, about. Where it has ended,
// these take tiles, too.
FLASHMOE_HOST_DEVICE float end_of(const Loads& loads, int multiprocessors, int decoding) {
  const float own = loads.decoding / static_cast<float>(decoding);
  const float decoded = own > loads.memory ? own : loads.memory;
  if (!(loads.tiles > 0.0f && loads.of_tile > 0.0f)) return decoded;
  const int others = multiprocessors - decoding;
  const float before = decoded / loads.of_tile;  // rounds
  const float busy = loads.tiles + before * static_cast<float>(decoding);
  // As many rounds as there are if no multiprocessor ever waits, and then as many more as it takes:
  // where they are beyond counting one by one, none.
  constexpr float kMostRounds = 1 << 20;
  const float least = busy / static_cast<float>(multiprocessors);
  if (!(least < kMostRounds)) {
    const float all = least * loads.of_tile;
    return all > decoded ? all : decoded;
  }
  float rounds = static_cast<float>(static_cast<int>(least));
  float late = 0.0f;  // of those that decode: rounds behind it
  for (bool more = true; more;) {
    late = rounds - before;
    late = late > 0.0f ? static_cast<float>(static_cast<int>(late)) : 0.0f;
    more = rounds * static_cast<float>(others) + late * static_cast<float>(decoding) < loads.tiles;
    if (!more) break;
    // The last of all may be one of those.
    const float behind = before + late + 1.0f;
    const float of_others = static_cast<float>(static_cast<int>(behind));
    if (behind < rounds + 1.0f &&
        of_others * static_cast<float>(others) + (late + 1.0f) * static_cast<float>(decoding) >=
            loads.tiles) {
      return behind * loads.of_tile;
    }
    rounds += 1.0f;
  }
  const float prompts = rounds * loads.of_tile;
  return prompts > decoded ? prompts : decoded;
}

}  // namespace flashmoe::lengths

#undef FLASHMOE_HOST_DEVICE
