// Hot: pixels from one layout to another. Portable, AVX2 and AVX-512; same bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headway {
namespace HW_ISA {

// Pillow's luma: ITU-R 601 in 16 bits.
inline void luma(const uint8_t* rgbx, uint8_t* gray, size_t n) {
  for (size_t i = 0; i < n; i++)
    gray[i] = uint8_t((19595u * rgbx[4 * i] + 38470u * rgbx[4 * i + 1] + 7471u * rgbx[4 * i + 2] + 32768u) >> 16);
}

inline void rgb_to_rgbx(const uint8_t* rgb, uint8_t* rgbx, size_t n) {
  size_t i = 0;
#if defined(__AVX2__)
  const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
  for (; i + 6 <= n; i += 4) {  // 16 bytes are read of which 12 are meant
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rgb + 3 * i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rgbx + 4 * i), _mm_shuffle_epi8(four, spread));
  }
#endif
  for (; i < n; i++) {
    for (size_t c = 0; c < 3; c++) rgbx[4 * i + c] = rgb[3 * i + c];
    rgbx[4 * i + 3] = 0;
  }
}

inline void planes_to_rgbx(const uint8_t* red, size_t plane, uint8_t* rgbx, size_t n) {
  for (size_t i = 0; i < n; i++) {
    for (size_t c = 0; c < 3; c++) rgbx[4 * i + c] = red[c * plane + i];
    rgbx[4 * i + 3] = 0;
  }
}

#if defined(__AVX2__)
// 8 pixels of 4 bytes, or n where that is less, to the target as 3 bytes, or 1 (the first).
inline void store_pixels(__m256i pixels, uint8_t* out, int n, int channels) {
  const __m128i pick = channels == 1 ? _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)
                                     : _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  const __m256i picked = _mm256_shuffle_epi8(pixels, _mm256_broadcastsi128_si256(pick));
  uint8_t bytes[32];  // for the end of a row: a store writes more than its half of the pixels
  uint8_t* to = n * channels >= 4 * channels + 16 ? out : bytes;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(picked));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * channels), _mm256_extracti128_si256(picked, 1));
  if (to == bytes) std::memcpy(out, bytes, size_t(std::min(n, 8) * channels));
}
#endif

// A row of pixels of 1 or 4 bytes to 1 or 3 channels. Of the row, 32 bytes beyond its end may be read.
inline void copy_line(const uint8_t* row, uint8_t* out, int width, int pixel, int channels, bool flip) {
  if (pixel == 1 && channels == 1 && !flip) {
    std::memcpy(out, row, size_t(width));
    return;
  }
#if defined(__AVX2__)
  const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int x = 0; x < width; x += 8) {
    const int n = std::min(width - x, 8), at = flip ? width - x - n : x;
    __m256i pixels;
    if (pixel == 1) {
      const __m128i gray = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + at));
      pixels = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(gray), _mm256_set1_epi32(0x010101));
    } else {
      pixels = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 4 * at));
    }
    if (flip) pixels = _mm256_permutevar8x32_epi32(pixels, _mm256_sub_epi32(_mm256_set1_epi32(n - 1), iota));
    store_pixels(pixels, out + x * channels, width - x, channels);
  }
#else
  for (int x = 0; x < width; x++) {
    const uint8_t* from = row + (flip ? width - 1 - x : x) * pixel;
    for (int c = 0; c < channels; c++) out[x * channels + c] = from[pixel == 1 ? 0 : c];
  }
#endif
}

}  // namespace HW_ISA
}  // namespace headway
