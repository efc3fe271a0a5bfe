#include <math.h>

#include "cpu/attention_kernel.h"

namespace flashmoe::cpu {
namespace scalar {
namespace {

float load(const float* p) { return *p; }
float bits_to_float(uint32_t b) { float f; __builtin_memcpy(&f, &b, 4); return f; }
uint32_t float_to_bits(float f) { uint32_t b; __builtin_memcpy(&b, &f, 4); return b; }

struct Fp16 { uint16_t bits; };
struct Bf16 { uint16_t bits; };

float load(const Bf16* p) { return bits_to_float(static_cast<uint32_t>(p->bits) << 16); }
float load(const Fp16* p) {
  const uint32_t sign = static_cast<uint32_t>(p->bits & 0x8000u) << 16;
  const uint32_t exponent = (p->bits >> 10) & 0x1fu;
  const uint32_t mantissa = p->bits & 0x3ffu;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const uint32_t e = exponent == 31 ? 255 : exponent + 112;
  return bits_to_float(sign | (e << 23) | (mantissa << 13));
}
void store(float* p, float v) { *p = v; }
void store(Bf16* p, float v) {
  const uint32_t b = float_to_bits(v);
  if (v != v) { p->bits = static_cast<uint16_t>((b >> 16) | 0x40u); return; }
  p->bits = static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
void store(Fp16* p, float v) {
  const uint32_t b = float_to_bits(v);
  const uint32_t sign = (b >> 16) & 0x8000u;
  const float a = fabsf(v);
  uint32_t h;
  if (v != v) h = 0x7e00u;
  else if (a >= 65520.0f) h = 0x7c00u;
  else if (a < 0x1p-14f) h = static_cast<uint32_t>(nearbyintf(a * 0x1p24f));
  else {
    const uint32_t m = float_to_bits(a) - (112u << 23);
    h = (m + 0xfffu + ((m >> 13) & 1u)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | h);
}

int32_t tile_k(const AttentionProblem&) { return 1; }
size_t scratch_bytes(const AttentionProblem& p, int32_t) { return static_cast<size_t>(p.dim_v) * 4; }

template <typename T>
void compute(const AttentionProblem& p, const AttentionTile& tile, int32_t, void* scratch) {
  float* acc = static_cast<float*>(scratch);
  const int64_t kv_head = tile.head / (p.heads_q / p.heads_kv);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t i = tile.first_row + r;
    int64_t keys = p.seq_k;
    if (p.causal) {
      keys = i + p.causal_offset + 1;
      keys = keys < 0 ? 0 : keys > p.seq_k ? p.seq_k : keys;
    }
    const T* q = static_cast<const T*>(p.q) + tile.batch * p.q_strides.batch + i * p.q_strides.seq +
                 tile.head * p.q_strides.head;
    T* out = static_cast<T*>(p.out) + tile.batch * p.out_strides.batch + i * p.out_strides.seq +
             tile.head * p.out_strides.head;
    float max = -INFINITY, sum = 0;
    for (int64_t d = 0; d < p.dim_v; ++d) acc[d] = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const T* k = static_cast<const T*>(p.k) + tile.batch * p.k_strides.batch +
                   j * p.k_strides.seq + kv_head * p.k_strides.head;
      const T* v = static_cast<const T*>(p.v) + tile.batch * p.v_strides.batch +
                   j * p.v_strides.seq + kv_head * p.v_strides.head;
      float s = 0;
      for (int64_t d = 0; d < p.dim; ++d) s += load(q + d) * load(k + d);
      s *= p.scale;
      const float bigger = s > max ? s : max;
      const float base = bigger == -INFINITY ? 0 : bigger;
      const float alpha = expf(max - base);
      const float weight = expf(s - base);
      max = bigger;
      sum = sum * alpha + weight;
      for (int64_t d = 0; d < p.dim_v; ++d) acc[d] = acc[d] * alpha + weight * load(v + d);
    }
    for (int64_t d = 0; d < p.dim_v; ++d) store(out + d, keys == 0 ? 0 : acc[d] / sum);
    if (p.lse != nullptr) {
      p.lse[tile.batch * p.lse_strides.batch + i * p.lse_strides.seq +
            tile.head * p.lse_strides.head] = max == -INFINITY ? -INFINITY : max + logf(sum);
    }
  }
}

}  // namespace
}  // namespace scalar

const AttentionKernel kScalarAttention[3] = {
    {"scalar", 1, 64, scalar::tile_k, scalar::scratch_bytes, scalar::compute<float>},
    {"scalar", 1, 64, scalar::tile_k, scalar::scratch_bytes, scalar::compute<scalar::Fp16>},
    {"scalar", 1, 64, scalar::tile_k, scalar::scratch_bytes, scalar::compute<scalar::Bf16>},
};

}  // namespace flashmoe::cpu
