// A 3x3 convolution and its gradients by Winograd's tiles. The threads share out the tiles, and of the gradient of the
// filter the points: each sum is done by one thread in one order.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "team.h"
#include "winograd.h"

namespace headway {
namespace {

// Tiles that a thread takes at once. On two cores with AVX2 and 512 kB of second-level cache, 24 to 60 are as fast with
// tiles of 4x4 and of 7x7; 96 take half as long again with 256 channels.
constexpr int64_t kBlockTiles = 36;
// Output channels that are transformed back at once: the products of 36 tiles of 4x4 take 330 kB, of 7x7 750 kB. On the
// same cores 128 channels take 5 % longer.
constexpr int64_t kChunkChannels = 64;
// The gradient of a filter sums over parts of the tiles. Inputs and gradients of a part, transformed, take so much
// memory, to stay in a cache that cores share; but a part has at least so many tiles.
constexpr int64_t kGradientBytes = 4 << 20, kFewestTiles = 32;
// Tiles of a part that a thread transforms at once.
constexpr int64_t kSharedTiles = 8;
// Between points lies a cache line more than they need: without it, the numbers of one tile at all points often meet in
// the same few lines of a cache. It saves 6 % of the time on those cores.
constexpr int64_t kGap = 16;
// A term of a tile's transforms takes as long as two products, and to transform a filter takes as long as the products
// of so many tiles: from timings of all tiles on those cores, layers of 24 to 512 channels, 8 and 512 images.
constexpr int64_t kTermProducts = 2, kFilterTiles = 50;

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

// Sizes of a convolution, with tiles of the size that takes the least time.
struct Plan {
  const Winograd& w = winograd();
  int64_t height, width;  // of an output
  int64_t vectors, in;    // of input channels, and these rounded up to whole vectors
  int64_t panel, panels, out;
  const TileTransforms& of;
  int64_t rows, columns, tiles;

  explicit Plan(const hw_convolution& c)
      : height(c.height + 2 * c.padding - 2),
        width(c.width + 2 * c.padding - 2),
        vectors(divide_up(c.in_channels, w.lanes)),
        in(vectors * w.lanes),
        panel(2 * w.lanes),
        panels(divide_up(c.out_channels, panel)),
        out(panels * panel),
        of(choose(c.n, c.tile)),
        rows(divide_up(height, of.tile)),
        columns(divide_up(width, of.tile)),
        tiles(c.n * rows * columns) {}

  // In products; a double has room for those of the largest images.
  double cost(const TileTransforms& t, int64_t n) const {
    const double tiles = double(n) * double(divide_up(height, t.tile)) * double(divide_up(width, t.tile));
    const double products = double(t.points) * double(in) * double(out);
    const double terms = double(t.input_terms) * double(in) + double(t.output_terms) * double(out);
    return tiles * (products + kTermProducts * terms) + kFilterTiles * products;
  }

  const TileTransforms& choose(int64_t n, int64_t tile) const {
    if (tile) return w.transforms[tile - kSmallestTile];
    const TileTransforms* best = w.transforms;
    for (const TileTransforms& t : w.transforms)
      if (cost(t, n) < cost(*best, n)) best = &t;
    return *best;
  }
};

void convolve(const hw_convolution& c) {
  const Plan plan(c);
  // Small images in small batches have few tiles: each thread gets some of them.
  const int64_t shared = round_up(divide_up(plan.tiles, c.threads), plan.w.rows);
  const int64_t capacity = std::min(kBlockTiles / plan.w.rows * plan.w.rows, shared), points = plan.of.points;
  const int64_t chunk = std::min(plan.panels, kChunkChannels / plan.panel), width = chunk * plan.panel;
  const int64_t panel = plan.in * plan.panel, input_point = capacity * plan.in + kGap;
  const int64_t product_point = capacity * width + kGap;
  // Of whole chunks, though the last one may have fewer panels.
  const int64_t filter_point = chunk * panel + kGap;
  const Filter<const float> given{c.filter, c.out_channels, c.in_channels, c.strides};
  Floats filter(divide_up(plan.panels, chunk) * points * filter_point);
  share(c.team, c.threads, plan.panels * plan.vectors, [&](int64_t k, int64_t) {
    const int64_t p = k / plan.vectors, begin = k % plan.vectors * plan.w.lanes;
    plan.of.filter(given, p, begin, begin + plan.w.lanes, filter_point,
                   filter.get() + p / chunk * points * filter_point + p % chunk * panel);
  });
  const int64_t scratch = points * (input_point + product_point);
  Floats memory(scratch * c.threads);
  const Images<const float> in{c.input, c.height, c.width, c.in_channels};
  const Images<float> out{c.output, plan.height, plan.width, c.out_channels};
  share(c.team, c.threads, divide_up(plan.tiles, capacity), [&](int64_t block, int64_t thread) {
    float* const inputs = memory.get() + scratch * thread;
    float* const products = inputs + points * input_point;
    const int64_t first = block * capacity, count = std::min(capacity, plan.tiles - first);
    const Tiles tiles{plan.rows, plan.columns, first, count};
    // The products are of whole rows of tiles. Those beyond the last tile are not used, but denormal ones take long.
    if (count < capacity) std::fill(inputs, products, 0.0f);
    plan.of.input(in, c.padding, tiles, {inputs, capacity, input_point});
    for (int64_t begin = 0; begin < plan.panels; begin += chunk) {
      const int64_t size = std::min(chunk, plan.panels - begin);
      for (int64_t k = 0; k < points; k++)
        for (int64_t p = 0; p < size; p++)
          plan.w.multiply(inputs + k * input_point, count, capacity,
                          filter.get() + (begin / chunk * points + k) * filter_point + p * panel, plan.in,
                          products + k * product_point + p * plan.panel, width);
      plan.of.output(products, product_point, begin * plan.panel, width, c.bias, tiles, out);
    }
  });
}

void convolve_filter(const hw_convolution& c) {
  const Plan plan(c);
  const int64_t points = plan.of.points, lanes = plan.w.lanes;
  const int64_t fitting = kGradientBytes / (points * (plan.in + plan.out) * int64_t(sizeof(float)));
  const int64_t capacity = std::min(plan.tiles, std::max(kFewestTiles, fitting));
  const int64_t panel = plan.in * plan.panel, filter_point = plan.panels * panel + kGap;
  const int64_t input_point = capacity * plan.in + kGap, gradient_point = capacity * plan.out + kGap;
  Floats filter(points * filter_point), inputs(points * input_point), gradients(points * gradient_point);
  gradients.clear();  // the last panel may have more channels than the images
  const Images<const float> in{c.input, c.height, c.width, c.in_channels};
  const Images<const float> out{c.output, plan.height, plan.width, c.out_channels};
  for (int64_t first = 0; first < plan.tiles; first += capacity) {
    const int64_t count = std::min(capacity, plan.tiles - first);
    share(c.team, c.threads, divide_up(count, kSharedTiles), [&](int64_t k, int64_t) {
      const int64_t at = k * kSharedTiles;
      const Tiles tiles{plan.rows, plan.columns, first + at, std::min(kSharedTiles, count - at)};
      plan.of.input(in, c.padding, tiles, {inputs.get() + at * lanes, capacity, input_point});
      plan.of.gradient(out, tiles, {gradients.get() + at * lanes, capacity, gradient_point});
    });
    share(c.team, c.threads, points * plan.panels, [&](int64_t k, int64_t) {
      const int64_t at = k / plan.panels, p = k % plan.panels;
      plan.w.accumulate(inputs.get() + at * input_point,
                        gradients.get() + at * gradient_point + p * capacity * plan.panel, count, capacity, plan.in,
                        first == 0, filter.get() + at * filter_point + p * panel);
    });
  }
  const Filter<float> gradient{c.filter_gradient, c.out_channels, c.in_channels, c.strides};
  share(c.team, c.threads, plan.panels * plan.vectors, [&](int64_t k, int64_t) {
    const int64_t p = k / plan.vectors, begin = k % plan.vectors * lanes;
    plan.of.filter_gradient(filter.get() + p * panel, filter_point, p, begin, begin + lanes, gradient);
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
  if (c.tile && (c.tile < kSmallestTile || c.tile > kLargestTile)) return false;
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
