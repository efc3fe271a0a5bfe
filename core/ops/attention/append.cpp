// Appending to a cache of keys and values: its checks and its families. See core/operation.h for
// the rest.
#include <array>
#include <cstdio>
#include <utility>

#include "core/backends.h"
#include "core/operation.h"
#include "core/ops/attention/cache_reader.h"
#include "core/option.h"

namespace flashmoe {
namespace {

using Params = flashmoe_kv_append_params;

constexpr const char* kRotaries[] = {"neox", "interleaved"};

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kAttentionLayouts),
    Option<Params>::choice("rotary", &Params::rotary, kRotaries),
    Option<Params>::flag("q_stays", &Params::q_stays),
    Option<Params>::reserved("reserved", &Params::reserved),
};

flashmoe_status refuse_with(const char* name, const flashmoe_tensor* tensor, const char* other,
                            const flashmoe_tensor* other_tensor, const char* why) {
  if (tensor == nullptr || other_tensor == nullptr) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted with %s is none: %s", name,
              other, why);
}

flashmoe_status refuse_without(const char* name, const flashmoe_tensor* tensor, const char* other,
                               const flashmoe_tensor* other_tensor) {
  if (tensor == nullptr || other_tensor != nullptr) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got a tensor, accepted is none without %s",
              name, other);
}

flashmoe_status check_together(const Params& given) {
  for (const auto& [name, tensor] : {std::pair{"cache_seqlens", given.cache_seqlens},
                                     {"cu_seqlens", given.cu_seqlens},
                                     {"seqused", given.seqused},
                                     {"batch_index", given.batch_index},
                                     {"page_table", given.page_table}}) {
    FLASHMOE_TRY(
        refuse_with(name, tensor, "slots", given.slots, "slots alone say where each row goes"));
  }
  FLASHMOE_TRY(refuse_with("batch_index", given.batch_index, "page_table", given.page_table,
                           "a page table alone says where rows go"));
  FLASHMOE_TRY(refuse_without("rotary_sin", given.rotary_sin, "rotary_cos", given.rotary_cos));
  FLASHMOE_TRY(refuse_without("positions", given.positions, "rotary_cos", given.rotary_cos));
  FLASHMOE_TRY(refuse_without("q", given.q, "rotary_cos", given.rotary_cos));
  FLASHMOE_TRY(refuse_without("q_out", given.q_out, "q", given.q));
  if (given.q_stays != 0 && given.positions != nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "q_stays: got 1, accepted with positions is 0: they say where each row stands");
  }
  if (given.slots != nullptr && given.rotary_cos != nullptr && given.positions == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "positions: got none, accepted with slots and rotary_cos is a tensor: "
                "slots do not say where rows stand");
  }
  return FLASHMOE_OK;
}

// What the tensors of a call share: the extents and the dtype of k.
class Reader : CacheReader<KvAppendProblem> {
 public:
  Reader(const Params& given, KvAppendProblem* problem)
      : CacheReader(given.layout, problem), given_(given) {}

  flashmoe_status read() {
    FLASHMOE_TRY(read_new_rows());
    FLASHMOE_TRY(read_cache());
    FLASHMOE_TRY(read_scale_of("k_scale", given_.k_scale, &p_.k_scale));
    FLASHMOE_TRY(read_scale_of("v_scale", given_.v_scale, &p_.v_scale));
    FLASHMOE_TRY(read_places());
    FLASHMOE_TRY(read_rotary());
    return read_queries();
  }

 private:
  // Rows of k's dtype, on its device.
  template <class Data>
  flashmoe_status read_rows(const char* name, const flashmoe_tensor* tensor, View* view,
                            RowsView<Data>* rows) {
    FLASHMOE_TRY(check_view(name, tensor, 4, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "k", p_.device));
    FLASHMOE_TRY(check_same_dtype(name, *tensor, "k", p_.k.dtype));
    FLASHMOE_TRY(check_rows(name, *view, 4, dtype_bytes(p_.k.dtype)));
    set(*view, p_.k.dtype, rows);
    return FLASHMOE_OK;
  }

  flashmoe_status read_new_rows() {
    View view;
    FLASHMOE_TRY(check_view("k", given_.k, 4, &view));
    FLASHMOE_TRY(check_device("k", *given_.k, &p_.device));
    FLASHMOE_TRY(check_float_dtype("k", *given_.k, p_.device, &p_.k.dtype));
    FLASHMOE_TRY(check_rows("k", view, 4, dtype_bytes(p_.k.dtype)));
    set(view, p_.k.dtype, &p_.k);
    p_.batch = rows_of_batch_ = view.shape[0];
    p_.seq = view.shape[seq_axis()];
    p_.heads_kv = view.shape[head_axis()];
    p_.dim = view.shape[3];
    FLASHMOE_TRY(check_dim("k", p_.dim));
    FLASHMOE_TRY(read_rows("v", given_.v, &view, &p_.v));
    FLASHMOE_TRY(check_extent("v", "batch", view.shape[0], "k", rows_of_batch_));
    FLASHMOE_TRY(check_extent("v", "sequence length", view.shape[seq_axis()], "k", p_.seq));
    FLASHMOE_TRY(check_extent("v", "number of heads", view.shape[head_axis()], "k", p_.heads_kv));
    p_.dim_v = view.shape[3];
    return check_dim("v", p_.dim_v);
  }

  flashmoe_status read_cache() {
    View view;
    FLASHMOE_TRY(read_cache_rows("k_cache", given_.k_cache, &view, &p_.k_cache));
    FLASHMOE_TRY(
        check_extent("k_cache", "number of heads", view.shape[head_axis()], "k", p_.heads_kv));
    FLASHMOE_TRY(check_extent("k_cache", "head dimension", view.shape[3], "k", p_.dim));
    FLASHMOE_TRY(check_no_overlap("k_cache", view, 4));
    p_.batch_cache = view.shape[0];
    p_.rows_cache = view.shape[seq_axis()];
    FLASHMOE_TRY(read_cache_rows("v_cache", given_.v_cache, &view, &p_.v_cache));
    FLASHMOE_TRY(check_value_cache(view));
    FLASHMOE_TRY(
        check_extent("v_cache", "number of heads", view.shape[head_axis()], "k", p_.heads_kv));
    FLASHMOE_TRY(check_extent("v_cache", "head dimension", view.shape[3], "v", p_.dim_v));
    return check_no_overlap("v_cache", view, 4);
  }

  flashmoe_status read_token_numbers(const char* name, const flashmoe_tensor* tensor,
                                     TokenNumbers* numbers) const {
    if (tensor == nullptr) return FLASHMOE_OK;
    View view;
    FLASHMOE_TRY(check_numbers(name, tensor, 2, &numbers->wide, &view));
    FLASHMOE_TRY(check_extent(name, "batch", view.shape[0], "k", rows_of_batch_));
    FLASHMOE_TRY(check_extent(name, "sequence length", view.shape[1], "k", p_.seq));
    numbers->data = view.data;
    numbers->batch_stride = view.strides[0];
    numbers->seq_stride = view.strides[1];
    return FLASHMOE_OK;
  }

  flashmoe_status read_places() {
    FLASHMOE_TRY(read_offsets("cu_seqlens", given_.cu_seqlens, &p_.cu_seqlens));
    FLASHMOE_TRY(read_token_numbers("slots", given_.slots, &p_.slots));
    FLASHMOE_TRY(read_numbers("cache_seqlens", given_.cache_seqlens, &p_.cache_seqlens));
    FLASHMOE_TRY(read_numbers("seqused", given_.seqused, &p_.seqused));
    FLASHMOE_TRY(read_numbers("batch_index", given_.batch_index, &p_.batch_index));
    if (given_.page_table != nullptr) return read_page_table(given_.page_table);
    if (given_.slots != nullptr || given_.batch_index != nullptr) return FLASHMOE_OK;
    return check_extent("k_cache", "batch", p_.batch_cache,
                        given_.cu_seqlens != nullptr ? "cu_seqlens" : "k", p_.batch);
  }

  flashmoe_status read_table(const char* name, const flashmoe_tensor* tensor, View* view,
                             RotaryTable* table) {
    FLASHMOE_TRY(check_view(name, tensor, 2, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "k", p_.device));
    FLASHMOE_TRY(check_last_stride(name, *view, 2));
    *table = {view->data, view->strides[0]};
    return FLASHMOE_OK;
  }

  flashmoe_status read_rotary() {
    if (given_.rotary_cos == nullptr) return FLASHMOE_OK;
    Rotary& rotary = p_.rotary;
    View view;
    FLASHMOE_TRY(read_table("rotary_cos", given_.rotary_cos, &view, &rotary.cos));
    if (p_.k.dtype == Dtype::kFloat64) {
      FLASHMOE_TRY(check_same_dtype("rotary_cos", *given_.rotary_cos, "k", p_.k.dtype));
      rotary.dtype = p_.k.dtype;
    } else {
      FLASHMOE_TRY(check_same_dtype_or_fp32("rotary_cos", *given_.rotary_cos, "k", p_.k.dtype,
                                            &rotary.dtype));
    }
    const auto bytes = static_cast<size_t>(dtype_bytes(rotary.dtype));
    FLASHMOE_TRY(check_alignment("rotary_cos", view, bytes));
    rotary.rows = view.shape[0];
    const int64_t pairs = view.shape[1];
    if (pairs < 1 || pairs > p_.dim / 2) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "rotary_cos: it has %lld numbers of each position, accepted are 1 to %lld, half "
                  "the head dimension of k",
                  static_cast<long long>(pairs), static_cast<long long>(p_.dim / 2));
    }
    rotary.dim = 2 * pairs;
    FLASHMOE_TRY(read_table("rotary_sin", given_.rotary_sin, &view, &rotary.sin));
    FLASHMOE_TRY(check_same_dtype("rotary_sin", *given_.rotary_sin, "rotary_cos", rotary.dtype));
    FLASHMOE_TRY(check_alignment("rotary_sin", view, bytes));
    FLASHMOE_TRY(check_extent("rotary_sin", "number of positions", view.shape[0], "rotary_cos",
                              rotary.rows));
    FLASHMOE_TRY(
        check_extent("rotary_sin", "numbers of each position", view.shape[1], "rotary_cos", pairs));
    rotary.interleaved = given_.rotary == FLASHMOE_ROTARY_INTERLEAVED;
    rotary.q_stays = given_.q_stays != 0;
    return read_token_numbers("positions", given_.positions, &p_.positions);
  }

  flashmoe_status read_queries() {
    if (given_.q == nullptr) return FLASHMOE_OK;
    View view;
    FLASHMOE_TRY(read_rows("q", given_.q, &view, &p_.q));
    FLASHMOE_TRY(check_extent("q", "batch", view.shape[0], "k", rows_of_batch_));
    FLASHMOE_TRY(check_extent("q", "head dimension", view.shape[3], "k", p_.dim));
    p_.seq_q = view.shape[seq_axis()];
    p_.heads_q = view.shape[head_axis()];
    if (given_.cu_seqlens != nullptr || given_.positions != nullptr) {  // both belong to k and q
      FLASHMOE_TRY(check_extent("q", "sequence length", p_.seq_q, "k", p_.seq));
    }
    FLASHMOE_TRY(read_rows("q_out", given_.q_out, &view, &p_.q_out));
    FLASHMOE_TRY(check_extent("q_out", "batch", view.shape[0], "q", rows_of_batch_));
    FLASHMOE_TRY(check_extent("q_out", "sequence length", view.shape[seq_axis()], "q", p_.seq_q));
    FLASHMOE_TRY(
        check_extent("q_out", "number of heads", view.shape[head_axis()], "q", p_.heads_q));
    FLASHMOE_TRY(check_extent("q_out", "head dimension", view.shape[3], "q", p_.dim));
    return check_no_overlap("q_out", view, 4);
  }

  const Params& given_;
};

struct KvAppend {
  using Params = flashmoe_kv_append_params;
  using Problem = KvAppendProblem;
  static constexpr char kName[] = "kv_append";
  static constexpr char kParams[] = "flashmoe_kv_append_params";
  static constexpr char kSizeFunction[] = "flashmoe_kv_append_workspace_size";
  static constexpr size_t kOldestParams = offsetof(Params, k_scale);
  static constexpr std::array<TensorMember<Params>, 17> kTensors = {{
      {"k", &Params::k},
      {"v", &Params::v},
      {"k_scale", &Params::k_scale},
      {"v_scale", &Params::v_scale},
      {"slots", &Params::slots},
      {"cache_seqlens", &Params::cache_seqlens},
      {"cu_seqlens", &Params::cu_seqlens},
      {"seqused", &Params::seqused},
      {"batch_index", &Params::batch_index},
      {"page_table", &Params::page_table},
      {"positions", &Params::positions},
      {"rotary_cos", &Params::rotary_cos},
      {"rotary_sin", &Params::rotary_sin},
      {"q", &Params::q},
      {"k_cache", &Params::k_cache},
      {"v_cache", &Params::v_cache},
      {"q_out", &Params::q_out},
  }};
  static constexpr size_t kFirstOutput = 14;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "kv_append_";
  static constexpr const KvAppendFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaKvAppend,
#endif
      &kCpuKvAppend,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_together(params));
    FLASHMOE_TRY(Reader(params, problem).read());
    copy_kernel_name(params.kernel, &problem->kernel);
    return FLASHMOE_OK;
  }

  // q_out may be q.
  static Params params_apart(const Params& params) {
    Params apart = params;
    if (is_in_place(params.q, params.q_out)) apart.q = nullptr;
    return apart;
  }

  // Rows move; a rotation is not counted.
  static double flops(const Problem&) { return 0; }
  static bool is_empty(const Problem& p) {
    const bool no_keys = p.seq == 0 || p.heads_kv == 0;
    return p.batch == 0 || (no_keys && (p.seq_q == 0 || p.heads_q == 0));
  }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[64];
    print_options(kOptions, params, options, sizeof options);
    const auto name = [](const flashmoe_tensor* tensor, const char* is) {
      return tensor != nullptr ? is : "";
    };
    std::snprintf(text, size,
                  "sequences=%lld seq=%lld/%lld heads=%lld/%lld dim=%lld/%lld cache=%lldx%lld %s%s "
                  "by=%s%s%s%s%s%s%s rotary_dim=%lld%s",
                  static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
                  static_cast<long long>(p.seq), static_cast<long long>(p.heads_q),
                  static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
                  static_cast<long long>(p.dim_v), static_cast<long long>(p.batch_cache),
                  static_cast<long long>(p.rows_cache), dtype_name(p.k.dtype),
                  p.k_cache.dtype != p.k.dtype ? "->fp8_e4m3" : "", name(params.slots, "slots,"),
                  name(params.cache_seqlens, "cache_seqlens,"),
                  name(params.cu_seqlens, "cu_seqlens,"), name(params.seqused, "seqused,"),
                  name(params.batch_index, "batch_index,"), name(params.page_table, "page_table,"),
                  name(params.positions, "positions,"), static_cast<long long>(p.rotary.dim),
                  options);
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::KvAppend;

flashmoe_status flashmoe_kv_append_plan(const flashmoe_kv_append_params* params,
                                        flashmoe_plan* plan) {
  return flashmoe::plan_operation<KvAppend>(params, plan);
}

flashmoe_status flashmoe_kv_append_workspace_size(const flashmoe_kv_append_params* params,
                                                  size_t* bytes) {
  return flashmoe::workspace_size_of<KvAppend>(params, bytes);
}

flashmoe_status flashmoe_kv_append(const flashmoe_kv_append_params* params, void* workspace,
                                   size_t workspace_size, void* stream) {
  return flashmoe::run_operation<KvAppend>(params, workspace, workspace_size, stream);
}
