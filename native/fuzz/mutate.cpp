#include "mutate.h"

#include <algorithm>
#include <iterator>

namespace headway::fuzz {
namespace {

enum : int { kSof = 0xC0, kDht = 0xC4, kRst = 0xD0, kEoi = 0xD9, kSos = 0xDA, kDqt = 0xDB, kDri = 0xDD };

// A marker segment: its bytes from 0xFF to its end. A scan's ends before its entropy-coded bytes.
struct Segment {
  size_t at, size;
  int marker;
};

std::vector<Segment> segments(const Bytes& file) {
  std::vector<Segment> found;
  for (size_t at = 2; at + 4 <= file.size() && file[at] == 0xFF;) {
    const size_t size = 2 + (file[at + 2] << 8 | file[at + 3]);
    if (at + size > file.size()) break;
    found.push_back({at, size, file[at + 1]});
    if (file[at + 1] == kSos) break;
    at += size;
  }
  return found;
}

bool is_frame(int marker) {
  return marker >= kSof && marker <= 0xCF && marker != kDht && marker != 0xC8 && marker != 0xCC;
}

// A random segment of one kind (0: any, kSof: any frame); size 0 where there is none.
Segment pick(const Bytes& file, int marker, Random& random) {
  std::vector<Segment> found = segments(file);
  const auto other = [&](const Segment& s) {
    return marker && (marker == kSof ? !is_frame(s.marker) : s.marker != marker);
  };
  found.erase(std::remove_if(found.begin(), found.end(), other), found.end());
  return found.empty() ? Segment{} : found[random.below(found.size())];
}

size_t entropy(const Bytes& file) {
  const std::vector<Segment> found = segments(file);
  return found.empty() ? 0 : found.back().at + found.back().size;
}

std::vector<size_t> restarts(const Bytes& file) {
  std::vector<size_t> found;
  for (size_t at = entropy(file); at + 1 < file.size(); ++at) {
    if (file[at] == 0xFF && file[at + 1] >= kRst && file[at + 1] < kRst + 8) found.push_back(at);
  }
  return found;
}

void insert(Bytes& file, size_t at, const Bytes& part) {
  file.insert(file.begin() + ptrdiff_t(std::min(at, file.size())), part.begin(), part.end());
}

void erase(Bytes& file, size_t at, size_t size) {
  at = std::min(at, file.size());
  const auto from = file.begin() + ptrdiff_t(at);
  file.erase(from, from + ptrdiff_t(std::min(size, file.size() - at)));
}

Bytes slice(const Bytes& file, size_t at, size_t size) {
  at = std::min(at, file.size());
  const auto from = file.begin() + ptrdiff_t(at);
  return Bytes(from, from + ptrdiff_t(std::min(size, file.size() - at)));
}

// Values that bounds checks get wrong, or anything.
int odd_word(Random& random) {
  static constexpr int kOdd[] = {0, 1, 2, 3, 7, 8, 9, 16, 17, 0x7FFF, 0x8000, 65500, 65501, 0xFFFE, 0xFFFF};
  return random.one_in(2) ? kOdd[random.below(std::size(kOdd))] : int(random.next() & 0xFFFF);
}

void put16(Bytes& file, size_t at, int value) {
  if (at + 2 > file.size()) return;
  file[at] = uint8_t(value >> 8);
  file[at + 1] = uint8_t(value);
}

void flip_bits(Bytes& file, size_t from, size_t to, Random& random) {
  if (from >= to) return;
  for (size_t count = 1 + random.below(8); count; --count) {
    file[from + random.below(to - from)] ^= uint8_t(1 << random.below(8));
  }
}

using Others = const std::vector<Bytes>&;

void flip_anywhere(Bytes& file, Others, Random& random) { flip_bits(file, 0, file.size(), random); }
void flip_header(Bytes& file, Others, Random& random) { flip_bits(file, 0, entropy(file), random); }
void flip_scan(Bytes& file, Others, Random& random) { flip_bits(file, entropy(file), file.size(), random); }

void truncate(Bytes& file, Others, Random& random) {
  file.resize(random.one_in(4) ? file.size() - std::min(file.size(), random.below(4)) : random.below(file.size() + 1));
}

void edit_length(Bytes& file, Others, Random& random) {
  const Segment segment = pick(file, 0, random);
  if (!segment.size) return;
  const int near = int(segment.size) - 2 + int(random.below(7)) - 3;
  put16(file, segment.at + 2, random.one_in(2) ? near : odd_word(random));
}

void edit_size(Bytes& file, Others, Random& random) {
  const Segment frame = pick(file, kSof, random);
  if (frame.size < 9) return;
  const size_t at = frame.at + (random.one_in(2) ? 5 : 7);
  const int near = (file[at] << 8 | file[at + 1]) + int(random.below(40)) - 20;
  put16(file, at, random.one_in(2) ? near : odd_word(random));
}

void edit_sampling(Bytes& file, Others, Random& random) {
  const Segment frame = pick(file, kSof, random);
  if (frame.size < 13) return;
  const size_t component = frame.at + 10 + 3 * random.below((frame.size - 10) / 3);
  const auto factor = [&] { return random.one_in(8) ? random.below(16) : 1 + random.below(4); };
  file[component + 1] = uint8_t(factor() << 4 | factor());
}

// Any byte of a frame, a scan or a table, of which most mean something.
template <int marker>
void edit(Bytes& file, Others, Random& random) {
  const Segment segment = pick(file, marker, random);
  if (segment.size < 5) return;
  const size_t within = marker == kDht ? std::min<size_t>(segment.size - 4, 17) : segment.size - 4;
  for (size_t count = 1 + random.below(3); count; --count) {
    const size_t at = segment.at + 4 + random.below(within);
    file[at] = random.one_in(2) ? uint8_t(file[at] + random.below(5) - 2) : random.byte();
  }
}

void edit_marker(Bytes& file, Others, Random& random) {
  static constexpr uint8_t kMarkers[] = {0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xC8, 0xC9, 0xCA, 0xCC, 0xD8,
                                         0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xE0, 0xE1, 0xEE, 0xFE, 0x01};
  const Segment segment = pick(file, 0, random);
  if (segment.size) file[segment.at + 1] = kMarkers[random.below(std::size(kMarkers))];
}

void edit_interval(Bytes& file, Others, Random& random) {
  const Segment segment = pick(file, kDri, random);
  if (segment.size >= 6 && !random.one_in(4)) {
    put16(file, segment.at + 4, random.one_in(2) ? int(random.below(12)) : odd_word(random));
  } else if (segment.size && random.one_in(2)) {
    erase(file, segment.at, segment.size);
  } else {
    insert(file, 2, {0xFF, kDri, 0, 4, 0, uint8_t(random.below(12))});
  }
}

void edit_restarts(Bytes& file, Others, Random& random) {
  const std::vector<size_t> found = restarts(file);
  const uint8_t number = uint8_t(kRst + random.below(8));
  if (found.empty() || random.one_in(6)) {
    insert(file, entropy(file) + random.below(file.size()), {0xFF, number});
    return;
  }
  const size_t at = found[random.below(found.size())];
  switch (random.below(4)) {
    case 0: erase(file, at, 2); break;
    case 1: insert(file, at, {0xFF, file[at + 1]}); break;
    case 2: file[at + 1] = number; break;
    default: erase(file, found[0], at - found[0]); break;  // segments are lost
  }
}

void move_segment(Bytes& file, Others, Random& random) {
  const Segment segment = pick(file, 0, random);
  if (!segment.size) return;
  const Bytes part = slice(file, segment.at, segment.size);
  if (!random.one_in(3)) erase(file, segment.at, segment.size);  // else it is there twice
  if (random.one_in(3)) return;
  const Segment before = pick(file, 0, random);
  insert(file, before.size ? before.at : 2, part);
}

void splice_files(Bytes& file, Others others, Random& random) {
  const Bytes& other = others[random.below(others.size())];
  if (random.one_in(2)) {  // this header, that scan
    file.resize(entropy(file));
    insert(file, file.size(), slice(other, entropy(other), other.size()));
  } else {
    file.resize(random.below(file.size() + 1));
    insert(file, file.size(), slice(other, random.below(other.size()), other.size()));
  }
}

void take_segment(Bytes& file, Others others, Random& random) {
  const Bytes& other = others[random.below(others.size())];
  const Segment theirs = pick(other, 0, random), before = pick(file, 0, random);
  if (theirs.size) insert(file, before.size ? before.at : 2, slice(other, theirs.at, theirs.size));
}

void overwrite(Bytes& file, Others, Random& random) {
  if (file.empty()) return;
  const size_t at = random.below(file.size()), size = std::min(1 + random.below(64), file.size() - at);
  const size_t how = random.below(3);
  for (size_t i = 0; i < size; ++i) file[at + i] = how == 0 ? random.byte() : how == 1 ? 0xFF : 0;
}

void grow_or_shrink(Bytes& file, Others, Random& random) {
  const size_t at = random.below(file.size() + 1), size = 1 + random.below(64);
  if (random.one_in(2)) {
    erase(file, at, size);
  } else {
    Bytes part(size);
    for (uint8_t& value : part) value = random.one_in(4) ? 0xFF : random.byte();
    insert(file, at, part);
  }
}

void noise(Bytes& file, Others, Random& random) {
  const size_t from = random.one_in(2) ? std::min<size_t>(2, file.size()) : std::min(entropy(file), file.size());
  for (size_t at = from; at < file.size(); ++at) file[at] = random.byte();
}

constexpr void (*kKinds[])(Bytes&, Others, Random&) = {
    flip_anywhere, flip_header, flip_scan, flip_scan, truncate, edit_length, edit_size, edit_size, edit_sampling,
    edit<kSof>, edit<kDht>, edit<kDht>, edit<kDqt>, edit<kSos>, edit_marker, edit_interval, edit_restarts,
    edit_restarts, edit_restarts, move_segment, splice_files, take_segment, overwrite, grow_or_shrink, noise};

}  // namespace

Bytes mutate(const std::vector<Bytes>& seeds, size_t which, Random& random) {
  Bytes file = seeds[which];
  size_t count = random.one_in(3) ? 2 + random.below(2) : 1;
  while (count--) kKinds[random.below(std::size(kKinds))](file, seeds, random);
  return file;
}

}  // namespace headway::fuzz
