// Damage of every kind to JPEGs, the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headway::fuzz {

using Bytes = std::vector<uint8_t>;

// splitmix64 (Steele, Lea, Flood 2014).
class Random final {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  size_t below(size_t count) { return count ? next() % count : 0; }
  bool one_in(size_t count) { return below(count) == 0; }
  uint8_t byte() { return uint8_t(next()); }
  float unit() { return float(next() >> 40) / 16777216.0f; }

 private:
  uint64_t state_;
};

// One to three kinds of damage to seeds[which]; parts of the other seeds may come into it.
Bytes mutate(const std::vector<Bytes>& seeds, size_t which, Random& random);

}  // namespace headway::fuzz
