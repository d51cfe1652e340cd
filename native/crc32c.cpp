#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace headway {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed
constexpr int kBytes = 8;
using Tables = std::array<std::array<uint32_t, 256>, kBytes>;

constexpr uint32_t one_byte(uint32_t crc) {
  for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
  return crc;
}

// tables[k][b]: what byte b becomes when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t crc = one_byte(b);
    for (size_t k = 0; k < kBytes; k++, crc = one_byte(crc)) tables[k][b] = crc;
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Eight bytes a turn; for processors without the instruction.
uint32_t by_tables(uint32_t crc, const uint8_t* at, size_t size) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; size >= kBytes; size -= kBytes, at += kBytes) {
    const uint64_t word = load(at) ^ crc;
    crc = 0;
    for (size_t k = 0; k < kBytes; k++) crc ^= kTables[kBytes - 1 - k][word >> 8 * k & 255];
  }
#endif
  for (; size; size--, at++) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
// The instruction takes three cycles and a new one can begin in each: three streams side by side, joined by a table
// that moves a checksum past the bytes of a stream.
constexpr size_t kStream = 1024;
using Shift = std::array<std::array<uint32_t, 256>, 4>;

constexpr Shift make_shift() {
  Shift shift{};
  uint32_t moved[32] = {};
  for (int bit = 0; bit < 32; bit++) {
    uint32_t crc = uint32_t(1) << bit;
    for (size_t k = 0; k < kStream; k++) crc = crc >> 8 ^ kTables[0][crc & 255];
    moved[bit] = crc;
  }
  for (size_t k = 0; k < 4; k++)
    for (size_t b = 0; b < 256; b++)
      for (size_t bit = 0; bit < 8; bit++)
        if (b >> bit & 1) shift[k][b] ^= moved[8 * k + bit];
  return shift;
}

constexpr Shift kShift = make_shift();

uint64_t past(uint64_t crc) {
  return kShift[0][crc & 255] ^ kShift[1][crc >> 8 & 255] ^ kShift[2][crc >> 16 & 255] ^ kShift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t start, const uint8_t* at, size_t size) {
  uint64_t crc = start;
  for (; size >= 3 * kStream; size -= 3 * kStream, at += 3 * kStream) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      crc = _mm_crc32_u64(crc, load(at + i));
      second = _mm_crc32_u64(second, load(at + kStream + i));
      third = _mm_crc32_u64(third, load(at + 2 * kStream + i));
    }
    crc = past(past(crc) ^ second) ^ third;
  }
  for (; size >= 8; size -= 8, at += 8) crc = _mm_crc32_u64(crc, load(at));
  uint32_t rest = uint32_t(crc);
  for (; size; size--, at++) rest = _mm_crc32_u8(rest, *at);
  return rest;
}
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t size) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(~uint32_t(0), at, size);
#endif
  return ~by_tables(~uint32_t(0), at, size);
}

}  // namespace headway
