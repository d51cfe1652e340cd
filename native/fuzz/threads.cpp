// A pool that several threads, or a forked child, use at once.
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr hw_spec kSpec{sizeof(hw_spec), 16, 16, 3, 0, 0, 0};
constexpr unsigned kChildSeconds = 60;

Batch some(const std::vector<Bytes>& seeds, Random& random) {
  Batch batch;
  for (size_t i = 0; i < 40; i++) {
    const Bytes& seed = seeds[random.below(seeds.size())];
    hw_info info{};
    hw_probe(seed.data(), seed.size(), &info);
    batch.add(seed, {0, 0, float(info.width), float(info.height)}, uint8_t(random.below(4)));
  }
  return batch;
}

bool same(const Result& one, const Result& other) { return one.out == other.out && one.status == other.status; }

// Threads that decode with one pool, for ThreadSanitizer.
size_t share(const std::vector<Bytes>& seeds, Random& random) {
  const Crew crew{"any", hw_pool_create(3, nullptr, 0)};
  const Batch batch = some(seeds, random);
  const Result whole = decode(crew, batch, kSpec);
  std::atomic<size_t> others{0};
  const auto again = [&] {
    for (int time = 0; time < 3; time++) others += !same(decode(crew, batch, kSpec), whole);
  };
  std::thread second(again), third(again);
  again();
  second.join();
  third.join();
  if (others) fail("another thread changed the result", others);
  hw_pool_destroy(crew.pool);
  return 9;
}

// A fork while a batch is under way: the child leaves its parent's threads as they stand and decodes with its own.
// Without a sanitizer: the C library's memory survives the fork of a process with threads, that of ThreadSanitizer
// does not (its allocator's locks stay held in the child).
size_t split(const std::vector<Bytes>& seeds, Random& random) {
  const Crew crew{"any", hw_pool_create(3, nullptr, 0)};
  const Batch batch = some(seeds, random);
  const Result whole = decode(crew, batch, kSpec);
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over.load()) decode(crew, batch, kSpec);
  });
  for (int time = 0; time < 5; time++) {
    usleep(unsigned(random.below(3000)));
    const pid_t child = fork();
    if (child == 0) {
      alarm(kChildSeconds);
      _exit(same(decode(crew, batch, kSpec), whole) ? 0 : 1);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) fail("no child", 0);
    if (status) fail("the child died, or decoded something else", size_t(status));
  }
  over = true;
  busy.join();
  hw_pool_destroy(crew.pool);
  return 5;
}

}  // namespace

int fuzz_fork(const Campaign& campaign) {
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  campaign.run([&](Random& random) { return split(seeds, random); });
  return 0;
}

int fuzz_share(const Campaign& campaign) {
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  campaign.run([&](Random& random) { return share(seeds, random); });
  return 0;
}

}  // namespace headway::fuzz
