// Products of queries with codes, and sums of weighed codes, as whole numbers: four bytes a lane at once.
//
// A query's channel becomes a whole number of P bytes, as wide as the largest of its channels allows (a power of two,
// so that a bfloat16 stays what it is down to 1/128 of the largest), and its bytes meet the codes one after the other.
// Weights become whole numbers of P bytes likewise, as shares of the largest of their block. Nothing else is rounded.
// Rows have `const uint8_t* at(i)`.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attend.h"
#include "codes.h"

namespace kv {

// Calls f(0) .. f(N - 1), numbers that the compiler knows: so what they number stays in registers.
#define KV_INLINE __attribute__((always_inline))
template <class F, int... I>
inline KV_INLINE void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
inline KV_INLINE void each(const F& f) {
  each_of(f, std::make_integer_sequence<int, N>());
}

// From here on a pointer is in a register, with what is read from it at distances of it: compilers would have a register
// for every distance, of which there are not enough.
template <class T>
inline KV_INLINE void hold(const T*& p) {
  asm("" : "+r"(p));
}

// Asks for what stands BLOCKS_AHEAD blocks behind n rows of `stride` bytes that follow each other without a gap.
inline void fetch_rows(const void* first, int64_t stride, int n) {
  const auto* next = static_cast<const uint8_t*>(first) + BLOCKS_AHEAD * BLOCK * stride;
  for (int64_t at = 0; at < n * stride; at += 64) fetch_line(next + at);
}

// Rows at addresses `base + i * stride`, in bytes.
struct Strided {
  const uint8_t* base;
  int64_t stride;
  const uint8_t* at(int i) const { return base + i * stride; }
  // Asks for what stands BLOCKS_AHEAD blocks behind rows i .. i + n - 1, of BYTES each.
  template <int BYTES>
  void fetch(int i, int n) const {
    const uint8_t* next = base + (i + BLOCKS_AHEAD * BLOCK) * stride;
    for (int at = 0; at < n * BYTES; at += 64) fetch_line(next + at);
  }
};

// The same, but what stands BLOCKS_AHEAD blocks behind the first is elsewhere; null: nothing is asked for.
struct Run : Strided {
  const uint8_t* ahead;
  Run(const uint8_t* base, int64_t stride, const uint8_t* ahead) : Strided{base, stride}, ahead(ahead) {}
  template <int BYTES>
  void fetch(int i, int n) const {
    if (!ahead) return;
    for (int row = i; row < i + n; ++row)
      for (int at = 0; at < BYTES; at += 64) fetch_line(ahead + row * stride + at);
  }
};

// Rows of SIZE bytes that follow each other without a gap.
template <int SIZE>
struct Dense {
  const uint8_t* base;
  const uint8_t* at(int i) const { return base + i * SIZE; }
  // Where W rows from i on stand BLOCKS_AHEAD blocks behind them.
  const uint8_t* behind(int i) const { return at(i + BLOCKS_AHEAD * BLOCK); }
  template <int BYTES>
  void fetch(int i, int n) const {
    const uint8_t* next = behind(i);
    for (int at = 0; at < n * SIZE; at += 64) fetch_line(next + at);
  }
};

// Rows wherever they are. ahead: null, or where RUN rows each of a block that is BLOCKS_AHEAD begin, which are apart by `stride`.
template <int RUN>
struct Listed {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t stride;
  const uint8_t* at(int i) const { return rows[i]; }
  const uint8_t* behind(int i) const { return RUN % W == 0 && ahead ? ahead[i / RUN] + i % RUN * stride : at(i); }
  template <int BYTES>
  void fetch(int i, int n) const {
    constexpr int A_LINE = BYTES < 64 ? 64 / BYTES : 1;
    if (!ahead) return;
    for (int row = i; row < i + n; row += A_LINE)
      for (int at = 0; at < BYTES; at += 64) fetch_line(ahead[row / RUN] + row % RUN * stride + at);
  }
};

#if defined(KV_QUADS)

// The queries of a group as whole numbers: byte 0 is the highest. SPAN channels have a sum of their own.
template <int GROUP, int N, int P, int SPAN>
struct Digits {
  alignas(64) int8_t byte[GROUP][P][N];
  int32_t sum[GROUP][P];       // of all channels, by byte
  float span[GROUP][N / SPAN];  // of the channels of a span, as they were
  float scale[GROUP];          // of one, as a whole number

  void take(const float* q) {
    for (int g = 0; g < GROUP; ++g, q += padded(N)) {
      Vec most = set1(0.0f), total = set1(0.0f);
      for (int s = 0; s < N / SPAN; ++s) {
        Vec own = set1(0.0f);
        for (int c = s * SPAN; c < (s + 1) * SPAN; c += W) {
          const Vec x = load(q + c), size = max(x, sub(set1(0.0f), x));
          most = max(most, size);
          total = add(total, size);
          own = add(own, x);
        }
        span[g][s] = kv::sum(own);
      }
      const bool number = kv::sum(total) < INFINITY;  // what is no number makes every score none
      int exponent = 0;
      // The highest byte is 127 at most, what stands below it counted.
      if (number && std::frexp(largest(most), &exponent) > 0.996f) ++exponent;
      const int shift = std::min(8 * P - 1 - exponent, 120);
      const Vec by = set1(number ? std::ldexp(1.0f, shift) : 0.0f);
      scale[g] = number ? std::ldexp(1.0f, -shift) : NAN;
      for (int c = 0; c < N; c += W) {
        Ints x = to_ints(number ? mul(load(q + c), by) : by);
        for (int p = P - 1; p >= 0; --p) {
          store_bytes(byte[g][p] + c, x);
          x = carried(x);
        }
      }
      for (int p = 0; p < P; ++p) {
        sum[g][p] = 0;
        for (int c = 0; c < N; ++c) sum[g][p] += byte[g][p][c];
      }
    }
  }
};

// What sums by byte are together.
template <int P>
inline Vec joined(const Ints* sums) {
  Vec x = to_float(sums[0]);
  for (int p = 1; p < P; ++p) x = fma(x, set1(256.0f), to_float(sums[p]));
  return x;
}

template <class Row>
inline void rows_from(const Row& rows, int start, int n, const uint8_t** out) {
  if (start + W <= n) {
    for (int r = 0; r < W; ++r) out[r] = rows.at(start + r);
  } else {
    for (int r = 0; r < W; ++r) out[r] = rows.at(start + r < n ? start + r : n - 1);
  }
}

// B times W rows at once, so that what is read of a query serves them all. ahead: where each W of them stand in a block that
// is asked for, a line at a time, as memory gives them.
template <int B, int Q, int N, int P, class D>
inline void scores_of_some_bytes(const D& q, int first, const uint8_t* row, const uint8_t* const* ahead,
                                 const float* factor, float* scores) {
  Ints sums[B * Q * P];
  each<B>([&](auto b) KV_INLINE {  // codes count from -128 on, below
    each<Q * P>([&](auto s) KV_INLINE { sums[b * Q * P + s] = set1_int(-128 * q.sum[first + s / P][s % P]); });
  });
#pragma GCC unroll 1
  for (int c = 0; c < N; c += 2 * W) {
    Quads column[B][W / 2];
    each<B>([&](auto b) KV_INLINE {
      columns([&](int r) KV_INLINE { return row + (b * W + r) * N + c; }, column[b]);
    });
    each<W / 2>([&](auto j) KV_INLINE {
      each<B>([&](auto b) KV_INLINE {
        if (j * 64 < 2 * W * W) fetch_line(ahead[b] + c * W + j * 64);
        column[b][j] = flipped(column[b][j]);
      });
      each<Q * P>([&](auto s) KV_INLINE {
        const Quads own = set1_quad(q.byte[first + s / P][s % P] + c + 4 * j);
        each<B>([&](auto b) KV_INLINE {
          Ints& sum = sums[b * Q * P + s];
          sum = dot(column[b][j], own, sum);
        });
      });
    });
  }
  each<B>([&](auto b) KV_INLINE {
    const Vec by = load(factor + b * W);
    each<Q>([&](auto g) KV_INLINE {
      const Vec whole = mul(joined<P>(sums + (b * Q + g) * P), set1(q.scale[first + g]));
      store(scores + g * BLOCK + b * W, mul(whole, by));
    });
  });
}

template <int Q, int N, int P, class D, class Row>
inline void scores_of_bytes(const D& q, int first, const Row& rows, int n, const float* factor, float* scores) {
  constexpr int B = 2;  // whatever is left: what is compiled twice for it takes as long again
  constexpr bool dense = std::is_same_v<Row, Dense<N>>;
  alignas(64) uint8_t copied[B * W * N];
  for (int start = 0; start < n; start += B * W) {
    const bool whole = start + B * W <= n;
    const uint8_t *row = copied, *ahead[B] = {copied, copied};
    if (whole) {
      each<B>([&](auto b) KV_INLINE { ahead[b] = rows.behind(start + b * W); });
      if constexpr (!dense) rows.template fetch<N>(start, B * W);
    }
    if (dense && whole) row = rows.at(start);
    else
      for (int r = 0; r < B * W; ++r) std::memcpy(copied + r * N, rows.at(start + r < n ? start + r : n - 1), N);
    scores_of_some_bytes<B, Q, N, P>(q, first, row, ahead, factor + start, scores + first * BLOCK + start);
  }
}

// Codes of four bits, the first half of the channels in the low ones; spans have factors, and a least number each. High
// ones stay where they are: 16 times what they mean.
template <int Q, int N, int P, int SPAN, class D, class Row>
inline void scores_of_nibbles(const D& q, int first, const Row& rows, int n, const float (*factor)[BLOCK],
                              const float (*least)[BLOCK], float* scores) {
  const uint8_t* row[W];
  constexpr bool dense = std::is_same_v<Row, Dense<2 * W>>;
  for (int start = 0; start < n; start += W) {
    if constexpr (!dense) rows_from(rows, start, n, row);
    rows.template fetch<N / 2>(start, W);
    Vec total[Q];
    each<Q>([&](auto g) KV_INLINE { total[g] = set1(0.0f); });
#pragma GCC unroll 1
    for (int c = 0; c < N / 2; c += 2 * W) {
      Quads column[W / 2];
      if constexpr (dense) columns(rows.at(start), column);
      else columns([&](int r) KV_INLINE { return row[r] + c; }, column);
      Ints sums[2][Q * P];
      each<2 * Q * P>([&](auto s) KV_INLINE { sums[s % 2][s / 2] = set1_int(0); });
      const int8_t* own = q.byte[first][0] + c;
      hold(own);
      each<W / 2>([&](auto j) KV_INLINE {
        const Quads low = low_nibbles(column[j]), high = high_nibbles(column[j]);
        each<Q * P>([&](auto s) KV_INLINE {
          sums[0][s] = dot_quad(low, own + s * N + 4 * j, sums[0][s]);
          sums[1][s] = dot_quad(high, own + s * N + N / 2 + 4 * j, sums[1][s]);
        });
      });
      const Vec low = load(factor[c / SPAN] + start);
      const Vec high = mul(load(factor[(N / 2 + c) / SPAN] + start), set1(1.0f / 16));
      each<Q>([&](auto g) KV_INLINE {
        total[g] = fma(joined<P>(sums[0] + g * P), low, total[g]);
        total[g] = fma(joined<P>(sums[1] + g * P), high, total[g]);
      });
    }
    each<Q>([&](auto g) KV_INLINE {
      Vec x = mul(total[g], set1(q.scale[first + g]));
      for (int s = 0; s < N / SPAN; ++s) x = fma(load(least[s] + start), set1(q.span[first + g][s]), x);
      store(scores + (first + g) * BLOCK + start, x);
    });
  }
}

// scores[g * BLOCK + i] = q[g] . row i * factor[i] for i < n, of codes that are signed bytes; up to the next multiple
// of 2 W, of factors too.
template <int GROUP, int N, int P, class D, class Row>
inline void qk_bytes(const D& q, const Row& rows, int n, const float* factor, float* scores) {
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) scores_of_bytes<4, N, P>(q, g, rows, n, factor, scores);
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) scores_of_bytes<left, N, P>(q, g, rows, n, factor, scores);
}

template <int GROUP, int N, int P, int SPAN, class D, class Row>
inline void qk_nibbles(const D& q, const Row& rows, int n, const float (*factor)[BLOCK], const float (*least)[BLOCK],
                       float* scores) {
  int g = 0;
  for (; g + 4 <= GROUP; g += 4) scores_of_nibbles<4, N, P, SPAN>(q, g, rows, n, factor, least, scores);
  constexpr int left = GROUP % 4;
  if constexpr (left != 0) scores_of_nibbles<left, N, P, SPAN>(q, g, rows, n, factor, least, scores);
}

// COUNT times the weights of a block, as whole numbers; SIGNED: of bytes that count from -128 to 127, as those of queries.
template <int P, bool SIGNED, int COUNT>
struct Weights {
  alignas(64) uint8_t byte[COUNT][P][BLOCK];
  alignas(64) float scale[padded(COUNT)];

  // Those of number k are p(k)[i] factor(k)[i]; both are 0 where no slot is.
  template <class A, class B>
  void take(const A& p, const B& factor) {
    constexpr int PARTS = BLOCK / W;
    Vec x[COUNT][PARTS], most[COUNT];
    for (int k = 0; k < COUNT; ++k) {
      each<PARTS>([&](auto i) KV_INLINE { x[k][i] = mul(load(p(k) + i * W), load(factor(k) + i * W)); });
      most[k] = x[k][0];
      each<PARTS>([&](auto i) KV_INLINE { most[k] = max_bits(most[k], x[k][i]); });
    }
    alignas(64) float top[padded(COUNT)] = {}, by[padded(COUNT)];
    of_each<COUNT>([](Vec a, Vec b) KV_INLINE { return max_bits(a, b); }, most, top);
    // Rounded up, too, it has P bytes.
    constexpr float MORE = SIGNED ? 1.004f : 1.0f + 1.0f / (1 << 16);
    for (int k = 0; k < COUNT; k += W) {
      const Vec most = mul(max(set1(1e-30f), load(top + k)), set1(MORE));  // what is no number stays none,
      Vec whole, back;
      powers(most, 8 * P - SIGNED, whole, back);
      store(by + k, whole);
      store(scale + k, fma(most, set1(0.0f), back));  // and makes all of the sum none
    }
    for (int k = 0; k < COUNT; ++k) {
      Ints whole[PARTS];
      each<PARTS>([&](auto i) KV_INLINE { whole[i] = to_ints(mul(x[k][i], set1(by[k]))); });
      each<PARTS / 4>([&](auto i) KV_INLINE { store_planes<P, SIGNED>(byte[k][0] + i * 4 * W, BLOCK, whole + 4 * i); });
    }
  }
};

// Adds what sums by byte say of 2 W channels that follow each other to `out`.
template <int P>
inline KV_INLINE void add_sums(const Ints* sums, int by_plane, Vec scale, Vec more, float* out) {
  each<2>([&](auto half) KV_INLINE {
    const Ints of[3] = {sums[half], sums[by_plane + half], sums[by_plane * (P - 1) + half]};
    store(out + half * W, add(load(out + half * W), fma(joined<P>(of), scale, more)));
  });
}

// Q queries' sums of rows of signed bytes.
template <int Q, int P, int N, class Row>
inline void weighed_bytes(const Weights<P, false, Q>& weights, const Row& rows, int n, float* out) {
  for (int c = 0; c < N; c += 4 * W) {
    Ints sums[Q * P * 4];
    each<Q * P * 4>([&](auto s) KV_INLINE { sums[s] = set1_int(0); });
    const auto four = [&](int i, const auto& row) KV_INLINE {
      Quads codes[4];
      each<4>([&](auto t) KV_INLINE {
        codes[t] = c + 4 * W <= N ? row_codes(row(t) + c) : row_codes_half(row(t) + c);
      });
      interleave(codes);
      each<Q * P>([&](auto s) KV_INLINE {
        const Quads by = set1_quad(weights.byte[s / P][s % P] + i);
        each<4>([&](auto j) KV_INLINE { sums[s * 4 + j] = dot(by, codes[j], sums[s * 4 + j]); });
      });
    };
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      if (c == 0) rows.template fetch<N>(i, 4);
      four(i, [&](int t) KV_INLINE { return rows.at(i + t); });
    }
    if (i < n) four(i, [&](int t) KV_INLINE { return rows.at(i + t < n ? i + t : n - 1); });
    each<Q>([&](auto g) KV_INLINE {
      Vec x[4];
      each<4>([&](auto j) KV_INLINE {
        const Ints* own = sums + g * P * 4 + j;
        const Ints of[3] = {own[0], own[4], own[4 * (P - 1)]};
        x[j] = mul(joined<P>(of), set1(weights.scale[g]));
      });
      untangle(x);
      each<4>([&](auto j) KV_INLINE {
        float* sum = out + g * padded(N) + c + j * W;
        if (c + j * W < N) store(sum, add(load(sum), x[j]));
      });
    });
  }
}

// The same of codes of four bits, whose spans have weights each, and a sum of what is least: weights, least [Q * SPANS].
template <int Q, int P, int N, int SPANS, class Row>
inline void weighed_nibbles(const Weights<P, true, Q * SPANS>& weights, const float* least, const Row& rows, int n,
                            float* out) {
  constexpr int SPAN = N / SPANS;
  for (int c = 0; c < N / 2; c += 2 * W) {
    const int a = c / SPAN, b = (N / 2 + c) / SPAN;
    Ints sums[Q * P * 4];
    each<Q * P * 4>([&](auto s) KV_INLINE { sums[s] = set1_int(0); });
    const auto four = [&](int i, const Quads* codes) KV_INLINE {
      each<2>([&](auto high) KV_INLINE {
        const Quads x = high ? high_nibbles(codes[0]) : low_nibbles(codes[0]);
        const Quads y = high ? high_nibbles(codes[1]) : low_nibbles(codes[1]);
        each<Q * P>([&](auto s) KV_INLINE {
          Ints* own = sums + s * 4 + 2 * high;
          const uint8_t* by = weights.byte[s / P * SPANS + (high ? b : a)][s % P] + i;
          own[0] = dot_quad(x, by, own[0]);
          own[1] = dot_quad(y, by, own[1]);
        });
      });
    };
    Quads codes[2];
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      rows.template fetch<N / 2>(i, 4);
      if constexpr (std::is_same_v<Row, Dense<2 * W>>) quads_of_four(rows.at(i), codes);
      else quads_of_four(rows.at(i) + c, rows.at(i + 1) + c, rows.at(i + 2) + c, rows.at(i + 3) + c, codes);
      four(i, codes);
    }
    if (i < n) {
      const auto row = [&](int t) KV_INLINE { return rows.at(i + t < n ? i + t : n - 1) + c; };
      quads_of_four(row(0), row(1), row(2), row(3), codes);
      four(i, codes);
    }
    each<Q>([&](auto g) KV_INLINE {
      const Ints* own = sums + g * P * 4;
      float* sum = out + g * padded(N) + c;
      const int low = g * SPANS + a, high = g * SPANS + b;
      add_sums<P>(own, 4, set1(weights.scale[low]), set1(least[low]), sum);
      add_sums<P>(own + 2, 4, set1(weights.scale[high] / 16), set1(least[high]), sum + N / 2);
    });
  }
}

// Calls f(queries, first) for all of a group, a few at a time, whose sums fit the registers.
template <int GROUP, int P, class F>
inline void by_few(const F& f) {
  constexpr int MOST = P == 2 ? 3 : 2, left = GROUP % MOST;
  int g = 0;
  for (; g + MOST <= GROUP; g += MOST) f(std::integral_constant<int, MOST>(), g);
  if constexpr (left != 0) f(std::integral_constant<int, left>(), g);
}

// out[g] += sum over i < n of p[g * BLOCK + i] factor[i] row i, of codes that are signed bytes; out [GROUP][padded(N)].
template <int GROUP, int P, int N, class Row>
inline void pv_bytes(const float* p, const Row& rows, int n, const float* factor, float* out) {
  by_few<GROUP, P>([&](auto queries, int first) {
    constexpr int Q = decltype(queries)::value;
    Weights<P, false, Q> weights;
    weights.take([&](int g) { return p + (first + g) * BLOCK; }, [&](int) { return factor; });
    weighed_bytes<Q, P, N>(weights, rows, n, out + first * padded(N));
  });
}

// The same of codes of four bits: a row's spans have factors, and a least number each.
template <int GROUP, int P, int N, int SPANS, class Row>
inline void pv_nibbles(const float* p, const Row& rows, int n, const float (*factor)[BLOCK], const float (*least)[BLOCK],
                       float* out) {
  by_few<GROUP, P>([&](auto queries, int first) {
    constexpr int Q = decltype(queries)::value;
    constexpr int COUNT = Q * SPANS;
    const auto own = [&](int k) KV_INLINE { return p + (first + k / SPANS) * BLOCK; };
    Weights<P, true, COUNT> weights;
    weights.take(own, [&](int k) KV_INLINE { return factor[k % SPANS]; });
    Vec total[COUNT];
    for (int k = 0; k < COUNT; ++k) {
      total[k] = set1(0.0f);
      each<BLOCK / W>([&](auto i) KV_INLINE {
        total[k] = fma(load(own(k) + i * W), load(least[k % SPANS] + i * W), total[k]);
      });
    }
    alignas(64) float more[padded(COUNT)];
    of_each<COUNT>([](Vec a, Vec b) KV_INLINE { return add(a, b); }, total, more);
    weighed_nibbles<Q, P, N, SPANS>(weights, more, rows, n, out + first * padded(N));
  });
}

// W rows of G numbers each -> x[g] has number g of each; G is a power of two.
template <int G>
inline void by_number(Vec* x) {
  if constexpr (G > 1) {
    Vec even[G / 2], odd[G / 2];
    for (int i = 0; i < G / 2; ++i) {
      even[i] = every_other(x[2 * i], x[2 * i + 1], false);
      odd[i] = every_other(x[2 * i], x[2 * i + 1], true);
    }
    by_number<G / 2>(even);
    by_number<G / 2>(odd);
    for (int i = 0; i < G / 2; ++i) {
      x[2 * i] = even[i];
      x[2 * i + 1] = odd[i];
    }
  }
}

#endif

}  // namespace kv
