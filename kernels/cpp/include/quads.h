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

// Blocks ahead whose rows are asked for, into the processor's second cache: codes are met faster than memory gives them
// where they are asked for when they are needed, and their short rows do not tell a processor where they go on.
constexpr int BLOCKS_AHEAD = 2;
inline void fetch_line(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

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

// Rows wherever they are. ahead: null, or where RUN rows each of a block that is BLOCKS_AHEAD begin, which are apart by `stride`.
template <int RUN>
struct Listed {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t stride;
  const uint8_t* at(int i) const { return rows[i]; }
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

// B times W rows at once, so that what is read of a query serves them all.
template <int B, int Q, int N, int P, class D>
inline void scores_of_some_bytes(const D& q, int first, const uint8_t* const* row, const float* factor, float* scores) {
  Ints sums[B * Q * P];
  each<B>([&](auto b) KV_INLINE {  // codes count from -128 on, below
    each<Q * P>([&](auto s) KV_INLINE { sums[b * Q * P + s] = set1_int(-128 * q.sum[first + s / P][s % P]); });
  });
#pragma GCC unroll 1
  for (int c = 0; c < N; c += 2 * W) {
    Quads column[B][W / 2];
    each<B>([&](auto b) KV_INLINE { columns(row + b * W, c, column[b]); });
    each<W / 2>([&](auto j) KV_INLINE {
      each<B>([&](auto b) KV_INLINE { column[b][j] = flipped(column[b][j]); });
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
  const uint8_t* row[B * W];
  for (int start = 0; start < n; start += B * W) {
    each<B>([&](auto b) KV_INLINE { rows_from(rows, start + b * W, n, row + b * W); });
    if (start + B * W <= n) rows.template fetch<N>(start, B * W);
    scores_of_some_bytes<B, Q, N, P>(q, first, row, factor + start, scores + first * BLOCK + start);
  }
}

// Codes of four bits, the first half of the channels in the low ones; spans have factors, and a least number each.
template <int Q, int N, int P, int SPAN, class D, class Row>
inline void scores_of_nibbles(const D& q, int first, const Row& rows, int n, const float (*factor)[BLOCK],
                              const float (*least)[BLOCK], float* scores) {
  const uint8_t* row[W];
  for (int start = 0; start < n; start += W) {
    rows_from(rows, start, n, row);
    rows.template fetch<N / 2>(start, W);
    Vec total[Q];
    each<Q>([&](auto g) KV_INLINE { total[g] = set1(0.0f); });
#pragma GCC unroll 1
    for (int c = 0; c < N / 2; c += 2 * W) {
      Quads column[W / 2];
      columns(row, c, column);
      each<2>([&](auto half) KV_INLINE {
        const int at = half * (N / 2) + c;
        Ints sums[Q * P];
        each<Q * P>([&](auto s) KV_INLINE { sums[s] = set1_int(0); });
        each<W / 2>([&](auto j) KV_INLINE {
          const Quads codes = half ? high_nibbles(column[j]) : low_nibbles(column[j]);
          each<Q * P>([&](auto s) KV_INLINE {
            sums[s] = dot(codes, set1_quad(q.byte[first + s / P][s % P] + at + 4 * j), sums[s]);
          });
        });
        const Vec by = load(factor[at / SPAN] + start);
        each<Q>([&](auto g) KV_INLINE { total[g] = fma(joined<P>(sums + g * P), by, total[g]); });
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

// Weights of a block as whole numbers.
template <int P>
struct Weights {
  alignas(64) uint8_t byte[P][BLOCK];
  float scale;

  // p: of n slots, and 0 up to the next multiple of W; they are multiplied by `factor`.
  void take(const float* p, const float* factor, int n) {
    Vec x[BLOCK / W], most = set1(0.0f), total = set1(0.0f);
    each<BLOCK / W>([&](auto i) KV_INLINE {
      if (i * W >= n) return;
      x[i] = mul(load(p + i * W), load(factor + i * W));
      most = max(most, x[i]);
      total = add(total, x[i]);
    });
    constexpr float WHOLE = P == 2 ? 65535.0f : 16777200.0f;  // rounded up, too, it has P bytes
    const float top = largest(most);
    const bool finite = all_below(total, set1(INFINITY)), number = finite && top > 0.0f;
    scale = finite ? top / WHOLE : NAN;  // what is no number makes all of the sum none
    const Vec by = set1(number ? WHOLE / top : 0.0f);
    each<BLOCK / W>([&](auto i) KV_INLINE {
      if (i * W >= n) return;
      const Ints whole = to_ints(number ? mul(x[i], by) : set1(0.0f));
      store_bytes(byte[P - 1] + i * W, whole);
      store_bytes(byte[P - 2] + i * W, shifted<8>(whole));
      if constexpr (P == 3) store_bytes(byte[0] + i * W, shifted<16>(whole));
    });
  }
};

// How 4 W codes of a row are read: `get(row, c)`, the two halves of which stand for channels from low(c) and high(c) on.
template <int N>
struct Bytes {
  static constexpr int STEP = 4 * W;
  static Quads get(const uint8_t* row, int c) { return c + STEP <= N ? row_codes(row + c) : row_codes_half(row + c); }
  static constexpr int low(int c) { return c; }
  static constexpr int high(int c) { return c + 2 * W; }
  static constexpr int END = N;
};
template <int N>
struct Nibbles {
  static constexpr int STEP = 2 * W;
  static Quads get(const uint8_t* row, int c) { return row_nibbles(row + c); }
  static constexpr int low(int c) { return c; }
  static constexpr int high(int c) { return N / 2 + c; }
  static constexpr int END = N / 2;
};

// Q queries' sums. weights [Q][SPANS]: one for all channels where SPANS is 1, else one for SPAN of them each.
template <int Q, int P, int N, int SPANS, class Codes, class Row>
inline void weighed(const Weights<P> (*weights)[SPANS], const float (*least)[SPANS], const Row& rows, int n, float* out) {
  constexpr int SPAN = N / SPANS;
  for (int c = 0; c < Codes::END; c += Codes::STEP) {
    const int low = Codes::low(c), high = Codes::high(c);
    const int a = low / SPAN, b = high < N ? high / SPAN : a;
    Ints sums[Q * P * 4];
    each<Q * P * 4>([&](auto s) KV_INLINE { sums[s] = set1_int(0); });
    const auto four = [&](int i, const auto& row) KV_INLINE {
      Quads codes[4];
      each<4>([&](auto t) KV_INLINE { codes[t] = Codes::get(row(t), c); });
      interleave(codes);
      each<Q * P>([&](auto s) KV_INLINE {
        const auto* own = weights[s / P];
        const uint8_t* first = own[a].byte[s % P] + i;
        const Quads by = SPANS == 1 ? set1_quad(first) : set_halves(first, own[b].byte[s % P] + i);
        each<4>([&](auto j) KV_INLINE { sums[s * 4 + j] = dot(by, codes[j], sums[s * 4 + j]); });
      });
    };
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      rows.template fetch<Codes::END>(i, 4);
      four(i, [&](int t) KV_INLINE { return rows.at(i + t); });
    }
    if (i < n) four(i, [&](int t) KV_INLINE { return rows.at(i + t < n ? i + t : n - 1); });
    each<Q>([&](auto g) KV_INLINE {
      Vec x[4];
      const Vec scale = set_halves(weights[g][a].scale, weights[g][b].scale);
      const Vec more = set_halves(least[g][a], least[g][b]);
      each<4>([&](auto j) KV_INLINE {
        const Ints* own = sums + g * P * 4 + j;
        const Ints of[3] = {own[0], own[4], own[4 * (P - 1)]};
        x[j] = fma(joined<P>(of), scale, more);
      });
      untangle(x);
      each<4>([&](auto j) KV_INLINE {
        const int channel = j < 2 ? low + j * W : high + (j - 2) * W;
        float* sum = out + g * padded(N) + channel;
        if (channel < N) store(sum, add(load(sum), x[j]));
      });
    });
  }
}

// out[g] += sum over i < n of p[g * BLOCK + i] row i; out [GROUP][padded(N)]. factor, least: of a row's spans; least may
// be null.
template <int GROUP, int P, int N, int SPANS, class Codes, class Row>
inline void pv_codes(const float* p, const Row& rows, int n, const float (*factor)[BLOCK], const float (*least)[BLOCK],
                     float* out) {
  constexpr int MOST = P == 2 ? 3 : 2;  // queries whose sums fit the registers
  Weights<P> weights[MOST][SPANS];
  float more[MOST][SPANS];
  const auto some = [&](auto queries, int first) {
    constexpr int Q = decltype(queries)::value;
#pragma GCC unroll 4
    for (int g = 0; g < Q; ++g)
      for (int s = 0; s < SPANS; ++s) {
        const float* own = p + (first + g) * BLOCK;
        weights[g][s].take(own, factor[s], n);
        Vec total = set1(0.0f);
        if (least)
          for (int i = 0; i < n; i += W) total = fma(load(own + i), load(least[s] + i), total);
        more[g][s] = least ? sum(total) : 0.0f;
      }
    weighed<Q, P, N, SPANS, Codes>(weights, more, rows, n, out + first * padded(N));
  };
  int g = 0;
  for (; g + MOST <= GROUP; g += MOST) some(std::integral_constant<int, MOST>(), g);
  constexpr int left = GROUP % MOST;
  if constexpr (left != 0) some(std::integral_constant<int, left>(), g);
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
