// Calls of kv_append with numbers from anywhere, and with something wrong: fuzz_append [calls]
// [seed].
//
// Extents, layouts, strides and dtypes are random; slots, lengths, offsets, pages and positions are
// sane, strange or both. Every call must succeed, agree with a plain loop in double precision that
// reads flashmoe.h its own way, and write nothing else. Then one fault is put into it, in any field
// of the parameters or of a tensor: every entry point must refuse it with a sentence that blames
// the argument at fault, and change nothing. Meant to be built with AddressSanitizer and UBSan.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "call_oracle.h"
#include "flashmoe/flashmoe.h"
#include "fuzz_cache.h"
#include "fuzz_call.h"
#include "fuzz_run.h"

namespace {

int64_t written = 0;  // rows

using Params = flashmoe_kv_append_params;

struct Append {
  Params params = flashmoe_kv_append_params_init();
  Argument k, v, k_cache, v_cache, q, q_out;
  Table slots, cache_seqlens, cu_seqlens, seqused, batch_index, page_table, positions, cos, sin;
  std::string kernel;
  float scale = 1;  // of caches of fp8
  int64_t scale_shape[1] = {1};
  flashmoe_tensor scale_tensor = {};
  int64_t batch = 0;  // sequences
  bool null_params = false;

  using Tensor = NamedTensor<Params>;
  std::vector<Tensor> tensors() {
    return {{"k", &Params::k, &k, nullptr},
            {"v", &Params::v, &v, nullptr},
            {"k_cache", &Params::k_cache, &k_cache, nullptr},
            {"v_cache", &Params::v_cache, &v_cache, nullptr},
            {"q", &Params::q, &q, nullptr},
            {"q_out", &Params::q_out, &q_out, nullptr},
            {"slots", &Params::slots, nullptr, &slots},
            {"cache_seqlens", &Params::cache_seqlens, nullptr, &cache_seqlens},
            {"cu_seqlens", &Params::cu_seqlens, nullptr, &cu_seqlens},
            {"seqused", &Params::seqused, nullptr, &seqused},
            {"batch_index", &Params::batch_index, nullptr, &batch_index},
            {"page_table", &Params::page_table, nullptr, &page_table},
            {"positions", &Params::positions, nullptr, &positions},
            {"rotary_cos", &Params::rotary_cos, nullptr, &cos},
            {"rotary_sin", &Params::rotary_sin, nullptr, &sin}};
  }
  int seq_axis() const { return params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1; }
  int head_axis() const { return 3 - seq_axis(); }
  int64_t seq() const { return k.shape[seq_axis()]; }
  int64_t rows_cache() const { return k_cache.shape[seq_axis()]; }
  const unsigned char* at(const Argument& x, int64_t b, int64_t row, int64_t head,
                          int64_t d) const {
    return seq_axis() == 1 ? x.element(b, row, head, d) : x.element(b, head, row, d);
  }
  const Params* pointer() const { return null_params ? nullptr : &params; }
};

void make_rows(Random* random, const Append& call, Argument* x, flashmoe_dtype dtype, int64_t batch,
               int64_t rows, int64_t heads, int64_t dim, bool output) {
  x->rank = 4;
  x->shape[0] = batch;
  x->shape[call.seq_axis()] = rows;
  x->shape[call.head_axis()] = heads;
  x->shape[3] = dim;
  x->tensor.dtype = dtype;
  x->tensor.device = {FLASHMOE_DEVICE_CPU, 0};
  x->allocate(random, output);
}

void make_rotary(Random* random, flashmoe_dtype dtype, bool by_slots, int64_t batch, Append* call) {
  Append& c = *call;
  const int64_t dim = c.k.shape[3], seq = c.seq();
  const int64_t rows = random->range(0, 20), pairs = random->range(1, dim / 2);
  const bool narrow = dtype.bits == 64 || random->chance(0.5);
  const flashmoe_dtype of_table = narrow ? dtype : flashmoe_dtype{FLASHMOE_DTYPE_FLOAT, 32, 1};
  c.cos.fill_angles(random, of_table, rows, pairs);
  c.sin.fill_angles(random, of_table, rows, pairs);
  c.params.rotary_cos = &c.cos.tensor;
  c.params.rotary_sin = &c.sin.tensor;
  c.params.rotary = random->one_of<int32_t>({FLASHMOE_ROTARY_NEOX, FLASHMOE_ROTARY_INTERLEAVED});
  const bool stands = by_slots || random->chance(0.4);
  if (stands) {
    c.positions.fill_integers(random, random->chance(0.5), 2, batch, seq,
                              [&] { return strange_number(random, rows - 1); });
    c.params.positions = &c.positions.tensor;
  }
  if (!random->chance(0.7)) return;
  const int64_t seq_q = stands || c.params.cu_seqlens != nullptr ? seq : random->range(0, 6);
  const int64_t heads = random->range(0, 4);
  make_rows(random, c, &c.q, dtype, batch, seq_q, heads, dim, false);
  make_rows(random, c, &c.q_out, dtype, batch, seq_q, heads, dim, true);
  c.params.q = &c.q.tensor;
  c.params.q_out = &c.q_out.tensor;
  if (!stands && random->chance(0.5)) c.params.q_stays = 1;
}

void make_valid(Random* random, Append* call) {
  Append& c = *call;
  c.params.layout = random->one_of<int32_t>({FLASHMOE_LAYOUT_BSHD, FLASHMOE_LAYOUT_BHSD});
  const auto dtype = random->one_of<flashmoe_dtype>({{FLASHMOE_DTYPE_FLOAT, 16, 1},
                                                     {FLASHMOE_DTYPE_BFLOAT, 16, 1},
                                                     {FLASHMOE_DTYPE_FLOAT, 32, 1},
                                                     {FLASHMOE_DTYPE_FLOAT, 64, 1}});
  enum { kPlain, kIndexed, kPaged, kSlots };
  const int64_t way = random->below(4);
  const bool packed = way != kSlots && random->chance(0.4);
  c.batch = random->range(0, 4);
  const int64_t batch = packed ? 1 : c.batch;
  const int64_t seq = random->range(0, packed ? 14 : 6), heads = random->range(0, 3);
  const int64_t dim = 8 * random->range(1, 5);
  const int64_t dim_v = random->chance(0.5) ? dim : 8 * random->range(1, 5);
  make_rows(random, c, &c.k, dtype, batch, seq, heads, dim, false);
  make_rows(random, c, &c.v, dtype, batch, seq, heads, dim_v, false);
  const int64_t batch_cache = way == kPlain ? c.batch : random->range(0, 9);
  const int64_t rows = random->range(0, way == kPaged || way == kSlots ? 4 : 12);
  flashmoe_dtype of_cache = dtype;
  if (dtype.bits <= 32 && random->chance(0.3)) {
    of_cache = {FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    if (random->chance(0.5)) {
      c.scale = random->one_of({0.3f, 0.5f, 1.7f});
      c.scale_tensor = {&c.scale,
                        {FLASHMOE_DEVICE_CPU, 0},
                        1,
                        {FLASHMOE_DTYPE_FLOAT, 32, 1},
                        c.scale_shape,
                        nullptr,
                        0};
      c.params.k_scale = c.params.v_scale = &c.scale_tensor;
    }
  }
  make_rows(random, c, &c.k_cache, of_cache, batch_cache, rows, heads, dim, true);
  make_rows(random, c, &c.v_cache, of_cache, batch_cache, rows, heads, dim_v, true);
  c.params.k = &c.k.tensor;
  c.params.v = &c.v.tensor;
  c.params.k_cache = &c.k_cache.tensor;
  c.params.v_cache = &c.v_cache.tensor;
  const auto lengths = [&](Table* table, const flashmoe_tensor* Params::* member, int64_t most) {
    table->fill_integers(random, false, 1, c.batch, 1,
                         [&] { return strange_number(random, most); });
    c.params.*member = &table->tensor;
  };
  if (way == kSlots) {
    c.slots.fill_integers(random, random->chance(0.5), 2, batch, seq,
                          [&] { return strange_number(random, batch_cache * rows - 1); });
    c.params.slots = &c.slots.tensor;
  } else {
    if (packed) {
      int64_t now = 0;
      const bool sane = random->chance(0.7);
      c.cu_seqlens.fill_integers(random, false, 1, c.batch + 1, 1, [&] {
        if (!sane) return strange_number(random, seq);
        now = std::min(seq, now + random->range(0, 6));
        return now;
      });
      c.params.cu_seqlens = &c.cu_seqlens.tensor;
    }
    if (random->chance(0.7)) lengths(&c.cache_seqlens, &Params::cache_seqlens, 8);
    if (random->chance(0.4)) lengths(&c.seqused, &Params::seqused, seq);
    if (way == kIndexed) lengths(&c.batch_index, &Params::batch_index, batch_cache - 1);
    if (way == kPaged) {
      c.page_table.fill_integers(random, false, 2, c.batch, random->range(0, 5),
                                 [&] { return strange_number(random, batch_cache - 1); });
      c.params.page_table = &c.page_table.tensor;
    }
  }
  if (random->chance(0.6)) make_rotary(random, dtype, way == kSlots, batch, call);
  if (random->chance(0.2)) {
    c.kernel = "cpu";
    c.params.kernel = c.kernel.c_str();
  }
}

// ---- flashmoe.h, read another way ---------------------------------------------------------------

struct Place {
  int64_t batch;
  int64_t row;

  bool operator<(const Place& other) const {
    return std::pair(batch, row) < std::pair(other.batch, other.row);
  }
};

// A row of k or q that goes somewhere.
struct Move {
  Place from;
  int64_t position;  // -1: it is not rotated
};

struct Expected {
  std::map<Place, std::vector<Move>> cache;
  std::map<Place, std::vector<Move>> queries;
};

bool place_of(const Append& c, int64_t b, int64_t i, int64_t begin, Place* place) {
  const int64_t batch_cache = c.k_cache.shape[0], rows = c.rows_cache();
  if (c.slots.given()) {
    const int64_t slot = c.slots.at(b, i);
    if (slot < 0 || rows == 0) return false;
    *place = {slot / rows, slot % rows};
    return place->batch < batch_cache;
  }
  const int64_t row = begin + i;
  if (c.page_table.given()) {
    if (rows == 0 || row / rows >= c.page_table.shape[1]) return false;
    *place = {c.page_table.at(b, row / rows), row % rows};
  } else {
    *place = {c.batch_index.given() ? c.batch_index.at(b) : b, row};
  }
  return place->batch >= 0 && place->batch < batch_cache && place->row < rows;
}

Expected expected_of(const Append& c) {
  Expected expected;
  const bool turns = c.params.rotary_cos != nullptr;
  const int64_t positions = turns ? c.cos.shape[0] : 0;
  const int64_t seq_q = c.params.q != nullptr ? c.q.shape[c.seq_axis()] : 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const bool packed = c.cu_seqlens.given();
    int64_t first = 0, keys = c.seq(), queries = seq_q;
    if (packed) {
      first = std::clamp<int64_t>(c.cu_seqlens.at(b), 0, c.seq());
      keys = std::clamp<int64_t>(c.cu_seqlens.at(b + 1), first, c.seq()) - first;
      queries = c.params.q != nullptr ? keys : 0;
    }
    if (c.seqused.given()) keys = std::clamp<int64_t>(c.seqused.at(b), 0, keys);
    const int64_t begin = c.cache_seqlens.given() ? c.cache_seqlens.at(b) : 0;
    if (begin < 0) continue;
    const int64_t row_of_batch = packed ? 0 : b;
    for (int64_t i = 0; i < std::max(keys, queries); ++i) {
      const Place from = {row_of_batch, first + i};
      const auto position = [&](bool query) {
        if (c.positions.given()) return c.positions.at(row_of_batch, first + i);
        return begin + (query && c.params.q_stays != 0 ? 0 : i);
      };
      const auto stands = [&](int64_t p) { return p >= 0 && p < positions; };
      if (i < queries && stands(position(true))) {
        expected.queries[from].push_back({from, position(true)});
      }
      Place to;
      if (i < keys && place_of(c, b, i, begin, &to) && (!turns || stands(position(false)))) {
        expected.cache[to].push_back({from, turns ? position(false) : -1});
      }
    }
  }
  return expected;
}

double number_at(const Append& c, const Argument& x, Place place, int64_t head, int64_t d) {
  return load(c.at(x, place.batch, place.row, head, d), x.tensor.dtype);
}

// Number d of a head of what is moved.
double moved(const Append& c, const Argument& x, const Move& move, int64_t head, int64_t d) {
  const double number = number_at(c, x, move.from, head, d);
  const int64_t pairs = move.position >= 0 ? c.cos.shape[1] : 0;
  if (d >= 2 * pairs) return number;
  const bool neighbours = c.params.rotary == FLASHMOE_ROTARY_INTERLEAVED;
  const int64_t pair = neighbours ? d / 2 : d % pairs;
  const bool second = neighbours ? d % 2 == 1 : d >= pairs;
  const int64_t step = neighbours ? 1 : pairs;
  const double other = number_at(c, x, move.from, head, second ? d - step : d + step);
  const double cos = load(c.cos.element(move.position, pair), c.cos.tensor.dtype);
  const double sin = load(c.sin.element(move.position, pair), c.sin.tensor.dtype);
  return second ? number * cos + other * sin : number * cos - other * sin;
}

// Rows of `to` are what `moves` say, and everything else is as it was.
void expect_rows(const Append& c, const std::map<Place, std::vector<Move>>& moves,
                 const Argument& from, bool turned, Argument* to) {
  const flashmoe_dtype dtype = to->tensor.dtype;
  const bool narrow = dtype.bits == 8;
  const double unit = narrow                               ? 0x1p-4 + 0x1p-7  // of k's dtype, too
                      : dtype.bits == 64                   ? 0x1p-52
                      : dtype.bits == 32                   ? 0x1p-23
                      : dtype.code == FLASHMOE_DTYPE_FLOAT ? 0x1p-11
                                                           : 0x1p-8;
  const double absolute = narrow             ? 0x1p-10 + 1e-5
                          : dtype.bits == 64 ? 1e-14
                                             : 4e-6;  // three roundings of numbers up to 8
  for (const auto& [place, given] : moves) {
    for (int64_t head = 0; head < to->shape[c.head_axis()]; ++head) {
      for (int64_t d = 0; d < to->shape[3]; ++d) {
        const unsigned char* const element = c.at(*to, place.batch, place.row, head, d);
        const double got = load(element, dtype);
        // A row that two rows go to may hold anything.
        if (given.size() == 1 && (narrow || (turned && given[0].position >= 0))) {
          Move move = given[0];
          if (!turned) move.position = -1;
          const double scale = narrow ? static_cast<double>(c.scale) : 1;
          const double want = moved(c, from, move, head, d) / scale;
          EXPECT(std::fabs(got - want) <= unit * std::fabs(want) + absolute);
        } else if (given.size() == 1) {
          EXPECT(std::memcmp(element, c.at(from, given[0].from.batch, given[0].from.row, head, d),
                             dtype.bits / 8) == 0);
        }
        const auto offset = static_cast<size_t>(element - to->block.get());
        std::memcpy(to->block.get() + offset, to->before.data() + offset, dtype.bits / 8);
      }
    }
  }
  EXPECT(to->unchanged());
}

void expect_unchanged(Append* call) {
  for (const Append::Tensor& t : call->tensors()) EXPECT(t.unchanged());
}

// ---- faults -------------------------------------------------------------------------------------

using AppendFault = Fault<Append>;

std::vector<AppendFault> faults() {
  std::vector<AppendFault> all = {
      {"struct_size",
       [](Random* random, Append* call) -> Blame {
         const size_t size = sizeof call->params;
         call->params.struct_size = random->one_of(
             {size_t{0}, offsetof(flashmoe_kv_append_params, k_scale) - 8, size + 8, SIZE_MAX});
         return {"params", "struct_size", "flashmoe_kv_append_params"};
       }},
      {"null params",
       [](Random*, Append* call) -> Blame {
         call->null_params = true;
         return {"params"};
       }},
      in_field<Append, Params, int32_t>("layout", &Params::layout, {-1, 2, 77, INT32_MAX}),
      in_field<Append, Params, int32_t>("rotary", &Params::rotary, {-1, 2, 77, INT32_MIN}),
      in_field<Append, Params, int32_t>("q_stays", &Params::q_stays, {-1, 2, INT32_MAX}),
      in_field<Append, Params, uint32_t>("reserved", &Params::reserved, {1, 0x80000000}),
      in_field<Append, Params, const char*>(
          "kernel", &Params::kernel, {"sm89", "sm90", "x", "kv_append_", "kv_append_sm89_fp16"}),
      {"missing tensor",
       [](Random* random, Append* call) -> Blame {
         Append::Tensor tensor = any_of(random, call->tensors());
         while (!(tensor.member == &Params::k || tensor.member == &Params::v ||
                  tensor.member == &Params::k_cache || tensor.member == &Params::v_cache)) {
           tensor = any_of(random, call->tensors());
         }
         call->params.*tensor.member = nullptr;
         return {tensor.name};
       }},
      {"tensor beside slots",
       [](Random* random, Append* call) -> Blame {
         if (!call->slots.given()) return {};
         Append::Tensor tensor = any_of(random, call->tensors());
         const std::set<std::string> refused = {"cache_seqlens", "cu_seqlens", "seqused",
                                                "batch_index", "page_table"};
         while (refused.count(tensor.name) == 0) tensor = any_of(random, call->tensors());
         call->params.*tensor.member = call->params.k;
         return {tensor.name};
       }},
      {"two places",
       [](Random*, Append* call) -> Blame {
         if (call->params.page_table == nullptr) return {};
         call->params.batch_index = call->params.page_table;
         return {"batch_index"};
       }},
      {"sines without cosines",
       [](Random*, Append* call) -> Blame {
         if (call->params.rotary_cos == nullptr) return {};
         call->params.rotary_cos = nullptr;
         return {"rotary_sin"};
       }},
      {"cosines without sines",
       [](Random*, Append* call) -> Blame {
         if (call->params.rotary_cos == nullptr) return {};
         call->params.rotary_sin = nullptr;
         return {"rotary_sin"};
       }},
      {"queries without rotation",
       [](Random*, Append* call) -> Blame {
         if (call->params.q == nullptr) return {};
         call->params.rotary_cos = call->params.rotary_sin = nullptr;
         return {"q", "positions"};
       }},
      {"positions without rotation",
       [](Random*, Append* call) -> Blame {
         if (call->params.positions == nullptr) return {};
         call->params.rotary_cos = call->params.rotary_sin = nullptr;
         return {"positions"};
       }},
      {"q_out without q",
       [](Random*, Append* call) -> Blame {
         if (call->params.q == nullptr) return {};
         call->params.q = nullptr;
         return {"q_out"};
       }},
      {"q without q_out",
       [](Random*, Append* call) -> Blame {
         if (call->params.q == nullptr) return {};
         call->params.q_out = nullptr;
         return {"q_out"};
       }},
      {"slots without positions",
       [](Random*, Append* call) -> Blame {
         if (call->params.slots == nullptr || call->params.rotary_cos == nullptr) return {};
         call->params.positions = nullptr;
         return {"positions"};
       }},
      {"positions and q_stays",
       [](Random*, Append* call) -> Blame {
         if (call->params.positions == nullptr) return {};
         call->params.q_stays = 1;
         return {"q_stays"};
       }},
  };
  // Positions, pages of a sequence and sequences are as many as there are.
  for (const AppendFault& each :
       tensor_faults<Append>({"rotary_cos", "rotary_sin", "page_table", "cu_seqlens"})) {
    all.push_back(each);
  }
  return all;
}

bool is_blamed(const Blame& blame, const std::string& sentence) {
  return blames(blame, sentence) ||
         (blame.count("struct_size") != 0 && sentence.find("struct_size") != std::string::npos);
}

void run_with_fault(Random* random, Append* call) {
  Append& c = *call;
  const std::vector<AppendFault> all = faults();
  Blame blame;
  while (blame.empty()) {
    const AppendFault& chosen =
        all[static_cast<size_t>(random->below(static_cast<int64_t>(all.size())))];
    fault = chosen.name;
    blame = chosen.put(random, call);
  }
  flashmoe_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_plan before;
  std::memcpy(static_cast<void*>(&before), &plan, sizeof plan);
  const flashmoe_status planned = flashmoe_kv_append_plan(c.pointer(), &plan);
  EXPECT(planned == FLASHMOE_ERROR_INVALID_ARGUMENT || planned == FLASHMOE_ERROR_UNSUPPORTED ||
         planned == FLASHMOE_ERROR_ARCH_NOT_BUILT || planned == FLASHMOE_ERROR_NO_DEVICE);
  EXPECT(is_blamed(blame, flashmoe_last_error()));
  EXPECT(std::memcmp(&plan, &before, sizeof plan) == 0);
  const std::string sentence = flashmoe_last_error();
  ++blamed[sentence.substr(0, sentence.find(':'))];
  constexpr size_t kUntouched = 0x5a5a5a5a;
  size_t bytes = kUntouched;
  EXPECT(flashmoe_kv_append_workspace_size(c.pointer(), &bytes) == planned);
  EXPECT(bytes == kUntouched);
  EXPECT(flashmoe_kv_append(c.pointer(), nullptr, 0, nullptr) == planned);
  EXPECT(sentence == flashmoe_last_error());
  expect_unchanged(call);
}

// Outputs share memory with one another or with an input: such a call is planned, and refused when
// launched.
void run_with_shared_memory(Random* random, Append* call) {
  Append& c = *call;
  fault = "shared memory";
  const bool alike = c.k_cache.shape[3] == c.v_cache.shape[3];
  if (!alike || c.k_cache.block_bytes <= 256) return;
  const flashmoe_tensor own = c.k_cache.tensor;
  c.params.v_cache = &own;
  flashmoe_plan plan = flashmoe_plan_init();
  EXPECT(flashmoe_kv_append_plan(&c.params, &plan) == FLASHMOE_OK);
  void* const stream = reinterpret_cast<void*>(uintptr_t{0xdead});  // the CPU must not look
  EXPECT(flashmoe_kv_append(&c.params, nullptr, 0, random->chance(0.5) ? stream : nullptr) ==
         FLASHMOE_ERROR_INVALID_ARGUMENT);
  EXPECT(blames({"v_cache"}, flashmoe_last_error()));
  EXPECT(std::strstr(flashmoe_last_error(), "shares memory with k_cache") != nullptr);
  expect_unchanged(call);
  c.params.v_cache = &c.v_cache.tensor;
}

void run(Random* random, Append* call) {
  Append& c = *call;
  fault.clear();
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = flashmoe_kv_append_plan(&c.params, &plan);
  // fuzz_call.h makes outputs with such strides.
  if (planned == FLASHMOE_ERROR_INVALID_ARGUMENT &&
      std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr) {
    return;
  }
  EXPECT(planned == FLASHMOE_OK);
  EXPECT(plan.workspace_bytes == 0 && plan.launch_count == 1);
  size_t bytes = 1;
  EXPECT(flashmoe_kv_append_workspace_size(&c.params, &bytes) == FLASHMOE_OK && bytes == 0);
  EXPECT(flashmoe_kv_append(&c.params, nullptr, 0, nullptr) == FLASHMOE_OK);
  const Expected expected = expected_of(c);
  written += static_cast<int64_t>(expected.cache.size() + expected.queries.size());
  expect_rows(c, expected.cache, c.k, true, &c.k_cache);
  expect_rows(c, expected.cache, c.v, false, &c.v_cache);
  if (c.params.q != nullptr) expect_rows(c, expected.queries, c.q, true, &c.q_out);
  expect_unchanged(call);
  run_with_shared_memory(random, call);
  run_with_fault(random, call);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_append", argc, argv, 5000, [](Random* random) {
    Append call;
    make_valid(random, &call);
    run(random, &call);
  });
  std::printf("%" PRId64 " rows written and compared\n", written);
  print_blamed();
  if (calls < 5000) return 0;
  EXPECT(written > calls);
  for (const char* name :
       {"k",          "v",        "k_cache",     "v_cache",    "slots",     "cache_seqlens",
        "cu_seqlens", "seqused",  "batch_index", "page_table", "positions", "rotary_cos",
        "rotary_sin", "q",        "q_out",       "kernel",     "layout",    "rotary",
        "q_stays",    "reserved", "params"}) {
    EXPECT(blamed[name] > 0);
  }
  return 0;
}
