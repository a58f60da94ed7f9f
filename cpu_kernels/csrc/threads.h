// A few threads that run one function together, and meet inside it at barriers.
//
// Not OpenMP: its waiting threads burn a core that the HTTP process needs, or another of ours. Every
// calling thread has its own team, so that two engines in one process never wait for each other.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace twostroke {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that threads wait for to change. Spinning is faster than sleeping where the late one runs
// on another core (waking takes longer than most waits), and much slower where it waits for this
// one. Which it is, the last waits tell: each that spins in vain halves the next one's patience.
class Signal {
 public:
  unsigned value() const { return value_.load(std::memory_order_acquire); }

  void raise() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) value_.notify_all();
  }

  // Until the value is no longer `seen`.
  void wait(unsigned seen) {
    constexpr int MOST_SPINS = 2000;  // some 50 microseconds
    constexpr int PROBE_EVERY = 64;   // waits: has the other core become free?
    static thread_local int patience = MOST_SPINS;
    static thread_local unsigned waits = 0;
    const int spins = ++waits % PROBE_EVERY ? patience : MOST_SPINS;
    for (int i = 0; i < spins && value() == seen; ++i) pause_cpu();
    if (value() != seen) {
      patience = patience * 2 + 32 < MOST_SPINS ? patience * 2 + 32 : MOST_SPINS;
      return;
    }
    patience /= 2;
    while (value() == seen) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      value_.wait(seen, std::memory_order_seq_cst);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

 private:
  alignas(64) std::atomic<unsigned> value_{0};
  std::atomic<int> sleepers_{0};
};

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void wait() {
    const unsigned seen = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.raise();
    } else {
      phase_.wait(seen);
    }
  }

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  Signal phase_;
};

struct Range {
  int begin, end;
};

// One thread's view of its team.
struct Member {
  int index, count;
  Barrier& barrier;

  void wait() const { barrier.wait(); }
  // This member's share of `size` things, contiguous.
  Range share(int size) const {
    return {(int)((int64_t)size * index / count), (int)((int64_t)size * (index + 1) / count)};
  }
};

using Job = std::function<void(const Member&)>;

class Team {
 public:
  // Throws std::system_error where the machine gives no more threads.
  explicit Team(int count) : count_(count), barrier_(count) {
    try {
      for (int index = 1; index < count; ++index)
        threads_.emplace_back([this, index] { serve(index); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  Team(const Team&) = delete;

  void run(const Job& job) {
    if (count_ > 1) start(&job);
    job({0, count_, barrier_});
    if (count_ > 1) barrier_.wait();  // nobody may still use `job`
  }

 private:
  void end() {
    start(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }

  void start(const Job* job) {
    job_ = job;
    round_.raise();
  }

  void serve(int index) {
    for (unsigned seen = 0;; ++seen) {
      round_.wait(seen);
      if (job_ == nullptr) return;
      (*job_)({index, count_, barrier_});
      barrier_.wait();
    }
  }

  const int count_;
  Barrier barrier_;
  const Job* job_ = nullptr;
  Signal round_;
  std::vector<std::thread> threads_;
};

// The calling thread's own team.
struct OwnTeam {
  std::unique_ptr<Team> team;
  int count = 0;
};
inline thread_local OwnTeam own_team;

#if defined(__unix__) || defined(__APPLE__)
// A forked child has none of the team's threads: it makes a new one when it needs one.
inline const int forgets_after_fork = pthread_atfork(nullptr, nullptr, [] {
  (void)own_team.team.release();
  own_team.count = 0;
});
#endif

// Runs job(member) on `count` threads, the caller's among them; returns when all are done. Throws
// std::system_error where the machine gives no more threads. `job` must not throw.
inline void run_together(int count, const Job& job) {
  if (own_team.count != count) {
    own_team.count = 0;
    own_team.team.reset();
    own_team.team = std::make_unique<Team>(count);
    own_team.count = count;
  }
  own_team.team->run(job);
}

}  // namespace twostroke
