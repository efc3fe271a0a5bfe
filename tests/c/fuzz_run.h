// What fuzzes share: the call that they are at, what is said where it is wrong, and the loop over
// calls. Each is a program of one source.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include "flashmoe/flashmoe.h"
#include "fuzz_call.h"

inline uint64_t seed = 0;
inline int64_t call_number = 0;
inline std::string operation;  // of a fuzz of several
inline std::string fault;      // what is wrong with the call, empty if nothing is
inline std::map<std::string, int64_t> blamed;

#define EXPECT(condition)                                                                   \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr,                                                                  \
                   "%s:%d: seed %" PRIu64 ", call %" PRId64                                 \
                   ", %s fault '%s': failed: %s\n"                                          \
                   "  last error: %s\n",                                                    \
                   __FILE__, __LINE__, seed, call_number, operation.c_str(), fault.c_str(), \
                   #condition, flashmoe_last_error());                                      \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

// `one_call(&random)` for each call, by changing numbers of threads. Returns how many.
template <class OneCall>
int64_t run_calls(const char* name, int argc, char** argv, int64_t usual, const OneCall& one_call) {
  const int64_t calls = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : usual;
  seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("%s %" PRId64 " %" PRIu64 "\n", name, calls, seed);
  std::fflush(stdout);
  for (call_number = 0; call_number < calls; ++call_number) {
    Random random(seed * 1000003 + static_cast<uint64_t>(call_number));
    if (random.chance(0.05)) {
      EXPECT(flashmoe_set_num_threads(random.one_of({0, 1, 2, 5})) == FLASHMOE_OK);
    }
    one_call(&random);
  }
  operation.clear();
  fault.clear();
  return calls;
}

inline void print_blamed() {
  std::printf("blamed:");
  for (const auto& [name, count] : blamed) std::printf(" %s %" PRId64 ",", name.c_str(), count);
  std::printf("\n");
}
