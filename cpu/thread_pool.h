// The CPU backend's threads. They start at the first parallel call, sleep between calls, and are
// never on the GPU path.
#pragma once

#include <cstdint>

namespace flashmoe::cpu {

int32_t num_threads();
int32_t set_num_threads(int32_t n);  // n = 0: default; returns the number in use

// Calls body(context, worker) on the calling thread with worker 0 and, at the same time, on up to
// `threads` - 1 others with distinct workers below `threads`; returns when all have returned. The
// body must divide its work itself: helpers that come late or not at all (busy with another caller)
// change only the time it takes. Any number of threads may call at once. On Linux, helpers run
// where the last caller that found none at work may run, except on its processor.
void parallel_run(int32_t threads, void (*body)(void* context, int32_t worker), void* context);

}  // namespace flashmoe::cpu
