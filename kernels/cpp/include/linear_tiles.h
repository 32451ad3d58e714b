// Products of rows of weights with vectors of bfloat16 by tiles (AMX). Sixteen rows of weights are tiles as they lie, of 32
// channels each, so that none are packed: vectors are turned, once, to tiles of pairs of channels. A tile of sums has a row for
// each row of weights, and a column for each vector.
//
// A sum is made in the same order whichever and however many vectors are beside it.
#pragma once

#include <algorithm>
#include <atomic>

#include "ahead.h"
#include "matmul.h"
#include "tiles.h"

namespace kv {

constexpr int64_t STRIP = 2 * SIDE;        // rows of weights, and vectors, whose sums are in tiles at a time
constexpr int64_t DEEP = 48;               // tiles of channels before other rows of weights have their turn
constexpr int64_t PACKED_BYTES = 1 << 20;  // of vectors that a strip meets: half of the second cache
constexpr int64_t MOST_TOGETHER = 512;     // vectors that a strip meets
constexpr int64_t PACK_TILES = 8;          // of vectors that a thread turns at a time

struct TiledRows {
  struct Scratch {
    alignas(64) Word sums[4 * TILE_WORDS];
    alignas(64) Word pairs[SIDE][SIDE], turned[SIDE][SIDE];
    alignas(64) bf16 edge[STRIP][CHANNELS];  // of weights, what is no whole tile
  };

  const Call& call;
  const Tensor& out;
  const Tensor& weight;
  const Tensor& bias;
  const bf16* given;
  Word* packed;  // vectors: [depth][16 of them][tile of channels][pair of channels][vector]
  Word* kept;    // sums, where channels come in several depths: [strip][32 vectors][4 tiles]
  Scratch* scratch;
  int64_t rows, channels;
  int64_t tiles, depths;              // of channels
  int64_t blocks, together, chunks;   // of 16 vectors; how many of those a strip meets; how often
  int64_t strips;                     // of rows of weights
  std::atomic<int64_t> next{0}, worker{0}, begun{0}, turned{0}, done{0};

  struct Task {
    int64_t depth, chunk, strip;
  };
  int64_t tasks() const { return depths * chunks * strips; }
  Task task(int64_t index) const { return {index / (chunks * strips), index / strips % chunks, index % strips}; }
  int64_t first_tile(int64_t depth) const { return depth * tiles / depths; }

  void operator()() {
    Scratch& own = scratch[worker.fetch_add(1)];
    const Tiles used{};
    turn_all();
    int64_t mine = next.fetch_add(1);
    while (mine < tasks()) {
      const int64_t then = next.fetch_add(1);  // taken now, so that its weights can be asked for
      const Task task = this->task(mine);
      // Others have the sums of the depth before.
      while (done.load(std::memory_order_acquire) < task.depth * chunks * strips) pause();
      // With few vectors there is nothing to do meanwhile, and memory is fastest where nobody asks for it twice.
      Ahead ahead{};
      if (then < tasks() && blocks > 2) ahead = weights(this->task(then));
      meet(own, task, ahead);
      done.fetch_add(1, std::memory_order_release);
      mine = then;
    }
  }

  Ahead weights(const Task& task) const {
    const int64_t row = task.strip * STRIP, last = std::min(row + STRIP, weight.size[0]);
    const int64_t end = std::min(channels, first_tile(task.depth + 1) * CHANNELS);
    return of_weights<bf16>(weight, row, last, first_tile(task.depth) * CHANNELS, end);
  }

  // All vectors are turned when this returns; who takes some returns with the others.
  void turn_all() {
    const int64_t parts = parts_of(tiles, PACK_TILES), all = blocks * parts;
    for (int64_t i = begun.fetch_add(1); i < all; i = begun.fetch_add(1)) {
      const int64_t block = i / parts, first = i % parts * PACK_TILES;
      for (int64_t tile = first; tile < std::min(tiles, first + PACK_TILES); ++tile) turn_vectors(block, tile);
      turned.fetch_add(1, std::memory_order_release);
    }
    while (turned.load(std::memory_order_acquire) < all) pause();
  }

  Word* packed_at(int64_t depth, int64_t block) const {
    const int64_t first = first_tile(depth);
    return packed + (first * blocks + block * (first_tile(depth + 1) - first)) * TILE_WORDS;
  }

  int64_t length_of(int64_t tile) const { return std::min<int64_t>(CHANNELS, channels - tile * CHANNELS); }

  void turn_vectors(int64_t block, int64_t tile) {
    const int64_t vectors = std::min<int64_t>(SIDE, rows - block * SIDE), length = length_of(tile);
    int64_t depth = 0;
    while (first_tile(depth + 1) <= tile) ++depth;
    const bf16* from = given + block * SIDE * channels + tile * CHANNELS;
    int64_t stride = channels;
    alignas(64) bf16 own[SIDE][CHANNELS];
    if (vectors < SIDE || length < CHANNELS || channels % 2 != 0) {
      std::memset(own, 0, sizeof own);
      for (int64_t i = 0; i < vectors; ++i) std::memcpy(own[i], from + i * channels, length * sizeof(bf16));
      from = own[0];
      stride = CHANNELS;
    }
    turn(reinterpret_cast<const Word*>(from), stride / 2, packed_at(depth, block) + (tile - first_tile(depth)) * TILE_WORDS);
  }

  // to [16][16] becomes `from` with rows and columns changed.
  static void turn(const Word* from, int64_t stride, Word* to) {
    for (int i = 0; i < SIDE; i += W)
      for (int j = 0; j < SIDE; j += W) transpose(from + i * stride + j, stride, to + j * SIDE + i, SIDE);
  }

  // A strip meets the vectors of a chunk, in the channels of a depth.
  void meet(Scratch& own, const Task& task, Ahead& ahead) const {
    const int64_t begin = task.chunk * together, last = std::min(blocks, begin + together);
    const int64_t row = task.strip * STRIP, there = std::min<int64_t>(STRIP, weight.size[0] - row);
    const int64_t deep = first_tile(task.depth + 1) - first_tile(task.depth);
    const int64_t lines = parts_of(ahead.lines(), parts_of(last - begin, 2) * deep);
    for (int64_t block = begin; block < last; block += 2) {
      const bool two = block + 1 < last, whole = task.depth + 1 == depths;
      Word* sums = depths > 1 ? kept + (task.strip * parts_of(blocks, 2) + block / 2) * 4 * TILE_WORDS : own.sums;
      begin_sums(sums, task.depth > 0, two);
      two ? multiply<true>(own, task.depth, row, there, block, ahead, lines)
          : multiply<false>(own, task.depth, row, there, block, ahead, lines);
      end_sums(sums, two);
      if (whole) finish(own, sums, row, there, block, two);
    }
  }

  enum { SUMS_A0, SUMS_A1, SUMS_B0, SUMS_B1, ROWS_0, ROWS_1, VECTORS_A, VECTORS_B };

  static void begin_sums(const Word* sums, bool gain, bool two) {
    if (gain) {
      load_tile<SUMS_A0>(sums, 64);
      load_tile<SUMS_A1>(sums + TILE_WORDS, 64);
      if (two) load_tile<SUMS_B0>(sums + 2 * TILE_WORDS, 64);
      if (two) load_tile<SUMS_B1>(sums + 3 * TILE_WORDS, 64);
    } else {
      clear_tile<SUMS_A0>();
      clear_tile<SUMS_A1>();
      clear_tile<SUMS_B0>();
      clear_tile<SUMS_B1>();
    }
  }

  static void end_sums(Word* sums, bool two) {
    store_tile<SUMS_A0>(sums, 64);
    store_tile<SUMS_A1>(sums + TILE_WORDS, 64);
    if (two) store_tile<SUMS_B0>(sums + 2 * TILE_WORDS, 64);
    if (two) store_tile<SUMS_B1>(sums + 3 * TILE_WORDS, 64);
  }

  // Two tiles of rows meet one or two blocks of vectors, in all tiles of a depth. What is no whole tile is copied before.
  template <bool TWO>
  void multiply(Scratch& own, int64_t depth, int64_t row, int64_t there, int64_t block, Ahead& ahead, int64_t lines) const {
    const int64_t start = first_tile(depth), end = first_tile(depth + 1), stride = weight.stride[0];
    const bf16* from = weight.as<bf16>() + row * stride + start * CHANNELS;
    const Word* vectors = packed_at(depth, block);
    const int64_t apart = (end - start) * TILE_WORDS, whole = there < STRIP ? start : std::min(end, channels / CHANNELS);
    for (int64_t tile = start; tile < end; ++tile, from += CHANNELS, vectors += TILE_WORDS) {
      const bf16* rows = from;
      int64_t bytes = stride * sizeof(bf16);
      if (tile >= whole) {
        std::memset(own.edge, 0, sizeof own.edge);
        for (int64_t i = 0; i < there; ++i) std::memcpy(own.edge[i], from + i * stride, length_of(tile) * sizeof(bf16));
        rows = own.edge[0];
        bytes = sizeof own.edge[0];
      }
      ahead.ask(lines);
      load_tile<ROWS_0>(rows, bytes);
      load_tile<VECTORS_A>(vectors, 64);
      multiply_tiles<SUMS_A0, ROWS_0, VECTORS_A>();
      load_tile<ROWS_1>(reinterpret_cast<const char*>(rows) + SIDE * bytes, bytes);
      multiply_tiles<SUMS_A1, ROWS_1, VECTORS_A>();
      if constexpr (TWO) {
        load_tile<VECTORS_B>(vectors + apart, 64);
        multiply_tiles<SUMS_B0, ROWS_0, VECTORS_B>();
        multiply_tiles<SUMS_B1, ROWS_1, VECTORS_B>();
      }
    }
  }

  // Sums become results: two rows of weights become words, and words change rows and columns.
  void finish(Scratch& own, const Word* sums, int64_t row, int64_t there, int64_t block, bool two) const {
    float biases[STRIP] = {};
    if (bias)
      for (int64_t i = 0; i < there; ++i) biases[i] = to_float(bias.as<bf16>()[row + i]);
    for (int side = 0; side <= two; ++side) {
      const float* from = reinterpret_cast<const float*>(sums + side * 2 * TILE_WORDS);
      for (int pair = 0; pair < SIDE; ++pair)
        for (int i = 0; i < SIDE; i += W) {
          const float* low = from + 2 * pair * SIDE + i;
          store_rounded_pairs(own.pairs[pair] + i, add(load(low), set1(biases[2 * pair])),
                              add(load(low + SIDE), set1(biases[2 * pair + 1])));
        }
      turn(own.pairs[0], SIDE, own.turned[0]);
      const int64_t first = (block + side) * SIDE, count = std::min<int64_t>(SIDE, rows - first);
      bf16* to = out.as<bf16>() + first * weight.size[0] + row;
      for (int64_t m = 0; m < count; ++m, to += weight.size[0])
        there == STRIP ? std::memcpy(to, own.turned[m], sizeof own.turned[m])
                       : std::memcpy(to, own.turned[m], there * sizeof(bf16));
    }
  }
};

inline void tiled_rows(const Call& call, const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
                       int64_t rows) {
  using Scratch = TiledRows::Scratch;
  constexpr int64_t tile_bytes = TILE_WORDS * sizeof(Word);
  const int64_t channels = weight.size[1], tiles = parts_of(channels, CHANNELS), blocks = parts_of(rows, SIDE);
  const int64_t strips = parts_of(weight.size[0], STRIP);
  if (strips == 0) return;
  // Few vectors stay in the cache with all their channels.
  const int64_t depths = blocks * tiles * tile_bytes <= PACKED_BYTES ? 1 : parts_of(tiles, DEEP);
  const int64_t fit = PACKED_BYTES / (parts_of(tiles, depths) * tile_bytes);
  const int64_t together = std::clamp<int64_t>(fit / 2 * 2, 2, MOST_TOGETHER / SIDE), chunks = parts_of(blocks, together);
  const int64_t threads = std::min(call.threads, strips);
  const int64_t packed = blocks * tiles * TILE_WORDS, kept = depths > 1 ? parts_of(blocks, 2) * strips * 4 * TILE_WORDS : 0;
  auto* space = static_cast<Word*>(call.workspace((packed + kept) * sizeof(Word) + threads * sizeof(Scratch)));
  auto* scratch = reinterpret_cast<Scratch*>(space + packed + kept);
  TiledRows work{call,     out,    weight, bias,   x.as<bf16>(), space,  space + packed, scratch, rows,
                 channels, tiles,  depths, blocks, together,     chunks, strips};
  shared_out(call, threads, work);
}

}  // namespace kv
