// Linear layers of one token: one, or several of the same vector, whose results follow each other.

#include <algorithm>

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "linear_few.h"

using namespace kv;

namespace {

using Model = KV_MODEL;
enum { OUT, X, WEIGHTS };  // weight and bias of each, and a null behind the last

// Rows of all weights are taken in pieces by whoever is free.
struct Work {
  const Tensor* weights;
  int layers;
  Model* out;
  const float* x;
  const Model* raw;
  int64_t piece[MOST_LAYERS], first[MOST_LAYERS + 1], start[MOST_LAYERS];  // rows of a piece, number of the first, where results stand
  std::atomic<int64_t> next;

  void operator()() {
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= first[layers]) return;
      const int layer = static_cast<int>(std::upper_bound(first, first + layers + 1, mine) - first - 1);
      rows(weights[2 * layer], weights[2 * layer + 1], (mine - first[layer]) * piece[layer], piece[layer], out + start[layer]);
    }
  }

  void rows(const Tensor& weight, const Tensor& bias, int64_t begin, int64_t count, Model* y) {
    const int64_t k = weight.size[1], stride = weight.stride[0], end = std::min(weight.size[0], begin + count);
    for (int64_t row = begin; row < end; ++row) {
      float found = row_sum(weight.as<Model>() + row * stride, x, raw, k);
      if (bias) found += to_float(bias.as<Model>()[row]);
      y[row] = rounded<Model>(found);
    }
  }
};

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor* given = call->tensors;
  const Tensor* weights = given + WEIGHTS;
  const int64_t k = weights->size[1];
  float* wide = static_cast<float*>(call->workspace(k * sizeof(float) + 64));
  widen(given[X].as<Model>(), static_cast<int>(k), wide);
  Work work{weights, 0, given[OUT].as<Model>(), wide, given[X].as<Model>()};
  int64_t outputs = 0;
  work.first[0] = 0;
  for (; weights[2 * work.layers]; ++work.layers) {
    const int own = work.layers;
    const int64_t n = weights[2 * own].size[0];
    work.piece[own] = rows_of_piece<Model>(k);
    work.first[own + 1] = work.first[own] + (n + work.piece[own] - 1) / work.piece[own];
    work.start[own] = outputs;
    outputs += n;
  }
  shared_out(*call, std::min(call->threads, work.first[work.layers]), work);
}
