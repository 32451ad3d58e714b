// Asking for memory before it is read, so that reading it takes no longer than it takes to come.
#pragma once

#include <cstdint>

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

}  // namespace kv
