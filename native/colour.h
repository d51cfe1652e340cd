// Chroma upsampling ("fancy": triangle filter) and YCbCr to RGBX, a row at a time, bit for bit as libjpeg does them.
//
// Rows may be read 64 bytes past and 1 byte before what is asked for, and outputs written 64 bytes past it.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headway {
namespace HW_ISA {

#if defined(__AVX2__)
inline __m256i wide(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void put(uint8_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline __m256i triple(__m256i v) { return _mm256_add_epi16(_mm256_add_epi16(v, v), v); }
#endif

// n samples become 2n: out[2i] = (3 in[i] + in[i-1] + 1) / 4, out[2i+1] = (3 in[i] + in[i+1] + 2) / 4.
inline void upsample_h2v1(const uint8_t* in, uint8_t* out, int n) {
#if defined(__AVX2__)
  const __m256i one = _mm256_set1_epi16(1), two = _mm256_set1_epi16(2);
  for (int i = 0; i < n; i += 16) {
    __m256i near = triple(wide(in + i));
    __m256i even = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(near, wide(in + i - 1)), one), 2);
    __m256i odd = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(near, wide(in + i + 1)), two), 2);
    put(out + 2 * i, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
  }
#else
  for (int i = 0; i < n; i++) {
    out[2 * i] = uint8_t((3 * in[i] + in[i - 1] + 1) >> 2);
    out[2 * i + 1] = uint8_t((3 * in[i] + in[i + 1] + 2) >> 2);
  }
#endif
}

// The same with rows weighted before: 3 near + far; sixteenths.
inline void upsample_h2v2(const uint8_t* near, const uint8_t* far, uint8_t* out, int n) {
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi16(8), seven = _mm256_set1_epi16(7);
  auto sum = [&](int i) { return _mm256_add_epi16(triple(wide(near + i)), wide(far + i)); };
  for (int i = 0; i < n; i += 16) {
    __m256i here = triple(sum(i));
    __m256i even = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, sum(i - 1)), eight), 4);
    __m256i odd = _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(here, sum(i + 1)), seven), 4);
    put(out + 2 * i, _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
  }
#else
  auto sum = [&](int i) { return 3 * near[i] + far[i]; };
  for (int i = 0; i < n; i++) {
    out[2 * i] = uint8_t((3 * sum(i) + sum(i - 1) + 8) >> 4);
    out[2 * i + 1] = uint8_t((3 * sum(i) + sum(i + 1) + 7) >> 4);
  }
#endif
}

// Rows only: (3 near + far + bias) / 4; the bias is 1 where far is above, 2 where it is below.
inline void upsample_h1v2(const uint8_t* near, const uint8_t* far, uint8_t* out, int n, int bias) {
#if defined(__AVX2__)
  const __m256i add = _mm256_set1_epi16(short(bias));
  for (int i = 0; i < n; i += 16) {
    __m256i sum = _mm256_add_epi16(_mm256_add_epi16(triple(wide(near + i)), wide(far + i)), add);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(sum, 2), sum), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_castsi256_si128(packed));
  }
#else
  for (int i = 0; i < n; i++) out[i] = uint8_t((3 * near[i] + far[i] + bias) >> 2);
#endif
}

// R = y + 1.402 cr, G = y - 0.34414 cb - 0.71414 cr, B = y + 1.772 cb, in 16-bit fractions as libjpeg's tables.
inline void ycc_to_rgbx(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out, int n) {
#if defined(__AVX2__)
  const __m256i centre = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1), zero = _mm256_setzero_si256();
  const __m256i r_cr = _mm256_set1_epi16(26345), b_cb = _mm256_set1_epi16(-14942);  // 0.402, 1.772 - 2
  // -0.34414 of cb and 1 - 0.71414 of cr
  const __m256i g_both = _mm256_set1_epi32(int(uint32_t(18734) << 16 | uint16_t(-22554)));
  const __m256i half = _mm256_set1_epi32(32768);
  struct Rgb {
    __m256i r, g, b;
  };
  // The fraction is multiplied into 2 c, so that adding 1 and halving rounds as adding 1/2 does.
  auto convert = [&](int i) {
    __m256i l = wide(y + i), u = _mm256_sub_epi16(wide(cb + i), centre), v = _mm256_sub_epi16(wide(cr + i), centre);
    __m256i u2 = _mm256_add_epi16(u, u), v2 = _mm256_add_epi16(v, v);
    __m256i r = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(v2, r_cr), one), 1);
    __m256i b = _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(u2, b_cb), one), 1);
    __m256i g0 = _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), g_both);
    __m256i g1 = _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), g_both);
    g0 = _mm256_srai_epi32(_mm256_add_epi32(g0, half), 16);
    g1 = _mm256_srai_epi32(_mm256_add_epi32(g1, half), 16);
    __m256i g = _mm256_sub_epi16(_mm256_packs_epi32(g0, g1), v);
    return Rgb{_mm256_add_epi16(l, _mm256_add_epi16(r, v)), _mm256_add_epi16(l, g),
               _mm256_add_epi16(l, _mm256_add_epi16(b, u2))};
  };
  for (int i = 0; i < n; i += 32) {
    Rgb a = convert(i), c = convert(i + 16);
    __m256i r = _mm256_packus_epi16(a.r, c.r), g = _mm256_packus_epi16(a.g, c.g), b = _mm256_packus_epi16(a.b, c.b);
    // Lanes: pixels 0-7 | 8-15 in the low halves, 16-23 | 24-31 in the high ones.
    __m256i rg = _mm256_unpacklo_epi8(r, g), bx = _mm256_unpacklo_epi8(b, zero);
    __m256i low = _mm256_unpacklo_epi16(rg, bx), high = _mm256_unpackhi_epi16(rg, bx);
    put(out + 4 * i, _mm256_permute2x128_si256(low, high, 0x20));
    put(out + 4 * i + 32, _mm256_permute2x128_si256(low, high, 0x31));
    rg = _mm256_unpackhi_epi8(r, g), bx = _mm256_unpackhi_epi8(b, zero);
    low = _mm256_unpacklo_epi16(rg, bx), high = _mm256_unpackhi_epi16(rg, bx);
    put(out + 4 * i + 64, _mm256_permute2x128_si256(low, high, 0x20));
    put(out + 4 * i + 96, _mm256_permute2x128_si256(low, high, 0x31));
  }
#else
  auto clip = [](int x) { return uint8_t(std::min(std::max(x, 0), 255)); };
  for (int i = 0; i < n; i++) {
    int u = cb[i] - 128, v = cr[i] - 128;
    out[4 * i] = clip(y[i] + ((91881 * v + 32768) >> 16));
    out[4 * i + 1] = clip(y[i] + ((-22554 * u - 46802 * v + 32768) >> 16));
    out[4 * i + 2] = clip(y[i] + ((116130 * u + 32768) >> 16));
    out[4 * i + 3] = 0;
  }
#endif
}

}  // namespace HW_ISA
}  // namespace headway
