// Which family serves calls of few rows on a model of an H200, beside what each took on one:
// kernels without device code, with the constants of their own traits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "check.h"
#include "core/backends.h"
#include "core/ops/attention/families.h"
#include "cuda/attention/sm89/entry.h"
#include "cuda/attention/sm89_few_rows/entry.h"
#include "cuda/attention/sm89_few_rows/traits.cuh"
#include "cuda/attention/sm90/entry.h"
#include "cuda/attention/sm90/traits.cuh"
#include "cuda/numeric/dtype.cuh"
#include "flashmoe/flashmoe.h"

// ---- kernels without code
// ------------------------------------------------------------------------

namespace flashmoe {
namespace {

struct Combine;

template <class Traits, class Which = void>
LoadedKernel loaded[kMaxDevices];

template <class Traits, class Which = void>
Kernel kernel_of(const char* name, int shared_bytes) {
  LoadedKernel* const own = loaded<Traits, Which>;
  return {name, own, shared_bytes, own};
}

template <class Traits>
AttentionKernel attention_kernel_of(const char* name) {
  return {kernel_of<Traits>(name, Traits::kSharedBytes),
          Dtype::kBFloat16,
          Traits::kDim,
          Traits::kDimV,
          Traits::kTileQ,
          Traits::kStepKeys,
          Traits::kStages,
          Traits::kThreads};
}

}  // namespace

static flashmoe_status no_cpu(const AttentionProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
const AttentionFamily kCpuAttention = {"cpu", FLASHMOE_DEVICE_CPU, no_cpu, nullptr};

// For sequences, which do not occur here.
static flashmoe_status no_sequences(const AttentionProblem&, Plan*, const Reason& reason) {
  return reason.refuse(FLASHMOE_ERROR_UNSUPPORTED, "not here");
}
const AttentionFamily kSm89DecodeAttention = {"sm89_decode", FLASHMOE_DEVICE_CUDA, no_sequences,
                                              nullptr};
const AttentionFamily kSm90MlaAttention = {"sm90_mla", FLASHMOE_DEVICE_CUDA, no_sequences, nullptr};
const AttentionFamily kMixedAttention = {"mixed", FLASHMOE_DEVICE_CUDA, no_sequences, nullptr};

namespace sm89_few_rows {

template <class Traits>
static Abilities abilities[kMaxDevices];

template <class Traits>
static Entry entry_of(const char* name) {
  return {kernel_of<Traits>(name, Traits::shared_bytes(kMaxWarps, kMaxCluster)),
          Dtype::kBFloat16,
          Traits::kDim,
          Traits::kDimV,
          Traits::kRows,
          Traits::kStepKeys,
          &Traits::shared_bytes,
          abilities<Traits>,
          Traits::kPartBytes,
          kernel_of<Traits, Combine>("attention_combine_sm89_few_rows", 0)};
}

#define FLASHMOE_FEW_ROWS(dim, rows)                                                         \
  extern const Entry entry_bf16_d##dim##_r##rows;                                            \
  const Entry entry_bf16_d##dim##_r##rows = entry_of<Traits<__nv_bfloat16, dim, dim, rows>>( \
      "attention_forward_sm89_few_rows_bf16_d" #dim "_dv" #dim "_r" #rows);
FLASHMOE_FEW_ROWS(64, 8)
FLASHMOE_FEW_ROWS(64, 16)
FLASHMOE_FEW_ROWS(64, 32)
FLASHMOE_FEW_ROWS(128, 8)
FLASHMOE_FEW_ROWS(128, 16)
#undef FLASHMOE_FEW_ROWS

}  // namespace sm89_few_rows

namespace sm89 {

template <int kDim>
struct Instance;

#define FLASHMOE_SM89(dim)                                                                  \
  extern const Entry entry_bf16_d##dim;                                                     \
  const Entry entry_bf16_d##dim = {                                                         \
      {kernel_of<Instance<dim>>("attention_forward_sm89_bf16_d" #dim "_dv" #dim, 32 << 10), \
       Dtype::kBFloat16, dim, dim, 128, 64, 2, 128},                                        \
      2,                                                                                    \
      false};
FLASHMOE_SM89(64)
FLASHMOE_SM89(128)
#undef FLASHMOE_SM89

}  // namespace sm89

namespace sm90 {

template <int kDim>
using Instance = Traits<__nv_bfloat16, kDim, kDim>;

#define FLASHMOE_SM90(dim)                                                                 \
  extern const Entry entry_bf16_d##dim;                                                    \
  const Entry entry_bf16_d##dim = {                                                        \
      attention_kernel_of<Instance<dim>>("attention_forward_sm90_bf16_d" #dim "_dv" #dim), \
      Instance<dim>::kCapped,                                                              \
      kRowsPerGroup,                                                                       \
      kBoxColumns,                                                                         \
      0,                                                                                   \
      0,                                                                                   \
      {},                                                                                  \
      Instance<dim>::kRagged,                                                              \
      false,                                                                               \
      Instance<dim>::kWindowKeys};
FLASHMOE_SM90(64)
FLASHMOE_SM90(128)
#undef FLASHMOE_SM90

template <int kDim>
using SplitInstance = Traits<__nv_bfloat16, kDim, kDim, SplitTuning<kDim, kDim>>;

#define FLASHMOE_SPLIT_KV(dim)                                                              \
  extern const Entry entry_split_kv_bf16_d##dim;                                            \
  const Entry entry_split_kv_bf16_d##dim = {                                                \
      attention_kernel_of<SplitInstance<dim>>("attention_forward_sm90_split_kv_bf16_d" #dim \
                                              "_dv" #dim),                                  \
      SplitInstance<dim>::kCapped,                                                          \
      kRowsPerGroup,                                                                        \
      kBoxColumns,                                                                          \
      SplitInstance<dim>::kConsumers,                                                       \
      SplitInstance<dim>::kPartBytes,                                                       \
      kernel_of<SplitInstance<dim>, Combine>("attention_combine_sm90_split_kv", 0),         \
      SplitInstance<dim>::kRagged,                                                          \
      false,                                                                                \
      SplitInstance<dim>::kWindowKeys};
FLASHMOE_SPLIT_KV(64)
FLASHMOE_SPLIT_KV(128)
#undef FLASHMOE_SPLIT_KV

}  // namespace sm90

// ---- tests
// ---------------------------------------------------------------------------------------

namespace {

// Microseconds by name, bf16, in a graph (benchmarks/results/attention_split_tuning_h200.json).
struct Measured {
  int64_t batch, queries, keys, heads_q, heads_kv, dim;
  double few_rows, split, sm90;
};

constexpr Measured kMeasured[] = {
    {1, 1, 2048, 32, 8, 128, 6.56, 8.18, 19.22},
    {1, 4, 2048, 32, 8, 128, 7.62, 8.12, 19.13},
    {1, 16, 2048, 32, 8, 128, 13.82, 9.75, 19.15},
    {1, 32, 2048, 32, 8, 128, 14.14, 11.57, 19.22},
    {1, 1, 8192, 32, 8, 128, 13.38, 14.61, 65.83},
    {1, 4, 8192, 32, 8, 128, 14.45, 15.02, 65.89},
    {1, 8, 8192, 32, 8, 128, 17.89, 14.4, 65.87},
    {1, 16, 8192, 32, 8, 128, 26.05, 16.39, 65.89},
    {1, 32, 8192, 32, 8, 128, 41.54, 18.43, 65.73},
    {1, 1, 32768, 32, 8, 128, 35.54, 37.35, 250.5},
    {1, 4, 32768, 32, 8, 128, 36.36, 37.99, 250.9},
    {1, 8, 32768, 32, 8, 128, 49.99, 37.62, 250.8},
    {1, 16, 32768, 32, 8, 128, 83.25, 39.33, 250.8},
    {1, 1, 65536, 32, 8, 128, 64.9, 67.45, 495.0},
    {1, 2, 65536, 32, 8, 128, 65.25, 67.24, 495.7},
    {1, 8, 65536, 32, 8, 128, 92.08, 68.23, 495.1},
    {1, 16, 512, 32, 8, 128, 6.63, 7.37, 7.84},
    {1, 32, 512, 32, 8, 128, 6.92, 8.5, 7.83},
    {1, 64, 512, 32, 8, 128, 8.8, 10.3, 8.0},
    {4, 1, 8192, 32, 8, 128, 35.31, 37.52, 66.79},
    {4, 4, 8192, 32, 8, 128, 35.81, 38.26, 67.08},
    {4, 16, 2048, 32, 8, 128, 24.59, 15.86, 20.89},
    {4, 16, 8192, 32, 8, 128, 82.25, 39.18, 66.97},
    {8, 1, 8192, 32, 8, 128, 63.46, 66.17, 129.8},
    {8, 16, 8192, 32, 8, 128, 158.3, 69.92, 130.2},
    {16, 1, 8192, 32, 8, 128, 122.95, 123.71, 255.6},
    {1, 1, 8192, 32, 8, 64, 8.5, 11.64, 53.13},
    {1, 16, 8192, 32, 8, 64, 13.46, 12.25, 53.42},
    {1, 64, 8192, 32, 8, 64, 29.4, 17.2, 53.1},
    {1, 16, 2048, 16, 16, 128, 10.85, 10.81, 19.25},
};

flashmoe_plan plan_of(const Measured& m, const char* family) {
  const int64_t q_shape[] = {m.batch, m.queries, m.heads_q, m.dim};
  const int64_t kv_shape[] = {m.batch, m.keys, m.heads_kv, m.dim};
  flashmoe_tensor tensors[4];
  for (int i = 0; i < 4; ++i) {
    tensors[i] = {reinterpret_cast<void*>((int64_t{1} << 40) + (int64_t{i} << 34)),
                  {FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_H200},
                  4,
                  {FLASHMOE_DTYPE_BFLOAT, 16, 1},
                  i == 0 || i == 3 ? q_shape : kv_shape,
                  nullptr,
                  0};
  }
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  params.q = &tensors[0];
  params.k = &tensors[1];
  params.v = &tensors[2];
  params.out = &tensors[3];
  params.kernel = family;
  flashmoe_plan plan = flashmoe_plan_init();
  CHECK(flashmoe_attention_forward_plan(&params, &plan) == FLASHMOE_OK);
  return plan;
}

void what_is_chosen_is_the_fastest() {
  constexpr double kTie = 1.02;
  for (const Measured& m : kMeasured) {
    const flashmoe_plan plan = plan_of(m, nullptr);
    const double least = std::min({m.few_rows, m.split, m.sm90});
    const bool splits_kv = std::strstr(plan.launches[0].kernel, "_split_kv_") != nullptr;
    const double took = std::strcmp(plan.family, "sm89_few_rows") == 0 ? m.few_rows
                        : splits_kv                                    ? m.split
                                                                       : m.sm90;
    std::printf(
        "%ld %ld/%ld %ldx%ld d%ld: %s takes %.1f of %.1f us; by estimate few rows %.1f, split KV "
        "%.1f, whole tiles %.1f, sm89 %.1f\n",
        static_cast<long>(m.batch), static_cast<long>(m.heads_q), static_cast<long>(m.heads_kv),
        static_cast<long>(m.queries), static_cast<long>(m.keys), static_cast<long>(m.dim),
        plan.family, took, least, plan_of(m, "sm89_few_rows").microseconds,
        plan_of(m, "sm90_split_kv").microseconds, plan_of(m, "sm90_whole_tiles").microseconds,
        plan_of(m, "sm89").microseconds);
    CHECK(std::strcmp(plan.family, "sm89") != 0 && took <= kTie * least);
  }
}

// Where the memory is what bounds it, the estimate of the few-row kernels is close.
void decoding_is_estimated_closely() {
  for (const Measured& m : kMeasured) {
    if (m.queries > 2 || m.batch * m.keys < 32768) continue;
    const double estimate = plan_of(m, "sm89_few_rows").microseconds;
    CHECK(std::abs(estimate / m.few_rows - 1) < 0.12);
  }
}

}  // namespace
}  // namespace flashmoe

int main() {
  flashmoe::what_is_chosen_is_the_fastest();
  flashmoe::decoding_is_estimated_closely();
  return 0;
}
