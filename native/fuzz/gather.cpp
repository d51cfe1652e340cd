// hw_gather with wrong sizes, kinds and pointers: refused, or a status for each image and right pixels.
#include <algorithm>

#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr size_t kMost = 1 << 20;  // bytes of an output

int reflected(int index, int size) { return std::abs(size - 1 - std::abs(size - 1 - index)); }

size_t one(hw_pool* pool, Random& random) {
  const size_t n = random.below(40);
  uint32_t height = odd_number(random), width = odd_number(random), channels = uint32_t(random.below(5));
  if (random.one_in(2)) {
    height = 1 + uint32_t(random.below(40)), width = 1 + uint32_t(random.below(60));
    channels = random.one_in(2) ? 1 : 3;
  }
  const uint64_t bytes = uint64_t(height) * width * channels;  // no overflow: channels are few
  const uint32_t kind = uint32_t(random.below(random.one_in(4) ? 5 : 2)) + 1;
  int64_t stride = int64_t(bytes) + int64_t(random.below(9));
  if (random.one_in(12)) stride = int64_t(random.next());
  if (random.one_in(12)) stride = int64_t(bytes) - 1 - int64_t(random.below(9));
  const bool sides = height >= 1 && width >= 1 && height <= UINT16_MAX && width <= UINT16_MAX;
  bool good = sides && (channels == 1 || channels == 3) && (kind == HW_RAW || kind == HW_RAW_PLANAR);
  good = good && stride >= int64_t(bytes) && (!n || stride <= INT64_MAX / int64_t(n));
  if (good && n && uint64_t(stride) > kMost / n) return 0;  // it would be right to write there

  std::vector<Exact> files;
  std::vector<uint64_t> address, length;
  std::vector<uint32_t> crc;
  Bytes check, flip;
  std::vector<int16_t> shift;
  for (size_t i = 0; i < n; i++) {
    uint64_t size = good ? bytes : random.below(500);
    if (random.one_in(4)) size = random.below(size + 1);
    if (random.one_in(8)) size += random.below(20);
    Bytes file(size);
    for (uint8_t& value : file) value = random.byte();
    files.emplace_back(file);
    address.push_back(files.back().address());
    length.push_back(size);
    crc.push_back(hw_crc32c(files.back().data(), size) ^ uint32_t(random.one_in(6)));
    check.push_back(random.one_in(2));
    flip.push_back(uint8_t(random.below(4)));
    for (int axis = 0; axis < 2; axis++)
      shift.push_back(random.one_in(4) ? int16_t(random.next()) : int16_t(int(random.below(9)) - 4));
  }
  const bool lacks = random.one_in(20), null = n && random.one_in(20);
  if (null) {
    const size_t at = random.below(n);
    address[at] = 0;
    good = good && !length[at];
  }
  if (lacks && n) good = false;
  const size_t room = good ? size_t(stride) * n : 64;
  const Exact out{Bytes(room, 0xA5)};
  uint8_t* const to = const_cast<uint8_t*>(out.data());
  Bytes status(n + 1, 0xEE);
  const bool with_crc = random.one_in(2), with_shift = random.one_in(2), with_flip = random.one_in(2);
  const int64_t failed = hw_gather(pool, int64_t(n), lacks ? nullptr : address.data(), length.data(),
                                   with_crc ? crc.data() : nullptr, random.one_in(2) ? check.data() : nullptr, kind,
                                   height, width, channels, with_shift ? shift.data() : nullptr,
                                   with_flip ? flip.data() : nullptr, to, stride, status.data());
  if (status[n] != 0xEE) fail("the byte behind the statuses was touched", n);
  if ((failed >= 0) != good) fail(good ? "a good call was refused" : "a bad call was not refused", n);
  if (failed < 0) {
    if (std::any_of(to, to + room, [](uint8_t value) { return value != 0xA5; })) fail("it was refused and wrote", n);
    return 1;
  }
  for (size_t i = 0; i < n; i++) {
    const uint8_t* image = to + i * size_t(stride);
    if (std::any_of(image + bytes, image + stride, [](uint8_t value) { return value != 0xA5; }))
      fail("the bytes behind it were touched", i);
    if (status[i] > HW_UNDECODABLE) fail("it has no status", i);
    if (status[i]) {
      if (std::any_of(image, image + bytes, [](uint8_t value) { return value; })) fail("it is bad but not zero", i);
      continue;
    }
    if (length[i] < bytes) fail("it is too short and was taken", i);
    const int down = with_shift ? shift[2 * i] : 0, right = with_shift ? shift[2 * i + 1] : 0;
    const int h = int(height), w = int(width), c = int(channels);
    if (std::abs(down) >= h || std::abs(right) >= w) continue;
    for (int y = 0; y < h; y++)
      for (int x = 0; x < w; x++)
        for (int k = 0; k < c; k++) {
          int row = reflected(y + down, h), from = reflected(x + right, w);
          if (with_flip && flip[i] & HW_FLIP_HORIZONTAL) from = w - 1 - from;
          if (with_flip && flip[i] & HW_FLIP_VERTICAL) row = h - 1 - row;
          const size_t place = kind == HW_RAW ? size_t((row * w + from) * c + k) : size_t((k * h + row) * w + from);
          if (image[(y * w + x) * c + k] != files[i].data()[place]) fail("its pixels are wrong", i);
        }
  }
  return n ? n : 1;
}

}  // namespace

int fuzz_gather(const Campaign& campaign) {
  run_on_crews(campaign, 2, one);
  return 0;
}

}  // namespace headway::fuzz
