// The experts' kernels without their device code, on a made-up CUDA: what the planners know of each
// is from its own traits, but for routing, of which they know the shared memory. instances.inc
// lists them as the build does (tests/cuda/test_moe_plans.py).
#include "core/backends.h"
#include "cuda/moe/combine/entry.h"
#include "cuda/moe/route/entry.h"
#include "cuda/moe/sm89/entry.h"
#include "cuda/moe/sm89/traits.cuh"
#include "cuda/moe/sm89_few_tokens/entry.h"
#include "cuda/moe/sm90/entry.h"
#include "cuda/moe/sm90/traits.cuh"
#include "cuda/moe/sm90_few_tokens/traits.cuh"

namespace flashmoe {
namespace {

struct Once;
struct Choose;
struct Place;
struct Up;
struct Down;

// A kernel's state, by its traits and by which of their kernels it is.
template <class Traits, class Which = void>
LoadedKernel loaded[kMaxDevices];

template <class Traits, class Which = void>
Kernel kernel_of(const char* name, int shared_bytes) {
  LoadedKernel* const own = loaded<Traits, Which>;
  return {name, own, shared_bytes, own};
}

}  // namespace

// There is no CPU among these devices.
const MoeRouteFamily kCpuMoeRoute = {"cpu", FLASHMOE_DEVICE_CPU, nullptr, nullptr};
const MoeForwardFamily kCpuMoeForward = {"cpu", FLASHMOE_DEVICE_CPU, nullptr, nullptr};
const GroupedProductFamily kCpuGroupedProduct = {"cpu", FLASHMOE_DEVICE_CPU, nullptr, nullptr};

// ---- routing ------------------------------------------------------------------------------------

namespace moe_route {
namespace {

template <int kPerLane, int kBits>
struct Chooser;
using Given = Chooser<0, 0>;

template <class Chooser>
int most_blocks[kMaxDevices];

int scratch_words(int experts, int num_groups) {
  return num_groups > 1 ? experts + 2 * num_groups : 0;
}
int bytes_of(const SharedShape& s, int counts) {
  const int list = s.keeps_list ? s.block_tokens * s.top_k : 0;
  return 4 * (list + s.warps * (s.experts + scratch_words(s.experts, s.num_groups)) + counts);
}
int once_bytes(const SharedShape& s) { return bytes_of(s, (s.cluster + 1) * s.experts); }
int choose_bytes(const SharedShape& s) { return bytes_of(s, 0); }

template <class Chooser>
Entry entry_of(const char* once, const char* choose, int experts, bool any_choice, int threads) {
  return {kernel_of<Chooser, Once>(once, kMaxSharedBytes),
          kernel_of<Chooser, Choose>(choose, kMaxSharedBytes),
          experts,
          any_choice,
          threads,
          &scratch_words,
          &once_bytes,
          &choose_bytes,
          most_blocks<Chooser>};
}

}  // namespace

// As many as registers have room for.
constexpr int threads_of(int key_words) { return key_words <= 16 ? 1024 : 16384 / key_words; }

#define FLASHMOE_ROUTE(name, per_lane, bits)                                                      \
  extern const Entry entry_##name;                                                                \
  const Entry entry_##name = entry_of<Chooser<per_lane, bits>>(                                   \
      "moe_route_once_" #name, "moe_route_choose_" #name, kThreadsPerWarp * per_lane, bits == 64, \
      threads_of(per_lane * bits / 32));
#include "route/instances.inc"
#undef FLASHMOE_ROUTE

extern const Entry entry_given;
extern const Kernel kernel_place;
const Entry entry_given =
    entry_of<Given>("moe_route_once_given", "moe_route_choose_given", 1024, true, 1024);
const Kernel kernel_place = kernel_of<Given, Place>("moe_route_place", 0);

}  // namespace moe_route

// ---- products -----------------------------------------------------------------------------------

#define FLASHMOE_SM89(name, element, rows, major)                    \
  extern const Entry entry_##name;                                   \
  const Entry entry_##name = entry_of<Traits<element, rows, major>>( \
      "grouped_product_"                                             \
      "sm89_" #name);
#define FLASHMOE_SM90(name, element, use, major)                                              \
  extern const Entry entry_##name;                                                            \
  const Entry entry_##name = entry_of<Traits<element, Use::use, Major::major>, Major::major>( \
      "grouped_product_sm90_" #name);
#define FLASHMOE_SM89_FEW_TOKENS(name, element, tiles, token_blocks)         \
  extern const Entry entry_##name;                                           \
  const Entry entry_##name = entry_of<Traits<element, tiles, token_blocks>>( \
      "moe_up_sm89_few_tokens_" #name, "moe_down_sm89_few_tokens_" #name);
#define FLASHMOE_SM90_FEW_TOKENS(name, element) \
  extern const Entry entry_##name;              \
  const Entry entry_##name =                    \
      bulk::entry_of<element>("moe_up_sm90_few_tokens_" #name, "moe_down_sm90_few_tokens_" #name);

namespace moe::sm89 {

template <class Traits>
static Entry entry_of(const char* name) {
  return {kernel_of<Traits>(name, Traits::kSharedBytes),
          numeric::ElementTraits<typename Traits::Element>::kDtype,
          Traits::kGated,
          Traits::kTransposed,
          Traits::kTileRows,
          Traits::kOutRows,
          Traits::kTileTokens,
          Traits::kStages,
          Traits::kThreads,
          Traits::kBlocksPerSm};
}

#include "sm89/instances.inc"

}  // namespace moe::sm89

namespace moe::sm90 {

template <class Traits, Major kMajor>
static Entry entry_of(const char* name) {
  return {kernel_of<Traits>(name, Traits::kSharedBytes),
          numeric::ElementTraits<typename Traits::Element>::kDtype,
          Traits::kUse,
          kMajor,
          Traits::kTileRows,
          Traits::kBoxRows,
          Traits::kOutRows,
          Traits::kTileTokens,
          Traits::kColumnsPerGroup,
          Traits::kStages,
          Traits::kThreads};
}

#include "sm90/instances.inc"

}  // namespace moe::sm90

namespace moe::sm89_few_tokens {

template <class Traits>
static Entry entry_of(const char* up, const char* down) {
  const auto up_bytes = [](const SharedShape& s) {
    return Traits::up_shared_bytes(s.stages, s.entry_tokens, s.records, s.pairs);
  };
  const auto down_bytes = [](const SharedShape& s) {
    return Traits::down_shared_bytes(s.stages, s.entry_tokens, s.records, s.pairs, s.tokens);
  };
  return {kernel_of<Traits, Up>(up, kLeastSharedBytes),
          kernel_of<Traits, Down>(down, kLeastSharedBytes),
          numeric::ElementTraits<typename Traits::Element>::kDtype,
          false,
          Traits::kTiles,
          Traits::kTokens,
          kThreads,
          kMaxStages,
          Traits::kStepColumns,
          up_bytes,
          down_bytes};
}

namespace bulk {

static int ring_bytes(const SharedShape& s) {
  return s.stages * stage_bytes(s.stage_columns, s.entry_tokens);
}

template <class Element>
static Entry entry_of(const char* up, const char* down) {
  const auto up_bytes = [](const SharedShape& s) {
    return up_shared_bytes(ring_bytes(s), s.records, s.pairs);
  };
  const auto down_bytes = [](const SharedShape& s) {
    return down_shared_bytes(ring_bytes(s), s.records, s.pairs, s.tokens);
  };
  return {kernel_of<Element, Up>(up, kLeastSharedBytes),
          kernel_of<Element, Down>(down, kLeastSharedBytes),
          numeric::ElementTraits<Element>::kDtype,
          true,
          kRows / 16,
          kTokens,
          kBlockThreads,
          kMostStages,
          kMostColumns,
          up_bytes,
          down_bytes};
}

}  // namespace bulk

#include "sm89_few_tokens/instances.inc"
#include "sm90_few_tokens/instances.inc"

}  // namespace moe::sm89_few_tokens

// ---- combining ----------------------------------------------------------------------------------

namespace moe_combine {
namespace {

template <class Element, int kBatch>
struct Traits;

}  // namespace

#define FLASHMOE_COMBINE(dtype, element, batch)                            \
  {kernel_of<Traits<element, batch>>("moe_combine_" dtype "_k" #batch, 0), \
   numeric::ElementTraits<element>::kDtype, batch}
const Entry entries[kEntries] = {
    FLASHMOE_COMBINE("fp16", __half, 2),        FLASHMOE_COMBINE("fp16", __half, 4),
    FLASHMOE_COMBINE("fp16", __half, 8),        FLASHMOE_COMBINE("bf16", __nv_bfloat16, 2),
    FLASHMOE_COMBINE("bf16", __nv_bfloat16, 4), FLASHMOE_COMBINE("bf16", __nv_bfloat16, 8),
};
#undef FLASHMOE_COMBINE

}  // namespace moe_combine
}  // namespace flashmoe
