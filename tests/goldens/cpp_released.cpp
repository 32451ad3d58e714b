// the new token of each sequence to its slot, and its queries against the slots.
// {"dims": [64, 64], "dtype": "bfloat16", "heads": [9, 3], "options": [], "role": "decode", "site": {"layout": {"before_rope": false, "keys": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}, "placement": {"kind": "paged", "page_size": 16, "pages": null, "released": true}, "retention": {"kind": "sink_window", "positions": "original", "sinks": 4, "window": 508}, "values": {"code": "model", "hadamard": false, "residual": 0, "scale": {"dtype": "float16", "minimum": false, "per": "none", "size": 0}, "sinks": 0}}, "mask": {"kind": "causal", "window": null}, "sm_scale": 0.125}}
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
enum { OUT, Q, K, V, POSITIONS, SINKS, BIAS, PAGE_TABLE, COS, SIN, CHOSEN, KEYS_DATA, VALUES_DATA };

constexpr int UNITS = 3;  // of a sequence: heads whose new token goes to one slot together are one
constexpr int OF_UNIT = KV_HEADS / UNITS;
// KV heads whose slots are read by turns, a block of each: those of a page lie together in memory.
constexpr int TOGETHER = 3, LANES = KV_HEADS / TOGETHER;

// Bytes of a query's channel, and of a weight, where they meet codes as whole numbers.
constexpr int PLANES = 2;

struct State {
  const Call& call;
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
  bool straight;  // whether the slots follow each other
  int64_t slot[BLOCK], token[BLOCK];

  void find(const State& state, Place at, int64_t start, int64_t n, int64_t length) {
    const int64_t query = length - 1;
    count = 0;
    for (int64_t slot_ = start; slot_ < start + n; ++slot_) {
      const int64_t key = slot_;
      if (!(key < length && key >= std::min<int64_t>(slot_, 4) && (key > query - 508 || key < 4))) continue;
      slot[count] = slot_;
      token[count] = key;
      ++count;
    }
    straight = count > 0 && slot[count - 1] - slot[0] == count - 1;
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

// Whole blocks behind the window are not read: so many slots of a sequence, from the end of the sinks' blocks on.
constexpr int64_t SINK_SLOTS = (4 + BLOCK - 1) / BLOCK * BLOCK;
inline int64_t skipped(int64_t length) {
  const int64_t query = length - 1, low = query - 507;
  return std::max<int64_t>(low / BLOCK * BLOCK - SINK_SLOTS, 0);
}

// The slot that comes after `count` slots that are read.
inline int64_t read_at(int64_t count, int64_t length) {
  return count < SINK_SLOTS ? count : count + skipped(length);
}

// How many slots of a sequence may hold a token that is seen.
inline int64_t slots_of(const State& state, int64_t batch) {
  const int64_t length = state.query(batch) + 1;
  if (length <= 0) return 0;
  return length - skipped(length);
}

// K: model.
namespace keys {

constexpr int N = 64;
using Data = bf16;

template <class T>
inline T* row(const State& state, int part, Place at, int64_t slot) {
  return row_in_pages<16, T>(state[part], state[PAGE_TABLE].at<int32_t>(at.batch), at, slot);
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
  const uint8_t* found[BLOCK];
  constexpr int RUN = 16;  // slots that follow each other lie together as far as a page goes
  if (block.straight && block.slot[0] % RUN == 0) {
    const uint8_t* ahead[BLOCK / RUN];
    for (int start = 0; start < block.count; start += RUN) {
      const uint8_t* first = bytes(start);
      for (int i = 0; i < RUN; ++i) found[start + i] = first + i * stride;
      const int64_t slot = block.slot[start] + BLOCKS_AHEAD * BLOCK;
      ahead[start / RUN] = slot < length ? reinterpret_cast<const uint8_t*>(row<Data>(state, KEYS_DATA, at, slot)) : first;
    }
    return use(Listed<RUN>{found, block.count == BLOCK ? ahead : nullptr, stride});
  }
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
  // Slots that follow each other lie together as far as a page goes.
  constexpr int RUN = 16;
  if (block.straight && block.slot[0] % RUN == 0) {
    for (int start = 0; start < block.count; start += RUN) {
      const int count = std::min(RUN, block.count - start);
      const Data* ahead = ASKS_FOR_ROWS && block.slot[start] + BLOCKS_AHEAD * BLOCK < length ? row<Data>(state, KEYS_DATA, at, block.slot[start] + BLOCKS_AHEAD * BLOCK) : nullptr;
      const Rows<Data, N> rows{row<Data>(state, KEYS_DATA, at, block.slot[start]), state[KEYS_DATA].stride[2], ahead};
      qk<GROUP, N>(q.own, rows, count, scores + start);
    }
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
  // The heads of a page by turns: so memory is read in its order, as processors expect it.
  constexpr int RUN = 16;
  constexpr bool LONG = RUN * N * sizeof(Data) >= 4096;  // as far as a processor foresees by itself
  bool straight = blocks[0].straight && blocks[0].slot[0] % RUN == 0;
  if (straight) {

    for (int start = 0; start < blocks[0].count; start += RUN)
      for (int h = 0; h < TOGETHER; ++h) {
        const Place at{first.batch, first.head + h};
        const int count = std::min(RUN, blocks[0].count - start);
        const Data *base = row<Data>(state, KEYS_DATA, at, blocks[0].slot[start]), *ahead = LONG ? nullptr : ASKS_FOR_ROWS && blocks[0].slot[start] + BLOCKS_AHEAD * BLOCK < length ? row<Data>(state, KEYS_DATA, at, blocks[0].slot[start] + BLOCKS_AHEAD * BLOCK) : nullptr;
#if (defined(KV_PAIRS) && KV_TAKES(64))
        const auto bytes = [](const Data* x) { return reinterpret_cast<const uint8_t*>(x); };
        const Run rows(bytes(base), state[KEYS_DATA].stride[2] * int64_t{sizeof(Data)}, bytes(ahead));
        qk_pairs<GROUP, N>(q[h].pairs[0], rows, count, scores[h] + start);
#else
        const Rows<Data, N> rows{base, state[KEYS_DATA].stride[2], ahead};
        qk<GROUP, N>(q[h].own, rows, count, scores[h] + start);
#endif
      }

    return;
  }
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
  return row_in_pages<16, T>(state[part], state[PAGE_TABLE].at<int32_t>(at.batch), at, slot);
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
  const uint8_t* found[BLOCK];
  constexpr int RUN = 16;  // slots that follow each other lie together as far as a page goes
  if (block.straight && block.slot[0] % RUN == 0) {
    const uint8_t* ahead[BLOCK / RUN];
    for (int start = 0; start < block.count; start += RUN) {
      const uint8_t* first = bytes(start);
      for (int i = 0; i < RUN; ++i) found[start + i] = first + i * stride;
      const int64_t slot = block.slot[start] + BLOCKS_AHEAD * BLOCK;
      ahead[start / RUN] = slot < length ? reinterpret_cast<const uint8_t*>(row<Data>(state, VALUES_DATA, at, slot)) : first;
    }
    return use(Listed<RUN>{found, block.count == BLOCK ? ahead : nullptr, stride});
  }
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
  // Slots that follow each other lie together as far as a page goes.
  constexpr int RUN = 16;
  if (block.straight && block.slot[0] % RUN == 0) {
    for (int start = 0; start < block.count; start += RUN) {
      const int count = std::min(RUN, block.count - start);
      const Data* ahead = ASKS_FOR_ROWS && block.slot[start] + BLOCKS_AHEAD * BLOCK < length ? row<Data>(state, VALUES_DATA, at, block.slot[start] + BLOCKS_AHEAD * BLOCK) : nullptr;
      const Rows<Data, V_DIM> rows{row<Data>(state, VALUES_DATA, at, block.slot[start]), state[VALUES_DATA].stride[2], ahead};
      pv<GROUP, V_DIM>(p + start, rows, count, out);
    }
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
  // The heads of a page by turns: so memory is read in its order, as processors expect it.
  constexpr int RUN = 16;
  constexpr bool LONG = RUN * V_DIM * sizeof(Data) >= 4096;  // as far as a processor foresees by itself
  bool straight = blocks[0].straight && blocks[0].slot[0] % RUN == 0;
  if (straight) {

    for (int start = 0; start < blocks[0].count; start += RUN)
      for (int h = 0; h < TOGETHER; ++h) {
        const Place at{first.batch, first.head + h};
        const int count = std::min(RUN, blocks[0].count - start);
        const Data *base = row<Data>(state, VALUES_DATA, at, blocks[0].slot[start]), *ahead = LONG ? nullptr : ASKS_FOR_ROWS && blocks[0].slot[start] + BLOCKS_AHEAD * BLOCK < length ? row<Data>(state, VALUES_DATA, at, blocks[0].slot[start] + BLOCKS_AHEAD * BLOCK) : nullptr;
#if (defined(KV_PAIRS) && KV_TAKES(64))
        const auto bytes = [](const Data* x) { return reinterpret_cast<const uint8_t*>(x); };
        const Run rows(bytes(base), state[VALUES_DATA].stride[2] * int64_t{sizeof(Data)}, bytes(ahead));
        pv_pairs<GROUP, V_DIM>(p[h] + start, rows, count, out[h].sum[0]);
#else
        const Rows<Data, V_DIM> rows{base, state[VALUES_DATA].stride[2], ahead};
        pv<GROUP, V_DIM>(p[h] + start, rows, count, out[h].sum[0]);
#endif
      }

    return;
  }
  for (int h = 0; h < TOGETHER; ++h)
    if (blocks[h].count) sums(state, {first.batch, first.head + h}, blocks[h], length, p[h], out[h].sum[0], decoded);
}

}  // namespace values

// The new token of a sequence takes its slot.
void append(const State& state, Place at) {
  const int64_t token = state.query(at.batch);
  const int64_t slot = token;
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
      blocks[h].find(state, {first.batch, first.head + h}, read_at(start, length), std::min<int64_t>(BLOCK, end - start), length);
    if (blocks[0].count == 0) continue;
    keys::products(state, first, blocks, length, q, scores, decoded);
    for (int h = 0; h < TOGETHER; ++h) {
      for (int g = 0; g < GROUP; ++g) {
        float* own = scores[h] + g * BLOCK;
        std::fill(own + blocks[h].count, own + BLOCK, -INFINITY);
        weigh<V_DIM, Model>(own, SM_SCALE, out[h].softmax[g], out[h].sum[g], own);
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
  void operator()();
  void attend_to(int64_t mine, int64_t& lane, keys::Query* q);
};

void Work::operator()() {
  for (;;) {
    const int64_t mine = unit.fetch_add(1);
    if (mine >= batch * UNITS) break;
    const int64_t row = mine / UNITS, head = mine % UNITS * OF_UNIT;
    if (state.query(row) >= 0) {
      for (int h = 0; h < OF_UNIT; ++h) append(state, {row, head + h});
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
  char* memory = static_cast<char*>(call->workspace(bytes));
  Work work{state, batch, piece};
  work.partials = taken<Partial>(memory, pieces * TOGETHER);
  work.first = taken<int64_t>(memory, lanes + 1);
  work.whole = taken<Softmax>(memory, heads * GROUP);
  work.coming = taken<std::atomic<int32_t>>(memory, units);
  work.left = taken<std::atomic<int32_t>>(memory, lanes);
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
