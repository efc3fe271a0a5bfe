// The sm_89 family, which serves every layer and grouped product: its kernels, and the parameters
// of their launches.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/combine/stage.h"
#include "cuda/moe/cost.h"
#include "cuda/moe/sm89/entry.h"
#include "cuda/moe/sm89/params.h"
#include "cuda/moe/sm89/stage.h"

namespace flashmoe::moe::sm89 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/moe/sm89/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/moe/sm89/entries.inc"
#undef FLASHMOE_ENTRY
};

constexpr int64_t kWorkspaceAlignment = 256;
// Limits of the kernels. They number columns in 32 bits, twice as many if those of gate and up
// alternate, and round them up to tiles. They clamp sums of token tiles to this number.
constexpr int64_t kMostColumns = int64_t{1} << 30;
constexpr int64_t kMostTokenTiles = int64_t{1} << 30;
// The kernels count rows of x in pieces of 16 bytes, in 32 bits.
constexpr int64_t kMostElementsOfX = (int64_t{1} << 32) * 8 - 8;

const Entry* find_entry(Dtype dtype, bool gated, bool transposed) {
  for (const Entry* entry : kEntries) {
    if (entry->dtype == dtype && entry->gated == gated && entry->transposed == transposed) {
      return entry;
    }
  }
  return nullptr;
}

}  // namespace

// Plans as many blocks as run at once, or as there can be tiles.
flashmoe_status add_product(const DeviceFacts& facts, flashmoe_device device, Dtype dtype,
                            bool gated, bool transposed, const Names& names, const Extents& extents,
                            int experts, Plan* plan, const Reason& reason) {
  const Entry* entry = find_entry(dtype, gated, transposed);
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these weights");
  }
  if (extents.columns > kMostColumns || extents.out_columns > kMostColumns) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s: got %lld rows of %lld columns, accepted are at most 2^30 of each",
                         names.weights, static_cast<long long>(extents.out_columns),
                         static_cast<long long>(extents.columns));
  }
  if (extents.x_stride < 0 ||
      extents.x_rows > kMostElementsOfX / std::max<int64_t>(extents.x_stride, 1)) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "%s: got %lld rows that are %lld elements apart, accepted are strides of 0 "
        "or more and less than 64 GiB",
        names.rows, static_cast<long long>(extents.x_rows),
        static_cast<long long>(extents.x_stride));
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, device.device_id, facts, &arch, reason));
  // A tile that is not full is its expert's last one.
  const int64_t token_tiles = extents.experts * (extents.rows / entry->tile_tokens) +
                              std::min<int64_t>(experts, extents.experts * extents.rows);
  if (token_tiles > kMostTokenTiles) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s: got %lld rows for each of %lld experts, accepted are at most 2^30 "
                         "tiles of %d rows",
                         names.rows, static_cast<long long>(extents.rows),
                         static_cast<long long>(extents.experts), entry->tile_tokens);
  }
  const int64_t most = int64_t{facts.multiprocessors} * entry->blocks_per_sm;
  const int64_t weight_tiles = ceil_div(extents.out_columns, entry->out_rows);
  const int64_t blocks = token_tiles > most ? most : std::min(most, token_tiles * weight_tiles);
  flashmoe_launch& launch = plan_launch(*entry, device.device_id, "", std::max<int64_t>(blocks, 1),
                                        entry->threads, entry->shared_bytes, plan);
  launch.tile_m = entry->tile_rows;
  launch.tile_n = entry->tile_tokens;
  launch.stages = entry->stages;
  return FLASHMOE_OK;
}

namespace {

Bias bias_of(const ExpertBias& bias) {
  return {bias.data, bias.expert_stride, bias.row_stride, bias.dtype == Dtype::kFloat32 ? 1 : 0};
}

// For compute capability 9.0 these are fitted to measurements on an H200 (docs/lab/moe.md),
// elsewhere they are estimates: GPUs with fewer bytes per clock reach more of the memory's peak.
Speed layer_speed(const DeviceFacts& facts) {
  if (facts.compute_capability == 90) return {36, 0.45, 2.6e6};
  return {36, 0.8, 1e6};
}
Speed product_speed(const DeviceFacts& facts) {
  Speed speed = layer_speed(facts);
  speed.start = 8;
  return speed;
}

}  // namespace

void fill_extents(const Extents& extents, int experts, flashmoe_device device, const Plan& plan,
                  int index, Params* params) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[index]);
  params->rows = static_cast<int32_t>(extents.rows);
  params->columns = static_cast<int32_t>(extents.columns);
  params->out_columns = static_cast<int32_t>(extents.out_columns);
  params->experts = experts;
  params->weight_tiles = static_cast<int32_t>(ceil_div(extents.out_columns, entry.out_rows));
  // Rows of x get a third of the L2, beside the weights that stream through and the output rows. If
  // that is few tiles, blocks run along K together, and concurrent blocks must share rows and
  // weights: kSquareTiles by as many as there are blocks for.
  constexpr int64_t kSquareTiles = 8;
  const DeviceFacts* facts = nullptr;
  int64_t l2_bytes = 0;
  if (read_device_facts(device.device_id, &facts, Reason()) == FLASHMOE_OK)
    l2_bytes = facts->l2_bytes;
  const int64_t tile_bytes = entry.tile_tokens * extents.columns * dtype_bytes(extents.x_dtype);
  const int64_t most = INT_MAX / params->weight_tiles;
  params->swizzle_token_tiles =
      static_cast<int32_t>(std::min(std::max(l2_bytes / 3 / tile_bytes, kSquareTiles), most));
}

flashmoe_status check_layouts(const MoeForwardProblem& problem, const Reason& reason) {
  if (!problem.gated || is_transposed(problem.gate) == is_transposed(problem.up)) {
    return FLASHMOE_OK;
  }
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "w_up: got %s weights, and w_gate_up others, accepted are both transposed "
                       "or neither",
                       is_transposed(problem.up) ? "transposed" : "row-major");
}

Extents extents_of_up(const MoeForwardProblem& p) {
  return {p.tokens * p.top_k, 1, p.hidden, p.inner, p.tokens, p.x.row_stride, p.x.dtype};
}

namespace {

Extents extents_of_down(const MoeForwardProblem& p) {
  return {p.tokens * p.top_k, 1, p.inner, p.hidden, p.tokens * p.top_k, p.inner, p.x.dtype};
}

// The workspace has a [slots, inner], then y [slots, hidden].
int64_t activated_bytes(const MoeForwardProblem& p) {
  return ceil_div(p.tokens * p.top_k * p.inner * dtype_bytes(p.x.dtype), kWorkspaceAlignment) *
         kWorkspaceAlignment;
}

flashmoe_status plan_forward(const MoeForwardProblem& problem, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(problem.device.device_id, &facts, reason));
  FLASHMOE_TRY(check_layouts(problem, reason));
  FLASHMOE_TRY(add_product(*facts, problem.device, problem.x.dtype, problem.gated,
                           is_transposed(problem.up), {"w_gate_up", "x"}, extents_of_up(problem),
                           problem.experts, plan, reason));
  FLASHMOE_TRY(add_product(*facts, problem.device, problem.x.dtype, false,
                           is_transposed(problem.down), {"w_down", "weights"},
                           extents_of_down(problem), problem.experts, plan, reason));
  FLASHMOE_TRY(add_combine(problem, *facts, plan, reason));
  plan->info.microseconds = microseconds(work_of(problem), layer_speed(*facts), *facts);
  plan->info.workspace_bytes = static_cast<uint64_t>(
      activated_bytes(problem) +
      problem.tokens * problem.top_k * problem.hidden * dtype_bytes(problem.x.dtype));
  return FLASHMOE_OK;
}

}  // namespace

Params up_params(const MoeForwardProblem& p, const Plan& plan, int index, void* activated) {
  Params params = {};
  fill_extents(extents_of_up(p), p.experts, p.device, plan, index, &params);
  params.x = static_cast<const uint16_t*>(p.x.data);
  params.x_stride = p.x.row_stride;
  params.out = static_cast<uint16_t*>(activated);
  params.out_stride = p.inner;
  params.pre_activation = static_cast<uint16_t*>(p.pre_activation.data);
  params.pre_activation_stride = p.pre_activation.row_stride;
  if (p.gated) {
    params.weights[0] = weights_of(p.gate);
    params.weights[1] = weights_of(p.up);
    params.bias[0] = bias_of(p.gate_bias);
    params.bias[1] = bias_of(p.up_bias);
    params.interleaved = is_transposed(p.gate) && p.gate.row_stride != 1 ? 1 : 0;
  } else {
    params.weights[0] = weights_of(p.up);
    params.bias[0] = bias_of(p.up_bias);
  }
  params.offsets = p.offsets;
  params.pairs = p.pairs;
  params.pair_weights = p.weight_on_input ? p.weights : nullptr;
  params.top_k = p.top_k;
  params.activation = p.activation;
  params.alpha = p.alpha;
  params.limit = p.limit;
  params.up_offset = p.up_offset;
  return params;
}

namespace {

Params down_params(const MoeForwardProblem& p, const Plan& plan, const void* activated, void* y) {
  Params params = {};
  fill_extents(extents_of_down(p), p.experts, p.device, plan, 1, &params);
  params.x = static_cast<const uint16_t*>(activated);
  params.x_stride = p.inner;
  params.out = static_cast<uint16_t*>(y);
  params.out_stride = p.hidden;
  params.weights[0] = weights_of(p.down);
  params.bias[0] = bias_of(p.down_bias);
  params.offsets = p.offsets;
  params.top_k = 1;
  params.activation = kNoActivation;
  return params;
}

flashmoe_status launch_forward(const MoeForwardProblem& problem, const Plan& plan, void* workspace,
                               void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  unsigned char* const activated = static_cast<unsigned char*>(workspace);
  unsigned char* const y = activated + activated_bytes(problem);
  const Params up = up_params(problem, plan, 0, activated);
  FLASHMOE_TRY(launch_planned(plan, 0, &up, stream));
  const Params down = down_params(problem, plan, activated, y);
  FLASHMOE_TRY(launch_planned(plan, 1, &down, stream));
  return launch_combine(problem, plan, 2, y, problem.hidden, stream);
}

Extents extents_of(const GroupedProductProblem& p) {
  return {p.rows,    p.counts != nullptr ? p.experts : 1,
          p.columns, p.out_columns,
          p.rows,    p.x.row_stride,
          p.x.dtype};
}

flashmoe_status plan_product(const GroupedProductProblem& problem, Plan* plan,
                             const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(problem.device.device_id, &facts, reason));
  plan->info.microseconds = microseconds(work_of(problem), product_speed(*facts), *facts);
  return add_product(*facts, problem.device, problem.x.dtype, false, is_transposed(problem.w),
                     {"w", "x"}, extents_of(problem), problem.experts, plan, reason);
}

flashmoe_status launch_product(const GroupedProductProblem& problem, const Plan& plan, void*,
                               void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  Params params = {};
  fill_extents(extents_of(problem), problem.experts, problem.device, plan, 0, &params);
  params.x = static_cast<const uint16_t*>(problem.x.data);
  params.x_stride = problem.x.row_stride;
  params.x_expert_stride = problem.x.expert_stride;
  params.out = static_cast<uint16_t*>(problem.out.data);
  params.out_stride = problem.out.row_stride;
  params.out_expert_stride = problem.out.expert_stride;
  params.weights[0] = weights_of(problem.w);
  params.bias[0] = bias_of(problem.bias);
  params.offsets = problem.offsets;
  params.counts = problem.counts;
  params.top_k = 1;
  params.activation = kNoActivation;
  return launch_planned(plan, 0, &params, stream);
}

}  // namespace
}  // namespace flashmoe::moe::sm89

namespace flashmoe {

const MoeForwardFamily kSm89MoeForward = {"sm89", FLASHMOE_DEVICE_CUDA, &moe::sm89::plan_forward,
                                          &moe::sm89::launch_forward};
const GroupedProductFamily kSm89GroupedProduct = {
    "sm89", FLASHMOE_DEVICE_CUDA, &moe::sm89::plan_product, &moe::sm89::launch_product};

}  // namespace flashmoe
