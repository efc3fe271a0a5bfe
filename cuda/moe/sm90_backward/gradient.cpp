#include "cuda/moe/sm90_backward/gradient.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/moe/sm90/products.h"
#include "cuda/moe/sm90_backward/entry.h"
#include "cuda/moe/sm90_backward/params.h"
#include "cuda/tensor_map.h"

namespace flashmoe::moe::sm90_backward {

#define FLASHMOE_ENTRY(name) extern const Entry entry_##name;
#include "cuda/moe/sm90_backward/entries.inc"
#undef FLASHMOE_ENTRY

namespace {

const Entry* const kEntries[] = {
#define FLASHMOE_ENTRY(name) &entry_##name,
#include "cuda/moe/sm90_backward/entries.inc"
#undef FLASHMOE_ENTRY
};

constexpr int64_t kMaxItems = int64_t{1} << 30;
constexpr int64_t kMaxColumns = int64_t{1} << 30;  // column + tile fits in int32
// Average rows per expert from which on blocks share gathered rows. In tiles of few steps sharing
// is slower (docs/lab/moe_backward_sm90.md).
constexpr int64_t kLeastSharedRows = 256;

const Entry* find_entry(Dtype dtype) {
  for (const Entry* entry : kEntries) {
    if (entry->dtype == dtype) return entry;
  }
  return nullptr;
}

// How columns of the gradient are cut into tiles: as few as can be, the last ones narrower by a
// box.
struct Columns {
  int64_t tiles;
  int64_t wide;
};

Columns columns_of(int64_t n, const Entry& entry) {
  const int64_t boxes = ceil_div(n, kBoxColumns);
  const int64_t most = entry.tile_n / kBoxColumns;
  const int64_t tiles = ceil_div(boxes, most);
  const int64_t narrow = most * tiles - boxes;
  return {tiles, std::max<int64_t>(tiles - narrow, 0)};
}

// Whether the left operand is the kernel's `a`, so that the gradient is not turned round. The
// gathered operand is `b`. Otherwise that is decided by the time of all tiles, and by what it costs
// to store a gradient turned round (docs/lab/moe_backward_sm90.md).
bool left_is_a(const Gradient& g, const Entry& entry) {
  constexpr double kTurned = 1.03;
  constexpr double kNarrow = 0.88;  // of the time of a wide tile
  if (g.left.by_token || g.right.by_token) return g.right.by_token;
  const auto time = [&](int64_t m, int64_t n, bool turned) {
    const Columns columns = columns_of(n, entry);
    const double wide = static_cast<double>(columns.wide) +
                        static_cast<double>(columns.tiles - columns.wide) * kNarrow;
    return static_cast<double>(ceil_div(m, entry.tile_m)) * wide * (turned ? kTurned : 1.0);
  };
  const bool by_columns = g.out.column_stride == 1;
  return time(g.m, g.n, !by_columns) <= time(g.n, g.m, by_columns);
}

struct Extents {
  int64_t m;
  int64_t n;
  Columns columns;
  int64_t shared_m_tiles;
  int64_t tiles;  // per expert: tiles of clusters
};

Extents extents_of(const Gradient& g, const Entry& entry) {
  Extents extents;
  const bool is_a = left_is_a(g, entry);
  extents.m = is_a ? g.m : g.n;
  extents.n = is_a ? g.n : g.m;
  extents.columns = columns_of(extents.n, entry);
  const int64_t n_tiles = extents.columns.tiles;
  const int64_t m_tiles = ceil_div(extents.m, entry.tile_m);
  const bool gathers = g.left.by_token || g.right.by_token;
  // Contiguous rows of `b` are shared where sharing `a` would leave a block without a tile.
  const bool shares_b = gathers ? g.rows >= kLeastSharedRows * g.experts : n_tiles % kCluster != 0;
  extents.shared_m_tiles = shares_b ? m_tiles / kCluster * kCluster : 0;
  extents.tiles = n_tiles * (extents.shared_m_tiles / kCluster) +
                  ceil_div(n_tiles, kCluster) * (m_tiles - extents.shared_m_tiles);
  return extents;
}

flashmoe_status check_operand(const Gradient& g, const Operand& operand, const Reason& reason) {
  if (g.rows == 0) return FLASHMOE_OK;  // nothing is read
  if (operand.by_token) return sm90::check_gathered(operand.name, operand.rows, g.tokens, reason);
  return sm90::check_rows(operand.name, operand.rows, g.rows, g.counts != nullptr ? g.experts : 1,
                          reason);
}

bool encode(const Gradient& g, const Operand& operand, int64_t columns, int box_rows,
            CUtensorMap* map) {
  // Nothing is read without rows, but the driver refuses an empty map.
  const void* const data = g.rows > 0 ? operand.rows.data : g.out.data;
  const int64_t batches = g.counts != nullptr ? g.experts : 1;
  return encode_map(map, operand.rows.dtype, data,
                    {4,
                     {columns, g.rows, batches, 1},
                     {1, operand.rows.row_stride, operand.rows.expert_stride, 0},
                     {kBoxColumns, box_rows, 1, 1}});
}

// The same for rows that are gathered one by one.
bool encode_rows(const Gradient& g, const Operand& operand, int64_t columns, CUtensorMap* map) {
  const void* const data = g.rows > 0 ? operand.rows.data : g.out.data;
  return encode_map(map, operand.rows.dtype, data,
                    {2, {columns, g.tokens}, {1, operand.rows.row_stride}, {kBoxColumns, 1}});
}

// Whether the copy engine may write the gradient: it has 16 bits, is not accumulated, and has
// strides that the engine can walk.
bool leaves_in_boxes(const Gradient& g) {
  const int64_t end = kMaxStrideBytes / dtype_bytes(g.out.dtype);
  const auto fits = [end](int64_t stride, int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < end);
  };
  return g.out.dtype != Dtype::kFloat32 && !g.accumulate && fits(g.out.row_stride, g.m) &&
         fits(g.out.column_stride, g.n) && fits(g.out.expert_stride, g.experts);
}

bool encode_boxes(const Gradient& g, CUtensorMap* map) {
  const bool by_rows = g.out.column_stride == 1;
  constexpr int kOutBox = 64;
  return encode_map(map, g.out.dtype, g.out.data,
                    {4,
                     {by_rows ? g.n : g.m, by_rows ? g.m : g.n, g.experts, 1},
                     {1, by_rows ? g.out.row_stride : g.out.column_stride, g.out.expert_stride, 0},
                     {kOutBox, kOutBox, 1, 1}});
}

// Returns false if the driver refuses a map.
bool fill_job(const Gradient& g, const Entry& entry, Job* job) {
  const Extents extents = extents_of(g, entry);
  const bool swaps = !left_is_a(g, entry);
  const Operand& a = swaps ? g.right : g.left;
  const Operand& b = swaps ? g.left : g.right;
  if (!encode(g, a, extents.m, entry.step, &job->a) ||
      !(b.by_token ? encode_rows(g, b, extents.n, &job->b)
                   : encode(g, b, extents.n, entry.step / kCluster, &job->b)) ||
      (leaves_in_boxes(g) && !encode_boxes(g, &job->boxes))) {
    return false;
  }
  if (b.by_token) {
    job->x = static_cast<const uint16_t*>(b.rows.data);
    job->x_row_chunks = static_cast<uint32_t>(b.rows.row_stride / 8);
  }
  job->m = static_cast<int32_t>(extents.m);
  job->n = static_cast<int32_t>(extents.n);
  job->n_tiles = static_cast<int32_t>(extents.columns.tiles);
  job->wide_n_tiles = static_cast<int32_t>(extents.columns.wide);
  job->shared_m_tiles = static_cast<int32_t>(extents.shared_m_tiles);
  job->tiles = static_cast<int32_t>(extents.tiles);
  job->out = g.out.data;
  job->expert_stride = g.out.expert_stride;
  job->m_stride = swaps ? g.out.column_stride : g.out.row_stride;
  job->n_stride = swaps ? g.out.row_stride : g.out.column_stride;
  job->in_boxes = leaves_in_boxes(g) ? 1 : 0;
  job->is_fp32 = g.out.dtype == Dtype::kFloat32 ? 1 : 0;
  job->accumulate = g.accumulate ? 1 : 0;
  return true;
}

}  // namespace

flashmoe_status add_gradients(const GradientsOfLaunch& gradients, const DeviceFacts& facts,
                              Plan* plan, const Reason& reason) {
  const Gradient& any = gradients.each[0];
  const Entry* const entry = find_entry(any.left.rows.dtype);
  if (entry == nullptr) return reason.refuse(FLASHMOE_ERROR_INTERNAL, "no kernel for this dtype");
  int64_t items = 0;
  for (int i = 0; i < gradients.count; ++i) {
    const Gradient& g = gradients.each[i];
    FLASHMOE_TRY(check_operand(g, g.left, reason));
    FLASHMOE_TRY(check_operand(g, g.right, reason));
    const bool fits = g.m <= kMaxColumns && g.n <= kMaxColumns;
    if (fits) items += extents_of(g, *entry).tiles * g.experts;
    if (!fits || items > kMaxItems) {
      return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                           "%s: got gradients of %lld rows of %lld columns, accepted are at most "
                           "2^30 of each, and as many tiles",
                           g.left.name, static_cast<long long>(g.m), static_cast<long long>(g.n));
    }
  }
  int arch = 0;
  FLASHMOE_TRY(load_kernel(*entry, any.device.device_id, facts, &arch, reason));
  const int64_t clusters = std::clamp<int64_t>(items, 1, facts.multiprocessors / kCluster);
  flashmoe_launch& launch = plan_launch(*entry, any.device.device_id, "a", clusters * kCluster,
                                        entry->threads, entry->shared_bytes, plan);
  launch.cluster = kCluster;
  launch.tile_m = entry->tile_m;
  launch.tile_n = entry->tile_n;
  launch.stages = entry->stages;
  return FLASHMOE_OK;
}

flashmoe_status launch_gradients(const GradientsOfLaunch& gradients,
                                 const moe_backward::Queue& queue, const Plan& plan, int index,
                                 void* stream) {
  const Entry& entry = *static_cast<const Entry*>(plan.entries[index]);
  const flashmoe_launch& planned = plan.info.launches[index];
  const Gradient& any = gradients.each[0];
  Params params = {};
  FLASHMOE_TRY(encode_maps(planned.kernel, planned.device.device_id, [&] {
    for (int i = 0; i < gradients.count; ++i) {
      if (!fill_job(gradients.each[i], entry, &params.jobs[i])) return false;
    }
    return true;
  }));
  for (int i = 0; i < gradients.count; ++i) params.tiles += params.jobs[i].tiles;
  params.gathers = any.left.by_token || any.right.by_token ? 1 : 0;
  params.row_tokens = any.row_tokens;
  params.tokens = static_cast<int32_t>(any.tokens);
  params.offsets = any.offsets;
  params.counts = any.counts;
  params.rows = static_cast<int32_t>(any.rows);
  params.taken = queue.taken;
  params.experts = queue.experts;
  params.items = static_cast<int32_t>(params.tiles * any.experts);
  return launch_planned(plan, index, &params, stream);
}

}  // namespace flashmoe::moe::sm90_backward
