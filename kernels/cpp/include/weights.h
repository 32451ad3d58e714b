// The softmax of rows of scores, a block of keys after the other: weights as a product of matrices takes them.
#pragma once

namespace kv {

// The softmax so far of one query: the top of its scores, and the sums of their exponentials below it, a lane each.
struct SoFar {
  float top = -INFINITY;
  Vec total = set1(0.0f);
};

// exp(x - top) as exactly as results of a model's type ask for.
template <class Model>
inline Vec below(Vec x, float top) {
#if defined(KV_PAIRS)
  constexpr float log2e = 1.44269504088896f;
  if constexpr (std::is_same_v<Model, bf16>) return exp2_short(mul(sub(x, set1(top)), set1(log2e)));
#endif
  return exp(sub(x, set1(top)));
}

// Scores of a block, times `scale`, become weights, and `out` (DIM) what it was below the new top. Hidden scores are -inf.
template <int DIM, class Model, class Weight>
inline void weigh(const float* scores, float scale, SoFar& so_far, float* out, Weight* weights) {
  Vec x[BLOCK / W], most = set1(-INFINITY);
#pragma GCC unroll 16
  for (int i = 0; i < BLOCK / W; ++i) most = max(x[i] = mul(load(scores + i * W), set1(scale)), most);
  if (any_above(most, set1(so_far.top))) {  // rare: soon there is a block with the top of all
    const float top = largest(most);
    const Vec less = set1(so_far.top == -INFINITY ? 0.0f : std::exp(so_far.top - top));
    so_far.top = top;
    so_far.total = mul(so_far.total, less);
    for (int c = 0; c < padded(DIM); c += W) store(out + c, mul(load(out + c), less));
  }
  // Where all are hidden so far, there is no top to be below.
  const float top = so_far.top == -INFINITY ? 0.0f : so_far.top;
  Vec total = so_far.total;
#pragma GCC unroll 16
  for (int i = 0; i < BLOCK / W; ++i) {
    const Vec weight = below<Model>(x[i], top);
    total = add(total, weight);
    store(weights + i * W, weight);
  }
  so_far.total = total;
}

}  // namespace kv
