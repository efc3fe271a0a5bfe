// CUDA's names of the 16-bit element types, by which templates are told apart.
//
// Kernels hold such numbers as bits, in words of two, and need no more than the names: what
// cuda_fp16.h and cuda_bf16.h define takes the compiler longer to read, in each source and for each
// architecture, than all of ours.
#pragma once

struct __half;
struct __nv_bfloat16;
