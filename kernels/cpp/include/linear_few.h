// Products of rows of weights with few vectors: weights are read once, in their own dtype, and sums are float.
#pragma once

#include <algorithm>
#include <type_traits>

namespace kv {

constexpr int64_t PIECE = 96 * 1024;   // bytes of weights
constexpr int64_t LEAST = 16 * 1024;   // of the last pieces, where pieces become shorter
constexpr int64_t BYTES_AHEAD = 4096;  // that are asked for, into the second cache

// Rows of k weights that are taken at a time.
template <class Model>
inline int64_t rows_of_piece(int64_t k, int64_t piece = PIECE) {
  return std::max<int64_t>(4, piece / std::max<int64_t>(1, k * sizeof(Model)));
}

inline void ask_ahead(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + BYTES_AHEAD, 0, 2); }

// The sum of a row with the vector x, which is `raw` in its own dtype. Rows follow each other in memory and are read one by
// one: a processor foresees that, and not where four at a time go on that are short.
template <class Model>
inline float row_sum(const Model* w, const float* x, const Model* raw, int64_t n) {
  Vec total[2] = {set1(0.0f), set1(0.0f)};
  int64_t k = 0;
#if defined(KV_PAIRS)
  if constexpr (std::is_same_v<Model, bf16>) {
    constexpr int STEP = 2 * W;
    for (; k + 2 * STEP <= n; k += 2 * STEP) {
      for (int i = 0; i < 2; ++i) {
        ask_ahead(w + k + i * STEP);
        total[i] = dot(load_pairs(w + k + i * STEP), load_pairs(raw + k + i * STEP), total[i]);
      }
    }
  }
#endif
  for (; k + 2 * W <= n; k += 2 * W) {
    for (int i = 0; i < 2; ++i) {
      ask_ahead(w + k + i * W);
      total[i] = fma(load(w + k + i * W), load(x + k + i * W), total[i]);
    }
  }
  float own = sum(add(total[0], total[1]));
  for (; k < n; ++k) own += to_float(w[k]) * x[k];
  return own;
}

// Rows of weights, and vectors, whose sums are in registers at a time: with their operands they fill these.
constexpr int BLOCK_ROWS = 3, BLOCK_VECTORS = W >= 16 ? 8 : 4;

// Sums [R][M] of R rows of weights with M vectors of n numbers, `raw` in their own dtype. A sum is made in the same order
// whatever R and M are, so that a row of a batch does not depend on how many there are.
template <int R, int M, class Model>
inline void block_sums(const Model* w, int64_t stride, const float* x, const Model* raw, int64_t n, bool asks, float (*out)[M]) {
  Vec total[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) total[r][m] = set1(0.0f);
  int64_t k = 0;
#if defined(KV_PAIRS)
  if constexpr (std::is_same_v<Model, bf16>) {
    for (; k + 2 * W <= n; k += 2 * W) {
      Pairs own[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) own[r] = load_pairs(w + r * stride + k);
      if (asks)
        for (int r = 0; r < R; ++r) ask_ahead(w + r * stride + k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Pairs a = load_pairs(raw + m * n + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) total[r][m] = dot(own[r], a, total[r][m]);
      }
    }
  }
#endif
  for (; k + W <= n; k += W) {
    Vec own[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) own[r] = load(w + r * stride + k);
    if (asks)
      for (int r = 0; r < R; ++r) ask_ahead(w + r * stride + k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec a = load(x + m * n + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[r][m] = fma(own[r], a, total[r][m]);
    }
  }
  // W of them are summed at a time.
  constexpr int SUMS = (R * M + W - 1) / W * W;
  Vec all[SUMS];
#pragma GCC unroll 32
  for (int i = 0; i < SUMS; ++i) all[i] = i < R * M ? total[i / M][i % M] : set1(0.0f);
  alignas(64) float found[SUMS];
  for (int i = 0; i < SUMS; i += W) store(found + i, sum_rows(all + i));
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      float own = found[r * M + m];
      for (int64_t i = k; i < n; ++i) own += to_float(w[r * stride + i]) * x[m * n + i];
      out[r][m] = own;
    }
}

// y[m][n] = sum over k of x[m][k] w[n][k], + b[n], of dense x and y. Rows of w are taken in pieces by whoever is free.
template <class Model>
struct FewRows {
  const Tensor& out;
  const Tensor& weight;
  const Tensor& bias;
  const float* x;
  const Model* raw;
  int64_t count, piece, pieces;
  std::atomic<int64_t> next;

  void operator()() {
    const int64_t n = weight.size[0], blocks = (count + BLOCK_VECTORS - 1) / BLOCK_VECTORS;
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= pieces) return;
      const int64_t end = std::min(n, (mine + 1) * piece);
      for (int64_t row = mine * piece; row < end; row += BLOCK_ROWS) {
        const bool whole = row + BLOCK_ROWS <= end;
        for (int64_t block = 0; block < blocks; ++block) {  // of equal sizes, or one less
          const int64_t first = block * count / blocks, vectors = (block + 1) * count / blocks - first;
          if (whole) {
            sums<BLOCK_ROWS>(row, first, vectors, block);
          } else {
            for (int64_t own = row; own < end; ++own)  // two of a weight at most: they do not need code of their own
              for (int64_t m = 0; m < vectors; ++m) sums<1, 1>(own, first + m, 1, block);
          }
        }
      }
    }
  }

  template <int R, int M = BLOCK_VECTORS>
  void sums(int64_t row, int64_t first, int64_t vectors, int64_t block) {
    if constexpr (M > 1)
      if (vectors < M) return sums<R, M - 1>(row, first, vectors, block);
    const int64_t n = weight.size[0], k = weight.size[1], stride = weight.stride[0];
    const Model* own = weight.as<Model>() + row * stride;
    float found[R][M];
    block_sums<R, M>(own, stride, x + first * k, raw + first * k, k, block == 0, found);
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) {
        float y = found[r][m];
        if (bias) y += to_float(bias.as<Model>()[row + r]);
        out.as<Model>()[(first + m) * n + row + r] = rounded<Model>(y);
      }
  }
};

template <class Model>
void few_rows(const Call& call, const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t count) {
  const int64_t n = weight.size[0], k = weight.size[1];
  float* wide = static_cast<float*>(call.workspace(count * k * sizeof(float) + 64));
  widen(x.as<Model>(), static_cast<int>(count * k), wide);
  const int64_t piece = rows_of_piece<Model>(k) / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS;
  FewRows<Model> work{out, weight, bias, wide, x.as<Model>(), count, piece, (n + piece - 1) / piece};
  shared_out(call, std::min(call.threads, work.pieces), work);
}

}  // namespace kv
