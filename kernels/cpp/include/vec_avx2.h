// Vectors of 8 floats: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "types.h"

namespace kv {

constexpr int W = 8;
constexpr int ROWS = 2;  // 8 sums of 4 queries and their operands fit 16 registers
using Vec = __m256;

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vec x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float largest(Vec x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Vec load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load(const e5m2* p) {
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_slli_epi16(x, 8));
}
inline Vec load(const e4m3* p) {
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  // The sign has gone to all the higher bits, of which the highest is kept.
  const __m128i half = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }

// exp with an error below 2 units in the last place; 0 below -87, also of -inf.
inline Vec exp(Vec x) {
  const Vec low = set1(-87.336f), there = _mm256_cmp_ps(x, low, _CMP_NLT_UQ);
  const Vec bounded = max(low, x);  // what is no number stays none: max gives its second operand then
  const Vec k = _mm256_round_ps(mul(bounded, set1(1.44269504088896f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec r = fma(k, set1(-0.693359375f), bounded);
  r = fma(k, set1(2.12194440e-4f), r);
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(there, mul(y, _mm256_castsi256_ps(power)));
}

inline bool all_below(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)) == 0; }
inline bool any_above(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

using Words = __m256;
inline Words words(const Word* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline Words words(Vec x) { return x; }

// to [W][W], rows to_stride apart, becomes the W rows that `row` gives one after another, rows and columns changed.
template <class Row>
inline void transpose_of(const Row& row, Word* to, int64_t to_stride) {
  __m256 quad[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = row(), b = row(), c = row(), d = row();
    const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d AB = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), CD = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    // quad[i + j]: rows i to i + 3 of columns j and 4 + j
    quad[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
    quad[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
    quad[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(AB, CD));
    quad[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(AB, CD));
  }
  auto* out = reinterpret_cast<float*>(to);
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(out + j * to_stride, _mm256_permute2f128_ps(quad[j], quad[4 + j], 0x20));
    _mm256_storeu_ps(out + (4 + j) * to_stride, _mm256_permute2f128_ps(quad[j], quad[4 + j], 0x31));
  }
}

// Lane j of the result is the sum of row j.
inline Vec sum_rows(const Vec* r) {
  const Vec low = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const Vec high = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace kv
