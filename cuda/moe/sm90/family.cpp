// The sm_90 family: which layers and grouped products its kernels serve, and the parameters of
// their launches.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/backends.h"
#include "core/ceil_div.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/combine/stage.h"
#include "cuda/moe/cost.h"
#include "cuda/moe/sm90/entry.h"
#include "cuda/moe/sm90/params.h"
#include "cuda/moe/sm90/products.h"
#include "cuda/tensor_map.h"

namespace flashmoe::moe::sm90 {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/moe/sm90/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/moe/sm90/entries.inc"
#undef FLASHMOE_ENTRY
};

constexpr int64_t kWorkspaceAlignment = 256;
constexpr int64_t kMaxColumns = int64_t{1} << 30;  // so does column + tile, a map's coordinate
constexpr int64_t kMaxItems = int64_t{1} << 30;
// If the weights of some experts fit in the L2 together, it pays to let them pass by fewer tokens.
constexpr int64_t kResidentBytes = int64_t{16} << 20;
constexpr int32_t kFewerColumns = 4;
// Average tokens per expert up to which few experts fill narrow tiles.
constexpr int64_t kNarrowTokens = 64;
// Average tokens per expert from which on weights of few columns are kept in registers: at most
// kMostKeptColumns or kMostKeptOfFewer columns. kKeptPadding is how many fewer columns there may
// be: with still fewer, too much would be padding.
constexpr int64_t kShortTokens = 192;
constexpr int64_t kMiddleTokens = 384;
constexpr int64_t kKeptPadding = kBoxColumns - 1;
// Upper bound on the token tiles that pass by kept weights: longer runs are no faster. Runs are
// shorter if a cluster would otherwise have fewer than kClusterRuns.
constexpr int64_t kRunTiles = 6;
constexpr int64_t kClusterRuns = 2;

// ---- tensor maps

// [batches, rows, columns] with contiguous columns, in boxes of 64 columns by some rows of a batch.
struct View {
  const void* data;
  int64_t columns;
  int64_t rows;
  int64_t batches;
  int64_t row_stride;    // elements
  int64_t batch_stride;  // elements
  int32_t box_rows;
  Dtype dtype;
};

// Kept with a plan: the parameters of its products, and the addresses of their maps.
inline constexpr int kMostMaps =
    kHalves + kTokenBoxes + kOutHeights + kHalves * kOutHeights + kHalves;
struct Kept {
  Params params[2];
  const void* mapped[2][kMostMaps];
};

// Sets the maps of one product, in the same order for every call of a plan. The first call encodes
// them, later calls move them.
class Maps {
 public:
  Maps(bool encoded, const void** mapped) : encoded_(encoded), mapped_(mapped) {}

  // Returns false if the driver refuses a map.
  bool set(const View& view, CUtensorMap* map) {
    const void** const mapped = mapped_++;
    if (encoded_ && move_map(map, mapped, view.data)) return true;
    *mapped = view.data;
    return encode_map(map, view.dtype, view.data,
                      {4,
                       {view.columns, view.rows, view.batches, 1},
                       {1, view.row_stride, view.batch_stride, 0},
                       {kBoxColumns, view.box_rows, 1, 1}});
  }

  // Sets the maps of an output, with boxes of all heights.
  bool set_out(View view, CUtensorMap (*maps)[kOutHeights]) {
    for (int i = 0; i < kOutHeights; ++i) {
      view.box_rows = kOutBoxRows[i];
      if (!set(view, &(*maps)[i])) return false;
    }
    return true;
  }

  // Sets the maps of contiguous rows, with boxes of all heights.
  bool set_tokens(View view, Params* params) {
    for (int units = 1; units <= kTokenBoxes; ++units) {
      view.box_rows = units * kUnitTokens / kCluster;
      if (!set(view, &params->tokens[units - 1])) return false;
    }
    return true;
  }

 private:
  bool encoded_;
  const void** mapped_;
};

// ---- plan

// Fitted to measurements on an H200 (docs/lab/moe.md).
constexpr Speed kLayerSpeed = {20, 0.875, 5e6};
constexpr Speed kProductSpeed = {7, 0.875, 5e6};

// One product of tokens' rows with the matrix of their expert.
struct Product {
  Use use;
  Dtype dtype;
  flashmoe_device device;
  int64_t rows;     // over all experts, or per batch
  int64_t batches;  // batches of rows: 1, or one per expert
  int64_t experts;
  int64_t columns;   // the sum runs over these
  int64_t out_rows;  // per matrix: columns of the output
  Major major;
};

const Entry* find_entry(const Product& product) {
  for (const Entry* entry : kEntries) {
    if (entry->dtype == product.dtype && entry->use == product.use &&
        entry->major == product.major) {
      return entry;
    }
  }
  return nullptr;
}

Major major_of(const ExpertMatrix& matrix) {
  if (matrix.column_stride == 1) return Major::kColumns;
  return matrix.row_stride == 1 ? Major::kRows : Major::kRowsInterleaved;
}

// Whether the copy engine can walk rows and batches: strides are above 0 and below 2^40 bytes.
bool can_walk(Dtype dtype, int64_t row_stride, int64_t rows, int64_t batch_stride,
              int64_t batches) {
  const int64_t end = kMaxStrideBytes / dtype_bytes(dtype);
  const auto fits = [end](int64_t stride, int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < end);
  };
  return fits(row_stride, rows) && fits(batch_stride, batches);
}

}  // namespace

flashmoe_status check_weights(const char* name, const ExpertMatrix& matrix, int64_t experts,
                              int64_t rows, int64_t columns, const Reason& reason) {
  const bool transposed = major_of(matrix) != Major::kColumns;
  if (!can_walk(matrix.dtype, transposed ? matrix.column_stride : matrix.row_stride,
                transposed ? columns : rows, matrix.expert_stride, experts)) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "%s: got strides %lld, %lld and %lld, accepted are those above 0 and below "
        "2^40 bytes",
        name, static_cast<long long>(matrix.expert_stride),
        static_cast<long long>(matrix.row_stride), static_cast<long long>(matrix.column_stride));
  }
  if (major_of(matrix) == Major::kRowsInterleaved) rows *= kHalves;  // rows of the tensor
  if (rows > kMaxColumns || columns > kMaxColumns) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s: got %lld rows of %lld columns, accepted are at most 2^30 of each",
                         name, static_cast<long long>(rows), static_cast<long long>(columns));
  }
  return FLASHMOE_OK;
}

flashmoe_status check_gathered(const char* name, const TokenRows<const void>& view, int64_t tokens,
                               const Reason& reason) {
  // Rows are counted in chunks of 16 bytes, in 32 bits.
  constexpr int64_t kChunk = 8;
  if (view.row_stride >= 0 &&
      tokens <= int64_t{UINT32_MAX} / std::max<int64_t>(view.row_stride / kChunk, 1)) {
    return FLASHMOE_OK;
  }
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "%s: got %lld rows that are %lld elements apart, accepted are strides of 0 "
                       "or more and less than 64 GiB",
                       name, static_cast<long long>(tokens),
                       static_cast<long long>(view.row_stride));
}

namespace {

template <class Data>
flashmoe_status check_rows_of(const char* name, const TokenRows<Data>& view, int64_t rows,
                              int64_t batches, const Reason& reason) {
  if (rows > kMaxRows) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "%s: got %lld rows, accepted are at most 2^30",
                         name, static_cast<long long>(rows));
  }
  if (!can_walk(view.dtype, view.row_stride, rows, view.expert_stride, batches)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%s: got rows %lld elements apart, of experts %lld, accepted are strides "
                         "above 0 and below 2^40 bytes",
                         name, static_cast<long long>(view.row_stride),
                         static_cast<long long>(view.expert_stride));
  }
  return FLASHMOE_OK;
}

}  // namespace

flashmoe_status check_rows(const char* name, const TokenRows<const void>& view, int64_t rows,
                           int64_t batches, const Reason& reason) {
  return check_rows_of(name, view, rows, batches, reason);
}
flashmoe_status check_rows(const char* name, const TokenRows<void>& view, int64_t rows,
                           int64_t batches, const Reason& reason) {
  return check_rows_of(name, view, rows, batches, reason);
}

namespace {

// `name`: the argument that gives the number of rows.
flashmoe_status add_product(const char* name, const DeviceFacts& facts, const Product& product,
                            Plan* plan, const Reason& reason) {
  const Entry* entry = find_entry(product);
  if (entry == nullptr) {
    return reason.refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for these weights");
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, product.device.device_id, facts, &arch, reason));
  // Clusters have one item per pair of tiles. Of an expert's pairs of token tiles, at most the last
  // is no more than half full.
  const int64_t all_rows = product.rows * product.batches;
  const int64_t pairs =
      all_rows / entry->tile_tokens + std::min<int64_t>(product.experts, all_rows);
  const int64_t row_tiles = ceil_div(product.out_rows, entry->out_rows);
  if (pairs > kMaxItems / std::max<int64_t>(row_tiles, 1)) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "%s: got %lld rows, with %lld rows of weights more than 2^30 tiles, accepted "
        "are fewer",
        name, static_cast<long long>(all_rows), static_cast<long long>(product.out_rows));
  }
  const int64_t clusters =
      std::clamp<int64_t>(pairs * row_tiles, 1, facts.multiprocessors / kCluster);
  flashmoe_launch& launch = plan_launch(*entry, product.device.device_id, "a", clusters * kCluster,
                                        entry->threads, entry->shared_bytes, plan);
  launch.cluster = kCluster;
  launch.tile_m = entry->tile_rows;
  launch.tile_n = entry->tile_tokens;
  launch.stages = entry->stages;
  return FLASHMOE_OK;
}

// How to multiply contiguous rows, `expert_rows` per expert on average, with 16-bit output.
Use use_of_rows(Major major, int64_t columns, int64_t expert_rows) {
  const auto keeps = [=](int64_t most, int64_t least_rows) {
    return major == Major::kColumns && columns <= most && columns >= most - kKeptPadding &&
           expert_rows >= least_rows;
  };
  return keeps(kMostKeptColumns, kShortTokens)    ? Use::kShortDown
         : keeps(kMostKeptOfFewer, kMiddleTokens) ? Use::kMiddleDown
                                                  : Use::kDown;
}

bool keeps_weights(Use use) { return use == Use::kShortDown || use == Use::kMiddleDown; }

// ---- parameters

// The clusters of blocks of a stage.
int64_t clusters_of(const Plan& plan, int stage) {
  return plan.info.launches[stage].grid[0] / kCluster;
}

// Fills the common parameters. The caller sets the maps of outputs and tokens.
bool fill_product(const Product& product, const ExpertMatrix& first, const ExpertMatrix& second,
                  const Entry& entry, int64_t clusters, Maps* maps, Params* params) {
  const ExpertMatrix* const halves[kHalves] = {&first, &second};
  for (int i = 0; i < kHalves; ++i) {
    View view = {halves[i]->data, product.columns,       product.out_rows,
                 product.experts, halves[i]->row_stride, halves[i]->expert_stride,
                 entry.box_rows,  halves[i]->dtype};
    if (product.major != Major::kColumns) {
      std::swap(view.columns, view.rows);
      view.row_stride = halves[i]->column_stride;
    }
    if (product.major ==
        Major::kRowsInterleaved) {  // rows of both halves; they begin with the gate's first row
      view.data = first.data;
      view.columns *= kHalves;
    }
    if (!maps->set(view, &params->weights[i])) return false;
  }
  params->rows = static_cast<int32_t>(product.rows);
  params->experts = static_cast<int32_t>(product.experts);
  params->columns = static_cast<int32_t>(product.columns);
  params->out_rows = static_cast<int32_t>(product.out_rows);
  params->row_tiles = static_cast<int32_t>(ceil_div(product.out_rows, entry.out_rows));
  const int64_t expert_bytes = product.out_rows * product.columns * dtype_bytes(first.dtype) *
                               (entry.tile_rows / entry.out_rows);
  params->columns_per_group =
      entry.columns_per_group / (expert_bytes < kResidentBytes ? kFewerColumns : 1);
  if (keeps_weights(product.use)) {
    const int64_t tiles = ceil_div(product.rows * product.batches, entry.tile_tokens) *
                          ceil_div(params->row_tiles, kCluster);
    params->tiles_per_run =
        static_cast<int32_t>(std::clamp<int64_t>(tiles / (clusters * kClusterRuns), 1, kRunTiles));
  }
  return true;
}

Bias bias_of(const ExpertBias& bias) {
  return {bias.data, bias.expert_stride, bias.row_stride, bias.dtype == Dtype::kFloat32 ? 1 : 0};
}

void fill_activation(const MoeForwardProblem& p, Params* params) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kTwiceSqrt2OverPi = 1.5957691216057308;  // tanh(x) is 2 sigmoid(2x) - 1
  constexpr double kCube = 0.044715;
  switch (p.activation) {
    case FLASHMOE_ACTIVATION_SILU:
      params->curve = kSwish;
      params->swish_scale = static_cast<float>(-kLog2E * p.alpha);
      break;
    case FLASHMOE_ACTIVATION_GELU_TANH:
      params->curve = kSwish;
      params->swish_scale = static_cast<float>(-kLog2E * kTwiceSqrt2OverPi);
      params->swish_cube = static_cast<float>(-kLog2E * kTwiceSqrt2OverPi * kCube);
      break;
    case FLASHMOE_ACTIVATION_GELU: params->curve = kGeluErf; break;
    case FLASHMOE_ACTIVATION_RELU: params->curve = kRelu; break;
    case FLASHMOE_ACTIVATION_RELU2: params->curve = kRelu2; break;
  }
  params->limit = p.limit;
  params->up_offset = p.up_offset;
  params->pre_activated = p.pre_activation.data != nullptr ? 1 : 0;
}

// ---- the layer

// Whether the activation is SiLU times up on the unchanged products.
bool is_plain(const MoeForwardProblem& p) {
  return p.gated && p.activation == FLASHMOE_ACTIVATION_SILU && p.alpha == 1.0f &&
         std::isinf(p.limit) && p.up_offset == 0.0f && !p.weight_on_input &&
         p.gate_bias.data == nullptr && p.up_bias.data == nullptr;
}

Product up_of(const MoeForwardProblem& p) {
  const Major major = major_of(p.up);
  const bool plain = is_plain(p) && major == Major::kColumns;
  const bool narrow = p.tokens * p.top_k <= kNarrowTokens * p.experts;
  const Use use = plain     ? narrow ? Use::kNarrowGatedUp : Use::kPlainGatedUp
                  : p.gated ? Use::kGatedUp
                            : Use::kUp;
  return {use, p.x.dtype, p.device, p.tokens * p.top_k, 1, p.experts, p.hidden, p.inner, major};
}
Product down_of(const MoeForwardProblem& p) {
  const int64_t pairs = p.tokens * p.top_k;
  const Major major = major_of(p.down);
  return {use_of_rows(major, p.inner, pairs / std::max<int64_t>(p.experts, 1)),
          p.x.dtype,
          p.device,
          pairs,
          1,
          p.experts,
          p.inner,
          p.hidden,
          major};
}

Product up_gradient_of(const MoeForwardProblem& p) {
  Product product = up_of(p);
  product.use = Use::kUpGradient;
  return product;
}

// The workspace: a [slots, inner], then y [slots, hidden], then the progress of `up` for `down`.
struct Layout {
  int64_t y;
  int64_t progress;
  int64_t bytes;
};

Layout lay_out(const MoeForwardProblem& p, const Plan& plan) {
  const auto align = [](int64_t bytes) {
    return ceil_div(bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
  };
  constexpr int64_t kWordBytes = 4;
  const int64_t pairs = p.tokens * p.top_k;
  Layout layout;
  layout.y = align(pairs * p.inner * dtype_bytes(p.x.dtype));
  layout.progress = layout.y + align(pairs * p.hidden * dtype_bytes(p.x.dtype));
  layout.bytes =
      layout.progress + (int64_t{plan.info.launches[0].grid[0]} * kConsumers + 1) * kWordBytes;
  return layout;
}

flashmoe_status plan_forward(const MoeForwardProblem& problem, Plan* plan, const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(problem.device.device_id, &facts, reason));
  FLASHMOE_TRY(check_tensor_maps(problem.device.device_id, reason));
  const int64_t pairs = problem.tokens * problem.top_k;
  if (problem.gated) {
    FLASHMOE_TRY(check_weights("w_gate_up", problem.gate, problem.experts, problem.inner,
                               problem.hidden, reason));
    if (major_of(problem.gate) != major_of(problem.up)) {
      return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                           "w_up: got %s weights, and w_gate_up others, accepted are both "
                           "transposed or neither",
                           major_of(problem.up) == Major::kColumns ? "row-major" : "transposed");
    }
  }
  FLASHMOE_TRY(check_weights(problem.gated ? "w_up" : "w_gate_up", problem.up, problem.experts,
                             problem.inner, problem.hidden, reason));
  FLASHMOE_TRY(check_weights("w_down", problem.down, problem.experts, problem.hidden, problem.inner,
                             reason));
  FLASHMOE_TRY(check_gathered("x", problem.x, problem.tokens, reason));
  if (pairs > kMaxRows) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "weights: got %lld pairs of a token and an expert, accepted are at most 2^30",
        static_cast<long long>(pairs));
  }
  if (problem.pre_activation.data != nullptr) {
    FLASHMOE_TRY(check_rows("pre_activation", problem.pre_activation, pairs, 1, reason));
  }
  FLASHMOE_TRY(add_product("weights", *facts, up_of(problem), plan, reason));
  FLASHMOE_TRY(add_product("weights", *facts, down_of(problem), plan, reason));
  FLASHMOE_TRY(add_combine(problem, *facts, plan, reason));
  plan->info.microseconds = microseconds(work_of(problem), kLayerSpeed, *facts);
  plan->info.workspace_bytes = static_cast<uint64_t>(lay_out(problem, *plan).bytes);
  return FLASHMOE_OK;
}

bool fill_up(const MoeForwardProblem& p, const Plan& plan, int index, void* activated,
             uint32_t* progress, Maps* maps, Params* params) {
  const Product product = up_of(p);
  if (!fill_product(product, p.gated ? p.gate : p.up, p.up,
                    *static_cast<const Entry*>(plan.entries[index]), clusters_of(plan, index), maps,
                    params) ||
      !maps->set_out({activated, p.inner, product.rows, 1, p.inner, 0, 0, p.x.dtype},
                     &params->out)) {
    return false;
  }
  if (p.pre_activation.data != nullptr) {
    View view = {p.pre_activation.data, p.inner, product.rows, 1, p.pre_activation.row_stride, 0, 0,
                 p.pre_activation.dtype};
    if (!maps->set_out(view, &params->pre_activation[0])) return false;
    if (p.gated) {
      view.data =
          static_cast<const char*>(p.pre_activation.data) + p.inner * dtype_bytes(view.dtype);
      if (!maps->set_out(view, &params->pre_activation[1])) return false;
    }
  }
  params->x = static_cast<const uint16_t*>(p.x.data);
  params->x_row_chunks = static_cast<uint32_t>(p.x.row_stride / 8);
  params->pairs = p.pairs;
  params->pair_weights = p.weight_on_input ? p.weights : nullptr;
  params->top_k = p.top_k;
  params->offsets = p.offsets;
  params->progress = progress;
  params->bias[0] = bias_of(p.gated ? p.gate_bias : p.up_bias);
  params->bias[1] = bias_of(p.up_bias);
  fill_activation(p, params);
  return true;
}

bool fill_up_gradient(const MoeForwardProblem& p, const UpGradient& g, const Plan& plan, int index,
                      Maps* maps, Params* params) {
  const Product product = up_gradient_of(p);
  if (!fill_product(product, p.up, p.up, *static_cast<const Entry*>(plan.entries[index]),
                    clusters_of(plan, index), maps, params)) {
    return false;
  }
  const auto view_of = [&](const void* data, int64_t stride) {
    return View{data, p.inner, product.rows, 1, stride, 0, kGradientTokens, p.x.dtype};
  };
  for (int i = 0; i < kHalves; ++i) {
    if (!maps->set(view_of(g.before[i], g.before_stride), &params->before[i])) return false;
    if (g.dz[i] != nullptr &&
        !maps->set_out(view_of(g.dz[i], g.dz_stride), &params->pre_activation[i])) {
      return false;
    }
  }
  if (g.activated != nullptr && !maps->set_out(view_of(g.activated, p.inner), &params->out)) {
    return false;
  }
  params->x = static_cast<const uint16_t*>(p.x.data);
  params->x_row_chunks = static_cast<uint32_t>(p.x.row_stride / 8);
  params->pairs = g.row_tokens;
  params->top_k = 1;
  params->offsets = p.offsets;
  params->row_weights = g.row_weights;
  params->dots = g.dots;
  params->wants_dz = g.dz[0] != nullptr ? 1 : 0;
  params->wants_a = g.activated != nullptr ? 1 : 0;
  return true;
}

bool fill_down(const MoeForwardProblem& p, const Plan& plan, const void* activated, void* y,
               uint32_t* progress, Maps* maps, Params* params) {
  const Product product = down_of(p);
  if (!fill_product(product, p.down, p.down, *static_cast<const Entry*>(plan.entries[1]),
                    clusters_of(plan, 1), maps, params) ||
      !maps->set_tokens({activated, p.inner, product.rows, 1, p.inner, 0, 0, p.x.dtype}, params) ||
      !maps->set_out({y, p.hidden, product.rows, 1, p.hidden, 0, 0, p.x.dtype}, &params->out)) {
    return false;
  }
  params->offsets = p.offsets;
  params->progress = progress;
  params->up_clusters = static_cast<int32_t>(clusters_of(plan, 0));
  const Entry& up = *static_cast<const Entry*>(plan.entries[0]);
  params->up_row_tiles = static_cast<int32_t>(ceil_div(p.inner, up.out_rows));
  params->up_tile_units = up.tile_tokens / kUnitTokens;
  params->bias[0] = bias_of(p.down_bias);
  return true;
}

// The parameters of launch `index`, made by fill(maps, params), if the plan keeps them.
template <class Fill>
flashmoe_status prepare(const Plan& plan, int index, Prepared<Kept>* kept, const Fill& fill) {
  const flashmoe_launch& planned = plan.info.launches[index];
  Params& params = (*kept)->params[index];
  return encode_maps(planned.kernel, planned.device.device_id, [&] {
    if (!kept->ready()) params = {};
    Maps maps(kept->ready(), (*kept)->mapped[index]);
    if (fill(&maps, &params)) return true;
    kept->set_ready(false);  // some maps do not match `mapped`
    return false;
  });
}

flashmoe_status launch_forward(const MoeForwardProblem& problem, const Plan& plan, void* workspace,
                               void* stream) {
  const DeviceGuard guard(problem.device.device_id);
  FLASHMOE_TRY(guard.status());
  unsigned char* const activated = static_cast<unsigned char*>(workspace);
  const Layout layout = lay_out(problem, plan);
  unsigned char* const y = activated + layout.y;
  uint32_t* const progress = reinterpret_cast<uint32_t*>(activated + layout.progress);
  Prepared<Kept> kept(plan.detail);
  FLASHMOE_TRY(prepare(plan, 0, &kept, [&](Maps* maps, Params* params) {
    return fill_up(problem, plan, 0, activated, progress, maps, params);
  }));
  FLASHMOE_TRY(prepare(plan, 1, &kept, [&](Maps* maps, Params* params) {
    return fill_down(problem, plan, activated, y, progress, maps, params);
  }));
  kept.set_ready(true);
  FLASHMOE_TRY(launch_planned(plan, 0, &kept->params[0], stream));
  FLASHMOE_TRY(launch_planned(plan, 1, &kept->params[1], stream));
  return launch_combine(problem, plan, 2, y, problem.hidden, stream);
}

// ---- the product alone

Product product_of(const GroupedProductProblem& p, bool adds) {
  const Major major = major_of(p.w);
  const int64_t batches = p.counts != nullptr ? p.experts : 1;
  const int64_t expert_rows =
      p.counts != nullptr ? p.rows : p.rows / std::max<int64_t>(p.experts, 1);
  const bool wide = adds || p.out.dtype != p.x.dtype;
  return {wide ? Use::kWideDown : use_of_rows(major, p.columns, expert_rows),
          p.x.dtype,
          p.device,
          p.rows,
          batches,
          p.experts,
          p.columns,
          p.out_columns,
          major};
}

flashmoe_status plan_product(const GroupedProductProblem& problem, Plan* plan,
                             const Reason& reason) {
  const DeviceFacts* facts = nullptr;
  FLASHMOE_TRY(check_hopper(problem.device.device_id, &facts, reason));
  FLASHMOE_TRY(check_tensor_maps(problem.device.device_id, reason));
  const Product product = product_of(problem, false);
  FLASHMOE_TRY(
      check_weights("w", problem.w, problem.experts, problem.out_columns, problem.columns, reason));
  FLASHMOE_TRY(check_rows("x", problem.x, product.rows, product.batches, reason));
  FLASHMOE_TRY(check_rows("out", problem.out, product.rows, product.batches, reason));
  plan->info.microseconds = microseconds(work_of(problem), kProductSpeed, *facts);
  return add_product("x", *facts, product, plan, reason);
}

bool set_output(const GroupedProductProblem& p, const Product& product, bool adds, Maps* maps,
                Params* params) {
  if (product.use != Use::kWideDown) {
    return maps->set_out({p.out.data, p.out_columns, product.rows, product.batches,
                          p.out.row_stride, p.out.expert_stride, 0, p.out.dtype},
                         &params->out);
  }
  params->wide_out = p.out.data;
  params->wide_row_stride = p.out.row_stride;
  params->wide_batch_stride = p.out.expert_stride;
  params->wide_is_fp32 = p.out.dtype == Dtype::kFloat32 ? 1 : 0;
  params->wide_adds = adds ? 1 : 0;
  return true;
}

bool fill_alone(const GroupedProductProblem& p, bool adds, const Plan& plan, int index, Maps* maps,
                Params* params) {
  const Product product = product_of(p, adds);
  if (!fill_product(product, p.w, p.w, *static_cast<const Entry*>(plan.entries[index]),
                    clusters_of(plan, index), maps, params) ||
      !maps->set_tokens({p.x.data, p.columns, product.rows, product.batches, p.x.row_stride,
                         p.x.expert_stride, 0, p.x.dtype},
                        params) ||
      !set_output(p, product, adds, maps, params)) {
    return false;
  }
  params->offsets = p.offsets;
  params->counts = p.counts;
  params->bias[0] = bias_of(p.bias);
  return true;
}

flashmoe_status launch_product(const GroupedProductProblem& p, const Plan& plan, void*,
                               void* stream) {
  const DeviceGuard guard(p.device.device_id);
  FLASHMOE_TRY(guard.status());
  Prepared<Kept> kept(plan.detail);
  FLASHMOE_TRY(prepare(plan, 0, &kept, [&](Maps* maps, Params* params) {
    return fill_alone(p, false, plan, 0, maps, params);
  }));
  kept.set_ready(true);
  return launch_planned(plan, 0, &kept->params[0], stream);
}

// Launches a stage of another family's plan, which keeps no parameters.
template <class Fill>
flashmoe_status launch_stage(const Plan& plan, int index, void* stream, const Fill& fill) {
  const flashmoe_launch& planned = plan.info.launches[index];
  Params params = {};
  FLASHMOE_TRY(encode_maps(planned.kernel, planned.device.device_id, [&] {
    const void* mapped[kMostMaps];
    Maps maps(false, mapped);
    return fill(&maps, &params);
  }));
  return launch_planned(plan, index, &params, stream);
}

}  // namespace

flashmoe_status add_up(const MoeForwardProblem& problem, const DeviceFacts& facts, Plan* plan,
                       const Reason& reason) {
  return add_product("weights", facts, up_of(problem), plan, reason);
}

int64_t most_progress_words(int multiprocessors) {
  return int64_t{multiprocessors} * kConsumers + 1;
}

flashmoe_status launch_up(const MoeForwardProblem& problem, const Plan& plan, int index,
                          void* activated, uint32_t* progress, void* stream) {
  return launch_stage(plan, index, stream, [&](Maps* maps, Params* params) {
    return fill_up(problem, plan, index, activated, progress, maps, params);
  });
}

int64_t up_gradient_parts(int64_t inner) {
  constexpr int64_t kTileRows = int64_t{kHalves} * kConsumers * kBoxColumns;
  return kConsumers * ceil_div(inner, kTileRows);
}

flashmoe_status add_up_gradient(const MoeForwardProblem& da, const DeviceFacts& facts, Plan* plan,
                                const Reason& reason) {
  return add_product("weights", facts, up_gradient_of(da), plan, reason);
}

flashmoe_status launch_up_gradient(const MoeForwardProblem& da, const UpGradient& gradient,
                                   const Plan& plan, int index, void* stream) {
  return launch_stage(plan, index, stream, [&](Maps* maps, Params* params) {
    return fill_up_gradient(da, gradient, plan, index, maps, params);
  });
}

flashmoe_status add_rows_product(const char* name, const GroupedProductProblem& problem, bool adds,
                                 const DeviceFacts& facts, Plan* plan, const Reason& reason) {
  return add_product(name, facts, product_of(problem, adds), plan, reason);
}

flashmoe_status launch_rows_product(const GroupedProductProblem& problem, bool adds,
                                    const Plan& plan, int index, void* stream) {
  return launch_stage(plan, index, stream, [&](Maps* maps, Params* params) {
    return fill_alone(problem, adds, plan, index, maps, params);
  });
}

}  // namespace flashmoe::moe::sm90

namespace flashmoe {

const MoeForwardFamily kSm90MoeForward = {"sm90", FLASHMOE_DEVICE_CUDA, &moe::sm90::plan_forward,
                                          &moe::sm90::launch_forward};
const GroupedProductFamily kSm90GroupedProduct = {
    "sm90", FLASHMOE_DEVICE_CUDA, &moe::sm90::plan_product, &moe::sm90::launch_product};

}  // namespace flashmoe
