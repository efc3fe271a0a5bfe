// How many multiprocessors decoding starts with beside prompts: a pure function of the work of
// both, which tests also run on the host.
//
// Decoding can be cut anywhere, prompts only at the ends of their tiles, which may take long. So
// the total time is a number of rounds of tiles. A number of blocks is good if the other
// multiprocessors have full rounds, and decoding ends in time.
#pragma once

#ifdef __CUDACC__
#define FLASHMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMOE_HOST_DEVICE inline
#endif

namespace flashmoe::lengths {

// Times in microseconds.
struct Loads {
  float decoding;  // on one multiprocessor
  float memory;    // lower bound for decoding, on any number of multiprocessors
  float tiles;     // number of tiles of prompts
  float of_tile;
};

// Approximate end of all work if decoding has `decoding` of the multiprocessors. After decoding has
// ended, these take tiles, too.
FLASHMOE_HOST_DEVICE float end_of(const Loads& loads, int multiprocessors, int decoding) {
  const float own = loads.decoding / static_cast<float>(decoding);
  const float decoded = own > loads.memory ? own : loads.memory;
  if (!(loads.tiles > 0.0f && loads.of_tile > 0.0f)) return decoded;
  const int others = multiprocessors - decoding;
  const float before = decoded / loads.of_tile;  // rounds
  const float busy = loads.tiles + before * static_cast<float>(decoding);
  // Starts with the rounds that suffice if no multiprocessor ever waits, and adds rounds as needed.
  // If there are too many rounds to count one by one, it adds none.
  constexpr float kMostRounds = 1 << 20;
  const float least = busy / static_cast<float>(multiprocessors);
  if (!(least < kMostRounds)) {
    const float all = least * loads.of_tile;
    return all > decoded ? all : decoded;
  }
  float rounds = static_cast<float>(static_cast<int>(least));
  float late = 0.0f;  // rounds of the multiprocessors that decode, after decoding
  for (bool more = true; more;) {
    late = rounds - before;
    late = late > 0.0f ? static_cast<float>(static_cast<int>(late)) : 0.0f;
    more = rounds * static_cast<float>(others) + late * static_cast<float>(decoding) < loads.tiles;
    if (!more) break;
    // The last tile may be on one of those.
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
