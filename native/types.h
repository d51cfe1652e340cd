// What the parts of the core share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headway.h"

namespace headway {

// `declined`: this decoder does not do such a file; another one should try. It never leaves the core.
enum class Outcome : uint8_t {
  ok = HW_OK,
  checksum = HW_CHECKSUM,
  undecodable = HW_UNDECODABLE,
  foreign = HW_FOREIGN,
  declined = 255,
};

// Pixels of an image, half open.
struct Region {
  int x0, y0, x1, y1;
};

// How an image is mirrored: left to right, top to bottom.
struct Flip {
  bool horizontal = false, vertical = false;

  Flip() = default;
  explicit Flip(uint8_t bits) : horizontal(bits & HW_FLIP_HORIZONTAL), vertical(bits & HW_FLIP_VERTICAL) {}
};

enum class Layout { gray = 1, rgbx = 4 };  // bytes of a pixel

// Where a decoder puts the rows of its region, from the top to the bottom.
class RowSink {
 public:
  // Memory for the next row: pixel x0 of the region at byte 0, 64-byte aligned, with room for 128 bytes more than the
  // region is wide, which may be overwritten.
  virtual uint8_t* row() = 0;
  // The memory got by row() is filled.
  virtual void push() = 0;

 protected:
  ~RowSink() = default;
};

}  // namespace headway
