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
inline bool all_below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ) == 0; }
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
inline void store(f16* p, Vec x) {
  const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

#if defined(KV_PAIRS)

// Pairs of bfloat16, a lane each, whose products are added to floats.
using Pairs = __m512bh;
inline Pairs load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pairs set1_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}
// In the processor's own words: of GCC 12's builtins each result has a register of its own, and where all are sums, half
// of them are moved to memory and back at every step.
inline Vec dot(Pairs a, Pairs b, Vec c) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}
// Rounded numbers, one of each vector in a word, that of a first.
inline void store_rounded_pairs(Word* p, Vec a, Vec b) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a)), high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
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

using Words = __m512i;
inline Words words(const Word* p) { return _mm512_loadu_si512(p); }
inline Words words(Vec x) { return _mm512_castps_si512(x); }

// to [W][W], rows to_stride apart, becomes the W rows that `row` gives one after another, rows and columns changed.
template <class Row>
inline void transpose_of(const Row& row, Word* to, int64_t to_stride) {
  __m512i quad[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = row(), b = row(), c = row(), d = row();
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

// out[i] is f of all lanes of x[i], for i < COUNT: a sum, or whatever does not mind the order; up to the next
// multiple of W there is room for more.
template <int COUNT, class F>
inline void of_each(const F& f, const Vec* x, float* out) {
#pragma GCC unroll 8
  for (int start = 0; start < COUNT; start += 8) {
    Vec quad[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const auto row = [&](int j) __attribute__((always_inline)) {
        const int at = start + 4 * i + j;
        return at < COUNT ? x[at] : set1(0.0f);
      };
      const Vec a = row(0), b = row(1), c = row(2), d = row(3);
      const Vec ab = f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
      const Vec cd = f(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
      const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
      quad[i] = f(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    const Vec half = f(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    const Vec whole = f(half, _mm512_shuffle_f32x4(half, half, 0xb1));
    _mm256_storeu_ps(out + start, _mm512_castps512_ps256(_mm512_shuffle_f32x4(whole, whole, 0x08)));
  }
}

}  // namespace kv

#if defined(__AVX512VNNI__)

// What multiplies codes as whole numbers (`quads.h`): KV_QUADS bytes of a row are taken at a time.
#define KV_QUADS 32

namespace kv {

using Ints = __m512i;
using Quads = __m512i;  // four bytes a lane

inline Ints set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Vec x) { return _mm512_cvtps_epi32(x); }  // to nearest even
// What is left of whole numbers without their lowest byte, which counts from -128 to 127.
inline Ints carried(Ints x) { return _mm512_srai_epi32(_mm512_add_epi32(x, set1_int(128)), 8); }
inline void store_bytes(void* p, Ints x) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
// 64 whole numbers of P bytes; byte p of number i is at out[p * stride + i], byte 0 the highest. SIGNED: bytes count from
// -128 to 127.
template <int P, bool SIGNED>
inline void store_planes(uint8_t* out, int stride, const Ints* x) {
  const Ints order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const auto packed = [&](Ints low, Ints high, int p) __attribute__((always_inline)) {
    _mm512_storeu_si512(out + p * stride, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
  };
  if constexpr (P == 2) {
    Ints a = _mm512_packus_epi32(x[0], x[1]), b = _mm512_packus_epi32(x[2], x[3]);
    packed(_mm512_and_si512(a, _mm512_set1_epi16(255)), _mm512_and_si512(b, _mm512_set1_epi16(255)), 1);
    if (SIGNED) {
      a = _mm512_add_epi16(a, _mm512_set1_epi16(128));
      b = _mm512_add_epi16(b, _mm512_set1_epi16(128));
    }
    packed(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8), 0);
  } else {
    Ints left[4] = {x[0], x[1], x[2], x[3]};
#pragma GCC unroll 4
    for (int p = P - 1; p >= 0; --p) {
      Ints byte[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        byte[i] = _mm512_and_si512(left[i], set1_int(255));
        left[i] = SIGNED ? carried(left[i]) : _mm512_srli_epi32(left[i], 8);
      }
      packed(_mm512_packus_epi32(byte[0], byte[1]), _mm512_packus_epi32(byte[2], byte[3]), p);
    }
  }
}
inline Quads set1_quad(const void* p) {
  int32_t quad;
  std::memcpy(&quad, p, sizeof quad);
  return _mm512_set1_epi32(quad);
}
// sum + the products of unsigned bytes with signed ones, of each lane; written so for the reason of the `dot` of pairs.
inline Ints dot(Quads bytes, Quads signs, Ints sum) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signs));
  return sum;
}
// The same of signed bytes at p, four for all lanes.
inline Ints dot_quad(Quads bytes, const void* p, Ints sum) {
  using Quad __attribute__((may_alias)) = int32_t;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(bytes), "m"(*static_cast<const Quad*>(p)));
  return sum;
}
// Of numbers that are not negative the larger, and what is no number before all others: they are compared as bits.
inline Vec max_bits(Vec a, Vec b) {
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
// Of x from 2^e up to 2^(e + 1): 2^(bits - 1 - e), by which it gets as many bits, and what takes it back.
inline void powers(Vec x, int bits, Vec& by, Vec& back) {
  const Ints e = _mm512_and_si512(_mm512_castps_si512(x), set1_int(0x7f800000));
  by = _mm512_castsi512_ps(_mm512_sub_epi32(set1_int((254 + bits - 1) << 23), e));
  back = _mm512_castsi512_ps(_mm512_sub_epi32(e, set1_int((bits - 1) << 23)));
}
inline Quads flipped(Quads x) { return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))); }
inline Quads low_nibbles(Quads x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
// Where they are: each is 16 times its code.
inline Quads high_nibbles(Quads x) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(0xf0))); }

// 64 codes of a row; 32 and zeros.
inline Quads row_codes(const void* p) { return _mm512_loadu_si512(p); }
inline Quads row_codes_half(const void* p) {
  return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// Four vectors of words, of which each quarter is turned: out[i] has word i of every quarter of each.
template <class F>
inline __attribute__((always_inline)) void turned(const F& row, Quads* out) {
  const Quads t0 = row(0), t1 = row(1), t2 = row(2), t3 = row(3);
  const Quads a = _mm512_unpacklo_epi32(t0, t1), b = _mm512_unpackhi_epi32(t0, t1);
  const Quads c = _mm512_unpacklo_epi32(t2, t3), d = _mm512_unpackhi_epi32(t2, t3);
  out[0] = _mm512_unpacklo_epi64(a, c);
  out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d);
  out[3] = _mm512_unpackhi_epi64(b, d);
}
// 32 bytes of 16 rows, which begin at row(0) .. row(15): lane r of out[c] has bytes 4 c .. 4 c + 3 of row r.
template <class F>
inline __attribute__((always_inline)) void columns(const F& row, Quads* out) {
  const auto pair = [&](int r) __attribute__((always_inline)) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(r)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(r + 4))), 1);
  };
  Quads low[4], high[4];
  turned([&](int r) __attribute__((always_inline)) { return pair(r); }, low);
  turned([&](int r) __attribute__((always_inline)) { return pair(8 + r); }, high);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(low[i], high[i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(low[i], high[i], 0xdd);
  }
}
// The same of rows that follow each other without a gap.
inline void columns(const uint8_t* rows, Quads* out) {
  Quads low[4], high[4];
  turned([&](int r) __attribute__((always_inline)) { return _mm512_loadu_si512(rows + 64 * r); }, low);
  turned([&](int r) __attribute__((always_inline)) { return _mm512_loadu_si512(rows + 64 * (4 + r)); }, high);
  // A register has every other of eight rows in its first half, the others in its second.
  const Ints at = _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_permutex2var_epi32(low[i], at, high[i]);
    out[4 + i] = _mm512_permutex2var_epi32(low[i], _mm512_or_si512(at, set1_int(4)), high[i]);
  }
}

// 32 bytes of four rows, two in each, become quads of a byte of each row, in their order.
inline void quads_of_two(Quads ab, Quads cd, Quads* out) {
  const Quads four = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
  const Quads low = _mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
  out[0] = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(ab, low, cd), four);
  out[1] = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(ab, _mm512_or_si512(low, set1_int(4)), cd), four);
}
inline void quads_of_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, Quads* out) {
  const auto pair = [](const uint8_t* low, const uint8_t* high) __attribute__((always_inline)) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)), 1);
  };
  quads_of_two(pair(a, b), pair(c, d), out);
}
inline void quads_of_four(const uint8_t* rows, Quads* out) {
  quads_of_two(_mm512_loadu_si512(rows), _mm512_loadu_si512(rows + 64), out);
}

// Codes of four rows become quads of a channel each. Lanes stand for channels in an order that `untangle` undoes.
inline void interleave(Quads* x) {
  const Quads a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
  const Quads c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi16(a, c);
  x[1] = _mm512_unpackhi_epi16(a, c);
  x[2] = _mm512_unpacklo_epi16(b, d);
  x[3] = _mm512_unpackhi_epi16(b, d);
}
inline void untangle(Vec* x) {
  const Vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
  const Vec c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

// Every other number of 32.
inline Vec every_other(Vec a, Vec b, bool odd) {
  const Ints at = _mm512_add_epi32(_mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0), set1_int(odd));
  return _mm512_permutex2var_ps(a, at, b);
}

#if defined(KV_PAIRS)
// The same of two rows of 32 bfloat16.
inline void interleave(Pairs& a, Pairs& b) {
  const __m512i x = (__m512i)a, y = (__m512i)b;
  a = (Pairs)_mm512_unpacklo_epi16(x, y);
  b = (Pairs)_mm512_unpackhi_epi16(x, y);
}
// The first numbers of pairs as floats, and the second ones; where both are channels' sums, each in its place.
inline Vec firsts(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)x, 16)); }
inline Vec seconds(Pairs x) {
  return _mm512_castsi512_ps(_mm512_and_si512((__m512i)x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void zip(Vec& a, Vec& b) {
  const Vec x = a, y = b;
  a = _mm512_permutex2var_ps(x, _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0), y);
  b = _mm512_permutex2var_ps(x, _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8), y);
}
inline void untangle(Vec& a, Vec& b) {
  const Vec x = a, y = b;
  a = _mm512_permutex2var_ps(x, _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0), y);
  b = _mm512_permutex2var_ps(x, _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8), y);
}
#endif

}  // namespace kv
#endif
