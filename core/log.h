// One line per call, to a file, a standard stream or a callback. Off by default, and then one
// relaxed atomic load per call.
#pragma once

#include <cstdint>

namespace flashmoe {

bool log_enabled(int32_t level);

// Blanks control characters: a caller's text, such as a kernel's name, must not break a line.
void make_one_line(char* text);

[[gnu::format(printf, 2, 3)]] void log_line(int32_t level, const char* format, ...);

}  // namespace flashmoe
