// Inverse DCT for smaller decodes, to 4 x 4, 2 x 2 or 1 pixel: the transform of that size over the lowest coefficients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "idct.h"

namespace headway {
namespace HW_ISA {

// cos((2 x + 1) u pi / 2 n), times sqrt(1/2) for u = 0 and 1/2 else scaled so that a constant block keeps its value:
// [x][u], 13-bit fractions.
template <int N> struct Basis;
template <> struct Basis<2> {
  // sqrt(2/8) (sqrt(1/2) and cos(pi/4)): 1/sqrt(8)
  static constexpr int at[2][2] = {{2896, 2896}, {2896, -2896}};
};
template <> struct Basis<4> {
  // sqrt(4/8) (1/2, sqrt(1/2) cos((2x+1)u pi/8))
  static constexpr int at[4][4] = {{2896, 3784, 2896, 1567}, {2896, 1567, -2896, -3784},
                                   {2896, -1567, -2896, 3784}, {2896, -3784, 2896, -1567}};
};

inline uint8_t to_pixel(int value) { return uint8_t(std::min(std::max(value + 128, 0), 255)); }

template <int N>
void reduced_idct_n(const int16_t* coefficients, const int16_t* quant, uint8_t* out, size_t stride) {
  int rows[N][N];  // after the columns' transform, 4 more bits than pixels
  for (int x = 0; x < N; x++)
    for (int y = 0; y < N; y++) {
      int64_t sum = 0;
      for (int u = 0; u < N; u++) {
        int at = 8 * LANES * u + x;
        sum += int64_t(Basis<N>::at[y][u]) * int16_t(coefficients[at] * quant[at]);
      }
      rows[y][x] = int((sum + (1 << 8)) >> 9);
    }
  for (int y = 0; y < N; y++)
    for (int x = 0; x < N; x++) {
      int64_t sum = 0;
      for (int u = 0; u < N; u++) sum += int64_t(Basis<N>::at[x][u]) * rows[y][u];
      out[size_t(y) * stride + size_t(x)] = to_pixel(int((sum + (1 << 16)) >> 17));
    }
}

// One lane of a group to a block of side 8, 4, 2 or 1.
inline void idct_of_lane(int side, const int16_t* group, const int16_t* quants, unsigned lane, uint8_t* out,
                         size_t stride) {
  const int16_t *coefficients = group + 8 * lane, *quant = quants + 8 * lane;
  if (side == 4) return reduced_idct_n<4>(coefficients, quant, out, stride);
  if (side == 2) return reduced_idct_n<2>(coefficients, quant, out, stride);
  if (side == 1) {
    out[0] = to_pixel((int16_t(coefficients[0] * quant[0]) + 4) >> 3);
    return;
  }
  alignas(64) uint8_t unused[64];
  uint8_t* outs[LANES];
  size_t strides[LANES];
  for (unsigned other = 0; other < LANES; other++) {
    outs[other] = other == lane ? out : unused;
    strides[other] = other == lane ? stride : 8;
  }
  idct_8x8(group, quants, outs, strides);
}

}  // namespace HW_ISA
}  // namespace headway
