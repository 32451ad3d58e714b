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

// Rows of all weights stand in one line, from which whoever is free takes a part of what is left: long ones, so that memory
// is read on and on, and at last short ones, so that nobody waits long for the other.
struct Work {
  const Tensor* weights;
  int layers;
  Model* out;
  const float* x;
  const Model* raw;
  int64_t share, least;          // of what is left, how much is taken: one of so many parts, and no fewer rows than these
  int64_t first[MOST_LAYERS + 1];  // of each layer, and behind the last: the number of its first row, where its results stand
  std::atomic<int64_t> next;

  void operator()() {
    const int64_t all = first[layers];
    for (int64_t begin = next.load(), end;;) {
      do {
        if (begin >= all) return;
        end = std::min(all, begin + std::max(least, (all - begin) / share));
      } while (!next.compare_exchange_weak(begin, end));
      for (int layer = 0; layer < layers; ++layer) {
        const int64_t from = std::max(begin, first[layer]), to = std::min(end, first[layer + 1]);
        if (from < to) rows(weights[2 * layer], weights[2 * layer + 1], from - first[layer], to - from, out + first[layer]);
      }
      begin = next.load();
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
  const int64_t least = rows_of_piece<Model>(k, LEAST), share = std::max<int64_t>(1, call->threads * 3 / 2);
  Work work{weights, 0, given[OUT].as<Model>(), wide, given[X].as<Model>(), share, least};
  work.first[0] = 0;
  for (; weights[2 * work.layers]; ++work.layers)
    work.first[work.layers + 1] = work.first[work.layers] + weights[2 * work.layers].size[0];
  const int64_t parts = (work.first[work.layers] + least - 1) / least;
  shared_out(*call, std::min(call->threads, parts), work);
}
