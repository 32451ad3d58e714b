// Products of a few queries with rows of keys, softmax, and sums of rows of values: all in float.
//
// A row source has `Vec get(i, c)`: channels c * W .. c * W + W - 1 of row i, 0 beyond the last; and `fetch(i, n)`, which
// asks for what stands BLOCKS_AHEAD blocks behind rows i .. i + n - 1.
#pragma once

#include "processor.h"

// Whether rows of n bytes are taken by what multiplies codes as whole numbers (`quads.h`): a number of the preprocessor.
#if defined(KV_QUADS)
#define KV_TAKES(n) ((n) % KV_QUADS == 0)
#else
#define KV_TAKES(n) 0
#endif

namespace kv {

constexpr int BLOCK = 64;  // slots that are scored at a time
constexpr int padded(int n) { return (n + W - 1) / W * W; }

// Blocks ahead whose rows are asked for, into the processor's second cache.
constexpr int BLOCKS_AHEAD = 2;
inline void fetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }

// Whether rows of floats are asked for, too: AMD's processors foresee those that follow each other in memory, and asking costs
// them a tenth; Intel's take up to a sixth less for all of decode (docs/kernels.md).
static const bool ASKS_FOR_ROWS = INTEL;

template <class T>
inline Vec load_some(const T* p, int n) {
  T part[W] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}

// Rows of T at addresses `base + i * stride`. ahead: where those BLOCKS_AHEAD blocks behind the first stand; null: nothing is
// asked for.
template <class T, int DIM>
struct Rows {
  const T* base;
  int64_t stride;
  const T* ahead = nullptr;
  Vec get(int i, int c) const {
    const T* p = base + i * stride + c * W;
    if constexpr (DIM % W != 0) {
      if (c == DIM / W) return load_some(p, DIM % W);
    }
    return load(p);
  }
  void fetch(int i, int n) const {
    if (!ahead) return;
    for (int row = i; row < i + n; ++row)
      for (int64_t c = 0; c < DIM; c += 64 / sizeof(T)) fetch_line(ahead + row * stride + c);
  }
};

// Rows of T wherever they are.
template <class T, int DIM>
struct Scattered {
  const T* const* rows;
  Vec get(int i, int c) const {
    const T* p = rows[i] + c * W;
    if constexpr (DIM % W != 0) {
      if (c == DIM / W) return load_some(p, DIM % W);
    }
    return load(p);
  }
  void fetch(int, int) const {}
};

// Rows that have been decoded, padded with zeros.
template <int DIM>
struct Decoded {
  const float* base;
  Vec get(int i, int c) const { return load(base + i * padded(DIM) + c * W); }
  void fetch(int, int) const {}
};

// R rows meet Q queries: out[q][r].
template <int Q, int R, int CHUNKS, class Row>
inline void products(const float* q, int dim, const Row& rows, const int* index, Vec (*out)[W], int at) {
  Vec total[Q][R];
  for (int g = 0; g < Q; ++g)
    for (int r = 0; r < R; ++r) total[g][r] = set1(0.0f);
#pragma GCC unroll 4
  for (int c = 0; c < CHUNKS; ++c) {
    Vec k[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) k[r] = rows.get(index[r], c);
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
      const Vec own = load(q + g * dim + c * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[g][r] = fma(own, k[r], total[g][r]);
    }
  }
  for (int g = 0; g < Q; ++g)
    for (int r = 0; r < R; ++r) out[g][at + r] = total[g][r];
}

template <int Q, int CHUNKS, class Row>
inline void scores_of(const float* q, int dim, const Row& rows, int n, float* scores) {
  Vec sums[Q][W];
  for (int start = 0; start < n; start += W) {
    rows.fetch(start, W);
    for (int r = 0; r < W; r += ROWS) {
      int index[ROWS];
      for (int i = 0; i < ROWS; ++i) index[i] = start + r + i < n ? start + r + i : n - 1;
      products<Q, ROWS, CHUNKS>(q, dim, rows, index, sums, r);
    }
    for (int g = 0; g < Q; ++g) store(scores + g * BLOCK + start, sum_rows(sums[g]));
  }
}

// scores[g * BLOCK + i] = q[g] . row i for i < n; q [GROUP][padded(DIM)]; scores up to the next multiple of W are written.
template <int GROUP, int DIM, class Row>
inline void qk(const float* q, const Row& rows, int n, float* scores) {
  constexpr int CHUNKS = padded(DIM) / W, dim = padded(DIM);
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) scores_of<4, CHUNKS>(q + g * dim, dim, rows, n, scores + g * BLOCK);
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) scores_of<left, CHUNKS>(q + g * dim, dim, rows, n, scores + g * BLOCK);
}

template <int Q, int CHUNKS, class Row>
inline void sums_of(const float* p, const Row& rows, int n, float* out, int dim, int c0) {
  Vec total[Q][CHUNKS];
  for (int g = 0; g < Q; ++g)
    for (int c = 0; c < CHUNKS; ++c) total[g][c] = load(out + g * dim + (c0 + c) * W);
  for (int i = 0; i < n; ++i) {
    if (c0 == 0) rows.fetch(i, 1);
    Vec v[CHUNKS];
#pragma GCC unroll 8
    for (int c = 0; c < CHUNKS; ++c) v[c] = rows.get(i, c0 + c);
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
      const Vec weight = set1(p[g * BLOCK + i]);
#pragma GCC unroll 8
      for (int c = 0; c < CHUNKS; ++c) total[g][c] = fma(weight, v[c], total[g][c]);
    }
  }
  for (int g = 0; g < Q; ++g)
    for (int c = 0; c < CHUNKS; ++c) store(out + g * dim + (c0 + c) * W, total[g][c]);
}

template <int Q, int DIM, class Row>
inline void sums_of_all(const float* p, const Row& rows, int n, float* out) {
  constexpr int CHUNKS = padded(DIM) / W, WIDE = W >= 16 ? 4 : 2;
  int c = 0;
  for (; c + WIDE <= CHUNKS; c += WIDE) sums_of<Q, WIDE>(p, rows, n, out, padded(DIM), c);
  constexpr int left = CHUNKS % WIDE;
  if constexpr (left != 0) sums_of<Q, left>(p, rows, n, out, padded(DIM), c);
}

// out[g] += sum over i < n of p[g * BLOCK + i] row i; out [GROUP][padded(DIM)].
template <int GROUP, int DIM, class Row>
inline void pv(const float* p, const Row& rows, int n, float* out) {
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) sums_of_all<4, DIM>(p + g * BLOCK, rows, n, out + g * padded(DIM));
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) sums_of_all<left, DIM>(p + g * BLOCK, rows, n, out + g * padded(DIM));
}

inline Vec tanh(Vec x) {
  // Of -2 |x|, so that exp stays below 1; the sign comes back by choosing the side.
  const Vec size = max(x, sub(set1(0.0f), x));
  const Vec e = exp(mul(size, set1(-2.0f)));
  const Vec t = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  return max(min(x, t), sub(set1(0.0f), t));
}

}  // namespace kv
