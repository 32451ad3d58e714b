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
inline bool all_below(Vec a, Vec b) {
  for (int i = 0; i < W; ++i)
    if (!(a.x[i] < b.x[i])) return false;
  return true;
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
inline void store_rounded_pairs(Word* p, Vec a, Vec b) {
  for (int i = 0; i < W; ++i) p[i] = rounded<bf16>(a.x[i]).bits | uint32_t{rounded<bf16>(b.x[i]).bits} << 16;
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
struct Words {
  Word x[W];
};
inline Words words(const Word* p) {
  Words out;
  std::memcpy(out.x, p, sizeof out.x);
  return out;
}
inline Words words(Vec a) {
  Words out;
  std::memcpy(out.x, a.x, sizeof out.x);
  return out;
}
// to [W][W], rows to_stride apart, becomes the W rows that `row` gives one after another, rows and columns changed.
template <class Row>
inline void transpose_of(const Row& row, Word* to, int64_t to_stride) {
  for (int i = 0; i < W; ++i) {
    const Words own = row();
    for (int j = 0; j < W; ++j) to[j * to_stride + i] = own.x[j];
  }
}
template <int COUNT, class F>
inline void of_each(const F& f, const Vec* x, float* out) {
  for (int i = 0; i < COUNT; ++i) {
    Vec all = set1(x[i].x[0]);
    for (int lane = 1; lane < W; ++lane) all = f(all, set1(x[i].x[lane]));
    out[i] = all.x[0];
  }
}
inline Vec sum_rows(const Vec* r) { KV_LANES(sum(r[i])); }
#if defined(KV_QUADS)  // likewise of processors that multiply quads of bytes: 8 bytes of a row at a time

struct Ints {
  int32_t x[W];
};
struct Quads {
  uint8_t x[4 * W];
};

inline Ints set1_int(int32_t x) { return {{x, x, x, x}}; }
inline Vec to_float(Ints x) { KV_LANES(static_cast<float>(x.x[i])); }
inline Ints to_ints(Vec x) {
  Ints out;
  for (int i = 0; i < W; ++i) out.x[i] = x.x[i] == x.x[i] ? static_cast<int32_t>(std::nearbyint(x.x[i])) : 0;
  return out;
}
inline Ints carried(Ints x) {
  for (auto& own : x.x) own = (own + 128) >> 8;
  return x;
}
inline void store_bytes(void* p, Ints x) {
  for (int i = 0; i < W; ++i) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(x.x[i]);
}
inline Quads set1_quad(const void* p) {
  Quads out;
  for (int i = 0; i < W; ++i) std::memcpy(out.x + 4 * i, p, 4);
  return out;
}
inline Ints dot(Quads bytes, Quads signs, Ints sum) {
  for (int i = 0; i < 4 * W; ++i) sum.x[i / 4] += bytes.x[i] * static_cast<int8_t>(signs.x[i]);
  return sum;
}
inline Ints dot_quad(Quads bytes, const void* p, Ints sum) { return dot(bytes, set1_quad(p), sum); }
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline Vec max_bits(Vec a, Vec b) { KV_LANES(bits_of(a.x[i]) > bits_of(b.x[i]) ? a.x[i] : b.x[i]); }
template <int P, bool SIGNED>
inline void store_planes(uint8_t* out, int stride, const Ints* x) {
  for (int i = 0; i < 4; ++i) {
    Ints left = x[i];
    for (int p = P - 1; p >= 0; --p) {
      store_bytes(out + p * stride + i * W, left);
      if (SIGNED) left = carried(left);
      else
        for (auto& own : left.x) own >>= 8;
    }
  }
}
inline void powers(Vec x, int bits, Vec& by, Vec& back) {
  for (int i = 0; i < W; ++i) {
    const uint32_t e = bits_of(x.x[i]) & 0x7f800000u;
    by.x[i] = as_float((uint32_t(254 + bits - 1) << 23) - e);
    back.x[i] = as_float(e - (uint32_t(bits - 1) << 23));
  }
}
inline Quads flipped(Quads x) {
  for (auto& own : x.x) own ^= 0x80;
  return x;
}
inline Quads low_nibbles(Quads x) {
  for (auto& own : x.x) own &= 15;
  return x;
}
inline Quads high_nibbles(Quads x) {
  for (auto& own : x.x) own &= 0xf0;
  return x;
}
inline Quads row_codes(const void* p) {
  Quads out;
  std::memcpy(out.x, p, sizeof out.x);
  return out;
}
inline Quads row_codes_half(const void* p) {
  Quads out{};
  std::memcpy(out.x, p, sizeof out.x / 2);
  return out;
}
template <class F>
inline void columns(const F& row, Quads* out) {
  for (int c = 0; c < W / 2; ++c)
    for (int r = 0; r < W; ++r) std::memcpy(out[c].x + 4 * r, row(r) + 4 * c, 4);
}
inline void quads_of_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, Quads* out) {
  const uint8_t* rows[4] = {a, b, c, d};
  for (int i = 0; i < 2 * W; ++i)
    for (int r = 0; r < 4; ++r) out[i / W].x[i % W * 4 + r] = rows[r][i];
}
inline void columns(const uint8_t* rows, Quads* out) {
  columns([&](int r) { return rows + r * 2 * W; }, out);
}
inline void quads_of_four(const uint8_t* rows, Quads* out) {
  quads_of_four(rows, rows + 2 * W, rows + 4 * W, rows + 6 * W, out);
}
// Lane i of x[j] becomes channel i / 2 * 8 + 2 j + i % 2: each half of the lanes has a half of the channels.
inline void interleave(Quads* x) {
  Quads out[4];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < W; ++i)
      for (int r = 0; r < 4; ++r) out[j].x[4 * i + r] = x[r].x[i / 2 * 8 + 2 * j + i % 2];
  for (int j = 0; j < 4; ++j) x[j] = out[j];
}
inline void untangle(Vec* x) {
  Vec out[4];
  for (int c = 0; c < 4 * W; ++c) out[c / W].x[c % W] = x[c % 8 / 2].x[c / 8 * 2 + c % 2];
  for (int j = 0; j < 4; ++j) x[j] = out[j];
}
inline Vec every_other(Vec a, Vec b, bool odd) {
  KV_LANES(i < W / 2 ? a.x[2 * i + odd] : b.x[2 * i - W + odd]);
}
#if defined(KV_PAIRS)
inline void interleave(Pairs& a, Pairs& b) {
  const Pairs x = a, y = b;
  for (int i = 0; i < 2 * W; ++i) {
    Pairs& own = i < W ? a : b;
    own.x[2 * i % (2 * W)] = x.x[i];
    own.x[2 * i % (2 * W) + 1] = y.x[i];
  }
}
inline void untangle(Vec&, Vec&) {}
inline Vec firsts(Pairs x) { KV_LANES(to_float(x.x[2 * i])); }
inline Vec seconds(Pairs x) { KV_LANES(to_float(x.x[2 * i + 1])); }
inline void zip(Vec& a, Vec& b) {
  const Vec x = a, y = b;
  for (int i = 0; i < 2 * W; ++i) (i < W ? a : b).x[i % W] = (i % 2 ? y : x).x[i / 2];
}
#endif
#endif

#undef KV_LANES

}  // namespace kv
