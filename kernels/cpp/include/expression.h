// What a model does to its scores as an expression: operators that C++ has otherwise than PyTorch
// (kernels/cpp/attend/operators.py prints them), and elements of the tensors that it reads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kv {

// Integers of 64 bits wrap around.
inline int64_t wrapped_add(int64_t a, int64_t b) { return static_cast<int64_t>(uint64_t(a) + uint64_t(b)); }
inline int64_t wrapped_sub(int64_t a, int64_t b) { return static_cast<int64_t>(uint64_t(a) - uint64_t(b)); }
inline int64_t wrapped_mul(int64_t a, int64_t b) { return static_cast<int64_t>(uint64_t(a) * uint64_t(b)); }

// Quotients round down, and remainders have the sign of the divisor, which is positive.
template <class T>
inline T floor_divided(T a, T b) {
  return a / b - (a % b < 0);
}
template <class T>
inline T floor_remainder(T a, T b) {
  const T left = a % b;
  return left < 0 ? left + b : left;
}

// A float cut to a whole number; what is none, or beyond those of T, is the least of them, as processors have it.
template <class T, class F>
inline T whole(F x) {
  constexpr F least = static_cast<F>(std::numeric_limits<T>::min());
  return x >= least && x < -least ? static_cast<T>(x) : std::numeric_limits<T>::min();
}

// What is no number stays none, on either side.
template <class F>
inline F least(F a, F b) {
  return a < b || a != a ? a : b;
}
template <class F>
inline F most_of(F a, F b) {
  return a > b || a != a ? a : b;
}
template <class F>
inline F sign_of(F x) {
  return static_cast<F>((x > 0) - (x < 0));
}
// A remainder with the sign of the divisor.
template <class F>
inline F remainder_of(F a, F b) {
  const F left = std::fmod(a, b);
  return left != 0 && (b < 0) != (left < 0) ? left + b : left;
}

// The element of a tensor at some places: counted from the end where negative; beyond it, the nearest.
inline int64_t step(const Tensor& leaf, int dim, int64_t place) {
  const int64_t size = leaf.size[dim];
  place = place < 0 ? place + size : place;
  return std::min(std::max<int64_t>(place, 0), size - 1) * leaf.stride[dim];
}
template <class T, class... Place>
inline T element(const Tensor& leaf, Place... place) {
  int dim = 0;
  int64_t at = 0;
  ((at += step(leaf, dim++, place)), ...);
  return leaf.as<T>()[at];
}

}  // namespace kv
