#include "core/ops/attention/sequences.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/status.h"

namespace flashmoe {
namespace {

flashmoe_status refuse_together(const char* name, const flashmoe_tensor* tensor, const char* other,
                                const flashmoe_tensor* other_tensor, const char* why) {
  if (tensor == nullptr || other_tensor == nullptr) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got one, accepted with %s is none: %s", name,
              other, why);
}

flashmoe_status check_bound(const char* name, int64_t bound, const char* zero) {
  if (bound >= 0) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "%s: got %lld, accepted is 0 (%s) or more", name,
              static_cast<long long>(bound), zero);
}

// Checks one int32 tensor.
flashmoe_status check_numbers(const char* name, const flashmoe_tensor* tensor, int rank,
                              const AttentionProblem& problem, View* view) {
  FLASHMOE_TRY(check_view(name, tensor, rank, view));
  FLASHMOE_TRY(check_same_device(name, *tensor, "q", problem.device));
  FLASHMOE_TRY(check_index_dtype(name, *tensor, nullptr));
  return check_alignment(name, *view, sizeof(int32_t));
}

flashmoe_status refuse_count(const char* name, int64_t got, const AttentionProblem& problem,
                             int64_t want) {
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: got %lld numbers, accepted are %lld, of %lld sequences", name,
              static_cast<long long>(got), static_cast<long long>(want),
              static_cast<long long>(problem.batch));
}

// Reads a table of one number per sequence and `more` after them.
flashmoe_status read_numbers(const char* name, const flashmoe_tensor* tensor, int64_t more,
                             const AttentionProblem& problem, Numbers* numbers) {
  if (tensor == nullptr) return FLASHMOE_OK;
  View view;
  FLASHMOE_TRY(check_numbers(name, tensor, 1, problem, &view));
  if (view.shape[0] != problem.batch + more) {
    return refuse_count(name, view.shape[0], problem, problem.batch + more);
  }
  *numbers = {view.data, view.strides[0]};
  return FLASHMOE_OK;
}

// Checks the first extent of q or k, whose sequences these offsets pack.
flashmoe_status check_packed(const char* name, int64_t got, const char* offsets) {
  if (got == 1) return FLASHMOE_OK;
  return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
              "%s: its batch is %lld, accepted with %s is 1: all sequences one behind the other",
              name, static_cast<long long>(got), offsets);
}

// cu_seqlens_q tells how many sequences there are; without it, q does.
flashmoe_status read_queries(const flashmoe_attention_sequences& given, const View& q,
                             AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  SequenceTables& tables = p.sequences;
  if (given.cu_seqlens_q != nullptr) {
    View view;
    FLASHMOE_TRY(check_numbers("cu_seqlens_q", given.cu_seqlens_q, 1, p, &view));
    FLASHMOE_TRY(check_packed("q", q.shape[0], "cu_seqlens_q"));
    if (view.shape[0] == 0) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "cu_seqlens_q: got 0 numbers, accepted is one more than there are sequences");
    }
    p.batch = view.shape[0] - 1;
    tables.cu_seqlens_q = {view.data, view.strides[0]};
  }
  return read_numbers("seqused_q", given.seqused_q, 0, p, &tables.seqused_q);
}

flashmoe_status read_page_table(const flashmoe_tensor* tensor, AttentionProblem* problem) {
  SequenceTables& tables = problem->sequences;
  View view;
  FLASHMOE_TRY(check_numbers("page_table", tensor, 2, *problem, &view));
  if (view.shape[0] != problem->batch) {
    return refuse_count("page_table", view.shape[0], *problem, problem->batch);
  }
  tables.paged = true;
  tables.page_table = {view.data, view.strides[0]};
  tables.page_step = view.strides[1];
  tables.page_count = view.shape[1];
  constexpr int64_t kMostKeys = INT64_MAX / 8;  // the most that a tensor may have
  if (__builtin_mul_overflow(tables.page_count, tables.rows_k, &problem->seq_k) ||
      problem->seq_k > kMostKeys) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "page_table: got %lld pages of a sequence, whose %lld keys each do not fit in 60 "
                "bits",
                static_cast<long long>(tables.page_count), static_cast<long long>(tables.rows_k));
  }
  return FLASHMOE_OK;
}

flashmoe_status read_keys(const flashmoe_attention_sequences& given, const View& k,
                          AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  SequenceTables& tables = p.sequences;
  FLASHMOE_TRY(read_numbers("seqused_k", given.seqused_k, 0, p, &tables.seqused_k));
  FLASHMOE_TRY(read_numbers("q_offset", given.q_offset, 0, p, &tables.q_offset));
  FLASHMOE_TRY(read_numbers("k_begin", given.k_begin, 0, p, &tables.k_begin));
  FLASHMOE_TRY(read_numbers("batch_index", given.batch_index, 0, p, &tables.batch_index));
  FLASHMOE_TRY(read_numbers("cu_seqlens_k", given.cu_seqlens_k, 1, p, &tables.cu_seqlens_k));
  if (given.page_table != nullptr) return read_page_table(given.page_table, problem);
  if (given.cu_seqlens_k != nullptr) return check_packed("k", k.shape[0], "cu_seqlens_k");
  if (given.batch_index != nullptr) return FLASHMOE_OK;
  return check_extent("k", "batch", k.shape[0],
                      given.cu_seqlens_q != nullptr ? "cu_seqlens_q" : "q", p.batch);
}

}  // namespace

flashmoe_attention_sequences known_sequences(const flashmoe_attention_sequences& given) {
  flashmoe_attention_sequences known = {};
  std::memcpy(&known, &given, std::min(given.struct_size, sizeof known));
  return known;
}

flashmoe_status check_sequences(const flashmoe_attention_sequences& given) {
  constexpr size_t kOldest = offsetof(flashmoe_attention_sequences, q_offset);
  FLASHMOE_TRY(
      check_struct_size("flashmoe_attention_sequences", given.struct_size, kOldest, sizeof given));
  constexpr char kRoom[] = "what the tensors have room for";
  FLASHMOE_TRY(check_bound("max_seqlen_q", given.max_seqlen_q, kRoom));
  FLASHMOE_TRY(check_bound("max_seqlen_k", given.max_seqlen_k, kRoom));
  FLASHMOE_TRY(check_bound("split_size", given.split_size, "as suits all lengths"));
  FLASHMOE_TRY(refuse_together("cu_seqlens_k", given.cu_seqlens_k, "page_table", given.page_table,
                               "a page table alone says where keys are"));
  FLASHMOE_TRY(refuse_together("batch_index", given.batch_index, "page_table", given.page_table,
                               "a page table alone says where keys are"));
  return refuse_together("batch_index", given.batch_index, "cu_seqlens_k", given.cu_seqlens_k,
                         "the keys of all sequences are in one row of the batch");
}

flashmoe_status read_sequences(const AttentionArguments& arguments, const View& q, const View& k,
                               AttentionProblem* problem) {
  const flashmoe_attention_sequences given = known_sequences(*arguments.sequences);
  AttentionProblem& p = *problem;
  SequenceTables& tables = p.sequences;
  tables.given = true;
  tables.rows_q = q.shape[arguments.seq_axis()];
  tables.batch_k = k.shape[0];
  tables.rows_k = k.shape[arguments.seq_axis()];
  tables.mask = arguments.mask();
  tables.split_size = given.split_size;
  tables.pair_keys = INT64_MAX;
  FLASHMOE_TRY(read_queries(given, q, problem));
  FLASHMOE_TRY(read_keys(given, k, problem));
  if (given.max_seqlen_q != 0) p.seq_q = std::min(p.seq_q, given.max_seqlen_q);
  if (given.max_seqlen_k != 0) p.seq_k = std::min(p.seq_k, given.max_seqlen_k);
  return FLASHMOE_OK;
}

int print_sequences(const AttentionProblem& p, char* text, size_t size) {
  const SequenceTables& t = p.sequences;
  const auto name = [](const Numbers& numbers, const char* is) {
    return numbers.data != nullptr ? is : "";
  };
  const AttentionMask& mask = t.mask;
  return std::snprintf(
      text, size,
      "sequences=%lld seq_q<=%lld seq_k<=%lld heads=%lld/%lld dim=%lld/%lld %s by=%s%s%s%s%s%s%s%s "
      "window=%s%lld..%s%lld split=%lld",
      static_cast<long long>(p.batch), static_cast<long long>(p.seq_q),
      static_cast<long long>(p.seq_k), static_cast<long long>(p.heads_q),
      static_cast<long long>(p.heads_kv), static_cast<long long>(p.dim),
      static_cast<long long>(p.dim_v), dtype_name(p.q.dtype), name(t.cu_seqlens_q, "cu_seqlens_q,"),
      name(t.cu_seqlens_k, "cu_seqlens_k,"), name(t.seqused_q, "seqused_q,"),
      name(t.seqused_k, "seqused_k,"), name(t.k_begin, "k_begin,"),
      name(t.batch_index, "batch_index,"), name(t.page_table, "page_table,"),
      name(t.q_offset, "q_offset,"), (mask.window & FLASHMOE_WINDOW_LEFT) != 0 ? "-" : "any-",
      static_cast<long long>(mask.window_left),
      (mask.window & FLASHMOE_WINDOW_RIGHT) != 0 ? "+" : "any+",
      static_cast<long long>(mask.window_right), static_cast<long long>(t.split_size));
}

}  // namespace flashmoe
