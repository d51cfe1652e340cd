// Hot: resizes a box of an image to the target while its rows arrive, with Pillow's antialiased bilinear kernel.
//
// Rows are first weighted and summed from top to bottom, into 16-bit lines of RGBX, and each line then from left to
// right into the target. Against exact arithmetic a pixel is off by 0.5 and a little; Pillow, which rounds to 8 bits
// between its two passes, by 1. So the two differ by 1 at most.
#pragma once

#include "axis.h"
#include "gather.h"
#include "horizontal.h"
#include "pixels.h"
#include "types.h"
#include "vertical.h"

namespace headway {
namespace HW_ISA {

// Where one resized image goes: uint8 [height, width, channels], mirrored as flip says.
struct Target {
  uint8_t* out;
  int height, width, channels;
  Flip flip;
};

class Resampler final : public RowSink {
 public:
  // Returns what is needed of the source; it has to arrive row by row. The region is empty where the box has no area
  // inside the image, or is none (NaN...); then nothing may follow.
  Region begin(const Target& target, const float box[4], int source_width, int source_height, Layout source) {
    target_ = target;
    next_ = have_ = rows_ = waiting_ = 0;
    float low[2], high[2];
    const int size[2] = {source_width, source_height};
    if (std::min(std::min(target.width, target.height), std::min(size[0], size[1])) <= 0) return {0, 0, 0, 0};
    for (int axis = 0; axis < 2; axis++) {
      low[axis] = std::max(box[axis], 0.0f);
      high[axis] = std::min(float(double(box[axis]) + double(box[axis + 2])), float(size[axis]));  // as Pillow rounds
      if (!(low[axis] < high[axis]) || !std::isfinite(box[axis] + box[axis + 2])) return {0, 0, 0, 0};
    }
    luma_ = source == Layout::rgbx && target.channels == 1;
    gray_ = luma_ || source == Layout::gray;
    copy_ = whole(low[0], high[0], target.width) && whole(low[1], high[1], target.height);
    Region region{int(low[0]), int(low[1]), int(high[0]), int(high[1])};
    if (!copy_) {
      across_.place(low[0], high[0], size[0], target.width, target.flip.horizontal);
      down_.place(low[1], high[1], size[1], target.height, false);
      region = {across_.first, down_.first, across_.last, down_.last};
    }
    rows_ = region.y1 - region.y0;
    set_up(region.x1 - region.x0);
    return region;
  }

  uint8_t* row() override { return staged_ ? staging_.data() : slot(have_); }

  void push() override {
    if (have_ >= rows_) return;
    if (luma_) luma(staging_.data(), copy_ ? slot(0) : slot(have_), size_t(width_));
    have_++;
    if (copy_)
      put(luma_ ? slot(0) : staging_.data());
    else if (few_)
      blend_rows();
    else
      sum_rows();
  }

 private:
  static constexpr size_t kSlack = 128;  // bytes beyond a row that may be read and written

  static bool whole(float low, float high, int out) { return high - low == float(out) && low == std::floor(low); }

  void set_up(int width) {
    width_ = width;
    staged_ = copy_ || luma_;
    if (staged_) staging_.room(4 * size_t(width) + kSlack);
    bytes_ = size_t(width) * (gray_ ? 1 : 4);
    pitch_ = (bytes_ + kSlack + 63) / 64 * 64;
    few_ = down_.taps <= kFewTaps;
    slots_ = 1;
    while (!copy_ && slots_ < std::min(down_.taps, kFewTaps)) slots_ *= 2;
    ring_.room(pitch_ * size_t(slots_));
    if (copy_) return;
    line_pitch_ = (4 * size_t(width + across_.taps) + kSlack + 63) / 64 * 64;
    lines_.room(size_t(kLines) * line_pitch_);
    if (gray_) gray_line_.room(bytes_ + kSlack);
    // 16 + 7 + 8 bits: what a signed 32-bit sum of the horizontal pass holds.
    const int bits = across_.taps <= kFewTaps ? Horizontal::kBits : std::min(across_.most_bits(), 16);
    across_.weigh(bits);
    horizontal_.set(across_, bits);
    down_.weigh(few_ ? kFewBits : kManyBits);
    half_ = few_ ? down_.taps : 0;
    if (few_) return;
    part_.room(pitch_);
    sums_.room(size_t(kActive) * pitch_);
  }

  uint8_t* slot(int row) { return ring_.data() + size_t(row & (slots_ - 1)) * pitch_; }
  uint8_t* target_line(int y) {
    const int line = target_.flip.vertical ? target_.height - 1 - y : y;
    return target_.out + size_t(line) * target_pitch();
  }
  size_t target_pitch() const { return size_t(target_.width) * size_t(target_.channels); }

  void put(const uint8_t* pixels) {
    copy_line(pixels, target_line(next_++), target_.width, gray_ ? 1 : 4, target_.channels, target_.flip.horizontal);
  }

  // Every output line that has all its rows, of the rows in the ring.
  void blend_rows() {
    while (next_ < target_.height && std::min(down_.start(next_) + down_.taps, rows_) <= have_) {
      const uint8_t* rows[kFewTaps];
      uint16_t weights[kFewTaps];
      for (int t = 0; t < down_.taps; t++) {
        rows[t] = slot(std::min(down_.start(next_) + t, rows_ - 1));
        weights[t] = uint16_t(down_.weights(t)[next_]);
      }
      blend(rows, weights, down_.taps, bytes_, line());
      finish();
    }
  }

  // Where rows are many, as many as a blend takes are blended as if there were no others, and such parts are added up.
  void sum_rows() {
    if (have_ % kFewTaps && have_ < rows_) return;
    const int top = (have_ - 1) / kFewTaps * kFewTaps, count = have_ - top;
    for (int y = next_; y < target_.height && down_.start(y) < have_; y++) {
      const bool fresh = top <= down_.start(y);
      uint32_t upto[kFewTaps + 1] = {}, cut = 0;
      for (int t = 0; t < count; t++) upto[t + 1] = upto[t] + uint32_t(down_.weight(top + t - down_.start(y), y));
      const uint8_t* rows[kFewTaps];
      uint16_t weights[kFewTaps];
      for (int t = 0; t < count; t++) {
        rows[t] = slot(top + t);
        weights[t] = uint16_t(share(upto[t + 1], upto[count]) - share(upto[t], upto[count]));
        cut += weights[t] != 0;
      }
      blend(rows, weights, count, bytes_, part_.data());
      add(part_.data(), int32_t(upto[count]), bytes_, sums_.data() + size_t(y % kActive) * pitch_, fresh);
      cut_[y % kActive] = (fresh ? 0 : cut_[y % kActive]) + cut * upto[count];
    }
    while (next_ < target_.height && std::min(down_.start(next_) + down_.taps, rows_) <= have_) {
      const int32_t half = 1 << (kManyBits - 1), lacking = int32_t(cut_[next_ % kActive] / 2);
      settle(sums_.data() + size_t(next_ % kActive) * pitch_, half + lacking, bytes_, line());
      finish();
    }
  }

  static uint32_t share(uint32_t of, uint32_t whole) { return (of << kFewBits) / std::max(whole, 1u); }

  // Where line next_ of the target is summed.
  int16_t* line() { return gray_ ? gray_line_.data() : waiting_line(); }
  int16_t* waiting_line() { return lines_.data() + size_t(waiting_) * line_pitch_; }

  // That line is summed. Several at once go on, as that saves loading the weights of the horizontal pass for each.
  void finish() {
    if (gray_) widen(gray_line_.data(), waiting_line(), size_t(width_));
    next_++, waiting_++;
    if (waiting_ < kLines && next_ < target_.height) return;
    const std::ptrdiff_t pitch = std::ptrdiff_t(target_pitch()) * (target_.flip.vertical ? -1 : 1);
    uint8_t* const out = target_line(next_ - waiting_);
    horizontal_.run(lines_.data(), line_pitch_, waiting_, half_, out, pitch, target_.channels);
    waiting_ = 0;
  }

  static constexpr int kLines = 4;
  static constexpr int kActive = 8;  // output lines that 8 rows are part of: 6 at a scale of 4, fewer above

  Target target_{};
  int width_ = 0;                      // pixels of a source row
  int rows_ = 0, have_ = 0;            // source rows: in all, and so far
  int next_ = 0, waiting_ = 0;         // the target's next line; lines before it that are summed and not yet resized
  bool gray_ = false, luma_ = false;   // rows of the ring are gray; colours become that
  bool copy_ = false, staged_ = false; // nothing is resized; rows come elsewhere than into the ring
  bool few_ = false;                   // one blend makes a line
  int slots_ = 1, half_ = 0;           // rows in the ring, a power of two; see Horizontal::run
  size_t bytes_ = 0, pitch_ = 0;       // of a row in the ring, without and with its slack
  size_t line_pitch_ = 0;              // values of a line with its slack
  uint32_t cut_[kActive] = {};         // of each sum: products that were cut off, times the weights of their parts
  Axis down_, across_;
  Horizontal horizontal_;
  Buffer<uint8_t> staging_, ring_;
  Buffer<int16_t> lines_, gray_line_, part_;
  Buffer<int32_t> sums_;
};

// Resizes raw pixels, uint8 [h, w, c] or, planar, [c, h, w]; c is 1 or 3.
inline Outcome resample_raw(Resampler& resampler, const Target& target, const float box[4], const uint8_t* pixels,
                            int h, int w, int c, bool planar) {
  if (target.width == w && target.height == h && target.channels == c && box[0] == 0 && box[1] == 0 &&
      box[2] == float(w) && box[3] == float(h)) {
    gather(pixels, planar, h, w, c, 0, 0, target.flip, target.out);
    return Outcome::ok;
  }
  const Region region = resampler.begin(target, box, w, h, c == 1 ? Layout::gray : Layout::rgbx);
  if (region.x0 >= region.x1) return Outcome::undecodable;
  const size_t plane = size_t(h) * size_t(w), width = size_t(region.x1 - region.x0);
  for (int y = region.y0; y < region.y1; y++) {
    const size_t first = size_t(y) * size_t(w) + size_t(region.x0);
    uint8_t* row = resampler.row();
    if (c == 1)
      std::memcpy(row, pixels + first, width);
    else if (planar)
      planes_to_rgbx(pixels + first, plane, row, width);
    else
      rgb_to_rgbx(pixels + 3 * first, row, width);
    resampler.push();
  }
  return Outcome::ok;
}

}  // namespace HW_ISA
}  // namespace headway
