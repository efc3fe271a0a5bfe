// CUDA's names of the 16-bit element types. Templates are told apart by them.
//
// Kernels hold such numbers as bits, in words of two, and need only the names. The compiler takes
// longer to read cuda_fp16.h and cuda_bf16.h than all of our code, per source and architecture.
#pragma once

struct __half;
struct __nv_bfloat16;
