// The sm89_few_tokens family: which pair of kernels serves a layer with few tokens, and the
// parameters of their launches.
#include <algorithm>
#include <climits>
#include <cmath>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/gpu_model.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/sm89_few_tokens/cost.h"
#include "cuda/moe/sm89_few_tokens/entry.h"
#include "cuda/moe/sm89_few_tokens/params.h"

namespace flashmoe::moe::sm89_few_tokens {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/moe/sm89_few_tokens/entries.inc"
#if FLASHMOE_WITH_SM90
#include "cuda/moe/sm90_few_tokens/entries.inc"
#endif
#undef FLASHMOE_ENTRY

namespace {

constexpr int64_t kWorkspaceAlignment = 256;
constexpr int64_t kMostColumns = int64_t{1} << 24;  // of H and I: products with steps fit int32

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/moe/sm89_few_tokens/entries.inc"
#if FLASHMOE_WITH_SM90
#include "cuda/moe/sm90_few_tokens/entries.inc"
#endif
#undef FLASHMOE_ENTRY
};

// Allows a kernel all the shared memory of a block, and asks for the largest split of a
// multiprocessor's memory: two kernels share it.
cudaError_t allow_shared_memory(const Kernel& kernel, int device_id, const DeviceFacts& facts,
                                const cudaFuncAttributes& attributes, bool) {
  if (is_gpu_model(device_id)) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
      facts.shared_bytes_per_block - static_cast<int>(attributes.sharedSizeBytes));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

const Entry* find_entry(Dtype dtype, const Tile& tile) {
  for (const Entry* entry : kEntries) {
    if (entry->dtype == dtype && entry->bulk == tile.bulk && entry->tiles == tile.tiles &&
        entry->tokens == tile.tokens) {
      return entry;
    }
  }
  return nullptr;
}

const Entry& entry_of(const Plan& plan) {
  for (const Entry* entry : kEntries) {
    if (&entry->up == plan.entries[0]) return *entry;
  }
  return *kEntries[0];
}

// Columns per stage of both launches.
struct Columns {
  int up;
  int down;
};

Columns choose_columns(const MoeForwardProblem& p, const Entry& entry) {
  if (!entry.bulk) return {entry.max_columns, entry.max_columns};
  return {static_cast<int>(choose_stage_columns(p.hidden, entry.max_columns)),
          static_cast<int>(choose_stage_columns(p.inner, entry.max_columns))};
}

// Bytes of weights per stage of the bulk kernels.
int64_t bulk_weight_bytes(int columns) { return kBulkRowsOfStage * columns * 2; }

// Stages and shared memory of both launches.
struct Depths {
  int up_stages;
  int down_stages;
  int64_t up_bytes;
  int64_t down_bytes;
};

// Stages of the bulk kernels for so many bytes of weights.
int bulk_stages(const Entry& entry, int columns, int64_t bytes) {
  return static_cast<int>(
      std::min<int64_t>(ceil_div(bytes, bulk_weight_bytes(columns)), entry.max_stages));
}

// Static shared memory, of which the kernels have little, plus a block's overhead beside its own.
constexpr int64_t kStaticBytes = 256;
int64_t beside(const DeviceFacts& facts) {
  return facts.reserved_shared_bytes_per_block + kStaticBytes;
}

// If both stages may run concurrently, each has a block on every multiprocessor. They have as many
// steps in flight as fit together, and no room for a second block of the second stage, which would
// leave another multiprocessor idle. 0 stages if they do not fit.
Depths choose_depths(const Entry& entry, SharedShape shape, const Columns& columns,
                     bool side_by_side, const DeviceFacts& facts) {
  const auto up_bytes = [&](int stages) {
    shape.stages = stages;
    shape.stage_columns = columns.up;
    return static_cast<int64_t>(entry.up_bytes(shape));
  };
  const auto down_bytes = [&](int stages) {
    shape.stages = stages;
    shape.stage_columns = columns.down;
    return static_cast<int64_t>(entry.down_bytes(shape));
  };
  const int64_t block = facts.shared_bytes_per_block - kStaticBytes;
  const int64_t all = facts.shared_bytes_per_multiprocessor;
  // Bounds: the most and the fewest stages of `up`, and of `down` the most, and the fewest before
  // `up` gives up a stage.
  int most_up = kUpStages[entry.tiles - 1];
  int least_up = most_up;
  int most_down = kDownStages[entry.tiles - 1];
  int least_down = 2;
  if (entry.bulk) {
    most_up = bulk_stages(entry, columns.up, kBulkUpBytes);
    least_up = bulk_stages(entry, columns.up, kLeastBulkUpBytes);
    most_down = entry.max_stages;
    least_down = bulk_stages(entry, columns.down, kLeastBulkDownBytes);
  }
  const int64_t more_than_half = all / 2 + 1024;
  for (int up_stages = most_up; side_by_side && up_stages >= least_up; --up_stages) {
    const int64_t up = up_bytes(up_stages);
    for (int stages = most_down; stages >= (up_stages > least_up ? least_down : 2); --stages) {
      if (entry.bulk && stages % 2 != 0 && stages > least_down) continue;  // one group of warps
      const int64_t down = std::max(down_bytes(stages), more_than_half);
      if (down <= block && up + down + 2 * beside(facts) <= all) {
        return {up_stages, stages, up, down};
      }
    }
  }
  Depths made = {least_up, least_up, 0, 0};
  // More stages do not help a kernel that runs alone.
  while (made.up_stages > 1 && up_bytes(made.up_stages) > block) --made.up_stages;
  while (made.down_stages > 1 && down_bytes(made.down_stages) > block) --made.down_stages;
  made.up_bytes = up_bytes(made.up_stages);
  made.down_bytes = down_bytes(made.down_stages);
  if (made.up_bytes > block || made.down_bytes > block) made.up_stages = 0;
  return made;
}

// The layout of the workspace, in bytes from its beginning.
struct Workspace {
  int64_t counters;
  int64_t parts;
  int64_t bytes;
};

int64_t aligned(int64_t bytes) {
  return ceil_div(bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
}

int64_t stripes_of(const MoeForwardProblem& p, const Entry& entry) {
  return ceil_div(p.hidden, 16 * entry.tiles);
}

Workspace lay_out(const MoeForwardProblem& p, const Entry& entry, int64_t down_blocks) {
  Workspace w;
  w.counters = aligned(p.tokens * p.top_k * p.inner * 2);
  w.parts = w.counters + aligned(stripes_of(p, entry) * 4);
  const bool shared = stripes_of(p, entry) % down_blocks != 0;
  w.bytes = w.parts + (shared ? 2 * down_blocks * p.tokens * 16 * entry.tiles * 4 : 0);
  return w;
}

SharedShape shared_shape(const MoeForwardProblem& p, const Entry& entry) {
  SharedShape shape = {};
  shape.entry_tokens = static_cast<int>(
      std::clamp<int64_t>(p.tokens, 1, entry.bulk ? kBulkEntryTokens : entry.tokens));
  shape.pairs = static_cast<int>(p.tokens * p.top_k);
  shape.records = std::clamp(shape.pairs, 1, p.experts);
  shape.tokens = static_cast<int>(p.tokens);
  return shape;
}

flashmoe_status check_row_major(const char* name, const ExpertMatrix& matrix,
                                const Reason& reason) {
  if (matrix.column_stride == 1) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "%s: got transposed weights, with last stride %lld, accepted is 1", name,
                       static_cast<long long>(matrix.column_stride));
}

flashmoe_status check_columns(const char* name, const char* extent, int64_t got,
                              const Reason& reason) {
  if (got <= kMostColumns) return FLASHMOE_OK;
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s: its %s is %lld, accepted are at most %lld",
                       name, extent, static_cast<long long>(got),
                       static_cast<long long>(kMostColumns));
}

flashmoe_status check_layer(const MoeForwardProblem& p, const Reason& reason) {
  if (p.tokens > kMostTokensServed) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "x: got %lld tokens, accepted are at most %lld",
        static_cast<long long>(p.tokens), static_cast<long long>(kMostTokensServed));
  }
  if (p.gated) FLASHMOE_TRY(check_row_major("w_gate_up", p.gate, reason));
  FLASHMOE_TRY(check_row_major(p.gated ? "w_up" : "w_gate_up", p.up, reason));
  FLASHMOE_TRY(check_row_major("w_down", p.down, reason));
  FLASHMOE_TRY(check_columns("x", "hidden size", p.hidden, reason));
  return check_columns("w_down", "number of columns", p.inner, reason);
}

flashmoe_status plan(const MoeForwardProblem& problem, Plan* plan, const Reason& reason) {
  const int device_id = problem.device.device_id;
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_supported(device_id, &facts, reason));
  FLASHMOE_TRY(check_layer(problem, reason));
  const bool hopper = FLASHMOE_WITH_SM90 && facts->compute_capability == 90;
  const Entry* entry = find_entry(
      problem.x.dtype,
      choose_tile(problem.tokens, problem.hidden, problem.inner, facts->multiprocessors, hopper));
  if (entry == nullptr) return reason.refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for this dtype");
  int arch = 0;
  FLASHMOE_TRY(load_kernel(entry->up, device_id, *facts, &arch, reason, allow_shared_memory));
  FLASHMOE_TRY(load_kernel(entry->down, device_id, *facts, &arch, reason, allow_shared_memory));
  const SharedShape shape = shared_shape(problem, *entry);
  const Depths depths = choose_depths(*entry, shape, choose_columns(problem, *entry),
                                      has_clusters(entry->up, device_id), *facts);
  if (depths.up_stages == 0) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "x: got %lld tokens with %d experts each, accepted are as many as fit in "
                         "the %d bytes of a block's shared memory",
                         static_cast<long long>(problem.tokens), problem.top_k,
                         facts->shared_bytes_per_block);
  }

  const int64_t multiprocessors = facts->multiprocessors;
  const int64_t whole = blocks_of_whole_stripes(stripes_of(problem, *entry), multiprocessors);
  const int64_t down_blocks = whole > 0 ? whole : multiprocessors;
  const auto add = [&](const Kernel& kernel, int64_t blocks, int64_t bytes, int stages) {
    flashmoe_launch& launch =
        plan_launch(kernel, device_id, "", blocks, entry->threads, static_cast<int>(bytes), plan);
    launch.tile_m = 16 * entry->tiles;
    launch.tile_n = shape.entry_tokens;
    launch.stages = stages;
  };
  add(entry->up, multiprocessors, depths.up_bytes, depths.up_stages);
  add(entry->down, down_blocks, depths.down_bytes, depths.down_stages);
  plan->info.microseconds = stream_microseconds(problem, entry->bulk, *facts);
  plan->info.workspace_bytes = static_cast<uint64_t>(lay_out(problem, *entry, down_blocks).bytes);
  return FLASHMOE_OK;
}

// The halves of a product: gate and up, or the first and second 8 rows of each 16 of one matrix.
Weights pair_of(const ExpertMatrix& first, const ExpertMatrix& second, int64_t rows,
                int64_t columns) {
  const auto* a = static_cast<const uint16_t*>(first.data);
  const auto* b = static_cast<const uint16_t*>(second.data);
  return {{a, b},
          {first.expert_stride, second.expert_stride},
          {first.row_stride, second.row_stride},
          static_cast<int32_t>(rows),
          static_cast<int32_t>(columns),
          8,
          0};
}
Weights halves_of(const ExpertMatrix& matrix, int64_t rows, int64_t columns) {
  Weights weights = pair_of(matrix, matrix, rows, columns);
  weights.half[1] += 8 * matrix.row_stride;
  weights.tile_rows = 16;
  weights.half_rows = 8;
  return weights;
}

// Groups of warps of the bulk kernels, which take stages in turn: the largest power of two, up to
// 4, that divides the stages.
int32_t groups_of(int stages) { return stages % 4 == 0 ? 4 : stages % 2 == 0 ? 2 : 1; }

Bias bias_of(const ExpertBias& bias) {
  return {bias.data, bias.expert_stride, bias.row_stride, bias.dtype == Dtype::kFloat32 ? 1 : 0};
}

// The schedule of a product that sums over `summed` columns, with `columns` per stage.
Schedule schedule_of(const flashmoe_launch& planned, int lead, int columns, int64_t summed,
                     const Weights& weights) {
  const auto by = [](int64_t value) { return Divisor::of(static_cast<uint32_t>(value)); };
  return {planned.stages,
          planned.tile_n,
          lead,
          columns,
          groups_of(planned.stages),
          by(planned.tile_n),
          by(ceil_div(summed, columns)),
          by(ceil_div(weights.rows, weights.tile_rows))};
}

flashmoe_status launch(const MoeForwardProblem& p, const Plan& plan, void* workspace,
                       void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  const flashmoe_launch& planned_up = plan.info.launches[0];
  const flashmoe_launch& planned_down = plan.info.launches[1];
  const Entry& entry = entry_of(plan);
  const Workspace layout = lay_out(p, entry, planned_down.grid[0]);
  auto* const base = static_cast<unsigned char*>(workspace);
  auto* const a = reinterpret_cast<uint16_t*>(base);
  auto* const counters = reinterpret_cast<uint32_t*>(base + layout.counters);

  Routing routing;
  routing.offsets = p.offsets;
  routing.pairs = p.pairs;
  routing.weights = p.weights;
  routing.experts = p.experts;
  routing.tokens = static_cast<int32_t>(p.tokens);
  routing.top_k = p.top_k;
  routing.max_records = shared_shape(p, entry).records;

  const Columns columns = choose_columns(p, entry);
  const int lead = entry.bulk ? static_cast<int>(kBulkTriggerLead / bulk_weight_bytes(columns.up))
                              : kTriggerLead;

  UpParams up = {};
  up.routing = routing;
  up.weights =
      p.gated ? pair_of(p.gate, p.up, p.inner, p.hidden) : halves_of(p.up, p.inner, p.hidden);
  up.schedule = schedule_of(planned_up, lead, columns.up, p.hidden, up.weights);
  up.bias[0] = bias_of(p.gated ? p.gate_bias : p.up_bias);
  up.bias[1] = bias_of(p.up_bias);
  up.x = static_cast<const uint16_t*>(p.x.data);
  up.x_stride = p.x.row_stride;
  up.a = a;
  up.a_stride = p.inner;
  up.pre_activation = static_cast<uint16_t*>(p.pre_activation.data);
  up.pre_activation_stride = p.pre_activation.row_stride;
  up.counters = counters;
  up.counter_count = static_cast<int32_t>(stripes_of(p, entry));
  up.gated = p.gated ? 1 : 0;
  up.activation = p.activation;
  up.weight_on_input = p.weight_on_input ? 1 : 0;
  up.alpha = p.alpha;
  up.limit = p.limit;
  up.up_offset = p.up_offset;
  FLASHMOE_TRY(launch_planned(plan, 0, &up, stream));

  DownParams down = {};
  down.routing = routing;
  down.weights = halves_of(p.down, p.hidden, p.inner);
  down.schedule = schedule_of(planned_down, 0, columns.down, p.inner, down.weights);
  down.bias = bias_of(p.down_bias);
  down.a = a;
  down.a_stride = p.inner;
  down.out = static_cast<uint16_t*>(p.out.data);
  down.out_stride = p.out.row_stride;
  down.parts = reinterpret_cast<float*>(base + layout.parts);
  down.counters = counters;
  down.weight_on_input = up.weight_on_input;
  return launch_planned(plan, 1, &down, stream);
}

}  // namespace
}  // namespace flashmoe::moe::sm89_few_tokens

namespace flashmoe {

const MoeForwardFamily kSm89FewTokensMoeForward = {"sm89_few_tokens", FLASHMOE_DEVICE_CUDA,
                                                   &moe::sm89_few_tokens::plan,
                                                   &moe::sm89_few_tokens::launch};

}  // namespace flashmoe
