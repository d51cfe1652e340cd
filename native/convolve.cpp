// A 3x3 convolution and its gradients by Winograd's tiles. The threads share out the tiles, and of the gradient of the
// filter the points: each sum is done by one thread in one order.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "team.h"
#include "winograd.h"

namespace headway {
namespace {

// Tiles that a thread takes at once. 24 to 48 are as fast on a core with 512 kB of second-level cache; 96 take half as
// long again with 256 channels.
constexpr int64_t kBlockTiles = 36;
// Output channels that are transformed back at once: with 36 tiles, their products take 330 kB.
constexpr int64_t kChunkChannels = 64;
// The gradient of a filter sums over parts of the tiles. Inputs and gradients of a part, transformed, take so much
// memory, to stay in a cache that cores share; but a part has at least so many tiles.
constexpr int64_t kGradientBytes = 4 << 20, kFewestTiles = 32;
// Tiles of a part that a thread transforms at once.
constexpr int64_t kSharedTiles = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Floats on cache lines. Raises std::bad_alloc.
class Floats final {
 public:
  explicit Floats(int64_t count)
      : data_(static_cast<float*>(std::aligned_alloc(64, size_t(round_up(count * int64_t(sizeof(float)), 64))))),
        count_(count) {
    if (!data_) throw std::bad_alloc();
  }
  ~Floats() { std::free(data_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* get() const { return data_; }
  void clear() { std::fill(data_, data_ + count_, 0.0f); }

 private:
  float* data_;
  int64_t count_;
};

// Sizes of a convolution, with tiles of the size that takes the fewest products.
struct Plan {
  const Winograd& w = winograd();
  int64_t height, width;  // of an output
  const TileTransforms& of;
  int64_t rows, columns, tiles;
  int64_t vectors, in;  // of input channels, and these rounded up to whole vectors
  int64_t panel, panels, out;
  int64_t point;  // floats of a transformed filter at one point

  explicit Plan(const hw_convolution& c)
      : height(c.height + 2 * c.padding - 2),
        width(c.width + 2 * c.padding - 2),
        of(choose()),
        rows(divide_up(height, of.tile)),
        columns(divide_up(width, of.tile)),
        tiles(c.n * rows * columns),
        vectors(divide_up(c.in_channels, w.lanes)),
        in(vectors * w.lanes),
        panel(2 * w.lanes),
        panels(divide_up(c.out_channels, panel)),
        out(panels * panel),
        point(in * out) {}

  int64_t products(const TileTransforms& t) const {
    return divide_up(height, t.tile) * divide_up(width, t.tile) * t.points;
  }

  const TileTransforms& choose() const {
    const TileTransforms* best = &w.transforms[2];
    for (const TileTransforms& t : w.transforms)
      if (products(t) < products(*best)) best = &t;
    return *best;
  }
};

void convolve(const hw_convolution& c) {
  const Plan plan(c);
  // Small images in small batches have few tiles: each thread gets some of them.
  const int64_t shared = round_up(divide_up(plan.tiles, c.threads), plan.w.rows);
  const int64_t capacity = std::min(kBlockTiles / plan.w.rows * plan.w.rows, shared), points = plan.of.points;
  const int64_t chunk = std::min(plan.panels, kChunkChannels / plan.panel), width = chunk * plan.panel;
  const Filter<const float> given{c.filter, c.out_channels, c.in_channels, c.strides};
  Floats filter(points * plan.point);
  share(c.team, c.threads, plan.vectors, [&](int64_t k, int64_t) {
    plan.of.filter(given, k * plan.w.lanes, (k + 1) * plan.w.lanes, plan.in, chunk, filter.get());
  });
  const int64_t scratch = points * capacity * (plan.in + width);
  Floats memory(scratch * c.threads);
  const Images<const float> in{c.input, c.height, c.width, c.in_channels};
  const Images<float> out{c.output, plan.height, plan.width, c.out_channels};
  share(c.team, c.threads, divide_up(plan.tiles, capacity), [&](int64_t block, int64_t thread) {
    float* const inputs = memory.get() + scratch * thread;
    float* const products = inputs + points * capacity * plan.in;
    const int64_t first = block * capacity, count = std::min(capacity, plan.tiles - first);
    const Tiles tiles{plan.rows, plan.columns, first, count, capacity};
    // The products are of whole rows of tiles. Those beyond the last tile are not used, but denormal ones take long.
    if (count < capacity) std::fill(inputs, products, 0.0f);
    plan.of.input(in, c.padding, tiles, inputs);
    for (int64_t begin = 0; begin < plan.panels; begin += chunk) {
      const int64_t size = std::min(chunk, plan.panels - begin);
      for (int64_t k = 0; k < points; k++)
        for (int64_t p = 0; p < size; p++)
          plan.w.multiply(inputs + k * capacity * plan.in, count, capacity,
                          filter.get() + (begin * points + k * size + p) * plan.in * plan.panel, plan.in,
                          products + k * capacity * width + p * plan.panel, width);
      plan.of.output(products, begin * plan.panel, width, c.bias, tiles, out);
    }
  });
}

void convolve_filter(const hw_convolution& c) {
  const Plan plan(c);
  const int64_t points = plan.of.points, lanes = plan.w.lanes;
  const int64_t fitting = kGradientBytes / (points * (plan.in + plan.out) * int64_t(sizeof(float)));
  const int64_t capacity = std::min(plan.tiles, std::max(kFewestTiles, fitting));
  Floats filter(points * plan.point), inputs(points * capacity * plan.in), gradients(points * capacity * plan.out);
  filter.clear();
  gradients.clear();  // the last panel may have more channels than the images
  const Images<const float> in{c.input, c.height, c.width, c.in_channels};
  const Images<const float> out{c.output, plan.height, plan.width, c.out_channels};
  for (int64_t first = 0; first < plan.tiles; first += capacity) {
    const int64_t count = std::min(capacity, plan.tiles - first);
    share(c.team, c.threads, divide_up(count, kSharedTiles), [&](int64_t k, int64_t) {
      const int64_t at = k * kSharedTiles;
      const Tiles tiles{plan.rows, plan.columns, first + at, std::min(kSharedTiles, count - at), capacity};
      plan.of.input(in, c.padding, tiles, inputs.get() + at * lanes);
      plan.of.gradient(out, tiles, 2 * plan.panels, gradients.get() + at * lanes);
    });
    share(c.team, c.threads, points * plan.panels, [&](int64_t k, int64_t) {
      const int64_t at = k / plan.panels, p = k % plan.panels;
      plan.w.accumulate(inputs.get() + at * capacity * plan.in,
                        gradients.get() + capacity * (at * plan.out + p * plan.panel), count, capacity, plan.in,
                        filter.get() + at * plan.point + p * plan.in * plan.panel);
    });
  }
  const Filter<float> gradient{c.filter_gradient, c.out_channels, c.in_channels, c.strides};
  share(c.team, c.threads, plan.vectors, [&](int64_t k, int64_t) {
    plan.of.filter_gradient(filter.get(), k * lanes, (k + 1) * lanes, plan.in, gradient);
  });
}

constexpr int64_t kLargestSide = 1 << 16, kMostChannels = 1 << 16;

// a * b, or more than memory has.
int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

bool is_aligned(const float* address) { return address && reinterpret_cast<uintptr_t>(address) % sizeof(float) == 0; }

bool is_good(const hw_convolution& c) {
  if (c.size != sizeof(hw_convolution) || c.threads < 1 || c.threads > 4096 || c.n < 1) return false;
  if (c.padding < 0 || c.padding > 2 || !is_aligned(c.input) || !is_aligned(c.output)) return false;
  if (reinterpret_cast<uintptr_t>(c.bias) % sizeof(float)) return false;
  for (int64_t side : {c.height, c.width})
    if (side < 1 || side > kLargestSide || side + 2 * c.padding < 3) return false;
  for (int64_t channels : {c.in_channels, c.out_channels})
    if (channels < 1 || channels > kMostChannels) return false;
  const int64_t pixels = times(c.n, (c.height + 2) * (c.width + 2));
  return times(pixels, std::max(c.in_channels, c.out_channels)) <= PTRDIFF_MAX / int64_t(sizeof(float));
}

template <class Work>
int32_t run(const hw_convolution* c, const float* filter, const Work& work) {
  if (!c || !is_good(*c) || !is_aligned(filter)) return -1;
  try {
    work(*c);
    return 0;
  } catch (...) {  // no memory
    return -1;
  }
}

}  // namespace
}  // namespace headway

extern "C" int32_t hw_convolve(const hw_convolution* c) {
  return headway::run(c, c ? c->filter : nullptr, headway::convolve);
}

extern "C" int32_t hw_convolve_filter(const hw_convolution* c) {
  return headway::run(c, c ? c->filter_gradient : nullptr, headway::convolve_filter);
}
