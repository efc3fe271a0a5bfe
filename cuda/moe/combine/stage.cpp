#include "cuda/moe/combine/stage.h"

#include <algorithm>

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/moe/combine/entry.h"
#include "cuda/moe/combine/params.h"

namespace flashmoe {
namespace {

constexpr int64_t kPiece = 8;  // elements of a row per thread
constexpr int kBlockThreads = 256;
constexpr int64_t kMostRowBlocks = 65535;  // per grid, along its second axis
constexpr int kFewTokensThreads = 64;  // gives more blocks if tokens alone do not fill the device

const moe_combine::Entry& find_entry(const MoeForwardProblem& p) {
  const moe_combine::Entry* best = nullptr;
  for (const moe_combine::Entry& entry : moe_combine::entries) {
    if (entry.dtype != p.out.dtype) continue;
    best = &entry;
    if (entry.batch >= p.top_k) break;
  }
  return *best;
}

}  // namespace

flashmoe_status add_combine(const MoeForwardProblem& problem, const DeviceFacts& facts, Plan* plan,
                            const Reason& reason) {
  const Kernel& kernel = find_entry(problem).kernel;
  int arch = 0;
  FLASHMOE_TRY(load_kernel(kernel, problem.device.device_id, facts, &arch, reason));
  const int64_t pieces = problem.hidden / kPiece;
  const int64_t most = problem.tokens < facts.multiprocessors ? kFewTokensThreads : kBlockThreads;
  // Blocks split a row evenly; short rows share a block.
  const int64_t row_blocks = std::max<int64_t>(1, (pieces + most - 1) / most);
  if (row_blocks > kMostRowBlocks) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "x: its hidden size is %lld, accepted for %lld tokens are at most %lld",
                         static_cast<long long>(problem.hidden),
                         static_cast<long long>(problem.tokens),
                         static_cast<long long>(kMostRowBlocks * most * kPiece));
  }
  const int64_t row_threads = std::max<int64_t>(1, (pieces + row_blocks - 1) / row_blocks);
  const int64_t block_rows = std::max<int64_t>(1, most / row_threads);
  const int64_t blocks = std::max<int64_t>(1, (problem.tokens + block_rows - 1) / block_rows);
  flashmoe_launch& launch = plan_launch(kernel, problem.device.device_id, "", blocks,
                                        static_cast<int>(row_threads), 0, plan);
  launch.grid[1] = static_cast<uint32_t>(row_blocks);
  launch.block[1] = static_cast<uint32_t>(block_rows);
  launch.tile_n = static_cast<int32_t>(block_rows);
  launch.stages = 1;
  return FLASHMOE_OK;
}

flashmoe_status launch_combine(const MoeForwardProblem& problem, const Plan& plan, int index,
                               const void* y, int64_t y_stride, void* stream) {
  moe_combine::Params params;
  params.y = static_cast<const uint16_t*>(y);
  params.y_stride = y_stride;
  params.out = static_cast<uint16_t*>(problem.out.data);
  params.out_stride = problem.out.row_stride;
  params.slots = problem.slots;
  params.weights = problem.weight_on_input ? nullptr : problem.weights;
  params.rows = static_cast<int32_t>(problem.tokens * problem.top_k);
  params.tokens = static_cast<int32_t>(problem.tokens);
  params.top_k = problem.top_k;
  params.pieces = static_cast<int32_t>(problem.hidden / kPiece);
  return launch_planned(plan, index, &params, stream);
}

}  // namespace flashmoe
