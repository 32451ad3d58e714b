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

// Rows of all weights stand in one line, of which parts are taken.
struct Work {
  const Tensor* weights;
  int layers;
  Model* out;
  const float* x;
  const Model* raw;
  const int64_t* first;  // of each layer, and behind the last: the number of its first row, where its results stand
  Parts parts;

  void operator()() {
    for (Parts::Part mine = parts.take(); mine.begin < mine.end; mine = parts.take())
      for (int layer = 0; layer < layers; ++layer) {
        const int64_t from = std::max(mine.begin, first[layer]), to = std::min(mine.end, first[layer + 1]);
        if (from < to) rows(weights[2 * layer], weights[2 * layer + 1], from - first[layer], to - from, out + first[layer]);
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
  int64_t first[MOST_LAYERS + 1] = {0};
  int layers = 0;
  for (; weights[2 * layers]; ++layers) first[layers + 1] = first[layers] + weights[2 * layers].size[0];
  const int64_t bytes = k * sizeof(Model);
  Work work{weights, layers, given[OUT].as<Model>(), wide, given[X].as<Model>(), first, {first[layers], 1, bytes, call->threads}};
  shared_out(*call, std::min(call->threads, work.parts.most()), work);
}
