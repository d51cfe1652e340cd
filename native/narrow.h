// State in bf16, and weights and gradients too where they are: the rules work on fp32 copies of 4 kB of each array, and
// what they have made of them is rounded stochastically. headway.optim.stochastic_rounding has the same bits.
#pragma once

#include "rules.h"

namespace headway {

class Narrow final {
 public:
  Narrow(const hw_step& s, const Conversions& c) : s_(s), c_(c) {}

  // Nothing is stored: a second pass begins from the state that the first one read.
  void first(Rule<float>& rule, int64_t i, int64_t begin, int64_t count, double sums[2]) const {
    Buffers buffers;
    for (int64_t at = begin; at < begin + count; at += kBlock) {
      const int64_t n = length(at, begin + count);
      double part[2] = {0, 0};
      rule.first(i, load(buffers, i, at, n, rule.first_reads_state()), n, part);
      for (int j = 0; j < 2; j++) sums[j] += part[j];
    }
  }

  void second(Rule<float>& rule, int64_t i, int64_t begin, int64_t count) const {
    Buffers buffers;
    for (int64_t at = begin; at < begin + count; at += kBlock) {
      const int64_t n = length(at, begin + count);
      rule.second(i, load(buffers, i, at, n, true), n, false);
      if (s_.type == HW_BF16) store(buffers.weight, s_.weight, 0, i, at, n);
      if (s_.first) store(buffers.first, s_.first, 1, i, at, n);
      if (s_.second) store(buffers.second, s_.second, 2, i, at, n);
    }
  }

 private:
  static constexpr int64_t kBlock = 1024;

  struct Buffers {
    alignas(64) float weight[kBlock], grad[kBlock], first[kBlock], second[kBlock];
  };

  static int64_t length(int64_t at, int64_t end) { return end - at < kBlock ? end - at : kBlock; }

  template <class T>
  static T* element(const uint64_t* address, int64_t i, int64_t at) {
    return reinterpret_cast<T*>(address[i]) + at;
  }

  float* widen(float* to, const uint64_t* address, int64_t i, int64_t at, int64_t n) const {
    c_.widen(element<uint16_t>(address, i, at), to, n);
    return to;
  }

  Stretch<float> load(Buffers& to, int64_t i, int64_t at, int64_t n, bool with_state) const {
    Stretch<float> found{nullptr, nullptr, nullptr, nullptr};
    if (s_.type == HW_BF16) {
      found.w = widen(to.weight, s_.weight, i, at, n);
      found.g = widen(to.grad, s_.grad, i, at, n);
    } else {
      found.w = element<float>(s_.weight, i, at);
      found.g = element<const float>(s_.grad, i, at);
    }
    if (with_state && s_.first) found.first = widen(to.first, s_.first, i, at, n);
    if (with_state && s_.second) found.second = widen(to.second, s_.second, i, at, n);
    return found;
  }

  // Random bits are those of (key, number of the step, array, element).
  void store(const float* from, const uint64_t* address, uint32_t array, int64_t i, int64_t at, int64_t n) const {
    const uint32_t number = 4 * uint32_t(number_of(s_, i)) + array;
    const uint32_t base = mix(uint32_t(s_.key[i]) ^ number), key = mix(uint32_t(s_.key[i] >> 32) ^ base);
    c_.round(from, element<uint16_t>(address, i, at), n, base + uint32_t(at), key);
  }

  static uint32_t mix(uint32_t x) { return mix_second(mix_first(x)); }

  const hw_step& s_;
  const Conversions& c_;
};

}  // namespace headway
