// What elements of vectors become, and back; formulas as in kernels/reference/codec.py, rounded alike.
#pragma once

#include <algorithm>

namespace kv {

// The largest finite number of what a float is kept in.
template <class T>
constexpr float most() {
  return 3.402823466e38f;
}
template <>
constexpr float most<bf16>() {
  return 3.38953139e38f;
}
template <>
constexpr float most<f16>() {
  return 65504.0f;
}
template <>
constexpr float most<e4m3>() {
  return 448.0f;
}
template <>
constexpr float most<e5m2>() {
  return 57344.0f;
}

inline float bounded(float x, float limit) {
  // NaN stays what it is.
  return x < -limit ? -limit : x > limit ? limit : x;
}

// A number as it is kept, at most the largest finite one.
template <class T>
inline T clamped(float x) {
  return rounded<T>(bounded(x, most<T>()));
}

inline float divisor(float scale) { return scale == 0.0f ? 1.0f : scale; }

inline float absmax(const float* x, int n) {
  float top = 0.0f;
  for (int i = 0; i < n; ++i) {
    const float size = std::fabs(x[i]);
    top = size > top || size != size ? size : top;
  }
  return top;
}

// The scale of elements of magnitude `size` of which the largest becomes `largest`.
template <class S>
inline S scale_of(float size, float largest) {
  return clamped<S>(size / largest);
}
template <>
inline e8m0 scale_of<e8m0>(float size, float largest) {
  if (size != size) return {255};
  int below = 0;
  std::frexp(largest, &below);
  const int bits = std::min(static_cast<int>(as_bits(size) >> 23), 254);
  return {static_cast<uint8_t>(std::max(bits - (below - 1), 0))};
}

template <class M>
inline void widen(const M* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = to_float(x[i]);
}

template <class M>
inline void narrow(const float* x, int n, M* out) {
  for (int i = 0; i < n; ++i) out[i] = rounded<M>(x[i]);
}

// x as the model's dtype would have it.
template <class M>
inline void round_to(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = to_float(rounded<M>(x[i]));
}

// H x / sqrt(SIZE) by blocks of SIZE channels, butterflies from neighbours to halves (kernels/shared/hadamard.py).
template <int SIZE>
inline void hadamard(float* x, int n) {
  for (int step = 1; step < SIZE; step *= 2)
    for (int start = 0; start < n; start += 2 * step)
      for (int i = start; i < start + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  const float scale = static_cast<float>(std::pow(static_cast<double>(SIZE), -0.5));
  for (int i = 0; i < n; ++i) x[i] *= scale;
}

// Channels START .. START + DIM - 1 turn by the angles of tables' rows, in pairs of halves or of neighbours.
template <int START, int DIM, bool HALVES>
inline void rotate(float* x, const float* cos, const float* sin) {
  float* own = x + START;
  float out[DIM];
  if (HALVES) {
    for (int i = 0; i < DIM / 2; ++i) {
      const float a = own[i], b = own[i + DIM / 2];
      out[i] = a * cos[i] + -b * sin[i];
      out[i + DIM / 2] = b * cos[i + DIM / 2] + a * sin[i + DIM / 2];
    }
  } else {
    for (int i = 0; i < DIM; i += 2) {
      const float a = own[i], b = own[i + 1];
      out[i] = a * cos[i] + -b * sin[i];
      out[i + 1] = b * cos[i + 1] + a * sin[i + 1];
    }
  }
  for (int i = 0; i < DIM; ++i) own[i] = out[i];
}

// Codes of BITS bits, one a byte -> planes without gaps (kernels/reference/packing.py).
template <int BITS>
inline void pack(const uint8_t* codes, int n, uint8_t* out) {
  constexpr int planes[2] = {BITS == 3 ? 2 : BITS, BITS == 3 ? 1 : 0};
  int low = 0;
  for (int width : planes) {
    if (width == 0) continue;
    const int size = n * width / 8;
    for (int c = 0; c < size; ++c) {
      int byte = 0;
      for (int place = 0; place < 8 / width; ++place)
        byte |= (codes[c + place * size] >> low & ((1 << width) - 1)) << (place * width);
      out[c] = static_cast<uint8_t>(byte);
    }
    out += size;
    low += width;
  }
}

template <int BITS, int N>
inline void unpack(const uint8_t* data, uint8_t* codes) {
  if constexpr (BITS == 8) {
    std::memcpy(codes, data, N);
  } else if constexpr (BITS == 3) {
    constexpr int two = N / 4, one = N / 8;
    for (int place = 0; place < 4; ++place)
      for (int c = 0; c < two; ++c) codes[place * two + c] = data[c] >> (2 * place) & 3;
    for (int place = 0; place < 8; ++place)
      for (int c = 0; c < one; ++c) codes[place * one + c] |= (data[two + c] >> place & 1) << 2;
  } else {
    constexpr int size = N * BITS / 8;
    for (int place = 0; place < 8 / BITS; ++place)
      for (int c = 0; c < size; ++c) codes[place * size + c] = data[c] >> (place * BITS) & ((1 << BITS) - 1);
  }
}

// Floats, and fp8 after its scale: what is beyond `limit` becomes it.
template <class T>
inline void to_floats(const float* x, int n, float scale, float limit, T* out) {
  const float by = divisor(scale);
  for (int i = 0; i < n; ++i) out[i] = rounded<T>(bounded(x[i] / by, limit));
}

inline void to_int8(const float* x, int n, float scale, int8_t* out) {
  const float by = divisor(scale);
  for (int i = 0; i < n; ++i) out[i] = static_cast<int8_t>(bounded(std::nearbyint(x[i] / by), 127.0f));
}

// Whole numbers from 0 to `top`, every STEP-th of x.
inline void to_codes(const float* x, int n, int step, float scale, float minimum, float top, uint8_t* out) {
  const float by = divisor(scale);
  for (int i = 0; i < n; ++i) {
    const float q = std::nearbyint((x[i * step] - minimum) / by);
    out[i * step] = static_cast<uint8_t>(q < 0.0f ? 0.0f : q > top ? top : q);
  }
}

// The code of the nearest level: how many thresholds lie below. SIGNED: of the magnitude, the sign is one bit more.
template <bool SIGNED, int COUNT>
inline void to_levels(const float* x, int n, float scale, const float (&threshold)[COUNT], const bool (&upper)[COUNT],
                      uint8_t* out) {
  const float by = divisor(scale);
  for (int i = 0; i < n; ++i) {
    const float own = x[i] / by, size = SIGNED ? std::fabs(own) : own;
    int code = 0;
    for (int t = 0; t < COUNT; ++t) code += upper[t] ? size >= threshold[t] : size > threshold[t];
    if (SIGNED && own < 0.0f) code += COUNT + 1;
    out[i] = static_cast<uint8_t>(code);
  }
}

}  // namespace kv
