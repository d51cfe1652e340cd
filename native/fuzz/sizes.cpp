// Sizes of outputs and boxes of every kind: refused, or within 1 of exact arithmetic.
#include <algorithm>
#include <cmath>

#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr size_t kMost = 200000;    // bytes of an output
constexpr double kTolerance = 1.6;  // between exact arithmetic and Pillow's is 1, between that and the core's 1 at most

// One pixel of Pillow's antialiased triangle along one axis: the weights of source pixels from `first` on.
struct Weights {
  int first;
  std::vector<double> of;
};

Weights weights(double low, double length, int size, int out, int x) {
  const double scale = length / out, support = std::max(scale, 1.0), center = low + (x + 0.5) * scale;
  const int first = std::max(int(std::floor(center - support + 0.5)), 0);
  const int last = std::min(int(std::floor(center + support + 0.5)), size);
  Weights found{first, {}};
  double sum = 0;
  for (int i = first; i < last; i++) {
    found.of.push_back(std::max(0.0, 1 - std::abs((i - center + 0.5) / support)));
    sum += found.of.back();
  }
  for (double& weight : found.of) weight /= sum;
  return found;
}

bool inside(const Box& box, const hw_info& info) {
  const float right = float(double(box.left) + double(box.width)), bottom = float(double(box.top) + double(box.height));
  return box.left >= 0 && box.left < right && right <= float(info.width) && box.top >= 0 && box.top < bottom &&
         bottom <= float(info.height);
}

size_t one(hw_pool* pool, const std::vector<Bytes>& seeds, Random& random) {
  const Exact file(seeds[random.below(seeds.size())]);
  hw_info info{};
  if (hw_probe(file.data(), file.size(), &info)) return 0;
  hw_spec spec{sizeof(hw_spec), odd_number(random), odd_number(random), random.one_in(2) ? 3u : 1u, 0, 0, 0};
  if (random.one_in(20)) spec.channels = odd_number(random);
  if (random.one_in(20)) spec.size = odd_number(random);
  if (random.one_in(8)) spec.scaled = odd_number(random);
  if (random.one_in(10)) spec.max_pixels = odd_number(random);
  const auto w = float(info.width), h = float(info.height);
  Box box{w * random.unit() * 0.7f, h * random.unit() * 0.7f, w * random.unit(), h * random.unit()};
  if (random.one_in(3)) box = {0, 0, w, h};
  if (random.one_in(6)) box.width = 0.01f * random.unit();
  if (random.one_in(6)) box.left = float(int(odd_number(random)));
  const uint64_t bytes = uint64_t(spec.height) * spec.width * spec.channels;
  const bool good = spec.size == sizeof spec && spec.height && spec.width && spec.height <= UINT16_MAX &&
                    spec.width <= UINT16_MAX && (spec.channels == 1 || spec.channels == 3);
  if (good && bytes > kMost) return 0;
  const uint64_t address = file.address(), length = file.size();
  const hw_items items{&address, &length, nullptr, nullptr, nullptr, nullptr, &box.left, nullptr};
  const Exact out{Bytes(good ? bytes : 16, 0xA5)};
  uint8_t* const to = const_cast<uint8_t*>(out.data());
  uint8_t status = 0xEE;
  const int64_t stride = good ? int64_t(bytes) : int64_t(std::min<uint64_t>(bytes, INT64_MAX));
  const int64_t failed = hw_decode_batch(pool, 1, &items, &spec, to, stride, &status, nullptr);
  if ((failed >= 0) != good) fail(good ? "a good size was refused" : "a bad size was not refused", 0);
  if (failed < 0) return 1;
  if (status == HW_FOREIGN) return 1;
  const bool small = !spec.max_pixels || uint64_t(info.width) * info.height <= spec.max_pixels;
  if ((status == HW_OK) != (inside(box, info) && small)) fail("its box was not judged right", 0);
  if (status != HW_OK || spec.scaled) return 1;
  // The whole image, which is only copied, is what exact arithmetic begins with.
  const hw_spec plain{sizeof(hw_spec), info.height, info.width, spec.channels, 0, 0, 0};
  const float all[4] = {0, 0, w, h};
  const hw_items copied{&address, &length, nullptr, nullptr, nullptr, nullptr, all, nullptr};
  const size_t c = spec.channels, line = info.width * c;
  Bytes source(info.height * line);
  if (hw_decode_batch(pool, 1, &copied, &plain, source.data(), int64_t(source.size()), &status, nullptr) || status)
    fail("it decodes at one size alone", 0);
  const int high = int(spec.height), wide = int(spec.width);
  const double right = std::min(double(float(double(box.left) + double(box.width))), double(info.width));
  const double bottom = std::min(double(float(double(box.top) + double(box.height))), double(info.height));
  for (int time = 0; time < 40; time++) {
    const int y = int(random.below(size_t(high))), x = int(random.below(size_t(wide)));
    const Weights down = weights(box.top, bottom - box.top, int(info.height), high, y);
    const Weights across = weights(box.left, right - box.left, int(info.width), wide, x);
    for (size_t k = 0; k < c; k++) {
      double value = 0;
      for (size_t i = 0; i < down.of.size(); i++) {
        const uint8_t* const row = &source[(size_t(down.first) + i) * line + size_t(across.first) * c + k];
        for (size_t j = 0; j < across.of.size(); j++) value += down.of[i] * across.of[j] * row[j * c];
      }
      const int found = to[(size_t(y) * size_t(wide) + size_t(x)) * c + k];
      if (std::abs(value - found) > kTolerance) {
        fprintf(stderr, "%u x %u of %g %g %g %g of %u x %u: %d %d %g %d\n", spec.width, spec.height, box.left, box.top,
                box.width, box.height, info.width, info.height, x, y, value, found);
        fail("its pixels are not those of exact arithmetic", 0);
      }
    }
  }
  return 1;
}

}  // namespace

int fuzz_sizes(const Campaign& campaign) {
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  run_on_crews(campaign, 1, [&](hw_pool* pool, Random& random) { return one(pool, seeds, random); });
  return 0;
}

}  // namespace headway::fuzz
