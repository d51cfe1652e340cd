// The segments before the scan of a JPEG that is rewritten by the quick way.
#pragma once

#include <cstring>

#include "jpeg.h"

namespace headway {
namespace HW_ISA {

enum : int {
  SEGMENT_SOF0 = 0xC0,
  SEGMENT_SOF1 = 0xC1,
  SEGMENT_DHT = 0xC4,
  SEGMENT_SOS = 0xDA,
  SEGMENT_DQT = 0xDB,
  SEGMENT_DRI = 0xDD,
  SEGMENT_APP0 = 0xE0,
  SEGMENT_APP14 = 0xEE,
  SEGMENT_COM = 0xFE
};

inline bool is_kept(int marker) { return (marker & 0xF0) == SEGMENT_APP0 || marker == SEGMENT_COM; }

// Walks over the segments from the start of the image to the scan. What the bytes say is checked anew at each step: they
// may be those of a mapped file that changes.
class Segments final {
 public:
  Segments(const uint8_t* data, const Jpeg& jpeg) : next_(data + 2), end_(data + jpeg.scan) {}

  // False at the end; then whole() says whether the last one ended just there.
  bool step() {
    while (end_ - next_ > 1 && next_[0] == 0xFF && next_[1] == 0xFF) next_++;
    if (end_ - next_ < 4 || next_[0] != 0xFF) return false;
    const size_t length = size_t(next_[2] << 8 | next_[3]);
    if (length < 2 || length > size_t(end_ - next_) - 2) return false;
    marker = next_[1], begin = next_, size = length + 2;
    next_ += size;
    return true;
  }

  bool whole() const { return next_ == end_; }

  int marker = 0;
  const uint8_t* begin = nullptr;  // its 0xFF
  size_t size = 0;                 // of all of it

 private:
  const uint8_t *next_, *end_;
};

// Whether libjpeg has nothing to remark on the header, and takes the colours of it for what they are.
inline bool header_is_plain(const Jpeg& jpeg, const uint8_t* data) {
  for (int i = 0; i < jpeg.components; i++)
    for (int j = 0; j < i; j++)
      if (jpeg.component[i].id == jpeg.component[j].id) return false;
  Segments at(data, jpeg);
  while (at.step()) {
    const uint8_t* const content = at.begin + 4;
    const size_t n = at.size - 4;
    switch (at.marker) {
      case SEGMENT_APP0:
        if (n >= 5 && !std::memcmp(content, "JFIF", 5) && (n < 14 || content[5] != 1)) return false;
        break;
      case SEGMENT_APP14:
        if (n >= 12 && !std::memcmp(content, "Adobe", 5) && content[11] > 1) return false;
        break;
      case SEGMENT_SOF0: case SEGMENT_SOF1: case SEGMENT_DHT: case SEGMENT_DQT: case SEGMENT_DRI:
        break;
      default:
        if (!is_kept(at.marker)) return false;
    }
  }
  return at.whole();
}

// Whether two files have the same markers with text and metadata, in the same order.
inline bool same_kept_segments(const Jpeg& a, const uint8_t* data_a, const Jpeg& b, const uint8_t* data_b) {
  Segments one(data_a, a), other(data_b, b);
  const auto find = [](Segments& at) {
    while (at.step())
      if (is_kept(at.marker)) return true;
    return false;
  };
  for (;;) {
    const bool more = find(one);
    if (more != find(other)) return false;
    if (!more) return one.whole() && other.whole();
    if (one.size != other.size || std::memcmp(one.begin, other.begin, one.size)) return false;
  }
}

// At most so many bytes more than the source's header has.
constexpr size_t HEADER_GROWTH = 4 * (5 + 16 + 256) + 4 * (5 + 64) + 64;

// Writes all up to the scan's data, in libjpeg's order; `codes` are DC and AC of luma, then of chroma. Returns its end.
inline uint8_t* write_header(const Jpeg& jpeg, const uint8_t* data, const HuffmanSpec codes[4], int restart,
                             uint8_t* out) {
  const auto put = [&](const void* from, size_t count) { std::memcpy(out, from, count), out += count; };
  const auto byte = [&](int value) { *out++ = uint8_t(value); };
  const auto word = [&](int value) { byte(value >> 8), byte(value); };
  word(0xFFD8);
  int factors = 0x11;  // a gray file keeps its sampling, though that has no meaning
  for (Segments at(data, jpeg); at.step();) {
    if (is_kept(at.marker)) put(at.begin, at.size);
    if ((at.marker == SEGMENT_SOF0 || at.marker == SEGMENT_SOF1) && at.size > 11) factors = at.begin[11];
  }
  unsigned sent = 0;
  for (int i = 0; i < jpeg.components; i++) {
    const int table = jpeg.component[i].quant;
    if (sent >> table & 1) continue;
    sent |= 1u << table;
    byte(0xFF), byte(SEGMENT_DQT), word(2 + 65), byte(table);
    for (int k = 0; k < 64; k++) byte(jpeg.quant[table][k]);
  }
  byte(0xFF), byte(SEGMENT_SOF0), word(8 + 3 * jpeg.components), byte(8), word(jpeg.height), word(jpeg.width);
  byte(jpeg.components);
  for (int i = 0; i < jpeg.components; i++) {
    const Component& c = jpeg.component[i];
    byte(c.id), byte(jpeg.components == 1 ? factors : c.h << 4 | c.v), byte(c.quant);
  }
  for (int table = 0; table < (jpeg.components == 1 ? 2 : 4); table++) {
    const HuffmanSpec& spec = codes[table];
    byte(0xFF), byte(SEGMENT_DHT), word(2 + 17 + spec.count), byte(table >> 1 | (table & 1) << 4);
    put(spec.bits, 16), put(spec.values, size_t(spec.count));
  }
  byte(0xFF), byte(SEGMENT_DRI), word(4), word(restart);
  byte(0xFF), byte(SEGMENT_SOS), word(6 + 2 * jpeg.components), byte(jpeg.components);
  for (int i = 0; i < jpeg.components; i++) byte(jpeg.component[i].id), byte(i ? 0x11 : 0);
  byte(0), byte(63), byte(0);
  return out;
}

}  // namespace HW_ISA
}  // namespace headway
