// One line per call, to a file, a standard stream or a callback. Off by default, and then one
// relaxed atomic load per call.
#pragma once

#include <cstdint>

namespace flashmoe {

bool log_enabled(int32_t level);

// Makes one line of UTF-8 from a sentence that contains a caller's text, such as a kernel's name.
// Blanks control characters, drops a character that was cut in two, and replaces invalid bytes by
// '?'.
void make_readable(char* text);

[[gnu::format(printf, 2, 3)]] void log_line(int32_t level, const char* format, ...);

}  // namespace flashmoe
