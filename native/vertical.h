// Hot: the vertical pass. Rows of bytes, whatever their pixels, are weighted and summed into lines of 16-bit values.
//
// Rows and lines may be read and written up to the next multiple of 64 values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace headway {
namespace HW_ISA {

constexpr int kLineBits = 7;  // fraction of the values of a line: 255 << 7 is the most that an int16 holds
constexpr int kFewTaps = 8;   // rows that are blended at a time; each cuts off less than a unit of its line
constexpr int kFewBits = 15;  // of their weights
constexpr int kManyBits = 16; // of the weights of such parts where rows are more: 7 + 8 + 16 bits fill an int32

// The upper half of a product; of 16-bit arguments, or a compiler does not see that one instruction does it.
inline uint16_t upper(uint16_t a, uint16_t b) { return uint16_t(uint32_t(a) * b >> 16); }

// line[i] = sum of rows[t][i] * weights[t] >> 8, each product for itself. Bytes go in pairs, the low one shifted up and
// the high one masked: that takes a third fewer shuffles than to unpack them first.
template <int kTaps>
inline void blend_taps(const uint8_t* const* rows, const uint16_t* weights, size_t bytes, int16_t* __restrict line) {
  const uint8_t* row[kTaps];
  uint16_t weight[kTaps];
  for (int t = 0; t < kTaps; t++) row[t] = rows[t], weight[t] = weights[t];
  for (size_t i = 0; i < (bytes + 63) / 64 * 64; i += 2) {
    uint16_t low = 0, high = 0;
    for (int t = 0; t < kTaps; t++) {
      uint16_t both;
      std::memcpy(&both, row[t] + i, 2);
      low = uint16_t(low + upper(uint16_t(both << 8), weight[t]));
      high = uint16_t(high + upper(uint16_t(both & 0xff00), weight[t]));
    }
    line[i] = int16_t(low);
    line[i + 1] = int16_t(high);
  }
}

inline void blend(const uint8_t* const* rows, const uint16_t* weights, int taps, size_t bytes, int16_t* line) {
  switch (taps) {
    case 1: return blend_taps<1>(rows, weights, bytes, line);
    case 2: return blend_taps<2>(rows, weights, bytes, line);
    case 3: return blend_taps<3>(rows, weights, bytes, line);
    case 4: return blend_taps<4>(rows, weights, bytes, line);
    case 5: return blend_taps<5>(rows, weights, bytes, line);
    case 6: return blend_taps<6>(rows, weights, bytes, line);
    case 7: return blend_taps<7>(rows, weights, bytes, line);
    default: return blend_taps<8>(rows, weights, bytes, line);
  }
}

// sums[i] = line[i] * weight, and what was there unless that is nothing yet.
inline void add(const int16_t* __restrict line, int weight, size_t n, int32_t* __restrict sums, bool fresh) {
  if (fresh)
    for (size_t i = 0; i < n; i++) sums[i] = line[i] * weight;
  else
    for (size_t i = 0; i < n; i++) sums[i] += line[i] * weight;
}

// line[i] = sums[i] without the bits of weights
inline void settle(const int32_t* __restrict sums, int32_t rounding, size_t n, int16_t* __restrict line) {
  for (size_t i = 0; i < n; i++) line[i] = int16_t((sums[i] + rounding) >> kManyBits);
}

// A line of gray values becomes one of RGBX.
inline void widen(const int16_t* __restrict gray, int16_t* __restrict rgbx, size_t n) {
  for (size_t i = 0; i < n; i++)
    for (size_t c = 0; c < 4; c++) rgbx[4 * i + c] = gray[i];
}

}  // namespace HW_ISA
}  // namespace headway
