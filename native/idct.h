// The inverse DCT of libjpeg's "islow" (Loeffler, Ligtenberg, Moschytz 1989, with 13-bit constants), bit for bit, of as
// many blocks at once as the vectors have 128-bit lanes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headway {
namespace HW_ISA {

// Vectors: eight 16-bit numbers in each lane; unpacking and packing stay within a lane, as the instructions do.
#if defined(__AVX2__)
#if defined(__AVX512BW__)
constexpr int LANES = 4;
using V = __m512i;
inline V load(const void* p) { return _mm512_loadu_si512(p); }
inline V set16(int x) { return _mm512_set1_epi16(short(x)); }
inline V set32(int x) { return _mm512_set1_epi32(x); }
inline V pair(int a, int b) { return _mm512_set1_epi32(int(uint32_t(uint16_t(b)) << 16 | uint16_t(a))); }
inline V add16(V a, V b) { return _mm512_add_epi16(a, b); }
inline V sub16(V a, V b) { return _mm512_sub_epi16(a, b); }
inline V mul16(V a, V b) { return _mm512_mullo_epi16(a, b); }
inline V add32(V a, V b) { return _mm512_add_epi32(a, b); }
inline V sub32(V a, V b) { return _mm512_sub_epi32(a, b); }
inline V madd(V a, V b) { return _mm512_madd_epi16(a, b); }
template <int N> inline V shift32(V a) { return _mm512_srai_epi32(a, N); }
inline V low8(V a, V b) { return _mm512_unpacklo_epi8(a, b); }
inline V high8(V a, V b) { return _mm512_unpackhi_epi8(a, b); }
inline V low16(V a, V b) { return _mm512_unpacklo_epi16(a, b); }
inline V high16(V a, V b) { return _mm512_unpackhi_epi16(a, b); }
inline V low32(V a, V b) { return _mm512_unpacklo_epi32(a, b); }
inline V high32(V a, V b) { return _mm512_unpackhi_epi32(a, b); }
inline V low64(V a, V b) { return _mm512_unpacklo_epi64(a, b); }
inline V high64(V a, V b) { return _mm512_unpackhi_epi64(a, b); }
inline V pack32(V a, V b) { return _mm512_packs_epi32(a, b); }
inline V pack16(V a, V b) { return _mm512_packs_epi16(a, b); }
template <int L> inline __m128i lane(V a) { return _mm512_extracti32x4_epi32(a, L); }
#else
constexpr int LANES = 2;
using V = __m256i;
inline V load(const void* p) { return _mm256_loadu_si256(static_cast<const V*>(p)); }
inline V set16(int x) { return _mm256_set1_epi16(short(x)); }
inline V set32(int x) { return _mm256_set1_epi32(x); }
inline V pair(int a, int b) { return _mm256_set1_epi32(int(uint32_t(uint16_t(b)) << 16 | uint16_t(a))); }
inline V add16(V a, V b) { return _mm256_add_epi16(a, b); }
inline V sub16(V a, V b) { return _mm256_sub_epi16(a, b); }
inline V mul16(V a, V b) { return _mm256_mullo_epi16(a, b); }
inline V add32(V a, V b) { return _mm256_add_epi32(a, b); }
inline V sub32(V a, V b) { return _mm256_sub_epi32(a, b); }
inline V madd(V a, V b) { return _mm256_madd_epi16(a, b); }
template <int N> inline V shift32(V a) { return _mm256_srai_epi32(a, N); }
inline V low8(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
inline V high8(V a, V b) { return _mm256_unpackhi_epi8(a, b); }
inline V low16(V a, V b) { return _mm256_unpacklo_epi16(a, b); }
inline V high16(V a, V b) { return _mm256_unpackhi_epi16(a, b); }
inline V low32(V a, V b) { return _mm256_unpacklo_epi32(a, b); }
inline V high32(V a, V b) { return _mm256_unpackhi_epi32(a, b); }
inline V low64(V a, V b) { return _mm256_unpacklo_epi64(a, b); }
inline V high64(V a, V b) { return _mm256_unpackhi_epi64(a, b); }
inline V pack32(V a, V b) { return _mm256_packs_epi32(a, b); }
inline V pack16(V a, V b) { return _mm256_packs_epi16(a, b); }
template <int L> inline __m128i lane(V a) { return _mm256_extracti128_si256(a, L); }
#endif

// One dimension over the rows r[0..7]; results are shifted right by SHIFT with rounding.
template <int SHIFT> inline void idct_1d(V r[8]) {
  // Half of the eight columns of each lane at a time: 32-bit sums of 16-bit pairs.
  struct Half {
    V out[8];
  };
  const V round = set32(1 << (SHIFT - 1)), zero = set16(0);
  V sum04 = add16(r[0], r[4]), difference04 = sub16(r[0], r[4]);
  V z3 = add16(r[7], r[3]), z4 = add16(r[5], r[1]);
  auto half = [&](auto unpack) {
    Half h;
    V even26 = unpack(r[2], r[6]);
    V t2 = madd(even26, pair(4433, 4433 - 15137)), t3 = madd(even26, pair(4433 + 6270, 4433));
    V t0 = shift32<3>(unpack(zero, sum04)), t1 = shift32<3>(unpack(zero, difference04));
    t0 = add32(t0, round), t1 = add32(t1, round);
    V t10 = add32(t0, t3), t13 = sub32(t0, t3), t11 = add32(t1, t2), t12 = sub32(t1, t2);
    V z34 = unpack(z3, z4);
    V y3 = madd(z34, pair(9633 - 16069, 9633)), y4 = madd(z34, pair(9633, 9633 - 3196));
    V odd71 = unpack(r[7], r[1]), odd53 = unpack(r[5], r[3]);
    V o0 = add32(madd(odd71, pair(2446 - 7373, -7373)), y3);
    V o3 = add32(madd(odd71, pair(-7373, 12299 - 7373)), y4);
    V o1 = add32(madd(odd53, pair(16819 - 20995, -20995)), y4);
    V o2 = add32(madd(odd53, pair(-20995, 25172 - 20995)), y3);
    h.out[0] = shift32<SHIFT>(add32(t10, o3)), h.out[7] = shift32<SHIFT>(sub32(t10, o3));
    h.out[1] = shift32<SHIFT>(add32(t11, o2)), h.out[6] = shift32<SHIFT>(sub32(t11, o2));
    h.out[2] = shift32<SHIFT>(add32(t12, o1)), h.out[5] = shift32<SHIFT>(sub32(t12, o1));
    h.out[3] = shift32<SHIFT>(add32(t13, o0)), h.out[4] = shift32<SHIFT>(sub32(t13, o0));
    return h;
  };
  Half low = half([](V a, V b) { return low16(a, b); }), high = half([](V a, V b) { return high16(a, b); });
  for (int i = 0; i < 8; i++) r[i] = pack32(low.out[i], high.out[i]);
}

inline void transpose(V r[8]) {
  V a0 = low16(r[0], r[1]), a1 = high16(r[0], r[1]), a2 = low16(r[2], r[3]), a3 = high16(r[2], r[3]);
  V a4 = low16(r[4], r[5]), a5 = high16(r[4], r[5]), a6 = low16(r[6], r[7]), a7 = high16(r[6], r[7]);
  V b0 = low32(a0, a2), b1 = high32(a0, a2), b2 = low32(a1, a3), b3 = high32(a1, a3);
  V b4 = low32(a4, a6), b5 = high32(a4, a6), b6 = low32(a5, a7), b7 = high32(a5, a7);
  r[0] = low64(b0, b4), r[1] = high64(b0, b4), r[2] = low64(b1, b5), r[3] = high64(b1, b5);
  r[4] = low64(b2, b6), r[5] = high64(b2, b6), r[6] = low64(b3, b7), r[7] = high64(b3, b7);
}

template <int L> inline void store_lane(const V w[4], uint8_t* out, size_t stride) {
  for (int i = 0; i < 4; i++) {
    __m128i rows = lane<L>(w[i]);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + size_t(2 * i) * stride), rows);
    _mm_storeh_pd(reinterpret_cast<double*>(out + size_t(2 * i + 1) * stride), _mm_castsi128_pd(rows));
  }
}

// `coefficients` and `quant`: int16 [8 rows][LANES][8 columns]; block of lane l goes to out[l] with stride[l].
inline void idct_8x8(const int16_t* coefficients, const int16_t* quant, uint8_t* const out[], const size_t stride[]) {
  V r[8];
  for (int i = 0; i < 8; i++) r[i] = mul16(load(coefficients + 8 * LANES * i), load(quant + 8 * LANES * i));
  idct_1d<11>(r);
  transpose(r);
  idct_1d<18>(r);  // r[j] is column j now
  V p0 = pack16(r[0], r[2]), p1 = pack16(r[1], r[3]), p2 = pack16(r[4], r[6]), p3 = pack16(r[5], r[7]);
  V u0 = low8(p0, p1), u1 = high8(p0, p1), u2 = low8(p2, p3), u3 = high8(p2, p3);
  V v0 = low16(u0, u1), v1 = high16(u0, u1), v2 = low16(u2, u3), v3 = high16(u2, u3);
  const V middle = set16(int(0x8080));  // from -128..127 to 0..255, modulo 256
  V w[4] = {low32(v0, v2), high32(v0, v2), low32(v1, v3), high32(v1, v3)};
#if defined(__AVX512BW__)
  for (V& x : w) x = _mm512_xor_si512(x, middle);
  store_lane<0>(w, out[0], stride[0]), store_lane<1>(w, out[1], stride[1]);
  store_lane<2>(w, out[2], stride[2]), store_lane<3>(w, out[3], stride[3]);
#else
  for (V& x : w) x = _mm256_xor_si256(x, middle);
  store_lane<0>(w, out[0], stride[0]), store_lane<1>(w, out[1], stride[1]);
#endif
}
#else
constexpr int LANES = 1;

inline int clamp(int x, int limit) { return x < -limit ? -limit : x > limit - 1 ? limit - 1 : x; }

// One dimension, of the eight columns of [8 rows][8 columns]; to [8 columns][8 rows]. Sums of inputs are of 16 bits, as
// the vectors' are: they wrap where a damaged file makes them too large.
template <int SHIFT> inline void idct_1d(const int16_t* in, int16_t* out) {
  for (int c = 0; c < 8; c++) {
    const auto at = [&](int row) { return int(in[8 * row + c]); };
    const int round = 1 << (SHIFT - 1), z3 = int16_t(at(7) + at(3)), z4 = int16_t(at(5) + at(1));
    const int t2 = at(2) * 4433 + at(6) * (4433 - 15137), t3 = at(2) * (4433 + 6270) + at(6) * 4433;
    const int t0 = int16_t(at(0) + at(4)) * 8192 + round, t1 = int16_t(at(0) - at(4)) * 8192 + round;
    const int y3 = z3 * (9633 - 16069) + z4 * 9633, y4 = z3 * 9633 + z4 * (9633 - 3196);
    const int odd[4] = {at(7) * (2446 - 7373) - at(1) * 7373 + y3, at(5) * (16819 - 20995) - at(3) * 20995 + y4,
                        at(5) * -20995 + at(3) * (25172 - 20995) + y3, at(7) * -7373 + at(1) * (12299 - 7373) + y4};
    const int even[4] = {t0 + t3, t1 + t2, t1 - t2, t0 - t3};
    for (int i = 0; i < 4; i++) {
      out[8 * c + i] = int16_t(clamp((even[i] + odd[3 - i]) >> SHIFT, 32768));
      out[8 * c + 7 - i] = int16_t(clamp((even[i] - odd[3 - i]) >> SHIFT, 32768));
    }
  }
}

inline void idct_8x8(const int16_t* coefficients, const int16_t* quant, uint8_t* const out[], const size_t stride[]) {
  int16_t block[64], columns[64], rows[64];
  for (int i = 0; i < 64; i++) block[i] = int16_t(coefficients[i] * quant[i]);
  idct_1d<11>(block, columns);
  idct_1d<18>(columns, rows);
  for (int y = 0; y < 8; y++)
    for (int x = 0; x < 8; x++) out[0][size_t(y) * stride[0] + size_t(x)] = uint8_t(clamp(rows[8 * y + x], 128) + 128);
}
#endif

}  // namespace HW_ISA
}  // namespace headway
