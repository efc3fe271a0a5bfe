#include "cuda/attention/walkable.h"

#include <algorithm>

namespace flashmoe {
namespace {

// Whether the copy engine can walk a view. Strides are above 0 and below 2^40 bytes, or 0 for
// batches and heads; the map then has an extent of 1.
template <class Data>
bool can_walk(const RowsView<Data>& view, int64_t batch, int64_t seq, int64_t heads) {
  const int64_t end = kMaxStrideBytes / dtype_bytes(view.dtype);
  const auto fits = [=](int64_t stride, int64_t extent, int64_t least) {
    return extent <= 1 || (stride >= least && stride < end);
  };
  return fits(view.strides.batch, batch, 0) && fits(view.strides.seq, seq, 1) &&
         fits(view.strides.head, heads, 0);
}

flashmoe_status check_walkable(bool walkable, flashmoe_device device, const Reason& reason) {
  if (!walkable) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED,
        "a stride that is negative, 2^40 bytes or more, or 0 along the sequence, which the copy "
        "engine cannot walk");
  }
  return check_tensor_maps(device.device_id, reason);
}

}  // namespace

flashmoe_status check_walkable(const AttentionProblem& p, const Reason& reason) {
  const TensorRows rows = tensor_rows(p);
  const bool empty = p.batch == 0 || p.seq_q == 0;  // strides are 0 then
  const bool walkable = empty || (can_walk(p.q, rows.batch_q, rows.rows_q, p.heads_q) &&
                                  can_walk(p.k, rows.batch_k, rows.rows_k, p.heads_kv) &&
                                  can_walk(p.v, rows.batch_k, rows.rows_k, p.heads_kv) &&
                                  can_walk(p.out, rows.batch_q, rows.rows_q, p.heads_q));
  return check_walkable(walkable, p.device, reason);
}

flashmoe_status check_walkable(const AttentionBackwardProblem& p, const Reason& reason) {
  const TensorRows rows = tensor_rows(p);
  const auto can_walk_if_there = [&](const auto& view, int64_t batch, int64_t seq, int64_t heads) {
    return view.data == nullptr || can_walk(view, batch, seq, heads);
  };
  const auto queries = [&](const auto& view) {
    return can_walk_if_there(view, rows.batch_q, rows.rows_q, p.heads_q);
  };
  const auto keys = [&](const auto& view) {
    return can_walk_if_there(view, rows.batch_k, rows.rows_k, p.heads_kv);
  };
  const auto is_stored = [&](const RowsView<void>& view) {
    return !p.accumulate && view.dtype == p.q.dtype;
  };
  const bool empty = p.batch == 0;
  const bool walkable =
      empty || (queries(p.q) && queries(p.dout) && keys(p.k) && keys(p.v) &&
                (!is_stored(p.dq) || queries(p.dq)) && (!is_stored(p.dk) || keys(p.dk)) &&
                (!is_stored(p.dv) || keys(p.dv)));
  return check_walkable(walkable, p.device, reason);
}

TensorRows tensor_rows(const AttentionProblem& p) {
  const SequenceTables& tables = p.sequences;
  if (!tables.given) return {p.batch, p.seq_q, p.batch, p.seq_k};
  const bool packed = tables.cu_seqlens_q.data != nullptr;
  return {packed ? 1 : p.batch, tables.rows_q, tables.batch_k, tables.rows_k};
}

MapShape rows_map(const RowStrides& strides, int64_t dim, int64_t seq, int64_t heads, int64_t batch,
                  int columns, int rows) {
  return {4,
          {dim, seq, heads, batch},
          {1, strides.seq, strides.head, strides.batch},
          {columns, rows, 1, 1}};
}

}  // namespace flashmoe
