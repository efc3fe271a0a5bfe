/* A layer of experts through the C ABI, on the CPU.
 *
 *   out[t] = sum_k weight[t,k] * w_down[e] (silu(gate) * up),   e = ids[t,k]
 *   gate, up = the two halves of w_gate_up[e] x[t]
 *
 * Two calls: routing turns logits into experts, their weights and an order by expert; the layer
 * computes from that. They are held against plain loops in double precision; the program fails if
 * they differ. One call, where what is between is not wanted, gives the same bits. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashmoe/flashmoe.h"
#include "host.h"

enum { kTokens = 50, kExperts = 8, kTopK = 2, kHidden = 64, kInner = 32 };

/* The k-th greatest logit of a token, the lower expert first where two are equal. */
static int kth_expert(const float* logits, int k) {
  int expert, other;
  for (expert = 0; expert < kExperts; ++expert) {
    int before = 0;
    for (other = 0; other < kExperts; ++other) {
      before +=
          logits[other] > logits[expert] || (logits[other] == logits[expert] && other < expert);
    }
    if (before == k) break;
  }
  return expert;
}

static double dot(const float* a, const float* b, int count) {
  double sum = 0;
  int i;
  for (i = 0; i < count; ++i) sum += (double)a[i] * (double)b[i];
  return sum;
}

/* One token's output, by the definition: the two best experts, weighed by a softmax over both. */
static void reference_token(const float* x, const float* logits, const float* w_gate_up,
                            const float* w_down, double* result) {
  double sum = 0;
  int k, i, h;
  for (k = 0; k < kTopK; ++k) sum += exp((double)logits[kth_expert(logits, k)]);
  for (h = 0; h < kHidden; ++h) result[h] = 0;
  for (k = 0; k < kTopK; ++k) {
    const int e = kth_expert(logits, k);
    const double weight = exp((double)logits[e]) / sum;
    const float* gate_up = w_gate_up + (size_t)e * 2 * kInner * kHidden;
    const float* down = w_down + (size_t)e * kHidden * kInner;
    for (i = 0; i < kInner; ++i) {
      const double gate = dot(gate_up + i * kHidden, x, kHidden);
      const double up = dot(gate_up + (kInner + i) * kHidden, x, kHidden);
      const double a = gate / (1 + exp(-gate)) * up;
      for (h = 0; h < kHidden; ++h) result[h] += weight * a * (double)down[h * kInner + i];
    }
  }
}

int main(void) {
  const double tolerance = 1e-5;
  const int64_t logits_shape[2] = {kTokens, kExperts};
  const int64_t token_shape[2] = {kTokens, kHidden};
  const int64_t gate_up_shape[3] = {kExperts, 2 * kInner, kHidden};
  const int64_t down_shape[3] = {kExperts, kHidden, kInner};
  const int64_t chosen_shape[2] = {kTokens, kTopK};
  const int64_t offsets_shape[1] = {kExperts + 1};
  const int64_t pairs_shape[1] = {kTokens * kTopK};
  static int32_t ids[kTokens * kTopK], offsets[kExperts + 1];
  static int32_t pairs[kTokens * kTopK], slots[kTokens * kTopK];
  static float weights[kTokens * kTopK];
  float* logits = allocate_random(kTokens * kExperts, 1, 3.0f);
  float* x = allocate_random(kTokens * kHidden, 2, 1.0f);
  float* w_gate_up = allocate_random(kExperts * 2 * kInner * kHidden, 3, 0.2f);
  float* w_down = allocate_random(kExperts * kHidden * kInner, 4, 0.2f);
  float* out = allocate(kTokens * kHidden * sizeof(float));
  float* fused_out = allocate(kTokens * kHidden * sizeof(float));

  const flashmoe_tensor logits_view = view(logits, FLASHMOE_DTYPE_FLOAT, 2, logits_shape);
  const flashmoe_tensor x_view = view(x, FLASHMOE_DTYPE_FLOAT, 2, token_shape);
  const flashmoe_tensor gate_up_view = view(w_gate_up, FLASHMOE_DTYPE_FLOAT, 3, gate_up_shape);
  const flashmoe_tensor down_view = view(w_down, FLASHMOE_DTYPE_FLOAT, 3, down_shape);
  const flashmoe_tensor out_view = view(out, FLASHMOE_DTYPE_FLOAT, 2, token_shape);
  const flashmoe_tensor fused_out_view = view(fused_out, FLASHMOE_DTYPE_FLOAT, 2, token_shape);
  const flashmoe_tensor ids_view = view(ids, FLASHMOE_DTYPE_INT, 2, chosen_shape);
  const flashmoe_tensor weights_view = view(weights, FLASHMOE_DTYPE_FLOAT, 2, chosen_shape);
  const flashmoe_tensor offsets_view = view(offsets, FLASHMOE_DTYPE_INT, 1, offsets_shape);
  const flashmoe_tensor pairs_view = view(pairs, FLASHMOE_DTYPE_INT, 1, pairs_shape);
  const flashmoe_tensor slots_view = view(slots, FLASHMOE_DTYPE_INT, 2, chosen_shape);

  flashmoe_moe_route_params route = flashmoe_moe_route_params_init();
  flashmoe_moe_forward_params layer = flashmoe_moe_forward_params_init();
  flashmoe_fused_moe_params fused = flashmoe_fused_moe_params_init();
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t launched = 0;
  size_t route_size = 0, layer_size = 0, fused_size = 0, workspace_size;
  void* workspace;
  double largest = 0;
  int t, h, i;

  route.logits = &logits_view;
  route.ids = &ids_view;
  route.weights = &weights_view;
  route.offsets = &offsets_view;
  route.pairs = &pairs_view;
  route.slots = &slots_view;
  route.scoring = FLASHMOE_MOE_SOFTMAX;
  route.renormalize = 1; /* the weights of a token add up to 1, as Mixtral's and Qwen3's do */

  layer.x = &x_view;
  layer.w_gate_up = &gate_up_view;
  layer.w_down = &down_view;
  layer.weights = &weights_view; /* from here on what routing wrote */
  layer.offsets = &offsets_view;
  layer.pairs = &pairs_view;
  layer.slots = &slots_view;
  layer.out = &out_view;
  layer.gate = FLASHMOE_MOE_GATE_UP;
  layer.activation = FLASHMOE_ACTIVATION_SILU;

  check(flashmoe_moe_route_workspace_size(&route, &route_size), "route_workspace_size");
  check(flashmoe_moe_forward_workspace_size(&layer, &layer_size), "forward_workspace_size");
  workspace_size = route_size > layer_size ? route_size : layer_size; /* one serves both */
  workspace = allocate(workspace_size);
  check(flashmoe_moe_route(&route, workspace, workspace_size, NULL), "route");
  check(flashmoe_moe_forward(&layer, workspace, workspace_size, NULL), "forward");
  check(flashmoe_last_launches(launches, &launched), "last_launches");
  free(workspace);

  fused.tokens = &x_view;
  fused.logits =
      &logits_view; /* or router_weights, for logits that are their product with tokens */
  fused.w_gate_up = &gate_up_view;
  fused.w_down = &down_view;
  fused.out = &fused_out_view;
  fused.top_k = kTopK;
  fused.renormalize = 1;
  check(flashmoe_fused_moe_workspace_size(&fused, &fused_size), "fused_moe_workspace_size");
  workspace = allocate(fused_size);
  check(flashmoe_fused_moe(&fused, workspace, fused_size, NULL), "fused_moe");

  for (t = 0; t < kTokens; ++t) {
    double expected[kHidden];
    reference_token(x + t * kHidden, logits + t * kExperts, w_gate_up, w_down, expected);
    for (h = 0; h < kHidden; ++h) {
      largest = fmax(largest, fabs((double)out[t * kHidden + h] - expected[h]));
    }
  }
  printf("flashmoe %u: ", flashmoe_version());
  for (i = 0; i < launched; ++i) printf("%s, ", launches[i].kernel);
  printf("workspace %lu bytes, largest difference %.1e\n", (unsigned long)workspace_size, largest);
  if (memcmp(out, fused_out, kTokens * kHidden * sizeof(float)) != 0) {
    fprintf(stderr, "one call gives other bits than two\n");
    return 1;
  }
  free(workspace);
  free(fused_out);
  free(out);
  free(w_down);
  free(w_gate_up);
  free(x);
  free(logits);
  if (!(largest <= tolerance)) {
    fprintf(stderr, "the result is wrong: accepted are differences up to %.1e\n", tolerance);
    return 1;
  }
  return 0;
}
