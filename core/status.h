// Status and the thread's sentence behind flashmoe_last_error().
#pragma once

#include <cstddef>

#include "flashmoe/flashmoe.h"

#define FLASHMOE_TRY(expression)                      \
  do {                                                \
    const flashmoe_status try_status = (expression);  \
    if (try_status != FLASHMOE_OK) return try_status; \
  } while (false)

namespace flashmoe {

// Records the sentence (printf format), logs it, and returns `status`, so that a failing check is
// one line: `return fail(FLASHMOE_ERROR_..., "q: ...")`. If there is no memory for the sentence at
// a thread's first failure, flashmoe_last_error() says so.
[[gnu::format(printf, 2, 3)]] flashmoe_status fail(flashmoe_status status, const char* format, ...);

// Takes the sentence that says why something cannot be done. Formats nothing if nobody will read
// it.
class Reason {
 public:
  Reason() = default;  // not read

  template <size_t kSize>
  explicit Reason(char (&text)[kSize]) : text_(text), size_(kSize) {}

  // Writes the sentence (printf format), truncated to fit, and returns `status`.
  [[gnu::format(printf, 3, 4)]] flashmoe_status refuse(flashmoe_status status, const char* format,
                                                       ...) const;

 private:
  char* text_ = nullptr;
  size_t size_ = 0;
};

}  // namespace flashmoe
