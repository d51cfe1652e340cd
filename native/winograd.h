// 3x3 convolutions with stride 1 by Winograd's minimal filtering: a tile of 7x7 outputs takes 81 products for each pair
// of channels in place of 441, one of 4x4 takes 36 in place of 144, one of 2x2 takes 16 in place of 36. Lavin and Gray
// 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308. Compiled once for each instruction set.
//
// A tile of m x m outputs becomes (m + 2) x (m + 2) numbers for each channel, its points. They are stored as
// [point][vector][tile][lane], with room for `capacity` tiles, and vectors of `lanes` channels; channels beyond the last
// are 0. A filter becomes [chunk][point][panel][input channel][2 * lanes output channels], in the order in which it is
// read; a chunk is some panels. From one point to the next it is `point` floats.
#pragma once

#include <cstdint>

namespace headway {

// Images [n, height, width, channels], dense.
template <class T>
struct Images {
  T* data;
  int64_t height, width, channels;
};

// Tiles first .. first + count - 1 of images that have rows x columns tiles each.
struct Tiles {
  int64_t rows, columns, first, count;
};

// Where transformed tiles go: the first of them at `data`.
struct Transformed {
  float* data;
  int64_t capacity, point;
};

// A filter [out, in, 3, 3]: its strides, in elements, may be negative.
template <class T>
struct Filter {
  T* data;
  int64_t out, in;
  const int64_t* strides;  // four
};

// The transforms of one size of tiles, by the matrices A, B and G of the source.
struct TileTransforms {
  int tile, points;
  // Factors that are not 0, in both steps of `input` and of `output`, for one tile and channel.
  int input_terms, output_terms;
  // B^T d B of the pixels d of each tile, which begins `padding` pixels before its outputs; pixels outside are 0.
  void (*input)(const Images<const float>& images, int64_t padding, const Tiles& tiles, const Transformed& to);
  // A g A^T of the gradients g of each tile's outputs.
  void (*gradient)(const Images<const float>& images, const Tiles& tiles, const Transformed& to);
  // A^T m A + bias, to channels channel .. channel + width - 1. `from` is [point][tile][width].
  void (*output)(const float* from, int64_t point, int64_t channel, int64_t width, const float* bias,
                 const Tiles& tiles, const Images<float>& images);
  // G g G^T of a panel's filters, for input channels begin .. end - 1, to [point][input channel][2 * lanes].
  void (*filter)(const Filter<const float>& filter, int64_t panel, int64_t begin, int64_t end, int64_t point, float* to);
  // G^T u G of these.
  void (*filter_gradient)(const float* from, int64_t point, int64_t panel, int64_t begin, int64_t end,
                          const Filter<float>& filter);
};

constexpr int kSmallestTile = 2, kLargestTile = 7;

struct Winograd {
  int lanes;
  int rows;  // tiles that `multiply` takes at once: it needs a capacity that is a multiple of them
  TileTransforms transforms[kLargestTile - kSmallestTile + 1];

  // At one point, for one panel: to [tile][width] = tiles [vector][tile][lane] times filter [input channel][2 * lanes].
  void (*multiply)(const float* tiles, int64_t count, int64_t capacity, const float* filter, int64_t in, float* to,
                   int64_t width);
  // At one point, for one panel: to [input channel][2 * lanes] = inputs [vector][tile][lane], transposed, times
  // gradients, of which this panel is two vectors; plus what was there, unless this is the first part.
  void (*accumulate)(const float* inputs, const float* gradients, int64_t count, int64_t capacity, int64_t in,
                     bool is_first, float* to);
};

// For the instruction set of make_worker().
const Winograd& winograd();

}  // namespace headway
