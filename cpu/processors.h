// How many threads pay off: the processors that the process may run on, limited by the quotas of
// its control groups.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sched.h>
#endif

namespace flashmoe::cpu {

int32_t count_processors();

#ifdef __linux__

// Where threads of the process may run, whatever the calling one is bound to. Takes two system
// calls. If OpenMP binds threads, the first call also asks its runtime for its places, which may
// start the runtime.
cpu_set_t processors_of_process();

// Parts of the above. They read a system's files under `root` ("" for this one) and take values of
// environment variables (nullptr: not set).

// Whether OpenMP binds threads, including the initial one: each thread then shows only one place.
bool openmp_binds(const char* proc_bind, const char* places);

inline constexpr int32_t kNoQuota = INT32_MAX;

// Processors' worth of time, rounded up, under the tightest quota of the process's control groups
// and all enclosing groups; kNoQuota without a quota.
int32_t cgroup_quota(const char* root);

// The processors of the innermost control group that lists any; false if none does.
bool cgroup_processors(const char* root, cpu_set_t* processors);

#endif

}  // namespace flashmoe::cpu
