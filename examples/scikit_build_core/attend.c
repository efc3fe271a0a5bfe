/* Causal attention on contiguous [batch, seq, heads, dim] fp32 tensors of the host: what
 * attend/__init__.py calls. Returns NULL, or the sentence that says what is wrong. */
#include <stdlib.h>

#include "flashmoe/flashmoe.h"

__attribute__((visibility("default"))) const char* attend(float* q, float* k, float* v, float* out,
                                                          const int64_t* shape);

const char* attend(float* q, float* k, float* v, float* out, const int64_t* shape) {
  float* const data[4] = {q, k, v, out};
  flashmoe_tensor t[4];
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  flashmoe_status status;
  size_t bytes = 0;
  void* workspace = NULL;
  int i;
  memset(t, 0, sizeof t);
  for (i = 0; i < 4; ++i) {
    t[i].data = data[i];
    t[i].device.device_type = FLASHMOE_DEVICE_CPU;
    t[i].ndim = 4;
    t[i].dtype.code = FLASHMOE_DTYPE_FLOAT;
    t[i].dtype.bits = 32;
    t[i].dtype.lanes = 1;
    t[i].shape = shape;
  }
  params.q = &t[0];
  params.k = &t[1];
  params.v = &t[2];
  params.out = &t[3];
  params.causal = FLASHMOE_CAUSAL_BOTTOM_RIGHT;
  status = flashmoe_attention_forward_workspace_size(&params, &bytes);
  if (status != FLASHMOE_OK) return flashmoe_last_error();
  workspace = malloc(bytes + 1);
  if (workspace == NULL) return "workspace: out of memory";
  status = flashmoe_attention_forward(&params, workspace, bytes, NULL);
  free(workspace);
  return status == FLASHMOE_OK ? NULL : flashmoe_last_error();
}
