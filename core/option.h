// The options of an operation, each declared once: name, type, range and default. The list gives
// the check of the range and the option's part of the log line.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "core/status.h"

namespace flashmoe {

// One option: a field of an operation's Params.
template <class Params>
struct Option {
  enum Kind {
    kChoice,    // int32_t: 0 to count - 1, each with a word
    kFlag,      // int32_t: 0 or 1
    kPositive,  // float: finite and positive, or 0 for a default
    kFinite,    // float
    kReserved,  // uint32_t: 0
    kBytes,     // uint64_t
  };

  const char* name;
  Kind kind;
  int32_t Params::* integer;
  float Params::* number;
  uint32_t Params::* bits;
  const char* const* words;  // for a choice
  int32_t count;
  const char* zero;  // for a positive number: what 0 means
  uint64_t Params::* bytes = nullptr;

  template <size_t kCount>
  static constexpr Option choice(const char* name, int32_t Params::* field,
                                 const char* const (&words)[kCount]) {
    return {name, kChoice, field, nullptr, nullptr, words, static_cast<int32_t>(kCount), nullptr};
  }
  static constexpr Option flag(const char* name, int32_t Params::* field) {
    return {name, kFlag, field, nullptr, nullptr, nullptr, 0, nullptr};
  }
  static constexpr Option positive(const char* name, float Params::* field, const char* zero) {
    return {name, kPositive, nullptr, field, nullptr, nullptr, 0, zero};
  }
  static constexpr Option finite(const char* name, float Params::* field) {
    return {name, kFinite, nullptr, field, nullptr, nullptr, 0, nullptr};
  }
  static constexpr Option reserved(const char* name, uint32_t Params::* field) {
    return {name, kReserved, nullptr, nullptr, field, nullptr, 0, nullptr};
  }
  static constexpr Option size(const char* name, uint64_t Params::* field) {
    return {name, kBytes, nullptr, nullptr, nullptr, nullptr, 0, nullptr, field};
  }

  flashmoe_status check(const Params& params) const {
    switch (kind) {
      case kChoice: {
        const int32_t got = params.*integer;
        if (got >= 0 && got < count) return FLASHMOE_OK;
        char accepted[160] = "";
        size_t used = 0;
        for (int32_t i = 0; i < count && used < sizeof accepted; ++i) {
          used += static_cast<size_t>(std::snprintf(accepted + used, sizeof accepted - used,
                                                    "%s%d (%s)",
                                                    i == 0           ? ""
                                                    : i + 1 == count ? " and "
                                                                     : ", ",
                                                    i, words[i]));
        }
        return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %d, accepted are %s", name, got,
                    accepted);
      }
      case kFlag:
        if (params.*integer == 0 || params.*integer == 1) return FLASHMOE_OK;
        return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %d, accepted are 0 and 1", name,
                    params.*integer);
      case kPositive: {
        const float got = params.*number;
        if (got >= 0.0f && std::isfinite(got)) return FLASHMOE_OK;
        return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                    "%s: got %g, accepted is a finite positive number, or 0 for %s", name,
                    static_cast<double>(got), zero);
      }
      case kFinite:
        if (std::isfinite(params.*number)) return FLASHMOE_OK;
        return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %g, accepted is a finite number",
                    name, static_cast<double>(params.*number));
      case kReserved:
        if (params.*bits == 0) return FLASHMOE_OK;
        return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %u, accepted is 0", name,
                    params.*bits);
      case kBytes: break;
    }
    return FLASHMOE_OK;
  }

  // " name=value"; reserved fields print nothing.
  int print(const Params& params, char* text, size_t size) const {
    switch (kind) {
      case kChoice: return std::snprintf(text, size, " %s=%s", name, words[params.*integer]);
      case kFlag: return std::snprintf(text, size, " %s=%d", name, params.*integer);
      case kPositive:
      case kFinite:
        return std::snprintf(text, size, " %s=%g", name, static_cast<double>(params.*number));
      case kBytes:
        return std::snprintf(text, size, " %s=%llu", name,
                             static_cast<unsigned long long>(params.*bytes));
      case kReserved: break;
    }
    return 0;
  }
};

template <class Params, size_t kCount>
flashmoe_status check_options(const Option<Params> (&options)[kCount], const Params& params) {
  for (const Option<Params>& option : options) FLASHMOE_TRY(option.check(params));
  return FLASHMOE_OK;
}

template <class Params, size_t kCount>
void print_options(const Option<Params> (&options)[kCount], const Params& params, char* text,
                   size_t size) {
  text[0] = '\0';
  size_t used = 0;
  for (const Option<Params>& option : options) {
    if (used < size) used += static_cast<size_t>(option.print(params, text + used, size - used));
  }
}

}  // namespace flashmoe
