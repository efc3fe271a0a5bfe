#include "core/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/log.h"
#include "core/per_thread.h"

namespace flashmoe {
namespace {

constexpr size_t kMaxSentence = 1024;

struct LastError {
  char sentence[kMaxSentence];
};

thread_local bool sentence_lost = false;  // the last error's, because memory ran out

void keep(const char (&sentence)[kMaxSentence]) {
  LastError* const last = PerThread<LastError>::get();
  sentence_lost = last == nullptr;
  if (last != nullptr) std::memcpy(last->sentence, sentence, sizeof sentence);
}

}  // namespace

flashmoe_status fail(flashmoe_status status, const char* format, ...) {
  // The arguments may point into the last sentence: format to a copy first.
  char sentence[kMaxSentence];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  make_readable(sentence);
  keep(sentence);
  // A caller may launch without workspace, since most calls need none, and then again with what is
  // needed.
  const bool asks = status == FLASHMOE_ERROR_WORKSPACE_TOO_SMALL;
  const int32_t level = asks ? FLASHMOE_LOG_DEBUG : FLASHMOE_LOG_ERROR;
  if (log_enabled(level)) {
    log_line(level, "%s: %s", flashmoe_status_name(status), sentence);
    keep(sentence);  // a log's callback may call the library and fail
  }
  return status;
}

flashmoe_status Reason::refuse(flashmoe_status status, const char* format, ...) const {
  if (text_ == nullptr) return status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text_, size_, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace flashmoe

const char* flashmoe_last_error(void) {
  using namespace flashmoe;
  if (sentence_lost) return "out of memory for the sentence of this thread's last error";
  const LastError* const last = PerThread<LastError>::existing();
  return last != nullptr ? last->sentence : "";
}

const char* flashmoe_status_name(flashmoe_status status) {
  switch (status) {
    case FLASHMOE_OK: return "FLASHMOE_OK";
    case FLASHMOE_ERROR_INVALID_ARGUMENT: return "FLASHMOE_ERROR_INVALID_ARGUMENT";
    case FLASHMOE_ERROR_UNSUPPORTED: return "FLASHMOE_ERROR_UNSUPPORTED";
    case FLASHMOE_ERROR_ARCH_NOT_BUILT: return "FLASHMOE_ERROR_ARCH_NOT_BUILT";
    case FLASHMOE_ERROR_NO_DEVICE: return "FLASHMOE_ERROR_NO_DEVICE";
    case FLASHMOE_ERROR_WORKSPACE_TOO_SMALL: return "FLASHMOE_ERROR_WORKSPACE_TOO_SMALL";
    case FLASHMOE_ERROR_CUDA: return "FLASHMOE_ERROR_CUDA";
    case FLASHMOE_ERROR_OUT_OF_MEMORY: return "FLASHMOE_ERROR_OUT_OF_MEMORY";
    case FLASHMOE_ERROR_INTERNAL: return "FLASHMOE_ERROR_INTERNAL";
  }
  return "unknown flashmoe_status";
}
