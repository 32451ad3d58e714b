// Tiles of Intel's AMX: 16 rows of 64 bytes in a register, of which a thread has eight. Two tiles of bfloat16 are multiplied
// to one of float: row i, column j gains the sum over 32 channels of row i of the first times column j of the second, whose
// rows have pairs of channels.
//
// The instructions are written as such: with intrinsics, the compiler would have to know the set. KV_TILES_BY_HAND: loops in
// their place, for tests where the processor has none.
#pragma once

#include <cstdint>
#include <cstring>
#if !defined(KV_TILES_BY_HAND)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "types.h"

namespace kv {

constexpr int SIDE = 16;            // rows of a tile, and numbers of 32 bits in a row
constexpr int CHANNELS = 2 * SIDE;  // of bfloat16 in a row
constexpr int TILE_WORDS = SIDE * SIDE;

#if defined(KV_TILES_BY_HAND)

inline thread_local Word tile_registers[8][SIDE][SIDE];

inline bool has_tiles() { return true; }

struct Tiles {};

template <int T>
inline void clear_tile() {
  std::memset(tile_registers[T], 0, sizeof tile_registers[T]);
}
template <int T>
inline void load_tile(const void* from, int64_t bytes) {
  for (int i = 0; i < SIDE; ++i) std::memcpy(tile_registers[T][i], static_cast<const char*>(from) + i * bytes, 64);
}
template <int T>
inline void store_tile(void* to, int64_t bytes) {
  for (int i = 0; i < SIDE; ++i) std::memcpy(static_cast<char*>(to) + i * bytes, tile_registers[T][i], 64);
}
// Tile C gains the product of A and B.
template <int C, int A, int B>
inline void multiply_tiles() {
  const auto number = [](Word pair, int at) { return as_float(at ? pair & 0xffff0000u : pair << 16); };
  for (int i = 0; i < SIDE; ++i)
    for (int j = 0; j < SIDE; ++j) {
      float sum = as_float(tile_registers[C][i][j]);
      for (int k = 0; k < SIDE; ++k)
        for (int at = 0; at < 2; ++at) sum += number(tile_registers[A][i][k], at) * number(tile_registers[B][k][j], at);
      tile_registers[C][i][j] = as_bits(sum);
    }
}

#else

// Whether this process may use tiles: Linux has to be asked.
inline bool has_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool may = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return may;
}

// While it is there, the thread's tiles are whole ones.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
inline void load_tile(const void* from, int64_t bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(bytes) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(bytes) : "memory");
}
template <int C, int A, int B>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace kv
