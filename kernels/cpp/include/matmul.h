// Products of blocks of matrices that are held in registers: rows times packed columns.
//
// Operands are floats, or pairs of bfloat16 where the processor multiplies these. Packed, element k of column n stands at
// [k / PAIR][n][k % PAIR]; what is beyond a matrix is zero.
#pragma once

#include <type_traits>

namespace kv {

constexpr int TILE_ROWS = 6;                  // of a result that is in registers at a time
constexpr int TILE_WIDTH = W >= 16 ? 4 : 2;  // its vectors a row: with their columns they fill the registers

// What rows and columns of a model's vectors are held as.
#if defined(KV_PAIRS)
template <class Model>
using Operand = std::conditional_t<std::is_same_v<Model, bf16>, bf16, float>;
#else
template <class Model>
using Operand = float;
#endif

template <class T>
constexpr int PAIR = std::is_same_v<T, bf16> ? 2 : 1;
template <class T>
constexpr int even(int n) {
  return (n + PAIR<T> - 1) / PAIR<T> * PAIR<T>;
}

// c [R][V * W] += one number of each of R rows, `lda` apart, times a packed row of columns; pairs of them, of pairs.
template <int R, int V>
inline void step(const float* a, int64_t lda, const float* b, Vec (&c)[R][V]) {
  Vec column[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) column[v] = load(b + v * W);
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m) {
    const Vec own = set1(a[m * lda]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) c[m][v] = fma(own, column[v], c[m][v]);
  }
}
#if defined(KV_PAIRS)

template <int R, int V>
inline void step(const bf16* a, int64_t lda, const bf16* b, Vec (&c)[R][V]) {
  Pairs column[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) column[v] = load_pairs(b + v * 2 * W);
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m) {
    const Pairs own = set1_pair(a + m * lda);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) c[m][v] = dot(own, column[v], c[m][v]);
  }
}
#endif

// Columns first .. first + V * W - 1 of c [TILE_ROWS][.], rows LDC apart, become or gain (GAIN) the product times `by`.
template <int V, int LDA, int N, int LDC, bool GAIN, class T>
inline void multiply_into(const T* a, const T* b, int depth, float by, float* c) {
  Vec total[TILE_ROWS][V];
#pragma GCC unroll 8
  for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) total[m][v] = GAIN ? load(c + m * LDC + v * W) : set1(0.0f);
  for (int k = 0; k < depth; k += PAIR<T>) step<TILE_ROWS>(a + k, LDA, b + k * N, total);
#pragma GCC unroll 8
  for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + m * LDC + v * W, GAIN ? total[m][v] : mul(total[m][v], set1(by)));
}

// c [TILE_ROWS][N], rows LDC apart, becomes or gains the product with all N columns of b, a multiple of W.
template <int LDA, int N, int LDC, bool GAIN, class T>
inline void matmul(const T* a, const T* b, int depth, float by, float* c) {
  int n = 0;
  for (; n + TILE_WIDTH * W <= N; n += TILE_WIDTH * W)
    multiply_into<TILE_WIDTH, LDA, N, LDC, GAIN>(a, b + n * PAIR<T>, depth, by, c + n);
  constexpr int left = N / W % TILE_WIDTH;
  if constexpr (left != 0) multiply_into<left, LDA, N, LDC, GAIN>(a, b + n * PAIR<T>, depth, by, c + n);
}

// to [W][W], rows apart by their strides, becomes `from` with rows and columns changed. One address at a time is computed:
// GCC has all of them first otherwise, more than there are registers.
inline void transpose(const Word* from, int64_t stride, Word* to, int64_t to_stride) {
  transpose_of(
      [&] {
        const Words own = words(from);
        from += stride;
        asm("" : "+r"(from));
        return own;
      },
      to, to_stride);
}

// The same of numbers that become floats.
template <class M>
inline void transpose_wide(const M* from, int64_t stride, Word* to, int64_t to_stride) {
  transpose_of(
      [&] {
        const Words own = words(load(from));
        from += stride;
        asm("" : "+r"(from));
        return own;
      },
      to, to_stride);
}

// Elements of a vector as they are held.
template <class M, class T>
inline void hold(const M* x, int n, T* out) {
  if constexpr (std::is_same_v<M, T>) {
    std::memcpy(out, x, n * sizeof(T));
  } else {
    widen(x, n, out);
  }
}

// Rows of `dim` <= DIM numbers become packed columns [even(dim)][COUNT]: `at(j)` is row j, or null for zeros.
template <int DIM, int COUNT, class M, class T, class Rows>
inline void pack_transposed(const Rows& at, int rows, int dim, T* out) {
  alignas(64) T own[COUNT][even<T>(DIM)];
  for (int j = 0; j < COUNT; ++j) {
    const M* row = j < rows ? at(j) : nullptr;
    if (row) {
      hold(row, dim, own[j]);
      for (int c = dim; c < even<T>(dim); ++c) own[j][c] = T{};
    } else {
      std::memset(own[j], 0, sizeof own[j]);
    }
  }
  // Pairs move as one.
  static_assert(sizeof(T) * PAIR<T> == sizeof(Word));
  const auto* from = reinterpret_cast<const Word*>(own[0]);
  auto* to = reinterpret_cast<Word*>(out);
  constexpr int stride = even<T>(DIM) / PAIR<T>;
  const int units = even<T>(dim) / PAIR<T>;
  int k = 0;
  if constexpr (COUNT % W == 0) {
    for (; k + W <= units; k += W)
      for (int j = 0; j < COUNT; j += W) transpose(from + j * stride + k, stride, to + k * COUNT + j, COUNT);
  }
  for (; k < units; ++k)
    for (int j = 0; j < COUNT; ++j) to[k * COUNT + j] = from[j * stride + k];
}

// Rows of [rows][dim] become packed columns [COUNT][N], N >= DIM: `at(j)` is row j, or null for zeros.
template <int DIM, int COUNT, int N, class M, class T, class Rows>
inline void pack_rows(const Rows& at, int rows, T* out) {
  alignas(64) T own[PAIR<T>][N];
  for (int start = 0; start < COUNT; start += PAIR<T>) {
    for (int p = 0; p < PAIR<T>; ++p) {
      const M* row = start + p < rows ? at(start + p) : nullptr;
      std::memset(own[p], 0, sizeof own[p]);
      if (row) hold(row, DIM, own[p]);
    }
    T* to = out + start * N;
    if constexpr (PAIR<T> == 2) {
      for (int c = 0; c < N; ++c) {
        to[2 * c] = own[0][c];
        to[2 * c + 1] = own[1][c];
      }
    } else {
      std::memcpy(to, own[0], sizeof own[0]);
    }
  }
}

}  // namespace kv
