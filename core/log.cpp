#include "core/log.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "core/status.h"

namespace flashmoe {
namespace {

constexpr int32_t kUnread = -1;
constexpr size_t kMaxLine = 2048;

struct Sink {
  std::mutex mutex;
  std::FILE* file = nullptr;  // opened at the first line
  pid_t process = 0;          // the id in the file's name; 0: the name has none
  flashmoe_log_callback callback = nullptr;
  void* user = nullptr;
};
// A thread may still log while the process exits.
static_assert(std::is_trivially_destructible_v<Sink>);

Sink sink;

// A child forked while another thread logs would find the mutex locked for ever, and half a line in
// the file's buffer. The handlers are registered when the library loads, since a fork may come
// while the first line is written.
[[maybe_unused]] const int kForkHandlers = pthread_atfork(
    [] { sink.mutex.lock(); }, [] { sink.mutex.unlock(); }, [] { sink.mutex.unlock(); });

std::atomic<int32_t> current_level{kUnread};

// Sets *process to the id in the file's name, if any.
std::FILE* open_log_file(pid_t* process) {
  const char* pattern = std::getenv("FLASHMOE_LOG_FILE");
  if (pattern == nullptr || *pattern == '\0') return stderr;
  if (std::strcmp(pattern, "stdout") == 0) return stdout;
  if (std::strcmp(pattern, "stderr") == 0) return stderr;
  char path[4096] = "";
  const pid_t id = getpid();
  bool named = false;
  size_t used = 0;
  for (const char* at = pattern; *at != '\0' && used < sizeof path;) {
    const bool mark = at[0] == '%' && at[1] == 'i';
    const int written =
        mark ? std::snprintf(path + used, sizeof path - used, "%ld", static_cast<long>(id))
             : std::snprintf(path + used, sizeof path - used, "%c", *at);
    used += static_cast<size_t>(written);
    at += mark ? 2 : 1;
    named = named || mark;
  }
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) {
    std::fprintf(stderr, "flashmoe: FLASHMOE_LOG_FILE: cannot open \"%s\"; logging to stderr\n",
                 path);
    return stderr;
  }
  if (named) *process = id;
  return file;
}

// The caller holds the sink's lock. A forked child may log to another file than its parent.
std::FILE* file_of_this_process() {
  if (sink.process != 0 && sink.process != getpid()) {
    std::fclose(sink.file);
    sink.file = nullptr;
    sink.process = 0;
  }
  if (sink.file == nullptr) sink.file = open_log_file(&sink.process);
  return sink.file;
}

// Reads the environment at the first call that could log. If several threads come here together,
// one of them reports what is wrong with it.
int32_t read_level() {
  const char* text = std::getenv("FLASHMOE_LOG_LEVEL");
  int32_t level = FLASHMOE_LOG_OFF;
  bool wrong = false;
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    wrong = *end != '\0' || value < FLASHMOE_LOG_OFF || value > FLASHMOE_LOG_DEBUG;
    if (!wrong) level = static_cast<int32_t>(value);
  }
  int32_t before = kUnread;
  if (!current_level.compare_exchange_strong(before, level)) return before;
  if (wrong) {
    std::fprintf(stderr, "flashmoe: FLASHMOE_LOG_LEVEL: got \"%s\", accepted are 0, 1, 2, 3\n",
                 text);
  }
  return level;
}

int32_t level_now() {
  const int32_t level = current_level.load(std::memory_order_relaxed);
  return level != kUnread ? level : read_level();
}

// A UTF-8 character: its number of bytes (0 if invalid), and whether all of them are present.
struct Character {
  size_t bytes;
  bool whole;
};

// `text` is not empty.
Character first_character(const unsigned char* text) {
  const unsigned char lead = text[0];
  if (lead < 0x80) return {1, true};
  if (lead < 0xc2 || lead > 0xf4) return {0, false};
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and code points beyond Unicode.
  unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (size_t i = 1; i < length; ++i) {
    if (text[i] < low || text[i] > high) return {i, false};
    low = 0x80;
    high = 0xbf;
  }
  return {length, true};
}

}  // namespace

bool log_enabled(int32_t level) { return level <= level_now(); }

void make_readable(char* text) {
  char* to = text;
  while (*text != '\0') {
    const Character character = first_character(reinterpret_cast<const unsigned char*>(text));
    if (character.whole && static_cast<unsigned char>(*text) < ' ') {
      *to++ = ' ';
    } else if (character.whole) {
      std::memmove(to, text, character.bytes);
      to += character.bytes;
    } else if (character.bytes == 0) {
      *to++ = '?';
    }
    text += std::max<size_t>(character.bytes, 1);
  }
  *to = '\0';
}

void log_line(int32_t level, const char* format, ...) {
  // A callback may call the library, whose lines would call it again without end.
  thread_local bool in_callback = false;
  if (in_callback) return;
  char line[kMaxLine];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  make_readable(line);
  flashmoe_log_callback callback = nullptr;
  void* user = nullptr;
  {
    const std::lock_guard<std::mutex> lock(sink.mutex);
    callback = sink.callback;
    user = sink.user;
    if (callback == nullptr) {
      std::FILE* file = file_of_this_process();
      std::fprintf(file, "flashmoe: %s\n", line);
      std::fflush(file);
    }
  }
  // Called outside the lock, so that a callback may call the library.
  if (callback == nullptr) return;
  // Also if the callback throws, as one in C++ may.
  struct Inside {
    bool& inside;
    explicit Inside(bool& flag) : inside(flag) { inside = true; }
    ~Inside() { inside = false; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };
  const Inside inside(in_callback);
  callback(level, line, user);
}

}  // namespace flashmoe

flashmoe_status flashmoe_set_log(int32_t level, flashmoe_log_callback callback, void* user) {
  if (level < FLASHMOE_LOG_OFF || level > FLASHMOE_LOG_DEBUG) {
    return flashmoe::fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                          "level: got %d, accepted are 0 (off) to 3 (debug)", level);
  }
  if (callback != nullptr) {
    const std::lock_guard<std::mutex> lock(flashmoe::sink.mutex);
    flashmoe::sink.callback = callback;
    flashmoe::sink.user = user;
  }
  flashmoe::current_level.store(level, std::memory_order_relaxed);
  return FLASHMOE_OK;
}
