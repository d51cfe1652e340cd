// Hot: the horizontal pass, from lines of 16-bit RGBX to rows of the target. Portable, AVX2 and AVX-512; same bytes.
#pragma once

#include "axis.h"
#include "pixels.h"
#include "vertical.h"

namespace headway {
namespace HW_ISA {

// Output pixels go in groups of 4, source pixels in pairs, so that a multiplication of pairs of 16 bits does 2 taps of
// all 4 channels. Each output pixel reads as many source pixels as the one with the most, so lines may be read by that
// and 128 bytes beyond their end.
class Horizontal final {
 public:
  void set(Axis& axis, int bits) {
    out_ = axis.out();
    bits_ = bits;
    pairs_ = (axis.taps + 1) / 2;
    int32_t* __restrict place = place_.room(size_t(axis.padded()));
    int32_t* __restrict weights = weights_.room(size_t(axis.padded() * pairs_) * 4);
    for (int x = 0; x < axis.padded(); x++) place[x] = axis.start(x) * 4;
    for (int pair = 0; pair < pairs_; pair++) {
      const int32_t* a = axis.weights(2 * pair);
      const int32_t* b = 2 * pair + 1 < axis.taps ? axis.weights(2 * pair + 1) : nullptr;
      int32_t* group = weights + 16 * pair;
      for (int x = 0; x < axis.padded(); x += 4, group += 16 * pairs_)
        for (int i = 0; i < 4; i++)
          *reinterpret_cast<Channels*>(group + 4 * i) = Channels{} + (a[x + i] | (b ? b[x + i] << 16 : 0));
    }
#if defined(__AVX512VBMI__)
    find(axis.taps);
#endif
  }

  // Some lines, `pitch` values apart, to as many rows of the target, `out_pitch` bytes apart (negative in an image that
  // is mirrored top to bottom). Of `half` units of a line, half is what its values lack on average.
  void run(const int16_t* lines, size_t pitch, int count, int half, uint8_t* out,
           std::ptrdiff_t out_pitch, int channels) const {
#if defined(__AVX512VBMI__)
    switch (reach_) {
      case 1: return near<1, 1>(lines, pitch, count, half, out, out_pitch, channels);
      case 2: return near<2, 1>(lines, pitch, count, half, out, out_pitch, channels);
      case 3: return near<2, 2>(lines, pitch, count, half, out, out_pitch, channels);
    }
#endif
    switch (bits_ == kBits ? pairs_ : 0) {
      case 1: return far<1>(lines, pitch, count, half, out, out_pitch, channels);
      case 2: return far<2>(lines, pitch, count, half, out, out_pitch, channels);
      case 3: return far<3>(lines, pitch, count, half, out, out_pitch, channels);
      case 4: return far<4>(lines, pitch, count, half, out, out_pitch, channels);
      default: return far<0>(lines, pitch, count, half, out, out_pitch, channels);
    }
  }

  static constexpr int kBits = 14;  // of weights where taps are few, that is up to kFewTaps

 private:
  using Channels = int32_t __attribute__((vector_size(16), may_alias));

  // For taps that lie anywhere. kPairs 0: as many as there are, of weights of any bits.
  template <int kPairs>
  void far(const int16_t* lines, size_t pitch, int count, int half, uint8_t* out,
           std::ptrdiff_t out_pitch, int channels) const {
    const int bits = kPairs ? kBits : bits_;
    const int32_t start = (128 + half) << (bits - 1);
    for (int y = 0; y < count; y++, lines += pitch, out += out_pitch)
      far_line<kPairs>(lines, start, bits + kLineBits, out, channels);
  }

#if defined(__AVX2__)
  template <int kPairs>
  void far_line(const int16_t* line, int32_t start, int shift, uint8_t* out, int channels) const {
    const int pairs = kPairs ? kPairs : pairs_;
    const __m256i interleave = _mm256_broadcastsi128_si256(interleaved());
    const int32_t* place = place_.data();
    const int32_t* weights = weights_.data();
    for (int x = 0; x < out_; x += 8, weights += 32 * pairs) {
      __m256i sums[4];  // of 2 output pixels each, of 4 channels
      for (int i = 0; i < 4; i++, place += 2) {
        sums[i] = _mm256_set1_epi32(start);
        for (int pair = 0; pair < pairs; pair++) {
          const __m256i pixels = two(line + place[0] + 8 * pair, line + place[1] + 8 * pair);
          const __m256i taps = _mm256_shuffle_epi8(pixels, interleave);
          const int32_t* weight = weights + (i / 2 * pairs + pair) * 16 + i % 2 * 8;
          const __m256i products = _mm256_madd_epi16(taps, _mm256_load_si256(reinterpret_cast<const __m256i*>(weight)));
          sums[i] = _mm256_add_epi32(sums[i], products);
        }
        sums[i] = _mm256_srai_epi32(sums[i], shift);
      }
      const __m256i low = _mm256_packs_epi32(sums[0], sums[1]), high = _mm256_packs_epi32(sums[2], sums[3]);
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      const __m256i pixels = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
      store_pixels(pixels, out + size_t(x) * size_t(channels), out_ - x, channels);
    }
  }
#else
  template <int kPairs>
  void far_line(const int16_t* line, int32_t start, int shift, uint8_t* out, int channels) const {
    const int pairs = kPairs ? kPairs : pairs_;
    for (int x = 0; x < out_; x++) {
      const int16_t* from = line + place_[size_t(x)];
      const int32_t* weights = weights_.data() + (x / 4 * pairs * 4 + x % 4) * 4;
      Channels sum = Channels{} + start;
      for (int pair = 0; pair < pairs; pair++, from += 8, weights += 16)
        for (int c = 0; c < 4; c++) sum[c] += from[c] * int16_t(*weights) + from[c + 4] * (*weights >> 16);
      for (int c = 0; c < channels; c++) *out++ = uint8_t(sum[c] >> shift);
    }
  }
#endif

#if defined(__AVX2__)
  // Words of two pixels: both reds, both greens...
  static __m128i interleaved() { return _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15); }

  static __m256i two(const int16_t* a, const int16_t* b) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
#endif

#if defined(__AVX512VBMI__)
  // Up to a scale of 2 the taps of a group begin within 64 bytes: one permutation finds a pair of them for all four.
  void find(int taps) {
    const int groups = (out_ + 15) / 16 * 4;
    int32_t* base = base_.room(size_t(groups));
    uint8_t* find = find_.room(size_t(groups) * 64);
    int apart = 0;
    for (int group = 0; group < groups; group++) {
      const int32_t* at = place_.data() + 4 * group;
      base[group] = std::min(at[0], at[3]);
      apart = std::max(apart, std::max(at[0], at[3]) - base[group]);
      for (int i = 0; i < 4; i++) {
        const __m128i first = _mm_set1_epi8(char(2 * (at[i] - base[group])));
        _mm_store_si128(reinterpret_cast<__m128i*>(find + 64 * group + 16 * i), _mm_add_epi8(first, interleaved()));
      }
    }
    const bool close = apart + 4 * taps <= 32;
    reach_ = pairs_ > 2 || apart > 24 ? 0 : pairs_ == 1 ? 1 : close ? 2 : 3;
  }

  // kLoads 1: all taps of a group lie within 64 bytes. Weights stay in registers for all lines. That makes 224 lines of
  // 224 pixels at a scale of 1.3 take 43,000 cycles on Zen 5, where far() takes 97,000.
  template <int kPairs, int kLoads>
  void near(const int16_t* lines, size_t pitch, int count, int half, uint8_t* out,
           std::ptrdiff_t out_pitch, int channels) const {
    const __m512i start = _mm512_set1_epi32((128 + half) << (kBits - 1));
    for (int x = 0; x < out_; x += 16) {
      __m512i weights[4][kPairs], finds[4][kPairs];
      const int16_t* from[4];
      for (int i = 0; i < 4; i++) {
        const int group = x / 4 + i;
        from[i] = lines + base_[size_t(group)];
        for (int pair = 0; pair < kPairs; pair++) {
          weights[i][pair] = _mm512_load_si512(&weights_[size_t(16 * (kPairs * group + pair))]);
          const __m512i find = _mm512_load_si512(&find_[size_t(64 * group)]);
          finds[i][pair] = kLoads > 1 ? find : _mm512_add_epi8(find, _mm512_set1_epi8(char(16 * pair)));
        }
      }
      const __mmask64 bytes = mask(x, channels);
      uint8_t* to = out + size_t(x) * size_t(channels);
      for (int y = 0; y < count; y++, to += out_pitch) {
        __m512i sums[4];
        for (int i = 0; i < 4; i++) {
          sums[i] = start;
          const __m512i first = _mm512_loadu_si512(from[i]);
          for (int pair = 0; pair < kPairs; pair++) {
            const __m512i words = kLoads > 1 && pair ? _mm512_loadu_si512(from[i] + 8 * pair) : first;
            const __m512i taps = _mm512_permutexvar_epi8(finds[i][pair], words);
            sums[i] = _mm512_add_epi32(sums[i], _mm512_madd_epi16(taps, weights[i][pair]));
          }
          from[i] += pitch;
        }
        store(sums, to, channels, bytes);
      }
    }
  }

  // The bytes of the block of 16 pixels from x on.
  __mmask64 mask(int x, int channels) const {
    return _bzhi_u64(~uint64_t(0), unsigned(std::min(out_ - x, 16) * channels));
  }

  // Sums of 4 groups become pixels: byte i of each 32 bits is of group i, then all are put in order.
  static void store(const __m512i* sums, uint8_t* out, int channels, __mmask64 mask) {
    alignas(64) static constexpr struct Order {
      uint8_t three[64]{}, one[64]{};
      constexpr Order() {
        for (int x = 0; x < 16; x++) {
          for (int c = 0; c < 3; c++) three[3 * x + c] = uint8_t((x % 4 * 4 + c) * 4 + x / 4);
          one[x] = uint8_t(x % 4 * 16 + x / 4);
        }
      }
    } kOrder;
    constexpr unsigned kShift = kBits + kLineBits;
    constexpr int kOr = 0xf8;  // a | (b & c)
    const auto byte = [](int i) { return _mm512_set1_epi32(int(0xffu << 8 * i)); };
    __m512i bytes = _mm512_srli_epi32(sums[0], kShift);
    bytes = _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi32(sums[1], kShift - 8), byte(1), kOr);
    bytes = _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi32(sums[2], kShift - 16), byte(2), kOr);
    bytes = _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(sums[3], 24 - kShift), byte(3), kOr);
    const __m512i order = _mm512_load_si512(channels == 1 ? kOrder.one : kOrder.three);
    _mm512_mask_storeu_epi8(out, mask, _mm512_permutexvar_epi8(order, bytes));
  }

  int reach_ = 0;         // 1 or 2: pairs of taps, in one load; 3: in two; 0: farther
  Buffer<int32_t> base_;  // of each group, in the line
  Buffer<uint8_t> find_;  // [group][64]: bytes of its first pairs of taps, from its base on
#endif

  int out_ = 0, bits_ = 0, pairs_ = 0;
  Buffer<int32_t> place_;    // of each output pixel's first tap, in the line
  Buffer<int32_t> weights_;  // [group][pair][output pixel][channel], a pair of 16-bit weights each
};

}  // namespace HW_ISA
}  // namespace headway
