// What a step does to one stretch of memory. Compiled once for each instruction set; all of them give the same bits:
// sums run in the same lanes, and no product is fused with a sum.
#pragma once

#include <cstdint>

namespace headway {

// w, g and the state of a parameter, from its first element on.
template <class T>
struct Stretch {
  T* w;
  const T* g;
  T* first;
  T* second;
};

// m = keep * m + (from_g * g + from_w * w); w -= rate * m, or with Nesterov's momentum rate * (the addend + keep * m).
template <class T>
struct Momentum {
  T keep, from_g, from_w, rate;
};

// m and v are moments of g * from_g, with rest = 1 - beta before it was rounded; w -= rate * (m * whole_m / (sqrt(v * whole_v) + eps) + decay * w).
template <class T>
struct Moments {
  T from_g, beta1, rest1, beta2, rest2, whole_m, whole_v, eps, decay, rate;
};

// m = keep * m + (from_g * g + from_w * w); w = stay * w - rate * sign(m).
template <class T>
struct Sign {
  T keep, from_g, from_w, stay, rate;
};

// d = from_g * g + from_w * w; v is the second moment of d; w -= rate * d / (sqrt(v * whole_v) + eps).
template <class T>
struct Leader {
  T from_g, from_w, beta2, rest2, whole_v, eps, rate;
};

// d = from_g * g + from_w * w; v is the second moment of d; m = keep * m + (sgd + rmsprop / (sqrt(v) + eps)) * d;
// w -= rate * m.
template <class T>
struct Transition {
  T from_g, from_w, keep, beta2, rest2, sgd, rmsprop, eps, rate;
};

template <class T>
struct Update {
  double (*squares)(const T* x, int64_t n);
  void (*plain)(const Stretch<T>&, int64_t n, const Momentum<T>&);  // without a buffer: keep is 0
  void (*momentum)(const Stretch<T>&, int64_t n, const Momentum<T>&);
  void (*nesterov)(const Stretch<T>&, int64_t n, const Momentum<T>&);
  void (*sum)(const T* g, T* sum, int64_t n, T from_g);
  void (*moments)(const Stretch<T>&, int64_t n, const Moments<T>&, double squares[2]);  // of w, and of its update
  void (*moments_step)(const Stretch<T>&, int64_t n, const Moments<T>&);
  void (*moments_both)(const Stretch<T>&, int64_t n, const Moments<T>&);
  void (*sign)(const Stretch<T>&, int64_t n, const Sign<T>&);
  void (*leader)(const Stretch<T>&, int64_t n, const Leader<T>&);
  void (*transition)(const Stretch<T>&, int64_t n, const Transition<T>&);
};

// bf16 and back. `round` goes up with the probability that keeps the mean: 16 random bits, of (base + i, key), are added
// below the last digit. NaN stays NaN.
struct Conversions {
  void (*widen)(const uint16_t* from, float* to, int64_t n);
  void (*round)(const float* from, uint16_t* to, int64_t n, uint32_t base, uint32_t key);
};

struct Updates {
  Update<float> fp32;
  Update<double> fp64;
  Conversions bf16;
};

// The two halves of a one-to-one mixing of 32 bits: Wellons 2018, "Prospecting for hash functions", lowbias32.
inline uint32_t mix_first(uint32_t x) {
  x ^= x >> 16;
  return x * 0x7FEB352Du;
}
inline uint32_t mix_second(uint32_t x) {
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

// For the instruction set of make_worker().
const Updates& updates();

}  // namespace headway
