// Between the launcher of the backward and the per-ISA kernels. As attention_kernel.h, plain
// declarations only.
#pragma once

#include "cpu/attention_kernel.h"

namespace flashmoe::cpu {

// A block of rows, as tiles of the forward have them, meets a tile of keys.
struct AttentionBackwardStep {
  AttentionTile rows;
  int64_t first_key;
  int64_t keys;
};

// The kernels of one instruction set for one dtype. A thread takes a tile of keys through
// `begin_keys`, for each block of its rows `add_rows` and `add_dq`, then `end_keys`, with one
// scratch, 64-byte aligned.
struct AttentionBackwardKernel {
  const char* isa;
  int32_t (*tile_keys)(const AttentionBackwardProblem& problem);
  int32_t (*block_rows)(const AttentionBackwardProblem& problem);
  size_t (*scratch_bytes)(const AttentionBackwardProblem& problem);   // of one thread
  size_t (*dq_sums_bytes)(const AttentionBackwardProblem& problem);   // of a block of rows
  size_t (*key_sums_bytes)(const AttentionBackwardProblem& problem);  // dk and dv of a tile of keys

  // `step.rows` names the batch and the KV head, and no row.
  void (*begin_keys)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                     void* scratch);
  // Adds what the rows contribute to dk and dv of the tile.
  void (*add_rows)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                   void* scratch);
  // Adds what the tile contributes to dq of the rows last added. The first tile that does begins
  // the sums, the last one writes dq. `sums` may be nullptr for a tile that is both.
  void (*add_dq)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                 void* scratch, void* sums, bool first, bool last);
  // Adds what the rows contributed to dk and dv of the tile to `sums`, as add_dq does to its own.
  void (*end_keys)(const AttentionBackwardProblem& problem, const AttentionBackwardStep& step,
                   void* scratch, void* sums, bool first, bool last);
  // `sum` and what the rows of the problem add to dsinks of a query head, row by row.
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
