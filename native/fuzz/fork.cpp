// A fork while a batch is under way: the child leaves its parent's threads as they stand and decodes with its own.
// For ThreadSanitizer.
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr hw_spec kSpec{sizeof(hw_spec), 16, 16, 3, 0, 0, 0};
constexpr unsigned kChildSeconds = 60;

size_t one(const std::vector<Bytes>& seeds, Random& random) {
  hw_pool* const pool = hw_pool_create(3, nullptr, 0);
  const Crew crew{"any", pool};
  Batch batch;
  for (size_t i = 0; i < 40; i++) {
    const Bytes& seed = seeds[random.below(seeds.size())];
    hw_info info{};
    hw_probe(seed.data(), seed.size(), &info);
    batch.add(seed, {0, 0, float(info.width), float(info.height)}, uint8_t(random.below(4)));
  }
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
      const Result mine = decode(crew, batch, kSpec);
      _exit(mine.out == whole.out && mine.status == whole.status ? 0 : 1);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) fail("no child", 0);
    if (status) fail("the child died, or decoded something else", size_t(status));
  }
  over = true;
  busy.join();
  hw_pool_destroy(pool);
  return 5;
}

}  // namespace

int fuzz_fork(const Campaign& campaign) {
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  campaign.run([&](Random& random) { return one(seeds, random); });
  return 0;
}

}  // namespace headway::fuzz
