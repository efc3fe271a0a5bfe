// Gathering keys and values of a cache: its checks and its families. See core/operation.h for the
// rest.
#include <array>
#include <cstdio>
#include <tuple>

#include "core/backends.h"
#include "core/operation.h"
#include "core/ops/attention/cache_reader.h"
#include "core/option.h"

namespace flashmoe {
namespace {

using Params = flashmoe_kv_gather_params;

constexpr Option<Params> kOptions[] = {
    Option<Params>::choice("layout", &Params::layout, kAttentionLayouts),
    Option<Params>::reserved("reserved", &Params::reserved),
};

flashmoe_status check_together(const Params& given) {
  if (given.batch_index != nullptr && given.page_table != nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "batch_index: got one, accepted with page_table is none: a page table "
                "alone says where keys are");
  }
  for (const auto& [name, tensor, other, other_tensor] :
       {std::tuple{"v_cache", given.v_cache, "v", given.v},
        {"v", given.v, "v_cache", given.v_cache},
        {"v_scale", given.v_scale, "v_cache", given.v_cache}}) {
    if (tensor == nullptr || other_tensor != nullptr) continue;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got a tensor, accepted is none without %s",
                name, other);
  }
  return FLASHMOE_OK;
}

// What the tensors of a call share: the extents and the dtype of k.
class Reader : CacheReader<KvGatherProblem> {
 public:
  Reader(const Params& given, KvGatherProblem* problem)
      : CacheReader(given.layout, problem), given_(given) {}

  flashmoe_status read() {
    FLASHMOE_TRY(read_results());
    FLASHMOE_TRY(read_caches());
    FLASHMOE_TRY(read_scale_of("k_scale", given_.k_scale, &p_.k_scale));
    FLASHMOE_TRY(read_scale_of("v_scale", given_.v_scale, &p_.v_scale));
    return read_places();
  }

 private:
  flashmoe_status read_results() {
    View view;
    FLASHMOE_TRY(check_view("k", given_.k, 4, &view));
    FLASHMOE_TRY(check_device("k", *given_.k, &p_.device));
    FLASHMOE_TRY(check_float_dtype("k", *given_.k, p_.device, &p_.k.dtype));
    const Dtype dtype = p_.k.dtype;
    FLASHMOE_TRY(check_rows("k", view, 4, dtype_bytes(dtype)));
    set(view, dtype, &p_.k);
    p_.batch = rows_of_batch_ = view.shape[0];
    p_.seq = view.shape[seq_axis()];
    p_.heads_kv = view.shape[head_axis()];
    p_.dim = view.shape[3];
    FLASHMOE_TRY(check_dim("k", p_.dim));
    FLASHMOE_TRY(check_no_overlap("k", view, 4));
    if (given_.v == nullptr) return FLASHMOE_OK;
    FLASHMOE_TRY(check_view("v", given_.v, 4, &view));
    FLASHMOE_TRY(check_same_device("v", *given_.v, "k", p_.device));
    FLASHMOE_TRY(check_same_dtype("v", *given_.v, "k", dtype));
    FLASHMOE_TRY(check_rows("v", view, 4, dtype_bytes(dtype)));
    FLASHMOE_TRY(check_extent("v", "batch", view.shape[0], "k", rows_of_batch_));
    FLASHMOE_TRY(check_extent("v", "sequence length", view.shape[seq_axis()], "k", p_.seq));
    FLASHMOE_TRY(check_extent("v", "number of heads", view.shape[head_axis()], "k", p_.heads_kv));
    p_.dim_v = view.shape[3];
    FLASHMOE_TRY(check_dim("v", p_.dim_v));
    set(view, dtype, &p_.v);
    return check_no_overlap("v", view, 4);
  }

  flashmoe_status read_cache(const char* name, const flashmoe_tensor* tensor, const char* of,
                             int64_t dim, View* view, RowsView<const void>* rows) {
    FLASHMOE_TRY(read_cache_rows(name, tensor, view, rows));
    FLASHMOE_TRY(check_extent(name, "number of heads", view->shape[head_axis()], "k", p_.heads_kv));
    return check_extent(name, "head dimension", view->shape[3], of, dim);
  }

  flashmoe_status read_caches() {
    View view;
    FLASHMOE_TRY(read_cache("k_cache", given_.k_cache, "k", p_.dim, &view, &p_.k_cache));
    p_.batch_cache = view.shape[0];
    p_.rows_cache = view.shape[seq_axis()];
    if (given_.v_cache == nullptr) return FLASHMOE_OK;
    FLASHMOE_TRY(read_cache("v_cache", given_.v_cache, "v", p_.dim_v, &view, &p_.v_cache));
    return check_value_cache(view);
  }

  flashmoe_status read_places() {
    FLASHMOE_TRY(read_offsets("cu_seqlens_k", given_.cu_seqlens_k, &p_.cu_seqlens_k));
    FLASHMOE_TRY(read_numbers("seqused_k", given_.seqused_k, &p_.seqused_k));
    FLASHMOE_TRY(read_numbers("k_begin", given_.k_begin, &p_.k_begin));
    FLASHMOE_TRY(read_numbers("batch_index", given_.batch_index, &p_.batch_index));
    if (given_.page_table != nullptr) return read_page_table(given_.page_table);
    if (given_.batch_index != nullptr) return FLASHMOE_OK;
    return check_extent("k_cache", "batch", p_.batch_cache,
                        given_.cu_seqlens_k != nullptr ? "cu_seqlens_k" : "k", p_.batch);
  }

  const Params& given_;
};

struct KvGather {
  using Params = flashmoe_kv_gather_params;
  using Problem = KvGatherProblem;
  static constexpr char kName[] = "kv_gather";
  static constexpr char kParams[] = "flashmoe_kv_gather_params";
  static constexpr char kSizeFunction[] = "flashmoe_kv_gather_workspace_size";
  static constexpr size_t kOldestParams = sizeof(Params);
  static constexpr std::array<TensorMember<Params>, 11> kTensors = {{
      {"k_cache", &Params::k_cache},
      {"v_cache", &Params::v_cache},
      {"k_scale", &Params::k_scale},
      {"v_scale", &Params::v_scale},
      {"cu_seqlens_k", &Params::cu_seqlens_k},
      {"seqused_k", &Params::seqused_k},
      {"k_begin", &Params::k_begin},
      {"batch_index", &Params::batch_index},
      {"page_table", &Params::page_table},
      {"k", &Params::k},
      {"v", &Params::v},
  }};
  static constexpr size_t kFirstOutput = 9;
  static constexpr size_t kGpuAlignment = 16;
  static constexpr const char* kKernelPrefix = "kv_gather_";
  static constexpr const KvGatherFamily* kFamilies[] = {
#if FLASHMOE_WITH_CUDA
      &kCudaKvGather,
#endif
      &kCpuKvGather,
  };

  static flashmoe_status make_problem(const Params& params, Problem* problem) {
    FLASHMOE_TRY(check_options(kOptions, params));
    FLASHMOE_TRY(check_together(params));
    FLASHMOE_TRY(Reader(params, problem).read());
    copy_kernel_name(params.kernel, &problem->kernel);
    return FLASHMOE_OK;
  }

  static double flops(const Problem&) { return 0; }  // rows move
  static bool is_empty(const Problem& p) { return p.batch == 0 || p.seq == 0 || p.heads_kv == 0; }

  static void print(const Params& params, const Problem& p, char* text, size_t size) {
    char options[64];
    print_options(kOptions, params, options, sizeof options);
    const auto name = [](const flashmoe_tensor* tensor, const char* is) {
      return tensor != nullptr ? is : "";
    };
    std::snprintf(text, size,
                  "sequences=%lld seq=%lld heads=%lld dim=%lld/%lld cache=%lldx%lld %s%s "
                  "by=%s%s%s%s%s%s",
                  static_cast<long long>(p.batch), static_cast<long long>(p.seq),
                  static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
                  static_cast<long long>(p.dim_v), static_cast<long long>(p.batch_cache),
                  static_cast<long long>(p.rows_cache),
                  p.k_cache.dtype != p.k.dtype ? "fp8_e4m3->" : "", dtype_name(p.k.dtype),
                  name(params.cu_seqlens_k, "cu_seqlens_k,"), name(params.seqused_k, "seqused_k,"),
                  name(params.k_begin, "k_begin,"), name(params.batch_index, "batch_index,"),
                  name(params.page_table, "page_table,"), options);
  }
};

}  // namespace
}  // namespace flashmoe

using flashmoe::KvGather;

flashmoe_status flashmoe_kv_gather_plan(const flashmoe_kv_gather_params* params,
                                        flashmoe_plan* plan) {
  return flashmoe::plan_operation<KvGather>(params, plan);
}

flashmoe_status flashmoe_kv_gather_workspace_size(const flashmoe_kv_gather_params* params,
                                                  size_t* bytes) {
  return flashmoe::workspace_size_of<KvGather>(params, bytes);
}

flashmoe_status flashmoe_kv_gather(const flashmoe_kv_gather_params* params, void* workspace,
                                   size_t workspace_size, void* stream) {
  return flashmoe::run_operation<KvGather>(params, workspace, workspace_size, stream);
}
