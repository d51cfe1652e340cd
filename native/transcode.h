// The quick way of hw_seekable: Huffman codes of a baseline JPEG are exchanged, its coefficients are never made.
#pragma once

#include <memory>

#include "jpeg.h"

namespace headway {

// Compiled once for each instruction set; all of them write the same bytes.
class Transcoder {
 public:
  virtual ~Transcoder() = default;

  // Rewrites a `direct` file with optimal Huffman tables and a restart marker after every `restart` MCUs, a divisor of
  // the row. `written` is valid until the next call. What was written has been read back and compared. A file that is
  // not in perfect order is declined, so that libjpeg says what becomes of it; where libjpeg would write it too, it
  // writes the same bytes.
  virtual Outcome run(const Jpeg& jpeg, const uint8_t* data, size_t size, int restart, const uint8_t*& written,
                      size_t& count) = 0;
};

std::unique_ptr<Transcoder> make_transcoder();

}  // namespace headway
