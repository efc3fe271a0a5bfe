/* Causal grouped-query attention through the C ABI, on the CPU.
 *
 *   out[b,i,h,:] = sum_j softmax_j(q[b,i,h,:] . k[b,j,g,:] / sqrt(dim)) v[b,j,g,:],  g = h / group
 *
 * The steps are those of any call: describe the tensors, ask how large the workspace is, run. The
 * result is held against a plain loop in double precision; the program fails if they differ. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashmoe/flashmoe.h"
#include "host.h"

enum { kBatch = 2, kSeq = 96, kHeadsQ = 4, kHeadsKv = 2, kDim = 64 };

#define COUNT(heads) ((size_t)kBatch * kSeq * (heads) * kDim)

static size_t row(int64_t batch, int64_t position, int64_t head, int64_t heads) {
  return (size_t)(((batch * kSeq + position) * heads + head) * kDim);
}

/* One row of the result, by the definition. */
static void reference_row(const float* q, const float* k, const float* v, int64_t b, int64_t i,
                          int64_t h, double* result) {
  const int64_t g = h / (kHeadsQ / kHeadsKv);
  double weight[kSeq];
  double largest = -HUGE_VAL;
  double sum = 0;
  int64_t j, d;
  for (j = 0; j <= i; ++j) {
    weight[j] = 0;
    for (d = 0; d < kDim; ++d) {
      weight[j] += (double)q[row(b, i, h, kHeadsQ) + (size_t)d] *
                   (double)k[row(b, j, g, kHeadsKv) + (size_t)d];
    }
    weight[j] /= sqrt((double)kDim);
    if (weight[j] > largest) largest = weight[j];
  }
  for (j = 0; j <= i; ++j) {
    weight[j] = exp(weight[j] - largest);
    sum += weight[j];
  }
  for (d = 0; d < kDim; ++d) {
    result[d] = 0;
    for (j = 0; j <= i; ++j) {
      result[d] += weight[j] / sum * (double)v[row(b, j, g, kHeadsKv) + (size_t)d];
    }
  }
}

static double largest_difference(const float* q, const float* k, const float* v, const float* out) {
  double largest = 0;
  int64_t b, i, h, d;
  for (b = 0; b < kBatch; ++b) {
    for (i = 0; i < kSeq; ++i) {
      for (h = 0; h < kHeadsQ; ++h) {
        double expected[kDim];
        reference_row(q, k, v, b, i, h, expected);
        for (d = 0; d < kDim; ++d) {
          const double got = (double)out[row(b, i, h, kHeadsQ) + (size_t)d];
          largest = fmax(largest, fabs(got - expected[d]));
        }
      }
    }
  }
  return largest;
}

int main(void) {
  const double tolerance = 1e-5;
  const int64_t q_shape[4] = {kBatch, kSeq, kHeadsQ, kDim};
  const int64_t kv_shape[4] = {kBatch, kSeq, kHeadsKv, kDim};
  float* q = allocate_random(COUNT(kHeadsQ), 1, 1.0f);
  float* k = allocate_random(COUNT(kHeadsKv), 2, 1.0f);
  float* v = allocate_random(COUNT(kHeadsKv), 3, 1.0f);
  float* out = allocate(COUNT(kHeadsQ) * sizeof(float));
  const flashmoe_tensor q_view = view(q, FLASHMOE_DTYPE_FLOAT, 4, q_shape);
  const flashmoe_tensor k_view = view(k, FLASHMOE_DTYPE_FLOAT, 4, kv_shape);
  const flashmoe_tensor v_view = view(v, FLASHMOE_DTYPE_FLOAT, 4, kv_shape);
  const flashmoe_tensor out_view = view(out, FLASHMOE_DTYPE_FLOAT, 4, q_shape);
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t launched = 0;
  size_t workspace_size = 0;
  void* workspace;
  double difference;

  params.q = &q_view;
  params.k = &k_view;
  params.v = &v_view;
  params.out = &out_view;
  params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT; /* scale stays 0: 1 / sqrt(dim) */

  check(flashmoe_attention_forward_workspace_size(&params, &workspace_size), "workspace_size");
  workspace = allocate(workspace_size);
  check(flashmoe_attention_forward(&params, workspace, workspace_size, NULL), "forward");
  check(flashmoe_last_launches(launches, &launched), "last_launches");

  difference = largest_difference(q, k, v, out);
  printf("flashmoe %u: %s, workspace %lu bytes, largest difference %.1e\n", flashmoe_version(),
         launches[0].kernel, (unsigned long)workspace_size, difference);
  free(workspace);
  free(out);
  free(v);
  free(k);
  free(q);
  if (!(difference <= tolerance)) {
    fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n", tolerance);
    return 1;
  }
  return 0;
}
