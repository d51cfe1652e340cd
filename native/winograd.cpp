// Compiled once for each instruction set (CMakeLists.txt says with which flags), in a namespace of its name.
#include "winograd.h"

#include <cstring>
#include <utility>

#include "toom_cook.h"

namespace headway {
namespace HW_ISA {
namespace {

// kRows x 2 vectors of sums, two vectors of a panel and one number fill the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 6;
#endif
constexpr int kPanel = 2 * kLanes, kLineFloats = 16;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

#define HW_INLINE inline __attribute__((always_inline))

HW_INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

HW_INLINE void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// The first `count` lanes; the others are 0.
HW_INLINE Vector load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float values[kLanes] = {};
  std::memcpy(values, from, size_t(count) * sizeof(float));
  return load(values);
}

HW_INLINE void store(float* to, Vector value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  float values[kLanes];
  store(values, value);
  std::memcpy(to, values, size_t(count) * sizeof(float));
}

template <int tile>
struct Output {
  static constexpr auto m = ToomCook<tile>::make_output();
};
template <int tile>
struct Input {
  static constexpr auto m = ToomCook<tile>::make_input();
};
template <int tile>
struct Taps {
  static constexpr auto m = ToomCook<tile>::make_taps();
};

template <class M>
struct Transposed {
  static constexpr auto m = M::m.transpose();
};

template <class M, int i, int j>
HW_INLINE void add_term(const Vector* in, Vector& sum) {
  constexpr float factor = M::m.at[i][j];
  if constexpr (factor != 0) {
    if constexpr (M::m.is_first(i, j))
      sum = factor == 1 ? in[j] : factor * in[j];
    else if constexpr (factor == 1)
      sum += in[j];
    else if constexpr (factor == -1)
      sum -= in[j];
    else
      sum += factor * in[j];
  }
}

template <class M, int i, int... j>
HW_INLINE Vector sum_row(const Vector* in, std::integer_sequence<int, j...>) {
  Vector sum;
  (add_term<M, i, j>(in, sum), ...);
  return sum;
}

// out = matrix times in. What is 0 or 1 in the matrix costs nothing.
template <class M, int... i>
HW_INLINE void apply(const Vector* in, Vector* out, std::integer_sequence<int, i...>) {
  ((out[i] = sum_row<M, i>(in, std::make_integer_sequence<int, M::m.columns>{})), ...);
}

// matrix times in times matrix^T. in(row, column) is a vector, out(row, column, vector) takes one.
template <class M, class In, class Out>
HW_INLINE void apply_both(const In& in, const Out& out) {
  constexpr int rows = M::m.rows, columns = M::m.columns;
  constexpr std::make_integer_sequence<int, rows> all{};
  Vector half[columns][rows];
  for (int x = 0; x < columns; x++) {
    Vector column[columns];
#pragma GCC unroll 9
    for (int y = 0; y < columns; y++) column[y] = in(y, x);
    apply<M>(column, half[x], all);
  }
  for (int y = 0; y < rows; y++) {
    Vector row[columns], done[rows];
#pragma GCC unroll 9
    for (int x = 0; x < columns; x++) row[x] = half[x][y];
    apply<M>(row, done, all);
#pragma GCC unroll 9
    for (int x = 0; x < rows; x++) out(y, x, done[x]);
  }
}

// Calls each(i, image, top, left) with the upper left output of each tile.
template <int tile, class Each>
HW_INLINE void walk(const Tiles& tiles, const Each& each) {
  int64_t column = tiles.first % tiles.columns, row = tiles.first / tiles.columns % tiles.rows;
  int64_t image = tiles.first / tiles.columns / tiles.rows;
  for (int64_t i = 0; i < tiles.count; i++) {
    each(i, image, row * tile, column * tile);
    if (++column < tiles.columns) continue;
    column = 0;
    if (++row == tiles.rows) row = 0, image++;
  }
}

// Addresses of side x side pixels; NULL outside of the image. Returns whether all are inside.
template <int side, class T>
HW_INLINE bool find_pixels(const Images<T>& images, int64_t image, int64_t top, int64_t left, T* to[side * side]) {
  bool is_inside = true;
  for (int i = 0; i < side; i++)
    for (int j = 0; j < side; j++) {
      const int64_t y = top + i, x = left + j;
      const bool is_pixel = y >= 0 && y < images.height && x >= 0 && x < images.width;
      const int64_t at = ((image * images.height + y) * images.width + x) * images.channels;
      to[i * side + j] = is_pixel ? images.data + at : nullptr;
      is_inside = is_inside && is_pixel;
    }
  return is_inside;
}

template <int tile, class M>
HW_INLINE void transform_tiles(const Images<const float>& images, int64_t padding, const Tiles& tiles,
                               const Transformed& to) {
  constexpr int rows = M::m.rows, columns = M::m.columns;
  walk<tile>(tiles, [&](int64_t i, int64_t image, int64_t top, int64_t left) {
    const float* pixels[columns * columns];
    const bool is_inside = find_pixels<columns>(images, image, top - padding, left - padding, pixels);
    for (int64_t c = 0; c < images.channels; c += kLanes) {
      float* const at = to.data + (c / kLanes * to.capacity + i) * kLanes;
      const auto put = [&](int y, int x, Vector value) { store(at + (y * rows + x) * to.point, value); };
      if (is_inside && c + kLanes <= images.channels)
        apply_both<M>([&](int y, int x) { return load(pixels[y * columns + x] + c); }, put);
      else
        apply_both<M>(
            [&](int y, int x) {
              const float* const pixel = pixels[y * columns + x];
              return pixel ? load(pixel + c, images.channels - c) : Vector{};
            },
            put);
    }
  });
}

template <int tile>
void input(const Images<const float>& images, int64_t padding, const Tiles& tiles, const Transformed& to) {
  transform_tiles<tile, Input<tile>>(images, padding, tiles, to);
}

template <int tile>
void gradient(const Images<const float>& images, const Tiles& tiles, const Transformed& to) {
  transform_tiles<tile, Transposed<Output<tile>>>(images, 0, tiles, to);
}

template <int tile>
void output(const float* from, int64_t point, int64_t channel, int64_t width, const float* bias, const Tiles& tiles,
            const Images<float>& images) {
  constexpr int span = tile + 2;
  const int64_t end = images.channels < channel + width ? images.channels : channel + width;
  walk<tile>(tiles, [&](int64_t i, int64_t image, int64_t top, int64_t left) {
    float* pixels[tile * tile];
    find_pixels<tile>(images, image, top, left, pixels);
    for (int64_t c = channel; c < end; c += kLanes) {
      const float* const at = from + i * width + (c - channel);
      const Vector add = bias ? load(bias + c, end - c) : Vector{};
      apply_both<Output<tile>>(
          [&](int y, int x) { return load(at + (y * span + x) * point); },
          [&](int y, int x, Vector value) {
            if (float* const pixel = pixels[y * tile + x]) store(pixel + c, value + add, end - c);
          });
    }
  });
}

// Output channels of panel p.
HW_INLINE int64_t size_of_panel(int64_t out, int64_t p) {
  return out - p * kPanel < kPanel ? out - p * kPanel : kPanel;
}

template <int tile>
void filter(const Filter<const float>& filter, int64_t panel, int64_t begin, int64_t end, int64_t point, float* to) {
  constexpr int span = tile + 2;
  // The taps of a panel's filters lie far apart, and those of neighbouring input channels beside them in a cache line.
  for (int64_t i = begin; i < end; i++) {
    float taps[9][kPanel] = {};
    for (int64_t k = 0; i < filter.in && k < size_of_panel(filter.out, panel); k++) {
      const float* const one = filter.data + (panel * kPanel + k) * filter.strides[0] + i * filter.strides[1];
      for (int y = 0; y < 3; y++)
        for (int x = 0; x < 3; x++) taps[3 * y + x][k] = one[y * filter.strides[2] + x * filter.strides[3]];
    }
    for (int half = 0; half < kPanel; half += kLanes)
      apply_both<Taps<tile>>(
          [&](int y, int x) { return load(taps[3 * y + x] + half); },
          [&](int y, int x, Vector value) { store(to + (y * span + x) * point + i * kPanel + half, value); });
  }
}

template <int tile>
void filter_gradient(const float* from, int64_t point, int64_t panel, int64_t begin, int64_t end,
                     const Filter<float>& filter) {
  constexpr int span = tile + 2;
  for (int64_t i = begin; i < end && i < filter.in; i++) {
    float taps[9][kPanel];
    for (int half = 0; half < kPanel; half += kLanes)
      apply_both<Transposed<Taps<tile>>>(
          [&](int y, int x) { return load(from + (y * span + x) * point + i * kPanel + half); },
          [&](int y, int x, Vector value) { store(taps[3 * y + x] + half, value); });
    for (int64_t k = 0; k < size_of_panel(filter.out, panel); k++) {
      float* const one = filter.data + (panel * kPanel + k) * filter.strides[0] + i * filter.strides[1];
      for (int y = 0; y < 3; y++)
        for (int x = 0; x < 3; x++) one[y * filter.strides[2] + x * filter.strides[3]] = taps[3 * y + x][k];
    }
  }
}

void multiply(const float* tiles, int64_t count, int64_t capacity, const float* filter, int64_t in, float* to,
              int64_t width) {
  for (int64_t tile = 0; tile < count; tile += kRows) {
    Vector sum[kRows][2] = {};
    const float* b = filter;
    // The first tiles fetch the next panel, which follows this one in memory.
    const float* next = filter + (tile ? 0 : in * kPanel);
    for (int64_t i = 0; i < in; i += kLanes) {
      const float* const a = tiles + (i / kLanes * capacity + tile) * kLanes;
#pragma GCC unroll 4
      for (int k = 0; k < kLanes; k++, b += kPanel, next += kPanel) {
        for (int line = 0; line < kPanel; line += kLineFloats) __builtin_prefetch(next + line);
        const Vector b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
          sum[r][0] += a[r * kLanes + k] * b0;
          sum[r][1] += a[r * kLanes + k] * b1;
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
      store(to + (tile + r) * width, sum[r][0]);
      store(to + (tile + r) * width + kLanes, sum[r][1]);
    }
  }
}

void accumulate(const float* inputs, const float* gradients, int64_t count, int64_t capacity, int64_t in, bool is_first,
                float* to) {
  constexpr int kHalf = kLanes / 2;
  for (int64_t i = 0; i < in; i += kHalf) {
    Vector sum[kHalf][2] = {};
    const float* a = inputs + i / kLanes * capacity * kLanes + i % kLanes;
    const float *b0 = gradients, *b1 = gradients + capacity * kLanes;
#pragma GCC unroll 2
    for (int64_t t = 0; t < count; t++, a += kLanes, b0 += kLanes, b1 += kLanes) {
      const Vector v0 = load(b0), v1 = load(b1);
#pragma GCC unroll 8
      for (int r = 0; r < kHalf; r++) {
        sum[r][0] += a[r] * v0;
        sum[r][1] += a[r] * v1;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHalf; r++) {
      float* const at = to + (i + r) * kPanel;
      store(at, is_first ? sum[r][0] : load(at) + sum[r][0]);
      store(at + kLanes, is_first ? sum[r][1] : load(at + kLanes) + sum[r][1]);
    }
  }
}

// Of apply_both: the matrix times each column, then times each row of that.
template <class M>
constexpr int count_terms() {
  return M::m.count() * (M::m.columns + M::m.rows);
}

template <int tile>
constexpr TileTransforms kTransforms = {tile,
                                        (tile + 2) * (tile + 2),
                                        count_terms<Input<tile>>(),
                                        count_terms<Output<tile>>(),
                                        input<tile>,
                                        gradient<tile>,
                                        output<tile>,
                                        filter<tile>,
                                        filter_gradient<tile>};

constexpr Winograd kWinograd = {
    kLanes,
    kRows,
    {kTransforms<2>, kTransforms<3>, kTransforms<4>, kTransforms<5>, kTransforms<6>, kTransforms<7>},
    multiply,
    accumulate};

}  // namespace

const Winograd& winograd() { return kWinograd; }

}  // namespace HW_ISA
}  // namespace headway
