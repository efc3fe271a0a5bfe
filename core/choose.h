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
// problem or its refusal.
template <class Family, class Ask>
class Choice {
 public:
  Choice(const Family* const* families, size_t count, Wanted wanted, const char* prefix,
         flashmoe_device device, Ask ask)
      : families_(families),
        count_(count),
        wanted_(wanted),
        prefix_(prefix),
        device_(device),
        ask_(ask) {}

  // The first family that serves the problem, or the one that is wanted; without a word, unless
  // there is none: nobody reads why a family comes second.
  flashmoe_status choose(const Family** chosen) {
    for (size_t i = 0; i < count_; ++i) {
      const Family* family = families_[i];
      if (!may_serve(*family)) continue;
      const flashmoe_status status = ask(*family, Reason());
      if (status == FLASHMOE_OK) return *chosen = family, FLASHMOE_OK;
      if (status == FLASHMOE_ERROR_CUDA) break;
    }
    char rejected[kRejectedBytes];
    return choose_and_explain(chosen, rejected);
  }

  // The same choice. Also says in `rejected` why the others do not serve it, which takes longer than
  // a launch may.
  flashmoe_status choose_and_explain(const Family** chosen, char (&rejected)[kRejectedBytes]) {
    *chosen = nullptr;
    bool known = wanted_.name == nullptr;
    flashmoe_status error = FLASHMOE_OK;  // of the last family for these tensors' device, if any
    char reason[384];
    char error_reason[448] = "";
    rejected[0] = '\0';
    for (size_t i = 0; i < count_; ++i) {
      const Family* family = families_[i];
      if (*chosen != nullptr) {
        std::snprintf(reason, sizeof reason, "%s comes first", (*chosen)->name);
        append_rejection(rejected, family->name, reason);
        continue;
      }
      if (!may_serve(*family)) {
        std::snprintf(reason, sizeof reason, "%s asks for %s", wanted_.by, wanted_.name);
        append_rejection(rejected, family->name, reason);
        continue;
      }
      known = true;
      const flashmoe_status status = ask(*family, Reason(reason));
      if (status == FLASHMOE_OK) {
        *chosen = family;
        continue;
      }
      // Another family's bits would depend on what went wrong here.
      if (status == FLASHMOE_ERROR_CUDA) return fail(status, "%s: %s", family->name, reason);
      // The last of a device's families is the least particular: what it cannot serve, none can.
      if (error == FLASHMOE_OK || family->device_type == device_.device_type) {
        error = status;
        std::snprintf(error_reason, sizeof error_reason, "%s: %s", family->name, reason);
      }
      append_rejection(rejected, family->name, reason);
    }
    if (!known) return fail_unknown();
    if (*chosen != nullptr) return FLASHMOE_OK;
    if (wanted_.name == nullptr) return fail(error, "%s", error_reason);
    return fail(error, "%s: cannot be served: %s", wanted_.by, error_reason);
  }

 private:
  bool may_serve(const Family& family) const {
    return wanted_.name == nullptr || names_family(wanted_.name, family.name, prefix_);
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
};

}  // namespace flashmoe
