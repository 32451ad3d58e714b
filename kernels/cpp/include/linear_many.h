// Products of rows of weights with many vectors. A block of weights is packed as it is read, so that channels follow each
// other: each number of a vector meets all its columns, and sums stay in registers. Weights that are needed next are asked
// for meanwhile, in the order of memory: with few vectors, reading them is what takes the time.
//
// A sum is made in the same order whichever and however many vectors are beside it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "matmul.h"

namespace kv {

// Vectors, and vectors of columns, whose sums fill the registers with what they are made of.
constexpr int TALL = W >= 16 ? 8 : 4, BROAD = 3, COLUMNS = BROAD * W;
constexpr int64_t DEPTH = 1536 + 2 * W;  // channels that are packed at a time, at most: the second cache holds them
constexpr int64_t ROWS_TOGETHER = 512;   // vectors that share a block of packed weights, at most
constexpr int64_t SUMMED = 128;          // channels that are summed before they join a sum: fewer roundings of large sums
constexpr int STEPS = 8;                 // channels that are multiplied between two times of asking
constexpr int64_t PACKING = 5;           // with how many vectors multiplying takes as long as packing

// Of `all`, cut into `parts` alike: where one begins. Channels are cut at whole vectors, so that a part may have up to 2 W
// more than another.
inline int64_t cut(int64_t all, int64_t parts, int64_t part) { return part * all / parts; }
inline int64_t cut_channels(int64_t all, int64_t parts, int64_t part) {
  return part >= parts ? all : cut(all, parts, part) / (2 * W) * (2 * W);
}

// Sums [R][COLUMNS] of R vectors, `lda` apart, with packed columns become or gain the products over `units` channels (pairs
// of them, where these are multiplied). lines: that are asked for every STEPS.
template <int R, class T>
inline void tile(const T* x, int64_t lda, const T* packed, int64_t units, bool gain, float* sums, Ahead& ahead, int64_t lines) {
  Vec total[R][BROAD];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < BROAD; ++v) total[m][v] = set1(0.0f);
  for (int64_t k = 0; k < units; ++k) {
    if (k % STEPS == 0) ahead.ask(lines);
    step<R>(x + k * PAIR<T>, lda, packed + k * COLUMNS * PAIR<T>, total);
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < BROAD; ++v) {
      float* to = sums + m * COLUMNS + v * W;
      store(to, gain ? add(load(to), total[m][v]) : total[m][v]);
    }
}

// y[m][n] = sum over k of x[m][k] w[n][k], + b[n], of dense x and y. T: what is multiplied. Blocks of COLUMNS rows of w, for
// up to ROWS_TOGETHER vectors, are taken by whoever is free.
template <class Model, class T>
struct ManyRows {
  struct Scratch {
    alignas(64) T packed[DEPTH * COLUMNS];
    alignas(64) float sums[ROWS_TOGETHER][COLUMNS];
    alignas(64) T part[W][W * PAIR<T>];
  };

  const Call& call;
  const Tensor& out;
  const Tensor& weight;
  const Tensor& bias;
  const Model* given;
  T* x;  // the same as it is multiplied, where that is something else
  int64_t lda, rows, row_blocks, tasks;
  Scratch* scratch;
  std::atomic<int64_t> next, worker, begun, held;

  void operator()() {
    Scratch& own = scratch[worker.fetch_add(1)];
    if (!as_given()) hold_all();
    const int64_t channels = weight.size[1], depths = parts_of(channels, DEPTH - 2 * W);
    bool cold = true;  // nobody has asked for what is read
    int64_t mine = next.fetch_add(1);
    while (mine < tasks) {
      const int64_t then = next.fetch_add(1);  // taken now, so that its weights can be asked for
      const int64_t block = mine % row_blocks, column = column_of(mine);
      const int64_t row = cut(rows, row_blocks, block), count = cut(rows, row_blocks, block + 1) - row;
      for (int64_t depth = 0; depth < depths; ++depth) {
        const int64_t start = cut_channels(channels, depths, depth), end = cut_channels(channels, depths, depth + 1);
        Ahead ahead{};
        if (depth + 1 < depths) {
          ahead = weights(column, COLUMNS, end, cut_channels(channels, depths, depth + 2));
        } else if (then < tasks && column_of(then) != column) {
          ahead = weights(column_of(then), COLUMNS, 0, cut_channels(channels, depths, 1));
        }
        multiply(own, row, count, column, start, end, cold, ahead);
        cold = false;
      }
      finish(own, row, count, column);
      mine = then;
    }
  }

  bool as_given() const { return static_cast<const void*>(x) == given; }

  // All vectors are held when this returns; who takes some returns with the others.
  void hold_all() {
    const int64_t channels = weight.size[1];
    for (int64_t m = begun.fetch_add(1); m < rows; m = begun.fetch_add(1)) {
      T* to = x + m * lda;
      hold(given + m * channels, static_cast<int>(channels), to);
      for (int64_t c = channels; c < lda; ++c) to[c] = T{};
      held.fetch_add(1, std::memory_order_release);
    }
    while (held.load(std::memory_order_acquire) < rows) pause();
  }

  // Blocks of the same weights follow each other.
  int64_t column_of(int64_t task) const { return task / row_blocks * COLUMNS; }

  int width_of(int64_t column) const { return static_cast<int>(std::min<int64_t>(COLUMNS, weight.size[0] - column)); }

  // Channels start .. end - 1 of up to `most` rows of the weights.
  Ahead weights(int64_t column, int most, int64_t start, int64_t end) const {
    return of_weights<Model>(weight, column, column + std::min(most, width_of(column)), start, end);
  }

  // Sums of `count` vectors with COLUMNS rows of the weights gain channels start .. end - 1.
  void multiply(Scratch& own, int64_t row, int64_t count, int64_t column, int64_t start, int64_t end, bool cold, Ahead& ahead) {
    const int64_t units = parts_of(end - start, PAIR<T>), blocks = parts_of(count, TALL);
    // Lines share out over all of the time: of packing, in which the first block's own are asked for, and of multiplying.
    const int64_t packs = BROAD * parts_of(units, W), while_packing = ahead.lines() * PACKING / (PACKING + count);
    const int64_t of_pack = cold ? 0 : parts_of(while_packing, packs);
    pack(own, column, start, end, cold, ahead, of_pack);
    const int64_t left = std::max<int64_t>(0, ahead.lines() - of_pack * packs);
    const int64_t of_step = parts_of(left, blocks * parts_of(units, STEPS));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = cut(count, blocks, block), vectors = cut(count, blocks, block + 1) - first;
      for (int64_t k = 0; k < units; k += SUMMED)
        tiles<TALL>(vectors, x + (row + first) * lda + start + k * PAIR<T>, own.packed + k * COLUMNS * PAIR<T>,
                    std::min(SUMMED, units - k), start + k > 0, own.sums[first], ahead, of_step);
    }
  }

  template <int R>
  void tiles(int64_t vectors, const T* from, const T* packed, int64_t units, bool gain, float* sums, Ahead& ahead, int64_t lines) {
    if constexpr (R > 1)
      if (vectors < R) return tiles<R - 1>(vectors, from, packed, units, gain, sums, ahead, lines);
    tile<R>(from, lda, packed, units, gain, sums, ahead, lines);
  }

  // Channels start .. end - 1 of COLUMNS rows of the weights: unit k of row n at [k][n]. Rows beyond the weights are zeros.
  void pack(Scratch& own, int64_t column, int64_t start, int64_t end, bool cold, Ahead& ahead, int64_t lines) {
    constexpr int LENGTH = W * PAIR<T>;
    const int64_t stride = weight.stride[0];
    const int width = width_of(column);
    for (int j = 0; j < COLUMNS; j += W) {
      const int there = std::clamp(width - j, 0, W);
      Ahead below{};
      if (cold && j + W < width) below = weights(column + j + W, W, start, end);
      for (int64_t k = start; k < end; k += LENGTH) {
        below.ask(W);
        ahead.ask(lines);
        const Model* from = weight.as<Model>() + (column + j) * stride + k;
        Word* to = reinterpret_cast<Word*>(own.packed) + (k - start) / PAIR<T> * COLUMNS + j;
        const int length = static_cast<int>(std::min<int64_t>(LENGTH, end - k));
        if (there == W && length == LENGTH && turned(from, stride, to)) continue;
        std::memset(own.part, 0, sizeof own.part);
        for (int i = 0; i < there; ++i) hold(from + i * stride, length, own.part[i]);
        transpose(reinterpret_cast<const Word*>(own.part[0]), W, to, COLUMNS);
      }
    }
  }

  // W whole vectors of W rows, straight from the weights; whether it could be.
  static bool turned(const Model* from, int64_t stride, Word* to) {
    if constexpr (!std::is_same_v<T, Model>) {
      transpose_wide(from, stride, to, COLUMNS);
      return true;
    } else {
      if (stride % PAIR<T> != 0) return false;
      transpose(reinterpret_cast<const Word*>(from), stride / PAIR<T>, to, COLUMNS);
      return true;
    }
  }

  void finish(Scratch& own, int64_t row, int64_t count, int64_t column) {
    const int width = width_of(column);
    for (int64_t m = 0; m < count; ++m) {
      float* y = own.sums[m];
      if (bias)
        for (int c = 0; c < width; ++c) y[c] += to_float(bias.as<Model>()[column + c]);
      narrow(y, width, out.as<Model>() + (row + m) * weight.size[0] + column);
    }
  }
};

template <class Model, class T>
void many_rows(const Call& call, const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t rows) {
  using Work = ManyRows<Model, T>;
  using Scratch = typename Work::Scratch;
  const int64_t channels = weight.size[1], lda = parts_of(channels, PAIR<T>) * PAIR<T>;
  const int64_t row_blocks = parts_of(rows, ROWS_TOGETHER), tasks = row_blocks * parts_of(weight.size[0], COLUMNS);
  if (tasks == 0) return;
  const int64_t threads = std::min(call.threads, tasks);
  const bool as_given = std::is_same_v<T, Model> && lda == channels;
  const int64_t held = as_given ? 0 : parts_of(rows * lda * sizeof(T), 64) * 64;
  char* space = static_cast<char*>(call.workspace(held + threads * sizeof(Scratch)));
  auto* vectors = as_given ? static_cast<T*>(x.data) : reinterpret_cast<T*>(space);
  auto* scratch = reinterpret_cast<Scratch*>(space + held);
  Work work{call, out, weight, bias, x.as<Model>(), vectors, lda, rows, row_blocks, tasks, scratch};
  shared_out(call, threads, work);
}

}  // namespace kv
