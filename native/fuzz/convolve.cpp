// hw_convolve and hw_convolve_filter with wrong sizes and pointers: refused, or done with nothing touched beside the
// images, filters and biases. Each lies in memory that is exactly as long as it has to be.
#include <algorithm>

#include "campaign.h"

namespace headway::fuzz {
namespace {

Exact numbers(int64_t count, Random& random) {
  Bytes values(size_t(count) * sizeof(float));
  if (random.one_in(2))
    for (uint8_t& value : values) value = random.byte();
  return Exact(values);
}

template <class T = float>
T* address_of(const Exact& memory) {
  return reinterpret_cast<T*>(memory.address());
}

size_t one(Random& random) {
  static constexpr int64_t kWrong[] = {-1, 0, INT64_MIN, INT64_MAX};
  hw_convolution c{};
  const auto size = [&](size_t most) { return int64_t(1 + random.below(most)); };
  c.size = sizeof c;
  c.n = size(5), c.height = size(13), c.width = size(13), c.padding = int64_t(random.below(3));
  c.in_channels = size(random.one_in(6) ? 80 : 20), c.out_channels = size(random.one_in(6) ? 140 : 20);
  c.tile = random.one_in(4) ? 0 : int64_t(2 + random.below(6));
  c.threads = random.one_in(3) ? uint32_t(size(3)) : 1;
  c.team = random.one_in(2) ? run_team : nullptr;
  const int64_t height = c.height + 2 * c.padding - 2, width = c.width + 2 * c.padding - 2;
  const bool is_empty = height < 1 || width < 1;
  bool must_refuse = is_empty;
  const Exact input = numbers(c.n * c.height * c.width * c.in_channels, random);
  const Exact output = numbers(is_empty ? 1 : c.n * height * width * c.out_channels, random);
  const Exact filter = numbers(9 * c.in_channels * c.out_channels, random), bias = numbers(c.out_channels, random);
  c.input = address_of(input), c.output = address_of(output);
  if (random.one_in(2)) c.bias = address_of(bias);
  // Dense, with rows of taps or channels innermost, or mirrored.
  const int64_t in = c.in_channels;
  const bool is_last = random.one_in(2), is_mirrored = random.one_in(2);
  const int64_t strides[2][4] = {{9 * in, 9, 3, 1}, {9 * in, 1, 3 * in, in}};
  int64_t first = 0;
  for (int i = 0; i < 4; i++) {
    c.strides[i] = strides[is_last][i];
    if (i < 2 || !is_mirrored) continue;
    first += 2 * c.strides[i];
    c.strides[i] = -c.strides[i];
  }
  c.filter = address_of(filter) + first, c.filter_gradient = address_of(filter) + first;
  const bool of_filter = random.one_in(2);
  if (random.one_in(4)) {
    must_refuse = true;
    const int64_t wrong = kWrong[random.below(4)];
    switch (random.below(9)) {
      case 0: c.size = odd_number(random), must_refuse = is_empty || c.size != sizeof c; break;
      case 1: c.threads = random.one_in(2) ? 0 : UINT32_MAX; break;
      case 2: c.n = wrong; break;
      case 3: (random.one_in(2) ? c.height : c.width) = wrong; break;
      case 4: (random.one_in(2) ? c.in_channels : c.out_channels) = wrong; break;
      case 5: c.padding = random.one_in(2) ? -1 : INT64_MAX; break;
      case 6: c.tile = random.one_in(2) ? 1 : random.one_in(2) ? 8 : wrong ? wrong : -2; break;
      case 7: random.one_in(2) ? c.input = nullptr : c.output = nullptr; break;
      default: of_filter ? c.filter_gradient = nullptr : c.filter = nullptr;
    }
  }
  const int32_t result = of_filter ? hw_convolve_filter(&c) : hw_convolve(&c);
  if (result != 0 && result != -1) fail("convolve has another result", size_t(c.n));
  if (must_refuse != (result == -1)) fail("a wrong convolution was done, or a right one refused", size_t(c.n));
  if (result == -1) return 1;
  // Once more by other threads, over other numbers: each is written, and is the same.
  const Exact& written = of_filter ? filter : output;
  const Bytes first_time(written.data(), written.data() + written.size());
  const Exact again(Bytes(written.size(), 0xA5));
  c.threads = 1 + uint32_t(random.below(4)), c.team = run_team;
  if (of_filter) c.filter_gradient = address_of(again) + first;
  else c.output = address_of(again);
  if ((of_filter ? hw_convolve_filter(&c) : hw_convolve(&c)) != 0) fail("a convolution was done once", size_t(c.n));
  if (!std::equal(first_time.begin(), first_time.end(), again.data())) fail("threads change a result", size_t(c.n));
  return 1;
}

}  // namespace

int fuzz_convolve(const Campaign& campaign) {
  if (hw_convolve(nullptr) != -1 || hw_convolve_filter(nullptr) != -1) fail("NULL was not refused", 0);
  campaign.run([](Random& random) {
    static constexpr const char* kIsas[] = {"portable", "avx2", "avx512"};  // the best there is for one that is not
    setenv("HEADWAY_ISA", kIsas[random.below(3)], 1);
    return one(random);
  });
  return 0;
}

}  // namespace headway::fuzz
