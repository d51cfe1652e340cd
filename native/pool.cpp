#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <mutex>
#include <thread>

#include "guard.h"

namespace headway {
namespace {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t), "a futex is a plain 32-bit word");

// The next batch usually comes within this time, and waking a sleeping thread costs about as much.
constexpr auto kSpin = std::chrono::microseconds(20);

// Who sleeps on the gate; they are woken apart from each other.
enum Sleeper : uint32_t { kThreads = 1, kCaller = 2 };

void wake(Word& word, Sleeper who) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, nullptr, nullptr, who);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns when the word is no longer `seen`, and now and then before.
void wait(Word& word, uint32_t seen, Sleeper who) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; i++) {
      if (word.load(std::memory_order_acquire) != seen) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, seen, nullptr, nullptr, who);
}

}  // namespace

// The threads of one process. The gate says all there is to say about the job: how many threads are in it, whether it
// may still be entered, and its number, so that nobody enters twice. A thread that wakes too late finds it closed, and
// nobody waits for it.
class Crew final {
 public:
  Crew(int threads, const std::vector<int>& cpus) : pid(getpid()) {
    for (int i = 0; i < threads; i++) workers_.push_back(make_worker());
    // Signals are for the interpreter's threads, but for those that an instruction raises: blocked, they end the
    // process without a word.
    sigset_t all, before;
    sigfillset(&all);
    for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
    watch_faults();
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < threads; i++) {
        threads_.emplace_back([this, i] { live(i); });
        pthread_t thread = threads_.back().native_handle();
        pthread_setname_np(thread, "headway-decode");
        if (!cpus.empty()) pin(thread, cpus[size_t(i - 1) % cpus.size()]);
      }
    } catch (...) {
      stop();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Crew() { stop(); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  void run(Pool::Job& job) {
    std::lock_guard<std::mutex> one_at_a_time(entry_);
    job_ = &job;
    const uint32_t next = ((gate_.load(std::memory_order_relaxed) & ~(kNumber - 1)) + kNumber) | kOpen;
    gate_.store(next, std::memory_order_release);
    if (!threads_.empty()) wake(gate_, kThreads);
    job.take(*workers_[0], 0);
    uint32_t seen = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (seen & kInside) {
      wait(gate_, seen, kCaller);
      seen = gate_.load(std::memory_order_acquire);
    }
  }

  const pid_t pid;

 private:
  static constexpr uint32_t kInside = 0xfff, kOpen = 0x1000, kStop = 0x2000, kNumber = 0x4000;
  static_assert(Pool::kMostThreads <= kInside, "the gate counts the threads inside");

  static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);  // a cpu that was taken from us since: runs anywhere
  }

  void live(int number) {
    uint32_t last = 0;
    for (;;) {
      uint32_t seen = gate_.load(std::memory_order_acquire);
      if (seen & kStop) return;
      if (!(seen & kOpen) || seen / kNumber == last) {
        wait(gate_, seen, kThreads);
      } else if (gate_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
        last = seen / kNumber;
        job_->take(*workers_[size_t(number)], number);
        const uint32_t left = gate_.fetch_sub(1, std::memory_order_acq_rel) - 1;
        if (!(left & (kOpen | kInside))) wake(gate_, kCaller);
      }
    }
  }

  void stop() {
    gate_.fetch_or(kStop, std::memory_order_acq_rel);
    wake(gate_, kThreads);
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex entry_;
  Word gate_{0};
  Pool::Job* job_ = nullptr;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(threads), cpus_(std::move(cpus)), crew_(new Crew(threads_, cpus_)) {}

Pool::~Pool() {
  Crew* mine = crew_.load();
  if (mine->pid == getpid()) delete mine;
}

Crew& Pool::crew() {
  Crew* found = crew_.load(std::memory_order_acquire);
  if (found->pid == getpid()) return *found;
  // A forked child, perhaps in several threads at once. The parent's crew is left as it is: it may be in any state.
  Crew* fresh = new Crew(threads_, cpus_);
  if (crew_.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

void Pool::run(Job& job) { crew().run(job); }

}  // namespace headway
