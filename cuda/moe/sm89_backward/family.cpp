// The sm_89 family of gradients, which serves every layer and grouped product on any GPU: its
// kernels, their order, and the parameters of their launches.
//
// The stages of a layer. Stages that no wanted gradient needs are left out.
//
//   up       g, u   = as in the forward, if it did not save them
//   down     da     = w_down^T dout           rows of dout gathered by the pairs
//   rows     a, dz  = from da, g and u        and the gradients of the weights of pairs
//   dw       dw_gate_up = sum of dz x^T, dw_down = sum of dout a^T
//   sums     the same for biases
//   dx       dx_k   = w_gate_up^T dz          two products for two matrices
//   combine  dx[t]  = sum over k of dx_k, and dweights
//
// With a bounded workspace, the stages up to sums run per chunk of columns of I, and the others per
// chunk of columns of H (core/ops/moe/gradient_chunks.h).
//
// All products but dw are those of the forward (cuda/moe/sm89), with transposed weights.
#include <algorithm>
#include <climits>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/ops/moe/gradient_chunks.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/backward/entry.h"
#include "cuda/moe/cost.h"
#include "cuda/moe/sm89/stage.h"
#include "cuda/moe/sm89_backward/entry.h"
#include "cuda/moe/sm89_backward/params.h"

namespace flashmoe::moe::sm89_backward {
namespace {

using moe_backward::kernel_for;
using sm89::Extents;

constexpr int kWarpThreads = 32;
constexpr uint64_t kWorkspaceAlignment = 256;

ExpertMatrix turned(ExpertMatrix matrix) {
  std::swap(matrix.row_stride, matrix.column_stride);
  return matrix;
}

// ---- stages that both operations have
// ------------------------------------------------------------

// How the rows of experts are given.
struct Rows {
  const int32_t* offsets;
  const int32_t* counts;
  const int32_t* row_tokens;
  int64_t count;
};

// The gradients of matrices of one call.
class WeightGradients {
 public:
  explicit WeightGradients(int32_t experts) : experts_(experts) {}

  // Adds a gradient [m, n]: the columns of a times the columns of b.
  void add(const MatrixGradient& gradient, const Operand& a, int64_t m, const Operand& b,
           int64_t n) {
    if (gradient.data == nullptr) return;
    const bool turns = gradient.column_stride != 1;
    if (turns) std::swap(m, n);
    Job& job = jobs_[count_++];
    job = {};
    job.a = turns ? b : a;
    job.b = turns ? a : b;
    job.out = gradient.data;
    job.expert_stride = gradient.expert_stride;
    job.row_stride = turns ? gradient.column_stride : gradient.row_stride;
    job.is_fp32 = gradient.dtype == Dtype::kFloat32 ? 1 : 0;
    extents_ = std::max({extents_, m, n});
    job.m = static_cast<int32_t>(m);
    job.n = static_cast<int32_t>(n);
    job.m_tiles = static_cast<int32_t>(ceil_div(m, entries[0].tile_m));
    job.n_tiles = static_cast<int32_t>(ceil_div(n, entries[0].tile_n));
    tiles_ += static_cast<double>(job.m_tiles) * job.n_tiles * experts_;
    job.end = static_cast<int32_t>(std::min<double>(tiles_, INT_MAX));
  }

  bool wanted() const { return count_ > 0; }

  flashmoe_status plan(const DeviceFacts& facts, flashmoe_device device, Dtype dtype, Plan* plan,
                       const Reason& reason) const {
    constexpr int64_t kMostExtent = int64_t{1} << 30;
    if (tiles_ > INT_MAX || extents_ > kMostExtent) {
      return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                           "gradients of weights: got %.0f tiles of %d x %d, accepted are at most "
                           "2^31 - 1, and 2^30 rows and columns",
                           tiles_, entries[0].tile_m, entries[0].tile_n);
    }
    const Entry& entry = entries[dtype == entries[0].dtype ? 0 : 1];
    int arch = 0;
    FLASHMOE_TRY(load_kernel(entry, device.device_id, facts, &arch, reason));
    const int64_t most = int64_t{facts.multiprocessors} * entry.blocks_per_sm;
    flashmoe_launch& launch =
        plan_launch(entry, device.device_id, "", std::min(static_cast<int64_t>(tiles_), most),
                    entry.threads, entry.shared_bytes, plan);
    launch.tile_m = entry.tile_m;
    launch.tile_n = entry.tile_n;
    launch.stages = entry.stages;
    return FLASHMOE_OK;
  }

  flashmoe_status launch(const Plan& plan, int index, const Rows& rows, bool adds,
                         void* stream) const {
    Params params = {};
    for (int i = 0; i < kMostJobs; ++i) params.jobs[i] = jobs_[std::min(i, count_ - 1)];
    params.offsets = rows.offsets;
    params.counts = rows.counts;
    params.row_tokens = rows.row_tokens;
    params.rows = static_cast<int32_t>(rows.count);
    params.tiles = static_cast<int32_t>(tiles_);
    params.adds = adds ? 1 : 0;
    return launch_planned(plan, index, &params, stream);
  }

 private:
  const int32_t experts_;
  Job jobs_[kMostJobs];
  int count_ = 0;
  double tiles_ = 0;
  int64_t extents_ = 0;
};

// The gradients of biases of one call.
class BiasGradients {
 public:
  explicit BiasGradients(int32_t experts) : experts_(experts) {}

  void add(const BiasGradient& gradient, const Operand& rows, int64_t columns, bool weighted) {
    if (gradient.data == nullptr) return;
    moe_backward::Sum& sum = params_.sums[count_++];
    sum.rows = rows.data;
    sum.stride = rows.stride;
    sum.expert_stride = rows.expert_stride;
    sum.by_token = rows.by_token;
    sum.weighted = weighted ? 1 : 0;
    sum.columns = static_cast<int32_t>(columns);
    sum.is_fp32 = gradient.dtype == Dtype::kFloat32 ? 1 : 0;
    sum.out = gradient.data;
    sum.out_stride = gradient.expert_stride;
    columns_ = std::max(columns_, columns);
  }

  bool wanted() const { return count_ > 0; }

  flashmoe_status plan(const DeviceFacts& facts, flashmoe_device device, Dtype dtype, Plan* plan,
                       const Reason& reason) const {
    FLASHMOE_TRY(moe_backward::check_sum_columns(columns_, reason));
    const Kernel& kernel = kernel_for(moe_backward::sums_kernels, dtype);
    int arch = 0;
    FLASHMOE_TRY(load_kernel(kernel, device.device_id, facts, &arch, reason));
    flashmoe_launch& launch =
        plan_launch(kernel, device.device_id, "", ceil_div(columns_, moe_backward::kSumColumns),
                    moe_backward::kSumWarps * kWarpThreads, 0, plan);
    launch.grid[1] = static_cast<uint32_t>(experts_);
    launch.grid[2] = static_cast<uint32_t>(count_);
    launch.tile_m = moe_backward::kSumColumns;
    launch.stages = 1;
    return FLASHMOE_OK;
  }

  flashmoe_status launch(const Plan& plan, int index, const Rows& rows, const int32_t* pairs,
                         const float* weights, bool adds, void* stream) {
    params_.offsets = rows.offsets;
    params_.counts = rows.counts;
    params_.row_tokens = rows.row_tokens;
    params_.pairs = pairs;
    params_.weights = weights;
    params_.rows = static_cast<int32_t>(rows.count);
    params_.adds = adds ? 1 : 0;
    return launch_planned(plan, index, &params_, stream);
  }

 private:
  const int32_t experts_;
  moe_backward::SumsParams params_ = {};
  int count_ = 0;
  int64_t columns_ = 0;
};

// Estimates: the forward's products, and memory traffic between stages.
constexpr double kStageStart = 6;
constexpr double kMemoryShare = 0.6;

double rate_of(const DeviceFacts& facts) { return facts.compute_capability == 90 ? 2.4e6 : 1e6; }

double estimate(double flops, double bytes, const Plan& plan, const DeviceFacts& facts) {
  return microseconds({bytes, flops},
                      {kStageStart * plan.info.launch_count, kMemoryShare, rate_of(facts)}, facts);
}

double bytes_of(const MatrixGradient& gradient, double elements) {
  return gradient.data != nullptr ? elements * static_cast<double>(dtype_bytes(gradient.dtype)) : 0;
}

// ---- the layer
// -----------------------------------------------------------------------------------

// What the wanted gradients need.
struct Needs {
  bool up_weights;
  bool dx_rows;
  bool dz;
  bool scaled_dz;
  bool da;
  bool a;
  bool activation;
  bool up;
  bool combine;

  explicit Needs(const MoeBackwardProblem& p) {
    const bool on_input = p.layer.weight_on_input;
    const bool up_biases = p.db_gate_up.data != nullptr || p.db_up.data != nullptr;
    up_weights = p.dw_gate_up.data != nullptr || p.dw_up.data != nullptr;
    dx_rows = p.dx.data != nullptr || (p.dweights != nullptr && on_input);
    dz = dx_rows || up_biases || (up_weights && !on_input);
    scaled_dz = up_weights && on_input;
    da = dz || scaled_dz || p.dweights != nullptr;
    a = p.dw_down.data != nullptr;
    activation = da || a;
    up = activation && p.pre_activation.data == nullptr;
    combine = (p.dx.data != nullptr || p.dweights != nullptr) && p.layer.tokens > 0;
  }
};

int64_t pairs_of(const MoeBackwardProblem& p) { return p.layer.tokens * p.layer.top_k; }
// Columns of g and u together.
int64_t width_of(const MoeBackwardProblem& p) {
  return p.layer.gated ? 2 * p.layer.inner : p.layer.inner;
}
// Whether gate and up are two matrices, each with its own rows of dx.
bool in_two_parts(const MoeBackwardProblem& p) { return p.order == FLASHMOE_MOE_SEPARATE; }
// The extent that dx's product sums over, per matrix.
int64_t matrix_rows(const MoeBackwardProblem& p) {
  return in_two_parts(p) ? p.layer.inner : width_of(p);
}

// Whether rows of dz have all columns, not only a chunk's.
bool has_whole_dz(const MoeBackwardProblem& p) { return Needs(p).dx_rows || dz_is_in_place(p); }

// The stride from one row of dz to the next.
int64_t dz_stride(const MoeBackwardProblem& p, const InnerChunk& chunk) {
  if (dz_is_in_place(p)) return p.pre_activation.row_stride;
  return chunk.dz_inner() * (p.layer.gated ? 2 : 1);
}

// Built on a null base it only measures. Data that no stage needs has no bytes. Data between the
// stages of I shares its place with data between those of H.
struct Workspace {
  int32_t* row_tokens;  // [pairs] by slot, like all rows
  float* dots;
  uint16_t* dz;  // [pairs, width], for dx of all columns; or in pre_activation's place
  uint16_t* da;  // [pairs, inner], then a; in a recomputed layer first an output that is not used
  uint16_t* computed;  // [pairs, width]; for a chunk, like all that follow
  uint16_t* scaled_dz;
  uint16_t* y[2];  // [pairs, hidden]
  uint64_t bytes = 0;

  Workspace(void* base, const MoeBackwardProblem& p, const GradientChunks& chunks) {
    const Needs needs(p);
    const int64_t width = p.layer.gated ? 2 * chunks.inner : chunks.inner;
    const bool sums_up = p.layer.weight_on_input && chunks.hidden < p.layer.hidden;
    const auto pairs = static_cast<uint64_t>(pairs_of(p));
    const auto take = [&](bool needed, int64_t columns, uint64_t element) {
      unsigned char* const at =
          base != nullptr ? static_cast<unsigned char*>(base) + bytes : nullptr;
      const uint64_t size = needed ? pairs * static_cast<uint64_t>(columns) * element : 0;
      bytes += (size + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
      return needed ? at : nullptr;
    };
    const auto matrix = [&](bool needed, int64_t columns) {
      return reinterpret_cast<uint16_t*>(take(needed, columns, sizeof(uint16_t)));
    };
    row_tokens = reinterpret_cast<int32_t*>(take(true, 1, sizeof(int32_t)));
    dots = reinterpret_cast<float*>(
        take(p.dweights != nullptr && (!p.layer.weight_on_input || sums_up), 1, sizeof(float)));
    dz = matrix(needs.dz && !dz_is_in_place(p), needs.dx_rows ? width_of(p) : width);
    if (needs.dz && dz_is_in_place(p)) {
      dz = static_cast<uint16_t*>(const_cast<void*>(p.pre_activation.data));
    }
    const uint64_t shared = bytes;
    da = matrix(needs.activation, chunks.inner);
    computed = matrix(needs.up, width);
    scaled_dz = matrix(needs.scaled_dz, width);
    const uint64_t of_inner = bytes;
    bytes = shared;
    y[0] = matrix(needs.dx_rows, chunks.hidden);
    y[1] = matrix(needs.dx_rows && in_two_parts(p), chunks.hidden);
    bytes = std::max(bytes, of_inner);
  }
};

GradientChunks chunks_of(const MoeBackwardProblem& p) {
  return fit_chunks(p, p.max_workspace_bytes, [&](const GradientChunks& chunks) {
    return Workspace(nullptr, p, chunks).bytes;
  });
}

Extents extents_of_down(const MoeBackwardProblem& p, const InnerChunk& chunk) {
  const MoeForwardProblem& layer = p.layer;
  return {pairs_of(p), 1, layer.hidden, chunk.count, layer.tokens, p.dout.row_stride, p.dout.dtype};
}
Extents extents_of_dx(const MoeBackwardProblem& p, const HiddenChunk& chunk) {
  const InnerChunk all = {0, p.layer.inner, p.layer.inner, true};
  return {pairs_of(p),    1, matrix_rows(p), chunk.count, pairs_of(p), dz_stride(p, all),
          p.layer.x.dtype};
}

WeightGradients weights_gradients_of(const MoeBackwardProblem& p, const InnerChunk& chunk,
                                     const Workspace& w) {
  const MoeForwardProblem& layer = p.layer;
  WeightGradients gradients(layer.experts);
  InnerChunk of_dz = chunk;
  if (layer.weight_on_input) of_dz.dz_is_whole = false;
  const bool scaled = layer.weight_on_input;
  const uint16_t* const dz = scaled ? w.scaled_dz : w.dz;
  const int64_t stride = scaled ? chunk.count * (layer.gated ? 2 : 1) : dz_stride(p, of_dz);
  const Operand x = {static_cast<const uint16_t*>(layer.x.data), layer.x.row_stride, 0, 1};
  const Operand dout = {static_cast<const uint16_t*>(p.dout.data), p.dout.row_stride, 0, 1};
  GradientRows rows[2];
  for (int i = 0, end = gradient_rows(p, of_dz, rows); i < end; ++i) {
    const Operand of_rows = {dz != nullptr ? dz + rows[i].dz_column : nullptr, stride, 0, 0};
    gradients.add(rows_from(rows[i].of_w_up ? p.dw_up : p.dw_gate_up, rows[i].first), of_rows,
                  rows[i].count, x, layer.hidden);
  }
  gradients.add(columns_from(p.dw_down, chunk.first), dout, layer.hidden, {w.da, chunk.count, 0, 0},
                chunk.count);
  return gradients;
}

// db_down belongs to the last chunk.
BiasGradients bias_gradients_of(const MoeBackwardProblem& p, const InnerChunk& chunk,
                                const Workspace& w) {
  const MoeForwardProblem& layer = p.layer;
  BiasGradients gradients(layer.experts);
  GradientRows rows[2];
  for (int i = 0, end = gradient_rows(p, chunk, rows); i < end; ++i) {
    const Operand of_rows = {w.dz != nullptr ? w.dz + rows[i].dz_column : nullptr,
                             dz_stride(p, chunk), 0, 0};
    gradients.add(rows_from(rows[i].of_w_up ? p.db_up : p.db_gate_up, rows[i].first), of_rows,
                  rows[i].count, false);
  }
  if (chunk.first + chunk.count < chunk.inner) return gradients;
  gradients.add(p.db_down, {static_cast<const uint16_t*>(p.dout.data), p.dout.row_stride, 0, 1},
                layer.hidden, !layer.weight_on_input);
  return gradients;
}

// Adds a stage that works row by row.
flashmoe_status add_stage(const Kernel& kernel, const DeviceFacts& facts, flashmoe_device device,
                          int64_t blocks, int threads, int rows, Plan* plan, const Reason& reason) {
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device.device_id, facts, &arch, reason));
  flashmoe_launch& launch =
      plan_launch(kernel, device.device_id, "", std::max<int64_t>(blocks, 1), threads, 0, plan);
  launch.tile_n = rows;
  launch.stages = 1;
  return FLASHMOE_OK;
}

double flops_of(const MoeBackwardProblem& p, const Needs& needs) {
  const double ups = p.layer.gated ? 2 : 1;
  const double products = (needs.da ? 1 : 0) + (needs.dx_rows ? ups : 0) +
                          (needs.up_weights ? ups : 0) + (needs.a ? 1 : 0) + (needs.up ? ups : 0);
  return 2 * products * static_cast<double>(pairs_of(p)) * static_cast<double>(p.layer.hidden) *
         static_cast<double>(p.layer.inner);
}

double bytes_moved(const MoeBackwardProblem& p, const Needs& needs) {
  const MoeForwardProblem& layer = p.layer;
  const double matrix = static_cast<double>(layer.hidden) * static_cast<double>(layer.inner);
  const double taken = experts_taken(static_cast<double>(layer.tokens), layer.top_k, layer.experts);
  const double ups = layer.gated ? 2 : 1;
  const double weights =
      2 * taken * matrix * ((needs.da ? 1 : 0) + (needs.dx_rows ? ups : 0) + (needs.up ? ups : 0));
  const double gradients =
      layer.experts * (bytes_of(p.dw_gate_up, matrix * ups) + bytes_of(p.dw_up, matrix) +
                       bytes_of(p.dw_down, matrix));
  const auto columns = static_cast<double>((needs.activation ? 8 : 0) * width_of(p) +
                                           (needs.dx_rows ? 6 : 2) * layer.hidden);
  return weights + gradients * (p.accumulate ? 2 : 1) + static_cast<double>(pairs_of(p)) * columns;
}

flashmoe_status plan_backward(const MoeBackwardProblem& p, Plan* plan, const Reason& reason) {
  const MoeForwardProblem& layer = p.layer;
  const DeviceFacts* found = nullptr;
  FLASHMOE_TRY(check_supported(p.device.device_id, &found, reason));
  const DeviceFacts& facts = *found;
  const Needs needs(p);
  const GradientChunks chunks = chunks_of(p);
  const Workspace workspace(nullptr, p, chunks);
  if (p.max_workspace_bytes > 0 && workspace.bytes > p.max_workspace_bytes) {
    return refuse_bound(p, workspace.bytes, reason);
  }
  plan->chunk[0] = chunks.inner;
  plan->chunk[1] = chunks.hidden;
  const InnerChunk chunk = inner_chunk(p, chunks, 0, has_whole_dz(p));
  const HiddenChunk of_hidden = hidden_chunk(p, chunks, 0);
  const Dtype dtype = layer.x.dtype;
  const auto add_product = [&](bool gated, const ExpertMatrix& matrix, const sm89::Names& names,
                               const Extents& extents) {
    return sm89::add_product(facts, p.device, dtype, gated, sm89::is_transposed(matrix), names,
                             extents, layer.experts, plan, reason);
  };
  if (needs.up) {
    FLASHMOE_TRY(sm89::check_layouts(layer, reason));
    FLASHMOE_TRY(add_product(layer.gated, layer.up, {"w_gate_up", "x"},
                             sm89::extents_of_up(layer_of(p, chunk))));
  }
  if (needs.da) {
    FLASHMOE_TRY(
        add_product(false, turned(layer.down), {"w_down", "dout"}, extents_of_down(p, chunk)));
  }
  const int32_t of_warp =
      moe_backward::rows_of_warp(pairs_of(p), chunk.count, facts.multiprocessors);
  FLASHMOE_TRY(add_stage(kernel_for(moe_backward::rows_kernels, dtype), facts, p.device,
                         moe_backward::rows_blocks(pairs_of(p), of_warp),
                         moe_backward::kRowWarps * kWarpThreads, of_warp, plan, reason));
  // The last chunk may have fewer columns, but it has all possible gradients.
  const InnerChunk last = {layer.inner - chunk.count, chunk.count, layer.inner, chunk.dz_is_whole};
  const WeightGradients matrices = weights_gradients_of(p, chunk, workspace);
  const BiasGradients biases = bias_gradients_of(p, last, workspace);
  if (matrices.wanted()) FLASHMOE_TRY(matrices.plan(facts, p.device, dtype, plan, reason));
  if (biases.wanted()) FLASHMOE_TRY(biases.plan(facts, p.device, dtype, plan, reason));
  const int32_t of_inner = plan->info.launch_count;
  if (needs.dx_rows) {
    const Extents extents = extents_of_dx(p, of_hidden);
    FLASHMOE_TRY(add_product(false, turned(p.gate_up), {"w_gate_up", "weights"}, extents));
    if (in_two_parts(p)) {
      FLASHMOE_TRY(add_product(false, turned(layer.up), {"w_up", "weights"}, extents));
    }
  }
  if (needs.combine) {
    const moe_backward::CombineShape shape =
        moe_backward::combine_shape(layer.tokens, of_hidden.count, facts.multiprocessors);
    FLASHMOE_TRY(add_stage(kernel_for(moe_backward::combine_kernels, dtype), facts, p.device,
                           shape.blocks, shape.threads(), 1, plan, reason));
    plan->info.launches[plan->info.launch_count - 1].tile_m = shape.team_threads;
  }
  for (int32_t i = 0; i < plan->info.launch_count; ++i) {
    const int64_t repeats = i < of_inner ? chunk_count(layer.inner, chunks.inner)
                                         : chunk_count(layer.hidden, chunks.hidden);
    plan->info.launches[i].repeats = repeats > 1 ? static_cast<int32_t>(repeats) : 0;
  }
  plan->info.workspace_bytes = workspace.bytes;
  plan->info.microseconds = estimate(flops_of(p, needs), bytes_moved(p, needs), *plan, facts);
  return FLASHMOE_OK;
}

moe_backward::Routing routing_of(const MoeBackwardProblem& p) {
  const MoeForwardProblem& layer = p.layer;
  return {layer.weights, layer.offsets, layer.pairs, layer.slots, static_cast<int32_t>(pairs_of(p)),
          layer.experts, layer.top_k};
}

// `of_warp`: slots per warp.
moe_backward::RowsParams rows_params(const MoeBackwardProblem& p, const InnerChunk& chunk,
                                     const Workspace& w, int32_t of_warp) {
  const MoeForwardProblem& layer = p.layer;
  const Needs needs(p);
  moe_backward::RowsParams params = {};
  params.routing = routing_of(p);
  params.row_tokens = w.row_tokens;
  params.rows_of_warp = of_warp;
  params.dots = w.dots;
  params.da = w.da;
  params.da_scale = 1.0f;
  if (needs.activation) {
    params.pre_activation =
        needs.up ? w.computed : static_cast<const uint16_t*>(p.pre_activation.data) + chunk.first;
    params.pre_activation_stride =
        needs.up ? chunk.count * (layer.gated ? 2 : 1) : p.pre_activation.row_stride;
    params.pre_activation_up = static_cast<int32_t>(needs.up ? chunk.count : chunk.inner);
  }
  params.adds_dots = w.dots != nullptr && !layer.weight_on_input && chunk.first > 0 ? 1 : 0;
  if (layer.weight_on_input) params.dots = nullptr;
  params.dz = moe_backward::dz_rows(p, chunk, w.dz, dz_stride(p, chunk));
  InnerChunk of_scaled = chunk;
  of_scaled.dz_is_whole = false;
  params.scaled_dz =
      moe_backward::dz_rows(p, of_scaled, w.scaled_dz, chunk.count * (layer.gated ? 2 : 1));
  params.dout = static_cast<const uint16_t*>(p.dout.data);
  params.dout_stride = p.dout.row_stride;
  params.down_bias = {layer.down_bias.data, layer.down_bias.expert_stride,
                      layer.down_bias.row_stride, layer.down_bias.dtype == Dtype::kFloat32 ? 1 : 0};
  params.has_da = needs.da ? 1 : 0;
  params.wants_a = needs.a ? 1 : 0;
  params.inner = static_cast<int32_t>(chunk.count);
  params.hidden = static_cast<int32_t>(layer.hidden);
  params.gated = layer.gated ? 1 : 0;
  params.weight_on_input = layer.weight_on_input ? 1 : 0;
  params.activation = layer.activation;
  params.alpha = layer.alpha;
  params.limit = layer.limit;
  params.up_offset = layer.up_offset;
  return params;
}

// `threads`: per token.
moe_backward::CombineParams combine_params(const MoeBackwardProblem& p, const HiddenChunk& chunk,
                                           const Workspace& w, int32_t threads) {
  moe_backward::CombineParams params = {};
  params.routing = routing_of(p);
  params.row_tokens = w.row_tokens;
  params.y[0] = w.y[0];
  params.y[1] = w.y[1];
  params.dots = w.dots;
  params.dot_parts = 1;
  params.adds_dots = p.layer.weight_on_input && chunk.first > 0 ? 1 : 0;
  params.x = static_cast<const uint16_t*>(p.layer.x.data) + chunk.first;
  params.x_stride = p.layer.x.row_stride;
  TokenRows<void> dx = p.dx;
  advance(&dx, chunk.first);
  params.dx = dx.data;
  params.dx_stride = dx.row_stride;
  params.dweights = chunk.is_last ? p.dweights : nullptr;
  params.dx_is_fp32 = p.dx.dtype == Dtype::kFloat32 ? 1 : 0;
  params.hidden = static_cast<int32_t>(chunk.count);
  params.weight_on_input = p.layer.weight_on_input ? 1 : 0;
  params.adds = p.accumulate ? 1 : 0;
  params.team_threads = threads;
  return params;
}

sm89::Params down_params(const MoeBackwardProblem& p, const InnerChunk& chunk, const Plan& plan,
                         int index, const Workspace& w) {
  sm89::Params params = {};
  sm89::fill_extents(extents_of_down(p, chunk), p.layer.experts, p.device, plan, index, &params);
  params.x = static_cast<const uint16_t*>(p.dout.data);
  params.x_stride = p.dout.row_stride;
  params.out = w.da;
  params.out_stride = chunk.count;
  params.weights[0] = sm89::weights_of(turned(layer_of(p, chunk).down));
  params.offsets = p.layer.offsets;
  params.pairs = p.layer.pairs;
  params.top_k = p.layer.top_k;
  params.activation = sm89::kNoActivation;
  return params;
}

// Multiplies by the gate's matrix, by all of gate and up, or (`part` 1) by the up's.
sm89::Params dx_params(const MoeBackwardProblem& p, const HiddenChunk& chunk, const Plan& plan,
                       int index, const Workspace& w, int part) {
  sm89::Params params = {};
  sm89::fill_extents(extents_of_dx(p, chunk), p.layer.experts, p.device, plan, index, &params);
  params.x = w.dz + part * p.layer.inner;
  params.x_stride = dz_stride(p, {0, p.layer.inner, p.layer.inner, true});
  params.out = w.y[part];
  params.out_stride = chunk.count;
  ExpertMatrix matrix = turned(part == 0 ? p.gate_up : p.layer.up);
  advance(&matrix, chunk.first * matrix.row_stride);
  params.weights[0] = sm89::weights_of(matrix);
  params.offsets = p.layer.offsets;
  params.top_k = 1;
  params.activation = sm89::kNoActivation;
  return params;
}

// The launches of a chunk of I, the first ones of the plan. `*end` is the index after them.
flashmoe_status launch_inner(const MoeBackwardProblem& p, const InnerChunk& chunk,
                             const Workspace& w, const Plan& plan, void* stream, int* end) {
  const Needs needs(p);
  int index = 0;
  if (needs.up) {
    const MoeForwardProblem layer = layer_of(p, chunk);
    sm89::Params params = sm89::up_params(layer, plan, index, w.da);
    params.pre_activation = w.computed;
    params.pre_activation_stride = layer.gated ? 2 * layer.inner : layer.inner;
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  if (needs.da) {
    const sm89::Params params = down_params(p, chunk, plan, index, w);
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  const moe_backward::RowsParams rows = rows_params(p, chunk, w, plan.info.launches[index].tile_n);
  FLASHMOE_TRY(launch_planned(plan, index++, &rows, stream));
  const Rows by_slot = {p.layer.offsets, nullptr, w.row_tokens, pairs_of(p)};
  const WeightGradients matrices = weights_gradients_of(p, chunk, w);
  if (matrices.wanted()) {
    FLASHMOE_TRY(matrices.launch(plan, index++, by_slot, p.accumulate, stream));
  }
  *end = index;
  const InnerChunk last = {0, chunk.inner, chunk.inner, chunk.dz_is_whole};
  if (!bias_gradients_of(p, last, w).wanted()) return FLASHMOE_OK;
  *end = index + 1;
  return bias_gradients_of(p, chunk, w)
      .launch(plan, index, by_slot, p.layer.pairs, p.layer.weights, p.accumulate, stream);
}

// The launches of a chunk of H, from `index` on.
flashmoe_status launch_hidden(const MoeBackwardProblem& p, const HiddenChunk& chunk,
                              const Workspace& w, const Plan& plan, void* stream, int index) {
  const Needs needs(p);
  for (int part = 0; needs.dx_rows && part < (in_two_parts(p) ? 2 : 1); ++part) {
    const sm89::Params params = dx_params(p, chunk, plan, index, w, part);
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  if (!needs.combine) return FLASHMOE_OK;
  const moe_backward::CombineParams combine =
      combine_params(p, chunk, w, plan.info.launches[index].tile_m);
  return launch_planned(plan, index, &combine, stream);
}

flashmoe_status launch_backward(const MoeBackwardProblem& p, const Plan& plan, void* memory,
                                void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  const GradientChunks chunks = {plan.chunk[0], plan.chunk[1]};
  const Workspace w(memory, p, chunks);
  int end = 0;
  for (int64_t first = 0; first < p.layer.inner; first += chunks.inner) {
    FLASHMOE_TRY(
        launch_inner(p, inner_chunk(p, chunks, first, has_whole_dz(p)), w, plan, stream, &end));
  }
  for (int64_t first = 0; first < p.layer.hidden; first += chunks.hidden) {
    FLASHMOE_TRY(launch_hidden(p, hidden_chunk(p, chunks, first), w, plan, stream, end));
  }
  return FLASHMOE_OK;
}

// ---- the grouped product
// -------------------------------------------------------------------------

using Product = GroupedProductBackwardProblem;

Extents extents_of_dx(const Product& p) {
  return {p.rows,        p.counts != nullptr ? p.experts : 1,
          p.out_columns, p.columns,
          p.rows,        p.dout.row_stride,
          p.dout.dtype};
}

Operand operand_of(const TokenRows<const void>& rows) {
  return {static_cast<const uint16_t*>(rows.data), rows.row_stride, rows.expert_stride, 0};
}

WeightGradients weight_gradients_of(const Product& p) {
  WeightGradients gradients(p.experts);
  gradients.add(p.dw, operand_of(p.dout), p.out_columns, operand_of(p.x), p.columns);
  return gradients;
}

BiasGradients bias_gradients_of(const Product& p) {
  BiasGradients gradients(p.experts);
  gradients.add(p.dbias, operand_of(p.dout), p.out_columns, false);
  return gradients;
}

bool zeroes_rows(const Product& p) { return p.dx.data != nullptr && !p.accumulate; }

flashmoe_status plan_product(const Product& p, Plan* plan, const Reason& reason) {
  const DeviceFacts* found = nullptr;
  FLASHMOE_TRY(check_supported(p.device.device_id, &found, reason));
  const DeviceFacts& facts = *found;
  const Dtype dtype = p.dout.dtype;
  const double rows =
      static_cast<double>(p.rows) * (p.counts != nullptr ? static_cast<double>(p.experts) : 1.0);
  if (zeroes_rows(p)) {
    constexpr int64_t kBlocksPerMultiprocessor = 16;
    const double blocks =
        std::min(rows / moe_backward::kZeroWarps + 1,
                 static_cast<double>(kBlocksPerMultiprocessor * facts.multiprocessors));
    FLASHMOE_TRY(add_stage(moe_backward::zeros_kernel_entry, facts, p.device,
                           static_cast<int64_t>(blocks), moe_backward::kZeroWarps * kWarpThreads,
                           moe_backward::kZeroWarps, plan, reason));
  }
  if (p.dx.data != nullptr) {
    FLASHMOE_TRY(sm89::add_product(facts, p.device, dtype, false, sm89::is_transposed(turned(p.w)),
                                   {"w", "dout"}, extents_of_dx(p), p.experts, plan, reason));
  }
  const WeightGradients matrices = weight_gradients_of(p);
  const BiasGradients biases = bias_gradients_of(p);
  if (matrices.wanted()) FLASHMOE_TRY(matrices.plan(facts, p.device, dtype, plan, reason));
  if (biases.wanted()) FLASHMOE_TRY(biases.plan(facts, p.device, dtype, plan, reason));
  const double matrix = static_cast<double>(p.columns) * static_cast<double>(p.out_columns);
  const double products = (p.dx.data != nullptr ? 1 : 0) + (p.dw.data != nullptr ? 1 : 0);
  const double taken = p.counts != nullptr ? p.experts : experts_taken(rows, 1, p.experts);
  const double bytes = (p.dx.data != nullptr ? 2 * taken * matrix : 0) +
                       p.experts * bytes_of(p.dw, matrix) * (p.accumulate ? 2 : 1) +
                       rows * static_cast<double>(4 * p.columns + 4 * p.out_columns);
  plan->info.microseconds = estimate(2 * products * rows * matrix, bytes, *plan, facts);
  return FLASHMOE_OK;
}

flashmoe_status launch_product(const Product& p, const Plan& plan, void* /*workspace*/,
                               void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  int index = 0;
  if (zeroes_rows(p)) {
    const moe_backward::ZerosParams params = moe_backward::zeros_of(p);
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  if (p.dx.data != nullptr) {
    sm89::Params params = {};
    sm89::fill_extents(extents_of_dx(p), p.experts, p.device, plan, index, &params);
    params.x = static_cast<const uint16_t*>(p.dout.data);
    params.x_stride = p.dout.row_stride;
    params.x_expert_stride = p.dout.expert_stride;
    params.out = static_cast<uint16_t*>(p.dx.data);
    params.out_stride = p.dx.row_stride;
    params.out_expert_stride = p.dx.expert_stride;
    params.out_is_fp32 = p.dx.dtype == Dtype::kFloat32 ? 1 : 0;
    params.adds = p.accumulate ? 1 : 0;
    params.weights[0] = sm89::weights_of(turned(p.w));
    params.offsets = p.offsets;
    params.counts = p.counts;
    params.top_k = 1;
    params.activation = sm89::kNoActivation;
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  const Rows rows = {p.offsets, p.counts, nullptr, p.rows};
  const WeightGradients matrices = weight_gradients_of(p);
  if (matrices.wanted()) {
    FLASHMOE_TRY(matrices.launch(plan, index++, rows, p.accumulate, stream));
  }
  BiasGradients biases = bias_gradients_of(p);
  if (!biases.wanted()) return FLASHMOE_OK;
  return biases.launch(plan, index, rows, nullptr, nullptr, p.accumulate, stream);
}

}  // namespace
}  // namespace flashmoe::moe::sm89_backward

namespace flashmoe {

const MoeBackwardFamily kSm89MoeBackward = {"sm89", FLASHMOE_DEVICE_CUDA,
                                            &moe::sm89_backward::plan_backward,
                                            &moe::sm89_backward::launch_backward};
const GroupedProductBackwardFamily kSm89GroupedProductBackward = {
    "sm89", FLASHMOE_DEVICE_CUDA, &moe::sm89_backward::plan_product,
    &moe::sm89_backward::launch_product};

}  // namespace flashmoe
