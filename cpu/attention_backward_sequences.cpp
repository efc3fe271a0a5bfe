// The calling thread reads the lengths once into a list in the workspace. The pieces of a sequence
// are taken as in a dense batch (attention_backward_tiles.h). Sequences are taken by the work of
// one piece, the most first, so that a long one does not start when the others have ended.
//
// Sums of dq, dk and dv have room for as many rows and keys as the tensors have. Offsets that go
// back and forth may name more, since sequences then share rows. Only then are there several
// rounds, each with as many sequences as fit.
//
// The part of its room that a sequence leaves unused is set to 0 first, since with such offsets it
// may belong to another.
#include "cpu/attention_backward_sequences.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/attention_backward_tiles.h"
#include "cpu/attention_schedule.h"
#include "cpu/sequence_rows.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {
namespace {

struct Sequence {
  SequenceRows rows;
  int64_t batch;
  int64_t end_piece;       // of all pieces of its round, after this sequence's last
  int64_t first_block;     // among all blocks that sum dq in its round
  int64_t first_key_tile;  // among all tiles that sum dk and dv in its round
  double piece_work;
};

AttentionBackwardProblem problem_of(const AttentionBackwardProblem& p, const SequenceRows& rows) {
  AttentionBackwardProblem own = p;
  narrow_to(rows, &own);
  return own;
}

// The most sums at a time, for blocks of rows and for tiles of keys.
struct Room {
  int64_t blocks = 0;
  int64_t key_tiles = 0;
};

// Counts units over all sequences and KV heads. A sequence has at most `most` units of `unit` rows.
// With `offsets` the sequences divide the tensor's rows, and each may begin a unit that it does not
// fill. False: too many to be numbered.
bool count_units(const AttentionBackwardProblem& p, int64_t most, const Numbers& offsets,
                 int64_t rows, int64_t unit, int64_t* units) {
  if (__builtin_mul_overflow(most, p.batch, units)) *units = INT64_MAX;
  if (offsets.data != nullptr) *units = std::min(*units, rows / unit + p.batch);
  return !__builtin_mul_overflow(*units, p.heads_kv, units) && *units <= UINT32_MAX;
}

bool count_room(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                Room* room) {
  AttentionBackwardProblem longest = p;
  longest.batch = 1;
  const BackwardCut cut(longest, kernel);
  *room = {};
  if (p.batch == 0) return true;
  const SequenceTables& tables = p.sequences;
  if (cut.blocks_in_all > 0 &&
      !count_units(p, cut.blocks, tables.cu_seqlens_q, tables.rows_q * (p.heads_q / p.heads_kv),
                   cut.block_rows, &room->blocks)) {
    return false;
  }
  // A shorter sequence with few tiles may be cut into parts even if the longest is not.
  const bool keys = p.dk.data != nullptr || p.dv.data != nullptr;
  const int64_t tiles = std::min(cut.tiles, BackwardCut::most_tiles_with_parts(p.heads_kv));
  if (!keys || cut.blocks < 2 * kLeastBlocksOfPart || tiles == 0) return true;
  return count_units(p, tiles, tables.cu_seqlens_k, tables.rows_k, cut.tile_keys, &room->key_tiles);
}

// The part of the workspace that threads share: the list, then the sums.
struct Shared {
  uint64_t list;  // bytes
  BackwardSums sums;

  Shared(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel, const Room& room)
      : list(whole_lines(static_cast<uint64_t>(p.batch) * sizeof(Sequence))),
        sums(p, kernel, room.blocks, room.key_tiles) {}
  uint64_t bytes() const { return list + sums.bytes(); }
};

// ---- rows of no sequence ----------------------------------------------------------------------

void zero(const RowsView<void>& to, int64_t batch, Range rows, int64_t heads, int64_t dim) {
  if (to.data == nullptr || rows.count == 0) return;
  const int64_t bytes = dtype_bytes(to.dtype);
  auto* const first =
      static_cast<unsigned char*>(address_of_row(to.data, to.strides, bytes, batch, rows.begin));
  if (to.strides.head == dim && to.strides.seq == heads * dim) {
    std::memset(first, 0, static_cast<size_t>(rows.count * heads * dim * bytes));
    return;
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memset(first + (row * to.strides.seq + head * to.strides.head) * bytes, 0,
                  static_cast<size_t>(dim * bytes));
    }
  }
}

void zero_queries(const AttentionBackwardProblem& p, int64_t batch, int64_t begin, int64_t end) {
  zero(p.dq, batch, {begin, end - begin}, p.heads_q, p.dim);
}

void zero_keys(const AttentionBackwardProblem& p, int64_t batch, int64_t begin, int64_t end) {
  zero(p.dk, batch, {begin, end - begin}, p.heads_kv, p.dim);
  zero(p.dv, batch, {begin, end - begin}, p.heads_kv, p.dim_v);
}

// Zeroes the rows and keys in the room of sequence b that it does not use. In a sequence without
// queries no key has a gradient.
void zero_around(const AttentionBackwardProblem& p, int64_t b) {
  const SequenceTables& tables = p.sequences;
  const SequenceRows rows = rows_of_sequence(p, b);
  const Range room_q = room_of_queries(tables, b);
  zero_queries(p, rows.batch_q, room_q.begin, rows.queries.begin);
  zero_queries(p, rows.batch_q, rows.queries.end(), room_q.end());
  const Range room_k = room_of_keys(tables, b);
  const int64_t batch_k = tables.cu_seqlens_k.data != nullptr ? 0 : b;
  const Range keys = rows.keys.count > 0 ? rows.keys : Range{room_k.begin, 0};
  zero_keys(p, batch_k, room_k.begin, keys.begin);
  zero_keys(p, batch_k, keys.end(), room_k.end());
}

// Zeroes the rows before the first offset and after the last: between them every row is in some
// room.
void zero_ends(const AttentionBackwardProblem& p) {
  const SequenceTables& tables = p.sequences;
  const auto outside = [&](const Numbers& offsets, int64_t rows, const auto& zero_rows) {
    if (offsets.data == nullptr) return;
    zero_rows(p, 0, 0, std::clamp<int64_t>(offsets.at(0), 0, rows));
    zero_rows(p, 0, std::clamp<int64_t>(offsets.at(p.batch), 0, rows), rows);
  };
  outside(tables.cu_seqlens_q, tables.rows_q, zero_queries);
  outside(tables.cu_seqlens_k, tables.rows_k, zero_keys);
}

struct Zeros {
  const AttentionBackwardProblem& problem;
  std::atomic<int64_t> next{0};
};

void work_on_zeros(void* context, int32_t) {
  Zeros& zeros = *static_cast<Zeros*>(context);
  for (;;) {
    const int64_t b = zeros.next.fetch_add(1, std::memory_order_relaxed);
    if (b > zeros.problem.batch) return;
    if (b < zeros.problem.batch) {
      zero_around(zeros.problem, b);
    } else {
      zero_ends(zeros.problem);
    }
  }
}

// ---- rounds -----------------------------------------------------------------------------------

// Fills the list with the sequences that have queries, in the order of their work. Returns its end
// and the total work.
Sequence* read_sequences(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                         Sequence* list, double* all_work) {
  Sequence* end = list;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence& sequence = *end;
    sequence = {};
    sequence.batch = b;
    sequence.rows = rows_of_sequence(p, b);
    if (sequence.rows.queries.count == 0) continue;
    const AttentionBackwardProblem own = problem_of(p, sequence.rows);
    const BackwardCut cut(own, kernel);
    if (cut.pieces_in_all == 0) return list;  // only dsinks are wanted
    const double work = attention_backward_flops(own);
    sequence.piece_work = work / static_cast<double>(cut.pieces_in_all);
    *all_work += work;
    ++end;
  }
  std::sort(list, end, [](const Sequence& a, const Sequence& b) {
    return a.piece_work != b.piece_work ? a.piece_work > b.piece_work : a.batch < b.batch;
  });
  return end;
}

struct Round {
  const AttentionBackwardProblem& problem;
  const AttentionBackwardKernel& kernel;
  const Sequence* begin;
  const Sequence* end;
  int64_t pieces;
  int64_t sinks;  // more pieces, after these
  SumsInTurn dq;
  SumsInTurn keys;
  unsigned char* scratch;
  uint64_t scratch_bytes;  // per thread
  std::atomic<int64_t> next{0};
};

void work_on_sequence(const Round& round, int64_t index, void* scratch) {
  const Sequence& sequence =
      *std::upper_bound(round.begin, round.end, index,
                        [](int64_t i, const Sequence& each) { return i < each.end_piece; });
  const AttentionBackwardProblem own = problem_of(round.problem, sequence.rows);
  const BackwardCut cut(own, round.kernel);
  const BackwardTiles tiles = {own, round.kernel, cut, round.dq.from(sequence.first_block),
                               round.keys.from(sequence.first_key_tile)};
  work_on_piece(tiles, index - (sequence.end_piece - cut.pieces_in_all), scratch);
}

// Sums over the sequences in order, so that equal lengths have the bits of a dense batch.
void write_dsink(const Round& round, int64_t head) {
  double sum = 0.0;
  for (int64_t b = 0; b < round.problem.batch; ++b) {
    const SequenceRows rows = rows_of_sequence(round.problem, b);
    if (rows.queries.count == 0) continue;
    sum = round.kernel.add_dsink(problem_of(round.problem, rows), head, sum);
  }
  round.kernel.write_dsink(round.problem, head, sum);
}

void work(void* context, int32_t worker) {
  Round& round = *static_cast<Round*>(context);
  void* scratch = round.scratch + static_cast<uint64_t>(worker) * round.scratch_bytes;
  for (;;) {
    const int64_t index = round.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= round.pieces + round.sinks) return;
    if (index < round.pieces) {
      work_on_sequence(round, index, scratch);
    } else {
      write_dsink(round, index - round.pieces);
    }
  }
}

// Takes sequences from `begin` on while their sums fit in `room`, sets their places, and returns
// their end.
Sequence* take_round(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                     const Room& room, Sequence* begin, Sequence* end, int64_t* pieces) {
  Room taken;
  *pieces = 0;
  for (; begin != end; ++begin) {
    const BackwardCut cut(problem_of(p, begin->rows), kernel);
    if (taken.blocks + cut.blocks_in_all > room.blocks) return begin;
    if (taken.key_tiles + cut.key_tiles_in_all > room.key_tiles) return begin;
    begin->first_block = taken.blocks;
    begin->first_key_tile = taken.key_tiles;
    taken.blocks += cut.blocks_in_all;
    taken.key_tiles += cut.key_tiles_in_all;
    begin->end_piece = *pieces += cut.pieces_in_all;
  }
  return begin;
}

}  // namespace

flashmoe_status backward_sequences_bytes(const AttentionBackwardProblem& p,
                                         const AttentionBackwardKernel& kernel, uint64_t* bytes,
                                         const Reason& reason) {
  Room room;
  if (!count_room(p, kernel, &room)) {
    return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED,
                         "%lld sequences of at most %lld queries and %lld KV heads may have more "
                         "than %u blocks of rows or tiles of keys",
                         static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
                         static_cast<long long>(p.heads_kv), UINT32_MAX);
  }
  *bytes = Shared(p, kernel, room).bytes();
  return FLASHMOE_OK;
}

void launch_backward_sequences(const AttentionBackwardProblem& p,
                               const AttentionBackwardKernel& kernel, int32_t threads,
                               unsigned char* workspace) {
  Room room;  // plan() found it to be enough
  count_room(p, kernel, &room);
  const Shared shared(p, kernel, room);
  if (!p.accumulate) {
    Zeros zeros = {p};
    const auto most = static_cast<int32_t>(std::min<int64_t>(threads, p.batch + 1));
    parallel_run(most, work_on_zeros, &zeros);
  }
  auto* const list = reinterpret_cast<Sequence*>(workspace);
  unsigned char* const sums = workspace + shared.list;
  double all_work = 0;
  Sequence* const end = read_sequences(p, kernel, list, &all_work);
  threads = choose_threads(all_work, kernel.flops_per_thread, threads);
  Sequence* begin = list;
  do {
    int64_t pieces = 0;
    Sequence* const last = take_round(p, kernel, room, begin, end, &pieces);
    shared.sums.begin(sums);
    const int64_t sinks = last == end && p.dsinks.data != nullptr ? p.heads_q : 0;
    Round round = {p,
                   kernel,
                   begin,
                   last,
                   pieces,
                   sinks,
                   shared.sums.dq(sums),
                   shared.sums.keys(sums),
                   workspace + shared.bytes(),
                   whole_lines(kernel.scratch_bytes(p))};
    const int64_t all = std::max<int64_t>(pieces + sinks, 1);
    parallel_run(static_cast<int32_t>(std::min<int64_t>(threads, all)), work, &round);
    begin = last;
  } while (begin != end);
}

}  // namespace flashmoe::cpu
