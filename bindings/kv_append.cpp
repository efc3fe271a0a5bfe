// Appending to a cache of keys and values: calls from Python objects to the C ABI.
//
// Tensors whose type has the DLPack exchange API, all of one framework, take the fast path below;
// everything else goes to flashmoe_science._append, which comes back through `call`
// (bindings/operation.h).
#include "bindings/kv_append.h"

#include <cstdint>

#include "bindings/calls.h"
#include "bindings/operation.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

constexpr int kRank = 4;
constexpr OperationWords kWords = {"appending to a cache", "all tensors of a call",
                                   "q_out, where there is a q", "has no backward pass", false};

struct KvAppendCall {
  using Params = flashmoe_kv_append_params;
  static constexpr char kName[] = "kv_append";
  static constexpr char kTarget[] = "flashmoe_kv_append_v1";
  static constexpr auto kPlan = &flashmoe_kv_append_plan;
  static constexpr auto kWorkspaceSize = &flashmoe_kv_append_workspace_size;
  static constexpr auto kRun = &flashmoe_kv_append;
  static constexpr bool kNeedsWorkspace = false;

  Params params = flashmoe_kv_append_params_init();
  TensorView k, v, k_cache, v_cache, slots, cache_seqlens, cu_seqlens, seqused, batch_index;
  TensorView page_table, positions, rotary_cos, rotary_sin, q, q_out, k_scale, v_scale;

  static constexpr Field<KvAppendCall> kTensors[] = {
      {"k", &KvAppendCall::k, &Params::k, Access::kRead},
      {"v", &KvAppendCall::v, &Params::v, Access::kRead},
      {"slots", &KvAppendCall::slots, &Params::slots, Access::kRead},
      {"cache_seqlens", &KvAppendCall::cache_seqlens, &Params::cache_seqlens, Access::kRead},
      {"cu_seqlens", &KvAppendCall::cu_seqlens, &Params::cu_seqlens, Access::kRead},
      {"seqused", &KvAppendCall::seqused, &Params::seqused, Access::kRead},
      {"batch_index", &KvAppendCall::batch_index, &Params::batch_index, Access::kRead},
      {"page_table", &KvAppendCall::page_table, &Params::page_table, Access::kRead},
      {"positions", &KvAppendCall::positions, &Params::positions, Access::kRead},
      {"rotary_cos", &KvAppendCall::rotary_cos, &Params::rotary_cos, Access::kRead},
      {"rotary_sin", &KvAppendCall::rotary_sin, &Params::rotary_sin, Access::kRead},
      {"q", &KvAppendCall::q, &Params::q, Access::kRead},
      {"k_scale", &KvAppendCall::k_scale, &Params::k_scale, Access::kRead},
      {"v_scale", &KvAppendCall::v_scale, &Params::v_scale, Access::kRead},
      {"k_cache", &KvAppendCall::k_cache, &Params::k_cache, Access::kWrite},
      {"v_cache", &KvAppendCall::v_cache, &Params::v_cache, Access::kWrite},
      {"q_out", &KvAppendCall::q_out, &Params::q_out, Access::kWrite},
  };

  static constexpr Option<Params> kOptions[] = {
      {"layout", [](nb::handle given, Params* p) { p->layout = parse_layout(given); }},
      {"interleaved",
       [](nb::handle given, Params* p) {
         p->rotary =
             parse_flag("interleaved", given) ? FLASHMOE_ROTARY_INTERLEAVED : FLASHMOE_ROTARY_NEOX;
       }},
      {"q_stays",
       [](nb::handle given, Params* p) { p->q_stays = parse_flag("q_stays", given) ? 1 : 0; }},
      kernel_option<Params>(),
  };

  const TensorView& first() const { return k; }

  template <class Make>
  void make_outputs(const nb::dict&, const Make& make) {
    if (q.get() == nullptr || q_out.get() != nullptr || q.rank() != kRank) return;
    if (!is_float(q.tensor().dtype)) return;
    const int64_t shape[] = {q.extent(0), q.extent(1), q.extent(2), q.extent(3)};
    make("q_out", &q_out, q.tensor().dtype, kRank, shape);
  }
};

nb::object kv_append(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                     nb::handle slots, nb::handle cache_seqlens, nb::handle cu_seqlens,
                     nb::handle seqused, nb::handle batch_index, nb::handle page_table,
                     nb::handle positions, nb::handle rotary_cos, nb::handle rotary_sin,
                     nb::handle interleaved, nb::handle q, nb::handle q_stays, nb::handle layout,
                     nb::handle q_out, nb::handle kernel, nb::handle stream, nb::handle k_scale,
                     nb::handle v_scale) {
  const nb::handle options[] = {layout, interleaved, q_stays, kernel};
  const TensorType* type = tensor_type(k);
  if (type == nullptr) {
    return nb::module_::import_("flashmoe_science._append")
        .attr("kv_append")(
            named_tensors({{"k", k}, {"v", v}}, {{"slots", slots},
                                                 {"cache_seqlens", cache_seqlens},
                                                 {"cu_seqlens", cu_seqlens},
                                                 {"seqused", seqused},
                                                 {"batch_index", batch_index},
                                                 {"page_table", page_table},
                                                 {"positions", positions},
                                                 {"rotary_cos", rotary_cos},
                                                 {"rotary_sin", rotary_sin},
                                                 {"q", q},
                                                 {"k_scale", k_scale},
                                                 {"v_scale", v_scale}}),
            named_options(KvAppendCall::kOptions, options),
            named_tensors({{"k_cache", k_cache}, {"v_cache", v_cache}}, {{"q_out", q_out}}),
            stream);
  }
  KvAppendCall call;
  parse_options(KvAppendCall::kOptions, options, &call.params);
  Caller caller(kWords, *type, "k", k);
  caller.borrow("k", k, &call.k);
  caller.borrow("v", v, &call.v);
  caller.borrow("k_cache", k_cache, &call.k_cache, Access::kWrite);
  caller.borrow("v_cache", v_cache, &call.v_cache, Access::kWrite);
  caller.borrow_optional("slots", slots, &call.slots);
  caller.borrow_optional("cache_seqlens", cache_seqlens, &call.cache_seqlens);
  caller.borrow_optional("cu_seqlens", cu_seqlens, &call.cu_seqlens);
  caller.borrow_optional("seqused", seqused, &call.seqused);
  caller.borrow_optional("batch_index", batch_index, &call.batch_index);
  caller.borrow_optional("page_table", page_table, &call.page_table);
  caller.borrow_optional("positions", positions, &call.positions);
  caller.borrow_optional("rotary_cos", rotary_cos, &call.rotary_cos);
  caller.borrow_optional("rotary_sin", rotary_sin, &call.rotary_sin);
  caller.borrow_optional("q", q, &call.q);
  caller.borrow_optional("k_scale", k_scale, &call.k_scale);
  caller.borrow_optional("v_scale", v_scale, &call.v_scale);
  caller.borrow_optional("q_out", q_out, &call.q_out, Access::kWrite);
  nb::object rotated = nb::borrow(q_out);
  call.make_outputs(nb::dict(),
                    [&](const char* name, TensorView* view, flashmoe_dtype, int, const int64_t*) {
                      rotated = caller.allocate_like(name, q, call.q, view);
                    });
  launch(&call, caller, stream);
  return rotated;
}

}  // namespace

const Operation kKvAppend = operation_of<KvAppendCall>();

void define_kv_append(nb::module_& module) {
  module.def("kv_append", &kv_append, nb::arg("k").none(), nb::arg("v").none(),
             nb::arg("k_cache").none(), nb::arg("v_cache").none(), nb::arg("slots").none(),
             nb::arg("cache_seqlens").none(), nb::arg("cu_seqlens").none(),
             nb::arg("seqused").none(), nb::arg("batch_index").none(), nb::arg("page_table").none(),
             nb::arg("positions").none(), nb::arg("rotary_cos").none(),
             nb::arg("rotary_sin").none(), nb::arg("interleaved").none(), nb::arg("q").none(),
             nb::arg("q_stays").none(), nb::arg("layout").none(), nb::arg("q_out").none(),
             nb::arg("kernel").none(), nb::arg("stream").none(),
             nb::arg("k_scale").none() = nb::none(), nb::arg("v_scale").none() = nb::none(),
             "flashmoe_science.kv_append with all of its arguments.");
}

}  // namespace flashmoe
