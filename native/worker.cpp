// Compiled once for each instruction set (CMakeLists.txt says with which flags), in a namespace of its name.
#include "worker.h"

#include <time.h>

#include "baseline.h"
#include "crc32c.h"
#include "gather.h"
#include "jpeg.h"
#include "resample.h"
#include "turbo.h"

namespace headway {
namespace HW_ISA {
namespace {

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

// Tells how much of the time of a decoder was the resampler's. The clock is read twice a row.
class Timed final : public RowSink {
 public:
  explicit Timed(RowSink& sink) : sink_(sink) {}

  uint8_t* row() override { return sink_.row(); }

  void push() override {
    const uint64_t start = now_ns();
    sink_.push();
    ns += now_ns() - start;
  }

  uint64_t ns = 0;

 private:
  RowSink& sink_;
};

// Pillow's rule, in Pillow's precision: what sticks out of the image is refused. So is what is empty, and NaN.
bool fits(const float box[4], int width, int height) {
  const float right = float(double(box[0]) + double(box[2])), bottom = float(double(box[1]) + double(box[3]));
  return box[0] >= 0 && box[0] < right && right <= float(width) && box[1] >= 0 && box[1] < bottom &&
         bottom <= float(height);
}

bool too_large(const hw_spec& spec, int width, int height) {
  return spec.max_pixels && uint64_t(width) * uint64_t(height) > spec.max_pixels;
}

// The largest of 1, 2, 4, 8 at which the box still has the pixels of the output.
int scale_of(const hw_spec& spec, const float box[4]) {
  int scale = 1;
  if (!spec.scaled) return scale;
  while (scale < 8 && box[2] >= float(2 * scale) * float(spec.width) && box[3] >= float(2 * scale) * float(spec.height))
    scale *= 2;
  return scale;
}

class HotWorker final : public Worker {
 public:
  Outcome work(const Item& item, const hw_spec& spec, hw_stats* stats) override {
    if (item.crc) {
      const uint64_t start = stats ? now_ns() : 0;
      const bool good = crc32c(item.data, item.size) == *item.crc;
      if (stats) stats->ns_check += now_ns() - start;
      if (!good) return Outcome::checksum;
    }
    if (stats) stats->bytes += item.size;
    return item.kind == HW_JPEG ? jpeg(item, spec, stats) : raw(item, spec, stats);
  }

  Outcome copy(const Item& item, int down, int right) override {
    if (item.crc && crc32c(item.data, item.size) != *item.crc) return Outcome::checksum;
    if (item.size < size_t(item.shape[0]) * item.shape[1] * item.shape[2]) return Outcome::undecodable;
    gather(item.data, item.kind == HW_RAW_PLANAR, int(item.shape[0]), int(item.shape[1]), int(item.shape[2]), down,
           right, item.flip, item.out);
    return Outcome::ok;
  }

 private:
  Outcome jpeg(const Item& item, const hw_spec& spec, hw_stats* stats) {
    const Outcome parsed = parse(item.data, item.size, header_);
    if (parsed != Outcome::ok) return parsed;
    const int width = header_.width, height = header_.height;
    if (too_large(spec, width, height) || !fits(item.box, width, height)) return Outcome::undecodable;
    const int scale = scale_of(spec, item.box);
    if (!stats) {
      hw_stats unused{};
      return rows(item, spec, scale, resampler_, unused);
    }
    Timed timed(resampler_);
    const uint64_t start = now_ns();
    const Outcome outcome = rows(item, spec, scale, timed, *stats);
    stats->ns_decode += now_ns() - start - timed.ns;
    stats->ns_resample += timed.ns;
    return outcome;
  }

  // By our own decoder, or where it declines by libjpeg-turbo.
  Outcome rows(const Item& item, const hw_spec& spec, int scale, RowSink& sink, hw_stats& stats) {
    const Layout layout = header_.components == 1 ? Layout::gray : Layout::rgbx;
    Region region = begin(item, spec, scale, layout);
    if (region.x0 >= region.x1 || region.y0 >= region.y1) return Outcome::undecodable;
    if (header_.direct) {
      const Outcome ours = baseline_.decode(header_, item.data, item.size, scale, region, sink, stats);
      if (ours != Outcome::declined) {
        ++stats.direct;
        return ours;
      }
      region = begin(item, spec, scale, layout);  // it may have given some rows
    }
    return turbo_.decode(item.data, item.size, scale, region, layout, spec.max_scans, sink, stats);
  }

  Region begin(const Item& item, const hw_spec& spec, int scale, Layout layout) {
    const float part = 1 / float(scale);  // a power of two: exact
    const float box[4] = {item.box[0] * part, item.box[1] * part, item.box[2] * part, item.box[3] * part};
    const int width = (header_.width + scale - 1) / scale, height = (header_.height + scale - 1) / scale;
    return resampler_.begin(target(item, spec), box, width, height, layout);
  }

  static Target target(const Item& item, const hw_spec& spec) {
    return {item.out, int(spec.height), int(spec.width), int(spec.channels), item.flip};
  }

  Outcome raw(const Item& item, const hw_spec& spec, hw_stats* stats) {
    const uint32_t height = item.shape[0], width = item.shape[1], channels = item.shape[2];
    if (!height || !width || height > UINT16_MAX || width > UINT16_MAX || (channels != 1 && channels != 3) ||
        uint64_t(height) * width * channels != item.size)
      return Outcome::undecodable;
    if (too_large(spec, int(width), int(height)) || !fits(item.box, int(width), int(height)))
      return Outcome::undecodable;
    const uint64_t start = stats ? now_ns() : 0;
    const Outcome outcome = resample_raw(resampler_, target(item, spec), item.box, item.data, int(height), int(width),
                                         int(channels), item.kind == HW_RAW_PLANAR);
    if (!stats) return outcome;
    stats->ns_resample += now_ns() - start;
    stats->bytes_used += item.size;
    return outcome;
  }

  Jpeg header_;
  Baseline baseline_;
  Turbo turbo_;
  Resampler resampler_;
};

}  // namespace

std::unique_ptr<Worker> make_worker() { return std::make_unique<HotWorker>(); }

}  // namespace HW_ISA
}  // namespace headway
