// How many threads are worth while: the processors that the process may run on, as far as the
// quotas of its control groups give it time on them.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sched.h>
#endif

namespace flashmoe::cpu {

int32_t count_processors();

#ifdef __linux__

// Where threads of the process may run, whatever the calling one is bound to. Two system calls, but
// for the first time, which where OpenMP binds asks its runtime for its places: one that has not
// begun may begin then.
cpu_set_t processors_of_process();

// Parts of the above, which read the files of a system under `root`, "" for this one, and values of
// environment variables, nullptr for those that are not set.

// Whether OpenMP binds threads, and so the one that it found: each then tells of one place alone.
bool openmp_binds(const char* proc_bind, const char* places);

inline constexpr int32_t kNoQuota = INT32_MAX;

// Processors' worth of time, rounded up, that the tightest quota of the process's control groups
// and of all that they lie in gives it; kNoQuota without one.
int32_t cgroup_quota(const char* root);

// The processors of the innermost control group that says any; false if none does.
bool cgroup_processors(const char* root, cpu_set_t* processors);

#endif

}  // namespace flashmoe::cpu
