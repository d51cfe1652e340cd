// What every target shares: how long it goes on, and what it says.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "batch.h"

namespace headway::fuzz {

constexpr unsigned kHangSeconds = 60;  // a batch takes 0.1 s

// COUNT inputs or SECONDS, whichever is reached first (0: no limit), from batch FIRST on.
struct Campaign {
  const char* folder;
  size_t count;
  unsigned seconds;
  uint64_t seed;
  size_t first;

  // Calls one(random), which returns how many inputs it tried, until the end; returns how many there were.
  template <class One>
  size_t run(One one) const {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    size_t done = 0;
    now.seed = seed;
    for (now.number = first;; ++now.number) {
      const auto passed = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
      if ((count && done >= count) || (seconds && passed >= long(seconds)) || (!count && !seconds)) break;
      Random random(seed << 32 ^ now.number);
      alarm(kHangSeconds);
      done += one(random);
      alarm(0);
    }
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    printf("%zu inputs in %.0f s: no crash, no hang\n", done, took);
    return done;
  }
};

std::vector<Bytes> read_seeds(const char* folder);

// A pool for each instruction set that this processor has.
std::vector<Crew> make_crews(int threads);

// Runs the campaign with one(pool, random), each time on one of these pools.
template <class One>
void run_on_crews(const Campaign& campaign, int threads, One one) {
  const std::vector<Crew> crews = make_crews(threads);
  campaign.run([&](Random& random) { return one(crews[random.below(crews.size())].pool, random); });
  for (const Crew& crew : crews) hw_pool_destroy(crew.pool);
}

// A number that bounds checks get wrong, or a small one.
inline uint32_t odd_number(Random& random) {
  static constexpr uint32_t kOdd[] = {0,  1,  2,  3,  4,     7,     8,          9,          15,        16,
                                      17, 31, 33, 64, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  return random.one_in(2) ? kOdd[random.below(sizeof kOdd / sizeof *kOdd)] : uint32_t(random.below(300));
}

// A team of new threads, the caller among them.
inline void run_team(void (*work)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> started;
  for (unsigned i = 1; i < threads; i++) started.emplace_back(work, data);
  work(data);
  for (std::thread& thread : started) thread.join();
}

// The targets; each ends the process by fail() at the first fault.
int fuzz_decode(const Campaign&);
int fuzz_gather(const Campaign&);
int fuzz_optimize(const Campaign&);
int fuzz_convolve(const Campaign&);
int fuzz_changing(const Campaign&);
int fuzz_sizes(const Campaign&);
int fuzz_fork(const Campaign&);
int fuzz_share(const Campaign&);

}  // namespace headway::fuzz
