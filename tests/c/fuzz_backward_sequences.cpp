// Gradients of ragged and padded calls of numbers from anywhere: fuzz_backward_sequences [calls]
// [seed].
//
// Extents, layouts, strides and dtypes are those of fuzz_call.h; lengths and offsets are sane,
// strange or both. Rows that no sequence has are NaN. Every call must succeed and agree with a
// plain loop in double precision that reads flashmoe.h its own way; gradients that no sequence has
// are 0, or what they were. Calls with a fault in the tables must be refused, and change nothing.
// Meant to be built with AddressSanitizer and UBSan.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "call_oracle.h"
#include "flashmoe/flashmoe.h"
#include "fuzz_cache.h"
#include "fuzz_call.h"
#include "fuzz_gradients.h"
#include "fuzz_run.h"

namespace {

int64_t computed = 0, pairs = 0, unowned = 0, shared = 0;

using Params = flashmoe_attention_sequences;

// The tables of a call, as fuzz_cache.h puts faults into them.
struct Tables {
  Params params = flashmoe_attention_sequences_init();
  Table cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin;

  using Tensor = NamedTensor<Params>;
  std::vector<Tensor> tensors() {
    return {{"cu_seqlens_q", &Params::cu_seqlens_q, nullptr, &cu_seqlens_q},
            {"cu_seqlens_k", &Params::cu_seqlens_k, nullptr, &cu_seqlens_k},
            {"seqused_q", &Params::seqused_q, nullptr, &seqused_q},
            {"seqused_k", &Params::seqused_k, nullptr, &seqused_k},
            {"k_begin", &Params::k_begin, nullptr, &k_begin}};
  }
};

using Row = std::pair<int64_t, int64_t>;  // batch and row

struct Ragged {
  Call call{true};
  Tables tables;
  int64_t batch = 0;
  std::vector<std::vector<Row>> queries, keys;      // of each sequence
  std::map<Row, int64_t> query_owners, key_owners;  // how many

  int seq_axis() const { return call.params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1; }
  int head_axis() const { return 3 - seq_axis(); }
};

// What a valid dense call is made into. Its arguments are laid out anew.
void make_tables(Random* random, Ragged* ragged) {
  Call& call = ragged->call;
  Tables& t = ragged->tables;
  const int seq = ragged->seq_axis();
  const bool packed_q = random->chance(0.6), packed_k = random->chance(0.6);
  ragged->batch = packed_q ? random->range(0, 4) : call.q.shape[0];
  for (Argument* each : {&call.q, &call.out, &call.lse, &call.dout, &call.dlse, &call.dq}) {
    each->shape[0] = packed_q ? 1 : ragged->batch;
  }
  for (Argument* each : {&call.k, &call.v, &call.dk, &call.dv}) {
    each->shape[0] = packed_k ? 1 : ragged->batch;
  }
  call.backward.attn_bias = call.backward.attn_mask = nullptr;  // which these calls do not have
  const int64_t rows_q = call.q.shape[seq], rows_k = call.k.shape[seq];
  const auto lengths = [&](Table* table, const flashmoe_tensor* Params::* member, int64_t most) {
    if (!random->chance(0.5)) return;
    table->fill_integers(random, false, 1, ragged->batch, 1,
                         [&] { return strange_number(random, most); });
    t.params.*member = &table->tensor;
  };
  const auto offsets = [&](Table* table, const flashmoe_tensor* Params::* member, int64_t most) {
    int64_t now = 0;
    const bool sane = random->chance(0.7);
    table->fill_integers(random, false, 1, ragged->batch + 1, 1, [&] {
      if (!sane) return strange_number(random, most);
      now = std::min(most, now + random->range(0, 6));
      return now;
    });
    t.params.*member = &table->tensor;
  };
  if (packed_q) offsets(&t.cu_seqlens_q, &Params::cu_seqlens_q, rows_q);
  if (packed_k) offsets(&t.cu_seqlens_k, &Params::cu_seqlens_k, rows_k);
  lengths(&t.seqused_q, &Params::seqused_q, rows_q);
  lengths(&t.seqused_k, &Params::seqused_k, rows_k);
  lengths(&t.k_begin, &Params::k_begin, rows_k / 2);
  if (random->chance(0.3)) {
    t.params.max_seqlen_q = random->one_of<int64_t>({1, 3, 12, 1000, INT64_MAX});
  }
  if (random->chance(0.3)) {
    t.params.max_seqlen_k = random->one_of<int64_t>({1, 3, 12, 1000, INT64_MAX});
  }
  if (random->chance(0.3)) t.params.split_size = random->one_of<int64_t>({1, 64, INT64_MAX});
  call.params.sequences = &t.params;
}

// ---- flashmoe.h, read another way ---------------------------------------------------------------

std::vector<Row> rows_of(const Table& offsets, int64_t b, int64_t rows, const Table& used,
                         const Table* begin, int64_t most) {
  int64_t of = b, first = 0, end = rows;
  if (offsets.given()) {
    of = 0;
    first = std::clamp<int64_t>(offsets.at(b), 0, rows);
    end = std::clamp<int64_t>(offsets.at(b + 1), first, rows);
  }
  if (used.given()) end = first + std::clamp<int64_t>(used.at(b), 0, end - first);
  if (begin != nullptr && begin->given()) {
    first += std::clamp<int64_t>(begin->at(b), 0, end - first);
  }
  if (most != 0) end = first + std::min(most, end - first);
  std::vector<Row> found;
  for (int64_t row = first; row < end; ++row) found.emplace_back(of, row);
  return found;
}

void find_rows(Ragged* ragged) {
  Tables& t = ragged->tables;
  const int seq = ragged->seq_axis();
  const int64_t rows_q = ragged->call.q.shape[seq], rows_k = ragged->call.k.shape[seq];
  for (int64_t b = 0; b < ragged->batch; ++b) {
    ragged->queries.push_back(
        rows_of(t.cu_seqlens_q, b, rows_q, t.seqused_q, nullptr, t.params.max_seqlen_q));
    ragged->keys.push_back(
        rows_of(t.cu_seqlens_k, b, rows_k, t.seqused_k, &t.k_begin, t.params.max_seqlen_k));
    for (const Row& row : ragged->queries.back()) ++ragged->query_owners[row];
    for (const Row& row : ragged->keys.back()) ++ragged->key_owners[row];
  }
}

void store_nan(unsigned char* at, flashmoe_dtype dtype) {
  const double wide = std::numeric_limits<double>::quiet_NaN();
  const float single = std::numeric_limits<float>::quiet_NaN();
  const uint16_t half = 0x7fff;  // of bf16, too
  const void* const number = dtype.bits == 64   ? static_cast<const void*>(&wide)
                             : dtype.bits == 32 ? static_cast<const void*>(&single)
                                                : &half;
  std::memcpy(at, number, dtype.bits / 8);
}

// Rows that no sequence has become NaN, but where they are the memory of one that a sequence has.
void poison_others(const Ragged& ragged, Argument* x, const std::map<Row, int64_t>& owners) {
  const auto each_element = [&](bool owned, const auto& visit) {
    for (int64_t b = 0; b < x->shape[0]; ++b) {
      for (int64_t s = 0; s < x->shape[ragged.seq_axis()]; ++s) {
        if ((owners.count({b, s}) != 0) != owned) continue;
        for (int64_t h = 0; h < x->shape[ragged.head_axis()]; ++h) {
          for (int64_t d = 0; d < x->shape[3]; ++d) {
            visit(element_at(ragged.call, *x, b, s, h, d));
          }
        }
      }
    }
  };
  each_element(false, [&](const unsigned char* element) {
    store_nan(const_cast<unsigned char*>(element), x->tensor.dtype);
  });
  each_element(true, [&](const unsigned char* element) { restore(x, element); });
  x->before.assign(x->block.get(), x->block.get() + x->block_bytes);
}

double scale_of(const Call& call) {
  const auto dim = static_cast<double>(call.q.shape[3]);
  return call.params.scale != 0 ? static_cast<double>(call.params.scale) : 1 / std::sqrt(dim);
}

double number_at(const Call& call, const Argument& x, const Row& row, int64_t h, int64_t d) {
  return load(element_at(call, x, row.first, row.second, h, d), x.tensor.dtype);
}

double logit_of(const Call& call, const Row& query, const Row& key, int64_t h, int64_t g) {
  double score = 0;
  for (int64_t d = 0; d < call.q.shape[3]; ++d) {
    score += number_at(call, call.q, query, h, d) * number_at(call, call.k, key, g, d);
  }
  const double cap = static_cast<double>(call.params.softcap);
  score *= scale_of(call);
  return cap == 0 ? score : cap * std::tanh(score / cap);
}

// Calls visit(b, h, i) of each query of a sequence.
template <class Visit>
void each_query(const Ragged& ragged, const Visit& visit) {
  for (size_t b = 0; b < ragged.queries.size(); ++b) {
    for (int64_t h = 0; h < ragged.call.q.shape[ragged.head_axis()]; ++h) {
      for (size_t i = 0; i < ragged.queries[b].size(); ++i) visit(b, h, i);
    }
  }
}

// The keys of the sequence that a query sees.
std::vector<Row> seen_by(const Ragged& ragged, size_t b, size_t i) {
  std::vector<Row> seen;
  const auto count = [](size_t n) { return static_cast<int64_t>(n); };
  const std::vector<Row>& keys = ragged.keys[b];
  for (size_t j = 0; j < keys.size(); ++j) {
    if (is_seen(ragged.call.params, count(i), count(j), count(ragged.queries[b].size()),
                count(keys.size()))) {
      seen.push_back(keys[j]);
    }
  }
  return seen;
}

// The lse of each query, of those that sequences share the last one's; NaN elsewhere.
void store_lse(Ragged* ragged) {
  Call& call = ragged->call;
  const flashmoe_dtype dtype = call.lse.tensor.dtype;
  for (int64_t b = 0; b < call.lse.shape[0]; ++b) {
    for (int64_t h = 0; h < call.lse.shape[1]; ++h) {
      for (int64_t i = 0; i < call.lse.shape[2]; ++i) {
        store_nan(const_cast<unsigned char*>(call.lse.element(b, h, i, 0)), dtype);
      }
    }
  }
  const int64_t heads_k = call.k.shape[ragged->head_axis()];
  const int64_t group = call.q.shape[ragged->head_axis()] / heads_k;
  each_query(*ragged, [&](size_t b, int64_t h, size_t i) {
    const Row& query = ragged->queries[b][i];
    double largest = -HUGE_VAL, sum = 0;
    std::vector<double> logits;
    for (const Row& key : seen_by(*ragged, b, i)) {
      logits.push_back(logit_of(call, query, key, h, h / group));
    }
    if (call.backward.sinks != nullptr) {
      logits.push_back(load(call.sinks.element(h, 0, 0, 0), call.sinks.tensor.dtype));
    }
    for (const double logit : logits) largest = std::fmax(largest, logit);
    for (const double logit : logits) sum += std::exp(logit - largest);
    const double lse = logits.empty() ? -HUGE_VAL : largest + std::log(sum);
    const auto narrow = static_cast<float>(lse);
    auto* const at = const_cast<unsigned char*>(call.lse.element(query.first, h, query.second, 0));
    const bool wide = dtype.bits == 64;
    std::memcpy(at, wide ? static_cast<const void*>(&lse) : &narrow, wide ? 8 : 4);
  });
  call.lse.before.assign(call.lse.block.get(), call.lse.block.get() + call.lse.block_bytes);
}

void expect_unchanged(Ragged* ragged) {
  for (const Argument* argument : ragged->call.arguments) EXPECT(argument->unchanged());
  for (const Tables::Tensor& t : ragged->tables.tensors()) EXPECT(t.unchanged());
}

// The gradients against a plain loop; then everything but their elements against what it was.
void expect_gradients(Ragged* ragged) {
  Call& call = ragged->call;
  const int seq = ragged->seq_axis(), head = ragged->head_axis();
  const int64_t heads_k = call.k.shape[head], group = call.q.shape[head] / heads_k;
  const int64_t dim = call.q.shape[3], dim_v = call.v.shape[3];
  const double scale = scale_of(call), cap = static_cast<double>(call.params.softcap);
  Sums dq(call.q.shape[0], call.q.shape[seq], call.q.shape[head], dim);
  Sums dk(call.k.shape[0], call.k.shape[seq], heads_k, dim);
  Sums dv(call.k.shape[0], call.k.shape[seq], heads_k, dim_v);
  Sums dsinks(1, 1, call.q.shape[head], 1);
  each_query(*ragged, [&](size_t b, int64_t h, size_t i) {
    const Row& query = ragged->queries[b][i];
    const int64_t g = h / group;
    const double lse =
        load(call.lse.element(query.first, h, query.second, 0), call.lse.tensor.dtype);
    double delta = 0, magnitude = 0, dlse = 0;
    for (int64_t d = 0; d < dim_v; ++d) {
      const double term =
          number_at(call, call.dout, query, h, d) * number_at(call, call.out, query, h, d);
      delta += term, magnitude += std::fabs(term);
    }
    if (call.backward.dlse != nullptr) {
      dlse = load(call.dlse.element(query.first, h, query.second, 0), call.dlse.tensor.dtype);
    }
    const std::vector<Row> seen = seen_by(*ragged, b, i);
    if (call.backward.sinks != nullptr) {
      const double weight =
          std::exp(load(call.sinks.element(h, 0, 0, 0), call.sinks.tensor.dtype) - lse);
      for (const double part : {delta, magnitude, -magnitude}) {
        if (!seen.empty()) dsinks.add(0, 0, h, 0, -weight * part);  // else out is 0
      }
      dsinks.add(0, 0, h, 0, weight * dlse);
    }
    delta -= dlse;
    for (const Row& key : seen) {
      ++pairs;
      const double logit = logit_of(call, query, key, h, g);
      const double weight = std::exp(logit - lse);
      double dweight = 0;
      for (int64_t d = 0; d < dim_v; ++d) {
        const double dout = number_at(call, call.dout, query, h, d);
        dweight += dout * number_at(call, call.v, key, g, d);
        dv.add(key.first, key.second, g, d, weight * dout);
      }
      const double slope = cap == 0 ? 1 : 1 - (logit / cap) * (logit / cap);
      for (int64_t d = 0; d < dim; ++d) {
        // The last two are what delta is a difference of: its roundings count, and so do the
        // slope's.
        for (const double part : {slope * (dweight - delta), magnitude, -magnitude}) {
          const double factor = scale * weight * part;
          dq.add(query.first, query.second, h, d, factor * number_at(call, call.k, key, g, d));
          dk.add(key.first, key.second, g, d, factor * number_at(call, call.q, query, h, d));
        }
      }
    }
  });
  // Rows that several sequences share have the gradients of any of them.
  bool shares_queries = false;
  for (const auto& [row, owners] : ragged->query_owners) {
    shares_queries = shares_queries || owners > 1;
  }
  const auto is_shared = [](const std::map<Row, int64_t>& owners) {
    return [&owners](int64_t b, int64_t s) {
      const auto found = owners.find({b, s});
      unowned += found == owners.end() ? 1 : 0;
      const bool is = found != owners.end() && found->second > 1;
      shared += is ? 1 : 0;
      return is;
    };
  };
  const auto of_queries = is_shared(ragged->query_owners);
  const auto of_keys = is_shared(ragged->key_owners);
  const double unit = tolerance(call.q.tensor.dtype, scale, dim);
  const flashmoe_attention_backward_params& p = call.backward;
  EXPECT(p.dq == nullptr || dq.are(call, &call.dq, unit, of_queries));
  EXPECT(p.dk == nullptr || dk.are(call, &call.dk, unit, of_keys));
  EXPECT(p.dv == nullptr || dv.are(call, &call.dv, unit, of_keys));
  EXPECT(p.dsinks == nullptr ||
         dsinks.are(call, &call.dsinks, unit, [&](int64_t, int64_t) { return shares_queries; }));
  expect_unchanged(ragged);
}

// ---- faults -------------------------------------------------------------------------------------

using TableFault = Fault<Tables>;

std::vector<TableFault> faults() {
  const auto names_place = [](const char* name, const flashmoe_tensor* Params::* member) {
    return TableFault{name, [=](Random*, Tables* t) -> Blame {
                        const auto given = given_tensors(t);
                        if (given.empty()) return {};
                        t->params.*member = t->params.*given.front().member;
                        return {name, "cu_seqlens_k"};
                      }};
  };
  std::vector<TableFault> all = {
      {"struct_size",
       [](Random* random, Tables* t) -> Blame {
         const size_t size = sizeof t->params;
         t->params.struct_size = random->one_of({size_t{0}, size - 16, size + 8, SIZE_MAX});
         return {"flashmoe_attention_sequences.struct_size"};
       }},
      in_field<Tables, Params, int64_t>("max_seqlen_q", &Params::max_seqlen_q, {-1, INT64_MIN}),
      in_field<Tables, Params, int64_t>("max_seqlen_k", &Params::max_seqlen_k, {-1, INT64_MIN}),
      in_field<Tables, Params, int64_t>("split_size", &Params::split_size, {-1, INT64_MIN}),
      names_place("batch_index", &Params::batch_index),
      names_place("page_table", &Params::page_table),
  };
  // More offsets of queries are more sequences.
  for (const TableFault& each : tensor_faults<Tables>({"cu_seqlens_q"})) {
    all.push_back({each.name, [each](Random* random, Tables* t) -> Blame {
                     return given_tensors(t).empty() ? Blame{} : each.put(random, t);
                   }});
  }
  return all;
}

void run_with_fault(Random* random, Ragged* ragged) {
  static const std::vector<TableFault> all = faults();
  Call& call = ragged->call;
  Blame blame;
  while (blame.empty()) {
    const TableFault& chosen = any_of(random, all);
    fault = chosen.name;
    blame = chosen.put(random, &ragged->tables);
  }
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = call.plan(&plan);
  EXPECT(planned == FLASHMOE_ERROR_INVALID_ARGUMENT || planned == FLASHMOE_ERROR_UNSUPPORTED ||
         planned == FLASHMOE_ERROR_NO_DEVICE);
  const std::string sentence = flashmoe_last_error();
  EXPECT(blames(blame, sentence));
  ++blamed[sentence.substr(0, sentence.find(':'))];
  size_t bytes = 7;
  EXPECT(call.workspace_size(&bytes) == planned && bytes == 7);
  EXPECT(call.run(nullptr, 0, nullptr) == planned);
  EXPECT(sentence == flashmoe_last_error());
  expect_unchanged(ragged);
}

void run(Random* random, Ragged* ragged) {
  Call& call = ragged->call;
  fault.clear();
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = call.plan(&plan);
  // fuzz_call.h makes some such, and fuzz_invalid looks into that.
  if (planned == FLASHMOE_ERROR_INVALID_ARGUMENT &&
      std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr) {
    return;
  }
  EXPECT(planned == FLASHMOE_OK);
  ++computed;
  const Memory workspace = allocate_memory(plan.workspace_bytes);
  EXPECT(call.run(workspace.get(), plan.workspace_bytes, nullptr) == FLASHMOE_OK);
  expect_gradients(ragged);
  if (random->chance(0.3)) run_with_fault(random, ragged);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_backward_sequences", argc, argv, 5000, [](Random* random) {
    Ragged ragged;
    Call& call = ragged.call;
    make_valid(random, &call);
    make_tables(random, &ragged);
    for (int i = 0; i < call.count(); ++i) {
      Argument* const argument = call.arguments[static_cast<size_t>(i)];
      if (argument->rank == 1 || argument == &call.attn_bias || argument == &call.attn_mask) {
        continue;
      }
      argument->allocate(random, call.is_output(i) || argument == &call.lse);
    }
    find_rows(&ragged);
    for (Argument* each : {&call.q, &call.dout, &call.out}) {
      poison_others(ragged, each, ragged.query_owners);
    }
    for (Argument* each : {&call.k, &call.v}) poison_others(ragged, each, ragged.key_owners);
    store_lse(&ragged);
    run(random, &ragged);
  });
  std::printf("%" PRId64 " computed and compared, of %" PRId64 " pairs; %" PRId64
              " elements of rows of none, %" PRId64 " of rows of several\n",
              computed, pairs, unowned, shared);
  print_blamed();
  if (calls < 5000) return 0;
  EXPECT(computed > calls / 2 && pairs > calls && unowned > calls && shared > calls);
  for (const char* name :
       {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "k_begin", "batch_index",
        "page_table", "max_seqlen_q", "max_seqlen_k", "split_size"}) {
    EXPECT(blamed[name] > 0);
  }
  return 0;
}
