// A smaller JPEG out of the restart segments that a region needs. Decoding does this in place (baseline.h); this is for
// other decoders.

#include <algorithm>
#include <cstring>

#include "jpeg.h"
#include "reason.h"

namespace headway {
namespace {

// Writes as far as there is room, and counts on.
struct Out {
  uint8_t* data;
  uint64_t capacity, size;

  void put(const uint8_t* from, size_t count) {
    if (count && size + count <= capacity) memcpy(data + size, from, count);
    size += count;
  }
  void marker(int number) {
    const uint8_t bytes[2] = {0xFF, uint8_t(number)};
    put(bytes, 2);
  }
};

enum : int { kSof0 = 0xC0, kSof1 = 0xC1, kRst0 = 0xD0, kRst7 = 0xD7, kEoi = 0xD9 };

// The marker at or after `at`: where it begins, and its number; NULL where there is none.
const uint8_t* next_marker(const uint8_t* at, const uint8_t* end, int* number) {
  while (at < end && (at = static_cast<const uint8_t*>(memchr(at, 0xFF, end - at)))) {
    const uint8_t* after = at + 1;
    while (after < end && *after == 0xFF) ++after;
    if (after == end) return nullptr;
    if (*after) {
      *number = *after;
      return after - 1;
    }
    at = after + 1;
  }
  return nullptr;
}

const uint8_t* after_marker(const uint8_t* at, const uint8_t* end) {
  while (at < end && *at == 0xFF) ++at;
  return at + 1;
}

int64_t splice(const uint8_t* data, size_t size, Region region, Region& held, Out out, char* reason) {
  Jpeg jpeg;
  if (parse(data, size, jpeg) != Outcome::ok) return refuse(reason, "it has no JPEG header that can be read");
  // The markers were seen there; a file that changes meanwhile may have lost them.
  const uint8_t* const header_end = data + jpeg.entropy;
  const uint8_t* const frame = after_marker(data + jpeg.sof, header_end);
  if (frame + 7 > header_end) return refuse(reason, "it changes while it is read");
  if (frame[-1] != kSof0 && frame[-1] != kSof1) return refuse(reason, "it is not a Huffman-coded baseline JPEG");
  const uint8_t* const scan = after_marker(data + jpeg.scan, header_end) + 2;  // behind its length
  if (scan >= data + jpeg.entropy || *scan != jpeg.components) return refuse(reason, "its scan lacks components");
  if (!jpeg.restart) return refuse(reason, "it has no restart markers");
  if (jpeg.mcus_per_row % jpeg.restart) {
    return refuse(reason, "its restart interval of %d MCUs does not divide the row of %d", jpeg.restart,
                  jpeg.mcus_per_row);
  }
  if (region.x0 < 0 || region.y0 < 0 || region.x0 >= region.x1 || region.y0 >= region.y1 || region.x1 > jpeg.width ||
      region.y1 > jpeg.height) {
    return refuse(reason, "the region is empty or beyond the image of %d x %d", jpeg.width, jpeg.height);
  }

  // One MCU beside the region holds the neighbours that chroma upsampling needs.
  const int mcu_height = 8 * jpeg.v_max, step = 8 * jpeg.h_max * jpeg.restart;
  const int first_row = std::max(region.y0 / mcu_height - 1, 0);
  const int last_row = std::min((region.y1 - 1) / mcu_height + 1, jpeg.mcu_rows - 1);
  const int first = std::max(region.x0 - 8 * jpeg.h_max, 0) / step;
  const int last = std::min(region.x1 - 1 + 8 * jpeg.h_max, jpeg.width - 1) / step;
  held = {first * step, first_row * mcu_height, std::min((last + 1) * step, jpeg.width),
          std::min((last_row + 1) * mcu_height, jpeg.height)};

  const int height = held.y1 - held.y0, width = held.x1 - held.x0;
  const uint8_t sides[4] = {uint8_t(height >> 8), uint8_t(height),
                            uint8_t(width >> 8), uint8_t(width)};
  out.put(data, frame + 3 - data);
  out.put(sides, 4);
  out.put(frame + 7, data + jpeg.entropy - (frame + 7));

  const int segments = jpeg.mcus_per_row / jpeg.restart;
  const int64_t final = int64_t(segments) * jpeg.mcu_rows - 1;
  const uint8_t *at = data + jpeg.entropy, *const end = data + size;
  int kept = 0;
  for (int64_t segment = 0; segment <= int64_t(last_row) * segments + last; ++segment) {
    int number = 0;
    const uint8_t* const marker = next_marker(at, end, &number);
    if (!marker) return refuse(reason, "it ends before the image does");
    if (segment < final ? number != kRst0 + segment % 8 : number >= kRst0 && number <= kRst7) {
      return refuse(reason, "a restart marker is missing or misplaced");
    }
    const int row = int(segment / segments), column = int(segment % segments);
    if (row >= first_row && column >= first && column <= last) {
      if (kept) out.marker(kRst0 + (kept - 1) % 8);
      out.put(at, marker - at);
      ++kept;
    }
    at = marker + 2;
  }
  out.marker(kEoi);
  return out.size <= out.capacity ? int64_t(out.size) : -int64_t(out.size);
}

}  // namespace
}  // namespace headway

int64_t hw_splice(const void* data, uint64_t length, const int32_t region[4], int32_t held[4], void* out,
                  uint64_t capacity, char* reason) {
  if (!data || !region || !held || (!out && capacity))
    return headway::refuse(reason, "there is no memory to read or to write");
  headway::Region shown{};
  const int64_t size = headway::splice(static_cast<const uint8_t*>(data), length,
                                       {region[0], region[1], region[2], region[3]}, shown,
                                       {static_cast<uint8_t*>(out), capacity, 0}, reason);
  held[0] = shown.x0, held[1] = shown.y0, held[2] = shown.x1, held[3] = shown.y1;
  return size;
}
