// wgmma with A in registers and B in shared memory, both K-major: D[64, N] += A[64, 16] B[16, N], N a multiple
// of 16 up to 192. Layouts and rules are those of wgmma.cuh; of lane l in warp w, with g = l / 4 and t = l % 4,
// a[i] is A[16w + g + 8 (i % 2), 2t + 8 (i / 2)] and the next of its row: what ldmatrix gives of four 8x8
// matrices, rows first. sm_90a.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmoe::ptx {

template <class Element, int kColumns>
struct WgmmaValues;

// Placeholders and operands, by eights.
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
#define FLASHMOE_D(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASHMOE_R_8 FLASHMOE_R0
#define FLASHMOE_D_8 FLASHMOE_D(0)
#define FLASHMOE_R_16 FLASHMOE_R_8 ", " FLASHMOE_R8
#define FLASHMOE_D_16 FLASHMOE_D_8, FLASHMOE_D(8)
#define FLASHMOE_R_24 FLASHMOE_R_16 ", " FLASHMOE_R16
#define FLASHMOE_D_24 FLASHMOE_D_16, FLASHMOE_D(16)
#define FLASHMOE_R_32 FLASHMOE_R_24 ", " FLASHMOE_R24
#define FLASHMOE_D_32 FLASHMOE_D_24, FLASHMOE_D(24)
#define FLASHMOE_R_40 FLASHMOE_R_32 ", " FLASHMOE_R32
#define FLASHMOE_D_40 FLASHMOE_D_32, FLASHMOE_D(32)
#define FLASHMOE_R_48 FLASHMOE_R_40 ", " FLASHMOE_R40
#define FLASHMOE_D_48 FLASHMOE_D_40, FLASHMOE_D(40)
#define FLASHMOE_R_56 FLASHMOE_R_48 ", " FLASHMOE_R48
#define FLASHMOE_D_56 FLASHMOE_D_48, FLASHMOE_D(48)
#define FLASHMOE_R_64 FLASHMOE_R_56 ", " FLASHMOE_R56
#define FLASHMOE_D_64 FLASHMOE_D_56, FLASHMOE_D(56)
#define FLASHMOE_R_72 FLASHMOE_R_64 ", " FLASHMOE_R64
#define FLASHMOE_D_72 FLASHMOE_D_64, FLASHMOE_D(64)
#define FLASHMOE_R_80 FLASHMOE_R_72 ", " FLASHMOE_R72
#define FLASHMOE_D_80 FLASHMOE_D_72, FLASHMOE_D(72)
#define FLASHMOE_R_88 FLASHMOE_R_80 ", " FLASHMOE_R80
#define FLASHMOE_D_88 FLASHMOE_D_80, FLASHMOE_D(80)
#define FLASHMOE_R_96 FLASHMOE_R_88 ", " FLASHMOE_R88
#define FLASHMOE_D_96 FLASHMOE_D_88, FLASHMOE_D(88)

// `registers` are kColumns / 2; a0... are the placeholders of the operands that follow them.
#define FLASHMOE_WGMMA(element, type, columns, registers, a0, a1, a2, a3, b, scale)                \
  template <>                                                                                      \
  struct WgmmaValues<element, columns> {                                                           \
    static __device__ __forceinline__ void multiply(float (&d)[registers], const uint32_t (&a)[4], \
                                                    uint64_t values, bool add) {                   \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale                                   \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type           \
                   " {" FLASHMOE_R_##registers "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b           \
                                               ", add, 1, 1, 0;\n}\n"                              \
                   : FLASHMOE_D_##registers                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values),                      \
                     "r"(static_cast<int>(add)));                                                  \
    }                                                                                              \
  };
#define FLASHMOE_WGMMAS(columns, registers, a0, a1, a2, a3, b, scale)         \
  FLASHMOE_WGMMA(__half, "f16", columns, registers, a0, a1, a2, a3, b, scale) \
  FLASHMOE_WGMMA(__nv_bfloat16, "bf16", columns, registers, a0, a1, a2, a3, b, scale)

FLASHMOE_WGMMAS(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
FLASHMOE_WGMMAS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
FLASHMOE_WGMMAS(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
FLASHMOE_WGMMAS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FLASHMOE_WGMMAS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
FLASHMOE_WGMMAS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
FLASHMOE_WGMMAS(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
FLASHMOE_WGMMAS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
FLASHMOE_WGMMAS(144, 72, "%72", "%73", "%74", "%75", "%76", "%77")
FLASHMOE_WGMMAS(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
FLASHMOE_WGMMAS(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
FLASHMOE_WGMMAS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")

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
#undef FLASHMOE_D
#undef FLASHMOE_WGMMA
#undef FLASHMOE_WGMMAS

}  // namespace flashmoe::ptx
