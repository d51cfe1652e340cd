// Inverse DCT for smaller decodes, to 4 x 4, 2 x 2 or 1 pixel: the transform of that size over the lowest coefficients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "idct.h"

namespace headway {
namespace HW_ISA {

// [x][u] is cos((2 x + 1) u pi / 2 N) of the orthonormal transform, times sqrt(N / 8), so that an even block keeps its
// value; 13-bit fractions.
template <int N> struct Basis;
template <> struct Basis<2> {
  // all are 1 / sqrt(8)
  static constexpr int at[2][2] = {{2896, 2896}, {2896, -2896}};
};
template <> struct Basis<4> {
  // 1 / sqrt(8) for u = 0, else cos((2 x + 1) u pi / 8) / 2
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

// One lane of a group; side is 4, 2 or 1.
inline void reduced_idct(int side, const int16_t* coefficients, const int16_t* quant, uint8_t* out, size_t stride) {
  if (side == 4) return reduced_idct_n<4>(coefficients, quant, out, stride);
  if (side == 2) return reduced_idct_n<2>(coefficients, quant, out, stride);
  out[0] = to_pixel((int16_t(coefficients[0] * quant[0]) + 4) >> 3);
}

}  // namespace HW_ISA
}  // namespace headway
