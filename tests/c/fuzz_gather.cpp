// Calls of kv_gather with numbers from anywhere, and with something wrong: fuzz_gather [calls]
// [seed].
//
// Extents, layouts, strides and dtypes are random; lengths, offsets and pages are sane, strange or
// both. Every call must succeed, agree with a plain loop that reads flashmoe.h its own way, and
// write nothing else. Then one fault is put into it, in any field of the parameters or of a tensor:
// every entry point must refuse it with a sentence that blames the argument at fault, and change
// nothing. Meant to be built with AddressSanitizer and UBSan.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
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
int64_t zeros = 0;    // of them

using Params = flashmoe_kv_gather_params;

struct Gather {
  Params params = flashmoe_kv_gather_params_init();
  Argument k_cache, v_cache, k, v;
  Table cu_seqlens_k, seqused_k, k_begin, batch_index, page_table;
  std::string kernel;
  float scale = 1;  // of caches of fp8
  int64_t scale_shape[1] = {1};
  flashmoe_tensor scale_tensor = {};
  int64_t batch = 0;  // sequences
  bool null_params = false;

  using Tensor = NamedTensor<Params>;
  std::vector<Tensor> tensors() {
    return {{"k_cache", &Params::k_cache, &k_cache, nullptr},
            {"v_cache", &Params::v_cache, &v_cache, nullptr},
            {"k", &Params::k, &k, nullptr},
            {"v", &Params::v, &v, nullptr},
            {"cu_seqlens_k", &Params::cu_seqlens_k, nullptr, &cu_seqlens_k},
            {"seqused_k", &Params::seqused_k, nullptr, &seqused_k},
            {"k_begin", &Params::k_begin, nullptr, &k_begin},
            {"batch_index", &Params::batch_index, nullptr, &batch_index},
            {"page_table", &Params::page_table, nullptr, &page_table}};
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

void make_rows(Random* random, const Gather& call, Argument* x, flashmoe_dtype dtype, int64_t batch,
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

void make_scales(Random* random, Gather* call) {
  Gather& c = *call;
  c.scale = random->one_of({0.3f, 0.5f, 1.7f});
  c.scale_tensor = {
      &c.scale, {FLASHMOE_DEVICE_CPU, 0}, 1, {FLASHMOE_DTYPE_FLOAT, 32, 1}, c.scale_shape, nullptr,
      0};
  c.params.k_scale = &c.scale_tensor;
  if (c.params.v != nullptr) c.params.v_scale = &c.scale_tensor;
}

void make_valid(Random* random, Gather* call) {
  Gather& c = *call;
  c.params.layout = random->one_of<int32_t>({FLASHMOE_LAYOUT_BSHD, FLASHMOE_LAYOUT_BHSD});
  const auto dtype = random->one_of<flashmoe_dtype>({{FLASHMOE_DTYPE_FLOAT, 16, 1},
                                                     {FLASHMOE_DTYPE_BFLOAT, 16, 1},
                                                     {FLASHMOE_DTYPE_FLOAT, 32, 1},
                                                     {FLASHMOE_DTYPE_FLOAT, 64, 1}});
  enum { kPlain, kIndexed, kPaged };
  const int64_t way = random->below(3);
  const bool packed = random->chance(0.4), with_v = random->chance(0.8);
  c.batch = random->range(0, 4);
  const int64_t seq = random->range(0, packed ? 14 : 6), heads = random->range(0, 3);
  const int64_t dim = 8 * random->range(1, 5), dim_v = 8 * random->range(1, 5);
  const int64_t batch_cache = way == kPlain ? c.batch : random->range(0, 9);
  const int64_t rows = random->range(0, way == kPaged ? 4 : 12);
  const bool fp8 = dtype.bits <= 32 && random->chance(0.3);
  const flashmoe_dtype of_cache = fp8 ? flashmoe_dtype{FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1} : dtype;
  make_rows(random, c, &c.k_cache, of_cache, batch_cache, rows, heads, dim, false);
  make_rows(random, c, &c.k, dtype, packed ? 1 : c.batch, seq, heads, dim, true);
  c.params.k_cache = &c.k_cache.tensor;
  c.params.k = &c.k.tensor;
  if (with_v) {
    make_rows(random, c, &c.v_cache, of_cache, batch_cache, rows, heads, dim_v, false);
    make_rows(random, c, &c.v, dtype, packed ? 1 : c.batch, seq, heads, dim_v, true);
    c.params.v_cache = &c.v_cache.tensor;
    c.params.v = &c.v.tensor;
  }
  if (fp8 && random->chance(0.5)) make_scales(random, call);
  const auto lengths = [&](Table* table, const flashmoe_tensor* Params::* member, int64_t most) {
    table->fill_integers(random, false, 1, c.batch, 1,
                         [&] { return strange_number(random, most); });
    c.params.*member = &table->tensor;
  };
  if (packed) {
    int64_t now = 0;
    const bool sane = random->chance(0.7);
    c.cu_seqlens_k.fill_integers(random, false, 1, c.batch + 1, 1, [&] {
      if (!sane) return strange_number(random, seq);
      now = std::min(seq, now + random->range(0, 6));
      return now;
    });
    c.params.cu_seqlens_k = &c.cu_seqlens_k.tensor;
  }
  if (random->chance(0.6)) lengths(&c.seqused_k, &Params::seqused_k, 8);
  if (random->chance(0.4)) lengths(&c.k_begin, &Params::k_begin, 4);
  if (way == kIndexed) lengths(&c.batch_index, &Params::batch_index, batch_cache - 1);
  if (way == kPaged) {
    c.page_table.fill_integers(random, false, 2, c.batch, random->range(0, 5),
                               [&] { return strange_number(random, batch_cache - 1); });
    c.params.page_table = &c.page_table.tensor;
  }
  if (random->chance(0.2)) {
    c.kernel = "cpu";
    c.params.kernel = c.kernel.c_str();
  }
}

// ---- flashmoe.h, read another way ---------------------------------------------------------------

using Place = std::pair<int64_t, int64_t>;  // batch and row

// By row of the results that of the cache; batch -1: zeros.
std::map<Place, Place> expected_of(const Gather& c) {
  std::map<Place, Place> expected;
  std::map<Place, bool> taken;
  const int64_t batch_cache = c.k_cache.shape[0], rows = c.rows_cache();
  for (int64_t b = 0; b < c.batch; ++b) {
    int64_t row = b, first = 0, end = c.seq();
    if (c.cu_seqlens_k.given()) {
      row = 0;
      first = std::clamp<int64_t>(c.cu_seqlens_k.at(b), 0, c.seq());
      end = std::clamp<int64_t>(c.cu_seqlens_k.at(b + 1), first, c.seq());
    }
    int64_t keys = rows * (c.page_table.given() ? c.page_table.shape[1] : 1);
    if (c.batch_index.given()) {
      const int64_t at = c.batch_index.at(b);
      if (at < 0 || at >= batch_cache) keys = 0;
    }
    if (c.seqused_k.given()) keys = std::clamp<int64_t>(c.seqused_k.at(b), 0, keys);
    const int64_t begin =
        c.k_begin.given() ? std::clamp<int64_t>(c.k_begin.at(b), 0, keys) : int64_t{0};
    for (int64_t i = 0; first + i < end; ++i) {
      bool& is_taken = taken[{row, first + i}];
      const int64_t key = begin + i;
      if (!is_taken && key < keys) {
        Place from = {c.batch_index.given() ? c.batch_index.at(b) : b, key};
        if (c.page_table.given()) {
          from = {c.page_table.at(b, key / rows), key % rows};
          if (from.first < 0 || from.first >= batch_cache) from.first = -1;
        }
        expected[{row, first + i}] = from;
      }
      is_taken = true;
    }
  }
  return expected;
}

// Rows of `to` are those of `from`, and everything else is as it was.
void expect_rows(const Gather& c, const std::map<Place, Place>& moves, const Argument& from,
                 Argument* to) {
  const flashmoe_dtype dtype = to->tensor.dtype;
  const bool wide = from.tensor.dtype.bits != dtype.bits;
  const bool scaled = c.params.k_scale != nullptr;
  const double unit = dtype.bits == 32                     ? 0x1p-23
                      : dtype.code == FLASHMOE_DTYPE_FLOAT ? 0x1p-10
                                                           : 0x1p-7;
  for (const auto& [place, source] : moves) {
    for (int64_t head = 0; head < to->shape[c.head_axis()]; ++head) {
      for (int64_t d = 0; d < to->shape[3]; ++d) {
        const unsigned char* const element = c.at(*to, place.first, place.second, head, d);
        const double got = load(element, dtype);
        if (source.first < 0) {
          EXPECT(got == 0 && !std::signbit(got));
        } else {
          const unsigned char* const origin = c.at(from, source.first, source.second, head, d);
          const double number = load(origin, from.tensor.dtype);
          const double want = number * (scaled ? static_cast<double>(c.scale) : 1.0);
          if (!wide) {
            EXPECT(std::memcmp(element, origin, dtype.bits / 8) == 0);
          } else {
            EXPECT(scaled ? std::fabs(got - want) <= unit * std::fabs(want) + 0x1p-24
                          : got == want);
          }
        }
        const auto offset = static_cast<size_t>(element - to->block.get());
        std::memcpy(to->block.get() + offset, to->before.data() + offset, dtype.bits / 8);
      }
    }
  }
  EXPECT(to->unchanged());
}

void expect_unchanged(Gather* call) {
  for (const Gather::Tensor& t : call->tensors()) EXPECT(t.unchanged());
}

// ---- faults -------------------------------------------------------------------------------------

using GatherFault = Fault<Gather>;

std::vector<GatherFault> faults(const Gather& c) {
  std::vector<GatherFault> all = {
      {"struct_size",
       [](Random* random, Gather* call) -> Blame {
         const size_t size = sizeof call->params;
         call->params.struct_size = random->one_of({size_t{0}, size - 8, size + 8, SIZE_MAX});
         return {"params", "struct_size", "flashmoe_kv_gather_params"};
       }},
      {"null params",
       [](Random*, Gather* call) -> Blame {
         call->null_params = true;
         return {"params"};
       }},
      in_field<Gather, Params, int32_t>("layout", &Params::layout, {-1, 2, 77, INT32_MAX}),
      in_field<Gather, Params, uint32_t>("reserved", &Params::reserved, {1, 0x80000000}),
      in_field<Gather, Params, const char*>(
          "kernel", &Params::kernel, {"sm89", "sm90", "x", "kv_gather_", "kv_gather_sm89_fp16"}),
      {"missing tensor",
       [](Random* random, Gather* call) -> Blame {
         const bool cache = random->chance(0.5);
         (cache ? call->params.k_cache : call->params.k) = nullptr;
         return {cache ? "k_cache" : "k"};
       }},
      {"values without a cache",
       [](Random*, Gather* call) -> Blame {
         if (call->params.v == nullptr) return {};
         call->params.v_cache = nullptr;
         return {"v"};
       }},
      {"a cache without values",
       [](Random*, Gather* call) -> Blame {
         if (call->params.v == nullptr) return {};
         call->params.v = nullptr;
         return {"v_cache"};
       }},
      {"two places",
       [](Random*, Gather* call) -> Blame {
         if (call->params.page_table == nullptr) return {};
         call->params.batch_index = call->params.page_table;
         return {"batch_index"};
       }},
      {"scales of a cache that is not of 8 bits",
       [](Random* random, Gather* call) -> Blame {
         if (call->k_cache.tensor.dtype.bits == 8) return {};
         make_scales(random, call);
         call->params.v_scale = nullptr;
         return {"k_scale"};
       }},
  };
  // Pages of a sequence and sequences are as many as there are. Where nothing is beside keys, so
  // are pages and, of no heads, rows.
  Blame any_extent = {"page_table", "cu_seqlens_k"};
  if (c.params.v == nullptr) any_extent.insert({"k_cache", "k"});
  for (const GatherFault& each : tensor_faults<Gather>(any_extent)) {
    all.push_back(each);
  }
  return all;
}

bool is_blamed(const Blame& blame, const std::string& sentence) {
  return blames(blame, sentence) ||
         (blame.count("struct_size") != 0 && sentence.find("struct_size") != std::string::npos);
}

void run_with_fault(Random* random, Gather* call) {
  Gather& c = *call;
  const std::vector<GatherFault> all = faults(c);
  Blame blame;
  while (blame.empty()) {
    const GatherFault& chosen =
        all[static_cast<size_t>(random->below(static_cast<int64_t>(all.size())))];
    fault = chosen.name;
    blame = chosen.put(random, call);
  }
  flashmoe_plan plan;
  std::memset(static_cast<void*>(&plan), kPoison, sizeof plan);
  plan.struct_size = sizeof plan;
  flashmoe_plan before;
  std::memcpy(static_cast<void*>(&before), &plan, sizeof plan);
  const flashmoe_status planned = flashmoe_kv_gather_plan(c.pointer(), &plan);
  EXPECT(planned == FLASHMOE_ERROR_INVALID_ARGUMENT || planned == FLASHMOE_ERROR_UNSUPPORTED ||
         planned == FLASHMOE_ERROR_ARCH_NOT_BUILT || planned == FLASHMOE_ERROR_NO_DEVICE);
  EXPECT(is_blamed(blame, flashmoe_last_error()));
  EXPECT(std::memcmp(&plan, &before, sizeof plan) == 0);
  const std::string sentence = flashmoe_last_error();
  ++blamed[sentence.substr(0, sentence.find(':'))];
  constexpr size_t kUntouched = 0x5a5a5a5a;
  size_t bytes = kUntouched;
  EXPECT(flashmoe_kv_gather_workspace_size(c.pointer(), &bytes) == planned);
  EXPECT(bytes == kUntouched);
  EXPECT(flashmoe_kv_gather(c.pointer(), nullptr, 0, nullptr) == planned);
  EXPECT(sentence == flashmoe_last_error());
  expect_unchanged(call);
}

// A result that is the cache's memory: planned, and refused when it is launched.
void run_with_shared_memory(Random* random, Gather* call) {
  Gather& c = *call;
  fault = "shared memory";
  const bool alike = c.k_cache.tensor.dtype.bits == c.k.tensor.dtype.bits &&
                     std::equal(c.k.shape, c.k.shape + 4, c.k_cache.shape);
  if (!alike || c.k.block_bytes <= 256) return;
  const flashmoe_tensor own = c.k.tensor;
  c.params.k_cache = &own;
  flashmoe_plan plan = flashmoe_plan_init();
  EXPECT(flashmoe_kv_gather_plan(&c.params, &plan) == FLASHMOE_OK);
  void* const stream = reinterpret_cast<void*>(uintptr_t{0xdead});  // the CPU must not look
  EXPECT(flashmoe_kv_gather(&c.params, nullptr, 0, random->chance(0.5) ? stream : nullptr) ==
         FLASHMOE_ERROR_INVALID_ARGUMENT);
  EXPECT(blames({"k"}, flashmoe_last_error()));
  EXPECT(std::strstr(flashmoe_last_error(), "shares memory with k_cache") != nullptr);
  expect_unchanged(call);
  c.params.k_cache = &c.k_cache.tensor;
}

void run(Random* random, Gather* call) {
  Gather& c = *call;
  fault.clear();
  flashmoe_plan plan = flashmoe_plan_init();
  const flashmoe_status planned = flashmoe_kv_gather_plan(&c.params, &plan);
  // fuzz_call.h makes outputs with such strides.
  if (planned == FLASHMOE_ERROR_INVALID_ARGUMENT &&
      std::strstr(flashmoe_last_error(), "an output needs distinct elements") != nullptr) {
    return;
  }
  EXPECT(planned == FLASHMOE_OK);
  EXPECT(plan.workspace_bytes == 0 && plan.launch_count == 1);
  size_t bytes = 1;
  EXPECT(flashmoe_kv_gather_workspace_size(&c.params, &bytes) == FLASHMOE_OK && bytes == 0);
  EXPECT(flashmoe_kv_gather(&c.params, nullptr, 0, nullptr) == FLASHMOE_OK);
  const std::map<Place, Place> expected = expected_of(c);
  written += static_cast<int64_t>(expected.size());
  for (const auto& [to, from] : expected) zeros += from.first < 0 ? 1 : 0;
  expect_rows(c, expected, c.k_cache, &c.k);
  if (c.params.v != nullptr) expect_rows(c, expected, c.v_cache, &c.v);
  expect_unchanged(call);
  run_with_shared_memory(random, call);
  run_with_fault(random, call);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = run_calls("fuzz_gather", argc, argv, 5000, [](Random* random) {
    Gather call;
    make_valid(random, &call);
    run(random, &call);
  });
  std::printf("%" PRId64 " rows written and compared, %" PRId64 " of them zeros\n", written, zeros);
  print_blamed();
  if (calls < 5000) return 0;
  EXPECT(written > calls && zeros > calls / 20);
  for (const char* name :
       {"k", "v", "k_cache", "v_cache", "cu_seqlens_k", "seqused_k", "k_begin", "batch_index",
        "page_table", "k_scale", "kernel", "layout", "reserved", "params"}) {
    EXPECT(blamed[name] > 0);
  }
  return 0;
}
