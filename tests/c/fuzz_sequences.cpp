// Ragged, padded and paged calls of numbers from anywhere: fuzz_sequences [calls] [seed].
//
// Extents, layouts, strides and dtypes are those of fuzz_call.h; lengths, offsets and page numbers
// are sane, strange or both. Every call must succeed, agree with a plain loop in double precision
// that reads flashmoe.h its own way, and write nothing that no sequence has. Calls with a fault in
// the tables must be refused, and change nothing. What check_sequences finds in the same tables
// must be what a plain loop finds. Some calls are made once more with a partial result to merge
// in. Meant to be built with AddressSanitizer and UBSan.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "flashmoe/flashmoe.h"
#include "fuzz_call.h"
#include "fuzz_run.h"

namespace {

int64_t computed = 0;
int64_t merged = 0;     // into a partial result
int64_t found[9] = {};  // faults of sequences, by bit
int64_t sound = 0;      // sequences without

// int32 in memory of its own, that ends where it is said to.
struct Table {
  int64_t shape[2] = {};
  int64_t strides[2] = {};
  flashmoe_tensor tensor = {};
  Memory block;
  std::vector<int32_t> before;

  int64_t at(int64_t i, int64_t j = 0) const { return data()[i * strides[0] + j * strides[1]]; }
  bool given() const { return tensor.ndim != 0; }

  // Fills it with numbers that `number` makes.
  template <class Number>
  void fill(Random* random, int rank, int64_t rows, int64_t columns, const Number& number) {
    shape[0] = rows, shape[1] = columns;
    const int64_t step = random->range(1, 2);
    strides[1] = step;
    strides[0] = columns * step + (rank == 2 ? random->below(3) : 0);
    const size_t count = static_cast<size_t>(rows * strides[0]);
    block = allocate_memory(count * sizeof(int32_t));
    for (size_t i = 0; i < count; ++i) data()[i] = static_cast<int32_t>(number());
    before.assign(data(), data() + count);
    tensor.data = block.get();
    tensor.device = {FLASHMOE_DEVICE_CPU, 0};
    tensor.ndim = rank;
    tensor.dtype = {FLASHMOE_DTYPE_INT, 32, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
  bool unchanged() const {
    return before.empty() ||
           std::memcmp(block.get(), before.data(), before.size() * sizeof(int32_t)) == 0;
  }

 private:
  int32_t* data() const { return reinterpret_cast<int32_t*>(block.get()); }
};

// fp32 factors of keys or values, of one of the shapes that they may have.
struct Scale {
  int64_t shape[2] = {1, 1};
  int64_t strides[2] = {};
  flashmoe_tensor tensor = {};
  Memory block;

  double at(int64_t batch, int64_t head) const {
    if (block == nullptr) return 1;
    const int rank = tensor.ndim;
    const int64_t row = rank == 2 && shape[0] > 1 ? batch * strides[0] : 0;
    const int64_t column = rank >= 1 && shape[rank - 1] > 1 ? head * strides[rank - 1] : 0;
    return static_cast<double>(reinterpret_cast<const float*>(block.get())[row + column]);
  }

  void fill(Random* random, int64_t batch, int64_t heads) {
    const int rank = static_cast<int>(random->below(3));
    if (rank == 2) {
      shape[0] = random->chance(0.7) ? batch : 1;
      shape[1] = random->chance(0.7) ? heads : 1;
    } else {
      shape[0] = random->chance(0.7) ? heads : 1;
    }
    const int64_t step = random->range(1, 2);
    strides[rank == 2 ? 1 : 0] = step;
    if (rank == 2) strides[0] = shape[1] * step;
    const int64_t count = rank == 0 ? 1 : rank == 1 ? shape[0] * step : shape[0] * shape[1] * step;
    block = allocate_memory(static_cast<size_t>(count) * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      reinterpret_cast<float*>(block.get())[i] = static_cast<float>(random->range(1, 12)) / 8;
    }
    tensor.data = block.get();
    tensor.device = {FLASHMOE_DEVICE_CPU, 0};
    tensor.ndim = rank;
    tensor.dtype = {FLASHMOE_DTYPE_FLOAT, 32, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

struct Ragged {
  Call call{false};
  Scale k_scale, v_scale;
  flashmoe_attention_sequences sequences = flashmoe_attention_sequences_init();
  Table cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
      q_offset;
  int64_t batch = 0;

  std::vector<Table*> tables() {
    return {&cu_seqlens_q, &cu_seqlens_k, &seqused_q,  &seqused_k,
            &k_begin,      &batch_index,  &page_table, &q_offset};
  }
};

int64_t strange_number(Random* random, int64_t most) {
  if (random->chance(0.7)) return random->range(0, most);
  return random->one_of<int64_t>({INT32_MIN, -1, 0, most + 1, 2 * most, INT32_MAX});
}

int64_t bounded(int64_t rows, int64_t most) { return most == 0 ? rows : std::min(rows, most); }

// Biases and masks have one, or at least as many as a sequence may have, of queries and keys.
void shape_pairs(Random* random, Ragged* ragged, int64_t queries, int64_t keys) {
  for (Argument* each : {&ragged->call.attn_bias, &ragged->call.attn_mask}) {
    const int64_t full[4] = {ragged->batch, each->shape[1], queries, keys};
    for (int axis : {0, 2, 3}) {
      const int64_t more = axis != 0 && random->chance(0.3) ? random->range(1, 3) : 0;
      each->shape[axis] = random->chance(0.3) ? 1 : full[axis] + more;
    }
  }
}

// What a valid dense call is made into. Its arguments are laid out anew.
void make_ragged(Random* random, Ragged* ragged) {
  Call& call = ragged->call;
  make_valid(random, &call);
  call.params.struct_size = sizeof call.params;  // sequences are behind those of older callers
  if (call.params.window == 0xa5a5a5a5) {
    call.params.window = 0;
    call.params.window_left = call.params.window_right = 0;
    call.params.softcap = 0;
  }
  const bool bhsd = call.params.layout == FLASHMOE_LAYOUT_BHSD;
  const int seq = bhsd ? 2 : 1;
  const bool packed_q = random->chance(0.5);
  const int64_t way = random->below(4);  // rows of the batch, batch_index, cu_seqlens_k, pages
  ragged->batch = packed_q ? random->range(0, 4) : call.q.shape[0];
  if (packed_q) call.q.shape[0] = call.out.shape[0] = call.lse.shape[0] = 1;
  const int64_t batch_k = way == 0   ? ragged->batch
                          : way == 2 ? 1
                                     : random->range(way == 1 ? 0 : 1, 5);
  call.k.shape[0] = call.v.shape[0] = batch_k;
  const bool takes_fp8 = call.q.tensor.dtype.bits <= 32;
  if (takes_fp8 && random->chance(0.3)) {
    call.k.tensor.dtype = call.v.tensor.dtype = {FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1};
  }
  if (way == 3) call.k.shape[seq] = call.v.shape[seq] = random->one_of<int64_t>({0, 1, 2, 3, 5, 8});
  const int64_t pages = way == 3 ? random->range(0, 4) : 1;
  flashmoe_attention_sequences& s = ragged->sequences;
  if (random->chance(0.3)) s.max_seqlen_q = random->one_of<int64_t>({1, 3, 12, 1000, INT64_MAX});
  if (random->chance(0.3)) s.max_seqlen_k = random->one_of<int64_t>({1, 3, 12, 1000, INT64_MAX});
  shape_pairs(random, ragged, bounded(call.q.shape[seq], s.max_seqlen_q),
              bounded(call.k.shape[seq] * pages, s.max_seqlen_k));
  for (int i = 0; i < call.count(); ++i) {
    call.arguments[static_cast<size_t>(i)]->allocate(random, call.is_output(i));
  }
  if (takes_fp8 && random->chance(0.3)) {
    ragged->k_scale.fill(random, batch_k, call.k.shape[bhsd ? 1 : 2]);
    call.params.k_scale = &ragged->k_scale.tensor;
  }
  if (takes_fp8 && random->chance(0.3)) {
    ragged->v_scale.fill(random, batch_k, call.k.shape[bhsd ? 1 : 2]);
    call.params.v_scale = &ragged->v_scale.tensor;
  }
  const int64_t rows_q = call.q.shape[seq];
  const int64_t rows_k = call.k.shape[seq];
  const auto lengths = [&](Table* table, int64_t most) {
    if (!random->chance(0.5)) return;
    table->fill(random, 1, ragged->batch, 1, [&] { return strange_number(random, most); });
  };
  const auto offsets = [&](Table* table, int64_t most) {
    int64_t now = 0;
    const bool sane = random->chance(0.7);
    table->fill(random, 1, ragged->batch + 1, 1, [&] {
      if (!sane) return strange_number(random, most);
      now = std::min(most, now + random->range(0, 6));
      return now;
    });
  };
  if (packed_q) offsets(&ragged->cu_seqlens_q, rows_q);
  lengths(&ragged->seqused_q, rows_q);
  lengths(&ragged->seqused_k, rows_k * pages);
  lengths(&ragged->k_begin, rows_k / 2);
  if (way == 1) {
    ragged->batch_index.fill(random, 1, ragged->batch, 1,
                             [&] { return strange_number(random, batch_k); });
  }
  if (way == 2) offsets(&ragged->cu_seqlens_k, rows_k);
  if (way == 3) {
    ragged->page_table.fill(random, 2, ragged->batch, pages,
                            [&] { return strange_number(random, batch_k - 1); });
  }
  const auto place = [](const flashmoe_tensor** slot, const Table& table) {
    *slot = table.given() ? &table.tensor : nullptr;
  };
  place(&s.cu_seqlens_q, ragged->cu_seqlens_q);
  place(&s.cu_seqlens_k, ragged->cu_seqlens_k);
  place(&s.seqused_q, ragged->seqused_q);
  place(&s.seqused_k, ragged->seqused_k);
  place(&s.k_begin, ragged->k_begin);
  place(&s.batch_index, ragged->batch_index);
  place(&s.page_table, ragged->page_table);
  if (random->chance(0.3)) {
    ragged->q_offset.fill(random, 1, ragged->batch, 1, [&] {
      return random->chance(0.8) ? random->range(-14, 14) : strange_number(random, rows_k);
    });
    s.q_offset = &ragged->q_offset.tensor;
  } else if (random->chance(0.2)) {
    // A caller from before it was there: what lies behind its struct is not the library's to read.
    s.struct_size = offsetof(flashmoe_attention_sequences, q_offset);
    s.q_offset = reinterpret_cast<const flashmoe_tensor*>(uintptr_t{8});
  }
  if (random->chance(0.3)) s.split_size = random->one_of<int64_t>({1, 64, INT64_MAX});
  call.params.sequences = &s;
}

// ---- flashmoe.h, read another way -----------------------------------------------------------

// Where a row is: of k and v or of q, [batch, row]; {-1, 0}: hidden. And which one it is of its
// sequence's rows, before k_begin.
struct Place {
  int64_t batch;
  int64_t row;
  int64_t index = 0;
};

std::vector<Place> places_of(int64_t batch, int64_t begin, int64_t end, int64_t rows) {
  std::vector<Place> places;
  for (int64_t row = std::max<int64_t>(begin, 0); row < std::min(end, rows); ++row) {
    places.push_back({batch, row});
  }
  return places;
}

void keep_first(std::vector<Place>* places, int64_t count) {
  if (count < static_cast<int64_t>(places->size())) {
    places->resize(static_cast<size_t>(std::max<int64_t>(count, 0)));
  }
}

std::vector<Place> queries_of(const Ragged& ragged, int64_t b, int64_t rows) {
  const Table& offsets = ragged.cu_seqlens_q;
  std::vector<Place> places = offsets.given() ? places_of(0, offsets.at(b), offsets.at(b + 1), rows)
                                              : places_of(b, 0, rows, rows);
  if (ragged.seqused_q.given()) keep_first(&places, ragged.seqused_q.at(b));
  if (ragged.sequences.max_seqlen_q != 0) keep_first(&places, ragged.sequences.max_seqlen_q);
  return places;
}

// `beside_pairs`: as far as a bias and a mask have them.
std::vector<Place> keys_of(const Ragged& ragged, int64_t b, int64_t batch_k, int64_t rows,
                           bool beside_pairs) {
  std::vector<Place> places;
  if (ragged.page_table.given()) {
    for (int64_t page = 0; page < ragged.page_table.shape[1]; ++page) {
      const int64_t number = ragged.page_table.at(b, page);
      for (int64_t row = 0; row < rows; ++row) {
        places.push_back(number >= 0 && number < batch_k ? Place{number, row} : Place{-1, 0});
      }
    }
  } else if (ragged.cu_seqlens_k.given()) {
    places = places_of(0, ragged.cu_seqlens_k.at(b), ragged.cu_seqlens_k.at(b + 1), rows);
  } else {
    const int64_t of = ragged.batch_index.given() ? ragged.batch_index.at(b) : b;
    if (of >= 0 && of < batch_k) places = places_of(of, 0, rows, rows);
  }
  for (size_t j = 0; j < places.size(); ++j) places[j].index = static_cast<int64_t>(j);
  for (const Argument* each : {&ragged.call.attn_bias, &ragged.call.attn_mask}) {
    const bool given = each == &ragged.call.attn_bias ? ragged.call.params.attn_bias != nullptr
                                                      : ragged.call.params.attn_mask != nullptr;
    if (beside_pairs && given && each->shape[3] != 1) keep_first(&places, each->shape[3]);
  }
  if (ragged.seqused_k.given()) keep_first(&places, ragged.seqused_k.at(b));
  if (ragged.k_begin.given()) {
    const int64_t skipped =
        std::clamp<int64_t>(ragged.k_begin.at(b), 0, static_cast<int64_t>(places.size()));
    places.erase(places.begin(), places.begin() + skipped);
  }
  if (ragged.sequences.max_seqlen_k != 0) keep_first(&places, ragged.sequences.max_seqlen_k);
  return places;
}

double number_at(const Call& call, const Argument& argument, Place place, int64_t h, int64_t d) {
  return load(element_at(call, argument, place.batch, place.row, h, d), argument.tensor.dtype);
}

void restore(Argument* argument, const unsigned char* element) {
  const auto offset = static_cast<size_t>(element - argument->block.get());
  std::memcpy(argument->block.get() + offset, argument->before.data() + offset,
              argument->tensor.dtype.bits / 8);
}

// Whether query i of a sequence of so many queries and keys sees key j, but for the mask.
bool is_seen_of(const Ragged& ragged, int64_t b, int64_t i, int64_t j, int64_t queries,
                int64_t keys) {
  flashmoe_attention_forward_params p = ragged.call.params;
  if (!ragged.q_offset.given()) return is_seen(p, i, j, queries, keys);
  // Like that many more keys than queries with aligned ends.
  if (p.causal == FLASHMOE_CAUSAL_TOP_LEFT) p.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  return is_seen(p, i, j, 0, ragged.q_offset.at(b));
}

// One row of out and lse: whether it is what these keys give. Nothing is changed.
bool is_right(const Ragged& ragged, int64_t b, Place query, int64_t i, int64_t queries,
              const std::vector<Place>& keys, int64_t h) {
  const Call& call = ragged.call;
  const flashmoe_attention_forward_params& p = call.params;
  const int head = p.layout == FLASHMOE_LAYOUT_BHSD ? 1 : 2;
  const int64_t g = h / (call.q.shape[head] / call.k.shape[head]);
  const int64_t dim = call.q.shape[3], dim_v = call.v.shape[3];
  const double scale =
      p.scale != 0 ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(dim));
  const double cap = static_cast<double>(p.softcap);
  double largest = -HUGE_VAL;
  if (p.sinks != nullptr) {
    largest = load(call.sinks.element(h, 0, 0, 0), call.sinks.tensor.dtype);
  }
  double sum = p.sinks != nullptr ? 1 : 0;
  const double sink = largest;
  std::vector<double> logits;
  std::vector<Place> seen;
  for (size_t j = 0; j < keys.size(); ++j) {
    if (keys[j].batch < 0 || !is_seen_of(ragged, b, i, static_cast<int64_t>(j), queries,
                                         static_cast<int64_t>(keys.size()))) {
      continue;
    }
    if (p.attn_mask != nullptr && *pair_at(call.attn_mask, b, h, i, keys[j].index) == 0) continue;
    double score = 0;
    for (int64_t d = 0; d < dim; ++d) {
      score += number_at(call, call.q, query, h, d) * number_at(call, call.k, keys[j], g, d);
    }
    score *= ragged.k_scale.at(keys[j].batch, g);
    logits.push_back(cap == 0 ? score * scale : cap * std::tanh(score * scale / cap));
    if (p.attn_bias != nullptr) {
      logits.back() +=
          load(pair_at(call.attn_bias, b, h, i, keys[j].index), call.attn_bias.tensor.dtype);
    }
    seen.push_back(keys[j]);
    largest = std::fmax(largest, logits.back());
  }
  if (p.sinks != nullptr) sum = std::exp(sink - largest);
  for (double& logit : logits) sum += logit = std::exp(logit - largest);
  const flashmoe_dtype dtype = call.q.tensor.dtype;
  const double unit = dtype.bits >= 32 ? 2e-5 : dtype.code == FLASHMOE_DTYPE_FLOAT ? 4e-3 : 3e-2;
  const double allowed = unit * (1 + scale * static_cast<double>(dim) / 64);
  bool right = true;
  for (int64_t d = 0; d < dim_v; ++d) {
    double expected = 0;
    for (size_t j = 0; j < seen.size(); ++j) {
      expected += logits[j] / sum * ragged.v_scale.at(seen[j].batch, g) *
                  number_at(call, call.v, seen[j], g, d);
    }
    right = right && std::fabs(number_at(call, call.out, query, h, d) - expected) <= allowed;
  }
  if (p.lse == nullptr) return right;
  const double lse = load(call.lse.element(query.batch, h, query.row, 0), call.lse.tensor.dtype);
  return right && (sum == 0 ? lse == -HUGE_VAL : std::fabs(lse - largest - std::log(sum)) <= 1e-3);
}

// What is wrong with the tables of sequence b.
int32_t faults_of(const Ragged& ragged, int64_t b) {
  const Call& call = ragged.call;
  const int seq = call.params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1;
  const int64_t rows_q = call.q.shape[seq], rows_k = call.k.shape[seq];
  const int64_t batch_k = call.k.shape[0];
  int32_t faults = 0;
  const auto add = [&](bool wrong, int32_t fault) { faults |= wrong ? fault : 0; };
  // How many rows a sequence has before its lengths count.
  const auto room = [&](const Table& offsets, int64_t rows, int32_t fault) {
    if (!offsets.given()) return rows;
    const int64_t begin = offsets.at(b), end = offsets.at(b + 1);
    add(!(0 <= begin && begin <= end && end <= rows), fault);
    return static_cast<int64_t>(places_of(0, begin, end, rows).size());
  };
  const auto used = [&](const Table& lengths, int64_t rows, int32_t fault) {
    if (!lengths.given()) return rows;
    add(lengths.at(b) < 0 || lengths.at(b) > rows, fault);
    return std::clamp<int64_t>(lengths.at(b), 0, rows);
  };
  const flashmoe_attention_sequences& s = ragged.sequences;
  int64_t queries = room(ragged.cu_seqlens_q, rows_q, FLASHMOE_FAULT_CU_SEQLENS_Q);
  queries = used(ragged.seqused_q, queries, FLASHMOE_FAULT_SEQUSED_Q);
  add(s.max_seqlen_q != 0 && queries > s.max_seqlen_q, FLASHMOE_FAULT_MAX_SEQLEN_Q);
  int64_t keys = ragged.page_table.given() ? ragged.page_table.shape[1] * rows_k : rows_k;
  keys = room(ragged.cu_seqlens_k, keys, FLASHMOE_FAULT_CU_SEQLENS_K);
  if (ragged.batch_index.given()) {
    const int64_t of = ragged.batch_index.at(b);
    add(of < 0 || of >= batch_k, FLASHMOE_FAULT_BATCH_INDEX);
  }
  keys = used(ragged.seqused_k, keys, FLASHMOE_FAULT_SEQUSED_K);
  int64_t begin = 0;
  if (ragged.k_begin.given()) begin = used(ragged.k_begin, keys, FLASHMOE_FAULT_K_BEGIN);
  add(s.max_seqlen_k != 0 && keys - begin > s.max_seqlen_k, FLASHMOE_FAULT_MAX_SEQLEN_K);
  if (!ragged.page_table.given()) return faults;
  const std::vector<Place> places = keys_of(ragged, b, batch_k, rows_k, false);
  add(std::any_of(places.begin(), places.end(), [](Place place) { return place.batch < 0; }),
      FLASHMOE_FAULT_PAGE_TABLE);
  return faults;
}

flashmoe_check_sequences_params check_of(const Ragged& ragged, const flashmoe_tensor* status) {
  flashmoe_check_sequences_params params = flashmoe_check_sequences_params_init();
  params.q = ragged.call.params.q;
  params.k = ragged.call.params.k;
  params.sequences = &ragged.sequences;
  params.layout = ragged.call.params.layout;
  params.status = status;
  return params;
}

void check(Random* random, Ragged* ragged) {
  Table status;
  status.fill(random, 1, ragged->batch, 1, [] { return 0x5a5a5a5a; });
  const flashmoe_check_sequences_params params = check_of(*ragged, &status.tensor);
  flashmoe_plan plan = flashmoe_plan_init();
  EXPECT(flashmoe_check_sequences_plan(&params, &plan) == FLASHMOE_OK);
  size_t bytes = 1;
  EXPECT(flashmoe_check_sequences_workspace_size(&params, &bytes) == FLASHMOE_OK && bytes == 0);
  EXPECT(status.unchanged());
  EXPECT(flashmoe_check_sequences(&params, nullptr, 0, nullptr) == FLASHMOE_OK);
  for (int64_t b = 0; b < ragged->batch; ++b) {
    const int32_t faults = faults_of(*ragged, b);
    EXPECT(status.at(b) == faults);
    for (int bit = 0; bit < 9; ++bit) found[bit] += faults >> bit & 1;
    sound += faults == 0 ? 1 : 0;
  }
}

// The sequences that have a row of q, by [batch, row].
using Owners = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

// What the same call gives when a partial result is merged in, beside what it gave without: in the
// rows of sequences, and nothing else is written.
void check_merge_in(Random* random, const Ragged& ragged, const Owners& owners) {
  const Call& call = ragged.call;
  if (call.params.lse == nullptr) return;
  constexpr flashmoe_dtype kNarrow[] = {
      {FLASHMOE_DTYPE_FLOAT, 16, 1}, {FLASHMOE_DTYPE_BFLOAT, 16, 1}, {FLASHMOE_DTYPE_FLOAT, 32, 1}};
  const bool wide = call.q.tensor.dtype.bits == 64;
  Argument prior_out, prior_lse, out, lse;
  for (Argument* rows : {&prior_out, &out}) {
    std::copy(call.out.shape, call.out.shape + 4, rows->shape);
    rows->tensor.dtype = wide ? call.q.tensor.dtype : random->one_of(kNarrow);
    rows->tensor.device = call.q.tensor.device;
    rows->allocate(random, rows == &out);
  }
  for (Argument* sums : {&prior_lse, &lse}) {
    std::copy(call.lse.shape, call.lse.shape + 3, sums->shape);
    sums->rank = 3;
    sums->tensor.dtype = call.lse.tensor.dtype;
    sums->tensor.device = call.q.tensor.device;
    sums->allocate(random, sums == &lse);
  }
  const bool empty = random->chance(0.2);  // the other keys were none
  for (int64_t b = 0; empty && b < prior_lse.shape[0]; ++b) {
    for (int64_t h = 0; h < prior_lse.shape[1]; ++h) {
      for (int64_t i = 0; i < prior_lse.shape[2]; ++i) {
        const auto* const at = prior_lse.element(b, h, i, 0);
        auto* const element = prior_lse.block.get() + (at - prior_lse.block.get());
        const double none = -HUGE_VAL;
        const auto narrow = static_cast<float>(none);
        if (wide) std::memcpy(element, &none, sizeof none);
        if (!wide) std::memcpy(element, &narrow, sizeof narrow);
      }
    }
  }
  prior_lse.before.assign(prior_lse.block.get(), prior_lse.block.get() + prior_lse.block_bytes);

  flashmoe_attention_forward_params params = call.params;
  params.prior_out = &prior_out.tensor;
  params.prior_lse = &prior_lse.tensor;
  params.out = &out.tensor;
  params.lse = random->chance(0.8) ? &lse.tensor : nullptr;
  flashmoe_plan plan = flashmoe_plan_init();
  if (flashmoe_attention_forward_plan(&params, &plan) != FLASHMOE_OK) {
    EXPECT(std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr);
    return;
  }
  ++merged;
  const Memory workspace = allocate_memory(plan.workspace_bytes);
  EXPECT(flashmoe_attention_forward(&params, workspace.get(), plan.workspace_bytes, nullptr) ==
         FLASHMOE_OK);
  const double unit = out.tensor.dtype.bits >= 32                     ? 2e-6
                      : out.tensor.dtype.code == FLASHMOE_DTYPE_FLOAT ? 1e-3
                                                                      : 8e-3;
  for (const auto& [row, sequences] : owners) {
    const auto [b, i] = row;
    for (int64_t h = 0; h < call.lse.shape[1]; ++h) {
      const double first = load(prior_lse.element(b, h, i, 0), prior_lse.tensor.dtype);
      const double second = load(call.lse.element(b, h, i, 0), call.lse.tensor.dtype);
      const double largest = std::fmax(first, second);
      const double total =
          largest == -HUGE_VAL
              ? largest
              : largest + std::log(std::exp(first - largest) + std::exp(second - largest));
      const auto weight = [&](double of) { return of == -HUGE_VAL ? 0 : std::exp(of - total); };
      for (int64_t d = 0; d < call.v.shape[3]; ++d) {
        const double expected = weight(first) * number_at(call, prior_out, {b, i}, h, d) +
                                weight(second) * number_at(call, call.out, {b, i}, h, d);
        const double got = number_at(call, out, {b, i}, h, d);
        EXPECT(std::fabs(got - expected) <= unit * (1 + std::fabs(expected)) ||
               sequences.size() > 1);
        restore(&out, element_at(call, out, b, i, h, d));
      }
      if (params.lse == nullptr) continue;
      const double sum = load(lse.element(b, h, i, 0), lse.tensor.dtype);
      EXPECT(sum == total || std::fabs(sum - total) <= 1e-5 * (1 + std::fabs(total)) ||
             sequences.size() > 1);
      restore(&lse, lse.element(b, h, i, 0));
    }
  }
  for (const Argument* each : {&prior_out, &prior_lse, &out, &lse}) EXPECT(each->unchanged());
}

void run(Random* random, Ragged* ragged) {
  Call& call = ragged->call;
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = call.plan(&plan);
  // fuzz_call.h makes some such, and fuzz_invalid looks into that.
  if (std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr &&
      planned == FLASHMOE_ERROR_INVALID_ARGUMENT) {
    return;
  }
  EXPECT(planned == FLASHMOE_OK);
  ++computed;
  check(random, ragged);
  const Memory workspace = allocate_memory(plan.workspace_bytes);
  EXPECT(call.run(workspace.get(), plan.workspace_bytes, nullptr) == FLASHMOE_OK);
  const bool bhsd = call.params.layout == FLASHMOE_LAYOUT_BHSD;
  const int seq = bhsd ? 2 : 1;
  const int64_t heads = call.q.shape[bhsd ? 1 : 2];
  // In a row that several sequences share, the result of any of them is right.
  Owners owners;
  for (int64_t b = 0; b < ragged->batch; ++b) {
    const std::vector<Place> queries = queries_of(*ragged, b, call.q.shape[seq]);
    for (size_t i = 0; i < queries.size(); ++i) {
      owners[{queries[i].batch, queries[i].row}].push_back(b);
    }
  }
  if (random->chance(0.5)) check_merge_in(random, *ragged, owners);
  for (const auto& [row, sequences] : owners) {
    const Place query = {row.first, row.second};
    for (int64_t h = 0; h < heads; ++h) {
      bool right = false;
      for (const int64_t b : sequences) {
        const std::vector<Place> queries = queries_of(*ragged, b, call.q.shape[seq]);
        const std::vector<Place> keys =
            keys_of(*ragged, b, call.k.shape[0], call.k.shape[seq], true);
        const int64_t i = query.row - queries.front().row;
        right =
            right || is_right(*ragged, b, query, i, static_cast<int64_t>(queries.size()), keys, h);
      }
      // Two threads may both have written a part.
      EXPECT(right || sequences.size() > 1);
      for (int64_t d = 0; d < call.v.shape[3]; ++d) {
        restore(&call.out, element_at(call, call.out, query.batch, query.row, h, d));
      }
      if (call.params.lse != nullptr) {
        restore(&call.lse, call.lse.element(query.batch, h, query.row, 0));
      }
    }
  }
  for (const Argument* argument : call.arguments) EXPECT(argument->unchanged());
  for (const Table* table : ragged->tables()) EXPECT(table->unchanged());
  if (!random->chance(0.3)) return;

  // The same call with something wrong in its tables.
  std::vector<Table*> given;
  for (Table* table : ragged->tables()) {
    if (table->given()) given.push_back(table);
  }
  flashmoe_attention_sequences& s = ragged->sequences;
  Table* const table =
      given.empty() ? nullptr
                    : given[static_cast<size_t>(random->below(static_cast<int64_t>(given.size())))];
  switch (table == nullptr ? random->below(4) : random->below(9)) {
    case 0:
      s.struct_size = random->one_of({size_t{0}, sizeof s - 16, sizeof s + 8, SIZE_MAX});
      break;
    case 1: s.max_seqlen_q = random->one_of<int64_t>({-1, INT64_MIN}); break;
    case 2: s.max_seqlen_k = random->one_of<int64_t>({-1, INT64_MIN}); break;
    case 3: s.split_size = random->one_of<int64_t>({-1, INT64_MIN}); break;
    case 4: table->tensor.ndim = random->one_of({-1, 0, 3, INT32_MAX}); break;
    case 5: table->tensor.dtype.bits = random->one_of<uint8_t>({8, 16, 64}); break;
    case 6: table->tensor.dtype.code = random->one_of<uint8_t>({1, 2, 4, 17}); break;
    case 7:
      // More offsets of queries are more sequences.
      table->shape[0] = table == &ragged->cu_seqlens_q
                            ? random->one_of<int64_t>({-1, 0, INT64_MAX})
                            : random->one_of<int64_t>({-1, table->shape[0] + 100, INT64_MAX});
      break;
    default: table->tensor.shape = nullptr;
  }
  EXPECT(call.plan(&plan) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  EXPECT(call.run(workspace.get(), plan.workspace_bytes, nullptr) ==
         FLASHMOE_ERROR_INVALID_ARGUMENT);
  const flashmoe_check_sequences_params params = check_of(*ragged, &call.q.tensor);
  EXPECT(flashmoe_check_sequences(&params, nullptr, 0, nullptr) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  for (const Argument* argument : call.arguments) EXPECT(argument->unchanged());
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_sequences", argc, argv, 5000, [](Random* random) {
    Ragged ragged;
    make_ragged(random, &ragged);
    run(random, &ragged);
  });
  std::printf("%" PRId64 " computed and compared\n", computed);
  EXPECT(computed > calls / 2);
  if (calls < 5000) return 0;
  EXPECT(merged > calls / 10);
  EXPECT(sound > calls / 4);
  for (const int64_t count : found) EXPECT(count > calls / 50);
  return 0;
}
