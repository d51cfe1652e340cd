// The matrices A^T, B^T and G of Winograd's filtering, by Toom and Cook: a product of polynomials from the values of both
// at some points, of which one is at infinity. Lavin and Gray 2016, arXiv 1509.09308, section 5.1.
#pragma once

namespace headway {

template <int rows_, int columns_>
struct Matrix {
  static constexpr int rows = rows_, columns = columns_;
  float at[rows][columns];

  constexpr Matrix<columns, rows> transpose() const {
    Matrix<columns, rows> out{};
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j++) out.at[j][i] = at[i][j];
    return out;
  }

  constexpr int count() const {
    int found = 0;
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j++) found += at[i][j] != 0;
    return found;
  }

  constexpr bool is_first(int i, int j) const {
    for (int k = 0; k < j; k++)
      if (at[i][k] != 0) return false;
    return true;
  }
};

// Small ones with few digits, so that sums lose little. With eight of them results have a relative error of up to 7e-5,
// with seven one below 1e-5.
constexpr double kPoints[] = {0, 1, -1, 2, -2, 0.5, -0.5, -4};

template <int tile>
struct ToomCook {
  static constexpr int span = tile + 2, finite = span - 1;

  // Product of (x - point) over all finite points but `left`.
  struct Polynomial {
    double at[span];
  };
  static constexpr Polynomial multiply_without(int left) {
    Polynomial out{};
    out.at[0] = 1;
    for (int p = 0; p < finite; p++) {
      if (p == left) continue;
      for (int k = span - 1; k >= 0; k--) out.at[k] = (k ? out.at[k - 1] : 0) - kPoints[p] * out.at[k];
    }
    return out;
  }

  static constexpr double power(double base, int exponent) { return exponent ? base * power(base, exponent - 1) : 1; }

  static constexpr Matrix<tile, span> make_output() {
    Matrix<tile, span> out{};
    for (int i = 0; i < tile; i++)
      for (int j = 0; j < finite; j++) out.at[i][j] = float(power(kPoints[j], i));
    out.at[tile - 1][finite] = 1;
    return out;
  }

  static constexpr Matrix<span, span> make_input() {
    Matrix<span, span> out{};
    for (int i = 0; i < span; i++) {
      const Polynomial row = multiply_without(i);
      for (int j = 0; j < span; j++) out.at[i][j] = float(row.at[j]);
    }
    return out;
  }

  static constexpr Matrix<span, 3> make_taps() {
    Matrix<span, 3> out{};
    for (int i = 0; i < finite; i++) {
      double divisor = 1;
      for (int p = 0; p < finite; p++)
        if (p != i) divisor *= kPoints[i] - kPoints[p];
      for (int j = 0; j < 3; j++) out.at[i][j] = float(power(kPoints[i], j) / divisor);
    }
    out.at[finite][2] = 1;
    return out;
  }
};

}  // namespace headway
