// The interface between the backward launcher and the per-ISA kernels. Plain declarations only, as
// in attention_kernel.h.
#pragma once

#include "cpu/attention_kernel.h"

namespace flashmoe::cpu {

// A block of rows, as in tiles of the forward, meets a tile of keys.
struct AttentionBackwardStep {
  AttentionTile rows;
  int64_t first_key;
  int64_t keys;
};

// The kernels of one instruction set for one dtype. For a tile of keys a thread calls `begin_keys`,
// then `add_rows` and `add_dq` for each block of its rows, then `end_keys`, with one scratch,
// 64-byte aligned.
struct AttentionBackwardKernel {
  const char* isa;
  int32_t (*tile_keys)(const AttentionBackwardProblem& problem);
  int32_t (*block_rows)(const AttentionBackwardProblem& problem);
  size_t (*scratch_bytes)(const AttentionBackwardProblem& problem);   // per thread
  size_t (*dq_sums_bytes)(const AttentionBackwardProblem& problem);   // per block of rows
  size_t (*key_sums_bytes)(const AttentionBackwardProblem& problem);  // dk and dv of a tile of keys

  // `step.rows` names the batch and the KV head, and no row.
  void (*begin_keys)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                     void* scratch);
  // Adds what the rows contribute to dk and dv of the tile.
  void (*add_rows)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                   void* scratch);
  // Adds the tile's contribution to dq of the rows last added. The first tile to add begins the
  // sums, the last one writes dq. `sums` may be nullptr for a tile that is both.
  void (*add_dq)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                 void* scratch, void* sums, bool first, bool last);
  // Adds the rows' contributions to dk and dv of the tile to `sums`, as add_dq does for dq.
  void (*end_keys)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                   void* scratch, void* sums, bool first, bool last);
  // Returns `sum` plus what the problem's rows add to dsinks of a query head, row by row.
  double (*add_dsink)(const AttentionBackwardProblem& problem, int64_t head, double sum);
  // Writes such a sum.
  void (*write_dsink)(const AttentionBackwardProblem& problem, int64_t head, double sum);
  double flops_per_thread = kFlopsPerThread;
};

// One per instruction set, indexed by Dtype.
extern const AttentionBackwardKernel kScalarAttentionBackward[3];
#if FLASHMOE_CPU_X86
extern const AttentionBackwardKernel kAvx2AttentionBackward[3];
extern const AttentionBackwardKernel kAvx512AttentionBackward[3];
extern const AttentionBackwardKernel kAvx512Bf16AttentionBackward;  // bf16 only
#if FLASHMOE_CPU_AMX
extern const AttentionBackwardKernel kAmxAttentionBackward;  // bf16 only
#endif
#endif
extern const AttentionBackwardKernel kFp64AttentionBackward;

}  // namespace flashmoe::cpu
