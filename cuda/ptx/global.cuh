// Loads of 16 bytes of global memory, and words by which blocks tell each other how far they are.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// What is read once by a multiprocessor: it passes the L1 by, and the L2 fetches 128 bytes at a
// time. sm_80 and newer.
__device__ __forceinline__ void load_streaming(uint32_t (&chunk)[4], const void* address) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk[0]), "=r"(chunk[1]), "=r"(chunk[2]), "=r"(chunk[3])
               : "l"(address));
}

// Zeros, and no access, where not `valid`.
__device__ __forceinline__ void load_streaming_or_zero(uint32_t (&chunk)[4], const void* address,
                                                       bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(chunk[0]), "=&r"(chunk[1]), "=&r"(chunk[2]), "=&r"(chunk[3])
      : "l"(address), "r"(static_cast<uint32_t>(valid)));
}

// The same of 8 bytes.
__device__ __forceinline__ void load_streaming(uint32_t (&chunk)[2], const void* address) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
               : "=r"(chunk[0]), "=r"(chunk[1])
               : "l"(address));
}
__device__ __forceinline__ void load_streaming_or_zero(uint32_t (&chunk)[2], const void* address,
                                                       bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@valid ld.global.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];\n"
      "}\n"
      : "=&r"(chunk[0]), "=&r"(chunk[1])
      : "l"(address), "r"(static_cast<uint32_t>(valid)));
}

// The same of what other warps read too.
__device__ __forceinline__ void load_or_zero(uint32_t (&chunk)[4], const void* address,
                                             bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(chunk[0]), "=&r"(chunk[1]), "=&r"(chunk[2]), "=&r"(chunk[3])
      : "l"(address), "r"(static_cast<uint32_t>(valid)));
}

// 16 bytes, each word of which other blocks may be writing. sm_70 and newer.
__device__ __forceinline__ uint4 load_relaxed(const uint32_t* address) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address)
               : "memory");
  return words;
}

// A word that another block stores by store_release: with it comes all that the other has written
// or seen before. sm_70 and newer.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Waits until a word that other blocks change by add_release or store_release has this value.
__device__ __forceinline__ void wait_for_word(const uint32_t* address, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred other;\n"
      ".reg .u32 word;\n"
      "again:\n"
      "ld.acquire.gpu.global.u32 word, [%0];\n"
      "setp.ne.u32 other, word, %1;\n"
      "@other bra again;\n"
      "}\n" ::"l"(address),
      "r"(value)
      : "memory");
}

// Adds to a word after all that this thread has written or seen, as others that see the sum find.
// sm_70 and newer.
__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Four numbers so many apart. Side by side they go at once, where the architecture can add them so.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kAddsVectors = true;
#else
inline constexpr bool kAddsVectors = false;
#endif

// What other multiprocessors wrote: past the L1.
template <int kStride>
__device__ __forceinline__ void load_from_l2(float (&values)[4], const float* address) {
  if constexpr (kStride == 1) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "l"(address)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("ld.global.cg.f32 %0, [%1];"
                   : "=f"(values[i])
                   : "l"(address + i * kStride)
                   : "memory");
    }
  }
}
template <int kStride>
__device__ __forceinline__ void store_global(float* address, const float (&values)[4]) {
  if constexpr (kStride == 1) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]),
                 "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("st.global.f32 [%0], %1;" ::"l"(address + i * kStride), "f"(values[i])
                   : "memory");
    }
  }
}
// Adds in the L2, and waits for nothing. Vectors: sm_90.
template <int kStride>
__device__ __forceinline__ void add_global(float* address, const float (&values)[4]) {
  if constexpr (kStride == 1) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + i * kStride),
                   "f"(values[i])
                   : "memory");
    }
  }
}

}  // namespace flashmoe::ptx
