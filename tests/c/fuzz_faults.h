// Faults to put into a valid call. Some leave it valid: the oracle decides, not the name.
#pragma once

#include "fuzz_call.h"

// Puts a random fault into the call and returns its name.
const char* put_fault(Random* random, Call* call);
