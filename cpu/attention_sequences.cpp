// The calling thread reads the lengths once into a list in the workspace. Each sequence is cut into
// tiles by its share of all work, as a dense batch is by the number of tiles. Tiles are taken in
// the order of their work, the most first, so that a long sequence does not start when the others
// have ended, nor do they wait for it.
#include "cpu/attention_sequences.h"

#include <algorithm>
#include <atomic>

#include "core/ceil_div.h"
#include "cpu/attention_schedule.h"
#include "cpu/sequence_rows.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {

alignas(64) const unsigned char kHiddenRow[kMaxHeadDim * sizeof(float)] = {};

namespace {

struct Sequence {
  int64_t batch;
  SequenceRows rows;
  int64_t tile_rows;
  int64_t end_tile;  // of all tiles, after this sequence's last
  double tile_work;  // the work of a whole tile; until tile_rows is known, of a row
};

// The dense problem of a sequence.
AttentionProblem problem_of(const AttentionProblem& p, const SequenceRows& rows) {
  AttentionProblem own = p;
  narrow_to(rows, &own);
  return own;
}

// Bytes of scratch for tiles of sequences of any length within the bounds.
size_t scratch_of_any(const AttentionProblem& p, const AttentionKernel& kernel, int64_t tile_rows) {
  AttentionProblem one = p;
  one.batch = 1;
  size_t bytes = 0;
  if (!kernel.has_few_rows(one)) {
    bytes = tile_scratch_bytes(one, kernel, tile_rows);
    one.seq_q = 1;
    if (!kernel.has_few_rows(one)) return bytes;
    while (kernel.has_few_rows(one)) ++one.seq_q;
    --one.seq_q;
  }
  return std::max(bytes, tile_scratch_bytes(one, kernel, std::max<int64_t>(rows_of(one), 1)));
}

int64_t most_tile_rows(const AttentionProblem& p, const AttentionKernel& kernel) {
  return choose_tile_rows(p, kernel, [](int64_t, int64_t) { return false; });
}

size_t list_bytes(const AttentionProblem& p) {
  const size_t bytes = static_cast<size_t>(p.batch) * sizeof(Sequence);
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

struct Launch {
  const AttentionProblem& problem;
  const AttentionKernel& kernel;
  const Sequence* sequences;
  const Sequence* end;
  int64_t tiles;
  unsigned char* scratch;
  size_t scratch_bytes;  // per thread
  std::atomic<int64_t> next{0};
};

void compute_tile(const Launch& launch, int64_t index, void* scratch) {
  const Sequence* const found =
      std::upper_bound(launch.sequences, launch.end, index,
                       [](int64_t i, const Sequence& each) { return i < each.end_tile; });
  const Sequence& sequence = *found;
  const AttentionProblem p = problem_of(launch.problem, sequence.rows);
  const SequenceTables& tables = p.sequences;
  const KeyPages pages = {static_cast<const int32_t*>(tables.page_table.data) +
                              (tables.paged ? sequence.batch * tables.page_table.stride : 0),
                          tables.page_step, tables.batch_k, tables.rows_k,
                          sequence.rows.keys.begin};
  const int64_t left = sequence.end_tile - 1 - index;
  AttentionTile tile;
  tile.batch = 0;
  tile.kv_head = left % p.heads_kv;
  // Last rows first: under a causal mask they see the most keys.
  tile.first_row = left / p.heads_kv * sequence.tile_rows;
  tile.rows = std::min(rows_of(p) - tile.first_row, sequence.tile_rows);
  tile.pages = tables.paged ? &pages : nullptr;
  launch.kernel.compute(p, tile, static_cast<int32_t>(sequence.tile_rows), scratch);
}

void work(void* context, int32_t worker) {
  Launch& launch = *static_cast<Launch*>(context);
  void* scratch = launch.scratch + static_cast<size_t>(worker) * launch.scratch_bytes;
  for (;;) {
    const int64_t index = launch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= launch.tiles) return;
    compute_tile(launch, index, scratch);
  }
}

// Fills the list with the sequences that have queries. Returns its end and the total work.
Sequence* read_sequences(const AttentionProblem& p, Sequence* list, double* all_work) {
  Sequence* end = list;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence& sequence = *end;
    sequence = {};
    sequence.batch = b;
    sequence.rows = rows_of_sequence(p, b);
    if (sequence.rows.queries.count == 0) continue;
    const AttentionProblem own = problem_of(p, sequence.rows);
    constexpr double kFlopsPerRow = 1000;  // of a row that sees no key
    const double rows = static_cast<double>(rows_of(own) * p.heads_kv);
    sequence.tile_work = kFlopsPerRow + attention_flops(own) / rows;
    *all_work += sequence.tile_work * rows;
    ++end;
  }
  return end;
}

// Cuts the tiles for `threads` threads, orders them, and returns their number.
int64_t cut_tiles(const AttentionProblem& p, const AttentionKernel& kernel, int32_t threads,
                  double all_work, Sequence* list, Sequence* end) {
  for (Sequence* each = list; each != end; ++each) {
    AttentionProblem own = p;
    own.seq_q = each->rows.queries.count;
    const double row_work = each->tile_work;
    each->tile_rows = choose_tile_rows(own, kernel, [&](int64_t rows, int64_t per_thread) {
      return row_work * static_cast<double>(rows) * static_cast<double>(threads) *
                 static_cast<double>(per_thread) >
             all_work;
    });
    each->tile_work = row_work * static_cast<double>(std::min(each->tile_rows, rows_of(own)));
    each->end_tile = ceil_div(rows_of(own), each->tile_rows) * p.heads_kv;
  }
  std::sort(list, end, [](const Sequence& a, const Sequence& b) {
    return a.tile_work != b.tile_work ? a.tile_work > b.tile_work : a.batch < b.batch;
  });
  int64_t tiles = 0;
  for (Sequence* each = list; each != end; ++each) each->end_tile = tiles += each->end_tile;
  return tiles;
}

}  // namespace

flashmoe_status plan_sequences(const AttentionProblem& p, const AttentionKernel& kernel,
                               int32_t threads, Plan* plan, const Reason& reason) {
  int64_t pairs = 0;  // pairs of a sequence and a KV head
  if (__builtin_mul_overflow(p.batch, p.heads_kv, &pairs) || pairs > UINT32_MAX) {
    return reason.refuse(
        FLASHMOE_ERROR_UNSUPPORTED, "%lld sequences of %lld KV heads are more than %u pairs",
        static_cast<long long>(p.batch), static_cast<long long>(p.heads_kv), UINT32_MAX);
  }
  const int64_t tile_rows = most_tile_rows(p, kernel);
  add_attention_launch(p, kernel, pairs, threads, tile_rows, plan);
  // The core promises 16-byte alignment; the kernels want whole cache lines.
  const uint64_t per_thread = scratch_of_any(p, kernel, tile_rows);
  const uint64_t shared = list_bytes(p) + kCacheLine;
  plan->info.workspace_bytes = shared + static_cast<uint64_t>(threads) * per_thread;
  plan->room = {shared + per_thread, per_thread};
  return FLASHMOE_OK;
}

void launch_sequences(const AttentionProblem& p, const AttentionKernel& kernel,
                      const flashmoe_launch& planned, void* workspace) {
  unsigned char* const memory = first_cache_line(workspace);
  Sequence* const list = reinterpret_cast<Sequence*>(memory);
  double all_work = 0;
  Sequence* const end = read_sequences(p, list, &all_work);
  const int32_t threads =
      choose_threads(all_work, flops_per_thread(p, kernel), static_cast<int32_t>(planned.block[0]));
  const int64_t tiles = cut_tiles(p, kernel, threads, all_work, list, end);
  Launch launch = {p,
                   kernel,
                   list,
                   end,
                   tiles,
                   memory + list_bytes(p),
                   scratch_of_any(p, kernel, planned.tile_m)};
  parallel_run(tiles < threads ? static_cast<int32_t>(std::max<int64_t>(tiles, 1)) : threads, work,
               &launch);
}

}  // namespace flashmoe::cpu
