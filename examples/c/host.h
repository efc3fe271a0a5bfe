/* What the C examples share: errors, memory, random numbers and views. */
#ifndef FLASHMOE_EXAMPLES_HOST_H
#define FLASHMOE_EXAMPLES_HOST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flashmoe/flashmoe.h"

/* Ends the program with the library's own sentence, which names the argument at fault. */
static inline void check(flashmoe_status status, const char* call) {
  if (status == FLASHMOE_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, flashmoe_status_name(status), flashmoe_last_error());
  exit(1);
}

static inline void* allocate(size_t bytes) {
  /* Rows must begin on 16-byte boundaries; malloc on 64-bit systems promises just that. */
  void* memory = malloc(bytes > 0 ? bytes : 1);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

/* The same pseudo-random numbers in [-scale, scale) on every machine. */
static inline float* allocate_random(size_t count, uint32_t seed, float scale) {
  float* values = allocate(count * sizeof(float));
  size_t i;
  for (i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
  }
  return values;
}

/* A contiguous view of numbers of 32 bits. The shape must outlive the view. */
static inline flashmoe_tensor view(void* data, flashmoe_dtype_code code, int32_t rank,
                                   const int64_t* shape) {
  flashmoe_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.device.device_type = FLASHMOE_DEVICE_CPU;
  tensor.ndim = rank;
  tensor.dtype.code = (uint8_t)code;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape; /* strides NULL: contiguous */
  return tensor;
}

/* The same of these extents, which last as long as the block that the view is made in. */
#define FLOATS(data, ...) VIEW(data, FLASHMOE_DTYPE_FLOAT, __VA_ARGS__)
#define INTEGERS(data, ...) VIEW(data, FLASHMOE_DTYPE_INT, __VA_ARGS__)
#define VIEW(data, code, ...)                                                     \
  view(data, code, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
       (int64_t[]){__VA_ARGS__})

#endif
