// The sm_90 family of gradients, for grouped products and for layers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/ops/moe/gradient_chunks.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/backward/entry.h"
#include "cuda/moe/cost.h"
#include "cuda/moe/sm90/products.h"
#include "cuda/moe/sm90_backward/gradient.h"
#include "cuda/tensor_map.h"

namespace flashmoe::moe::sm90_backward {
namespace {

using moe_backward::kernel_for;

constexpr int64_t kWarpThreads = 32;

// Speed of products of gradients, and time of each stage that works row by row.
constexpr Speed kGradientSpeed = {8, 0.875, 4.5e6};
constexpr double kRowStageMicroseconds = 4;

// Appends a stage that works row by row.
flashmoe_status add_rows_stage(const Kernel& kernel, flashmoe_device device,
                               const DeviceFacts& facts, int64_t blocks, int64_t warps, Plan* plan,
                               const Reason& reason) {
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, device.device_id, facts, &arch, reason));
  flashmoe_launch& launch = plan_launch(kernel, device.device_id, "", std::max<int64_t>(blocks, 1),
                                        static_cast<int>(warps * kWarpThreads), 0, plan);
  launch.stages = 1;
  return FLASHMOE_OK;
}

// ---- the grouped product

using Product = GroupedProductBackwardProblem;

int64_t batches_of(const Product& p) { return p.counts != nullptr ? p.experts : 1; }
bool wants_dx(const Product& p) { return p.dx.data != nullptr && p.rows > 0; }

// dx = w^T dout.
GroupedProductProblem dx_product(const Product& p) {
  GroupedProductProblem product = {};
  product.device = p.device;
  product.experts = p.experts;
  product.rows = p.rows;
  product.columns = p.out_columns;
  product.out_columns = p.columns;
  product.x = p.dout;
  product.out = p.dx;
  product.w = p.w;
  std::swap(product.w.row_stride, product.w.column_stride);
  product.offsets = p.offsets;
  product.counts = p.counts;
  return product;
}

Gradient dw_gradient(const Product& p) {
  Gradient gradient = {};
  gradient.device = p.device;
  gradient.out = p.dw;
  gradient.experts = p.experts;
  gradient.m = p.out_columns;
  gradient.n = p.columns;
  gradient.left = {"dout", p.dout, false};
  gradient.right = {"x", p.x, false};
  gradient.rows = p.rows;
  gradient.offsets = p.offsets;
  gradient.counts = p.counts;
  gradient.accumulate = p.accumulate;
  return gradient;
}

flashmoe_status add_dx(const Product& p, const DeviceFacts& facts, Plan* plan,
                       const Reason& reason) {
  const GroupedProductProblem product = dx_product(p);
  FLASHMOE_TRY(sm90::check_weights("w", product.w, p.experts, p.columns, p.out_columns, reason));
  FLASHMOE_TRY(sm90::check_rows("dout", p.dout, p.rows, batches_of(p), reason));
  FLASHMOE_TRY(sm90::check_rows("dx", p.dx, p.rows, batches_of(p), reason));
  FLASHMOE_TRY(sm90::add_rows_product("dout", product, p.accumulate, facts, plan, reason));
  plan->info.microseconds += microseconds(work_of(product), kGradientSpeed, facts);
  if (p.accumulate) return FLASHMOE_OK;  // rows that no expert has do not change
  // A few waves of warps that find out whether an expert has their rows.
  constexpr int64_t kBlocksPerMultiprocessor = 4;
  const int64_t blocks = std::min(ceil_div(p.rows * batches_of(p), moe_backward::kZeroWarps),
                                  kBlocksPerMultiprocessor * facts.multiprocessors);
  return add_rows_stage(moe_backward::zeros_kernel_entry, p.device, facts, blocks,
                        moe_backward::kZeroWarps, plan, reason);
}

flashmoe_status add_dbias(const Product& p, const DeviceFacts& facts, Plan* plan,
                          const Reason& reason) {
  FLASHMOE_TRY(moe_backward::check_sum_columns(p.out_columns, reason));
  FLASHMOE_TRY(add_rows_stage(kernel_for(moe_backward::sums_kernels, p.dout.dtype), p.device, facts,
                              ceil_div(p.out_columns, moe_backward::kSumColumns),
                              moe_backward::kSumWarps, plan, reason));
  plan->info.launches[plan->info.launch_count - 1].grid[1] = static_cast<uint32_t>(p.experts);
  return FLASHMOE_OK;
}

flashmoe_status plan_product(const Product& p, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(p.device.device_id, &facts, reason));
  FLASHMOE_TRY(check_tensor_maps(p.device.device_id, reason));
  if (p.rows > sm90::kMaxRows) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "dout: got %lld rows, accepted are at most 2^30",
                         static_cast<long long>(p.rows));
  }
  if (p.dw.data != nullptr) {
    const Gradient gradient = dw_gradient(p);
    FLASHMOE_TRY(add_gradients({&gradient, 1}, *facts, plan, reason));
    plan->info.microseconds += microseconds(work_of(dx_product(p)), kGradientSpeed, *facts);
  }
  if (wants_dx(p)) FLASHMOE_TRY(add_dx(p, *facts, plan, reason));
  if (p.dbias.data != nullptr) FLASHMOE_TRY(add_dbias(p, *facts, plan, reason));
  plan->info.microseconds += kRowStageMicroseconds * plan->info.launch_count;
  return FLASHMOE_OK;
}

moe_backward::SumsParams sums_of(const Product& p) {
  moe_backward::SumsParams params = {};
  params.sums[0] = {static_cast<const uint16_t*>(p.dout.data),
                    p.dout.row_stride,
                    p.dout.expert_stride,
                    0,
                    0,
                    static_cast<int32_t>(p.out_columns),
                    p.dbias.dtype == Dtype::kFloat32 ? 1 : 0,
                    p.dbias.data,
                    p.dbias.expert_stride};
  params.offsets = p.offsets;
  params.counts = p.counts;
  params.rows = static_cast<int32_t>(p.rows);
  params.adds = p.accumulate ? 1 : 0;
  return params;
}

flashmoe_status launch_product(const Product& p, const Plan& plan, void* /*workspace*/,
                               void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  int index = 0;
  if (p.dw.data != nullptr) {
    const Gradient gradient = dw_gradient(p);
    FLASHMOE_TRY(launch_gradients({&gradient, 1}, {}, plan, index++, stream));
  }
  if (wants_dx(p)) {
    FLASHMOE_TRY(sm90::launch_rows_product(dx_product(p), p.accumulate, plan, index++, stream));
  }
  if (wants_dx(p) && !p.accumulate) {
    const moe_backward::ZerosParams zeros = moe_backward::zeros_of(p);
    FLASHMOE_TRY(launch_planned(plan, index++, &zeros, stream));
  }
  if (p.dbias.data == nullptr) return FLASHMOE_OK;
  const moe_backward::SumsParams sums = sums_of(p);
  return launch_planned(plan, index, &sums, stream);
}

// ---- the layer

using Layer = MoeBackwardProblem;

int64_t pairs_of(const Layer& p) { return p.layer.tokens * p.layer.top_k; }
// Columns of g and u together.
int64_t width_of(const Layer& p) { return p.layer.gated ? 2 * p.layer.inner : p.layer.inner; }
// Whether gate and up are two matrices, whose parts of dx are added up afterwards.
bool in_two_parts(const Layer& p) { return p.order == FLASHMOE_MOE_SEPARATE; }

// Whether rows of dz have all columns, not only a chunk's.
bool has_whole_dz(const Layer& p);

// What the wanted gradients need. Without pairs they are all zeros.
struct Needs {
  bool up_weights;
  bool dx_rows;
  bool dz;
  bool scaled_dz;
  bool da;
  bool a;
  bool dots;
  bool biases;
  bool combine;
  bool rows;
  bool up;
  // The product that gives da also applies the activation's gradient, not a row-by-row stage.
  bool fuses;
  // The queue of the matrices' gradients, made by the stage that looks up slots.
  bool queue;

  explicit Needs(const Layer& p) {
    const bool any = pairs_of(p) > 0;
    const bool on_input = p.layer.weight_on_input;
    const bool up_biases = p.db_gate_up.data != nullptr || p.db_up.data != nullptr;
    up_weights = p.dw_gate_up.data != nullptr || p.dw_up.data != nullptr;
    biases = up_biases || p.db_down.data != nullptr;
    dx_rows = any && (p.dx.data != nullptr || (p.dweights != nullptr && on_input));
    dz = any && (dx_rows || up_biases || (up_weights && !on_input));
    scaled_dz = any && up_weights && on_input;
    dots = any && p.dweights != nullptr && !on_input;
    da = dz || scaled_dz || dots;
    a = any && p.dw_down.data != nullptr;
    combine = any && (p.dx.data != nullptr || p.dweights != nullptr);
    up = (da || a) && p.pre_activation.data == nullptr;
    fuses = da && p.layer.gated && p.order != FLASHMOE_MOE_INTERLEAVED &&
            p.layer.activation == FLASHMOE_ACTIVATION_SILU && p.layer.alpha == 1.0f &&
            std::isinf(p.layer.limit) && p.layer.up_offset == 0.0f && !on_input &&
            p.layer.down_bias.data == nullptr;
    rows = any && !fuses;
    queue = any && (up_weights || p.dw_down.data != nullptr);
  }
};

bool has_whole_dz(const Layer& p) { return Needs(p).dx_rows || dz_is_in_place(p); }

// A gradient that the last of the stages of I writes, and that has room for da and a before that:
// those of all columns, contiguous in memory. If da and a lie there, the gradient of w_down, which
// has a as an operand, needs a launch of its own.
const MatrixGradient* room_for_a(const Layer& p, const GradientChunks& chunks) {
  const MatrixGradient& g = p.dw_gate_up;
  const int64_t rows = p.layer.gated && !in_two_parts(p) ? 2 * p.layer.inner : p.layer.inner;
  const bool by_rows = g.column_stride == 1 && g.row_stride == p.layer.hidden;
  const bool by_columns = g.row_stride == 1 && g.column_stride == rows;
  const int64_t elements = rows * p.layer.hidden;
  if (g.data == nullptr || p.accumulate || chunks.inner < p.layer.inner ||
      !(by_rows || by_columns) || (p.layer.experts > 1 && g.expert_stride != elements)) {
    return nullptr;
  }
  const int64_t room = p.layer.experts * elements * dtype_bytes(g.dtype);
  const int64_t bytes = pairs_of(p) * p.layer.inner * dtype_bytes(p.layer.x.dtype);
  return room >= bytes ? &g : nullptr;
}

// The forward's layer, recomputed for the activation's input.
MoeForwardProblem up_again(const Layer& p, const InnerChunk& chunk, void* pre_activation) {
  MoeForwardProblem layer = layer_of(p, chunk);
  layer.pre_activation.data = pre_activation;
  layer.pre_activation.dtype = layer.x.dtype;
  layer.pre_activation.row_stride = layer.gated ? 2 * layer.inner : layer.inner;
  return layer;
}

// da = w_down^T dout, as the first product of a layer with the activation z sigmoid(0 z), which is
// z / 2.
constexpr float kDaScale = 2.0f;
MoeForwardProblem da_layer(const Layer& p, const InnerChunk& chunk) {
  MoeForwardProblem layer = layer_of(p, chunk);
  layer.x = p.dout;
  layer.gated = false;
  layer.up = layer.down;
  std::swap(layer.up.row_stride, layer.up.column_stride);
  layer.gate_bias = layer.up_bias = layer.down_bias = {};
  layer.activation = FLASHMOE_ACTIVATION_SILU;
  layer.alpha = 0.0f;
  layer.limit = std::numeric_limits<float>::infinity();
  layer.up_offset = 0.0f;
  layer.weight_on_input = false;
  return layer;
}

// The number of parts, per slot, that sum to the gradient of a pair's weight.
int64_t dot_parts(const Layer& p) {
  return Needs(p).fuses ? sm90::up_gradient_parts(p.layer.inner) : 1;
}

// The workspace, as offsets from its beginning. Data that no stage needs has no bytes. Data between
// the stages of I shares its place with data between those of H.
struct Workspace {
  int64_t row_tokens;
  int64_t row_weights;
  int64_t dots;
  int64_t taken;  // the queue of experts' gradients
  int64_t queued;
  int64_t progress;  // of one product at a time
  int64_t dz;        // [pairs, width], for dx of all columns; or in pre_activation's place
  int64_t computed;  // [pairs, width] g, then u; for a chunk, like all that follow
  int64_t da;        // [pairs, inner], later replaced by a
  bool has_da;       // otherwise both are in a gradient's place
  int64_t scaled_dz;
  int64_t dx[2];  // [pairs, hidden]
  int64_t bytes;

  Workspace(const Layer& p, const GradientChunks& chunks, int multiprocessors) {
    const Needs needs(p);
    constexpr int64_t kAlignment = 256;
    constexpr int64_t kWordBytes = 4;
    const int64_t pairs = pairs_of(p);
    const int64_t element = dtype_bytes(p.layer.x.dtype);
    const int64_t width = p.layer.gated ? 2 * chunks.inner : chunks.inner;
    const bool sums_up = needs.combine && p.dweights != nullptr && p.layer.weight_on_input &&
                         chunks.hidden < p.layer.hidden;
    bytes = 0;
    const auto take = [&](bool needed, int64_t count, int64_t each) {
      const int64_t place = bytes;
      if (needed) bytes += ceil_div(count * each, kAlignment) * kAlignment;
      return place;
    };
    const int64_t behind = needs.fuses ? sm90::kSlotsBehind : 0;
    row_tokens = take(needs.rows || needs.fuses, pairs + behind, kWordBytes);
    row_weights = take(needs.fuses, pairs + behind, kWordBytes);
    dots = take(needs.dots || sums_up, pairs * dot_parts(p), kWordBytes);
    taken = take(needs.queue, moe_backward::kMostLaunches, kWordBytes);
    queued = take(needs.queue, p.layer.experts, sizeof(moe_backward::QueuedExpert));
    progress = take((needs.da && !needs.fuses) || needs.up,
                    sm90::most_progress_words(multiprocessors), kWordBytes);
    dz = take(needs.dz && !dz_is_in_place(p), pairs * (needs.dx_rows ? width_of(p) : width),
              element);
    const int64_t shared = bytes;
    dx[0] = take(needs.dx_rows, pairs * chunks.hidden, element);
    dx[1] = take(needs.dx_rows && in_two_parts(p), pairs * chunks.hidden, element);
    const int64_t of_hidden = bytes;
    bytes = shared;
    computed = take(needs.up, pairs * width, element);
    scaled_dz = take(needs.scaled_dz, pairs * width, element);
    da = bytes;
    take((needs.da && !needs.fuses) || needs.a || needs.up, pairs * chunks.inner, element);
    has_da = bytes <= of_hidden || room_for_a(p, chunks) == nullptr;
    if (!has_da) bytes = da;
    bytes = std::max(bytes, of_hidden);
  }
};

// Without a bound on the workspace, rows of dx, which take most of it, are computed in two chunks
// if they are so large that one more launch of two kernels does not matter.
GradientChunks chunks_of(const Layer& p, int multiprocessors) {
  constexpr int64_t kManyBytes = int64_t{64} << 20;
  const auto bytes_of = [&](const GradientChunks& chunks) {
    return static_cast<uint64_t>(Workspace(p, chunks, multiprocessors).bytes);
  };
  GradientChunks chunks = fit_chunks(p, p.max_workspace_bytes, bytes_of);
  const GradientChunks halves = {
      p.layer.inner, fit_chunk(p.layer.hidden, [&](int64_t n) { return n < p.layer.hidden; })};
  const int64_t bytes = pairs_of(p) * p.layer.hidden * dtype_bytes(p.layer.x.dtype);
  if (p.max_workspace_bytes == 0 && bytes >= kManyBytes && bytes_of(halves) < bytes_of(chunks)) {
    chunks = halves;
  }
  return chunks;
}

// Rows by slot, from a column on.
TokenRows<const void> rows_at(const Layer& p, const void* data, int64_t stride,
                              int64_t column = 0) {
  TokenRows<const void> rows = {};
  rows.data = static_cast<const char*>(data) + column * dtype_bytes(p.layer.x.dtype);
  rows.dtype = p.layer.x.dtype;
  rows.row_stride = stride;
  return rows;
}

// Rows of dz of a chunk, from one of their columns on.
TokenRows<const void> dz_at(const Layer& p, const InnerChunk& chunk, const Workspace& w,
                            const char* base, int64_t column) {
  if (dz_is_in_place(p)) {
    return rows_at(p, p.pre_activation.data, p.pre_activation.row_stride, column);
  }
  return rows_at(p, base + w.dz, chunk.dz_inner() * (p.layer.gated ? 2 : 1), column);
}

// da, which a replaces later.
char* da_at(const Layer& p, const GradientChunks& chunks, const Workspace& w, char* base) {
  return w.has_da ? base + w.da : static_cast<char*>(room_for_a(p, chunks)->data);
}

// Part `part` of a chunk of the rows of dx: dz times a matrix, or times one of two.
GroupedProductProblem dx_part(const Layer& p, const HiddenChunk& chunk, const Workspace& w,
                              char* base, int part) {
  GroupedProductProblem product = {};
  product.device = p.device;
  product.experts = p.layer.experts;
  product.rows = pairs_of(p);
  product.columns = in_two_parts(p) ? p.layer.inner : width_of(p);
  product.out_columns = chunk.count;
  const InnerChunk all = {0, p.layer.inner, p.layer.inner, true};
  product.x = dz_at(p, all, w, base, part * p.layer.inner);
  product.out.data = base + w.dx[part];
  product.out.dtype = p.layer.x.dtype;
  product.out.row_stride = chunk.count;
  product.w = part == 0 ? p.gate_up : p.layer.up;
  std::swap(product.w.row_stride, product.w.column_stride);
  advance(&product.w, chunk.first * product.w.row_stride);
  product.offsets = p.layer.offsets;
  return product;
}

// The wanted gradients of matrices of a chunk, in order. That of w_down is the first: its operand
// may lie in the place of another gradient.
struct Gradients {
  Gradient each[kMostJobs];
  int count = 0;
  bool first_alone;  // otherwise one launch has all

  Gradients(const Layer& p, const GradientChunks& chunks, const InnerChunk& chunk,
            const Workspace& w, char* base)
      : first_alone(!w.has_da && p.dw_down.data != nullptr) {
    const MoeForwardProblem& layer = p.layer;
    InnerChunk of_dz = chunk;
    if (layer.weight_on_input) of_dz.dz_is_whole = false;
    const auto dz_from = [&](int64_t column) {
      if (!layer.weight_on_input) return dz_at(p, of_dz, w, base, column);
      return rows_at(p, base + w.scaled_dz, of_dz.dz_inner() * (layer.gated ? 2 : 1), column);
    };
    const Operand x = {"x", layer.x, true};
    const auto add = [&](const MatrixGradient& out, int64_t m, int64_t n, const Operand& left,
                         const Operand& right) {
      if (out.data == nullptr) return;
      Gradient& gradient = each[count++];
      gradient = {};
      gradient.device = p.device;
      gradient.out = out;
      gradient.experts = layer.experts;
      gradient.m = m;
      gradient.n = n;
      gradient.left = left;
      gradient.right = right;
      gradient.rows = pairs_of(p);
      gradient.offsets = layer.offsets;
      gradient.row_tokens = reinterpret_cast<const int32_t*>(base + w.row_tokens);
      gradient.tokens = layer.tokens;
      gradient.accumulate = p.accumulate;
    };
    add(columns_from(p.dw_down, chunk.first), layer.hidden, chunk.count, {"dout", p.dout, true},
        {"a", rows_at(p, da_at(p, chunks, w, base), chunk.count), false});
    GradientRows rows[2];
    for (int i = 0, end = gradient_rows(p, of_dz, rows); i < end; ++i) {
      add(rows_from(rows[i].of_w_up ? p.dw_up : p.dw_gate_up, rows[i].first), rows[i].count,
          layer.hidden, {"dz", dz_from(rows[i].dz_column), false}, x);
    }
  }

  int launches() const { return count == 0 ? 0 : first_alone && count > 1 ? 2 : 1; }
  GradientsOfLaunch launch(int i) const {
    if (launches() == 1) return {each, count};
    return i == 0 ? GradientsOfLaunch{each, 1} : GradientsOfLaunch{each + 1, count - 1};
  }
};

// Sums over rows: the wanted gradients of biases of a chunk. db_down belongs to the last chunk.
moe_backward::SumsParams sums_of(const Layer& p, const InnerChunk& chunk, const Workspace& w,
                                 const char* base, int* count) {
  const MoeForwardProblem& layer = p.layer;
  moe_backward::SumsParams params = {};
  *count = 0;
  const auto add = [&](const BiasGradient& gradient, const TokenRows<const void>& rows,
                       int64_t columns, bool by_token, bool weighted) {
    if (gradient.data == nullptr) return;
    params.sums[(*count)++] = {static_cast<const uint16_t*>(rows.data),
                               rows.row_stride,
                               0,
                               by_token ? 1 : 0,
                               weighted ? 1 : 0,
                               static_cast<int32_t>(columns),
                               gradient.dtype == Dtype::kFloat32 ? 1 : 0,
                               gradient.data,
                               gradient.expert_stride};
  };
  GradientRows rows[2];
  for (int i = 0, end = gradient_rows(p, chunk, rows); i < end; ++i) {
    add(rows_from(rows[i].of_w_up ? p.db_up : p.db_gate_up, rows[i].first),
        dz_at(p, chunk, w, base, rows[i].dz_column), rows[i].count, false, false);
  }
  if (chunk.first + chunk.count == chunk.inner) {
    add(p.db_down, p.dout, layer.hidden, true, !layer.weight_on_input);
  }
  params.offsets = layer.offsets;
  params.row_tokens = reinterpret_cast<const int32_t*>(base + w.row_tokens);
  params.pairs = layer.pairs;
  params.weights = layer.weights;
  params.rows = static_cast<int32_t>(pairs_of(p));
  params.adds = p.accumulate ? 1 : 0;
  return params;
}

flashmoe_status check_again(const MoeForwardProblem& layer, const Reason& reason) {
  if (layer.gated) {
    FLASHMOE_TRY(sm90::check_weights("w_gate_up", layer.gate, layer.experts, layer.inner,
                                     layer.hidden, reason));
    if ((layer.gate.column_stride == 1) != (layer.up.column_stride == 1)) {
      return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                           "w_up: got %s weights, and w_gate_up others, accepted are both "
                           "transposed or neither",
                           layer.up.column_stride == 1 ? "row-major" : "transposed");
    }
  }
  FLASHMOE_TRY(sm90::check_weights(layer.gated ? "w_up" : "w_gate_up", layer.up, layer.experts,
                                   layer.inner, layer.hidden, reason));
  return sm90::check_gathered("x", layer.x, layer.tokens, reason);
}

flashmoe_status add_dx_parts(const Layer& p, const HiddenChunk& chunk, const Workspace& w,
                             const DeviceFacts& facts, int64_t chunks, Plan* plan,
                             const Reason& reason) {
  static constexpr const char* kNames[] = {"w_gate_up", "w_up"};
  for (int part = 0; part < (in_two_parts(p) ? 2 : 1); ++part) {
    const GroupedProductProblem product = dx_part(p, chunk, w, nullptr, part);
    FLASHMOE_TRY(sm90::check_weights(kNames[part], product.w, product.experts, product.out_columns,
                                     product.columns, reason));
    FLASHMOE_TRY(sm90::add_rows_product("weights", product, false, facts, plan, reason));
    plan->info.microseconds +=
        static_cast<double>(chunks) * microseconds(work_of(product), kGradientSpeed, facts);
  }
  return FLASHMOE_OK;
}

flashmoe_status add_combine(const Layer& p, const HiddenChunk& chunk, const DeviceFacts& facts,
                            Plan* plan, const Reason& reason) {
  const moe_backward::CombineShape shape =
      moe_backward::combine_shape(p.layer.tokens, chunk.count, facts.multiprocessors);
  FLASHMOE_TRY(add_rows_stage(kernel_for(moe_backward::combine_kernels, p.layer.x.dtype), p.device,
                              facts, shape.blocks, shape.threads() / kWarpThreads, plan, reason));
  plan->info.launches[plan->info.launch_count - 1].tile_m = shape.team_threads;
  return FLASHMOE_OK;
}

flashmoe_status plan_layer(const Layer& p, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(p.device.device_id, &facts, reason));
  FLASHMOE_TRY(check_tensor_maps(p.device.device_id, reason));
  const MoeForwardProblem& layer = p.layer;
  const Needs needs(p);
  const GradientChunks chunks = chunks_of(p, facts->multiprocessors);
  const Workspace w(p, chunks, facts->multiprocessors);
  if (p.max_workspace_bytes > 0 && static_cast<uint64_t>(w.bytes) > p.max_workspace_bytes) {
    return refuse_bound(p, static_cast<uint64_t>(w.bytes), reason);
  }
  plan->chunk[0] = chunks.inner;
  plan->chunk[1] = chunks.hidden;
  const InnerChunk chunk = inner_chunk(p, chunks, 0, has_whole_dz(p));
  const int64_t inner_chunks = chunk_count(layer.inner, chunks.inner);
  const int64_t hidden_chunks = chunk_count(layer.hidden, chunks.hidden);
  const int64_t pairs = pairs_of(p);
  if (pairs > sm90::kMaxRows) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "weights: got %lld pairs of a token and an expert, accepted are at most 2^30",
        static_cast<long long>(pairs));
  }
  if (needs.dz && dz_is_in_place(p)) {
    FLASHMOE_TRY(sm90::check_rows("pre_activation", p.pre_activation, pairs, 1, reason));
  }
  const double product =
      microseconds({0.0, 2.0 * static_cast<double>(pairs) * static_cast<double>(layer.hidden) *
                             static_cast<double>(layer.inner)},
                   kGradientSpeed, *facts);
  if (needs.up) {
    FLASHMOE_TRY(check_again(layer, reason));
    FLASHMOE_TRY(sm90::add_up(up_again(p, chunk, plan), *facts, plan, reason));
    plan->info.microseconds += (layer.gated ? 2 : 1) * product;
  }
  if (needs.da) {
    const MoeForwardProblem down = da_layer(p, chunk);
    FLASHMOE_TRY(
        sm90::check_weights("w_down", down.up, layer.experts, layer.inner, layer.hidden, reason));
    FLASHMOE_TRY(sm90::check_gathered("dout", p.dout, layer.tokens, reason));
    if (needs.fuses) {
      if (!needs.up) {
        FLASHMOE_TRY(sm90::check_rows("pre_activation", p.pre_activation, pairs, 1, reason));
      }
      FLASHMOE_TRY(add_rows_stage(
          moe_backward::slots_kernel_entry, p.device, *facts,
          ceil_div(pairs, moe_backward::kSlotWarps * kWarpThreads) + (needs.queue ? 1 : 0),
          moe_backward::kSlotWarps, plan, reason));
      FLASHMOE_TRY(sm90::add_up_gradient(down, *facts, plan, reason));
    } else {
      FLASHMOE_TRY(sm90::add_up(down, *facts, plan, reason));
    }
    plan->info.microseconds += product;
  }
  const auto add_stage = [&](const Kernel(&kernels)[2], int64_t blocks, int64_t warps) {
    return add_rows_stage(kernel_for(kernels, layer.x.dtype), p.device, *facts, blocks, warps, plan,
                          reason);
  };
  if (needs.rows) {
    const int32_t of_warp = moe_backward::rows_of_warp(pairs, chunk.count, facts->multiprocessors);
    FLASHMOE_TRY(add_stage(moe_backward::rows_kernels,
                           moe_backward::rows_blocks(pairs, of_warp) + (needs.queue ? 1 : 0),
                           moe_backward::kRowWarps));
    plan->info.launches[plan->info.launch_count - 1].tile_n = of_warp;
  }
  const Gradients gradients(p, chunks, chunk, w, nullptr);
  for (int i = 0; i < gradients.launches(); ++i) {
    FLASHMOE_TRY(add_gradients(gradients.launch(i), *facts, plan, reason));
  }
  for (int i = 0; i < gradients.count; ++i) {
    plan->info.microseconds +=
        static_cast<double>(inner_chunks) * product * static_cast<double>(gradients.each[i].m) *
        static_cast<double>(gradients.each[i].n) / static_cast<double>(layer.hidden * layer.inner);
  }
  if (needs.biases) {
    const bool of_up = p.db_gate_up.data != nullptr || p.db_up.data != nullptr;
    FLASHMOE_TRY(moe_backward::check_sum_columns(
        std::max(of_up ? width_of(p) : 0, p.db_down.data != nullptr ? layer.hidden : 0), reason));
    int count = 0;
    // The last chunk may have fewer columns, but it has all possible sums.
    const InnerChunk last = {layer.inner - chunk.count, chunk.count, layer.inner,
                             chunk.dz_is_whole};
    const moe_backward::SumsParams sums = sums_of(p, last, w, nullptr, &count);
    int32_t columns = 0;
    for (int i = 0; i < count; ++i) columns = std::max(columns, sums.sums[i].columns);
    FLASHMOE_TRY(add_stage(moe_backward::sums_kernels, ceil_div(columns, moe_backward::kSumColumns),
                           moe_backward::kSumWarps));
    flashmoe_launch& launch = plan->info.launches[plan->info.launch_count - 1];
    launch.grid[1] = static_cast<uint32_t>(layer.experts);
    launch.grid[2] = static_cast<uint32_t>(count);
  }
  const int32_t of_inner = plan->info.launch_count;
  const HiddenChunk of_hidden = hidden_chunk(p, chunks, 0);
  if (needs.dx_rows) {
    FLASHMOE_TRY(add_dx_parts(p, of_hidden, w, *facts, hidden_chunks, plan, reason));
  }
  if (needs.combine) FLASHMOE_TRY(add_combine(p, of_hidden, *facts, plan, reason));
  int64_t launches = 0;
  for (int32_t i = 0; i < plan->info.launch_count; ++i) {
    const int64_t repeats = i < of_inner ? inner_chunks : hidden_chunks;
    plan->info.launches[i].repeats = repeats > 1 ? static_cast<int32_t>(repeats) : 0;
    launches += repeats;
  }
  // Rows of the workspace that stages between products read and write.
  constexpr double kMemoryShare = 0.75;
  const double bytes = static_cast<double>(pairs * dtype_bytes(layer.x.dtype)) *
                       static_cast<double>((needs.da || needs.a ? 6 * layer.inner : 0) +
                                           (needs.dx_rows ? 2 * layer.hidden : 0));
  if (facts->memory_bytes_per_microsecond > 0) {
    plan->info.microseconds += bytes / (facts->memory_bytes_per_microsecond * kMemoryShare);
  }
  plan->info.microseconds += kRowStageMicroseconds * static_cast<double>(launches);
  plan->info.workspace_bytes = static_cast<uint64_t>(w.bytes);
  return FLASHMOE_OK;
}

moe_backward::Routing routing_of(const Layer& p) {
  return {p.layer.weights,
          p.layer.offsets,
          p.layer.pairs,
          p.layer.slots,
          static_cast<int32_t>(pairs_of(p)),
          p.layer.experts,
          p.layer.top_k};
}

// Empty if there is no queue.
moe_backward::Queue queue_of(const Layer& p, const Workspace& w, char* base) {
  if (!Needs(p).queue) return {};
  return {reinterpret_cast<uint32_t*>(base + w.taken),
          reinterpret_cast<moe_backward::QueuedExpert*>(base + w.queued)};
}

// `of_warp`: slots per warp.
moe_backward::RowsParams row_params(const Layer& p, const GradientChunks& chunks,
                                    const InnerChunk& chunk, const Workspace& w, int32_t of_warp,
                                    char* base) {
  const MoeForwardProblem& layer = p.layer;
  const Needs needs(p);
  const auto at = [&](bool needed, int64_t place) {
    return needed ? reinterpret_cast<uint16_t*>(base + place) : nullptr;
  };
  moe_backward::RowsParams params = {};
  params.routing = routing_of(p);
  params.row_tokens = reinterpret_cast<int32_t*>(base + w.row_tokens);
  params.rows_of_warp = of_warp;
  params.queue = queue_of(p, w, base);
  params.dots = needs.dots ? reinterpret_cast<float*>(base + w.dots) : nullptr;
  if (needs.da || needs.a) {
    params.da = reinterpret_cast<uint16_t*>(da_at(p, chunks, w, base));
  }
  if (needs.da || needs.a) {
    params.pre_activation = needs.up
                                ? at(true, w.computed)
                                : static_cast<const uint16_t*>(p.pre_activation.data) + chunk.first;
    params.pre_activation_stride =
        needs.up ? chunk.count * (layer.gated ? 2 : 1) : p.pre_activation.row_stride;
    params.pre_activation_up = static_cast<int32_t>(needs.up ? chunk.count : chunk.inner);
  }
  params.adds_dots = needs.dots && chunk.first > 0 ? 1 : 0;
  const TokenRows<const void> dz = dz_at(p, chunk, w, base, 0);
  params.dz = moe_backward::dz_rows(p, chunk, needs.dz ? const_cast<void*>(dz.data) : nullptr,
                                    dz.row_stride);
  InnerChunk of_scaled = chunk;
  of_scaled.dz_is_whole = false;
  params.scaled_dz = moe_backward::dz_rows(p, of_scaled, at(needs.scaled_dz, w.scaled_dz),
                                           chunk.count * (layer.gated ? 2 : 1));
  params.dout = static_cast<const uint16_t*>(p.dout.data);
  params.dout_stride = p.dout.row_stride;
  params.down_bias = {layer.down_bias.data, layer.down_bias.expert_stride,
                      layer.down_bias.row_stride, layer.down_bias.dtype == Dtype::kFloat32 ? 1 : 0};
  params.da_scale = kDaScale;
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

sm90::UpGradient up_gradient(const Layer& p, const GradientChunks& chunks, const InnerChunk& chunk,
                             const Workspace& w, char* base) {
  const Needs needs(p);
  sm90::UpGradient gradient = {};
  const TokenRows<const void> before =
      needs.up ? rows_at(p, base + w.computed, 2 * chunk.count)
               : rows_at(p, p.pre_activation.data, p.pre_activation.row_stride, chunk.first);
  const TokenRows<const void> dz = dz_at(p, chunk, w, base, 0);
  const DzPlaces places = dz_places(p, chunk);
  gradient.before_stride = before.row_stride;
  gradient.dz_stride = dz.row_stride;
  for (int i = 0; i < 2; ++i) {
    gradient.before[i] =
        rows_at(p, before.data, 0, i * (needs.up ? chunk.count : chunk.inner)).data;
    if (needs.dz) {
      gradient.dz[i] = const_cast<void*>(rows_at(p, dz.data, 0, places.places[i]).data);
    }
  }
  if (needs.a) gradient.activated = da_at(p, chunks, w, base);
  if (needs.dots) {
    gradient.dots = reinterpret_cast<float*>(base + w.dots) +
                    sm90::up_gradient_parts(chunk.first) * pairs_of(p);
  }
  gradient.row_tokens = reinterpret_cast<const int32_t*>(base + w.row_tokens);
  gradient.row_weights = reinterpret_cast<const float*>(base + w.row_weights);
  return gradient;
}

// `threads`: per token.
moe_backward::CombineParams combine_params(const Layer& p, const HiddenChunk& chunk,
                                           const Workspace& w, int32_t threads, char* base) {
  const Needs needs(p);
  const auto rows_of_dx = [&](int part) {
    const bool there = needs.dx_rows && (part == 0 || in_two_parts(p));
    return there ? reinterpret_cast<const uint16_t*>(base + w.dx[part]) : nullptr;
  };
  moe_backward::CombineParams params = {};
  params.routing = routing_of(p);
  params.row_tokens = reinterpret_cast<const int32_t*>(base + w.row_tokens);
  params.y[0] = rows_of_dx(0);
  params.y[1] = rows_of_dx(1);
  const bool in_chunks = chunk.count < p.layer.hidden;
  params.dots = needs.dots || (in_chunks && p.dweights != nullptr)
                    ? reinterpret_cast<float*>(base + w.dots)
                    : nullptr;
  params.dot_parts = static_cast<int32_t>(dot_parts(p));
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

// The launches of a chunk of I, the first ones of the plan. `*end` is the index after them.
flashmoe_status launch_inner(const Layer& p, const GradientChunks& chunks, const InnerChunk& chunk,
                             const Workspace& w, const Plan& plan, char* base, void* stream,
                             int* end) {
  const Needs needs(p);
  char* const da = da_at(p, chunks, w, base);
  uint32_t* const progress = reinterpret_cast<uint32_t*>(base + w.progress);
  int index = 0;
  if (needs.up) {
    FLASHMOE_TRY(sm90::launch_up(up_again(p, chunk, base + w.computed), plan, index++, da, progress,
                                 stream));
  }
  if (needs.da && !needs.fuses) {
    FLASHMOE_TRY(sm90::launch_up(da_layer(p, chunk), plan, index++, da, progress, stream));
  }
  if (needs.rows) {
    const int32_t of_warp = plan.info.launches[index].tile_n;
    const moe_backward::RowsParams params = row_params(p, chunks, chunk, w, of_warp, base);
    FLASHMOE_TRY(launch_planned(plan, index++, &params, stream));
  }
  if (needs.fuses) {
    const moe_backward::SlotsParams slots = {
        routing_of(p), reinterpret_cast<int32_t*>(base + w.row_tokens),
        reinterpret_cast<float*>(base + w.row_weights), queue_of(p, w, base)};
    FLASHMOE_TRY(launch_planned(plan, index++, &slots, stream));
    FLASHMOE_TRY(sm90::launch_up_gradient(
        da_layer(p, chunk), up_gradient(p, chunks, chunk, w, base), plan, index++, stream));
  }
  const Gradients gradients(p, chunks, chunk, w, base);
  moe_backward::Queue queue = queue_of(p, w, base);
  for (int i = 0; i < gradients.launches(); ++i) {
    FLASHMOE_TRY(launch_gradients(gradients.launch(i), queue, plan, index++, stream));
    if (queue.taken != nullptr) ++queue.taken;
  }
  *end = index;
  if (!needs.biases) return FLASHMOE_OK;
  int count = 0;
  const moe_backward::SumsParams sums = sums_of(p, chunk, w, base, &count);
  *end = index + 1;
  return launch_planned(plan, index, &sums, stream);
}

// The launches of a chunk of H, from `index` on.
flashmoe_status launch_hidden(const Layer& p, const HiddenChunk& chunk, const Workspace& w,
                              const Plan& plan, char* base, void* stream, int index) {
  const Needs needs(p);
  if (needs.dx_rows) {
    for (int part = 0; part < (in_two_parts(p) ? 2 : 1); ++part) {
      FLASHMOE_TRY(sm90::launch_rows_product(dx_part(p, chunk, w, base, part), false, plan, index++,
                                             stream));
    }
  }
  if (!needs.combine) return FLASHMOE_OK;
  const int32_t threads = plan.info.launches[index].tile_m;
  const moe_backward::CombineParams params = combine_params(p, chunk, w, threads, base);
  return launch_planned(plan, index, &params, stream);
}

flashmoe_status launch_layer(const Layer& p, const Plan& plan, void* workspace, void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(p.device.device_id, &facts, Reason()));
  const GradientChunks chunks = {plan.chunk[0], plan.chunk[1]};
  const Workspace w(p, chunks, facts->multiprocessors);
  char* const base = static_cast<char*>(workspace);
  int end = 0;
  for (int64_t first = 0; first < p.layer.inner; first += chunks.inner) {
    FLASHMOE_TRY(launch_inner(p, chunks, inner_chunk(p, chunks, first, has_whole_dz(p)), w, plan,
                              base, stream, &end));
  }
  for (int64_t first = 0; first < p.layer.hidden; first += chunks.hidden) {
    FLASHMOE_TRY(launch_hidden(p, hidden_chunk(p, chunks, first), w, plan, base, stream, end));
  }
  return FLASHMOE_OK;
}

}  // namespace
}  // namespace flashmoe::moe::sm90_backward

namespace flashmoe {

const GroupedProductBackwardFamily kSm90GroupedProductBackward = {
    "sm90", FLASHMOE_DEVICE_CUDA, &moe::sm90_backward::plan_product,
    &moe::sm90_backward::launch_product};
const MoeBackwardFamily kSm90MoeBackward = {"sm90", FLASHMOE_DEVICE_CUDA,
                                            &moe::sm90_backward::plan_layer,
                                            &moe::sm90_backward::launch_layer};

}  // namespace flashmoe
