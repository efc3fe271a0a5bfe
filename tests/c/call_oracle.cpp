#include "call_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr Wide kMax63 = INT64_MAX;
constexpr Wide kMin63 = INT64_MIN;

// What can be said of one tensor without looking at the others.
struct Facts {
  bool readable = false;  // rank and shape are there and sane: the rest means something
  bool empty = false;
  int elem_bytes = 0;  // 0: unknown dtype
  int64_t shape[4] = {};
  int64_t strides[4] = {};
};

int element_bytes(const flashmoe_dtype& dtype, bool is_mask) {
  if (dtype.lanes != 1) return 0;
  if (is_mask) {
    const bool bytes = dtype.code == FLASHMOE_DTYPE_UINT || dtype.code == FLASHMOE_DTYPE_BOOL;
    return bytes && dtype.bits == 8 ? 1 : 0;
  }
  if (dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 64) return 8;
  if (dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 32) return 4;
  if (dtype.code == FLASHMOE_DTYPE_FLOAT && dtype.bits == 16) return 2;
  if (dtype.code == FLASHMOE_DTYPE_BFLOAT && dtype.bits == 16) return 2;
  if (dtype.code == FLASHMOE_DTYPE_FLOAT8_E4M3FN && dtype.bits == 8) return 1;
  return 0;
}

bool same_dtype(const flashmoe_dtype& a, const flashmoe_dtype& b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

Facts look(Judgement* judgement, const char* name, const flashmoe_tensor* tensor, int rank,
           bool is_mask = false) {
  Facts facts;
  if (tensor == nullptr || tensor->ndim != rank || (tensor->shape == nullptr && rank > 0)) {
    judgement->invalid(name);
    return facts;
  }
  facts.elem_bytes = element_bytes(tensor->dtype, is_mask);
  if (facts.elem_bytes == 0) judgement->invalid(name);
  switch (tensor->device.device_type) {
    case FLASHMOE_DEVICE_CPU:
    case FLASHMOE_DEVICE_CUDA_HOST:
    case FLASHMOE_DEVICE_CUDA: break;
    default: judgement->invalid(name);
  }

  Wide count = 1;  // an extent of 0 counts as 1: is the view itself representable?
  bool overflow = false;
  for (int axis = 0; axis < rank; ++axis) {
    const int64_t extent = tensor->shape[axis];
    if (extent < 0) {
      judgement->invalid(name);
      return facts;
    }
    facts.shape[axis] = extent;
    facts.empty = facts.empty || extent == 0;
    count = overflow ? count : count * (extent == 0 ? 1 : extent);
    overflow = overflow || count > kMax63;
  }
  const int bytes = facts.elem_bytes == 0 ? 1 : facts.elem_bytes;
  if (overflow || count * bytes > kMax63) {
    facts.empty ? judgement->either(name) : judgement->invalid(name);
    if (!facts.empty) return facts;
  } else if (count * 8 > kMax63) {
    judgement->either(name);  // 8 bytes an element is a margin the library may take
  }

  uint64_t packed = 1;  // unsigned: of an empty view with huge extents it may wrap, and not matter
  for (int axis = rank - 1; axis >= 0; --axis) {
    facts.strides[axis] =
        tensor->strides != nullptr ? tensor->strides[axis] : static_cast<int64_t>(packed);
    packed *= static_cast<uint64_t>(facts.shape[axis]);
  }
  facts.readable = true;
  if (facts.empty) {
    if (tensor->byte_offset != 0) judgement->either(name);
    return facts;
  }

  Wide low = 0;
  Wide high = 0;
  for (int axis = 0; axis < rank; ++axis) {
    const Wide reach = static_cast<Wide>(facts.shape[axis] - 1) * facts.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  if (low < kMin63 / bytes || high > kMax63 / bytes) {  // the products may not fit Wide
    judgement->invalid(name);
  } else if (low < kMin63 / 8 || high > kMax63 / 8) {
    judgement->either(name);
  }
  const Wide address =
      static_cast<Wide>(reinterpret_cast<uintptr_t>(tensor->data)) + tensor->byte_offset;
  if (tensor->data == nullptr || address > UINTPTR_MAX) judgement->invalid(name);
  const Wide kBound = Wide{UINTPTR_MAX} / bytes;
  if (low < -kBound || high > kBound || address + low * bytes < 0 ||
      address + (high + 1) * bytes - 1 > UINTPTR_MAX) {
    judgement->outsiders.insert(name);
  }
  return facts;
}

uintptr_t address_of(const flashmoe_tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) + static_cast<uintptr_t>(tensor.byte_offset);
}

// "The last stride is 1 and every row begins on a 16-byte boundary."
void judge_rows(Judgement* judgement, const char* name, const flashmoe_tensor& tensor,
                const Facts& facts) {
  if (facts.elem_bytes == 0) return;
  bool broken = address_of(tensor) % 16 != 0;
  broken = broken || (facts.shape[3] > 1 && facts.strides[3] != 1);
  for (int axis = 0; axis < 3; ++axis) {
    broken = broken || (facts.shape[axis] > 1 &&
                        static_cast<Wide>(facts.strides[axis]) * facts.elem_bytes % 16 != 0);
  }
  if (broken) facts.empty ? judgement->either(name) : judgement->invalid(name);
}

// "Its elements must not overlap one another."
void judge_distinct(Judgement* judgement, const char* name, const Facts& facts, int rank) {
  if (facts.empty) return;
  std::vector<std::pair<Wide, int64_t>> axes;  // |stride|, extent
  bool zero_stride = false;
  Wide count = 1;
  for (int axis = 0; axis < rank; ++axis) {
    if (facts.shape[axis] == 1) continue;
    const Wide stride = facts.strides[axis];
    axes.emplace_back(stride < 0 ? -stride : stride, facts.shape[axis]);
    zero_stride = zero_stride || stride == 0;
    count *= facts.shape[axis];
  }
  std::sort(axes.begin(), axes.end());
  Wide reach = 0;
  bool nested = true;
  for (const auto& [stride, extent] : axes) {
    nested = nested && stride > reach;
    reach += stride * (extent - 1);
  }
  if (nested) return;
  if (zero_stride) return judgement->invalid(name);
  constexpr Wide kEnumerable = 1 << 16;
  if (count > kEnumerable) return judgement->either(name);

  std::vector<Wide> offsets = {0};
  for (const auto& [stride, extent] : axes) {
    const size_t before = offsets.size();
    for (int64_t i = 1; i < extent; ++i) {
      for (size_t j = 0; j < before; ++j) offsets.push_back(offsets[j] + stride * i);
    }
  }
  std::sort(offsets.begin(), offsets.end());
  const bool overlap = std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end();
  // Interleaved but distinct elements: no view that a tensor library makes; may be refused.
  overlap ? judgement->invalid(name) : judgement->either(name);
}

bool is_cuda(const flashmoe_tensor* tensor) {
  return tensor->device.device_type == FLASHMOE_DEVICE_CUDA;
}

// Pinned host memory and pageable memory are one device.
bool same_device(const flashmoe_tensor* a, const flashmoe_tensor* b) {
  return is_cuda(a) == is_cuda(b) && (!is_cuda(a) || a->device.device_id == b->device.device_id);
}

// One argument under its name.
struct Subject {
  const char* name;
  const flashmoe_tensor* tensor;
  Facts facts;
};

// What head dimensions may be at most: that of calls with gradients, of q and k, and of v.
constexpr int64_t kMostOfGradients = 256, kMostDim = 576, kMostDimV = 512;

// q, k, v and out: rank 4, aligned rows, a head dimension that kernels have.
Subject look_at_rows(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                     int64_t most_dim) {
  const Subject subject = {name, tensor, look(judgement, name, tensor, 4)};
  if (!subject.facts.readable) return subject;
  judge_rows(judgement, name, *tensor, subject.facts);
  const int64_t dim = subject.facts.shape[3];
  if (dim < 8 || dim > most_dim || dim % 8 != 0) judgement->invalid(name);
  return subject;
}

// The lowest address of a tensor that is not empty and one past its highest.
struct Bytes {
  Wide begin;
  Wide end;
};

Bytes bytes_of(const Subject& subject, int rank) {
  const Wide first = static_cast<Wide>(address_of(*subject.tensor));
  Bytes bytes = {first, first + subject.facts.elem_bytes};
  for (int axis = 0; axis < rank; ++axis) {
    const Wide reach = static_cast<Wide>(subject.facts.shape[axis] - 1) *
                       subject.facts.strides[axis] * subject.facts.elem_bytes;
    (reach < 0 ? bytes.begin : bytes.end) += reach;
  }
  return bytes;
}

// The addresses of all elements in order, or none where there are too many to tell.
std::vector<Wide> elements_of(const Subject& subject, int rank) {
  constexpr Wide kEnumerable = 1 << 16;
  std::vector<Wide> elements = {static_cast<Wide>(address_of(*subject.tensor))};
  for (int axis = 0; axis < rank; ++axis) {
    const size_t before = elements.size();
    if (static_cast<Wide>(before) * subject.facts.shape[axis] > kEnumerable) return {};
    const Wide step = static_cast<Wide>(subject.facts.strides[axis]) * subject.facts.elem_bytes;
    for (int64_t i = 1; i < subject.facts.shape[axis]; ++i) {
      for (size_t j = 0; j < before; ++j) elements.push_back(elements[j] + step * i);
    }
  }
  std::sort(elements.begin(), elements.end());
  return elements;
}

// "An output shares no byte with another tensor of the call"; what interleaves may be refused.
void keep_apart(Judgement* judgement, const Subject& a, int rank_a, const Subject& b, int rank_b) {
  for (const Subject* subject : {&a, &b}) {
    if (!subject->facts.readable || subject->facts.empty || subject->facts.elem_bytes == 0) return;
  }
  const Bytes of_a = bytes_of(a, rank_a);
  const Bytes of_b = bytes_of(b, rank_b);
  if (of_a.end <= of_b.begin || of_b.end <= of_a.begin) return;
  const std::vector<Wide> elements = elements_of(a, rank_a);
  bool share = false;
  for (const Wide element : elements_of(b, rank_b)) {
    const auto next =
        std::lower_bound(elements.begin(), elements.end(), element + b.facts.elem_bytes);
    share = share || (next != elements.begin() && *(next - 1) + a.facts.elem_bytes > element);
  }
  judgement->sharers.insert({a.name, b.name});
  if (share) {
    judgement->memory = Verdict::kInvalid;
  } else if (judgement->memory == Verdict::kValid) {
    judgement->memory = Verdict::kEither;
  }
}

void disagree(Judgement* judgement, const Subject& a, const Subject& b) {
  judgement->invalid(a.name);
  judgement->invalid(b.name);
}

void agree_on_device(Judgement* judgement, const Subject& a, const Subject& b) {
  if (a.tensor == nullptr || b.tensor == nullptr) return;
  if (!same_device(a.tensor, b.tensor)) disagree(judgement, a, b);
}

void agree_on_extent(Judgement* judgement, const Subject& a, int axis_a, const Subject& b,
                     int axis_b) {
  if (!a.facts.readable || !b.facts.readable) return;
  if (a.facts.shape[axis_a] != b.facts.shape[axis_b]) disagree(judgement, a, b);
}

}  // namespace

bool known_struct_size(size_t size) {
  constexpr size_t kVersion01 = offsetof(flashmoe_attention_forward_params, kernel) + sizeof(char*);
  return size >= kVersion01 && size <= sizeof(flashmoe_attention_forward_params);
}

flashmoe_attention_forward_params as_given(const flashmoe_attention_forward_params& params) {
  flashmoe_attention_forward_params result;
  std::memset(&result, 0, sizeof result);
  std::memcpy(&result, &params, params.struct_size);
  return result;
}

namespace {

// The options that both directions have.
template <class Params>
void judge_options(Judgement* judgement, const Params& params) {
  if (params.layout != FLASHMOE_LAYOUT_BSHD && params.layout != FLASHMOE_LAYOUT_BHSD) {
    judgement->invalid("layout");
  }
  if (params.causal < 0 || params.causal > 2) judgement->invalid("causal");
  if (std::isnan(params.scale) || std::isinf(params.scale) || params.scale < 0) {
    judgement->invalid("scale");
  }
  if (std::isnan(params.softcap) || std::isinf(params.softcap) || params.softcap < 0) {
    judgement->invalid("softcap");
  }
  if (params.window > 3) judgement->invalid("window");
  const bool left = params.window == 1 || params.window == 3;
  const bool right = params.window == 2 || params.window == 3;
  if (params.window_left < 0 || (!left && params.window_left > 0)) {
    judgement->invalid("window_left");
  }
  if (params.window_right < 0 ||
      ((!right || params.causal != FLASHMOE_CAUSAL_NONE) && params.window_right > 0)) {
    judgement->invalid("window_right");
  }
  if (params.kernel != nullptr && *params.kernel != '\0' &&
      std::strcmp(params.kernel, "cpu") != 0) {
    judgement->invalid("kernel");
  }
}

// The tensors of rows that both directions have, and how they agree.
struct Rows {
  Subject q, k, v, out;
  int seq;
  int heads;
};

// "Same dtype as q, or fp8 (e4m3)", and v as k; beside a q of fp64 there is none.
void judge_key_dtypes(Judgement* judgement, const Subject& q, const Subject& k, const Subject& v,
                      bool may_be_fp8) {
  if (q.tensor == nullptr) return;
  for (const Subject& each : {k, v}) {
    if (each.tensor == nullptr || same_dtype(each.tensor->dtype, q.tensor->dtype)) continue;
    if (!may_be_fp8 || each.facts.elem_bytes != 1 || q.facts.elem_bytes == 8) {
      disagree(judgement, each, q);
    }
  }
  if (k.tensor != nullptr && v.tensor != nullptr && !same_dtype(k.tensor->dtype, v.tensor->dtype)) {
    disagree(judgement, v, k);
  }
}

template <class Params>
Rows judge_rows_of_all(Judgement* judgement, const Params& params, bool is_forward) {
  const int seq = params.layout == FLASHMOE_LAYOUT_BHSD ? 2 : 1;
  const int heads = 3 - seq;
  const int64_t most_dim = is_forward ? kMostDim : kMostOfGradients;
  const int64_t most_dim_v = is_forward ? kMostDimV : kMostOfGradients;
  const Subject q = look_at_rows(judgement, "q", params.q, most_dim);
  const Subject k = look_at_rows(judgement, "k", params.k, most_dim);
  const Subject v = look_at_rows(judgement, "v", params.v, most_dim_v);
  const Subject out = look_at_rows(judgement, "out", params.out, most_dim_v);
  for (const Subject& other : {k, v, out}) {
    agree_on_device(judgement, other, q);
    agree_on_extent(judgement, other, 0, q, 0);
  }
  if (q.facts.elem_bytes == 1) judgement->invalid("q");
  if (out.tensor != nullptr && q.tensor != nullptr &&
      !same_dtype(out.tensor->dtype, q.tensor->dtype)) {
    disagree(judgement, out, q);
  }
  judge_key_dtypes(judgement, q, k, v, is_forward);
  // Where keys are not as q is, a batch that differs may be said to be k's.
  if (is_forward && v.facts.readable && k.facts.readable && v.facts.shape[0] != k.facts.shape[0]) {
    disagree(judgement, v, k);
  }
  agree_on_extent(judgement, v, seq, k, seq);
  agree_on_extent(judgement, v, heads, k, heads);
  agree_on_extent(judgement, k, 3, q, 3);
  agree_on_extent(judgement, out, seq, q, seq);
  agree_on_extent(judgement, out, heads, q, heads);
  agree_on_extent(judgement, out, 3, v, 3);
  if (q.facts.readable && q.facts.shape[heads] == 0) judgement->invalid("q");
  if (q.facts.readable && k.facts.readable &&
      (k.facts.shape[heads] == 0 || q.facts.shape[heads] % k.facts.shape[heads] != 0)) {
    disagree(judgement, k, q);
  }
  // A machine without a GPU has no family for CUDA tensors, however well they agree.
  if (q.tensor != nullptr && is_cuda(q.tensor)) {
    for (const char* name : {"cpu", "sm89", "sm90", "sm89_few_rows", "sm89_decode", "sm90_mla",
                             "mixed", "q", "kernel"}) {
      judgement->invalid(name);
    }
  }
  return {q, k, v, out, seq, heads};
}

// "[batch, heads_q, seq_q], fp32, with a q of fp64 fp64".
Subject judge_numbers(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                      const Rows& rows) {
  const Subject subject = {name, tensor, look(judgement, name, tensor, 3)};
  if (tensor == nullptr) return subject;
  const bool wide = rows.q.facts.elem_bytes == 8;
  if (!same_dtype(tensor->dtype, {FLASHMOE_DTYPE_FLOAT, static_cast<uint8_t>(wide ? 64 : 32), 1})) {
    judgement->invalid(name);
  }
  agree_on_device(judgement, subject, rows.q);
  agree_on_extent(judgement, subject, 0, rows.q, 0);
  agree_on_extent(judgement, subject, 1, rows.q, rows.heads);
  agree_on_extent(judgement, subject, 2, rows.q, rows.seq);
  if (subject.facts.readable && address_of(*tensor) % (wide ? 8 : 4) != 0) {
    subject.facts.empty ? judgement->either(name) : judgement->invalid(name);
  }
  return subject;
}

// "[heads_q], fp32 or the dtype of `of`, any stride".
Subject judge_heads(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                    const Subject& of, const Rows& rows) {
  const Subject subject = {name, tensor, look(judgement, name, tensor, 1)};
  if (tensor == nullptr) return subject;
  if (!same_dtype(tensor->dtype, {FLASHMOE_DTYPE_FLOAT, 32, 1}) && of.tensor != nullptr &&
      !same_dtype(tensor->dtype, of.tensor->dtype)) {
    disagree(judgement, subject, of);
  }
  agree_on_device(judgement, subject, rows.q);
  agree_on_extent(judgement, subject, 0, rows.q, rows.heads);
  if (subject.facts.readable && subject.facts.elem_bytes != 0 &&
      address_of(*tensor) % static_cast<uintptr_t>(subject.facts.elem_bytes) != 0) {
    subject.facts.empty ? judgement->either(name) : judgement->invalid(name);
  }
  return subject;
}

// "[] or [1], [heads_kv], [batch of k or 1, heads_kv or 1]", fp32, beside a q that is not fp64.
void judge_scale(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                 const Rows& rows) {
  if (tensor == nullptr) return;
  const int rank = std::clamp<int>(tensor->ndim, 0, 2);
  const Subject subject = {name, tensor, look(judgement, name, tensor, rank)};
  if (!same_dtype(tensor->dtype, {FLASHMOE_DTYPE_FLOAT, 32, 1})) judgement->invalid(name);
  agree_on_device(judgement, subject, rows.q);
  if (rows.q.facts.elem_bytes == 8) judgement->invalid(name);
  // A call of this fuzz that has one is not checked for its result (fuzz_sequences does that).
  judgement->either(name);
  if (!subject.facts.readable || !rows.k.facts.readable) return;
  if (address_of(*tensor) % 4 != 0) judgement->invalid(name);
  const int64_t heads = rank >= 1 ? subject.facts.shape[rank - 1] : 1;
  const int64_t batch = rank == 2 ? subject.facts.shape[0] : 1;
  if ((heads != 1 && heads != rows.k.facts.shape[rows.heads]) ||
      (batch != 1 && batch != rows.k.facts.shape[0])) {
    disagree(judgement, subject, rows.k);
  }
}

// "[batch, heads_q, seq_q, seq_k]", of which any may be 1: a mask of bytes, or a bias of fp32 or
// q's dtype; any strides.
Subject judge_pairs(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                    const Rows& rows, bool is_mask) {
  const Subject subject = {name, tensor, look(judgement, name, tensor, 4, is_mask)};
  if (tensor == nullptr) return subject;
  if (!is_mask && !same_dtype(tensor->dtype, {FLASHMOE_DTYPE_FLOAT, 32, 1}) &&
      rows.q.tensor != nullptr && !same_dtype(tensor->dtype, rows.q.tensor->dtype)) {
    disagree(judgement, subject, rows.q);
  }
  agree_on_device(judgement, subject, rows.q);
  if (!subject.facts.readable) return subject;
  const std::pair<const Subject&, int> like[] = {
      {rows.q, 0}, {rows.q, rows.heads}, {rows.q, rows.seq}, {rows.k, rows.seq}};
  for (int axis = 0; axis < 4; ++axis) {
    if (subject.facts.shape[axis] == 1) continue;
    agree_on_extent(judgement, subject, axis, like[axis].first, like[axis].second);
  }
  if (subject.facts.elem_bytes != 0 &&
      address_of(*tensor) % static_cast<uintptr_t>(subject.facts.elem_bytes) != 0) {
    subject.facts.empty ? judgement->either(name) : judgement->invalid(name);
  }
  return subject;
}

// A tensor of rows that has the shape of another, and its dtype or, perhaps, fp32.
Subject judge_rows_like(Judgement* judgement, const char* name, const flashmoe_tensor* tensor,
                        const Subject& like, const Subject& q, bool or_fp32) {
  const Subject subject = look_at_rows(judgement, name, tensor, kMostOfGradients);
  agree_on_device(judgement, subject, q);
  for (int axis = 0; axis < 4; ++axis) agree_on_extent(judgement, subject, axis, like, axis);
  if (tensor == nullptr || q.tensor == nullptr) return subject;
  const bool fp32 = or_fp32 && same_dtype(tensor->dtype, {FLASHMOE_DTYPE_FLOAT, 32, 1});
  if (!fp32 && !same_dtype(tensor->dtype, q.tensor->dtype)) disagree(judgement, subject, q);
  return subject;
}

}  // namespace

Judgement judge(const flashmoe_attention_forward_params* given) {
  Judgement judgement;
  if (given == nullptr) {
    judgement.invalid("params");
    return judgement;
  }
  if (!known_struct_size(given->struct_size)) {
    judgement.invalid("flashmoe_attention_forward_params.struct_size");
    return judgement;
  }
  const flashmoe_attention_forward_params params = as_given(*given);
  judge_options(&judgement, params);
  if (params.reserved != 0) judgement.invalid("reserved");
  if (params.q_scale != nullptr) judgement.invalid("q_scale");
  if (params.sequences != nullptr && params.sequences->struct_size != sizeof *params.sequences) {
    judgement.invalid("flashmoe_attention_sequences.struct_size");
  }

  const Rows rows = judge_rows_of_all(&judgement, params, true);
  judge_scale(&judgement, "k_scale", params.k_scale, rows);
  judge_scale(&judgement, "v_scale", params.v_scale, rows);
  if (rows.out.facts.readable) judge_distinct(&judgement, "out", rows.out.facts, 4);
  for (const Subject& input : {rows.q, rows.k, rows.v}) {
    keep_apart(&judgement, rows.out, 4, input, 4);
  }

  Subject sinks = {"sinks", nullptr, {}};
  if (params.sinks != nullptr) {
    sinks = judge_heads(&judgement, "sinks", params.sinks, rows.q, rows);
    keep_apart(&judgement, rows.out, 4, sinks, 1);
  }
  std::vector<Subject> pairs;
  if (params.attn_bias != nullptr) {
    pairs.push_back(judge_pairs(&judgement, "attn_bias", params.attn_bias, rows, false));
  }
  if (params.attn_mask != nullptr) {
    pairs.push_back(judge_pairs(&judgement, "attn_mask", params.attn_mask, rows, true));
  }
  for (const Subject& each : pairs) keep_apart(&judgement, rows.out, 4, each, 4);

  if (params.lse == nullptr) return judgement;
  const Subject lse = judge_numbers(&judgement, "lse", params.lse, rows);
  if (!lse.facts.readable) return judgement;
  judge_distinct(&judgement, "lse", lse.facts, 3);
  for (const Subject& other : {rows.q, rows.k, rows.v, rows.out}) {
    keep_apart(&judgement, lse, 3, other, 4);
  }
  keep_apart(&judgement, lse, 3, sinks, 1);
  for (const Subject& each : pairs) keep_apart(&judgement, lse, 3, each, 4);
  return judgement;
}

Judgement judge(const flashmoe_attention_backward_params* params) {
  Judgement judgement;
  if (params == nullptr) {
    judgement.invalid("params");
    return judgement;
  }
  constexpr size_t kOldest = offsetof(flashmoe_attention_backward_params, sequences);
  if (params->struct_size < kOldest || params->struct_size > sizeof *params) {
    judgement.invalid("flashmoe_attention_backward_params.struct_size");
    return judgement;
  }
  flashmoe_attention_backward_params known;  // what the caller's struct has of it
  std::memset(&known, 0, sizeof known);
  std::memcpy(&known, params, params->struct_size);
  const flashmoe_attention_sequences* const sequences = known.sequences;
  if (sequences != nullptr && sequences->struct_size != sizeof *sequences) {
    judgement.invalid("flashmoe_attention_sequences.struct_size");
  }
  judge_options(&judgement, *params);
  if (params->accumulate != 0 && params->accumulate != 1) judgement.invalid("accumulate");

  const Rows rows = judge_rows_of_all(&judgement, *params, false);
  std::vector<std::pair<Subject, int>> others = {
      {rows.q, 4}, {rows.k, 4}, {rows.v, 4}, {rows.out, 4}};
  others.emplace_back(judge_rows_like(&judgement, "dout", params->dout, rows.out, rows.q, false),
                      4);
  others.emplace_back(judge_numbers(&judgement, "lse", params->lse, rows), 3);
  if (params->dlse != nullptr) {
    others.emplace_back(judge_numbers(&judgement, "dlse", params->dlse, rows), 3);
  }
  Subject sinks = {"sinks", nullptr, {}};
  if (params->sinks != nullptr) {
    sinks = judge_heads(&judgement, "sinks", params->sinks, rows.q, rows);
    others.emplace_back(sinks, 1);
  }
  if (known.attn_bias != nullptr) {
    others.emplace_back(judge_pairs(&judgement, "attn_bias", known.attn_bias, rows, false), 4);
  }
  if (known.attn_mask != nullptr) {
    others.emplace_back(judge_pairs(&judgement, "attn_mask", known.attn_mask, rows, true), 4);
  }
  const struct {
    const char* name;
    const flashmoe_tensor* tensor;
    const Subject& of;
  } gradients[] = {
      {"dq", params->dq, rows.q}, {"dk", params->dk, rows.k}, {"dv", params->dv, rows.v}};
  bool wanted = false;
  for (const auto& gradient : gradients) {
    if (gradient.tensor == nullptr) continue;
    wanted = true;
    const Subject subject =
        judge_rows_like(&judgement, gradient.name, gradient.tensor, gradient.of, rows.q, true);
    if (subject.facts.readable) judge_distinct(&judgement, gradient.name, subject.facts, 4);
    for (const auto& [other, rank] : others) keep_apart(&judgement, subject, 4, other, rank);
    others.emplace_back(subject, 4);
  }
  if (params->dsinks != nullptr) {
    wanted = true;
    if (params->sinks == nullptr) judgement.invalid("dsinks");
    const Subject subject = judge_heads(&judgement, "dsinks", params->dsinks, sinks, rows);
    if (subject.facts.readable) judge_distinct(&judgement, "dsinks", subject.facts, 1);
    for (const auto& [other, rank] : others) keep_apart(&judgement, subject, 1, other, rank);
  }
  if (!wanted) judgement.invalid("dq");
  return judgement;
}

bool blames(const std::set<std::string>& arguments, const std::string& sentence) {
  return std::any_of(arguments.begin(), arguments.end(),
                     [&](const std::string& name) { return sentence.rfind(name + ":", 0) == 0; });
}
