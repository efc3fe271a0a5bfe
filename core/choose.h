// Chooses the kernel family of a problem: the one whose plan takes the least time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/dtype.h"
#include "core/plan.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

inline constexpr size_t kMostFamilies = 16;  // of one operation
inline constexpr size_t kRejectedBytes = 512;
static_assert(sizeof flashmoe_plan::rejected == kRejectedBytes);

// The family or kernel that must serve a call.
struct Wanted {
  const char* name;  // nullptr: any
  const char* by;    // what asks for it: "kernel" or "FLASHMOE_ARCH"
};

// Copies the caller's `kernel`, which may be nullptr. A name that does not fit is no kernel's,
// truncated or not.
void copy_kernel_name(const char* kernel, KernelName* name);

// Whether `wanted` is a family's name or, with a prefix, a full kernel name of that family: the
// prefix, the family's name, an underscore and a rest.
bool names_family(const char* wanted, const char* family, const char* prefix);

// Calls visit(word, its length) for each of `words`, which spaces separate.
template <class Visit>
void for_each_word(const char* words, const Visit& visit) {
  for (const char* word = words; *word != '\0';) {
    const size_t length = std::strcspn(word, " ");
    visit(word, length);
    word += length;
    word += std::strspn(word, " ");
  }
}

// Whether a name is one of such words.
bool is_word(const char* name, const char* words);

// Whether any operation of this build has a family of that name.
bool is_family_name(const char* name);

// FLASHMOE_ARCH names the GPU family for calls that name none; read once. nullptr: unset.
const char* family_from_environment();

// Refuses a family that does not compute on `device`.
flashmoe_status check_family_device(int32_t device_type, flashmoe_device device,
                                    const Reason& reason);

// One line of a plan's `rejected`.
void append_rejection(char (&rejected)[kRejectedBytes], const char* family, const char* reason);

// What a call with this `kernel` (may be "") wants. An operation ignores the environment's family
// if only other operations have it.
template <class Problem, size_t kCount>
Wanted wanted_of(const Family<Problem>* const (&families)[kCount], const char* kernel,
                 flashmoe_device device) {
  if (*kernel != '\0') return {kernel, "kernel"};
  const char* name =
      device.device_type == FLASHMOE_DEVICE_CUDA ? family_from_environment() : nullptr;
  if (name == nullptr) return {nullptr, nullptr};
  bool known_here = false;
  for (const Family<Problem>* family : families) {
    known_here = known_here || std::strcmp(name, family->name) == 0;
  }
  if (!known_here && is_family_name(name)) return {nullptr, nullptr};
  return {name, "FLASHMOE_ARCH"};
}

// The plans of one problem, one per family of its operation.
template <class Problem>
class Choice {
 public:
  // `prefix` of kernels' full names; nullptr: only families can be named.
  template <size_t kCount>
  Choice(const Family<Problem>* const (&families)[kCount], const char* prefix, const Wanted& wanted,
         const Problem& problem)
      : families_(families), count_(kCount), prefix_(prefix), wanted_(wanted), problem_(problem) {
    static_assert(kCount <= kMostFamilies);
  }

  // Finds the family that takes the least time, and its plan; the first wins ties. Writes no
  // reasons unless no family serves: nobody reads why a family comes second.
  flashmoe_status choose(const Family<Problem>** chosen, Plan* plan) {
    *chosen = nullptr;
    blamed_ = nullptr;
    Plan candidate;
    for (size_t i = 0; i < count_; ++i) {
      if (!may_serve(*families_[i])) continue;
      // Families are planned in place until one serves; later ones go to `candidate`.
      Plan* const into = *chosen == nullptr ? plan : &candidate;
      const flashmoe_status status = ask(*families_[i], into, Reason());
      if (status != FLASHMOE_OK) {
        blame(*families_[i], status);
        if (status == FLASHMOE_ERROR_CUDA) return explain_failure();
        continue;
      }
      if (*chosen != nullptr && candidate.info.microseconds >= plan->info.microseconds) continue;
      if (*chosen != nullptr) *plan = candidate;
      *chosen = families_[i];
    }
    return *chosen != nullptr ? FLASHMOE_OK : explain_failure();
  }

  // Makes the same choice and writes to plan->info.rejected why not another. This takes too long
  // for a launch.
  flashmoe_status choose_and_explain(const Family<Problem>** chosen, Plan* plan) {
    FLASHMOE_TRY(choose(chosen, plan));
    char (&rejected)[kRejectedBytes] = plan->info.rejected;
    for (size_t i = 0; i < count_; ++i) {
      const Family<Problem>& family = *families_[i];
      if (&family == *chosen) continue;
      char reason[384];
      Plan other;
      if (!may_serve(family)) {
        std::snprintf(reason, sizeof reason, "%s asks for %s", wanted_.by, wanted_.name);
      } else if (ask(family, &other, Reason(reason)) == FLASHMOE_OK) {
        std::snprintf(reason, sizeof reason, "takes %.1f us by its estimate, %s %.1f us",
                      other.info.microseconds, (*chosen)->name, plan->info.microseconds);
      }
      append_rejection(rejected, family.name, reason);
    }
    return FLASHMOE_OK;
  }

 private:
  bool may_serve(const Family<Problem>& family) const {
    if (wanted_.name == nullptr || (calls_own_word() && is_word(wanted_.name, family.schedules))) {
      return true;
    }
    if (!names_family(wanted_.name, family.name, prefix_)) return false;
    // If family names share a prefix, the kernel belongs to the longest matching name.
    return std::none_of(families_, families_ + count_, [&](const Family<Problem>* other) {
      return std::strlen(other->name) > std::strlen(family.name) &&
             names_family(wanted_.name, other->name, prefix_);
    });
  }

  // Whether the call itself gave the name: families see no other.
  bool calls_own_word() const { return std::strcmp(problem_.kernel, wanted_.name) == 0; }

  flashmoe_status ask(const Family<Problem>& family, Plan* plan, const Reason& reason) const {
    std::memset(static_cast<void*>(plan), 0, sizeof *plan);
    FLASHMOE_TRY(check_family_device(family.device_type, problem_.device, reason));
    FLASHMOE_TRY(family.plan(problem_, plan, reason));
    const bool full_name = prefix_ != nullptr && wanted_.name != nullptr &&
                           std::strncmp(wanted_.name, prefix_, std::strlen(prefix_)) == 0;
    if (!full_name) return FLASHMOE_OK;
    const char* const kernel = main_kernel(plan->info, family.name);
    if (std::strcmp(wanted_.name, kernel) == 0) return FLASHMOE_OK;
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s serves this call, not %.64s", kernel,
                         wanted_.name);
  }

  // The one kernel of a plan that a call can name. The others prepare for it or combine its
  // results.
  const char* main_kernel(const flashmoe_plan& plan, const char* family) const {
    for (int32_t i = 0; i < plan.launch_count; ++i) {
      if (names_family(plan.launches[i].kernel, family, prefix_)) return plan.launches[i].kernel;
    }
    return plan.launches[0].kernel;
  }

  // Picks the family that explains why none serves the problem: the last one of the device, which
  // is the most general. A failure (not a refusal) of one family must not be hidden by another,
  // whose bits would differ.
  void blame(const Family<Problem>& family, flashmoe_status status) {
    if (status == FLASHMOE_ERROR_CUDA || blamed_ == nullptr ||
        family.device_type == problem_.device.device_type) {
      blamed_ = &family;
      why_ = status;
    }
  }

  // Says why no family serves the problem. A failure may not happen again when it is asked for its
  // reason.
  flashmoe_status explain_failure() const {
    if (blamed_ == nullptr) return fail_unknown();
    Plan plan;
    char reason[384];
    const flashmoe_status again = ask(*blamed_, &plan, Reason(reason));
    const char* const words = again != FLASHMOE_OK ? reason : "it failed, and not when asked why";
    const flashmoe_status status = again != FLASHMOE_OK ? again : why_;
    if (wanted_.name == nullptr) return fail(status, "%s: %s", blamed_->name, words);
    return fail(status, "%s: cannot be served: %s: %s", wanted_.by, blamed_->name, words);
  }

  flashmoe_status fail_unknown() const {
    char names[192] = "";
    const auto add = [&](const char* name, size_t name_length) {
      const size_t length = std::strlen(names);
      std::snprintf(names + length, sizeof names - length, "%s%.*s", length == 0 ? "" : ", ",
                    static_cast<int>(name_length), name);
    };
    for (size_t i = 0; i < count_; ++i) {
      add(families_[i]->name, std::strlen(families_[i]->name));
      if (calls_own_word()) for_each_word(families_[i]->schedules, add);
    }
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got \"%.64s\", built in are %s", wanted_.by,
                wanted_.name, names);
  }

  const Family<Problem>* const* families_;
  size_t count_;
  const char* prefix_;
  Wanted wanted_;
  const Problem& problem_;
  const Family<Problem>* blamed_ = nullptr;
  flashmoe_status why_ = FLASHMOE_OK;
};

}  // namespace flashmoe
