// What both CUDA examples need: memory, a stream and a graph that give themselves back, and
// bf16 numbers on both sides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashmoe/flashmoe.hpp"

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Memory of the current device, for flashmoe::Buffer and flashmoe::BasicRouting. cudaFree waits for
// the device, so a workspace may grow between two calls.
struct DeviceMemory {
  void* allocate(size_t bytes) noexcept {
    void* memory = nullptr;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
  }
  void deallocate(void* memory, size_t) noexcept { cudaFree(memory); }
};

using DeviceWorkspace = flashmoe::Buffer<DeviceMemory>;
using DeviceRouting = flashmoe::BasicRouting<DeviceMemory>;

// Numbers on the device.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) { buffer_.reserve(count * sizeof(T)); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    check(cudaMemcpy(data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    // It may return before the last bytes arrive, and a non-blocking stream does not wait for them.
    check(cudaDeviceSynchronize());
  }
  T* data() const { return static_cast<T*>(buffer_.data()); }

  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t count_;
  flashmoe::Buffer<DeviceMemory> buffer_;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `work` puts on the stream, recorded once, to be launched as often as wanted.
class Graph {
 public:
  template <class Work>
  Graph(const Stream& stream, Work work) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    check(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(status);
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const Stream& stream) const { check(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

inline std::vector<__nv_bfloat16> random_bf16(size_t count, float scale, unsigned seed) {
  std::vector<__nv_bfloat16> values(count);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  for (__nv_bfloat16& value : values) value = __float2bfloat16(normal(generator));
  return values;
}

inline double number(__nv_bfloat16 value) { return static_cast<double>(__bfloat162float(value)); }

// The exit status of a program that could not try: there is no GPU.
constexpr int kSkipped = 77;
