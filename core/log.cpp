#include "core/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "core/status.h"

namespace flashmoe {
namespace {

constexpr int32_t kUnread = -1;
constexpr size_t kMaxLine = 2048;

struct Sink {
  std::mutex mutex;
  std::FILE* file = nullptr;  // opened at the first line
  flashmoe_log_callback callback = nullptr;
  void* user = nullptr;
};

// Leaked on purpose: a thread may still log while the process exits.
Sink& sink() {
  static Sink* instance = new Sink;
  return *instance;
}

std::atomic<int32_t> current_level{kUnread};

std::FILE* open_log_file() {
  const char* pattern = std::getenv("FLASHMOE_LOG_FILE");
  if (pattern == nullptr || *pattern == '\0') return stderr;
  if (std::strcmp(pattern, "stdout") == 0) return stdout;
  if (std::strcmp(pattern, "stderr") == 0) return stderr;
  char path[4096];
  const char* mark = std::strstr(pattern, "%i");
  if (mark != nullptr) {
    std::snprintf(path, sizeof path, "%.*s%ld%s", static_cast<int>(mark - pattern), pattern,
                  static_cast<long>(getpid()), mark + 2);
  } else {
    std::snprintf(path, sizeof path, "%s", pattern);
  }
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) {
    std::fprintf(stderr, "flashmoe: FLASHMOE_LOG_FILE: cannot open \"%s\"; logging to stderr\n",
                 path);
    return stderr;
  }
  return file;
}

// The environment is read once, at the first call that could log.
int32_t level_from_environment() {
  static const int32_t level = [] {
    const char* text = std::getenv("FLASHMOE_LOG_LEVEL");
    if (text == nullptr || *text == '\0') return static_cast<int32_t>(FLASHMOE_LOG_OFF);
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < FLASHMOE_LOG_OFF || value > FLASHMOE_LOG_DEBUG) {
      std::fprintf(stderr, "flashmoe: FLASHMOE_LOG_LEVEL: got \"%s\", accepted are 0, 1, 2, 3\n",
                   text);
      return static_cast<int32_t>(FLASHMOE_LOG_OFF);
    }
    return static_cast<int32_t>(value);
  }();
  return level;
}

int32_t level_now() {
  int32_t level = current_level.load(std::memory_order_relaxed);
  if (level == kUnread) {
    int32_t expected = kUnread;
    current_level.compare_exchange_strong(expected, level_from_environment());
    level = current_level.load(std::memory_order_relaxed);
  }
  return level;
}

}  // namespace

bool log_enabled(int32_t level) { return level <= level_now(); }

void make_one_line(char* text) {
  for (; *text != '\0'; ++text) {
    if (static_cast<unsigned char>(*text) < ' ') *text = ' ';
  }
}

void log_line(int32_t level, const char* format, ...) {
  char line[kMaxLine];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  make_one_line(line);
  flashmoe_log_callback callback = nullptr;
  void* user = nullptr;
  {
    Sink& out = sink();
    const std::lock_guard<std::mutex> lock(out.mutex);
    callback = out.callback;
    user = out.user;
    if (callback == nullptr) {
      if (out.file == nullptr) out.file = open_log_file();
      std::fprintf(out.file, "flashmoe: %s\n", line);
      std::fflush(out.file);
    }
  }
  // Outside the lock, so that a callback may itself call the library.
  if (callback != nullptr) callback(level, line, user);
}

}  // namespace flashmoe

flashmoe_status flashmoe_set_log(int32_t level, flashmoe_log_callback callback, void* user) {
  if (level < FLASHMOE_LOG_OFF || level > FLASHMOE_LOG_DEBUG) {
    return flashmoe::fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                          "level: got %d, accepted are 0 (off) to 3 (debug)", level);
  }
  if (callback != nullptr) {
    flashmoe::Sink& out = flashmoe::sink();
    const std::lock_guard<std::mutex> lock(out.mutex);
    out.callback = callback;
    out.user = user;
  }
  flashmoe::current_level.store(level, std::memory_order_relaxed);
  return FLASHMOE_OK;
}
