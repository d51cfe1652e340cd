#include "turbo.h"

#include <jerror.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "libjpeg.h"

namespace headway {
namespace {

constexpr int kBand = 16;  // rows asked of libjpeg at once: at most an MCU's

// Columns decoded beside the region. One holds the neighbour that chroma upsampling needs; eight also keep libjpeg from
// the plainer upsampling that it uses where chroma is at most two pixels wide.
constexpr int kMargin = 8;

// What this build of libjpeg does not know but Pillow's may.
bool unknown_to_libjpeg(int message) {
  return message == JERR_SOF_UNSUPPORTED || message == JERR_BAD_PRECISION || message == JERR_ARITH_NOTIMPL ||
         message == JERR_NOT_COMPILED || message == JERR_NOTIMPL || message == JERR_CONVERSION_NOTIMPL ||
         message == JERR_CCIR601_NOTIMPL || message == JERR_FRACT_SAMPLE_NOTIMPL;
}

// Inverted CMYK, which is what JPEGs hold, to RGB with the rounding of Pillow's conversion.
void cmyk_to_rgbx(const uint8_t* from, uint8_t* to, int width) {
  for (int x = 0; x < width; ++x, from += 4, to += 4) {
    const unsigned light = from[3];
    for (int channel = 0; channel < 3; ++channel) {
      const unsigned product = (255u - from[channel]) * light + 128;
      to[channel] = uint8_t(light - ((product + (product >> 8)) >> 8));
    }
    to[3] = 255;
  }
}

// Whether an end marker follows.
bool end_follows(const jpeg_source_mgr& source) {
  const uint8_t* at = source.next_input_byte;
  const uint8_t* const end = at + source.bytes_in_buffer;
  while (at < end && (at = static_cast<const uint8_t*>(memchr(at, 0xFF, end - at)))) {
    if (++at < end && *at == JPEG_EOI) return true;
  }
  return false;
}

}  // namespace

struct Turbo::State {
  jpeg_decompress_struct image;
  Guard guard;
  uint8_t* band;
  size_t capacity;

  // Called inside setjmp: holds nothing that has a destructor.
  Outcome decode(const uint8_t* data, size_t size, int scale, Region region, Layout layout, uint32_t max_scans,
                 RowSink& sink, hw_stats& stats);
};

Outcome Turbo::State::decode(const uint8_t* data, size_t size, int scale, Region region, Layout layout,
                             uint32_t max_scans, RowSink& sink, hw_stats& stats) {
  // Made anew for each image (0.1 us): libjpeg keeps tables, so a file without its own would get its neighbour's.
  jpeg_create_decompress(&image);
  read_from(guard, image, data, size, max_scans);
  jpeg_read_header(&image, TRUE);
  const bool gray = layout == Layout::gray;
  const bool cmyk = image.num_components == 4;
  if (image.num_components == 2 || (gray && image.num_components != 1)) return Outcome::undecodable;
  image.out_color_space = gray ? JCS_GRAYSCALE : cmyk ? JCS_CMYK : JCS_EXT_RGBX;
  image.scale_num = 1;
  image.scale_denom = unsigned(scale);
  jpeg_start_decompress(&image);
  if (!finished(image)) return Outcome::foreign;  // each version of libjpeg-turbo smooths otherwise

  const int width = int(image.output_width), height = int(image.output_height);
  if (region.x0 < 0 || region.y0 < 0 || region.x0 >= region.x1 || region.y0 >= region.y1 || region.x1 > width ||
      region.y1 > height) {
    return Outcome::undecodable;
  }
  JDIMENSION left = 0;
  if (scale == 1) {  // libjpeg-turbo 2.1 crops some scaled chroma wrongly
    left = JDIMENSION(std::max(region.x0 - kMargin, 0));
    JDIMENSION across = JDIMENSION(std::min(region.x1 + kMargin, width)) - left;
    if (across < image.output_width) jpeg_crop_scanline(&image, &left, &across);
  }
  const size_t pixel = gray ? 1 : 4;
  const size_t stride = image.output_width * pixel;
  if (capacity < stride * kBand) {
    free(band);
    capacity = stride * kBand;
    band = static_cast<uint8_t*>(malloc(capacity));
    if (!band) {
      capacity = 0;
      return Outcome::undecodable;
    }
  }
  JSAMPROW rows[kBand];
  for (int row = 0; row < kBand; ++row) rows[row] = band + row * stride;

  if (region.y0) jpeg_skip_scanlines(&image, JDIMENSION(region.y0));
  const int wide = region.x1 - region.x0;
  const size_t offset = (size_t(region.x0) - left) * pixel;
  for (int y = region.y0; y < region.y1;) {
    const int count = std::min(int(jpeg_read_scanlines(&image, rows, kBand)), region.y1 - y);
    if (!count) return Outcome::undecodable;
    for (int row = 0; row < count; ++row) {
      uint8_t* const to = sink.row();
      if (cmyk) {
        cmyk_to_rgbx(rows[row] + offset, to, wide);
      } else {
        memcpy(to, rows[row] + offset, wide * pixel);
      }
      sink.push();
    }
    y += count;
  }
  stats.bytes_used += size - image.src->bytes_in_buffer;
  stats.pixels += uint64_t(image.output_width) * (region.y1 - region.y0);
  // A file cut off below the region is bad whatever the region: Pillow refuses it.
  if (!end_follows(*image.src)) {
    while (image.output_scanline < image.output_height && jpeg_read_scanlines(&image, rows, kBand)) continue;
  }
  return Outcome::ok;
}

Turbo::Turbo() : state_(static_cast<State*>(calloc(1, sizeof(State)))) {}

Turbo::~Turbo() {
  if (state_) free(state_->band);
  free(state_);
}

Outcome Turbo::decode(const uint8_t* data, size_t size, int scale, Region region, Layout layout, uint32_t max_scans,
                      RowSink& sink, hw_stats& stats) {
  if (!state_) return Outcome::undecodable;
  auto* const common = reinterpret_cast<j_common_ptr>(&state_->image);
  watch(state_->guard, *common);
  Outcome outcome;
  if (setjmp(state_->guard.jump)) {
    outcome = unknown_to_libjpeg(state_->guard.errors.msg_code) ? Outcome::foreign : Outcome::undecodable;
  } else {
    outcome = state_->decode(data, size, scale, region, layout, max_scans, sink, stats);
  }
  jpeg_destroy(common);
  return outcome;
}

}  // namespace headway
