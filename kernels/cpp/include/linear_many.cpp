// A linear layer of many tokens: y[m][n] = sum over k of x[m][k] w[n][k], + b[n], for processors that have no products of
// the weights' dtype: sums are float. Blocks of weights are packed once for a block of tokens; whoever is free takes one.

#include <algorithm>

#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "linear_few.h"
#include "matmul.h"

using namespace kv;

namespace {

using Model = KV_MODEL;
using T = Operand<Model>;
enum { OUT, X, WEIGHT, BIAS };
constexpr int COLUMNS = 128, DEPTH = 256;  // of packed weights: 128 KiB of floats
constexpr int ROWS_TOGETHER = 64 * TILE_ROWS;

struct Scratch {
  alignas(64) T weights[DEPTH * COLUMNS];
  alignas(64) T x[TILE_ROWS][DEPTH];
  alignas(64) float sums[ROWS_TOGETHER][COLUMNS];
};

struct Work {
  const Call& call;
  Scratch* scratch;
  int64_t rows, row_blocks, tasks;
  std::atomic<int64_t> next, worker;

  void operator()() {
    Scratch& own = scratch[worker.fetch_add(1)];
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= tasks) return;
      // Blocks of the same weights follow each other.
      product(own, mine % row_blocks * ROWS_TOGETHER, mine / row_blocks * COLUMNS);
    }
  }

  void product(Scratch& own, int64_t row, int64_t column) {
    const Tensor &out = call.tensors[OUT], &weight = call.tensors[WEIGHT], &bias = call.tensors[BIAS];
    const int64_t n = weight.size[0], k = weight.size[1];
    const Model* x = call.tensors[X].as<Model>();
    const int count = static_cast<int>(std::min<int64_t>(ROWS_TOGETHER, rows - row));
    const int columns = static_cast<int>(std::min<int64_t>(COLUMNS, n - column));
    std::memset(own.sums, 0, sizeof own.sums[0] * ((count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS));
    for (int64_t start = 0; start < k; start += DEPTH) {
      const int depth = static_cast<int>(std::min<int64_t>(DEPTH, k - start));
      pack_transposed<DEPTH, COLUMNS, Model>(
          [&](int j) { return weight.as<Model>() + (column + j) * weight.stride[0] + start; }, columns, depth, own.weights);
      for (int first = 0; first < count; first += TILE_ROWS) {
        for (int m = 0; m < TILE_ROWS; ++m) {
          const int there = first + m < count ? depth : 0;
          hold(x + (row + first + m) * k + start, there, own.x[m]);
          for (int c = there; c < even<T>(depth); ++c) own.x[m][c] = T{};
        }
        matmul<DEPTH, COLUMNS, COLUMNS, true>(own.x[0], own.weights, even<T>(depth), 1.0f, own.sums[first]);
      }
    }
    for (int m = 0; m < count; ++m) {
      if (bias)
        for (int c = 0; c < columns; ++c) own.sums[m][c] += to_float(bias.as<Model>()[column + c]);
      narrow(own.sums[m], columns, out.as<Model>() + (row + m) * n + column);
    }
  }
};

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor &x = call->tensors[X], &weight = call->tensors[WEIGHT];
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims; ++i) rows *= x.size[i];
  if (rows <= FEW_ROWS) return few_rows<Model>(*call, call->tensors[OUT], x, weight, call->tensors[BIAS], rows);
  const int64_t row_blocks = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
  const int64_t tasks = row_blocks * ((weight.size[0] + COLUMNS - 1) / COLUMNS), threads = std::min(call->threads, tasks);
  if (tasks == 0) return;
  Work work{*call, static_cast<Scratch*>(call->workspace(threads * sizeof(Scratch))), rows, row_blocks, tasks};
  shared_out(*call, threads, work);
}
