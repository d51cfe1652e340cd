// Compiled once for each instruction set (CMakeLists.txt says with which flags), in a namespace of its name.
#include "update.h"

#include <cstring>

namespace headway {
namespace HW_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

// Sums of 128 bytes of lanes over 4 kB at a time, and these in double precision: as exact as the numbers are.
template <class T>
class Squares final {
  typedef T Vector __attribute__((vector_size(kBytes)));
  static constexpr int kVectors = 128 / kBytes, kLanes = 128 / sizeof(T);

 public:
  static constexpr int64_t kBlock = 4096 / sizeof(T);

  // of the kLanes values from x on
  inline __attribute__((always_inline)) void add(const T* x) {
    for (int i = 0; i < kVectors; i++) {
      Vector v;
      std::memcpy(&v, x + i * (kBytes / sizeof(T)), kBytes);
      lanes_[i] += v * v;
    }
  }

  inline __attribute__((always_inline)) void add(const T* x, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) add(x + i);
    for (; i < n; i++) total_ += double(x[i]) * double(x[i]);
    fold();
  }

  double total() const { return total_; }

 private:
  inline __attribute__((always_inline)) void fold() {
    T values[kLanes];
    std::memcpy(values, lanes_, sizeof values);
    double sum = 0;
    for (int i = 0; i < kLanes; i++) sum += double(values[i]);
    total_ += sum;
    std::memset(lanes_, 0, sizeof lanes_);
  }

  Vector lanes_[kVectors] = {};
  double total_ = 0;
};

template <class T>
double squares(const T* x, int64_t n) {
  Squares<T> sum;
  for (int64_t i = 0; i < n; i += sum.kBlock) sum.add(x + i, n - i < sum.kBlock ? n - i : sum.kBlock);
  return sum.total();
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <class T>
void plain(const Stretch<T>& at, int64_t n, const Momentum<T>& by) {
  T* __restrict w = at.w;
  const T* __restrict g = at.g;
  const Momentum<T> c = by;
  for (int64_t i = 0; i < n; i++) w[i] -= c.rate * (c.from_g * g[i] + c.from_w * w[i]);
}

template <class T, bool kNesterov>
void momentum(const Stretch<T>& at, int64_t n, const Momentum<T>& by) {
  T *__restrict w = at.w, *__restrict m = at.first;
  const T* __restrict g = at.g;
  const Momentum<T> c = by;
  for (int64_t i = 0; i < n; i++) {
    const T addend = c.from_g * g[i] + c.from_w * w[i], next = c.keep * m[i] + addend;
    m[i] = next;
    w[i] -= c.rate * (kNesterov ? addend + c.keep * next : next);
  }
}

template <class T>
void sum(const T* __restrict g, T* __restrict sum, int64_t n, T from_g) {
  for (int64_t i = 0; i < n; i++) sum[i] += from_g * g[i];
}

template <class T>
inline T update_of(T w, T m, T v, const Moments<T>& c) {
  return m * c.whole_m / (root(v * c.whole_v) + c.eps) + c.decay * w;
}

// The moments, and where asked the step with them; then, or at least, the squares of 4 kB while they are near.
template <class T, bool kStep>
void moments(const Stretch<T>& at, int64_t n, const Moments<T>& by, double* squares) {
  T *__restrict w = at.w, *__restrict m = at.first, *__restrict v = at.second;
  const T* __restrict g = at.g;
  const Moments<T> c = by;
  Squares<T> of_w, of_update;
  for (int64_t begin = 0; begin < n; begin += Squares<T>::kBlock) {
    const int64_t count = n - begin < Squares<T>::kBlock ? n - begin : Squares<T>::kBlock;
    alignas(64) T update[Squares<T>::kBlock];
    for (int64_t i = 0; i < count; i++) {
      const T grad = c.from_g * g[begin + i];
      const T next_m = c.beta1 * m[begin + i] + c.rest1 * grad, next_v = c.beta2 * v[begin + i] + c.rest2 * grad * grad;
      m[begin + i] = next_m;
      v[begin + i] = next_v;
      const T found = update_of(w[begin + i], next_m, next_v, c);
      if (kStep)
        w[begin + i] -= c.rate * found;
      else
        update[i] = found;
    }
    if (kStep) continue;
    of_w.add(w + begin, count);
    of_update.add(update, count);
  }
  if (kStep) return;
  squares[0] = of_w.total();
  squares[1] = of_update.total();
}

template <class T>
void moments_only(const Stretch<T>& at, int64_t n, const Moments<T>& by, double* squares) {
  moments<T, false>(at, n, by, squares);
}

template <class T>
void moments_both(const Stretch<T>& at, int64_t n, const Moments<T>& by) {
  moments<T, true>(at, n, by, nullptr);
}

template <class T>
void moments_step(const Stretch<T>& at, int64_t n, const Moments<T>& by) {
  T* __restrict w = at.w;
  const T *__restrict m = at.first, *__restrict v = at.second;
  const Moments<T> c = by;
  for (int64_t i = 0; i < n; i++) w[i] -= c.rate * update_of(w[i], m[i], v[i], c);
}

template <class T>
void sign(const Stretch<T>& at, int64_t n, const Sign<T>& by) {
  T *__restrict w = at.w, *__restrict m = at.first;
  const T* __restrict g = at.g;
  const Sign<T> c = by;
  for (int64_t i = 0; i < n; i++) {
    const T next = c.keep * m[i] + (c.from_g * g[i] + c.from_w * w[i]);
    m[i] = next;
    w[i] = c.stay * w[i] - c.rate * (T(next > 0) - T(next < 0));
  }
}

template <class T>
void leader(const Stretch<T>& at, int64_t n, const Leader<T>& by) {
  T *__restrict w = at.w, *__restrict v = at.first;
  const T* __restrict g = at.g;
  const Leader<T> c = by;
  for (int64_t i = 0; i < n; i++) {
    const T d = c.from_g * g[i] + c.from_w * w[i], next = c.beta2 * v[i] + c.rest2 * d * d;
    v[i] = next;
    w[i] -= c.rate * d / (root(next * c.whole_v) + c.eps);
  }
}

template <class T>
void transition(const Stretch<T>& at, int64_t n, const Transition<T>& by) {
  T *__restrict w = at.w, *__restrict m = at.first, *__restrict v = at.second;
  const T* __restrict g = at.g;
  const Transition<T> c = by;
  for (int64_t i = 0; i < n; i++) {
    const T d = c.from_g * g[i] + c.from_w * w[i], next = c.beta2 * v[i] + c.rest2 * d * d;
    v[i] = next;
    const T moved = c.keep * m[i] + (c.sgd + c.rmsprop / (root(next) + c.eps)) * d;
    m[i] = moved;
    w[i] -= c.rate * moved;
  }
}

void widen(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

void round(const float* __restrict from, uint16_t* __restrict to, int64_t n, uint32_t base, uint32_t key) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const uint32_t random = mix_second(mix_first(base + uint32_t(i)) ^ key) & 0xFFFF;
    const bool is_nan = int32_t(bits & 0x7FFFFFFF) > 0x7F800000;  // one that carries would become infinite, or 0
    to[i] = uint16_t(is_nan ? 0x7FC0 : (bits + random) >> 16);
  }
}

template <class T>
constexpr Update<T> kUpdate = {squares<T>,         plain<T>,        momentum<T, false>, momentum<T, true>,
                               sum<T>,             moments_only<T>, moments_step<T>,    moments_both<T>,
                               sign<T>,            leader<T>,       transition<T>};

constexpr Updates kUpdates = {kUpdate<float>, kUpdate<double>, {widen, round}};

}  // namespace

const Updates& updates() { return kUpdates; }

}  // namespace HW_ISA
}  // namespace headway
