// Loads of 16 bytes of global memory, and words by which blocks signal progress to each other.
#pragma once

#include <cstdint>

namespace flashmoe::ptx {

// Loads data that a multiprocessor reads once. It bypasses the L1, and the L2 fetches 128 bytes at
// a time. sm_80 and newer.
__device__ __forceinline__ void load_streaming(uint32_t (&chunk)[4], const void* address) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk[0]), "=r"(chunk[1]), "=r"(chunk[2]), "=r"(chunk[3])
               : "l"(address));
}

// Gives zeros without an access if not `valid`.
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

// The same for 8 bytes.
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

// The same for data that other warps also read.
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

// Loads 16 bytes while other blocks may be writing any of the words. sm_70 and newer.
__device__ __forceinline__ uint4 load_relaxed(const uint32_t* address) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address)
               : "memory");
  return words;
}

// Loads a word that another block stores by store_release. All that the other block wrote or saw
// before is then visible. sm_70 and newer.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Waits until a word that other blocks change by add_release or store_release has the value
// `value`.
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

// Adds to a word. A thread that sees the sum also sees what this thread wrote or saw before. sm_70
// and newer.
__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Four numbers with a stride. Contiguous ones are one vector if the architecture can add vectors.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kAddsVectors = true;
#else
inline constexpr bool kAddsVectors = false;
#endif

// Loads what other multiprocessors wrote, past the L1.
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
// Adds in the L2 without waiting. Vectors need sm_90.
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
