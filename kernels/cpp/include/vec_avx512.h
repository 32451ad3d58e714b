// Vectors of 16 floats: AVX-512 (F, BW, DQ, VL), with products of pairs (BF16) where KV_PAIRS is set.
#pragma once

#include <immintrin.h>

#include "exp2.h"
#include "types.h"

namespace kv {

constexpr int W = 16;    // lanes
constexpr int ROWS = 4;  // rows of keys that meet the queries at once: 16 sums and their operands fit 32 registers
using Vec = __m512;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline bool any_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline Vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load(const e5m2* p) {
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_slli_epi16(x, 8));
}
inline Vec load(const e4m3* p) {
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // The sign has gone to all the higher bits, of which the highest is kept.
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }

#if defined(KV_PAIRS)

// Pairs of bfloat16, a lane each, whose products are added to floats.
using Pairs = __m512bh;
inline Pairs load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pairs set1_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}
inline Vec dot(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
inline void store(bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

// 2^x as exactly as bfloat16 holds it; 0 below -126, also of -inf.
inline Vec exp2_short(Vec x) {
  const __mmask16 there = _mm512_cmp_ps_mask(x, set1(-126.0f), _CMP_NLT_UQ);  // what is no number stays none
  const Vec k = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = sub(x, k);
  Vec y = fma(r, set1(EXP2[4]), set1(EXP2[3]));
  y = fma(y, r, set1(EXP2[2]));
  y = fma(y, r, set1(EXP2[1]));
  y = fma(y, r, set1(EXP2[0]));
  return _mm512_maskz_scalef_ps(there, y, k);
}
#endif

// exp with an error below 2 units in the last place; 0 below -87, also of -inf.
inline Vec exp(Vec x) {
  const Vec low = set1(-87.336f);
  const __mmask16 there = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);  // what is no number stays none
  const Vec k = _mm512_roundscale_ps(mul(x, set1(1.44269504088896f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec r = fma(k, set1(-0.693359375f), x);
  r = fma(k, set1(2.12194440e-4f), r);
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  return _mm512_maskz_mov_ps(there, _mm512_scalef_ps(y, k));
}

// to [W][W], rows apart by their strides, becomes `from` with rows and columns changed.
inline void transpose(const Word* from, int64_t stride, Word* to, int64_t to_stride) {
  __m512i quad[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_loadu_si512(from + i * stride), b = _mm512_loadu_si512(from + (i + 1) * stride);
    const __m512i c = _mm512_loadu_si512(from + (i + 2) * stride), d = _mm512_loadu_si512(from + (i + 3) * stride);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i AB = _mm512_unpackhi_epi32(a, b), CD = _mm512_unpackhi_epi32(c, d);
    // quad[i + j]: rows i to i + 3 of column j of each four columns
    quad[i] = _mm512_unpacklo_epi64(ab, cd);
    quad[i + 1] = _mm512_unpackhi_epi64(ab, cd);
    quad[i + 2] = _mm512_unpacklo_epi64(AB, CD);
    quad[i + 3] = _mm512_unpackhi_epi64(AB, CD);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(quad[j], quad[4 + j], 0x88);  // columns j and 8 + j of rows 0 to 7
    const __m512i LOW = _mm512_shuffle_i32x4(quad[j], quad[4 + j], 0xdd);  // columns 4 + j and 12 + j
    const __m512i high = _mm512_shuffle_i32x4(quad[8 + j], quad[12 + j], 0x88);
    const __m512i HIGH = _mm512_shuffle_i32x4(quad[8 + j], quad[12 + j], 0xdd);
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(LOW, HIGH, 0x88));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(LOW, HIGH, 0xdd));
  }
}

// Lane j of the result is the sum of row j.
inline Vec sum_rows(const Vec* r) {
  Vec quad[4];
  for (int i = 0; i < 4; ++i) {
    const Vec a = r[4 * i], b = r[4 * i + 1], c = r[4 * i + 2], d = r[4 * i + 3];
    const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    quad[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const Vec low = add(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  const Vec high = add(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

}  // namespace kv
