// The decoder for what our own one declines: libjpeg-turbo, which reads progressive, arithmetic, CMYK, every sampling.
#pragma once

#include "types.h"

namespace headway {

// One per thread; the memory for its rows is kept from image to image.
class Turbo final {
 public:
  Turbo();
  ~Turbo();
  Turbo(const Turbo&) = delete;
  Turbo& operator=(const Turbo&) = delete;

  // Gives the rows of `region` to the sink. scale is 1, 2, 4 or 8: decode at 1/scale, so that the image is
  // ceil(width / scale) pixels wide; region is in those pixels. Layout::gray is for images of one component only.
  // More than max_scans scans (0: no limit), a region beyond the image and a file that ends too early, wherever the
  // region is, are Outcome::undecodable; what this libjpeg-turbo does not know, or may show differently than Pillow's,
  // is Outcome::foreign.
  Outcome decode(const uint8_t* data, size_t size, int scale, Region region, Layout layout, uint32_t max_scans,
                 RowSink& sink, hw_stats& stats);

 private:
  struct State;
  State* state_;  // NULL where memory could not be had
};

}  // namespace headway
