// Gathering keys and values of a cache: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._gather, which comes back through `call`
// (bindings/operation.h).
#include "bindings/kv_gather.h"

#include <cstdint>

#include "bindings/calls.h"
#include "bindings/errors.h"
#include "bindings/operation.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int kRank = 4;
constexpr OperationWords kWords = {"gathering from a cache", "all tensors of a call",
                                   "k, and v where there is a v_cache", "has no backward pass",
                                   false};

struct KvGatherCall {
  using Params = flashmoe_kv_gather_params;
  static constexpr char kName[] = "kv_gather";
  static constexpr char kTarget[] = "flashmoe_kv_gather_v1";
  static constexpr auto kPlan = &flashmoe_kv_gather_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_kv_gather_workspace_size;
  static constexpr auto kRun = &flashmoe_kv_gather;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_kv_gather_params_init();
  TensorView k_cache, v_cache, cu_seqlens_k, seqused_k, k_begin, batch_index, page_table;
  TensorView k_scale, v_scale, k, v;

  static constexpr Field<KvGatherCall> kTensors[] = {
      {"k_cache", &KvGatherCall::k_cache, &Params::k_cache, Access::kRead},
      {"v_cache", &KvGatherCall::v_cache, &Params::v_cache, Access::kRead},
      {"cu_seqlens_k", &KvGatherCall::cu_seqlens_k, &Params::cu_seqlens_k, Access::kRead},
      {"seqused_k", &KvGatherCall::seqused_k, &Params::seqused_k, Access::kRead},
      {"k_begin", &KvGatherCall::k_begin, &Params::k_begin, Access::kRead},
      {"batch_index", &KvGatherCall::batch_index, &Params::batch_index, Access::kRead},
      {"page_table", &KvGatherCall::page_table, &Params::page_table, Access::kRead},
      {"k_scale", &KvGatherCall::k_scale, &Params::k_scale, Access::kRead},
      {"v_scale", &KvGatherCall::v_scale, &Params::v_scale, Access::kRead},
      {"k", &KvGatherCall::k, &Params::k, Access::kWrite},
      {"v", &KvGatherCall::v, &Params::v, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      {"layout", [](nb::handle given, Params* p) { p->layout = parse_layout(given); }},
      kernel_option<Params>(),
  };

  const TensorView& first() const { return k_cache; }

  int seq_axis() const { return params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1; }

  // The rows of results that the caller does not pass.
  int64_t rows_of(nb::handle rows) const {
    constexpr char kAccepted[] =
        "is a number of 0 or more, or without cu_seqlens_k None for what the cache has room for";
    const bool packed = cu_seqlens_k.get() != nullptr;
    if (!rows.is_none() || packed) return parse_integer("rows", rows, 0, INT64_MAX, kAccepted);
    const int64_t each = k_cache.extent(seq_axis());
    if (page_table.get() == nullptr) return each;
    int64_t all = 0;
    return __builtin_mul_overflow(page_table.extent(1), each, &all) ? INT64_MAX : all;
  }
  int64_t batch() const {
    if (cu_seqlens_k.get() != nullptr) return 1;
    if (page_table.get() != nullptr) return page_table.extent(0);
    return batch_index.get() != nullptr ? batch_index.extent(0) : k_cache.extent(0);
  }
  static bool has_rank(const TensorView& view, int rank) {
    return view.get() == nullptr || view.rank() == rank;
  }

  template <class Make>
  void make_outputs(nb::handle rows, nb::handle dtype, const Make& make) {
    const bool wants_k = k.get() == nullptr,
               wants_v = v_cache.get() != nullptr && v.get() == nullptr;
    if ((!wants_k && !wants_v) || k_cache.get() == nullptr || k_cache.rank() != kRank) return;
    if (!has_rank(v_cache, kRank) || !has_rank(page_table, 2) || !has_rank(batch_index, 1)) return;
    flashmoe_dtype of_rows = wants_k ? k_cache.tensor().dtype : k.tensor().dtype;
    if (!parse_float_dtype(dtype, &of_rows) && !is_float(of_rows)) {
      raise_value_error(
          "dtype: got None, accepted beside a k_cache of 8 bits is 'float16', 'bfloat16' or "
          "'float32'");
    }
    const auto make_one = [&](const char* name, const TensorView& cache, TensorView* view) {
      int64_t shape[kRank] = {batch(), cache.extent(1), cache.extent(2), cache.extent(3)};
      shape[seq_axis()] = rows_of(rows);
      make(name, view, of_rows, kRank, shape);
    };
    if (wants_k) make_one("k", k_cache, &k);
    if (wants_v) make_one("v", v_cache, &v);
  }

  template <class Make>
  void make_outputs(const nb::dict& options, const Make& make) {
    make_outputs(option_of(options, "rows"), option_of(options, "dtype"), make);
  }
};

nb::object kv_gather(nb::handle k_cache, nb::handle v_cache, nb::handle cu_seqlens_k,
                     nb::handle seqused_k, nb::handle k_begin, nb::handle batch_index,
                     nb::handle page_table, nb::handle k_scale, nb::handle v_scale,
                     nb::handle layout, nb::handle rows, nb::handle dtype, nb::handle k,
                     nb::handle v, nb::handle kernel, nb::handle stream) {
  const nb::handle options[] = {layout, kernel};
  const TensorType* type = tensor_type(k_cache);
  if (type == nullptr) {
    nb::dict named = named_options(KvGatherCall::kOptions, options);
    named["rows"] = rows;
    named["dtype"] = dtype;
    return nb::module_::import_("flashmoe_science._gather")
        .attr("kv_gather")(named_tensors({{"k_cache", k_cache}}, {{"v_cache", v_cache},
                                                                  {"cu_seqlens_k", cu_seqlens_k},
                                                                  {"seqused_k", seqused_k},
                                                                  {"k_begin", k_begin},
                                                                  {"batch_index", batch_index},
                                                                  {"page_table", page_table},
                                                                  {"k_scale", k_scale},
                                                                  {"v_scale", v_scale}}),
                           named, named_tensors({}, {{"k", k}, {"v", v}}), stream);
  }
  KvGatherCall call;
  parse_options(KvGatherCall::kOptions, options, &call.params);
  Caller caller(kWords, *type, "k_cache", k_cache);
  caller.borrow("k_cache", k_cache, &call.k_cache);
  caller.borrow_optional("v_cache", v_cache, &call.v_cache);
  caller.borrow_optional("cu_seqlens_k", cu_seqlens_k, &call.cu_seqlens_k);
  caller.borrow_optional("seqused_k", seqused_k, &call.seqused_k);
  caller.borrow_optional("k_begin", k_begin, &call.k_begin);
  caller.borrow_optional("batch_index", batch_index, &call.batch_index);
  caller.borrow_optional("page_table", page_table, &call.page_table);
  caller.borrow_optional("k_scale", k_scale, &call.k_scale);
  caller.borrow_optional("v_scale", v_scale, &call.v_scale);
  caller.borrow_optional("k", k, &call.k, Access::kWrite);
  caller.borrow_optional("v", v, &call.v, Access::kWrite);
  nb::object keys = nb::borrow(k);
  nb::object values = nb::borrow(v);
  call.make_outputs(
      rows, dtype,
      [&](const char* name, TensorView* view, flashmoe_dtype of, int rank, const int64_t* shape) {
        nb::object& made = view == &call.k ? keys : values;
        made = caller.allocate(name, call.k_cache.device(), of, rank, shape, view);
      });
  launch(&call, caller, stream);
  return v_cache.is_none() && v.is_none() ? keys : nb::make_tuple(keys, values);
}

}  // namespace

const Operation kKvGather = operation_of<KvGatherCall>();

void define_kv_gather(nb::module_& module) {
  module.def("kv_gather", &kv_gather, nb::arg("k_cache").none(), nb::arg("v_cache").none(),
             nb::arg("cu_seqlens_k").none(), nb::arg("seqused_k").none(), nb::arg("k_begin").none(),
             nb::arg("batch_index").none(), nb::arg("page_table").none(), nb::arg("k_scale").none(),
             nb::arg("v_scale").none(), nb::arg("layout").none(), nb::arg("rows").none(),
             nb::arg("dtype").none(), nb::arg("k").none(), nb::arg("v").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             "flashmoe_science.kv_gather with all of its arguments. `dtype` of new results is "
             "\"float16\", \"bfloat16\", \"float32\" or None.");
}

}  // namespace flashmoe
