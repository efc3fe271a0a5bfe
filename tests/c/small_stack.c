/* A thread with a small stack, which is to have room for the library's thread-local storage and for
 * calls. */
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <unistd.h>

#include "check.h"
#include "flashmoe/flashmoe.h"

enum { kStackBytes = 64 << 10, kTokens = 3, kExperts = 4, kTopK = 2, kColumns = 16 };

static int64_t shape[] = {1, 5, 2, 8};
static float values[4][1 * 5 * 2 * 8];
static char workspace[4 << 20];

static flashmoe_tensor tensor(void* data, int32_t rank, int64_t* extents, flashmoe_dtype dtype) {
  const flashmoe_device cpu = {FLASHMOE_DEVICE_CPU, 0};
  flashmoe_tensor made;
  memset(&made, 0, sizeof made);
  made.data = data;
  made.device = cpu;
  made.ndim = rank;
  made.dtype = dtype;
  made.shape = extents;
  return made;
}

static void attend(void) {
  const flashmoe_dtype fp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  flashmoe_tensor tensors[4];
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  flashmoe_plan plan = flashmoe_plan_init();
  flashmoe_launch launches[FLASHMOE_MAX_LAUNCHES];
  int32_t launched = 0;
  size_t bytes = 0;
  int i;
  for (i = 0; i < 4; ++i) tensors[i] = tensor(values[i], 4, shape, fp32);
  for (i = 0; i < 80; ++i) values[2][i] = 3.0f; /* then so is every mean of values */
  params.q = &tensors[0];
  params.k = &tensors[1];
  params.v = &tensors[2];
  params.out = &tensors[3];
  CHECK(flashmoe_attention_forward_plan(&params, &plan) == FLASHMOE_OK);
  CHECK(flashmoe_attention_forward_workspace_size(&params, &bytes) == FLASHMOE_OK);
  CHECK(bytes <= sizeof workspace);
  CHECK(flashmoe_attention_forward(&params, workspace, sizeof workspace, NULL) == FLASHMOE_OK);
  for (i = 0; i < 80; ++i) CHECK(fabsf(values[3][i] - 3.0f) < 1e-5f);
  CHECK(flashmoe_last_launches(launches, &launched) == FLASHMOE_OK);
  CHECK(launched == 1 && memcmp(launches, plan.launches, sizeof launches[0]) == 0);
  params.k = NULL;
  CHECK(flashmoe_attention_forward(&params, NULL, 0, NULL) == FLASHMOE_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(flashmoe_last_error(), "k: ") == flashmoe_last_error());
}

static void multiply(void) {
  static float x[kTokens][kColumns], w[kExperts][kColumns][kColumns], out[kTokens][kColumns];
  static int32_t offsets[kExperts + 1] = {0, 1, 1, 2, 3};
  int64_t x_shape[] = {kTokens, kColumns};
  int64_t w_shape[] = {kExperts, kColumns, kColumns};
  int64_t offsets_shape[] = {kExperts + 1};
  const flashmoe_dtype fp32 = {FLASHMOE_DTYPE_FLOAT, 32, 1};
  const flashmoe_dtype int32 = {FLASHMOE_DTYPE_INT, 32, 1};
  flashmoe_tensor x_view = tensor(x, 2, x_shape, fp32);
  flashmoe_tensor w_view = tensor(w, 3, w_shape, fp32);
  flashmoe_tensor offsets_view = tensor(offsets, 1, offsets_shape, int32);
  flashmoe_tensor out_view = tensor(out, 2, x_shape, fp32);
  flashmoe_grouped_product_params params = flashmoe_grouped_product_params_init();
  int expert, row, column;
  for (row = 0; row < kTokens; ++row) {
    for (column = 0; column < kColumns; ++column) x[row][column] = 1.0f;
  }
  for (expert = 0; expert < kExperts; ++expert) {
    for (row = 0; row < kColumns; ++row) {
      for (column = 0; column < kColumns; ++column) w[expert][row][column] = 1.0f;
    }
  }
  params.x = &x_view;
  params.w = &w_view;
  params.offsets = &offsets_view;
  params.out = &out_view;
  CHECK(flashmoe_grouped_product(&params, workspace, sizeof workspace, NULL) == FLASHMOE_OK);
  for (row = 0; row < kTokens; ++row) {
    for (column = 0; column < kColumns; ++column) CHECK(out[row][column] == kColumns);
  }
}

static void* run(void* unused) {
  attend();
  multiply();
  return unused;
}

int main(void) {
  pthread_attr_t attributes;
  pthread_t thread;
  size_t least = (size_t)sysconf(_SC_THREAD_STACK_MIN);
  CHECK(pthread_attr_init(&attributes) == 0);
  CHECK(pthread_attr_setstacksize(&attributes, least > kStackBytes ? least : kStackBytes) == 0);
  CHECK(pthread_create(&thread, &attributes, run, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  return 0;
}
