// Asking for memory before it is read, so that reading it takes no longer than it takes to come.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace kv {

inline int64_t parts_of(int64_t all, int64_t most) { return (all + most - 1) / most; }

// Lines of memory that are to be asked for: of `rows` pieces of `length` bytes, `stride` apart.
struct Ahead {
  const char* at;
  int64_t length, stride, rows;
  int64_t row = 0, offset = 0;

  int64_t lines() const { return rows * parts_of(length, 64); }
  bool ended() const { return row >= rows; }

  // Asks for the next ones, into the second cache.
  void ask(int64_t lines) {
    for (; lines > 0 && !ended(); --lines) {
      __builtin_prefetch(at + row * stride + offset, 0, 2);
      if ((offset += 64) >= length) {
        offset = 0;
        ++row;
      }
    }
  }
};

// Channels start .. end - 1 of rows `row` .. last - 1 of weights; nothing where these are none.
template <class Model>
inline Ahead of_weights(const Tensor& weight, int64_t row, int64_t last, int64_t start, int64_t end) {
  const int64_t size = sizeof(Model), stride = weight.stride[0];
  const char* at = reinterpret_cast<const char*>(weight.as<Model>() + row * stride + start);
  return {at, (end - start) * size, stride * size, std::max<int64_t>(0, last - row)};
}

}  // namespace kv
