// What kernels make of the tables of ragged, padded and paged batches, beside plain arithmetic of
// 64 bits: of any numbers, hostile ones too, and every tile in its slot.
#include "cuda/tile/sequence_tables.h"

#include <algorithm>
#include <climits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/tile/score_options.h"

namespace flashmoe {
namespace {

constexpr int32_t kHostile[] = {INT_MIN, -1, 0, 1, 7, 12, 13, 100, INT_MAX - 1, INT_MAX};

std::mt19937 random_numbers(1);

int any_of(int count) { return static_cast<int>(random_numbers() % static_cast<unsigned>(count)); }

// Numbers between others, a step apart: either may be read, and nothing else.
struct Column {
  std::vector<int32_t> memory;
  int64_t stride;

  Column(int64_t count, int most) : stride(1 + any_of(3)) {
    memory.resize(static_cast<size_t>(count * stride));
    for (int32_t& number : memory) number = any_of(2) == 0 ? kHostile[any_of(10)] : any_of(most);
  }
  Numbers numbers() const { return {memory.data(), stride}; }
  int64_t at(int64_t i) const { return memory[static_cast<size_t>(i * stride)]; }
};

struct Range {
  int64_t begin, end;
};

Range between(const Column& offsets, int64_t b, int64_t rows) {
  const int64_t begin = std::clamp<int64_t>(offsets.at(b), 0, rows);
  return {begin, std::max(begin, std::clamp<int64_t>(offsets.at(b + 1), 0, rows))};
}

void check_rows(const SequenceRows& rows, int64_t batch, const Range& want) {
  CHECK(rows.length == want.end - want.begin);
  if (rows.length > 0) CHECK(rows.batch == batch && rows.begin == want.begin);
}

constexpr int kTileQ = 4;

// Every tile of every sequence has a slot, once, and no other has; a slot is of few.
void check_slots(const AttentionProblem& p, const SequenceParams& params) {
  int64_t count = 0;
  const bool by_rows = has_slots_by_rows(p, kTileQ, &count);
  const TileSlots slots = tile_slots(p, kTileQ);
  CHECK(slots.count == count && (slots.tiles_per_sequence == 0) == by_rows);
  std::set<std::pair<int, int>> want, got;
  for (int b = 0; b < params.count; ++b) {
    const int length = params.queries_of(b).length;
    for (int tile = 0; tile * kTileQ < length; ++tile) want.insert({b, tile});
  }
  for (int slot = 0; slot < slots.count; ++slot) {
    if (!by_rows) {
      const int b = slots.by_tiles_per_sequence.quotient(slot);
      const int tile = slot - b * slots.tiles_per_sequence;
      if (tile * kTileQ < params.queries_of(b).length) CHECK(got.insert({b, tile}).second);
      continue;
    }
    // As threads share the search, and as a block goes on behind the first sequence.
    for (int after = -1;;) {
      SlotOwners owners = {INT_MAX, 0};
      constexpr int kThreads = 3;
      for (int thread = 0; thread < kThreads; ++thread) {
        const SlotOwners own = owners_of_slot<kTileQ>(params, slot, after + 1 + thread, kThreads);
        owners.first = std::min(owners.first, own.first);
        owners.count += own.count;
      }
      if (owners.count == 0) break;
      const int tile = slot - params.queries_of(owners.first).begin / kTileQ - owners.first;
      CHECK(got.insert({owners.first, tile}).second);
      if (owners.count == 1) break;
      after = owners.first;
    }
  }
  CHECK(got == want);
}

void check_random_tables() {
  AttentionProblem p = {};
  SequenceTables& tables = p.sequences;
  p.batch = 1 + any_of(7);
  tables.given = true;
  tables.rows_q = any_of(40);
  tables.batch_k = any_of(9);
  tables.rows_k = any_of(14);
  tables.mask.causal = any_of(3);
  tables.pair_keys = any_of(2) == 0 ? INT64_MAX : any_of(30);
  const int keys_by = any_of(4);  // in their own row, cu_seqlens_k, batch_index, pages
  const int pages_each = any_of(6);
  if (keys_by == 0) tables.batch_k = p.batch;
  if (keys_by == 1) tables.batch_k = 1;
  const Column cu_q(p.batch + 1, 40), cu_k(p.batch + 1, 14), used_q(p.batch, 20);
  const Column used_k(p.batch, 60), begin_k(p.batch, 10), index(p.batch, 9);
  const Column pages(p.batch * std::max(pages_each, 1), 9);
  if (any_of(2) == 0) tables.cu_seqlens_q = cu_q.numbers();
  if (any_of(2) == 0) tables.seqused_q = used_q.numbers();
  if (any_of(2) == 0) tables.seqused_k = used_k.numbers();
  if (any_of(2) == 0) tables.k_begin = begin_k.numbers();
  if (keys_by == 1) tables.cu_seqlens_k = cu_k.numbers();
  if (keys_by == 2) tables.batch_index = index.numbers();
  if (keys_by == 3) {
    tables.paged = true;
    tables.page_table = {pages.memory.data(), pages.stride * pages_each};
    tables.page_step = pages.stride;
    tables.page_count = pages_each;
  }
  p.seq_q = tables.rows_q;
  p.seq_k = tables.paged ? pages_each * tables.rows_k : tables.rows_k;
  if (any_of(2) == 0) p.seq_q = std::min<int64_t>(p.seq_q, 1 + any_of(20));
  if (any_of(2) == 0) p.seq_k = std::min<int64_t>(p.seq_k, 1 + any_of(20));

  const SequenceParams params = sequence_params(p);
  CHECK((params.paged != 0) == tables.paged && params.count == p.batch);
  for (int b = 0; b < params.count; ++b) {
    const bool packed_q = tables.cu_seqlens_q.data != nullptr;
    Range queries = packed_q ? between(cu_q, b, tables.rows_q) : Range{0, tables.rows_q};
    const auto cut = [](Range* range, int64_t length) {
      range->end = range->begin + std::clamp<int64_t>(length, 0, range->end - range->begin);
    };
    if (tables.seqused_q.data != nullptr) cut(&queries, used_q.at(b));
    cut(&queries, p.seq_q);
    check_rows(params.queries_of(b), packed_q ? 0 : b, queries);

    int64_t batch = keys_by == 1 ? 0 : b;
    Range keys = {0, tables.paged ? pages_each * tables.rows_k : tables.rows_k};
    if (keys_by == 1) keys = between(cu_k, b, tables.rows_k);
    if (keys_by == 2) batch = index.at(b);
    if (keys_by == 2 && (batch < 0 || batch >= tables.batch_k)) keys.end = 0;
    cut(&keys, tables.pair_keys);
    if (tables.seqused_k.data != nullptr) cut(&keys, used_k.at(b));
    const int64_t first = keys.begin;
    if (tables.k_begin.data != nullptr) {
      keys.begin += std::clamp<int64_t>(begin_k.at(b), 0, keys.end - keys.begin);
    }
    cut(&keys, p.seq_k);
    const SequenceRows got = params.keys_of(b);
    check_rows(got, batch, keys);
    if (got.length > 0) CHECK(got.skipped == keys.begin - first);
    CHECK(params.diagonal_of(b, 5, 9) == (tables.mask.causal == FLASHMOE_CAUSAL_TOP_LEFT ? 0 : 4));
    if (!tables.paged) continue;
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      const int64_t page = pages.at(b * pages_each + key / tables.rows_k);
      const KeyTables::Place place =
          params.keys.place_of(params.keys.pages_of(b), static_cast<int>(key));
      CHECK(place.row == key % tables.rows_k);
      CHECK(place.batch == (page >= 0 && page < tables.batch_k ? page : -1));
    }
  }
  check_slots(p, params);
}

// A query sees the same keys from the offset that kernels have in its place, and no sum on the way
// overflows.
void check_offset(int32_t offset, const AttentionMask& mask, int64_t query, int64_t length_k) {
  AttentionProblem p = {};
  p.batch = 1;
  p.seq_q = p.seq_k = kMostOffsetRows;
  p.sequences.pair_keys = INT64_MAX;
  p.sequences.mask = mask;
  p.sequences.q_offset = {&offset, 1};
  const SequenceParams params = sequence_params(p);
  ScoreOptions score = {};
  set_offsets_of_sequences(mask, &score);
  if (score.masked == 0) {
    CHECK(!params.q_offset.given());
    return;
  }
  const int64_t diagonal = params.diagonal_of(0, 5, 9);
  const auto fits = [](int64_t number) {
    CHECK(number >= INT32_MIN && number <= INT32_MAX);
    return number;
  };
  const bool left = (mask.window & FLASHMOE_WINDOW_LEFT) != 0;
  const bool right = score.bounded_right != 0;
  const int64_t stands = int64_t{offset} + query;
  const int64_t first = std::max<int64_t>(0, fits(query + diagonal + score.left_offset));
  const int64_t end = std::min(length_k, fits(query + diagonal + score.right_offset + 1));
  const int64_t want = left ? std::max<int64_t>(0, stands - mask.window_left) : 0;
  const int64_t want_end = right ? std::min(length_k, stands + mask.window_right + 1) : length_k;
  CHECK((first < end) == (want < want_end));
  if (first < end) CHECK(first == want && end == want_end);
  // As gradients ask, of a key.
  fits(length_k - diagonal - score.right_offset);
  fits(length_k - diagonal - score.left_offset + 1);
}

void check_offsets() {
  const int64_t windows[] = {0, 1, 3, 100, kMostOffsetRows, kMostOffsetWindow};
  const int64_t places[] = {0, 1, 2, 50, kMostOffsetRows - 1};
  for (int i = 0; i < 200000; ++i) {
    AttentionMask mask = {};
    mask.causal = any_of(3);
    mask.window = static_cast<uint32_t>(any_of(4));
    mask.window_left = windows[any_of(6)];
    mask.window_right = mask.causal != FLASHMOE_CAUSAL_NONE ? 0 : windows[any_of(6)];
    const int64_t length_k = places[any_of(5)] + any_of(2);
    const int64_t far[] = {INT_MIN,           -kMostOffsetRows, 0,
                           kMostOffsetRows,   INT_MAX,          mask.window_left + kMostOffsetRows,
                           -mask.window_right};
    const int64_t offset = std::clamp<int64_t>(far[any_of(7)] + any_of(9) - 4, INT_MIN, INT_MAX);
    check_offset(static_cast<int32_t>(offset), mask, places[any_of(5)], length_k);
  }
}

// Whose last tiles are the last that there are: no offset goes beyond the tensor's rows.
void check_largest() {
  AttentionProblem p = {};
  const int32_t starts[] = {0, 1, static_cast<int32_t>(kMostTableRows)};
  p.batch = 2;
  p.seq_q = p.seq_k = p.sequences.rows_q = p.sequences.rows_k = kMostTableRows;
  p.sequences.batch_k = 1;
  p.sequences.pair_keys = INT64_MAX;
  p.sequences.cu_seqlens_q = p.sequences.cu_seqlens_k = {starts, 1};
  const SequenceParams params = sequence_params(p);
  const TileSlots slots = tile_slots(p, 128);
  CHECK(slots.tiles_per_sequence == 0 && slots.count == (1 << 22) + 2);
  CHECK(owners_of_slot<128>(params, 0, 0, 1).first == 0);
  CHECK(owners_of_slot<128>(params, 1, 0, 1).first == 1);
  CHECK(owners_of_slot<128>(params, 1 << 22, 0, 1).first == 1);
  CHECK(owners_of_slot<128>(params, slots.count - 1, 0, 1).count == 0);
  const SequenceRows keys = params.keys_of(1);
  CHECK(keys.begin == 1 && keys.length == kMostTableRows - 1);
}

}  // namespace
}  // namespace flashmoe

int main() {
  for (int i = 0; i < 20000; ++i) flashmoe::check_random_tables();
  flashmoe::check_offsets();
  flashmoe::check_largest();
  return 0;
}
