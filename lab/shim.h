#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <ucontext.h>
#include <vector>
#include <functional>
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
using std::min; using std::max; using std::isnan; using std::isfinite;
struct uint4 { uint32_t x,y,z,w; };
struct float2 { float x,y; };
inline float2 make_float2(float x,float y){return {x,y};}
inline uint4 make_uint4(uint32_t x,uint32_t y,uint32_t z,uint32_t w){return {x,y,z,w};}
struct Dim { int x; };
inline Dim blockIdx{0};
// 32 lanes as fibers that meet at collectives
inline ucontext_t main_ctx, lane_ctx[32];
inline int cur_lane; inline bool done_[32]; inline uint32_t slot_[32]; inline std::function<void()> body_;
inline void yield_(){ swapcontext(&lane_ctx[cur_lane], &main_ctx); }
inline void entry_(){ body_(); done_[cur_lane]=true; swapcontext(&lane_ctx[cur_lane], &main_ctx); }
inline void run_warp(std::function<void()> f){
  static std::vector<std::vector<char>> stacks(32, std::vector<char>(1<<17));
  body_=f;
  for(int i=0;i<32;++i){ getcontext(&lane_ctx[i]); lane_ctx[i].uc_stack.ss_sp=stacks[i].data(); lane_ctx[i].uc_stack.ss_size=stacks[i].size(); lane_ctx[i].uc_link=nullptr; makecontext(&lane_ctx[i],entry_,0); done_[i]=false; }
  for(;;){ int n=0; for(int i=0;i<32;++i) if(!done_[i]){ cur_lane=i; swapcontext(&main_ctx,&lane_ctx[i]); if(!done_[i]) ++n; } if(n==0) return; if(n!=32){ fprintf(stderr,"lanes diverge at a collective\n"); abort(); } }
}
inline void exchange_(uint32_t v, uint32_t* all){ slot_[cur_lane]=v; yield_(); std::memcpy(all,slot_,sizeof slot_); yield_(); }
inline float __shfl_sync(uint32_t,float v,int src){ uint32_t b,a[32]; std::memcpy(&b,&v,4); exchange_(b,a); float r; std::memcpy(&r,&a[src],4); return r; }
inline int __shfl_sync(uint32_t,int v,int src){ uint32_t a[32]; exchange_(v,a); return a[src]; }
inline uint32_t __ballot_sync(uint32_t,bool v){ uint32_t a[32],r=0; exchange_(v,a); for(int i=0;i<32;++i) r|=a[i]<<i; return r; }
inline bool __any_sync(uint32_t m,bool v){ return __ballot_sync(m,v)!=0; }
inline bool __all_sync(uint32_t m,bool v){ return __ballot_sync(m,v)==~0u; }
inline int __ffs(uint32_t v){ return __builtin_ffs(v); }
inline void __syncwarp(){ uint32_t a[32]; exchange_(0,a); }
