// Products of bfloat16 queries with bfloat16 keys, and sums of weighed values: two numbers a lane at once, sums in float.
//
// Keys and queries are what they are; weights are rounded to bfloat16, as any product in it takes them. With KV_WIDE, for
// processors that multiply floats faster, both numbers of a pair become floats in registers, and weights are floats.
// Rows have `const uint8_t* at(i)`; N is a multiple of 2 W.
#pragma once

#include "quads.h"

namespace kv {

#if defined(KV_PAIRS) && defined(KV_QUADS)

#if defined(KV_WIDE)
struct Met {
  Vec first, second;
};
inline Met met(const bf16* p) {
  const Pairs own = load_pairs(p);
  return {firsts(own), seconds(own)};
}
inline Vec dot(const Met& a, const Met& b, Vec c) { return fma(a.second, b.second, fma(a.first, b.first, c)); }
using Weight = float;
#else
using Met = Pairs;
inline Met met(const bf16* p) { return load_pairs(p); }
using Weight = bf16;
#endif

template <int Q, int N, class Row>
inline void scores_of_pairs(const bf16* q, const Row& rows, int n, float* scores) {
  Vec sums[Q][W];
  for (int start = 0; start < n; start += W) {
    if (ASKS_FOR_ROWS) rows.template fetch<N * 2>(start, W);
    for (int r = 0; r < W; r += ROWS) {
      Vec total[Q][ROWS];
      const bf16* row[ROWS];
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const int own = start + r + i;
        row[i] = reinterpret_cast<const bf16*>(rows.at(own < n ? own : n - 1));
#pragma GCC unroll 4
        for (int g = 0; g < Q; ++g) total[g][i] = set1(0.0f);
      }
#pragma GCC unroll 4
      for (int c = 0; c < N; c += 2 * W) {
        Met k[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) k[i] = met(row[i] + c);
#pragma GCC unroll 8
        for (int g = 0; g < Q; ++g) {
          const Met own = met(q + g * N + c);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) total[g][i] = dot(own, k[i], total[g][i]);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < Q; ++g)
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) sums[g][r + i] = total[g][i];
    }
#pragma GCC unroll 4
    for (int g = 0; g < Q; ++g) store(scores + g * BLOCK + start, sum_rows(sums[g]));
  }
}

// As `qk`; q [GROUP][N].
template <int GROUP, int N, class Row>
inline void qk_pairs(const bf16* q, const Row& rows, int n, float* scores) {
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) scores_of_pairs<4, N>(q + g * N, rows, n, scores + g * BLOCK);
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) scores_of_pairs<left, N>(q + g * N, rows, n, scores + g * BLOCK);
}

template <int Q, int N, int CHUNKS, class Row>
inline void sums_of_pairs(const Weight (*p)[BLOCK], const Row& rows, int n, int c0, float* out) {
  Vec total[Q][CHUNKS][2];
#pragma GCC unroll 4
  for (int g = 0; g < Q; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS; ++c) {
      const float* sum = out + g * padded(N) + c0 + c * 2 * W;
      total[g][c][0] = load(sum);
      total[g][c][1] = load(sum + W);
    }
#if defined(KV_WIDE)
  for (int i = 0; i < n; ++i) {
    if (ASKS_FOR_ROWS && c0 == 0) rows.template fetch<N * 2>(i, 1);
    const bf16* row = reinterpret_cast<const bf16*>(rows.at(i)) + c0;
    Met v[CHUNKS];
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS; ++c) v[c] = met(row + c * 2 * W);
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
      const Vec weight = set1(p[g][i]);
#pragma GCC unroll 4
      for (int c = 0; c < CHUNKS; ++c) {
        total[g][c][0] = fma(weight, v[c].first, total[g][c][0]);
        total[g][c][1] = fma(weight, v[c].second, total[g][c][1]);
      }
    }
  }
#else
  for (int i = 0; i < n; i += 2) {
    if (ASKS_FOR_ROWS && c0 == 0) rows.template fetch<N * 2>(i, 2);
    const bf16 *first = reinterpret_cast<const bf16*>(rows.at(i)) + c0,
               *second = reinterpret_cast<const bf16*>(rows.at(i + 1 < n ? i + 1 : i)) + c0;
    Pairs v[CHUNKS][2];
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS; ++c) {
      v[c][0] = load_pairs(first + c * 2 * W);
      v[c][1] = load_pairs(second + c * 2 * W);
      interleave(v[c][0], v[c][1]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < Q; ++g) {
      const Pairs weight = set1_pair(p[g] + i);
#pragma GCC unroll 4
      for (int c = 0; c < CHUNKS; ++c) {
        total[g][c][0] = dot(weight, v[c][0], total[g][c][0]);
        total[g][c][1] = dot(weight, v[c][1], total[g][c][1]);
      }
    }
  }
#endif
#pragma GCC unroll 4
  for (int g = 0; g < Q; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS; ++c) {
      float* sum = out + g * padded(N) + c0 + c * 2 * W;
      store(sum, total[g][c][0]);
      store(sum + W, total[g][c][1]);
    }
}

template <int Q, int N, class Row>
inline void sums_of_all_pairs(const float* p, const Row& rows, int n, float* out) {
#if defined(KV_WIDE)
  const auto* weight = reinterpret_cast<const float(*)[BLOCK]>(p);
#else
  alignas(64) bf16 weight[Q][BLOCK];
#pragma GCC unroll 4
  for (int g = 0; g < Q; ++g)
    for (int i = 0; i < n; i += W) store(weight[g] + i, load(p + g * BLOCK + i));
#endif
  int c = 0;
  for (; c + 4 * W <= N; c += 4 * W) sums_of_pairs<Q, N, 2>(weight, rows, n, c, out);
  if constexpr (N % (4 * W) != 0) sums_of_pairs<Q, N, 1>(weight, rows, n, c, out);
}

// As `pv`, but the channels of `out` stand as pairs are multiplied, until `in_order` is called: so rows can come a few at
// a time. Weights up to the next multiple of W are 0.
template <int GROUP, int N, class Row>
inline void pv_pairs(const float* p, const Row& rows, int n, float* out) {
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) sums_of_all_pairs<4, N>(p + g * BLOCK, rows, n, out + g * padded(N));
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) sums_of_all_pairs<left, N>(p + g * BLOCK, rows, n, out + g * padded(N));
}

// The channels of sums of `pv_pairs`, each in its place.
template <int N>
inline void in_order(float* sum) {
  for (int c = 0; c < N; c += 2 * W) {
    Vec low = load(sum + c), high = load(sum + c + W);
#if defined(KV_WIDE)
    zip(low, high);
#else
    untangle(low, high);
#endif
    store(sum + c, low);
    store(sum + c + W, high);
  }
}

#endif

}  // namespace kv
