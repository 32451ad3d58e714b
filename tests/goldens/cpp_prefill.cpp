// many queries of each sequence against decoded keys and values.
// {"dims": [64, 64], "dtype": "bfloat16", "heads": [9, 3], "options": [], "role": "prefill", "site": {"kernels": "cpp", "layout": {"before_rope": false, "keys": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}, "placement": {"kind": "contiguous"}, "retention": {"kind": "sink_window", "positions": "original", "sinks": 4, "window": 60}, "values": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}}, "mask": {"kind": "causal", "window": null}, "score": {"bias": {"kind": "relative", "reach": null}, "sinks": true, "softcap": 30.0}, "sm_scale": 0.125}}
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
enum { OUT, Q, K, V, PLACES, POSITIONS, SINKS, BIAS, ALLOWED, NEAR };

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

inline bool sees(int64_t query, int64_t key) { return key <= query && (key > query - 60 || key < 4); }
// Whether every query from `low` to `high` sees every key of a block, or none does; false: each is asked.
inline bool all_seen(const Keys& keys, int64_t low, int64_t high) { return keys.most <= low && (keys.least > high - 60 || keys.most < 4); }
inline bool none_seen(const Keys& keys, int64_t low, int64_t high) { return keys.least > high || (keys.most <= low - 60 && keys.least >= 4); }

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
  for (int j = 0; j < BLOCK; j += W) store(scores + j, mul(tanh(div(load(scores + j), set1(0x1.e000000000000p+4f))), set1(0x1.e000000000000p+4f)));
  if (seen) {
    const Tensor& values = (*this)[BIAS];
    const int64_t of = values.size[0] == 1 ? 0 : head;
    for (int i = 0; i < block.count; ++i) {
      const int64_t key = block.place[i];
      const int64_t query = at;
      scores[i] += values.at<float>(of)[std::min(std::max<int64_t>(query - key, 0), values.size[1] - 1)];
    }
  }
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
    const float sink = (*this)[SINKS].as<float>()[of], below = top;
    top = std::fmax(top, sink);
    more = std::exp(below - top);
    total = total * more + std::exp(sink - top);
    more /= total;
    for (int c = 0; c < WIDTH; c += W) store(own.sum[r] + c, mul(load(own.sum[r] + c), set1(more)));
    narrow(own.sum[r], V_DIM, out);
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
  auto* scratch = static_cast<Scratch*>(call->workspace(threads * sizeof(Scratch)));
  Work work{*call, scratch, batch, queries, k.size[2], tokens, blocks};
  shared_out(*call, threads, work);
}
