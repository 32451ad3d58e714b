// How many threads share a loop. All of them wait at its end, so one whose core another program has keeps the others
// waiting for the scheduler, which may be longer than the loop takes. Cuts stay those of all threads: who computes what
// changes nothing of a result.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace kv {

// What loops have met; one for all of a process. Two callers at once may count an event too few, which delays a change.
class Workers {
 public:
  // Of `threads`, how many share the next loop.
  int64_t of(int64_t threads) {
    const int64_t halvings = halvings_.load(RELAXED);
    if (halvings > 0 && rest_.fetch_sub(1, RELAXED) <= 1) {  // whether more pay again is tried
      halvings_.store(halvings - 1, RELAXED);
      score_.store(TRIED, RELAXED);
    }
    return std::max<int64_t>(1, threads >> halvings_.load(RELAXED));
  }

  // How many it was for the loop before.
  int64_t now(int64_t threads) const { return std::max<int64_t>(1, threads >> halvings_.load(RELAXED)); }

  // A loop of `took` nanoseconds has ended, in the last `waited` of which the caller had nothing left to do.
  void met(int64_t took, int64_t waited) {
    if (waited < LATE || waited < took / 2) {
      const int64_t score = score_.load(RELAXED);
      if (score > 0) score_.store(score - 1, RELAXED);
      if (calm_.fetch_add(1, RELAXED) > CALM) hold_.store(FIRST, RELAXED);
      return;
    }
    calm_.store(0, RELAXED);
    if (score_.fetch_add(EVENT, RELAXED) + EVENT < FULL) return;
    halvings_.fetch_add(1, RELAXED);
    rest_.store(hold_.load(RELAXED), RELAXED);
    hold_.store(std::min(hold_.load(RELAXED) * 2, MOST), RELAXED);
    score_.store(0, RELAXED);
  }

 private:
  static constexpr auto RELAXED = std::memory_order_relaxed;
  static constexpr int64_t LATE = 200'000;  // nanoseconds; threads that nothing hinders come within a tenth of it
  // One late loop is the noise of any machine; three among a hundred, a core that is somebody else's.
  static constexpr int64_t EVENT = 48, FULL = 3 * EVENT, TRIED = FULL - EVENT;
  static constexpr int64_t FIRST = 256, MOST = 8192, CALM = 16384;  // loops; a decode step has five a layer
  std::atomic<int64_t> halvings_{0}, rest_{0}, hold_{FIRST}, score_{0}, calm_{0};
};

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kv
