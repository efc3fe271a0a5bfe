// wgmma: the four warps of a warpgroup compute D[64, N] += A[64, 16] B[16, N], asynchronously, with
// 16-bit operands and fp32 accumulation. B lies in shared memory, A there or in registers. sm_90a.
//
// Warp w of the group owns rows 16w..16w+15. In lane l, with g = l / 4 and t = l % 4, element d[4n
// + e] is D[16w + g + 8 (e / 2), 8n + 2t + e % 2] for n = 0, 1, ...: two neighbouring n, packed in
// pairs, are the A fragment of 16 columns.
//
// Between the first product of a group and the wait that ends it nothing may touch the accumulators
// or the A registers. `pin` makes the compiler obey.
#pragma once

#include <cstdint>

#include "cuda/numeric/element.h"

namespace flashmoe::ptx {

// A tile in shared memory with rows of 128 bytes and 128-byte swizzle. Groups of eight rows are
// 1024 bytes apart. K-major (Q and K): a row holds 64 elements along k; the next 16 of them begin
// 32 bytes further. MN-major (V): a row holds 64 elements along n; the next 64 begin `group_bytes`
// further, and the next 16 along k 2048 bytes further. The tile begins on a multiple of 1024 bytes.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address, uint32_t group_bytes) {
  constexpr uint64_t kEightRows = 1024;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(group_bytes >> 4) << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
}

// The descriptor of an address `bytes` further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

// Precedes the first product of a group: orders earlier register accesses before it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of products since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the kPending newest groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// multiply(d, a, b, add): A and B in shared memory, both K-major. multiply_major(d, a, b, add): the
// same with A MN-major; multiply_majors: both MN-major. multiply_values(d, a, b, add): A in
// registers, B MN-major; multiply_by_rows: A in registers, B K-major. If `add` is false, the
// product overwrites d. A in registers has the layout of four 8x8 matrices from ldmatrix, rows
// first.
template <class Element, int kColumns>
struct Wgmma;

// Placeholders %0 to %127 and operands d[0] to d[127], in groups of eight.
#define FLASHMOE_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHMOE_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHMOE_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHMOE_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHMOE_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHMOE_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHMOE_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHMOE_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHMOE_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHMOE_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHMOE_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHMOE_R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHMOE_R96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHMOE_R104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHMOE_R112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHMOE_R120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHMOE_D8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASHMOE_R_8 FLASHMOE_R0
#define FLASHMOE_D_8 FLASHMOE_D8(0)
#define FLASHMOE_R_16 FLASHMOE_R_8 ", " FLASHMOE_R8
#define FLASHMOE_D_16 FLASHMOE_D_8, FLASHMOE_D8(8)
#define FLASHMOE_R_24 FLASHMOE_R_16 ", " FLASHMOE_R16
#define FLASHMOE_D_24 FLASHMOE_D_16, FLASHMOE_D8(16)
#define FLASHMOE_R_32 FLASHMOE_R_24 ", " FLASHMOE_R24
#define FLASHMOE_D_32 FLASHMOE_D_24, FLASHMOE_D8(24)
#define FLASHMOE_R_40 FLASHMOE_R_32 ", " FLASHMOE_R32
#define FLASHMOE_D_40 FLASHMOE_D_32, FLASHMOE_D8(32)
#define FLASHMOE_R_48 FLASHMOE_R_40 ", " FLASHMOE_R40
#define FLASHMOE_D_48 FLASHMOE_D_40, FLASHMOE_D8(40)
#define FLASHMOE_R_56 FLASHMOE_R_48 ", " FLASHMOE_R48
#define FLASHMOE_D_56 FLASHMOE_D_48, FLASHMOE_D8(48)
#define FLASHMOE_R_64 FLASHMOE_R_56 ", " FLASHMOE_R56
#define FLASHMOE_D_64 FLASHMOE_D_56, FLASHMOE_D8(56)
#define FLASHMOE_R_72 FLASHMOE_R_64 ", " FLASHMOE_R64
#define FLASHMOE_D_72 FLASHMOE_D_64, FLASHMOE_D8(64)
#define FLASHMOE_R_80 FLASHMOE_R_72 ", " FLASHMOE_R72
#define FLASHMOE_D_80 FLASHMOE_D_72, FLASHMOE_D8(72)
#define FLASHMOE_R_88 FLASHMOE_R_80 ", " FLASHMOE_R80
#define FLASHMOE_D_88 FLASHMOE_D_80, FLASHMOE_D8(80)
#define FLASHMOE_R_96 FLASHMOE_R_88 ", " FLASHMOE_R88
#define FLASHMOE_D_96 FLASHMOE_D_88, FLASHMOE_D8(88)
#define FLASHMOE_R_104 FLASHMOE_R_96 ", " FLASHMOE_R96
#define FLASHMOE_D_104 FLASHMOE_D_96, FLASHMOE_D8(96)
#define FLASHMOE_R_112 FLASHMOE_R_104 ", " FLASHMOE_R104
#define FLASHMOE_D_112 FLASHMOE_D_104, FLASHMOE_D8(104)
#define FLASHMOE_R_120 FLASHMOE_R_112 ", " FLASHMOE_R112
#define FLASHMOE_D_120 FLASHMOE_D_112, FLASHMOE_D8(112)
#define FLASHMOE_R_128 FLASHMOE_R_120 ", " FLASHMOE_R120
#define FLASHMOE_D_128 FLASHMOE_D_120, FLASHMOE_D8(120)

#define FLASHMOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// Four more registers, for odd multiples of eight columns.
#define FLASHMOE_R_4 "%0, %1, %2, %3"
#define FLASHMOE_D_4 FLASHMOE_D4(0)
#define FLASHMOE_R_12 FLASHMOE_R_8 ", %8, %9, %10, %11"
#define FLASHMOE_D_12 FLASHMOE_D_8, FLASHMOE_D4(8)
#define FLASHMOE_R_20 FLASHMOE_R_16 ", %16, %17, %18, %19"
#define FLASHMOE_D_20 FLASHMOE_D_16, FLASHMOE_D4(16)
#define FLASHMOE_R_28 FLASHMOE_R_24 ", %24, %25, %26, %27"
#define FLASHMOE_D_28 FLASHMOE_D_24, FLASHMOE_D4(24)
#define FLASHMOE_R_36 FLASHMOE_R_32 ", %32, %33, %34, %35"
#define FLASHMOE_D_36 FLASHMOE_D_32, FLASHMOE_D4(32)
#define FLASHMOE_R_44 FLASHMOE_R_40 ", %40, %41, %42, %43"
#define FLASHMOE_D_44 FLASHMOE_D_40, FLASHMOE_D4(40)
#define FLASHMOE_R_52 FLASHMOE_R_48 ", %48, %49, %50, %51"
#define FLASHMOE_D_52 FLASHMOE_D_48, FLASHMOE_D4(48)
#define FLASHMOE_R_60 FLASHMOE_R_56 ", %56, %57, %58, %59"
#define FLASHMOE_D_60 FLASHMOE_D_56, FLASHMOE_D4(56)
#define FLASHMOE_R_68 FLASHMOE_R_64 ", %64, %65, %66, %67"
#define FLASHMOE_D_68 FLASHMOE_D_64, FLASHMOE_D4(64)
#define FLASHMOE_R_76 FLASHMOE_R_72 ", %72, %73, %74, %75"
#define FLASHMOE_D_76 FLASHMOE_D_72, FLASHMOE_D4(72)
#define FLASHMOE_R_84 FLASHMOE_R_80 ", %80, %81, %82, %83"
#define FLASHMOE_D_84 FLASHMOE_D_80, FLASHMOE_D4(80)
#define FLASHMOE_R_92 FLASHMOE_R_88 ", %88, %89, %90, %91"
#define FLASHMOE_D_92 FLASHMOE_D_88, FLASHMOE_D4(88)

// Here and below `registers` is kColumns / 2, and s0... are the placeholders of the operands after
// them. A is in registers. `b_major` is 1 if B is MN-major.
#define FLASHMOE_WGMMA_OF_VALUES(name, b_major, type, columns, registers, s0, s1, s2, s3, s4, s5) \
  static __device__ __forceinline__ void name(float (&d)[registers], const uint32_t (&a)[4],      \
                                              uint64_t b, bool add) {                             \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " s5                                       \
                 ", 0;\n"                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type            \
                 " {" FLASHMOE_R_##registers "}, {" s0 ", " s1 ", " s2 ", " s3 "}, " s4           \
                                             ", add, 1, 1, " b_major ";\n}\n"                     \
                 : FLASHMOE_D_##registers                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                            \
                   "r"(static_cast<int>(add)));                                                   \
  }
#define FLASHMOE_WGMMA(element, type, columns, registers, s0, s1, s2, s3, s4, s5)                  \
  template <>                                                                                      \
  struct Wgmma<element, columns> {                                                                 \
    static __device__ __forceinline__ void multiply(float (&d)[registers], uint64_t a, uint64_t b, \
                                                    bool add) {                                    \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " s2                                      \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type           \
                   " {" FLASHMOE_R_##registers "}, " s0 ", " s1 ", add, 1, 1, 0, 0;\n}\n"          \
                   : FLASHMOE_D_##registers                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                  \
    }                                                                                              \
    static __device__ __forceinline__ void multiply_major(float (&d)[registers], uint64_t a,       \
                                                          uint64_t b, bool add) {                  \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " s2                                      \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type           \
                   " {" FLASHMOE_R_##registers "}, " s0 ", " s1 ", add, 1, 1, 1, 0;\n}\n"          \
                   : FLASHMOE_D_##registers                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                  \
    }                                                                                              \
    static __device__ __forceinline__ void multiply_majors(float (&d)[registers], uint64_t a,      \
                                                           uint64_t b, bool add) {                 \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " s2                                      \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type           \
                   " {" FLASHMOE_R_##registers "}, " s0 ", " s1 ", add, 1, 1, 1, 1;\n}\n"          \
                   : FLASHMOE_D_##registers                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                  \
    }                                                                                              \
    FLASHMOE_WGMMA_OF_VALUES(multiply_values, "1", type, columns, registers, s0, s1, s2, s3, s4,   \
                             s5)                                                                   \
    FLASHMOE_WGMMA_OF_VALUES(multiply_by_rows, "0", type, columns, registers, s0, s1, s2, s3, s4,  \
                             s5)                                                                   \
  };
#define FLASHMOE_WGMMAS(columns, registers, s0, s1, s2, s3, s4, s5)         \
  FLASHMOE_WGMMA(__half, "f16", columns, registers, s0, s1, s2, s3, s4, s5) \
  FLASHMOE_WGMMA(__nv_bfloat16, "bf16", columns, registers, s0, s1, s2, s3, s4, s5)

FLASHMOE_WGMMAS(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
FLASHMOE_WGMMAS(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
FLASHMOE_WGMMAS(24, 12, "%12", "%13", "%14", "%15", "%16", "%17")
FLASHMOE_WGMMAS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
FLASHMOE_WGMMAS(40, 20, "%20", "%21", "%22", "%23", "%24", "%25")
FLASHMOE_WGMMAS(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
FLASHMOE_WGMMAS(56, 28, "%28", "%29", "%30", "%31", "%32", "%33")
FLASHMOE_WGMMAS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FLASHMOE_WGMMAS(72, 36, "%36", "%37", "%38", "%39", "%40", "%41")
FLASHMOE_WGMMAS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
FLASHMOE_WGMMAS(88, 44, "%44", "%45", "%46", "%47", "%48", "%49")
FLASHMOE_WGMMAS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
FLASHMOE_WGMMAS(104, 52, "%52", "%53", "%54", "%55", "%56", "%57")
FLASHMOE_WGMMAS(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
FLASHMOE_WGMMAS(120, 60, "%60", "%61", "%62", "%63", "%64", "%65")
FLASHMOE_WGMMAS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
FLASHMOE_WGMMAS(136, 68, "%68", "%69", "%70", "%71", "%72", "%73")
FLASHMOE_WGMMAS(144, 72, "%72", "%73", "%74", "%75", "%76", "%77")
FLASHMOE_WGMMAS(152, 76, "%76", "%77", "%78", "%79", "%80", "%81")
FLASHMOE_WGMMAS(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
FLASHMOE_WGMMAS(168, 84, "%84", "%85", "%86", "%87", "%88", "%89")
FLASHMOE_WGMMAS(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
FLASHMOE_WGMMAS(184, 92, "%92", "%93", "%94", "%95", "%96", "%97")
FLASHMOE_WGMMAS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
FLASHMOE_WGMMAS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef FLASHMOE_R0
#undef FLASHMOE_R8
#undef FLASHMOE_R16
#undef FLASHMOE_R24
#undef FLASHMOE_R32
#undef FLASHMOE_R40
#undef FLASHMOE_R48
#undef FLASHMOE_R56
#undef FLASHMOE_R64
#undef FLASHMOE_R72
#undef FLASHMOE_R80
#undef FLASHMOE_R88
#undef FLASHMOE_R96
#undef FLASHMOE_R104
#undef FLASHMOE_R112
#undef FLASHMOE_R120
#undef FLASHMOE_R_8
#undef FLASHMOE_D_8
#undef FLASHMOE_R_16
#undef FLASHMOE_D_16
#undef FLASHMOE_R_24
#undef FLASHMOE_D_24
#undef FLASHMOE_R_32
#undef FLASHMOE_D_32
#undef FLASHMOE_R_40
#undef FLASHMOE_D_40
#undef FLASHMOE_R_48
#undef FLASHMOE_D_48
#undef FLASHMOE_R_56
#undef FLASHMOE_D_56
#undef FLASHMOE_R_64
#undef FLASHMOE_D_64
#undef FLASHMOE_R_72
#undef FLASHMOE_D_72
#undef FLASHMOE_R_80
#undef FLASHMOE_D_80
#undef FLASHMOE_R_88
#undef FLASHMOE_D_88
#undef FLASHMOE_R_96
#undef FLASHMOE_D_96
#undef FLASHMOE_R_104
#undef FLASHMOE_D_104
#undef FLASHMOE_R_112
#undef FLASHMOE_D_112
#undef FLASHMOE_R_120
#undef FLASHMOE_D_120
#undef FLASHMOE_R_128
#undef FLASHMOE_D_128
#undef FLASHMOE_R_4
#undef FLASHMOE_D_4
#undef FLASHMOE_R_12
#undef FLASHMOE_D_12
#undef FLASHMOE_R_20
#undef FLASHMOE_D_20
#undef FLASHMOE_R_28
#undef FLASHMOE_D_28
#undef FLASHMOE_R_36
#undef FLASHMOE_D_36
#undef FLASHMOE_R_44
#undef FLASHMOE_D_44
#undef FLASHMOE_R_52
#undef FLASHMOE_D_52
#undef FLASHMOE_R_60
#undef FLASHMOE_D_60
#undef FLASHMOE_R_68
#undef FLASHMOE_D_68
#undef FLASHMOE_R_76
#undef FLASHMOE_D_76
#undef FLASHMOE_R_84
#undef FLASHMOE_D_84
#undef FLASHMOE_R_92
#undef FLASHMOE_D_92
#undef FLASHMOE_D4
#undef FLASHMOE_D8
#undef FLASHMOE_WGMMA
#undef FLASHMOE_WGMMA_OF_VALUES
#undef FLASHMOE_WGMMAS

}  // namespace flashmoe::ptx
