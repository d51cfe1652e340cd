// Hot: which source pixels make each output pixel along one axis, and how much of each: Pillow's antialiased triangle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "buffer.h"

namespace headway {
namespace HW_ISA {

// Tables of one axis. Everything that decides a byte is integer arithmetic, or float arithmetic that no compiler may
// fuse (a product is converted to an integer before anything is added), so that instruction sets agree.
class Axis final {
 public:
  // Resizes [low, high), which lies within `size` pixels, to `out` pixels, mirrored where flip says so.
  void place(float low, float high, int size, int out, bool flip) {
    const int64_t from = std::llrint(double(low) * kPixel), length = std::llrint(double(high) * kPixel) - from;
    out_ = out;
    pad_ = (out + 15) / 16 * 16;
    const int64_t step = length / out, support = std::max(step, kPixel);
    support_ = float(support) / float(kPixel);
    int32_t *starts = start_.room(size_t(pad_)), *counts = count_.room(size_t(pad_)), most = 1;
    float* offsets = offset_.room(size_t(pad_));
    int64_t center = flip ? from + step / 2 + (out - 1) * step : from + step / 2;
    const int64_t stride = flip ? -step : step;
    for (int x = 0; x < out; x++, center += stride) {
      const int64_t start = std::max<int64_t>((center - support + kPixel / 2) >> kPixelBits, 0);
      const int64_t end = std::min<int64_t>((center + support + kPixel / 2 - 1) >> kPixelBits, size);
      starts[x] = int32_t(start);
      counts[x] = int32_t(end - start);
      offsets[x] = float(start * kPixel + kPixel / 2 - center) / float(kPixel);
      most = std::max(most, int32_t(end - start));
    }
    const int left = flip ? out - 1 : 0, right = out - 1 - left, origin = starts[left];
    taps = most;
    first = origin;
    last = starts[right] + counts[right];
    for (int x = 0; x < out; x++) starts[x] -= origin;
    for (int x = out; x < pad_; x++) {
      starts[x] = starts[out - 1];
      counts[x] = 0;
      offsets[x] = 0;
    }
  }

  // The most bits with which no weight exceeds 2^14. Of a weight of 1 / (0.75 support): the image's border cuts off
  // no more than a quarter of the triangle, since the box lies inside.
  int most_bits() const { return 14 + std::max(0, std::ilogb(support_ / 2)); }

  // Makes weights that sum to 1 << bits (at most 20) for every output pixel: running sums are rounded, and then their
  // differences are taken.
  void weigh(int bits) {
    const int32_t one = int32_t(std::min(float(1 << 22), float(1 << 29) / (support_ + 1)));
    const float slope = float(one) / support_, whole = float(2 << bits);
    weight_.room(size_t(taps) * size_t(pad_));
    for (int x = 0; x < pad_; x += kLanes) {
      const Ints count = lanes<Ints>(count_.data() + x);
      const Floats offset = lanes<Floats>(offset_.data() + x);
      Ints sum = {};
      for (int t = 0; t < taps; t++) {
        const Ints distance = Ints(offset + float(t)) & INT32_MAX;  // without its sign
        const Ints weight = one - __builtin_convertvector(Floats(distance) * slope, Ints);
        sum += weight & ~(weight >> 31) & (t - count) >> 31;  // none below zero, none from beyond the image
        lanes<Ints>(weights(t) + x) = sum;
      }
      const Floats scale = whole / __builtin_convertvector(sum | (count == 0), Floats);  // -1 where it is 0
      Ints before = {};
      for (int t = 0; t < taps; t++) {
        Ints& weight = lanes<Ints>(weights(t) + x);
        const Ints upto = (__builtin_convertvector(__builtin_convertvector(weight, Floats) * scale, Ints) + 1) >> 1;
        weight = upto - before;
        before = upto;
      }
    }
  }

  int start(int x) { return start_[size_t(x)]; }  // its first source pixel, counted from `first`
  int weight(int tap, int x) { return tap < 0 || tap >= taps ? 0 : weights(tap)[x]; }
  int32_t* weights(int tap) { return weight_.data() + size_t(tap) * size_t(pad_); }
  int out() const { return out_; }
  int padded() const { return pad_; }  // output pixels with tables; those beyond out() weigh nothing

  int first = 0, last = 0;  // source pixels with a weight, half open
  int taps = 0;             // most of an output pixel

 private:
  static constexpr int kPixelBits = 40, kLanes = 8;
  static constexpr int64_t kPixel = int64_t(1) << kPixelBits;

  // Vectors of the compiler's own kind: one source for all instruction sets, and not left to its loop vectoriser.
  using Ints = int32_t __attribute__((vector_size(4 * kLanes), may_alias));
  using Floats = float __attribute__((vector_size(4 * kLanes), may_alias));

  template <class V, class T>
  static V& lanes(T* at) {
    return *reinterpret_cast<V*>(at);
  }

  int out_ = 0, pad_ = 0;
  float support_ = 1;
  Buffer<int32_t> start_, count_, weight_;
  Buffer<float> offset_;
};

}  // namespace HW_ISA
}  // namespace headway
