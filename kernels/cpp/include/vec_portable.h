// Vectors of 4 floats in plain C++, which compilers turn into what the machine has (SSE2, NEON, or nothing).
#pragma once

#include "exp2.h"
#include "types.h"

namespace kv {

constexpr int W = 4;
constexpr int ROWS = 2;
struct Vec {
  float x[W];
};

#define KV_LANES(expression)                      \
  Vec out;                                          \
  for (int i = 0; i < W; ++i) out.x[i] = expression; \
  return out

inline Vec set1(float x) { KV_LANES(x); }
inline Vec add(Vec a, Vec b) { KV_LANES(a.x[i] + b.x[i]); }
inline Vec sub(Vec a, Vec b) { KV_LANES(a.x[i] - b.x[i]); }
inline Vec mul(Vec a, Vec b) { KV_LANES(a.x[i] * b.x[i]); }
inline Vec div(Vec a, Vec b) { KV_LANES(a.x[i] / b.x[i]); }
inline Vec max(Vec a, Vec b) { KV_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline Vec min(Vec a, Vec b) { KV_LANES(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
inline Vec fma(Vec a, Vec b, Vec c) { KV_LANES(a.x[i] * b.x[i] + c.x[i]); }
inline Vec exp(Vec x) { KV_LANES(std::exp(x.x[i])); }
inline float sum(Vec a) { return (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]); }
inline float largest(Vec a) {
  float top = a.x[0];
  for (int i = 1; i < W; ++i) top = a.x[i] > top ? a.x[i] : top;
  return top;
}
inline bool any_above(Vec a, Vec b) {
  for (int i = 0; i < W; ++i)
    if (a.x[i] > b.x[i]) return true;
  return false;
}
template <class T>
inline Vec load(const T* p) {
  KV_LANES(to_float(p[i]));
}
inline void store(float* p, Vec x) {
  for (int i = 0; i < W; ++i) p[i] = x.x[i];
}
#if defined(KV_PAIRS)  // as processors have them that multiply pairs: what is written for these runs anywhere

struct Pairs {
  bf16 x[2 * W];
};
inline Pairs load_pairs(const bf16* p) {
  Pairs out;
  std::memcpy(out.x, p, sizeof out.x);
  return out;
}
inline Pairs set1_pair(const bf16* p) {
  Pairs out;
  for (int i = 0; i < 2 * W; ++i) out.x[i] = p[i % 2];
  return out;
}
inline Vec dot(Pairs a, Pairs b, Vec c) {
  KV_LANES(c.x[i] + to_float(a.x[2 * i]) * to_float(b.x[2 * i]) + to_float(a.x[2 * i + 1]) * to_float(b.x[2 * i + 1]));
}
inline void store(bf16* p, Vec x) {
  for (int i = 0; i < W; ++i) p[i] = rounded<bf16>(x.x[i]);
}
inline float exp2_short(float x) {
  if (!(x >= -126.0f)) return x < 0 ? 0.0f : x;  // what is no number stays none
  const float k = std::nearbyint(x), r = x - k;
  return std::ldexp((((EXP2[4] * r + EXP2[3]) * r + EXP2[2]) * r + EXP2[1]) * r + EXP2[0], static_cast<int>(k));
}
inline Vec exp2_short(Vec x) { KV_LANES(exp2_short(x.x[i])); }
#endif
// to [W][W], rows apart by their strides, becomes `from` with rows and columns changed.
inline void transpose(const Word* from, int64_t stride, Word* to, int64_t to_stride) {
  for (int j = 0; j < W; ++j)
    for (int i = 0; i < W; ++i) to[j * to_stride + i] = from[i * stride + j];
}
inline Vec sum_rows(const Vec* r) { KV_LANES(sum(r[i])); }

#undef KV_LANES

}  // namespace kv
