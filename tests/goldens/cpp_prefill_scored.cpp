// many queries of each sequence against decoded keys and values.
// {"dims": [64, 64], "dtype": "bfloat16", "heads": [9, 3], "options": ["columns"], "role": "prefill", "site": {"kernels": "cpp", "layout": {"before_rope": false, "keys": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}, "placement": {"kind": "slots"}, "retention": {"granularity": "layer", "heavy": 100, "kind": "scored", "method": "snapkv", "pooling": "max", "positions": "original", "prefill": "full", "recent": 24, "rows": 16, "score": "vote", "sinks": 4, "smooth": 1}, "values": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}}, "mask": {"kind": "causal", "window": null}, "sm_scale": 0.125}}
#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "matmul.h"
#include "weights.h"

using namespace kv;

namespace {

using Model = bf16;
using T = Operand<Model>;
constexpr int QO_HEADS = 9, KV_HEADS = 3, GROUP = QO_HEADS / KV_HEADS;
constexpr int DIM = 64, V_DIM = 64;
constexpr int DEPTH = even<T>(DIM), WIDTH = padded(V_DIM);
constexpr float SM_SCALE = 0x1.0000000000000p-3f;
enum { OUT, Q, K, V, PLACES, POSITIONS, SINKS, BIAS, ALLOWED, COLUMNS, QUERY_PLACES, KEY_PLACES };

// Tokens whose queries meet a block of keys together, at most, and rows of queries: a group's stand one behind the other.
constexpr int TOKENS = 128;
constexpr int QUERIES = (TOKENS * GROUP + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;

// What a worker has to itself.
struct Scratch {
  alignas(64) T q[QUERIES][DEPTH];
  alignas(64) T keys[DEPTH * BLOCK];
  alignas(64) T values[BLOCK * WIDTH];
  alignas(64) float scores[TILE_ROWS][BLOCK];
  alignas(64) T p[TILE_ROWS][BLOCK];
  alignas(64) float sum[QUERIES][WIDTH];
  SoFar so_far[QUERIES];
  uint64_t seen[TOKENS];  // of each token: which keys of the block
  alignas(64) float share[TOKENS][BLOCK];  // of each token: the largest of what its heads give the keys
};

// A block of keys: their positions, -1 where there is none, and the least and the greatest of those there are.
struct Keys {
  int64_t start;
  int count;
  bool whole;  // whether each of BLOCK keys is there
  int64_t place[BLOCK], least, most;

  void find(const int64_t* places, int64_t stride, int64_t first, int64_t end) {
    start = first;
    count = static_cast<int>(std::min<int64_t>(BLOCK, end - first));
    whole = count == BLOCK;
    least = INT64_MAX;
    most = -1;
    for (int j = 0; j < count; ++j) {
      place[j] = places[(first + j) * stride];
      if (place[j] < 0) {
        whole = false;
        continue;
      }
      least = std::min(least, place[j]);
      most = std::max(most, place[j]);
    }
  }
};

inline bool sees(int64_t query, int64_t key) { return key <= query; }
// Whether every query from `low` to `high` sees every key of a block, or none does; false: each is asked.
inline bool all_seen(const Keys& keys, int64_t low, int64_t high) { return keys.most <= low; }
inline bool none_seen(const Keys& keys, int64_t low, int64_t high) { return keys.least > high; }

// A block of queries: their positions, negative of padding, and the least and the greatest of the others.
struct Queries {
  int64_t first;
  int count;
  int64_t position[TOKENS], low, high;

  void find(const Tensor& positions, int64_t row, int64_t start, int64_t end) {
    first = start;
    count = static_cast<int>(end - start);
    low = INT64_MAX;
    high = -1;
    for (int t = 0; t < count; ++t) {
      position[t] = *positions.at<int64_t>(row, first + t);
      if (position[t] < 0) continue;
      low = std::min(low, position[t]);
      high = std::max(high, position[t]);
    }
  }
};

struct Work {
  const Call& call;
  Scratch* scratch;
  float* lse;  // [batch][QO_HEADS][queries]: the logarithm of the sum below each query's probabilities
  int64_t batch, queries, keys, tokens, blocks;  // of queries: how many a block has, and how many blocks
  std::atomic<int64_t> next, worker;

  const Tensor& operator[](int number) const { return call.tensors[number]; }
  void operator()();
  void attend(Scratch& own, int64_t row, int64_t head, const Queries& asked);
  bool look(Scratch& own, const Keys& block, int64_t row, const Queries& asked) const;
  void find(Keys& block, int64_t row, int64_t head, int64_t start) const;
  void pack(Scratch& own, const Keys& block, int64_t row, int64_t head) const;
  void finish(float* scores, const Keys& block, int64_t head, int64_t at, uint64_t seen) const;
};

void Work::operator()() {
  Scratch& own = scratch[worker.fetch_add(1)];
  const int64_t heads = batch * KV_HEADS;
  for (;;) {
    const int64_t mine = next.fetch_add(1);
    if (mine >= heads * blocks) return;
    // Late queries see the most: they come first.
    const int64_t first = (blocks - 1 - mine / heads) * tokens, lane = mine % heads;
    Queries asked;
    asked.find((*this)[POSITIONS], lane / KV_HEADS, first, std::min(first + tokens, queries));
    attend(own, lane / KV_HEADS, lane % KV_HEADS, asked);
  }
}

// Which keys of a block each token sees, in own.seen; false: none sees any. Bits are set of keys that are there alone.
bool Work::look(Scratch& own, const Keys& block, int64_t row, const Queries& asked) const {
  const Tensor& allowed = (*this)[ALLOWED];
  if (asked.high < 0 || block.most < 0 || none_seen(block, asked.low, asked.high)) return false;
  if (!allowed && block.whole && all_seen(block, asked.low, asked.high)) {
    for (int t = 0; t < asked.count; ++t) own.seen[t] = asked.position[t] < 0 ? 0 : ~uint64_t{0};
    return true;
  }
  uint64_t any = 0;
  for (int t = 0; t < asked.count; ++t) {
    const int64_t query = asked.position[t];
    uint64_t bits = 0;
    if (query >= 0) {
      const bool* may = allowed ? allowed.at<bool>(row, asked.first + t) + block.start * allowed.stride[2] : nullptr;
      for (int j = 0; j < block.count; ++j) {
        const int64_t key = block.place[j];
        const bool own_key = key >= 0 && sees(query, key) && (!may || may[j * allowed.stride[2]]);
        bits |= uint64_t{own_key} << j;
      }
    }
    any |= own.seen[t] = bits;
  }
  return any != 0;
}

void Work::find(Keys& block, int64_t row, int64_t head, int64_t start) const {
  const Tensor& places = (*this)[PLACES];
  block.find(places.at<int64_t>(row, places.size[1] == 1 ? 0 : head), places.stride[2], start, keys);
}

// The block's keys as columns. What is in a slot without a token may be no number: zeros stand for it.
void Work::pack(Scratch& own, const Keys& block, int64_t row, int64_t head) const {
  const Tensor& k = (*this)[K];
  pack_transposed<DIM, BLOCK, Model>(
      [&](int j) { return block.place[j] < 0 ? nullptr : k.at<Model>(row, head, block.start + j); }, block.count, DIM,
      own.keys);
}

// Products that are scaled become the scores of a query of `head` (of all) at place `at`: -inf where it sees no key.
void Work::finish(float* scores, const Keys& block, int64_t head, int64_t at, uint64_t seen) const {
  for (uint64_t hidden = ~seen; hidden; hidden &= hidden - 1) scores[__builtin_ctzll(hidden)] = -INFINITY;
}

// Queries of a KV head's group.
void Work::attend(Scratch& own, int64_t row, int64_t head, const Queries& asked) {
  const Tensor& v = (*this)[V];
  const int rows = asked.count * GROUP, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int r = 0; r < tiles * TILE_ROWS; ++r) {
    std::memset(own.sum[r], 0, sizeof own.sum[r]);
    std::memset(own.q[r], 0, sizeof own.q[r]);
    own.so_far[r] = {};
    if (r < rows) hold((*this)[Q].at<Model>(row, head * GROUP + r % GROUP, asked.first + r / GROUP), DIM, own.q[r]);
  }
  Keys block;
  for (int64_t start = 0; start < keys && asked.high >= 0; start += BLOCK) {
    find(block, row, head, start);
    if (!look(own, block, row, asked)) continue;
    pack(own, block, row, head);
    pack_rows<V_DIM, BLOCK, WIDTH, Model>(
        [&](int j) { return block.place[j] < 0 ? nullptr : v.at<Model>(row, head, start + j); }, block.count, own.values);
    for (int tile = 0; tile < tiles; ++tile) {
      const int r0 = tile * TILE_ROWS;
      uint64_t any = 0;
      for (int r = r0; r < std::min(r0 + TILE_ROWS, rows); ++r) any |= own.seen[r / GROUP];
      if (!any) continue;
      matmul<DEPTH, BLOCK, BLOCK, false>(own.q[r0], own.keys, DEPTH, SM_SCALE, own.scores[0]);
      for (int m = 0; m < TILE_ROWS; ++m) {
        float* scores = own.scores[m];
        const int r = r0 + m;
        const uint64_t seen = r < rows ? own.seen[r / GROUP] : 0;
        finish(scores, block, head * GROUP + r % GROUP, r < rows ? asked.position[r / GROUP] : -1, seen);
        weigh<V_DIM, Model>(scores, 1.0f, own.so_far[r], own.sum[r], own.p[m]);
      }
      matmul<BLOCK, WIDTH, WIDTH, true>(own.p[0], own.values, BLOCK, 1.0f, own.sum[r0]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t of = head * GROUP + r % GROUP, query = asked.first + r / GROUP;
    Model* out = (*this)[OUT].at<Model>(row, of, query);
    if (asked.position[r / GROUP] < 0) {  // padding
      std::memset(out, 0, V_DIM * sizeof(Model));
      continue;
    }
    float top = own.so_far[r].top, total = sum(own.so_far[r].total), more = 1.0f;
    const float below_all = top + std::log(total);
    lse[(row * QO_HEADS + of) * queries + query] = below_all;
    more /= total;
    for (int c = 0; c < WIDTH; c += W) store(own.sum[r] + c, mul(load(own.sum[r] + c), set1(more)));
    narrow(own.sum[r], V_DIM, out);
  }
}

// Second, when all are known: what the queries that count give each key, pooled over the heads that share a score.
constexpr int UNITS = 1, PER_UNIT = KV_HEADS / UNITS;

struct Columns {
  Work& work;
  int64_t counted, blocks;  // the first query that counts; of keys
  std::atomic<int64_t> next, worker;

  void operator()();
  void sum(Scratch& own, int64_t row, int64_t unit, int64_t start);
  void meet(Scratch& own, int64_t row, int64_t unit, int64_t start, Vec* column);
  void add(Scratch& own, int64_t row, int64_t head, const Keys& block, const Queries& asked, Vec* column);
};

void Columns::operator()() {
  Scratch& own = work.scratch[worker.fetch_add(1)];
  const int64_t units = work.batch * UNITS;
  for (;;) {  // early keys are seen by the most queries: they come first
    const int64_t mine = next.fetch_add(1);
    if (mine >= units * blocks) return;
    sum(own, mine % units / UNITS, mine % units % UNITS, mine / units * BLOCK);
  }
}

void Columns::sum(Scratch& own, int64_t row, int64_t unit, int64_t start) {
  Vec column[BLOCK / W];
  for (Vec& own_column : column) own_column = set1(0.0f);
  alignas(64) float all[BLOCK];
  const int64_t count = std::min<int64_t>(BLOCK, work.keys - start);
  meet(own, row, unit, start, column);
  for (int i = 0; i < BLOCK / W; ++i) store(all + i * W, mul(column[i], set1(1.0f)));
  std::memcpy(work[COLUMNS].at<float>(row, unit, start), all, count * sizeof(float));
}

void Columns::meet(Scratch& own, int64_t row, int64_t unit, int64_t start, Vec* column) {
  Keys block;
  work.find(block, row, unit, start);
  for (int64_t first = counted; first < work.queries; first += TOKENS) {
    Queries asked;
    asked.find(work[POSITIONS], row, first, std::min<int64_t>(first + TOKENS, work.queries));
    if (!work.look(own, block, row, asked)) continue;
    std::memset(own.share, 0, sizeof own.share);
    for (int64_t head = unit * PER_UNIT; head < (unit + 1) * PER_UNIT; ++head) add(own, row, head, block, asked, column);
    for (int t = 0; t < asked.count; ++t)
      for (int i = 0; i < BLOCK / W; ++i) column[i] = kv::add(column[i], load(own.share[t] + i * W));
  }
}

void Columns::add(Scratch& own, int64_t row, int64_t head, const Keys& block, const Queries& asked, Vec* column) {
  const int rows = asked.count * GROUP;
  work.pack(own, block, row, head);
  for (int r0 = 0; r0 < rows; r0 += TILE_ROWS) {
    const int end = std::min(r0 + TILE_ROWS, rows);
    uint64_t any = 0;
    for (int r = r0; r < end; ++r) any |= own.seen[r / GROUP];
    if (!any) continue;
    std::memset(own.q[0], 0, TILE_ROWS * sizeof own.q[0]);
    for (int r = r0; r < end; ++r)
      hold(work[Q].at<Model>(row, head * GROUP + r % GROUP, asked.first + r / GROUP), DIM, own.q[r - r0]);
    matmul<DEPTH, BLOCK, BLOCK, false>(own.q[0], own.keys, DEPTH, SM_SCALE, own.scores[0]);
    for (int r = r0; r < end; ++r) {
      const int token = r / GROUP;
      const uint64_t seen = own.seen[token];
      if (!seen) continue;
      float* scores = own.scores[r - r0];
      const int64_t of = head * GROUP + r % GROUP;
      work.finish(scores, block, of, asked.position[token], seen);
      const Vec lse = set1(work.lse[(row * QO_HEADS + of) * work.queries + asked.first + token]);
      for (int i = 0; i < BLOCK / W; ++i) {
        const Vec p = exp(kv::sub(load(scores + i * W), lse));
        // What is no number stays none, on either side.
        float* share = own.share[token] + i * W;
        store(share, fma(p, set1(0.0f), max(p, load(share))));
      }
    }
  }
}

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  const Tensor &q = call->tensors[Q], &k = call->tensors[K];
  const int64_t batch = q.size[0], queries = q.size[2];
  // Fewer together where else some threads had nothing to do.
  const int64_t share = (queries * batch * KV_HEADS + call->threads * 4 - 1) / (call->threads * 4);
  const int64_t tokens = std::min<int64_t>(TOKENS, std::max<int64_t>({share, 32 / GROUP, 1}));
  const int64_t blocks = (queries + tokens - 1) / tokens, tasks = batch * KV_HEADS * blocks;
  const int64_t threads = std::min(call->threads, tasks);
  const int64_t key_blocks = (k.size[2] + BLOCK - 1) / BLOCK, shares = batch * UNITS * key_blocks;
  const int64_t summing = std::min(call->threads, shares), most = std::max(threads, summing);
  auto* scratch = static_cast<Scratch*>(
      call->workspace(most * sizeof(Scratch) + batch * QO_HEADS * queries * sizeof(float)));
  Work work{*call, scratch, reinterpret_cast<float*>(scratch + most), batch, queries, k.size[2], tokens, blocks};
  shared_out(*call, threads, work);
  Columns columns{work, std::max<int64_t>(queries - 16, 0), key_blocks};
  shared_out(*call, summing, columns);
}
