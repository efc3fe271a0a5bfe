// Status and the thread-local sentence behind flashmoe_last_error().
#pragma once

#include "flashmoe/flashmoe.h"

namespace flashmoe {

// Records the sentence (printf format), logs it, and returns `status`, so that a failing check is
// one line: `return fail(FLASHMOE_ERROR_..., "q: ...")`. Never allocates.
[[gnu::format(printf, 2, 3)]] flashmoe_status fail(flashmoe_status status, const char* format, ...);

}  // namespace flashmoe
