// Hot: copies one raw sample, moved and mirrored, as headway.data.ops.move.flip_and_translate does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "types.h"

namespace headway {
namespace HW_ISA {

// The border is filled by reflection that does not repeat the outermost pixel. Shifts are less than the size; of others
// only memory is safe.
inline int reflect(int index, int size) {
  return std::clamp(std::abs(size - 1 - std::abs(size - 1 - index)), 0, size - 1);
}

// The row of the sample that is row `index` of the mirrored one.
inline int source_row(int index, int height, Flip flip) {
  const int row = reflect(index, height);
  return flip.vertical ? height - 1 - row : row;
}

#if defined(__AVX512VBMI__)
// Rows of at most 128 bytes: all that happens to one is a permutation of its bytes, the same for every row.
inline bool gather_small(const uint8_t* sample, bool planar, int height, int width, int channels, int down, int right,
                         Flip flip, uint8_t* out) {
  const int bytes = width * channels;
  const bool planes = planar && channels > 1;
  if (bytes > 128 || (planes && width > 32)) return false;
  alignas(64) uint8_t from[128];
  const int16_t last = int16_t(width - 1), shift = int16_t(std::clamp(right, -999, 999));
  const int16_t pixel_step = int16_t(planes ? 1 : channels), channel_step = planes ? 32 : 1;
  for (int16_t i = 0; i < 128; i++) {
    const int16_t x = int16_t(channels == 1 ? i : (i * 171) >> 9), c = int16_t(i - x * channels);  // i / 3 up to 127
    const int16_t beyond = int16_t(last - (x + shift)), inside = int16_t(last - std::max(beyond, int16_t(-beyond)));
    const int16_t column = std::min(std::max(inside, int16_t(-inside)), last);
    from[i] = uint8_t((flip.horizontal ? last - column : column) * pixel_step + c * channel_step);
  }
  const __m512i low_from = _mm512_load_si512(from), high_from = _mm512_load_si512(from + 64);
  const auto mask = [](int n) { return _bzhi_u64(~uint64_t(0), unsigned(std::max(n, 0))); };
  const __mmask64 low_mask = mask(std::min(bytes, 64)), high_mask = mask(bytes - 64);
  const size_t plane = size_t(height) * size_t(width);
  for (int r = 0; r < height; r++, out += bytes) {
    const uint8_t* row = sample + size_t(source_row(r + down, height, flip)) * size_t(planes ? width : bytes);
    __m512i low, high;
    if (planes) {
      const __mmask32 part = __mmask32(mask(width));
      low = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(part, row));
      low = _mm512_inserti64x4(low, _mm256_maskz_loadu_epi8(part, row + plane), 1);
      high = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(part, row + 2 * plane));
    } else {
      low = _mm512_maskz_loadu_epi8(low_mask, row);
      high = _mm512_maskz_loadu_epi8(high_mask, row + 64);
    }
    _mm512_mask_storeu_epi8(out, low_mask, _mm512_permutex2var_epi8(low, low_from, high));
    if (high_mask) _mm512_mask_storeu_epi8(out + 64, high_mask, _mm512_permutex2var_epi8(low, high_from, high));
  }
  return true;
}
#endif

// n pixels of 3 bytes in the reverse order; `last` is the first one to be copied.
inline void reverse_rgb(const uint8_t* last, uint8_t* out, int n) {
  int x = 0;
#if defined(__AVX2__)
  const __m128i order = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0);
  for (; x + 6 <= n; x += 5) {  // one byte more is read and written than the 5 pixels have
    const __m128i five = _mm_loadu_si128(reinterpret_cast<const __m128i*>(last - 3 * x - 13));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * x), _mm_shuffle_epi8(five, order));
  }
#endif
  for (; x < n; x++) std::memcpy(out + 3 * x, last - 3 * x, 3);
}

// Copies a raw sample of 1 or 3 channels, uint8 [height, width, channels] or, planar, [channels, height, width], to
// [height, width, channels]: mirrored as flip says, and then pixel (r, x) is what lies at (r + down, x + right).
inline void gather(const uint8_t* sample, bool planar, int height, int width, int channels, int down, int right,
                   Flip flip, uint8_t* out) {
#if defined(__AVX512VBMI__)
  if (gather_small(sample, planar, height, width, channels, down, right, flip, out)) return;
#endif
  if (channels == 1) planar = false;
  const size_t pixel = planar ? 1 : size_t(channels), line = size_t(width) * size_t(channels);
  const size_t plane = planar ? size_t(height) * size_t(width) : 1;
  const int low = std::clamp(-right, 0, width), high = std::clamp(width - right, low, width), n = high - low;
  // The column that is copied to `low`; the next ones follow, or those before it in a mirrored row.
  const int first = flip.horizontal ? width - 1 - low - right : low + right;
  const std::ptrdiff_t step = flip.horizontal ? -1 : 1;
  for (int r = 0; r < height; r++, out += line) {
    const uint8_t* row = sample + size_t(source_row(r + down, height, flip)) * size_t(width) * pixel;
    const auto border = [&](int x, int end) {
      for (; x < end; x++) {
        const int column = reflect(x + right, width);
        const uint8_t* from = row + size_t(flip.horizontal ? width - 1 - column : column) * pixel;
        for (int c = 0; c < channels; c++) out[size_t(x) * size_t(channels) + size_t(c)] = from[size_t(c) * plane];
      }
    };
    border(0, low);
    uint8_t* to = out + size_t(low) * size_t(channels);
    const uint8_t* from = row + (n ? size_t(first) * pixel : 0);
    if (planar && channels == 3)
      for (int x = 0; x < n; x++, from += step) *to++ = from[0], *to++ = from[plane], *to++ = from[2 * plane];
    else if (!planar && !flip.horizontal)
      std::memcpy(to, from, size_t(n) * size_t(channels));
    else if (channels == 3)
      reverse_rgb(from, to, n);
    else
      std::reverse_copy(from + 1 - n, from + 1, to);
    border(high, width);
  }
}

}  // namespace HW_ISA
}  // namespace headway
