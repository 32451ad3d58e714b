// Products of rows of weights with few vectors: weights are read once, in their own dtype, and sums are float.
#pragma once

#include <algorithm>
#include <type_traits>

namespace kv {

constexpr int TOGETHER = 4;  // rows of weights
constexpr int64_t PIECE = 96 * 1024;  // bytes of weights

// Rows of k weights that are taken at a time.
template <class Model>
inline int64_t rows_of_piece(int64_t k) {
  const int64_t rows = std::max<int64_t>(TOGETHER, PIECE / std::max<int64_t>(1, k * sizeof(Model)));
  return (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
}

// Sums of R rows with the vector x, which is `raw` in its own dtype.
template <int R, class Model>
inline void row_sums(const Model* w, int64_t stride, const float* x, const Model* raw, int64_t n, float* out) {
  Vec total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = set1(0.0f);
  int64_t k = 0;
#if defined(KV_PAIRS)
  if constexpr (std::is_same_v<Model, bf16>) {
    constexpr int STEP = 2 * W;
    for (; k + 2 * STEP <= n; k += 2 * STEP) {
      const Pairs a = load_pairs(raw + k), b = load_pairs(raw + k + STEP);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[r][0] = dot(load_pairs(w + r * stride + k), a, total[r][0]);
        total[r][1] = dot(load_pairs(w + r * stride + k + STEP), b, total[r][1]);
      }
    }
  }
#endif
  for (; k + 2 * W <= n; k += 2 * W) {
    const Vec a = load(x + k), b = load(x + k + W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      total[r][0] = fma(load(w + r * stride + k), a, total[r][0]);
      total[r][1] = fma(load(w + r * stride + k + W), b, total[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float own = sum(add(total[r][0], total[r][1]));
    for (int64_t i = k; i < n; ++i) own += to_float(w[r * stride + i]) * x[i];
    out[r] = own;
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
    const int64_t n = weight.size[0];
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= pieces) return;
      const int64_t end = std::min(n, (mine + 1) * piece);
      for (int64_t row = mine * piece; row < end; row += TOGETHER) {
        const int rows = static_cast<int>(std::min<int64_t>(TOGETHER, end - row));
        for (int64_t m = 0; m < count; ++m) sums(row, rows, m);
      }
    }
  }

  void sums(int64_t row, int rows, int64_t m) {
    const int64_t n = weight.size[0], k = weight.size[1], stride = weight.stride[0];
    const Model* own = weight.as<Model>() + row * stride;
    float found[TOGETHER];
    if (rows == TOGETHER) {
      row_sums<TOGETHER>(own, stride, x + m * k, raw + m * k, k, found);
    } else {
      for (int r = 0; r < rows; ++r) row_sums<1>(own + r * stride, stride, x + m * k, raw + m * k, k, found + r);
    }
    for (int r = 0; r < rows; ++r) {
      if (bias) found[r] += to_float(bias.as<Model>()[row + r]);
      out.as<Model>()[m * n + row + r] = rounded<Model>(found[r]);
    }
  }
};

template <class Model>
void few_rows(const Call& call, const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t count) {
  const int64_t n = weight.size[0], k = weight.size[1];
  float* wide = static_cast<float*>(call.workspace(count * k * sizeof(float) + 64));
  widen(x.as<Model>(), static_cast<int>(count * k), wide);
  const int64_t piece = rows_of_piece<Model>(k);
  FewRows<Model> work{out, weight, bias, wide, x.as<Model>(), count, piece, (n + piece - 1) / piece};
  shared_out(call, std::min(call.threads, work.pieces), work);
}

}  // namespace kv
