// What one thread does with one image.
#pragma once

#include <memory>

#include "types.h"

namespace headway {

// One image of a batch.
struct Item {
  const uint8_t* data;
  size_t size;
  const uint32_t* crc;    // NULL: not to be checked
  uint8_t kind;           // HW_JPEG...
  const uint32_t* shape;  // height, width, channels of a raw one
  const float* box;       // NULL where nothing is resized
  Flip flip;
  uint8_t* out;
};

// Decoders and their memory, which are kept from image to image. Compiled once for each instruction set; all of them
// give the same bytes.
class Worker {
 public:
  virtual ~Worker() = default;

  // What it leaves in out is good for Outcome::ok alone. With stats, stages are timed.
  virtual Outcome work(const Item& item, const hw_spec& spec, hw_stats* stats) = 0;

  // Copies a raw image of the output's shape, moved; see gather.h.
  virtual Outcome copy(const Item& item, int down, int right) = 0;
};

// For the best instruction set that this processor has, or a lesser one that HEADWAY_ISA names.
std::unique_ptr<Worker> make_worker();

// The name of that instruction set: portable, avx2 or avx512.
const char* isa();

}  // namespace headway
