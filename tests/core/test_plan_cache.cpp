// The plans that a thread keeps (core/plan_cache.h): by themselves, and behind the C ABI on made-up
// families, so that it needs no GPU. Whatever was called before, a call comes to what it comes to
// on a thread that has called nothing yet.
#include "core/plan_cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/backends.h"
#include "core/ops/attention/merge_in.h"
#include "core/status.h"
#include "flashmoe/flashmoe.h"

static std::atomic<bool> out_of_memory{false};

extern "C" {

void* __real_aligned_alloc(size_t alignment, size_t bytes);

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return out_of_memory ? nullptr : __real_aligned_alloc(alignment, bytes);
}

}  // extern "C"

namespace flashmoe {
namespace {

// ---- the cache by itself
// -------------------------------------------------------------------------

struct Toy {
  flashmoe_device device;
  KernelName kernel;
  const void* x;
  float* out;
  int64_t rows;
};

template <class Visit>
void visit_addresses(Toy* p, const Visit& visit) {
  visit(&p->x);
  visit(&p->out);
}

// The same with a field more, of which nothing but its declaration is said.
struct LargerToy : Toy {
  float softcap;
};

// An address that visit_addresses() does not name.
struct ForgetfulToy : Toy {
  const float* sinks;
};

const void* const kAddress = reinterpret_cast<const void*>(uintptr_t{1} << 40);

template <class Problem>
Problem toy(int64_t rows) {
  Problem p;
  clear(&p);
  p.device = {FLASHMOE_DEVICE_CUDA, 0};
  p.x = kAddress;
  p.rows = rows;
  return p;
}

template <class Problem>
void keep(const Problem& problem, int32_t mark = 0) {
  Plan plan = {};
  plan.info.reserved = mark;
  CHECK(PlanCache<Problem>::add(problem, nullptr, plan) != nullptr);
}

template <class Problem>
bool kept(const Problem& problem) {
  return PlanCache<Problem>::find(problem) != nullptr;
}

void a_plan_is_found_wherever_tensors_lie() {
  Toy p = toy<Toy>(3);
  CHECK(!kept(p));
  keep(p, 77);
  CHECK(kept(p) && PlanCache<Toy>::find(p)->plan.info.reserved == 77);
  p.x = static_cast<const char*>(kAddress) + 16;
  CHECK(kept(p));
  p.x = nullptr;
  CHECK(!kept(p));
  p.x = kAddress;
  float there;
  p.out = &there;
  CHECK(!kept(p));
  p.out = nullptr;
  std::snprintf(p.kernel, sizeof p.kernel, "sm90");
  CHECK(!kept(p));
}

void a_field_counts_for_being_declared() {
  LargerToy p = toy<LargerToy>(3);
  keep(p);
  CHECK(kept(p));
  p.softcap = 30.0f;
  CHECK(!kept(p));
}

void a_forgotten_address_finds_too_little() {
  const float sinks[2] = {};
  ForgetfulToy p = toy<ForgetfulToy>(3);
  p.sinks = sinks;
  keep(p);
  CHECK(kept(p));
  p.sinks = sinks + 1;
  CHECK(!kept(p));
}

void slots_are_replaced_in_turn() {
  constexpr int64_t kSlots = PlanCache<Toy>::kSlots;
  for (int64_t i = 0; i < kSlots; ++i) keep(toy<Toy>(i), static_cast<int32_t>(i));
  for (int64_t i = 0; i < kSlots; ++i) {
    CHECK(kept(toy<Toy>(i)) && PlanCache<Toy>::find(toy<Toy>(i))->plan.info.reserved == i);
  }
  CHECK(kept(toy<Toy>(0)));  // which saves it from nothing
  for (int64_t more = 0; more < 2 * kSlots; ++more) {
    keep(toy<Toy>(kSlots + more));
    CHECK(!kept(toy<Toy>(more)));
    for (int64_t i = more + 1; i <= kSlots + more; ++i) CHECK(kept(toy<Toy>(i)));
  }
}

void a_new_plan_has_nothing_prepared() {
  constexpr int64_t kSlots = PlanCache<Toy>::kSlots;
  for (int64_t i = 0; i < 2 * kSlots; ++i) {
    keep(toy<Toy>(i));
    PlanDetail* const detail = PlanCache<Toy>::find(toy<Toy>(i))->plan.detail;
    Prepared<int64_t> prepared(detail);
    CHECK(!prepared.ready());
    *prepared = i;
    prepared.set_ready(true);
  }
  for (int64_t i = kSlots; i < 2 * kSlots; ++i) {
    Prepared<int64_t> prepared(PlanCache<Toy>::find(toy<Toy>(i))->plan.detail);
    CHECK(prepared.ready() && *prepared == i);
  }
  Prepared<int64_t> of_no_kept_plan(nullptr);
  of_no_kept_plan.set_ready(true);
  CHECK(!of_no_kept_plan.ready());
}

// In every problem of the library, each byte that is no address is told apart.
template <class Problem>
void every_byte_counts(size_t addresses) {
  Problem p;
  clear(&p);
  std::vector<size_t> begins;
  const auto begin_of = [&p](const void* field) {
    return static_cast<size_t>(static_cast<const unsigned char*>(field) -
                               reinterpret_cast<const unsigned char*>(&p));
  };
  visit_addresses(&p, [&](auto** address) {
    begins.push_back(begin_of(address));
    *address = reinterpret_cast<std::remove_reference_t<decltype(*address)>>(uintptr_t{1} << 40);
  });
  CHECK(begins.size() == addresses);
  keep(p);
  auto* const bytes = reinterpret_cast<unsigned char*>(&p);
  for (size_t i = 0; i < sizeof p; ++i) {
    const bool is_address = std::any_of(begins.begin(), begins.end(), [i](size_t begin) {
      return i >= begin && i < begin + sizeof(void*);
    });
    for (int bit = 0; bit < 8; ++bit) {
      const auto flip = static_cast<unsigned char>(1u << bit);
      bytes[i] = static_cast<unsigned char>(bytes[i] ^ flip);
      // All bits of an address but one are 0: one more changes nothing, and none is no address.
      const bool absent = is_address && i % sizeof(void*) == 5 && bit == 0;
      CHECK(kept(p) == (is_address && !absent));
      bytes[i] = static_cast<unsigned char>(bytes[i] ^ flip);
    }
  }
  CHECK(kept(p));
}

void every_byte_of_a_problem_counts() {
  every_byte_counts<AttentionProblem>(18);
  every_byte_counts<AttentionBackwardProblem>(24);
  every_byte_counts<CheckSequencesProblem>(9);
  every_byte_counts<KvAppendProblem>(17);
  every_byte_counts<KvGatherProblem>(11);
  every_byte_counts<MergeStatesProblem>(8);
  every_byte_counts<AttentionMergeInProblem>(26);
  every_byte_counts<MoeRouteProblem>(14);
  every_byte_counts<MoeForwardProblem>(14);
  every_byte_counts<GroupedProductProblem>(6);
  every_byte_counts<MoeRouteBackwardProblem>(7);
  every_byte_counts<MoeBackwardProblem>(26);
  every_byte_counts<GroupedProductBackwardProblem>(8);
}

// ---- families
// ------------------------------------------------------------------------------------

std::atomic<int> plans{0};
std::atomic<int> preparations{0};

struct Launched {
  int count = 0;
  std::string family;
  std::vector<unsigned char> problem;
  flashmoe_plan plan = {};

  template <class Problem>
  const Problem& as() const {
    CHECK(problem.size() == sizeof(Problem));
    return *reinterpret_cast<const Problem*>(problem.data());
  }
};
thread_local Launched launched;

int64_t size_of(const AttentionProblem& p) { return p.seq_q + p.q.strides.seq; }
int64_t size_of(const AttentionBackwardProblem& p) { return p.seq_q + p.q.strides.seq; }
int64_t size_of(const CheckSequencesProblem& p) { return p.batch; }
int64_t size_of(const KvAppendProblem& p) { return p.seq; }
int64_t size_of(const KvGatherProblem& p) { return p.seq; }
int64_t size_of(const MergeStatesProblem& p) { return p.seq; }
int64_t size_of(const MoeRouteProblem& p) { return p.tokens; }
int64_t size_of(const MoeForwardProblem& p) { return p.tokens; }
int64_t size_of(const GroupedProductProblem& p) { return p.rows; }
int64_t size_of(const MoeRouteBackwardProblem& p) { return p.tokens; }
int64_t size_of(const MoeBackwardProblem& p) { return p.layer.tokens; }
int64_t size_of(const GroupedProductBackwardProblem& p) { return p.rows; }

enum class Kind { kFew, kMany, kHost };

// Few rows take kFew less time than others; on device 2 there is nothing.
template <Kind kKind, class Problem>
flashmoe_status plan(const Problem& problem, Plan* plan, const Reason& reason) {
  ++plans;
  if (problem.device.device_type == FLASHMOE_DEVICE_CUDA && problem.device.device_id == 2) {
    return reason.refuse(FLASHMOE_ERROR_NO_DEVICE, "device cuda:2 does not exist");
  }
  const int64_t size = size_of(problem);
  plan->info.microseconds = kKind == Kind::kFew ? static_cast<double>(size) : 500;
  plan->add_launch(kKind == Kind::kFew ? "few" : "many", nullptr, problem.device,
                   static_cast<uint32_t>(size), 128);
  return FLASHMOE_OK;
}

// What is prepared is of this very plan, whichever call prepared it.
template <const char* kFamily, class Problem>
flashmoe_status launch(const Problem& problem, const Plan& plan, void*, void*) {
  Prepared<int64_t> prepared(plan.detail);
  if (!prepared.ready()) {
    ++preparations;
    *prepared = size_of(problem);
    prepared.set_ready(true);
  }
  CHECK(*prepared == size_of(problem));
  ++launched.count;
  launched.family = kFamily;
  launched.plan = plan.info;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&problem);
  launched.problem.assign(bytes, bytes + sizeof problem);
  return FLASHMOE_OK;
}

constexpr char kFewRows[] = "sm89_few_rows";
constexpr char kFewTokens[] = "sm89_few_tokens";
constexpr char kSm90[] = "sm90";
constexpr char kSm89[] = "sm89";
constexpr char kCuda[] = "cuda";
constexpr char kCpu[] = "cpu";

template <class Problem, const char* kFamily, Kind kKind>
constexpr Family<Problem> family() {
  return {kFamily, kKind == Kind::kHost ? FLASHMOE_DEVICE_CPU : FLASHMOE_DEVICE_CUDA,
          plan<kKind, Problem>, launch<kFamily, Problem>};
}

}  // namespace

const AttentionFamily kSm89FewRowsAttention = family<AttentionProblem, kFewRows, Kind::kFew>();
// For sequences, which do not occur here.
flashmoe_status plan_sequences(const AttentionProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "a dense batch");
}
const AttentionFamily kSm89DecodeAttention = {"sm89_decode", FLASHMOE_DEVICE_CUDA, plan_sequences,
                                              nullptr};
const AttentionFamily kSm90MlaAttention = {"sm90_mla", FLASHMOE_DEVICE_CUDA, plan_sequences,
                                           nullptr};
const AttentionFamily kSm90Attention = family<AttentionProblem, kSm90, Kind::kMany>();
const AttentionFamily kSm89Attention = family<AttentionProblem, kSm89, Kind::kMany>();
const AttentionFamily kCpuAttention = family<AttentionProblem, kCpu, Kind::kHost>();
const AttentionBackwardFamily kSm90AttentionBackward =
    family<AttentionBackwardProblem, kSm90, Kind::kMany>();
const AttentionBackwardFamily kSm89AttentionBackward =
    family<AttentionBackwardProblem, kSm89, Kind::kMany>();
const AttentionBackwardFamily kCpuAttentionBackward =
    family<AttentionBackwardProblem, kCpu, Kind::kHost>();
const CheckSequencesFamily kCudaCheckSequences =
    family<CheckSequencesProblem, kSm89, Kind::kMany>();
const CheckSequencesFamily kCpuCheckSequences = family<CheckSequencesProblem, kCpu, Kind::kHost>();
const KvAppendFamily kCudaKvAppend = family<KvAppendProblem, kSm89, Kind::kMany>();
const KvAppendFamily kCpuKvAppend = family<KvAppendProblem, kCpu, Kind::kHost>();
const KvGatherFamily kCudaKvGather = family<KvGatherProblem, kSm89, Kind::kMany>();
const KvGatherFamily kCpuKvGather = family<KvGatherProblem, kCpu, Kind::kHost>();
const MergeStatesFamily kCudaMergeStates = family<MergeStatesProblem, kSm89, Kind::kMany>();
const MergeStatesFamily kCpuMergeStates = family<MergeStatesProblem, kCpu, Kind::kHost>();
const MoeRouteFamily kCudaMoeRoute = family<MoeRouteProblem, kCuda, Kind::kMany>();
const MoeRouteFamily kCpuMoeRoute = family<MoeRouteProblem, kCpu, Kind::kHost>();
const MoeForwardFamily kSm89FewTokensMoeForward =
    family<MoeForwardProblem, kFewTokens, Kind::kFew>();
const MoeForwardFamily kSm90MoeForward = family<MoeForwardProblem, kSm90, Kind::kMany>();
const MoeForwardFamily kSm89MoeForward = family<MoeForwardProblem, kSm89, Kind::kMany>();
const MoeForwardFamily kCpuMoeForward = family<MoeForwardProblem, kCpu, Kind::kHost>();
const GroupedProductFamily kSm90GroupedProduct =
    family<GroupedProductProblem, kSm90, Kind::kMany>();
const GroupedProductFamily kSm89GroupedProduct =
    family<GroupedProductProblem, kSm89, Kind::kMany>();
const GroupedProductFamily kCpuGroupedProduct = family<GroupedProductProblem, kCpu, Kind::kHost>();
const MoeRouteBackwardFamily kCudaMoeRouteBackward =
    family<MoeRouteBackwardProblem, kCuda, Kind::kMany>();
const MoeRouteBackwardFamily kCpuMoeRouteBackward =
    family<MoeRouteBackwardProblem, kCpu, Kind::kHost>();
const MoeBackwardFamily kSm90MoeBackward = family<MoeBackwardProblem, kSm90, Kind::kMany>();
const MoeBackwardFamily kSm89MoeBackward = family<MoeBackwardProblem, kSm89, Kind::kMany>();
const MoeBackwardFamily kCpuMoeBackward = family<MoeBackwardProblem, kCpu, Kind::kHost>();
const GroupedProductBackwardFamily kSm90GroupedProductBackward =
    family<GroupedProductBackwardProblem, kSm90, Kind::kMany>();
const GroupedProductBackwardFamily kSm89GroupedProductBackward =
    family<GroupedProductBackwardProblem, kSm89, Kind::kMany>();
const GroupedProductBackwardFamily kCpuGroupedProductBackward =
    family<GroupedProductBackwardProblem, kCpu, Kind::kHost>();

flashmoe_status cuda_plan_lengths(const AttentionProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
flashmoe_status cuda_launch_lengths(const AttentionProblem&, const Plan&, const LengthTables&,
                                    void*) {
  return FLASHMOE_ERROR_UNSUPPORTED;
}

flashmoe_status cuda_all_rows(int32_t, const int32_t** offsets) {
  static const int32_t all_rows[] = {0, INT32_MAX};
  *offsets = all_rows;
  return FLASHMOE_OK;
}

namespace {

// ---- calls
// ---------------------------------------------------------------------------------------

constexpr uintptr_t kData = uintptr_t{1} << 40;  // never read
constexpr flashmoe_dtype kHalf = {FLASHMOE_DTYPE_FLOAT, 16, 1};
constexpr flashmoe_dtype kBf16 = {FLASHMOE_DTYPE_BFLOAT, 16, 1};
constexpr flashmoe_dtype kFloat = {FLASHMOE_DTYPE_FLOAT, 32, 1};
constexpr flashmoe_dtype kInteger = {FLASHMOE_DTYPE_INT, 32, 1};
constexpr flashmoe_dtype kLong = {FLASHMOE_DTYPE_INT, 64, 1};

struct Tensor {
  bool given = false;
  int64_t shape[4] = {};
  int64_t strides[4] = {};
  flashmoe_tensor view = {};

  void set(const std::vector<int64_t>& extents, flashmoe_dtype dtype) {
    given = true;
    int64_t step = 1;
    for (size_t axis = extents.size(); axis-- > 0;) {
      shape[axis] = extents[axis];
      strides[axis] = step;
      step *= extents[axis];
    }
    view.device = {FLASHMOE_DEVICE_CUDA, 0};
    view.ndim = static_cast<int32_t>(extents.size());
    view.dtype = dtype;
  }
};

// A call of an operation, whose tensors and options a test may change.
template <class P>
struct AnyCall {
  using Params = P;

  std::vector<Tensor> tensors;
  std::string kernel;
  Params params;

  AnyCall(size_t count, const Params& empty) : tensors(count), params(empty) {
    for (size_t i = 0; i < count; ++i) at(i, kData + (uintptr_t{i} << 32));
  }

  Tensor& operator[](size_t i) { return tensors[i]; }
  void at(size_t i, uintptr_t address) { tensors[i].view.data = reinterpret_cast<void*>(address); }
  void move(ptrdiff_t bytes) {
    for (Tensor& tensor : tensors) tensor.view.data = static_cast<char*>(tensor.view.data) + bytes;
  }
  void put_on(flashmoe_device device) {
    for (Tensor& tensor : tensors) tensor.view.device = device;
  }
  void retype(flashmoe_dtype from, flashmoe_dtype to) {
    for (Tensor& tensor : tensors) {
      flashmoe_dtype& own = tensor.view.dtype;
      if (own.code == from.code && own.bits == from.bits) own = to;
    }
  }

  // Copies of a call are copies: nothing points into another before this. In Params the tensors
  // follow its size, in order.
  const Params* ready(bool contiguous = false) {
    auto* const pointers = reinterpret_cast<const flashmoe_tensor**>(
        reinterpret_cast<unsigned char*>(&params) + sizeof(size_t));
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& tensor = tensors[i];
      tensor.view.shape = tensor.shape;
      tensor.view.strides = contiguous ? nullptr : tensor.strides;
      pointers[i] = tensor.given ? &tensor.view : nullptr;
    }
    set_kernel(&params, kernel.empty() ? nullptr : kernel.c_str());
    return &params;
  }

  static void set_kernel(flashmoe_moe_route_params*, const char*) {}
  template <class Named>
  static void set_kernel(Named* named, const char* text) {
    named->kernel = text;
  }
};

struct Attention : AnyCall<flashmoe_attention_forward_params> {
  using Problem = AttentionProblem;
  enum { kQ, kK, kV, kOut, kLse, kCount };
  static constexpr size_t kFirstOutput = kOut;
  static constexpr const char* kNames[] = {"q", "k", "v", "out", "lse"};
  static constexpr auto kRun = &flashmoe_attention_forward;
  static constexpr auto kSize = &flashmoe_attention_forward_workspace_size;

  explicit Attention(int64_t seq_q = 100, int64_t seq_k = 200, int64_t heads = 2, int64_t dim = 64)
      : AnyCall(kCount, flashmoe_attention_forward_params_init()) {
    tensors[kQ].set({2, seq_q, heads, dim}, kHalf);
    tensors[kK].set({2, seq_k, heads, dim}, kHalf);
    tensors[kV].set({2, seq_k, heads, dim}, kHalf);
    tensors[kOut].set({2, seq_q, heads, dim}, kHalf);
    tensors[kLse].set({2, heads, seq_q}, kFloat);
    tensors[kLse].given = false;
  }
};

// Sinks of two heads.
const flashmoe_tensor* sinks_of(flashmoe_dtype dtype, int64_t stride, uintptr_t address = kData) {
  static int64_t shape[1] = {2};
  static std::list<Tensor> all;
  Tensor& sinks = all.emplace_back();
  sinks.view.data = reinterpret_cast<void*>(address);
  sinks.view.device = {FLASHMOE_DEVICE_CUDA, 0};
  sinks.view.ndim = 1;
  sinks.view.dtype = dtype;
  sinks.view.shape = shape;
  sinks.strides[0] = stride;
  sinks.view.strides = sinks.strides;
  return &sinks.view;
}

struct Append : AnyCall<flashmoe_kv_append_params> {
  using Problem = KvAppendProblem;
  enum {
    kK,
    kV,
    kKCache,
    kVCache,
    kSlots,
    kCacheSeqlens,
    kCuSeqlens,
    kSeqused,
    kBatchIndex,
    kPageTable,
    kPositions,
    kCos,
    kSin,
    kQ,
    kQOut,
    kCount
  };
  static constexpr auto kRun = &flashmoe_kv_append;
  static constexpr auto kSize = &flashmoe_kv_append_workspace_size;

  explicit Append(int64_t seq = 100) : AnyCall(kCount, flashmoe_kv_append_params_init()) {
    tensors[kK].set({2, seq, 2, 64}, kHalf);
    tensors[kV].set({2, seq, 2, 64}, kHalf);
    tensors[kKCache].set({9, 16, 2, 64}, kHalf);
    tensors[kVCache].set({9, 16, 2, 64}, kHalf);
    tensors[kPageTable].set({2, 3}, kInteger);
    tensors[kCos].set({50, 16}, kHalf);
    tensors[kSin].set({50, 16}, kHalf);
    tensors[kQ].set({2, seq, 4, 64}, kHalf);
    tensors[kQOut].set({2, seq, 4, 64}, kHalf);
  }
  Append with(size_t tensor, std::initializer_list<int64_t> extents) const {
    Append call = *this;
    call[tensor].set(extents, kInteger);
    return call;
  }
};

struct Gather : AnyCall<flashmoe_kv_gather_params> {
  using Problem = KvGatherProblem;
  enum {
    kKCache,
    kVCache,
    kCuSeqlens,
    kSeqused,
    kBegin,
    kBatchIndex,
    kPageTable,
    kKScale,
    kVScale,
    kK,
    kV,
    kCount
  };
  static constexpr auto kRun = &flashmoe_kv_gather;
  static constexpr auto kSize = &flashmoe_kv_gather_workspace_size;

  explicit Gather(int64_t seq = 100) : AnyCall(kCount, flashmoe_kv_gather_params_init()) {
    tensors[kKCache].set({9, 16, 2, 64}, kHalf);
    tensors[kVCache].set({9, 16, 2, 64}, kHalf);
    tensors[kPageTable].set({2, 3}, kInteger);
    tensors[kK].set({2, seq, 2, 64}, kHalf);
    tensors[kV].set({2, seq, 2, 64}, kHalf);
  }
  Gather with(size_t tensor, std::initializer_list<int64_t> extents) const {
    Gather call = *this;
    call[tensor].set(extents, kInteger);
    return call;
  }
};

// A call with one partial and a prior one.
struct Merge : AnyCall<flashmoe_merge_states_params> {
  using Problem = MergeStatesProblem;
  enum { kOuts, kLses, kPriorOut, kPriorLse, kOut, kLse, kCount };
  static constexpr auto kRun = &flashmoe_merge_states;
  static constexpr auto kSize = &flashmoe_merge_states_workspace_size;

  explicit Merge(int64_t seq = 100) : AnyCall(kCount, flashmoe_merge_states_params_init()) {
    for (const size_t rows : {kOuts, kPriorOut, kOut}) tensors[rows].set({2, seq, 2, 64}, kHalf);
    for (const size_t sums : {kLses, kPriorLse, kLse}) tensors[sums].set({2, 2, seq}, kFloat);
  }
};

struct Route : AnyCall<flashmoe_moe_route_params> {
  using Problem = MoeRouteProblem;
  enum {
    kLogits,
    kBias,
    kGivenIds,
    kGivenWeights,
    kMap,
    kIds,
    kWeights,
    kOffsets,
    kPairs,
    kSlots,
    kLse,
    kCount
  };
  static constexpr size_t kFirstOutput = kIds;
  static constexpr const char* kNames[] = {
      "logits",  "selection_bias", "given_ids", "given_weights", "expert_map", "ids",
      "weights", "offsets",        "pairs",     "slots",         "lse"};
  static constexpr auto kRun = &flashmoe_moe_route;
  static constexpr auto kSize = &flashmoe_moe_route_workspace_size;

  explicit Route(int64_t tokens = 100) : AnyCall(kCount, flashmoe_moe_route_params_init()) {
    tensors[kLogits].set({tokens, 8}, kHalf);
    tensors[kIds].set({tokens, 2}, kInteger);
    tensors[kWeights].set({tokens, 2}, kFloat);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kPairs].set({tokens * 2}, kInteger);
    tensors[kSlots].set({tokens, 2}, kInteger);
  }

  static Route of_given_ids(int64_t tokens = 100) {
    Route call(tokens);
    call[kLogits].given = false;
    call[kGivenIds].set({tokens, 2}, kInteger);
    return call;
  }
};

struct Forward : AnyCall<flashmoe_moe_forward_params> {
  using Problem = MoeForwardProblem;
  enum {
    kX,
    kGateUp,
    kUp,
    kDown,
    kGateUpBias,
    kUpBias,
    kDownBias,
    kWeights,
    kOffsets,
    kPairs,
    kSlots,
    kOut,
    kPre,
    kCount
  };
  static constexpr size_t kFirstOutput = kOut;
  static constexpr const char* kNames[] = {
      "x",       "w_gate_up", "w_up",  "w_down", "b_gate_up", "b_up",          "b_down",
      "weights", "offsets",   "pairs", "slots",  "out",       "pre_activation"};
  static constexpr auto kRun = &flashmoe_moe_forward;
  static constexpr auto kSize = &flashmoe_moe_forward_workspace_size;

  explicit Forward(int64_t tokens = 100) : AnyCall(kCount, flashmoe_moe_forward_params_init()) {
    tensors[kX].set({tokens, 64}, kHalf);
    tensors[kGateUp].set({8, 32, 64}, kHalf);
    tensors[kDown].set({8, 64, 16}, kHalf);
    tensors[kWeights].set({tokens, 2}, kFloat);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kPairs].set({tokens * 2}, kInteger);
    tensors[kSlots].set({tokens, 2}, kInteger);
    tensors[kOut].set({tokens, 64}, kHalf);
  }
};

struct Product : AnyCall<flashmoe_grouped_product_params> {
  using Problem = GroupedProductProblem;
  enum { kX, kW, kBias, kOffsets, kCounts, kOut, kCount };
  static constexpr size_t kFirstOutput = kOut;
  static constexpr const char* kNames[] = {"x", "w", "bias", "offsets", "counts", "out"};
  static constexpr auto kRun = &flashmoe_grouped_product;
  static constexpr auto kSize = &flashmoe_grouped_product_workspace_size;

  explicit Product(int64_t rows = 100) : AnyCall(kCount, flashmoe_grouped_product_params_init()) {
    tensors[kX].set({rows, 64}, kHalf);
    tensors[kW].set({8, 16, 64}, kHalf);
    tensors[kOffsets].set({9}, kInteger);
    tensors[kOut].set({rows, 16}, kHalf);
  }

  static Product with_counts(int64_t rows = 100) {
    Product call(rows);
    call[kX].set({8, rows, 64}, kHalf);
    call[kOut].set({8, rows, 16}, kHalf);
    call[kOffsets].given = false;
    call[kCounts].set({8}, kInteger);
    return call;
  }
};

template <class Call>
flashmoe_status run(const typename Call::Params* params) {
  return Call::kRun(params, nullptr, 0, nullptr);
}

template <class Call>
std::string failure(Call call) {
  const int before = launched.count;
  CHECK(run<Call>(call.ready()) != FLASHMOE_OK);
  CHECK(launched.count == before);
  return flashmoe_last_error();
}

// Calls it and says whether the families were asked for a plan.
template <class Call>
bool planned(Call call) {
  const int before = plans;
  const int launches = launched.count;
  CHECK(run<Call>(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == launches + 1);
  return plans != before;
}

// Whether one is planned anew behind the other, and each once.
template <class Call>
bool told_apart(const Call& one, const Call& other) {
  bool apart = false;
  std::thread([&] {
    CHECK(planned(one));
    apart = planned(other);
    CHECK(!planned(one));
    CHECK(!planned(other));
  }).join();
  return apart;
}

// ---- what is kept, and what is told apart
// --------------------------------------------------------

// Leaves something on the stack in which the next call's problem comes to lie.
void scribble(int value) {
  volatile unsigned char junk[1 << 16];
  for (volatile unsigned char& byte : junk) byte = static_cast<unsigned char>(value);
}

template <class Call>
void a_call_is_planned_once(Call call) {
  scribble(0x55);
  CHECK(planned(call));
  for (int value : {0xAA, 0x00, 0xFF}) {
    scribble(value);
    CHECK(!planned(call));
  }
  call.move(1 << 20);
  CHECK(!planned(call));
  size_t bytes = 7;
  const int before = plans;
  CHECK(Call::kSize(call.ready(), &bytes) == FLASHMOE_OK && bytes == 0 && plans == before);
}

// Every tensor that it may have.
Forward full_layer() {
  Forward call;
  call.params.gate = FLASHMOE_MOE_SEPARATE;
  call[Forward::kGateUp].set({8, 16, 64}, kHalf);
  call[Forward::kUp].set({8, 16, 64}, kHalf);
  call[Forward::kGateUpBias].set({8, 16}, kHalf);
  call[Forward::kUpBias].set({8, 16}, kFloat);
  call[Forward::kDownBias].set({8, 64}, kHalf);
  call[Forward::kPre].set({200, 32}, kHalf);
  return call;
}

void calls_are_planned_once() {
  Attention attention;
  attention[Attention::kLse].given = true;
  attention.kernel = "sm89";
  a_call_is_planned_once(attention);
  Route route;
  route[Route::kLse].set({100}, kFloat);
  a_call_is_planned_once(route);
  a_call_is_planned_once(Route::of_given_ids());
  a_call_is_planned_once(full_layer());
  a_call_is_planned_once(Product());
  a_call_is_planned_once(Product::with_counts());
  a_call_is_planned_once(Merge());
}

void a_launch_gets_the_addresses_of_its_call() {
  Attention call;
  planned(call);
  for (const bool with_lse : {true, false}) {
    call[Attention::kLse].given = with_lse;
    planned(call);
    call.move(1 << 20);
    CHECK(!planned(call));
    const auto& p = launched.as<AttentionProblem>();
    CHECK(p.q.data == call[Attention::kQ].view.data && p.k.data == call[Attention::kK].view.data);
    CHECK(p.v.data == call[Attention::kV].view.data &&
          p.out.data == call[Attention::kOut].view.data);
    CHECK(p.lse == (with_lse ? call[Attention::kLse].view.data : nullptr));
  }
  call.params.sinks = sinks_of(kFloat, 1);
  planned(call);
  call.params.sinks = sinks_of(kFloat, 1, kData + 64);
  CHECK(!planned(call));
  CHECK(launched.as<AttentionProblem>().sinks.data == call.params.sinks->data);
}

void a_query_of_the_workspace_plans_for_the_call() {
  Forward call;
  size_t bytes = 7;
  CHECK(Forward::kSize(call.ready(), &bytes) == FLASHMOE_OK && bytes == 0);
  CHECK(!planned(call));
}

void alternating_shapes_stay_known() {
  std::vector<Attention> calls;
  for (int i = 0; i < 8; ++i) calls.emplace_back(300 + i, 200);
  for (const Attention& call : calls) CHECK(planned(call));
  const int before = preparations;
  for (int round = 0; round < 3; ++round) {
    for (Attention& call : calls) {
      CHECK(!planned(call));
      CHECK(launched.as<AttentionProblem>().seq_q == call[Attention::kQ].shape[1]);
    }
  }
  CHECK(preparations == before);
  CHECK(planned(Attention(400, 200)));  // in the place of the first
  CHECK(planned(calls[0]));
  CHECK(launched.as<AttentionProblem>().seq_q == 300);
  CHECK(!planned(calls[7]));
}

// An operation's calls do not push out another's.
void operations_have_plans_of_their_own() {
  CHECK(planned(Route()));
  for (int i = 0; i < 20; ++i) planned(Attention(300 + i, 200));
  CHECK(!planned(Route()));
}

template <class Call>
using Changes = std::vector<std::function<void(Call*)>>;

// Each against the call without it, and against every other.
template <class Call>
void check_all_told_apart(const Call& base, const Changes<Call>& changes) {
  std::vector<Call> calls(1, base);
  for (const auto& change : changes) {
    calls.push_back(base);
    change(&calls.back());
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!told_apart(calls[j], calls[i])) std::fprintf(stderr, "changes %zu and %zu\n", j, i);
      CHECK(told_apart(calls[j], calls[i]));
    }
  }
}

template <class Call>
std::function<void(Call*)> stride(size_t tensor, size_t axis, int64_t elements) {
  return [=](Call* c) { (*c)[tensor].strides[axis] = elements; };
}

void attention_calls_are_told_apart() {
  using C = Attention;
  const auto extents = [](int64_t seq_q, int64_t seq_k, int64_t heads, int64_t dim) {
    return [=](C* c) { *c = C(seq_q, seq_k, heads, dim); };
  };
  check_all_told_apart<C>(
      C(), {
               [](C* c) { c->params.causal = FLASHMOE_CAUSAL_TOP_LEFT; },
               [](C* c) { c->params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT; },
               [](C* c) { c->params.scale = 0.5f; },
               [](C* c) { c->params.softcap = 30.0f; },
               [](C* c) { c->params.window = FLASHMOE_WINDOW_LEFT; },
               [](C* c) { c->params.window = FLASHMOE_WINDOW_LEFT, c->params.window_left = 9; },
               [](C* c) { c->params.window = FLASHMOE_WINDOW_RIGHT, c->params.window_right = 9; },
               [](C* c) { c->params.window = 3, c->params.window_right = 9; },
               [](C* c) { c->kernel = "sm89"; },
               [](C* c) { c->kernel = "sm90"; },
               [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
               [](C* c) { c->retype(kHalf, kBf16); },
               [](C* c) { c->params.sinks = sinks_of(kFloat, 1); },
               [](C* c) { c->params.sinks = sinks_of(kFloat, -3); },
               [](C* c) { c->params.sinks = sinks_of(kHalf, 1); },
               [](C* c) { (*c)[C::kLse].given = true; },
               [](C* c) {
                 (*c)[C::kLse].given = true;
                 (*c)[C::kLse].strides[2] = 8;
                 (*c)[C::kLse].strides[1] = (*c)[C::kLse].strides[0] = 1600;
                 (*c)[C::kLse].strides[1] = 800;
               },
               stride<C>(C::kQ, 0, 1 << 20),
               stride<C>(C::kQ, 1, 136),
               stride<C>(C::kQ, 2, 0),
               stride<C>(C::kK, 0, 0),
               stride<C>(C::kK, 1, 136),
               stride<C>(C::kK, 2, 8),
               stride<C>(C::kV, 0, 1 << 20),
               stride<C>(C::kV, 1, -128),
               stride<C>(C::kV, 2, 8),
               stride<C>(C::kOut, 0, 1 << 20),
               [](C* c) {
                 (*c)[C::kOut].strides[1] = 256;
                 (*c)[C::kOut].strides[0] = 25600;
               },
               extents(101, 200, 2, 64),
               extents(100, 201, 2, 64),
               extents(100, 200, 4, 64),
               extents(100, 200, 2, 72),
               [](C* c) {  // heads_kv
                 for (const size_t i : {C::kK, C::kV}) (*c)[i].set({2, 200, 1, 64}, kHalf);
               },
               [](C* c) {  // dim_v
                 (*c)[C::kV].set({2, 200, 2, 32}, kHalf);
                 (*c)[C::kOut].set({2, 100, 2, 32}, kHalf);
               },
               [](C* c) {  // batch
                 for (Tensor& tensor : c->tensors) tensor.shape[0] = 1;
               },
           });
  // The layout says where extents stand.
  C square(8, 8, 8, 64);
  check_all_told_apart<C>(square, {[](C* c) { c->params.layout = FLASHMOE_LAYOUT_BHSD; }});
}

void routings_are_told_apart() {
  using C = Route;
  const auto sigmoid = [](C* c) { c->params.scoring = FLASHMOE_MOE_SIGMOID; };
  check_all_told_apart<C>(
      C(), {
               [](C* c) { *c = C(101); },
               [](C* c) { c->params.scoring = FLASHMOE_MOE_TOPK_SOFTMAX; },
               sigmoid,
               [](C* c) { c->params.renormalize = 1; },
               [](C* c) { c->params.scale = 2.5f; },
               [=](C* c) { sigmoid(c), c->params.num_groups = 4, c->params.top_groups = 2; },
               [=](C* c) { sigmoid(c), c->params.num_groups = 4, c->params.top_groups = 3; },
               [=](C* c) { sigmoid(c), c->params.num_groups = 2, c->params.top_groups = 2; },
               [=](C* c) { sigmoid(c), (*c)[C::kBias].set({8}, kFloat); },
               [](C* c) { c->retype(kHalf, kBf16); },
               [](C* c) { c->retype(kHalf, kFloat); },
               [](C* c) { (*c)[C::kLse].set({100}, kFloat); },
               [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
               stride<C>(C::kLogits, 0, 16),
               [](C* c) {
                 (*c)[C::kLogits].set({100, 16}, kHalf);
                 (*c)[C::kOffsets].set({17}, kInteger);
               },
               [](C* c) {
                 for (const size_t i : {C::kIds, C::kSlots}) (*c)[i].set({100, 3}, kInteger);
                 (*c)[C::kWeights].set({100, 3}, kFloat);
                 (*c)[C::kPairs].set({300}, kInteger);
               },
               [](C* c) { *c = C::of_given_ids(); },
           });
  const auto weights = [](flashmoe_dtype dtype) {
    return [=](C* c) { (*c)[C::kGivenWeights].set({100, 2}, dtype); };
  };
  const auto map = [](int64_t size) { return [=](C* c) { (*c)[C::kMap].set({size}, kInteger); }; };
  check_all_told_apart<C>(
      C::of_given_ids(),
      {
          [](C* c) { (*c)[C::kGivenIds].view.dtype = kLong; },
          stride<C>(C::kGivenIds, 0, 4),
          weights(kFloat),
          weights(kHalf),
          [=](C* c) { weights(kHalf)(c), (*c)[C::kGivenWeights].strides[0] = 4; },
          map(10),
          map(11),
      });
}

void layers_are_told_apart() {
  using C = Forward;
  check_all_told_apart<C>(
      C(), {
               [](C* c) { *c = C(101); },
               [](C* c) { c->params.gate = FLASHMOE_MOE_INTERLEAVED; },
               [](C* c) { c->params.activation = FLASHMOE_ACTIVATION_GELU; },
               [](C* c) { c->params.activation = FLASHMOE_ACTIVATION_RELU2; },
               [](C* c) { c->params.alpha = 1.702f; },
               [](C* c) { c->params.limit = 7.0f; },
               [](C* c) { c->params.up_offset = 1.0f; },
               [](C* c) { c->params.weight_on_input = 1; },
               [](C* c) { c->kernel = "sm89"; },
               [](C* c) { c->kernel = "sm89_few_tokens"; },
               [](C* c) { c->retype(kHalf, kBf16); },
               [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
               [](C* c) { (*c)[C::kGateUpBias].set({8, 32}, kFloat); },
               [](C* c) { (*c)[C::kGateUpBias].set({8, 32}, kHalf); },
               [](C* c) {
                 (*c)[C::kGateUpBias].set({8, 32}, kHalf);
                 (*c)[C::kGateUpBias].strides[0] = 40;
               },
               [](C* c) { (*c)[C::kDownBias].set({8, 64}, kHalf); },
               [](C* c) { (*c)[C::kPre].set({200, 32}, kHalf); },
               [](C* c) {
                 (*c)[C::kPre].set({200, 32}, kHalf);
                 (*c)[C::kPre].strides[0] = 40;
               },
               stride<C>(C::kX, 0, 72),
               stride<C>(C::kOut, 0, 72),
               stride<C>(C::kGateUp, 0, 4096),
               stride<C>(C::kGateUp, 1, 72),
               stride<C>(C::kDown, 0, 0),
               stride<C>(C::kDown, 1, 24),
               [](C* c) {  // transposed
                 (*c)[C::kGateUp].strides[1] = 1;
                 (*c)[C::kGateUp].strides[2] = 32;
               },
               [](C* c) {  // no gate: the same tensor has twice as many rows of one matrix
                 c->params.gate = FLASHMOE_MOE_NO_GATE;
                 (*c)[C::kDown].set({8, 64, 32}, kHalf);
               },
               [](C* c) { *c = full_layer(); },
               [](C* c) {  // top_k
                 (*c)[C::kWeights].set({100, 3}, kFloat);
                 (*c)[C::kPairs].set({300}, kInteger);
                 (*c)[C::kSlots].set({100, 3}, kInteger);
               },
               [](C* c) {  // experts
                 for (const size_t i : {C::kGateUp, C::kDown}) (*c)[i].shape[0] = 7;
                 (*c)[C::kOffsets].set({8}, kInteger);
               },
           });
  check_all_told_apart<C>(full_layer(), {
                                            [](C* c) { (*c)[C::kUpBias].given = false; },
                                            [](C* c) { (*c)[C::kGateUpBias].given = false; },
                                            stride<C>(C::kUp, 0, 4096),
                                            stride<C>(C::kUpBias, 0, 32),
                                            stride<C>(C::kDownBias, 0, 72),
                                        });
}

void appends_are_told_apart() {
  using C = Append;
  check_all_told_apart<C>(C(), {
                                   [](C* c) { *c = C(101); },
                                   [](C* c) { *c = c->with(C::kCacheSeqlens, {2}); },
                                   [](C* c) { *c = c->with(C::kSeqused, {2}); },
                                   [](C* c) { *c = c->with(C::kPositions, {2, 100}); },
                                   [](C* c) { *c = c->with(C::kPageTable, {2, 4}); },
                                   [](C* c) {
                                     (*c)[C::kPageTable].given = false;
                                     *c = c->with(C::kBatchIndex, {2});
                                   },
                                   [](C* c) {
                                     (*c)[C::kPageTable].given = false;
                                     *c =
                                         c->with(C::kSlots, {2, 100}).with(C::kPositions, {2, 100});
                                   },
                                   [](C* c) { (*c)[C::kQ].given = (*c)[C::kQOut].given = false; },
                                   [](C* c) { c->params.rotary = FLASHMOE_ROTARY_INTERLEAVED; },
                                   [](C* c) { c->params.q_stays = 1; },
                                   [](C* c) {
                                     for (const size_t i : {C::kCos, C::kSin})
                                       (*c)[i].set({50, 8}, kHalf);
                                   },
                                   [](C* c) {
                                     for (const size_t i : {C::kCos, C::kSin})
                                       (*c)[i].set({50, 16}, kFloat);
                                   },
                                   [](C* c) { c->kernel = "sm89"; },
                                   [](C* c) { c->retype(kHalf, kBf16); },
                                   [](C* c) { c->retype(kHalf, kFloat); },
                                   [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
                                   stride<C>(C::kK, 0, 0),
                                   stride<C>(C::kV, 1, 0),
                                   stride<C>(C::kKCache, 0, 1 << 20),
                                   stride<C>(C::kVCache, 0, 1 << 20),
                                   stride<C>(C::kQ, 0, 0),
                                   stride<C>(C::kQOut, 0, 1 << 20),
                                   stride<C>(C::kCos, 0, 24),
                                   stride<C>(C::kSin, 0, 24),
                                   stride<C>(C::kPageTable, 0, 7),
                                   stride<C>(C::kPageTable, 1, 2),
                               });
}

void gathers_are_told_apart() {
  using C = Gather;
  check_all_told_apart<C>(C(), {
                                   [](C* c) { *c = C(101); },
                                   [](C* c) { *c = c->with(C::kSeqused, {2}); },
                                   [](C* c) { *c = c->with(C::kBegin, {2}); },
                                   [](C* c) { *c = c->with(C::kPageTable, {2, 4}); },
                                   [](C* c) {
                                     (*c)[C::kPageTable].given = false;
                                     *c = c->with(C::kBatchIndex, {2});
                                   },
                                   [](C* c) { (*c)[C::kVCache].given = (*c)[C::kV].given = false; },
                                   [](C* c) { c->kernel = "sm89"; },
                                   [](C* c) { c->retype(kHalf, kBf16); },
                                   [](C* c) { c->retype(kHalf, kFloat); },
                                   [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
                                   stride<C>(C::kK, 0, 1 << 20),
                                   stride<C>(C::kV, 0, 1 << 20),
                                   stride<C>(C::kKCache, 0, 0),
                                   stride<C>(C::kVCache, 1, 0),
                                   stride<C>(C::kPageTable, 0, 7),
                                   stride<C>(C::kPageTable, 1, 2),
                               });
}

void merges_are_told_apart() {
  using C = Merge;
  check_all_told_apart<C>(
      C(), {
               [](C* c) { *c = C(101); },
               [](C* c) { (*c)[C::kPriorOut].given = (*c)[C::kPriorLse].given = false; },
               [](C* c) { (*c)[C::kLse].given = false; },
               [](C* c) { (*c)[C::kOuts].view.dtype = kBf16; },
               [](C* c) { (*c)[C::kPriorOut].view.dtype = kBf16; },
               [](C* c) { (*c)[C::kOut].view.dtype = kBf16; },
               [](C* c) { c->kernel = "sm89"; },
               [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
               stride<C>(C::kOuts, 0, 0),
               stride<C>(C::kLses, 1, 0),
               stride<C>(C::kPriorOut, 1, 0),
               stride<C>(C::kPriorLse, 2, 0),
               stride<C>(C::kOut, 0, 1 << 20),
               stride<C>(C::kLse, 0, 1 << 20),
           });
}

// Nothing but where gate and up begin tells these two apart, and a plan does not depend on it.
void gate_and_up_may_change_places() {
  Forward call;
  const char* const w = static_cast<const char*>(call[Forward::kGateUp].view.data);
  const char* const second = w + 16 * 64 * 2;
  CHECK(planned(call));
  CHECK(launched.as<MoeForwardProblem>().gate.data == w);
  CHECK(launched.as<MoeForwardProblem>().up.data == second);
  call.params.gate = FLASHMOE_MOE_UP_GATE;
  CHECK(!planned(call));
  CHECK(launched.as<MoeForwardProblem>().gate.data == second);
  CHECK(launched.as<MoeForwardProblem>().up.data == w);
}

void products_are_told_apart() {
  using C = Product;
  check_all_told_apart<C>(C(), {
                                   [](C* c) { *c = C(101); },
                                   [](C* c) { *c = C::with_counts(); },
                                   [](C* c) { (*c)[C::kBias].set({8, 16}, kHalf); },
                                   [](C* c) { (*c)[C::kBias].set({8, 16}, kFloat); },
                                   [](C* c) { c->kernel = "sm89"; },
                                   [](C* c) { c->retype(kHalf, kBf16); },
                                   [](C* c) { c->put_on({FLASHMOE_DEVICE_CUDA, 1}); },
                                   stride<C>(C::kX, 0, 72),
                                   stride<C>(C::kOut, 0, 24),
                                   stride<C>(C::kW, 0, 0),
                                   stride<C>(C::kW, 1, 72),
                                   [](C* c) {
                                     (*c)[C::kW].set({8, 24, 64}, kHalf);
                                     (*c)[C::kOut].set({100, 24}, kHalf);
                                   },
                                   [](C* c) {
                                     (*c)[C::kW].set({7, 16, 64}, kHalf);
                                     (*c)[C::kOffsets].set({8}, kInteger);
                                   },
                               });
  check_all_told_apart<C>(C::with_counts(), {
                                                stride<C>(C::kX, 0, 1 << 20),
                                                stride<C>(C::kOut, 0, 1 << 20),
                                            });
}

// What lies behind an older caller's struct is not its own.
void older_callers_give_no_window() {
  Attention call;
  call.params.window = FLASHMOE_WINDOW_LEFT;
  call.params.window_left = 9;
  Attention old = call;
  old.params.struct_size = offsetof(flashmoe_attention_forward_params, window);
  CHECK(planned(old));
  CHECK(!launched.as<AttentionProblem>().bounded_left);
  CHECK(planned(call));
  CHECK(launched.as<AttentionProblem>().bounded_left);
  CHECK(!planned(old));
  CHECK(!launched.as<AttentionProblem>().bounded_left);
}

void strides_that_are_absent_are_those_of_contiguous_tensors() {
  Attention call;
  planned(call);
  const int before = plans;
  CHECK(run<Attention>(call.ready(true)) == FLASHMOE_OK && plans == before);
  call[Attention::kQ].strides[1] = 136;  // not looked at
  CHECK(run<Attention>(call.ready(true)) == FLASHMOE_OK && plans == before);
  CHECK(launched.as<AttentionProblem>().q.strides.seq == 128);
  CHECK(planned(call));
  CHECK(launched.as<AttentionProblem>().q.strides.seq == 136);
}

void a_kernels_name_is_the_callers() {
  Attention call;
  call.kernel = "attention_forward_sm89_x";
  CHECK(failure(call) ==
        "kernel: cannot be served: sm89: many serves this call, not attention_forward_sm89_x");
  call.kernel = "sm89";
  CHECK(planned(call));
  CHECK(launched.family == "sm89");
  {
    const Attention other = call;  // whose text lies elsewhere, and goes
    CHECK(!planned(other));
  }
  call.kernel = std::string(100, 'x');  // longer than any kernel's
  for (int i = 0; i < 2; ++i) CHECK(failure(call).find("kernel: got \"xxxx") == 0);
  // Cut between characters, and made of characters.
  for (const char* broken : {"sm\xff", "sm\x80", "sm\xc0\xed\xa0", "sm\xf8\xf0\x80\xf4\xa0\xa9"}) {
    call.kernel = broken;
    CHECK(failure(call).find("kernel: got \"sm?") == 0);
    CHECK(failure(call).find_first_of("\x80\xa0\xc0\xed\xf0\xf4\xf8\xff") == std::string::npos);
  }
  call.kernel.clear();
  planned(call);
  call.ready();
  const int before = plans;
  call.params.kernel = "";
  CHECK(run<Attention>(&call.params) == FLASHMOE_OK && plans == before);  // no name, in other words
}

// ---- what is looked at in every call
// -------------------------------------------------------------

void addresses_are_checked_every_time() {
  Attention call;
  CHECK(planned(call));
  for (size_t i = 0; i < Attention::kLse; ++i) {
    const std::string name = Attention::kNames[i];
    Attention bad = call;
    bad[i].view.data = static_cast<char*>(bad[i].view.data) + 8;
    CHECK(failure(bad).find(name + ": its data begins") == 0);
    bad = call;
    bad[i].view.byte_offset = 8;
    CHECK(failure(bad).find(name + ": its data begins") == 0);
    bad = call;
    bad[i].view.data = nullptr;
    CHECK(failure(bad).find(name + ": its data is a null pointer") == 0);
    CHECK(!planned(call));
  }
}

// The first and the last byte that an output may not share with another tensor, after calls in
// which they lay apart.
template <class Call>
void outputs_may_not_come_to_overlap(const Call& call) {
  CHECK(planned(call));
  for (size_t i = Call::kFirstOutput; i < call.tensors.size(); ++i) {
    if (!call.tensors[i].given) continue;
    for (size_t j = 0; j < call.tensors.size(); ++j) {
      if (i == j || !call.tensors[j].given) continue;
      const auto bytes = [&call](size_t of) {
        const Tensor& tensor = call.tensors[of];
        int64_t product = tensor.view.dtype.bits / 8;
        for (int32_t axis = 0; axis < tensor.view.ndim; ++axis) product *= tensor.shape[axis];
        return product;
      };
      const std::string sentence = std::string(Call::kNames[std::max(i, j)]) +
                                   ": it shares memory with " + Call::kNames[std::min(i, j)] +
                                   ", accepted is memory that overlaps no other tensor of the call";
      const auto there = reinterpret_cast<uintptr_t>(call.tensors[j].view.data);
      const auto at = [&](int64_t offset) {
        Call moved = call;
        moved.at(i, there + static_cast<uintptr_t>(offset));
        return moved;
      };
      const int64_t last = (bytes(j) - 1) / 16 * 16;
      for (const int64_t offset : {int64_t{0}, last, 16 - (bytes(i) + 15) / 16 * 16}) {
        CHECK(failure(at(offset)) == sentence);
      }
      const int64_t behind = (bytes(j) + 15) / 16 * 16;
      for (const int64_t offset : {behind, -((bytes(i) + 15) / 16 * 16)}) {
        CHECK(!planned(at(offset)));
      }
    }
  }
}

void overlaps_are_seen_every_time() {
  Attention attention;
  attention[Attention::kLse].given = true;
  outputs_may_not_come_to_overlap(attention);
  Route route;
  route[Route::kLse].set({100}, kFloat);
  outputs_may_not_come_to_overlap(route);
  outputs_may_not_come_to_overlap(full_layer());
  outputs_may_not_come_to_overlap(Product());
}

// q, k, v and out as slices of one tensor, forwards and, from the last row on, backwards.
void slices_of_one_tensor_stay_known() {
  Attention call(16, 16, 2, 64);
  char* const data = static_cast<char*>(call[Attention::kQ].view.data);
  for (size_t i = 0; i < Attention::kLse; ++i) {
    call[i].strides[1] = 4 * 128;
    call[i].strides[0] = 16 * 4 * 128;
    call[i].view.data = data + i * 256;
  }
  CHECK(planned(call));
  CHECK(!planned(call));
  Attention bad = call;
  bad[Attention::kOut].view.data = data + 256;
  CHECK(failure(bad).find("out: it shares memory with k") == 0);
  bad[Attention::kOut].view.data = data + 3 * 256 - 16;
  CHECK(failure(bad).find("out: it shares memory with v") == 0);
  for (const size_t i : {Attention::kK, Attention::kV, Attention::kOut}) {
    call[i].view.data = static_cast<char*>(call[i].view.data) + 31 * 4 * 256;
    call[i].strides[1] *= -1;
    call[i].strides[0] *= -1;
  }
  CHECK(planned(call));
  CHECK(!planned(call));
  CHECK(launched.as<AttentionProblem>().out.strides.seq == -4 * 128);
  call[Attention::kOut].view.data = call[Attention::kV].view.data;
  CHECK(failure(call).find("out: it shares memory with v") == 0);
}

void inputs_may_overlap() {
  Attention call(100, 100);
  for (const size_t i : {Attention::kK, Attention::kV}) call.at(i, kData);
  CHECK(planned(call));
  CHECK(!planned(call));
}

void failures_are_not_kept() {
  Attention call;
  call[Attention::kQ].view.device.device_id = 1;
  for (int i = 0; i < 2; ++i) {
    CHECK(failure(call).find("k: it is on cuda:0 but q is on cuda:1") == 0);
  }
  Attention nowhere;
  nowhere.put_on({FLASHMOE_DEVICE_CUDA, 2});
  for (int i = 0; i < 3; ++i) CHECK(failure(nowhere) == "sm89: device cuda:2 does not exist");
}

void fp32_is_for_the_cpu() {
  const std::string sentence =
      ": it is on cuda:0 and of dtype fp32, accepted on a GPU are fp16 and bf16, on the CPU also "
      "fp32 and fp64";
  Attention call;
  call.retype(kHalf, kFloat);
  for (const char* kernel : {"", "sm89", "cpu", "attention_forward_sm90_fp32"}) {
    call.kernel = kernel;
    CHECK(run<Attention>(call.ready()) == FLASHMOE_ERROR_UNSUPPORTED);
    CHECK(failure(call) == "q" + sentence);
  }
  Forward layer;
  layer.retype(kHalf, kFloat);
  CHECK(failure(layer) == "x" + sentence);
  layer.put_on({FLASHMOE_DEVICE_CPU, 0});
  CHECK(planned(layer));
}

// The family of the least time, whichever was the last.
void the_least_time_serves_a_call() {
  Attention few(3, 200);
  CHECK(planned(few));
  CHECK(launched.family == "sm89_few_rows");
  CHECK(planned(Attention(1000, 200)));
  CHECK(launched.family == "sm90");  // the first of two that take as long
  CHECK(planned(Forward(3)));
  CHECK(launched.family == "sm89_few_tokens");
  CHECK(planned(Forward(501)));
  CHECK(launched.family == "sm90");
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(few.ready(), &plan) == FLASHMOE_OK);
  CHECK(std::strcmp(plan.operation, "attention_forward") == 0);
  CHECK(std::strcmp(plan.family, "sm89_few_rows") == 0 && plan.microseconds == 131);
  CHECK(std::strcmp(plan.rejected,
                    "sm89_decode: a dense batch\n"
                    "mixed: accepted are batches whose sequences may have more than 32 queries\n"
                    "sm90_mla: a dense batch\n"
                    "sm90: takes 500.0 us by its estimate, sm89_few_rows 131.0 us\n"
                    "sm89: takes 500.0 us by its estimate, sm89_few_rows 131.0 us\n"
                    "cpu: the tensors are on cuda:0, it computes on the CPU\n") == 0);
}

// Those that bend no logit: kernels multiply a softcap by log2(e), and divide by it.
void softcaps_that_change_nothing_are_left_out() {
  struct Case {
    float softcap, scale;
    bool kept;
  };
  const Case cases[] = {{50.0f, 1.0f, true},   {9e37f, 4.0f, true},   {2e38f, 4.0f, false},
                        {3e38f, 4.0f, false},  {1e37f, 1e-3f, false}, {1e-45f, 1e38f, true},
                        {1e30f, 1e-30f, false}};
  for (const Case& one : cases) {
    Attention call;
    call.params.softcap = one.softcap;
    call.params.scale = one.scale;
    CHECK(run<Attention>(call.ready()) == FLASHMOE_OK);
    const auto& p = launched.as<AttentionProblem>();
    CHECK(p.softcap == (one.kept ? one.softcap : 0.0f));
    CHECK((p.cap_ratio > 0.0f) == one.kept);
    CHECK(std::isfinite(p.cap_ratio));
  }
}

void empty_calls_launch_nothing() {
  Attention call(0, 200);
  const int before = launched.count;
  for (int i = 0; i < 3; ++i) CHECK(run<Attention>(call.ready()) == FLASHMOE_OK);
  call[Attention::kQ].view.data = nullptr;
  for (int i = 0; i < 3; ++i) CHECK(run<Attention>(call.ready()) == FLASHMOE_OK);
  CHECK(launched.count == before);
  Attention keyless(100, 0);
  CHECK(planned(keyless));
  for (const size_t i : {Attention::kK, Attention::kV}) keyless[i].view.data = nullptr;
  for (int i = 0; i < 2; ++i) {
    CHECK(run<Attention>(keyless.ready()) == FLASHMOE_OK);
    const auto& p = launched.as<AttentionProblem>();
    CHECK(p.k.data == nullptr && p.v.data == nullptr);
  }
}

// ---- when nothing is kept
// ------------------------------------------------------------------------

void calls_on_the_cpu_are_planned_every_time() {
  Attention call;
  call.put_on({FLASHMOE_DEVICE_CPU, 0});
  for (int i = 0; i < 3; ++i) {
    CHECK(planned(call));
    CHECK(launched.family == "cpu");
  }
}

// A callback that calls the library while a call is under way must not change it.
void a_callback_may_call(int32_t level) {
  struct Inner {
    Attention call{300, 200};
    int depth = 0;
  } inner;
  inner.call.move(1 << 21);
  const auto reenter = [](int32_t, const char*, void* user) {
    Inner& self = *static_cast<Inner*>(user);
    if (self.depth++ != 0) return;
    // As many others as there are slots, and more.
    for (int i = 0; i < 20; ++i) {
      Attention other(400 + i, 200);
      CHECK(run<Attention>(other.ready()) == FLASHMOE_OK);
    }
    CHECK(run<Attention>(self.call.ready()) == FLASHMOE_OK);
  };
  Attention call;
  planned(call);
  CHECK(flashmoe_set_log(level, reenter, &inner) == FLASHMOE_OK);
  for (int i = 0; i < 2; ++i) {
    const int before = plans;
    CHECK(run<Attention>(call.ready()) == FLASHMOE_OK);
    CHECK(plans != before);
    const auto& p = launched.as<AttentionProblem>();
    CHECK(p.q.data == call[Attention::kQ].view.data &&
          p.out.data == call[Attention::kOut].view.data);
    CHECK(p.seq_q == 100 && launched.plan.launches[0].grid[0] == 228);
  }
  CHECK(inner.depth > 1);
  CHECK(flashmoe_set_log(FLASHMOE_LOG_OFF, nullptr, nullptr) == FLASHMOE_OK);
  CHECK(!planned(call));  // kept from before the log
}

void callbacks_may_call() {
  a_callback_may_call(FLASHMOE_LOG_INFO);
  a_callback_may_call(FLASHMOE_LOG_DEBUG);
}

void without_memory_calls_are_planned_every_time() {
  const Attention call;
  out_of_memory = true;
  for (int i = 0; i < 3; ++i) CHECK(planned(call));
  out_of_memory = false;
  CHECK(planned(call));
  CHECK(!planned(call));
}

// ---- all together
// --------------------------------------------------------------------------------

// Any sequence of calls, right and wrong, against the same calls on threads that know none.
void random_calls_come_to_what_they_come_to_alone() {
  std::mt19937 random(0);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int known = 0;
  int failed = 0;
  for (int i = 0; i < 6000; ++i) {
    Attention call(below(2) == 0 ? 100 : 3, 16 + 8 * below(2), 2, 64);
    const auto any = [&]() -> Tensor& { return call[static_cast<size_t>(below(5))]; };
    call[Attention::kLse].given = below(3) == 0;
    call.move(16 * below(4));
    if (below(4) == 0) call.params.causal = below(4);
    if (below(4) == 0) {
      const char* const names[] = {"sm89", "sm90", "cpu", "sm", "attention_forward_sm90_fp16"};
      call.kernel = names[below(5)];
    }
    switch (below(12)) {
      case 0: any().strides[below(3)] += 8; break;
      case 1: any().strides[below(3)] *= -1; break;
      case 2: any().shape[below(4)] += 1; break;
      case 3: any().view.data = reinterpret_cast<void*>(kData + 8); break;
      case 4: any().view.data = nullptr; break;
      case 5: any().view.device.device_id = 1; break;
      case 6: any().view.byte_offset = 16; break;
      case 7: any().view.ndim = 3; break;
      case 8: call.put_on({FLASHMOE_DEVICE_CUDA, 1 + below(2)}); break;
      default: break;
    }
    if (below(8) == 0) call.params.window = static_cast<uint32_t>(below(4));
    if (below(8) == 0) call.params.scale = below(2) == 0 ? 0.25f : -1.0f;
    const bool contiguous = below(6) == 0;

    flashmoe_status want = FLASHMOE_OK;
    Launched alone;
    std::string sentence;
    std::thread([&] {
      want = run<Attention>(call.ready(contiguous));
      alone = launched;
      sentence = flashmoe_last_error();
    }).join();
    const int before = plans;
    const int launches = launched.count;
    CHECK(run<Attention>(call.ready(contiguous)) == want);
    CHECK(launched.count - launches == alone.count);
    if (want != FLASHMOE_OK) {
      CHECK(sentence == flashmoe_last_error());
      ++failed;
      continue;
    }
    known += plans == before ? 1 : 0;
    if (alone.count == 0) continue;
    CHECK(launched.family == alone.family && launched.problem == alone.problem);
    CHECK(std::memcmp(&launched.plan, &alone.plan, sizeof alone.plan) == 0);
  }
  CHECK(known > 200 && failed > 500);
}

void threads_know_their_own_calls() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      Attention calls[] = {Attention(1000 + i, 200), Attention(3, 200 + i), Attention(1000, 200)};
      for (int round = 0; round < 2000; ++round) {
        Attention& call = calls[round % 3];
        call.move(16 * (i + 1));
        CHECK(run<Attention>(call.ready()) == FLASHMOE_OK);
        const auto& p = launched.as<AttentionProblem>();
        CHECK(p.q.data == call[Attention::kQ].view.data &&
              p.out.data == call[Attention::kOut].view.data);
        CHECK(p.seq_q == call[Attention::kQ].shape[1]);
        CHECK(launched.family == (round % 3 == 1 ? "sm89_few_rows" : "sm90"));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace flashmoe

int main() {
  using namespace flashmoe;
  void (*const tests[])() = {
      a_plan_is_found_wherever_tensors_lie,
      a_field_counts_for_being_declared,
      a_forgotten_address_finds_too_little,
      slots_are_replaced_in_turn,
      a_new_plan_has_nothing_prepared,
      every_byte_of_a_problem_counts,
      calls_are_planned_once,
      a_launch_gets_the_addresses_of_its_call,
      a_query_of_the_workspace_plans_for_the_call,
      alternating_shapes_stay_known,
      operations_have_plans_of_their_own,
      attention_calls_are_told_apart,
      routings_are_told_apart,
      layers_are_told_apart,
      gate_and_up_may_change_places,
      products_are_told_apart,
      appends_are_told_apart,
      gathers_are_told_apart,
      merges_are_told_apart,
      older_callers_give_no_window,
      strides_that_are_absent_are_those_of_contiguous_tensors,
      a_kernels_name_is_the_callers,
      addresses_are_checked_every_time,
      overlaps_are_seen_every_time,
      slices_of_one_tensor_stay_known,
      inputs_may_overlap,
      failures_are_not_kept,
      fp32_is_for_the_cpu,
      the_least_time_serves_a_call,
      softcaps_that_change_nothing_are_left_out,
      empty_calls_launch_nothing,
      calls_on_the_cpu_are_planned_every_time,
      callbacks_may_call,
      without_memory_calls_are_planned_every_time,
      random_calls_come_to_what_they_come_to_alone,
      threads_know_their_own_calls,
  };
  // Each on a thread of its own, which knows no call yet.
  for (const auto test : tests) std::thread(test).join();
  return 0;
}
