// the new token of each sequence to its slot, and its queries against the slots.
// {"dims": [64, 64], "dtype": "bfloat16", "heads": [9, 3], "options": [], "role": "decode", "site": {"layout": {"before_rope": false, "keys": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}, "placement": {"kind": "slots"}, "retention": {"granularity": "kv_head", "heavy": 100, "kind": "scored", "method": "h2o", "pooling": "mean", "positions": "original", "prefill": "full", "recent": 24, "rows": 0, "score": "sum", "sinks": 4, "smooth": 1}, "values": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}}, "mask": {"kind": "causal", "window": null}, "score": {"bias": {"kind": "alibi", "reach": null}, "sinks": true, "softcap": 30.0}, "sm_scale": 0.125}}
#include KV_VECTORS
#include "pairs.h"
#include "weights.h"
#include "call.h"
#include "codes.h"
#include "address.h"

using namespace kv;

namespace {

using Model = bf16;
constexpr int QO_HEADS = 9, KV_HEADS = 3, GROUP = QO_HEADS / KV_HEADS;
constexpr int DIM = 64;     // channels of queries and keys
constexpr int V_DIM = 64;  // channels that are weighed
constexpr int OUT_DIM = 64;
constexpr float SM_SCALE = 0x1.0000000000000p-3f;
constexpr int64_t SLOTS = 128;
constexpr int64_t BLOCKS = (SLOTS + BLOCK - 1) / BLOCK;
enum { OUT, Q, K, V, POSITIONS, SINKS, BIAS, PAGE_TABLE, COS, SIN, CHOSEN, KEYS_DATA, VALUES_DATA, TOKEN, SCORE };

constexpr int UNITS = 3;  // of a sequence: heads whose new token goes to one slot together are one
constexpr int OF_UNIT = KV_HEADS / UNITS;
// KV heads whose slots are read by turns, a block of each: each has its slots to itself.
constexpr int TOGETHER = 1, LANES = KV_HEADS / TOGETHER;

// Bytes of a query's channel, and of a weight, where they meet codes as whole numbers.
constexpr int PLANES = 2;

struct State {
  const Call& call;
  float* weights;   // [B, KV_HEADS, GROUP, BLOCKS * BLOCK], of what is seen, below the top that was known then
  float* tops;      // [B, KV_HEADS, GROUP, BLOCKS]: that
  int32_t* places;  // [B, UNITS, SLOTS], of what is there
  const Tensor& operator[](int number) const { return call.tensors[number]; }
  // The position of a sequence's new token; negative: it is padding.
  int64_t query(int64_t batch) const { return *(*this)[POSITIONS].at<int64_t>(batch); }
};

// What is said of all of a query's softmax.
struct Softmax {
  float top = -INFINITY, total = 0.0f;
};

struct Partial {
  SoFar softmax[GROUP];
  alignas(64) float sum[GROUP][padded(V_DIM)];
};

// The slots of a block that the query sees, their tokens, and how many there are.
struct Block {
  int count;
  static constexpr bool straight = true;  // the slots follow each other
  int64_t slot[BLOCK], token[BLOCK];

  void find(const State& state, Place at, int64_t start, int64_t n, int64_t length) {
    const int32_t* held = state[TOKEN].at<int32_t>(at.batch, at.head / OF_UNIT) + start;
    for (int64_t i = 0; i < n; ++i) {
      slot[i] = start + i;
      token[i] = held[i];
    }
    count = static_cast<int>(n);
  }

  // Where a key counts as standing.
  int64_t place(const State& state, Place at, int i, int64_t length) const {
    return token[i];
  }
};

// Scores, or weights, of a block times what its vectors are still to be multiplied by.
inline void multiply(float* scores, float* factor, int n) {
  for (int i = n; i < (n + W - 1) / W * W; ++i) factor[i] = 0.0f;
  for (int i = 0; i < n; i += W) {
    const Vec by = load(factor + i);
    for (int g = 0; g < GROUP; ++g) store(scores + g * BLOCK + i, mul(load(scores + g * BLOCK + i), by));
  }
}

// Products become scores: scaled, capped, with their bias.
inline void finish(const State& state, Place at, const Block& block, int64_t length, int g, float* scores) {
  for (int i = 0; i < block.count; i += W) {
    Vec x = mul(load(scores + i), set1(SM_SCALE));
    x = mul(tanh(div(x, set1(0x1.e000000000000p+4f))), set1(0x1.e000000000000p+4f));
    store(scores + i, x);
  }
  const Tensor& values = state[BIAS];
  const int64_t head = values.size[0] == 1 ? 0 : at.head * GROUP + g;
  const int64_t query = length - 1;
  for (int i = 0; i < block.count; ++i) {
    const int64_t key = block.place(state, at, i, length);
    scores[i] += -values.as<float>()[head] * static_cast<float>(query - key);
  }
}

// How many slots of a sequence may hold a token that is seen.
inline int64_t slots_of(const State& state, int64_t batch) {
  const int64_t length = state.query(batch) + 1;
  if (length <= 0) return 0;
  return std::min(length, SLOTS);
}

// The slot of the new token: the next free one, or that of the lowest score, of equals the oldest. It is noted.
int64_t evict(const State& state, int64_t batch, int64_t unit) {
  const int64_t position = state.query(batch);
  int32_t* token = state[TOKEN].at<int32_t>(batch, unit);
  float* score = state[SCORE].at<float>(batch, unit);
  int64_t slot = position;
  if (position >= SLOTS) {
    // Without a branch, and the lowest of each lane, so that a few are looked at together.
    const int32_t newest = static_cast<int32_t>(position - 24);
    const auto leaves = [&](int64_t i) { return (token[i] >= 4) & (token[i] <= newest); };
    const auto value = [&](int64_t i) { return score[i]; };
    constexpr int AT_ONCE = 16;
    alignas(64) float low[AT_ONCE];
    alignas(64) int32_t oldest[AT_ONCE], where[AT_ONCE];
    std::fill(low, low + AT_ONCE, INFINITY);
    std::fill(oldest, oldest + AT_ONCE, INT32_MAX);
    std::fill(where, where + AT_ONCE, static_cast<int32_t>(SLOTS));
    const auto look = [&](int i, int j) KV_INLINE {
      const float x = value(i);
      const int32_t held = token[i];
      const bool lower = leaves(i) & ((x < low[j]) | ((x == low[j]) & (held < oldest[j])));
      low[j] = lower ? x : low[j];
      oldest[j] = lower ? held : oldest[j];
      where[j] = lower ? i : where[j];
    };
    int i = 0;
    for (; i + AT_ONCE <= SLOTS; i += AT_ONCE)
      for (int j = 0; j < AT_ONCE; ++j) look(i + j, j);
    for (; i < SLOTS; ++i) look(i, 0);
    int first = 0;
    for (int j = 1; j < AT_ONCE; ++j)
      if (low[j] < low[first] || (low[j] == low[first] && oldest[j] < oldest[first])) first = j;
    slot = where[first];
    // No scores are numbers: any that may leave does. Where none may, as a token came again and again, what is last does.
    if (slot == SLOTS) slot = std::find_if(token, token + SLOTS - 1, [&](const int32_t& held) { return leaves(&held - token); }) - token;
  }
  token[slot] = static_cast<int32_t>(position);
  score[slot] = 0.0f;
  return slot;
}

// The scores of a unit's slots after its heads' queries, of which `whole` has the softmax.
void note(const State& state, int64_t batch, int64_t unit, const Softmax* whole) {
  float* score = state[SCORE].at<float>(batch, unit);
  const int64_t count = slots_of(state, batch);
  constexpr int64_t HEADS = OF_UNIT * GROUP;
  const int64_t head = (batch * KV_HEADS + unit * OF_UNIT) * GROUP;
  const float* weights = state.weights + head * BLOCKS * BLOCK;
  const float* tops = state.tops + head * BLOCKS;
  float share[HEADS], by[HEADS], top[HEADS];  // shares once for all slots: processors divide slowly
  for (int64_t h = 0; h < HEADS; ++h) {
    share[h] = 1.0f / (whole[h].total * HEADS);
    top[h] = NAN;
  }
  for (int64_t block = 0; block * BLOCK < count; ++block) {
    for (int64_t h = 0; h < HEADS; ++h) {
      const float own = tops[h * BLOCKS + block];
      if (own == top[h]) continue;  // most often: a top that was found stays
      top[h] = own;
      by[h] = own == -INFINITY ? 0.0f : std::exp(own - whole[h].top) * share[h];
    }
    for (int64_t i = block * BLOCK; i < std::min(count, (block + 1) * BLOCK); i += W) {
      Vec pooled = set1(0.0f);
      for (int64_t h = 0; h < HEADS; ++h) {
        const Vec p = mul(load(weights + h * BLOCKS * BLOCK + i), set1(by[h]));
        pooled = add(pooled, p);
      }
      if (i + W <= count) {
        store(score + i, add(load(score + i), pooled));
        continue;
      }
      alignas(64) float gained[W];
      store(gained, pooled);
      for (int64_t j = i; j < count; ++j) score[j] += gained[j - i];
    }
  }
}

// K: model.
namespace keys {

constexpr int N = 64;
using Data = bf16;

template <class T>
inline T* row(const State& state, int part, Place at, int64_t slot) {
  return row_in<T>(state[part], at, slot);
}

// The queries of a group, as they meet the keys.
struct Query {
  alignas(64) float own[GROUP * padded(N)];
#if (defined(KV_PAIRS) && KV_TAKES(64))
  alignas(64) bf16 pairs[GROUP][N];
  void ready() {
    for (int g = 0; g < GROUP; ++g) narrow(own + g * padded(N), N, pairs[g]);  // as they are
  }
#else
  void ready() {}
#endif
};

// What a token becomes: x [N] is spoilt.
inline void write(const State& state, Place at, int64_t slot, int64_t token, float* x) {
  Data* out = row<Data>(state, KEYS_DATA, at, slot);
  narrow(x, N, out);
}

// What stands in a slot, as floats without the scale of their vector.
inline void decode(const State& state, Place at, int64_t slot, float* out) {
  const Rows<Data, N> rows{row<Data>(state, KEYS_DATA, at, slot), 0};
  for (int c = 0; c < padded(N) / W; ++c) store(out + c * W, rows.get(0, c));
}

// The vectors of a block as floats, one behind the other, and what each is still to be multiplied by.
inline void decode_all(const State& state, Place at, const Block& block, int64_t length, float* out, float* factor) {
  for (int i = 0; i < block.count; ++i, out += padded(N)) {
    factor[i] = 1.0f;
    decode(state, at, block.slot[i], out);
  }
}

inline void factors(const State& state, Place at, const Block& block, int64_t length, float* factor) {
}

// Calls `use` with the rows of a block.
template <class Use>
inline void with_rows(const State& state, Place at, const Block& block, int64_t length, const Use& use) {
  const int64_t stride = state[KEYS_DATA].stride[2] * sizeof(Data);
  const auto bytes = [&](int i) { return reinterpret_cast<const uint8_t*>(row<Data>(state, KEYS_DATA, at, block.slot[i])); };
  if (block.straight) return use(Strided{bytes(0), stride});
  const uint8_t* found[BLOCK];
  for (int i = 0; i < block.count; ++i) found[i] = bytes(i);
  use(Listed<1>{found, nullptr, stride});
}

// Scores of the queries with the keys of a block; `decoded` has the keys where they had to be decoded.
void products(const State& state, Place at, const Block& block, int64_t length, const Query& q, float* scores,
              float* decoded) {
#if (defined(KV_PAIRS) && KV_TAKES(64))
    with_rows(state, at, block, length, [&](const auto& rows) { qk_pairs<GROUP, N>(q.pairs[0], rows, block.count, scores); });
    return;
#endif
#if !(defined(KV_PAIRS) && KV_TAKES(64))
  if (block.straight) {
    const Data* ahead = ASKS_FOR_ROWS && block.slot[0] + BLOCKS_AHEAD * BLOCK < std::min(length, SLOTS) ? row<Data>(state, KEYS_DATA, at, block.slot[0] + BLOCKS_AHEAD * BLOCK) : nullptr;
    const Rows<Data, N> rows{row<Data>(state, KEYS_DATA, at, block.slot[0]), state[KEYS_DATA].stride[2], ahead};
    qk<GROUP, N>(q.own, rows, block.count, scores);
  } else {
    const Data* found[BLOCK];
    for (int i = 0; i < block.count; ++i) found[i] = row<Data>(state, KEYS_DATA, at, block.slot[i]);
    const Scattered<Data, N> rows{found};
    qk<GROUP, N>(q.own, rows, block.count, scores);
  }

#endif
}

// The same of several heads from `first` on, which see the same slots.
void products(const State& state, Place first, const Block* blocks, int64_t length, const Query* q,
              float (*scores)[GROUP * BLOCK], float* decoded) {
  for (int h = 0; h < TOGETHER; ++h)
    if (blocks[h].count) products(state, {first.batch, first.head + h}, blocks[h], length, q[h], scores[h], decoded);
}

}  // namespace keys

// V: model.
namespace values {

constexpr int N = 64;
using Data = bf16;

template <class T>
inline T* row(const State& state, int part, Place at, int64_t slot) {
  return row_in<T>(state[part], at, slot);
}

// What a token becomes: x [N] is spoilt.
inline void write(const State& state, Place at, int64_t slot, int64_t token, float* x) {
  Data* out = row<Data>(state, VALUES_DATA, at, slot);
  narrow(x, N, out);
}

// What stands in a slot, as floats without the scale of their vector.
inline void decode(const State& state, Place at, int64_t slot, float* out) {
  const Rows<Data, N> rows{row<Data>(state, VALUES_DATA, at, slot), 0};
  for (int c = 0; c < padded(N) / W; ++c) store(out + c * W, rows.get(0, c));
}

// The vectors of a block as floats, one behind the other, and what each is still to be multiplied by.
inline void decode_all(const State& state, Place at, const Block& block, int64_t length, float* out, float* factor) {
  for (int i = 0; i < block.count; ++i, out += padded(N)) {
    factor[i] = 1.0f;
    decode(state, at, block.slot[i], out);
  }
}

inline void factors(const State& state, Place at, const Block& block, int64_t length, float* factor) {
}

// Calls `use` with the rows of a block.
template <class Use>
inline void with_rows(const State& state, Place at, const Block& block, int64_t length, const Use& use) {
  const int64_t stride = state[VALUES_DATA].stride[2] * sizeof(Data);
  const auto bytes = [&](int i) { return reinterpret_cast<const uint8_t*>(row<Data>(state, VALUES_DATA, at, block.slot[i])); };
  if (block.straight) return use(Strided{bytes(0), stride});
  const uint8_t* found[BLOCK];
  for (int i = 0; i < block.count; ++i) found[i] = bytes(i);
  use(Listed<1>{found, nullptr, stride});
}

// The vectors of a block, weighed by p (which is spoilt), are added to `out`.
void sums(const State& state, Place at, const Block& block, int64_t length, float* p, float* out, float* decoded) {
#if (defined(KV_PAIRS) && KV_TAKES(64))
    with_rows(state, at, block, length, [&](const auto& rows) { pv_pairs<GROUP, V_DIM>(p, rows, block.count, out); });
    return;
#endif
#if !(defined(KV_PAIRS) && KV_TAKES(64))
  if (block.straight) {
    const Data* ahead = ASKS_FOR_ROWS && block.slot[0] + BLOCKS_AHEAD * BLOCK < std::min(length, SLOTS) ? row<Data>(state, VALUES_DATA, at, block.slot[0] + BLOCKS_AHEAD * BLOCK) : nullptr;
    const Rows<Data, V_DIM> rows{row<Data>(state, VALUES_DATA, at, block.slot[0]), state[VALUES_DATA].stride[2], ahead};
    pv<GROUP, V_DIM>(p, rows, block.count, out);
  } else {
    const Data* found[BLOCK];
    for (int i = 0; i < block.count; ++i) found[i] = row<Data>(state, VALUES_DATA, at, block.slot[i]);
    const Scattered<Data, V_DIM> rows{found};
    pv<GROUP, V_DIM>(p, rows, block.count, out);
  }

#endif
}

// The same of several heads from `first` on, which see the same slots.
void sums(const State& state, Place first, const Block* blocks, int64_t length, float (*p)[GROUP * BLOCK], Partial* out,
          float* decoded) {
  for (int h = 0; h < TOGETHER; ++h)
    if (blocks[h].count) sums(state, {first.batch, first.head + h}, blocks[h], length, p[h], out[h].sum[0], decoded);
}

}  // namespace values

// The new token of a sequence takes its slot.
void append(const State& state, Place at, int64_t slot) {
  const int64_t token = state.query(at.batch);
  alignas(64) float x[padded(DIM > V_DIM ? DIM : V_DIM)];
  widen(state[K].at<Model>(at.batch, at.head), DIM, x);
  keys::write(state, at, slot, token, x);
  widen(state[V].at<Model>(at.batch, at.head), OUT_DIM, x);
  values::write(state, at, slot, token, x);
}

// The queries of a group, as they meet the keys.
void queries(const State& state, Place at, keys::Query& q) {
  for (int g = 0; g < GROUP; ++g) {
    float* own = q.own + g * padded(DIM);
    widen(state[Q].at<Model>(at.batch, at.head * GROUP + g), DIM, own);
    for (int i = DIM; i < padded(DIM); ++i) own[i] = 0.0f;
  }
  q.ready();
}

// Slots begin .. end - 1 of heads that are read by turns, from `first` on, with their queries.
void attend(const State& state, Place first, int64_t begin, int64_t end, const keys::Query* q, Partial* out) {
  const int64_t length = state.query(first.batch) + 1;
  alignas(64) float scores[TOGETHER][GROUP * BLOCK];
  alignas(64) float decoded[BLOCK * padded(DIM > V_DIM ? DIM : V_DIM)];
  Block blocks[TOGETHER];
  for (int h = 0; h < TOGETHER; ++h) {
    for (auto& own : out[h].softmax) own = {};
    for (auto& own : out[h].sum) std::memset(own, 0, sizeof own);
  }
  for (int64_t start = begin; start < end; start += BLOCK) {
    for (int h = 0; h < TOGETHER; ++h)
      blocks[h].find(state, {first.batch, first.head + h}, start, std::min<int64_t>(BLOCK, end - start), length);
    if (blocks[0].count == 0) continue;
    keys::products(state, first, blocks, length, q, scores, decoded);
    for (int h = 0; h < TOGETHER; ++h) {
      for (int g = 0; g < GROUP; ++g)
        finish(state, {first.batch, first.head + h}, blocks[h], length, g, scores[h] + g * BLOCK);
      for (int g = 0; g < GROUP; ++g) {
        float* own = scores[h] + g * BLOCK;
        std::fill(own + blocks[h].count, own + BLOCK, -INFINITY);
        weigh<V_DIM, Model>(own, 1.0f, out[h].softmax[g], out[h].sum[g], own);
      }
      // Slots follow each other: a block has those of a stretch of them.
      const int64_t head = (first.batch * KV_HEADS + first.head + h) * GROUP, block = start / BLOCK;
      for (int g = 0; g < GROUP; ++g) {
        float* kept = state.weights + ((head + g) * BLOCKS + block) * BLOCK;
        for (int i = 0; i < BLOCK; i += W) store(kept + i, load(scores[h] + g * BLOCK + i));
        state.tops[(head + g) * BLOCKS + block] = out[h].softmax[g].top;
      }
    }
    values::sums(state, first, blocks, length, scores, out, decoded);
  }
}

// The shares of a head's slots become its result, and what is said of its softmax.
void combine(const State& state, Place at, const Partial* parts, int64_t count, Softmax* whole) {
  // Those of the heads that are read together stand between them.
  for (int g = 0; g < GROUP; ++g) {
    const int64_t head = at.head * GROUP + g;
    Softmax& all = whole[g] = {};
    for (int64_t i = 0; i < count; ++i) all.top = std::fmax(all.top, parts[i * TOGETHER].softmax[g].top);
    const float sink = state[SINKS].as<float>()[head];
    all.top = std::fmax(all.top, sink);
    all.total = std::exp(sink - all.top);
    alignas(64) float sum[padded(V_DIM)] = {};
    for (int64_t i = 0; i < count; ++i) {
      const SoFar& own = parts[i * TOGETHER].softmax[g];
      const float total = kv::sum(own.total);
      if (own.top == -INFINITY && total == 0.0f) continue;  // it saw nothing
      const float share = std::exp(own.top - all.top);
      all.total += total * share;
      for (int c = 0; c < padded(V_DIM); c += W) store(sum + c, fma(load(parts[i * TOGETHER].sum[g] + c), set1(share), load(sum + c)));
    }
#if (defined(KV_PAIRS) && KV_TAKES(64))
    in_order<V_DIM>(sum);
#endif
    for (int c = 0; c < V_DIM; ++c) sum[c] /= all.total;
    narrow(sum, OUT_DIM, state[OUT].at<Model>(at.batch, head));
  }
}

// Pieces that a worker takes before those of others: they follow each other, so what was asked for behind one is its next.
struct Share {
  alignas(64) std::atomic<int64_t> next;
  int64_t end;
};

// What the workers of a call share. A lane is the heads of a sequence that are read together; pieces of slots are
// numbered lane by lane. Whoever is done with its own takes those of others.
struct Work {
  State state;
  int64_t batch, piece;             // sequences, and slots of a piece
  int64_t* first;                   // of each lane, and behind the last: the number of its first piece
  Partial* partials;                // of each piece and head
  Softmax* whole;                   // of each query head
  std::atomic<int64_t> unit, come;  // the next unit that nobody has; workers that have come
  int64_t workers;
  Share* shares;                    // of each worker
  std::atomic<int32_t>* coming;     // of each unit: whether its token is not there yet
  std::atomic<int32_t>* left;       // of each lane: pieces that are not done
  std::atomic<int32_t>* heads_left;  // of each unit
  void operator()();
  void attend_to(int64_t mine, int64_t& lane, keys::Query* q);
};

void Work::operator()() {
  for (;;) {
    const int64_t mine = unit.fetch_add(1);
    if (mine >= batch * UNITS) break;
    const int64_t row = mine / UNITS, head = mine % UNITS * OF_UNIT;
    if (state.query(row) >= 0) {
      const int64_t slot = evict(state, row, mine % UNITS);
      for (int h = 0; h < OF_UNIT; ++h) append(state, {row, head + h}, slot);
    } else {
      for (int g = 0; g < OF_UNIT * GROUP; ++g)
        std::memset(state[OUT].at<Model>(row, head * GROUP + g), 0, OUT_DIM * sizeof(Model));
    }
    coming[mine].store(0, std::memory_order_release);
  }
  const int64_t self = come.fetch_add(1);
  keys::Query q[TOGETHER];
  int64_t lane = -1;  // whose queries these are
  for (int64_t turn = 0; turn < workers; ++turn) {
    Share& share = shares[(self + turn) % workers];
    for (int64_t mine; (mine = share.next.fetch_add(1)) < share.end;) attend_to(mine, lane, q);
  }
}

// One piece; `lane` becomes its lane, and q the queries of that.
void Work::attend_to(int64_t mine, int64_t& lane, keys::Query* q) {
  const int64_t before = lane;
  if (lane < 0 || mine < first[lane] || mine >= first[lane + 1])
    lane = std::upper_bound(first, first + batch * LANES + 1, mine) - first - 1;
  const Place at{lane / LANES, lane % LANES * TOGETHER};
  for (int h = 0; h < TOGETHER; ++h)
    while (coming[at.batch * UNITS + (at.head + h) / OF_UNIT].load(std::memory_order_acquire)) pause();
  if (lane != before)
    for (int h = 0; h < TOGETHER; ++h) queries(state, {at.batch, at.head + h}, q[h]);
  const int64_t begin = (mine - first[lane]) * piece;
  attend(state, at, begin, std::min(begin + piece, slots_of(state, at.batch)), q, partials + mine * TOGETHER);
  if (left[lane].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (int h = 0; h < TOGETHER; ++h) {
    const int64_t head = at.head + h;
    combine(state, {at.batch, head}, partials + first[lane] * TOGETHER + h, first[lane + 1] - first[lane],
            whole + (at.batch * KV_HEADS + head) * GROUP);
    const int64_t own = head / OF_UNIT;
    if (heads_left[at.batch * UNITS + own].fetch_sub(1, std::memory_order_acq_rel) == 1)
      note(state, at.batch, own, whole + (at.batch * KV_HEADS + own * OF_UNIT) * GROUP);
  }
}

constexpr int64_t SMALLEST = TOGETHER > 1 ? 64 : 128;  // slots of a piece
constexpr int64_t A_THREAD = 4;    // pieces, so that whoever is slow has the fewer

// Takes its share of memory that lies together.
template <class T>
T* taken(char*& memory, int64_t count) {
  T* own = reinterpret_cast<T*>(memory);
  memory += (count * sizeof(T) + 63) / 64 * 64;
  return own;
}

}  // namespace

extern "C" void kvcompile_kernel(const Call* call) {
  State state{*call};
  const int64_t batch = state[POSITIONS].size[0], heads = batch * KV_HEADS, units = batch * UNITS, lanes = batch * LANES;
  int64_t slots = 0, pieces = 0;
  for (int64_t b = 0; b < batch; ++b) slots += slots_of(state, b) * KV_HEADS;
  int64_t piece = std::max(SMALLEST, slots / (call->threads * A_THREAD) / TOGETHER);
  if (piece > SMALLEST) {  // of a lane so many pieces that those of all lanes share out, where lanes are alike
    const int64_t mean = slots / TOGETHER / lanes, even = call->threads / std::gcd(lanes, call->threads);
    const int64_t count = (std::max<int64_t>(mean / piece, 1) + even - 1) / even * even;
    piece = std::max(SMALLEST, (mean + count - 1) / count);
  }
  piece = (piece + BLOCK - 1) / BLOCK * BLOCK;
  for (int64_t b = 0; b < batch; ++b) pieces += (slots_of(state, b) + piece - 1) / piece * LANES;
  int64_t bytes = sizeof(Partial) * pieces * TOGETHER + sizeof(Softmax) * heads * GROUP + 8 * lanes;
  bytes += 4 * (lanes + 2 * units) + sizeof(Share) * call->threads + 1024;
  bytes += 4 * heads * GROUP * BLOCKS * (BLOCK + 1);
  bytes += 4 * units * SLOTS;
  char* memory = static_cast<char*>(call->workspace(bytes));
  state.weights = taken<float>(memory, heads * GROUP * BLOCKS * BLOCK);
  state.tops = taken<float>(memory, heads * GROUP * BLOCKS);
  state.places = taken<int32_t>(memory, units * SLOTS);
  Work work{state, batch, piece};
  work.partials = taken<Partial>(memory, pieces * TOGETHER);
  work.first = taken<int64_t>(memory, lanes + 1);
  work.whole = taken<Softmax>(memory, heads * GROUP);
  work.coming = taken<std::atomic<int32_t>>(memory, units);
  work.left = taken<std::atomic<int32_t>>(memory, lanes);
  work.heads_left = taken<std::atomic<int32_t>>(memory, units);
  for (int64_t unit = 0; unit < units; ++unit) work.heads_left[unit].store(OF_UNIT, std::memory_order_relaxed);
  int64_t number = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t own = (slots_of(state, lane / LANES) + piece - 1) / piece;
    work.first[lane] = number;
    work.left[lane].store(static_cast<int32_t>(own), std::memory_order_relaxed);
    number += own;
  }
  work.first[lanes] = number;
  for (int64_t unit = 0; unit < units; ++unit) work.coming[unit].store(1, std::memory_order_relaxed);
  work.workers = std::min(call->threads, number + units);
  work.shares = taken<Share>(memory, work.workers);
  for (int64_t i = 0; i < work.workers; ++i) {
    work.shares[i].next.store(number * i / work.workers, std::memory_order_relaxed);
    work.shares[i].end = number * (i + 1) / work.workers;
  }
  shared_out(*call, work.workers, work);
}
