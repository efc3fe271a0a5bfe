// One line per call, to a file, a standard stream or a callback. Off by default, and then one
// relaxed atomic load per call.
#pragma once

#include <cstdint>

namespace flashmoe {

bool log_enabled(int32_t level);

// Makes one line of UTF-8 of a sentence that has a caller's text in it, such as a kernel's name:
// blanks control characters, drops a character that was cut in two, and puts '?' for bytes that are
// none.
void make_readable(char* text);

[[gnu::format(printf, 2, 3)]] void log_line(int32_t level, const char* format, ...);

}  // namespace flashmoe
