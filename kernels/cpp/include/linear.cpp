// A linear layer of one token: y[n] = sum over k of x[k] w[n][k], + b[n]. Weights are read once, in their own dtype, and
// sums are float; rows are taken in pieces by whoever is free.

#include <algorithm>
#include <type_traits>

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"

using namespace kv;

namespace {

using Model = KV_MODEL;
enum { OUT, X, WEIGHT, BIAS };
constexpr int TOGETHER = 4;               // rows
constexpr int64_t PIECE = 96 * 1024;      // bytes of weights

// Sums of TOGETHER rows.
template <int R>
inline void rows(const Model* w, int64_t stride, const float* x, const Model* raw, int64_t n, float* out) {
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

struct Work {
  const Tensor& out;
  const Tensor& weight;
  const Tensor& bias;
  const float* x;
  const Model* raw;
  int64_t piece, pieces;
  std::atomic<int64_t> next;

  void operator()() {
    const int64_t n = weight.size[0], k = weight.size[1], stride = weight.stride[0];
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= pieces) return;
      const int64_t end = std::min(n, (mine + 1) * piece);
      for (int64_t row = mine * piece; row < end; row += TOGETHER) {
        const Model* own = weight.as<Model>() + row * stride;
        float sums[TOGETHER];
        const int count = static_cast<int>(std::min<int64_t>(TOGETHER, end - row));
        if (count == TOGETHER) {
          rows<TOGETHER>(own, stride, x, raw, k, sums);
        } else {
          for (int r = 0; r < count; ++r) rows<1>(own + r * stride, stride, x, raw, k, sums + r);
        }
        for (int r = 0; r < count; ++r) {
          if (bias) sums[r] += to_float(bias.as<Model>()[row + r]);
          out.as<Model>()[row + r] = rounded<Model>(sums[r]);
        }
      }
    }
  }
};

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor &x = call->tensors[X], &weight = call->tensors[WEIGHT];
  const int64_t n = weight.size[0], k = weight.size[1];
  float* wide = static_cast<float*>(call->workspace(k * sizeof(float) + 64));
  widen(x.as<Model>(), static_cast<int>(k), wide);
  int64_t piece = std::max<int64_t>(TOGETHER, PIECE / std::max<int64_t>(1, k * sizeof(Model)));
  piece = (piece + TOGETHER - 1) / TOGETHER * TOGETHER;
  Work work{call->tensors[OUT], weight, call->tensors[BIAS], wide, x.as<Model>(), piece, (n + piece - 1) / piece};
  shared_out(*call, std::min(call->threads, work.pieces), work);
}
