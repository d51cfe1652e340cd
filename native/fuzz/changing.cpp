// Bytes that another thread changes while they are decoded, as those of a mapped file may: pixels may be anything, but
// nothing outside of the buffers is read or written.
#include <algorithm>
#include <atomic>
#include <thread>

#include "alone.h"
#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr size_t kTimes = 100;  // of each pair of files

// Not instrumented: what is looked for are wrong addresses.
__attribute__((no_sanitize("thread"))) void swap_bytes(uint8_t* at, const Bytes& from, size_t low, size_t high) {
  for (size_t i = low; i < high; i++) static_cast<volatile uint8_t*>(at)[i] = from[i];
}

size_t one(hw_pool* pool, const std::vector<Bytes>& seeds, Random& random) {
  const size_t seed = random.below(seeds.size());
  Bytes good = seeds[seed], bad = mutate(seeds, seed, random);
  const size_t size = std::max(good.size(), bad.size());
  good.resize(size), bad.resize(size);
  // Only what differs is written, so that it is written often.
  size_t low = 0, high = size;
  while (low < high && good[low] == bad[low]) low++;
  while (high > low && good[high - 1] == bad[high - 1]) high--;
  if (low == high) return 0;
  const Exact file(good);
  hw_info info{};
  if (hw_probe(file.data(), size, &info) || uint64_t(info.width) * info.height > kMaxPixels) return 0;
  std::atomic<bool> over{false};
  std::thread writer([&] {
    uint8_t* const at = const_cast<uint8_t*>(file.data());
    for (bool turn = true; !over.load(std::memory_order_relaxed); turn = !turn)
      swap_bytes(at, turn ? bad : good, low, high);
  });
  const hw_spec spec{sizeof(hw_spec), 8, 8, 3, 1, kMaxPixels, 20};
  uint64_t address[4], length[4];
  float box[16];
  Bytes out(4 * 200, 0xA5), status(4);
  for (int i = 0; i < 4; i++) {
    address[i] = file.address(), length[i] = size;
    const float whole[4] = {0, 0, float(info.width), float(info.height)};
    std::copy(whole, whole + 4, box + 4 * i);
    if (i) box[4 * i + 2] *= 0.5f, box[4 * i + 3] *= 0.5f;
  }
  const hw_items items{address, length, nullptr, nullptr, nullptr, nullptr, box, nullptr};
  Bytes small(size + 4096);
  char reason[200];
  const int32_t region[4] = {0, 0, int32_t(info.width), int32_t(info.height)};
  int32_t held[4];
  for (size_t time = 0; time < kTimes; time++) {
    if (hw_decode_batch(pool, 4, &items, &spec, out.data(), 200, status.data(), nullptr) < 0) fail("it was refused", 0);
    for (size_t i = 0; i < 4; i++) {
      const uint8_t* const image = &out[200 * i];
      if (status[i] > HW_FOREIGN) fail("it has no status", i);
      if (std::any_of(image + 192, image + 200, [](uint8_t value) { return value != 0xA5; }))
        fail("the bytes behind it were touched", i);
    }
    hw_info changed{};
    hw_probe(file.data(), size, &changed);
    hw_splice(file.data(), size, region, held, small.data(), random.below(small.size()), reason);
    if (time % 32 == 0) hw_seekable(file.data(), size, nullptr, small.data(), small.size(), reason);
  }
  over = true;
  writer.join();
  return kTimes;
}

}  // namespace

int fuzz_changing(const Campaign& campaign) {
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  run_on_crews(campaign, 1, [&](hw_pool* pool, Random& random) { return one(pool, seeds, random); });
  return 0;
}

}  // namespace headway::fuzz
