// Products of a mixture of experts for any instruction set.
//
// Included inside the ISA's own namespace after its `Simd`, so that no code compiled with its flags
// can be merged with another's.

using Vector = Simd::Vector;

constexpr int kLanes = Simd::kLanes;
constexpr int64_t kMostRows = 192;
constexpr int64_t kTileColumns = 256;

template <typename T>
float load_one(const void* p, int64_t i) {
  return Simd::sum_of(Simd::load_first(static_cast<const T*>(p) + i, 1));
}

inline float load_any(const void* p, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::kFloat32: return load_one<float>(p, i);
    case Dtype::kFloat16: return load_one<Fp16>(p, i);
    case Dtype::kBFloat16: return load_one<Bf16>(p, i);
  }
  return 0.0f;
}

inline float activate(const MoeActivation& a, float z) {
  switch (a.function) {
    case FLASHMOE_ACTIVATION_SILU: return z / (1.0f + __builtin_expf(-a.alpha * z));
    case FLASHMOE_ACTIVATION_GELU: return 0.5f * z * (1.0f + __builtin_erff(z * 0.70710678f));
    case FLASHMOE_ACTIVATION_GELU_TANH:
      return 0.5f * z * (1.0f + __builtin_tanhf(0.79788456f * (z + 0.044715f * z * z * z)));
    case FLASHMOE_ACTIVATION_RELU: return z < 0.0f ? 0.0f : z;
    case FLASHMOE_ACTIVATION_RELU2: return z < 0.0f ? 0.0f : z * z;
  }
  return z;
}

template <typename T>
void store_one(void* p, int64_t i, float x) {
  Simd::store_first(static_cast<T*>(p) + i, Simd::broadcast(x), 1);
}

template <typename T>
void multiply_tile(const MoeTile& tile, void* /*scratch*/) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t n = 0; n < tile.columns; ++n) {
      float z[2];
      for (int m = 0; m < tile.matrices; ++m) {
        const MoeWeights& w = tile.weights[m];
        float sum = 0.0f;
        for (int64_t d = 0; d < tile.depth; ++d) {
          sum += load_one<T>(tile.x[r], d) *
                 load_one<T>(w.data, n * w.row_stride + d * w.column_stride);
        }
        if (tile.scale != nullptr) sum *= tile.scale[r];
        if (w.bias != nullptr) sum += load_any(w.bias, w.bias_dtype, n * w.bias_stride);
        z[m] = sum;
        if (tile.before[m] != nullptr)
          store_one<T>(tile.before[m], r * tile.before_stride + n, sum);
      }
      float value = z[0];
      if (tile.activation != nullptr) {
        const MoeActivation& a = *tile.activation;
        float& u = z[tile.matrices - 1];
        u = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
        if (tile.matrices == 2) {
          const float g = z[0] > a.limit ? a.limit : z[0];
          value = activate(a, g) * (u + a.up_offset);
        } else {
          value = activate(a, u);
        }
      }
      store_one<T>(tile.out, r * tile.out_stride + n, value);
    }
  }
}

template <typename T>
void add_rows(const MoeSum& sum) {
  for (int64_t i = 0; i < sum.hidden; i += kLanes) {
    Vector total = Simd::zero();
    for (int32_t k = 0; k < sum.top_k; ++k) {
      if (sum.y[k] == nullptr) continue;
      const Vector y = Simd::load_first(static_cast<const T*>(sum.y[k]) + i, sum.hidden - i);
      total = sum.weights == nullptr
                  ? Simd::add(total, y)
                  : Simd::multiply_add(Simd::broadcast(sum.weights[k]), y, total);
    }
    Simd::store_first(static_cast<T*>(sum.out) + i, total, sum.hidden - i);
  }
}

template <typename T>
constexpr MoeKernel moe_kernel(const char* isa) {
  return {isa, kMostRows, kTileColumns, 64, multiply_tile<T>, add_rows<T>};
}
