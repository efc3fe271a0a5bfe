// Which kernel family computes a problem: the same for every operation.
//
// A family has a `name` and the `device_type` it computes on. Those of an operation are asked in
// order of preference.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr size_t kMostFamilies = 16;  // of one operation
inline constexpr size_t kRejectedBytes = 512;
static_assert(sizeof flashmoe_attention_plan::rejected == kRejectedBytes);
static_assert(sizeof flashmoe_moe_plan::rejected == kRejectedBytes);

// The family, or the kernel, that a call must be served by.
struct Wanted {
  const char* name;  // nullptr: any
  const char* by;    // what asks for it: "kernel" or "FLASHMOE_ARCH"
};

// Whether `wanted` is a family's name or, with a prefix, the full name of a kernel of it: the
// prefix, the family's name, and what follows an underscore.
bool names_family(const char* wanted, const char* family, const char* prefix);

// Whether any operation of this build has a family of that name.
bool is_family_name(const char* name);

// FLASHMOE_ARCH names the GPU family that serves calls which name none; read once. nullptr: unset.
const char* family_from_environment();

// A family that computes elsewhere than on `device` refuses.
flashmoe_status check_family_device(int32_t device_type, flashmoe_device device,
                                    const Reason& reason);

// One line of a plan's `rejected`.
void append_rejection(char (&rejected)[kRejectedBytes], const char* family, const char* reason);

// What a call that gave `kernel` (may be nullptr or "") wants. An operation leaves the environment's
// wish aside if it has no such family and another operation has.
template <class Family>
Wanted wanted_of(const Family* const* families, size_t count, const char* kernel,
                 flashmoe_device device) {
  if (kernel != nullptr && *kernel != '\0') return {kernel, "kernel"};
  const char* name =
      device.device_type == FLASHMOE_DEVICE_CUDA ? family_from_environment() : nullptr;
  if (name == nullptr) return {nullptr, nullptr};
  bool known_here = false;
  for (size_t i = 0; i < count; ++i) {
    known_here = known_here || std::strcmp(name, families[i]->name) == 0;
  }
  if (!known_here && is_family_name(name)) return {nullptr, nullptr};
  return {name, "FLASHMOE_ARCH"};
}

// One choice among the families of an operation. `ask(family, reason)` is a family's plan for the
// problem or its refusal; `yields(family)` why it is asked behind those that do not yield, or nullptr.
template <class Family, class Ask, class Yields>
class Choice {
 public:
  Choice(const Family* const* families, size_t count, Wanted wanted, const char* prefix,
         flashmoe_device device, Ask ask, Yields yields)
      : families_(families),
        count_(count < kMostFamilies ? count : kMostFamilies),
        wanted_(wanted),
        prefix_(prefix),
        device_(device),
        ask_(ask),
        yields_(yields) {}

  // The first family that serves the problem, or the one that is wanted; without a word, unless
  // there is none: nobody reads why a family comes second.
  flashmoe_status choose(const Family** chosen) {
    const Family* yielding[kMostFamilies];
    size_t yielding_count = 0;
    flashmoe_status status = FLASHMOE_ERROR_UNSUPPORTED;
    for (size_t i = 0; i < count_ && status != FLASHMOE_ERROR_CUDA; ++i) {
      const Family* family = families_[i];
      if (!may_serve(*family)) continue;
      if (why_yields(*family) != nullptr) {
        yielding[yielding_count++] = family;
        continue;
      }
      status = ask(*family, Reason());
      if (status == FLASHMOE_OK) return *chosen = family, FLASHMOE_OK;
    }
    for (size_t i = 0; i < yielding_count && status != FLASHMOE_ERROR_CUDA; ++i) {
      status = ask(*yielding[i], Reason());
      if (status == FLASHMOE_OK) return *chosen = yielding[i], FLASHMOE_OK;
    }
    char rejected[kRejectedBytes];
    return choose_and_explain(chosen, rejected);
  }

  // The same choice. Also says in `rejected` why the others do not serve it, which takes longer than
  // a launch may.
  flashmoe_status choose_and_explain(const Family** chosen, char (&rejected)[kRejectedBytes]) {
    *chosen = nullptr;
    bool known = wanted_.name == nullptr;
    Failure failure;
    char reasons[kMostFamilies][384];
    const char* yield[kMostFamilies] = {};
    for (size_t i = 0; i < count_; ++i) {
      const Family* family = families_[i];
      if (*chosen != nullptr) {
        std::snprintf(reasons[i], sizeof reasons[i], "%s comes first", (*chosen)->name);
        continue;
      }
      if (!may_serve(*family)) {
        std::snprintf(reasons[i], sizeof reasons[i], "%s asks for %s", wanted_.by, wanted_.name);
        continue;
      }
      known = true;
      yield[i] = why_yields(*family);
      if (yield[i] != nullptr) continue;
      const flashmoe_status status = ask(*family, Reason(reasons[i]));
      if (status == FLASHMOE_ERROR_CUDA) return failure.end(*family, status, reasons[i]);
      if (status == FLASHMOE_OK) {
        *chosen = family;
      } else if (failure.status == FLASHMOE_OK || family->device_type == device_.device_type) {
        // The last of a device's families is the least particular: what it cannot serve, none can.
        failure.set(*family, status, reasons[i]);
      }
    }
    for (size_t i = 0; i < count_; ++i) {
      if (yield[i] == nullptr) continue;
      const Family* family = families_[i];
      if (*chosen != nullptr) {
        std::snprintf(reasons[i], sizeof reasons[i], "%s", yield[i]);
        continue;
      }
      const flashmoe_status status = ask(*family, Reason(reasons[i]));
      if (status == FLASHMOE_ERROR_CUDA) return failure.end(*family, status, reasons[i]);
      if (status == FLASHMOE_OK) {
        *chosen = family;
      } else if (failure.status == FLASHMOE_OK) {
        failure.set(*family, status, reasons[i]);
      }
    }
    rejected[0] = '\0';
    for (size_t i = 0; i < count_; ++i) {
      if (families_[i] != *chosen) append_rejection(rejected, families_[i]->name, reasons[i]);
    }
    if (!known) return fail_unknown();
    if (*chosen != nullptr) return FLASHMOE_OK;
    if (wanted_.name == nullptr) return fail(failure.status, "%s", failure.sentence);
    return fail(failure.status, "%s: cannot be served: %s", wanted_.by, failure.sentence);
  }

 private:
  // What to say where no family serves the problem.
  struct Failure {
    flashmoe_status status = FLASHMOE_OK;
    char sentence[448] = "";

    void set(const Family& family, flashmoe_status why, const char* reason) {
      status = Reason(sentence).refuse(why, "%s: %s", family.name, reason);
    }
    // Another family's bits would depend on what went wrong in this one.
    flashmoe_status end(const Family& family, flashmoe_status why, const char* reason) {
      set(family, why, reason);
      return fail(status, "%s", sentence);
    }
  };

  bool may_serve(const Family& family) const {
    return wanted_.name == nullptr || names_family(wanted_.name, family.name, prefix_);
  }

  const char* why_yields(const Family& family) const {
    if (wanted_.name != nullptr || family.device_type != device_.device_type) return nullptr;
    return yields_(family);
  }

  flashmoe_status ask(const Family& family, const Reason& reason) {
    FLASHMOE_TRY(check_family_device(family.device_type, device_, reason));
    return ask_(family, reason);
  }

  flashmoe_status fail_unknown() const {
    char names[128] = "";
    for (size_t i = 0; i < count_; ++i) {
      const size_t length = std::strlen(names);
      std::snprintf(names + length, sizeof names - length, "%s%s", length == 0 ? "" : ", ",
                    families_[i]->name);
    }
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got \"%.64s\", built in are %s", wanted_.by,
                wanted_.name, names);
  }

  const Family* const* families_;
  size_t count_;
  Wanted wanted_;
  const char* prefix_;  // of kernels' full names; nullptr: only families can be named
  flashmoe_device device_;
  Ask ask_;
  Yields yields_;
};

}  // namespace flashmoe
