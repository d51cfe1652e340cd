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

// Eight 16-bit numbers in each lane; unpacking and packing stay within a lane, as the instructions do.
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
#elif defined(__AVX2__)
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
#else
constexpr int LANES = 1;
struct V {
  int16_t n[8];
};
struct W {  // the same 16 bytes as four 32-bit numbers
  int32_t n[4];
};
template <class To, class From> inline To as(From a) {
  To b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}
template <class F> inline V each16(F f) {
  V out;
  for (int i = 0; i < 8; i++) out.n[i] = int16_t(f(i));
  return out;
}
template <class F> inline V each32(F f) {
  W out;
  for (int i = 0; i < 4; i++) out.n[i] = int32_t(f(i));
  return as<V>(out);
}
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline V set16(int x) { return each16([=](int) { return x; }); }
inline V set32(int x) { return each32([=](int) { return x; }); }
inline V pair(int a, int b) { return each16([=](int i) { return i & 1 ? b : a; }); }
inline V add16(V a, V b) { return each16([=](int i) { return a.n[i] + b.n[i]; }); }
inline V sub16(V a, V b) { return each16([=](int i) { return a.n[i] - b.n[i]; }); }
inline V mul16(V a, V b) { return each16([=](int i) { return a.n[i] * b.n[i]; }); }
inline uint32_t word(V a, int i) { return uint32_t(as<W>(a).n[i]); }  // unsigned, as vectors wrap
inline V add32(V a, V b) { return each32([=](int i) { return word(a, i) + word(b, i); }); }
inline V sub32(V a, V b) { return each32([=](int i) { return word(a, i) - word(b, i); }); }
inline V madd(V a, V b) {
  return each32([=](int i) {
    return uint32_t(a.n[2 * i] * b.n[2 * i]) + uint32_t(a.n[2 * i + 1] * b.n[2 * i + 1]);
  });
}
template <int N> inline V shift32(V a) { return each32([=](int i) { return as<W>(a).n[i] >> N; }); }
struct Bytes {
  uint8_t n[16];
};
// Elements of `size` bytes, alternating, of the lower (0) or upper (8) halves.
inline V unpack(V a, V b, int size, int half) {
  Bytes x = as<Bytes>(a), y = as<Bytes>(b), out;
  for (int i = 0; i < 16; i++) {
    int element = i / size, at = half + element / 2 * size + i % size;
    out.n[i] = element & 1 ? y.n[at] : x.n[at];
  }
  return as<V>(out);
}
inline V low8(V a, V b) { return unpack(a, b, 1, 0); }
inline V high8(V a, V b) { return unpack(a, b, 1, 8); }
inline V low16(V a, V b) { return unpack(a, b, 2, 0); }
inline V high16(V a, V b) { return unpack(a, b, 2, 8); }
inline V low32(V a, V b) { return unpack(a, b, 4, 0); }
inline V high32(V a, V b) { return unpack(a, b, 4, 8); }
inline V low64(V a, V b) { return unpack(a, b, 8, 0); }
inline V high64(V a, V b) { return unpack(a, b, 8, 8); }
inline int clamp(int x, int limit) { return x < -limit ? -limit : x > limit - 1 ? limit - 1 : x; }
inline V pack32(V a, V b) {
  return each16([=](int i) { return clamp(as<W>(i < 4 ? a : b).n[i & 3], 32768); });
}
inline V pack16(V a, V b) {
  Bytes out;
  for (int i = 0; i < 16; i++) out.n[i] = uint8_t(clamp((i < 8 ? a : b).n[i & 7], 128));
  return as<V>(out);
}
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
#if defined(__AVX2__)
    __m128i rows = lane<L>(w[i]);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + size_t(2 * i) * stride), rows);
    _mm_storeh_pd(reinterpret_cast<double*>(out + size_t(2 * i + 1) * stride), _mm_castsi128_pd(rows));
#else
    std::memcpy(out + size_t(2 * i) * stride, &w[i].n[0], 8);
    std::memcpy(out + size_t(2 * i + 1) * stride, &w[i].n[4], 8);
#endif
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
#elif defined(__AVX2__)
  for (V& x : w) x = _mm256_xor_si256(x, middle);
  store_lane<0>(w, out[0], stride[0]), store_lane<1>(w, out[1], stride[1]);
#else
  for (V& x : w) x = each16([&](int i) { return x.n[i] ^ middle.n[i]; });
  store_lane<0>(w, out[0], stride[0]);
#endif
}

}  // namespace HW_ISA
}  // namespace headway
