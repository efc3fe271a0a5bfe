// Offsets of keys and values on the host, in chunks of 16 bytes, and whether they fit.
#pragma once

#include "core/ops/attention/problem.h"
#include "core/status.h"
#include "cuda/attention/decode/params.h"

namespace flashmoe::attention_decode {

// Elements of K or V per chunk of 16 bytes.
inline int64_t chunk_elements(const AttentionProblem& p) { return 16 / dtype_bytes(p.k.dtype); }

inline ChunkStrides chunk_strides(const AttentionProblem& p, const RowStrides& strides) {
  // The stride of an extent without a second row may be anything.
  const auto chunks_of = [&](int64_t stride, int64_t extent) {
    return extent > 1 ? static_cast<uint32_t>(stride / chunk_elements(p)) : 0;
  };
  const SequenceTables& tables = p.sequences;
  return {chunks_of(strides.batch, tables.batch_k), chunks_of(strides.seq, tables.rows_k),
          chunks_of(strides.head, p.heads_kv)};
}

inline flashmoe_status check_offsets(const char* name, const RowStrides& strides,
                                     const AttentionProblem& p, const Reason& reason) {
  constexpr int64_t kMost = (int64_t{1} << 32) - 1;
  const SequenceTables& tables = p.sequences;
  int64_t last = 0;
  const auto fits = [&](int64_t stride, int64_t extent) {
    if (extent <= 1) return true;
    if (stride % chunk_elements(p) != 0 || stride < 0) return false;
    const int64_t chunks = stride / chunk_elements(p);
    if (chunks > 0 && extent - 1 > (kMost - last) / chunks) return false;
    last += (extent - 1) * chunks;
    return true;
  };
  if (fits(strides.batch, tables.batch_k) && fits(strides.seq, tables.rows_k) &&
      fits(strides.head, p.heads_kv)) {
    return FLASHMOE_OK;
  }
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                       "%s of 64 GiB or more, or with strides below 0, accepted are others", name);
}

}  // namespace flashmoe::attention_decode
