// What a kernel is called with: tensors by number, and the caller's threads. No header of PyTorch is needed.
#pragma once

#include <atomic>
#include <cstdint>
#include <numeric>

namespace kv {

constexpr int MOST_DIMS = 6;
// Rows of a linear layer's x that kernels are faster at than a library, in float and in 16 bits; of those the latter on
// AMD's, and as tiles.
constexpr int64_t FEW_ROWS = 64, FEW_HALVES = 16, MANY_HALVES = 256;
constexpr int MOST_LAYERS = 16;  // linear layers of one vector in a call

struct Tensor {
  void* data;  // null: there is none
  int64_t dims;
  int64_t size[MOST_DIMS];
  int64_t stride[MOST_DIMS];  // in elements

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // The element at some indices, the others 0.
  template <class T>
  T* at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return as<T>() + i * stride[0] + (dims > 1 ? j * stride[1] : 0) + (dims > 2 ? k * stride[2] : 0);
  }
  explicit operator bool() const { return data != nullptr; }
};

using Task = void (*)(int64_t worker, void* context);

struct Call {
  const Tensor* tensors;
  int64_t threads;
  // Runs task(0 .. threads - 1, context), on as many threads as there are.
  void (*parallel)(int64_t threads, Task task, void* context);
  // Memory that is the calling thread's until its next call, of at least so many bytes, aligned to 64.
  void* (*workspace)(int64_t bytes);
};

// Work is taken in pieces by whoever is free, so that a slow thread delays the others by one piece at most.
template <class Work>
void shared_out(const Call& call, int64_t threads, Work& work) {
  if (threads <= 1) return work();
  call.parallel(
      threads, [](int64_t, void* context) { (*static_cast<Work*>(context))(); }, &work);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace kv
