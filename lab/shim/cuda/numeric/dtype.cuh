#pragma once
#include <cstdint>
#include "core/status.h"
namespace flashmoe::numeric {
struct Bf16 {};
template <class T> struct ElementTraits {
  static float to_float(uint16_t b){ uint32_t u=uint32_t(b)<<16; float f; memcpy(&f,&u,4); return f; }
  static uint32_t one(float f){ uint32_t u; memcpy(&u,&f,4); if(std::isnan(f)) return 0x7fff; return (u+0x7fff+((u>>16)&1))>>16; }
  static uint32_t pack(float lo,float hi){ return one(lo)|one(hi)<<16; }
  static float2 unpack(uint32_t p){ return {to_float(p&0xffff),to_float(p>>16)}; }
};
template <class T> bool any_nonfinite(uint32_t p){ return (p&0x7f80)==0x7f80 || (p>>16&0x7f80)==0x7f80; }
inline float exp2_approx(float x){ return exp2f(x); }
}
