// A linear layer of many tokens: y[m][n] = sum over k of x[m][k] w[n][k], + b[n], in float: for processors that have no
// products of the weights' dtype, or whose products of float are faster. Blocks of weights and of tokens are held in the
// caches as floats; whoever is free takes the next.

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
enum { OUT, X, WEIGHT, BIAS };
constexpr int PANEL = TILE_WIDTH * W;               // columns whose products with TILE_ROWS rows are in registers
constexpr int DEPTH = 128;                          // of a panel, which the first cache holds
constexpr int COLUMNS = 192 / PANEL * PANEL;        // of weights that are packed at a time, at most
constexpr int ROWS_TOGETHER = 64 * TILE_ROWS;

struct Scratch {
  alignas(64) float weights[COLUMNS / PANEL][DEPTH * PANEL];
  alignas(64) float x[ROWS_TOGETHER][DEPTH];
  alignas(64) float sums[ROWS_TOGETHER][COLUMNS];
};

// Of `all`, cut into as many equal parts as have `most` at most: where one begins.
inline int64_t cut(int64_t all, int64_t parts, int64_t number) { return number * all / parts; }

struct Work {
  const Call& call;
  Scratch* scratch;
  int64_t rows, row_blocks, columns, tasks;
  std::atomic<int64_t> next, worker;

  void operator()() {
    Scratch& own = scratch[worker.fetch_add(1)];
    for (;;) {
      const int64_t mine = next.fetch_add(1);
      if (mine >= tasks) return;
      // Blocks of the same weights follow each other.
      const int64_t block = mine % row_blocks;
      product(own, cut(rows, row_blocks, block), cut(rows, row_blocks, block + 1), mine / row_blocks * columns);
    }
  }

  void product(Scratch& own, int64_t row, int64_t end, int64_t column) {
    const Tensor &out = call.tensors[OUT], &weight = call.tensors[WEIGHT], &bias = call.tensors[BIAS];
    const int64_t n = weight.size[0], k = weight.size[1], depths = (k + DEPTH - 1) / DEPTH;
    const Model* x = call.tensors[X].as<Model>() + row * k;
    const int count = static_cast<int>(end - row), width = static_cast<int>(std::min(columns, n - column));
    const int tiles = (count + TILE_ROWS - 1) / TILE_ROWS, panels = (width + PANEL - 1) / PANEL;
    std::memset(own.sums, 0, sizeof own.sums[0] * tiles * TILE_ROWS);
    for (int64_t piece = 0; piece < depths; ++piece) {
      const int64_t start = piece * DEPTH;
      const int depth = static_cast<int>(std::min<int64_t>(DEPTH, k - start));
      for (int m = 0; m < tiles * TILE_ROWS; ++m) {
        if (m < count) {
          widen(x + m * k + start, depth, own.x[m]);
        } else {
          std::memset(own.x[m], 0, sizeof own.x[m]);
        }
      }
      for (int p = 0; p < panels; ++p) {
        const int first = p * PANEL;
        pack_transposed<DEPTH, PANEL, Model>(
            [&](int j) { return weight.as<Model>() + (column + first + j) * weight.stride[0] + start; },
            std::min(PANEL, width - first), depth, own.weights[p]);
        for (int m = 0; m < tiles * TILE_ROWS; m += TILE_ROWS)
          multiply_into<TILE_WIDTH, DEPTH, PANEL, COLUMNS, true>(own.x[m], own.weights[p], depth, 1.0f, own.sums[m] + first);
      }
    }
    for (int m = 0; m < count; ++m) {
      if (bias)
        for (int c = 0; c < width; ++c) own.sums[m][c] += to_float(bias.as<Model>()[column + c]);
      narrow(own.sums[m], width, out.as<Model>() + (row + m) * n + column);
    }
  }
};

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor &x = call->tensors[X], &weight = call->tensors[WEIGHT];
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dims; ++i) rows *= x.size[i];
  if (rows <= FEW_ROWS) return few_rows<Model>(*call, call->tensors[OUT], x, weight, call->tensors[BIAS], rows);
  const int64_t n = weight.size[0], row_blocks = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
  int64_t columns = COLUMNS;
  // Fewer together where else some threads had nothing to do.
  while (columns > PANEL && row_blocks * ((n + columns - 1) / columns) < 3 * call->threads) columns -= PANEL;
  const int64_t tasks = row_blocks * ((n + columns - 1) / columns), threads = std::min(call->threads, tasks);
  if (tasks == 0) return;
  Work work{*call, static_cast<Scratch*>(call->workspace(threads * sizeof(Scratch))), rows, row_blocks, columns, tasks};
  shared_out(*call, threads, work);
}
