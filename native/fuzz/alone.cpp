#include "alone.h"

namespace headway::fuzz {
namespace {

bool small(const Exact& file) {
  hw_info info{};
  return hw_probe(file.data(), file.size(), &info) || uint64_t{info.width} * info.height <= kMaxPixels;
}

void try_splice(const Exact& file, const int32_t region[4], size_t place) {
  char reason[200] = "";
  int32_t held[4];
  const int64_t need = -hw_splice(file.data(), file.size(), region, held, nullptr, 0, reason);
  if (need < 0 || (need == 0 && !*reason)) fail("splice neither refuses nor says how much it needs", place);
  if (need == 0) return;
  const Exact out{Bytes(size_t(need))};
  uint8_t* const to = const_cast<uint8_t*>(out.data());
  if (hw_splice(file.data(), file.size(), region, held, to, out.size(), reason) != need)
    fail("splice does not write what it said", place);
  hw_info cut{};
  if (hw_probe(to, out.size(), &cut) || int32_t(cut.width) != held[2] - held[0] ||
      int32_t(cut.height) != held[3] - held[1] || held[0] > region[0] || held[1] > region[1] || held[2] < region[2] ||
      held[3] < region[3])
    fail("splice does not hold the region", place);
}

void try_seekable(const Exact& file, size_t place) {
  char reason[200] = "";
  const int64_t wanted = -hw_seekable(file.data(), file.size(), nullptr, nullptr, 0, reason);
  if (wanted < 0 || (wanted == 0 && !*reason)) fail("seekable neither refuses nor says how much it needs", place);
  if (wanted == 0) return;
  const Exact out{Bytes(size_t(wanted))};
  uint8_t sound = 2, still_sound = 2;
  if (hw_seekable(file.data(), file.size(), &sound, const_cast<uint8_t*>(out.data()), out.size(), reason) != wanted)
    fail("seekable does not write what it said", place);
  hw_seekable(out.data(), out.size(), &still_sound, nullptr, 0, nullptr);
  if (sound > 1 || still_sound > 1 || (sound && !still_sound)) fail("a sound file is made unsound", place);
  const Bytes once(out.data(), out.data() + out.size());
  if (seekable(once) != once) fail("seekable twice is not seekable once", place);
}

}  // namespace

Bytes seekable(const Bytes& file) {
  Bytes out(file.size() + file.size() / 4 + 4096);
  const int64_t size = hw_seekable(file.data(), file.size(), nullptr, out.data(), out.size(), nullptr);
  out.resize(size > 0 ? size_t(size) : 0);
  return out;
}

void alone(const Exact& file, size_t place, Random& random) {
  hw_info info{};
  const int32_t status = hw_probe(file.data(), file.size(), &info);
  if (status != HW_OK && status != HW_UNDECODABLE && status != HW_FOREIGN) fail("probe gives no status", place);
  const int32_t width = status ? 8 : int32_t(info.width);
  const int32_t height = status ? 8 : int32_t(info.height);
  const auto x = int32_t(random.below(width)), y = int32_t(random.below(height));
  const int32_t region[4] = {x, y, x + 1 + int32_t(random.below(width - x)),
                             y + 1 + int32_t(random.below(height - y))};
  try_splice(file, region, place);
  if (random.one_in(8) && small(file)) try_seekable(file, place);
}

}  // namespace headway::fuzz
