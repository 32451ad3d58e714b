// A decode step as a list of calls, noted once and made again without Python: our kernels and those that Inductor
// compiled, in their order, with the tensors that they had. What they read and write stands where it stood.
//
// One loop of PyTorch's threads runs the whole list. Its first thread makes the calls, the others wait for what a kernel
// shares out, and nobody waits for a thread that comes late: its part is taken by who is there.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "launch.h"

namespace {

constexpr size_t MOST_ARGUMENTS = 48;  // of a function of Inductor's: pointers and whole numbers

template <size_t... I>
void call_with(void* function, const int64_t* given, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<int64_t>(I))...)>(function)(given[I]...);
}

template <size_t... N>
void call_by_number(void* function, const std::vector<int64_t>& given, std::index_sequence<N...>) {
  ((given.size() == N ? call_with(function, given.data(), std::make_index_sequence<N>()) : void()), ...);
}

// A kernel with its tensors, or a function with its arguments. alone: the function has threads of its own.
struct Noted {
  Kernel kernel = nullptr;
  std::vector<kv::Tensor> tensors;
  void* function = nullptr;
  std::vector<int64_t> arguments;
  bool alone = false;
};

struct Program {
  std::vector<Noted> calls;
};

// Who shares the work of a step's kernels.
class Team {
 public:
  explicit Team(int64_t threads) : threads_(threads) {}

  // Runs task(0 .. threads - 1), each once; the first thread calls it.
  void share(int64_t threads, kv::Task task, void* context) {
    task_ = task, context_ = context, tasks_ = threads, sharing_ = workers.of(threads);
    next_.store(0, std::memory_order_relaxed);
    if (sharing_ == 1) return work();
    const int64_t began = kv::nanoseconds();
    open_.store(++number_);
    work();
    open_.store(0);
    const int64_t ended = kv::nanoseconds();
    while (inside_.load() != 0) kv::pause();
    const int64_t left = kv::nanoseconds();
    workers.met(left - began, left - ended);
    if (workers.now(threads_) == 1) end();  // the others do not stand in the way of who has their cores
  }

  void end() { open_.store(-1); }

  // What another thread, number `own`, does until the end.
  void follow(int64_t own) {
    for (int64_t done = 0;;) {
      const int64_t number = open_.load(std::memory_order_acquire);
      if (number < 0) return;
      if (number == 0 || number == done) {
        kv::pause();
        continue;
      }
      inside_.fetch_add(1);
      // From here on it stays open until this thread has left, if it is open still.
      if (open_.load() == number && own < sharing_) work();
      inside_.fetch_sub(1);
      done = number;
    }
  }

  int64_t threads() const { return threads_; }

 private:
  void work() {
    for (int64_t mine; (mine = next_.fetch_add(1)) < tasks_;) task_(mine, context_);
  }

  const int64_t threads_;
  kv::Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0, sharing_ = 0, number_ = 0;
  alignas(64) std::atomic<int64_t> open_{0};  // the number of what is shared out; 0: nothing is, -1: never again
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
};

thread_local Team* team = nullptr;

void by_team(int64_t threads, kv::Task task, void* context) { team->share(threads, task, context); }

// Calls begin .. end - 1; `share` is how a kernel's work is shared out. took: of each, its nanoseconds; null: not asked.
void make_calls(const Noted* begin, const Noted* end, int64_t threads, void (*share)(int64_t, kv::Task, void*),
                int64_t* took) {
  int64_t before = took ? kv::nanoseconds() : 0;
  for (const Noted* noted = begin; noted != end; ++noted) {
    if (noted->kernel) {
      const kv::Call call{noted->tensors.data(), threads, share, workspace};
      noted->kernel(&call);
    } else {
      call_by_number(noted->function, noted->arguments, std::make_index_sequence<MOST_ARGUMENTS + 1>());
    }
    if (took) {
      const int64_t now = kv::nanoseconds();
      *took++ = now - before;
      before = now;
    }
  }
}

// The same by a team; none of them has threads of its own.
void make_calls_together(const Noted* begin, const Noted* end, int64_t threads, int64_t* took) {
  struct Calls {
    const Noted *begin, *end;
    Team team;
    std::exception_ptr failed;
    int64_t* took;
    int64_t ended;
  } calls{begin, end, Team(threads), nullptr, took, 0};
  torch_parallel_for(
      0, threads, 1,
      [](int64_t first, int64_t, void* own) {
        Calls& calls = *static_cast<Calls*>(own);
        if (first != 0) return calls.team.follow(first);
        team = &calls.team;
        try {
          make_calls(calls.begin, calls.end, calls.team.threads(), by_team, calls.took);
        } catch (...) {
          calls.failed = std::current_exception();
        }
        team = nullptr;
        calls.team.end();
        calls.ended = kv::nanoseconds();
      },
      &calls);
  const int64_t waited = kv::nanoseconds() - calls.ended;
  workers.met(waited, waited);
  if (calls.failed) std::rethrow_exception(calls.failed);
}

void run_step(const Program& program, int64_t* took = nullptr) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  const Noted *next = program.calls.data(), *const end = next + program.calls.size();
  while (next != end) {
    const Noted* stop = std::find_if(next, end, [&](const Noted& noted) { return noted.alone != next->alone; });
    if (next->alone || workers.now(threads) == 1)
      make_calls(next, stop, threads, parallel, took);
    else
      make_calls_together(next, stop, threads, took);
    if (took) took += stop - next;
    next = stop;
  }
}

}  // namespace
