// many queries of each sequence against decoded keys and values.
// {"dims": [64, 64], "dtype": "bfloat16", "heads": [9, 3], "options": ["columns"], "role": "prefill", "site": {"kernels": "cpp", "layout": {"before_rope": true, "keys": {"code": "model", "hadamard": false, "residual": 48, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}, "placement": {"kind": "slots"}, "retention": {"granularity": "kv_head", "heavy": 100, "kind": "scored", "method": "h2o", "pooling": "mean", "positions": "in_cache", "prefill": "full", "recent": 56, "rows": 0, "score": "sum", "sinks": 4, "smooth": 1}, "values": {"code": "model", "hadamard": false, "residual": 32, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}}, "mask": {"kind": "causal", "window": null}, "score": {"bias": null, "mod": {"by_distance": true, "empty_rows": true, "instructions": [{"args": [], "dtype": "int64", "op": "h", "value": null}, {"args": [0], "dtype": "int64", "op": "leaf", "value": 0}, {"args": [], "dtype": "int64", "op": "q", "value": null}, {"args": [], "dtype": "int64", "op": "k", "value": null}, {"args": [2, 3], "dtype": "int64", "op": "sub", "value": null}, {"args": [1, 4], "dtype": "bool", "op": "gt", "value": null}], "leaves": ["table"], "mask": 5, "renormalise": null, "score": null, "weight": null}, "sinks": false, "softcap": null}, "sm_scale": 0.125}}
#include KV_VECTORS
#include "attend.h"
#include "call.h"
#include "codes.h"
#include "matmul.h"
#include "weights.h"
#include "expression.h"

using namespace kv;

namespace {

using Model = bf16;
using T = Operand<Model>;
constexpr int QO_HEADS = 9, KV_HEADS = 3, GROUP = QO_HEADS / KV_HEADS;
constexpr int DIM = 64, V_DIM = 64;
constexpr int DEPTH = even<T>(DIM), WIDTH = padded(V_DIM);
constexpr float SM_SCALE = 0x1.0000000000000p-3f;
enum { OUT, Q, K, V, PLACES, POSITIONS, SINKS, BIAS, ALLOWED, COLUMNS, QUERY_PLACES, KEY_PLACES, LEAF0 };

// Tokens whose queries meet a block of keys together, at most, and rows of queries: a group's stand one behind the other.
constexpr int TOKENS = 128;
constexpr int QUERIES = (TOKENS * GROUP + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;

// Tokens whose weights are kept, and rows of their queries.
constexpr int KEPT_TOKENS = std::min(TOKENS, std::max(1, 192 / GROUP));
constexpr int KEPT_ROWS = padded((KEPT_TOKENS * GROUP + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS);
static_assert(KEPT_ROWS <= 64 * TILE_ROWS);

// Of a block's keys, what all heads of a token need: of the token of this number among the new ones.
struct OfKeys {
  int64_t row;
  int32_t e4[BLOCK];
};

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
  OfKeys of;
  alignas(64) float below[KEPT_ROWS];  // of queries: the logarithm of the sum below their probabilities
};

// What is kept of a block of queries until the sums below their probabilities are known: what they give each key is summed up
// of it, and no product is made twice. By blocks of keys: which tiles of queries met it (a bit each), the tops that
// weights were below then, and the weights.
using Weight = std::conditional_t<(W >= 16 && sizeof(Model) == 2), f16, float>;
constexpr int64_t MOST_KEPT = 8388608, MOST_SUMS = 67108864;  // bytes: of a worker, and of all blocks' sums

struct Kept {
  uint64_t* met;
  float* tops;
  Weight* weights;

  static int64_t bytes(int64_t key_blocks) {
    return (key_blocks * sizeof(uint64_t) + 63) / 64 * 64 + key_blocks * KEPT_ROWS * (sizeof(float) + BLOCK * sizeof(Weight));
  }
  Kept(char* memory, int64_t key_blocks)
      : met(reinterpret_cast<uint64_t*>(memory)),
        tops(reinterpret_cast<float*>(memory + (key_blocks * sizeof(uint64_t) + 63) / 64 * 64)),
        weights(reinterpret_cast<Weight*>(tops + key_blocks * KEPT_ROWS)) {}
};

// A block of keys: their positions, -1 where there is none, and the least and the greatest of those there are.
struct Keys {
  int64_t start;
  int count;
  bool whole;  // whether each of BLOCK keys is there
  int64_t place[BLOCK], least, most;
  int64_t at[BLOCK];  // where it counts as standing
  int form[BLOCK];

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

// Keys are the same tokens once for each of these forms, one behind the other: 2 where the key is in full, 1 where the value
// is. A query reads a token in one of them: in full from some position on.
constexpr int FORMS[] = {0, 3, 2}, NUM_FORMS = 3;
inline int64_t keys_from(int64_t query) {
  const int64_t length = query + 1;
  return (length - 48);
}
inline int64_t values_from(int64_t query) {
  const int64_t length = query + 1;
  return (length - 32);
}
inline int form_of(int64_t query, int64_t key) {
  return 2 * (key >= keys_from(query)) + (key >= values_from(query));
}
// Whether every query from `low` on reads all keys of a block in their form, and whether none up to `high` reads any.
inline bool all_read(const Keys& keys, int64_t low) {
  return keys.form[0] == 0 && keys.form[keys.count - 1] == 0 && keys.most < std::min(keys_from(low), values_from(low));
}
inline bool none_read(const Keys& keys, int64_t low, int64_t high) {
  const int form = keys.form[0];
  if (form != keys.form[keys.count - 1]) return false;
  return (form & 2 ? keys.most < keys_from(low) : keys.least >= keys_from(high)) ||
         (form & 1 ? keys.most < values_from(low) : keys.least >= values_from(high));
}

inline bool sees(int64_t query, int64_t key) { return key <= query; }
// Whether every query from `low` to `high` sees every key of a block, or none does; false: each is asked.
inline bool all_seen(const Keys& keys, int64_t low, int64_t high) { return keys.most <= low; }
inline bool none_seen(const Keys& keys, int64_t low, int64_t high) { return keys.least > high; }

// A block of queries: their positions, negative of padding, and the least and the greatest of the others.
struct Queries {
  int64_t first;
  int count;
  int64_t position[TOKENS], low, high;
  int64_t at[TOKENS];  // where it counts as standing

  void find(const Tensor& positions, const Tensor& places, int64_t row, int64_t start, int64_t end) {
    first = start;
    count = static_cast<int>(end - start);
    low = INT64_MAX;
    high = -1;
    for (int t = 0; t < count; ++t) {
      position[t] = *positions.at<int64_t>(row, first + t);
      at[t] = *places.at<int64_t>(row, first + t);
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
  char* kept;      // of each worker; null: nothing is kept
  float* sums;     // [batch][KV_HEADS][blocks][keys, of whole blocks]: what a block of queries gives each key
  int64_t counted;  // the first query that counts
  int64_t batch, queries, keys, tokens, blocks;  // of queries: how many a block has, and how many blocks
  std::atomic<int64_t> next, worker;

  const Tensor& operator[](int number) const { return call.tensors[number]; }
  void operator()();
  void attend(Scratch& own, int64_t row, int64_t head, const Queries& asked, const Kept* keep);
  int64_t key_blocks() const { return (keys + BLOCK - 1) / BLOCK; }
  float* sums_of(int64_t row, int64_t head, int64_t block) const {
    return sums + ((row * KV_HEADS + head) * blocks + block) * key_blocks() * BLOCK;
  }
  void give(const Scratch& own, const Kept& keep, const Queries& asked, float* out) const;
  bool look(Scratch& own, const Keys& block, int64_t row, const Queries& asked) const;
  void find(Keys& block, int64_t row, int64_t head, int64_t start) const;
  void pack(Scratch& own, const Keys& block, int64_t row, int64_t head) const;
  void finish(float* scores, const Keys& block, int64_t head, int64_t at, uint64_t seen, OfKeys& of, int64_t batch, int64_t row) const;
  void modify(float* scores, const Keys& block, int64_t head, int64_t at, OfKeys& of, int64_t batch, int64_t row) const;
};

void Work::operator()() {
  const int64_t self = worker.fetch_add(1);
  Scratch& own = scratch[self];
  const Kept keep(kept + self * Kept::bytes(key_blocks()), key_blocks());
  const int64_t heads = batch * KV_HEADS;
  for (;;) {
    const int64_t mine = next.fetch_add(1);
    if (mine >= heads * blocks) return;
    // Late queries see the most: they come first.
    const int64_t first = (blocks - 1 - mine / heads) * tokens, lane = mine % heads;
    Queries asked;
    asked.find((*this)[POSITIONS], (*this)[QUERY_PLACES], lane / KV_HEADS, first, std::min(first + tokens, queries));
    const bool counts = kept && first + asked.count > counted;
    attend(own, lane / KV_HEADS, lane % KV_HEADS, asked, counts ? &keep : nullptr);
    if (!kept) continue;
    float* sums = sums_of(lane / KV_HEADS, lane % KV_HEADS, first / tokens);
    std::memset(sums, 0, key_blocks() * BLOCK * sizeof(float));
    if (counts && asked.high >= 0) give(own, keep, asked, sums);
  }
}

// Which keys of a block each token sees, in own.seen; false: none sees any. Bits are set of keys that are there alone.
bool Work::look(Scratch& own, const Keys& block, int64_t row, const Queries& asked) const {
  const Tensor& allowed = (*this)[ALLOWED];
  if (asked.high < 0 || block.most < 0 || none_seen(block, asked.low, asked.high)) return false;
  if (none_read(block, asked.low, asked.high)) return false;
  if (!allowed && block.whole && all_seen(block, asked.low, asked.high) && all_read(block, asked.low)) {
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
        const bool own_key = key >= 0 && sees(query, key) && form_of(query, key) == block.form[j] && (!may || may[j * allowed.stride[2]]);
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
  const Tensor& counted = (*this)[KEY_PLACES];
  const int64_t* at = counted.at<int64_t>(row, counted.size[1] == 1 ? 0 : head);
  for (int j = 0; j < block.count; ++j) block.at[j] = at[(start + j) * counted.stride[2]];
  const int64_t each = keys / NUM_FORMS;
  for (int j = 0; j < block.count; ++j) block.form[j] = FORMS[(start + j) / each];
}

// The block's keys as columns. What is in a slot without a token may be no number: zeros stand for it.
void Work::pack(Scratch& own, const Keys& block, int64_t row, int64_t head) const {
  const Tensor& k = (*this)[K];
  pack_transposed<DIM, BLOCK, Model>(
      [&](int j) { return block.place[j] < 0 ? nullptr : k.at<Model>(row, head, block.start + j); }, block.count, DIM,
      own.keys);
}

// What the model does to the scores of a query, of a token of this number among the new ones: mask (0[h] > (q - k)); queries that see nothing give 0.
void Work::modify(float* scores, const Keys& block, int64_t head, int64_t at, OfKeys& of, int64_t batch, int64_t row) const {
  const Tensor& leaf0 = (*this)[LEAF0];
  const int64_t query = at;
  const int32_t e2 = std::max<int64_t>(query, 0);
  if (of.row != row) {
    of.row = row;
    for (int i = 0; i < block.count; ++i) {
      const int64_t key = block.at[i];
      const int32_t e3 = std::max<int64_t>(key, 0);
      const int32_t e4 = e2 - e3;
      of.e4[i] = e4;
    }
  }
  const int32_t e0 = head;
  const int64_t e1 = element<int64_t>(leaf0, e0);
  for (int i = 0; i < block.count; ++i) {
    const int64_t key = block.at[i];
    const float score = scores[i];
    const int32_t e4 = of.e4[i];
    const bool e5 = e1 > e4;
    scores[i] = e5 ? score : -INFINITY;
  }
}

// Products that are scaled become the scores of a query of `head` (of all) at place `at`: -inf where it sees no key.
void Work::finish(float* scores, const Keys& block, int64_t head, int64_t at, uint64_t seen, OfKeys& of, int64_t batch, int64_t row) const {
  if (seen) modify(scores, block, head, at, of, batch, row);
  for (uint64_t hidden = ~seen; hidden; hidden &= hidden - 1) scores[__builtin_ctzll(hidden)] = -INFINITY;
}

// Queries of a KV head's group.
void Work::attend(Scratch& own, int64_t row, int64_t head, const Queries& asked, const Kept* keep) {
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
    own.of.row = -1;
    const int64_t number = start / BLOCK;
    if (keep) keep->met[number] = 0;
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
        finish(scores, block, head * GROUP + r % GROUP, r < rows ? asked.at[r / GROUP] : -1, seen, own.of, row, asked.first + r / GROUP);
        weigh<V_DIM, Model>(scores, 1.0f, own.so_far[r], own.sum[r], own.p[m]);
        if (keep) {
          keep->tops[number * KEPT_ROWS + r] = own.so_far[r].top;
          Weight* weights = keep->weights + (number * KEPT_ROWS + r) * BLOCK;
          for (int i = 0; i < BLOCK; i += W) store(weights + i, load(own.p[m] + i));
        }
      }
      if (keep) keep->met[number] |= uint64_t{1} << tile;
      matmul<BLOCK, WIDTH, WIDTH, true>(own.p[0], own.values, BLOCK, 1.0f, own.sum[r0]);
    }
  }
  if (keep) std::fill_n(own.below, KEPT_ROWS, INFINITY);  // what sees nothing gives nothing
  for (int r = 0; r < rows; ++r) {
    const int64_t of = head * GROUP + r % GROUP, query = asked.first + r / GROUP;
    Model* out = (*this)[OUT].at<Model>(row, of, query);
    if (asked.position[r / GROUP] < 0) {  // padding
      std::memset(out, 0, V_DIM * sizeof(Model));
      continue;
    }
    float top = own.so_far[r].top, total = sum(own.so_far[r].total), more = 1.0f;
    if (total == 0.0f) top = 0.0f, total = 1.0f;  // it sees no key: its result is 0
    const float below_all = top + std::log(total);
    lse[(row * QO_HEADS + of) * queries + query] = below_all;
    if (keep && below_all != -INFINITY) own.below[r] = below_all;
    more /= total;
    for (int c = 0; c < WIDTH; c += W) store(own.sum[r] + c, mul(load(own.sum[r] + c), set1(more)));
    narrow(own.sum[r], V_DIM, out);
  }
}

// What the queries of a block that count give each key.
void Work::give(const Scratch& own, const Kept& keep, const Queries& asked, float* out) const {
  const int from = static_cast<int>(std::max<int64_t>(counted - asked.first, 0));
  alignas(64) float factor[KEPT_ROWS];
  for (int64_t number = 0; number < key_blocks(); ++number) {
    const uint64_t met = keep.met[number];
    if (!met) continue;
    for (int r = 0; r < KEPT_ROWS; r += W)
      store(factor + r, exp(kv::sub(load(keep.tops + number * KEPT_ROWS + r), load(own.below + r))));
    Vec column[BLOCK / W];
    for (Vec& of_keys : column) of_keys = set1(0.0f);
    for (int t = from; t < asked.count; ++t) {
      for (int r = t * GROUP; r < (t + 1) * GROUP; ++r) {
        if (!(met >> r / TILE_ROWS & 1)) continue;
        const Weight* weights = keep.weights + (number * KEPT_ROWS + r) * BLOCK;
        const Vec of_row = set1(factor[r]);
#pragma GCC unroll 16
        for (int i = 0; i < BLOCK / W; ++i) {
          column[i] = fma(load(weights + i * W), of_row, column[i]);
        }
      }
    }
    for (int i = 0; i < BLOCK / W; ++i) store(out + number * BLOCK + i * W, column[i]);
  }
}

// Second, when all are known: what the queries that count give each key, pooled over the heads that share a score.
constexpr int UNITS = 3, PER_UNIT = KV_HEADS / UNITS;

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
  if (work.kept) {
    for (int64_t head = unit * PER_UNIT; head < (unit + 1) * PER_UNIT; ++head)
      for (int64_t of = 0; of < work.blocks; ++of)
        for (int i = 0; i < BLOCK / W; ++i)
          column[i] = kv::add(column[i], load(work.sums_of(row, head, of) + start + i * W));
  } else {
    meet(own, row, unit, start, column);
  }
  for (int i = 0; i < BLOCK / W; ++i) store(all + i * W, mul(column[i], set1(0x1.5555560000000p-2f)));
  std::memcpy(work[COLUMNS].at<float>(row, unit, start), all, count * sizeof(float));
}

void Columns::meet(Scratch& own, int64_t row, int64_t unit, int64_t start, Vec* column) {
  Keys block;
  work.find(block, row, unit, start);
  for (int64_t first = counted; first < work.queries; first += TOKENS) {
    Queries asked;
    asked.find(work[POSITIONS], work[QUERY_PLACES], row, first, std::min<int64_t>(first + TOKENS, work.queries));
    if (!work.look(own, block, row, asked)) continue;
    for (int64_t head = unit * PER_UNIT; head < (unit + 1) * PER_UNIT; ++head) add(own, row, head, block, asked, column);
  }
}

void Columns::add(Scratch& own, int64_t row, int64_t head, const Keys& block, const Queries& asked, Vec* column) {
  const int rows = asked.count * GROUP;
  work.pack(own, block, row, head);
  own.of.row = -1;
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
      work.finish(scores, block, of, asked.at[token], seen, own.of, row, asked.first + token);
      const Vec lse = set1(work.lse[(row * QO_HEADS + of) * work.queries + asked.first + token]);
      for (int i = 0; i < BLOCK / W; ++i) {
        const Vec p = exp(kv::sub(load(scores + i * W), lse));
        column[i] = kv::add(column[i], p);
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
  int64_t tokens = std::min<int64_t>(TOKENS, std::max<int64_t>({share, 32 / GROUP, 1}));
  const int64_t kept = Kept::bytes((k.size[2] + BLOCK - 1) / BLOCK), kept_tokens = std::min<int64_t>(tokens, KEPT_TOKENS);
  const int64_t sums = batch * KV_HEADS * ((queries + kept_tokens - 1) / kept_tokens) * ((k.size[2] + BLOCK - 1) / BLOCK * BLOCK) * sizeof(float);
  const bool keeps = kept <= MOST_KEPT && sums <= MOST_SUMS;
  if (keeps) tokens = kept_tokens;
  const int64_t blocks = (queries + tokens - 1) / tokens, tasks = batch * KV_HEADS * blocks;
  const int64_t threads = std::min(call->threads, tasks);
  const int64_t key_blocks = (k.size[2] + BLOCK - 1) / BLOCK, shares = batch * UNITS * key_blocks;
  const int64_t summing = std::min(call->threads, shares), most = std::max(threads, summing);
  const int64_t lse = (batch * QO_HEADS * queries * sizeof(float) + 63) / 64 * 64;
  const int64_t more = lse + (keeps ? threads * kept + sums : 0);
  auto* scratch = static_cast<Scratch*>(call->workspace(most * sizeof(Scratch) + more));
  char* behind = reinterpret_cast<char*>(scratch + most);
  Work work{*call, scratch, reinterpret_cast<float*>(behind), keeps ? behind + lse : nullptr,
            reinterpret_cast<float*>(behind + lse + threads * kept), 0, batch, queries, k.size[2], tokens, blocks};
  shared_out(*call, threads, work);
  Columns columns{work, 0, key_blocks};
  shared_out(*call, summing, columns);
}
