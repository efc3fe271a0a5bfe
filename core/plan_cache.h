// Plans that a thread made before. Programs repeat few shapes, and planning with every family costs
// the host more than a launch.
//
// The key of a plan is every byte of the validated problem, with its addresses reduced to whether
// they are null. So no field can be forgotten. A forgotten address is compared, which finds too few
// plans but never a wrong one. A problem provides: visit_addresses(problem, visit) calls
// visit(pointer) for each address in it
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/per_thread.h"
#include "core/plan.h"

namespace flashmoe {

// A problem whose bytes are compared begins as zeros, including the gaps between its fields.
template <class Problem>
void clear(Problem* problem) {
  static_assert(std::is_trivially_copyable_v<Problem>);
  std::memset(static_cast<void*>(problem), 0, sizeof *problem);
}

template <class Problem>
class PlanCache {
 public:
  struct Slot {
    alignas(Problem) unsigned char key[sizeof(Problem)];
    const Family<Problem>* family;
    Plan plan;
    PlanDetail detail;
  };

  // nullptr if this thread keeps no plan of such a problem. Valid until the thread's next add().
  static Slot* find(const Problem& problem) {
    PlanCache* const cache = PerThread<PlanCache>::existing();
    if (cache == nullptr) return nullptr;
    Problem key;
    make_key(problem, &key);
    unsigned index = cache->newest_;
    for (unsigned i = 0; i < cache->count_;
         ++i, index = index + 1 < cache->count_ ? index + 1 : 0) {
      if (std::memcmp(cache->slots_[index].key, &key, sizeof key) != 0) continue;
      cache->newest_ = index;
      return &cache->slots_[index];
    }
    return nullptr;
  }

  // nullptr if there is no memory for it.
  static Slot* add(const Problem& problem, const Family<Problem>* family, const Plan& plan) {
    PlanCache* const cache = PerThread<PlanCache>::get();
    if (cache == nullptr) return nullptr;
    const unsigned index = cache->next_;
    cache->next_ = (index + 1) % kSlots;
    cache->count_ += cache->count_ < kSlots ? 1 : 0;
    cache->newest_ = index;
    Slot& slot = cache->slots_[index];
    Problem key;
    make_key(problem, &key);
    std::memcpy(slot.key, &key, sizeof key);
    slot.family = family;
    slot.plan = plan;
    slot.plan.detail = &slot.detail;
    slot.detail.ready = false;
    return &slot;
  }

  static constexpr unsigned kSlots = 8;  // a few kinds of layers, each in a few ways

 private:
  static void make_key(const Problem& problem, Problem* key) {
    std::memcpy(static_cast<void*>(key), &problem, sizeof problem);
    visit_addresses(key, [](auto** address) {
      using Address = std::remove_reference_t<decltype(*address)>;
      *address = reinterpret_cast<Address>(uintptr_t{*address != nullptr});
    });
  }

  unsigned count_;   // slots in use, the first ones
  unsigned next_;    // the slot to use next
  unsigned newest_;  // the slot last found or added
  Slot slots_[kSlots];
};

}  // namespace flashmoe
