#include "jpeg.h"

#include <algorithm>
#include <cstring>

namespace headway {
namespace {

enum : int { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, JPG = 0xC8, DAC = 0xCC, SOI = 0xD8, EOI = 0xD9, SOS = 0xDA };
enum : int { DQT = 0xDB, DRI = 0xDD, APP0 = 0xE0, APP1 = 0xE1, APP14 = 0xEE, TEM = 0x01, RST0 = 0xD0 };

// The bytes may be those of a mapped file that someone writes to: what is checked and then used is read once.
uint8_t once(const uint8_t* p) { return *static_cast<const volatile uint8_t*>(p); }

int u16(const uint8_t* p) { return once(p) << 8 | once(p + 1); }

bool is_frame(int marker) {
  return marker >= SOF0 && marker <= 0xCF && marker != DHT && marker != JPG && marker != DAC;
}

// What was seen on the way to the scan, besides what a Jpeg keeps.
struct Seen {
  bool frame = false, jfif = false, adobe = false, strange = false;
  int transform = 0, kind = 0, precision = 8;
  unsigned quants = 0, dcs = 0, acs = 0;  // bit i: table i is there
};

// Orientation in the TIFF directory of an EXIF segment; 1 where there is none that can be read.
int orientation_of(const uint8_t* tiff, size_t size) {
  if (size < 8) return 1;
  bool little = tiff[0] == 'I';
  auto at16 = [&](size_t i) { return little ? tiff[i] | tiff[i + 1] << 8 : tiff[i] << 8 | tiff[i + 1]; };
  auto at32 = [&](size_t i) {
    return little ? uint32_t(at16(i)) | uint32_t(at16(i + 2)) << 16 : uint32_t(at16(i)) << 16 | uint32_t(at16(i + 2));
  };
  size_t directory = at32(4);
  if (directory > size - 2) return 1;
  size_t entries = size_t(at16(directory));
  for (size_t i = 0; i < entries; i++) {
    size_t entry = directory + 2 + 12 * i;
    if (entry + 12 > size) break;
    if (at16(entry) == 0x0112) {
      int value = at16(entry + 8);
      return value >= 1 && value <= 8 ? value : 1;
    }
  }
  return 1;
}

void read_quant(const uint8_t* p, size_t n, Jpeg& jpeg, Seen& seen) {
  while (n >= 65) {
    const int kind = once(p), table = kind & 15, wide = kind >> 4;
    size_t need = wide ? 129 : 65;
    if (table > 3 || wide > 1 || n < need) break;
    for (int i = 0; i < 64; i++) jpeg.quant[table][i] = uint16_t(wide ? u16(p + 1 + 2 * i) : p[1 + i]);
    seen.quants |= 1u << table;
    seen.strange |= wide;
    p += need, n -= need;
  }
  seen.strange |= n != 0;
}

void read_huffman(const uint8_t* p, size_t n, Jpeg& jpeg, Seen& seen) {
  while (n >= 17) {
    const int kind = once(p), table = kind & 15, ac = kind >> 4;
    uint8_t bits[16];
    int count = 0;
    for (int i = 0; i < 16; i++) count += bits[i] = once(p + 1 + i);
    if (table > 3 || ac > 1 || count > 256 || n < size_t(17 + count)) break;
    HuffmanSpec& spec = (ac ? jpeg.ac : jpeg.dc)[table];
    std::memcpy(spec.bits, bits, 16);
    std::memcpy(spec.values, p + 17, size_t(count));
    spec.count = count;
    (ac ? seen.acs : seen.dcs) |= 1u << table;
    p += 17 + count, n -= size_t(17 + count);
  }
  seen.strange |= n != 0;
}

bool read_frame(const uint8_t* p, size_t n, int marker, Jpeg& jpeg, Seen& seen) {
  if (n < 6 || seen.frame) return false;
  seen.frame = true;
  seen.kind = marker;
  seen.precision = p[0];
  jpeg.height = u16(p + 1);
  jpeg.width = u16(p + 3);
  jpeg.components = once(p + 5);
  if (jpeg.components < 1 || jpeg.components > 4 || n != size_t(6 + 3 * jpeg.components)) return false;
  if (jpeg.width < 1 || jpeg.height < 1) return false;
  jpeg.h_max = jpeg.v_max = 1;
  for (int i = 0; i < jpeg.components; i++) {
    const uint8_t* c = p + 6 + 3 * i;
    const int factors = once(c + 1), h = factors >> 4, v = factors & 15, quant = once(c + 2);
    if (h < 1 || h > 4 || v < 1 || v > 4 || quant > 3) return false;
    jpeg.component[i] = {once(c), h, v, quant, 0, 0};
    jpeg.h_max = std::max(jpeg.h_max, h);
    jpeg.v_max = std::max(jpeg.v_max, v);
  }
  // A scan of one component has MCUs of one block, whatever its sampling factors are.
  if (jpeg.components == 1) jpeg.component[0].h = jpeg.component[0].v = jpeg.h_max = jpeg.v_max = 1;
  jpeg.mcus_per_row = (jpeg.width + 8 * jpeg.h_max - 1) / (8 * jpeg.h_max);
  jpeg.mcu_rows = (jpeg.height + 8 * jpeg.v_max - 1) / (8 * jpeg.v_max);
  return true;
}

// Whether the scan holds all components in the frame's order, as baseline files do; fills in their Huffman tables.
bool read_scan(const uint8_t* p, size_t n, Jpeg& jpeg) {
  const int count = n ? once(p) : 0;
  if (count != jpeg.components || n != size_t(4 + 2 * count)) return false;
  for (int i = 0; i < count; i++) {
    if (p[1 + 2 * i] != jpeg.component[i].id) return false;
    const int tables = once(p + 2 + 2 * i), dc = tables >> 4, ac = tables & 15;
    if (dc > 3 || ac > 3) return false;
    jpeg.component[i].dc = dc;
    jpeg.component[i].ac = ac;
  }
  const uint8_t* tail = p + 1 + 2 * count;
  return tail[0] == 0 && tail[1] == 63 && tail[2] == 0;
}

// libjpeg's guess of the colour space of three components.
bool is_ycc(const Jpeg& jpeg, const Seen& seen) {
  if (seen.jfif) return true;
  if (seen.adobe) return seen.transform != 0;
  const Component* c = jpeg.component;
  return !(c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B');
}

// Gray, or YCbCr whose two chroma components are alike and not above luma, halved at most.
bool sampling_is_direct(const Jpeg& jpeg) {
  if (jpeg.components == 1) return true;
  const Component* c = jpeg.component;
  if (c[0].h != jpeg.h_max || c[0].v != jpeg.v_max || c[1].h != c[2].h || c[1].v != c[2].v) return false;
  if (jpeg.h_max % c[1].h || jpeg.v_max % c[1].v || jpeg.h_max / c[1].h > 2 || jpeg.v_max / c[1].v > 2) return false;
  int blocks = c[0].h * c[0].v + 2 * c[1].h * c[1].v;
  // libjpeg replicates chroma of 1 and 2 samples instead of interpolating it.
  bool narrow = jpeg.h_max / c[1].h == 2 && (jpeg.width * c[1].h + jpeg.h_max - 1) / jpeg.h_max <= 2;
  return blocks <= 10 && !narrow && (jpeg.v_max & (jpeg.v_max - 1)) == 0;
}

}  // namespace

Outcome parse(const uint8_t* data, size_t size, Jpeg& jpeg) {
  if (size < 4 || data[0] != 0xFF || data[1] != SOI || data[2] != 0xFF) return Outcome::foreign;
  Seen seen;
  jpeg.restart = 0;
  jpeg.exif = jpeg.exif_size = 0;
  size_t at = 2;
  for (;;) {
    // A marker: 0xFF, more of them as filling, its number. libjpeg skips other bytes before it with a warning.
    while (at < size && data[at] != 0xFF) at++, seen.strange = true;
    size_t start = at;
    while (at < size && data[at] == 0xFF) at++;
    if (at >= size) return Outcome::undecodable;
    const int marker = once(data + at++);
    if (marker == 0) {
      seen.strange = true;
      continue;
    }
    if (marker == TEM || (marker >= RST0 && marker <= SOI)) {
      seen.strange = true;
      continue;
    }
    if (marker == EOI || at + 2 > size) return Outcome::undecodable;
    size_t length = size_t(u16(data + at));
    if (length < 2 || at + length > size) return Outcome::undecodable;
    const uint8_t* p = data + at + 2;
    size_t n = length - 2;
    if (marker == DQT) {
      read_quant(p, n, jpeg, seen);
    } else if (marker == DHT) {
      read_huffman(p, n, jpeg, seen);
    } else if (marker == DRI) {
      if (n != 2) return Outcome::undecodable;
      jpeg.restart = u16(p);
    } else if (marker == APP0 && n >= 5 && !std::memcmp(p, "JFIF", 5)) {
      seen.jfif = true;
    } else if (marker == APP1 && n >= 6 && !std::memcmp(p, "Exif\0", 6)) {
      jpeg.exif = size_t(p + 6 - data), jpeg.exif_size = n - 6;
    } else if (marker == APP14 && n >= 12 && !std::memcmp(p, "Adobe", 5)) {
      seen.adobe = true;
      seen.transform = p[11];
    } else if (is_frame(marker)) {
      jpeg.sof = start;
      if (!read_frame(p, n, marker, jpeg, seen)) return Outcome::undecodable;
    } else if (marker == SOS) {
      if (!seen.frame) return Outcome::undecodable;
      jpeg.progressive = seen.kind == SOF2;
      jpeg.ycc = jpeg.components == 3 && is_ycc(jpeg, seen);
      jpeg.scan = start;
      jpeg.entropy = at + length;
      bool direct = read_scan(p, n, jpeg) && !seen.strange && seen.precision == 8;
      direct = direct && (seen.kind == SOF0 || seen.kind == SOF0 + 1) && (jpeg.components == 1 || jpeg.ycc);
      direct = direct && sampling_is_direct(jpeg) && jpeg.width <= 65500 && jpeg.height <= 65500;
      for (int i = 0; direct && i < jpeg.components; i++) {
        const Component& c = jpeg.component[i];
        direct = (seen.quants >> c.quant & 1) && (seen.dcs >> c.dc & 1) && (seen.acs >> c.ac & 1);
      }
      jpeg.direct = direct;
      return Outcome::ok;
    }
    at += length;
  }
}

Outcome probe(const uint8_t* data, size_t size, hw_info& info) {
  Jpeg jpeg;
  Outcome outcome = parse(data, size, jpeg);
  if (outcome != Outcome::ok) return outcome;
  info.width = uint32_t(jpeg.width);
  info.height = uint32_t(jpeg.height);
  info.components = uint32_t(jpeg.components);
  info.progressive = jpeg.progressive;
  info.restart = uint32_t(jpeg.restart);
  info.mcu_width = uint32_t(8 * jpeg.h_max);
  info.mcu_height = uint32_t(8 * jpeg.v_max);
  info.orientation = uint32_t(orientation_of(data + jpeg.exif, jpeg.exif_size));
  return Outcome::ok;
}

}  // namespace headway
