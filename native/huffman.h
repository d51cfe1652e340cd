// Entropy decoding of baseline JPEG.
//
// A code and the bits of its coefficient are looked up together: 11 bits of the stream decide nearly all symbols in one
// load. The stuffing after 0xFF is taken out beforehand, so that the bit buffer is refilled by one unaligned load.
#pragma once

#include <cstring>

#include "jpeg.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headway {
namespace HW_ISA {

constexpr int LOOKUP_BITS = 11;

// One entry: bits 0-5 length; bit 6: LONG; bits 8-15: advance in zigzag order; bits 16-31: the coefficient.
// Where the code fits into the lookup and its bits do not, LONG is set, length is the code's alone, and the
// coefficient is the number of its bits; length 0: the code itself does not fit.
using Entry = uint32_t;
constexpr Entry LONG = 64;
constexpr int END_OF_BLOCK = 128;  // an advance that no run of zeros reaches

inline int extend(uint32_t bits, int count) {
  return int(bits) + (bits >> (count - 1) ? 0 : 1 - (1 << count));
}

class HuffmanTable final {
 public:
  // False where the code is impossible. `is_ac`: symbols are run and size, else sizes.
  bool build(const HuffmanSpec& spec, bool is_ac) {
    if (spec.count == spec_.count && !std::memcmp(&spec, &spec_, size_t(16 + spec.count))) return true;
    spec_.count = -1;
    for (Entry& entry : entry_) entry = LONG;
    uint32_t code = 0;
    int symbol = 0;
    for (int length = 1; length <= 16; length++) {
      offset_[length] = symbol - int(code);
      for (int i = 0; i < spec.bits[length - 1]; i++, symbol++, code++) {
        if (code >> length) return false;
        int value = spec.values[symbol], bits = value & 15, run = value >> 4;
        if (!is_ac && value > 15) return false;
        if (length <= LOOKUP_BITS) fill(code, length, bits, is_ac ? advance(run, bits) : 1);
      }
      // Codes are compared as 16 bits; without a code of this length nothing is below.
      below_[length] = code << (16 - length);
      code <<= 1;
    }
    std::memcpy(&spec_, &spec, sizeof spec);
    return true;
  }

  Entry operator[](uint64_t top) const { return entry_[top >> (64 - LOOKUP_BITS)]; }

  // Length and symbol of a code that the lookup does not hold; length 17 where there is none.
  int long_code(uint64_t top, int& symbol) const {
    uint32_t word = uint32_t(top >> 48);
    int length = LOOKUP_BITS + 1;
    while (length <= 16 && word >= below_[length]) length++;
    symbol = length <= 16 ? spec_.values[(offset_[length] + int(word >> (16 - length))) & 255] : 0;
    return length;
  }

  static int advance(int run, int bits) { return bits ? run + 1 : run == 15 ? 16 : END_OF_BLOCK; }

 private:
  void fill(uint32_t code, int length, int bits, int advance) {
    Entry* at = entry_ + (code << (LOOKUP_BITS - length));
    int spare = LOOKUP_BITS - length - bits;
    if (spare < 0) {
      Entry entry = uint32_t(bits) << 16 | uint32_t(advance) << 8 | LONG | uint32_t(length);
      for (int i = 0; i < 1 << (LOOKUP_BITS - length); i++) at[i] = entry;
      return;
    }
    for (uint32_t value = 0; value < 1u << bits; value++) {
      int coefficient = bits ? extend(value, bits) : 0;
      Entry entry = uint32_t(coefficient) << 16 | uint32_t(advance) << 8 | uint32_t(length + bits);
      for (int i = 0; i < 1 << spare; i++) *at++ = entry;
    }
  }

  Entry entry_[1 << LOOKUP_BITS];
  HuffmanSpec spec_{{}, {}, -1};
  int offset_[17];
  uint32_t below_[17];
};

// Bits of one restart interval, without stuffing. It may be read up to BIT_SLACK bytes past its end.
constexpr size_t BIT_SLACK = 2560 + 8;  // an MCU takes at most 10 blocks of 64 symbols of 32 bits

struct Bits {
  const uint8_t* at;
  const uint8_t* end;
  uint64_t top;  // the next bits, from the highest
  int count;     // how many of them are there

  void open(const uint8_t* begin, const uint8_t* end_) {
    at = begin, end = end_, top = 0, count = 0;
    refill();
  }

  // At least 56 bits.
  void refill() {
    uint64_t word;
    std::memcpy(&word, at, 8);
    top |= __builtin_bswap64(word) >> count;
    at += (63 - count) >> 3;
    count |= 56;
  }

  void drop(int bits) { top <<= bits, count -= bits; }

  bool overrun() const { return at - (count >> 3) > end; }
};

// `at` is the first of some bytes 0xFF: the last of them where they are filling before a marker, `end` where nothing
// follows, and `at` where a zero does. libjpeg-turbo mixes two readings of a block that has such filling among its codes.
inline const uint8_t* skip_filling(const uint8_t* at, const uint8_t* end) {
  const uint8_t* last = at;
  while (end - last > 1 && last[1] == 0xFF) last++;
  return end - last < 2 ? end : last[1] == 0 ? at : last;
}

// Copies entropy-coded bytes without their stuffing, up to the marker that ends them, or to filling that no marker ends;
// returns where that begins, or `end`. `out` needs room for end - at + 64 bytes and is moved past what was written.
inline const uint8_t* unstuff(const uint8_t* at, const uint8_t* end, uint8_t*& out) {
#if defined(__AVX2__)
  while (end - at > 33) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
    uint32_t hits = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1))));
    if (!hits) {
      at += 32, out += 32;
      continue;
    }
    int first = __builtin_ctz(hits);
    at += first, out += first;
    if (at[1] == 0) {
      at += 2, out++;
    } else if (at[1] == 0xFF) {
      return skip_filling(at, end);
    } else {
      return at;
    }
  }
#endif
  while (at < end) {
    if (*at != 0xFF) {
      *out++ = *at++;
    } else if (at + 1 >= end) {
      return end;
    } else if (at[1] == 0) {
      *out++ = 0xFF, at += 2;
    } else if (at[1] == 0xFF) {
      return skip_filling(at, end);
    } else {
      return at;
    }
  }
  return end;
}

// Where the next marker begins in entropy-coded bytes, or `end`.
inline const uint8_t* find_marker(const uint8_t* at, const uint8_t* end) {
#if defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi8(-1), zero = _mm256_setzero_si256();
  while (end - at > 33) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 1));
    __m256i stop = _mm256_andnot_si256(_mm256_cmpeq_epi8(next, zero), _mm256_cmpeq_epi8(bytes, ones));
    uint32_t hits = uint32_t(_mm256_movemask_epi8(stop));
    if (hits) {
      at += __builtin_ctz(hits);
      if (at[1] != 0xFF) return at;
      at++;
    } else {
      at += 32;
    }
  }
#endif
  while (at + 1 < end) {
    if (*at == 0xFF && at[1] != 0 && at[1] != 0xFF) return at;
    at++;
  }
  return end;
}

}  // namespace HW_ISA
}  // namespace headway
