// Numbers as caches hold them. Each converts to float; conversions from float round to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kv {

// 32 bits of whatever numbers: they move as they are.
using Word = uint32_t __attribute__((may_alias));

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(uint8_t x) { return x; }
inline float to_float(bf16 x) { return as_float(uint32_t{x.bits} << 16); }

inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#endif
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | rest << 13);
  // Subnormal numbers become normal ones: the product with 2^112 moves the exponent's bias.
  const float size = as_float(rest << 13) * 0x1p112f;
  return as_float(sign | as_bits(size));
}

// e4m3 and e5m2 are float16 with fewer bits, the first with its exponent's bias 8 lower.
inline float to_float(e5m2 x) { return to_float(f16{static_cast<uint16_t>(x.bits << 8)}); }
inline float to_float(e4m3 x) {
  const uint16_t half = static_cast<uint16_t>((x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7);
  return to_float(f16{half}) * 256.0f;
}

template <class T>
T rounded(float x);

template <>
inline float rounded<float>(float x) {
  return x;
}

template <>
inline bf16 rounded<bf16>(float x) {
  const uint32_t bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

// `MANTISSA` bits after the point, exponents from `LEAST`: the number's code without its sign, of a finite |x|.
template <int MANTISSA, int LEAST>
inline uint32_t code_of(float size) {
  int exponent = static_cast<int>(as_bits(size) >> 23) - 127;
  exponent = exponent < LEAST ? LEAST : exponent;
  // A mantissa that rounds up to 2^(MANTISSA + 1) is the next exponent's first number, and so is its code.
  const float digits = std::nearbyint(std::ldexp(size, MANTISSA - exponent));
  return static_cast<uint32_t>((exponent - LEAST) << MANTISSA) + static_cast<uint32_t>(digits);
}

template <>
inline f16 rounded<f16>(float x) {
  const uint32_t bits = as_bits(x), sign = bits >> 31 << 15, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  return {static_cast<uint16_t>(sign | code_of<10, -14>(as_float(size)))};
}

template <>
inline e4m3 rounded<e4m3>(float x) {  // at most 448
  const uint32_t bits = as_bits(x);
  return {static_cast<uint8_t>(bits >> 31 << 7 | code_of<3, -6>(as_float(bits & 0x7fffffffu)))};
}

template <>
inline e5m2 rounded<e5m2>(float x) {  // at most 57344
  const uint32_t bits = as_bits(x);
  return {static_cast<uint8_t>(bits >> 31 << 7 | code_of<2, -14>(as_float(bits & 0x7fffffffu)))};
}

// A scale of a power of two in a byte, 2^(byte - 127); 255 is no number (OCP Microscaling Formats 1.0, 5.4).
struct e8m0 {
  uint8_t bits;
};

inline float to_float(e8m0 x) {
  if (x.bits == 255) return as_float(0x7fc00000u);
  return as_float(x.bits == 0 ? 0x00400000u : uint32_t{x.bits} << 23);
}

}  // namespace kv
