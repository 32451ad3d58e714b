// Products of rows of weights with few vectors: weights are read once, in their own dtype, and sums are float.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "ahead.h"
#include "call.h"

namespace kv {

constexpr int64_t LEAST = 16 * 1024;   // bytes of the last parts of weights
constexpr int64_t BYTES_AHEAD = 4096;  // that are asked for, into the second cache, of one vector's weights
constexpr int64_t LEAD = 16 * 1024;    // of those of several

// Rows of weights, from which whoever is free takes a part of what is left: long ones, so that memory is read on and on, and
// at last short ones, so that nobody waits long for the other.
struct Parts {
  struct Part {
    int64_t begin, end;
  };

  const int64_t all, step;  // parts have a multiple of `step` rows, but the last
  const int64_t share, least;
  std::atomic<int64_t> next{0};

  // bytes: of a row
  Parts(int64_t all, int64_t step, int64_t bytes, int64_t threads)
      : all(all),
        step(step),
        share(std::max<int64_t>(1, threads * 3 / 2)),
        least(parts_of(std::max<int64_t>(4, LEAST / std::max<int64_t>(1, bytes)), step) * step) {}

  // How many threads have a part, at most.
  int64_t most() const { return parts_of(all, least); }

  // The next part; an empty one where nothing is left.
  Part take() {
    int64_t begin = next.load(), end;
    do {
      if (begin >= all) return {all, all};
      end = std::min(all, begin + std::max(least, (all - begin) / share / step * step));
    } while (!next.compare_exchange_weak(begin, end));
    return {begin, end};
  }
};

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
// whatever R and M are, so that a row of a batch does not depend on how many there are. ahead: is asked for meanwhile
template <int R, int M, class Model>
inline void block_sums(const Model* w, int64_t stride, const float* x, const Model* raw, int64_t n, Ahead& ahead, float (*out)[M]) {
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
      ahead.ask(R);
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
    ahead.ask(R);
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

// y[m][n] = sum over k of x[m][k] w[n][k], + b[n], of dense x and y.
template <class Model>
struct FewRows {
  const Tensor& out;
  const Tensor& weight;
  const Tensor& bias;
  const float* x;
  const Model* raw;
  int64_t count;
  Parts parts;

  void operator()() {
    const int64_t lead = std::max<int64_t>(1, LEAD / std::max<int64_t>(1, weight.size[1] * sizeof(Model)));
    for (Parts::Part mine = parts.take(), then; mine.begin < mine.end; mine = then) {
      then = parts.take();  // now, so that its weights can be asked for
      Ahead own = rows(mine.begin + lead, mine.end), next = rows(then.begin, std::min(then.begin + lead, then.end));
      for (int64_t row = mine.begin; row < mine.end; row += BLOCK_ROWS) {
        Ahead& ahead = own.ended() ? next : own;
        const int64_t left = mine.end - row;
        if (left >= BLOCK_ROWS) {
          all_sums<BLOCK_ROWS>(row, ahead);
        } else {
          for (int64_t last = 0; last < left; ++last) all_sums<1>(row + last, ahead);
        }
      }
    }
  }

  Ahead rows(int64_t begin, int64_t end) const { return of_weights<Model>(weight, begin, end, 0, weight.size[1]); }

  // The sums of R rows of weights with all vectors, in blocks of equal sizes, or one less.
  template <int R>
  void all_sums(int64_t row, Ahead& ahead) {
    const int64_t blocks = parts_of(count, BLOCK_VECTORS);
    Ahead nothing{};
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * count / blocks, vectors = (block + 1) * count / blocks - first;
      sums<R>(row, first, vectors, block == 0 ? ahead : nothing);
    }
  }

  template <int R, int M = BLOCK_VECTORS>
  void sums(int64_t row, int64_t first, int64_t vectors, Ahead& ahead) {
    if constexpr (M > 1)
      if (vectors < M) return sums<R, M - 1>(row, first, vectors, ahead);
    const int64_t n = weight.size[0], k = weight.size[1], stride = weight.stride[0];
    const Model* own = weight.as<Model>() + row * stride;
    float found[R][M];
    block_sums<R, M>(own, stride, x + first * k, raw + first * k, k, ahead, found);
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
  const int64_t n = weight.size[0], k = weight.size[1], bytes = k * sizeof(Model);
  float* wide = static_cast<float*>(call.workspace(count * k * sizeof(float) + 64));
  widen(x.as<Model>(), static_cast<int>(count * k), wide);
  FewRows<Model> work{out, weight, bias, wide, x.as<Model>(), count, {n, BLOCK_ROWS, bytes, call.threads}};
  shared_out(call, std::min(call.threads, work.parts.most()), work);
}

}  // namespace kv
